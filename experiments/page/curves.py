"""Scores against budgets as SVG, which the page's own script filters."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from kvjax.experiments.evaluation import report
from kvjax.experiments.page import shown
from kvjax.experiments.page.cells import Cell, is_full
from kvjax.plot.style import COLOURS, LINES, MARKERS

WIDTH, HEIGHT = 440, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 44
_DASHES = {"-": "", "--": "6 4", ":": "1.5 4"}
# The outlines of matplotlib's markers, in a square from -1 to 1.
_SHAPES = {
    "o": "M-.9 0A.9 .9 0 1 1 .9 0A.9 .9 0 1 1 -.9 0Z",
    "s": "M-.8-.8H.8V.8H-.8Z",
    "D": "M0-1.1L1.1 0L0 1.1L-1.1 0Z",
    "^": "M0-1L1 .9H-1Z",
    "v": "M0 1L1-.9H-1Z",
    "P": "M-.35-1H.35V-.35H1V.35H.35V1H-.35V.35H-1V-.35H-.35Z",
    "X": "M-1-.5L-.5-1L0-.5L.5-1L1-.5L.5 0L1 .5L.5 1L0 .5L-.5 1L-1 .5L-.5 0Z",
    "*": "M0-1.2L.3-.4L1.15-.37L.48.15L.7.97L0 .5L-.7.97L-.48.15L-1.15-.37L-.3-.4Z",
    "<": "M-1 0L.9-1V1Z",
    ">": "M1 0L-.9-1V1Z",
    "h": "M0-1L.87-.5V.5L0 1L-.87.5V-.5Z",
    "p": "M0-1L.95-.31L.59.81H-.59L-.95-.31Z",
}


class Style(NamedTuple):
    """Colour (a class of the page), dashes and marker of a method."""

    colour: str
    dashes: str
    marker: str


def style(i: int) -> Style:
    """The style of the i-th method; the full cache is not counted."""
    dashes = _DASHES[LINES[i // len(COLOURS) % len(LINES)]]
    return Style(f"p{i % len(COLOURS)}", dashes, f"k{i % len(MARKERS)}")


def markers() -> Markup:
    """All markers, for `use` elements."""
    template = '<symbol id="k{}" viewBox="-1.5 -1.5 3 3" overflow="visible"><path d="{}"/></symbol>'
    return Markup("").join(Markup(template).format(i, _SHAPES[m]) for i, m in enumerate(MARKERS))


def key(style_: Style) -> Markup:
    """A method's line and marker, for the list of methods."""
    return Markup(
        '<svg class="key {}" viewBox="0 0 30 12" aria-hidden="true"><path class="line" d="M1 6H29"{}/>'
        '<use href="#{}" class="mark" x="10" y="1" width="10" height="10"/></svg>'
    ).format(style_.colour, _dashed(style_), style_.marker)


def _dashed(style_: Style) -> Markup:
    return Markup(' stroke-dasharray="{}"').format(style_.dashes) if style_.dashes else Markup("")


def curve(cells: Sequence[Cell], anchors: dict[Cell, str], methods: Sequence[str]) -> Markup | None:
    """One plot: the numbers of one task in one setting against the share of the prompt that is kept, or tokens of it.

    Args:
      cells: all of one setting and task.
      anchors: what each number links to.
      methods: those of the whole page, which have the same style in all plots.

    Returns:
      None where no method has a budget.
    """
    full = next((c for c in cells if is_full(c.method)), None)
    others = [c for c in cells if not is_full(c.method)]
    in_tokens = any(c.place is None and report.has_budget(c.budget) for c in others)
    place = _tokens if in_tokens else lambda c: c.place
    points = {c: x for c in others if (x := place(c)) and math.isfinite(c.value.mean)}
    if not points:
        return None
    ends = [v for c in [*points, *([full] if full else [])] for v in c.value if math.isfinite(v)]
    low, high = (0.0, 1.0) if cells[0].kind == "score" else (min(ends), max(ends))
    pad = 0.03 if cells[0].kind == "score" else 0.06 * (high - low) or 0.5
    low, high = low - pad, high + pad
    left, right = math.log2(min(points.values())) - 0.25, math.log2(max(points.values())) + 0.25
    across = lambda x: _LEFT + (WIDTH - _LEFT - _RIGHT) * (math.log2(x) - left) / (right - left)
    down = lambda y: _TOP + (HEIGHT - _TOP - _BOTTOM) * (high - min(max(y, low), high)) / (high - low)
    parts = [_axes(points, cells[0], in_tokens, across, down, (low, high))]
    if full is not None:
        y = down(full.value.mean)
        line = '<a href="#{}" class="full"><title>{}</title><path d="M{} {:.1f}H{}"/></a>'
        parts.append(Markup(line).format(anchors[full], _title(full), _LEFT, y, WIDTH - _RIGHT))
    here = [m for m in methods if any(c.method == m for c in points)]
    for rank, method in enumerate(here):
        own = sorted((c for c in points if c.method == method), key=lambda c: points[c])
        aside = 2 ** (0.04 * (rank - (len(here) - 1) / 2) / max(len(here) / 5, 1))  # keeps equal budgets apart
        parts.append(_series(own, methods.index(method), anchors, {c: across(points[c] * aside) for c in own}, down))
    title = f"{shown.task(cells[0].task)} against budget"
    svg = '<svg class="plot" viewBox="0 0 {} {}" role="group" aria-label="{}">{}</svg>'
    return Markup(svg).format(WIDTH, HEIGHT, title, Markup("").join(parts))


def _tokens(cell: Cell) -> float | None:
    whole = report.has_budget(cell.budget) and "." not in cell.budget
    return float(cell.budget) if whole else None


def _title(cell: Cell) -> str:
    budget = "" if is_full(cell.method) else f" {shown.budget(cell.budget)}"
    return f"{cell.method}{budget}: {shown.value(cell)} {shown.interval(cell)}".rstrip()


def _series(own: Sequence[Cell], index: int, anchors: dict[Cell, str], xs: dict[Cell, float], down) -> Markup:
    """One method: its line, intervals and points, each a link to its rows."""
    look = style(index)
    path = "M" + "L".join(f"{xs[c]:.1f} {down(c.value.mean):.1f}" for c in own)
    bars = "".join(
        f"M{xs[c]:.1f} {down(c.value.low):.1f}V{down(c.value.high):.1f}"
        for c in own
        if math.isfinite(c.value.low + c.value.high)
    )
    point = (
        '<a href="#{}"><title>{}</title><use href="#{}" class="mark" x="{:.1f}" y="{:.1f}" width="11" height="11"/></a>'
    )
    points = [
        Markup(point).format(anchors[c], _title(c), look.marker, xs[c] - 5.5, down(c.value.mean) - 5.5) for c in own
    ]
    group = '<g data-m="{}" class="{}"><path class="line" d="{}"{}/><path class="bar" d="{}"/>{}</g>'
    return Markup(group).format(index, look.colour, path, _dashed(look), bars, Markup("").join(points))


def _axes(points: dict[Cell, float], first: Cell, in_tokens: bool, across, down, ends: tuple[float, float]) -> Markup:
    """Grid, ticks and names of both axes."""
    low, high = ends
    ys = [0, 0.2, 0.4, 0.6, 0.8, 1.0] if first.kind == "score" else _round_ticks(low, high)
    exact = {points[c] for c in points if report.has_budget(c.budget)}
    xs = sorted(exact)
    if len(xs) > 6 or not xs:
        xs = [2.0**i for i in range(-10, 24) if min(points.values()) / 1.2 <= 2.0**i <= max(points.values()) * 1.2]
    parts = []
    for y in ys:
        line = '<path class="grid" d="M{} {:.1f}H{}"/><text x="{}" y="{:.1f}" text-anchor="end">{}</text>'
        label = f"{100 * y:.0f}" if first.kind == "score" else f"{y:.3g}"
        parts.append(Markup(line).format(_LEFT, down(y), WIDTH - _RIGHT, _LEFT - 6, down(y) + 4, label))
    for x in xs:
        line = '<path class="grid" d="M{:.1f} {}V{}"/><text x="{:.1f}" y="{}" text-anchor="middle">{}</text>'
        label = f"{x:g}" if in_tokens else f"{100 * x:.3g}"
        parts.append(Markup(line).format(across(x), _TOP, HEIGHT - _BOTTOM, across(x), HEIGHT - _BOTTOM + 16, label))
    name = "budget, tokens a head" if in_tokens else "budget, % of the prompt"
    if not all(report.has_budget(c.budget) for c in points):
        name += " (live tokens where there is none)"
    unit = {"score": "score, %", "nll": "perplexity", "given": "as given"}[first.kind]
    names = (
        '<text x="{}" y="{}" text-anchor="middle">{}</text>'
        '<text transform="translate(12 {}) rotate(-90)" text-anchor="middle">{}</text>'
    )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(Markup(names).format(middle, HEIGHT - 8, name, (HEIGHT - _BOTTOM + _TOP) / 2, unit))
    return Markup("").join(parts)


def _round_ticks(low: float, high: float) -> list[float]:
    """About five round numbers between two."""
    raw = (high - low) / 5
    unit = 10 ** math.floor(math.log10(raw))
    step = unit * next(m for m in (1, 2, 5, 10) if m * unit >= raw)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
