"""How the next token is chosen from logits: filters that compose, and what draws from the logits that they leave.

A filter is a frozen dataclass, `(logits, seen) -> logits`; `chain` applies some in turn. Each does what the logits
processor of its name does in transformers, which applies them in the order `RepetitionPenalty`, `Temperature`, `TopK`,
`TopP`, `MinP`. A sampler has a filter and draws one token from what it leaves.

Letters: B batch, V vocab.
"""

import abc
import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.pallas_kernels.values import Value, a, checked, each, number, optional, settle, whole

_TEMPERATURE = number("(0, inf)", "must be positive and finite; use Greedy() for the limit 0")
_TOP_K = whole(1, why="at least one token must remain; use None for all")
_TOP_P = number("(0, 1]", "a probability mass lies in (0, 1]")
_MIN_P = number("[0, 1]", "a share of the largest probability lies in [0, 1]")
_PENALTY = number("(0, inf)", "must be positive and finite; 1 is no penalty")


class Filter(Value, abc.ABC):
    """A frozen dataclass that changes logits before a token is drawn."""

    @property
    def reads_seen(self) -> bool:
        """Whether it must be told which tokens a sequence has seen. Drivers keep such a record only if so."""
        return False

    @abc.abstractmethod
    def __call__(self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None = None) -> Float[Array, "B V"]:
        """Logits to draw from, -inf for tokens that are excluded.

        Args:
          logits: those of the next token.
          seen: which tokens of the vocabulary each sequence has read or drawn, the prompt's among them.
        """


@dataclasses.dataclass(frozen=True)
class Chain(Filter):
    """Filters applied in turn; made by `chain`."""

    filters: tuple[Filter, ...] = ()

    @property
    def reads_seen(self) -> bool:
        """Whether a member does."""
        return any(f.reads_seen for f in self.filters)

    def __call__(self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None = None) -> Float[Array, "B V"]:
        """See `Filter`."""
        for f in self.filters:
            logits = f(logits, seen)
        return logits


def chain(*filters: Filter) -> Filter:
    """Filters applied in turn, from left to right. Associative; the unit is `chain()`, which changes nothing.

    Raises:
      ValueError: a member that is no filter.
    """
    filters = checked(each(a(Filter)), "filters", filters)
    flat = [g for f in filters for g in (f.filters if isinstance(f, Chain) else (f,))]
    return flat[0] if len(flat) == 1 else Chain(tuple(flat))


@dataclasses.dataclass(frozen=True)
class RepetitionPenalty(Filter):
    """Makes tokens that a sequence has seen less likely: positive logits are divided, negative ones multiplied.

    The prompt's tokens count as seen, padding does not (CTRL, arXiv 1909.05858, section 4.1, as transformers has it).

    Attributes:
      penalty: above 1 against repetition, below 1 for it.
    """

    penalty: float

    def __post_init__(self):
        settle(self, penalty=_PENALTY)

    @property
    def reads_seen(self) -> bool:
        """True."""
        return True

    def __call__(self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None = None) -> Float[Array, "B V"]:
        """See `Filter`.

        Raises:
          ValueError: no record of tokens.
        """
        if seen is None:
            raise ValueError(f'{self} needs seen=, a boolean "B V": the tokens that each sequence has read')
        logits = logits.astype(jnp.float32)
        return jnp.where(seen, jnp.where(logits < 0, logits * self.penalty, logits / self.penalty), logits)


@dataclasses.dataclass(frozen=True)
class Temperature(Filter):
    """Divides the logits.

    Attributes:
      temperature: below 1 for likelier tokens, above 1 for more even draws.
    """

    temperature: float

    def __post_init__(self):
        settle(self, temperature=_TEMPERATURE)

    def __call__(self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None = None) -> Float[Array, "B V"]:
        """See `Filter`."""
        del seen
        return logits.astype(jnp.float32) / self.temperature


@dataclasses.dataclass(frozen=True)
class TopK(Filter):
    """Only the k most likely tokens, and those that are as likely as the last of them.

    Attributes:
      k: how many.
    """

    k: int

    def __post_init__(self):
        settle(self, k=_TOP_K)

    def __call__(self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None = None) -> Float[Array, "B V"]:
        """See `Filter`."""
        del seen
        logits = logits.astype(jnp.float32)
        if self.k >= logits.shape[-1]:
            return logits
        kth = jax.lax.top_k(logits, self.k)[0][..., -1:]
        return jnp.where(logits < kth, -jnp.inf, logits)


@dataclasses.dataclass(frozen=True)
class TopP(Filter):
    """Only the smallest set of most likely tokens that holds this much probability; the most likely always stays.

    Attributes:
      p: the probability mass (nucleus sampling, arXiv 1904.09751).
    """

    p: float

    def __post_init__(self):
        settle(self, p=_TOP_P)

    def __call__(self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None = None) -> Float[Array, "B V"]:
        """See `Filter`."""
        del seen
        logits = logits.astype(jnp.float32)
        if self.p == 1:
            return logits
        down = jnp.sort(logits, axis=-1, descending=True)
        p = jax.nn.softmax(down, axis=-1)
        before = jnp.cumsum(p, axis=-1) - p
        last = jnp.where(before < self.p, down, jnp.inf).min(-1, keepdims=True)
        return jnp.where(logits < last, -jnp.inf, logits)


@dataclasses.dataclass(frozen=True)
class MinP(Filter):
    """Only tokens that are at least this share as likely as the most likely one (arXiv 2407.01082).

    Attributes:
      p: the share.
    """

    p: float

    def __post_init__(self):
        settle(self, p=_MIN_P)

    def __call__(self, logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None = None) -> Float[Array, "B V"]:
        """See `Filter`."""
        del seen
        p = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        return jnp.where(p < self.p * p.max(-1, keepdims=True), -jnp.inf, logits.astype(jnp.float32))


class Sampler(Value, abc.ABC):
    """A frozen dataclass that draws one token for every sequence."""

    @property
    def reads_seen(self) -> bool:
        """Whether it is called with `seen` too. Drivers keep such a record only if so."""
        return False

    @property
    def draws(self) -> bool:
        """Whether its tokens depend on the keys. Drivers that are given none refuse such a sampler."""
        return True

    @abc.abstractmethod
    def __call__(
        self, logits: Float[Array, "B V"], keys: Key[Array, "B"], seen: Bool[Array, "B V"] | None = None
    ) -> Int[Array, "B"]:
        """One token id a sequence; `keys` are consumed. `seen` is as in `Filter`, None where nothing asks for it."""


@dataclasses.dataclass(frozen=True)
class _Filtered(Sampler):
    """A sampler that looks at what a filter leaves.

    Attributes:
      filter: what is done to the logits before; nothing by default.
    """

    filter: Filter = Chain()

    def __post_init__(self):
        settle(self, filter=a(Filter))

    @property
    def reads_seen(self) -> bool:
        """Whether the filter does."""
        return self.filter.reads_seen


@dataclasses.dataclass(frozen=True)
class Greedy(_Filtered):
    """The most likely token; the lowest id among equals.

    Attributes:
      filter: what is done to the logits before; nothing by default.
    """

    @property
    def draws(self) -> bool:
        """False."""
        return False

    def __call__(
        self, logits: Float[Array, "B V"], keys: Key[Array, "B"], seen: Bool[Array, "B V"] | None = None
    ) -> Int[Array, "B"]:
        """See `Sampler`."""
        del keys
        return jnp.argmax(self.filter(logits, seen), axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Categorical(_Filtered):
    """Draws from the softmax.

    Attributes:
      filter: what is done to the logits before; nothing by default.
    """

    def __call__(
        self, logits: Float[Array, "B V"], keys: Key[Array, "B"], seen: Bool[Array, "B V"] | None = None
    ) -> Int[Array, "B"]:
        """See `Sampler`."""
        logits = self.filter(logits, seen).astype(jnp.float32)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Sample(Sampler):
    """Draws from the softmax after the usual filters: `Categorical` of their chain, in the order of transformers.

    The draws are those of the keys alone: the same key, the same text. `kvjax.generate(key=jax.random.key(seed))`.

    Attributes:
      temperature: divides the logits (`Temperature`).
      top_k: only the k most likely tokens (`TopK`); None for all.
      top_p: only the smallest set of most likely tokens that holds this much probability (`TopP`); the most likely
        token always stays.
      min_p: only tokens at least this share as likely as the most likely one (`MinP`).
      repetition_penalty: makes tokens that were seen less likely (`RepetitionPenalty`); 1 for none.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        settle(
            self,
            temperature=_TEMPERATURE,
            top_k=optional(_TOP_K),
            top_p=_TOP_P,
            min_p=_MIN_P,
            repetition_penalty=_PENALTY,
        )

    @property
    def filter(self) -> Filter:
        """The chain of filters that the options name."""
        return chain(
            *([] if self.repetition_penalty == 1 else [RepetitionPenalty(self.repetition_penalty)]),
            Temperature(self.temperature),
            *([] if self.top_k is None else [TopK(self.top_k)]),
            *([] if self.top_p == 1 else [TopP(self.top_p)]),
            *([] if self.min_p == 0 else [MinP(self.min_p)]),
        )

    @property
    def reads_seen(self) -> bool:
        """Whether there is a penalty."""
        return self.filter.reads_seen

    def __call__(
        self, logits: Float[Array, "B V"], keys: Key[Array, "B"], seen: Bool[Array, "B V"] | None = None
    ) -> Int[Array, "B"]:
        """See `Sampler`."""
        return Categorical(self.filter)(logits, keys, seen)


def seen_tokens(tokens: Int[Array, "B T"], lengths: Int[Array, "B"], vocab_size: int) -> Bool[Array, "B V"]:
    """Which tokens of the vocabulary are among the last `lengths` of each row; the others are padding."""
    B, T = tokens.shape
    real = jnp.arange(T, dtype=jnp.int32)[None] >= T - lengths[:, None]
    nothing = jnp.zeros((B, vocab_size), bool)
    return nothing.at[jnp.arange(B)[:, None], jnp.where(real, tokens, vocab_size)].set(True, mode="drop")


def with_token(seen: Bool[Array, "B V"], token: Int[Array, "B"], drawn: Bool[Array, "B"]) -> Bool[Array, "B V"]:
    """The record after the tokens of those sequences that have drawn one."""
    B, V = seen.shape
    return seen.at[jnp.arange(B), jnp.where(drawn & (token >= 0), token, V)].set(True, mode="drop")
