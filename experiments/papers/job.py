"""The batches of a table, run by the main job's engine; rows are read and policies planned before anything runs."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

import kvjax
from kvjax import Policy, models
from kvjax.configs.experiment import label
from kvjax.experiments import stopping
from kvjax.experiments.core.engine import Engine, Prompt, shapes
from kvjax.experiments.core.job import Todo, run_engines
from kvjax.experiments.core.provenance import definition
from kvjax.experiments.core.records import Line, Records, digest
from kvjax.experiments.papers import reduced, rows
from kvjax.experiments.papers.methods import Budget
from kvjax.experiments.papers.reduced import Choice, Options
from kvjax.experiments.papers.rows import SCORED, PromptRow
from kvjax.experiments.papers.tables import DATA, MODELS
from kvjax.experiments.tasks.base import task_of
from kvjax.experiments.tasks.text import cut_middle
from kvjax.models.embedded import included
from kvjax.models.presets import PLACE
from kvjax.models.sources import locate
from kvjax.models.weights import read_config

_REPEATS = 5  # timed runs, unless so many examples are asked for
_Task = tuple[str, int]  # of lm-eval, and the examples before its questions; or what is planned


class Job:
    """A choice with its rows read and its policies planned.

    Attributes:
      faults: rows that are none, and policies that cannot run, each with the reason.
      reduced: all reasons why this is not the paper's run.
      rows, prompts: by data set.
      engines: of every method and budget that can run, one for each shape of prompts.
      tasks: those that no engine runs: lm-eval's, and caches that are planned alone.
    """

    def __init__(self, choice: Choice, options: Options):
        """Reads rows and plans every policy.

        Raises:
          ValueError: files that cannot be read, or nothing that could run.
        """
        self.choice, self.options, entry = choice, options, choice.entry
        source, names = included(options.model), [*dict.fromkeys(d for c in choice.columns for d in c.data)]
        stored = "float32" if options.dtype == "auto" else options.dtype
        config = read_config(locate(source, weights=False), dtype=stored)
        if any(DATA[name].runner != "planned" for name in names):
            self.model, self.params = models.load(source, dtype=options.dtype)
            self.tokenizer, config = models.load_tokenizer(source), self.model.config
        self.model_config = config
        steps = max(DATA[d].new_tokens for d in names)
        room = config.max_position - min(steps, options.new_tokens or steps)
        self.length = min(options.length or room, room)
        if self.length < 1:
            raise ValueError(f"{steps} new tokens leave no room in {config.max_position} positions; lower --new-tokens")
        template = MODELS[choice.model].place if entry.template and reduced.same_shape(choice.model, config) else None
        self.faults: list[str] = []
        self.rows: dict[str, list[PromptRow]] = {}
        self.prompts: dict[str, list[Prompt]] = {}
        for each in choice.sources:
            for seed in options.seeds:
                if DATA[each.name].runner == "needle":
                    self._hide(each, seed)
                    continue
                found, faults = rows.prompt_rows(each, options.examples, seed)
                self.faults += faults
                for shots in dict.fromkeys(c.shots for c in choice.columns if each.name in c.data):
                    self._take(each.name, shots, found, template or PLACE, seed)
        self.faults = [*dict.fromkeys(self.faults)]  # each once, for all seeds
        timed = [name for name in names if DATA[name].runner == "speed"]
        for name in timed:
            for i, (seed, n) in enumerate(itertools.product(options.seeds, range(options.examples or _REPEATS))):
                ids = rows.any_tokens(name, n, self.length, config.vocab_size, seed)
                self.prompts.setdefault(name, []).append(self._asked(name, i, ids, seed))
        self.tasks: list[_Task] = [*dict.fromkeys((d, c.shots) for c in choice.columns for d in c.data if _apart(d))]
        plain = [p for name, each in self.prompts.items() if name not in timed for p in each]
        self.engines: dict[tuple[str, Budget], list[Engine]] = {}
        for method, budget in choice.lines:
            try:
                made = self._engines(method, budget, plain)
                for name in timed:
                    made += self._engines(method, budget, self.prompts[name], timed=DATA[name].batch)
                self.engines[method, budget] = made
            except ValueError as e:
                self.faults.append(f"{entry.methods[method].title} at {label(budget)}: {e}")
        if not (self.tasks or any(self.prompts.values())) or not self.engines:
            known = f" ({self.faults[0]})" if self.faults else ""
            raise ValueError(f"nothing of {entry.name} can run here{known}")
        self.reduced = [*choice.reduced]
        if options.examples is None:
            count = {n: len(p) // len(options.seeds) for n, p in self.prompts.items()}
            short = (reduced.examples_short(rows.data_of(task), n) for task, n in count.items())
            self.reduced += filter(None, short)
        for d, shots in dict.fromkeys((d, c.shots) for c in choice.columns if c.shots for d in c.data):
            if 0 < (there := len(self.rows.get(rows.task_of(d, shots), ())) // len(options.seeds)) <= shots:
                self.reduced.append(f"{there - 1} rows stand before each of {d}, not {shots}")
        if options.length is None and (cut := [n for n in timed if (DATA[n].words or 0) > self.length]):
            self.reduced.append(f"the model has positions for {self.length} tokens of {', '.join(cut)}")
        if entry.template and template is None:
            self.reduced.append("prompts stand alone, without the template of the paper's model")
        if len(self.engines) < len(choice.lines):
            self.reduced.append(f"{len(choice.lines) - len(self.engines)} policies cannot run here")

    def _hide(self, source: rows.Source, seed: int) -> None:
        """Keeps prompts that each have a needle."""
        kept, prompts = self.rows.setdefault(source.name, []), self.prompts.setdefault(source.name, [])
        for e in rows.needles(source, self.options.examples, task_of(self.tokenizer, self.length, seed)):
            (question,) = e.questions
            prompts.append(self._asked(source.name, len(kept), (*e.context, *question.ids), seed, meta=e.meta))
            kept.append(PromptRow("", question.references))

    def _asked(self, task: str, index: int, ids: tuple[int, ...], seed: int, **how: Any) -> Prompt:
        data, most = rows.data_of(task), self.options.new_tokens
        beams = 1 if data.runner == "speed" else self.choice.entry.beams
        steps = data.new_tokens if most is None else min(data.new_tokens, most)
        made = rows.asked(task, index, ids, new_tokens=steps, beams=beams, seed=seed, **how)
        meta = (*made.example.meta, ("context", digest(made.tokens)))
        return dataclasses.replace(made, example=dataclasses.replace(made.example, meta=meta))

    def _take(self, name: str, shots: int, found: Sequence[PromptRow], template: str, seed: int) -> None:
        """Keeps the rows that can be scored, with their prompts; before a text stand the next `shots` rows."""
        runner, needed = DATA[name].runner, self.choice.entry.reference == "answers"
        task = rows.task_of(name, shots)
        encode = lambda prompt: models.encode(self.tokenizer, template.replace(PLACE, prompt))
        for i, row in enumerate(found):
            before = "".join(f"{each.prompt}\n\n" for each in [*found[i + 1 :], *found[:i]][:shots])
            try:
                ids = encode(before + row.prompt)
                own: int = min(len(ids) - len(encode(before)), SCORED) if before else SCORED
                if runner == "stream":
                    ids = ids[: self.length]
                    own = len(ids) - 1
                ids = cut_middle(ids, self.length)
            except ValueError as e:
                self.faults.append(f"{task}, row {i}: {e}")
                continue
            if runner in ("text", "stream") and not 0 < own < len(ids):
                self.faults.append(f"{task}, row {i}: {len(ids)} tokens, of which the last {own} are scored")
            elif runner == "rows" and needed and not row.answers:
                self.faults.append(f"{task}, row {i}: no answers")
            else:
                kept = self.rows.setdefault(task, [])
                self.prompts.setdefault(task, []).append(self._asked(task, len(kept), ids, seed, scored=own))
                kept.append(row)

    def _engines(
        self, method: str, budget: Budget, prompts: Sequence[Prompt], timed: int | None = None
    ) -> list[Engine]:
        """A policy planned for prompts; for those that are timed so many at once, past end tokens."""
        made, config = self.choice.entry.methods[method], self.model_config
        if not prompts:
            return []
        endless = self.model if timed is None else type(self.model)(dataclasses.replace(config, eos_ids=()))
        how = {"tokenizer": self.tokenizer, "block": made.block, "batch_size": timed or self.options.batch_size}
        how["texts"] = rows.data_of(prompts[0].example.task).runner == "stream"  # then all of them are
        of = shapes(prompts, config.max_position if config.learned_positions else None)
        found = [Engine(endless, self.params, self._policy(method, budget), shape, **how) for shape in of]
        for engine in found if timed is not None else ():
            engine.at_once = 1
        return found

    def _policy(self, method: str, budget: Budget) -> Policy:
        """The policy of a budget: some shares are of all tokens that there will be."""
        made = self.choice.entry.methods[method]
        if made.whole and isinstance(budget, float):
            tokens = max(len(p.tokens) + p.steps for each in self.prompts.values() for p in each)
            budget = max(int(budget * tokens + 1e-9), 1)
        return made.make(budget)

    def config(self) -> dict[str, Any]:
        """What makes two runs the same."""
        block = lambda m: self.choice.entry.methods[m].block
        ignored = ("methods", "budget", "output", "restart", "dry_run", "plan", "record", "list", "published")
        return {
            "entry": self.choice.entry.name,
            "stands_for": self.choice.model,
            "policies": [
                {"method": m, "budget": label(b), "policy": definition(self._policy(m, b)), "block": block(m)}
                for m, b in self.engines
            ],
            "options": {k: v for k, v in dataclasses.asdict(self.options).items() if k not in ignored},
            "length": self.length,
            "beams": self.choice.entry.beams,
            "columns": [dataclasses.asdict(c) for c in self.choice.columns],
            "data": {n: digest([p.tokens for p in prompts]) for n, prompts in self.prompts.items()},
            "answers": {n: digest([r.answers for r in found]) for n, found in self.rows.items()},
            "checkpoint": models.fingerprint(included(self.options.model)),
        }

    def missing(self, lines: Any) -> list[tuple[str, Budget, Engine | None, list[Any]]]:
        """Batches of prompts whose lines are not there, each with its engine, and tasks, without."""
        found: list[tuple[str, Budget, Engine | None, list[Any]]] = []
        for (method, budget), engines in self.engines.items():
            there = lambda task, i, m=method, b=label(budget): (m, b, task, i, 0) in lines
            for engine in engines:
                lacking, size = (
                    [p for p in engine.shape.prompts if not there(p.example.task, p.example.index)],
                    engine.at_once,
                )
                found += [(method, budget, engine, lacking[i : i + size]) for i in range(0, len(lacking), size)]
            found += [(method, budget, None, [t]) for t in self.tasks if not there(rows.task_of(*t), 0)]
        return found

    def run(self, records: Records) -> None:
        """Runs what has no lines yet."""
        todo = Todo(records, [p for prompts in self.prompts.values() for p in prompts], shown=False)
        shapes = zip(*self.engines.values(), strict=True)
        asked = [[(m, label(b), e) for (m, b), e in zip(self.engines, of, strict=True)] for of in shapes]
        self.engines = {line: [] for line in self.engines}  # what is compiled is forgotten as it is done
        run_engines(asked, todo)
        for method, budget, _, tasks in self.missing(records.lines):
            with stopping.finishing("this task"):
                about = {"method": method, "budget": label(budget)}
                records.append({**about, **line} for line in self._apart(method, budget, *tasks[0]))

    def _apart(self, method: str, budget: Budget, name: str, shots: int) -> Iterator[Line]:
        """The lines of what no engine runs: a task of lm-eval, or a cache that is planned alone."""
        options = self.options
        if DATA[name].runner == "planned":
            yield self._planned(name, method, budget)
            return
        made, task = self.choice.entry.methods[method], rows.task_of(name, shots)
        how = {"batch_size": options.batch_size, "max_length": options.length}
        how |= {"pretrained": options.model, "dtype": options.dtype}
        of = {"examples": options.examples, "tasks": rows.own_tasks(options.data)}
        try:
            asked = name, shots, made.make(budget), budget, made.block
            each = [rows.accuracies(*asked, seed=seed, **of, **how) for seed in options.seeds]
            right = [found for one in each for found in enumerate(one)]
        except ValueError as e:  # the other tasks run all the same
            self.faults.append(f"{method} at {label(budget)}: {e}")
            return
        for i in reversed(range(len(right))):  # the first row last: where it is, all are
            n, score = right[i]
            yield {"task": task, "index": i, "context": n, "question": 0, "score": score, "metric": "accuracy"}

    def _planned(self, name: str, method: str, budget: Budget) -> Line:
        """Bytes of keys and values after the prompts of a data set that is planned alone, and of the model."""
        data, policy = DATA[name], self.choice.entry.methods[method].make(budget)
        how = {"batch": data.batch, "prompt_len": data.words or 1, "max_new_tokens": data.new_tokens}
        size = kvjax.plan_memory(self.model_config, policy, **how).keys_values
        return {"task": name, "index": 0, "question": 0, "kv_bytes": size, "model_bytes": _weights(self.model_config)}

    def estimate(self, lines: Any) -> str:
        """How long what is missing will take, from timing one batch under the full cache."""
        missing = self.missing(lines)
        batches = [(engine, batch) for *_, engine, batch in missing if engine is not None]
        tasks = sum(DATA[batch[0][0]].runner == "harness" for *_, engine, batch in missing if engine is None)
        more = f"{tasks} tasks of lm-eval, whose times are not known before" if tasks else ""
        if not batches:
            return more
        first = min((e for e, _ in batches), key=lambda e: e.shape.width)
        B, smallest = self.options.batch_size, first.shape
        how = {"batch_size": B, "tokenizer": self.tokenizer, "texts": first.texts}
        engine = Engine(self.model, self.params, Policy(), smallest, **how)
        start = time.perf_counter()
        engine.compile()
        compiling = time.perf_counter() - start
        line = engine.run(smallest.prompts[:B])[0][0][0]
        read, step = line["prefill_seconds"] / smallest.width, 1 / line["decode_tokens_per_second"]
        programs = len({id(e) for e, _ in batches})
        total = compiling * programs
        for e, batch in batches:
            blocks = math.ceil(e.shape.width / e.block) if e.block else 0
            steps = max(p.steps for p in batch) + blocks
            total += e.batch_size * (read * e.shape.width + step * steps * e.shape.num_beams)
        how = f"{len(batches)} batches, {programs} programs to compile at {compiling:.0f} s each"
        return f"about {_duration(total)}: {how}{f'; and {more}' if more else ''}"


@functools.cache
def _weights(config: Any) -> int:
    """Bytes of a model's parameters."""
    params = jax.eval_shape(models.LanguageModel(config).init, jax.random.key(0))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


def _apart(name: str) -> bool:
    return DATA[name].runner in ("harness", "planned")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
