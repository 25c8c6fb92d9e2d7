"""How the next token is chosen from logits."""

import abc
import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from pallas_kernels.values import number, optional, settle, whole


class Sampler(abc.ABC):
    """A frozen dataclass that draws one token for every sequence."""

    @abc.abstractmethod
    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, "B"]) -> Int[Array, "B"]:
        """One token id a sequence; `keys` are consumed."""


@dataclasses.dataclass(frozen=True)
class Greedy(Sampler):
    """The most likely token; the lowest id among equals."""

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, "B"]) -> Int[Array, "B"]:
        """See `Sampler`."""
        del keys
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Sample(Sampler):
    """Draws from the softmax, after temperature, then top-k, then top-p (the order of transformers).

    Attributes:
      temperature: divides the logits.
      top_k: only the k most likely tokens; None for all.
      top_p: only the smallest set of most likely tokens that holds this much probability; the most likely token always
        stays.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self):
        settle(
            self,
            temperature=number("(0, inf)", "must be positive and finite; use Greedy() for the limit 0"),
            top_k=optional(whole(1, why="at least one token must remain; use None for all")),
            top_p=number("(0, 1]", "a probability mass lies in (0, 1]"),
        )

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, "B"]) -> Int[Array, "B"]:
        """See `Sampler`."""
        logits = self.filter(logits)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)

    def filter(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """The logits drawn from: divided by the temperature, -inf for excluded tokens."""
        logits = logits.astype(jnp.float32) / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            kth = jax.lax.top_k(logits, self.top_k)[0][..., -1:]
            logits = jnp.where(logits < kth, -jnp.inf, logits)
        if self.top_p < 1:
            down = jnp.sort(logits, axis=-1, descending=True)
            p = jax.nn.softmax(down, axis=-1)
            before = jnp.cumsum(p, axis=-1) - p
            last = jnp.where(before < self.top_p, down, jnp.inf).min(-1, keepdims=True)
            logits = jnp.where(logits < last, -jnp.inf, logits)
        return logits
