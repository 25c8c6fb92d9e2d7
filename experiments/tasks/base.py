"""Examples, and how text becomes a prompt of a wanted length."""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from experiments import corpus
from experiments.evaluation.metrics import METRICS

Protocol = Literal["in_prompt", "after_compression"]
Tokens = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked of a context, and what a right answer is.

    Attributes:
      ids: token ids that follow the context; the answer begins after them.
      continuation: text to be scored, as token ids, where the likelihood of text is asked for instead of an answer.
      references: right answers, as the metric takes them.
      metric: how an answer is judged, a name in `experiments.evaluation.metrics.METRICS`.
      max_new_tokens: the most tokens of an answer.
      stop: strings that end an answer.
    """

    ids: Tokens = ()
    continuation: Tokens = ()
    references: tuple[str, ...] = ()
    metric: str = "values_in_place"
    max_new_tokens: int = 0
    stop: tuple[str, ...] = ()

    def score(self, output: str) -> float:
        """How good an answer is, from 0 to 1."""
        return METRICS[self.metric](output, self.references)

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
      meta: what plots need: depth and length, and at which token of the context the wanted fact starts, and its tokens.
    """

    task: str
    index: int
    context: Tokens
    questions: tuple[Question, ...]
    meta: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Task:
    """What a task builder needs besides its index.

    Attributes:
      encode: text to token ids, without special tokens.
      bos: ids that start every context.
      length: tokens of context and question together.
      seed: of the whole run.
    """

    encode: Callable[[str], Sequence[int]]
    bos: Tokens
    length: int
    seed: int

    def rng(self, name: str, index: int) -> np.random.Generator:
        """A generator of its own for every example."""
        return np.random.default_rng([self.seed, zlib.crc32(name.encode()), index])

    def ids(self, words: Sequence[str]) -> Tokens:
        """Token ids of a sentence in running text."""
        return tuple(self.encode(" ".join(words)))

    def fill(self, rng: np.random.Generator, length: int, inserts: Sequence[tuple[float, Sequence[str]]]) -> Tokens:
        """A context of nearly `length` tokens: BOS, then filler with `inserts` at relative places in [0, 1].

        Raises:
          ValueError: inserts that leave no room.
        """
        placed = [(place, self.ids(words)) for place, words in inserts]
        room = length - len(self.bos) - sum(len(ids) for _, ids in placed)
        if room < 0:
            raise ValueError(
                f"{len(inserts)} facts and the question need {length - room} tokens, but the prompt has {length}; "
                "raise the length"
            )
        sentences: list[Tokens] = []
        while True:
            sentence = self.ids(corpus.filler(rng, "held_out"))
            if len(sentence) > room:
                break
            sentences.append(sentence)
            room -= len(sentence)
        parts = [((i + 0.5) / max(len(sentences), 1), s) for i, s in enumerate(sentences)]
        ordered = sorted([*parts, *placed], key=lambda part: part[0])
        return self.bos + tuple(t for _, ids in ordered for t in ids)


def example(name: str, index: int, context: Tokens, *questions: Question, **meta: float) -> Example:
    """An `Example` whose meta is given by keywords."""
    return Example(name, index, context, questions, tuple(sorted(meta.items())))
