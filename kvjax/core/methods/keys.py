"""Methods that look at keys, values, hidden states, or a model of queries to come."""

from kvjax.core.budgets import STEP
from kvjax.core.decide.select import AtLeast, TopK
from kvjax.core.evict import Evict
from kvjax.core.observe import FutureQueries
from kvjax.core.scores.attention import Blend, Pooled, Standardized, ValueWeighted
from kvjax.core.scores.keys import (
    Capacity,
    Expected,
    KeyDifference,
    KeyDirections,
    KeyNorm,
    LagRelative,
    Leverage,
    SquaredNorms,
    Table,
    predicted,
    within_chunks,
)


def _at_most(n, budget):
    return min(n, budget) if isinstance(budget, int) else n


def knorm(budget):
    """Keys of small norm (Devoto et al., arXiv 2406.11430)."""
    return Evict(KeyNorm(), budget)


def keydiff(budget):
    """Keys unlike the others (Park et al., arXiv 2504.15364)."""
    return Evict(KeyDifference(), budget)


def lagkv(budget, *, lag=128, sinks=4):
    """Tokens that stand out from the text that follows them (Liang et al., arXiv 2504.04704)."""
    return Evict(LagRelative(lag, sinks), budget, sinks)


def curdkv(budget, *, partition=16, sinks=4):
    """Tokens of high leverage in keys and values (Sengupta et al., arXiv 2509.15038)."""
    return Evict(SquaredNorms(partition), budget, sinks)


def expected_attention(budget, *, horizon=512, sinks=4):
    """What queries to come are expected to attend to (Devoto et al., arXiv 2510.00636)."""
    sinks = _at_most(sinks, budget)
    return Evict(Expected(FutureQueries(horizon, sinks)), budget, sinks)


def capkv(budget, *, tau=5.0, horizon=512, sinks=4):
    """Values that others cannot stand for (arXiv 2604.25975)."""
    sinks = _at_most(sinks, budget)
    return Evict(Capacity(FutureQueries(horizon, sinks), tau), budget, sinks)


def compactor(budget, *, chunk=256, sketch=48, sinks=8, recent=4):
    """Keys that stand out, and tokens that their neighbourhood looks at (Chari and Van Durme, arXiv 2507.08143)."""
    blend = 1.0 - budget if isinstance(budget, float) else 0.35
    votes = Pooled(ValueWeighted(within_chunks(chunk, sinks, recent)), "avg", 3)
    return Evict(Blend((Standardized(Leverage(sketch)), Standardized(votes)), (blend, 1.0)), budget, sinks, recent)


def q_filters(budget, filters):
    """Keys against the direction in which a head's queries spread, "L K H" (Godey et al., arXiv 2503.02812)."""
    return Evict(KeyDirections(Table(filters)), budget)


def kvzap(budget, function, *, threshold=None, recent=128, sinks=0):
    """What `function(hidden, layer)` "B T K" says that KVzip would keep (Jegou and Jeblick, arXiv 2601.07891)."""
    sinks = _at_most(sinks, budget)
    recent = min(recent, budget - sinks) if isinstance(budget, int) else recent
    return Evict(
        predicted(function),
        budget,
        sinks,
        recent,
        when=STEP,
        select=TopK() if threshold is None else AtLeast(threshold),
    )
