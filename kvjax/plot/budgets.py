"""Scores and losses against budgets."""

import math
import numbers
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvjax.analysis.curves import Curves
from kvjax.analysis.intervals import Interval
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
    if isinstance(curves, Curves):
        ylabel = loss if ylabel is None else ylabel
        curves = _of_curves(curves, loss)
    drawn = {name: _points(name, points) for name, points in curves.items()}
    if shares := _are_shares([b for points in curves.values() for b in points]):
        drawn = {name: points * np.array([[100], [1], [1], [1]]) for name, points in drawn.items()}
    crowded = len(drawn) > len(COLOURS) or _overlapping(list(drawn.values())) > _LEGIBLE
    split = crowded if several is None else several
    count = len(drawn) if split else min(len(drawn), 1)
    columns = columns_for(count) if split else 1
    rows = -(-count // max(columns, 1))
    size = (1.0 + 2.5 * columns, 0.8 + 2.1 * rows) if split else (7.5, 4.2)
    grid = panels(axes, count, columns=columns, size=size, sharex=True, sharey=True)
    ticks = _ticks([b for points in drawn.values() for b in points[0].tolist()])
    for i, panel in enumerate(grid):
        _draw_full(panel, full)
        for j, (name, points) in enumerate(drawn.items()):
            if split and i != j:
                panel.plot(points[0], points[1], color="0.82", linewidth=1.0, marker="o", markersize=2.5, zorder=1)
            else:
                _draw(panel, points, name, 0 if split else j, 1 if split else len(drawn))
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{t:.3g}" for t in ticks])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        if split:
            panel.set_title(wrapped(list(drawn)[i], 28, 2), fontsize="small")
        if axes is not None or i % columns == 0:
            panel.set_ylabel(ylabel or "")
        if axes is not None or i + columns >= count:
            panel.set_xlabel("budget, % of the prompt" if shares else "budget, tokens a kv head")
            panel.tick_params(labelbottom=True)
    if split and full is not None:
        at = {"xycoords": ("axes fraction", "data"), "xytext": (4, 2), "textcoords": "offset points"}
        grid[0].annotate("full cache", (0, _as_interval(full).mean), fontsize="x-small", color="0.35", **at)
    if not split:
        grid[0].legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure_of(grid[0])


def _as_interval(x: Interval | float) -> Interval:
    return x if isinstance(x, Interval) else Interval(x, x, x)


def _of_curves(curves: Curves, loss: str) -> dict[str, Any]:
    """A loss of every policy at every budget."""
    if named := [b for b in curves.budgets if not isinstance(b, numbers.Real)]:
        raise ValueError(f"{named[0]} is no number; measure curves at tokens (int) or shares (float)")
    each = zip(curves.policies, np.stack(curves[loss], -1).tolist(), strict=True)
    return {name: {b: Interval(*x) for b, x in zip(curves.budgets, row, strict=True)} for name, row in each}


def _points(name: str, points: Points) -> np.ndarray:
    """Budgets, means, lows and highs, "4 X", by budget; low = high = mean without an interval."""
    rows = []
    for budget, given in points.items():
        if isinstance(budget, bool) or not isinstance(budget, numbers.Real) or not 0 < budget < math.inf:
            raise ValueError(f"{name} has the budget {budget!r}, but it must be positive; give tokens or shares")
        mean, low, high = _as_interval(given)
        if not math.isfinite(mean):
            raise ValueError(f"{name} has {mean} at budget {budget}; leave out what is not finite")
        bounded = math.isfinite(low) and math.isfinite(high)  # a single prompt has an interval without bounds
        rows.append((budget, mean, low, high) if bounded else (budget, mean, mean, mean))
    if not rows:
        raise ValueError(f"{name} has no budgets; leave it out")
    return np.array(sorted(rows), np.float64).T


def _are_shares(budgets: Sequence[float]) -> bool:
    """Whether budgets are shares of the prompt rather than tokens.

    Raises:
      ValueError: some are the one, some the other.
    """
    tokens = [b for b in budgets if isinstance(b, numbers.Integral)]
    shares = [b for b in budgets if not isinstance(b, numbers.Integral)]
    if tokens and shares:
        raise ValueError(
            f"budgets of {tokens[0]} tokens and of a share {shares[0]} have no axis in common; give either of them"
        )
    return bool(shares)


def _overlapping(series: Sequence[np.ndarray]) -> int:
    """The most intervals at one budget that have a number in common."""
    bars = [(b, low, high) for points in series for b, _, low, high in points.T if low < high]
    return max((sum(b == c and x <= low <= y for c, x, y in bars) for b, low, _ in bars), default=0)


def _ticks(budgets: Sequence[float]) -> list[float]:
    """Budgets to name: those that most policies have, then the larger ones, none too near to another."""
    count, chosen = Counter(budgets), []
    for b in sorted(count, key=lambda b: (-count[b], -b)):
        if all(abs(math.log(b / other)) > math.log(1.35) for other in chosen):
            chosen.append(b)
    return sorted(chosen)


def _draw(panel: Axes, points: np.ndarray, name: str, i: int, count: int) -> None:
    """One policy's line and intervals; thinner, narrower and smaller than those before it."""
    budget, mean, low, high = points
    last = (count - 1 - i) / max(count - 1, 1)  # 1 for the first of several, 0 for the last
    error = None if np.array_equal(low, high) else [np.maximum(mean - low, 0), np.maximum(high - mean, 0)]
    how: dict[str, Any] = {
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
    panel.errorbar(budget, mean, yerr=error, label=wrapped(name, 28, 2), **how)


def _draw_full(panel: Axes, full: Interval | float | None) -> None:
    """The full cache: a dashed line, and a band for its interval."""
    if full is None:
        return
    mean, low, high = _as_interval(full)
    panel.axhline(mean, color="0.45", linestyle="--", linewidth=1.2, label="full cache", zorder=1)
    if low < high and math.isfinite(low) and math.isfinite(high):
        panel.axhspan(low, high, color="0.5", alpha=0.15, linewidth=0, zorder=0)
