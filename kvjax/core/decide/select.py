"""Which slots stay, given a score for each and a budget for every head."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.core.contract import LAST, Count, Part, count, resolve
from kvjax.core.observe import segment_sum


def best(score, pos, budgets):
    """The `budgets` "B K" best live slots of every head; of equals, the newer.

    A choice has no gradient. Scores are read once: XLA may compute a float twice, and round it differently, where it is compared with itself.
    """
    S, slot = pos.shape[-1], lax.broadcasted_iota(jnp.int32, pos.shape, 2)
    score = lax.stop_gradient(score)
    *_, order = lax.sort((jnp.where(pos >= 0, score, -jnp.inf), pos, slot), num_keys=2)
    chosen = jnp.arange(S) >= S - budgets[..., None]
    return jnp.put_along_axis(pos < 0, order, chosen, axis=-1, inplace=False) & (pos >= 0)


def all_but_worst(score, pos, budgets):
    """All live slots, but the worst of every head that exceeds its budget; of equals, the oldest goes."""
    live, score = pos >= 0, lax.stop_gradient(score)

    def lower(x, y):
        first = (x[0] < y[0]) | (x[0] == y[0]) & (x[1] < y[1])
        return tuple(jnp.where(first, a, b) for a, b in zip(x, y, strict=True))

    keys = jnp.where(live, score, jnp.inf), jnp.where(live, pos, LAST)
    _, worst = lax.reduce(keys, (jnp.float32(jnp.inf), jnp.int32(LAST)), lower, (2,))
    return live & ~((pos == worst[..., None]) & (live.sum(-1) > budgets)[..., None])


class Select(Part):
    """Turns a score into what stays: `(score, budgets "B K", slots) -> keep`, all "B K S".

    Slots that are `slots.protected` always stay; `slots.at_most_one` says that no head can exceed its budget by more.
    """

    @property
    def slack(self) -> int:
        """How many tokens more than its budget a head may be left with."""
        return 0

    def __call__(self, score, budgets, slots):
        raise NotImplementedError


class TopK(Select):
    """The highest scores."""

    def __call__(self, score, budgets, slots):
        return (all_but_worst if slots.at_most_one else best)(
            jnp.where(slots.protected, jnp.inf, score), slots.kv.pos, budgets
        )


class AtLeast(Select):
    """Of the highest scores those of at least a threshold (KVzap)."""

    threshold: float

    def __call__(self, score, budgets, slots):
        safe = slots.protected
        return best(jnp.where(safe, jnp.inf, score), slots.kv.pos, budgets) & (safe | (score >= self.threshold))


class ThenRandom(Select):
    """The best, and for the rest of the budget a draw without replacement by the softmax of scores (NaCl)."""

    random: Count = count()
    shared: bool = False

    def __call__(self, score, budgets, slots):
        kv, safe = slots.kv, slots.protected
        free = jnp.maximum(budgets - safe.sum(-1), 0)
        random = jnp.where(kv.num_live > budgets, jnp.minimum(slots.hparams.random[:, None], free), 0)
        first = best(jnp.where(safe, jnp.inf, score), kv.pos, budgets - random)
        rest = kv.live & ~safe & ~first
        u = jnp.clip(slots.ctx.uniform(kv.pos, self.shared), 1e-7, 1 - 1e-7)
        return first | best(score - jnp.log(-jnp.log(u)), jnp.where(rest, kv.pos, -1), random)


class TwoStage(Select):
    """The best by score, then the best of the rest by score times a weight that is asked for (CriticalKV)."""

    weight: Any
    first: float = 0.5
    eps: float = 1e-4

    def observe(self, phase):
        return (self.weight,)

    def __call__(self, score, budgets, slots):
        safe = slots.protected
        half = jnp.floor(budgets * self.first + 1e-6).astype(jnp.int32)
        first = best(jnp.where(safe, jnp.inf, score), slots.kv.pos, half)
        weighed = (score + self.eps) * slots.stats[self.weight]
        return best(jnp.where(first | safe, jnp.inf, weighed), slots.kv.pos, budgets)


class Chunks(Select):
    """Whole chunks of neighbouring tokens, the same in all kv heads (ChunkKV)."""

    size: int = 20
    share: float | None = None

    @property
    def slack(self) -> int:
        return self.size

    def __call__(self, score, budgets, slots):
        kv, ctx, safe = slots.kv, slots.ctx, slots.protected
        (B, K, S), num = score.shape, -(-ctx.width // self.size)  # a prompt's text has no more
        chunk = jnp.where(kv.live, kv.pos // self.size, num)
        by_chunk = lambda x: segment_sum(x, chunk, num)
        tokens, held = by_chunk(kv.live.astype(jnp.int32)), by_chunk((kv.live & safe).astype(jnp.int32))
        total = jnp.maximum(tokens.sum(1), 1).astype(jnp.float32)
        mean = jnp.where(tokens.sum(1) > 0, by_chunk(jnp.where(kv.live, score, 0.0)).sum(1) / total, -jnp.inf)
        rank = jnp.argsort(jnp.lexsort((-mean, -held.sum(1) / total)), axis=-1)
        exist, live, budget = (tokens.sum(1) > 0).sum(-1), kv.num_live.max(-1), budgets.min(-1)
        wanted = budget.astype(jnp.float32) / jnp.maximum(live, 1)
        if self.share is not None:
            asked = self.share * ctx.prompt_length.astype(jnp.float32)
            wanted = jnp.where((live == ctx.prompt_length) & (jnp.abs(budget - asked) < 1), self.share, wanted)
        wanted = jnp.maximum(jnp.floor(exist * wanted + 1e-5).astype(jnp.int32), 1)
        ordered = jnp.put_along_axis(
            jnp.zeros_like(tokens), jnp.broadcast_to(rank[:, None], tokens.shape), tokens - held, -1, inplace=False
        )
        grown = jnp.cumsum(ordered, -1) + held.sum(-1, keepdims=True)
        fits = (grown <= (budget + self.size - 1)[:, None, None]).all(1).sum(-1)
        wanted = jnp.where(live <= budget, exist, jnp.minimum(wanted, fits))
        kept = jnp.broadcast_to(((rank < wanted[:, None]) & (tokens.sum(1) > 0))[:, None], tokens.shape)
        return kv.live & (safe | jnp.take_along_axis(kept, jnp.minimum(chunk, num - 1), -1))


class PerChunk(Select):
    """Every chunk of the text keeps its own best, the same share of each (FINCH)."""

    size: int
    share: float | None = None

    def __call__(self, score, budgets, slots):
        kv, S, safe = slots.kv, score.shape[-1], slots.protected
        chunk = jnp.where(kv.live, kv.pos // self.size, LAST)
        order = jnp.lexsort((-kv.pos, -jnp.where(safe, jnp.inf, score), chunk), axis=-1)
        mine, place = jnp.take_along_axis(chunk, order, -1), jnp.arange(S)
        start = (mine[..., None, :] < mine[..., :, None]).sum(-1)
        length = (mine[..., None, :] == mine[..., :, None]).sum(-1)
        wanted = jnp.floor(length * (budgets / jnp.maximum(kv.num_live, 1))[..., None] + 1e-5).astype(jnp.int32)
        if self.share is not None:
            table = jnp.asarray(resolve(self.share, np.arange(self.size + 1)), jnp.int32)
            whole = (kv.num_live == slots.ctx.prompt_length[:, None])[..., None]
            wanted = jnp.where(whole, table[jnp.minimum(length, self.size)], wanted)
        chosen = jnp.put_along_axis(jnp.zeros_like(kv.live), order, place - start < wanted, -1, inplace=False)
        stays = chosen | safe | (kv.num_live <= budgets)[..., None]
        return best(jnp.where(safe, jnp.inf, score), jnp.where(stays, kv.pos, -1), budgets)


class LazyOrAll(Select):
    """A layer that looks at its safe slots alone keeps those alone (SimLayerKV)."""

    threshold: float

    def __call__(self, score, budgets, slots):
        safe = slots.protected
        mass = jnp.where(safe & slots.kv.live, score, 0.0).sum(-1).mean(1)
        kept = best(jnp.where(safe, jnp.inf, score), slots.kv.pos, budgets)
        return jnp.where((mass > self.threshold)[:, None, None], safe & slots.kv.live, kept)
