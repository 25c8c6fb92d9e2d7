"""Which tokens of a prompt policies keep, and by which scores."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Array, Bool, Float, Int
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.transforms import offset_copy

from kvjax.contract import Amount, Decision, Size
from kvjax.contract.checks import whole
from kvjax.plot.style import COLOURS, figure_of, panels, wrapped
from kvjax.run.state import State
from kvjax.storage.protocol import Storage

Held = Bool[Array, "K T"] | Bool[np.ndarray, "K T"] | Int[Array, "K S"] | Int[np.ndarray, "K S"]
"""One layer of one sequence: a mask of the prompt's tokens, or the positions that are held, -1 in dead slots."""

OneLayer = Decision | Storage | Held
Kept = State | OneLayer | Sequence[OneLayer] | Bool[Array, "L K T"] | Bool[np.ndarray, "L K T"]
"""What a policy keeps: a state after the prompt, or for each layer a decision, a stored layer or an array."""

Markers = Mapping[str, int | Sequence[int]]
"""Positions to point at, such as those of a needle, by name."""

_BLUE, _GREY, _MARKED = COLOURS[0], "0.65", COLOURS[1:5]


def kept_positions(
    kept: Kept | Mapping[str, Kept],
    *,
    length: Size | None = None,
    markers: Markers | None = None,
    layers: Sequence[int] | None = None,
    row: Amount = 0,
    axes: Any = None,
) -> Figure:
    """Which tokens of one prompt each policy holds: a row for every head, by layer, with the share that is held.

    Args:
      kept: what one policy keeps, or what several do, by name: a state (`kvjax.prefill`), layers (`Reading.after`, or
        one of `kvjax.evict_layer`), decisions (`Reading.decisions`), or for every layer an array of the heads'
        positions or a mask.
      length: tokens of the prompt; the largest of those that `kept` tells of if None.
      markers: positions to point at, by name: `{"needle": range(412, 424)}`.
      layers: which layers, all of them if None.
      row: the sequence of the batch, for all but arrays.
      axes: as many of matplotlib's axes as policies, in place of a new figure.

    Raises:
      ValueError: nothing to draw; what is none of these; layers or a row that are not there; markers or tokens beyond
        the prompt; other axes than policies.
    """
    named = kept if isinstance(kept, Mapping) else {"": kept}
    found = {name: _masks(name, one, row) for name, one in named.items()}
    last = max((n for _, n in found.values()), default=1)
    end = last if length is None else length
    if end < last:
        raise ValueError(f"length={length}, but position {last - 1} is held; give the prompt's own length")
    spans = _spans(markers, end)
    chosen = {name: _chosen(masks, layers) for name, (masks, _) in found.items()}

    rows = max((sum(map(len, masks.values())) for masks in chosen.values()), default=0)
    height = min(max(0.45 + 0.035 * rows, 0.95), 3.5)
    grid = panels(axes, len(chosen), size=(9.0, 0.8 + height * len(chosen)), sharex=True)
    sharp = end <= 1200  # more positions than pixels would lose some
    how: dict[str, Any] = {"cmap": ListedColormap(["white", _BLUE]) if sharp else "Blues", "vmin": 0, "vmax": 1}
    for panel, (name, masks) in zip(grid, chosen.items(), strict=True):
        image = np.concatenate([np.pad(m[:, :end], ((0, 0), (0, max(0, end - m.shape[1])))) for m in masks.values()])
        panel.imshow(image, aspect="auto", interpolation="nearest" if sharp else "antialiased", **how)
        _number_layers(panel, {i: len(m) for i, m in masks.items()})
        panel.set_ylabel(wrapped(name), rotation=0, ha="right", va="center", fontsize="small")
        share = f"{100 * image.mean():.3g} %"
        panel.text(1.008, 0.5, share, transform=panel.transAxes, va="center", fontsize="x-small", color="0.35")
        panel.tick_params(axis="x", labelsize="small")
        _point(panel, spans)
    for word, at, align in (("layer", 0, "right"), ("held", 1, "left")):
        to = {"xycoords": "axes fraction", "textcoords": "offset points", "fontsize": "x-small", "color": "0.35"}
        grid[0].annotate(word, (at, 1), xytext=(8 * at - 4, 4), ha=align, va="bottom", **to)
    _legend(grid[0], [Patch(color=_BLUE, label="held")], spans)
    shown = "head" if rows == 1 else "kv heads"
    grid[-1].set_xlabel(f"position in the prompt, tokens (rows are {shown})", fontsize="small")
    return figure_of(grid[0])


def scores(
    chosen: Decision | Sequence[Decision],
    *,
    markers: Markers | None = None,
    layers: Sequence[int] | None = None,
    head: Amount | None = None,
    row: Amount = 0,
    yscale: Literal["linear", "log", "symlog"] | None = None,
    axes: Any = None,
) -> Figure:
    """The scores that one policy ranks the tokens of one prompt by, a panel for every layer; what stays is blue.

    Blue below grey is protected whatever its score, or belongs to a head with a larger budget or smaller scores. What
    stays without a finite score is a triangle at the panel's edge.

    Args:
      chosen: the decisions of all layers (`Reading.decisions`), or one.
      markers: positions to point at, by name.
      layers: which layers, all of them if None.
      head: which head; all of them if None.
      row: the sequence of the batch.
      yscale: the axis of scores; logarithmic if None and they are positive and far apart.
      axes: as many of matplotlib's axes as layers, in place of a new figure.

    Raises:
      ValueError: what is no decision about a prompt; layers, a head or a row that are not there; markers beyond the
        prompt; other axes than layers.
    """
    if yscale not in (None, "linear", "log", "symlog"):
        raise ValueError(f"yscale={yscale!r} is not one of 'linear', 'log' and 'symlog'")
    decisions = [chosen] if isinstance(chosen, Decision) else list(chosen)
    if wrong := [x for x in decisions if not isinstance(x, Decision)]:
        raise ValueError(f"scores are those of decisions, not of {type(wrong[0]).__name__}, as Reading.decisions gives")
    drawn = _chosen([_row(x, row) for x in decisions], layers)
    spans = _spans(markers, max((score.shape[1] for score, _ in drawn.values()), default=1))
    grid = panels(axes, len(drawn), size=(9.0, 0.9 + 1.6 * len(drawn)), sharex=True)
    for panel, (i, (score, keep)) in zip(grid, drawn.items(), strict=True):
        if head is not None:
            at = whole("head", head, 0, len(score) - 1, f"there are {len(score)} heads")
            score, keep = score[at : at + 1], keep[at : at + 1]
        places = np.broadcast_to(np.arange(score.shape[1]), score.shape)
        for mask, colour, order in ((~keep, _GREY, 1), (keep, _BLUE, 2)):
            shown, size = mask & np.isfinite(score), 9.0 if score.size <= 600 else 3.0
            panel.scatter(places[shown], score[shown], s=size, color=colour, linewidths=0, zorder=order)
        for infinite, edge, marker in ((np.isposinf(score), 1.0, "^"), (np.isneginf(score), 0.0, "v")):
            if len(x := np.unique(places[keep & infinite])):
                to = {"transform": panel.get_xaxis_transform(), "clip_on": False}
                panel.plot(x, np.full(len(x), edge), marker, color=_BLUE, markersize=3, **to)
        x = score[np.isfinite(score)]
        far_apart = len(x) and x.min() > 0 and x.max() > 20 * np.median(x)
        panel.set_yscale(yscale or ("log" if far_apart else "linear"))
        panel.set_ylabel(f"layer {i}" if len(drawn) > 1 else "score")
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.01)
        _point(panel, spans)
    dot: dict[str, Any] = {"marker": "o", "linestyle": "", "markersize": 4}
    words = ((_BLUE, "stays"), (_GREY, "goes"))
    _legend(grid[0], [Line2D([], [], color=c, label=label, **dot) for c, label in words], spans)
    which = "all kv heads" if head is None else f"head {head}"
    grid[-1].set_xlabel(f"position in the prompt, tokens ({'scores of ' if len(drawn) > 1 else ''}{which})")
    return figure_of(grid[0])


# ------------------------------------------------------------------------------------------- what is given, as masks


def _masks(name: str, kept: Any, row: int) -> tuple[list[Bool[np.ndarray, "K T"]], int]:
    """For every layer, the tokens that each head holds, and the tokens that were read, as far as it is told."""
    end, layers = 1, kept
    if isinstance(kept, State):
        end, layers = int(kept.length[_known(row, kept.length)]), kept.layers
    elif isinstance(kept, Decision | Storage):
        layers = [kept]
    elif not hasattr(kept, "__iter__") or getattr(kept, "ndim", 1) == 0:
        raise ValueError(
            f"what {name or 'the policy'} keeps is a {type(kept).__name__}; give a state, or for each layer a "
            "decision, a stored layer or an array"
        )
    masks = []
    for layer in layers:
        if isinstance(layer, Decision):
            masks.append(_row(layer, row)[1])
        elif isinstance(layer, Storage):
            masks.append(_of_positions(np.asarray(layer.head_pos[_known(row, layer.head_pos)])))
        else:
            masks.append(_of_array(f"what {name or 'a layer'} keeps", np.asarray(layer)))
        end = max(end, masks[-1].shape[1])
    return masks, end


def _known(row: int, batch: Array) -> int:
    return whole("row", row, 0, len(batch) - 1, f"there are {len(batch)} sequences")


def _row(decision: Decision, row: int) -> tuple[Float[np.ndarray, "K T"], Bool[np.ndarray, "K T"]]:
    """The scores of one sequence and what it keeps, without the padding on its left."""
    at = _known(row, decision.keep)
    score, keep = np.asarray(decision.score[at], np.float64), np.asarray(decision.keep[at])
    there = np.nonzero((keep | ~np.isneginf(score)).any(0))[0]
    first = int(there[0]) if len(there) else 0
    return score[:, first:], keep[:, first:]


def _of_array(name: str, held: np.ndarray) -> Bool[np.ndarray, "K T"]:
    if held.ndim != 2 or held.dtype.kind not in "bi":
        raise ValueError(
            f"{name} must be a mask (heads, tokens) or integers (heads, slots); got {held.dtype} of shape {held.shape}"
        )
    return held if held.dtype == bool else _of_positions(held)


def _of_positions(held: Int[np.ndarray, "K S"]) -> Bool[np.ndarray, "K T"]:
    return (held[:, :, None] == np.arange(1 + max(int(held.max(initial=0)), 0))).any(1)


def _chosen(found: Sequence[Any], layers: Sequence[int] | None) -> dict[int, Any]:
    """Entries of all layers, or of some, by number."""
    last, why = len(found) - 1, f"there are {len(found)} layers"
    wanted = range(len(found)) if layers is None else [whole("layers", i, 0, last, why) for i in layers]
    if not wanted:
        raise ValueError(f"there is nothing to draw: {len(wanted)} of {len(found)} layers; give at least one")
    return {i: found[i] for i in wanted}


# ------------------------------------------------------------------------------------------- what is drawn around them


def _number_layers(panel: Axes, heads: Mapping[int, int]) -> None:
    """Lines between layers, and their numbers at most eight times."""
    edges = np.cumsum([0, *heads.values()])
    for edge in edges[1:-1]:
        panel.axhline(edge - 0.5, color="0.6", linewidth=0.6 if len(heads) <= 16 else 0.25)
    step = -(-len(heads) // 8)
    middle = (edges[:-1] + edges[1:] - 1) / 2
    panel.set_yticks(middle[::step], [str(i) for i in list(heads)[::step]], fontsize="x-small")
    panel.tick_params(axis="y", length=0)


def _spans(markers: Markers | None, end: int) -> dict[str, list[tuple[int, int]]]:
    """The runs of consecutive positions under every name, as (first, last).

    Raises:
      ValueError: what is no mapping of names, or positions beyond the prompt.
    """
    if not isinstance(markers, Mapping | None):
        raise ValueError(f"markers={markers!r}: must be positions by name, such as {{'needle': range(412, 424)}}")
    spans = {}
    for name, given in (markers or {}).items():
        why = f"the prompt has {end} positions"
        places = [whole(f"markers[{name!r}]", i, 0, end - 1, why) for i in np.atleast_1d(np.asarray(given)).tolist()]
        runs = np.split(np.unique(places), np.nonzero(np.diff(np.unique(places)) > 1)[0] + 1)
        spans[name] = [(int(run[0]), int(run[-1])) for run in runs if len(run)]
    return spans


def _point(panel: Axes, spans: Mapping[str, list[tuple[int, int]]]) -> None:
    """Shades the marked positions, and points at them from above."""
    above = offset_copy(panel.get_xaxis_transform(), figure_of(panel), y=3.5, units="points")
    for i, runs in enumerate(spans.values()):
        colour = _MARKED[i % len(_MARKED)]
        for first, last in runs:
            panel.axvspan(first - 0.5, last + 0.5, facecolor=(colour, 0.18), edgecolor=colour, linewidth=0.8)
            panel.plot([(first + last) / 2], [1.0], "v", color=colour, markersize=5, transform=above, clip_on=False)


def _legend(panel: Axes, handles: list[Any], spans: Mapping[str, object]) -> None:
    """Draws the legend above the panel."""
    handles = [
        *handles,
        *(Line2D([], [], color=_MARKED[i % len(_MARKED)], marker="v", label=name) for i, name in enumerate(spans)),
    ]
    how: dict[str, Any] = {"frameon": False, "fontsize": "small", "borderaxespad": 0.7, "handlelength": 1.2}
    panel.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles), **how)
