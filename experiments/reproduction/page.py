"""An entry as text: its settings, its methods as kvjax runs them, and the numbers that stand in the paper."""

import math

from kvjax.configs.experiment import label
from kvjax.experiments.papers.tables import MODELS, Entry
from kvjax.experiments.reproduction.ledger import needs


def page(entry: Entry) -> str:
    """All that is recorded of an entry, as markdown. A policy is shown at the first budget that its method has."""
    lines = [f"# {entry.name}: {entry.shows}", "", f"In the paper: {entry.place}."]
    if entry.runs:
        lines.append(f"Needs {needs(entry)}.")
    lines += ["", *(f"- {what}: {value}" for what, value in entry.settings)]
    if entry.reference == "full cache":
        lines.append("- outputs are compared with what the full cache generates")
    lines += [f"- {what}: {value:g} ({place})" for what, value, place in entry.claims]
    if entry.notes:
        lines += ["", entry.notes]
    if entry.rows:
        lines += ["", *_methods(entry), "", *_table(entry)]
    for r in entry.rows:
        if r.off:
            at = "" if r.budget is None else f" at {label(r.budget)}"
            lines.append(f"\nThe mean of {entry.methods[r.method].title}{at}, {MODELS[r.model].title}: {r.off}.")
    return "\n".join(lines).rstrip() + "\n"


def _methods(entry: Entry) -> list[str]:
    budgets = {r.method: r.budget for r in reversed(entry.rows) if r.budget is not None}
    lines = ["| method | policy | blocks | open |", "|---|---|---|---|"]
    for name, method in entry.methods.items():
        if name in {r.method for r in entry.rows}:
            policy = f"`{method.make(budgets.get(name, 200))!r}`".replace("|", "\\|")
            lines.append(f"| {method.title} | {policy} | {method.block or '-'} | {method.note or '-'} |")
    return lines


def _table(entry: Entry) -> list[str]:
    titles = [c.title for c in entry.columns]
    lines = [f"| model | method | budget | {' | '.join(titles)} |", "|---|---|---|" + "---|" * len(titles)]
    for r in entry.rows:
        values = ["-" if v is None else "" if math.isnan(v) else f"{v:g}" for v in r.values]
        budget = "not in the text" if r.budget is None else label(r.budget)
        lines.append(f"| {MODELS[r.model].title} | {entry.methods[r.method].title} | {budget} | {' | '.join(values)} |")
    return lines
