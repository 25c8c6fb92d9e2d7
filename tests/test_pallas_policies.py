"""Policies on the GPU kernels, interpreted: they keep what they keep on XLA, in prefill and decode.

Kernels know of a policy what it observes of attention, and how its slots are stored and read, so one row of the table
of methods stands for all that ask the same.
"""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models, pallas_kernels
from kvjax.contract import Policy
from tests import table
from tests.marks import exhaustive_but
from tests.tensors import live_positions

pytestmark = pytest.mark.slow  # minutes of interpretation

B, T, NEW = 2, 24, 5
LENGTHS = np.array([T, 17])
# What the kernels leave to XLA, and say so.
ELSEWHERE = ("rows that are not summed", "gaussian noise is not drawn", "no kernel renormalises rows")
CONFIG = models.ModelConfig(
    vocab_size=61, embed_dim=64, mlp_dim=64, num_layers=3, num_query_heads=4, num_kv_heads=2, head_dim=64
)
SIZES = table.Sizes(3, 4, 2, 64, 64)


def make(name):
    return table.MAKE[name](table.Case(name).budget, SIZES)


def asked(name):
    """All that kernels know of a policy in any layer."""
    layers = kvjax.make_plan(CONFIG, make(name), LENGTHS, T, NEW).layers
    reads = lambda p: type(p).reads is not Policy.reads
    known = ((p.observe("prefill"), p.observe("decode"), p.layout, p.writes, reads(p)) for p in layers)
    return tuple(dict.fromkeys(known))


NAMES = [name for name in table.MAKE if name not in table.OF_A_BATCH]
DISTINCT = {asked(name): name for name in reversed(NAMES)}


FEW = {  # sums, draws, votes, two statistics, a softmax of its own, hidden slots, a pool, heads apart, layers
    *("key_attention", "keyformer", "snapkv", "roco", "ahakv", "quest", "ada_snapkv", "fastgen_pooled"),
    "across_layers_entropy",
}
assert {*DISTINCT.values()} >= FEW
ROWS = exhaustive_but(DISTINCT.values(), *FEW)


@pytest.fixture(scope="module")
def wide():
    """A model whose heads are as wide as the kernels ask for."""
    model = models.LanguageModel(CONFIG)
    return model, jax.tree.map(lambda x: x * jnp.asarray(2.0, x.dtype), jax.jit(model.init)(jax.random.key(7)))


def decoded(model, params, policy):
    """Logits of every step, and the layers after the last one."""
    rng = np.random.default_rng(2)
    tokens, more = rng.integers(0, 61, (B, T)), rng.integers(0, 61, (B, NEW))
    own = kvjax.init_policy_params(model.config, policy, jax.random.key(0), width=T, max_new_tokens=NEW)
    how = {"policy": policy, "lengths": LENGTHS, "max_new_tokens": NEW, "policy_params": own}
    first, state = kvjax.prefill(model, params, tokens, **how)
    logits, state = kvjax.feed(model, params, more, state)
    return np.concatenate([first[:, None], logits], axis=1), state


@pytest.mark.parametrize("name", ROWS)
def test_the_same_tokens_are_kept(wide, name, caplog):
    model, params = wide
    policy = make(name)
    logits, state = decoded(model, params, policy)
    with caplog.at_level(logging.INFO, logger="kvjax.pallas_kernels"), pallas_kernels.use("interpret"):
        other_logits, other = decoded(model, params, policy)
    for a, b in zip(state.layers, other.layers, strict=True):
        assert live_positions(a) == live_positions(b)
    np.testing.assert_allclose(other_logits, logits, atol=2e-4 * float(np.abs(logits).max()))
    for record in caplog.records:
        assert any(reason in record.getMessage() for reason in ELSEWHERE), record.getMessage()
