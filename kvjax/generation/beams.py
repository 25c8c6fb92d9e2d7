"""Beam search in which every beam owns an evicted cache, and a beam's children start from copies of it.

Letters: B batch, W beams, P parents (1 before the first token, W after), C candidates, R returned, M new tokens,
V vocab.

The search is that of transformers 5 (`GenerationMixin._beam_search` without sampling and logits processors): at every
step the best continuations of a sequence's running beams are ranked by the sum of their log probabilities. Those of the
best W that end go to a pool of W hypotheses, ranked by that sum divided by `length ** length_penalty`; the best W that
do not end run on. A sequence closes, and its pool with it, once `early_stopping` says so, or at its limit of tokens.

It has a loop of its own, apart from `kvjax.generation.loop`, as its caches are copied from row to row at every step.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.contract import Amount, Ids, LayerParams, Model, Policy, PRNGKey, Size
from kvjax.contract.checks import whole
from kvjax.generation.loop import NO_TOKEN
from kvjax.generation.sampling import Greedy
from kvjax.pallas_kernels.pytree import pytree, static
from kvjax.run.checks import check_logits, check_model, check_prompts, check_request, check_room, check_state
from kvjax.run.mesh import on_mesh
from kvjax.run.plan import Plan
from kvjax.run.state import State
from kvjax.run.steps import decode, read_prompts


@pytree
class Beams:
    """The R best hypotheses of every prompt, the best first (`generate_beams`).

    Attributes:
      tokens: generated ids, `pad_id` after a hypothesis has ended.
        -1, which is no token, where logits were not numbers.
      lengths: generated tokens of every hypothesis, the end token included.
      scores: sum of the log probabilities of a hypothesis's tokens, divided by `length ** length_penalty`.
      state: the caches of the returned hypotheses, row `b * R + r` for hypothesis r of prompt b. As after
        `kvjax.generate`, everything but the last token has been read.
    """

    tokens: Int[Array, "B R M"]
    lengths: Int[Array, "B R"]
    scores: Float[Array, "B R"]
    state: State


@pytree
class Rules:
    """How a search goes: how hypotheses are compared, as data, so that another penalty compiles nothing new.

    Attributes:
      penalty: what the sum of log probabilities of a hypothesis of n tokens is divided by.
      hope: what that of the best running beam of n tokens is divided by, to see whether it may still enter the pool.
      greedy: whether a sequence closes as soon as its pool is full.
      longest: tokens of the longest hypothesis, of all sequences or of each.
      num_beams, num_returned: W and R.
      ends: tokens that end a hypothesis.
      pad_id: the token that follows the end.
    """

    penalty: Float[Any, "lengths"]
    hope: Float[Any, "lengths"]
    greedy: Bool[Any, ""]
    longest: Int[Any, "*B"]
    num_beams: int = static()
    num_returned: int = static()
    ends: tuple[int, ...] = static()
    pad_id: int = static()

    def up_to(self, most: int) -> "Rules":
        """The rules in the program of hypotheses of `most` tokens, none of which is longer than `longest`."""
        table = lambda x: np.pad(x, (0, most + 1 - len(x)), mode="edge")
        return dataclasses.replace(self, penalty=table(self.penalty), hope=table(self.hope))


@pytree
class _Running:
    """Hypotheses that have not ended, the best first.

    Attributes:
      tokens: `pad_id` from the next token on.
      scores: sums of log probabilities.
      state: row `b * P + p` for beam p of sequence b.
    """

    tokens: Int[Array, "B P M"]
    scores: Float[Array, "B P"]
    state: State


@pytree
class _Candidates:
    """The best continuations by one token, the best first.

    Attributes:
      scores: sums of log probabilities.
      parents: the running beam that each continues.
      tokens: the token that it adds.
    """

    scores: Float[Array, "B C"]
    parents: Int[Array, "B C"]
    tokens: Int[Array, "B C"]


@pytree
class _Pool:
    """The best hypotheses that have ended, the best first. Only the R that will be returned keep more than a score.

    Attributes:
      scores: divided by the penalty; -inf where there is no hypothesis yet.
      tokens, lengths: as in `Beams`.
      state: row `b * R + r`.
      open: whether the sequence may still add to its pool.
    """

    scores: Float[Array, "B W"]
    tokens: Int[Array, "B R M"]
    lengths: Int[Array, "B R"]
    state: State
    open: Bool[Array, "B"]


def _rows(index: Int[Array, "B I"], rows_per_sequence: int) -> Int[Array, "B*I"]:
    """Rows of a state from indices within every sequence's rows."""
    first = jnp.arange(index.shape[0], dtype=jnp.int32) * rows_per_sequence
    return (first[:, None] + index).reshape(-1)


def _pick(x: Int[Array, "B I *rest"], index: Int[Array, "B J"]) -> Int[Array, "B J *rest"]:
    return jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 2)), axis=1)


def _candidates(
    logits: Float[Array, "BP V"], scores: Float[Array, "B P"], num_beams: Size, num_ends: int
) -> _Candidates:
    """Enough of the best continuations to have `num_beams` among them that do not end.

    A beam's own continuations are ranked by its logits and only then by sums of log probabilities, in which close
    logits may tie: so a single beam takes the tokens that greedy generation takes.
    """
    B, P = scores.shape
    per_beam = min(logits.shape[-1], num_beams + num_ends)
    best, tokens = lax.top_k(logits, per_beam)
    tokens = jnp.where(jnp.isnan(best), NO_TOKEN, tokens)
    total = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1, keepdims=True)
    scores = scores[:, :, None] + (best.astype(jnp.float32) - total).reshape(B, P, per_beam)
    scores, index = lax.top_k(scores.reshape(B, P * per_beam), num_beams + num_ends * P)
    return _Candidates(scores, index // per_beam, _pick(tokens.reshape(B, P * per_beam), index))


def _continued(
    tokens: Int[Array, "B P M"], found: _Candidates, chosen: Int[Array, "B J"], step: Int[Array, ""]
) -> Int[Array, "B J M"]:
    """The token lists of some candidates."""
    return _pick(tokens, _pick(found.parents, chosen)).at[:, :, step].set(_pick(found.tokens, chosen))


def _run_on(
    running: _Running, found: _Candidates, ends: Bool[Array, "B C"], step: Int[Array, ""], num_beams: int
) -> _Running:
    """The best candidates that do not end, each with a copy of its parent's cache."""
    P = running.scores.shape[1]
    scores, chosen = lax.top_k(jnp.where(ends, -jnp.inf, found.scores), num_beams)
    state = running.state[_rows(_pick(found.parents, chosen), P)]
    return _Running(_continued(running.tokens, found, chosen, step), scores, state)


def _collect(
    pool: _Pool, running: _Running, found: _Candidates, ends: Bool[Array, "B C"], step: Int[Array, ""], rules: Rules
) -> _Pool:
    """Adds those of the best W candidates that end to the pool."""
    W, R, P = pool.scores.shape[1], pool.lengths.shape[1], running.scores.shape[1]
    new = jnp.where(ends & pool.open[:, None], found.scores / rules.penalty[step + 1], -jnp.inf)[:, :W]
    scores, index = lax.top_k(jnp.concatenate([pool.scores, new], axis=1), W)
    index = index[:, :R]
    added = index >= W
    old, new = jnp.minimum(index, R - 1), jnp.maximum(index - W, 0)

    def with_added():
        mix = lambda x, y: jnp.where(added.reshape(-1, *(1,) * (x.ndim - 1)), x, y)
        taken = running.state[_rows(_pick(found.parents, new), P)]
        kept = pool.state[_rows(old, R)]
        layers, length = jax.tree.map(mix, (taken.layers, taken.length), (kept.layers, kept.length))
        return dataclasses.replace(kept, layers=layers, length=length)

    return _Pool(
        scores,
        jnp.where(added[:, :, None], _continued(running.tokens, found, new, step), _pick(pool.tokens, old)),
        jnp.where(added, step + 1, _pick(pool.lengths, old)),
        lax.cond(added.any(), with_added, lambda: pool.state),
        pool.open,
    )


def _close(pool: _Pool, running: _Running, step: Int[Array, ""], rules: Rules) -> _Pool:
    """Closes the sequences whose pool cannot change any more."""
    worst = pool.scores[:, -1]
    may_improve = ~(running.scores[:, 0] / rules.hope[step + 1] <= worst)  # what is no number stays open
    full = worst != -jnp.inf
    return dataclasses.replace(pool, open=pool.open & may_improve & ~(full & rules.greedy) & (step + 1 < rules.longest))


def generate_beams_from(
    model: Model,
    params: PyTree,
    logits: Float[Array, "B V"],
    state: State,
    *,
    num_beams: Size = 4,
    max_new_tokens: Size,
    eos_ids: int | Sequence[int] | None = None,
    pad_id: Amount = 0,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    num_return_sequences: Size = 1,
) -> Beams:
    """Beam search from the logits and the state that `prefill`, `feed` or `generate_from` returned.

    As in `generate_from`, the state must be planned for `max_new_tokens - 1` more tokens. The arguments, the result and
    the errors are those of `generate_beams`.
    """
    check_state(model, params, state)
    check_logits(model, state, logits)
    how = length_penalty, early_stopping, num_return_sequences
    rules = checked_rules(model, num_beams, max_new_tokens, eos_ids, pad_id, *how)
    check_room(state, max_new_tokens - 1)
    return searched(model, params, logits, state, rules)


@functools.partial(jax.jit, static_argnames="model")
def searched(model: Model, params: PyTree, logits: Float[Array, "B V"], state: State, rules: Rules) -> Beams:
    """The search, in a program for hypotheses of as many tokens as `rules` go up to. It ends with the last open one."""
    W, R, B, M = rules.num_beams, rules.num_returned, logits.shape[0], len(rules.penalty) - 1
    eos = jnp.asarray(rules.ends, jnp.int32)
    rules = dataclasses.replace(rules, longest=jnp.broadcast_to(rules.longest, (B,)))
    first = jnp.zeros((B, R), jnp.int32)
    prompt = _Running(jnp.full((B, 1, M), rules.pad_id, jnp.int32), jnp.zeros((B, 1), jnp.float32), state)
    pool = _Pool(
        jnp.full((B, W), -jnp.inf, jnp.float32),
        jnp.repeat(prompt.tokens, R, axis=1),
        first,
        state[_rows(first, 1)],
        jnp.ones((B,), bool),
    )

    def extend(step, logits, running, pool):
        found = _candidates(logits, running.scores, W, len(rules.ends))
        ended = jnp.isin(found.tokens, eos)
        pool = _collect(pool, running, found, ended | (step + 1 == rules.longest[:, None]), step, rules)
        running = _run_on(running, found, ended, step, W)
        return step + 1, running, _close(pool, running, step, rules)

    def body(carry):
        step, running, pool = carry
        last = lax.dynamic_index_in_dim(running.tokens, step - 1, axis=2, keepdims=False)
        logits, state = decode(model, params, last.reshape(-1), running.state)
        return extend(step, logits, dataclasses.replace(running, state=state), pool)

    carry = extend(jnp.int32(0), logits, prompt, pool)
    _, _, pool = lax.while_loop(lambda c: c[2].open.any(), body, carry)
    return Beams(pool.tokens, pool.lengths, pool.scores[:, :R], pool.state)


def generate_beams(
    model: Model,
    params: PyTree,
    tokens: Ids,
    *,
    policy: Policy = Policy(),
    num_beams: Size = 4,
    max_new_tokens: Size,
    lengths: Ids | None = None,
    attention_mask: Ids | None = None,
    eos_ids: int | Sequence[int] | None = None,
    pad_id: Amount = 0,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    num_return_sequences: Size = 1,
    key: PRNGKey = None,
    plan: Plan | None = None,
    policy_params: LayerParams = None,
    mesh: Mesh | None = None,
    buckets: bool = True,
) -> Beams:
    """Reads prompts, evicts, and searches for the most likely continuations.

    A prompt is read and evicted once, and its cache then copied for every beam; each decode step gathers the caches of
    the beams that run on. While decoding, B * W caches are held, twice during the gather, and those of the B * R best
    hypotheses that have ended.

    All beams of a sequence keep the sequence's PRNG key. So a policy that draws at random evicts as a function of the
    key and of a hypothesis's own text, whatever slots and siblings it had on its way: its cache and its score are those
    of reading the same text alone with the same key.

    Args:
      model, params, tokens, policy, lengths, attention_mask, plan, policy_params, mesh, buckets: the model, prompts,
        and how they are read, as in `kvjax.generate`.
      num_beams: W. One beam is greedy generation, as in transformers, and ends at the first end token whatever
        `early_stopping` says.
      max_new_tokens: tokens of the longest hypothesis.
      eos_ids: tokens that end a hypothesis; the model's own if None, `()` for none.
      pad_id: the token that follows the end.
      length_penalty: scores are sums of log probabilities divided by `length ** length_penalty`, the end token counted;
        above 0 longer hypotheses gain, below 0 shorter ones.
      early_stopping: when a sequence's W hypotheses are final. True: as soon as there are W. False: when the best
        running beam, scored at its present length, is no better than the worst of them. "never": when it could not
        become better at any length, where a positive `length_penalty` scores it at `max_new_tokens`.
      num_return_sequences: R, hypotheses to return for every prompt, W at most.
      key: one key, or one a row. A row of a batch draws what it would draw alone with the same key.

    Returns:
      `Beams(tokens, lengths, scores, state)`. A score of -inf says that there was no other hypothesis of any
      probability.

    Raises:
      ValueError: what `kvjax.generate` refuses; no beams, more beams than first tokens, more hypotheses to return than
        beams, a penalty out of range; always before anything runs.
    """
    check_model(model, params)
    how = length_penalty, early_stopping, num_return_sequences
    rules = checked_rules(model, num_beams, max_new_tokens, eos_ids, pad_id, *how)
    prompts = check_prompts(model, tokens, lengths, attention_mask)
    params = on_mesh(model, params, mesh, len(prompts.tokens))
    reads = {"key": key, "plan": plan, "policy_params": policy_params, "mesh": mesh, "buckets": buckets}
    logits, state = read_prompts(model, params, prompts, policy, max_new_tokens, **reads)
    found = searched(model, params, logits, state, rules.up_to(state.plan.infos[0].max_new_tokens))
    return dataclasses.replace(found, tokens=found.tokens[:, :, :max_new_tokens])


def checked_rules(
    model: Model,
    num_beams: Size,
    max_new_tokens: Size,
    eos_ids: int | Sequence[int] | None,
    pad_id: Amount = 0,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    num_return_sequences: Size = 1,
) -> Rules:
    """The rules of a search whose options have been checked, those of `generate_beams`."""
    eos = tuple(sorted(set(check_request(model, Greedy(), eos_ids, pad_id, None))))
    vocab = model.config.vocab_size
    whole("num_beams", num_beams, 1, vocab, "search with at least 1 beam, which is greedy generation")
    whole("num_return_sequences", num_return_sequences, 1, num_beams, f"there are num_beams={num_beams}")
    if num_beams > vocab - len(eos):
        raise ValueError(
            f"num_beams={num_beams} beams start with different tokens, but the vocabulary has {vocab - len(eos)} that "
            f"do not end a sequence ({vocab} less {len(eos)} of eos_ids); use fewer beams"
        )
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise ValueError(f"early_stopping={early_stopping!r} is not one of (False, True, 'never')")
    number = isinstance(length_penalty, int | float | np.number) and math.isfinite(length_penalty)
    if not number or abs(length_penalty) * math.log(max_new_tokens) > 80:
        raise ValueError(
            f"length_penalty={length_penalty!r}: {max_new_tokens} tokens to that power are no number of float32; "
            "choose a penalty nearer to 0"
        )
    penalty = np.clip(np.arange(max_new_tokens + 1, dtype=np.float64), 1, None) ** length_penalty
    hopes = early_stopping == "never" and length_penalty > 0
    hope = np.full_like(penalty, float(max_new_tokens) ** length_penalty) if hopes else penalty
    greedy = early_stopping is True or num_beams == 1
    data = penalty.astype(np.float32), hope.astype(np.float32), np.asarray(greedy), np.int32(max_new_tokens)
    return Rules(*data, num_beams, num_return_sequences, eos, pad_id)
