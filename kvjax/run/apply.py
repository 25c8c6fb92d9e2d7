"""Applies policies to states: updates all layers, and stores what is kept."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from kvjax.compose.evict import check_kept
from kvjax.contract import AttentionInputs, Context, Phase, Policy, Stats
from kvjax.observe import Keys
from kvjax.run.plan import Plan, learns, own_params, planned, rereads
from kvjax.run.state import AttnStats, State
from kvjax.storage import Storage, empty, to_pool


class HidesTokens(ValueError):
    """A policy whose rows read less than is stored was to be applied to what was read without it."""


@functools.partial(jax.jit, static_argnames=("policy", "capacity", "ends"))
def compacted(
    kv: Storage, ctx: Context, *, policy: Policy, capacity: int, ends: bool
) -> tuple[Storage, Bool[Array, "B"]]:
    """Compacts a layer after a prompt or a block; also says which sequences lost live tokens or have a fault.

    Args:
      kv: the layer after its policy's update.
      ctx: when and where.
      policy: the layer's policy.
      capacity: slots of a head, or of the pool.
      ends: whether the prompt ends here; only then is the layer stored as the policy wants it.
    """
    pool = policy.layout.pool and ends
    lost = ((kv.num_live.sum(-1) if pool else kv.num_live.max(-1)) > capacity) | kv.fault.any(-1)
    if not ends:
        return kv.replace(channels=None).compact(capacity), lost
    if not pool:
        return kv.compact(capacity), lost
    return to_pool(view := kv.view(), capacity, policy.reserve(view, ctx)), lost


def update_layers(state: State, stats: AttnStats) -> tuple[tuple[Storage, ...], tuple[Context, ...]]:
    """The layers after their policy's update, no slot moved, and the `Context` of each.

    Args:
      state: the state, whose layers have read some tokens.
      stats: what was observed of these.
    """
    plan, L = state.plan, len(state.layers)
    ctxs = tuple(state.context(i, stats.phase, stats.tokens) for i in range(L))
    runs = [(plan.policy, range(L))] if plan.policy.joint else [(p, [i]) for i, p in enumerate(plan.layers)]
    layers: list[Storage] = []
    for policy, run in runs:
        of = lambda x, run=run: tuple(x[i] for i in run)
        layers += _update(of(state.layers), of(stats.layers), of(ctxs), policy=policy)
    return tuple(layers), ctxs


@functools.partial(jax.jit, static_argnames=("policy",))
def _update(
    layers: tuple[Storage, ...], stats: tuple[Stats, ...], ctxs: tuple[Context, ...], *, policy: Policy
) -> tuple[Storage, ...]:
    """Layers after a policy's update, from what was observed of each."""
    views = tuple(kv.told(lambda k, _, own=own: own.get(Keys(), k)) for kv, own in zip(layers, stats, strict=True))
    found = policy.update_layers(views, stats, ctxs)
    each = zip(layers, found, views, strict=True)
    return tuple(kv.put(y, x).laid_out() for kv, x, y in each)


def evict_layers(state: State, stats: AttnStats, *, ends: bool = True) -> tuple[State, list[Bool[Array, "B"]]]:
    """The state after its policy's update, and by layer which sequences lost live tokens or have a fault.

    Args:
      state: the state, whose layers have read some tokens.
      stats: what was observed of these.
      ends: as for `step`.
    """
    (layers, ctxs), decodes = update_layers(state, stats), state.ready
    state = dataclasses.replace(state, ready=ends, steady=state.steady or not decodes)
    if decodes:
        return dataclasses.replace(state, layers=layers), [kv.fault.any(-1) for kv in layers]
    each = zip(layers, ctxs, state.plan.layers, state.plan.capacities, strict=True)
    kept = [compacted(kv, ctx, policy=policy, capacity=n, ends=ends) for kv, ctx, policy, n in each]
    return dataclasses.replace(state, layers=tuple(kv for kv, _ in kept)), [full for _, full in kept]


def check_layers_kept(state: State) -> None:
    """Refuses a known state with a layer that has a fault, or whose kept tokens are over the budget or not numbers."""
    steps = int((state.length > state.prompt_length).any()) and int(state.max_new_tokens.max())
    for i, (policy, kv) in enumerate(zip(state.plan.layers, state.layers, strict=True)):
        check_kept(policy, i, kv, state.hparams[i], steps)


def check_lost(state: State, lost: list[Bool[Array, "B"]]) -> None:
    """Refuses a known state in which `evict_layers` found sequences that lost live tokens or have a fault."""
    if bool(jnp.stack(lost).any()):
        check_layers_kept(state)
        raise ValueError("the policy keeps more tokens than its `sizes` asked slots for")


def own_arrays(state: State) -> State:
    """The state with copies of all but its layers, so that donating it leaves the one before valid."""
    own = jax.device_put(dataclasses.replace(state, layers=()), may_alias=False)
    return dataclasses.replace(own, layers=state.layers)


def with_policy(policy: Policy, state: State, stats: AttnStats, plan: Plan | None = None) -> State:
    """A state with the plan and the data of a policy. The layers of a prompt are still as they were read.

    Args:
      policy: the policy.
      state: what `forward` returned. One that decodes keeps its plan.
      stats: what was observed.
      plan: sizes of a larger budget, whose programs are used.

    Raises:
      ValueError: something that the policy wants to see was not observed, learned parameters that the state lacks.
    """
    prompt = not state.ready
    lengths = state.prompt_length
    lengths = lengths if isinstance(lengths, jax.core.Tracer) else np.asarray(lengths)
    plan, hparams = planned(
        policy, state.plan.infos, lengths, plan if prompt else state.plan, held=not prompt and state.plan.fitted
    )
    for i, p in enumerate(plan.layers):
        if prompt and not {*rereads(p)} <= {*stats.of(i)}:
            raise ValueError(f"{type(p).__name__} reads the prompt again before it evicts, as kvjax.prefill does")
        if missing := [o for o in p.observe(stats.phase) if o not in stats.of(i)]:
            raise ValueError(f"{missing[0]} was not observed: give the policy to forward(..., observe=)")
    infos = state.plan.infos
    params = own_params(policy, infos, state.params) if learns(policy, infos) else ()
    return dataclasses.replace(state, hparams=hparams, params=params, plan=plan)


@jax.jit
def stored_for_policy(state: State) -> State:
    """Stores a whole prompt, read under another policy, as the state's own policy wants it.

    Raises:
      ValueError: the policy cannot go on from a prompt that was read in this way.
    """
    layers = []
    for policy, info, kv in zip(state.plan.layers, state.plan.infos, state.layers, strict=True):
        view = kv.view()
        if jax.tree.leaves(view.memory) or view.log_weight is not None:
            raise ValueError("this prompt was read under a policy that remembers things; read it under Policy()")
        if policy.layout.by_query_head and info.num_kv_heads != info.num_query_heads:
            raise ValueError("this prompt's tokens are stored for kv heads, but the policy wants them for query heads")
        new = empty(info, policy, len(kv.pos), kv.k.dtype, kv.pos.shape[2])
        if (new.how.positions == "rank") != (kv.how.positions == "rank"):
            raise ValueError(
                'this prompt was read at other positions than the policy stores; only "original" and "shifted" mix, '
                "without a pool"
            )
        how = dataclasses.replace(new.how, mesh=kv.how.mesh)
        layers.append(new.replace(k=kv.k, v=kv.v, pos=kv.pos, fault=kv.fault, how=how))
    state = dataclasses.replace(state, layers=tuple(layers))
    so = "so kvjax.prefill must read the prompt under it"
    jax.eval_shape(lambda state: check_reads_all(state, "prefill", so), state)
    return state


def check_reads_all(state: State, phase: Phase, so: str) -> None:
    """Refuses a state's policy that hides live slots from rows, or weighs them. For traced code: nothing is computed.

    Args:
      state: the state under the policy, whose layers hold the rows.
      phase: of which rows: "prefill" for the whole prompt, "decode" for a token behind it.
      so: what follows from it.

    Raises:
      HidesTokens: in some layer the policy's `reads` are not None.
    """
    for i, (policy, info, kv) in enumerate(zip(state.plan.layers, state.plan.infos, state.layers, strict=True)):
        B, T = len(kv.pos), kv.pos.shape[2] if phase == "prefill" else 1
        q, hidden = jnp.zeros((B, info.num_query_heads, T, info.head_dim)), jnp.zeros((B, T, info.embed_dim))
        pos, ctx = jnp.broadcast_to(state.length[:, None] - 1, (B, T)), state.context(i, phase)
        told = AttentionInputs(q, q, kv.view().replace(memory=()), pos, ctx, lambda x, _: x, None, hidden)
        if policy.reads(kv.view(), told, ctx) is not None:
            raise HidesTokens(f"{type(policy).__name__} decides which of the live tokens a row reads, {so}")
