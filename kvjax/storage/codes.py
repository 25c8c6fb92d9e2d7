"""Keys or values in fewer bits, and attention that reads their codes."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.codecs import SCALE, Codec, RowCodec
from kvjax.pallas_kernels import Logits, attention
from kvjax.pallas_kernels.columns import Attention, Columns
from kvjax.pallas_kernels.loops import loop
from kvjax.pallas_kernels.pytree import pytree, static

TILE = 512  # slots of a head that are decoded at once


@pytree
class Codes:
    """Rows "B *slots H" in a codec's parts. Slots are written and moved as those of an array.

    Attributes:
      parts: arrays "B *slots n".
      centre: "B K H", by which the rows of each head are less than they were; None for 0.
      codec: how they are coded.
      width, dtype: H, and what rows are decoded to.
    """

    parts: tuple[Array, ...]
    centre: Float[Array, "B K H"] | None
    codec: RowCodec = static()
    width: int = static()
    dtype: Any = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the rows."""
        return *self.parts[0].shape[:-1], self.width

    @property
    def ndim(self) -> int:
        """Axes of the rows."""
        return self.parts[0].ndim

    def each(self, change: Callable[..., Array], *others: "Codes") -> "Codes":
        """The same codes with every part changed."""
        return dataclasses.replace(self, parts=tuple(map(change, self.parts, *(x.parts for x in others))))

    def of(self, rows: Float[Array, "B *slots H"], owner: Int[Array, "B P"] | None = None) -> "Codes":
        """New rows in the same codec, less the same centre."""
        x = rows.astype(jnp.float32)
        return dataclasses.replace(self, parts=self.codec.encode(x if self.centre is None else x - self._beside(owner)))

    def rows(self, owner: Int[Array, "B P"] | None = None) -> Float[Array, "B *slots H"]:
        """All rows, decoded.

        Args:
          owner: of a pool, the head of each slot.
        """
        x = self.codec.decode(self.parts)
        return (x if self.centre is None else x + self._beside(owner)).astype(self.dtype)

    def changed(self, before: Float[Array, "B *slots H"], after: Float[Array, "B *slots H"], *owner: Array) -> "Codes":
        """Codes of rows that are no longer what they were; the others as they are."""
        differs = (before != after).any(-1, keepdims=True)
        return self.of(after, *owner).each(lambda new, old: jnp.where(differs, new, old), self)

    def _beside(self, owner: Int[Array, "B P"] | None) -> Float[Array, "B *#slots H"]:
        """The centre of each row."""
        centre = cast(Array, self.centre).astype(jnp.float32)
        return centre[:, :, None] if owner is None else jnp.take_along_axis(centre, owner[..., None], axis=1)


class Exactly(RowCodec):
    """Rows as they are: the codec of what has none, where the other of keys and values has one."""

    def encode(self, x: Float[Array, "*rows H"]) -> tuple[Array, ...]:
        """The rows."""
        return (x,)

    def numbers(self, parts: tuple[Array, ...]) -> tuple[Float[Array, "*rows H"], None]:
        """The rows."""
        return parts[0].astype(jnp.float32), None


Rows = Array | Codes


def rows_of(x: Any, *owner: Array) -> Float[Array, "B *slots H"]:
    """Keys or values as numbers."""
    return x.rows(*owner) if isinstance(x, Codes) else x


def each_part(change: Callable[..., Array], x: Rows, *others: Rows) -> Rows:
    """Rows, or every part of their codes, changed alike."""
    if not isinstance(x, Codes):
        return change(x, *others)
    return x.each(change, *(cast(Codes, y) for y in others))


def coded(
    x: Rows, codec: Codec | None, name: str, live: Bool[Array, "B *slots"], mean: Callable[[], Array], *owner: Array
) -> Rows:
    """Keys ("k") or values ("v") in a codec, if there is one and they are not coded yet; dead slots become 0."""
    own = None if codec is None else codec.keys if name == "k" else codec.values
    if codec is None or own is None or isinstance(x, Codes):
        return x
    codes = Codes((), mean() if codec.centre else None, own, x.shape[-1], x.dtype)
    return codes.of(jnp.where(live[..., None], x, 0), *owner)


def first_slots(x: Rows, n: int) -> Rows:
    """The first slots of each head."""
    return each_part(lambda part: part[:, :, :n], x)


def mean_of(x: Rows, live: Bool[Array, "B K S"]) -> Float[Array, "B K H"]:
    """The mean row of each head's live slots."""
    total = jnp.where(live[..., None], rows_of(x).astype(jnp.float32), 0).sum(2)
    return (total / jnp.maximum(live.sum(2), 1).astype(jnp.float32)[..., None]).astype(SCALE)


def attend_codes(
    q: Float[Array, "B N 1 H"],
    k: Rows,
    v: Rows,
    pos: Int[Array, "B 1"],
    read: Int[Array, "B K S"],
    *,
    columns: tuple[Columns, ...] = (),
    bias: Float[Array, "B N S"] | None = None,
    logits: Logits = Logits(),
    own: bool = False,
) -> Attention:
    """Attention of one row a sequence, by tiles of codes: no layer is decoded as a whole.

    Logits are products with codes. Softmax and statistics are those of `attention`, to which they are a bias.
    """
    B, N, _, H = q.shape
    K, S = read.shape[1:]
    wide, G = q.astype(jnp.float32).reshape(B, K, -1, H), N // K
    key, value = (x if isinstance(x, Codes) else Codes((x,), None, Exactly(), x.shape[-1], x.dtype) for x in (k, v))
    count = -(-S // TILE)
    size = -(-S // count)  # of a tile; the last one begins earlier, where it would end behind the last slot

    def tile(x: Codes, i: Array) -> tuple[Array, Array | None, Array]:
        """Codes of a tile as numbers, and their scales; and where it begins."""
        start = jnp.minimum(i * size, S - size)
        found = x.codec.numbers(tuple(lax.dynamic_slice_in_dim(part, start, size, 2) for part in x.parts))
        return *found, start

    asked = key.codec.into(wide)

    def products(i: Array, x: Array) -> Array:
        codes, scale, start = tile(key, i)
        found = jnp.einsum("bkgh,bksh->bkgs", asked, codes)
        found = found if scale is None else found * scale[:, :, None]
        return lax.dynamic_update_slice_in_dim(x, found, start, 3)

    x = loop(0, count, products, jnp.zeros((B, K, G, S), jnp.float32))
    x = x if key.centre is None else x + jnp.einsum("bkgh,bkh->bkg", wide, key.centre.astype(jnp.float32))[..., None]
    x = logits.of(x, H).reshape(B, N, S)
    x = x if bias is None else x + bias
    zeros = lambda *shape: jnp.zeros((B, *shape, 1), jnp.float32)
    how: dict[str, Any] = {"columns": columns, "bias": x, "logits": dataclasses.replace(logits, softcap=None)}
    found = attention(zeros(N, 1), zeros(K, S), zeros(K, S), pos, read, implementation="xla", **how)
    seen = jnp.repeat(logits.visible(pos, read)[:, :, 0], G, axis=1)
    p = jnp.where(seen, jnp.exp(x - found.lse), 0.0).reshape(B, K, G, S)

    def outputs(i: Array, out: Array) -> Array:
        codes, scale, start = tile(value, i)
        new = jnp.arange(size) + start >= i * size
        weight = jnp.where(new, lax.dynamic_slice_in_dim(p, start, size, 3), 0.0)
        weight = weight if scale is None else weight * scale[:, :, None]
        return out + jnp.einsum("bkgs,bksh->bkgh", weight, codes)

    out = value.codec.back(loop(0, count, outputs, jnp.zeros((B, K, G, value.width), jnp.float32)))
    if value.centre is not None:
        out = out + p.sum(-1, keepdims=True) * value.centre.astype(jnp.float32)[:, :, None]
    return dataclasses.replace(found, out=out.reshape(B, N, 1, -1).astype(q.dtype))
