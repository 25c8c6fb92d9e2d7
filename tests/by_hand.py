"""Layers and attention matrices that can be checked by hand."""

import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.contract import AttentionInputs, Context, LayerInfo, Slots, Stats
from kvjax.run.state import row_keys
from kvjax.storage import Layer
from tests import tensors
from tests.tensors import live_positions


def uniform_rows(n):
    return np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]


def read(policy, p, **more):
    """(kept "K" lists, scores "K n") of a prompt whose attention is "n n", or "G n n" for a group of query heads."""
    *arrays, scale = tensors.from_probabilities(p)
    even = [jnp.pad(x, [(0, 0)] * 3 + [(0, x.shape[-1] % 2)]) for x in arrays]  # as widths of heads are
    return read_tensors(policy, *even, scale=scale, **more)


def read_tensors(policy, q, k, v, *, scale=None, lengths=None, **more):
    layers, scores = tensors.evicted(policy, [{"q": q, "k": k, "v": v, **more}], lengths=lengths, scale=scale)
    return live_positions(layers[0])[0], None if scores[0] is None else scores[0][0]


def keep(policy, p, **more):
    return read(policy, p, **more)[0][0]


def gone(policy, p):
    lost = sorted(set(range(len(p))) - set(keep(policy, p)))
    return lost[0] if len(lost) == 1 else lost


def moment(policy, length, *, prompt, new=16, N=1, K=1, H=8, phase="decode"):
    """The moment of one sequence in the only layer."""
    one = lambda n: jnp.asarray([n], jnp.int32)
    info = LayerInfo(0, 1, N, K, H, prompt, new)
    hparams = policy.sizes(info, np.array([prompt])).hparams if isinstance(policy, kvjax.Policy) else ()
    return Context(
        one(length), one(prompt), row_keys(None, 1), jnp.int32(0), one(new), hparams, phase=phase, width=prompt
    )


def cache(pos, memory=(), *, H=8, k=None, v=None):
    """A layer of one sequence and head that holds tokens at given positions."""
    pos = jnp.asarray([[pos]], jnp.int32)
    zeros = jnp.zeros((*pos.shape, H))
    fault = jnp.zeros(pos.shape[:2], bool)
    return Layer(zeros if k is None else k, zeros if v is None else v, pos, fault, memory)


def numbers(x):
    """Numbers of every slot of one head."""
    return jnp.asarray([[x]], jnp.float32)


def inputs_of(kv, pos, ctx, q=None):
    q = jnp.zeros((1, 1, len(pos[0]), kv.k.shape[-1])) if q is None else q
    return AttentionInputs(q, q, kv, jnp.asarray(pos, jnp.int32), ctx, tensors.unturned)


def slots_of(kv, ctx=None, stats=None, *, protected=None, hparams=(), memory=()):
    protected = jnp.zeros(kv.pos.shape, bool) if protected is None else protected
    return Slots(kv, Stats(stats or {}), ctx, kv.live & ~protected, protected, memory, hparams)
