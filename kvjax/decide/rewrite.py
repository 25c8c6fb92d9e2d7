"""New values and weights for the slots that an eviction keeps."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.contract import (
    EMPTY,
    Amount,
    AttentionInputs,
    Cosine,
    Decision,
    Observation,
    Phase,
    Positive,
    Proportion,
    Rewrite,
    Score,
    Size,
    Slots,
    value,
)
from kvjax.decide.linalg import least_squares, of_each, unit
from kvjax.decide.select import best
from kvjax.pallas_kernels.logits import capped
from kvjax.pallas_kernels.pytree import pytree, static
from kvjax.storage import take


@pytree
class Answers:
    """The prompt's last rows, and what the full cache answers them. R counts those of all query heads of a group.

    Attributes:
      q: queries times the model's scale.
      k: every slot's key, as rows read it.
      bias: what is added to the logits of a slot, -inf where the row after the prompt does not read it.
      real: which rows are no padding.
      out: outputs, 0 for padding.
      softcap: the cap on logits (static).
    """

    q: Float[Array, "B K G T H"]
    k: Float[Array, "B K S H"]
    bias: Float[Array, "B K G S"]
    real: Bool[Array, "B T"]
    out: Float[Array, "B K R H"]
    softcap: float | None = static(default=None)

    def weights(self) -> tuple[Float[Array, "B K R S"], Float[Array, "B K R"]]:
        """Exponentials of logits less the row's largest, and their sum; 0 for padding."""
        x = capped(jnp.einsum("bkgth,bksh->bkgts", self.q, self.k.astype(jnp.float32)), self.softcap)
        x = jnp.where(self.real[:, None, None, :, None], x + self.bias[:, :, :, None], -jnp.inf)
        e = jnp.exp(x - jnp.maximum(x.max(-1, keepdims=True), jnp.finfo(jnp.float32).min))
        e = e.reshape(*e.shape[:2], -1, e.shape[-1])
        return e, e.sum(-1)


def shares(e: Float[Array, "B K R C"], mass: Float[Array, "B K R"]) -> Float[Array, "B K R C"]:
    """Numbers as shares of each row's mass, 0 in rows without one."""
    return e / jnp.where(mass > 0, mass, 1.0)[..., None]


@value
class Reference:
    """Observes how the prompt's last rows read the full cache, as if each were the row after the prompt: `Answers`.

    So they read later tokens too, and of a sliding window what that row reads.

    Attributes:
      rows: how many last rows.
    """

    rows: Size = 256

    def __call__(self, inputs: AttentionInputs) -> Answers:
        kv, q, real = inputs.kv, inputs.q[:, :, -self.rows :], inputs.pos[:, -self.rows :] != EMPTY
        (B, N, T, H), (_, K, S) = q.shape, kv.pos.shape
        q = q.astype(jnp.float32).reshape(B, K, -1, T, H) * inputs.logits.factor(H)
        bias = jnp.zeros((B, 1, S)) if inputs.bias is None else inputs.bias.astype(jnp.float32)
        read = kv.live
        if (window := inputs.logits.window) is not None:
            read &= kv.pos > (inputs.ctx.length - window)[:, None, None]
        bias = jnp.where(read[:, :, None], jnp.broadcast_to(bias, (B, N, S)).reshape(B, K, -1, S), -jnp.inf)
        rows = Answers(q, kv.k, bias, real, jnp.zeros(()), inputs.logits.softcap)
        out = jnp.einsum("bkrs,bksh->bkrh", shares(*rows.weights()), kv.v.astype(jnp.float32))
        return dataclasses.replace(rows, out=out)


class ReferenceAttention(Score):
    """The attention that reference rows pay to each token (arXiv 2602.16284).

    Attributes:
      rows: the reference rows.
      how: over rows, the root mean square "rms", the "mean" or the "max". Divisors and roots are left out: they
        change no order.
    """

    rows: Reference = Reference()
    how: Literal["rms", "mean", "max"] = "rms"

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (self.rows,) if phase == "prefill" else ()

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        p = shares(*slots.stats[self.rows].weights())
        if self.how == "max":
            return p.max(2)
        return jnp.square(p).sum(2) if self.how == "rms" else p.sum(2)


class Match(Rewrite):
    """Weights and values with which kept keys answer reference rows as the full cache does (arXiv 2602.16284).

    Both are least squares: weights match each row's sum of exponentials, values then match its output. What rows do not
    determine stays as it is: the change of weights and values is the smallest one, which rounding does not move.

    Attributes:
      rows: the reference rows.
      weights, values: which of them are fitted.
      bound: weights are multiplied by numbers between exp(-bound) and exp(bound).
      steps: steps of projected gradient after the first solution was cut to these bounds.
    """

    rows: Reference = Reference()
    weights: bool = True
    values: bool = True
    bound: Positive = 3.0
    steps: Amount = 2

    writes = "v", "log_weight"

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (self.rows,) if phase == "prefill" else ()

    def __call__(self, decision: Decision, slots: Slots) -> Decision:
        kv, rows = slots.kv, slots.stats[self.rows]
        B, K, S = kv.pos.shape
        index = jnp.argsort(~decision.keep, axis=-1, stable=True)[..., : slots.ctx.capacity]
        live, (e, mass) = take(decision.keep, index), rows.weights()
        e = jnp.where(live[:, :, None], jnp.take_along_axis(e, index[:, :, None], -1), 0.0)
        weight = of_each(self._fit, e, mass) if self.weights else jnp.ones(live.shape)
        v, e = take(kv.v, index).astype(jnp.float32), e * weight[:, :, None]
        if self.values:
            p = shares(e, e.sum(-1))
            v = v + of_each(least_squares, p, jnp.where((mass > 0)[..., None], rows.out - p @ v, 0.0))
        at = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], jnp.where(live, index, S)
        lay = lambda old, new: old.at[at].set(new.astype(old.dtype), mode="drop")
        more = lay(jnp.zeros((B, K, S)), jnp.log(weight))
        return dataclasses.replace(decision, v=lay(kv.v, v), log_weight=more + kv.log_weight)

    def _fit(self, e: Float[Array, "R C"], mass: Float[Array, "R"]) -> Float[Array, "C"]:
        """Factors of the weights of the C kept keys of one head, such that `e @ factors` is near `mass`."""
        clamp = lambda b: jnp.clip(b, jnp.exp(-self.bound), jnp.exp(self.bound))
        b = clamp(1 + least_squares(e, mass - e.sum(-1)))
        step = 1 / jnp.maximum(jnp.linalg.norm(e, 2) ** 2, 1e-30)
        for _ in range(self.steps):
            b = clamp(b - step * (e.T @ (e @ b - mass)))
        return b


class Merge(Rewrite):
    """Each evicted value is added to that of the kept token with the most similar key, as kvpress's MergingPress does.

    A kept value becomes the mean of its own, with weight 1, and the merged ones, with weight
    cosine * |v| / (|v| + |kept v|). After Wan et al., arXiv 2406.13035.

    Attributes:
      threshold: evicted tokens with a smaller cosine to any kept key are dropped.
      fraction: the share of the evicted tokens, the most similar ones, that is merged.
    """

    threshold: Cosine = 0.0
    fraction: Proportion = 1.0

    writes = ("v",)

    def __call__(self, decision: Decision, slots: Slots) -> Decision:
        kv, keep = slots.kv, decision.keep
        k = unit(kv.k.astype(jnp.float32), 1e-8)
        alike = jnp.where(keep[:, :, None], jnp.einsum("bksh,bkth->bkst", k, k), -jnp.inf)
        most, target = alike.max(-1), alike.argmax(-1)
        merges = kv.live & ~keep & (most >= self.threshold)
        if self.fraction < 1:  # those at or above the quantile 1 - fraction, counted: see `select`
            evicted = kv.live & ~keep
            num = 1 + jnp.floor(self.fraction * (evicted.sum(-1) - 1).astype(jnp.float32) + 1e-5).astype(jnp.int32)
            merges &= best(jnp.where(merges, most, -jnp.inf), jnp.where(evicted, kv.pos, EMPTY), num)
        v = kv.v.astype(jnp.float32)
        norm = jnp.linalg.norm(v, axis=-1)
        weight = jnp.where(merges, jnp.maximum(most, 0.0) * norm, 0.0)
        weight = weight / (norm + jnp.take_along_axis(norm, target, -1) + 1e-6)
        B, K, S = keep.shape
        at = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], target
        total = jnp.zeros((B, K, S)).at[at].add(weight)[..., None]
        merged = (v + jnp.zeros_like(v).at[at].add(weight[..., None] * v)) / (1 + total)
        return dataclasses.replace(decision, v=jnp.where(keep[..., None], merged, v).astype(kv.v.dtype))
