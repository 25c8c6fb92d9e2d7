"""One pass of a model over new tokens: every layer stores them, attends, observes, and evicts.

Layers that differ in data alone share a compiled program; a prompt's are compacted in it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.contract import (
    EMPTY,
    AttentionInputs,
    Context,
    Model,
    Observation,
    Phase,
    Policy,
    Positions,
    Rotate,
    Stats,
    kv_layers,
    kv_sources,
    turned_queries,
    unique,
)
from kvjax.observe import Keys
from kvjax.pallas_kernels import Columns, Logits, attention
from kvjax.pallas_kernels.pytree import pytree, static
from kvjax.run.apply import compacted, evict_layers
from kvjax.run.mesh import on_rows
from kvjax.run.scan import each_layer
from kvjax.run.state import AttnStats, State
from kvjax.storage import Storage
from kvjax.storage.codes import rows_of
from kvjax.storage.mesh import DATA, laid_out


@pytree
class Attend:
    """The attention of a layer, called with its cache and new queries, keys and values.

    Attributes:
      ctx: when and where.
      pos: positions of the new tokens, `EMPTY` for padding.
      policy: that of the layer.
      observe: what is observed.
      evict: whether the policy decides.
      grow: whether new tokens get new slots, as while a prompt is read; otherwise they take dead ones.
      gives: whether what was observed is returned.
      stores: whether the layer has keys and values; otherwise it reads those of an earlier one, under its policy.
    """

    ctx: Context
    pos: Int[Array, "B T"]
    policy: Policy = static(default=Policy())
    observe: tuple[Observation, ...] = static(default=())
    evict: bool = static(default=True)
    grow: bool = static(default=True)
    gives: bool = static(default=False)
    stores: bool = static(default=True)

    def __call__(
        self,
        kv: Storage,
        q: Float[Array, "B N T H"],
        k: Float[Array, "B _ T H"] | None,
        v: Float[Array, "B _ T V"] | None,
        *,
        layer: int,
        rotate: Rotate,
        out_proj: Float[Array, "N V D"] | None = None,
        hidden: Float[Array, "B T D"] | None = None,
        logits: Logits = Logits(),
    ) -> tuple[Float[Array, "B N T V"], Storage, tuple[Stats, tuple[Bool[Array, "B K"], ...]]]:
        """Returns the attention output, the cache after, and (statistics if `gives`, which heads lost tokens).

        Args:
          kv: the layer's cache.
          q, k, v: of the new tokens, before rotation.
          layer: a layer of this kind; which one it is stands in `ctx`.
          rotate: turns vectors at positions.
          out_proj, hidden: the output projection and the layer's input, for policies that look at them.
          logits: how the model's logits follow from products.
        """
        del layer
        policy, pos, K = self.policy, self.pos, kv.fault.shape[1]
        ctx = dataclasses.replace(self.ctx, window=logits.window)
        G, by_rank, raw_q = q.shape[1] // K, kv.how.positions == "rank", q
        if (of_text := getattr(rotate, "of_text", None)) is not None:  # a block of a prompt turns as the whole prompt
            rotate = of_text(jnp.where(ctx.length > ctx.prompt_length, 0, ctx.prompt_length))
        slots = None
        if k is not None and v is not None:
            if v.shape[-1] != (wanted := kv.how.latent or k.shape[-1]):
                raise ValueError(
                    f"the model's values have {v.shape[-1]} channels, but its configuration says {wanted}; mend the "
                    "values, or `kv_shape`"
                )
            k, v = (jnp.repeat(x, K // x.shape[1], axis=1) for x in (k, v))
            slots = None if self.grow else kv.free(pos)
            kv = kv.append(k if by_rank else rotate(k, pos[:, None]), v, pos, slots)
        seen = dataclasses.replace(ctx, hparams=(), params=())

        def inputs(kv: Storage) -> AttentionInputs:
            place = jnp.repeat(kv.places(pos), G, axis=1) if by_rank else pos[:, None]
            turned = turned_queries(rotate, q, place)
            view, raw_k = kv.told(rotate).replace(memory=()), rows_of(kv.view().k) if by_rank else None
            more = dataclasses.replace(logits, slopes=None), kv.bias(G, logits.slopes), raw_k
            return AttentionInputs(turned, raw_q, view, pos, seen, rotate, out_proj, hidden, *more)

        at, view = inputs(kv), kv.told(rotate)
        if self.stores and (entered := policy.enter(view, at, ctx)) is not view:
            kv = kv.put(view, entered)
            at = inputs(kv)
        found = Stats((o, o(at)) for o in self.observe)
        columns = {o: x for o, x in found.items() if isinstance(x, Columns)}
        reads = policy.reads(kv.told(rotate), at, ctx)
        own = self.grow and reads is None and pos.shape[1] == kv.pos.shape[-1]  # a whole prompt
        out = kv.attend(at.q, pos, tuple(columns.values()), reads, rotate=rotate, logits=logits, own=own)
        found.update(zip(columns, out.columns, strict=True))
        if self.evict:
            view = kv.told(rotate)
            kv = kv.put(view, policy.update(view, found, ctx))
        lost = ()
        if slots is not None:
            gone = (slots == kv.pos.shape[-1]) | kv.fault[..., None]
            lost = ((gone & (pos != EMPTY)[:, None]).any(2),)
        return out.out, kv, (found if self.gives else Stats(), lost)


def in_turn(model: Model, held: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """What is given for layers that hold keys and values, and for the others, in the order of all layers."""
    kv, own = kv_layers(model.config), iter(others)
    of = dict(zip(kv, held, strict=True))
    return [of[n] if n in of else next(own) for n in range(model.config.num_layers)]


def without_cache(pos: Int[Array, "B T"]) -> Callable[..., Any]:
    """Attention among T tokens without a cache, for layers to call in training. Differentiable.

    What it returns for a cache are the layer's keys and values, which layers that read them are given for theirs.

    Args:
      pos: positions, `EMPTY` for padding.
    """

    def attend(
        cache: Any,
        q: Float[Array, "B N T H"],
        k: Float[Array, "B K T H"] | None,
        v: Float[Array, "B K T V"] | None,
        *,
        rotate: Rotate,
        logits: Logits = Logits(),
        **_: Any,
    ) -> tuple[Float[Array, "B N T V"], Any, tuple[()]]:
        k, v = cache if k is None or v is None else (rotate(k, pos[:, None]), v)
        places = jnp.broadcast_to(pos[:, None], k.shape[:3])
        q = turned_queries(rotate, q, pos[:, None])
        return attention(q, k, v, pos, places, logits=logits).out, (k, v), ()

    return attend


@functools.partial(jax.jit, static_argnames=("model",))
def embed(
    model: Model,
    params: PyTree,
    tokens: Int[Array, "B T"],
    length: Int[Array, "B"],
    valid: Int[Array, "B"] | Bool[Array, "B"] | None,
) -> tuple[Float[Array, "B T D"], Int[Array, "B T"], Int[Array, "B T"], Int[Array, "B"]]:
    """The residual stream of new tokens, the tokens with 0 for padding, their positions, and the length after them.

    Args:
      model, params: the model, and its parameters that are of no layer.
      tokens: ids, padded on the left.
      length: tokens that each sequence has read before.
      valid: how many of the last columns are tokens of each sequence, None for all.
    """
    T = tokens.shape[1]
    valid = jnp.full_like(length, T) if valid is None else valid.astype(length.dtype)
    column = jnp.arange(T)[None] - (T - valid)[:, None]
    tokens, pos = jnp.where(column >= 0, tokens, 0), jnp.where(column >= 0, length[:, None] + column, EMPTY)
    return model.embed(params, tokens, pos), tokens, pos, length + valid


@functools.partial(jax.jit, static_argnames=("model", "layer", "capacity", "ends"))
def layer_step(
    model: Model,
    layer: int,
    params: PyTree,
    x: Float[Array, "B T D"],
    kv: Any,
    attend: Any,
    capacity: int | None = None,
    ends: bool = True,
) -> tuple[Float[Array, "B T D"], Any, Any]:
    """Runs a layer: the residual stream and the cache after it, and what else `attend`, a pytree, gave.

    A layer without keys and values has a state of its own for a cache, and `Positions` for `attend`. With a `capacity`
    the cache is compacted (`compacted`), which then says what was lost.
    """
    made = model.block(layer, params, x, kv, attend)
    if not isinstance(made, tuple) or len(made) != 3:
        raise ValueError("the model's block must return three values: x, the cache, and what else attend returned")
    x, after, found = made
    if isinstance(attend, Positions):
        return x, after, found
    if kv.how.mesh is not None:
        x, after = laid_out(x, kv.how.mesh, (DATA,)), after.laid_out()
    if capacity is None:
        return x, after, found
    after, lost = compacted(after, attend.ctx, policy=attend.policy, capacity=capacity, ends=ends)
    return x, after, (found[0], (lost[:, None],))


@functools.partial(jax.jit, static_argnames=("model", "every"))
def head(
    model: Model, params: PyTree, x: Float[Array, "B T D"], lost: tuple[Bool[Array, "B _"], ...], every: bool = False
) -> Float[Array, "B *T V"]:
    """Logits after the last column, or every one, NaN for sequences that have lost tokens in a layer or a head."""
    logits = model.head(params, x) if every else model.head(params, x[:, -1:])[:, -1]
    if logits.shape[-1] != (vocab := model.config.vocab_size):
        raise ValueError(f"the model's head gives {logits.shape[-1]} logits a token, but vocab_size is {vocab}")
    if not lost:
        return logits
    same = len({x.shape for x in lost}) == 1
    each = lost if same else [x.any(1, keepdims=True) for x in lost]
    gone = functools.reduce(jnp.logical_or, each).any(1, keepdims=True)
    return jnp.where(gone[..., None] if every else gone, jnp.nan, logits)


def step(
    model: Model,
    params: PyTree,
    tokens: Int[Array, "B T"] | Int[np.ndarray, "B T"],
    state: State,
    valid: Array | np.ndarray | None,
    *,
    evict: bool = True,
    ends: bool = True,
    gives: bool = False,
    every: bool = False,
    observe: tuple[Policy, ...] = (),
    after_layer: Callable[[], object] | None = None,
) -> tuple[Float[Array, "B *T V"], State, AttnStats]:
    """One pass over new tokens: logits after the last column, the state after, and what was observed, if `gives`.

    Args:
      model, params: the model.
      tokens: ids "B T", padded on the left.
      state: the state before. Unless it is ready, tokens are of a prompt, and get new slots.
      valid: how many of the last columns are tokens of each sequence "B", None for all.
      evict: whether the policy decides in this pass.
      ends: whether the prompt ends with these tokens; only then are layers stored as the policy wants them.
      observe: policies that look at what is observed, besides the state's.
      gives: as in `Attend`.
      every: logits after every column.
      after_layer: called when a layer has been compiled and started, as a bar of progress is.
    """
    plan, grow, sources = state.plan, not state.ready, kv_sources(model.config)
    joint = plan.policy.joint or bool(sources)  # decisions follow when all layers have read
    phase: Phase = "decode" if tokens.shape[1] == 1 and not grow else "prefill"
    outer, each = model.parts(params)
    if (mesh := state.layers[0].how.mesh) is not None:
        tokens, valid = on_rows((tokens, valid), mesh)
    x, tokens, pos, length = embed(model, outer, tokens, state.length, valid)
    state = dataclasses.replace(state, length=length)
    at_once, inputs = evict and not joint, []
    for i, (policy, kv) in enumerate(zip(plan.layers, state.layers, strict=True)):
        later = (Keys(),) if (gives or joint) and kv.how.positions == "rank" else ()  # decisions after all layers
        others = (o for p in observe for o in p.at(i, len(plan.layers)).observe(phase))
        sees = unique((*policy.observe(phase), *others, *later))
        how = {"evict": at_once, "grow": grow, "gives": gives or joint}
        inputs.append((kv, Attend(state.context(i, phase, tokens), pos, policy, sees, **how)))

    held = kv_layers(model.config)
    kinds, slots = [(model.alike[n], policy) for n, policy in zip(held, plan.layers, strict=True)], plan.capacities
    shares, now = grow and isinstance(x, jax.core.Tracer) and not sources, dict[int, Storage]()
    if grow and not any(policy.layout.pool for policy in plan.layers):  # all sizes share a program, and are cut after
        slots = tuple(max(n for n, other in zip(slots, kinds, strict=True) if other == kind) for kind in kinds)

    def layer(n: int, x: Array, params: PyTree, here: tuple[Any, Any]) -> tuple[Array, PyTree]:
        kv, attend = here
        if n in sources:
            return layer_step(model, model.alike[n], params, x, now[sources[n]], attend)[0], kv
        if n not in held:
            return layer_step(model, model.alike[n], params, x, kv, attend)[:2]
        i, compacts = held.index(n), at_once and grow
        x, kv, (found, lost) = layer_step(
            model, model.alike[n], params, x, kv, attend, slots[i] if compacts else None, ends or not compacts
        )
        now[i] = kv
        if compacts and not shares and slots[i] != plan.capacities[i]:
            kv, full = compacted(kv, attend.ctx, policy=attend.policy, capacity=plan.capacities[i], ends=ends)
            lost = (lost[0] | full[:, None],)
        return x, (kv, found, lost)

    apart = [n for n in range(len(each)) if n not in held]
    shared = in_turn(model, [*zip(kinds, slots, strict=True)], [model.alike[n] for n in apart]) if shares else None
    others = []
    for n, own in zip(apart, state.others, strict=True):
        i = sources.get(n)
        reads = None if i is None else dataclasses.replace(inputs[i][1], observe=(), evict=False, stores=False)
        others.append((own, Positions(pos) if reads is None else reads))
    every_layer = in_turn(model, inputs, others)
    x, done = each_layer(layer, x, each, every_layer, kinds=shared, after_layer=after_layer)
    layers, seen, lost = zip(*(done[n] for n in held), strict=True)
    others = tuple(done[n] for n in apart)
    lost = tuple(x for each in lost for x in each)
    if at_once and shares and slots != plan.capacities:
        cuts = [*zip(layers, plan.capacities, strict=True)]
        lost = tuple(full | (kv.num_live > n) for full, (kv, n) in zip(lost, cuts, strict=True))
        layers = tuple(kv if n == most else kv.compact(n) for (kv, n), most in zip(cuts, slots, strict=True))
    ready = state.ready or (at_once and ends)
    state = dataclasses.replace(state, layers=layers, others=others, ready=ready, steady=evict and state.steady)
    stats = AttnStats(seen, tokens, phase)
    if joint and evict:
        state, full = evict_layers(state, stats, ends=ends)
        lost = (*lost, *(x[:, None] for x in full)) if phase == "prefill" else lost
    if valid is not None and not grow:  # sequences without a new token keep what they had
        reads = jnp.asarray(valid, bool)
        layers = tuple(new.where(reads, old) for new, (old, _) in zip(state.layers, inputs, strict=True))
        state = dataclasses.replace(state, layers=layers)
    return head(model, outer, x, lost, every=every), state, stats
