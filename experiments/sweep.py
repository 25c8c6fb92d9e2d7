"""A grid of runs of the main job: configs x options x seeds x models, a process each.

    python experiments/sweep.py --config snapkv.py h2o.py --budget 0.1 0.2 --seed 0 1
    python experiments/sweep.py --config snapkv.py --budget 64 128 --model DIR OTHER --dry-run -- --examples 16
    python experiments/sweep.py --config snapkv.py --scheduler slurm --resources slurm_partition=gpu gpus_per_node=1

Every value of an option makes a run of its own, with every value of the others. What stands after `--` is the same for
all runs: options that take several values (--tasks), or none (--chat). Options are those of `experiments/run.py`, which
each run is a call of; `--dry-run` prints the calls. A run goes where that call puts it, or into a directory of the same
name in `--output`: so runs that are there are not repeated, and those that were interrupted go on. `compare.py` and
`report.py` read the directories as those of any run.
"""

import importlib

if __name__ == "__main__":  # before imports that take seconds
    importlib.import_module(f"{__package__ or ''}.stopping".lstrip(".")).begin()

import argparse
import ast
import contextlib
import itertools
import pathlib
import shlex
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from kvjax import configs
from kvjax.experiments import run, stopping
from kvjax.experiments.core.command import check_options, directory_path, plain_errors
from kvjax.experiments.core.compiled import OPTION, keep_compiled
from kvjax.experiments.evaluation.scheduling import Ended, Job, cpu_threads, devices, local, on_ray, places, submitted

_OF_THE_SWEEP = "--output", "--restart", "--shard", "--list-tasks", "--help", "-h"


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[list[str]]]:
    """The sweep's own options, and the arguments of every run.

    Raises:
      ValueError: an option that is given twice, an axis without values, no config, or two runs that are one.
      SystemExit: options that do not exist or do not fit, after saying which do; or --help.
    """
    swept, fixed = _divided(argv)
    parser = argparse.ArgumentParser(
        prog="experiments/sweep.py",
        description=(__doc__ or "").splitlines()[0],
        usage="%(prog)s --config FILE ... [--OPTION VALUE ...] ... [-- OPTIONS OF ALL RUNS]",
        allow_abbrev=False,
    )
    parser.add_argument("--config", nargs="+", default=[], metavar="FILE", help="files in configs/, by name, or paths")
    parser.add_argument(
        "--policy", nargs="+", default=[], metavar="FILE.py:make", help="functions of a budget, as of run.py"
    )
    parser.add_argument("--output", type=directory_path, metavar="DIR", help="where runs go; results by default")
    parser.add_argument("--scheduler", choices=("local", "slurm", "ray"), default="local", help="who runs them")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="local processes at a time; one a GPU by default, one without a GPU"
    )
    parser.add_argument(
        "--resources",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="what a run gets: parameters of submitit's AutoExecutor, or options of Ray's tasks",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the runs, and start none")
    check_options(swept)
    own, rest = parser.parse_known_args(swept)
    sources = [("--config", x) for x in own.config] + [("--policy", x) for x in own.policy]
    if not sources:
        raise ValueError(f"a sweep needs --config or --policy; configs are {', '.join(configs.available())}")
    own.resources = dict(map(_resource, own.resources))
    if own.workers is not None and own.workers < 1:
        raise ValueError(f"--workers {own.workers} is no number of processes; give at least 1")
    if own.resources and own.scheduler == "local":
        raise ValueError("--resources are for --scheduler slurm or ray; local processes have --workers")
    if own.workers is not None and own.scheduler != "local":
        raise ValueError(f"--workers are local processes; what {own.scheduler} gives a run is said by --resources")
    own.keep = OPTION not in argv
    return own, [[*source, *axes, *fixed] for source, axes in itertools.product(sources, _axes(rest))]


def _divided(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before and after `--`; the option on compiled programs is for every run."""
    argv = [text for text in argv if text != OPTION]
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _axes(words: Sequence[str]) -> Iterator[list[str]]:
    """One value of every option, in all combinations; the last option changes fastest."""
    axes: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            axes.append((name, [value] if value else []))
        elif not axes:
            raise ValueError(f"{word!r} belongs to no option; write --option {word}")
        else:
            axes[-1][1].append(word)
    for name, values in axes:
        if name in _OF_THE_SWEEP:
            raise ValueError(f"{name} is no option of the runs of a sweep; run one by experiments/run.py")
        if not values:
            raise ValueError(f"{name} has no value to run; what has none, and is the same for all runs, goes after --")
    for chosen in itertools.product(*([[name, value] for value in values] for name, values in axes)):
        yield [word for pair in chosen for word in pair]


def _resource(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals and value):
        raise ValueError(f"--resources {text} is not of the form name=value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def jobs(runs: Sequence[Sequence[str]], output: pathlib.Path | None, keep: bool = True) -> list[Job]:
    """A job for every run, whose options are tried.

    Args:
      runs: arguments of `experiments/run.py`.
      output: where their directories go; where run.py puts them if None.
      keep: whether programs that they compile are kept.

    Raises:
      ValueError: what run.py refuses of the options, two runs that are one, an `output` that is a file.
      SystemExit: options that do not exist or do not fit, after saying which do.
    """
    existing = None if output is None else next(p for p in (output, *output.absolute().parents) if p.exists())
    if existing is not None and not existing.is_dir():
        raise ValueError(f"--output {output}: {existing} is a file; name a directory, which may be a new one")
    found: dict[pathlib.Path, Job] = {}
    same = set[Any]()
    for arguments in runs:
        if wrong := [x for x in arguments if x.partition("=")[0] in _OF_THE_SWEEP]:
            raise ValueError(f"{wrong[0]} is no option of the runs of a sweep; run one by experiments/run.py")
        try:
            experiment, own, overrides = run.parse(arguments)
        except SystemExit:
            print(f"no run was started; this one's options do not fit: {shlex.join(arguments)}", file=sys.stderr)
            raise
        directory = run.default_directory(own, overrides)
        directory = directory if output is None else output / directory.name
        run.check_apart(directory, own, experiment.setup.source)
        what = experiment, repr(own.mesh)
        if directory in found or what in same:
            raise ValueError(f"two runs are {shlex.join(arguments)}; give every value once")
        same.add(what)
        script = pathlib.Path(run.__file__).absolute()
        command = sys.executable, str(script), *arguments, "--output", str(directory), *([] if keep else [OPTION])
        found[directory] = Job(directory.name, command, directory.parent / "logs" / f"{directory.name}.log")
    return [*found.values()]


def run_all(planned: Sequence[Job], ended: Generator[Ended, None, None]) -> list[tuple[Job, str]]:
    """Says of every run how it ended; those that failed, and why."""
    failed: list[tuple[Job, str]] = []
    start = time.monotonic()
    stored = f"what is done is stored, and the same command goes on from there; logs are in {planned[0].log.parent}"
    with stopping.noted(lambda: stored), contextlib.closing(ended):
        for i, (job, why) in enumerate(ended, start=1):
            failed += [(job, why)] if why else []
            said = f"failed: {why}; {job.log}" if why else "done"
            print(f"[{i}/{len(planned)}] {time.monotonic() - start:.0f} s: {job.name}: {said}", flush=True)
    return failed


def _scheduled(planned: Sequence[Job], own: argparse.Namespace) -> Generator[Ended, None, None]:
    if own.scheduler == "slurm":
        return submitted(planned, planned[0].log.parent / "submitit", own.resources)
    if own.scheduler == "ray":
        return on_ray(planned, own.resources)
    return local(planned, places(own.workers, devices(), cpu_threads()))


def main(argv: Sequence[str]) -> None:
    """Parses, runs, names what failed."""
    with plain_errors():
        if {"-h", "--help"} & set(argv):
            keep_compiled(argv)
        own, runs = parse(argv)
        planned = jobs(runs, own.output, own.keep)
        if own.dry_run:
            print("\n".join(shlex.join(job.command) for job in planned))
            return
        failed = run_all(planned, _scheduled(planned, own))
        for job, why in failed:
            print(f"failed ({why}): {job.name}, see {job.log}", file=sys.stderr)
        if failed:
            raise SystemExit(f"{len(failed)} of {len(planned)} runs failed; the same command runs them again")
        print(f"{len(planned)} runs are in {planned[0].log.parent.parent}")


if __name__ == "__main__":
    main(sys.argv[1:])
