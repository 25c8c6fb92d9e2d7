"""R-KV (Cai et al., arXiv 2505.24133)."""

from typing import Literal

from kvjax.eviction import Evict
from kvjax.pallas_kernels.values import checked, number, one_of, tokens
from kvjax.scoring.blends import Blend
from kvjax.scoring.key_scores import Redundancy
from kvjax.scoring.protect import Protect
from kvjax.scoring.scores import Pooled, RecentRows
from kvjax.scoring.stats import OutsideWindow
from kvjax.sizes.budget import Count
from kvjax.sizes.schedule import when_over


def r_kv(
    budget: int | float | Count,
    *,
    importance: float = 0.1,
    window_size: int = 8,
    kernel_size: int = 7,
    threshold: float = 0.5,
    buffer: int = 128,
    group: Literal["mean", "max", "sum"] = "mean",
    softmax_over: Literal["all", "outside_window"] = "all",
) -> Evict:
    r"""For long reasoning: keeps what the last rows look at, and of what repeats itself the newest.

    $Z_j = \lambda \, \mathrm{maxpool}_7(\bar p)_j - (1 - \lambda) \, R_j$ with $\bar p$ the mean attention of the last
    `window_size` rows and $R$ the redundancy of keys (`kvjax.scoring.key_scores.Redundancy`), both shares that add up
    to about 1. A cache grows by `buffer` tokens, then is cut back to its budget; the prompt is cut first.

    The README of the released code has $\lambda = 0.1$, its code 0.07. It keeps the last queries and asks them anew
    when it evicts, with a softmax over the keys before the window of the largest logit of a group; here every row
    counts as it was read, over what the cache held then, and query heads are combined by `group`. Of a prompt,
    `importance=0.07, softmax_over="outside_window"` keeps the tokens that it keeps where kv heads have one query head
    each (`kvjax/methods/peers.md`).

    Args:
      budget: live tokens a kv head and layer, the window included, after an eviction.
      importance: $\lambda$, the weight of attention.
      window_size: the last tokens, whose rows vote and which stay.
      kernel_size: pooling width of the votes, odd.
      threshold: cosines above it are a resemblance.
      buffer: tokens by which a cache grows before it is cut.
      group: how the query heads of a kv head are combined.
      softmax_over: "outside_window" takes each row's softmax over the keys before the last `window_size` tokens.
    """
    one_of("softmax_over", softmax_over, "all", "outside_window")
    importance = checked(
        number("[0, 1]", "a weight of attention, the rest being redundancy's"), "importance", importance
    )
    window_size = checked(tokens(1, "at least one row must be observed"), "window_size", window_size)
    rows = RecentRows(window_size, group, None if softmax_over == "all" else OutsideWindow(window_size))
    score = Blend((Pooled(rows, "max", kernel_size), Redundancy(threshold)), (importance, importance - 1.0))
    return Evict(score, budget, protect=Protect(recent=window_size), when=when_over(buffer))
