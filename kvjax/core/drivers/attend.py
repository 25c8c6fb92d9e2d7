"""One pass of a model over new tokens: every layer stores them, attends, observes, and evicts."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.core.contract import EMPTY, AttentionInputs, Context, Phase, Rotate, unique
from kvjax.core.drivers.state import AttnStats, State
from kvjax.core.evict import unscored
from kvjax.core.storage import Storage
from kvjax.pallas_kernels import Columns
from kvjax.pallas_kernels.pytree import pytree, static


@pytree
class Attend:
    """What a model calls in every layer, with the layer's cache and its new queries, keys and values.

    Attributes:
      state: the state without its layers.
      tokens: the ids that are read.
      pos: their positions "B T", -1 for padding; None where layers are only stored.
      index: the layer's number, where it is traced.
      phase: whether a prompt is read or a token decoded.
      evict: whether the policy decides in this pass.
      ends: whether the prompt ends with these tokens; only then are layers stored as the policy wants them.
      grow: whether new tokens get new slots, as while a prompt is read; otherwise they take dead ones.
      gives: whether what was observed is returned.
      observe: what else is observed, one tuple a layer; () for nothing.
      shares: whether layers of one kind may share a program (`models.depth`).
      steady: whether layers were within this policy's budget before.
      guards: whether logits become NaN where a token finds no slot, or what was kept of the prompt was no choice
        (`evict.unscored`). Loops that have counted them before leave it out.
    """

    state: State
    tokens: Int[Array, "B T"] | None
    pos: Any
    index: Int[Array, ""] | None = None
    phase: Phase = static(default="prefill")
    evict: bool = static(default=True)
    ends: bool = static(default=True)
    grow: bool = static(default=True)
    gives: bool = static(default=False)
    observe: tuple[tuple[Any, ...], ...] = static(default=())
    shares: bool = static(default=False)
    steady: bool = static(default=True)
    guards: bool = static(default=True)

    def kind(self, layer: int) -> tuple[Any, ...]:
        """What layers that share a program must have in common."""
        return self.state.kind(layer)

    def together(self, layer: int) -> int:
        """How many layers may share a program: what they keep is held twice until the last of them is done."""
        return max(1, self.state.plan.infos[layer].prompt_len // self.state.plan.capacities[layer])

    def at(self, index: Int[Array, ""]) -> "Attend":
        """The same for the layer of a traced number."""
        return dataclasses.replace(self, index=index)

    def observed(self, layer: int) -> tuple[Any, ...]:
        """What is observed in a layer: what its policy wants, and what was asked for besides."""
        more = self.observe[layer] if self.observe else ()
        return unique((*self.state.plan.layers[layer].observe(self.phase), *more))

    def __call__(
        self,
        kv: Storage,
        q: Float[Array, "B N T H"],
        k: Float[Array, "B _ T H"],
        v: Float[Array, "B _ T H"],
        *,
        layer: int,
        rotate: Callable[..., Array],
        out_proj: Float[Array, "N H D"] | None = None,
        hidden: Float[Array, "B T D"] | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        slopes: Any = None,
    ) -> tuple[Float[Array, "B N T H"], Storage, tuple[Any, ...]]:
        """What attention gives, the layer's cache afterwards, and what was observed, if somebody wants it.

        Args:
          kv: the layer's cache.
          q, k, v: of the new tokens, before rotation.
          layer: which layer it is.
          rotate: turns vectors at positions.
          out_proj, hidden: the output projection and the layer's input, for policies that look at them.
          scale, window, softcap, slopes: the model's attention; `slopes` are ALiBi's.
        """
        policy, pos = self.state.plan.layers[layer], self.pos
        ctx = dataclasses.replace(self.state.context(layer, self.phase, self.tokens, self.index), window=window)
        K = self.state.plan.infos[layer].num_kv_heads
        k, v = (jnp.repeat(x, K // k.shape[1], axis=1) for x in (k, v))
        G, by_rank, raw_q = q.shape[1] // K, kv.how.positions == "rank", q
        rotate = _in_prompt(rotate, ctx)
        k = k if by_rank else rotate(k, pos[:, None])
        lost = None
        if self.guards and not self.grow:
            lost = (kv.room < (pos != EMPTY).sum(-1, keepdims=True)).any(-1) | unscored(kv).any(-1)
        kv = kv.append(k, v, pos, grow=self.grow)
        seen = dataclasses.replace(ctx, hparams=(), params=())
        how = {"scale": scale, "window": window, "softcap": softcap}

        def inputs(kv: Storage) -> AttentionInputs:
            turned = rotate(q, jnp.repeat(kv.places(pos), G, axis=1) if by_rank else pos[:, None])
            view, bias = kv.view().replace(memory=()), kv.bias(G, slopes)
            return AttentionInputs(turned, raw_q, view, pos, seen, rotate, out_proj, hidden, bias=bias, **how)

        at, before = inputs(kv), kv
        kv = _changed(kv, lambda view: policy.enter(view, at, ctx))
        at = at if kv is before else inputs(kv)
        found = {o: o(at) for o in self.observed(layer)}
        columns = {o: x for o, x in found.items() if isinstance(x, Columns)}
        reads = policy.reads(kv.view(), at, ctx)
        out = kv.attend(at.q, pos, tuple(columns.values()), reads, rotate=rotate, slopes=slopes, **how)
        found |= dict(zip(columns, out.columns, strict=True))
        joint = self.state.plan.policy.joint
        if self.evict and not joint:
            kv = _changed(kv, lambda view: policy.update(view, found, ctx))
            kv, more = self.stored(kv, layer, ctx)
            lost = more if lost is None else lost if more is None else lost | more
        y = out.out if lost is None else jnp.where(lost[:, None, None, None], jnp.nan, out.out)
        return y, kv, tuple(found.values()) if joint or self.gives else ()

    def stored(self, kv: Storage, layer: int, ctx: Context) -> tuple[Storage, Bool[Array, "B"] | None]:
        """A layer as it is kept after a prompt, and which sequences lost live tokens, or kept some by no choice."""
        lost = unscored(kv).any(-1) if self.phase == "prefill" else None
        if not self.grow:
            return kv, lost
        policy, capacity = self.state.plan.layers[layer], self.state.plan.capacities[layer]
        pool = policy.layout.pool and self.ends
        full = (kv.num_live.sum(-1) if pool else kv.num_live.max(-1)) > capacity
        lost = full if lost is None else lost | full
        if not self.ends:
            return kv.replace(channels=None).compact(capacity), lost
        return kv.compact(capacity, policy.reserve(kv.view(), ctx) if pool else None), lost


def _in_prompt(rotate: Rotate, ctx: Context) -> Rotate:
    """The rotation of a prompt's rows, which may be a block of it: scalings by length take the whole prompt's."""
    of_text = getattr(rotate, "of_text", None)
    return rotate if of_text is None else of_text(jnp.where(ctx.length > ctx.prompt_length, 0, ctx.prompt_length))


def _changed(kv: Storage, change: Callable[[Any], Any]) -> Storage:
    view = kv.view()
    found = change(view)
    return kv if found is view else kv.put(found)


def step(
    model: Any,
    params: PyTree[Any],
    tokens: Int[Array, "B T"],
    state: State,
    pos: Int[Array, "B T"],
    phase: Phase,
    *,
    evict: bool = True,
    ends: bool = True,
    grow: bool = False,
    gives: bool = False,
    observe: tuple[tuple[Any, ...], ...] = (),
    guards: bool = True,
) -> tuple[Float[Array, "B V"], State, AttnStats | None]:
    """One pass over new tokens: logits after the last column, the state after, and what was observed, if asked for.

    Args:
      model, params: the model.
      tokens: ids, padded on the left.
      state: the state before, its lengths those after this pass.
      pos: the tokens' positions, -1 for padding.
      phase, evict, ends, grow, gives, observe, guards: see `Attend`.
    """
    joint = state.plan.policy.joint
    shares = grow and evict and not joint and not gives and not state.layers[0].pos.shape[-1]
    how = {"phase": phase, "evict": evict, "ends": ends, "grow": grow, "gives": gives, "observe": observe}
    attend = Attend(dataclasses.replace(state, layers=()), tokens, pos, shares=shares, guards=guards, **how)
    where = {"positions": pos} if getattr(model.config, "learned_positions", False) else {}
    logits, layers, seen = model(params, tokens, state.layers, attend=attend, last_only=True, **where)
    ready = state.ready or (evict and ends and not joint)
    logits, state = logits[:, -1], dataclasses.replace(state, layers=layers, ready=ready)
    if not (joint or gives):
        return logits, state, None
    stats = AttnStats(tuple(seen), tokens, tuple(attend.observed(i) for i in range(len(layers))), phase)
    if joint and evict:
        state, lost = decided(state, stats, attend)
        logits = logits if lost is None else jnp.where(lost[:, None], jnp.nan, logits)
    return logits, state, stats


def updated(state: State, stats: AttnStats, *, steady: bool = True) -> tuple[tuple[Storage, ...], tuple[Context, ...]]:
    """The layers after their policy's update, no slot moved, and what the policy was told of each.

    Args:
      state: the state, whose layers have read some tokens.
      stats: what was observed of these.
      steady: whether layers were within this policy's budget before.
    """
    plan, L = state.plan, len(state.layers)
    ctxs = tuple(dataclasses.replace(state.context(i, stats.phase, stats.tokens), steady=steady) for i in range(L))
    views, named = tuple(kv.view() for kv in state.layers), tuple(stats.of(i) for i in range(L))
    if plan.policy.joint:
        found = plan.policy.update_layers(views, named, ctxs)
    else:
        each = zip(plan.layers, views, named, ctxs, strict=True)
        found = tuple(policy.update(view, seen, ctx) for policy, view, seen, ctx in each)
    return tuple(kv if x is y else kv.put(x) for kv, x, y in zip(state.layers, found, views, strict=True)), ctxs


def decided(state: State, stats: AttnStats, attend: Attend) -> tuple[State, Bool[Array, "B"] | None]:
    """The state after its policy's update, and which sequences lost live tokens, or kept some by no choice.

    Args:
      state: the state, whose layers have read some tokens.
      stats: what was observed of these.
      attend: how layers are stored afterwards.
    """
    layers, ctxs = updated(state, stats, steady=attend.steady)
    kept = [attend.stored(kv, i, ctx) for i, (kv, ctx) in enumerate(zip(layers, ctxs, strict=True))]
    lost = [x for _, x in kept if x is not None]
    state = dataclasses.replace(state, layers=tuple(kv for kv, _ in kept), ready=attend.ends)
    return state, functools.reduce(jnp.logical_or, lost) if lost else None
