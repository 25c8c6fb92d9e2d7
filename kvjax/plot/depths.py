"""Where in a prompt a needle is found, by its depth and the prompt's length."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvjax.pallas_kernels.values import checked, optional, whole
from kvjax.plot.style import columns_for, figure_of, panels, wrapped

Sample = Mapping[str, Any]
"""A needle: its "depth" in [0, 1], the prompt's "length" in tokens, and the "score" in [0, 1]; what else is there is
not read, so that lines of `samples.jsonl` do."""


def depth_against_length(
    samples: Mapping[str, Sequence[Sample]],
    *,
    depths: int | None = None,
    lengths: int | None = None,
    columns: int | None = None,
    axes: Any = None,
) -> Figure:
    """Which share of needles each policy finds, a map for every policy, with how many of how many in every cell.

    Args:
      samples: the needles of every policy, by name.
      depths: rows of a map: bands of depth of one width; every depth that occurs has its own if None.
      lengths: columns of a map: bands of neighbouring lengths that occur, as many in each; all of them if None.
      columns: maps in a row, as many as leave the fewest places empty if None.
      axes: as many of matplotlib's axes as policies, in place of a new figure.

    Raises:
      ValueError: nothing to draw; needles without a depth, length or score, or beyond their range; other axes than
        policies.
    """
    checked(optional(whole(1)), "depths", depths), checked(optional(whole(1)), "lengths", lengths)
    columns = checked(optional(whole(1)), "columns", columns)
    tables = {name: _table(name, rows) for name, rows in samples.items()}
    every = np.concatenate([*tables.values(), np.zeros((0, 3))])
    rows, bands = _depth_bands(every[:, 0], depths), _length_bands(every[:, 1], lengths)
    across = columns_for(len(tables)) if columns is None else min(columns, len(tables))
    down = -(-len(tables) // max(across, 1))
    wide = max(1.7, 0.4 + 0.45 * len(bands.names))
    tall = max(1.5, 0.6 + 0.27 * len(rows.names))
    grid = panels(
        axes, len(tables), columns=across, size=(1.4 + wide * across, 0.7 + tall * down), sharex=True, sharey=True
    )
    cmap = "cividis"
    for i, (panel, (name, table)) in enumerate(zip(grid, tables.items(), strict=True)):
        cells = [[table[deep & long, 2] for long in bands.of(table[:, 1])] for deep in rows.of(table[:, 0])]
        shares = np.array([[100 * c.mean() if len(c) else np.nan for c in line] for line in cells])
        panel.set_facecolor("0.92")
        panel.imshow(shares, vmin=0, vmax=100, cmap=cmap, aspect="auto")
        _count(panel, cells)
        for edge in np.arange(1, len(rows.names)) - 0.5:
            panel.axhline(edge, color="white", linewidth=0.5)
        for edge in np.arange(1, len(bands.names)) - 0.5:
            panel.axvline(edge, color="white", linewidth=0.5)
        panel.set_xticks(range(len(bands.names)), bands.names, fontsize="small")
        panel.set_yticks(range(len(rows.names)), rows.names, fontsize="small")
        panel.set_title(wrapped(name, int(10 * wide), 2), fontsize="medium")
        if axes is not None or i % across == 0:
            panel.set_ylabel("depth, %", fontsize="small")
        if axes is not None or i + across >= len(tables):
            panel.set_xlabel("length, tokens", fontsize="small")
            panel.tick_params(labelbottom=True)
    figure_of(grid[0]).colorbar(grid[0].images[0], ax=grid, label="found, %", aspect=30, shrink=0.9)
    return figure_of(grid[0])


def _table(name: str, samples: Sequence[Sample]) -> Float[np.ndarray, "X 3"]:
    """Depth, length and score of every needle."""
    try:
        table = np.array([[s[key] for key in ("depth", "length", "score")] for s in samples], np.float64)
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"the needles of {name} need numbers under 'depth', 'length' and 'score' ({e!r})") from e
    if not len(table):
        raise ValueError(f"{name} has no needles; leave it out")
    for column, key, most in ((0, "depth", 1.0), (1, "length", np.inf), (2, "score", 1.0)):
        values = table[:, column]
        if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= most):
            bad = values[~(np.isfinite(values) & (values >= 0) & (values <= most))][0]
            raise ValueError(f"a needle of {name} has {key} {bad:g}, but it lies in [0, {most:g}]")
    return table


@dataclasses.dataclass(frozen=True)
class _Bands:
    """Rows or columns of a map: where each but the first begins, and names."""

    starts: Float[np.ndarray, "edges"]
    names: list[str]

    def of(self, x: Float[np.ndarray, "X"]) -> list[Bool[np.ndarray, "X"]]:
        """Which numbers lie in each."""
        found = np.searchsorted(self.starts, x, side="right")
        return [found == i for i in range(len(self.names))]


def _depth_bands(depths: Float[np.ndarray, "X"], count: int | None) -> _Bands:
    """Bands of one width, or one for every depth."""
    if count is None:
        found = np.unique(np.round(depths, 4))
        return _Bands((found[1:] + found[:-1]) / 2, [f"{100 * d:.3g}" for d in found])
    edges = np.linspace(0, 1, count + 1)
    return _Bands(edges[1:-1], [f"{100 * a:.0f} to {100 * b:.0f}" for a, b in itertools.pairwise(edges)])


def _length_bands(lengths: Float[np.ndarray, "X"], count: int | None) -> _Bands:
    """Bands of as many lengths that occur, or one for each."""
    found = np.unique(lengths)
    groups = [g for g in np.array_split(found, min(len(found), count or len(found)) or 1) if len(g)]
    names = [f"{g[0]:.0f}" if len(g) == 1 else f"{g[0]:.0f} to\n{g[-1]:.0f}" for g in groups]
    return _Bands(np.array([g[0] for g in groups[1:]]), names)


def _count(panel: Axes, cells: Sequence[Sequence[Float[np.ndarray, "_"]]]) -> None:
    """How many needles were found of how many, in every cell."""
    for i, line in enumerate(cells):
        for j, cell in enumerate(line):
            if len(cell):
                colour = "white" if cell.mean() < 0.5 else "black"
                panel.text(
                    j, i, f"{cell.sum():.3g}/{len(cell)}", ha="center", va="center", color=colour, fontsize="x-small"
                )
