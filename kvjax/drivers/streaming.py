"""Generation a step at a time: tokens, or their text, as they are made."""

import collections
import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from kvjax.algebra import identity
from kvjax.cache.context import row_keys
from kvjax.cache.state import KVState
from kvjax.drivers.buckets import plan_request, rounds
from kvjax.drivers.generation import NO_TOKEN, first_token, next_token
from kvjax.drivers.requests import Model, check_block, check_key, check_prompts, check_request
from kvjax.drivers.sampling import Greedy, Sampler, seen_tokens
from kvjax.drivers.steps import prefill
from kvjax.drivers.text import TextPieces, check_tokenizer, encode, is_chat
from kvjax.policy import Policy


@functools.partial(jax.jit, static_argnames=("model", "plan", "sampler", "block"))
def _start(model, params, tokens, lengths, key, *, plan, sampler, block):
    logits, state = prefill(model, params, tokens, plan, lengths=lengths, key=key, block=block)
    seen = seen_tokens(tokens, lengths, model.config.vocab_size) if sampler.reads_seen else None
    return *first_token(sampler, logits, state, seen), state


@functools.partial(jax.jit, static_argnames=("model", "sampler", "pad_id"), donate_argnames=("seen", "state"))
def _next(model, params, token, running, seen, state, *, sampler, pad_id):
    return next_token(model, params, token, running, seen, state, sampler=sampler, pad_id=pad_id)


def stepping(model: Model, params: PyTree[Any], sampler: Sampler, pad_id: int) -> Callable[..., Any]:
    """A compiled step of a `Stream`: `(token, running, seen, state)` to the next ones. It overwrites the state."""
    return functools.partial(_next, model, params, sampler=sampler, pad_id=pad_id)


def stop_strings(stop: Any) -> tuple[str, ...]:
    """The strings that end a text, of which one may be given alone.

    Raises:
      ValueError: no strings, or empty ones.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    if not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"stop={stop!r}: must be strings of at least one character")
    return stops


class Stream(Iterator[Any]):
    """What `stream` returns: an iterator over steps that can be left, and gone on with, at any time.

    After a `break`, a `close()` or Ctrl-C, its attributes say what was made so far, and agree with one another: as in
    `kvjax.Generation`, the state has read everything but the last token. Ctrl-C takes effect between steps.
    """

    def __init__(self, token, seen, state, *, step, ends, max_new_tokens, pieces):
        B = token.shape[0]
        self._step, self._ends, self._most = step, ends, max_new_tokens
        self._pieces: list[TextPieces] | None = pieces
        self._token, self._seen, self._state, self._lent = token, seen, state, False
        self._ids: list[np.ndarray] = []
        self._lengths, self._running = np.zeros(B, np.int32), np.ones(B, bool)
        self._drawn, self._ready, self._closed = 1, collections.deque(), False

    @property
    def tokens(self) -> Int[np.ndarray, "B M"]:
        """Generated ids so far, `pad_id` after a sequence has ended; -1 where logits were not numbers."""
        self._settle()
        return np.stack(self._ids, axis=1)

    @property
    def lengths(self) -> Int[np.ndarray, "B"]:
        """Generated tokens of every sequence so far, the end token included."""
        self._settle()
        return self._lengths.copy()

    @property
    def text(self) -> str | list[str]:
        """The text yielded so far, where there is a tokenizer: of each sequence, or of the only one.

        Raises:
          ValueError: no tokenizer was given.
        """
        if self._pieces is None:
            raise ValueError("there is no text without tokenizer=")
        self._settle()
        return self._one([pieces.text for pieces in self._pieces])

    @property
    def state(self) -> KVState:
        """The cache so far. It stays valid: a step after this copies it, where it would overwrite it otherwise."""
        self._lent = True
        return self._state

    def close(self) -> None:
        """Ends the iteration."""
        self._closed = True

    def __next__(self) -> Int[np.ndarray, "B"] | str | list[str]:
        while not self._closed:
            self._settle()
            if self._ready:
                return self._ready.popleft()
            if self._drawn == self._most or not self._running.any():
                break
            self._draw()
        raise StopIteration

    def _draw(self) -> None:
        with _uninterrupted():  # as the old state is gone when the step has begun
            if self._lent:
                self._state, self._lent = jax.tree.map(jnp.copy, self._state), False
            self._token, self._seen, self._state = self._step(self._token, self._running, self._seen, self._state)
            self._drawn += 1

    def _settle(self) -> None:
        """Takes notice of the last token that was drawn, once."""
        if len(self._ids) == self._drawn:
            return
        ids = np.asarray(self._token)  # waits for the step
        with _uninterrupted():
            self._take(ids)

    def _take(self, ids: Int[np.ndarray, "B"]) -> None:
        before, ended = self._running, np.isin(ids, self._ends)
        self._ids.append(ids)
        self._lengths += before
        self._running = before & ~ended
        if self._pieces is None:
            self._ready.append(ids)
            return
        last, new = len(self._ids) == self._most, [""] * len(ids)
        for row in np.nonzero(before)[0]:
            pieces = self._pieces[row]
            if not ended[row] and ids[row] != NO_TOKEN:
                new[row] = pieces.push(int(ids[row]), last=last)
            elif last or ended[row]:
                new[row] = pieces.finish()
        self._running &= ~np.array([pieces.stopped for pieces in self._pieces])
        if any(new):
            self._ready.append(self._one(new))

    def _one(self, rows: list[str]) -> str | list[str]:
        return rows[0] if len(rows) == 1 else rows


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the end of what is done inside; only the main thread gets it."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda *what: came.append(what))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])


def stream(
    model: Model,
    params: PyTree[Any],
    prompt: str | Sequence[Mapping[str, Any]] | Array | np.ndarray | Sequence[Sequence[int]],
    *,
    policy: Policy = identity(),
    max_new_tokens: int,
    lengths: Array | np.ndarray | Sequence[int] | None = None,
    sampler: Sampler = Greedy(),
    eos_ids: int | Sequence[int] | None = None,
    pad_id: int = 0,
    key: Array | None = None,
    block: int | None = None,
    tokenizer: Any = None,
    stop: str | Sequence[str] = (),
    buckets: bool = True,
    attention_mask: Array | np.ndarray | None = None,
) -> Stream:
    """Reads prompts, evicts, and yields what is generated step by step: the tokens are those of `kvjax.generate`.

    The prompts are read by the call itself. Reading them and a step are compiled once each for equal arguments. A step
    overwrites the cache in place, unless somebody holds it (`Stream.state`).

    Args:
      model, params, policy, max_new_tokens, lengths, sampler, eos_ids, pad_id, key, block, buckets, attention_mask: see
        `kvjax.generate`.
      prompt: left-padded token ids "B T"; or, where there is a tokenizer, a text or the messages of a chat, which
        `models.encode` makes ids of.
      tokenizer: one of transformers. With it, text is yielded instead of ids.
      stop: strings that end a sequence, wherever tokens cut them. They and what comes after are no part of the text.

    Returns:
      A `Stream`. Without a tokenizer it yields the ids "B" of each step. With one it yields pieces of text, a string
      for a batch of one and else a list of strings, as soon as they are complete: their concatenation is the text of
      the tokens without special and end tokens.

    Raises:
      ValueError: what `kvjax.generate` refuses; text or stop strings without a tokenizer; traced arguments.
    """
    stops = stop_strings(stop)
    if tokenizer is None and (stops or isinstance(prompt, str) or is_chat(prompt)):
        raise ValueError("text needs tokenizer=, such as models.load_tokenizer returns; or give token ids and no stop")
    if tokenizer is not None:
        check_tokenizer(tokenizer)
    if isinstance(prompt, str) or is_chat(prompt):
        if lengths is not None or attention_mask is not None:
            raise ValueError("lengths= and attention_mask= are of token ids, but prompt is a text; leave them out")
        prompt = [encode(tokenizer, prompt)]
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((params, prompt, lengths, attention_mask, key))):
        raise ValueError("a stream runs step by step outside of jit, but an argument is traced; use kvjax.generate")
    ends = check_request(model, max_new_tokens, sampler, eos_ids, pad_id)
    check_key(sampler, key)
    tokens, known = check_prompts(model, prompt, lengths, attention_mask)
    B, width = tokens.shape
    plan, tokens = plan_request(model.config, policy, tokens, known, max_new_tokens, buckets=rounds(buckets))
    options = {"plan": plan, "sampler": sampler, "block": check_block(plan, block, width)}
    drawn = _start(model, params, tokens, jnp.asarray(known), row_keys(key, B), **options)
    return Stream(
        *drawn,
        step=stepping(model, params, sampler, pad_id),
        ends=ends,
        max_new_tokens=max_new_tokens,
        pieces=None if tokenizer is None else [TextPieces(tokenizer, stops) for _ in range(B)],
    )
