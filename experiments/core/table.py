"""Lines of runs as tables: a row an answer, an example, or a number with its interval, its costs and the full cache's.

A line is what `samples.jsonl` holds of one question, with where it is from (`sources.read`): `setting`, what numbers
must share to stand beside each other; `run` and `line`; `policy` and `variant`, all of what `method` and `task` name;
and `averaged`, whether the task may be part of an average.
"""

import difflib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
from tqdm import tqdm

from kvjax.experiments.core import metrics, stats
from kvjax.experiments.core.outputs import TOLD

AVERAGE: Final = "average"
NUMBER: Final = ("setting", "method", "budget", "task")
"""What names a number."""

ALIKE: Final = ("same", "prefix", "edit_similarity")
"""What `agreement` measures without any metric."""

TEXT_METRICS: Final = ("rouge_1", "rouge_2", "rouge_l", "bleu", "meteor")
"""Those of the papers' tables of summaries and reconstructions; `metrics.find` says what each needs."""

_TIMES = ("prefill_seconds", "read_seconds", "decode_tokens_per_second")
_MOST = ("most_live", "slots", "kv_bytes", "kv_bytes_needed", "kv_bytes_fitted", "state_bytes",
         "prefill_peak_bytes", "decode_peak_bytes")  # fmt: skip
_MEANS = ("score", "live", "prompt_tokens", *TOLD)
WRITTEN: Final = ("written", *TOLD, "own_nll")
"""What is told of long answers: their tokens, what `core.outputs` tells, how likely the full cache's own ones are."""
NUMERIC: Final = ("nll", "tokens", "depth", "length", *_MEANS, *_MOST, *_TIMES)
"""What of a line is a number, if it is there."""
_NAMES = ("setting", "run", "line", "task", "variant", "method", "budget", "policy", "averaged", "index", "question",
          "context", "metric", "output", "references")  # fmt: skip


def lines(found: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """A row a line, each once; policies or tasks of one name that differ are named after their runs."""
    table = pd.DataFrame(found, columns=[*dict.fromkeys([*_NAMES, *NUMERIC, *(k for line in found for k in line)])])
    table[[*NUMERIC]] = table[[*NUMERIC]].astype(float)
    for name, within, which in (("method", ["budget"], "policy"), ("task", [], "variant")):
        groups = table.groupby(["setting", name, *within], sort=False)[which]
        several = (groups.transform("nunique") > 1).groupby([table["setting"], table[name]]).transform("any")
        first = table.groupby(["setting", name, *within, which], sort=False)["run"].transform("first")
        table[name] = table[name].where(~several, table[name] + " (" + first + ")")
    return table.drop_duplicates([*NUMBER, "index", "question"], ignore_index=True)


def records(found: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows, by the names of columns."""
    return [{str(name): value for name, value in row.items()} for row in found.to_dict("records")]


def is_full(method: str) -> bool:
    """Whether a method is the full cache, whatever it was told apart by."""
    return method == "full" or method.startswith("full (")


def has_budget(label: str) -> bool:
    """Whether a label is a budget: a number of tokens or a share of the prompt, unlike "T=0.95"."""
    return label.replace(".", "", 1).isdecimal()


def examples(found: pd.DataFrame) -> pd.DataFrame:
    """A row an example: the means over its questions, of likelihoods over their tokens; without what is not finite.

    Where an example is scored, its likelihood is that of the full cache's own answer, `own_nll`.
    """
    weight = found["tokens"].where(found["nll"].notna())
    written = found["tokens"].where(found["output"].notna() & found["ended"].notna())
    of = found.assign(weight=weight, written=written, nll=found["nll"] * weight)
    of = of.groupby([*NUMBER, "index"], sort=False)
    means = dict.fromkeys((*_MEANS, "written"), "mean")
    how = {"nll": "sum", "weight": "sum"} | means | dict.fromkeys(_MOST, "max")
    table = of.agg(
        dict.fromkeys(("context", "averaged", "metric", "run", "depth", "length"), "first") | how
    ).reset_index()
    table["kind"] = np.where(table["score"].notna(), "score", "nll")
    likely = table["nll"] / table["weight"]
    table["value"] = table["score"].where(table["score"].notna(), likely)
    table["own_nll"] = likely.where(table["score"].notna() & (table["weight"] > 0))
    return table[np.isfinite(table["value"])]


def answers(found: pd.DataFrame) -> pd.DataFrame:
    """A row an example that was answered: `output` and `references`, lists over its questions as JSON.

    References are those of the full cache's rows alone, as all methods share them.
    """
    given = found[found["output"].notna()].sort_values("question")
    columns = ["output", "references"]
    rows = given.groupby(["method", "budget", "task", "index"], sort=False)[columns].agg(list).reset_index()
    text = {column: rows[column].map(lambda x: json.dumps(x, ensure_ascii=False)) for column in columns}
    text["references"] = text["references"].where(rows["method"].map(is_full), "")
    return rows.assign(**text)


def numbers(found: pd.DataFrame, measures: Sequence[str] = ()) -> pd.DataFrame:
    """A row a number: value, interval, the comparison with the full cache on the same rows, agreement, and costs.

    An average is over the tasks that every method of a setting has, each weighing the same; perplexities are not
    averaged. p-values are adjusted for all methods and budgets on a task.

    Args:
      found: lines.
      measures: metrics of agreement, besides those that are always there.
    """
    rows = examples(found)
    timed = found.dropna(subset=[_TIMES[-1]]).groupby([*NUMBER], sort=False)
    known = lambda times: times.astype(object).where(times.notna(), None)  # prompts may be read for several policies
    batches = {key: {*zip(*(known(of[t]) for t in _TIMES), strict=True)} for key, of in timed}  # rows share their times
    made: list[dict[str, Any]] = []
    with tqdm(total=rows.groupby([*NUMBER]).ngroups, unit="number", leave=False, disable=None) as bar:
        for task, own in _tables(rows):
            made += _table(task, own, batches, bar.update)
    table = pd.DataFrame(made, columns=None if made else [*NUMBER, "kind", "value", "low", "high", "place"])
    alike = [means(agreement(own, measures, full)) for own, full in _answered(found)]
    if alike:
        table = table.merge(pd.concat(alike).drop(columns="examples"), how="left", on=[*NUMBER])
    return in_order(table)


def with_given(table: pd.DataFrame, others: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Numbers, and others that come without lines."""
    columns = [*dict.fromkeys([*table.columns, *(k for number in others for k in number)])]
    return in_order(pd.DataFrame([*records(table), *others], columns=columns))


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """Numbers by setting, method, budget and task, each in the order in which it is first found."""
    return table.sort_values([*NUMBER], key=lambda c: pd.factorize(c)[0], kind="stable", ignore_index=True)


def _tables(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Of every setting the rows that are averaged, and then those of each task."""
    for _, own in rows.groupby("setting", sort=False):
        scored = own[(own["kind"] == "score") & own["averaged"].astype(bool)]
        have = scored[[*NUMBER]].drop_duplicates()["task"].value_counts(sort=False)
        shared = have.index[have == len(own[["method", "budget"]].drop_duplicates())]
        if len(shared) > 1:
            yield AVERAGE, scored[scored["task"].isin(shared)]
        for task, group in own.groupby("task", sort=False):
            yield str(task), group


def _table(
    task: str, own: pd.DataFrame, batches: dict[Any, set[tuple[float | None, ...]]], done: Callable[[], object]
) -> list[dict[str, Any]]:
    """The numbers of one task, or of an average; `done` is called after each."""
    full = own[own["method"].map(is_full)]
    full = full[full["method"] == full["method"].iloc[0]] if len(full) else full
    baseline = dict(_keyed(full))
    made, compared = [], []
    for (setting, method, budget), group in own.groupby(["setting", "method", "budget"], sort=False):
        tasks, kind = group["task"].tolist(), group["kind"].iloc[0]
        cell = {"setting": setting, "method": method, "budget": budget, "task": task, "kind": kind, "n": len(group)}
        of_task = tasks if task == AVERAGE else None
        values, contexts = group["value"].tolist(), clusters(group)
        interval = stats.INTERVAL[kind](values, contexts, tasks=of_task)
        cell |= dict(zip(("value", "low", "high"), interval, strict=True)) | _costs(group) | _written(group)
        cell["interval"] = stats.interval_method(kind, values, contexts, of_task)
        cell["metrics"] = ", ".join(sorted({*group["metric"].dropna()}))
        cell["parts"] = ", ".join(dict.fromkeys(tasks)) if task == AVERAGE else ""
        cell["runs"] = (*dict.fromkeys(group["run"]),)
        cell |= _times({b for t in dict.fromkeys(tasks) for b in batches.get((setting, method, budget, t), ())})
        beside = [baseline.get(key) for key, _ in _keyed(group)]
        if not is_full(method) and all(b is not None for b in beside):
            theirs = [b for b in beside if b is not None]
            compared.append((cell, stats.COMPARE[kind](values, theirs, contexts, tasks=of_task)))
        made.append(cell)
        done()
    for (cell, _), c in zip(compared, stats.adjusted([c for _, c in compared]), strict=True):
        cell |= {"difference": c.difference, "difference_low": c.low, "difference_high": c.high, "p": c.p}
        cell |= {"test": c.test, "compared": c.compared, "verdict": c.verdict}
    most = max((cell["kv_bytes"] for cell in made if is_full(cell["method"])), default=math.nan)
    return [cell | {"kv_of_full": cell["kv_bytes"] / most} for cell in made]


def _keyed(rows: pd.DataFrame) -> Iterator[tuple[tuple[str, Any], float]]:
    return zip(zip(rows["task"], rows["index"], strict=True), rows["value"], strict=True)


def clusters(rows: pd.DataFrame) -> list[str] | None:
    """The context of every row, where some share theirs, of one task or of several."""
    found = rows["context"].tolist()
    return None if len({*found}) == len(found) else found


def _costs(group: pd.DataFrame) -> dict[str, Any]:
    """Live tokens a head after the prompt, and the largest sizes; `place` is the budget as a share of the prompt."""
    budget, prompts = group["budget"].iloc[0], group["prompt_tokens"]
    live = (group["live"] / prompts).mean()
    tokens = has_budget(budget) and "." not in budget
    place = float(budget) / (prompts.mean() if tokens else 1) if has_budget(budget) else live
    whole = int((group["live"] >= prompts).sum())
    most = {name: group[name].max() for name in _MOST}
    return {"live_tokens": group["live"].mean(), "live": live, "kept_whole": whole, "place": place} | most


def _written(group: pd.DataFrame) -> dict[str, Any]:
    """Means of what is told of long answers, with intervals; the perplexity of the full cache's own answers."""
    found: dict[str, Any] = {}
    for name in WRITTEN:
        if (known := group[group[name].notna()]).empty:
            continue
        of = {"ended": stats.interval, "own_nll": stats.perplexity}.get(name, stats.mean)
        tasks = known["task"].tolist() if known["task"].nunique() > 1 else None
        ends = of(known[name].tolist(), clusters(known), tasks=tasks)
        found |= dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
    return found


def _times(batches: set[tuple[float | None, ...]]) -> dict[str, float]:
    """Medians over batches, with intervals."""
    found: dict[str, float] = {"timed_batches": len(batches)} if batches else {}
    for name, times in zip(_TIMES, zip(*batches, strict=True), strict=False):
        if values := sorted(x for x in times if x is not None):
            of = stats.median(values)
            found |= {name: of.median, f"{name}_low": of.low, f"{name}_high": of.high, "timed_coverage": of.coverage}
    return found


# --- outputs beside the full cache's, and scored again ---


def agreement(found: pd.DataFrame, names: Sequence[str] = (), baseline: str = "full") -> pd.DataFrame:
    """How far each output is the baseline's of the same question, as RoCo compares (arXiv:2402.06262, section 5).

    Args:
      found: lines; questions that ask for likelihoods have no output, and are left out.
      names: metrics that take the baseline's output as the reference, besides the three that are always there.
      baseline: the method to compare with, whichever budget it has.

    Returns:
      A row for every example that both have answered, the baseline's left out, with means over its questions, each in
      [0, 1]: `same`, whether the outputs are equal; `prefix`, the share of the baseline's words before the first that
      differs; `edit_similarity`, of both as sequences of words, by difflib; and the named metrics. Where both outputs
      are blank everything is 1, where one of them is, 0. Where a metric refuses a baseline's output without letters and
      digits, as ROUGE does, an equal output has 1, another one 0.

    Raises:
      ValueError: no line of the baseline, two of one question that differ, or a metric that does not exist or lacks
        something.
    """
    judges, row = {name: metrics.find(name) for name in names}, ["setting", "task", "index", "question"]
    answered = found[found["output"].notna()]
    wanted = answered[answered["method"] == baseline].drop_duplicates([*row, "output"])
    if len(answered) and not len(wanted):
        methods = ", ".join(sorted({*answered["method"]}))
        raise ValueError(f"no line of {baseline} to compare with; the methods are {methods}")
    if len(twice := wanted[wanted.duplicated(row)]):
        task, index = twice.iloc[0][["task", "index"]]
        raise ValueError(f"{baseline} has two outputs of {task} {index} that differ; compare the lines of one model")

    def judged(output: str, reference: str) -> dict[str, float]:
        blank = (not output.strip()) + (not reference.strip())
        if blank:
            return dict.fromkeys((*ALIKE, *names), float(blank == 2))
        return _alike(output, reference) | {name: by(metric, output, reference) for name, metric in judges.items()}

    def by(metric: Callable[[str, Sequence[str]], float], output: str, reference: str) -> float:
        try:
            return metric(output, [reference])
        except ValueError:
            if any(map(str.isalnum, reference)):
                raise
            return float(output == reference)

    others = answered[answered["method"] != baseline]
    both = others.merge(wanted[[*row, "output"]], on=row, suffixes=("", "_wanted"))
    values = [judged(*pair) for pair in zip(both["output"], both["output_wanted"], strict=True)]
    return _by_example(both, pd.DataFrame(values, columns=[*ALIKE, *names], dtype=float))


def beside_full(found: pd.DataFrame) -> pd.DataFrame:
    """Lines whose score is how alike their answer is to the full cache's: `edit_similarity` of `agreement`.

    Args:
      found: lines of one setting, a question an example.

    Raises:
      ValueError: an answer without one of the full cache beside it, and what `agreement` refuses.
    """
    row = [*NUMBER, "index"]
    both = found.drop(columns="score").merge(agreement(found)[[*row, "edit_similarity"]], on=row, how="left")
    score = both["edit_similarity"].where(~found["method"].map(is_full).to_numpy(), 1.0)
    if score.isna().any():
        raise ValueError("there is an answer without one of the full cache beside it; let it run with the others")
    return both.drop(columns="edit_similarity").assign(score=score)


def rescored(found: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Outputs by other metrics, against the references that they were scored against.

    Args:
      found: lines.
      names: metrics, such as `TEXT_METRICS`.

    Returns:
      A row for every example that was answered, with the mean over its questions by each metric.

    Raises:
      ValueError: a metric that does not exist or lacks something.
    """
    judges = [metrics.find(name) for name in names]
    answered = found[found["output"].notna()].reset_index(drop=True)
    pairs = [*zip(answered["output"], answered["references"], strict=True)]
    return _by_example(answered, pd.DataFrame({m.name: [m(*pair) for pair in pairs] for m in judges}, dtype=float))


def means(judged: pd.DataFrame) -> pd.DataFrame:
    """A row for every method, budget and task of `agreement` or `rescored`: of each measure the mean and its interval.

    Columns are `examples` and, of a measure, its name, `_low` and `_high`, the ends of the 95 % interval.
    """
    measures = [c for c in judged.columns if c not in (*NUMBER, "index", "context")]
    made = []
    for key, group in judged.groupby([*NUMBER], sort=False):
        row = dict(zip(NUMBER, key, strict=True)) | {"examples": len(group)}
        for name in measures:
            ends = stats.interval(group[name].tolist(), clusters(group))
            row |= dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
        made.append(row)
    ends = [m + end for m in measures for end in ("", "_low", "_high")]
    return pd.DataFrame(made, columns=[*NUMBER, "examples", *ends])


def _answered(found: pd.DataFrame) -> Iterator[tuple[pd.DataFrame, str]]:
    """The lines of every setting where the full cache has answered, and what it is called there."""
    for _, own in found[found["output"].notna()].groupby("setting", sort=False):
        full = own["method"][own["method"].map(is_full)]
        if len(full):
            yield own[~own["method"].map(is_full) | (own["method"] == full.iloc[0])], full.iloc[0]


def _by_example(found: pd.DataFrame, values: pd.DataFrame) -> pd.DataFrame:
    of = pd.concat([found[[*NUMBER, "index", "context"]], values], axis=1)
    how: dict[str, Any] = {"context": "first"} | dict.fromkeys(values.columns, "mean")
    return of.groupby([*NUMBER, "index"], sort=False).agg(how).reset_index()


def _alike(output: str, reference: str) -> dict[str, float]:
    """How far two texts with words are the same."""
    a, b = output.split(), reference.split()
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    similarity = difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()
    return dict(zip(ALIKE, (float(output == reference), first / len(b), similarity), strict=True))
