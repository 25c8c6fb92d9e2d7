"""One pass of new tokens through a model's layers: what each does with its cache, and which share a program."""

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache import mesh
from kvjax.cache.context import Context, Phase
from kvjax.cache.pool import PooledKV, to_pool
from kvjax.cache.state import KVState, LayerKV, compact
from kvjax.drivers.attention import attend
from kvjax.pallas_kernels.pytree import pytree, static
from kvjax.plan import CachePlan
from kvjax.policy import LayerPolicy, context
from kvjax.scoring.stats import AttentionStats, LayerStats, Measurement


@pytree
class LayerSteps:
    """What drivers hand a model as `attend`: attention over a layer's cache, and eviction right after it.

    A model may run layers of one `kind` as one program, in which each has an `index`.

    Attributes:
      state: the cache, without its layers.
      tokens: the new tokens.
      pos: their positions, EMPTY for padding.
      index: the layer that is run, where a program serves several; None for the one it is called with.
      phase, evict, ends: as for `kvjax.drivers.steps.forward`.
      shares: whether layers of one kind may share a program.
    """

    state: KVState
    tokens: Int[Array, "B T"]
    pos: Int[Array, "B T"]
    index: Int[Array, ""] | None = None
    phase: Phase = static(default="prefill")
    evict: bool = static(default=False)
    ends: bool = static(default=True)
    shares: bool = static(default=False)

    def kind(self, layer: int) -> Hashable:
        """What is static about a layer: those of one kind share a program, and differ in their index alone."""
        plan: CachePlan = self.state.plan
        policy = plan.layers[layer]
        values = [getattr(spec, f.name) for spec in policy.specs for f in dataclasses.fields(spec)]
        static = tuple(x.tobytes() if isinstance(x, np.ndarray) else x for x in values)
        return policy.rules, dataclasses.replace(policy.site, layer=0), static, plan.capacities[layer]

    def together(self, layer: int) -> int:
        """How many layers of a kind may share a program: what they keep stands twice for a moment.

        So many that it is no more than what one layer holds of the prompt, and memory does not grow with depth.
        """
        plan: CachePlan = self.state.plan
        heads = plan.sites[layer].num_kv_heads
        kept = plan.capacities[layer] * (1 if plan.layouts[layer] == "pool" else heads)
        return plan.prompt_len * heads // kept

    def at(self, index: Int[Array, ""]) -> "LayerSteps":
        """The steps of the layer `index`, called by the number of one of its kind."""
        return dataclasses.replace(self, index=index)

    def _here(self, layer: int) -> tuple[LayerPolicy, Context]:
        """What calls the rules of a layer, and the moment it is at."""
        policy, ctx = self.state.plan.layers[layer], context(self.state, layer, self.phase)
        if self.index is not None:
            policy = dataclasses.replace(policy, site=policy.site.shared())
            sizes = self.state.sizes and jax.tree.map(lambda *x: jnp.stack(x)[self.index], *self.state.sizes)
            ctx = dataclasses.replace(ctx, site=policy.site, index=self.index, sizes=sizes)
        return policy, dataclasses.replace(ctx, ids=self.tokens)

    def __call__(
        self,
        cache: Any,
        q: Float[Array, "B N T H"],
        k: Float[Array, "B K T H"],
        v: Float[Array, "B K T H"],
        *,
        layer: int,
        out_proj: Float[Array, "N H D"] | None = None,
        hidden: Float[Array, "B T D"] | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "B N T H"], Any, LayerStats]:
        """See `kvjax.drivers.attention.Attend`."""
        if not any(m.sees_hidden for m in self._observed(layer)):
            hidden = None
        if not isinstance(cache, PooledKV):
            return self._attend(cache, q, k, v, out_proj, hidden, layer=layer, **options)
        call = lambda self, *arrays: self._attend(*arrays, layer=layer, **options)
        return mesh.everywhere(call, self, cache, q, k, v, out_proj, hidden)

    def _attend(
        self, cache: Any, q: Array, k: Array, v: Array, out_proj: Any, hidden: Any, *, layer: int, **options: Any
    ) -> Any:
        q, k, v = (mesh.prompt_rows(x, None, mesh.HEADS) for x in (q, k, v))
        policy, ctx = self._here(layer)
        hiding = policy if q.shape[2] == 1 else None
        options = {"policy": hiding, "out_proj": out_proj, "hidden": hidden, **options}
        out, kv, stats = attend(cache, q, k, v, self.pos, ctx=ctx, observe=self._observed(layer), **options)
        if self.evict and not self.state.plan.policy.shared:
            kv = self._decided(kv, stats, layer)
        return out, kv, stats

    def _observed(self, layer: int) -> tuple[Measurement, ...]:
        return self.state.plan.specs[layer].observe(self.phase)

    def _decided(self, kv: LayerKV | PooledKV, stats: LayerStats, layer: int) -> LayerKV | PooledKV:
        """A layer as its policy leaves it."""
        policy, ctx = self._here(layer)
        return self.stored(kv.apply(lambda view: policy.step(view, stats, ctx)), layer)

    def decided(self, state: KVState, stats: AttentionStats) -> KVState:
        """A state of which the policy decides what stays, when the model has run."""
        plan: CachePlan = self.state.plan
        if plan.policy.shared:
            state = plan.policy(state, stats)
            layers = tuple(self.stored(kv, i) for i, kv in enumerate(state.layers))
        else:
            each = zip(state.layers, stats.layers, strict=True)
            layers = tuple(self._decided(kv, measured, i) for i, (kv, measured) in enumerate(each))
        return dataclasses.replace(state, layers=layers)

    def stored(self, kv: LayerKV | PooledKV, layer: int) -> LayerKV | PooledKV:
        """A layer as it is kept after this pass."""
        if self.phase == "decode":
            return kv
        (policy, ctx), capacity, kv = self._here(layer), self.state.plan.capacities[layer], kv.view()
        if self.state.plan.layouts[layer] == "pool":
            after = to_pool(kv, capacity, policy.reserve(kv, ctx) if self.ends else None)
        else:
            after = compact(kv, capacity)
        return policy.finish(after, ctx) if self.ends else after
