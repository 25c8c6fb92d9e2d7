"""Policies on the GPU kernels, interpreted: they keep what they keep on XLA, in prefill and decode.

Kernels know of a policy what its specs ask of attention and how its slots are stored, so one row of the table of
methods stands for all that ask the same.
"""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models, pallas_kernels
from tests import helpers
from tests.methods import CASES

pytestmark = pytest.mark.slow  # minutes of interpretation

B, T, NEW, BUDGET = 2, 24, 5, 10
LENGTHS = (T, 17)
# What the kernels leave to XLA, and say so.
ELSEWHERE = ("rows that are not summed", "gaussian noise is not drawn", "no kernel renormalises rows")


CONFIG = models.ModelConfig(
    vocab_size=61, embed_dim=64, mlp_dim=64, num_layers=3, num_query_heads=4, num_kv_heads=2, head_dim=64
)


def asked(case):
    """All that kernels know of a policy in any layer."""
    policy = case.make(BUDGET)
    plan = kvjax.make_plan(CONFIG, policy, prompt_len=T, max_new_tokens=NEW, lengths=LENGTHS)
    known = ((s.prompt, s.step, s.heads, s.positions, s.storage, s.reads, s.hides, s.prunes) for s in plan.specs)
    return tuple(dict.fromkeys(known))


OF_ANY_WIDTH = [case for case in CASES if not case.name.startswith(("q_filters", "kvzap"))]  # they ask for no attention
DISTINCT = list({asked(case): case for case in sorted(OF_ANY_WIDTH, key=lambda case: not case.by_layer)}.values())


def kinds(x, name=""):
    """Types and options of which something is made, sizes aside."""
    if x is None or isinstance(x, str | bool):
        return {(name, x)}
    if isinstance(x, tuple):
        return set().union(*(kinds(y, name) for y in x))
    here = {type(x).__name__}
    if not dataclasses.is_dataclass(x):
        return here
    return here.union(*(kinds(getattr(x, f.name), f"{type(x).__name__}.{f.name}") for f in dataclasses.fields(x)))


def few():
    """Rows that among them have every kind that any has: the ones that bring most that is new, first."""
    of = {
        case: set().union(*(kinds(x, str(i)) for spec in asked(case) for i, x in enumerate(spec))) for case in DISTINCT
    }
    lacking, found = set().union(*of.values()), []
    while lacking:
        found.append(max(of, key=lambda case: len(of[case] & lacking)))
        lacking -= of[found[-1]]
    return found


FEW = few()
ROWS = [pytest.param(case, marks=() if case in FEW else pytest.mark.exhaustive) for case in DISTINCT]


@pytest.fixture(scope="module")
def wide(case):
    """A model whose heads are as wide as the kernels ask for, with as many layers as tell what the method does."""
    model = models.LanguageModel(CONFIG if case.by_layer else dataclasses.replace(CONFIG, num_layers=1))
    return model, jax.tree.map(lambda x: x * jnp.asarray(2.0, x.dtype), jax.jit(model.init)(jax.random.key(7)))


def decoded(model, params, policy):
    """Logits of every step, and the layers after the last one."""
    rng = np.random.default_rng(2)
    tokens, more = jnp.asarray(rng.integers(0, 61, (B, T))), jnp.asarray(rng.integers(0, 61, (B, NEW)))
    plan = kvjax.make_plan(model.config, policy, prompt_len=T, max_new_tokens=NEW, lengths=LENGTHS)

    @jax.jit
    def run(params, tokens, more):
        first, state = kvjax.prefill(model, params, tokens, plan, lengths=jnp.asarray(LENGTHS))
        logits, state = kvjax.feed(model, params, more, state)
        return jnp.concatenate([first[:, None], logits], axis=1), state

    return run(params, tokens, more)


@pytest.mark.parametrize("case", ROWS, ids=repr, scope="module")
def test_the_same_tokens_are_kept(wide, case, caplog):
    model, params = wide
    policy = case.make(BUDGET)
    logits, state = decoded(model, params, policy)
    with caplog.at_level(logging.INFO, logger="kvjax.pallas_kernels"), pallas_kernels.use("interpret"):
        other_logits, other = decoded(model, params, policy)
    for a, b in zip(state.layers, other.layers, strict=True):
        assert helpers.live_positions(a) == helpers.live_positions(b)
    np.testing.assert_allclose(other_logits, logits, atol=2e-4 * float(np.abs(logits).max()))
    for record in caplog.records:
        assert any(reason in record.getMessage() for reason in ELSEWHERE), record.getMessage()
