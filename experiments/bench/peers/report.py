"""The tables and the picture of what was measured beside the peers."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvjax.experiments.bench.peers.checkpoints import MODELS
from kvjax.experiments.core import page
from kvjax.experiments.core.page import Table
from kvjax.plot.style import COLOURS, figure_of, panels

Entry = dict[str, Any]

# The lines of the short table, and the rows of a line's cells: each the first of several that a model has.
_SHORT = {
    "prefill, 1k (tiny 2k); 4k tokens": ("prefill/1k prefill/2k", "prefill/4k"),
    "decoding, full cache, behind 1k (2k); 4k": ("full/1x1k full/1x2k", "full/1x4k"),
    "the same, batch 4": ("full/4x1k full/4x2k", "full/4x4k"),
    "by `decode_step`, behind 1k (2k)": ("steps/1k steps/2k",),
    "decoding at 25 % of 4k: SnapKV; H2O; Ada-SnapKV": ("decode/snapkv", "decode/h2o", "decode/ada_snapkv"),
    "first answer: nothing compiled; programs kept": ("first/cold", "first/kept"),
    "loading": ("load",),
    "peak memory, times that of transformers": ("peak",),
}
_TITLES = {model.name: model.title for model in MODELS}
_PEERS = ("transformers", "kvpress", "kvjax")  # each with its colour


def by_model(table: dict[str, Any]) -> dict[str, list[Entry]]:
    """A table's rows, model by model, in the order of the table."""
    rows = sorted(table["rows"].values(), key=lambda row: row["place"])
    return {model: [row for row in rows if row["model"] == model] for model in dict.fromkeys(r["model"] for r in rows)}


def short(table: dict[str, Any]) -> Table:
    """The main ratios in ten lines: more is better, but for memory; those that miss their goals are bold."""
    models = by_model(table)

    def cell(rows: dict[str, Entry], names: Sequence[str]) -> str:
        found = [next((rows[x] for x in alike.split() if x in rows), None) for alike in names]
        shown = ["-" if x is None else number(x["ratio"]["median"]) for x in found]
        return "; ".join(
            f"**{text}**" if x and x["met"] is False else text for text, x in zip(shown, found, strict=True)
        )

    named = [{row["name"]: row for row in rows} for rows in models.values()]
    lines = [[line, *(cell(rows, names) for rows in named)] for line, names in _SHORT.items()]
    return Table(["", *(_TITLES.get(x, x) for x in models)], lines)


def markdown(table: dict[str, Any]) -> str:
    """The table as text: the main ratios, and all rows of each model."""
    device, peers = table["kvjax"]["device"], table["peer"]["versions"]
    versions = {name: device["versions"][name] for name in ("python", "jax", "jaxlib", "kvjax")} | peers
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    about = (
        f"{device['machine']}, {device['kind']}, {table['threads']} threads; {named}. Ratios are medians of those "
        "within one round of interleaved runs; above 1 is kvjax's, but for memory and what statistics add."
    )
    blocks: list[str | Table] = [about, short(table)]
    head = ["row", "kvjax", "beside", "ratio [quartiles], rounds", "goal", "met"]
    for model, rows in by_model(table).items():
        blocks += [f"## {_TITLES.get(model, model)}", Table(head, [_cells(row) for row in rows])]
    return page.markdown("kvjax beside transformers and kvpress", *blocks)


def amount(value: float, unit: str) -> str:
    """A measured value with its unit: of decoding in tokens a second."""
    if unit == "bytes":
        return f"{value / 2**20:,.1f} MiB"
    if unit == "s/token":
        return f"{1 / value:,.1f} tokens/s"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def _cells(row: Entry) -> list[str]:
    ratio, most = row["ratio"], "at most " if row["kind"] == "cost" else ""
    sides = (f"{row[side]['label']}: {amount(row[side]['value'], row['unit'])}" for side in ("kvjax", "beside"))
    goal = "" if row["goal"] is None else most + number(row["goal"])
    return [
        row["text"],
        *sides,
        f"{spread(ratio)}, {ratio['rounds']}",
        goal,
        {True: "yes", False: "**no**", None: ""}[row["met"]],
    ]


def number(ratio: float) -> str:
    """A ratio with three digits; small ones as a fraction of one."""
    if 0 < ratio < 0.05:
        return f"1/{1 / ratio:.0f}"
    return f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def spread(ratio: dict[str, float]) -> str:
    """A median ratio and its quartiles."""
    return f"{number(ratio['median'])} [{number(ratio['q1'])}, {number(ratio['q3'])}]"


def draw(table: dict[str, Any]) -> Figure:
    """Every ratio as a dot with its quartiles in the colour of what stands beside, model by model; ticks are goals.

    What takes less is drawn as its inverse, so that kvjax is ahead right of the line. What takes a hundredth is not.
    """
    models = {model: [row for row in rows if row["name"][:7] != "memory/"] for model, rows in by_model(table).items()}
    models = dict(sorted(models.items(), key=lambda item: -len(item[1])))  # neighbours are as high
    columns, lengths = min(2, len(models)), [len(rows) for rows in models.values()]
    heights = [lengths[i] + 2 for i in range(0, len(lengths), columns)]
    size = 6 * columns, 0.16 * sum(heights) + 1
    axes = panels(None, len(models), columns=columns, size=size, sharex=True, height_ratios=heights)
    for each, (model, rows) in zip(axes, models.items(), strict=True):
        _panel(each, _TITLES.get(model, model), rows)
    figure = figure_of(axes[0])
    found = [axes.get_legend_handles_labels() for axes in figure.axes]
    labels = {label: line for each in found for line, label in zip(*each, strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="outside upper center", ncols=len(labels), fontsize=8)
    figure.supxlabel("times as fast, or as small, as what stands beside it", fontsize=9)
    return figure


def _panel(axes: Axes, title: str, rows: Sequence[Entry]) -> None:
    better = lambda row, x: x if row["kind"] == "speed" else 1 / x
    for peer, colour in zip(_PEERS, COLOURS, strict=False):
        chosen = [(i, row) for i, row in enumerate(rows) if row["beside"]["of"] == peer]
        spread = [sorted(better(row, row["ratio"][q]) for q in ("q1", "median", "q3")) for _, row in chosen]
        if chosen:
            label = f"beside {peer}" if peer != "kvjax" else "kvjax beside itself"
            bars = [[mid - low for low, mid, _ in spread], [high - mid for _, mid, high in spread]]
            y, x = [i for i, _ in chosen], [mid for _, mid, _ in spread]
            axes.errorbar(x, y, xerr=bars, fmt="o", markersize=4, color=colour, elinewidth=1, label=label)
    goals = [(better(row, row["goal"]), i) for i, row in enumerate(rows) if row["goal"] is not None]
    if goals:
        axes.scatter(*zip(*goals, strict=True), marker="|", s=60, color="#000000", label="goal", zorder=3)
    axes.axvline(1, color="#999999", linewidth=0.8, zorder=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(yticks=range(len(rows)), ylim=(len(rows) - 0.4, -0.6))
    axes.set_yticklabels([row["name"] for row in rows], fontsize=7)
    axes.set_title(title, fontsize=9)
    axes.tick_params(axis="x", labelsize=7, labelbottom=True)
    axes.grid(axis="y", linewidth=0.3)
