"""The drivers that join a model and a policy: read a prompt, decode a token, generate.

The model measures what the policy asks for; the policy marks slots dead; the drivers compact storage after prefill. All
of them are pure functions, to be used as they are or inside `jax.jit` with `model` and `plan` static.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.attention import Attend, attend
from kvjax.context import Context, Phase, row_keys
from kvjax.plan import CachePlan, ModelConfig, as_lengths, make_plan
from kvjax.policy import Policy, context, identity, on_view
from kvjax.pool import PooledKV, to_pool
from kvjax.sampling import Greedy, Sampler
from kvjax.state import EMPTY, KVState, LayerKV, compact
from kvjax.stats import AttentionStats, LayerStats, ordered
from pallas_kernels.pytree import pytree

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
        """Logits (of the last column only, if asked), and every layer's cache and statistics after the step."""
        ...


def init_state(
    plan: CachePlan,
    lengths: Int[Array, "B"],
    *,
    key: Array | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> KVState:
    """An empty cache for prompts of the given lengths.

    Args:
      plan: the static sizes.
      lengths: the prompts' lengths; ratios are ratios of these.
      key: one key for the batch, split by row, or one a row. `jax.random.key(0)` if None.
      dtype: of keys and values.
    """
    B = lengths.shape[0]
    layers = []
    for site, positions in zip(plan.sites, plan.positions, strict=True):
        empty = jnp.zeros((B, site.num_kv_heads, 0, site.head_dim), dtype)
        pos = jnp.zeros((B, site.num_kv_heads, 0), jnp.int32)
        rank = None if positions == "original" else pos
        rotated = pos if positions == "rerotate" else None
        gate = jnp.zeros(pos.shape, float) if plan.policy.gates(site) else None
        memory = plan.policy.init(site, B)
        layers.append(LayerKV(empty, empty, pos, memory, rank, rotated, gate=gate, positions=positions))
    keys = row_keys(key, B)
    lengths = lengths.astype(jnp.int32)
    return KVState(tuple(layers), jnp.zeros_like(lengths), lengths, jnp.int32(0), keys, plan=plan)


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
      Logits, the state after, and the statistics that the policy observes: `policy(state, stats)` evicts.
    """
    plan: CachePlan = state.plan
    B, T = tokens.shape
    valid = jnp.full((B,), T, jnp.int32) if valid is None else valid.astype(jnp.int32)
    column = jnp.arange(T, dtype=jnp.int32)[None] - (T - valid)[:, None]
    pos = jnp.where(column >= 0, state.length[:, None] + column, EMPTY)
    tokens = jnp.where(column >= 0, tokens, 0)  # padding may be any id, even one outside the vocabulary
    state = dataclasses.replace(state, length=state.length + valid, step=state.step + jnp.int32(phase == "decode"))

    def attend_and_evict(cache, q, k, v, *, layer, **options):
        site = plan.sites[layer]
        ctx = dataclasses.replace(context(state, layer, phase), tokens=tokens)
        observe = ordered(plan.policy.observe(phase, site))
        policy = plan.policy if T == 1 else None
        out, kv, stats = attend(cache, q, k, v, pos, ctx=ctx, observe=observe, policy=policy, **options)
        if evict and plan.policy.layerwise:
            kv = store(on_view(lambda view: plan.policy.layer(view, stats, ctx), kv), layer)
        return out, kv, stats

    def store(kv, layer):
        return kv if phase == "decode" else stored(plan, kv, context(state, layer, phase), ends=ends)

    logits, layers, stats = model(params, tokens, state.layers, attend=attend_and_evict, last_only=last_only)
    state, stats = dataclasses.replace(state, layers=layers), AttentionStats(stats, phase=phase)
    if evict and not plan.policy.layerwise:
        state = plan.policy(state, stats)
        state = dataclasses.replace(state, layers=tuple(store(kv, i) for i, kv in enumerate(state.layers)))
    return logits, state, stats


def stored(plan: CachePlan, kv: LayerKV, ctx: Context, *, ends: bool = True) -> LayerKV | PooledKV:
    """A layer as it is kept after the prompt, or after a block of it."""
    layer = ctx.site.layer
    if plan.layouts[layer] == "pool":
        kv_ = to_pool(kv, plan.capacities[layer], plan.policy.most(kv, ctx) if ends else None)
    else:
        kv_ = compact(kv, plan.capacities[layer])
    return plan.policy.transform(kv_, ctx) if ends else kv_


def prefill(
    model: Model,
    params: PyTree[Any],
    tokens: Int[Array, "B T"],
    plan: CachePlan,
    *,
    lengths: Array | np.ndarray | Sequence[int] | None = None,
    key: Array | None = None,
    block: int | None = None,
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
      tokens: left-padded token ids.
      plan: made for this width.
      lengths: the prompts' own lengths, T if None.
      key: one PRNG key for the batch, or one a row.
      block: tokens of a block, None for the whole prompt at once.

    Returns:
      Logits of the next token, and the compacted state.

    Raises:
      ValueError: a prompt of another width, lengths that the plan has no room for, a block without tokens, blocks for
        a policy that looks at the whole prompt (FastGen), or others than of one token for a policy that lets every row
        decide (H2O's stepwise mask).
    """
    B, T = tokens.shape
    if plan.prompt_len != T:
        raise ValueError(f"the prompt is {T} tokens wide, but the plan was made for {plan.prompt_len}; make a new plan")
    check_block(plan, block)
    lengths = as_lengths(lengths, B, T)
    if isinstance(lengths, np.ndarray):
        plan.check_lengths(lengths)
    lengths = jnp.asarray(lengths)
    state = init_state(plan, lengths, key=key, dtype=model.config.dtype)
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


def check_block(plan: CachePlan, block: int | None) -> None:
    """Raises ValueError if the plan's policy cannot read its prompts in blocks of `block` tokens (None: at once)."""
    T = plan.prompt_len
    if block is not None and block < 1:
        raise ValueError(f"block={block}: a block has at least 1 token; use None to read the prompt at once")
    if block is not None and block < T and plan.policy.needs_whole_prompt:
        raise ValueError(
            f"{type(plan.policy).__name__} looks at the whole prompt at once, but block={block} reads {T} tokens in "
            f"parts; use block=None"
        )
    if block != 1 and T > 1 and plan.policy.needs_every_row:
        raise ValueError(
            f"every row of {plan.policy} decides what the next one reads, but block={block} reads {T} tokens otherwise "
            "than one by one; use block=1"
        )


def empty_after_prompt(state: KVState, *, ends: bool = True) -> KVState:
    """A state without tokens in the shapes that it has after the prompt."""
    layers = enumerate(state.layers)
    layers = tuple(stored(state.plan, kv, context(state, i, "prefill"), ends=ends) for i, kv in layers)
    return dataclasses.replace(state, layers=layers)


def decode_step(
    model: Model,
    params: PyTree[Any],
    token: Int[Array, "B"],
    state: KVState,
    *,
    active: Bool[Array, "B"] | None = None,
) -> tuple[Float[Array, "B V"], KVState]:
    """One token of every sequence: append, attend, update scores, evict if due. Nothing is gathered or moved.

    Args:
      model, params: the model.
      token: the token to read.
      state: the cache before. Donate it under `jit` to write in place.
      active: a sequence that is not active reads nothing and keeps its cache. All are if None.

    Returns:
      Logits of the next token, and the state after. Logits are NaN where a cache was driven past its plan.
    """
    plan: CachePlan = state.plan
    policy = plan.policy
    layers = tuple(_make_room(policy, kv, context(state, i, "decode"), active) for i, kv in enumerate(state.layers))
    state = dataclasses.replace(state, layers=layers)
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


def _make_room(
    policy: Policy, kv: LayerKV | PooledKV, ctx: Context, active: Bool[Array, "B"] | None
) -> LayerKV | PooledKV:
    """`policy.make_room` for the sequences that are about to read a token."""
    after = on_view(lambda view: policy.make_room(view, ctx), kv)
    return after if active is None or after is kv else _only(active)(after, kv)


def feed(
    model: Model, params: PyTree[Any], tokens: Int[Array, "B T"], state: KVState
) -> tuple[Float[Array, "B T V"], KVState]:
    """Reads given tokens one decode step at a time: a question after compression, or text to be scored.

    Returns:
      Logits after every token, and the state after the last.
    """

    def step(state, token):
        logits, state = decode_step(model, params, token, state)
        return state, logits

    state, logits = lax.scan(step, state, tokens.T)
    return logits.swapaxes(0, 1), state


@pytree
class Generation:
    """What `generate` returns.

    Attributes:
      tokens: generated ids, `pad_id` after a sequence has ended.
      lengths: generated tokens of every sequence, the end token included.
      state: the cache after generation; it can be decoded further as far as its plan has room.
    """

    tokens: Int[Array, "B M"]
    lengths: Int[Array, "B"]
    state: KVState


def generate_from(
    model: Model,
    params: PyTree[Any],
    logits: Float[Array, "B V"],
    state: KVState,
    *,
    max_new_tokens: int,
    sampler: Sampler = Greedy(),
    eos_ids: tuple[int, ...] = (),
    pad_id: int = 0,
) -> Generation:
    """Generates from the logits and the state that `prefill`, `feed` or an earlier call returned.

    The first token is drawn from `logits`; every token but the last is read back by a decode step, so a state needs
    room for `max_new_tokens - 1` more. The loop ends as soon as every sequence has produced one of `eos_ids`.
    """
    B = logits.shape[0]
    eos = jnp.asarray(eos_ids, jnp.int32)[None]

    def draw(logits, state):
        fold = lambda key: jax.random.fold_in(jax.random.fold_in(key, _SAMPLING), state.step)
        return sampler(logits, jax.vmap(fold)(state.keys))

    def read(carry):
        step, token, running, tokens, lengths, state = carry
        logits, state = decode_step(model, params, token, state, active=running)
        token = jnp.where(running, draw(logits, state), pad_id)
        tokens = tokens.at[:, step].set(token)
        lengths = lengths + running.astype(jnp.int32)
        running = running & ~(token[:, None] == eos).any(-1)
        return step + 1, token, running, tokens, lengths, state

    token = draw(logits, state)
    tokens = jnp.full((B, max_new_tokens), pad_id, jnp.int32).at[:, 0].set(token)
    running = ~(token[:, None] == eos).any(-1)
    carry = (jnp.int32(1), token, running, tokens, jnp.ones((B,), jnp.int32), state)
    if eos_ids:
        carry = lax.while_loop(lambda c: (c[0] < max_new_tokens) & c[2].any(), read, carry)
    else:
        carry, _ = lax.scan(lambda c, _: (read(c), None), carry, length=max_new_tokens - 1)
    return Generation(carry[3], carry[4], carry[5])


@functools.partial(
    jax.jit, static_argnames=("model", "plan", "max_new_tokens", "sampler", "eos_ids", "pad_id", "block")
)
def _generate(
    model, params, tokens, lengths, key, *, plan, max_new_tokens, sampler, eos_ids, pad_id, block
) -> Generation:
    logits, state = prefill(model, params, tokens, plan, lengths=lengths, key=key, block=block)
    return generate_from(
        model, params, logits, state, max_new_tokens=max_new_tokens, sampler=sampler, eos_ids=eos_ids, pad_id=pad_id
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
    eos_ids: int | Sequence[int] = (),
    pad_id: int = 0,
    key: Array | None = None,
    block: int | None = None,
) -> Generation:
    """Reads left-padded prompts, evicts, and generates, in one compiled program.

    An equal policy, rebuilt, compiles nothing new.

    Args:
      model, params: the model.
      tokens: token ids "B T", padded on the left.
      policy: what to evict; everything is kept by default.
      max_new_tokens: tokens to generate.
      lengths: the prompts' own lengths "B", T if None.
      sampler: greedy by default.
      eos_ids: tokens that end a sequence.
      pad_id: what follows the end.
      key: one key, or one a row. A row of a batch draws what it would draw alone with the same key.
      block: read the prompt in blocks of so many tokens (`prefill`).

    Returns:
      `Generation(tokens, lengths, state)`.

    Raises:
      ValueError: empty prompts, token ids outside the vocabulary, lengths outside the prompt, sizes that the policy
        cannot work with; always before anything runs.
    """
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: generate at least 1 token, a whole number")
    eos_ids = (eos_ids,) if isinstance(eos_ids, int) else tuple(eos_ids)
    tokens, lengths = check_prompts(model, tokens, lengths)
    known = lengths if isinstance(lengths, np.ndarray) else None
    plan = make_plan(model.config, policy, prompt_len=tokens.shape[1], max_new_tokens=max_new_tokens, lengths=known)
    check_block(plan, block)
    return _generate(
        model,
        params,
        tokens,
        jnp.asarray(lengths),
        row_keys(key, tokens.shape[0]),
        plan=plan,
        max_new_tokens=max_new_tokens,
        sampler=sampler,
        eos_ids=eos_ids,
        pad_id=pad_id,
        block=block,
    )


def check_prompts(
    model: Any, tokens: Any, lengths: Any = None
) -> tuple[Int[Array, "B T"], np.ndarray | Int[Array, "B"]]:
    """Prompts as arrays, or a ValueError that says what is wrong with them. Traced values pass unchecked."""
    if not isinstance(tokens, jax.core.Tracer):
        tokens = np.asarray(tokens)
        if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"tokens must be integers of shape (batch, width), got {tokens.dtype} of shape {tokens.shape}; "
                "pad prompts of different lengths on the left and give lengths="
            )
        if tokens.size == 0:
            raise ValueError(f"the prompts are empty (shape {tokens.shape}); give at least one token, such as BOS")
    B, T = tokens.shape
    lengths = as_lengths(lengths, B, T)
    if isinstance(tokens, np.ndarray) and isinstance(lengths, np.ndarray):
        real = tokens[np.arange(T)[None] >= T - lengths[:, None]]
        low, high, vocab = int(real.min()), int(real.max()), model.config.vocab_size
        if low < 0 or high >= vocab:
            raise ValueError(
                f"token id {low if low < 0 else high} is outside the vocabulary of {vocab} (0 to {vocab - 1}); "
                "was the text encoded with this model's tokenizer?"
            )
    return jnp.asarray(tokens, jnp.int32), lengths
