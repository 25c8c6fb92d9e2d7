"""Text in, text out: contexts that are read and compressed once, and questions asked of copies of the cache.

Letters: B batch, W columns of the questions, V vocabulary.
"""

import copy
import dataclasses
import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from tqdm.auto import tqdm

from kvjax.contract import LayerParams, Model, Policy, PRNGKey, Size, Tokenizer
from kvjax.generation.generate import given_tokens
from kvjax.generation.loop import decoded
from kvjax.generation.sampling import Greedy, Sampler
from kvjax.pallas_kernels.kinds import Amount, Range, check_fields
from kvjax.run.checks import check_ids, check_model, check_prompts, check_request, end_ids
from kvjax.run.compiled import keep_compiled
from kvjax.run.plan import bucket
from kvjax.run.state import State, checked_key, row_keys
from kvjax.run.steps import read_prompts
from kvjax.text.dialogue import Dialogue, check_context
from kvjax.text.encode import Chat, TextPieces, check_tokenizer, is_chat
from kvjax.text.files import described, read_state, same, words_of, write_state
from kvjax.text.stream import Stream, stop_strings

_Context = str | Chat
_Ids = tuple[Amount, ...]
_Word = Annotated[int, Range(0, 2**32 - 1)]


@dataclasses.dataclass(frozen=True)
class _Notes:
    """What a file says of a session."""

    dialogues: tuple[tuple[Any, tuple[tuple[str, str], ...], _Ids, _Ids], ...]
    options: Mapping[str, Any]
    key: tuple[_Word, _Word] | None
    made_with: Mapping[str, str]

    def __post_init__(self):
        check_fields(self)
        for context, *_ in self.dialogues:
            check_context(context)


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
    of about the same size share compiled programs, and so do all questions; later processes find these again
    (`kvjax.keep_compiled`). To compile them, and to read a context again (KVzip), takes far longer than to answer, so a
    bar shows how far that is.

    Args:
      model, params: the model.
      tokenizer: one of transformers, such as `kvjax.models.load_tokenizer` returns.
      policy: what to evict; everything is kept by default.
      max_new_tokens: tokens of an answer.
      max_question_tokens: tokens of a question, with what a chat template writes around it.
      max_turns: questions and answers that may follow one another (`keep`), the last included. The cache is planned for
        `max_turns * (max_question_tokens + max_new_tokens)` tokens behind the context.
      sampler: greedy by default.
      eos_ids: tokens that end an answer; the model's own if None, `()` for none.
      stop: strings that end an answer, and are no part of it.
      key: for policies and samplers that draw. Equal questions get equal answers by it, unless they have own keys.
      block: read contexts in blocks of so many tokens (`kvjax.prefill`).
      policy_params: the policy's learned parameters, if it has any.
      buckets: whether sizes are rounded up, so that contexts of about the same width share programs.
      progress: whether bars show what is read and compiled, widgets in notebooks; where stderr is a terminal if None.

    Raises:
      ValueError: what is no model, tokenizer or policy, parameters of another model, and numbers that make no sense.
    """

    def __init__(
        self,
        model: Model,
        params: PyTree,
        tokenizer: Tokenizer,
        *,
        policy: Policy = Policy(),
        max_new_tokens: Size,
        max_question_tokens: Size = 128,
        max_turns: Size = 1,
        sampler: Sampler = Greedy(),
        eos_ids: int | Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
        key: PRNGKey = None,
        block: Size | None = None,
        policy_params: LayerParams = None,
        buckets: bool = True,
        progress: bool | None = None,
    ):
        check_tokenizer(tokenizer)
        check_model(model, params)
        self._model, self._params, self._tokenizer, self._sampler = model, params, tokenizer, sampler
        self._policy, self._policy_params, self._progress = policy, policy_params, progress
        self._key = None if key is None else checked_key(key)
        self._options: dict[str, Any] = {  # those that `save` writes
            "max_new_tokens": max_new_tokens,
            "max_question_tokens": max_question_tokens,
            "max_turns": max_turns,
            "eos_ids": end_ids(model, eos_ids),
            "stop": stop_strings(stop),
            "block": block,
            "buckets": buckets,
        }
        self._planned = max_turns * (max_question_tokens + max_new_tokens)
        self._dialogues: tuple[Dialogue, ...] = ()
        self._state: Any = None
        self._compiled: set[Any] = set()  # of which questions
        try:
            keep_compiled()
        except ValueError as e:
            warnings.warn(str(e), stacklevel=2)

    def __repr__(self) -> str:
        if not self._dialogues:
            return f"Session(policy={self._policy!r}, nothing read yet)"
        read = " and ".join(str(len(d.ids)) for d in self._dialogues)
        return f"Session(policy={self._policy!r}, {read} tokens read)"

    @property
    def state(self) -> State:
        """The cache of the contexts, one row each, and of the turns behind them.

        Raises:
          ValueError: no context was read.
        """
        self._opened()
        return self._state

    def compress(self, context: _Context | Sequence[_Context]) -> "Session":
        """Reads a context, or several, and evicts from them. What the session had read before is forgotten.

        A context that is refused leaves the session as it was.

        Args:
          context: a text; the messages of a chat, which the tokenizer's template makes a text of; or a list of these,
            each of which gets its own answers. Where the last message is the user's, questions go on with it.

        Returns:
          The session.

        Raises:
          ValueError: an empty context, or one that is too long for the model's positions or too short for the policy.
        """
        several = isinstance(context, list | tuple) and bool(context) and not is_chat(context)
        contexts: Any = context if several else [context]
        dialogues = tuple(Dialogue.opened(self._tokenizer, c) for c in contexts)
        prompts = check_prompts(self._model, *_padded([d.ids for d in dialogues]))
        how = {name: self._options[name] for name in ("block", "buckets")}
        how |= {"key": self._key, "policy_params": self._policy_params, "progress": self._progress}
        _, self._state = read_prompts(self._model, self._params, prompts, self._policy, self._planned, **how)
        self._dialogues = dialogues
        return self

    def stream(self, question: str | Sequence[str], *, key: PRNGKey = None) -> Stream:
        """Answers a question, and yields the text piece by piece (`kvjax.stream`).

        Args:
          question: what follows the context. Several are asked at once, each of a copy of its own; of several contexts,
            one question is asked of all, and several one each.
          key: for samplers that draw: one, or one a question; the session's if None.

        Returns:
          A `Stream` of strings, or of lists of strings for several answers.

        Raises:
          ValueError: no context, no key for a sampler that draws, an empty question, another number of questions than
            of contexts, more tokens than were planned; while it yields, logits that are no numbers.
        """
        dialogues, model, ends = self._opened(), self._model, self._options["eos_ids"]
        check_request(model, self._sampler, ends, 0, self._key if key is None else key)
        rows, questions = self._rows(question)
        asked = [dialogues[r].question(q) for r, q in zip(rows, questions, strict=True)]
        tokens, lengths = _padded(asked)
        B, T = tokens.shape
        self._check_room(T, max(len(dialogues[r].turns) for r in rows) + 1)
        state = self._state[np.array(rows)]
        state = state if key is None else dataclasses.replace(state, keys=row_keys(key, B))
        at, given, _ = given_tokens(model, self._params, tokens, state, lengths)
        more = bucket(self._planned) - T if self._options["buckets"] else 0
        given = jax.tree.map(lambda x: jnp.pad(x, ((0, more), (0, 0))), given)
        seen = None
        if self._sampler.reads_seen:
            seen = np.zeros((B, model.config.vocab_size), bool)
            for b, r in enumerate(rows):
                seen[b, [*dialogues[r].ids, *asked[b]]] = True
            seen = jnp.asarray(seen)
        how: dict[str, Any] = {"sampler": self._sampler, "ends": ends}
        kind = state.plan, T + more, B, given[1] is None
        hidden = kind in self._compiled or (None if self._progress is None else not self._progress)
        self._compiled.add(kind)
        with tqdm(desc="question: compiling", bar_format="{desc}", leave=False, disable=hidden):
            _, at = decoded(model, self._params, at, given, jnp.int32(T - 1), in_place=True, chunk=T + more)
            at = dataclasses.replace(at, seen=seen)
            _, at = decoded(model, self._params, at, None, None, in_place=True, chunk=1, sleeps=True, **how)
        how |= {"max_new_tokens": self._options["max_new_tokens"], "asked": (dialogues, questions)}
        how["pieces"] = [TextPieces(self._tokenizer, self._options["stop"]) for _ in asked]
        return Stream(model, self._params, at, **how)

    def ask(self, question: str | Sequence[str], *, key: PRNGKey = None, keep: bool = False) -> Any:
        """Answers a question, several questions, or questions about several contexts.

        Args:
          question: a text; several are asked at once, as a batch, and of several contexts one each.
          key: for samplers that draw: one, or one a question; the session's if None.
          keep: the next question comes behind this one and its answer (`keep`).

        Returns:
          A text; a list of texts for several questions or contexts.

        Raises:
          ValueError: what `stream` and `keep` refuse.
        """
        if keep:
            self._check_kept(self._rows(question)[1])
        pieces = self.stream(question, key=key)
        for _ in pieces:
            pass
        if keep:
            self.keep(pieces)
        alone = isinstance(question, str) or len(pieces.lengths) > 1
        return pieces.text if alone else [pieces.text]

    def keep(self, pieces: Stream) -> None:
        """Lets the next question follow a streamed answer, as far as it was made; of several contexts, all answers.

        Tokens of a stop string stay in the text, since they were read; an end token does not.

        Args:
          pieces: what `stream` returned since the session last read or kept something.

        Raises:
          ValueError: answers to several questions about one context, or to what the session, or one that it is a fork
            of, has not asked since; logits that are no numbers.
        """
        dialogues, questions = pieces.asked or ((), ())
        if dialogues is not self._opened():
            raise ValueError("pieces is no answer from where this session stands; give what its stream(...) returned")
        self._check_kept(questions)
        answers = [row[:n].tolist() for row, n in zip(pieces.tokens, pieces.lengths, strict=True)]
        each, ends = zip(dialogues, questions, answers, strict=True), self._options["eos_ids"]
        self._state, self._dialogues = pieces.state, tuple(d.after(q, tuple(a), ends) for d, q, a in each)

    def fork(self) -> "Session":
        """An independent copy of the session; the cache is shared until one of the two keeps something."""
        return copy.copy(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves the session to a file, which replaces an earlier one.

        The model, the tokenizer, the policy and the sampler are not in it, but digests of them.

        Raises:
          ValueError: no context was read; a policy that holds a lambda, or another function that no module has under
            its name; a path at which there is something else than a file of kvjax.
          OSError: the file could not be written.
        """
        notes = {
            "dialogues": [[d.context, d.turns, d.ids, d.unread] for d in self._opened()],
            "options": self._options,
            "key": None if self._key is None else jax.random.key_data(self._key).tolist(),
            "made_with": self._made_with(),
        }
        write_state(path, self._model, self._params, self._state, self._policy, notes)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: Model,
        params: PyTree,
        tokenizer: Tokenizer,
        *,
        policy: Policy = Policy(),
        sampler: Sampler = Greedy(),
    ) -> "Session":
        """Loads a session, which gives equal answers.

        Args:
          path: what `save` wrote.
          model, params, tokenizer, policy, sampler: those of the session that was saved; equal ones will do.

        Raises:
          ValueError: no such file, a damaged one, or one of another model, tokenizer, policy or sampler.
        """
        state, notes = read_state(path, model, params, policy)
        if notes is None:
            raise ValueError(f"{path} is a state without texts; use kvjax.load_state")
        with words_of(path):
            said = _Notes(**notes)
            key = said.key and jax.random.wrap_key_data(jnp.asarray(said.key, jnp.uint32), impl="threefry2x32")
            how: dict[str, Any] = {"policy": policy, "sampler": sampler, "key": key}
            session = cls(model, params, tokenizer, **how, **said.options)
            dialogues = [Dialogue(tokenizer, *each) for each in said.dialogues]
            check_ids(model, [i for d in dialogues for i in (*d.ids, *d.unread)])
            told = {**said.options, "tokens": [len(d.ids) for d in dialogues]}
            for name, x in {**session._options, "tokens": state.length.tolist()}.items():
                if told.get(name) != x:
                    raise ValueError(f"{name}={told.get(name)!r} in place of {x!r}")
        if wrong := [n for n, x in session._made_with().items() if not same(said.made_with.get(n, ""), x)]:
            raise ValueError(f"{path} was made with another {wrong[0]}; give the one that the contexts were read with")
        session._state, session._dialogues, session._policy_params = state, tuple(dialogues), state.params or None
        return session

    def _made_with(self) -> dict[str, str]:
        """Digests of the tokenizer and the sampler."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        parts = json.loads(backend.to_str()) if backend else self._tokenizer.get_vocab()
        parts = {name: part for name, part in parts.items() if name not in ("padding", "truncation")}  # a call's own
        words = parts, self._tokenizer.bos_token_id, getattr(self._tokenizer, "chat_template", None)
        digest = hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:16]
        return {"tokenizer": digest, "sampler": described(self._sampler)}

    def _opened(self) -> tuple[Dialogue, ...]:
        if not self._dialogues:
            raise ValueError("the session has read nothing to ask about; call compress(context) first")
        return self._dialogues

    def _rows(self, question: str | Sequence[str]) -> tuple[list[int], list[str]]:
        """(index of each question's context, the questions)."""
        C, asked = len(self._opened()), [question] if isinstance(question, str) else question
        if not isinstance(asked, list | tuple) or not asked:
            raise ValueError(f"question={question!r}: must be a text, or a list of at least one")
        if C == 1:
            return [0] * len(asked), list(asked)
        if isinstance(question, str):
            asked = [question] * C
        if len(asked) != C:
            raise ValueError(f"{len(asked)} questions are asked of {C} contexts; ask one of all, or one of each")
        return list(range(C)), list(asked)

    def _check_kept(self, questions: Sequence[str]) -> None:
        if len(questions) != len(self._dialogues):
            raise ValueError("a context goes on from one answer, but several questions are asked; ask one")

    def _check_room(self, asked: int, turn: int) -> None:
        """Refuses a question that is too long, or one turn too many."""
        if turn > (turns := self._options["max_turns"]):
            raise ValueError(
                f"this is turn {turn}, but the session was made with max_turns={turns}; make it with as many as follow "
                "one another"
            )
        state, new, most = self._state, self._options["max_new_tokens"], self._options["max_question_tokens"]
        needed = int((state.length - state.prompt_length).max()) + asked + new - 1
        if needed > self._planned:
            raise ValueError(
                f"a question of {asked} tokens and an answer of {new} end {needed} tokens behind the context"
                f", but there is room for {self._planned}; make the session with max_question_tokens={asked} or more "
                f"(now {most})"
            )


def _padded(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids padded on the left with 0, and the length of each row."""
    lengths = np.array([len(ids) for ids in rows], np.int32)
    width = int(lengths.max())
    return np.array([[0] * (width - len(ids)) + list(ids) for ids in rows], np.int64), lengths
