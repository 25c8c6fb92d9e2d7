"""Examples, and how text becomes a prompt of a wanted length."""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from experiments import corpus

Protocol = Literal["in_prompt", "after_compression"]
Tokens = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Example:
    """One prompt and what should follow it.

    Attributes:
      task: name of the task.
      index: which example of the task; with the seed it determines the rest.
      context: token ids, BOS included.
      question: token ids that follow the context.
      continuation: for perplexity, the text to be scored, as token ids.
      values: for retrieval, (words before the value in the answer, the value). The first value starts the answer.
      meta: what plots need: depth, length.
    """

    task: str
    index: int
    context: Tokens
    question: Tokens = ()
    continuation: Tokens = ()
    values: tuple[tuple[str, str], ...] = ()
    meta: tuple[tuple[str, float], ...] = ()

    def score(self, output: str) -> float:
        """The share of values that generated text holds in their places."""
        text = " ".join(output.split())
        found = [
            text.startswith(value) if i == 0 else f"{before} {value}" in text
            for i, (before, value) in enumerate(self.values)
        ]
        return float(np.mean(found))


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


def example(name: str, index: int, **fields: Any) -> Example:
    """An `Example` whose meta is given as a dict."""
    meta = fields.pop("meta", {})
    return Example(name, index, meta=tuple(sorted(meta.items())), **fields)
