"""What all figures share: prompts, arrays, intervals, axes, and titles that say what is to be seen."""

import dataclasses
import textwrap
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from jaxtyping import Float, Int, PyTree
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvjax import analysis
from kvjax.plot.style import style as style

Arrays = types.SimpleNamespace
"""What a figure is drawn from, by name; the function that computes it says what each array is."""


class Prompts(NamedTuple):
    """What a figure is computed from.

    Attributes:
      model, params: the model.
      tokens: prompts of one length.
    """

    model: Any
    params: PyTree[Any]
    tokens: Int[np.ndarray, "B T"]

    @property
    def length(self) -> int:
        """Tokens of a prompt."""
        return self.tokens.shape[1]


@dataclasses.dataclass(frozen=True)
class PaperFigure:
    """One figure of a paper.

    Attributes:
      data: computes the arrays from `Prompts` and options of its own.
      plot: draws what `data` returned.
      prompts, length: the size that it is made for.
    """

    data: Callable[..., Arrays]
    plot: Callable[[Arrays], Figure]
    prompts: int
    length: int

    @property
    def title(self) -> str:
        """What it shows, and whose it is: the first line of the documentation of `data`."""
        return (self.data.__doc__ or "").splitlines()[0]


def budgets_of(shares: Sequence[float | int], length: int, most: int) -> Int[np.ndarray, "R"]:
    """Shares of a prompt of `length` tokens, in whole tokens; those that are tokens already (int) stay.

    Raises:
      ValueError: a share that leaves no token, or more than `most`.
    """
    budgets = np.array([share if isinstance(share, int) else int(share * length + 1e-9) for share in shares])
    if budgets.min() < 1 or budgets.max() > most:
        raise ValueError(f"budgets of {budgets.tolist()} tokens must lie between 1 and {most}; change {tuple(shares)}")
    return budgets


def interval(x: Float[np.ndarray, "*rest B"]) -> tuple[Float[np.ndarray, "*rest"], Float[np.ndarray, "*rest"]]:
    """The mean over the last axis and half its Student-t interval of 95 %; no interval (0) for a single prompt."""
    mean, _, high = analysis.interval(x)
    return mean, np.where(np.isfinite(high), high - mean, 0.0)


def canvas(columns: int = 1, rows: int = 1, *, width: float = 5.2, height: float = 3.9, **options: Any) -> Any:
    """A figure and its axes "rows columns", without pyplot's global state."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained", dpi=150)
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in grid.flat:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid


def message(figure: Figure, text: str, source: str) -> Figure:
    """The title, which says what is to be seen, and where the figure comes from; lines are those that fit."""
    wide = figure.get_figwidth()
    fit = lambda text, per_inch: "\n".join(textwrap.fill(line, int(per_inch * wide)) for line in text.split("\n"))
    figure.suptitle(fit(text, 10), fontsize="large", fontweight="bold")
    figure.supxlabel(fit(source, 15), fontsize="x-small", color="0.4", x=0.99, ha="right")
    return figure


def draw_layers(axes: Axes, x: np.ndarray, y: Float[np.ndarray, "L X"], **options: Any) -> None:
    """A line for every layer, and which is which: a legend for up to 8, else the first and the last are named.

    Colours go from the first layer (dark) to the last (light), apart for all kinds of colour vision.
    """
    colours = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.88, len(y)))
    for i, (line, colour) in enumerate(zip(y, colours, strict=True)):
        named = len(y) <= 8 or i in (0, len(y) - 1)
        axes.plot(x, line, color=colour, linewidth=1.8, label=f"layer {i}" if named else None, **options)


def percent(x: float) -> str:
    """A share, rounded as a title wants it."""
    return f"{100 * x:.0f} %" if x >= 0.0995 else f"{100 * x:.2g} %"


def by_slice(x: np.ndarray, num: int) -> Float[np.ndarray, "*rest X"]:
    """The mean over `num` consecutive slices of the last axis, equal up to one token.

    Raises:
      ValueError: more slices than tokens.
    """
    if not 1 <= num <= x.shape[-1]:
        raise ValueError(f"{x.shape[-1]} tokens cannot be cut into {num} slices; choose 1 to {x.shape[-1]}")
    return np.stack([part.mean(-1) for part in np.array_split(x.astype(np.float64), num, axis=-1)], axis=-1)


def smooth(y: Float[np.ndarray, "T"], width: int = 17) -> Float[np.ndarray, "T"]:
    """A moving average, for eyes only; narrower at the ends."""
    total = np.concatenate([[0.0], np.cumsum(y)])
    at = np.arange(len(y))
    half = np.minimum(np.minimum(at, len(y) - 1 - at), width // 2)
    return (total[at + half + 1] - total[at - half]) / (2 * half + 1)
