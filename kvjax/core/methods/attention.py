"""Methods that accumulate attention, prompt and decode alike."""

from kvjax.core.budgets import STEP, Combined, Of, Schedule, Share
from kvjax.core.evict import Evict
from kvjax.core.observe import EntropyScaled, Noisy, Rows
from kvjax.core.scores.attention import (
    Accumulated,
    Blend,
    LastRows,
    LayerMean,
    Mean,
    Pooled,
    SparedByDeviation,
    ValuePrior,
    Votes,
)
from kvjax.core.scores.keys import Redundancy


def h2o(budget, *, recent=Share(0.5), group="mean"):
    """The most attended tokens, and recent ones (Zhang et al., arXiv 2306.14048)."""
    return Evict(Accumulated(Rows(group=group)), budget, 0, recent, when=STEP)


def key_attention(budget):
    """H2O without a recent window: a negative baseline (Keyformer, section 2.3)."""
    return h2o(budget, recent=0)


def mas(budget, *, recent=0, sinks=0, count_self=True, first=0):
    """Evicts the smallest mean attention (RoCo, section 4.1)."""
    return Evict(Mean(count_self, first), budget, sinks, recent, when=STEP)


def aqas(budget, *, recent=Share(0.5)):
    """Evicts the token that the fewest rows gave more than average (RoCo's baseline)."""
    return Evict(Accumulated(Rows(element="above")), budget, 0, recent, when=STEP)


def roco(budget, *, scope=Share(0.5), recent=Combined("least", (10, Share(0.25)))):
    """Evicts the smallest mean attention among tokens whose attention varies little (arXiv 2402.06262)."""
    return Evict(SparedByDeviation(size=scope), budget, 0, recent, when=STEP)


def tova(budget, *, by_head=False):
    """Evicts the token that the newest row attends to least (Oren et al., arXiv 2401.06104)."""
    row = Votes(1, prompt_only=False)
    return Evict(row if by_head else LayerMean(row), budget, when=STEP)


def keyformer(budget, *, recent=Share(0.3), tau=(1.0, 2.0)):
    """Accumulates a softmax with Gumbel noise and a growing temperature (Adnan et al., arXiv 2403.09054)."""
    return Evict(Accumulated(Rows(softmax=Noisy(tau))), budget, 0, recent, when=STEP)


def ahakv(budget, *, recent=32, kernel=7):
    """Recent rows vote, by a softmax of constant entropy, weighted by values (Gu et al., arXiv 2506.03762)."""
    last = recent if isinstance(recent, int) else Of(recent, budget)
    return Evict(ValuePrior(Rows(last, softmax=EntropyScaled(budget)), kernel=kernel), budget, 0, recent, when=STEP)


def scissorhands(budget, *, history=400, recent=10, drop=Share(0.5)):
    """Drops many at once: those that few of the last rows gave more than average (Liu et al., arXiv 2305.17118)."""
    return Evict(LastRows(history, "above"), budget, 0, recent, when=Schedule(over=1, drop=drop))


def r_kv(budget, *, importance=0.1, window=8, kernel=7, threshold=0.5, buffer=128):
    """What the last rows look at, and of what repeats itself the newest (Cai et al., arXiv 2505.24133)."""
    parts = Pooled(LastRows(window), "max", kernel), Redundancy(threshold)
    score = Blend(parts, (importance, importance - 1.0))
    return Evict(score, budget, 0, window, when=Schedule(over=buffer))
