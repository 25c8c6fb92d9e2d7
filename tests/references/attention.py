"""Attention and its column statistics in float64 numpy, one row at a time."""

import functools

import numpy as np
import scipy.special

from kvjax.pallas_kernels import Logits


def attention(q, k, v, q_pos, kv_pos, *, columns=(), logits=Logits(), bias=None):
    """(out, lse, columns) as `kvjax.pallas_kernels.attention` defines them."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    q_pos, kv_pos = np.asarray(q_pos), np.asarray(kv_pos)
    B, N, T, H = q.shape
    K, S = k.shape[1:3]
    G = N // K
    scale, softcap, window = H**-0.5 if logits.scale is None else logits.scale, logits.softcap, logits.window
    p, every = np.zeros((B, N, T, S)), np.zeros((B, N, T, S))
    nothing = np.full(N, -np.inf) if logits.nothing is None else np.asarray(logits.nothing, np.float64)
    lse = np.broadcast_to(nothing[None, :, None], (B, N, T)).copy()
    seen = np.zeros((B, K, T, S), bool)
    for b in range(B):
        for n in range(N):
            for t in range(T):
                visible = _visible(q_pos[b, t], kv_pos[b, n // G], window)
                seen[b, n // G, t] = visible
                x = scale * (k[b, n // G] @ q[b, n, t])
                if softcap is not None:
                    x = softcap * np.tanh(x / softcap)
                if bias is not None:
                    x = x + np.asarray(bias, np.float64)[b, n]
                every[b, n, t] = x
                if not np.isfinite(x[visible]).any():
                    continue
                lse[b, n, t] = scipy.special.logsumexp([*x[visible], nothing[n]])
                p[b, n, t, visible] = np.exp(x[visible] - lse[b, n, t])
    out = np.stack([[p[b, n] @ v[b, n // G] for n in range(N)] for b in range(B)])
    return (
        out,
        lse,
        [
            _column(
                c,
                *((p, seen) if c.softmax is None else _own_softmax(c.softmax, every, nothing, q_pos, kv_pos, window)),
                q_pos,
                kv_pos,
            )
            for c in columns
        ],
    )


def _visible(row, keys, window, causal=True):
    visible = (keys >= 0) & (keys <= row if causal else row >= 0)
    return visible if window is None else visible & (row - keys < window)


@functools.cache
def hash_uniform(seed, *indices):
    """`kvjax.pallas_kernels.columns.hash_uniform` of single numbers, in Python's integers."""
    h = int(seed)
    for i in indices:
        h ^= (int(i) * 0x9E3779B9 + 0x85EBCA6B) % 2**32
        h = (h ^ (h >> 16)) * 0x7FEB352D % 2**32
        h = (h ^ (h >> 15)) * 0x846CA68B % 2**32
        h ^= h >> 16
    return ((h >> 9) + 0.5) / 2**23


def _own_softmax(own, logits, nothing, q_pos, kv_pos, window):
    B, N, T, S = logits.shape
    K = kv_pos.shape[1]
    G = N // K
    before, seed, multiplier = (None if x is None else np.asarray(x) for x in (own.before, own.seed, own.multiplier))
    q_pos, kv_pos = np.asarray(q_pos), np.asarray(kv_pos)
    p, seen = np.zeros(logits.shape), np.zeros((B, K, T, S), bool)
    for b in range(B):
        for n in range(N):
            for t in range(T):
                keys = kv_pos[b, n // G]
                visible = _visible(q_pos[b, t], keys, window, own.causal)
                if before is not None:
                    visible &= keys < int(before[b])
                seen[b, n // G, t] = visible
                if not visible.any():
                    continue
                x, beside = logits[b, n, t].copy(), nothing[n]
                for s in np.nonzero(visible)[0]:
                    if own.noise == "constant":
                        x[s] += np.euler_gamma
                    elif own.noise is not None:
                        row = 0 if own.per == "key" else int(q_pos[b, t])
                        u = hash_uniform(int(seed[b]), n, row, int(keys[s]))
                        x[s] += (
                            -np.log(-np.log(u))
                            if own.noise == "gumbel"
                            else np.euler_gamma + np.pi / np.sqrt(6) * scipy.special.ndtri(u)
                        )
                if multiplier is not None:
                    x[np.isfinite(x)] *= float(multiplier[b, n // G, t])  # what -inf hides stays hidden
                    beside = beside * float(multiplier[b, n // G, t]) if np.isfinite(beside) else beside
                e = np.exp(x[visible] - x[visible].max())
                p[b, n, t, visible] = e / (e.sum() + np.exp(beside - x[visible].max()))
    return p, seen


def _column(c, p, seen, q_pos, kv_pos):
    B, N, T, S = p.shape
    K = seen.shape[1]
    if not c.count_self:
        p = p * (q_pos[:, None, :, None] != np.repeat(kv_pos, N // K, axis=1)[:, :, None])
    weight = np.ones((B, T)) if c.weight is None else np.asarray(c.weight, np.float64).copy()
    if c.rows is not None:
        weight[:, : max(T - c.rows, 0)] = 0
    reduce = {"mean": np.mean, "max": np.max, "sum": np.sum}.get(c.group)
    grouped = p.reshape(B, K, N // K, T, S)
    if c.threshold == "1/visible":
        theta = 1 / np.maximum(seen.sum(-1), 1)
    elif c.threshold == "1/position":
        theta = np.broadcast_to((1 / (np.maximum(q_pos, 0) + 1))[:, None], (B, K, T))
    else:
        theta = np.full((B, K, T), c.threshold)
    element = {
        "p": lambda x, theta: x,
        "p2": lambda x, theta: x**2,
        "above": lambda x, theta: (x > theta).astype(float),
    }[c.element]
    if c.group_at == "before":
        f = weight[:, None, :, None] * element(reduce(grouped, axis=2), theta[..., None])
        return f.sum(2) if c.summed else f[:, :, T - min(T, c.rows or T) :]
    f = weight[:, None, None, :, None] * element(grouped, theta[:, :, None, :, None])
    f = f.sum(3) if c.summed else f[:, :, :, T - min(T, c.rows or T) :]
    return f.reshape(B, N, *f.shape[3:]) if c.group is None else reduce(f, axis=2)
