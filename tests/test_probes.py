"""What is found once for a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.learning.probes import head_importance
from kvjax.scoring.stats import LastRows, Observe
from tests import helpers

T, LENGTHS, ANSWERS = 24, np.array([24, 17]), np.array([3, 2])


def wanted():
    mask = np.zeros((2, T), bool)
    mask[0, 4:7] = mask[1, 10:14] = True
    return mask


def test_heads_beside_loops(tiny):
    model, params = tiny
    tokens = helpers.token_ids(2, T)
    found = head_importance(model, params, tokens, wanted(), ANSWERS, lengths=LENGTHS)

    observe = Observe(LastRows(T), group=None, summed=False)
    policy = kvjax.from_fn(lambda kv, stats, ctx: kv.pos.astype(jnp.float32), budget=1.0, observe=(observe,))
    plan = kvjax.make_plan(model.config, policy, prompt_len=T, max_new_tokens=0)
    state = kvjax.init_state(plan, LENGTHS)
    _, _, stats = jax.jit(lambda: kvjax.forward(model, params, tokens, state, valid=jnp.asarray(LENGTHS)))()
    expected = np.zeros((model.config.num_layers, model.config.num_query_heads))
    for layer, measured in enumerate(stats.layers):
        p = np.asarray(measured[observe])
        for row, mask in enumerate(wanted()):
            number = mask.sum()
            for head in range(p.shape[1]):
                for at in range(T - 1 - ANSWERS[row], T - 1):
                    best = np.argsort(-p[row, head, at], kind="stable")[:number]
                    expected[layer, head] += sum(p[row, head, at, j] for j in best if mask[j]) / number
    expected = expected.reshape(len(expected), model.config.num_kv_heads, -1).mean(-1)
    np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"answers": np.array([0, 2])}, "answers of 0 to 2 tokens"),
        ({"answers": np.array([3, 17])}, "answers of 3 to 17 tokens at the end of prompts of 17 to 24"),
        ({"wanted": np.zeros((2, T), bool)}, "nothing is wanted in 2 of 2 prompts"),
        ({"wanted": np.zeros((2, 3), bool)}, "wanted"),
    ],
)
def test_what_cannot_be_asked_is_refused(tiny, given, message):
    model, params = tiny
    arguments = {"wanted": wanted(), "answers": ANSWERS, **given}
    with pytest.raises(ValueError, match=message):
        head_importance(model, params, helpers.token_ids(2, T), lengths=LENGTHS, **arguments)
