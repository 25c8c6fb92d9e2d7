"""The page as Markdown: tables that need no browser."""

import pathlib
from collections.abc import Sequence

import numpy as np

from kvjax.experiments.core import views
from kvjax.experiments.core.page import Table, escaped
from kvjax.experiments.core.sources import Found
from kvjax.experiments.core.table import ALIKE, AVERAGE, has_budget


def text(shown: Sequence[views.View], found: Found, output: pathlib.Path, command: str) -> str:
    """Tables of every setting, the comparisons with the full cache, costs, and the runs."""
    said = escaped
    called = ", ".join(map(said, views.options(found)))
    lines = [
        f"<!-- made by {views.MARK} -->", "", "# Results of KV-cache eviction", "",
        "Scores in percent, perplexity as itself, with 95 % intervals (`experiments/core/stats.py`). The best of a "
        "budget is bold, whatever its interval. report.html has what every number was made from.", "",
        *([f"Options that are not the defaults of `kvjax.methods`: {called}.", ""] if called else []),
    ]  # fmt: skip
    for view in shown:
        lines += [f"## {said(view.name)}", "", *_scores(view), ""]
        lines += [x for note in (view.average, views.whole(view.numbers)) if note for x in (said(note), "")]
        lines += [*_by_budget(view), *_compared(view), *_costs(view)]
    if found.papers:
        lines += ["## Papers' tables", ""]
        for d, content in found.papers:
            name = said(f"{content['entry']}, {content.get('status')}")
            lines.append(f"- {name}: [report]({views.link(d / 'report.md', output)})")
        lines.append("")
    lines += ["## Runs", ""]
    for run in found.runs:
        named = [f"[{said(f.name)}]({views.link(f, output)})" for f in (run.manifest, run.lines) if f is not None]
        bad = "".join(f"; {k}: {said(v)}" for k, v in run.made if k == "rows that could not be asked")
        lines.append(f"- {said(run.name)}: {', '.join(named)}{bad}")
    if found.skipped:
        lines += ["", "Not among these:", "", *(f"- {said(str(path))}: {said(why)}" for path, why in found.skipped)]
    return "\n".join([*lines, "", f"Made by `{command}`.", ""])


def _scores(view: views.View) -> list[str]:
    rows, kept = [], views.kept_whole(view.numbers)
    for name, at, of in view.lines:
        first = next(iter(of.values()))
        shares = [views.live(first, kept), views.percent(first, "kv_of_full")]
        rows.append([escaped(name), escaped(at), *(_cell(of.get(t)) for t in view.tasks), *shares])
    titles = [escaped(views.words(t)) for t in view.tasks]
    return Table(["method", "budget", *titles, "live of prompt", "KV of full"], rows).markdown()


def _cell(c: views.Number | None) -> str:
    if c is None:
        return ""
    bold = "**" if c["best"] else ""
    return f"{bold}{views.value(c)}{bold} {views.interval(c)}".rstrip()


def _by_budget(view: views.View) -> list[str]:
    """The overview, below what its numbers are."""
    kinds = {c["kind"] for c in view.numbers}
    if not kinds & {"score", "nll"} or len(view.lines) < 2:
        return []
    scored = "Average score" if AVERAGE in view.tasks else "Mean score"
    name = " / ".join([f"{scored} in percent"] * ("score" in kinds) + ["perplexity"] * ("nll" in kinds))
    return [f"{name[:1].upper()}{name[1:]}, by budget:", "", *overview(view), ""]


def overview(view: views.View) -> list[str]:
    """A row for every method, with "score / perplexity" at every budget, the best method first.

    The score is the average where there is one, and the mean of all tasks that have scores otherwise; the perplexity is
    the task's of that name, or that of the only other one. What has no budget stands under "-", with its label behind
    its name, the live tokens that were measured, and the bytes where they are fewer than the full cache's.
    """
    cells: dict[tuple[str, str], dict[str, float]] = {}
    places: dict[str, float] = {}
    for name, at, of in view.lines:
        first = of.get(AVERAGE) or next(iter(of.values()))
        row, column = name, at
        if not has_budget(at):
            live, kv = first.get("live"), first.get("kv_of_full")
            bytes_ = "" if kv is None or kv > 0.9995 else f", {100 * kv:.0f} % of bytes"
            row, column = f"{name} {at}" + ("" if live is None else f" ({100 * live:.0f} % live{bytes_})"), "-"
        places[column] = -1.0 if column == "-" else max(places.get(column, 0.0), first["place"] or 0.0)
        likely = {t: c["value"] for t, c in of.items() if c["kind"] == "nll"}
        scores = [c["value"] for t, c in of.items() if c["kind"] == "score" and t != AVERAGE]
        found = {"score": 100 * (of[AVERAGE]["value"] if AVERAGE in of else float(np.mean(scores)))} if scores else {}
        if "perplexity" in likely or len(likely) == 1:
            found["perplexity"] = likely.get("perplexity", next(iter(likely.values())))
        cells[row, column] = found
    quality = lambda c: (c.get("score", 0.0), -c.get("perplexity", 0.0))
    mean = lambda row: tuple(np.mean([quality(c) for (r, _), c in cells.items() if r == row], axis=0))
    columns = sorted(places, key=lambda b: places[b], reverse=True)
    digits = {"score": 1, "perplexity": 2}
    cell = lambda c: " / ".join(f"{c[k]:.{n}f}" for k, n in digits.items() if k in c)
    rows = sorted(dict.fromkeys(r for r, _ in cells), key=mean, reverse=True)
    shown = [[escaped(r), *(cell(cells.get((r, b), {})) for b in columns)] for r in rows]
    return Table(["method", *columns], shown).markdown()


def _named(c: views.Number) -> list[str]:
    return [escaped(x) for x in (c["method"], c["budget"], views.words(c["task"]))]


def _compared(view: views.View) -> list[str]:
    """Every method beside the full cache on the same rows."""
    if not view.compared:
        return []
    alike = any(c.get("same") is not None for c in view.compared)
    head = ["method", "budget", "task", "difference", "p", "verdict", "rows"]
    rows = [[*_named(c), views.difference(c), views.probability(c), c["verdict"], str(c["n"]),
             *([views.percent(c, name) for name in ALIKE] if alike else [])] for c in view.compared]  # fmt: skip
    return [
        "Beside the full cache on the same rows: points of the score, or the ratio of perplexities, above 1 where the "
        "method is worse. p-values are adjusted for all methods and budgets on a task (Holm); a verdict needs 0.05 at "
        "most. Intervals are of each comparison alone, before that.",
        *(["How far outputs are the full cache's, in percent: equal ones, its words up to the first that differs, and "
           "similarity of words."] if alike else []), "",
        *Table([*head, *(["equal", "equal up to", "similarity"] if alike else [])], rows).markdown(), "",
    ]  # fmt: skip


def _costs(view: views.View) -> list[str]:
    """What every number cost."""
    if not view.measured:
        return []
    rows = [
        [
            *_named(c),
            f"{c['live_tokens']:.1f}",
            f"{c['slots']:,.0f}",
            views.size(c, "kv_bytes_needed", 1024),
            views.size(c, "kv_bytes", 1024),
            views.percent(c, "kv_of_full"),
            views.timed(c, "prefill_seconds", 1000, 1),
            views.timed(c, "decode_tokens_per_second"),
            views.size(c, "prefill_peak_bytes", 2**20),
            views.size(c, "decode_peak_bytes", 2**20),
        ]
        for c in view.measured
    ]
    head = ["method", "budget", "task", "live tokens a head", "slots", "KV KiB needed", "KV KiB", "KV of full",
            "prefill ms", "decode tokens/s", "prefill peak MiB", "decode peak MiB"]  # fmt: skip
    return [views.COSTS, "", *Table(head, rows).markdown(), ""]
