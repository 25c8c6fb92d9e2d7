"""What a policy asks to see of a layer's attention, and what it is given."""

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.context import Context, Phase, Site
from kvjax.cache.state import LayerKV, PerHead, Rotate, Slopes
from kvjax.pallas_kernels import Columns, Softmax
from kvjax.pallas_kernels.pytree import pytree, static
from kvjax.pallas_kernels.values import Value, a, each, flag, number, one_of, optional, settle, tokens
from kvjax.scoring.replay import Replay
from kvjax.sizes.budget import Count, Tokens, as_count, counted_rows, lookup


@dataclasses.dataclass(frozen=True)
class Moment:
    """All that is at hand when a layer has stored its new tokens.

    Attributes:
      q: queries as they meet the keys (rotated). raw_q: before rotation.
      kv: the cache with the new tokens.
      pos: absolute positions of the new tokens, EMPTY for padding.
      ctx: where and when.
      rotate: the layer's rotary embedding.
      out_proj: the layer's output projection "N H D", where the model gives it.
      hidden: what the new tokens' queries, keys and values are projections of, where the model gives it: the residual
        stream, normalised where the model normalises it before attention.
      scale, window, softcap: how the layer attends, as in `pallas_kernels.attention`.
      slopes: those of ALiBi, None without it.
      measured: the column statistics that were asked for beside a measurement which is none.
    """

    q: Float[Array, "B N T H"]
    raw_q: Float[Array, "B N T H"]
    kv: LayerKV
    pos: Int[Array, "B T"]
    ctx: Context
    rotate: Rotate
    out_proj: Float[Array, "N H D"] | None = None
    hidden: Float[Array, "B T D"] | None = None
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    slopes: Slopes | None = None
    measured: Mapping["Measurement", Array] = dataclasses.field(default_factory=dict)

    @property
    def bias(self) -> Float[Array, "B N S"] | None:
        """What is added to the logits of every slot, as in `pallas_kernels.attention`; gates are not part of it."""
        return None if self.slopes is None else self.kv.bias(self.slopes)


# --- which rows ---


class RowSet(Value, abc.ABC):
    """A frozen dataclass that chooses among the query rows just computed."""

    @abc.abstractmethod
    def select(
        self, num_rows: int, pos: Int[Array, "B T"], ctx: Context
    ) -> tuple[int | None, Float[Array, "B T"] | None]:
        """(only the last so many rows can count, weights of the rows); None where all do."""


@dataclasses.dataclass(frozen=True)
class AllRows(RowSet):
    """Every query row just computed: the whole prompt, or the one row of a decode step."""

    def select(self, num_rows, pos, ctx):
        """See `RowSet`."""
        del num_rows, pos, ctx
        return None, None


@dataclasses.dataclass(frozen=True)
class LastRows(RowSet):
    """The last `n` tokens of every sequence among the query rows just computed.

    Attributes:
      n: tokens (int), a share of the prompt (float), or another count.
    """

    n: int | float | Count

    def __post_init__(self):
        settle(self, n=counted_rows)
        if self.n == Tokens(0):
            raise ValueError("LastRows(n=0): at least one row must be observed")

    def select(self, num_rows, pos, ctx):
        """See `RowSet`."""
        if isinstance(self.n, Tokens):
            return min(self.n.n, num_rows), None
        lengths = np.arange(ctx.site.prompt_len + 1)
        table = np.maximum(as_count(self.n, "LastRows.n").table(lengths, lengths), 1)
        most = min(int(table.max()), num_rows)
        if most == 1:
            return 1, None
        first = ctx.length - lookup(table, ctx.prompt_length)
        return most, (pos >= first[:, None]).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class LastRowsByLength(LastRows):
    """The last `n` tokens, each counted as many times as there are tokens before it.

    A row's mean attention falls with the number of keys that share it; so weighted, rows of all lengths count alike
    (FINCH, TACL 12, 2024, section 3.3).
    """

    def select(self, num_rows, pos, ctx):
        """See `RowSet`."""
        rows, weight = super().select(num_rows, pos, ctx)
        before = jnp.maximum(pos, 0).astype(jnp.float32)
        return rows, before if weight is None else before * weight


@dataclasses.dataclass(frozen=True)
class RowsFrom(RowSet):
    """Every row at position `first` or later."""

    first: int

    def __post_init__(self):
        settle(self, first=tokens())

    def select(self, num_rows, pos, ctx):
        """See `RowSet`."""
        del num_rows, ctx
        return None, (pos >= self.first).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class FirstAndLastRows(RowSet):
    """The first and the last tokens of a prompt: where a question stands if nobody says (NaCl, section 3.2).

    While decoding, the row itself.

    Attributes:
      first, last: tokens (int), a share of the prompt (float), or another count.
    """

    first: int | float | Count
    last: int | float | Count

    def __post_init__(self):
        settle(self, first=counted_rows, last=counted_rows)

    def select(self, num_rows, pos, ctx):
        """See `RowSet`."""
        del num_rows
        if ctx.phase == "decode":
            return None, None
        lengths = np.arange(ctx.site.prompt_len + 1)
        count = lambda x: lookup(as_count(x, "rows").table(lengths, lengths), ctx.prompt_length)[:, None]
        inside = (pos < count(self.first)) | (pos >= ctx.prompt_length[:, None] - count(self.last))
        return None, inside.astype(jnp.float32)


# --- which softmax ---


class RowSoftmax(Value, abc.ABC):
    """A frozen dataclass: a softmax that ranks tokens, while the attention output keeps the model's."""

    @abc.abstractmethod
    def kernel(self, moment: Moment) -> Softmax:
        """What the kernels compute."""

    @property
    def timed(self) -> bool:
        """Whether it depends on how many tokens the run is planned for (`Site.max_new_tokens`)."""
        return False


@dataclasses.dataclass(frozen=True)
class EntropyScaled(RowSoftmax):
    r"""Logits scaled so that every row has the entropy of `k` tokens (AhaKV's SG-softmax, arXiv 2506.03762, Eq. 12).

    A row that sees $i$ tokens has its raw dot products multiplied by $\sqrt{2 \ln(i / k) / d}$ in place of
    $1/\sqrt d$. Rows with $i \le k$ keep the standard softmax.

    Attributes:
      k: tokens, usually the budget: an int, a share of the prompt (float) or a count.
      apply: "raw" scales raw dot products (the derivation), "scaled" those already divided by $\sqrt d$ (the paper's
        Algorithm 1 as printed, D-28).
      floor: a lower bound of the factor relative to the standard softmax, None for none (D-29).
      count: `i` is the row's "position" + 1, or the live tokens in the "cache" (D-32).
    """

    k: int | float | Count
    apply: Literal["raw", "scaled"] = "raw"
    floor: float | None = None
    count: Literal["position", "cache"] = "position"

    def __post_init__(self):
        settle(
            self,
            k=counted_rows,
            floor=optional(number("[0, inf)", "a lower bound of a factor is finite, not negative")),
        )
        one_of("EntropyScaled.apply", self.apply, "raw", "scaled")
        one_of("EntropyScaled.count", self.count, "position", "cache")

    def kernel(self, moment):
        """See `RowSoftmax`."""
        ctx, kv = moment.ctx, moment.kv
        lengths = np.arange(ctx.site.prompt_len + 1)
        k = lookup(np.maximum(as_count(self.k, "k").table(lengths, lengths), 1), ctx.prompt_length)
        seen = jnp.broadcast_to(moment.pos[:, None] + 1, (*kv.pos.shape[:2], moment.pos.shape[1]))
        if self.count == "cache":
            seen = jnp.minimum(seen, kv.num_live[..., None])
        ratio = seen.astype(jnp.float32) / k[:, None, None].astype(jnp.float32)
        factor = jnp.sqrt(2.0 * jnp.log(jnp.maximum(ratio, 1.0)))
        factor = factor * ctx.site.head_dim**-0.5 if self.apply == "scaled" else factor
        factor = factor if self.floor is None else jnp.maximum(factor, self.floor)
        return Softmax(multiplier=jnp.where(ratio > 1, factor, 1.0))


@dataclasses.dataclass(frozen=True)
class Noisy(RowSoftmax):
    r"""$\mathrm{softmax}((x + \zeta) / \tau_t)$ (Keyformer, arXiv 2403.09054, Eq. 8 to 10).

    $\tau_t = \tau_{init} + t (\tau_{end} - \tau_{init}) / T$ with $t = 0$ for the whole prompt and $T$ the run's new
    tokens.

    Attributes:
      noise: "gumbel", "gaussian" or "constant" of the same mean and deviation, or "none". A constant cannot change a
        softmax (D-38).
      per: "call" draws for every (row, key) as the released code does, "key" once for every key as Algorithm 1 (D-33).
      tau: temperatures at the prompt and after the last new token.
      tau_delta: temperature per decode step, in place of `(tau[1] - tau[0]) / T` (D-34).
    """

    noise: Literal["gumbel", "gaussian", "constant", "none"] = "gumbel"
    per: Literal["call", "key"] = "call"
    tau: tuple[float, float] = (1.0, 2.0)
    tau_delta: float | None = None

    def __post_init__(self):
        one_of("Noisy.noise", self.noise, "gumbel", "gaussian", "constant", "none")
        one_of("Noisy.per", self.per, "call", "key")
        settle(
            self,
            tau=each(number("(0, inf)", "temperatures must be positive"), 2),
            tau_delta=optional(number("[0, inf)", "a step below 0 ends at temperatures that are negative")),
        )

    @property
    def timed(self) -> bool:
        """True where the last temperature comes with the last token."""
        return self.tau_delta is None and self.tau[0] != self.tau[1]

    def kernel(self, moment):
        """See `RowSoftmax`."""
        ctx = moment.ctx
        delta = (self.tau[1] - self.tau[0]) / max(ctx.site.max_new_tokens, 1)
        delta = delta if self.tau_delta is None else self.tau_delta
        tau = self.tau[0] + delta * ctx.step.astype(jnp.float32)[:, None, None]
        shape = (*moment.kv.pos.shape[:2], moment.pos.shape[1])
        drawn = self.noise in ("gumbel", "gaussian")
        return Softmax(
            multiplier=jnp.broadcast_to(1.0 / tau, shape),
            seed=ctx.seed if drawn else None,
            noise=None if self.noise == "none" else self.noise,
            per=self.per,
        )


@dataclasses.dataclass(frozen=True)
class SeesAll(RowSoftmax):
    """No causal mask: rows see later keys too (the released code of NaCl, D-18)."""

    def kernel(self, moment):
        """See `RowSoftmax`."""
        del moment
        return Softmax(causal=False)


@dataclasses.dataclass(frozen=True)
class OutsideWindow(RowSoftmax):
    """Over the keys before the last `window_size` tokens only (Ada-KV's text, D-24)."""

    window_size: int

    def __post_init__(self):
        settle(self, window_size=tokens())

    def kernel(self, moment):
        """See `RowSoftmax`."""
        return Softmax(before=moment.ctx.length - self.window_size)


# --- what is measured ---


class Measurement(Value):
    """A frozen dataclass that names something a policy wants to see. It is the key to it in `LayerStats`."""

    def columns(self, moment: Moment) -> Columns | None:
        """The column statistic to take along with attention, None if it is none."""
        del moment
        return None

    def measure(self, moment: Moment) -> Any:
        """The value, for measurements that are not column statistics."""
        raise NotImplementedError(f"{self} is measured along with attention")

    @property
    def timed(self) -> bool:
        """Whether it depends on how many tokens the run is planned for (`Site.max_new_tokens`)."""
        return False

    @property
    def sees_hidden(self) -> bool:
        """Whether it looks at hidden states (`Moment.hidden`), which drivers keep for those alone that do."""
        return False

    @property
    def again(self) -> Replay | None:
        """How a prompt is read again for it, where it measures rows that are no part of the prompt; else None.

        Such a measurement is one number a slot "B K S", not negative, of which the largest over all chunks is taken.
        """
        return None

    def scratch(self, site: Site, batch: int, rows: int) -> int:
        """About how many bytes measuring takes for a while, beside what it finds, for so many rows a sequence."""
        del site, batch, rows
        return 0


@dataclasses.dataclass(frozen=True)
class Observe(Measurement):
    """One column statistic: for every key, the sum over `rows` of an element function of the attention probability.

    Attributes:
      rows: which query rows count. Padding rows never do.
      element: "p", "p2" (squared) or "above" (counts of `p > threshold`, strict).
      threshold: for "above": a number, "1/visible" or "1/position".
      group: how the query heads of a kv head become one: "mean", "max", "sum"; None asks for every query head. The
        largest of sums over all rows so far needs each head's own from step to step (`Sums`).
      group_at: "before" or "after" the element function and the row sum. They differ for squares,
        thresholds and max; None means "before" for squares and thresholds, "after" for the rest.
      softmax: another softmax than the model's.
      count_self: False leaves out what a token gives itself.
      summed: False asks for the rows instead of their sum, "B K R S"; for few rows only.
    """

    rows: RowSet = AllRows()
    element: Literal["p", "p2", "above"] = "p"
    threshold: float | str = "1/visible"
    group: Literal["mean", "max", "sum"] | None = "mean"
    group_at: Literal["before", "after"] | None = None
    softmax: RowSoftmax | None = None
    count_self: bool = True
    summed: bool = True

    def __post_init__(self):
        settle(self, rows=a(RowSet), softmax=optional(a(RowSoftmax)), count_self=flag, summed=flag)
        one_of("element", self.element, "p", "p2", "above")
        one_of("group_at", self.group_at, None, "before", "after")
        object.__setattr__(self, "threshold", self._static().threshold)  # raises what the kernels would raise

    def _static(self) -> Columns:
        linear = self.element == "p" or self.group is None
        at = ("after" if linear else "before") if self.group_at is None else self.group_at
        return Columns(None, self.element, self.threshold, self.group, at, self.count_self, self.summed)

    @property
    def timed(self) -> bool:
        """See `Measurement`."""
        return self.softmax is not None and self.softmax.timed

    def columns(self, moment: Moment) -> Columns:
        """The kernel request."""
        rows, weight = self.rows.select(moment.pos.shape[1], moment.pos, moment.ctx)
        softmax = None if self.softmax is None else self.softmax.kernel(moment)
        return dataclasses.replace(self._static(), rows=rows, weight=weight, softmax=softmax)


@dataclasses.dataclass(frozen=True)
class Sums(Value):
    """A column statistic that adds up from step to step, to the same numbers in however many pieces text is read.

    The largest of a group's sums is no sum of anything: under `group="max"` every query head keeps its own.

    Attributes:
      of: what adds up.
    """

    of: Observe

    @property
    def _apart(self) -> bool:
        return self.of.group == "max" and self.of._static().group_at == "after"

    @property
    def observed(self) -> Observe:
        """What must be measured."""
        return dataclasses.replace(self.of, group=None) if self._apart else self.of

    def init(self, site: Site, batch: int) -> Float[Array, "B K 0 *G"]:
        """The sums of a layer without slots."""
        heads = (site.num_query_heads // site.num_kv_heads,) if self._apart else ()
        return jnp.zeros((batch, site.num_kv_heads, 0, *heads), jnp.float32)

    def new(self, stats: "LayerStats", ctx: Context) -> Float[Array, "B K S *G"]:
        """What the rows just computed add."""
        rows = stats[self.observed]
        if not self._apart:
            return rows
        B, N, S = rows.shape
        K = ctx.site.num_kv_heads
        return rows.reshape(B, K, N // K, S).swapaxes(2, 3)

    def largest(self, sums: Float[Array, "B K S *G"]) -> Float[Array, "B K S"]:
        """The group's sums."""
        return sums.max(-1) if self._apart else sums


def check_memory(owner: Any, memory: Any, slots: tuple[int, ...], of: str) -> None:
    """Raises ValueError for numbers that belong neither to slots nor to heads.

    Args:
      owner: who carries them.
      memory: arrays, or what has their shapes.
      slots: the shape "B K S" of the layer's slots.
      of: which function they come from.
    """
    for x in jax.tree.leaves(memory, is_leaf=lambda x: isinstance(x, PerHead)):
        wanted, found = slots[: 2 if isinstance(x, PerHead) else 3], np.shape(getattr(x, "value", x))
        if found[: len(wanted)] != wanted:
            axes = "(batch, kv heads, ...)" if isinstance(x, PerHead) else "(batch, kv heads, slots, ...)"
            raise ValueError(
                f"{owner} remembers an array of shape {found} ({of}), which should begin with {wanted} {axes}: it has "
                'an entry a slot, "B K S ...", 0 slots in init; a number of a head is a kvjax.cache.state.PerHead'
            )


class Observer(Value):
    """What looks on at every step: it lists what must be measured, and owns the numbers it carries."""

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """The statistics that are read in this phase."""
        del phase
        return ()

    def init(self, site: Site, batch: int) -> Any:
        """The numbers for a layer without slots: arrays "B K 0 ...", or `PerHead` arrays "B K ..."."""
        del site, batch
        return ()

    def update(self, slots: "Slots") -> Any:
        """The numbers after the rows just computed. Called at every step, whether or not eviction is due."""
        return slots.memory

    @property
    def timed(self) -> bool:
        """Whether it depends on how many tokens the run is planned for: by default, whether what it reads does."""
        return any(m.timed for m in (*self.observe("prefill"), *self.observe("decode")))


@pytree
class LayerStats:
    """The statistics of one layer, indexed by what was asked: `stats[Observe(...)]`, usually "B K S"."""

    values: tuple[Any, ...] = ()
    observed: tuple[Measurement, ...] = static(default=())

    def __getitem__(self, observe: Measurement) -> Any:
        if observe not in self.observed:
            raise ValueError(
                f"{observe} was not measured; the model measured {list(self.observed) or 'nothing'}. "
                "A score must list in observe(phase) all it reads"
            )
        return self.values[self.observed.index(observe)]


@pytree
class Slots:
    """The slots of a layer at one moment, as scores, scopes and selections see them.

    Attributes:
      kv: the layer.
      stats: its statistics of the rows just computed.
      ctx: the moment.
      candidates: live slots that are not protected by position; all live ones while nothing is to be chosen.
      memory: what the one who looks has carried so far.
    """

    kv: LayerKV
    stats: LayerStats
    ctx: Context
    candidates: Bool[Array, "B K S"]
    memory: Any = ()

    def of(self, memory: Any) -> "Slots":
        """The same slots as another one sees them."""
        return dataclasses.replace(self, memory=memory)


@pytree
class AttentionStats:
    """The statistics of all layers, the phase they were measured in, and the ids of the rows' tokens."""

    layers: tuple[LayerStats, ...]
    phase: Phase = static()
    tokens: Int[Array, "B T"] | None = None


def ordered(observes: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """Requests without duplicates, in an order that does not depend on hashing."""
    return tuple(sorted(set(observes), key=repr))
