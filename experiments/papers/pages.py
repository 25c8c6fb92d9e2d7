"""What is written of entries: a run's report, all that is recorded of a paper's, the list, and the ledger.

The ledger says what of the papers was run here: by which command, at which commit, on what. Nothing else counts as run.
"""

import collections
import dataclasses
import json
import math
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from kvjax.configs.experiment import label
from kvjax.experiments.core import page
from kvjax.experiments.core.command import write_json
from kvjax.experiments.core.page import Table, cell, plain
from kvjax.experiments.papers.numbers import Number, columns
from kvjax.experiments.papers.runs import Run
from kvjax.experiments.papers.tables import ENTRIES, MODELS, Entry
from kvjax.models.written import write_bytes

FOLDER: Final = pathlib.Path(__file__).parent
_BY_FULL = "outputs are compared with what the full cache generates"

_SPREAD = """The quantiles of those that are right, and that are named by the first number of outputs; n is how many \
name one. The last column is the share of these in the first half."""

_OWN = """An entry is data in four files of this folder; no code is written. Errors name the file and the line.

1. `methods.toml`: a set of methods, each with its title, `make` (a function of `kvjax.methods`) and `options`.
2. `catalogue.toml`: models and data sets that are not there yet, and under `[columns]` a list of columns, each with \
its title, metric and data sets. `tables.py` says what the fields are.
3. `entries.toml`: `[PAPER.LABEL]` with `shows`, `place`, the names of `methods` and `columns`, and `settings`, which \
are names or texts such as "budget: 20 %".
4. `tables/PAPER-LABEL.csv`: the head `model,method,budget` and the columns' titles, then a line a method and \
budget, with scores as the paper prints them. A budget of 0.2 is a share, 200 a number of tokens; the full cache has \
1.0; "-" stands for a number that the text does not have.

A new paper has any name; `--list` shows it.

```bash
python experiments/reproduce.py PAPER/LABEL --published
python experiments/reproduce.py PAPER/LABEL --plan
python experiments/reproduce.py PAPER/LABEL --data project --examples 1 --length 128 --new-tokens 12
```

`--record` adds the run to this page, and the entry with it. `tests/test_papers_tables.py` looks for the numbers in \
the paper's text, whose file a new paper adds to `TEXTS` there."""

Counts = Mapping[str, Sequence[int]]
Ledger = dict[str, list[dict[str, Any]]]


def _items(several: Sequence[str]) -> str:
    return "\n".join(f"- {plain(item)}" for item in several)


# --- a run ---


def report(
    run: Run, found: Sequence[Number], faults: Sequence[str], about: Any, responses: Sequence[str] = (), **more: Counts
) -> str:
    """The report.

    Args:
      run: what was run.
      found: its numbers.
      faults: rows and methods that could not be run.
      about: the environment (`environment`), with the model's source.
      responses: outputs that are shown.
      **more: `paragraphs`, where outputs name them: how often each is right, and is named by a method's outputs.
    """
    entry, measured, there = run.entry, {c.title for c in run.columns}, {n.column for n in found}
    commit = f"{about['git_commit'] or 'no checkout'}{' with local changes' if about['git_dirty'] else ''}"
    settings, seeds = [*entry.settings], ", ".join(map(str, run.options.seeds))
    if len(run.options.seeds) > 1:
        settings.append(f"seeds {seeds} are pooled; a row that several read counts once in intervals")
    if entry.reference == "full cache":
        settings.append(f"{_BY_FULL} from the same prompt")
    whole = "Sizes, data and methods are the paper's. That the weights are is not verified."
    part = "**Reduced: this shows that the machinery runs, and is no evidence about the paper.**"
    blocks: list[str | Table] = [
        part if run.reduced else whole,
        _items(run.reduced),
        f"Model: `{about['model']}` in place of {MODELS[run.model].title}. Commit: {commit}.\n"
        f"Command: `{' '.join(about['command'])}`",
        _items(settings),
        entry.notes,
    ]
    for title, items in (("Missing:", run.missing), ("Could not be run:", faults)):
        blocks += [title, _items(items)] if items else []
    for column, parts in columns(run):
        mixed = sorted({metric for _, metric in parts})
        if len(mixed) > 1 and column.title in there - measured:
            blocks.append(f"{column.title} is a mean of different metrics: {', '.join(mixed)}.")
    titles = [c.title for c in entry.columns if c.title in there]
    named = lambda method, budget: (entry.methods[method].title, label(budget))
    both = lambda n: _shown(n["ours"]) + (f" ({_shown(n['theirs'])})" if n["theirs"] is not None else "")
    every = (
        "Intervals are of 95 % and over rows. The papers give none, so theirs counts as exact. Differences to the full "
        "cache are of the same rows."
    )
    blocks += ["## Ours (theirs)", page.crossed([*map(vars, found)], titles, named, both)]
    for name, counts in more.items():
        blocks += [f"## {name.capitalize()}", _SPREAD, _spread(counts)]
    blocks += ["## Every number", every, _long(found), *(["## Responses"] if responses else []), _items(responses)]
    return page.markdown(f"{entry.name}: {entry.shows}", *filter(None, blocks))


def _spread(named: Counts) -> Table:
    """A line for what is right and for every method and budget."""
    rows, at = [], (0.05, 0.25, 0.5, 0.75, 0.95)
    for name, counts in named.items():
        each = np.repeat(np.arange(1, len(counts) + 1), counts)
        found = np.quantile(each, at, method="inverted_cdf").tolist() if each.size else ["-"] * len(at)
        half = f"{np.mean(each <= len(counts) // 2):.2f}" if each.size else "-"
        rows.append((name, str(each.size), *map(str, found), half))
    return Table(("", "n", *(f"{100 * q:.0f} %" for q in at), "first half"), rows)


def _long(found: Sequence[Number]) -> Table:
    """A line a number, with intervals."""
    cells = {
        "method": lambda n: n.method,
        "budget": lambda n: label(n.budget),
        "column": lambda n: n.column,
        "rows": lambda n: str(n.rows),
        "ours": lambda n: _shown(n.ours, n.low, n.high),
        "theirs": lambda n: _shown(n.theirs),
        "ours - theirs": lambda n: _shown(*(n.difference or (None,)), sign="+"),
        "ours - our full": lambda n: _shown(n.over_full, n.over_full_low, n.over_full_high, sign="+"),
        "theirs - their full": lambda n: _shown(n.theirs_over_full, sign="+"),
    }
    return Table([*cells], [[of(n) for of in cells.values()] for n in found])


def _shown(value: float | None, low: float | None = None, high: float | None = None, *, sign: str = "") -> str:
    """A number to four digits or two places, and the interval that it has, unless that is the number itself."""
    form = ".4g" if value and abs(value) < 1 else ".2f"
    return cell(value, low, None if low == high else high, sign + form)


def as_json(run: Run, found: Sequence[Number], faults: Sequence[str]) -> dict[str, Any]:
    """The same for programs."""
    return {
        "entry": run.entry.name,
        "status": outcome(run.reduced),
        "stands_for": run.model,
        "reduced": run.reduced,
        "missing": run.missing,
        "faults": [*faults],
        "numbers": [*map(dataclasses.asdict, found)],
    }


def outcome(reduced: Sequence[str]) -> str:
    """How a run counts in the ledger."""
    return "machinery only" if reduced else "as published"


# --- what papers have ---


def status(entry: Entry, ledger: Ledger) -> str:
    """One of "as published", "machinery only", "not run", or that there is nothing to run."""
    if not entry.runs:
        return f"nothing to run ({entry.nothing})"
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
        lines += [f"    needs {needs(entry)}"] if entry.runs else []
    count = collections.Counter(status(e, ledger) for e in ENTRIES.values())
    totals = ", ".join(f"{count[s]} {s}" for s in ("as published", "machinery only", "not run"))
    runs = sum(entry.runs for entry in ENTRIES.values())
    return "\n".join([*lines, "", f"{len(ENTRIES)} entries, {runs} to run: {totals}"])


def published(entry: Entry) -> str:
    """All that is recorded of an entry, as Markdown. A policy is shown at the first budget that its method has."""
    number = lambda v: "-" if v is None else "" if math.isnan(v) else f"{v:g}"
    title = lambda row: (MODELS[row.model].title, entry.methods[row.method].title)
    needed = f"\nNeeds {needs(entry)}." if entry.runs else ""
    settings = [*entry.settings, *([_BY_FULL] if entry.reference == "full cache" else [])]
    settings += [f"{what}: {value:g} ({place})" for what, value, place in entry.claims]
    blocks: list[str | Table] = [f"In the paper: {entry.place}.{needed}", _items(settings), entry.notes]
    if entry.rows:
        first = {r.method: 200 if r.budget is None else r.budget for r in reversed(entry.rows)}
        made = [(m, f"`{m.make(first[name])!r}`") for name, m in entry.methods.items() if name in first]
        methods = [(m.title, policy, str(m.block or "-"), m.note or "-") for m, policy in made]
        budget = lambda row: "not in the text" if row.budget is None else label(row.budget)
        rows = [(*title(row), budget(row), *map(number, row.values)) for row in entry.rows]
        blocks.append(Table(("method", "policy", "blocks", "open"), methods))
        blocks.append(Table(("model", "method", "budget", *(c.title for c in entry.columns)), rows))
    for row in (row for row in entry.rows if row.off):
        (model, method), at = title(row), "" if row.budget is None else f" at {label(row.budget)}"
        blocks.append(f"The mean of {method}{at}, {model}: {row.off}.")
    return page.markdown(f"{entry.name}: {entry.shows}", *filter(None, blocks))


# --- what was run ---


def recorded() -> Ledger:
    """All runs by entry; none where there is no ledger."""
    path = FOLDER / "ledger.json"
    return json.loads(path.read_bytes()) if path.is_file() else {}


def record(name: str, about: Mapping[str, Any], measured: str, reduced: Sequence[str]) -> None:
    """Adds a run to the ledger, in place of one of the same model and status, and writes the table beside it.

    Args:
      name: of the entry.
      about: the environment (`environment`), with the model's source.
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
        "status": outcome(reduced),
        "measured": measured,
        "reduced": [*reduced],
    }
    same = lambda r: (r["model"], r["status"]) == (run["model"], run["status"])
    ledger[name] = [*(r for r in ledger.get(name, []) if not same(r)), run]
    write_json(FOLDER / "ledger.json", dict(sorted(ledger.items())))
    write_bytes(FOLDER / "README.md", markdown(ledger).encode())


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
    return page.markdown(
        "The papers' tables and figures", about, table, "## A table of one's own", _OWN, "## Runs",
        "\n".join(runs) or "None so far.",
    )  # fmt: skip
