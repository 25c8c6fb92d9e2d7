"""What rows that repeat a prompt say of its tokens (KVzip, arXiv 2505.23416)."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.cache import mesh
from kvjax.cache.context import Phase, Site
from kvjax.cache.state import EMPTY
from kvjax.pallas_kernels.columns import accumulator
from kvjax.pallas_kernels.pytree import pytree, static
from kvjax.pallas_kernels.values import a, flag, settle, tokens
from kvjax.scoring.replay import Replay
from kvjax.scoring.scores import Score
from kvjax.scoring.stats import Measurement, Moment, Slots

_LOGITS = 2**20  # of a block of rows, 4 MiB in float32
_ROWS = 32  # of a block at least, as few take longer


@pytree
class _Heads:
    """What of a replay belongs to heads; the first axis is that of sequences, or of one for all.

    Attributes:
      q: queries of the rows.
      k, v, pos: the cache, whose last R slots are those of the rows.
      bias: of the logits of every slot, None without ALiBi.
      weights: the output projection "1 N H D"; None where probabilities count as they are.
    """

    q: Float[Array, "B N R H"]
    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]
    pos: Int[Array, "B K S"]
    bias: Float[Array, "B N S"] | None
    weights: Float[Array, "1 N H D"] | None


@pytree
class _Rows:
    """What all heads have in common.

    Attributes:
      pos: positions of the rows, EMPTY for padding.
      norm: of their hidden states, None where it does not count.
      first, last: the chunk, from the first position up to before the last.
    """

    pos: Int[Array, "B R"]
    norm: Float[Array, "B R"] | None
    first: Int[Array, "B"]
    last: Int[Array, "B"]
    scale: float = static()
    window: int | None = static(default=None)
    softcap: float | None = static(default=None)


@dataclasses.dataclass(frozen=True)
class ReplayedAttention(Measurement):
    r"""The most that any row which repeats a chunk of the prompt, in any head of the group, gives to a token of it.

    $s_j = \max_{i, g} p_{ij}$: the softmax $p_i$ of a row is one over the chunk's keys, the prompt's first `sinks`
    where they lie before the chunk, and the rows before it with itself. The layer's scale, sliding window, soft cap and
    ALiBi hold as in its attention, whose own softmax, over the whole prompt, stays what it is.

    With `weighed` (KVzip+, arXiv 2601.07891): $s_j = \max_{i, g} p_{ij} \lVert v_j W_O^g \rVert_2 / \lVert h_i
    \rVert_2$, the hidden state $h_i$ being what the row's query is a projection of.

    Attributes:
      replay: how the prompt is repeated.
      sinks: first tokens that every row of a later chunk may read too.
      weighed: whether probabilities are weighed.
    """

    replay: Replay
    sinks: int = 4
    weighed: bool = False

    def __post_init__(self):
        settle(self, replay=a(Replay), sinks=tokens(), weighed=flag)

    @property
    def again(self) -> Replay:
        """See `Measurement`."""
        return self.replay

    @property
    def sees_hidden(self) -> bool:
        """See `Measurement`."""
        return self.weighed

    def scratch(self, site: Site, batch: int, rows: int) -> int:
        """See `Measurement`: logits, what they are made of, and two arrays of their size that they become."""
        read = min(self.sinks, site.prompt_len) + self.replay.size(site.prompt_len) + rows
        heads = batch * site.num_query_heads
        queries, keys = heads * rows * site.head_dim, batch * site.num_kv_heads * read * site.head_dim
        return 4 * (3 * heads * _block(heads, rows, read) * read + queries + keys)

    def measure(self, moment: Moment) -> Float[Array, "B K S"]:
        """See `Measurement`.

        Raises:
          ValueError: rows that repeat no prompt, or a model that does not give what probabilities are weighed by.
        """
        ctx, kv = moment.ctx, moment.kv
        if ctx.again is None:
            raise ValueError(f"{self} measures rows that repeat a prompt; read it with kvjax.prefill")
        norm = weights = None
        if self.weighed:
            if moment.out_proj is None or moment.hidden is None:
                raise ValueError(
                    "weighed probabilities need the layer's output projection and hidden states; pass out_proj= of "
                    "shape (N, H, D) and hidden= of shape (B, T, D)"
                )
            norm = jnp.sqrt(jnp.square(moment.hidden.astype(jnp.float32)).sum(-1))
            weights = moment.out_proj[None]
        scale = moment.q.shape[-1] ** -0.5 if moment.scale is None else moment.scale
        how = {"scale": scale, "window": moment.window, "softcap": moment.softcap}
        rows = _Rows(moment.pos, norm, *ctx.again, **how)
        heads = _Heads(moment.q, kv.keys(moment.rotate), kv.v, kv.pos, moment.bias, weights)
        size, width = self.replay.size(ctx.site.prompt_len), ctx.site.prompt_len
        largest = lambda heads, rows: _largest(heads, rows, min(self.sinks, width), size, width)
        return mesh.by_head(largest, heads, rows)


def _largest(heads: _Heads, rows: _Rows, sinks: int, size: int, width: int) -> Float[Array, "B K S"]:
    """See `ReplayedAttention`; 0 for every slot that is not of the chunk.

    Args:
      heads, rows: see there.
      sinks: how many of the first tokens are read from every chunk behind them.
      size: tokens of the largest chunk.
      width: the prompt's: positions lie below it.
    """
    (B, N, R, H), (_, K, S) = heads.q.shape, heads.pos.shape
    dtype, first, last = accumulator(heads.q.dtype), rows.first[:, None], rows.last[:, None]
    early, of_chunk = jnp.arange(sinks, dtype=jnp.int32)[None], first + jnp.arange(size, dtype=jnp.int32)[None]
    inside = jnp.where(early < first, early, EMPTY), jnp.where(of_chunk < last, of_chunk, EMPTY)
    wanted = jnp.concatenate(inside, axis=1)
    slots = _slots_at(heads.pos, wanted, width)
    pos = jnp.where(slots < S, jnp.broadcast_to(wanted[:, None], slots.shape), EMPTY)

    def read(x: Array) -> Array:
        """The slots that rows read: sinks, chunk, and those of the rows themselves."""
        index = jnp.repeat(slots, x.shape[1] // K, axis=1)
        index = index.reshape(*index.shape, *(1,) * (x.ndim - 3))
        chosen = jnp.take_along_axis(x, index, axis=2, mode="fill", fill_value=0)
        return jnp.concatenate([chosen, x[:, :, S - R :]], axis=2)

    keys, pos = read(heads.k), jnp.concatenate([pos, heads.pos[:, :, S - R :]], axis=2)
    bias = None if heads.bias is None else read(heads.bias).reshape(B, K, N // K, 1, -1)
    block = _block(B * N, R, pos.shape[2])

    def of_block(largest: Float[Array, "B K G C"], at: tuple[Array, ...]) -> tuple[Array, None]:
        q, where, factor = at
        x = jnp.einsum("bkgrh,bksh->bkgrs", q.reshape(B, K, N // K, block, H), keys, preferred_element_type=dtype)
        x = x * jnp.asarray(rows.scale, dtype)
        x = x if rows.softcap is None else rows.softcap * jnp.tanh(x / rows.softcap)
        x = x if bias is None else x + bias.astype(dtype)
        row, key = where[:, None, :, None], pos[:, :, None]
        seen = (key <= row) & (key != EMPTY)
        seen = seen if rows.window is None else seen & (key > row - rows.window)
        x = jnp.where(seen[:, :, None], x, -jnp.inf)
        e = jnp.exp(x - jnp.maximum(x.max(-1, keepdims=True), jnp.finfo(dtype).min))
        mass = e.sum(-1, keepdims=True)
        p = e[..., sinks : sinks + size] / jnp.where(mass > 0, mass, 1.0)
        p = p * factor[:, None, None, :, None].astype(dtype)
        return jnp.maximum(largest, p.max(3)), None

    factor = jnp.ones((B, R), jnp.float32) if rows.norm is None else 1.0 / jnp.where(rows.norm > 0, rows.norm, 1.0)
    start = jnp.zeros((B, K, N // K, size), dtype)
    each = (heads.q, 2, 0), (rows.pos, 1, EMPTY), (factor, 1, 0)
    found, _ = lax.scan(of_block, start, tuple(_in_blocks(x, axis, block, fill) for x, axis, fill in each))
    chunk = slots[:, :, sinks:]
    if heads.weights is not None:
        values = jnp.take_along_axis(heads.v, chunk[..., None], axis=2, mode="fill", fill_value=0)
        found = found * _projected_norm(values.astype(dtype), heads.weights.astype(dtype))
    b, h = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None]
    return jnp.zeros((B, K, S), dtype).at[b, h, chunk].set(found.max(2), mode="drop")


def _block(heads: int, rows: int, slots: int) -> int:
    """How many rows of so many heads are read at once."""
    return min(rows, max(_ROWS, _LOGITS // (heads * slots)))


def _in_blocks(x: Array, axis: int, block: int, fill: int) -> Array:
    """Rows along an axis in blocks of so many, which are the first axis; the last is filled up."""
    missing = -x.shape[axis] % block
    x = jnp.pad(x, [(0, missing * (i == axis)) for i in range(x.ndim)], constant_values=fill)
    shape = *x.shape[:axis], x.shape[axis] // block, block, *x.shape[axis + 1 :]
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _projected_norm(v: Float[Array, "B K C H"], weights: Float[Array, "1 N H D"]) -> Float[Array, "B K G C"]:
    r"""L2 norms of values after the output projection of every query head, by its Gram matrix $W W^\top$."""
    (_, N, H, D), K = weights.shape, v.shape[1]
    by_group = weights.reshape(K, N // K, H, D)
    gram = jnp.einsum("kghd,kgjd->kghj", by_group, by_group)
    squares = jnp.einsum("bkch,kghj,bkcj->bkgc", v, gram, v)
    return jnp.sqrt(jnp.maximum(squares, 0.0))


def _slots_at(pos: Int[Array, "B K S"], wanted: Int[Array, "B W"], width: int) -> Int[Array, "B K W"]:
    """The slots that hold wanted positions below `width`, S where none does."""
    B, K, S = pos.shape
    b, h = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None]
    places = jnp.where((pos >= 0) & (pos < width), pos, width)
    slots = lax.broadcasted_iota(jnp.int32, pos.shape, 2)
    table = jnp.full((B, K, width), S, jnp.int32).at[b, h, places].set(slots, mode="drop")
    index = jnp.broadcast_to(wanted[:, None], (B, K, wanted.shape[1]))
    found = jnp.take_along_axis(table, jnp.maximum(index, 0), axis=2)
    return jnp.where(index == EMPTY, S, found)


@dataclasses.dataclass(frozen=True)
class Replayed(Score):
    """What a token's readers give it when the prompt is repeated (KVzip). Says nothing about generated tokens.

    Attributes:
      of: what is measured of them.
    """

    of: ReplayedAttention

    def __post_init__(self):
        settle(self, of=a(ReplayedAttention))

    @property
    def decodes(self) -> bool:
        """See `Score`."""
        return False

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Score`."""
        return (self.of,) if phase == "prefill" else ()

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        return slots.stats[self.of]
