"""The user's door: `forward` reads tokens and says what was observed, `policy(state, stats)` decides.

Letters: B batch, T tokens, L layers, V vocabulary.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from kvjax.core.contract import AttentionInputs, LayerInfo, Phase, Policy, unique
from kvjax.core.drivers.attend import decided, step
from kvjax.core.drivers.checks import (
    as_array,
    check_block,
    check_ids,
    check_is,
    check_layers_scored,
    check_model,
    check_room,
    traced,
)
from kvjax.core.drivers.replay import rereads
from kvjax.core.drivers.state import AttnStats, State
from kvjax.core.drivers.steps import checked_logits
from kvjax.core.observe import Reread
from kvjax.core.plan import Plan, planned
from kvjax.core.storage import Storage, empty


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
        policy was applied, more tokens than it has free slots or was planned for, or than its policy can read at once.
        Outside of jit, logits or scores that are not numbers.
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
    if grow:
        check_block(state.plan, None, T)
    elif T > 1 and (picky := [p for p in state.plan.layers if p.layout.prompt != "any"]):
        raise ValueError(
            f"{type(picky[0]).__name__} looks at a whole prompt, and at 1 token at a time behind it, but these are "
            f"{T}; read them one by one"
        )
    if grow and evict and rereads(state):
        raise ValueError("the policy reads prompts again, but forward(evict=True) reads them once; use kvjax.prefill")
    more = tuple(unique(o for p in observe for o in p.at(i, L).observe(phase)) for i in range(L)) if observe else ()
    how = {"evict": evict, "grow": grow, "gives": True, "observe": more}
    tokens, valid = jnp.asarray(tokens), jnp.asarray(valid, jnp.int32)
    logits, after, stats = step(model, params, tokens, state, valid, phase, **how)
    if not grow:  # sequences without a new token keep what they had
        layers = tuple(new.where(valid > 0, old) for new, old in zip(after.layers, state.layers, strict=True))
        after = dataclasses.replace(after, layers=layers)
    if T > 1:
        checked_logits(logits, after)
    return logits, _apart(after), cast(AttnStats, stats)  # which `gives` asks for


def applied(policy: Policy, state: State, stats: AttnStats) -> State:
    """The state after a policy's update, from what `forward` observed; a whole prompt is compacted.

    Args:
      policy: any policy, that of the state or another one.
      state: what `forward` returned.
      stats: what was observed.

    Raises:
      ValueError: something that the policy wants to see was not observed; a prompt that was read in a way that the
        policy cannot go on from; more tokens than it asked slots for, scores that are not numbers.
    """
    check_is("state", state, State, "kvjax.forward")
    check_is("stats", stats, AttnStats, "kvjax.forward")
    after, prompt = under(policy, state, stats), not state.ready
    known = not traced(state.prompt_length)
    each = zip(*map(jax.tree.leaves, (after.hparams, state.hparams)), strict=True)
    steady = prompt or (known and all(np.array_equal(*x) for x in each))
    after = stored_under(after) if prompt and after.plan.layers != state.plan.layers else after
    after, lost = decided(after, stats, grow=prompt, steady=steady)
    if not traced(*lost) and bool(jnp.stack(lost).any()):
        check_layers_scored(after)
        raise ValueError("the policy keeps more tokens than its `sizes` asked slots for")
    return _apart(after)


def _apart(state: State) -> State:
    """The state with copies of all that is not its layers, which may be donated without the one before."""
    own = jax.device_put(dataclasses.replace(state, layers=()), may_alias=False)
    return dataclasses.replace(own, layers=state.layers)


def under(policy: Policy, state: State, stats: AttnStats, plan: Plan | None = None) -> State:
    """A state with the plan and the data of a policy. The layers of a prompt are still as they were read.

    Args:
      policy: the policy.
      state: what `forward` returned. One that decodes keeps its plan.
      stats: what was observed.
      plan: sizes of a larger budget, whose programs are used.

    Raises:
      ValueError: something that the policy wants to see was not observed.
    """
    prompt = not state.ready
    lengths = state.prompt_length if traced(state.prompt_length) else np.asarray(state.prompt_length)
    plan, hparams = planned(policy, state.plan.infos, lengths, plan if prompt else state.plan)
    for i, p in enumerate(plan.layers):
        if prompt and any(isinstance(o, Reread) and o not in stats.names[i] for o in p.observe("replay")):
            raise ValueError(f"{type(p).__name__} reads the prompt again before it evicts, as kvjax.prefill does")
        if missing := [o for o in p.observe(stats.phase) if o not in stats.names[i]]:
            raise ValueError(f"{missing[0]} was not observed: give the policy to forward(..., observe=)")
    return dataclasses.replace(state, hparams=hparams, plan=plan)


@jax.jit
def stored_under(state: State) -> State:
    """A state whose layers, which hold a whole prompt that was read under another policy, are stored for its own.

    Raises:
      ValueError: the policy cannot go on from a prompt that was read in this way.
    """
    state = dataclasses.replace(state, layers=tuple(map(_under, state.plan.layers, state.plan.infos, state.layers)))
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
      ValueError: in some layer the policy's `reads` are not None.
    """
    for i, (policy, info, kv) in enumerate(zip(state.plan.layers, state.plan.infos, state.layers, strict=True)):
        B, T = len(kv.pos), kv.pos.shape[2] if phase == "prefill" else 1
        q, hidden = jnp.zeros((B, info.num_query_heads, T, info.head_dim)), jnp.zeros((B, T, info.embed_dim))
        pos, ctx = jnp.broadcast_to(state.length[:, None] - 1, (B, T)), state.context(i, phase)
        told = AttentionInputs(q, q, kv.view().replace(memory=()), pos, ctx, lambda x, _: x, None, hidden)
        if policy.reads(kv.view(), told, ctx) is not None:
            raise ValueError(f"{type(policy).__name__} decides which of the live tokens a row reads, {so}")


def _under(policy: Policy, info: LayerInfo, kv: Storage) -> Storage:
    """A whole prompt's layer that was read under a policy without memory, as another policy wants it stored."""
    view = kv.view()
    if jax.tree.leaves(view.memory) or view.log_weight is not None:
        raise ValueError("this prompt was read under a policy that remembers things; read it under Policy()")
    layout = policy.layout
    if layout.by_query_head and info.num_kv_heads != info.num_query_heads:
        raise ValueError("this prompt's tokens are stored for kv heads, but the policy wants them for query heads")
    new = empty(info, len(kv.pos), kv.k.dtype, policy.memory(info), layout, policy.writes, kv.pos.shape[2])
    if (new.how.positions == "rank") != (kv.how.positions == "rank"):
        raise ValueError(
            'this prompt was read at other positions than the policy stores; only "original" and "shifted" mix, '
            "without a pool"
        )
    return new.replace(k=kv.k, v=kv.v, pos=kv.pos, how=dataclasses.replace(new.how, mesh=kv.how.mesh))
