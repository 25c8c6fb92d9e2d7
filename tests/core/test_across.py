"""Layers that compete for one budget."""

import jax.numpy as jnp
import numpy as np

from kvjax.core.compose.across import AcrossLayers, Competitor, ScoreEntropy, by_weight
from kvjax.core.contract import Context, LayerInfo, Slots
from kvjax.core.methods import roco
from kvjax.core.storage import empty

INFO = LayerInfo(0, 2, 2, 1, 4, 12, 0)


def test_a_layer_of_no_weight_gets_its_least():
    """By hand: 2 x 5 tokens, of which a layer that asks for nothing gets 2, the other 8."""
    kv = empty(INFO, 1, jnp.float32, slots=12).replace(pos=jnp.arange(12, dtype=jnp.int32)[None, None])
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
