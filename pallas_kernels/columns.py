"""What can be measured of an attention matrix, one number a key, without ever holding the matrix.

Letters: B batch, N query heads, K kv heads, G = N // K, T query rows, S slots (keys), H head_dim.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.pytree import pytree, static

Element = Literal["p", "p2", "above"]
Group = Literal["mean", "max", "sum"]

_ELEMENTS = ("p", "p2", "above")
_GROUPS = ("mean", "max", "sum", None)
_THRESHOLDS = ("1/visible", "1/position")


@pytree
class Columns:
    """A column statistic: for every key `j`, the sum over query rows `i` of `weight_i * f(p_ij)`.

    `p` is the attention matrix after the softmax, causal zeros included.

    Attributes:
      rows: only the last `rows` query rows count; None for all of them.
      element: `f`: "p" the probability, "p2" its square, "above" whether it exceeds `threshold` (strictly).
      threshold: for "above": a number, or "1/visible" (one over the keys the row can see), or "1/position"
        (one over the row's position + 1).
      group: how the G query heads of a kv head become one number; None keeps one number a query head.
      group_at: "before" reduces the probabilities, then applies `f`; "after" reduces the finished sums. They differ
        for squares, thresholds and max.
      weight: a weight for every query row, or None for ones.
    """

    rows: int | None = static(default=None)
    element: Element = static(default="p")
    threshold: float | str = static(default="1/visible")
    group: Group | None = static(default="mean")
    group_at: Literal["before", "after"] = static(default="after")
    weight: Float[Array, "B T"] | None = None

    def __post_init__(self):
        if self.rows is not None and self.rows < 1:
            raise ValueError(
                f"rows={self.rows}: a column statistic needs at least one query row; use None for all rows"
            )
        if self.element not in _ELEMENTS:
            raise ValueError(f"element={self.element!r} is not one of {_ELEMENTS}")
        if self.group not in _GROUPS:
            raise ValueError(f"group={self.group!r} is not one of {_GROUPS}")
        if self.group_at not in ("before", "after"):
            raise ValueError(f"group_at={self.group_at!r} is not one of ('before', 'after')")
        if self.group is None and self.group_at == "before":
            raise ValueError("group=None keeps every query head, so there is no group to reduce 'before'")
        if isinstance(self.threshold, str) and self.threshold not in _THRESHOLDS:
            raise ValueError(f"threshold={self.threshold!r} is not a number or one of {_THRESHOLDS}")

    @property
    def per_query_head(self) -> bool:
        """Whether sums must be kept for each query head until the last row has been read."""
        if self.group is None:
            return True
        linear = self.element == "p" and self.group in ("mean", "sum")
        return self.group_at == "after" and not linear

    def finish(
        self, sums: Float[Array, "B K S"] | Float[Array, "B K G S"]
    ) -> Float[Array, "B K S"] | Float[Array, "B N S"]:
        """Reduces what `accumulate` added up to its published shape."""
        if not self.per_query_head:
            return sums
        if self.group is None:
            B, K, G, S = sums.shape
            return sums.reshape(B, K * G, S)
        return reduce_group(sums, self.group, axis=2)


@pytree
class Attention:
    """What `attention` returns.

    Attributes:
      out: the attention output.
      lse: natural-log logsumexp of every row's logits in float32, -inf for a row that sees nothing.
      columns: one array for each requested `Columns`: "B K S", or "B N S" where `group` is None. float32.
    """

    out: Float[Array, "B N T H"]
    lse: Float[Array, "B N T"]
    columns: tuple[Array, ...]


def accumulator(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """What sums over inputs of `dtype` are kept in: float32, or float64 for float64."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def reduce_group(x: Array, group: Group, *, axis: int) -> Array:
    """Reduces the query heads of a group along `axis`."""
    return {"mean": jnp.mean, "max": jnp.max, "sum": jnp.sum}[group](x, axis=axis)


def apply_element(p: Array, spec: Columns, theta: Array | None) -> Array:
    """`f(p)` of `spec`; `theta` is the threshold, broadcastable to `p`, where there is one."""
    if theta is not None:
        return (p > theta).astype(p.dtype)
    return p * p if spec.element == "p2" else p


def thresholds(
    spec: Columns, q_pos: Int[Array, "B R"], num_visible: Int[Array, "B K R"], dtype: jax.typing.DTypeLike
) -> Float[Array, "B #K R"] | None:
    """The threshold of every row in a block, or None where `spec` has none."""
    if spec.element != "above":
        return None
    if spec.threshold == "1/visible":
        return 1.0 / jnp.maximum(num_visible, 1).astype(dtype)
    if spec.threshold == "1/position":
        return (1.0 / (jnp.maximum(q_pos, 0) + 1).astype(dtype))[:, None]
    return jnp.full(q_pos.shape, float(spec.threshold), dtype)[:, None]
