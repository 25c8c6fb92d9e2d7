"""Text in, text out: contexts that are read and compressed once, and questions to copies of what was kept.

Letters: B batch, W columns of the questions, V vocabulary.
"""

import copy
import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from kvjax.core.contract import Policy
from kvjax.core.drivers.buckets import bucket
from kvjax.core.drivers.checkpoint import load_state, save_state
from kvjax.core.drivers.checks import check_is, check_model, check_prompts, check_request, whole
from kvjax.core.drivers.loop import Decoding, decoded_in_place
from kvjax.core.drivers.sampling import Greedy, Sampler
from kvjax.core.drivers.state import State, row_keys
from kvjax.core.drivers.steps import read_prompts
from kvjax.core.drivers.stream import Stream, stop_strings
from kvjax.drivers.dialogue import Dialogue
from kvjax.drivers.text import TextPieces, check_tokenizer

_Context = str | Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class _Read:
    """What a session has read of one context.

    Attributes:
      dialogue: the text, and the turns behind it.
      ids: the tokens that the cache has read.
      pending: those of the last answer that it has not read yet.
    """

    dialogue: Dialogue
    ids: tuple[int, ...]
    pending: tuple[int, ...] = ()


class Session:
    """Compressed contexts, and questions that are asked of copies of them.

    ```
    session = kvjax.Session(model, params, tokenizer, policy=methods.snapkv(0.25), max_new_tokens=64)
    session.compress(document)
    session.ask("Who wrote it?")  # the cache is as it was: the next question finds the document, and no other question
    session.ask(["Where?", "When?"])  # as one batch
    session.ask("And why?", keep=True)  # the next question comes behind this one and its answer
    other = session.fork()  # what one of the two keeps, the other does not see
    session.save("document.kv")
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
      policy_params: the policy's learned parameters, if it has any.
      buckets: see `kvjax.generate`.

    Raises:
      ValueError: what is no model, tokenizer or policy, parameters of another model, and numbers that make no sense.
    """

    def __init__(
        self,
        model: Any,
        params: PyTree[Any],
        tokenizer: Any,
        *,
        policy: Policy = Policy(),
        max_new_tokens: int,
        max_question_tokens: int = 128,
        max_turns: int = 1,
        sampler: Sampler = Greedy(),
        eos_ids: int | Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
        key: Any = None,
        block: int | None = None,
        policy_params: Any = None,
        buckets: bool = True,
    ):
        check_tokenizer(tokenizer)
        check_model(model, params)
        self._ends = check_request(model, policy, sampler, eos_ids, 0, "not needed yet")
        self._model, self._params, self._tokenizer, self._policy = model, params, tokenizer, policy
        self._most_new = whole("max_new_tokens", max_new_tokens)
        self._most_asked = whole("max_question_tokens", max_question_tokens)
        self._turns = whole("max_turns", max_turns)
        self._sampler, self._stop, self._key = sampler, stop_strings(stop), key
        self._how = {"block": block, "policy_params": policy_params, "buckets": buckets}
        self._read: tuple[_Read, ...] = ()
        self._state: Any = None

    def __repr__(self) -> str:
        read = f"{[len(x.ids) for x in self._read]} tokens read" if self._read else "nothing read yet"
        return f"Session(policy={self._policy!r}, {read})"

    @property
    def state(self) -> State:
        """What was kept of the contexts, one row each, and of the turns behind them.

        Raises:
          ValueError: no context was read.
        """
        self._opened()
        return self._state

    @property
    def planned(self) -> int:
        """Tokens that may come behind a context."""
        return self._turns * (self._most_asked + self._most_new)

    def compress(self, context: _Context | Sequence[str], policy: Policy | None = None) -> "Session":
        """Reads a context, or several, and evicts from them. What the session had read before is forgotten.

        A context that is refused leaves the session as it was.

        Args:
          context: a text; the messages of a chat, which the tokenizer's template makes a text of; or a list of texts,
            each of which gets its own answers. Where the last message is the user's, questions go on with it.
          policy: in place of the session's.

        Returns:
          The session.

        Raises:
          ValueError: an empty context, or one that is too long for the model's positions or too short for the policy.
        """
        several = isinstance(context, list | tuple) and bool(context) and all(isinstance(c, str) for c in context)
        contexts: Any = context if several else [context]
        dialogues = [Dialogue(self._tokenizer, c) for c in contexts]
        policy = self._policy if policy is None else policy
        check_is("policy", policy, Policy, "kvjax.methods")
        read = tuple(_Read(d, tuple(d.opening())) for d in dialogues)
        tokens, lengths = _padded([x.ids for x in read])
        prompts = check_prompts(self._model, tokens, lengths, None)
        how = {"key": self._key, **self._how}
        _, self._state = read_prompts(self._model, self._params, prompts, policy, self.planned, **how)
        self._read, self._policy = read, policy
        return self

    def stream(self, question: str | Sequence[str], *, key: Any = None) -> Stream:
        """An answer as it is made, a piece of text after the other (`kvjax.stream`).

        Args:
          question: what follows the context. Several are asked at once, each of a copy of its own; of several contexts,
            one question is asked of all, and several one each.
          key: for samplers that draw: one, or one a question; the session's if None.

        Returns:
          A `Stream` of strings, or of lists of strings for several answers.

        Raises:
          ValueError: no context, no key for a sampler that draws, an empty question, another number of questions than
            of contexts, more tokens than were planned.
        """
        read, model = self._opened(), self._model
        key = self._key if key is None else key
        check_request(model, self._policy, self._sampler, self._ends, 0, key)
        rows, questions = self._rows(question)
        asked = [[*read[r].pending, *read[r].dialogue.question(q)] for r, q in zip(rows, questions, strict=True)]
        longest, B = max(map(len, asked)), len(asked)
        self._check_room(longest)
        state = self._state[np.array(rows)]
        keys = state.keys if key is self._key else row_keys(key, B)
        tokens, lengths = _padded(asked)
        check_prompts(model, tokens, lengths)
        seen = np.zeros((B, model.config.vocab_size), bool)
        for b, r in enumerate(rows):
            seen[b, [*read[r].ids, *asked[b]]] = True
        reads = np.arange(longest)[:, None] >= longest - lengths[None]
        state = dataclasses.replace(state, keys=keys)
        first = jnp.asarray(tokens[:, 0], jnp.int32), jnp.zeros((B,), jnp.float32), jnp.asarray(reads[0])
        at = Decoding(*first, state)
        if longest > 1:  # all but the last token of the question, which the stream reads
            more = (bucket(longest - 1) if self._how["buckets"] else longest - 1) - (longest - 1)
            given = (np.pad(tokens.T[1:], ((0, more), (0, 0))), np.pad(reads[1:], ((0, more), (0, 0))))
            chunk, count = longest - 1 + more, jnp.int32(longest - 1)
            _, at = decoded_in_place(model, self._params, at, given, count, chunk=chunk)
        return Stream(
            model,
            self._params,
            dataclasses.replace(at, seen=jnp.asarray(seen) if self._sampler.reads_seen else None),
            ends=self._ends,
            max_new_tokens=self._most_new,
            pieces=[TextPieces(self._tokenizer, self._stop) for _ in asked],
            begun=False,
            sampler=self._sampler,
        )

    def ask(self, question: str | Sequence[str], *, key: Any = None, keep: bool = False) -> Any:
        """The answer to a question, or the answers to several, or those of several contexts.

        Args:
          question, key: see `stream`.
          keep: the next question comes behind this one and its answer (`keep`).

        Returns:
          A text; a list of texts for several questions or contexts.

        Raises:
          ValueError: what `stream` and `keep` refuse.
        """
        if keep:
            self._check_kept(question)
        pieces = self.stream(question, key=key)
        for _ in pieces:
            pass
        if keep:
            self.keep(question, pieces)
        alone = isinstance(question, str) or len(pieces.lengths) > 1
        return pieces.text if alone else [pieces.text]

    def keep(self, question: str | Sequence[str], pieces: Stream) -> None:
        """Goes on from an answer that was streamed, as far as it was made; of several contexts, from all answers.

        Tokens of a stop string stay in the text, since they were read; an end token does not.

        Args:
          question: the question, or one for each of several contexts.
          pieces: what `stream` returned for it.

        Raises:
          ValueError: answers to several questions about one context, or of another session; logits that are no numbers.
        """
        self._check_kept(question)
        rows, questions = self._rows(question)
        kept, lengths = [], pieces.lengths
        fits = len(lengths) == len(rows)
        for r, q in zip(rows, questions, strict=True):
            old = self._read[r]
            asked = [*old.pending, *old.dialogue.question(q)]
            answer = pieces.tokens[r, : lengths[r]].tolist() if fits else []
            read = len(old.ids) + len(asked) + len(answer) - 1
            if not answer or min(answer) < 0 or int(pieces.state.length[r]) != read:
                raise ValueError(f"pieces is no answer to {q!r} in this session; give what stream({q!r}) returned")
            told = answer[:-1] if answer[-1] in self._ends else answer
            text = self._tokenizer.decode(told, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            ids, pending = (*old.ids, *asked, *answer[:-1]), tuple(told[len(answer) - 1 :])
            kept.append(_Read(old.dialogue.after(q, text), ids, pending))
        self._state, self._read = pieces.state, tuple(kept)

    def fork(self) -> "Session":
        """A session that goes on from here by itself; the cache is shared until one of the two keeps something."""
        return copy.copy(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes what was read and kept to a new file.

        Raises:
          ValueError: no context was read, or the file exists.
        """
        read = [[x.dialogue.context, x.dialogue.turns, x.ids, x.pending] for x in self._opened()]
        notes = {"read": read, "model": _model_digest(self._model, self._params), "planned": self.planned}
        notes["tokenizer"] = _tokenizer_digest(self._tokenizer)
        save_state(path, self._state, policy=self._policy, notes=notes)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: Any, params: PyTree[Any], tokenizer: Any, **options: Any
    ) -> "Session":
        """The session that was saved, with equal answers.

        Args:
          path: what `save` wrote.
          model, params, tokenizer: those that the contexts were read with.
          **options: those of the session that was saved.

        Raises:
          ValueError: no such file, a damaged one, another model, tokenizer or policy, or other numbers of tokens.
        """
        session = cls(model, params, tokenizer, **options)
        state, notes = load_state(path, model, params, policy=session._policy)
        here = {"model": _model_digest(model, params), "tokenizer": _tokenizer_digest(tokenizer)}
        if wrong := [name for name, digest in here.items() if notes[name] != digest]:
            raise ValueError(f"{path} was made with another {wrong[0]}; give the one that read the contexts")
        if notes["planned"] != session.planned:
            raise ValueError(
                f"{path} has room for {notes['planned']} tokens behind a context, but the options ask for "
                f"{session.planned}; give max_turns, max_question_tokens and max_new_tokens as they were"
            )
        dialogue = lambda context, turns: Dialogue(tokenizer, context, tuple(map(tuple, turns)))
        read = [_Read(dialogue(context, turns), tuple(ids), tuple(p)) for context, turns, ids, p in notes["read"]]
        session._state, session._read = state, tuple(read)
        return session

    def _opened(self) -> tuple[_Read, ...]:
        if not self._read:
            raise ValueError("the session has read nothing to ask about; call compress(context) first")
        return self._read

    def _rows(self, question: Any) -> tuple[list[int], list[str]]:
        """Of which context each question is asked, and the questions."""
        C, alone = len(self._opened()), isinstance(question, str)
        if not alone and (not isinstance(question, list | tuple) or not question):
            raise ValueError(f"question={question!r}: must be a text, or a list of at least one")
        listed = [str(q) for q in ([question] if alone else question)]
        if C == 1:
            return [0] * len(listed), listed
        if not alone and len(question) != C:
            raise ValueError(f"{len(question)} questions are asked of {C} contexts; ask one of all, or one of each")
        return list(range(C)), listed * C if alone else listed

    def _check_kept(self, question: Any) -> None:
        if len(self._opened()) == 1 and not isinstance(question, str):
            raise ValueError("a context goes on from one answer, but several questions are asked; ask one")

    def _check_room(self, asked: int) -> None:
        """Refuses a question that is too long, or one turn too many."""
        state = self._state
        needed = int((state.length - state.prompt_length).max()) + asked + self._most_new - 1
        if needed > self.planned:
            raise ValueError(
                f"a question of {asked} tokens and an answer of {self._most_new} end {needed} tokens behind the context"
                f", but there is room for {self.planned}; make the session with max_question_tokens={asked} or more, "
                f"and as many max_turns as are kept (now {self._most_asked} and {self._turns})"
            )


def _padded(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids padded on the left with 0, and how many of each row there are."""
    lengths = np.array([len(ids) for ids in rows], np.int32)
    width = int(lengths.max())
    return np.array([[0] * (width - len(ids)) + list(ids) for ids in rows], np.int64), lengths


def _model_digest(model: Any, params: PyTree[Any]) -> str:
    """Tells a model from others, by its sizes and the first numbers of every parameter."""
    found = hashlib.sha256(repr(model.config).encode())
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        found.update(f"{jax.tree_util.keystr(path)} {x.dtype} {x.shape}".encode())
        found.update(np.asarray(x[(0,) * (x.ndim - 1)][:64]).tobytes())
    return found.hexdigest()[:16]


def _tokenizer_digest(tokenizer: Any) -> str:
    """Tells a tokenizer from others, by its vocabulary and its chat template."""
    told = sorted(tokenizer.get_vocab().items()), tokenizer.bos_token_id, getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]
