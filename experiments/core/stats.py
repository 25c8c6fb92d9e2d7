"""How far scores may be off, and whether one method's are better than another's on the same rows.

Rows stand for all rows that the same source might have given. What is assumed beyond that is said by each function.
Rows that share a context are not independent: give their `clusters` (any labels, one a row), and contexts are drawn and
flipped whole. A method that answers the same context well fifty times has shown that once. Rows of several tasks: give
their `tasks`, and each task weighs the same, however many rows it has.

Every interval and test of the experiments is made here. The order of rows enters none of them: what is drawn at random
is drawn from sorted rows, from a fixed seed.
"""

import collections
import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
import scipy  # its parts are imported when they are first used
from jaxtyping import Float

from kvjax import analysis
from kvjax.analysis import Interval
from kvjax.contract.checks import probability

FEW: Final = 20
"""Below so many independent rows the bootstrap covers too rarely: 74 % for 95 % with 3 rows, 89 % with 12."""
_EXACT: Final = 40
"""Up to so many differences all flips of their signs are counted one by one: 2^20 sums of either half."""
_RESAMPLES: Final = 9_999

Labels = Sequence[Hashable] | None


def wilson(scores: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean of scores in [0, 1] and its Wilson score interval.

    Exact matches are proportions. For fractional scores, whose variance is smaller than a proportion's, the interval is
    wider than it need be. Unlike mean +- error it never collapses where all scores are equal.
    """
    n, p = len(scores), math.fsum(scores) / len(scores)
    z = _z(confidence)
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # An end that is the mean itself, at 0 and 1, is rounded otherwise.
    return Interval(p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)))


def mean(values: Sequence[float], clusters: Labels = None, confidence: float = 0.95, tasks: Labels = None) -> Interval:
    """Mean of any numbers and its Student-t interval, infinitely wide for a single one.

    Assumes that means are nearly normal.

    Raises:
      ValueError: no values, or another number of clusters or tasks than of values.
    """
    return _student(_units(_values("values", values), clusters, tasks), confidence)


def perplexity(
    nll: Sequence[float], clusters: Labels = None, confidence: float = 0.95, tasks: Labels = None
) -> Interval:
    """Perplexity from the mean negative log-likelihoods of examples: `mean`, in log space."""
    return Interval(*(float(np.exp(x)) for x in mean(nll, clusters, confidence, tasks)))


def interval(
    scores: Sequence[float], clusters: Labels = None, confidence: float = 0.95, tasks: Labels = None
) -> Interval:
    """Mean of scores in [0, 1] and its confidence interval.

    Wilson's where all scores are 0 or 1 and rows are independent. Otherwise the BCa bootstrap over rows, or over
    clusters where there are some, and Student-t within [0, 1] for fewer than `FEW` of them. Where all of these have the
    same mean, the interval allows for the share of others that so many equal ones do not rule out.

    Args:
      scores: one a row.
      clusters: the context of each row, if some rows share theirs.
      confidence: how likely an interval made so holds the true mean.
      tasks: the task of each row, if rows are of several that weigh the same.

    Raises:
      ValueError: no scores, scores outside [0, 1] or not finite, another number of clusters or tasks than of scores, or
        a confidence outside (0, 1).
    """
    x, confidence = _scores("scores", scores), probability("confidence", confidence)
    units = _units(x, clusters, tasks)
    return wilson(scores, confidence) if _proportions(x, units) else _mean(units, (0.0, 1.0), confidence)


def interval_method(
    kind: Literal["score", "nll"], values: Sequence[float], clusters: Labels = None, tasks: Labels = None
) -> str:
    """By which method `INTERVAL[kind]` of the same arguments makes its interval."""
    units = _units(np.asarray(values, float), clusters, tasks)
    if kind == "score" and _proportions(np.asarray(values, float), units):
        return "Wilson's"
    over = "" if clusters is None else f" over {len(units.sizes)} contexts"
    return f"Student's in log space{over}" if kind == "nll" else f"{_method(units, 1.0)}{over}"


class Median(NamedTuple):
    """A median between two of the values that it is of.

    Attributes:
      median: of all values.
      low: the value that is the interval's lower end.
      high: the value that is its upper end.
      coverage: how likely such an interval holds the median of where values come from.
    """

    median: float
    low: float
    high: float
    coverage: float


def median(values: Sequence[float], confidence: float = 0.95) -> Median:
    """The median, and the narrowest interval between order statistics that covers it as often as wanted.

    Assumes nothing but that values are drawn independently: each is as likely above the median as below it. Of fewer
    than 6 values not even all of them cover it in 95 %; then they are the interval, and `coverage` says how often.

    Args:
      values: at least one.
      confidence: how likely an interval made so is wanted to hold the median.

    Raises:
      ValueError: no values, values that are not finite, or a confidence outside (0, 1).
    """
    x, n = np.sort(_finite("values", values)), len(values)
    confidence = probability("confidence", confidence)
    below = scipy.stats.binom  # of how many values are below the median
    aside = max(int(below.ppf((1 - confidence) / 2, n, 0.5)) - 1, 0)  # values left out at either end
    coverage = 1 - 2 * float(below.cdf(aside, n, 0.5))
    return Median(float(np.median(x)), float(x[aside]), float(x[n - 1 - aside]), max(coverage, 0.0))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A method beside a baseline on the same rows.

    The interval holds 0 exactly where `p` leaves it undecided, until `adjusted` makes `p` larger.

    Attributes:
      difference: mean of the method's scores less the baseline's; positive is better.
      low: lower end of the difference's confidence interval.
      high: upper end of it.
      p: how likely a difference at least so large is, in either direction, where the two do not differ. See `adjusted`.
      n: rows.
      test: what gave `p`.
      confidence: of the interval; differences with p of at most 1 - confidence count.
      compared: how many comparisons `p` allows for.
      error: the standard error of the difference.
      units: how many independent rows, or contexts.
    """

    difference: float
    low: float
    high: float
    p: float
    n: int
    test: Literal["McNemar", "sign-flip"]
    confidence: float = 0.95
    compared: int = 1
    error: float = math.nan
    units: int = 0

    @property
    def least(self) -> float:
        """The least difference that is found in 80 of 100 such samples, where all are tried that it is compared with.

        By Student's t, at the strictest step of Holm's correction. No number of so few contexts that no difference is
        found, however large.
        """
        if 2.0 ** (1 - self.units) * self.compared > 1 - self.confidence + 1e-12:
            return math.nan
        quantiles = scipy.stats.t.ppf([1 - (1 - self.confidence) / (2 * self.compared), 0.8], self.units - 1)
        return float(quantiles.sum()) * self.error

    @property
    def verdict(self) -> Literal["better", "worse", "undecided"]:
        """What the p-value allows to say of the method."""
        if self.p > 1 - self.confidence + 1e-12:  # 1 - 0.95 is a little more than 0.05
            return "undecided"
        return "better" if self.difference > 0 else "worse"


def compare(
    scores: Sequence[float],
    baseline: Sequence[float],
    clusters: Labels = None,
    confidence: float = 0.95,
    tasks: Labels = None,
) -> Comparison:
    """Whether scores in [0, 1] are better than a baseline's on the same rows.

    For scores of 0 and 1 on independent rows: McNemar's exact test and Tango's score interval. Otherwise a sign-flip
    permutation test over all flips, exact for up to 40 rows that differ and nearly so for more, which assumes that
    without an effect a difference is as likely as its negative; and the differences that it does not rule out, between
    means over subsets of rows (Hartigan, Using subsample values as typical values, JASA 64, 1969), which are drawn. Of
    so few rows that differ that no test can decide (below 6 for 95 %), the interval is Student-t, or Tango's as wide as
    the largest difference.
    An interval that would contradict its test ends at 0.

    Args:
      scores: one a row.
      baseline: of the same rows, in the same order.
      clusters: the context of each row, if some rows share theirs; all differences of a context are flipped together.
      confidence: of the interval and the verdict.
      tasks: the task of each row, if rows are of several that weigh the same.

    Raises:
      ValueError: numbers of scores that differ, and what `interval` refuses.
    """
    x, y = _scores("scores", scores), _scores("baseline", baseline)
    _same_rows(x, y)
    confidence = probability("confidence", confidence)
    units = _units(x - y, clusters, tasks)
    if not _proportions(np.concatenate([x, y]), units):
        return _paired(units, 1.0, len(x), confidence)
    won, lost = int((x > y).sum()), int((x < y).sum())
    p = float(scipy.stats.binomtest(won, won + lost).pvalue) if won + lost else 1.0
    return _compared(_tango(won, lost, len(x), confidence), p, units, len(x), "McNemar", confidence)


def compare_perplexity(
    nll: Sequence[float],
    baseline: Sequence[float],
    clusters: Labels = None,
    confidence: float = 0.95,
    tasks: Labels = None,
) -> Comparison:
    """Whether text is more likely than under a baseline, on the same rows.

    As `compare` for scores that are no proportions, in log space. The difference is the baseline's negative
    log-likelihood less the method's: its exponential is the baseline's perplexity over the method's, above 1 where the
    method is better.

    Args:
      nll: mean negative log-likelihood of each row.
      baseline: of the same rows, in the same order.
      clusters: the text of each row, if some rows share theirs.
      confidence: of the interval and the verdict.
      tasks: the task of each row, if rows are of several that weigh the same.

    Raises:
      ValueError: no rows, numbers of rows that differ, values that are not finite, another number of clusters or tasks
        than of rows, or a confidence outside (0, 1).
    """
    x, y = _finite("nll", nll), _finite("baseline", baseline)
    _same_rows(x, y)
    confidence = probability("confidence", confidence)
    return _paired(_units(y - x, clusters, tasks), math.inf, len(x), confidence)


INTERVAL: Final = {"score": interval, "nll": perplexity}
COMPARE: Final = {"score": compare, "nll": compare_perplexity}
"""What is asked of values of a kind: scores in [0, 1], or mean negative log-likelihoods."""


def adjusted(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Comparisons that together are wrong as rarely as one alone would be, by Holm's correction.

    For many methods against one baseline: of 20 methods that differ in nothing from it, one is expected to be better or
    worse at p = 0.05. Holm's correction assumes nothing about how the comparisons depend on each other. Intervals stay
    those of single comparisons.

    Raises:
      ValueError: comparisons that have been adjusted.
    """
    if any(c.compared > 1 for c in comparisons):
        raise ValueError("comparisons were adjusted before; adjust those that `compare` returned, all at once")
    p, m = np.array([c.p for c in comparisons]), len(comparisons)
    order = np.argsort(p, kind="stable")
    p[order] = np.maximum.accumulate(np.minimum(1.0, np.arange(m, 0, -1) * p[order]))
    return [dataclasses.replace(c, p=float(x), compared=m) for c, x in zip(comparisons, p, strict=True)]


# --- what decides ---


def variance_shares(means: Float[np.ndarray, "*factors"], factors: Sequence[str]) -> dict[str, float]:
    """The share of the variance between cells that each factor alone explains, and that of their interactions.

    Sums of squares of a balanced design with a number a cell: main effects, and the interactions. Where all cells are
    equal, but for rounding, nothing explains anything.
    """
    total = ((means - means.mean()) ** 2).sum()
    if np.ptp(means) <= 1e-9 * np.abs(means).max():
        return dict.fromkeys((*factors, "interactions"), 0.0)
    found = {}
    for axis, name in enumerate(factors):
        others = tuple(a for a in range(means.ndim) if a != axis)
        effect = means.mean(others) - means.mean()
        found[name] = float((effect**2).sum() * means.size / means.shape[axis] / total)
    return found | {"interactions": 1 - sum(found.values())}


def explained(
    values: Float[np.ndarray, "*factors E"], factors: Sequence[str], draws: int = 1000
) -> dict[str, Interval]:
    """`variance_shares` of means over examples, with 95 % intervals of resampled examples.

    Args:
      values: of every combination of levels, and every example.
      factors: what the axes are called, but for the last.
      draws: how often examples are resampled.
    """
    rng, n = np.random.default_rng(0), values.shape[-1]
    each = [variance_shares(values[..., rng.integers(n, size=n)].mean(-1), factors) for _ in range(draws)]
    ends = lambda name: map(float, np.quantile([x[name] for x in each], (0.025, 0.975)))
    return {name: Interval(x, *ends(name)) for name, x in variance_shares(values.mean(-1), factors).items()}


# --- what is drawn and flipped as one ---


class _Units(NamedTuple):
    """Rows, or clusters of them, sorted. totals, sizes: "U" weighted sum and weight of a unit's values."""

    totals: np.ndarray
    sizes: np.ndarray

    @property
    def mean(self) -> float:
        return float(_ratio(*self))


def _ratio(totals: np.ndarray, sizes: np.ndarray, axis: int = -1) -> np.ndarray | np.float64:
    return totals.sum(axis) / sizes.sum(axis)


def _units(x: np.ndarray, clusters: Labels, tasks: Labels = None) -> _Units:
    """Sorted, and sums within clusters exactly rounded: rows in any order give the same numbers."""
    for name, labels, of in (("clusters", clusters, "context"), ("tasks", tasks, "task")):
        if labels is not None and len(labels) != len(x):
            raise ValueError(f"{len(labels)} {name} for {len(x)} rows; give every row the label of its {of}")
    rows = collections.Counter(tasks) if tasks is not None else {}
    weights = [len(x) / (len(rows) * rows[t]) for t in tasks] if tasks is not None else [1.0] * len(x)
    groups: dict[Hashable, list[tuple[float, float]]] = {}
    for label, value, weight in zip(range(len(x)) if clusters is None else clusters, x, weights, strict=True):
        groups.setdefault(label, []).append((weight * float(value), weight))
    return _Units(*np.array(sorted(tuple(map(math.fsum, zip(*g, strict=True))) for g in groups.values())).T)


def _proportions(x: np.ndarray, units: _Units) -> bool:
    """Whether all values are 0 or 1 and rows are independent."""
    return bool(np.isin(x, (0.0, 1.0)).all() and (units.sizes == 1).all())


def _error(units: _Units) -> float:
    """The standard error of the mean over rows; no number where there is one unit."""
    n, deviations = len(units.sizes), (units.totals - units.mean * units.sizes) / units.sizes.mean()
    return float(deviations.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan


def _student(units: _Units, confidence: float) -> Interval:
    deviations = (units.totals - units.mean * units.sizes) / units.sizes.mean()
    _, low, high = (float(end) for end in analysis.interval(units.mean + deviations, confidence))
    return Interval(units.mean, low, high)


def _method(units: _Units, width: float) -> Literal["Wilson's of equal means", "BCa bootstrap", "Student's"]:
    """What makes the interval of a mean of values that differ by no more than `width`."""
    alike = np.ptp(units.totals / units.sizes) < 1e-12
    if alike and math.isfinite(width):
        return "Wilson's of equal means"
    return "BCa bootstrap" if len(units.sizes) >= FEW and not alike else "Student's"


def _mean(units: _Units, bounds: tuple[float, float], confidence: float) -> Interval:
    """The mean over rows and its interval, for values within `bounds`."""
    n, mean, method = len(units.sizes), units.mean, _method(units, bounds[1] - bounds[0])
    if method == "Wilson's of equal means":
        others = wilson([0.0] * n, confidence).high  # the share of units that may differ though none of n does
        return Interval(mean, mean - others * (mean - bounds[0]), mean + others * (bounds[1] - mean))
    if method == "BCa bootstrap":
        drawn = scipy.stats.bootstrap(
            tuple(units), _ratio, paired=True, vectorized=True, n_resamples=_RESAMPLES, batch=1 + 2_000_000 // n,
            confidence_level=confidence, method="BCa", rng=np.random.default_rng(0),
        )  # fmt: skip
        low, high = (float(end) for end in drawn.confidence_interval)
    else:
        _, low, high = _student(units, confidence)
    return Interval(mean, max(low, bounds[0]), min(high, bounds[1]))


def _paired(units: _Units, most: float, rows: int, confidence: float) -> Comparison:
    """The mean of differences of at most `most` in size, its sign-flip test and interval."""
    n, means = len(units.sizes), units.totals / units.sizes
    p, low, high = _flipped(units, confidence)
    won, lost = int((means > 0).sum()), int((means < 0).sum())
    if 2.0 ** (1 - won - lost) <= 1 - confidence + 1e-12:
        if np.ptp(means) < 1e-12 and math.isfinite(most):  # all differ by as much
            _, low, high = _mean(units, (0.0, most) if won else (-most, 0.0), confidence)
    elif won + lost == n:
        _, low, high = _mean(units, (-most, most), confidence)
    else:
        size = float(np.abs(means).max()) if won + lost else most if math.isfinite(most) else 0.0
        _, low, high = (size * end for end in _tango(won, lost, n, confidence))
    ends = Interval(units.mean, max(min(low, units.mean), -most), min(max(high, units.mean), most))
    return _compared(ends, p, units, rows, "sign-flip", confidence)


def _compared(
    found: Interval, p: float, units: _Units, rows: int, test: Literal["McNemar", "sign-flip"], confidence: float
) -> Comparison:
    """A comparison, whose interval holds 0 where its test does not rule 0 out."""
    made = Comparison(*found, p, rows, test, confidence, error=_error(units), units=len(units.sizes))
    if made.verdict != "undecided":
        return made
    return dataclasses.replace(made, low=min(made.low, 0.0), high=max(made.high, 0.0))


def _flipped(units: _Units, confidence: float) -> tuple[float, float, float]:
    """The p-value of the sum of differences under all flips of signs, and the interval that these give the mean.

    A flip is a subset of units. Its sum is on the other side of 0 in as many flips as the sum of all signs reaches the
    one observed, and so the subsets' means have the differences between their quantiles that the test does not reject.
    """
    differs, rng = units.totals != 0, np.random.default_rng(0)
    m, n = int(differs.sum()), len(units.sizes)
    count, flips = _RESAMPLES + 1, None
    if 2**m <= count:
        flips = (np.arange(2**m)[:, None] >> np.arange(m)) % 2 == 1
        flips = np.tile(flips, (count // 2**m, 1))  # each of them with several subsets of the others
        count = len(flips)
    sums, sizes = np.zeros(count), np.zeros(count)
    step = 1 + 2_000_000 // n
    for i in range(0, count, step):
        drawn = rng.random((min(step, count - i), n)) < 0.5
        if flips is not None:
            drawn[:, differs] = flips[i : i + step]
        elif i == 0:
            drawn[0] = False  # the signs that were observed
        sums[i : i + step], sizes[i : i + step] = drawn @ units.totals, drawn @ units.sizes
    sums[np.abs(sums) < 1e-12 * np.abs(units.totals).sum()] = 0.0
    means, out = sums / np.maximum(sizes, 1e-300), int(count * (1 - confidence) / 2 + 1e-9)
    # A subset without any unit has its mean beyond all others.
    ranked = lambda empty: np.sort(np.where(sizes > 0, means, empty))
    low, high = float(ranked(-math.inf)[out]), float(ranked(math.inf)[count - 1 - out])
    p = min(1.0, 2 * _beyond(units.totals))
    if p <= 1 - confidence + 1e-12:  # though too many of the drawn subsets may be on the other side of 0
        same = means[means * units.mean > 0]
        low, high = max(low, float(same.min())), min(high, float(same.max()))
    return p, low, high


def _beyond(totals: np.ndarray) -> float:
    """The share of all subsets whose sum is not on the side of the whole sum: at most 0, or at least 0.

    Of many totals, sums are counted in steps of 2^-17 of their size, and as 0 where the steps' rounding may have moved
    them from there: the share is not too small, and by a few percent of itself too large.
    """
    totals = (totals if totals.sum() > 0 else -totals)[totals != 0]
    m, size = len(totals), np.abs(totals).sum()
    if m <= _EXACT:
        halves = [np.zeros(1), np.zeros(1)]
        for i, total in enumerate(totals):
            halves[i % 2] = np.concatenate([halves[i % 2], halves[i % 2] + total])
        one, other = map(np.sort, halves)
        return int(np.searchsorted(other, 1e-12 * size - one, "right").sum()) / 2**m
    steps = np.rint(np.abs(totals) * (2**17 / size)).astype(int)
    share = np.zeros(int(steps.sum()) + 1)  # of subsets, by the sum of sizes: of positive ones in it, negative ones not
    share[0] = 1.0
    for step in steps[steps > 0]:
        share[step:] = share[step:] + share[:-step]
        share /= 2
    return float(share[: int(steps[totals < 0].sum()) + m // 2 + 1].sum())


# --- formulas and checks ---


def _tango(won: int, lost: int, n: int, confidence: float) -> Interval:
    """Score interval of the difference of two proportions of the same rows.

    Tango, Equivalence test and confidence interval for the difference in proportions for the paired-sample design,
    Statistics in Medicine 17 (1998).
    """
    z, difference = _z(confidence), (won - lost) / n

    def excess(delta: float) -> float:
        """How many standard errors the difference is above `delta`, where `delta` is true, less z in size."""
        b = (2 * n - won + lost) * delta - won - lost
        both = max((math.sqrt(max(b * b + 8 * n * lost * delta * (1 - delta), 0.0)) - b) / (4 * n), 0.0)
        variance = n * (2 * both + delta * (1 - delta))
        return abs(won - lost - n * delta) - z * math.sqrt(max(variance, 0.0))

    ends = []
    for edge in (-1.0, 1.0):
        near = difference + 1e-9 * (edge - difference)  # the standard error may be 0 at the difference itself
        inside = excess(near) < 0 < excess(edge)
        ends.append(scipy.optimize.brentq(excess, near, edge) if inside else edge)
    return Interval(difference, ends[0], ends[1])


def _z(confidence: float) -> float:
    return float(scipy.special.ndtri(0.5 + confidence / 2))


def _values(name: str, values: Sequence[float]) -> np.ndarray:
    x = np.asarray(values, dtype=float)
    if x.ndim != 1 or not x.size:
        raise ValueError(f"{name} has shape {x.shape}; there must be one number a row, of at least one row")
    return x


def _finite(name: str, values: Sequence[float]) -> np.ndarray:
    x = _values(name, values)
    if not np.isfinite(x).all():
        i = int(np.argmin(np.isfinite(x)))
        raise ValueError(f"{name}[{i}] is {x[i]}, which is no number; leave out rows that failed, and count them")
    return x


def _scores(name: str, values: Sequence[float]) -> np.ndarray:
    x = _finite(name, values)
    if x.min() < 0 or x.max() > 1:
        raise ValueError(f"{name} are from {x.min():g} to {x.max():g}, but scores lie in [0, 1]")
    return x


def _same_rows(x: np.ndarray, y: np.ndarray) -> None:
    if len(x) != len(y):
        raise ValueError(f"{len(x)} scores beside {len(y)} of the baseline; compare the same rows")
