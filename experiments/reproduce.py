"""The papers' tables, run on any model: ours beside theirs.

    python experiments/reproduce.py --list
    python experiments/reproduce.py ada-kv/table2 --published
    python experiments/reproduce.py ada-kv/table2 --model DIR --data DIR
    python experiments/reproduce.py roco/table4 --data project --examples 4 --length 256 --methods roco h2o
    python experiments/reproduce.py ada-kv/table2 --model DIR --data DIR --dry-run

Says first what is missing, what is not the paper's about the run, and about how long it will take. Writes `report.md`,
`report.json` and every output (`samples.jsonl`) to `results/reproduce/`; an interrupted run resumes.
"""

import importlib

if __name__ == "__main__":  # before imports that take seconds
    importlib.import_module(f"{__package__ or ''}.stopping".lstrip(".")).begin()

import argparse
import dataclasses
import pathlib
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from kvjax import models
from kvjax.configs.experiment import check_whole, label
from kvjax.experiments import figures, stopping
from kvjax.experiments.core.command import check_options, check_values, directory_path, plain_errors, write_json
from kvjax.experiments.core.compiled import keep_compiled
from kvjax.experiments.core.provenance import environment
from kvjax.experiments.evaluation.results import Results
from kvjax.experiments.papers import tables
from kvjax.experiments.papers.methods import Budget
from kvjax.experiments.papers.tables import DATA, Entry, number
from kvjax.experiments.reproduction import choice as choices
from kvjax.experiments.reproduction import ledger, report
from kvjax.experiments.reproduction.choice import Choice, Options
from kvjax.experiments.reproduction.engine import Engine, Sizes
from kvjax.experiments.reproduction.numbers import numbers
from kvjax.experiments.reproduction.page import page
from kvjax.experiments.reproduction.rows import PROJECT
from kvjax.experiments.reproduction.run import Run
from kvjax.models.embedded import included
from kvjax.models.sources import locate
from kvjax.models.weights import read_config
from kvjax.models.written import write_bytes


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options.

    Raises:
      ValueError: an option that is given twice or empty, or numbers that do not fit.
      SystemExit: options that do not exist, or --help.
    """
    check_values(argv)
    check_options(argv)
    parser = argparse.ArgumentParser(
        prog="experiments/reproduce.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("entry", nargs="?", metavar="ENTRY", help="such as ada-kv/table2")
    parser.add_argument("--list", action="store_true", help="all entries, their status and what they need")
    parser.add_argument("--published", action="store_true", help="the entry's settings and numbers in the paper")
    parser.add_argument(
        "--model",
        default="embedded",
        help='a checkpoint directory, hub id or preset; "embedded" or "varied" for a small model of the project',
    )
    parser.add_argument("--stands-for", metavar="NAME", help="which of the entry's models it stands for")
    parser.add_argument(
        "--data", metavar="PATH", help='a directory with a file for each data set, one file for all, or "project"'
    )
    parser.add_argument("--methods", nargs="+", default=(), metavar="NAME", help="those to run; all if not given")
    parser.add_argument(
        "--budget", nargs="+", default=(), type=_budget, metavar="B", help="tokens (64) or shares (0.2); the paper's"
    )
    parser.add_argument("--examples", type=int, metavar="N", help="rows of every data set; all if not given")
    parser.add_argument("--length", type=int, metavar="N", help="tokens of a prompt, at most")
    parser.add_argument("--new-tokens", type=int, metavar="N", help="tokens to generate, at most")
    parser.add_argument("--batch-size", type=int, default=4, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16", "auto"))
    parser.add_argument("--output", type=directory_path, metavar="DIR")
    parser.add_argument("--restart", action="store_true", help="begin anew; an earlier run there is moved aside")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run, and stop")
    parser.add_argument("--record", action="store_true", help="note the run in experiments/papers/ledger.json")
    own = parser.parse_args(argv)
    if own.entry is None and not own.list:
        parser.print_help()
        raise SystemExit(2)
    given = {n: v for n in ("examples", "length", "new_tokens") if (v := getattr(own, n)) is not None}
    check_whole(1, batch_size=own.batch_size, **given)
    check_whole(0, seed=own.seed)
    return own


def _budget(text: str) -> Budget:
    try:
        found = number(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text} is neither a number of tokens nor a share of the prompt") from e
    if not 0 < found < float("inf") or (isinstance(found, float) and found > 1):
        raise argparse.ArgumentTypeError(f"{text} must be at least 1 token, or a share above 0 and at most 1.0")
    return found


def options_of(own: argparse.Namespace) -> Options:
    """What a run is asked for."""
    given: dict[str, Any] = {f.name: getattr(own, f.name) for f in dataclasses.fields(Options) if hasattr(own, f.name)}
    given |= {"methods": tuple(own.methods), "budgets": tuple(own.budget)}
    return Options(**given)


def run(options: Options, own: argparse.Namespace, command: Sequence[str]) -> None:
    """Runs an entry and writes its report.

    Raises:
      ValueError: an unknown entry, or nothing of it that could run.
    """
    entry = tables.find(options.entry)
    if not entry.runs:
        raise ValueError(f"{entry.name} has nothing to run: {entry.shows}, {ledger.status(entry, {})}")
    source = included(options.model)
    about = {"model": options.model, **environment([*command])}
    about["command"] = _as_typed(command)
    if entry.kind == "drawn":
        return _draw(entry, options, own, about)
    config = read_config(locate(source, weights=False))
    chosen = choices.choose(entry, options, config)
    _say(chosen)
    if not chosen.columns:
        raise ValueError(f"nothing of {entry.name} can run here; see what is missing above")
    model, params = models.load(source, dtype=options.dtype)
    steps = max(DATA[d].new_tokens for c in chosen.columns for d in c.data)
    room = config.max_position - min(steps, options.new_tokens or steps)
    sizes = Sizes(min(options.length or room, room), options.batch_size, entry.beams, options.seed)
    if sizes.length < 1:
        raise ValueError(f"{steps} new tokens leave no room in {config.max_position} positions; lower --new-tokens")
    job = Run(chosen, options, Engine(model, params, models.load_tokenizer(source), sizes))
    for reason in job.reduced[len(chosen.reduced) :]:
        print(f"  not the paper's: {reason}")
    if own.dry_run:
        return _estimate(job, [*job.jobs()])
    directory = own.output or choices.directory(options)
    with Results(directory, job.config(models.fingerprint(source)), [*command], restart=own.restart) as results:
        if missing := job.missing(results):
            _estimate(job, missing)
        with tqdm(total=len(missing), unit="batch", file=sys.stdout, disable=not missing) as bar:
            for each in missing:
                bar.set_description(f"{each.method} {label(each.budget)} {each.task}")
                with stopping.finishing("this batch"):
                    job.do(each, results)
                bar.update()
        _write(job, results, directory, about)
    if own.record:
        _record(entry, job, options, about, directory)


def _say(chosen: Choice) -> None:
    """What will be run, what is missing, and what is not the paper's."""
    entry = chosen.entry
    print(f"{entry.name}: {entry.shows}")
    print(f"{len(chosen.lines)} methods and budgets, {len(chosen.columns)} columns, for {chosen.model}")
    for title, items in (("missing", chosen.missing), ("not the paper's", chosen.reduced)):
        for item in items:
            print(f"  {title}: {item}")


def _estimate(job: Run, missing: Sequence[Any]) -> None:
    for fault in job.faults:
        print(f"  cannot be run: {fault}")
    seconds, how = job.estimate(missing)
    print(f"about {_duration(seconds)}: {how}" if seconds else how, flush=True)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _write(job: Run, results: Results, directory: pathlib.Path, about: dict[str, Any]) -> None:
    """The report, from all samples."""
    found, faults = numbers(job.choice, [*results.samples.values()]), [*job.faults, *job.refusals(results)]
    text = report.markdown(job.choice, found, job.reduced, faults, about)
    write_json(directory / "report.json", {**report.as_json(job.choice, found, job.reduced, faults), **about})
    write_bytes(directory / "report.md", text.encode())
    print(text)
    print(f"written to {directory}")


def _record(entry: Entry, job: Run, options: Options, about: dict[str, Any], directory: pathlib.Path) -> None:
    counts = ", ".join(f"{len(p)} rows of {n}" for n, p in job.prompts.items())
    measured = f"{len(job.lines)} methods and budgets on {counts}"
    note = {"status": report.status(job.reduced), "measured": measured, "reduced": job.reduced}
    ledger.record(entry.name, {**_noted(options, about), **note})


def _as_typed(command: Sequence[str]) -> list[str]:
    """A command from the project's root, without what places or notes its results."""
    _, script, *words = command
    kept = [w for w in words if w not in ("--record", "--restart") and not w.startswith("--output=")]
    if "--output" in kept:
        at = kept.index("--output")
        del kept[at : at + 2]
    return ["python", f"experiments/{pathlib.Path(script).name}", *kept]


def _noted(options: Options, about: dict[str, Any]) -> dict[str, Any]:
    """How a run can be made again."""
    device = about["device"]
    return {
        "model": options.model,
        "command": shlex.join(about["command"]),
        "commit": about["git_commit"],
        "dirty": about["git_dirty"],
        "date": about["created"],
        "device": f"{device['platform']}, {device['cpus']} cores" if device["platform"] == "cpu" else device["kind"],
    }


def _draw(entry: Entry, options: Options, own: argparse.Namespace, about: dict[str, Any]) -> None:
    """Draws an entry's figures by `experiments/figures.py`; `--data` is the text."""
    text = None if options.data in (None, PROJECT) else pathlib.Path(options.data)
    output = own.output or pathlib.Path("results/reproduce") / entry.name.replace("/", "-")
    print(f"{entry.name}: {entry.shows}\n  drawn by experiments/figures.py {', '.join(entry.figures)}")
    if own.dry_run:
        return
    for name in entry.figures:
        figures.run(
            figures.Options(
                name, model=options.model, text=text, output=output, prompts=options.examples, length=options.length,
                seed=options.seed, dtype=options.dtype,
            ),
            about["command"],
        )  # fmt: skip
    if own.record:
        reduced = [f"drawn on {options.model}, from {text or 'the project text'}; the paper's prompts are not given"]
        note = {"status": "machinery only", "measured": f"figures {', '.join(entry.figures)}", "reduced": reduced}
        ledger.record(entry.name, {**_noted(options, about), **note})


def main(argv: Sequence[str]) -> None:
    """Parses, runs, prints the report."""
    with plain_errors():
        own = parse(keep_compiled(argv))
        if own.list:
            print(ledger.listing(ledger.read()))
            return
        if own.published:
            print(page(tables.find(own.entry)))
            return
        run(options_of(own), own, [sys.executable, *sys.argv])


if __name__ == "__main__":
    main(sys.argv[1:])
