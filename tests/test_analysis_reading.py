"""One reading of prompts: masks of query heads, decisions, keys that move, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import analysis, chain, methods
from kvjax.contract import Layout

pytestmark = pytest.mark.usefixtures("as_users_run_it")

B, T, F = 2, 16, 4
LENGTHS = np.array([16, 11], np.int32)
TOKENS, CONTINUATION = (np.random.default_rng(0).integers(1, 61, (B, n)).astype(np.int32) for n in (T, F))
POLICY = methods.ada_snapkv(8, window=4, kernel=3)


@pytest.fixture(scope="module")
def reading(shallow):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return analysis.read(*shallow, TOKENS, CONTINUATION, policies=(POLICY,), lengths=LENGTHS)


def test_a_query_head_may_keep_what_others_of_its_group_do_not(reading):
    keep = jnp.repeat(reading.after(POLICY)[0].live, 2, axis=1).at[:, ::2, :9].set(False)
    found = reading.outputs(0, reading.left(keep[None])[0])
    for g in range(2):
        alone = reading.outputs(0, reading.left(keep[None, :, g::2])[0])
        np.testing.assert_allclose(found[:, g::2], alone[:, g::2], atol=1e-6)
    assert np.abs(found[:, ::2] - reading.later[0].out[:, ::2]).max() > 1e-2


def test_decisions_have_scores_and_budgets(reading):
    (found,), safe = reading.decisions(POLICY), np.arange(T) >= T - 4
    np.testing.assert_array_equal(found.budgets, found.keep.sum(-1))
    np.testing.assert_array_equal(found.budgets.sum(-1), [16, 16])
    assert np.asarray(found.keep)[..., safe].all()
    score = np.asarray(found.score)
    for row, head in np.ndindex(B, 2):
        kept, gone = (score[row, head][x[row, head] & ~safe] for x in np.asarray([found.keep, ~found.keep]))
        assert kept.min() >= gone.max()


def test_a_chains_decision_ranks_by_its_last_member(shallow):
    both = chain(POLICY, methods.knorm(6))
    reading = analysis.read(*shallow, TOKENS, CONTINUATION, policies=(both,), lengths=LENGTHS)
    (found,), (after,) = reading.decisions(both), reading.after(both)
    np.testing.assert_array_equal(found.keep, after.live)
    np.testing.assert_array_equal(found.keep.sum(-1), np.full((B, 2), 6))
    np.testing.assert_array_equal(np.isfinite(found.score), reading.after(POLICY)[0].live)
    with pytest.raises(ValueError, match="Policy ranks nothing after the prompt, in layer 0"):
        reading.decisions(methods.full())


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_work_is_refused(reading, shallow):
    read = lambda *rows, **how: analysis.read(*shallow, *rows, **how)
    with pytest.raises(ValueError, match="2 prompts, but 1 continuations; give one for each"):
        read(TOKENS, CONTINUATION[:1])
    with pytest.raises(ValueError, match="need the prompt stored, or read again, in different ways"):
        read(
            TOKENS,
            CONTINUATION,
            policies=(POLICY, dataclasses.replace(methods.streaming_llm(8), layout=Layout("rank"))),
        )
    with pytest.raises(ValueError, match="was not observed"):
        reading.after(methods.expected_attention(8))
    with pytest.raises(ValueError, match="keep is for 2 layers, but the reading has 1"):
        reading.left(jnp.ones((2, B, 2, T), bool))
    with pytest.raises(ValueError, match=r"keep has the shape \(2, 3, 16\), but layer 0 has slots \(2, 2, 16\)"):
        reading.left(jnp.ones((1, B, 3, T), bool))
    with pytest.raises(ValueError, match=r"gates lie between 2.0 and 2.0, but .* a share in \[0, 1\]"):
        reading.left(jnp.full((1, B, 2, T), 2.0))
    with pytest.raises(ValueError, match="keep has the dtype int32; give booleans"):
        reading.left(jnp.ones((1, B, 2, T), jnp.int32))
