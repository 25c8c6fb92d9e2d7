"""One layer under eviction in float64 numpy: one sequence, one row after the other, sets of positions."""

import numpy as np


class Layer:
    """Queries "N M H" and keys "K M H" of M tokens; who still holds which of them is the caller's affair."""

    def __init__(self, q, k):
        self.q, self.k = np.asarray(q, np.float64), np.asarray(k, np.float64)
        self.num_heads, self.num_tokens, self.head_dim = self.q.shape
        self.num_kv_heads = len(self.k)
        self.group_size = self.num_heads // self.num_kv_heads

    def row(self, head, i, keys, *, factor=1.0, noise=None):
        """What row `i` of a query head gives to all tokens when it may read the given ones."""
        x = self.k[head // self.group_size] @ self.q[head, i] / np.sqrt(self.head_dim)
        x = (x if noise is None else x + noise) * factor
        p = np.zeros(self.num_tokens)
        keys = sorted(keys)
        if keys:
            e = np.exp(x[keys] - x[keys].max())
            p[keys] = e / e.sum()
        return p

    def rows(self, i, read, **kwargs):
        """ "N M" of row `i`, where kv head `g` reads the tokens `read[g]`."""
        return np.stack([self.row(h, i, read[h // self.group_size], **kwargs) for h in range(self.num_heads)])

    def prompt(self, n, **kwargs):
        """Causal attention "N n n"."""
        everything = lambda i: [range(i + 1)] * self.num_kv_heads
        return np.stack([self.rows(i, everything(i), **kwargs)[:, :n] for i in range(n)], axis=1)

    def group(self, x, reduce=np.mean):
        """ "N ..." to "K ..."."""
        return reduce(x.reshape(self.num_kv_heads, self.group_size, *x.shape[1:]), axis=1)


def best(score, count, among):
    """The `count` tokens of highest score; of equals the newer."""
    return sorted(sorted(among, key=lambda j: (score[j], j), reverse=True)[: max(count, 0)])


def keep(score, live, length, budget, *, sinks=0, recent=0, safe=()):
    """Protected tokens, and the best others that a budget has room for."""
    stay = {j for j in live if j < sinks or j >= length - recent or j in safe}
    return sorted(stay | set(best(score, budget - len(stay), set(live) - stay)))


def replay(layer, n, step, *, attend=None):
    """Live tokens "K" lists after the prompt of `n` tokens and after every later row.

    Args:
      layer: the layer.
      n: tokens of the prompt, which is read densely.
      step: `(i, p, live) -> live`, called after every row; its answer counts from the prompt's last row on.
      attend: `(i, live) -> "N M"`, what the step sees of a row; the model's softmax if None.
    """
    live, history = [set() for _ in range(layer.num_kv_heads)], []
    for i in range(layer.num_tokens):
        live = [{*tokens, i} for tokens in live]
        kept = step(i, layer.rows(i, live) if attend is None else attend(i, live), live)
        if i >= n - 1:
            live = [set(tokens) for tokens in kept]
            history.append([sorted(tokens) for tokens in live])
    return history


def accumulating(layer, budget, *, element=None, final=None, decay=None, sinks=0, recent=0, safe=None):
    """The step of a policy that sums a statistic of every row and evicts at every one.

    Args:
      layer: the layer.
      budget: tokens.
      element: `(i, "K M" of p, live) -> "K M"`, what is summed; p itself if None.
      final: `(i, sums) -> "K M"`, the score; the sums if None.
      decay: `i -> factor` of the sums before row `i` is added.
      sinks, recent: protected tokens.
      safe: `(i, g, live) -> tokens` that are protected besides.
    """
    sums = np.zeros((layer.num_kv_heads, layer.num_tokens))

    def step(i, p, live):
        nonlocal sums
        p = layer.group(p)
        sums = sums * (1 if decay is None else decay(i)) + (p if element is None else element(i, p, live))
        score = sums if final is None else final(i, sums)
        others = lambda g: () if safe is None else safe(i, g, live[g])
        return [
            keep(score[g], live[g], i + 1, budget, sinks=sinks, recent=recent, safe=others(g))
            if len(live[g]) > budget
            else live[g]
            for g in range(layer.num_kv_heads)
        ]

    return step


def pool(x, kernel, kind="max", *, count=None):
    """Stride-1 pooling of a vector; averages divide by `count(entries under the kernel)`, by the kernel if None."""
    half = kernel // 2
    under = [x[max(j - half, 0) : j + half + 1] for j in range(len(x))]
    if kind == "max":
        return np.array([u.max() for u in under])
    return np.array([u.sum() / (kernel if count is None else count(len(u))) for u in under])
