"""The main job: what a policy costs and what it loses, against the full cache and other methods.

    python experiments/run.py --config snapkv.py
    python experiments/run.py --config snapkv.py --budget 64 0.25 --window 8 --examples 16
    python experiments/run.py --config snapkv.py --help

Results go to `results/<name>/` (or `--output`): `manifest.json`, `samples.jsonl` (a line a question, as it finishes),
and the page, `report.html`. An interrupted run resumes; a finished one is not repeated.
"""

import importlib

if __name__ == "__main__":  # before imports that take seconds
    importlib.import_module(f"{__package__ or ''}.stopping".lstrip(".")).begin()

import argparse
import contextlib
import ctypes
import dataclasses
import hashlib
import inspect
import itertools
import pathlib
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import tyro
from jax.sharding import Mesh
from tqdm import tqdm

import kvjax
from kvjax import configs, models
from kvjax.configs import loading
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Made, Setup, sweep, with_params
from kvjax.configs.learning import LearnedBudget, LearnedScorer, Prompts
from kvjax.experiments import report, stopping, tasks
from kvjax.experiments.core.command import plain_errors
from kvjax.experiments.core.compiled import read_cache_option
from kvjax.experiments.core.engine import Engine, Prompt, read_once, shapes
from kvjax.experiments.core.provenance import definition
from kvjax.experiments.core.records import KEY, Key, Line, Records, digest
from kvjax.experiments.core.screen import screen
from kvjax.experiments.core.setup import (
    Run,
    build,
    check_is,
    described,
    find_builders,
    options_of,
    origins_of,
    runs_of,
    with_baselines,
)
from kvjax.models.packaged import TERMS, accept_license
from kvjax.models.sources import locate

_OF_OTHERS = "baselines", "baseline_budget", "compress", "metrics"  # what of a setup no line of a policy depends on
TOGETHER = 32
"""Policies that read prompts together, at most: what they observe is held, and so are their programs."""
_PICTURES = "score_against_budget.png", "perplexity_against_budget.png"
_RETURNED = {"run.py": Experiment, "learn.py budget": LearnedBudget, "learn.py scorer": LearnedScorer}


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
    parser.add_argument("--accept-license", choices=TERMS, help="of a model: its terms, which you have read and accept")
    if script == "run.py":
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
    own, overrides = parser.parse_known_args(argv)
    if script == "run.py" and (own.list_tasks or _lists_tasks(overrides)):
        print(tasks.listing())
        raise SystemExit(0)
    if own.config is None and getattr(own, "policy", None) is None:
        if not {"-h", "--help"} & set(argv):
            raise ValueError(f"--config is missing; experiments/{script} --help lists them and their options")
        print(parser.format_help() + f"\nconfigs: {', '.join(configs.available(script))}")
        print("\n--config FILE --help says what the options of a method are, too. Of every config:\n")
        tyro.cli(Setup if script == "run.py" else Prompts, args=["--help"], prog=f"experiments/{script}")
    if own.accept_license:
        accept_license(own.accept_license)
    name, get_config = _config_of(own, script)
    program = f"experiments/{script} --config {own.config} [--output DIR] [--restart]"
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
) -> None:
    """Runs what is missing in `directory`.

    Args:
      experiment: what to run.
      directory: where results go.
      command: the command line, for the manifest.
      restart: begin anew; an earlier run there is moved aside.
      shard: which of how many parts of the examples, from 1.
      mesh: devices that share the work; results are the same.
    """
    from kvjax.models.weights import read_config  # imports Flax, which takes longer than --help should

    experiment = with_baselines(experiment)
    setup, builders = experiment.setup, find_builders(experiment.setup)
    runs, options = runs_of(experiment), options_of(experiment)
    other = lambda m: {"options": options[m]} if m in options else {}
    origins = origins_of(experiment)
    of = lambda m, b: f"{origins[m]} as {m}@{b}" if m in origins else ""
    config: dict[str, Any] = {
        "name": experiment.name,
        "policies": [{"method": m, "budget": b, "policy": _defined(p, of(m, b)), **other(m)} for m, b, p in runs],
        "setup": dataclasses.asdict(setup),
        **described(setup, builders),
        "checkpoint": models.fingerprint(setup.source),
        "shard": shard,
    }
    shared = {name: value for name, value in config["setup"].items() if name not in _OF_OTHERS}
    same = [shared, *(config[name] for name in ("tasks", "text", "checkpoint"))]
    config["ids"] = {f"{p['method']}@{p['budget']}": digest([p["policy"], same]) for p in config["policies"]}
    with Records(directory, config, command, restart=restart) as records:
        tokenizer = models.load_tokenizer(setup.source)
        prompts, bad = build(setup, builders, tokenizer, read_config(locate(setup.source, weights=False)))
        records.set_bad(bad)
        if bad:
            rows, are = ("row", "it is") if len(bad) == 1 else ("rows", "all are")
            print(
                f"{len(bad)} {rows} could not be asked; the first, line {bad[0]['line']}: {bad[0]['reason']}; {are} in "
                f"{directory / 'bad_rows.jsonl'}"
            )
        part, of = shard or (1, 1)
        mine = [prompt for prompt in prompts if prompt.example.index % of == part - 1]
        if not mine:
            print(f"shard {part}/{of} has none of the {len(prompts)} rows")
        todo = _Todo(records, mine)
        for method, budget, _ in runs:
            if not restart and not any(name in records.lines for name in todo.keys(method, budget)):
                records.take_over(f"{method}@{budget}", todo.keys(method, budget))
        if any(todo.missing(method, budget) for method, budget, _ in runs):
            _run_missing(setup, runs, prompts, todo, tokenizer, mesh)
        else:
            print(f"{directory} is complete; --restart runs it again")


def _defined(made: Made, origin: str) -> str:
    """The definition of a policy, and a digest of its learned parameters."""
    policy, own = with_params(made)
    return definition(policy, origin) + (f" with parameters {digest(definition(own))}" if own else "")


class _Todo:
    """The prompts of a run, and which of them have no lines yet."""

    def __init__(self, records: Records, prompts: Sequence[Prompt]):
        self.records, self.prompts = records, prompts
        self.questions = sum(len(prompt.asked) for prompt in prompts)
        longest = lambda prompt: (prompt.example.task in tasks.NEEDLES, len(prompt.tokens))
        self.shown = max(prompts, key=longest).example if prompts else None  # whose kept positions are drawn

    def keys(self, method: str, budget: str, prompts: Sequence[Prompt] | None = None) -> list[Key]:
        """What the lines of prompts' questions are named by; of all prompts if none are given."""
        asked = ((p.example, i) for p in (self.prompts if prompts is None else prompts) for i, _ in p.asked)
        return [(method, budget, example.task, example.index, i) for example, i in asked]

    def missing(self, method: str, budget: str, among: Iterable[Prompt] | None = None) -> list[Prompt]:
        """The prompts that have questions without lines."""
        wanted = {id(prompt) for prompt in self.prompts}
        lacks = lambda prompt: any(k not in self.records.lines for k in self.keys(method, budget, [prompt]))
        return [p for p in (self.prompts if among is None else among) if id(p) in wanted and lacks(p)]

    def write(self, method: str, budget: str, prompts: Sequence[Prompt], found: Sequence[Sequence[Line]]) -> int:
        """Writes the lines of prompts, at once. Returns how many were not there."""
        made_by, before, new = self.records.config["ids"][f"{method}@{budget}"], len(self.records.lines), []
        for prompt, lines in zip(prompts, found, strict=True):
            example, meta = prompt.example, dict(prompt.example.meta)
            about = {"id": made_by, "context": f"{example.task}/{meta.pop('same_context', example.index)}"} | meta
            for name, line in zip(self.keys(method, budget, [prompt]), lines, strict=True):
                new.append(dict(zip(KEY, name, strict=True)) | about | line)
        self.records.append(new)
        return len(self.records.lines) - before


def _run_missing(
    setup: Setup, runs: Sequence[Run], prompts: Sequence[Prompt], todo: _Todo, tokenizer: Any, mesh: Mesh | None
) -> None:
    """Runs the prompts whose questions have no lines, and writes these as batches finish."""
    model, params = models.load(setup.source, dtype=setup.dtype)
    params = params if mesh is None else kvjax.shard_params(model, params, mesh)
    every = shapes(prompts, model.config.max_position if model.config.learned_positions else None)
    options = {"batch_size": setup.batch_size, "tokenizer": tokenizer, "block": setup.block, "mesh": mesh}
    options["once"] = setup.reads == "once"
    engines = [  # all are planned, and sizes checked, before anything runs
        (method, budget, [Engine(model, params, policy, shape, **options) for shape in every])
        for method, budget, policy in runs
        if todo.missing(method, budget)
    ]
    done = sum(name[:2] in {run[:2] for run in runs} for name in todo.records.lines)
    with tqdm(total=len(runs) * todo.questions, initial=done, unit="question", file=sys.stdout) as bar:
        since = 0
        for _ in every:
            together: dict[Any, list[_Engine]] = {}
            for method, budget, of_shapes in engines:
                engine = of_shapes.pop(0)  # what is compiled is forgotten as it is done
                together.setdefault(engine.stored or (method, budget), []).append((method, budget, engine))
            while together:
                same = together.pop(next(iter(together)))
                while same:
                    part = [same.pop(0) for _ in same[:TOGETHER]]
                    _run_together(part, setup.batch_size, todo, bar)
                    since += len(part)
                    if since >= TOGETHER:  # programs of all policies would be more than a process can map
                        jax.clear_caches()
                        since = 0


_Engine = tuple[str, str, Engine]  # with its method and budget


def _run_together(same: Sequence[_Engine], batch_size: int, todo: "_Todo", bar: tqdm) -> None:
    """Runs what is missing of policies that read the prompts of a shape together, or of one that reads by itself."""
    shape = same[0][2].shape
    lacking = {id(p) for method, budget, _ in same for p in todo.missing(method, budget, shape.prompts)}
    prompts = [p for p in shape.prompts if id(p) in lacking]
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    if not batches:
        return
    each, compiled = [engine for _, _, engine in same], set[int]()
    for held, full in read_once(each, batches) if each[0].stored else [(batches, [None] * len(batches))]:
        for i, (method, budget, engine) in enumerate(same):
            mine = [(b, x) for b, x in zip(held, full, strict=True) if todo.missing(method, budget, b)]
            if mine and i not in compiled:
                bar.set_description(f"{method} {budget}: compiling")
                engine.compile(mine[0][1])
                compiled.add(i)
            bar.set_description(f"{method} {budget}")
            with stopping.finishing("the examples that run"):
                for batch, x in mine:
                    if stopping.asked():
                        break
                    found, positions = engine.run(batch, todo.shown, x)
                    if positions is not None:
                        todo.records.keep(f"{method}@{budget}", positions)
                    bar.update(todo.write(method, budget, batch, found))
            if held[-1] is batches[-1]:
                engine.forget()
            with contextlib.suppress(OSError, AttributeError):  # glibc keeps what was freed, until there is no more
                ctypes.CDLL(None).malloc_trim(0)


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


def main(argv: Sequence[str]) -> None:
    """Parses, runs, prints the report."""
    with plain_errors():
        experiment, own, overrides = parse(read_cache_option(argv))
        directory = own.output or default_directory(own, overrides)
        if own.shard is not None:
            directory = directory.with_name(f"{directory.name}-shard-{own.shard[0]}-of-{own.shard[1]}")
        check_apart(directory, own, experiment.setup.source)
        mesh = None if own.mesh is None else kvjax.make_mesh(**own.mesh)
        options = {"restart": own.restart, "shard": own.shard, "mesh": mesh}
        run(experiment, directory, [sys.executable, *sys.argv], **options)
        print(f"\n{_said(directory, [sys.executable, *sys.argv])}")


if __name__ == "__main__":
    main(sys.argv[1:])
