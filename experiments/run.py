"""The main job: what a policy costs and what it loses, against the full cache and other methods.

    python experiments/run.py --config snapkv.py
    python experiments/run.py --config snapkv.py --budget 64 0.25 --window-size 8 --examples 16
    python experiments/run.py --config snapkv.py --help

Results go to `results/<name>/` (or `--output`): `manifest.json`, `samples.jsonl` (a line an example, as it finishes),
`costs.json`, `summary.json`, `summary.md` and plots. An interrupted run resumes; a finished one is not repeated.
"""

import argparse
import contextlib
import dataclasses
import inspect
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import tyro
from tqdm import tqdm

import configs
import kvjax
import models
from configs.experiment import Experiment, Setup, label
from experiments import report
from experiments.evaluate import Evaluator
from experiments.results import Results, sample_key
from experiments.tasks import TASKS, Example, Task


def parse(argv: Sequence[str], script: str = "run.py") -> tuple[Any, argparse.Namespace, list[str]]:
    """The experiment, the options of a script, and the overrides as typed.

    Raises:
      ValueError: an unknown config.
      SystemExit: options that do not exist or do not fit, after saying which do; or --help.
    """
    parser = argparse.ArgumentParser(prog=f"experiments/{script}", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="a file in configs/, by name, or a path")
    parser.add_argument(
        "--output", type=pathlib.Path, metavar="DIR", help="where results go; results/<name> by default"
    )
    parser.add_argument("--restart", action="store_true", help="begin anew; an earlier run there is moved aside")
    own, overrides = parser.parse_known_args(argv)
    if own.config is None:
        print(parser.format_help() + f"\nconfigs: {', '.join(configs.available(script))}")
        print("\n--config FILE --help lists the parameters of a config.")
        raise SystemExit(0 if {"-h", "--help"} & set(argv) else 2)
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
    return experiment, own, overrides


def _options(get_config: Any) -> list[str]:
    names = []
    for name, parameter in inspect.signature(get_config).parameters.items():
        grouped = dataclasses.is_dataclass(parameter.default)  # its fields are options without a prefix
        names += [f.name for f in dataclasses.fields(parameter.default)] if grouped else [name]
    return ["--output", "--restart", *(f"--{n.replace('_', '-')}" for n in names)]


def default_directory(own: argparse.Namespace, overrides: Sequence[str], script: str = "run.py") -> pathlib.Path:
    """A directory of its own for every config and choice of options."""
    stem = configs.find(own.config, script)[0]
    return pathlib.Path("results") / "-".join([stem, *(o.lstrip("-").replace("/", "_") for o in overrides)])


def all_policies(experiment: Experiment) -> list[tuple[str, str, kvjax.Policy]]:
    """(method, budget label, policy): the full cache, the experiment's own, and its baselines.

    A baseline without budgets runs as its config has it.
    """
    setup = experiment.setup
    found = [("full", "1.0", kvjax.methods.full())]
    found += [(experiment.name, label(b), p) for b, p in experiment.policies if experiment.name != "full"]
    for baseline in setup.baselines:
        name, get_config = configs.find(baseline)
        if name not in (experiment.name, "full"):
            takes_budget = "budget" in inspect.signature(get_config).parameters
            budget = {"budget": (setup.baseline_budget,)} if takes_budget else {}
            found += [(name, label(b), p) for b, p in get_config(**budget, setup=setup).policies]
    return found


def build_examples(setup: Setup, tokenizer: Any) -> list[Example]:
    """All examples of all tasks, in order."""
    encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    task = Task(encode, bos, setup.length, setup.seed)
    return [TASKS[name](task, i) for name in setup.tasks for i in range(setup.examples)]


def run(experiment: Experiment, directory: pathlib.Path, command: list[str], *, restart: bool = False) -> str:
    """Runs what is missing in `directory`, and writes the report.

    Returns:
      The report's text.
    """
    setup = experiment.setup
    policies = all_policies(experiment)
    config = {
        "name": experiment.name,
        "policies": [{"method": m, "budget": b, "policy": repr(p)} for m, b, p in policies],
        "setup": dataclasses.asdict(setup),
        "seed": setup.seed,
    }
    with contextlib.closing(Results(directory, config, command, restart=restart)) as results:
        if (directory / "summary.json").is_file():
            print(f"{directory} is complete; --restart runs it again")
            return (directory / "summary.md").read_text()
        _run_missing(setup, policies, results)
        return report.write(directory, list(results.samples.values()), results.costs)


def _run_missing(setup: Setup, policies: Sequence[tuple[str, str, kvjax.Policy]], results: Results) -> None:
    """Runs the examples that `results` lacks."""
    model, params = models.load(setup.source, dtype=setup.dtype)
    tokenizer = models.load_tokenizer(setup.source)
    examples = build_examples(setup, tokenizer)
    shown = max(examples, key=lambda e: len(e.context))  # whose kept positions are plotted
    in_prompt = setup.protocol == "in_prompt"
    lengths = [len(e.context) + (len(e.question) if in_prompt else 0) for e in examples]
    evaluators = {  # plans are made, and sizes checked, before anything runs
        (method, budget): Evaluator(
            model,
            params,
            policy,
            width=setup.length,
            batch_size=setup.batch_size,
            protocol=setup.protocol,
            lengths=lengths,
            seed=setup.seed,
            tokenizer=tokenizer,
            block=setup.block,
        )
        for method, budget, policy in policies
    }
    done = sum((*run, e.task, e.index) in results.samples for run in evaluators for e in examples)
    with tqdm(total=len(evaluators) * len(examples), initial=done, unit="example", file=sys.stdout) as bar:
        for (method, budget), evaluator in evaluators.items():
            bar.set_description(f"{method} {budget}")
            missing = [
                batch
                for batch in _batches(examples, setup.batch_size)
                if any((method, budget, e.task, e.index) not in results.samples for e in batch)
            ]
            if missing:
                results.set_cost(method, budget, dataclasses.asdict(evaluator.compile()))
            for batch in missing:
                outcomes, positions = evaluator.run(batch)
                if shown in batch:
                    row = batch.index(shown)
                    report.save_kept(results.directory, f"{method}@{budget}", [layer[row] for layer in positions])
                lines = [
                    {"method": method, "budget": budget, "task": e.task, "index": e.index, **outcome}
                    for e, outcome in zip(batch, outcomes, strict=True)
                ]
                bar.update(sum(sample_key(line) not in results.samples for line in lines))
                results.append(lines)
            evaluator.release()


def _batches(examples: Sequence[Example], size: int) -> list[list[Example]]:
    """Examples of one task in batches; the same whenever a run resumes, so that it ends with the same numbers."""
    by_task: dict[str, list[Example]] = {}
    for e in examples:
        by_task.setdefault(e.task, []).append(e)
    return [group[i : i + size] for group in by_task.values() for i in range(0, len(group), size)]


def main(argv: Sequence[str]) -> None:
    """Parses, runs, prints the report."""
    try:
        experiment, own, overrides = parse(argv)
        directory = own.output or default_directory(own, overrides)
        print(run(experiment, directory, [sys.executable, *sys.argv], restart=own.restart))
        print(f"written to {directory}")
    except (ValueError, OSError) as e:
        raise SystemExit(f"error: {e}") from e


if __name__ == "__main__":
    main(sys.argv[1:])
