"""What of an entry is run: its cells on what is present, what is missing, and why a run is not the paper's."""

import dataclasses
import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

from kvjax.experiments.core import metrics
from kvjax.experiments.papers.methods import Budget
from kvjax.experiments.papers.tables import DATA, MEAN, MODELS, Column, Entry
from kvjax.experiments.reproduction import rows
from kvjax.experiments.reproduction.rows import PROJECT, Source

SCORED = 64  # the last tokens of a text, whose likelihood is measured
MEASURED = (
    "tokens_per_second",
    "kv_gb",
    "accuracy",
    "prefill_speedup",
    "perplexity",
    "log_perplexity",
    "classification",
)
_JUDGED = ("win_rate",)


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run is asked for.

    Attributes:
      entry: such as "ada-kv/table2".
      model: a checkpoint directory, a hub id or a name of `models.PRESETS`; "embedded" for the project's own.
      stands_for: which of the entry's models the checkpoint stands for; if None the first of its shape, else the first.
      data: see `rows.sources`.
      methods, budgets: those to run; all of the entry's if empty. A budget may be one that the paper did not run.
      examples: rows of every data set; all there are if None.
      length: tokens of a prompt, at most; what the model has positions for if None.
      new_tokens: tokens to generate, at most; what each data set asks for if None.
      batch_size: prompts that run together.
      seed: of random draws.
      dtype: of parameters, activations and the cache.
    """

    entry: str
    model: str = "embedded"
    stands_for: str | None = None
    data: str | None = None
    methods: tuple[str, ...] = ()
    budgets: tuple[Budget, ...] = ()
    examples: int | None = None
    length: int | None = None
    new_tokens: int | None = None
    batch_size: int = 4
    seed: int = 0
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"


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


def choose(entry: Entry, options: Options, config: Any) -> Choice:
    """What of an entry can be run with a model of this config.

    Raises:
      ValueError: nothing to run, methods or models that the entry has not, or a budget that the text does not state and
        that is not given.
    """
    model = _model(entry, options.stands_for, config)
    lines = _lines(entry, model, options)
    found, missing = rows.sources(entry.data, options.data)
    present = {s.name for s in found}
    columns, without = _columns(entry, model, present)
    wanted = {d for c in columns for d in c.data}
    return Choice(
        entry,
        model,
        lines,
        columns,
        tuple(s for s in found if s.name in wanted),
        (*missing, *without),
        tuple(_reductions(entry, model, lines, columns, found, options, config)),
    )


def _model(entry: Entry, stands_for: str | None, config: Any) -> str:
    if stands_for is not None:
        if stands_for not in entry.models:
            raise ValueError(f"{entry.name} has no model {stands_for!r}; there are {', '.join(entry.models)}")
        return stands_for
    return next((m for m in entry.models if same_shape(m, config)), entry.models[0])


def same_shape(model: str, config: Any) -> bool:
    """Whether a config has the layers, width and kv heads of a paper's model."""
    known = MODELS[model]
    return (config.num_layers, config.embed_dim, config.num_kv_heads) == (known.layers, known.width, known.kv_heads)


def _lines(entry: Entry, model: str, options: Options) -> tuple[tuple[str, Budget], ...]:
    """Methods and budgets, each pair once: the paper's, or those that were asked for."""
    if unknown := [m for m in options.methods if m not in entry.methods]:
        raise ValueError(f"{entry.name} has no method {unknown[0]!r}; there are {', '.join(entry.methods)}")
    found: list[tuple[str, Budget]] = []
    for row in entry.rows:
        if row.model != model or row.method == "full" or (options.methods and row.method not in options.methods):
            continue
        if not options.budgets and row.budget is None:
            raise ValueError(f"the text of {entry.name} does not state its budget; give --budget")
        budgets = options.budgets or (row.budget,)
        found += [(row.method, b) for b in budgets if b is not None]
    full = [("full", 1.0)] if "full" in entry.methods else []
    return tuple(dict.fromkeys([*full, *found]))


def _columns(entry: Entry, model: str, present: set[str]) -> tuple[tuple[Column, ...], list[str]]:
    """Columns with the data sets that are there, and what keeps the others from being measured."""
    kept, missing = [], []
    for column in entry.measured(model):
        runners = {DATA[d].runner for d in column.data}
        names = tuple(d for d in column.data if d in present or DATA[d].runner == "speed")
        fault = ""
        if "harness" in runners:
            names = column.data
            if not has_lm_eval():
                fault = "a task of lm-eval; pip install 'kvjax[eval]'"
        elif column.metric in _JUDGED:
            fault = f"{column.metric} needs a judge, which kvjax does not run"
        elif names:
            fault = _metric_fault(names, column.metric)
        if fault:
            missing.append(f"column {column.title}: {fault}")
        elif names:
            kept.append(dataclasses.replace(column, data=names))
    return tuple(kept), missing


def has_lm_eval() -> bool:
    """Whether lm-eval is installed."""
    return importlib.util.find_spec("lm_eval") is not None


def own_tasks(data: str | None) -> pathlib.Path | None:
    """The directory of `--data`, if it holds tasks for lm-eval in place of those that it comes with."""
    folder = None if data is None else pathlib.Path(data).expanduser()
    return folder if folder is not None and folder.is_dir() and any(folder.glob("*.yaml")) else None


def _metric_fault(names: Sequence[str], metric: str) -> str:
    for name in names:
        own = rows.metric_of(name, metric)
        if own not in MEASURED:
            try:
                metrics.find(own)
            except ValueError as e:
                return str(e)
    return ""


def _reductions(
    entry: Entry,
    model: str,
    lines: Sequence[tuple[str, Budget]],
    columns: Sequence[Column],
    found: Sequence[Source],
    options: Options,
    config: Any,
) -> list[str]:
    """Why this is not the run that the paper made."""
    reasons = []
    if not same_shape(model, config):
        known = MODELS[model]
        reasons.append(
            f"the model has {config.num_layers} layers of width {config.embed_dim}, {known.title} has "
            f"{known.layers} of {known.width}"
        )
    if entry.kind == "speed":
        if entry.beams > 1:
            reasons.append(f"generates greedily, not with {entry.beams} beams")
        reasons.append("another device")
    others = sorted({s.label for s in found if not s.own})
    if others:
        what = "the project's own text" if others == [PROJECT] else ", ".join(others)
        names = [s.name for s in found if not s.own]
        reasons.append(f"{what} stands for {names[0] if len(names) == 1 else f'{len(names)} data sets'}")
    if any(DATA[d].runner == "text" for c in columns for d in c.data):
        reasons.append(f"of a text, its last {SCORED} tokens are scored, after the others were read under the policy")
    if own_tasks(options.data) and any(DATA[d].runner == "harness" for c in columns for d in c.data):
        reasons.append("tasks of lm-eval are those of --data, not its own")
    theirs = [(r.method, r.budget) for r in entry.rows if r.model == model]
    run = {*lines, *((m, None) for m, _ in lines)}
    if missed := len([row for row in theirs if row not in run]):
        reasons.append(f"{missed} of {len(theirs)} rows of the table are left out")
    known = {*theirs, ("full", 1.0)}
    if others := len([1 for m, b in lines if (m, b) not in known and (m, None) not in known]):
        reasons.append(f"{others} rows are at budgets that the paper did not run")
    if any(b is None for m, b in theirs if m != "full"):
        reasons.append("the text does not state the budget")
    wanted = [c for c in entry.columns if c.metric != MEAN]
    measured = {(c.title, d) for c in columns for d in c.data}
    if missed := len({(c.title, d) for c in wanted for d in c.data} - measured):
        reasons.append(f"{missed} of {sum(len(c.data) for c in wanted)} scores of a row are left out")
    if options.examples is not None:
        reasons.append(f"at most {options.examples} rows of a data set")
    if options.length is not None:
        reasons.append(f"prompts of at most {options.length} tokens")
    if options.new_tokens is not None:
        reasons.append(f"at most {options.new_tokens} new tokens")
    return reasons


def examples_short(name: str, count: int) -> str | None:
    """Why so many rows of a data set are not the paper's, if they are fewer."""
    paper = DATA[name].examples
    return None if paper is None or count >= paper else f"{name}: {count} of {paper} rows"


def directory(options: Options) -> pathlib.Path:
    """Where results go by default."""
    name = options.entry.replace("/", "-")
    model = pathlib.Path(options.model).name or options.model
    return pathlib.Path("results/reproduce") / f"{name}-{model}"
