"""The main job: what a policy costs and what it loses, against the full cache and other methods.

    python experiments/run.py --config snapkv.py
    python experiments/run.py --config snapkv.py --budget 64 0.25 --window-size 8 --examples 16
    python experiments/run.py --config snapkv.py --help

Results go to `results/<name>/` (or `--output`): `manifest.json`, `samples.jsonl` (a line an example, as it finishes),
`costs.json`, `summary.json`, `summary.md` and plots. An interrupted run resumes; a finished one is not repeated.
"""

import argparse
import dataclasses
import hashlib
import inspect
import itertools
import pathlib
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any

import tyro

import configs
import kvjax
import models
from configs.experiment import BASELINES, COMPACT, LARGEST, Experiment, Setup, label
from configs.learning import LearnedBudget, LearnedScorer
from experiments import tasks
from experiments.evaluation import report
from experiments.evaluation.batches import buckets
from experiments.evaluation.evaluate import Evaluator
from experiments.evaluation.examples import build, described, find_builders
from experiments.evaluation.provenance import definition
from experiments.evaluation.results import Results, check_options, directory_path, plain_errors
from experiments.evaluation.running import run_missing
from experiments.tasks import Builder
from models.sources import locate
from models.weights import read_config

_NAMES = "--model", "--baselines", "--tasks", "--data", "--text"  # options whose values are none of numbers
_RETURNED = {"run.py": Experiment, "learn_budget.py": LearnedBudget, "learn_scorer.py": LearnedScorer}


def parse(argv: Sequence[str], script: str = "run.py") -> tuple[Any, argparse.Namespace, list[str]]:
    """The experiment, the options of a script, and the overrides as typed.

    Raises:
      ValueError: an unknown config, or an option that is given twice.
      SystemExit: options that do not exist or do not fit, after saying which do; or --help.
    """
    parser = argparse.ArgumentParser(prog=f"experiments/{script}", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="a file in configs/, by name, or a path")
    parser.add_argument(
        "--output", type=directory_path, metavar="DIR", help="where results go; results/<name> by default"
    )
    parser.add_argument("--restart", action="store_true", help="begin anew; an earlier run there is moved aside")
    if script == "run.py":
        parser.add_argument(
            "--list-tasks", action="store_true", help="print the tasks and what they ask, as --tasks list"
        )
    own, overrides = parser.parse_known_args(argv)
    if script == "run.py" and (own.list_tasks or _lists_tasks(overrides)):
        print(tasks.listing())
        raise SystemExit(0)
    if own.config is None:
        print(parser.format_help() + f"\nconfigs: {', '.join(configs.available(script))}")
        print("\n--config FILE --help lists the parameters of a config.")
        raise SystemExit(0 if {"-h", "--help"} & set(argv) else 2)
    check_options(argv)
    _check_numbers(overrides)
    name, get_config = configs.find(own.config, script)
    program = f"experiments/{script} --config {own.config} [--output DIR] [--restart]"
    if {"-h", "--help"} & set(overrides):
        print(parser.format_help())
    try:
        experiment = tyro.cli(get_config, args=overrides, prog=program)
    except SystemExit as e:
        if e.code not in (0, None):
            print(f"parameters of {name}: {' '.join(_options(get_config))}", file=sys.stderr)
        raise
    _check_is(experiment, _RETURNED[script], own.config)
    return experiment, own, overrides


def _lists_tasks(overrides: Sequence[str]) -> bool:
    return any(a == "--tasks" and b == "list" for a, b in itertools.pairwise(overrides)) or "--tasks=list" in overrides


def _check_numbers(overrides: Sequence[str]) -> None:
    """Refuses what no option of any config takes: nan, and whole numbers that 32 bits do not hold."""
    option = ""
    for text in overrides:
        option = text if text.startswith("--") else option
        if option.partition("=")[0] in _NAMES:
            continue  # names
        number = text.rpartition("=")[2].strip()
        if number.lower().lstrip("+-") == "nan":
            raise ValueError(f"{option}: nan is no number that an option takes")
        if re.fullmatch(r"[+-]?[0-9_]+", number) and abs(int(number.replace("_", "") or "0")) > LARGEST:
            raise ValueError(f"{option}: {number} must be at most {LARGEST}, which 32 bits hold")


def _options(get_config: Any) -> list[str]:
    names = []
    for name, parameter in inspect.signature(get_config).parameters.items():
        grouped = dataclasses.is_dataclass(parameter.default)  # its fields are options without a prefix
        names += [f.name for f in dataclasses.fields(parameter.default)] if grouped else [name]
    return ["--output", "--restart", *(f"--{n.replace('_', '-')}" for n in names)]


def default_directory(own: argparse.Namespace, overrides: Sequence[str], script: str = "run.py") -> pathlib.Path:
    """A directory of its own for every config and choice of options; a long name ends in a digest."""
    stem = configs.find(own.config, script)[0]
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
    for path in (source, pathlib.Path(own.config)):
        if own.restart and path.exists() and path.resolve().is_relative_to(here):
            raise ValueError(f"--restart would move {path} aside with {directory}; choose another --output")


def with_baselines(experiment: Experiment) -> Experiment:
    """The experiment with its baselines: the default ones that its model can run, where none are given.

    Raises:
      ValueError: a model that `models.load` would not find.
    """
    setup = experiment.setup
    if setup.baselines is not None:
        return experiment
    chosen = BASELINES
    if read_config(locate(setup.source, weights=False)).learned_positions:
        chosen = tuple(b for b in BASELINES if b not in COMPACT)
        print(
            f"baselines: {', '.join(chosen)}; without {', '.join(COMPACT)}, whose stored keys move to other positions, "
            "since this model has learned positions"
        )
    return dataclasses.replace(experiment, setup=dataclasses.replace(setup, baselines=chosen))


def all_policies(experiment: Experiment) -> list[tuple[str, str, kvjax.Policy]]:
    """(method, budget label, policy): the full cache, the experiment's own, and its baselines.

    A baseline without budgets runs as its config has it.

    Raises:
      ValueError: a method and budget that stand for two policies, which would become one row.
    """
    setup = experiment.setup
    full = ("full", "1.0", kvjax.methods.full())
    own = [(experiment.name, label(b), p) for b, p in experiment.policies]
    found = [full, *(each for each in own if each != full)]
    for baseline in setup.baselines or ():
        name, get_config = configs.find(baseline)
        if name not in (experiment.name, "full"):
            parameters = inspect.signature(get_config).parameters
            given = {"budget": (setup.baseline_budget,), "setup": setup}
            theirs = get_config(**{k: v for k, v in given.items() if k in parameters})
            _check_is(theirs, Experiment, baseline)
            found += [(name, label(b), p) for b, p in theirs.policies]
    for i, (method, budget, _) in enumerate(found):
        if (method, budget) in ((m, b) for m, b, _ in found[:i]):
            raise ValueError(
                f"{method} at budget {budget} is there twice, and both would become one row; give each budget, "
                "baseline and name once"
            )
    return found


def _check_is(found: Any, kind: type, config: str) -> None:
    if not isinstance(found, kind):
        raise ValueError(f"get_config of {config} returns a {type(found).__name__}, but must return a {kind.__name__}")


def run(experiment: Experiment, directory: pathlib.Path, command: list[str], *, restart: bool = False) -> str:
    """Runs what is missing in `directory`, and writes the report.

    Returns:
      The report's text.
    """
    experiment = with_baselines(experiment)
    setup, policies = experiment.setup, all_policies(experiment)
    builders = find_builders(setup)
    config = {
        "name": experiment.name,
        "policies": [{"method": m, "budget": b, "policy": definition(p)} for m, b, p in policies],
        "setup": dataclasses.asdict(setup),
        **described(setup, builders),
        "checkpoint": models.fingerprint(setup.source),
        "seed": setup.seed,
    }
    with Results(directory, config, command, restart=restart) as results:
        labels = {f"{m}@{b}" for m, b, _ in policies}
        kept = set(report.load_kept(directory, results.config))
        if all(k in results.samples for k in results.expected()) and labels <= kept & set(results.costs):
            summary = report.summarise(results.lines(), results.costs, results.bad)
            text = report.markdown(summary, experiment.name)
            if report.stands(directory, summary, text):
                print(f"{directory} is complete; --restart runs it again")
                return text
        _run_missing(setup, builders, policies, results, kept)
        return report.write(directory, results.lines(), results.costs, results.bad)


def _run_missing(
    setup: Setup,
    builders: dict[str, Builder],
    policies: Sequence[tuple[str, str, kvjax.Policy]],
    results: Results,
    kept: Collection[str],
) -> None:
    """Runs the examples that `results` lacks, and those whose kept positions or costs it lacks."""
    model, params = models.load(setup.source, dtype=setup.dtype)
    tokenizer = models.load_tokenizer(setup.source)
    rows, bad = build(setup, builders, tokenizer, model.config)
    results.set_bad(bad)
    most = model.config.max_position if model.config.learned_positions else None
    groups = buckets(rows, setup.batch_size, most)
    evaluators = {  # plans are made, and sizes checked, before anything runs
        (method, budget): Evaluator(
            model,
            params,
            policy,
            groups,
            batch_size=setup.batch_size,
            seed=setup.seed,
            tokenizer=tokenizer,
            block=setup.block,
        )
        for method, budget, policy in policies
    }
    run_missing(evaluators, groups, results, kept)


def main(argv: Sequence[str]) -> None:
    """Parses, runs, prints the report."""
    with plain_errors():
        experiment, own, overrides = parse(argv)
        directory = own.output or default_directory(own, overrides)
        check_apart(directory, own, experiment.setup.source)
        print(run(experiment, directory, [sys.executable, *sys.argv], restart=own.restart))
        print(f"written to {directory}")


if __name__ == "__main__":
    main(sys.argv[1:])
