"""From lines to numbers: means with intervals, beside the full cache on the same rows."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Literal

import numpy as np
from tqdm import tqdm

from kvjax.analysis import Interval
from kvjax.experiments.core import stats
from kvjax.experiments.core.stats import Comparison
from kvjax.experiments.evaluation import report
from kvjax.experiments.page.lines import Found, Given, Line, Place, Run, Setting

AVERAGE = "average"
Kind = Literal["score", "nll", "given"]


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """One number: a method at a budget on a task, or on average over tasks.

    Attributes:
      setting, task, method, budget: which.
      kind: a "score" in [0, 1], a perplexity ("nll"), or a number that was "given" without rows.
      value: the number and its 95 % interval, nan where there is none.
      lines: its rows; none of a leaderboard's numbers.
      runs: where they were found.
      policy: all of the policy.
      against: the paired comparison with the full cache, adjusted for all methods and budgets on the task.
      live: live tokens a head after the prompt, as a share of the prompt; None where it was not measured.
      kv: allocated bytes of the KV cache, of the full cache's; None where not known.
      place: the budget as a share of the prompt; None where that is not known.
      parts: the tasks of an average.
    """

    setting: Setting
    task: str
    method: str
    budget: str
    kind: Kind
    value: Interval
    lines: tuple[Line, ...]
    runs: tuple[Run, ...]
    policy: str
    against: Comparison | None = None
    live: float | None = None
    kv: float | None = None
    place: float | None = None
    parts: tuple[str, ...] = ()

    @property
    def metrics(self) -> tuple[str, ...]:
        """Those that its rows are scored by, as far as the runs say."""
        return tuple(sorted({metric for line in self.lines for metric in line.metrics}))

    @property
    def name(self) -> tuple[str, str]:
        """Method and budget."""
        return self.method, self.budget


def cells(found: Found) -> list[Cell]:
    """Every number, in the order of settings, methods, budgets and tasks as they were found, averages first.

    Rows of runs that differ in nothing are taken together, each once. What is not finite is no row. An average is over
    the tasks that every method of a setting has, each weighing the same; perplexities are not averaged.
    """
    groups: dict[Place, dict[Hashable, Line]] = {}
    for line in _named(found.lines):
        if math.isfinite(line.value):
            groups.setdefault(line.place, {}).setdefault(line.key, line)
    made = []
    count = len(groups) + len({(p.setting, p.method, p.budget) for p in groups})
    with tqdm(total=count, unit="number", leave=False, disable=None) as bar:  # resampling takes a while
        for setting in dict.fromkeys(p.setting for p in groups):
            own = {p: tuple(rows.values()) for p, rows in groups.items() if p.setting == setting}
            made += _adjusted(_of_averages(own, bar.update))
            for task in dict.fromkeys(p.task for p in own):
                made += _adjusted(_of_task({p: rows for p, rows in own.items() if p.task == task}, bar.update))
    given: dict[Place, Given] = {}
    for each in found.given:
        given.setdefault(each.place, each)
    made += [_given(each) for each in given.values()]
    return in_order(made)


def in_order(made: Sequence[Cell]) -> list[Cell]:
    """Numbers by setting, method, budget and task, each in the order in which it is first found."""
    order = [dict.fromkeys(getattr(c, key) for c in made) for key in ("setting", "method", "budget", "task")]
    ranks = [{value: i for i, value in enumerate(each)} for each in order]
    return sorted(
        made, key=lambda c: tuple(r[x] for r, x in zip(ranks, (c.setting, c.method, c.budget, c.task), strict=True))
    )


def _named(lines: Sequence[Line]) -> Iterator[Line]:
    """The lines, with names of their own for policies and tasks that have one name but differ."""
    policies: dict[tuple[Setting, str, str], dict[str, str]] = {}
    tasks: dict[Hashable, dict[str, str]] = {}
    for line in lines:
        p = line.place
        policies.setdefault((p.setting, p.method, p.budget), {}).setdefault(p.policy, line.run.name)
        tasks.setdefault((p.setting, p.task), {}).setdefault(p.variant, line.run.name)
    several = {(s, m) for (s, m, _), of in policies.items() if len(of) > 1}
    for line in lines:
        p = line.place
        of = policies[p.setting, p.method, p.budget]
        method = f"{p.method} ({of[p.policy]})" if (p.setting, p.method) in several else p.method
        of = tasks[p.setting, p.task]
        task = f"{p.task} ({of[p.variant]})" if len(of) > 1 else p.task
        yield dataclasses.replace(line, place=dataclasses.replace(p, method=method, task=task))


def is_full(method: str) -> bool:
    """Whether a method is the full cache, whatever it was told apart by."""
    return method == "full" or method.startswith("full (")


def _of_task(groups: dict[Place, tuple[Line, ...]], done: Callable[[], object]) -> list[Cell]:
    """The numbers of one task; `done` is called after each."""
    full = next((rows for p, rows in groups.items() if is_full(p.method)), ())
    baseline = {line.key: line for line in full}
    made = []
    for place, rows in groups.items():
        kind = rows[0].kind
        values, clusters = [line.value for line in rows], _clusters(rows)
        interval = (stats.perplexity if kind == "nll" else stats.interval)(values, clusters)
        against = None
        if not is_full(place.method) and all(line.key in baseline for line in rows):
            compare = stats.compare_perplexity if kind == "nll" else stats.compare
            against = compare(values, [baseline[line.key].value for line in rows], clusters)
        made.append(_cell(place, kind, interval, rows, against))
        done()
    return made


def _clusters(rows: Sequence[Line]) -> list[Hashable] | None:
    found: list[Hashable] = [(line.place.task, line.cluster) for line in rows]
    return found if len(set(found)) < len(found) else None


def _cell(place: Place, kind: Kind, value: Interval, rows: tuple[Line, ...], against: Comparison | None) -> Cell:
    prompts = [line.sample["prompt_tokens"] for line in rows if "prompt_tokens" in line.sample]
    live = [line.sample["live"] / line.sample["prompt_tokens"] for line in rows if "live" in line.sample]
    runs = tuple(dict.fromkeys(line.run for line in rows))
    label = str(rows[0].sample.get("method")), place.budget  # as the run has it, whatever it is called beside others
    size, whole = runs[0].sizes.get(label), runs[0].sizes.get(("full", "1.0"))
    kv = size / whole if size and whole else None
    measured = float(np.mean(live)) if live else None
    return Cell(
        place.setting, place.task, place.method, place.budget, kind, value, rows, runs, place.policy, against, measured,
        kv, _share(place.budget, measured, float(np.mean(prompts)) if prompts else None),
    )  # fmt: skip


def _share(budget: str, live: float | None, prompt: float | None) -> float | None:
    """A budget as a share of the prompt; live tokens where it is no number."""
    if not report.has_budget(budget):
        return live
    if "." in budget:
        return float(budget)
    return None if prompt is None else int(budget) / prompt


def _of_averages(groups: dict[Place, tuple[Line, ...]], done: Callable[[], object]) -> list[Cell]:
    """The mean over tasks, for every method and budget; `done` is called after each."""
    runs: dict[tuple[str, str], dict[str, tuple[Place, tuple[Line, ...]]]] = {}
    for place, rows in groups.items():
        of = runs.setdefault((place.method, place.budget), {})
        if place.averaged and rows[0].kind == "score":
            of[place.task] = place, rows
    tasks = [t for t in dict.fromkeys(t for of in runs.values() for t in of) if all(t in of for of in runs.values())]
    if len(tasks) < 2:
        return []
    full = next((of for (method, _), of in runs.items() if is_full(method)), None)
    baseline = {} if full is None else {(t, line.key): line.value for t in tasks for line in full[t][1]}
    made = []
    for (method, _), of in runs.items():
        place, parts = of[tasks[0]][0], [of[t][1] for t in tasks]
        rows = tuple(itertools.chain(*parts))
        clusters, keys = _clusters(rows), [(line.place.task, line.key) for line in rows]
        values, of_task = [line.value for line in rows], [task for task, _ in keys]
        interval = stats.interval(values, clusters, tasks=of_task)
        against = None
        if not is_full(method) and all(key in baseline for key in keys):
            against = stats.compare(values, [baseline[key] for key in keys], clusters, tasks=of_task)
        cell = _cell(dataclasses.replace(place, task=AVERAGE), "score", interval, rows, against)
        made.append(dataclasses.replace(cell, parts=tuple(tasks)))
        done()
    return made


def _adjusted(made: list[Cell]) -> list[Cell]:
    """The cells, with the p-values of all comparisons among them adjusted."""
    compared = [i for i, cell in enumerate(made) if cell.against is not None]
    adjusted = stats.adjusted([c for i in compared if (c := made[i].against) is not None])
    for i, comparison in zip(compared, adjusted, strict=True):
        made[i] = dataclasses.replace(made[i], against=comparison)
    return made


def _given(number: Given) -> Cell:
    """A number without rows; its interval is that of a normal distribution."""
    place, mean = number.place, number.value
    half = math.nan if number.error is None else 1.959964 * number.error
    interval = Interval(mean, mean - half, mean + half)
    return Cell(
        place.setting,
        place.task,
        place.method,
        place.budget,
        "given",
        interval,
        (),
        (number.run,),
        place.policy,
        place=_share(place.budget, None, None),
    )
