"""A model whose queries, keys and values are given, so that drivers run on tensors: its tokens are their columns."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.compose.across import AcrossLayers
from kvjax.contract import EMPTY, AttentionInputs, compiled
from kvjax.models import ModelConfig
from kvjax.pallas_kernels import Logits
from kvjax.run.layers import embed, step


def qkv(seed=0, *, B=2, N=4, K=2, T=24, H=8, dtype=jnp.float32, sharpness=1.5):
    """Random queries, keys and values of one layer."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((B, N, T, H), (B, K, T, H), (B, K, T, H))
    q, k, v = (jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=True))
    return q * jnp.asarray(sharpness, dtype), k, v


def from_probabilities(p, num_heads_per_kv=1):
    """q, k, v and scale whose causal attention is the given matrix "T T", or "G T T" for one group of query heads."""
    p = np.asarray(p, np.float64)
    p = p[None] if p.ndim == 2 else p
    T = p.shape[-1]
    q = np.where(p > 0, np.log(np.where(p > 0, p, 1.0)), -1e4)
    k = np.eye(T)[None]
    return jnp.asarray(q[None], jnp.float32), jnp.asarray(k[None], jnp.float32), jnp.asarray(k[None], jnp.float32), 1.0


def token_ids(B, T, seed=0):
    """Random ids of the tiny model's vocabulary."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, 61, (B, T)), jnp.int32)


def unturned(x, pos):
    """The rotation of a model without one."""
    return x


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The model. Parameters are a list of layers: q "B N M H", k and v "B K M H", and maybe out_proj and hidden."""

    config: ModelConfig
    rotate: Callable[..., Any] = unturned
    scale: float | None = None
    slopes: tuple[float, ...] | None = None
    softcap: float | None = None
    nothing: tuple[float, ...] | None = None

    @property
    def alike(self):
        """All layers are."""
        return (0,) * self.config.num_layers

    def parts(self, params):
        """No parameters that are of no layer, and those of every layer."""
        return (), tuple(params)

    def embed(self, params, tokens, pos):
        """A residual stream that tells every layer the columns, and carries whether a token found no slot."""
        return jnp.stack([tokens.astype(jnp.float32), jnp.zeros(tokens.shape)], axis=-1)

    def block(self, layer, params, x, cache, attend):
        """The given queries, keys and values of these columns."""
        tokens = x[..., 0].astype(jnp.int32)
        cut = lambda y: jnp.take_along_axis(y, tokens[:, None, :, None], 2)
        heads = lambda x: None if x is None else jnp.asarray(x, jnp.float32)
        of_heads = heads(self.slopes), heads(self.nothing)
        logits = Logits(self.scale, self.softcap, self.config.window(layer), *of_heads)
        how = {"rotate": self.rotate, "out_proj": params.get("out_proj"), "logits": logits}
        if "hidden" in params:
            how["hidden"] = cut(params["hidden"][:, None])[:, 0]
        out, cache, found = attend(cache, *(cut(params[n]) for n in "qkv"), layer=layer, **how)
        return x.at[..., 1].add((out * 0.0).sum((1, 2, 3)).astype(x.dtype)[:, None]), cache, found

    def head(self, params, x):
        """One number for all tokens, NaN where a token found no slot."""
        return jnp.broadcast_to(x[..., 1:], (*x.shape[:-1], self.config.vocab_size))


def model_of(params, *, window=None, **how):
    """The model for these tensors; `how` are fields of `Tensors`."""
    (_, N, M, H), (_, K, _, _) = params[0]["q"].shape, params[0]["k"].shape
    D = params[0]["out_proj"].shape[-1] if "out_proj" in params[0] else 8
    sizes = {"num_query_heads": N, "num_kv_heads": K, "head_dim": H, "num_layers": len(params)}
    more = {"sliding_window": (window,) * len(params), "dtype": str(params[0]["k"].dtype)}
    return Tensors(ModelConfig(vocab_size=M, embed_dim=D, mlp_dim=8, **sizes, **more), **how)


def columns(params, n):
    """The tokens of the first `n` columns."""
    return np.broadcast_to(np.arange(n, dtype=np.int32), (len(params[0]["q"]), n))


def live_positions(kv):
    """Sorted live positions, a list for every sequence and head."""
    return [[sorted(p for p in head if p != EMPTY) for head in row] for row in np.asarray(kv.head_pos).tolist()]


def evicted(policy, params, *, lengths=None, key=None, layer=None, **how):
    """What a policy does to prompts of all columns: (the layers of the state, their scores "B K S").

    Scores are None where the policy is no `Evict`. `layer`: only that layer, of one that decides for each by itself.
    """
    model = model_of(params, **how)
    n = params[0]["q"].shape[2]
    lengths = np.full(len(params[0]["q"]), n) if lengths is None else np.asarray(lengths)
    state = kvjax.start(model, policy=policy, lengths=lengths, max_new_tokens=0, width=n, key=key)
    _, state, stats = step(model, params, columns(params, n), state, jnp.asarray(lengths), evict=False, gives=True)
    layers, scores = [], []
    views = [kv.view() for kv in state.layers]
    ctxs = [state.context(i, "prefill", stats.tokens) for i in range(len(views))]
    if policy.joint:
        found = compiled(policy).update_layers(tuple(views), tuple(map(stats.of, range(len(views)))), tuple(ctxs))
    for i, (view, ctx) in enumerate(zip(views, ctxs, strict=True)):
        here = state.plan.layers[i]
        here = getattr(here, "policy", here) if policy.joint else here
        layers.append(found[i] if policy.joint else here.update(view, stats.of(i), ctx))
        scored = None
        if isinstance(here, kvjax.Evict):
            ctx = dataclasses.replace(ctx, hparams=ctx.hparams[0]) if isinstance(policy, AcrossLayers) else ctx
            scored = np.asarray(here.ranked(here.update_memory(view, stats.of(i), ctx), stats.of(i), ctx)[1])
        scores.append(scored)
    return layers, scores


@functools.partial(jax.jit, static_argnames="model")
def _step(model, params, token, state):
    return kvjax.decode_step(model, params, token, state)[1]


@dataclasses.dataclass(frozen=True)
class Moments:
    """One layer from the end of its prompt on.

    Attributes:
      live: live positions "B K" lists after the prompt and after every later token.
      read: the positions that each row could read, its own included, where rows came one at a time.
      state: the state at the end.
    """

    live: list
    read: list
    state: Any

    @property
    def kv(self):
        """The layer at the end."""
        return self.state.layers[0]


def replay(policy, params, n, *, lengths=None, block=None, key=None, reads=False, **how):
    """One layer that reads a prompt of `n` columns, in blocks or at once, and then the other columns one by one.

    `reads` finds out what rows could read, too.
    """
    model, M = model_of(params, **how), params[0]["q"].shape[2]
    lengths = np.full(len(params[0]["q"]), n) if lengths is None else np.asarray(lengths)
    request = {"policy": policy, "lengths": lengths, "max_new_tokens": M - n, "key": key}
    _, state = kvjax.prefill(model, params, columns(params, n), block=block, **request)
    live, read = [live_positions(state.layers[0])], []
    for i in range(n, M):
        token = columns(params, M)[:, i]
        if reads:
            read.append(shown(model, params, token, state))
        state = _step(model, params, token, state)
        live.append(live_positions(state.layers[0]))
    return Moments(live, read, state)


def shown(model, params, token, state):
    """The positions that the row of a new token reads in the first layer."""
    here, x = state.plan.layers[0], params[0]
    _, tokens, pos, length = embed(model, (), jnp.asarray(token)[:, None], state.length, None)
    state = dataclasses.replace(state, length=length)
    ctx, (q, k, v) = (
        state.context(0, "decode", tokens),
        (jnp.take_along_axis(x[name], tokens[:, None, :, None], 2) for name in "qkv"),
    )
    K = state.plan.infos[0].num_kv_heads
    k, v = (jnp.repeat(y, K // y.shape[1], axis=1) for y in (k, v))
    kv = state.layers[0].append(model.rotate(k, pos[:, None]), v, pos, state.layers[0].free(pos))
    inputs = AttentionInputs(q, q, kv.view().replace(memory=()), pos, ctx, model.rotate)
    kv = here.enter(kv.view(), inputs, ctx)
    reads = here.reads(kv, inputs, ctx)
    return live_positions(kv if reads is None or reads.visible is None else kv.keep(reads.visible))
