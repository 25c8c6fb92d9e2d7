"""The style of all pictures: colours, the axes that are drawn in, and names that fit beside them."""

import textwrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by all common kinds of colour vision. Markers differ as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = "osD^vPX*<>hp"
LINES = ("-", "--", ":")


def style(i: int) -> dict[str, Any]:
    """Colour, marker and line style of the i-th series."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": LINES[i // len(COLOURS) % len(LINES)],
        "markersize": 5,
    }


def panels(axes: Any, count: int, *, columns: int = 1, size: tuple[float, float], **options: Any) -> list[Axes]:
    """The axes to draw `count` panels in: those given, or those of a new figure, row by row.

    Args:
      axes: one or several of matplotlib's axes, or None.
      count: panels that are needed.
      columns: panels in a row of a new figure.
      size: inches of a new figure.
      **options: for `Figure.subplots`.

    Raises:
      ValueError: nothing to draw, or other axes than that many.
    """
    if not count:
        raise ValueError("there is nothing to draw; give at least one policy")
    if axes is None:
        figure = Figure(figsize=size, layout="constrained", dpi=100)
        grid = figure.subplots(-(-count // columns), columns, squeeze=False, **options).ravel()
        for spare in grid[count:]:
            spare.remove()
        return list(grid[:count])
    given = [axes] if isinstance(axes, Axes) else list(np.ravel(axes))
    if len(given) != count or not all(isinstance(each, Axes) for each in given):
        raise ValueError(f"axes has {len(given)} elements, but {count} panels are drawn; give one of matplotlib's each")
    return given


def columns_for(count: int, most: int = 5) -> int:
    """How many panels stand in a row: what leaves the fewest places of the last row empty."""
    return min(range(min(most, count), min(count, 2), -1), key=lambda n: -count % n, default=max(count, 1))


def figure_of(axes: Axes) -> Figure:
    """The figure that axes belong to."""
    figure = axes.get_figure(root=True)
    if figure is None:
        raise ValueError("axes belong to no figure; make them with figure.subplots()")
    return figure


def wrapped(name: str, width: int = 16, lines: int = 3) -> str:
    """A name in lines of at most `width` letters, broken between words where it can be, and cut off after the last."""
    found = textwrap.wrap(name, width)
    if len(found) > lines:
        found = [*found[: lines - 1], found[lines - 1][: width - 1] + "…"]
    return "\n".join(found)
