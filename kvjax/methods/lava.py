"""LAVa (Shen et al., arXiv 2509.09754)."""

from kvjax.across_layers import AcrossLayers, ScoreEntropy, across_layers
from kvjax.eviction import Evict
from kvjax.policy import Layout
from kvjax.scoring.blends import ValueWeighted
from kvjax.scoring.protect import Protect
from kvjax.scoring.scores import Pooled, Window
from kvjax.sizes.allocation import Adaptive
from kvjax.sizes.budget import Count


def lava(
    budget: int | float | Count,
    *,
    window_size: int = 32,
    kernel_size: int = 7,
    alpha: float = 1.0,
    max_ratio: float = 2.0,
    storage: Layout = "pool",
) -> AcrossLayers:
    r"""SnapKV's votes times the largest value of the head, so that heads and layers can be compared.

    $S_j = \max_g \mathrm{maxpool}_7(\bar p)_j \cdot \max_i \lVert v_i\rVert_1$ with $\bar p$ the mean attention of the
    window's rows. The heads of a layer compete for its budget; layers get tokens in proportion to the entropy of their
    scores (`kvjax.across_layers.ScoreEntropy`), beside the window that each keeps.

    The released code rounds every layer's share down, and keeps the same tokens else (`kvjax/methods/peers.md`).

    Args:
      budget: live tokens a kv head and layer on average, the window included.
      window_size: observation window.
      kernel_size: pooling width, odd.
      alpha: weight of the competition against a uniform share of every head; the released code's `floor_alpha` is
        `1 - alpha`, 0.5 in its example. There that part is of the average budget with its window, whatever the layer
        got, so that more is kept than the budget; here of the layer's share.
      max_ratio: no layer gets more than this many times the average.
      storage: "pool" allocates a layer what its heads need together, "dense" every head what one could need.
    """
    score = ValueWeighted(Pooled(Window(window_size, "max"), "max", kernel_size), "largest_l1")
    heads = Adaptive(alpha, max_ratio=float("inf"))
    policy = Evict(score, budget, protect=Protect(recent=window_size), heads=heads, storage=storage)
    return across_layers(policy, ScoreEntropy(), max_ratio=max_ratio)
