"""Attention matching: new weights and values of what is kept, where rows are few or read a part of it."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax import methods, models
from kvjax.contract import Layout
from kvjax.models.embedded import EMBEDDED
from tests import tensors

T = 40
PARAMS = [dict(zip("qkv", tensors.qkv(2, B=1, T=T), strict=True))]


@pytest.mark.slow
def test_a_model_reads_on_as_without_padding():
    """Few rows of a model are so alike that least squares alone would amplify what rounding does to them."""
    model, params = models.load(EMBEDDED)
    ids = np.random.default_rng(0).integers(3, 40, (1, 53))
    request, found = {"policy": methods.attention_matching(20, rows=8), "max_new_tokens": 8}, []
    for pad in (0, 17):
        tokens = np.pad(ids, ((0, 0), (pad, 0)))
        _, state = kvjax.prefill(model, params, tokens, lengths=[ids.shape[1]], **request)
        found.append(jax.nn.log_softmax(kvjax.feed(model, params, ids[:, :8], state)[0]))
    np.testing.assert_allclose(*found, atol=1e-3)


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


def test_what_a_window_holds_whole_stays_as_it_is():
    policy = methods.attention_matching(16, rows=8, sinks=0)
    (kv,), _ = tensors.evicted(policy, PARAMS, window=13)
    np.testing.assert_allclose(kv.log_weight, 0, atol=1e-5)
    np.testing.assert_allclose(kv.v, PARAMS[0]["v"], atol=1e-4)


def test_tokens_that_move_are_not_fitted():
    policy = dataclasses.replace(methods.attention_matching(20), layout=Layout("rank"))
    with pytest.raises(ValueError, match='layer 0 wants tokens at positions="rank", but Match fits weights'):
        kvjax.start(tensors.model_of(PARAMS), policy=policy, lengths=[T], max_new_tokens=0)
