"""From the lines of a run to a paper's table: ours with intervals, beside theirs, and beside our full cache."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.analysis import Interval
from kvjax.configs.experiment import label
from kvjax.experiments.core import metrics, page, stats
from kvjax.experiments.core.page import Table, cell, plain
from kvjax.experiments.core.records import Line
from kvjax.experiments.papers.methods import Budget
from kvjax.experiments.papers.reduced import MEASURED, NO_SCORES, Choice
from kvjax.experiments.papers.rows import CLASSIFICATION, PromptRow, classification, metric_of, scored_part, task_of
from kvjax.experiments.papers.tables import GEOMETRIC, MODELS, Column

_PERCENT = 100.0
_Nothing = tuple[None, None, None]
_NO_INTERVAL: _Nothing = (None, None, None)


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
        """Ours less theirs, with the interval of ours: papers give none, so theirs counts as exact."""
        if self.theirs is None:
            return None
        return self.ours - self.theirs, self.low - self.theirs, self.high - self.theirs


def scored(
    choice: Choice, lines: Iterable[Line], rows: Mapping[str, Sequence[PromptRow]]
) -> tuple[list[Line], list[str]]:
    """Lines with the `scores` of their outputs in every metric that a column has of their data set.

    Returns:
      The lines, and why metrics refuse to score outputs, each reason once with how many.
    """
    lines, refused = [*lines], collections.Counter[str]()
    by_full = choice.entry.reference == "full cache"
    full = {(x["task"], x["index"]): x.get("output", "") for x in lines if x["method"] == "full"}
    found = []
    for line in lines:
        name, scores = line["task"], {"accuracy": line["score"]} if "score" in line else {}
        wanted = {metric_of(name, c.metric): None for c in choice.columns if name in c.data}
        for metric in [] if by_full and line["method"] == "full" else [m for m in wanted if m not in MEASURED]:
            row = rows[name][line["index"]]
            output = full.get((name, line["index"]), "")
            references = row.answers if not by_full else (output,) if output.strip() else ()
            part = scored_part(name, line["output"])
            try:
                if not references:
                    raise ValueError("the full cache generates nothing")
                if metric == CLASSIFICATION:
                    scores[metric] = max(classification(part, r, row.classes or row.answers) for r in references)
                else:
                    scores[metric] = metrics.find(metric)(part, references)
            except ValueError as e:
                refused[f"{name}: {e}"] += 1
        found.append({**line, "scores": scores})
    return found, [f"{reason} ({count} outputs)" for reason, count in refused.items()]


def numbers(choice: Choice, lines: Iterable[Line]) -> list[Number]:
    """Every number of a choice that scored lines give, in the table's order; means of columns are last in a line."""
    entry, cells = choice.entry, collections.defaultdict[tuple[str, str, str], dict[int, Line]](dict)
    for line in lines:
        cells[line["method"], line["budget"], line["task"]][line["index"]] = line
    printed: dict[tuple[str, Budget], dict[str, float]] = {}
    for row in entry.rows:
        if row.model == choice.model:  # a budget that the text does not state is whichever is run
            known = {c.title: v for c, v in zip(entry.columns, row.values, strict=True) if v is not None and v == v}
            printed |= {(m, b): known for m, b in choice.lines if m == row.method and row.budget in (None, b)}
    found = []
    for method, budget in choice.lines:
        for column, parts in _columns(choice):
            if ours := _ours(choice, method, label(budget), column, parts, cells):
                rows, interval, over = ours
                theirs, full = (printed.get(x, {}).get(column.title) for x in ((method, budget), ("full", 1.0)))
                theirs_over = None if method == "full" or theirs is None or full is None else theirs - full
                found.append(Number(method, budget, column.title, rows, *interval, theirs, *over, theirs_over))
    return found


_Part = tuple[str, str]  # a task, as lines name it, and the metric of its column there


def _columns(choice: Choice) -> list[tuple[Column, list[_Part]]]:
    """What every column is made of: those that are measured, and the means of those that are measured in full."""
    parts = {c.title: [(task_of(d, c.shots), metric_of(d, c.metric)) for d in c.data] for c in choice.columns}
    of, entry = {c.title: c for c in choice.columns}, choice.entry
    whole = {c.title for c in entry.columns if c.title in of and of[c.title].data == c.data}
    means = [c for c in entry.columns if c.of and whole.issuperset(c.of)]
    return [(c, parts[c.title]) for c in choice.columns] + [(c, [x for t in c.of for x in parts[t]]) for c in means]


def _ours(
    choice: Choice, method: str, budget: str, column: Column, parts: Sequence[_Part], cells: Mapping[Any, Any]
) -> tuple[int, Interval, Interval | _Nothing] | None:
    """Rows of a cell, its number, and that less the full cache's, both with intervals; its data sets weigh the same.

    None where a data set has no lines, or what the number is a ratio to was not run.
    """
    values, full = (
        [_values(cells[*line, task], metric) for task, metric in parts] for line in ((method, budget), ("full", "1.0"))
    )
    if not all(values):
        return None
    task, metric = parts[0]
    if metric in NO_SCORES:
        shortest = next((c.data[0] for c in choice.columns if c.metric == "latency_growth"), "")
        other = ("block-1", budget, task) if metric == "prefill_speedup" else (method, budget, shortest)
        if metric == "prefill_speedup" and not cells[other]:
            return None
        ours = _measured(metric, [*values[0].values()], [*cells[other].values()])
        return sum(map(len, values)), ours, _NO_INTERVAL
    if geometric := column.metric == GEOMETRIC:
        values, full = [_geometric(values)], [_geometric(full) if all(full) else {}]
    percent = lambda ends: Interval(*(_PERCENT * float(x) for x in ends))
    context = lambda n, i: (n, cells[method, budget, parts[n][0]][i].get("context", i))
    rows = [(n, x, full[n].get(i), context(n, i)) for n, each in enumerate(values) for i, x in each.items()]
    tasks, scores, _, contexts = (list(x) for x in zip(*rows, strict=True))
    ours = stats.mean(scores, contexts) if geometric else stats.interval(scores, contexts, tasks=tasks)
    same = [row for row in rows if row[2] is not None]
    if method == "full" or {n for n, *_ in same} != {*tasks}:
        return len(rows), percent(ours), _NO_INTERVAL
    tasks, scores, baseline, contexts = (list(x) for x in zip(*same, strict=True))
    if geometric:
        over = stats.mean(np.subtract(scores, baseline).tolist(), contexts)
    else:
        c = stats.compare(scores, baseline, contexts, tasks=tasks)
        over = c.difference, c.low, c.high
    return len(rows), percent(ours), percent(over)


def _geometric(scores: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """What rows add to the geometric mean of several mean scores, linearised: their own mean is that.

    A row that a metric did not judge adds nothing by it.
    """
    means = np.array([np.mean([*each.values()]) for each in scores])
    mean = float(np.prod(means) ** (1 / len(means)))
    share = lambda i: np.mean([each.get(i, m) / m - 1 for each, m in zip(scores, means, strict=True)])
    return {i: mean * (1 + float(share(i))) if mean else 0.0 for i in dict.fromkeys(i for each in scores for i in each)}


def _values(lines: Mapping[int, Line], metric: str) -> dict[int, Any]:
    """What a metric is made of, by row: scores, or the lines themselves."""
    if metric in NO_SCORES:
        return {**lines}
    return {i: line["scores"][metric] for i, line in lines.items() if metric in line["scores"]}


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


# --- the report ---


def markdown(
    choice: Choice,
    found: Sequence[Number],
    reduced: Sequence[str],
    faults: Sequence[str],
    about: Any,
    responses: Sequence[str] = (),
) -> str:
    """The report.

    Args:
      choice: what was run.
      found: its numbers.
      reduced: all reasons why it is not the paper's run.
      faults: rows and methods that could not be run.
      about: the environment (`environment`), with the model's source.
      responses: outputs that are shown.
    """
    entry, measured = choice.entry, {c.title for c in choice.columns}
    items = lambda several: "\n".join(f"- {plain(item)}" for item in several)
    commit = f"{about['git_commit'] or 'no checkout'}{' with local changes' if about['git_dirty'] else ''}"
    settings = [*entry.settings]
    if len(seeds := about.get("seeds", ())) > 1:
        settings.append(
            f"seeds {', '.join(map(str, seeds))} are pooled; a row that several read counts once in intervals"
        )
    if entry.reference == "full cache":
        settings.append("outputs are compared with what the full cache generates from the same prompt")
    several = []
    for column, parts in _columns(choice):
        mixed = sorted({metric for _, metric in parts})
        if len(mixed) > 1 and column.title not in measured and any(n.column == column.title for n in found):
            several.append(f"{column.title} is a mean of different metrics: {', '.join(mixed)}.")
    whole = "Sizes, data and methods are the paper's. That the weights are is not verified."
    part = "**Reduced: this shows that the machinery runs, and is no evidence about the paper.**"
    every = (
        "Intervals are of 95 % and over rows. The papers give none, so theirs counts as exact. Differences to the full "
        "cache are of the same rows."
    )
    blocks = [
        part if reduced else whole,
        items(reduced),
        f"Model: `{about['model']}` in place of {MODELS[choice.model].title}. Commit: {commit}.\n"
        f"Command: `{' '.join(about['command'])}`",
        items(settings),
        entry.notes,
    ]
    for title, named in (("Missing", choice.missing), ("Could not be run", faults)):
        blocks += [f"{title}:", items(named)] if named else []
    blocks += [*several, "## Ours (theirs)", _wide(choice, found), "## Every number", every, _long(found)]
    blocks += ["## Responses", items(responses)] if responses else []
    return page.markdown(f"{entry.name}: {entry.shows}", *filter(None, blocks))


def _wide(choice: Choice, found: Sequence[Number]) -> Table:
    """The table as the paper lays it out, with ours; theirs in brackets."""
    titles = [c.title for c in choice.entry.columns if any(n.column == c.title for n in found)]
    pair = lambda n: _shown(n.ours) + (f" ({_shown(n.theirs)})" if n.theirs is not None else "")
    cells = {(n.method, n.budget, n.column): pair(n) for n in found}
    rows = [
        (choice.entry.methods[method].title, label(budget), *(cells.get((method, budget, t), "") for t in titles))
        for method, budget in dict.fromkeys((n.method, n.budget) for n in found)
    ]
    return Table(("method", "budget", *titles), rows)


def _long(found: Sequence[Number]) -> Table:
    """A line a number, with intervals."""
    head = ("method", "budget", "column", "rows", "ours", "theirs", "ours - theirs", "ours - our full",
            "theirs - their full")  # fmt: skip
    rows = [
        (
            n.method, label(n.budget), n.column, str(n.rows), _shown(n.ours, n.low, n.high), _shown(n.theirs),
            _shown(*(n.difference or _NO_INTERVAL), sign="+"),
            _shown(n.over_full, n.over_full_low, n.over_full_high, sign="+"), _shown(n.theirs_over_full, sign="+"),
        )
        for n in found
    ]  # fmt: skip
    return Table(head, rows)


def _shown(value: float | None, low: float | None = None, high: float | None = None, *, sign: str = "") -> str:
    """A number to four digits or two places, and the interval that it has, unless that is the number itself."""
    form = ".4g" if value and abs(value) < 1 else ".2f"
    return cell(value, low, None if low == high else high, sign + form)


def as_json(choice: Choice, found: Sequence[Number], reduced: Sequence[str], faults: Sequence[str]) -> dict[str, Any]:
    """The same for programs."""
    return {
        "entry": choice.entry.name,
        "status": status(reduced),
        "stands_for": choice.model,
        "reduced": [*reduced],
        "missing": [*choice.missing],
        "faults": [*faults],
        "numbers": [{**dataclasses.asdict(n), "difference": n.difference} for n in found],
    }


def status(reduced: Sequence[str]) -> str:
    """How a run counts in the ledger."""
    return "machinery only" if reduced else "as published"
