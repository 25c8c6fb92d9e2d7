"""A finished run scored again: against the full cache's output on the same row, or by other metrics.

RoCo (arXiv:2402.06262, section 5) takes what the full cache generates as the reference and compares the output under a
budget with it, by ROUGE, BLEU and METEOR: this measures what eviction changes, whatever the model's answers are worth.

Everything here is a function of the lines of `samples.jsonl`; nothing is run again. Examples that ask for likelihoods
have no output, and are left out.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from kvjax.experiments.core import metrics
from kvjax.experiments.core.stats import interval

Line = Mapping[str, Any]
_KEY: Final = ("method", "budget", "task", "index", "same_context")

ALIKE: Final = ("same", "prefix", "edit_similarity")
"""What `agreement` measures without any metric."""

TEXT_METRICS: Final = ("rouge_1", "rouge_2", "rouge_l", "bleu", "meteor")
"""Those of the papers' tables of summaries and reconstructions; `metrics.find` says what each needs."""


def agreement(samples: Iterable[Line], names: Sequence[str] = (), baseline: str = "full") -> list[dict[str, Any]]:
    """How far each output is the baseline's on the same row.

    Args:
      samples: lines of one run or of several.
      names: metrics that take the baseline's output as the reference, besides the three that are always there.
      baseline: the method to compare with, whichever budget it has.

    Returns:
      A line for every example that both have answered, the baseline's left out: method, budget, task, index, and means
      over its answers, each in [0, 1]: `same`, whether the outputs are equal; `prefix`, the share of the baseline's
      words before the first that differs; `edit_similarity`, of both as sequences of words, by difflib; and the named
      metrics. Where both outputs are blank everything is 1, where one of them is, 0.

    Raises:
      ValueError: no line of the baseline, two of one row that differ, or a metric that does not exist or lacks
        something.
    """
    found = [metrics.find(name) for name in names]
    samples = [line for line in samples if _outputs(line)]
    wanted: dict[tuple[Any, ...], list[str]] = {}
    for line in samples:
        if line["method"] == baseline and wanted.setdefault(_row(line), _outputs(line)) != _outputs(line):
            raise ValueError(
                f"{baseline} has two outputs of {line['task']} {line['index']} that differ; compare the lines of one "
                "model, length and seed"
            )
    if samples and not wanted:
        methods = ", ".join(sorted({line["method"] for line in samples}))
        raise ValueError(f"no line of {baseline} to compare with; the methods are {methods}")

    def judged(output: str, reference: str) -> dict[str, float]:
        blank = (not output.strip()) + (not reference.strip())
        if blank:
            return dict.fromkeys((*ALIKE, *names), float(blank == 2))
        return _alike(output, reference) | {m.name: m(output, [reference]) for m in found}

    return [
        _line(line, [judged(o, r) for o, r in zip(_outputs(line), wanted[_row(line)], strict=True)])
        for line in samples
        if line["method"] != baseline and _row(line) in wanted
    ]


def rescored(samples: Iterable[Line], names: Sequence[str]) -> list[dict[str, Any]]:
    """Outputs by other metrics, against the references that they were scored against.

    Args:
      samples: lines of one run or of several.
      names: metrics, such as `TEXT_METRICS`.

    Returns:
      A line for every example that was answered: method, budget, task, index, and the mean over its answers by each
      metric.

    Raises:
      ValueError: a metric that does not exist or lacks something.
    """
    found = [metrics.find(name) for name in names]
    return [
        _line(line, [{m.name: m(a["output"], a["references"]) for m in found} for a in _answers(line)])
        for line in samples
        if _answers(line)
    ]


def means(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """A row for every method, budget and task: `examples`, and of each measure mean, low and high of its 95 % interval.

    Args:
      lines: of `agreement` or `rescored`.
    """
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault((line["method"], line["budget"], line["task"]), []).append(line)
    rows = []
    for (method, budget, task), group in groups.items():
        measures = [k for k in group[0] if k not in _KEY]
        found = {k: tuple(interval([line[k] for line in group], _contexts(group))) for k in measures}
        rows.append({"method": method, "budget": budget, "task": task, "examples": len(group), **found})
    return rows


def _contexts(group: Sequence[Line]) -> list[Any] | None:
    """The context of every row, where some share theirs."""
    found = [line.get("same_context", line["index"]) for line in group]
    return None if len({*found}) == len(found) else found


def _answers(line: Line) -> list[Line]:
    return [a for a in line.get("answers", ()) if "output" in a]


def _outputs(line: Line) -> list[str]:
    return [a["output"] for a in _answers(line)]


def _row(line: Line) -> tuple[Any, ...]:
    return line["task"], line["index"]


def _line(line: Line, judged: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The key of a line, and the mean over its answers of each measure."""
    key = {k: line[k] for k in _KEY if k in line}
    return key | {k: float(np.mean([j[k] for j in judged])) for k in judged[0]}


def _alike(output: str, reference: str) -> dict[str, float]:
    """How far two texts with words are the same."""
    a, b = output.split(), reference.split()
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    similarity = difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()
    return dict(zip(ALIKE, (float(output == reference), first / len(b), similarity), strict=True))
