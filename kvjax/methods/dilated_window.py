"""Dilated window (Keyformer, arXiv 2403.09054, Figure 2c)."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.eviction import Evict, Mask
from kvjax.pallas_kernels.values import one_of, settle, tokens
from kvjax.scoring.protect import Protect
from kvjax.scoring.scores import Recency, Score
from kvjax.scoring.stats import Moment, Slots
from kvjax.sizes.budget import Count
from kvjax.sizes.schedule import every_step

_DISTANCE = tokens(0, "a dilation is whole and not negative; 0 is a plain window")


@dataclasses.dataclass(frozen=True)
class EveryOther(Mask):
    """Shows the newest token and those at distances that `dilation + 1` divides."""

    dilation: int

    def __post_init__(self):
        settle(self, dilation=_DISTANCE)

    def __call__(self, moment: Moment) -> Bool[Array, "B K S"]:
        """See `Mask`."""
        kv = moment.kv
        distance = (moment.ctx.length - 1)[:, None, None] - kv.pos
        return kv.live & (distance % (self.dilation + 1) == 0)


@dataclasses.dataclass(frozen=True)
class OnGrid(Score):
    """Recency among the positions that `dilation + 1` divides; all others come after them."""

    dilation: int

    def __post_init__(self):
        settle(self, dilation=_DISTANCE)

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        kv = slots.kv
        recency = kv.pos.astype(jnp.float32)
        return jnp.where(kv.pos % (self.dilation + 1) == 0, recency, recency - 2.0**24)


def dilated_window(
    budget: int | float | Count, *, dilation: int = 1, mode: Literal["mask", "anchored"] = "mask"
) -> Evict:
    """The current token and those at distances D + 1, 2 (D + 1), ...

    The visible set changes parity at every step, so no cache that evicts can realise it (D-07). "mask" keeps the
    `budget` most recent tokens and shows each decode row every (D + 1)-th of them: it saves the memory of a plain
    window. "anchored" evicts: it keeps the current token and the last positions that D + 1 divides. Where fewer of
    those exist than the budget holds, which the figure does not show, the newest of the others fill it until they do: a
    policy uses the budget that it has, and one that holds everything is full attention.

    Args:
      budget: live tokens a kv head and layer.
      dilation: D; 0 is a plain window.
      mode: see above.
    """
    one_of("mode", mode, "mask", "anchored")
    if mode == "mask":
        return Evict(Recency(), budget, when=every_step(), mask=EveryOther(dilation))
    return Evict(OnGrid(dilation), budget, protect=Protect(recent=1), when=every_step())
