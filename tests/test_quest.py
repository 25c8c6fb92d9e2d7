"""Quest: what a row reads is what loops over pages choose, whatever else is evicted and however it is stored."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.contract import EMPTY, AttentionInputs, LayerInfo, Layout, Policy
from kvjax.methods.released import papers
from kvjax.storage import empty
from tests import tensors
from tests.by_hand import moment

B, N, K, H, T, M = 2, 4, 2, 4, 13, 21
SIZE, PAGES = 4, 2  # of a page; read
LENGTHS = np.array([T, 9], np.int32)
q, k, v = tensors.qkv(5, B=B, N=N, K=K, T=M, H=H)
QUEST = methods.quest(SIZE * PAGES, size=SIZE, dense=0).at(0, 1)
BY_RANK = dataclasses.replace(methods.h2o(8), layout=Layout("rank"))
EVICTING, FEWER = kvjax.chain(QUEST, methods.tova(10)), methods.think(0.5, rows=4)
BY_QUERY_HEAD = papers.quest_by_query_head(SIZE * PAGES, size=SIZE, dense=0).at(0, 1)


def read_by_loops(b, h, live, group, left):
    """The positions that the newest token reads of those that a head holds, by the channels of keys that are left."""
    newest, shift = max(live), T - LENGTHS[b]
    heads = range(h * group, (h + 1) * group)
    keys = {p: np.asarray(k[b, h * group * K // N, p + shift], np.float64) for p in live}
    total = {}
    for page in {p // SIZE for p in live} - {newest // SIZE}:
        of = np.array([keys[p] for p in live if p // SIZE == page])[:, left]
        rows = np.array([q[b, n, newest + shift] for n in heads], np.float64)[:, left]
        total[page] = np.maximum(rows * of.max(0), rows * of.min(0)).sum(-1).max()
    pages = {newest // SIZE, *sorted(total, key=lambda page: (-total[page], page))[: PAGES - 1]}
    return [p for p in sorted(live) if p // SIZE in pages]


@pytest.mark.parametrize(
    "policy",
    [QUEST, BY_QUERY_HEAD, EVICTING, kvjax.chain(QUEST, FEWER), kvjax.chain(FEWER, QUEST)],
    ids=["kv", "query", "tova", "fewer channels", "behind fewer channels"],
)
def test_a_row_reads_what_loops_choose(policy):
    """Under padding, while pages fill, by the rows' own positions; with another policy, of what that one left."""
    seen = tensors.replay(policy, [{"q": q, "k": k, "v": v}], T, lengths=LENGTHS, reads=True)
    for step, (read, before) in enumerate(zip(seen.read, seen.live, strict=False)):
        for b, row in enumerate(before):
            for h, live in enumerate(row):
                group, left = N // len(row), slice(None) if seen.kv.channels is None else seen.kv.channels[b, h]
                if policy != EVICTING or max(live) // SIZE == min(live) // SIZE:
                    assert read[b][h] == read_by_loops(b, h, [*live, LENGTHS[b] + step], group, left)
                assert len(live) <= 10 or policy != EVICTING


@pytest.mark.slow
@pytest.mark.parametrize("shuffled", [False, True])
def test_the_slots_of_pages_are_those_that_are_shown(shuffled):
    """Wherever tokens are stored, and if some are gone. Few pages are named by their slots, many shown by a mask."""
    pos = np.array([[np.random.default_rng(i).permutation(M) if shuffled else np.arange(M) for i in range(K)]])
    pos[0, 0, [3, 9]] = EMPTY
    info, row = LayerInfo(0, 1, N, K, H, M, 1), q[:1, :, -1:]
    for pages in (1, 2):
        policy = methods.quest(SIZE * pages, size=SIZE, dense=0).at(0, 1)
        how = {"prompt": M, "new": 1, "N": N, "K": K, "H": H}
        kv = empty(info, policy, 1, "float32").append(k[:1], v[:1], jnp.zeros((1, M), jnp.int32))
        kv = kv.replace(pos=jnp.asarray(pos, jnp.int32))
        kv, ctx = policy.update(kv, {}, moment(policy, M, phase="prefill", **how)), moment(policy, M, **how)
        reads = policy.reads(kv, AttentionInputs(row, row, kv, jnp.asarray([[M - 1]]), ctx, tensors.unturned), ctx)
        assert (reads.at is None) == (pages == 2)
        for h in range(K) if reads.at is not None else ():
            named = np.asarray(reads.at[0, h])
            assert sorted(named[named >= 0]) == np.flatnonzero(reads.visible[0, h]).tolist()


def test_first_layers_and_sizes():
    dense = methods.quest(8, size=4)
    assert [type(dense.at(i, 3)) is Policy for i in range(3)] == [True, True, False]
    high, low = QUEST.memory(LayerInfo(0, 1, N, K, H, 24, 16))
    assert high.shape == low.shape == (10, H)


@pytest.mark.slow
def test_a_pool_is_read_by_pages_too(shallow):
    """Under a mask, as its slots are one array of all heads."""
    ids = np.asarray(tensors.token_ids(2, T))
    stored = lambda pool: dataclasses.replace(methods.ada_snapkv(9, window=4, kernel=3), layout=Layout(pool=pool))
    how = {"lengths": LENGTHS, "max_new_tokens": 7, "eos_ids": ()}
    found, wanted = (kvjax.generate(*shallow, ids, policy=kvjax.chain(stored(x), QUEST), **how) for x in (True, False))
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_allclose(found.log_probs, wanted.log_probs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: methods.quest(8), "a budget of 8 tokens holds no page of 16; raise it, or shrink pages"),
        (lambda: kvjax.evict_layer(kvjax.chain(BY_RANK, QUEST), q, k, v), 'stand at positions="rank", where keys move'),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
