"""Keys or values in fewer bits, and attention that reads their codes."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.codecs import SCALE, Codec, RowCodec
from kvjax.contract import EMPTY, LAST
from kvjax.pallas_kernels import Logits, attention
from kvjax.pallas_kernels.columns import Attention, Columns
from kvjax.pallas_kernels.loops import loop
from kvjax.pallas_kernels.pytree import pytree, static

TILE = 512  # slots of a head that are decoded at once


@pytree
class Exact:
    """First and last rows of each head as they are: E = sinks + recent places, each for tokens of certain positions.

    Attributes:
      rows: the rows.
      at: the slot of each, `LAST` of a place without one.
      sinks, recent: of the text; a token that is neither has no place.
    """

    rows: Float[Array, "B K E H"]
    at: Int[Array, "B K E"]
    sinks: int = static()
    recent: int = static()

    def write(
        self, rows: Float[Array, "B K T H"], pos: Int[Array, "B K T"], slots: Int[Array, "B K T"], num_slots: int
    ) -> "Exact":
        """With rows that were written to these slots, whatever these held before."""
        E, newest = self.at.shape[2], pos.max((1, 2), keepdims=True)
        last = self.sinks + pos % max(self.recent, 1)
        place = jnp.where(pos < self.sinks, pos, jnp.where(pos > newest - self.recent, last, E))
        place = jnp.where((pos == EMPTY) | (slots >= num_slots), E, place)
        gone = (self.at[..., None] == slots[:, :, None]).any(-1)
        where = jnp.arange(len(rows))[:, None, None], jnp.arange(rows.shape[1])[None, :, None], place
        at = jnp.where(gone, LAST, self.at).at[where].set(slots, mode="drop")
        return self.replace(rows=self.rows.at[where].set(rows.astype(self.rows.dtype), mode="drop"), at=at)

    def moved(self, source: Int[Array, "B K W"]) -> "Exact":
        """After slots were moved: slot w holds what slot `source` of the same head held."""
        same = source[:, :, None] == self.at[..., None]
        return self.replace(at=jnp.where(same.any(-1), same.argmax(-1).astype(jnp.int32), LAST))

    def of(self, x: Float[Array, "B K *G S"]) -> Float[Array, "B K *G E"]:
        """Numbers of slots, at the rows' slots; 0 for a place without a row."""
        at = self._beside(x)
        found = jnp.take_along_axis(x, jnp.minimum(at, x.shape[-1] - 1), axis=-1)
        return jnp.where(at < x.shape[-1], found, 0)

    def into(self, x: Float[Array, "B K *G S"], of_rows: Float[Array, "B K *G #E"]) -> Float[Array, "B K *G S"]:
        """Numbers of slots, with others at the rows' slots."""
        at = self._beside(x)
        return jnp.put_along_axis(x, at, jnp.broadcast_to(of_rows, at.shape), axis=-1, inplace=False, mode="drop")

    def _beside(self, x: Array) -> Int[Array, "B K *G E"]:
        at = self.at if x.ndim == 3 else self.at[:, :, None]
        return jnp.broadcast_to(at, (*x.shape[:-1], self.at.shape[2]))

    def replace(self, **fields: Any) -> "Exact":
        """The same with other fields."""
        return dataclasses.replace(self, **fields)


@pytree
class Codes:
    """Rows "B *slots H" in a codec's parts. Slots are written and moved as those of an array.

    Attributes:
      parts: arrays "B *slots n".
      centre: "B K H", by which the rows of each head are less than they were; None for 0.
      exact: rows that are stored as they are, too; None for none.
      codec: how they are coded.
      width, dtype: H, and what rows are decoded to.
    """

    parts: tuple[Array, ...]
    centre: Float[Array, "B K H"] | None
    exact: Exact | None
    codec: RowCodec = static()
    width: int = static()
    dtype: Any = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the rows."""
        return *self.parts[0].shape[:-1], self.width

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
        x = (x if self.centre is None else x + self._beside(owner)).astype(self.dtype)
        if self.exact is None:
            return x
        where = (jnp.arange(len(x))[:, None, None], self.exact.at)
        where = where if x.ndim == 3 else (where[0], jnp.arange(x.shape[1])[None, :, None], where[1])
        return x.at[where].set(self.exact.rows, mode="drop")

    def changed(self, before: Float[Array, "B *slots H"], after: Float[Array, "B *slots H"], *owner: Array) -> "Codes":
        """Codes of rows that are no longer what they were; the others as they are."""
        differs = (before != after).any(-1, keepdims=True)
        codes = self.of(after, *owner).each(lambda new, old: jnp.where(differs, new, old), self)
        if (exact := self.exact) is None:
            return codes
        B, K, _ = exact.at.shape
        wide = after if after.ndim == 4 else jnp.broadcast_to(after[:, None], (B, K, *after.shape[1:]))
        rows = jnp.take_along_axis(wide, jnp.minimum(exact.at, wide.shape[2] - 1)[..., None], axis=2)
        return dataclasses.replace(codes, exact=exact.replace(rows=rows))

    def moved(self, change: Callable[..., Array], source: Int[Array, "B K W"]) -> "Codes":
        """The same codes with slots moved by `change`: slot w of a head is then what `source` says."""
        exact = None if self.exact is None else self.exact.moved(source)
        return dataclasses.replace(self.each(change), exact=exact)

    def written(
        self,
        put: Callable[..., Array],
        rows: Float[Array, "B K T H"],
        pos: Int[Array, "B K T"],
        slots: Int[Array, "B K T"],
    ) -> "Codes":
        """With the codes of new rows, `put` into each part."""
        codes = self.each(put, self.of(rows))
        if self.exact is None:
            return codes
        return dataclasses.replace(codes, exact=self.exact.write(rows, pos, slots, codes.parts[0].shape[-2]))

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


def each_part(change: Callable[[Array], Array], x: Rows) -> Rows:
    """Rows, or every part of their codes, changed alike."""
    return x.each(change) if isinstance(x, Codes) else change(x)


def moved(change: Callable[[Array], Array], x: Rows, source: Int[Array, "B K W"]) -> Rows:
    """Rows or codes of which slot w of a head becomes what `source` says."""
    return x.moved(change, source) if isinstance(x, Codes) else change(x)


def written(
    put: Callable[..., Array],
    x: Rows,
    rows: Shaped[Array, "B K T *rest"],
    pos: Int[Array, "B K T"],
    slots: Int[Array, "B K T"],
) -> Rows:
    """Rows or codes with new rows, `put` into each array."""
    return x.written(put, rows, pos, slots) if isinstance(x, Codes) else put(x, rows)


def coded(
    x: Rows,
    name: str,
    how: Codec | None,
    pos: Int[Array, "B *slots"],
    mean: Callable[[], Array],
    by_head: Callable[[Array], tuple[Array, Array]],
    *owner: Array,
) -> Rows:
    """Keys ("k") or values ("v") in a codec, if there is one and they are not coded yet; dead slots become 0.

    Args:
      x: the rows.
      name: what they are.
      how: the codec.
      pos: of the slots.
      mean: gives the mean row of each head.
      by_head: of the rows and `pos` those of each head's slots, "B K S ...".
      owner: of a pool, the head of each slot.
    """
    codec = None if how is None else how.keys if name == "k" else how.values
    if how is None or codec is None or isinstance(x, Codes):
        return x
    x, exact = jnp.where((pos != EMPTY)[..., None], x, 0), None
    if sum(how.exact):
        rows, place = by_head(x)
        B, K, S = place.shape
        E, dtype = sum(how.exact), x.dtype
        empty = Exact(jnp.zeros((B, K, E, x.shape[-1]), dtype), jnp.full((B, K, E), LAST), *how.exact)
        exact = empty.write(rows, place, jnp.broadcast_to(jnp.arange(S), place.shape), S)
    codes = Codes((), mean() if how.centre else None, exact, codec, x.shape[-1], x.dtype)
    return codes.of(x, *owner)


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
    key, value = (
        x if isinstance(x, Codes) else Codes((x,), None, None, Exactly(), x.shape[-1], x.dtype) for x in (k, v)
    )
    count = -(-S // TILE)
    size = -(-S // count)  # of a tile; the last one begins earlier, where it would end behind the last slot

    def tile(x: Codes, i: int | Array) -> tuple[Array, Array | None, Array]:
        """Codes of a tile as numbers, and their scales; and where it begins."""
        start = jnp.minimum(i * size, S - size)
        found = x.codec.numbers(tuple(lax.dynamic_slice_in_dim(part, start, size, 2) for part in x.parts))
        return *found, start

    asked = key.codec.into(wide)

    def products(i: int | Array, x: Array) -> Array:
        codes, scale, start = tile(key, i)
        found = jnp.einsum("bkgh,bksh->bkgs", asked, codes)
        found = found if scale is None else found * scale[:, :, None]
        return lax.dynamic_update_slice_in_dim(x, found, start, 3)

    x = loop(0, count, products, jnp.zeros((B, K, G, S), jnp.float32))
    x = x if key.centre is None else x + jnp.einsum("bkgh,bkh->bkg", wide, key.centre.astype(jnp.float32))[..., None]
    if key.exact is not None:
        x = key.exact.into(x, jnp.einsum("bkgh,bkeh->bkge", wide, key.exact.rows.astype(jnp.float32)))
    x = logits.of(x, H).reshape(B, N, S)
    x = x if bias is None else x + bias
    zeros = lambda *shape: jnp.zeros((B, *shape, 1), jnp.float32)
    how: dict[str, Any] = {"columns": columns, "bias": x, "logits": dataclasses.replace(logits, softcap=None)}
    found = attention(zeros(N, 1), zeros(K, S), zeros(K, S), pos, read, implementation="xla", **how)
    seen = jnp.repeat(logits.visible(pos, read)[:, :, 0], G, axis=1)
    p = jnp.where(seen, jnp.exp(x - found.lse), 0.0).reshape(B, K, G, S)
    out = jnp.zeros((B, K, G, value.width), jnp.float32)
    if value.exact is not None:
        out = jnp.einsum("bkge,bkeh->bkgh", value.exact.of(p), value.exact.rows.astype(jnp.float32))
        p = value.exact.into(p, jnp.zeros((B, K, G, 1), p.dtype))

    def outputs(i: int | Array, out: Array) -> Array:
        codes, scale, start = tile(value, i)
        new = jnp.arange(size) + start >= i * size
        weight = jnp.where(new, lax.dynamic_slice_in_dim(p, start, size, 3), 0.0)
        weight = weight if scale is None else weight * scale[:, :, None]
        return out + jnp.einsum("bkgs,bksh->bkgh", weight, codes)

    out = out + value.codec.back(loop(0, count, outputs, jnp.zeros_like(out)))
    if value.centre is not None:
        out = out + p.sum(-1, keepdims=True) * value.centre.astype(jnp.float32)[:, :, None]
    return dataclasses.replace(found, out=out.reshape(B, N, 1, -1).astype(q.dtype))
