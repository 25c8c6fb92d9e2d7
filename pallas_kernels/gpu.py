"""The operations of `api` on the GPU kernels: which kernel computes what, and what none of them does.

Whatever a kernel does not serve raises NotImplementedError with the reason; `api` then tries the next implementation.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.pallas_kernels import blocks as bl
from kvjax.pallas_kernels import (
    colstats,
    decode,
    flash,
    mosaic_colstats,
    mosaic_decode,
    mosaic_flash,
    pooled,
    reference,
)
from kvjax.pallas_kernels.columns import Columns, thresholds
from kvjax.pallas_kernels.logits import beside_nothing

Forward = tuple[Float[Array, "B N T H"] | None, Float[Array, "B N T"], Array | None]


def _triton(backend: str) -> bool:
    """Whether to interpret the Triton kernels.

    Raises:
      NotImplementedError: for a backend that has no such kernel, and without the Triton backend, whose loads and
        stores are interpreted too.
    """
    if backend not in ("triton", "interpret"):
        raise NotImplementedError(f"{backend} has no kernel for this: it reads no pool and adds no bias")
    bl.triton()
    return backend == "interpret"


def forward(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_pos: Int[Array, "B T"],
    kv_pos: Int[Array, "B K S"],
    *,
    spec: bl.Spec,
    with_logits: bool,
    backend: str,
    bias: Float[Array, "B N S"] | None = None,
) -> Forward:
    """Output, logsumexp and, for one row a head where they are wanted, its logits "B K G S"; none for nothing."""
    if backend == "mosaic_gpu" and bias is None:
        arrays = q, k, v, q_pos, bl.readable(kv_pos)
        if q.shape[2] == 1:
            return mosaic_decode.decode_attention(*arrays, spec=spec, with_logits=with_logits)
        return *mosaic_flash.flash_attention(*arrays, spec=spec), None
    how: dict[str, Any] = {"spec": spec, "bias": bias, "interpret": _triton(backend)}
    if q.shape[2] == 1:
        return decode.decode_attention(q, k, v, q_pos, kv_pos, with_logits=with_logits, **how)
    return *flash.flash_attention(q, k, v, q_pos, bl.readable(kv_pos), **how), None


def column(
    spec: Columns,
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    result: Forward,
    q_pos: Int[Array, "B T"],
    kv_pos: Int[Array, "B K S"],
    *,
    logits: bl.Spec,
    backend: str,
    bias: Float[Array, "B N S"] | None = None,
    nothing: Float[Array, "N"] | None = None,
) -> Float[Array, "B _ ..."]:
    """One statistic of the attention that `forward` computed, with the same bias, beside a logit for nothing.

    Raises:
      NotImplementedError: for statistics that no kernel computes.
    """
    _, lse, row = result
    if row is not None:
        return row_column(spec, row, lse, q_pos, kv_pos, logits, nothing)
    B, N, T, _ = q.shape
    K = k.shape[1]
    G = N // K
    if not spec.summed:
        raise NotImplementedError("rows that are not summed are not kept by the kernels")
    if spec.element == "above" and not isinstance(spec.threshold, str) and spec.threshold < 0:
        raise NotImplementedError("a negative threshold counts masked probabilities too")
    own = spec.softmax
    if own is not None and own.heads is not None:
        raise NotImplementedError("kernels draw the noise of all heads of a layer, by their own numbers")
    logits = logits.within(own)
    multiplier = None if own is None else own.multiplier
    seed = None if own is None else own.seed
    keys = bl.readable(kv_pos, None if own is None else own.before)
    what = combination(spec, G)
    lse_of, sums_of = _kernels(backend, logits, what, q, k, seed, bias)
    if own is not None:
        _, lse = lse_of(q, k, None, q_pos, keys, spec=logits, multiplier=multiplier)
        if nothing is not None:
            beside = nothing.astype(lse.dtype)[None, :, None]
            lse = jnp.logaddexp(lse, beside if multiplier is None else beside * jnp.repeat(multiplier, G, axis=1))
    theta = None
    if spec.element == "above":
        visible = (
            bl.count_visible(logits, q_pos, keys) if spec.threshold == "1/visible" else jnp.zeros((B, K, T), jnp.int32)
        )
        theta = thresholds(spec, q_pos, visible, jnp.float32)
        theta = None if theta is None else jnp.broadcast_to(theta, (B, K, T))
    counting = q_pos
    if spec.rows is not None:
        counting = jnp.where((jnp.arange(T) >= T - spec.rows)[None], q_pos, -1)
    (sums,) = sums_of(
        *(q, k, lse, counting, keys),
        spec=logits,
        what=what,
        theta=theta,
        weight=spec.weight,
        multiplier=multiplier,
    )
    return finish(spec, what, sums, G)


def _kernels(
    backend: str, logits: bl.Spec, what: colstats.Pass, q: Array, k: Array, seed: Array | None, bias: Array | None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The logsumexp and the sums of a backend.

    Raises:
      NotImplementedError: before either has run, where one of them would.
    """
    if backend == "mosaic_gpu" and bias is None:
        mosaic_colstats.check_served(logits, what, q, k)
        return mosaic_flash.flash_attention, mosaic_colstats.attention_colstats
    options = {"seed": seed, "bias": bias, "interpret": _triton(backend)}
    return (
        functools.partial(flash.flash_attention, **options),
        functools.partial(colstats.attention_colstats, **options),
    )


def combination(spec: Columns, group: int) -> colstats.Pass:
    """How the kernel combines query heads for `spec`."""
    if spec.group is None or (spec.group_at == "after" and spec.group == "max"):
        heads, factor = "each", 1.0
    elif spec.group_at == "after":
        heads, factor = "sum", 1.0
    else:
        heads = "max_before" if spec.group == "max" else "sum_before"
        factor = 1.0 / group if spec.group == "mean" else 1.0
    return colstats.Pass((spec.element,), heads, factor, spec.count_self)


def finish(spec: Columns, what: colstats.Pass, sums: Float[Array, "B _ S"], group: int) -> Float[Array, "B _ S"]:
    """Reduces a kernel's sums over query groups."""
    if what.heads == "each" and spec.group == "max":
        B, N, S = sums.shape
        return sums.reshape(B, N // group, group, S).max(2)
    return sums / group if what.heads == "sum" and spec.group == "mean" else sums


def row_column(
    spec: Columns,
    row: Float[Array, "B K G S"],
    lse: Float[Array, "B N 1"],
    q_pos: Int[Array, "B 1"],
    kv_pos: Int[Array, "B K S"],
    logits: bl.Spec,
    nothing: Float[Array, "N"] | None = None,
) -> Float[Array, "B _ ..."]:
    """A statistic of a single row: as the specification says, on the logits that the decode kernel kept."""
    seen = logits.visible(q_pos, kv_pos)
    x = row[:, :, :, None]
    lse = lse.reshape(*row.shape[:3], 1, 1)
    p = jnp.where(seen[:, :, None], jnp.exp(x - jnp.where(jnp.isfinite(lse), lse, 0.0)), 0.0)
    nothing = None if nothing is None else nothing.astype(x.dtype).reshape(1, *row.shape[1:3], 1, 1)
    return reference.column(spec, p, x, seen, q_pos, kv_pos, logits, nothing)


def pooled_forward(
    q: Float[Array, "B N 1 H"],
    k: Float[Array, "B P H"],
    v: Float[Array, "B P H"],
    owner: Int[Array, "B P"],
    q_pos: Int[Array, "B 1"],
    kv_pos: Int[Array, "B P"],
    bias: Float[Array, "B G P"] | None = None,
    nothing: Float[Array, "N"] | None = None,
    *,
    num_kv_heads: int,
    columns: Sequence[Columns],
    spec: bl.Spec,
    backend: str,
) -> tuple[Float[Array, "B N 1 H"], Float[Array, "B N 1"], tuple[Array, ...]]:
    """The pool: output, logsumexp and every statistic, from the logits that the kernel kept."""
    interpret = _triton(backend)
    out, lse, row = decode.pooled_decode_attention(
        *(q, k, v, owner, q_pos, kv_pos, bias),
        num_kv_heads=num_kv_heads,
        spec=spec,
        with_logits=bool(columns),
        interpret=interpret,
    )
    out, lse = beside_nothing(out, lse, nothing)
    if row is None:
        return out, lse, ()
    owner = jnp.where(kv_pos >= 0, owner, -1)
    seen = pooled.pool_visible(owner, q_pos, kv_pos, spec.window)
    p = pooled.probabilities(row, lse.reshape(q.shape[0], num_kv_heads, -1), seen, owner)
    measured = pooled.pool_columns(
        *(columns, p, row, seen, owner, q_pos, kv_pos), num_kv_heads=num_kv_heads, window=spec.window, nothing=nothing
    )
    return out, lse, measured
