"""Tables and plots of `learn_budget.py`. Everything here can be made again from its lines and tables."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

import kvjax
from kvjax.analysis.hindsight import Across
from kvjax.experiments.core import stats
from kvjax.experiments.core.command import write_figure, write_json
from kvjax.experiments.core.markdown import table
from kvjax.experiments.core.records import read_manifest
from kvjax.models.written import write_bytes

HINDSIGHT: Final[dict[str, Across]] = {"hindsight_heads": "head", "hindsight": "model"}
"""The oracles: the best masks for the attention to come, of as many tokens in every head, or in the whole model."""

# Okabe and Ito's palette, as in `report`.
_STYLES = {
    "uniform": ("#000000", "o"),
    "pyramid": ("#E69F00", "s"),
    "ada_static": ("#56B4E9", "D"),
    "ada": ("#0072B2", "^"),
    "learned": ("#D55E00", "*"),
    "hindsight_heads": ("#999999", "v"),
    "hindsight": ("#009E73", "P"),
}
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
            *table([*head, "attention lost", "regret", "loss by layer", "live tokens a prompt"], rows),
            "",
            "Theorem 4 of Ada-KV, where both keep the best by the future rows' attention: layers of prompts on which",
            "the adaptive bound is at most the uniform one, ratio of the mean bounds, and the largest excess.",
            "",
            *table(["budget", "holds", "ratio", "largest excess"], theorem),
            "",
            "What each head gets, relative to the average (layers separated by slashes), and how far the total of any",
            "prompt was from its budget at any step of learning, relative to it.",
            "",
            *table(["budget", "shares", "total off by"], learned),
            "",
        ]
    )


def plot_losses(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Loss and attention kept against the budget, with 95 % intervals, and losses relative to the uniform division.

    The best masks in hindsight lie below.
    """
    axes, kept, beside = kvjax.plot.style.panels(None, 3, columns=3, size=(15.5, 4.4))
    figure = kvjax.plot.style.figure_of(axes)
    budgets = list(dict.fromkeys(r["budget"] for r in rows))
    methods = list(dict.fromkeys(r["method"] for r in rows))
    of = lambda method: {r["budget"]: r for r in rows if r["method"] == method}
    uniform = np.array([of("uniform")[b]["loss"] for b in budgets])
    x = np.arange(len(budgets))
    for i, method in enumerate(methods):  # each smaller than those before it, which it may hide
        mine = of(method)
        colour, marker = _STYLES[method]
        under = (len(methods) - 1 - i) / max(len(methods) - 1, 1)
        size = (7 if marker == "*" else 4) + 4.5 * under
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": size}
        style |= {"linestyle": "--", "linewidth": 2} if method in HINDSIGHT else {}
        y = np.array([[100 * mine[b][n] for n in ("loss", "low", "high")] for b in budgets]).T
        axes.errorbar(x, y[0], yerr=[y[0] - y[1], y[2] - y[0]], label=_NAMES[method], capsize=3 + 4 * under, **style)
        lost = np.array([[100 * mine[b][n] for n in ("lost", "lost_low", "lost_high")] for b in budgets]).T
        kept.errorbar(x, 100 - lost[0], yerr=[lost[2] - lost[0], lost[0] - lost[1]], capsize=3 + 4 * under, **style)
        beside.plot(x, y[0] / uniform, **style)
    for each in (axes, kept, beside):
        each.set_xticks(x, [f"{100 * float(b):.4g} %" if "." in b else b for b in budgets])
        each.set_xlabel("budget, of the prompt" if any("." in b for b in budgets) else "budget, tokens")
        each.grid(alpha=0.3)
    axes.set_ylabel("exact eviction loss, % (95 % interval)")
    axes.set_ylim(bottom=0)
    kept.set_ylabel("attention to come that is kept, % (95 % interval)")
    beside.set_ylabel("loss, % of the uniform division's")
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, ncols=len(methods), loc="outside upper center")
    write_figure(path, figure, dpi=150)


def plot_tables(tables: dict[str, Any], path: pathlib.Path) -> None:
    """What each head of each layer was given at every budget, relative to the average."""
    size = 1.2 + 2.6 * len(tables), 3.2
    grid = kvjax.plot.style.panels(None, len(tables), columns=len(tables), size=size, sharey=True)
    figure = kvjax.plot.style.figure_of(grid[0])
    arrays = {b: np.array(t["heads"]) for b, t in tables.items()}
    top = max(float(a.max()) for a in arrays.values())
    for axes, (budget, shares) in zip(grid, arrays.items(), strict=True):
        axes.imshow(shares, vmin=0, vmax=top, cmap="cividis", aspect="auto")
        for i, j in np.ndindex(shares.shape):
            colour = "white" if shares[i, j] < top / 2 else "black"
            axes.text(j, i, f"{shares[i, j]:.2f}", ha="center", va="center", color=colour, fontsize=8)
        axes.set(xlabel="kv head", title=f"budget {budget}")
        axes.set_xticks(range(shares.shape[1]))
        axes.set_yticks(range(shares.shape[0]))
    grid[0].set_ylabel("layer")
    figure.colorbar(grid[0].images[0], ax=grid, label="share, 1 = uniform")
    write_figure(path, figure, dpi=150)


def plot_learning(tables: dict[str, Any], name: str, path: pathlib.Path) -> None:
    """The objective of the gates on calibration batches, averaged over ten steps.

    It falls with learning; but gates harden meanwhile, and hard ones lose more than soft ones of the same total.
    """
    (axes,) = kvjax.plot.style.panels(None, 1, size=(7.5, 3.6))
    for i, (budget, t) in enumerate(tables.items()):
        losses = np.array(t["losses"])
        width = min(10, len(losses))
        colour, marker = list(_STYLES.values())[i % len(_STYLES)]
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        axes.plot(np.arange(width, len(losses) + 1), smooth, color=colour, marker=marker, markevery=0.2, label=budget)
    axes.set(xlabel="step (the temperature falls)", ylabel=f"{name.replace('_', ' ')} of the gates, mean of ten steps")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, title="budget", loc="center left", bbox_to_anchor=(1.0, 0.5))
    write_figure(path, kvjax.plot.style.figure_of(axes), dpi=150)


def made(
    directory: pathlib.Path, config: dict[str, Any], samples: Sequence[dict[str, Any]]
) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """The summary, its text and the tables of a directory."""
    budgets = [p["budget"] for p in config["policies"]]
    tables = {b: json.loads((directory / "tables" / f"{b}.json").read_bytes()) for b in budgets}
    summary = summarise(samples)
    summary["rows"].sort(key=lambda r: (budgets.index(r["budget"]), list(_NAMES).index(r["method"])))
    return summary, markdown(summary, config["name"], tables), tables


def write(directory: pathlib.Path, samples: Sequence[dict[str, Any]]) -> str:
    """Writes `summary.json`, `summary.md` and the plots. Returns the table."""
    config = read_manifest(directory)["config"]
    summary, text, tables = made(directory, config, samples)
    write_bytes(directory / "summary.md", text.encode())
    plot_losses(summary["rows"], directory / "loss_against_budget.png")
    plot_tables(tables, directory / "tables.png")
    plot_learning(tables, config["objective"], directory / "learning.png")
    write_json(directory / "summary.json", summary)  # last: its presence says that the run is complete
    return text
