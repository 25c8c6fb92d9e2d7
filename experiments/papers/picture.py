"""The picture of a measured entry: ours with intervals, the paper's numbers beside them where its text has any."""

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from matplotlib.figure import Figure

from kvjax import plot
from kvjax.configs.experiment import label
from kvjax.experiments.core.records import Line
from kvjax.experiments.papers.base import canvas, message, percent
from kvjax.experiments.papers.numbers import Number
from kvjax.experiments.papers.runs import Run
from kvjax.experiments.papers.tables import DATA, MODELS
from kvjax.plot import COLOURS
from kvjax.plot.style import style

_UNITS = {
    "kv_gb": "GB", "model_gb": "GB", "moved_share": "cache's share of the bytes that a step moves",
    "latency_growth": "latency over that of the shortest", "tokens_per_second": "tokens a second",
    "perplexity": "perplexity", "seconds": "seconds a sequence",
}  # fmt: skip
Count = Int[np.ndarray, "P"]


def picture(run: Run, found: Sequence[Number], samples: Sequence[Line]) -> Figure:
    """What a figure shows: scores, a map of needles, or the paragraphs that the scored lines `samples` name.

    Raises:
      ValueError: no number to draw.
    """
    if not found:
        raise ValueError(f"nothing of {run.entry.name} was measured, so that there is nothing to draw")
    if retrieves(run):
        return _paragraphs(run, *named(run, samples))
    needles = all(DATA[name].runner == "needle" for column in run.columns for name in column.data)
    return _map(run, samples) if needles else _scores(run, found)


def retrieves(run: Run) -> bool:
    """Whether all its outputs name paragraphs."""
    return all(DATA[name].metric == "retrieval" for column in run.columns for name in column.data)


def named(run: Run, samples: Sequence[Line]) -> tuple[Count, dict[str, Count]]:
    """How often paragraphs 1, 2, ... are right, and are named by the first number of methods' outputs."""
    number = lambda text: int(found[0]) if (found := re.search(r"\d+", text)) else 0
    right = [number(row.answers[0]) for each in run.rows.values() for row in each]
    outputs = collections.defaultdict(list)
    for x in samples:
        outputs[run.called(x)].append(number(x["output"]))
    count = lambda found: np.bincount([n for n in found if n <= max(right)], minlength=max(right) + 1)[1:]
    return count(right), {name: count(found) for name, found in outputs.items()}


def _paragraphs(run: Run, right: Count, by_name: Mapping[str, Count]) -> Figure:
    """A panel for every method and budget, with the right answers as a line."""
    figure, grid = canvas(1, len(by_name), width=7.5, height=2.2, sharex=True, sharey=True)
    first = lambda counts: percent(counts[: len(right) // 2].sum() / counts.sum()) if counts.sum() else "none"
    for (name, counts), axes in zip(by_name.items(), grid[:, 0], strict=True):
        axes.bar(range(1, len(right) + 1), counts, color=COLOURS[0], label="named")
        axes.step(range(1, len(right) + 1), right, where="mid", color="black", linewidth=1.2, label="right")
        axes.set(title=f"{name}: {counts.sum()} outputs name one", ylabel="outputs")
    grid[0, 0].legend(frameon=False, fontsize="small", ncols=2)
    grid[-1, 0].set_xlabel("paragraph")
    said = ";\n".join(f"{name}: {first(counts)}" for name, counts in by_name.items())
    text = f"Named in the first half (of the right ones {first(right)}):\n{said}"
    return message(figure, text, f"{run.entry.name}, for {MODELS[run.model].title}")


def _map(run: Run, samples: Sequence[Line]) -> Figure:
    """Scores by depth and length, a map for every method and budget, and the paper's averages."""
    cells, metric = collections.defaultdict[str, list[Line]](list), run.columns[0].metric
    for x in samples:
        cells[run.called(x)].append({**x, "score": x["scores"][metric]})
    theirs = [f"{run.entry.methods[r.method].title} {r.values[0]:g}" for r in run.entry.rows if r.values[0]]
    text = f"{run.entry.name}; the paper's averages: {', '.join(theirs)}"
    return message(plot.depth_against_length(cells), run.entry.shows, text)


def _scores(run: Run, found: Sequence[Number]) -> Figure:
    """A row of panels of methods with several budgets, against these, and one of the others; a column for every score.

    Where columns are lengths, every unit has a panel, with a line for every method and budget against them.
    """
    entry, columns = run.entry, [*dict.fromkeys(n.column for n in found)]
    title = lambda method: entry.methods[method].title
    budgets = {m: {n.budget for n in found if n.method == m} for m in dict.fromkeys(n.method for n in found)}
    several = [m for m in budgets if len(budgets[m]) > 1]
    single = [m for m in budgets if m not in several and m != "full"]
    metrics = {c.title: c.metric for c in run.columns}
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
            axes.set(xlabel="length, tokens", ylabel=unit, ylim=(0, None))
            axes.legend(frameon=False, fontsize="small")
    else:
        kinds = [kind for kind in (several, single) if kind] or [["full"]]
        figure, grid = canvas(len(columns), len(kinds), width=4.6 if len(columns) > 1 else 7.0, height=3.8)
        for (kind, row), column in ((pair, c) for pair in zip(kinds, grid, strict=True) for c in columns):
            axes, here = row[columns.index(column)], [n for n in found if n.column == column]
            for n in here:
                if n.method == "full":
                    axes.axhline(n.ours, color="black", linewidth=1, linestyle=":", label=title("full"))
                if n.method == "full" and n.theirs is not None:
                    axes.axhline(n.theirs, color="0.5", linewidth=1, linestyle="--")
            for i, method in enumerate(kind):
                own = [n for n in here if n.method == method]
                if kind is several:
                    _points(axes, i, title(method), {n.budget: n for n in sorted(own, key=lambda n: n.budget)})
                else:
                    _points(axes, 0, None, dict.fromkeys([i], *own))
            if kind is several:
                text = "prompt and what may follow" if entry.methods[kind[0]].whole else "prompt"
                axes.set_xlabel(f"budget: share of the {text}, or tokens of a head")
            else:
                axes.set_xticks(range(len(kind)), map(title, kind), rotation=60, ha="right", fontsize="small")
            axes.set(title=column, ylabel=_UNITS.get(metrics.get(column, ""), "score"))
        if several or "full" in budgets:
            figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    claimed = "\n".join(f"the paper: {what}: {value:g}" for what, value, _ in entry.claims)
    theirs = "open marks, dashed: the paper's" if any(n.theirs is not None for n in found) else ""
    known = theirs or claimed or "the paper has no number"
    return message(figure, entry.shows, f"{entry.name}, for {MODELS[run.model].title}; 95 % intervals; {known}")


def _points(axes: Any, i: int, name: str | None, numbers: dict[Any, Number]) -> None:
    """Ours by place, joined and with intervals, and theirs."""
    each = [*numbers.values()]
    errors = np.maximum([[n.ours - n.low for n in each], [n.high - n.ours for n in each]], 0.0)  # they round apart
    axes.errorbar([*numbers], [n.ours for n in each], yerr=errors, capsize=2, label=name, **style(i))
    theirs = {at: n.theirs for at, n in numbers.items() if n.theirs is not None}
    how = {"marker": style(i)["marker"], "edgecolors": style(i)["color"], "facecolors": "none", "zorder": 3}
    axes.scatter([*theirs], [*theirs.values()], **how)
