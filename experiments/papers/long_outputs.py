"""Policies that evict while a model writes: methods, with the prompt kept whole or not, and how often they evict."""

import dataclasses
import gzip
import itertools
import json
import pathlib
import shlex
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import pandas as pd
import tyro
from jaxtyping import Float
from matplotlib.figure import Figure

import kvjax
from kvjax import Policy, methods
from kvjax.budgets import Combined, Schedule
from kvjax.configs.experiment import Experiment, Setup, check_distinct, check_whole
from kvjax.configs.probed import probed_arrays
from kvjax.experiments.core import job, sources, stats, table, views
from kvjax.experiments.core.command import check_output, write_page
from kvjax.experiments.core.outputs import TOLD
from kvjax.experiments.core.page import Table, cell, markdown, percent
from kvjax.experiments.papers.base import canvas, message
from kvjax.experiments.tasks.aloud import ALOUD
from kvjax.models.written import write_bytes

METHODS: Final[dict[str, Callable[..., Policy]]] = {
    "random": methods.random, "window": methods.window, "h2o": methods.h2o, "key_attention": methods.key_attention,
    "tova": methods.tova, "roco": methods.roco, "keyformer": methods.keyformer, "keydiff": methods.keydiff,
    "r_kv": methods.r_kv, "vase": methods.vase, "lazy_eviction": methods.lazy_eviction,
    "triattention": methods.triattention,
}  # fmt: skip
"""Those whose scores go on while tokens are written, with their own settings. `key_attention` is H2O's score alone."""
RECENT: Final = {"h2o": 0.5, "keyformer": 0.3}
"""The share of their tokens, beside a prompt that stays, that papers give to the last ones; `LAST` if that is more."""
KNOWS: Final = "triattention"
"""Which must know something of the model: the centres of its queries."""
CONTROL: Final = "random"
FACTORS: Final = ("method", "prompt", "interval")
_CALLED = dict(zip(FACTORS, ("the method", "whether the prompt stays", "how often it evicts"), strict=True))
FIRST, LAST = 4, 16
"""Tokens that stay of a prompt that does not stay whole, and of what was read last; of that more in `RECENT`."""


class Cell(NamedTuple):
    """What is crossed.

    Attributes:
      method: one of `METHODS`.
      prompt: whether every token of the prompt stays.
      every: tokens between two evictions.
    """

    method: str
    prompt: bool
    every: int

    @property
    def name(self) -> str:
        """What lines call it."""
        return f"{self.method}, {'prompt stays' if self.prompt else 'prompt competes'}, every {self.every}"

    def policy(self, more: int, centres: Mapping[str, Any]) -> Policy:
        """The policy, of which no head holds more than the prompt's tokens and `more` at any time."""
        kept: dict[str, Any] = {"prompt": True} if self.prompt else {"sinks": FIRST}
        known = centres if self.method == KNOWS else {}
        made = METHODS[self.method](Combined("sum", (1.0, more - self.every)), **known)
        recent = max(LAST, int(RECENT.get(self.method, 0) * (more - self.every)))
        return kvjax.when(Schedule(over=self.every), kvjax.protect(made, recent=recent, **kept))


def cells(names: Iterable[str], every: Sequence[int]) -> list[Cell]:
    """All combinations."""
    return [Cell(*of) for of in itertools.product(names, (True, False), every)]


def label(more: int) -> str:
    """What lines call a budget."""
    return f"prompt + {more}"


def experiment(of: Sequence[Cell], more: Sequence[int], setup: Setup, known: Mapping[str, Any]) -> Experiment:
    """The full cache, and every combination at every budget."""
    policies = lambda cell: tuple((label(n), cell.policy(n, known)) for n in more)
    beside = tuple(Experiment(cell.name, policies(cell), setup) for cell in of)
    return Experiment("full", ((1.0, methods.full()),), setup, beside=beside)


class Measured(NamedTuple):
    """What lines say of a measure, E examples in an order that all share.

    Attributes:
      full: the full cache's.
      values: of every combination and budget.
      tasks, contexts: of the examples.
    """

    full: Float[np.ndarray, "E"]
    values: Float[np.ndarray, "C B E"]
    tasks: list[str]
    contexts: list[str]


def measured(lines: pd.DataFrame, of: Sequence[Cell], more: Sequence[int], measure: str) -> Measured:
    """A column of `core.table.examples`, of a study's lines."""
    rows = table.examples(lines).sort_values(["task", "index"])
    groups: dict[Any, pd.DataFrame] = dict(iter(rows.groupby(["method", "budget"], sort=False)))
    full = next(own for (method, _), own in groups.items() if method == "full")
    each = [[groups[cell.name, label(n)][measure].to_numpy(float) for n in more] for cell in of]
    return Measured(full[measure].to_numpy(float), np.array(each), full["task"].tolist(), full["context"].tolist())


# --- the study ---


@dataclasses.dataclass(frozen=True)
class LongOutputs:
    """What to cross, and what to ask.

    Attributes:
      name: the question.
      model: the project's reasoner, a small model that works step by step; or a checkpoint, whose texts go on.
      methods: of `METHODS`; the control, random, is always there.
      every: tokens between two evictions.
      more: tokens that a head may hold beyond the prompt's, at any time.
      tasks: what is asked; if not given, all tasks that think aloud, and of another model than the reasoner that it
        goes on.
      centres: what `probe.py centres` wrote of the model, for triattention; that beside its weights if empty.
      examples: of each task.
      answer: tokens of an answer, at most.
      length: tokens of a text: a prompt, and as many more as its answer is compared to, 256.
      text: a file of text for other models than the reasoner.
      prefill: a record that `what_decides` wrote, whose shares stand beside.
      batch_size: prompts that run together.
      dtype: of parameters and activations.
      output: where results go.
    """

    name: Annotated[Literal["long_outputs"], tyro.conf.Positional] = "long_outputs"
    model: str = "reasoner"
    methods: tuple[str, ...] = tuple(METHODS)
    every: tuple[int, ...] = (1, 16, 32)
    more: tuple[int, ...] = (64, 128)
    tasks: tuple[str, ...] = ()
    centres: str = ""
    examples: int = 16
    answer: int = 512
    length: int = 1024
    text: str | None = None
    prefill: pathlib.Path | None = None
    batch_size: int = 16
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    output: pathlib.Path = pathlib.Path("results/findings")

    def __post_init__(self):
        for name in ("methods", "every", "more"):
            check_distinct(name, getattr(self, name))
        check_whole(1, every=min(self.every), more=min(self.more))
        if unknown := [name for name in self.methods if name not in METHODS]:
            raise ValueError(
                f"methods has {unknown[0]!r}; those that go on while tokens are written: {', '.join(METHODS)}"
            )
        least, longest = min(self.more), max(self.every)
        if least < longest + LAST:
            raise ValueError(
                f"more={least} has no room for the last {LAST} tokens, which stay, and those of every={longest}; give "
                f"--more {longest + LAST} or more"
            )
        if self.prefill is not None and not self.prefill.is_file():
            raise ValueError(f"prefill={self.prefill} is no file; `findings.py what_decides` writes one")

    @property
    def cells(self) -> list[Cell]:
        """What is crossed; the control is first."""
        return cells(dict.fromkeys((CONTROL, *self.methods)), self.every)

    @property
    def setup(self) -> Setup:
        """Of the run."""
        tasks = self.tasks or ((*ALOUD,) if pathlib.PurePath(self.model).name == "reasoner" else ("long_continuation",))
        asked: dict[str, Any] = {
            x: getattr(self, x) for x in ("model", "examples", "answer", "length", "text", "dtype")
        }
        shared: dict[str, Any] = {"own_answers": True, "baselines": (), "slots": "shared"}
        return Setup(tasks=tasks, batch_size=self.batch_size, **asked, **shared)

    @property
    def aloud(self) -> bool:
        """Whether all tasks think aloud."""
        return all(task in ALOUD for task in self.setup.task_names)

    @property
    def measure(self) -> str:
        """What the scores of answers are called."""
        return "answers right" if self.aloud else "scores"

    @property
    def known(self) -> Mapping[str, Any]:
        """The centres of the model's queries, if a method must know them.

        Raises:
          ValueError: their file is not there, or another model's.
        """
        return probed_arrays(self.setup, self.centres, "centres") if KNOWS in self.methods else {}

    @property
    def stem(self) -> str:
        """What files are called."""
        return f"{self.name}-{pathlib.PurePath(self.model).name}"


def page(options: LongOutputs, lines: pd.DataFrame, prompts: str) -> tuple[str, Figure]:
    """The page and its picture.

    Args:
      options: what was crossed.
      lines: of the run.
      prompts: what they were asked in.
    """
    of, levels = options.cells, (len({c.method for c in options.cells}), 2, len(options.every))
    right = measured(lines, of, options.more, "value")
    likely = measured(lines, of, options.more, "own_nll")
    beside = {options.measure: right.values, "likelihood": likely.full - likely.values}
    among = {
        name: [stats.explained(x[:, b].reshape(*levels, -1), FACTORS) for b in range(len(options.more))]
        for name, x in beside.items()
    }
    after = {} if options.prefill is None else _after_prefill(options.prefill)
    among |= {"after a prefill": [*after.values()]} if after else {}
    first = among[options.measure if options.aloud else "likelihood"][0]
    decides = max(FACTORS, key=lambda name: first[name].mean)
    title = f"While the model writes, what decides most is {_CALLED[decides]}"
    tables: list[str | Table] = ["Full cache:", _full(lines)]
    for name, each in among.items():
        heads = [label(n) for n in options.more] if name in beside else [*after]
        shown = [(factor, *(percent(*x[factor]) for x in each)) for factor in each[0]]
        tables += [f"Variance explained, {name}, %:", Table(("factor", *heads), shown)]
    for b, n in enumerate(options.more):
        told = f"{options.measure.capitalize()}, %, beside the control, random tokens and the prompt, and perplexities:"
        tables += [f"## {label(n)} tokens", told, _scores(options, right, likely, b)]
        tables += [f"Of each task, where the prompt stays, {options.measure}, %:"]
        tables += [_by_task(options, right, b), "How answers look:", _looks(options, lines, b)]
    shares = [f"{name} {percent(share)} %" for name, share in RECENT.items() if name in options.methods]
    own = f"Of what a prompt that stays leaves, more last tokens stay with {', '.join(shares)}. " if shares else ""
    about = (
        f"Model {options.model} in {options.dtype}, {options.examples} examples of each of "
        f"{', '.join(options.setup.task_names)}, answers of {options.answer} tokens at most. {prompts} No head holds "
        f"more than the prompt's tokens and so many more at any time; the last {LAST} stay, and the first {FIRST} of a "
        f"prompt that competes. {own}Evicting every n tokens lets a cache grow by n in between. Likelihoods are of the "
        "full cache's own answers, read token by token, and so are perplexities; variance is of the mean log-"
        "likelihood of a token less the full cache's. Intervals are of 95 %; p-values, of paired tests, are adjusted "
        f"for all of a table (Holm). By `python {shlex.join(_command(options))}`."
    )
    figure = message(_picture(options, among, right), title, f"{options.model}, {len(right.tasks)} prompts")
    return markdown(title, about, f"![{title}]({options.stem}.png)", *tables), figure


def run(options: LongOutputs, command: Sequence[str]) -> None:
    """Runs what is missing, and writes."""
    check_output(options.output / f"{options.stem}.png")
    if options.prefill is not None:
        _after_prefill(options.prefill)  # which is read again for the page, and may not be one
    crossed = experiment(options.cells, options.more, options.setup, options.known)
    job.run(crossed, options.output / options.stem, [*command])
    found = sources.read([options.output / options.stem])
    rows = table.examples(found.lines)
    prompts = f"{views.prompts(rows, {r.name: r for r in found.runs})} {views.devices(found.runs)}"
    text, figure = page(options, found.lines, prompts)
    write_page(options.output, options.stem, text, {options.stem: figure})
    kept = ["method", "budget", "task", "index", "context", "value", "own_nll", "written", *TOLD]
    content = rows[kept].merge(table.answers(found.lines), how="left").to_csv(index=False, float_format="%.9g")
    write_bytes(options.output / f"{options.stem}.csv.gz", gzip.compress(content.encode(), mtime=0))


# --- tables ---


def _after_prefill(record: pathlib.Path) -> dict[str, dict[str, stats.Interval]]:
    """Variance explained by score, protection and division after a prefill, by the share of the prompt that stays.

    Raises:
      ValueError: no record of `what_decides`.
    """
    from kvjax.experiments import findings

    called = dict(zip(findings.FACTORS, ("method", "protection", "division"), strict=True))
    try:
        with np.load(record) as data:
            kl, asked = data["kl"].astype(float), json.loads(str(data["options"]))
        each = [findings.explained(kl[:, m], [*findings.SCORES]) for m in range(len(asked["budget"]))]
    except (ValueError, KeyError, IndexError, OSError, zipfile.BadZipFile) as e:
        raise ValueError(f"prefill={record} is no record that `findings.py what_decides` wrote: {e}") from e
    return {
        f"{100 * share:.4g} % of the prompt": {called.get(name, name): x for name, x in found.items()}
        for share, found in zip(asked["budget"], each, strict=True)
    }


def _full(lines: pd.DataFrame) -> Table:
    """The full cache's answers, a row a task."""
    full = lines[(lines["method"] == "full") & lines["output"].notna()]
    leading = table.rescored(full, ["leading_steps"]) if (full["metric"] == "final_step").all() else None
    rows = []
    for task, own in full.groupby("task", sort=False):
        each = [stats.interval(own[x].tolist()) for x in ("score", "ended") if own[x].notna().all()]
        steps = [] if leading is None else [stats.interval(leading[leading["task"] == task]["leading_steps"].tolist())]
        cells = [percent(*x) for x in (each[:1] + steps + each[1:])]
        rows.append((str(task), *cells, cell(*stats.mean(own["tokens"].tolist()))))
    titles = ("score, %",) if leading is None else ("final step right, %", "steps before the first wrong one, %")
    return Table(("task", *titles, "ended by itself, %", "tokens written"), rows)


def _scores(options: LongOutputs, right: Measured, likely: Measured, b: int) -> Table:
    """A row a method and whether the prompt stays: scores at every interval, and the test beside the control."""
    of = options.cells
    control = {c.every: right.values[i, b] for i, c in enumerate(of) if c.method == CONTROL and c.prompt}
    compared = [i for i, c in enumerate(of) if not (c.method == CONTROL and c.prompt)]
    tests = [stats.compare([*right.values[i, b]], [*control[of[i].every]], tasks=right.tasks) for i in compared]
    verdicts = dict(zip(compared, stats.adjusted(tests), strict=True))
    rows = []
    for method, prompt in dict.fromkeys((c.method, c.prompt) for c in of):
        own = [i for i, c in enumerate(of) if (c.method, c.prompt) == (method, prompt)]
        scores = [percent(*stats.interval([*right.values[i, b]], tasks=right.tasks)) for i in own]
        said = [f"{v.verdict}, p = {v.p:.2g}" if (v := verdicts.get(i)) else "the control" for i in own]
        nll = [f"{np.exp(likely.values[i, b].mean()):.3f}" for i in own]
        each = [x for of_interval in zip(scores, said, nll, strict=True) for x in of_interval]
        rows.append((method, "stays" if prompt else "competes", *each))
    heads = [x for n in options.every for x in (f"every {n}", f"beside the control, {n}", f"perplexity, {n}")]
    return Table(("method", "prompt", *heads), rows)


def _by_task(options: LongOutputs, right: Measured, b: int) -> Table:
    """A row a method, a column a task, of the largest interval between evictions."""
    names = [*dict.fromkeys(right.tasks)]
    here = [[i for i, task in enumerate(right.tasks) if task == name] for name in names]
    shown = lambda values: [percent(*stats.interval([*values[own]])) for own in here]
    own = [(c.method, i) for i, c in enumerate(options.cells) if c.prompt and c.every == max(options.every)]
    rows = [("full", *shown(right.full)), *((method, *shown(right.values[i, b])) for method, i in own)]
    return Table((f"method, every {max(options.every)}", *names), rows)


def _looks(options: LongOutputs, lines: pd.DataFrame, b: int) -> Table:
    """What is told of answers, a row a method and whether the prompt stays, over all intervals."""
    found = {x: measured(lines, options.cells, options.more, x).values[:, b] for x in ("written", *TOLD)}
    rows = []
    for method, prompt in dict.fromkeys((c.method, c.prompt) for c in options.cells):
        own = [i for i, c in enumerate(options.cells) if (c.method, c.prompt) == (method, prompt)]
        mean = {x: float(values[own].mean()) for x, values in found.items()}
        shares = [percent(mean[x]) for x in ("ended", "compressed", "repeated")]
        counts = [cell(mean[x]) for x in ("mean_live", "evictions")]
        rows.append((method, "stays" if prompt else "competes", cell(mean["written"]), *shares, *counts))
    titles = "tokens written", "ended by itself, %", "compressed to, %", "repeated, %", "live on average", "evictions"
    return Table(("method", "prompt", *titles), rows)


def _picture(options: LongOutputs, among: Mapping[str, Sequence[Any]], right: Measured) -> Figure:
    """Variance explained by each factor; and scores with and without the whole prompt, at the smallest budget."""
    figure, (grid,) = canvas(2, width=5.0, height=4.2)
    left, other = grid
    bars, names = [(name, x[0]) for name, x in among.items()], (*FACTORS, "interactions")
    for k, (name, found) in enumerate(bars):
        at = np.arange(len(found)) + 0.8 * (k - (len(bars) - 1) / 2) / len(bars)
        values = 100 * np.array([[*x] for x in found.values()])
        error = np.abs(values[:, 1:].T - values[:, 0])
        left.bar(at, values[:, 0], 0.75 / len(bars), yerr=error, label=name, error_kw={"elinewidth": 0.8})
    ticks = names if len(bars) == 2 else ("method", "prompt or\nprotection", "interval or\ndivision", "interactions")
    left.set(xticks=range(len(names)), xticklabels=ticks, ylabel="variance explained, %", ylim=(0, 100))
    left.legend(fontsize="small")
    b, rows = int(np.argmin(options.more)), [*dict.fromkeys(c.method for c in options.cells)]
    for prompt, marker, text in ((True, "o", "the prompt stays"), (False, "x", "the prompt competes")):
        own = [[i for i, c in enumerate(options.cells) if (c.method, c.prompt) == (m, prompt)] for m in rows]
        other.plot([100 * right.values[i, b].mean() for i in own], range(len(rows)), marker, label=text)
    other.set(
        yticks=range(len(rows)),
        yticklabels=rows,
        xlim=(-3, 103),
        xlabel=f"{options.measure}, %, {label(options.more[b])}",
    )
    other.axvline(100 * right.full.mean(), color="0.6", linestyle="--", label="full cache")
    other.legend(fontsize="small")
    return figure


def _command(options: LongOutputs) -> list[str]:
    """The command line that measures it."""
    words = ["experiments/findings.py", options.name]
    for field in dataclasses.fields(options)[1:]:
        value = getattr(options, field.name)
        if field.name != "output" and value != field.default:
            words += [f"--{field.name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words
