"""Examples, and how text becomes a prompt of a wanted length."""

import dataclasses
import functools
import itertools
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, runtime_checkable
from typing import Protocol as Interface

import numpy as np

from kvjax.configs.experiment import check_whole
from kvjax.drivers.text import check_whole_text
from kvjax.experiments import corpus
from kvjax.experiments.core import metrics

Protocol = Literal["in_prompt", "after_compression"]
Tokens = tuple[int, ...]


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


@dataclasses.dataclass(frozen=True)
class Task:
    """What a task builder needs besides its index.

    Attributes:
      encode: text to token ids, without special tokens.
      bos: ids that start every context.
      length: tokens of context and question together.
      seed: of the whole run.
      text: a text of one's own, which facts are hidden in and whose likelihood is asked for; if empty, the project's
        sentences are.
      tokenizer: where `encode` is from, for builders that need more of it.
      limit: tokens of context, question and answer together that the model has room for; None for any number.
      rows: rows of one's own, each with the fields that its task names.
    """

    encode: Callable[[str], Sequence[int]]
    bos: Tokens
    length: int
    seed: int
    text: str = ""
    tokenizer: Any = None
    limit: int | None = None
    rows: tuple[Mapping[str, Any], ...] = ()

    def rng(self, name: str, index: int) -> np.random.Generator:
        """A generator of its own for every example."""
        return np.random.default_rng([self.seed, zlib.crc32(name.encode()), index])

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
        return tuple(self.ids(s.split()) for s in re.split(r"(?<=[.!?])\s+|\n\s*\n", self.text) if s.strip())

    def sentences(self, rng: np.random.Generator) -> Iterator[Tokens]:
        """Sentences without end: the project's at random, or those of one's own text from a random one on.

        A text that is used up begins again.
        """
        if not self.text:
            while True:
                yield self.ids(corpus.filler(rng, "held_out"))
        start = int(rng.integers(len(self._sentences)))
        yield from itertools.cycle((*self._sentences[start:], *self._sentences[:start]))

    def fill(self, rng: np.random.Generator, length: int, inserts: Sequence[tuple[float, Sequence[str]]]) -> Tokens:
        """A context of nearly `length` tokens: BOS, then filler with `inserts` at relative places in [0, 1].

        Raises:
          ValueError: inserts that leave no room.
        """
        placed = [(place, self.ids(words)) for place, words in inserts]
        room = length - len(self.bos) - sum(len(ids) for _, ids in placed)
        if room < 0:
            raise ValueError(
                f"{len(inserts)} facts need {length - room} tokens, but the question leaves {length} of length="
                f"{self.length}; give --length {self.length - room} or more, or other --tasks"
            )
        sentences: list[Tokens] = []
        for sentence in self.sentences(rng):
            if len(sentence) > room:
                sentences += [sentence[:room]] if self.text and not sentences else []  # longer than the whole prompt
                break
            sentences.append(sentence)
            room -= len(sentence)
        parts = [((i + 0.5) / max(len(sentences), 1), s) for i, s in enumerate(sentences)]
        ordered = sorted([*parts, *placed], key=lambda part: part[0])
        return self.bos + tuple(t for _, ids in ordered for t in ids)


def task_of(tokenizer: Any, length: int, seed: int, text: str = "") -> Task:
    """What builders need, of a tokenizer."""
    bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)

    def encode(text: str) -> Sequence[int]:
        check_whole_text("text", text)
        return tokenizer(text, add_special_tokens=False).input_ids

    return Task(encode, bos, length, seed, text, tokenizer)


@runtime_checkable
class Builder(Interface):
    """What makes the examples of a task, each from its index alone; one with a `__len__` has so many."""

    def __call__(self, task: Task, index: int, /) -> Example:
        """The example of an index."""
        ...


def example(name: str, index: int, context: Tokens, *questions: Question, **meta: float | str) -> Example:
    """An `Example` whose meta is given by keywords."""
    return Example(name, index, context, questions, tuple(sorted(meta.items())))
