"""TOVA: token omission via attention (Oren et al., arXiv 2401.06104)."""

from typing import Literal

from kvjax.eviction import Evict
from kvjax.scoring.protect import Protect
from kvjax.scoring.scores import LastRow
from kvjax.sizes.budget import Count
from kvjax.sizes.schedule import every_step


def tova(
    budget: int | float | Count,
    *,
    head_mode: Literal["layer_mean", "per_kv_head"] = "layer_mean",
    sinks: int = 0,
    protect_last: int = 0,
) -> Evict:
    r"""Evicts the token that the newest query attends to least.

    $S_j$ is the last row's attention averaged over all heads of the layer, so that all heads keep the same tokens.
    Nothing is accumulated and nothing protected: the newest token may go (D-08).

    Args:
      budget: live tokens a kv head and layer.
      head_mode: "layer_mean", or "per_kv_head" to decide for each kv head (EasyKV while decoding, D-09).
      sinks: first tokens that stay (EasyKV keeps 4 in prefill, D-09).
      protect_last: last tokens that stay; kvpress forces 1.
    """
    return Evict(LastRow(head_mode), budget, protect=Protect(sinks, protect_last), when=every_step())
