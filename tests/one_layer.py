"""One layer that reads a prompt and then decodes: the setting of the tests of disagreements."""

import functools

import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.cache.context import row_keys
from tests import helpers
from tests.references.attention import hash_uniform
from tests.references.policies import Layer, accumulating, replay

N, K, H, PROMPT, M = 4, 2, 8, 16, 22
BUDGET = 7

q, k, v = helpers.qkv(34, B=1, N=N, K=K, T=M, H=H, sharpness=2.0)
layer = Layer(q[0], k[0])
P = layer.prompt(PROMPT)


@functools.cache
def moments(policy, **kwargs):
    return helpers.replay(policy, q, k, v, PROMPT, **kwargs)


def history(policy, **kwargs):
    """Live positions "K" after the prompt and after every step."""
    return [step[0] for step in moments(policy, **kwargs).live]


def prompt_kept(policy):
    return history(policy)[0]


def prompt_score(policy):
    """Scores "K n" of the prompt's tokens."""
    cut = (x[:, :, :PROMPT] for x in (q, k, v))
    return np.asarray(kvjax.evict_layer(policy, *cut).score[0])


def differs(policy, default, plain):
    """The option does what the plain formulation does, and that is not what the default does."""
    assert history(policy) == plain
    assert history(default) != plain


def sums(**kwargs):
    """The history of a policy that sums a statistic of every row."""
    return replay(layer, PROMPT, accumulating(layer, BUDGET, **kwargs))


def noise(i, per="call", seed=None):
    """Gumbel noise "N M" of row `i`."""
    seed = SEED if seed is None else seed
    u = np.array([[hash_uniform(seed, h, i if per == "call" else 0, j) for j in range(M)] for h in range(N)])
    return -np.log(-np.log(u))


def _seed():
    one = jnp.ones((1,), jnp.int32)
    site = helpers.site(layer=0)
    return int(kvjax.Context(one, one, row_keys(None, 1), site=site, phase="prefill").seed[0])


SEED = _seed()
