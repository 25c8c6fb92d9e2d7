"""Text in, text out: a context that is read and compressed once, and questions to copies of what was kept."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from kvjax.algebra import identity
from kvjax.cache.context import row_keys
from kvjax.cache.state import KVState, take_rows
from kvjax.drivers.buckets import bucket, plan_request, rounds
from kvjax.drivers.dialogue import Dialogue
from kvjax.drivers.generation import first_token
from kvjax.drivers.requests import (
    Model,
    as_scored,
    check_block,
    check_key,
    check_params,
    check_positions,
    check_prompts,
    check_request,
    check_vocabulary,
)
from kvjax.drivers.sampling import Greedy, Sampler
from kvjax.drivers.steps import decode_step, prefill
from kvjax.drivers.streaming import Stream, stepping, stop_strings
from kvjax.drivers.text import TextPieces, check_tokenizer
from kvjax.functions import check_unchanged
from kvjax.pallas_kernels.values import checked, optional, whole
from kvjax.plan import CachePlan
from kvjax.policy import Policy, as_policy


@functools.partial(jax.jit, static_argnames=("model", "plan", "block"))
def _compress(model, params, tokens, lengths, key, *, plan, block):
    return prefill(model, params, tokens, plan, lengths=lengths, key=key, block=block)[1]


@functools.partial(jax.jit, static_argnames=("model", "sampler"))
def _begin(model, params, tokens, lengths, state, keys, seen, *, sampler):
    """Questions "B W" read by copies of the only row of a state; the token that follows each, and what it came with."""
    B, W = tokens.shape
    state = dataclasses.replace(take_rows(state, np.zeros(B, np.int32)), keys=keys)

    def read(column, state):
        return decode_step(model, params, tokens[:, column], state, active=column >= W - lengths)

    shape = jax.eval_shape(read, 0, state)[0]
    carry = jnp.zeros(shape.shape, shape.dtype), state
    # All rows read the last column, whose logits are the ones that remain.
    logits, state = lax.fori_loop(W - lengths.max(), W, lambda column, carry: read(column, carry[1]), carry)
    return *first_token(sampler, logits, state, seen), state


class Session:
    """One compressed context, and questions that are asked of copies of it.

    ```
    session = kvjax.Session(model, params, tokenizer, policy=methods.snapkv(0.25), max_new_tokens=64)
    session.compress(document)
    session.ask("Who wrote it?")  # the cache is as it was: the next question finds the document, and no other question
    session.ask(["Where?", "When?"])  # as one batch
    session.ask("And why?", keep=True)  # the next question comes behind this one and its answer
    ```

    The context is read without the questions, so the policy cannot know them (the question-agnostic protocol). Contexts
    and questions of about the same size share compiled programs, whatever their text.

    Args:
      model, params: the model.
      tokenizer: one of transformers, such as `kvjax.models.load_tokenizer` returns.
      policy: what to evict; everything is kept by default.
      max_new_tokens: tokens of an answer.
      max_question_tokens: tokens of a question, with what a chat template writes around it.
      max_turns: questions and answers that may follow one another (`keep`). The cache is planned for
        `max_turns * (max_question_tokens + max_new_tokens)` tokens behind the context.
      sampler: greedy by default.
      eos_ids: tokens that end an answer; the model's own if None, `()` for none.
      stop: strings that end an answer, and are no part of it.
      key: for policies and samplers that draw. Equal questions get equal answers by it, unless they have own keys.
      block: read contexts in blocks of so many tokens (`kvjax.prefill`).
      buckets: see `kvjax.generate`.

    Raises:
      ValueError: what is no model, tokenizer or policy, parameters of another model, and numbers that make no sense.
    """

    def __init__(
        self,
        model: Model,
        params: PyTree[Any],
        tokenizer: Any,
        *,
        policy: Policy = identity(),
        max_new_tokens: int,
        max_question_tokens: int = 128,
        max_turns: int = 1,
        sampler: Sampler = Greedy(),
        eos_ids: int | Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
        key: Array | None = None,
        block: int | None = None,
        buckets: bool = True,
    ):
        check_tokenizer(tokenizer)
        as_policy(policy)
        self._ends = check_request(model, max_new_tokens, sampler, eos_ids, 0)
        check_params(model, params)
        self._model, self._params, self._tokenizer, self._policy = model, params, tokenizer, policy
        self._most_new = checked(whole(1), "max_new_tokens", max_new_tokens)
        self._most_asked = checked(whole(1), "max_question_tokens", max_question_tokens)
        self._turns = checked(whole(1), "max_turns", max_turns)
        self._sampler, self._stop = sampler, stop_strings(stop)
        self._block = checked(optional(whole(1)), "block", block)
        self._buckets = rounds(buckets)
        self._key, self._keys = key, row_keys(key, 1)
        self._dialogue: Dialogue | None = None

    def __repr__(self) -> str:
        if self._dialogue is None:
            return f"Session(policy={self._policy!r}, nothing read yet)"
        return f"Session(policy={self._state.plan.policy!r}, {len(self._read)} tokens read)"

    @property
    def state(self) -> KVState:
        """What was kept of the context, and of the turns behind it.

        Raises:
          ValueError: no context was read.
        """
        self._opened()
        return self._state

    @property
    def planned(self) -> int:
        """Tokens that may come behind the context."""
        return self._turns * (self._most_asked + self._most_new)

    def compress(self, context: str | Sequence[Mapping[str, Any]], policy: Policy | None = None) -> "Session":
        """Reads a context and evicts from it. What the session had read before is forgotten, once this one is read.

        A context that is refused leaves the session as it was: it goes on with the earlier one.

        Args:
          context: a text; or the messages of a chat, which the tokenizer's template makes a text of. Where the last one
            is the user's, questions go on with it.
          policy: in place of the session's.

        Returns:
          The session.

        Raises:
          ValueError: an empty context, more tokens with what may follow than a model has learned positions for (others
            are warned of), or too short or too long a context for the policy.
        """
        dialogue, policy = Dialogue(self._tokenizer, context), self._policy if policy is None else policy
        ids = dialogue.opening()
        tokens, lengths = check_prompts(self._model, np.array([ids], np.int64))
        options = {"buckets": self._buckets}
        plan, tokens = plan_request(self._model.config, policy, tokens, lengths, self.planned, **options)
        block = check_block(plan, self._block, len(ids))
        check_positions(self._model.config, plan, len(ids), self.planned, block=block)
        lengths = jnp.asarray(lengths)
        state = as_scored(_compress(self._model, self._params, tokens, lengths, self._keys, plan=plan, block=block))
        self._state, self._dialogue, self._read, self._pending = state, dialogue, ids, []
        return self

    def stream(self, question: str | Sequence[str], *, key: Array | None = None) -> Stream:
        """An answer as it is made, a piece of text after the other (`kvjax.stream`).

        Args:
          question: what follows the context; several are asked at once, each of a copy of its own.
          key: for samplers that draw: one, or one a question; the session's if None.

        Returns:
          A `Stream` of strings, or of lists of strings for several questions.

        Raises:
          ValueError: no context, no key for a sampler that draws, an empty question, more tokens than were planned, or
            a policy whose function has changed since.
        """
        dialogue, model = self._opened(), self._model
        check_unchanged(self._state.plan.policy)
        check_key(self._sampler, self._key if key is None else key)
        questions = [question] if isinstance(question, str) else question
        if not isinstance(questions, list | tuple) or not questions:
            raise ValueError(f"question={question!r}: must be a text, or a list of at least one")
        asked = [[*self._pending, *dialogue.question(q)] for q in questions]
        check_vocabulary(model, np.array([i for ids in asked for i in ids]))
        longest = max(map(len, asked))
        self._check_room(longest)
        B, width = len(asked), bucket(longest) if self._buckets else longest
        tokens = np.zeros((B, width), np.int32)
        for row, ids in zip(tokens, asked, strict=True):
            row[width - len(ids) :] = ids
        lengths, seen = np.array([len(ids) for ids in asked], np.int32), None
        if self._sampler.reads_seen:
            seen = np.zeros((B, model.config.vocab_size), bool)
            for row, ids in zip(seen, asked, strict=True):
                row[[*self._read, *ids]] = True
        keys = self._keys[jnp.zeros(B, jnp.int32)] if key is None else row_keys(key, B)
        sampler = self._sampler
        begun = _begin(model, self._params, tokens, lengths, self._state, keys, seen, sampler=sampler)
        return Stream(
            *begun,
            step=stepping(model, self._params, sampler, 0),
            ends=self._ends,
            max_new_tokens=self._most_new,
            pieces=[TextPieces(self._tokenizer, self._stop) for _ in asked],
        )

    def ask(self, question: str | Sequence[str], *, key: Array | None = None, keep: bool = False) -> Any:
        """The answer to a question, or the answers to several.

        Args:
          question, key: see `stream`.
          keep: the next question comes behind this one and its answer (`keep`).

        Returns:
          A text, or one a question.

        Raises:
          ValueError: what `stream` refuses; several questions with `keep`.
        """
        alone = question if isinstance(question, str) else None
        if keep and alone is None:
            raise ValueError("keep=True goes on from one answer, but several questions are asked; ask one")
        pieces = self.stream(question, key=key)
        for _ in pieces:
            pass
        if keep and alone is not None:
            self.keep(alone, pieces)
        return pieces.text if alone is not None or len(pieces.lengths) > 1 else [pieces.text]

    def keep(self, question: str, pieces: Stream) -> None:
        """Goes on from an answer that was streamed, as far as it was made.

        Tokens of a stop string stay in the text, since they were read; an end token does not.

        Args:
          question: the question.
          pieces: what `stream` returned for it.

        Raises:
          ValueError: an answer to several questions, of another session, or whose logits were no numbers.
        """
        dialogue = self._opened()
        asked = [*self._pending, *dialogue.question(question)]
        answer = pieces.tokens[0].tolist() if len(pieces.lengths) == 1 else []
        read = len(self._read) + len(asked) + len(answer) - 1
        if not answer or min(answer) < 0 or pieces.state.length.tolist() != [read]:
            raise ValueError(
                f"pieces is no answer to {question!r} alone in this session; give what stream({question!r}) returned"
            )
        told = answer[:-1] if answer[-1] in self._ends else answer
        text = self._tokenizer.decode(told, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self._state, self._dialogue = pieces.state, dialogue.after(question, text)
        self._read, self._pending = [*self._read, *asked, *answer[:-1]], told[len(answer) - 1 :]

    def _opened(self) -> Dialogue:
        if self._dialogue is None:
            raise ValueError("the session has read nothing to ask about; call compress(context) first")
        return self._dialogue

    def _check_room(self, asked: int) -> None:
        """Raises ValueError for a question that is too long, or one turn too many."""
        plan: CachePlan = self._state.plan
        used = int((self._state.length - self._state.prompt_length).max())
        needed = used + asked + self._most_new - 1
        if needed > plan.max_new_tokens:
            raise ValueError(
                f"a question of {asked} tokens and an answer of {self._most_new} end {needed} tokens behind the context"
                f", but there is room for {plan.max_new_tokens}; make the session with max_question_tokens={asked} or "
                f"more, and as many max_turns as are kept (now {self._most_asked} and {self._turns})"
            )
