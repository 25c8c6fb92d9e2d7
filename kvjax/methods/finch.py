"""FINCH (Corallo and Papotti, TACL 12, 2024, doi 10.1162/tacl_a_00716)."""

from typing import Literal

from kvjax.cache.state import Positions
from kvjax.eviction import Evict
from kvjax.pallas_kernels.values import checked, flag, optional, tokens
from kvjax.scoring.protect import Protect
from kvjax.scoring.scores import Accumulated
from kvjax.scoring.select import PerChunk, TopK
from kvjax.scoring.stats import LastRows, LastRowsByLength, Observe
from kvjax.sizes.budget import Count, Ratio, as_count


def finch(
    budget: int | float | Count,
    *,
    window_size: int = 32,
    normalize: bool = True,
    chunk_length: int | None = None,
    positions: Positions = "rerotate",
    group: Literal["mean", "max", "sum"] = "mean",
) -> Evict:
    r"""Keeps what the question at the end of the prompt looks at, moved together as if nothing had been between.

    $S_j = \sum_{i > n - w} n_i \, p_{ij}$ over the $w$ tokens of the question, with $n_i$ the number of tokens before
    row $i$, so that rows that share their attention among more keys do not count less. The question stays. Keys are
    turned to their rank among those that are kept.

    kvpress (`FinchPress`) finds the question behind a delimiter token, which it takes out of the prompt; here its
    number of tokens is given, and the prompt has no delimiter.

    Args:
      budget: live tokens a kv head and layer, the question included.
      window_size: tokens of the question.
      normalize: weigh rows by their length.
      chunk_length: every chunk of so many tokens keeps its own share, one token at least as far as the budget goes;
        None for one choice among all.
      positions: see `Evict`; "rerotate" as in the paper.
      group: how the query heads of a kv head are combined.
    """
    window_size = checked(tokens(1, "at least one row must be observed"), "window_size", window_size)
    chunk_length = checked(optional(tokens(1)), "chunk_length", chunk_length)
    rows = LastRowsByLength(window_size) if checked(flag, "normalize", normalize) else LastRows(window_size)
    count = as_count(budget, "budget")
    select = TopK() if chunk_length is None else PerChunk(chunk_length, count if isinstance(count, Ratio) else None)
    score = Accumulated(Observe(rows, group=group))
    return Evict(score, budget, protect=Protect(recent=window_size), select=select, positions=positions)
