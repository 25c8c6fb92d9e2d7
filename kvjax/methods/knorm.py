"""Knorm: eviction by key norm (Devoto et al., arXiv 2406.11430)."""

from kvjax.eviction import Evict
from kvjax.scoring.key_scores import KeyNorm
from kvjax.sizes.budget import Count
from kvjax.sizes.schedule import Schedule, after_prefill


def knorm(budget: int | float | Count, *, when: Schedule = after_prefill()) -> Evict:
    r"""Keeps the keys of smallest norm, $S_j = -\lVert k_j \rVert_2$: small keys draw much attention.

    One implementation skips layers 0 and 1; `kvjax.partition` does so for any layers.

    Args:
      budget: live tokens a kv head and layer.
      when: the score needs no attention, so any schedule works.
    """
    return Evict(KeyNorm(), budget, when=when)
