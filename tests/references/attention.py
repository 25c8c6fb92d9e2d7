"""Attention and its column statistics in float64 numpy, one row at a time."""

import numpy as np


def attention(q, k, v, q_pos, kv_pos, *, columns=(), scale, window=None, softcap=None):
    """(out, lse, columns) as `pallas_kernels.attention` defines them."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    q_pos, kv_pos = np.asarray(q_pos), np.asarray(kv_pos)
    B, N, T, _ = q.shape
    K, S = k.shape[1:3]
    G = N // K
    p = np.zeros((B, N, T, S))
    lse = np.full((B, N, T), -np.inf)
    seen = np.zeros((B, K, T, S), bool)
    for b in range(B):
        for n in range(N):
            for t in range(T):
                visible = (kv_pos[b, n // G] >= 0) & (kv_pos[b, n // G] <= q_pos[b, t])
                if window is not None:
                    visible &= q_pos[b, t] - kv_pos[b, n // G] < window
                seen[b, n // G, t] = visible
                if not visible.any():
                    continue
                x = scale * (k[b, n // G] @ q[b, n, t])
                if softcap is not None:
                    x = softcap * np.tanh(x / softcap)
                top = x[visible].max()
                lse[b, n, t] = top + np.log(np.exp(x[visible] - top).sum())
                p[b, n, t, visible] = np.exp(x[visible] - lse[b, n, t])
    out = np.stack([[p[b, n] @ v[b, n // G] for n in range(N)] for b in range(B)])
    return out, lse, [_column(c, p, q_pos, seen, K) for c in columns]


def _column(c, p, q_pos, seen, K):
    B, N, T, S = p.shape
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
        f = element(reduce(grouped, axis=2), theta[..., None])
        return np.einsum("bt,bkts->bks", weight, f)
    sums = np.einsum("bt,bkgts->bkgs", weight, element(grouped, theta[:, :, None, :, None]))
    return sums.reshape(B, N, S) if c.group is None else reduce(sums, axis=2)
