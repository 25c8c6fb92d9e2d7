"""Methods that look at keys, values, hidden states, or a model of the queries to come."""

from typing import Annotated, Any, Literal

from kvjax.budgets import STEP, Schedule
from kvjax.compose.across import shared_layers
from kvjax.compose.evict import Evict
from kvjax.contract import Amount, Count, FrozenArrays, NonNegative, Policy, Score, Size
from kvjax.decide.select import AtLeast, TopK
from kvjax.observe import CentredQueries, ChunkAttention, FutureQueries, Hidden, OfLayer
from kvjax.pallas_kernels.kinds import numbers
from kvjax.scores.blends import Blend, LayerMost, Pooled, Standardized, ValueWeighted
from kvjax.scores.keys import (
    Capacity,
    Centred,
    Expected,
    Given,
    KeyDifference,
    KeyDirections,
    KeyNorm,
    LagRelative,
    Leverage,
    SquaredNorms,
)
from kvjax.scores.learned import Predicted


def _at_most(n: int, budget: Count) -> int:
    """As many tokens as a budget has."""
    return min(n, budget) if isinstance(budget, int) else n


def knorm(budget: Count) -> Evict:
    r"""Keeps the keys of the smallest norm (Knorm, Devoto et al., arXiv 2406.11430).

    $S_j = -\lVert k_j \rVert_2$: small keys draw much attention.

    Args:
      budget: live tokens a kv head and layer.
    """
    return Evict(KeyNorm(), budget)


def keydiff(budget: Count) -> Evict:
    r"""Keeps the keys that are unlike the others (KeyDiff, Park et al., arXiv 2504.15364).

    $S_j = -\cos(k_j, \bar k)$ with $\bar k$ the mean of all unit keys. The paper reads prompts in blocks of 128.

    Args:
      budget: live tokens a kv head and layer.
    """
    return Evict(KeyDifference(), budget)


def lagkv(budget: Count, *, lag: Size = 128, sinks: Amount = 4) -> Evict:
    r"""Keeps the tokens that stand out from the text that follows them (LagKV, Liang et al., arXiv 2504.04704).

    $S_j$ is the rank in its partition of the deviation over channels of the key and of the value, normalised by the
    minimum and maximum of the next partition.

    Args:
      budget: live tokens a kv head and layer, sinks included.
      lag: tokens of a partition.
      sinks: first tokens that stay; they belong to no partition.
    """
    return Evict(LagRelative(lag, sinks), budget, sinks)


def curdkv(budget: Count, *, partition: Size = 16, sinks: Amount = 4) -> Evict:
    r"""Keeps the tokens of high leverage in keys and values (CurDKV, Sengupta et al., arXiv 2509.15038).

    $S_j = \frac{\lVert k_j\rVert^2}{\sum_P \lVert k\rVert^2} \cdot \frac{\lVert v_j\rVert^2}{\sum_P \lVert v\rVert^2}$
    with $P$ the partition of token $j$.

    Args:
      budget: live tokens a kv head and layer, sinks included.
      partition: tokens of a partition.
      sinks: first tokens that stay.
    """
    return Evict(SquaredNorms(partition), budget, sinks)


def expected_attention(budget: Count, *, horizon: Size = 512, sinks: Amount = 4, eps: NonNegative = 0.0) -> Evict:
    r"""Keeps what queries to come are expected to attend to (ExpectedAttention, Devoto et al., arXiv 2510.00636).

    $S_j \propto (\exp(k_j \cdot \mu / \sqrt d + k_j^\top \Sigma k_j / 2d) + \epsilon) \lVert v_j \rVert_2$ with $\mu$
    and $\Sigma$ the moments of the prompt's queries, turned by the average rotation of the next positions.

    Args:
      budget: live tokens a kv head and layer, sinks included.
      horizon: positions ahead whose rotations are averaged.
      sinks: first tokens that stay, and whose queries do not count.
      eps: $\epsilon$; 0.01 on the leaderboard of its authors.
    """
    sinks = _at_most(sinks, budget)
    return Evict(Expected(FutureQueries(horizon, sinks), eps), budget, sinks)


def capkv(budget: Count, *, tau: NonNegative = 5.0, horizon: Size = 512, sinks: Amount = 4) -> Evict:
    r"""Keeps the tokens whose values other tokens' values do not span (CAPKV, arXiv 2604.25975).

    $S_j = w_j \, v_j^\top A^{-1} v_j$ with $A = I + \sum_i w_i v_i v_i^\top$ and $w_j$ by the cosine of the key and the
    mean query to come.

    Args:
      budget: live tokens a kv head and layer, sinks included.
      tau: how sharply queries choose.
      horizon: positions ahead whose rotations are averaged.
      sinks: first tokens that stay, and whose queries do not count.
    """
    sinks = _at_most(sinks, budget)
    return Evict(Capacity(FutureQueries(horizon, sinks), tau), budget, sinks)


def compactor(
    budget: Count,
    *,
    blend: NonNegative | None = None,
    chunk: Size = 256,
    sketch: Size | None = 48,
    sinks: Amount = 8,
    recent: Amount = 4,
) -> Evict:
    r"""Keeps keys that stand out, and tokens that their neighbourhood attends to (Compactor, arXiv 2507.08143).

    $S = \beta \, z(\ell) + z(\mathrm{avgpool}_3(a \lVert v\rVert_2))$ with $\ell$ the leverage of keys before rotation,
    $a$ what a token receives from all rows of its chunk, and $z$ standardizing over the layer (Chari and Van Durme).

    Args:
      budget: live tokens a kv head and layer, sinks and recent tokens included.
      blend: $\beta$; None for the evicted share of the prompt, or 0.35 where the budget is a number of tokens.
      chunk: tokens of a chunk.
      sketch: columns of the random sketch of keys; None uses the keys themselves.
      sinks, recent: first and last tokens that stay, and of which nothing is measured.
    """
    if blend is None:
        blend = 1.0 - budget if isinstance(budget, float) else 0.35
    votes = chunk_votes(ChunkAttention(chunk, sinks, recent))
    return Evict(Blend((Standardized(Leverage(sketch)), votes), (blend, 1.0)), budget, sinks, recent)


def chunk_votes(chunks: ChunkAttention) -> Standardized:
    """What tokens receive within their chunk of the prompt, times value norms, with their neighbours (Compactor)."""
    return Standardized(Pooled(ValueWeighted(Given(chunks, prompt_only=True)), "avg", 3))


def q_filters(budget: Count, filters: Annotated[Any, numbers("L", "K", "H")]) -> Evict:
    r"""Keeps the keys that lie against the direction in which a head's queries spread (arXiv 2503.02812).

    $S_j = -f \cdot k_j$ with $f$ the first right singular vector of a head's queries (Godey et al., Eq. 2).

    Args:
      budget: live tokens a kv head and layer.
      filters: directions "L K H", one for every layer and kv head.
    """
    return Evict(KeyDirections(FrozenArrays({"filters": filters})), budget)


def kvzap(budget: Count, function: OfLayer, *, threshold: float | None = None, recent: Amount = 128) -> Evict:
    r"""Keeps what KVzip would keep, as predicted from hidden states by a small function (KVzap, arXiv 2601.07891).

    $S_j = f(h_j)$, the logarithm of a score of KVzip+, at every step (Jegou and Jeblick).

    Args:
      budget: the most live tokens a kv head and layer.
      function: `(hidden "B T D", layer) -> "B T K"`, fitted to the model.
      threshold: tokens that score below it go as soon as they are not recent; None for a budget alone.
      recent: last tokens that stay.
    """
    select = TopK() if threshold is None else AtLeast(threshold)
    return Evict(Predicted(Hidden(function)), budget, 0, _at_most(recent, budget), when=STEP, select=select)


def triattention(
    budget: Count,
    mean: Annotated[Any, numbers("L", "N", "H")],
    length: Annotated[Any, numbers("L", "N", "H")],
    *,
    every: Size = 128,
    mode: Literal["per_layer_per_head", "per_head", "union"] = "per_layer_per_head",
) -> Policy:
    """Keeps the whole prompt, and keys that the centres of queries will pay to (TriAttention, arXiv 2604.04921).

    Queries before rotation lie around centres, so that what a key will get follows from its distance. It evicts while
    decoding, when a head holds `every` tokens beyond its budget.

    Args:
      budget: live tokens a kv head and layer after an eviction, the prompt included: `Combined("sum", (1.0, 512))` is
        the prompt and 512 more. One that does not hold the prompt is refused.
      mean, length: of a model's queries before rotation, the mean and the mean length of each channel's pair, as
        `kvjax.learning.probes.fit_centres` finds them.
      every: tokens by which a cache grows.
      mode: which heads keep the same tokens, as in the released code. "per_layer_per_head": none. "per_head", the
        default of its command line: kv heads of one index, by the mean over layers of their scores. "union": all heads
        of all layers, by the largest score that any of them gives; the code's choice among the union of what heads
        would keep is this one.
    """
    score: Score = Centred(CentredQueries(FrozenArrays({"mean": mean, "length": length})))
    policy = Evict(LayerMost(score) if mode == "union" else score, budget, 1.0, when=Schedule(over=every))
    if mode == "per_layer_per_head":
        return policy
    return shared_layers(policy, "max" if mode == "union" else "mean")
