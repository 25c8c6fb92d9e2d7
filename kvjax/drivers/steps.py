"""The drivers that join a model and a policy: read a prompt, decode a token, read given tokens.

The model measures what the policy asks for; the policy marks slots dead; the drivers compact storage after prefill. All
of them are pure functions, to be used as they are or inside `jax.jit` with `model` and `plan` static.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.cache.context import Phase, row_keys
from kvjax.cache.mesh import everywhere, prompt_rows
from kvjax.cache.pool import PooledKV
from kvjax.cache.state import EMPTY, KVState, LayerKV, evict
from kvjax.drivers.layers import LayerSteps
from kvjax.drivers.replay import decided_by_replay
from kvjax.drivers.requests import (
    Model,
    as_ids,
    as_scored,
    check_block,
    check_decodes,
    check_is,
    check_model,
    check_positions,
    check_prompts,
    check_room,
    check_sizes,
    real_tokens,
)
from kvjax.pallas_kernels.values import MOST_TOKENS, as_given, check_array, checked, flag, float_dtype, one_of
from kvjax.plan import CachePlan, Sizes, as_lengths, at_positions
from kvjax.policy import context, empty_layer
from kvjax.scoring.stats import AttentionStats
from kvjax.sharding import as_mesh, check_split, on_rows, shard_params, shard_rows


def init_state(
    plan: CachePlan,
    lengths: Array | np.ndarray | Sequence[int],
    *,
    key: Array | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
    sizes: Sizes | None = None,
) -> KVState:
    """An empty cache for prompts of the given lengths.

    Args:
      plan: the static sizes.
      lengths: the prompts' lengths; ratios are ratios of these.
      key: one key for the batch, split by row, or one a row. `jax.random.key(0)` if None.
      dtype: of keys and values.
      sizes: numbers of tokens in place of the planned ones, for these lengths (`CachePlan.sizes`).

    Raises:
      ValueError: no plan, lengths of prompts that it was not made for, a dtype that is none of floats, sizes of another
        plan or of other sequences.
    """
    check_is(CachePlan, "plan", plan)
    if not isinstance(lengths, jax.core.Tracer):
        given = np.asarray(as_given("lengths", lengths))
        known = np.asarray(as_lengths(given, max(given.size, 1), plan.prompt_len))
        plan.check_lengths(known)
        lengths = jnp.asarray(known)
    dtype = checked(float_dtype, "dtype", dtype)
    B = lengths.shape[0]
    each = zip(plan.layers, plan.positions, strict=True)
    layers = tuple(empty_layer(layer, B, dtype, positions) for layer, positions in each)
    keys = jnp.copy(row_keys(key, B))  # a state may be donated, and the caller's keys must outlive it
    lengths = jnp.copy(lengths).astype(jnp.int32)
    given = None
    if sizes is not None:
        check_sizes(plan, sizes, lengths)
        given = jax.tree.map(jnp.copy, sizes.layers)
    return KVState(layers, jnp.zeros_like(lengths), lengths, jnp.int32(0), keys, plan=plan, sizes=given)


def forward(
    model: Model,
    params: PyTree[Any],
    tokens: Int[Array, "B T"],
    state: KVState,
    *,
    valid: Int[Array, "B"] | None = None,
    phase: Phase = "prefill",
    evict: bool = False,
    ends: bool = True,
    last_only: bool = True,
) -> tuple[Float[Array, "B _ V"], KVState, AttentionStats]:
    """One pass of the model over T new tokens of every sequence.

    Texts beyond the model's positions are not warned of here, but by `prefill` and what goes on from it.

    Args:
      model, params: the model.
      tokens: left-padded token ids.
      state: the cache before.
      valid: how many of the last tokens are real, T if None. The others are padding.
      phase: "prefill" appends slots; "decode" needs T = 1 and a dead slot in every head.
      evict: applies the policy to each layer right after its attention, and in prefill compacts it to the planned
        capacity before the next layer runs, so that a prompt's full keys and values exist for one layer at a time.
      ends: whether the prompt ends with these tokens; only then may a policy change how the cache is stored.
      last_only: logits of the last column only.

    Returns:
      Logits, the state after, and the statistics that the policy observes: `policy(state, stats)` evicts. Logits of
      sequences that have decoded more tokens than planned are NaN.

    Raises:
      ValueError: a state that was planned for a model of other sizes, tokens of other sequences or outside the
        vocabulary, several tokens a sequence in a decode step, more valid tokens than there are; eviction by a policy
        that wants its prompt read again, which `prefill` does, or, outside of jit, of a prompt by scores none of which
        is a number.
    """
    check_model(model)
    check_is(KVState, "state", state)
    plan: CachePlan = state.plan
    plan.check_model(model.config)
    one_of("phase", phase, *get_args(Phase))
    flags = ("evict", evict), ("ends", ends), ("last_only", last_only)
    evict, ends, last_only = (checked(flag, name, value) for name, value in flags)
    if phase == "prefill" and evict and plan.replays:
        raise ValueError(
            f"{plan.policy} reads prompts again before anything of them is evicted, but forward(evict=True) reads them "
            "once; use kvjax.prefill"
        )
    if phase == "decode":
        check_decodes(state)
    B, T = len(state.length), None if phase == "prefill" else 1
    real = None if valid is None else real_tokens(valid, tokens)
    tokens = as_ids(model, tokens, (B, T), "one row of tokens a sequence", real=real)
    T = tokens.shape[1]
    valid = jnp.full((B,), T, jnp.int32) if valid is None else jnp.asarray(valid).astype(jnp.int32)
    column = jnp.arange(T, dtype=jnp.int32)[None] - (T - valid)[:, None]
    pos = jnp.where(column >= 0, state.length[:, None] + column, EMPTY)
    tokens = jnp.where(column >= 0, tokens, 0)  # padding may be any id, even one outside the vocabulary
    tokens = prompt_rows(tokens, None)
    state = dataclasses.replace(state, length=state.length + valid, step=state.step + jnp.int32(phase == "decode"))

    # In prefill every layer is evicted from before the next one runs, so that layers of one kind can take turns in one
    # program. Slots that they have already, of earlier blocks, would be copied to where it reads them.
    shares = phase == "prefill" and evict and not plan.policy.shared and not state.num_slots
    shares = shares and len({jax.tree.structure(sizes) for sizes in state.sizes or ()}) <= 1
    alone = dataclasses.replace(state, layers=())
    steps = LayerSteps(alone, tokens, pos, phase=phase, evict=evict, ends=ends, shares=shares)
    where = at_positions(model.config, pos)
    logits, layers, stats = model(params, tokens, state.layers, attend=steps, last_only=last_only, **where)
    if phase == "decode":
        past = state.length - state.prompt_length > plan.max_new_tokens
        logits = jnp.where(past[:, None, None], jnp.nan, logits)
    state, stats = dataclasses.replace(state, layers=layers), AttentionStats(stats, phase=phase, tokens=tokens)
    if evict and plan.policy.shared:
        state = steps.decided(state, stats)
    return logits, as_scored(state) if evict and phase == "prefill" else state, stats


def prefill(
    model: Model,
    params: PyTree[Any],
    tokens: Array | np.ndarray | Sequence[Sequence[int]],
    plan: CachePlan,
    *,
    lengths: Array | np.ndarray | Sequence[int] | None = None,
    key: Array | None = None,
    block: int | None = None,
    sizes: Sizes | None = None,
    attention_mask: Array | np.ndarray | None = None,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "B V"], KVState]:
    """Reads left-padded prompts, evicting layer by layer.

    A policy that wants its prompt read again (`kvjax.methods.kvzip`) decides when all layers have read it: until then
    the keys and values of the whole prompt exist in all of them.

    Ratios, positions, windows and votes are those of a sequence's own tokens, so a row of a padded batch gets exactly
    what it would get alone. Most released code is for batches of one, ignores padding, or sums over the batch (D-40).

    With `block`, evict-and-encode (RoCo, arXiv 2402.06262, section 3.3): the prompt is read in blocks, and every block
    is followed by an eviction down to the budget, so that memory is that of the plan's capacity and one block whatever
    the prompt's length. Blocks end where the prompt ends, the first may be short. One block that holds the whole prompt
    is the same as none. Rotary scalings that depend on the length take the prompt's in every block.

    Args:
      model, params: the model.
      tokens: left-padded token ids "B T".
      plan: made for this width.
      lengths: the prompts' own lengths, T if None.
      key: one PRNG key for the batch, or one a row.
      block: tokens of a block, None for the whole prompt at once.
      sizes: numbers of tokens in place of the planned ones, for these lengths (`CachePlan.sizes`).
      attention_mask: in place of `lengths`, 1 for tokens and 0 for padding "B T", as transformers' tokenizers return
        it. Padding may stand on either side, or between: tokens are moved to the right.
      mesh: see `kvjax.generate`.

    Returns:
      Logits of the next token, and the compacted state.

    Raises:
      ValueError: a plan for another model, a prompt of another width, token ids outside the vocabulary, lengths that
        the plan has no room for, a block without tokens, blocks for a policy that looks at the whole prompt (FastGen,
        KVzip), or others than of one token for a policy that lets every row decide (H2O's stepwise mask); a mesh whose
        devices do not divide what they share; a score of which no number comes. Inside `jax.jit` such a score is not
        seen: all tokens are worth the same, and the newest stay (`kvjax.evict_layer` tells).
    """
    tokens, lengths = check_prompts(model, tokens, lengths, attention_mask)
    check_is(CachePlan, "plan", plan)
    T = tokens.shape[1]
    if plan.prompt_len != T:
        raise ValueError(f"the prompt is {T} tokens wide, but the plan was made for {plan.prompt_len}; make a new plan")
    block = check_block(plan, block)
    if isinstance(lengths, np.ndarray):
        plan.check_lengths(lengths)
        if plan.prompt_len + plan.max_new_tokens < MOST_TOKENS:  # who reads without end says it when it comes to it
            check_positions(model.config, plan, np.asarray(lengths), plan.max_new_tokens, block=block)
    lengths = jnp.asarray(lengths)
    if mesh is not None:
        mesh = as_mesh(mesh)
        check_split(mesh, plan, model.config, len(tokens), block)
        rows = shard_rows((tokens, lengths, row_keys(key, len(tokens)), sizes), mesh)
        params = shard_params(model, params, mesh)
        logits, state = _prefill_on(model, params, *rows, plan=plan, block=block, mesh=mesh)
        return logits, as_scored(state)
    state = init_state(plan, lengths, key=key, dtype=model.config.dtype, sizes=sizes)
    if plan.replays:
        logits, state, stats = forward(model, params, tokens, state, valid=lengths)
        return logits[:, -1], as_scored(decided_by_replay(model, params, tokens, state, stats))
    if block is None:
        logits, state, _ = forward(model, params, tokens, state, valid=lengths, evict=True)
        return logits[:, -1], as_scored(state)

    tokens = jnp.pad(tokens, ((0, 0), (-T % block, 0)))
    num = tokens.shape[1] // block
    state = empty_after_prompt(state, ends=False)

    def read(state, i, ends=False):
        here = lax.dynamic_slice_in_dim(tokens, i * block, block, axis=1)
        valid = jnp.clip(lengths - (num - 1 - i) * block, 0, block)
        logits, state, _ = forward(model, params, here, state, valid=valid, evict=True, ends=ends)
        return logits, state

    if num > 1:
        steps = jnp.arange(num - 1, dtype=jnp.int32)
        state, _ = lax.scan(lambda state, i: (read(state, i)[1], None), state, steps)
    logits, state = read(state, jnp.int32(num - 1), ends=True)
    return logits[:, -1], as_scored(state)


@functools.partial(jax.jit, static_argnames=("model", "plan", "block", "mesh"))
def _prefill_on(model, params, tokens, lengths, key, sizes, *, plan, block, mesh):
    def run(params, rows):
        tokens, lengths, key, sizes = rows
        return prefill(model, params, tokens, plan, lengths=lengths, key=key, block=block, sizes=sizes)

    return on_rows(mesh, run, params, (tokens, lengths, key, sizes))


def empty_after_prompt(state: KVState, *, ends: bool = True) -> KVState:
    """A state without tokens in the shapes that it has after the prompt."""
    nothing = jnp.zeros((len(state.length), 0), jnp.int32)
    steps = LayerSteps(state, nothing, nothing, ends=ends)
    return dataclasses.replace(state, layers=tuple(steps.stored(kv, i) for i, kv in enumerate(state.layers)))


def decode_step(
    model: Model,
    params: PyTree[Any],
    token: Array | np.ndarray | Sequence[int],
    state: KVState,
    *,
    active: Array | np.ndarray | Sequence[bool] | None = None,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "B V"], KVState]:
    """One token of every sequence: append, attend, update scores, evict if due. Nothing is gathered or moved.

    Args:
      model, params: the model.
      token: the token "B" to read.
      state: the cache before. Donate it under `jit` to write in place.
      active: a sequence that is not active reads nothing and keeps its cache. All are if None.
      mesh: that of `prefill`.

    Returns:
      Logits of the next token, and the state after. Under `jax.jit`, logits are NaN where a sequence was driven past
      its plan (the prompt and `max_new_tokens`, whether its cache has room for more or not), or where a token is
      outside the vocabulary; beware that the largest of them is token 0 for `argmax`.

    Raises:
      ValueError: another number of tokens than sequences, a token outside the vocabulary, a state that was planned for
        another model or for no further token, `active` that is not one truth value a sequence.
    """
    check_model(model)
    check_is(KVState, "state", state)
    plan: CachePlan = state.plan
    plan.check_model(model.config)
    check_decodes(state)
    if active is not None:
        active = as_given("active", active)
        check_array("active", active, "batch", kind=np.bool_, shape=state.length.shape)
    token = as_ids(model, token, (len(state.length),), "one token a sequence", real=active)
    check_room(model.config, state, 1 if active is None else active.astype(np.int32))
    active = None if active is None else jnp.asarray(active)
    if mesh is not None:
        mesh = as_mesh(mesh)
        rows = shard_rows((token, active), mesh)
        return _decode_on(model, shard_params(model, params, mesh), state, *rows, mesh=mesh)
    state = dataclasses.replace(state, layers=_with_room(state, active))
    valid = None if active is None else active.astype(jnp.int32)
    logits, after, _ = forward(model, params, token[:, None], state, valid=valid, phase="decode", evict=True)
    if active is not None:
        after = dataclasses.replace(after, layers=tuple(map(_only(active), after.layers, state.layers)))
    return logits[:, -1], after


@functools.partial(jax.jit, static_argnames=("model", "mesh"))
def _decode_on(model, params, state, token, active, *, mesh):
    step = lambda params, rows: decode_step(model, params, rows[1], rows[0], active=rows[2])
    return on_rows(mesh, step, params, (state, token, active))


def _only(active: Bool[Array, "B"]) -> Callable[[Any, Any], Any]:
    """`(after, before) -> after` for the active sequences, `before` for the others; keys and values are left alone."""

    def choose(new: Any, old: Any) -> Any:
        return new if new is old else jnp.where(active.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    def layer(after: LayerKV | PooledKV, before: LayerKV | PooledKV) -> LayerKV | PooledKV:
        small = {"pos": choose(after.pos, before.pos), "memory": jax.tree.map(choose, after.memory, before.memory)}
        if isinstance(after, LayerKV) and isinstance(before, LayerKV) and after.gate is not None:
            small["gate"] = choose(after.gate, before.gate)
        return dataclasses.replace(after, **small, rank=jax.tree.map(choose, after.rank, before.rank))

    return layer


def _with_room(state: KVState, active: Bool[Array, "B"] | None) -> tuple[LayerKV | PooledKV, ...]:
    """The layers after `LayerPolicy.make_room` for the sequences that are about to read a token."""
    plan: CachePlan = state.plan
    only = _only(active) if active is not None else lambda after, before: after

    def with_room(i: int, kv: LayerKV | PooledKV) -> LayerKV | PooledKV:
        policy, ctx = plan.layers[i], context(state, i, "decode")
        makes = lambda kv, ctx: kv.apply(lambda view: policy.make_room(view, ctx))
        after = makes(kv, ctx) if isinstance(kv, LayerKV) else everywhere(makes, kv, ctx)
        return after if after is kv else only(after, kv)

    if not plan.policy.alike:
        return tuple(with_room(i, kv) for i, kv in enumerate(state.layers))
    first = with_room(0, state.layers[0])
    if first is state.layers[0]:
        return state.layers
    stays = first.view().live
    return first, *(kv.apply(lambda view: evict(view, stays)) for kv in state.layers[1:])


def feed(
    model: Model,
    params: PyTree[Any],
    tokens: Array | np.ndarray | Sequence[Sequence[int]],
    state: KVState,
    *,
    lengths: Array | np.ndarray | Sequence[int] | None = None,
) -> tuple[Float[Array, "B T V"], KVState]:
    """Reads given tokens "B T" one decode step at a time: a question after compression, or text to be scored.

    A row of a padded batch reads what it would read alone.

    Args:
      model, params: the model.
      tokens: the tokens, padded on the left where rows have different numbers of them.
      state: the cache before.
      lengths: how many of the last tokens of every row "B" are real, at least 1; T if None.

    Returns:
      Logits after every token, and the state after the last. The last token of every row stands in the last column;
      logits of padding are NaN.

    Raises:
      ValueError: tokens outside the vocabulary, of another number of sequences, or more than the state was planned for;
        lengths outside 1 to T.
    """
    check_model(model)
    check_is(KVState, "state", state)
    B, tokens = len(state.length), as_given("tokens", tokens)
    if lengths is None or tokens.ndim != 2:
        lengths, real = None, None
    else:
        lengths = as_lengths(lengths, B, tokens.shape[1])
        real = real_tokens(lengths, tokens)
    tokens = as_ids(model, tokens, (B, None), "one row of tokens a sequence", real=real)
    T = tokens.shape[1]
    check_room(model.config, state, T if lengths is None else lengths)
    first = jnp.zeros((B,), jnp.int32) if lengths is None else T - jnp.asarray(lengths)
    reads = jnp.arange(T, dtype=jnp.int32)[:, None] >= first[None]

    def step(state, now):
        token, active = now
        logits, state = decode_step(model, params, token, state, active=None if lengths is None else active)
        return state, logits if lengths is None else jnp.where(active[:, None], logits, jnp.nan)

    state, logits = lax.scan(step, state, (tokens.T, reads))
    return logits.swapaxes(0, 1), state
