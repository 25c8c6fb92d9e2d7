"""How a budget is divided: over the layers of a model, and over the kv heads of a layer."""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.context import Site
from kvjax.pallas_kernels.values import Value, checked, each, flag, number, one_of, settle, whole
from kvjax.sizes.budget import lookup, whole_tokens


def apportion(shares: Any, limit: Any, xp: ModuleType = np, least: Any = 0, first: Any = 0) -> Any:
    """Whole numbers near real `shares` along the last axis, with the same total, none above `limit` or below `least`.

    What a share lacks of `least` is taken from what others have beyond theirs, what exceeds a limit goes to the others,
    both in proportion; then largest remainders are rounded up, of equal ones those that are `first`. A total beyond the
    sum of the limits is cut to it.

    Args:
      shares: "... M" non-negative floats whose sum is a whole number.
      limit: "... M" whole numbers, or broadcastable to it.
      xp: numpy on the host, jax.numpy under jit.
      least: "... M" whole numbers, no larger than `limit`, whose sum is no larger than that of `shares`; or likewise.
      first: "... M" numbers, or likewise: among equal remainders the larger comes first, then the lower index.

    Returns:
      "... M" integers of 32 bits.
    """
    limit = xp.broadcast_to(limit, shares.shape).astype(shares.dtype)
    total = xp.minimum(xp.round(shares.sum(-1, keepdims=True)), limit.sum(-1, keepdims=True))
    least = xp.broadcast_to(least, shares.shape).astype(shares.dtype)
    beyond = xp.maximum(shares - least, 0)
    mass = beyond.sum(-1, keepdims=True)
    raised = least + beyond * ((total - least.sum(-1, keepdims=True)) / xp.where(mass > 0, mass, xp.ones_like(mass)))
    shares = xp.where((shares < least).any(-1, keepdims=True), raised, shares)

    def spread(shares):
        surplus = xp.maximum(shares - limit, 0).sum(-1, keepdims=True)
        shares = xp.minimum(shares, limit)
        room = limit - shares
        weight = xp.where(room > 0, shares, xp.zeros_like(shares))
        weight = xp.where(weight.sum(-1, keepdims=True) > 0, weight, room)
        mass = weight.sum(-1, keepdims=True)
        return shares + surplus * weight / xp.where(mass > 0, mass, xp.ones_like(mass))

    if xp is np:
        for _ in range(shares.shape[-1]):
            if (shares <= limit).all():
                break
            shares = spread(shares)
    else:
        shares = lax.fori_loop(0, shares.shape[-1], lambda _, s: spread(s), shares)
    shares = xp.minimum(shares, limit)

    floors = xp.floor(shares)
    remainder = xp.where(floors < limit, shares - floors, -xp.ones_like(shares))
    order = xp.lexsort((-xp.broadcast_to(first, shares.shape), -remainder), axis=-1)
    rank = xp.argsort(order, axis=-1, stable=True)
    missing = (total - floors.sum(-1, keepdims=True)).astype(rank.dtype)
    return floors.astype(np.int32) + (rank < missing).astype(np.int32)


_apportion_traced = jax.jit(functools.partial(apportion, xp=jnp))


def _held(protected: np.ndarray | int) -> np.ndarray:
    """The least "M 1" that a layer has beside its protected tokens: without any, one token, not to be empty."""
    return (np.reshape(protected, (-1, 1)) == 0).astype(np.int64)


class LayerAllocation(Value, abc.ABC):
    """A frozen dataclass that divides an average budget over layers. None of them is left without a token."""

    @abc.abstractmethod
    def layers(
        self, average: np.ndarray, limit: np.ndarray, num_layers: int, protected: np.ndarray | int = 0
    ) -> np.ndarray:
        """Selectable tokens of every layer.

        Args:
          average: "M" selectable tokens a layer, on average, one entry for every prompt length considered.
          limit: "M" the most that a layer can use: what exists, and never less than `average`.
          num_layers: layers of the model.
          protected: "M" tokens that every layer keeps on top. `average + protected` is the budget; `limit + protected`
            is the prompt's length, or the budget where that is longer.

        Returns:
          "M L" whole numbers.

        Raises:
          ValueError: an allocation for another number of layers.
        """

    def divide(
        self,
        exact: np.ndarray,
        average: np.ndarray,
        limit: np.ndarray,
        num_layers: int,
        protected: np.ndarray | int = 0,
    ) -> np.ndarray:
        """As `layers`, for allocations that look at budgets before they are rounded.

        Args:
          exact: "M" the budgets, protected tokens included, with the fractions that shares of a prompt have.
          average, limit, num_layers, protected: see `layers`.
        """
        del exact
        return self.layers(average, limit, num_layers, protected)


@dataclasses.dataclass(frozen=True)
class UniformLayers(LayerAllocation):
    """Every layer gets the average."""

    def layers(
        self, average: np.ndarray, limit: np.ndarray, num_layers: int, protected: np.ndarray | int = 0
    ) -> np.ndarray:
        """See `LayerAllocation`."""
        del limit, protected
        return np.repeat(average[:, None], num_layers, axis=1)


@dataclasses.dataclass(frozen=True)
class Pyramid(LayerAllocation):
    """Budgets that fall linearly from the first layer to the last (PyramidKV, arXiv 2406.02069).

    With `b` the average, the last layer gets `b / beta`, the first `2 b - b / beta`. No layer gets more than exists;
    what it would have had in excess goes to the others in proportion, and largest remainders make the total exact.
    `FloorPyramid` and `InclusivePyramid` are the progressions of released code.

    Attributes:
      beta: steepness; 1 is uniform.
    """

    beta: float = 20.0

    def __post_init__(self):
        _check_beta(self)

    def layers(
        self, average: np.ndarray, limit: np.ndarray, num_layers: int, protected: np.ndarray | int = 0
    ) -> np.ndarray:
        """See `LayerAllocation`."""
        b = average[:, None].astype(np.float64)
        fraction = np.arange(num_layers) / max(num_layers - 1, 1)
        last = b / self.beta
        first = 2 * b - last
        shares = first - (first - last) * fraction if num_layers > 1 else b
        return apportion(shares, limit[:, None], least=_held(protected))


@dataclasses.dataclass(frozen=True)
class FloorPyramid(LayerAllocation):
    """The integer pyramid of PyramidKV's released code (KVCache-Factory), and of AdaKV's copy of it.

    The last layer gets `b // beta`, the first `2 b - b // beta`. Where so much does not exist, the first gets what
    does and the last the rest of `2 b`. Layers in between are `(first - last) // (L - 1)` apart, and as this step is
    rounded down the model's total *exceeds* `L b`: 4016 for 3840 with 32 layers, b = 120 and beta = 20 (D-41). A model
    of one layer, where the released code divides by zero, gets `b`.

    Attributes:
      beta: steepness.
      uniform_branch: every layer gets `b` where the prompt is shorter than `2 b` (KVCache-Factory). AdaKV has no such
        branch (D-42).
    """

    beta: float = 20.0
    uniform_branch: bool = True

    def __post_init__(self):
        _check_beta(self)
        settle(self, uniform_branch=flag)

    def layers(
        self, average: np.ndarray, limit: np.ndarray, num_layers: int, protected: np.ndarray | int = 0
    ) -> np.ndarray:
        """See `LayerAllocation`."""
        if num_layers == 1:
            return average[:, None]
        first = np.minimum(2 * average - np.floor(average / self.beta).astype(np.int64), limit)
        last = 2 * average - first
        step = (first - last) // (num_layers - 1)
        layers = np.maximum(first[:, None] - step[:, None] * np.arange(num_layers), _held(protected))
        short = limit + protected < 2 * average
        return np.where((short & self.uniform_branch)[:, None], average[:, None], layers)


@dataclasses.dataclass(frozen=True)
class InclusivePyramid(LayerAllocation):
    """The pyramid of kvpress: protected tokens count as part of every layer's share (D-43).

    With `B` the whole budget, the last layer has `B / beta` live tokens and the first `2 B - B / beta`, or, where that
    is more than the prompt without its protected tokens, so many, and the last the rest of `2 B`. Each layer is rounded
    half to even for itself. Every layer has `B`, rounded so, unless `prompt >= first >= last >= protected`.

    Where the budget is a share of the prompt, `B` keeps its fraction, as in kvpress: layers may then have more
    together than the whole number of tokens that the budget is elsewhere. kvpress gives a model of one layer `first`;
    here it has `B`.

    Attributes:
      beta: steepness; 1 is uniform.
    """

    beta: float = 20.0

    def __post_init__(self):
        _check_beta(self)

    def layers(
        self, average: np.ndarray, limit: np.ndarray, num_layers: int, protected: np.ndarray | int = 0
    ) -> np.ndarray:
        """See `LayerAllocation`."""
        return self.divide((average + protected).astype(np.float64), average, limit, num_layers, protected)

    def divide(
        self,
        exact: np.ndarray,
        average: np.ndarray,
        limit: np.ndarray,
        num_layers: int,
        protected: np.ndarray | int = 0,
    ) -> np.ndarray:
        """See `LayerAllocation`."""
        del average
        budget = (protected + exact) - protected  # its last digits too are those of kvpress
        last = budget / self.beta
        first = 2 * budget - last
        first, last = np.minimum(first, limit), np.where(first >= limit, 2 * budget - limit, last)
        slope = (first - last) / max(num_layers - 1, 1)
        layers = first[:, None] - slope[:, None] * np.arange(num_layers)
        falls = (first >= last) & (last >= protected) & (num_layers > 1)
        whole = np.round(np.where(falls[:, None], layers, exact[:, None])).astype(np.int64)
        return np.maximum(whole - np.reshape(protected, (-1, 1)), _held(protected))


def _check_beta(pyramid: "Pyramid | FloorPyramid | InclusivePyramid") -> None:
    settle(pyramid, beta=number("[1, inf)", "beta must be at least 1 (uniform); larger is steeper"))


def _as_weights(name: str, weights: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    """Weights as a tuple of floats, which compares by value and hashes."""
    why = "weights are finite, none is negative, and one at least is positive"
    try:
        found = each(number("[0, inf)", why))(weights)
    except ValueError as error:
        found, why = (), str(error)
    if sum(found) <= 0:
        raise ValueError(f"{name}: {why}; got {weights!r}")
    return found


@dataclasses.dataclass(frozen=True)
class LayerTable(LayerAllocation):
    """Fixed shares of the layers, such as learned or measured ones.

    Layer `l` gets `weights[l] / sum(weights)` of what a uniform budget would give the model. No layer gets more than
    exists; the excess goes to the others in proportion, and largest remainders make the total exact. A layer of which
    nothing is protected has one token at least, unless its weight is 0.

    Attributes:
      weights: one number a layer; only their ratios matter. Any sequence or array, kept as a tuple, so that
        `LayerTable(**json.loads(json.dumps(dataclasses.asdict(table)))) == table`.
    """

    weights: Sequence[float] | np.ndarray

    def __post_init__(self):
        object.__setattr__(self, "weights", _as_weights("LayerTable", self.weights))

    def layers(
        self, average: np.ndarray, limit: np.ndarray, num_layers: int, protected: np.ndarray | int = 0
    ) -> np.ndarray:
        """See `LayerAllocation`."""
        if len(self.weights) != num_layers:
            raise ValueError(
                f"LayerTable has {len(self.weights)} weights, but the model has {num_layers} layers; give one a layer"
            )
        shares = np.asarray(self.weights) * (num_layers / sum(self.weights))
        least = np.where(shares > 0, _held(protected), 0)
        return apportion(average[:, None] * shares, limit[:, None], least=least)


class HeadAllocation(Value, abc.ABC):
    """A frozen dataclass that divides a layer's budget over its kv heads.

    Equal remainders are rounded up in the order of the heads' best scores, so that no division depends on how heads are
    numbered, but where scores are equal too.
    """

    @abc.abstractmethod
    def cap(self, average: np.ndarray, limit: np.ndarray, site: Site, protected: np.ndarray | int = 0) -> np.ndarray:
        """The most selectable tokens that one head can get, for every prompt length (host, static).

        Args:
          average: "M" selectable tokens a head.
          limit: "M" the most that a head can use.
          site: which layer.
          protected: "M" tokens that every head keeps on top.

        Raises:
          ValueError: an allocation for another model.
        """

    def total(self, average: np.ndarray, num_kv_heads: int) -> np.ndarray:
        """The most tokens that all heads together can get (host, static)."""
        return average * num_kv_heads

    @abc.abstractmethod
    def heads(
        self,
        score: Float[Array, "B K S"],
        candidates: Bool[Array, "B K S"],
        average: Int[Array, "B"],
        most: int,
        site: Site,
        protected: Int[Array, "B"] | int = 0,
    ) -> Int[Array, "B K"]:
        """Selectable tokens of every head.

        Args:
          score: larger is more worth keeping.
          candidates: the tokens that compete: live and not protected.
          average: selectable tokens a head.
          most: an upper bound of `average + protected` (static).
          site: which layer.
          protected: tokens that every head keeps on top.
        """

    def lasting(
        self,
        shares: Int[Array, "B K"],
        average: Int[Array, "B"],
        most: int,
        site: Site,
        protected: Int[Array, "B"] | int = 0,
    ) -> Int[Array, "B K"]:
        """What heads keep while decoding of the `shares` that the first eviction gave them: all, but for tables.

        Args:
          shares: selectable tokens of every head, no more than it could hold at that moment.
          average, most, site, protected: as in `heads`.
        """
        del average, most, site, protected
        return shares

    def later(self, average: np.ndarray, limit: np.ndarray, site: Site, protected: np.ndarray | int = 0) -> np.ndarray:
        """The most selectable tokens "M #K" that every head can keep while decoding (host, static).

        Args:
          average, site, protected: as in `cap`.
          limit: "M" the most that a head can hold at the first eviction.
        """
        return self.cap(average, limit, site, protected)[:, None]


@dataclasses.dataclass(frozen=True)
class UniformHeads(HeadAllocation):
    """Every head gets the average."""

    def cap(self, average: np.ndarray, limit: np.ndarray, site: Site, protected: np.ndarray | int = 0) -> np.ndarray:
        """See `HeadAllocation`."""
        del limit, site, protected
        return average

    def heads(
        self,
        score: Float[Array, "B K S"],
        candidates: Bool[Array, "B K S"],
        average: Int[Array, "B"],
        most: int,
        site: Site,
        protected: Int[Array, "B"] | int = 0,
    ) -> Int[Array, "B K"]:
        """See `HeadAllocation`."""
        del candidates, most, site, protected
        return jnp.broadcast_to(average[:, None], score.shape[:2])


@dataclasses.dataclass(frozen=True)
class Adaptive(HeadAllocation):
    """Heads compete for the layer's budget (Ada-KV, arXiv 2407.11550, Algorithm 1).

    The largest `K * average` scores of the layer are found across heads; a head's share is how many of them are its
    own, blended with the uniform share: `alpha * own + (1 - alpha) * average`. A head of which nothing is protected has
    one token at least, unless heads compete without a safeguard (alpha = 1, or 0 of "floor_then_global").

    Attributes:
      alpha: weight of the adaptive part, the paper's alpha. The released code's `floor_alpha` weights the uniform part:
        `alpha = 1 - floor_alpha` (D-20). 0 is uniform.
      max_ratio: no head gets more than `max_ratio` times the average; the surplus goes to the others in proportion.
        Static shapes need some bound. inf leaves it to the number of candidates.
      normalize: every head's scores are first multiplied by the share of their sum that its `average` best hold, as
        KVCache-Factory does by default (D-26). Scores must not be negative.
      safeguard: "blend" as above. "floor_then_global" as in kvpress (D-22): the best `int(alpha * budget)` tokens of
        every head, one at least, are safe, its protected ones among them, and the rest of the budget goes to the best
        of the layer; here alpha = 1 is uniform and 0 is the competition alone, kvpress's default is 0.2.
      rounding: "largest_remainder" keeps the layer's total exact. "half_even" rounds every head for itself, the uniform
        part down before that, as the released code does (D-21): the layer's total then *drifts* by up to K tokens
        either way, and what `max_ratio` cuts is lost. `cap` covers what one head can get; a layer may exceed its
        target.
      skip_layers: layers with a smaller index are uniform (the released code's `skip`).
    """

    alpha: float = 0.5
    max_ratio: float = 4.0
    normalize: bool = False
    safeguard: Literal["blend", "floor_then_global"] = "blend"
    rounding: Literal["largest_remainder", "half_even"] = "largest_remainder"
    skip_layers: int = 0

    def __post_init__(self):
        settle(
            self,
            alpha=number("[0, 1]", "alpha must lie in [0, 1]"),
            max_ratio=number("[1, inf]", "heads cannot all get less than the average (1)"),
            normalize=flag,
            skip_layers=whole(0, why="a number of layers is whole and cannot be negative"),
        )
        one_of("Adaptive.safeguard", self.safeguard, "blend", "floor_then_global")
        one_of("Adaptive.rounding", self.rounding, "largest_remainder", "half_even")

    def _safe(self, budget: np.ndarray) -> np.ndarray:
        """The tokens of every head that are safe before heads compete for the rest."""
        return np.maximum(whole_tokens(self.alpha, budget, "int"), int(self.alpha > 0))

    def _skips(self, site: Site) -> bool:
        return self.skip_layers > 0 and site.layer < self.skip_layers  # layers can share a program if none are asked

    def total(self, average: np.ndarray, num_kv_heads: int) -> np.ndarray:
        """See `HeadAllocation`. Rounding every head for itself gives each up to a token more."""
        drift = num_kv_heads if self.rounding == "half_even" else 0
        return average * num_kv_heads + drift

    def cap(self, average: np.ndarray, limit: np.ndarray, site: Site, protected: np.ndarray | int = 0) -> np.ndarray:
        """See `HeadAllocation`."""
        if self._skips(site):
            return average
        K = site.num_kv_heads
        if self.safeguard == "blend":
            all_in_one = _ceil(average * (1 - self.alpha + self.alpha * K))
        else:
            safe = np.maximum(self._safe(average + protected) - protected, 0)
            all_in_one = K * average - (K - 1) * safe
        cap = np.minimum(all_in_one, _ceil(average * min(self.max_ratio, K)))
        return np.minimum(cap, np.maximum(limit, average))

    def heads(
        self,
        score: Float[Array, "B K S"],
        candidates: Bool[Array, "B K S"],
        average: Int[Array, "B"],
        most: int,
        site: Site,
        protected: Int[Array, "B"] | int = 0,
    ) -> Int[Array, "B K"]:
        """See `HeadAllocation`."""
        B, K, _ = score.shape
        if self._skips(site):
            return jnp.broadcast_to(average[:, None], (B, K))
        numbers = np.arange(most + 1)
        if self.normalize:
            score = _normalized(score, candidates, average, most)
        score = jnp.where(candidates, score, -jnp.inf)
        if self.safeguard == "floor_then_global":
            safe = lookup(self._safe(numbers), average + protected)
            score = _raise_best(score, jnp.maximum(safe - protected, 0), int(self._safe(numbers)[-1]))
        own = _won(score, average, most).astype(jnp.float32)

        mean = average[:, None].astype(jnp.float32)
        most_of_one = lookup(_ceil(numbers * min(self.max_ratio, K)), average)[:, None].astype(jnp.float32)
        shares = own if self.safeguard == "floor_then_global" else self.alpha * own + (1.0 - self.alpha) * mean
        held = self.alpha < 1 if self.safeguard == "blend" else self.alpha > 0
        least = _least(held & candidates.any(-1), average, protected)
        exact = _whole(shares, score, candidates, mean, most_of_one, least)
        if self.rounding == "largest_remainder" or self.safeguard == "floor_then_global":
            return exact
        uniform = lookup(whole_tokens(1 - self.alpha, numbers), average)[:, None].astype(jnp.float32)
        count = candidates.sum(-1).astype(jnp.float32)
        rounded = jnp.maximum(jnp.round(self.alpha * own + uniform), least)
        rounded = jnp.minimum(rounded, jnp.minimum(count, most_of_one))
        return jnp.where(_fits(count, mean), exact, rounded.astype(jnp.int32))


@dataclasses.dataclass(frozen=True)
class HeadTable(HeadAllocation):
    """Fixed shares of the kv heads of every layer, such as learned or measured ones.

    Head `k` of layer `l` gets `weights[l][k] / sum(weights[l])` of the layer's budget. No head gets more than exists of
    a prompt; the excess goes to the others in proportion, until heads have grown. Largest remainders make the total
    exact. A head of which nothing is protected has one token at least, unless its weight is 0. Shares of the layers are
    another allocation: `Evict(..., layers=LayerTable([sum(row) for row in w]), heads=HeadTable(w))` follows a table of
    the whole model.

    Attributes:
      weights: for every layer, one number a kv head; only ratios within a layer matter. Any sequences or array, kept as
        tuples, so that `HeadTable(**json.loads(json.dumps(dataclasses.asdict(table)))) == table`. Policies with
        granularity="query_head" need one number a query head.
    """

    weights: Sequence[Sequence[float]] | np.ndarray

    def __post_init__(self):
        rows = checked(each(lambda row: row, least=1), "weights", self.weights, "HeadTable")
        rows = tuple(_as_weights(f"HeadTable, layer {i}", row) for i, row in enumerate(rows))
        object.__setattr__(self, "weights", rows)

    def _ratios(self, site: Site) -> np.ndarray:
        """What the heads of a layer get, in units of the average."""
        if len(self.weights) != site.num_layers:
            raise ValueError(
                f"HeadTable has weights of {len(self.weights)} layers, but the model has {site.num_layers}; "
                "give one row a layer"
            )
        row = np.asarray(self.weights[site.layer])
        if len(row) != site.num_kv_heads:
            raise ValueError(
                f"HeadTable has {len(row)} weights in layer {site.layer}, which has {site.num_kv_heads} heads; "
                "give one a head"
            )
        return row * (len(row) / row.sum())

    def cap(self, average: np.ndarray, limit: np.ndarray, site: Site, protected: np.ndarray | int = 0) -> np.ndarray:
        """See `HeadAllocation`."""
        del protected
        return np.minimum(_ceil(average * self._ratios(site).max()), np.maximum(limit, average))

    def heads(
        self,
        score: Float[Array, "B K S"],
        candidates: Bool[Array, "B K S"],
        average: Int[Array, "B"],
        most: int,
        site: Site,
        protected: Int[Array, "B"] | int = 0,
    ) -> Int[Array, "B K"]:
        """See `HeadAllocation`."""
        ratios = self._ratios(site)
        least = _least(jnp.asarray(ratios > 0)[None] & candidates.any(-1), average, protected)
        mean = average[:, None].astype(jnp.float32)
        most_of_one = lookup(_ceil(np.arange(most + 1) * ratios.max()), average)[:, None].astype(jnp.float32)
        return _whole(mean * jnp.asarray(ratios, jnp.float32)[None], score, candidates, mean, most_of_one, least)

    def later(self, average: np.ndarray, limit: np.ndarray, site: Site, protected: np.ndarray | int = 0) -> np.ndarray:
        """See `HeadAllocation`: whatever a head held."""
        del limit, protected
        return _ceil(average[:, None] * self._ratios(site))

    def lasting(
        self,
        shares: Int[Array, "B K"],
        average: Int[Array, "B"],
        most: int,
        site: Site,
        protected: Int[Array, "B"] | int = 0,
    ) -> Int[Array, "B K"]:
        """See `HeadAllocation`: those of the table."""
        del shares
        ratios = self._ratios(site)
        mean = average[:, None].astype(jnp.float32)
        exact = mean * jnp.asarray(ratios, jnp.float32)[None]
        limit = jnp.asarray(self.later(np.arange(most + 1), np.zeros(0), site), jnp.float32)[average]
        least = jnp.minimum(_least(jnp.asarray(ratios > 0)[None], average, protected), limit)
        return _apportion_traced(exact + (mean - exact.mean(-1, keepdims=True)), limit, least=least)


def _ceil(x: np.ndarray) -> np.ndarray:
    """Rounded up, but for what binary fractions make of a whole number."""
    return np.ceil(x - 1e-9).astype(np.int64)


def _normalized(
    score: Float[Array, "B K S"], candidates: Bool[Array, "B K S"], average: Int[Array, "B"], most: int
) -> Float[Array, "B K S"]:
    """Scores times the share of a head's sum that its `average` best hold."""
    score = jnp.where(candidates, score, 0.0)
    best, _ = lax.top_k(score, min(most, score.shape[-1]))
    among = jnp.arange(best.shape[-1], dtype=jnp.int32)[None, None] < average[:, None, None]
    mass, total = jnp.where(among, best, 0.0).sum(-1, keepdims=True), score.sum(-1, keepdims=True)
    return score * jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), 1.0)


def _raise_best(score: Float[Array, "B K S"], count: Int[Array, "B"], most: int) -> Float[Array, "B K S"]:
    """Scores whose `count` best of every head (at most `most`) stand above all others."""
    best, index = lax.top_k(score, min(most, score.shape[-1]))
    among = jnp.arange(best.shape[-1], dtype=jnp.int32)[None, None] < count[:, None, None]
    raised = jnp.where(among & (best > -jnp.inf), jnp.inf, best)
    return jnp.put_along_axis(score, index, raised, axis=-1, inplace=False)


def _won(score: Float[Array, "B K S"], average: Int[Array, "B"], most: int) -> Int[Array, "B K"]:
    """How many of a layer's `K * average` best scores belong to each head; -inf does not compete."""
    B, K, S = score.shape
    size = min(K * most, K * S)
    best, index = lax.top_k(score.reshape(B, K * S), size)
    won = (jnp.arange(size, dtype=jnp.int32)[None] < (K * average)[:, None]) & (best > -jnp.inf)
    head = (index // S)[..., None] == jnp.arange(K, dtype=jnp.int32)[None, None]
    return (head & won[..., None]).sum(1, dtype=jnp.int32)


def _fits(count: Float[Array, "B K"], mean: Float[Array, "B 1"]) -> Bool[Array, "B 1"]:
    """Whether the layer's budget holds every candidate."""
    return count.mean(-1, keepdims=True) <= mean


def _least(
    held: Bool[Array, "#B K"], average: Int[Array, "B"], protected: Int[Array, "B"] | int
) -> Float[Array, "B K"]:
    """One token of heads that are not to be empty, where nothing is protected."""
    return (held & ((average > 0) & (protected == 0))[:, None]).astype(jnp.float32)


def _whole(
    shares: Float[Array, "B K"],
    score: Float[Array, "B K S"],
    candidates: Bool[Array, "B K S"],
    mean: Float[Array, "B 1"],
    most_of_one: Float[Array, "B 1"],
    least: Float[Array, "B K"],
) -> Int[Array, "B K"]:
    """Whole shares whose mean is `mean`, none above `most_of_one` or, beyond the mean, above what exists."""
    # Where the budget holds every candidate, nothing is taken from any head, and what is left over is shared.
    count = candidates.sum(-1).astype(jnp.float32)
    shares = jnp.where(_fits(count, mean), count, shares)
    shares = shares + (mean - shares.mean(-1, keepdims=True))
    best = jnp.where(candidates, score, -jnp.inf).max(-1)
    limit = jnp.minimum(jnp.maximum(count, mean), most_of_one)
    return _apportion_traced(shares, limit, least=least, first=best)
