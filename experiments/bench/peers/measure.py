"""Measuring rows: common rounds of all their jobs, and the ratios that follow."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvjax.experiments.bench.peers.rows import GOALS, Job, Row
from kvjax.experiments.bench.peers.workers import SIDES, JobError, Sides


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

    def best(self, job: Job) -> float:
        """The least of what was measured alone, or in turns if nothing was, by the job's units."""
        return min(self.alone or self.rounds) / _units(job)


def together(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows in lists that are measured in common rounds: those that share jobs."""
    lists: list[list[Row]] = []
    for row in rows:
        how = lambda row: (row.measure, row.rounds)
        alike = [
            some for some in lists if how(row) == how(some[0]) and any({*row.jobs} & {*other.jobs} for other in some)
        ]
        joined = [other for some in alike for other in some]
        lists = [some for some in lists if some not in alike] + [[*joined, row]]
    return sorted(lists, key=lambda some: rows.index(some[0]))


def measure(
    rows: Sequence[Row], sides: Sides, rounds: int, rounds_alone: int, say: Callable[[str], None]
) -> tuple[dict[Job, Measured], dict[Job, str]]:
    """Measures the jobs of rows in common rounds, and says which could not be and why.

    A job that fails may take its worker with it, or leave it in disorder: workers are started anew, and the others are
    measured without that job.
    """
    failed: dict[Job, str] = {}

    def ask(do: str, job: Job) -> dict[str, Any]:
        try:
            return sides.ask(do, job)
        except JobError as e:
            failed[job] = str(e)
            raise

    while True:
        by_side = [[job for row in rows for job in row.jobs if job.side == side] for side in SIDES]
        ours, theirs = ([job for job in dict.fromkeys(jobs) if job not in failed] for jobs in by_side)
        turns = [job for pair in itertools.zip_longest(ours, theirs) for job in pair if job is not None]
        found: dict[Job, Measured] = {}
        try:
            for job in turns:
                say(f"{job.side}: {job.label}")
                found[job] = Measured(ask("prepare", job) | ask("weigh", job))
            for i in range(rounds):
                say(f"round {i + 1} of {rounds}")
                for job, measured in found.items():
                    if rows[0].measure == "seconds":
                        measured.rounds.append(ask("run", job)["seconds"])
                    else:
                        weighed = ask("weigh", job)
                        measured.rounds.append(weighed["rss_bytes"] - weighed["kept_bytes"])
            for side in SIDES if rows[0].measure == "seconds" else ():
                with sides.alone(side):
                    for i in range(rounds_alone):
                        say(f"{side} alone, round {i + 1} of {rounds_alone}")
                        for job in (job for job in turns if job.side == side):
                            found[job].alone.append(ask("run", job)["seconds"])
            for job in turns:
                ask("drop", job)
        except JobError:
            sides.close()
        else:
            return found, failed


def outcome(row: Row, found: dict[Job, Measured], failed: dict[Job, str]) -> dict[str, Any]:
    """What the table's file holds of a row.

    Of several jobs beside kvjax's the fastest counts, by its best time alone. The ratio is the median over rounds of
    the ratio within a round, with quartiles; `alone` is that of the best times alone. A goal is met if both meet it.

    Raises:
      JobError: kvjax's job, or all beside it, could not be measured, or what they add is nothing.
    """
    missing = {job.label: failed.get(job, "it was not reached") for job in row.jobs if job not in found}
    rivals = {job: found[job].best(job) for job in row.beside if job in found}
    if not rivals or any(job not in found for job in (row.ours, *(row.less or ()))):
        reasons = {reason: [label for label in missing if missing[label] == reason] for reason in missing.values()}
        raise JobError("; ".join(f"{', '.join(labels)}: {reason}" for reason, labels in reasons.items()))
    ours, beside = row.ours, min(rivals, key=lambda job: rivals[job])
    per_unit = lambda job: np.array(found[job].rounds) / _units(job)
    series = {job: per_unit(job) for job in (ours, beside)}
    for job, less in zip((ours, beside), row.less or (), strict=False):
        series[job] = np.maximum(series[job] - per_unit(less), 0)
    over, under = (beside, ours) if row.ratio == "speed" else (ours, beside)
    if not series[under].all():
        raise JobError(f"{beside.label} beside {ours.label}: there is nothing to divide by")
    ratio = _spread(series[over] / series[under])
    alone = found[ours].alone and found[beside].alone
    ratio["alone"] = found[over].best(over) / found[under].best(under) if alone else None
    goal, met = GOALS.get(row.name), None
    if goal is not None:
        reached = [x for x in (ratio["median"], ratio["alone"]) if x is not None]
        met = min(reached) >= goal if row.bound == "at least" else max(reached) <= goal
    return {
        "name": row.name,
        "text": row.text,
        "measure": row.measure,
        "kind": row.ratio,
        "kvjax": _side(ours, found[ours], series[ours]),
        "beside": _side(beside, found[beside], series[beside]),
        "others": {job.label: best for job, best in rivals.items()},
        "ratio": ratio,
        "goal": None if goal is None else {"ratio": goal, "bound": row.bound},
        "met": met,
        "missing": missing,
    }


def _spread(values: np.ndarray) -> dict[str, float | None]:
    return dict(zip(("q1", "median", "q3"), np.quantile(values, (0.25, 0.5, 0.75)).tolist(), strict=True))


def _side(job: Job, measured: Measured, series: np.ndarray) -> dict[str, Any]:
    values = {**_spread(series), "alone": measured.best(job) if measured.alone else None, "rounds": series.tolist()}
    return {"label": job.label, "job": dataclasses.asdict(job), **values, "facts": measured.facts}


def _units(job: Job) -> int:
    """By how much a run's seconds are divided: tokens, where it decodes some."""
    return job.batch * job.steps if job.kind in ("decode", "stream") else 1
