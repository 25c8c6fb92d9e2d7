"""Central differences, and a model that computes in float64 throughout, which the project's models do not."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvjax import models

L, K, G, DIM = 2, 2, 2, 6  # layers, kv heads, query heads of each, channels of a head
VOCAB, E, F = 11, 12, 16  # ids, residual stream, hidden units


def central(f, x, step=1e-5):
    """Central differences of a scalar function, entry by entry, in float64."""
    x = np.asarray(x, np.float64)
    found = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        found[i] = (float(f(jnp.asarray(up))) - float(f(jnp.asarray(down)))) / (2 * step)
    return found


def relative(found, expected):
    """The largest difference, in units of the largest number."""
    return np.abs(np.asarray(found) - expected).max() / max(np.abs(expected).max(), 1e-12)


def turned(x, pos, xp):
    """Halves of heads rotated by their positions, in the precision of `x`."""
    angle = pos[..., None] * xp.asarray([1.0, 0.4, 0.1]).reshape(*(1,) * pos.ndim, 3)
    cos, sin = xp.cos(angle), xp.sin(angle)
    a, b = x[..., :3], x[..., 3:]
    return xp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@dataclasses.dataclass(frozen=True)
class Wide:
    """A small transformer: no normalisation, tanh between two matrices."""

    config: models.ModelConfig = models.ModelConfig(
        VOCAB, E, F, num_layers=L, num_query_heads=K * G, num_kv_heads=K, head_dim=DIM, dtype="float64"
    )

    @staticmethod
    def init(seed=3):
        """Parameters, arrays of numpy."""
        rng = np.random.default_rng(seed)
        random = lambda *shape, fan: rng.normal(size=(L, *shape)) * fan**-0.5
        return {
            "embedding": rng.normal(size=(VOCAB, E)),
            "q": 1.5 * random(K * G, E, DIM, fan=E),
            "k": 1.5 * random(K, E, DIM, fan=E),
            "v": random(K, E, DIM, fan=E),
            "out": random(K * G, DIM, E, fan=K * G * DIM),
            "up": random(E, F, fan=E),
            "down": random(F, E, fan=F),
        }

    alike = (0,) * L

    def parts(self, params):
        """The embedding, and the matrices of every layer."""
        return params["embedding"], tuple({n: params[n][i] for n in params if n != "embedding"} for i in range(L))

    def embed(self, params, tokens, pos):
        """Vectors of tokens."""
        return params[tokens]

    def block(self, layer, params, x, cache, attend):
        """Attention, and two matrices."""
        rotate = lambda x, pos: turned(x, pos.astype(x.dtype), jnp)
        q, k, v = (jnp.einsum("bte,neh->bnth", x, params[n]) for n in "qkv")
        how = {"layer": layer, "rotate": rotate, "out_proj": params["out"], "hidden": x}
        out, cache, seen = attend(cache, q, k, v, **how)
        x = x + jnp.einsum("bnth,nhe->bte", out, params["out"])
        return x + jnp.tanh(x @ params["up"]) @ params["down"], cache, seen

    def head(self, params, x):
        """Products with the vectors of tokens."""
        return x @ params.T

    def __call__(self, params, tokens, *, attend):
        """Logits, without a cache."""
        outer, each = self.parts(params)
        x = self.embed(outer, tokens, None)
        for i, own in enumerate(each):
            x, _, _ = self.block(i, own, x, None, attend)
        return self.head(outer, x)
