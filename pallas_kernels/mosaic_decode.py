"""One query row a head against a cache, split over the slots, on Hopper: `mosaic_flash` with a part in place of rows.

A block of 64 rows holds the query heads of one kv head, once for each part of its slots, so that a part is nothing but
the range of key blocks that a block of rows visits. The slots behind the last whole block are a part of their own.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.pallas_kernels import blocks as bl
from kvjax.pallas_kernels import mosaic as mo
from kvjax.pallas_kernels import mosaic_flash
from kvjax.pallas_kernels.columns import accumulator

TARGET_PROGRAMS = 264  # two for each multiprocessor of an H100: as many as its shared memory holds
TILE_ROWS = 8  # of a tile as TMA lays it out; other caches would have to be copied
MIN_BLOCKS = 4  # of a part: its result is small beside them


def decode_attention(
    q: Float[Array, "B N 1 H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_pos: Int[Array, "B 1"],
    kv_pos: Int[Array, "B K S"],
    *,
    spec: bl.Spec,
    with_logits: bool = False,
    parts: int | None = None,
) -> tuple[Float[Array, "B N 1 H"], Float[Array, "B N 1"], Float[Array, "B K G S"] | None]:
    """`decode.decode_attention`, which says what arguments and results are. XLA computes the logits, where asked for.

    Raises:
      NotImplementedError: for what `mosaic_flash` does not compute, for more query heads a kv head than a block has
        rows, and for a number of slots that is no multiple of 8.
    """
    B, N, _, H = q.shape
    K, S = k.shape[1:3]
    G = N // K
    if G > mo.BLOCK:
        raise NotImplementedError(f"a block has {mo.BLOCK} rows for the {G} query heads of a kv head")
    if S % TILE_ROWS:
        raise NotImplementedError(f"tiles of slots have {TILE_ROWS} rows, and {S} slots are no multiple of that")
    heads = q.reshape(B, K, G, H)
    whole = S // mo.BLOCK
    found = []
    if whole:
        wanted = max(1, min(whole // MIN_BLOCKS, TARGET_PROGRAMS // (B * K))) if parts is None else parts
        length = -(-whole // wanted)
        edges = [min(i * length, whole) for i in range(-(-whole // length) + 1)]
        found.append(_parts(heads, k, v, q_pos, kv_pos, spec, edges))
    if S % mo.BLOCK:
        tail = lambda x, value: mo.pad(x[:, :, whole * mo.BLOCK :], 2, mo.BLOCK, value)
        found.append(_parts(heads, tail(k, 0), tail(v, 0), q_pos, tail(kv_pos, bl.DEAD), spec, [0, 1]))
    out, lse = (jnp.concatenate(x, axis=2) for x in zip(*found, strict=True))  # "B K part G (H)"
    top = lse.max(2, keepdims=True)
    weight = jnp.exp(lse - jnp.where(top == -jnp.inf, 0.0, top))
    mass = weight.sum(2)
    seen = mass > 0
    total = jnp.where(seen, jnp.log(jnp.where(seen, mass, 1.0)) + top[:, :, 0], -jnp.inf)
    out = (weight[..., None] * out.astype(jnp.float32)).sum(2) / jnp.where(seen, mass, 1.0)[..., None]
    logits = None
    if with_logits:
        logits = spec.of(jnp.einsum("bkgh,bksh->bkgs", heads, k, preferred_element_type=accumulator(q.dtype)), H)
    return out.reshape(B, N, 1, H).astype(q.dtype), total.reshape(B, N, 1), logits


def _parts(
    heads: Float[Array, "B K G H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_pos: Int[Array, "B 1"],
    kv_pos: Int[Array, "B K S"],
    spec: bl.Spec,
    edges: list[int],
) -> tuple[Float[Array, "B K part G H"], Float[Array, "B K part G"]]:
    """Output and logsumexp over each range of whole blocks of slots between two edges."""
    B, K, G, H = heads.shape
    num = len(edges) - 1
    rows = jnp.broadcast_to(mo.pad(heads, 2, mo.BLOCK, 0)[:, :, None], (B, K, num, mo.BLOCK, H))
    pos = jnp.where(jnp.arange(mo.BLOCK)[None] < G, q_pos, -1)  # rows without a head read nothing
    pos = jnp.broadcast_to(pos[:, None], (B, num, mo.BLOCK)).reshape(B, num * mo.BLOCK)
    first, stop = (jnp.broadcast_to(jnp.asarray(x, jnp.int32), (B, K, num)) for x in (edges[:-1], edges[1:]))
    out, lse = mosaic_flash.flash_attention(
        rows.reshape(B, K, num * mo.BLOCK, H), k, v, pos, kv_pos, spec=spec, ranges=(first, stop)
    )
    split: Any = lambda x: x.reshape(B, K, num, mo.BLOCK, *x.shape[3:])[:, :, :, :G]
    return split(out), split(lse)
