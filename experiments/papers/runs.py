"""A run of an entry: policies and prompts, of which the main job makes lines, what is missing, what is not the paper's.

Rows are read and policies planned before anything runs.
"""

import collections
import dataclasses
import importlib.util
import itertools
import math
import pathlib
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax
import tyro

import kvjax
from kvjax import Policy, models
from kvjax.configs.experiment import check_distinct, check_whole, label
from kvjax.experiments import stopping
from kvjax.experiments.core import job, metrics
from kvjax.experiments.core.engine import Prompt, prompts_of
from kvjax.experiments.core.provenance import definition
from kvjax.experiments.core.records import Line, Records, digest
from kvjax.experiments.papers import rows
from kvjax.experiments.papers.methods import Budget
from kvjax.experiments.papers.rows import SCORED, PromptRow
from kvjax.experiments.papers.tables import DATA, ENTRIES, MODELS, Column, Entry, Row, data_of, task_of
from kvjax.experiments.tasks import base
from kvjax.experiments.tasks.base import Example, Question
from kvjax.experiments.tasks.text import cut_middle
from kvjax.models.embedded import included
from kvjax.models.presets import PLACE

NO_SCORES = """
    seconds tokens_per_second latency_growth prefill_speedup kv_gb model_gb moved_share perplexity log_perplexity
""".split()
MEASURED = ("accuracy", *NO_SCORES)
"""What is measured without a metric of texts."""
JUDGED = ("win_rate",)


@dataclasses.dataclass(frozen=True)
class Options:
    """Runs a table or figure of a paper on any model: ours beside theirs.

    Attributes:
      entry: such as ada-kv/table2.
      list: all entries, their status and what they need.
      published: the entry's settings and numbers in the paper.
      model: a checkpoint directory, hub id or preset; "embedded" or "varied" for a small model of the project.
      stands_for: which of the entry's models it stands for; the first of its shape, or else the first, if not given.
      data: a directory with a file for each data set, one file for all, or "project" for the project's own text.
      methods: those to run; all if not given.
      budget: tokens (64) or shares (0.2); the paper's if not given.
      layers: of a figure with a panel a layer; the paper's if not given.
      examples: rows of every data set; all if not given.
      length: tokens of a prompt, at most; what the model has positions for if not given.
      new_tokens: tokens to generate, at most; what each data set asks for if not given.
      batch_size: prompts that run together.
      seed: of random draws. With several, data have their rows with other draws for each, what is drawn as rows is
        drawn anew; they are pooled, and a row that several read counts once in intervals.
      dtype: of parameters, activations and the cache.
      output: directory for the results.
      restart: begin anew; an earlier run there is moved aside.
      dry_run: say what would be run, and stop.
      plan: the hours and memory that the paper's run takes on one H100; needs no weights and no data.
      record: note the run in experiments/papers/ledger.json.
    """

    entry: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="ENTRY")] = None
    list: bool = False
    published: bool = False
    model: str = "embedded"
    stands_for: str | None = None
    data: str | None = None
    methods: tuple[str, ...] = ()
    budget: tuple[Budget, ...] = ()
    layers: tuple[int, ...] = ()
    examples: int | None = None
    length: int | None = None
    new_tokens: int | None = None
    batch_size: int = 4
    seed: int | tuple[int, ...] = 0
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    output: pathlib.Path | None = None
    restart: bool = False
    dry_run: bool = False
    plan: bool = False
    record: bool = False

    def __post_init__(self):
        given = {n: v for n in ("examples", "length", "new_tokens") if (v := getattr(self, n)) is not None}
        check_whole(1, batch_size=self.batch_size, **given)
        check_whole(0, seed=self.seed)
        check_distinct("seed", self.seeds)
        for budget in self.budget:
            if not 0 < budget < float("inf") or (isinstance(budget, float) and budget > 1):
                raise ValueError(f"--budget {budget} must be at least 1 token, or a share above 0 and at most 1.0")

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds."""
        return self.seed if isinstance(self.seed, tuple) else (self.seed,)

    @property
    def directory(self) -> pathlib.Path:
        """Where results go."""
        name, model = (self.entry or "").replace("/", "-"), pathlib.Path(self.model).name or self.model
        return self.output or pathlib.Path("results/reproduce") / f"{name}-{model}"


def models_of(entry: Entry, options: Options) -> tuple[str, ...]:
    """The models that a run may stand for: of a figure that is drawn those of its paper's first table.

    Raises:
      ValueError: a model that is asked for, but not among them.
    """
    known = entry.models or next(e.models for e in ENTRIES.values() if e.paper == entry.paper and e.models)
    if options.stands_for is None:
        return known
    if options.stands_for not in known:
        raise ValueError(f"{entry.name} has no model {options.stands_for!r}; there are {', '.join(known)}")
    return (options.stands_for,)


def lines_of(entry: Entry, model: str, options: Options) -> dict[tuple[str, Budget], Row | None]:
    """Methods and budgets that run, the full cache first, each with its row of the paper's table if it has one.

    Raises:
      ValueError: a method that the model's rows have not, or a budget that is neither stated nor given.
    """
    table = [row for row in entry.rows if row.model == model]
    known = [m for m in entry.methods if m == "full" or any(row.method == m for row in table)]
    if unknown := [m for m in options.methods if m not in known]:
        raise ValueError(f"{entry.name} of {model} has no method {unknown[0]!r}; there are {', '.join(known)}")
    lines: list[tuple[str, Any]] = [("full", 1.0)] if "full" in entry.methods else []
    for row in table:
        if row.method != "full" and row.method in (options.methods or known):
            if not options.budget and row.budget is None:
                raise ValueError(f"the text of {entry.name} does not state its budget; give --budget")
            lines += [(row.method, budget) for budget in options.budget or (row.budget,)]
    printed = lambda m, b: next((row for row in table if row.method == m and row.budget in (None, b)), None)
    return {line: printed(*line) for line in lines}


def has_lm_eval() -> bool:
    """Whether lm-eval is installed."""
    return importlib.util.find_spec("lm_eval") is not None


def _check(column: Column) -> None:
    """Tries whether a column's data sets can be scored.

    Raises:
      ValueError: the metric needs a judge, or something that is not installed.
    """
    if column.metric in JUDGED:
        raise ValueError(f"{column.metric} needs a judge, which kvjax does not run")
    if any(DATA[name].runner == "harness" for name in column.data) and not has_lm_eval():
        raise ValueError("a task of lm-eval; pip install 'kvjax[eval]'")
    for metric in {metric for _, metric in column.parts} - {*MEASURED, rows.CLASSIFICATION}:
        metrics.find(metric)


class Run:
    """What of an entry runs on a model; `read` comes before all that needs prompts.

    Attributes:
      entry, options: of what.
      config: the model's.
      model: the entry's model that the checkpoint stands for.
      alike: whether the checkpoint has its shape.
      lines: (method, budget) of what is run, the full cache first, with the row of the paper's table.
      files: of data sets that are present; None for the project's own text, and for a row that the paper prints.
      missing: what is not there, a line each.
      columns: columns that are measured, with the data sets that are present.
      tasks: of these, as lines name them, each with its data set and how many examples stand before a question.
      length: tokens of a prompt, at most.
      rows, prompts: by task.
      policies: of every method and budget that can run.
      asked: of every shape of prompts the engines, with methods and budgets.
      faults: rows that are none, and policies that cannot run, each with the reason.
    """

    def __init__(self, entry: Entry, options: Options, config: Any):
        """Chooses what can be run with a model of this config.

        Raises:
          ValueError: what `models_of` and `lines_of` refuse, or data that do not exist.
        """
        self.entry, self.options, self.config = entry, options, config
        known = models_of(entry, options)
        self.model = next((name for name in known if MODELS[name].shapes(config)), known[0])
        self.alike, self.lines = MODELS[self.model].shapes(config), lines_of(entry, self.model, options)
        self.files, self.missing = rows.files(entry.data, options.data)
        self.columns: list[Column] = []
        for column in entry.measured(self.model):
            names = tuple(d for d in column.data if d in self.files or DATA[d].runner not in rows.WITH_ROWS)
            present = dataclasses.replace(column, data=names)
            try:
                _check(present)
            except ValueError as e:
                self.missing.append(f"column {column.title}: {e}")
            else:
                self.columns += [present] if names else []
        self.tasks = {task_of(d, c.shots): (d, c.shots) for c in self.columns for d in c.data}
        self.length = 0  # before `read`
        self.rows: dict[str, list[PromptRow]] = {}
        self.prompts: dict[str, list[Prompt]] = {}
        self.policies: dict[tuple[str, Budget], Policy] = {}
        self.asked: list[list[job.Asked]] = []
        self.faults: list[str] = []

    @property
    def reduced(self) -> list[str]:
        """Why this is not the run that the paper made, a line each, as far as is known; nothing where it is."""
        entry, options, config, known = self.entry, self.options, self.config, MODELS[self.model]
        runners = {data_of(task).runner for task in self.tasks}
        others = [d for d, p in self.files.items() if not DATA[d].question and (p is None or p.stem != d)]
        texts = {"the project's own text" if (p := self.files[d]) is None else p.name for d in others}
        table = [row for row in entry.rows if row.model == self.model]
        left = sum(row not in self.lines.values() for row in table)
        own = sum(row is None and method != "full" for (method, _), row in self.lines.items())
        wanted, there = (sum(len(c.data) for c in columns) for columns in (entry.columns, self.columns))
        count = {task: len(prompts) // len(options.seeds) for task, prompts in self.prompts.items()}
        all_of = {task: 0 if options.examples else data_of(task).examples or 0 for task in count}
        before = {(d, k): count.get(task, 0) - 1 for task, (d, k) in self.tasks.items() if k}
        timed = [task for task in count if data_of(task).runner == "speed"]
        long = [task for task in timed if not options.length and (data_of(task).words or 0) > self.length]
        unrun = len(self.lines) - len(self.policies)
        reasons: dict[str, Any] = {
            f"the model has {config.num_layers} layers of width {config.embed_dim}, {known.title} has "
            f"{known.layers} of {known.width}": not self.alike,
            f"generates greedily, not with {entry.beams} beams": "speed" in runners and entry.beams > 1,
            "another device": "speed" in runners,
            f"{', '.join(sorted(texts))} stands for "
            f"{others[0] if len(others) == 1 else f'{len(others)} data sets'}": others,
            f"of a text, its last {SCORED} tokens at most are scored, after the others were read under the policy": (
                "text" in runners
            ),
            "tasks of lm-eval are those of --data, not its own": "harness" in runners and rows.own_tasks(options.data),
            f"{left} of {len(table)} rows of the table are left out": left,
            f"{own} rows are at budgets that the paper did not run": own,
            "the text does not state the budget": any(r.budget is None and r.method != "full" for r in table),
            f"{wanted - there} of {wanted} scores of a row are left out": wanted - there,
            f"at most {options.examples} rows of a data set": options.examples,
            f"prompts of at most {options.length} tokens": options.length,
            f"at most {options.new_tokens} new tokens": options.new_tokens,
            **{f"{data_of(t).title}: {n} of {all_of[t]} rows": n < all_of[t] for t, n in count.items()},
            **{f"{n} rows stand before each of {d}, not {k}": 0 <= n < k for (d, k), n in before.items()},
            f"the model has positions for {self.length} tokens of {', '.join(long)}": long,
            "prompts stand alone, without the template of the paper's model": entry.template and not self.alike,
            f"{unrun} policies cannot run here": self.policies and unrun,
        }
        return [reason for reason, holds in reasons.items() if holds]

    def called(self, line: Line) -> str:
        """The method and budget of a line, for readers."""
        return f"{self.entry.methods[line['method']].title} at {line['budget']}"

    # --- prompts and engines ---

    def prepare(self) -> None:
        """Reads rows and plans every policy.

        Raises:
          ValueError: files that cannot be read, or nothing that could run.
        """
        entry, options = self.entry, self.options
        if any(data_of(task).runner != "planned" for task in self.tasks):
            source = included(options.model)
            self._model, self._params = models.load(source, dtype=options.dtype)
            self.tokenizer, self.config = models.load_tokenizer(source), self._model.config
        steps, positions = max(data_of(task).new_tokens for task in self.tasks), self.config.max_position
        room = positions - min(steps, options.new_tokens or steps)
        self.length = min(options.length or room, room)
        if self.length < 1:
            raise ValueError(f"{steps} new tokens leave no room in {positions} positions; lower --new-tokens")
        apart = [task for task in self.tasks if data_of(task).runner in rows.APART]
        for task, seed in itertools.product(self.tasks, options.seeds):
            if task not in apart:
                self._read(task, seed)
        self.faults = [*dict.fromkeys(self.faults)]  # each once, for all seeds
        tokens = max((len(p.tokens) + p.steps for each in self.prompts.values() for p in each), default=0)
        together = collections.defaultdict[str, list[Prompt]](list)
        for task, prompts in self.prompts.items():
            together[task if data_of(task).runner == "speed" else ""] += prompts
        planned = list[list[list[job.Asked]]]()  # of every method and budget, by shape
        for method, budget in self.lines:
            made = entry.methods[method]
            try:
                run = method, label(budget), made.policy(budget, tokens)
                planned.append([x for prompts in together.values() for x in self._planned(run, made.block, prompts)])
                self.policies[method, budget] = run[2]
            except ValueError as e:
                self.faults.append(f"{made.title} at {label(budget)}: {e}")
        self.asked = [[asked for (asked,) in of_shape] for of_shape in zip(*planned, strict=True)]
        if not (self.prompts or apart) or not self.policies:
            known = f" ({self.faults[0]})" if self.faults else ""
            raise ValueError(f"nothing of {entry.name} can run here{known}")

    def _read(self, task: str, seed: int) -> None:
        """Keeps the rows that can be asked, with their prompts; before a text stand the next rows."""
        (name, shots), how = self.tasks[task], base.task_of(self.tokenizer, self.length, seed)
        found, faults = rows.prompt_rows(name, self.files.get(name), self.options.examples, how, self.config.vocab_size)
        self.faults += faults
        for i, row in enumerate(found):
            before = "".join(f"{each.prompt}\n\n" for each in [*found[i + 1 :], *found[:i]][:shots])
            try:
                prompt = self._prompt(task, row, before, seed)
            except ValueError as e:
                self.faults.append(f"{task}, row {i}: {e}")
            else:
                self.prompts.setdefault(task, []).append(prompt)
                self.rows.setdefault(task, []).append(row)

    def _prompt(self, task: str, row: PromptRow, before: str, seed: int) -> Prompt:
        """A row's prompt: of a text its last tokens are predicted, after others an answer is generated.

        Answers are scored when the table is made, in every metric of its columns.

        Raises:
          ValueError: a row that cannot be asked.
        """
        data, entry = data_of(task), self.entry
        template = MODELS[self.model].place if entry.template and self.alike else PLACE
        encode = lambda text: models.encode(self.tokenizer, template.replace(PLACE, text))
        ids = encode(before + row.prompt) if isinstance(row.prompt, str) else row.prompt
        scored = min(len(ids) - len(encode(before)), SCORED) if before else SCORED
        if data.runner == "stream":
            ids = ids[: self.length]
            scored = len(ids) - 1
        ids = cut_middle(ids, self.length)
        if data.runner in ("text", "stream") and not 0 < scored < len(ids):
            raise ValueError(f"{len(ids)} tokens, of which the last {scored} are scored")
        if data.runner == "rows" and entry.reference == "answers" and not row.answers:
            raise ValueError("no answers")
        question = Question(
            metric="",
            max_new_tokens=min(data.new_tokens, self.options.new_tokens or data.new_tokens),
            stop=() if data.stop is None else (data.stop,),
            num_beams=1 if data.runner == "speed" else entry.beams,
        )
        if data.runner == "text":
            ids, question = ids[:-scored], Question(continuation=ids[-scored:])
        meta = (*row.meta, ("context", digest(ids)))
        example = Example(task, len(self.prompts.get(task, ())), ids, (question,), meta)
        return prompts_of(example, "in_prompt", seed)[0]

    def _planned(self, run: tuple[str, str, Policy], block: int | None, prompts: list[Prompt]) -> list[list[job.Asked]]:
        """A policy planned for prompts; what is timed runs on past end tokens, so many at once as its data set says."""
        data, model, size = data_of(prompts[0].example.task), self._model, self.options.batch_size
        timed, texts = data.runner == "speed", data.runner == "stream"  # then all prompts are
        if timed:
            model, size = type(model)(dataclasses.replace(self.config, eos_ids=())), data.batch
        how = {"tokenizer": self.tokenizer, "block": block, "batch_size": size, "texts": texts}
        found = job.planned(model, self._params, [run], prompts, **how)
        for ((_, _, engine),) in found if timed else ():
            engine.at_once = 1
        return found

    # --- lines ---

    def manifest(self) -> dict[str, Any]:
        """What makes two runs the same."""
        ignored = ("methods", "budget", "output", "restart", "dry_run", "plan", "record", "list", "published")
        policy = lambda m, b, p: {"method": m, "budget": label(b), "policy": definition(p)}
        block = lambda m: self.entry.methods[m].block
        timed = [task for task in self.rows if data_of(task).runner == "speed"]
        return {
            "entry": self.entry.name,
            "stands_for": self.model,
            "policies": [{**policy(m, b, p), "block": block(m)} for (m, b), p in self.policies.items()],
            "options": {k: v for k, v in dataclasses.asdict(self.options).items() if k not in ignored},
            "length": self.length,
            "beams": self.entry.beams,
            "columns": [dataclasses.asdict(c) for c in self.columns],
            "data": {task: digest([p.tokens for p in prompts]) for task, prompts in self.prompts.items()},
            "answers": {t: digest([r.answers for r in each]) for t, each in self.rows.items() if t not in timed},
            "checkpoint": models.fingerprint(included(self.options.model)),
        }

    def apart(self, lines: Mapping[Any, Line]) -> list[tuple[str, Budget, str]]:
        """Method, budget and task of what no engine runs and has no lines yet."""
        every = itertools.product(self.policies, (t for t in self.tasks if data_of(t).runner in rows.APART))
        return [(m, b, task) for (m, b), task in every if (m, label(b), task, 0, 0) not in lines]

    def estimate(self, lines: Mapping[Any, Line]) -> str:
        """How long what is missing will take, from timing one batch under the full cache."""
        lacks = lambda m, b, prompt: (m, b, prompt.example.task, prompt.example.index, 0) not in lines
        every = [(e, [p for p in e.shape.prompts if lacks(m, b, p)]) for of in self.asked for m, b, e in of]
        asked = [(engine, prompts) for engine, prompts in every if prompts]
        tasks = sum(data_of(task).runner == "harness" for *_, task in self.apart(lines))
        more = f"{tasks} tasks of lm-eval, whose times are not known before" if tasks else ""
        if not asked:
            return more
        first = min((engine for engine, _ in asked), key=lambda e: e.shape.width)
        B, smallest = self.options.batch_size, first.shape
        how = {"batch_size": B, "tokenizer": self.tokenizer, "texts": first.texts}
        engine = job.Engine(self._model, self._params, Policy(), smallest, **how)
        start = time.perf_counter()
        engine.compile()
        compiling = time.perf_counter() - start
        line = engine.run(smallest.prompts[:B])[0][0][0]
        read, step = line["prefill_seconds"] / smallest.width, 1 / line["decode_tokens_per_second"]
        total, batches = compiling * len(asked), 0
        for e, prompts in asked:
            steps = max(p.steps for p in prompts) + (math.ceil(e.shape.width / e.block) if e.block else 0)
            count = math.ceil(len(prompts) / e.at_once)
            total += count * e.batch_size * (read * e.shape.width + step * steps * e.shape.num_beams)
            batches += count
        said = f"{batches} batches, {len(asked)} programs to compile at {compiling:.0f} s each"
        return f"about {_duration(total)}: {said}{f'; and {more}' if more else ''}"

    def run(self, records: Records) -> None:
        """Runs what has no lines yet."""
        every = [prompt for prompts in self.prompts.values() for prompt in prompts]
        job.run_engines(self.asked, job.Todo(records, every, shown=False))
        for method, budget, task in self.apart(records.lines):
            about = {"method": method, "budget": label(budget), "task": task, "question": 0}
            with stopping.finishing("this task"):
                try:
                    found = self._apart(method, budget, task)
                except ValueError as e:  # the other tasks run all the same
                    self.faults.append(f"{method} at {label(budget)}: {e}")
                else:
                    records.append({**about, **line} for line in found)

    def _apart(self, method: str, budget: Budget, task: str) -> list[Line]:
        """The lines of what no engine runs: a task of lm-eval, or a cache that is planned alone."""
        options, policy, data = self.options, self.policies[method, budget], data_of(task)
        if data.runner == "planned":
            how = {"batch": data.batch, "prompt_len": data.words or 1, "max_new_tokens": data.new_tokens}
            size = kvjax.plan_memory(self.config, policy, **how).keys_values
            weights = jax.tree.leaves(models.LanguageModel(self.config).shapes)
            return [{"index": 0, "kv_bytes": size, "model_bytes": sum(x.size * x.dtype.itemsize for x in weights)}]
        made = self.entry.methods[method]
        how = {"policy": policy, "budget": budget, "block": made.block, "pretrained": options.model}
        how |= {"batch_size": options.batch_size, "max_length": options.length, "dtype": options.dtype}
        asked = *self.tasks[task], options.examples, rows.own_tasks(options.data)
        right = [x for seed in options.seeds for x in enumerate(rows.accuracies(*asked, seed=seed, **how))]
        found = [{"index": i, "context": n, "score": x, "metric": "accuracy"} for i, (n, x) in enumerate(right)]
        return found[::-1]  # the first row last: where it is, all are


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
