"""Layers, statistics and attention matrices to test with."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from kvjax.cache.context import Context, Site, row_keys
from kvjax.cache.state import EMPTY, Chosen, map_slots
from kvjax.policy import empty_layer
from kvjax.scoring.stats import LayerStats, Moment
from kvjax.sizes.budget import as_count

import kvjax
from kvjax.pallas_kernels import attention


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


def kept(selection, row=0, head=0):
    """Kept positions as a list."""
    return np.nonzero(np.asarray(selection.keep[row, head]))[0].tolist()


def site(*, T=24, layer=0, num_layers=3, N=4, K=2, H=8, max_new_tokens=16):
    """A layer of a planned run."""
    return Site(layer, num_layers, N, K, H, T, max_new_tokens)


def token_ids(B, T, seed=0):
    """Random ids of the tiny model's vocabulary."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, 61, (B, T)), jnp.int32)


def context(site, *, length, prompt_length=None, phase="prefill", key=0, tokens=None):
    """A moment, after random tokens if none are given."""
    length = jnp.asarray(length, jnp.int32)
    prompt = length if prompt_length is None else jnp.asarray(prompt_length, jnp.int32)
    keys = jax.random.split(jax.random.key(key), length.shape[0])
    if tokens is None:
        tokens = token_ids(len(length), site.prompt_len if phase == "prefill" else 1, key)
    return Context(length, prompt, keys, site=site, phase=phase, ids=tokens)


EMBED_DIM = 32  # of the models that tests read with


def random_stats(policy, kv, ctx, seed=0, T=None):
    """What a policy would see if random queries stood at the last T slots."""
    B, K, S = kv.pos.shape
    T = S if T is None else T
    spec = policy.at(ctx.site).spec
    observed = spec.prompt if ctx.phase == "prefill" else spec.step
    ctx = dataclasses.replace(ctx, again=(jnp.zeros_like(ctx.length), ctx.length))
    q, _, _ = qkv(seed + 17, B=B, N=ctx.site.num_query_heads, K=K, T=T, H=kv.v.shape[-1])
    out_proj = jax.random.normal(jax.random.key(seed), (ctx.site.num_query_heads, kv.v.shape[-1], EMBED_DIM))
    pos = kv.pos[:, 0, S - T :]
    hidden = jax.random.normal(jax.random.key(seed + 1), (B, T, EMBED_DIM))
    moment = Moment(q, q, kv, pos, ctx, lambda x, pos: x, out_proj, hidden)
    requests = {o: o.columns(moment) for o in observed}
    columns = {o: c for o, c in requests.items() if c is not None}
    result = attention(q, kv.k, kv.v, pos, kv.pos, columns=tuple(columns.values()), implementation="reference")
    measured = dict(zip(columns, result.columns, strict=True))
    moment = dataclasses.replace(moment, measured=measured)
    return LayerStats(tuple(measured[o] if o in measured else o.measure(moment) for o in observed), observed)


def prompt_layer(policy, ctx, *, T=24, B=2, K=2, H=8, lengths=None, seed=0):
    """A layer that has just read a left-padded prompt."""
    lengths = np.full(B, T) if lengths is None else np.asarray(lengths)
    pos = jnp.asarray(np.maximum(np.arange(T) - (T - lengths)[:, None], -1), jnp.int32)
    _, k, v = qkv(seed, B=B, K=K, T=T, H=H)
    none = jnp.zeros((B, K, 0), jnp.int32)
    kv = kvjax.LayerKV(k[:, :, :0], v[:, :, :0], none, policy.at(ctx.site).init(B))
    return kvjax.cache.state.append(kv, k, v, pos)


def permute_slots(kv, stats, order):
    """The same layer and statistics with slots in another order "B K S"."""
    take = lambda x: jnp.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 3)), axis=2)
    kv = dataclasses.replace(kv, k=take(kv.k), v=take(kv.v), pos=take(kv.pos), memory=map_slots(take, kv.memory))

    def take_last(x):
        if isinstance(x, jax.Array) and x.ndim == 4 and x.shape[:3] == order.shape:
            return take(x)  # a vector a slot
        if not isinstance(x, jax.Array) or x.ndim < 3 or x.shape[-1] != order.shape[-1]:
            return x  # not a number a slot
        index = jnp.repeat(order, x.shape[1] // order.shape[1], axis=1)
        return jnp.take_along_axis(x, index.reshape(*index.shape[:2], *(1,) * (x.ndim - 3), index.shape[-1]), axis=-1)

    return kv, LayerStats(tuple(take_last(x) for x in stats.values), stats.observed)


def live_positions(kv):
    """Sorted live positions, a list for every row and head."""
    return [[sorted(p for p in head if p != EMPTY) for head in row] for row in np.asarray(kv.head_pos).tolist()]


@dataclasses.dataclass(frozen=True)
class Moments:
    """One layer from the end of its prompt on.

    Attributes:
      live: live positions "B K" lists after the prompt and after every later token.
      read: the positions that each row could read, its own included, where rows came one at a time.
      kv: the layer at the end.
    """

    live: list
    read: list
    kv: kvjax.LayerKV


def replay(policy, q, k, v, n, *, key=None, block=None, lengths=None, ids=None, rotate=lambda x, _: x, **how):
    """A layer that reads a prompt of `n` tokens, in blocks or at once, and then one token after the other.

    `how` it attends: its scale, its slopes, its window.
    """
    B, N, M, H = q.shape
    K = N if policy.at(site(N=N, K=k.shape[1])).spec.heads == "query_head" else k.shape[1]
    where = Site(0, 1, N, K, H, n, M - n)
    lengths = jnp.full((B,), n, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
    for length in set(lengths.tolist()):
        policy.check(where, length)
    keys, here = row_keys(key, B), policy.at(where)
    kv = empty_layer(here, B, jnp.float32)
    seen, live, read = jnp.zeros_like(lengths), [], []

    def tokens(kv, seen, first, last, phase):
        column = jnp.arange(first, last, dtype=jnp.int32)[None] - (n - lengths)[:, None]
        pos = jnp.maximum(column, EMPTY)
        seen = pos[:, -1] + 1
        new_ids = None if ids is None else ids[:, first:last]
        ctx = Context(seen, lengths, keys, site=where, phase=phase, ids=new_ids)
        if phase == "decode":
            kv = here.make_room(kv, dataclasses.replace(ctx, length=seen - 1))
        cut = lambda x: x[:, :, first:last]
        policy_ = here if last - first == 1 else None
        out_proj = jnp.ones((N, H, H))
        _, kv, stats = kvjax.attend(
            kv,
            cut(q),
            cut(k),
            cut(v),
            pos,
            ctx=ctx,
            rotate=rotate,
            observe=here.spec.observe(phase),
            policy=policy_,
            out_proj=out_proj,
            **how,
        )
        if policy_ is not None:
            shown = here.visible(Moment(cut(q), cut(q), kv, pos, ctx, lambda x, _: x, **how))
            shown = shown.mask(kv.num_slots) if isinstance(shown, Chosen) else shown
            shown = kv if shown is None else kvjax.evict(dataclasses.replace(kv, rank=None), shown)
            read.append(live_positions(shown))
        kv = here.step(kv, stats, ctx)
        return (kvjax.compact(kv, int(here.spec.capacity.max())) if phase == "prefill" else kv), seen

    block = n if block is None else block
    for first in range(n % -block, n, block):
        kv, seen = tokens(kv, seen, max(first, 0), first + block, "prefill")
    live.append(live_positions(kv))
    ctx = Context(seen, lengths, keys, site=where, phase="prefill")
    kv = here.finish(kv, ctx)
    for step in range(1, M - n + 1):
        kv, seen = tokens(kv, seen, n + step - 1, n + step, "decode")
        live.append(live_positions(kv))
    return Moments(live, read, kv)


def protected_counts(protect, length, budget):
    """(sinks, recent) for prompts of these lengths whose layers have these budgets."""
    return tuple(as_count(count, "count").table(length, budget) for count in (protect.sinks, protect.recent))
