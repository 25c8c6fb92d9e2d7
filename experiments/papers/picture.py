"""The picture of a measured entry: ours with intervals, the paper's numbers beside them where its text has any."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kvjax.configs.experiment import label
from kvjax.experiments.papers.base import canvas, message
from kvjax.experiments.papers.numbers import Number
from kvjax.experiments.papers.reduced import Choice
from kvjax.experiments.papers.tables import MODELS
from kvjax.plot.style import style

_UNITS = {
    "kv_gb": "GB", "model_gb": "GB", "moved_share": "cache's share of the bytes that a step moves",
    "latency_growth": "latency over that of the shortest", "tokens_per_second": "tokens a second",
    "perplexity": "perplexity",
}  # fmt: skip


def picture(choice: Choice, found: Sequence[Number]) -> Figure:
    """A row of panels of methods with several budgets, against these, and one of the others; a column for every score.

    Where columns are lengths, every unit has a panel, with a line for every method and budget against them.

    Args:
      choice: what was run.
      found: its numbers.

    Raises:
      ValueError: no number to draw.
    """
    entry, columns = choice.entry, [*dict.fromkeys(n.column for n in found)]
    if not columns:
        raise ValueError(f"nothing of {entry.name} was measured, so that there is nothing to draw")
    title = lambda method: entry.methods[method].title
    budgets = {m: {n.budget for n in found if n.method == m} for m in dict.fromkeys(n.method for n in found)}
    several = [m for m in budgets if len(budgets[m]) > 1]
    single = [m for m in budgets if m not in several and m != "full"]
    metrics = {c.title: c.metric for c in choice.columns}
    lengths = [c for c in columns if [*metrics.values()].count(metrics.get(c, "")) > 1]
    units = [*dict.fromkeys(_UNITS.get(metrics.get(c, "")) for c in columns)]
    if lengths and None not in units:
        figure, (row,) = canvas(len(units), width=6.4 if len(units) == 1 else 4.8, height=4.2)
        for axes, unit in zip(row, units, strict=True):
            here = [n for n in found if _UNITS[metrics[n.column]] == unit]
            places = [c for c in lengths if c in {n.column for n in here}]
            for i, (method, budget) in enumerate(dict.fromkeys((n.method, n.budget) for n in here)):
                own = {n.column: n for n in here if (n.method, n.budget) == (method, budget)}
                for column in own.keys() - {*places}:
                    axes.axhline(own[column].ours, color="black", linewidth=1, linestyle=":", label=column)
                name = title(method) if method == "full" else f"{title(method)}, {label(budget)}"
                _points(axes, i, name, {places.index(c): n for c, n in own.items() if c in places})
            axes.set_xticks(range(len(places)), [c.split(" at ")[-1] for c in places])
            axes.set(ylabel=unit, ylim=(0, None))
            axes.legend(frameon=False, fontsize="small")
    else:
        kinds = [kind for kind in (several, single) if kind] or [["full"]]
        figure, grid = canvas(len(columns), len(kinds), width=4.6, height=3.8)
        for (kind, row), column in ((pair, c) for pair in zip(kinds, grid, strict=True) for c in columns):
            axes, here = row[columns.index(column)], [n for n in found if n.column == column]
            for n in here:
                if n.method == "full":
                    axes.axhline(n.ours, color="black", linewidth=1, linestyle=":", label=title("full"))
            for i, method in enumerate(kind):
                own = [n for n in here if n.method == method]
                if kind is several:
                    _points(axes, i, title(method), {n.budget: n for n in sorted(own, key=lambda n: n.budget)})
                else:
                    _points(axes, 0, None, dict.fromkeys([i], *own))
            if kind is several:
                axes.set_xlabel("budget: share of the prompt, or tokens of a head")
            else:
                axes.set_xticks(range(len(kind)), map(title, kind), rotation=60, ha="right", fontsize="small")
            axes.set(title=column, ylabel=_UNITS.get(metrics.get(column, ""), "score"))
        if several or "full" in budgets:
            grid[0, 0].legend(frameon=False, fontsize="small")
    known = "open: the paper's" if any(n.theirs is not None for n in found) else "the paper's text has none of them"
    return message(figure, entry.shows, f"{entry.name}, for {MODELS[choice.model].title}; 95 % intervals; {known}")


def _points(axes: Any, i: int, name: str | None, numbers: dict[Any, Number]) -> None:
    """Ours by place, joined and with intervals, and theirs."""
    each = [*numbers.values()]
    errors = np.maximum([[n.ours - n.low for n in each], [n.high - n.ours for n in each]], 0.0)  # they round apart
    axes.errorbar([*numbers], [n.ours for n in each], yerr=errors, capsize=2, label=name, **style(i))
    theirs = {at: n.theirs for at, n in numbers.items() if n.theirs is not None}
    how = {"marker": style(i)["marker"], "edgecolors": style(i)["color"], "facecolors": "none", "zorder": 3}
    axes.scatter([*theirs], [*theirs.values()], **how)
