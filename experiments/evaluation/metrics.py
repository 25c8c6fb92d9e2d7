"""Scores with their uncertainty."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import special

from kvjax import analysis


def values_in_place(output: str, references: Sequence[str]) -> float:
    """The share of values that an answer holds in their places: the first at its start, each other one anywhere."""
    text = " ".join(output.split())
    found = [text.startswith(value) if i == 0 else value in text for i, value in enumerate(references)]
    return float(np.mean(found))


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {"values_in_place": values_in_place}


def wilson(scores: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean of scores in [0, 1] and its Wilson score interval.

    Exact matches are proportions. For fractional scores, whose variance is smaller than a proportion's, the interval is
    wider than it need be. Unlike mean +- error it never collapses where all scores are equal.
    """
    n, p = len(scores), float(np.mean(scores))
    z = float(special.ndtri(0.5 + confidence / 2))
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return p, max(0.0, centre - half), min(1.0, centre + half)


def perplexity(nll: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Perplexity from the mean negative log-likelihoods of examples, with a Student-t interval over examples."""
    mean, low, high = (float(np.exp(x)) for x in analysis.interval(nll, confidence))
    return mean, low, high
