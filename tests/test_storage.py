"""A pool of slots that the heads of a layer share: the numbers of a dense layer, in the slots that they need; ranks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods, models
from kvjax.budgets import Schedule
from kvjax.contract import EMPTY, LAST, LayerInfo, Layout, PerSlot, Policy, Reads
from kvjax.methods.released import papers
from kvjax.models import mpt
from kvjax.storage import Layer, Pool, empty, to_pool
from tests import tensors
from tests.kept import digest
from tests.marks import slow_but
from tests.tensors import live_positions

B, T, NEW, LENGTHS = 2, 24, 14, np.array([24, 17], np.int32)
IDS, MORE = np.asarray(tensors.token_ids(2, T)), np.asarray(tensors.token_ids(2, NEW, 1))
adaptive = lambda policy, *how, **fields: dataclasses.replace(policy, heads=kvjax.Adaptive(*how), **fields)
H2O = adaptive(methods.h2o(10, recent=4))
POLICIES = {
    "query heads": papers.by_query_head(methods.snapkv(10, window=4)),
    "over 3": adaptive(methods.h2o(10, recent=1), 1.0, when=Schedule(over=3, drop=5)),
    "rank": dataclasses.replace(H2O, layout=Layout("rank")),
}


def run(small, policy, lengths=LENGTHS, block=None):
    """Logits of all tokens that follow, and the layer after the prompt and at the end."""
    how = {"policy": policy, "lengths": lengths, "max_new_tokens": NEW, "block": block}
    first, state = kvjax.prefill(*small, IDS, **how)
    logits, after = kvjax.feed(*small, MORE, state)
    return np.concatenate([first[:, None], logits], axis=1), state.layers[0], after.layers[0]


@pytest.mark.parametrize("name", slow_but(POLICIES, "rank"))
def test_the_pool_equals_the_dense_layout(shallow, name):
    """Of a prompt that is shorter than the budget too, whose heads grow into theirs."""
    policy = POLICIES[name]
    stored = lambda pool, budget: dataclasses.replace(
        policy, budget=budget, layout=dataclasses.replace(policy.layout, pool=pool)
    )
    for budget, lengths in ((10, LENGTHS), (16, np.array([T, 5], np.int32))):
        dense, _, wanted = run(shallow, stored(False, budget), lengths)
        pooled, before, found = run(shallow, stored(True, budget), lengths)
        np.testing.assert_allclose(pooled, dense, atol=1e-5 * np.abs(dense).max() * NEW)
        assert isinstance(before, Pool)
        assert live_positions(found) == live_positions(wanted)
        assert found.nbytes <= wanted.nbytes + before.ends.nbytes


@pytest.mark.slow
def test_blocks_and_pool_together(shallow):
    dense, *_ = run(shallow, H2O, block=7)
    pooled, *_ = run(shallow, dataclasses.replace(H2O, layout=Layout(pool=True)), block=7)
    np.testing.assert_allclose(pooled, dense, atol=1e-4)


def test_slots_are_the_sum_of_the_budgets_and_room(shallow):
    """Heads that compete take the bytes of equal ones, whatever the largest takes."""
    whole = np.array([T, T], np.int32)
    _, uniform, _ = run(shallow, methods.snapkv(10, window=4), whole)
    _, found, _ = run(shallow, methods.ada_snapkv(10, alpha=1.0, window=4), whole)
    assert found.pos.shape[1] == uniform.pos.shape[2] * 2 == 2 * (10 + NEW)
    assert found.k.nbytes == uniform.k.nbytes
    assert int(found.num_live.max()) > 10  # some head did get more than its share


ALIBI = mpt.MPTConfig(
    vocab_size=61, embed_dim=32, mlp_dim=48, num_layers=1, num_query_heads=4, num_kv_heads=4, head_dim=8
)
BY_RANK = {  # a policy; tokens that the library before this one generated, and a digest of what it kept
    "H2O by rank": (
        dataclasses.replace(
            methods.h2o(10, recent=4), heads=kvjax.Adaptive(0.5, 4.0), layout=Layout("rank", pool=True)
        ),
        [[21, 21, 31, 36, 18, 32, 3, 19], [22, 44, 3, 34, 32, 30, 53, 10]],
        "faa4",
    ),
    "StreamingLLM": (
        dataclasses.replace(methods.streaming_llm(8, sinks=2), layout=Layout("shifted", pool=True)),
        [[21, 36, 36, 36, 36, 36, 36, 12], [22, 4, 49, 4, 1, 4, 1, 15]],
        "a1c7",
    ),
    "StreamingLLM by head": (
        kvjax.partition_heads({"s": methods.streaming_llm(8, sinks=2), "all": kvjax.Policy()}, [["s", "all"]]),
        [[21, 15, 59, 15, 55, 31, 4, 39], [22, 4, 12, 53, 5, 22, 44, 3]],
        "d083",
    ),
    "H2O by rank, ALiBi": (
        dataclasses.replace(methods.h2o(10, recent=4), layout=Layout("rank")),
        [[60, 60, 60, 60, 60, 40, 8, 9], [15, 3, 30, 30, 30, 30, 30, 30]],
        "440f",
    ),
}


@pytest.mark.parametrize("case", slow_but(BY_RANK, "H2O by rank"))
def test_by_rank_it_reads_what_was_recorded(case, shallow):
    model, params = shallow
    if "ALiBi" in case:
        model = models.LanguageModel(ALIBI)
        params = jax.tree.map(lambda x: x * 4, jax.jit(model.init)(jax.random.key(7)))
    policy, tokens, digits = BY_RANK[case]
    found = kvjax.generate(model, params, IDS, policy=policy, lengths=LENGTHS, max_new_tokens=8, eos_ids=())
    np.testing.assert_array_equal(found.tokens, tokens)
    assert digest(found.state.layers[0].head_pos) == digits


def test_a_pool_stores_all_channels(shallow):
    chained = kvjax.chain(methods.ada_snapkv(8, window=4), methods.think(0.5, rows=4))
    with pytest.raises(ValueError, match="a pool stores all 8 key channels, but this layer keeps 4; use pool=False"):
        kvjax.generate(*shallow, IDS, policy=chained, max_new_tokens=1)


# ------------------------------------------------------------------------------------------------ slots


class Remembers(Policy):
    """A number of each slot."""

    def memory(self, info):
        return PerSlot()


def layer(pos, H=4):
    """A layer whose keys, values and memory are the positions of their tokens."""
    pos = jnp.asarray(pos, jnp.int32)
    k = jnp.broadcast_to(pos[..., None], (*pos.shape, H)).astype(jnp.float32)
    like = empty(LayerInfo(0, 1, pos.shape[1], pos.shape[1], H, 8, 0), Remembers(), len(pos), k.dtype)
    return Layer(k, -k, pos, like.fault, pos.astype(jnp.float32), how=like.how)


@pytest.mark.parametrize("capacity", slow_but([64, 61], 64))
def test_heads_keep_their_slots_whatever_dies(capacity):
    """Random evictions and insertions against lists of positions; every head reaches its own bound, and no further."""
    rng, start = np.random.default_rng(capacity), 8
    most = np.array([[30, 2, 15, 14], [1, 58, 1, 1]])
    K = most.shape[1]
    pos = np.full((B, K, start), EMPTY)
    for b, h in np.ndindex(B, K):
        held = rng.choice(start, rng.integers(0, min(start, most[b, h]) + 1), replace=False)
        pos[b, h, held] = rng.permutation(start)[: len(held)]
    pool = to_pool(layer(pos), capacity, jnp.asarray(most, jnp.int32))
    assert live_positions(pool) == live_positions(layer(pos))
    most += np.arange(K) < capacity - most.sum(1, keepdims=True)  # the first heads get the three left over
    append = jax.jit(lambda pool, k, pos: pool.append(k, -k, pos, pool.free(pos)))
    drop = jax.jit(lambda pool, keep: pool.put(view := pool.view(), view.keep(keep)))
    lists = live_positions(pool)
    for step in range(start, start + 90):
        view = np.asarray(pool.head_pos)
        keep = (view >= 0) & (rng.random(view.shape) < (0.97 if step % 30 else 0.4))
        # A head that would overflow loses its oldest token, as a policy would see to it.
        held = np.where(keep, view, np.iinfo(np.int32).max)
        keep &= ~((keep.sum(-1) == most)[..., None] & (held == held.min(-1, keepdims=True)))
        pool = drop(pool, jnp.asarray(keep))
        lists = [[[p for p in lists[b][h] if p in view[b, h][keep[b, h]]] for h in range(K)] for b in range(B)]
        assert live_positions(pool) == lists
        runs = rng.random(B) < 0.9
        pool = append(pool, jnp.full((B, K, 1, 4), float(step)), jnp.asarray(np.where(runs, step, EMPTY)[:, None]))
        lists = [[lists[b][h] + [step] * bool(runs[b]) for h in range(K)] for b in range(B)]
        assert live_positions(pool) == lists
        view = pool.view()
        live = np.asarray(view.live)
        np.testing.assert_array_equal(np.asarray(view.v)[live], -np.asarray(view.k)[live])
        np.testing.assert_array_equal(np.asarray(view.k)[live][:, 0], np.asarray(view.pos)[live])
        assert (live.sum(1) <= 1).all()


def random_positions(seed, S=20, dead=0.4, K=3):
    rng = np.random.default_rng(seed)
    pos = np.stack([[rng.permutation(40)[:S] for _ in range(K)] for _ in range(B)])
    return np.where(rng.random(pos.shape) < dead, EMPTY, pos)


def test_new_rows_are_written_into_slots_that_are_free():
    """Memory starts from zero; a row that is padding writes nothing, and what finds no slot is written nowhere."""
    before = layer([[[3, -1, -1], [2, 3, -1], [0, 1, 3]]] * B)
    before = before.replace(memory=jnp.full((B, 3, 3), 9.0))
    new = jnp.full((B, 3, 1, 4), 5.0)
    pos = jnp.asarray([[4], [EMPTY]], jnp.int32)
    slots = before.free(pos)
    assert slots[0].tolist() == [[1], [2], [3]]
    after = before.append(new, -new, pos, slots)
    assert after.pos[0].tolist() == [[3, 4, -1], [2, 3, 4], [0, 1, 3]]
    assert after.memory[0].tolist() == [[9, 0, 9], [9, 9, 0], [9, 9, 9]]
    np.testing.assert_array_equal(after.pos[1], before.pos[1])
    live = np.asarray(before.live[1])
    np.testing.assert_array_equal(np.asarray(after.k[1])[live], np.asarray(before.k[1])[live])
    grown = before.append(*[jnp.full((B, 3, 2, 4), 7.0)] * 2, jnp.asarray([[4, 5], [EMPTY, 4]], jnp.int32))
    assert grown.pos[:, 0].tolist() == [[3, -1, -1, 4, 5], [3, -1, -1, -1, 4]]
    assert grown.memory[0, 0].tolist() == [9, 9, 9, 0, 0]


@pytest.mark.parametrize("pool", [False, True])
def test_what_is_hidden_is_not_read(pool):
    """Attention over some of the slots, by a mask or by their indices, is that over a cache of those alone."""
    kv = layer(random_positions(2))
    kv = to_pool(kv, 60, jnp.full((B, 3), 20)) if pool else kv
    view = kv.view()
    shown = view.live & (view.pos % 3 != 0)
    alone = kv.put(view, view.keep(shown))
    q, at = jnp.linspace(-0.3, 0.2, B * 6 * 4).reshape(B, 6, 1, 4), jnp.full((B, 1), 40)
    out = lambda kv, reads=None: np.asarray(kv.attend(q, at, (), reads, rotate=lambda x, _: x).out)
    np.testing.assert_allclose(out(kv, Reads(shown)), out(alone), rtol=1e-5)
    named = jnp.where(shown, jnp.arange(shown.shape[-1]), -1)[..., ::-1]
    np.testing.assert_allclose(out(kv, Reads(named)), out(alone), rtol=1e-5)
    np.testing.assert_allclose(out(kv, Reads(shown, at=named)), out(alone), rtol=1e-5)
    assert not np.allclose(out(kv), out(alone), rtol=1e-2)


def test_rows_that_read_different_slots_have_logits_that_float16_does_not_hold():
    q, k, v = tensors.qkv(3, B=1, dtype=jnp.float16, sharpness=100.0)
    pos = jnp.arange(k.shape[2])[None]
    kv = Layer(100 * k, v, jnp.broadcast_to(pos, k.shape[:3]), jnp.zeros(k.shape[:2], bool))
    read = lambda reads: kv.attend(q, pos, (), reads, rotate=tensors.unturned).out
    every = read(Reads(until=jnp.full(kv.pos.shape, LAST)))
    assert every.dtype == jnp.float16
    np.testing.assert_allclose(every, read(None), atol=2e-3)
