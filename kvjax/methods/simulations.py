"""Policies that hide tokens from rows instead of evicting them, as released evaluation code does; they free nothing."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.contract import (
    EMPTY,
    AttentionInputs,
    Context,
    Count,
    LayerInfo,
    LayerView,
    Layout,
    Observation,
    PerSlot,
    Phase,
    Policy,
    Reads,
    Stats,
    count,
)
from kvjax.decide.select import best
from kvjax.observe import Rows, Unmasked


class NextStepMask(Policy):
    """Masks one slot too many for the next row, as the simulations of H2O and Keyformer do.

    As long as no more than `heavy + recent` tokens exist, the next row reads all of them. Beyond that its own token
    counts among the `recent`, so that the token at distance `recent` is neither recent nor a candidate.

    Attributes:
      heavy: tokens of the largest accumulated score.
      recent: last tokens; with 0 nothing is ever hidden.
      of: what is accumulated.
      persistent: what was hidden once stays hidden (Keyformer); otherwise it may come back a step later (H2O).
    """

    heavy: Count = count()
    recent: Count = count()
    of: Rows = Rows()
    persistent: bool = False

    @property
    def layout(self) -> Layout:
        return Layout(prompt="whole")

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (self.of,)

    def memory(self, info: LayerInfo) -> tuple[PerSlot, PerSlot]:
        return PerSlot(), PerSlot(dtype=jnp.bool)

    def update(self, kv: LayerView, stats: Stats, ctx: Context) -> LayerView:
        score, hidden = kv.memory
        score = score + stats[self.of]
        if self.persistent:
            hidden = ~self._shown(kv, score, hidden, ctx.length + 1, ctx)
        return kv.replace(memory=(score, hidden))

    def reads(self, kv: LayerView, inputs: AttentionInputs, ctx: Context) -> Reads | None:
        score, hidden = kv.memory
        return None if ctx.phase == "prefill" else Reads(self._shown(kv, score, hidden, ctx.length, ctx))

    def _shown(
        self, kv: LayerView, score: Array, hidden: Array, length: Int[Array, "B"], ctx: Context
    ) -> Bool[Array, "B K S"]:
        """The slots that the row at position `length - 1` reads."""
        heavy, recent = ctx.hparams.heavy[:, None], ctx.hparams.recent[:, None, None]
        length = length[:, None, None]
        old = jnp.where(kv.live & (kv.pos < length - 1 - recent) & ~hidden, kv.pos, EMPTY)
        chosen = best(score, old, jnp.broadcast_to(heavy, kv.pos.shape[:2]))
        slots = kv.live & ~hidden & (chosen | (kv.pos >= length - recent))
        return jnp.where((recent == 0) | (length - 1 <= heavy[..., None] + recent), kv.live, slots)


class StepwiseMask(Policy):
    """Simulates greedy eviction while the text is read, by masks (H2O). Read prompts with `block=1`.

    The first `heavy` rows see everything. Later rows see the `heavy - 1` tokens of the largest score, their own, and
    the `recent` before it. Scores add a row's softmax over everything, and are 0 outside of the heavy tokens.

    Attributes:
      heavy: tokens of the largest accumulated score.
      recent: last tokens.
    """

    heavy: Count = count()
    recent: Count = count()

    @property
    def layout(self) -> Layout:
        return Layout(prompt="rows")

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (Unmasked(Rows()),)

    def memory(self, info: LayerInfo) -> PerSlot:
        return PerSlot()

    def _heavy(self, kv: LayerView, ctx: Context) -> Bool[Array, "B K S"]:
        length, heavy = ctx.length[:, None, None], ctx.hparams.heavy[:, None]
        newest = kv.pos == length - 1
        old = jnp.where(newest, EMPTY, kv.pos)
        kept = best(kv.memory, old, jnp.broadcast_to(jnp.maximum(heavy - 1, 0), kv.pos.shape[:2])) | newest
        return jnp.where(length <= heavy[..., None], kv.live, kept)

    def update(self, kv: LayerView, stats: Stats, ctx: Context) -> LayerView:
        return kv.replace(memory=jnp.where(self._heavy(kv, ctx), kv.memory + stats[Unmasked(Rows())], 0.0))

    def reads(self, kv: LayerView, inputs: AttentionInputs, ctx: Context) -> Reads:
        band = kv.pos >= (ctx.length - 1 - ctx.hparams.recent)[:, None, None]
        return Reads(kv.live & (self._heavy(kv, ctx) | band))
