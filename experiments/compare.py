"""One leaderboard over finished runs.

    python experiments/compare.py results/*
    python experiments/compare.py results/snapkv results/h2o --output results/leaderboard
    python experiments/compare.py results/mine --with experiments/leaderboard

Prints a table, and with `--output` writes it with a plot. Runs on other tasks, models or lengths are not comparable,
and are refused. Neither are the times of separate runs, which are left out: `bench_decode.py` compares speeds. Left
out are comparisons with the full cache, too, whose p-values are adjusted for the methods of one run. `--with` adds the
numbers of leaderboards that this wrote before; rows say which code they are of.
"""

import importlib

if __name__ == "__main__":  # before imports that take seconds
    importlib.import_module(f"{__package__ or ''}.stopping".lstrip(".")).begin()

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvjax
from kvjax.experiments.core.command import check_output, directory_path, plain_errors, write_figure, write_json
from kvjax.experiments.core.locks import alone_in
from kvjax.experiments.evaluation import boards, report
from kvjax.experiments.evaluation.boards import Board
from kvjax.experiments.evaluation.results import Key, planned_keys, read_bad, read_config, read_costs, read_samples
from kvjax.models.written import write_bytes


def load(
    directories: Sequence[pathlib.Path], others: Sequence[Board] = ()
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The shared setup, and the rows of all runs, made from their lines; of equal policies the first one found.

    A method that ran with different parameters is named after its run as well. Directories that are no finished run of
    `experiments/run.py` are named and skipped.

    Args:
      directories: of runs.
      others: leaderboards whose rows come after those of the runs.

    Raises:
      ValueError: no finished run, runs or leaderboards that cannot be compared, or files that are broken or belong to
        another run.
    """
    configs: dict[pathlib.Path, dict[str, Any]] = {}
    for d in dict.fromkeys(directories):
        if not (d / "summary.json").is_file():
            print(f"skipped {d}: no summary.json, so not a finished run", file=sys.stderr)
        elif not _is_run(config := _config(d)):
            print(f"skipped {d}: not a run of experiments/run.py", file=sys.stderr)
        else:
            configs[d] = config
    if not configs:
        raise ValueError("no finished run among the directories given; run experiments/run.py first")
    setups = {d: boards.setup_of(config) for d, config in configs.items()}
    (start, first), *_ = setups.items()
    for d, setup in setups.items():
        if differing := boards.differences(setup, first):
            raise ValueError(f"{d} cannot be compared with {start}: {', '.join(differing)}")
    variants: dict[tuple[str, str], set[str]] = {}
    for config in configs.values():
        for p in config["policies"]:
            variants.setdefault((p["method"], p["budget"]), set()).add(f"{p['policy']} {config['setup'].get('block')}")
    ambiguous = {method for (method, _), policies in variants.items() if len(policies) > 1}
    names = {d: d.name if [e.name for e in configs].count(d.name) == 1 else str(d) for d in configs}

    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for parts in _whole(configs):
        d, summary = parts[0], _summary({part: configs[part] for part in parts})
        code = ", ".join(dict.fromkeys(boards.code_of(_manifest(part)) for part in parts))
        options = {p["method"]: {"options": p["options"]} for p in configs[d]["policies"] if "options" in p}
        for row in [*summary["rows"], *summary["retrieval_mean"]]:
            method = f"{row['method']} ({names[d]})" if row["method"] in ambiguous else row["method"]
            kept = {k: x for k, x in row.items() if k not in (*report.TIMES, "against_full")}
            kept |= {"method": method, "kv_budget": report.budget_fraction(row, first["length"]), "code": code}
            kept |= options.get(row["method"], {})
            rows.setdefault((method, row["budget"], row["task"]), kept)
    found = list(rows.values())
    for board in others:
        board.check(str(start), first, found)
        found += board.beside(found)
    return first, found


def _config(directory: pathlib.Path) -> dict[str, Any]:
    return read_config(directory) if (directory / "manifest.json").is_file() else {}


def _manifest(directory: pathlib.Path) -> dict[str, Any]:
    return json.loads((directory / "manifest.json").read_bytes())


def _is_run(config: dict[str, Any]) -> bool:
    """Whether a config is one that `experiments/run.py` wrote."""
    setup, policies = config.get("setup"), config.get("policies")
    named = lambda p: isinstance(p, dict) and {"method", "budget", "policy"} <= set(p)
    whole = isinstance(setup, dict) and isinstance(config.get("tasks"), dict)
    return whole and isinstance(policies, list) and all(map(named, policies))


def _whole(configs: dict[pathlib.Path, dict[str, Any]]) -> list[list[pathlib.Path]]:
    """The directories of each run: one, or all shards of it in their order.

    Raises:
      ValueError: shards that are missing, or there twice.
    """
    runs: dict[str, list[pathlib.Path]] = {}
    for d, config in configs.items():
        rest = {name: value for name, value in config.items() if name != "shard"}
        alone = str(d) if not config.get("shard") else f"{config['shard'][1]} shards"
        runs.setdefault(f"{alone} {json.dumps(rest, sort_keys=True)}", []).append(d)
    for found in runs.values():
        if not configs[found[0]].get("shard"):
            continue
        found.sort(key=lambda d: configs[d]["shard"][0])
        there, of = [configs[d]["shard"][0] for d in found], configs[found[0]]["shard"][1]
        if missing := [f"{i}/{of}" for i in range(1, of + 1) if i not in there]:
            raise ValueError(
                f"{found[0]} is a shard of a run whose shard {', '.join(missing)} is missing; finish it, and give it"
            )
        if twice := [str(d) for i, d in enumerate(found) if there[i] in there[:i]]:
            raise ValueError(f"{', '.join(twice)} is a shard that another directory is too; leave it out")
    return [*runs.values()]


def _summary(parts: dict[pathlib.Path, dict[str, Any]]) -> dict[str, Any]:
    """The rows that a run's lines give, of all of its shards.

    Raises:
      ValueError: lines or costs that are missing or not this run's.
    """
    lines: dict[Key, dict[str, Any]] = {}
    costs: dict[str, Any] = {}
    bad: list[dict[str, Any]] = []
    for directory, config in parts.items():
        samples, _ = read_samples(directory, config)
        sizes, bad = read_costs(directory, config), read_bad(directory, config)
        keys = planned_keys(config, bad)
        lost = sum(k not in samples for k in keys)
        if lost or any(f"{method}@{budget}" not in sizes for method, budget, *_ in keys):
            raise ValueError(
                f"{directory} lacks {f'{lost} lines of samples.jsonl' if lost else 'costs.json'}; run it again, and it "
                "is completed, or leave it out"
            )
        lines |= {k: samples[k] for k in keys}
        costs = {**sizes, **costs}
    whole = {**next(iter(parts.values())), "shard": None}
    return report.summarise([lines[k] for k in planned_keys(whole, bad)], costs, bad)


def leaderboard(rows: Sequence[dict[str, Any]]) -> str:
    """A table with a row for every method and budget: the largest budget first, then the best retrieval score.

    Which code rows are of stands there if they are of several, and below it which options of methods are no defaults.
    """
    means = [r for r in rows if r["task"] == "retrieval_mean"]
    shown = means or list({(r["method"], r["budget"]): r for r in rows}.values())  # runs without retrieval tasks
    ordered = sorted(shown, key=lambda r: (-r["kv_budget"], -r.get("score", 0.0)))
    tasks = [t for t in dict.fromkeys(r["task"] for r in rows) if t != "retrieval_mean"]
    by_key = {(r["method"], r["budget"], r["task"]): r for r in rows}
    head = [
        "method",
        "budget",
        *(["retrieval mean"] if means else []),
        *(report.escaped(t.replace("_", " ")) for t in tasks),
        "live of prompt",
        "KV of full",
        *(["code"] if (several := len({r["code"] for r in rows}) > 1) else []),
    ]
    lines = [
        [
            report.escaped(r["method"]),
            report.escaped(r["budget"]),
            *([report.score_cell(r)] if means else []),
            *(report.score_cell(by_key.get((r["method"], r["budget"], t))) for t in tasks),
            f"{100 * r['live_of_prompt']:.1f} %",
            "" if r["kv_bytes_of_full"] is None else f"{100 * r['kv_bytes_of_full']:.1f} %",
            *([r["code"]] if several else []),
        ]
        for r in ordered
    ]
    options = report.options_line((r["method"], r["options"]) for r in rows if "options" in r)
    return "\n".join([*report.table(head, lines), "", *options])


def by_budget(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[str], dict[tuple[str, str], dict[str, float]]]:
    """Methods, the best first; budgets, the largest first; and the mean score and perplexity of each pair.

    The score is the retrieval mean where retrieval tasks ran, and the mean of all tasks that have scores otherwise; the
    perplexity is the task's of that name, or that of the only other one. What has no budget stands under "-", with its
    label behind its name, the live tokens that were measured, and the bytes that are allocated.
    """
    cells: dict[tuple[str, str], dict[str, float]] = {}
    of: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    size: dict[str, float] = {}
    measured: dict[tuple[str, str], str] = {}
    for r in [*(r for r in rows if r["task"] == "retrieval_mean"), *rows]:
        if not report.has_budget(r["budget"]):
            measured.setdefault((r["method"], r["budget"]), _measured(r))
    for r in rows:
        method, budget = r["method"], r["budget"]
        if not report.has_budget(budget):
            method, budget = f"{method} {budget} ({measured[method, budget]})", "-"
        size[budget] = -1.0 if budget == "-" else max(size.get(budget, 0.0), r["kv_budget"])
        of.setdefault((method, budget), {})[r["task"]] = r
    for key, tasks in of.items():
        likely = {t: r["perplexity"] for t, r in tasks.items() if "perplexity" in r}
        scores = [r["score"] for r in tasks.values() if "perplexity" not in r]
        cells[key] = {}
        if scores:
            cells[key]["score"] = 100 * tasks.get("retrieval_mean", {"score": float(np.mean(scores))})["score"]
        if "perplexity" in likely or len(likely) == 1:
            cells[key]["perplexity"] = likely.get("perplexity", next(iter(likely.values())))
    quality = lambda c: c["score"] if "score" in c else -c.get("perplexity", 0.0)
    mean = lambda method: float(np.mean([quality(c) for (m, _), c in cells.items() if m == method]))
    methods = sorted(dict.fromkeys(m for m, _ in cells), key=mean, reverse=True)
    return methods, sorted(size, key=lambda b: size[b], reverse=True), cells


def _measured(row: dict[str, Any]) -> str:
    """How much a policy without a budget keeps: live tokens, and bytes where it allocates fewer than the full cache."""
    share = row["kv_bytes_of_full"]
    fewer = "" if share is None or share > 0.9995 else f", {100 * share:.0f} % of bytes"
    return f"{100 * row['live_of_prompt']:.0f} % live{fewer}"


def overview(rows: Sequence[dict[str, Any]]) -> str:
    """A row for every method, with "score / perplexity" at every budget."""
    methods, budgets, cells = by_budget(rows)

    def cell(c: dict[str, float] | None) -> str:
        shown = [] if c is None else [f"{c[k]:.{n}f}" for k, n in (("score", 1), ("perplexity", 2)) if k in c]
        return " / ".join(shown)

    lines = [[report.escaped(m), *(cell(cells.get((m, b))) for b in budgets)] for m in methods]
    return "\n".join(report.table(["method", *budgets], lines)) + "\n"


def _beside(methods: Sequence[str]) -> list[str]:
    """Names that leave room for a map: of a run that is named after its options, as many as fit in two lines."""
    options = (m.replace(f"({m.partition(' ')[0]}-", "(").replace(" %", "\N{NO-BREAK SPACE}%") for m in methods)
    short = [kvjax.plot.style.wrapped(name, 34, 2) for name in options]
    count = lambda i: f" ({short[: i + 1].count(short[i])})" if short.count(short[i]) > 1 else ""
    return [name + count(i) for i, name in enumerate(short)]


def plot(rows: Sequence[dict[str, Any]]) -> Any:
    """The overview as two maps, each with its scale: mean score, and perplexity; brighter is better in both.

    Darkest are all perplexities in the highest tenth.

    Returns:
      The figure; None if there is neither a score nor a perplexity.
    """
    methods, budgets, cells = by_budget(rows)
    wanted = [k for k in ("score", "perplexity") if any(k in c for c in cells.values())]
    if not wanted:
        return None
    names = _beside(methods)
    lines = sum(n.count("\n") + 1 for n in names)
    size = 2.4 + (0.9 + 0.55 * len(budgets)) * len(wanted), 1.6 + max(0.19 * lines, 0.26 * len(methods))
    grid = kvjax.plot.style.panels(None, len(wanted), columns=len(wanted), size=size)
    figure = kvjax.plot.style.figure_of(grid[0])
    for axes, key in zip(grid, wanted, strict=True):
        values = np.array([[cells.get((m, b), {}).get(key, np.nan) for b in budgets] for m in methods])
        score = key == "score"
        low, high = (
            (0.0, 100.0) if score else (np.nanmin(values), np.nanquantile(values, 0.9))
        )  # outliers hide the rest
        cmap = "viridis" if score else "viridis_r"
        image = axes.imshow(values, aspect="auto", cmap=cmap, vmin=low, vmax=high)
        for (i, j), x in np.ndenumerate(values):
            if np.isfinite(x):
                bright = (x > (low + high) / 2) == score
                text = f"{x:.0f}" if score else f"{x:.1f}"
                axes.text(j, i, text, ha="center", va="center", fontsize=8, color="black" if bright else "white")
        ticks = [report.budget_name(b) for b in budgets]
        axes.set_xticks(range(len(budgets)), ticks, fontsize="small", rotation=30 * any(len(t) > 7 for t in ticks))
        axes.set_yticks(range(len(methods)), names if axes is grid[0] else [], fontsize="small")
        axes.set_facecolor("0.95")
        axes.set_xlabel("budget")
        bar = figure.colorbar(
            image, ax=axes, location="top", aspect=40, pad=0.12 / size[1], extend="neither" if score else "max"
        )
        bar.set_label(_score_name(rows) + ", %" if score else "perplexity")
        bar.ax.tick_params(labelsize="small")
    return figure


def _score_name(rows: Sequence[dict[str, Any]]) -> str:
    """What the scores of `by_budget` are, with their metrics where those are several."""
    if any(r["task"] == "retrieval_mean" for r in rows):
        return "retrieval mean"
    metrics = sorted({m for r in rows for m in r.get("metrics", ())})
    return f"mean score (of different metrics: {', '.join(metrics)})" if len(metrics) > 1 else "mean score"


def main(argv: Sequence[str]) -> None:
    """Loads, prints, plots."""
    parser = argparse.ArgumentParser(prog="experiments/compare.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=pathlib.Path, help="results directories")
    parser.add_argument(
        "--with", nargs="+", default=(), type=directory_path, metavar="DIR", dest="boards",
        help="leaderboards that this wrote, such as experiments/leaderboard",
    )  # fmt: skip
    parser.add_argument("--output", type=directory_path, help="directory for leaderboard.md, .json and .png")
    with plain_errors():
        arguments = parser.parse_args(argv)
        if absent := [str(d) for d in arguments.runs if not d.exists()]:
            raise ValueError(f"there is no {', '.join(absent)}")
        setup, rows = load([d for d in arguments.runs if d.is_dir()], boards.read(arguments.boards))
        name = _score_name(rows)
        name = name[:1].upper() + name[1:]
        text = f"{leaderboard(rows)}\n{name} in percent / perplexity, by budget:\n\n{overview(rows)}"
        print(text)
        if arguments.output is not None:
            check_output(arguments.output / "leaderboard.md")
            figure, picture = plot(rows), arguments.output / "leaderboard.png"
            with alone_in(arguments.output):
                (arguments.output / boards.FILE).unlink(missing_ok=True)  # never beside what it is not about
                write_bytes(arguments.output / "leaderboard.md", text.encode())
                if figure is None:
                    picture.unlink(missing_ok=True)
                else:
                    write_figure(picture, figure, dpi=150)
                write_json(arguments.output / boards.FILE, {"setup": setup, "rows": rows})
            print(f"written to {arguments.output}")


if __name__ == "__main__":
    main(sys.argv[1:])
