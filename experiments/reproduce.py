"""The papers' tables, run on any model: ours beside theirs.

    python experiments/reproduce.py --list
    python experiments/reproduce.py ada-kv/table2 --published
    python experiments/reproduce.py ada-kv/table2 --plan
    python experiments/reproduce.py ada-kv/table2 --model DIR --data DIR
    python experiments/reproduce.py roco/table4 --data project --examples 4 --length 256 --methods roco h2o
    python experiments/reproduce.py ada-kv/table2 --model DIR --data DIR --dry-run

Says first what is missing, what is not the paper's about the run, and about how long it will take. Writes `report.md`,
`report.json`, a figure's picture and every output (`samples.jsonl`) to `results/reproduce/`; an interrupted run
resumes. `--seed 0 1 2` runs every row with three seeds and pools them.
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import tyro

from kvjax.experiments import figures
from kvjax.experiments.core.command import as_command, parsed, write_figure, write_json
from kvjax.experiments.core.provenance import environment
from kvjax.experiments.core.records import Records
from kvjax.experiments.papers import numbers, pages
from kvjax.experiments.papers.picture import named, picture, retrieves
from kvjax.experiments.papers.planning import planned
from kvjax.experiments.papers.rows import PROJECT
from kvjax.experiments.papers.runs import Options, Run
from kvjax.experiments.papers.tables import Entry, data_of, find
from kvjax.models.sources import locate
from kvjax.models.weights import read_config
from kvjax.models.written import write_bytes


def reproduce(options: Options, command: Sequence[str]) -> None:
    """Runs an entry and writes its report.

    Raises:
      ValueError: an unknown entry, or nothing of it that could run.
    """
    entry, directory = find(options.entry or ""), options.directory
    if not entry.runs:
        raise ValueError(f"{entry.name} has nothing to run: {entry.shows}, {pages.status(entry, {})}")
    about = {"model": options.model, "seeds": [*options.seeds], **environment([*command])}
    about["command"] = _as_typed(command)
    if options.layers and not entry.figures:
        raise ValueError(f"{entry.name} is measured, not drawn by layer; leave --layers {options.layers} out")
    if entry.drawn:
        return _drawn(entry, options, about)
    stored = "float32" if options.dtype == "auto" else options.dtype
    run = Run(entry, options, read_config(locate(options.model, weights=False), dtype=stored))
    print(f"{entry.name}: {entry.shows}")
    print(f"{len(run.lines)} methods and budgets, {len(run.columns)} columns, for {run.model}")
    _say("missing", run.missing)
    _say("not the paper's", said := run.reduced)
    if not run.columns:
        raise ValueError(f"nothing of {entry.name} can run here; see what is missing above")
    run.prepare()
    drawn = _figures(entry, options)  # before anything runs, as it may refuse options
    _say("not the paper's", [reason for reason in run.reduced if reason not in said])
    _say("cannot be run", run.faults)
    if options.dry_run:
        print(run.estimate({}))
        return None
    with Records(directory, run.manifest(), command, restart=options.restart) as records:
        if estimate := run.estimate(records.lines):
            print(estimate, flush=True)
        run.run(records)
        lines, refused = numbers.scored(run, records.lines.values())
        found, faults = numbers.numbers(run, lines), [*run.faults, *refused]
        shown = [f"{run.called(x)}: {x['output']}" for x in lines if data_of(x["task"]).question]
        spread: dict[str, Any] = {}
        if retrieves(run):
            right, methods = named(run, lines)
            spread = {"paragraphs": {name: each.tolist() for name, each in {"right": right, **methods}.items()}}
        text = pages.report(run, found, faults, about, shown, **spread)
        write_json(directory / "report.json", {**pages.as_json(run, found, faults), **spread, **about})
        write_bytes(directory / "report.md", text.encode())
        if found and not entry.label.startswith("table"):
            write_figure(directory / "figure.png", picture(run, found, lines))
        for figure in drawn:
            figures.run(figure, about["command"])
        print(f"{text}\nwritten to {directory}")
    if options.record:
        counts = ", ".join(f"{len(p) // len(options.seeds)} rows of {n}" for n, p in run.prompts.items())
        counts += f", each with {len(options.seeds)} seeds" if len(options.seeds) > 1 else ""
        pages.record(entry.name, about, f"{len(run.policies)} methods and budgets on {counts}", run.reduced)
    return None


def _say(title: str, items: Sequence[str]) -> None:
    for item in items:
        print(f"  {title}: {item}")


def _drawn(entry: Entry, options: Options, about: dict[str, Any]) -> None:
    """Draws an entry that measures nothing; `--data` is the text."""
    text = None if options.data in (None, PROJECT) else pathlib.Path(options.data)
    print(f"{entry.name}: {entry.shows}\n  drawn by experiments/figures.py {', '.join(entry.figures)}")
    if options.dry_run:
        return
    for figure in _figures(entry, options, text=text, budget=options.budget or entry.budgets):
        figures.run(figure, about["command"])
    reason = f"drawn on {options.model}, from {text or 'the project text'}; the paper's prompts are not given"
    if options.record:
        pages.record(entry.name, about, f"figures {', '.join(entry.figures)}", [reason])


def _figures(entry: Entry, options: Options, **more: Any) -> list[figures.Options]:
    """What `experiments/figures.py` draws of an entry."""
    how: dict[str, Any] = {"model": options.model, "dtype": options.dtype, "output": options.directory, **more}
    how |= {"prompts": options.examples, "length": options.length, "seed": options.seed}
    how["layers"] = options.layers or entry.layers
    return [figures.Options(name, **how) for name in entry.figures]


def _as_typed(command: Sequence[str]) -> list[str]:
    """A command from the project's root, without what places or notes its results."""
    _, _, *words = command
    words = words[words[:1] == ["reproduce"] :]  # behind `kvjax`
    kept = [w for w in words if w not in ("--record", "--restart") and not w.startswith("--output=")]
    if "--output" in kept:
        at = kept.index("--output")
        del kept[at : at + 2]
    return ["python", "experiments/reproduce.py", *kept]


@as_command
def main(argv: Sequence[str]) -> None:
    """Parses, runs, prints the report."""
    flags = tyro.conf.FlagCreatePairsOff[Options]
    options = parsed(flags, argv, "reproduce", (__doc__ or "").splitlines()[0])
    if options.list:
        print(pages.listing(pages.recorded()))
    elif options.entry is None:
        raise ValueError("name an entry, such as ada-kv/table2; --list has them all, --help the options")
    elif options.published or options.plan:
        entry = find(options.entry)
        print(pages.published(entry) if options.published else planned(entry, options))
    else:
        reproduce(options, [sys.executable, *sys.argv])


if __name__ == "__main__":
    main()
