"""Runs the cells of a choice, a batch of one data set under one policy at a time."""

import collections
import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvjax import Policy
from kvjax.configs.experiment import label
from kvjax.experiments.core import metrics
from kvjax.experiments.core.provenance import definition
from kvjax.experiments.evaluation.results import Results
from kvjax.experiments.papers.methods import Budget
from kvjax.experiments.papers.tables import DATA, MODELS
from kvjax.experiments.reproduction import harness, rows
from kvjax.experiments.reproduction.choice import MEASURED, SCORED, Choice, Options, examples_short, same_shape
from kvjax.experiments.reproduction.engine import Engine
from kvjax.experiments.reproduction.rows import PromptRow
from kvjax.models.presets import PLACE, PRESETS

_TIMED = ("tokens_per_second", "prefill_speedup")
_REPEATS = 5  # timed runs of a batch, unless so many examples are asked for


@dataclasses.dataclass(frozen=True)
class Job:
    """One batch.

    Attributes:
      method, budget, policy, block: what runs.
      data: on which data set.
      indices: which of its rows.
      shots: of a task of lm-eval, which runs as a whole; None for rows.
    """

    method: str
    budget: Budget
    policy: Policy
    block: int | None
    data: str
    indices: tuple[int, ...]
    shots: int | None = None

    @property
    def task(self) -> str:
        """How its samples name the data set."""
        return self.data if self.shots is None else rows.task_of(self.data, self.shots)


class Run:
    """A choice with its rows read and its policies planned.

    Attributes:
      faults: rows that are none, and policies that cannot run, each with the reason.
      reduced: all reasons why this is not the paper's run.
    """

    def __init__(self, choice: Choice, options: Options, engine: Engine):
        """Reads rows and plans every policy.

        Raises:
          ValueError: files that cannot be read, or nothing that could run.
        """
        self.choice, self.options, self.engine = choice, options, engine
        self.faults: list[str] = []
        preset = MODELS[choice.model].preset
        templated = choice.entry.template and same_shape(choice.model, engine.model.config) and preset is not None
        self._template = PRESETS[preset].template if templated else PLACE
        self.rows: dict[str, list[PromptRow]] = {}
        self.prompts: dict[str, list[tuple[int, ...]]] = {}
        for source in choice.sources:
            if DATA[source.name].runner != "speed":
                found, faults = rows.read(source, options.examples, options.seed)
                self.faults += faults
                self._take(source.name, found)
        for name in dict.fromkeys(d for c in choice.columns for d in c.data if DATA[d].runner == "speed"):
            self.prompts[name] = [self._synthetic(name, i) for i in range(options.examples or _REPEATS)]
        harness = [(d, c.shots) for c in choice.columns for d in c.data if DATA[d].runner == "harness"]
        self.tasks = tuple(dict.fromkeys(harness))
        self.lines = tuple(line for line in choice.lines if self._runs(*line))
        if not (self.tasks or any(self.prompts.values())) or not self.lines:
            known = f" ({self.faults[0]})" if self.faults else ""
            raise ValueError(f"nothing of {choice.entry.name} can run here{known}")
        short = (examples_short(n, len(p)) for n, p in self.prompts.items() if options.examples is None)
        self.reduced = [*choice.reduced, *filter(None, short)]
        if choice.entry.template and not templated:
            self.reduced.append("prompts stand alone, without the template of the paper's model")
        if len(self.lines) < len(choice.lines):
            self.reduced.append(f"{len(choice.lines) - len(self.lines)} policies cannot run here")

    def _take(self, name: str, found: Sequence[PromptRow]) -> None:
        """Keeps the rows that can be scored, with their tokens."""
        text, needed = DATA[name].runner == "text", self.choice.entry.reference == "answers"
        for i, row in enumerate(found):
            try:
                ids = self.engine.encode(self._template.replace(PLACE, row.prompt))
            except ValueError as e:
                self.faults.append(f"{name}, row {i}: {e}")
                continue
            if text and len(ids) <= SCORED:
                self.faults.append(f"{name}, row {i}: {len(ids)} tokens, of which the last {SCORED} are scored")
            elif not text and needed and not row.answers:
                self.faults.append(f"{name}, row {i}: no answers")
            else:
                self.rows.setdefault(name, []).append(row)
                self.prompts.setdefault(name, []).append(ids)

    def _synthetic(self, name: str, index: int) -> tuple[int, ...]:
        """A prompt of any tokens, of the length that is timed."""
        length = min(DATA[name].words or 1, self.engine.sizes.length)
        draw = np.random.default_rng([self.options.seed, index])
        return tuple(int(i) for i in draw.integers(3, self.engine.model.config.vocab_size, length))

    def _runs(self, method: str, budget: Budget) -> bool:
        made = self.choice.entry.methods[method]
        try:
            policy = made.make(budget)
            for name, prompts in self.prompts.items():
                lengths = {len(p) - self._held_back(name) for p in prompts}
                width = self.width(name)
                self.engine.check(policy, made.block, width, sorted(lengths), self.steps(name))
        except ValueError as e:
            self.faults.append(f"{made.title} at {label(budget)}: {e}")
            return False
        return True

    def _held_back(self, name: str) -> int:
        return SCORED if DATA[name].runner == "text" else 0

    def steps(self, name: str) -> int:
        """Tokens that follow a prompt of a data set."""
        wanted = SCORED if DATA[name].runner == "text" else DATA[name].new_tokens
        most = self.options.new_tokens
        return wanted if most is None or DATA[name].runner == "text" else min(wanted, most)

    def width(self, name: str) -> int:
        """Tokens of the padded prompts of a data set."""
        held = self._held_back(name)
        return self.engine.width([p[: len(p) - held] for p in self.prompts[name]])

    def config(self, checkpoint: Any) -> dict[str, Any]:
        """What makes two runs the same."""
        made = self.choice.entry.methods
        return {
            "entry": self.choice.entry.name,
            "stands_for": self.choice.model,
            "policies": [
                {"method": m, "budget": label(b), "policy": definition(made[m].make(b)), "block": made[m].block}
                for m, b in self.lines
            ],
            "options": {k: v for k, v in dataclasses.asdict(self.options).items() if k not in ("methods", "budgets")},
            "length": self.engine.sizes.length,
            "beams": self.engine.sizes.beams,
            "columns": [dataclasses.asdict(c) for c in self.choice.columns],
            "data": {n: _digest(p) for n, p in self.prompts.items()},
            "answers": {n: _digest([r.answers for r in found]) for n, found in self.rows.items()},
            "checkpoint": checkpoint,
        }

    def jobs(self) -> Iterator[Job]:
        """All batches; the full cache's first, since others are compared with it."""
        for method, budget in self.lines:
            made = self.choice.entry.methods[method]
            policy = made.make(budget)
            for name, prompts in self.prompts.items():
                size = 1 if DATA[name].runner == "speed" else self.engine.sizes.batch_size
                for at in range(0, len(prompts), size):
                    indices = tuple(range(at, min(at + size, len(prompts))))
                    yield Job(method, budget, policy, made.block, name, indices)
            for name, shots in self.tasks:
                yield Job(method, budget, policy, made.block, name, (0,), shots)

    def missing(self, results: Results) -> list[Job]:
        """The batches of which a sample is not there."""
        key = lambda job, i: (job.method, label(job.budget), job.task, i)
        return [job for job in self.jobs() if any(key(job, i) not in results.samples for i in job.indices)]

    def do(self, job: Job, results: Results) -> None:
        """Runs a batch and stores its samples."""
        if job.shots is not None:
            try:
                found = harness.accuracies(job.data, job.shots, job.policy, job.budget, job.block, self.options)
            except ValueError as e:  # the other tasks run all the same
                self.faults.append(f"{job.method} at {label(job.budget)}: {e}")
                return
            about = {"method": job.method, "budget": label(job.budget), "task": job.task}
            lines = [{**about, "index": i, "scores": {"accuracy": x}} for i, x in enumerate(found)]
            results.append(reversed(lines))  # the first row last: where it is, all are
            return
        prompts = [self.prompts[job.data][i] for i in job.indices]
        width, steps, runner = self.width(job.data), self.steps(job.data), DATA[job.data].runner
        if runner == "text":
            found = self.engine.score(job.policy, job.block, prompts, SCORED, width)
        else:
            timed = runner == "speed"
            batch = prompts * DATA[job.data].batch if timed else prompts
            generate = lambda: self.engine.generate(job.policy, job.block, batch, steps, width, timed=timed)
            found = generate()[: len(prompts)]
            if any(c.metric in _TIMED and job.data in c.data for c in self.choice.columns):
                found = generate()[: len(prompts)]  # the first call may have compiled
        lines = []
        for i, sample in zip(job.indices, found, strict=True):
            if runner == "rows":
                sample["output"] = self._cut(job.data, sample["output"])
                sample["scores"], sample["refused"] = self._scores(job, i, sample["output"], results)
            lines.append({"method": job.method, "budget": label(job.budget), "task": job.data, "index": i, **sample})
        results.append(lines)

    def _cut(self, name: str, output: str) -> str:
        """An output up to the stop string."""
        stop = DATA[name].stop
        return output if stop is None else output.partition(stop)[0]

    def _scores(self, job: Job, index: int, output: str, results: Results) -> tuple[dict[str, float], dict[str, str]]:
        """Scores of an output in every metric that a column has of its data set, and why others refuse to score it."""
        row, scores, refused = self.rows[job.data][index], {}, {}
        references: Sequence[str] = row.answers
        if self.choice.entry.reference == "full cache":
            full = results.samples.get(("full", label(1.0), job.data, index)) if job.method != "full" else None
            references = (full["output"],) if full is not None and full["output"].strip() else ()
        part = rows.scored_part(job.data, output)
        for column in self.choice.columns:
            metric = rows.metric_of(job.data, column.metric)
            if job.data not in column.data or metric in scores:
                continue
            if not references:
                refused[metric] = "the full cache generates nothing"
            elif metric == "classification":
                scores[metric] = max(rows.classification(part, r, row.classes or row.answers) for r in references)
            elif metric not in MEASURED:
                try:
                    scores[metric] = metrics.find(metric)(part, references)
                except ValueError as e:
                    refused[metric] = str(e)
        return scores, refused

    def refusals(self, results: Results) -> list[str]:
        """Samples that a metric refused, each reason once with how many."""
        found = collections.Counter(
            f"{s['task']}: {reason}"
            for s in results.samples.values()
            if s["method"] != "full" or self.choice.entry.reference == "answers"
            for reason in s.get("refused", {}).values()
        )
        return [f"{reason} ({count} outputs)" for reason, count in found.items()]

    def estimate(self, jobs: Sequence[Job]) -> tuple[float, str]:
        """Seconds that jobs will take, from timing one small batch under the full cache, and how that was found."""
        tasks = [job for job in jobs if job.shots is not None]
        jobs = [job for job in jobs if job.shots is None]
        more = f"{len(tasks)} tasks of lm-eval, whose times are not known before" if tasks else ""
        if not jobs:
            return 0.0, more
        name = min(self.prompts, key=lambda n: self.width(n))
        steps, width = min(self.steps(name), 8), self.width(name)
        held = self._held_back(name)
        prompts = [p[: len(p) - held] for p in self.prompts[name][: self.engine.sizes.batch_size]]
        call = lambda: self.engine.generate(Policy(), None, prompts, steps, width, timed=True)[0]
        first, second = call(), call()
        B = len(prompts)
        read = (second["prefill_seconds"] or second["seconds"] / 2) * B / width
        step = max(second["seconds"] * B - read * width, 0.0) / steps
        compiling = max(first["seconds"] - second["seconds"], 0.0) * B
        programs = {(j.policy, j.block, self.width(j.data), self.steps(j.data)) for j in jobs}
        total = compiling * len(programs)
        for job in jobs:
            width, steps = self.width(job.data), self.steps(job.data)
            blocks = math.ceil(width / job.block) if job.block else 0
            total += read * width + step * (steps + blocks) * self.engine.sizes.beams
        how = f"{len(jobs)} batches, {len(programs)} programs to compile at {compiling:.0f} s each"
        return total, f"{how}; and {more}" if more else how


def _digest(content: Any) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]
