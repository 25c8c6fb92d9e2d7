"""Slots: append, insert, evict, compact, positions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.pool import to_pool
from kvjax.cache.state import Chosen, PerHead, append, compact, evict, insert, map_slots, position_order, ranks
from kvjax.pallas_kernels import Columns
from kvjax.pallas_kernels.pytree import described
from tests import helpers

B, K, H = 2, 3, 4


def layer(pos, memory=None):
    pos = jnp.asarray(pos, jnp.int32)
    k = jnp.broadcast_to(pos[..., None], (*pos.shape, H)).astype(jnp.float32)
    memory = (pos.astype(jnp.float32), PerHead(jnp.ones(pos.shape[:2]))) if memory is None else memory
    return kvjax.LayerKV(k, -k, pos, memory)


def random_positions(rng, S=20, dead=0.4):
    pos = np.stack([[rng.permutation(40)[:S] for _ in range(K)] for _ in range(B)])
    return np.where(rng.random(pos.shape) < dead, -1, pos)


@pytest.mark.parametrize("in_order", [True, False])
def test_position_order(in_order):
    rng = np.random.default_rng(0)
    pos = random_positions(rng)
    if in_order:
        pos = np.where(rng.random(pos.shape) < 0.4, -1, np.sort(rng.permutation(40)[:20]))
    pos = jnp.asarray(pos, jnp.int32)
    along = np.asarray(jnp.take_along_axis(pos, position_order(pos), axis=-1))
    np.testing.assert_array_equal(along, np.sort(np.asarray(pos), axis=-1))
    assert sorted(position_order(pos)[0, 0].tolist()) == list(range(20))


def test_ranks_count_live_slots_before():
    pos = jnp.asarray(random_positions(np.random.default_rng(1)), jnp.int32)
    expected = ((pos[..., None, :] < pos[..., None]) & (pos[..., None, :] >= 0)).sum(-1)
    np.testing.assert_array_equal(jnp.where(pos >= 0, ranks(pos), 0), jnp.where(pos >= 0, expected, 0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda kv: compact(kv, -1), "capacity=-1: must be a whole number of at least 1"),
        (lambda kv: compact(kv, 0), "capacity=0: must be"),
        (lambda kv: compact(kv, 2.5), "capacity=2.5: must be"),
        (lambda kv: compact(kv, 10**12), "capacity=1000000000000: must be"),
        (lambda kv: compact(None, 3), "kv is a NoneType, not a LayerKV"),
        (lambda kv: evict(None, kv.live), "kv is a NoneType, not a LayerKV"),
        (lambda kv: evict(kv, kv.pos), r"booleans of shape \(2, 3, 20\); got int32 of shape \(2, 3, 20\)"),
        (lambda kv: evict(kv, kv.live[:1]), r"got bool of shape \(1, 3, 20\)"),
        (lambda kv: evict(kv, [True]), "got list of shape"),
        (lambda kv: evict(kv, kv.live, most="x"), "most='x': must be a whole number of at least 0"),
        (lambda kv: evict(kv, kv.live & False, most=1), r"leaves out \d+ live slots of a head, but most=1"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_layers_refuse_what_does_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call(layer(random_positions(np.random.default_rng(0))))


@pytest.mark.parametrize("capacity", [12, 20, 31])
def test_compact_keeps_every_live_slot_in_order(capacity):
    pos = random_positions(np.random.default_rng(2), dead=0.5)
    before = layer(pos)
    after = compact(before, capacity)
    assert after.pos.shape == (B, K, capacity)
    assert after.k.shape == (B, K, capacity, H)
    assert helpers.live_positions(after) == [[h[-capacity:] for h in row] for row in helpers.live_positions(before)]
    live = np.asarray(after.live)
    np.testing.assert_array_equal(after.k, np.where(live, after.pos, 0)[..., None] * np.ones(H))
    np.testing.assert_array_equal(after.v, -np.asarray(after.k))
    np.testing.assert_array_equal(after.memory[0], np.where(live, after.pos, 0))
    np.testing.assert_array_equal(after.memory[1].value, np.ones((B, K)))
    for row in np.asarray(after.pos).reshape(-1, capacity):
        kept = row[row >= 0]
        assert (np.diff(kept) > 0).all()


def test_a_head_that_a_compacted_cache_cannot_hold_shows_as_nan():
    before = layer(random_positions(np.random.default_rng(2), dead=0.5))
    lost = np.asarray(before.num_live) > 9
    assert lost.any()
    assert not lost.all()
    shown = np.isnan(compact(before, 9).v)
    np.testing.assert_array_equal(shown.all((2, 3)), lost)
    np.testing.assert_array_equal(shown.any((2, 3)), lost)


def test_append_extends_every_array_and_starts_memory_from_zero():
    before = layer([[[3, 1]] * K] * B)
    new = jnp.full((B, K, 3, H), 7.0)
    pos = jnp.asarray([[4, 5, 6], [-1, -1, 4]], jnp.int32)
    after = append(before, new, -new, pos)
    assert after.pos[0, 0].tolist() == [3, 1, 4, 5, 6]
    assert after.pos[1, 2].tolist() == [3, 1, -1, -1, 4]
    assert after.memory[0][0, 0].tolist() == [3, 1, 0, 0, 0]
    assert after.k[0, 0, 2:].tolist() == [[7.0] * H] * 3


def test_insert_writes_into_the_first_dead_slot():
    before = layer([[[3, -1, -1], [2, 3, -1], [-1, 1, 3]]] * B)
    before = dataclasses.replace(before, memory=(jnp.full((B, K, 3), 9.0),))
    new = jnp.full((B, K, 1, H), 5.0)
    after = insert(before, new, -new, jnp.asarray([[4], [-1]], jnp.int32))
    assert after.pos[0].tolist() == [[3, 4, -1], [2, 3, 4], [4, 1, 3]]
    assert after.memory[0][0].tolist() == [[9, 0, 9], [9, 9, 0], [0, 9, 9]]
    # The second sequence read nothing: what is live is untouched.
    np.testing.assert_array_equal(after.pos[1], before.pos[1])
    live = np.asarray(before.live[1])
    np.testing.assert_array_equal(np.asarray(after.k[1])[live], np.asarray(before.k[1])[live])


def test_insert_into_a_full_cache():
    full = layer([[[0, 1]] * K] * B)
    new = jnp.ones((B, K, 1, H))
    after = insert(full, new, new, jnp.asarray([[2], [-1]], jnp.int32))
    assert np.isnan(after.v[0]).any(axis=(1, 2)).all()  # driven past its plan: visible in every head
    np.testing.assert_array_equal(after.pos, full.pos)
    np.testing.assert_array_equal(after.v[1], full.v[1])  # nothing to write, nothing harmed
    np.testing.assert_array_equal(after.k[1], full.k[1])


def test_evict_only_marks():
    before = layer([[[3, 1, 2]] * K] * B)
    keep = jnp.asarray([[[True, False, True]] * K] * B)
    after = evict(before, keep)
    assert after.pos[0, 0].tolist() == [3, -1, 2]
    np.testing.assert_array_equal(after.k, before.k)


@pytest.mark.parametrize("num_gone", [1, 3])
def test_evict_updates_ranks(num_gone):
    pos = jnp.asarray(random_positions(np.random.default_rng(3), dead=0.3), jnp.int32)
    kv = dataclasses.replace(layer(pos), positions="compact", rank=jnp.where(pos >= 0, ranks(pos), -1))
    gone = jnp.argsort(jnp.where(pos >= 0, jax.random.uniform(jax.random.key(0), pos.shape), 2.0), axis=-1)[
        ..., :num_gone
    ]
    keep = kv.live & ~jax.nn.one_hot(gone, pos.shape[-1], dtype=bool).any(-2)
    after = evict(kv, keep)
    np.testing.assert_array_equal(after.rank, jnp.where(after.live, ranks(after.pos), -1))


def test_map_slots_leaves_heads_alone():
    memory = {"a": jnp.ones((B, K, 5)), "b": PerHead(jnp.ones((B, K)))}
    doubled = map_slots(lambda x: 2 * x, memory)
    assert float(doubled["a"].sum()) == 2 * memory["a"].size
    assert doubled["b"] is memory["b"]


def test_state_is_an_immutable_pytree(tiny):
    model, params = tiny
    plan = kvjax.make_plan(model.config, kvjax.methods.h2o(4), prompt_len=8, max_new_tokens=2)
    _, state = kvjax.prefill(model, params, jnp.ones((2, 8), jnp.int32), plan)
    same = jax.tree.map(lambda x: x, state)
    assert jax.tree.structure(same) == jax.tree.structure(state)
    assert jax.tree.map(jnp.shape, state).layers[0].pos == (2, 2, 5)  # trees of anything, not only of arrays
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.length = 3
    assert state.num_slots == plan.num_slots == 5 * 2 * 3
    assert state.kv_bytes == 2 * 4 * 2 * 5 * 2 * 3 * 8  # k and v, float32, rows, slots, heads, layers, head_dim
    assert state.num_live.shape == (2, 3, 2)


@pytest.mark.parametrize("storage", ["dense", "pool"])
def test_what_is_hidden_is_not_read(storage):
    """Attention over some of the slots is attention over a cache that holds those alone."""
    kv = layer(random_positions(np.random.default_rng(2)))
    shown = kv.live & (kv.pos % 3 != 0)
    alone = evict(kv, shown)
    if storage == "pool":
        kv, alone = to_pool(kv, K * 20), to_pool(alone, K * 20)
        shown = kv.view().live & (kv.view().pos % 3 != 0)
    q, at = jnp.linspace(-0.3, 0.2, B * K * H).reshape(B, K, 1, H), jnp.full((B, 1), 40)
    out = lambda kv, **visible: np.asarray(kv.attend(q, kv.keys(lambda x, _: x), at, (), **visible).out)
    np.testing.assert_allclose(out(kv, visible=shown), out(alone), rtol=1e-5)
    assert not np.allclose(out(kv), out(alone), rtol=1e-2)
    named = Chosen(jnp.where(shown, jnp.arange(shown.shape[-1]), -1)[..., ::-1])
    np.testing.assert_array_equal(named.mask(shown.shape[-1]), shown)
    np.testing.assert_allclose(out(kv, visible=named), out(alone), rtol=1e-5)


def test_slots_that_are_named_are_read_as_if_the_others_were_hidden():
    """With a bias, and whatever is measured: what is not read gets nothing."""
    kv = layer(random_positions(np.random.default_rng(2)))
    shown = kv.live & (kv.pos % 3 != 0)
    order = jnp.argsort(~shown, axis=-1)
    named = Chosen(jnp.where(jnp.take_along_axis(shown, order, axis=-1), order, -1)[..., :12])
    assert int(shown.sum(-1).max()) <= 12
    q, at = jnp.linspace(-0.3, 0.2, B * 2 * K * H).reshape(B, 2 * K, 1, H), jnp.full((B, 1), 40)
    asked = (Columns(), Columns(None, "above", group_at="before"), Columns(1, group=None, summed=False))
    bias = jnp.linspace(-1.0, 1.0, B * 2 * K * 20).reshape(B, 2 * K, 20)
    read = lambda visible: kv.attend(q, kv.k, at, asked, visible=visible, bias=bias)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), read(named), read(shown))
    even = kv.pos % 2 == 0
    both = named.among(even).mask(20)
    np.testing.assert_array_equal(both, shown & even)


def test_a_state_prints_sizes_instead_of_numbers(shallow):
    """Where they are known; a traced state, its shapes and a tree without arrays print too."""
    plan = kvjax.make_plan(shallow[0].config, kvjax.methods.h2o(6), prompt_len=8, max_new_tokens=2)
    state = kvjax.drivers.steps.empty_after_prompt(kvjax.init_state(plan, [8, 5]))
    seen = []
    jax.eval_shape(lambda state: seen.append(repr(state)) or state.length, state)
    policy = f"policy={plan.policy!r})"
    sizes = "1 layers of 7 slots"
    store = f"{state.kv_bytes:,} bytes of keys and values"
    start = "KVState(length=[0, 0], prompt_length=[8, 5]"
    assert repr(state) == f"{start}, {sizes}, 0 to 0 live a kv head, {store}, {policy}"
    assert seen == [f"KVState(length=int32[2], prompt_length=int32[2], {sizes}, {store}, {policy}"]
    assert repr(jax.tree.map(lambda x: None, state)) == f"KVState(length=None, prompt_length=None, {policy}"
    found = kvjax.Generation(jnp.zeros((2, 3), jnp.int32), jnp.ones((2,), jnp.int32), state)
    assert repr(found) == f"Generation(tokens=[[0, 0, 0], [0, 0, 0]], lengths=[1, 1], state={state!r})"
    assert "k=float32[2, 2, 7, 8]" in repr(state.layers[0])
    assert described((jnp.zeros(9), jnp.zeros(9), jnp.zeros(9))) == "(float32[9],) * 3"
    assert described((jax.random.key(0),)) == "(key<fry>[],)"
