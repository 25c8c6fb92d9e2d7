"""How much a token is worth keeping: one number a slot "B K S", the larger stays. Here by position and by attention."""

from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from kvjax.core.contract import EMPTY, Count, Part, PerSlot, count, resolve
from kvjax.core.decide.select import best
from kvjax.core.observe import Rows
from kvjax.core.storage import in_order


class Score(Part):
    """Ranks the slots of a layer; only those of `slots.candidates` will be compared."""

    def __call__(self, slots):
        return slots.memory


class Recency(Score):
    """The newer, the better; tokens off the grid of `every` positions come after those on it."""

    every: int = 1

    def __call__(self, slots):
        pos = slots.kv.pos.astype(jnp.float32)
        return jnp.where(slots.kv.pos % self.every == 0, pos, pos - 2.0**24)


class Uniform(Score):
    """A fresh draw for every token at every eviction."""

    def __call__(self, slots):
        return slots.ctx.uniform(slots.kv.pos)


class Function(Score):
    """A function of (layer, what it asked for, inputs), as a researcher writes it."""

    fn: Any
    observed: tuple = ()

    def observe(self, phase):
        return self.observed

    def __call__(self, slots):
        return self.fn(slots.kv, slots.stats, slots.ctx)


class Votes(Score):
    """The mean attention of the prompt's last rows (SnapKV); of one row, at every step too, with `rows=1` (TOVA)."""

    rows: int = 32
    group: Literal["mean", "max"] = "mean"
    prompt_only: bool = True

    @property
    def _of(self):
        return Rows(self.rows, group=self.group)

    def observe(self, phase):
        return (self._of,) if phase == "prefill" or not self.prompt_only else ()

    def __call__(self, slots):
        return slots.stats[self._of] / jnp.minimum(slots.ctx.length, self.rows)[:, None, None]


class Accumulated(Score):
    """A statistic summed over all rows since the token was stored, prompt and decode alike (H2O).

    `restart`: a prompt's last rows and decode rows by `every` many begin anew (NaCl's proxies).
    """

    of: Rows = Rows()
    restart: bool = False

    @property
    def _apart(self):
        """Whether the largest of a group is taken of sums: then they are kept for every query head."""
        return self.of.group == "max" and self.of.element == "p"

    def _ask(self, phase):
        rows = None if phase == "decode" and self.restart else self.of.last
        group = None if self._apart else self.of.group
        return Rows(**{**vars(self.of), "last": rows, "group": group})

    def observe(self, phase):
        return (self._ask(phase),)

    def memory(self, info):
        return PerSlot((info.num_query_heads // info.num_kv_heads,) if self._apart else ())

    def update(self, slots):
        new = slots.stats[self._ask(slots.ctx.phase)]
        if self._apart:
            new = new.reshape(len(new), slots.kv.pos.shape[1], -1, new.shape[-1]).swapaxes(2, 3)
        last = self.of.last is not None and slots.ctx.phase == "prefill"
        return new if last or self.restart else slots.memory + new

    def __call__(self, slots):
        return slots.memory.max(-1) if self._apart else slots.memory


def rows_since(slots, first: int = 0, count_self: bool = True):
    """Rows, from position `first` on, that could see each token: "B K S", at least 1."""
    length = slots.ctx.length[:, None, None]
    seen = jnp.minimum(length - slots.kv.pos - (not count_self), length - first if first else 2**30)
    return jnp.where(slots.kv.live, jnp.maximum(seen, 1), 1).astype(jnp.float32)


class Mean(Score):
    """Mean attention over the rows that could see a token (RoCo's MAS)."""

    count_self: bool = True
    first: int = 0

    @property
    def _of(self):
        return Rows(first=self.first, count_self=self.count_self)

    def observe(self, phase):
        return (self._of,)

    def memory(self, info):
        return PerSlot()

    def update(self, slots):
        return slots.memory + slots.stats[self._of]

    def __call__(self, slots):
        mean = slots.memory / rows_since(slots, self.first, self.count_self)
        newest = slots.kv.pos == slots.ctx.length[:, None, None] - 1
        return mean if self.count_self else jnp.where(newest, jnp.inf, mean)


class SparedByDeviation(Mean):
    """Mean attention, where the `size` tokens whose attention varies most are spared (RoCo)."""

    size: Count = count(default=0)

    @property
    def _square(self):
        return Rows(element="p2", first=self.first, count_self=self.count_self)

    def observe(self, phase):
        return self._of, self._square

    def least(self, lengths, budget):
        return resolve(self.size, lengths, budget)

    def memory(self, info):
        return PerSlot(), PerSlot()

    def update(self, slots):
        return slots.memory[0] + slots.stats[self._of], slots.memory[1] + slots.stats[self._square]

    def __call__(self, slots):
        mean, square = (m / rows_since(slots, self.first, self.count_self) for m in slots.memory)
        deviation = jnp.sqrt(jnp.maximum(square - mean * mean, 0.0))
        ranked = jnp.where(slots.candidates, deviation, jnp.inf)
        size = jnp.broadcast_to(slots.hparams.size[:, None], mean.shape[:2])
        return jnp.where(best(ranked, slots.kv.pos, size), jnp.inf, mean)


class LastRows(Score):
    """The mean over the last rows, prompt and decode alike, of what they gave (R-KV; Scissorhands' history)."""

    rows: int
    element: Literal["p", "above"] = "p"

    def _ask(self):
        return Rows(self.rows, self.element, summed=False)

    def observe(self, phase):
        return (self._ask(),)

    def memory(self, info):
        rows = min(self.rows, info.prompt_len + info.max_new_tokens)
        return PerSlot((rows,), bool if self.element == "above" else jnp.float32)

    def update(self, slots):
        """Row `i` of the text owns place `i % rows`; new rows overwrite theirs in every slot."""
        memory, new, length = slots.memory, slots.stats[self._ask()], slots.ctx.length[:, None]
        R, W = new.shape[2], memory.shape[-1]
        ago = (length - 1 - jnp.arange(W)[None]) % W
        rows = jnp.take_along_axis(new, jnp.maximum(R - 1 - ago, 0)[:, None, :, None], axis=2).swapaxes(2, 3)
        fresh = (ago < R) & (ago < length)
        return jnp.where(fresh[:, None, None], rows.astype(memory.dtype), memory)

    def __call__(self, slots):
        read = jnp.minimum(slots.ctx.length, self.rows).astype(jnp.float32)
        return slots.memory.sum(-1) / read[:, None, None]


class ValuePrior(Accumulated):
    """Accumulated attention, the prompt's part times a prior of value norms (AhaKV)."""

    kernel: int = 7

    def update(self, slots):
        total = super().update(slots)
        if slots.ctx.phase == "decode":
            return total
        kv = slots.kv
        norm = jnp.square(kv.v.astype(jnp.float32)).sum(-1)
        norm = jnp.where(kv.live, pool_in_order(norm, kv.pos, kv.live, "avg", self.kernel), 0.0)
        return total * (norm / jnp.maximum(norm.max(-1, keepdims=True), jnp.finfo(jnp.float32).tiny))


# ------------------------------------------------------------------------------------------------ of other scores


class OfScore(Score):
    """A score made of another one, which does the looking and the counting."""

    score: Score

    def of(self, slots):
        """The other score."""
        return self.score(slots.of("score"))


class LayerMean(OfScore):
    """The mean over all kv heads, so that all keep the same tokens; a head that lost a token gives it nothing."""

    def __call__(self, slots):
        return layer_mean(self.of(slots), slots.kv.pos)


def layer_mean(x, pos):
    """The mean over heads of what tokens of one position have: "B K S"."""
    B, row = len(x), jnp.arange(len(x))[:, None]

    def by_position():
        flat, place = x.reshape(B, -1), pos.reshape(B, -1)
        order = jnp.argsort(place, axis=-1)
        here = jnp.take_along_axis(place, order, -1)
        group = jnp.cumsum(here != jnp.roll(here, 1, -1), -1)
        total = jnp.zeros_like(flat).at[row, group].add(jnp.take_along_axis(flat, order, -1))
        found = jnp.put_along_axis(flat, order, total[row, group], -1, inplace=False)
        return (jnp.where(place == EMPTY, 0.0, found) / x.shape[1]).reshape(x.shape)

    by_slot = lambda: jnp.broadcast_to(x.mean(1, keepdims=True), x.shape)
    return lax.cond((pos == pos[:, :1]).all(), by_slot, by_position)


class Pooled(OfScore):
    """Pooled over neighbouring candidates, so that tokens stay with their surroundings."""

    kind: Literal["max", "avg"] = "max"
    kernel: int = 7

    def __call__(self, slots):
        return pool_in_order(self.of(slots), slots.kv.pos, slots.candidates, self.kind, self.kernel)


def pool_in_order(x, pos, among, kind: str, kernel: int):
    """Pools over neighbours in position among some slots; an average counts what is missing as 0."""
    order, half = in_order(jnp.where(among, pos, EMPTY)), kernel // 2
    start, add = (-jnp.inf, lax.max) if kind == "max" else (0.0, lax.add)
    y = jnp.take_along_axis(jnp.where(among, x, start), order, -1)
    y = lax.reduce_window(y, start, add, (1, 1, kernel), (1, 1, 1), ((0, 0), (0, 0), (half, half)))
    return jnp.put_along_axis(x, order, y / (kernel if kind == "avg" else 1), -1, inplace=False)


class ValueWeighted(OfScore):
    """Times the norm of the token's value; "largest" is the head's largest L1 norm (LAVa)."""

    norm: Literal["l2", "largest"] = "l2"

    def __call__(self, slots):
        v = slots.kv.v.astype(jnp.float32)
        l1 = jnp.where(slots.candidates, jnp.abs(v).sum(-1), 0.0).max(-1, keepdims=True)
        return self.of(slots) * (jnp.sqrt(jnp.square(v).sum(-1)) if self.norm == "l2" else l1)


class Standardized(OfScore):
    """Less its mean over the layer's candidates, over their standard deviation."""

    def __call__(self, slots):
        score, among = self.of(slots).astype(jnp.float32), slots.candidates
        total = lambda x: jnp.where(among, x, 0.0).sum((1, 2), keepdims=True)
        n = total(jnp.ones_like(score))
        mean = total(score) / jnp.maximum(n, 1)
        return (score - mean) / jnp.maximum(jnp.sqrt(total(jnp.square(score - mean)) / jnp.maximum(n - 1, 1)), 1e-6)


class Blend(Score):
    """A weighted sum of scores."""

    scores: tuple[Score, ...]
    weights: tuple[float, ...]

    def __call__(self, slots):
        each = [score(slots.of("scores", i)) for i, score in enumerate(self.scores)]
        return sum(w * x for w, x in zip(self.weights, each, strict=True))
