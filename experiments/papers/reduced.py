"""What of an entry is run on what is present, what is missing for the rest, and why a run is not the paper's."""

import dataclasses
import importlib.util
import pathlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import tyro

from kvjax.configs.experiment import check_distinct, check_whole
from kvjax.experiments.core import metrics
from kvjax.experiments.core.records import Line
from kvjax.experiments.papers import rows
from kvjax.experiments.papers.methods import Budget
from kvjax.experiments.papers.rows import SCORED, Source
from kvjax.experiments.papers.tables import DATA, ENTRIES, MODELS, Column, DataSet, Entry

NO_SCORES = (
    "seconds", "tokens_per_second", "latency_growth", "prefill_speedup", "kv_gb", "model_gb", "moved_share",
    "perplexity", "log_perplexity",
)  # fmt: skip
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


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is run.

    Attributes:
      entry: of what.
      model: the entry's model that the checkpoint stands for.
      lines: (method, budget) of the rows that are run, the full cache first.
      columns: columns that are measured, with the data sets that are present.
      sources: where their rows are.
      missing: what is not there, a line each.
      reduced: why the run is not the paper's, a line each; nothing where it is.
    """

    entry: Entry
    model: str
    lines: tuple[tuple[str, Budget], ...]
    columns: tuple[Column, ...]
    sources: tuple[Source, ...]
    missing: tuple[str, ...]
    reduced: tuple[str, ...]

    def called(self, line: Line) -> str:
        """The method and budget of a line, for readers."""
        return f"{self.entry.methods[line['method']].title} at {line['budget']}"


def choose(entry: Entry, options: Options, config: Any) -> Choice:
    """What of an entry can be run with a model of this config.

    Raises:
      ValueError: nothing to run, methods or models that the entry has not, or a budget that the text does not state and
        that is not given.
    """
    known = models_of(entry, options)
    model = next((m for m in known if same_shape(m, config)), known[0])
    lines = lines_of(entry, model, options)
    found, missing = rows.sources(entry.data, options.data)
    columns, without = _columns(entry, model, {s.name for s in found})
    wanted = {d for c in columns for d in c.data}
    sources = tuple(s for s in found if s.name in wanted)
    made = Choice(entry, model, lines, columns, sources, (*missing, *without), ())
    return dataclasses.replace(made, reduced=tuple(_reasons(made, found, options, config)))


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


def same_shape(model: str, config: Any) -> bool:
    """Whether a config has the layers, width and kv heads of a paper's model."""
    known = MODELS[model]
    return (config.num_layers, config.embed_dim, config.num_kv_heads) == (known.layers, known.width, known.kv_heads)


def lines_of(entry: Entry, model: str, options: Options) -> tuple[tuple[str, Budget], ...]:
    """Methods and budgets, each pair once: the paper's, or those that were asked for."""
    known = [m for m in entry.methods if m == "full" or any((r.model, r.method) == (model, m) for r in entry.rows)]
    if unknown := [m for m in options.methods if m not in known]:
        raise ValueError(f"{entry.name} of {model} has no method {unknown[0]!r}; there are {', '.join(known)}")
    found: list[tuple[str, Budget]] = [("full", 1.0)] if "full" in entry.methods else []
    for row in entry.rows:
        if row.model != model or row.method == "full" or (options.methods and row.method not in options.methods):
            continue
        if not options.budget and row.budget is None:
            raise ValueError(f"the text of {entry.name} does not state its budget; give --budget")
        found += [(row.method, b) for b in options.budget or (row.budget,) if b is not None]
    return tuple(dict.fromkeys(found))


def _columns(entry: Entry, model: str, present: set[str]) -> tuple[tuple[Column, ...], list[str]]:
    """Columns with the data sets that are there, and what keeps the others from being measured."""
    kept, missing = [], []
    for column in entry.measured(model):
        names = tuple(d for d in column.data if d in present or DATA[d].runner not in rows.WITH_ROWS)
        try:
            _check(column.metric, names)
        except ValueError as e:
            missing.append(f"column {column.title}: {e}")
        else:
            kept += [dataclasses.replace(column, data=names)] if names else []
    return tuple(kept), missing


def _check(metric: str, names: Sequence[str]) -> None:
    """Tries whether data sets can be scored by a metric.

    Raises:
      ValueError: the metric needs a judge, or something that is not installed.
    """
    if metric in JUDGED:
        raise ValueError(f"{metric} needs a judge, which kvjax does not run")
    if any(DATA[name].runner == "harness" for name in names) and not has_lm_eval():
        raise ValueError("a task of lm-eval; pip install 'kvjax[eval]'")
    for own in {rows.metric_of(name, metric) for name in names} - {*MEASURED, rows.CLASSIFICATION}:
        metrics.find(own)


def has_lm_eval() -> bool:
    """Whether lm-eval is installed."""
    return importlib.util.find_spec("lm_eval") is not None


def _reasons(choice: Choice, found: Sequence[Source], options: Options, config: Any) -> Iterator[str]:
    """Why this is not the run that the paper made."""
    entry, known = choice.entry, MODELS[choice.model]
    runners = {DATA[d].runner for c in choice.columns for d in c.data}
    if not same_shape(choice.model, config):
        yield (
            f"the model has {config.num_layers} layers of width {config.embed_dim}, {known.title} has "
            f"{known.layers} of {known.width}"
        )
    if "speed" in runners:
        if entry.beams > 1:
            yield f"generates greedily, not with {entry.beams} beams"
        yield "another device"
    if others := [s for s in found if not (DATA[s.name].question or (s.path and s.path.stem == s.name))]:
        what = ", ".join(sorted({"the project's own text" if s.path is None else s.path.name for s in others}))
        yield f"{what} stands for {others[0].name if len(others) == 1 else f'{len(others)} data sets'}"
    if "text" in runners:
        yield f"of a text, its last {SCORED} tokens at most are scored, after the others were read under the policy"
    if "harness" in runners and rows.own_tasks(options.data):
        yield "tasks of lm-eval are those of --data, not its own"
    theirs = [(r.method, r.budget) for r in entry.rows if r.model == choice.model]
    run = {*choice.lines, *((m, None) for m, _ in choice.lines)}
    if missed := len([row for row in theirs if row not in run]):
        yield f"{missed} of {len(theirs)} rows of the table are left out"
    paper = {*theirs, ("full", 1.0)}
    if others := len([1 for m, b in choice.lines if (m, b) not in paper and (m, None) not in paper]):
        yield f"{others} rows are at budgets that the paper did not run"
    if any(b is None for m, b in theirs if m != "full"):
        yield "the text does not state the budget"
    wanted = [(c.title, d) for c in entry.columns for d in c.data]
    if missed := len({*wanted} - {(c.title, d) for c in choice.columns for d in c.data}):
        yield f"{missed} of {len(wanted)} scores of a row are left out"
    if options.examples is not None:
        yield f"at most {options.examples} rows of a data set"
    if options.length is not None:
        yield f"prompts of at most {options.length} tokens"
    if options.new_tokens is not None:
        yield f"at most {options.new_tokens} new tokens"


def examples_short(data: DataSet, count: int) -> str | None:
    """Why so many rows of a data set are not the paper's, if they are fewer."""
    return None if data.examples is None or count >= data.examples else f"{data.title}: {count} of {data.examples} rows"


def directory(options: Options) -> pathlib.Path:
    """Where results go by default."""
    name = (options.entry or "").replace("/", "-")
    model = pathlib.Path(options.model).name or options.model
    return pathlib.Path("results/reproduce") / f"{name}-{model}"
