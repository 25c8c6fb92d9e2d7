"""Methods where the end of the prompt votes, or the prompt itself when it is repeated."""

import dataclasses

import numpy as np

from kvjax.core.across import Preference, ScoreEntropy, across_layers, by_top_scores
from kvjax.core.budgets import Adaptive, HeadShares, LayerShares, Pyramid, Schedule
from kvjax.core.contract import Layout, resolve, value
from kvjax.core.decide.rewrite import Match, Merge, Reference, ReferenceAttention
from kvjax.core.decide.select import Chunks, LazyOrAll, PerChunk, ThenRandom, TopK, TwoStage
from kvjax.core.drivers.replay import Repeated, Reread
from kvjax.core.evict import Evict
from kvjax.core.observe import ProjectedValueNorm, Rows
from kvjax.core.scores.attention import Accumulated, Pooled, ValueWeighted, Votes
from kvjax.core.scores.rows import Defensive, Unsteady


def snapkv(budget, *, window=32, kernel=7):
    """What the end of the prompt looked at, with its surroundings (Li et al., arXiv 2404.14469)."""
    return Evict(Pooled(Votes(window), "max", kernel), budget, 0, window)


def pyramidkv(budget, *, beta=20.0, window=8, kernel=7):
    """SnapKV with budgets that fall from the first layer to the last (Cai et al., arXiv 2406.02069)."""
    return dataclasses.replace(snapkv(budget, window=window, kernel=kernel), layers=Pyramid(beta))


def ada_snapkv(budget, *, alpha=0.5, window=32, kernel=7, pool=True):
    """SnapKV whose heads compete for their layer's budget (Feng et al., arXiv 2407.11550)."""
    policy = snapkv(budget, window=window, kernel=kernel)
    return dataclasses.replace(policy, heads=Adaptive(alpha), layout=Layout(pool=pool))


def ada_pyramid(budget, *, beta=20.0, window=8, kernel=7, pool=True):
    """Both (Feng et al., arXiv 2407.11550)."""
    return dataclasses.replace(ada_snapkv(budget, window=window, kernel=kernel, pool=pool), layers=Pyramid(beta))


def headkv(budget, importance, *, beta=1.2, window=32, kernel=7, pool=True):
    """SnapKV where heads that retrieve get more; `importance` "L K" (Fu et al., arXiv 2410.19258)."""
    weights = np.asarray(importance) / np.mean(importance) / beta + 1 - 1 / beta
    table = tuple(map(tuple, weights.tolist()))
    parts = {"layers": LayerShares(tuple(weights.sum(1).tolist())), "heads": HeadShares(table)}
    return dataclasses.replace(snapkv(budget, window=window, kernel=kernel), **parts, layout=Layout(pool=pool))


def criticalkv(base):
    """A policy's best, then the best by score and projected value (Feng et al., arXiv 2502.03805)."""
    return dataclasses.replace(base, select=TwoStage(ProjectedValueNorm()))


def chunkkv(base, *, size=20):
    """Whole chunks of text, by another policy's scores (Liu et al., arXiv 2502.00299)."""
    return dataclasses.replace(base, select=Chunks(size, base.budget if isinstance(base.budget, float) else None))


def finch(budget, *, window=32, chunk=None):
    """What the question at the end looks at, moved together (Corallo and Papotti, TACL 12)."""
    share = budget if isinstance(budget, float) else None
    select = TopK() if chunk is None else PerChunk(chunk, share)
    return Evict(
        Accumulated(Rows(window, by_length=True)), budget, 0, window, select=select, layout=Layout(positions="rank")
    )


def simlayerkv(threshold, *, sinks=4, recent=1024, rows=1, budget=1.0):
    """Lazy layers keep the first and the last tokens alone (Zhang et al., arXiv 2410.13846)."""
    return Evict(Votes(rows), budget, sinks, recent, select=LazyOrAll(threshold))


def cake(budget, *, window=32, kernel=5, variance=200.0, entropy=1.6, shift=0.6):
    """Layers get what their attention asks for; unsteady tokens stay (Qin et al., arXiv 2503.12491)."""
    policy = Evict(Pooled(Unsteady(window, variance), "avg", kernel), budget, 0, window)
    return across_layers(policy, Preference(window, entropy, shift))


def lava(budget, *, window=32, kernel=7, pool=True):
    """Votes times the head's largest value, so that heads and layers compare (Shen et al., arXiv 2509.09754)."""
    score = ValueWeighted(Pooled(Votes(window, "max"), "max", kernel), "largest")
    policy = Evict(score, budget, 0, window, heads=Adaptive(1.0), layout=Layout(pool=pool))
    return across_layers(policy, ScoreEntropy())


def defensivekv(budget, *, window=32, kernel=5, mass=0.9, pool=True):
    """What any row of the window looked at (Feng et al., arXiv 2510.13334)."""
    score = Defensive(budget, window, kernel, mass)
    return Evict(score, budget, 0, window, heads=Adaptive(1.0), layout=Layout(pool=pool))


def layer_defensivekv(budget, *, max_ratio=2.0, **options):
    """DefensiveKV where all layers compete: one top-k."""
    return across_layers(defensivekv(budget, **options), by_top_scores, max_ratio=max_ratio)


@value
class Table4:
    """NaCl's Table 4 between its rows: shares of the prompt, linear in the budget from 10 to 30 %."""

    which: int
    budget: object
    least: int = 0

    def __call__(self, prompt, budget):
        n = np.maximum(prompt, 1)
        asked = (
            self.budget * 100.0 if isinstance(self.budget, float) else 100.0 * resolve(self.budget, prompt, prompt) / n
        )
        inside = np.clip(asked, 10.0, 30.0)
        table = np.array([[1.0, 3.0, 7.0], [2.0, 18.0, 12.0], [1.5, 20.0, 18.0]])
        share = lambda column: np.interp(inside, [10.0, 20.0, 30.0], table[:, column]) * asked / inside
        percent = share(0) + share(1) if self.which == 1 else share(self.which)
        return np.maximum(np.floor(percent * n / 100.0 + 1e-9).astype(np.int64), self.least)


def nacl(budget, *, recent=None, proxies=None, random=None, decode_every=None):
    """What the proxies at the end look at, and a random sample of the rest (Chen et al., arXiv 2408.03675)."""
    recent = Table4(0, budget) if recent is None else recent
    proxies = Table4(1, budget, 1) if proxies is None else proxies
    select = ThenRandom(Table4(2, budget) if random is None else random)
    return Evict(
        Accumulated(Rows(proxies), restart=True), budget, 0, recent, when=Schedule(every=decode_every), select=select
    )


def kvzip(budget, *, repeat=(), repeat_next=(), chunk=2048, overlap=8, sinks=4, pool=True):
    """What is attended to while the model repeats the prompt (Kim et al., arXiv 2505.23416)."""
    how = Reread(repeat, repeat_next, chunk, overlap, sinks)
    safe = min(sinks, budget) if isinstance(budget, int) else sinks
    return Evict(Repeated(how), budget, safe, heads=Adaptive(1.0), layout=Layout(pool=pool))


def attention_matching(budget, *, rows=256, sinks=4, weights=True, values=True):
    """The most attended keys, with weights and values that answer as the full cache did (arXiv 2602.16284)."""
    ask = Reference(rows)
    return Evict(ReferenceAttention(ask), budget, sinks, rewrite=Match(ask, weights, values))


def merging(base, *, threshold=0.0, fraction=1.0):
    """A policy that merges the values it evicts into those it keeps (kvpress, after arXiv 2406.13035)."""
    return dataclasses.replace(base, rewrite=Merge(threshold, fraction))
