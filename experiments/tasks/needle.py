"""A needle in a haystack: one fact in running text, over a grid of lengths and depths."""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from kvjax.experiments.tasks.base import Example, Question, Task, Tokens, example
from kvjax.experiments.tasks.text import check_enough, check_room, grid, haystack, most_that_fit

LENGTHS = (1.0, 0.75, 0.5, 0.25)
DEPTHS = tuple(i / 10 for i in range(11))

CITIES = (
    "Amsterdam", "Athens", "Bangkok", "Barcelona", "Beijing", "Berlin", "Bogota", "Brussels", "Budapest", "Cairo",
    "Chicago", "Copenhagen", "Dakar", "Delhi", "Dublin", "Hamburg", "Hanoi", "Helsinki", "Istanbul", "Jakarta",
    "Johannesburg", "Kyoto", "Lagos", "Lima", "Lisbon", "London", "Madrid", "Manila", "Melbourne", "Montreal",
    "Moscow", "Mumbai", "Nairobi", "Osaka", "Oslo", "Paris", "Prague", "Rome", "Santiago", "Seoul", "Singapore",
    "Stockholm", "Sydney", "Taipei", "Tokyo", "Toronto", "Vienna", "Warsaw",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Needle:
    """What is hidden and asked for.

    Attributes:
      fact: the sentence that is hidden.
      question: what follows the text.
      begun: how the answer begins.
      references: what a right answer holds.
      max_new_tokens: of an answer.
    """

    fact: str
    question: str
    begun: str
    references: tuple[str, ...]
    max_new_tokens: int


SANDWICH = Needle(
    "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.",
    "\n\nQuestion: What is the best thing to do in San Francisco?",
    "\nAnswer:",
    ("eat a sandwich", "sit in Dolores Park", "sunny day"),
    50,
)


def needle(
    task: Task,
    index: int,
    *,
    hidden: Needle = SANDWICH,
    lengths: Sequence[int | float] = LENGTHS,
    depths: Sequence[float] = DEPTHS,
) -> Example:
    """Kamradt's needle in a haystack (2023): the fact about San Francisco in the task's text.

    Every example has a length and a depth of a grid that any number of examples covers evenly, the full length first;
    with the defaults 44 hold every pair once. Each example reads another passage of the text, as long as there
    are more; sentences that hold a part of the answer are left out. The needle stands at the end of a sentence, at its
    depth by characters, so that depth 0 is before all text and depth 1 after it. The score is the share of the
    answer's three parts that the output holds. A model may know this fact without reading it; `needle_number` asks for
    what it cannot know.

    Args:
      task: text, tokenizer and length.
      index: which example.
      hidden: the fact and its question.
      lengths: tokens of a prompt (int) or shares of the task's length (float).
      depths: relative places in [0, 1].

    Raises:
      ValueError: lengths beyond the task's or too small for needle and question, depths outside [0, 1], or a text that
        is too short.
    """
    return _hide(task, index, "needle", hidden, lengths, depths)


def needle_number(
    task: Task, index: int, *, lengths: Sequence[int | float] = LENGTHS, depths: Sequence[float] = DEPTHS
) -> Example:
    """As `needle`, with a random number of seven digits for a random city, in RULER's words (arXiv:2404.06654).

    Raises:
      ValueError: as for `needle`.
    """
    rng = task.rng("needle_number/fact", index)
    city, number = CITIES[rng.integers(len(CITIES))], str(rng.integers(10**6, 10**7))
    asked = f"special magic number for {city} mentioned in the provided text"
    hidden = Needle(
        f"One of the special magic numbers for {city} is: {number}.",
        f"\nWhat is the {asked}?",
        f" The {asked} is",
        (number,),
        32,
    )
    return _hide(task, index, "needle_number", hidden, lengths, depths)


def two_instructions(task: Task, index: int) -> Example:
    """Two instructions ahead of a text, and a question that each of them answers: an eviction may forget either.

    Each says which number of seven digits is the answer to which of two cities. Both stand ahead of all text, and the
    score is 0.5 where one of them is forgotten.

    Args:
      task: text, tokenizer, and tokens of the instructions, the text and one question.
      index: which example.

    Raises:
      ValueError: no room for instructions and question, or a text that is too short.
    """
    rng = task.rng("two_instructions", index)
    cities = [CITIES[i] for i in rng.permutation(len(CITIES))[:2]]
    answers = {city: str(rng.integers(10**6, 10**7)) for city in cities}
    rules = " ".join(f"Whenever the word {c} comes up, say the number {n}." for c, n in answers.items())
    begun = task.encode(" You say the number")
    asked = [task.ask(task.encode(f"\n\nNow the word {c} comes up."), begun) for c in cities]
    found = haystack(task, "two_instructions", index, task.length, cities)
    longest = max(map(len, asked))

    def context(count: int) -> Tokens:
        return (*task.begin, *task.encode("\n\n".join((rules, " ".join(found[:count])))))

    size = lambda count: len(context(count)) + longest
    check_room("two_instructions", task, size(1), "two instructions, a sentence of the text and a question")
    count = most_that_fit(size, task.length, least=1, most=len(found))
    check_enough("two_instructions", task, count, found, size(count), "sentences of the text")
    questions = [
        Question(q, references=(n,), metric="contains_all", max_new_tokens=16, stop=("\n",))
        for q, n in zip(asked, answers.values(), strict=True)
    ]
    return example(
        "two_instructions", index, context(count), *questions, length=float(task.length), **task.shared(index)
    )


def _hide(
    task: Task, index: int, name: str, hidden: Needle, lengths: Sequence[int | float], depths: Sequence[float]
) -> Example:
    _check(name, task, lengths, depths)
    row, column = grid(index, len(lengths), len(depths))
    length, depth = lengths[row], depths[column]
    length = length if isinstance(length, int | np.integer) else round(length * task.length)
    question = task.ask(task.encode(hidden.question), task.encode(hidden.begun))
    found = haystack(task, name, index, length, hidden.references)

    def context(count: int) -> Tokens:
        before = _before(found[:count], depth)
        return (*task.begin, *task.encode(" ".join((*found[:before], hidden.fact, *found[before:count]))))

    size = lambda count: len(context(count)) + len(question)
    sized = dataclasses.replace(task, length=length)
    check_room(name, sized, size(0), "needle and question")
    count = most_that_fit(size, length, least=0, most=len(found))
    check_enough(name, sized, count, found, size(count), "sentences of the text")
    before = found[: _before(found[:count], depth)]
    start, end = (len(task.begin) + len(task.encode(" ".join(text))) for text in (before, (*before, hidden.fact)))
    meta = {"length": length, "depth": depth, "needle_at": start, "needle_tokens": end - start}
    asked = Question(
        question,
        references=hidden.references,
        metric="contains_all",
        max_new_tokens=hidden.max_new_tokens,
        stop=("\n",),
    )
    return example(
        name, index, context(count), asked, **{key: float(value) for key, value in meta.items()}, **task.shared(index)
    )


def _before(found: Sequence[str], depth: float) -> int:
    """How many sentences are nearest to a relative depth by characters."""
    ends = [0, *itertools.accumulate(len(s) + 1 for s in found)]
    wanted = depth * ends[-1]
    after = bisect.bisect_left(ends, wanted)
    if after > 0 and wanted - ends[after - 1] < ends[after] - wanted:
        after -= 1
    return after


def _check(name: str, task: Task, lengths: Sequence[int | float], depths: Sequence[float]) -> None:
    if not lengths or not depths:
        raise ValueError(f"{name}: lengths={lengths!r}, depths={depths!r}: give at least one of each")
    for length in lengths:
        most = task.length if isinstance(length, int | np.integer) else 1.0
        if not 0 < length <= most:
            raise ValueError(
                f"{name}: length {length!r} must be tokens up to length={task.length} (int) or a share of it in (0, 1] "
                "(float)"
            )
    if outside := [d for d in depths if not 0 <= d <= 1]:
        raise ValueError(f"{name}: depth {outside[0]!r} must be in [0, 1]")
