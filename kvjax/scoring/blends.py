"""Scores made of other scores: sums, and what a score is divided or multiplied by."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache.context import Context, Phase, Site
from kvjax.pallas_kernels.values import a, each, number, one_of, settle
from kvjax.scoring.measurements import ProjectionGram
from kvjax.scoring.scores import OfScore, Score
from kvjax.scoring.stats import Measurement, Slots, ordered


@dataclasses.dataclass(frozen=True)
class Blend(Score):
    """A weighted sum of scores.

    Attributes:
      scores: what is summed.
      weights: a factor for each.
    """

    scores: Sequence[Score]
    weights: Sequence[float]

    def __post_init__(self):
        settle(self, scores=each(a(Score), least=1), weights=each(number()))
        if len(self.scores) != len(self.weights):
            raise ValueError(f"Blend has {len(self.scores)} scores and {len(self.weights)} weights; give one a score")

    def check(self, site: Site) -> None:
        """See `Score`."""
        for score in self.scores:
            score.check(site)

    @property
    def decodes(self) -> bool:
        """See `Score`."""
        return all(score.decodes for score in self.scores)

    @property
    def rotated_keys(self) -> bool:
        """See `Score`."""
        return any(score.rotated_keys for score in self.scores)

    @property
    def by_head(self) -> bool:
        """See `Score`."""
        return all(score.by_head for score in self.scores)

    @property
    def apart(self) -> bool:
        """See `Score`."""
        return all(score.apart for score in self.scores)

    @property
    def timed(self) -> bool:
        """See `Observer`."""
        return any(score.timed for score in self.scores)

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Observer`."""
        return ordered(m for score in self.scores for m in score.observe(phase))

    def init(self, site: Site, batch: int) -> tuple[Any, ...]:
        """See `Observer`."""
        return tuple(score.init(site, batch) for score in self.scores)

    def update(self, slots: Slots) -> tuple[Any, ...]:
        """See `Observer`."""
        return tuple(score.update(slots.of(own)) for score, own in zip(self.scores, slots.memory, strict=True))

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        every = zip(self.scores, self.weights, slots.memory, strict=True)
        parts = [weight * score(slots.of(own)).astype(jnp.float32) for score, weight, own in every]
        return sum(parts[1:], start=parts[0])


@dataclasses.dataclass(frozen=True)
class Standardized(OfScore):
    """Another score less its mean over the candidates, over their standard deviation (of a sample).

    Attributes:
      score: the other one.
      over: mean and deviation are those of the whole "layer", so that heads stay comparable, or of each "head".
    """

    over: Literal["layer", "head"] = "layer"

    def __post_init__(self):
        super().__post_init__()
        one_of("Standardized.over", self.over, "layer", "head")

    @property
    def by_head(self) -> bool:
        """See `Score`."""
        return self.over == "head" and self.score.by_head

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        axes = (1, 2) if self.over == "layer" else (2,)
        score, among = self.score(slots).astype(jnp.float32), slots.candidates
        add = lambda x: jnp.where(among, x, 0.0).sum(axes, keepdims=True)
        count = among.sum(axes, keepdims=True, dtype=jnp.int32).astype(jnp.float32)
        mean = add(score) / jnp.maximum(count, 1)
        deviation = jnp.sqrt(add(jnp.square(score - mean)) / jnp.maximum(count - 1, 1))
        return (score - mean) / jnp.maximum(deviation, 1e-6)


@dataclasses.dataclass(frozen=True)
class ValueWeighted(OfScore):
    """Another score times a norm of the token's value.

    Attributes:
      score: the other one.
      norm: "l1" or "l2" of the token's own value; "largest_l1", the largest L1 norm among the candidates of its kv
        head, which orders no tokens of a head but heads among each other.
    """

    norm: Literal["l1", "l2", "largest_l1"] = "l2"

    def __post_init__(self):
        super().__post_init__()
        one_of("ValueWeighted.norm", self.norm, "l1", "l2", "largest_l1")

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        v = slots.kv.v.astype(jnp.float32)
        norm = jnp.sqrt(jnp.square(v).sum(-1)) if self.norm == "l2" else jnp.abs(v).sum(-1)
        if self.norm == "largest_l1":
            norm = jnp.where(slots.candidates, norm, 0.0).max(-1, keepdims=True)
        return self.score(slots).astype(jnp.float32) * norm


@dataclasses.dataclass(frozen=True)
class Softmax(OfScore):
    """The softmax over the candidates of a head of another score, so that heads can be compared by it."""

    def summands(self, ctx: Context) -> int:
        """See `Score`."""
        del ctx
        return 1

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        return jax.nn.softmax(self.score(slots).astype(jnp.float32), axis=-1, where=slots.candidates)


@dataclasses.dataclass(frozen=True)
class RemovalError(OfScore):
    r"""How far a head's output moves if one token goes: what evicting it alone would cost.

    $\frac{p_j}{1 - p_j} \lVert (v_j - \sum_i p_i v_i) W_O\rVert_2$, exact for a row that gives the tokens $p$ (as in
    CAOTE, arXiv 2504.14051, whose norm is without $W_O$). For $W_O W_O^\top$ the mean over a group stands.

    Attributes:
      score: predicts $p$ among the candidates.
      of: the score is "attention", of which $p$ is the share, or its "logarithm", of which $p$ is the softmax.
    """

    of: Literal["attention", "logarithm"] = "attention"

    def __post_init__(self):
        super().__post_init__()
        one_of("RemovalError.of", self.of, "attention", "logarithm")

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Observer`."""
        return ordered((*self.score.observe(phase), ProjectionGram()))

    def summands(self, ctx: Context) -> int:
        """See `Score`."""
        del ctx
        return 1

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        score, among = self.score(slots).astype(jnp.float32), slots.candidates
        if self.of == "logarithm":
            p = jax.nn.softmax(score, axis=-1, where=among)
        else:
            total = jnp.where(among, score, 0.0).sum(-1, keepdims=True)
            p = jnp.where(among, score, 0.0) / jnp.where(total > 0, total, 1.0)
        v = slots.kv.v.astype(jnp.float32)
        apart = v - jnp.einsum("bks,bksh->bkh", p, v)[:, :, None]
        squares = jnp.einsum("bksh,bkhj,bksj->bks", apart, slots.stats[ProjectionGram()], apart)
        return p / jnp.maximum(1 - p, 1e-6) * jnp.sqrt(jnp.maximum(squares, 0.0))
