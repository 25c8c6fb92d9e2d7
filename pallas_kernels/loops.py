"""For the passes of `kvjax.pallas_kernels.xla`: static facts, masked logits, loops that write in place."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from kvjax.pallas_kernels.columns import Columns, accumulator
from kvjax.pallas_kernels.logits import Logits

MAX_SEGMENTS = 8
LONG = 2048  # from so many rows on, twice as many segments are worth their compilation


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tile of an online softmax: rows of every query head of some sets of slots, and keys."""

    rows: int
    keys: int
    together: int  # sets of slots; divides all there are


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything static about one call."""

    logits: Logits
    block: int
    together: int  # sequences in a block
    num_kv_heads: int  # of a sequence; where their sets of slots are sequences of their own, arrays have one
    num_slots: int
    num_rows: int  # padded to a multiple of `block`
    pad: int  # how many of them are padding, at the end
    offset: int  # row i may see slots up to offset + i
    tile: Tile | None = None  # of rows that no statistic reads; None where those have blocks as well

    def prefix(self, stop: int) -> int:
        """How many slots the rows before block `stop` may see."""
        return min(self.num_slots, self.offset + stop * self.block)

    def _start(self, spec: Columns) -> int:
        """The first block that a statistic reads."""
        return 0 if spec.rows is None else max(0, (self.num_rows - self.pad - spec.rows) // self.block)

    def first_block(self, columns: Sequence[Columns]) -> int:
        """The block of the first row that one of these reads; the number of blocks for none."""
        starts = [self._start(c) for c in columns]
        return min(starts, default=self.num_rows // self.block)

    def segments(self, columns: Sequence[Columns], first: int = 0) -> list[tuple[int, int, tuple[int, ...]]]:
        """(first block, last block, columns measured there) for every segment from block `first` on."""
        n = self.num_rows // self.block
        most = MAX_SEGMENTS if self.num_rows < LONG else 2 * MAX_SEGMENTS
        cuts = {round(i * n / most) for i in range(most + 1)}
        starts = [self._start(c) for c in columns]
        bounds = sorted({b for b in cuts | set(starts) if b > first} | {first})
        return [(lo, hi, tuple(i for i, s in enumerate(starts) if s <= lo)) for lo, hi in itertools.pairwise(bounds)]


def products(logits: Logits, q, k):
    """Scaled and capped products of a block of rows "B K G R H" and keys, before bias and mask."""
    B, K, G, R, H = q.shape
    dtype = accumulator(q.dtype)
    rows = q.reshape(B, K, G * R, H)
    if R == 1 and k.dtype.itemsize >= 4:  # slots first: for the other order XLA would copy all keys, transposed, on CPU
        x = lax.optimization_barrier(jnp.einsum("bksh,bkrh->bksr", k, rows, preferred_element_type=dtype))
        x = x.swapaxes(2, 3)
    else:
        x = jnp.einsum("bkrh,bksh->bkrs", rows, k, preferred_element_type=dtype)
    return logits.of(x.reshape(B, K, G, R, -1), H)


def masked(config: Config, q, k, q_pos, kv_pos, bias, causal=True):
    """Masked logits of a block of rows "B K G R S", the mask "B K R S", and the products before bias and mask."""
    x, seen = products(config.logits, q, k), config.logits.visible(q_pos, kv_pos, causal)
    biased = x if bias is None else x + bias[:, :, :, None]
    return jnp.where(seen[:, :, None], biased, -jnp.inf), seen, x


def loop(start, stop, body, carry):
    """`fori_loop`, or the body itself for a single step: decoding has no loop to pay for."""
    return body(start, carry) if stop - start == 1 else lax.fori_loop(start, stop, body, carry)


def sequences(x, b, together):
    """Sequences `b * together ...` of `x`."""
    return lax.dynamic_slice_in_dim(x, b * together, together, 0)


def read_block(x, b, together, i, block, axis):
    """The `i`-th block along `axis` of some sequences."""
    return lax.dynamic_slice_in_dim(sequences(x, b, together), i * block, block, axis)


def write_block(x, new, b, together, i, block, axis):
    """`x` with its `i`-th block along `axis` of some sequences replaced."""
    start = [jnp.int32(0)] * x.ndim
    start[0], start[axis] = jnp.int32(b * together), jnp.int32(i * block)
    return lax.dynamic_update_slice(x, new, start)


def as_bits(x):
    """16-bit numbers as integers, to write blocks of: XLA on CPUs would turn all of them into float32 and back."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def of_bits(x, dtype):
    """The inverse of `as_bits`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def zeros_after(shape, dtype, after):
    """Zeros that cannot exist before `after` does.

    Plain zeros depend on nothing, so XLA would make those of every layer of a model before the first layer runs.
    """
    return jnp.broadcast_to((after[(0,) * after.ndim] > jnp.inf).astype(dtype), shape)


def add_prefix(x, new, b, together):
    """Adds to the first slots of some sequences, in place."""
    start = [jnp.int32(0)] * x.ndim
    start[0] = jnp.int32(b * together)
    old = lax.dynamic_slice(x, start, new.shape)
    return lax.dynamic_update_slice(x, old + new, start)


def first_keys(x, b, together, width):
    """The first slots of some sequences, of an array whose last axis they are, or of none."""
    return None if x is None else sequences(x, b, together)[..., :width]
