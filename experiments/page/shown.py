"""How numbers are written on the page and in markdown."""

import math
from collections.abc import Sequence

from kvjax.experiments.core.stats import Comparison
from kvjax.experiments.evaluation import report
from kvjax.experiments.page.cells import Cell
from kvjax.experiments.page.lines import Setting

VERDICTS = {"better": "▲ better", "worse": "▼ worse", "undecided": "undecided"}


def value(cell: Cell) -> str:
    """A score in percent, a perplexity, or a number as it was given."""
    return _number(cell, cell.value.mean)


def interval(cell: Cell) -> str:
    """The ends of its interval; nothing where there is none."""
    if not math.isfinite(cell.value.low + cell.value.high):
        return ""
    return f"[{_number(cell, cell.value.low)}, {_number(cell, cell.value.high)}]"


def _number(cell: Cell, x: float) -> str:
    if cell.kind == "score":
        return f"{100 * x:.1f}"
    return f"{x:.2f}" if cell.kind == "nll" and x < 10_000 else f"{x:.4g}"


def difference(cell: Cell) -> str:
    """Beside the full cache: points of a score, or the ratio of perplexities; with its interval."""
    c = cell.against
    if c is None:
        return ""
    if cell.kind == "nll":  # the baseline's negative log-likelihood less the method's
        mean, low, high = (math.exp(-x) if x > -700 else math.inf for x in (c.difference, c.high, c.low))
        return f"\N{MULTIPLICATION SIGN}{mean:.3f} [{low:.3f}, {high:.3f}]"
    return f"{100 * c.difference:+.1f} [{100 * c.low:+.1f}, {100 * c.high:+.1f}]"


def probability(c: Comparison) -> str:
    """A p-value."""
    return "< 0.001" if c.p < 0.001 else f"{c.p:.3f}"


def share(x: float | None) -> str:
    """A share in percent; nothing where it is not known."""
    return "" if x is None else f"{100 * x:.1f} %"


def budget(label: str) -> str:
    """A label of a budget in words."""
    if not report.has_budget(label):
        return label
    return f"{100 * float(label):.4g} %" if "." in label else f"{int(label):,} tokens"


def method(name: str) -> str:
    """A method's name."""
    return "full cache" if name == "full" else name


def task(name: str) -> str:
    """A task's name with spaces."""
    return name.replace("_", " ")


def protocol(name: str) -> str:
    """A protocol in words."""
    known = {"in_prompt": "question in the prompt", "after_compression": "question after compression"}
    return known.get(name, name.replace("_", " "))


def details(settings: Sequence[Setting]) -> list[str]:
    """For every setting, in which details it differs from others of the same model and protocol."""
    shown = []
    for setting in settings:
        alike = [dict(s.details) for s in settings if (s.model, s.protocol) == (setting.model, setting.protocol)]
        differing = [k for k in dict.fromkeys(k for s in alike for k in s) if len({s.get(k) for s in alike}) > 1]
        own = dict(setting.details)
        shown.append(", ".join(f"{k.replace('_', ' ')} {own[k]}" for k in differing if k in own))
    return shown


def rows(cell: Cell) -> str:
    """How many rows a number is made from."""
    n = len(cell.lines)
    return f"{n:,} row{'' if n == 1 else 's'}" if n else "no rows"
