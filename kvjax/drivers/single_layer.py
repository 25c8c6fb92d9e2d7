"""One policy on one layer's raw tensors, without any model: what a researcher tries first."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.context import Context, Site, row_keys
from kvjax.cache.state import Rotate, Slopes
from kvjax.drivers.attention import attend
from kvjax.pallas_kernels.values import as_given, check_array, checked, each, number, optional, whole
from kvjax.plan import as_lengths
from kvjax.policy import Policy, as_policy, empty_layer
from kvjax.scoring.select import Selection


def evict_layer(
    policy: Policy,
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    *,
    lengths: Array | np.ndarray | Sequence[int] | None = None,
    key: Array | None = None,
    scale: float | None = None,
    rotate: Rotate | None = None,
    slopes: Slopes | None = None,
    out_proj: Float[Array, "N H D"] | None = None,
    hidden: Float[Array, "B T D"] | None = None,
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
      slopes: those of ALiBi, one for each query head, if the model has them.
      out_proj: the output projection, for policies that look at what values contribute.
      hidden: what queries, keys and values are projections of, for policies that look at hidden states.
      tokens: token ids, for policies that look at them (`ctx.tokens`).
      layer, num_layers: which layer this is, for policies that treat layers differently.

    Returns:
      `Selection(keep "B K T", score "B K T", budgets "B K")`, N in place of K for policies with a set for every query
      head. Padding is never kept.

    Raises:
      ValueError: tensors that do not fit together, or a policy that cannot work with this prompt, or not read at once,
        or read again; a score that is no number for any token, though some go.
    """
    as_policy(policy)
    num_layers = checked(whole(1, 2**16), "num_layers", num_layers)
    layer = checked(whole(0, num_layers - 1, f"is not one of {num_layers} layers"), "layer", layer)
    for name, x, heads in (("q", q, "query heads"), ("k", k, "kv heads"), ("v", v, "kv heads")):
        check_array(name, x, "batch", heads, "tokens", "head_dim")
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    B, N, T, H = q.shape
    K = k.shape[1]
    if k.shape != (B, K, T, H) or v.shape != k.shape or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q {q.dtype}{q.shape}, k {k.dtype}{k.shape} and v {v.dtype}{v.shape} must agree in batch, length and "
            "head_dim, k and v in heads, and all in dtype"
        )
    if N % K:
        raise ValueError(f"{N} query heads are not a multiple of {K} kv heads; every kv head serves N / K query heads")
    if out_proj is not None:
        check_array("out_proj", out_proj, "query heads", "head_dim", "embed_dim")
        if out_proj.shape[:2] != (N, H):
            raise ValueError(f"out_proj has the shape {out_proj.shape}, but there are {N} query heads of width {H}")
    if hidden is not None:
        check_array("hidden", hidden, "batch", "tokens", "embed_dim")
        hidden = jnp.asarray(hidden)
        if hidden.shape[:2] != (B, T):
            raise ValueError(f"hidden has the shape {hidden.shape}, but the prompts are {B} of width {T}")
    if tokens is not None:
        ids = as_given("tokens", tokens)
        if ids.shape != (B, T) or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(
                f"tokens have the shape {ids.shape}, but the prompts are {B} of width {T}; give one id a token"
            )
        if isinstance(ids, np.ndarray) and not -(2**31) <= ids.min() <= ids.max() < 2**31:
            raise ValueError(f"tokens lie between {ids.min()} and {ids.max()}, but ids are numbers of 32 bits")
        tokens = jnp.asarray(ids)
    if rotate is not None and not callable(rotate):
        raise ValueError(f"rotate={rotate!r}: give a function of vectors and positions")
    scale = checked(optional(number()), "scale", scale)
    slopes = checked(optional(each(number())), "slopes", slopes)
    site = Site(layer, num_layers, N, K, H, T, 0)
    if policy.at(site).spec.reads == "rows" and T > 1:
        raise ValueError(
            f"every row of {policy} decides what the next one reads, but evict_layer reads {T} tokens at once; drive a "
            "model with prefill(..., block=1)"
        )
    if policy.at(site).spec.replays:
        raise ValueError(
            f"{policy} decides by rows that read the prompt again, but one layer has no model to read it; give the "
            "model to kvjax.prefill or kvjax.generate"
        )
    if policy.at(site).spec.heads == "query_head":
        k, v = jnp.repeat(k, N // K, axis=1), jnp.repeat(v, N // K, axis=1)
        K, site = N, Site(layer, num_layers, N, N, H, T, 0)
    lengths = as_lengths(lengths, B, T)
    if isinstance(lengths, np.ndarray):
        for n in sorted(set(lengths.tolist())):
            policy.check(site, n)
    lengths = jnp.asarray(lengths)
    keys = row_keys(key, B)

    column = jnp.arange(T, dtype=jnp.int32)[None] - (T - lengths)[:, None]
    pos = jnp.maximum(column, -1)
    # Padding may hold anything, even what is no number; zeros are no part of any sum.
    real = pos >= 0
    q, k, v = (jnp.where(real[:, None, :, None], x, jnp.zeros((), x.dtype)) for x in (q, k, v))
    hidden = None if hidden is None else jnp.where(real[..., None], hidden, jnp.zeros((), hidden.dtype))
    tokens = None if tokens is None else jnp.where(real, tokens, jnp.zeros((), tokens.dtype))
    here = policy.at(site)
    # Whether keys are rotated at positions or at ranks, a prompt that is read at once has the same attention.
    kv = dataclasses.replace(empty_layer(here, B, k.dtype), rank=None, rotated=None, positions="original")
    observe = here.spec.observe("prefill")
    ctx = Context(lengths, lengths, keys, site=site, phase="prefill", ids=tokens)
    rotate = (lambda x, pos: x) if rotate is None else rotate
    how = {"rotate": rotate, "out_proj": out_proj, "hidden": hidden, "scale": scale, "slopes": slopes}
    _, kv, stats = attend(kv, q, k, v, pos, ctx=ctx, observe=observe, **how)
    memory, selection = here.decide(kv, stats, ctx)
    here.check_scored(memory)
    if selection is None:
        score = jnp.where(kv.live, 0.0, -jnp.inf)
        return Selection(kv.live, score, jnp.broadcast_to(lengths[:, None], (B, K)))
    return selection
