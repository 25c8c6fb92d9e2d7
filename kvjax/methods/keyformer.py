"""Keyformer (Adnan et al., arXiv 2403.09054)."""

import dataclasses
from typing import Literal, overload

from kvjax.cache.state import Positions
from kvjax.eviction import Evict
from kvjax.methods.simulations import NextStepMask
from kvjax.pallas_kernels.values import one_of
from kvjax.policy import Policy
from kvjax.scoring.protect import Protect
from kvjax.scoring.scores import Accumulated
from kvjax.scoring.stats import AllRows, Noisy, Observe
from kvjax.sizes.budget import Count, Fixed, Less, Share, as_budget, as_count
from kvjax.sizes.schedule import every_step


@overload
def keyformer(
    budget: int | float | Count,
    *,
    recent: int | float | Count = ...,
    noise: Literal["gumbel", "gaussian", "constant", "none"] = ...,
    per: Literal["call", "key"] = ...,
    tau: tuple[float, float] = ...,
    tau_delta: float | None = ...,
    damping: float = ...,
    share_batch: bool = ...,
    positions: Positions = ...,
    group: Literal["mean", "max", "sum"] = ...,
    compat: None = ...,
) -> Evict: ...
@overload
def keyformer(
    budget: int | float | Count,
    *,
    recent: int | float | Count = ...,
    noise: Literal["gumbel", "gaussian", "constant", "none"] = ...,
    per: Literal["call", "key"] = ...,
    tau: tuple[float, float] = ...,
    tau_delta: float | None = ...,
    damping: float = ...,
    share_batch: bool = ...,
    positions: Positions = ...,
    group: Literal["mean", "max", "sum"] = ...,
    compat: Literal["keyformer_mask"] | None = ...,
) -> Policy: ...
def keyformer(
    budget: int | float | Count,
    *,
    recent: int | float | Count = Share(0.3),
    noise: Literal["gumbel", "gaussian", "constant", "none"] = "gumbel",
    per: Literal["call", "key"] = "call",
    tau: tuple[float, float] = (1.0, 2.0),
    tau_delta: float | None = None,
    damping: float = 1.0,
    share_batch: bool = False,
    positions: Positions = "original",
    group: Literal["mean", "max", "sum"] = "mean",
    compat: Literal["keyformer_mask"] | None = None,
) -> Policy:
    r"""Accumulates a noisy, tempered softmax over prompt and decode rows; keeps key tokens and recent ones.

    $f_j = \sum_i \mathrm{softmax}((x_{ij} + \zeta) / \tau_t)$ with standard Gumbel noise and a temperature that rises
    from 1 to 2 over the generation (Eq. 8 to 10); attention itself keeps the model's softmax. One token in, one out.

    Algorithm 1 draws noise once for every key; the released code draws it anew in every call, and the published numbers
    come from the code (D-33). The code's temperature step is given as a number (D-34). It sums scores over the batch
    (D-36), and its mask is off by one, which freezes the key set after the prompt; its files that really evict do so
    every 8th step and crash (D-37): here the algorithm is followed, `compat` reproduces the mask. The "constant"
    ablation cannot change a softmax (D-38). One score for all layers is `shared_layers` (D-35).

    Args:
      budget: live tokens a kv head and layer, recent ones included; 0.6 of the prompt in the released code.
      recent: protected last tokens.
      noise, per, tau, tau_delta: see `Noisy`.
      damping: what is added is multiplied by this (section 2.3's experiment).
      share_batch: one score for all sequences of a batch, such as beams.
      positions: "original", or "compact" for the paper's new positions.
      group: how a group's query heads are combined; noise is drawn for every query head.
      compat: "keyformer_mask" hides what the released simulation hides, and frees nothing
        (`kvjax.methods.simulations.NextStepMask`).

    Raises:
      ValueError: a `compat` that is unknown, or given with options that the simulation does not have.
    """
    of = Observe(AllRows(), softmax=Noisy(noise, per, tau, tau_delta), group=group)
    one_of("compat", compat, None, "keyformer_mask")
    if compat is not None:
        if damping != 1 or share_batch or positions != "original":
            raise ValueError(
                f"compat={compat!r} masks by the released simulation's scores, but damping={damping}, "
                f"share_batch={share_batch}, positions={positions!r} change them; leave these at their defaults"
            )
        count = as_budget(budget)
        within = Fixed(as_count(recent, "recent"), count)
        return NextStepMask(Less(count, within), within, of, persistent=True)
    score = Accumulated(of, damping=damping, share_batch=share_batch)
    policy = Evict(score, budget, protect=Protect(recent=recent), when=every_step())
    return dataclasses.replace(policy, positions=positions)
