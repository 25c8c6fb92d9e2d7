"""Scores that look at keys and values alone, or at a model of the queries to come."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.cache.context import Phase, Site
from kvjax.cache.state import EMPTY, LayerKV, position_order
from kvjax.pallas_kernels import Columns, attention
from kvjax.pallas_kernels.values import a, check_array, check_finite, flag, number, one_of, optional, settle, tokens
from kvjax.scoring.learned import FrozenArrays
from kvjax.scoring.measurements import ChunkAttention, FutureQueries, KeyBias, UnrotatedKeys
from kvjax.scoring.scores import Score
from kvjax.scoring.stats import Measurement, Slots


def oldest_first(kv: LayerKV) -> Int[Array, "B K S"]:
    """The slots of every head from the oldest live token to the newest, dead ones last."""
    S = kv.num_slots
    rank = jnp.arange(S, dtype=jnp.int32)[None, None]
    return jnp.take_along_axis(position_order(kv.pos), (rank + S - kv.num_live[..., None]) % S, axis=-1)


@dataclasses.dataclass(frozen=True)
class KeyNorm(Score):
    """Small keys are worth more: minus their L2 norm (arXiv 2406.11430). Rotation does not change it."""

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        kv = slots.kv
        return -jnp.linalg.norm(kv.k.astype(jnp.float32), axis=-1)


@dataclasses.dataclass(frozen=True)
class KeyDifference(Score):
    """Keys unlike the others are worth more: minus the cosine to the mean unit key (KeyDiff, arXiv 2504.15364)."""

    @property
    def rotated_keys(self) -> bool:
        """See `Score`."""
        return True

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        kv = slots.kv
        unit, anchor = self.directions(kv)
        anchor = anchor / jnp.maximum(jnp.linalg.norm(anchor, axis=-1, keepdims=True), 1e-12)
        return -jnp.einsum("bksh,bkh->bks", unit, anchor)

    def directions(self, kv: LayerKV) -> tuple[Float[Array, "B K S H"], Float[Array, "B K H"]]:
        """The live keys in unit length, and their mean."""
        k = kv.k.astype(jnp.float32)
        unit = k / jnp.maximum(jnp.linalg.norm(k, axis=-1, keepdims=True), 1e-12)
        unit = jnp.where(kv.live[..., None], unit, 0.0)
        return unit, unit.sum(2) / jnp.maximum(kv.num_live, 1).astype(jnp.float32)[..., None]


@dataclasses.dataclass(frozen=True)
class _OfFutureQueries(Score):
    """Keys as a model of queries to come meets them, once the prompt has been read."""

    queries: FutureQueries = FutureQueries()

    @property
    def rotated_keys(self) -> bool:
        """See `Score`."""
        return True

    @property
    def decodes(self) -> bool:
        """See `Score`."""
        return False

    def check(self, site: Site) -> None:
        """See `Score`."""
        self.queries.check(site)


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(_OfFutureQueries):
    r"""Attention that queries to come are expected to pay, times the value's norm (arXiv 2510.00636).

    With Gaussian queries of mean $\mu$ and covariance $\Sigma$ the expected weight of a key is proportional to
    $\exp(k\cdot\mu/\sqrt d + k^\top \Sigma k / 2d)$, normalised over the tokens that may be evicted. What the model
    adds to a key's logits (ALiBi) stands in the exponent too.

    Attributes:
      queries: the model of queries.
      covariance: whether its second term counts.
      eps: added to the weight before it is multiplied by the norm.
      value_norms: whether the weight is multiplied by the value's norm.
    """

    covariance: bool = True
    eps: float = 0.0
    value_norms: bool = True

    def __post_init__(self):
        eps = number("[0, inf)", "what is added to weights is finite, not negative")
        settle(self, queries=a(FutureQueries), covariance=flag, eps=eps, value_norms=flag)

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Score`."""
        return (self.queries, KeyBias()) if phase == "prefill" else ()

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        kv, stats, ctx, candidates = slots.kv, slots.stats, slots.ctx, slots.candidates
        (mean, cov), added = stats[self.queries], stats[KeyBias()]
        B, N, H = mean.shape
        K, S = kv.pos.shape[1:]
        k, bias = kv.k.astype(jnp.float32), added
        if self.covariance:
            quadratic = lambda sigma: jnp.einsum("bksh,bksh->bks", jnp.einsum("bksh,bkhj->bksj", k, sigma), k)
            by_group = jnp.moveaxis(cov.reshape(B, K, N // K, H, H), 2, 0)
            squares = jnp.moveaxis(lax.map(quadratic, by_group), 0, 2).reshape(B, N, S) / (2 * H)
            bias = squares if added is None else squares + added.astype(jnp.float32)
        # One row, the mean query, behind all that may be evicted.
        row, behind = jnp.zeros((B, 1), jnp.int32), jnp.where(candidates, 0, EMPTY)
        options: dict[str, Any] = {"bias": bias, "scale": ctx.site.head_dim**-0.5}
        (p,) = attention(mean[:, :, None], k, k, row, behind, columns=(Columns(),), **options).columns
        return (p + self.eps) * jnp.linalg.norm(kv.v.astype(jnp.float32), axis=-1) if self.value_norms else p


@dataclasses.dataclass(frozen=True)
class Capacity(_OfFutureQueries):
    r"""How much of what a head's values can express would go with a token (CAPKV, arXiv 2604.25975).

    $w_j \, v_j^\top A^{-1} v_j$ with $A = I + \sum_i (w_i + \epsilon) v_i v_i^\top$ over the tokens that may be evicted
    and $w_j = \exp(\tau (c_j - \max_i c_i))$, $c_j$ the cosine of the key and the mean of a query head's queries to
    come; averaged over the query heads of a group. As in kvpress (`CapPress`), keys and queries have unit length, which
    they do not have in the paper.

    Attributes:
      queries: the model of queries, of which the mean counts.
      tau: $\tau$, how much sooner alignment counts.
      eps: $\epsilon$.
    """

    tau: float = 5.0
    eps: float = 1e-6

    def __post_init__(self):
        tau = number("[0, inf)", "a weight of cosines is finite, not negative")
        eps = number("[0, inf)", "what is added to weights is finite, not negative")
        settle(self, queries=a(FutureQueries), tau=tau, eps=eps)

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Score`."""
        return (self.queries,) if phase == "prefill" else ()

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        kv, among = slots.kv, slots.candidates
        mean, _ = slots.stats[self.queries]
        k, v = kv.k.astype(jnp.float32), jnp.where(among[..., None], kv.v.astype(jnp.float32), 0.0)
        unit = lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
        anchors = unit(mean).reshape(*kv.pos.shape[:2], -1, mean.shape[-1])
        cosine = jnp.where(among[:, :, None], jnp.einsum("bkgh,bksh->bkgs", anchors, unit(k)), -jnp.inf)
        most = jnp.maximum(cosine.max(-1, keepdims=True), -1.0)  # nothing but -inf where no token may be evicted
        weight = jnp.where(among[:, :, None], jnp.exp(self.tau * (cosine - most)), 0.0)
        gram = jnp.einsum("bkgs,bksh,bksj->bkghj", weight + self.eps, v, v)
        # By eigenvalues: beside those of large values, a Cholesky factor would lose the identity.
        size, axes = jnp.linalg.eigh(gram)
        along = jnp.einsum("bksh,bkghj->bkgsj", v, axes)
        leverage = (jnp.square(along) / (1 + jnp.maximum(size, 0.0))[:, :, :, None]).sum(-1)
        return (weight * leverage).mean(2)


@dataclasses.dataclass(frozen=True)
class LagRelative(Score):
    """How far a token stands out from the next partition of the text (LagKV, arXiv 2504.04704).

    Behind the sinks the text is cut into partitions of `lag` tokens. A partition's keys and values are normalised by
    the minimum and maximum of every channel in the next one; a token's score is the softmax within its partition of the
    deviation over channels, averaged over keys and values. Sinks, the last full partition and the remainder score 1. A
    text shorter than sinks and two partitions is ranked by recency.

    Attributes:
      lag: tokens of a partition.
      sinks: tokens before the first partition.
      cross_scoring: compare scores of different partitions as they are; otherwise each is replaced by its rank within
        its partition, over `lag`.
    """

    lag: int = 128
    sinks: int = 4
    cross_scoring: bool = False

    @property
    def rotated_keys(self) -> bool:
        """See `Score`."""
        return True

    def __post_init__(self):
        settle(
            self,
            lag=tokens(1, "a partition has at least one token"),
            sinks=tokens(0, "a number of tokens is whole and cannot be negative"),
            cross_scoring=flag,
        )

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        kv = slots.kv
        S = kv.num_slots
        lag, sinks = min(self.lag, S + 1), min(self.sinks, S)  # larger ones mean no more
        order, rank = oldest_first(kv), jnp.arange(S, dtype=jnp.int32)[None, None]
        live = kv.num_live[..., None]
        num = max((S - sinks) // lag, 0)  # partitions, if every slot were live
        ramp = jnp.where(rank < sinks, 1.0, rank.astype(jnp.float32) / jnp.maximum(live, 1).astype(jnp.float32))
        scores = jnp.ones((*kv.pos.shape[:2], S), jnp.float32)
        if num > 1:
            own = (self._partitions(kv.k, order, num) + self._partitions(kv.v, order, num)) / 2
            if not self.cross_scoring:
                own = jnp.argsort(jnp.argsort(own, axis=-1), axis=-1).astype(jnp.float32) / lag
            scores = scores.at[..., sinks : sinks + (num - 1) * lag].set(own.reshape(*own.shape[:2], -1))
        full = (live - self.sinks) // lag  # partitions that are complete
        scores = jnp.where(rank >= sinks + (full - 1) * lag, 1.0, scores)
        scores = jnp.where(live < sinks + 2 * lag, ramp, scores)
        return jnp.put_along_axis(jnp.zeros_like(scores), order, scores, axis=-1, inplace=False)

    def _partitions(self, x: Float[Array, "B K S H"], order, num: int) -> Float[Array, "B K P lag"]:
        """Softmax within each partition but the last of the deviation relative to the next one."""
        index = order[..., self.sinks : self.sinks + num * self.lag, None]
        x = jnp.take_along_axis(x.astype(jnp.float32), index, axis=2)
        x = x.reshape(*x.shape[:2], num, self.lag, x.shape[-1])
        low, high = x.min(3, keepdims=True), x.max(3, keepdims=True)
        spread = jnp.maximum(high - low, 1e-12)
        relative = (x[:, :, :-1] - low[:, :, 1:]) / spread[:, :, 1:]
        deviation = jnp.std(relative, axis=-1, ddof=1)
        e = jnp.exp(deviation - deviation.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class SquaredNorms(Score):
    r"""Squared norms of keys and values, each as a share of its partition's (CurDKV, arXiv 2509.15038).

    $\lVert k_j\rVert^2 / \sum_P \lVert k\rVert^2$ and the same of values, $P$ the partition of $j$: an estimate of
    statistical leverage. Rotation does not change it. Partitions are cut among live tokens, oldest first; the last may
    be short. Without partitions squares are not made shares, so that the larger of keys and values weigh more in their
    mean, as in kvpress. What comes of it is divided by its sum over the head's tokens.

    Attributes:
      of: the "product" of both shares, their "mean", or those of the "key" or of the "value" alone.
      partition: tokens of a partition; None for no partitions.
    """

    of: Literal["product", "mean", "key", "value"] = "product"
    partition: int | None = 16

    def __post_init__(self):
        one_of("SquaredNorms.of", self.of, "product", "mean", "key", "value")
        settle(self, partition=optional(tokens(1, "a partition has at least one token")))

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        kv = slots.kv
        order = oldest_first(kv)
        key, value = (lambda: self._shares(kv.k, kv, order)), (lambda: self._shares(kv.v, kv, order))
        if self.of in ("key", "value"):
            score = key() if self.of == "key" else value()
        else:
            score = key() * value() if self.of == "product" else (key() + value()) / 2
        total = score.sum(-1, keepdims=True)
        return score / jnp.where(total > 0, total, 1.0)

    def _shares(self, x: Float[Array, "B K S H"], kv: LayerKV, order: Int[Array, "B K S"]) -> Float[Array, "B K S"]:
        squares = jnp.where(kv.live, jnp.square(x.astype(jnp.float32)).sum(-1), 0.0)
        if self.partition is None:
            return squares
        S = squares.shape[-1]
        size = min(self.partition, S)
        ranked = jnp.take_along_axis(squares, order, axis=-1)
        parts = jnp.pad(ranked, ((0, 0), (0, 0), (0, -S % size))).reshape(*ranked.shape[:2], -1, size)
        total = parts.sum(-1, keepdims=True)
        shares = (parts / jnp.where(total > 0, total, 1.0)).reshape(*ranked.shape[:2], -1)[..., :S]
        return jnp.put_along_axis(squares, order, shares, axis=-1, inplace=False)


@dataclasses.dataclass(frozen=True)
class Filters(Score):
    r"""Keys along a direction that is fixed for every head: $-f \cdot k_j$ (Q-Filters, arXiv 2503.02812, Eq. 2).

    Attributes:
      filters: "L K H" directions of all layers and kv heads, to which keys are compared as they are stored. Any array,
        kept as one that compares by content.
    """

    filters: np.ndarray | FrozenArrays

    def __post_init__(self):
        if not isinstance(self.filters, FrozenArrays):
            check_array("filters", self.filters, "layers", "kv heads", "head_dim", kind=np.floating)
            check_finite("filters", self.filters)
            object.__setattr__(self, "filters", FrozenArrays({"filters": np.asarray(self.filters, np.float32)}))

    @property
    def rotated_keys(self) -> bool:
        """See `Score`."""
        return True

    def check(self, site: Site) -> None:
        """See `Score`."""
        there, here = self.filters["filters"].shape, (site.num_layers, site.num_kv_heads, site.head_dim)
        if there != here:
            raise ValueError(
                f"filters have the shape {there}, but this model has {here} (layers, kv heads, head_dim); make filters "
                "of this model"
            )

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        kv, ctx = slots.kv, slots.ctx
        own = jnp.asarray(self.filters["filters"])[ctx.layer]
        own = own if ctx.heads is None else own[ctx.heads]
        return -jnp.einsum("kh,bksh->bks", own, kv.k.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Redundancy(Score):
    r"""How much a key resembles the others of its head: a softmax over tokens (R-KV, arXiv 2505.24133, section 3.2).

    $\mathrm{softmax}_j\big(\frac1n \sum_{i \ne j} c_{ij}\big)$ with $c_{ij}$ the cosine of keys $i$ and $j$, but 0
    where $j$ is the newest of those that resemble $i$ by more than the threshold: of a group of equals, the newest is
    not held against itself. Where nothing resembles $i$ the released code leaves out the oldest key instead of none.

    Attributes:
      threshold: cosines above it are a resemblance.
    """

    threshold: float = 0.5

    def __post_init__(self):
        settle(self, threshold=number("[-1, 1]", "a cosine lies in [-1, 1]"))

    @property
    def rotated_keys(self) -> bool:
        """See `Score`."""
        return True

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        kv = slots.kv
        S, live = kv.num_slots, kv.live
        k = kv.k.astype(jnp.float32)
        unit = k / (jnp.linalg.norm(k, axis=-1, keepdims=True) + 1e-8)
        unit = jnp.where(live[..., None], unit, 0.0)
        to_all = jnp.einsum("bksh,bkh->bks", unit, unit.sum(2)) - jnp.square(unit).sum(-1)

        def newest_alike(start: Int[Array, ""]) -> tuple[Int[Array, "B K R"], Float[Array, "B K R"]]:
            """Of some rows, the slot of the newest key that resembles each, and its cosine; 0 if there is none."""
            rows = start + jnp.arange(size, dtype=jnp.int32)
            inside = rows < S
            rows = jnp.minimum(rows, S - 1)
            cosine = jnp.einsum("bkrh,bksh->bkrs", unit[:, :, rows], unit)
            other = ((rows[:, None] != jnp.arange(S, dtype=jnp.int32)[None]) & inside[:, None])[None, None]
            alike = (cosine > self.threshold) & other & live[:, :, None] & live[:, :, rows, None]
            newest = jnp.where(alike, kv.pos[:, :, None], EMPTY).argmax(-1).astype(jnp.int32)
            value = jnp.take_along_axis(cosine, newest[..., None], axis=-1)[..., 0]
            return newest, jnp.where(alike.any(-1), value, 0.0)

        size = min(S, _ROWS)
        newest, cosine = lax.map(newest_alike, jnp.arange(0, S, size, dtype=jnp.int32))
        b, h = jnp.arange(len(k))[:, None, None], jnp.arange(k.shape[1])[None, :, None]
        flat = lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1)
        spared = jnp.zeros_like(to_all).at[b, h, flat(newest)].add(flat(cosine))
        mean = (to_all - spared) / jnp.maximum(kv.num_live, 1).astype(jnp.float32)[..., None]
        return jax.nn.softmax(mean, axis=-1, where=live)


_ROWS = 256  # rows of cosines that exist at once


@dataclasses.dataclass(frozen=True)
class Leverage(Score):
    r"""Statistical leverage of the keys before rotation (Compactor, arXiv 2507.08143, section 3).

    $x_j (X^\top X + \rho I)^{-1} x_j^\top$ with $X$ the candidates' keys less their mean, multiplied by a Gaussian
    sketch of variance $1 / m$ that is drawn anew for every sequence, layer and head.

    Attributes:
      sketch: its columns $m$. One as wide as the keys or wider changes nothing but the ridge's share, so that none is
        drawn; None never draws.
      ridge: $\rho$.
    """

    sketch: int | None = 48
    ridge: float = 1e-2

    def __post_init__(self):
        settle(
            self,
            sketch=optional(tokens(1, "a sketch has at least one column")),
            ridge=number("(0, inf)", "a ridge is positive and finite"),
        )

    @property
    def decodes(self) -> bool:
        """See `Score`."""
        return False

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Score`."""
        return (UnrotatedKeys(),) if phase == "prefill" else ()

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        among = slots.candidates[..., None]
        x = jnp.where(among, slots.stats[UnrotatedKeys()].astype(jnp.float32), 0.0)
        count = jnp.maximum(slots.candidates.sum(-1, dtype=jnp.int32), 1).astype(jnp.float32)[..., None, None]
        x = jnp.where(among, x - x.sum(2, keepdims=True) / count, 0.0)
        if self.sketch is not None and self.sketch < x.shape[-1]:
            x = jnp.einsum("bksh,bkhm->bksm", x, _sketch(slots, self.sketch))
        gram = jnp.einsum("bksm,bksn->bkmn", x, x) + self.ridge * jnp.eye(x.shape[-1], dtype=x.dtype)[None, None]
        factor = jax.scipy.linalg.cho_factor(gram, lower=True)
        solved = jax.scipy.linalg.cho_solve(factor, x.swapaxes(2, 3))
        return jnp.maximum(jnp.einsum("bksm,bkms->bks", x, solved), 0.0)


def _sketch(slots: Slots, columns: int) -> Float[Array, "B K H m"]:
    """Gaussian columns of variance 1 / m, other ones for every sequence, layer and head."""
    ctx, (K, H) = slots.ctx, (slots.kv.k.shape[1], slots.kv.k.shape[3])
    heads = jnp.arange(K, dtype=jnp.int32) if ctx.heads is None else ctx.heads

    def one(key: Array, head: Int[Array, ""]) -> Float[Array, "H m"]:
        key = jax.random.fold_in(jax.random.fold_in(key, ctx.layer), head)
        return jax.random.normal(key, (H, columns), jnp.float32) * columns**-0.5

    return jax.vmap(lambda key: jax.vmap(lambda head: one(key, head))(heads))(ctx.keys)


@dataclasses.dataclass(frozen=True)
class ChunkVotes(Score):
    """What a token receives within its chunk of the prompt (`kvjax.scoring.measurements.ChunkAttention`).

    Attributes:
      of: the chunks.
    """

    of: ChunkAttention = ChunkAttention()

    def __post_init__(self):
        settle(self, of=a(ChunkAttention))

    @property
    def decodes(self) -> bool:
        """See `Score`."""
        return False

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Score`."""
        return (self.of,) if phase == "prefill" else ()

    def init(self, site: Site, batch: int) -> Float[Array, "B K 0"]:
        """See `Score`."""
        return jnp.zeros((batch, site.num_kv_heads, 0), jnp.float32)

    def update(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        return slots.memory + slots.stats[self.of] if slots.ctx.phase == "prefill" else slots.memory

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        return slots.memory
