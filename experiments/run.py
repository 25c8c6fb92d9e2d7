"""The main job: what a policy costs and what it loses, against the full cache and other methods.

    python experiments/run.py --config snapkv.py
    python experiments/run.py --config snapkv.py --budget 64 0.25 --window 8 --examples 16
    python experiments/run.py --config snapkv.py --help

Results go to `results/<name>/` (or `--output`): `manifest.json`, `samples.jsonl` (a line an example, as it finishes),
`costs.json`, `summary.json`, `summary.md` and plots. An interrupted run resumes; a finished one is not repeated.
"""

import importlib

if __name__ == "__main__":  # before imports that take seconds
    importlib.import_module(f"{__package__ or ''}.stopping".lstrip(".")).begin()

import argparse
import dataclasses
import functools
import hashlib
import inspect
import itertools
import pathlib
import re
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tyro
from jax.sharding import Mesh

import kvjax
from kvjax import configs, models
from kvjax.configs import loading
from kvjax.configs.experiment import BUDGETS, LARGEST, Budget, Common, Experiment, Setup, label, sweep
from kvjax.configs.learning import LearnedBudget, LearnedScorer
from kvjax.experiments import tasks
from kvjax.experiments.core.command import check_options, directory_path, plain_errors
from kvjax.experiments.core.compiled import keep_compiled
from kvjax.experiments.core.provenance import definition
from kvjax.experiments.evaluation import report
from kvjax.experiments.evaluation.batches import Bucket, buckets
from kvjax.experiments.evaluation.evaluate import Evaluator
from kvjax.experiments.evaluation.examples import build, described, find_builders
from kvjax.experiments.evaluation.policies import all_policies, check_is, options_of, tasks_of, with_baselines
from kvjax.experiments.evaluation.results import Results
from kvjax.experiments.evaluation.reuse import reuse_full
from kvjax.experiments.evaluation.running import run_missing
from kvjax.experiments.tasks import Builder
from kvjax.models.packaged import TERMS, accept_license

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
    parser.add_argument("--accept-license", choices=TERMS, help="of a model: its terms, which you have read and accept")
    if script == "run.py":
        parser.add_argument(
            "--policy",
            metavar="FILE.py:make",
            help="in place of a config: make(budget) returns a policy for each --budget",
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
    own, overrides = parser.parse_known_args(argv)
    if script == "run.py" and (own.list_tasks or _lists_tasks(overrides)):
        print(tasks.listing())
        raise SystemExit(0)
    if own.config is None and getattr(own, "policy", None) is None:
        print(parser.format_help() + f"\nconfigs: {', '.join(configs.available(script))}")
        print("\n--config FILE --help lists the parameters of a config.")
        raise SystemExit(0 if {"-h", "--help"} & set(argv) else 2)
    check_options(argv)
    if own.accept_license:
        accept_license(own.accept_license)
    _check_numbers(overrides)
    name, get_config = _config_of(own, script)
    program = f"experiments/{script} --config {own.config} [--output DIR] [--restart]"
    if {"-h", "--help"} & set(overrides):
        print(parser.format_help())
    given: dict[str, Any] = {}

    @functools.wraps(get_config)
    def recorded(*values: Any, **options: Any) -> Any:
        given.update(inspect.signature(get_config).bind(*values, **options).arguments)
        return get_config(*values, **options)

    try:
        experiment = tyro.cli(recorded, args=overrides, prog=program)
    except SystemExit as e:
        if e.code not in (0, None):
            print(f"parameters of {name}: {' '.join(_options(get_config))}", file=sys.stderr)
        raise
    check_is(experiment, _RETURNED[script], own.config or name)
    if script == "run.py" and experiment.setup.task_budget and "budget" in given:
        budgets = {label(b): b for each in experiment.setup.task_budgets.values() for b in each}
        single = get_config(**{**given, "budget": (*budgets.values(),)})
        experiment = dataclasses.replace(experiment, task_policies=single.policies)
    return experiment, own, overrides


def _config_of(own: argparse.Namespace, script: str) -> tuple[str, Callable[..., Any]]:
    """The name and the `get_config` of --config, or of --policy, whose only parameters are budgets and the setup."""
    if getattr(own, "policy", None) is None:
        return configs.find(own.config, script)
    if own.config is not None:
        raise ValueError("--config and --policy each say what to run; give one of them")
    make = loading.function(own.policy)
    try:
        inspect.signature(make).bind(BUDGETS[0])
    except (TypeError, ValueError) as e:
        raise ValueError(f"{own.policy} is not called as make(budget): {e}") from e
    file, _, made_by = own.policy.rpartition(":")
    name = f"{pathlib.Path(file).stem}.{made_by}"

    def get_config(budget: tuple[Budget, ...] = BUDGETS, setup: Common = Setup()) -> Experiment:
        """A policy of one's own.

        Args:
          budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
          setup: model, tasks and sizes.
        """
        made = sweep(make, budget)
        if wrong := [p for _, p in made if not isinstance(p, kvjax.Policy)]:
            raise ValueError(f"{own.policy} returns {wrong[0]!r:.60}, which is no policy")
        return Experiment(name, made, setup)

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


def run(
    experiment: Experiment,
    directory: pathlib.Path,
    command: list[str],
    *,
    restart: bool = False,
    shard: tuple[int, int] | None = None,
    mesh: Mesh | None = None,
) -> str:
    """Runs what is missing in `directory`, and writes the report.

    Args:
      experiment: what to run.
      directory: where results go.
      command: the command line, for the manifest.
      restart: begin anew; an earlier run there is moved aside.
      shard: which of how many parts of the examples, from 1.
      mesh: devices that share the work; results are the same.

    Returns:
      The report's text.
    """
    experiment = with_baselines(experiment)
    setup, builders = experiment.setup, find_builders(experiment.setup)
    tasks_under = tasks_of(experiment, [*builders])
    policies = [run for run in all_policies(experiment) if run[:2] in tasks_under]
    options = options_of(experiment)
    only = lambda m, b: {"tasks": tasks_under[m, b]} if setup.task_budget else {}
    other = lambda m: {"options": options[m]} if m in options else {}
    config = {
        "name": experiment.name,
        "policies": [
            {"method": m, "budget": b, "policy": definition(p), **other(m), **only(m, b)} for m, b, p in policies
        ],
        "setup": dataclasses.asdict(setup),
        **described(setup, builders),
        "checkpoint": models.fingerprint(setup.source),
        "seed": setup.seed,
        "shard": shard,
    }
    with Results(directory, config, command, restart=restart) as results:
        labels = {f"{m}@{b}" for m, b, *_ in results.expected()}
        kept = set(report.load_kept(directory, results.config))
        if all(k in results.samples for k in results.expected()) and labels <= kept & set(results.costs):
            summary = report.summarise(results.lines(), results.costs, results.bad)
            text = report.markdown(summary, experiment.name, options)
            if report.stands(directory, summary, text):
                print(f"{directory} is complete; --restart runs it again")
                return text
        if not restart:
            kept |= {*reuse_full(results, kept)}
        _run_missing(setup, builders, policies, results, kept, mesh)
        return report.write(directory, results.lines(), results.costs, results.bad)


def _run_missing(
    setup: Setup,
    builders: dict[str, Builder],
    policies: Sequence[tuple[str, str, kvjax.Policy]],
    results: Results,
    kept: Collection[str],
    mesh: Mesh | None,
) -> None:
    """Runs the examples that `results` lacks, and those whose kept positions or costs it lacks."""
    model, params = models.load(setup.source, dtype=setup.dtype)
    tokenizer = models.load_tokenizer(setup.source)
    rows, bad = build(setup, builders, tokenizer, model.config)
    results.set_bad(bad)
    most = model.config.max_position if model.config.learned_positions else None
    shard, of = results.config["shard"] or (1, 1)

    @functools.cache
    def rows_in(tasks: tuple[str, ...]) -> list[Bucket]:
        theirs = [row for row in rows if row.example.task in tasks]  # a policy need not read the others' lengths
        return buckets(theirs, setup.batch_size, most, mine=lambda row: row.example.index % of == shard - 1)

    groups = {
        (p["method"], p["budget"]): rows_in((*p.get("tasks", results.config["tasks"]),))
        for p in results.config["policies"]
    }
    if rows and not any(bucket.batches for group in groups.values() for bucket in group):
        print(f"shard {shard}/{of} has none of the {len(rows)} rows")
    if mesh is not None:
        params = kvjax.shard_params(model, params, mesh)
    options = {"batch_size": setup.batch_size, "tokenizer": tokenizer, "block": setup.block, "mesh": mesh}
    evaluators = {  # plans are made, and sizes checked, before anything runs
        (method, budget): (Evaluator(model, params, policy, groups[method, budget], **options), groups[method, budget])
        for method, budget, policy in policies
        if any(bucket.batches for bucket in groups[method, budget])
    }
    run_missing(evaluators, results, kept)


def main(argv: Sequence[str]) -> None:
    """Parses, runs, prints the report."""
    with plain_errors():
        experiment, own, overrides = parse(keep_compiled(argv))
        directory = own.output or default_directory(own, overrides)
        if own.shard is not None:
            directory = directory.with_name(f"{directory.name}-shard-{own.shard[0]}-of-{own.shard[1]}")
        check_apart(directory, own, experiment.setup.source)
        mesh = None if own.mesh is None else kvjax.make_mesh(**own.mesh)
        options = {"restart": own.restart, "shard": own.shard, "mesh": mesh}
        print(run(experiment, directory, [sys.executable, *sys.argv], **options))
        print(f"written to {directory}")


if __name__ == "__main__":
    main(sys.argv[1:])
