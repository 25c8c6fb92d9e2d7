"""How a model's logits follow from products of queries and keys, as one value."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.pallas_kernels.kinds import Positive, Size, check_fields
from kvjax.pallas_kernels.pytree import pytree, static


@pytree
class Logits:
    """How logits follow from products of queries and keys, and how far back a row sees.

    Numbers are static; what a model has of every query head is an array.

    Attributes:
      scale: factor on `q . k`; `H ** -0.5` if None.
      softcap: logits become `softcap * tanh(logits / softcap)`.
      window: a row sees only positions larger than its own minus `window`.
      slopes: ALiBi's: a key's logits fall by its query head's slope for each place behind the newest key.
      nothing: of every query head the logit of attending to nothing, so that a row's probabilities sum to less than one
        (the learned sinks of GPT-OSS, arXiv 2508.10925).
    """

    scale: Positive | None = static(default=None)
    softcap: Positive | None = static(default=None)
    window: Size | None = static(default=None)
    slopes: Float[Array, "N"] | None = None
    nothing: Float[Array, "N"] | None = None

    def __post_init__(self):
        check_fields(self)

    def factor(self, head_dim: int) -> float:
        """The scale."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def of(self, products: Float[Array, "..."], head_dim: int) -> Float[Array, "..."]:
        """The logits of products of queries and keys, scaled and capped."""
        return capped(products * jnp.asarray(self.factor(head_dim), products.dtype), self.softcap)

    def visible(
        self, q_pos: Int[Array, "B T"], kv_pos: Int[Array, "B K S"], causal: bool = True
    ) -> Bool[Array, "B K T S"]:
        """Which keys a row may read: live (position not negative), not later than the row, inside the sliding window.

        A row that is not `causal` reads later keys too, unless it is padding.
        """
        q, k = q_pos[:, None, :, None], kv_pos[:, :, None, :]
        seen = (k >= 0) & (k <= q if causal else q >= 0)
        return seen if self.window is None else seen & (q - k < self.window)

    def biased(
        self, places: Int[Array, "B K S"], bias: Float[Array, "B N S"] | None = None
    ) -> tuple["Logits", Float[Array, "B N S"] | None]:
        """The same without slopes, and a bias of keys to which these are added (`linear_bias`).

        Args:
          places: where keys stand, negative for a dead slot.
          bias: what else is added to the logits of each key.
        """
        if self.slopes is None:
            return self, bias
        slope = linear_bias(self.slopes, places)
        return dataclasses.replace(self, slopes=None), slope if bias is None else bias + slope


def beside_nothing(
    out: Float[Array, "B N T H"], lse: Float[Array, "B N T"], nothing: Float[Array, "N"] | None
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """Output and logsumexp of rows that may attend to nothing, from those of rows that may not (`Logits.nothing`)."""
    if nothing is None:
        return out, lse
    nothing = nothing.astype(lse.dtype)[None, :, None]
    return out * jax.nn.sigmoid(lse - nothing).astype(out.dtype)[..., None], jnp.logaddexp(lse, nothing)


def capped(logits: Float[Array, "..."], softcap: float | None) -> Float[Array, "..."]:
    """`softcap * tanh(logits / softcap)`, or the logits without a cap."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def linear_bias(slopes: Float[Array, "N"], places: Int[Array, "B K S"]) -> Float[Array, "B N S"]:
    """ALiBi's bias of keys: minus the slope of a query head times how many places a key lies behind the newest.

    A row that is not the newest is nearer to all keys by the same number of places, which a softmax does not see. So
    one number a key serves all rows, as in transformers.

    Args:
      slopes: one a query head.
      places: where keys stand, negative for a dead slot.
    """
    slopes, behind = jnp.asarray(slopes, jnp.float32), places - places.max(-1, keepdims=True)
    group = len(slopes) // places.shape[1]
    return slopes[None, :, None] * jnp.repeat(behind, group, 1).astype(jnp.float32)
