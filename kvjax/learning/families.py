"""Families of budgets to learn: shares on a simplex, or the free parameters of published allocations.

A family turns a few unconstrained numbers into gates whose total is the budget exactly, differentiably, and afterwards
into a hard policy: `Simplex` into tables, the others into the parameters of an allocation, a protection or a method.

    params = family.init(num_layers, num_kv_heads)
    gates = family.gates(params, view, temperature)  # "B L K S"
    policy = family.harden(params, base, view)

Letters: B prompts, L layers, K kv heads, S slots of the prompt.
"""

import dataclasses
import math
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.budgets import Adaptive, Pyramid, Share
from kvjax.compose.evict import Evict
from kvjax.contract import Positive, Proportion, Value
from kvjax.decide.select import ThenRandom
from kvjax.learning.relax import with_table
from kvjax.learning.soft import Pass, filled, mass_rank, simplex, soft_passes, soft_top_k
from kvjax.pallas_kernels import kinds
from kvjax.pallas_kernels.pytree import pytree
from kvjax.scores.attention import Accumulated
from kvjax.scores.softmax import EntropyScaled

Params = Any


@pytree
class View:
    """Prompts as families see them, after they were read with the full cache.

    Attributes:
      score: what a policy ranks slots by; finite, larger = keep.
      pos: positions.
      live: slots that hold a token.
      safe: those that the policy protects by position, no more than the budget; they are kept, and count against it.
      budget: live tokens a kv head and layer, on average, protected ones included.
      voters: for `EntropyK`, the voting rows of every layer (`Voters` of the package analysis).
      prior: for `EntropyK`, what votes are multiplied by.
      drawn: for `NaclShares`, log-probabilities with Gumbel noise.
    """

    score: Float[Array, "B L K S"]
    pos: Int[Array, "B L K S"]
    live: Bool[Array, "B L K S"]
    safe: Bool[Array, "B L K S"]
    budget: Float[Array, "B"]
    voters: tuple[Any, ...] | None = None
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


class Family(Value):
    """A function from a few learnable numbers to gates."""

    def init(self, num_layers: int, num_kv_heads: int) -> Params:
        """Where learning starts: unconstrained real numbers."""
        raise NotImplementedError

    def gates(self, params: Params, view: View, temperature: float | Float[Array, ""]) -> Float[Array, "B L K S"]:
        """How much of every slot is kept; the sum over layers, heads and slots is `view.total` for every prompt.

        Args:
          params: learned numbers, of the names and shapes of `init`'s.
          view: what is divided.
          temperature: in tokens.
        """
        raise NotImplementedError

    def harden(self, params: Params, policy: Evict, view: View) -> Evict:
        """The hard policy with what was learned.

        Args:
          params: learned numbers, of the names and shapes of `init`'s.
          policy: whose allocation, protection or selection is replaced.
          view: prompts over which shares are averaged where they depend on the prompt.
        """
        raise NotImplementedError

    def describe(self, params: Params) -> dict[str, Any]:
        """The learned numbers under their method's names; fit for JSON."""
        raise NotImplementedError


class Simplex(Family):
    """A share for every head, every layer, or every head of every layer; the total is fixed.

    Attributes:
      over: "heads" divides each layer's budget over its heads, "layers" the model's over its layers, "both" the model's
        over all heads of all layers.
      floor: the least that a head gets beside its protected slots, as a share of the average; for "layers", a layer.
    """

    over: Literal["heads", "layers", "both"] = "both"
    floor: Proportion = 0.0

    def init(self, num_layers: int, num_kv_heads: int) -> Float[Array, "..."]:
        return jnp.zeros((num_layers,) if self.over == "layers" else (num_layers, num_kv_heads), float)

    def budgets(self, params: Params, view: View) -> Float[Array, "B L K"]:
        """Slots of every head beside its protected ones."""
        average, cap = view.selectable, view.candidates.sum(-1)
        B, L, K = cap.shape
        if self.over == "layers":
            average, cap = average.mean(-1), cap.min(-1)
        elif self.over == "both":
            average, cap = average.reshape(B, -1), cap.reshape(B, -1)
        logits = jnp.broadcast_to(params.reshape(average.shape[1:]), average.shape)
        parts = simplex(logits, average.sum(-1), floor=self.floor * average, cap=cap)
        return jnp.broadcast_to(parts.reshape(B, L, -1), (B, L, K))

    def gates(self, params: Params, view: View, temperature: float | Float[Array, ""]) -> Float[Array, "B L K S"]:
        return view.select(self.budgets(params, view), temperature)

    def shares(self, params: Params, view: View) -> np.ndarray:
        """The mean over prompts of the shares of heads (`mean_shares`)."""
        return mean_shares(np.asarray(self.budgets(params, view), np.float64), np.asarray(view.divided))

    def harden(self, params: Params, policy: Evict, view: View) -> Evict:
        return with_table(policy, self.shares(params, view))

    def describe(self, params: Params) -> dict[str, Any]:
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


class PyramidBeta(Family):
    """The steepness of `kvjax.Pyramid` (PyramidKV).

    Attributes:
      start: the first beta; larger than 1, which is uniform.
    """

    start: Annotated[float, kinds.Range(1, above=True)] = 2.0

    def init(self, num_layers: int, num_kv_heads: int) -> Float[Array, ""]:
        return jnp.asarray(math.log(math.expm1(self.start - 1)), float)

    def beta(self, params: Params) -> Float[Array, ""]:
        """The steepness."""
        return 1.0 + jax.nn.softplus(params)

    def gates(self, params: Params, view: View, temperature: float | Float[Array, ""]) -> Float[Array, "B L K S"]:
        average = view.selectable.mean(-1)
        L = average.shape[1]
        last = average / self.beta(params)
        fraction = jnp.arange(L, dtype=average.dtype)[None] / max(L - 1, 1)
        layers = 2 * average - last - 2 * (average - last) * fraction if L > 1 else average
        layers = filled(layers, view.candidates.sum(-1).min(-1))
        return view.select(jnp.broadcast_to(layers[..., None], view.selectable.shape), temperature)

    def harden(self, params: Params, policy: Evict, view: View) -> Evict:
        return dataclasses.replace(policy, layers=Pyramid(float(self.beta(params))))

    def describe(self, params: Params) -> dict[str, float]:
        return {"beta": float(self.beta(params))}


class Fraction(Family):
    """A family of one number between 0 and 1.

    Attributes:
      start: the first one, at neither end.
    """

    start: Annotated[float, kinds.Range(0, 1, above=True, below=True)] = 0.5

    def init(self, num_layers: int, num_kv_heads: int) -> Float[Array, ""]:
        return jnp.asarray(math.log(self.start / (1 - self.start)), float)

    def fraction(self, params: Params) -> Float[Array, ""]:
        """The number."""
        return jax.nn.sigmoid(params)


class Safeguard(Fraction):
    """The weight of what heads win in their layer's competition, `kvjax.Adaptive`'s alpha (Ada-KV).

    The competition is a soft top-k over all heads' scores together.
    """

    def gates(self, params: Params, view: View, temperature: float | Float[Array, ""]) -> Float[Array, "B L K S"]:
        B, L, K, S = view.score.shape
        together = lambda x: x.reshape(B, L, K * S)
        weight = together(view.candidates)
        rank = mass_rank(together(view.score).astype(weight.dtype), together(view.pos), weight)
        total = view.selectable.sum(-1)
        own = soft_top_k(rank, total, temperature=temperature, weight=weight).reshape(B, L, K, S).sum(-1)
        alpha = self.fraction(params)
        budgets = alpha * own + (1.0 - alpha) * view.selectable
        return view.select(filled(budgets, view.candidates.sum(-1)), temperature)

    def harden(self, params: Params, policy: Evict, view: View) -> Evict:
        return dataclasses.replace(policy, heads=Adaptive(float(self.fraction(params))))

    def describe(self, params: Params) -> dict[str, float]:
        return {"alpha": float(self.fraction(params))}


class WindowShare(Fraction):
    """The share of the budget that is the recent window; the rest goes to the best of what is older.

    For policies that protect nothing else.
    """

    def gates(self, params: Params, view: View, temperature: float | Float[Array, ""]) -> Float[Array, "B L K S"]:
        total = jnp.broadcast_to(view.budget[:, None, None], view.score.shape[:3])
        recent = self.fraction(params) * total
        passes = Pass(view.pos.astype(total.dtype), recent), Pass(view.score, total - recent)
        return soft_passes(passes, view.pos, view.live.astype(total.dtype), temperature=temperature)

    def harden(self, params: Params, policy: Evict, view: View) -> Evict:
        return dataclasses.replace(policy, recent=Share(float(self.fraction(params))))

    def describe(self, params: Params) -> dict[str, float]:
        return {"window_share": float(self.fraction(params))}


class NaclShares(Family):
    """NaCl's division of the budget: protected proxies, the best by score, and a random draw of the rest.

    The draw's noise is fixed by the view, so gradients are those of one draw. For `kvjax.methods.nacl` without sinks.

    Attributes:
      start: first shares (protected, best, drawn), positive; only their ratios matter.
    """

    start: tuple[Positive, Positive, Positive] = (1.0, 4.0, 5.0)

    def init(self, num_layers: int, num_kv_heads: int) -> Float[Array, "3"]:
        return jnp.log(jnp.asarray(self.start, float))

    def gates(self, params: Params, view: View, temperature: float | Float[Array, ""]) -> Float[Array, "B L K S"]:
        if view.drawn is None:
            raise ValueError("NaclShares needs View.drawn, the log-probabilities with noise of its random pass")
        protect, best, drawn = jax.nn.softmax(params)
        total = jnp.broadcast_to(view.budget[:, None, None], view.score.shape[:3])
        scores = view.pos.astype(total.dtype), view.score, view.drawn
        passes = tuple(Pass(s, share * total) for s, share in zip(scores, (protect, best, drawn), strict=True))
        return soft_passes(passes, view.pos, view.live.astype(total.dtype), temperature=temperature)

    def harden(self, params: Params, policy: Evict, view: View) -> Evict:
        protect, _, drawn = self._shares(params)
        if not isinstance(policy.select, ThenRandom):
            raise ValueError(f"{policy.select} draws nothing, so it has no random share; start from methods.nacl")
        select = dataclasses.replace(policy.select, random=Share(drawn))
        return dataclasses.replace(policy, select=select, recent=Share(protect))

    def describe(self, params: Params) -> dict[str, float]:
        return dict(zip(("protect", "best", "random"), self._shares(params), strict=True))

    @staticmethod
    def _shares(params: Params) -> list[float]:
        """The three shares; in numpy, as parameters learned in float64 are described without it."""
        logits = np.asarray(params, np.float64)
        weights = np.exp(logits - logits.max())
        return (weights / weights.sum()).tolist()


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

    start: Positive = 64.0
    unit: Positive = 32.0

    def init(self, num_layers: int, num_kv_heads: int) -> Float[Array, ""]:
        return jnp.asarray(math.log(self.start), float)

    def votes(self, params: Params, view: View) -> Float[Array, "B L K S"]:
        """The scores at this k."""
        if view.voters is None or view.prior is None:
            raise ValueError("EntropyK needs View.voters, the rows that vote in every layer, and View.prior")
        votes = []
        for voters in view.voters:
            ratio = (voters.pos + 1).astype(params.dtype) / jnp.exp(params)
            above = ratio > 1
            factor = jnp.where(above, jnp.sqrt(2.0 * jnp.log(jnp.where(above, ratio, 2.0))), 1.0)
            votes.append(voters.votes(factor))
        return jnp.stack(votes, axis=1) * view.prior

    def gates(self, params: Params, view: View, temperature: float | Float[Array, ""]) -> Float[Array, "B L K S"]:
        votes = Pass(self.votes(params, view), view.selectable)
        temperature = temperature / self.unit
        gates = soft_passes((votes,), view.pos, view.candidates, temperature=temperature, by_rank=False)
        return jnp.where(view.safe, 1.0, gates)

    def harden(self, params: Params, policy: Evict, view: View) -> Evict:
        score = policy.score
        if not isinstance(score, Accumulated):
            raise ValueError(f"{score} accumulates no attention under a softmax; start from methods.ahakv")
        softmax = EntropyScaled(max(round(float(jnp.exp(params))), 1))  # a whole number of tokens
        score = dataclasses.replace(score, of=dataclasses.replace(score.of, softmax=softmax))
        return dataclasses.replace(policy, score=score)

    def describe(self, params: Params) -> dict[str, float]:
        return {"k": float(jnp.exp(params))}


kinds.doors(__name__)
