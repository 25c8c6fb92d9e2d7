"""Generation in one compiled program: from prompts, or from the logits and the state that a driver returned."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.algebra import identity
from kvjax.cache.context import checked_key, row_keys
from kvjax.cache.mesh import agreed
from kvjax.cache.state import KVState
from kvjax.drivers.buckets import plan_request, rounds
from kvjax.drivers.requests import Model as Model
from kvjax.drivers.requests import as_ids as as_ids
from kvjax.drivers.requests import as_scored as as_scored
from kvjax.drivers.requests import check_block as check_block
from kvjax.drivers.requests import check_key as check_key
from kvjax.drivers.requests import check_logits as check_logits
from kvjax.drivers.requests import check_model as check_model
from kvjax.drivers.requests import check_positions as check_positions
from kvjax.drivers.requests import check_prompts as check_prompts
from kvjax.drivers.requests import check_request as check_request
from kvjax.drivers.requests import check_room as check_room
from kvjax.drivers.requests import check_vocabulary as check_vocabulary
from kvjax.drivers.requests import read_last
from kvjax.drivers.sampling import Greedy, Sampler, seen_tokens, with_token
from kvjax.drivers.steps import decode_step as decode_step
from kvjax.drivers.steps import empty_after_prompt as empty_after_prompt
from kvjax.drivers.steps import feed as feed
from kvjax.drivers.steps import forward as forward
from kvjax.drivers.steps import init_state as init_state
from kvjax.drivers.steps import prefill as prefill
from kvjax.pallas_kernels.pytree import pytree
from kvjax.policy import Policy
from kvjax.sharding import as_mesh, check_split, mesh_of, on_rows, shard_params, shard_rows

NO_TOKEN: Final = -1  # what stands for a token where logits are not numbers
_SAMPLING = 0x5A3D  # keeps the sampler's draws apart from those of policies, which fold in layers first


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

    Logits that are not numbers, as those of a traced state that is driven past its plan, give the token -1. Samplers
    draw by the state's keys, those that `prefill` was given: the same state, the same text.

    A sampler with a repetition penalty must know what was read: `tokens` "B T", padded on the left, of which the last
    `state.length[b]` are those of sequence b. Other samplers need none.

    Raises:
      ValueError: more tokens than the state was planned for, logits that are not the state's, no `tokens` or fewer than
        were read where the sampler asks for them.
    """
    eos_ids = check_request(model, max_new_tokens, sampler, eos_ids, pad_id)
    check_logits(model, logits, state)
    check_room(model.config, state, max_new_tokens - 1)
    seen = _seen(model, state, tokens) if sampler.reads_seen or tokens is not None else None
    seen = seen if sampler.reads_seen else None
    options = {"sampler": sampler, "ends": eos_ids, "pad_id": pad_id}
    return _continued(model, params, jnp.asarray(logits), state, seen, None, max_new_tokens, **options)


def _continued(
    model: Model,
    params: PyTree[Any],
    logits: Float[Array, "B V"],
    state: KVState,
    seen: Bool[Array, "B V"] | None,
    steps: Int[Array, ""] | None,
    most: int,
    *,
    sampler: Sampler,
    ends: tuple[int, ...],
    pad_id: int,
) -> Generation:
    """`steps` new tokens, of the `most` that there is room for; all of these if None."""
    eos = jnp.asarray(ends, jnp.int32)[None]

    def read(carry):
        step, token, running, tokens, lengths, seen, state = carry
        token, seen, state = next_token(model, params, token, running, seen, state, sampler=sampler, pad_id=pad_id)
        tokens = tokens.at[:, step].set(token)
        lengths = lengths + running.astype(jnp.int32)
        running = running & ~(token[:, None] == eos).any(-1)
        return step + 1, token, running, tokens, lengths, seen, state

    token, seen = first_token(sampler, logits, state, seen)
    B = logits.shape[0]
    drawn = jnp.full((B, most), pad_id, jnp.int32).at[:, 0].set(token)
    running = ~(token[:, None] == eos).any(-1)
    carry = (jnp.int32(1), token, running, drawn, jnp.ones((B,), jnp.int32), seen, state)
    if ends or steps is not None:
        last = most if steps is None else steps
        carry = lax.while_loop(lambda c: (c[0] < last) & c[2].any(), read, carry)
    else:
        carry, _ = lax.scan(lambda c, _: (read(c), None), carry, length=most - 1)
    return Generation(carry[3], carry[4], carry[6])


def _seen(model: Model, state: KVState, tokens: Any) -> Bool[Array, "B V"]:
    """The record that a sampler starts from, of the tokens that a state has read."""
    if tokens is None:
        raise ValueError(
            "the sampler has a repetition penalty, which must know what was read; give tokens=, the ids that the state "
            "has read, padded on the left"
        )
    real = state.length if isinstance(state.length, jax.core.Tracer) else read_last(state.length, tokens)
    tokens = as_ids(model, tokens, (len(state.length), None), "one row of tokens a sequence", real=real)
    return seen_tokens(tokens, state.length, model.config.vocab_size)


@functools.partial(jax.jit, static_argnames=("model", "plan", "sampler", "ends", "pad_id", "block", "mesh"))
def _generate(
    model, params, tokens, lengths, key, sizes, steps, *, plan, sampler, ends, pad_id, block, mesh=None
) -> Generation:
    def run(shared, rows):
        (params, steps), (tokens, lengths, key, sizes) = shared, rows
        logits, state = prefill(model, params, tokens, plan, lengths=lengths, key=key, block=block, sizes=sizes)
        seen = seen_tokens(tokens, lengths, model.config.vocab_size) if sampler.reads_seen else None
        options = {"sampler": sampler, "ends": ends, "pad_id": pad_id}
        found = _continued(model, params, logits, state, seen, steps, plan.max_new_tokens, **options)
        # Devices whose rows have all ended do not wait for the others.
        return dataclasses.replace(found, state=dataclasses.replace(found.state, step=agreed(found.state.step)))

    return on_rows(mesh, run, (params, steps), (tokens, lengths, key, sizes))


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
    buckets: bool = True,
    attention_mask: Array | np.ndarray | None = None,
    mesh: Mesh | None = None,
) -> Generation:
    """Reads left-padded prompts, evicts, and generates, in one compiled program.

    An equal policy, rebuilt, compiles nothing new. Texts beyond the model's positions are warned of.

    Args:
      model, params: the model.
      tokens: token ids "B T", padded on the left.
      policy: what to evict; everything is kept by default.
      max_new_tokens: tokens to generate.
      lengths: the prompts' own lengths "B", T if None. Prompts that end in T - length equal ids, while their first
        T - length differ, are refused as padded on the right; of a single column this cannot be told.
      sampler: greedy by default. A repetition penalty counts the prompt's tokens, and no padding.
      eos_ids: tokens that end a sequence; the model's own (`model.config.eos_ids`) if None, `()` for none.
      pad_id: what follows the end.
      key: one key, or one a row, which a sampler that draws must have. A row of a batch draws what it would draw alone
        with the same key.
      block: read the prompt in blocks of so many tokens (`prefill`).
      within: the same policy with a larger budget, in whose slots and compiled program `policy` runs: budgets within
        one compile once. Prompts must have known lengths.
      buckets: prompts of about the same width share a program, and so do requests for about as many tokens: widths are
        rounded up to multiples of 16, beyond 128 to four sizes for every power of two, and numbers of tokens too where
        what the policy keeps does not depend on them. The result is the same; where a policy's slots grow with either,
        the cache has up to a quarter more (or 15). False is for the exact sizes, which traced arguments always have.
      attention_mask: in place of `lengths`, 1 for tokens and 0 for padding "B T", as transformers' tokenizers return
        it. Padding may stand on either side, or between: tokens are moved to the right.
      mesh: devices that share the batch, the heads and the prompts' tokens (`kvjax.make_mesh`); if None, those of the
        mesh that `tokens` lie on (`kvjax.sharding.shard_rows`). Place parameters once (`kvjax.shard_params`).

    Returns:
      `Generation(tokens, lengths, state)`. On a mesh they are split by rows, the state by kv heads too.

    Raises:
      ValueError: a sampler that draws without a key, empty prompts, token ids outside the vocabulary, lengths outside
        the prompt, sizes that the policy cannot work with, a mesh whose devices do not divide what they share; always
        before anything runs. After it, a score that is no number for any token of a prompt that was evicted from.
    """
    eos_ids = check_request(model, max_new_tokens, sampler, eos_ids, pad_id)
    check_key(sampler, key)
    mesh = mesh_of(tokens) if mesh is None else as_mesh(mesh)
    tokens, lengths = check_prompts(model, tokens, lengths, attention_mask, params=params)
    known = lengths if isinstance(lengths, np.ndarray) else None
    planned = policy if within is None else within
    width, buckets = tokens.shape[1], rounds(buckets, tokens, lengths, params, key)
    plan, tokens = plan_request(model.config, planned, tokens, lengths, max_new_tokens, buckets=buckets)
    block = check_block(plan, block, width)
    check_positions(model.config, plan, width if known is None else known, int(max_new_tokens), block=block)
    if within is not None and known is None:
        raise ValueError("lengths are traced, but a policy within another needs them known; make a plan and its sizes")
    sizes = None if within is None or known is None else plan.sizes(policy, known)
    keys = None if key is None else checked_key(key, tokens.shape[0])
    rows = tokens, jnp.asarray(lengths), keys, sizes
    if mesh is not None:
        check_split(mesh, plan, model.config, tokens.shape[0], block)
        rows = *rows[:2], row_keys(key, tokens.shape[0]), sizes
        params, rows = shard_params(model, params, mesh), shard_rows(rows, mesh)
    found = _generate(
        model,
        params,
        *rows,
        np.int32(max_new_tokens) if buckets else None,
        plan=plan,
        sampler=sampler,
        ends=eos_ids,
        pad_id=pad_id,
        block=block,
        mesh=mesh,
    )
    as_scored(found.state)
    return dataclasses.replace(found, tokens=found.tokens[:, :max_new_tokens])
