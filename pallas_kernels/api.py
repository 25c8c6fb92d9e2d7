"""One entry a operation; this is the only place that chooses how it is computed."""

from collections.abc import Sequence
from typing import Literal

from jaxtyping import Array, Float, Int

from pallas_kernels import pooled, reference, xla
from pallas_kernels.columns import Attention, Columns

Implementation = Literal["xla", "reference"]

_IMPLEMENTATIONS = {"xla": xla.attention, "reference": reference.attention}
_POOLED = {"xla": pooled.pooled_attention, "reference": reference.pooled_attention}


def attention(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_pos: Int[Array, "B T"],
    kv_pos: Int[Array, "B K S"],
    *,
    columns: Sequence[Columns] = (),
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    implementation: Implementation | None = None,
) -> Attention:
    """Grouped-query attention over a cache whose slots know their positions, with column statistics on request.

    Row `t` reads slot `s` of its kv head when the slot is live (`kv_pos >= 0`), not later than the row
    (`kv_pos <= q_pos`) and inside the sliding window. A row with a negative position is padding: it reads nothing,
    returns zeros and adds nothing to any statistic. The last T slots must hold the rows' own tokens in the rows' order
    (trivial for T = 1); the order of all other slots is free.

    Column statistics are those of NaCl's Algorithm 2 (arXiv 2408.03675) and its family. They are accumulated in float32
    and have no gradient.

    Args:
      q: queries.
      k, v: keys and values of every slot.
      q_pos: absolute position of every query row, negative for padding.
      kv_pos: absolute position of every slot, negative for a dead slot.
      columns: the statistics to measure, each one array in the result.
      scale: factor on `q . k`; `H ** -0.5` if None.
      window: a row sees only positions larger than its own minus `window`.
      softcap: logits become `softcap * tanh(logits / softcap)`.
      implementation: "xla", "reference" (quadratic memory; the specification), or None for the best that works.

    Returns:
      `Attention(out, lse, columns)`.

    Raises:
      ValueError: shapes that do not fit together, or an unknown implementation.
    """
    B, N, T, H = q.shape
    K, S = k.shape[1:3]
    if N % K:
        raise ValueError(f"{N} query heads are not a multiple of {K} kv heads; every kv head serves N / K query heads")
    if S < T:
        raise ValueError(f"{T} query rows need their own {T} slots among the keys, but there are only {S} slots")
    _check_columns(columns, B, K, T)
    run = _choose(_IMPLEMENTATIONS, implementation)
    scale = H**-0.5 if scale is None else scale
    return run(q, k, v, q_pos, kv_pos, columns=columns, scale=scale, window=window, softcap=softcap)


def pooled_attention(
    q: Float[Array, "B N 1 H"],
    k: Float[Array, "B P H"],
    v: Float[Array, "B P H"],
    owner: Int[Array, "B P"],
    q_pos: Int[Array, "B 1"],
    kv_pos: Int[Array, "B P"],
    columns: Sequence[Columns] = (),
    *,
    num_kv_heads: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    implementation: Implementation | None = None,
) -> Attention:
    """One query row a head over a flat pool, where every slot belongs to one kv head: caches of per-head budgets.

    The same as `attention` with T = 1, where kv head `h` has the slots with `owner == h` for its cache. Slots may lie
    in any order. A slot is dead when its owner or its position is negative.

    Args:
      q: one query row of every query head.
      k, v: keys and values of every slot of the pool.
      owner: the kv head of every slot, negative for none.
      q_pos: absolute position of the row, negative for padding.
      kv_pos: absolute position of every slot, negative for a dead slot.
      columns: the statistics to measure.
      num_kv_heads: K; the pool does not show it.
      scale, window, softcap, implementation: as in `attention`.

    Returns:
      `Attention(out "B N 1 H", lse "B N 1", columns)`. A statistic has one number a slot, of its owner: "B P", or
      "B G P" where its `group` is None, with an axis of one row before the last where it is not `summed`. Dead slots
      have 0.

    Raises:
      ValueError: shapes that do not fit together, or an unknown implementation.
    """
    B, N, T, H = q.shape
    if T != 1:
        raise ValueError(f"a pool answers one query row a head, but q has {T}; attend to blocks before they are pooled")
    if num_kv_heads < 1 or N % num_kv_heads:
        raise ValueError(
            f"{N} query heads are not a multiple of num_kv_heads={num_kv_heads}; every kv head serves N / K query heads"
        )
    _check_columns(columns, B, num_kv_heads, T)
    run = _choose(_POOLED, implementation)
    scale = H**-0.5 if scale is None else scale
    return run(
        *(q, k, v, owner, q_pos, kv_pos),
        num_kv_heads=num_kv_heads,
        columns=columns,
        scale=scale,
        window=window,
        softcap=softcap,
    )


def _check_columns(columns: Sequence[Columns], B: int, K: int, T: int) -> None:
    for c in columns:
        if c.weight is not None and c.weight.shape != (B, T):
            raise ValueError(f"a column weight has shape {c.weight.shape}, but the query rows have shape {(B, T)}")
        if c.softmax is not None and c.softmax.multiplier is not None and c.softmax.multiplier.shape != (B, K, T):
            raise ValueError(
                f"a softmax multiplier has shape {c.softmax.multiplier.shape}, but the rows have shape {(B, K, T)}"
            )


def _choose(implementations, name: str | None):
    name = "xla" if name is None else name
    if name not in implementations:
        raise ValueError(f"implementation={name!r} is not one of {tuple(implementations)} or None")
    return implementations[name]
