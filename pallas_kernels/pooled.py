"""One query row a head against a flat pool of slots, each owned by one kv head: a softmax by owner, for XLA.

Slots in any order: all query heads meet all slots in two plain matrix products, and masks leave every head its own
slots. That is K times the arithmetic of a dense cache, but gathers, sorts and sums by owner cost more on CPU.

Slots in order of their owners: a block of slots belongs to the owners of its first and its last slot, and meets the
query heads of both in a batched matrix product. Where a third head has all of its slots inside one block, slots are
taken in any order; and so they always are for few kv heads, where products of blocks cost more than those with all
queries.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.pallas_kernels.columns import (
    Attention,
    Columns,
    accumulator,
    apply_element,
    draw_noise,
    reduce_group,
    rescaled,
    thresholds,
)
from kvjax.pallas_kernels.logits import Logits, beside_nothing

MIN_BLOCK = 16  # products of smaller blocks cost more than K times the arithmetic does
MIN_HEADS = 4  # and so do those of fewer kv heads
MAX_BLOCK = 512


def pooled_attention(
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
    in_order: bool = False,
    columns: Sequence[Columns] = (),
    logits: Logits,
) -> Attention:
    """`kvjax.pallas_kernels.pooled_attention` in XLA: differentiable, statistics included."""
    B, N, _, H = q.shape
    K = num_kv_heads
    rows = q.reshape(B, K, N // K, H)
    bias = None if bias is None else bias.astype(accumulator(q.dtype))

    def of(products: Float[Array, "B *K G P"]) -> Float[Array, "B *K G P"]:
        x = logits.of(products, H)
        return x if bias is None else x + bias.reshape(B, *(1,) * (x.ndim - 3), *bias.shape[1:])

    owner = jnp.where(kv_pos >= 0, owner, -1) if not in_order else owner
    seen = pool_visible(owner, q_pos, kv_pos, logits.window)
    blocks = in_order and K >= MIN_HEADS
    size = min(block_size(kv_pos.shape[1]), _power_of_two(kv_pos.shape[1] // (2 * K))) if blocks else 1
    by_slot = lambda: _slot_by_slot(rows, k, v, owner, seen, of)
    if size < MIN_BLOCK:
        out, lse, x = by_slot()
    else:
        blocks = _Blocks.of(owner, size)
        x = blocks.logits(rows, k, of)
        found = blocks.attend(x, v, seen, K)
        out, lse, x = lax.cond(blocks.cover(), lambda: found, by_slot)
    out, lse = beside_nothing(out.reshape(B, N, 1, H).astype(q.dtype), lse.reshape(B, N, 1), nothing)
    p = probabilities(x, lse.reshape(B, K, -1), seen, owner)
    how = {"num_kv_heads": K, "window": logits.window, "nothing": nothing}
    return Attention(out, lse, pool_columns(columns, p, x, seen, owner, q_pos, kv_pos, **how))


def _power_of_two(n: int) -> int:
    """The largest up to n, and 1 for 0."""
    return 1 << max(0, n.bit_length() - 1)


def block_size(num_slots: int) -> int:
    """The largest power of two up to `MAX_BLOCK` that divides a pool."""
    return min(MAX_BLOCK, num_slots & -num_slots)


_Of = Callable[[Array], Array]  # from products to logits
_Row = tuple[Float[Array, "B K G H"], Float[Array, "B K G"], Float[Array, "B G P"]]


def _slot_by_slot(
    q: Float[Array, "B K G H"],
    k: Float[Array, "B P H"],
    v: Float[Array, "B P H"],
    owner: Int[Array, "B P"],
    seen: Bool[Array, "B P"],
    of: _Of,
) -> _Row:
    """The output, the logsumexp and the logits of every slot with the queries of its owner."""
    B, K, G, H = q.shape
    dtype = accumulator(q.dtype)
    rows = q.reshape(B, K * G, H)
    if k.dtype.itemsize >= 4:  # slots first: for the other order XLA would copy all keys, transposed, on CPU
        x = lax.optimization_barrier(jnp.einsum("bph,bnh->bpn", k, rows, preferred_element_type=dtype)).swapaxes(1, 2)
    else:
        x = jnp.einsum("bnh,bph->bnp", rows, k, preferred_element_type=dtype)
    x = of(x.reshape(B, K, G, -1))
    e, mass, lse = _exponentials(x, seen, owner)
    out = jnp.einsum("bnp,bph->bnh", e.reshape(B, K * G, -1).astype(v.dtype), v, preferred_element_type=dtype)
    return out.reshape(B, K, G, H) * _inverse(mass)[..., None], lse, _select_owner(x, owner)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """A pool in blocks with one or two owners: those of the first and of the last slot.

    Attributes:
      owners: of every block. Two equal ones are one owner, in the first place.
      mine: which slots belong to which of the two.
    """

    owners: Int[Array, "B NB 2"]
    mine: Bool[Array, "B NB 2 block"]

    @classmethod
    def of(cls, owner: Int[Array, "B P"], size: int) -> "_Blocks":
        """Blocks of `size` slots."""
        slots = owner.reshape(owner.shape[0], -1, size)
        first, last = slots[..., :1], slots[..., -1:]
        of_first = slots == first
        mine = jnp.stack([of_first, (slots == last) & ~of_first], axis=2)
        return cls(jnp.concatenate([first, last], axis=2), mine)

    def cover(self) -> Bool[Array, ""]:
        """Whether no slot belongs to a third owner."""
        return self.mine.any(2).all()

    def _split(self, x: Array) -> Array:
        B, NB, _, size = self.mine.shape
        return x.reshape(B, NB, size, *x.shape[2:])

    def logits(self, q: Float[Array, "B K G H"], k: Float[Array, "B P H"], of: _Of) -> Float[Array, "B G P"]:
        """Of every slot with the queries of its owner, for slots that belong to one of the two."""
        B, K, G, H = q.shape
        NB = self.owners.shape[1]
        both = jnp.broadcast_to(q[:, :1, None], (B, NB, 2, G, H))
        for head in range(1, K):
            both = jnp.where((self.owners == head)[..., None, None], q[:, head, None, None], both)
        # Slots come first in the product: for the other order XLA would transpose the keys on CPU.
        both = both.reshape(B, NB, 2 * G, H)
        x = jnp.einsum("bnsh,bnrh->bnsr", self._split(k), both, preferred_element_type=accumulator(q.dtype))
        x = jnp.where(self.mine[:, :, 0, :, None], x[..., :G], x[..., G:])
        return of(x.reshape(B, -1, G).swapaxes(1, 2))

    def attend(self, x: Float[Array, "B G P"], v: Float[Array, "B P H"], seen: Bool[Array, "B P"], K: int) -> _Row:
        """`_slot_by_slot`, from the logits."""
        B, G, _ = x.shape
        NB, size, H = self.owners.shape[1], self.mine.shape[-1], v.shape[-1]
        by_block = x.reshape(B, G, NB, size).swapaxes(1, 2)  # "B NB G size"
        mine = (self.mine & self._split(seen)[:, :, None])[:, :, :, None]  # "B NB 2 1 size"
        lowest = jnp.finfo(x.dtype).min  # finite where nothing is seen
        top = lax.stop_gradient(jnp.where(mine, by_block[:, :, None], lowest).max(-1))  # "B NB 2 G"
        below = by_block - jnp.where(mine[:, :, 0], top[:, :, 0, :, None], top[:, :, 1, :, None])
        e = jnp.exp(jnp.where(below > 0, 0.0, below))  # above its maximum lies only what no row sees
        e = jnp.where(mine, e[:, :, None], 0.0)
        rows = e.reshape(B, NB, 2 * G, size)
        out = jnp.einsum("bnrs,bnsh->bnrh", rows.astype(v.dtype), self._split(v), preferred_element_type=x.dtype)

        flat = lambda y: y.reshape(B, 2 * NB, *y.shape[3:])
        heads = jnp.arange(K, dtype=self.owners.dtype)[None, :, None]
        belongs = (flat(self.owners)[:, None] == heads)[..., None]  # "B K 2NB 1"
        head_top = jnp.where(belongs, flat(top)[:, None], lowest).max(2)  # "B K G"
        factor = jnp.where(belongs, jnp.exp(flat(top)[:, None] - head_top[:, :, None]), 0.0)  # "B K 2NB G"
        mass = (factor * flat(e.sum(-1))[:, None]).sum(2)
        out = jnp.einsum("bkng,bngh->bkgh", factor, out.reshape(B, 2 * NB, G, H)) * _inverse(mass)[..., None]
        return out, _logsumexp(head_top, mass), x


def pool_visible(
    owner: Int[Array, "B P"],
    q_pos: Int[Array, "B 1"],
    kv_pos: Int[Array, "B P"],
    window: int | None,
    causal: bool = True,
) -> Bool[Array, "B P"]:
    """Which slots the row of their owner may read."""
    seen = (owner >= 0) & (kv_pos >= 0) & (kv_pos <= q_pos if causal else q_pos >= 0)
    return seen if window is None else seen & (q_pos - kv_pos < window)


def _owned(owner: Int[Array, "B P"], seen: Bool[Array, "B P"], num_kv_heads: int) -> Bool[Array, "B K P"]:
    """Which slots the row of a kv head reads."""
    return seen[:, None] & (owner[:, None] == jnp.arange(num_kv_heads, dtype=owner.dtype)[None, :, None])


def _select_owner(x: Shaped[Array, "B K G P"], owner: Int[Array, "B P"]) -> Shaped[Array, "B G P"]:
    """The values of every slot's own kv head; those of head 0 for a dead slot.

    A chain of selects over the heads stays in vector registers; a gather, or a sum over a mask, does not.
    """
    found = x[:, 0]
    for head in range(1, x.shape[1]):
        found = jnp.where((owner == head)[:, None], x[:, head], found)
    return found


def by_owner(x: Shaped[Array, "B K G"], owner: Int[Array, "B P"]) -> Shaped[Array, "B G P"]:
    """A number of every kv head at the slots that it owns."""
    return _select_owner(jnp.broadcast_to(x[..., None], (*x.shape, owner.shape[1])), owner)


def _exponentials(x: Float[Array, "B K G P"], seen: Bool[Array, "B P"], owner: Int[Array, "B P"]):
    """`exp(x - top)` with the maximum of every head over its own slots, 0 elsewhere, their sums and the logsumexp."""
    x = jnp.where(_owned(owner, seen, x.shape[1])[:, :, None], x, -jnp.inf)
    top = lax.stop_gradient(jnp.maximum(x.max(-1), jnp.finfo(x.dtype).min))  # finite where a head sees nothing
    e = jnp.exp(x - top[..., None])
    mass = e.sum(-1)
    return e, mass, _logsumexp(top, mass)


def _logsumexp(top: Array, mass: Array) -> Array:
    return jnp.where(mass > 0, top + jnp.log(jnp.where(mass > 0, mass, 1.0)), -jnp.inf)


def _inverse(mass: Array) -> Array:
    return 1.0 / jnp.where(mass > 0, mass, 1.0)


def probabilities(
    x: Float[Array, "B G P"], lse: Float[Array, "B K G"], seen: Bool[Array, "B P"], owner: Int[Array, "B P"]
) -> Float[Array, "B G P"]:
    """Of every slot in the row of its owner, from logits and logsumexp; 0 where the row does not read it."""
    reads = seen[:, None] & (x > -jnp.inf)  # where a bias hides all that a row reads, the logsumexp is -inf too
    return jnp.exp(jnp.where(reads, x - by_owner(lse, owner), -jnp.inf))


def pool_columns(
    columns: Sequence[Columns],
    p: Float[Array, "B G P"] | None,
    x: Float[Array, "B G P"] | None,
    seen: Bool[Array, "B P"],
    owner: Int[Array, "B P"],
    q_pos: Int[Array, "B 1"],
    kv_pos: Int[Array, "B P"],
    *,
    num_kv_heads: int,
    window: int | None,
    nothing: Float[Array, "N"] | None = None,
) -> tuple[Array, ...]:
    """Every statistic of one row, from its probabilities `p` and its logits `x` before the mask.

    `x` is read only by statistics with a softmax of their own, `p` by the others.
    """
    return tuple(_column(c, p, x, seen, owner, q_pos, kv_pos, num_kv_heads, window, nothing) for c in columns)


def _column(spec: Columns, p, x, seen, owner, q_pos, kv_pos, num_kv_heads, window, nothing):
    B, G, _ = (p if x is None else x).shape
    own = spec.softmax
    if own is not None:
        if not own.causal:
            seen = pool_visible(owner, q_pos, kv_pos, window, causal=False)
        if own.before is not None:
            seen = seen & (kv_pos < own.before[:, None])
        if own.noise is not None:
            seed = None if own.seed is None else own.seed[:, None, None]
            head = jnp.maximum(owner, 0)[:, None] * G + jnp.arange(G, dtype=owner.dtype)[None, :, None]
            x = x + jnp.asarray(draw_noise(own, seed, head, q_pos[:, None], kv_pos[:, None]), x.dtype)
        if own.multiplier is not None:
            x = rescaled(x, by_owner(own.multiplier.astype(x.dtype), owner))
        _, _, lse = _exponentials(jnp.repeat(x[:, None], num_kv_heads, axis=1), seen, owner)
        if nothing is not None:
            beside = nothing.astype(x.dtype).reshape(1, num_kv_heads, G)
            lse = jnp.logaddexp(lse, beside if own.multiplier is None else beside * own.multiplier)
        p = probabilities(x, lse, seen, owner)
    if not spec.count_self:
        p = jnp.where((kv_pos == q_pos)[:, None], 0.0, p)
    theta = thresholds(spec, q_pos, _owned(owner, seen, num_kv_heads).sum(-1)[..., None], p.dtype)
    if theta is not None:
        theta = by_owner(jnp.broadcast_to(theta, (B, num_kv_heads, 1)), owner)
    weight = jnp.ones((B, 1), p.dtype) if spec.weight is None else spec.weight.astype(p.dtype)
    if spec.group is not None and spec.group_at == "before":
        p = reduce_group(p, spec.group, axis=1)
        f = apply_element(p, spec, None if theta is None else theta[:, 0]) * weight
    else:
        f = apply_element(p, spec, theta) * weight[:, None]
        f = f if spec.group is None else reduce_group(f, spec.group, axis=1)
    return f if spec.summed else f[..., None, :]
