"""The policy that most published methods are: a score, a budget, and what may not be evicted."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.context import Context, Phase, Site
from kvjax.cache.state import Chosen, LayerKV, PerHead, Positions
from kvjax.pallas_kernels.pytree import is_known, pytree
from kvjax.pallas_kernels.values import MOST_TOKENS, Value, a, checked, each, one_of, optional, settle
from kvjax.policy import Granularity, LayerSpec, Layout, Rule, check_init, on_devices
from kvjax.scoring.protect import Protect, Scope, protected
from kvjax.scoring.scores import FromFunction, Recency, Score
from kvjax.scoring.select import Limits, Select, Selection, TopK, check_plain
from kvjax.scoring.stats import LayerStats, Measurement, Moment, Slots, check_memory, ordered
from kvjax.sizes.allocation import HeadAllocation, LayerAllocation, UniformHeads, UniformLayers
from kvjax.sizes.budget import Count, Counts, GivenCounts, RuleSizes, Tokens, as_budget, as_count, lookup, narrow
from kvjax.sizes.schedule import Schedule
from kvjax.sizes.tables import Tables, Wanted, tables

LARGE = 1e38  # what infinite scores become: protection and death stay beyond them


class Mask(Value, abc.ABC):
    """A frozen dataclass that hides live slots from a decode row. A rule that carries numbers for it is a `Rule`."""

    @abc.abstractmethod
    def __call__(self, moment: Moment) -> Bool[Array, "B K S"] | Chosen:
        """What the newest token may read of a cache that holds it, by its queries or without them."""


@dataclasses.dataclass(frozen=True)
class Evict(Rule):
    """Keeps the best-scored tokens within a budget: the composition that nearly every published method is.

    Attributes:
      score: ranks tokens.
      budget: live tokens a kv head and layer, on average, protected ones included: a number of tokens (int) or a share
        of the prompt (float). In a layer with a sliding window, tokens that no row to come can read go first.
      protect: tokens that are never evicted. A prompt of which the budget is a share that cannot hold what must stay
        (by `protect`, `scope`, for the token to come, or to drop so many at once) is too short to be evicted from: it
        is kept whole in all layers, and its budget is its length, or what must stay if that is more. A number of tokens
        that holds less than what must stay is refused, and so is a share that could not hold it of any prompt.
      layers: how the budget is divided over layers. Protected tokens come first; what is left of the budget is divided.
      heads: how a layer's budget is divided over its kv heads, again after protection: at the first eviction, whenever
        it comes. Until then nothing is taken from any head; after it, heads keep their shares. In a pool, a member of
        a chain whose earlier members left less of a prompt than its budget keeps the shares that it had then.
      when: the schedule.
      select: how scores and budgets become a `Selection`.
      scope: tokens protected by what they did, such as RoCo's top standard deviations; they count against the budget.
      positions: how keys are rotated: "original" at their absolute positions, "compact" by rank among live keys at
        every use, "rerotate" once to that rank when an eviction changes it. Where logits fall with distance instead
        (ALiBi), these are the places between which distances are counted.
      granularity: "kv_head" evicts for every kv head; "query_head" stores keys and values for every query head, each
        with a set of its own, in a cache that is G times larger (what most released code does).
      mask: hides live slots from decode rows.
      storage: "dense" allocates every head the slots of the largest, "pool" the layer what its heads need together.
    """

    score: Score
    budget: int | float | Count
    protect: Protect = Protect()
    layers: LayerAllocation = UniformLayers()
    heads: HeadAllocation = UniformHeads()
    when: Schedule = Schedule()
    select: Select = TopK()
    scope: Scope | None = None
    positions: Positions = "original"
    granularity: Granularity = "kv_head"
    mask: Mask | None = None
    storage: Layout = "dense"

    def __post_init__(self):
        object.__setattr__(self, "budget", as_budget(self.budget))
        settle(self, score=a(Score), protect=a(Protect), layers=a(LayerAllocation), heads=a(HeadAllocation))
        settle(self, when=a(Schedule), select=a(Select), scope=optional(a(Scope)), mask=optional(a(Mask)))
        _check_parts(self)

    def _needed(self, phase: Phase) -> tuple[Measurement, ...]:
        """What score, scope and selection look at."""
        scope = () if self.scope is None else self.scope.observe(phase)
        return ordered((*self.score.observe(phase), *scope, *self.select.observe(phase)))

    @property
    def _timed(self) -> bool:
        looks = (*self._needed("prefill"), *self._needed("decode"))
        return self.score.timed or (self.scope is not None and self.scope.timed) or any(m.timed for m in looks)

    def _sizes(self, site: Site) -> Tables:
        first, size = (0, 0) if self.scope is None else (self.scope.first, self.scope.size)
        wanted = Wanted(
            as_budget(self.budget),
            as_count(self.protect.sinks, "sinks"),
            as_count(self.protect.recent, "recent"),
            as_count(first, "size"),
            as_count(size, "size"),
            as_count(self.when.drop, "drop"),
            self.layers,
            int(self.when.before_append),
        )
        return tables(wanted, site.num_layers, site.prompt_len, site.max_new_tokens)

    def spec(self, site: Site) -> LayerSpec:
        """See `Rule`."""
        if self.granularity == "query_head":
            site = dataclasses.replace(site, num_kv_heads=site.num_query_heads)
        slots = self._sizes(site).slots(
            site,
            self.heads,
            room=self.when.room(site.max_new_tokens),
            slack=self.select.slack,
            prefill=self.when.prefill,
            pooled=self.storage == "pool",
            decodes=self._remembers_heads,
        )
        return LayerSpec(
            *slots,
            prompt=self._needed("prefill") if self.when.prefill or self.when.decodes else (),
            step=self._needed("decode") if self.when.decodes else (),
            heads=self.granularity,
            positions=self.positions,
            storage=self.storage,
            reads="whole" if any(m.again is not None for m in self._needed("prefill")) else "blocks",
            gates=self.select.relaxed,
            hides=None if self.mask is None else "visible",
            timed=self._timed,
            finite=self.select.finite,
            first=self._first(site),
        )

    def _first(self, site: Site) -> int | None:
        """The most first tokens that are kept, where all that is ever kept is those and the last ones; else None.

        So it is where the score is recency alone, equal scores (of positions beyond the precision of floats) go by age,
        and nothing but its position protects a token. Sizes that cannot hold what is protected are refused.
        """
        by_age = type(self.score) is Recency and self.select == TopK("evict_older")
        if not by_age or self.scope is not None or not isinstance(self.heads, UniformHeads):
            return None
        return int(self._sizes(site).sinks.max())

    def reserve(self, kv: LayerKV, ctx: Context) -> Int[Array, "B K"]:
        """See `Rule`."""
        site = ctx.site
        kept, room = kv.num_live, self.when.room(site.max_new_tokens)
        if self.when.decodes:
            each = self._each(kv.memory, ctx)
            if kv.memory.shares is not None:
                later = self._later(ctx) + self._outside(*self._now(ctx))[:, None]
                each = jnp.where(kv.memory.shares.value < 0, jnp.maximum(each, later), each)
            kept = jnp.maximum(each + self.select.slack, kept)
        return jnp.minimum(kept + room, (ctx.prompt_length + site.max_new_tokens)[:, None])

    def check(self, site: Site, prompt_length: int) -> None:
        """See `Rule`."""
        self.score.check(site)
        for part in (self.score, self.scope, self.select):
            if part is not None:
                check_init(part, dataclasses.replace(site, layer=0))
        _check_sizes(self, self._sizes(site), site, prompt_length)

    @property
    def by_head(self) -> bool:
        """See `Rule`."""
        return self.score.by_head and self.select.by_head and isinstance(self.heads, UniformHeads)

    @property
    def apart(self) -> bool:
        """See `Rule`."""
        return self.by_head and self.score.apart

    @property
    def _remembers_heads(self) -> bool:
        return self.when.decodes and not isinstance(self.heads, UniformHeads)

    def safe(self, kv: LayerKV, ctx: Context) -> Bool[Array, "B K S"]:
        """The slots that are protected by position."""
        _, sinks, recent = self._now(ctx)
        return protected(kv.pos, ctx.length, sinks, recent)

    def init(self, site: Site, batch: int) -> "EvictMemory":
        """See `Rule`."""
        shares = PerHead(jnp.full((batch, site.num_kv_heads), -1, jnp.int32)) if self._remembers_heads else None
        scope = () if self.scope is None else self.scope.init(site, batch)
        unscored = PerHead(jnp.zeros((batch, site.num_kv_heads), bool))
        return EvictMemory(self.score.init(site, batch), scope, shares, self.select.init(site, batch), unscored)

    def under(self, schedule: Schedule) -> "Evict":
        """See `Rule`."""
        return dataclasses.replace(self, when=schedule)

    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[Any, Selection | None]:
        """See `Rule`."""
        if ctx.phase == "decode" and not self.when.decodes:
            return kv.memory, None
        memory: EvictMemory = kv.memory
        memory = self.updated(memory, kv, stats, ctx)
        if ctx.phase == "prefill":
            if not self.when.prefill:
                return memory, None
            selection, found = self._select(dataclasses.replace(memory, shares=None), kv, stats, ctx)
            if memory.shares is not None:
                memory = dataclasses.replace(
                    memory, shares=PerHead(self._at_prompt(memory.shares.value, found, kv, ctx))
                )
            return self.noted(memory, kv, ctx, selection), selection
        if self.when.before_append:
            return memory, None
        selection, shares = self._scheduled_select(memory, kv, stats, ctx)
        return _sharing(memory, shares), selection

    def compete(self, kv: LayerKV, ctx: Context) -> Bool[Array, "B K S"]:
        """The slots whose score decides whether they stay."""
        return kv.live & ~self.safe(kv, ctx)

    def noted(
        self,
        memory: "EvictMemory",
        kv: LayerKV,
        ctx: Context,
        selection: Selection,
        decides: Bool[Array, "B 1"] | None = None,
    ) -> "EvictMemory":
        """The memory with the heads of which a prompt's tokens went by scores none of which is a number.

        Args:
          memory, kv, ctx: the rule's own, the layer before the selection, and the moment.
          selection: what stays.
          decides: whether scores decide anything, where layers compete: not if no budget is left for what competes.
        """
        if memory.unscored is None:
            return memory
        compete = self.compete(kv, ctx)
        if decides is None:
            decides = (compete & selection.keep).any(-1)
            if not isinstance(self.heads, UniformHeads):  # a head may have lost all of its budget to the others
                decides = decides.any(-1, keepdims=True)
        found = decides & (kv.live & ~selection.keep).any(-1) & ~(compete & ~jnp.isnan(selection.score)).any(-1)
        return dataclasses.replace(memory, unscored=PerHead(memory.unscored.value | found))

    def check_scored(self, memory: "EvictMemory", site: Site, heads: np.ndarray | None = None) -> None:
        """See `Rule`."""
        found = memory.unscored and memory.unscored.value
        if not isinstance(found, jax.Array) or not is_known(found) or not found.is_fully_addressable:
            return
        if (lost := np.asarray(found) & (True if heads is None else heads)).any():
            raise ValueError(
                f"{self.score} gives no token a score that is a number (NaN in layer {site.layer}, in {lost.sum()} of "
                f"{lost.size} kv heads of the batch), so that what stays of the prompt is no choice of it; mend the "
                "score, or what it reads"
            )

    def _at_prompt(self, before: Array, found: Array, kv: LayerKV, ctx: Context) -> Int[Array, "B K"]:
        """Shares that the prompt decides, below 0 where that is left to the first eviction after it."""
        numbers = self.numbers(ctx)
        outside = self._outside(numbers.budget, numbers.sinks, numbers.recent)
        lasting = self.heads.lasting(found, numbers.budget - outside, numbers.most, ctx.site, outside)
        fits = (kv.num_live <= found + outside[:, None]).all(-1, keepdims=True)
        decided = ~fits & (lasting == found).all(-1, keepdims=True)
        if self.storage == "pool":  # it has slots for other shares after a prompt that is short for them alone
            later = (self._later(ctx) + outside[:, None]).max(-1)
            tight = (ctx.length == ctx.prompt_length) & (jnp.maximum(ctx.prompt_length, numbers.budget) >= later)
            decided = decided | (tight[:, None] & (before < 0))
        return jnp.where(decided, found, before)

    def updated(self, memory: "EvictMemory", kv: LayerKV, stats: LayerStats, ctx: Context) -> "EvictMemory":
        """The memory after the rows just computed, before anything is chosen."""
        slots = Slots(kv, stats, ctx, kv.live)
        scope = memory.scope if self.scope is None else self.scope.update(slots.of(memory.scope))
        score = self.score.update(slots.of(memory.score))
        for part, before, after in ((self.score, memory.score, score), (self.scope, memory.scope, scope)):
            check_memory(part, after, kv.pos.shape, "update")
            if jax.tree.structure(before) != jax.tree.structure(after):
                raise ValueError(
                    f"{part} returns from update {jax.tree.structure(after)}, but init has given "
                    f"{jax.tree.structure(before)}; give both the same parts"
                )
        return dataclasses.replace(memory, score=score, scope=scope)

    def visible(self, moment: Moment) -> Bool[Array, "B K S"] | Chosen | None:
        """See `Rule`."""
        return None if self.mask is None or moment.ctx.phase == "prefill" else self.mask(moment)

    def make_room(self, kv: LayerKV, ctx: Context) -> LayerKV:
        """See `Rule`."""
        if not self.when.before_append:
            return kv
        # The coming token counts against the budget and against the recent window.
        ahead = dataclasses.replace(ctx, length=ctx.length + 1)
        select = lambda kv, ctx: self._select(kv.memory, kv, LayerStats(), ctx, coming=1)
        selection, shares = on_devices((self,), select, kv, ahead)
        if self.storage == "pool":
            check_plain(selection, "a pool changes no keys and values while decoding; use storage='dense'")
        return dataclasses.replace(selection.apply(kv), memory=_sharing(kv.memory, shares))

    def _scheduled_select(self, memory, kv, stats, ctx) -> tuple[Selection, Int[Array, "B K"]]:
        """The selection of a decode step, where one is due, and the shares of heads after it."""
        if self.when.every == 1:
            return self._select(memory, kv, stats, ctx)
        counts = self._counts(ctx)
        budgets = jnp.broadcast_to(self._each(memory, ctx), kv.pos.shape[:2])
        score = jnp.where(kv.live, jnp.zeros((), jnp.float32), -jnp.inf)
        nothing = Selection(kv.live, score, budgets, kv.gate if self.select.relaxed else None)
        drop = None
        if self.when.every is not None:
            due = jnp.broadcast_to((ctx.step % self.when.every == 0)[:, None], budgets.shape)
        else:
            due = kv.num_live >= budgets + (self.when.over or 0)
            drop = counts(self.when.drop)[:, None]
        before = budgets if memory.shares is None else memory.shares.value

        def select() -> tuple[Selection, Array]:
            chosen, shares = self._select(memory, kv, stats, ctx, drop=drop)
            check_plain(chosen, f"{self.when} evicts at some steps, of some rows, alone; use every_step()")
            return dataclasses.replace(chosen, most=None), shares

        chosen, shares = lax.cond(due.any(), select, lambda: (nothing, before))
        rows = due.any(-1, keepdims=True)
        if memory.shares is not None:  # shares that are new are met by all heads
            due = due | (rows & (before < 0) & (shares >= 0))
        gate = None if chosen.gate is None else jnp.where(due[..., None], chosen.gate, kv.gate)
        chosen = dataclasses.replace(chosen, keep=jnp.where(due[..., None], chosen.keep, kv.live), gate=gate)
        return chosen, jnp.where(rows, shares, before)

    def _counts(self, ctx: Context) -> Counts:
        table = ctx.site.column(self._sizes(ctx.site).budget)
        if ctx.sizes is None:
            return Counts(table, ctx.prompt_length)
        return GivenCounts(table, ctx.prompt_length, self._further, ctx.sizes.further)

    @property
    def _further(self) -> tuple[Count, ...]:
        """The counts that are resolved beside the budget and what is protected by position."""
        scope = () if self.scope is None else self.scope.counts
        return tuple(as_count(c, "count") for c in (self.when.drop, *scope, *self.select.counts))

    def differs(self, other: Rule) -> tuple[str, ...]:
        """See `Rule`: how much is kept is no difference."""
        if type(other) is not type(self):
            return super().differs(other)
        here, there = vars(self), vars(other)
        return tuple(n for n in here if n not in ("budget", "protect", "layers") and here[n] != there[n])

    def sizes_of(self, site: Site, lengths: np.ndarray) -> RuleSizes:
        """See `Rule`."""
        tables = self.tables(site)
        counts = Counts(tables[0], jnp.asarray(lengths, jnp.int32))
        return RuleSizes(
            *(jnp.asarray(narrow(table)[lengths]) for table in tables),
            further=tuple(jnp.asarray(narrow(counts.table(c))[lengths]) for c in self._further),
        )

    def tables(self, site: Site) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(budget, sinks, recent) of a layer for every prompt length from 0 to the plan's."""
        sizes = self._sizes(site)
        return site.column(sizes.budget), sizes.sinks, sizes.recent

    def _now(self, ctx: Context) -> tuple[Int[Array, "B"], Int[Array, "B"], Int[Array, "B"]]:
        """(budget, sinks, recent) of every sequence."""
        if ctx.sizes is not None:
            return ctx.sizes.budget, ctx.sizes.sinks, ctx.sizes.recent
        budget, sinks, recent = (lookup(table, ctx.prompt_length) for table in self.tables(ctx.site))
        return budget, sinks, recent

    def _each(self, memory: "EvictMemory", ctx: Context) -> Int[Array, "B _"]:
        """The budget of every head while decoding; of all heads where they have the same."""
        budget, sinks, recent = self._now(ctx)
        if memory.shares is None:
            return budget[:, None]
        shares = memory.shares.value
        return jnp.where(shares < 0, budget[:, None], shares + self._outside(budget, sinks, recent)[:, None])

    def _later(self, ctx: Context) -> Int[Array, "B #K"]:
        """The most that every head can be given while decoding beside what it gets anyway."""
        room, prefill = self.when.room(ctx.site.max_new_tokens), self.when.prefill
        table = self._sizes(ctx.site).later(ctx.site, self.heads, room=room, prefill=prefill)
        return jnp.asarray(narrow(table)).at[ctx.prompt_length].get(mode="clip")

    def _outside(self, budget: Array, sinks: Array, recent: Array) -> Int[Array, "B"]:
        """What every head gets: its protected tokens, and the one for which a step makes room before it comes."""
        return jnp.minimum(sinks + jnp.maximum(recent, int(self.when.before_append)), budget)

    def numbers(self, ctx: Context) -> "Numbers":
        """How many tokens, at this moment in this layer."""
        return Numbers(*self._now(ctx), int(self.tables(ctx.site)[0].max()), self._counts(ctx))

    def select_prompt(
        self,
        memory: "EvictMemory",
        kv: LayerKV,
        stats: LayerStats,
        ctx: Context,
        numbers: "Numbers",
        shares: Int[Array, "B K"] | None = None,
    ) -> Selection:
        """What `decide` selects after the prompt, for numbers of tokens that are given instead of planned.

        Args:
          memory: the policy's memory after the prompt's rows.
          kv, stats, ctx: as for `decide`.
          numbers: how many tokens.
          shares: tokens of every head beside those that it gets anyway, where the budget is divided already.
        """
        given = None if shares is None else PerHead(shares)
        return self._select(dataclasses.replace(memory, shares=given), kv, stats, ctx, numbers=numbers)[0]

    def ranked(
        self, memory: "EvictMemory", kv: LayerKV, stats: LayerStats, ctx: Context, numbers: "Numbers"
    ) -> tuple[Slots, Float[Array, "B K S"], Int[Array, "B"]]:
        """What competes for a budget: the slots, their scores without infinities, and what every head gets beside it.

        Args:
          memory: the policy's memory after the rows just computed.
          kv, stats, ctx: as for `decide`.
          numbers: how many tokens.
        """
        return self._ranked(memory, kv, stats, ctx, numbers, 0)[:3]

    def _ranked(self, memory, kv, stats, ctx, numbers, coming):
        """`ranked` for a step that makes room for `coming` tokens, and the scores as they are."""
        safe = protected(kv.pos, ctx.length, numbers.sinks, numbers.recent)
        slots = Slots(kv, stats, ctx, kv.live & ~safe)
        score = self.score(slots.of(memory.score)).astype(jnp.float32)
        # Infinities are left to protection and death; what is not a number is worth least.
        finite = jnp.nan_to_num(score, nan=-LARGE, posinf=LARGE, neginf=-LARGE)
        if ctx.site.window is not None:  # what no row to come can read goes first
            readable = kv.pos > (ctx.length - coming - ctx.site.window)[:, None, None]
            finite = jnp.where(readable, finite, -LARGE)
        return slots, finite, self._outside(numbers.budget, numbers.sinks, numbers.recent), score

    def _select(
        self, memory, kv, stats, ctx, *, drop=None, coming=0, numbers: "Numbers | None" = None
    ) -> tuple[Selection, Int[Array, "B K"]]:
        """The selection, and the tokens that every head is given beyond its protected ones.

        Where heads have shares already, it gives them those; where they remember them but have none yet (below 0), it
        divides the budget once something has to go, and the result is below 0 as long as nothing has.

        Args:
          memory, kv, stats, ctx: the moment.
          drop: how many tokens are evicted at least, as far as they are not protected.
          coming: tokens for which room is made.
          numbers: how many tokens, where not as planned.
        """
        numbers = self.numbers(ctx) if numbers is None else numbers
        counts = numbers.counts
        slots, finite, outside, score = self._ranked(memory, kv, stats, ctx, numbers, coming)
        candidates, average = slots.candidates, numbers.budget - outside
        at_once = None
        if ctx.phase == "decode" and self.when.prefill:
            at_once = max(self.when.room(ctx.site.max_new_tokens), counts.most(self.when.drop), 1)

        def divided() -> Int[Array, "B K"]:
            return self.heads.heads(finite, candidates, average, numbers.most, ctx.site, outside)

        def chosen(selectable: Int[Array, "B K"], at_once: int | None) -> Selection:
            budgets = selectable + outside[:, None]
            safe, spares = kv.live & ~candidates, None
            if self.scope is not None:
                of_scope = slots.of(memory.scope), safe, counts, budgets
                spares = self.scope.spares(*of_scope) if drop is None and self.select.asks(at_once) else None
                safe = self.scope(*of_scope) if spares is None else safe
            if drop is not None:
                stay = jnp.minimum(safe.sum(-1, dtype=jnp.int32), budgets)
                budgets = jnp.maximum(jnp.minimum(budgets, kv.num_live - drop), stay)
            budgets = budgets - coming
            limits = Limits(budgets, at_once, counts, memory.select, self.score.summands(ctx), spares)
            selection = _checked_selection(self.select, self.select(finite, safe, slots, limits))
            return dataclasses.replace(selection, score=jnp.where(kv.live, score, -jnp.inf))

        if memory.shares is None:
            selectable = divided()
            return chosen(selectable, at_once), selectable
        shares = memory.shares.value
        if ctx.phase == "prefill":
            return chosen(shares, at_once), shares
        over = lambda x: (kv.num_live > x + outside[:, None] - coming).any(-1, keepdims=True)
        equal = jnp.where(shares < 0, average[:, None], shares)
        first = (shares < 0).any(-1, keepdims=True) & over(equal)

        def divide() -> tuple[Selection, Int[Array, "B K"]]:
            most = self._later(ctx)
            found = jnp.minimum(divided(), most)
            goes = over(found)
            lasting = self.heads.lasting(found, average, numbers.most, ctx.site, outside)
            decided = jnp.where(first & goes, lasting, shares)
            selection = chosen(jnp.where(first, jnp.where(goes, lasting, found), equal), None)
            return dataclasses.replace(selection, most=None), decided

        keep = lambda: (dataclasses.replace(chosen(equal, at_once), most=None), shares)
        return lax.cond(first.any(), divide, keep)


def _sharing(memory: "EvictMemory", shares: Int[Array, "B K"]) -> "EvictMemory":
    """The memory with what heads have for shares, if they remember that."""
    return memory if memory.shares is None else dataclasses.replace(memory, shares=PerHead(shares))


def _checked_selection(select: Select, chosen: object) -> Selection:
    """What a selection, which may be a user's own, has chosen.

    Raises:
      ValueError: no `Selection`, a mask of no booleans, or gates where there should be none.
    """
    if not isinstance(chosen, Selection):
        raise ValueError(f"{select} returned a {type(chosen).__name__}; return Selection(keep, score, limits.budgets)")
    if (chosen.gate is not None) != select.relaxed or chosen.keep.dtype != bool:
        gates = "no gates" if chosen.gate is None else "gates"
        raise ValueError(
            f"{select} has relaxed={select.relaxed}, but its selection has {gates} and a keep of {chosen.keep.dtype}; "
            "give a mask of booleans, and gates where relaxed"
        )
    return chosen


def _check_parts(policy: Evict) -> None:
    """Raises ValueError for parts that do not go together, whatever the model."""
    budget = as_budget(policy.budget)
    sinks, recent = as_count(policy.protect.sinks, "sinks"), as_count(policy.protect.recent, "recent")
    fixed = sum(c.n for c in (sinks, recent) if isinstance(c, Tokens))
    if isinstance(budget, Tokens) and fixed > budget.n < MOST_TOKENS:
        raise ValueError(
            f"a budget of {budget.n} tokens cannot hold the {fixed} that protect keeps "
            f"(sinks={policy.protect.sinks}, recent={policy.protect.recent}); raise the budget or protect fewer"
        )
    drop = as_count(policy.when.drop, "drop")
    if isinstance(budget, Tokens) and isinstance(drop, Tokens) and drop.n > budget.n:
        raise ValueError(f"a budget of {budget.n} tokens cannot drop {drop.n} at once; drop fewer or raise the budget")
    if policy.when.decodes and not policy.score.decodes:
        raise ValueError(
            f"{policy.score} ranks prompt tokens only, but {policy.when} evicts while decoding; "
            "use after_prefill() or a score that accumulates"
        )
    if policy.when.before_append and policy._needed("decode"):
        raise ValueError(
            f"{policy.when} evicts before attention runs, but {policy.score} needs the step's attention; "
            "use every_step()"
        )
    if not policy.select.by_head and not isinstance(policy.heads, UniformHeads):
        raise ValueError(
            f"{policy.select} keeps the same tokens in all heads, but {policy.heads} gives every head a budget of its "
            "own; use heads=UniformHeads()"
        )
    one_of("positions", policy.positions, "original", "compact", "rerotate")
    if policy.positions == "compact" and policy.score.rotated_keys:
        raise ValueError(
            f"{policy.score} looks at rotated keys, but positions='compact' stores them before rotation; use "
            "'rerotate', which rotates them to the same ranks, or 'original'"
        )
    one_of("granularity", policy.granularity, "kv_head", "query_head")
    one_of("storage", policy.storage, "dense", "pool")
    hard = {"positions": policy.positions != "original", "storage": policy.storage != "dense"}
    hard["when"] = policy.when.before_append or policy.when.over is not None
    if policy.select.relaxed and any(hard.values()):
        name = next(n for n, is_hard in hard.items() if is_hard)
        raise ValueError(
            f"{name}={getattr(policy, name)!r} needs slots that are live or dead, but a relaxed policy has gates "
            "between 0 and 1; use positions='original', storage='dense', and a schedule that evicts after its steps"
        )


def _check_sizes(policy: Evict, sizes: Tables, site: Site, prompt_length: int) -> None:
    """Raises ValueError for a layer whose budget cannot hold what is protected of a prompt of this length."""
    budget = int(sizes.budget[prompt_length, site.layer])
    sinks, recent = int(sizes.sinks[prompt_length]), int(sizes.recent[prompt_length])
    longest = prompt_length + (site.max_new_tokens if policy.when.decodes else 0)
    if sinks + recent > budget and longest > budget:
        advice = "" if isinstance(policy.layers, UniformLayers) else f" or change {policy.layers}"
        raise ValueError(
            f"layer {site.layer} gets a budget of {budget} tokens for a prompt of {prompt_length}, but protect "
            f"keeps {sinks + recent} (sinks={sinks}, recent={recent}); raise the budget (now {policy.budget}){advice}"
        )
    if policy.when.before_append and recent == 0 and sinks == budget and longest > budget and site.max_new_tokens:
        raise ValueError(
            f"layer {site.layer} gets a budget of {budget} tokens for a prompt of {prompt_length}, but protect "
            f"keeps {sinks} and the token to come needs room beside them (sinks={sinks}); raise the budget (now "
            f"{policy.budget}) or protect fewer"
        )
    drop = sizes.count(policy.when.drop, "drop", site.layer, prompt_length)
    if drop > budget and prompt_length > budget:
        raise ValueError(
            f"layer {site.layer} gets a budget of {budget} tokens for a prompt of {prompt_length}, of which {drop} "
            f"cannot be dropped at once (drop={policy.when.drop}); drop fewer or raise the budget (now {policy.budget})"
        )
    if policy.scope is not None:
        every = policy.scope.first, policy.scope.size
        first, size = (sizes.count(count, "size", site.layer, prompt_length) for count in every)
        if sinks + recent + first > budget and prompt_length > budget:
            raise ValueError(
                f"layer {site.layer} gets a budget of {budget} tokens for a prompt of {prompt_length}, but protect "
                f"keeps {sinks + recent} (sinks={sinks}, recent={recent}) and {policy.scope} the first {first}; "
                f"raise the budget (now {policy.budget}) or protect fewer"
            )
        if size > budget < site.prompt_len + site.max_new_tokens:
            raise ValueError(
                f"layer {site.layer} gets a budget of {budget} tokens for a prompt of {prompt_length}, but "
                f"{policy.scope} protects {size}; raise the budget (now {policy.budget}) or protect fewer"
            )


@pytree
class EvictMemory:
    """What an `Evict` carries in a layer.

    Attributes:
      score, scope: what these two carry.
      shares: tokens that the first eviction gave every head beyond its protected ones, where heads differ; below 0
        before it.
      select: what the selection carries.
      unscored: the heads of which a prompt's tokens went though none had a score that is a number; None if unknown.
    """

    score: Any
    scope: Any
    shares: PerHead | None
    select: Any = ()
    unscored: PerHead | None = None


@dataclasses.dataclass(frozen=True)
class Numbers:
    """How many tokens, at one moment in one layer.

    Attributes:
      budget, sinks, recent: of every sequence.
      most: an upper bound of the budgets (static).
      counts: resolves further counts.
    """

    budget: Int[Array, "B"]
    sinks: Int[Array, "B"]
    recent: Int[Array, "B"]
    most: int
    counts: Counts


def from_fn(
    fn: Callable[[LayerKV, LayerStats, Context], Float[Array, "B K S"]],
    *,
    budget: int | float | Count,
    observe: Sequence[Measurement] = (),
    **fields: Any,
) -> Evict:
    """A policy from a scoring function.

    Args:
      fn: `(kv, stats, ctx) -> score`, larger = keep. Policies compare by value, and functions by what they compute
        (`kvjax.functions`): an equal one, written anew, compiles nothing anew. After a change of what it reads, such as
        a global or a list, the policy is refused; make another.
      budget: as in `Evict`.
      observe: the statistics that `fn` reads, as `stats[Observe(...)]`.
      **fields: other fields of `Evict`.
    """
    return Evict(FromFunction(fn, checked(each(a(Measurement)), "observe", observe)), budget, **fields)
