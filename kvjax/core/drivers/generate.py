"""Generation: one loop around `decode`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.core.contract import Policy
from kvjax.core.drivers.steps import State, decode, prefill


def greedy(key, logits):
    """The likeliest token. A sampler is a function of (keys "B", logits "B V")."""
    return logits.argmax(-1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("model", "steps", "ends", "sampler"))
def continued(model, params, logits, state: State, *, steps: int, ends: tuple = (), sampler: Any = greedy):
    """(tokens "B steps", state): sequences sleep after an end token, and get token 0."""

    def pick(logits, state, asleep):
        keys = jax.vmap(jax.random.fold_in)(state.keys, state.length)
        token = jnp.where(asleep, 0, sampler(keys, logits))
        return token, asleep | jnp.isin(token, jnp.asarray(ends, jnp.int32)) if ends else asleep

    def step(carry, _):
        logits, state, asleep = carry
        token, asleep = pick(logits, state, asleep)
        logits, state = decode(model, params, token, state, ~asleep if ends else None)
        return (logits, state, asleep), token

    carry = (logits, state, jnp.zeros(logits.shape[0], bool))
    (logits, state, asleep), tokens = lax.scan(step, carry, length=steps - 1)
    return jnp.concatenate([tokens.T, pick(logits, state, asleep)[0][:, None]], axis=1), state


def generate(
    model,
    params,
    tokens,
    lengths,
    policy: Policy,
    max_new_tokens: int,
    *,
    ends: tuple = (),
    sampler: Any = greedy,
    **options,
):
    """Tokens "B max_new_tokens" after left-padded prompts, and the state. Options are those of `prefill`."""
    logits, state = prefill(model, params, tokens, lengths, policy, max_new_tokens, **options)
    return continued(model, params, logits, state, steps=max_new_tokens, ends=ends, sampler=sampler)
