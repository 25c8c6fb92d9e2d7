"""From the lines of a run to a paper's table: ours with intervals, beside theirs, and beside our full cache."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.analysis import Interval
from kvjax.configs.experiment import label
from kvjax.experiments.core import metrics, stats
from kvjax.experiments.core.page import plain
from kvjax.experiments.core.records import Line
from kvjax.experiments.papers.methods import Budget
from kvjax.experiments.papers.reduced import MEASURED, NO_SCORES, Choice
from kvjax.experiments.papers.rows import CLASSIFICATION, PromptRow, classification, metric_of, scored_part, task_of
from kvjax.experiments.papers.tables import GEOMETRIC, MODELS

_PERCENT = 100.0


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
    geometric = {c.title for c in entry.columns if c.metric == GEOMETRIC}
    shortest = next((c.data[0] for c in choice.columns if c.metric == "latency_growth"), "")
    found = []
    for method, budget in choice.lines:
        for column, parts in _columns(choice).items():
            theirs = printed.get((method, budget), {}).get(column)
            number = _number(method, budget, column, parts, cells, theirs, column in geometric, shortest)
            reference = printed.get(("full", 1.0), {}).get(column)
            if number is not None and theirs is not None and reference is not None and method != "full":
                number = dataclasses.replace(number, theirs_over_full=theirs - reference)
            found += [] if number is None else [number]
    return found


_Part = tuple[str, str]  # a task, as lines name it, and the metric of its column there


def _columns(choice: Choice) -> dict[str, list[_Part]]:
    """What every column is made of: those that are measured, and the means of those that are measured in full."""
    parts = lambda c: [(task_of(d, c.shots), metric_of(d, c.metric)) for d in c.data]
    measured = {c.title: c for c in choice.columns}
    whole = {c.title for c in choice.entry.columns if c.title in measured and measured[c.title].data == c.data}
    found = {title: parts(c) for title, c in measured.items()}
    for column in choice.entry.columns:
        if column.of and whole.issuperset(column.of):
            found[column.title] = [part for title in column.of for part in parts(measured[title])]
    return found


def _number(
    method: str,
    budget: Budget,
    column: str,
    parts: Sequence[_Part],
    cells: Mapping[Any, dict[int, Line]],
    theirs: Any,
    geometric: bool = False,
    shortest: str = "",
) -> Number | None:
    """A cell, whose data sets weigh the same; None where one has no lines, or what it is a ratio to was not run."""
    scores = lambda m, b: [_values(cells[m, label(b), task], metric) for task, metric in parts]
    values, full = scores(method, budget), scores("full", 1.0)
    if not all(values):
        return None
    own = [cells[method, label(budget), task] for task, _ in parts]
    contexts = [{i: (n, line.get("context", i)) for i, line in each.items()} for n, each in enumerate(own)]
    if geometric:
        return _geometric_number(method, budget, column, values, full, theirs, contexts[0])
    (task, metric), rows = parts[0], sum(map(len, values))
    if metric in NO_SCORES:
        other = ("block-1", task) if metric == "prefill_speedup" else (method, shortest)
        others = [*cells[other[0], label(budget), other[1]].values()]
        if metric == "prefill_speedup" and not others:
            return None
        ours = _measured(metric, [*values[0].values()], others)
        return Number(method, budget, column, rows, *ours, theirs=theirs)
    tasks = [i for i, each in enumerate(values) for _ in each]
    clusters = [contexts[n][i] for n, each in enumerate(values) for i in each]
    ours = stats.interval([x for each in values for x in each.values()], clusters, tasks=tasks)
    made = Number(method, budget, column, rows, *(_PERCENT * float(x) for x in ours), theirs=theirs)
    pair = lambda n, i, x: (n, x, full[n][i], contexts[n][i])
    same = [pair(n, i, x) for n, each in enumerate(values) for i, x in each.items() if i in full[n]]
    if method == "full" or {n for n, *_ in same} != set(tasks):
        return made
    tasks, mine, baseline, clusters = (list(x) for x in zip(*same, strict=True))
    c = stats.compare(mine, baseline, clusters, tasks=tasks)
    over, low, high = (_PERCENT * x for x in (c.difference, c.low, c.high))
    return dataclasses.replace(made, over_full=over, over_full_low=low, over_full_high=high)


def _geometric_number(
    method: str,
    budget: Budget,
    column: str,
    values: Sequence[Mapping[int, Any]],
    full: Sequence[Mapping[int, Any]],
    theirs: Any,
    contexts: Mapping[int, Any] | None = None,
) -> Number:
    """A cell that is the geometric mean of others, with Student-t intervals of what rows add to it."""
    own, baseline = _geometric(values), _geometric(full) if all(full) else {}
    of = lambda x: None if contexts is None else [contexts[i] for i in x]
    mean = lambda x: [_PERCENT * float(end) for end in stats.mean([*x.values()], of(x))]
    made = Number(method, budget, column, len(own), *mean(own), theirs=theirs)
    if method == "full" or not (same := {i: x - baseline[i] for i, x in own.items() if i in baseline}):
        return made
    over, low, high = mean(same)
    return dataclasses.replace(made, over_full=over, over_full_low=low, over_full_high=high)


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


def markdown(choice: Choice, found: Sequence[Number], reduced: Sequence[str], faults: Sequence[str], about: Any) -> str:
    """The report.

    Args:
      choice: what was run.
      found: its numbers.
      reduced: all reasons why it is not the paper's run.
      faults: rows and methods that could not be run.
      about: the environment (`environment`), with the model's source.
    """
    entry = choice.entry
    lines = [f"# {entry.name}: {entry.shows}", ""]
    if reduced:
        lines += ["**Reduced: this shows that the machinery runs, and is no evidence about the paper.**", ""]
        lines += [f"- {reason}" for reason in reduced]
    else:
        lines.append("Sizes, data and methods are the paper's. That the weights are is not verified.")
    commit = f"{about['git_commit'] or 'no checkout'}{' with local changes' if about['git_dirty'] else ''}"
    lines += [
        "",
        f"Model: `{about['model']}` in place of {MODELS[choice.model].title}. Commit: {commit}.",
        f"Command: `{' '.join(about['command'])}`",
        "",
        *(f"- {what}: {value}" for what, value in entry.settings),
    ]
    if len(seeds := about.get("seeds", ())) > 1:
        pooled = "are pooled; a row that several read counts once in intervals"
        lines.append(f"- seeds {', '.join(map(str, seeds))} {pooled}")
    if entry.reference == "full cache":
        lines.append("- outputs are compared with what the full cache generates from the same prompt")
    if entry.notes:
        lines += ["", entry.notes]
    for title, items in (("Missing", choice.missing), ("Could not be run", faults)):
        if items:
            lines += ["", f"{title}:", "", *(f"- {plain(item)}" for item in items)]
    for title, parts in _columns(choice).items():
        mixed = sorted({metric for _, metric in parts})
        if len(mixed) > 1 and any(n.column == title for n in found):
            mean = f"{title} is a mean of different metrics: {', '.join(mixed)}."
            lines += ["", mean] if title not in {c.title for c in choice.columns} else []
    return "\n".join([*lines, "", *_wide(choice, found), "", *_long(found), ""])


def _wide(choice: Choice, found: Sequence[Number]) -> list[str]:
    """The table as the paper lays it out, with ours; theirs in brackets."""
    titles = [c.title for c in choice.entry.columns if any(n.column == c.title for n in found)]
    cells = {(n.method, n.budget, n.column): n for n in found}
    pair = lambda n: "-" if n is None else f"{shown(n.ours)} ({shown(n.theirs)})"
    lines = ["## Ours (theirs)", "", f"| method | budget | {' | '.join(titles)} |", "|---|---|" + "---|" * len(titles)]
    for method, budget in dict.fromkeys((n.method, n.budget) for n in found):
        row = [pair(cells.get((method, budget, t))) for t in titles]
        lines.append(f"| {choice.entry.methods[method].title} | {label(budget)} | {' | '.join(row)} |")
    return lines


def _long(found: Sequence[Number]) -> list[str]:
    """A line a number, with intervals."""
    lines = [
        "## Every number",
        "",
        "Intervals are of 95 % and over rows. The papers give none, so theirs counts as exact. Differences to the full "
        "cache are of the same rows.",
        "",
        "| method | budget | column | rows | ours | theirs | ours - theirs | ours - our full | theirs - their full |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for n in found:
        over = None if n.over_full is None else (n.over_full, n.over_full_low, n.over_full_high)
        cells = [
            n.method, label(n.budget), n.column, str(n.rows), _interval((n.ours, n.low, n.high)), shown(n.theirs),
            _interval(n.difference, sign=True), _interval(over, sign=True), shown(n.theirs_over_full, sign=True),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _interval(values: Sequence[float | None] | None, *, sign: bool = False) -> str:
    if values is None:
        return "-"
    mean, low, high = values
    if low is None or high is None or math.isnan(low) or low == high:
        return shown(mean, sign=sign)
    return f"{shown(mean, sign=sign)} [{shown(low, sign=sign)}, {shown(high, sign=sign)}]"


def shown(value: float | None, *, sign: bool = False) -> str:
    """A number to four digits; "-" where there is none."""
    if value is None or math.isnan(value):
        return "-"
    text = f"{value:.4g}" if abs(value) < 1 and value else f"{value:.2f}"
    return f"{'+' if sign and value > 0 else ''}{text}"


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
