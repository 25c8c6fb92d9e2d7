"""The user's door: `forward` reads tokens and says what was observed, `policy(state, stats)` decides.

Letters: B batch, T tokens, L layers, V vocabulary.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from kvjax.core.contract import LayerInfo, Policy, unique
from kvjax.core.drivers.attend import decided, step
from kvjax.core.drivers.checks import as_array, check_ids, check_is, check_model, check_room, traced
from kvjax.core.drivers.replay import Reread
from kvjax.core.drivers.state import AttnStats, State, Storage
from kvjax.core.drivers.steps import checked_logits
from kvjax.core.plan import planned
from kvjax.core.storage import empty


def forward(
    model: Any,
    params: PyTree[Any],
    tokens: Any,
    state: State,
    *,
    valid: Any = None,
    evict: bool = False,
    observe: tuple[Policy, ...] = (),
) -> tuple[Float[Array, "B V"], State, AttnStats]:
    """Reads tokens after the text of a state, and says what was observed: `policy(state, stats)` then evicts.

    Into an empty state (`start`) they are the prompt, and a policy must be applied to it before anything follows.
    Afterwards one token is a decode step, and several take slots that are free.

    Args:
      model, params: the model.
      tokens: token ids "B T", padded on the left.
      state: the state before.
      valid: how many of the last columns are tokens of each sequence "B"; all if None.
      evict: whether the state's policy is applied at once.
      observe: policies that will be applied to what is observed here, besides the state's.

    Returns:
      Logits of the next token, the state after, and what was observed.

    Raises:
      ValueError: ids outside the vocabulary, another number of sequences, a state that holds a whole prompt to which no
        policy was applied, more tokens than it has free slots or was planned for.
    """
    check_model(model, params)
    check_is("state", state, State, "kvjax.start")
    B, L, grow = len(state.length), len(state.layers), not state.ready
    tokens = as_array("tokens", tokens, np.integer, (B, None), "integers, one row a sequence")
    T = tokens.shape[1]
    valid = np.full(B, T, np.int32) if valid is None else as_array("valid", valid, np.integer, (B,), "integers")
    if not traced(valid) and not 0 <= valid.min() <= valid.max() <= T:
        raise ValueError(f"valid goes from {valid.min()} to {valid.max()}, but a row has 0 to {T} tokens")
    check_ids(model, tokens if traced(tokens, valid) else tokens[np.arange(T)[None] >= T - valid[:, None]])
    if grow and state.layers[0].pos.shape[-1]:
        raise ValueError(
            "this state holds a whole prompt: apply a policy to it, policy(state, stats), before more is read"
        )
    if not grow:
        check_room(state, valid)
    phase = "decode" if T == 1 and not grow else "prefill"
    more = tuple(unique(o for p in observe for o in p.at(i, L).observe(phase)) for i in range(L)) if observe else ()
    how = {"evict": evict, "grow": grow, "gives": True, "observe": more}
    logits, after, stats = step(model, params, jnp.asarray(tokens), state, jnp.asarray(valid, jnp.int32), phase, **how)
    if not grow:  # sequences without a new token keep what they had
        layers = tuple(new.where(valid > 0, old) for new, old in zip(after.layers, state.layers, strict=True))
        after = dataclasses.replace(after, layers=layers)
    if T > 1:
        checked_logits(logits)
    return logits, after, cast(AttnStats, stats)  # which `gives` asks for


def applied(policy: Policy, state: State, stats: AttnStats) -> State:
    """The state after a policy's update, from what `forward` observed; a whole prompt is compacted.

    Args:
      policy: any policy, that of the state or another one.
      state: what `forward` returned.
      stats: what was observed.

    Raises:
      ValueError: something that the policy wants to see was not observed; a prompt that was read in a way that the
        policy cannot go on from; more tokens than it asked slots for.
    """
    check_is("state", state, State, "kvjax.forward")
    check_is("stats", stats, AttnStats, "kvjax.forward")
    unknown, prompt = traced(state.prompt_length), not state.ready
    lengths = state.prompt_length if unknown else np.asarray(state.prompt_length)
    plan, hparams = planned(policy, state.plan.infos, lengths, None if prompt else state.plan)
    layers = state.layers
    if prompt and plan.layers != state.plan.layers:
        layers = tuple(map(_under, plan.layers, plan.infos, state.layers))
    for i, p in enumerate(plan.layers):
        again = [o for o in p.observe("replay") if isinstance(o, Reread)] if prompt else []
        if missing := [o for o in (*p.observe(stats.phase), *again) if o not in stats.names[i]]:
            raise ValueError(f"{missing[0]} was not observed: give the policy to forward(..., observe=)")
    same = lambda: all(np.array_equal(*x) for x in zip(*map(jax.tree.leaves, (hparams, state.hparams)), strict=True))
    steady = prompt or (not unknown and same())
    state = dataclasses.replace(state, layers=layers, hparams=hparams, plan=plan)
    state, lost = decided(state, stats, grow=prompt, steady=steady)
    if lost and not traced(*lost) and bool(jnp.stack(lost).any()):
        raise ValueError("the policy keeps more tokens than its `sizes` asked slots for")
    return state


def _under(policy: Policy, info: LayerInfo, kv: Storage) -> Storage:
    """A whole prompt's layer that was read under a policy without memory, as another policy wants it stored."""
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
