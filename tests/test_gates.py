"""DuoAttention's gates as the script learns them, and the hidden states that they are learned from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.drivers.attend import without_cache
from kvjax.experiments import learn_gates
from kvjax.experiments.learn_gates import Learning
from tests.test_positions import random_model


def test_last_hidden_states_are_what_logits_are_made_of(tiny):
    """Of a model with learned positions, and of one whose norm has another name, too."""
    ids = np.random.default_rng(0).integers(0, 61, (2, 6), np.int32)
    pos = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32)[None], (2, 6))
    for model, params in (tiny, random_model("alibi", 1), random_model("learned", 1)):
        how = {"attend": without_cache(pos), "pos": pos}
        logits, found = (jax.jit(functools.partial(f, **how))(params, ids) for f in (model, model.states))
        head = (
            params["lm_head"]["kernel"]
            if "lm_head" in params
            else next(params[name].T for name in ("embed_tokens", "wte") if name in params)
        )
        np.testing.assert_allclose(found @ head, logits, rtol=1e-4, atol=1e-4)


def needing_one_head(params, ids, attend):
    """A layer whose first head reads the token at position 3 from everywhere, and whose second reads its own row."""
    del params
    (B, n), eye = ids.shape, jnp.eye(ids.shape[1])
    first = jnp.broadcast_to(eye[3], (n, n))
    q = 10 * jnp.broadcast_to(jnp.stack([first, eye])[None], (B, 2, n, n))
    k = jnp.broadcast_to(eye[None, None], (B, 2, n, n))
    v = jnp.broadcast_to(jax.nn.one_hot(ids, n)[:, None], (B, 2, n, n))
    out = attend(None, q, k, v, layer=0, rotate=lambda x, _: x, scale=1.0)[0]
    return 4 * out.swapaxes(1, 2).reshape(B, n, 2 * n)


def test_a_head_that_has_to_retrieve_keeps_its_gate():
    """What it reads lies outside of sinks and window; the other head streams."""
    how = Learning(steps=60, rate=0.1, sinks=2, recent=4, length=16, batch=2)
    late = np.broadcast_to(np.arange(16)[None] >= 10, (2, 16))
    texts = lambda step: (np.random.default_rng(step).integers(0, 16, (2, 16)).astype(np.int32), late)
    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        gates, moved = learn_gates.learn(needing_one_head, None, (1, 2), how, texts)
    assert gates[0, 0] > 0.9
    assert gates[0, 1] < 0.05
    assert moved[0] < 1e-9
    assert len(moved) == 60
