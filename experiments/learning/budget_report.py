"""Tables and plots of `learn.py budget`. Everything here can be made again from its lines and tables."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np

import kvjax
from kvjax.analysis import Interval
from kvjax.analysis.hindsight import Across
from kvjax.experiments.core import stats
from kvjax.experiments.core.command import write_figure, write_json
from kvjax.experiments.core.page import Table
from kvjax.experiments.core.records import read_manifest
from kvjax.models.written import write_bytes

HINDSIGHT: Final[dict[str, Across]] = {"hindsight_heads": "head", "hindsight": "model"}
"""The oracles: the best masks for the attention to come, of as many tokens in every head, or in the whole model."""

_NAMES = {
    "uniform": "uniform",
    "pyramid": "pyramid",
    "ada_static": "Ada-KV, average table",
    "ada": "Ada-KV, per prompt",
    "learned": "learned",
    "hindsight_heads": "best tokens in hindsight, uniform",
    "hindsight": "best mask in hindsight",
}


def summarise(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row a budget and method: mean loss, its interval, and what learning is ahead of it on the same prompts.

    And the attention to come that is lost, and by how much that exceeds what the best mask in hindsight loses.
    """
    groups: dict[tuple[str, str], dict[tuple[str, int], dict[str, Any]]] = {}
    for s in samples:
        groups.setdefault((s["budget"], s["method"]), {})[s["task"], s["index"]] = s
    rows = []
    for (budget, method), group in groups.items():
        learned = groups[budget, "learned"]
        losses = [group[k]["loss"] for k in group]
        row: dict[str, Any] = {"budget": budget, "method": method, "prompts": len(group)}
        row |= dict(zip(("loss", "low", "high"), stats.mean(losses), strict=True))
        row["layers"] = np.mean([s["layers"] for s in group.values()], axis=0).tolist()
        row["live"] = float(np.mean([s["live"] for s in group.values()]))
        lost = stats.mean([s["lost"] for s in group.values()])
        row |= dict(zip(("lost", "lost_low", "lost_high"), lost, strict=True))
        row["regret"] = float(np.mean([s["regret"] for s in group.values()]))
        if method not in ("learned", *HINDSIGHT):
            ahead = [group[k]["loss"] - learned[k]["loss"] for k in group]
            row |= dict(zip(("ahead", "ahead_low", "ahead_high"), stats.mean(ahead), strict=True))
            row["learned_wins"] = float(np.mean(np.array(ahead) > 0))
            row["disjoint"] = not (row["low"] <= stats.mean([s["loss"] for s in learned.values()])[2])
        rows.append(row)
    return {"rows": rows, "theorem_4": _theorem_4(groups)}


def _theorem_4(groups: dict[tuple[str, str], dict[tuple[str, int], dict[str, Any]]]) -> list[dict[str, Any]]:
    """For every budget: on how many layers of how many prompts Ada-KV's bound is at most uniform's."""
    rows = []
    for budget in dict.fromkeys(b for b, _ in groups):
        pairs = [
            (groups[budget, "uniform"][k]["least_bound"], s["least_bound"]) for k, s in groups[budget, "ada"].items()
        ]
        uniform, ada = (np.array(x) for x in zip(*pairs, strict=True))
        holds = ada <= uniform * (1 + 1e-5) + 1e-6  # sums of float32
        rows.append(
            {
                "budget": budget,
                "holds": int(holds.sum()),
                "of": holds.size,
                "ratio": float(ada.mean() / uniform.mean()) if uniform.any() else None,  # nothing is evicted
                "largest_excess": float((ada - uniform).max()),
            }
        )
    return rows


def markdown(summary: dict[str, Any], title: str, tables: dict[str, Any]) -> str:
    """The summary as tables."""
    percent = lambda x: f"{100 * x:.2f}"
    rows = [
        [
            r["budget"],
            _NAMES[r["method"]],
            f"{percent(r['loss'])} [{percent(r['low'])}, {percent(r['high'])}]",
            f"{percent(r['ahead'])} [{percent(r['ahead_low'])}, {percent(r['ahead_high'])}]" if "ahead" in r else "",
            f"{100 * r['learned_wins']:.0f} %" if "ahead" in r else "",
            ("yes" if r["disjoint"] else "no") if "ahead" in r else "",
            f"{100 * r['lost']:.1f}",
            f"{100 * r['regret']:.1f}",
            " ".join(f"{100 * x:.1f}" for x in r["layers"]),
            f"{r['live']:.1f}",
        ]
        for r in summary["rows"]
    ]
    head = ["budget", "division", "loss", "less with learned", "prompts where learned is better", "intervals apart"]
    theorem = [
        [
            r["budget"],
            f"{r['holds']} of {r['of']}",
            "-" if r["ratio"] is None else f"{r['ratio']:.3f}",
            f"{r['largest_excess']:.1e}",
        ]
        for r in summary["theorem_4"]
    ]
    learned = [
        [b, " / ".join(" ".join(f"{x:.2f}" for x in row) for row in t["heads"]), f"{t['total_off']:.1e}"]
        for b, t in tables.items()
    ]
    return "\n".join(
        [
            f"# {title}",
            "",
            "Exact eviction loss on held-out prompts, in percent: the L1 distance by which each layer's attention",
            "output (after the output projection) moves for the rows that follow the prompt, relative to its norm;",
            "mean over rows, layers and prompts, with 95 % Student-t intervals over prompts. All divisions of a budget",
            "keep the same number of tokens of every prompt. Intervals of losses are each division's own (unpaired);",
            "what is less with learned is the mean of paired differences on the same prompts. Attention lost is the",
            "share of the following rows' attention that went to evicted tokens, the mean over heads, and regret how",
            "much less of it the best mask in hindsight loses. That mask, of the same total, knows those rows: no mask",
            "loses less attention. It makes losses of attention least, not those of outputs, and is no bound of these.",
            "",
            *Table([*head, "attention lost", "regret", "loss by layer", "live tokens a prompt"], rows).markdown(),
            "",
            "Theorem 4 of Ada-KV, where both keep the best by the future rows' attention: layers of prompts on which",
            "the adaptive bound is at most the uniform one, ratio of the mean bounds, and the largest excess.",
            "",
            *Table(["budget", "holds", "ratio", "largest excess"], theorem).markdown(),
            "",
            "What each head gets, relative to the average (layers separated by slashes), and how far the total of any",
            "prompt was from its budget at any step of learning, relative to it.",
            "",
            *Table(["budget", "shares", "total off by"], learned).markdown(),
            "",
        ]
    )


def plot_losses(rows: Sequence[dict[str, Any]], heads: int) -> Any:
    """Loss and attention kept against the budget, with 95 % intervals, and losses relative to the uniform division.

    Where some budgets are tokens and others shares of the prompt, they stand at the live tokens of one of the heads.
    """
    axes = kvjax.plot.style.panels(None, 3, columns=3, size=(15.5, 4.4))
    mixed = len({"." in r["budget"] for r in rows}) > 1
    live = {r["budget"]: round(r["live"] / heads) for r in rows}
    at = lambda b: live[b] if mixed else float(b) if "." in b else int(b)
    uniform = {r["budget"]: r["loss"] or 1.0 for r in rows if r["method"] == "uniform"}  # 0: nothing was evicted
    shown = {
        "exact eviction loss, % (95 % interval)": lambda r: Interval(*(100 * r[n] for n in ("loss", "low", "high"))),
        "attention to come that is kept, % (95 % interval)": lambda r: Interval(
            *(100 * (1 - r[n]) for n in ("lost", "lost_high", "lost_low"))
        ),
        "loss, % of the uniform division's": lambda r: 100 * r["loss"] / uniform[r["budget"]],
    }
    for panel, (ylabel, value) in zip(axes, shown.items(), strict=True):
        curves: dict[str, dict[float, Any]] = {}
        for r in rows:
            curves.setdefault(_NAMES[r["method"]], {})[at(r["budget"])] = value(r)
        kvjax.plot.budget_curve(curves, ylabel=ylabel, several=False, axes=panel)
        cast(Any, panel.get_legend()).remove()
    figure, names = kvjax.plot.style.figure_of(axes[0]), axes[0].get_legend_handles_labels()
    figure.legend(*names, frameon=False, ncols=len(_NAMES), loc="outside upper center")
    return figure


def plot_learning(tables: dict[str, Any], name: str) -> Any:
    """The objective of the gates on calibration batches, averaged over ten steps.

    It falls with learning; but gates harden meanwhile, and hard ones lose more than soft ones of the same total.
    """
    (axes,) = kvjax.plot.style.panels(None, 1, size=(7.5, 3.6))
    for i, (budget, t) in enumerate(tables.items()):
        width = min(10, len(t["losses"]))
        smooth = np.convolve(t["losses"], np.ones(width) / width, mode="valid")
        axes.plot(np.arange(len(smooth)) + width, smooth, markevery=0.2, label=budget, **kvjax.plot.style.style(i))
    axes.set(xlabel="step (the temperature falls)", ylabel=f"{name.replace('_', ' ')} of the gates, mean of ten steps")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, title="budget", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return kvjax.plot.style.figure_of(axes)


def write(directory: pathlib.Path, samples: Sequence[dict[str, Any]]) -> str:
    """Writes `summary.json`, `summary.md` and the plots. Returns the table."""
    config = read_manifest(directory)["config"]
    budgets = [p["budget"] for p in config["policies"]]
    tables = {b: json.loads((directory / "tables" / f"{b}.json").read_bytes()) for b in budgets}
    summary = summarise(samples)
    text = markdown(summary, config["name"], tables)
    write_bytes(directory / "summary.md", text.encode())
    heads = np.size(tables[budgets[0]]["heads"])
    write_figure(directory / "loss_against_budget.png", plot_losses(summary["rows"], heads), dpi=150)
    write_figure(directory / "learning.png", plot_learning(tables, config["objective"]), dpi=150)
    write_json(directory / "summary.json", summary)  # last: its presence says that the run is complete
    return text
