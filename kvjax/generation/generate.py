"""Generates from prompts, or from logits and a state, and scores given tokens, by the loop.

Letters: B batch, T given tokens, M new tokens, V vocabulary.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.contract import Amount, Ids, LayerParams, Model, Policy, PRNGKey, Size
from kvjax.generation.loop import Decoding, Steps, begin, decoded, log_prob
from kvjax.generation.sampling import Greedy, Sampler, seen_tokens
from kvjax.pallas_kernels.pytree import pytree
from kvjax.run.checks import (
    as_array,
    check_logits,
    check_model,
    check_prompts,
    check_request,
    check_room,
    check_rows,
    check_state,
    traced,
)
from kvjax.run.mesh import on_mesh
from kvjax.run.plan import Plan
from kvjax.run.state import State
from kvjax.run.steps import read_prompts


@pytree
class Generation:
    """Result of `generate`.

    Attributes:
      tokens: generated ids, `pad_id` after a sequence has ended; -1, which is no token, where logits were not numbers.
      lengths: generated tokens of every sequence, the end token included.
      log_probs: the tokens' log-probabilities under the model, 0 after a sequence has ended.
      state: the cache, which has read everything but the last token; it can be decoded further.
    """

    tokens: Int[Array, "B M"]
    lengths: Int[Array, "B"]
    log_probs: Float[Array, "B M"]
    state: State


def generate(
    model: Model,
    params: PyTree,
    tokens: Ids,
    *,
    policy: Policy = Policy(),
    max_new_tokens: Size,
    lengths: Ids | None = None,
    attention_mask: Ids | None = None,
    sampler: Sampler = Greedy(),
    eos_ids: int | Sequence[int] | None = None,
    pad_id: Amount = 0,
    key: PRNGKey = None,
    block: Size | None = None,
    plan: Plan | None = None,
    policy_params: LayerParams = None,
    mesh: Mesh | None = None,
    buckets: bool = True,
    progress: bool = False,
) -> Generation:
    """Reads prompts, evicts, and generates.

    An equal policy, rebuilt, compiles nothing new, and neither does another budget that needs as many slots.

    Args:
      model, params, tokens, policy, lengths, attention_mask, block, plan, policy_params, mesh, progress: the model,
        prompts, and how they are read, as in `kvjax.prefill`.
      max_new_tokens: tokens to generate.
      sampler: greedy by default. A repetition penalty counts the prompt's tokens, and no padding.
      eos_ids: tokens that end a sequence; the model's own (`model.config.eos_ids`) if None, `()` for none.
      pad_id: the token that follows the end.
      key: one PRNG key for the batch, or one a sequence, which a sampler that draws must have. A row of a batch draws
        what it would draw alone with the same key.
      buckets: whether prompts of about the same length, and requests for about as many tokens, share a program: the
        longest prompt's tokens and the new ones are rounded up to multiples of 16, beyond 128 to four sizes for every
        power of two. The result is the same; a cache has slots for tokens of the rounded numbers, up to a quarter more
        (or 15 of either). Traced arguments always have their exact sizes.

    Raises:
      ValueError: a sampler that draws without a key, and what `kvjax.prefill` refuses; always before anything runs.
    """
    check_model(model, params)
    ends = check_request(model, sampler, eos_ids, pad_id, key)
    prompts, steps = check_prompts(model, tokens, lengths, attention_mask), max_new_tokens
    params = on_mesh(model, params, mesh, len(prompts.tokens))
    how: dict[str, Any] = {"key": key, "block": block, "plan": plan, "policy_params": policy_params, "mesh": mesh}
    how |= {"buckets": buckets, "progress": progress}
    logits, state = read_prompts(model, params, prompts, policy, steps, **how)
    seen = seen_tokens(prompts, model.config.vocab_size) if sampler.reads_seen else None
    how = {"sampler": sampler, "ends": ends, "pad_id": pad_id, "in_place": True}
    return _generated(model, params, logits, state, seen, steps, state.plan.infos[0].max_new_tokens, **how)


def generate_from(
    model: Model,
    params: PyTree,
    logits: Float[Array, "B V"],
    state: State,
    *,
    max_new_tokens: Size,
    sampler: Sampler = Greedy(),
    eos_ids: int | Sequence[int] | None = None,
    pad_id: Amount = 0,
    tokens: Ids | None = None,
) -> Generation:
    """Generates from the logits and the state that `prefill`, `feed` or an earlier call returned.

    The first token is drawn from `logits`; every token but the last is read, so the state must be planned for
    `max_new_tokens - 1` more. Samplers draw by the state's keys: the same state, the same text.

    Args:
      model, params, max_new_tokens, sampler, eos_ids, pad_id: the model, and how tokens are drawn, as in `generate`.
      logits, state: where to go on.
      tokens: what the state has read "B T", padded on the left, for a sampler with a repetition penalty.

    Raises:
      ValueError: more tokens than the state was planned for, logits that are not the state's, no `tokens` where the
        sampler asks for them.
    """
    check_state(model, params, state)
    check_logits(model, state, logits)
    ends = check_request(model, sampler, eos_ids, pad_id, state.keys)
    check_room(state, max_new_tokens - 1)
    seen = None
    if tokens is not None:
        tokens = as_array("tokens", tokens, np.integer, (len(state.length), None), "integers, one row a sequence")
        if not traced(state.length) and (most := int(np.max(state.length))) > tokens.shape[1]:
            raise ValueError(
                f"the state has read {most} tokens, but tokens= holds {tokens.shape[1]} a sequence; give all"
            )
        read = check_rows(model, tokens, state.length, len(state.length))
        seen = seen_tokens(read, model.config.vocab_size) if sampler.reads_seen else None
    elif sampler.reads_seen:
        raise ValueError("the sampler has a repetition penalty; give tokens=, what the state has read, padded left")
    how = {"sampler": sampler, "ends": ends, "pad_id": pad_id}
    return _generated(model, params, logits, state, seen, max_new_tokens, max_new_tokens, **how)


def _generated(
    model: Model, params: PyTree, logits: Array, state: State, seen: Array | None, steps: int, most: int, **how: Any
) -> Generation:
    """Generates `steps` tokens in a program for `most`."""
    ends = how["ends"]
    at = begin(logits, state, seen, sampler=how["sampler"], ends=ends)
    count = jnp.int32(steps - 1) if most > 1 and (ends or steps < most) else None  # no loop of no steps
    found, after = decoded(model, params, at, None, count, chunk=most - 1, **how)
    tokens, lengths, log_probs = _joined(Steps(at.token, at.log_prob), found, steps=steps, ends=ends)
    return Generation(tokens, lengths, log_probs, after.state)


@functools.partial(jax.jit, static_argnames=("steps", "ends"))
def _joined(first: Steps, later: Steps, *, steps: int, ends: tuple[int, ...]) -> tuple[Array, Array, Array]:
    tokens = jnp.concatenate([first.tokens[None], later.tokens])[:steps].T
    probabilities = jnp.concatenate([first.log_probs[None], later.log_probs])[:steps].T
    ended = jnp.isin(tokens, jnp.asarray(ends, jnp.int32))
    lengths = jnp.where(ended.any(-1), ended.argmax(-1) + 1, steps).astype(jnp.int32)
    return tokens, lengths, probabilities


def _logits(logits: Array, token: Array, state: State) -> Array:
    """The logits of a step, for the loop's `also`."""
    return logits


def feed(
    model: Model, params: PyTree, tokens: Ids, state: State, *, lengths: Ids | None = None
) -> tuple[Float[Array, "B T V"], State]:
    """Reads given tokens one decode step each: a question after compression, say.

    Args:
      model, params: the model.
      tokens: token ids "B T", padded on the left where rows have different numbers of them.
      state: the cache before.
      lengths: how many of the last tokens of every row are read, at least 1; T if None.

    Returns:
      Logits after every token, NaN for padding, and the state after the last.

    Raises:
      ValueError: ids outside the vocabulary, another number of sequences, more tokens than the state was planned for.
    """
    at, given, reads = given_tokens(model, params, tokens, state, lengths)
    found, after = decoded(model, params, at, given, None, chunk=len(given[0]), also=_logits)
    logits = found.also if reads is None else jnp.where(reads[..., None], found.also, jnp.nan)
    return logits.swapaxes(0, 1), after.state


def score(
    model: Model, params: PyTree, tokens: Ids, logits: Float[Array, "B V"], state: State, *, lengths: Ids | None = None
) -> tuple[Float[Array, "B T"], State]:
    """Reads given tokens one decode step each: the log-probability of every one, given those before it.

    Args:
      model, params: the model.
      tokens: token ids "B T", padded on the left.
      lengths: how many of the last tokens of every row are read; T if None.
      logits, state: what `prefill` or an earlier call returned.

    Returns:
      Log-probabilities, 0 for padding, and the state after the last token.

    Raises:
      ValueError: what `feed` refuses, and logits that are not the state's.
    """
    at, given, reads = given_tokens(model, params, tokens, state, lengths)
    check_logits(model, state, logits)
    found, after = decoded(model, params, at, given, None, chunk=len(given[0]))
    T, B = given[0].shape
    first = jnp.zeros_like(at.token) if reads is None else reads.argmax(0)
    every = jnp.concatenate([at.token[None], given[0][:-1]])
    begun = log_prob(logits, every[first, jnp.arange(B)])
    later = jnp.concatenate([jnp.zeros_like(begun)[None], found.log_probs[:-1]])
    return jnp.where(jnp.arange(T)[:, None] == first[None], begun[None], later).T, after.state


def given_tokens(
    model: Model, params: PyTree, tokens: Ids, state: State, lengths: Ids | None
) -> tuple[Decoding, tuple[Array, Array | None], Bool[Array, "T B"] | None]:
    """(where decoding stands before given tokens, those after the first, which of these are read)."""
    check_state(model, params, state)
    rows = check_rows(model, tokens, lengths, len(state.length))
    B, T = rows.tokens.shape
    check_room(state, rows.lengths)
    ids = jnp.asarray(rows.tokens, jnp.int32).T
    ragged = traced(rows.lengths) or bool((rows.lengths < T).any())
    reads = jnp.arange(T)[:, None] >= T - jnp.asarray(rows.lengths)[None] if ragged else None
    after = lambda x: jnp.concatenate([x[1:], jnp.zeros_like(x[:1])])
    running = jnp.ones((B,), bool) if reads is None else reads[0]
    at = Decoding(ids[0], jnp.zeros((B,), jnp.float32), running, state)
    return at, (after(ids), None if reads is None else after(reads)), reads
