"""One reading says what the old library's says: of masks, gates, decisions and the rows that follow."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import analysis as old
from kvjax import methods as old_methods
from kvjax.analysis import traces as old_traces
from kvjax.core import analysis, chain, methods
from kvjax.core.contract import Layout
from kvjax.core.observe import Rows

B, T, F = 2, 16, 4
LENGTHS = np.array([16, 11], np.int32)
TOKENS, CONTINUATION = (np.random.default_rng(0).integers(1, 61, (B, n)).astype(np.int32) for n in (T, F))
POLICY = methods.ada_snapkv(8, window=4, kernel=3)


@pytest.fixture(autouse=True, scope="module")
def _promotes():
    """The core runs under the promotion that JAX has by itself."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def readings(shallow):
    """The old library's reading, its plan, and the core's, of one layer."""
    model, params = shallow
    policy = old_methods.ada_snapkv(8, window_size=4, kernel_size=3)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        plan = kvjax.make_plan(model.config, policy, prompt_len=T, max_new_tokens=F, lengths=LENGTHS)
        asked = [(*layer, ("kv_head", old_traces.VotingRows(3))) for layer in old.measurements([plan])]
        was = old.read(model, params, TOKENS, CONTINUATION, lengths=LENGTHS, measure=asked)
        more = (analysis.VotingRows(3), Rows(3))
        read = analysis.read
        return was, plan, read(model, params, TOKENS, CONTINUATION, policies=(POLICY,), observe=more, lengths=LENGTHS)


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_masks_and_gates_cost_what_they_did(readings, shallow):
    was, plan, reading = readings
    keep = old.keep_one(plan, was)
    after = reading.after(POLICY)
    np.testing.assert_array_equal(jnp.stack([kv.live for kv in after]), keep)
    close(reading.mass(2), was.mass(2))
    close(reading.logits, was.logits)
    close(reading.outputs(0, after[0]), was.outputs(0, keep[0]))
    of_query_heads = jnp.repeat(keep, 2, axis=2).at[:, :, 0, :9].set(False)
    close(reading.outputs(0, reading.left(of_query_heads)[0]), was.outputs(0, of_query_heads[0]))
    close(reading.logits_after(*shallow, keep), was.logits_after(*shallow, keep))
    gates = jnp.linspace(0.0, 1.0, keep.size).reshape(keep.shape)
    total = lambda reading, gates: jnp.abs(reading.logits_after(*shallow, gates)).sum()
    close(*(jax.value_and_grad(total, argnums=1)(x, gates)[0] / 100 for x in (reading, was)))
    close(*(jax.grad(total, argnums=1)(x, gates) / 100 for x in (reading, was)))


def test_decisions_have_scores_and_budgets(readings):
    was, plan, reading = readings
    (wanted,), (found,) = old.decisions(plan, was), reading.decisions(POLICY)
    np.testing.assert_array_equal(found.keep, wanted.keep)
    competing = (..., slice(-4))  # before the window; the old library adds up the votes of 4 rows
    close(found.score[competing] * 4, wanted.score[competing])
    np.testing.assert_array_equal(found.budgets, wanted.budgets)


def test_a_chains_decision_ranks_by_its_last_member(readings, shallow):
    both = chain(POLICY, methods.knorm(6))
    reading = analysis.read(*shallow, TOKENS, CONTINUATION, policies=(both,), lengths=LENGTHS)
    (found,), (after,) = reading.decisions(both), reading.after(both)
    np.testing.assert_array_equal(found.keep, after.live)
    np.testing.assert_array_equal(found.keep.sum(-1), np.full((B, 2), 6))
    np.testing.assert_array_equal(np.isfinite(found.score), reading.after(POLICY)[0].live)
    with pytest.raises(ValueError, match="Policy ranks nothing after the prompt, in layer 0"):
        reading.decisions(methods.full())


def test_traces_and_voters_are_those_of_before(readings):
    was, _, reading = readings
    wanted, found = old_traces.trace(was), analysis.trace(reading)
    jax.tree.map(close, jax.tree.leaves(found), jax.tree.leaves(wanted))
    gates = jnp.linspace(0.0, 1.0, B * 2 * T).reshape(B, 1, 2, T)
    close(found.eviction_loss(gates), wanted.eviction_loss(gates))
    close(found.outputs(gates), wanted.outputs(gates))
    voters = reading.stats.of(0)[analysis.VotingRows(3)]
    close(voters.votes(jnp.ones((B, 3))), reading.stats.of(0)[Rows(3)])
    sharper = was.layers[0].stats["kv_head"][old_traces.VotingRows(3)].votes(jnp.full((B, 3), 2.0))
    close(voters.votes(jnp.full((B, 3), 2.0)), sharper)


def test_keys_that_move_are_read_at_their_ranks(readings, shallow):
    was, plan, _ = readings
    keep = old.keep_one(plan, was)
    moved = analysis.read(*shallow, TOKENS, CONTINUATION, lengths=LENGTHS, layout=Layout("rank"))
    close(moved.logits_after(*shallow, keep), was.logits_after(*shallow, keep, "compact"))


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_work_is_refused(readings, shallow):
    reading, read = readings[2], lambda *rows, **how: analysis.read(*shallow, *rows, **how)
    with pytest.raises(ValueError, match="2 prompts, but 1 continuations; give one for each"):
        read(TOKENS, CONTINUATION[:1])
    with pytest.raises(ValueError, match="need the prompt stored in different ways"):
        read(
            TOKENS,
            CONTINUATION,
            policies=(POLICY, dataclasses.replace(methods.streaming_llm(8), layout=Layout("rank"))),
        )
    with pytest.raises(ValueError, match="reads the prompt again before it evicts"):
        read(TOKENS, CONTINUATION, policies=(methods.kvzip(8),))
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
    with pytest.raises(ValueError, match="rows=0: at least one row must vote"):
        analysis.VotingRows(0)
