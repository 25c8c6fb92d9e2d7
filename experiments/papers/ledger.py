"""All entries in text, and what of the papers was run here: by which command, at which commit, on what.

Nothing else counts as run.
"""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, Final

from kvjax.configs.experiment import label
from kvjax.experiments.core.command import write_json
from kvjax.experiments.core.page import Table
from kvjax.experiments.papers.tables import ENTRIES, MODELS, Entry
from kvjax.models.written import write_bytes

FOLDER: Final = pathlib.Path(__file__).parent
_NONE = {"settings": "nothing to run (settings)", "drawing": "nothing to run (an illustration)"}

Ledger = dict[str, list[dict[str, Any]]]


def read(folder: pathlib.Path | None = None) -> Ledger:
    """All runs by entry; none where there is no ledger."""
    path = (folder or FOLDER) / "ledger.json"
    return json.loads(path.read_bytes()) if path.is_file() else {}


def record(name: str, run: dict[str, Any], folder: pathlib.Path | None = None) -> None:
    """Adds a run to the ledger, in place of one of the same model and status, and writes the table beside it."""
    folder = folder or FOLDER
    ledger = read(folder)
    same = lambda r: (r["model"], r["status"]) == (run["model"], run["status"])
    ledger[name] = [*(r for r in ledger.get(name, []) if not same(r)), run]
    write_json(folder / "ledger.json", dict(sorted(ledger.items())))
    write_bytes(folder / "README.md", markdown(ledger).encode())


def status(entry: Entry, ledger: Mapping[str, list[dict[str, Any]]]) -> str:
    """One of "as published", "machinery only", "not run", or that there is nothing to run."""
    if not entry.runs:
        return _NONE[entry.kind]
    found = {r["status"] for r in ledger.get(entry.name, [])}
    return next((s for s in ("as published", "machinery only") if s in found), "not run")


def needs(entry: Entry) -> str:
    """Models, data sets and metrics of an entry in one line."""
    parts = [", ".join(MODELS[m].title for m in entry.models), ", ".join(entry.data), ", ".join(entry.metrics)]
    if entry.figures:
        parts.append("figures.py " + ", ".join(entry.figures))
    return "; ".join(filter(None, parts))


def listing(ledger: Mapping[str, list[dict[str, Any]]]) -> str:
    """All entries: what they show, how many numbers of the paper are recorded, their status, and what they need."""
    lines = []
    for entry in ENTRIES.values():
        count = f"{entry.published} numbers" if entry.published else "no numbers in the text"
        lines += [f"{entry.name}: {entry.shows} ({entry.place})", f"    {count}; {status(entry, ledger)}"]
        if entry.runs:
            lines.append(f"    needs {needs(entry)}")
    runs = [e for e in ENTRIES.values() if e.runs]
    count = {s: sum(status(e, ledger) == s for e in runs) for s in ("as published", "machinery only", "not run")}
    totals = ", ".join(f"{n} {s}" for s, n in count.items())
    return "\n".join([*lines, "", f"{len(ENTRIES)} entries, {len(runs)} to run: {totals}"])


def markdown(ledger: Mapping[str, list[dict[str, Any]]]) -> str:
    """The ledger as a table, with every run behind it."""
    lines = [
        "# The papers' tables and figures",
        "",
        "Every table and figure of the five papers: what it shows, how many of its numbers stand in the paper's text "
        '(they are in `tables/` and `entries.toml`), and what was run here. "Machinery only" is a run at reduced size '
        "or on another model: it shows that the entry can be run, and says nothing about the paper. `figures.py` draws "
        "what papers only draw. This file is written by `python experiments/reproduce.py ENTRY --record`.",
        "",
        "```bash",
        "python experiments/reproduce.py --list",
        "python experiments/reproduce.py ada-kv/table2 --model DIR --data DIR --dry-run",
        "```",
        "",
        *Table(
            ("entry", "shows", "numbers in the text", "status"),
            [(e.name, e.shows, str(e.published or "-"), status(e, ledger)) for e in ENTRIES.values()],
        ).markdown(),
        "",
        "## Runs",
        "",
    ]
    for name, runs in sorted(ledger.items()):
        for run in runs:
            dirty = " with local changes" if run["dirty"] else ""
            lines += [
                f"- **{name}**, {run['status']}, {run['date'][:10]}: `{run['command']}` at commit "
                f"`{run['commit'] or 'unknown'}`{dirty}, {run['device']}; {run['measured']}.",
                *(f"  - {reason}" for reason in run["reduced"]),
            ]
    return "\n".join([*lines, "" if ledger else "None so far.", ""]).rstrip() + "\n"


# --- one entry ---


def published(entry: Entry) -> str:
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
    rows = [
        (m.title, f"`{m.make(budgets.get(name, 200))!r}`", str(m.block or "-"), m.note or "-")
        for name, m in entry.methods.items()
        if name in {r.method for r in entry.rows}
    ]
    return Table(("method", "policy", "blocks", "open"), rows).markdown()


def _table(entry: Entry) -> list[str]:
    shown = lambda v: "-" if v is None else "" if math.isnan(v) else f"{v:g}"
    budget = lambda r: "not in the text" if r.budget is None else label(r.budget)
    rows = [
        (MODELS[r.model].title, entry.methods[r.method].title, budget(r), *map(shown, r.values)) for r in entry.rows
    ]
    return Table(("model", "method", "budget", *(c.title for c in entry.columns)), rows).markdown()
