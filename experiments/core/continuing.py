"""Reads given tokens and those drawn behind them, by kvjax's loop.

Letters: B batch, n steps, m tokens of a sequence.
"""

import dataclasses
from collections.abc import Callable
from typing import Final

import jax
import numpy as np
from jaxtyping import Bool, Int

from kvjax.generation.loop import Decoding, Given, Steps

LOOKED_AT: Final = 16
"""Tokens that are drawn before texts are asked whether they have ended."""


def continued(
    run: Callable[[Decoding, Given, np.int32], tuple[Steps, Decoding]],
    at: Decoding,
    given: tuple[Int[np.ndarray, "n B"], Bool[np.ndarray, "n B"]],
    limits: Int[np.ndarray, "B"],
    ended: Callable[[int, Int[np.ndarray, "m"]], bool] | None = None,
) -> tuple[Steps, Decoding]:
    """Reads given tokens and those drawn behind them, each sequence up to its end or its limit, the last token too.

    Args:
      run: `decode_tokens` with a chunk of n steps and without `waits`: (at, given, count) -> (steps, at).
      at: what `begin` made of the first given tokens.
      given: tokens from the first on, and which of them are given.
      limits: how many tokens each sequence reads.
      ended: a function (sequence, the tokens that it has read) -> whether its text has ended, asked every 16 tokens.

    Returns:
      Tokens and their log-probabilities from the first on, and `also` after each was read, all arrays of numpy; and
      where decoding stands afterwards.
    """
    left = np.where(at.running, limits, np.minimum(limits, 1))
    token = np.asarray(at.token)
    probability = np.asarray(at.log_prob)
    at = dataclasses.replace(at, token=token, log_prob=probability, running=left > 0, left=left)
    done, last = 0, int(left.max())
    tokens, probabilities, also = [token[None]], [probability[None]], []
    while not also or np.any(at.running):
        until = last if ended is None else min(done + LOOKED_AT, last)
        tokens_after, known = (np.concatenate([x[done + 1 :], np.zeros_like(x[: done + 1])]) for x in given)
        steps, at = run(at, (tokens_after, known), np.int32(until - done))
        steps = jax.tree.map(lambda x, n=until - done: np.asarray(x)[:n], steps)
        tokens.append(steps.tokens)
        probabilities.append(steps.log_probs)
        also.append(steps.also)
        if ended is not None:
            read, before = np.concatenate(tokens)[:until], np.asarray(at.running)
            running = np.array([on and not ended(b, read[:, b]) for b, on in enumerate(before)])
            at = dataclasses.replace(at, running=running)
        done = until
    joined = jax.tree.map(lambda *x: np.concatenate(x), *also)
    return Steps(np.concatenate(tokens), np.concatenate(probabilities), joined), at
