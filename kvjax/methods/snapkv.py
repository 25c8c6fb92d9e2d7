"""SnapKV (Li et al., arXiv 2404.14469)."""

from typing import Literal

from kvjax.eviction import Evict
from kvjax.pallas_kernels.values import checked, flag, one_of, tokens
from kvjax.policy import Granularity
from kvjax.scoring.protect import Protect
from kvjax.scoring.scores import Pooled, Window
from kvjax.scoring.stats import OutsideWindow
from kvjax.sizes.budget import AtMost, Count, Share, Tokens


def snapkv(
    budget: int | float | Count,
    *,
    window_size: int = 32,
    kernel_size: int = 7,
    pooling: Literal["max", "avg"] = "max",
    group: Literal["mean", "max", "sum"] = "mean",
    avg_pad: Literal["zero", "valid_count"] = "zero",
    pool_before_rows: bool = False,
    softmax_over: Literal["all", "outside_window"] = "all",
    granularity: Granularity = "kv_head",
    cut_window: bool = False,
) -> Evict:
    r"""Keeps what the end of the prompt looked at, with its surroundings.

    $S_j = \mathrm{pool}\big(\sum_{i > n - w} p_{ij}\big)$ over the last $w$ rows of the prompt, each softmax taken over
    all visible keys, for the columns before the window. The window itself stays. Once, after prefill; generated tokens
    are all kept.

    The released code expands keys and values to query heads first, so that every query head keeps a set of its own and
    the cache is G times larger; here a kv head's set is chosen by the mean of its group, before pooling (D-39). The
    paper states the budget as a fraction of the prompt, the code as a capacity: `budget` takes both (D-44). Code that
    states the removed share r keeps `int(n * (1 - r))` tokens, float error included: `Ratio(1 - r, "int")` (D-45).

    A budget that does not hold the window is refused, or, where it is a share of a prompt that is too short, leaves the
    prompt whole. kvpress evicts from such windows: their tokens have one score, above all others, so that no other
    token stays, and which of them do is left to the top-k of the library and device. `cut_window=True` keeps as many,
    the newest ones.

    | settings of | window_size | kernel_size | pooling | budget |
    |---|---|---|---|---|
    | published LongBench runs, and here | 32 | 7 | "max" | 1024, 2048, 4096 |
    | released class | 64 | 5 | "avg" | 320 |
    | released `init_snapkv` | 32 | 5 | "avg" | 2048 |
    | KVCache-Factory's runner | 8 | 7 | "max" | 512 |
    | kvpress | 64 | 5 | "avg" | a share |

    Args:
      budget: live tokens a kv head and layer after prefill, window included (`max_capacity_prompt`).
      window_size: observation window, inside the budget.
      kernel_size: pooling width, odd; 1 does not pool.
      pooling: kind of pooling.
      group: how a group's query heads are combined, before pooling.
      avg_pad: see `kvjax.scoring.scores.Pooled` (D-49).
      pool_before_rows: max-pool every row before rows are added, as Ada-KV's text has it (D-23).
      softmax_over: "outside_window" takes the softmax over the keys before the window only (D-24).
      granularity: "query_head" keeps a set for every query head (D-39).
      cut_window: where the budget does not hold the window, keep the newest of it.
    """
    one_of("softmax_over", softmax_over, "all", "outside_window")
    window_size = checked(tokens(1, "at least one row must be observed"), "window_size", window_size)
    pool_before_rows = checked(flag, "pool_before_rows", pool_before_rows)
    cut_window = checked(flag, "cut_window", cut_window)
    if pool_before_rows and pooling != "max":
        raise ValueError(f"pool_before_rows pools by maximum, but pooling={pooling!r}; use pooling='max'")
    softmax = None if softmax_over == "all" else OutsideWindow(window_size)
    votes = Window(window_size, group, softmax, kernel_size if pool_before_rows else 1)
    score = votes if pool_before_rows else Pooled(votes, pooling, kernel_size, avg_pad)
    recent = AtMost((Tokens(window_size), Share(1.0))) if cut_window else window_size
    return Evict(score, budget, protect=Protect(recent=recent), granularity=granularity)
