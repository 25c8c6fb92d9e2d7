"""Attention forward of whole prompts by cuDNN, through `jax.nn`: what NVIDIA tunes for each of its GPUs."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.pallas_kernels import blocks as bl


def flash_attention(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    q_pos: Int[Array, "B T"],
    *,
    spec: bl.Spec,
    by: Literal["cudnn", "xla"] = "cudnn",
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """Output and logsumexp of rows among their own tokens, in order. cuDNN wants padding behind them, not before.

    Args:
      q, k, v: rows and their tokens.
      q_pos: positions of the rows, increasing; negative for padding, which comes first.
      spec: how logits follow from products.
      by: the implementation of `jax.nn`, for tests.

    Raises:
      NotImplementedError: for what cuDNN does not compute, and without cuDNN.
    """
    T, H = q.shape[2:]
    if q.dtype.name not in ("bfloat16", "float16") and by == "cudnn":
        raise NotImplementedError(f"cuDNN reads bfloat16 and float16 here, not {q.dtype.name}")
    if H % 8 or H > 128:
        raise NotImplementedError(f"head dimensions are multiples of 8 up to 128 here, not {H}")
    if spec.softcap is not None:
        raise NotImplementedError("cuDNN has no soft cap")
    padding = (q_pos < 0).sum(-1, dtype=jnp.int32)
    place = jnp.arange(T, dtype=jnp.int32)[None]
    moved = lambda x, index: jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), 1)
    first = lambda x: moved(x.swapaxes(1, 2), (place + padding[:, None]) % T)  # "B T _ H", real rows first
    try:
        out, lse = jax.nn.dot_product_attention(
            *map(first, (q, k, v)),
            scale=spec.scale,
            is_causal=True,
            query_seq_lengths=T - padding,
            key_value_seq_lengths=T - padding,
            local_window_size=None if spec.window is None else (spec.window - 1, 0),
            return_residual=True,
            implementation=by,
        )
    except (RuntimeError, TypeError) as error:
        raise NotImplementedError(f"jax.nn has no cuDNN here: {error}") from error
    real = place >= padding[:, None]
    back = (place - padding[:, None]) % T
    out = jnp.where(real[..., None, None], moved(out, back), jnp.zeros((), out.dtype))
    lse = jnp.where(real[..., None], moved(lse.astype(jnp.float32), back), -jnp.inf)
    return out.swapaxes(1, 2), lse.swapaxes(1, 2)
