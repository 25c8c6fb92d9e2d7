"""Every method at equal bytes: what the caches of a budget cost, not how many tokens they hold.

    python experiments/figures.py frontier
    python experiments/figures.py frontier --model varied --methods snapkv h2o --bytes 0.25 --examples 8

A method's budget is the largest whose keys and values, with room for the answer, take no more than a share of the full
cache's bytes. Questions are asked in the prompt, and after compression, when they were not known. Each method and
protocol is a run of the main job in `results/frontier/runs/`, so that an interrupted frontier goes on. Written beside
them: `frontier.png`, and `frontier.md` with intervals and the differences that are significant.
"""

import dataclasses
import inspect
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import tyro
from matplotlib.figure import Figure

import kvjax
from kvjax import Policy, configs, models
from kvjax.configs.experiment import Experiment, Setup, check_distinct, check_whole
from kvjax.experiments import run as job
from kvjax.experiments.core import markdown, stats
from kvjax.experiments.core.command import check_output, plain_errors, write_figure
from kvjax.experiments.core.compiled import keep_compiled
from kvjax.experiments.core.engine import Shape, shapes
from kvjax.experiments.core.records import Line, read_lines
from kvjax.experiments.core.setup import build, find_builders
from kvjax.experiments.papers.base import canvas, message, style
from kvjax.experiments.tasks.base import Protocol
from kvjax.models.written import write_bytes

RETRIEVAL = ("single_needle", "several_needles", "multi_query", "key_value")
PROTOCOLS: tuple[Protocol, ...] = ("in_prompt", "after_compression")
TITLE = "every method at equal bytes, with intervals and significant differences"
TITLES: dict[Protocol, str] = {"in_prompt": "question in the prompt", "after_compression": "question after compression"}


@dataclasses.dataclass(frozen=True)
class Frontier:
    """What to run.

    Attributes:
      model: "embedded" or "varied" for a model that comes with the project, or a checkpoint.
      methods: configs; if not given, all that can be made for the model.
      bytes: shares of the full cache's bytes.
      examples: of each of the four retrieval tasks.
      length: tokens of a prompt.
      seed: of examples and draws.
      output: where runs and results go.
    """

    model: str = "embedded"
    methods: tuple[str, ...] = ()
    bytes: tuple[float, ...] = (0.25, 0.125)
    examples: int = 24
    length: int = 1024
    seed: int = 0
    output: pathlib.Path = pathlib.Path("results/frontier")

    def __post_init__(self):
        check_whole(1, examples=self.examples, length=self.length)
        if self.methods:
            check_distinct("methods", self.methods)
        if unknown := [name for name in self.methods if name not in configs.available()]:
            raise ValueError(f"there is no config {unknown[0]!r}; there are {', '.join(configs.available())}")
        if not self.bytes or not all(0 < share < 1 for share in self.bytes):
            raise ValueError(f"bytes {self.bytes} must be shares of the full cache between 0 and 1")

    def setup(self, protocol: Protocol) -> Setup:
        """Of the runs under one protocol."""
        return Setup(
            model=self.model,
            tasks=RETRIEVAL,
            examples=self.examples,
            length=self.length,
            protocol=protocol,
            baselines=(),
            seed=self.seed,
        )


def share_of_bytes(config: Any, policy: Policy, run: Shape) -> float:
    """Keys and values that a policy's cache takes in a run, as a share of the full cache's."""
    slots = lambda p: kvjax.make_plan(config, p, np.array(run.lengths), run.width, run.planned).num_slots
    return slots(policy) / slots(kvjax.Policy())


def budget_for(make: Callable[[int], Policy], config: Any, share: float, run: Shape) -> tuple[int, float] | None:
    """The largest budget in tokens whose cache takes no more than a share of the bytes, and what it takes.

    None where the smallest that the method can work with takes more.
    """

    def taken(budget: int) -> float | None:
        try:
            return share_of_bytes(config, make(budget), run)
        except ValueError:  # too small for what the method protects
            return None

    low, high = 1, run.width
    best: tuple[int, float] | None = None
    while low <= high:
        budget = (low + high) // 2
        found = taken(budget)
        if found is None or found <= share:
            low = budget + 1
            best = best if found is None else (budget, found)
        else:
            high = budget - 1
    return best


def experiments_of(frontier: Frontier, protocol: Protocol) -> dict[str, Experiment]:
    """One experiment a method, its policies labelled by the share of bytes that was asked for."""
    setup = frontier.setup(protocol)
    config, tokenizer = models.load(setup.source)[0].config, models.load_tokenizer(setup.source)
    prompts, _ = build(setup, find_builders(setup), tokenizer, config)
    largest = shapes(prompts, config.max_position if config.learned_positions else None)[0]
    found = {}
    for name in frontier.methods or configs.available():
        get_config = configs.find(name)[1]
        try:
            experiment = get_config(setup=setup)
        except ValueError as e:  # what has to be found of the model before
            if frontier.methods:
                raise
            print(f"without {name}: {e}")
            continue
        if "budget" not in inspect.signature(get_config).parameters:
            found[name] = dataclasses.replace(experiment, setup=setup)
            continue
        make = lambda budget, get=get_config: get(budget=(budget,), setup=setup).policies[0][1]
        each = [(share, budget_for(make, config, share, largest)) for share in frontier.bytes]
        policies = tuple((f"bytes-{share:g}", make(budget[0])) for share, budget in each if budget is not None)
        if policies:
            found[name] = Experiment(name, policies, setup)
    return found


@dataclasses.dataclass(frozen=True)
class Point:
    """One method with one budget under one protocol.

    Attributes:
      method, label: as in its run.
      scores: one a row, in the order of rows that all runs share.
      mean, low, high: retrieval and its interval.
      share: bytes of keys and values, of the full cache's.
      live: tokens that a head holds after the prompt, as a share of it.
    """

    method: str
    label: str
    scores: tuple[float, ...]
    mean: float
    low: float
    high: float
    share: float
    live: float

    @property
    def name(self) -> str:
        """As tables have it."""
        return (
            self.method if self.label.startswith("bytes-") or self.method == "full" else f"{self.method} {self.label}"
        )


def points(directory: pathlib.Path) -> list[Point]:
    """What a finished run has found; the full cache's is the first."""
    runs: dict[tuple[str, str], list[Line]] = {}
    for line in read_lines(directory / "samples.jsonl")[0].values():
        if line["task"] in RETRIEVAL:
            runs.setdefault((line["method"], line["budget"]), []).append(line)
    size = lambda own: max(line["kv_bytes"] for line in own)
    full = next(size(own) for (method, _), own in runs.items() if method == "full")
    found = []
    for (method, budget), own in runs.items():
        of_task, _, scores = zip(*sorted((s["task"], s["index"], s["score"]) for s in own), strict=True)
        live = float(np.mean([line["live"] / line["prompt_tokens"] for line in own]))
        interval = stats.interval(scores, tasks=of_task)
        found.append(Point(method, budget, scores, *interval, share=size(own) / full, live=live))
    return found


def collected(runs: Sequence[pathlib.Path]) -> list[Point]:
    """The points of all runs under one protocol, the full cache once."""
    found: dict[tuple[str, str], Point] = {}
    for directory in runs:
        for point in points(directory):
            found.setdefault((point.method, point.label), point)
    return [*found.values()]


def at(found: Sequence[Point], share: float) -> list[Point]:
    """The points of a share of bytes, best first; those without a budget where they take no more than it."""
    asked = [p for p in found if p.label == f"bytes-{share:g}"]
    others = [p for p in found if not p.label.startswith("bytes-") and p.method != "full" and p.share <= share]
    return sorted([*asked, *others], key=lambda p: -p.mean)


Ranked = list[tuple[Point, stats.Comparison | None]]
"""Methods at a share of bytes, best first, and how each differs from the best on the same questions."""


def ranked(found: Sequence[Point], share: float) -> Ranked:
    """The points of a share of bytes beside the best of them, p-values adjusted for all of them."""
    here = at(found, share)
    if not here:
        return []
    best, others = here[0], here[1:]
    compared = stats.adjusted([stats.compare(p.scores, best.scores) for p in others])
    return [(best, None), *zip(others, compared, strict=True)]


def table(found: Ranked, share: float) -> list[str]:
    """Markdown of all methods at a share of bytes."""
    if not found:
        return [f"No method runs at {share:.1%} of the bytes."]
    verdict = lambda c: ("", "the best") if c is None else (f"{100 * c.difference:+.1f}, p = {c.p:.2g}", c.verdict)
    rows = [(*_cells(point), *verdict(comparison)) for point, comparison in found]
    return markdown.table((*_CELLS, f"points beside {found[0][0].name}", "verdict"), rows)


_CELLS = "method", "retrieval, %", "bytes of full", "live of prompt"


def _cells(p: Point) -> tuple[str, ...]:
    percents = f"{100 * p.mean:.1f} [{100 * p.low:.1f}, {100 * p.high:.1f}]", f"{p.share:.1%}", f"{p.live:.1%}"
    return p.name, *percents


def beyond(found: Sequence[Point], shares: Sequence[float]) -> list[Point]:
    """The full cache, and what has no budget and takes more than the largest share; by bytes."""
    more = [p for p in found if not p.label.startswith("bytes-") and p.share > max(shares)]
    return sorted(more, key=lambda p: p.share)


def plot(by_protocol: dict[Protocol, dict[float, Ranked]]) -> Figure:
    """Retrieval of every method, a panel a protocol, a colour a share of bytes; what the best beats is hollow."""
    means: dict[str, list[float]] = {}
    for found in by_protocol.values():
        for point in (point for here in found.values() for point, _ in here):
            means.setdefault(point.name, []).append(point.mean)
    place = {name: i for i, name in enumerate(sorted(means, key=lambda name: float(np.mean(means[name]))))}
    height = max(3.0, 0.24 * len(place) + 1.0)
    figure, (grid,) = canvas(len(by_protocol), width=5.0, height=height, sharey=True)
    for axes, (protocol, found) in zip(grid, by_protocol.items(), strict=True):
        for i, (share, here) in enumerate(found.items()):
            aside = 0.18 * (1 - 2 * i / max(len(found) - 1, 1)) if len(found) > 1 else 0.0
            for point, comparison in here:
                ends = [[100 * (point.mean - point.low)], [100 * (point.high - point.mean)]]
                worse = comparison is not None and comparison.verdict == "worse"
                look = {**style(i), "linestyle": "none", "markerfacecolor": "white" if worse else style(i)["color"]}
                label = f"{share:.1%} of the bytes" if comparison is None else None
                axes.errorbar([100 * point.mean], [place[point.name] + aside], xerr=ends, label=label, **look)
        axes.set(xlabel="retrieval, %", title=TITLES[protocol], xlim=(-3, 103), ylim=(-0.7, len(place) - 0.3))
        axes.set_yticks(list(place.values()), list(place), fontsize="small")
        axes.legend(fontsize="x-small", loc="lower right")
    return message(
        figure, _title(by_protocol), "hollow: worse than the best at these bytes, by a paired test; 95 % intervals"
    )


def _title(by_protocol: dict[Protocol, dict[float, Ranked]]) -> str:
    smallest = min(share for found in by_protocol.values() for share in found)
    here = {name: found[smallest] for name, found in by_protocol.items()}
    level = {name: sum(c is None or c.verdict != "worse" for _, c in found) for name, found in here.items()}
    total = len({point.name for found in here.values() for point, _ in found})
    each = ", ".join(f"{n} with the {TITLES[name]}" for name, n in level.items())
    return f"Of {total} methods at {smallest:.1%} of the bytes, not significantly worse than the best:\n{each}"


def run(frontier: Frontier, command: list[str]) -> None:
    """Runs what is missing, and draws."""
    check_output(frontier.output / "frontier.png")
    by_protocol: dict[Protocol, list[Point]] = {}
    for protocol in PROTOCOLS:
        directories = []
        for name, experiment in experiments_of(frontier, protocol).items():
            directories.append(frontier.output / "runs" / f"{name}-{protocol}")
            job.run(experiment, directories[-1], command)
            jax.clear_caches()  # programs of all runs would be more than a process can map
        by_protocol[protocol] = collected(directories)
    shares = sorted(frontier.bytes, reverse=True)
    each = {name: {share: ranked(found, share) for share in shares} for name, found in by_protocol.items()}
    text = [f"# {_title(each)}".replace("\n", " "), "", *_about(frontier)]
    for protocol, found in by_protocol.items():
        title = f"{TITLES[protocol][0].upper()}{TITLES[protocol][1:]}"
        for share in shares:
            text += ["", f"## {title}, {share:.1%} of the bytes", "", *table(each[protocol][share], share)]
        text += ["", f"## {title}, the full cache and what has no budget", ""]
        text += markdown.table(_CELLS, [_cells(point) for point in beyond(found, shares)])
    write_figure(frontier.output / "frontier.png", plot(each))
    write_bytes(frontier.output / "frontier.md", "\n".join([*text, ""]).encode())
    print(f"written to {frontier.output}")


def _about(frontier: Frontier) -> list[str]:
    return [
        f"Model {frontier.model}, prompts of up to {frontier.length:,} tokens, {4 * frontier.examples} answers a "
        "method. Bytes are those of the longest prompts' caches. Intervals are of 95 %; p-values are of "
        "paired tests on the same questions, adjusted for all methods of a table (Holm).",
    ]


def main(argv: Sequence[str]) -> None:
    """Parses and runs."""
    with plain_errors():
        argv = keep_compiled(argv)
        frontier = tyro.cli(Frontier, args=argv, prog="experiments/figures.py frontier", description=__doc__)
        run(frontier, [sys.executable, *sys.argv])
