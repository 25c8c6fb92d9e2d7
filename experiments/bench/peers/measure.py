"""Measuring rows: common rounds of all their jobs, and the ratios that follow."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvjax.experiments.bench.peers.rows import Job, Row
from kvjax.experiments.bench.peers.workers import SIDES, JobError, Sides

Found = dict[Job, list[dict[str, float]]]

_LEAST, _MOST = 3, 9  # rounds; two where a single one takes longer than there is time


def together(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows in lists that are measured in common rounds: those that share jobs."""
    lists: list[list[Row]] = []
    for row in rows:
        weighed, jobs = row.measure == "beyond", {*row.jobs}
        alike = [
            some
            for some in lists
            if weighed == (some[0].measure == "beyond") and any(jobs & {*other.jobs} for other in some)
        ]
        joined = [other for some in alike for other in some]
        lists = [some for some in lists if some not in alike] + [[*joined, row]]
    return sorted(lists, key=lambda some: rows.index(some[0]))


def measure(
    rows: Sequence[Row], sides: Sides, seconds: float, say: Callable[[str], None]
) -> tuple[Found, dict[Job, str]]:
    """Measures the jobs of rows in common rounds, in about so many seconds; says which could not be and why.

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
        by_side = [dict.fromkeys(job for row in rows for job in row.jobs if job.side == side) for side in SIDES]
        pairs = itertools.zip_longest(*([job for job in jobs if job not in failed] for jobs in by_side))
        found: Found = {job: [] for pair in pairs for job in pair if job is not None}
        try:
            for job in found:
                say(f"{job.of}: {job.label}")
                ask("prepare", job)
            start, last, count = time.monotonic(), 0.0, 0
            while count < (_LEAST if last < seconds else 2) or (
                count < _MOST and time.monotonic() + last < start + seconds
            ):
                say(f"round {count + 1}")
                begun = time.monotonic()
                for job, rounds in found.items():
                    rounds.append(ask("weigh" if rows[0].measure == "beyond" else "run", job))
                last, count = time.monotonic() - begun, count + 1
            for job in found:
                ask("drop", job)
        except JobError:
            sides.close()
        else:
            return found, failed


def outcome(row: Row, found: Found, failed: dict[Job, str]) -> dict[str, Any]:
    """What the table's file holds of a row: the ratio is the median over rounds of that within a round.

    Raises:
      JobError: a job could not be measured, or what one adds is nothing.
    """
    missing = [f"{job.label}: {failed[job]}" for job in row.jobs if job in failed]
    if missing:
        raise JobError("; ".join(missing))
    # A token's seconds, where tokens are decoded.
    per = lambda job: job.batch * job.steps if job.kind == "decode" else 1
    ours, beside, *less = (np.array([x[row.measure] for x in found[job]]) / per(job) for job in row.jobs)
    if less:
        ours, beside = np.maximum(ours - less[0], 0), np.maximum(beside - less[1], 0)
    over, under = (beside, ours) if row.ratio == "speed" else (ours, beside)
    if not under.all():
        raise JobError(f"{row.beside.label} beside {row.ours.label}: there is nothing to divide by")
    q1, median, q3 = np.quantile(over / under, (0.25, 0.5, 0.75)).tolist()
    side = lambda job, values: {"of": job.of, "label": job.label, "value": float(np.median(values))}
    return {
        "model": row.model,
        "name": row.name,
        "text": row.text,
        "unit": "bytes" if row.measure != "seconds" else "s" if row.ours.kind != "decode" else "s/token",
        "kind": row.ratio,
        "kvjax": side(row.ours, ours),
        "beside": side(row.beside, beside),
        "ratio": {"q1": q1, "median": median, "q3": q3, "rounds": len(ours)},
        "goal": row.goal,
        "met": None if row.goal is None else bool(median >= row.goal if row.ratio == "speed" else median <= row.goal),
    }
