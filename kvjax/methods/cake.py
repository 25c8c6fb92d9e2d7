"""CAKE (Qin et al., arXiv 2503.12491)."""

from kvjax.across_layers import AcrossLayers, Preference, across_layers
from kvjax.eviction import Evict
from kvjax.scoring.protect import Protect
from kvjax.scoring.row_votes import MeanAndVariance
from kvjax.scoring.scores import Pooled
from kvjax.sizes.budget import Count


def cake(
    budget: int | float | Count,
    *,
    window_size: int = 32,
    kernel_size: int = 5,
    variance: float = 200.0,
    tau1: float = 1.6,
    tau2: float = 0.6,
    max_ratio: float = 2.0,
) -> AcrossLayers:
    r"""Layers share the cake as their attention asks for it; tokens whose attention shifts from row to row stay.

    $S = \mathrm{avgpool}_5(\mu + \gamma \sigma^2)$ of what the window's rows give a token. A layer gets tokens in
    proportion to $H^{1/\tau_1} V^{1/\tau_2}$ (`kvjax.across_layers.Preference`), beside the window that each keeps. The
    released code cuts earlier layers again whenever a later one asks for its share; what is kept in the end is the
    same, as far as `max_ratio` allows and up to a token a head, as it rounds shares down and gives what is left to the
    first layers (`kvjax/methods/peers.md`). It leaves prompts whole that are longer than the budget by no more than a
    window, and goes on evicting while decoding, by each new row's attention; here generated tokens are all kept.

    Args:
      budget: live tokens a kv head and layer on average, the window included.
      window_size: observation window.
      kernel_size: pooling width, odd.
      variance: $\gamma$.
      tau1, tau2: $\tau_1$ and $\tau_2$. The paper tunes them for every model.
      max_ratio: no layer gets more than this many times the average.
    """
    score = Pooled(MeanAndVariance(window_size, variance), "avg", kernel_size)
    policy = Evict(score, budget, protect=Protect(recent=window_size))
    return across_layers(policy, Preference(window_size, tau1, tau2), max_ratio=max_ratio)
