"""Reading a prompt again, chunk by chunk, before anything of it is evicted (KVzip).

Letters: B batch, T columns of the prompt, R rows that repeat a chunk, S slots.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.core.contract import EMPTY, Phase, Slots, unique, value
from kvjax.core.drivers.attend import decided, embed, layer_step
from kvjax.core.drivers.state import AttnStats, State, Storage
from kvjax.core.scores.attention import Score
from kvjax.pallas_kernels.pytree import pytree, static


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
    outer, each = model.parts(params)
    found = [jnp.zeros(kv.pos.shape) for kv in state.layers]
    for first in range(0, T, size):
        rows = [how.rows(tokens[b, T - n :], first, size) for b, n in enumerate(lengths)]
        valid = np.array([*map(len, rows)], np.int32)
        ids = np.stack([np.pad(x, (valid.max() - len(x), 0)) for x in rows])
        x, _, pos, _ = embed(model, outer, ids, state.length, valid)
        attend = Repeat(pos, jnp.int32(first), how, size)
        for i, kv in enumerate(state.layers):
            x, _, new = layer_step(model, model.alike[i], each[i], x, kv, attend)
            found[i] = jnp.maximum(found[i], new)
    state, lost = decided(state, _with(stats, how, found))
    if bool(jnp.stack(lost).any()):
        raise ValueError("the policy keeps more tokens than its `sizes` asked slots for")
    return state


def after_replay(state: State, stats: AttnStats, how: Reread) -> State:
    """The state after an update as in `reread`, but by attention of 0: for shapes."""
    return decided(state, _with(stats, how, [jnp.zeros(kv.pos.shape) for kv in state.layers]))[0]


def _with(stats: AttnStats, how: Reread, found: list[Array]) -> AttnStats:
    layers = tuple((*x, y) for x, y in zip(stats.layers, found, strict=True))
    return dataclasses.replace(stats, layers=layers, names=tuple((*x, how) for x in stats.names))


@pytree
class Repeat:
    """What a layer calls with the rows that repeat a chunk: it stores none of them.

    Attributes:
      pos: their positions, `EMPTY` for padding.
      first: position of the chunk's first token.
      how: how the prompt is repeated.
      size: tokens of the chunk.
    """

    pos: Int[Array, "B R"]
    first: Int[Array, ""]
    how: Reread = static(default=Reread())
    size: int = static(default=1)

    def __call__(
        self,
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
        """What attention gives, the cache as it was, and the most attention that each token of the chunk gets."""
        pos, first, (B, K, S), R, H = self.pos, self.first, kv.pos.shape, q.shape[2], q.shape[3]
        q, k = rotate(q, pos[:, None]), rotate(k, pos[:, None])
        both = kv.replace(memory=()).append(k, v, pos, grow=True)
        out = both.attend(q, pos, rotate=rotate, scale=scale, window=window, softcap=softcap, slopes=slopes).out
        logits = jnp.einsum("bkgrh,bksh->bkgrs", q.reshape(B, K, -1, R, H), both.k) * (
            H**-0.5 if scale is None else scale
        )
        logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
        at, own = both.pos, jnp.arange(S + R) >= S
        of_chunk = (at >= first) & (at < first + self.size)
        inside = (of_chunk | (at < jnp.minimum(self.how.sinks, first))) & ~own | own
        sees = (inside & (at != EMPTY))[:, :, None] & (at[:, :, None] <= pos[:, None, :, None])
        p = jax.nn.softmax(jnp.where(sees[:, :, None], logits, -jnp.inf), axis=-1, where=sees[:, :, None])
        p = jnp.where((pos != EMPTY)[:, None, None, :, None], p, 0.0)[..., :S].max((2, 3))
        return out, kv, jnp.where(of_chunk[..., :S], p, 0.0)
