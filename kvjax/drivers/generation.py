"""The drivers that join a model and a policy: read a prompt, decode a token, generate.

The model measures what the policy asks for; the policy marks slots dead; the drivers compact storage after prefill. All
of them are pure functions, to be used as they are or inside `jax.jit` with `model` and `plan` static.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.algebra import identity
from kvjax.cache.context import Phase, row_keys
from kvjax.cache.pool import PooledKV
from kvjax.cache.state import EMPTY, KVState, LayerKV, evict
from kvjax.drivers.attention import Attend
from kvjax.drivers.layers import LayerSteps
from kvjax.drivers.sampling import Greedy, Sampler, seen_tokens, with_token
from kvjax.plan import CachePlan, ModelConfig, Sizes, as_lengths, at_positions, make_plan
from kvjax.policy import Policy, context, empty_layer
from kvjax.scoring.stats import AttentionStats, LayerStats
from pallas_kernels.pytree import pytree
from pallas_kernels.values import a, check_array, checked, each, one_of, optional, whole

NO_TOKEN: Final = -1  # what stands for a token where logits are not numbers
_SAMPLING = 0x5A3D  # keeps the sampler's draws apart from those of policies, which fold in layers first


@runtime_checkable
class Model(Protocol):
    """A language model as the drivers see it: hashable, compared by value."""

    @property
    def config(self) -> ModelConfig:
        """The model's sizes."""
        ...

    def __call__(
        self,
        params: PyTree[Any],
        tokens: Int[Array, "B T"],
        layers: tuple[LayerKV | PooledKV, ...],
        *,
        attend: Attend,
        last_only: bool,
    ) -> tuple[Float[Array, "B _ V"], tuple[LayerKV | PooledKV, ...], tuple[LayerStats, ...]]:
        """Logits (of the last column only, if asked), and every layer's cache and statistics after the step.

        A model whose config has `learned_positions` is called with `positions` "B T" too, -1 for padding.
        """
        ...


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
    _check_is(CachePlan, "plan", plan)
    if not isinstance(lengths, jax.core.Tracer):
        given = _as_numpy("lengths", lengths)
        known = np.asarray(as_lengths(given, max(given.size, 1), plan.prompt_len))
        plan.check_lengths(known)
        lengths = jnp.asarray(known)
    dtype = checked(_float_dtype, "dtype", dtype)
    B = lengths.shape[0]
    layers = tuple(empty_layer(layer, B, dtype) for layer in plan.layers)
    keys = jnp.copy(row_keys(key, B))  # a state may be donated, and the caller's keys must outlive it
    lengths = jnp.copy(lengths).astype(jnp.int32)
    given = None
    if sizes is not None:
        _check_sizes(plan, sizes, lengths)
        given = jax.tree.map(jnp.copy, sizes.layers)
    return KVState(layers, jnp.zeros_like(lengths), lengths, jnp.int32(0), keys, plan=plan, sizes=given)


def _check_sizes(plan: CachePlan, sizes: Any, lengths: Int[Array, "B"]) -> None:
    """Refuses what are not the sizes that `plan.sizes` gives for these sequences, whose lengths may be traced."""
    shapes = lambda x: jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), x)
    if shapes(sizes) != shapes(plan.sizes(plan.policy, [plan.prompt_len] * len(lengths))):
        raise ValueError(
            f"sizes are not those of {len(lengths)} sequences under this plan; give plan.sizes(policy, lengths) for "
            "their lengths"
        )
    if not any(isinstance(x, jax.core.Tracer) for x in (lengths, sizes.lengths)):
        there, here = np.asarray(sizes.lengths).tolist(), np.asarray(lengths).tolist()
        if there != here:
            raise ValueError(f"sizes are those of prompts of {there} tokens, but these have {here}; make them anew")


def _float_dtype(dtype: Any) -> np.dtype:
    """The rule of dtypes of keys and values."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = jnp.dtype(bool)
    if not jnp.issubdtype(found, jnp.floating):
        raise ValueError("must be a dtype of floats, such as jax.numpy.bfloat16")
    return found


def _check_is(kind: type, name: str, value: Any) -> None:
    """Refuses what is no plan, or no state."""
    if not isinstance(value, kind):
        made_by = {CachePlan: "make_plan", KVState: "prefill"}[kind]
        raise ValueError(f"{name} is a {type(value).__name__}, not a {kind.__name__} such as {made_by} returns")


def _check_decodes(state: KVState) -> None:
    """Refuses a state without any slot, as `init_state` returns it, where a token is to be decoded."""
    if not all(kv.num_slots for kv in state.layers):
        raise ValueError("the state has no slots for a token, as no prompt was read into it; decode what prefill gives")


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
        vocabulary, several tokens a sequence in a decode step, more valid tokens than there are.
    """
    check_model(model)
    _check_is(KVState, "state", state)
    plan: CachePlan = state.plan
    plan.check_model(model.config)
    one_of("phase", phase, *get_args(Phase))
    if phase == "decode":
        _check_decodes(state)
    B, T = len(state.length), None if phase == "prefill" else 1
    real = None if valid is None else _real(valid, tokens)
    tokens = as_ids(model, tokens, (B, T), "one row of tokens a sequence", real=real)
    T = tokens.shape[1]
    valid = jnp.full((B,), T, jnp.int32) if valid is None else jnp.asarray(valid).astype(jnp.int32)
    column = jnp.arange(T, dtype=jnp.int32)[None] - (T - valid)[:, None]
    pos = jnp.where(column >= 0, state.length[:, None] + column, EMPTY)
    tokens = jnp.where(column >= 0, tokens, 0)  # padding may be any id, even one outside the vocabulary
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
    state, stats = dataclasses.replace(state, layers=layers), AttentionStats(stats, phase=phase)
    if evict and plan.policy.shared:
        state = plan.policy(state, stats)
        state = dataclasses.replace(state, layers=tuple(steps.stored(kv, i) for i, kv in enumerate(state.layers)))
    return logits, state, stats


def _real(valid: Any, tokens: Any) -> Any:
    """Which of the tokens "B T" are real, where the last `valid` of each row are; None where that is traced."""
    if isinstance(valid, jax.core.Tracer) or not hasattr(tokens, "shape") or len(tokens.shape) != 2:
        return valid if isinstance(valid, jax.core.Tracer) else None
    known, (B, T) = _as_numpy("valid", valid), tokens.shape
    if known.shape != (B,) or known.dtype.kind not in "iu" or known.min() < 0 or known.max() > T:
        raise ValueError(f"valid={known.tolist()}: must be {B} whole numbers, one a sequence, from 0 to {T}")
    return np.arange(T)[None] >= T - known[:, None]


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
) -> tuple[Float[Array, "B V"], KVState]:
    """Reads left-padded prompts, evicting layer by layer.

    Ratios, positions, windows and votes are those of a sequence's own tokens, so a row of a padded batch gets exactly
    what it would get alone. Most released code is for batches of one, ignores padding, or sums over the batch (D-40).

    With `block`, evict-and-encode (RoCo, arXiv 2402.06262, section 3.3): the prompt is read in blocks, and every block
    is followed by an eviction down to the budget, so that memory is that of the plan's capacity and one block whatever
    the prompt's length. Blocks end where the prompt ends, the first may be short. One block that holds the whole prompt
    is the same as none.

    Args:
      model, params: the model.
      tokens: left-padded token ids "B T".
      plan: made for this width.
      lengths: the prompts' own lengths, T if None.
      key: one PRNG key for the batch, or one a row.
      block: tokens of a block, None for the whole prompt at once.
      sizes: numbers of tokens in place of the planned ones, for these lengths (`CachePlan.sizes`).

    Returns:
      Logits of the next token, and the compacted state.

    Raises:
      ValueError: a plan for another model, a prompt of another width, token ids outside the vocabulary, lengths that
        the plan has no room for, a block without tokens, blocks for a policy that looks at the whole prompt (FastGen),
        or others than of one token for a policy that lets every row decide (H2O's stepwise mask).
    """
    tokens, lengths = check_prompts(model, tokens, lengths)
    _check_is(CachePlan, "plan", plan)
    T = tokens.shape[1]
    if plan.prompt_len != T:
        raise ValueError(f"the prompt is {T} tokens wide, but the plan was made for {plan.prompt_len}; make a new plan")
    block = check_block(plan, block)
    if isinstance(lengths, np.ndarray):
        plan.check_lengths(lengths)
    lengths = jnp.asarray(lengths)
    state = init_state(plan, lengths, key=key, dtype=model.config.dtype, sizes=sizes)
    if block is None:
        logits, state, _ = forward(model, params, tokens, state, valid=lengths, evict=True)
        return logits[:, -1], state

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
    return logits[:, -1], state


def check_block(plan: CachePlan, block: int | None) -> int | None:
    """The size of blocks, the whole prompt at most, or None if it is read at once.

    Raises:
      ValueError: no size of a block, or one in which the plan's policy cannot read its prompts.
    """
    T = plan.prompt_len
    why = "a block has at least 1 token, a whole number; use None to read the prompt at once"
    block = checked(optional(whole(1, why=why)), "block", block)
    block = None if block is None else min(block, T)
    if block is not None and block < T and plan.reads == "whole":
        raise ValueError(
            f"{type(plan.policy).__name__} looks at the whole prompt at once, but block={block} reads {T} tokens in "
            f"parts; use block=None"
        )
    if block != 1 and T > 1 and plan.reads == "rows":
        raise ValueError(
            f"every row of {plan.policy} decides what the next one reads, but block={block} reads {T} tokens otherwise "
            "than one by one; use block=1"
        )
    return block


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
) -> tuple[Float[Array, "B V"], KVState]:
    """One token of every sequence: append, attend, update scores, evict if due. Nothing is gathered or moved.

    Args:
      model, params: the model.
      token: the token "B" to read.
      state: the cache before. Donate it under `jit` to write in place.
      active: a sequence that is not active reads nothing and keeps its cache. All are if None.

    Returns:
      Logits of the next token, and the state after. Logits are NaN where a sequence was driven past its plan (the
      prompt and `max_new_tokens`, whether its cache has room for more or not), or where a traced token is outside the
      vocabulary.

    Raises:
      ValueError: another number of tokens than sequences, a token outside the vocabulary, a state that was planned for
        another model, `active` that is not one truth value a sequence.
    """
    check_model(model)
    _check_is(KVState, "state", state)
    plan: CachePlan = state.plan
    plan.check_model(model.config)
    _check_decodes(state)
    if active is not None:
        active = active if isinstance(active, jax.Array) else _as_numpy("active", active)
        check_array("active", active, "batch", kind=np.bool_, shape=state.length.shape)
    token = as_ids(model, token, (len(state.length),), "one token a sequence", real=active)
    active = None if active is None else jnp.asarray(active)
    state = dataclasses.replace(state, layers=_with_room(state, active))
    valid = None if active is None else active.astype(jnp.int32)
    logits, after, _ = forward(model, params, token[:, None], state, valid=valid, phase="decode", evict=True)
    if active is not None:
        after = dataclasses.replace(after, layers=tuple(map(_only(active), after.layers, state.layers)))
    return logits[:, -1], after


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
        after = kv.apply(lambda view: plan.layers[i].make_room(view, context(state, i, "decode")))
        return after if after is kv else only(after, kv)

    if not plan.policy.shared:
        return tuple(with_room(i, kv) for i, kv in enumerate(state.layers))
    first = with_room(0, state.layers[0])
    if first is state.layers[0]:
        return state.layers
    stays = first.view().live
    return first, *(kv.apply(lambda view: evict(view, stays)) for kv in state.layers[1:])


def feed(
    model: Model, params: PyTree[Any], tokens: Array | np.ndarray | Sequence[Sequence[int]], state: KVState
) -> tuple[Float[Array, "B T V"], KVState]:
    """Reads given tokens "B T" one decode step at a time: a question after compression, or text to be scored.

    Returns:
      Logits after every token, and the state after the last.

    Raises:
      ValueError: tokens outside the vocabulary, of another number of sequences, or more than the state was planned for.
    """
    check_model(model)
    _check_is(KVState, "state", state)
    tokens = as_ids(model, tokens, (len(state.length), None), "one row of tokens a sequence")
    check_room(state, tokens.shape[1])

    def step(state, token):
        logits, state = decode_step(model, params, token, state)
        return state, logits

    state, logits = lax.scan(step, state, tokens.T)
    return logits.swapaxes(0, 1), state


@pytree
class Generation:
    """What `generate` returns.

    Attributes:
      tokens: generated ids, `pad_id` after a sequence has ended; -1, which is no token, where logits were not numbers.
      lengths: generated tokens of every sequence, the end token included.
      state: the cache after generation; it can be decoded further as far as it was planned for.
    """

    tokens: Int[Array, "B M"]
    lengths: Int[Array, "B"]
    state: KVState


def draw(
    sampler: Sampler, logits: Float[Array, "B V"], state: KVState, seen: Bool[Array, "B V"] | None
) -> Int[Array, "B"]:
    """The token that follows in every sequence, by its own key; -1 where logits are not numbers."""
    fold = lambda key, step: jax.random.fold_in(jax.random.fold_in(key, _SAMPLING), step)
    keys = jax.vmap(fold)(state.keys, state.length - state.prompt_length)
    token = sampler(logits, keys) if seen is None else sampler(logits, keys, seen)
    return jnp.where(jnp.isnan(logits).any(-1), NO_TOKEN, token)


def first_token(
    sampler: Sampler, logits: Float[Array, "B V"], state: KVState, seen: Bool[Array, "B V"] | None
) -> tuple[Int[Array, "B"], Bool[Array, "B V"] | None]:
    """The token drawn from the logits of what was read, and the record of tokens with it."""
    token = draw(sampler, logits, state, seen)
    return token, None if seen is None else with_token(seen, token, jnp.ones_like(token, bool))


def next_token(
    model: Model,
    params: PyTree[Any],
    token: Int[Array, "B"],
    running: Bool[Array, "B"],
    seen: Bool[Array, "B V"] | None,
    state: KVState,
    *,
    sampler: Sampler,
    pad_id: int,
) -> tuple[Int[Array, "B"], Bool[Array, "B V"] | None, KVState]:
    """Reads the token of every sequence that runs and draws the next: that, the record with it, the state after."""
    logits, state = decode_step(model, params, token, state, active=running)
    token = jnp.where(running, draw(sampler, logits, state, seen), pad_id)
    return token, None if seen is None else with_token(seen, token, running), state


def generate_from(
    model: Model,
    params: PyTree[Any],
    logits: Float[Array, "B V"],
    state: KVState,
    *,
    max_new_tokens: int,
    sampler: Sampler = Greedy(),
    eos_ids: int | Sequence[int] | None = None,
    pad_id: int = 0,
    tokens: Array | np.ndarray | Sequence[Sequence[int]] | None = None,
) -> Generation:
    """Generates from the logits and the state that `prefill`, `feed` or an earlier call returned.

    The first token is drawn from `logits`; every token but the last is read back by a decode step, so a state must
    be planned for `max_new_tokens - 1` more. The loop ends as soon as every sequence has produced one of `eos_ids`,
    which are the model's own if None.

    Logits that are not numbers, as those of a traced state that is driven past its plan, give the token -1.

    A sampler with a repetition penalty must know what was read: `tokens` "B T", padded on the left, of which the last
    `state.length[b]` are those of sequence b. Other samplers need none.

    Raises:
      ValueError: more tokens than the state was planned for, logits that are not the state's, no `tokens` or fewer than
        were read where the sampler asks for them.
    """
    eos_ids = check_request(model, max_new_tokens, sampler, eos_ids, pad_id)
    check_logits(model, logits, state)
    logits, B = jnp.asarray(logits), logits.shape[0]
    check_room(state, max_new_tokens - 1)
    seen = _seen(model, state, tokens) if sampler.reads_seen else None
    eos = jnp.asarray(eos_ids, jnp.int32)[None]

    def read(carry):
        step, token, running, tokens, lengths, seen, state = carry
        token, seen, state = next_token(model, params, token, running, seen, state, sampler=sampler, pad_id=pad_id)
        tokens = tokens.at[:, step].set(token)
        lengths = lengths + running.astype(jnp.int32)
        running = running & ~(token[:, None] == eos).any(-1)
        return step + 1, token, running, tokens, lengths, seen, state

    token, seen = first_token(sampler, logits, state, seen)
    drawn = jnp.full((B, max_new_tokens), pad_id, jnp.int32).at[:, 0].set(token)
    running = ~(token[:, None] == eos).any(-1)
    carry = (jnp.int32(1), token, running, drawn, jnp.ones((B,), jnp.int32), seen, state)
    if eos_ids:
        carry = lax.while_loop(lambda c: (c[0] < max_new_tokens) & c[2].any(), read, carry)
    else:
        carry, _ = lax.scan(lambda c, _: (read(c), None), carry, length=max_new_tokens - 1)
    return Generation(carry[3], carry[4], carry[6])


def _seen(model: Model, state: KVState, tokens: Any) -> Bool[Array, "B V"]:
    """The record that a sampler starts from, of the tokens that a state has read."""
    if tokens is None:
        raise ValueError(
            "the sampler has a repetition penalty, which must know what was read; give tokens=, the ids that the state "
            "has read, padded on the left"
        )
    real = state.length if isinstance(state.length, jax.core.Tracer) else _read_last(state.length, tokens)
    tokens = as_ids(model, tokens, (len(state.length), None), "one row of tokens a sequence", real=real)
    return seen_tokens(tokens, state.length, model.config.vocab_size)


def _read_last(length: Any, tokens: Any) -> np.ndarray | None:
    """Which of the tokens "B T" a state has read, where they have the axes that they should have."""
    shape, read = np.shape(tokens), np.asarray(length)
    if len(shape) != 2 or shape[0] != len(read):
        return None
    if read.max() > shape[1]:
        raise ValueError(
            f"the state has read {read.max()} tokens, but tokens= holds {shape[1]} a sequence; give all that were read"
        )
    return np.arange(shape[1])[None] >= shape[1] - read[:, None]


@functools.partial(
    jax.jit, static_argnames=("model", "plan", "max_new_tokens", "sampler", "eos_ids", "pad_id", "block")
)
def _generate(
    model, params, tokens, lengths, key, sizes, *, plan, max_new_tokens, sampler, eos_ids, pad_id, block
) -> Generation:
    logits, state = prefill(model, params, tokens, plan, lengths=lengths, key=key, block=block, sizes=sizes)
    return generate_from(
        model,
        params,
        logits,
        state,
        max_new_tokens=max_new_tokens,
        sampler=sampler,
        eos_ids=eos_ids,
        pad_id=pad_id,
        tokens=tokens,
    )


def generate(
    model: Model,
    params: PyTree[Any],
    tokens: Array | np.ndarray,
    *,
    policy: Policy = identity(),
    max_new_tokens: int,
    lengths: Array | np.ndarray | Sequence[int] | None = None,
    sampler: Sampler = Greedy(),
    eos_ids: int | Sequence[int] | None = None,
    pad_id: int = 0,
    key: Array | None = None,
    block: int | None = None,
    within: Policy | None = None,
) -> Generation:
    """Reads left-padded prompts, evicts, and generates, in one compiled program.

    An equal policy, rebuilt, compiles nothing new.

    Args:
      model, params: the model.
      tokens: token ids "B T", padded on the left.
      policy: what to evict; everything is kept by default.
      max_new_tokens: tokens to generate.
      lengths: the prompts' own lengths "B", T if None.
      sampler: greedy by default. A repetition penalty counts the prompt's tokens, and no padding.
      eos_ids: tokens that end a sequence; the model's own (`model.config.eos_ids`) if None, `()` for none.
      pad_id: what follows the end.
      key: one key, or one a row. A row of a batch draws what it would draw alone with the same key.
      block: read the prompt in blocks of so many tokens (`prefill`).
      within: the same policy with a larger budget, in whose slots and compiled program `policy` runs: budgets within
        one compile once. Prompts must have known lengths.

    Returns:
      `Generation(tokens, lengths, state)`.

    Raises:
      ValueError: empty prompts, token ids outside the vocabulary, lengths outside the prompt, sizes that the policy
        cannot work with; always before anything runs.
    """
    eos_ids = check_request(model, max_new_tokens, sampler, eos_ids, pad_id)
    tokens, lengths = check_prompts(model, tokens, lengths)
    known = lengths if isinstance(lengths, np.ndarray) else None
    planned = policy if within is None else within
    plan = make_plan(model.config, planned, prompt_len=tokens.shape[1], max_new_tokens=max_new_tokens, lengths=known)
    block = check_block(plan, block)
    if within is not None and known is None:
        raise ValueError("lengths are traced, but a policy within another needs them known; make a plan and its sizes")
    return _generate(
        model,
        params,
        tokens,
        jnp.asarray(lengths),
        row_keys(key, tokens.shape[0]),
        None if within is None or known is None else plan.sizes(policy, known),
        plan=plan,
        max_new_tokens=max_new_tokens,
        sampler=sampler,
        eos_ids=eos_ids,
        pad_id=pad_id,
        block=block,
    )


def check_request(
    model: Model, max_new_tokens: int, sampler: Sampler, eos_ids: int | Sequence[int] | None, pad_id: int
) -> tuple[int, ...]:
    """The end tokens, or a ValueError that says what of a request for new tokens makes no sense.

    Of the model's own end tokens, those that its vocabulary has no logits for are left out, as it never draws them.
    """
    check_model(model)
    checked(whole(1, why="generate at least 1 token, a whole number"), "max_new_tokens", max_new_tokens)
    checked(a(Sampler), "sampler", sampler)
    checked(whole(-(2**31), 2**31 - 1), "pad_id", pad_id)
    if eos_ids is None:
        return tuple(i for i in getattr(model.config, "eos_ids", ()) if i < model.config.vocab_size)
    ids = whole(0, model.config.vocab_size - 1, f"end tokens lie in the vocabulary of {model.config.vocab_size}")
    return checked(each(ids) if hasattr(eos_ids, "__iter__") else lambda i: (ids(i),), "eos_ids", eos_ids)


def check_logits(model: Model, logits: Any, state: Any) -> None:
    """Raises ValueError for logits that are not one row of the model's vocabulary for every sequence of a state."""
    _check_is(KVState, "state", state)
    check_array("logits", logits, "batch", "vocabulary", shape=(len(state.length), model.config.vocab_size))


def check_room(state: KVState, num_tokens: int) -> None:
    """Raises ValueError if a state, where its numbers are known, was not planned for so many tokens more.

    Temperatures, histories and tables of positions are made for the tokens planned, even where slots are left.
    """
    if isinstance(state.length, jax.core.Tracer) or isinstance(state.prompt_length, jax.core.Tracer):
        return
    steps, planned = int((state.length - state.prompt_length).max()) + num_tokens, state.plan.max_new_tokens
    if steps > planned:
        raise ValueError(
            f"{steps} tokens come after the prompt, but the plan was made for {planned}; make it with "
            f"max_new_tokens={steps}, which takes no more memory where a policy evicts at every step"
        )


def as_ids(
    model: Model, tokens: Any, shape: tuple[int | None, ...], meaning: str, *, real: Any = None
) -> Int[Array, "..."]:
    """Token ids as an array of 32-bit integers.

    Args:
      model: whose vocabulary they are of.
      tokens: the ids. Traced ones pass with their shape and type checked alone.
      shape: what is expected; None for any size of at least 1.
      meaning: the same in words.
      real: which of them are tokens; the others may be any numbers. All are if None, or if it is traced.

    Raises:
      ValueError: no integers, another shape, ids outside the vocabulary.
    """
    known = tokens if isinstance(tokens, jax.Array) else _as_numpy("tokens", tokens)
    fits = known.ndim == len(shape) and all(
        n == m or (m is None and n > 0) for n, m in zip(known.shape, shape, strict=True)
    )
    if not fits or not jnp.issubdtype(known.dtype, jnp.integer):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(
            f"tokens must be integers of shape ({wanted}), {meaning}; got {known.dtype} of shape {known.shape}"
        )
    if not isinstance(known, jax.core.Tracer) and not isinstance(real, jax.core.Tracer):
        ids = np.asarray(known)
        check_vocabulary(model, ids if real is None else ids[np.asarray(real)])
    return jnp.asarray(known, jnp.int32)


def check_vocabulary(model: Model, ids: np.ndarray) -> None:
    """Raises ValueError for token ids outside the model's vocabulary, negative ones among them."""
    vocab = model.config.vocab_size
    if ids.size and (ids.min() < 0 or ids.max() >= vocab):
        raise ValueError(
            f"token id {ids.min() if ids.min() < 0 else ids.max()} is outside the vocabulary of {vocab} (0 to "
            f"{vocab - 1}); was the text encoded with this model's tokenizer?"
        )


def _as_numpy(name: str, x: Any) -> np.ndarray:
    try:
        return np.asarray(x)
    except ValueError as error:  # rows of different lengths
        raise ValueError(
            f"{name} are no array: {error}; pad prompts of different lengths on the left (models.pad_left) and give "
            "lengths="
        ) from None


def check_model(model: Any) -> None:
    """Raises ValueError for what is no model, such as its parameters."""
    if not isinstance(model, Model):
        raise ValueError(
            f"model is a {type(model).__name__}, not a model; models.load(...) returns one, and its parameters"
        )


def check_prompts(
    model: Any, tokens: Any, lengths: Any = None
) -> tuple[Int[Array, "B T"], np.ndarray | Int[Array, "B"]]:
    """Prompts as arrays, or a ValueError that says what is wrong with them. Traced values pass unchecked."""
    check_model(model)
    tokens = tokens if isinstance(tokens, jax.Array) else _as_numpy("tokens", tokens)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens must be integers of shape (batch, width), got {tokens.dtype} of shape {tokens.shape}; "
            "pad prompts of different lengths on the left and give lengths="
        )
    if tokens.size == 0:
        raise ValueError(f"the prompts are empty (shape {tokens.shape}); give at least one token, such as BOS")
    B, T = tokens.shape
    lengths = as_lengths(lengths, B, T)
    if isinstance(lengths, np.ndarray) and not isinstance(tokens, jax.core.Tracer):
        check_vocabulary(model, np.asarray(tokens)[np.arange(T)[None] >= T - lengths[:, None]])
    return jnp.asarray(tokens, jnp.int32), lengths
