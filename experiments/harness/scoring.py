"""Log-probabilities of given tokens, from the full cache and after an eviction, and the numbers that share a program.

Letters: B batch, T width of prompts, M tokens that are scored.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

import kvjax
from kvjax.drivers.generation import Model


def rounded_up(tokens: int) -> int:
    """The next of the numbers of steps 1, 2, 3, 4, 6, 8, 12, ...: powers of two and what lies halfway.

    Choices are often of one token, for which the widths of prompts (`kvjax.drivers.buckets`) are too wide.
    """
    power = 1 << (tokens - 1).bit_length()
    halfway = power * 3 // 4
    return halfway if tokens <= halfway else power


def judged(logits: Float[Array, "*B V"], token: Int[Array, "*B"]) -> tuple[Float[Array, "*B"], Bool[Array, "*B"]]:
    """The log-probability of a token, and whether it is the likeliest."""
    logits = logits.astype(jnp.float32)
    here = jnp.take_along_axis(jax.nn.log_softmax(logits), token[..., None], axis=-1)[..., 0]
    return here, jnp.argmax(logits, axis=-1) == token


@functools.partial(jax.jit, static_argnames=("model", "plan", "block"))
def score_after(
    model: Model,
    params: PyTree[Any],
    contexts: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    keys: Key[Array, "B"],
    continuations: Int[Array, "B M"],
    *,
    plan: kvjax.CachePlan,
    block: int | None,
) -> tuple[Float[Array, "B M"], Bool[Array, "B M"]]:
    """Reads left-padded contexts, evicts, and reads the continuations one decode step at a time.

    Continuations are padded on the right with any tokens: what comes after a token changes nothing about it.

    Returns:
      What `judged` says of every token of the continuations.
    """
    logits, state = kvjax.prefill(model, params, contexts, plan, lengths=lengths, key=keys, block=block)

    def step(carry, token):
        logits, state = carry
        found = judged(logits, token)
        return kvjax.decode_step(model, params, token, state), found

    (logits, _), before = lax.scan(step, (logits, state), continuations.T[:-1])
    last = judged(logits, continuations[:, -1])
    together = lambda some, one: jnp.concatenate([some, one[None]]).T
    return together(before[0], last[0]), together(before[1], last[1])


@functools.partial(jax.jit, static_argnames=("model", "plan"))
def score_whole(
    model: Model,
    params: PyTree[Any],
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    following: Int[Array, "B T"],
    *,
    plan: kvjax.CachePlan,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Reads left-padded tokens with the full cache, at once.

    Returns:
      What `judged` says of the token that follows each of them.
    """
    state = kvjax.init_state(plan, lengths, dtype=model.config.dtype)
    logits, _, _ = kvjax.forward(model, params, tokens, state, valid=lengths, last_only=False)
    return judged(logits, following)
