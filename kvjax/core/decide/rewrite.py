"""What kept slots hold after a decision: `rewrite(decision, slots) -> decision` with keys, values, log weights."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from kvjax.core.contract import EMPTY, Part, value
from kvjax.core.scores.attention import Score
from kvjax.core.storage import take


@value
class Reference:
    """What the full cache answers to the prompt's last rows, all tokens visible: queries (scaled) "B K R H", the
    largest logit "B K R", the sum of exponentials beside it "B K R", outputs "B K R H"; rows of padding are 0.
    """

    rows: int = 256

    def __call__(self, inputs):
        kv, q, real = inputs.kv, inputs.q[:, :, -self.rows :], inputs.pos[:, -self.rows :] != EMPTY
        (B, N, R, H), K = q.shape, kv.pos.shape[1]
        q = q * (H**-0.5 if inputs.scale is None else inputs.scale)
        return answers(q.reshape(B, K, -1, H), kv, jnp.tile(real, (1, N // K))[:, None])


def answers(q, kv, real=True):
    """See `Reference`, for rows "B K R H" that are scaled already."""
    x = jnp.where(kv.live[:, :, None], jnp.einsum("bkrh,bksh->bkrs", q, kv.k.astype(jnp.float32)), -jnp.inf)
    most = x.max(-1)
    e = jnp.exp(x - most[..., None])
    mass = e.sum(-1)
    out = jnp.einsum("bkrs,bksh->bkrh", e, kv.v.astype(jnp.float32)) / mass[..., None]
    rows = lambda y: jnp.where(real if y.ndim == 3 else jnp.asarray(real)[..., None], y, 0.0)
    return rows(q), rows(most), rows(mass), rows(out)


class ReferenceAttention(Score):
    """The attention that reference rows pay, all tokens visible: root mean square, mean or largest."""

    rows: Reference = Reference()
    how: Literal["rms", "mean", "max"] = "rms"

    def observe(self, phase):
        return (self.rows,) if phase == "prefill" else ()

    def __call__(self, slots):
        q, most, mass, _ = slots.stats[self.rows]
        x = jnp.exp(jnp.einsum("bkrh,bksh->bkrs", q, slots.kv.k.astype(jnp.float32)) - most[..., None])
        p = jnp.where((mass > 0)[..., None], x / jnp.maximum(mass, 1e-30)[..., None], 0.0)
        return {"rms": lambda: jnp.square(p).sum(2), "mean": lambda: p.sum(2), "max": lambda: p.max(2)}[self.how]()


class Match(Part):
    """Weights and values with which kept keys answer reference rows as the full cache does (arXiv 2602.16284)."""

    rows: Reference = Reference()
    weights: bool = True
    values: bool = True
    bound: float = 3.0
    steps: int = 2
    writes = ("v", "log_weight")

    def observe(self, phase):
        return (self.rows,) if phase == "prefill" else ()

    def __call__(self, decision, slots):
        kv, (q, most, mass, out) = slots.kv, slots.stats[self.rows]
        B, K, S = kv.pos.shape
        index = jnp.argsort(~decision.keep, axis=-1, stable=True)[..., : slots.ctx.capacity]
        live, k = take(decision.keep, index), take(kv.k, index).astype(jnp.float32)
        x = jnp.where(live[:, :, None], jnp.einsum("bkrh,bkth->bkrt", q, k), -jnp.inf)
        beta = jnp.zeros(live.shape)
        if self.weights:
            e = jnp.where((mass > 0)[..., None], jnp.exp(x - most[..., None]), 0.0)
            beta = jnp.log(jax.vmap(jax.vmap(self._fit))(e, mass))
        v = take(kv.v, index).astype(jnp.float32)
        if self.values:
            p = jnp.where((mass > 0)[..., None], jax.nn.softmax(x + beta[:, :, None], axis=-1), 0.0)
            v = jax.vmap(jax.vmap(lambda a, b: jnp.linalg.lstsq(a, b)[0]))(p, out)
        at = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], jnp.where(live, index, S)
        lay = lambda old, new: old.at[at].set(new.astype(old.dtype), mode="drop")
        return dataclasses.replace(decision, v=lay(kv.v, v), log_weight=lay(jnp.zeros((B, K, S)), beta))

    def _fit(self, e, mass):
        clamp = lambda b: jnp.clip(b, jnp.exp(-self.bound), jnp.exp(self.bound))
        b = clamp(jnp.linalg.lstsq(e, mass)[0])
        step = 1 / jnp.maximum(jnp.linalg.norm(e, 2) ** 2, 1e-30)
        for _ in range(self.steps):
            b = clamp(b - step * (e.T @ (e @ b - mass)))
        return b


class Merge(Part):
    """Every evicted value goes into that of the kept token whose key is most alike (kvpress's MergingPress)."""

    threshold: float = 0.0
    fraction: float = 1.0
    writes = ("v",)

    def __call__(self, decision, slots):
        kv, keep = slots.kv, decision.keep
        k = kv.k.astype(jnp.float32)
        k = k / jnp.maximum(jnp.linalg.norm(k, axis=-1, keepdims=True), 1e-8)
        alike = jnp.where(keep[:, :, None], jnp.einsum("bksh,bkth->bkst", k, k), -jnp.inf)
        most, target = alike.max(-1), alike.argmax(-1)
        merges = kv.live & ~keep & (most >= self.threshold)
        if self.fraction < 1:
            among = jnp.where(merges, most, jnp.where(kv.live & ~keep, -jnp.inf, jnp.nan))
            merges &= most >= jnp.nanquantile(among, 1 - self.fraction, axis=-1, keepdims=True)
        v = kv.v.astype(jnp.float32)
        norm = jnp.linalg.norm(v, axis=-1)
        weight = jnp.where(merges, jnp.maximum(most, 0.0) * norm, 0.0)
        weight = weight / (norm + jnp.take_along_axis(norm, target, -1) + 1e-6)
        B, K, S = keep.shape
        at = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], target
        total = jnp.zeros((B, K, S)).at[at].add(weight)[..., None]
        merged = (v + jnp.zeros_like(v).at[at].add(weight[..., None] * v)) / (1 + total)
        return dataclasses.replace(decision, v=jnp.where(keep[..., None], merged, v).astype(kv.v.dtype))
