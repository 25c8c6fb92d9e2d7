"""The board: every method at equal bytes on one model, what it loses, and which of two is better.

    python experiments/board.py --model smollm2-135m-instruct
    python experiments/board.py --model varied --methods snapkv h2o --bytes 0.25 --examples 8
    python experiments/board.py --protect 4 16 --window 16
    python experiments/board.py --tune 7
    python experiments/board.py --policy my.py:make

A method's budget is the largest whose keys and values, with room for the longest answer of the part, take no more than
a share of the full cache's bytes. A prompt is read once for all methods and budgets. Each part is a run of the main job
in `results/board/MODEL/runs/`, so that an interrupted board goes on. Written beside them: `board.md`, a heat map, the
scores with intervals, and `scores.csv.gz`, a row a policy and example, from which all numbers of the page are.
"""

import bisect
import collections
import dataclasses
import functools
import inspect
import itertools
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import kvjax
from kvjax import configs, models
from kvjax.configs.experiment import (
    BUDGETS,
    Budget,
    Experiment,
    Made,
    Setup,
    changed,
    check_distinct,
    check_whole,
    with_params,
)
from kvjax.experiments.core import job, metrics, stats
from kvjax.experiments.core.command import as_command, check_output, parsed, write_page
from kvjax.experiments.core.engine import Shape, shapes
from kvjax.experiments.core.page import Table, markdown, percent, scored
from kvjax.experiments.core.setup import build, find_builders, read_text
from kvjax.experiments.papers.base import canvas, message, style
from kvjax.experiments.run import config_of
from kvjax.experiments.tasks.base import Protocol
from kvjax.models.embedded import INCLUDED
from kvjax.models.sources import locate


@dataclasses.dataclass(frozen=True)
class Part:
    """What is asked of every method.

    Attributes:
      title: what it is called on the page.
      own: tasks of the models that come with the project, in their language, which cannot say everything.
      others: tasks of all other models.
      protocol: when a question is read.
      answer: tokens of an answer, at most, where a task allows more.
      beside_full: whether answers are judged by how alike they are to the full cache's (words, by difflib).
      decodes: whether most of it is written or read one by one, for what evicts while decoding; asked if it is named.
    """

    title: str
    own: tuple[str, ...]
    others: tuple[str, ...]
    protocol: Protocol = "in_prompt"
    answer: int = 16
    beside_full: bool = False
    decodes: bool = False


CONTROLS: Final = "random", "random_protected", "streaming_llm"
"""What every table has: random tokens, bare and with `PROTECTED` ones, and the first and last tokens."""
PROTECTED: Final = (4, 16)
TRIES: Final = None, (4, 16), (4, 64), (16, 128)
"""First and last tokens that stay, of the settings that `Board.tune` chooses among; None are a method's own."""
HEADLINE: Final = 0.25
"""The share of bytes that a page's title is of, said before anything runs."""
_TRIED: Final = " protecting "
_BYTES, _LIVE, _OWN = (
    "bytes-",
    "live-",
    "own-",
)  # what a share was asked of, and of a tuned board a method's own setting

_ONE = ("single_needle", "several_needles", "key_value"), ("niah_single_2", "niah_multikey_1")
PARTS: Final = {
    "in_prompt": Part("one value, asked in the prompt", *_ONE),
    "after_compression": Part("one value, asked after compression", *_ONE, "after_compression"),
    "several_values": Part("several values, asked in the prompt", ("multi_query",), ("niah_multivalue",), answer=48),
    "perplexity": Part("the next 64 tokens", ("perplexity",), ("perplexity",)),
    "continuation": Part("48 tokens as the full cache writes", *2 * (("continuation",),), answer=48, beside_full=True),
    "summary": Part("a summary as the full cache writes", (), ("summary",), answer=48, beside_full=True),
    "two_instructions": Part("two instructions", (), ("two_instructions",), "after_compression"),
    "streaming": Part("three quarters of a text, read token by token", (), ("streaming_perplexity",), decodes=True),
    "long_continuation": Part(
        "256 tokens as the full cache writes",
        *2 * (("long_continuation",),),
        answer=256,
        beside_full=True,
        decodes=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class Board:
    """What to run.

    Attributes:
      model: "embedded" or "varied" for a model that comes with the project, or a checkpoint.
      methods: configs, beside which `CONTROLS` run; if not given, all that can be made for the model.
      policy: methods of one's own beside them, path.py:make each; make(budget) returns a policy, or
        one and its learned parameters.
      bytes: shares of the full cache's bytes.
      live: have a column of scores at equal live tokens, the same shares of the prompt, beside those at equal bytes.
      parts: what is asked; if not given, all that can be asked of the model and does not decode long.
      only: of the parts' tasks these alone; all if not given.
      metrics: more measures of answers that are compared with the full cache's, such as bleu and rouge_l.
      protect: first and last tokens that every method keeps, in place of its own; those of each method if not given.
      window: last rows of the prompt that vote, of every method that lets them, in place of its own.
      tune: a seed of held-out examples, as many as of every other: on them each method's tokens that always stay are
        chosen among four settings, for every share of bytes and part anew. The page is of the others, with a column
        of each method's own setting. Controls are left as they are, unless `methods` has them.
      examples: of each task.
      length: tokens of a prompt.
      text: a file of text in which facts are hidden and whose likelihood is asked for, in place of the project's.
      batch_size: prompts that run together.
      dtype: of parameters, activations and the KV cache.
      template: how an instruct model is asked: in a "chat" or in "raw" text; "auto" in a chat where it has a template.
      seed: of examples and draws; with several, each task has its examples anew for each of them.
      output: where runs and results go; results/board/MODEL if not given.
    """

    model: str = "embedded"
    methods: tuple[str, ...] = ()
    policy: tuple[str, ...] = ()
    bytes: tuple[float, ...] = (0.5, 0.25, 0.125, 0.0625)
    live: bool = False
    parts: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    protect: tuple[int, int] | None = None
    window: int | None = None
    tune: int | None = None
    examples: int = 32
    length: int = 1024
    text: str | None = None
    batch_size: int = 16
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    template: Literal["auto", "chat", "raw"] = "auto"
    seed: int | tuple[int, ...] = 0
    output: pathlib.Path | None = None

    def __post_init__(self):
        check_whole(1, examples=self.examples, length=self.length, **_given(window=self.window))
        if self.tune is not None and (self.protect is not None or self.tune in self.seeds or self.live):
            raise ValueError(
                f"tune={self.tune} chooses what is protected, at equal bytes, on a seed of its own; it goes without "
                f"protect and live, and is none of the seeds {', '.join(map(str, self.seeds))}"
            )
        if self.protect is not None and not (min(self.protect) >= 0 and sum(self.protect) < self.length):
            first, last = self.protect
            raise ValueError(
                f"protect {first} {last} must be two numbers from 0 on, below length={self.length} together"
            )
        for name, given, known in (("methods", self.methods, configs.available()), ("parts", self.parts, PARTS)):
            if given:
                check_distinct(name, given)
            if unknown := [x for x in given if x not in known]:
                raise ValueError(f"there is no {unknown[0]!r} among {name}; there are {', '.join(known)}")
        known = {task: None for name in self.parts or PARTS for task in self._tasks(PARTS[name])}
        if unknown := [x for x in self.only if x not in known]:
            raise ValueError(f"no part asks {unknown[0]!r} of {self.model}; its tasks are {', '.join(known)}")
        if mute := [name for name in self.parts if not self.tasks(PARTS[name])]:
            why = "of whose tasks none is in only" if self.only else "whose language has no words for it"
            raise ValueError(f"{mute[0]} cannot be asked of {self.model}, {why}")
        if self.metrics:
            check_distinct("metrics", self.metrics)
        for name in self.metrics:
            metrics.find(name)
        for own in self.policy:
            config_of(own)
        if self.text is not None:
            read_text(self.text)
        if not self.bytes or not all(0 < share < 1 for share in self.bytes):
            raise ValueError(f"bytes {self.bytes} must be shares of the full cache between 0 and 1")

    @property
    def directory(self) -> pathlib.Path:
        """Where everything goes."""
        kind = "" if self.protect is None else "-protect-{}-{}".format(*self.protect)
        kind += "".join(f"-{name}-{value}" for name, value in _given(window=self.window, tune=self.tune).items())
        name = pathlib.PurePath(self.model).name + kind
        return pathlib.Path("results/board") / name if self.output is None else self.output

    @property
    def seeds(self) -> tuple[int, ...]:
        """Whose examples the page is of."""
        return self.seed if isinstance(self.seed, tuple) else (self.seed,)

    def tasks(self, part: Part) -> tuple[str, ...]:
        """What a part asks of the model."""
        return tuple(task for task in self._tasks(part) if not self.only or task in self.only)

    def _tasks(self, part: Part) -> tuple[str, ...]:
        return part.own if self.model in INCLUDED else part.others

    @property
    def asked(self) -> tuple[str, ...]:
        """The parts to run."""
        return self.parts or tuple(name for name, part in PARTS.items() if self.tasks(part) and not part.decodes)

    def setup(self, part: Part) -> Setup:
        """Of the run of one part."""
        asked: dict[str, Any] = {"tasks": self.tasks(part), "answer": part.answer, "protocol": part.protocol}
        asked |= {name: getattr(self, name) for name in ("model", "text", "examples", "length", "template")}
        asked["seed"] = self.seed if self.tune is None else (*self.seeds, self.tune)
        return Setup(**asked, dtype=self.dtype, batch_size=self.batch_size, baselines=(), slots="shared")


def _given(**options: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in options.items() if value is not None}


# --- which policies ---


def share_of_bytes(config: Any, made: Made, run: Shape) -> float:
    """Keys and values that a policy's cache takes in a run, as a share of the full cache's."""
    policy, _ = with_params(made)
    slots = lambda p: kvjax.make_plan(config, p, np.array(run.lengths), run.width, run.planned).num_slots
    return slots(policy) / slots(kvjax.Policy())


def budget_for(make: Callable[[int], Made], config: Any, share: float, run: Shape) -> int | None:
    """The largest budget in tokens whose cache takes no more than a share of the bytes.

    None where the smallest that the method can work with takes more.
    """

    def taken(budget: int) -> float | None:
        try:
            return share_of_bytes(config, make(budget), run)
        except ValueError:  # too small for what the method protects
            return None

    budget = bisect.bisect_right(range(1, run.width + 1), share, key=lambda b: taken(b) or 0.0)
    return budget if budget and taken(budget) is not None else None


def random_protected(budget: tuple[Budget, ...] = BUDGETS, setup: Setup = Setup()) -> Experiment:
    """Random tokens beside the first and last ones that stay: what is owed to their protection alone."""
    made = configs.find("random")[1](budget=budget, setup=setup)
    guard = lambda policy: kvjax.protect(policy, sinks=PROTECTED[0], recent=PROTECTED[1])
    policies = tuple((share, changed(policy, guard)) for share, policy in made.policies)
    return dataclasses.replace(made, name="random_protected", policies=policies)


def experiment_of(board: Board, part: Part, own: str | None = None) -> Experiment:
    """All methods of a part, or one's own, their policies labelled by the share of bytes that was asked for."""
    from kvjax.models.weights import read_config  # imports Flax, which takes longer than --help should

    setup = board.setup(part)
    config, tokenizer = read_config(locate(setup.source, weights=False)), models.load_tokenizer(setup.source)
    prompts, _ = build(setup, find_builders(setup), tokenizer, config)
    largest = shapes(prompts, config.max_position if config.learned_positions else None)[0]
    named = dict.fromkeys([*(board.methods or configs.available()), *CONTROLS])
    controls = {*CONTROLS}.difference(board.methods)
    find: Any = lambda name: (name, random_protected) if name == "random_protected" else configs.find(name)
    each = [config_of(own)] if own else map(find, named)
    beside = []
    tried = [
        (name, get_config, kept)
        for name, get_config in each
        for kept in (TRIES if board.tune is not None and (own or name not in controls) else (board.protect,))
    ]
    for name, get_config, kept in tried:
        try:
            policies, made = _policies(
                board, get_config, setup, kept, lambda make, x: budget_for(make, config, x, largest)
            )
        except ValueError as e:  # what has to be found of the model before, or no token that could be protected
            if kept is board.protect and (name in board.methods or own):
                raise
            print(f"without {name}: {e}")
            continue
        if policies and name != "full":
            called = name if kept is None or kept is board.protect else f"{name}{_TRIED}{kept[0]} and {kept[1]}"
            beside.append(Experiment(called, policies, setup, made.options, origin=made.origin))
    if not {e.name.partition(_TRIED)[0] for e in beside} - controls:
        shares = ", ".join(f"{share:g}" for share in board.bytes)
        less = ", or a smaller --window" if board.window else ""
        raise ValueError(
            f"no method can work at {shares} of the full cache's bytes; give larger --bytes, or --length{less}"
        )
    return Experiment("full", ((1.0, kvjax.methods.full()),), setup, beside=tuple(beside))


def _policies(
    board: Board,
    get_config: Callable[..., Experiment],
    setup: Setup,
    kept: tuple[int, int] | None,
    budget_at: Callable[[Callable[[int], Made], float], int | None],
) -> tuple[tuple[tuple[Any, Made], ...], Experiment]:
    """A method's policies at every share of bytes that it can work at, and what its config returned.

    Args:
      board, setup: what to run.
      get_config: of the method.
      kept: the first and last tokens that stay; the method's own if None.
      budget_at: the budget of a policy's function at a share.
    """
    first, last = kept or (0, 0)
    protect = lambda p: p if kept is None else kvjax.protect(p, sinks=first, recent=last)
    options = inspect.signature(get_config).parameters
    same = {"setup": setup} | (_given(window=board.window) if "window" in options else {})
    made = get_config(**same)
    if "budget" not in options:
        return tuple((label, changed(policy, protect)) for label, policy in made.policies), made
    make: Any = lambda budget: changed(get_config(budget=(budget,), **same).policies[0][1], protect)
    asked = {share: budget_at(make, share) for share in board.bytes}
    each = {share: budget for share, budget in asked.items() if budget is not None}
    found = [(f"{_BYTES}{share:g}", make(budget)) for share, budget in each.items()]
    return (*found, *((f"{_LIVE}{share:g}", make(share)) for share in each if board.live)), made


# --- what was found ---

Number = Mapping[Any, Any]
"""A row of `core.table.numbers`: the mean over all tasks, its interval, and what the cache takes."""


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A part that was run.

    Attributes:
      part: what was asked.
      numbers: of every policy; perplexities, where tasks have them, else scores.
      scores: of every policy the examples', in an order that all share; for perplexities the log-likelihoods.
      contexts: the context of each example; None where no two share theirs.
      tasks: the task of each example.
      prompts: what they were asked in.
      chosen: of every method and share, where `Board.tune` chose, the first and last tokens that stay.
    """

    part: Part
    numbers: Sequence[Number]
    scores: Mapping[tuple[str, str], list[float]]
    contexts: list[Any] | None
    tasks: list[str]
    prompts: str = ""
    chosen: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)

    @property
    def full(self) -> Number:
        """The full cache's."""
        return next(n for n in self.numbers if n["method"] == "full")

    def compared(self, a: Number, b: Number) -> stats.Comparison:
        """Whether one policy is better than another on the same examples."""
        x, y = (self.scores[n["method"], n["budget"]] for n in (a, b))
        return stats.COMPARE[a["kind"]](x, y, self.contexts, tasks=self.tasks)

    def at(self, share: float) -> list[Number]:
        """Policies at a share of bytes, the best first; methods without a budget stand where they fit."""
        asked = [n for n in self.numbers if n["budget"] == f"{_BYTES}{share:g}"]
        fits = lambda n: not _asked(n) and n["method"] != "full" and n["kv_of_full"] <= share
        return sorted([*asked, *filter(fits, self.numbers)], key=lambda n: -_quality(n))


def _asked(number: Number) -> bool:
    """Whether its budget was chosen by bytes, or by live tokens."""
    return number["budget"].startswith((_BYTES, _LIVE, _OWN))


def _quality(n: Number) -> float:
    return n["value"] if n["kind"] == "score" else -n["value"]


def _name(number: Number) -> str:
    """As tables have it."""
    plain = _asked(number) or number["method"] == "full"
    return number["method"] if plain else f"{number['method']} {number['budget']}"


def judged(
    part: Part, directories: Sequence[pathlib.Path], tune: int | None = None
) -> tuple[Any, str, dict[tuple[str, str], str]]:
    """The lines of finished runs, as `core.table.lines` makes them, with a part's scores.

    Args:
      part: what was asked.
      directories: of the runs.
      tune: the seed of held-out examples.

    Returns:
      The lines; what prompts were; and what `tuned` chose.
    """
    from kvjax.experiments.core import sources, table, views  # import pandas, which takes longer than --help should

    found = sources.read(directories)
    lines = table.beside_full(found.lines) if part.beside_full else found.lines
    lines, chosen = (lines, {}) if tune is None else tuned(lines, tune)
    prompts = views.prompts(table.examples(lines), {run.name: run for run in found.runs})
    return lines, f"{prompts} {views.devices(found.runs)}", chosen


def tuned(lines: Any, seed: int) -> tuple[Any, dict[tuple[str, str], str]]:
    """Of each method and budget the lines with the setting that is best on held-out examples, without these.

    Those with the method's own setting are there, too, under "own-0.25" for "bytes-0.25".

    Args:
      lines: with all settings, as pandas' DataFrame.
      seed: of the held-out examples.

    Returns:
      The lines, and of each method and budget which first and last tokens stay. Of settings that are equally good the
      first is chosen, which is the method's own.
    """
    import pandas as pd

    from kvjax.experiments.core import table

    held, base = lines["seed"] == seed, lambda method: method.partition(_TRIED)[0]
    rows = table.examples(lines[held])
    quality = rows["value"].where(rows["kind"] == "score", -rows["value"])
    best: dict[tuple[str, str], tuple[float, str]] = {}
    means: Any = quality.groupby([rows["method"], rows["budget"]], sort=False).mean()
    for (method, budget), mean in means.items():
        if mean > best.get((base(method), budget), (-math.inf,))[0]:
            best[base(method), budget] = mean, method
    chosen = {(method, budget) for (_, budget), (_, method) in best.items()}
    shown = lines[~held]
    best_of = [pair in chosen for pair in zip(shown["method"], shown["budget"], strict=True)]
    by_default = shown[(shown["method"].map(base) == shown["method"]) & shown["budget"].str.startswith(_BYTES)]
    by_default = by_default.assign(budget=_OWN + by_default["budget"].str.removeprefix(_BYTES))
    found = pd.concat([shown[best_of].assign(method=lambda x: x["method"].map(base)), by_default])
    return found, {key: method.partition(_TRIED)[2] or "its own" for key, (_, method) in best.items()}


def measured(
    part: Part, directories: Sequence[pathlib.Path], more: Sequence[str] = (), tune: int | None = None
) -> tuple[Found, Any]:
    """What finished runs have found, and their rows as pandas' DataFrame.

    Args:
      part: what was asked.
      directories: of the runs.
      more: metrics, where answers are compared with the full cache's.
      tune: the seed of held-out examples.
    """
    from kvjax.experiments.core import table

    lines, prompts, chosen = judged(part, directories, tune)
    rows = table.examples(lines).sort_values(["task", "index"])
    every = table.numbers(lines, more if part.beside_full else ())
    written = lines.groupby(["method", "budget"])["tokens"].mean().rename("written")
    averages = every[every["task"] == table.AVERAGE] if table.AVERAGE in {*every["task"]} else every
    numbers = table.records(averages.join(written, on=["method", "budget"]))
    each = rows.groupby(["method", "budget"], sort=False)
    scores = {(str(method), str(budget)): own["value"].tolist() for (method, budget), own in each}
    first = next(own for _, own in each)
    columns = ["method", "budget", "task", "index", "context", "value", "kv_bytes", "kv_bytes_needed", "live", "metric"]
    found = Found(part, numbers, scores, table.clusters(first), first["task"].tolist(), prompts, chosen)
    return found, rows[columns].merge(table.answers(lines), how="left")


@functools.cache
def wins(found: Found, share: float) -> tuple[list[tuple[int, int]], list[stats.Comparison | None]]:
    """Of every policy at a share of bytes, best first: how many others it beats and loses to; and beside the best.

    p-values are adjusted for all pairs of the share (Holm).
    """
    here = found.at(share)
    pairs = [*itertools.combinations(range(len(here)), 2)]
    each = stats.adjusted([found.compared(here[j], here[i]) for i, j in pairs])
    decided = [(pair, c.verdict) for pair, c in zip(pairs, each, strict=True) if c.verdict != "undecided"]
    won, lost = (
        collections.Counter(pair[verdict == side] for pair, verdict in decided) for side in ("better", "worse")
    )
    of_best = {j: c for (i, j), c in zip(pairs, each, strict=True) if i == 0}
    return [(won[i], lost[i]) for i in range(len(here))], [of_best.get(i) for i in range(len(here))]


def table(found: Found, share: float) -> str | Table:
    """All methods at a share of bytes."""
    here = found.at(share)
    if not here:
        return f"No method runs at {share:.4g} of the bytes."
    labelled = lambda kind: {n["method"]: scored(n, ".1f") for n in found.numbers if n["budget"] == f"{kind}{share:g}"}
    at_live, by_default = labelled(_LIVE), labelled(_OWN)
    rows = []
    for n, (won, lost), c in zip(here, *wins(found, share), strict=True):
        verdict = "the best" if c is None else f"p = {c.p:.2g}, {c.verdict}"
        also = [at_live.get(n["method"], "")] if at_live else []
        also += [by_default.get(n["method"], ""), found.chosen.get((n["method"], n["budget"]), "")] * bool(found.chosen)
        rows.append((*_cells(n), *also, str(won), str(lost), verdict))
    also = ["at equal live tokens"] * bool(at_live)
    also += ["by its own setting", "first and last that stay"] * bool(found.chosen)
    head = (*_CELLS, *also, "better than", "worse than", f"beside {_name(here[0])}")
    known = [any(column) for column in zip(*rows, strict=True)]  # lines of an older run do not have all
    return Table([*itertools.compress(head, known)], [[*itertools.compress(row, known)] for row in rows])


_CELLS = (
    "method", "score, % or perplexity", "bytes of full", "needed", "fitted", "beside KV", "live of prompt",
    "seconds of reading", "tokens written",
)  # fmt: skip


def _cells(n: Number) -> tuple[str, ...]:
    kinds = "kv_bytes", "kv_bytes_needed", "kv_bytes_fitted", "state_bytes"
    sizes = (n["kv_of_full"] * n.get(kind, math.nan) / n["kv_bytes"] for kind in kinds)
    each = ("" if math.isnan(size) else f"{size:.1%}" for size in sizes)
    written = f"{n['written']:.1f}" if n["kind"] == "score" else ""  # of likelihoods nothing is
    read = n.get("read_seconds", math.nan)
    return _name(n), scored(n, ".1f"), *each, f"{n['live']:.1%}", "" if math.isnan(read) else f"{read:.2f}", written


def alike(found: Found, shares: Sequence[float], more: Sequence[str]) -> Table:
    """How far answers are the full cache's, as `core.table.agreement` measures, a row a policy and share of bytes."""
    from kvjax.experiments.core.table import ALIKE

    measures = *ALIKE, *more
    rows = [
        (f"{100 * share:.4g} %", _name(n), *(percent(n[x], n[f"{x}_low"], n[f"{x}_high"]) for x in measures))
        for share in shares
        for n in found.at(share)
    ]
    return Table(("bytes", "method", *measures), rows)


def beyond(found: Found, shares: Sequence[float]) -> list[Number]:
    """The full cache, and what has no budget and takes more than the largest share; by bytes."""
    more = [n for n in found.numbers if not _asked(n) and n["kv_of_full"] > max(shares)]
    return sorted(more, key=lambda n: n["kv_of_full"])


# --- pictures ---


def _kept(found: Found, number: Number) -> float:
    """What is left of the full cache's score, in percent; of perplexities the full cache's over it.

    NaN where the full cache itself scores nothing.
    """
    full = found.full["value"]
    if number["kind"] != "score":
        return 100 * full / number["value"]
    return 100 * number["value"] / full if full else math.nan


def _order(parts: Mapping[str, Found], shares: Sequence[float]) -> list[str]:
    """Methods, the best last: by how much more they keep than all do on average, where they run."""
    more = collections.defaultdict[str, list[float]](list)
    for found, share in itertools.product(parts.values(), shares):
        kept = {_name(n): _kept(found, n) for n in found.at(share)}
        for name, own in kept.items():
            more[name].append(own - sum(kept.values()) / len(kept))
    return sorted(sorted(more), key=lambda name: round(float(np.nan_to_num(more[name]).mean()), 6))  # ties by name


def heat(parts: Mapping[str, Found], shares: Sequence[float]) -> Figure:
    """Every method at every share of bytes, a panel a part: what is kept of the full cache's score, or perplexity."""
    names = _order(parts, shares)
    figure, (grid,) = canvas(len(parts), width=4.6, height=max(3.0, 0.21 * len(names) + 1.2), sharey=True)
    for axes, found in zip(grid, parts.values(), strict=True):
        full = found.full["value"]
        shown = np.full((len(names), len(shares)), np.nan)
        for j, share in enumerate(shares):
            for n in found.at(share):
                shown[names.index(_name(n)), j] = _kept(found, n)
        axes.imshow(shown, aspect="auto", cmap="cividis", vmin=0, vmax=100, origin="lower")
        for (i, j), x in np.ndenumerate(shown):
            if np.isfinite(x):
                axes.text(j, i, f"{x:.0f}", ha="center", va="center", fontsize=6, color="black" if x > 55 else "white")
        axes.grid(visible=False)
        axes.set_xticks(range(len(shares)), [f"{100 * share:.4g} %" for share in shares])
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.set_xlabel("of the full cache's bytes")
        level = f"{100 * full:.1f} %" if found.full["kind"] == "score" else f"{full:.2f}"
        axes.set_title(f"{found.part.title}\n(full cache: {level})", fontsize="medium")
    return message(figure, "What is left of the full cache's score", "percent; of perplexities full over method")


def curves(parts: Mapping[str, Found], shares: Sequence[float]) -> Figure:
    """Every method's score with its interval, a panel a part, a mark a share; what the best beats is hollow."""
    names = _order(parts, shares)
    figure, (grid,) = canvas(len(parts), width=4.6, height=max(3.0, 0.3 * len(names) + 1.2), sharey=True)
    for axes, found in zip(grid, parts.values(), strict=True):
        score = found.full["kind"] == "score"
        scale = 100 if score else 1
        for i, share in enumerate(shares):
            apart = min(0.2, 0.6 / max(len(shares) - 1, 1))  # of a row: marks of a method stand nearest to each other
            aside = apart * ((len(shares) - 1) / 2 - i)
            for k, (n, c) in enumerate(zip(found.at(share), wins(found, share)[1], strict=True)):
                ends = [scale * n[x] for x in ("value", "low", "high")]
                at, label = names.index(_name(n)) + aside, f"{100 * share:.4g} % of the bytes" if k == 0 else None
                look = {"markersize": 3, "elinewidth": 0.7, "label": label}
                mark(axes, i, at, ends, c is not None and c.verdict == "worse", **look)
        axes.set(xlabel="score, %" if score else "perplexity", title=found.part.title)
        axes.set_ylim(-0.7 - 0.8 * len(shares), len(names) - 0.3)  # the legend stands below all methods
        if score:
            axes.set_xlim(-3, 103)
        else:
            axes.set_xscale("log", subs=(2, 5))
            for axis in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
                axis("{x:g}")
        axes.set_yticks(range(len(names)), names, fontsize="x-small")
        axes.legend(fontsize="x-small", loc="lower right")
    head, each = _title(parts, shares)
    source = "hollow: worse than the best at these bytes, by a paired test; 95 % intervals"
    return message(figure, "\n".join([head.replace(", not", ",\nnot"), *each]), source)


def mark(axes: Axes, i: int, at: float, ends: Sequence[float], hollow: bool, **look: Any) -> None:
    """A value with its interval (value, low, high) at a height, in the i-th style."""
    (x, low, high), of = ends, style(i)
    face = "white" if hollow else of["color"]
    axes.errorbar([x], [at], xerr=[[x - low], [high - x]], **of | {"linestyle": "none", "markerfacecolor": face} | look)


def _title(parts: Mapping[str, Found], shares: Sequence[float]) -> tuple[str, list[str]]:
    """What is to be seen at `HEADLINE`, or the share of bytes that is nearest to it: a line, and a line a part."""
    level = lambda found, share: sum(c is None or c.verdict != "worse" for c in wins(found, share)[1])
    at = min(shares, key=lambda share: abs(share - HEADLINE))
    total = max(len(found.at(at)) for found in parts.values())
    return f"Of {total} methods at {100 * at:.4g} % of the bytes, not worse than the best:", [
        f"{level(found, at)} by {found.part.title}" for found in parts.values()
    ]


# --- the page ---


def page(board: Board, parts: Mapping[str, Found]) -> str:
    """`board.md`."""
    shares = sorted(board.bytes, reverse=True)
    head, each = _title(parts, shares)
    kept = "each method's own" if board.protect is None else "the first {} and the last {}".format(*board.protect)
    if board.tune is not None:
        kept = f"chosen among four settings on as many held-out examples (seed {board.tune})"
    kept += f"; rows that vote: {board.window}, where a method lets them" if board.window else ""
    text = "the project's text" if board.text is None else pathlib.PurePath(board.text).name
    each_seed = f" of each of the seeds {', '.join(map(str, board.seeds))}" if len(board.seeds) > 1 else ""
    blocks: list[str | Table] = [
        f"Model {board.model} in {board.dtype}, prompts of up to {board.length:,} tokens of {text}, {board.examples} "
        f"examples a task{each_seed}; tokens that always stay: {kept}. Bytes are those of the longest prompts' caches "
        "with room for the answers, whatever larger budget's slots they ran in; needed ones leave out what slots are "
        "rounded up by, fitted ones what stays empty once a prompt is read; what the state holds beside keys and "
        "values are positions and statistics. Seconds of reading are a prompt's, of all methods that share the "
        "reading. Intervals are of 95 %; p-values are of paired tests on the same examples, adjusted for all pairs "
        "of methods of a table (Holm). Better than, worse than: how many others.",
        "![What is left of the full cache's score](heat.png)",
        "![Scores with intervals](curves.png)",
    ]
    for found in parts.values():
        title = found.part.title.capitalize()
        how = collections.Counter(n.get("interval") for n in found.numbers)
        by = ", ".join(f"{method} ({count})" for method, count in how.items() if method)
        blocks += [f"{title}: {found.prompts} Intervals: {by}."] * bool(found.prompts)
        for share in shares:
            blocks += [f"## {title}, {100 * share:.4g} % of the bytes", table(found, share)]
        cells = [_cells(n) for n in beyond(found, shares)]
        blocks += [f"## {title}, the full cache and what has no budget", Table(_CELLS, cells)]
        if found.part.beside_full:
            blocks.append(f"## {title}: how far answers are the full cache's, %")
            blocks.append(alike(found, shares, board.metrics))
    return markdown(f"{head} {', '.join(each)}", *blocks)


def run(board: Board, command: list[str]) -> None:
    """Runs what is missing, and draws."""
    check_output(board.directory / "heat.png")
    shares, parts, rows = sorted(board.bytes, reverse=True), dict[str, Found](), []
    for name in board.asked:
        runs = {board.directory / "runs" / name: experiment_of(board, PARTS[name])}
        for own in board.policy:  # runs of their own, so that what has run does not run again
            experiment = experiment_of(board, PARTS[name], own)
            directory = board.directory / "runs" / f"{name}-{experiment.beside[0].name}"
            if directory in runs:
                raise ValueError(f"--policy has two methods called {experiment.beside[0].name}; rename one or its file")
            runs[directory] = experiment
        for directory, experiment in runs.items():
            job.run(experiment, directory, command)
        parts[name], found = measured(PARTS[name], [*runs], board.metrics, board.tune)
        rows.append(found.assign(part=name))
    figures = {"heat": heat(parts, shares), "curves": curves(parts, shares)}
    write_page(board.directory, "board", page(board, parts), figures, rows)


@as_command
def main(argv: Sequence[str]) -> None:
    """Parses and runs."""
    run(parsed(Board, argv, "board", __doc__), [sys.executable, *sys.argv])


if __name__ == "__main__":
    main()
