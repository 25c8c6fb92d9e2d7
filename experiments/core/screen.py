"""What the main job says at its end: one table of all methods, the best and the worst, and where the rest is."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvjax.experiments.core.page import Cell, Table, scored

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
    scores = [task for task in tasks if kind[task] == "score"]
    first = average if average in scores else (scores or tasks)[0]
    shown = [first, *(task for task in tasks if kind[task] == "nll" and task != first)][:3]
    head = {task: f"{task.replace('_', ' ')}{'' if kind[task] == 'nll' else ', %'}" for task in shown}
    head |= {average: f"mean of {len(scores) - 1} tasks, %"}
    rows = []
    for (method, budget), found in by_run.items():
        share = next(iter(found.values()))["kv_of_full"]
        size = "" if share != share else f"{100 * share:.1f} %"
        size += f" ({kept[method, budget]} prompts kept whole)" if (method, budget) in kept else ""
        rows.append([method, budget, *(scored(found[t]) if t in found else "" for t in shown), size])
    lines = Table(["method", "budget", *(head[task] for task in shown), "KV bytes"], rows).screen()
    if (more := len(rows) - ROWS) > 0:
        lines = [*lines[: ROWS + 1], f"... {more} more {'row' if more == 1 else 'rows'} in the page"]
    said = _extremes([found[first] for found in by_run.values() if first in found], head[first].removesuffix(", %"))
    return "\n".join([*lines, "", *said, *([note, ""] if note else []), *where])


def _extremes(numbers: Sequence[Number], name: str) -> list[str]:
    """A sentence on the best and the worst of what evicts; none where nothing can be told apart."""
    evicting = [n for n in numbers if n["method"] != "full"]
    if len({n["value"] for n in evicting}) < 2:
        return []
    better = (lambda n: -n["value"]) if evicting[0]["kind"] == "nll" else (lambda n: n["value"])
    best, worst = max(evicting, key=better), min(evicting, key=better)
    value = lambda n: Cell(scored(n)).value
    shown = lambda n: f"{n['method']} at {n['budget']} ({value(n)})"
    full = next((f"; the full cache has {value(n)}" for n in numbers if n["method"] == "full"), "")
    return [f"Best by {name}: {shown(best)}; worst: {shown(worst)}{full}.", ""]
