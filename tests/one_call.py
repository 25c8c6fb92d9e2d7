"""One call of one layer under a policy, as arrays: the setting of the laws."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.contract import EMPTY, AttentionInputs, Context, LayerInfo, Policy, Stats, compiled
from kvjax.pallas_kernels import Columns
from kvjax.storage import empty

B, K, N, T, H, D = 2, 2, 4, 40, 8, 12
LENGTHS = np.array([T, 29], np.int32)
LAYERS = 3


def unturned(x, pos):
    """The rotation of a layer whose tensors come rotated."""
    return x


@functools.cache
def tensors():
    """(q, k, v), and what else a layer has; later heads look more sharply, and all project alike."""
    draw = np.random.default_rng(5)
    normal = lambda *shape: draw.standard_normal(shape).astype(np.float32)
    sharpness = np.linspace(0.5, 3.0, N, dtype=np.float32)[None, :, None, None]
    more = {"out_proj": np.broadcast_to(normal(1, H, D), (N, H, D)), "hidden": normal(B, T, D)}
    more["tokens"] = draw.integers(0, 120, (B, T)).astype(np.int32)
    return (normal(B, N, T, H) * sharpness, normal(B, K, T, H), normal(B, K, T, H)), more


def keys():
    """A PRNG key for each sequence."""
    return jax.random.split(jax.random.key(9), B)


def info_of(policy: Policy, layer: int) -> LayerInfo:
    """The layer of a run that decodes nothing."""
    return LayerInfo(layer, LAYERS, N, N if policy.layout.by_query_head else K, H, T, 0, D)


def updated(policy, kv, stats, ctx):
    """The layer after the policy's decision. `stats` are in the order of what the policy observes."""
    stats = Stats(zip(policy.observe("prefill"), stats, strict=True))
    return policy.update_layers((kv,), (stats,), (ctx,))[0] if policy.joint else policy.update(kv, stats, ctx)


@functools.cache
def read(policy: Policy, layer: int = 1):
    """(the layer's policy, its layer before it decides, what was observed, the moment) of a batch of prompts.

    The sequences: one of T tokens, one of 29, and the first with its kv heads, each with its query heads, swapped.
    """
    here = policy.at(layer, LAYERS)
    info, rows = info_of(here, layer), np.array([0, 1, 0])
    hparams = here.sizes(info, LENGTHS[rows]).hparams
    return compiled(here), *_read(compiled(here), info, hparams, jnp.asarray(LENGTHS[rows]), jnp.asarray(rows))


@functools.partial(jax.jit, static_argnames=("policy", "info"))
def _read(policy, info, hparams, lengths, rows):
    (q, k, v), more = jax.tree.map(jnp.asarray, tensors())
    (q, k, v), hidden, tokens = (x[rows] for x in (q, k, v)), more["hidden"][rows], more["tokens"][rows]
    G = N // K
    q = q.at[2].set(q[2].reshape(K, G, T, H)[::-1].reshape(N, T, H))
    k, v = k.at[2].set(k[2, ::-1]), v.at[2].set(v[2, ::-1])
    k, v = (jnp.repeat(x, info.num_kv_heads // K, axis=1) for x in (k, v))
    pos = jnp.maximum(jnp.arange(T, dtype=jnp.int32)[None] - (T - lengths)[:, None], EMPTY)
    ctx = Context(
        *(lengths, lengths, keys()[rows], jnp.int32(info.layer), jnp.zeros_like(lengths), hparams, (), tokens),
        width=T,
        capacity=T,
    )
    kv = empty(info, policy, len(lengths), k.dtype)
    kv = kv.append(k, v, pos)
    told = AttentionInputs(q, q, kv.replace(memory=()), pos, ctx, unturned, more["out_proj"], hidden)
    found = {o: o(told) for o in policy.observe("prefill")}
    columns = {o: x for o, x in found.items() if isinstance(x, Columns)}
    measured = kv.attend(q, pos, tuple(columns.values()), policy.reads(kv, told, ctx), rotate=unturned)
    found |= dict(zip(columns, measured.columns, strict=True))
    return kv, tuple(found.values()), ctx


def of_rows(rows, kv, stats, ctx):
    """Other sequences of the same batch."""
    pick = lambda tree: jax.tree.map(lambda x: x[rows], tree)
    own = {n: pick(getattr(ctx, n)) for n in ("length", "prompt_length", "keys", "max_new_tokens", "hparams", "ids")}
    return pick(kv), pick(stats), dataclasses.replace(ctx, **own)


def permuted(order, kv, stats):
    """The same layer and what was observed of it with slots in another order "B K S"."""
    _, K, S = order.shape
    take = lambda x: jnp.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 3)), axis=2)

    def seen(x):
        if x.ndim == 4 and x.shape[:3] == order.shape and x.shape[-1] != S:
            return take(x)  # a vector a slot
        if x.ndim < 3 or x.shape[-1] != S:
            return x  # not a number a slot
        index = jnp.repeat(order, x.shape[1] // K, axis=1)
        return jnp.take_along_axis(x, index.reshape(*index.shape[:2], *(1,) * (x.ndim - 3), S), axis=-1)

    weight = None if kv.log_weight is None else take(kv.log_weight)
    moved = kv.replace(k=take(kv.k), v=take(kv.v), pos=take(kv.pos), memory=kv.how.of_slots(take, kv.memory))
    return moved.replace(log_weight=weight), jax.tree.map(seen, stats)


@functools.cache
def order(heads: int):
    """An order of slots for every head of one sequence."""
    draw = np.random.default_rng(5)
    return np.stack([draw.permutation(T) for _ in range(heads)])[None]


HOLES = np.arange(T) % 5 == 0


@functools.cache
def decided(policy: Policy, layer: int = 1):
    """(layers after the policy's decision, the same decided once more).

    The sequences are those of `read`, the first one with its slots in another order, and the first one with holes.
    """
    return _decided(*read(policy, layer))


@functools.partial(jax.jit, static_argnames="policy")
def _decided(policy, kv, stats, ctx):
    first = of_rows(np.array([0]), kv, stats, ctx)
    moved = permuted(order(kv.pos.shape[1]), *first[:2])
    holes = first[0].keep(jnp.broadcast_to(~HOLES, first[0].pos.shape))
    join = lambda *trees: jax.tree.map(lambda *x: jnp.concatenate(x), *trees)
    kv, stats = join(kv, moved[0], holes), join(stats, moved[1], first[1])
    ctx = of_rows(np.array([0, 1, 2, 0, 0]), kv, stats, ctx)[2]
    once = updated(policy, kv, stats, ctx)
    return kv, once, updated(policy, once, stats, ctx)
