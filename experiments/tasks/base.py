"""Examples, and how text becomes a prompt of a wanted length."""

import dataclasses
import functools
import itertools
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar, runtime_checkable
from typing import Protocol as Interface

import numpy as np

from kvjax.configs.experiment import check_whole
from kvjax.experiments import corpus
from kvjax.experiments.core import metrics
from kvjax.text.encode import check_whole_text

MARK: Final = "\ue000\ue001\ue000"
"""Stands in a chat where the context ends; private characters, which no text has."""
_PROBE: Final = 'It\'s a "Test" of <b> & 1, 2.\n\n> Lines\tof\n  text;' + " and more words" * 400 + "."
"""A text that templates which rewrite, quote or cut messages do not leave as it is."""
_LONGEST: Final = 600  # letters of a sentence
Protocol = Literal["in_prompt", "after_compression"]
Tokens = tuple[int, ...]
S = TypeVar("S")

# After a sentence's last mark, with quotes and brackets that close, or at an empty line.
_SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["'”’)\]]))\s+|(?<=[。！？])\s*|\n\s*\n\s*""")  # noqa: RUF001


class BadRow(ValueError):
    """A row of data that cannot be asked: it is recorded, and the rest runs.

    Attributes:
      line: its number, from 1.
      reason: why.
    """

    def __init__(self, line: int, reason: str):
        super().__init__(f"row {line}: {reason}")
        self.line, self.reason = line, reason


@functools.cache
def _metric(name: str) -> metrics.Metric:
    return metrics.find(name)


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked of a context, and what a right answer is.

    Attributes:
      ids: token ids that follow the context; the answer begins after them.
      continuation: text to be scored, as token ids, where the likelihood of text is asked for instead of an answer.
      references: right answers, as the metric takes them.
      metric: how an answer is judged, as `kvjax.experiments.core.metrics.find` takes it; "" where whoever reads the
        results judges answers.
      max_new_tokens: the most tokens of an answer.
      stop: strings that end an answer.
      num_beams: hypotheses of the beam search that finds an answer; 1 for greedy generation.

    Raises:
      ValueError: no beams, or several where text is scored.
    """

    ids: Tokens = ()
    continuation: Tokens = ()
    references: tuple[str, ...] = ()
    metric: str = "values_in_place"
    max_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    num_beams: int = 1

    def __post_init__(self):
        check_whole(1, num_beams=self.num_beams)
        if self.continuation and self.num_beams > 1:
            raise ValueError(f"num_beams={self.num_beams} search for an answer, but text is scored; leave it at 1")

    def score(self, output: str) -> float:
        """How good an answer is, from 0 to 1."""
        return _metric(self.metric)(output, self.references)

    def asked(self, context: Tokens, protocol: Protocol) -> tuple[Tokens, Tokens]:
        """The prompt, after which a cache is evicted, and the given tokens that are read then."""
        if protocol == "in_prompt":
            return context + self.ids, self.continuation
        return context, self.ids + self.continuation


@dataclasses.dataclass(frozen=True)
class Example:
    """One context, and what is asked about it.

    Attributes:
      task: name of the task.
      index: which example of the task; with the seed it determines the rest.
      context: token ids, BOS included.
      questions: each is asked of the context alone, none sees another.
      meta: what plots and readers need: depth and length, at which token of the context the wanted fact starts and its
        tokens, the id of a row of data.
    """

    task: str
    index: int
    context: Tokens
    questions: tuple[Question, ...]
    meta: tuple[tuple[str, float | str], ...] = ()

    @property
    def given(self) -> Tokens:
        """All token ids that a model is given."""
        return (*self.context, *(token for q in self.questions for token in (*q.ids, *q.continuation)))


@dataclasses.dataclass(frozen=True)
class Task:
    """What a task builder needs besides its index.

    Attributes:
      encode: text to token ids, without special tokens.
      bos: ids that start every text.
      length: tokens of a prompt, at most; where a task counts them, with the answer's.
      seed: of the whole run.
      text: a text of one's own, which facts are hidden in and whose likelihood is asked for; if empty, the project's
        sentences are.
      tokenizer: where `encode` is from, for builders that need more of it.
      limit: tokens of context, question and answer together that the model has room for; None for any number.
      answer: tokens of an answer, at most, where a task allows more; None for what tasks say.
      chat: what a chat template writes before a message of the user's, BOS included, and from there to where the
        answer begins; None asks in plain text.
      rows: rows of one's own, each with the fields that its task names.
      order: the seed by which passages are ordered, and how many of them examples of other seeds read; by default the
        task's own, and none.
    """

    encode: Callable[[str], Sequence[int]]
    bos: Tokens
    length: int
    seed: int
    text: str = ""
    tokenizer: Any = None
    limit: int | None = None
    answer: int | None = None
    chat: tuple[Tokens, Tokens] | None = None
    rows: tuple[Mapping[str, Any], ...] = ()
    order: tuple[int, int] | None = None

    def rng(self, name: str, index: int) -> np.random.Generator:
        """A generator of its own for every example."""
        return np.random.default_rng([self.seed, zlib.crc32(name.encode()), index])

    @property
    def begin(self) -> Tokens:
        """Token ids that start a context of which something is asked: BOS, or a chat up to the user's message."""
        return self.bos if self.chat is None else self.chat[0]

    def ask(self, question: Sequence[int], begun: Sequence[int] = ()) -> Tokens:
        """Token ids of a question, and how its answer begins, which in a chat is in the model's turn."""
        return (*question, *(() if self.chat is None else self.chat[1]), *begun)

    def ids(self, words: Sequence[str]) -> Tokens:
        """Token ids of a sentence in running text, with the space before it where the tokenizer adds none."""
        return tuple(self.encode(self._space + " ".join(words)))

    @functools.cached_property
    def _space(self) -> str:
        pieces = (*self.encode("the"), *self.encode("code"))
        return "" if tuple(self.encode("the code")) == pieces else " "

    @functools.cached_property
    def text_ids(self) -> Tokens:
        """Token ids of the whole text of one's own."""
        return tuple(self.encode(self.text))

    @functools.cached_property
    def _sentences(self) -> tuple[Tokens, ...]:
        return tuple(self.ids(s.split()) for s in whole_text(self.text))

    @functools.cached_property
    def passages(self) -> tuple[int, ...]:
        """The sentences of one's own text with which its passages begin.

        A passage has the tokens of a prompt at least, and shares no sentence with another. A text that is shorter than
        a prompt is one passage.
        """
        found, tokens = [0], 0
        for i, ids in enumerate(self._sentences, 1):
            tokens += len(ids)
            if tokens >= self.length * 9 // 8:  # more than a prompt, as some sentences may be left out
                found.append(i)
                tokens = 0
        return tuple(found[:-1]) or (0,)

    def passage(self, index: int) -> int:
        """Which passage of one's own text an example reads, in an order that is drawn, again where all are read."""
        count, (seed, read) = len(self.passages), self.order or (self.seed, 0)
        return int(np.random.default_rng([seed, count]).permutation(count)[(read + index) % count])

    def shared(self, index: int) -> dict[str, str]:
        """The meta of an example that reads a passage of one's own text, which other examples may read, too."""
        return {"same_context": f"passage/{self.passage(index)}"} if self.text else {}

    def fill(
        self, rng: np.random.Generator, index: int, length: int, inserts: Sequence[tuple[float, Sequence[str]]]
    ) -> Tokens:
        """A context of `length` tokens: its `begin`, then running text with `inserts` at relative places in [0, 1].

        Of one's own text that is the passage of the example `index`, whose last sentence is cut where there is no more
        room; else whole sentences of the project's, at random.

        Raises:
          ValueError: inserts that leave no room.
        """
        placed = [(place, self.ids(words)) for place, words in inserts]
        room = length - len(self.begin) - sum(len(ids) for _, ids in placed)
        if room < 0:
            raise ValueError(
                f"{len(inserts)} facts need {length - room} tokens, but the question leaves {length} of length="
                f"{self.length}; give --length {self.length - room} or more, or other --tasks"
            )
        found: list[Tokens] = []
        for sentence in self._filler(rng, index):
            if len(sentence) > room:
                found += [sentence[:room]] if self.text and room else []
                break
            found.append(sentence)
            room -= len(sentence)
        parts = [((i + 0.5) / max(len(found), 1), s) for i, s in enumerate(found)]
        ordered = sorted([*parts, *placed], key=lambda part: part[0])
        return self.begin + tuple(t for _, ids in ordered for t in ids)

    def _filler(self, rng: np.random.Generator, index: int) -> Iterator[Tokens]:
        """Sentences without end: those of one's own text from a passage on, which begins again, or the project's."""
        if not self.text:
            while True:
                yield self.ids(corpus.filler(rng, "held_out"))
        yield from itertools.cycle(self.turned(self._sentences, index))

    def turned(self, of_text: Sequence[S], index: int) -> tuple[S, ...]:
        """What there is of each sentence of one's own text, from the passage of an example on and round the end."""
        start = self.passages[self.passage(index)]
        return (*of_text[start:], *of_text[:start])


def sentences(text: str) -> tuple[str, ...]:
    """The sentences of a text, without white space around them; long ones in parts, at a space where there is one."""
    found: list[str] = []
    for part in map(str.strip, _SENTENCE_END.split(text)):
        while len(part) > _LONGEST:
            cut = part.rfind(" ", 1, _LONGEST + 1)
            cut = _LONGEST if cut < 0 else cut
            found.append(part[:cut])
            part = part[cut:].strip()
        found += [part] if part else []
    return tuple(found)


whole_text = functools.lru_cache(maxsize=4)(sentences)
"""`sentences` of a text that all examples read."""


def task_of(tokenizer: Any, length: int, seed: int, text: str = "", chat: bool = False) -> Task:
    """What builders need, of a tokenizer; within its chat template where `chat` says so.

    Raises:
      ValueError: no chat template, or one that refuses a message or writes it several times.
    """
    bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)

    def encode(text: str) -> Sequence[int]:
        check_whole_text("text", text)
        return tokenizer(text, add_special_tokens=False).input_ids

    task = Task(encode, bos, length, seed, text, tokenizer)
    if not chat:
        return task
    before, after = in_chat(tokenizer, _PROBE, _PROBE)
    ends = before.removesuffix(_PROBE), after.removeprefix(_PROBE)
    return dataclasses.replace(task, chat=(tuple(encode(ends[0])), tuple(encode(ends[1]))))


def in_chat(tokenizer: Any, context: str, question: str) -> tuple[str, str]:
    """What a chat template writes of a user's message up to the end of its context, and from there to the model's turn.

    White space around the message may go.

    Raises:
      ValueError: no template, or one that refuses the message, writes it several times or rewrites it.
    """
    if MARK in context + question:
        raise ValueError(f"the text has the private characters {MARK!r}, which mark where a context ends")
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("the tokenizer has no chat template; give --template raw")
    chat = [{"role": "user", "content": context + MARK + question}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except Exception as e:  # a template is code of the model's authors, and raises what it likes
        raise ValueError(f"the chat template refuses the message: {e}") from e
    before, *after = text.split(MARK)
    if len(after) != 1:
        raise ValueError(f"the chat template writes a message {len(after)} times; give --template raw")
    if not before.endswith(context.lstrip()) or not after[0].startswith(question.rstrip()):
        raise ValueError("the chat template rewrites the message; give --template raw")
    return before, after[0]


def check_known(what: str, ids: Iterable[int], tokenizer: Any) -> None:
    """Refuses words that a vocabulary lacks, as those of small models do: all of them would be one and the same token.

    A tokenizer that spells unknown words by bytes lacks none. There the token for unknown words is in the text itself,
    as WikiText-2 has "<unk>".

    Args:
      what: has these words.
      ids: token ids.
      tokenizer: which made them.

    Raises:
      ValueError: there are some.
    """
    unknown, *ends = (getattr(tokenizer, f"{kind}_token_id", None) for kind in ("unk", "bos", "eos"))
    spelled = lambda: tokenizer("\N{EGYPTIAN HIEROGLYPH A001}", add_special_tokens=False).input_ids
    if unknown in {*ids} - {*ends} and unknown in spelled():
        raise ValueError(f"{what} has words that this model's vocabulary lacks; give another task, text or model")


@runtime_checkable
class Builder(Interface):
    """What makes the examples of a task, each from its index alone; one with a `__len__` has so many."""

    def __call__(self, task: Task, index: int, /) -> Example:
        """The example of an index."""
        ...


def example(name: str, index: int, context: Tokens, *questions: Question, **meta: float | str) -> Example:
    """An `Example` whose meta is given by keywords."""
    return Example(name, index, context, questions, tuple(sorted(meta.items())))
