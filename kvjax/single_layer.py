"""One policy on one layer's raw tensors, without any model: what a researcher tries first."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from kvjax.attention import attend
from kvjax.context import Context, Site
from kvjax.policy import Policy, Selection
from kvjax.state import LayerKV
from kvjax.stats import Rotate, ordered


def evict_layer(
    policy: Policy,
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    *,
    lengths: Int[Array, "B"] | None = None,
    key: Key[Array, ""] | Key[Array, "B"] | None = None,
    scale: float | None = None,
    rotate: Rotate | None = None,
    out_proj: Float[Array, "N H D"] | None = None,
    tokens: Int[Array, "B T"] | None = None,
    layer: int = 0,
    num_layers: int = 1,
) -> Selection:
    """What `policy` keeps of a prompt in one layer.

    Args:
      policy: the policy.
      q, k, v: one layer's tensors as attention sees them (rotated, if the model rotates), left-padded.
      lengths: valid tokens of every sequence, T if None.
      key: one PRNG key for the batch, or one a row.
      scale: factor on `q . k`; `H ** -0.5` if None.
      rotate: the rotary embedding, for policies that look at queries before it; then `q` and `k` are given before it.
      out_proj: the output projection, for policies that look at what values contribute.
      tokens: token ids, for policies that look at them.
      layer, num_layers: which layer this is, for policies that treat layers differently.

    Returns:
      `Selection(keep "B K T", score "B K T", budgets "B K")`, N in place of K for policies with a set for every query
      head. Padding is never kept.

    Raises:
      ValueError: tensors that do not fit together, or a policy that cannot work with this prompt.
    """
    B, N, T, H = q.shape
    K = k.shape[1]
    if k.shape != (B, K, T, H) or v.shape[:3] != (B, K, T):
        raise ValueError(f"q {q.shape}, k {k.shape} and v {v.shape} must agree in batch, length and head_dim")
    if T < 1:
        raise ValueError("the prompt is empty (T=0); give at least one token")
    site = Site(layer, num_layers, N, K, H, T, 0)
    if policy.heads_of(site) == "query_head":
        k, v = jnp.repeat(k, N // K, axis=1), jnp.repeat(v, N // K, axis=1)
        K, site = N, Site(layer, num_layers, N, N, H, T, 0)
    if lengths is None:
        lengths = jnp.full((B,), T, jnp.int32)
    if not isinstance(lengths, jax.core.Tracer):
        known = sorted(set(np.asarray(lengths).tolist()))
        if known[0] < 1 or known[-1] > T:
            raise ValueError(f"lengths must lie between 1 and the width {T}, got {known[0]} to {known[-1]}")
        for n in known:
            policy.check(site, n)
    lengths = lengths.astype(jnp.int32)
    key = jax.random.key(0) if key is None else key
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(B)) if key.ndim == 0 else key

    column = jnp.arange(T, dtype=jnp.int32)[None] - (T - lengths)[:, None]
    pos = jnp.maximum(column, -1)
    none = jnp.zeros((B, K, 0), jnp.int32)
    kv = LayerKV(k[:, :, :0], v[:, :, :0], none, policy.init(site, B))
    observe = ordered(policy.observe("prefill", site))
    ctx = Context(lengths, lengths, jnp.int32(0), keys, site=site, phase="prefill", tokens=tokens)
    rotate = (lambda x, pos: x) if rotate is None else rotate
    _, kv, stats = attend(kv, q, k, v, pos, ctx=ctx, rotate=rotate, observe=observe, out_proj=out_proj, scale=scale)
    _, selection = policy.decide(kv, stats, ctx)
    if selection is None:
        score = jnp.where(kv.live, 0.0, -jnp.inf)
        return Selection(kv.live, score, jnp.broadcast_to(lengths[:, None], (B, K)))
    return selection
