"""Which prompts run together: rows in batches of one width, few widths, and as many tokens planned as a task needs.

What a row gives depends on the row and its task alone. Rows are padded on the left, and padding is exact; the tokens
planned after a prompt, which some policies' numbers depend on (Keyformer's temperature), are those of the task.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvjax.drivers.buckets import bucket
from kvjax.experiments.tasks import Example, Protocol, Tokens

LEAST: Final = 64
"""Tokens that are planned after a prompt at least."""
WORTH: Final = 2**16
"""Tokens of padding that a program of its own must spare: compiling takes as long as reading about so many."""


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A prompt that is read once, and the questions that are asked after it.

    Attributes:
      example: whose prompt it is.
      number, count: which of the example's rows it is, and how many there are.
      seed: of what is drawn at random while it is read.
      prompt: the tokens after which a cache is evicted.
      asked: numbers of the questions, and the tokens that are given after the prompt.
    """

    example: Example
    number: int
    count: int
    prompt: Tokens
    asked: tuple[tuple[int, Tokens], ...]
    seed: int = 0

    @property
    def steps(self) -> int:
        """Tokens that follow the prompt, at most."""
        return max(len(given) + self.example.questions[i].max_new_tokens for i, given in self.asked)

    @property
    def num_beams(self) -> int:
        """Hypotheses of the searches for all of its answers."""
        return self.example.questions[self.asked[0][0]].num_beams


@dataclasses.dataclass(frozen=True, eq=False)
class Bucket:
    """Rows that run in one program.

    Attributes:
      width: tokens of the padded prompts.
      planned: tokens that a plan has room for after them.
      lengths: of the prompts.
      batches: the rows, so many at a time.
      num_beams: hypotheses of the search for each answer.
      searches: tokens of answers that are searched for with several beams, at most.
    """

    width: int
    planned: int
    lengths: tuple[int, ...]
    batches: tuple[tuple[Row, ...], ...]
    num_beams: int = 1
    searches: tuple[int, ...] = ()


def rows_of(example: Example, protocol: Protocol, seed: int = 0) -> list[Row]:
    """The prompts of an example; questions that follow one prompt share it, if they have as many beams."""
    asked: dict[tuple[Tokens, int], list[tuple[int, Tokens]]] = {}
    for i, question in enumerate(example.questions):
        prompt, given = question.asked(example.context, protocol)
        asked.setdefault((prompt, question.num_beams), []).append((i, given))
    return [Row(example, n, len(asked), key[0], tuple(each), seed) for n, (key, each) in enumerate(asked.items())]


def planned(rows: Iterable[Row], most: int | None = None) -> dict[str, int]:
    """Tokens that are planned after the prompts of each task.

    Args:
      rows: all of a run's, whether they are still to be run or not.
      most: positions that the model has, where it has learned them.
    """
    steps: dict[str, int] = {}
    longest: dict[str, int] = {}
    for row in rows:
        steps[row.example.task] = max(steps.get(row.example.task, 0), row.steps)
        longest[row.example.task] = max(longest.get(row.example.task, 0), len(row.prompt))
    wanted = {task: bucket(max(n, LEAST)) for task, n in steps.items()}
    return wanted if most is None else {t: max(steps[t], min(n, most - longest[t])) for t, n in wanted.items()}


def buckets(
    rows: Sequence[Row], batch_size: int, most: int | None = None, mine: Callable[[Row], bool] = lambda _: True
) -> list[Bucket]:
    """All rows in batches, the largest programs first; the same whenever a run resumes.

    Within a bucket, rows with as many tokens after the prompt run together, as a batch ends when all of its rows have.

    Args:
      rows: see `planned`.
      batch_size: rows of a batch.
      most: see `planned`.
      mine: which rows are to run; programs are those of all rows whichever these are.
    """
    after = planned(rows, most)
    groups: dict[tuple[int, int], dict[int, list[Row]]] = {}
    for row in rows:
        room = after[row.example.task]
        width = bucket(len(row.prompt)) if most is None else min(bucket(len(row.prompt)), most - room)
        groups.setdefault((room, row.num_beams), {}).setdefault(max(width, len(row.prompt)), []).append(row)
    found = []
    for (room, num_beams), by_width in groups.items():
        for width, together in _merged(by_width).items():
            order = sorted(filter(mine, together), key=lambda row: row.steps)
            batches = tuple(tuple(order[i : i + batch_size]) for i in range(0, len(order), batch_size))
            lengths = tuple(sorted({len(row.prompt) for row in together}))
            found.append(Bucket(width, room, lengths, batches, num_beams, _searches(together)))
    return sorted(found, key=lambda b: (b.num_beams, b.width + b.planned, b.width), reverse=True)


def _searches(rows: Iterable[Row]) -> tuple[int, ...]:
    searched = (row.example.questions[i] for row in rows for i, _ in row.asked if row.num_beams > 1)
    return tuple(sorted({question.max_new_tokens for question in searched}))


def _merged(by_width: dict[int, list[Row]]) -> dict[int, list[Row]]:
    """Rows by fewer widths: those of one whose program would spare too little join the next larger."""
    found: dict[int, list[Row]] = {}
    widths = sorted(by_width)
    waiting: list[Row] = []
    for width, wider in zip(widths, [*widths[1:], None], strict=True):
        waiting += by_width[width]
        if wider is None or sum(wider - len(row.prompt) for row in waiting) >= WORTH:
            found[width], waiting = waiting, []
    return found
