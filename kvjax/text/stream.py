"""Generation that yields tokens, or their text, as they are made.

Letters: B batch, M new tokens.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.contract import MOST, Amount, Ids, LayerParams, Model, Policy, PRNGKey, Size, Tokenizer
from kvjax.generation.interrupts import uninterrupted
from kvjax.generation.loop import NO_TOKEN, Decoding, begin, decoded
from kvjax.generation.sampling import Greedy, Sampler, seen_tokens
from kvjax.run.checks import check_model, check_positions, check_prompts, check_request, traced
from kvjax.run.plan import Plan, infos_of, planned
from kvjax.run.state import Prompts, State
from kvjax.run.steps import read_prompts
from kvjax.text.encode import Chat, TextPieces, check_tokenizer, encode, is_chat

HORIZON = 2**20  # a stream without an end is planned for so many tokens, and for twice as many


def stop_strings(stop: Any) -> tuple[str, ...]:
    """The strings that end a text, as a tuple; one may be given alone.

    Raises:
      ValueError: no strings, or empty ones.
    """
    stops = tuple(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else (stop,)
    if not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"stop={stop!r}: must be strings of at least one character")
    return stops


class Stream(Iterator[Any]):
    """Iterator over generated ids or text (`stream`); it can be left and resumed at any time.

    After a `break` or Ctrl-C, its attributes say what was made so far, and agree with one another: as in
    the result of `kvjax.generate`, the state has read everything but the last token. Ctrl-C takes effect between
    compiled calls.

    A stream without an end keeps none of its tokens and none of its text.

    Attributes:
      asked: where a session stood when it asked, and its questions; None elsewhere.
    """

    def __init__(
        self,
        model: Model,
        params: PyTree,
        at: Decoding,
        *,
        max_new_tokens: Size | None,
        pieces: list[TextPieces] | None,
        ends: tuple[int, ...],
        asked: Any = None,
        **how: Any,
    ):
        self._model, self._params, self._at, self._how = model, params, at, {"ends": ends, "sleeps": True, **how}
        self._ends, self._endless, self._pieces, self.asked = ends, max_new_tokens is None, pieces, asked
        self._prompt = np.asarray(at.state.prompt_length)
        self._most = MOST - 1 - int(self._prompt.max()) if max_new_tokens is None else max_new_tokens
        self._new, self._lent = True, False  # whether nobody has looked at the last token, and somebody holds the state
        self._taken, self._ids = 0, []
        self._lengths, self._running = np.zeros_like(self._prompt), np.ones(len(self._prompt), bool)
        self._ready: list[Any] = []  # what the last token gave, until it is yielded

    @property
    def tokens(self) -> Int[np.ndarray, "B M"]:
        """Generated ids so far, `pad_id` after a sequence has ended; -1 where logits were not numbers.

        Raises:
          ValueError: a stream without an end.
        """
        self._check_kept("tokens")
        self._settle()
        return np.array(self._ids, np.int32).reshape(-1, len(self._lengths)).T

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
    def state(self) -> State:
        """The cache so far. It stays valid: the next step copies it, where it would overwrite it otherwise."""
        self._lent = True
        return self._at.state

    def __next__(self) -> Int[np.ndarray, "B"] | str | list[str]:
        while True:
            self._settle()
            if self._ready:
                [piece] = self._ready
                self._ready = []  # nothing is called from here on, so that no signal comes between
                return piece
            if self._taken == self._most or not self._running.any():
                raise StopIteration
            self._draw()

    def _check_kept(self, what: str) -> None:
        if self._endless:
            raise ValueError(f"a stream without an end keeps no {what}; keep what it yields, or give max_new_tokens=")

    def _draw(self) -> None:
        if self._endless:
            plan = self._at.state.plan
            check_positions(self._model.config, plan, self._prompt, self._taken + 1, seen=self._taken)
        with uninterrupted():  # as the old state is gone when the step has begun
            at = dataclasses.replace(self._at, running=jnp.asarray(self._running))
            if self._lent:
                at, self._lent = jax.tree.map(jnp.copy, at), False
            _, self._at = decoded(self._model, self._params, at, None, None, in_place=True, chunk=1, **self._how)
            self._new = True

    def _settle(self) -> None:
        """Records the token that was drawn last, once."""
        if self._new:
            ids = np.asarray(self._at.token)  # waits for the step
            if self._pieces is not None and (wrong := np.flatnonzero(self._running & (ids == NO_TOKEN))).size:
                raise ValueError(
                    f"logits are not numbers after token {self._taken} of answer {wrong[0]}, so that no text follows; "
                    "the model's are not, or the policy keeps more tokens than its `sizes` asked for"
                )
            with uninterrupted():
                self._take(ids)
                self._new = False

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
            token = None if ended[row] else int(ids[row])
            new[row] = self._pieces[row].push(token, last=last or bool(ended[row]))
        self._running &= ~np.array([pieces.stopped for pieces in self._pieces])
        if any(new):
            self._ready.append(self._one(new))

    def _one(self, rows: list[str]) -> str | list[str]:
        return rows[0] if len(rows) == 1 else rows


def stream(
    model: Model,
    params: PyTree,
    prompt: str | Chat | Array | np.ndarray | Sequence[Sequence[int]],
    *,
    policy: Policy = Policy(),
    max_new_tokens: Size | None,
    lengths: Ids | None = None,
    attention_mask: Ids | None = None,
    sampler: Sampler = Greedy(),
    eos_ids: int | Sequence[int] | None = None,
    pad_id: Amount = 0,
    key: PRNGKey = None,
    block: Size | None = None,
    plan: Plan | None = None,
    policy_params: LayerParams = None,
    buckets: bool = True,
    tokenizer: Tokenizer | None = None,
    stop: str | Sequence[str] = (),
) -> Stream:
    """Reads prompts, evicts, and yields what is generated step by step: the tokens are those of `kvjax.generate`.

    The prompts are read by the call itself. A step overwrites the cache in place, unless somebody holds it
    (`Stream.state`).

    Args:
      model, params, policy, lengths, attention_mask, sampler, eos_ids, pad_id, key, block, plan, policy_params: the
        model, how prompts are read, and how tokens are drawn, as in `kvjax.generate`.
      max_new_tokens: tokens to generate; None for a stream that goes on until all sequences have ended, under a policy
        whose cache does not grow. Nothing is kept of it but the cache.
      prompt: token ids "B T", padded on the left; or, with a tokenizer, a text or the messages of a chat.
      buckets: whether sizes are rounded up, so that requests of about the same size share programs.
      tokenizer: one of transformers. With it, text is yielded instead of ids.
      stop: strings that end a sequence, wherever tokens cut them. They and what comes after are no part of the text.

    Returns:
      A `Stream`. Without a tokenizer it yields the ids "B" of each step. With one it yields pieces of text, a string
      for a batch of one and else a list of strings, as soon as they are complete.

    Raises:
      ValueError: what `kvjax.generate` refuses; text or stop strings without a tokenizer; traced arguments;
        no end under a policy whose cache grows. While it yields text, logits that are no numbers.
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
    check_model(model, params)
    ends = check_request(model, sampler, eos_ids, pad_id, key)
    prompts = check_prompts(model, prompt, lengths, attention_mask)
    if traced(*jax.tree.leaves((params, tuple(prompts), key))):
        raise ValueError("a stream runs step by step outside of jit, but an argument is traced; use kvjax.generate")
    how = {"key": key, "block": block, "plan": plan, "policy_params": policy_params, "buckets": buckets}
    if max_new_tokens is None:
        logits, state = read_endless(model, params, prompts, policy, **how)
    else:
        logits, state = read_prompts(model, params, prompts, policy, max_new_tokens, **how)
    seen = seen_tokens(prompts, model.config.vocab_size) if sampler.reads_seen else None
    at = begin(logits, state, seen, sampler=sampler, ends=ends)
    pieces = None if tokenizer is None else [TextPieces(tokenizer, stops, keep=bool(max_new_tokens)) for _ in at.token]
    how = {"pieces": pieces, "ends": ends, "sampler": sampler, "pad_id": pad_id}
    return Stream(model, params, at, max_new_tokens=max_new_tokens, **how)


def read_endless(
    model: Model, params: PyTree, prompts: Prompts, policy: Policy, **how: Any
) -> tuple[Float[Array, "B V"], State]:
    """Reads prompts that were checked into a state whose new tokens are limited by positions alone.

    Neither the policy's slots may grow with what follows, nor its data, as FastGen's number a position does.
    """
    run = lambda n: planned(policy, infos_of(model.config, policy, prompts.tokens.shape[1], n), prompts.lengths)
    few, many = run(HORIZON), run(2 * HORIZON)
    held = lambda plan, data: plan.num_slots + sum(np.size(x) for x in jax.tree.leaves(data))
    if held(*few) != held(*many):
        raise ValueError(
            f"{policy} keeps what comes after the prompt, {held(*few):,} slots and numbers for {HORIZON:,} tokens and "
            f"{held(*many):,} for twice as many; without an end, use a policy that evicts while decoding, such as "
            "kvjax.methods.h2o(512), or give a number of tokens"
        )
    check_positions(model.config, few[0], np.asarray(prompts.lengths), 0, how.get("block"))
    how |= {"plan": few[0], "warns": False}
    logits, state = read_prompts(model, params, prompts, policy, HORIZON, **how)
    return logits, dataclasses.replace(state, max_new_tokens=jnp.full_like(state.max_new_tokens, MOST - 1))
