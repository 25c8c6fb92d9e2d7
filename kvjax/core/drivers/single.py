"""One policy on one layer's raw tensors, without a model."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.contract import AttentionInputs, Context, LayerInfo, compiled
from kvjax.core.storage import empty
from kvjax.pallas_kernels import Columns


def evict_layer(
    policy, q, k, v, lengths, *, out_proj=None, hidden=None, layer=0, num_layers=1, key=None, policy_params=()
):
    """The layer that `policy` makes of a left-padded prompt, none of its slots moved: `kv.live` says what stays."""
    (B, N, T, H), K = q.shape, k.shape[1]
    info, policy = LayerInfo(layer, num_layers, N, K, H, T, 0), policy.at(layer, num_layers)
    key = jax.random.key(0) if key is None else key
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(B))
    hparams, lengths = policy.sizes(info, np.asarray(lengths)).hparams, jnp.asarray(lengths, jnp.int32)
    ctx = Context(
        lengths,
        lengths,
        keys,
        jnp.int32(layer),
        jnp.zeros((B,), jnp.int32),
        hparams,
        policy_params,
        width=T,
        capacity=T,
    )
    pos = jnp.maximum(jnp.arange(T)[None] - (T - lengths)[:, None], -1)
    kv = empty(info, B, k.dtype, policy.memory(info), policy.layout, policy.writes).append(k, v, pos, grow=True)
    rotate = lambda x, pos: x
    inputs = lambda kv: AttentionInputs(q, q, kv.replace(memory=()), pos, ctx, rotate, out_proj, hidden)
    kv = policy.enter(kv, inputs(kv), ctx)
    found = {o: o(inputs(kv)) for o in policy.observe("prefill")}
    columns = {o: x for o, x in found.items() if isinstance(x, Columns)}
    measured = kv.attend(q, pos, tuple(columns.values()), policy.reads(kv, inputs(kv), ctx), rotate=rotate)
    found |= dict(zip(columns, measured.columns, strict=True))
    program = compiled(policy)
    return program.update_layers((kv,), (found,), (ctx,))[0] if policy.joint else program.update(kv, found, ctx)
