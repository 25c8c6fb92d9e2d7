"""Observations of a layer's rows: functions of `AttentionInputs`, computed once for all policies.

They return arrays, or `Columns`: a statistic of the attention matrix that the kernels sum without holding the matrix.
"""

import functools
import math
from collections.abc import Callable
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.budgets import known
from kvjax.contract import (
    EMPTY,
    Amount,
    AttentionInputs,
    Context,
    Count,
    FrozenArrays,
    LayerInfo,
    Rotate,
    Size,
    Slots,
    turned_queries,
    value,
)
from kvjax.contract.values import A_COUNT
from kvjax.pallas_kernels import Columns, Logits, Softmax, attention
from kvjax.pallas_kernels.columns import accumulator
from kvjax.pallas_kernels.kinds import Kind
from kvjax.pallas_kernels.pytree import pytree
from kvjax.storage.mesh import attention_on

OfLayer = Callable[[Array, int | Array], Array]  # a function of what tokens have, and of the layer's index
A_ROW = Kind(f"{A_COUNT.words}, but not 0; or None", lambda n: n is None or (A_COUNT.holds(n) and n != 0))


@value
class Rows:
    """The attention that every slot receives: the sum over rows of a function of the probability, "B K S".

    Attributes:
      last: only the last rows count: a number of tokens, or a count of the prompt's, which all decode rows are among;
        None for all rows.
      element: the function: the probability "p", its square "p2", or whether it is "above" the threshold.
      threshold: a probability, "1/visible" (one over the slots that the row sees) or "1/position".
      group: how the query heads of a kv head become one, for "p" after the sum and else before the function; None keeps
        them: "B N S".
      softmax: another softmax than the model's: a function of the inputs.
      first: only rows at this position or later count.
      by_length: a row counts as many times as there are tokens before it.
      count_self: whether a row counts for its own token.
      summed: False keeps the rows apart, "B K R S".
    """

    last: Annotated[Count | None, A_ROW] = None
    element: Literal["p", "p2", "above"] = "p"
    threshold: float | Literal["1/visible", "1/position"] = "1/visible"
    group: Literal["mean", "max", "sum"] | None = "mean"
    softmax: Callable[[AttentionInputs], Softmax] | None = None
    first: Amount = 0
    by_length: bool = False
    count_self: bool = True
    summed: bool = True

    def __call__(self, inputs: AttentionInputs) -> Columns:
        pos, ctx, rows, weights = inputs.pos, inputs.ctx, None, []
        if isinstance(self.last, int):
            rows = min(self.last, pos.shape[1])
        elif self.last is not None and pos.shape[1] > 1:
            last = jnp.maximum(known(self.last, ctx), 1)
            weights.append((pos >= (ctx.length - last)[:, None]).astype(jnp.float32))
        if self.first:
            weights.append((pos >= self.first).astype(jnp.float32))
        if self.by_length:
            weights.append(jnp.maximum(pos, 0).astype(jnp.float32))
        return Columns(
            rows,
            self.element,
            self.threshold,
            self.group,
            "after" if self.element == "p" or self.group is None else "before",
            self.count_self,
            self.summed,
            math.prod(weights[1:], start=weights[0]) if weights else None,
            None if self.softmax is None else self.softmax(inputs),
        )


def votes(rows: Size) -> Rows:
    """The attention of the prompt's last `rows`, row by row and for every query head: "B N R S"."""
    return Rows(rows, group=None, summed=False)


def by_row(ask: Rows, slots: Slots) -> tuple[Float[Array, "B K G R S"], Bool[Array, "B 1 1 R 1"]]:
    """(what `votes` observed, 0 in rows that do not exist; which rows exist)."""
    rows = slots.stats[ask].astype(jnp.float32)
    B, _, R, S = rows.shape
    exist = (jnp.arange(R)[None] >= R - slots.ctx.length[:, None])[:, None, None, :, None]
    return jnp.where(exist, rows.reshape(B, slots.kv.pos.shape[1], -1, R, S), 0.0), exist


@pytree
class Queries:
    """Rows and how they attend, for those who compute attention themselves.

    Attributes:
      q: queries, rotated.
      pos: positions of the rows, `EMPTY` for padding.
      bias, logits: as in `AttentionInputs`.
    """

    q: Float[Array, "B N R H"]
    pos: Int[Array, "B R"]
    bias: Float[Array, "B N S"] | None
    logits: Logits


@value
class Unmasked:
    """`Rows` by a softmax over all live slots, as if none were hidden from the rows.

    Attributes:
      of: the statistic.
    """

    of: Rows

    def __call__(self, inputs: AttentionInputs) -> Float[Array, "B _ S"]:
        kv = inputs.kv
        attend = attention if kv.how.mesh is None else functools.partial(attention_on, kv.how.mesh)
        rows = inputs.q, kv.k, kv.v, inputs.pos, kv.pos
        return attend(*rows, columns=(self.of(inputs),), bias=inputs.bias, logits=inputs.logits).columns[0]


@value
class QuerySquares:
    """The mean square of each channel of the last rotated queries, over rows and group (ThinK, arXiv 2407.21018).

    Attributes:
      rows: how many last rows.
    """

    rows: Size = 32

    def __call__(self, inputs: AttentionInputs) -> Float[Array, "B K H"]:
        q, exist = inputs.q[:, :, -self.rows :], inputs.pos[:, -self.rows :] != EMPTY
        total = jnp.maximum(exist.sum(-1), 1).astype(jnp.float32)[:, None, None]
        mean = jnp.einsum("bt,bnth->bnh", exist.astype(jnp.float32), jnp.square(q.astype(jnp.float32))) / total
        return mean.reshape(len(q), inputs.kv.pos.shape[1], -1, q.shape[-1]).mean(2)


@value
class FutureQueries:
    """Mean and covariance of the queries that will follow, from those of the prompt (ExpectedAttention).

    Queries before rotation are taken as Gaussian, and the rotations of the positions to come are averaged. Devoto et
    al., arXiv 2510.00636, section 3. They are times the model's scale, so that products with keys are logits.

    Attributes:
      horizon: how many positions to come.
      skip: the first rows, which are left out: their queries are unlike the others.
    """

    horizon: Size = 512
    skip: Amount = 4

    def check(self, info: LayerInfo) -> None:
        """Refuses a layer of other sizes than what is known beforehand, if anything is."""

    def __call__(self, inputs: AttentionInputs) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"]]:
        q = inputs.raw_q.astype(jnp.float32)
        exist = inputs.pos >= self.skip
        exist = jnp.where(exist.any(-1, keepdims=True), exist, inputs.pos != EMPTY).astype(jnp.float32)
        total = jnp.maximum(exist.sum(-1), 1.0)[:, None, None]
        mean = jnp.einsum("bt,bnth->bnh", exist, q) / total
        centred = q - mean[:, :, None]
        cov = jnp.einsum("bt,bnth,bntj->bnhj", exist, centred, centred) / total[..., None]
        return self.turned(mean, cov, inputs)

    def turned(
        self, mean: Float[Array, "B N H"], cov: Float[Array, "B N H H"], inputs: AttentionInputs
    ) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"]]:
        """Moments of queries before rotation, turned to the positions to come and times the scale."""
        B, H = len(inputs.q), mean.shape[-1]
        basis = jnp.broadcast_to(jnp.eye(H)[None, None], (B, 1, H, H))
        place = lambda i: jnp.broadcast_to((inputs.ctx.length + i)[:, None, None], (B, 1, H))
        add = lambda i, turned: turned + turned_queries(inputs.rotate, basis, place(i))
        turned = lax.fori_loop(0, self.horizon, add, jnp.zeros_like(basis))[:, 0] / self.horizon
        turned = turned * inputs.logits.factor(H)
        return jnp.einsum("bnj,bjh->bnh", mean, turned), jnp.einsum("bnij,bih,bjl->bnhl", cov, turned, turned)


def check_moments(name: str, moments: FrozenArrays, info: LayerInfo) -> None:
    """Refuses numbers of a model's queries, all of shape "L N H ...", that are those of another model."""
    here = info.num_layers, info.num_query_heads, info.head_dim
    if wrong := [(of, x.shape) for of, x in moments.items() if x.shape[:3] != here]:
        of, there = wrong[-1]  # by their names
        raise ValueError(
            f"{name} have the shape {there} ({of}), but the model has {here} (layers, query heads, head_dim); give its "
            "own"
        )


def turned_together(rotate: Rotate, H: int) -> Float[Array, "H H"]:
    """What a rotation by one position makes of each channel; what is not 0 says which channels turn as a pair."""
    return rotate(jnp.eye(H)[None, None], jnp.ones((1, 1, H), jnp.int32))[0, 0]


def lengths_of_pairs(x: Float[Array, "... H"], turned: Float[Array, "H H"]) -> Float[Array, "... H"]:
    """For every channel the length of the pair that it is turned in; of one that is not turned, its size."""
    return jnp.sqrt(jnp.square(x) @ (turned != 0).astype(x.dtype))


@value
class CentredQueries:
    """What queries to come are, by their centres in a model (TriAttention, arXiv 2604.04921).

    They are (the centre, turned to positions to come, "B N H"; by how much pairs of channels are longer than it, a
    half for each channel of a pair, "B N H"; what the rotation makes of channels, "B H H").

    Attributes:
      table: of queries before rotation, "mean" and the mean "length" of every channel's pair, "L N H".
      furthest: the positions to come are 1, 2, 4, ... after the next one, up to so many.
    """

    table: FrozenArrays
    furthest: Size = 65536

    def check(self, info: LayerInfo) -> None:
        """Refuses a layer of other sizes."""
        check_moments("centres", self.table, info)

    def __call__(self, inputs: AttentionInputs) -> tuple[Array, Array, Array]:
        mean, length = (jnp.asarray(self.table[n])[inputs.ctx.layer].astype(jnp.float32) for n in ("mean", "length"))
        turned = turned_together(inputs.rotate, mean.shape[-1])
        offsets = 2 ** jnp.arange(self.furthest.bit_length(), dtype=jnp.int32)
        many = jnp.broadcast_to(mean[None, :, None], (len(inputs.q), len(mean), len(offsets), mean.shape[-1]))
        ahead = turned_queries(inputs.rotate, many, (inputs.ctx.length[:, None] + offsets[None])[:, None]).mean(2)
        stretch, alike = jnp.sqrt(jnp.square(turned).sum(-1)), (turned != 0).sum(-1).astype(jnp.float32)
        longer = (length - lengths_of_pairs(mean, turned)) * (stretch / alike)[None]
        each = lambda x: jnp.broadcast_to(x[None], (len(ahead), *x.shape))
        return ahead, each(longer), each(turned)


@value
class Keys:
    """Every slot's key as rows read it, for decisions that follow when all layers were read."""

    def __call__(self, inputs: AttentionInputs) -> Float[Array, "B K S H"]:
        return inputs.kv.k


@value
class UnrotatedKeys:
    """Every slot's key before rotation, in float32 or wider.

    A rotation that stretches channels, as YaRN's does, is taken back with its factor.
    """

    def __call__(self, inputs: AttentionInputs) -> Float[Array, "B K S H"]:
        kv = inputs.kv
        wide = accumulator(kv.k.dtype)
        if inputs.raw_k is not None:
            return inputs.raw_k.astype(wide)
        stretch = inputs.rotate(jnp.ones_like(kv.k[:, :, :1], wide), jnp.zeros_like(kv.pos[:, :, :1]))
        return inputs.rotate(kv.k.astype(wide), -jnp.maximum(kv.pos, 0)) / jnp.square(stretch)


@value
class ProjectedValueNorm:
    """L1 norm of every value after the output projection, the mean over its group (CriticalKV, arXiv 2502.03805)."""

    def __call__(self, inputs: AttentionInputs) -> Float[Array, "B K S"]:
        if inputs.out_proj is None:
            raise ValueError("ProjectedValueNorm needs the layer's output projection; give out_proj")
        v, K = inputs.kv.v, inputs.kv.v.shape[1]
        by_group = inputs.out_proj.reshape(K, -1, *inputs.out_proj.shape[1:]).swapaxes(0, 1).astype(v.dtype)
        rows = v.swapaxes(0, 1).reshape(K, -1, v.shape[-1])  # XLA may lack products of 16 bits with two free axes
        project = functools.partial(jnp.einsum, "krh,khd->krd", preferred_element_type=accumulator(v.dtype))
        norm = lax.map(lambda w: jnp.abs(project(rows, w)).sum(-1), by_group).mean(0)
        return norm.reshape(K, v.shape[0], v.shape[2]).swapaxes(0, 1)


@value
class HiddenStates:
    """The new rows' hidden states. Learned scores observe them and multiply in `update`, not here."""

    def __call__(self, inputs: AttentionInputs) -> Float[Array, "B T D"]:
        if inputs.hidden is None:
            raise ValueError("the policy observes hidden states, which are not given; give hidden")
        return inputs.hidden


@value
class Hidden:
    """A function of the new rows' hidden states, laid on their slots; 0 in all others.

    Attributes:
      fn: (hidden states "B T D", index of the layer) -> "B T K".
    """

    fn: OfLayer

    def __call__(self, inputs: AttentionInputs) -> Float[Array, "B K S"]:
        return on_new_slots(self.fn(HiddenStates()(inputs), inputs.ctx.layer).swapaxes(1, 2), inputs)


def on_new_slots(
    x: Shaped[Array, "B T"] | Shaped[Array, "B K T"], at: AttentionInputs | Slots, fill: int | float = 0
) -> Shaped[Array, "B K S"]:
    """Numbers of the new rows laid on their slots.

    Args:
      x: a number for every row, or for every head and row. The text ends with these rows.
      at: the layer and the moment.
      fill: what other slots get.
    """
    x, pos = (x if x.ndim == 3 else x[:, None]), at.kv.pos
    T = x.shape[2]
    column = pos - (at.ctx.length[:, None, None] - T)
    found = jnp.take_along_axis(jnp.broadcast_to(x, (*pos.shape[:2], T)), jnp.clip(column, 0, T - 1), -1)
    return jnp.where((pos != EMPTY) & (column >= 0), found, fill)


def segment_sum(x: Shaped[Array, "B K S"], segment: Int[Array, "B K S"], num: int) -> Shaped[Array, "B K {num}"]:
    """Sums of slots by the number of their segment; slots of other segments than 0 to num - 1 are left out."""
    at = jnp.arange(len(x))[:, None, None], jnp.arange(x.shape[1])[None, :, None], jnp.where(segment < 0, num, segment)
    return jnp.zeros((*x.shape[:2], num), x.dtype).at[at].add(x, mode="drop")


@value
class ChunkAttention:
    """The attention that keys receive within their chunk of the prompt, later rows' included (Compactor).

    Chari and Van Durme, arXiv 2507.08143. Logits are plain products of queries and keys, without the model's scale, cap
    and window. Slots outside of all chunks get 0.

    Attributes:
      size: tokens of a chunk.
      first, last: how many first and last tokens are in no chunk.
    """

    size: Size = 256
    first: Amount = 0
    last: Amount = 0

    def __call__(self, inputs: AttentionInputs) -> Float[Array, "B K S"]:
        (B, _, T, H), K = inputs.q.shape, inputs.kv.pos.shape[1]
        keys = inputs.kv.k[:, :, -T:]
        source, index, counts = self._chunks(inputs.pos, inputs.ctx)
        num, size = counts.shape[1:]
        chunks = lambda x: jnp.take_along_axis(x.astype(jnp.float32), index[:, None, :, None], 2)
        part = lambda x: chunks(x).reshape(B, K, -1, num, size, H)
        x = jnp.einsum("bkgnch,bkundh->bkgncd", part(inputs.q), part(keys))
        mass = self.received(x, counts).reshape(B, K, num * size)
        column = jnp.where(counts.reshape(B, -1), source, T)[:, None]
        found = segment_sum(mass, jnp.broadcast_to(column, mass.shape), T)
        return jnp.pad(found, ((0, 0), (0, 0), (inputs.kv.pos.shape[2] - T, 0)))

    def received(self, x: Float[Array, "B K G n c c"], counts: Bool[Array, "B n c"]) -> Float[Array, "B K n c"]:
        """What tokens of chunks get from their chunk's rows, by logits, and where there are tokens."""
        p = jax.nn.softmax(jnp.where(counts[:, None, None, :, None], x, jnp.finfo(x.dtype).min), axis=-1)
        return jnp.where(counts[:, None, None, :, :, None], p, 0.0).sum(4).mean(2)

    def _chunks(
        self, pos: Int[Array, "B T"], ctx: Context
    ) -> tuple[Int[Array, "B C"], Int[Array, "B C"], Bool[Array, "B n c"]]:
        """For n chunks of c tokens, C = n c: columns of their tokens, the same within T, and which are in a chunk."""
        B, T = pos.shape
        inside = (pos >= self.first) & (pos < ctx.prompt_length[:, None] - self.last)
        start = jnp.where(inside.any(-1), inside.argmax(-1), 0)
        size = min(self.size, T)
        num = -(-T // size)
        source = jnp.arange(num * size)[None] + start[:, None]
        index = jnp.minimum(source, T - 1)
        return source, index, ((source < T) & jnp.take_along_axis(inside, index, 1)).reshape(B, num, size)


@value
class Reread:
    r"""How a prompt is repeated: an instruction, some tokens before a chunk, a suffix, the chunk.

    Observed in the phase "replay", it gives the most that any of these rows, in any query head of its group, gives to a
    token of their chunk, "B K S": $\max_{i, g} p_{ij}$, the softmax $p_i$ of a row being one over the chunk, the sinks
    before it and the rows so far.

    Attributes:
      repeat: ids of the instruction before the first chunk.
      repeat_next: ids of the instruction before later ones.
      suffix: ids between all that and the chunk, such as what a chat template has between a question and its answer.
      prefix: first tokens of the prompt that are in no chunk, such as what a chat template has before the context.
      chunk: tokens of a chunk.
      overlap: tokens before a later chunk that are repeated with it.
      sinks: first tokens of the prompt that rows see beside the chunk.
      plus: weighs probabilities: $\max_{i, g} p_{ij} \lVert v_j W_O^g \rVert_2 / \lVert h_i \rVert_2$, where $h_i$ is
        the hidden state that the row's query is a projection of (KVzip+, arXiv 2601.07891).
    """

    repeat: tuple[int, ...] = ()
    repeat_next: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    prefix: Amount = 0
    chunk: Size = 2048
    overlap: Amount = 8
    sinks: Amount = 4
    plus: bool = False

    def size(self, width: int) -> int:
        """Tokens of the largest chunk of a prompt of so many columns."""
        return max(min(self.chunk, width - self.prefix), 1)

    def firsts(self, width: int) -> range:
        """The positions at which chunks begin."""
        return range(self.prefix, width, self.size(width))

    def most(self, width: int) -> int:
        """The most rows that are read at once."""
        overlap = min(self.overlap, self.size(width))
        later = len(self.repeat_next) + overlap if len(self.firsts(width)) > 1 else 0
        return max(len(self.repeat), later) + len(self.suffix) + self.size(width)

    def rows(self, ids: Int[np.ndarray, "T"], first: Amount, width: int) -> Int[np.ndarray, "R"]:
        """The ids that repeat the chunk from `first` on of a prompt; none behind the prompt's end.

        Args:
          ids: the prompt.
          first: where the chunk begins.
          width: columns of the padded prompts.
        """
        size = self.size(width)
        if not len(chunk := ids[first : first + size]):
            return np.zeros(0, np.int32)
        overlap = ids[first - min(self.overlap, size) : first]
        told = self.repeat if first == self.prefix else (*self.repeat_next, *overlap)
        return np.array([*told, *self.suffix, *chunk], np.int32)
