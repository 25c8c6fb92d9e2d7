"""The table and the picture of what was measured beside the peers."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvjax.experiments.core.markdown import table as markdown_table
from kvjax.plot.style import COLOURS

Entry = dict[str, Any]

_MET = {True: "yes", False: "**no**", None: ""}


def markdown(table: dict[str, Any]) -> str:
    """The table as text: the rows, what each side's programs take, and what could not be measured."""
    rows = ordered(table)
    lines = [
        "# kvjax beside transformers and kvpress",
        "",
        _about(table),
        "",
        *markdown_table(
            ["row", "threads", "kvjax", "beside", "ratio [quartiles]", "alone", "goal", "met"],
            [_cells(row) for row in rows],
        ),
    ]
    jobs = {}
    for row in rows:
        for side in (row["kvjax"], row["beside"]):
            jobs[side["label"], side["job"]["kind"], side["job"]["length"], row["threads"]] = side["facts"]
    lines += [
        "",
        "Compilation, and memory of one run: of kvjax's compiled program, and what the process held at the peak more "
        "than before. Decoding is weighed without the prompt before it.",
        "",
    ]
    programs, size = [], lambda facts, name: f"{facts[name] / 2**20:.1f} MiB" if name in facts else ""
    for (label, kind, length, threads), facts in jobs.items():
        if facts:
            compiled = f"{facts['compile_seconds']:.1f} s" if "compile_seconds" in facts else ""
            sizes = [size(facts, f"{name}_bytes") for name in ("temp", "peak", "rss")]
            programs.append([f"{kind}, {label}", f"{length:,}", str(threads), compiled, *sizes])
    head = ["job", "tokens", "threads", "compiled in", "temporaries", "program's peak", "process's peak"]
    lines += markdown_table(head, programs)
    missing = {(row["name"], label): why for row in rows for label, why in row["missing"].items()}
    if missing:
        lines += ["", "Not measured:", ""]
        lines += [f"- {name}: {label} ({' '.join(why.split())[:200]})" for (name, label), why in missing.items()]
    return "\n".join(lines) + "\n"


def ordered(table: dict[str, Any]) -> list[Entry]:
    """A table's rows, those of one number of threads after those of a smaller one."""
    return sorted(table["rows"].values(), key=lambda row: (row["threads"], row["place"]))


def amount(entry: Entry, measure: str) -> str:
    """A measured value with its unit: of decoding in tokens a second."""
    value = entry["median"]
    if measure == "bytes":
        return f"{value / 2**20:.1f} MiB"
    if entry["job"]["kind"] in ("decode", "stream"):
        return f"{1 / value:,.0f} tokens/s"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def _about(table: dict[str, Any]) -> str:
    device, peers = table["kvjax"]["device"], table["peer"].get("versions", {})
    versions = {name: device["versions"][name] for name in ("python", "jax", "jaxlib", "kvjax")}
    named = ", ".join(f"{name} {version}" for name, version in {**versions, **peers}.items() if version)
    sizes = dict(table["model"])
    which = f"{sizes.pop('name', 'A random Llama')} in {sizes.pop('dtype', 'float32')}"
    model = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in sizes.items())
    return (
        f"{device['machine']}, {device['kind']}; {named}. {which}: {model}. Ratios are "
        "those within one run; a goal is met if the median of interleaved rounds and the best times alone both meet it."
    )


def _cells(row: Entry) -> list[str]:
    ratio, goal = row["ratio"], row["goal"]
    return [
        row["text"],
        str(row["threads"]),
        f"{row['kvjax']['label']}: {amount(row['kvjax'], row['measure'])}",
        f"{row['beside']['label']}: {amount(row['beside'], row['measure'])}",
        f"{number(ratio['median'])} [{number(ratio['q1'])}, {number(ratio['q3'])}]",
        "" if ratio["alone"] is None else number(ratio["alone"]),
        "" if goal is None else f"{goal['bound']} {number(goal['ratio'])}",
        _MET[row["met"]],
    ]


def number(ratio: float) -> str:
    """A ratio with three digits; small ones as a fraction of one."""
    if 0 < ratio < 0.05:
        return f"1/{1 / ratio:.0f}"
    return f"{ratio:.3f}" if ratio < 1.1 and ratio > 0.9 else f"{ratio:.2f}"


def draw(table: dict[str, Any]) -> Figure:
    """Every ratio as a point with its quartiles, beside its goal: where more is better, and where less is."""
    rows = ordered(table)
    panels = [
        ("times as fast as what stands beside it", [row for row in rows if row["kind"] == "speed"]),
        ("times as much as what stands beside it", [row for row in rows if row["kind"] == "cost"]),
    ]
    panels = [(title, chosen) for title, chosen in panels if chosen]
    heights = [len(chosen) + 2 for _, chosen in panels]
    figure = Figure(figsize=(8, 0.17 * sum(heights) + 0.8), layout="constrained", dpi=100)
    axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axis, (title, chosen) in zip(axes, panels, strict=True):
        _panel(axis, title, chosen)
    return figure


def _panel(axes: Axes, title: str, rows: Sequence[Entry]) -> None:
    names = list(dict.fromkeys(row["name"] for row in rows))
    threads = sorted({row["threads"] for row in rows})
    for i, count in enumerate(threads):
        chosen = [row for row in rows if row["threads"] == count]
        y = [names.index(row["name"]) + (i - (len(threads) - 1) / 2) * 0.3 for row in chosen]
        x = [row["ratio"]["median"] for row in chosen]
        spread = [
            [row["ratio"]["median"] - row["ratio"]["q1"] for row in chosen],
            [row["ratio"]["q3"] - row["ratio"]["median"] for row in chosen],
        ]
        label = f"{count} thread{'s' if count > 1 else ''}"
        style = {"fmt": "os^v"[i % 4], "markersize": 4, "color": COLOURS[i % len(COLOURS)], "elinewidth": 1}
        axes.errorbar(x, y, xerr=spread, label=label, **style)
    goals = {row["name"]: row["goal"]["ratio"] for row in rows if row["goal"] is not None}
    if goals:
        y = [names.index(name) for name in goals]
        axes.scatter(list(goals.values()), y, marker="|", s=120, color="#000000", label="goal", zorder=3)
    axes.axvline(1, color="#999999", linewidth=0.8, zorder=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if x >= 0.1 else number(x)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(yticks=range(len(names)), xlabel=title, ylim=(len(names) - 0.4, -0.6))
    axes.set_yticklabels(names, fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="y", linewidth=0.3)
    axes.legend(fontsize=7)
