"""One policy on one layer's raw tensors, without a model."""

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.compose.evict import check_kept
from kvjax.contract import Amount, Context, Ids, LayerInfo, Policy, PRNGKey, Size, compiled
from kvjax.contract.checks import whole
from kvjax.pallas_kernels.kinds import Arrays
from kvjax.run.checks import as_array, check_lengths
from kvjax.run.layers import Attend
from kvjax.run.plan import layer_params, rereads
from kvjax.run.state import row_keys
from kvjax.storage import Layer, empty


def evict_layer(
    policy: Policy,
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    *,
    lengths: Ids | None = None,
    out_proj: Float[Array, "N H D"] | None = None,
    hidden: Float[Array, "B T D"] | None = None,
    tokens: Ids | None = None,
    layer: Amount = 0,
    num_layers: Size = 1,
    key: PRNGKey = None,
    policy_params: Arrays = (),
) -> Layer:
    """Evicts from a prompt in one layer. No slot moves; `live` of the returned layer says what stays.

    Args:
      policy: the policy.
      q, k, v: the layer's tensors as attention sees them (rotated, if the model rotates), padded on the left.
      lengths: tokens of each sequence; T if None.
      out_proj: the output projection, for policies that look at what values contribute.
      hidden: the layer's input, for policies that look at hidden states.
      tokens: token ids "B T", for policies that look at them.
      layer, num_layers: which layer of how many it is.
      key: one PRNG key for the batch, or one a sequence.
      policy_params: the layer's learned parameters, `init_policy_params(...)[layer]` to begin with, if there are any.

    Raises:
      ValueError: tensors that do not fit together, a policy that cannot work with this prompt or that reads it again; a
        score that is no number for any token that competes, of a head of which some go; a selection that keeps more
        than its budget; a rewrite that gives what is not a number.
    """
    whole("layer", layer, 0, num_layers - 1)
    q, k, v, out_proj, hidden = jax.tree.map(jnp.asarray, (q, k, v, out_proj, hidden))
    (B, N, T, H), K = q.shape, k.shape[1]
    if N % K:
        raise ValueError(f"query heads must be a multiple of kv heads; here these are {N} and {K}")
    if tokens is not None:
        tokens = jnp.asarray(as_array("tokens", tokens, np.integer, (B, T), "integers, one a token"), jnp.int32)
    lengths = check_lengths(lengths, B, T)
    policy = policy.at(layer, num_layers)
    if rereads(policy):
        raise ValueError(f"{type(policy).__name__} reads the prompt again, which needs a model; use kvjax.prefill")
    if policy.layout.prompt == "rows" and T > 1:
        raise ValueError(
            f"every row of {type(policy).__name__} decides what the next one reads, but evict_layer reads {T} tokens "
            "at once; drive a model with prefill(..., block=1)"
        )
    heads = N if policy.layout.by_query_head else K
    width = 0 if hidden is None else hidden.shape[-1]
    info, steps = LayerInfo(layer, num_layers, N, heads, H, T, 0, width), jnp.zeros((B,), jnp.int32)
    policy_params = layer_params(policy, info, policy_params)
    hparams, lengths = policy.sizes(info, np.asarray(lengths)).hparams, jnp.asarray(lengths, jnp.int32)
    keys, here = row_keys(key, B), jnp.int32(layer)
    ctx = Context(lengths, lengths, keys, here, steps, hparams, policy_params, tokens, width=T, capacity=T)
    pos = jnp.maximum(jnp.arange(T)[None] - (T - lengths)[:, None], -1)
    real = pos >= 0  # padding may hold anything, even what is no number
    q, k, v = (jnp.where(real[:, None, :, None], x, jnp.zeros((), x.dtype)) for x in (q, k, v))
    hidden = None if hidden is None else jnp.where(real[..., None], hidden, jnp.zeros((), hidden.dtype))
    kv = empty(info, policy, B, k.dtype)
    program = compiled(policy)
    attend = Attend(ctx, pos, program, policy.observe("prefill"), evict=not policy.joint, gives=True)
    how = {"layer": layer, "rotate": lambda x, pos: x, "out_proj": out_proj, "hidden": hidden}
    _, kv, (stats, _) = attend(kv, q, k, v, **how)
    if policy.joint:
        kv = program.update_layers((kv,), (stats,), (ctx,))[0]
    if not isinstance(kv.pos, jax.core.Tracer):
        check_kept(policy, layer, kv, hparams)
    return cast(Layer, kv)
