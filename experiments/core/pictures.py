"""The pictures of a page: scores against budgets, needles by depth and length, and which positions were kept."""

import base64
import io
import math
from collections.abc import Sequence
from typing import Any, Final

import matplotlib
import pandas as pd

import kvjax
from kvjax.analysis import Interval
from kvjax.experiments.core import table, views
from kvjax.experiments.core.records import load_kept
from kvjax.experiments.core.sources import Found, Run
from kvjax.experiments.core.table import has_budget, is_full
from kvjax.experiments.tasks import NEEDLES

Figures = dict[str, list[tuple[str, Any]]]
"""By kind ("curves", "maps", "kept") the title and the figure of each."""

PICTURES: Final = ("score_against_budget", "perplexity_against_budget", "depth_against_length", "kept_positions")
"""The figures that are files of their own."""


def curve(numbers: Sequence[views.Number]) -> Any:
    """The numbers of one task against budgets, or against live tokens where there are none; None without any place."""
    scale = 100 if numbers[0]["kind"] == "score" else 1
    at = lambda c: Interval(*(scale * (math.nan if c[k] is None else c[k]) for k in ("value", "low", "high")))
    curves: dict[str, dict[float, Interval]] = {}
    for c in (c for c in numbers if not is_full(c["method"]) and c["place"] and math.isfinite(c["value"])):
        name = c["method"] if has_budget(c["budget"]) else f"{c['method']} (live tokens)"
        apart = f" {c['budget']}" if c["place"] in curves.get(name, {}) else ""
        curves.setdefault(name + apart, {})[float(c["place"])] = at(c)
    full = next((at(c) for c in numbers if is_full(c["method"])), None)
    if not curves:
        return None
    ylabel = "score, % (95 % interval)" if scale == 100 else "perplexity (95 % interval)"
    figure = kvjax.plot.budget_curve(curves, full=full, ylabel=ylabel)
    every = [point.mean for points in curves.values() for point in points.values()]
    for axes in figure.axes:
        if scale == 100:
            axes.set_ylim(-3, 103)
        elif max(every) > 4 * min(every):
            axes.set_yscale("log")
    return figure


def depths(view: views.View, task: str) -> Any:
    """Scores by depth and length, a map a policy, the largest budgets first; None where rows have not several of both.

    Depths are joined to bands until three rows are in a cell on average.
    """
    rows = view.rows[(view.rows["task"] == task) & (view.rows["kind"] == "score")]
    deep, long = rows["depth"].nunique(), rows["length"].nunique()
    if min(deep, long) < 2 or rows[["depth", "length"]].isna().any(axis=None):
        return None
    shown = rows[["depth", "length", "score"]]
    groups = {key: shown.loc[of] for key, of in rows.groupby(["method", "budget"], sort=False).groups.items()}
    named = {_policy(m, b): table.records(groups[m, b]) for m, b, _ in view.lines if (m, b) in groups}
    count, most = len(next(iter(named.values()))), min(long, 8)
    bands = next((n for n in (8, 4, 2) if n <= deep and count >= 3 * n * most), 2)
    return kvjax.plot.depth_against_length(
        named, depths=None if bands == deep else bands, lengths=None if most == long else most
    )


def _policy(name: str, at: str) -> str:
    return "full cache" if (name, at) == ("full", "1.0") else f"{name} {views.budget(at)}"


def prominence(task: str, prompt_tokens: float) -> tuple[bool, float]:
    """What orders examples: kept positions are drawn of the first with the largest, of a needle where there is any."""
    return task in NEEDLES, prompt_tokens


def kept(run: Run, lines: pd.DataFrame) -> Any:
    """Which tokens of one prompt each policy holds, and where the needle is; None where no positions were kept."""
    layers, own = load_kept(run.manifest.parent), lines[lines["run"] == run.name]
    if not layers or own.empty:
        return None
    shown = max(table.records(own), key=lambda s: prominence(s["task"], s["prompt_tokens"]))
    at = shown.get("needle_at", math.nan)
    markers = {} if math.isnan(at) else {"needle": range(int(at), int(at) + int(shown["needle_tokens"]))}
    same = own[(own["task"] == shown["task"]) & (own["index"] == shown["index"])]
    policies = dict.fromkeys(zip(same["called"], same["budget"], strict=True))
    named = {_policy(m, b): layers[f"{m}@{b}"] for m, b in policies if f"{m}@{b}" in layers}
    return kvjax.plot.kept_positions(named, length=int(shown["prompt_tokens"]), markers=markers) if named else None


def drawn(view: views.View, found: Found) -> Figures:
    """(title, figure) of a setting's curves, maps and kept positions."""
    of = {task: [c for c in view.numbers if c["task"] == task] for task in view.tasks}
    here = [run for run in found.runs if run.name in {*view.rows["run"]}]
    made = {
        "curves": [(views.words(task), curve(numbers)) for task, numbers in of.items()],
        "maps": [(views.words(task), depths(view, task)) for task in view.tasks],
        "kept": [(run.name, kept(run, found.lines)) for run in here],
    }
    return {kind: [(title, figure) for title, figure in pairs if figure is not None] for kind, pairs in made.items()}


def files(figures: Figures) -> dict[str, Any]:
    """The figures of one setting that are files of their own, by their names."""
    curves, maps, needles = (dict(figures[kind]) for kind in ("curves", "maps", "kept"))
    scores = {title: figure for title, figure in curves.items() if title != "perplexity"}
    needle = next((maps[views.words(task)] for task in NEEDLES if views.words(task) in maps), None)
    values = next(iter(scores.values()), None), curves.get("perplexity"), needle, next(iter(needles.values()), None)
    return {name: figure for name, figure in zip(PICTURES, values, strict=True) if figure is not None}


def embedded(figure: Any) -> str:
    """A figure within the page: as SVG, or PNG where it has several panels. The same one gives the same bytes."""
    content = io.BytesIO()
    if len(figure.axes) > 1:
        figure.savefig(content, format="png", dpi=110)
        return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
    with matplotlib.rc_context({"svg.hashsalt": "kvjax"}):
        figure.savefig(content, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(content.getvalue()).decode()}"
