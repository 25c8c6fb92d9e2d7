"""Scores that look at keys, values and hidden states, or at a model of the queries to come."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.contract import (
    EMPTY,
    Amount,
    AttentionInputs,
    Cosine,
    FrozenArrays,
    LayerInfo,
    LayerView,
    NonNegative,
    Observation,
    PerSlot,
    Phase,
    Positive,
    Prompts,
    Score,
    Size,
    Slots,
    data,
    value,
)
from kvjax.decide.linalg import of_each, unit
from kvjax.observe import CentredQueries, FutureQueries, UnrotatedKeys, lengths_of_pairs, segment_sum
from kvjax.pallas_kernels import Columns, Logits, attention
from kvjax.storage import in_order


class KeyNorm(Score):
    r"""Minus the key's norm, $-\lVert k_j \rVert_2$ (Knorm, arXiv 2406.11430)."""

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        return -jnp.linalg.norm(slots.kv.k.astype(jnp.float32), axis=-1)


class ValueRange(Score):
    """The largest channel of the token's value less the smallest (VaSE, arXiv 2606.03928)."""

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        v = slots.kv.v.astype(jnp.float32)
        return v.max(-1) - v.min(-1)


class KeyDifference(Score):
    r"""Minus the cosine of the key and the mean of all unit keys of its head (KeyDiff, arXiv 2504.15364)."""

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        kv = slots.kv
        k = jnp.where(kv.live[..., None], unit(kv.k.astype(jnp.float32)), 0.0)
        anchor = unit(k.sum(2) / jnp.maximum(kv.num_live, 1).astype(jnp.float32)[..., None])
        return -jnp.einsum("bksh,bkh->bks", k, anchor)


class KeyDirections(Score):
    r"""Minus the key's length along a direction of its layer and head, $-f \cdot k_j$ (Q-Filters, arXiv 2503.02812).

    Attributes:
      table: directions "L K H", named "filters".
    """

    table: FrozenArrays = data()

    def hparams(self, info: LayerInfo, lengths: Prompts, budget: Prompts) -> Float[Array, "M K H"]:
        filters = self.table["filters"]
        there, here = filters.shape, (info.num_layers, info.num_kv_heads, info.head_dim)
        if there != here:
            raise ValueError(f"filters have the shape {there}, but the model has {here} (layers, kv heads, head_dim)")
        return jnp.repeat(jnp.asarray(filters[info.layer])[None], len(lengths), 0)

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        return -jnp.einsum("bkh,bksh->bks", slots.hparams, slots.kv.k.astype(jnp.float32))


class LagRelative(Score):
    """How far a token stands out from the next partition of the text (LagKV, arXiv 2504.04704).

    Behind the sinks the text is cut into partitions of `lag` tokens. Keys and values of a partition are normalised by
    the minimum and maximum of every channel in the next one. A token's score is the softmax within its partition of
    the deviation over channels, averaged over keys and values, then its rank. Sinks, the last full partition and what
    follows it score 1. A text shorter than sinks and two partitions is ranked by recency.

    Attributes:
      lag: tokens of a partition.
      sinks: tokens before the first partition.
      cross: scores of different partitions are compared as they are, without ranks (an option of kvpress).
    """

    lag: Size = 128
    sinks: Amount = 4
    cross: bool = False

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        kv, (B, K, S) = slots.kv, slots.kv.pos.shape
        lag, sinks = min(self.lag, S + 1), min(self.sinks, S)
        order, rank, live = in_order(kv.pos), jnp.arange(S)[None, None], kv.num_live[..., None]
        num = max((S - sinks) // lag, 0)
        score = jnp.ones((B, K, S), jnp.float32)
        if num > 1:
            own = (self._parts(kv.k, order, num, lag) + self._parts(kv.v, order, num, lag)) / 2
            own = own if self.cross else jnp.argsort(jnp.argsort(own, axis=-1), axis=-1) / lag
            score = score.at[..., sinks : sinks + (num - 1) * lag].set(own.reshape(B, K, -1).astype(jnp.float32))
        score = jnp.where(rank >= sinks + ((live - sinks) // lag - 1) * lag, 1.0, score)
        ramp = jnp.where(rank < sinks, 1.0, rank / jnp.maximum(live, 1))
        score = jnp.where(live < sinks + 2 * lag, ramp, score).astype(jnp.float32)
        return jnp.put_along_axis(jnp.zeros_like(score), order, score, -1, inplace=False)

    def _parts(self, x: Float[Array, "B K S H"], order: Int[Array, "B K S"], num: int, lag: Size) -> Array:
        """Softmax within each partition but the last of the deviation, relative to the next one: "B K num-1 lag"."""
        index = order[..., self.sinks : self.sinks + num * lag, None]
        x = jnp.take_along_axis(x.astype(jnp.float32), index, 2)
        x = x.reshape(*x.shape[:2], num, lag, -1)
        low, high = x.min(3, keepdims=True), x.max(3, keepdims=True)
        relative = (x[:, :, :-1] - low[:, :, 1:]) / jnp.maximum(high - low, 1e-12)[:, :, 1:]
        return jax.nn.softmax(jnp.std(relative, axis=-1, ddof=1), axis=-1)


class SquaredNorms(Score):
    r"""Squared norms of keys and values, each as a share of its partition's (CurDKV, arXiv 2509.15038).

    $\lVert k_j\rVert^2 / \sum_P \lVert k\rVert^2$ and the same of values, $P$ the partition of token $j$. They estimate
    leverage. Partitions are cut among live tokens, oldest first. The result is divided by its sum over the head.

    Attributes:
      partition: tokens of a partition; None takes squared norms as they are.
      of: the "product" of both shares, their "mean", or that of the "key" or the "value" alone.
    """

    partition: Size | None = 16
    of: Literal["product", "mean", "key", "value"] = "product"

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        kv, order = slots.kv, in_order(slots.kv.pos)
        keys, values = (self._shares(x, kv, order) for x in (kv.k, kv.v))
        score = {"product": keys * values, "mean": (keys + values) / 2, "key": keys, "value": values}[self.of]
        total = score.sum(-1, keepdims=True)
        return score / jnp.where(total > 0, total, 1.0)

    def _shares(self, x: Float[Array, "B K S H"], kv: LayerView, order: Int[Array, "B K S"]) -> Float[Array, "B K S"]:
        squares, S = jnp.where(kv.live, jnp.square(x.astype(jnp.float32)).sum(-1), 0.0), x.shape[2]
        if self.partition is None:
            return squares
        size = min(self.partition, S)
        parts = jnp.pad(jnp.take_along_axis(squares, order, -1), ((0, 0), (0, 0), (0, -S % size)))
        parts = parts.reshape(*parts.shape[:2], -1, size)
        total = parts.sum(-1, keepdims=True)
        shares = (parts / jnp.where(total > 0, total, 1.0)).reshape(*squares.shape[:2], -1)[..., :S]
        return jnp.put_along_axis(squares, order, shares, -1, inplace=False)


# ------------------------------------------------------------------------------------------------ queries to come


@value
class KeyBias:
    """Observes what the model adds to the logits of every key (ALiBi): "B N S", or one 0 a sequence for nothing."""

    def __call__(self, inputs: AttentionInputs) -> Float[Array, "B _ _"]:
        return jnp.zeros((len(inputs.q), 1, 1)) if inputs.bias is None else inputs.bias.astype(jnp.float32)


class Expected(Score):
    r"""Attention that queries to come are expected to pay, times the norm of the value (arXiv 2510.00636).

    With Gaussian queries of mean $\mu$ and covariance $\Sigma$, times the model's scale ($1 / \sqrt d$ in the paper),
    the expected weight of a key is proportional to $\exp(k \cdot \mu + k^\top \Sigma k / 2)$, over the tokens that may
    be evicted. A cap on logits is left out, as the expectation has no closed form with one.

    Attributes:
      queries: observes (mean "B N H", covariance "B N H H") of the queries to come.
      eps: added to the weight.
      covariance: whether the second term counts.
      value_norms: whether the weight is multiplied by the norm of the value.
    """

    queries: FutureQueries = FutureQueries()
    eps: NonNegative = 0.0
    covariance: bool = True
    value_norms: bool = True

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (self.queries, KeyBias()) if phase == "prefill" else ()

    def hparams(self, info: LayerInfo, lengths: Prompts, budget: Prompts) -> tuple[()]:
        self.queries.check(info)
        return ()

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        kv, (mean, cov), bias = slots.kv, slots.stats[self.queries], slots.stats[KeyBias()]
        (B, N, H), K, k = mean.shape, kv.pos.shape[1], kv.k.astype(jnp.float32)
        if self.covariance:
            squares = jnp.einsum("bksh,bkghj,bksj->bkgs", k, cov.reshape(B, K, N // K, H, H), k)
            bias = squares.reshape(B, N, -1) / 2 + bias
        bias = jnp.broadcast_to(bias, (B, N, k.shape[2]))
        row, places = jnp.zeros((B, 1), jnp.int32), jnp.where(slots.candidates, 0, EMPTY)
        how = {"columns": (Columns(),), "bias": bias, "logits": Logits(1.0)}
        (p,) = attention(mean[:, :, None], k, k, row, places, **how).columns
        return (p + self.eps) * jnp.linalg.norm(kv.v.astype(jnp.float32), axis=-1) if self.value_norms else p


class Centred(Score):
    r"""What the centres of a model's queries pay to a key, by distance and by length (TriAttention, arXiv 2604.04921).

    For every query head the mean over positions $n$ to come of $\sum_f |\bar q_f| |k_f| \cos((n - p) \omega_f + \arg
    \bar q_f \bar k_f^*)$, plus $\sum_f (\overline{|q_f|} - |\bar q_f|) |k_f|$, over the pairs $f$ of channels before
    rotation. The first is the product of the turned centre and the key. Scores of a query head are standardized over
    the candidates; the largest of a group counts, as in the released code.

    Attributes:
      queries: observes the centres.
    """

    queries: CentredQueries

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (self.queries,)

    def hparams(self, info: LayerInfo, lengths: Prompts, budget: Prompts) -> tuple[()]:
        self.queries.check(info)
        return ()

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        (ahead, longer, turned), k = slots.stats[self.queries], slots.kv.k.astype(jnp.float32)
        (B, K, _, H), among = k.shape, slots.candidates[:, :, None]
        of_heads = lambda x, y: jnp.einsum("bkgh,bksh->bkgs", x.reshape(B, K, -1, H), y)
        x = of_heads(ahead, k) + of_heads(longer, lengths_of_pairs(k, turned[0]))
        count = jnp.maximum(among.sum(-1, keepdims=True), 1).astype(jnp.float32)
        x = x - jnp.where(among, x, 0.0).sum(-1, keepdims=True) / count
        deviation = jnp.sqrt(jnp.where(among, jnp.square(x), 0.0).sum(-1, keepdims=True) / count)
        return (x / jnp.maximum(deviation, 1e-6)).max(2)


class Capacity(Score):
    r"""How much of the span of a head's values is lost with a token (CAPKV, arXiv 2604.25975).

    $w_j \, v_j^\top A^{-1} v_j$ with $A = I + \sum_i (w_i + \epsilon) v_i v_i^\top$ over the tokens that may be
    evicted. $w_j = \exp(\tau (c_j - \max_i c_i))$, where $c_j$ is the cosine of the key and the mean query to come of a
    query head. The group's mean is taken.

    Attributes:
      queries: observes the queries to come, of which the mean counts.
      tau: $\tau$, how sharply queries choose.
      eps: $\epsilon$.
    """

    queries: FutureQueries = FutureQueries()
    tau: NonNegative = 5.0
    eps: NonNegative = 1e-6

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (self.queries,) if phase == "prefill" else ()

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        kv, among = slots.kv, slots.candidates[:, :, None]
        mean, _ = slots.stats[self.queries]
        v = jnp.where(among[:, :, 0, :, None], kv.v.astype(jnp.float32), 0.0)
        anchors = unit(mean).reshape(*kv.pos.shape[:2], -1, mean.shape[-1])
        cosine = jnp.where(among, jnp.einsum("bkgh,bksh->bkgs", anchors, unit(kv.k.astype(jnp.float32))), -jnp.inf)
        most = jnp.maximum(cosine.max(-1, keepdims=True), -1.0)  # -inf where no token may be evicted
        weight = jnp.where(among, jnp.exp(self.tau * (cosine - most)), 0.0)
        # By eigenvalues: a Cholesky factor would lose the identity where values are large.
        gram = jnp.einsum("bkgs,bksh,bksj->bkghj", weight + self.eps, v, v)
        size, axes = of_each(jnp.linalg.eigh, gram.reshape(gram.shape[0], -1, *gram.shape[3:]))
        size, axes = size.reshape(gram.shape[:-1]), axes.reshape(gram.shape)
        along = jnp.square(jnp.einsum("bksh,bkghj->bkgsj", v, axes))
        return (weight * (along / (1 + jnp.maximum(size, 0.0))[:, :, :, None]).sum(-1)).mean(2)


# ------------------------------------------------------------------------------------------------ keys among keys


class Redundancy(Score):
    r"""How much a key resembles the others of its head: a softmax over tokens (R-KV, arXiv 2505.24133, section 3.2).

    $\mathrm{softmax}_j(\frac1n \sum_{i \ne j} c_{ij})$ with the cosines $c_{ij}$, but 0 where $j$ is the newest key
    that resembles $i$: of a group of equals the newest is not held against itself.

    Attributes:
      threshold: keys resemble each other where their cosine is above it.
    """

    threshold: Cosine = 0.5

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        kv, S = slots.kv, slots.kv.pos.shape[2]
        order = in_order(jnp.where(kv.live, kv.pos, EMPTY))
        live = jnp.take_along_axis(kv.live, order, axis=-1)
        k = jnp.take_along_axis(kv.k, order[..., None], axis=2).astype(jnp.float32)
        k = jnp.where(live[..., None], k / (jnp.linalg.norm(k, axis=-1, keepdims=True) + 1e-8), 0.0)
        place = jnp.where(live, jnp.arange(S, dtype=jnp.float32), -1.0)
        size = -(-S // -(-S // 256))  # rows of cosines that exist at once, at most 256

        def newest_alike(start: Int[Array, ""]) -> tuple[Array, Array]:
            """The place "B K R" of the newest key that resembles each row, and its cosine; 0 where no key does."""
            rows = start + jnp.arange(size)
            row = jnp.minimum(rows, S - 1)
            cosine = jnp.einsum("bkrh,bksh->bkrs", k[:, :, row], k)
            other = (row[:, None] != jnp.arange(S)[None])[None, None]
            newest = jnp.where((cosine > self.threshold) & other, place[:, :, None], -1.0).max(-1).astype(jnp.int32)
            found = jnp.take_along_axis(cosine, jnp.maximum(newest, 0)[..., None], axis=-1)[..., 0]
            return newest, jnp.where((newest >= 0) & live[:, :, row] & (rows < S)[None, None], found, 0.0)

        newest, cosine = lax.map(newest_alike, jnp.arange(0, S, size))
        newest, cosine = (jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1) for x in (newest, cosine))
        to_all = jnp.einsum("bksh,bkh->bks", k, k.sum(2)) - jnp.square(k).sum(-1)
        to_newest = segment_sum(cosine, jnp.maximum(newest, 0), S)
        mean = (to_all - to_newest) / jnp.maximum(kv.num_live, 1).astype(jnp.float32)[..., None]
        shares = jax.nn.softmax(mean, axis=-1, where=live)
        return jnp.put_along_axis(shares, order, shares, axis=-1, inplace=False)


class Leverage(Score):
    r"""Statistical leverage of the keys before rotation (Compactor, arXiv 2507.08143, section 3).

    $x_j (X^\top X + \rho I)^{-1} x_j^\top$ with $X$ the candidates' keys less their mean, times a Gaussian sketch of
    variance $1 / m$ that every sequence, layer and head draws for itself.

    Attributes:
      sketch: the columns $m$ of the sketch; None, or as many as keys have channels, uses the keys themselves.
      ridge: $\rho$.
    """

    sketch: Size | None = 48
    ridge: Positive = 0.01

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (UnrotatedKeys(),) if phase == "prefill" else ()

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        among, x, ctx = slots.candidates[..., None], slots.stats[UnrotatedKeys()].astype(jnp.float32), slots.ctx
        count = jnp.maximum(among.sum(2, keepdims=True), 1).astype(jnp.float32)
        x = jnp.where(among, x - jnp.where(among, x, 0.0).sum(2, keepdims=True) / count, 0.0)
        K, H, columns = x.shape[1], x.shape[3], self.sketch
        if columns is not None and columns < H:

            def drawn(key: Array, head: Int[Array, ""]) -> Float[Array, "H m"]:
                key = jax.random.fold_in(jax.random.fold_in(key, ctx.layer), head)
                return jax.random.normal(key, (H, columns), jnp.float32) * columns**-0.5

            sketches = jax.vmap(lambda key: jax.vmap(lambda head: drawn(key, head))(jnp.arange(K)))(ctx.keys)
            x = jnp.einsum("bksh,bkhm->bksm", x, sketches)
        gram = jnp.einsum("bksm,bksn->bkmn", x, x) + self.ridge * jnp.eye(x.shape[-1])[None, None]
        return jnp.maximum(jnp.einsum("bksm,bkms->bks", x, of_each(jnp.linalg.solve, gram, x.swapaxes(2, 3))), 0.0)


# ------------------------------------------------------------------------------------------------ given numbers


class Given(Score):
    """A number that is observed of every new token and remembered: chunk attention, functions of hidden states.

    Attributes:
      what: observes "B K S", 0 for tokens that are not new.
      prompt_only: generated tokens are not observed, and have 0.
    """

    what: Observation
    prompt_only: bool = False

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (self.what,) if phase == "prefill" or not self.prompt_only else ()

    def memory(self, info: LayerInfo) -> PerSlot:
        return PerSlot()

    def update(self, slots: Slots) -> Float[Array, "B K S"]:
        if self.prompt_only and slots.ctx.phase == "decode":
            return slots.memory
        return slots.memory + slots.stats[self.what]
