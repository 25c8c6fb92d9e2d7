"""Unbounded reading: memory and time a token do not grow with what was read.

Letters: B batch, n tokens of a chunk, V vocabulary.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.contract import MOST, Model, Policy, PRNGKey, Size
from kvjax.generation.interrupts import uninterrupted
from kvjax.generation.loop import Decoding, decoded, log_prob
from kvjax.run.checks import as_array, check_ids, check_model, check_positions, traced
from kvjax.run.state import Prompts, State
from kvjax.run.steps import decode
from kvjax.text.stream import read_endless

_decode = jax.jit(decode, static_argnums=0)


class Reader(Iterator[np.ndarray]):
    """Iterator over the chunks that `read` reads; it can be left and resumed at any time.

    Ctrl-C takes effect between chunks, or while tokens are waited for; those that have come by then are read next. The
    losses of a chunk that was read when it came are what the next call returns.

    Attributes:
      num_tokens: tokens of every sequence so far that the cache has read.
    """

    def __init__(
        self, model: Model, params: PyTree, tokens: Iterable[Any], policy: Policy, width: int, chunk: int, key: PRNGKey
    ):
        self._model, self._params, self._chunk, self._lent = model, params, chunk, False
        self._tokens = iter(tokens)
        self._waiting: list[Any] = []
        self._at: Decoding | None = None
        prompt = self._next(width)
        if not prompt.size:
            raise ValueError("there are no tokens to read; give at least one, such as BOS")
        B, T = prompt.shape
        lengths = np.full(B, T, np.int32)
        self._logits, self._state = read_endless(model, params, Prompts(prompt, lengths), policy, key=key)
        self._waiting, self.num_tokens, self._prompt = [], T, lengths
        self._ready: list[np.ndarray] = []  # losses that nobody has got yet

    @property
    def logits(self) -> Float[Array, "B V"]:
        """Logits of the token that follows what was read."""
        return self._whole()[0]

    @property
    def state(self) -> State:
        """The cache so far, which has read every token. It stays valid."""
        self._lent = True
        return self._whole()[1]

    def _whole(self) -> tuple[Float[Array, "B V"], State]:
        """Logits and state after the last token, which the loop reads with the next chunk."""
        if self._at is None:
            return self._logits, self._state
        return _decode(self._model, self._params, self._at.token, self._at.state)

    def _next(self, most: int) -> Int[np.ndarray, "B n"]:
        """The next tokens, as many as there are up to `most`. They wait until they have been read."""
        for token in itertools.islice(self._tokens, most - len(self._waiting)):
            self._waiting.append(token)
        if not self._waiting:
            return np.zeros((0, 0), np.int32)
        axes = (None,) * (1 + np.ndim(self._waiting[0]))
        meaning = "ids, or one id a sequence at every step"
        found = np.asarray(as_array("tokens", self._waiting, np.integer, axes, meaning))
        check_ids(self._model, found)
        return (found[:, None] if found.ndim == 1 else found).T.astype(np.int32)

    def __next__(self) -> Float[np.ndarray, "B n"]:
        if not self._ready:
            self._read_next()
        [losses] = self._ready
        self._ready = []  # nothing is called from here on, so that no signal comes between
        return losses

    def _read_next(self) -> None:
        tokens = self._next(self._chunk)
        if not tokens.size:
            raise StopIteration
        (B, n), there, read = tokens.shape, len(self._prompt), self.num_tokens - int(self._prompt[0])
        if there != B:
            raise ValueError(f"{B} tokens came at once, but {there} sequences are read; give one id for each")
        if self.num_tokens + n >= MOST:
            raise ValueError(
                f"{self.num_tokens + n:,} tokens of a sequence are more than the {MOST - 1:,} that positions count; "
                "begin anew with the last of them as the prompt"
            )
        check_positions(self._model.config, self._state.plan, self._prompt, read + n, seen=read)
        with uninterrupted():  # as the old state is gone when the chunk has begun
            self._ready = [self._read(tokens)]
            self._waiting, self.num_tokens = [], self.num_tokens + n

    def _read(self, tokens: Int[np.ndarray, "B n"]) -> Float[np.ndarray, "B n"]:
        first: list[np.ndarray] = []
        at = self._at
        if at is None:  # the prompt's logits are there, and the cache has read everything
            token = jnp.asarray(tokens[:, 0])
            known = log_prob(self._logits, token)
            at = Decoding(token, known, jnp.ones(len(token), bool), self._state)
            tokens, first = tokens[:, 1:], [np.asarray(known)[:, None]]
        if self._lent:
            at, self._lent = jax.tree.map(jnp.copy, at), False
        n = tokens.shape[1]
        given = (jnp.asarray(np.pad(tokens, ((0, 0), (0, self._chunk - n))).T), None)
        found, self._at = decoded(self._model, self._params, at, given, jnp.int32(n), in_place=True, chunk=self._chunk)
        self._state = dataclasses.replace(self._at.state, layers=())
        return -np.concatenate([*first, np.asarray(found.log_probs)[:n].T], axis=1)


def read(
    model: Model,
    params: PyTree,
    tokens: Iterable[int] | Iterable[Sequence[int]],
    *,
    policy: Policy,
    prompt_len: Size = 256,
    chunk: Size = 256,
    key: PRNGKey = None,
) -> Reader:
    """Reads tokens for as long as they come, and yields their losses, chunk by chunk.

    Memory is that of the plan and one chunk: nothing is kept of what was read but the cache. The first tokens are read
    at once, as a prompt, by the call itself; the others one decode step each, `chunk` of them in one compiled call.

    Positions count up to 2^30 - 1 tokens a sequence. Before that, rotary embeddings at original and at "shifted"
    positions lose precision, by an angle of 0.06 at a million tokens; keys at their rank in the cache
    (`Layout("rank")`) do not. Sums of attention are float32: what is less than 6e-8 of a sum is lost in it.

    Args:
      model, params: the model.
      tokens: ids for a batch of one; or, for a batch, one id a sequence at every step.
      policy: what to evict: one whose cache does not grow while decoding.
      prompt_len: how many of the first tokens are the prompt, of which shares are shares; fewer if no more come.
      chunk: tokens of a compiled call.
      key: one PRNG key, or one a sequence.

    Returns:
      A `Reader`. It yields arrays "B n" of `chunk` tokens each (the last may have fewer): minus the log-probability of
      every token but the prompt's, given those before it.

    Raises:
      ValueError: a policy whose cache grows; no tokens; ids outside the vocabulary, or of another number of sequences
        than before, when they come.
    """
    check_model(model, params)
    if isinstance(tokens, str) or not isinstance(tokens, Iterable) or getattr(tokens, "ndim", 1) == 0:
        raise ValueError(f"tokens is a {type(tokens).__name__}, not token ids that come one after the other; encode it")
    if traced(*jax.tree.leaves((params, key))):
        raise ValueError("a reader reads chunk by chunk outside of jit, but an argument is traced; use kvjax.feed")
    return Reader(model, params, tokens, policy, prompt_len, chunk, key)
