"""Which tokens a policy may not evict. Protected tokens count against the budget."""

import abc
import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.context import Context, Phase, Site
from kvjax.cache.state import LayerKV
from kvjax.pallas_kernels.values import Value, flag, optional, settle, tokens
from kvjax.scoring.select import Spares, TopK
from kvjax.scoring.stats import AllRows, Measurement, Observe, Observer, RowsFrom, Slots
from kvjax.sizes.budget import Count, Counts, counted


@dataclasses.dataclass(frozen=True)
class Protect(Value):
    """Attention sinks and a recent window.

    Where both together exceed the budget of a sequence, the newest protected tokens win; `make_plan` refuses such
    sizes before anything runs.

    Attributes:
      sinks: the first tokens of the sequence.
      recent: the last tokens of the sequence, the newest included.
    """

    sinks: int | float | Count = 0
    recent: int | float | Count = 0

    def __post_init__(self):
        settle(self, sinks=counted, recent=counted)


def protected(
    pos: Int[Array, "B K S"], length: Int[Array, "B"], sinks: Int[Array, "B"], recent: Int[Array, "B"]
) -> Bool[Array, "B K S"]:
    """Live slots among the first `sinks` or the last `recent` of `length` tokens."""
    first, last = sinks[:, None, None], (length - recent)[:, None, None]
    return (pos >= 0) & ((pos < first) | (pos >= last))


@dataclasses.dataclass(frozen=True)
class Scope(Observer, abc.ABC):
    """A frozen dataclass that protects tokens by what they did, beyond those protected by position.

    Attributes:
      size: how many tokens it protects, those protected by position included.
    """

    size: int | float | Count

    def __post_init__(self):
        settle(self, size=counted)

    @property
    def first(self) -> int | float | Count:
        """Tokens that it protects because they come first, beside those that are protected by position already."""
        return 0

    @property
    def counts(self) -> tuple[int | float | Count, ...]:
        """The counts that it resolves."""
        return self.size, self.first

    @abc.abstractmethod
    def __call__(
        self,
        slots: Slots,
        safe: Bool[Array, "B K S"],
        counts: Counts,
        most: Int[Array, "B K"],
    ) -> Bool[Array, "B K S"]:
        """The slots that may not be evicted: `safe` (protected by position) and others, `most` together."""

    def spares(
        self,
        slots: Slots,
        safe: Bool[Array, "B K S"],
        counts: Counts,
        most: Int[Array, "B K"],
    ) -> Spares | None:
        """What says whether it protects single slots, where this is cheaper than to find all; else None.

        Arguments are as in `__call__`.
        """
        del slots, safe, counts, most
        return None


@dataclasses.dataclass(frozen=True)
class PromptSinks(Scope):
    """Protects the first tokens while the prompt is read, and no longer (EasyKV's `encoding_decoding`)."""

    @property
    def first(self) -> int | float | Count:
        """See `Scope`."""
        return self.size

    def __call__(self, slots, safe, counts, most):
        """See `Scope`."""
        kv, ctx = slots.kv, slots.ctx
        if ctx.phase == "decode":
            return safe
        first = kv.live & (kv.pos < counts(self.size)[:, None, None])
        return safe | (first & TopK("lower_index").best(jnp.where(safe, jnp.inf, 0.0), kv.pos, most))


@dataclasses.dataclass(frozen=True)
class TopStd(Scope):
    r"""Protects the tokens whose attention varies most (RoCo, arXiv 2402.06262, section 4.2).

    The standard deviation over the rows since insertion, $\sqrt{\max(E[p^2] - E[p]^2, 0)}$, in population form. With
    grouped queries the group's mean is taken first. Tokens protected by position count among the `size`.

    Attributes:
      size: tokens that may not be evicted: tokens, a share of the prompt (float), or `Share` of the budget.
      ignore_prefix: query rows of the first so many prompt tokens count for nothing (EasyKV's
        `keep_attention=False` ignores those up to the first block that it evicts from, D-46).
      decode_size: `size` while decoding, where it is another one.
      prompt_sinks: first tokens that are protected while the prompt is read, and no longer.
      count_self: whether a token's own row counts (D-10). Without it the newest token has no deviation, that is 0.
    """

    ignore_prefix: int = 0
    decode_size: int | float | Count | None = None
    prompt_sinks: int = 0
    count_self: bool = True

    def __post_init__(self):
        settle(self, size=counted, decode_size=optional(counted), prompt_sinks=tokens())
        settle(self, ignore_prefix=tokens(), count_self=flag)

    @property
    def first(self) -> int | float | Count:
        """See `Scope`."""
        return self.prompt_sinks

    @property
    def counts(self) -> tuple[int | float | Count, ...]:
        """See `Scope`."""
        return (*super().counts, *(() if self.decode_size is None else (self.decode_size,)))

    @property
    def _moments(self) -> tuple[Observe, Observe]:
        rows = RowsFrom(self.ignore_prefix) if self.ignore_prefix else AllRows()
        square = Observe(rows, element="p2", group_at="before", count_self=self.count_self)
        return Observe(rows, count_self=self.count_self), square

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Scope`."""
        del phase
        return self._moments

    def init(self, site: Site, batch: int) -> Any:
        """See `Scope`."""
        zeros = jnp.zeros((batch, site.num_kv_heads, 0), jnp.float32)
        return zeros, zeros

    def update(self, slots: Slots) -> Any:
        """See `Scope`."""
        memory, stats = slots.memory, slots.stats
        new = (stats[o] for o in self._moments)
        return tuple(m.astype(n.dtype) + n for m, n in zip(memory, new, strict=True))

    def __call__(self, slots, safe, counts, most):
        """See `Scope`."""
        safe, std, size = self._ranked(slots, safe, counts, most)
        return safe | TopK().best(std, slots.kv.pos, size)

    def _ranked(
        self, slots: Slots, safe: Bool[Array, "B K S"], counts: Counts, most: Int[Array, "B K"]
    ) -> tuple[Bool[Array, "B K S"], Float[Array, "B K S"], Int[Array, "B K"]]:
        """Slots protected by position, deviations with infinity for those, and how many of the largest are kept."""
        memory, kv, ctx = slots.memory, slots.kv, slots.ctx
        safe = PromptSinks(self.prompt_sinks)(slots, safe, counts, most)
        std = self.deviation(memory, kv, ctx)
        size = self.size if ctx.phase == "prefill" or self.decode_size is None else self.decode_size
        size = jnp.minimum(counts(size)[:, None], most.astype(jnp.int32))  # heads may have less than the layer's mean
        return safe, jnp.where(safe, jnp.inf, std), size

    def spares(self, slots, safe, counts, most):
        """See `Scope`: the slots that vary more are counted, instead of finding the `size` that vary most."""
        if slots.ctx.phase == "prefill":
            return None
        _, std, size = self._ranked(slots, safe, counts, most)
        kv = slots.kv

        def spared(asked: Bool[Array, "B K S"]) -> Bool[Array, "B K"]:
            here = jnp.where(asked, std, -jnp.inf).max(-1, keepdims=True)
            place = jnp.where(asked, kv.pos, -1).max(-1, keepdims=True)
            above = kv.live & ((std > here) | ((std == here) & (kv.pos > place)))  # as `TopK.best` ranks them
            return above.sum(-1, dtype=jnp.int32) < size

        return Spares(spared, lambda: self(slots, safe, counts, most))

    def deviation(
        self, memory: tuple[Float[Array, "B K S"], Float[Array, "B K S"]], kv: LayerKV, ctx: Context
    ) -> Float[Array, "B K S"]:
        """The standard deviation of the attention that each token received, from its sums and sums of squares."""
        rows = rows_since_insertion(kv, ctx, self.ignore_prefix, count_self=self.count_self)
        mean, square = (m / rows.astype(m.dtype) for m in memory)
        return jnp.sqrt(jnp.maximum(square - mean * mean, 0.0))


def rows_since_insertion(
    kv: LayerKV, ctx: Context, ignore_prefix: int = 0, *, count_self: bool = True
) -> Int[Array, "B K S"]:
    """Query rows, from `ignore_prefix` on, that could see each live token; at least 1, and 1 for dead slots.

    A token's own row is one of them if `count_self`.
    """
    length = ctx.length[:, None, None]
    seen = length - kv.pos - jnp.int32(not count_self)
    if ignore_prefix:
        seen = jnp.minimum(seen, length - ignore_prefix)
    return jnp.where(kv.live, jnp.maximum(seen, 1), 1)
