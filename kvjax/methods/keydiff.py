"""KeyDiff: eviction by key similarity (Park et al., arXiv 2504.15364)."""

from kvjax.eviction import Evict
from kvjax.scoring.key_scores import KeyDifference
from kvjax.sizes.budget import Count
from kvjax.sizes.schedule import Schedule, after_prefill


def keydiff(budget: int | float | Count, *, when: Schedule = after_prefill()) -> Evict:
    r"""Keeps keys that are unlike the others: $S_j = -\cos(k_j, \bar k)$ with the mean of all unit keys.

    The paper runs it on blocks of 128 appended to what was kept: `prefill(..., block=128)`.

    Args:
      budget: live tokens a kv head and layer.
      when: the score needs no attention, so any schedule works.
    """
    return Evict(KeyDifference(), budget, when=when)
