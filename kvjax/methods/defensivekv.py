"""DefensiveKV (Feng et al., arXiv 2510.13334)."""

from kvjax.across_layers import AcrossLayers, TopScores, across_layers
from kvjax.eviction import Evict
from kvjax.policy import Layout
from kvjax.scoring.protect import Protect
from kvjax.scoring.row_votes import Defensive
from kvjax.sizes.allocation import Adaptive
from kvjax.sizes.budget import Count


def defensivekv(
    budget: int | float | Count,
    *,
    window_size: int = 32,
    kernel_size: int = 5,
    mass: float = 0.9,
    storage: Layout = "pool",
) -> Evict:
    r"""Keeps what any row of the window looked at, against the case that importance does not last.

    A token's score is the worst case over the window's rows and query heads instead of their mean, raised to its head's
    mean, times the share that its value has in the layer's output; what holds 90 % of the attention comes first
    (`kvjax.scoring.row_votes.Defensive` has the formulas). The heads of a layer compete for its budget without a floor.

    As in the released code, values are compared between kv heads, token by token, and what counts as attention to the
    window in its 90 % is that to the tokens before it, as many as the window has. No head puts more tokens first than
    the budget leaves beside the window; the released code takes the budget's share of the prompt without its window
    for the budget there, so that fewer may come first, and keeps the same tokens else (`kvjax/methods/peers.md`).

    Args:
      budget: live tokens a kv head and layer on average, the window included.
      window_size: observation window.
      kernel_size: every row's votes are averaged over so many neighbours; odd.
      mass: of the attention that comes first.
      storage: "pool" allocates the layer what its heads need together, "dense" every head what one could need.
    """
    score = Defensive(budget, window_size, kernel_size, mass)
    heads = Adaptive(alpha=1.0, max_ratio=float("inf"))
    return Evict(score, budget, protect=Protect(recent=window_size), heads=heads, storage=storage)


def layer_defensivekv(
    budget: int | float | Count,
    *,
    window_size: int = 32,
    kernel_size: int = 5,
    mass: float = 0.9,
    max_ratio: float = 2.0,
    storage: Layout = "pool",
) -> AcrossLayers:
    """DefensiveKV where all layers compete for the model's budget: one top-k of its scores.

    Args:
      budget: live tokens a kv head and layer on average, the window included.
      window_size, kernel_size, mass, storage: see `defensivekv`.
      max_ratio: no layer gets more than this many times the average; the released code has no bound.
    """
    policy = defensivekv(budget, window_size=window_size, kernel_size=kernel_size, mass=mass, storage=storage)
    return across_layers(policy, TopScores(), max_ratio=max_ratio)
