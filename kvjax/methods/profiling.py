"""FastGen (Ge et al., arXiv 2310.01801): every head is profiled on the prompt and gets the cheapest set that serves it.

The sets are nested: special tokens; and punctuation; and frequent tokens; and local ones; everything. So each slot has
a level, the first set that contains it, and a head keeps the slots up to the level of its strategy.
"""

import dataclasses
from typing import Final, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int8

from kvjax.cache.context import Context, Site
from kvjax.cache.state import EMPTY, LayerKV, PerHead
from kvjax.pallas_kernels import recovered_attention
from kvjax.pallas_kernels.pytree import pytree
from kvjax.pallas_kernels.values import a, each, number, one_of, settle, whole
from kvjax.policy import LayerSpec, Layout, Rule, keeps_all
from kvjax.scoring.select import Selection, largest
from kvjax.scoring.stats import LayerStats, Measurement, Moment, Observe
from kvjax.sizes.budget import ROUNDINGS, Count, Rounding, as_budget, lookup, whole_tokens
from kvjax.sizes.schedule import Schedule

STRATEGIES: Final = ("special", "punctuation", "frequent", "local", "full")
"""The strategies of heads by number; each keeps what those before it keep, and more."""

TOKEN_IDS: Final = each(whole(0, 2**24, "give a tuple of token ids, whole numbers from 0 to 2**24"))
"""The rule of ids."""

_SPECIAL, _PUNCTUATION, _FREQUENT, _LOCAL, _FULL = range(len(STRATEGIES))

_UNKNOWN, _PLAIN, _MARK, _DECLARED = range(4)  # kinds of token; a slot that was just filled starts at 0

_ATTENTION: Final = Observe()

_RATIO: Final = number("[0, 1]", "a ratio lies in [0, 1]")

_UNCHANGED = 1e-4  # the tolerance of recovery="elementwise"


@dataclasses.dataclass(frozen=True)
class TokenKinds(Measurement):
    """Which of the new tokens are special or punctuation: a number for every slot, 0 for slots that are not new.

    Attributes:
      special_ids, punctuation_ids: ids; what is in both is special.
    """

    special_ids: tuple[int, ...]
    punctuation_ids: tuple[int, ...]

    def __post_init__(self):
        settle(self, special_ids=TOKEN_IDS, punctuation_ids=TOKEN_IDS)

    def measure(self, moment: Moment) -> Int8[Array, "B K S"]:
        """See `Measurement`."""
        tokens = moment.ctx.ids
        if tokens is None:
            raise ValueError(
                "FastGen tells special tokens and punctuation by their ids, but no token ids are known here; "
                "pass tokens= to evict_layer, or drive the model with generate, prefill or forward"
            )
        table = np.full(max((0, *self.special_ids, *self.punctuation_ids)) + 1, _PLAIN, np.int8)
        table[list(self.punctuation_ids)] = _MARK
        table[list(self.special_ids)] = _DECLARED
        kinds = jnp.asarray(table).at[tokens].get(mode="fill", fill_value=_PLAIN)
        kinds = jnp.where(moment.pos == EMPTY, jnp.int8(_UNKNOWN), kinds)
        # By position, so that it does not matter in which slots the new tokens were stored.
        pos, T = moment.kv.pos, tokens.shape[1]
        column = pos - (moment.ctx.length[:, None, None] - T)
        new = (pos != EMPTY) & (column >= 0)
        return jnp.where(
            new, kinds[jnp.arange(len(pos))[:, None, None], jnp.clip(column, 0, T - 1)], jnp.int8(_UNKNOWN)
        )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How many tokens are frequent, and how many local.

    Attributes:
      frequent_ratio: share of all tokens so far.
      local_ratio: share of the prompt.
      rounding: of both.
    """

    frequent_ratio: float
    local_ratio: float
    rounding: Rounding

    def __post_init__(self):
        settle(self, frequent_ratio=_RATIO, local_ratio=_RATIO)
        one_of("Sizes.rounding", self.rounding, *ROUNDINGS)

    def __call__(self, ctx: Context) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
        """(frequent, local) tokens of every sequence."""
        n = np.arange(ctx.site.prompt_len + ctx.site.max_new_tokens + 1)
        frequent = lookup(whole_tokens(self.frequent_ratio, n, self.rounding), ctx.length)
        local = whole_tokens(self.local_ratio, n[: ctx.site.prompt_len + 1], self.rounding)
        return frequent, lookup(local, ctx.prompt_length)


@dataclasses.dataclass(frozen=True)
class Profile(Measurement):
    """What attention to the prompt recovers from each set but the full one, "B K 4", in the order of `STRATEGIES`.

    A second pass over the prompt's attention, in blocks. It sees the prompt in one piece: keys of earlier pieces count
    as plain tokens.

    Attributes:
      kinds: tells tokens apart.
      sizes: of the sets.
      recovery: "mass" or "elementwise", see `FastGen`.
    """

    kinds: TokenKinds
    sizes: Sizes
    recovery: Literal["mass", "elementwise"]

    def __post_init__(self):
        settle(self, kinds=a(TokenKinds), sizes=a(Sizes))
        one_of("Profile.recovery", self.recovery, "mass", "elementwise")

    def measure(self, moment: Moment) -> Float[Array, "B K 4"]:
        """See `Measurement`."""
        kv, ctx = moment.kv, moment.ctx
        level = levels(kv.pos, self.kinds.measure(moment), moment.measured[_ATTENTION], ctx, self.sizes)
        masks = jnp.stack([level <= s for s in (_SPECIAL, _PUNCTUATION, _FREQUENT, _FREQUENT)])
        _, local = self.sizes(ctx)
        recovered = recovered_attention(
            moment.q,
            kv.k,
            moment.pos,
            kv.pos,
            masks,
            within=(None, None, None, local),
            tolerance=None if self.recovery == "mass" else _UNCHANGED,
            scale=moment.scale,
            window=moment.window,
            softcap=moment.softcap,
            bias=moment.bias,
        )
        if recovered.elementwise is not None:
            return recovered.elementwise.astype(jnp.float32)
        return recovered.mass.astype(jnp.float32)


def levels(
    pos: Int[Array, "B K S"], kinds: Int8[Array, "B K S"], mass: Float[Array, "B K S"], ctx: Context, sizes: Sizes
) -> Int[Array, "B K S"]:
    """The first of `STRATEGIES` that keeps each slot; beyond the last for dead slots."""
    live = pos != EMPTY
    num_frequent, num_local = sizes(ctx)
    frequent = largest((jnp.where(live, mass, -jnp.inf), pos), num_frequent[:, None])
    local = pos >= (ctx.length - num_local)[:, None, None]
    level = jnp.full(pos.shape, _FULL, jnp.int32)
    for strategy, members in (
        (_LOCAL, local),
        (_FREQUENT, frequent),
        (_PUNCTUATION, kinds == _MARK),
        (_SPECIAL, kinds == _DECLARED),
    ):
        level = jnp.where(members, strategy, level)
    return jnp.where(live, level, len(STRATEGIES))


@pytree
class FastGenMemory:
    """What `FastGen` carries in a layer.

    Attributes:
      kinds: of the token in each slot, 0 for one that was just filled.
      mass: attention that each slot has received, the mean of a group.
      strategy: of every head, an index into `STRATEGIES`.
      cap: the most tokens that every head of a pool keeps; None in a dense cache, where all heads may keep as many.
    """

    kinds: Int8[Array, "B K S"]
    mass: Float[Array, "B K S"]
    strategy: PerHead
    cap: PerHead | None = None


def _leveled(amounts: Int[Array, "B K"], total: Int[Array, "B"]) -> Int[Array, "B K"]:
    """The amounts, where together they exceed the total with the largest of them cut to one level."""
    heads = amounts.shape[-1]
    smaller = jnp.pad(jnp.cumsum(jnp.sort(amounts, axis=-1), axis=-1, dtype=jnp.int32)[:, :-1], [(0, 0), (1, 0)])
    level = (total[:, None] - smaller) // (heads - jnp.arange(heads, dtype=jnp.int32))[None]
    return jnp.minimum(amounts, jnp.maximum(level.max(-1, keepdims=True), 0))


@dataclasses.dataclass(frozen=True)
class FastGen(Rule):
    r"""Every kv head keeps the smallest set of a nested list that recovers enough of its attention to the prompt.

    The list is `STRATEGIES`. A head's strategy is chosen once, after the prompt, and maintained at every decode step: a
    head of special tokens drops every other new token right after it was read; accumulated attention decides anew which
    tokens are frequent; local tokens slide out of the window. What was evicted stays gone.

    Attributes:
      special_ids, punctuation_ids: ids of the two classes of tokens.
      frequent_ratio: the tokens with the highest accumulated attention, as a share of all tokens so far (live tokens
        are ranked; of equals the newer).
      local_ratio: the newest tokens, as a share of the prompt.
      recovery_ratio: T, what a set must recover to be chosen.
      recovery: "mass": the probability on kept keys, averaged over the prompt's rows, is at least T, so that the
        renormalised rows have a mean total variation of at most 1 - T. "elementwise": at least T of the visible
        entries change by less than 1e-4 when rows are renormalised (a released port; the paper names no norm, D-47).
        With several query heads in a group, of their mean.
      rounding: of the ratios: "floor" as everywhere here, "ceil" as in the port.
      budget: the most tokens that a head keeps, in a pool on average: a number (int) or a share of the prompt (float).
        None bounds nothing, and the cache has room for all tokens. A head over it drops from the end of the list: among
        what only "full" keeps by accumulated attention, then the oldest local tokens, then the least frequent.
      storage: "dense" allocates every head the slots of the largest. "pool" allocates the layer `budget` slots a head,
        divided once after the prompt: each head gets what its set takes (the largest are cut to one level where that is
        too much), then heads that keep everything what they will add, and what is left goes to all alike.
    """

    special_ids: tuple[int, ...]
    punctuation_ids: tuple[int, ...]
    frequent_ratio: float = 0.3
    local_ratio: float = 0.3
    recovery_ratio: float = 0.95
    recovery: Literal["mass", "elementwise"] = "mass"
    rounding: Literal["floor", "ceil"] = "floor"
    budget: int | float | Count | None = None
    storage: Layout = "dense"

    def __post_init__(self):
        settle(self, special_ids=TOKEN_IDS, punctuation_ids=TOKEN_IDS)
        settle(self, frequent_ratio=_RATIO, local_ratio=_RATIO, recovery_ratio=_RATIO)
        one_of("FastGen.recovery", self.recovery, "mass", "elementwise")
        one_of("FastGen.rounding", self.rounding, "floor", "ceil")
        one_of("FastGen.storage", self.storage, "dense", "pool")
        if self.budget is not None:
            object.__setattr__(self, "budget", as_budget(self.budget))
        elif self.storage == "pool":
            raise ValueError(
                "FastGen(storage='pool', budget=None): what heads will need is known only after the prompt, but a pool "
                "has a fixed number of slots; give a budget, such as 0.5, or use storage='dense'"
            )

    @property
    def by_head(self) -> bool:
        """See `Rule`."""
        return self.storage == "dense"

    @property
    def apart(self) -> bool:
        """See `Rule`."""
        return self.by_head

    @property
    def kinds(self) -> TokenKinds:
        """What tells tokens apart."""
        return TokenKinds(self.special_ids, self.punctuation_ids)

    @property
    def sizes(self) -> Sizes:
        """How many tokens are frequent, and how many local."""
        return Sizes(self.frequent_ratio, self.local_ratio, self.rounding)

    @property
    def profile(self) -> Profile:
        """What strategies are chosen by."""
        return Profile(self.kinds, self.sizes, self.recovery)

    def init(self, site: Site, batch: int) -> FastGenMemory:
        """See `Rule`."""
        shape = (batch, site.num_kv_heads)
        zeros = PerHead(jnp.zeros(shape, jnp.int32))
        cap = zeros if self.storage == "pool" else None
        return FastGenMemory(jnp.zeros((*shape, 0), jnp.int8), jnp.zeros((*shape, 0), jnp.float32), zeros, cap)

    def _caps(self, site: Site) -> np.ndarray | None:
        """The most tokens a head keeps, in a pool on average, for every prompt length of the plan."""
        if self.budget is None:
            return None
        n = np.arange(site.prompt_len + 1)
        return np.clip(as_budget(self.budget).table(n, n), 1, site.prompt_len + site.max_new_tokens)

    def spec(self, site: Site) -> LayerSpec:
        """See `Rule`; its target is an upper bound, since a head may need less."""
        needed = _ATTENTION, self.kinds
        timed = self.storage == "pool"  # full heads are given slots for every token to come
        every = keeps_all(site, prompt=(*needed, self.profile), step=needed, reads="whole", timed=timed, finite=True)
        caps = self._caps(site)
        if caps is None:
            return every
        total, coming = site.prompt_len + site.max_new_tokens, min(1, site.max_new_tokens)
        average = np.minimum(total, caps + coming)
        one_of_all = np.minimum(total, caps * site.num_kv_heads + coming)
        capacity = one_of_all if self.storage == "pool" else average
        slots = site.num_kv_heads * average
        return dataclasses.replace(every, target=caps, capacity=capacity, slots=slots, storage=self.storage)

    def reserve(self, kv: LayerKV, ctx: Context) -> Int[Array, "B K"] | None:
        """See `Rule`."""
        memory: FastGenMemory = kv.memory
        if memory.cap is None:
            return None
        longest = (ctx.prompt_length + ctx.site.max_new_tokens)[:, None]
        return jnp.minimum(memory.cap.value + min(1, ctx.site.max_new_tokens), longest)

    def _divided(
        self, needed: Int[Array, "B K"], strategy: Int[Array, "B K"], average: Int[Array, "B"], ctx: Context
    ) -> Int[Array, "B K"]:
        """How the slots of a pool are divided over heads."""
        left = average * needed.shape[1]
        given = jnp.zeros_like(needed)
        for wanted in (needed, jnp.where(strategy == _FULL, ctx.site.max_new_tokens, 0)):
            part = _leveled(wanted, left)
            given, left = given + part, left - part.sum(-1, dtype=jnp.int32)
        return given + (left // needed.shape[1])[:, None]

    def under(self, schedule: Schedule) -> Rule:
        """See `Rule`; FastGen has no schedule to change."""
        raise ValueError(f"FastGen maintains its sets at every decode step, so {schedule} cannot apply to it")

    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[FastGenMemory, Selection]:
        """See `Rule`."""
        memory: FastGenMemory = kv.memory
        kinds = jnp.where(memory.kinds == _UNKNOWN, stats[self.kinds], memory.kinds)
        mass = memory.mass + stats[_ATTENTION].astype(jnp.float32)
        strategy = memory.strategy.value
        if ctx.phase == "prefill":
            enough = stats[self.profile] >= self.recovery_ratio
            strategy = jnp.where(enough.any(-1), jnp.argmax(enough, axis=-1), _FULL).astype(jnp.int32)
        level = levels(kv.pos, kinds, mass, ctx, self.sizes)
        keep = level <= strategy[..., None]
        caps, given = self._caps(ctx.site), memory.cap
        if caps is not None:
            cap = jnp.broadcast_to(lookup(caps, ctx.prompt_length)[:, None], strategy.shape)
            if given is not None:
                if ctx.phase == "prefill":
                    given = PerHead(self._divided(keep.sum(-1, dtype=jnp.int32), strategy, cap[:, 0], ctx))
                cap = given.value
            rank = jnp.where(level == _LOCAL, kv.pos.astype(jnp.float32), mass)
            keep &= largest((jnp.where(keep, -level, -len(STRATEGIES) - 1), rank, kv.pos), cap)
        score = jnp.where(kv.live, mass, -jnp.inf)
        return FastGenMemory(kinds, mass, PerHead(strategy), given), Selection(
            keep, score, keep.sum(-1, dtype=jnp.int32)
        )
