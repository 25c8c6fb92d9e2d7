"""The steps that join a model and a policy: read prompts, whole or in blocks, and decode a token."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.contract import EMPTY, AttentionInputs, Context, Phase, Policy, unique
from kvjax.core.plan import Plan, infos_of, init_policy_params, planned
from kvjax.core.storage import empty
from kvjax.pallas_kernels import Columns
from kvjax.pallas_kernels.pytree import pytree, static


@pytree
class AttnStats:
    """What was observed of the rows just read, layer by layer."""

    layers: tuple
    tokens: Any = None
    names: tuple = static(default=())
    phase: Phase = static(default="prefill")

    def of(self, layer: int) -> dict:
        """Observations of a layer."""
        return dict(zip(self.names[layer], self.layers[layer], strict=True))


@pytree
class State:
    """The cache of a whole model, and where generation stands.

    Attributes:
      layers: a storage for every layer.
      length, prompt_length: "B"; keys: "B", PRNG keys; max_new_tokens: "B", tokens that the run is planned for.
      hparams: what the policy's `sizes` gave, one tree a layer, "B ...".
      params: the policy's learned parameters, one tree a layer, or (); the same for all sequences.
      ready: whether the prompt has been read to its end and its layers have the slots that they decode in.
    """

    layers: tuple
    length: Any
    prompt_length: Any
    keys: Any
    max_new_tokens: Any
    hparams: tuple
    params: tuple = ()
    plan: Plan = static(default=None)
    ready: bool = static(default=False)

    def __getitem__(self, rows) -> "State":
        """The sequences `rows`, in that order; one may be taken several times (beams, several questions)."""
        taken = jax.tree.map(lambda x: x[rows], dataclasses.replace(self, params=(), layers=()))
        return dataclasses.replace(taken, params=self.params, layers=tuple(kv.take(rows) for kv in self.layers))

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(kv.nbytes for kv in self.layers)

    def context(self, layer: int, phase: Phase, tokens=None, index=None) -> Context:
        """The moment in a layer; `index` is its number where it is traced, among layers of one kind."""
        data = self.hparams[layer], self.params[layer] if self.params else ()
        if index is not None:
            alike = [i for i in range(len(self.hparams)) if _kind(self, i) == _kind(self, layer)]
            at = jnp.searchsorted(jnp.asarray(alike), index)
            each = [(self.hparams[i], self.params[i] if self.params else ()) for i in alike]
            data = jax.tree.map(lambda *x: jnp.stack(x)[at], *each)
        here = jnp.int32(layer) if index is None else index
        info, pool = self.plan.infos[layer], self.plan.layers[layer].layout.pool
        most = info.prompt_len + 1 if pool else self.plan.capacities[layer]
        how = {"phase": phase, "width": info.prompt_len, "capacity": most, "window": info.window}
        return Context(self.length, self.prompt_length, self.keys, here, self.max_new_tokens, *data, tokens, **how)


def _kind(state: State, layer: int):
    """What is static about a layer: those of one kind share a program, because all that differs is data."""
    plan = state.plan
    shapes = tuple(
        x.shape for x in jax.tree.leaves((state.hparams[layer], state.params[layer] if state.params else ()))
    )
    return plan.layers[layer], plan.capacities[layer], dataclasses.replace(plan.infos[layer], layer=0), shapes


@pytree
class Attend:
    """What a model calls in every layer: store the new rows, attend, observe, evict."""

    state: State
    tokens: Any
    pos: Any
    index: Any = None
    phase: Phase = static(default="prefill")
    evict: bool = static(default=True)
    ends: bool = static(default=True)
    grow: bool = static(default=True)
    gives: bool = static(default=False)
    observe: tuple = static(default=())
    shares: bool = static(default=False)
    steady: bool = static(default=True)

    def kind(self, layer: int):
        """For `models.depth`: layers of one kind are scanned."""
        return _kind(self.state, layer)

    def together(self, layer: int) -> int:
        """For `models.depth`: how many layers may be scanned, as what they keep stands twice for a moment."""
        return max(1, self.state.plan.infos[layer].prompt_len // self.state.plan.capacities[layer])

    def at(self, index) -> "Attend":
        """For `models.depth`: the steps of a layer whose number is traced."""
        return dataclasses.replace(self, index=index)

    def observed(self, layer: int) -> tuple:
        """What is observed in a layer: what its policy wants, and others."""
        return unique(
            (*self.state.plan.layers[layer].observe(self.phase), *(self.observe[layer] if self.observe else ()))
        )

    def __call__(
        self,
        kv,
        q,
        k,
        v,
        *,
        layer,
        rotate,
        out_proj=None,
        hidden=None,
        scale=None,
        window=None,
        softcap=None,
        slopes=None,
    ):
        policy, pos = self.state.plan.layers[layer], self.pos
        ctx = dataclasses.replace(self.state.context(layer, self.phase, self.tokens, self.index), window=window)
        K = self.state.plan.infos[layer].num_kv_heads
        k, v = (jnp.repeat(x, K // k.shape[1], axis=1) for x in (k, v))
        G, by_rank, raw_q = q.shape[1] // K, kv.how.positions == "rank", q
        k = k if by_rank else rotate(k, pos[:, None])
        lost = None if self.grow else (kv.room < (pos != EMPTY).sum(-1, keepdims=True)).any(-1)
        kv = kv.append(k, v, pos, grow=self.grow)
        turned = lambda kv: rotate(q, jnp.repeat(kv.places(pos), G, axis=1) if by_rank else pos[:, None])
        seen = dataclasses.replace(ctx, hparams=(), params=())
        how = {"scale": scale, "window": window, "softcap": softcap}

        def inputs(kv):
            return AttentionInputs(
                turned(kv),
                raw_q,
                kv.view().replace(memory=()),
                pos,
                seen,
                rotate,
                out_proj,
                hidden,
                bias=kv.bias(G, slopes),
                **how,
            )

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

    def stored(self, kv, layer: int, ctx: Context):
        """A layer as it is kept after a prompt, in its layout, and whether live tokens found no slot "B"."""
        if not self.grow:
            return kv, None
        policy, capacity = self.state.plan.layers[layer], self.state.plan.capacities[layer]
        pool = policy.layout.pool and self.ends
        lost = (kv.num_live.sum(-1) if pool else kv.num_live.max(-1)) > capacity
        if not self.ends:
            return kv.replace(channels=None).compact(capacity), lost
        return kv.compact(capacity, policy.reserve(kv, ctx) if pool else None), lost


def _changed(kv, change):
    view = kv.view()
    found = change(view)
    return kv if found is view else kv.put(found)


def step(
    model,
    params,
    tokens,
    state: State,
    pos,
    phase: Phase,
    *,
    evict=True,
    ends=True,
    grow=False,
    gives=False,
    observe=(),
):
    """One pass over new tokens "B T" at positions "B T": logits of the last column, the state, and what was observed."""
    joint = state.plan.policy.joint
    shares = grow and evict and not joint and not gives and not state.layers[0].pos.shape[-1]
    attend = Attend(
        dataclasses.replace(state, layers=()), tokens, pos, None, phase, evict, ends, grow, gives, observe, shares
    )
    logits, layers, seen = model(params, tokens, state.layers, attend=attend, last_only=True)
    ready = state.ready or (evict and ends and not joint)
    logits, state = logits[:, -1], dataclasses.replace(state, layers=layers, ready=ready)
    if not (joint or gives):
        return logits, state, None
    stats = AttnStats(tuple(seen), tokens, tuple(attend.observed(i) for i in range(len(layers))), phase)
    if joint and evict:
        state, lost = decided(state, stats, attend)
        logits = logits if lost is None else jnp.where(lost[:, None], jnp.nan, logits)
    return logits, state, stats


def decided(state: State, stats: AttnStats, attend: Attend):
    """The state after its policy's update, from what was observed; and whether live tokens found no slot "B"."""
    plan, L = state.plan, len(state.layers)
    ctxs = tuple(
        dataclasses.replace(state.context(i, stats.phase, stats.tokens), steady=attend.steady) for i in range(L)
    )
    views, named = tuple(kv.view() for kv in state.layers), tuple(stats.of(i) for i in range(L))
    if plan.policy.joint:
        found = plan.policy.update_layers(views, named, ctxs)
    else:
        found = tuple(p.update(*x) for p, *x in zip(plan.layers, views, named, ctxs, strict=True))
    layers = [kv if x is y else kv.put(x) for kv, x, y in zip(state.layers, found, views, strict=True)]
    kept = [attend.stored(kv, i, ctx) for i, (kv, ctx) in enumerate(zip(layers, ctxs, strict=True))]
    lost = [x for _, x in kept if x is not None]
    return dataclasses.replace(state, layers=tuple(kv for kv, _ in kept), ready=attend.ends), functools.reduce(
        jnp.logical_or, lost
    ) if lost else None


def start(
    model,
    policy: Policy,
    lengths,
    width: int,
    max_new_tokens: int,
    *,
    key=None,
    plan=None,
    slots: bool = False,
    policy_params=None,
) -> State:
    """An empty state; with `slots`, in the shapes that it has between blocks of a prompt."""
    config = model.config
    plan, hparams = planned(policy, infos_of(config, policy, width, max_new_tokens), lengths, plan)
    if policy_params is None:
        shapes = jax.eval_shape(
            lambda: init_policy_params(config, policy, jax.random.key(0), width=width, max_new_tokens=max_new_tokens)
        )
        if jax.tree.leaves(shapes):
            raise ValueError(
                "the policy has learned parameters: give policy_params=, those of init_policy_params to begin with"
            )
    B, L = lengths.shape[0], len(plan.layers)
    each = zip(plan.layers, plan.infos, plan.capacities, strict=True)
    layers = tuple(empty(i, B, config.dtype, p.memory(i), p.layout, p.writes, c if slots else 0) for p, i, c in each)
    key = jax.random.key(0) if key is None else key
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(B))
    lengths, given = jnp.asarray(lengths, jnp.int32), tuple(policy_params or ())
    if given and len(given) != L:
        raise ValueError(f"policy_params has {len(given)} trees for {L} layers")
    return State(
        layers, jnp.zeros_like(lengths), lengths, keys, jnp.full((B,), max_new_tokens, jnp.int32), hparams, given, plan
    )


def prefill(
    model, params, tokens, lengths, policy: Policy, max_new_tokens: int, *, block: int | None = None, **options
):
    """Reads left-padded prompts "B T": logits of the next token, and the state.

    With `block`, so many tokens at a time, each followed by an eviction: memory is that of a budget and a block.
    Options are `key`, `plan`, `policy_params` (see `start`).
    """
    from kvjax.core.drivers.replay import reread, rereads

    if traced := isinstance(lengths, jax.core.Tracer):
        lengths = jnp.asarray(lengths)
    else:
        tokens, lengths = (
            (tokens if isinstance(tokens, jax.core.Tracer) else np.asarray(tokens)),
            np.asarray(lengths, np.int32),
        )
    T = tokens.shape[1]
    whole = block is None or block >= T
    state = start(model, policy, lengths, T, max_new_tokens, slots=not whole, **options)
    how = rereads(state)
    if how is not None:
        if not whole:
            raise ValueError("a prompt that is read again before anything is evicted cannot be read in blocks")
        logits, state, stats = read(model, params, jnp.asarray(tokens), state, jnp.asarray(lengths), False, True, True)
        return logits, reread(model, params, tokens, lengths, state, stats, how)
    if whole:
        logits, state, _ = read(model, params, jnp.asarray(tokens), state, jnp.asarray(lengths))
        return held(logits, traced), state
    tokens = np.pad(tokens, ((0, 0), (-T % block, 0)))
    num = tokens.shape[1] // block
    for i in range(num):
        valid = np.clip(lengths - (num - 1 - i) * block, 0, block)
        here = jnp.asarray(tokens[:, i * block : (i + 1) * block])
        logits, state, _ = read(model, params, here, state, jnp.asarray(valid), True, i == num - 1)
    return held(logits, traced), state


def held(logits, traced: bool):
    """Logits, unless they say that a token found no slot: rows are NaN then, an error where it can be seen."""
    if not traced and not isinstance(logits, jax.core.Tracer) and bool(jnp.isnan(logits).any()):
        raise ValueError(
            "logits are not numbers: the model's are not, or there are more tokens than slots, which `sizes` asked for"
        )
    return logits


@functools.partial(jax.jit, static_argnums=(0, 5, 6, 7, 8))
def read(model, params, tokens, state: State, valid, evict=True, ends=True, gives=False, observe=()):
    """Reads the last `valid` "B" of some columns of a prompt: logits, the state, and, if asked, what was observed."""
    T = tokens.shape[1]
    column = jnp.arange(T)[None] - (T - valid)[:, None]
    pos = jnp.where(column >= 0, state.length[:, None] + column, EMPTY)
    state = dataclasses.replace(state, length=state.length + valid)
    return step(
        model,
        params,
        jnp.where(column >= 0, tokens, 0),
        state,
        pos,
        "prefill",
        evict=evict,
        ends=ends,
        grow=True,
        gives=gives,
        observe=observe,
    )


def decode(model, params, token, state: State, active=None):
    """One token "B" of every sequence that is `active` "B" (None for all): append, attend, update, evict."""
    read = jnp.ones_like(state.length) if active is None else active.astype(jnp.int32)
    pos = jnp.where(read > 0, state.length, EMPTY)[:, None]
    moved = dataclasses.replace(state, length=state.length + read)
    logits, after, _ = step(model, params, token[:, None], moved, pos, "decode")
    if active is None:
        return logits, after
    layers = tuple(new.where(active, old) for new, old in zip(after.layers, state.layers, strict=True))
    return logits, dataclasses.replace(after, layers=layers)
