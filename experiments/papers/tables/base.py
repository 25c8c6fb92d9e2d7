"""What an entry is: one table or figure of a paper, with its settings and the numbers that its text states."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from kvjax import Policy

Budget = int | float
Kind = Literal["scores", "speed", "drawn", "settings", "drawing"]

MEAN = "mean"  # the metric of a column that is the mean of others


@dataclasses.dataclass(frozen=True)
class Method:
    """One of a paper's methods, as kvjax runs it.

    Attributes:
      title: as the paper names it.
      make: the policy of a budget, with the paper's settings.
      block: tokens of the blocks that the prompt is read in, None for the whole prompt at once.
      note: what the paper leaves open, and what is taken.
    """

    title: str
    make: Callable[[Budget], Policy]
    block: int | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Column:
    """What is measured.

    Attributes:
      title: as in the paper's header; no two of an entry are equal.
      data: names in `catalogue.DATA`; the column is the mean of their scores, each set counting once.
      metric: how outputs are scored; `MEAN` for the mean of other columns.
      shots: examples before the question.
      of: the titles of the columns of which this one is the mean, each weighing as many data sets as it holds.
    """

    title: str
    data: tuple[str, ...] = ()
    metric: str = MEAN
    shots: int = 0
    of: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
      model: a name in `catalogue.MODELS`.
      method: a name in the entry's methods.
      budget: live tokens a kv head (int), a share of the prompt (float); None where the text does not say.
      values: a number for every column; None where the text has none, nan where the table has no such cell.
    """

    model: str
    method: str
    budget: Budget | None
    values: tuple[float | None, ...]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A number about an entry that stands in the paper's running text.

    Attributes:
      what: what the number is.
      value: it.
      place: where it stands.
    """

    what: str
    value: float
    place: str


@dataclasses.dataclass(frozen=True)
class Cell:
    """One number to be made: a model on a column's data under a method at a budget.

    Attributes:
      model, method, budget: see `Row`.
      column: see `Column`.
      published: the paper's number, None where its text has none.
    """

    model: str
    method: str
    budget: Budget | None
    column: Column
    published: float | None


@dataclasses.dataclass(frozen=True)
class Entry:
    """One table or figure of a paper.

    Attributes:
      paper: short name of the paper.
      label: such as "table2" or "figure5".
      shows: one line.
      place: where it stands in the paper, and what of it the text has.
      kind: "scores" are made by running cells, "speed" by timing them; "drawn" is drawn by `experiments/figures.py`;
        "settings" states settings and "drawing" explains, and nothing is to be run.
      methods: by name.
      columns, rows: the table; values are None where the paper only draws them.
      settings: (what, value) pairs.
      reference: what outputs are compared with: the data's "answers", or the output of the "full cache".
      template: whether prompts stand in their model's template (`models.PRESETS`).
      beams: hypotheses of the beam search that generates, 1 for greedy generation.
      figures: names of `kvjax.experiments.papers.FIGURES` that draw the entry or a part of it.
      claims: numbers that stand in the running text.
      off: (model, method, budget, why) of rows whose printed mean is not that of the numbers that are printed.
      notes: what a reader should know before comparing.
    """

    paper: str
    label: str
    shows: str
    place: str
    kind: Kind
    methods: dict[str, Method] = dataclasses.field(default_factory=dict)
    columns: tuple[Column, ...] = ()
    rows: tuple[Row, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    reference: Literal["answers", "full cache"] = "answers"
    template: bool = False
    beams: int = 1
    figures: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()
    off: tuple[tuple[str, str, Budget | None, str], ...] = ()
    notes: str = ""

    def __post_init__(self):
        titles = [c.title for c in self.columns]
        if len(set(titles)) < len(titles):
            raise ValueError(f"{self.name} has two columns of one title: {titles}")
        if unknown := {t for c in self.columns for t in c.of} - set(titles):
            raise ValueError(f"{self.name} has no columns {sorted(unknown)}; there are {titles}")
        for row in self.rows:
            if len(row.values) != len(titles):
                raise ValueError(
                    f"{self.name}: {row.method} at {row.budget} has {len(row.values)} values for {len(titles)} columns"
                )
            if row.method not in self.methods:
                raise ValueError(f"{self.name} has no method {row.method!r}; there are {[*self.methods]}")
        keys = [(r.model, r.method, r.budget) for r in self.rows]
        if twice := [k for i, k in enumerate(keys) if k in keys[:i]]:
            raise ValueError(f"{self.name} has the row {twice[0]} twice")

    @property
    def name(self) -> str:
        """Such as "ada-kv/table2"."""
        return f"{self.paper}/{self.label}"

    @property
    def runs(self) -> bool:
        """Whether there is anything to run."""
        return self.kind not in ("settings", "drawing")

    @property
    def models(self) -> tuple[str, ...]:
        """Names of its models, each once, in the table's order."""
        return tuple(dict.fromkeys(r.model for r in self.rows))

    @property
    def data(self) -> tuple[str, ...]:
        """Names of its data sets, each once."""
        return tuple(dict.fromkeys(d for c in self.columns for d in c.data))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what is measured, each once."""
        return tuple(dict.fromkeys(c.metric for c in self.columns if c.metric != MEAN))

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Budgets of the evicting methods, each once."""
        found = [r.budget for r in self.rows if r.method != "full" and r.budget is not None]
        return tuple(dict.fromkeys(found))

    @property
    def published(self) -> int:
        """How many numbers of the paper are recorded."""
        return sum(v is not None and v == v for r in self.rows for v in r.values) + len(self.claims)

    def cells(self) -> Iterator[Cell]:
        """Every number that is measured itself, line by line; means of columns are left out."""
        for row in self.rows:
            for column, value in zip(self.columns, row.values, strict=True):
                if column.metric != MEAN and value == value:  # nan is no cell
                    yield Cell(row.model, row.method, row.budget, column, value)

    def mean(self, column: Column, values: dict[str, float | None]) -> float | None:
        """The mean that a column is of others, given by title; None where one of them is missing."""
        parts = [(values.get(c.title), len(c.data)) for c in self.columns if c.title in column.of]
        if not parts or any(v is None for v, _ in parts):
            return None
        return float(np.average([v for v, _ in parts if v is not None], weights=[w for _, w in parts]))


_SIGNS = {"-": None, "x": math.nan}


def read(text: str, model: str = "", budget: Budget | None = None) -> tuple[Row, ...]:
    """Rows from a table as text.

    A line is a method's name and its values, "-" for none and "x" where there is no such cell. "model: NAME" and
    "budget: NUMBER" hold for the lines that follow them; a budget of "?" is one that the paper's text does not state.
    The full cache has the budget 1.0.

    Raises:
      ValueError: a line before a model, or a value that is no number.
    """
    rows = []
    for line in filter(None, map(str.strip, text.splitlines())):
        key, colon, rest = line.partition(":")
        if colon and key == "model":
            model = rest.strip()
        elif colon and key == "budget":
            budget = None if rest.strip() == "?" else number(rest.strip())
        else:
            method, *values = line.split()
            if not model:
                raise ValueError(f"{line!r} stands before any model")
            found = tuple(_SIGNS[v] if v in _SIGNS else float(v) for v in values)
            rows.append(Row(model, method, 1.0 if method == "full" else budget, found))
    return tuple(rows)


def number(text: str) -> Budget:
    """A budget as it is written: an int is a number of tokens, a float a share of the prompt."""
    return float(text) if set(text) & set(".eE") else int(text)


def grid(models: Sequence[str], methods: Sequence[str], budgets: Sequence[Budget], columns: int) -> tuple[Row, ...]:
    """Rows of a figure without numbers in the text: the full cache, and every method at every budget."""
    return tuple(
        Row(model, method, budget, (None,) * columns)
        for model in models
        for method, budget in [("full", 1.0), *((m, b) for b in budgets for m in methods)]
    )
