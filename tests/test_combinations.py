"""Combinations that a researcher tries and no paper has: they work as their parts do, or are refused."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods, models
from kvjax.analysis.losses import least_bound
from kvjax.cache.state import evict
from kvjax.pallas_kernels.pytree import pytree
from kvjax.policy import LayerSpec, merged
from kvjax.scoring.scores import Score
from kvjax.scoring.select import Select, Selection, TopK, largest
from tests import helpers

change = dataclasses.replace


def read(small, policy, prompt_len, new=0, block=None):
    """The state after a prompt, and after tokens that follow it, with their logits."""
    model, params = small
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (1, prompt_len + new)))
    plan = kvjax.make_plan(model.config, policy, prompt_len=prompt_len, max_new_tokens=new)
    _, state = jax.jit(lambda p, t: kvjax.prefill(model, p, t, plan, block=block))(params, tokens[:, :prompt_len])
    if not new:
        return state
    logits, after = jax.jit(lambda p, t, s: kvjax.feed(model, p, t, s))(params, tokens[:, prompt_len:], state)
    return state, logits, after


def kept(state, layer=0):
    """Live positions of every head."""
    return [sorted(p for p in head.tolist() if p >= 0) for head in np.asarray(state.layers[layer].head_pos[0])]


@pytest.mark.parametrize("budget", [0.25, 16])
def test_chunks_of_a_prompt_in_blocks(shallow, budget):
    """A share is one of the prompt, not of what is left of it after every block."""
    policy = methods.chunkkv(budget, base=methods.snapkv(budget, window_size=4), chunk_size=4)
    assert (np.asarray(read(shallow, policy, 64, block=16).num_live) == 16).all()


def test_chunks_while_decoding(shallow):
    """A share of the prompt is a number of tokens, which every later eviction keeps near."""
    lives = []
    for budget in (0.5, 20):
        policy = methods.chunkkv(budget, base=methods.h2o(budget), chunk_size=4)
        _, _, after = read(shallow, policy, 40, new=9)
        lives.append(np.asarray(after.num_live))
        assert lives[-1].min() > 20 - 4
    np.testing.assert_array_equal(*lives)


def test_chunks_of_layers_with_their_own_budgets(tiny):
    """Every layer keeps whole chunks of its own budget."""
    policy = methods.chunkkv(0.25, base=methods.pyramidkv(0.25, window_size=4), chunk_size=4)
    state = read(tiny, policy, 96)
    for site, live in zip(state.plan.sites, np.asarray(state.num_live)[0], strict=True):
        assert (np.abs(live - policy.at(site).spec.target[96]) <= 4).all()
    assert len(set(np.asarray(state.num_live)[0, :, 0].tolist())) > 1


@pytest.mark.parametrize(
    "policy",
    [methods.keydiff(8), methods.expected_attention(8), methods.lagkv(8, lag=3)],
    ids=["keydiff", "expected_attention", "lagkv"],
)
def test_scores_of_rotated_keys_refuse_keys_before_rotation(shallow, policy):
    with pytest.raises(ValueError, match=r"looks at rotated keys, but positions='compact'.*use 'rerotate'"):
        change(policy, positions="compact")
    assert kept(read(shallow, change(policy, positions="rerotate"), 24)) == kept(read(shallow, policy, 24))


@pytest.mark.parametrize("storage", ["dense", "pool"])
@pytest.mark.parametrize("sinks", [0, 2])
def test_room_is_made_beside_the_sinks_of_every_head(shallow, sinks, storage):
    """Also where a table leaves a head nothing else."""
    table = kvjax.HeadTable([[1.0, 0.0]])
    policy = change(methods.streaming_llm(sinks + 4, sinks=sinks), heads=table, storage=storage)
    before, logits, after = read(shallow, policy, 20, new=5)
    assert np.isfinite(logits).all()
    for state, n in ((before, 20), (after, 25)):
        rich, poor = kept(state)
        assert poor == [*range(sinks), n - 1]
        assert rich == [*range(sinks), *range(n - 7, n)]


@pytest.mark.parametrize("heads", [kvjax.HeadTable([[1.0, 0.0]]), kvjax.Adaptive(alpha=1.0)], ids=["table", "ada"])
def test_a_scope_leaves_room_for_what_is_protected_by_position(shallow, heads):
    policy = change(methods.roco(12, sinks=3, protect_last=2, scope=kvjax.Share(0.9)), heads=heads)
    before, _, after = read(shallow, policy, 24, new=3)
    for state, n in ((before, 24), (after, 27)):
        heads_kept = kept(state)
        assert sum(map(len, heads_kept)) == 24
        assert all({0, 1, 2, n - 2, n - 1} <= set(head) for head in heads_kept)


def _first_head(kv, stats, ctx):
    del stats, ctx
    return kv.pos.astype(jnp.float32) + jnp.asarray([100.0, 0.0])[None, :, None]


@pytest.mark.parametrize("storage", ["dense", "pool"])
@pytest.mark.parametrize(
    ("heads", "when", "shares"),
    [
        (kvjax.HeadTable(((1.0, 3.0),)), kvjax.every(4), [6, 18]),
        (kvjax.HeadTable(((1.0, 3.0),)), kvjax.before_append(), [7, 17]),
        (kvjax.Adaptive(1.0), kvjax.every(4), [13, 11]),
    ],
    ids=["table", "table_before_append", "ada"],
)
def test_heads_get_their_shares_at_the_first_eviction(shallow, heads, when, shares, storage):
    """Whenever it comes: here of a prompt of 13 tokens, or at one of the 24 steps after a prompt that fits."""
    policy = kvjax.from_fn(_first_head, budget=12, when=when, heads=heads, storage=storage)
    for prompt_len in (5, 13):
        before, logits, after = read(shallow, policy, prompt_len, new=24)
        assert np.isfinite(logits).all()
        assert np.asarray(before.num_live).sum() == min(2 * prompt_len, 24 - (when == kvjax.before_append()))
        assert np.asarray(after.num_live).ravel().tolist() == shares


def test_layers_that_share_a_decision_hold_what_the_first_one_does(tiny):
    """Also where a table gives each layer's heads other shares, and where room is made by what keys are."""
    table = kvjax.HeadTable([[3.0, 1.0], [1.0, 1.0], [1.0, 3.0]])
    policy = change(methods.knorm(5), when=kvjax.before_append(), heads=table)
    before, logits, after = read(tiny, kvjax.shared_layers(policy), 12, new=4)
    assert np.isfinite(logits).all()
    for state in (before, after):
        assert kept(state) == kept(state, 1) == kept(state, 2)


def test_layers_that_share_a_decision_share_all_their_statistics(tiny):
    """H2O's votes of every layer are added before the best are chosen: no layer's alone choose the same."""
    budget, alone, shared = 6, methods.h2o(6, recent=2), kvjax.shared_layers(methods.h2o(6, recent=2))
    model, params = tiny
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (1, 16)))
    plan = kvjax.make_plan(model.config, alone, prompt_len=16, max_new_tokens=0)
    stats = jax.jit(lambda p, t: kvjax.forward(model, p, t, kvjax.init_state(plan, jnp.asarray([16])))[2])(
        params, tokens
    )
    votes = [np.asarray(layer.values[0][0], np.float64) for layer in stats.layers]
    best = lambda v: [sorted([*np.argsort(-head[:14])[: budget - 2].tolist(), 14, 15]) for head in v]
    found = kept(read(tiny, shared, 16))
    assert found == best(sum(votes))
    assert all(found != best(v) for v in votes)


def test_a_chain_plans_for_its_smallest_member(tiny):
    config = tiny[0].config
    plan = lambda policy: kvjax.make_plan(config, policy, prompt_len=16, max_new_tokens=4)
    small, wide = methods.h2o(6), methods.tova(9)
    for chain in (kvjax.chain(small, wide), kvjax.chain(wide, small)):
        assert plan(chain).capacities == plan(small).capacities < plan(wide).capacities


def _far(kv, stats, ctx):
    del stats, ctx
    return jnp.where(kv.pos < 4, -jnp.inf, jnp.where(kv.pos == 9, jnp.inf, -(kv.k**2).sum(-1)))


def _unknown(kv, stats, ctx):
    """The position, and no number for every third token."""
    del stats, ctx
    return jnp.where(kv.pos % 3 == 1, jnp.nan, kv.pos.astype(jnp.float32))


def test_what_has_no_number_goes_first():
    keep = kvjax.evict_layer(kvjax.from_fn(_unknown, budget=18), *helpers.qkv(3, T=24, B=1)).keep
    others = [i for i in range(24) if i % 3 != 1]
    assert np.nonzero(np.asarray(keep[0, 0]))[0].tolist() == sorted([*others, 19, 22])


def _nothing(kv, stats, ctx):
    """No number in the last head."""
    del stats, ctx
    return jnp.where(jnp.arange(kv.pos.shape[1])[None, :, None] == 1, jnp.nan, kv.pos.astype(jnp.float32))


def test_a_score_that_is_no_number_is_named(tiny):
    """Wherever its result is known; a prompt that stays whole needs none."""
    (model, params), tokens = tiny, jnp.arange(16)[None]
    policy = kvjax.from_fn(_nothing, budget=8)
    competing, free = kvjax.across_layers(policy, kvjax.ScoreEntropy()), kvjax.Adaptive(1.0)
    plan = kvjax.make_plan(model.config, policy, prompt_len=16, max_new_tokens=1)
    state = kvjax.init_state(plan, jnp.full((1,), 16))
    for call in (
        lambda: kvjax.evict_layer(policy, *helpers.qkv(3, T=16, B=1)),
        lambda: kvjax.evict_layer(dataclasses.replace(policy, heads=free), *helpers.qkv(3, T=16, B=1)),
        lambda: kvjax.generate(model, params, tokens, policy=kvjax.chain(methods.window(12), policy), max_new_tokens=1),
        lambda: kvjax.generate(model, params, tokens, policy=competing, max_new_tokens=1),
        lambda: kvjax.prefill(model, params, tokens, plan),
        lambda: kvjax.forward(model, params, tokens, state, evict=True),
        lambda: policy(*kvjax.forward(model, params, tokens, state)[1:]),
    ):
        with pytest.raises(ValueError, match=r"fn=_nothing.* is a number \(NaN in layer 0, in 1 of 2 kv heads of the"):
            call()
    jax.jit(lambda params: kvjax.prefill(model, params, tokens, plan))(params)
    kvjax.evict_layer(policy, *helpers.qkv(3, T=8, B=1))


def _not_in_layer_1(kv, stats, ctx):
    del stats
    return jnp.where(ctx.site.layer == 1, jnp.nan, kv.pos.astype(jnp.float32))


@pytest.mark.parametrize(
    ("by", "heads"),
    [(kvjax.ScoreEntropy(), kvjax.UniformHeads()), (kvjax.TopScores(), kvjax.Adaptive(1.0, float("inf")))],
)
def test_a_layer_that_loses_to_others_by_no_number_is_named(tiny, by, heads):
    (model, params), tokens = tiny, jnp.arange(16)[None]
    policy = kvjax.from_fn(_not_in_layer_1, budget=8, protect=kvjax.Protect(recent=2), heads=heads)
    policy = kvjax.across_layers(policy, by)
    with pytest.raises(ValueError, match=r"fn=_not_in_layer_1.* \(NaN in layer 1, in 2 of 2 kv heads of the"):
        kvjax.generate(model, params, tokens, policy=policy, max_new_tokens=1)


def test_a_score_that_decides_nothing_need_be_no_number():
    """That of a head that is under another policy, or whose budget is all protected."""
    for policy in (
        kvjax.partition_heads({"a": kvjax.from_fn(_nothing, budget=8), "b": methods.window(8)}, [["a", "b"]]),
        kvjax.from_fn(_nothing, budget=8, protect=kvjax.Protect(sinks=2, recent=6)),
    ):
        assert (kvjax.evict_layer(policy, *helpers.qkv(3, T=16, B=1)).keep.sum(-1) == 8).all()


@pytest.mark.parametrize("scale", ["rank", "score"])
def test_infinite_scores_relax(scale):
    """They are first or last at every temperature, and the others take their gates among themselves."""
    hard, qkv = kvjax.from_fn(_far, budget=8), helpers.qkv(3, T=24, B=1)
    for temperature in (1.0, 1e-4):
        selection = kvjax.evict_layer(kvjax.soften(hard, temperature, scale=scale), *qkv)
        np.testing.assert_allclose(selection.gate.sum(-1), 8.0, rtol=1e-6)
        if scale == "score":
            np.testing.assert_allclose(selection.gate[..., :4], 0.0, atol=1e-6)
            np.testing.assert_allclose(selection.gate[..., 9], 1.0, rtol=1e-6)
    np.testing.assert_allclose(selection.gate, kvjax.evict_layer(hard, *qkv).keep, atol=1e-4)


@dataclasses.dataclass(frozen=True)
class Ids(Score):
    """Remembers the id of every token, or what it should not."""

    empty: tuple[int, ...] = (0,)
    later: tuple[int, ...] = ()

    def init(self, site, batch):
        return jnp.zeros((batch, site.num_kv_heads)[: len(self.empty) + 1] + self.empty, jnp.int32)

    def update(self, slots):
        kv, ids = slots.kv, slots.ctx.tokens
        column = kv.pos - (slots.ctx.length[:, None, None] - ids.shape[1])
        new = kv.live & (column >= 0)
        found = ids[jnp.arange(len(ids))[:, None, None], jnp.maximum(column, 0)]
        return jnp.where(new, found, slots.memory)[(..., *self.later)]

    def __call__(self, slots):
        return -slots.memory.astype(jnp.float32)


def test_a_score_sees_the_ids_of_what_was_just_read(tiny):
    """Of the prompt, of blocks of it, of every step; under a decision for all layers, too."""
    tokens = np.random.default_rng(0).integers(0, 61, 20)
    steps = kvjax.Evict(Ids(), 8, when=kvjax.every_step())
    for policy, block in ((steps, None), (steps, 5), (kvjax.shared_layers(steps), None)):
        for state in read(tiny, policy, 16, new=4, block=block)[::2]:
            for kv in state.layers:
                pos, ids = np.asarray(kv.pos), np.asarray(kv.memory[0].score)
                np.testing.assert_array_equal(ids[pos >= 0], tokens[pos[pos >= 0]])
    q, k, v = helpers.qkv(0, B=1, T=16)
    by_layer = kvjax.Evict(Ids(), 8)
    with pytest.raises(ValueError, match=r"ids of the tokens just read are wanted .*: give evict_layer tokens="):
        kvjax.evict_layer(by_layer, q, k, v)
    kept_ids = tokens[helpers.kept(kvjax.evict_layer(by_layer, q, k, v, tokens=tokens[None, :16]))]
    assert sorted(kept_ids) == sorted(tokens[:16])[:8]


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (
            Ids(empty=()),
            r"Ids\(.*remembers an array of shape \(2,\) \(init\), .* begin with \(2, 2, 0\).* head is a .*PerHead",
        ),
        (Ids(empty=(3,)), r"an array of shape \(2, 2, 3\) \(init\)"),
        (Ids(later=(0,)), r"an array of shape \(1, 2\) \(update\), which should begin with \(1, 2, 24\)"),
    ],
)
def test_memory_that_is_of_no_slot_is_refused(score, message):
    with pytest.raises(ValueError, match=message):
        kvjax.evict_layer(kvjax.Evict(score, 8), *helpers.qkv(3, T=24, B=1), tokens=np.zeros((1, 24), np.int32))


@dataclasses.dataclass(frozen=True)
class Even(Select):
    """A user's selection: even positions, whatever the score."""

    what: str = "mask"

    def __call__(self, score, safe, slots, limits):
        keep = slots.kv.live & (slots.kv.pos % 2 == 0)
        gate = keep.astype(jnp.float32) if self.what == "gates" else None
        selection = Selection(keep.astype(jnp.int32) if self.what == "numbers" else keep, score, limits.budgets, gate)
        return keep if self.what == "bare" else selection


def test_a_selection_of_ones_own(shallow):
    policy = kvjax.Evict(kvjax.scoring.scores.Recency(), 6, select=Even())
    assert kept(read(shallow, policy, 12)) == [[0, 2, 4, 6, 8, 10]] * 2
    with pytest.raises(ValueError, match=r"Even\(what='bare'\) returned a .*; return Selection\(keep, score, limits"):
        read(shallow, change(policy, select=Even("bare")), 12)
    for what, message in (("gates", "gates and a keep of bool"), ("numbers", "no gates and a keep of int32")):
        with pytest.raises(ValueError, match=f"has relaxed=False, but its selection has {message}"):
            read(shallow, change(policy, select=Even(what)), 12)


@pytree
class Doubled(Selection):
    """A selection that changes values beside, as one that merges tokens does."""

    def apply(self, kv):
        return change(evict(kv, self.keep), v=kv.v + kv.v)


@dataclasses.dataclass(frozen=True)
class Double(TopK):
    def __call__(self, score, safe, slots, limits):
        return Doubled(super().__call__(score, safe, slots, limits).keep, score, limits.budgets)


def test_a_chain_keeps_what_a_members_selection_has_changed(shallow):
    """Of every member, in turn; what a layer cannot hold of it is refused."""
    double = kvjax.Evict(kvjax.scoring.scores.Recency(), 8, select=Double())
    values = lambda policy: np.asarray(read(shallow, policy, 12).layers[0].v[0, 0, :4])
    plain = values(methods.window(4))
    np.testing.assert_array_equal(values(kvjax.chain(double, methods.window(4))), 2 * plain)
    np.testing.assert_array_equal(values(kvjax.chain(double, change(double, budget=4))), 4 * plain)
    for policy in (
        kvjax.partition_heads({"a": double, "b": methods.full()}, [["a", "b"]]),
        change(double, storage="pool", when=kvjax.every_step()),
        change(double, when=kvjax.every(3)),
    ):
        with pytest.raises(ValueError, match="a Doubled, which changes more of a layer than which slots are live"):
            read(shallow, policy, 12, new=4)


def test_a_dense_member_bounds_a_pool(shallow):
    """FastGen knows no more of its heads than its capacity; one of them gets all of it while the text goes on."""
    fastgen = methods.fastgen(special_ids=[1], punctuation_ids=[3], recovery_ratio=0.05, budget=12)
    policy = kvjax.chain(fastgen, change(methods.h2o(40), storage="pool"))
    model, params = shallow
    plan = kvjax.make_plan(model.config, policy, prompt_len=10, max_new_tokens=14)
    prompt = jnp.asarray([[7, 8, 9, 10, 11, 3, 12, 13, 14, 15]])
    _, state = jax.jit(lambda p, t: kvjax.prefill(model, p, t, plan))(params, prompt)
    logits, after = jax.jit(lambda p, t, s: kvjax.feed(model, p, t, s))(params, jnp.full((1, 14), 3), state)
    assert np.isfinite(logits).all()
    assert np.asarray(after.num_live).max() <= 13


def test_recent_accumulation_of_a_prompt_in_blocks(shallow):
    """The last rows of the last block vote, as if what is left were the prompt; with all rows it is another policy."""
    few, many = (methods.ahakv(8, recent=4, recent_accumulation=recent) for recent in (True, False))
    assert kept(read(shallow, few, 24, block=24)) == kept(read(shallow, few, 24))
    assert kept(read(shallow, few, 24, block=4)) != kept(read(shallow, many, 24, block=4))
    one = change(few, score=change(few.score, of=change(few.score.of, softmax=None)))
    state = read(shallow, one, 24, block=4)
    votes = np.asarray(state.layers[0].memory[0].score).sum(-1)
    assert (votes <= 4 + 1e-5).all()  # of 4 rows, less than all of their mass under the prior


def test_what_a_sliding_window_hides_goes_first():
    """A budget is not spent on what no row to come can read; the other layer knows no window."""
    config = models.ModelConfig(61, 32, 48, 2, 4, 2, 8, sliding_window=(16, None))
    model = models.LanguageModel(config)
    params = jax.jit(model.init)(jax.random.key(0))
    before, _, after = read((model, params), methods.h2o(8), 24, new=6)
    assert all(min(head) > 24 - 16 for head in kept(before))
    assert all(min(head) > 30 - 16 for head in kept(after))
    assert any(min(head) <= 8 for head in kept(before, 1))
    full = read((model, params), methods.h2o(16), 24)
    assert kept(full) == [[*range(8, 24)]] * 2  # all that the last row read, of which the next one reads 15


def test_double_precision(shallow):
    """Draws, orders and bounds do not depend on it; 64-bit scores are compared in 64 bits."""
    policies = methods.nacl(6), methods.random(6), methods.random(6, random_mode="run")
    single = [kept(read(shallow, policy, 12)) for policy in policies]
    with jax.enable_x64(True):
        assert [kept(read(shallow, policy, 12)) for policy in policies] == single
        close = jnp.asarray([[[1.0, 1.0 + 1e-12, 1.0 - 1e-12, -0.0, 0.0, -jnp.inf, jnp.inf, -3.5]]], jnp.float64)
        for count in range(9):
            chosen = largest((close, jnp.arange(8)[None, None]), jnp.asarray([[count]], jnp.int32))
            order = sorted(range(8), key=lambda i: (float(close[0, 0, i]), i), reverse=True)
            assert set(np.flatnonzero(chosen).tolist()) == set(order[:count])
        p, v = (jnp.asarray(np.random.default_rng(1).uniform(size=s)) for s in ((1, 4, 12), (1, 2, 12, 4)))
        args = v, jnp.ones((4, 4, 8)), jnp.asarray([[3, 4]])
        exact, rounded = (least_bound(*(x if x.dtype == int else x.astype(d) for x in (p, *args))) for d in "df")
        np.testing.assert_allclose(exact, rounded, rtol=1e-5)


@pytest.mark.parametrize(
    ("score", "given"),
    [
        (lambda kv, *_: 0.0, "returned 0.0"),
        (lambda kv, *_: kv.pos[..., :1], r"of int32 of shape \(1, 2, 1\)"),
        (lambda kv, *_: kv.pos.astype(jnp.complex64), "of complex64 of shape"),
    ],
)
def test_a_function_that_scores_no_slots_is_refused(score, given):
    with pytest.raises(ValueError, match=rf"{given}.*; return real numbers of shape \(1, 2, 24\), one a slot"):
        kvjax.evict_layer(kvjax.from_fn(score, budget=8), *helpers.qkv(3, T=24, B=1))


def test_every_field_of_a_spec_survives_a_merge():
    """A static fact that the merge forgets would be lost without a word."""
    site, table = helpers.site(T=24), np.arange(25)
    measured = methods.snapkv(8, window_size=4).spec(site).prompt
    others = {
        "heads": "query_head",
        "positions": "compact",
        "storage": "pool",
        "reads": "rows",
        "gates": True,
        "hides": "live",
        "prunes": True,
        "timed": False,
        "finite": True,
        "first": 4,
    }
    spec = LayerSpec(table, table, table, measured, measured, **others)
    choices = [f for f in dataclasses.fields(LayerSpec) if f.default is not dataclasses.MISSING]
    untold = [f.name for f in choices if f.default == getattr(spec, f.name)]
    assert not untold, "give every field a value that it does not have by default"

    def told(spec):
        rule = types.SimpleNamespace(spec=lambda site: spec)
        found = merged([rule], site)
        return {f.name: getattr(found, f.name) for f in dataclasses.fields(LayerSpec)}

    # A pool goes neither with gates nor with channels that heads lose for themselves.
    pooled, dense = dataclasses.replace(spec, prunes=False, gates=False), dataclasses.replace(spec, storage="dense")
    for given in (pooled, dense):
        for name, value in told(given).items():
            np.testing.assert_array_equal(value, getattr(given, name))
