"""Numbers without lines that came along or were made elsewhere, for runs to stand among."""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pandas as pd

from kvjax.experiments.core import table
from kvjax.experiments.core.sources import LEADERBOARD, Found, Run, setting_of, shared

_COLUMNS: Final = (
    "method", "budget", "task", "kind", "value", "low", "high", "n", "live_tokens", "live", "kept_whole", "most_live",
    "slots", "kv_bytes", "kv_of_full", "place", "prefill_peak_bytes", "decode_peak_bytes", "metrics", "parts",
)  # fmt: skip
"""Those of `table.numbers` that a leaderboard has."""


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


def beside(numbers: pd.DataFrame, found: Found, directories: Sequence[pathlib.Path]) -> pd.DataFrame:
    """All numbers, those of leaderboards in the setting of the first run that was asked the same.

    A leaderboard has numbers but no lines, so that nothing stands beside the full cache in pairs. Of a number that both
    have, the run's is there; a method whose numbers are others is named after the leaderboard.

    Args:
      numbers: those of runs.
      found: where they are from; the leaderboards join its runs.
      directories: with a `leaderboard.json` of `experiments/report.py` each.

    Raises:
      ValueError: none there, a broken one, or one with whose setup, checkpoint and tasks no run was made.
    """
    for directory in directories:
        path = directory / LEADERBOARD
        setup, rows = _read(path)
        name = directory.resolve().name
        if [d.resolve().name for d in directories].count(name) > 1:
            name = str(directory)
        where = _place(path, setup, rows, numbers, found)
        code = ", ".join(dict.fromkeys(str(r["code"]) for r in rows))
        options = {r["method"]: str(r["options"]) for r in rows if "options" in r}
        run = Run(name, path, None, [("code", code)], setup, where, options)
        own = table.records(numbers[numbers["setting"] == where])
        found.runs.append(run)
        added = [r | {"setting": where, "runs": (name,)} for r in _others(rows, own, name)]
        numbers = table.with_given(numbers, added)
    return numbers


def _read(path: pathlib.Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The setup of a leaderboard, and its numbers in the columns of `table.numbers`."""
    if not path.is_file():
        raise ValueError(
            f"--with {path.parent}: there is no {path.name}, which report.py writes of runs of one setup; name its "
            "directory"
        )
    try:
        content = json.loads(path.read_bytes())
        setup, rows = content["setup"], content["rows"]
        if not isinstance(setup, dict) or not rows or not all({*row} >= {*_COLUMNS, "code"} for row in rows):
            raise ValueError("it is not what report.py writes")
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise ValueError(f"{path} is broken ({type(e).__name__}: {e}); make it again with report.py") from e
    return setup, rows


def _place(
    path: pathlib.Path, setup: dict[str, Any], rows: Sequence[dict[str, Any]], numbers: pd.DataFrame, found: Found
) -> str:
    """The setting of the first run that was asked what a leaderboard's were; one of its own where there are no runs.

    Raises:
      ValueError: there is none; the reason of the first run stands for all.
    """
    reasons = []
    if not found.runs:
        return setting_of(setup)
    for run in (run for run in found.runs if run.setup):
        if differing := differences(setup, run.setup):
            reasons.append(f"{path} cannot be compared with {run.name}: {', '.join(differing)}")
            continue
        here = numbers[(numbers["setting"] == run.setting) & (numbers["method"] == "full")]
        ours = dict(zip(here["task"], here["live_tokens"], strict=True))
        theirs = {r["task"]: r["live_tokens"] for r in rows if r["method"] == "full"}
        other = [task for task, live in theirs.items() if task in ours and not _close(live, ours[task])]
        if not other:
            return run.setting
        reasons.append(
            f"{path} cannot be compared with {run.name}: prompts of {other[0]} have {theirs[other[0]]:g} tokens on "
            f"average against {ours[other[0]]:g}; the task was changed in between, so run both with one code"
        )
    raise ValueError(reasons[0] if reasons else f"{path} has no run of experiments/run.py to stand beside")


def _others(rows: Sequence[dict[str, Any]], own: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The numbers of a leaderboard that are not among those of runs; averages over the same tasks alone."""
    key = lambda r: (r["method"], r["budget"], r["task"])
    ours, taken, kept = {key(r): r for r in own}, {r["method"] for r in own}, []
    parts = {frozenset(r["parts"].split(", ")) for r in own if r["task"] == table.AVERAGE}
    rows = [r for r in rows if r["task"] != table.AVERAGE or not own or frozenset(r["parts"].split(", ")) in parts]
    for method in dict.fromkeys(r["method"] for r in rows):
        of = [r for r in rows if r["method"] == method]
        both = [(r, ours[key(r)]) for r in of if key(r) in ours]
        same = bool(both) and all(_close(a[v], b[v]) for a, b in both for v in ("value", "live_tokens"))
        if method in taken and not same:
            kept += [{**r, "method": f"{method} ({name})"} for r in of]
        else:
            kept += [r for r in of if key(r) not in ours]
    return kept


def _close(a: float, b: float) -> bool:
    """Whether two numbers are one but for rounding, which differs between machines, or one is not known."""
    return a != a or b != b or math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-9)


def stored(numbers: pd.DataFrame, found: Found) -> dict[str, Any] | None:
    """What makes numbers a leaderboard, their setup and rows; None where runs have no setup, or several."""
    runs = [run for run in found.runs if run.setup]
    if not runs or any(differences(run.setup, runs[0].setup) for run in runs):
        return None
    code = {run.name: dict(run.made).get("code", "not stored") for run in found.runs}
    options = {method: given for run in found.runs for method, given in run.options.items()}
    rows = []
    for r in table.records(numbers[(numbers["setting"] == runs[0].setting) & (numbers["kind"] != "given")]):
        own = r.get("code")
        row = {name: None if r[name] != r[name] else r[name] for name in _COLUMNS}
        row["code"] = own if isinstance(own, str) else ", ".join(dict.fromkeys(code[n] for n in r["runs"]))
        rows.append(row | ({"options": options[r["method"]]} if r["method"] in options else {}))
    return {"setup": runs[0].setup, "rows": rows}
