"""Where papers and released code disagree, D-01 to D-14, D-46, D-48 and D-50: recency, H2O, TOVA, RoCo, EasyKV.

The method is the one, the variant the other: every variant is compared with a plain formulation in float64, one row
after the other (`references/policies.py`), and with a default that does something else.
"""

import dataclasses
import functools
import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.budgets import STEP, Schedule, Share
from kvjax.contract import LayerInfo, resolve
from kvjax.methods import easykv, variants
from kvjax.observe import Reread
from kvjax.scores.attention import Faded
from tests import recorded, tensors
from tests.one_layer import (
    BUDGET,
    IN_PROMPT,
    PROMPT,
    TENSORS,
    H,
    K,
    M,
    N,
    P,
    differs,
    history,
    layer,
    moment,
    moments,
    reads,
    sums,
)
from tests.references.policies import accumulating, best, keep, replay

ROOT = pathlib.Path(kvjax.__file__).parent


def test_every_number_is_documented_and_tested():
    register = {f"{n:02}" for n in range(1, 51)}
    read = lambda paths: "\n".join(p.read_text() for p in paths)
    documented = read([ROOT / "methods" / "README.md"])
    tested = re.findall(
        r"^def test_(d\d\d\w*)", read(pathlib.Path(__file__).parent.glob("test_disagreements*.py")), re.M
    )
    assert set(re.findall(r"D-(\d\d)", documented)) == register
    in_code = read(path for path in ROOT.rglob("*.py"))
    assert set(re.findall(r"D-(\d\d)", in_code)) <= register
    assert {n for name in tested for n in re.findall(r"(?:^|_)d(\d\d)", name)} == register


# --- H2O, AQAS, Scissorhands ---


def test_the_list_of_disagreements_names_what_there_is():
    """Every number once; every call is a policy, and differs from the method's default where it is the other one."""
    lines = (ROOT / "methods" / "README.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| D-")]
    assert [row[0] for row in rows] == [f"D-{i:02}" for i in range(1, 51)]
    for number, _, ships, other in rows:
        calls = re.findall(r"`([a-z]+\.[^`]+)`", other)
        assert calls or other.startswith("-"), number
        for call in calls:
            policy = eval(call, recorded.NAMES)
            assert isinstance(policy, kvjax.Policy), call
            plain = re.search(r"methods\.(\w+)\(64", call)
            assert plain is None or policy != getattr(methods, plain[1])(64), call
        for call in re.findall(r"`(methods\.[^`]+)`", ships):
            assert isinstance(eval(call, recorded.NAMES), kvjax.Policy)


def test_every_method_is_in_the_readme():
    text = (ROOT / "methods" / "README.md").read_text()
    names = [n for n in vars(methods) if inspect.isfunction(getattr(methods, n)) and n != "token_classes"]
    assert [n for n in names if f"`{n}`" not in text] == []


def test_d01_h2o_read_step_by_step():
    """Greedy eviction while the text is read, as a mask: softmaxes over everything, scores of the heavy alone."""
    heavy, recent = 4, 3
    policy = variants.h2o_stepwise_mask(heavy + recent, recent=recent)
    score, wanted = np.zeros((K, M)), []
    for i in range(M):
        p = layer.group(layer.rows(i, [range(i + 1)] * K))
        shown = []
        for g in range(K):
            stays = range(i + 1) if i < heavy else [*best(score[g], heavy - 1, range(i)), i]
            shown.append(sorted({*stays, *range(max(i - recent, 0), i + 1)}))
            score[g] = np.where(np.isin(np.arange(M), stays), score[g] + p[g], 0)
        wanted.append(shown)
    seen = moments(policy, block=1, reads=True)
    assert [row[0] for row in seen.read] == wanted[PROMPT:]
    by_position = np.asarray(seen.kv.memory)[0][:, np.argsort(np.asarray(seen.kv.pos[0, 0]))]
    np.testing.assert_allclose(by_position, score, atol=1e-5)
    assert [row[0] for row in tensors.replay(policy, TENSORS, 1, reads=True).read] == wanted[1:]
    assert reads(methods.h2o(heavy + recent, recent=recent)) != wanted[PROMPT:]


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
    assert reads(variants.h2o_next_step_mask(BUDGET, recent=recent)) == wanted
    default = reads(methods.h2o(BUDGET, recent=recent))
    assert all(i - recent in tokens for i, row in enumerate(default, PROMPT) for tokens in row)
    everything = reads(variants.h2o_next_step_mask(BUDGET, recent=0))
    assert everything[-1] == [list(range(M))] * K


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


@pytest.mark.exhaustive
def test_d04_scissorhands_keeps_recent_tokens_and_high_counts():
    make = functools.partial(methods.scissorhands, BUDGET, history=9, recent=2, drop=2)
    by_position = scissorhands(lambda i, live: 1 / (i + 1), 9, 2, 2)
    assert history(make()) == scissorhands(lambda i, live: 1 / len(live), 9, 2, 2)
    differs(variants.scissorhands_by_position(BUDGET, history=9, recent=2, drop=2), make(), by_position)
    literal = [list(range(n - 2, n)) for n in range(PROMPT, M)]  # recent tokens alone
    assert all(step[0] != only for step, only in zip(history(make()), literal, strict=False))


def test_sums_decay_and_what_is_added_is_damped():
    """Token by token, with a budget that holds everything."""
    total = np.zeros((K, M))
    for i in range(M):
        total = 0.7 * total + 0.4 * layer.group(layer.rows(i, [range(i + 1)] * K))
    kv = moments(kvjax.Evict(Faded(decay=0.7, damping=0.4), M, when=STEP), block=1).kv
    np.testing.assert_allclose(np.asarray(kv.memory.score)[0][:, np.argsort(kv.pos[0, 0])], total, atol=1e-5)


@pytest.mark.exhaustive
def test_d50_scissorhands_with_decayed_sums():
    recent, drop, decay = 2, 2, 0.8
    total = np.zeros((K, M))

    def step(i, p, live):
        nonlocal total
        total = total * (decay if i >= PROMPT else 1) + layer.group(p)
        size = BUDGET if i < PROMPT else BUDGET + 1 - drop
        due = i == PROMPT - 1 or len(live[0]) > BUDGET
        return [keep(total[g], live[g], i + 1, size, recent=recent) if due else live[g] for g in range(K)]

    released = variants.scissorhands_factory(BUDGET, sinks=0, recent=recent, decay=decay)
    released = dataclasses.replace(released, when=Schedule(over=1, drop=drop))
    differs(released, methods.scissorhands(BUDGET, recent=recent, drop=drop), replay(layer, PROMPT, step))


# --- positions ---


@pytest.mark.exhaustive
def test_d05_random_runs():
    """One contiguous run, the same in all heads and layers, and another at every eviction."""

    def gone(policy):
        kept = tensors.evicted(policy, IN_PROMPT * 2)[0]
        return [sorted(set(range(PROMPT)) - set(head)) for kv in kept for head in tensors.live_positions(kv)[0]]

    (first, *others) = gone(dataclasses.replace(variants.random_run(BUDGET), sinks=2))
    assert first == list(range(first[0], first[0] + PROMPT - BUDGET))
    assert others == [first] * 3
    assert len({tuple(x) for x in gone(dataclasses.replace(methods.random(BUDGET), sinks=2))}) == 4
    shared = gone(variants.random_shared(BUDGET))
    assert shared[0] == shared[1]
    draws = [moment(length=n).uniform(jnp.zeros((1, 1, 1), jnp.int32)) for n in (8, 16)]
    blocks = [dataclasses.replace(moment(length=n), prompt_length=jnp.asarray([24])) for n in (8, 16)]
    assert draws[0] == draws[1]
    assert len({float(x.uniform(jnp.zeros((1, 1, 1), jnp.int32))[0, 0, 0]) for x in blocks}) == 2, "two blocks"


@pytest.mark.exhaustive
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
    seen = tensors.replay(variants.random_run(BUDGET), TENSORS, PROMPT, key=key[None], block=block)
    assert seen.live[0][0] == [live] * K


@pytest.mark.exhaustive
def test_d06_window_over_generated_tokens():
    scope = [[[*range(PROMPT), *range(max(PROMPT, n - 3), n)]] * K for n in range(PROMPT, M + 1)]
    differs(variants.window_of_generated(3), methods.window(3), scope)
    sinks = [[[0, 1, 2, 3, *range(n - 3, n)]] * K for n in range(PROMPT, M + 1)]
    differs(dataclasses.replace(methods.window(BUDGET), sinks=4), methods.window(BUDGET), sinks)
    assert history(methods.window(BUDGET)) == [[list(range(n - BUDGET, n))] * K for n in range(PROMPT, M + 1)]


def test_d07_dilated_windows():
    """A mask over what a plain window holds; anchored to a grid, what can be evicted."""
    make = functools.partial(methods.dilated_window, BUDGET, dilation=1)
    assert history(make()) == history(methods.window(BUDGET))
    assert reads(make()) == [[[j for j in range(i - BUDGET, i + 1) if (i - j) % 2 == 0]] * K for i in range(PROMPT, M)]
    grid = [
        [sorted({n - 1, *[j for j in range(0, n, 2) if j != n - 1][-BUDGET + 1 :]})] * K for n in range(PROMPT, M + 1)
    ]
    differs(variants.dilated_window_anchored(BUDGET, dilation=1), make(), grid)


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
    differs(dataclasses.replace(methods.tova(BUDGET), recent=1), methods.tova(BUDGET), tova(everywhere, recent=1))


def test_d09_tova_by_head_with_sinks_and_recent():
    plain = tova(layer.group, sinks=2, recent=2)
    differs(variants.tova_easykv(BUDGET, sinks=2, recent=2), methods.tova(BUDGET), plain)
    differs(variants.tova_by_head(BUDGET), methods.tova(BUDGET), tova(layer.group))


def counts(i, count_self=True, prefix=0):
    pos = np.arange(M)
    return np.maximum(i + 1 - np.maximum(pos, prefix) - (pos >= prefix) * (not count_self), 1)


def without_self(i, p, live):
    return p * (np.arange(M) != i)


def test_d10_means_without_the_own_row():
    final = lambda i, total: np.where(np.arange(M) == i, np.inf, total / counts(i, False))
    assert history(methods.mas(BUDGET)) == sums(final=lambda i, total: total / counts(i))
    differs(variants.of_later_rows(methods.mas(BUDGET)), methods.mas(BUDGET), sums(element=without_self, final=final))


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
    policy = dataclasses.replace(methods.roco(BUDGET), recent=0)
    assert history(policy) == roco(lambda b: b // 2)
    differs(variants.of_later_rows(policy), policy, roco(lambda b: b // 2, count_self=False))


def test_d12_roco_protects_positions():
    half = lambda b: b // 2
    assert history(methods.roco(BUDGET)) == roco(half, recent=BUDGET // 4)
    differs(variants.roco_easykv(BUDGET, recent=2, sinks=1), methods.roco(BUDGET), roco(half, recent=2, sinks=1))
    differs(dataclasses.replace(methods.roco(BUDGET), recent=0), methods.roco(BUDGET), roco(half))


@pytest.mark.parametrize("count_self", [True, False])
def test_d46_rows_of_the_dense_prefix(count_self):
    prefix, pos = 6, np.arange(M)
    counted = lambda i, p, live: p * (i >= prefix) * (count_self | (pos != i))
    mean = lambda i, total: total / counts(i, count_self, prefix)
    final = lambda i, total: mean(i, total) if count_self else np.where(pos == i, np.inf, mean(i, total))
    policy = methods.mas(BUDGET) if count_self else variants.of_later_rows(methods.mas(BUDGET))
    differs(variants.since(policy, prefix), policy, sums(element=counted, final=final))
    assert history(variants.since(methods.roco(BUDGET), prefix)) != history(methods.roco(BUDGET))


# --- EasyKV ---


def test_d11_the_scopes_of_the_released_code():
    """Live tokens less evictable ones, at 100 tokens: half of them, or what `int` makes of 0.3 and 0.1."""
    n, budget = np.array([400]), np.array([100])
    size = lambda policy: int(resolve(policy.score.size, n, budget)[0])
    assert size(methods.roco(100)) == 50
    assert size(easykv.easykv_decoding("roco", 100)) - n[0] == int(0.3 * 100) + 1
    first, then = easykv.easykv_encoding_decoding("roco", 100, stride=8).members
    assert 101 - size(then) == 108 - int(0.3 * 108)
    assert 108 - size(first) == max(108 - int(0.1 * 108) - 4, 8)


def generated_only(i, p, live):
    return p * (np.arange(M) >= PROMPT)


def test_d13_the_prompt_outside_the_budget():
    """The prompt stays; its columns count for nothing; generated tokens compete for the budget."""
    plain = replay(layer, PROMPT, accumulating(layer, PROMPT + 3, element=generated_only, sinks=PROMPT))
    differs(easykv.easykv_decoding("h2o", 3), methods.h2o(3), plain)
    window = variants.window_of_generated(3)
    assert history(easykv.easykv_decoding("recency", 3)) == history(window) != history(methods.window(3))


def test_d14_the_block_loop_overspends():
    def target(n, budget, **options):
        policy = easykv.easykv_encoding("mas", budget, **options)
        return int(policy.sizes(LayerInfo(0, 1, N, K, H, n, 0), np.array([n])).hparams.budget[0])

    assert target(5144, 0.5, stride=24) == 2572
    assert target(5144, 0.5, stride=24, exact=False) == 2576, "as its README prints"
    for n in range(40, 70):
        size = target(n, 20, stride=6, exact=False)
        assert 20 <= size <= 26
        assert (n - size) % 6 == 0
        assert target(n, 20, stride=6) == 20


@pytest.mark.exhaustive
@pytest.mark.parametrize("importance", ["roco", "mas", "h2o", "tova", "recency", "random"])
def test_d48_every_importance_in_every_mode_at_stride_1(importance):
    budget = 15
    seen = moments(easykv.easykv_encoding_decoding(importance, budget), block=1)
    assert [len(tokens) for step in seen.live for tokens in step[0]] == [budget] * K * len(seen.live)
    assert all({0, 1, 2, 3} <= set(tokens) for tokens in seen.live[0][0])
    if importance in ("roco", "mas"):
        with pytest.raises(ValueError, match=r"a budget of 13 tokens cannot hold 4 sinks and 10 recent tokens"):
            moments(easykv.easykv_encoding_decoding(importance, 13))
        assert all(tokens[-10:] == list(range(M - 10, M)) for tokens in seen.live[-1][0])


def test_defaults():
    """What ships where papers and code name numbers."""
    default = lambda method: {
        name: p.default
        for name, p in inspect.signature(getattr(methods, method)).parameters.items()
        if p.default is not p.empty
    }
    wanted = {
        "streaming_llm": {"sinks": 4},
        "h2o": {"recent": Share(0.5)},
        "aqas": {"recent": Share(0.5)},
        "scissorhands": {"history": 400, "recent": 10, "drop": Share(0.5)},
        "roco": {"scope": Share(0.5)},
        "dilated_window": {"dilation": 1},
        "nacl": {"recent": None, "proxies": None, "random": None},
        "snapkv": {"window": 32, "kernel": 7, "pooling": "max"},
        "pyramidkv": {"beta": 20.0, "window": 8, "kernel": 7},
        "ada_snapkv": {"alpha": 0.5, "window": 32, "kernel": 7},
        "ada_pyramid": {"alpha": 0.5, "beta": 20.0, "window": 8, "kernel": 7},
        "ahakv": {"recent": 32, "kernel": 7},
        "keyformer": {"recent": Share(0.3), "tau": (1.0, 2.0)},
        "fastgen": {"frequent": 0.3, "local": 0.3, "recovery": 0.95},
        "lagkv": {"lag": 128, "sinks": 4},
        "expected_attention": {"horizon": 512, "sinks": 4, "eps": 0.0},
        "criticalkv": {"first": 0.5, "eps": 1e-4},
        "chunkkv": {"size": 20},
        "think": {"channels": 0.5, "rows": 32},
    }
    assert {method: default(method) for method in wanted} == wanted
    assert default("kvzip")["how"] == Reread(chunk=2048, overlap=8, sinks=4)
    recent = methods.roco(64).recent
    found = resolve(recent, np.array([100, 100]), np.array([64, 8])).tolist()
    assert found == [10, 2], "the last 10, a quarter of small budgets"
    names = [n for n in vars(methods) if inspect.isfunction(getattr(methods, n)) and n != "token_classes"]
    assert sum(len(inspect.signature(getattr(methods, n)).parameters) for n in names) < 145
