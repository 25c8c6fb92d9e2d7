"""Scores that look at keys, values and hidden states, or at a model of the queries to come."""

from typing import Any

import jax
import jax.numpy as jnp

from kvjax.core.contract import EMPTY, PerSlot, data
from kvjax.core.observe import ChunkAttention, FutureQueries, Hidden, UnrotatedKeys
from kvjax.core.scores.attention import Score
from kvjax.core.storage import in_order
from kvjax.pallas_kernels import Columns, attention


def unit(x, least=1e-12):
    """Vectors of length 1."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), least)


class KeyNorm(Score):
    """Minus a key's norm (Knorm)."""

    def __call__(self, slots):
        return -jnp.linalg.norm(slots.kv.k.astype(jnp.float32), axis=-1)


class KeyDifference(Score):
    """Minus the cosine to the mean unit key (KeyDiff)."""

    def __call__(self, slots):
        kv = slots.kv
        k = jnp.where(kv.live[..., None], unit(kv.k.astype(jnp.float32)), 0.0)
        anchor = unit(k.sum(2) / jnp.maximum(kv.num_live, 1)[..., None])
        return -jnp.einsum("bksh,bkh->bks", k, anchor)


class KeyDirections(Score):
    """Keys along a direction of each layer and head (Q-Filters). `table` "L K H" is data: `hparams` takes a layer's."""

    table: Any = data()

    def hparams(self, info, lengths, budget):
        return jnp.repeat(jnp.asarray(self.table.array[info.layer])[None], len(lengths), 0)

    def __call__(self, slots):
        return -jnp.einsum("bkh,bksh->bks", slots.hparams, slots.kv.k.astype(jnp.float32))


class Table:
    """An array that compares by identity, so that a policy that holds it can be hashed."""

    def __init__(self, array):
        self.array = array


class LagRelative(Score):
    """How far a token stands out from the next partition of the text (LagKV)."""

    lag: int = 128
    sinks: int = 4

    def __call__(self, slots):
        kv, sinks = slots.kv, self.sinks
        (B, K, S), lag = kv.pos.shape, min(self.lag, kv.pos.shape[2] + 1)
        order, rank, live = in_order(kv.pos), jnp.arange(S)[None, None], kv.num_live[..., None]
        num = max((S - sinks) // lag, 0)
        score = jnp.ones((B, K, S), jnp.float32)
        if num > 1:
            own = (self._parts(kv.k, order, num, lag) + self._parts(kv.v, order, num, lag)) / 2
            own = jnp.argsort(jnp.argsort(own, axis=-1), axis=-1) / lag
            score = score.at[..., sinks : sinks + (num - 1) * lag].set(own.reshape(B, K, -1))
        score = jnp.where(rank >= sinks + ((live - sinks) // lag - 1) * lag, 1.0, score)
        ramp = jnp.where(rank < sinks, 1.0, rank / jnp.maximum(live, 1))
        score = jnp.where(live < sinks + 2 * lag, ramp, score).astype(jnp.float32)
        return jnp.put_along_axis(jnp.zeros_like(score), order, score, -1, inplace=False)

    def _parts(self, x, order, num, lag):
        index = order[..., self.sinks : self.sinks + num * lag, None]
        x = jnp.take_along_axis(x.astype(jnp.float32), index, 2)
        x = x.reshape(*x.shape[:2], num, lag, -1)
        low, high = x.min(3, keepdims=True), x.max(3, keepdims=True)
        relative = (x[:, :, :-1] - low[:, :, 1:]) / jnp.maximum(high - low, 1e-12)[:, :, 1:]
        return jax.nn.softmax(jnp.std(relative, axis=-1, ddof=1), axis=-1)


class SquaredNorms(Score):
    """Squared norms of keys and values as shares of their partition's, multiplied (CurDKV)."""

    partition: int = 16

    def __call__(self, slots):
        kv, order = slots.kv, in_order(slots.kv.pos)
        S = kv.pos.shape[2]
        size = min(self.partition, S)

        def shares(x):
            squares = jnp.where(kv.live, jnp.square(x.astype(jnp.float32)).sum(-1), 0.0)
            x = jnp.pad(jnp.take_along_axis(squares, order, -1), ((0, 0), (0, 0), (0, -S % size)))
            x = x.reshape(*x.shape[:2], -1, size)
            total = x.sum(-1, keepdims=True)
            x = (x / jnp.where(total > 0, total, 1.0)).reshape(*squares.shape[:2], -1)[..., :S]
            return jnp.put_along_axis(squares, order, x, -1, inplace=False)

        return shares(kv.k) * shares(kv.v)


class Expected(Score):
    """Attention that queries to come are expected to pay, times the value's norm (ExpectedAttention)."""

    queries: FutureQueries

    def observe(self, phase):
        return (self.queries,) if phase == "prefill" else ()

    def __call__(self, slots):
        kv, (mean, cov) = slots.kv, slots.stats[self.queries]
        (B, N, H), K, k = mean.shape, kv.pos.shape[1], kv.k.astype(jnp.float32)
        squares = jnp.einsum("bksh,bkghj,bksj->bkgs", k, cov.reshape(B, K, N // K, H, H), k)
        bias, row = squares.reshape(B, N, -1) / (2 * H), jnp.zeros((B, 1), jnp.int32)
        places = jnp.where(slots.candidates, 0, EMPTY)
        (p,) = attention(mean[:, :, None], k, k, row, places, columns=(Columns(),), bias=bias, scale=H**-0.5).columns
        return p * jnp.linalg.norm(kv.v.astype(jnp.float32), axis=-1)


class Capacity(Score):
    """How much of what a head's values can express would go with a token (CAPKV)."""

    queries: FutureQueries
    tau: float = 5.0
    eps: float = 1e-6

    def observe(self, phase):
        return (self.queries,) if phase == "prefill" else ()

    def __call__(self, slots):
        kv, among = slots.kv, slots.candidates[:, :, None]
        mean, _ = slots.stats[self.queries]
        v = jnp.where(among[:, :, 0, :, None], kv.v.astype(jnp.float32), 0.0)
        anchors = unit(mean).reshape(*kv.pos.shape[:2], -1, mean.shape[-1])
        cosine = jnp.where(among, jnp.einsum("bkgh,bksh->bkgs", anchors, unit(kv.k.astype(jnp.float32))), -jnp.inf)
        most = jnp.maximum(cosine.max(-1, keepdims=True), -1.0)
        weight = jnp.where(among, jnp.exp(self.tau * (cosine - most)), 0.0)
        size, axes = jnp.linalg.eigh(jnp.einsum("bkgs,bksh,bksj->bkghj", weight + self.eps, v, v))
        along = jnp.square(jnp.einsum("bksh,bkghj->bkgsj", v, axes))
        return (weight * (along / (1 + jnp.maximum(size, 0.0))[:, :, :, None]).sum(-1)).mean(2)


class Redundancy(Score):
    """How much a key resembles the others of its head, the newest of its kind aside: a softmax (R-KV)."""

    threshold: float = 0.5

    def __call__(self, slots):
        kv, k = slots.kv, slots.kv.k.astype(jnp.float32)
        k = jnp.where(kv.live[..., None], k / (jnp.linalg.norm(k, axis=-1, keepdims=True) + 1e-8), 0.0)
        S, pairs = k.shape[2], kv.live[:, :, None] & kv.live[..., None]
        cosine = jnp.where(pairs & ~jnp.eye(S, dtype=bool), jnp.einsum("bkrh,bksh->bkrs", k, k), 0.0)
        alike = cosine > self.threshold
        newest = jnp.where(alike, kv.pos[:, :, None], EMPTY).argmax(-1)
        spared = alike & (jnp.arange(S) == newest[..., None])
        mean = jnp.where(spared, 0.0, cosine).sum(2) / jnp.maximum(kv.num_live, 1)[..., None]
        return jax.nn.softmax(mean, axis=-1, where=kv.live)


class Leverage(Score):
    """Statistical leverage of the keys before rotation, through a sketch (Compactor)."""

    sketch: int = 48
    ridge: float = 0.01

    def observe(self, phase):
        return (UnrotatedKeys(),) if phase == "prefill" else ()

    def __call__(self, slots):
        among, x, ctx = slots.candidates[..., None], slots.stats[UnrotatedKeys()].astype(jnp.float32), slots.ctx
        count = jnp.maximum(among.sum(2, keepdims=True), 1)
        x = jnp.where(among, x - jnp.where(among, x, 0.0).sum(2, keepdims=True) / count, 0.0)
        K, H = x.shape[1], x.shape[3]
        if self.sketch < H:
            head = lambda key, i: jax.random.normal(jax.random.fold_in(key, i), (H, self.sketch)) * self.sketch**-0.5
            one = lambda key: jax.vmap(lambda i: head(jax.random.fold_in(key, ctx.layer), i))(jnp.arange(K))
            x = jnp.einsum("bksh,bkhm->bksm", x, jax.vmap(one)(ctx.keys))
        gram = jnp.einsum("bksm,bksn->bkmn", x, x) + self.ridge * jnp.eye(x.shape[-1])
        return jnp.maximum(jnp.einsum("bksm,bkms->bks", x, jnp.linalg.solve(gram, x.swapaxes(2, 3))), 0.0)


class Given(Score):
    """What is asked of every prompt, or of every row, and remembered: chunk attention, functions of hidden states."""

    what: Any
    prompt_only: bool = False

    def observe(self, phase):
        return (self.what,) if phase == "prefill" or not self.prompt_only else ()

    def memory(self, info):
        return PerSlot()

    def update(self, slots):
        return slots.memory + slots.stats[self.what]


def within_chunks(size: int, sinks: int, recent: int) -> Score:
    """What a token receives within its chunk of the prompt."""
    return Given(ChunkAttention(size, sinks, recent), prompt_only=True)


def predicted(function) -> Score:
    """What a function of its hidden state and the layer says of a token (KVzap)."""
    return Given(Hidden(function))
