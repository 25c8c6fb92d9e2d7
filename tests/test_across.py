"""Layers that compete for one budget."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.compose.across import AcrossLayers, Competitor, ScoreEntropy, by_weight
from kvjax.contract import Context, LayerInfo, Policy, Slots
from kvjax.methods import roco
from kvjax.storage import empty
from tests.tensors import evicted, qkv

INFO = LayerInfo(0, 2, 2, 1, 4, 12, 0)


def test_a_layer_of_no_weight_gets_its_least():
    """By hand: 2 x 5 tokens, of which a layer that asks for nothing gets 2, the other 8."""
    kv = empty(INFO, Policy(), 1, jnp.float32, 12).replace(pos=jnp.arange(12, dtype=jnp.int32)[None, None])
    one = jnp.array([12], jnp.int32)
    ctx = Context(one, one, None, jnp.int32(0), one)
    slots = Slots(kv, {}, ctx, kv.live, ~kv.live)
    layers = [
        Competitor(slots, jnp.full((1, 1, 12), x), *(jnp.array([n], jnp.int32) for n in (5, 10, 2))) for x in (0.0, 1.0)
    ]
    found = by_weight(lambda layer: layer.score.sum((1, 2)), None, layers)
    assert [x.tolist() for x in found] == [[[2]], [[8]]]


def test_the_least_is_that_of_the_policy():
    """RoCo spares some tokens by their deviation; its budget holds them."""
    evict = roco(8)
    policy = AcrossLayers(type(evict)(evict.score, 8, 1), ScoreEntropy())
    *_, least = policy.sizes(INFO, np.array([12])).hparams
    assert least.tolist() == policy.policy.score.least(np.array([12]), np.array([8])).tolist()
    assert least[0] > 1


# ------------------------------------------------------------------------------------------------ drawn layers

L, K, N, T, W = 3, 2, 4, 24, 4
LAYERS = [
    dict(zip("qkv", qkv(i, sharpness=i + 0.5), strict=True)) | {"out_proj": jnp.ones((N, 8, 8))} for i in range(L)
]


def decided(policy):
    """(live slots, scores, those that compete) "L B K T" of all layers."""
    layers, scores = evicted(policy, LAYERS, lengths=[T, 17])
    live, pos = np.array([kv.live for kv in layers]), np.arange(T)
    padding = pos < T - np.array([T, 17])[:, None]
    competes = np.broadcast_to((~padding & (pos < T - W))[:, None], live.shape[1:])
    return live, np.array(scores), competes


def test_one_top_k_over_all_layers_and_heads():
    policy = dataclasses.replace(methods.layer_defensivekv(10, window=W, kernel=3, mass=0.0), max_ratio=3.0)
    live, score, competes = decided(policy)
    for row in range(2):
        among = np.where(competes[row], score[:, row], -np.inf)
        best = np.argsort(-among.ravel(), kind="stable")[: L * K * (10 - W)]
        wanted = np.zeros(among.size, bool)
        wanted[best] = True
        np.testing.assert_array_equal(live[:, row][..., : T - W], wanted.reshape(among.shape)[..., : T - W])
    totals = live[:, 0].sum((1, 2))
    assert totals.sum() == L * K * 10
    assert len(set(totals.tolist())) > 1


def test_layers_share_one_budget_by_composite_tokens():
    """By a loop over ranks; the first layer has as much as any, and a token of it stays in every layer."""
    policy = dataclasses.replace(methods.kvcompose(10, window=W), max_ratio=3.0)
    live, score, competes = decided(policy)
    for row in range(2):
        heads = [
            [np.sort(head[among])[::-1] for head, among in zip(x, competes[row], strict=True)] for x in score[:, row]
        ]
        composites = np.array(heads).mean(1)
        composites[0] = composites.max(0)
        composites[:, 0] = np.inf
        best = np.argsort(-composites.ravel(), kind="stable")[: L * (10 - W)]
        counts = np.bincount(best // composites.shape[1], minlength=L)
        for layer, each in enumerate(live[:, row]):
            for head in range(K):
                kept = np.argsort(-np.where(competes[row, head], score[layer, row, head], -np.inf))[: counts[layer]]
                assert {*np.flatnonzero(each[head][: T - W])} == {*kept}


@pytest.mark.slow
def test_a_layer_gets_no_more_than_it_has_slots_for():
    """What it would have had goes to the next best of the others."""
    policy = methods.layer_defensivekv(10, window=W, kernel=3, mass=0.0)
    totals = lambda ratio: decided(dataclasses.replace(policy, max_ratio=ratio))[0][:, 0].sum((1, 2))
    assert totals(3.0).max() > K * 11 == totals(1.1).max()
    assert totals(1.1).sum() == L * K * 10


@pytest.mark.slow
def test_layers_get_tokens_in_proportion_to_the_entropy_of_their_scores():
    policy = dataclasses.replace(methods.lava(10, window=W, kernel=3), max_ratio=3.0)
    live, score, competes = decided(policy)
    for row in range(2):
        weights = []
        for each in score[:, row]:
            p = each[competes[row]].astype(np.float64)
            p = p / p.sum()
            weights.append(-(p * np.log(p)).sum() / np.log(p.size))
        shares, totals = np.array(weights) / sum(weights) * L * (10 - W), live[:, row].sum((1, 2))
        assert totals.sum() == L * K * 10
        assert (np.abs(totals / K - W - shares) < 1).all()


@pytest.mark.slow
def test_one_layer_alone_has_the_average_and_none_is_left_without_a_token():
    cake, arrays = methods.cake(10, window=W, kernel=3), qkv(1)
    np.testing.assert_array_equal(kvjax.evict_layer(cake, *arrays).live, kvjax.evict_layer(cake.policy, *arrays).live)
    peaked = lambda kv, stats, ctx: jnp.where((ctx.layer > 0) | (kv.pos == 5), 1.0, 0.0)
    policy = kvjax.across_layers(kvjax.from_fn(peaked, 2), ScoreEntropy())
    assert evicted_counts(policy) == [[1, 1], [3, 3], [2, 2]]


def evicted_counts(policy):
    return [kv.num_live[0].tolist() for kv in evicted(policy, LAYERS)[0]]
