"""What the main job says at its end: one table of all methods, the best and the worst, and where the rest is."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

ROWS: Final = 12
"""Rows of the table, at most."""

Number = Mapping[Any, Any]
"""A row of `table.numbers`: method, budget, task, kind, value, low, high and kv_of_full."""


def screen(
    numbers: Sequence[Number], average: str, files: Mapping[str, pathlib.Path], note: str = "", kept: Any = ()
) -> str:
    """The lines that fit on a screen.

    Args:
      numbers: of one run.
      average: the task that stands for the mean over tasks, where there are several.
      files: what there is to look at, by what it is.
      note: what else is to be known of the numbers.
      kept: a dict that says of how many prompts every token was kept, by method and budget.
    """
    width = max(map(len, files), default=0) + 1
    where = [f"{f'{name}:':{width}} {path}" for name, path in files.items()]
    by_run: dict[tuple[str, str], dict[str, Number]] = {}
    for number in numbers:
        by_run.setdefault((number["method"], number["budget"]), {})[number["task"]] = number
    tasks = list(dict.fromkeys(n["task"] for n in numbers))
    kind = {n["task"]: n["kind"] for n in numbers}
    scored = [task for task in tasks if kind[task] == "score"]
    first = average if average in scored else (scored or tasks)[0]
    shown = [first, *(task for task in tasks if kind[task] == "nll" and task != first)][:3]
    of = len(scored) - (average in scored)
    head = {task: f"{task.replace('_', ' ')}{'' if kind[task] == 'nll' else ', %'}" for task in shown}
    head |= {average: f"mean of {of} tasks, %"}
    rows = [["method", "budget", *(head[task] for task in shown), "KV bytes"]]
    for (method, budget), found in by_run.items():
        share = next(iter(found.values()))["kv_of_full"]
        size = "" if share != share else f"{100 * share:.1f} %"
        size += f" ({kept[method, budget]} prompts kept whole)" if (method, budget) in kept else ""
        rows.append([method, budget, *(_cell(found.get(task)) for task in shown), size])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    more = len(lines) - 1 - ROWS
    lines = [
        *lines[: ROWS + 1],
        *([f"... {more} more {'row' if more == 1 else 'rows'} in the page"] if more > 0 else []),
    ]
    said = _extremes([found[first] for found in by_run.values() if first in found], head[first].removesuffix(", %"))
    return "\n".join([*lines, "", *said, *([note, ""] if note else []), *where])


def _cell(number: Number | None) -> str:
    """A score in percent or a perplexity, with its interval."""
    if number is None:
        return ""
    scale, digits = (1, 2) if number["kind"] == "nll" else (100, 1)
    value, low, high = (f"{scale * number[name]:.{digits}f}" for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _extremes(numbers: Sequence[Number], name: str) -> list[str]:
    """A sentence on the best and the worst of what evicts; none where nothing can be told apart."""
    evicting = [n for n in numbers if n["method"] != "full"]
    if len({n["value"] for n in evicting}) < 2:
        return []
    better = (lambda n: -n["value"]) if evicting[0]["kind"] == "nll" else (lambda n: n["value"])
    best, worst = max(evicting, key=better), min(evicting, key=better)
    shown = lambda n: f"{n['method']} at {n['budget']} ({_cell(n).partition(' ')[0]})"
    full = next((f"; the full cache has {_cell(n).partition(' ')[0]}" for n in numbers if n["method"] == "full"), "")
    return [f"Best by {name}: {shown(best)}; worst: {shown(worst)}{full}.", ""]
