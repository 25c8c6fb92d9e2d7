"""Whole numbers of tokens for every prompt length that a plan may meet: numpy on the host.

What a method wants to keep (`Wanted`) becomes tables over prompt lengths, from 0 to the plan's, which `LayerSpec`s hold
and traced code looks up.
"""

import dataclasses
import functools

import numpy as np

from kvjax.cache.context import Site
from kvjax.pallas_kernels.values import MOST_TOKENS
from kvjax.sizes.allocation import HeadAllocation, LayerAllocation
from kvjax.sizes.budget import Count, as_count

LONGEST = 2**24  # tokens of a prompt: sizes are tables with an entry for every length up to the prompt's


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a method keeps.

    Attributes:
      budget: live tokens a head, on average over layers.
      sinks, recent: tokens that are protected by position.
      first: tokens that are protected beside those because they come first.
      size: tokens that are protected by what they did, those protected by position included.
      drop: tokens that an eviction takes at once.
      layers: how the budget is divided over layers.
      coming: tokens for which a step makes room before it appends them.
    """

    budget: Count
    sinks: Count
    recent: Count
    first: Count
    size: Count
    drop: Count
    layers: LayerAllocation
    coming: int

    def least(self, prompt_length: np.ndarray, by_position: np.ndarray, budget: np.ndarray) -> np.ndarray:
        """The smallest budgets "M" that layers of budgets "M" can work with, `by_position` being protected anyway."""
        first, size, drop = (count.table(prompt_length, budget) for count in (self.first, self.size, self.drop))
        return np.maximum(np.maximum(by_position + first, size), drop)


@dataclasses.dataclass(frozen=True, eq=False)
class Tables:
    """Whole tokens, one row for every prompt length from 0 to the plan's.

    Attributes:
      budget: "M L".
      sinks, recent: "M".
      coming: see `Wanted`.
    """

    budget: np.ndarray
    sinks: np.ndarray
    recent: np.ndarray
    coming: int

    @property
    def outside(self) -> np.ndarray:
        """What every head gets of a layer that has its average budget."""
        return np.minimum(self.sinks + np.maximum(self.recent, self.coming), self.budget.min(1))

    def count(self, count: int | float | Count, name: str, layer: int, prompt_length: int) -> int:
        """Another count in one layer."""
        budget = self.budget[prompt_length : prompt_length + 1, layer]
        return int(as_count(count, name).table(np.array([prompt_length]), budget)[0])

    def later(self, site: Site, heads: HeadAllocation, *, room: int, prefill: bool) -> np.ndarray:
        """The most "M #K" that every head can be given while decoding beside what it gets anyway; see `slots`."""
        n = np.arange(site.prompt_len + 1)
        target, outside = site.column(self.budget), self.outside
        held = np.where((n <= target) | (not prefill), np.maximum(n, target) + room, n)
        return heads.later(target - outside, np.maximum(held - outside, 0), site, outside)

    def slots(
        self, site: Site, heads: HeadAllocation, *, room: int, slack: int, prefill: bool, pooled: bool, decodes: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What a layer holds: (live tokens a head on average, most slots of a head, most slots of all heads).

        Args:
          site: the layer.
          heads: how its budget is divided over heads.
          room: tokens that a head may hold beyond its budget between two evictions.
          slack: tokens that a selection may leave beyond the budget.
          prefill: whether something is evicted after the prompt.
          pooled: whether heads share slots.
          decodes: whether heads that differ evict while decoding.
        """
        n = np.arange(site.prompt_len + 1)
        target, outside = site.column(self.budget), self.outside
        cap = heads.cap(target - outside, np.maximum(n - outside, 0), site, outside) + outside + slack
        later = self.later(site, heads, room=room, prefill=prefill) + (outside + slack)[:, None] if decodes else None
        held = cap if later is None else np.maximum(cap[:, None], later)
        cap = cap if later is None else held.max(1)
        if not prefill:
            cap = np.maximum(cap, site.prompt_len)
        capacity = np.minimum(site.prompt_len + site.max_new_tokens, cap + room)
        slots = site.num_kv_heads * capacity
        if pooled and prefill:
            together = heads.total(target, site.num_kv_heads) + site.num_kv_heads * (room + slack)
            if later is not None:  # heads hold as much as others until shares are decided, and then what they got
                every = np.broadcast_to(held + room, (len(n), site.num_kv_heads)).sum(1)
                together = np.where(np.maximum(n, target) + slack < later.max(1), every, together)
            slots = np.minimum(slots, together)
        return target, capacity, slots


@functools.lru_cache(maxsize=64)
def tables(wanted: Wanted, num_layers: int, prompt_len: int, max_new_tokens: int) -> Tables:
    """The numbers of a model's layers. Protected tokens come first; what is left of the budget is divided.

    A prompt whose budget cannot hold what must stay of it has a budget of all its tokens, or of what must stay where
    that is more, if a longer prompt's budget could hold it: it is too short for its share of it to mean anything.

    Args:
      wanted: what is kept.
      num_layers: layers of the model.
      prompt_len: the longest prompt.
      max_new_tokens: tokens to come.
    """
    n = np.append(np.arange(prompt_len + 1), LONGEST)
    average, exact = (np.clip(x, 1, MOST_TOKENS) for x in (wanted.budget.table(n, n), wanted.budget.exact(n, n)))
    sinks, recent = wanted.sinks.table(n, average), wanted.recent.table(n, average)
    by_position = sinks + np.maximum(recent, wanted.coming)

    def divided(average: np.ndarray, exact: np.ndarray) -> np.ndarray:
        outside = np.minimum(by_position, average)
        limit = np.maximum(n - outside, average - outside)
        return wanted.layers.divide(exact, average - outside, limit, num_layers, outside) + outside[:, None]

    per_layer = divided(average, exact)
    least = np.max([wanted.least(n, by_position, budget) for budget in per_layer.T], axis=0)
    short = per_layer.min(1) < least
    if short.any() and not short[-1]:
        whole = np.maximum(n, least)
        per_layer = divided(np.where(short, whole, average), np.where(short, whole, exact))
    # A layer that may keep all there ever is needs no larger number, and arithmetic on heads stays within 32 bits.
    per_layer = np.minimum(per_layer[:-1], prompt_len + max_new_tokens)
    return Tables(per_layer, sinks[:-1], recent[:-1], wanted.coming)
