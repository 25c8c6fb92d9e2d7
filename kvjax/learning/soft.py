"""A top-k with a temperature: gates in [0, 1] whose sum is the budget exactly, with exact gradients."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.budgets import spread
from kvjax.compose.evict import LARGE
from kvjax.pallas_kernels import kinds

_FAR = 1e4  # deviations from the mean: a gate is open or closed there at any temperature of use


def soft_top_k(
    score: Float[Array, "*batch S"],
    budget: Annotated[float, kinds.Kind("a number", kinds.real)] | Float[Array, "*batch"],
    *,
    temperature: float | Float[Array, "..."],
    weight: Float[Array, "*batch S"] | None = None,
) -> Float[Array, "*batch S"]:
    r"""Gates $g_s = \sigma((x_s - \tau) / T)$ with the threshold $\tau$ at which $\sum_s w_s g_s$ is the budget.

    The threshold is found by bisection; a last step along its own derivative takes away what rounding left of the sum,
    which is exact to about 1e-12 of the budget in float64 and 1e-6 in float32. Gradients come from the implicit
    function theorem instead of the iterations: with $d_s = g_s (1 - g_s) / T$, $\partial\tau/\partial x_s = w_s d_s /
    \sum w d$ and $\partial\tau/\partial b = -1 / \sum w d$. So the gradient of a loss with respect to the budget is the
    mean of $\partial \ell/\partial g_s$ over the slots at the threshold, and stays finite as T falls, when it
    is that of the slot that is partly kept, or of the next best where the budget is a whole number.

    Args:
      score: larger = keep; finite where the weight is not zero.
      budget: the sum of the weighted gates. Where it is at least the sum of the weights all gates are 1, where it is
        not positive all are 0, and in both cases its gradient is 0. Where it is not a number, neither are the gates.
      temperature: in units of the score; one number, or one for every row of the batch.
      weight: the cost of a whole slot, 1 if None. A slot of weight 0 does not compete, and its gate is 0.

    Raises:
      ValueError: a temperature that is not positive, where it is known.
    """
    check_temperature(temperature)
    weight = jnp.ones_like(score) if weight is None else weight
    whole = lambda x: jnp.broadcast_to(jnp.asarray(x, score.dtype), score.shape[:-1])
    return _compiled(score, whole(budget), whole(temperature), weight)


def check_temperature(temperature: object) -> None:
    """Refuses known temperatures that are not positive and finite."""
    if isinstance(temperature, jax.core.Tracer):
        return
    known = np.asarray(temperature)
    if known.dtype.kind not in "iuf" or not np.all((known > 0) & np.isfinite(known)):
        raise ValueError(f"temperature={temperature} must be positive and finite; the hard policy is the limit at 0")


@jax.custom_vjp
def _soft_top_k(score: Array, budget: Array, temperature: Array, weight: Array) -> Array:
    return _solve(score, budget, temperature, weight)[0]


def _solve(score: Array, budget: Array, temperature: Array, weight: Array) -> tuple[Array, Array]:
    """The gates, and the scores' distances to the threshold in units of the temperature."""
    competes = weight > 0
    total = weight.sum(-1)
    inside = (budget > 0) & (budget < total)
    b = jnp.where(inside, budget, total / 2)
    x = jnp.where(competes, score, 0.0) / temperature[..., None]
    margin = jnp.log(b) - jnp.log(jnp.where(inside, total - b, b))
    margin = jnp.where(total > 0, margin, 0.0)
    low = jnp.where(competes, x, jnp.inf).min(-1) - margin  # here all gates are at least b / total
    high = jnp.where(competes, x, -jnp.inf).max(-1) - margin  # and here at most
    some = jnp.isfinite(low)
    low, high = jnp.where(some, low, 0.0), jnp.where(some, high, 0.0)

    def halve(_: object, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) / 2
        above = (weight * jax.nn.sigmoid(x - middle[..., None])).sum(-1) > b
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    steps = jnp.finfo(score.dtype).nmant + 12
    low, high = lax.fori_loop(0, steps, halve, (low, high))
    z = x - (low + (high - low) / 2)[..., None]
    gate = jnp.where(competes, jax.nn.sigmoid(z), 0.0)
    for _ in range(2):
        left = _left(b, weight * gate)
        gate = jnp.clip(gate + left[..., None] * _at_threshold(z, weight), 0.0, 1.0)
    outside = jnp.where(budget >= total, 1.0, jnp.where(jnp.isnan(budget), jnp.nan, 0.0))[..., None]
    gate = jnp.where(inside[..., None], gate, jnp.where(competes, outside, 0.0))
    return gate, z


def _left(budget: Array, parts: Array) -> Array:
    """`budget - parts.sum(-1)`, without the rounding of a long sum.

    Multiples of 2^-10 add up exactly as long as 24 (or 53) bits hold their sum; the rest is tiny.
    """
    coarse = jnp.round(parts * 1024.0) / 1024.0
    return (budget - coarse.sum(-1)) - (parts - coarse).sum(-1)


def _at_threshold(z: Array, weight: Array) -> Array:
    """How the gates share one more unit of budget: `d / sum(w d)`, which does not underflow far from the threshold."""
    log_d = jax.nn.log_sigmoid(z) + jax.nn.log_sigmoid(-z)
    top = jnp.where(weight > 0, log_d, -jnp.inf).max(-1, keepdims=True)
    d = jnp.where(weight > 0, jnp.exp(log_d - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    mass = (weight * d).sum(-1, keepdims=True)
    return d / jnp.where(mass > 0, mass, 1.0)


def _forward(score: Array, budget: Array, temperature: Array, weight: Array) -> tuple[Array, tuple[Array, ...]]:
    gate, z = _solve(score, budget, temperature, weight)
    return gate, (gate, z, budget, temperature, weight)


def _backward(residuals: tuple[Array, ...], cotangent: Array) -> tuple[Array, ...]:
    gate, z, budget, temperature, weight = residuals
    inside = ((budget > 0) & (budget < weight.sum(-1)))[..., None]
    share = jnp.where(inside, _at_threshold(z, weight), 0.0)
    d = jnp.where(inside & (weight > 0), jax.nn.sigmoid(z) * jax.nn.sigmoid(-z), 0.0) / temperature[..., None]
    of_budget = (cotangent * share).sum(-1)
    of_score = d * (cotangent - weight * of_budget[..., None])
    of_temperature = -(of_score * jnp.where(weight > 0, z, 0.0)).sum(-1)
    return of_score, of_budget, of_temperature, -gate * of_budget[..., None]


_soft_top_k.defvjp(_forward, _backward)
_compiled = jax.jit(_soft_top_k)  # called eagerly, its loop would be compiled at every call


class Pass(NamedTuple):
    """One pass of top-k over the slots that earlier passes left.

    Attributes:
      score: larger = keep.
      count: how many are taken.
    """

    score: Float[Array, "*heads S"]
    count: Float[Array, "*heads"]


def soft_passes(
    passes: tuple[Pass, ...],
    pos: Int[Array, "*heads S"],
    weight: Float[Array, "*heads S"],
    *,
    temperature: float | Float[Array, "..."],
    by_rank: bool = True,
) -> Float[Array, "*heads S"]:
    """Passes of soft top-k, each over what the earlier ones left; the gates add up to the sum of the counts.

    A recent window and the best of the rest, NaCl's draw of the rest of the budget, a second stage by another score:
    all of them are such passes, so their shares of the budget have gradients.

    Args:
      passes: scores and counts.
      pos: positions; of equal scores, the newer stays.
      weight: how much of every slot there is: 0 for dead ones.
      temperature: in tokens, if `by_rank`; otherwise in standard deviations of a head's scores.
      by_rank: whether slots are told apart by their ranks, which have no gradient with respect to scores.
    """
    gate, left = jnp.zeros_like(weight), weight
    for score, count in passes:
        score = score.astype(weight.dtype)
        score = mass_rank(score, pos, left) if by_rank else standardised(score, left)
        taken = left * soft_top_k(score, count.astype(weight.dtype), temperature=temperature, weight=left)
        gate, left = gate + taken, left - taken
    return gate


def mass_rank(
    score: Float[Array, "*heads S"], pos: Int[Array, "*heads S"], weight: Float[Array, "*heads S"]
) -> Float[Array, "*heads S"]:
    """Minus the weight of everything better than a slot and half its own: minus its rank where weights are 1.

    Of equal scores the newer is better. Slots without weight are behind all others.
    """
    score = jnp.where(weight > 0, score, -jnp.inf)
    by_age = jnp.argsort(-pos, axis=-1, stable=True)
    order = jnp.argsort(-jnp.take_along_axis(lax.stop_gradient(score), by_age, axis=-1), axis=-1, stable=True)
    order = jnp.take_along_axis(by_age, order, axis=-1)
    mass = jnp.take_along_axis(weight, order, axis=-1)
    behind = mass / 2 - jnp.cumsum(mass, axis=-1)
    return jnp.take_along_axis(behind, jnp.argsort(order, axis=-1), axis=-1)


def standardised(score: Float[Array, "*batch S"], weight: Float[Array, "*batch S"]) -> Float[Array, "*batch S"]:
    """Scores with mean 0 and deviation 1 over the slots that have weight; infinite ones are far beyond the others."""
    infinite = jnp.abs(score) >= LARGE
    counts = ((weight > 0) & ~infinite).astype(score.dtype)
    far = jnp.where(infinite & (weight > 0), jnp.sign(score) * _FAR, 0.0)
    score = jnp.where(counts > 0, score, 0.0)
    total = jnp.maximum(counts.sum(-1, keepdims=True), 1.0)
    centred = (score - score.sum(-1, keepdims=True) / total) * counts
    variance = jnp.square(centred).sum(-1, keepdims=True) / total
    varies = variance > 0
    return centred * jnp.where(varies, lax.rsqrt(jnp.where(varies, variance, 1.0)), 0.0) + far


def simplex(
    logits: Float[Array, "*batch M"],
    total: Float[Array, "*batch"],
    *,
    floor: Float[Array, "*batch M"],
    cap: Float[Array, "*batch M"],
) -> Float[Array, "*batch M"]:
    """Parts of a total, none below its floor or above its cap; equal logits and bounds get equal parts.

    `floor + (cap - floor) * sigmoid(logits - tau)`, with tau where the sum is the total. Far below the caps this is a
    softmax. A total beyond the caps is cut to them, as floors are; one below the floors is raised to those.
    """
    floor = jnp.minimum(floor, cap)
    room = cap - floor
    return floor + room * soft_top_k(logits, total - floor.sum(-1), temperature=1.0, weight=room)


def filled(shares: Float[Array, "*batch M"], cap: Float[Array, "*batch M"]) -> Float[Array, "*batch M"]:
    """Shares of the same total, none above its cap; the excess goes to the others in proportion, as in `apportion`."""
    return jnp.minimum(lax.fori_loop(0, shares.shape[-1], lambda _, x: spread(x, cap, jnp), shares), cap)


kinds.doors(__name__, "soft_top_k", "soft_passes", "mass_rank", "standardised", "simplex", "filled")
