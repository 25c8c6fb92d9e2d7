"""What policies look at besides attention probabilities: queries, and what values contribute to the output."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.cache import mesh
from kvjax.cache.context import Site
from kvjax.cache.state import EMPTY
from kvjax.pallas_kernels.values import check_array, check_finite, flag, settle, tokens, whole
from kvjax.scoring.learned import FrozenArrays
from kvjax.scoring.stats import Measurement, Moment

_MOST_AHEAD = 2**20  # positions, which take seconds
_MOMENTS = "mean", "covariance"


def query_moments(
    q: Float[Array, "B N T H"], pos: Int[Array, "B T"], skip: int
) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"]]:
    """The mean and the (biased) covariance of queries.

    Args:
      q: the queries.
      pos: their positions, EMPTY for padding.
      skip: those at the first positions do not count, unless there are no others.
    """
    q = q.astype(jnp.float32)
    counts = pos >= skip
    counts = jnp.where(counts.any(-1, keepdims=True), counts, pos != EMPTY).astype(jnp.float32)
    total = jnp.maximum(counts.sum(-1), 1.0)[:, None, None]
    mean = jnp.einsum("bt,bnth->bnh", counts, q) / total
    centred = q - mean[:, :, None]
    return mean, jnp.einsum("bt,bnth,bntj->bnhj", counts, centred, centred) / total[..., None]


def _moments(given: object) -> FrozenArrays:
    """Arrays of all layers' queries.

    Raises:
      ValueError: what is none, or arrays that do not belong together.
    """
    if not isinstance(given, Mapping) or sorted(given) != sorted(_MOMENTS):
        names = sorted(given) if isinstance(given, Mapping) else type(given).__name__
        raise ValueError(f"known queries are {names}; give a mapping of {' and '.join(map(repr, _MOMENTS))}")
    check_array("mean", given["mean"], "layers", "query heads", "head_dim", kind=np.floating)
    shape = (*np.shape(given["mean"]), np.shape(given["mean"])[-1])
    axes = "layers", "query heads", "head_dim", "head_dim"
    check_array("covariance", given["covariance"], *axes, kind=np.floating, shape=shape)
    for name in _MOMENTS:
        check_finite(name, given[name])
    return FrozenArrays({name: np.asarray(given[name], np.float32) for name in _MOMENTS})


@dataclasses.dataclass(frozen=True)
class FutureQueries(Measurement):
    """A Gaussian model of the queries to come (ExpectedAttention, arXiv 2510.00636, section 3).

    The mean and the (biased) covariance of the new tokens' queries before rotation, both rotated by the average of the
    rotations at the next `horizon` positions: (mean "B N H", covariance "B N H H").

    Attributes:
      horizon: how many positions ahead.
      skip: queries at the first positions do not count; sinks have queries of their own kind.
      known: "mean" (L, N, H) and "covariance" (L, N, H, H) of a model's queries before rotation, in place of those of
        the new tokens; `kvjax.learning.probes.fit_queries` finds them. Any mapping of arrays.
    """

    horizon: int = 512
    skip: int = 4
    known: Mapping[str, np.ndarray] | FrozenArrays | None = None

    def __post_init__(self):
        ahead = f"at least one position lies ahead, and no more than {_MOST_AHEAD:,} are averaged one by one"
        settle(self, horizon=whole(1, _MOST_AHEAD, ahead), skip=tokens())
        if self.known is not None:
            object.__setattr__(self, "known", _moments(self.known))

    def check(self, site: Site) -> None:
        """Raises ValueError for moments of another model's queries."""
        if self.known is None:
            return
        there, here = self.known["mean"].shape, (site.num_layers, site.num_query_heads, site.head_dim)
        if there != here:
            raise ValueError(
                f"known queries are of {there} (layers, query heads, head_dim), but this model has {here}; find them "
                "for this model"
            )

    def measure(self, moment: Moment) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"]]:
        """See `Measurement`."""
        B, N, _, H = moment.raw_q.shape
        if self.known is None:
            mean, cov = query_moments(moment.raw_q, moment.pos, self.skip)
        else:
            own = [jnp.asarray(self.known[name])[moment.ctx.layer] for name in _MOMENTS]
            if (heads := moment.ctx.heads) is not None:  # those that this device has
                own = [x.reshape(-1, N // len(heads), *x.shape[1:])[heads].reshape(N, *x.shape[1:]) for x in own]
            mean, cov = (jnp.broadcast_to(x[None], (B, *x.shape)) for x in own)

        basis = jnp.broadcast_to(jnp.eye(H, dtype=mean.dtype)[None, None], (B, 1, H, H))  # one row a basis vector

        def add(ahead, total):
            pos = jnp.broadcast_to((moment.ctx.length + ahead)[:, None, None], (B, 1, H))
            return total + moment.rotate(basis, pos)

        turned = lax.fori_loop(0, self.horizon, add, jnp.zeros_like(basis))[:, 0] / self.horizon  # row j: R e_j
        mean = jnp.einsum("bnj,bjh->bnh", mean, turned)
        return mean, jnp.einsum("bnij,bih,bjl->bnhl", cov, turned, turned)


@dataclasses.dataclass(frozen=True)
class KeyBias(Measurement):
    """What the model adds to the logits of every key: "B N S", or None where that is nothing.

    How far ahead a row lies takes the same from the logits of all keys (`cache.state.linear_bias`), so that rows to
    come need no average.
    """

    def measure(self, moment: Moment) -> Float[Array, "B N S"] | None:
        """See `Measurement`."""
        return moment.bias


@dataclasses.dataclass(frozen=True)
class QuerySquares(Measurement):
    """Mean square of every channel of the last `rows` rotated queries, averaged over a group: "B K H" (ThinK).

    Attributes:
      rows: how many of the new tokens count.
    """

    rows: int = 32

    def __post_init__(self):
        settle(self, rows=tokens(1, "at least one row must be observed"))

    def measure(self, moment: Moment) -> Float[Array, "B K H"]:
        """See `Measurement`."""
        rows = min(self.rows, moment.pos.shape[1])
        q = moment.q[:, :, -rows:].astype(jnp.float32)
        B, N, _, H = q.shape
        counts = (moment.pos[:, -rows:] != EMPTY).astype(jnp.float32)
        total = jnp.maximum(counts.sum(-1), 1.0)[:, None, None]
        mean = jnp.einsum("bt,bnth->bnh", counts, q * q) / total
        K = moment.kv.pos.shape[1]
        return mean.reshape(B, K, N // K, H).mean(2)


@dataclasses.dataclass(frozen=True)
class UnrotatedKeys(Measurement):
    """Every slot's key as it was before rotation: "B K S H".

    Rotated keys are turned back, which is exact for rotary embeddings that only turn; where they also scale (YaRN), the
    scale stays.
    """

    def measure(self, moment: Moment) -> Float[Array, "B K S H"]:
        """See `Measurement`."""
        kv = moment.kv
        if kv.positions == "compact":
            return kv.k
        place = kv.pos if kv.rotated is None else kv.rotated
        return moment.rotate(kv.k, -jnp.maximum(place, 0))


@dataclasses.dataclass(frozen=True)
class ChunkAttention(Measurement):
    r"""What every key receives within its chunk of the prompt, from rows before and after it: "B K S" (Compactor).

    The tokens just read are cut into chunks; every row has a softmax over all keys of its chunk, and a key's numbers
    are summed over the rows and averaged over the query heads of its kv head. As in the released code, logits are raw
    products unless `scaled`. Slots of tokens that were read before have 0.

    Attributes:
      size: tokens of a chunk.
      first, last: so many tokens at either end of the prompt belong to no chunk, and have 0.
      scaled: multiply logits by the model's factor, $1/\sqrt d$.
      filled: the last chunk is filled up, as in the released code: with keys of logit 0, and with rows that give
        everything in it the same.
    """

    size: int = 256
    first: int = 0
    last: int = 0
    scaled: bool = False
    filled: bool = False

    def __post_init__(self):
        settle(self, size=tokens(1, "a chunk has at least one token"), first=tokens(), last=tokens())
        settle(self, scaled=flag, filled=flag)

    def measure(self, moment: Moment) -> Float[Array, "B K S"]:
        """See `Measurement`."""
        T = moment.q.shape[2]
        new = moment.kv.keys(moment.rotate)[:, :, moment.kv.num_slots - T :]
        scale = (moment.q.shape[-1] ** -0.5 if moment.scale is None else moment.scale) if self.scaled else 1.0
        # Every device of a mesh has all chunks: whose rows stand where follows from the lengths.
        found = mesh.everywhere(
            lambda q, k, pos, length: self._received(q, k, pos, length, scale),
            *(moment.q, new, moment.pos, moment.ctx.prompt_length[:, None]),
        )
        return jnp.pad(found, ((0, 0), (0, 0), (moment.kv.num_slots - T, 0)))

    def _received(
        self,
        q: Float[Array, "B N T H"],
        k: Float[Array, "B K T H"],
        pos: Int[Array, "B T"],
        length: Int[Array, "B 1"],
        scale: float,
    ) -> Float[Array, "B K T"]:
        """Of the tokens just read."""
        (B, N, T, H), K = q.shape, k.shape[1]
        inside = (pos >= self.first) & (pos < length - self.last)
        start = jnp.where(inside.any(-1), inside.argmax(-1), 0).astype(jnp.int32)
        size = min(self.size, T)
        num = -(-T // size)
        source = jnp.arange(num * size, dtype=jnp.int32)[None] + start[:, None]  # the first that counts comes first
        counts = (source < T) & jnp.take_along_axis(inside, jnp.minimum(source, T - 1), axis=1)
        source = jnp.minimum(source, T - 1)
        chunked = lambda x: jnp.take_along_axis(x, source[:, None, :, None], axis=2).reshape(B, -1, num, size, H)
        rows, keys = chunked(q).reshape(B, K, N // K, num, size, H), chunked(k)

        def received(chunk: tuple[Array, Array, Array]) -> Float[Array, "B K C"]:
            q, k, counts = chunk
            x = jnp.einsum("bkgch,bkdh->bkgcd", q, k, preferred_element_type=jnp.float32) * scale
            x = jnp.where(counts[:, None, None, None], x, -jnp.inf)
            largest, absent = _largest(x), jnp.zeros((B,), jnp.float32)
            if self.filled:
                absent = (self.size - counts.sum(-1, dtype=jnp.int32)).astype(jnp.float32)
                largest = jnp.maximum(largest, 0.0)
            absent = absent[:, None, None, None, None]
            p = jnp.exp(x - largest)
            total = p.sum(-1, keepdims=True) + absent * jnp.exp(-largest)
            p = p / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
            mass = jnp.where(counts[:, None, None, :, None], p, 0.0).sum(3).mean(2)
            return mass + absent[:, :, 0, 0] / self.size

        per_chunk = jnp.moveaxis(rows, 3, 0), jnp.moveaxis(keys, 2, 0), jnp.moveaxis(counts.reshape(B, num, size), 1, 0)
        found = jnp.moveaxis(lax.map(received, per_chunk), 0, 2).reshape(B, K, num * size)
        b, h = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None]
        column = jnp.where(counts, source, T)[:, None]
        return jnp.zeros((B, K, T), jnp.float32).at[b, h, column].set(found, mode="drop")


def _largest(x: Float[Array, "*n S"]) -> Float[Array, "*n 1"]:
    """The largest of every row, 0 for rows of nothing."""
    largest = x.max(-1, keepdims=True)
    return jnp.where(jnp.isfinite(largest), largest, 0.0)


@dataclasses.dataclass(frozen=True)
class ProjectedValueNorm(Measurement):
    """L1 norm of every value after the output projection, averaged over a group: "B K S" (CriticalKV)."""

    def measure(self, moment: Moment) -> Float[Array, "B K S"]:
        """See `Measurement`."""
        if moment.out_proj is None:
            raise ValueError(
                "projected value norms need the layer's output projection; pass out_proj= of shape (N, H, D)"
            )
        v = moment.kv.v
        K = v.shape[1]
        N = moment.out_proj.shape[0]
        weights = moment.out_proj.reshape(K, N // K, *moment.out_proj.shape[1:]).swapaxes(0, 1)

        def one(w: Float[Array, "K H D"]) -> Float[Array, "B K S"]:
            by_head = lambda args: jnp.abs(jnp.einsum("bsh,hd->bsd", *args)).sum(-1).astype(jnp.float32)
            return lax.map(by_head, (v.swapaxes(0, 1), w.astype(v.dtype))).swapaxes(0, 1)

        return jax.lax.map(one, weights).mean(0)


@dataclasses.dataclass(frozen=True)
class ProjectionGram(Measurement):
    r"""$W_O W_O^\top$ of every kv head, the mean over its group, which gives $\lVert x W_O\rVert_2$: "B K H H"."""

    def measure(self, moment: Moment) -> Float[Array, "B K H H"]:
        """See `Measurement`."""
        if moment.out_proj is None:
            raise ValueError(
                "norms of projected values need the layer's output projection; pass out_proj= of shape (N, H, D)"
            )
        (B, K), (N, H, D) = moment.kv.pos.shape[:2], moment.out_proj.shape
        by_group = moment.out_proj.astype(jnp.float32).reshape(K, N // K, H, D)
        gram = jnp.einsum("kghd,kgjd->khj", by_group, by_group) / (N // K)
        return jnp.broadcast_to(gram[None], (B, K, H, H))
