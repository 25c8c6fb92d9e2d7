"""Which layers share a program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.models.gpt2 import GPT2Config
from kvjax.run import scan
from tests import table


def test_layers_with_scales_of_their_own_are_of_kinds_of_their_own():
    sizes = {"vocab_size": 61, "embed_dim": 32, "mlp_dim": 48, "num_layers": 2, "num_query_heads": 4}
    config = GPT2Config(**sizes, num_kv_heads=4, head_dim=8)
    assert config.kind(0) == config.kind(1)
    assert models.LanguageModel(config).alike == (0, 0)
    config = dataclasses.replace(config, scaled_by_layer=True)
    assert config.kind(0) != config.kind(1)


def _toy(kinds):
    """Layers that do as their kinds, parameters and inputs say; "n" changes the dtype of what goes through them."""

    def layer(i, x, params, number):
        x = jnp.tanh(x @ params.astype(x.dtype)) * ("abcn".index(kinds[i]) + 1) + number.astype(x.dtype)
        return x.astype(jnp.bfloat16 if kinds[i] == "n" else x.dtype), x.sum()

    return layer


@pytest.mark.parametrize(
    ("kinds", "scans"), [("aaaaaa", 1), ("ababab", 1), ("abbccc", 2), ("abcabc", 1), ("abcbca", 1), ("nnnnnn", 0)]
)
def test_kinds_that_repeat_become_one_scan(kinds, scans):
    draw, called = np.random.default_rng(0), []
    params, numbers = [*jnp.asarray(draw.standard_normal((6, 3, 3)), jnp.float32)], [*jnp.arange(6.0)]
    how = {"after_layer": lambda: called.append(0)}
    alone = lambda params: scan.each_layer(_toy(kinds), jnp.ones((2, 3)), params, numbers, **how)
    shared = lambda params: scan.each_layer(_toy(kinds), jnp.ones((2, 3)), params, numbers, kinds=kinds, **how)
    assert str(jax.make_jaxpr(shared)(params)).count(" scan[") == scans
    assert len(called) == 6
    for one, other in zip(jax.tree.leaves(alone(params)), jax.tree.leaves(shared(params)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-6)


MECHANISMS = (  # memory, sizes by layer, a pool, layers that compete, heads apart, merging
    *("h2o", "pyramidkv", "ada_pyramid", "across_layers_entropy", "partition_heads", "keyformer", "kvpress_cam"),
)
LENGTHS = np.array([24, 17], np.int32)
TOKENS = np.random.default_rng(0).integers(1, 61, (2, 24)).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_prompt_that_is_read_inside_of_jit_keeps_the_same(name, tiny):
    (model, params), case = tiny, table.Case(name)
    policy = case.make(case.budget, width=model.config.embed_dim)
    how = {"policy": policy, "lengths": LENGTHS, "max_new_tokens": 4, "key": jax.random.key(5)}
    read = lambda params: kvjax.prefill(model, params, TOKENS, **how)
    (one, held), (other, same) = read(params), jax.jit(read)(params)
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)
    for first, second in zip(held.layers, same.layers, strict=True):
        np.testing.assert_array_equal(first.head_pos, second.head_pos)
