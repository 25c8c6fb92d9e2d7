"""Policies that hide tokens instead of evicting them, as released evaluation code does. They free no memory."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.context import Context, Site
from kvjax.cache.state import EMPTY, LayerKV
from kvjax.pallas_kernels.values import flag, settle
from kvjax.policy import LayerSpec, Rule, keeps_all
from kvjax.scoring.scores import one_a_slot
from kvjax.scoring.select import Selection, TopK
from kvjax.scoring.stats import LayerStats, Moment, Observe, Sums
from kvjax.sizes.budget import Count, Counts, counted
from kvjax.sizes.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class _Hiding(Rule):
    """Keeps everything, and decides what the next row reads.

    Attributes:
      heavy: tokens of largest accumulated score.
      recent: last tokens.
      of: what is accumulated.
    """

    heavy: int | float | Count
    recent: int | float | Count
    of: Observe = Observe()

    def __post_init__(self):
        settle(self, heavy=counted, recent=counted, of=one_a_slot)

    @property
    def _sums(self) -> Sums:
        return Sums(self.of)

    def under(self, schedule: Schedule) -> Rule:
        """See `Rule`; a simulation decides at every row, as the code that it reproduces does."""
        raise ValueError(
            f"{type(self).__name__} decides at every row what the next one reads, so {schedule} cannot apply"
        )

    def _count(self, count: int | float | Count, ctx: Context) -> Int[Array, "B 1"]:
        return _counts(ctx)(count)[:, None]

    def _best(self, score: Float[Array, "B K S"], candidates, kv: LayerKV, count):
        size = jnp.broadcast_to(count, kv.pos.shape[:2])
        return TopK().best(score, jnp.where(candidates, kv.pos, EMPTY), size)


def _counts(ctx: Context) -> Counts:
    return Counts(np.arange(ctx.site.prompt_len + 1), ctx.prompt_length)


@dataclasses.dataclass(frozen=True)
class NextStepMask(_Hiding):
    """The masks of H2O's and Keyformer's released simulations, one slot too many (D-02, D-37).

    As long as no more than `heavy + recent` tokens exist, the next row reads all of them. Beyond that the upcoming
    token counts among the `recent`, so only `recent - 1` existing tokens are protected, and the token at distance
    `recent` from the coming row is neither recent nor a candidate. With `recent=0` nothing is ever hidden.

    Attributes:
      persistent: what was hidden once stays hidden (Keyformer: the key set is frozen after the prompt); otherwise its
        score survives and it can come back a step later (H2O).
    """

    persistent: bool = False

    def __post_init__(self):
        super().__post_init__()
        settle(self, persistent=flag)

    def spec(self, site: Site) -> LayerSpec:
        """See `Rule`; the simulations read prompts densely and mask from then on."""
        seen = self._sums.observed
        return keeps_all(site, prompt=(seen,), step=(seen,), reads="whole", hides="visible", timed=seen.timed)

    def init(self, site: Site, batch: int) -> Any:
        """See `Rule`."""
        return self._sums.init(site, batch), jnp.zeros((batch, site.num_kv_heads, 0), jnp.float32)

    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[Any, Selection | None]:
        """See `Rule`."""
        score, hidden = kv.memory
        new = self._sums.new(stats, ctx)
        score = score.astype(new.dtype) + new
        if self.persistent:
            ahead = dataclasses.replace(ctx, length=ctx.length + 1)
            shown = self._shown(dataclasses.replace(kv, memory=(score, hidden)), ahead)
            hidden = jnp.where(shown, 0.0, 1.0)
        return (score, hidden), None

    def visible(self, moment: Moment) -> Bool[Array, "B K S"]:
        """See `Rule`."""
        return self._shown(moment.kv, moment.ctx)

    def _shown(self, kv: LayerKV, ctx: Context) -> Bool[Array, "B K S"]:
        """What the newest token may read."""
        score, hidden = kv.memory
        heavy, recent = self._count(self.heavy, ctx), self._count(self.recent, ctx)[..., None]
        length = ctx.length[:, None, None]
        candidates = kv.live & (kv.pos < length - 1 - recent) & (hidden == 0)
        best = self._best(self._sums.largest(score), candidates, kv, heavy)
        slots = kv.live & (hidden == 0) & (best | (kv.pos >= length - recent))
        return jnp.where((recent == 0) | (length - 1 <= heavy[..., None] + recent), kv.live, slots)


@dataclasses.dataclass(frozen=True)
class StepwiseMask(_Hiding):
    """H2O's stepwise mask: greedy eviction while the text is read, simulated (D-01, `prefill="stepwise_mask"`).

    The first `heavy` rows see everything. Every later row sees the `heavy - 1` tokens of largest accumulated score,
    itself, and the band of the `recent` tokens before it. Scores add the row's softmax over everything, hidden tokens
    included, and are zeroed outside the heavy tokens and the row itself. Read the text with `prefill(..., block=1)`.
    From row `heavy` on the released code chooses among all tokens, those of the band included, so that one in between
    may be hidden before there are more than `heavy + recent` of them.
    """

    def spec(self, site: Site) -> LayerSpec:
        """See `Rule`."""
        seen = self._sums.observed
        return keeps_all(site, prompt=(seen,), step=(seen,), reads="rows", hides="live", timed=seen.timed)

    def init(self, site: Site, batch: int) -> Any:
        """See `Rule`."""
        return self._sums.init(site, batch)

    def _heavy(self, score, kv: LayerKV, ctx: Context):
        heavy = self._count(self.heavy, ctx)
        length = ctx.length[:, None, None]
        newest = kv.pos == length - 1
        best = self._best(self._sums.largest(score), kv.live & ~newest, kv, jnp.maximum(heavy - 1, 0))
        return jnp.where(length <= heavy[..., None], kv.live, best | newest)

    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[Any, Selection | None]:
        """See `Rule`."""
        heavy, new = self._heavy(kv.memory, kv, ctx), self._sums.new(stats, ctx)
        total = kv.memory.astype(new.dtype) + new
        return jnp.where(heavy if total.ndim == 3 else heavy[..., None], total, 0.0), None

    def visible(self, moment: Moment) -> Bool[Array, "B K S"]:
        """See `Rule`."""
        kv, ctx = moment.kv, moment.ctx
        band = kv.pos >= (ctx.length - 1)[:, None, None] - self._count(self.recent, ctx)[..., None]
        return kv.live & (self._heavy(kv.memory, kv, ctx) | band)
