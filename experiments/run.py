"""The main job: what a policy costs and what it loses, against the full cache and other methods.

    python experiments/run.py --config snapkv.py
    python experiments/run.py --config snapkv.py --budget 64 0.25 --window 8 --examples 16
    python experiments/run.py --config snapkv.py --help

Results go to `results/<name>/` (or `--output`): `manifest.json`, `samples.jsonl` (a line a question, as it finishes),
and the page, `report.html`. An interrupted run resumes; a finished one is not repeated.
"""

import argparse
import hashlib
import inspect
import itertools
import pathlib
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

import kvjax
from kvjax import configs
from kvjax.configs import loading
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep
from kvjax.configs.learning import LearnedBudget, LearnedScorer, Prompts
from kvjax.experiments import report, tasks
from kvjax.experiments.core import job
from kvjax.experiments.core.command import as_command, check_limit, typed
from kvjax.experiments.core.compiled import HELP, read_cache_option
from kvjax.experiments.core.screen import screen
from kvjax.experiments.core.setup import (
    check_is,
)
from kvjax.models.packaged import TERMS, accept_license

_PICTURES = "score_against_budget.png", "perplexity_against_budget.png"
_RETURNED = {"run": Experiment, "learn budget": LearnedBudget, "learn scorer": LearnedScorer}


def parse(argv: Sequence[str], script: str = "run") -> tuple[Any, argparse.Namespace, list[str]]:
    """The experiment, the options of a script, and the overrides as typed.

    Raises:
      ValueError: an unknown config.
      SystemExit: options that do not exist or do not fit, after saying which do; or --help.
    """
    parser = argparse.ArgumentParser(prog=typed(script), add_help=False, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="a file in configs/, by name, or a path")
    parser.add_argument(
        "--output", type=pathlib.Path, metavar="DIR", help="where results go; results/<name> by default"
    )
    parser.add_argument("--restart", action="store_true", help="begin anew; an earlier run there is moved aside")
    parser.add_argument("--accept-license", choices=TERMS, help="of a model: its terms, which you have read and accept")
    if script == "run":
        parser.add_argument(
            "--policy",
            metavar="FILE.py:make",
            help="in place of a config: make(budget) gives a policy, or one and its parameters, for each --budget",
        )
        parser.add_argument("--shard", type=_shard, metavar="I/N", help="run every N-th example, from the I-th on")
        parser.add_argument(
            "--mesh",
            type=_mesh,
            metavar="data=4,heads=2",
            help="devices that share the rows of a batch (data) and the kv heads (heads)",
        )
        parser.add_argument(
            "--list-tasks", action="store_true", help="print the tasks and what they ask, as --tasks list"
        )
    if script == "run":
        check_limit(argv)
    own, overrides = parser.parse_known_args(argv)
    if script == "run" and (own.list_tasks or _lists_tasks(overrides)):
        print(tasks.listing())
        raise SystemExit(0)
    if own.config is None and getattr(own, "policy", None) is None:
        if not {"-h", "--help"} & set(argv):
            raise ValueError(f"--config is missing; {typed(script)} --help lists them and their options")
        print(f"{parser.format_help()}\n{HELP}\n\nconfigs: {', '.join(configs.available(script))}")
        print("\n--config FILE --help says what the options of a method are, too. Of every config:\n")
        tyro.cli(Setup if script == "run" else Prompts, args=["--help"], prog=typed(script))
    if own.accept_license:
        accept_license(own.accept_license)
    name, get_config = _config_of(own, script)
    program = f"{typed(script)} --config {own.config} [--output DIR] [--restart]"
    if {"-h", "--help"} & set(overrides):
        print(parser.format_help())
    experiment = tyro.cli(get_config, args=overrides, prog=program)
    check_is(experiment, _RETURNED[script], own.config or name)
    return experiment, own, overrides


def _config_of(own: argparse.Namespace, script: str) -> tuple[str, Callable[..., Any]]:
    """The name and the `get_config` of --config or of --policy."""
    if getattr(own, "policy", None) is None:
        return configs.find(own.config, script)
    if own.config is not None:
        raise ValueError("--config and --policy each say what to run; give one of them")
    return config_of(own.policy)


def config_of(policy: str) -> tuple[str, Callable[..., Any]]:
    """The name and a `get_config` of "path.py:make", whose only parameters are budgets and the setup.

    Raises:
      ValueError: no such function, or one that is not called as make(budget).
    """
    make = loading.function(policy)
    try:
        inspect.signature(make).bind(BUDGETS[0])
    except (TypeError, ValueError) as e:
        raise ValueError(f"{policy} is not called as make(budget): {e}") from e
    file, _, made_by = policy.rpartition(":")
    name = f"{pathlib.Path(file).stem}.{made_by}"

    def get_config(budget: tuple[Budget, ...] = BUDGETS, setup: Common = Setup()) -> Experiment:
        """A policy of one's own.

        Args:
          budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
          setup: model, tasks and sizes.
        """
        made = sweep(make, budget)
        pair = lambda p: p if isinstance(p, tuple) and len(p) == 2 else (p, ())
        if wrong := [p for _, p in made if not isinstance(pair(p)[0], kvjax.Policy)]:
            raise ValueError(f"{policy} returns {wrong[0]!r:.60}, which is no policy, nor one and its parameters")
        return Experiment(name, made, setup, origin=loading.origin(file))

    return name, get_config


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of 1/N to N/N")
    return int(found[1]), int(found[2])


def _mesh(text: str) -> dict[str, int]:
    if "sequence" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r}: devices share rows (data) or kv heads (heads), not a prompt's tokens"
        )
    sizes = dict(re.findall(r"(?:^|,)(data|heads)=(\d{1,6})(?=,|$)", text))
    if not text or ",".join(f"{name}={size}" for name, size in sizes.items()) != text or "0" in sizes.values():
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh such as data=4,heads=2")
    return {name: int(size) for name, size in sizes.items()}


def _lists_tasks(overrides: Sequence[str]) -> bool:
    return any(a == "--tasks" and b == "list" for a, b in itertools.pairwise(overrides)) or "--tasks=list" in overrides


def default_directory(own: argparse.Namespace, overrides: Sequence[str], script: str = "run") -> pathlib.Path:
    """A directory of its own for every config and choice of options; a long name ends in a digest."""
    stem = _config_of(own, script)[0]
    name = "-".join([stem, *(o.removeprefix("--").replace("/", "_") for o in overrides)])
    if len(name.encode()) > 200:
        name = f"{name.encode()[:180].decode(errors='ignore')}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return pathlib.Path("results") / name


def check_apart(directory: pathlib.Path, own: argparse.Namespace, model: str | pathlib.Path) -> None:
    """Tries whether the model and the config stay what and where they are.

    Raises:
      ValueError: results among a model's files, which would make another checkpoint of it, or a --restart that would
        move the model or the config aside.
    """
    here, source = directory.resolve(), pathlib.Path(model).expanduser()
    if source.is_dir() and source.resolve() == here:
        raise ValueError(f"--output {directory} is the model's own directory; choose another --output")
    file = own.config if own.config is not None else own.policy.rpartition(":")[0]
    for path in (source, pathlib.Path(file)):
        if own.restart and path.exists() and path.resolve().is_relative_to(here):
            raise ValueError(f"--restart would move {path} aside with {directory}; choose another --output")


def _said(directory: pathlib.Path, command: Sequence[str]) -> str:
    """Writes the page of a run. Returns what the screen says of it."""
    from kvjax.experiments.core import views  # imports pandas, which takes longer than --help should

    files = {"page": directory / "report.html", "records": directory / "samples.jsonl"}
    if not files["records"].exists():  # a shard without examples
        return f"{directory} has no records"
    numbers = report.write([directory], directory, f"python {shlex.join(command[1:])}").to_dict("records")
    picture = next((path for path in map(directory.joinpath, _PICTURES) if path.exists()), None)
    files = {**({} if picture is None else {"picture": picture}), **files}
    return screen(numbers, views.AVERAGE, files, views.whole(numbers), views.kept_whole(numbers))


@as_command
def main(argv: Sequence[str]) -> None:
    """Parses, runs, prints the report."""
    experiment, own, overrides = parse(read_cache_option(argv))
    directory = own.output or default_directory(own, overrides)
    if own.shard is not None:
        directory = directory.with_name(f"{directory.name}-shard-{own.shard[0]}-of-{own.shard[1]}")
    check_apart(directory, own, experiment.setup.source)
    mesh = None if own.mesh is None else kvjax.make_mesh(**own.mesh)
    options = {"restart": own.restart, "shard": own.shard, "mesh": mesh}
    job.run(experiment, directory, [sys.executable, *sys.argv], **options)
    print(f"\n{_said(directory, [sys.executable, *sys.argv])}")


if __name__ == "__main__":
    main()
