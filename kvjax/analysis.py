"""What an eviction costs one row of attention, exactly and at most (Ada-KV, arXiv 2407.11550, section 3)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def _by_query_head(x: Array, num_query_heads: int) -> Array:
    """One copy a query head of what belongs to kv heads, on axis 1."""
    return jnp.repeat(x, num_query_heads // x.shape[1], axis=1)


def eviction_loss(
    p: Float[Array, "B N S"],
    v: Float[Array, "B K S H"],
    out_proj: Float[Array, "N H D"],
    keep: Bool[Array, "B K S"],
) -> Float[Array, "B"]:
    r"""L1 distance of a layer's attention output before and after eviction (Theorem 1).

    A head's weights are renormalised over what it kept: $\hat y = \sum_i (A_i \circ N_i / s_i) V_i W_i^O$.

    Args:
      p: the attention row of every query head over all tokens.
      v: values.
      out_proj: the output projection.
      keep: the tokens that every kv head keeps; each keeps at least one that is attended to.

    Returns:
      $\lVert y - \hat y \rVert_1$ of every sequence.
    """
    N = p.shape[1]
    kept = jnp.where(_by_query_head(keep, N), p, 0.0)
    after = kept / kept.sum(-1, keepdims=True)
    out = jnp.einsum("bns,bnsh,nhd->bd", p - after, _by_query_head(v, N), out_proj)
    return jnp.abs(out).sum(-1)


def eviction_bound(
    p: Float[Array, "B N S"],
    v: Float[Array, "B K S H"],
    out_proj: Float[Array, "N H D"],
    keep: Bool[Array, "B K S"],
) -> Float[Array, "B"]:
    r"""An upper bound of `eviction_loss` (Theorem 2): $2 C \sum_i (1 - s_i)$.

    $s_i$ is the attention that query head $i$ kept, $C$ the largest L1 norm of a row of $V_i W_i^O$ over heads.

    Args:
      p, v, out_proj, keep: as in `eviction_loss`.
    """
    N = p.shape[1]
    lost = 1.0 - jnp.where(_by_query_head(keep, N), p, 0.0).sum(-1)
    rows = jnp.abs(jnp.einsum("bnsh,nhd->bnsd", _by_query_head(v, N), out_proj)).sum(-1)
    return 2.0 * rows.max((1, 2)) * lost.sum(-1)
