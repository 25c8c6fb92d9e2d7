"""Tables and plots of `learn.py budget` and `learn.py scorer`, made from their lines and tables."""

import itertools
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import numpy as np

import kvjax
from kvjax.analysis import Interval
from kvjax.analysis.hindsight import Across
from kvjax.experiments.core import page, stats
from kvjax.experiments.core.command import write_figure, write_json
from kvjax.experiments.core.page import Table
from kvjax.experiments.core.records import Line, read_manifest
from kvjax.models.written import write_bytes

HINDSIGHT: Final[dict[str, Across]] = {"hindsight_heads": "head", "hindsight": "model"}
"""The oracles: the best masks for the attention to come, of as many tokens in every head, or in the whole model."""
DIVISIONS: Final = {
    "uniform": "uniform",
    "pyramid": "pyramid",
    "ada_static": "Ada-KV, average table",
    "ada": "Ada-KV, per prompt",
    "learned": "learned",
    "hindsight_heads": "best tokens in hindsight, uniform",
    "hindsight": "best mask in hindsight",
}
"""What divides a budget, as lines and tables call it."""
SCORES: Final = {"snapkv": "SnapKV", "learned": "learned score", "future": "future attention itself"}
"""What ranks tokens, as lines and tables call it."""

Groups = dict[str, dict[tuple[str, int], Line]]


def _by_method(samples: Iterable[Line]) -> Groups:
    """The lines of every method, by their prompts."""
    groups: Groups = {}
    for s in samples:
        groups.setdefault(s["method"], {})[s["task"], s["index"]] = s
    return groups


def _interval(values: Sequence[float], *names: str) -> dict[str, float]:
    """Mean and Student-t interval, under three names."""
    return dict(zip(names, stats.mean(values), strict=True))


def _row(budget: str, method: str, group: dict[tuple[str, int], Line], **more: str) -> dict[str, Any]:
    losses = _interval([s["loss"] for s in group.values()], "loss", "low", "high")
    return {"budget": budget, "method": method, "prompts": len(group), **more, **losses}


def _budgets(samples: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(s["budget"] for s in samples))


def _written(directory: pathlib.Path, text: str, summary: dict[str, Any]) -> str:
    write_bytes(directory / "summary.md", text.encode())
    write_json(directory / "summary.json", summary)  # last: its presence says that the run is complete
    return text


# --- budgets ---


def divisions(samples: Sequence[Line]) -> dict[str, Any]:
    """One row a budget and method: mean loss, its interval, and what learning is ahead of it on the same prompts.

    And the attention to come that is lost, and by how much that exceeds what the best mask in hindsight loses; and for
    every budget on how many layers of how many prompts Ada-KV's bound is at most uniform's.
    """
    rows, theorem = [], []
    for budget in _budgets(samples):
        groups = _by_method(s for s in samples if s["budget"] == budget)
        learned = groups["learned"]
        for method, group in groups.items():
            row = _row(budget, method, group)
            row["layers"] = np.mean([s["layers"] for s in group.values()], axis=0).tolist()
            row["live"] = float(np.mean([s["live"] for s in group.values()]))
            row |= _interval([s["lost"] for s in group.values()], "lost", "lost_low", "lost_high")
            row["regret"] = float(np.mean([s["regret"] for s in group.values()]))
            if method not in ("learned", *HINDSIGHT):
                ahead = [s["loss"] - learned[k]["loss"] for k, s in group.items()]
                row |= _interval(ahead, "ahead", "ahead_low", "ahead_high")
                row["learned_wins"] = float(np.mean(np.array(ahead) > 0))
                row["disjoint"] = not (row["low"] <= _row(budget, "learned", learned)["high"])
            rows.append(row)
        uniform, ada = (np.array([groups[m][k]["least_bound"] for k in groups["ada"]]) for m in ("uniform", "ada"))
        holds = ada <= uniform * (1 + 1e-5) + 1e-6  # sums of float32
        theorem.append(
            {
                "budget": budget,
                "holds": int(holds.sum()),
                "of": holds.size,
                "ratio": float(ada.mean() / uniform.mean()) if uniform.any() else None,  # nothing is evicted
                "largest_excess": float((ada - uniform).max()),
            }
        )
    return {"rows": rows, "theorem_4": theorem}


_OF_DIVISIONS = """\
Exact eviction loss on held-out prompts, in percent: the L1 distance by which each layer's attention
output (after the output projection) moves for the rows that follow the prompt, relative to its norm;
mean over rows, layers and prompts, with 95 % Student-t intervals over prompts. All divisions of a budget
keep the same number of tokens of every prompt. Intervals of losses are each division's own (unpaired);
what is less with learned is the mean of paired differences on the same prompts. Attention lost is the
share of the following rows' attention that went to evicted tokens, the mean over heads, and regret how
much less of it the best mask in hindsight loses. That mask, of the same total, knows those rows: no mask
loses less attention. It makes losses of attention least, not those of outputs, and is no bound of these."""
_OF_THEOREM = """\
Theorem 4 of Ada-KV, where both keep the best by the future rows' attention: layers of prompts on which
the adaptive bound is at most the uniform one, ratio of the mean bounds, and the largest excess."""
_OF_TABLES = """\
What each head gets, relative to the average (layers separated by slashes), and how far the total of any
prompt was from its budget at any step of learning, relative to it."""


def _shown(row: dict[str, Any], *names: str) -> str:
    """A number and its interval in percent, by their names."""
    return page.percent(*map(row.get, names), form=".2f")


def _divisions_page(summary: dict[str, Any], title: str, tables: dict[str, Any]) -> str:
    of_division = lambda r: {
        "budget": r["budget"],
        "division": DIVISIONS[r["method"]],
        "loss": _shown(r, "loss", "low", "high"),
        "less with learned": _shown(r, "ahead", "ahead_low", "ahead_high"),
        "prompts where learned is better": f"{100 * r['learned_wins']:.0f} %" if "ahead" in r else "",
        "intervals apart": ("yes" if r["disjoint"] else "no") if "ahead" in r else "",
        "attention lost": page.percent(r["lost"]),
        "regret": page.percent(r["regret"]),
        "loss by layer": " ".join(map(page.percent, r["layers"])),
        "live tokens a prompt": page.cell(r["live"]),
    }
    of_theorem = lambda r: {
        "budget": r["budget"],
        "holds": f"{r['holds']} of {r['of']}",
        "ratio": page.cell(r["ratio"], form=".3f"),
        "largest excess": page.cell(r["largest_excess"], form=".1e"),
    }
    of_table = lambda b, t: {
        "budget": b,
        "shares": " / ".join(" ".join(f"{x:.2f}" for x in row) for row in t["heads"]),
        "total off by": page.cell(t["total_off"], form=".1e"),
    }
    return page.markdown(
        title,
        _OF_DIVISIONS,
        _table(map(of_division, summary["rows"])),
        _OF_THEOREM,
        _table(map(of_theorem, summary["theorem_4"])),
        _OF_TABLES,
        _table(of_table(*each) for each in tables.items()),
    )


def _table(rows: Iterable[dict[str, str]]) -> Table:
    """Rows of cells by their titles."""
    first, *more = rows
    return Table([*first], [[*row.values()] for row in (first, *more)])


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
            curves.setdefault(DIVISIONS[r["method"]], {})[at(r["budget"])] = value(r)
        kvjax.plot.budget_curve(curves, ylabel=ylabel, several=False, axes=panel)
        cast(Any, panel.get_legend()).remove()
    figure, names = kvjax.plot.style.figure_of(axes[0]), axes[0].get_legend_handles_labels()
    figure.legend(*names, frameon=False, ncols=len(DIVISIONS), loc="outside upper center")
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


def of_budgets(directory: pathlib.Path, samples: Sequence[Line]) -> str:
    """Writes `summary.json`, `summary.md` and the plots. Returns the table."""
    config = read_manifest(directory)["config"]
    budgets = [p["budget"] for p in config["policies"]]
    tables = {b: json.loads((directory / "tables" / f"{b}.json").read_bytes()) for b in budgets}
    summary, heads = divisions(samples), np.size(tables[budgets[0]]["heads"])
    write_figure(directory / "loss_against_budget.png", plot_losses(summary["rows"], heads), dpi=150)
    write_figure(directory / "learning.png", plot_learning(tables, config["objective"]), dpi=150)
    return _written(directory, _divisions_page(summary, config["name"], tables), summary)


# --- scores ---

_OF_SCORES = """\
Exact eviction loss on held-out prompts in percent, with 95 % Student-t intervals over prompts; the loss
that is less than SnapKV's is the mean of paired differences. Budgets are uniform."""


def of_scores(directory: pathlib.Path, name: str, unseen: Sequence[str], samples: Sequence[Line]) -> str:
    """Writes `summary.json` and `summary.md`, with rows of their own for tasks that were not learned from.

    Returns the table.
    """
    rows, kinds = [], ("learned from", "unseen") if unseen else ("",)
    for budget, kind in itertools.product(_budgets(samples), kinds):
        own = (s for s in samples if s["budget"] == budget and kinds[s["task"] in unseen] == kind)
        groups = _by_method(own)
        for method, group in groups.items():
            row = _row(budget, method, group, **({"tasks": kind} if kind else {}))
            row["kept_attention"] = float(np.mean([s["kept_attention"] for s in group.values()]))
            less = [groups["snapkv"][k]["loss"] - s["loss"] for k, s in group.items()]
            rows.append(row | _interval(less, "less", "less_low", "less_high"))
    of_score = lambda r: {
        "budget": r["budget"],
        **({"tasks": r["tasks"]} if unseen else {}),
        "score": SCORES[r["method"]],
        "loss": _shown(r, "loss", "low", "high"),
        "less than SnapKV": _shown(r, "less", "less_low", "less_high") if r["method"] != "snapkv" else "",
        "future attention kept": _shown(r, "kept_attention"),
    }
    text = page.markdown(name, _OF_SCORES, _table(map(of_score, rows)))
    return _written(directory, text, {"rows": rows})
