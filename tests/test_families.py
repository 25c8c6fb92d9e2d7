"""What budgets are learned as: exact totals, exact gradients, hard limits, and policies made of the result."""

import dataclasses
import functools
import inspect
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import kvjax
from kvjax import analysis, methods, models
from kvjax.analysis import traces
from kvjax.analysis.traces import Voters, VotingRows
from kvjax.configs.learning import Prompts
from kvjax.experiments import learn_budget
from kvjax.experiments.learning.future_rows import RankedReading, Reader
from kvjax.learning import families
from kvjax.learning.families import EntropyK, NaclShares, PyramidBeta, Safeguard, Simplex, View
from kvjax.models.mpt import MPTConfig
from tests import helpers
from tests.test_relax import central, relative

pytestmark = pytest.mark.slow  # minutes of compilation

B, L, K, G, S, R, H, D = 2, 3, 2, 2, 22, 4, 5, 6
LENGTHS = np.array([22, 17])


def arrays(seed=0):
    """Random prompts, left-padded, in float64."""
    rng = np.random.default_rng(seed)
    pos = np.maximum(np.arange(S)[None] - (S - LENGTHS)[:, None], -1)
    pos = np.broadcast_to(pos[:, None, None], (B, L, K, S)).astype(np.int32)
    live = pos >= 0
    score = np.exp(rng.normal(size=(B, L, K, S)) * rng.uniform(0.5, 2, (B, L, K, 1)))
    return rng, pos, live, np.where(live, score, 0)


def view(seed=0, *, budget=(9.5, 7.25), recent=3, whole=False):
    rng, pos, live, score = arrays(seed)
    safe = live & (pos >= (LENGTHS - recent)[:, None, None, None])
    budget = np.floor(budget) if whole else np.asarray(budget)
    f = jnp.asarray
    q, k = rng.normal(size=(L, B, K * G, R, H)) * 2, rng.normal(size=(L, B, K, S, H))
    rows = f(LENGTHS[:, None] - R + np.arange(R)[None], jnp.int32)
    voters = tuple(Voters(f(q[i]), f(k[i]), rows, f(pos[:, i])) for i in range(L))
    return View(
        f(score), f(pos), f(live), f(safe), f(budget, float), voters,
        f(rng.uniform(0.5, 1, (B, L, K, S))), f(rng.gumbel(size=(B, L, K, S))),
    )  # fmt: skip


def random_traces(seed=1, dtype=np.float64):
    """What later rows read of those prompts."""
    rng, _, live, _ = arrays(seed)
    p = np.exp(rng.normal(size=(B, L, K * G, R, S + R)) * 1.5)
    p[..., :S] *= np.repeat(live, G, axis=2)[:, :, :, None]
    p /= p.sum(-1, keepdims=True)
    v, new = rng.normal(size=(B, L, K, S, H)), rng.normal(size=(B, L, K, R, H))
    own = np.einsum("blnrs,blnsh->blnrh", p[..., S:], np.repeat(new, G, axis=2))
    f = lambda x: jnp.asarray(x, dtype)
    out_proj = rng.normal(size=(L, K * G, H, D))
    found = traces.Traces(f(p[..., :S]), f(own), f(p[..., S:].sum(-1)), f(v), f(out_proj))
    return found, (p, v, new, out_proj, live)


FAMILIES = {
    "heads": Simplex("heads"),
    "layers": Simplex("layers"),
    "both": Simplex("both"),
    "both_with_floor": Simplex("both", floor=0.3),
    "pyramid": PyramidBeta(),
    "safeguard": Safeguard(),
    "window": families.WindowShare(),
    "nacl": NaclShares(),
    "ahakv": EntropyK(start=6.0),
}
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def start(family, seed=2, spread=0.7):
    """Parameters away from where learning starts."""
    params = family.init(L, K)
    return params + spread * jnp.asarray(np.random.default_rng(seed).normal(size=params.shape), params.dtype)


@every_family
@pytest.mark.parametrize("temperature", [4.0, 0.8])
def test_gradients_agree_with_differences(family, temperature):
    """Through gates and the exact eviction loss, in float64."""
    with jax.enable_x64(True):
        seen, found = view(), random_traces()[0]
        loss = jax.jit(lambda params: found.eviction_loss(family.gates(params, seen, temperature)).mean())
        params = start(family)
        grad = jax.grad(loss)(params)
        assert np.abs(np.asarray(grad)).max() > 1e-6  # there is something to agree on
        assert relative(grad, central(loss, params)) < 1e-5


# --- objectives at the model's output, in float64 ---

V, E, F = 11, 12, 16  # vocabulary, residual stream, hidden units
DIM = 6  # of a head; even, as pairs are rotated


def turned(x, pos, xp):
    """Halves of heads rotated by their positions, in the precision of `x`."""
    angle = pos[..., None] * xp.asarray([1.0, 0.4, 0.1]).reshape(*(1,) * pos.ndim, 3)
    cos, sin = xp.cos(angle), xp.sin(angle)
    a, b = x[..., :3], x[..., 3:]
    return xp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@dataclasses.dataclass(frozen=True)
class Wide:
    """A small transformer that computes in float64 throughout: no normalisation, tanh between two matrices."""

    config: models.ModelConfig = models.ModelConfig(
        V, E, F, num_layers=L, num_query_heads=K * G, num_kv_heads=K, head_dim=DIM, dtype="float64"
    )

    @staticmethod
    def init(seed=3):
        rng = np.random.default_rng(seed)
        random = lambda *shape, fan: rng.normal(size=(L, *shape)) * fan**-0.5
        return {
            "embedding": rng.normal(size=(V, E)),
            "q": 1.5 * random(K * G, E, DIM, fan=E),
            "k": 1.5 * random(K, E, DIM, fan=E),
            "v": random(K, E, DIM, fan=E),
            "out": random(K * G, DIM, E, fan=K * G * DIM),
            "up": random(E, F, fan=E),
            "down": random(F, E, fan=F),
        }

    def __call__(self, params, tokens, layers, *, attend, last_only):
        x, caches, stats = params["embedding"][tokens], [], []
        rotate = lambda x, pos: turned(x, pos.astype(x.dtype), jnp)
        for i, cache in enumerate(layers):
            q, k, v = (jnp.einsum("bte,neh->bnth", x, params[n][i]) for n in "qkv")
            out, cache, seen = attend(cache, q, k, v, layer=i, rotate=rotate, out_proj=params["out"][i])
            x = x + jnp.einsum("bnth,nhe->bte", out, params["out"][i])
            x = x + jnp.tanh(x @ params["up"][i]) @ params["down"][i]
            caches, stats = [*caches, cache], [*stats, seen]
        return (x[:, -1:] if last_only else x) @ params["embedding"].T, tuple(caches), tuple(stats)


def plain_wide(params, prompt, future, gates):
    """Logits after every token of `future` behind one prompt whose slots have the gates "L K n"; numpy, row by row."""
    n, tokens = len(prompt), np.concatenate([prompt, future])
    x, pos = params["embedding"][tokens], np.arange(len(tokens), dtype=np.float64)
    for i in range(L):
        q, k, v = (np.einsum("te,neh->nth", x, params[name][i]) for name in "qkv")
        q, k = (turned(y, pos[None], np) for y in (q, k))
        after = x.copy()
        for t in range(len(tokens)):
            for head in range(K * G):
                kv = head // G
                weights = np.exp(k[kv, : t + 1] @ q[head, t] / DIM**0.5)
                if t >= n:
                    weights[:n] *= gates[i, kv]
                after[t] += weights / weights.sum() @ v[kv, : t + 1] @ params["out"][i, head]
        x = after + np.tanh(after @ params["up"][i]) @ params["down"][i]
    return (x @ params["embedding"].T)[n:]


def plain_objective(name, params, tokens, future, gates):
    """The divergence from the full cache, or the cross-entropy of the next of the tokens; the mean over prompts."""
    each = []
    for row, n in enumerate(LENGTHS):
        arguments = params, tokens[row, S - n :], future[row]
        log_q = special.log_softmax(plain_wide(*arguments, gates[row, :, :, S - n :]), axis=-1)
        if name == "output_kl":
            log_p = special.log_softmax(plain_wide(*arguments, np.ones((L, K, n))), axis=-1)
            each.append((np.exp(log_p) * (log_p - log_q)).sum(-1).mean())
        else:
            each.append(np.mean([-log_q[i, future[row, i + 1]] for i in range(R - 1)]))
    return np.mean(each)


@pytest.fixture(scope="module")
def wide():
    """A reading of the float64 model as `learn_budget` learns from it, and a compiled objective of gates."""
    rng = np.random.default_rng(4)
    tokens, future = (rng.integers(0, V, (B, n)).astype(np.int32) for n in (S, R))
    model, params = Wide(), Wide.init()
    with jax.enable_x64(True):
        found = analysis.read(model, params, tokens, future, lengths=LENGTHS)
        reading = RankedReading(found, traces.trace(found), view().score, view().safe, jnp.ones((B,)))
        weights = jax.tree.map(jnp.asarray, params)
        objective = jax.jit(functools.partial(learn_budget.objective, model=model, params=weights), static_argnums=0)
    return params, tokens, future, reading, objective


@every_family
@pytest.mark.parametrize("name", ["output_kl", "task_loss"])
def test_gradients_of_objectives_at_the_output(name, family, wide):
    """Values and central differences are those of a numpy transformer that reads gates as weights."""
    params, tokens, future, reading, objective = wide
    with jax.enable_x64(True):
        seen = view()
        gates = jax.jit(functools.partial(family.gates, view=seen, temperature=2.0))
        plain = lambda x: plain_objective(name, params, tokens, future, np.asarray(gates(x)))
        loss = lambda x: objective(name, reading=reading, gates=gates(x))
        learned = start(family)
        value, grad = jax.value_and_grad(loss)(learned)
        assert float(value) == pytest.approx(plain(learned), rel=1e-9)
        assert np.abs(np.asarray(grad)).max() > 1e-6
        assert relative(grad, central(plain, learned)) < 1e-5


LIMITS = [{}, {"window": 6}, {"softcap": 1.5, "scale": 0.9}, {"softcap": 2.0, "window": 9}]


def votes_by_hand(view, k):
    """AhaKV's votes in float64: one row of one head after another."""
    total = np.zeros(view.score.shape)
    for layer, x in enumerate(view.voters):
        q, keys, rows, pos = (np.asarray(y) for y in (x.q, x.k, x.q_pos, x.kv_pos))
        scale = q.shape[-1] ** -0.5 if x.scale is None else x.scale
        for b, n, r in np.ndindex(q.shape[:3]):
            h, row = n // G, rows[b, r]
            seen = (pos[b, h] >= 0) & (pos[b, h] <= row)
            seen &= row - pos[b, h] < (np.inf if x.window is None else x.window)
            if not seen.any():
                continue
            logits = keys[b, h].astype(float) @ q[b, n, r].astype(float) * scale
            logits = logits if x.softcap is None else x.softcap * np.tanh(logits / x.softcap)
            ratio = (row + 1) / k
            e = np.where(seen, np.exp((np.sqrt(2 * np.log(ratio)) if ratio > 1 else 1.0) * logits), 0)
            total[b, layer, h] += e / e.sum() / G
    return total * np.asarray(view.prior)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_votes_of_ahakv(limits):
    """With the model's own scale, sliding window and soft cap; padding rows vote for nothing."""
    with jax.enable_x64(True):
        seen = view()
        first, *others = (dataclasses.replace(x, **limits) for x in seen.voters)
        first = dataclasses.replace(first, q_pos=first.q_pos.at[1, 0].set(-1))
        seen = dataclasses.replace(seen, voters=(first, *others))
        loss = jax.jit(lambda params: (EntropyK().votes(params, seen) ** 2).sum())
        for k in (3.0, 18.5, 30.0):
            params = jnp.log(jnp.asarray(k))
            np.testing.assert_allclose(EntropyK().votes(params, seen), votes_by_hand(seen, k), rtol=1e-9, atol=1e-12)
            grad = jax.grad(loss)(params)
            assert (abs(float(grad)) > 1e-3) == (k < 22)  # a k that no row exceeds changes nothing
            assert relative(grad, central(loss, params)) < 1e-6 or k > 22


@pytest.mark.parametrize(("kind", "num_kv_heads"), [(models.ModelConfig, 2), (MPTConfig, 4)])
def test_voters_are_the_rows_that_the_method_observes(kind, num_kv_heads):
    """At AhaKV's own k, in layers with and without a sliding window: votes are what the policy itself accumulates."""
    config = kind(61, 32, 48, 2, 4, num_kv_heads, 8, sliding_window=(None, 9))
    model = models.LanguageModel(config)
    params = jax.tree.map(lambda x: x * jnp.asarray(2.0, x.dtype), jax.jit(model.init)(jax.random.key(7)))
    tokens, lengths = helpers.token_ids(2, 20, seed=3), jnp.asarray([20, 15], jnp.int32)
    policy = methods.ahakv(8, recent=4)
    plan = kvjax.make_plan(config, policy, prompt_len=20, max_new_tokens=3)
    asked = tuple((*layer, ("kv_head", VotingRows(4))) for layer in analysis.measurements([plan]))
    found = analysis.read(model, params, tokens, tokens[:, :3], lengths=lengths, measure=asked)
    score = jnp.stack([s.score for s in analysis.decisions(plan, found)], axis=1)
    layers = [layer.prompt for layer in found.layers]
    safe = jnp.stack([policy.safe(kv, found.prompt_context(i)) for i, kv in enumerate(layers)], axis=1)
    pos, live, prior = (
        jnp.stack(x, axis=1) for x in zip(*((kv.pos, kv.live, policy.score.prior(kv)) for kv in layers), strict=True)
    )
    voters = tuple(layer.stats["kv_head"][VotingRows(4)] for layer in found.layers)
    assert [x.window for x in voters] == [None, 9]
    seen = View(jnp.where(live, score, 0.0), pos, live, safe, jnp.full((2,), 8.0), voters, prior)
    votes = np.asarray(EntropyK().votes(jnp.log(jnp.asarray(8.0)), seen))
    np.testing.assert_allclose(np.where(live, votes, 0), np.where(live, score, 0), rtol=2e-5, atol=1e-6)
    assert not votes[:, 1][np.asarray(pos[:, 1]) < np.asarray(lengths)[:, None, None] - 4 - 9 + 1].any()


@every_family
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("budget", [(9.5, 7.25), (30.0, 16.5)], ids=["fits", "more than exists"])
def test_the_total_holds_at_every_temperature(family, x64, budget):
    total = L * K * np.minimum(budget, LENGTHS)
    with jax.enable_x64(x64):
        seen = view(budget=budget)
        np.testing.assert_allclose(seen.total, total, rtol=1e-6)
        gates = jax.jit(family.gates)
        for temperature in (30.0, 4.0, 0.5, 0.02):
            for seed in (2, 3):
                params = start(family, seed, spread=1.5)
                gate = np.asarray(gates(params, seen, jnp.asarray(temperature, float)), np.float64)
                assert gate.min() >= 0
                assert gate.max() <= 1 + 1e-6
                off = np.abs(gate.sum((1, 2, 3)) / total - 1)
                assert off.max() < (1e-12 if x64 else 1e-6)
                assert (gate[~np.asarray(seen.live)] == 0).all()


@pytest.mark.parametrize("over", ["heads", "layers", "both"])
def test_floors_and_caps(over):
    """Parameters that want all of the budget in one place get no more than exists, and leave the floor elsewhere."""
    with jax.enable_x64(True):
        seen = view(budget=(14.0, 12.0))
        family = Simplex(over, floor=0.25)
        greedy = np.full(family.init(L, K).shape, -40.0)
        greedy[0] = 40.0
        budgets = np.asarray(family.budgets(jnp.asarray(greedy), seen))
        uniform = np.asarray(family.budgets(family.init(L, K), seen))
    average, exists = np.array([11.0, 9.0]), LENGTHS - 3
    np.testing.assert_allclose(uniform, np.broadcast_to(average[:, None, None], (B, L, K)), rtol=1e-9)
    np.testing.assert_allclose(budgets.sum((1, 2)), average * L * K, rtol=1e-12)
    assert (budgets >= 0.25 * average[:, None, None] - 1e-9).all()
    assert (budgets <= exists[:, None, None] + 1e-9).all()
    if over != "heads":  # within a layer all of its heads want the same
        np.testing.assert_allclose(budgets[:, 0], np.broadcast_to(exists[:, None], (B, K)), rtol=1e-6)


def test_floors_give_way_to_what_exists():
    """A floor of nearly the average, where the average is more than a head can hold: all of it, and no more."""
    with jax.enable_x64(True):
        family, seen = Simplex("both", floor=0.95), view(budget=(40.0, 12.0))
        budgets = np.asarray(family.budgets(start(family), seen))
    np.testing.assert_allclose(budgets[0], 19.0, rtol=1e-12)
    np.testing.assert_allclose(budgets[1].sum(), 9.0 * L * K, rtol=1e-12)
    assert (budgets[1] >= 0.95 * 9.0 - 1e-9).all()


def test_bounded_is_a_softmax_far_below_the_caps():
    logits = jnp.asarray([0.3, -1.0, 2.0, 0.0])
    caps = jnp.full((4,), 1e6)
    parts = families.bounded(logits, jnp.float32(10.0), floor=jnp.zeros(4), cap=caps)
    np.testing.assert_allclose(parts, 10 * jax.nn.softmax(logits), rtol=1e-3)


def test_filling_is_what_apportion_does_to_real_shares():
    rng = np.random.default_rng(3)
    for _ in range(20):
        shares = rng.exponential(5.0, 6)
        cap = np.floor(rng.uniform(1, 9, 6))
        shares *= min(1.0, cap.sum() / shares.sum())
        filled = np.asarray(
            families.filled(jnp.asarray(shares, jnp.float32), jnp.asarray(cap, jnp.float32)), np.float64
        )
        assert (filled <= cap + 1e-5).all()
        assert filled.sum() == pytest.approx(shares.sum(), rel=1e-5)
        plain = shares.copy()
        for _ in range(6):
            surplus = np.maximum(plain - cap, 0).sum()
            plain = np.minimum(plain, cap)
            weight = np.where(cap > plain, plain, 0)
            plain = plain + (surplus * weight / weight.sum() if weight.sum() > 0 else 0)
        np.testing.assert_allclose(filled, np.minimum(plain, cap), rtol=1e-4)


# --- hard policies made of what was learned ---


def snapkv(budget, **fields):
    return dataclasses.replace(methods.snapkv(budget, window_size=4, kernel_size=3), **fields)


def whole_budgets(policy, q, k, v):
    """Live slots of every head and layer after the prompt."""
    selections = [kvjax.evict_layer(policy, q, k, v, layer=i, num_layers=L) for i in range(L)]
    return np.stack([s.keep.sum(-1) for s in selections], axis=1)


@pytest.mark.parametrize("budget", [7, 0.4, 15])
@pytest.mark.parametrize("over", ["heads", "layers", "both"])
def test_rounding_preserves_the_total(over, budget):
    q, k, v = helpers.qkv(5, T=24)
    with jax.enable_x64(True):
        family, seen = Simplex(over), view(budget=(9.0, 8.0))
        shares = family.shares(start(family, spread=2.0), seen)
        policy = family.harden(start(family, spread=2.0), snapkv(budget), seen)
    assert policy == families.with_table(snapkv(budget), shares)
    assert shares.mean() == pytest.approx(1.0)
    kept = whole_budgets(policy, q, k, v)
    average = budget if isinstance(budget, int) else math.floor(budget * 24 + 1e-9)
    assert (kept.sum((1, 2)) == L * K * average).all()
    if average < 10:  # no head is full, so shares are kept to less than a token a head and a layer
        wanted = 4 + (average - 4) * shares
        assert np.abs(kept - wanted[None]).max() <= 2


@pytest.mark.parametrize("over", ["heads", "layers", "both"])
def test_only_prompts_that_are_divided_have_shares(over):
    """One that keeps all its tokens, or only its protected ones, says nothing of how heads differ."""
    with jax.enable_x64(True):
        family = Simplex(over)
        params = start(family, spread=2.0)
        budgets = np.asarray(family.budgets(params, view(budget=(9.0, 8.0))))[0]
        for other in (3.0, 17.0, 40.0):
            np.testing.assert_allclose(
                family.shares(params, view(budget=(9.0, other))), budgets / budgets.mean(), rtol=1e-12
            )
        assert (family.shares(params, view(budget=(22.0, 3.0))) == 1).all()


def test_a_table_survives_json_and_goes_into_any_policy():
    weights = json.loads(json.dumps([[1.5, 0.5], [2.0, 1.0], [0.25, 0.75]]))
    for policy in (methods.h2o(8, recent=2), methods.roco(8, protect_last=2), methods.knorm(8)):
        tabled = families.with_table(policy, np.array(weights))
        assert tabled.layers == kvjax.LayerTable([2.0, 3.0, 1.0])
        assert tabled.heads == kvjax.HeadTable(weights)
        q, k, v = helpers.qkv(6, T=24)
        kept = whole_budgets(kvjax.when(kvjax.after_prefill(), tabled), q, k, v)
        assert (kept.sum((1, 2)) == L * K * 8).all()
        assert (kept[:, 1, 0] > kept[:, 1, 1]).all()


def test_a_table_is_of_what_budgets_leave_beside_protected_tokens():
    """Tokens of every layer and head as `with_budgets` takes them are refused until they are shares."""
    budgets, protected = np.array([[12, 4], [9, 5], [11, 7]]), 3  # 8 on average
    policy = methods.snapkv(8, window_size=protected)
    with pytest.raises(ValueError, match=r"shares have a mean of 8, not 1, .*; divide them by their mean"):
        families.with_table(policy, budgets)
    left = budgets - protected
    tabled = families.with_table(policy, left / left.mean())
    q, k, v = helpers.qkv(6, B=1, T=24)
    assert whole_budgets(tabled, q, k, v)[0].tolist() == budgets.tolist()


def test_hard_parameters():
    with jax.enable_x64(True):
        seen = view()
        hard = lambda family, policy: family.harden(family.init(L, K), policy, seen)
        base = snapkv(8)
        assert hard(PyramidBeta(3.0), base).layers.beta == pytest.approx(3.0)
        heads = hard(Safeguard(0.3), base).heads
        assert (heads.alpha, heads.max_ratio) == (pytest.approx(0.3), math.inf)
        assert hard(families.WindowShare(0.25), base).protect.recent.share == pytest.approx(0.25)
        nacl = hard(NaclShares((1.0, 4.0, 5.0)), methods.nacl(0.5))
        assert nacl.protect.recent.share == pytest.approx(0.1)
        assert nacl.select.random.share == pytest.approx(0.5)
        learned = NaclShares((1.0, 4.0, 5.0)).init(L, K)
        ahakv = hard(EntropyK(17.2), methods.ahakv(8, recent=4))
        assert ahakv.score.of.softmax.k == kvjax.Tokens(17)
        with pytest.raises(ValueError, match="draws nothing"):
            hard(NaclShares(), base)
        with pytest.raises(ValueError, match="accumulates no attention under a softmax"):
            hard(EntropyK(), base)
    assert NaclShares().describe(learned) == pytest.approx({"protect": 0.1, "best": 0.4, "random": 0.5})


@pytest.mark.parametrize("name", ["heads", "layers", "both", "pyramid", "safeguard", "window"])
def test_cold_gates_are_the_hard_policy(name):
    """At whole budgets the gates of a family and the policy that it hardens to keep nearly the same slots.

    Real budgets are rounded, so each head may differ by a token or two at its threshold; the total does not.
    """
    family = FAMILIES[name]
    q, k, v = helpers.qkv(7, B=B, T=24)
    base = methods.knorm(10) if name == "window" else snapkv(10)
    selections = [kvjax.evict_layer(base, q, k, v, layer=i, num_layers=L) for i in range(L)]
    score = jnp.stack([s.score for s in selections], axis=1)
    pos = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32), (B, L, K, 24))
    safe = pos >= (24 if name == "window" else 20)
    seen = View(score, pos, pos >= 0, safe, jnp.asarray([10.0, 10.0]))
    params = start(family)
    gates = np.asarray(family.gates(params, seen, 1e-3))
    policy = family.harden(params, base, seen)
    keep = np.stack([kvjax.evict_layer(policy, q, k, v, layer=i, num_layers=L).keep for i in range(L)], axis=1).astype(
        np.float64
    )
    assert np.abs(gates - keep).sum(-1).max() <= 3
    np.testing.assert_allclose(gates.sum((1, 2, 3)), keep.sum((1, 2, 3)), rtol=1e-6)


# --- traces ---


def plain_loss(p, v, new, out_proj, gates):
    """Row by row, in float64."""
    result = np.zeros((B, L))
    for b in range(B):
        for layer in range(L):
            for r in range(R):
                full, after = np.zeros(D), np.zeros(D)
                for n in range(K * G):
                    row = p[b, layer, n, r]
                    values = np.concatenate([v[b, layer, n // G], new[b, layer, n // G]])
                    weights = row * np.concatenate([gates[b, layer, n // G], np.ones(R)])
                    full += row @ values @ out_proj[layer, n]
                    after += weights / weights.sum() @ values @ out_proj[layer, n]
                result[b, layer] += np.abs(full - after).sum() / np.abs(full).sum() / R
    return result


@pytest.mark.parametrize("hard", [False, True])
def test_the_exact_eviction_loss(hard):
    gates = np.random.default_rng(8).uniform(0, 1, (B, L, K, S))
    gates = np.round(gates) if hard else gates
    with jax.enable_x64(True):
        found, (p, v, new, out_proj, live) = random_traces()
        loss = found.eviction_loss(jnp.asarray(gates * live))
        assert np.abs(found.eviction_loss(jnp.asarray(live, float))).max() < 1e-12
    np.testing.assert_allclose(loss, plain_loss(p, v, new, out_proj, gates * live), rtol=1e-9)


def test_one_row_is_the_theorems_loss():
    """A row that only reads the prompt: `kvjax.analysis.eviction_loss`, relative."""
    found, (p, v, _, out_proj, live) = random_traces(dtype=np.float32)
    keep = np.random.default_rng(9).random((B, L, K, S)) < 0.6
    p = p[:, :, :, :1, :S] / p[:, :, :, :1, :S].sum(-1, keepdims=True)
    alone = dataclasses.replace(
        found,
        attention=jnp.asarray(p, jnp.float32),
        own=jnp.zeros((B, L, K * G, 1, H)),
        own_mass=jnp.zeros((B, L, K * G, 1)),
    )
    relative_loss = alone.eviction_loss(jnp.asarray(keep & live, jnp.float32))
    f = lambda x: jnp.asarray(x, jnp.float32)
    for i in range(L):
        absolute = analysis.eviction_loss(
            f(p[:, i, :, 0]), f(v[:, i]), f(out_proj[i]), jnp.asarray((keep & live)[:, i])
        )
        full = np.einsum("bns,bnsh,nhd->bd", p[:, i, :, 0], np.repeat(v[:, i], G, axis=1), out_proj[i])
        np.testing.assert_allclose(relative_loss[:, i], absolute / np.abs(full).sum(-1), rtol=1e-4)


def read_snapkv(tiny, budget):
    """A policy, its plan, prompts with what follows them, and what was read of them."""
    model, params = tiny
    tokens, lengths = helpers.token_ids(2, 20, seed=3), jnp.asarray([20, 15], jnp.int32)
    future, policy = helpers.token_ids(2, 5, seed=4), snapkv(budget)
    plan = kvjax.make_plan(model.config, policy, prompt_len=20, max_new_tokens=5)
    asked = analysis.measurements([plan])
    return (
        policy,
        plan,
        (tokens, lengths, future),
        analysis.read(model, params, tokens, future, lengths=lengths, measure=asked),
    )


def test_attention_rows_of_a_model(tiny):
    """They price masks and gates as the reading does that attends again, and sum to 1."""
    *_, found = read_snapkv(tiny, 9)
    rows = traces.trace(found)
    mass = rows.attention.sum(-1) + rows.own_mass
    np.testing.assert_allclose(mass, np.ones(mass.shape), rtol=1e-5)
    live = np.asarray(found.live())
    random = np.random.default_rng(0).random(live.shape)
    for gates in (live, live & (random > 0.5), np.where(live, random, 0.0)):
        added = rows.outputs(jnp.asarray(gates, jnp.float32))
        for i, layer in enumerate(found.layers):
            out = found.outputs(i, jnp.asarray(gates[:, i], bool if gates.dtype == bool else jnp.float32))
            wanted = jnp.einsum("bnth,nhd->btd", out, layer.out_proj)
            np.testing.assert_allclose(added[:, i], wanted, atol=2e-5)


def test_decisions_of_a_reading(tiny):
    """Selections are the policy's: those of another budget for heads too, from the same reading."""
    model, params = tiny
    policy, plan, (tokens, lengths, _), found = read_snapkv(tiny, 9)
    chosen = analysis.decisions(plan, found)
    _, state = kvjax.prefill(model, params, tokens, plan, lengths=lengths)
    for layer, selection, kv in zip(found.layers, chosen, state.layers, strict=True):
        positions = np.where(selection.keep, np.asarray(layer.prompt.pos), -1)
        for b in range(2):
            for h in range(2):
                assert sorted(positions[b, h][positions[b, h] >= 0]) == helpers.live_positions(kv)[b][h]
        assert np.isneginf(np.asarray(selection.score)[1, ..., :5]).all()

    other = dataclasses.replace(policy, heads=kvjax.Adaptive(1.0, math.inf))
    own = kvjax.make_plan(model.config, other, prompt_len=20, max_new_tokens=5)
    keep = [s.keep for s in analysis.decisions(own, found)]
    assert (np.asarray(keep).sum((2, 3)) == 18).all()


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_mask_of_a_reading_is_refused(tiny):
    model, params = tiny
    _, _, _, found = read_snapkv(tiny, 9)
    live = found.live()[:, 0]
    for keep, positions, message in (
        (live.astype(jnp.int32), "original", "keep has the dtype int32; give booleans, or gates between 0 and 1"),
        (live[..., 1:], "original", r"keep has the shape \(2, 2, 19\), but layer 0 has slots \(2, 2, 20\) of kv heads"),
        (live.astype(jnp.float32), "compact", "positions='compact' needs masks"),
        (live.astype(jnp.float32) * 1.5, "original", r"gates lie between 0.0 and 1.5"),
        (live, "moved", "positions='moved' is not one of .*'original', 'compact', 'rerotate', 'sliding'"),
    ):
        with pytest.raises(ValueError, match=message):
            found.outputs(0, keep, positions)
    with pytest.raises(ValueError, match="keep is for 2 layers, but the reading has 3; give one mask a layer"):
        found.logits_after(model, params, found.live())
    other = kvjax.make_plan(model.config, methods.h2o(9), prompt_len=20, max_new_tokens=5)
    with pytest.raises(ValueError, match="asks for 1 measurements in layer 0, of which the reading lacks"):
        analysis.decisions(other, found)


def test_gated_logits_are_the_hard_policys(tiny):
    """With the mask of a policy as gates, the rows that follow see what they see after the eviction."""
    model, params = tiny
    _, plan, (tokens, lengths, future), found = read_snapkv(tiny, 7)
    gates = [s.keep.astype(jnp.float32) for s in analysis.decisions(plan, found)]
    gated = found.logits_after(model, params, gates)
    _, state = kvjax.prefill(model, params, tokens, plan, lengths=lengths)
    np.testing.assert_allclose(gated, kvjax.feed(model, params, future, state)[0], atol=2e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Simplex(floor=1.5), r"Simplex\(floor=1.5\): a share of the average lies in \[0, 1\]"),
        (lambda: PyramidBeta(1.0), "beta is larger than 1"),
        (lambda: Safeguard(1.0), r"alpha starts inside \(0, 1\)"),
        (lambda: families.WindowShare(0.0), r"the share starts inside \(0, 1\)"),
        (lambda: NaclShares((0.0, 1.0, 1.0)), "shares start positive"),
        (lambda: EntropyK(0.0), "both are positive"),
        (lambda: VotingRows(0), "at least one row must vote"),
        (lambda: families.with_table(methods.h2o(8), np.ones(4)), r"shares have the shape \(4,\)"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_table_divides_a_budget():
    for policy in (methods.full(), kvjax.chain(methods.h2o(8), methods.tova(8))):
        with pytest.raises(ValueError, match="has no budget of its own to divide"):
            inspect.unwrap(families.with_table)(policy, np.ones((2, 2)))


def test_errors_of_views_and_policies(tiny):
    model, params = tiny
    seen = dataclasses.replace(view(), voters=None, drawn=None)
    with pytest.raises(ValueError, match=r"NaclShares needs View\.drawn"):
        NaclShares().gates(NaclShares().init(L, K), seen, 1.0)
    with pytest.raises(ValueError, match=r"EntropyK needs View\.voters"):
        EntropyK().gates(EntropyK().init(L, K), seen, 1.0)
    late = methods.h2o(8, recent=2)
    late = dataclasses.replace(late, when=kvjax.Schedule(prefill=False, every=2))
    tokens = helpers.token_ids(1, 12)
    plan = kvjax.make_plan(model.config, late, prompt_len=12, max_new_tokens=3)
    found = analysis.read(model, params, tokens, tokens[:, :3], measure=analysis.measurements([plan]))
    with pytest.raises(ValueError, match=r"evicts nothing after the prompt; use when=after_prefill\(\)"):
        analysis.decisions(plan, found)
    turned = dataclasses.replace(methods.h2o(8, recent=2), positions="compact")
    with pytest.raises(ValueError, match=r"has 'compact' and 'kv_head'; learn with these two"):
        Reader(model, params, turned, Prompts())
    looks = kvjax.from_fn(lambda kv, *_: kv.pos.astype(float), budget=4, observe=[VotingRows(2)], positions="compact")
    plan = kvjax.make_plan(model.config, looks, prompt_len=12, max_new_tokens=3)
    with pytest.raises(ValueError, match="stores keys unrotated; voters read those of 'original'"):
        kvjax.prefill(model, params, tokens, plan)
