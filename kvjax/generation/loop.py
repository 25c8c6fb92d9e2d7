"""The decoding loop: tokens that a sampler draws, or given ones, any number in one compiled call.

Letters: B batch, n steps, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.contract import Model
from kvjax.generation.sampling import Greedy, Sampler, with_token
from kvjax.pallas_kernels.pytree import pytree
from kvjax.run.state import State
from kvjax.run.steps import decode

NO_TOKEN: Final = -1  # stands for a token where logits are not numbers
_SAMPLING = 0x5A3D  # keeps the draws of samplers apart from those of policies, which fold in layers first
Given = tuple[Int[Any, "*n B"], Bool[Any, "*n B"] | None] | None  # tokens that follow, and which of them are given


@pytree
class Decoding:
    """Where decoding stands: each sequence has a next token, which the cache has not read yet.

    Attributes:
      token: the next token.
      log_prob: its log-probability.
      running: which sequences go on; the others have ended, and read nothing more.
      state: the cache before that token.
      seen: the tokens that each sequence has read or drawn, for samplers that ask; None for others.
      left: how many more tokens each sequence reads, its last among them; None for any number, but for the last.
      logits: those that came with the state, where they are to be kept; otherwise None.
    """

    token: Int[Any, "B"]
    log_prob: Float[Any, "B"]
    running: Bool[Any, "B"]
    state: State
    seen: Bool[Array, "B V"] | None = None
    left: Int[Any, "B"] | None = None
    logits: Float[Array, "B V"] | None = None


@pytree
class Steps:
    """Results of one step, or of several in order.

    Attributes:
      tokens: the tokens that followed, `pad_id` where a sequence had ended.
      log_probs: their log-probabilities, 0 where a sequence had ended.
      also: what was asked for besides, stacked.
    """

    tokens: Int[Any, "*n B"]
    log_probs: Float[Any, "*n B"]
    also: PyTree = None


def log_prob(logits: Float[Array, "B V"], token: Int[Array, "B"]) -> Float[Array, "B"]:
    """The log-probability of a token in every row."""
    every = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(every, jnp.maximum(token, 0)[:, None], axis=-1)[:, 0]


def drawn(
    sampler: Sampler, logits: Float[Array, "B V"], state: State, seen: Bool[Array, "B V"] | None
) -> Int[Array, "B"]:
    """Draws each sequence's next token by its own key; -1 where logits are not numbers."""
    fold = lambda key, step: jax.random.fold_in(jax.random.fold_in(key, _SAMPLING), step)
    keys = jax.vmap(fold)(state.keys, state.length - state.prompt_length) if sampler.draws else state.keys
    token = sampler(logits, keys) if seen is None else sampler(logits, keys, seen)
    return jnp.where(jnp.isnan(logits).any(-1), NO_TOKEN, token)


def begin(
    logits: Float[Array, "B V"],
    state: State,
    seen: Bool[Array, "B V"] | None = None,
    *,
    sampler: Sampler = Greedy(),
    ends: tuple[int, ...] = (),
    given: Given = None,
) -> Decoding:
    """Draws the first token behind what a state has read from the logits that came with it.

    `given` are tokens that are taken instead, and which of them are.
    """
    bare = State((), state.length, state.prompt_length, state.keys, state.max_new_tokens, ())  # of all sizes
    return dataclasses.replace(_begun(logits, bare, seen, given, sampler=sampler, ends=ends), state=state)


@functools.partial(jax.jit, static_argnames=("sampler", "ends"))
def _begun(
    logits: Array, state: State, seen: Array | None, given: Given, *, sampler: Sampler, ends: tuple[int, ...]
) -> Decoding:
    token = drawn(sampler, logits, state, seen)
    running = ~jnp.isin(token, jnp.asarray(ends, jnp.int32))
    if given is not None:
        token, running = _taken(token, running, given)
    seen = None if seen is None else with_token(seen, token, jnp.ones_like(token, bool))
    return Decoding(token, log_prob(logits, token), running, state, seen)


def _taken(token: Int[Array, "B"], on: Array | bool, given: Any) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
    """The tokens, or given ones where there are such, and which sequences go on: all behind given ones."""
    return jnp.where(given[1], given[0], token), on | given[1]


def decode_tokens(
    model: Model,
    params: PyTree,
    at: Decoding,
    given: Given = None,
    count: Int[Array, ""] | None = None,
    *,
    chunk: int,
    sampler: Sampler = Greedy(),
    ends: tuple[int, ...] = (),
    pad_id: int = 0,
    sleeps: bool = False,
    waits: bool = True,
    also: Callable[[Array, Array, State], PyTree] | None = None,
) -> tuple[Steps, Decoding]:
    """Runs steps that read each running sequence's next token, and draw or take the one that follows.

    Args:
      model, params: the model.
      at: where decoding stands.
      given: the tokens that follow, and which of them are to be read (None for all). None to draw tokens.
      count: how many of the `chunk` steps to take, where that is traced; the loop ends early if all sequences have
        ended. None for all of them: then the loop can be differentiated.
      chunk: the steps that there is room for.
      sampler: how tokens are drawn.
      ends: tokens after which a sequence ends.
      pad_id: what stands for the tokens of sequences that have ended.
      sleeps: whether sequences may have ended already, other than by `ends`.
      waits: whether a sequence waits where its given token is not to be read. Otherwise it draws one instead, and ends
        after drawn tokens alone.
      also: a function (logits "B V" after a step, the token that follows "B", the state) -> anything to be returned of
        every step.

    Returns:
      What the steps gave, and where decoding stands afterwards.
    """
    sleeps = sleeps or bool(ends) or at.left is not None or (waits and given is not None and given[1] is not None)

    def one(at: Decoding, follows: Given) -> tuple[Decoding, Steps]:
        found, state = decode(model, params, at.token, at.state, at.running if sleeps else None)
        running, on, left = at.running, True, at.left
        if follows is None or not waits:
            token = drawn(sampler, found, state, at.seen)
            on = ~jnp.isin(token, jnp.asarray(ends, jnp.int32)) if ends else on
            token, on = (token, on) if follows is None else _taken(token, on, follows)
        else:
            token, running = follows[0], running if follows[1] is None else follows[1]
        token = jnp.where(running, token, pad_id)
        probability = jnp.where(running, log_prob(found, token), 0.0)
        seen = None if at.seen is None else with_token(at.seen, token, running)
        steps = Steps(token, probability, None if also is None else also(found, token, state))
        running = running & on
        if left is not None:  # an end is read, too
            left = jnp.minimum(left - at.running.astype(left.dtype), jnp.where(running, left, 1))
            running = left > 0
        logits = None if at.logits is None else jnp.where(at.running[:, None], found, at.logits)
        return Decoding(token, probability, running, state, seen, left, logits), steps

    if count is None:
        at, steps = lax.scan(one, at, given, length=chunk)
        return steps, at

    def more(carry: tuple[Array, Decoding, Steps]) -> tuple[Array, Decoding, Steps]:
        i, at, steps = carry
        at, new = one(at, None if given is None else jax.tree.map(lambda x: x[i], given))
        return i + 1, at, jax.tree.map(lambda x, y: x.at[i].set(y), steps, new)

    shape = chunk, at.token.shape[0]
    nothing = Steps(jnp.full(shape, pad_id, jnp.int32), jnp.zeros(shape, jnp.float32))
    if also is not None:
        follows = None if given is None else jax.tree.map(lambda x: x[0], given)
        empty = jax.tree.map(lambda x: jnp.zeros((chunk, *x.shape), x.dtype), jax.eval_shape(one, at, follows)[1].also)
        nothing = dataclasses.replace(nothing, also=empty)
    on = lambda carry: (carry[0] < count) & (carry[1].running.any() if sleeps else True)
    _, at, steps = lax.while_loop(on, more, (jnp.int32(0), at, nothing))
    return steps, at


_STATIC = ("model", "chunk", "sampler", "ends", "pad_id", "sleeps", "waits", "also")


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames=("spent",))
def _decoded(
    model: Model, params: PyTree, kept: PyTree, spent: PyTree, at: Decoding, given: Given, count: Any, **how: Any
) -> tuple[Steps, Decoding]:
    at = dataclasses.replace(at, state=dataclasses.replace(at.state, layers=kept + spent))
    return decode_tokens(model, params, at, given, count, **how)


def decoded(
    model: Model, params: PyTree, at: Decoding, given: Given, count: Array | None, *, in_place: bool = False, **how: Any
) -> tuple[Steps, Decoding]:
    """`decode_tokens`, compiled. It overwrites the cache of `at`, if `in_place`; otherwise `at` stays valid."""
    plan, layers = at.state.plan, at.state.layers
    bare = dataclasses.replace(at, state=dataclasses.replace(at.state, plan=plan.decoding, layers=()))
    steps, after = _decoded(model, params, *(((), layers) if in_place else (layers, ())), bare, given, count, **how)
    return steps, dataclasses.replace(after, state=dataclasses.replace(after.state, plan=plan))
