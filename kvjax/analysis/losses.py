"""Eviction losses: how far a layer's outputs move and can move (Ada-KV, arXiv 2407.11550), and the model's output.

Letters: B sequences, R query rows, S tokens, N query heads, K kv heads, H head_dim, D embed_dim, V vocabulary.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.contract import EMPTY
from kvjax.decide.select import best
from kvjax.pallas_kernels import Logits, attention
from kvjax.pallas_kernels.columns import accumulator
from kvjax.pallas_kernels.pytree import pytree
from kvjax.run.checks import as_array, check_lengths, traced

Order = Literal[1, 2]

_TOKENS_AT_ONCE = 256  # values that are projected together


@pytree
class Norms:
    """L1 and L2 norms of one quantity, a number for every query row."""

    l1: Float[Array, "B R"]
    l2: Float[Array, "B R"]


@pytree
class LayerLoss:
    """The cost of one keep mask in one layer, for every query row.

    Attributes:
      heads: how far the heads' outputs move, side by side, before the output projection.
      output: how far the layer's output moves, after it; None where no projection was given.
      heads_bound, output_bound: Theorem 2's upper bounds of the two.
      lost: attention that every query head paid to evicted tokens, from 0 to 1.
    """

    heads: Norms
    output: Norms | None
    heads_bound: Norms
    output_bound: Norms | None
    lost: Float[Array, "B N R"]


def by_query_head(x: Array, num_query_heads: int) -> Array:
    """One copy a query head of what belongs to kv heads, on axis 1."""
    return jnp.repeat(x, num_query_heads // x.shape[1], axis=1)


def _norm(x: Array, order: Order) -> Array:
    """Norm of the last axis, whose gradient at zero is zero."""
    if order == 1:
        return jnp.abs(x).sum(-1)
    square = jnp.square(x).sum(-1)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)


def distances(
    before: Float[Array, "B N R H"], after: Float[Array, "B N R H"], out_proj: Float[Array, "N H D"] | None = None
) -> Norms:
    """How far attention outputs moved. Differentiable.

    Args:
      before, after: outputs of every query head.
      out_proj: the output projection. Without it the heads' outputs are compared side by side.
    """
    dtype = accumulator(before.dtype)
    moved = before.astype(dtype) - after.astype(dtype)
    if out_proj is None:
        B, N, R, H = moved.shape
        moved = moved.swapaxes(1, 2).reshape(B, R, N * H)
    else:
        moved = jnp.einsum("bnrh,nhd->brd", moved, out_proj.astype(dtype))
    return Norms(_norm(moved, 1), _norm(moved, 2))


def largest_value(
    v: Float[Array, "B K S H"],
    out_proj: Float[Array, "N H D"] | None = None,
    live: Bool[Array, "B K S"] | None = None,
    *,
    order: Order = 1,
) -> Float[Array, "B"]:
    """The largest norm of a live token's value, after every query head's output projection where one is given.

    Theorem 2's constant C. Tokens are projected a few hundred at a time.
    """
    B, K, S, H = v.shape
    dtype = accumulator(v.dtype)
    live = jnp.ones((B, K, S), bool) if live is None else live

    def of_token(token):
        v, live = token
        if out_proj is None:
            return jnp.where(live, _norm(v.astype(dtype), order), 0.0).max(1)
        w = out_proj.astype(dtype).reshape(K, -1, H, out_proj.shape[-1])
        projected = jnp.einsum("bkh,kghd->bkgd", v.astype(dtype), w)
        return jnp.where(live[..., None], _norm(projected, order), 0.0).max((1, 2))

    tokens = (jnp.moveaxis(v, 2, 0), jnp.moveaxis(live, 2, 0))
    return lax.map(of_token, tokens, batch_size=min(S, _TOKENS_AT_ONCE)).max(0)


def loss_bound(lost: Float[Array, "B N R"], largest: Float[Array, "B"]) -> Float[Array, "B R"]:
    r"""Theorem 2: $2 C \sum_i (1 - s_i)$, an upper bound of how far outputs move.

    Evicted tokens take $1 - s_i$ of head $i$'s weights away, and renormalising what is left moves the same amount, each
    unit by at most $C$. This holds for any norm, and for each row; as it is linear, its mean over rows bounds the mean
    loss.

    Args:
      lost: $1 - s_i$, the attention that every query head paid to evicted tokens.
      largest: C (`largest_value`), in the norm of the loss.
    """
    return 2.0 * largest[:, None] * lost.sum(1)


def layer_loss(
    q: Float[Array, "B N R H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    keep: Bool[Array, "B heads S"],
    *,
    out_proj: Float[Array, "N H D"] | None = None,
    lengths: Any = None,
    bias: Float[Array, "B N S"] | None = None,
    logits: Logits = Logits(),
) -> LayerLoss:
    """The exact cost of a keep mask in one layer, for the last R of S tokens as query rows.

    Rows see what precedes them, as in the model. To measure later queries, append their keys and values to those of the
    prompt and keep them all: `keep` is True there. Memory grows with S, not with R S. `jax.vmap` over `keep` measures
    many masks.

    Args:
      q: queries of the last R tokens.
      k, v: keys and values of all S tokens, as attention sees them (rotated, if the model rotates).
      keep: the tokens that every kv head keeps, or every query head. A head that kept nothing gives zeros.
      out_proj: the output projection.
      lengths: valid tokens of every sequence, padded on the left; S if None.
      bias, logits: as in `kvjax.pallas_kernels.attention`.

    Raises:
      ValueError: shapes that do not fit together, a mask that is none, lengths outside 1 to S.
    """
    B, N, R, _ = q.shape
    K, S = k.shape[1:3]
    if keep.shape[1] not in (K, N):
        raise ValueError(f"keep has {keep.shape[1]} heads, but there are {K} kv heads and {N} query heads")
    if keep.shape[1] != K:
        k, v = by_query_head(k, N), by_query_head(v, N)
    pad = S - jnp.asarray(check_lengths(lengths, B, S))
    pos = jnp.maximum(jnp.arange(S, dtype=jnp.int32)[None] - pad[:, None], EMPTY)
    slots = jnp.broadcast_to(pos[:, None], keep.shape)
    rows = pos[:, S - R :]
    if logits.slopes is not None and len(logits.slopes) != N:
        raise ValueError(f"logits have {len(logits.slopes)} slopes, but there are {N} query heads; give one a head")
    logits, bias = logits.biased(slots, bias)  # by the places of all keys, those that go among them
    full = attention(q, k, v, rows, slots, bias=bias, logits=logits)
    evicted = attention(q, k, v, rows, jnp.where(keep, slots, EMPTY), bias=bias, logits=logits)
    lost = lost_share(full.lse, evicted.lse)
    live = slots != EMPTY
    bound = lambda w: Norms(*(loss_bound(lost, largest_value(v, w, live, order=order)) for order in (1, 2)))
    return LayerLoss(
        distances(full.out, evicted.out),
        None if out_proj is None else distances(full.out, evicted.out, out_proj),
        bound(None),
        None if out_proj is None else bound(out_proj),
        lost,
    )


def lost_share(full_lse: Float[Array, "B N R"], kept_lse: Float[Array, "B N R"]) -> Float[Array, "B N R"]:
    """The share of a row's attention that went to evicted tokens, from the row's logsumexps before and after."""
    reads = full_lse > -jnp.inf  # padding rows read nothing, and lose nothing
    return jnp.where(reads, jnp.maximum(-jnp.expm1(kept_lse - jnp.where(reads, full_lse, 0.0)), 0.0), 0.0)


def output_kl(full: Float[Array, "*batch V"], compressed: Float[Array, "*batch V"]) -> Float[Array, "*batch"]:
    """Kullback-Leibler divergence of next-token distributions under a compressed cache, in nats.

    Args:
      full: logits under the full cache.
      compressed: logits under the other.
    """
    log_p, log_q = jax.nn.log_softmax(full), jax.nn.log_softmax(compressed)
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


def task_loss(logits: Float[Array, "*batch V"], targets: Any) -> Float[Array, "*batch"]:
    """Cross-entropy of the right next tokens, in nats; NaN where a traced target is outside the vocabulary.

    Args:
      logits: of next tokens.
      targets: the ids that follow, of the same shape without V.

    Raises:
      ValueError: targets that are no ids of the vocabulary, where they are known.
    """
    vocab = logits.shape[-1]
    targets = as_array("targets", targets, np.integer, logits.shape[:-1], "token ids, one a row of logits")
    if not traced(targets) and targets.size and not 0 <= targets.min() <= targets.max() < vocab:
        raise ValueError(
            f"targets lie between {targets.min()} and {targets.max()}, but in a vocabulary of {vocab} ids are from 0 "
            f"to {vocab - 1}; leave out the rows that have no target"
        )
    targets = jnp.asarray(targets, jnp.int32)
    index = jnp.where(targets < 0, vocab, targets)[..., None]  # -1 must not count from the end
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), index, axis=-1, mode="fill", fill_value=jnp.nan)
    return -found[..., 0]


# ------------------------------------------------------------------- one row, given its attention: the paper's setting


def eviction_loss(
    p: Float[Array, "B N S"],
    v: Float[Array, "B K S H"],
    out_proj: Float[Array, "N H D"],
    keep: Bool[Array, "B K S"],
    *,
    order: Order = 1,
) -> Float[Array, "B"]:
    r"""Distance of a layer's attention output before and after eviction (Theorem 1).

    A head's weights are renormalised over what it kept: $\hat y = \sum_i (A_i \circ N_i / s_i) V_i W_i^O$.

    Args:
      p: the attention row of every query head over all tokens; it sums to 1.
      v: values.
      out_proj: the output projection.
      keep: the tokens that every kv head keeps; each keeps at least one that is attended to.
      order: 1 for $\lVert y - \hat y \rVert_1$ as in the paper, 2 for the L2 norm.

    Returns:
      The distance for every sequence.

    Raises:
      ValueError: a mask that is none.
    """
    N = p.shape[1]
    keep = by_query_head(keep, N)
    kept, lost = (jnp.where(mask, p, 0.0).sum(-1, keepdims=True) for mask in (keep, ~keep))
    moved = jnp.where(keep, -p * (lost / kept), p)  # p - p / kept, without its cancellation
    return _norm(jnp.einsum("bns,bnsh,nhd->bd", moved, by_query_head(v, N), out_proj), order)


def eviction_bound(
    p: Float[Array, "B N S"],
    v: Float[Array, "B K S H"],
    out_proj: Float[Array, "N H D"],
    keep: Bool[Array, "B K S"],
    *,
    order: Order = 1,
) -> Float[Array, "B"]:
    r"""An upper bound of `eviction_loss` (Theorem 2): $2 C \sum_i (1 - s_i)$.

    $s_i$ is the attention that query head $i$ kept, $C$ the largest norm of a row of $V_i W_i^O$ over heads.

    Args:
      p, v, out_proj, keep, order: as in `eviction_loss`.

    Raises:
      ValueError: a mask that is none.
    """
    lost = jnp.where(by_query_head(keep, p.shape[1]), 0.0, p).sum(-1)
    return loss_bound(lost[..., None], largest_value(v, out_proj, order=order))[:, 0]


def least_bound(
    p: Float[Array, "B N S"],
    v: Float[Array, "B K S H"],
    out_proj: Float[Array, "N H D"],
    budgets: Int[Array, "B K"],
    *,
    order: Order = 1,
) -> Float[Array, "B"]:
    """The smallest `eviction_bound` of any masks with these head budgets: that of Top-K (Theorem 3).

    The query heads of a kv head share its tokens, so tokens are ranked by the sum of the group's attention.

    Args:
      p, v, out_proj, order: as in `eviction_loss`.
      budgets: tokens that every kv head keeps.

    Raises:
      ValueError: budgets that are no whole numbers, one a head.
    """
    B, N, S = p.shape
    K = v.shape[1]
    pos = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32)[None, None], (B, K, S))
    keep = best(jnp.asarray(p).reshape(B, K, N // K, S).sum(2), pos, budgets)
    return eviction_bound(p, v, out_proj, keep, order=order)
