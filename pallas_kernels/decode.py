"""One query row a head against a cache or a flat pool, split over the slots: Pallas on the Triton backend.

Decoding reads every key and value once, so all that counts is bytes: the query heads of a kv head (of a pool: all of
them) share one read, and a program walks over enough slots for its partial result to be small beside them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.pallas_kernels import blocks as bl

# About two for each multiprocessor of an H200, on which 512 took 1.2 times as long at 32k slots, and a pool 1.5 times.
TARGET_PROGRAMS = 256
MANY_ROWS_PROGRAMS = 512  # longer parts spill on an A100: 71 query heads of one kv head


def block_sizes(
    dtype: jax.typing.DTypeLike, head_dim: int, num_columns: int, num_slots: int, num_rows: int = 16
) -> bl.BlockSizes:
    """The shipped block sizes: the longest split that still fills the machine.

    Args:
      dtype: of keys and values.
      head_dim: of both; accumulators of many rows as wide as 256 leave room for fewer keys.
      num_columns: kv heads times sequences that are read independently; 1 a sequence for a pool.
      num_slots: slots of each.
      num_rows: query rows of a tile; many leave room for fewer keys too.
    """
    many = num_rows > (16 if head_dim > 128 else 32)
    block = 16 if jnp.dtype(dtype) == jnp.float32 else 32 if many else 64
    programs = MANY_ROWS_PROGRAMS if many else TARGET_PROGRAMS
    split = max(block, min(1024, bl.power_of_two(num_slots * num_columns // programs)))
    return bl.BlockSizes(bl.MIN_TILE, block, num_warps=4, num_stages=3, split=split)


def _kernel(
    *refs: Any,
    names: tuple[str, ...],
    spec: bl.Spec,
    sizes: bl.BlockSizes,
    num_rows: int,
    num_slots: int,
    group: int,
):
    ref = dict(zip(names, refs, strict=True))
    bk = sizes.block_k
    part = pl.program_id(0)
    start = part * sizes.split
    padded = max(bl.MIN_TILE, bl.power_of_two(num_rows))
    zero = part * 0
    q = bl.load_rows(ref["q"], zero, padded, num_rows)
    q_pos = ref["q_pos"][0]

    def body(u, carry):
        top, mass, acc = carry
        j0 = start + u * bk
        s = bl.products(q, bl.load_rows(ref["k"], j0, bk, num_slots))
        kv_pos = bl.load_vector(ref["kv_pos"], j0, bk, num_slots, bl.DEAD)[None, :]
        raw = bl.capped_logits(spec, s)
        if "bias" in ref:
            head, slot = (lax.broadcasted_iota(jnp.int32, (group, bk), i) for i in (0, 1))
            inside = (head < ref["bias"].shape[0]) & (j0 + slot < ref["bias"].shape[1])
            bias = bl.triton().load(ref["bias"].at[pl.ds(zero, group), pl.ds(j0, bk)], mask=inside, other=0.0)
            raw = raw + jnp.broadcast_to(bias[None], (padded // group, group, bk)).reshape(padded, bk)
        seen = (kv_pos >= 0) & (kv_pos <= q_pos)
        if spec.window is not None:
            seen &= q_pos - kv_pos < spec.window
        own = raw
        if "owner" in ref:
            owner = bl.load_vector(ref["owner"], j0, bk, num_slots, -1)[None, :]
            mine = owner == lax.div(lax.broadcasted_iota(jnp.int32, (padded, bk), 0), jnp.int32(group))
            seen = seen & mine
            own = jnp.where(mine, raw, 0.0).reshape(padded // group, group, bk).sum(axis=0)
        if "logits" in ref:
            row = lax.broadcasted_iota(jnp.int32, own.shape, 0)
            column = j0 + lax.broadcasted_iota(jnp.int32, own.shape, 1)
            bl.triton().store(
                ref["logits"].at[pl.ds(zero, own.shape[0]), pl.ds(j0, bk)],
                own,
                mask=(row < ref["logits"].shape[0]) & (column < num_slots),
            )
        x = jnp.where(seen, raw * bl.LOG2E, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(x, axis=1))
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        p = jnp.exp2(x - shift[:, None])
        shrink = jnp.exp2(top - shift)
        v = bl.load_rows(ref["v"], j0, bk, num_slots)
        acc = tuple(a * shrink[:, None] + bl.dot(p.astype(y.dtype), y, (1, 0)) for a, y in zip(acc, v, strict=True))
        return new_top, mass * shrink + jnp.sum(p, axis=1), acc

    carry = (
        jnp.full((padded,), -jnp.inf, jnp.float32),
        jnp.zeros((padded,), jnp.float32),
        tuple(jnp.zeros((padded, width), jnp.float32) for _, width in bl.parts(ref["q"].shape[-1])),
    )
    steps = lax.div(jnp.minimum(num_slots - start, sizes.split) + (bk - 1), bk)
    top, mass, acc = lax.fori_loop(0, steps, body, carry)
    bl.store_vector(ref["top"], zero, num_rows, top)
    bl.store_vector(ref["mass"], zero, num_rows, mass)
    bl.store_rows(ref["out"], zero, num_rows, acc)


def _combine_kernel(*refs: Any, names: tuple[str, ...], num_parts: int):
    """Joins the parts of one row: its output, and its logsumexp in natural logarithms."""
    ref = dict(zip(names, refs, strict=True))
    zero, size = pl.program_id(0) * 0, min(bl.power_of_two(num_parts), 32)
    columns = bl.parts(ref["out"].shape[-1])

    def body(u, carry):
        best, total, acc = carry
        top = bl.load_vector(ref["top"], zero + u * size, size, num_parts, -jnp.inf)
        mass = bl.load_vector(ref["mass"], zero + u * size, size, num_parts, 0.0)
        new = jnp.maximum(best, jnp.max(top))
        shift = jnp.where(new == -jnp.inf, 0.0, new)
        weight, shrink = jnp.exp2(top - shift), jnp.exp2(best - shift)
        rows = bl.load_rows(ref["parts"], zero + u * size, size, num_parts)
        acc = tuple(a * shrink + jnp.sum(weight[:, None] * x, axis=0) for a, x in zip(acc, rows, strict=True))
        return new, total * shrink + jnp.sum(weight * mass), acc

    start = jnp.float32(-jnp.inf), jnp.float32(0.0), tuple(jnp.zeros((width,), jnp.float32) for _, width in columns)
    best, total, acc = lax.fori_loop(0, -(-num_parts // size), body, start)
    share = 1.0 / jnp.where(total > 0, total, 1.0)
    for (column, width), x in zip(columns, acc, strict=True):
        bl.triton().store(ref["out"].at[pl.ds(zero + column, width)], (x * share).astype(ref["out"].dtype))
    bl.triton().store(ref["lse"].at[pl.ds(zero, 1)], bl.log2_sum(best, total)[None])


def _combined(
    parts: Float[Array, "B K split R H"],
    top: Float[Array, "B K split R"],
    mass: Float[Array, "B K split R"],
    dtype: Any,
    interpret: bool,
) -> tuple[Float[Array, "B K R H"], Float[Array, "B K R"]]:
    """Output and logsumexp of rows, from the parts of their softmax."""
    B, K, num_parts, rows, H = parts.shape
    of_parts = lambda *rest: pl.BlockSpec(
        (None, None, num_parts, None, *rest), lambda r, h, b: (b, h, 0, r, *(0,) * len(rest))
    )
    return bl.call(
        functools.partial(_combine_kernel, names=("parts", "top", "mass", "out", "lse"), num_parts=num_parts),
        [parts, top, mass],
        grid=(rows, K, B),
        in_specs=[of_parts(H), of_parts(), of_parts()],
        out_specs=[
            pl.BlockSpec((None, None, None, H), lambda r, h, b: (b, h, r, 0)),
            pl.BlockSpec((None, None, 1), lambda r, h, b: (b, h, r)),
        ],
        out_shape=[jax.ShapeDtypeStruct((B, K, rows, H), dtype), jax.ShapeDtypeStruct((B, K, rows), jnp.float32)],
        interpret=interpret,
        name="kvjax_combine",
    )


def _run(q, k, v, q_pos, kv_pos, owner, bias, *, spec, sizes, group, logits_rows, interpret):
    """Queries "B K R H" over "B K S H" slots; K is 1 for a pool, `group` a power of two."""
    bl.check_inputs(q, k, v)
    if not spec.causal or spec.gumbel:
        raise NotImplementedError("a decode kernel computes the softmax of the output alone")
    B, K, R, H = q.shape
    S = k.shape[2]
    q, k, v = bl.pad_head_dim(q, k, v)
    num_parts = pl.cdiv(S, sizes.split)
    heads = lambda *rest: pl.BlockSpec((None, None, *rest), lambda i, h, b: (b, h, *(0,) * len(rest)))
    parts = lambda *rest: pl.BlockSpec((None, None, None, *rest), lambda i, h, b: (b, h, i, *(0,) * len(rest)))
    inputs: dict[str, tuple[Any, Any]] = {
        "q": (q, heads(R, q.shape[-1])),
        "k": (k, heads(S, q.shape[-1])),
        "v": (v, heads(S, q.shape[-1])),
        "q_pos": (q_pos, pl.BlockSpec((None, 1), lambda i, h, b: (b, 0))),
        "kv_pos": (kv_pos, heads(S)),
    }
    if owner is not None:
        inputs["owner"] = owner[:, None], heads(S)
    if bias is not None:
        inputs["bias"] = bias.astype(jnp.float32), heads(*bias.shape[2:])
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    outputs: dict[str, tuple[Any, Any]] = {
        "out": (shape(B, K, num_parts, R, q.shape[-1]), parts(R, q.shape[-1])),
        "top": (shape(B, K, num_parts, R), parts(R)),
        "mass": (shape(B, K, num_parts, R), parts(R)),
    }
    if logits_rows:
        outputs["logits"] = shape(B, K, logits_rows, S), heads(logits_rows, S)
    kernel = functools.partial(
        _kernel, names=(*inputs, *outputs), spec=spec, sizes=sizes, num_rows=R, num_slots=S, group=group
    )
    out, top, mass, *logits = bl.call(
        kernel,
        [x for x, _ in inputs.values()],
        grid=(num_parts, K, B),
        in_specs=[x for _, x in inputs.values()],
        out_specs=[x for _, x in outputs.values()],
        out_shape=[x for x, _ in outputs.values()],
        interpret=interpret,
        name="kvjax_decode" if owner is None else "kvjax_pool_decode",
        compiler_params=bl.compiler_params(sizes),
    )
    out, lse = _combined(out, top, mass, q.dtype, interpret)
    return out[..., :H], lse, logits[0] if logits else None


def decode_attention(
    q: Float[Array, "B N 1 H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_pos: Int[Array, "B 1"],
    kv_pos: Int[Array, "B K S"],
    bias: Float[Array, "B N S"] | None = None,
    *,
    spec: bl.Spec,
    with_logits: bool = False,
    sizes: bl.BlockSizes | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B N 1 H"], Float[Array, "B N 1"], Float[Array, "B K G S"] | None]:
    """One query row a head over a cache with dead slots (FlashDecoding's split over the slots).

    Args:
      q: the queries.
      k, v: keys and values.
      q_pos: position of the row, negative for padding.
      kv_pos: positions of the slots, negative for dead ones.
      bias: added to the logits of every slot after the soft cap.
      spec: how logits follow from products.
      with_logits: also return the logits of every slot, unmasked; `exp(logits - lse)` is the probability row.
      sizes: block sizes; `block_sizes` if None.
      interpret: run on any device, slowly, for tests.

    Returns:
      Output in the dtype of `q`, natural-log logsumexp, and the logits or None, both in float32.

    Raises:
      NotImplementedError: for dtypes or softmaxes that the kernel does not know.
    """
    B, N, _, H = q.shape
    K, S = k.shape[1:3]
    G = N // K
    rows = max(bl.MIN_TILE, bl.power_of_two(G))
    sizes = block_sizes(k.dtype, H, B * K, S, rows) if sizes is None else sizes
    out, lse, logits = _run(
        *(q.reshape(B, K, G, H), k, v, q_pos, kv_pos, None, None if bias is None else bias.reshape(B, K, G, S)),
        spec=spec,
        sizes=sizes,
        group=rows,
        logits_rows=G if with_logits else 0,
        interpret=interpret,
    )
    return out.reshape(B, N, 1, H), lse.reshape(B, N, 1), logits


def pooled_decode_attention(
    q: Float[Array, "B N 1 H"],
    k: Float[Array, "B P H"],
    v: Float[Array, "B P H"],
    owner: Int[Array, "B P"],
    q_pos: Int[Array, "B 1"],
    kv_pos: Int[Array, "B P"],
    bias: Float[Array, "B G P"] | None = None,
    *,
    num_kv_heads: int,
    spec: bl.Spec,
    with_logits: bool = False,
    sizes: bl.BlockSizes | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B N 1 H"], Float[Array, "B N 1"], Float[Array, "B G P"] | None]:
    """`decode_attention` over a flat pool: every tile of slots meets all query heads, and masks leave each its own.

    That is K times the arithmetic on tensor cores, which wait for memory here anyway.

    Args:
      q: the queries.
      k, v: keys and values.
      owner: kv head of every slot, negative for none.
      q_pos: position of the row, negative for padding.
      kv_pos: positions of the slots, negative for dead ones.
      bias: added to the logits of every slot with the query heads of its owner.
      num_kv_heads: K.
      spec, sizes, interpret: as in `decode_attention`.
      with_logits: also return the logits of every slot with the query heads of its owner, unmasked.

    Returns:
      Output in the dtype of `q`, natural-log logsumexp, and the logits or None, both in float32.

    Raises:
      NotImplementedError: for dtypes or softmaxes that the kernel does not know.
    """
    B, N, _, H = q.shape
    K, P = num_kv_heads, k.shape[1]
    G = N // K
    group = bl.power_of_two(G)
    heads = max(bl.MIN_TILE // group, bl.power_of_two(K))
    padded = jnp.pad(q.reshape(B, K, G, H), ((0, 0), (0, heads - K), (0, group - G), (0, 0)))
    rows = heads * group
    sizes = block_sizes(k.dtype, H, B, P, rows) if sizes is None else sizes
    out, lse, logits = _run(
        *(
            padded.reshape(B, 1, rows, H),
            k[:, None],
            v[:, None],
            q_pos,
            kv_pos[:, None],
            owner,
            None if bias is None else bias[:, None],
        ),
        spec=spec,
        sizes=sizes,
        group=group,
        logits_rows=G if with_logits else 0,
        interpret=interpret,
    )
    own = lambda x: x.reshape(B, heads, group, *x.shape[3:])[:, :K, :G]
    return (
        own(out).reshape(B, N, 1, H),
        own(lse).reshape(B, N, 1),
        None if logits is None else logits[:, 0],
    )
