"""Scores and selections that released code has and papers do not."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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
    Positive,
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
from kvjax.observe import FutureQueries, Rows
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
        (B, N, _), K, width = received.shape, pos.shape[1], slots.ctx.width
        read = jnp.arange(K) // (N // K)  # the kv head that query head g reads
        at = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None]
        pos = jnp.where(slots.kv.live, pos, width)
        table = jnp.zeros((B, K, width)).at[(*at, pos[:, read])].add(received[:, :K], mode="drop")
        return table.at[(*at, pos)].get(mode="fill", fill_value=0)


@value
class KnownQueries(FutureQueries):
    """Observes the queries to come by the moments of a model's queries, in place of the prompt's.

    Attributes:
      moments: before rotation, "mean" of shape "L N H" and "covariance" of shape "L N H H".
    """

    moments: FrozenArrays = dataclasses.field(kw_only=True)

    def __call__(self, inputs: AttentionInputs) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"]]:
        mean, cov = (jnp.asarray(self.moments[n])[inputs.ctx.layer][None] for n in ("mean", "covariance"))
        each = lambda x: jnp.broadcast_to(x, (len(inputs.q), *x.shape[1:]))
        return self.turned(each(mean), each(cov), inputs)


@value
class PaddedChunkAttention:
    """Observes what keys receive within their chunk of the prompt as kvpress computes it: "B K S".

    The last chunk is filled up with keys of zeros, which its softmax counts, and with rows that give all keys the same.
    Logits are plain products of queries and keys.

    Attributes:
      size: tokens of a chunk.
      first, last: tokens at either end of the prompt that are in no chunk.
    """

    size: Size = 256
    first: Amount = 0
    last: Amount = 0

    def __call__(self, inputs: AttentionInputs) -> Float[Array, "B K S"]:
        (B, _, T, H), K, pos = inputs.q.shape, inputs.kv.pos.shape[1], inputs.pos
        keys = inputs.kv.k[:, :, -T:]
        inside = (pos >= self.first) & (pos < inputs.ctx.prompt_length[:, None] - self.last)
        start = jnp.where(inside.any(-1), inside.argmax(-1), 0)
        size = min(self.size, T)
        num = -(-T // size)
        source = jnp.arange(num * size)[None] + start[:, None]
        index = jnp.minimum(source, T - 1)
        counts = ((source < T) & jnp.take_along_axis(inside, index, 1)).reshape(B, num, size)

        def part(x: Array) -> Array:
            x = jnp.take_along_axis(x.astype(jnp.float32), index[:, None, :, None], 2)
            return x.reshape(B, K, -1, num, size, H)

        x = jnp.einsum("bkgnch,bkundh->bkgncd", part(inputs.q), part(keys))
        x = jnp.where(counts[:, None, None, :, None], x, -jnp.inf)
        absent = (self.size - counts.sum(-1)).astype(jnp.float32)[:, None, None, :, None, None]
        largest = jnp.maximum(x.max(-1, keepdims=True), 0.0)  # of a chunk of nothing too
        e = jnp.exp(x - largest)
        p = e / jnp.maximum(e.sum(-1, keepdims=True) + absent * jnp.exp(-largest), jnp.finfo(jnp.float32).tiny)
        mass = jnp.where(counts[:, None, None, :, :, None], p, 0.0).sum(4).mean(2)
        mass = (mass + (absent[:, :, 0, :, 0] / self.size)).reshape(B, K, num * size)
        at = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None]
        column = jnp.where(counts.reshape(B, -1), source, T)[:, None]
        found = jnp.zeros((B, K, T)).at[(*at, column)].set(mass, mode="drop")
        return jnp.pad(found, ((0, 0), (0, 0), (inputs.kv.pos.shape[2] - T, 0)))


# ------------------------------------------------------------------------------------------------ selections


class DriftingTopK(TopK):
    """The highest scores, where heads may together have a token more each than the layer's budget (D-21)."""

    @property
    def slack(self) -> int:
        return 1


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

    def __call__(self, score: Float[Array, "B K S"], budgets: Int[Array, "B K"], slots: Slots) -> Bool[Array, "B K S"]:
        kv, safe = slots.kv, slots.protected & slots.kv.live
        free = jnp.maximum(budgets - safe.sum(-1), 0)
        random = jnp.where(kv.num_live > budgets, jnp.minimum(slots.hparams.random[:, None], free), 0)
        first = best(jnp.where(safe, jnp.inf, score), kv.pos, budgets - random)
        pool = kv.live & ~safe & (~first if self.among == "rest" else True)
        logs = {
            "softmax": score,
            "normalised": jnp.log(jnp.maximum(jnp.where(pool, score, 0.0), 1e-30)),
            "uniform": jnp.zeros_like(score),
        }[self.by]
        u = jnp.clip(slots.ctx.uniform(kv.pos, self.shared), 1e-7, 1 - 1e-7)
        drawn = logs / self.temperature - jnp.log(-jnp.log(u))
        return first | best(drawn, jnp.where(pool, kv.pos, EMPTY), random)


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

    def __call__(self, score: Float[Array, "B K S"], budgets: Int[Array, "B K"], slots: Slots) -> Bool[Array, "B K S"]:
        kv, safe, end = slots.kv, slots.protected, slots.ctx.length[:, None, None] - self.rows
        counted = kv.live & ((kv.pos < self.first) | ((kv.pos >= end - self.last) & (kv.pos < end)))
        mass = jnp.where(counted, score, 0.0).sum(-1).mean(1)
        kept = best(jnp.where(safe, jnp.inf, score), kv.pos, budgets)
        return jnp.where((mass > self.threshold)[:, None, None], safe & kv.live, kept)


# ------------------------------------------------------------------------------------------------ policies


class ZeroChannels(DropChannels):
    """Sets a share of every head's key channels to 0, in the prompt's keys alone, which frees nothing (kvpress)."""

    @property
    def writes(self) -> tuple[str, ...]:
        return ("k",)

    def update(self, kv: LayerView, stats: Stats, ctx: Context) -> LayerView:
        if ctx.phase == "decode":
            return kv
        mask = jnp.zeros((*kv.pos.shape[:2], kv.k.shape[-1]), bool)
        mask = jnp.put_along_axis(mask, self.channels(kv, stats), True, axis=-1, inplace=False)
        return kv.replace(k=jnp.where(mask[:, :, None], kv.k, jnp.zeros((), kv.k.dtype)))


class PagesOfQueryHeads(ReadPages):
    """Reads pages for every query head, whose keys and values are stored for each (Quest's evaluation)."""

    @property
    def layout(self) -> Layout:
        return Layout(by_query_head=True)
