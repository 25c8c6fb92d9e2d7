"""What the lines of a run come to: scores with intervals, beside the full cache on the same rows, and costs."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from kvjax.experiments.core import stats
from kvjax.experiments.evaluation.agreement import ALIKE, agreement, means
from kvjax.experiments.tasks import RETRIEVAL

Sample = dict[str, Any]
Run = tuple[str, str]

TIMED = ("prefill_seconds", "decode_tokens_per_second")
# Columns that the machine decides.
TIMES = (*TIMED, *(f"{name}_{end}" for name in TIMED for end in ("low", "high")), "timed_batches", "timed_coverage")


def summarise(samples: Sequence[Sample], costs: dict[str, Any], bad: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """A row for every method, budget and task, one for the mean of the retrieval tasks, and the rows that are none.

    In that mean each task weighs the same. `metrics` of a row are those that its scores are by.
    `against_full` of a row is the paired comparison with the full cache, its p-value adjusted for all methods and
    budgets that are compared on the task; `agreement` is how far outputs are the full cache's.
    """
    runs = list(dict.fromkeys((s["method"], s["budget"]) for s in samples))
    tasks = list(dict.fromkeys(s["task"] for s in samples))
    full_bytes = next((c["kv_bytes"] for k, c in costs.items() if k.startswith("full@")), None)

    def rows(name: str, of: Iterable[str]) -> list[dict[str, Any]]:
        wanted = set(of) & {*tasks}
        groups: dict[Run, list[Sample]] = {}
        for s in samples:
            if s["task"] in wanted:
                groups.setdefault((s["method"], s["budget"]), []).append(s)
        found = []
        for run, group in groups.items():
            if {s["task"] for s in group} != wanted:
                continue  # no mean of them all: tasks may have budgets of their own
            row = {"method": run[0], "budget": run[1], "task": name, "examples": len(group)}
            full = _baseline(groups, group)
            found.append(row | _measured(group, full) | _cost_columns(group, costs[f"{run[0]}@{run[1]}"], full_bytes))
        _compare(found, groups)
        return found

    by_task = {name: {(r["method"], r["budget"]): r for r in rows(name, [name])} for name in tasks}
    for found in means(agreement(samples)) if any(s["method"] == "full" for s in samples) else ():
        measures = {name: found[name] for name in ALIKE}
        by_task[found["task"]][found["method"], found["budget"]]["agreement"] = measures
    return {
        "rows": [by_task[name][run] for run in runs for name in tasks if run in by_task[name]],
        "retrieval_mean": rows("retrieval_mean", RETRIEVAL),
        "bad_rows": [*bad],
    }


def _measured(group: Sequence[Sample], full: Sequence[Sample] | None) -> dict[str, Any]:
    """The mean score, or the perplexity, with its interval."""
    if all("score" in s for s in group):
        interval = stats.interval([s["score"] for s in group], _clusters(group), tasks=[s["task"] for s in group])
        return dict(zip(("score", "low", "high"), interval, strict=True)) | {"metrics": metrics_of(group)}
    interval = stats.perplexity([s["nll"] for s in group], _clusters(group))
    found = dict(zip(("perplexity", "low", "high"), interval, strict=True))
    if full is not None:
        worse = np.mean([s["nll"] - f["nll"] for s, f in zip(group, full, strict=True)])
        found["score"] = float(np.exp(-worse))  # 1 where the text is as likely as under the full cache
    return found


def metrics_of(samples: Iterable[Sample]) -> list[str]:
    """The metrics that scored the answers, sorted; lines that were made before they named theirs add none."""
    return sorted({a["metric"] for s in samples for a in s.get("answers", ()) if isinstance(a, dict) and "metric" in a})


def _clusters(group: Sequence[Sample]) -> list[Hashable] | None:
    """The context of every row, where some share theirs."""
    found: list[Hashable] = [(s["task"], s.get("same_context", s["index"])) for s in group]
    return None if len(set(found)) == len(found) else found


def _baseline(groups: dict[Run, list[Sample]], group: Sequence[Sample]) -> list[Sample] | None:
    """The full cache's samples of the same rows, in the same order; None if it has not all of them."""
    full = {(s["task"], s["index"]): s for (method, _), g in groups.items() if method == "full" for s in g}
    keys = [(s["task"], s["index"]) for s in group]
    return [full[k] for k in keys] if all(k in full for k in keys) else None


def _compare(rows: Sequence[dict[str, Any]], groups: dict[Run, list[Sample]]) -> None:
    """Adds `against_full` to the rows of all methods but the full cache itself."""
    compared = []
    for row in rows:
        group = groups[row["method"], row["budget"]]
        full = _baseline(groups, group)
        if row["method"] == "full" or full is None:
            continue
        key = "nll" if "perplexity" in row else "score"
        ours, theirs, clusters = [s[key] for s in group], [s[key] for s in full], _clusters(group)
        if key == "nll":
            compared.append((row, stats.compare_perplexity(ours, theirs, clusters)))
        else:
            tasks = [s["task"] for s in group]
            compared.append((row, stats.compare(ours, theirs, clusters, tasks=tasks)))
    for (row, _), c in zip(compared, stats.adjusted([c for _, c in compared]), strict=True):
        names = ("difference", "low", "high", "p", "test", "compared", "verdict")
        row["against_full"] = {name: getattr(c, name) for name in names}


def _cost_columns(group: Sequence[Sample], cost: dict[str, Any], full_bytes: int | None) -> dict[str, Any]:
    return {
        "live_tokens": float(np.mean([s["live"] for s in group])),
        "live_of_prompt": float(np.mean([s["live"] / s["prompt_tokens"] for s in group])),
        "kept_whole": sum(s["live"] >= s["prompt_tokens"] for s in group),
        "most_live": max(s["most_live"] for s in group),
        "slots": cost["slots"],
        "kv_bytes": cost["kv_bytes"],
        "kv_bytes_of_full": None if full_bytes is None else cost["kv_bytes"] / full_bytes,
        **_times(group),
        "prefill_peak_bytes": cost["prefill_peak_bytes"],
        "decode_peak_bytes": cost["decode_peak_bytes"],
    }


def _times(group: Sequence[Sample]) -> dict[str, Any]:
    """Medians over batches, whose rows share their times, with intervals."""
    batches = dict.fromkeys(tuple(s[name] for name in TIMED) for s in group)
    found: dict[str, Any] = {}
    for name, values in zip(TIMED, zip(*batches, strict=True), strict=True):
        of = stats.median(values)
        found |= {name: of.median, f"{name}_low": of.low, f"{name}_high": of.high, "timed_coverage": of.coverage}
    return found | {"timed_batches": len(batches)}
