"""`Policy`, and the parts that most policies are made of."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from kvjax.contract.types import (
    AttentionInputs,
    Context,
    Decision,
    LayerInfo,
    LayerView,
    Layout,
    Observation,
    Phase,
    Reads,
    Sizes,
    Slots,
    Stats,
)
from kvjax.contract.values import Prompts, Tree, Value, resolve
from kvjax.pallas_kernels.kinds import MOST

H = TypeVar("H", bound=Hashable)


class Policy(Value):
    """A KV-cache eviction policy. Each member has a default that does nothing: `Policy()` is the full cache.

    `layout` to `init_params` run on the host before anything is traced; `enter` to `update_layers` are traced.

    Attributes:
      joint: whether `update_layers` decides for all layers at once, after all of them were read.
    """

    joint: ClassVar[bool] = False

    @property
    def layout(self) -> Layout:
        """How the policy wants its layer stored."""
        return Layout()

    @property
    def writes(self) -> tuple[str, ...]:
        """Which of "k", "v" and "log_weight" the policy may change in slots that stay."""
        return ()

    def at(self, layer: int, num_layers: int) -> "Policy":
        """The policy of one layer."""
        return self

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        """Observations that the policy needs in a phase."""
        return ()

    def sizes(self, info: LayerInfo, lengths: Prompts) -> Sizes:
        """Slots and data for prompts of these lengths."""
        most = np.full_like(lengths, info.prompt_len + info.max_new_tokens)  # so that prompts of any length share it
        return Sizes(most, info.num_kv_heads * most, resolved(self, info, lengths))

    def memory(self, info: LayerInfo) -> PyTree:
        """The policy's memory of a layer: a tree of `PerSlot` and `PerHead`."""
        return ()

    def init_params(self, info: LayerInfo, key: Key[Array, ""]) -> PyTree:
        """Initial learned parameters of a layer: a tree of arrays, the same for all sequences."""
        return ()

    def enter(self, kv: LayerView, inputs: AttentionInputs, ctx: Context) -> LayerView:
        """The layer after new rows were stored, before any row reads it."""
        return kv

    def reads(self, kv: LayerView, inputs: AttentionInputs, ctx: Context) -> Reads | None:
        """Which slots rows of this call read; None for all live ones."""
        return None

    def update(self, kv: LayerView, stats: Stats, ctx: Context) -> LayerView:
        """The layer after its rows were read. Here policies evict.

        It may change `pos`, `memory`, `channels` and what `writes` lists, never the order of slots.
        """
        return kv

    def update_layers(
        self, layers: tuple[LayerView, ...], stats: tuple[Stats, ...], ctxs: tuple[Context, ...]
    ) -> tuple[LayerView, ...]:
        """All layers after their rows were read, if the policy is `joint`."""
        return tuple(map(self.update, layers, stats, ctxs))

    def reserve(self, kv: LayerView, ctx: Context) -> Int[Array, "B K"]:
        """The most tokens that each head will have while decoding: a pool leaves room for them."""
        return jnp.broadcast_to((ctx.prompt_length + ctx.max_new_tokens)[:, None], kv.pos.shape[:2])

    def __call__(self, state: Any, stats: Any) -> Any:
        """Updates a state by what `forward` observed. A whole prompt is compacted, too."""
        if not hasattr(state, "applied"):
            raise ValueError(f"state is a {type(state).__name__}, not a State, such as kvjax.forward gives")
        return state.applied(self, stats)


class Part(Value):
    """A part of a policy: a `Score`, a `Select`, `Heads`, a `Rewrite`.

    A part says what it observes and owns its memory, data and learned parameters. Parts in its fields, alone or in
    tuples, are asked and updated with it, and are called with `slots.of("<field>")`.

    Attributes:
      writes: which of "k", "v" and "log_weight" the part may change in slots that stay.
    """

    writes: ClassVar[tuple[str, ...]] = ()

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        """Observations that the part needs in a phase."""
        return unique(o for part in children(self) for o in part.observe(phase))

    def hparams(self, info: LayerInfo, lengths: Prompts, budget: Prompts) -> PyTree:
        """The part's data, a tree of arrays "M ...": by default its fields that are counts, in tokens (host).

        Args:
          info: the layer.
          lengths: prompt lengths.
          budget: the layer's budget for each, tokens of a head on average.
        """
        return resolved(self, info, lengths, budget)

    def memory(self, info: LayerInfo) -> PyTree:
        """The part's memory of a layer: a tree of `PerSlot` and `PerHead` (host)."""
        return of_parts(self, lambda part: part.memory(info))

    def init_params(self, info: LayerInfo, key: Key[Array, ""]) -> PyTree:
        """Initial learned parameters of a layer: a tree of arrays (host)."""
        keys = iter(jax.random.split(key, 64))
        return of_parts(self, lambda part: part.init_params(info, next(keys)))

    def update(self, slots: Slots) -> PyTree:
        """The part's memory after rows were read; called whenever the model is, evicting or not."""
        return updated_parts(self, slots)

    def least(self, lengths: Prompts, budget: Prompts) -> Prompts:
        """The smallest budget that the part can work with, in tokens (host)."""
        return np.max([np.zeros_like(lengths), *(part.least(lengths, budget) for part in children(self))], 0)


class Score(Part):
    """How much each slot is worth keeping. Only `slots.candidates` are compared with each other."""

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """A number for every slot; the largest stay. By default, the score's memory."""
        if not jax.tree.leaves(slots.memory):
            raise ValueError(f"{type(self).__name__} has neither `__call__` nor `memory`; give one of them")
        return slots.memory


class Select(Part):
    """Selects the slots that stay, by scores and budgets."""

    @property
    def slack(self) -> int:
        """How many tokens more than its budget a head may keep."""
        return 0

    @property
    def page(self) -> int:
        """How many tokens a budget must hold beside those that stay in any case, where some are to go."""
        return 0

    def __call__(
        self, score: Float[Array, "B K S"], budgets: Int[Array, "B K"], slots: Slots
    ) -> Bool[Array, "B K S"] | Float[Array, "B K S"]:
        """The slots that stay: `budgets` of a head at most, those of `slots.protected`, which always do, included.

        Numbers from 0 to 1 say how much of each slot stays; they become its weight, and `writes` lists "log_weight".
        """
        raise ValueError(f"{type(self).__name__} has no `__call__(score, budgets, slots)`; give the slots that stay")


class Heads(Part):
    """Divides a layer's budget over its kv heads."""

    def most(self, average: Prompts, limit: Prompts, info: LayerInfo) -> Prompts:
        """The most tokens that one head can get (host).

        Args:
          average: tokens of a head on average.
          limit: tokens that compete in a head.
          info: the layer.
        """
        raise ValueError(f"{type(self).__name__} has no `most(average, limit, info)`; give the most tokens of a head")

    def __call__(self, score: Float[Array, "B K S"], average: Int[Array, "B"], slots: Slots) -> Int[Array, "B K"]:
        """Tokens of each head, which add up to `average` a head."""
        raise ValueError(f"{type(self).__name__} has no `__call__(score, average, slots)`; give tokens of each head")

    def lasting(self, shares: Int[Array, "B K"], average: Int[Array, "B"], slots: Slots) -> Int[Array, "B K"]:
        """Tokens of each head at all later evictions, given the `shares` of the first one."""
        return shares


class Rewrite(Part):
    """Rewrites keys, values or weights of kept slots."""

    def __call__(self, decision: Decision, slots: Slots) -> Decision:
        """The decision with `k`, `v` or `log_weight`, as `writes` lists them."""
        raise ValueError(f"{type(self).__name__} has no `__call__(decision, slots)`; give the decision")


def unique(items: Iterable[H]) -> tuple[H, ...]:
    """The items without duplicates, in order."""
    return tuple(dict.fromkeys(items))


def _parts(x: Any) -> dict[str, Part | tuple[Part, ...]]:
    """The fields of a value that hold parts."""
    each = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
    return {n: y for n, y in each.items() if isinstance(y[0] if isinstance(y, tuple) and y else y, Part)}


def children(x: Any) -> list[Part]:
    """The parts in the fields of a value."""
    each = _parts(x).values()
    return [part for y in each for part in (y if isinstance(y, tuple) else (y,))]


def of_parts(x: Any, one: Callable[[Any], PyTree], **more: PyTree) -> PyTree:
    """A `Tree` with `one(part)` for each field of a value that holds parts, and `more`; () if it would be empty."""
    found = {name: tuple(map(one, y)) if isinstance(y, tuple) else one(y) for name, y in _parts(x).items()} | more
    return Tree(**found) if found else ()


def resolved(x: Any, info: LayerInfo, lengths: Prompts, budget: Prompts | None = None, **more: PyTree) -> PyTree:
    """The `hparams` of a value by field: counts in tokens, "M" int32, and the `hparams` of its parts."""
    whole = lambda n: np.minimum(n, MOST).astype(np.int32)
    counts = {
        f.name: whole(resolve(getattr(x, f.name), lengths, budget))
        for f in dataclasses.fields(x)
        if f.metadata.get("count") and f.name not in more
    }
    return of_parts(x, lambda part: part.hparams(info, lengths, budget), **counts, **more)


def updated_parts(x: Any, slots: Slots) -> PyTree:
    """The memory of a value after its parts have updated theirs."""
    found = {}
    for name, y in _parts(x).items():
        if isinstance(y, tuple):
            found[name] = tuple(part.update(slots.of(name, i)) for i, part in enumerate(y))
        else:
            found[name] = y.update(slots.of(name))
        before, after = jax.tree.leaves(getattr(slots.memory, name, ())), jax.tree.leaves(found[name])
        if [jnp.shape(a) for a in after] != [b.shape for b in before]:
            raise ValueError(
                f"{type(y).__name__} updates its memory to arrays of shapes {[jnp.shape(a) for a in after]}, but it "
                f'listed {[b.shape for b in before]}: PerSlot for a number a slot, "B K S ...", PerHead for one a head'
            )
    return Tree(**{**vars(slots.memory), **found}) if found else slots.memory
