"""Compactor (Chari and Van Durme, arXiv 2507.08143)."""

from kvjax.eviction import Evict
from kvjax.pallas_kernels.values import checked, number, optional
from kvjax.scoring.blends import Blend, Standardized, ValueWeighted
from kvjax.scoring.key_scores import ChunkVotes, Leverage
from kvjax.scoring.measurements import ChunkAttention
from kvjax.scoring.protect import Protect
from kvjax.scoring.scores import Pooled
from kvjax.sizes.budget import Count, Ratio, as_count


def compactor(
    budget: int | float | Count,
    *,
    blend: float | None = None,
    chunk_size: int = 256,
    sketch: int | None = 48,
    sinks: int = 8,
    recent: int = 4,
    scaled: bool = False,
    filled: bool = False,
) -> Evict:
    r"""Keeps keys that stand out among the others, and tokens that their neighbourhood looks at. No question is needed.

    $S = \beta \, z(\ell) + z(\mathrm{avgpool}_3(a \cdot \lVert v\rVert_2))$: $\ell$ the leverage of keys before
    rotation (`kvjax.scoring.key_scores.Leverage`), $a$ what a token receives from all rows of its chunk, later ones too
    (`kvjax.scoring.measurements.ChunkAttention`), $z$ less the mean and over the deviation of the layer.

    As kvpress has it (`CompactorPress`), $\beta$ is the share of the prompt that is evicted, and logits within chunks
    are raw products.

    Args:
      budget: live tokens a kv head and layer, protected ones included.
      blend: $\beta$; None for the evicted share of the prompt, and for 0.35 where the budget is a number of tokens.
      chunk_size: tokens of a chunk.
      sketch: columns of the sketch of keys, None for none.
      sinks, recent: protected tokens at either end, which nothing is measured of.
      scaled: multiply the logits within chunks by $1/\sqrt d$.
      filled: fill up the last chunk, as the released code does (`ChunkAttention`).
    """
    count, blend = as_count(budget, "budget"), checked(optional(number()), "blend", blend)
    if blend is None:
        blend = 1.0 - count.share if isinstance(count, Ratio) else 0.35
    votes = ChunkVotes(ChunkAttention(chunk_size, sinks, recent, scaled, filled))
    parts = Standardized(Leverage(sketch)), Standardized(Pooled(ValueWeighted(votes, "l2"), "avg", 3))
    return Evict(Blend(parts, (blend, 1.0)), budget, protect=Protect(sinks=sinks, recent=recent))
