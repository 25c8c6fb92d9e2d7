"""Generation a step at a time: tokens, or their text, as they are made."""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, PyTree

from kvjax.algebra import identity
from kvjax.cache.context import row_keys
from kvjax.cache.state import KVState
from kvjax.drivers.buckets import plan_request, rounds
from kvjax.drivers.endless import check_counted, plan_endless
from kvjax.drivers.generation import NO_TOKEN, first_token, next_token
from kvjax.drivers.interrupts import uninterrupted
from kvjax.drivers.requests import (
    Model,
    as_scored,
    check_block,
    check_chunk,
    check_key,
    check_positions,
    check_prompts,
    check_request,
)
from kvjax.drivers.sampling import Greedy, Sampler, seen_tokens
from kvjax.drivers.steps import prefill
from kvjax.drivers.text import TextPieces, check_tokenizer, encode, is_chat
from kvjax.pallas_kernels.values import MOST_TOKENS
from kvjax.policy import Policy


@functools.partial(jax.jit, static_argnames=("model", "plan", "sampler", "block"))
def _start(model, params, tokens, lengths, key, *, plan, sampler, block):
    logits, state = prefill(model, params, tokens, plan, lengths=lengths, key=key, block=block)
    seen = seen_tokens(tokens, lengths, model.config.vocab_size) if sampler.reads_seen else None
    return *first_token(sampler, logits, state, seen), state


@functools.partial(jax.jit, static_argnames=("model", "sampler", "pad_id"), donate_argnames=("seen", "state"))
def _next(model, params, token, running, seen, state, *, sampler, pad_id):
    return next_token(model, params, token, running, seen, state, sampler=sampler, pad_id=pad_id)


@functools.partial(
    jax.jit, static_argnames=("model", "sampler", "pad_id", "ends", "chunk"), donate_argnames=("seen", "state")
)
def _several(model, params, token, running, seen, state, count, *, sampler, pad_id, ends, chunk):
    """`count` steps of at most `chunk`: the tokens "B chunk" that they draw, and what `_next` returns beside."""
    eos = jnp.asarray(ends, jnp.int32)[None]

    def step(i, carry):
        drawn, token, running, seen, state = carry
        token, seen, state = next_token(model, params, token, running, seen, state, sampler=sampler, pad_id=pad_id)
        running = running & ~(token[:, None] == eos).any(-1)
        return drawn.at[:, i].set(token), token, running, seen, state

    drawn = jnp.full((len(token), chunk), pad_id, jnp.int32)
    drawn, _, _, seen, state = lax.fori_loop(0, count, step, (drawn, token, running, seen, state))
    return drawn, seen, state


def stepping(
    model: Model, params: PyTree[Any], sampler: Sampler, pad_id: int, *, ends: tuple[int, ...] = (), chunk: int = 1
) -> Callable[..., Any]:
    """A compiled call of a `Stream`: `(token, running, seen, state)` to the next ones. It overwrites the state.

    With a `chunk`, it draws several tokens, as many as its last argument says, and returns "B chunk" of them.
    """
    if chunk == 1:
        return functools.partial(_next, model, params, sampler=sampler, pad_id=pad_id)
    return functools.partial(_several, model, params, sampler=sampler, pad_id=pad_id, ends=ends, chunk=chunk)


def stop_strings(stop: Any) -> tuple[str, ...]:
    """The strings that end a text, of which one may be given alone.

    Raises:
      ValueError: no strings, or empty ones.
    """
    several = isinstance(stop, Iterable) and not isinstance(stop, str) and getattr(stop, "ndim", 1)
    stops = tuple(stop) if several else (stop,)
    if not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"stop={stop!r}: must be strings of at least one character")
    return stops


class Stream(Iterator[Any]):
    """What `stream` returns: an iterator over steps that can be left, and gone on with, at any time.

    After a `break`, a `close()` or Ctrl-C, its attributes say what was made so far, and agree with one another: as in
    `kvjax.Generation`, the state has read everything but the last token. Ctrl-C takes effect between compiled calls.

    A stream without an end keeps none of its tokens and none of its text.
    """

    def __init__(self, token, seen, state, *, step, ends, max_new_tokens, pieces, chunk=1, config=None):
        B = token.shape[0]
        self._step, self._ends, self._chunk, self._endless = step, ends, chunk, max_new_tokens is None
        self._most = MOST_TOKENS - int(state.prompt_length.max()) if max_new_tokens is None else max_new_tokens
        self._pieces: list[TextPieces] | None = pieces
        self._config, self._prompt = config, np.asarray(state.prompt_length)
        self._token, self._seen, self._state, self._lent = token, seen, state, False
        self._ids: list[np.ndarray] = []
        self._lengths, self._running = np.zeros(B, np.int32), np.ones(B, bool)
        self._taken, self._unseen = 0, 1  # tokens of a sequence: those looked at, those that were drawn since
        self._ready, self._closed = collections.deque(), False

    @property
    def tokens(self) -> Int[np.ndarray, "B M"]:
        """Generated ids so far, `pad_id` after a sequence has ended; -1 where logits were not numbers.

        Raises:
          ValueError: a stream without an end.
        """
        self._check_kept("tokens")
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
          ValueError: no tokenizer was given, or a stream without an end.
        """
        if self._pieces is None:
            raise ValueError("there is no text without tokenizer=")
        self._check_kept("text")
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
            if not self._running.any():
                break
            if self._taken == self._most:
                if self._endless:
                    check_counted(MOST_TOKENS + 1)
                break
            self._draw()
        raise StopIteration

    def _check_kept(self, what: str) -> None:
        if self._endless:
            raise ValueError(f"a stream without an end keeps no {what}; keep what it yields, or give max_new_tokens=")

    def _draw(self) -> None:
        count = min(self._chunk, self._most - self._taken)
        if self._config is not None:
            check_positions(self._config, self._state.plan, self._prompt, self._taken + count, seen=self._taken)
        with uninterrupted():  # as the old state is gone when the step has begun
            if self._lent:
                self._state, self._lent = jax.tree.map(jnp.copy, self._state), False
            token = self._token if self._token.ndim == 1 else self._token[:, -1]
            now = (token, self._running, self._seen, self._state)
            now = now if self._chunk == 1 else (*now, jnp.int32(count))
            self._token, self._seen, self._state = self._step(*now)
            self._unseen = count

    def _settle(self) -> None:
        """Takes notice of the tokens that were drawn last, once."""
        if not self._unseen:
            return
        ids = np.asarray(self._token)  # waits for the step
        with uninterrupted():
            for column in ids.reshape(len(ids), -1).T[: self._unseen]:
                if self._taken and not self._running.any():
                    break
                self._take(column)
            self._unseen = 0

    def _take(self, ids: Int[np.ndarray, "B"]) -> None:
        before, ended = self._running, np.isin(ids, self._ends)
        self._taken += 1
        if not self._endless:
            self._ids.append(ids)
        self._lengths += before
        self._running = before & ~ended
        if self._pieces is None:
            self._ready.append(ids)
            return
        last, new = self._taken == self._most, [""] * len(ids)
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


def stream(
    model: Model,
    params: PyTree[Any],
    prompt: str | Sequence[Mapping[str, Any]] | Array | np.ndarray | Sequence[Sequence[int]],
    *,
    policy: Policy = identity(),
    max_new_tokens: int | None,
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
    chunk: int = 1,
) -> Stream:
    """Reads prompts, evicts, and yields what is generated step by step: the tokens are those of `kvjax.generate`.

    The prompts are read by the call itself. Reading them and a step are compiled once each for equal arguments. A step
    overwrites the cache in place, unless somebody holds it (`Stream.state`).

    Args:
      model, params, policy, lengths, sampler, eos_ids, pad_id, key, block, buckets, attention_mask: see
        `kvjax.generate`.
      max_new_tokens: tokens to generate; None for a stream without an end, until all sequences have ended, under a
        policy whose cache does not grow with them. Nothing is kept of it but the cache; it is planned for 2^30 - 1
        tokens (`kvjax.read` says what that means), and for the prompt's exact width.
      prompt: left-padded token ids "B T"; or, where there is a tokenizer, a text or the messages of a chat, which
        `kvjax.models.encode` makes ids of.
      tokenizer: one of transformers. With it, text is yielded instead of ids.
      stop: strings that end a sequence, wherever tokens cut them. They and what comes after are no part of the text.
      chunk: steps of a compiled call. The tokens are the same; more of them come at once, and the state is ahead of
        what was yielded by as many.

    Returns:
      A `Stream`. Without a tokenizer it yields the ids "B" of each step. With one it yields pieces of text, a string
      for a batch of one and else a list of strings, as soon as they are complete: their concatenation is the text of
      the tokens without special and end tokens.

    Raises:
      ValueError: what `kvjax.generate` refuses; text or stop strings without a tokenizer; stop strings in chunks, which
        would be read on behind them; traced arguments; no end under a policy whose cache grows.
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
    chunk = check_chunk(chunk)
    if stops and chunk > 1:
        raise ValueError(
            f"stop={stops} is looked for after each step, but chunk={chunk} takes more at once; use chunk=1"
        )
    ends = check_request(model, 1 if max_new_tokens is None else max_new_tokens, sampler, eos_ids, pad_id)
    check_key(sampler, key)
    tokens, known = check_prompts(model, prompt, lengths, attention_mask, params=params)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((params, tokens, known, key))):
        raise ValueError("a stream runs step by step outside of jit, but an argument is traced; use kvjax.generate")
    B, width = tokens.shape
    if max_new_tokens is None:
        plan = plan_endless(model.config, policy, prompt_len=width, lengths=np.asarray(known))
    else:
        plan, tokens = plan_request(model.config, policy, tokens, known, max_new_tokens, buckets=rounds(buckets))
    block = check_block(plan, block, width)
    check_positions(model.config, plan, np.asarray(known), int(max_new_tokens or 1), block=block)
    options = {"plan": plan, "sampler": sampler, "block": block}
    drawn = _start(model, params, tokens, jnp.asarray(known), row_keys(key, B), **options)
    as_scored(drawn[-1])
    return Stream(
        *drawn,
        step=stepping(model, params, sampler, pad_id, ends=ends, chunk=chunk),
        ends=ends,
        max_new_tokens=max_new_tokens,
        pieces=None if tokenizer is None else [TextPieces(tokenizer, stops, keep=bool(max_new_tokens)) for _ in known],
        chunk=chunk,
        config=None if max_new_tokens else model.config,
    )
