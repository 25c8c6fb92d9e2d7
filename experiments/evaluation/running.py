"""Runs what a results directory lacks: the device computes a batch while the host scores and writes the last one."""

import concurrent.futures
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from kvjax.experiments import stopping
from kvjax.experiments.evaluation import report
from kvjax.experiments.evaluation.batches import Bucket, Row
from kvjax.experiments.evaluation.evaluate import Evaluator, Outcome
from kvjax.experiments.evaluation.results import Results
from kvjax.experiments.tasks import Example


def run_missing(
    evaluators: Mapping[tuple[str, str], tuple[Evaluator, Sequence[Bucket]]], results: Results, kept: Collection[str]
) -> None:
    """Runs the rows of the examples that `results` lacks, and what its costs and kept positions lack.

    Args:
      evaluators: one for every method and budget, and the rows that it runs, the largest first.
      results: where lines go, one as soon as all rows of an example are done.
      kept: the runs whose positions of one prompt are kept already.
    """
    expected = results.expected()
    done = sum(key in results.samples for key in expected)
    with tqdm(total=len(expected), initial=done, unit="example", file=sys.stdout) as bar:
        for (method, budget), (evaluator, buckets) in evaluators.items():
            run = _Run(method, budget, results, evaluator)
            shown = _shown(buckets, [key[2:] for key in expected if key[:2] == (method, budget)])
            for bucket in buckets:
                unseen = shown if run.label not in kept else None
                missing = [b for b in bucket.batches if any(run.lacks(row) or row.example is unseen for row in b)]
                if missing or (bucket is buckets[0] and run.label not in results.costs):
                    bar.set_description(f"{method} {budget}: compiling")
                    cost = evaluator.compile(bucket)
                    if bucket is buckets[0]:
                        results.set_cost(method, budget, dataclasses.asdict(cost))
                bar.set_description(f"{method} {budget}")
                work = functools.partial(evaluator.run, bucket, shown=unseen)
                with stopping.finishing("the examples that run"):
                    for outcomes, positions in ahead(work, missing):
                        if positions is not None:
                            report.save_kept(results.directory, results.config, run.label, positions)
                        bar.update(run.take(outcomes))
            evaluator.release()


def _shown(buckets: Sequence[Bucket], keys: Sequence[tuple[str, int]]) -> Example:
    """The example whose kept positions are plotted, of those with a task and index of `keys`."""
    rows: dict[tuple[str, int], list[Row]] = {}
    for row in (row for b in buckets for batch in b.batches for row in batch):
        rows.setdefault((row.example.task, row.example.index), []).append(row)
    length = lambda key: float(np.mean([len(row.prompt) for row in rows[key]]))
    return rows[max(keys, key=lambda key: report.prominence(key[0], length(key)))][0].example


class _Run:
    """One method and budget: outcomes of rows, which become lines as examples are complete."""

    def __init__(self, method: str, budget: str, results: Results, evaluator: Evaluator):
        self.method, self.budget, self.label = method, budget, f"{method}@{budget}"
        self.results, self.evaluator = results, evaluator
        self._parts: dict[int, dict[int, Outcome]] = {}

    def lacks(self, row: Row) -> bool:
        """Whether there is no line of the row's example."""
        return (self.method, self.budget, row.example.task, row.example.index) not in self.results.samples

    def take(self, outcomes: Sequence[Outcome]) -> int:
        """Writes the lines that outcomes complete. Returns how many."""
        lines = []
        for outcome in outcomes:
            row = outcome.row
            parts = self._parts.setdefault(id(row.example), {})
            parts[row.number] = outcome
            if len(parts) == row.count and self.lacks(row):
                lines.append(self._line(row.example, [*self._parts.pop(id(row.example)).values()]))
        self.results.append(lines)
        return len(lines)

    def _line(self, example: Example, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        key = {"method": self.method, "budget": self.budget, "task": example.task, "index": example.index}
        return {**key, **self.evaluator.line(example, outcomes)}


_X = TypeVar("_X")
_Y = TypeVar("_Y")


def ahead(function: Callable[[_X], _Y], items: Iterable[_X]) -> Iterator[_Y]:
    """What a function makes of each item, in a thread that is one item ahead of whoever takes the results.

    After a signal no item is begun.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        running: list[concurrent.futures.Future[_Y]] = []
        try:
            for item in itertools.takewhile(lambda _: not stopping.asked(), items):
                running.append(thread.submit(function, item))
                if len(running) > 1:
                    yield running.pop(0).result()
            yield from (future.result() for future in running)
        finally:
            thread.shutdown(cancel_futures=True)
