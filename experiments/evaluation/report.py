"""Tables and plots of a results directory. Everything here can be made again from its lines."""

import io
import json
import math
import pathlib
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

import kvjax
from kvjax.analysis import Interval
from kvjax.experiments.core.command import write_figure, write_json
from kvjax.experiments.evaluation.agreement import ALIKE
from kvjax.experiments.evaluation.results import read_config, seal
from kvjax.experiments.evaluation.summary import TIMES as TIMES
from kvjax.experiments.evaluation.summary import summarise as summarise
from kvjax.experiments.tasks import NEEDLES
from kvjax.models.written import write_bytes

# --- tables ---


def markdown(summary: dict[str, Any], title: str, options: Mapping[str, str] = {}) -> str:
    """The summary as tables: what was answered, how far that is from the full cache, what it cost; and bad rows.

    Args:
      summary: what `summarise` has found.
      title: the heading.
      options: of methods whose options are not all the defaults of `kvjax.methods`.
    """
    tasks = list(dict.fromkeys(r["task"] for r in summary["rows"]))
    by_key = {(r["method"], r["budget"], r["task"]): r for r in summary["rows"] + summary["retrieval_mean"]}
    runs = list(dict.fromkeys((r["method"], r["budget"]) for r in summary["rows"]))
    shown = [*(["retrieval_mean"] if summary["retrieval_mean"] else []), *tasks]

    head = ["method", "budget", *(escaped(t.replace("_", " ")) for t in shown)]
    quality = [[escaped(m), escaped(b), *(score_cell(by_key.get((m, b, t))) for t in shown)] for m, b in runs]
    per_task = [
        [
            escaped(r["method"]),
            escaped(r["budget"]),
            escaped(r["task"].replace("_", " ")),
            score_cell(r),
            f"{r['live_tokens']:.1f}",
            f"{r['slots']:,}",
            f"{r['kv_bytes'] / 2**10:,.0f}",
            "" if r["kv_bytes_of_full"] is None else f"{100 * r['kv_bytes_of_full']:.1f} %",
            _timed(r, "prefill_seconds", lambda seconds: f"{1000 * seconds:.1f}"),
            _timed(r, "decode_tokens_per_second", lambda speed: f"{speed:,.0f}"),
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
            f"# {escaped(title)}",
            "",
            "Scores in percent with 95 % intervals (`experiments/core/stats.py`). Perplexity as itself, and",
            "in parentheses how likely the text is compared to the full cache.",
            "",
            *table(head, quality),
            "",
            *options_line(options.items()),
            *_kept_whole(summary),
            *_against_full(summary),
            *_agreement(summary),
            "Slots and bytes are for one sequence; live tokens are means over layers and heads after the prompt.",
            "Prefill time is for one sequence of a batch, decode speed for the whole batch. Both are medians over",
            "batches, with intervals between order statistics that hold the median in 95 %. Of fewer than 6 batches",
            "the smallest and the largest stand there, which hold it in 50 % (2 batches), 75 % (3), 88 % (4) or 94 %.",
            "Peaks are what compiled programs take for one batch: arguments (with parameters), results, temporaries.",
            "",
            *table(cost_head, per_task),
            "",
            *_bad_rows(summary["bad_rows"]),
        ]
    )


def options_line(options: Iterable[tuple[str, str]]) -> list[str]:
    """What the methods of a table, (name, options), would be called with, and an empty line; nothing without any."""
    named = ", ".join(escaped(f"{method}({given})") for method, given in dict.fromkeys(options))
    return [f"Options that are not the defaults of `kvjax.methods`: {named}.", ""] if named else []


def _kept_whole(summary: dict[str, Any]) -> list[str]:
    """Which budgets are none for some prompts, so that scores under them are the full cache's."""
    counts: dict[tuple[str, str], list[int]] = {}
    for r in summary["rows"]:
        if r["method"] != "full" and has_budget(r["budget"]):
            whole, of = counts.setdefault((r["method"], r["budget"]), [0, 0])
            counts[r["method"], r["budget"]] = [whole + r["kept_whole"], of + r["examples"]]
    named = [f"{escaped(m)} at {escaped(b)} ({whole} of {of})" for (m, b), (whole, of) in counts.items() if whole]
    if not named:
        return []
    return [
        f"Prompts of which every token was kept, as with the full cache: {', '.join(named)}. The budget is larger, or "
        "less than what the policy must keep of so short a prompt (its window), or it evicts later.",
        "",
    ]


def _against_full(summary: dict[str, Any]) -> list[str]:
    """Every method beside the full cache on the same rows."""
    rows = [r for r in summary["retrieval_mean"] + summary["rows"] if "against_full" in r]
    if not rows:
        return []

    def cells(r: dict[str, Any]) -> list[str]:
        found = r["against_full"]
        scale, unit = (1, " nats") if "perplexity" in r else (100, "")
        shown = [f"{scale * found[name]:+.{3 if unit else 1}f}" for name in ("difference", "low", "high")]
        difference = f"{shown[0]} [{shown[1]}, {shown[2]}]{unit}"
        return [
            escaped(r["method"]),
            escaped(r["budget"]),
            escaped(r["task"].replace("_", " ")),
            difference,
            f"{found['p']:.3g}",
            found["verdict"],
        ]

    return [
        "Beside the full cache on the same rows: points of the score, or log-likelihood of a token. Above 0 is better.",
        "p-values are adjusted for all methods and budgets on a task (Holm); a verdict needs 0.05 at most. Intervals",
        "are of each comparison alone, before that.",
        "",
        *table(["method", "budget", "task", "difference", "p", "verdict"], [cells(r) for r in rows]),
        "",
    ]


def _agreement(summary: dict[str, Any]) -> list[str]:
    """How far the outputs of every method are the full cache's."""
    rows = [r for r in summary["rows"] if "agreement" in r]
    if not rows:
        return []

    def cells(r: dict[str, Any]) -> list[str]:
        shown = ([f"{100 * x:.1f}" for x in r["agreement"][name]] for name in ALIKE)
        intervals = [f"{mean} [{low}, {high}]" for mean, low, high in shown]
        return [escaped(r["method"]), escaped(r["budget"]), escaped(r["task"].replace("_", " ")), *intervals]

    return [
        "How far outputs are the full cache's on the same rows, in percent: equal ones, its words up to",
        "the first that differs, and similarity of words (`experiments/evaluation/agreement.py`).",
        "",
        *table(["method", "budget", "task", "equal", "equal up to", "similarity"], [cells(r) for r in rows]),
        "",
    ]


def _bad_rows(bad: Sequence[dict[str, Any]]) -> list[str]:
    """How many rows of data could not be asked, and the first of them."""
    if not bad:
        return []
    shown = [f"- {escaped(row['task'])}, line {row['line']}: {plain(row['reason'])}" for row in bad[:20]]
    more = [f"- and {len(bad) - len(shown)} more in bad_rows.jsonl"] if len(bad) > len(shown) else []
    rows, are = ("row", "is") if len(bad) == 1 else ("rows", "are")
    return [f"{len(bad)} {rows} could not be asked, and {are} not among the examples:", "", *shown, *more, ""]


def _timed(row: dict[str, Any], name: str, shown: Callable[[float], str]) -> str:
    """A median over batches with its interval, which one batch has not."""
    low, high = shown(row[f"{name}_low"]), shown(row[f"{name}_high"])
    batches = row["timed_batches"]
    return f"{shown(row[name])} " + (f"[{low}, {high}] of {batches}" if batches > 1 else "(one batch)")


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
    first, *lines = (f"| {' | '.join(map(plain, row))} |" for row in (head, *rows))
    return [first, "|" + "---|" * len(head), *lines]


def plain(text: str) -> str:
    """Text in one line of Markdown that begins no HTML and no cell of a table; what is escaped already stays."""
    return re.sub(r"(\\.)|([<|])|\s*[\r\n]\s*", lambda m: m[1] or (f"\\{m[2]}" if m[2] else " "), text)


def escaped(text: str) -> str:
    """Text that is no markup, in one line; underscores within words are none, and stay."""
    return " ".join(re.sub(r"[\\`*{}\[\]<>|#]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", text).split())


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


def budget_name(label: str) -> str:
    """A label of a budget as pictures write it: "12.5 %", "64 tokens", "T=0.95"."""
    if not has_budget(label):
        return label
    share, unit = f"{100 * float(label):.3g}", "%"
    return "\N{NO-BREAK SPACE}".join((share, unit) if "." in label else (label, "tokens"))


def _run_name(method: str, budget: str) -> str:
    return "full cache" if (method, budget) == ("full", "1.0") else f"{method} {budget_name(budget)}"


def _plot_against_budget(
    rows: Sequence[dict[str, Any]], length: int, value: Callable[..., Interval], **options: Any
) -> Any:
    """Numbers of every method against its budget, or where there is none against the live tokens that were measured."""
    curves: dict[str, dict[float, Interval]] = {}
    for r in rows:
        if r["method"] != "full":
            measured = "" if has_budget(r["budget"]) else " (live tokens)"
            curves.setdefault(f"{r['method']}{measured}", {})[budget_fraction(r, length)] = value(r)
    full = next((value(r) for r in rows if r["method"] == "full"), None)
    if not curves and full is not None:
        curves = {"full": {1.0: full}}
    return kvjax.plot.budget_curve(curves, full=full, **options)


def plot_score_against_budget(rows: Sequence[dict[str, Any]], length: int, path: pathlib.Path) -> None:
    """Mean retrieval score of every method against its budget, with 95 % intervals."""
    value = lambda r: Interval(*(100 * r[k] for k in ("score", "low", "high")))
    figure = _plot_against_budget(rows, length, value, ylabel="retrieval score, % (95 % interval)")
    for axes in figure.axes:
        axes.set_ylim(-3, 103)
    write_figure(path, figure, dpi=150)


def plot_perplexity_against_budget(rows: Sequence[dict[str, Any]], length: int, path: pathlib.Path) -> None:
    """Perplexity of every method against its budget, with 95 % intervals over examples."""
    value = lambda r: Interval(*(r[k] for k in ("perplexity", "low", "high")))
    finite = [r for r in rows if math.isfinite(r["perplexity"])]
    figure = _plot_against_budget(finite, length, value, ylabel="perplexity (95 % interval)")
    found = [r["perplexity"] for r in finite]
    for axes in figure.axes if max(found) > 4 * min(found) else ():
        axes.set_yscale("log")
    write_figure(path, figure, dpi=150)


def plot_depth_against_length(samples: Sequence[dict[str, Any]], length: int, path: pathlib.Path) -> None:
    """Where in the prompt a single needle is found, for every policy of the run, those of one budget side by side.

    Of several tasks that hide one needle, the first in `NEEDLES` is drawn. Depths are joined to bands until three
    needles are in a cell on average.
    """
    needles: dict[tuple[str, str], list[dict[str, Any]]] = {}
    found = {s["task"] for s in samples}
    drawn = next(name for name in NEEDLES if name in found)
    for s in samples:
        if s["task"] == drawn:
            needles.setdefault((s["method"], s["budget"]), []).append(s)
    kept = lambda group: float(np.mean([s["live"] / s["prompt_tokens"] for s in group]))
    share = {r: budget_fraction({"budget": r[1], "live_of_prompt": kept(g)}, length) for r, g in needles.items()}
    ordered = sorted(needles, key=lambda run: -share[run])
    first = needles[ordered[0]]
    depths, lengths = (len({s[key] for s in first}) for key in ("depth", "length"))
    bands = next((n for n in (8, 4, 2) if n <= depths and len(first) >= 3 * n * lengths), 2)
    named = {_run_name(*run): needles[run] for run in ordered}
    figure = kvjax.plot.depth_against_length(named, depths=None if bands == depths else min(bands, depths))
    write_figure(path, figure, dpi=150)


def prominence(task: str, prompt_tokens: float) -> tuple[bool, float]:
    """What orders examples: kept positions are drawn of the first with the largest, of a needle where there is any."""
    return task in NEEDLES, prompt_tokens


def plot_kept_positions(
    kept: dict[str, list[np.ndarray]], samples: Sequence[dict[str, Any]], path: pathlib.Path
) -> None:
    """Which tokens of one prompt each method holds after eviction, and where the needle is."""
    shown = max(samples, key=lambda s: prominence(s["task"], s["prompt_tokens"]))
    markers = {}
    if "needle_at" in shown:
        start = int(shown["needle_at"])
        markers["needle"] = range(start, start + int(shown["needle_tokens"]))
    same = {
        f"{s['method']}@{s['budget']}" for s in samples if (s["task"], s["index"]) == (shown["task"], shown["index"])
    }
    named = {_run_name(*label.split("@")): layers for label, layers in kept.items() if label in same}
    write_figure(path, kvjax.plot.kept_positions(named, length=shown["prompt_tokens"], markers=markers), dpi=150)


def write(
    directory: pathlib.Path,
    samples: Sequence[dict[str, Any]],
    costs: dict[str, Any],
    bad: Sequence[dict[str, Any]] = (),
) -> str:
    """Writes `summary.json`, `summary.md` and the plots. Returns the table."""
    config = read_config(directory)
    summary = summarise(samples, costs, bad)
    text = markdown(summary, config["name"], {p["method"]: p["options"] for p in config["policies"] if "options" in p})
    write_bytes(directory / "summary.md", text.encode())
    length = config["setup"]["length"]
    if summary["retrieval_mean"]:
        plot_score_against_budget(summary["retrieval_mean"], length, directory / "score_against_budget.png")
    if rows := [r for r in summary["rows"] if r["task"] == "perplexity"]:
        plot_perplexity_against_budget(rows, length, directory / "perplexity_against_budget.png")
    if any(s["task"] in NEEDLES for s in samples):
        plot_depth_against_length(samples, length, directory / "depth_against_length.png")
    kept = load_kept(directory, config)
    if kept:
        plot_kept_positions(kept, samples, directory / "kept_positions.png")
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
