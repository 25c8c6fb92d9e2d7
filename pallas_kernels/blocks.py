"""For all Pallas kernels: block sizes, tiles and their masks, and which blocks meet.

Positions decide everything, as everywhere: a tile is masked by the positions of its rows and keys, and the blocks that
a program visits follow from the smallest and largest positions of blocks, never from an index.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from kvjax.pallas_kernels.columns import Softmax, hash_uniform, rescaled
from kvjax.pallas_kernels.logits import Logits

LOG2E = math.log2(math.e)
DEAD = 2**31 - 1  # the position of a key that no row may read: larger than every row's, so that one comparison masks
MIN_TILE = 16  # tensor cores multiply no smaller tiles
DTYPES = ("bfloat16", "float16", "float32")
WIDEST = 256  # channels of a head whose accumulators the registers hold


@functools.cache
def triton() -> Any:
    """The Triton backend of Pallas, which is deprecated since jax 0.11: nothing but its own kernels may need it.

    Raises:
      NotImplementedError: this jax has none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas import triton as backend
    except ImportError as error:
        raise NotImplementedError(f"jax {jax.__version__} has no Triton backend of Pallas") from error
    return backend


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """How a kernel cuts its work.

    Attributes:
      block_q, block_k: query rows and keys of a tile; powers of two, at least 16.
      num_warps: warps of a program.
      num_stages: how many tiles are loaded ahead.
      split: keys of one program of a decode kernel; a multiple of `block_k`.
    """

    block_q: int = 64
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 2
    split: int = 1024

    def __post_init__(self):
        for name in ("block_q", "block_k"):
            size = getattr(self, name)
            if size < MIN_TILE or size & (size - 1):
                raise ValueError(f"{name}={size} must be a power of two, at least {MIN_TILE}")
        if self.split % self.block_k:
            raise ValueError(f"split={self.split} must be a multiple of block_k={self.block_k}")


@dataclasses.dataclass(frozen=True)
class Spec(Logits):
    """Everything static about how logits follow from products: `multiplier * (cap(scale * q.k) + bias + noise)`."""

    scale: float = 1.0
    causal: bool = True
    gumbel: bool = False
    per: str = "call"

    @classmethod
    def of_model(cls, logits: Logits, head_dim: int) -> "Spec":
        """That of a model's logits."""
        return cls(logits.factor(head_dim), logits.softcap, logits.window)

    def within(self, own: Softmax | None) -> "Spec":
        """The same with the softmax of a statistic's own. Constant noise cancels in a softmax."""
        if own is None:
            return self
        if own.noise == "gaussian":
            raise NotImplementedError("gaussian noise is not drawn inside the kernels")
        return dataclasses.replace(self, causal=own.causal, gumbel=own.noise == "gumbel", per=own.per)


def check_inputs(*xs: Array) -> None:
    """Raises NotImplementedError for what no kernel reads."""
    for x in xs:
        if x.dtype.name not in DTYPES:
            raise NotImplementedError(f"kernels read {DTYPES}, not {x.dtype.name}")
        if x.shape[-1] > WIDEST:
            raise NotImplementedError(f"accumulators of {x.shape[-1]} channels do not fit; kernels read up to {WIDEST}")


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below `n`."""
    return 1 << max(0, n - 1).bit_length()


def parts(head_dim: int) -> tuple[tuple[int, int], ...]:
    """(start, size) of the powers of two that add up to `head_dim`, a multiple of 16: tiles have no other sizes."""
    found, start = [], 0
    for bit in range(head_dim.bit_length() - 1, -1, -1):
        if head_dim & (1 << bit):
            found.append((start, 1 << bit))
            start += 1 << bit
    return tuple(found)


def pad_head_dim(*xs: Array | None) -> tuple[Any, ...]:
    """Zeros behind the head dimension, up to a multiple of 16. No copy for the sizes that models have."""

    def pad(x):
        missing = -x.shape[-1] % MIN_TILE
        return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing),)) if missing else x

    return tuple(None if x is None else pad(x) for x in xs)


def load_rows(ref: Any, start: Array, size: int, total: int, lead: tuple[Any, ...] = ()) -> tuple[Array, ...]:
    """Rows `start ...` of a "*lead total H" reference, one tile for each part of H; rows past the end are 0.

    One indexer only, and a dynamic start: the Triton lowering takes no chained ones, and jax 0.12 no static slice
    that is longer than its dimension.
    """

    def load(column, width):
        mask = start + lax.broadcasted_iota(jnp.int32, (size, width), 0) < total
        return triton().load(ref.at[(*lead, pl.ds(start, size), pl.ds(column, width))], mask=mask, other=0.0)

    return tuple(load(*part) for part in parts(ref.shape[-1]))


def load_vector(ref: Any, start: Array, size: int, total: int, other: float, lead: tuple[Any, ...] = ()) -> Array:
    """Numbers `start ...` of a "*lead total" reference; `other` past the end."""
    mask = start + lax.broadcasted_iota(jnp.int32, (size,), 0) < total
    return triton().load(ref.at[(*lead, pl.ds(start, size))], mask=mask, other=other)


def store_rows(ref: Any, start: Array, total: int, tiles: tuple[Array, ...]) -> None:
    """The inverse of `load_rows`."""
    for (column, width), tile in zip(parts(ref.shape[-1]), tiles, strict=True):
        mask = start + lax.broadcasted_iota(jnp.int32, tile.shape, 0) < total
        triton().store(ref.at[pl.ds(start, tile.shape[0]), pl.ds(column, width)], tile.astype(ref.dtype), mask=mask)


def store_vector(ref: Any, start: Array, total: int, x: Array) -> None:
    """The inverse of `load_vector`."""
    mask = start + lax.broadcasted_iota(jnp.int32, x.shape, 0) < total
    triton().store(ref.at[pl.ds(start, x.shape[0])], x, mask=mask)


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """A product of two tiles in float32. float32 operands are multiplied as such: TF32 would cost 1e-3 of a logit."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def products(a: tuple[Array, ...], b: tuple[Array, ...]) -> Array:
    """`a @ b.T`, summed over the parts of the head dimension."""
    return sum((dot(x, y, (1, 1)) for x, y in zip(a[1:], b[1:], strict=True)), dot(a[0], b[0], (1, 1)))


def capped_logits(spec: Spec, s: Float[Array, "x y"]) -> Float[Array, "x y"]:
    """Logits of one tile of products, before bias and mask."""
    x = s * spec.scale
    return x if spec.softcap is None else spec.softcap * jnp.tanh(x * (1.0 / spec.softcap))


def masked_logits(
    spec: Spec,
    s: Float[Array, "x y"],
    q_pos: Int[Array, "#x #y"],
    kv_pos: Int[Array, "#x #y"],
    *,
    bias: Float[Array, "#x #y"] | None = None,
    multiplier: Float[Array, "#x #y"] | None = None,
    seed: Array | None = None,
    head: Array | None = None,
) -> Float[Array, "x y"]:
    """Logits in base 2 of one tile of products, -inf where a row may not read a key.

    Args:
      spec: how they follow.
      s: products of a tile, either way round.
      q_pos: positions of its rows, negative for rows that read nothing.
      kv_pos: positions of its keys, `DEAD` for keys that nobody reads.
      bias: added after the soft cap.
      multiplier: of every row.
      seed, head: what the noise depends on besides positions.
    """
    plain = spec.softcap is None and bias is None and not spec.gumbel
    x = s * (spec.scale * LOG2E) if plain else capped_logits(spec, s)
    if bias is not None:
        x = x + bias
    if spec.gumbel and seed is not None and head is not None:
        row = jnp.zeros_like(q_pos) if spec.per == "key" else q_pos
        x = x - jnp.log(-jnp.log(hash_uniform(seed, head, row, kv_pos)))
    if not plain:
        x = x * LOG2E
    if multiplier is not None:
        x = x * multiplier if bias is None else rescaled(x, multiplier)
    seen = kv_pos <= q_pos if spec.causal else (kv_pos != DEAD) & (q_pos >= 0)
    if spec.window is not None:
        seen &= q_pos - kv_pos < spec.window
    return jnp.where(seen, x, -jnp.inf)


def readable(kv_pos: Int[Array, "B *K S"], before: Int[Array, "B"] | None = None) -> Int[Array, "B *K S"]:
    """Positions of keys with `DEAD` for those that nobody may read."""
    live = kv_pos >= 0 if before is None else (kv_pos >= 0) & (kv_pos < before.reshape(-1, *(1,) * (kv_pos.ndim - 1)))
    return jnp.where(live, kv_pos, DEAD)


def _extremes(x: Int[Array, "*b n"], block: int, ignore: Bool[Array, "*b n"]):
    """Smallest and largest entries of blocks; (`DEAD`, -1) where every entry is ignored."""
    missing = -x.shape[-1] % block
    pad = lambda y, value: jnp.pad(y, ((0, 0),) * (y.ndim - 1) + ((0, missing),), constant_values=value)
    blocks = lambda y: y.reshape(*y.shape[:-1], -1, block)
    low = blocks(pad(jnp.where(ignore, DEAD, x), DEAD)).min(-1)
    return low, blocks(pad(jnp.where(ignore, -1, x), -1)).max(-1)


def meetings(
    spec: Spec, q_pos: Int[Array, "B T"], kv_pos: Int[Array, "B K S"], block_q: int, block_k: int
) -> Bool[Array, "B K q k"]:
    """Whether some row of a block may read some key of a block; never False where one does.

    Args:
      spec: causal or not, and the window.
      q_pos: negative for rows that read nothing.
      kv_pos: `DEAD` for keys that nobody reads.
      block_q, block_k: sizes of the blocks.
    """
    q_low, q_high = (x[:, None, :, None] for x in _extremes(q_pos, block_q, q_pos < 0))
    k_low, k_high = (x[:, :, None, :] for x in _extremes(kv_pos, block_k, kv_pos == DEAD))
    meet = (k_high >= 0) & (q_high >= 0)
    if spec.causal:
        meet &= k_low <= q_high
    return meet if spec.window is None else meet & (q_low - k_high < spec.window)


def first_and_stop(meet: Bool[Array, "*b n"]) -> tuple[Int[Array, "*b"], Int[Array, "*b"]]:
    """The range of blocks from the first to the last that meets; (0, 0) for none."""
    n = meet.shape[-1]
    index = jnp.arange(n, dtype=jnp.int32).reshape((1,) * (meet.ndim - 1) + (n,))
    stop = jnp.where(meet, index + 1, 0).max(-1)
    return jnp.minimum(jnp.where(meet, index, n).min(-1), stop), stop


def count_visible(spec: Spec, q_pos: Int[Array, "B T"], kv_pos: Int[Array, "B K S"]) -> Int[Array, "B K T"]:
    """How many keys every row may read, in O((S + T) log S). Arguments as in `meetings`."""
    K = kv_pos.shape[1]
    up_to = jax.vmap(jax.vmap(lambda keys, rows: jnp.searchsorted(keys, rows, side="right").astype(jnp.int32)))
    keys = jnp.sort(kv_pos, axis=-1)
    rows = jnp.repeat(q_pos[:, None], K, axis=1)
    last = rows if spec.causal else jnp.full_like(rows, DEAD - 1)
    count = up_to(keys, last)
    if spec.window is not None:
        count = count - up_to(keys, rows - spec.window)
    return jnp.where(rows < 0, 0, jnp.maximum(count, 0))


def log2_sum(top: Array, mass: Array) -> Array:
    """Natural logarithm of `mass * 2 ** top`; -inf without mass."""
    return jnp.where(mass > 0, (top + jnp.log2(jnp.where(mass > 0, mass, 1.0))) * (1.0 / LOG2E), -jnp.inf)


def call(kernel: Callable[..., None], inputs: Sequence[Array], **options: Any) -> Any:
    """`pl.pallas_call`, traced in 32 bits, whatever `jax_enable_x64` makes of a Python number elsewhere.

    Raises:
      NotImplementedError: to interpret under `jax_enable_x64`, which jax does later than it traces, and in 64 bits.
    """
    if options.get("interpret") and jnp.result_type(float) == jnp.float64:
        raise NotImplementedError("kernels are not interpreted under jax_enable_x64")
    with jax.enable_x64(False):
        return pl.pallas_call(kernel, **options)(*inputs)


def compiler_params(blocks: BlockSizes) -> Any:
    """Options of the Triton backend."""
    return triton().CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages)
