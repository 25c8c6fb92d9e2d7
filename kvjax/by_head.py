"""Rules of their own for the kv heads of one layer."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.cache.context import Context, Site
from kvjax.cache.state import LayerKV, evict
from kvjax.pallas_kernels.values import one_of
from kvjax.policy import LayerPolicy, LayerSpec, Layout, Rule, keeps_all
from kvjax.scoring.select import Selection, check_plain
from kvjax.scoring.stats import LayerStats, ordered
from kvjax.sizes.budget import lookup
from kvjax.sizes.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class ByHead(Rule):
    """Every kv head of a layer is under the rules of its member, as if all heads were; made by `partition_heads`.

    Attributes:
      members: the rules of each member, applied in turn; none for heads that keep everything.
      heads: the member of every kv head, an index.
      storage: "pool" gives every head the slots that its own rules need, "dense" those of the largest.
    """

    members: tuple[tuple[Rule, ...], ...]
    heads: tuple[int, ...]
    storage: Layout = "pool"

    def __post_init__(self):
        one_of("storage", self.storage, "pool", "dense")

    def _layers(self, site: Site) -> list[LayerPolicy]:
        return [LayerPolicy(rules, site) for rules in self.members]

    def _mine(self, member: int) -> Bool[Array, "1 K 1"]:
        """The heads of a member."""
        return jnp.asarray(np.array(self.heads) == member)[None, :, None]

    def spec(self, site: Site) -> LayerSpec:
        """See `Rule`.

        Raises:
          ValueError: another number of heads than the layer has, or members that cannot share a layer.
        """
        if len(self.heads) != site.num_kv_heads:
            raise ValueError(
                f"partition_heads has {len(self.heads)} labels in layer {site.layer}, which has {site.num_kv_heads} kv "
                "heads; give one label a head"
            )
        members = [layer.spec if layer.rules else keeps_all(site) for layer in self._layers(site)]
        _check_members(self.members, members)
        specs = [members[member] for member in self.heads]
        prompt, step = (ordered(m for spec in members for m in getattr(spec, name)) for name in ("prompt", "step"))
        return LayerSpec(
            np.mean([spec.target for spec in specs], axis=0),
            np.max([spec.capacity for spec in specs], axis=0),
            np.sum([spec.capacity for spec in specs], axis=0),
            prompt,
            step,
            positions=next((m.positions for m, rules in zip(members, self.members, strict=True) if rules), "original"),
            storage=self.storage,
            reads=max((spec.reads for spec in members), key=("blocks", "whole", "rows").index),
            finite=any(spec.finite for spec in members),
        )

    def init(self, site: Site, batch: int) -> tuple[Any, ...]:
        """See `Rule`: what every member carries, for all heads."""
        return tuple(layer.init(batch) for layer in self._layers(site))

    def _each(self, kv: LayerKV, ctx: Context) -> Iterator[tuple[int, LayerPolicy, LayerKV, Context]]:
        """Every member, with the layer and the moment as it sees them."""
        ctx = dataclasses.replace(ctx, sizes=None)
        for i, (layer, memory) in enumerate(zip(self._layers(ctx.site), kv.memory, strict=True)):
            yield i, layer, dataclasses.replace(kv, memory=memory), ctx

    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[tuple[Any, ...], Selection | None]:
        """See `Rule`."""
        score = jnp.where(kv.live, jnp.zeros((), jnp.float32), -jnp.inf)
        whole, decided, memories = Selection(kv.live, score, kv.num_live), None, []
        for i, layer, view, here in self._each(kv, ctx):
            memory, selection = layer.decide(view, stats, here)
            memories.append(memory)
            if selection is not None:
                check_plain(selection, "partition_heads takes from every head its slots alone; use it for whole layers")
                mine, before = self._mine(i), whole if decided is None else decided
                decided = Selection(
                    jnp.where(mine, selection.keep, before.keep),
                    jnp.where(mine, selection.score, before.score),
                    jnp.where(mine[..., 0], selection.budgets, before.budgets),
                )
        return tuple(memories), decided

    def make_room(self, kv: LayerKV, ctx: Context) -> LayerKV:
        """See `Rule`."""
        keep = live = kv.live
        for i, layer, view, here in self._each(kv, ctx):
            after = layer.make_room(view, here)
            keep = keep if after is view else jnp.where(self._mine(i), after.live, keep)
        return kv if keep is live else evict(kv, keep)

    def reserve(self, kv: LayerKV, ctx: Context) -> Int[Array, "B K"]:
        """See `Rule`."""
        most = jnp.zeros(kv.pos.shape[:2], jnp.int32)
        for i, layer, view, here in self._each(kv, ctx):
            bound = layer.reserve(view, here)
            if bound is None:
                bound = lookup(layer.spec.capacity, ctx.prompt_length)[:, None]
            most = jnp.where(self._mine(i)[..., 0], bound, most)
        return most

    def check(self, site: Site, prompt_length: int) -> None:
        """See `Rule`."""
        for rules in self.members:
            for rule in rules:
                rule.check(site, prompt_length)

    def check_scored(self, memory: tuple[Any, ...], site: Site, heads: np.ndarray | None = None) -> None:
        """See `Rule`: of every member, its own heads."""
        for i, (layer, own) in enumerate(zip(self._layers(site), memory, strict=True)):
            mine = np.array(self.heads) == i
            layer.check_scored(own, mine if heads is None else mine & heads)

    def under(self, schedule: Schedule) -> "ByHead":
        """See `Rule`."""
        members = tuple(tuple(rule.under(schedule) for rule in rules) for rules in self.members)
        return dataclasses.replace(self, members=members)


def _check_members(members: tuple[tuple[Rule, ...], ...], specs: list[LayerSpec]) -> None:
    """Raises ValueError for rules that decide for a layer as a whole, or that heads of one layer cannot differ in."""
    for rules, spec in zip(members, specs, strict=True):
        what = {
            "stores a set for every query head": spec.heads == "query_head",
            "drops key channels": spec.prunes,
            "is relaxed": spec.gates,
            "hides slots from rows": spec.hides is not None,
        }
        if odd := [name for name, there in what.items() if there]:
            raise ValueError(
                f"partition_heads gives kv heads policies of their own, but {rules[0]} {odd[0]}, which a layer does "
                "for all heads; give the whole layer that policy"
            )
        for rule in rules:
            if isinstance(rule, ByHead):
                raise ValueError(
                    "partition_heads has a member that gives kv heads policies of their own already; give one "
                    "partition_heads with the labels of all heads"
                )
            if not rule.by_head:
                raise ValueError(
                    f"partition_heads gives kv heads policies of their own, but {rule} decides by what all heads of a "
                    "layer hold; use one of which every head decides alone (UniformHeads(), head_mode='per_kv_head')"
                )
    positions = sorted({spec.positions for rules, spec in zip(members, specs, strict=True) if rules})
    if len(positions) > 1:
        raise ValueError(
            f"a layer rotates its keys in one way, but the members of partition_heads want {positions}; give all of "
            "them the same positions="
        )
