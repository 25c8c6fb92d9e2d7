"""Scores, selections and policies that released code has and papers do not."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.budgets import known
from kvjax.contract import (
    EMPTY,
    Amount,
    AttentionInputs,
    Context,
    Count,
    FrozenArrays,
    LayerInfo,
    LayerView,
    Layout,
    Observation,
    PerSlot,
    Phase,
    Policy,
    Positive,
    Reads,
    Score,
    Select,
    Size,
    Slots,
    Stats,
    count,
    value,
)
from kvjax.decide.select import LazyOrAll, ThenRandom, TopK, TwoStage, best
from kvjax.methods.hidden import DropChannels, ReadPages
from kvjax.observe import ChunkAttention, FutureQueries, Rows, Unmasked, check_moments, segment_sum
from kvjax.scores.attention import Accumulated
from kvjax.scores.blends import sum_by_position
from kvjax.storage import in_order

# ------------------------------------------------------------------------------------------------ scores


class OverBatch(Accumulated):
    """Accumulated attention, one sum for all sequences of a batch (Keyformer's code, D-36)."""

    def _new(self, slots: Slots) -> Float[Array, "B K S *G"]:
        new, pos = super()._new(slots), slots.kv.pos
        B, K, S = pos.shape

        def summed(x: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
            flat = sum_by_position(*(y.swapaxes(0, 1).reshape(K, B * S) for y in (x, pos)))
            return flat.reshape(K, B, S).swapaxes(0, 1)

        return summed(new) if new.ndim == 3 else jax.vmap(summed, -1, -1)(new)


class Proxies(Accumulated):
    """Attention from proxy rows: those of the prompt, then those since the last of every `interval` steps (D-16).

    Attributes:
      interval: decode steps after which a sum begins anew.
    """

    restart: bool = True
    interval: Size = 1

    def update(self, slots: Slots) -> Float[Array, "B K S *G"]:
        new, memory = self._new(slots), slots.memory
        if slots.ctx.phase == "prefill":
            return new
        begins = ((slots.ctx.step - 1) % self.interval == 0).reshape(-1, *(1,) * (memory.ndim - 1))
        return jnp.where(begins, 0.0, memory) + new


class ByIndex(Score):
    """Attention of proxy rows, where query head g alone judges kv head g, whichever keys it reads (NaCl's code, D-19).

    Attributes:
      of: the rows, for every query head.
    """

    of: Rows = Rows(group=None)

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (self.of,) if phase == "prefill" else ()

    def memory(self, info: LayerInfo) -> PerSlot:
        return PerSlot()

    def update(self, slots: Slots) -> Float[Array, "B K S"]:
        if slots.ctx.phase == "decode":
            return slots.memory
        received, pos = slots.stats[self.of], slots.kv.pos
        N, K, width = received.shape[1], pos.shape[1], slots.ctx.width
        read = jnp.arange(K) // (N // K)  # the kv head that query head g reads
        pos = jnp.where(slots.kv.live, pos, width)
        table = segment_sum(received[:, :K], pos[:, read], width)
        return jnp.take_along_axis(table, pos, -1, mode="fill", fill_value=0)


@value
class RowsAtEnds(Rows):
    """Attention that every slot received from the first and the last rows of a prompt (NaCl, section 3.2).

    Attributes:
      begin: how many first rows count; `last` says how many last ones do.
    """

    begin: Count = 0

    def __call__(self, inputs: AttentionInputs) -> Any:
        """The columns that the kernels sum."""
        if inputs.ctx.phase == "decode":
            return super().__call__(inputs)
        ctx, pos = inputs.ctx, inputs.pos
        first, last = (known(0 if n is None else n, ctx)[:, None] for n in (self.begin, self.last))
        weight: Array = ((pos < first) | (pos >= ctx.prompt_length[:, None] - last)).astype(jnp.float32)
        return dataclasses.replace(super().__call__(inputs), rows=None, weight=weight)


@value
class KnownQueries(FutureQueries):
    """Observes the queries to come by the moments of a model's queries, in place of the prompt's.

    Attributes:
      moments: before rotation, "mean" of shape "L N H" and "covariance" of shape "L N H H".
    """

    moments: FrozenArrays = dataclasses.field(kw_only=True)

    def check(self, info: LayerInfo) -> None:
        check_moments("moments", self.moments, info)

    def __call__(self, inputs: AttentionInputs) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"]]:
        mean, cov = (jnp.asarray(self.moments[n])[inputs.ctx.layer][None] for n in ("mean", "covariance"))
        each = lambda x: jnp.broadcast_to(x, (len(inputs.q), *x.shape[1:]))
        return self.turned(each(mean), each(cov), inputs)


@value
class PaddedChunkAttention(ChunkAttention):
    """Chunk attention as kvpress computes it: the last chunk is filled up with keys of zeros.

    Its softmax counts them, and the rows that fill it up give all keys the same.
    """

    def received(self, x: Float[Array, "B K G n c c"], counts: Bool[Array, "B n c"]) -> Float[Array, "B K n c"]:
        x = jnp.where(counts[:, None, None, :, None], x, -jnp.inf)
        absent = (self.size - counts.sum(-1)).astype(jnp.float32)[:, None, None, :, None, None]
        largest = jnp.maximum(x.max(-1, keepdims=True), 0.0)  # of a chunk of nothing too
        e = jnp.exp(x - largest)
        p = e / jnp.maximum(e.sum(-1, keepdims=True) + absent * jnp.exp(-largest), jnp.finfo(jnp.float32).tiny)
        mass = jnp.where(counts[:, None, None, :, :, None], p, 0.0).sum(4).mean(2)
        return mass + absent[:, :, 0, :, 0] / self.size


# ------------------------------------------------------------------------------------------------ selections


class DriftingTopK(TopK):
    """The highest scores, where heads may together have a token more each than the layer's budget (D-21)."""

    slack = 1


class RandomRun(Select):
    """Drops one run of neighbouring tokens, the same in all heads and layers (EasyKV's "random", D-05)."""

    def __call__(self, score: Float[Array, "B K S"], budgets: Int[Array, "B K"], slots: Slots) -> Bool[Array, "B K S"]:
        kv, ctx, among, S = slots.kv, slots.ctx, slots.candidates, score.shape[-1]
        order = in_order(jnp.where(among, kv.pos, EMPTY))
        places = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), kv.pos.shape)
        rank = jnp.put_along_axis(jnp.zeros_like(kv.pos), order, places, -1, inplace=False)
        count, excess = among.sum(-1), jnp.maximum(kv.num_live - budgets, 0)
        draw = jax.vmap(lambda key, event: jax.random.uniform(jax.random.fold_in(key, event), (), jnp.float32))
        u = draw(ctx.keys, ctx.length - ctx.prompt_length)[:, None]
        start = jnp.floor(u * (count - excess + 1).astype(jnp.float32)).astype(jnp.int32)
        return kv.live & ~(among & (rank >= start[..., None]) & (rank < (start + excess)[..., None]))


class Drawn(ThenRandom):
    """Draws the rest of the budget in other ways than NaCl's code (D-15).

    Attributes:
      among: the draw is among the "rest" of the tokens, or "all"; what is chosen twice then stays once.
      by: draws by the "softmax" of scores, by "normalised" scores, or "uniform" (the paper's ablation).
      temperature: divides the logarithms of what it draws by.
    """

    among: Literal["rest", "all"] = "rest"
    by: Literal["softmax", "normalised", "uniform"] = "softmax"
    temperature: Positive = 1.0

    def pool(self, first: Bool[Array, "B K S"], slots: Slots) -> Bool[Array, "B K S"]:
        return super().pool(first, slots) if self.among == "rest" else slots.candidates

    def drawn(self, score: Float[Array, "B K S"], slots: Slots) -> Float[Array, "B K S"]:
        logs = {"normalised": jnp.log(jnp.maximum(score, 1e-30)), "uniform": jnp.zeros_like(score)}.get(self.by, score)
        return super().drawn(logs / self.temperature, slots)


class TwoStageAtLeast(TwoStage):
    """Two stages, of which the first fills some tokens at least (CriticalAdaKV of kvpress).

    Attributes:
      fill: tokens of every head.
    """

    fill: Count = count(default=0)

    def _filled(self, budgets: Int[Array, "B K"], slots: Slots) -> Int[Array, "B K"]:
        return jnp.minimum(jnp.maximum(super()._filled(budgets, slots), slots.hparams.fill[:, None]), budgets)


class LazyBefore(LazyOrAll):
    """A lazy layer keeps its safe slots, which is decided by the tokens before the voting rows (kvpress).

    Attributes:
      first, last, rows: attention counts to the first tokens, and to the last ones before so many rows.
    """

    first: Amount = 4
    last: Amount = 1024
    rows: Size = 1

    def counted(self, slots: Slots) -> Bool[Array, "B K S"]:
        pos, end = slots.kv.pos, slots.ctx.length[:, None, None] - self.rows
        return slots.kv.live & ((pos < self.first) | ((pos >= end - self.last) & (pos < end)))


# ------------------------------------------------------------------------------------------------ policies


class ZeroChannels(DropChannels):
    """Sets a share of every head's key channels to 0, in the prompt's keys alone, which frees nothing (kvpress)."""

    writes = ("k",)

    def update(self, kv: LayerView, stats: Stats, ctx: Context) -> LayerView:
        if ctx.phase == "decode":
            return kv
        mask = jnp.zeros((*kv.pos.shape[:2], kv.k.shape[-1]), bool)
        mask = jnp.put_along_axis(mask, self.channels(kv, stats), True, axis=-1, inplace=False)
        return kv.replace(k=jnp.where(mask[:, :, None], kv.k, jnp.zeros((), kv.k.dtype)))


class PagesOfQueryHeads(ReadPages):
    """Reads pages for every query head, whose keys and values are stored for each (Quest's evaluation)."""

    layout = Layout(by_query_head=True)


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

    layout = Layout(prompt="whole")

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

    layout = Layout(prompt="rows")

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
