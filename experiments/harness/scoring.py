"""Log-probabilities of given tokens, from the full cache and after an eviction, and the numbers that share a program.

Letters: B batch, T width of prompts, M tokens that are scored.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

import kvjax
from kvjax.contract import EMPTY, Positions, kv_layers, kv_sources
from kvjax.generation.loop import Decoding, decode_tokens
from kvjax.run.layers import without_cache


def rounded_up(tokens: int) -> int:
    """The next of the numbers of steps 1, 2, 3, 4, 6, 8, 12, ...: powers of two and what lies halfway.

    Choices are often of one token, for which the widths of prompts (`kvjax.run.plan`) are too wide.
    """
    power = 1 << (tokens - 1).bit_length()
    halfway = power * 3 // 4
    return halfway if tokens <= halfway else power


@jax.jit
def judged(logits: Float[Array, "*B V"], token: Int[Array, "*B"]) -> tuple[Float[Array, "*B"], Bool[Array, "*B"]]:
    """The log-probability of a token, and whether it is the likeliest."""
    logits = logits.astype(jnp.float32)
    here = jnp.take_along_axis(jax.nn.log_softmax(logits), token[..., None], axis=-1)[..., 0]
    return here, jnp.argmax(logits, axis=-1) == token


def score_after(
    model: Any,
    params: PyTree[Any],
    contexts: Int[np.ndarray, "B T"],
    lengths: Int[np.ndarray, "B"],
    keys: Key[Array, "B"],
    continuations: Int[np.ndarray, "B M"],
    *,
    policy: kvjax.Policy,
    block: int | None,
) -> tuple[Float[Array, "B M"], Bool[Array, "B M"]]:
    """Reads left-padded contexts, evicts, and reads the continuations one decode step at a time.

    Continuations are padded on the right with any tokens: what comes after a token changes nothing about it.

    Returns:
      What `judged` says of every token of the continuations.
    """
    options: dict[str, Any] = {"policy": policy, "max_new_tokens": continuations.shape[1] - 1}
    logits, state = kvjax.prefill(model, params, contexts, lengths=lengths, key=keys, block=block, **options)
    return _continued(model, params, logits, state, jnp.asarray(continuations))


@functools.partial(jax.jit, static_argnames=("model",))
def _continued(
    model: Any, params: PyTree[Any], logits: Float[Array, "B V"], state: kvjax.State, tokens: Int[Array, "B M"]
) -> tuple[Float[Array, "B M"], Bool[Array, "B M"]]:
    first = judged(logits, tokens[:, 0])
    at = Decoding(tokens[:, 0], first[0], jnp.ones(len(tokens), bool), state)
    how = {"chunk": tokens.shape[1] - 1, "also": lambda logits, token, state: judged(logits, token)}
    later = decode_tokens(model, params, at, (tokens.T[1:], None), **how)[0].also
    together = lambda one, some: jnp.concatenate([one[None], some]).T
    return together(first[0], later[0]), together(first[1], later[1])


@functools.partial(jax.jit, static_argnames=("model",))
def score_whole(
    model: Any,
    params: PyTree[Any],
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    following: Int[Array, "B T"],
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Reads left-padded tokens at once, evicting nothing.

    Returns:
      What `judged` says of the token that follows each of them.
    """
    T = tokens.shape[1]
    pos = jnp.maximum(jnp.arange(T)[None] - (T - lengths)[:, None], EMPTY)
    outer, layers = model.parts(params)
    x, held, sources = model.embed(outer, tokens, pos), kv_layers(model.config), kv_sources(model.config)
    attends = [without_cache(pos) if i in held or i in sources else Positions(pos) for i in range(len(layers))]
    caches = dict[int, Any]()
    for n, (layer, attend) in enumerate(zip(layers, attends, strict=True)):
        cache = caches[held[sources[n]]] if n in sources else None
        x, caches[n], _ = model.block(model.alike[n], layer, x, cache, attend)
    return judged(model.head(outer, x), following)
