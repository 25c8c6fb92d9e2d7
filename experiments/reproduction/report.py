"""A reproduction as markdown and JSON: what was run, what is not the paper's about it, ours beside theirs."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from kvjax.configs.experiment import label
from kvjax.experiments.evaluation.report import plain
from kvjax.experiments.papers.tables import MEAN, MODELS, Entry
from kvjax.experiments.reproduction.choice import Choice
from kvjax.experiments.reproduction.numbers import Number
from kvjax.experiments.reproduction.rows import metric_of


def status(reduced: Sequence[str]) -> str:
    """How a run counts in the ledger."""
    return "machinery only" if reduced else "as published"


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
    if entry.reference == "full cache":
        lines.append("- outputs are compared with what the full cache generates from the same prompt")
    if entry.notes:
        lines += ["", entry.notes]
    for title, items in (("Missing", choice.missing), ("Could not be run", faults)):
        if items:
            lines += ["", f"{title}:", "", *(f"- {plain(item)}" for item in items)]
    return "\n".join([*lines, "", *_wide(entry, found), *_averaged(choice, found), "", *_long(found), ""])


def _averaged(choice: Choice, found: Sequence[Number]) -> list[str]:
    """Which means over columns are of different metrics."""
    lines = []
    for column in choice.entry.columns:
        of = [c for c in choice.columns if c.title in column.of]
        metrics = sorted({metric_of(data, c.metric) for c in of for data in c.data})
        if column.metric == MEAN and len(metrics) > 1 and any(n.column == column.title for n in found):
            lines += ["", f"{column.title} is a mean of different metrics: {', '.join(metrics)}."]
    return lines


def _wide(entry: Entry, found: Sequence[Number]) -> list[str]:
    """The table as the paper lays it out, with ours; theirs in brackets."""
    titles = [c.title for c in entry.columns if any(n.column == c.title for n in found)]
    cells = {(n.method, n.budget, n.column): n for n in found}
    lines = ["## Ours (theirs)", "", f"| method | budget | {' | '.join(titles)} |", "|---|---|" + "---|" * len(titles)]
    for method, budget in dict.fromkeys((n.method, n.budget) for n in found):
        row = [_pair(cells.get((method, budget, t))) for t in titles]
        lines.append(f"| {entry.methods[method].title} | {label(budget)} | {' | '.join(row)} |")
    return lines


def _pair(number: Number | None) -> str:
    if number is None:
        return "-"
    return f"{shown(number.ours)} ({'-' if number.theirs is None else shown(number.theirs)})"


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
