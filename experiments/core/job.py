"""A job: policies and prompts, of which every question that has no line yet is asked, and its line is written."""

import contextlib
import ctypes
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree
from tqdm import tqdm

import kvjax
from kvjax import models
from kvjax.configs.experiment import Experiment, Setup
from kvjax.experiments import stopping, tasks
from kvjax.experiments.core.engine import Engine, Prompt, read_once, shapes, share_slots, with_own_answers
from kvjax.experiments.core.records import KEY, Key, Line, Records
from kvjax.experiments.core.setup import Run, build, described

TOGETHER = 32
"""Policies that read prompts together, at most: what they observe is held, and so are their programs."""

Asked = tuple[str, str, Engine]
"""A method, a budget as lines say it, and its engine for prompts of one shape."""


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
    source = experiment.setup.source
    config, tokenizer = models.read_config(source), models.load_tokenizer(source)
    setup, builders, runs, manifest = described(experiment, config, tokenizer)
    with Records(directory, manifest | {"shard": shard}, command, restart=restart) as records:
        prompts, bad = build(setup, builders, tokenizer, config)
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

        def ran(runs: Sequence[Run], todo: Todo) -> bool:
            """Runs what no other run has; whether there was any."""
            for method, budget, _ in runs:
                if not restart and not any(name in records.lines for name in todo.keys(method, budget)):
                    records.take_over(f"{method}@{budget}", todo.keys(method, budget))
            if missing := any(todo.missing(method, budget) for method, budget, _ in runs):
                _run_missing(setup, runs, prompts, todo, tokenizer, mesh)
            return missing

        todo, before = Todo(records, mine), False
        if setup.own_answers:
            before = ran(runs[:1], todo)
            if todo.missing(*runs[0][:2]):
                return
            encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
            own = {p: with_own_answers(p, todo.answers(*runs[0][:2], p), encode) for p in mine}
            prompts, todo = [own.get(prompt, prompt) for prompt in prompts], Todo(records, [*own.values()])
        if not ran(runs, todo) and not before:
            print(f"{directory} is complete; --restart runs it again")


class Todo:
    """The prompts of a job, and which of them have no lines yet."""

    def __init__(self, records: Records, prompts: Sequence[Prompt], shown: bool = True):
        """With `shown`, the positions that are kept of the longest prompt are recorded."""
        self.records, self.prompts = records, prompts
        self.questions = sum(len(prompt.asked) for prompt in prompts)
        longest = lambda prompt: (prompt.example.task in tasks.NEEDLES, len(prompt.tokens))
        self.shown = [max(prompts, key=longest).example] if prompts and shown else []  # whose kept positions are drawn

    def keys(self, method: str, budget: str, prompts: Sequence[Prompt] | None = None) -> list[Key]:
        """What the lines of prompts' questions are named by; of all prompts if none are given."""
        asked = ((p.example, i) for p in (self.prompts if prompts is None else prompts) for i, _ in p.asked)
        return [(method, budget, example.task, example.index, i) for example, i in asked]

    def answers(self, method: str, budget: str, prompt: Prompt) -> dict[int, str]:
        """What was written to a prompt's questions, by their numbers."""
        found = (self.records.lines.get(name, {}) for name in self.keys(method, budget, [prompt]))
        return {line["question"]: line["output"] for line in found if "output" in line}

    def missing(self, method: str, budget: str, among: Iterable[Prompt] | None = None) -> list[Prompt]:
        """The prompts that have questions without lines."""
        wanted = {id(prompt) for prompt in self.prompts}
        lacks = lambda prompt: any(k not in self.records.lines for k in self.keys(method, budget, [prompt]))
        return [p for p in (self.prompts if among is None else among) if id(p) in wanted and lacks(p)]

    def write(self, method: str, budget: str, prompts: Sequence[Prompt], found: Sequence[Sequence[Line]]) -> int:
        """Writes the lines of prompts, at once. Returns how many were not there."""
        ids, before, new = self.records.config.get("ids", {}), len(self.records.lines), []
        made_by = {"id": ids[f"{method}@{budget}"]} if ids else {}
        for prompt, lines in zip(prompts, found, strict=True):
            example, meta = prompt.example, dict(prompt.example.meta)
            about = {**made_by, "context": meta.pop("same_context", f"{example.task}/{example.index}")} | meta
            for name, line in zip(self.keys(method, budget, [prompt]), lines, strict=True):
                new.append(dict(zip(KEY, name, strict=True)) | about | line)
        self.records.append(new)
        return len(self.records.lines) - before


def _run_missing(
    setup: Setup, runs: Sequence[Run], prompts: Sequence[Prompt], todo: Todo, tokenizer: Any, mesh: Mesh | None
) -> None:
    """Runs the prompts whose questions have no lines."""
    model, params = models.load(setup.source, dtype=setup.dtype)
    params = params if mesh is None else kvjax.shard_params(model, params, mesh)
    options = {"batch_size": setup.batch_size, "tokenizer": tokenizer, "block": setup.block, "mesh": mesh}
    options["once"] = setup.reads == "once"
    every = planned(model, params, runs, prompts, **options)
    if setup.slots == "shared":  # by all policies, so that a run that goes on has the slots that it began with
        for of_shape in every:
            share_slots([engine for *_, engine in of_shape])
    run_engines([[each for each in of_shape if todo.missing(*each[:2])] for of_shape in every], todo)


def planned(
    model: Any, params: PyTree[Any], runs: Sequence[Run], prompts: Sequence[Prompt], **options: Any
) -> list[list[Asked]]:
    """The engines of policies for each shape of prompts: all are planned, and sizes checked, before anything runs."""
    found = shapes(prompts, model.config.max_position if model.config.learned_positions else None)
    return [[(m, b, Engine(model, params, policy, shape, **options)) for m, b, policy in runs] for shape in found]


def run_engines(asked: list[list[Asked]], todo: Todo) -> None:
    """Runs what is missing, shape by shape; engines of a shape that can read prompts together do so once.

    Args:
      asked: of every shape its engines; emptied, so that what was compiled is forgotten as it is done.
      todo: the prompts.
    """
    names = {each[:2] for of_shape in asked for each in of_shape}
    done = sum(name[:2] in names for name in todo.records.lines)
    with tqdm(total=len(names) * todo.questions, initial=done, unit="question", file=sys.stdout) as bar:
        _run_shapes(asked, todo, bar)


def _run_shapes(asked: list[list[Asked]], todo: Todo, bar: tqdm) -> None:
    """`run_engines`; `bar` is advanced by every question whose line is written."""
    since = 0
    while asked:
        together: dict[Any, list[Asked]] = {}
        for method, budget, engine in asked.pop(0):
            together.setdefault(engine.stored or (method, budget), []).append((method, budget, engine))
        while together:
            same = together.pop(next(iter(together)))
            while same:
                part = [same.pop(0) for _ in same[:TOGETHER]]
                _run_together(part, todo, bar)
                since += len(part)
                if since >= TOGETHER:  # programs of all policies would be more than a process can map
                    jax.clear_caches()
                    since = 0


def _run_together(same: Sequence[Asked], todo: Todo, bar: tqdm) -> None:
    """Runs what is missing of policies that read the prompts of a shape together, or of one that reads by itself."""
    first = same[0][2]
    lacking = {id(p) for method, budget, _ in same for p in todo.missing(method, budget, first.shape.prompts)}
    prompts = [p for p in first.shape.prompts if id(p) in lacking]
    batches = [prompts[i : i + first.at_once] for i in range(0, len(prompts), first.at_once)]
    if not batches:
        return
    each, compiled = [engine for _, _, engine in same], set[int]()
    for held, full in read_once(each, batches) if first.stored else [(batches, [None] * len(batches))]:
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
                    found, kept = engine.run(batch, todo.shown, x)
                    for positions in kept:
                        todo.records.keep(f"{method}@{budget}", positions)
                    bar.update(todo.write(method, budget, batch, found))
            if held[-1] is batches[-1]:
                engine.forget()
            with contextlib.suppress(OSError, AttributeError):  # glibc keeps what was freed, until there is no more
                ctypes.CDLL(None).malloc_trim(0)
