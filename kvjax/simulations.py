"""Policies that hide tokens instead of evicting them, as released evaluation code does. They free no memory."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.budget import Count, Counts, as_count
from kvjax.context import Context, Phase, Site
from kvjax.policy import Policy, Selection
from kvjax.schedule import Schedule
from kvjax.select import TopK
from kvjax.state import EMPTY, LayerKV
from kvjax.stats import LayerStats, Measurement, Observe


@dataclasses.dataclass(frozen=True)
class _Hiding(Policy):
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
        as_count(self.heavy, "heavy"), as_count(self.recent, "recent")

    def observe(self, phase: Phase, site: Site) -> tuple[Measurement, ...]:
        """See `Policy`."""
        del phase, site
        return (self.of,)

    def target(self, site: Site, prompt_length: int) -> int:
        """See `Policy`."""
        return prompt_length + site.max_new_tokens

    def capacity(self, site: Site, lengths: Sequence[int] | None = None) -> int:
        """See `Policy`."""
        del lengths
        return site.prompt_len + site.max_new_tokens

    def scheduled(self, schedule: Schedule) -> Policy:
        """See `Policy`; a simulation decides at every row, as the code that it reproduces does."""
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

    The upcoming token counts among the `recent`, so only `recent - 1` existing tokens are protected, and the token at
    distance `recent` from the coming row is neither recent nor a candidate. With `recent=0` nothing is ever hidden.

    Attributes:
      persistent: what was hidden once stays hidden (Keyformer: the key set is frozen after the prompt); otherwise its
        score survives and it can come back a step later (H2O).
    """

    persistent: bool = False

    @property
    def needs_whole_prompt(self) -> bool:
        """See `Policy`; the simulations read prompts densely and mask from then on."""
        return True

    def measures(self, site: Site) -> Literal["visible"]:
        """See `Policy`."""
        del site
        return "visible"

    def init(self, site: Site, batch: int) -> Any:
        """See `Policy`."""
        zeros = jnp.zeros((batch, site.num_kv_heads, 0), jnp.float32)
        return zeros, zeros

    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[Any, Selection | None]:
        """See `Policy`."""
        score, hidden = kv.memory
        score = score + stats[self.of]
        if self.persistent:
            ahead = dataclasses.replace(ctx, length=ctx.length + 1)
            shown = self.visible(dataclasses.replace(kv, memory=(score, hidden)), ahead)
            hidden = jnp.where(shown, 0.0, 1.0)
        return (score, hidden), None

    def visible(self, kv: LayerKV, ctx: Context) -> Bool[Array, "B K S"]:
        """See `Policy`."""
        score, hidden = kv.memory
        recent = self._count(self.recent, ctx)[..., None]
        length = ctx.length[:, None, None]
        candidates = kv.live & (kv.pos < length - 1 - recent) & (hidden == 0)
        best = self._best(score, candidates, kv, self._count(self.heavy, ctx))
        slots = kv.live & (hidden == 0) & (best | (kv.pos >= length - recent))
        return jnp.where(recent == 0, kv.live, slots)


@dataclasses.dataclass(frozen=True)
class StepwiseMask(_Hiding):
    """H2O's stepwise mask: greedy eviction while the text is read, simulated (D-01, `prefill="stepwise_mask"`).

    The first `heavy` rows see everything. Every later row sees the `heavy - 1` tokens of largest accumulated score,
    itself, and the band of the `recent` tokens before it. Scores add the row's softmax over everything, hidden tokens
    included, and are zeroed outside the heavy tokens and the row itself. Read the text with `prefill(..., block=1)`.
    """

    @property
    def needs_every_row(self) -> bool:
        """See `Policy`."""
        return True

    def measures(self, site: Site) -> Literal["live"]:
        """See `Policy`."""
        del site
        return "live"

    def init(self, site: Site, batch: int) -> Any:
        """See `Policy`."""
        return jnp.zeros((batch, site.num_kv_heads, 0), jnp.float32)

    def _heavy(self, score, kv: LayerKV, ctx: Context):
        heavy = self._count(self.heavy, ctx)
        length = ctx.length[:, None, None]
        newest = kv.pos == length - 1
        best = self._best(score, kv.live & ~newest, kv, jnp.maximum(heavy - 1, 0))
        return jnp.where(length <= heavy[..., None], kv.live, best | newest)

    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[Any, Selection | None]:
        """See `Policy`."""
        row = stats[self.of]
        return jnp.where(self._heavy(kv.memory, kv, ctx), kv.memory + row, 0.0), None

    def visible(self, kv: LayerKV, ctx: Context) -> Bool[Array, "B K S"]:
        """See `Policy`."""
        band = kv.pos >= (ctx.length - 1)[:, None, None] - self._count(self.recent, ctx)[..., None]
        return kv.live & (self._heavy(kv.memory, kv, ctx) | band)
