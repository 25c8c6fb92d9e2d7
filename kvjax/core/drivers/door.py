"""The user's door: `forward` reads tokens and says what was observed, `policy(state, stats)` decides."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.contract import EMPTY, Policy, unique
from kvjax.core.drivers.replay import Reread
from kvjax.core.drivers.steps import Attend, AttnStats, State, decided, held, step
from kvjax.core.plan import planned
from kvjax.core.storage import empty


def forward(
    model: Any, params: Any, tokens: Any, state: State, *, valid=None, evict: bool = False, observe: tuple = ()
):
    """Reads tokens "B T" after the text of a state: (logits of the next token, state, what was observed).

    Into an empty state they are the prompt, which a policy must be applied to before anything follows; afterwards, one
    token decodes and several take slots that are free. All at once or not at all, the state's policy evicts.

    Args:
      valid: how many of the last columns are real, "B"; None for all.
      evict: whether the state's policy is applied at once.
      observe: policies that will be applied to what is observed here, beside the state's.
    """
    L, T = len(state.layers), tokens.shape[1]
    grow = not state.ready
    if grow and state.layers[0].pos.shape[-1]:
        raise ValueError(
            "this state holds a whole prompt: apply a policy to it, policy(state, stats), before more is read"
        )
    phase = "decode" if T == 1 and not grow else "prefill"
    more = tuple(unique(o for p in observe for o in p.at(i, L).observe(phase)) for i in range(L)) if observe else ()
    valid = jnp.full(state.length.shape, T, jnp.int32) if valid is None else jnp.asarray(valid, jnp.int32)
    found = _forward(model, params, jnp.asarray(tokens), state, valid, phase, evict, grow, more)
    held(found[0], T == 1 or isinstance(found[0], jax.core.Tracer))
    return found


@functools.partial(jax.jit, static_argnums=(0, 5, 6, 7, 8))
def _forward(model, params, tokens, state, valid, phase, evict, grow, observe):
    T = tokens.shape[1]
    column = jnp.arange(T)[None] - (T - valid)[:, None]
    pos = jnp.where(column >= 0, state.length[:, None] + column, EMPTY)
    old, tokens = state, jnp.where(column >= 0, tokens, 0)
    state = dataclasses.replace(state, length=state.length + valid)
    logits, state, stats = step(
        model, params, tokens, state, pos, phase, evict=evict, grow=grow, gives=True, observe=observe
    )
    if not grow:  # sequences without a new token keep what they had
        layers = tuple(new.where(valid > 0, before) for new, before in zip(state.layers, old.layers, strict=True))
        state = dataclasses.replace(state, layers=layers)
    return logits, state, stats


def applied(policy: Policy, state: State, stats: AttnStats) -> State:
    """See `Policy.__call__`."""
    traced, L = isinstance(state.prompt_length, jax.core.Tracer), len(state.layers)
    lengths, prompt = state.prompt_length if traced else np.asarray(state.prompt_length), not state.ready
    plan, hparams = planned(policy, state.plan.infos, lengths, None if prompt else state.plan)
    layers = (
        tuple(map(_under, plan.layers, plan.infos, state.layers))
        if prompt and plan.layers != state.plan.layers
        else state.layers
    )
    for i, p in enumerate(plan.layers):
        again = [o for o in p.observe("replay") if isinstance(o, Reread)] if prompt else []
        if missing := [o for o in (*p.observe(stats.phase), *again) if o not in stats.names[i]]:
            raise ValueError(f"{missing[0]} was not observed: give the policy to forward(..., observe=)")
    steady = (
        prompt
        or (not traced
        and all(np.array_equal(*x) for x in zip(*map(jax.tree.leaves, (hparams, state.hparams)), strict=True)))
    )
    state, lost = _applied(dataclasses.replace(state, layers=layers, hparams=hparams, plan=plan), stats, prompt, steady)
    if lost is not None and not isinstance(lost, jax.core.Tracer) and bool(lost.any()):
        raise ValueError("the policy keeps more tokens than `sizes` asked slots for")
    return state


@functools.partial(jax.jit, static_argnums=(2, 3))
def _applied(state, stats, grow, steady):
    return decided(state, stats, Attend(dataclasses.replace(state, layers=()), None, None, grow=grow, steady=steady))


def _under(policy: Policy, info, kv):
    """A whole prompt's layer that was read under a policy without memory, for another policy."""
    if jax.tree.leaves(kv.memory) or kv.log_weight is not None:
        raise ValueError("this prompt was read under a policy that remembers things; read it under Policy()")
    layout = policy.layout
    if layout.by_query_head and info.num_kv_heads != info.num_query_heads:
        raise ValueError("this prompt's tokens are stored for kv heads, but the policy wants them for query heads")
    if (layout.positions == "rank") != (kv.how.positions == "rank"):
        raise ValueError(
            'this prompt was read at other positions than the policy stores; only "original" and "shifted" mix'
        )
    new = empty(info, len(kv.pos), kv.k.dtype, policy.memory(info), layout, policy.writes, kv.pos.shape[2])
    return new.replace(k=kv.k, v=kv.v, pos=kv.pos)
