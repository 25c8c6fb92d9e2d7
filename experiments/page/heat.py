"""Where in the prompt something is found: depth against length."""

import dataclasses
from collections.abc import Sequence

import matplotlib
import numpy as np

from kvjax.experiments.page.cells import AVERAGE, Cell
from kvjax.experiments.page.lines import Line

MOST = 32
"""Tasks whose lengths or depths have more values than this are not drawn."""
SHADES = 10


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """The mean score of one number at every depth and length.

    Attributes:
      cell: the number.
      depths, lengths: of rows and columns.
      values: (mean score, count) for every depth and length; None where there was no row.
    """

    cell: Cell
    depths: tuple[float, ...]
    lengths: tuple[float, ...]
    values: tuple[tuple[tuple[float, int] | None, ...], ...]


def heat_maps(cells: Sequence[Cell]) -> list[HeatMap]:
    """The maps of all numbers whose rows state a depth and a length, and of both more than one."""
    made = []
    for cell in cells:
        if cell.kind != "score" or cell.task == AVERAGE or not all(_placed(line) for line in cell.lines):
            continue
        by_place: dict[tuple[float, float], list[float]] = {}
        for line in cell.lines:
            by_place.setdefault((line.sample["depth"], line.sample["length"]), []).append(line.value)
        depths, lengths = (tuple(sorted({place[i] for place in by_place})) for i in (0, 1))
        if min(len(depths), len(lengths)) < 2 or max(len(depths), len(lengths)) > MOST:
            continue
        found = lambda d, n, of=by_place: (float(np.mean(of[d, n])), len(of[d, n])) if (d, n) in of else None
        made.append(HeatMap(cell, depths, lengths, tuple(tuple(found(d, n) for n in lengths) for d in depths)))
    return made


def _placed(line: Line) -> bool:
    return all(isinstance(line.sample.get(key), int | float) for key in ("depth", "length"))


def shade(value: float) -> int:
    """The class of a score's colour."""
    return round(value * SHADES)


def shades() -> list[tuple[str, str]]:
    """(background, text) of every shade: cividis, and of black and white the one that stands out more."""
    colours = matplotlib.colormaps["cividis"](np.linspace(0, 1, SHADES + 1))[:, :3]
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    luminance = linear @ [0.2126, 0.7152, 0.0722]  # as contrast is defined by WCAG 2
    return [
        (matplotlib.colors.to_hex(colour), "#fff" if 1.05 / (y + 0.05) > (y + 0.05) / 0.05 else "#000")
        for colour, y in zip(colours, luminance, strict=True)
    ]
