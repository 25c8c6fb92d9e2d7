"""Leaderboards that `experiments/compare.py` wrote, for runs that were made later or elsewhere to stand among.

A leaderboard has numbers but no rows: nothing that is found row by row, such as a paired comparison, comes from it.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.configs.experiment import Setup
from kvjax.experiments.core.provenance import definition
from kvjax.experiments.evaluation.results import resumptions
from kvjax.experiments.tasks import TASKS

FILE = "leaderboard.json"
# What a setup holds that no number depends on, or that tasks and policies are told apart by.
_ASIDE = ("examples", "data", "baselines", "baseline_budget", "task_budget", "block", "batch_size")
_FIELDS = {"method", "budget", "task", "low", "high", "live_tokens", "live_of_prompt", "kv_bytes_of_full", "kv_budget"}
_VALUES = ("score", "perplexity", "live_tokens")

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Board:
    """A leaderboard.

    Attributes:
      path: its file.
      name: what methods are told apart by that runs beside it have too.
      setup: of all its rows, as `shared` takes it.
      rows: a method at a budget on a task each, with its interval, costs and the code that made it.
    """

    path: pathlib.Path
    name: str
    setup: dict[str, Any]
    rows: tuple[Row, ...]

    def check(self, other: str, setup: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """Tries whether rows of runs were asked the same as the leaderboard's.

        Args:
          other: what the runs are called.
          setup: theirs, as `shared` takes it.
          rows: theirs; of the full cache, the live tokens on each task are those of its prompts.

        Raises:
          ValueError: another setup, checkpoint or task, or other prompts.
        """
        if found := differences(self.setup, setup):
            raise ValueError(f"{self.path} cannot be compared with {other}: {', '.join(found)}")
        ours = {r["task"]: r["live_tokens"] for r in rows if r["method"] == "full"}
        for r in self.rows:
            task = r["task"]
            if r["method"] == "full" and task in ours and not _close(r["live_tokens"], ours[task]):
                raise ValueError(
                    f"{self.path} cannot be compared with {other}: prompts of {task} have {r['live_tokens']:g} tokens "
                    f"on average against {ours[task]:g}; the task was changed in between, so run both with one code"
                )

    def beside(self, rows: Sequence[Row]) -> list[Row]:
        """The leaderboard's rows that are not among those of runs.

        A method that the runs have too keeps its name if its numbers are theirs wherever both have some, and is named
        after the leaderboard otherwise.
        """
        own = {_key(r): r for r in rows}
        taken, kept = {r["method"] for r in rows}, []
        for method in dict.fromkeys(r["method"] for r in self.rows):
            of = [r for r in self.rows if r["method"] == method]
            both = [(r, own[_key(r)]) for r in of if _key(r) in own]
            same = bool(both) and all(_close(a[v], b[v]) for a, b in both for v in _VALUES if v in a and v in b)
            if method in taken and not same:
                kept += [{**r, "method": f"{method} ({self.name})"} for r in of]
            else:
                kept += [r for r in of if _key(r) not in own]
        return kept


def _key(row: Row) -> tuple[str, str, str]:
    return row["method"], row["budget"], row["task"]


def _close(a: float, b: float) -> bool:
    """Whether two numbers are one but for rounding, which differs between machines."""
    return math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-9)


def read(directories: Sequence[pathlib.Path]) -> list[Board]:
    """The leaderboards of directories.

    Raises:
      ValueError: a directory without one, or one that is broken.
    """
    found = []
    for directory in directories:
        path = directory / FILE
        if not path.is_file():
            raise ValueError(
                f"--with {directory}: there is no {FILE}, which compare.py --output writes; name its directory"
            )
        try:
            content = json.loads(path.read_bytes())
            setup, rows = content["setup"], [{"code": "not stored", **row} for row in content["rows"]]
            whole = isinstance(setup, dict) and all(set(row) > _FIELDS for row in rows)
            if not (whole and rows and all("score" in row or "perplexity" in row for row in rows)):
                raise ValueError("it is not what compare.py writes")
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            raise ValueError(f"{path} is broken ({type(e).__name__}: {e}); make it again with compare.py") from e
        name = directory.resolve().name
        name = name if [d.resolve().name for d in directories].count(name) == 1 else str(directory)
        found.append(Board(path, name, setup, tuple(rows)))
    return found


def setup_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The setup of a run's config, with its checkpoint, tasks and the digest of its text in place of their names."""
    return config["setup"] | {name: config.get(name) for name in ("checkpoint", "tasks", "text")}


def shared(setup: Mapping[str, Any]) -> dict[str, Any]:
    """What runs have in common that may stand in one table.

    Runs that were made before an option existed stand with those that left it as it is.

    Args:
      setup: as `setup_of` returns it, or with the names of the project's tasks in place of what builds them.
    """
    known: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Setup)} | dict(setup)
    seeds = known["seed"] if isinstance(known["seed"], list | tuple) else [known["seed"]]
    known["seed"] = seeds[0] if len(seeds) == 1 else list(seeds)
    if isinstance(tasks := known["tasks"], list):
        of = lambda name: definition(TASKS[name]) if name in TASKS else name
        known["tasks"] = {t: {"examples": known["examples"] * len(seeds), "builder": of(t)} for t in tasks}
    return {name: value for name, value in known.items() if name not in _ASIDE}


def differences(setup: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """In what two setups differ that makes their numbers incomparable, with both values."""
    first, second = shared(setup), shared(other)
    there, here = ([*(s["tasks"] or ())] for s in (first, second))
    if sorted(there) != sorted(here):
        first["tasks"], second["tasks"] = ", ".join(there), ", ".join(here)
    first, second = _flat("", first), _flat("", second)
    names = dict.fromkeys([*first, *second])
    return [f"{n}={first.get(n)!r} against {second.get(n)!r}" for n in names if first.get(n) != second.get(n)]


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {k: x for inside, v in value.items() for k, x in _flat(f"{name}.{inside}".lstrip("."), v).items()}


def code_of(manifest: Mapping[str, Any]) -> str:
    """Which code made a run's lines, those that were added later included: commits, or digests where there are none."""

    def one(made: Mapping[str, Any]) -> str:
        changed = " with local changes" if made.get("git_dirty") else ""
        commit = made.get("git_commit")
        return f"commit {str(commit)[:12]}{changed}" if commit else f"digest {made.get('code')}"

    return ", ".join(dict.fromkeys(map(one, [manifest, *resumptions(dict(manifest))])))
