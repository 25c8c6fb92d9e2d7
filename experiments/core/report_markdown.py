"""The page as Markdown: tables that need no browser."""

import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from kvjax.experiments.core import page, views
from kvjax.experiments.core.page import Name, Table, cell, escaped
from kvjax.experiments.core.sources import Found
from kvjax.experiments.core.table import AVERAGE, has_budget


def text(shown: Sequence[views.View], found: Found, output: pathlib.Path, command: str) -> str:
    """Tables of every setting, the comparisons with the full cache, costs, and the runs."""
    blocks: list[str | Table] = [
        "Scores in percent, perplexity as itself, with 95 % intervals (`experiments/core/stats.py`). The best of a "
        "budget is bold, whatever its interval. report.html has what every number was made from."
    ]
    if called := ", ".join(map(escaped, views.options(found))):
        blocks.append(f"Options that are not the defaults of `kvjax.methods`: {called}.")
    for view in shown:
        blocks += _setting(view)
    if found.papers:
        named = [(d, escaped(f"{of['entry']}, {of.get('status')}")) for d, of in found.papers]
        reports = [f"- {name}: [report]({views.link(d / 'report.md', output)})" for d, name in named]
        blocks += ["## Papers' tables", "\n".join(reports)]
    runs = []
    for run in found.runs:
        named = [f"[{escaped(f.name)}]({views.link(f, output)})" for f in (run.manifest, run.lines) if f is not None]
        bad = "".join(f"; {k}: {escaped(v)}" for k, v in run.made if k == "rows that could not be asked")
        runs.append(f"- {escaped(run.name)}: {', '.join(named)}{bad}")
    blocks += ["## Runs", "\n".join(runs)]
    if found.skipped:
        skipped = [f"- {escaped(str(path))}: {escaped(why)}" for path, why in found.skipped]
        blocks += ["Not among these:", "\n".join(skipped)]
    made = f"<!-- made by {views.MARK} -->\n\n"
    return made + page.markdown("Results of KV-cache eviction", *blocks, f"Made by `{command}`.")


def _setting(view: views.View) -> Iterator[str | Table]:
    """Its scores, what they are, and what they cost."""
    yield from (f"## {escaped(view.name)}", views.scores(view))
    yield from (escaped(note) for note in (view.average, view.prompts, views.whole(view.numbers)) if note)
    kinds = {c["kind"] for c in view.numbers}
    if kinds & {"score", "nll"} and len(view.lines) > 1:
        scored = "Average score" if AVERAGE in view.tasks else "Mean score"
        name = " / ".join([f"{scored} in percent"] * ("score" in kinds) + ["perplexity"] * ("nll" in kinds))
        yield from (f"{name[:1].upper()}{name[1:]}, by budget:", overview(view))
    if (table := views.compared(view).without("number")).rows:
        about = (
            "Beside the full cache on the same rows: points of the score, or the ratio of perplexities, above 1 where "
            "the method is worse. p-values are adjusted for all methods and budgets on a task (Holm); a verdict needs "
            "0.05 at most. Intervals are of each comparison alone, before that."
        )
        alike = (
            "How far outputs are the full cache's, in percent: equal ones, its words up to the first that differs, and "
            "similarity of words."
        )
        yield f"{about}\n{alike}" if "equal" in table.head else about
        yield table
    if (table := views.outputs(view)).rows:
        yield from (views.OUTPUTS, table)
    if (table := views.costs(view)).rows:
        yield from (views.COSTS, table)


def overview(view: views.View) -> Table:
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
    forms = {"score": ".1f", "perplexity": ".2f"}
    both = lambda c: " / ".join(cell(c[k], form=form) for k, form in forms.items() if k in c)
    rows = sorted(dict.fromkeys(r for r, _ in cells), key=mean, reverse=True)
    return Table(["method", *columns], [[Name(r), *(both(cells.get((r, b), {})) for b in columns)] for r in rows])
