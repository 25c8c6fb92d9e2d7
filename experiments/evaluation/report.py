"""Tables and plots of a results directory. Everything here can be made again from its lines."""

import io
import json
import pathlib
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from experiments.evaluation import statistics
from experiments.evaluation.results import read_config, seal, write_bytes, write_figure, write_json
from experiments.palette import COLOURS, LINES, MARKERS
from experiments.tasks import RETRIEVAL


def summarise(samples: Sequence[dict[str, Any]], costs: dict[str, Any]) -> dict[str, Any]:
    """One row for every method, budget and task, and one for the mean of the retrieval tasks."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for s in samples:
        groups.setdefault((s["method"], s["budget"], s["task"]), []).append(s)
    full_nll = {s["index"]: s["nll"] for s in samples if s["method"] == "full" and s["task"] == "perplexity"}
    full_bytes = next((c["kv_bytes"] for k, c in costs.items() if k.startswith("full@")), None)

    rows = []
    for (method, budget, task), group in groups.items():
        row: dict[str, Any] = {"method": method, "budget": budget, "task": task, "examples": len(group)}
        if task == "perplexity":
            nll = [s["nll"] for s in group]
            row |= dict(zip(("perplexity", "low", "high"), statistics.perplexity(nll), strict=True))
            if all(s["index"] in full_nll for s in group):
                worse = np.mean([s["nll"] - full_nll[s["index"]] for s in group])
                row["score"] = float(np.exp(-worse))  # 1 where the text is as likely as under the full cache
        else:
            row |= dict(zip(("score", "low", "high"), statistics.wilson([s["score"] for s in group]), strict=True))
        row |= _cost_columns(group, costs[f"{method}@{budget}"], full_bytes)
        rows.append(row)

    means = []
    for method, budget in dict.fromkeys((m, b) for m, b, _ in groups):
        group = [s for (m, b, t), g in groups.items() if (m, b) == (method, budget) and t in RETRIEVAL for s in g]
        if group:
            score, low, high = statistics.wilson([s["score"] for s in group])
            mean = {"method": method, "budget": budget, "task": "retrieval_mean", "examples": len(group)}
            mean |= {"score": score, "low": low, "high": high}
            means.append(mean | _cost_columns(group, costs[f"{method}@{budget}"], full_bytes))
    return {"rows": rows, "retrieval_mean": means}


TIMES = ("prefill_seconds", "decode_tokens_per_second")  # columns that the machine decides


def _cost_columns(group: list[dict[str, Any]], cost: dict[str, Any], full_bytes: int | None) -> dict[str, Any]:
    return {
        "live_tokens": float(np.mean([s["live"] for s in group])),
        "live_of_prompt": float(np.mean([s["live"] / s["prompt_tokens"] for s in group])),
        "most_live": max(s["most_live"] for s in group),
        "slots": cost["slots"],
        "kv_bytes": cost["kv_bytes"],
        "kv_bytes_of_full": None if full_bytes is None else cost["kv_bytes"] / full_bytes,
        "prefill_seconds": float(np.median([s["prefill_seconds"] for s in group])),
        "decode_tokens_per_second": float(np.median([s["decode_tokens_per_second"] for s in group])),
        "prefill_peak_bytes": cost["prefill_peak_bytes"],
        "decode_peak_bytes": cost["decode_peak_bytes"],
    }


# --- tables ---


def markdown(summary: dict[str, Any], title: str) -> str:
    """The summary as two tables: what was answered, and what it cost."""
    tasks = list(dict.fromkeys(r["task"] for r in summary["rows"]))
    by_key = {(r["method"], r["budget"], r["task"]): r for r in summary["rows"] + summary["retrieval_mean"]}
    runs = list(dict.fromkeys((r["method"], r["budget"]) for r in summary["rows"]))
    shown = [*(["retrieval_mean"] if summary["retrieval_mean"] else []), *tasks]

    head = ["method", "budget", *(t.replace("_", " ") for t in shown)]
    quality = [[m, b, *(score_cell(by_key.get((m, b, t))) for t in shown)] for m, b in runs]
    per_task = [
        [
            r["method"],
            r["budget"],
            r["task"].replace("_", " "),
            score_cell(r),
            f"{r['live_tokens']:.1f}",
            f"{r['slots']:,}",
            f"{r['kv_bytes'] / 2**10:,.0f}",
            "" if r["kv_bytes_of_full"] is None else f"{100 * r['kv_bytes_of_full']:.1f} %",
            f"{1000 * r['prefill_seconds']:.1f}",
            f"{r['decode_tokens_per_second']:,.0f}",
            _mebibytes(r["prefill_peak_bytes"]),
            _mebibytes(r["decode_peak_bytes"]),
        ]
        for r in summary["rows"]
    ]
    cost_head = [
        "method", "budget", "task", "score", "live tokens a head", "slots", "KV KiB", "KV of full", "prefill ms",
        "decode tokens/s", "prefill peak MiB", "decode peak MiB",
    ]  # fmt: skip
    return "\n".join(
        [
            f"# {title}",
            "",
            "Scores in percent with 95 % intervals (Wilson). Perplexity as itself, with a Student-t interval, and in",
            "parentheses how likely the text is compared to the full cache.",
            "",
            *table(head, quality),
            "",
            "Slots and bytes are for one sequence; live tokens are means over layers and heads after the prompt.",
            "Prefill time is for one sequence of a batch, decode speed for the whole batch. Peaks are what the",
            "compiled programs take for one batch: arguments (parameters included), results and temporaries.",
            "",
            *table(cost_head, per_task),
            "",
        ]
    )


def _mebibytes(n: int | None) -> str:
    return "" if n is None else f"{n / 2**20:,.1f}"


def score_cell(row: dict[str, Any] | None) -> str:
    """A score in percent, or a perplexity, with its interval."""
    if row is None:
        return ""
    if "perplexity" in row:
        relative = f" ({100 * row['score']:.1f} %)" if "score" in row else ""
        return f"{row['perplexity']:.2f} [{row['low']:.2f}, {row['high']:.2f}]{relative}"
    return f"{100 * row['score']:.1f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


# --- plots ---


def has_budget(label: str) -> bool:
    """Whether a label is a budget: a number of tokens or a share of the prompt, unlike "T=0.95"."""
    return label.replace(".", "", 1).isdecimal()


def budget_fraction(row: dict[str, Any], length: int) -> float:
    """A row's place on an axis of shares of the prompt: its budget, or the live tokens measured where it has none."""
    label = row["budget"]
    if not has_budget(label):
        return row["live_of_prompt"]
    return float(label) if "." in label else int(label) / length


def plot_score_against_budget(rows: Sequence[dict[str, Any]], length: int, path: pathlib.Path) -> None:
    """Mean retrieval score of every method against its budget, with 95 % intervals.

    Methods without budgets stand where the live tokens that they kept put them.
    """
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    full = [r for r in rows if r["method"] == "full"]
    methods = [m for m in dict.fromkeys(r["method"] for r in rows) if m != "full"]
    if full:
        axes.axhline(100 * full[0]["score"], color="0.5", linestyle="--", label="full cache")
    for i, method in enumerate(methods):
        points = sorted(((budget_fraction(r, length), r) for r in rows if r["method"] == method), key=lambda p: p[0])
        aside = 2 ** (0.04 * (i - (len(methods) - 1) / 2) / max(len(methods) / 5, 1))  # keeps equal budgets apart
        axes.errorbar(
            [100 * b * aside for b, _ in points],
            [100 * r["score"] for _, r in points],
            yerr=[
                [100 * max(r["score"] - r["low"], 0) for _, r in points],
                [100 * max(r["high"] - r["score"], 0) for _, r in points],
            ],
            label=method,
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            linestyle=LINES[i // len(COLOURS) % len(LINES)],
            capsize=3,
            markersize=6,
        )
    axes.set_xscale("log", base=2)
    places = {r["budget"]: 100 * budget_fraction(r, length) for r in rows if r["method"] != "full"}
    ticks = {x for label, x in places.items() if has_budget(label)}
    if len(ticks) < len(places):  # measured places are no round numbers
        ticks |= {100 / 2**i for i in range(10) if 100 / 2**i > min(places.values()) / 2}
    ticks = sorted(ticks)
    if ticks:
        axes.set_xticks(ticks, [f"{t:.3g}" for t in ticks])
        axes.minorticks_off()
    measured = "" if len(places) == sum(map(has_budget, places)) else " (live tokens, where there is none)"
    axes.set(xlabel=f"budget, % of the prompt{measured}", ylabel="retrieval score, % (95 % interval)", ylim=(-3, 103))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    write_figure(path, figure, dpi=150)
    plt.close(figure)


def plot_depth_against_length(samples: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Where in the prompt a single needle is found, for the first method of the run at each of its budgets."""
    needles = [s for s in samples if s["task"] == "single_needle"]
    main = next((s["method"] for s in needles if s["method"] != "full"), "full")
    budgets = list(dict.fromkeys(s["budget"] for s in needles if s["method"] == main))
    depths = sorted({s["depth"] for s in needles})
    lengths = sorted({s["length"] for s in needles})
    figure, grid = plt.subplots(
        1, len(budgets), figsize=(1.5 + 3.0 * len(budgets), 3.4), layout="constrained", squeeze=False, sharey=True
    )
    for axes, budget in zip(grid[0], budgets, strict=True):
        cells = np.full((len(depths), len(lengths)), np.nan)
        counts = [[""] * len(lengths) for _ in depths]
        for i, d in enumerate(depths):
            for j, n in enumerate(lengths):
                hits = [
                    s["score"]
                    for s in needles
                    if (s["method"], s["budget"], s["depth"], s["length"]) == (main, budget, d, n)
                ]
                cells[i, j] = 100 * np.mean(hits) if hits else np.nan
                counts[i][j] = f"{sum(hits):g}/{len(hits)}"
        image = axes.imshow(cells, vmin=0, vmax=100, cmap="cividis", aspect="auto")
        for i, j in np.ndindex(cells.shape):
            if not np.isnan(cells[i, j]):
                colour = "white" if cells[i, j] < 50 else "black"
                axes.text(j, i, counts[i][j], ha="center", va="center", color=colour, fontsize=8)
        axes.set_xticks(range(len(lengths)), [f"{n:.0f}" for n in lengths])
        axes.set_yticks(range(len(depths)), [f"{100 * d:.0f}" for d in depths])
        axes.set(xlabel="prompt length, tokens", title=f"{main}, {'budget ' if has_budget(budget) else ''}{budget}")
    grid[0, 0].set_ylabel("depth of the needle, %")
    figure.colorbar(image, ax=grid[0].tolist(), label="found, %")
    write_figure(path, figure, dpi=150)
    plt.close(figure)


def plot_kept_positions(kept: dict[str, list[np.ndarray]], path: pathlib.Path) -> None:
    """Which tokens of one prompt each method holds after eviction, a row for every layer and kv head."""
    figure, grid = plt.subplots(
        len(kept), 1, figsize=(9, 0.6 + 1.15 * len(kept)), layout="constrained", squeeze=False, sharex=True
    )
    end = 1 + max(int(layer.max()) for layers in kept.values() for layer in layers)
    for axes, (label, layers) in zip(grid[:, 0], kept.items(), strict=True):
        heads = [head[head >= 0] for layer in layers for head in layer]
        held = np.zeros((len(heads), end))
        for row, positions in zip(held, heads, strict=True):
            row[positions] = 1.0
        sharp = "nearest" if end <= 1200 else "antialiased"  # more positions than pixels would lose some
        axes.imshow(held, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation=sharp)
        for i in range(len(layers[0]), len(heads), len(layers[0])):
            axes.axhline(i - 0.5, color="0.6", linewidth=0.5)
        axes.set_ylabel(label.replace("@", "\n"), rotation=0, ha="right", va="center", fontsize=8)
        axes.set_yticks([])
    grid[-1, 0].set_xlabel("position in the prompt; rows are kv heads, grouped by layer from top to bottom")
    write_figure(path, figure, dpi=150)
    plt.close(figure)


def write(directory: pathlib.Path, samples: Sequence[dict[str, Any]], costs: dict[str, Any]) -> str:
    """Writes `summary.json`, `summary.md` and the plots. Returns the table."""
    config = read_config(directory)
    summary = summarise(samples, costs)
    text = markdown(summary, config["name"])
    write_bytes(directory / "summary.md", text.encode())
    if summary["retrieval_mean"]:
        length = config["setup"]["length"]
        plot_score_against_budget(summary["retrieval_mean"], length, directory / "score_against_budget.png")
    if any(s["task"] == "single_needle" for s in samples):
        plot_depth_against_length(samples, directory / "depth_against_length.png")
    kept = load_kept(directory, config)
    if kept:
        plot_kept_positions(kept, directory / "kept_positions.png")
    write_json(directory / "summary.json", summary)  # last: its presence says that the run is complete
    return text


def stands(directory: pathlib.Path, summary: dict[str, Any], text: str) -> bool:
    """Whether a directory's `summary.json` and `summary.md` are these, so that there is nothing to write."""
    try:
        found = json.loads((directory / "summary.json").read_bytes())
        same = json.dumps(found) == json.dumps(summary)  # which NaN equals too
        return same and (directory / "summary.md").read_bytes() == text.encode()
    except (FileNotFoundError, ValueError, RecursionError):
        return False


def save_kept(directory: pathlib.Path, config: dict[str, Any], label: str, layers: list[np.ndarray]) -> None:
    """Keeps the positions that one method holds of the first prompt, "K S" for every layer."""
    folder = directory / "kept"
    folder.mkdir(exist_ok=True)
    content = io.BytesIO()
    np.savez_compressed(content, *layers, seal=_seal_of(config, label, layers))
    write_bytes(folder / f"{label}.npz", content.getvalue())


def load_kept(directory: pathlib.Path, config: dict[str, Any]) -> dict[str, list[np.ndarray]]:
    """What `save_kept` wrote for the policies of a config, in their order; files that are broken are left out."""
    kept = {}
    for label in (f"{p['method']}@{p['budget']}" for p in config["policies"]):
        try:
            with np.load(io.BytesIO((directory / "kept" / f"{label}.npz").read_bytes())) as data:
                layers = [data[k] for k in data.files if k != "seal"]
                if str(data["seal"]) == _seal_of(config, label, layers):
                    kept[label] = layers
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error):
            continue
    return kept


def _seal_of(config: dict[str, Any], label: str, layers: list[np.ndarray]) -> str:
    return seal(config, [label, *(layer.tolist() for layer in layers)])
