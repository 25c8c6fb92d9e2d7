"""Intervals cover as often as they say, and tests find nothing where there is nothing, by enumeration or simulation."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import scipy

from kvjax import analysis
from kvjax.experiments.core import stats
from kvjax.experiments.core.stats import Comparison, adjusted, compare, compare_perplexity, interval

RUNS = 200  # the standard error of a coverage of 95 % is 1.5 %


@pytest.fixture(autouse=True)
def _fewer_resamples(monkeypatch):
    monkeypatch.setattr(stats, "_RESAMPLES", 499)


def covered(found, truth):
    return found.low <= truth <= found.high


def test_wilson_student_and_perplexity():
    assert stats.wilson([1.0] * 10)[1:] == pytest.approx((0.7225, 1.0), abs=1e-3)
    assert stats.wilson([0.0] * 10)[1:] == pytest.approx((0.0, 0.2775), abs=1e-3)
    for n in range(1, 60):  # whatever the number, an end that is the mean is exactly that
        assert (stats.wilson([0.0] * n).low, stats.wilson([1.0] * n).high) == (0.0, 1.0)
    p, low, high = stats.wilson([1.0, 0.0] * 50)
    assert (p, low, high) == pytest.approx((0.5, 0.4038, 0.5962), abs=1e-3)
    ppl, low, high = stats.perplexity([1.0, 1.2, 0.8, 1.0])
    assert ppl == pytest.approx(np.e)
    assert low < ppl < high
    half = 3.182446 * 1.290994 / 2  # Student's t with 3 degrees of freedom, times the standard error
    assert stats.mean([1.0, 2.0, 3.0, 4.0]) == pytest.approx((2.5, 2.5 - half, 2.5 + half), rel=1e-5)
    assert stats.perplexity([1.0])[1:] == (0.0, float("inf"))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.97])
def test_proportions_are_covered(p):
    n = 30
    held = [covered(interval([1.0] * k + [0.0] * (n - k)), p) for k in range(n + 1)]
    assert scipy.stats.binom.pmf(range(n + 1), n, p) @ held == pytest.approx(0.95, abs=0.035)


@pytest.mark.parametrize(("won", "lost"), [(0.2, 0.1), (0.3, 0.0), (0.02, 0.02)])
def test_differences_of_proportions_are_covered(won, lost):
    n, mass = 25, 0.0
    for w in range(n + 1):
        for k in range(n + 1 - w):
            likely = scipy.stats.multinomial.pmf([w, k, n - w - k], n, [won, lost, 1 - won - lost])
            if likely > 1e-5:
                x, y = [1] * w + [0] * (n - w), [0] * w + [1] * k + [0] * (n - w - k)
                mass += likely * covered(compare(x, y), won - lost)
    assert mass >= 0.93


def test_rows_that_differ_seldom_are_covered():
    drawn = np.random.default_rng(0).choice([-1 / 3, 0, 1 / 3], (RUNS, 25), p=[0.02, 0.94, 0.04])
    assert np.mean([covered(compare(np.maximum(d, 0), np.maximum(-d, 0)), 0.02 / 3) for d in drawn]) >= 0.93


@pytest.mark.parametrize("units", [4, 25])
@pytest.mark.parametrize("rows", [1, 4])
def test_fractional_scores_are_covered(units, rows):
    rng = np.random.default_rng(0)
    clusters = None if rows == 1 else np.repeat(np.arange(units), rows)
    runs, baselines = (rng.binomial(4, p, (RUNS, units)).repeat(rows, axis=1) / 4 for p in (0.6, 0.7))
    held = np.mean([covered(interval(x, clusters), 0.6) for x in runs])
    differing = np.mean([covered(compare(x, y, clusters), -0.1) for x, y in zip(runs, baselines, strict=True)])
    assert 0.9 <= held <= 0.995
    assert 0.9 <= differing <= 0.995
    if clusters is not None:  # what is lost where rows of one context are taken for independent ones
        assert np.mean([covered(interval(x), 0.6) for x in runs]) < 0.85


@pytest.mark.parametrize("discordant", [1, 6, 11])
def test_mcnemar_is_wrong_at_most_as_often_as_it_says(discordant):
    tie = [1.0, 0.0]
    won = range(discordant + 1)
    found = [compare([*tie, *[1] * k, *[0] * (discordant - k)], [*tie, *[0] * k, *[1] * (discordant - k)]) for k in won]
    assert {c.test for c in found} == {"McNemar"}
    for level in (0.05, 0.3):
        wrong = scipy.stats.binom.pmf(won, discordant, 0.5) @ [c.p <= level for c in found]
        assert wrong <= level


def test_small_samples_by_hand():
    assert compare([0.9, 0.8, 0.7], [0.1, 0.2, 0.6]).p == pytest.approx(2 / 8)  # one of eight signings, and its mirror
    nine = compare([1] * 9 + [0], [0] * 9 + [1])
    assert (nine.p, nine.difference, nine.verdict) == (pytest.approx(22 / 1024), 0.8, "better")
    assert compare([0] * 9 + [1], [1] * 9 + [0]).verdict == "worse"
    assert compare([0.5, 0.25], [0.5, 0.25]).p == 1.0
    likelier = compare_perplexity(np.linspace(1, 2, 8), np.linspace(1, 2, 8) + np.linspace(0.4, 0.6, 8))
    assert (likelier.difference, likelier.verdict) == (pytest.approx(0.5), "better")
    assert likelier.p == pytest.approx(2 / 2**8)
    assert 0 < likelier.low < 0.5 < likelier.high


def test_equal_scores_leave_room_for_others():
    others = stats.wilson([0.0] * 10).high
    assert interval([0.5] * 10)[1:] == pytest.approx((0.5 - others / 2, 0.5 + others / 2))
    assert interval([1.0] * 40, [0] * 40) == pytest.approx(interval([1.0]))
    same = compare([0.5] * 10, [0.5] * 10)
    assert (same.low, same.high, same.verdict) == (pytest.approx(-others), pytest.approx(others), "undecided")
    assert compare_perplexity([1.0], [2.0]).high == np.inf


def test_rows_of_a_cluster_count_as_they_are():
    scores, clusters = np.array([0.2, 0.4, 0.6, 1.0, 0.0]), np.array(["a", "b", "a", "b", "b"])
    assert interval(scores, clusters).mean == pytest.approx(scores.mean())


def test_the_order_of_rows_enters_no_number():
    rng = np.random.default_rng(1)
    for n, kind in itertools.product((7, 24, 48, 96), ("thirds", "smooth")):
        x = rng.integers(0, 4, n) / 3 if kind == "thirds" else rng.uniform(size=n)
        y, c, t = np.clip(x + rng.normal(0, 0.2, n), 0, 1), np.arange(n) // 2, np.arange(n) % 3 // 2
        for call in (
            lambda x, y, c, t: (interval(x), interval(x, c), interval(x, tasks=t)),
            lambda x, y, c, t: (compare(x, y), compare(x, y, c), compare(x, y, tasks=t)),
            lambda x, y, c, t: (compare_perplexity(x, y), compare_perplexity(x, y, c), stats.perplexity(x, c)),
            lambda x, y, c, t: (stats.mean(x), analysis.interval(x), stats.median(x), stats.wilson(x)),
        ):
            orders = [np.arange(n), *(rng.permutation(n) for _ in range(5))]
            assert len({str(call(*(a[o] for a in (x, y, c, t)))) for o in orders}) == 1, (n, kind)


@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_an_interval_holds_0_exactly_where_its_test_does_not_rule_it_out(confidence):
    """Where few rows differ, where all do by as much, and of proportions."""
    rng = np.random.default_rng(0)
    some = lambda n, m: rng.permutation([*rng.choice([1 / 3, 2 / 3, -1 / 3], m), *[0] * (n - m)])
    drawn = [some(n, m) for n in (5, 24, 48) for m in range(min(n, 12)) for _ in range(4)]
    drawn += [rng.exponential(0.1, n).clip(0, 1) for n in (4, 6, 9, 30)] + [np.full(n, 0.3) for n in (2, 6, 40)]
    drawn += [np.repeat([1.0, 0.0, -1.0], (won, 30, lost)) for won in range(12) for lost in range(4)]
    seen = set()
    for d in drawn:
        c = compare(np.maximum(d, 0), np.maximum(-d, 0), confidence=confidence)
        assert c.low <= c.difference <= c.high
        assert (c.low <= 0 <= c.high) == (c.verdict == "undecided"), (d, c)
        seen.add((c.test, c.verdict))
    assert len(seen) >= 4


def test_tasks_weigh_the_same():
    scores, tasks = [1.0, 0.5, 0.0, 0.25], ["a", "b", "b", "b"]
    assert interval(scores, tasks=tasks).mean == pytest.approx((1.0 + 0.25) / 2)
    assert compare(scores, [0.5] * 4, tasks=tasks).difference == pytest.approx((1.0 + 0.25) / 2 - 0.5)
    assert interval([1.0] * 30 + [0.5] * 6, tasks=["a"] * 30 + ["b"] * 6).high <= 1.0
    assert interval(scores, tasks="aabb") == interval(scores)  # equal numbers of rows weigh the same anyway
    shared = stats.perplexity([1.0, 1.0, 2.0, 2.0, 3.0, 3.0], [0, 0, 1, 1, 2, 2])
    assert shared == pytest.approx(stats.perplexity([1.0, 2.0, 3.0]))


def test_p_values_are_of_all_flips():
    """As by going through them, whatever was drawn, and small enough for a correction for hundreds of comparisons."""
    x = np.random.default_rng(0).normal(0.4, 1, 18)
    sums = ((np.arange(2**18)[:, None] >> np.arange(18)) % 2) @ x
    expected = 2 * min((sums <= 0).mean(), (sums >= 0).mean())
    assert compare_perplexity((-x).tolist(), [0.0] * 18).p == pytest.approx(expected, rel=1e-9)
    for n in (32, 40):
        assert compare_perplexity(np.linspace(-2, -1, n).tolist(), [0.0] * n).p == 2.0 ** (1 - n)


@pytest.mark.parametrize("ties", [False, True])
def test_p_values_of_many_rows_are_nearly_of_all_flips(monkeypatch, ties):
    x = np.random.default_rng(2).normal(0.3, 1, 32)
    x = np.rint(3 * x) / 3 if ties else x
    exact = compare_perplexity((-x).tolist(), [0.0] * 32).p
    monkeypatch.setattr(stats, "_EXACT", 0)
    assert exact <= compare_perplexity((-x).tolist(), [0.0] * 32).p <= 1.02 * exact


def test_holm():
    found = adjusted([Comparison(0.1, 0.0, 0.2, p, 10, "sign-flip") for p in (0.01, 0.04, 0.03, 0.005)])
    assert [c.p for c in found] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert [c.verdict for c in found] == ["better", "undecided", "undecided", "better"]
    with pytest.raises(ValueError, match="adjusted before"):
        adjusted(found)


@pytest.mark.parametrize("n", [1, 3, 5, 6, 9])
def test_medians_are_covered_as_often_as_they_say(n):
    signs = itertools.product((-1.0, 1.0), repeat=n)  # around a median of 0, all equally likely
    found = [stats.median(x) for x in signs]
    assert np.mean([covered(f, 0.0) for f in found]) == pytest.approx(found[0].coverage)
    assert (found[0].coverage >= 0.95) == (n >= 6)
    narrower = stats.median(range(n), 0.5)
    assert narrower.low <= narrower.median <= narrower.high


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: interval([]), r"scores has shape \(0,\)"),
        (lambda: interval([0.5, float("nan")]), r"scores\[1\] is nan"),
        (lambda: interval([0.5, 70.0]), r"from 0.5 to 70, but scores lie in \[0, 1\]"),
        (lambda: interval([0.5, 0.6], ["a"]), "1 clusters for 2 rows"),
        (lambda: interval([0.5, 0.6], tasks=["a"]), "1 tasks for 2 rows"),
        (lambda: stats.perplexity([]), r"values has shape \(0,\)"),
        (lambda: interval([0.5, 0.6], confidence=95), r"confidence=95 must be a number in \(0, 1\)"),
        (lambda: compare([0.5, 0.6], [0.5]), "2 scores beside 1 of the baseline"),
        (lambda: compare_perplexity([1.0], [float("inf")]), r"baseline\[0\] is inf"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_least_difference_is_found_in_8_of_10_samples():
    """At the strictest step of Holm's correction, for log-likelihoods of 40 rows."""
    rng, found = np.random.default_rng(5), []
    scale = compare_perplexity(*rng.standard_normal((2, 2000))).error * math.sqrt(2000 / 40)
    least = dataclasses.replace(compare_perplexity([0.0] * 40, [1.0] * 40), error=scale, compared=5).least
    for _ in range(200):
        x, y = rng.standard_normal((2, 40))
        found.append(compare_perplexity(x - least, y).p <= 0.01)
    assert 0.72 < np.mean(found) < 0.88


def test_nothing_is_found_of_so_few_that_no_difference_is():
    """Of 5 contexts, all flips of signs leave a p-value of 1 in 16."""
    scores = [0.2, 0.21, 0.23, 0.2, 0.24]
    assert math.isnan(compare(scores, [0.0] * 5).least)
    assert compare([*scores, 0.22], [0.0] * 6).least > 0


@pytest.mark.parametrize(
    ("kind", "values", "clusters", "method"),
    [
        ("score", [0.0, 1.0] * 15, None, "Wilson's"),
        ("score", [0.0, 1.0] * 15, [*range(10)] * 3, "Student's over 10 contexts"),
        ("score", [i / 30 for i in range(30)], None, "BCa bootstrap"),
        ("score", [0.5] * 30, None, "Wilson's of equal means"),
        ("nll", [0.1, 0.2, 0.3, 0.2], [*"abac"], "Student's in log space over 3 contexts"),
    ],
)
def test_a_page_can_say_how_its_intervals_were_made(kind, values, clusters, method):
    assert stats.interval_method(kind, values, clusters) == method
