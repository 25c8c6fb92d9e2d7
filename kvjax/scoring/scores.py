"""How much a token is worth keeping: one number a slot, larger = keep.

A score lists what must be measured (`observe`), owns the numbers it carries from step to step (`init`, `update`), and
turns them into scores (`__call__`). Scores know nothing of budgets, protection, schedules or storage.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from kvjax.cache.context import Context, Phase, Site
from kvjax.cache.state import EMPTY, LayerKV, position_order
from kvjax.functions import by_code
from kvjax.pallas_kernels.values import MOST_TOKENS, a, each, flag, is_array, number, one_of, settle, tokens, whole
from kvjax.scoring.protect import rows_since_insertion
from kvjax.scoring.stats import (
    AllRows,
    LastRows,
    LayerStats,
    Measurement,
    Observe,
    Observer,
    RowsFrom,
    RowSoftmax,
    Slots,
    Sums,
)

GROUPS = ("mean", "max", "sum")
"""How one number a kv head is made of its group's query heads."""


def one_a_slot(of: Any) -> Observe:
    """The rule of statistics that a score sums: `Observe` with one number a slot of every kv head."""
    a(Observe)(of)
    if of.group is None or not of.summed:
        raise ValueError(
            f"a score has one number a slot of every kv head, which needs summed rows and group= one of {GROUPS}"
        )
    return of


def kernel_width(kernel: int) -> int:
    """The rule of pooling kernels, which are odd."""
    kernel = min(whole()(kernel), MOST_TOKENS)
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"a kernel is odd, or it shifts the scores; use {max(kernel | 1, 1)}")
    return kernel


class Score(Observer, abc.ABC):
    """A frozen dataclass that ranks the live slots of a layer."""

    @abc.abstractmethod
    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """The score of every slot; only those of `slots.candidates` (live, not protected) will be compared."""

    def summands(self, ctx: Context) -> int | Int[Array, "B"]:
        """Rows, times heads under `group="sum"`, whose attention a score adds up: what divides it into their mean.

        1 where it is a mean, no attention, or a sum that grows with the text.
        """
        del ctx
        return 1

    def check(self, site: Site) -> None:
        """Raises ValueError if it cannot rank the tokens of this layer."""
        del site

    @property
    def decodes(self) -> bool:
        """Whether the score means something while decoding."""
        return True

    @property
    def rotated_keys(self) -> bool:
        """Whether it looks at keys, and rotation changes what it sees."""
        return False

    @property
    def by_head(self) -> bool:
        """Whether a head's scores depend on what it holds alone."""
        return True

    @property
    def apart(self) -> bool:
        """Whether that is known, so that devices may score the heads that they have.

        It is of the scores of this library. One of your own that looks at each head alone says so by overriding it.
        """
        return self.by_head and type(self).__module__.startswith("kvjax.")


@dataclasses.dataclass(frozen=True)
class Recency(Score):
    """The newer, the better."""

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        kv = slots.kv
        return kv.pos.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Uniform(Score):
    """A fresh uniform draw for every token at every eviction, independent over layers and sequences.

    Attributes:
      shared_heads: one draw for all kv heads of a layer.
    """

    shared_heads: bool = False

    def __post_init__(self):
        settle(self, shared_heads=flag)

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        kv, ctx = slots.kv, slots.ctx
        return ctx.uniform(kv.pos, shared=self.shared_heads)


class Running(Score):
    """A score that grows from row to row: what it has summed so far is the score as it stands."""

    @property
    @abc.abstractmethod
    def _sums(self) -> Sums:
        """What it sums."""

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Observer`."""
        del phase
        return (self._sums.observed,)

    def init(self, site: Site, batch: int) -> Float[Array, "B K 0 *G"]:
        """See `Observer`."""
        return self._sums.init(site, batch)

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        memory = slots.memory
        return self._sums.largest(memory)


@dataclasses.dataclass(frozen=True)
class OfScore(Score):
    """A score made of another one, which does the looking and the counting.

    Attributes:
      score: the other one.
    """

    score: Score

    def __post_init__(self):
        settle(self, score=a(Score))

    @property
    def by_head(self) -> bool:
        """See `Score`."""
        return self.score.by_head

    @property
    def apart(self) -> bool:
        """See `Score`."""
        return super().apart and self.score.apart

    def summands(self, ctx: Context) -> int | Int[Array, "B"]:
        """See `Score`."""
        return self.score.summands(ctx)

    def check(self, site: Site) -> None:
        """See `Score`."""
        self.score.check(site)

    @property
    def decodes(self) -> bool:
        """See `Score`."""
        return self.score.decodes

    @property
    def rotated_keys(self) -> bool:
        """See `Score`."""
        return self.score.rotated_keys

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Observer`."""
        return self.score.observe(phase)

    @property
    def timed(self) -> bool:
        """See `Observer`."""
        return self.score.timed

    def init(self, site: Site, batch: int) -> Any:
        """See `Observer`."""
        return self.score.init(site, batch)

    def update(self, slots: Slots) -> Any:
        """See `Observer`."""
        return self.score.update(slots)


@dataclasses.dataclass(frozen=True)
class Accumulated(Running):
    """A column statistic summed over every row since the token was inserted, prompt and decode alike.

    Of a prompt that is read in blocks, the last rows are those of its last block: every block starts anew.

    Attributes:
      of: what is summed. The default, attention probabilities of all rows, is H2O's accumulated attention score.
      decay: the sum is multiplied by this before rows are added (D-50).
      damping: what is added is multiplied by this (Keyformer, section 2.3).
      share_batch: one sum for all sequences of a batch (Keyformer's released code, D-36).
    """

    of: Observe = Observe(AllRows())
    decay: float = 1.0
    damping: float = 1.0
    share_batch: bool = False

    def __post_init__(self):
        factor = number("[0, inf)", "a factor of sums is finite, not negative")
        settle(self, of=one_a_slot, decay=factor, damping=factor, share_batch=flag)

    @property
    def _sums(self) -> Sums:
        return Sums(self.of)

    def update(self, slots: Slots) -> Any:
        """See `Score`."""
        memory, kv, stats, ctx = slots.memory, slots.kv, slots.stats, slots.ctx
        new = self._sums.new(stats, ctx) * self.damping
        memory = _anew(memory, self.of, ctx).astype(new.dtype)
        if self.share_batch:
            new = _by_head(lambda x: _sum_over_batch(x, kv), new)
        return memory * self.decay + new


def _by_head(fn: Callable[[Array], Array], sums: Float[Array, "B K S *G"]) -> Float[Array, "B K S *G"]:
    """A function of "B K S", of every query head's sums where they are apart."""
    return fn(sums) if sums.ndim == 3 else jax.vmap(fn, -1, -1)(sums)


def _anew(memory: Float[Array, "B K S *G"], of: Observe, ctx: Context) -> Float[Array, "B K S *G"]:
    """What is added to: nothing, where the last rows of a prompt vote and another block of it has come."""
    return jnp.zeros_like(memory) if ctx.phase == "prefill" and isinstance(of.rows, LastRows) else memory


def _sum_over_batch(new: Float[Array, "B K S"], kv: LayerKV) -> Float[Array, "B K S"]:
    """What the tokens at a position got in all sequences together."""
    B, K, S = new.shape
    flat = lambda x: x.swapaxes(0, 1).reshape(K, B * S)
    return _sum_by_position(flat(new), flat(kv.pos)).reshape(K, B, S).swapaxes(0, 1)


def _sum_by_position(x: Float[Array, "R M"], pos: Int[Array, "R M"]) -> Float[Array, "R M"]:
    """For every number the sum of those of its row that have its position; 0 where that is EMPTY.

    Positions are sorted, as a table of them would grow with the text.
    """
    row, order = jnp.arange(len(pos))[:, None], jnp.argsort(pos, axis=-1)
    place = jnp.take_along_axis(pos, order, axis=-1)
    group = jnp.cumsum(place != jnp.roll(place, 1, axis=-1), axis=-1, dtype=jnp.int32)  # all 0 in a row of one position
    total = jnp.zeros_like(x).at[row, group].add(jnp.take_along_axis(x, order, axis=-1))
    found = jnp.put_along_axis(x, order, total.at[row, group].get(), axis=-1, inplace=False)
    return jnp.where(pos == EMPTY, jnp.zeros((), x.dtype), found)


@dataclasses.dataclass(frozen=True)
class Mean(Running):
    """The mean attention a token received from the rows that could see it (MAS: RoCo, arXiv 2402.06262, section 4.1).

    Attributes:
      count_self: whether a token's own row counts. Without it the newest token has no mean; it is kept (D-10).
      ignore_prefix: query rows of the first so many prompt tokens are neither summed nor counted (D-46).
      group: how the query heads of a group are combined.
    """

    count_self: bool = True
    ignore_prefix: int = 0
    group: Literal["mean", "max", "sum"] = "mean"

    def __post_init__(self):
        settle(self, count_self=flag, ignore_prefix=tokens())
        one_of("Mean.group", self.group, *GROUPS)

    def summands(self, ctx: Context) -> int:
        """See `Score`."""
        return _heads(self.group, ctx)

    @property
    def _sums(self) -> Sums:
        rows = RowsFrom(self.ignore_prefix) if self.ignore_prefix else AllRows()
        return Sums(Observe(rows, group=self.group, count_self=self.count_self))

    def update(self, slots: Slots) -> Any:
        """See `Score`."""
        memory, stats, ctx = slots.memory, slots.stats, slots.ctx
        new = self._sums.new(stats, ctx)
        return memory.astype(new.dtype) + new

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        memory, kv, ctx = slots.memory, slots.kv, slots.ctx
        rows = rows_since_insertion(kv, ctx, self.ignore_prefix, count_self=self.count_self)
        mean = self._sums.largest(memory) / rows.astype(memory.dtype)
        newest = kv.pos == ctx.length[:, None, None] - 1
        return mean if self.count_self else jnp.where(newest, jnp.inf, mean)


def _heads(group: str, ctx: Context) -> int:
    """How many heads a group's reduction adds up."""
    return ctx.site.num_query_heads // ctx.site.num_kv_heads if group == "sum" else 1


@dataclasses.dataclass(frozen=True)
class Proxies(Running):
    """Attention received from proxy rows (NaCl, arXiv 2408.03675, section 3.2).

    Attributes:
      of: the prompt's proxy rows, and how they are summed.
      interval: while decoding, the proxies are the rows of the last so many steps; 1 is the current row alone.
    """

    of: Observe
    interval: int = 1

    def __post_init__(self):
        settle(self, of=one_a_slot, interval=tokens(1))

    @property
    def _sums(self) -> Sums:
        return Sums(self.of)

    @property
    def _row(self) -> Sums:
        return Sums(dataclasses.replace(self.of, rows=AllRows()))

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Score`."""
        return ((self._sums if phase == "prefill" else self._row).observed,)

    def update(self, slots: Slots) -> Any:
        """Starts anew with the prompt, and with the first step of every interval."""
        memory, stats, ctx = slots.memory, slots.stats, slots.ctx
        if ctx.phase == "prefill":
            return self._sums.new(stats, ctx)
        begins = ((ctx.step - 1) % self.interval == 0).reshape(-1, *(1,) * (memory.ndim - 1))
        new = self._row.new(stats, ctx)
        return jnp.where(begins, 0.0, memory).astype(new.dtype) + new


@dataclasses.dataclass(frozen=True)
class LayerMean(OfScore):
    """Another score, averaged over all kv heads of the layer, so that all of them keep the same tokens.

    Attributes:
      score: what is averaged.
    """

    @property
    def by_head(self) -> bool:
        """See `Score`."""
        return False

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        return mean_over_heads(self.score(slots), slots.kv)


@dataclasses.dataclass(frozen=True)
class ValuePrior(Running):
    r"""Accumulated attention, the prompt's part multiplied by a prior of value norms (AhaKV, arXiv 2506.03762, Eq. 13).

    $\hat F_j = \bar\gamma_j F_j$ with $\gamma = \mathrm{avgpool}(\lVert v\rVert_2^2)$ and $\bar\gamma = \gamma /
    \max \gamma$ over the prompt, for every kv head. While decoding, $\hat F$ grows by every row's attention.

    Attributes:
      of: what is accumulated.
      kernel: width of the pooling, zero padding counted; odd.
      target: what is pooled: the "value_norm" (Eq. 13), the "score" after the prior (Fig. 3), or "both".
      each_step: multiply what decode steps add as well.
    """

    of: Observe
    kernel: int = 7
    target: Literal["value_norm", "score", "both"] = "value_norm"
    each_step: bool = False

    def __post_init__(self):
        settle(self, of=one_a_slot, kernel=kernel_width, each_step=flag)
        one_of("ValuePrior.target", self.target, "value_norm", "score", "both")

    @property
    def _sums(self) -> Sums:
        return Sums(self.of)

    def update(self, slots: Slots) -> Any:
        """See `Score`."""
        memory, kv, stats, ctx = slots.memory, slots.kv, slots.stats, slots.ctx
        new = self._sums.new(stats, ctx)
        memory = memory.astype(new.dtype)
        if ctx.phase == "decode" and not self.each_step:
            return memory + new
        prior = self.prior(kv).astype(new.dtype)

        def with_prior(new: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
            new = new * prior
            return new if self.target == "value_norm" else jnp.where(kv.live, self._pool(new, kv), 0.0)

        return _anew(memory, self.of, ctx) + _by_head(with_prior, new)

    def prior(self, kv: LayerKV) -> Float[Array, "B K S"]:
        """What the attention of the prompt's slots is multiplied by."""
        norm = jnp.square(kv.v.astype(jnp.float32)).sum(-1)
        norm = jnp.where(kv.live, norm if self.target == "score" else self._pool(norm, kv), 0.0)
        return norm / jnp.maximum(norm.max(-1, keepdims=True), jnp.finfo(norm.dtype).tiny)

    def _pool(self, x: Float[Array, "B K S"], kv: LayerKV) -> Float[Array, "B K S"]:
        return pool_in_order(x, kv.pos, kv.live, "avg", self.kernel, "zero")


@dataclasses.dataclass(frozen=True)
class History(Score):
    """How many of the last rows gave a token more than the threshold (Scissorhands, arXiv 2305.17118, Algorithm 2).

    Every slot carries one bit a row of the window, packed into 32-bit words.

    Attributes:
      rows: length of the history window.
      threshold: see `Observe`.
    """

    rows: int = 400
    threshold: float | str = "1/visible"

    def __post_init__(self):
        settle(self, rows=tokens(1, "at least one row must be observed"))
        object.__setattr__(self, "threshold", self.observe("prefill")[0].threshold)

    def _rows(self, site: Site) -> int:
        """The rows that have a bit: no more than there can be."""
        return min(self.rows, site.prompt_len + site.max_new_tokens)

    def observe(self, phase: Phase) -> tuple[Observe]:
        """See `Observer`."""
        del phase
        return (Observe(LastRows(self.rows), element="above", threshold=self.threshold, summed=False),)

    def init(self, site: Site, batch: int) -> UInt32[Array, "B K 0 W"]:
        """See `Score`."""
        return jnp.zeros((batch, site.num_kv_heads, 0, -(-self._rows(site) // 32)), jnp.uint32)

    def update(self, slots: Slots) -> Any:
        """Row `i` of the text owns bit `i % rows`; the new rows overwrite theirs in every slot."""
        memory, stats, ctx = slots.memory, slots.stats, slots.ctx
        above = stats[self.observe(ctx.phase)[0]] > 0  # "B K R S", the last R rows
        rows, fresh = last_rows(above, self._rows(ctx.site), ctx)
        return (memory & ~self._pack(fresh)[:, None, None]) | self._pack(rows)

    def _pack(self, bits: Bool[Array, "*n w"]) -> UInt32[Array, "*n words"]:
        pad = [(0, 0)] * (bits.ndim - 1) + [(0, -bits.shape[-1] % 32)]
        bits = jnp.pad(bits, pad)
        words = bits.reshape(*bits.shape[:-1], bits.shape[-1] // 32, 32).astype(jnp.uint32)
        shifts = jnp.arange(32, dtype=jnp.uint32).reshape((1,) * bits.ndim + (32,))
        return (words << shifts).sum(-1, dtype=jnp.uint32)

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        memory = slots.memory
        return lax.population_count(memory).sum(-1).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Window(Score):
    """Attention received from the last rows of the prompt (SnapKV's votes). Says nothing about generated tokens.

    Attributes:
      rows: how many of the prompt's last rows vote.
      group: how the votes of a group's query heads are combined, before any pooling.
      softmax: another softmax than the model's.
      pool_rows: max-pool every row with this kernel before rows are added (Ada-KV's text, D-23); 1 does not.
    """

    rows: int = 32
    group: Literal["mean", "max", "sum"] = "mean"
    softmax: RowSoftmax | None = None
    pool_rows: int = 1

    def __post_init__(self):
        settle(self, rows=tokens(1, "at least one row must be observed"), pool_rows=kernel_width)
        one_of("Window.group", self.group, *GROUPS)
        self.observe("prefill")  # raises what the votes would raise

    def summands(self, ctx: Context) -> Int[Array, "B"]:
        """See `Score`; fewer rows vote where fewer were read."""
        read = ctx.site.prompt_len if ctx.ids is None else ctx.ids.shape[1]
        return jnp.minimum(ctx.length, min(self.rows, read)) * _heads(self.group, ctx)

    @property
    def decodes(self) -> bool:
        """See `Score`."""
        return False

    @property
    def _votes(self) -> Observe:
        rows = LastRows(self.rows)
        if self.pool_rows > 1:
            return Observe(rows, group=None, softmax=self.softmax, summed=False)
        return Observe(rows, group=self.group, softmax=self.softmax)

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Score`."""
        return (self._votes,) if phase == "prefill" else ()

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        kv, stats, candidates = slots.kv, slots.stats, slots.candidates
        votes = stats[self._votes]
        if self.pool_rows == 1:
            return votes
        B, N, R, S = votes.shape
        K = kv.pos.shape[1]
        repeated = lambda x: jnp.repeat(x, R * N // K, axis=1)
        pooled = pool_in_order(
            votes.reshape(B, N * R, S), repeated(kv.pos), repeated(candidates), "max", self.pool_rows, "zero"
        )
        by_head = pooled.reshape(B, K, N // K, R, S).sum(3)
        return {"mean": jnp.mean, "max": jnp.max, "sum": jnp.sum}[self.group](by_head, axis=2)


@dataclasses.dataclass(frozen=True)
class RecentRows(Score):
    """The mean attention of the last rows, prompt and decode alike, each over what the cache then held (R-KV).

    Every slot carries what each of the last rows gave it. A row that was read before a token came gave it nothing.

    Attributes:
      rows: how many rows.
      group: how the query heads of a kv head are combined, row by row.
      softmax: another softmax than the model's.
    """

    rows: int = 8
    group: Literal["mean", "max", "sum"] = "mean"
    softmax: RowSoftmax | None = None

    def __post_init__(self):
        settle(self, rows=tokens(1, "at least one row must be observed"))
        one_of("RecentRows.group", self.group, *GROUPS)
        self.observe("prefill")  # raises what the rows would raise

    def summands(self, ctx: Context) -> int:
        """See `Score`."""
        return _heads(self.group, ctx)

    def _rows(self, site: Site) -> int:
        """The rows that have a place: no more than there can be."""
        return min(self.rows, site.prompt_len + site.max_new_tokens)

    def observe(self, phase: Phase) -> tuple[Observe]:
        """See `Observer`."""
        del phase
        return (Observe(LastRows(self.rows), group=self.group, softmax=self.softmax, summed=False),)

    def init(self, site: Site, batch: int) -> Float[Array, "B K 0 W"]:
        """See `Score`."""
        return jnp.zeros((batch, site.num_kv_heads, 0, self._rows(site)), jnp.float32)

    def update(self, slots: Slots) -> Any:
        """Row `i` of the text owns place `i % rows`; the new rows overwrite theirs in every slot."""
        memory, ctx = slots.memory, slots.ctx
        new = slots.stats[self.observe(ctx.phase)[0]].astype(jnp.float32)  # "B K R S", the last R rows
        rows, fresh = last_rows(new, self._rows(ctx.site), ctx)
        return jnp.where(fresh[:, None, None], rows, memory)

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        read = jnp.minimum(slots.ctx.length, self.rows).astype(jnp.float32)
        return slots.memory.sum(-1) / read[:, None, None]


def last_rows(new: Array, num_rows: int, ctx: Context) -> tuple[Array, Bool[Array, "B W"]]:
    """The rows just computed in the places that they own: row `i` of the text place `i % num_rows`.

    Args:
      new: "B K R S", of the last R rows of every sequence.
      num_rows: how many places there are, W.
      ctx: the moment.

    Returns:
      "B K S W", and which places have a new owner; 0 in the others.
    """
    R = new.shape[2]
    place = jnp.arange(num_rows, dtype=jnp.int32)[None]
    ago = (ctx.length[:, None] - 1 - place) % num_rows  # how long ago the row that owns a place was read
    fresh = (ago < R) & (ago < ctx.length[:, None])
    rows = jnp.take_along_axis(new, jnp.maximum(R - 1 - ago, 0)[:, None, :, None], axis=2)
    rows = jnp.where(fresh[:, None, :, None], rows, jnp.zeros((), new.dtype))
    return rows.swapaxes(2, 3), fresh


@dataclasses.dataclass(frozen=True)
class LastRow(Score):
    """Attention received from the newest row alone (TOVA, arXiv 2401.06104). Nothing is accumulated.

    Attributes:
      head_mode: "layer_mean" averages over all query heads of the layer, so that all heads keep the same tokens;
        "per_kv_head" averages within each kv head's group (D-09).
    """

    head_mode: Literal["layer_mean", "per_kv_head"] = "layer_mean"

    def __post_init__(self):
        one_of("head_mode", self.head_mode, "layer_mean", "per_kv_head")

    @property
    def by_head(self) -> bool:
        """See `Score`."""
        return self.head_mode == "per_kv_head"

    @property
    def _row(self) -> Observe:
        return Observe(LastRows(1))

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Observer`."""
        del phase
        return (self._row,)

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        row = slots.stats[self._row]
        return row if self.head_mode == "per_kv_head" else mean_over_heads(row, slots.kv)


@jax.jit
def mean_over_heads(row: Float[Array, "B K S"], kv: LayerKV) -> Float[Array, "B K S"]:
    """The mean over all kv heads of what a token received; a head that no longer holds it gave it nothing."""
    B, K, S = row.shape

    def by_slot(row):
        return jnp.broadcast_to(row.mean(1, keepdims=True), row.shape)

    def by_position(row):
        return (_sum_by_position(row.reshape(B, K * S), kv.pos.reshape(B, K * S)) / K).reshape(B, K, S)

    return lax.cond((kv.pos == kv.pos[:, :1]).all(), by_slot, by_position, row)


@dataclasses.dataclass(frozen=True)
class Pooled(OfScore):
    """Another score, pooled over neighbouring candidates so that tokens are kept with their surroundings.

    Neighbours are neighbours in position among the candidates of a head, wherever their slots are. Stride 1.

    Attributes:
      score: what is pooled.
      kind: "max", or "avg".
      kernel: odd width.
      avg_pad: at the edges, "zero" divides by the kernel all the same (as PyTorch does), "valid_count" by the number
        of candidates under it (D-49).
    """

    kind: Literal["max", "avg"] = "max"
    kernel: int = 7
    avg_pad: Literal["zero", "valid_count"] = "zero"

    def __post_init__(self):
        settle(self, score=a(Score), kernel=kernel_width)
        one_of("Pooled.kind", self.kind, "max", "avg")
        one_of("Pooled.avg_pad", self.avg_pad, "zero", "valid_count")

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        kv, candidates = slots.kv, slots.candidates
        score = self.score(slots)
        return pool_in_order(score, kv.pos, candidates, self.kind, self.kernel, self.avg_pad)


def pool_in_order(
    score: Float[Array, "B K S"],
    pos: Int[Array, "B K S"],
    candidates: Bool[Array, "B K S"],
    kind: str,
    kernel: int,
    avg_pad: str,
) -> Float[Array, "B K S"]:
    """Pools scores over neighbours in position among the candidates; see `Pooled`."""
    if kernel == 1:
        return score
    order = position_order(jnp.where(candidates, pos, -1))  # candidates are adjacent, in order, at the end
    inside = jnp.take_along_axis(candidates, order, axis=-1)
    x = jnp.take_along_axis(score, order, axis=-1)
    if kind == "max":
        pooled = _slide(jnp.where(inside, x, -jnp.inf), kernel, -jnp.inf, lax.max)
    else:
        pooled = _slide(jnp.where(inside, x, 0.0), kernel, 0.0, lax.add)
        count = jnp.asarray(kernel, x.dtype)
        if avg_pad == "valid_count":
            count = jnp.maximum(_slide(inside.astype(x.dtype), kernel, 0.0, lax.add), 1.0)
        pooled = pooled / count
    return jnp.put_along_axis(score, order, pooled, axis=-1, inplace=False)


def _slide(x: Float[Array, "B K S"], kernel: int, init: float, combine: Callable) -> Float[Array, "B K S"]:
    """Stride-1 window reduction, padded with `init` on both sides.

    A wide kernel is put together from windows of 1, 2, 4, ... slots, and none is wider than reaches every slot.
    """
    S = x.shape[-1]
    half = min(kernel // 2, max(S - 1, 0))
    kernel = 2 * half + 1
    x = jnp.pad(x, ((0, 0), (0, 0), (half, half)), constant_values=init)
    if kernel <= _ONE_BY_ONE:
        result = x[..., :S]
        for i in range(1, kernel):
            result = combine(result, x[..., i : i + S])
        return result
    result, start, width = jnp.full((*x.shape[:-1], S), init, x.dtype), 0, 1
    while width <= kernel:
        if kernel & width:
            result, start = combine(result, x[..., start : start + S]), start + width
        x, width = combine(x[..., :-width], x[..., width:]), 2 * width
    return result


_ONE_BY_ONE = 64  # up to this many slots are combined one after another


@dataclasses.dataclass(frozen=True)
class FromFunction(Score):
    """A function of the cache and its statistics; what `from_fn` makes of a researcher's lambda.

    Attributes:
      fn: `(kv, stats, ctx) -> "B K S"`. Functions compare by what they compute (`kvjax.functions`).
      observed: the statistics it reads, in every phase.
    """

    fn: Callable[[LayerKV, LayerStats, Context], Float[Array, "B K S"]]
    observed: tuple[Measurement, ...] = ()

    def __post_init__(self):
        settle(self, fn=by_code, observed=each(a(Measurement)))

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Observer`."""
        del phase
        return self.observed

    @property
    def timed(self) -> bool:
        """True: a function cannot say that it does not look at `ctx.site.max_new_tokens`."""
        return True

    @property
    def apart(self) -> bool:
        """False: a function cannot say that it does not look at other heads."""
        return False

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`.

        Raises:
          ValueError: the function returns no real number for every slot.
        """
        kv, stats, ctx = slots.kv, slots.stats, slots.ctx
        score = self.fn(kv, stats, ctx)
        here = f"an array of {getattr(score, 'dtype', '?')} of shape {getattr(score, 'shape', '?')}"
        given = here if hasattr(score, "shape") else repr(score)
        real = is_array(score) and jnp.issubdtype(score.dtype, jnp.number) and score.dtype.kind != "c"
        if not real or score.shape != kv.pos.shape:
            raise ValueError(
                f"{self.fn} returned {given}; return real numbers of shape {kv.pos.shape}, one a slot, by jax.numpy"
            )
        return jnp.asarray(score)
