"""How the next token is chosen from logits: filters that compose, and samplers that draw from what filters leave.

Filters do what the logits processors of their names do in transformers, which applies them in the order
`RepetitionPenalty`, `Temperature`, `TopK`, `TopP`, `MinP`.

Letters: B batch, T tokens, V vocabulary.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.contract import Positive, Proportion, Size, Value
from kvjax.pallas_kernels.kinds import PositiveProportion
from kvjax.run.state import Prompts

_Logits = Float[Array, "B V"]
_Seen = Bool[Array, "B V"] | None


class Filter(Value):
    """Changes logits before a token is drawn. A subclass declares its fields and `__call__`, no more.

    Attributes:
      reads_seen: whether it must be told which tokens a sequence has read or drawn.
    """

    @property
    def reads_seen(self) -> bool:
        """Whether the filter reads `seen`, False by default."""
        return False

    def __call__(self, logits: _Logits, seen: _Seen = None) -> _Logits:
        """Logits to draw from, -inf for tokens that are excluded.

        Args:
          logits: those of the next token.
          seen: which tokens of the vocabulary each sequence has read or drawn, the prompt's among them.
        """
        raise NotImplementedError(f"{type(self).__name__} has no __call__")


class Chain(Filter):
    """Filters in turn, from left to right; `Chain()` changes nothing.

    Attributes:
      filters: the first one first.
    """

    filters: tuple[Filter, ...] = ()

    @property
    def reads_seen(self) -> bool:
        return any(f.reads_seen for f in self.filters)

    def __call__(self, logits: _Logits, seen: _Seen = None) -> _Logits:
        for f in self.filters:
            logits = f(logits, seen)
        return logits


class RepetitionPenalty(Filter):
    """Makes tokens that a sequence has seen less likely: positive logits are divided, negative ones multiplied.

    The prompt's tokens count as seen, padding does not (CTRL, arXiv 1909.05858, section 4.1).

    Attributes:
      penalty: above 1 against repetition, below 1 for it.
    """

    penalty: Positive

    reads_seen = True

    def __call__(self, logits: _Logits, seen: _Seen = None) -> _Logits:
        if seen is None:
            raise ValueError(f'{self} needs seen=, a boolean "B V": the tokens that each sequence has read')
        logits = logits.astype(jnp.float32)
        return jnp.where(seen, jnp.where(logits < 0, logits * self.penalty, logits / self.penalty), logits)


class Temperature(Filter):
    """Divides the logits.

    Attributes:
      temperature: below 1 for likelier tokens, above 1 for more even draws.
    """

    temperature: Positive

    def __call__(self, logits: _Logits, seen: _Seen = None) -> _Logits:
        return logits.astype(jnp.float32) / self.temperature


class TopK(Filter):
    """Keeps the k most likely tokens, and those that are as likely as the last of them.

    Attributes:
      k: how many.
    """

    k: Size

    def __call__(self, logits: _Logits, seen: _Seen = None) -> _Logits:
        logits = logits.astype(jnp.float32)
        if self.k >= logits.shape[-1]:
            return logits
        kth = jax.lax.top_k(logits, self.k)[0][..., -1:]
        return jnp.where(logits < kth, -jnp.inf, logits)


class TopP(Filter):
    """Keeps the smallest set of most likely tokens that holds this much probability; the most likely always stays.

    Attributes:
      p: the probability mass (nucleus sampling, arXiv 1904.09751).
    """

    p: PositiveProportion

    def __call__(self, logits: _Logits, seen: _Seen = None) -> _Logits:
        logits = logits.astype(jnp.float32)
        if self.p == 1:
            return logits
        down = jnp.sort(logits, axis=-1, descending=True)
        p = jax.nn.softmax(down, axis=-1)
        before = jnp.cumsum(p, axis=-1) - p
        last = jnp.where(before < self.p, down, jnp.inf).min(-1, keepdims=True)
        return jnp.where(logits < last, -jnp.inf, logits)


class MinP(Filter):
    """Keeps tokens that are at least this share as likely as the most likely one (arXiv 2407.01082).

    Attributes:
      p: the share.
    """

    p: PositiveProportion

    def __call__(self, logits: _Logits, seen: _Seen = None) -> _Logits:
        p = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        return jnp.where(p < self.p * p.max(-1, keepdims=True), -jnp.inf, logits.astype(jnp.float32))


class Sampler(Value):
    """Draws one token for every sequence. A subclass declares its fields, and `filter` or `__call__`.

    Attributes:
      draws: whether its tokens depend on the keys; then a request without a key is refused.
      filter: what is done to the logits before; nothing by default.
      reads_seen: whether it is called with `seen`; only then is such a record kept.
    """

    draws: ClassVar[bool] = True

    @property
    def filter(self) -> Filter:
        """No filter."""
        return Chain()

    @property
    def reads_seen(self) -> bool:
        """Whether the filter reads `seen`."""
        return self.filter.reads_seen

    def __call__(self, logits: _Logits, keys: Key[Array, "B"], seen: _Seen = None) -> Int[Array, "B"]:
        """One token id a sequence, by default a draw from the softmax of the filtered logits.

        Args:
          logits: those of the next token.
          keys: one a sequence; they are consumed.
          seen: as in `Filter`.
        """
        logits = self.filter(logits, seen).astype(jnp.float32)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


class Greedy(Sampler):
    """The most likely token; the lowest id among equals.

    Attributes:
      filter: what is done to the logits before; nothing by default.
    """

    draws: ClassVar[bool] = False
    filter: Filter = Chain()

    def __call__(self, logits: _Logits, keys: Key[Array, "B"], seen: _Seen = None) -> Int[Array, "B"]:
        return jnp.argmax(self.filter(logits, seen), axis=-1).astype(jnp.int32)


class Categorical(Sampler):
    """Draws from the softmax.

    Attributes:
      filter: what is done to the logits before; nothing by default.
    """

    filter: Filter = Chain()


class Sample(Sampler):
    """Draws from the softmax after the usual filters, in the order of transformers. The same key, the same text.

    Attributes:
      temperature: divides the logits.
      top_k: only the k most likely tokens; None for all.
      top_p: only the smallest set of most likely tokens that holds this much probability.
      min_p: only tokens at least this share as likely as the most likely one.
      repetition_penalty: makes tokens that were seen less likely; 1 for none.
    """

    temperature: Positive = 1.0
    top_k: Size | None = None
    top_p: PositiveProportion = 1.0
    min_p: Proportion = 0.0
    repetition_penalty: Positive = 1.0

    @property
    def filter(self) -> Filter:
        """The filters that the options name."""
        each = (
            None if self.repetition_penalty == 1 else RepetitionPenalty(self.repetition_penalty),
            Temperature(self.temperature),
            None if self.top_k is None else TopK(self.top_k),
            None if self.top_p == 1 else TopP(self.top_p),
            None if self.min_p == 0 else MinP(self.min_p),
        )
        return Chain(tuple(f for f in each if f is not None))


def seen_tokens(prompts: Prompts, vocab_size: int) -> Bool[Array, "B V"]:
    """Which tokens of the vocabulary each prompt has; padding is none."""
    tokens, lengths = map(jnp.asarray, prompts)
    B, T = tokens.shape
    real = jnp.arange(T, dtype=jnp.int32)[None] >= T - lengths[:, None]
    nothing = jnp.zeros((B, vocab_size), bool)
    return nothing.at[jnp.arange(B)[:, None], jnp.where(real, tokens, vocab_size)].set(True, mode="drop")


def with_token(seen: Bool[Array, "B V"], token: Int[Array, "B"], drawn: Bool[Array, "B"]) -> Bool[Array, "B V"]:
    """Adds tokens to those seen, in the sequences that have drawn one."""
    B, V = seen.shape
    return seen.at[jnp.arange(B), jnp.where(drawn & (token >= 0), token, V)].set(True, mode="drop")
