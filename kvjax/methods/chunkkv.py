"""ChunkKV (Liu et al., arXiv 2502.00299)."""

import dataclasses

from kvjax.eviction import Evict
from kvjax.methods.snapkv import snapkv
from kvjax.pallas_kernels.values import a, checked, optional
from kvjax.scoring.select import Chunks
from kvjax.sizes.budget import Count, Ratio, as_count


def chunkkv(budget: int | float | Count, *, base: Evict | None = None, chunk_size: int = 20) -> Evict:
    """Keeps whole chunks of text, the same ones in all kv heads, by another policy's scores.

    Scores are summed over heads and averaged over a chunk. The kept count is near the budget: as many whole chunks as
    its share of the prompt, at least one. What the base protects, as SnapKV its window, stays beside them; kvpress
    keeps whole chunks only, and ranks the tokens of a prompt that is shorter than a chunk one by one. Every sequence of
    a batch gets its own chunks; the released code applies the first row's to all.

    Args:
      budget: live tokens a kv head and layer; a share of the prompt is the share of chunks.
      base: the policy whose scores and protection are used, SnapKV if None; its budget is replaced.
      chunk_size: tokens of a chunk.
    """
    checked(optional(a(Evict)), "base", base)
    base = snapkv(budget) if base is None else dataclasses.replace(base, budget=budget)
    count = as_count(budget, "budget")
    return dataclasses.replace(base, select=Chunks(chunk_size, count.share if isinstance(count, Ratio) else None))
