"""Reading a prompt again, chunk by chunk, before anything of it is evicted (KVzip).

Letters: B batch, T columns of the prompt, R rows that repeat a chunk, W keys that they see, S slots.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from kvjax.contract import EMPTY, Model, Positions, Rotate, Stats, kv_layers, kv_sources, turned_queries
from kvjax.observe import Queries, Reread
from kvjax.pallas_kernels import Logits
from kvjax.pallas_kernels.columns import accumulator
from kvjax.pallas_kernels.pytree import pytree, static
from kvjax.run.apply import evict_layers
from kvjax.run.checks import check_ids
from kvjax.run.layers import embed, in_turn, layer_step
from kvjax.run.plan import Plan
from kvjax.run.state import AttnStats, State
from kvjax.storage import Storage

_LOGITS = 2**20  # of a block of rows, 4 MiB in float32
_ROWS = 32  # of a block at least, as few take longer


def check_rereads(model: Model, plan: Plan, known: bool) -> None:
    """Refuses traced prompts, instructions outside the vocabulary, and repetitions beyond learned positions."""
    if not known:
        raise ValueError(
            "the policy reads prompts again before anything is evicted, which needs known prompts; read them outside "
            "of jit"
        )
    if early := [n for n in kv_sources(model.config) if n < kv_layers(model.config)[-1]]:
        raise ValueError(
            f"the policy reads prompts again, but layers {early} read other layers' keys and values, and layers behind "
            "them hold some; choose a policy that reads prompts once"
        )
    width, config = plan.infos[0].prompt_len, model.config
    for how in plan.again:
        check_ids(model, (*how.repeat, *how.repeat_next, *how.suffix))
        most, rows = getattr(config, "max_position", 0), how.most(width)
        if getattr(config, "learned_positions", False) and width + rows > most:
            raise ValueError(
                f"a prompt of {width} tokens and {rows} that repeat a chunk of it are {width + rows}, but the model "
                f"has learned {most} positions; use fewer, or smaller chunks"
            )


def repeated(
    model: Model,
    params: PyTree,
    tokens: Int[np.ndarray, "B T"],
    lengths: Int[np.ndarray, "B"],
    state: State,
    stats: AttnStats,
    after_layer: Callable[[], object] = lambda: None,
) -> AttnStats:
    """Repeats the prompt. Returns `stats` with the attention that its tokens get meanwhile.

    `state` holds the whole prompts, and `stats` is what was observed while they were read. `after_layer` is called
    after each layer of each chunk.
    """
    T, plan, (outer, each) = tokens.shape[1], state.plan, model.parts(params)
    asked = kv_layers(model.config)[-1] + 1  # of those behind, nobody sees the rows
    for how in plan.again:
        found, R = [jnp.zeros(kv.pos.shape) for kv in state.layers], how.most(T)
        for first in how.firsts(T):
            rows = [how.rows(tokens[b, T - n :], first, T) for b, n in enumerate(lengths)]
            ids = np.stack([np.pad(x, (R - len(x), 0)) for x in rows])
            x, _, pos, _ = embed(model, outer, ids, state.length, np.array([*map(len, rows)], np.int32))
            sizes = [how.size(T) if how in p.observe("replay") else 0 for p in plan.layers]
            attends = [Repeat(pos, jnp.int32(first), state.length, how, size) for size in sizes]
            every = [*zip(range(len(attends)), state.layers, attends, strict=True)]
            others = [(None, own, Positions(pos)) for own in state.others]
            for n, (i, kv, attend) in enumerate(in_turn(model, every, others)[:asked]):
                x, _, new = layer_step(model, model.alike[n], each[n], x, kv, attend)
                if i is not None and new is not None:
                    found[i] = jnp.maximum(found[i], new)
                after_layer()
        stats = _with(stats, how, found)
    return stats


def after_replay(state: State, stats: AttnStats) -> State:
    """The state after the prompt was repeated, but by attention of 0: for shapes."""
    for how in state.plan.again:
        stats = _with(stats, how, [jnp.zeros(kv.pos.shape) for kv in state.layers])
    return evict_layers(state, stats)[0]


def _with(stats: AttnStats, how: Reread, found: list[Array]) -> AttnStats:
    layers = tuple(Stats({**x, how: y}) for x, y in zip(stats.layers, found, strict=True))
    return dataclasses.replace(stats, layers=layers)


@pytree
class Repeat:
    """The attention of a layer for rows that repeat a chunk; it stores none of them.

    Attributes:
      pos: their positions, `EMPTY` for padding.
      first: position of the chunk's first token.
      length: tokens of each prompt.
      how: how the prompt is repeated.
      size: tokens of the largest chunk; 0 where nobody asks what they get.
    """

    pos: Int[Array, "B R"]
    first: Int[Array, ""]
    length: Int[Array, "B"]
    how: Reread = static(default=Reread())
    size: int = static(default=0)

    def __call__(
        self,
        kv: Storage,
        q: Float[Array, "B N R H"],
        k: Float[Array, "B _ R H"],
        v: Float[Array, "B _ R H"],
        *,
        layer: int,
        rotate: Rotate,
        out_proj: Float[Array, "N H D"] | None = None,
        hidden: Float[Array, "B R D"] | None = None,
        logits: Logits = Logits(),
    ) -> tuple[Float[Array, "B N R H"], Storage, Float[Array, "B K S"] | None]:
        """Returns the attention output, the cache as it was, and each chunk token's largest attention, if `size`."""
        del layer
        K, pos = kv.pos.shape[1], self.pos
        k, v = (jnp.repeat(x, K // k.shape[1], axis=1) for x in (k, v))
        k = k if kv.how.positions == "rank" else rotate(k, pos[:, None])
        q = turned_queries(rotate, q, pos[:, None])  # nothing is evicted, so that ranks are positions
        both = kv.replace(memory=()).append(k, v, pos)
        out = both.attend(q, pos, rotate=rotate, logits=logits).out
        if not self.size:
            return out, kv, None
        bias = both.bias(q.shape[1] // K, logits.slopes)
        rows = Queries(q, pos, bias, dataclasses.replace(logits, slopes=None)), both.keys(rotate), both.values
        if not self.how.plus:
            return out, kv, self._most(*rows)
        if out_proj is None or hidden is None:
            raise ValueError("Reread(plus=True) needs the output projection and hidden states, which the model lacks")
        norm = jnp.linalg.norm(hidden.astype(jnp.float32), axis=-1)
        return out, kv, self._most(*rows, 1.0 / jnp.where(norm > 0, norm, 1.0), out_proj)

    def _most(
        self,
        rows: Queries,
        k: Float[Array, "B K X H"],
        v: Float[Array, "B K X V"],
        factor: Float[Array, "B R"] | None = None,
        out_proj: Float[Array, "N V D"] | None = None,
    ) -> Float[Array, "B K S"]:
        """The largest attention of any row to each token of the chunk, 0 elsewhere, by blocks of rows.

        Args:
          rows: the rows.
          k, v: keys and values of the prompt's S slots and, behind these, of the R rows.
          factor: what each row's probabilities are multiplied by, None for 1.
          out_proj: weighs each token by the norm of its projected value, None for 1.
        """
        (B, N, R, H), K, S = rows.q.shape, k.shape[1], k.shape[2] - rows.q.shape[2]
        G, dtype, early = N // K, accumulator(rows.q.dtype), jnp.arange(min(self.how.sinks, S))[None]
        inside = jnp.arange(self.size)[None] + self.first
        early = jnp.broadcast_to(jnp.where(early < self.first, early, EMPTY), (B, early.shape[1]))
        inside = jnp.where(inside < self.length[:, None], inside, EMPTY)
        pos = jnp.concatenate([early, inside], axis=1)
        slot = jnp.maximum(pos + (S - self.length)[:, None], 0)  # a whole prompt lies in the last slots, in its order

        def seen(x: Float[Array, "B M X *H"]) -> Float[Array, "B M W *H"]:
            """Entries of sinks, chunk and the rows themselves."""
            index = slot[:, None].reshape(B, 1, -1, *(1,) * (x.ndim - 3))
            return jnp.concatenate([jnp.take_along_axis(x, index, axis=2), x[:, :, S:]], axis=2)

        keys, key_pos = seen(k), jnp.concatenate([pos, rows.pos], axis=1)
        bias = None if rows.bias is None else seen(rows.bias).reshape(B, K, G, 1, -1).astype(dtype)
        nothing = rows.logits.nothing
        nothing = None if nothing is None else nothing.astype(dtype).reshape(1, K, G, 1, 1)
        size = block_rows(R, B * N, key_pos.shape[1])

        def of_block(most: Float[Array, "B K G C"], block: tuple[Array, ...]) -> tuple[Array, None]:
            q, row, factor = block
            x = jnp.einsum("bkgrh,bksh->bkgrs", q.reshape(B, K, G, size, H), keys, preferred_element_type=dtype)
            x = rows.logits.of(x, H)
            x = x if bias is None else x + bias
            x = jnp.where(rows.logits.visible(row, key_pos[:, None])[:, :, None], x, -jnp.inf)
            top = jnp.maximum(x.max(-1, keepdims=True), jnp.finfo(dtype).min)
            e = jnp.exp(x - top)
            mass = e.sum(-1, keepdims=True) + (0.0 if nothing is None else jnp.exp(nothing - top))
            p = e[..., early.shape[1] : early.shape[1] + self.size] / jnp.where(mass > 0, mass, 1.0)
            return jnp.maximum(most, (p * factor[:, None, None, :, None].astype(dtype)).max(3)), None

        def blocks(x: Array, axis: int, fill: int = 0) -> Array:
            x = jnp.pad(x, [(0, -R % size * (i == axis)) for i in range(x.ndim)], constant_values=fill)
            return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)

        factor = jnp.ones((B, R), jnp.float32) if factor is None else factor
        start = jnp.zeros((B, K, G, self.size), dtype)
        most, _ = lax.scan(of_block, start, (blocks(rows.q, 2), blocks(rows.pos, 1, EMPTY), blocks(factor, 1)))
        slot = slot[:, early.shape[1] :]
        if out_proj is not None:
            v = jnp.take_along_axis(v, slot[:, None, :, None], axis=2).astype(dtype)
            by_group = out_proj.astype(dtype).reshape(K, G, *out_proj.shape[1:])
            gram = jnp.einsum("kghd,kgjd->kghj", by_group, by_group)
            most = most * jnp.sqrt(jnp.maximum(jnp.einsum("bkch,kghj,bkcj->bkgc", v, gram, v), 0.0))
        slot = jnp.where(inside == EMPTY, S, slot)
        of_slots = most.max(2).swapaxes(1, 2)
        return jnp.zeros((B, K, S), dtype).at[jnp.arange(B)[:, None], :, slot].set(of_slots, mode="drop")


def block_rows(rows: int, heads: int, keys: int) -> int:
    """How many of the rows that repeat a chunk are computed at once, for `heads` query heads of all sequences."""
    return min(rows, max(_ROWS, _LOGITS // (heads * keys)))
