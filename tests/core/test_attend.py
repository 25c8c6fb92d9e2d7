"""One pass of a model over new tokens: logits say where what is kept is no choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import core
from tests import helpers

T, LENGTHS = 24, np.array([24, 17], np.int32)
IDS = np.asarray(helpers.token_ids(2, T))


def _no_number(kv, stats, ctx):
    """The scores of sequences with more than 20 tokens are no numbers."""
    return jnp.where(ctx.length[:, None, None] > 20, jnp.nan, kv.pos.astype(jnp.float32))


UNSCORED = core.from_fn(_no_number, 8, sinks=2)
MESSAGE = r"Function gives no token a score that is a number \(NaN in layer 0, in 2 of 4 kv heads of the batch\)"


def read(small, policy, decodes=0):
    """Logits of two prompts, and of tokens that follow."""
    model, params = small
    how = {"policy": policy, "max_new_tokens": 2, "lengths": LENGTHS}

    def run(params):
        logits, state = core.prefill(model, params, jnp.asarray(IDS), **how)
        every = [logits]
        for _ in range(decodes):
            logits, state = core.decode_step(model, params, jnp.zeros((2,), jnp.int32), state)
            every.append(logits)
        return jnp.stack(every)

    return run(params) if not decodes else jax.jit(run)(params)


def test_scores_that_are_no_numbers_are_refused_and_under_jit_their_logits_are_none(shallow):
    with pytest.raises(ValueError, match=MESSAGE):
        read(shallow, UNSCORED)
    logits = read(shallow, UNSCORED, decodes=2)
    assert np.isnan(logits[:, 0]).all()
    assert not np.isnan(logits[:, 1]).any()


def test_the_door_says_so_too(shallow):
    model, params = shallow
    state = core.start(model, policy=UNSCORED, lengths=LENGTHS, max_new_tokens=1)
    with pytest.raises(ValueError, match=MESSAGE):
        core.forward(model, params, IDS, state, valid=LENGTHS, evict=True)
    _, state, stats = core.forward(model, params, IDS, state, valid=LENGTHS)
    with pytest.raises(ValueError, match=MESSAGE):
        UNSCORED(state, stats)
    applied = jax.jit(UNSCORED)(state, stats)
    logits, *_ = core.forward(model, params, IDS[:, :1], applied)
    np.testing.assert_array_equal(np.isnan(logits).any(-1), [True, False])


def test_layers_that_share_a_decision_share_the_mark(tiny):
    logits = read(tiny, core.shared_layers(UNSCORED), decodes=1)
    np.testing.assert_array_equal(np.isnan(logits).any(-1), [[True, False]] * 2)
