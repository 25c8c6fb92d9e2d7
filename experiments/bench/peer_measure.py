"""Measuring the rows of `experiments/bench/peers.py`: common rounds of all their jobs, and the ratios that follow."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvjax.experiments.bench.peer_rows import Job, Row
from kvjax.experiments.bench.peer_workers import SIDES, JobError, Sides, WorkerDied


@dataclasses.dataclass
class Measured:
    """What was found of a job.

    Attributes:
      facts: what its worker said when it prepared the job, and of its weighing before the rounds.
      rounds: seconds, or bytes at the peak beyond what stays, of each round, in turns with all other jobs.
      alone: seconds while the other side was stopped.
    """

    facts: dict[str, float]
    rounds: list[float] = dataclasses.field(default_factory=list)
    alone: list[float] = dataclasses.field(default_factory=list)


def together(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows in lists that are measured in common rounds: those that share jobs."""
    lists: list[list[Row]] = []
    for row in rows:
        alike = [
            some
            for some in lists
            if (row.measure, row.rounds) == (some[0].measure, some[0].rounds)
            and any(set(row.jobs) & set(other.jobs) for other in some)
        ]
        joined = [other for some in alike for other in some]
        lists = [some for some in lists if some not in alike] + [[*joined, row]]
    return sorted(lists, key=lambda some: rows.index(some[0]))


def measure(
    rows: Sequence[Row], sides: Sides, rounds: int, rounds_alone: int, say: Callable[[str], None]
) -> tuple[dict[Job, Measured], dict[Job, str]]:
    """Measures the jobs of rows in common rounds, and says which could not be and why.

    A worker that ends takes only its job with it: it is started anew, and the others are measured without that one.
    """
    jobs = list(dict.fromkeys(job for row in rows for job in row.jobs))
    failed: dict[Job, str] = {}
    while True:
        left = [job for job in jobs if job not in failed]
        try:
            return _measure(left, sides, rounds, rounds_alone, rows[0].measure, failed, say), failed
        except _Lost as e:
            failed[e.job] = str(e)
            sides.close()


class _Lost(Exception):
    """A job that cannot be measured on, and took its worker with it or may have left it in disorder."""

    def __init__(self, job: Job, reason: str):
        super().__init__(reason)
        self.job = job


def in_turns(jobs: Sequence[Job]) -> list[Job]:
    """Jobs in their order, each side's in turn with the other's."""
    by_side = [[job for job in jobs if job.side == side] for side in SIDES]
    return [job for pair in itertools.zip_longest(*by_side) for job in pair if job is not None]


def _measure(
    jobs: Sequence[Job],
    sides: Sides,
    rounds: int,
    rounds_alone: int,
    what: str,
    failed: dict[Job, str],
    say: Callable[[str], None],
) -> dict[Job, Measured]:
    found: dict[Job, Measured] = {}

    def ask(do: str, job: Job) -> dict[str, Any]:
        try:
            return sides.ask(do, job)
        except JobError as e:
            raise _Lost(job, str(e)) from e

    for job in jobs:
        say(f"{job.side}: {job.label}")
        try:
            facts = sides.ask("prepare", job)
        except WorkerDied as e:
            raise _Lost(job, str(e)) from e
        except JobError as e:
            failed[job] = str(e)
        else:
            found[job] = Measured(facts | ask("weigh", job))
    order = [(job, found[job]) for job in in_turns(list(found))]
    seconds = what == "seconds"
    for i in range(rounds):
        say(f"round {i + 1} of {rounds}")
        for job, measured in order:
            measured.rounds.append(ask("run", job)["seconds"] if seconds else _beyond(ask("weigh", job)))
    if seconds:
        for side in SIDES:
            with sides.alone(side):
                for i in range(rounds_alone):
                    say(f"{side} alone, round {i + 1} of {rounds_alone}")
                    for job, measured in order:
                        if job.side == side:
                            measured.alone.append(ask("run", job)["seconds"])
    for job in found:
        ask("drop", job)
    return found


def _beyond(weighed: dict[str, int]) -> float:
    return weighed["rss_bytes"] - weighed["kept_bytes"]


def outcome(row: Row, found: dict[Job, Measured], failed: dict[Job, str]) -> dict[str, Any]:
    """What the table's file holds of a row.

    Of several jobs beside kvjax's the fastest counts, by its best time alone. The ratio is the median over rounds of
    the ratio within a round, with quartiles; `alone` is that of the best times alone. A goal is met if both meet it.

    Raises:
      JobError: kvjax's job, or all beside it, could not be measured, or what they add is nothing.
    """
    needed = [row.ours, *(row.less or ())]
    missing = {job.label: failed.get(job, "it was not reached") for job in row.jobs if job not in found}
    rivals = [job for job in row.beside if job in found]
    if not rivals or any(job not in found for job in needed):
        reasons = {reason: [label for label in missing if missing[label] == reason] for reason in missing.values()}
        raise JobError("; ".join(f"{', '.join(labels)}: {reason}" for reason, labels in reasons.items()))
    beside = min(rivals, key=lambda job: min(found[job].alone or found[job].rounds) / _units(job))
    series = [np.array(found[job].rounds) / _units(job) for job in (row.ours, beside)]
    if row.less is not None:
        less = [np.array(found[job].rounds) / _units(job) for job in row.less]
        series = [np.maximum(x - y, 0) for x, y in zip(series, less, strict=True)]
    ours, theirs = series
    if not (ours if row.ratio == "speed" else theirs).all():
        raise JobError(f"{beside.label} beside {row.ours.label}: there is nothing to divide by")
    ratios = theirs / ours if row.ratio == "speed" else ours / theirs
    q1, median, q3 = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    alone = None
    if found[row.ours].alone and found[beside].alone:
        a, b = (min(found[job].alone) / _units(job) for job in (row.ours, beside))
        alone = b / a if row.ratio == "speed" else a / b
    met = None
    if row.goal is not None:
        met = all(row.goal.met(ratio) for ratio in (median, alone) if ratio is not None)
    return {
        "name": row.name,
        "text": row.text,
        "measure": row.measure,
        "kind": row.ratio,
        "kvjax": _side(row.ours, found, ours),
        "beside": _side(beside, found, theirs),
        "others": {job.label: min(found[job].alone or found[job].rounds) / _units(job) for job in rivals},
        "ratio": {"median": median, "q1": q1, "q3": q3, "alone": alone},
        "goal": None if row.goal is None else dataclasses.asdict(row.goal),
        "met": met,
        "missing": missing,
    }


def _side(job: Job, found: dict[Job, Measured], series: np.ndarray) -> dict[str, Any]:
    measured = found[job]
    q1, median, q3 = np.quantile(series, (0.25, 0.5, 0.75)).tolist()
    alone = min(measured.alone) / _units(job) if measured.alone else None
    values = {"median": median, "q1": q1, "q3": q3, "alone": alone}
    job_fields = dataclasses.asdict(job)
    return {"label": job.label, "job": job_fields, **values, "rounds": series.tolist(), "facts": measured.facts}


def _units(job: Job) -> int:
    """By how much a run's seconds are divided: tokens, where it decodes some."""
    return job.batch * job.steps if job.kind in ("decode", "stream") else 1
