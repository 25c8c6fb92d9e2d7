"""Where in a prompt a needle is found, by its depth and the prompt's length."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from kvjax.contract import Size
from kvjax.plot.style import columns_for, figure_of, panels, wrapped

Sample = Mapping[str, Any]
"""A needle: its "depth" in [0, 1], the prompt's "length" in tokens, and the "score" in [0, 1]; other keys are ignored,
so that lines of `samples.jsonl` do."""


def depth_against_length(
    samples: Mapping[str, Sequence[Sample]],
    *,
    depths: Size | None = None,
    lengths: Size | None = None,
    columns: Size | None = None,
    axes: Any = None,
) -> Figure:
    """Which share of needles each policy finds, a map for every policy, with how many of how many in every cell.

    Args:
      samples: the needles of every policy, by name.
      depths: rows of a map: bands of depth of one width; every depth that occurs has its own if None.
      lengths: columns of a map: bands of neighbouring lengths that occur, as many in each; all of them if None.
      columns: maps in a row; if None, the number with the fewest empty subplots.
      axes: as many of matplotlib's axes as policies, in place of a new figure.

    Raises:
      ValueError: nothing to draw; needles without a depth, length or score, or beyond their range; other axes than
        policies.
    """
    tables = {name: _table(name, rows) for name, rows in samples.items()}
    every = np.concatenate([*tables.values(), np.zeros((0, 3))])
    (deep, rows), (long, bands) = _depth_bands(every[:, 0], depths), _length_bands(every[:, 1], lengths)
    across = columns_for(len(tables)) if columns is None else min(columns, len(tables))
    down = -(-len(tables) // max(across, 1))
    wide, tall = max(1.7, 0.4 + 0.45 * len(bands)), max(1.5, 0.6 + 0.27 * len(rows))
    size = 1.4 + wide * across, 0.7 + tall * down
    grid = panels(axes, len(tables), columns=across, size=size, sharex=True, sharey=True)
    for i, (panel, (name, table)) in enumerate(zip(grid, tables.items(), strict=True)):
        at = np.searchsorted(deep, table[:, 0], side="right"), np.searchsorted(long, table[:, 1], side="right")
        found, count = np.zeros((2, len(rows), len(bands)))
        np.add.at(found, at, table[:, 2])
        np.add.at(count, at, 1)
        shares = 100 * np.divide(found, count, out=np.full(found.shape, np.nan), where=count > 0)
        panel.set_facecolor("0.92")
        panel.imshow(shares, vmin=0, vmax=100, cmap="cividis", aspect="auto")
        for j, k in zip(*np.nonzero(count), strict=True):
            colour = "white" if shares[j, k] < 50 else "black"
            text = f"{found[j, k]:.3g}/{count[j, k]:.0f}"
            panel.text(k, j, text, ha="center", va="center", color=colour, fontsize="x-small")
        panel.set_xticks(range(len(bands)), bands, fontsize="small")
        panel.set_yticks(range(len(rows)), rows, fontsize="small")
        panel.set_xticks(np.arange(1, len(bands)) - 0.5, minor=True)
        panel.set_yticks(np.arange(1, len(rows)) - 0.5, minor=True)
        panel.grid(which="minor", color="white", linewidth=0.5)
        panel.tick_params(which="minor", length=0)
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
    for values, key, most in zip(table.T, ("depth", "length", "score"), (1.0, np.inf, 1.0), strict=True):
        if len(bad := values[~(np.isfinite(values) & (values >= 0) & (values <= most))]):
            raise ValueError(f"a needle of {name} has {key} {bad[0]:g}, but it lies in [0, {most:g}]")
    return table


def _depth_bands(depths: Float[np.ndarray, "X"], count: int | None) -> tuple[np.ndarray, list[str]]:
    """Bands of one width, or one for every depth: where each but the first begins, and their names."""
    if count is None:
        found = np.unique(np.round(depths, 4))
        return (found[1:] + found[:-1]) / 2, [f"{100 * d:.3g}" for d in found]
    edges = np.linspace(0, 1, count + 1)
    return edges[1:-1], [f"{100 * a:.0f} to {100 * b:.0f}" for a, b in itertools.pairwise(edges)]


def _length_bands(lengths: Float[np.ndarray, "X"], count: int | None) -> tuple[np.ndarray, list[str]]:
    """Bands of as many lengths that occur, or one for each, in the same form."""
    found = np.unique(lengths)
    groups = [g for g in np.array_split(found, min(len(found), count or len(found)) or 1) if len(g)]
    names = [f"{g[0]:.0f}" if len(g) == 1 else f"{g[0]:.0f} to\n{g[-1]:.0f}" for g in groups]
    return np.array([g[0] for g in groups[1:]]), names
