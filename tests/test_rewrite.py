"""Attention matching: new weights and values of what is kept, where rows are few or read a part of it."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.contract import Layout
from tests import tensors

T = 40
PARAMS = [dict(zip("qkv", tensors.qkv(2, B=1, T=T), strict=True))]


def test_few_rows_do_not_throw_values_far():
    """Eight rows of two query heads do not determine 20 weights and values: what they leave open stays as it is."""
    policy, padded = methods.attention_matching(20, rows=8, sinks=2), []
    for pad in (0, 5):
        arrays = (np.pad(PARAMS[0][n], ((0, 0), (0, 0), (pad, 0), (0, 0))) for n in "qkv")
        kv = kvjax.evict_layer(policy, *arrays, lengths=[T])
        padded.append([np.where(kv.live[..., None], x, 0)[:, :, pad:] for x in (kv.v, kv.log_weight[..., None])])
    for alone, found in zip(*padded, strict=True):
        np.testing.assert_allclose(found, alone, atol=1e-3)
    assert np.abs(padded[0][0]).max() < 10  # values were drawn below 4


def test_tokens_that_move_are_not_fitted():
    policy = dataclasses.replace(methods.attention_matching(20), layout=Layout("rank"))
    with pytest.raises(ValueError, match='layer 0 wants tokens at positions="rank", but Match fits weights'):
        kvjax.start(tensors.model_of(PARAMS), policy=policy, lengths=[T], max_new_tokens=0)
