"""What a budget can be learned as: shares on a simplex, or the free parameters of published allocations.

A family turns a few unconstrained numbers into gates whose total is the budget exactly, differentiably, and afterwards
into a hard policy: `Simplex` into tables, the others into the parameters of an allocation, a protection or a method.

    params = family.init(num_layers, num_kv_heads)
    gates = family.gates(params, view, temperature)  # "B L K S"
    policy = family.harden(params, base, view)

Letters: B prompts, L layers, K kv heads, S slots of the prompt.
"""

import abc
import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.analysis.traces import Voters
from kvjax.eviction import Evict
from kvjax.learning.relax import mass_rank, soft_stages, soft_top_k
from kvjax.pallas_kernels.pytree import pytree
from kvjax.pallas_kernels.values import each, number, one_of, settle
from kvjax.scoring.protect import Protect
from kvjax.scoring.scores import Accumulated, ValuePrior
from kvjax.scoring.select import Stage, TopKThenRandom
from kvjax.scoring.stats import EntropyScaled, Observe
from kvjax.sizes.allocation import Adaptive, HeadTable, LayerTable, Pyramid
from kvjax.sizes.budget import Share, Tokens

Params = Any


@pytree
class View:
    """What a family sees of prompts that have been read with the full cache.

    Attributes:
      score: what a policy ranks slots by; finite, larger = keep.
      pos: positions.
      live: slots that hold a token.
      safe: those that the policy protects by position, no more than the budget; they are kept, and count against it.
      budget: live tokens a kv head and layer, on average, protected ones included.
      voters: for `EntropyK`, the voting rows of every layer.
      prior: for `EntropyK`, what votes are multiplied by.
      drawn: for `NaclShares`, log-probabilities with Gumbel noise.
    """

    score: Float[Array, "B L K S"]
    pos: Int[Array, "B L K S"]
    live: Bool[Array, "B L K S"]
    safe: Bool[Array, "B L K S"]
    budget: Float[Array, "B"]
    voters: tuple[Voters, ...] | None = None
    prior: Float[Array, "B L K S"] | None = None
    drawn: Float[Array, "B L K S"] | None = None

    @property
    def candidates(self) -> Float[Array, "B L K S"]:
        """1 for the slots that compete, 0 for all others."""
        return (self.live & ~self.safe).astype(self.budget.dtype)

    @property
    def selectable(self) -> Float[Array, "B L K"]:
        """The average budget less the protected slots."""
        return jnp.maximum(self.budget[:, None, None] - self.safe.sum(-1).astype(self.budget.dtype), 0.0)

    @property
    def total(self) -> Float[Array, "B"]:
        """Tokens that all heads of all layers keep together: the budget of each, as far as there are so many."""
        least, most = (x.sum(-1).astype(self.budget.dtype) for x in (self.safe & self.live, self.live))
        return jnp.clip(self.budget[:, None, None], least, most).sum((1, 2))

    @property
    def divided(self) -> Bool[Array, "B"]:
        """Prompts whose heads compete: of which something stays beside the protected slots, and something goes."""
        kept, there = self.selectable.sum((1, 2)), self.candidates.sum((1, 2, 3))
        return (kept > 0) & (kept < there)

    def select(self, budgets: Float[Array, "B L K"], temperature: float | Float[Array, ""]) -> Float[Array, "B L K S"]:
        """Gates of the protected slots and the best `budgets` others."""
        rank = mass_rank(self.score.astype(budgets.dtype), self.pos, self.candidates)
        gates = soft_top_k(rank, budgets, temperature=temperature, weight=self.candidates)
        return jnp.where(self.safe, 1.0, gates)


class Family(abc.ABC):
    """A frozen dataclass: how gates depend on a few learnable numbers."""

    @abc.abstractmethod
    def init(self, num_layers: int, num_kv_heads: int) -> Params:
        """Where learning starts: unconstrained real numbers."""

    @abc.abstractmethod
    def gates(self, params: Params, view: View, temperature: float | Float[Array, ""]) -> Float[Array, "B L K S"]:
        """How much of every slot is kept; the sum over layers, heads and slots is `view.total` for every prompt.

        Args:
          params: see `init`.
          view: what is divided.
          temperature: in tokens.
        """

    @abc.abstractmethod
    def harden(self, params: Params, policy: Evict, view: View) -> Evict:
        """The hard policy with what was learned.

        Args:
          params: see `init`.
          policy: whose allocation, protection or selection is replaced.
          view: prompts over which shares are averaged where they depend on the prompt.
        """

    @abc.abstractmethod
    def describe(self, params: Params) -> dict[str, Any]:
        """What was learned, in the words of its method; fit for JSON."""


def bounded(
    logits: Float[Array, "*batch M"],
    total: Float[Array, "*batch"],
    *,
    floor: Float[Array, "*batch M"],
    cap: Float[Array, "*batch M"],
) -> Float[Array, "*batch M"]:
    """Parts of a total on a simplex, none below its floor or above its cap; equal logits and bounds get equal parts.

    `floor + (cap - floor) * sigmoid(logits - tau)`, with tau where the sum is the total. Far below the caps this is a
    softmax. A total beyond the caps is cut to them, as floors are; one below the floors is raised to those.
    """
    floor = jnp.minimum(floor, cap)
    room = cap - floor
    return floor + room * soft_top_k(logits, total - floor.sum(-1), temperature=1.0, weight=room)


def filled(shares: Float[Array, "*batch M"], cap: Float[Array, "*batch M"]) -> Float[Array, "*batch M"]:
    """Shares of the same total, none above its cap; the excess goes to the others in proportion, as in `apportion`."""

    def spread(_, shares):
        surplus = jnp.maximum(shares - cap, 0.0).sum(-1, keepdims=True)
        shares = jnp.minimum(shares, cap)
        weight = jnp.where(cap > shares, shares, 0.0)
        mass = weight.sum(-1, keepdims=True)
        return shares + surplus * weight / jnp.where(mass > 0, mass, 1.0)

    return jnp.minimum(lax.fori_loop(0, shares.shape[-1], spread, shares), cap)


@dataclasses.dataclass(frozen=True)
class Simplex(Family):
    """A share for every head, every layer, or every head of every layer; the total is fixed.

    Attributes:
      over: "heads" divides each layer's budget over its heads, "layers" the model's over its layers, "both" the model's
        over all heads of all layers.
      floor: the least that a head gets beside its protected slots, as a share of the average; for "layers", a layer.
    """

    over: Literal["heads", "layers", "both"] = "both"
    floor: float = 0.0

    def __post_init__(self):
        one_of("Simplex.over", self.over, "heads", "layers", "both")
        settle(self, floor=number("[0, 1]", "a share of the average lies in [0, 1]; 1 is uniform"))

    def init(self, num_layers: int, num_kv_heads: int) -> Float[Array, "..."]:
        """See `Family`: uniform."""
        return jnp.zeros((num_layers,) if self.over == "layers" else (num_layers, num_kv_heads), float)

    def budgets(self, params: Params, view: View) -> Float[Array, "B L K"]:
        """Slots of every head beside its protected ones."""
        average = view.selectable
        cap = view.candidates.sum(-1)
        B, L, K = cap.shape
        shape = {"heads": (B, L, K), "layers": (B, L, K), "both": (B, L * K)}[self.over]
        if self.over == "layers":
            average, cap = average.mean(-1), cap.min(-1)
            parts = bounded(
                jnp.broadcast_to(params[None], (B, L)), average.sum(-1), floor=self.floor * average, cap=cap
            )
            return jnp.broadcast_to(parts[..., None], shape)
        average, cap = average.reshape(shape), cap.reshape(shape)
        params = jnp.broadcast_to(params[None], (B, L, K)).reshape(shape)
        return bounded(params, average.sum(-1), floor=self.floor * average, cap=cap).reshape(B, L, K)

    def gates(self, params: Params, view: View, temperature: float | Float[Array, ""]) -> Float[Array, "B L K S"]:
        """See `Family`."""
        return view.select(self.budgets(params, view), temperature)

    def shares(self, params: Params, view: View) -> np.ndarray:
        """See `mean_shares`."""
        return mean_shares(np.asarray(self.budgets(params, view), np.float64), np.asarray(view.divided))

    def harden(self, params: Params, policy: Evict, view: View) -> Evict:
        """See `Family`: `LayerTable` and `HeadTable`."""
        return with_table(policy, self.shares(params, view))

    def describe(self, params: Params) -> dict[str, Any]:
        """See `Family`."""
        return {"over": self.over, "logits": np.asarray(params).tolist()}


def mean_shares(budgets: np.ndarray, divided: np.ndarray) -> np.ndarray:
    """Share "L K" of every head, relative to the average of 1, averaged over prompts.

    Args:
      budgets: slots "B L K" of every head beside its protected ones.
      divided: "B", the prompts that count (`View.divided`); others say nothing of how heads differ. Without any, all
        heads have the same.
    """
    if not divided.any():
        return np.ones(budgets.shape[1:])
    budgets = budgets[divided]
    return (budgets / budgets.mean((1, 2), keepdims=True)).mean(0)


def with_table(policy: Evict, shares: np.ndarray) -> Evict:
    """A policy whose heads get these shares "L K" of what protected tokens leave of the model's budget.

    They are relative to the average, 1 (`mean_shares`). Budgets as `kvjax.learning.relax.with_budgets` takes them are
    tokens, protected ones included: `left / left.mean()` with `left = budgets - protected` are the shares that divide
    the same budget so.

    Raises:
      ValueError: shares that are no table of layers and heads, whose mean is not 1, or a policy whose budget they
        cannot divide, such as the full cache or a chain.
    """
    if not isinstance(policy, Evict):
        raise ValueError(
            f"{policy} has no budget of its own to divide; give a table to an Evict, or to each member of a composition"
        )
    try:
        shares = np.asarray(shares, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"shares={shares!r} are no numbers; give a row a layer, one a head") from None
    if shares.ndim != 2:
        raise ValueError(f"shares have the shape {shares.shape}, which is not 2 axes; give a row a layer, one a head")
    table = HeadTable(shares)
    if abs(shares.mean() - 1) > 1e-3:
        raise ValueError(
            f"shares have a mean of {shares.mean():.6g}, not 1, what the average head gets beside protected tokens; "
            "divide them by their mean, and take protected tokens off budgets before that"
        )
    return dataclasses.replace(policy, layers=LayerTable(shares.sum(1)), heads=table)


@dataclasses.dataclass(frozen=True)
class PyramidBeta(Family):
    """The steepness of `kvjax.Pyramid` (PyramidKV).

    Attributes:
      start: the first beta; must be larger than 1.
    """

    start: float = 2.0

    def __post_init__(self):
        settle(self, start=number("(1, inf)", "beta is larger than 1 (uniform)"))

    def init(self, num_layers: int, num_kv_heads: int) -> Float[Array, ""]:
        """See `Family`."""
        del num_layers, num_kv_heads
        return jnp.asarray(math.log(math.expm1(self.start - 1)), float)

    def beta(self, params: Params) -> Float[Array, ""]:
        """The steepness."""
        return 1.0 + jax.nn.softplus(params)

    def gates(self, params: Params, view: View, temperature: float | Float[Array, ""]) -> Float[Array, "B L K S"]:
        """See `Family`."""
        average = view.selectable.mean(-1)
        L = average.shape[1]
        last = average / self.beta(params)
        fraction = jnp.arange(L, dtype=average.dtype)[None] / max(L - 1, 1)
        layers = 2 * average - last - 2 * (average - last) * fraction if L > 1 else average
        layers = filled(layers, view.candidates.sum(-1).min(-1))
        return view.select(jnp.broadcast_to(layers[..., None], view.selectable.shape), temperature)

    def harden(self, params: Params, policy: Evict, view: View) -> Evict:
        """See `Family`."""
        del view
        return dataclasses.replace(policy, layers=Pyramid(float(self.beta(params))))

    def describe(self, params: Params) -> dict[str, Any]:
        """See `Family`."""
        return {"beta": float(self.beta(params))}


@dataclasses.dataclass(frozen=True)
class Safeguard(Family):
    """The weight of what heads win in their layer's competition, `kvjax.Adaptive`'s alpha (Ada-KV).

    The competition is a soft top-k over all heads' scores together.

    Attributes:
      start: the first alpha, inside (0, 1).
    """

    start: float = 0.5

    def __post_init__(self):
        settle(self, start=number("(0, 1)", "alpha starts inside (0, 1)"))

    def init(self, num_layers: int, num_kv_heads: int) -> Float[Array, ""]:
        """See `Family`."""
        del num_layers, num_kv_heads
        return jnp.asarray(math.log(self.start / (1 - self.start)), float)

    def alpha(self, params: Params) -> Float[Array, ""]:
        """The weight of the competition."""
        return jax.nn.sigmoid(params)

    def gates(self, params: Params, view: View, temperature: float | Float[Array, ""]) -> Float[Array, "B L K S"]:
        """See `Family`."""
        B, L, K, S = view.score.shape
        together = lambda x: x.reshape(B, L, K * S)
        weight = together(view.candidates)
        rank = mass_rank(together(view.score).astype(weight.dtype), together(view.pos), weight)
        total = view.selectable.sum(-1)
        own = soft_top_k(rank, total, temperature=temperature, weight=weight).reshape(B, L, K, S).sum(-1)
        alpha = self.alpha(params)
        budgets = alpha * own + (1.0 - alpha) * view.selectable
        return view.select(filled(budgets, view.candidates.sum(-1)), temperature)

    def harden(self, params: Params, policy: Evict, view: View) -> Evict:
        """See `Family`."""
        del view
        return dataclasses.replace(policy, heads=Adaptive(float(self.alpha(params)), math.inf))

    def describe(self, params: Params) -> dict[str, Any]:
        """See `Family`."""
        return {"alpha": float(self.alpha(params))}


@dataclasses.dataclass(frozen=True)
class WindowShare(Family):
    """The share of the budget that is the recent window; the rest goes to the best of what is older.

    For policies that protect nothing else.

    Attributes:
      start: the first share, inside (0, 1).
    """

    start: float = 0.5

    def __post_init__(self):
        settle(self, start=number("(0, 1)", "the share starts inside (0, 1)"))

    def init(self, num_layers: int, num_kv_heads: int) -> Float[Array, ""]:
        """See `Family`."""
        del num_layers, num_kv_heads
        return jnp.asarray(math.log(self.start / (1 - self.start)), float)

    def share(self, params: Params) -> Float[Array, ""]:
        """The window's share."""
        return jax.nn.sigmoid(params)

    def gates(self, params: Params, view: View, temperature: float | Float[Array, ""]) -> Float[Array, "B L K S"]:
        """See `Family`."""
        total = jnp.broadcast_to(view.budget[:, None, None], view.score.shape[:3])
        recent = self.share(params) * total
        stages = Stage(view.pos.astype(total.dtype), recent), Stage(view.score, total - recent)
        return soft_stages(stages, view.pos, view.live.astype(total.dtype), temperature=temperature)

    def harden(self, params: Params, policy: Evict, view: View) -> Evict:
        """See `Family`."""
        del view
        return dataclasses.replace(policy, protect=Protect(recent=Share(float(self.share(params)))))

    def describe(self, params: Params) -> dict[str, Any]:
        """See `Family`."""
        return {"window_share": float(self.share(params))}


@dataclasses.dataclass(frozen=True)
class NaclShares(Family):
    """NaCl's division of the budget: protected proxies, the best by score, and a random draw of the rest.

    The draw's noise is fixed by the view, so gradients are those of one draw. For `kvjax.methods.nacl` without sinks.

    Attributes:
      start: first shares (protected, best, drawn), positive; only their ratios matter.
    """

    start: tuple[float, float, float] = (1.0, 4.0, 5.0)

    def __post_init__(self):
        settle(self, start=each(number("(0, inf)", "shares start positive"), 3))

    def init(self, num_layers: int, num_kv_heads: int) -> Float[Array, "3"]:
        """See `Family`."""
        del num_layers, num_kv_heads
        return jnp.log(jnp.asarray(self.start, float))

    def gates(self, params: Params, view: View, temperature: float | Float[Array, ""]) -> Float[Array, "B L K S"]:
        """See `Family`."""
        if view.drawn is None:
            raise ValueError("NaclShares needs View.drawn, the log-probabilities with noise of its random stage")
        protect, best, drawn = jax.nn.softmax(params)
        total = jnp.broadcast_to(view.budget[:, None, None], view.score.shape[:3])
        scores = view.pos.astype(total.dtype), view.score, view.drawn
        stages = tuple(Stage(s, share * total) for s, share in zip(scores, (protect, best, drawn), strict=True))
        return soft_stages(stages, view.pos, view.live.astype(total.dtype), temperature=temperature)

    def harden(self, params: Params, policy: Evict, view: View) -> Evict:
        """See `Family`."""
        del view
        protect, _, drawn = self._shares(params)
        if not isinstance(policy.select, TopKThenRandom):
            raise ValueError(f"{policy.select} draws nothing, so it has no random share; start from methods.nacl")
        select = dataclasses.replace(policy.select, random=Share(drawn))
        return dataclasses.replace(policy, select=select, protect=Protect(recent=Share(protect)))

    def describe(self, params: Params) -> dict[str, Any]:
        """See `Family`."""
        return dict(zip(("protect", "best", "random"), self._shares(params), strict=True))

    @staticmethod
    def _shares(params: Params) -> list[float]:
        """The three shares; in numpy, as parameters learned in float64 are described without it."""
        logits = np.asarray(params, np.float64)
        weights = np.exp(logits - logits.max())
        return (weights / weights.sum()).tolist()


@dataclasses.dataclass(frozen=True)
class EntropyK(Family):
    r"""The token count k whose entropy AhaKV's SG-softmax gives to every voting row (arXiv 2506.03762, Eq. 12).

    Votes are $\sum_i \mathrm{softmax}(\lambda_i x_i)$ with $\lambda_i = \sqrt{2 \ln(i / k)}$ on the scaled logits, 1
    where $i \le k$, the mean of a group, times the value prior: so here scores depend on the parameter. They are
    measured in their own deviations, as ranks have no gradient, and the temperature is a share of those: `temperature /
    unit`.

    Attributes:
      start: the first k, in tokens.
      unit: what one token of temperature is in standard deviations of a head's scores, inverse.
    """

    start: float = 64.0
    unit: float = 32.0

    def __post_init__(self):
        positive = number("(0, inf)", "both are positive and finite")
        settle(self, start=positive, unit=positive)

    def init(self, num_layers: int, num_kv_heads: int) -> Float[Array, ""]:
        """See `Family`."""
        del num_layers, num_kv_heads
        return jnp.asarray(math.log(self.start), float)

    def votes(self, params: Params, view: View) -> Float[Array, "B L K S"]:
        """The scores at this k."""
        if view.voters is None or view.prior is None:
            raise ValueError("EntropyK needs View.voters, the rows that vote in every layer, and View.prior")
        votes = []
        for voters in view.voters:
            ratio = (voters.q_pos + 1).astype(params.dtype) / jnp.exp(params)
            above = ratio > 1
            factor = jnp.where(above, jnp.sqrt(2.0 * jnp.log(jnp.where(above, ratio, 2.0))), 1.0)
            votes.append(voters.votes(factor))
        return jnp.stack(votes, axis=1) * view.prior

    def gates(self, params: Params, view: View, temperature: float | Float[Array, ""]) -> Float[Array, "B L K S"]:
        """See `Family`."""
        stage = Stage(self.votes(params, view), view.selectable)
        temperature = temperature / self.unit
        gates = soft_stages((stage,), view.pos, view.candidates, temperature=temperature, scale="score")
        return jnp.where(view.safe, 1.0, gates)

    def harden(self, params: Params, policy: Evict, view: View) -> Evict:
        """See `Family`. k becomes a whole number of tokens."""
        del view
        score = policy.score
        if not isinstance(score, ValuePrior | Accumulated) or not isinstance(score.of, Observe):
            raise ValueError(f"{score} accumulates no attention under a softmax; start from methods.ahakv")
        softmax = EntropyScaled(Tokens(max(round(float(jnp.exp(params))), 1)))
        score = dataclasses.replace(score, of=dataclasses.replace(score.of, softmax=softmax))
        return dataclasses.replace(policy, score=score)

    def describe(self, params: Params) -> dict[str, Any]:
        """See `Family`."""
        return {"k": float(jnp.exp(params))}
