"""Results of rows in one form, whoever wrote them."""

import dataclasses
import itertools
import pathlib
from collections.abc import Hashable, Sequence
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Setting:
    """What numbers share that may stand beside each other.

    Attributes:
      model: its name.
      protocol: when questions are read.
      details: (name, value) of everything else, such as the length.
    """

    model: str
    protocol: str
    details: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
      name: of its directory.
      manifest: the file that says how it was made.
      lines: the file of its rows; None where there is none.
      made: (name, value) of command, commit, device and versions.
      sizes: bytes of the KV cache by (method, budget).
      setup: what it has in common with runs that it can be compared with, as `boards.setup_of` returns it; empty for
        what other scripts made.
      options: by method, those that are not the defaults of `kvjax.methods`, as far as the manifest says so.
    """

    name: str
    manifest: pathlib.Path
    lines: pathlib.Path | None
    made: tuple[tuple[str, str], ...]
    sizes: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict, compare=False)
    setup: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    options: dict[str, str] = dataclasses.field(default_factory=dict, compare=False)


@dataclasses.dataclass(frozen=True)
class Place:
    """Which number something belongs to.

    Attributes:
      setting: see `Setting`.
      task: name of the benchmark.
      variant: what else makes it this task; tasks of one name that differ in it are told apart.
      method, budget: labels.
      policy: all of it; policies of one label that differ in it are told apart.
      averaged: whether the task may be part of an average over tasks.
    """

    setting: Setting
    task: str
    variant: str
    method: str
    budget: str
    policy: str
    averaged: bool = True


@dataclasses.dataclass(frozen=True)
class Line:
    """One row's result.

    Attributes:
      place: the number that it is part of.
      run: where it was found.
      number: its line in the run's file, from 1.
      key: what it has in common with other methods' results of the same row.
      cluster: what it has in common with rows of the same context.
      kind: whether its value is a score in [0, 1] or a mean negative log-likelihood.
      value: it.
      sample: the line as it was written.
      metrics: what its score is by; empty where the line does not say.
    """

    place: Place
    run: Run
    number: int
    key: Hashable
    cluster: Hashable
    kind: Literal["score", "nll"]
    value: float
    sample: dict[str, Any] = dataclasses.field(compare=False)
    metrics: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Given:
    """A number that comes without rows.

    Attributes:
      place: the number's.
      run: where it was found.
      value: it.
      error: its standard error, if there is one.
    """

    place: Place
    run: Run
    value: float
    error: float | None


@dataclasses.dataclass
class Found:
    """What directories hold.

    Attributes:
      lines: of all runs.
      given: numbers without rows.
      reproductions: (directory, content) of what `experiments/reproduce.py` wrote.
      runs: all finished runs.
      skipped: (path, why) of what holds none.
    """

    lines: list[Line] = dataclasses.field(default_factory=list)
    given: list[Given] = dataclasses.field(default_factory=list)
    reproductions: list[tuple[pathlib.Path, dict[str, Any]]] = dataclasses.field(default_factory=list)
    runs: list[Run] = dataclasses.field(default_factory=list)
    skipped: list[tuple[pathlib.Path, str]] = dataclasses.field(default_factory=list)

    def add(self, other: "Found") -> None:
        """Takes in all that another holds."""
        for field in dataclasses.fields(self):
            getattr(self, field.name).extend(getattr(other, field.name))


def model_name(source: str) -> str:
    """How a model is called: by the last part of a path, or as it is on a hub."""
    return pathlib.PurePath(source).name if source.startswith((".", "/", "~")) or source.count("/") > 1 else source


def in_blocks(policy: str, block: Any) -> str:
    """A policy and the blocks that prompts are read in, which without eviction change nothing."""
    return policy if block is None else f"{policy}, prompts in blocks of {block}"


def ranges(numbers: Sequence[int]) -> str:
    """Whole numbers as text: "1-3, 7"."""
    ordered = sorted(set(numbers))
    runs = [[n for _, n in group] for _, group in itertools.groupby(enumerate(ordered), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
