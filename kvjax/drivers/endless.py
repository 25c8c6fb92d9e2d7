"""Reading without end: memory and time a token that do not grow with what was read."""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from kvjax.cache.context import row_keys
from kvjax.cache.state import KVState
from kvjax.drivers.interrupts import uninterrupted
from kvjax.drivers.requests import Model, as_scored, check_chunk, check_model, check_positions, check_vocabulary
from kvjax.drivers.steps import decode_step, prefill
from kvjax.pallas_kernels.values import MOST_TOKENS, as_numpy, checked, one_of, whole
from kvjax.plan import CachePlan, ModelConfig, make_plan
from kvjax.policy import Policy, as_policy
from kvjax.sizes.tables import LONGEST

Found = Literal["losses", "logits"]


def plan_endless(
    config: ModelConfig, policy: Policy, *, prompt_len: int, lengths: Sequence[int] | np.ndarray | None = None
) -> CachePlan:
    """A plan for as many tokens as positions count (2^30 - 1), under a policy whose cache does not grow with them.

    Temperatures that end with the last token (Keyformer's, whose `tau` has no `tau_delta`) stay where they begin.

    Args:
      config, policy, prompt_len, lengths: see `kvjax.make_plan`.

    Raises:
      ValueError: a policy whose cache grows while decoding, or which has tables of all positions; what `make_plan`
        refuses.
    """
    make = lambda steps: make_plan(config, policy, prompt_len=prompt_len, max_new_tokens=steps, lengths=lengths)
    if any(spec.finite for spec in make(1).specs):
        raise ValueError(
            f"{policy} has tables with an entry for every position, which cannot be endless; give a number of tokens"
        )
    most = MOST_TOKENS - prompt_len
    half, plan = make(most // 2), make(most)
    for layer, (few, many) in enumerate(zip(half.capacities, plan.capacities, strict=True)):
        if few != many:
            raise ValueError(
                f"{as_policy(policy)} keeps what comes after the prompt: layer {layer} needs {few:,} slots for "
                f"{most // 2:,} tokens, {many:,} for {most:,}; without an end, use a policy that evicts while "
                "decoding, such as kvjax.methods.h2o(512), or give a number of tokens"
            )
    return plan


def check_counted(num_tokens: int) -> None:
    """Raises ValueError for more tokens of a sequence than positions count."""
    if num_tokens > MOST_TOKENS:
        raise ValueError(
            f"{num_tokens:,} tokens of a sequence are more than the {MOST_TOKENS:,} that positions count; begin anew "
            "with the last of them as the prompt"
        )


@functools.partial(jax.jit, static_argnames=("model", "plan"))
def _begin(model, params, tokens, key, *, plan):
    return prefill(model, params, tokens, plan, key=key)


@functools.partial(jax.jit, static_argnames=("model", "found"), donate_argnames=("logits", "state"))
def _several(model, params, tokens, count, logits, state, *, found):
    """Reads the first `count` of the tokens "B n", one decode step each: what was found, logits and state after."""
    B, n = tokens.shape
    wide = (logits.shape[-1],) if found == "logits" else ()

    def step(i, carry):
        out, logits, state = carry
        token = lax.dynamic_index_in_dim(tokens, i, axis=1, keepdims=False)
        own = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
        loss = jax.nn.logsumexp(logits, axis=-1) - own
        logits, state = decode_step(model, params, token, state)
        new = logits if found == "logits" else loss
        return lax.dynamic_update_index_in_dim(out, new, i, axis=1), logits, state

    return lax.fori_loop(0, count, step, (jnp.zeros((B, n, *wide), jnp.float32), logits, state))


class Reader(Iterator[np.ndarray]):
    """What `read` returns: an iterator over chunks that can be left, and gone on with, at any time.

    Ctrl-C takes effect between chunks, or while tokens are waited for; those that have come by then are read next.
    """

    def __init__(self, model, params, tokens, *, policy, prompt_len, chunk, key, found):
        self._model, self._params, self._found, self._chunk = model, params, found, chunk
        self._tokens, self._pending, self._closed, self._lent = iter(tokens), [], False, False
        prompt = self._next_tokens(prompt_len)
        if not prompt.size:
            raise ValueError("there are no tokens to read; give at least one, such as BOS")
        B, T = prompt.shape
        plan = plan_endless(model.config, policy, prompt_len=T, lengths=[T])
        check_positions(model.config, plan, T, 0)
        self._logits, self._state = _begin(model, params, jnp.asarray(prompt), row_keys(key, B), plan=plan)
        if isinstance(self._logits, jax.core.Tracer):
            raise ValueError("a reader reads chunk by chunk outside of jit, but is made inside; use kvjax.feed")
        as_scored(self._state)
        self._pending, self.num_tokens, self._prompt = [], T, T

    @property
    def logits(self) -> Float[Array, "B V"]:
        """Those of the token that follows what was read."""
        return jnp.copy(self._logits)  # the next chunk overwrites them

    @property
    def state(self) -> KVState:
        """The cache so far. It stays valid: a chunk after this copies it, where it would overwrite it otherwise."""
        self._lent = True
        return self._state

    def close(self) -> None:
        """Ends the iteration."""
        self._closed = True

    def _next_tokens(self, most: int) -> Int[np.ndarray, "B n"]:
        """The next tokens, as many as there are up to `most`. They stay pending until they have been read."""
        for token in itertools.islice(self._tokens, most - len(self._pending)):
            self._pending.append(token)
        found = as_numpy("tokens", self._pending, "; give ids, or one id a sequence at every step")
        found = found[:, None] if found.ndim == 1 else found
        if found.size and (found.ndim != 2 or found.dtype.kind not in "iu"):
            raise ValueError(
                f"tokens must be ids, or one id a sequence at every step; got {found.dtype} of shape {found.shape[1:]}"
            )
        check_vocabulary(self._model, found)
        return found.T.astype(np.int32)

    def __next__(self) -> Float[np.ndarray, "B n *V"]:
        tokens = np.zeros((0, 0), np.int32) if self._closed else self._next_tokens(self._chunk)
        if not tokens.size:
            raise StopIteration
        (B, n), there = tokens.shape, len(self._logits)
        if there != B:
            raise ValueError(f"{B} tokens came at once, but {there} sequences are read; give one id for each")
        check_counted(self.num_tokens + n)
        prompt, read = self._prompt, self.num_tokens - self._prompt
        check_positions(self._model.config, self._state.plan, prompt, read + n, seen=read)
        padded = jnp.asarray(np.pad(tokens, ((0, 0), (0, self._chunk - n))))
        with uninterrupted():  # as the old state is gone when the chunk has begun
            if self._lent:
                self._state, self._lent = jax.tree.map(jnp.copy, self._state), False
            read = (self._params, padded, jnp.int32(n), self._logits, self._state)
            found, self._logits, self._state = _several(self._model, *read, found=self._found)
            self._pending, self.num_tokens = [], self.num_tokens + n
            return np.asarray(found)[:, :n]


def read(
    model: Model,
    params: PyTree[Any],
    tokens: Iterable[int] | Iterable[Sequence[int]],
    *,
    policy: Policy,
    prompt_len: int = 256,
    chunk: int = 256,
    key: Array | None = None,
    found: Found = "losses",
) -> Reader:
    """Reads tokens for as long as they come, and yields what the model makes of them, chunk by chunk.

    Memory is that of the plan and one chunk, and time a token does not grow: nothing is kept of what was read but the
    cache. The first tokens are read at once, as a prompt, by the call itself; the others one decode step each, which is
    what `kvjax.feed` does with them, `chunk` of them in one compiled call. Up to a chunk of tokens is taken from the
    iterator before any of it is read.

    Positions count up to 2^30 - 1 tokens a sequence, beyond which the reader refuses to go. Before that, rotary
    embeddings at original positions lose precision: angles are float32, so that a pair of channels that turns by an
    angle w a token is off by about 6e-8 * w * position, 0.06 for the fastest at a million tokens, and neighbours are no
    longer told apart beyond 2^24. Methods that rotate by rank in the cache (`positions="compact"` or "rerotate", as
    `kvjax.methods.streaming_llm`) have none of this. Sums of attention are float32 too: what is added to a sum is lost
    where it is less than 6e-8 of it.

    Args:
      model, params: the model.
      tokens: ids for a batch of one; or, for a batch, one id a sequence at every step.
      policy: what to evict: one whose cache does not grow while decoding.
      prompt_len: how many of the first tokens are the prompt, of which shares are shares; fewer if no more come.
      chunk: tokens of a compiled call.
      key: one PRNG key, or one a sequence.
      found: "losses", of every token but the prompt's: minus the logarithm of its probability, given those before;
        "logits", after every token but the prompt's. Those after the prompt are the reader's `logits` at first.

    Returns:
      A `Reader`. It yields arrays of float32, "B n" or "B n V", of `chunk` tokens each; the last may be of fewer.

    Raises:
      ValueError: a policy whose cache grows; no tokens; ids outside the vocabulary, or of another number of sequences
        than before, when they come.
    """
    check_model(model, params)
    prompt_len, chunk = min(checked(whole(1), "prompt_len", prompt_len), LONGEST + 1), check_chunk(chunk)
    one_of("found", found, "losses", "logits")
    if isinstance(tokens, str) or not isinstance(tokens, Iterable) or getattr(tokens, "ndim", 1) == 0:
        raise ValueError(f"tokens is a {type(tokens).__name__}, not token ids that come one after the other; encode it")
    options = {"policy": policy, "prompt_len": prompt_len, "chunk": chunk, "key": key, "found": found}
    return Reader(model, params, tokens, **options)
