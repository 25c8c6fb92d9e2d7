"""Attention forward with its logsumexp, or the logsumexp alone: Pallas on the Triton backend (Ampere to Blackwell)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, UInt32

from kvjax.pallas_kernels import blocks as bl


def block_sizes(dtype: jax.typing.DTypeLike, head_dim: int, num_rows: int) -> bl.BlockSizes:
    """The shipped block sizes.

    Accumulators fill the registers: a head of 256 needs 8 warps. IEEE products of float32 run on no tensor core and
    spill above 16 x 16. Few rows get smaller tiles. `experiments/gpu_check.py --only sweep` measures other sizes,
    `experiments/aot_check.py` shows the registers.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return bl.BlockSizes(16, 16, num_warps=4, num_stages=2)
    rows = max(bl.MIN_TILE, min(64, bl.power_of_two(num_rows)))
    if head_dim > 128:
        return bl.BlockSizes(rows, 32, num_warps=8, num_stages=2)
    return bl.BlockSizes(rows, 64, num_warps=4, num_stages=2)


def _kernel(*refs: Any, names: tuple[str, ...], spec: bl.Spec, sizes: bl.BlockSizes, num_rows: int, num_slots: int):
    ref = dict(zip(names, refs, strict=True))
    bq, bk = sizes.block_q, sizes.block_k
    i0 = pl.program_id(0) * bq
    q = bl.load_rows(ref["q"], i0, bq, num_rows)
    q_pos = bl.load_vector(ref["q_pos"], i0, bq, num_rows, -1)[:, None]
    multiplier = bl.load_vector(ref["multiplier"], i0, bq, num_rows, 0.0)[:, None] if "multiplier" in ref else None
    seed, head = ref["seed"][0] if "seed" in ref else None, pl.program_id(1)
    with_out = "v" in ref

    def body(j, carry):
        top, mass, acc = carry
        j0 = j * bk
        s = bl.products(q, bl.load_rows(ref["k"], j0, bk, num_slots))
        kv_pos = bl.load_vector(ref["kv_pos"], j0, bk, num_slots, bl.DEAD)[None, :]
        bias = bl.load_vector(ref["bias"], j0, bk, num_slots, 0.0)[None, :] if "bias" in ref else None
        x = bl.masked_logits(spec, s, q_pos, kv_pos, bias=bias, multiplier=multiplier, seed=seed, head=head)
        new_top = jnp.maximum(top, jnp.max(x, axis=1))
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # a row that has seen nothing yet is not NaN
        p = jnp.exp2(x - shift[:, None])
        shrink = jnp.exp2(top - shift)
        mass = mass * shrink + jnp.sum(p, axis=1)
        if with_out:
            v = bl.load_rows(ref["v"], j0, bk, num_slots)
            acc = tuple(a * shrink[:, None] + bl.dot(p.astype(y.dtype), y, (1, 0)) for a, y in zip(acc, v, strict=True))
        return new_top, mass, acc

    widths = [width for _, width in bl.parts(ref["q"].shape[-1])] if with_out else []
    start = (
        jnp.full((bq,), -jnp.inf, jnp.float32),
        jnp.zeros((bq,), jnp.float32),
        tuple(jnp.zeros((bq, width), jnp.float32) for width in widths),
    )
    block = pl.program_id(0)
    top, mass, acc = lax.fori_loop(ref["first"][block], ref["stop"][block], body, start)
    bl.store_vector(ref["lse"], i0, num_rows, bl.log2_sum(top, mass))
    if with_out:
        inverse = 1.0 / jnp.where(mass > 0, mass, 1.0)
        bl.store_rows(ref["out"], i0, num_rows, tuple(a * inverse[:, None] for a in acc))


def flash_attention(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"] | None,
    q_pos: Int[Array, "B T"],
    kv_pos: Int[Array, "B K S"],
    *,
    spec: bl.Spec,
    bias: Float[Array, "B N S"] | None = None,
    multiplier: Float[Array, "B K T"] | None = None,
    seed: UInt32[Array, "B"] | None = None,
    sizes: bl.BlockSizes | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B N T H"] | None, Float[Array, "B N T"]]:
    """FlashAttention's forward pass (arXiv 2205.14135, algorithm 1) over slots that know their positions.

    Args:
      q: queries.
      k: keys.
      v: values; None computes the logsumexp alone, for a softmax that has no output.
      q_pos: positions of the rows, negative for rows that read nothing.
      kv_pos: positions of the keys, `blocks.DEAD` for keys that nobody reads.
      spec: how logits follow from products.
      bias: added to the logits of every key, such as ALiBi's `slope * position` (what depends on the row cancels).
      multiplier, seed: of a statistic's own softmax.
      sizes: block sizes; `block_sizes` if None.
      interpret: run on any device, slowly, for tests.

    Returns:
      Output in the dtype of `q`, zeros for a row that sees nothing, and the natural-log logsumexp in float32.

    Raises:
      NotImplementedError: for dtypes that the kernel does not read.
    """
    bl.check_inputs(*(x for x in (q, k, v) if x is not None))
    B, N, T, H = q.shape
    K, S = k.shape[1:3]
    G = N // K
    sizes = block_sizes(q.dtype, H, T) if sizes is None else sizes
    q, k, v = bl.pad_head_dim(q, k, v)
    first, stop = bl.first_and_stop(bl.meetings(spec, q_pos, kv_pos, sizes.block_q, sizes.block_k))
    num_blocks = pl.cdiv(T, sizes.block_q)
    rows = pl.BlockSpec((None, None, T, q.shape[-1]), lambda i, h, b: (b, h, 0, 0))
    slots = pl.BlockSpec((None, None, S, q.shape[-1]), lambda i, h, b: (b, h // G, 0, 0))
    per_block = pl.BlockSpec((None, None, num_blocks), lambda i, h, b: (b, h // G, 0))
    inputs: dict[str, tuple[Any, Any]] = {
        "q": (q, rows),
        "k": (k, slots),
        "q_pos": (q_pos, pl.BlockSpec((None, T), lambda i, h, b: (b, 0))),
        "kv_pos": (kv_pos, pl.BlockSpec((None, None, S), lambda i, h, b: (b, h // G, 0))),
        "first": (first, per_block),
        "stop": (stop, per_block),
    }
    if v is not None:
        inputs["v"] = v, slots
    if bias is not None:
        inputs["bias"] = bias.astype(jnp.float32), pl.BlockSpec((None, None, S), lambda i, h, b: (b, h, 0))
    if multiplier is not None:
        inputs["multiplier"] = (
            multiplier.astype(jnp.float32),
            pl.BlockSpec((None, None, T), lambda i, h, b: (b, h // G, 0)),
        )
    if spec.gumbel and seed is not None:
        inputs["seed"] = seed[:, None], pl.BlockSpec((None, 1), lambda i, h, b: (b, 0))
    outputs: dict[str, tuple[Any, Any]] = {
        "lse": (
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
            pl.BlockSpec((None, None, T), lambda i, h, b: (b, h, 0)),
        )
    }
    if v is not None:
        outputs["out"] = jax.ShapeDtypeStruct(q.shape, q.dtype), rows
    kernel = functools.partial(_kernel, names=(*inputs, *outputs), spec=spec, sizes=sizes, num_rows=T, num_slots=S)
    results = bl.call(
        kernel,
        [x for x, _ in inputs.values()],
        grid=(num_blocks, N, B),
        in_specs=[x for _, x in inputs.values()],
        out_specs=[x for _, x in outputs.values()],
        out_shape=[x for x, _ in outputs.values()],
        interpret=interpret,
        name="kvjax_flash" if v is not None else "kvjax_lse",
        compiler_params=bl.compiler_params(sizes),
    )
    return (results[1][..., :H] if v is not None else None), results[0]
