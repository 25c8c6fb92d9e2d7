"""Scores that are read off a token's hidden state when it is stored (KVzap, arXiv 2601.07891)."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.context import Phase, Site
from kvjax.cache.state import EMPTY
from kvjax.pallas_kernels.values import Value, a, settle
from kvjax.scoring.learned import FrozenArrays
from kvjax.scoring.scores import Score
from kvjax.scoring.stats import Measurement, Moment, Slots

_LINEAR, _NETWORK = ("out", "out_bias"), ("in", "in_bias", "out", "out_bias")


def apply_heads(
    weights: Mapping[str, Array | np.ndarray], hidden: Float[Array, "B T D"], layer: int | Int[Array, ""]
) -> Float[Array, "B T K"]:
    """One number for every kv head of a layer: a linear function of hidden states, or of a hidden layer of GELUs.

    Args:
      weights: "out" and "out_bias" of all layers, and "in" and "in_bias" where there is a hidden layer.
      hidden: what the layer's queries, keys and values are projections of.
      layer: whose weights; it may be traced.
    """
    own = {name: jnp.asarray(x)[layer] for name, x in weights.items()}
    x = hidden.astype(own["out"].dtype)
    if "in" in own:
        x = jax.nn.gelu(x @ own["in"] + own["in_bias"][None, None], approximate=False)
    return x @ own["out"] + own["out_bias"][None, None]


@dataclasses.dataclass(frozen=True)
class HiddenHeads(Value):
    """A function of hidden states for every layer, compared by its weights (`kvjax.learning.kvzap.fit`).

    Attributes:
      weights: of all layers: "out" (L, D, K) and "out_bias" (L, K) of a linear function; or "in" (L, D, M), "in_bias"
        (L, M), "out" (L, M, K) and "out_bias" (L, K) of one with a hidden layer. Any mapping of arrays, kept as one
        that compares by content.
    """

    weights: Mapping[str, np.ndarray] | FrozenArrays

    def __post_init__(self):
        if not isinstance(self.weights, Mapping) or sorted(self.weights) not in (sorted(_LINEAR), sorted(_NETWORK)):
            names = sorted(self.weights) if isinstance(self.weights, Mapping) else type(self.weights).__name__
            raise ValueError(f"HiddenHeads has the weights {names}; give {_LINEAR} or {_NETWORK}")
        frozen = self.weights if isinstance(self.weights, FrozenArrays) else FrozenArrays(self.weights)
        object.__setattr__(self, "weights", frozen)
        shapes = {name: x.shape for name, x in frozen.items()}
        ends = [shapes["in"], shapes["out"]] if "in" in frozen else [shapes["out"]]
        fits = all(len(s) == 3 for s in ends) and all(
            shapes[f"{n}_bias"] == (s[0], s[2]) for n, s in zip(("in", "out")[-len(ends) :], ends, strict=True)
        )
        if not fits or (len(ends) == 2 and (ends[0][0], ends[0][2]) != ends[1][:2]):
            raise ValueError(f"HiddenHeads has weights of the shapes {shapes}, which do not follow one another")
        for name, x in frozen.items():
            if x.dtype.kind != "f" or not np.isfinite(x).all():
                raise ValueError(f"HiddenHeads has weights {name!r} of {x.dtype} that are no finite floats")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(layers, width of hidden states, kv heads) that it is for."""
        first, last = self.weights.get("in", self.weights["out"]), self.weights["out"]
        return first.shape[0], first.shape[1], last.shape[2]


@dataclasses.dataclass(frozen=True)
class HiddenStates(Measurement):
    """What the new tokens' queries, keys and values are projections of: "B T D"."""

    @property
    def sees_hidden(self) -> bool:
        """See `Measurement`."""
        return True

    def measure(self, moment: Moment) -> Float[Array, "B T D"]:
        """See `Measurement`.

        Raises:
          ValueError: a model that does not give them.
        """
        if moment.hidden is None:
            raise ValueError("hidden states are measured, but the model gives none; pass hidden= of shape (B, T, D)")
        return moment.hidden


@dataclasses.dataclass(frozen=True)
class HeadScores(HiddenStates):
    """What a function of hidden states says of the new tokens, 0 for all other slots: "B K S".

    Attributes:
      function: the function.
    """

    function: HiddenHeads

    def __post_init__(self):
        settle(self, function=a(HiddenHeads))

    def measure(self, moment: Moment) -> Float[Array, "B K S"]:
        """See `Measurement`.

        Raises:
          ValueError: a function for other sizes than the model's.
        """
        hidden, kv, ctx = super().measure(moment), moment.kv, moment.ctx
        here = ctx.site.num_layers, hidden.shape[-1], kv.num_kv_heads
        if here != self.function.sizes:
            raise ValueError(
                "the function is for (layers, width of hidden states, kv heads) of "
                f"{self.function.sizes}, but the model has {here}; fit one to this model"
            )
        new = apply_heads(self.function.weights, hidden, ctx.layer).swapaxes(1, 2)
        if ctx.phase == "prefill":
            return jnp.pad(new, ((0, 0), (0, 0), (kv.num_slots - new.shape[2], 0)))
        at = (kv.pos == moment.pos[:, None]) & (kv.pos != EMPTY)
        return jnp.where(at, new, jnp.zeros((), new.dtype))


@dataclasses.dataclass(frozen=True)
class Predicted(Score):
    """What a function of its hidden state says of a token, from when it is stored to when it leaves.

    Attributes:
      function: the function.
    """

    function: HiddenHeads

    def __post_init__(self):
        settle(self, function=a(HiddenHeads))

    @property
    def _said(self) -> HeadScores:
        return HeadScores(self.function)

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Observer`."""
        del phase
        return (self._said,)

    def init(self, site: Site, batch: int) -> Float[Array, "B K 0"]:
        """See `Observer`."""
        return jnp.zeros((batch, site.num_kv_heads, 0), jnp.float32)

    def update(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Observer`."""
        said = slots.stats[self._said]
        return slots.memory.astype(said.dtype) + said

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        return slots.memory
