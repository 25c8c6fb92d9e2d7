"""FastGen: the profile, the choice of strategies, and what heads keep while decoding."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers

import kvjax
from kvjax import methods, models, pallas_kernels
from kvjax.cache.pool import to_pool
from kvjax.methods.profiling import STRATEGIES, FastGen
from kvjax.models.embedded import EMBEDDED
from kvjax.pallas_kernels import recovered_attention
from kvjax.scoring.select import largest
from tests import helpers

SPECIAL, MARK, PLAIN = 1, 2, 0
E27_NAMES = dict(
    zip(
        ("special", "special+punct", "special+punct+frequent", "special+punct+frequent+local", "full"),
        STRATEGIES,
        strict=True,
    )
)


# --- the kernel ---


def softmax_rows(q, k, q_pos, kv_pos, scale, window, softcap, bias):
    """Attention "G T S" of one kv head in float64, zero where a row sees nothing."""
    x = np.einsum("gth,sh->gts", np.asarray(q, np.float64), np.asarray(k, np.float64)) * scale
    x = x if softcap is None else softcap * np.tanh(x / softcap)
    x = x if bias is None else x + np.asarray(bias)[:, None]
    rows, keys = q_pos[:, None], kv_pos[None]
    seen = (keys >= 0) & (keys <= rows) & (rows - keys < (window or np.inf))
    e = np.where(seen, np.exp(x - x.max()), 0.0)
    total = e.sum(-1, keepdims=True)
    return e / np.where(total > 0, total, 1.0), seen


def plain_recovery(q, k, q_pos, kv_pos, masks, within, tolerance, scale, window=None, softcap=None, bias=None):
    """(mass, elementwise) "B K M" with the whole matrix, one row after the other."""
    B, N, T, _ = q.shape
    K, G, M = k.shape[1], N // k.shape[1], len(masks)
    mass, same = np.zeros((B, K, M)), np.zeros((B, K, M))
    for b, h, m in np.ndindex(B, K, M):
        group = slice(h * G, (h + 1) * G)
        how = scale, window, softcap, None if bias is None else bias[b, group]
        p, seen = softmax_rows(q[b, group], k[b, h], q_pos[b], kv_pos[b, h], *how)
        p = p.mean(0)
        recovered, unchanged = [], 0
        for i in range(T):
            if not seen[i].any():
                continue
            kept = masks[m, b, h].copy()
            if within[m] is not None:
                kept |= q_pos[b, i] - kv_pos[b, h] < within[m][b]
            recovered.append(p[i, kept].sum())
            after = np.where(kept, p[i], 0.0)
            after = after / after.sum() if after.sum() > 0 else after
            unchanged += (np.abs(after - p[i]) < tolerance)[seen[i]].sum()
        mass[b, h, m] = np.mean(recovered)
        same[b, h, m] = unchanged / seen.sum()
    return mass, same


def recovery_inputs(T, *, cached=0, dtype=jnp.float32, seed=0, B=2, N=4, K=2, H=8):
    """Rows behind cached slots, some of them dead; the second sequence is padded. Three sets, one with a band."""
    rng = np.random.default_rng(seed)
    S = cached + T
    q, k = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((B, N, T, H), (B, K, S, H)))
    pad = np.array([0, T // 3])[:, None]
    q_pos = np.where(np.arange(T) >= pad, np.arange(T) - pad + cached, -1)
    old = np.stack([rng.permutation(cached) for _ in range(B * K)]).reshape(B, K, cached)
    old = np.where(rng.random(old.shape) < 0.3, -1, old)
    kv_pos = np.concatenate([old, np.broadcast_to(q_pos[:, None], (B, K, T))], -1)
    masks = rng.random((3, B, K, S)) < np.array([0.5, 0.05, 0.2]).reshape(3, 1, 1, 1)
    within = (None, np.array([3, 7]), None)
    return q, k, q_pos, kv_pos, masks, within


def recover(q, k, q_pos, kv_pos, masks, within, **options):
    bands = [None if w is None else jnp.asarray(w, jnp.int32) for w in within]
    ints = [jnp.asarray(x, jnp.int32) for x in (q_pos, kv_pos)]
    run = jax.jit(
        lambda q, k, q_pos, kv_pos, masks: recovered_attention(q, k, q_pos, kv_pos, masks, within=bands, **options)
    )
    return run(q, k, *ints, jnp.asarray(masks))


@pytest.mark.parametrize("T", [1, pytest.param(37, marks=pytest.mark.slow), 300])
@pytest.mark.parametrize("options", [{}, {"window": 9, "softcap": 2.0}], ids=str)
def test_recovery_against_numpy(T, options):
    with jax.enable_x64(True):
        inputs = recovery_inputs(T, cached=11, dtype=jnp.float64)
        if options:
            steps = inputs[3].max(-1, keepdims=True) - inputs[3]
            options = {**options, "bias": jnp.asarray(-0.1 * np.repeat(steps, 2, axis=1), jnp.float64)}
        mass, same = plain_recovery(*inputs, 1e-3, 0.6, **options)
        for implementation in (None, "reference"):
            found = recover(*inputs, tolerance=1e-3, scale=0.6, implementation=implementation, **options)
            np.testing.assert_allclose(found.mass, mass, atol=1e-12)
            np.testing.assert_allclose(found.elementwise, same, atol=1e-12)
    if T > 1:
        assert same.min() < 0.9 * same.max()
    options = {n: x.astype(jnp.float32) if n == "bias" else x for n, x in options.items()}
    single = recover(*(x.astype(jnp.float32) for x in inputs[:2]), *inputs[2:], scale=0.6, **options)
    assert single.elementwise is None
    assert single.mass.dtype == jnp.float32
    np.testing.assert_allclose(single.mass, mass, atol=3e-6)


def test_recovery_without_rows_and_of_half_precision():
    q, k, q_pos, kv_pos, masks, within = recovery_inputs(8)
    nothing = recover(q, k, np.full_like(q_pos, -1), kv_pos, masks, within, tolerance=1e-4)
    assert not np.asarray(nothing.mass).any()
    assert not np.asarray(nothing.elementwise).any()
    low = [x.astype(jnp.bfloat16) for x in (q, k)]
    full = recover(*(x.astype(jnp.float32) for x in low), q_pos, kv_pos, masks, within).mass
    np.testing.assert_allclose(recover(*low, q_pos, kv_pos, masks, within).mass, full, atol=1e-2)


def recovery_bytes(T):
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 4, T, 16), (1, 2, T, 16))]
    ints = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((1, T), (1, 2, T))]
    masks, band = jax.ShapeDtypeStruct((4, 1, 2, T), jnp.bool_), jax.ShapeDtypeStruct((1,), jnp.int32)
    run = lambda q, k, q_pos, kv_pos, masks, band: recovered_attention(
        q, k, q_pos, kv_pos, masks, within=(None, None, None, band), tolerance=1e-4
    )
    return jax.jit(run).lower(*shapes, *ints, masks, band).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_recovery_takes_memory_that_grows_linearly():
    short, long = recovery_bytes(4096), recovery_bytes(16384)
    assert long < 4.5 * short
    assert 3 * recovery_bytes(1024) < short  # one block at a time, where every block has a width of its own
    assert long < 4 * 4096 * 16384  # one float32 matrix of a single head at the shorter length alone would be larger


def test_no_kernel_computes_recovery_and_the_log_says_so(caplog):
    inputs = recovery_inputs(8)
    shape = lambda how: jax.eval_shape(lambda: recover(*inputs, implementation=how))
    with caplog.at_level(logging.INFO, logger="kvjax.pallas_kernels"):
        for implementation in ("xla", "reference", None):
            shape(implementation)
        assert not caplog.records
        for implementation in ("triton", "mosaic_gpu", "interpret"):
            shape(implementation)
            said = caplog.records[-1].getMessage()
            assert said.startswith("what sets of keys recover of attention is computed by xla")
            assert f"{implementation}: no kernel renormalises rows on the keys that are kept" in said
        assert len(caplog.records) == 3


def test_the_profile_is_computed_as_the_run_says(caplog):
    """What FastGen asks for goes through the same choice as the rest of attention."""
    q, k, v = helpers.qkv(0, T=9)
    policy = FastGen((SPECIAL,), (MARK,), 0.2, 0.2)
    tokens = jnp.full((2, 9), PLAIN)
    with caplog.at_level(logging.INFO, logger="kvjax.pallas_kernels"), pallas_kernels.use("interpret"):
        jax.eval_shape(lambda: read(policy, q, k, v, tokens)[1])
    said = [r.getMessage() for r in caplog.records]
    assert [s for s in said if s.startswith("what sets of keys recover")] == said
    assert said


def test_recovery_errors():
    q, k, q_pos, kv_pos, masks, within = recovery_inputs(8)
    with pytest.raises(ValueError, match="2 bands for 3 masks"):
        recover(q, k, q_pos, kv_pos, masks, within[:2])
    with pytest.raises(ValueError, match=r"8 query rows need their own 8 slots .* only 5"):
        recover(q, k[:, :, :5], q_pos, kv_pos[..., :5], masks[..., :5], within)
    with pytest.raises(ValueError, match="4 query heads are not a multiple of 3 kv heads"):
        recover(q, jnp.ones((2, 3, 8, 8)), q_pos, np.ones((2, 3, 8)), np.ones((3, 2, 3, 8), bool), within)


# --- the profile and the choice ---


def read(policy, q, k, v, tokens, *, scale=None, max_new_tokens=0):
    """(layer after the prompt before eviction, stats, context)."""
    B, N, T, H = q.shape
    site = kvjax.Site(0, 1, N, k.shape[1], H, T, max_new_tokens)
    ctx = helpers.context(site, length=[T] * B, tokens=tokens)
    none = jnp.zeros((B, k.shape[1], 0), jnp.int32)
    kv = kvjax.LayerKV(k[:, :, :0], v[:, :, :0], none, policy.at(site).init(B))
    pos = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    observe = policy.at(site).spec.prompt
    _, kv, stats = kvjax.attend(kv, q, k, v, pos, ctx=ctx, rotate=lambda x, pos: x, observe=observe, scale=scale)
    return kv, stats, ctx


def example(examples, **fields):
    """(policy, what `read` returns) for E27."""
    e = examples["E27"]
    special, mark = (np.asarray(e["inputs"][name], bool) for name in ("special", "punct"))
    tokens = jnp.asarray(np.where(special, SPECIAL, np.where(mark, MARK, PLAIN))[None], jnp.int32)
    q, k, v, scale = helpers.from_probabilities(e["inputs"]["P"])
    ratios = {"frequent_ratio": e["params"]["r_f"], "local_ratio": e["params"]["r_l"], **fields}
    policy = methods.fastgen(special_ids=(SPECIAL,), punctuation_ids=(MARK,), **ratios)
    return policy, *read(policy, q, k, v, tokens, scale=scale)


def test_e27_fastgen(examples):
    e = examples["E27"]
    policy, kv, stats, ctx = example(examples)
    expected = {E27_NAMES[name]: mass for name, mass in e["expected"]["recovered_mass"].items()}
    found = dict(zip(STRATEGIES, [*np.asarray(stats[policy.profile][0, 0]), 1.0], strict=True))
    assert found == pytest.approx(expected, abs=1e-6)
    for ratio, name in e["expected"]["chosen"].items():
        chosen = dataclasses.replace(policy, recovery_ratio=float(ratio))
        (memory,), selection = chosen.at(ctx.site).decide(kv, stats, ctx)
        assert STRATEGIES[int(memory.strategy.value[0, 0])] == E27_NAMES[name]
        # Special 0, punctuation 3; the largest columns are 0 and 1; the newest two are 4 and 5.
        kept = {"special": [0], "frequent": [0, 1, 3], "local": [0, 1, 3, 4, 5], "full": [*range(6)]}
        assert helpers.kept(selection) == kept[E27_NAMES[name]]


def test_e27_rounded_up(examples):
    """0.34 * 6 tokens are three instead of two."""
    policy, _, stats, _ = example(examples, rounding="ceil")
    np.testing.assert_allclose(stats[policy.profile][0, 0], [0.458333, 0.533333, 0.875, 1.0], atol=1e-6)


def test_e27_elementwise(examples):
    policy, kv, stats, ctx = example(examples, recovery="elementwise")
    p = np.asarray(examples["E27"]["inputs"]["P"])
    sets = [{0}, {0, 3}, {0, 1, 3}, {0, 1, 3}]
    expected = []
    for m, kept in enumerate(sets):
        same = 0
        for i in range(6):
            here = {j for j in range(i + 1) if j in kept or (m == 3 and i - j < 2)}
            total = sum(p[i, j] for j in here)
            same += sum(abs((p[i, j] / total if j in here else 0.0) - p[i, j]) < 1e-4 for j in range(i + 1))
        expected.append(same / 21)
    np.testing.assert_allclose(stats[policy.profile][0, 0], expected, atol=1e-6)
    assert expected[0] < expected[2] < expected[3] < 1
    for strategy, share in enumerate(expected):
        if share > max(expected[:strategy], default=0):
            chosen = dataclasses.replace(policy, recovery_ratio=share - 1e-6)
            assert int(chosen.at(ctx.site).decide(kv, stats, ctx)[0][0].strategy.value[0, 0]) == strategy


def test_a_group_is_profiled_by_its_mean():
    """One query head looks at the special token, the other at itself: only their mean decides."""
    n = 8
    first, itself = np.zeros((n, n)), np.eye(n)
    first[:, 0] = 1
    q, k, v, scale = helpers.from_probabilities(np.stack([first, itself]))
    tokens = jnp.asarray([[SPECIAL, *[PLAIN] * (n - 1)]], jnp.int32)
    policy = methods.fastgen(special_ids=(SPECIAL,), punctuation_ids=(MARK,), frequent_ratio=0.0)
    _, stats, _ = read(policy, q, k, v, tokens, scale=scale)
    special = (n + 1) / (2 * n)
    np.testing.assert_allclose(stats[policy.profile][0, 0], [special] * 3 + [1.0], atol=1e-6)


def test_largest_breaks_ties_by_the_next_key():
    rng = np.random.default_rng(0)
    shape = (3, 4, 50)
    first = rng.choice([-np.inf, -2.5, -0.0, 0.0, 0.25, 1e-30, 3.0, np.inf], shape).astype(np.float32)
    second = rng.integers(-2, 2, shape).astype(np.int32)
    place = rng.permuted(np.broadcast_to(np.arange(-20, 30, dtype=np.int32), shape), axis=-1)
    counts = rng.integers(0, 60, shape[:2]).astype(np.int32)
    found = jax.jit(largest)(tuple(map(jnp.asarray, (first, second, place))), jnp.asarray(counts))
    for b, h in np.ndindex(shape[:2]):
        order = sorted(range(50), key=lambda j: (first[b, h, j], second[b, h, j], place[b, h, j]), reverse=True)
        assert sorted(order[: counts[b, h]]) == np.nonzero(found[b, h])[0].tolist()


# --- decoding, against one head in plain Python ---


PROMPT, NEW, HEADS, GROUP = 30, 14, 5, 2


def structured_heads(seed=0):
    """Five heads that look at: special tokens, and punctuation, and frequent words, and the vicinity, and anything.

    Returns tokens "1 T", q "1 N T H", k "1 K T H".
    """
    rng = np.random.default_rng(seed)
    T, H = PROMPT + NEW, 8
    tokens = rng.choice([PLAIN, MARK], T, p=[0.7, 0.3])
    tokens[[0, 12, 33]] = SPECIAL
    words = np.isin(np.arange(T), [4, 9, 17, 31, 36])
    q = rng.standard_normal((HEADS, GROUP, T, H)) * 0.3
    k = rng.standard_normal((HEADS, T, H)) * 0.3
    wanted = [tokens == SPECIAL, tokens != PLAIN, np.where(tokens == MARK, 0.2, (tokens == SPECIAL) | words)]
    for head, liked in enumerate(wanted):
        q[head, :, :, 0] = 7 * H**0.5
        k[head, :, 0] = liked
    place = np.arange(T) / T
    q[3, :, :, 0], q[3, :, :, 1] = 1200 * place, -600  # -(i - j)^2, up to a term that does not depend on j
    k[3, :, 0], k[3, :, 1] = place, place**2
    f = lambda x: jnp.asarray(x, jnp.float32)
    return jnp.asarray(tokens[None], jnp.int32), f(q.reshape(1, HEADS * GROUP, T, H)), f(k[None])


def simulate(tokens, q, k, policy, cap):
    """(strategy, positions kept after the prompt and after every step) of one kv head. q is "G T H", k "T H"."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    special = {j for j, t in enumerate(tokens) if t in policy.special_ids}
    marks = {j for j, t in enumerate(tokens) if t in policy.punctuation_ids} - special
    num_local = int(policy.local_ratio * PROMPT + 1e-9)

    def row(i, live):
        x = q[:, i] @ k[live].T * k.shape[1] ** -0.5
        e = np.exp(x - x.max(-1, keepdims=True))
        return (e / e.sum(-1, keepdims=True)).mean(0)

    received = dict.fromkeys(range(PROMPT), 0.0)
    matrix = []
    for i in range(PROMPT):
        p = row(i, list(range(i + 1)))
        matrix.append(p)
        for j, x in enumerate(p):
            received[j] += x

    def frequent(length):
        ranked = sorted(received, key=lambda j: (received[j], j), reverse=True)
        return set(ranked[: int(policy.frequent_ratio * length + 1e-9)])

    def tiers(length):
        return [special, marks, frequent(length), set(range(length - num_local, length)), set(range(length))]

    strategy = 4
    for s in (3, 2, 1, 0):
        fixed = set().union(*tiers(PROMPT)[: min(s, 2) + 1])
        near = num_local if s == 3 else 0
        mass = [sum(x for j, x in enumerate(p) if j in fixed or i - j < near) for i, p in enumerate(matrix)]
        if np.mean(mass) >= policy.recovery_ratio:
            strategy = s

    def keep(length):
        kept = []
        for tier, members in enumerate(tiers(length)[: strategy + 1]):
            fresh = [j for j in received if j in members and j not in kept]
            kept += sorted(fresh, key=lambda j: (j if tier == 3 else received[j], j), reverse=True)
        for j in set(received) - set(kept[:cap]):
            del received[j]
        return sorted(received)

    history = [keep(PROMPT)]
    for i in range(PROMPT, PROMPT + NEW):
        received[i] = 0.0
        live = sorted(received)
        for j, x in zip(live, row(i, live), strict=True):
            received[j] += x
        history.append(keep(i + 1))
    return strategy, history


def divide(needed, strategies, total):
    """The slots of a pool for every head, token by token."""
    given = [0] * HEADS
    for wanted in (needed, [NEW if s == 4 else 0 for s in strategies]):
        left = total - sum(given)
        level = max(n for n in range(PROMPT + NEW + 1) if sum(min(w, n) for w in wanted) <= left)
        given = [g + min(w, level) for g, w in zip(given, wanted, strict=True)]
    return [g + (total - sum(given)) // HEADS for g in given]


@pytest.mark.parametrize(
    ("budget", "storage"),
    [(None, "dense"), (11, "dense"), (PROMPT + NEW, "pool"), (23, "pool"), (9, "pool")],
    ids=["no_cap", "cap", "pool_for_all", "pool_for_sets", "pool_too_small"],
)
def test_decoding_against_a_simulation(budget, storage):
    tokens, q, k = structured_heads()
    policy = FastGen((SPECIAL,), (MARK,), 0.2, 0.2, recovery_ratio=0.9, budget=budget, storage=storage)
    prompt = lambda x: x[:, :, :PROMPT]
    kv, stats, ctx = read(policy, prompt(q), prompt(k), prompt(k), tokens[:, :PROMPT], max_new_tokens=NEW)
    slots = int(policy.at(ctx.site).spec.slots.max())
    assert slots == HEADS * (PROMPT + NEW if budget is None else min(budget + 1, PROMPT + NEW))
    kv = policy.layer(kv, stats, ctx)
    kv = (
        to_pool(kv, slots, policy.at(ctx.site).reserve(kv, ctx))
        if storage == "pool"
        else kvjax.compact(kv, slots // HEADS)
    )
    history = [helpers.live_positions(kv)[0]]

    @jax.jit
    def step(kv, q, k, pos, ctx):
        observe = policy.at(ctx.site).spec.step
        _, kv, stats = kvjax.attend(kv, q, k, k, pos, ctx=ctx, rotate=lambda x, pos: x, observe=observe)
        return kv.apply(lambda view: policy.layer(view, stats, ctx))

    for i in range(PROMPT, PROMPT + NEW):
        moment = {"length": [i + 1], "prompt_length": [PROMPT], "phase": "decode"}
        now = helpers.context(ctx.site, **moment, tokens=tokens[:, i : i + 1])
        kv = step(kv, q[:, :, i : i + 1], k[:, :, i : i + 1], jnp.asarray([[i]], jnp.int32), now)
        history.append(helpers.live_positions(kv)[0])
    assert not np.isnan(kv.v).any()

    strategies = kv.memory[0].strategy.value[0].tolist()
    assert strategies == [0, 1, 2, 3, 4]
    ids = np.asarray(tokens[0]).tolist()
    alone = lambda head, cap: simulate(ids, q[0, head * GROUP : (head + 1) * GROUP], k[0, head], policy, cap)
    caps = [budget] * HEADS
    if storage == "pool":
        caps = divide([len(alone(head, None)[1][0]) for head in range(HEADS)], strategies, budget * HEADS)
        assert kv.memory[0].cap.value[0].tolist() == caps
    for head, strategy in enumerate(strategies):
        expected = alone(head, caps[head])
        assert strategy == expected[0]
        assert [h[head] for h in history] == expected[1]
    if budget in (None, 23, PROMPT + NEW):  # these pools hold what the dense cache without a cap does
        assert history[-1][0] == [0, 12, 33]  # a head of special tokens kept none of the others
        assert history[-1][4] == [*range(PROMPT + NEW)]
        assert history[-1][2] != [j for j in history[0][2] if j in history[-1][2]]  # a new token became frequent
    elif storage == "dense":
        assert max(len(h) for now in history for h in now) == budget
    else:
        assert max(len(h) for h in history[-1]) > budget
        assert max(sum(len(h) for h in now) for now in history) <= budget * HEADS


def test_a_pool_gives_heads_what_their_sets_take(shallow):
    """Three fifths of the dense cache's slots, and nothing lost: heads of few tokens leave room for the others."""
    model, params = shallow
    tokens = helpers.token_ids(2, 24)
    policy = methods.fastgen(
        special_ids=range(12), punctuation_ids=range(12, 24), recovery_ratio=0.43, frequent_ratio=0.1, local_ratio=0.2
    )
    full = kvjax.generate(model, params, tokens, policy=policy, max_new_tokens=6, buckets=False)
    pool = dataclasses.replace(policy, budget=17, storage="pool")
    found = kvjax.generate(model, params, tokens, policy=pool, max_new_tokens=6, buckets=False)
    np.testing.assert_array_equal(found.tokens, full.tokens)
    np.testing.assert_array_equal(found.state.num_live, full.state.num_live)
    assert found.state.num_slots == 2 * 18
    assert full.state.num_slots == 2 * 30


def test_sequences_that_have_ended_keep_their_caches(shallow):
    model, params = shallow
    policy = methods.fastgen(special_ids=range(3), punctuation_ids=range(3, 30), recovery_ratio=0.7)
    tokens = helpers.token_ids(2, 12)
    plan = kvjax.make_plan(model.config, policy, prompt_len=12, max_new_tokens=4)
    _, before = jax.jit(lambda p: kvjax.prefill(model, p, tokens, plan))(params)
    token = jnp.asarray([40, 1], jnp.int32)  # a special token for the row that stands still
    active = jnp.asarray([True, False])
    _, after = jax.jit(lambda p, s: kvjax.decode_step(model, p, token, s, active=active))(params, before)
    for a, b in zip(before.layers, after.layers, strict=True):
        np.testing.assert_array_equal(a.pos[1], b.pos[1])
        np.testing.assert_array_equal(a.memory[0].kinds[1], b.memory[0].kinds[1])
        np.testing.assert_array_equal(a.memory[0].mass[1], b.memory[0].mass[1])
    assert (np.asarray(after.layers[0].memory[0].mass[0]) != np.asarray(before.layers[0].memory[0].mass[0])).any()


@pytest.mark.parametrize(("ratio", "expected"), [(0.43, {0, 1, 2}), pytest.param(0.79, {3, 4}, marks=pytest.mark.slow)])
def test_heads_differ_in_a_model_and_a_state_tells(tiny, ratio, expected):
    model, params = tiny
    tokens = np.asarray(helpers.token_ids(2, 24))
    ratios = {"frequent_ratio": 0.1, "local_ratio": 0.2, "recovery_ratio": ratio}
    policy = methods.fastgen(special_ids=range(12), punctuation_ids=range(12, 24), **ratios)
    result = kvjax.generate(model, params, tokens, policy=policy, max_new_tokens=6, buckets=False)
    strategies = np.stack([layer.memory[0].strategy.value for layer in result.state.layers], 1)
    assert set(strategies.ravel().tolist()) == expected
    live = np.asarray(result.state.num_live)
    read = np.concatenate([tokens, result.tokens[:, :-1]], 1)
    for row, ids in enumerate(read):
        assert (live[row][strategies[row] == 0] == (ids < 12).sum()).all()
        assert (live[row][strategies[row] == 1] == (ids < 24).sum()).all()
        assert (live[row][strategies[row] == 4] == 24 + 5).all()
    assert result.state.num_slots == 3 * 2 * 30  # without a cap there is room for everything

    # As two steps, without layer-by-layer eviction: the statistics carry all that the policy needs.
    plan = kvjax.make_plan(model.config, policy, prompt_len=24, max_new_tokens=6)

    @jax.jit
    def both(params, tokens):
        _, state, stats = kvjax.forward(model, params, tokens, kvjax.init_state(plan, jnp.asarray([24, 24])))
        return policy(state, stats), kvjax.prefill(model, params, tokens, plan)[1]

    apart, together = both(params, jnp.asarray(tokens))
    for a, b in zip(apart.layers, together.layers, strict=True):
        assert helpers.live_positions(a) == helpers.live_positions(b)


# --- sizes, ids, errors ---


def test_sizes():
    site = helpers.site(T=20, max_new_tokens=8)
    policy = methods.fastgen(special_ids=(), punctuation_ids=())
    assert (policy.at(site).spec.target[20], policy.at(site).spec.capacity.max()) == (28, 28)
    capped = dataclasses.replace(policy, budget=0.25)
    spec = capped.at(site).spec
    assert (spec.target[20], spec.capacity.max(), spec.capacity[[8, 12]].max()) == (5, 6, 4)
    assert (spec.target[2], dataclasses.replace(policy, budget=100).at(site).spec.capacity.max()) == (1, 28)


def test_errors_say_what_to_do():
    make = methods.fastgen
    ids = {"special_ids": (0,), "punctuation_ids": (1,)}
    with pytest.raises(ValueError, match="special_ids and punctuation_ids were not given; pass tokenizer="):
        make()
    with pytest.raises(ValueError, match="but punctuation_ids were not given"):
        make(special_ids=(0,))
    with pytest.raises(ValueError, match=r"special_ids=\(-1,\).*give a tuple of token ids"):
        FastGen((-1,), ())
    with pytest.raises(ValueError, match=r"local_ratio=1.5.*lies in \[0, 1\]"):
        make(**ids, local_ratio=1.5)
    with pytest.raises(ValueError, match="budget=0 tokens"):
        make(**ids, budget=0)
    with pytest.raises(ValueError, match="a pool has a fixed number of slots; give a budget"):
        make(**ids, storage="pool")
    with pytest.raises(ValueError, match="cannot apply"):
        kvjax.when(kvjax.every(4), make(**ids))
    q, k, v = helpers.qkv()
    with pytest.raises(ValueError, match=r"pass tokens= to evict_layer, or drive the model with generate"):
        kvjax.evict_layer(make(**ids), q, k, v)


def byte_level_tokenizer():
    """Pieces as byte-level BPE writes them: G with a dot is a leading space, and other bytes are letters too."""
    pieces = ["<s>", "</s>", "<|turn|>", ",", "Ġ.", "Ġ...", "âĢĶ", "âĢ", "Ġ", "a", "Ġa,", "+", "Ċ"]
    raw = tokenizers.Tokenizer(tokenizers.models.BPE({p: i for i, p in enumerate(pieces)}, []))
    raw.decoder = tokenizers.decoders.ByteLevel()
    raw.add_special_tokens([tokenizers.AddedToken("<|turn|>", special=True)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


def test_token_classes():
    assert models.token_classes(byte_level_tokenizer()) == ((0, 1, 2), (3, 4, 5, 6, 11))
    tokenizer = models.load_tokenizer(EMBEDDED)
    special, punctuation = models.token_classes(tokenizer)
    assert set(special) == set(tokenizer.all_special_ids)
    assert "." in tokenizer.convert_ids_to_tokens(list(punctuation))
    assert not any(c.isalnum() for word in tokenizer.convert_ids_to_tokens(list(punctuation)) for c in word)
    policy = methods.fastgen(tokenizer, recovery_ratio=0.9)
    assert (policy.special_ids, policy.punctuation_ids) == (special, punctuation)
