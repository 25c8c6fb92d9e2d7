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

from kvjax.cache.state import EMPTY, KVState
from kvjax.pallas_kernels.values import as_numpy, check_array, checked, each, one_of, optional, whole
from kvjax.plot.style import COLOURS, figure_of, panels, wrapped
from kvjax.scoring.select import Selection

Held = Bool[Array, "K T"] | Bool[np.ndarray, "K T"] | Int[Array, "K S"] | Int[np.ndarray, "K S"]
"""One layer of one sequence: a mask of the prompt's tokens, or the positions that are held, `kvjax.EMPTY` elsewhere."""

Kept = KVState | Selection | Sequence[Selection] | Sequence[Held] | Bool[Array, "L K T"] | Bool[np.ndarray, "L K T"]
"""What a policy keeps: a state after the prompt, selections or arrays, one for each layer."""

Markers = Mapping[str, int | Sequence[int]]
"""Positions to point at, such as those of a needle, by name."""

_BLUE, _GREY = COLOURS[0], "0.65"
_MARKED = (COLOURS[1], COLOURS[2], COLOURS[3], COLOURS[4])


def kept_positions(
    kept: Kept | Mapping[str, Kept],
    *,
    length: int | None = None,
    markers: Markers | None = None,
    layers: Sequence[int] | None = None,
    row: int = 0,
    axes: Any = None,
) -> Figure:
    """Which tokens of one prompt each policy holds: a row for every head, by layer, with the share that is held.

    Args:
      kept: what one policy keeps, or what several do, by name: a state (`kvjax.prefill`), selections of all layers
        (`analysis.decisions`, or one of `kvjax.evict_layer`), or for every layer an array of the heads' positions or a
        mask.
      length: tokens of the prompt; the largest of those that `kept` tells of if None.
      markers: positions to point at, by name: `{"needle": range(412, 424)}`.
      layers: which layers, all of them if None.
      row: the sequence of the batch, for states and selections.
      axes: as many of matplotlib's axes as policies, in place of a new figure.

    Raises:
      ValueError: nothing to draw; what is none of these; layers or a row that are not there; markers or tokens beyond
        the prompt; other axes than policies.
    """
    row = checked(whole(0), "row", row)
    length = checked(optional(whole(1)), "length", length)
    named = dict(kept) if isinstance(kept, Mapping) else {"": kept}
    found = {name: [_mask(name, layer) for layer in _layers_of(name, one, row)] for name, one in named.items()}
    ends = [_length(one, row) for one in named.values()]
    ends += [1 + int(np.max(np.nonzero(m.any(0))[0], initial=0)) for masks in found.values() for m in masks]
    end = max(ends, default=1) if length is None else length
    if length is not None and max(ends, default=0) > length:
        raise ValueError(f"length={length}, but position {max(ends) - 1} is held; give the prompt's own length")
    spans = _spans(markers, end)
    found = {name: _chosen(masks, layers) for name, masks in found.items()}

    rows = max((sum(map(len, masks.values())) for masks in found.values()), default=0)
    height = min(max(0.45 + 0.035 * rows, 0.95), 3.5)
    grid = panels(axes, len(found), size=(9.0, 0.8 + height * len(found)), sharex=True)
    for panel, (name, masks) in zip(grid, found.items(), strict=True):
        image = np.concatenate([np.pad(m[:, :end], ((0, 0), (0, max(0, end - m.shape[1])))) for m in masks.values()])
        cmap = ListedColormap(["white", _BLUE])
        sharp = "nearest" if end <= 1200 else "antialiased"  # more positions than pixels would lose some
        colours = cmap if sharp == "nearest" else "Blues"
        panel.imshow(image, cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation=sharp)
        _number_layers(panel, {i: len(m) for i, m in masks.items()})
        panel.set_ylabel(wrapped(name), rotation=0, ha="right", va="center", fontsize="small")
        share = f"{100 * image.mean():.3g} %"
        panel.text(1.008, 0.5, share, transform=panel.transAxes, va="center", fontsize="x-small", color="0.35")
        _point(panel, spans)
    at = {"xycoords": "axes fraction", "textcoords": "offset points", "fontsize": "x-small", "color": "0.35"}
    grid[0].annotate("layer", (0, 1), xytext=(-4, 4), ha="right", va="bottom", **at)
    grid[0].annotate("held", (1, 1), xytext=(4, 4), ha="left", va="bottom", **at)
    _legend(grid[0], [Patch(color=_BLUE, label="held")], spans)
    heads = "head" if rows == 1 else "kv heads"
    grid[-1].set_xlabel(f"position in the prompt, tokens (rows are {heads})", fontsize="small")
    for panel in grid:
        panel.tick_params(axis="x", labelsize="small")
    return figure_of(grid[0])


def scores(
    chosen: Selection | Sequence[Selection],
    *,
    markers: Markers | None = None,
    layers: Sequence[int] | None = None,
    head: int | None = None,
    row: int = 0,
    yscale: Literal["linear", "log", "symlog"] | None = None,
    axes: Any = None,
) -> Figure:
    """The scores that one policy ranks the tokens of one prompt by, a panel for every layer; what stays is blue.

    Blue below grey is what a policy protects whatever its score, or belongs to a head with a larger budget or smaller
    scores. What stays without a finite score is a triangle at the panel's edge.

    Args:
      chosen: the selections of all layers (`analysis.decisions`), or one of `kvjax.evict_layer`.
      markers: positions to point at, by name.
      layers: which layers, all of them if None.
      head: which head; all of them if None.
      row: the sequence of the batch.
      yscale: the axis of scores; logarithmic if None and they are positive and far apart.
      axes: as many of matplotlib's axes as layers, in place of a new figure.

    Raises:
      ValueError: what is no selection of a prompt; layers, a head or a row that are not there; markers beyond the
        prompt; other axes than layers.
    """
    row = checked(whole(0), "row", row)
    if yscale is not None:
        one_of("yscale", yscale, "linear", "log", "symlog")
    selections = [chosen] if isinstance(chosen, Selection) else list(chosen)
    if wrong := [s for s in selections if not isinstance(s, Selection)]:
        raise ValueError(
            f"scores are those of selections, not of {type(wrong[0]).__name__}; kvjax.evict_layer returns one, and "
            "kvjax.analysis.decisions those of a model"
        )
    drawn = _chosen([_row(s, row) for s in selections], layers)
    end = max((score.shape[1] for score, _ in drawn.values()), default=1)
    spans = _spans(markers, end)
    grid = panels(axes, len(drawn), size=(9.0, 0.9 + 1.6 * len(drawn)), sharex=True)
    for panel, (i, (score, keep)) in zip(grid, drawn.items(), strict=True):
        if head is not None:
            heads = len(score)
            at = checked(whole(0, heads - 1, f"is not one of {heads} heads"), "head", head)
            score, keep = score[at : at + 1], keep[at : at + 1]
        places = np.broadcast_to(np.arange(score.shape[1]), score.shape)
        size = 9.0 if score.size <= 600 else 3.0
        for mask, colour, order in ((~keep, _GREY, 1), (keep, _BLUE, 2)):
            shown = mask & np.isfinite(score)
            panel.scatter(places[shown], score[shown], s=size, color=colour, linewidths=0, zorder=order)
        for infinite, edge, marker in ((np.isposinf(score), 1.0, "^"), (np.isneginf(score), 0.0, "v")):
            at = {"transform": panel.get_xaxis_transform(), "clip_on": False}
            x = np.unique(places[keep & infinite])
            if len(x):
                panel.plot(x, np.full(len(x), edge), marker, color=_BLUE, markersize=3, **at)
        panel.set_yscale(yscale or ("log" if _far_apart(score[np.isfinite(score)]) else "linear"))
        panel.set_ylabel(f"layer {i}" if len(drawn) > 1 else "score")
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.01)
        _point(panel, spans)
    dots = [Line2D([], [], color=c, marker="o", linestyle="", markersize=4, label=label)
            for c, label in ((_BLUE, "stays"), (_GREY, "goes"))]  # fmt: skip
    _legend(grid[0], dots, spans)
    which = "all kv heads" if head is None else f"head {head}"
    grid[-1].set_xlabel(f"position in the prompt, tokens ({'scores of ' if len(drawn) > 1 else ''}{which})")
    return figure_of(grid[0])


# --- what is given, as masks ---


def _layers_of(name: str, kept: Any, row: int) -> list[Any]:
    """One array for every layer: a mask, or positions."""
    if isinstance(kept, KVState):
        checked(whole(0, len(kept.length) - 1, f"is not one of {len(kept.length)} sequences"), "row", row)
        return [np.asarray(layer.head_pos[row]) for layer in kept.layers]
    if isinstance(kept, Selection):
        return [_row(kept, row)[1]]
    if not hasattr(kept, "__iter__") or getattr(kept, "ndim", 1) == 0:
        raise ValueError(
            f"what {name or 'the policy'} keeps is a {type(kept).__name__}; give a state, selections, or an array for "
            "each layer"
        )
    return [_row(layer, row)[1] if isinstance(layer, Selection) else layer for layer in kept]


def _row(selection: Selection, row: int) -> tuple[Float[np.ndarray, "K T"], Bool[np.ndarray, "K T"]]:
    """The scores of one sequence and what it keeps, without the padding on its left."""
    batch = len(selection.keep)
    checked(whole(0, batch - 1, f"is not one of {batch} sequences"), "row", row)
    score, keep = np.asarray(selection.score[row], np.float64), np.asarray(selection.keep[row])
    there = np.nonzero((keep | ~np.isneginf(score)).any(0))[0]
    first = int(there[0]) if len(there) else 0
    return score[:, first:], keep[:, first:]


def _mask(name: str, layer: Any) -> Bool[np.ndarray, "K T"]:
    """The tokens that each head holds."""
    held = as_numpy(f"what {name or 'a layer'} keeps", layer)
    if held.dtype == np.bool_:
        check_array(f"the mask of {name or 'a layer'}", held, "heads", "tokens", kind=np.bool_)
        return held
    check_array(f"what {name or 'a layer'} keeps", held, "heads", "slots", kind=np.integer)
    mask = np.zeros((len(held), 1 + max(int(held.max()), 0)), bool)
    for one, positions in zip(mask, held, strict=True):
        one[positions[positions > EMPTY]] = True
    return mask


def _length(kept: Any, row: int) -> int:
    """The tokens that were read, as far as what is given tells: masks and selections end with the prompt."""
    if isinstance(kept, KVState):
        return int(kept.length[row])
    if isinstance(kept, Selection):
        return _row(kept, row)[1].shape[1]
    each_layer = (_row(x, row)[1] if isinstance(x, Selection) else np.asarray(x) for x in kept)
    return max((x.shape[-1] for x in each_layer if x.dtype == np.bool_), default=0)


def _chosen(found: Sequence[Any], layers: Sequence[int] | None) -> dict[int, Any]:
    """What is found of every layer, or of some, by number."""
    last = len(found) - 1
    rule = each(whole(0, last, f"is not one of {len(found)} layers"))
    return {i: found[i] for i in (range(len(found)) if layers is None else checked(rule, "layers", layers))}


def _far_apart(x: Float[np.ndarray, "X"]) -> bool:
    """Whether numbers are positive, and the largest is far above most of them."""
    return bool(len(x) and x.min() > 0 and x.max() > 20 * np.median(x))


# --- what is drawn around them ---


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
    if markers is None:
        return {}
    if not isinstance(markers, Mapping):
        raise ValueError(f"markers={markers!r}: must be positions by name, such as {{'needle': range(412, 424)}}")
    spans = {}
    for name, given in markers.items():
        one = np.asarray(given if hasattr(given, "__iter__") else [given])
        rule = each(whole(0, end - 1, f"is not one of the {end} positions of the prompt"))
        places = np.unique(np.array(checked(rule, f"markers[{name!r}]", one.tolist()), int))
        runs = np.split(places, np.nonzero(np.diff(places) > 1)[0] + 1)
        spans[name] = [(int(run[0]), int(run[-1])) for run in runs if len(run)]
    return spans


def _point(panel: Axes, spans: Mapping[str, list[tuple[int, int]]]) -> None:
    """Shades the marked positions, and points at them from above."""
    for (_, runs), colour in zip(spans.items(), _colours(spans), strict=True):
        for first, last in runs:
            panel.axvspan(first - 0.5, last + 0.5, color=colour, alpha=0.18, linewidth=0)
            for edge in (first - 0.5, last + 0.5):
                panel.axvline(edge, color=colour, linewidth=0.8)
            above = offset_copy(panel.get_xaxis_transform(), figure_of(panel), y=3.5, units="points")
            at = {"transform": above, "clip_on": False}
            panel.plot([(first + last) / 2], [1.0], marker="v", color=colour, markersize=5, **at)


def _colours(spans: Mapping[str, Any]) -> list[str]:
    return [_MARKED[i % len(_MARKED)] for i in range(len(spans))]


def _legend(panel: Axes, handles: list[Any], spans: Mapping[str, Any]) -> None:
    """What colours mean, above the panel."""
    named = [
        Line2D([], [], color=colour, marker="v", linestyle="-", label=name)
        for name, colour in zip(spans, _colours(spans), strict=True)
    ]
    options = {"frameon": False, "fontsize": "small", "borderaxespad": 0.7, "handlelength": 1.2}
    panel.legend(
        handles=[*handles, *named], loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles) + len(named),
        **options,
    )  # fmt: skip
