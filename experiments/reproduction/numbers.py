"""From samples to numbers: ours with intervals, beside theirs, and beside our full cache."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.analysis import Interval
from kvjax.configs.experiment import label
from kvjax.experiments.core import stats
from kvjax.experiments.papers.methods import Budget
from kvjax.experiments.papers.tables import MEAN, Column
from kvjax.experiments.reproduction.choice import Choice
from kvjax.experiments.reproduction.rows import metric_of, task_of

_PERCENT = 100.0
_UNITS = {"perplexity": 1.0, "log_perplexity": 1.0, "tokens_per_second": 1.0, "kv_gb": 1.0, "prefill_speedup": 1.0}


@dataclasses.dataclass(frozen=True)
class Number:
    """One cell, in the paper's units.

    Attributes:
      method, budget, column: of the cell.
      rows: how many rows it is made from.
      ours, low, high: with its 95 % interval; nan where there is none.
      theirs: the paper's number; None where its text has none.
      over_full, over_full_low, over_full_high: ours less our full cache's on the same rows, with its interval; None for
        the full cache, and where rows are not scores.
      theirs_over_full: the same of the paper's numbers.
    """

    method: str
    budget: Budget
    column: str
    rows: int
    ours: float
    low: float
    high: float
    theirs: float | None
    over_full: float | None = None
    over_full_low: float | None = None
    over_full_high: float | None = None
    theirs_over_full: float | None = None

    @property
    def difference(self) -> tuple[float, float, float] | None:
        """Ours less theirs and its interval; theirs has none in the papers, and counts as exact."""
        if self.theirs is None:
            return None
        return self.ours - self.theirs, self.low - self.theirs, self.high - self.theirs


def numbers(choice: Choice, samples: Sequence[dict[str, Any]]) -> list[Number]:
    """Every number of a choice that the samples give, in the table's order; means of columns are last in a line."""
    entry = choice.entry
    titles = [c.title for c in entry.columns]
    theirs: dict[tuple[str, Budget], dict[str, float | None]] = {}
    for row in entry.rows:
        if row.model == choice.model:  # a budget that the text does not state is whichever is run
            budgets = [b for m, b in choice.lines if m == row.method] if row.budget is None else [row.budget]
            theirs |= {(row.method, b): dict(zip(titles, row.values, strict=True)) for b in budgets}
    by_cell: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for sample in samples:
        by_cell.setdefault((sample["method"], sample["budget"], sample["task"]), []).append(sample)
    found = []
    for method, budget in choice.lines:
        line: dict[str, Number] = {}
        for column in choice.columns:
            parts = {
                d: _scored(by_cell.get((method, label(budget), task_of(d, column.shots)), []), d, column)
                for d in column.data
            }
            full = {
                d: _scored(by_cell.get(("full", label(1.0), task_of(d, column.shots)), []), d, column)
                for d in column.data
            }
            if not all(parts.values()):
                continue
            value = _mean_of_sets([_one(metric_of(d, column.metric), d, p, by_cell) for d, p in parts.items()])
            number = Number(
                method, budget, column.title, sum(map(len, parts.values())), *value,
                theirs=_known(theirs.get((method, budget), {}).get(column.title)),
            )  # fmt: skip
            if method != "full" and all(full.values()) and column.metric not in _UNITS:
                number = _beside_full(number, column, parts, full)
            line[column.title] = number
        for column in entry.columns:
            if column.metric == MEAN:
                line |= _mean_column(choice, column, line, theirs, (method, budget))
        for number in line.values():
            reference = _known(theirs.get(("full", 1.0), {}).get(number.column))
            if number.theirs is not None and reference is not None and method != "full":
                number = dataclasses.replace(number, theirs_over_full=number.theirs - reference)
            found.append(number)
    return found


def _scored(samples: list[dict[str, Any]], data: str, column: Column) -> list[dict[str, Any]]:
    """The samples that have what a column measures."""
    metric = metric_of(data, column.metric)
    return samples if metric in _UNITS else [s for s in samples if metric in s.get("scores", {})]


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def _one(metric: str, data: str, samples: Sequence[dict[str, Any]], cells: Any) -> Interval:
    """One data set's number and interval, in the paper's units."""
    if metric in ("perplexity", "log_perplexity"):
        found = stats.perplexity([s["nll"] for s in samples])
        return Interval(*map(math.log, found)) if metric == "log_perplexity" else found
    if metric == "kv_gb":
        size = samples[0]["kv_bytes"] / 1e9
        return Interval(size, size, size)
    if metric == "tokens_per_second":
        return _plain([s["new_tokens"] / s["seconds"] for s in samples])
    if metric == "prefill_speedup":
        token_by_token = [
            s["prefill_seconds"] for (m, _, d), g in cells.items() if (m, d) == ("block-1", data) for s in g
        ]
        if not token_by_token:
            return Interval(math.nan, math.nan, math.nan)
        ratio = float(np.mean(token_by_token) / np.mean([s["prefill_seconds"] for s in samples]))
        return Interval(ratio, math.nan, math.nan)
    found = stats.interval([s["scores"][metric] for s in samples])
    return Interval(*(_PERCENT * float(x) for x in found))


def _plain(values: Sequence[float]) -> Interval:
    """A mean and its Student-t interval; no interval of a single value."""
    mean, low, high = stats.mean(values)
    return Interval(mean, low, high) if len(values) > 1 else Interval(mean, math.nan, math.nan)


def _mean_of_sets(values: Sequence[Interval], weights: Sequence[float] | None = None) -> Interval:
    """The mean over data sets, which are independent: half widths add as standard errors do."""
    if len(values) == 1:
        return values[0]
    w = np.ones(len(values)) if weights is None else np.array(weights, float)
    w /= w.sum()
    mean = float(np.dot(w, [v[0] for v in values]))
    half = float(np.sqrt(np.dot(w**2, [((v[2] - v[1]) / 2) ** 2 for v in values])))
    return Interval(mean, mean - half, mean + half)


def _beside_full(number: Number, column: Column, parts: Any, full: Any) -> Number:
    """With the difference to the full cache on the same rows."""
    found = []
    for d, samples in parts.items():
        metric = metric_of(d, column.metric)
        baseline = {s["index"]: s["scores"][metric] for s in full[d]}
        pairs = [(s["scores"][metric], baseline[s["index"]]) for s in samples if s["index"] in baseline]
        if not pairs:
            return number
        c = stats.compare([a for a, _ in pairs], [b for _, b in pairs])
        found.append(Interval(_PERCENT * c.difference, _PERCENT * c.low, _PERCENT * c.high))
    mean, low, high = _mean_of_sets(found)
    return dataclasses.replace(number, over_full=mean, over_full_low=low, over_full_high=high)


def _mean_column(
    choice: Choice, column: Column, line: dict[str, Number], theirs: Any, key: tuple[str, Budget]
) -> dict[str, Number]:
    """The mean column of a line, if all of its columns are there in full."""
    parts = [c for c in choice.entry.columns if c.title in column.of]
    measured = {c.title: c.data for c in choice.columns}
    if any(c.title not in line or measured[c.title] != c.data for c in parts):
        return {}
    weights = [len(c.data) for c in parts]
    cells = [line[c.title] for c in parts]
    value = _mean_of_sets([Interval(n.ours, n.low, n.high) for n in cells], weights)
    known = _known(theirs.get(key, {}).get(column.title))
    number = Number(key[0], key[1], column.title, sum(n.rows for n in cells), *value, theirs=known)
    if all(n.over_full is not None for n in cells):
        over = _mean_of_sets([Interval(n.over_full, n.over_full_low, n.over_full_high) for n in cells], weights)
        number = dataclasses.replace(number, over_full=over[0], over_full_low=over[1], over_full_high=over[2])
    return {column.title: number}
