"""Beam search for the answers of a batch, behind the given tokens of each row."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

import kvjax
from kvjax.drivers.beam import checked_search


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames=("logits", "state"))
def _read(
    model: Any,
    params: PyTree[Any],
    logits: Float[Array, "B V"],
    state: kvjax.State,
    given: Int[Array, "B M"],
    num_given: Int[Array, "B"],
) -> tuple[Float[Array, "B V"], kvjax.State]:
    """Reads the first `num_given` given tokens of every row; rows with fewer wait for the others."""

    def step(i: Int[Array, ""], found: tuple[Array, kvjax.State]) -> tuple[Array, kvjax.State]:
        logits, state = found
        active = i < num_given
        after, state = kvjax.decode_step(model, params, given[:, i], state, active=active)
        return jnp.where(active[:, None], after, logits), state

    return lax.fori_loop(0, num_given.max(), step, (logits, state))


@functools.partial(jax.jit, static_argnames=("model", "num_beams", "max_new_tokens"))
def _search(
    model: Any,
    params: PyTree[Any],
    logits: Float[Array, "B V"],
    state: kvjax.State,
    *,
    num_beams: int,
    max_new_tokens: int,
) -> tuple[Int[Array, "B M"], Int[Array, "B"], Int[Array, "B"]]:
    """Each row's best hypothesis, its length, and the most live slots of any head before and after it."""
    found = kvjax.generate_beams_from(model, params, logits, state, num_beams=num_beams, max_new_tokens=max_new_tokens)
    live_of = lambda state: jnp.stack([kv.num_live for kv in state.layers], axis=1).max((1, 2))
    live = jnp.maximum(live_of(state), live_of(found.state))
    return found.tokens[:, 0], found.lengths[:, 0], live


class Search:
    """The compiled programs of one bucket: one that reads given tokens, and one for each length of answers."""

    def __init__(
        self,
        model: Any,
        params: PyTree[Any],
        logits: Any,
        state: Any,
        *,
        planned: int,
        num_beams: int,
        lengths: Sequence[int],
    ):
        """Compiles ahead of time.

        Args:
          model, params: the model.
          logits, state: shapes of what the prompts leave.
          planned: tokens that a plan has room for after them.
          num_beams: hypotheses of a search.
          lengths: tokens of answers, at most.
        """
        self._params = params
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
        B = len(state.length)
        self._read = _read.lower(model, params, logits, state, ints(B, planned), ints(B)).compile()
        self._searches = {
            n: _search.lower(model, params, logits, state, num_beams=num_beams, max_new_tokens=n).compile()
            for n in lengths
        }

    @property
    def programs(self) -> list[Any]:
        """All of them."""
        return [self._read, *self._searches.values()]

    def answer(
        self, logits: Array, state: kvjax.State, given: np.ndarray, num_given: np.ndarray, lengths: np.ndarray
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """What follows the prompt of every row, given and found ids, and the most live slots "B" of any head.

        Rows whose answers have another length are searched for apart, as a search depends on its length.

        Args:
          logits, state: after the prompts; used up.
          given: ids "B M", the first `num_given` "B" of each row.
          num_given: how many are given.
          lengths: tokens of the answers "B", at most; 0 for rows that are asked nothing.
        """
        logits, state = self._read(self._params, logits, state, given, num_given)
        ids, most = [np.zeros(0, np.int32)] * len(lengths), np.zeros(len(lengths), np.int32)
        for n in sorted(set(lengths[lengths > 0].tolist())):
            tokens, ends, live = (np.asarray(x) for x in self._searches[n](self._params, logits, state))
            for b in np.flatnonzero(lengths == n):
                ids[b] = np.concatenate([given[b, : num_given[b]], tokens[b, : ends[b]]])
                most[b] = live[b]
        return ids, most


def check_beams(model: Any, num_beams: int, lengths: Sequence[int]) -> None:
    """Tries whether a model can be searched with so many beams.

    Raises:
      ValueError: more beams than first tokens.
    """
    for n in lengths:
        checked_search(model, num_beams, n, None)
