"""All entries in text, and what of the papers was run here: by which command, at which commit, on what.

Nothing else counts as run.
"""

import collections
import json
import math
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvjax.configs.experiment import label
from kvjax.experiments.core import page
from kvjax.experiments.core.command import write_json
from kvjax.experiments.core.page import Table
from kvjax.experiments.papers.tables import ENTRIES, MODELS, Entry
from kvjax.models.written import write_bytes

FOLDER: Final = pathlib.Path(__file__).parent
_NONE = {"settings": "nothing to run (settings)", "drawing": "nothing to run (an illustration)"}

Ledger = dict[str, list[dict[str, Any]]]


def recorded() -> Ledger:
    """All runs by entry; none where there is no ledger."""
    path = FOLDER / "ledger.json"
    return json.loads(path.read_bytes()) if path.is_file() else {}


def record(name: str, about: Mapping[str, Any], status: str, measured: str, reduced: Sequence[str]) -> None:
    """Adds a run to the ledger, in place of one of the same model and status, and writes the table beside it.

    Args:
      name: of the entry.
      about: the environment (`environment`), with the model's source.
      status: one of those of `status`.
      measured: what was run.
      reduced: all reasons why it is not the paper's run.
    """
    device, ledger = about["device"], recorded()
    run = {
        "model": about["model"],
        "command": shlex.join(about["command"]),
        "commit": about["git_commit"],
        "dirty": about["git_dirty"],
        "date": about["created"],
        "device": f"{device['platform']}, {device['cpus']} cores" if device["platform"] == "cpu" else device["kind"],
        "status": status,
        "measured": measured,
        "reduced": [*reduced],
    }
    same = lambda r: (r["model"], r["status"]) == (run["model"], run["status"])
    ledger[name] = [*(r for r in ledger.get(name, []) if not same(r)), run]
    write_json(FOLDER / "ledger.json", dict(sorted(ledger.items())))
    write_bytes(FOLDER / "README.md", markdown(ledger).encode())


def status(entry: Entry, ledger: Ledger) -> str:
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


def listing(ledger: Ledger) -> str:
    """All entries: what they show, how many numbers of the paper are recorded, their status, and what they need."""
    lines = []
    for entry in ENTRIES.values():
        count = f"{entry.published} numbers" if entry.published else "no numbers in the text"
        lines += [f"{entry.name}: {entry.shows} ({entry.place})", f"    {count}; {status(entry, ledger)}"]
        if entry.runs:
            lines.append(f"    needs {needs(entry)}")
    runs = [e for e in ENTRIES.values() if e.runs]
    count = collections.Counter(status(e, ledger) for e in runs)
    totals = ", ".join(f"{count[s]} {s}" for s in ("as published", "machinery only", "not run"))
    return "\n".join([*lines, "", f"{len(ENTRIES)} entries, {len(runs)} to run: {totals}"])


def markdown(ledger: Ledger) -> str:
    """The ledger as a table, with every run behind it."""
    about = (
        "Every table and figure of the five papers: what it shows, how many of its numbers stand in the paper's text "
        '(they are in `tables/` and `entries.toml`), and what was run here. "Machinery only" is a run at reduced size '
        "or on another model: it shows that the entry can be run, and says nothing about the paper. `figures.py` draws "
        "what papers only draw. This file is written by `python experiments/reproduce.py ENTRY --record`.\n\n"
        "```bash\npython experiments/reproduce.py --list\n"
        "python experiments/reproduce.py ada-kv/table2 --model DIR --data DIR --dry-run\n```"
    )
    head = ("entry", "shows", "numbers in the text", "status")
    table = Table(head, [(e.name, e.shows, str(e.published or "-"), status(e, ledger)) for e in ENTRIES.values()])
    runs = []
    for name, run in ((name, run) for name, runs in sorted(ledger.items()) for run in runs):
        dirty = " with local changes" if run["dirty"] else ""
        runs += [
            f"- **{name}**, {run['status']}, {run['date'][:10]}: `{run['command']}` at commit "
            f"`{run['commit'] or 'unknown'}`{dirty}, {run['device']}; {run['measured']}.",
            *(f"  - {reason}" for reason in run["reduced"]),
        ]
    return page.markdown("The papers' tables and figures", about, table, "## Runs", "\n".join(runs) or "None so far.")


def published(entry: Entry) -> str:
    """All that is recorded of an entry, as Markdown. A policy is shown at the first budget that its method has."""
    number = lambda v: "-" if v is None else "" if math.isnan(v) else f"{v:g}"
    title = lambda row: (MODELS[row.model].title, entry.methods[row.method].title)
    needed = f"\nNeeds {needs(entry)}." if entry.runs else ""
    items = [*entry.settings]
    items += ["outputs are compared with what the full cache generates"] if entry.reference == "full cache" else []
    items += [f"{what}: {value:g} ({place})" for what, value, place in entry.claims]
    blocks = [f"In the paper: {entry.place}.{needed}", "\n".join(f"- {item}" for item in items), entry.notes]
    if entry.rows:
        first = {r.method: 200 if r.budget is None else r.budget for r in reversed(entry.rows)}
        policies = [(m, f"`{m.make(first[name])!r}`") for name, m in entry.methods.items() if name in first]
        methods = [(m.title, policy, str(m.block or "-"), m.note or "-") for m, policy in policies]
        budget = lambda row: "not in the text" if row.budget is None else label(row.budget)
        rows = [(*title(row), budget(row), *map(number, row.values)) for row in entry.rows]
        blocks += [
            Table(("method", "policy", "blocks", "open"), methods),
            Table(("model", "method", "budget", *(c.title for c in entry.columns)), rows),
        ]
    for row in entry.rows:
        if row.off:
            (model, method), at = title(row), "" if row.budget is None else f" at {label(row.budget)}"
            blocks.append(f"The mean of {method}{at}, {model}: {row.off}.")
    return page.markdown(f"{entry.name}: {entry.shows}", *filter(None, blocks))
