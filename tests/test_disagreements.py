"""Where papers and released code disagree, D-01 to D-14, D-46, D-48 and D-50: recency, H2O, TOVA, RoCo, EasyKV.

The default is the one, the option the other: every option is compared with a plain formulation in float64, one row
after the other (`references/policies.py`), and with a default that does something else.
"""

import dataclasses
import functools
import inspect
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.scoring.scores import Accumulated
from kvjax.sizes.budget import Share
from tests import helpers
from tests.one_layer import BUDGET, PROMPT, K, M, P, differs, history, k, layer, moments, q, sums, v
from tests.references.policies import accumulating, best, keep, replay

ROOT = pathlib.Path(kvjax.__file__).parent


def test_every_number_is_documented_and_tested():
    register = {f"{n:02}" for n in range(1, 51)}
    read = lambda paths: "\n".join(p.read_text() for p in paths)
    documented = read([*ROOT.rglob("*.py"), ROOT.parent / "README.md"])
    tested = re.findall(
        r"^def test_(d\d\d\w*)", read(pathlib.Path(__file__).parent.glob("test_disagreements*.py")), re.M
    )
    assert set(re.findall(r"D-(\d\d)", documented)) == register
    assert {n for name in tested for n in re.findall(r"(?:^|_)d(\d\d)", name)} == register


# --- H2O, AQAS, Scissorhands ---


@pytest.mark.slow
def test_the_list_of_disagreements_names_what_there_is():
    """Every number once; every option is a policy, and differs from the method's default where it is the other one."""
    lines = (pathlib.Path(kvjax.__file__).parent / "methods" / "README.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| D-")]
    assert [row[0] for row in rows] == [f"D-{i:02}" for i in range(1, 51)]
    names = {"methods": methods, "kvjax": kvjax, "math": math}
    for number, _, ships, other in rows:
        calls = re.findall(r"`((?:kvjax|methods)\.[^`]+)`", other)
        assert calls or other.startswith("-"), number
        for call in calls:
            policy = eval(call, names)
            assert isinstance(policy, kvjax.Policy), call
            plain = re.match(r"methods\.(\w+)\((64|\d)", call)
            if plain and plain[1] not in ("easykv", "nacl_llama3", "window") and number != "D-44":
                assert policy != getattr(methods, plain[1])(64), call
        for call in re.findall(r"`(methods\.[^`]+)`", ships):
            assert isinstance(eval(call, names), kvjax.Policy)


def test_d01_h2o_read_step_by_step():
    """Greedy eviction while the text is read, as a mask: softmaxes over everything, scores of the heavy alone."""
    heavy, recent = 4, 3
    policy = methods.h2o(heavy + recent, recent=recent, prefill="stepwise_mask")
    score, wanted = np.zeros((K, M)), []
    for i in range(M):
        p = layer.group(layer.rows(i, [range(i + 1)] * K))
        shown = []
        for g in range(K):
            stays = range(i + 1) if i < heavy else [*best(score[g], heavy - 1, range(i)), i]
            shown.append(sorted({*stays, *range(max(i - recent, 0), i + 1)}))
            score[g] = np.where(np.isin(np.arange(M), stays), score[g] + p[g], 0)
        wanted.append(shown)
    seen = moments(policy, block=1)
    assert [row[0] for row in seen.read] == wanted
    by_position = np.asarray(seen.kv.memory[0])[0][:, np.argsort(np.asarray(seen.kv.pos[0, 0]))]
    np.testing.assert_allclose(by_position, score, atol=1e-5)
    assert [row[0] for row in moments(methods.h2o(heavy + recent, recent=recent)).read] != wanted[PROMPT:]
    with pytest.raises(ValueError, match="decides what the next one reads, but evict_layer reads 22 tokens at once"):
        kvjax.evict_layer(policy, q, k, v)


@pytest.mark.parametrize(
    ("compat", "block", "message"),
    [
        ({"prefill": "stepwise_mask"}, None, "block=None reads 12 tokens otherwise than one by one; use block=1"),
        ({"prefill": "stepwise_mask"}, 4, "block=4 reads 12 tokens otherwise"),
        ({"compat": "h2o_hh_mask"}, 4, "looks at the whole prompt at once, but block=4 reads 12 tokens in parts"),
    ],
)
def test_d01_d02_simulations_refuse_other_readings(tiny, compat, block, message):
    model, params = tiny
    policy = methods.h2o(6, **compat)
    for wrapped in (policy, kvjax.chain(policy, methods.window(8)), kvjax.partition({0: policy}, (0, 0, 0))):
        with pytest.raises(ValueError, match=message):
            kvjax.generate(model, params, np.zeros((1, 12), np.int32), policy=wrapped, max_new_tokens=2, block=block)


def test_d02_h2o_with_the_mask_of_the_simulation():
    """The coming token counts as recent, so one token is lost at every step and comes back at the next."""
    recent = 3
    sums, wanted = layer.group(P).sum(1), []
    sums = np.pad(sums, ((0, 0), (0, M - PROMPT)))
    for i in range(PROMPT, M):
        shown = [
            sorted({*best(sums[g], BUDGET - recent, range(i - recent)), *range(i + 1 - recent, i + 1)})
            for g in range(K)
        ]
        sums = sums + layer.group(layer.rows(i, shown))
        wanted.append(shown)
        assert all(i - recent not in tokens for tokens in shown)
    read = [row[0] for row in moments(methods.h2o(BUDGET, recent=recent, compat="h2o_hh_mask")).read]
    assert read == wanted
    default = [row[0] for row in moments(methods.h2o(BUDGET, recent=recent)).read]
    assert all(i - recent in tokens for i, row in enumerate(default, PROMPT) for tokens in row)
    everything = moments(methods.h2o(BUDGET, recent=0, compat="h2o_hh_mask")).read
    assert everything[-1][0] == [list(range(M))] * K


def above(threshold):
    return lambda i, p, live: np.stack([p[g] > threshold(i, live[g]) for g in range(K)]).astype(float)


def test_d03_aqas():
    plain = sums(element=above(lambda i, live: 1 / len(live)), recent=BUDGET // 2)
    assert history(methods.aqas(BUDGET)) == plain
    assert history(methods.h2o(BUDGET)) != plain


def scissorhands(theta, window, recent, drop, element=None):
    """Counts over the last rows; a cache over its budget loses `drop` tokens."""
    rows = []

    def step(i, p, live):
        rows.append(above(lambda i, tokens: theta(i, tokens))(i, layer.group(p), live))
        score = np.sum(rows[-window:], axis=0)
        size = BUDGET if i < PROMPT else BUDGET + 1 - drop
        due = i == PROMPT - 1 or len(live[0]) > BUDGET
        return [keep(score[g], live[g], i + 1, size, recent=recent) if due else live[g] for g in range(K)]

    return replay(layer, PROMPT, step)


@pytest.mark.slow
def test_d04_scissorhands_keeps_recent_tokens_and_high_counts():
    make = functools.partial(methods.scissorhands, BUDGET, history=9, recent=2, drop=2)
    by_position = scissorhands(lambda i, live: 1 / (i + 1), 9, 2, 2)
    assert history(make()) == scissorhands(lambda i, live: 1 / len(live), 9, 2, 2)
    differs(make(theta="1/position"), make(), by_position)
    literal = [list(range(n - 2, n)) for n in range(PROMPT, M)]  # recent tokens alone
    assert all(step[0] != only for step, only in zip(history(make()), literal, strict=False))


def test_sums_decay_and_what_is_added_is_damped():
    """Token by token, with a budget that holds everything."""
    total = np.zeros((K, M))
    for i in range(M):
        total = 0.7 * total + 0.4 * layer.group(layer.rows(i, [range(i + 1)] * K))
    policy = kvjax.Evict(Accumulated(kvjax.Observe(), decay=0.7, damping=0.4), M, when=kvjax.every_step())
    kv = moments(policy, block=1).kv
    np.testing.assert_allclose(np.asarray(kv.memory[0].score)[0][:, np.argsort(kv.pos[0, 0])], total, atol=1e-5)


@pytest.mark.slow
def test_d50_scissorhands_with_decayed_sums():
    recent, drop, decay = 2, 2, 0.8
    total = np.zeros((K, M))

    def step(i, p, live):
        nonlocal total
        total = total * (decay if i >= PROMPT else 1) + layer.group(p)
        size = BUDGET if i < PROMPT else BUDGET + 1 - drop
        due = i == PROMPT - 1 or len(live[0]) > BUDGET
        return [keep(total[g], live[g], i + 1, size, recent=recent) if due else live[g] for g in range(K)]

    make = functools.partial(methods.scissorhands, BUDGET, recent=recent, drop=drop)
    differs(make(element="p", decay=decay), make(), replay(layer, PROMPT, step))


# --- positions ---


@pytest.mark.slow
def test_d05_random_runs():
    """One contiguous run, the same in all heads and layers, and another at every eviction."""
    gone = lambda policy, layer: [
        sorted(set(range(PROMPT)) - set(helpers.kept(selection, head=g)))
        for selection in [kvjax.evict_layer(policy, *(x[:, :, :PROMPT] for x in (q, k, v)), layer=layer, num_layers=2)]
        for g in range(K)
    ]
    run = methods.random(BUDGET, random_mode="run", sinks=2)
    (first, *others) = [*gone(run, 0), *gone(run, 1)]
    assert first == list(range(first[0], first[0] + PROMPT - BUDGET))
    assert others == [first] * 3
    independent = [*gone(methods.random(BUDGET, sinks=2), 0), *gone(methods.random(BUDGET, sinks=2), 1)]
    assert len({tuple(x) for x in independent}) == 4
    shared = gone(methods.random(BUDGET, shared_heads=True), 0)
    assert shared[0] == shared[1]
    ctx = helpers.context(helpers.site(), length=[8, 16], prompt_length=[24, 24])
    same = dataclasses.replace(ctx, keys=ctx.keys[jnp.asarray([0, 0])])
    draws = same.uniform(jnp.zeros((2, 1, 1), jnp.int32))
    assert draws[0] != draws[1], "two blocks of one prompt must not draw the same"


@pytest.mark.slow
def test_d05_every_block_draws_its_run():
    """While a prompt is read in blocks; only the newest token is protected."""
    key, live, block = jax.random.key(3), [], 3
    for length in range(PROMPT % block, PROMPT + 1, block):
        live = [*live, *range(max(length - block, 0), length)]
        excess = len(live) - BUDGET
        if excess > 0:
            u = float(jax.random.uniform(jax.random.fold_in(key, jnp.int32(length - PROMPT))))
            first = int(u * (len(live) - 1 - excess + 1))
            live = live[:first] + live[first + excess :]
    seen = helpers.replay(methods.random(BUDGET, random_mode="run"), q, k, v, PROMPT, key=key[None], block=block)
    assert seen.live[0][0] == [live] * K


@pytest.mark.slow
def test_d06_window_over_generated_tokens():
    scope = [[[*range(PROMPT), *range(max(PROMPT, n - 3), n)]] * K for n in range(PROMPT, M + 1)]
    differs(methods.window(3, scope="generated"), methods.window(3), scope)
    sinks = [[[0, 1, 2, 3, *range(n - 3, n)]] * K for n in range(PROMPT, M + 1)]
    differs(methods.window(BUDGET, sinks=4), methods.window(BUDGET), sinks)
    assert history(methods.window(BUDGET)) == [[list(range(n - BUDGET, n))] * K for n in range(PROMPT, M + 1)]


def test_d07_dilated_windows():
    """A mask over what a plain window holds; anchored to a grid, what can be evicted."""
    make = functools.partial(methods.dilated_window, BUDGET, dilation=1)
    assert history(make()) == history(methods.window(BUDGET))
    read = [row[0] for row in moments(make()).read]
    assert read == [[[j for j in range(i - BUDGET, i + 1) if (i - j) % 2 == 0]] * K for i in range(PROMPT, M)]
    grid = [
        [sorted({n - 1, *[j for j in range(0, n, 2) if j != n - 1][-BUDGET + 1 :]})] * K for n in range(PROMPT, M + 1)
    ]
    differs(make(mode="anchored"), make(), grid)


# --- TOVA, MAS, RoCo ---


def tova(reduce, **protect):
    def step(i, p, live):
        score = reduce(p)
        return [
            keep(score[g], live[g], i + 1, BUDGET, **protect) if len(live[g]) > BUDGET else live[g] for g in range(K)
        ]

    return replay(layer, PROMPT, step)


def test_d08_tova_may_drop_the_newest_token():
    everywhere = lambda p: np.repeat(p.mean(0, keepdims=True), K, axis=0)
    assert history(methods.tova(BUDGET)) == tova(everywhere)
    differs(methods.tova(BUDGET, protect_last=1), methods.tova(BUDGET), tova(everywhere, recent=1))


def test_d09_tova_by_head_with_sinks_and_recent():
    plain = tova(layer.group, sinks=2, recent=2)
    differs(methods.tova(BUDGET, head_mode="per_kv_head", sinks=2, protect_last=2), methods.tova(BUDGET), plain)
    differs(methods.tova(BUDGET, head_mode="per_kv_head"), methods.tova(BUDGET), tova(layer.group))


def counts(i, count_self=True, prefix=0):
    pos = np.arange(M)
    return np.maximum(i + 1 - np.maximum(pos, prefix) - (pos >= prefix) * (not count_self), 1)


def without_self(i, p, live):
    return p * (np.arange(M) != i)


def test_d10_means_without_the_own_row():
    final = lambda i, total: np.where(np.arange(M) == i, np.inf, total / counts(i, False))
    assert history(methods.mas(BUDGET)) == sums(final=lambda i, total: total / counts(i))
    differs(methods.mas(BUDGET, count_self=False), methods.mas(BUDGET), sums(element=without_self, final=final))


def roco(size, *, recent=0, sinks=0, count_self=True):
    """Means rank; the largest deviations, protected tokens among them, stay."""
    squares = np.zeros((K, M))
    total = np.zeros((K, M))

    def step(i, p, live):
        nonlocal squares, total
        p = layer.group(p) if count_self else without_self(i, layer.group(p), live)
        total, squares = total + p, squares + p**2
        mean = total / counts(i, count_self)
        std = np.sqrt(np.maximum(squares / counts(i, count_self) - mean**2, 0))
        mean = mean if count_self else np.where(np.arange(M) == i, np.inf, mean)
        kept = []
        for g in range(K):
            fixed = {j for j in live[g] if j < sinks or j > i - recent}
            safe = fixed | set(best(std[g], size(BUDGET) - len(fixed), live[g] - fixed))
            kept.append(keep(mean[g], live[g], i + 1, BUDGET, safe=safe) if len(live[g]) > BUDGET else live[g])
        return kept

    return replay(layer, PROMPT, step)


def test_d10_deviations_without_the_own_row():
    make = functools.partial(methods.roco, BUDGET, protect_last=0)
    assert history(make()) == roco(lambda b: b // 2)
    differs(make(count_self=False), make(), roco(lambda b: b // 2, count_self=False))


def test_d12_roco_protects_positions():
    half = lambda b: b // 2
    assert history(methods.roco(BUDGET)) == roco(half, recent=BUDGET // 4)
    differs(methods.roco(BUDGET, protect_last=2, sinks=1), methods.roco(BUDGET), roco(half, recent=2, sinks=1))
    differs(methods.roco(BUDGET, protect_last=0), methods.roco(BUDGET), roco(half))


@pytest.mark.parametrize("count_self", [True, False])
def test_d46_rows_of_the_dense_prefix(count_self):
    prefix, pos = 6, np.arange(M)
    counted = lambda i, p, live: p * (i >= prefix) * (count_self | (pos != i))
    mean = lambda i, total: total / counts(i, count_self, prefix)
    final = lambda i, total: mean(i, total) if count_self else np.where(pos == i, np.inf, mean(i, total))
    make = functools.partial(methods.mas, BUDGET, count_self=count_self)
    differs(make(ignore_prefix=prefix), make(), sums(element=counted, final=final))
    assert history(methods.roco(BUDGET, ignore_prefix=prefix)) != history(methods.roco(BUDGET))


# --- EasyKV ---


def test_d11_the_scopes_of_the_released_code():
    """Live tokens less evictable ones, at 100 tokens: half of them, or what `int` makes of 0.3 and 0.1."""
    n = np.array([400])
    size = lambda count: int(kvjax.sizes.budget.as_count(count, "scope").table(n, np.array([100]))[0])
    assert size(methods.roco(100).scope.size) == 50
    decoding = methods.easykv("roco", 100, mode="decoding").scope
    assert size(decoding.size) - n[0] == int(0.3 * 100) + 1
    both = methods.easykv("roco", 100, mode="encoding_decoding", stride=8).scope
    assert 101 - size(both.decode_size) == 108 - int(0.3 * 108)
    assert 108 - size(both.size) == max(108 - int(0.1 * 108) - 4, 8)


def generated_only(i, p, live):
    return p * (np.arange(M) >= PROMPT)


def test_d13_the_prompt_outside_the_budget():
    """The prompt stays; its columns count for nothing; generated tokens compete for the budget."""
    plain = replay(layer, PROMPT, accumulating(layer, PROMPT + 3, element=generated_only, sinks=PROMPT))
    differs(methods.easykv("h2o", 3, mode="decoding"), methods.h2o(3), plain)
    window = methods.window(3, scope="generated")
    assert history(methods.easykv("recency", 3, mode="decoding")) == history(window) != history(methods.window(3))


def test_d14_the_block_loop_overspends():
    target = lambda n, budget, **kw: (
        methods.easykv("mas", budget, mode="encoding", **kw).at(helpers.site(T=n)).spec.target[n]
    )
    assert target(5144, 0.5, stride=24) == 2572
    assert target(5144, 0.5, stride=24, rounding="easykv") == 2576, "as its README prints"
    for n in range(40, 70):
        size = target(n, 20, stride=6, rounding="easykv")
        assert 20 <= size <= 26
        assert (n - size) % 6 == 0
        assert target(n, 20, stride=6) == 20


@pytest.mark.slow
@pytest.mark.parametrize("importance", ["roco", "mas", "h2o", "tova", "recency", "random"])
def test_d48_every_importance_in_every_mode_at_stride_1(importance):
    budget = 15
    seen = helpers.replay(methods.easykv(importance, budget, mode="encoding_decoding"), q, k, v, PROMPT, block=1)
    assert [len(tokens) for step in seen.live for tokens in step[0]] == [budget] * K * len(seen.live)
    assert all({0, 1, 2, 3} <= set(tokens) for tokens in seen.live[0][0])
    if importance in ("roco", "mas"):
        with pytest.raises(ValueError, match=r"a budget of 13 tokens .* keeps 10 .* the first 4; raise the budget"):
            helpers.replay(methods.easykv(importance, 13, mode="encoding_decoding"), q, k, v, PROMPT)
        assert all(tokens[-10:] == list(range(M - 10, M)) for tokens in seen.live[-1][0])


def test_defaults():
    """What ships where papers and code name numbers."""
    default = lambda method: {
        name: p.default
        for name, p in inspect.signature(inspect.unwrap(getattr(methods, method))).parameters.items()
        if p.default is not p.empty
    }
    wanted = {
        "streaming_llm": {"sinks": 4, "positions": "compact"},
        "h2o": {"recent": Share(0.5), "prefill": "oneshot", "compat": None},
        "aqas": {"recent": Share(0.5), "threshold": "1/visible", "ties": "evict_older"},
        "scissorhands": {"history": 400, "recent": 10, "drop": Share(0.5), "theta": "1/visible", "element": "above"},
        "tova": {"head_mode": "layer_mean", "sinks": 0, "protect_last": 0},
        "mas": {"count_self": True, "recent": 0, "sinks": 0},
        "roco": {"scope": Share(0.5), "protect_last": None, "sinks": 0, "count_self": True, "ignore_prefix": 0},
        "random": {"protect_recent": 1, "random_mode": "independent", "shared_heads": False},
        "dilated_window": {"mode": "mask"},
        "nacl": {"random_pool": "rest", "proxy_causal": True, "decode_every": None, "min_len": 0, "compat": None},
        "snapkv": {"window_size": 32, "kernel_size": 7, "pooling": "max", "avg_pad": "zero", "granularity": "kv_head"},
        "pyramidkv": {"beta": 20.0, "window_size": 8, "kernel_size": 7, "pooling": "max", "preset": None},
        "ada_snapkv": {"alpha": 0.5, "window_size": 32, "kernel_size": 7, "pooling": "max", "normalize": False},
        "ada_pyramid": {"alpha": 0.5, "beta": 20.0, "window_size": 8, "rounding": "largest_remainder"},
        "ahakv": {"recent": 32, "rows": None, "pool_kernel": 7, "sg_k": "budget", "sg_apply": "raw", "sg_floor": None},
        "keyformer": {"recent": Share(0.3), "noise": "gumbel", "per": "call", "tau": (1.0, 2.0), "tau_delta": None},
        "fastgen": {"frequent_ratio": 0.3, "local_ratio": 0.3, "recovery_ratio": 0.95, "recovery": "mass"},
        "lagkv": {"lag": 128, "sinks": 4, "cross_scoring": False},
        "expected_attention": {"horizon": 512, "sinks": 4, "eps": 0.0},
        "criticalkv": {"first_stage": 0.5, "eps": 1e-4},
        "kvzip": {"chunk": 2048, "overlap": 8, "sinks": 4, "plus": False, "prefix": None},
        "chunkkv": {"chunk_size": 20},
        "think": {"query_rows": 32},
    }
    for method, values in wanted.items():
        assert {name: default(method)[name] for name in values} == values, method
    grouped = [m for m in wanted if "group" in default(m)]
    assert len(grouped) > 8
    assert {default(m)["group"] for m in grouped} == {"mean"}
    assert kvjax.scoring.select.TopK().ties == "evict_older"
    half = helpers.protected_counts(methods.roco(64).protect, np.array([100, 100]), np.array([64, 8]))
    assert half[1].tolist() == [10, 2], "the last 10, a quarter of small budgets"
