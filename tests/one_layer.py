"""One layer that reads a prompt and then decodes: the setting of the tests of disagreements."""

import functools

import jax.numpy as jnp
import numpy as np

from kvjax.contract import Context
from kvjax.drivers.state import row_keys
from tests import tensors
from tests.references.attention import hash_uniform
from tests.references.policies import Layer, accumulating, replay

N, K, H, PROMPT, M = 4, 2, 8, 16, 22
BUDGET = 7

q, k, v = tensors.qkv(34, B=1, N=N, K=K, T=M, H=H, sharpness=2.0)
TENSORS = [{"q": q, "k": k, "v": v}]
IN_PROMPT = [{name: x[:, :, :PROMPT] for name, x in TENSORS[0].items()}]
layer = Layer(q[0], k[0])
P = layer.prompt(PROMPT)


@functools.cache
def moments(policy, **how):
    return tensors.replay(policy, TENSORS, PROMPT, **how)


def history(policy, **how):
    """Live positions "K" after the prompt and after every step."""
    return [step[0] for step in moments(policy, **how).live]


def reads(policy):
    """The positions "K" that every decode row reads."""
    return [row[0] for row in moments(policy, reads=True).read]


@functools.cache
def _read(policy):
    return tensors.evicted(policy, IN_PROMPT)


def prompt_kept(policy):
    return tensors.live_positions(_read(policy)[0][0])[0]


def prompt_score(policy):
    """Scores "K n" of the prompt's tokens."""
    return _read(policy)[1][0][0]


def differs(policy, default, plain):
    """The option does what the plain formulation does, and that is not what the default does."""
    assert history(policy) == plain
    assert history(default) != plain


def sums(**kwargs):
    """The history of a policy that sums a statistic of every row."""
    return replay(layer, PROMPT, accumulating(layer, BUDGET, **kwargs))


def noise(i, per="call"):
    """Gumbel noise "N M" of row `i`."""
    u = np.array([[hash_uniform(SEED, h, i if per == "call" else 0, j) for j in range(M)] for h in range(N)])
    return -np.log(-np.log(u))


def moment(key=None, length=PROMPT):
    """The first layer's moment after a prompt of one sequence."""
    one = jnp.asarray([length], jnp.int32)
    return Context(one, one, row_keys(key, 1), jnp.int32(0), jnp.asarray([M - PROMPT], jnp.int32))


SEED = int(moment().seed()[0])
