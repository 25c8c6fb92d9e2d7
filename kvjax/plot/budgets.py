"""Scores and losses against budgets."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvjax.analysis import Curves, Interval
from kvjax.pallas_kernels.values import checked, flag, optional
from kvjax.plot.style import COLOURS, columns_for, figure_of, panels, style, wrapped

Points = Mapping[int | float, Interval | float]
"""A number, or a mean with its interval, at every budget: live tokens (int), or shares of the prompt (float)."""


_LEGIBLE = 3  # intervals over one another


def budget_curve(
    curves: Curves | Mapping[str, Points],
    *,
    loss: str = "kl",
    ylabel: str | None = None,
    full: Interval | float | None = None,
    several: bool | None = None,
    axes: Any = None,
) -> Figure:
    """Scores or losses of policies against their budgets, with intervals where there are any.

    Every point stands at its own budget. Intervals at the same budget lie over one another: those drawn first have the
    thickest bars and the widest caps, so that each can be told from those above it.

    Args:
      curves: what `analysis.curves` returns, or for every policy, by name, what it reaches at its budgets:
        `{"snapkv": {0.25: Interval(95.1, 92.7, 96.9), 0.5: 97.6}}`.
      loss: which loss of `Curves`.
      ylabel: what is measured.
      full: the full cache's number, a dashed line, and its interval, a band.
      several: a panel for every policy with the others in grey behind it, or all policies in one panel; if None,
        panels where there are more policies than colours, or more than three intervals overlap at one budget.
      axes: one of matplotlib's axes, or with panels as many as policies, in place of a new figure.

    Raises:
      ValueError: nothing to draw; budgets that are no positive numbers, or tokens beside shares; numbers that are not
        finite; a loss that there is not; other axes than panels.
    """
    several = checked(optional(flag), "several", several)
    if isinstance(curves, Curves):
        ylabel = loss if ylabel is None else ylabel
        series = _of_curves(curves, loss)
    else:
        series = dict(curves)
    drawn = {name: _points(name, points) for name, points in series.items()}
    budgets = [b for points in series.values() for b in points]
    shares = _are_shares(budgets)
    crowded = len(drawn) > len(COLOURS) or _overlapping(list(drawn.values())) > _LEGIBLE
    split = crowded if several is None else several
    count = len(drawn) if split else min(len(drawn), 1)
    columns = columns_for(count) if split else 1
    rows = -(-count // max(columns, 1))
    size = (1.0 + 2.5 * columns, 0.8 + 2.1 * rows) if split else (7.5, 4.2)
    grid = panels(axes, count, columns=columns, size=size, sharex=True, sharey=True)
    ticks = [(100 if shares else 1) * b for b in _ticks(list(series.values()))]
    for i, panel in enumerate(grid):
        _draw_full(panel, full)
        for j, (name, points) in enumerate(drawn.items()):
            here = points * np.array([[100 if shares else 1], [1], [1], [1]])
            if split and i != j:
                panel.plot(here[0], here[1], color="0.82", linewidth=1.0, marker="o", markersize=2.5, zorder=1)
            else:
                _draw(panel, here, name, 0 if split else j, 1 if split else len(drawn))
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{t:.3g}" for t in ticks])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        if split:
            panel.set_title(wrapped(list(drawn)[i], 28, 2), fontsize="small")
            if i == 0 and full is not None:
                mean = full.mean if isinstance(full, Interval) else full
                at = {"xycoords": ("axes fraction", "data"), "xytext": (4, 2), "textcoords": "offset points"}
                panel.annotate("full cache", (0, mean), fontsize="x-small", color="0.35", **at)
    label = "budget, % of the prompt" if shares else "budget, tokens a kv head"
    for i, panel in enumerate(grid):
        if axes is not None or i % columns == 0:
            panel.set_ylabel(ylabel or "")
        if axes is not None or i + columns >= count:
            panel.set_xlabel(label)
            panel.tick_params(labelbottom=True)
    if not split:
        grid[0].legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure_of(grid[0])


def _of_curves(curves: Curves, loss: str) -> dict[str, Any]:
    """A loss of every policy at every budget.

    Raises:
      ValueError: budgets that are no numbers.
    """
    if named := [b for b in curves.budgets if not isinstance(b, numbers.Real)]:
        raise ValueError(f"{named[0]} is no number; measure curves at tokens (int) or shares (float)")
    found = curves[loss]
    bounds = np.stack([found.mean, found.low, found.high], -1)
    return {
        name: {b: Interval(*map(float, one)) for b, one in zip(curves.budgets, each, strict=True)}
        for name, each in zip(curves.policies, bounds, strict=True)
    }


def _points(name: str, points: Points) -> np.ndarray:
    """Budgets, means, lows and highs, "4 X", by budget; low = high = mean without an interval."""
    rows = []
    for budget, value in points.items():
        if isinstance(budget, bool) or not isinstance(budget, numbers.Real) or not 0 < budget < math.inf:
            raise ValueError(f"{name} has the budget {budget!r}, but it must be positive; give tokens or shares")
        mean, low, high = value if isinstance(value, Interval) else (value, value, value)
        if not math.isfinite(mean):
            raise ValueError(f"{name} has {mean} at budget {budget}; leave out what is not finite")
        bounded = math.isfinite(low) and math.isfinite(high)  # a single prompt has an interval without bounds
        rows.append((budget, mean, low, high) if bounded else (budget, mean, mean, mean))
    if not rows:
        raise ValueError(f"{name} has no budgets; leave it out")
    return np.array(sorted(rows), np.float64).T


def _are_shares(budgets: Sequence[Any]) -> bool:
    """Whether budgets are shares of the prompt rather than tokens.

    Raises:
      ValueError: some are the one, some the other.
    """
    whole = [isinstance(b, numbers.Integral) for b in budgets]
    if any(whole) and not all(whole):
        one, other = budgets[whole.index(True)], budgets[whole.index(False)]
        raise ValueError(f"budgets of {one} tokens and of a share {other} have no axis in common; give either of them")
    return not all(whole)


def _overlapping(series: Sequence[np.ndarray]) -> int:
    """The most intervals at one budget that have a number in common."""
    at: dict[float, list[tuple[float, float]]] = {}
    for points in series:
        for budget, _, low, high in points.T:
            if low < high:
                at.setdefault(float(budget), []).append((low, high))
    depth = lambda spans, x: sum(bool(low <= x <= high) for low, high in spans)
    return max((depth(spans, low) for spans in at.values() for low, _ in spans), default=0)


def _ticks(series: Sequence[Points]) -> list[float]:
    """Budgets to name: those that most policies have, then the larger ones, none too near to another."""
    count: dict[float, int] = {}
    for points in series:
        for b in points:
            count[float(b)] = count.get(float(b), 0) + 1
    chosen: list[float] = []
    for b in sorted(count, key=lambda b: (-count[b], -b)):
        if all(abs(math.log(b / other)) > math.log(1.35) for other in chosen):
            chosen.append(b)
    return sorted(chosen)


def _draw(panel: Axes, points: np.ndarray, name: str, i: int, count: int) -> None:
    """One policy's line and intervals; thinner, narrower and smaller than those before it."""
    budget, mean, low, high = points
    last = (count - 1 - i) / max(count - 1, 1)  # 1 for the first of several, 0 for the last
    error = None if np.array_equal(low, high) else [np.maximum(mean - low, 0), np.maximum(high - mean, 0)]
    options: dict[str, Any] = {
        **style(i),
        "markersize": 4.5 + 4 * last,
        "elinewidth": 1.2 + 3.2 * last,
        "capsize": 2.5 + 5.5 * last,
        "capthick": 1.2,
        "linewidth": 1.5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
        "zorder": 2 + i / 100,
    }
    panel.errorbar(budget, mean, yerr=error, label=wrapped(name, 28, 2), **options)


def _draw_full(panel: Axes, full: Interval | float | None) -> None:
    """The full cache: a dashed line, and a band for its interval."""
    if full is None:
        return
    mean, low, high = full if isinstance(full, Interval) else (full, full, full)
    panel.axhline(mean, color="0.45", linestyle="--", linewidth=1.2, label="full cache", zorder=1)
    if low < high:
        panel.axhspan(low, high, color="0.5", alpha=0.15, linewidth=0, zorder=0)
