"""The pool layout: the same numbers as the dense layout in the slots that heads need together."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.cache.pool import PooledKV, insert_pooled, pool_slots, to_pool
from kvjax.cache.state import PerHead, evict
from kvjax.eviction import EvictMemory
from kvjax.scoring.stats import LayerStats
from tests import helpers

B, T, NEW = 2, 24, 14
SCORES = {
    "snapkv": lambda: dataclasses.replace(methods.snapkv(10, window_size=4), heads=kvjax.Adaptive()),
    "h2o": lambda: dataclasses.replace(methods.h2o(10, recent=4), heads=kvjax.Adaptive()),
    "h2o_every_3": lambda: kvjax.when(
        kvjax.every(3), dataclasses.replace(methods.h2o(10, recent=4), heads=kvjax.Adaptive())
    ),
    "h2o_over_3": lambda: kvjax.when(
        kvjax.when_over(3, drop=5), dataclasses.replace(methods.h2o(10, recent=1), heads=kvjax.Adaptive(1.0))
    ),
    "roco": lambda: dataclasses.replace(methods.roco(10, protect_last=2), heads=kvjax.Adaptive()),
    "keyformer": lambda: dataclasses.replace(methods.keyformer(10, recent=3), heads=kvjax.Adaptive()),
    "tova": lambda: methods.tova(10, head_mode="per_kv_head"),
    "scissorhands": lambda: methods.scissorhands(10, history=9, recent=2, drop=3),
    "ahakv": lambda: methods.ahakv(10, recent=3),
    "random": lambda: methods.random(10),
    "streaming_llm": lambda: methods.streaming_llm(10, sinks=2),
    "keydiff": lambda: methods.keydiff(10, when=kvjax.every_step()),
    "query_heads": lambda: methods.snapkv(10, window_size=4, granularity="query_head"),
}


def run(shallow, policy, *, lengths=(T, 17), block=None):
    model, params = shallow
    rng = np.random.default_rng(0)
    tokens, more = jnp.asarray(rng.integers(0, 61, (B, T))), jnp.asarray(rng.integers(0, 61, (B, NEW)))
    plan = kvjax.make_plan(model.config, policy, prompt_len=T, max_new_tokens=NEW, lengths=lengths)

    def both(params, tokens, more):
        first, state = kvjax.prefill(model, params, tokens, plan, lengths=jnp.asarray(lengths), block=block)
        logits, after = kvjax.feed(model, params, more, state)
        return jnp.concatenate([first[:, None], logits], axis=1), state, after

    return *jax.jit(both)(params, tokens, more), plan


PAIRS = [(name, "original") for name in SCORES]
PAIRS += [(name, positions) for name in ("snapkv", "h2o", "streaming_llm") for positions in ("compact", "rerotate")]
QUICK = {(name, "original") for name in ("snapkv", "query_heads", "h2o_over_3")} | {("h2o", "rerotate")}


@pytest.mark.parametrize(
    ("name", "positions"), [pytest.param(*p, marks=() if p in QUICK else pytest.mark.slow) for p in PAIRS]
)
def test_the_pool_equals_the_dense_layout(shallow, name, positions):
    policy = dataclasses.replace(SCORES[name](), positions=positions)
    dense, _, dense_after, dense_plan = run(shallow, policy)
    pooled, state, pooled_after, plan = run(shallow, dataclasses.replace(policy, storage="pool"))
    np.testing.assert_allclose(
        pooled, dense, atol=1e-5 * np.abs(dense).max() * NEW
    )  # a sum in another order, NEW times
    for a, b in zip(dense_after.layers, pooled_after.layers, strict=True):
        assert isinstance(b, PooledKV)
        assert helpers.live_positions(a) == helpers.live_positions(b)
    assert state.num_slots == plan.num_slots <= dense_plan.num_slots
    np.testing.assert_array_equal(dense_after.num_live, pooled_after.num_live)


def test_blocks_and_pool_together(shallow):
    policy = SCORES["h2o"]()
    dense, *_ = run(shallow, policy, block=7)
    pooled, *_ = run(shallow, dataclasses.replace(policy, storage="pool"), block=7)
    np.testing.assert_allclose(pooled, dense, atol=1e-4)


def test_slots_are_the_sum_of_the_budgets_and_room(shallow):
    """Adaptive heads in a pool take the bytes of uniform heads, whatever the largest head takes."""
    snapkv = methods.snapkv(10, window_size=4)
    _, uniform, *_ = run(shallow, snapkv, lengths=(T, T))
    _, adaptive, *_ = run(shallow, methods.ada_snapkv(10, alpha=1.0, window_size=4), lengths=(T, T))
    assert adaptive.num_slots == uniform.num_slots == 2 * (10 + NEW)
    assert adaptive.kv_bytes == uniform.kv_bytes
    assert int(adaptive.num_live.max()) > 10  # some head did get more than its share


@pytest.mark.slow
def test_ada_snapkv_on_the_embedded_model(embedded):
    """A quarter of the prompt: SnapKV's bytes, and the logits of the dense layout, at every step."""
    model, params, _ = embedded
    rng = np.random.default_rng(0)
    tokens, more = (jnp.asarray(rng.integers(4, 389, (2, n))) for n in (256, 4))

    def read(policy):
        plan = kvjax.make_plan(model.config, policy, prompt_len=256, max_new_tokens=4, lengths=[256])

        @jax.jit
        def both(params, tokens, more):
            _, state = kvjax.prefill(model, params, tokens, plan)
            return kvjax.feed(model, params, more, state)

        return both(params, tokens, more)

    (pool, state), (dense, dense_state) = (read(methods.ada_snapkv(0.25, storage=s)) for s in ("pool", "dense"))
    _, uniform = read(methods.snapkv(0.25))
    np.testing.assert_allclose(pool, dense, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(state.num_live, dense_state.num_live)
    assert len(np.unique(state.num_live)) > 1
    assert state.kv_bytes <= 1.02 * uniform.kv_bytes < dense_state.kv_bytes


def test_views_and_pools_are_inverse():
    policy = methods.h2o(12)
    ctx = helpers.context(helpers.site(), length=[T, 17])
    kv = helpers.prompt_layer(policy, ctx, lengths=[T, 17])
    kv = evict(kv, kv.live & (jax.random.uniform(jax.random.key(3), kv.pos.shape) < 0.5))
    pool = to_pool(kv, int(kv.num_live.sum(-1).max()) + 3)
    assert helpers.live_positions(pool) == helpers.live_positions(kv)
    np.testing.assert_array_equal(pool.num_live, kv.num_live)
    same = pool.apply(lambda view: view)
    assert same is pool
    kept = pool.apply(lambda view: evict(view, view.live & (view.pos % 2 == 0)))
    assert helpers.live_positions(kept) == helpers.live_positions(evict(kv, kv.live & (kv.pos % 2 == 0)))
    new = jnp.full((B, 2, 1, 8), 7.0)
    more = insert_pooled(kept, new, -new, jnp.asarray([[T], [-1]], jnp.int32))
    assert [len(h) for h in helpers.live_positions(more)[0]] == [len(h) + 1 for h in helpers.live_positions(kept)[0]]
    assert helpers.live_positions(more)[1] == helpers.live_positions(kept)[1]


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("h2o", "original"),
        *(
            pytest.param(*p, marks=pytest.mark.slow)
            for p in itertools.product(("h2o", "streaming_llm"), ("original", "rerotate"))
            if p != ("h2o", "original")
        ),
    ],
)
def test_a_prompt_shorter_than_its_budget_grows_into_it(shallow, name, positions):
    """Heads are given what they may come to hold, not what they hold when the prompt ends."""
    policy = dataclasses.replace(SCORES[name](), budget=16, positions=positions)
    dense, _, dense_after, _ = run(shallow, policy, lengths=(T, 5))
    pooled, _, pooled_after, _ = run(shallow, dataclasses.replace(policy, storage="pool"), lengths=(T, 5))
    np.testing.assert_allclose(pooled, dense, atol=1e-5 * np.abs(dense).max() * NEW)
    assert int(pooled_after.num_live[1].max()) >= 16
    np.testing.assert_array_equal(dense_after.num_live, pooled_after.num_live)


@pytest.mark.parametrize("capacity", [64, 61])
def test_heads_keep_their_slots_whatever_dies(capacity):
    """Random evictions and insertions against lists of positions; every head reaches its own bound, and no further."""
    rng = np.random.default_rng(capacity)
    most = np.array([[30, 2, 15, 14], [1, 58, 1, 1]])
    K, start = most.shape[1], 8
    pos = np.full((B, K, start), -1)
    for b, h in np.ndindex(B, K):
        held = rng.choice(start, rng.integers(0, min(start, most[b, h]) + 1), replace=False)
        pos[b, h, held] = rng.permutation(start)[: len(held)]
    values = lambda pos: jnp.asarray(np.broadcast_to(pos[..., None], (*pos.shape, 4)), jnp.float32)
    kv = kvjax.LayerKV(values(pos), -values(pos), jnp.asarray(pos, jnp.int32))
    pool = to_pool(kv, capacity, jnp.asarray(most, jnp.int32))
    assert pool.num_slots == capacity
    most += np.arange(K) < capacity - most.sum(1, keepdims=True)  # the first heads get the three left over
    lists = [[sorted(p for p in pos[b, h] if p >= 0) for h in range(K)] for b in range(B)]
    insert, drop = jax.jit(insert_pooled), jax.jit(lambda p, keep: p.apply(lambda view: evict(view, keep)))
    for step in range(start, start + 90):
        keep = np.asarray(pool.view().live) & (rng.random((B, K, capacity)) < (0.97 if step % 30 else 0.4))
        # A head that would overflow loses its oldest token, as a policy would see to it.
        held = np.where(keep, np.asarray(pool.pos)[:, None], np.iinfo(np.int32).max)
        full = keep.sum(-1) == most
        keep &= ~(full[..., None] & (held == held.min(-1, keepdims=True)))
        pool = drop(pool, jnp.asarray(keep))
        kept = [[sorted(np.asarray(pool.pos)[b][keep[b, h]].tolist()) for h in range(K)] for b in range(B)]
        lists = [[[p for p in lists[b][h] if p in kept[b][h]] for h in range(K)] for b in range(B)]
        assert lists == kept
        runs = rng.random(B) < 0.9
        new = np.where(runs, step, -1)[:, None]
        token = jnp.full((B, K, 1, 4), float(step))
        pool = insert(pool, token, -token, jnp.asarray(new, jnp.int32))
        lists = [[lists[b][h] + [step] * bool(runs[b]) for h in range(K)] for b in range(B)]
        assert helpers.live_positions(pool) == lists
        view = pool.view()
        live = np.asarray(view.live)
        np.testing.assert_array_equal(np.asarray(view.v)[live], -np.asarray(view.k)[live])
        np.testing.assert_array_equal(np.asarray(view.k)[live][:, 0], np.asarray(view.pos)[live])
        assert (live.sum(1) <= 1).all()


def test_a_head_past_its_slots_shows_as_nan():
    """Others have room left, and a head may have no slots at all."""
    kv = kvjax.LayerKV(jnp.ones((B, 2, 3, 4)), jnp.ones((B, 2, 3, 4)), jnp.asarray([[[0, 1, 2]] * 2] * B, jnp.int32))
    pool = to_pool(kv, 16, jnp.asarray([[3, 13], [4, 12]], jnp.int32))
    new = jnp.ones((B, 2, 1, 4))
    after = insert_pooled(pool, new, new, jnp.full((B, 1), 3, jnp.int32))
    live = np.asarray(after.pos) >= 0
    assert np.isnan(np.asarray(after.v)[0][live[0]]).any()
    assert not np.isnan(after.v)[1].any()
    idle = insert_pooled(pool, new, new, jnp.full((B, 1), -1, jnp.int32))
    assert not np.isnan(idle.v).any()
    assert helpers.live_positions(idle) == helpers.live_positions(pool)
    nothing = evict(kv, kv.live & (jnp.arange(2) == 1)[None, :, None])
    first = insert_pooled(to_pool(nothing, 4, jnp.asarray([[0, 4]] * B)), new, new, jnp.full((B, 1), 3, jnp.int32))
    assert np.isnan(first.v).any((1, 2)).all()


@pytest.mark.parametrize("total", [1, 37, 1000, 1024, 4608, 4609, 5000, 20001, 100_000])
def test_rounding_to_blocks_costs_less_than_one_slot_in_64(total):
    assert total <= pool_slots(total) < total * (1 + 1 / 64)


def test_a_full_pool_shows_as_nan():
    ctx = helpers.context(helpers.site(), length=[T, T])
    kv = helpers.prompt_layer(methods.full(), ctx)
    assert np.isnan(to_pool(kv, 2 * T - 1).v).all()
    full = to_pool(kv, 2 * T)
    assert not np.isnan(full.v).any()
    new = jnp.ones((B, 2, 1, 8))
    spoiled = insert_pooled(full, new, new, jnp.full((B, 1), T, jnp.int32))
    assert np.isnan(spoiled.v).any(axis=(1, 2)).all()


def test_a_head_is_over_its_own_budget():
    """Not over the average of a layer whose heads have different budgets: it would outgrow its slots."""
    over, shares, recent = 3, np.array([[9, 1]]), 2
    policy = dataclasses.replace(methods.h2o(7, recent=recent), heads=kvjax.Adaptive(1.0, math.inf))
    policy = kvjax.when(kvjax.when_over(over), policy)
    site = helpers.site(T=T)
    budgets = shares + recent
    for step in range(1, budgets.max() + over + 1):
        held = np.minimum(step, budgets + over)
        pos = np.where(np.arange(16) < held[..., None], np.arange(16) + (step - held)[..., None], -1)
        zeros = jnp.zeros((1, 2, 16))
        memory = (EvictMemory(zeros, (), PerHead(jnp.asarray(shares, jnp.int32))),)
        kv = kvjax.LayerKV(zeros[..., None], zeros[..., None], jnp.asarray(pos, jnp.int32), memory)
        ctx = helpers.context(site, length=[step], prompt_length=[T], phase="decode")
        after = policy.layer(kv, LayerStats((zeros,), policy.at(site).spec.step), ctx)
        assert after.num_live.tolist() == np.where(held >= budgets + over, budgets, held).tolist()
