"""A model's attention, block of rows by block of rows: what figures are computed from, without an N x N matrix.

Letters: B prompts, T tokens, N query heads, K kv heads, G = N // K, H head_dim, D embed_dim, R rows of a block.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from kvjax.drivers.attend import without_cache
from kvjax.pallas_kernels import Columns, Softmax, attention
from kvjax.pallas_kernels.pytree import pytree, static
from kvjax.storage import linear_bias

Carry = TypeVar("Carry")
BLOCK = 32


@pytree
class Layer:
    """What one layer attends with.

    Attributes:
      q, k: queries and keys, rotated.
      v: values.
      out_proj: the output projection.
      scale: factor on `q . k`.
      window: positions that a query sees, None for all.
      softcap: logits become `softcap * tanh(logits / softcap)`.
      slopes: those of ALiBi, None without it.
    """

    q: Float[Array, "B N T H"]
    k: Float[Array, "B K T H"]
    v: Float[Array, "B K T H"]
    out_proj: Float[Array, "N H D"]
    scale: float = static()
    window: int | None = static(default=None)
    softcap: float | None = static(default=None)
    slopes: tuple[float, ...] | None = static(default=None)

    @property
    def bias(self) -> Float[Array, "B N T"] | None:
        """What is added to the logits of every key."""
        if self.slopes is None:
            return None
        places = jnp.broadcast_to(jnp.arange(self.k.shape[2], dtype=jnp.int32), self.k.shape[:3])
        return linear_bias(self.slopes, places)


@functools.partial(jax.jit, static_argnames="model")
def capture(model: Any, params: PyTree[Any], tokens: Int[Array, "B T"]) -> tuple[Layer, ...]:
    """Reads prompts of one length without a cache, and returns what every layer attended with.

    Raises:
      ValueError: a model that does not say how it projects its attention output.
    """
    B, T = tokens.shape
    pos = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
    plain = without_cache(pos)

    def attend(cache, q, k, v, *, layer, rotate, out_proj=None, hidden=None, scale=None, **how):
        del hidden
        if out_proj is None:
            raise ValueError(f"layer {layer} of the model passes no out_proj to attend; figures need it")
        turned = rotate(q, pos[:, None]), rotate(k, pos[:, None])
        found = Layer(*turned, v, out_proj, q.shape[-1] ** -0.5 if scale is None else scale, **how)
        out, cache, _ = plain(cache, q, k, v, layer=layer, rotate=rotate, scale=scale, **how)
        return out, cache, found

    (outer, each), layers = model.parts(params), []
    x = model.embed(outer, tokens, pos)
    for i, own in enumerate(each):
        x, _, found = model.block(i, own, x, None, attend)
        layers.append(found)
    return tuple(layers)


def by_layer(
    model: Any, params: PyTree[Any], tokens: Int[np.ndarray, "B T"], measure: Callable[[Layer], Any], *given: Any
) -> Any:
    """What `measure(layer, *given)` finds in every layer of a model, its arrays stacked "L ...", in float64.

    Raises:
      ValueError: see `capture`.
    """
    found = [measure(layer, *given) for layer in capture(model, params, jnp.asarray(tokens))]
    return jax.tree.map(lambda *each: np.stack([np.asarray(x, np.float64) for x in each]), *found)


def fold_rows(
    layer: Layer,
    visit: Callable[[Carry, Float[Array, "B N R T"], Int[Array, "R"]], tuple[Carry, Any]],
    carry: Carry,
    *,
    rows: Int[Array, "M"] | None = None,
    multiplier: Float[Array, "M"] | None = None,
    block: int = BLOCK,
) -> tuple[Carry, Any]:
    """Walks over rows of the attention matrix in order, a block at a time, each block one call of `attention`.

    Args:
      layer: the layer.
      visit: `(carry, p, positions) -> (carry, out)` for one block. The last block may be filled up with rows at
        position T, whose probabilities are 0 and whose `out` is dropped.
      carry: what the first block gets.
      rows: positions of the rows, increasing; all of them if None.
      multiplier: a factor on the logits of every row, for another softmax than the model's.
      block: rows of a block.

    Returns:
      The last carry, and `out` of all rows: arrays "M ...", whose first axis was the block's rows.
    """
    B, _, T, _ = layer.q.shape
    K = layer.k.shape[1]
    rows = jnp.arange(T, dtype=jnp.int32) if rows is None else rows.astype(jnp.int32)
    num = rows.shape[0]
    pad = -num % block
    blocks = jnp.pad(rows, (0, pad), constant_values=T).reshape(-1, block)
    factors = jnp.pad(jnp.ones((num,)) if multiplier is None else multiplier.astype(jnp.float32), (0, pad))
    # Rows of a block need not follow each other, so that dead slots stand where `attention` expects their tokens.
    behind = lambda x, value: jnp.pad(x, ((0, 0), (0, 0), (0, block), *((0, 0),) * (x.ndim - 3)), constant_values=value)
    k, v = (behind(x.astype(jnp.float32), 0.0) for x in (layer.k, layer.v))
    keys = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, K, T))
    options: dict[str, Any] = {"scale": layer.scale, "window": layer.window, "softcap": layer.softcap}
    if layer.bias is not None:
        options["bias"] = jnp.pad(layer.bias, ((0, 0), (0, 0), (0, block)))

    def step(carry, given):
        here, factor = given
        q = jnp.take(layer.q, here, axis=2, mode="clip").astype(jnp.float32)
        q_pos = jnp.broadcast_to(jnp.where(here < T, here, -1), (B, block))
        own = None if multiplier is None else Softmax(multiplier=jnp.broadcast_to(factor, (B, K, block)))
        column = Columns(group=None, summed=False, softmax=own)
        found = attention(q, k, v, q_pos, behind(keys, -1), columns=(column,), **options)
        return visit(carry, found.columns[0][..., :T], here)

    carry, out = lax.scan(step, carry, (blocks, factors.reshape(-1, block)))
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num], out)


def group_mean(x: Float[Array, "B N *rest"], num_kv_heads: int) -> Float[Array, "B K *rest"]:
    """The mean over the query heads of every kv head."""
    B, N, *rest = x.shape
    return x.reshape(B, num_kv_heads, N // num_kv_heads, *rest).mean(2)
