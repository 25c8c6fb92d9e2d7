"""Numeric examples of the methods' own arithmetic, read from `golden/policy_examples.json`."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.analysis import eviction_bound, eviction_loss
from kvjax.eviction import EvictMemory
from kvjax.methods.easykv import block_sizes
from kvjax.methods.nacl import Table4
from kvjax.methods.simulations import NextStepMask
from kvjax.pallas_kernels import Columns, Softmax, attention
from kvjax.scoring.key_scores import ExpectedAttention, KeyDifference, KeyNorm, LagRelative
from kvjax.scoring.measurements import FutureQueries, ProjectedValueNorm
from kvjax.scoring.protect import Protect, TopStd, rows_since_insertion
from kvjax.scoring.scores import Accumulated, Mean
from kvjax.scoring.select import Chunks, Limits, PerChunk, TopK, TopKThenRandom, TwoStage
from kvjax.scoring.stats import EntropyScaled, LastRows, LayerStats, Noisy, Observe, Slots
from kvjax.sizes.allocation import Adaptive, UniformHeads
from kvjax.sizes.budget import Counts, Ratio, Share, Tokens
from tests import helpers


def select(policy, p, **kwargs):
    q, k, v, scale = helpers.from_probabilities(p)
    return kvjax.evict_layer(policy, q, k, v, scale=scale, **kwargs)


def evicted(policy, p, **kwargs):
    kept = helpers.kept(select(policy, p, **kwargs))
    gone = sorted(set(range(len(p))) - set(kept))
    return gone[0] if len(gone) == 1 else gone


def cache(pos, memory=(), *, H=8, k=None, v=None):
    """One row and head that holds tokens at given positions."""
    pos = jnp.asarray([[pos]], jnp.int32)
    zeros = jnp.zeros((*pos.shape, H))
    return kvjax.LayerKV(zeros if k is None else k, zeros if v is None else v, pos, memory)


def moment_of(kv, pos, ctx):
    """A moment whose queries nobody reads."""
    q = jnp.zeros((1, 1, len(pos[0]), 8))
    return kvjax.scoring.stats.Moment(q, q, kv, jnp.asarray(pos, jnp.int32), ctx, lambda x, _: x)


def decoding(length, *, prompt, site=None):
    site = helpers.site(T=prompt, K=1, N=1) if site is None else site
    return helpers.context(site, length=[length], prompt_length=[prompt], phase="decode")


def test_e04_the_mask_with_one_slot_too_many(examples):
    e = examples["E04"]
    n = len(e["inputs"]["column_sums"])
    sums = jnp.asarray([[[*e["inputs"]["column_sums"], 0.0]]], jnp.float32)
    kv = cache(range(n + 1), (sums, jnp.zeros_like(sums)))
    ctx = decoding(n + 1, prompt=n)
    moment = moment_of(kv, [[n]], ctx)
    mask = lambda recent: NextStepMask(e["params"]["heavy"], recent).visible(moment)
    shown = lambda recent: np.flatnonzero(np.asarray(mask(recent)[0, 0])).tolist()
    visible = shown(e["params"]["recent"])
    assert visible == e["expected"]["visible_to_next_step"]
    assert e["expected"]["always_lost"] not in visible
    assert shown(0) == e["expected"]["with_recent_zero"]


@pytest.mark.parametrize("persistent", [False, True])
def test_the_mask_hides_nothing_before_there_is_more_than_the_budget(persistent):
    """The row to come reads all of heavy + recent = 5 tokens, and of 6 the first that the released code loses."""
    policy = NextStepMask(3, 2, persistent=persistent)
    for n in range(1, 7):
        kv, ctx = cache(range(n)), decoding(n, prompt=6)
        memory = (jnp.arange(6.0, 6 - n, -1)[None, None], jnp.zeros((1, 1, n)))
        stats = LayerStats((jnp.zeros((1, 1, n)),), (Observe(),))
        memory, _ = policy.decide(dataclasses.replace(kv, memory=memory), stats, ctx)
        memory = tuple(jnp.pad(x, ((0, 0), (0, 0), (0, 1))) for x in memory)
        shown = policy.visible(moment_of(cache(range(n + 1), memory), [[n]], decoding(n + 1, prompt=6)))
        assert np.flatnonzero(~shown[0, 0]).tolist() == ([3, 4] if n == 6 else [])


@pytest.mark.parametrize(("group", "read"), [("max", [2, 3, 4]), ("mean", [0, 1, 4])])
def test_quest_reads_the_pages_of_the_largest_bounds(group, read):
    """Keys (1, -1), (-2, 0) | (0, 3), (1, 1) | (2, -3), of which the last is the row's own.

    For (1, -2) the bounds are 1 + 2, 1 - 2 and 2 + 6; for (-1, 1.5) they are 2 + 0, 0 + 4.5 and -2 - 4.5.
    """
    policy = methods.quest(4, page_size=2, dense_layers=0, group=group)
    k = jnp.asarray([[[[1.0, -1], [-2, 0], [0, 3], [1, 1], [2, -3]]]])
    q = jnp.asarray([[[[1.0, -2]], [[-1, 1.5]]]])
    site = helpers.site(T=4, N=2, K=1, H=2)
    kv, ctx = cache(range(5), policy.init(site, 1), k=k, v=k), decoding(5, prompt=4, site=site)
    kv = dataclasses.replace(kv, memory=policy.appended(kv, ctx))
    bounds = policy.pages.bounds(kv.memory, q[:, None, :, 0])
    np.testing.assert_array_equal(bounds[0, 0, :, :3], [[3, -1, 8], [2, 4.5, -6.5]])
    shown = policy.visible(dataclasses.replace(moment_of(kv, [[4]], ctx), q=q, raw_q=q))
    assert np.flatnonzero(shown.mask(5)[0, 0]).tolist() == read
    assert shown.slots.shape == (1, 1, 4)


def test_e05_stepwise_mask(examples):
    e = examples["E05"]
    p = np.asarray(e["inputs"]["P"])
    heavy, recent = e["params"]["heavy"], e["params"]["recent"]
    policy = methods.h2o(heavy + recent, recent=recent, prefill="stepwise_mask")
    kv = cache([0], (jnp.zeros((1, 1, 1)),))
    rows = []
    for t in range(len(p)):
        if t:
            new = jnp.zeros((1, 1, 1, 8))
            kv = kvjax.cache.state.append(kv, new, new, jnp.asarray([[t]], jnp.int32))
        ctx = helpers.context(helpers.site(T=len(p), K=1, N=1), length=[t + 1], prompt_length=[len(p)])
        shown = policy.at(ctx.site).visible(moment_of(kv, [[t]], ctx))
        assert policy.spec(ctx.site).hides == "live"
        rows.append(np.pad(np.asarray(shown[0, 0], int), (0, len(p) - t - 1)).tolist())
        row = LayerStats((jnp.asarray(p[t, : t + 1], jnp.float32)[None, None],), policy.spec(ctx.site).prompt)
        kv = policy.layer(kv, row, ctx)
    assert rows == e["expected"]["mask"]


def test_e06_above_average_counts(examples):
    e = examples["E06"]
    make = lambda ties: methods.aqas(e["params"]["budget"], recent=e["params"]["recent"], ties=ties)
    selection = select(make("evict_older"), e["inputs"]["P"])
    np.testing.assert_array_equal(selection.score[0, 0], e["expected"]["counts"])
    assert evicted(make("evict_older"), e["inputs"]["P"]) == e["expected"]["evicted_tie_evict_older"]
    assert evicted(make("lower_index"), e["inputs"]["P"]) == e["expected"]["evicted_tie_lower_index_kept"]


def test_e07_scissorhands(examples):
    e = examples["E07"]
    n = len(e["inputs"]["P"])
    policy = methods.scissorhands(n - 1, history=e["params"]["history"], recent=e["params"]["recent"], drop=0)
    selection = select(policy, e["inputs"]["P"])
    np.testing.assert_array_equal(selection.score[0, 0], e["expected"]["counts_in_history"])
    assert helpers.kept(select(dataclasses.replace(policy, budget=n - 2), e["inputs"]["P"])) == e["expected"]["kept"]

    # The same history one row at a time: a cache of 5 that gets its 6th token drops 2 at once.
    policy = methods.scissorhands(5, history=3, recent=2, drop=e["params"]["drop"])
    p = np.asarray(e["inputs"]["P"])
    site = helpers.site(T=5, K=1, N=1, max_new_tokens=4)
    q, k, v, _ = helpers.from_probabilities(p)
    kv = kvjax.LayerKV(k[:, :, :0], v[:, :, :0], jnp.zeros((1, 1, 0), jnp.int32), policy.at(site).init(1))
    for phase, rows in (("prefill", slice(0, 5)), ("decode", slice(5, 6))):
        ctx = helpers.context(site, length=[rows.stop], prompt_length=[5], phase=phase)
        pos = jnp.arange(rows.start, rows.stop, dtype=jnp.int32)[None]
        observe = policy.at(site).spec.observe(phase)
        kv = kvjax.compact(kv, 6) if phase == "decode" else kv
        _, kv, stats = kvjax.attend(
            kv,
            q[:, :, rows],
            k[:, :, rows],
            v[:, :, rows],
            pos,
            ctx=ctx,
            rotate=lambda x, _: x,
            observe=observe,
            scale=1.0,
        )
        kv = policy.layer(kv, stats, ctx)
    assert helpers.live_positions(kv)[0][0] == e["expected"]["kept"]


def test_e09_mean_attention_scores(examples):
    e = examples["E09"]
    with_self = select(methods.mas(6), e["inputs"]["P"]).score[0, 0]
    np.testing.assert_allclose(with_self, e["expected"]["mean_including_self_row"], atol=1e-6)
    without = np.asarray(select(methods.mas(6, count_self=False), e["inputs"]["P"]).score[0, 0])
    np.testing.assert_allclose(without[:-1], e["expected"]["mean_excluding_self_row"][:-1], atol=1e-6)
    assert np.isposinf(without[-1])
    assert e["expected"]["mean_excluding_self_row"][-1] is None


def test_e10_roco(examples):
    e = examples["E10"]
    p, budget = e["inputs"]["P"], e["params"]["budget"]
    make = lambda r, last, budget=budget: kvjax.Evict(
        Mean(), budget, protect=Protect(recent=last), scope=TopStd(r) if r else None, when=kvjax.every_step()
    )
    np.testing.assert_allclose(select(make(2, 2), p).score[0, 0], e["expected"]["mean"], atol=1e-6)
    assert [evicted(make(0, 0), p)] == e["expected"]["evicted_r0"]
    assert [evicted(make(2, 0), p)] == e["expected"]["evicted_r2"]
    assert [evicted(make(2, 2), p)] == e["expected"]["evicted_r2_protect_last2"]
    assert [evicted(make(4, 2), p)] == e["expected"]["evicted_r4_protect_last2"]
    assert evicted(make(2, 2, budget - 1), p) == e["expected"]["evicted_two_r2_protect_last2"]

    q, k, v, scale = helpers.from_probabilities(p)
    pos = jnp.arange(6, dtype=jnp.int32)
    sums, squares = attention(
        q, k, v, pos[None], pos[None, None], columns=[Columns(), Columns(element="p2")], scale=scale
    ).columns
    np.testing.assert_allclose(sums[0, 0], e["expected"]["acc"], atol=1e-6)
    np.testing.assert_allclose(squares[0, 0], e["expected"]["acc_sq"], atol=1e-6)

    kv = kvjax.LayerKV(k, v, pos[None, None])
    ctx = helpers.context(helpers.site(T=6, K=1, N=1), length=[6])
    assert rows_since_insertion(kv, ctx)[0, 0].tolist() == e["expected"]["count"]
    np.testing.assert_allclose(TopStd(2).deviation((sums, squares), kv, ctx)[0, 0], e["expected"]["std"], atol=1e-5)


def test_e12_block_sizes(examples):
    for row in examples["E12"]["expected"]["rows"]:
        sizes = block_sizes(row["length"], row["budget"], row["stride"], row["mode"])
        wanted = (row["nominal"], row["padded"], row["final_cache"], row["dense_prefix"])
        assert dataclasses.astuple(sizes) == wanted, row


def test_e14_nacl_shares(examples):
    n = np.array([1000])
    for percent, row in examples["E14"]["expected"]["table4"].items():
        budget = Ratio(int(percent) / 100)
        share = lambda which, budget=budget: int(Table4(which, budget).table(n, n)[0])
        assert share("protect") == row["protected_proxies"]
        assert share("rows") == row["protected_proxies"] + row["scoring_only_proxies"]
        assert share("random") == row["random_keep"]
        assert int(budget.table(n, n)[0]) == row["kept_total"]
        assert row["kept_total"] - share("protect") - share("random") == row["proxy_keep"]
    code = examples["E14"]["expected"]["code_defaults_n131072"]
    policy = methods.nacl_llama3()
    n = np.array([131072])
    budget = Ratio(0.2).table(n, n)
    sinks, recent = helpers.protected_counts(policy.protect, n, budget)
    assert (int(sinks[0]), int(recent[0])) == (code["sinks"], code["recent"])
    random = kvjax.sizes.budget.as_count(policy.select.random, "random").table(n, budget)[0]
    assert random == code["random_keep"]
    # The code truncates four shares; kvjax keeps the exact total of their sum, one token more.
    assert 0 <= int(budget[0]) - code["kept_total"] <= 1
    # Where the code's slices come out empty, kvjax protects the sinks alone.
    code, n = examples["E14"]["expected"]["code_defaults_n4096"], np.array([4096])
    budget = Ratio(0.2).table(n, n)
    sinks, recent = helpers.protected_counts(policy.protect, n, budget)
    assert not code["usable"]
    assert (int(sinks[0]), int(recent[0])) == (code["sinks"], max(code["recent"], 0))
    assert int(kvjax.sizes.budget.as_count(policy.select.random, "random").table(n, budget)[0]) == code["random_keep"]
    assert 0 <= int(budget[0]) - code["kept_total"] <= 2


@pytest.mark.parametrize(
    ("percent", "protect", "scoring", "random"),
    [(5, 0.5, 1.5, 3.5), (10, 1, 3, 7), (15, 1.5, 10.5, 9.5), (20, 2, 18, 12), (25, 1.75, 19, 15), (30, 1.5, 20, 18)],
)
def test_nacl_shares_are_of_the_prompt_at_every_length(percent, protect, scoring, random):
    """Each is rounded once, in exact numbers: 20 % of 1,001 tokens are 200 scoring rows, not 20 % of 199.8."""
    n = np.arange(3000)
    floor = lambda share: n * round(share * 100) // 10000
    of = lambda which: Table4(which, Ratio(percent / 100)).table(n, n)
    np.testing.assert_array_equal(of("protect"), floor(protect))
    np.testing.assert_array_equal(of("rows"), np.maximum(floor(protect + scoring), 1))
    np.testing.assert_array_equal(of("random"), floor(random))
    tokens = np.full_like(n, 1000)
    assert (Table4("rows", Tokens(200)).table(tokens, tokens) == 200).all()


def test_e15_nacl_selection(examples, monkeypatch):
    e = examples["E15"]
    rows = np.asarray(e["inputs"]["P_rows"])
    n = rows.shape[1]
    p = np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
    p[e["inputs"]["proxy_rows"]] = rows
    uniforms = np.full(n, 0.5)
    for position, u in e["inputs"]["uniforms_by_position"].items():
        uniforms[int(position)] = u
    draw = lambda self, pos, *, shared=False: jnp.broadcast_to(jnp.asarray(uniforms, jnp.float32), pos.shape)
    monkeypatch.setattr(kvjax.Context, "uniform", draw)
    params = e["params"]
    budget = params["sinks"] + params["recent"] + params["proxy_keep"] + params["random_keep"]
    policy = methods.nacl(
        budget, protect=params["recent"], proxies=len(rows), random=params["random_keep"], sinks=params["sinks"]
    )
    selection = select(policy, p)
    np.testing.assert_allclose(selection.score[0, 0], e["expected"]["column_sums"], atol=1e-6)
    assert helpers.kept(selection) == e["expected"]["kept"]
    proxies = select(dataclasses.replace(policy, budget=budget - 1, select=kvjax.scoring.select.TopK()), p)
    protected = {*range(params["sinks"]), *range(n - params["recent"], n)}
    assert sorted(set(helpers.kept(proxies)) - protected) == e["expected"]["proxy_kept"]
    assert sorted(set(helpers.kept(selection)) - set(helpers.kept(proxies))) == e["expected"]["random_kept"]
    assert isinstance(policy.select, TopKThenRandom)

    # The largest of log-probabilities with Gumbel noise follows the probabilities: over many draws, to four deviations.
    draws = 40000
    uniforms = np.random.default_rng(0).random((draws, n))
    pool = np.isin(np.arange(n), e["expected"]["random_pool"])
    wide = lambda x: jnp.broadcast_to(jnp.asarray(x), (draws, 1, n))
    kv = kvjax.LayerKV(*[jnp.zeros((draws, 1, n, 1))] * 2, wide(jnp.arange(n, dtype=jnp.int32)))
    monkeypatch.setattr(kvjax.Context, "uniform", lambda *_, **__: jnp.asarray(uniforms[:, None], jnp.float32))
    ctx = helpers.context(helpers.site(T=n, K=1, N=1), length=[n] * draws)
    drawn = policy.select.drawn(wide(selection.score[0, 0]), kv, ctx, wide(pool))
    found = np.bincount(np.asarray(drawn[:, 0].argmax(-1)), minlength=n)[pool] / draws
    wanted = np.asarray(e["expected"]["random_probs"])
    assert (np.abs(found - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / draws)).all()


@pytest.mark.parametrize("distribution", ["softmax", "uniform"])
def test_nacl_draws_among_what_is_left(distribution):
    """The draw never takes what the first stage has, so that every head keeps its whole budget."""
    wide = (32, 1, 12)
    score = jnp.broadcast_to(jnp.arange(12, dtype=jnp.float32) % 5, wide)
    kv = kvjax.LayerKV(*[jnp.zeros((*wide, 1))] * 2, jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), wide))
    ctx = helpers.context(helpers.site(T=12, K=1, N=1), length=[12] * 32)
    ctx = dataclasses.replace(ctx, keys=jax.random.split(jax.random.key(0), 32))
    counts = Counts(np.full(13, 6), ctx.prompt_length)
    limits = Limits(jnp.full((32, 1), 6, jnp.int32), None, counts)
    slots = Slots(kv, LayerStats(), ctx, kv.live)
    keep = TopKThenRandom(3, distribution=distribution)(score, jnp.zeros(wide, bool), slots, limits).keep
    assert (keep.sum(-1) == 6).all()
    assert len({tuple(row) for row in np.asarray(keep[:, 0])}) > 1


def test_e21_loss_and_bound(examples):
    e = examples["E21"]
    p, v, w = (jnp.asarray(e["inputs"][x], jnp.float32) for x in ("attention", "V", "W_O"))
    p, v = p[None], v[None]
    total, K = e["params"]["total"], 2
    average = jnp.asarray([total // K], jnp.int32)
    every = jnp.ones(p.shape, bool)
    heads = {"uniform": UniformHeads(), "adaptive": Adaptive(alpha=1.0, max_ratio=float("inf"))}
    for name, allocation in heads.items():
        budgets = allocation.heads(p, every, average, total // K, helpers.site(K=K, N=K), jnp.zeros((1,), jnp.int32))
        if name == "adaptive":
            assert budgets[0].tolist() == e["expected"]["adaptive_budgets"]
        pos = jnp.broadcast_to(jnp.arange(p.shape[-1], dtype=jnp.int32)[None, None], p.shape)
        keep = TopK().best(p, pos, budgets)
        wanted = e["expected"][name]
        np.testing.assert_allclose(jnp.where(keep, p, 0).sum(-1)[0], wanted["kept_mass"], atol=1e-6)
        np.testing.assert_allclose(eviction_loss(p, v, w, keep)[0], wanted["loss"], atol=1e-6)
        np.testing.assert_allclose(eviction_bound(p, v, w, keep)[0], wanted["bound"], atol=1e-5)
        norms = jnp.abs(jnp.einsum("nsh,nhd->nsd", v[0], w)).sum(-1)
        assert float(norms.max()) == pytest.approx(wanted["C"])


@jax.jit
def _losses_and_bounds(p, v, w, average):
    """Losses and bounds "2 B" of heads with equal budgets and with adaptive ones."""
    pos = jnp.broadcast_to(jnp.arange(p.shape[2], dtype=jnp.int32)[None, None], p.shape)
    found = []
    for allocation in (UniformHeads(), Adaptive(1.0, float("inf"))):
        everything, site = jnp.ones(p.shape, bool), helpers.site(K=p.shape[1], N=p.shape[1])
        most = p.shape[2] - 1  # the most that any example asks for
        budgets = allocation.heads(p, everything, average, most, site, jnp.zeros_like(average))
        keep = TopK().best(p, pos, jnp.maximum(budgets, 1))
        found.append((eviction_loss(p, v, w, keep), eviction_bound(p, v, w, keep)))
    return jnp.moveaxis(jnp.asarray(found), 1, 0)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(seed=st.integers(0, 10**6), average=st.integers(1, 7), sharpness=st.floats(0.1, 6))
def test_loss_is_within_the_bound_and_adaptive_bounds_are_lowest(seed, average, sharpness):
    rng = np.random.default_rng(seed)
    B, N, S, H, D = 3, 4, 8, 3, 5
    logits = rng.standard_normal((B, N, S)) * sharpness * rng.uniform(0.2, 2, (B, N, 1))
    p = jnp.asarray(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True), jnp.float32)
    v = jnp.asarray(rng.standard_normal((B, N, S, H)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((N, H, D)), jnp.float32)
    losses, bounds = _losses_and_bounds(p, v, w, jnp.full((B,), average, jnp.int32))
    assert (losses <= bounds * (1 + 1e-5) + 1e-5).all()
    uniform, adaptive = bounds
    assert (adaptive <= uniform * (1 + 1e-5) + 1e-5).all()  # Theorem 4


@pytest.mark.parametrize("apply", ["raw", "scaled"])
def test_e22_ahakv_prompt(examples, apply):
    e = examples["E22"]
    k = jnp.asarray(e["inputs"]["k"], jnp.float32)[None, None]
    n, d = k.shape[2:]
    q = jnp.concatenate([jnp.zeros((n - 2, d)), jnp.asarray(e["inputs"]["q_last2"], jnp.float32)])[None, None]
    v = (
        jnp.sqrt(jnp.asarray(e["inputs"]["value_norm_sq"], jnp.float32))[None, None, :, None]
        * jnp.eye(d)[0][None, None, None]
    )
    params = e["params"]
    make = lambda **kw: methods.ahakv(params["budget"], recent=params["recent"], pool_kernel=params["avg_pool"], **kw)
    score = lambda **kw: np.asarray(kvjax.evict_layer(make(**kw), q, k, v).score[0, 0])
    name = {"raw": "F_raw", "scaled": "F_scaled_literal"}[apply]
    np.testing.assert_allclose(score(value_prior=False, sg_apply=apply), e["expected"][name], atol=1e-6)
    plain = score(value_prior=False, step_gain_softmax=False)
    np.testing.assert_allclose(plain, e["expected"]["F_standard_softmax"], atol=1e-6)
    if apply == "raw":
        pos = jnp.arange(n, dtype=jnp.int32)
        kv = kvjax.LayerKV(k, v, pos[None, None])
        ctx = helpers.context(helpers.site(T=n, K=1, N=1, H=d), length=[n])
        moment = kvjax.scoring.stats.Moment(q[:, :, -2:], q[:, :, -2:], kv, pos[None, -2:], ctx, lambda x, _: x)
        multiplier = np.asarray(EntropyScaled(params["budget"]).kernel(moment).multiplier)[0, 0]
        np.testing.assert_allclose(multiplier, e["expected"]["multiplier_on_scaled_logits"], atol=1e-5)
        np.testing.assert_allclose(multiplier / d**0.5, e["expected"]["lambda_rows"], atol=1e-6)
        prior = np.asarray(make().score.prior(kv))[0, 0]
        np.testing.assert_allclose(prior, e["expected"]["gamma_bar"], atol=1e-6)
        np.testing.assert_allclose(prior * max(e["expected"]["gamma"]), e["expected"]["gamma"], atol=1e-5)
        np.testing.assert_allclose(score(), e["expected"]["F_hat"], atol=1e-6)
        assert helpers.kept(kvjax.evict_layer(make(), q, k, v)) == e["expected"]["kept"]
        without = kvjax.evict_layer(make(value_prior=False), q, k, v)
        assert helpers.kept(without) == e["expected"]["kept_without_prior"]


@pytest.mark.parametrize("count", ["position", "cache"])
def test_e23_ahakv_decode_step(examples, count):
    e, prompt = examples["E23"], examples["E22"]
    wanted = e["expected"][f"{count}_count"]
    keys = np.asarray(prompt["inputs"]["k"])
    k = jnp.asarray([*keys[e["inputs"]["kept_before"]], e["inputs"]["k_new"]], jnp.float32)[None, None]
    policy = methods.ahakv(e["params"]["budget"], recent=e["params"]["recent"], sg_count=count)
    before = jnp.asarray([[[*e["inputs"]["F_before"], 0.0]]], jnp.float32)
    pos = [*e["inputs"]["kept_before"], e["inputs"]["new_position"]]
    kv = cache(pos, (EvictMemory(before, (), None),), k=k, v=jnp.ones_like(k))
    site = dataclasses.replace(helpers.site(T=8, K=1, N=1, H=4))
    ctx = decoding(9, prompt=8, site=site)
    q = jnp.asarray(e["inputs"]["q_new"], jnp.float32)[None, None, None]
    moment = kvjax.scoring.stats.Moment(q, q, kv, jnp.asarray([[8]], jnp.int32), ctx, lambda x, _: x)
    (observe,) = policy.at(site).spec.step
    column = observe.columns(moment)
    row = attention(q, k, k, moment.pos, kv.pos, columns=[column]).columns[0]
    np.testing.assert_allclose(row[0, 0], wanted["row"], atol=1e-6)
    np.testing.assert_allclose(column.softmax.multiplier[0, 0, 0] / 4**0.5, wanted["lambda_"], atol=1e-6)
    after = policy.layer(kv, LayerStats((row,), (observe,)), ctx)
    np.testing.assert_allclose(after.memory[0].score[0, 0], wanted["F"], atol=1e-6)
    assert set(pos) - set(helpers.live_positions(after)[0][0]) == {wanted["evicted"]}


def _logits_attention(logits, columns, **softmax):
    """Statistics of given logits, -1e9 where masked."""
    logits = np.asarray(logits)
    n = logits.shape[0]
    q, k = jnp.asarray(np.where(logits < -1e8, 0, logits), jnp.float32)[None, None], jnp.eye(n)[None, None]
    pos = jnp.arange(n, dtype=jnp.int32)
    return attention(q, k, k, pos[None], pos[None, None], columns=columns, scale=1.0, **softmax).columns


def test_e24_e25_keyformer_scores(examples, monkeypatch):
    e, per_call = examples["E24"], examples["E25"]
    zeta, table = jnp.asarray(e["inputs"]["zeta"], jnp.float32), jnp.asarray(per_call["inputs"]["noise"], jnp.float32)

    def given(spec, seed, head, q_pos, kv_pos):
        del seed, head
        if spec.noise == "constant":
            return 0.5772156649
        if spec.noise is None:
            return 0.0
        rows, keys = jnp.maximum(q_pos, 0), jnp.maximum(kv_pos, 0)
        return zeta[keys] + jnp.zeros_like(rows, jnp.float32) if spec.per == "key" else table[rows, keys]

    monkeypatch.setattr("kvjax.pallas_kernels.reference.draw_noise", given)
    seed = jnp.zeros((1,), jnp.uint32)
    columns = [
        Columns(softmax=Softmax(seed=seed, noise="gumbel", per="key")),
        Columns(softmax=Softmax(seed=seed, noise="gumbel", per="call")),
        Columns(softmax=Softmax()),
        Columns(softmax=Softmax(noise="constant")),
    ]
    found = _logits_attention(e["inputs"]["prompt_logits"], columns, implementation="reference")
    np.testing.assert_allclose(found[0][0, 0], e["expected"]["score_prompt"], atol=1e-6)
    for x, name in zip(found[1:], ("score_per_call", "score_none", "score_constant"), strict=True):
        np.testing.assert_allclose(x[0, 0], per_call["expected"][name], atol=1e-6)
    assert per_call["expected"]["constant_equals_none"]

    params = e["params"]
    n = 4
    site = helpers.site(T=n, K=1, N=1, max_new_tokens=params["T"])
    policy = methods.keyformer(params["k"], recent=params["recent"], per="key")
    noisy = policy.at(site).spec.step[0].softmax
    assert noisy == Noisy(per="key", tau=(params["tau_init"], params["tau_end"]))
    moment = lambda step: moment_of(cache(range(4)), [[3]], decoding(n + step, prompt=n, site=site))
    taus = [1.0 / float(noisy.kernel(moment(step)).multiplier[0, 0, 0]) for step in range(3)]
    np.testing.assert_allclose(taus, e["expected"]["tau"], rtol=1e-6)
    apart = helpers.context(site, length=[n + 2, n], prompt_length=[n, n], phase="decode")  # the second row slept
    both = jax.tree.map(lambda x: jnp.concatenate([x, x]), cache(range(4)))
    q = jnp.zeros((2, 1, 1, 8))
    multiplier = noisy.kernel(
        kvjax.scoring.stats.Moment(q, q, both, jnp.asarray([[3], [3]]), apart, lambda x, _: x)
    ).multiplier
    np.testing.assert_allclose(1.0 / multiplier[:, 0, 0], [taus[2], taus[0]], rtol=1e-6)
    keep = kvjax.Evict(Accumulated(), params["k"], protect=Protect(recent=params["recent"]))
    prompt = cache(range(4), (EvictMemory(jnp.zeros((1, 1, 4)), (), None),))
    ctx = helpers.context(site, length=[4])
    stats = LayerStats((jnp.asarray([[e["expected"]["score_prompt"]]], jnp.float32),), (Observe(),))
    assert helpers.live_positions(keep.layer(prompt, stats, ctx))[0][0] == e["expected"]["kept"]

    kept = e["expected"]["kept"]
    x = np.asarray(e["inputs"]["decode_logits_over_slots"])
    z = np.append(np.asarray(e["inputs"]["zeta"])[kept], e["inputs"]["zeta_new"])
    row = np.exp((x + z) / e["expected"]["tau"][1])
    row = row / row.sum()
    before = [*np.asarray(e["expected"]["score_prompt"])[kept], 0.0]
    np.testing.assert_allclose(before + row, e["expected"]["score_after_decode"], atol=1e-6)
    kv = cache([*kept, 4], (EvictMemory(jnp.asarray([[before]], jnp.float32), (), None),))
    decode = dataclasses.replace(keep, when=kvjax.every_step())
    after = decode.layer(
        kv, LayerStats((jnp.asarray([[row]], jnp.float32),), (Observe(),)), decoding(5, prompt=4, site=site)
    )
    assert {*kept, 4} - set(helpers.live_positions(after)[0][0]) == {e["expected"]["evicted"]}


def test_e25_noise_has_the_moments_of_a_gumbel(examples):
    e = examples["E25"]["expected"]
    kv_pos = jnp.arange(300, dtype=jnp.int32)[None]
    q_pos = jnp.arange(300, dtype=jnp.int32)[:, None]
    for noise in ("gumbel", "gaussian"):
        spec = Softmax(seed=jnp.zeros((1,), jnp.uint32), noise=noise)
        from kvjax.pallas_kernels.columns import draw_noise

        x = np.asarray(draw_noise(spec, jnp.uint32(5), jnp.int32(0), q_pos, kv_pos))
        assert x.mean() == pytest.approx(e["gumbel_mean"], abs=0.02)
        assert x.std() == pytest.approx(e["gumbel_std"], abs=0.02)


def test_e26_keyformer_budgets(examples):
    for name, row in examples["E26"]["expected"].items():
        n = np.array([int(name[1:])])
        share = 0.5 if name == "n7" else 0.6  # 60 % of 7 would be 4: the last row is at half the prompt
        total = Ratio(share).table(n, n)
        recent = Share(0.3).table(n, total)
        assert (int(total[0]), int(recent[0]), int((total - recent)[0])) == (row["total"], row["recent"], row["key"])


def test_e28_key_scores(examples):
    e = examples["E28"]
    k = jnp.asarray(e["inputs"]["k"], jnp.float32)[None, None]
    q = jnp.zeros((1, 1, 5, 2))
    for score, name in ((KeyNorm(), "knorm"), (KeyDifference(), "keydiff")):
        selection = kvjax.evict_layer(kvjax.Evict(score, e["params"]["keep"]), q, k, k)
        np.testing.assert_allclose(selection.score[0, 0], e["expected"][f"{name}_score"], atol=1e-6)
        assert helpers.kept(selection) == e["expected"][f"{name}_kept"]
    _, anchor = KeyDifference().directions(cache(range(5), k=k, v=k))
    np.testing.assert_allclose(anchor[0, 0], e["expected"]["anchor"], atol=1e-6)


def test_e29_lagkv(examples):
    e = examples["E29"]
    k, v = (jnp.asarray(e["inputs"][x], jnp.float32)[None, None] for x in "kv")
    params = e["params"]
    policy = methods.lagkv(params["keep"], lag=params["lag"], sinks=params["sinks"])
    selection = kvjax.evict_layer(policy, jnp.zeros_like(k), k, v)
    np.testing.assert_allclose(selection.score[0, 0], e["expected"]["score"], atol=1e-6)
    assert helpers.kept(selection) == e["expected"]["kept"]
    crossed = kvjax.Evict(LagRelative(params["lag"], params["sinks"], cross_scoring=True), params["keep"])
    chunks = np.asarray(kvjax.evict_layer(crossed, jnp.zeros_like(k), k, v).score[0, 0])
    np.testing.assert_allclose(chunks[1:5].reshape(2, 2), e["expected"]["chunk_scores"], atol=1e-6)


@pytest.mark.parametrize("n", [8, 4, 2])
def test_lagkv_keeps_its_sinks_whatever_ties_with_them(examples, n):
    """Sinks, last partition and remainder all score 1, and the newest win ties: sinks are protected instead."""
    k, v = (jnp.asarray(examples["E29"]["inputs"][x], jnp.float32)[None, None, :n] for x in "kv")
    kept = lambda policy: helpers.kept(kvjax.evict_layer(policy, jnp.zeros_like(k), k, v))
    assert kept(methods.lagkv(3, lag=2, sinks=2)) == sorted({0, 1, n - 1})
    assert kept(methods.lagkv(2, lag=2, sinks=2)) == [0, 1]
    assert methods.lagkv(0.5).protect == Protect(sinks=4)
    with pytest.raises(ValueError, match=r"a budget of 3 tokens cannot hold the 4 that protect keeps \(sinks=4"):
        methods.lagkv(3)


def test_e30_chunkkv(examples):
    e = examples["E30"]
    scores = jnp.asarray(e["inputs"]["scores"], jnp.float32)[None]
    ratio = 1 - e["params"]["ratio_removed"]
    size, q = e["params"]["chunk"], jnp.zeros((1, 2, 7, 4))

    def kept(share):
        score = lambda kv, stats, ctx: jnp.broadcast_to(scores, kv.pos.shape)
        selection = kvjax.evict_layer(kvjax.from_fn(score, budget=ratio, select=Chunks(size, share)), q, q, q)
        first, second = (helpers.kept(selection, head=h) for h in (0, 1))
        assert first == second
        return first

    assert kept(ratio) == e["expected"]["kept"]
    assert sorted({j // size for j in kept(ratio)}) == e["expected"]["chunks_kept"]
    best = int(np.argmax(e["expected"]["chunk_scores"]))  # one chunk of three is that of the largest mean
    assert {j // size for j in kept(0.34)} == {best}


def test_e31_criticalkv(examples):
    e = examples["E31"]
    base = jnp.asarray(e["inputs"]["base_score"], jnp.float32)
    norms = np.asarray(e["inputs"]["l1_norm_of_projected_value"])
    params = e["params"]
    policy = kvjax.from_fn(
        lambda kv, stats, ctx: jnp.broadcast_to(base, kv.pos.shape),
        budget=params["keep"],
        select=TwoStage(ProjectedValueNorm(), params["first_stage_ratio"], params["eps"]),
    )
    v = jnp.asarray(norms[:, None] * [[0.5, -0.5]], jnp.float32)[None, None]
    q = jnp.zeros((1, 1, 5, 2))
    out_proj = jnp.asarray([[[1.0, 0.0], [0.0, -1.0]]])  # keeps L1 norms
    assert helpers.kept(kvjax.evict_layer(policy, q, q, v, out_proj=out_proj)) == e["expected"]["kept"]
    kv = cache(range(5), k=q, v=v)
    stats = LayerStats((jnp.asarray(norms, jnp.float32)[None, None],), (policy.select.weight,))
    ctx = helpers.context(helpers.site(T=5, N=1, K=1, H=2), length=[5])
    slots = Slots(kv, stats, ctx, kv.live)
    limits = Limits(
        jnp.asarray([[params["keep"]]], jnp.int32), None, Counts(np.full(6, params["keep"]), jnp.asarray([5]))
    )
    first, second = policy.select.stages(base[None, None], jnp.zeros((1, 1, 5), bool), slots, limits)
    stage1 = TopK().best(first.score, kv.pos, first.count)
    assert np.flatnonzero(stage1[0, 0]).tolist() == e["expected"]["stage1"]
    np.testing.assert_allclose(second.score[0, 0], e["expected"]["stage2_score"], atol=1e-6)
    w = params["window"]  # votes that are added up are so many times larger, and so is what eps adds to them
    votes = dataclasses.replace(limits, summands=w)
    _, second = policy.select.stages(w * base[None, None], jnp.zeros((1, 1, 5), bool), slots, votes)
    np.testing.assert_allclose(second.score[0, 0] / w, e["expected"]["stage2_score"], atol=1e-6)
    with pytest.raises(ValueError, match="output projection"):
        kvjax.evict_layer(policy, q, q, v)


@pytest.mark.parametrize(
    "options",
    [{"window_size": 2}, {"window_size": 6}, {"pooling": "avg"}, {"group": "max"}, {"group": "sum"}],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_criticalkv_adds_its_eps_to_means_whatever_its_base_adds_up(options):
    """Against the published formula: a mean over the window's rows, pooled, over the group; then (S + eps) |v W_O|."""
    B, N, K, T, H, budget, eps = 2, 4, 2, 24, 8, 12, 0.05
    options = {"window_size": 4, "kernel_size": 3, **options}
    w = options["window_size"]
    q, k, v = helpers.qkv(11, B=B, N=N, K=K, T=T, H=H)
    out_proj = jax.random.normal(jax.random.key(3), (N, H, 12))
    policy = methods.criticalkv(budget, base=methods.snapkv(budget, **options), eps=eps)
    keep = np.asarray(kvjax.evict_layer(policy, q, k, v, out_proj=out_proj).keep)

    expand = lambda x: np.repeat(np.asarray(x, np.float64), N // K, axis=1)
    logits = np.einsum("bnth,bnsh->bnts", np.asarray(q, np.float64), expand(k)) * H**-0.5
    p = np.exp(np.where(np.tri(T, dtype=bool), logits, -np.inf))
    votes = (p / p.sum(-1, keepdims=True))[:, :, -w:].mean(2)[..., :-w].reshape(B, K, N // K, T - w)
    padded = np.pad(votes.max(2) if options.get("group") == "max" else votes.mean(2), ((0, 0), (0, 0), (1, 1)))
    pool = np.mean if options.get("pooling") == "avg" else np.max
    score = pool([padded[..., i : i + T - w] for i in range(3)], axis=0)
    norm = np.abs(np.einsum("bnsh,nhd->bnsd", expand(v), np.asarray(out_proj, np.float64))).sum(-1)
    second = (score + eps) * norm.reshape(B, K, N // K, T).mean(2)[..., :-w]
    best = lambda x: np.lexsort((-np.arange(len(x)), -x)).tolist()  # of equals the newest, as pooled neighbours are
    for b, h in np.ndindex(B, K):
        first = best(score[b, h])[: max(budget // 2 - w, 0)]
        rest = [i for i in best(second[b, h]) if i not in first][: budget - w - len(first)]
        assert np.flatnonzero(keep[b, h]).tolist() == sorted([*first, *rest, *range(T - w, T)])


def test_e32_think(examples):
    e = examples["E32"]
    window = jnp.asarray(e["inputs"]["q_window"], jnp.float32)
    k = jnp.asarray(e["inputs"]["k"], jnp.float32)[None, None]
    n, H = k.shape[2:]
    q = jnp.concatenate([jnp.full((n - 2, H), 9.0), window])[None, None]
    policy = methods.think(e["params"]["channel_ratio"], query_rows=2)
    site = helpers.site(T=n, K=1, N=1, H=H)
    ctx = helpers.context(site, length=[n])
    kv = cache(range(n), k=k, v=k)
    kv = dataclasses.replace(kv, memory=policy.at(site).init(1))
    pos = jnp.arange(n, dtype=jnp.int32)[None]
    moment = kvjax.scoring.stats.Moment(q, q, kv, pos, ctx, lambda x, _: x)
    observe = policy.at(site).spec.prompt
    after = policy.layer(kv, LayerStats(tuple(o.measure(moment) for o in observe), observe), ctx)
    np.testing.assert_allclose(after.memory[0].value[0, 0], e["expected"]["channel_score"], atol=1e-6)
    stored = policy.at(site).finish(after, ctx)
    assert sorted(set(range(H)) - set(stored.channels[0, 0].tolist())) == e["expected"]["dropped"]
    assert stored.k.shape == (1, 1, n, H - len(e["expected"]["dropped"]))
    zeroed = dataclasses.replace(policy, storage="zeroed").at(site).finish(after, ctx)
    assert not np.asarray(zeroed.k[..., e["expected"]["dropped"]]).any()


def test_e33_expected_attention(examples):
    e = examples["E33"]
    k = jnp.asarray(e["inputs"]["k"], jnp.float32)[None, None]
    v = jnp.asarray(e["inputs"]["v_norm"], jnp.float32)[None, None, :, None] * jnp.asarray([1.0, 0.0])[None, None, None]
    mean = jnp.asarray(e["inputs"]["query_mean"], jnp.float32)[None, None]
    cov = jnp.asarray(e["inputs"]["query_cov"], jnp.float32)[None, None]
    kv = cache(range(4), k=k, v=v)
    site = helpers.site(T=4, K=1, N=1, H=2)
    score = ExpectedAttention()
    observed = score.observe("prefill")
    stats = LayerStats(((mean, cov), None), observed)
    ctx = helpers.context(site, length=[4])
    np.testing.assert_allclose(score(Slots(kv, stats, ctx, kv.live))[0, 0], e["expected"]["score"], atol=1e-6)
    ones = dataclasses.replace(kv, v=jnp.ones_like(v) * 0.5**0.5)
    np.testing.assert_allclose(score(Slots(ones, stats, ctx, kv.live))[0, 0], e["expected"]["probs"], atol=1e-6)
    stats = LayerStats(((mean, cov), kv.bias((0.5,))), observed)
    biased = np.array(e["expected"]["probs"]) * np.exp(-0.5 * np.arange(3, -1, -1))
    np.testing.assert_allclose(score(Slots(ones, stats, ctx, kv.live))[0, 0], biased / biased.sum(), atol=1e-6)


def test_future_queries_are_the_average_of_rotated_moments():
    """Against rotating every moment at every future position in float64."""
    from kvjax import models

    rope = models.Rope()
    B, N, T, H, horizon = 2, 2, 11, 4, 7
    q = np.asarray(helpers.qkv(3, B=B, N=N, K=1, T=T, H=H)[0])
    lengths = [T, 8]
    pos = np.maximum(np.arange(T) - (T - np.asarray(lengths))[:, None], -1)
    kv = kvjax.LayerKV(jnp.zeros((B, 1, T, H)), jnp.zeros((B, 1, T, H)), jnp.asarray(pos, jnp.int32)[:, None])
    ctx = helpers.context(helpers.site(T=T, K=1, N=N, H=H), length=lengths)
    moment = kvjax.scoring.stats.Moment(jnp.asarray(q), jnp.asarray(q), kv, jnp.asarray(pos, jnp.int32), ctx, rope)
    mean, cov = FutureQueries(horizon, skip=4).measure(moment)
    freq = rope.frequencies(H)
    for b, n in enumerate(lengths):
        total = np.zeros((H, H))
        for j in range(horizon):
            c, s = np.cos((n + j) * freq), np.sin((n + j) * freq)
            total += np.block([[np.diag(c), -np.diag(s)], [np.diag(s), np.diag(c)]]) / horizon
        for h in range(N):
            rows = q[b, h, pos[b] >= 4].astype(np.float64)
            np.testing.assert_allclose(mean[b, h], total @ rows.mean(0), atol=1e-5)
            np.testing.assert_allclose(cov[b, h], total @ np.cov(rows.T, bias=True) @ total.T, atol=1e-5)


def test_shares_of_a_budget_are_so_for_rows_as_for_tokens():
    """Half of a budget of 8 are 4 rows, not 12 of a prompt of 24."""
    arrays = helpers.qkv(7, B=1)
    score = lambda policy: np.asarray(kvjax.evict_layer(policy, *arrays).score)
    aha = lambda recent: methods.ahakv(8, recent=recent, sg_k="selected")
    nacl = lambda rows: methods.nacl(8, protect=2, proxies=rows, first_proxies=rows, random=0)
    for make in (aha, nacl):
        np.testing.assert_allclose(score(make(Share(0.5))), score(make(4)), atol=1e-6)
    for make in (LastRows, EntropyScaled, lambda n: kvjax.scoring.stats.FirstAndLastRows(n, 1)):
        with pytest.raises(ValueError, match="rows have no budget to be a share of"):
            make(Share(0.5))


def test_entropy_scaling_leaves_short_rows_alone():
    observe = Observe(LastRows(3), softmax=EntropyScaled(8))
    site = helpers.site(T=24, K=1, N=1)
    kv = cache(range(6))
    ctx = helpers.context(site, length=[6])
    moment = moment_of(kv, [[3, 4, 5]], ctx)
    assert (np.asarray(observe.columns(moment).softmax.multiplier) == 1).all()


def test_finch_weighs_rows_by_what_came_before_them():
    """Rows of 3 and 4 tokens before them: 3 * (0.5, 0.2, 0.3) + 4 * (0.1, 0.4, 0.2) = (1.9, 2.2, 1.7)."""
    p = [
        [1.0, 0, 0, 0, 0],
        [0.5, 0.5, 0, 0, 0],
        [0.2, 0.3, 0.5, 0, 0],
        [0.5, 0.2, 0.3, 0, 0],
        [0.1, 0.4, 0.2, 0.1, 0.2],
    ]
    selection = select(methods.finch(4, window_size=2), p)
    np.testing.assert_allclose(selection.score[0, 0, :3], [1.9, 2.2, 1.7], rtol=1e-5)
    assert helpers.kept(selection) == [0, 1, 3, 4]
    plain = select(methods.finch(4, window_size=2, normalize=False), p)
    np.testing.assert_allclose(plain.score[0, 0, :3], [0.6, 0.6, 0.5], rtol=1e-5)


def test_every_chunk_keeps_its_own_share():
    """Chunks of 4, 4 and 2 tokens keep 2, 2 and 1 of half a prompt; the last one's is protected."""
    score = jnp.asarray([0.4, 0.3, 0.2, 0.1, 0.9, 0.8, 0.7, 0.6, 0.0, 0.0])
    policy = kvjax.from_fn(
        lambda kv, stats, ctx: jnp.broadcast_to(score, kv.pos.shape),
        budget=0.5,
        select=PerChunk(4, 0.5),
        protect=Protect(recent=1),
    )
    q, k, v = helpers.qkv(0, B=1, T=10)
    assert helpers.kept(kvjax.evict_layer(policy, q, k, v)) == [0, 1, 4, 5, 9]


@pytest.mark.parametrize(
    "policy",
    [
        dataclasses.replace(methods.knorm(0.1), select=PerChunk(5, 0.1)),
        dataclasses.replace(methods.knorm(6), select=PerChunk(5)),
        methods.finch(0.1, window_size=1, chunk_length=8),
    ],
    ids=["share", "tokens", "finch"],
)
def test_chunks_whose_share_is_less_than_a_token_keep_one_as_far_as_the_budget_goes(policy):
    """60 tokens of which 6 may stay: 12 chunks of 5, or 8 of 8."""
    q, k, v = helpers.qkv(0, B=1, T=60)
    pos = np.arange(60) // policy.select.size
    for keep in np.asarray(kvjax.evict_layer(policy, q, k, v).keep[0]):
        assert keep.sum() == len(set(pos[keep])) == 6


@pytest.mark.parametrize(("threshold", "kept"), [(0.6, [0, 4, 5]), (0.7, [0, 1, 2, 3, 4, 5]), (1.0, list(range(6)))])
def test_a_lazy_layer_keeps_its_ends(threshold, kept):
    """The last row gives the first token and the last two 0.65 of its attention."""
    p = np.tril(np.ones((6, 6))) / np.arange(1, 7)[:, None]
    p[-1] = [0.3, 0.15, 0.1, 0.1, 0.15, 0.2]
    assert helpers.kept(select(methods.simlayerkv(threshold, sinks=1, recent=2), p)) == kept


def test_a_layer_that_is_not_lazy_keeps_what_its_budget_holds():
    p = np.tril(np.ones((6, 6))) / np.arange(1, 7)[:, None]
    p[-1] = [0.3, 0.15, 0.1, 0.1, 0.15, 0.2]
    assert helpers.kept(select(methods.simlayerkv(0.7, sinks=1, recent=2, budget=4), p)) == [0, 1, 4, 5]


def test_headkv_divides_what_heads_have_given_up():
    """8 tokens a head beside a window of 2; each keeps 4, and 16 are divided 3 : 1 : 0 : 0."""
    q, k, v = helpers.qkv(0, B=1)
    policy = methods.headkv(10, [[3.0, 1.0], [0.0, 0.0]], beta=2.0, window_size=2)
    budgets = [kvjax.evict_layer(policy, q, k, v, layer=i, num_layers=2).budgets[0].tolist() for i in range(2)]
    assert budgets == [[18, 10], [6, 6]]


def test_kvzip_by_hand():
    """Two rows behind a prompt of four: the larger probability, as it is or weighed; of a later chunk beside a sink."""
    weights = np.array([[1, 2, 4, 1, 2, 0], [3, 1, 1, 1, 2, 2]])  # e to the logits
    q = jnp.asarray(np.log(np.maximum(weights, 1e-30)), jnp.float32)[None, None]
    k, rows = jnp.eye(6)[None, None], jnp.asarray([[4, 5]], jnp.int32)
    v = jnp.asarray([1.0, 1, 1, 5, 1, 1])[None, None, :, None] * jnp.eye(6)[:1][None, None]
    given = {"out_proj": jnp.eye(6)[None], "hidden": jnp.asarray([[[2.0], [1.0]]]) * jnp.eye(6)[None, :1], "scale": 1.0}
    kv, site = kvjax.LayerKV(k, v, jnp.arange(6, dtype=jnp.int32)[None, None]), helpers.site(T=4, K=1, N=1, H=6)

    def score(policy, first=0, last=4):
        ctx = helpers.context(site, length=[6], prompt_length=[4])
        ctx = dataclasses.replace(ctx, again=(jnp.array([first]), jnp.array([last])))
        moment = kvjax.scoring.stats.Moment(q, q, kv, rows, ctx, lambda x, _: x, **given)
        return np.asarray(policy.score.of.measure(moment))[0, 0, :4]

    def kept(policy):
        prompt = kvjax.LayerKV(k[:, :, :4], v[:, :, :4], kv.pos[..., :4], policy.at(site).init(1))
        stats = LayerStats((jnp.asarray(score(policy))[None, None],), (policy.score.of,))
        return helpers.live_positions(policy.layer(prompt, stats, helpers.context(site, length=[4])))[0][0]

    plain, plus = methods.kvzip(2, sinks=0, chunk=4), methods.kvzip(2, sinks=0, chunk=4, plus=True)
    np.testing.assert_allclose(score(plain), [0.3, 0.2, 0.4, 0.1], atol=1e-6)
    np.testing.assert_allclose(score(plus), [0.3, 0.1, 0.2, 0.5], atol=1e-6)
    assert (kept(plain), kept(plus)) == ([0, 2], [0, 3])
    later = methods.kvzip(2, sinks=1, chunk=2)
    np.testing.assert_allclose(score(later, 2, 4), [0, 0, 4 / 8, 1 / 8], atol=1e-6)
