"""What can be observed of a layer's rows: functions of `AttentionInputs` that return kernel `Columns`, or an array."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.core.budgets import known
from kvjax.core.contract import EMPTY, Count, value
from kvjax.pallas_kernels import Columns, Softmax

PARTS = ("mean", "max", "sum")


@value
class Rows:
    """Attention that every slot received: the sum over query rows of a function of the probability, "B K S".

    Attributes:
      last: the last rows alone; None for all.
      element: the probability "p", its square "p2", or whether it is "above" a threshold.
      group: how the query heads of a kv head become one; None keeps all, "B N S".
      softmax: another softmax to rank by than the model's, a function of the inputs.
      first: rows at this position or later.
      by_length: rows count as many times as there are tokens before them.
      count_self: whether a row counts for its own token.
      summed: False keeps the rows apart, "B K R S".
    """

    last: Count | None = None
    element: Literal["p", "p2", "above"] = "p"
    threshold: float | str = "1/visible"
    group: Literal["mean", "max", "sum"] | None = "mean"
    softmax: Any = None
    first: int = 0
    by_length: bool = False
    count_self: bool = True
    summed: bool = True

    def __call__(self, inputs):
        pos, ctx, rows, weight = inputs.pos, inputs.ctx, self.last, None
        if isinstance(rows, int):
            rows = min(rows, pos.shape[1])
        elif rows is not None and pos.shape[1] > 1:
            last = jnp.maximum(known(rows, ctx), 1)
            rows, weight = None, (pos >= (ctx.length - last)[:, None]).astype(jnp.float32)
        else:
            rows = None
        if self.first:
            weight = (pos >= self.first).astype(jnp.float32)
        if self.by_length:
            weight = jnp.maximum(pos, 0).astype(jnp.float32) * (1 if weight is None else weight)
        softmax = None if self.softmax is None else self.softmax(inputs)
        at = "after" if self.element == "p" or self.group is None else "before"
        return Columns(
            rows, self.element, self.threshold, self.group, at, self.count_self, self.summed, weight, softmax
        )


@value
class Noisy:
    """softmax((x + Gumbel noise) / tau), tau growing from the first to the last temperature (Keyformer)."""

    tau: tuple[float, float] = (1.0, 2.0)

    def __call__(self, inputs):
        ctx = inputs.ctx
        delta = (self.tau[1] - self.tau[0]) / jnp.maximum(ctx.max_new_tokens, 1).astype(jnp.float32)
        tau = self.tau[0] + (delta * ctx.step.astype(jnp.float32))[:, None, None]
        shape = (*inputs.kv.pos.shape[:2], inputs.pos.shape[1])
        return Softmax(multiplier=jnp.broadcast_to(1.0 / tau, shape), seed=ctx.seed(), noise="gumbel")


@value
class EntropyScaled:
    """Logits scaled so that every row has the entropy of `k` tokens (AhaKV)."""

    k: Count

    def __call__(self, inputs):
        k = jnp.maximum(known(self.k, inputs.ctx), 1)
        seen = jnp.broadcast_to(inputs.pos[:, None] + 1, (*inputs.kv.pos.shape[:2], inputs.pos.shape[1]))
        ratio = seen.astype(jnp.float32) / k[:, None, None].astype(jnp.float32)
        return Softmax(multiplier=jnp.where(ratio > 1, jnp.sqrt(2.0 * jnp.log(jnp.maximum(ratio, 1.0))), 1.0))


def votes(rows: int) -> Rows:
    """The attention of the prompt's last rows, row by row and for every query head."""
    return Rows(rows, group=None, summed=False)


def by_row(ask: Rows, slots):
    """What `votes` gave "B K G R S", 0 in rows that do not exist, and which rows do "B 1 1 R 1"."""
    rows = slots.stats[ask].astype(jnp.float32)
    B, N, R, S = rows.shape
    exist = (jnp.arange(R)[None] >= R - slots.ctx.length[:, None])[:, None, None, :, None]
    return jnp.where(exist, rows.reshape(B, slots.kv.pos.shape[1], -1, R, S), 0.0), exist


@value
class QuerySquares:
    """Mean square of every channel of the last rotated queries, over the group: "B K H" (ThinK)."""

    rows: int = 32

    def __call__(self, inputs):
        q, exist = inputs.q[:, :, -self.rows :], inputs.pos[:, -self.rows :] != EMPTY
        total = jnp.maximum(exist.sum(-1), 1)[:, None, None]
        mean = jnp.einsum("bt,bnth->bnh", exist.astype(jnp.float32), jnp.square(q.astype(jnp.float32))) / total
        return mean.reshape(len(q), inputs.kv.pos.shape[1], -1, q.shape[-1]).mean(2)


@value
class FutureQueries:
    """Mean "B N H" and covariance "B N H H" of the queries to come (ExpectedAttention)."""

    horizon: int = 512
    skip: int = 4

    def __call__(self, inputs):
        q, H = inputs.raw_q.astype(jnp.float32), inputs.raw_q.shape[-1]
        exist = inputs.pos >= self.skip
        exist = jnp.where(exist.any(-1, keepdims=True), exist, inputs.pos != EMPTY).astype(jnp.float32)
        total = jnp.maximum(exist.sum(-1), 1.0)[:, None, None]
        mean = jnp.einsum("bt,bnth->bnh", exist, q) / total
        centred = q - mean[:, :, None]
        cov = jnp.einsum("bt,bnth,bntj->bnhj", exist, centred, centred) / total[..., None]
        basis = jnp.broadcast_to(jnp.eye(H)[None, None], (len(q), 1, H, H))
        place = lambda i: jnp.broadcast_to((inputs.ctx.length + i)[:, None, None], (len(q), 1, H))
        add = lambda i, turned: turned + inputs.rotate(basis, place(i))
        turned = lax.fori_loop(0, self.horizon, add, jnp.zeros_like(basis))[:, 0] / self.horizon
        return jnp.einsum("bnj,bjh->bnh", mean, turned), jnp.einsum("bnij,bih,bjl->bnhl", cov, turned, turned)


@value
class UnrotatedKeys:
    """Every slot's key before rotation: "B K S H"."""

    def __call__(self, inputs):
        kv = inputs.kv
        return kv.k if kv.how.positions == "rank" else inputs.rotate(kv.k, -jnp.maximum(kv.pos, 0))


@value
class ProjectedValueNorm:
    """L1 norm of every value after the output projection, mean over the group: "B K S" (CriticalKV)."""

    def __call__(self, inputs):
        v, K = inputs.kv.v, inputs.kv.v.shape[1]
        by_group = inputs.out_proj.reshape(K, -1, *inputs.out_proj.shape[1:]).swapaxes(0, 1).astype(v.dtype)
        one = lambda w: jnp.abs(jnp.einsum("bksh,khd->bksd", v, w)).sum(-1).astype(jnp.float32)
        return lax.map(one, by_group).mean(0)


@value
class HiddenStates:
    """The new tokens' hidden states as the layer reads them, "B T D": learned scores multiply them in `update`."""

    def __call__(self, inputs):
        return inputs.hidden


@value
class Hidden:
    """A function of the new tokens' hidden states "B T D" and the layer, "B T K", laid on their slots: "B K S"."""

    fn: Any

    def __call__(self, inputs):
        return on_new_slots(self.fn(inputs.hidden, inputs.ctx.layer).swapaxes(1, 2), inputs)


@value
class Unmasked:
    """Attention statistics as if nothing was hidden from the rows: a softmax of its own over all live slots."""

    of: Rows

    def __call__(self, inputs):
        how = {"rotate": inputs.rotate, "scale": inputs.scale, "window": inputs.window, "softcap": inputs.softcap}
        return inputs.kv.attend(inputs.q, inputs.pos, (self.of(inputs),), **how).columns[0]


def on_new_slots(x, at, fill=0):
    """Numbers of the new tokens "B T" or "B K T" laid on their slots, `fill` elsewhere: "B K S".

    `at` is `AttentionInputs` or `Slots`, whose text ends with these tokens.
    """
    x, pos = (x if x.ndim == 3 else x[:, None]), at.kv.pos
    T = x.shape[2]
    column = pos - (at.ctx.length[:, None, None] - T)
    found = jnp.take_along_axis(jnp.broadcast_to(x, (*pos.shape[:2], T)), jnp.clip(column, 0, T - 1), -1)
    return jnp.where((pos != EMPTY) & (column >= 0), found, fill)


def segment_sum(x, segment, num: int):
    """Sums "B K num" of what slots "B K S" have, by the number of their segment "B K S"; others than 0..num-1 are dropped."""
    at = jnp.arange(len(x))[:, None, None], jnp.arange(x.shape[1])[None, :, None], jnp.where(segment < 0, num, segment)
    return jnp.zeros((*x.shape[:2], num), x.dtype).at[at].add(x, mode="drop")


@value
class ChunkAttention:
    """What keys receive within their chunk of the prompt, from rows before and after them: "B K S" (Compactor)."""

    size: int = 256
    first: int = 0
    last: int = 0

    def __call__(self, inputs):
        (B, N, T, H), K, pos = inputs.q.shape, inputs.kv.pos.shape[1], inputs.pos
        keys = inputs.kv.keys(inputs.rotate)[:, :, -T:]
        inside = (pos >= self.first) & (pos < inputs.ctx.prompt_length[:, None] - self.last)
        start = jnp.where(inside.any(-1), inside.argmax(-1), 0)
        size = min(self.size, T)
        num = -(-T // size)
        source = jnp.arange(num * size)[None] + start[:, None]
        index = jnp.minimum(source, T - 1)
        counts = ((source < T) & jnp.take_along_axis(inside, index, 1)).reshape(B, num, size)
        part = lambda x: jnp.take_along_axis(x, index[:, None, :, None], 2).reshape(B, K, -1, num, size, H)
        x = jnp.einsum("bkgnch,bkundh->bkgncd", part(inputs.q), part(keys))
        x = jax.nn.softmax(
            jnp.where(counts[:, None, None, :, None], x, -jnp.inf), axis=-1, where=counts[:, None, None, :, None]
        )
        mass = jnp.where(counts[:, None, None, :, :, None], x, 0.0).sum(4).mean(2).reshape(B, K, num * size)
        at = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None]
        column = jnp.where(counts.reshape(B, -1), source, T)[:, None]
        found = jnp.zeros((B, K, T)).at[(*at, column)].set(mass, mode="drop")
        return jnp.pad(found, ((0, 0), (0, 0), (inputs.kv.pos.shape[2] - T, 0)))
