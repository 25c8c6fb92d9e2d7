"""Every method at equal bytes: what the caches of a budget cost, not how many tokens they hold.

    python experiments/figures.py frontier
    python experiments/figures.py frontier --model varied --methods snapkv h2o --bytes 0.25 --examples 8

A method's budget is the largest whose keys and values, with room for the answer, take no more than a share of the full
cache's bytes. Questions are asked in the prompt, and after compression, when they were not known. Each method and
protocol is a run of the main job in `results/frontier/runs/`, so that an interrupted frontier goes on. Written beside
them: `frontier.png`, and `frontier.md` with intervals and the differences that are significant.
"""

import bisect
import dataclasses
import inspect
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
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
from kvjax.experiments.core.compiled import read_cache_option
from kvjax.experiments.core.engine import Shape, shapes
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


def budget_for(make: Callable[[int], Policy], config: Any, share: float, run: Shape) -> int | None:
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
        policies = tuple((f"bytes-{share:g}", make(budget)) for share, budget in each if budget is not None)
        if policies:
            found[name] = Experiment(name, policies, setup)
    return found


Number = Mapping[Any, Any]
"""A row of `core.table.numbers`: the mean over all tasks, its interval, and what the cache takes."""
Scores = Mapping[tuple[str, str], list[float]]
"""Of every method and budget, in the order of rows that all share."""
Ranked = list[tuple[Number, stats.Comparison | None]]
"""Methods at a share of bytes, best first, and how each differs from the best on the same questions."""


def read_runs(directories: Sequence[pathlib.Path]) -> tuple[list[Number], Scores]:
    """What finished runs under one protocol have found over all tasks, and the scores behind it."""
    from kvjax.experiments.core import sources, table  # import pandas, which takes longer than --help should

    lines = sources.read(directories).lines
    numbers: list[Number] = [n for n in table.records(table.numbers(lines)) if n["task"] == table.AVERAGE]
    rows = table.examples(lines).sort_values(["task", "index"]).groupby(["method", "budget"])["value"]
    return numbers, {(str(method), str(budget)): own.tolist() for (method, budget), own in rows}


def _asked(number: Number) -> bool:
    """Whether its budget was chosen by bytes."""
    return number["budget"].startswith("bytes-")


def _name(number: Number) -> str:
    """As tables have it."""
    plain = _asked(number) or number["method"] == "full"
    return number["method"] if plain else f"{number['method']} {number['budget']}"


def ranked(numbers: Sequence[Number], scores: Scores, share: float) -> Ranked:
    """What stands at a share of bytes beside the best of it, p-values adjusted for all.

    Methods without a budget stand where they take no more than it.
    """
    asked = [n for n in numbers if n["budget"] == f"bytes-{share:g}"]
    fits = lambda n: not _asked(n) and n["method"] != "full" and n["kv_of_full"] <= share
    here = sorted([*asked, *filter(fits, numbers)], key=lambda n: -n["value"])
    best, *of = (scores[n["method"], n["budget"]] for n in here) if here else [[]]
    return [*zip(here, [None, *stats.adjusted([stats.compare(own, best) for own in of])], strict=False)]


def table(found: Ranked, share: float) -> list[str]:
    """Markdown of all methods at a share of bytes."""
    if not found:
        return [f"No method runs at {share:.1%} of the bytes."]
    verdict = lambda c: ("", "the best") if c is None else (f"{100 * c.difference:+.1f}, p = {c.p:.2g}", c.verdict)
    rows = [(*_cells(number), *verdict(comparison)) for number, comparison in found]
    return markdown.table((*_CELLS, f"points beside {_name(found[0][0])}", "verdict"), rows)


_CELLS = "method", "retrieval, %", "bytes of full", "live of prompt"


def _cells(n: Number) -> tuple[str, ...]:
    ends = f"[{100 * n['low']:.1f}, {100 * n['high']:.1f}]"
    return _name(n), f"{100 * n['value']:.1f} {ends}", f"{n['kv_of_full']:.1%}", f"{n['live']:.1%}"


def beyond(numbers: Sequence[Number], shares: Sequence[float]) -> list[Number]:
    """The full cache, and what has no budget and takes more than the largest share; by bytes."""
    more = [n for n in numbers if not _asked(n) and n["kv_of_full"] > max(shares)]
    return sorted(more, key=lambda n: n["kv_of_full"])


def plot(by_protocol: dict[Protocol, dict[float, Ranked]]) -> Figure:
    """Retrieval of every method, a panel a protocol, a colour a share of bytes; what the best beats is hollow."""
    means: dict[str, list[float]] = {}
    for found in by_protocol.values():
        for number in (number for here in found.values() for number, _ in here):
            means.setdefault(_name(number), []).append(number["value"])
    place = {name: i for i, name in enumerate(sorted(means, key=lambda name: float(np.mean(means[name]))))}
    height = max(3.0, 0.24 * len(place) + 1.0)
    figure, (grid,) = canvas(len(by_protocol), width=5.0, height=height, sharey=True)
    for axes, (protocol, found) in zip(grid, by_protocol.items(), strict=True):
        for i, (share, here) in enumerate(found.items()):
            aside = 0.18 * (1 - 2 * i / max(len(found) - 1, 1)) if len(found) > 1 else 0.0
            for n, comparison in here:
                ends = [[100 * (n["value"] - n["low"])], [100 * (n["high"] - n["value"])]]
                worse = comparison is not None and comparison.verdict == "worse"
                look = {**style(i), "linestyle": "none", "markerfacecolor": "white" if worse else style(i)["color"]}
                label = f"{share:.1%} of the bytes" if comparison is None else None
                axes.errorbar([100 * n["value"]], [place[_name(n)] + aside], xerr=ends, label=label, **look)
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
    total = len({_name(number) for found in here.values() for number, _ in found})
    each = ", ".join(f"{n} with the {TITLES[name]}" for name, n in level.items())
    return f"Of {total} methods at {smallest:.1%} of the bytes, not significantly worse than the best:\n{each}"


def run(frontier: Frontier, command: list[str]) -> None:
    """Runs what is missing, and draws."""
    check_output(frontier.output / "frontier.png")
    found: dict[Protocol, tuple[list[Number], Scores]] = {}
    for protocol in PROTOCOLS:
        directories = []
        for name, experiment in experiments_of(frontier, protocol).items():
            directories.append(frontier.output / "runs" / f"{name}-{protocol}")
            job.run(experiment, directories[-1], command)
            jax.clear_caches()  # programs of all runs would be more than a process can map
        found[protocol] = read_runs(directories)
    shares = sorted(frontier.bytes, reverse=True)
    each = {name: {share: ranked(*of, share) for share in shares} for name, of in found.items()}
    text = [
        f"# {_title(each)}".replace("\n", " "),
        "",
        f"Model {frontier.model}, prompts of up to {frontier.length:,} tokens, {4 * frontier.examples} answers a "
        "method. Bytes are those of the longest prompts' caches. Intervals are of 95 %; p-values are of "
        "paired tests on the same questions, adjusted for all methods of a table (Holm).",
    ]
    for protocol, (numbers, _) in found.items():
        title = TITLES[protocol].capitalize()
        for share in shares:
            text += ["", f"## {title}, {share:.1%} of the bytes", "", *table(each[protocol][share], share)]
        text += ["", f"## {title}, the full cache and what has no budget", ""]
        text += markdown.table(_CELLS, [_cells(n) for n in beyond(numbers, shares)])
    write_figure(frontier.output / "frontier.png", plot(each))
    write_bytes(frontier.output / "frontier.md", "\n".join([*text, ""]).encode())
    print(f"written to {frontier.output}")


def main(argv: Sequence[str]) -> None:
    """Parses and runs."""
    with plain_errors():
        argv = read_cache_option(argv)
        frontier = tyro.cli(Frontier, args=argv, prog="experiments/figures.py frontier", description=__doc__)
        run(frontier, [sys.executable, *sys.argv])
