"""One leaderboard over finished runs.

    python experiments/compare.py results/*
    python experiments/compare.py results/snapkv results/h2o --output results/leaderboard

Prints a table, and with `--output` writes it with a plot. Runs on other tasks, models or lengths are not comparable,
and are refused.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from experiments import report
from experiments.results import write_json

_SHARED = ("model", "tasks", "examples", "length", "protocol", "seed", "dtype")


def load(directories: Sequence[pathlib.Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The shared setup, and the rows of all runs; of equal policies the first one found.

    A method that ran with different parameters is named after its run as well.

    Raises:
      ValueError: no finished run, or runs that cannot be compared.
    """
    runs = [d for d in directories if (d / "summary.json").is_file()]
    for d in sorted(set(directories) - set(runs)):
        print(f"skipped {d}: no summary.json, so not a finished run", file=sys.stderr)
    if not runs:
        raise ValueError("no finished run among the directories given; run experiments/run.py first")
    setups = {d: json.loads((d / "manifest.json").read_text())["config"]["setup"] for d in runs}
    first = setups[runs[0]]
    for d, setup in setups.items():
        differing = [f"{k}={setup[k]!r} against {first[k]!r}" for k in _SHARED if setup[k] != first[k]]
        if differing:
            raise ValueError(f"{d} cannot be compared with {runs[0]}: {', '.join(differing)}")
    definitions = {d: _definitions(d) for d in runs}
    variants: dict[tuple[str, str], set[str]] = {}
    for found in definitions.values():
        for key, policy in found.items():
            variants.setdefault(key, set()).add(policy)
    ambiguous = {method for (method, _), policies in variants.items() if len(policies) > 1}

    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for d in runs:
        summary = json.loads((d / "summary.json").read_text())
        for row in [*summary["rows"], *summary["retrieval_mean"]]:
            method = f"{row['method']} ({d.name})" if row["method"] in ambiguous else row["method"]
            rows.setdefault((method, row["budget"], row["task"]), {**row, "method": method})
    return first, list(rows.values())


def _definitions(directory: pathlib.Path) -> dict[tuple[str, str], str]:
    """What a run's methods and budgets stand for."""
    policies = json.loads((directory / "manifest.json").read_text())["config"]["policies"]
    return {(p["method"], p["budget"]): p["policy"] for p in policies}


def leaderboard(rows: Sequence[dict[str, Any]]) -> str:
    """A table with a row for every method and budget: the largest budget first, then the best retrieval score."""
    means = [r for r in rows if r["task"] == "retrieval_mean"]
    shown = means or list({(r["method"], r["budget"]): r for r in rows}.values())  # runs without retrieval tasks
    ordered = sorted(shown, key=lambda r: (-r["kv_budget"], -r.get("score", 0.0)))
    tasks = [t for t in dict.fromkeys(r["task"] for r in rows) if t != "retrieval_mean"]
    by_key = {(r["method"], r["budget"], r["task"]): r for r in rows}
    head = [
        "method",
        "budget",
        *(["retrieval mean"] if means else []),
        *(t.replace("_", " ") for t in tasks),
        "KV of full",
        "decode tokens/s",
    ]
    lines = [
        [
            r["method"],
            r["budget"],
            *([report.score_cell(r)] if means else []),
            *(report.score_cell(by_key.get((r["method"], r["budget"], t))) for t in tasks),
            "" if r["kv_bytes_of_full"] is None else f"{100 * r['kv_bytes_of_full']:.1f} %",
            f"{r['decode_tokens_per_second']:,.0f}",
        ]
        for r in ordered
    ]
    return "\n".join(report.table(head, lines)) + "\n"


def by_budget(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[str], dict[tuple[str, str], dict[str, float]]]:
    """Methods, the best first; budgets, the largest first; and the mean retrieval score and perplexity of each pair.

    What has no budget stands under "-", with its label behind its name.
    """
    cells: dict[tuple[str, str], dict[str, float]] = {}
    size: dict[str, float] = {}
    for r in rows:
        method, budget = r["method"], r["budget"]
        if not report.has_budget(budget):
            method, budget = f"{method} {budget}", "-"
        size[budget] = -1.0 if budget == "-" else max(size.get(budget, 0.0), r["kv_budget"])
        cell = cells.setdefault((method, budget), {})
        if r["task"] == "retrieval_mean":
            cell["retrieval"] = 100 * r["score"]
        elif r["task"] == "perplexity":
            cell["perplexity"] = r["perplexity"]
    quality = lambda c: c["retrieval"] if "retrieval" in c else -c.get("perplexity", 0.0)
    mean = lambda method: float(np.mean([quality(c) for (m, _), c in cells.items() if m == method]))
    methods = sorted(dict.fromkeys(m for m, _ in cells), key=mean, reverse=True)
    return methods, sorted(size, key=lambda b: size[b], reverse=True), cells


def overview(rows: Sequence[dict[str, Any]]) -> str:
    """A row for every method, with "retrieval / perplexity" at every budget."""
    methods, budgets, cells = by_budget(rows)

    def cell(c: dict[str, float] | None) -> str:
        shown = [] if c is None else [f"{c[k]:.{n}f}" for k, n in (("retrieval", 1), ("perplexity", 2)) if k in c]
        return " / ".join(shown)

    lines = [[m, *(cell(cells.get((m, b))) for b in budgets)] for m in methods]
    return "\n".join(report.table(["method", *budgets], lines)) + "\n"


def plot(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """The overview as two maps: retrieval score, and perplexity; brighter is better in both."""
    methods, budgets, cells = by_budget(rows)
    wanted = [k for k in ("retrieval", "perplexity") if any(k in c for c in cells.values())]
    size = 1.6 + 3.4 * len(wanted), 1.2 + 0.27 * len(methods)
    figure, axes = plt.subplots(ncols=len(wanted), figsize=size, layout="constrained", squeeze=False)
    for axis, key in zip(axes[0], wanted, strict=True):
        values = np.array([[cells.get((m, b), {}).get(key, np.nan) for b in budgets] for m in methods])
        low, high = (
            np.nanmin(values),
            np.nanquantile(values, 1.0 if key == "retrieval" else 0.9),
        )  # outliers hide the rest
        axis.imshow(values, aspect="auto", cmap="viridis" if key == "retrieval" else "viridis_r", vmin=low, vmax=high)
        middle = (low + high) / 2
        for (i, j), x in np.ndenumerate(values):
            if np.isfinite(x):
                bright = (x > middle) == (key == "retrieval")
                text = f"{x:.0f}" if key == "retrieval" else f"{x:.1f}"
                axis.text(j, i, text, ha="center", va="center", fontsize=8, color="black" if bright else "white")
        axis.set_xticks(range(len(budgets)), budgets)
        axis.set_yticks(range(len(methods)), methods if axis is axes[0, 0] else [])
        axis.set(xlabel="budget", title="retrieval score, %" if key == "retrieval" else "perplexity")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: Sequence[str]) -> None:
    """Loads, prints, plots."""
    parser = argparse.ArgumentParser(prog="experiments/compare.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=pathlib.Path, help="results directories")
    parser.add_argument("--output", type=pathlib.Path, help="directory for leaderboard.md, .json and .png")
    arguments = parser.parse_args(argv)
    try:
        if absent := [str(d) for d in arguments.runs if not d.exists()]:
            raise ValueError(f"there is no {', '.join(absent)}")
        setup, rows = load([d for d in arguments.runs if d.is_dir()])
    except ValueError as e:
        raise SystemExit(f"error: {e}") from e
    for r in rows:
        r["kv_budget"] = report.budget_fraction(r, setup["length"])
    text = f"{leaderboard(rows)}\nRetrieval mean in percent / perplexity, by budget:\n\n{overview(rows)}"
    print(text)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "leaderboard.md").write_text(text)
        write_json(arguments.output / "leaderboard.json", {"setup": setup, "rows": rows})
        plot(rows, arguments.output / "leaderboard.png")
        print(f"written to {arguments.output}")


if __name__ == "__main__":
    main(sys.argv[1:])
