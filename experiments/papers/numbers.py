"""From the lines of a run to a paper's numbers: ours with intervals, theirs, and both beside the full cache's."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvjax.analysis import Interval
from kvjax.configs.experiment import label
from kvjax.experiments.core import metrics, stats
from kvjax.experiments.core.records import Line
from kvjax.experiments.papers.methods import Budget
from kvjax.experiments.papers.rows import CLASSIFICATION, classification
from kvjax.experiments.papers.runs import MEASURED, NO_SCORES, Run
from kvjax.experiments.papers.tables import GEOMETRIC, Column, Row, data_of

_NO_INTERVAL = (None, None, None)

_Part = tuple[str, str]  # a task, as lines name it, and the metric of its column there
_Cells = Mapping[tuple[str, str, str], Mapping[int, Line]]  # lines by method, budget and task, and by row


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
      difference: ours less theirs, with the interval of ours: papers give none, so theirs counts as exact.
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
    difference: tuple[float, float, float] | None = None


def scored(run: Run, lines: Iterable[Line]) -> tuple[list[Line], list[str]]:
    """Lines with the `scores` of their outputs in every metric that a column has of their data set.

    Returns:
      The lines, and why metrics refuse to score outputs, each reason once with how many.
    """
    lines, refused, found = [*lines], collections.Counter[str](), list[Line]()
    by_full = run.entry.reference == "full cache"
    full = {(x["task"], x["index"]): x.get("output", "") for x in lines if x["method"] == "full"}
    wanted = collections.defaultdict[str, dict[str, None]](dict)
    for task, metric in (part for c in run.columns for part in c.parts if part[1] not in MEASURED):
        wanted[task][metric] = None
    for line in lines:
        task, scores = line["task"], {"accuracy": line["score"]} if "score" in line else {}
        for metric in () if by_full and line["method"] == "full" else wanted[task]:
            row, output = run.rows[task][line["index"]], full.get((task, line["index"]), "")
            references = row.answers if not by_full else (output,) if output.strip() else ()
            part = line["output"]
            if data_of(task).first_line:  # what LongBench's own script scores
                part = part.lstrip("\n").split("\n")[0]
            try:
                if not references:
                    raise ValueError("the full cache generates nothing")
                if metric == CLASSIFICATION:
                    scores[metric] = max(classification(part, r, row.classes or row.answers) for r in references)
                else:
                    scores[metric] = metrics.find(metric)(part, references)
            except ValueError as e:
                refused[f"{task}: {e}"] += 1
        found.append({**line, "scores": scores})
    return found, [f"{reason} ({count} outputs)" for reason, count in refused.items()]


def numbers(run: Run, lines: Iterable[Line]) -> list[Number]:
    """Every number of a run that scored lines give, in the table's order; means of columns are last in a line."""
    cells = collections.defaultdict[tuple[str, str, str], dict[int, Line]](dict)
    for line in lines:
        cells[line["method"], line["budget"], line["task"]][line["index"]] = line
    titles, full = [c.title for c in run.entry.columns], run.lines.get(("full", 1.0))

    def printed(row: Row | None, title: str) -> float | None:
        value = None if row is None else row.values[titles.index(title)]
        return None if value is None or math.isnan(value) else value

    found = []
    for (method, budget), row in run.lines.items():
        for column, parts in columns(run):
            if ours := _ours(run, method, label(budget), column, parts, cells):
                rows, interval, over = ours
                theirs, base = printed(row, column.title), printed(full, column.title)
                theirs_over = None if method == "full" or theirs is None or base is None else theirs - base
                less = None if theirs is None else tuple(x - theirs for x in interval)
                found.append(Number(method, budget, column.title, rows, *interval, theirs, *over, theirs_over, less))
    return found


def columns(run: Run) -> list[tuple[Column, list[_Part]]]:
    """What every column is made of: those that are measured, and the means of those that are measured in full."""
    of = {c.title: c for c in run.columns}
    whole = {c.title for c in run.entry.columns if c.title in of and of[c.title].data == c.data}
    means = [c for c in run.entry.columns if c.of and whole.issuperset(c.of)]
    return [(c, c.parts) for c in run.columns] + [(c, [x for t in c.of for x in of[t].parts]) for c in means]


def _ours(
    run: Run, method: str, budget: str, column: Column, parts: Sequence[_Part], cells: _Cells
) -> tuple[int, Interval, Interval | tuple[None, None, None]] | None:
    """Rows of a cell, its number, and that less the full cache's, both with intervals; its data sets weigh the same.

    None where a data set has no lines, or what the number is a ratio to was not run.
    """
    (task, metric), *_ = parts
    if metric in NO_SCORES:
        lines = [*cells[method, budget, task].values()]
        shortest = next((c.data[0] for c in run.columns if c.metric == "latency_growth"), "")
        other = ("block-1", budget, task) if metric == "prefill_speedup" else (method, budget, shortest)
        others = [*cells[other].values()]
        if not lines or (metric == "prefill_speedup" and not others):
            return None
        return len(lines), _measured(metric, lines, others), _NO_INTERVAL
    geometric = column.metric == GEOMETRIC
    ours, full = (_scores(cells, line, parts, geometric) for line in ((method, budget), ("full", "1.0")))
    if not ours:
        return None
    context = lambda n, i: (n, cells[method, budget, parts[n][0]][i].get("context", i))
    labels = lambda at: {"clusters": [context(*x) for x in at], "tasks": None if geometric else [n for n, _ in at]}
    percent = lambda ends: Interval(*(100.0 * float(x) for x in ends))
    interval = (stats.mean if geometric else stats.interval)([*ours.values()], **labels(ours))
    same = [at for at in ours if at in full]
    if method == "full" or {n for n, _ in same} != {n for n, _ in ours}:
        return len(ours), percent(interval), _NO_INTERVAL
    pairs = [ours[at] for at in same], [full[at] for at in same]
    if geometric:
        over = stats.mean(np.subtract(*pairs).tolist(), **labels(same))
    else:
        c = stats.compare(*pairs, **labels(same))
        over = c.difference, c.low, c.high
    return len(ours), percent(interval), percent(over)


def _scores(
    cells: _Cells, line: tuple[str, str], parts: Sequence[_Part], geometric: bool
) -> dict[tuple[int, int], float]:
    """The scores of a method and budget by part and row; none where a part has none."""
    each = [
        {i: x["scores"][metric] for i, x in cells[*line, task].items() if metric in x["scores"]}
        for task, metric in parts
    ]
    if not all(each):
        return {}
    each = [_geometric(each)] if geometric else each
    return {(n, i): score for n, of in enumerate(each) for i, score in of.items()}


def _geometric(scores: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """What rows add to the geometric mean of several mean scores, linearised: their own mean is that.

    A row that a metric did not judge adds nothing by it.
    """
    means = np.array([np.mean([*each.values()]) for each in scores])
    mean = float(np.prod(means) ** (1 / len(means)))
    share = lambda i: np.mean([each.get(i, m) / m - 1 for each, m in zip(scores, means, strict=True)])
    return {i: mean * (1 + float(share(i))) if mean else 0.0 for i in dict.fromkeys(i for each in scores for i in each)}


def _seconds(line: Line) -> float:
    """From the prompt to the last token."""
    return line["prefill_seconds"] + line["tokens"] / line["decode_tokens_per_second"]


def _measured(metric: str, lines: Sequence[Line], others: Sequence[Line]) -> Interval:
    """A number that is no score, and its interval; `others` are read token by token, or of the shortest length."""
    if metric in ("kv_gb", "model_gb", "moved_share"):
        size, model = lines[0]["kv_bytes"], lines[0].get("model_bytes", 0)
        number = {"kv_gb": size / 1e9, "model_gb": model / 1e9, "moved_share": size / (size + model)}[metric]
        return Interval(number, number, number)
    if metric in ("seconds", "tokens_per_second", "latency_growth"):
        each = seconds = np.array([_seconds(x) for x in lines])
        if metric == "latency_growth":
            each = seconds / (np.mean([_seconds(x) for x in others]) if others else math.nan)
        elif metric == "tokens_per_second":
            each = np.array([x["tokens"] for x in lines]) / seconds
        found = stats.mean(each.tolist())
        return found if len(lines) > 1 else Interval(found.mean, math.nan, math.nan)
    if metric == "prefill_speedup":
        other, own = (np.mean([x["prefill_seconds"] for x in each]) for each in (others, lines))
        return Interval(float(other / own), math.nan, math.nan)
    found = stats.perplexity([x["nll"] for x in lines], [x.get("context", i) for i, x in enumerate(lines)])
    return Interval(*map(math.log, found)) if metric == "log_perplexity" else found
