"""How many tokens: counts that are fixed, a share of the prompt, or a share of the budget.

All of this is numpy on the host. A count is evaluated for every prompt length a plan may meet, and traced code looks
the answer up, so a padded batch gets exactly the integers that its sequences would get alone.
"""

import abc
import dataclasses
import numbers
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.pallas_kernels.pytree import pytree
from kvjax.pallas_kernels.values import MOST_TOKENS, Value, checked, each, number, one_of, settle, tokens

Rounding = Literal["floor", "int", "ceil"]
ROUNDINGS: tuple[Rounding, ...] = ("floor", "int", "ceil")


def whole_tokens(share: float, of: np.ndarray, rounding: Rounding = "floor") -> np.ndarray:
    """`share * of` in whole tokens.

    "floor" adds 1e-9 first, so that 0.1 * 10 tokens is one token whatever binary fractions make of it. "int" truncates
    the raw product like the released code of most papers, where `int(10 * (1 - 0.9))` is 0 (D-45). "ceil" rounds up,
    after subtracting 1e-9.
    """
    if rounding == "ceil":
        return np.ceil(of * share - 1e-9).astype(np.int64)
    return np.floor(of * share + (1e-9 if rounding == "floor" else 0.0)).astype(np.int64)


class Count(Value, abc.ABC):
    """A frozen dataclass that says how many tokens, for every prompt length.

    Fields of policies that take an int, a float or a count hold a count: a number of tokens and a share of the prompt
    are never equal, though 1 == 1.0. `Tokens` and `Ratio` print as the numbers that are written for them.
    """

    @abc.abstractmethod
    def table(self, prompt_length: np.ndarray, budget: np.ndarray) -> np.ndarray:
        """Whole tokens "M" for prompts of lengths "M" whose layers have budgets "M"."""

    def exact(self, prompt_length: np.ndarray, budget: np.ndarray) -> np.ndarray:
        """As `table`, before a share is rounded; whole numbers for counts that are no share of the prompt."""
        return self.table(prompt_length, budget).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Tokens(Count):
    """A fixed number of tokens. More than `MOST_TOKENS` are cut to it: no plan holds as many."""

    n: int

    def __post_init__(self):
        settle(self, n=tokens(why="a number of tokens is whole and cannot be negative"))

    def __repr__(self) -> str:
        return repr(self.n)

    def table(self, prompt_length: np.ndarray, budget: np.ndarray) -> np.ndarray:
        """The count for every prompt length."""
        del budget
        return np.full_like(prompt_length, self.n)


@dataclasses.dataclass(frozen=True)
class Ratio(Count):
    """A share of the prompt's own tokens (padding does not count).

    `1 - share` is what others call the compression ratio.
    """

    share: float
    rounding: Rounding = "floor"

    def __post_init__(self):
        why = "a share of the prompt lies in (0, 1]; write an int for a number of tokens"
        settle(self, share=number("(0, 1]", why))
        one_of("Ratio.rounding", self.rounding, *ROUNDINGS)

    def __repr__(self) -> str:
        if self.rounding == "floor":
            return repr(self.share)
        return f"Ratio(share={self.share!r}, rounding={self.rounding!r})"

    def table(self, prompt_length: np.ndarray, budget: np.ndarray) -> np.ndarray:
        """The count for every prompt length."""
        del budget
        return whole_tokens(self.share, prompt_length, self.rounding)

    def exact(self, prompt_length: np.ndarray, budget: np.ndarray) -> np.ndarray:
        """See `Count`."""
        del budget
        return prompt_length * self.share


@dataclasses.dataclass(frozen=True)
class Share(Count):
    """A share of the budget of the layer."""

    share: float
    rounding: Rounding = "floor"

    def __post_init__(self):
        settle(self, share=number("[0, 1]", "a share of the budget lies in [0, 1]"))
        one_of("Share.rounding", self.rounding, *ROUNDINGS)

    def table(self, prompt_length: np.ndarray, budget: np.ndarray) -> np.ndarray:
        """The count for every prompt length."""
        del prompt_length
        return whole_tokens(self.share, budget, self.rounding)


@dataclasses.dataclass(frozen=True)
class Sum(Count):
    """Several counts together: `Sum((Ratio(1.0), Tokens(64)))` is the whole prompt and 64 tokens beyond it."""

    counts: tuple[Count, ...]

    def __post_init__(self):
        settle(self, counts=each(counted, least=1))

    def table(self, prompt_length: np.ndarray, budget: np.ndarray) -> np.ndarray:
        """The count for every prompt length."""
        return np.sum([c.table(prompt_length, budget) for c in self.counts], axis=0)


@dataclasses.dataclass(frozen=True)
class Fixed(Count):
    """A count for a layer of the given budget, whatever budget it is asked for.

    Attributes:
      count: the count.
      budget: what shares of a budget are shares of.
    """

    count: Count
    budget: Count

    def __post_init__(self):
        settle(self, count=counted, budget=counted)

    def table(self, prompt_length: np.ndarray, budget: np.ndarray) -> np.ndarray:
        """The count for every prompt length."""
        return self.count.table(prompt_length, self.budget.table(prompt_length, budget))


@dataclasses.dataclass(frozen=True)
class Less(Count):
    """A count less another, not below zero."""

    count: Count
    less: Count

    def __post_init__(self):
        settle(self, count=counted, less=counted)

    def table(self, prompt_length: np.ndarray, budget: np.ndarray) -> np.ndarray:
        """The count for every prompt length."""
        return np.maximum(self.count.table(prompt_length, budget) - self.less.table(prompt_length, budget), 0)


@dataclasses.dataclass(frozen=True)
class Times(Count):
    """A multiple of another count, at least as large, rounded down."""

    count: Count
    factor: float

    def __post_init__(self):
        settle(self, count=counted, factor=number("[1, inf)", "a multiple is at least the count itself"))

    def table(self, prompt_length: np.ndarray, budget: np.ndarray) -> np.ndarray:
        """The count for every prompt length."""
        times = np.floor(self.count.table(prompt_length, budget) * self.factor + 1e-9)
        return np.minimum(times, MOST_TOKENS).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class AtMost(Count):
    """The smallest of several counts."""

    counts: tuple[Count, ...]

    def __post_init__(self):
        settle(self, counts=each(counted, least=1))

    def table(self, prompt_length: np.ndarray, budget: np.ndarray) -> np.ndarray:
        """The count for every prompt length."""
        return np.min([c.table(prompt_length, budget) for c in self.counts], axis=0)


@dataclasses.dataclass(frozen=True)
class Above(Count):
    """A count for prompts longer than `min_prompt`; shorter ones are kept whole (NaCl's code: 2048)."""

    count: Count
    min_prompt: int

    def __post_init__(self):
        settle(self, count=counted, min_prompt=tokens())

    def table(self, prompt_length: np.ndarray, budget: np.ndarray) -> np.ndarray:
        """The count for every prompt length."""
        count = self.count.table(prompt_length, budget)
        return np.where(prompt_length <= self.min_prompt, np.maximum(count, prompt_length), count)


def counted(x: int | float | Count) -> Count:
    """An int is a number of tokens, a float a share of the prompt: the rule of fields that hold counts."""
    if isinstance(x, Count):
        return x
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise ValueError("not a number of tokens (int), a share of the prompt (float) or a Count")
    return Tokens(int(x)) if isinstance(x, numbers.Integral) else Ratio(float(x))


def counted_rows(x: int | float | Count) -> Count:
    """The rule of fields that hold numbers of rows: as `counted`, but rows have no budget to be a share of."""
    count = counted(x)
    if _of_unknown_budget(count):
        raise ValueError("rows have no budget to be a share of; use Fixed(Share(...), budget)")
    return count


def _of_unknown_budget(count: Count) -> bool:
    """Whether a count, or one that it is made of, is a share of a budget that is not given with it (`Fixed`)."""
    if isinstance(count, Share):
        return True
    if isinstance(count, Fixed):
        return _of_unknown_budget(count.budget)
    values = [getattr(count, f.name) for f in dataclasses.fields(count)] if dataclasses.is_dataclass(count) else []
    parts = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    return any(_of_unknown_budget(x) for x in parts if isinstance(x, Count))


def as_count(x: int | float | Count, name: str) -> Count:
    """An int is a number of tokens, a float a share of the prompt.

    Raises:
      ValueError: what is none of these.
    """
    return checked(counted, name, x)


def of_budget(x: int | float | Count, budget: Count) -> int | float | Count:
    """The same count, its shares of a budget being of this one, wherever it is evaluated."""
    return x if not isinstance(x, Count) or isinstance(x, Tokens | Ratio) else Fixed(x, budget)


def as_budget(x: int | float | Count) -> Count:
    """The budget of a policy: at least one token.

    Raises:
      ValueError: what is no count, no tokens, or a share of itself.
    """
    count = as_count(x, "budget")
    if _of_unknown_budget(count):
        raise ValueError(f"budget={count!r}: a budget cannot be a share of itself; use Tokens or Ratio")
    if isinstance(count, Tokens) and count.n < 1:
        raise ValueError(f"budget={count.n} tokens: attention needs at least 1 live token; raise the budget")
    return count


def narrow(table: np.ndarray) -> np.ndarray:
    """Counts as the 32 bits of traced code, cut to what no plan holds anyway."""
    return np.minimum(table, MOST_TOKENS).astype(np.int32)


def lookup(table: np.ndarray, prompt_length: Int[Array, "B"]) -> Int[Array, "B"]:
    """`table[prompt_length]`, without a table where every entry is the same."""
    table = narrow(table)
    if (table == table[0]).all():
        return jnp.full(prompt_length.shape, int(table[0]), jnp.int32)
    return jnp.asarray(table).at[prompt_length].get(mode="clip")


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts in one layer at one moment.

    Attributes:
      budget_table: the layer's budget for every prompt length of the plan.
      prompt_length: tokens of every sequence's prompt.
    """

    budget_table: np.ndarray
    prompt_length: Int[Array, "B"]

    def table(self, count: int | float | Count) -> np.ndarray:
        """Whole tokens for every prompt length."""
        return as_count(count, "count").table(np.arange(len(self.budget_table)), self.budget_table)

    def __call__(self, count: int | float | Count) -> Int[Array, "B"]:
        """Whole tokens for every sequence."""
        return lookup(self.table(count), self.prompt_length)

    def most(self, count: int | float | Count) -> int:
        """The largest that any sequence can have (static)."""
        return int(self.table(count).max())


@pytree
class RuleSizes:
    """Whole tokens of every sequence for one rule in one layer, in place of those that were planned.

    They are arrays, so that a compiled program serves all policies that differ in numbers of tokens alone.

    Attributes:
      budget, sinks, recent: what `Tables` has for the sequence's prompt length.
      further: other counts, in the order in which the rule lists them.
    """

    budget: Int[Array, "B"]
    sinks: Int[Array, "B"]
    recent: Int[Array, "B"]
    further: tuple[Int[Array, "B"], ...] = ()


@dataclasses.dataclass(frozen=True)
class GivenCounts(Counts):
    """Counts of which every one is given.

    Attributes:
      budget_table: that of the plan, whose counts are the largest.
      listed, given: which counts, and what they are for every sequence.
    """

    listed: tuple[Count, ...]
    given: tuple[Int[Array, "B"], ...]

    def table(self, count: int | float | Count) -> np.ndarray:
        """There is none.

        Raises:
          ValueError: always.
        """
        raise ValueError(
            f"within another's plan, {as_count(count, 'count')} is an array and has no table; call counts(count), and "
            "name it in the `counts` of the part that resolves it"
        )

    def most(self, count: int | float | Count) -> int:
        """See `Counts`: in the plan."""
        return int(Counts(self.budget_table, self.prompt_length).table(count).max())

    def __call__(self, count: int | float | Count) -> Int[Array, "B"]:
        """See `Counts`.

        Raises:
          ValueError: a count that is not listed.
        """
        wanted = as_count(count, "count")
        if wanted not in self.listed:
            raise ValueError(
                f"{wanted} is not among the counts {self.listed} that the policy's parts list, so that it cannot run "
                "within another's plan; name it in the `counts` of the part that resolves it"
            )
        return self.given[self.listed.index(wanted)]
