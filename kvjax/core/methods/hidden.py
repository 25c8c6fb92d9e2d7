"""Methods that hide what they keep: tokens from a row, pages of tokens, channels of keys."""

import jax.numpy as jnp
from jax import lax

from kvjax.core.budgets import STEP
from kvjax.core.contract import Count, PerHead, Policy, Reads, count, value
from kvjax.core.evict import Evict
from kvjax.core.observe import QuerySquares
from kvjax.core.scores.attention import Recency


@value
class EveryOther:
    """Shows the newest token and those at distances that `step` divides."""

    step: int

    def __call__(self, kv, inputs, ctx):
        return kv.live & (((ctx.length - 1)[:, None, None] - kv.pos) % self.step == 0)


def dilated_window(budget, *, dilation=1, anchored=False):
    """The newest token and every other one before it (Keyformer, figure 2c)."""
    if anchored:
        return Evict(Recency(dilation + 1), budget, 0, 1, when=STEP)
    return Evict(Recency(), budget, when=STEP, mask=EveryOther(dilation + 1))


class DropChannels(Policy):
    """Drops a share of every head's key channels; every token stays (ThinK)."""

    share: float
    rows: int = 32

    def observe(self, phase):
        return (QuerySquares(self.rows),) if phase == "prefill" else ()

    def update(self, kv, stats, ctx):
        if ctx.phase == "decode":
            return kv
        k, H = jnp.where(kv.live[..., None], jnp.square(kv.k.astype(jnp.float32)), 0.0), kv.k.shape[-1]
        weight = stats[QuerySquares(self.rows)] * (k.sum(2) / jnp.maximum(kv.num_live, 1)[..., None])
        return kv.replace(channels=jnp.sort(lax.top_k(weight, H - int(H * self.share))[1], axis=-1))


def think(channels=0.5, *, rows=32):
    """The key channels that matter to the last queries (Xu et al., arXiv 2407.21018)."""
    return DropChannels(channels, rows)


class ReadPages(Policy):
    """Keeps everything; a decode row reads of every head the pages whose bounds for its queries are largest."""

    budget: Count = count()
    size: int = 16

    def memory(self, info):
        shape = -(-(info.prompt_len + info.max_new_tokens) // self.size), info.head_dim
        return PerHead(shape, fill=-jnp.inf), PerHead(shape, fill=jnp.inf)

    def update(self, kv, stats, ctx):
        """Bounds of every page's keys. A step adds its token's page, which the next row reads whatever its bounds."""
        (high, low), (B, K, S) = kv.memory, kv.pos.shape
        slot = jnp.broadcast_to(jnp.arange(S), kv.pos.shape)
        if ctx.phase == "decode":
            slot = jnp.where(kv.pos == ctx.length[:, None, None] - 1, slot, -1).max(-1, keepdims=True)
        k, pos = (jnp.take_along_axis(x, i, 2) for x, i in ((kv.k, slot[..., None]), (kv.pos, slot)))
        page = jnp.where((slot >= 0) & (pos >= 0), pos // self.size, high.shape[2])
        at, k = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], page), k.astype(jnp.float32)
        return kv.replace(memory=(high.at[at].max(k, mode="drop"), low.at[at].min(k, mode="drop")))

    def reads(self, kv, inputs, ctx):
        """The live slots of the best pages, as a mask."""
        (high, low), page, q = kv.memory, jnp.maximum(kv.pos, 0) // self.size, inputs.q
        if q.shape[2] > 1:
            return None
        rows, num = q.reshape(*kv.pos.shape[:2], -1, 1, q.shape[-1]), high.shape[2]
        bound = jnp.where(rows > 0, rows * high[:, :, None], rows * low[:, :, None]).sum(-1).max(2)
        newest = jnp.arange(num) == (ctx.length[:, None, None] - 1) // self.size
        bound = jnp.where(newest, jnp.inf, jnp.where(jnp.isfinite(high[..., 0]), bound, -jnp.inf))
        rank = jnp.argsort(jnp.argsort(-bound, axis=-1, stable=True), axis=-1)
        read = (rank < jnp.maximum(ctx.hparams.budget // self.size, 1)[:, None, None]) & (bound > -jnp.inf)
        return Reads(kv.live & jnp.take_along_axis(read, page, -1))


class Quest(Policy):
    """`ReadPages` in all layers but the first."""

    pages: ReadPages
    dense: int = 2

    def at(self, layer, num_layers):
        return Policy() if layer < self.dense else self.pages


def quest(budget, *, size=16, dense=2):
    """Selection, which evicts nothing (Tang et al., arXiv 2406.10774)."""
    return Quest(ReadPages(budget, size), dense)
