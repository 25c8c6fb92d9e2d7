"""Reading a prompt again, chunk by chunk, before anything is evicted (KVzip)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.contract import EMPTY, unique, value
from kvjax.core.drivers.steps import Attend, AttnStats, decided
from kvjax.core.scores.attention import Score


@value
class Reread:
    """How a prompt is repeated: instructions, and chunks of the text with some of what stands before each. To observe
    it in the phase "replay" gives the most attention that every token gets meanwhile, "B K S".
    """

    repeat: tuple[int, ...] = ()
    repeat_next: tuple[int, ...] = ()
    chunk: int = 2048
    overlap: int = 8
    sinks: int = 4

    def rows(self, ids: np.ndarray, first: int, size: int) -> np.ndarray:
        """What is read to repeat a prompt's chunk of `size` tokens from `first` on; nothing behind its end."""
        chunk = ids[first : first + size]
        before = np.array(
            self.repeat if not first else (*self.repeat_next, *ids[max(first - min(self.overlap, size), 0) : first])
        )
        return np.concatenate([before, chunk]).astype(np.int32) if len(chunk) else np.zeros(0, np.int32)


class Repeated(Score):
    """The most attention that a token gets while the prompt is repeated."""

    how: Reread

    def observe(self, phase):
        return (self.how,) if phase == "replay" else ()

    def __call__(self, slots):
        return slots.stats[self.how]


def rereads(state):
    """How the state's policy wants the prompt to be repeated, or None."""
    found = unique(o for p in state.plan.layers for o in p.observe("replay") if isinstance(o, Reread))
    if len(found) > 1:
        raise ValueError("layers want the prompt repeated in different ways")
    return found[0] if found else None


def reread(model, params, tokens, lengths, state, stats: AttnStats, how: Reread):
    """The state after its policy's update, which sees beside the prompt's rows what rows that repeat it give its tokens."""
    B, T = tokens.shape
    size = max(min(how.chunk, T), 1)
    found = [jnp.zeros(kv.pos.shape) for kv in state.layers]
    for first in range(0, T, size):
        rows = [how.rows(tokens[b, T - n :], first, size) for b, n in enumerate(lengths)]
        R = max(map(len, rows))
        ids = jnp.asarray(np.stack([np.pad(x, (R - len(x), 0)) for x in rows]))
        new = _repeat(model, params, ids, jnp.asarray([len(x) for x in rows]), jnp.int32(first), state, how, size)
        found = [jnp.maximum(x, y) for x, y in zip(found, new, strict=True)]
    layers = tuple((*x, y) for x, y in zip(stats.layers, found, strict=True))
    state, lost = _decide(state, dataclasses.replace(stats, layers=layers, names=tuple((*x, how) for x in stats.names)))
    if bool(lost.any()):
        raise ValueError("the policy keeps more tokens than `sizes` asked slots for")
    return state


@jax.jit
def _decide(state, stats):
    return decided(state, stats, Attend(dataclasses.replace(state, layers=()), None, None))


@functools.partial(jax.jit, static_argnums=(0, 6, 7))
def _repeat(model, params, ids, valid, first, state, how, size):
    R = ids.shape[1]
    column = jnp.arange(R)[None] - (R - valid)[:, None]
    pos = jnp.where(column >= 0, state.length[:, None] + column, EMPTY)

    def attend(kv, q, k, v, *, rotate, scale=None, window=None, softcap=None, **_):
        q, k = rotate(q, pos[:, None]), rotate(k, pos[:, None])
        both = kv.replace(memory=()).append(k, v, pos, grow=True)
        out = both.attend(q, pos, rotate=rotate, scale=scale, window=window, softcap=softcap).out
        (B, K, S), H = kv.pos.shape, q.shape[-1]
        logits = jnp.einsum("bkgrh,bksh->bkgrs", q.reshape(B, K, -1, R, H), both.k) * (
            H**-0.5 if scale is None else scale
        )
        logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
        at, own = both.pos, jnp.arange(S + R) >= S
        of_chunk = (at >= first) & (at < first + size)
        inside = (of_chunk | (at < jnp.minimum(how.sinks, first))) & ~own | own
        sees = (inside & (at != EMPTY))[:, :, None] & (at[:, :, None] <= pos[:, None, :, None])
        p = jax.nn.softmax(jnp.where(sees[:, :, None], logits, -jnp.inf), axis=-1, where=sees[:, :, None])
        p = jnp.where((pos != EMPTY)[:, None, None, :, None], p, 0.0)[..., :S].max((2, 3))
        return out, kv, jnp.where(of_chunk[..., :S], p, 0.0)

    return model(params, ids, state.layers, attend=attend, last_only=True)[2]
