"""New values and weights for the slots that an eviction keeps."""

import dataclasses
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.contract import (
    EMPTY,
    Amount,
    AttentionInputs,
    Cosine,
    Decision,
    LayerView,
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
from kvjax.decide.linalg import of_each
from kvjax.decide.select import best
from kvjax.storage import take

# Queries (scaled), each row's largest logit, its sum of exponentials relative to that, and its output.
Answers: TypeAlias = tuple[
    Float[Array, "B K R H"], Float[Array, "B K R"], Float[Array, "B K R"], Float[Array, "B K R H"]
]


@value
class Reference:
    """Observes the full cache's outputs for the prompt's last rows, all tokens visible: `Answers`, 0 for padding.

    Attributes:
      rows: how many last rows. R counts those of all query heads of a group: G times as many.
    """

    rows: Size = 256

    def __call__(self, inputs: AttentionInputs) -> Answers:
        kv, q, real = inputs.kv, inputs.q[:, :, -self.rows :], inputs.pos[:, -self.rows :] != EMPTY
        (B, N, _, H), K = q.shape, kv.pos.shape[1]
        q = q * (H**-0.5 if inputs.scale is None else inputs.scale)
        return answers(q.reshape(B, K, -1, H), kv, jnp.tile(real, (1, N // K))[:, None])


def answers(q: Float[Array, "B K R H"], kv: LayerView, real: Bool[Array, "B 1 R"] | bool = True) -> Answers:
    """A layer's outputs for scaled queries, 0 in rows that are not `real`."""
    x = jnp.where(kv.live[:, :, None], jnp.einsum("bkrh,bksh->bkrs", q, kv.k.astype(jnp.float32)), -jnp.inf)
    most = x.max(-1)
    e = jnp.exp(x - most[..., None])
    mass = e.sum(-1)
    out = jnp.einsum("bkrs,bksh->bkrh", e, kv.v.astype(jnp.float32)) / mass[..., None]
    rows = lambda y: jnp.where(real if y.ndim == 3 else jnp.asarray(real)[..., None], y, 0.0)
    return rows(q), rows(most), rows(mass), rows(out)


class ReferenceAttention(Score):
    """The attention that reference rows pay to each token, all tokens visible (arXiv 2602.16284).

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
        q, most, mass, _ = slots.stats[self.rows]
        x = jnp.exp(jnp.einsum("bkrh,bksh->bkrs", q, slots.kv.k.astype(jnp.float32)) - most[..., None])
        p = jnp.where((mass > 0)[..., None], x / jnp.maximum(mass, 1e-30)[..., None], 0.0)
        if self.how == "max":
            return p.max(2)
        return jnp.square(p).sum(2) if self.how == "rms" else p.sum(2)


class Match(Rewrite):
    """Weights and values with which kept keys answer reference rows as the full cache does (arXiv 2602.16284).

    Both are least squares: weights match each row's sum of exponentials, values then match its output.

    Attributes:
      rows: the reference rows.
      weights, values: which of them are fitted.
      bound: weights lie between exp(-bound) and exp(bound).
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
        kv, (q, most, mass, out) = slots.kv, slots.stats[self.rows]
        B, K, S = kv.pos.shape
        index = jnp.argsort(~decision.keep, axis=-1, stable=True)[..., : slots.ctx.capacity]
        live, k = take(decision.keep, index), take(kv.k, index).astype(jnp.float32)
        x = jnp.where(live[:, :, None], jnp.einsum("bkrh,bkth->bkrt", q, k), -jnp.inf)
        beta = jnp.zeros(live.shape)
        if self.weights:
            e = jnp.where((mass > 0)[..., None], jnp.exp(x - most[..., None]), 0.0)
            beta = jnp.log(of_each(self._fit, e, mass))
        v = take(kv.v, index).astype(jnp.float32)
        if self.values:
            p = jnp.where((mass > 0)[..., None], jax.nn.softmax(x + beta[:, :, None], axis=-1), 0.0)
            v = of_each(lambda a, b: jnp.linalg.lstsq(a, b)[0], p, out)
        at = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], jnp.where(live, index, S)
        lay = lambda old, new: old.at[at].set(new.astype(old.dtype), mode="drop")
        return dataclasses.replace(decision, v=lay(kv.v, v), log_weight=lay(jnp.zeros((B, K, S)), beta))

    def _fit(self, e: Float[Array, "R C"], mass: Float[Array, "R"]) -> Float[Array, "C"]:
        """Weights of the C kept keys of one head, such that `e @ weights` is near `mass`."""
        clamp = lambda b: jnp.clip(b, jnp.exp(-self.bound), jnp.exp(self.bound))
        b = clamp(jnp.linalg.lstsq(e, mass)[0])
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
        k = kv.k.astype(jnp.float32)
        k = k / jnp.maximum(jnp.linalg.norm(k, axis=-1, keepdims=True), 1e-8)
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
