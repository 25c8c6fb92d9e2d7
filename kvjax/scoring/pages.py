"""Pages of consecutive positions, and what is known of their keys together (Quest, arXiv 2406.10774, section 3.3).

Summaries are a rule's numbers: made once from all keys, and from then on brought up to date with every token, so that a
step looks at a page through two vectors instead of at its keys.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from kvjax.cache.context import Site
from kvjax.cache.state import LayerKV, PerHead, widened
from kvjax.pallas_kernels.pytree import pytree
from kvjax.pallas_kernels.values import Value, settle, tokens


@pytree
class PageTable:
    """What is known of the P pages of every kv head, `size` positions each.

    Attributes:
      slots: the slot of every position "B K P size", -1 where no live slot holds it.
      counts: live tokens of every page "B K P".
      extremes: the largest number of every key channel, and then the smallest, "B K P 2H" in 32 bits; 0 for a page
        without tokens.
      mark: a number a head "B K" made of the positions and slots that all this is known of.
    """

    slots: PerHead
    counts: PerHead
    extremes: PerHead
    mark: PerHead


@dataclasses.dataclass(frozen=True)
class Pages(Value):
    """Pages of consecutive positions, the first of which is 0: padding and the order of slots make no difference.

    A table is the memory of a rule. It knows by its mark whether it is still true: where tokens were evicted, or slots
    were moved, it is made anew from all keys, which costs about what attention over them costs. Keys must stay as they
    are (`positions="original"`).

    Attributes:
      size: positions of a page.
    """

    size: int = 16

    def __post_init__(self):
        settle(self, size=tokens(1, "a page has at least 1 position, a whole number"))

    def number(self, site: Site) -> int:
        """P, the pages of the longest text of a plan."""
        return -(-(site.prompt_len + site.max_new_tokens) // self.size)

    def init(self, site: Site, batch: int) -> PageTable:
        """The table of a layer without tokens."""
        shape = batch, site.num_kv_heads, self.number(site)
        return PageTable(
            PerHead(jnp.full((*shape, self.size), -1, jnp.int32)),
            PerHead(jnp.zeros(shape, jnp.int32)),
            PerHead(jnp.zeros((*shape, 2 * site.head_dim), jnp.float32)),
            PerHead(jnp.zeros(shape[:2], jnp.uint32)),
        )

    def of(self, kv: LayerKV, number: int) -> PageTable:
        """The table of a layer's live tokens, from all of its keys."""
        B, K, _ = kv.pos.shape
        b, h, slots = np.arange(B)[:, None, None], np.arange(K)[None, :, None], _numbers(kv)
        place = jnp.where(kv.live, kv.pos, number * self.size)
        found = jnp.full((B, K, number * self.size), -1, jnp.int32).at[b, h, place].set(slots, mode="drop")
        keys = jnp.take_along_axis(_keys(kv), jnp.maximum(found, 0)[..., None], axis=2)
        keys = keys.reshape(B, K, number, self.size, keys.shape[-1])
        found = found.reshape(B, K, number, self.size)
        there = (found >= 0)[..., None]
        ends = jnp.where(there, keys, -jnp.inf).max(3), jnp.where(there, keys, jnp.inf).min(3)
        counts = (found >= 0).sum(-1, dtype=jnp.int32)
        extremes = jnp.where(counts[..., None] > 0, jnp.concatenate(ends, axis=-1), 0.0)
        return PageTable(PerHead(found), PerHead(counts), PerHead(extremes), PerHead(_mark(kv)))

    def joined(self, table: PageTable, kv: LayerKV, newest: Int[Array, "B"]) -> PageTable:
        """A table that is true of all tokens.

        Args:
          table: as it was before a token was added. It gets the token's key, or is made from all keys if more has
            happened since.
          kv: the layer that holds the token.
          newest: the token's position; sequences that read nothing have the table of it already.
        """
        slot, now, mark = slot_of(kv, newest), _mark(kv), table.mark.value
        new, pos, number = (now != mark) & (slot >= 0), newest[:, None], table.counts.value.shape[-1]
        stale = (now != mark + jnp.where(new, _mixed(pos, slot), 0)).any()
        # A loop of no or one step, since what a branch gives would be copied at every token.
        anew = lambda again: (jnp.zeros_like(stale), self.of(kv, number))
        _, table = lax.while_loop(lambda again: again[0], anew, (stale, table))

        b, h = np.arange(slot.shape[0])[:, None], np.arange(slot.shape[1])[None]
        page = jnp.where(new & ~stale, pos // self.size, number)
        of_page = lambda x: x.value.at[b, h, page].get(mode="fill", fill_value=0)
        write = lambda x, numbers, *at: PerHead(x.value.at[(b, h, page, *at)].set(numbers, mode="drop"))
        key, count = _keys(kv)[b, h, jnp.maximum(slot, 0)], of_page(table.counts)
        high, low = jnp.split(of_page(table.extremes), 2, axis=-1)
        ends = jnp.concatenate([jnp.maximum(high, key), jnp.minimum(low, key)], axis=-1)
        ends = jnp.where(count[..., None] > 0, ends, jnp.concatenate([key, key], axis=-1))
        return PageTable(
            write(table.slots, slot, pos % self.size),
            write(table.counts, count + 1),
            write(table.extremes, ends),
            PerHead(now),
        )

    def bounds(self, table: PageTable, q: Float[Array, "B K G H"]) -> Float[Array, "B K G P"]:
        """The most that the product of a query and a key of every page can be.

        The sum over channels of the larger of the query's products with the largest and the smallest number of the
        page. As the larger is that with the largest number where the query is positive, and that with the smallest
        where it is negative, all bounds are one product of matrices.
        """
        q = lax.stop_gradient(q).astype(jnp.float32)
        split = jnp.concatenate([jnp.maximum(q, 0), jnp.minimum(q, 0)], axis=-1)
        return jnp.einsum("bkgc,bkpc->bkgp", split, table.extremes.value)


def _keys(kv: LayerKV) -> Float[Array, "B K S H"]:
    return lax.stop_gradient(widened(kv.k, kv.v.shape[-1])).astype(jnp.float32)


def _numbers(kv: LayerKV) -> Int[Array, "B K S"]:
    return lax.broadcasted_iota(jnp.int32, kv.pos.shape, 2)


def _mixed(pos: Int[Array, "..."], slot: Int[Array, "..."]) -> UInt32[Array, "..."]:
    """A number of 32 bits for a position in a slot."""
    word = lambda x, odd: x.astype(jnp.uint32) * np.uint32(odd)
    h = word(pos, 0x9E3779B1) + word(slot, 0x85EBCA77) + np.uint32(0x165667B1)
    h = (h ^ (h >> 15)) * np.uint32(0x2C1B3C6D)
    return h ^ (h >> 13)


def _mark(kv: LayerKV) -> UInt32[Array, "B K"]:
    return jnp.where(kv.live, _mixed(kv.pos, _numbers(kv)), 0).sum(-1, dtype=jnp.uint32)


def slot_of(kv: LayerKV, pos: Int[Array, "B"]) -> Int[Array, "B K"]:
    """The slot in which every head holds the token at a position, -1 where it does not."""
    return jnp.where(kv.live & (kv.pos == pos[:, None, None]), _numbers(kv), -1).max(-1)
