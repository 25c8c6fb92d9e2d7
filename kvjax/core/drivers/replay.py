"""Reading a prompt again, chunk by chunk, before anything of it is evicted (KVzip).

Letters: B batch, T columns of the prompt, R rows that repeat a chunk, S slots.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.core.contract import EMPTY, Phase, Slots, unique, value
from kvjax.core.drivers.attend import Attend, decided
from kvjax.core.drivers.state import AttnStats, State
from kvjax.core.scores.attention import Score
from kvjax.core.storage import Storage


@value
class Reread:
    """How a prompt is repeated: an instruction, some tokens before a chunk, the chunk.

    Observed in the phase "replay", it gives the most attention that every token gets meanwhile, "B K S".

    Attributes:
      repeat: ids of the instruction before the first chunk.
      repeat_next: ids of the instruction before later ones.
      chunk: tokens of a chunk.
      overlap: tokens before a later chunk that are repeated with it.
      sinks: first tokens of the prompt that rows see beside the chunk.
    """

    repeat: tuple[int, ...] = ()
    repeat_next: tuple[int, ...] = ()
    chunk: int = 2048
    overlap: int = 8
    sinks: int = 4

    def rows(self, ids: Int[np.ndarray, "T"], first: int, size: int) -> Int[np.ndarray, "R"]:
        """The ids that repeat a prompt's chunk of `size` tokens from `first` on; none behind the prompt's end."""
        chunk = ids[first : first + size]
        before = np.array(
            self.repeat if not first else (*self.repeat_next, *ids[max(first - min(self.overlap, size), 0) : first])
        )
        return np.concatenate([before, chunk]).astype(np.int32) if len(chunk) else np.zeros(0, np.int32)


class Repeated(Score):
    """The most attention that a token gets while the prompt is repeated.

    Attributes:
      how: how it is repeated.
    """

    how: Reread

    def observe(self, phase: Phase) -> tuple[Any, ...]:
        """The attention while the prompt is repeated."""
        return (self.how,) if phase == "replay" else ()

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """That attention."""
        return slots.stats[self.how]


def rereads(state: State) -> Reread | None:
    """How the state's policy wants the prompt to be repeated, if it does.

    Raises:
      ValueError: layers that want it repeated in different ways.
    """
    found = unique(o for p in state.plan.layers for o in p.observe("replay") if isinstance(o, Reread))
    if len(found) > 1:
        raise ValueError(f"layers want the prompt repeated in different ways, such as {found[0]} and {found[1]}")
    return found[0] if found else None


def reread(
    model: Any,
    params: PyTree[Any],
    tokens: Int[np.ndarray, "B T"],
    lengths: Int[np.ndarray, "B"],
    state: State,
    stats: AttnStats,
    how: Reread,
) -> State:
    """The state after its policy's update, which also sees what attention tokens get while the prompt is repeated.

    Args:
      model, params: the model.
      tokens, lengths: the prompts, padded on the left, and their own lengths.
      state: the state that holds the whole prompts.
      stats: what was observed while they were read.
      how: how they are repeated.

    Raises:
      ValueError: a policy that keeps more tokens than it asked slots for.
    """
    T = tokens.shape[1]
    size = max(min(how.chunk, T), 1)
    found = [jnp.zeros(kv.pos.shape) for kv in state.layers]
    for first in range(0, T, size):
        rows = [how.rows(tokens[b, T - n :], first, size) for b, n in enumerate(lengths)]
        R = max(map(len, rows))
        ids = jnp.asarray(np.stack([np.pad(x, (R - len(x), 0)) for x in rows]))
        new = _repeat(model, params, ids, jnp.asarray([len(x) for x in rows]), jnp.int32(first), state, how, size)
        found = [jnp.maximum(x, y) for x, y in zip(found, new, strict=True)]
    state, lost = _decide(state, _with(stats, how, found))
    if bool(lost.any()):
        raise ValueError("the policy keeps more tokens than its `sizes` asked slots for")
    return state


def after_replay(state: State, stats: AttnStats, how: Reread) -> State:
    """The state after an update as in `reread`, but by attention of 0: for shapes."""
    return _decide(state, _with(stats, how, [jnp.zeros(kv.pos.shape) for kv in state.layers]))[0]


def _with(stats: AttnStats, how: Reread, found: list[Array]) -> AttnStats:
    layers = tuple((*x, y) for x, y in zip(stats.layers, found, strict=True))
    return dataclasses.replace(stats, layers=layers, names=tuple((*x, how) for x in stats.names))


@jax.jit
def _decide(state: State, stats: AttnStats) -> Any:
    return decided(state, stats, Attend(dataclasses.replace(state, layers=()), None, None))


@functools.partial(jax.jit, static_argnums=(0, 6, 7))
def _repeat(
    model: Any,
    params: PyTree[Any],
    ids: Int[Array, "B R"],
    valid: Int[Array, "B"],
    first: Int[Array, ""],
    state: State,
    how: Reread,
    size: int,
) -> tuple[Float[Array, "B K S"], ...]:
    """For every layer, the most attention that the tokens of a chunk get while it is repeated."""
    R = ids.shape[1]
    column = jnp.arange(R)[None] - (R - valid)[:, None]
    pos = jnp.where(column >= 0, state.length[:, None] + column, EMPTY)

    def attend(
        kv: Storage,
        q: Float[Array, "B N R H"],
        k: Float[Array, "B K R H"],
        v: Float[Array, "B K R H"],
        *,
        rotate: Callable[..., Array],
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        slopes: Any = None,
        **_: Any,
    ) -> tuple[Float[Array, "B N R H"], Storage, Float[Array, "B K S"]]:
        q, k = rotate(q, pos[:, None]), rotate(k, pos[:, None])
        both = kv.replace(memory=()).append(k, v, pos, grow=True)
        out = both.attend(q, pos, rotate=rotate, scale=scale, window=window, softcap=softcap, slopes=slopes).out
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

    where = {"positions": pos} if getattr(model.config, "learned_positions", False) else {}
    return model(params, ids, state.layers, attend=attend, last_only=True, **where)[2]
