"""Layers of one kind as one scan, so that compilation does not grow with depth inside of a user's own jit."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

_LONGEST_PERIOD = 8  # layers after which kinds may repeat
_Layer = Callable[[int, Array, PyTree, Any], tuple[Array, PyTree]]


def each_layer(
    layer: _Layer,
    x: Array,
    params: Sequence[PyTree],
    inputs: Sequence[PyTree],
    *,
    kinds: Sequence[Hashable] | None = None,
    after_layer: Callable[[], object] | None = None,
) -> tuple[Array, list[PyTree]]:
    """The residual stream after all layers, and what else each gives.

    Args:
      layer: called with the number of a layer, the residual stream, the layer's parameters and its input.
      x: the residual stream before.
      params, inputs: of all layers.
      kinds: layers of one kind, with arrays of the same shapes, become one scan, so that XLA compiles one of them. Each
        iteration copies the parameters of its layer, so this is for many tokens. None for a program a layer.
      after_layer: called when a layer has been compiled and started.
    """
    done: list[PyTree] = []
    for start, period, times in [(0, len(inputs), 1)] if kinds is None else _runs(kinds, params, inputs):
        stop = start + period * times
        after = lambda x, i=start: layer(i, x, params[i], inputs[i])[0]
        # parameters of another dtype may change the residual stream's
        if at_once := times > 1 and jax.eval_shape(after, x) == jax.eval_shape(lambda x: x, x):
            x, found = _repeated(layer, start, x, params[start:stop], inputs[start:stop], times)
            done += found
        for i in range(start, stop):
            if not at_once:
                x, found = layer(i, x, params[i], inputs[i])
                done.append(found)
            if after_layer is not None:
                after_layer()
    return x, done


def _runs(kinds: Sequence[Hashable], params: Sequence[PyTree], inputs: Sequence[PyTree]) -> list[tuple[int, int, int]]:
    """(first layer, period, times) of the runs in which kinds repeat; `times` is 1 where nothing does."""
    shapes = [jax.tree.flatten(jax.tree.map(jax.typeof, both)) for both in zip(params, inputs, strict=True)]
    each = [(kind, tree, *types) for kind, (types, tree) in zip(kinds, shapes, strict=True)]
    found, start = [], 0
    while start < len(each):
        often = [(_times(each, start, p), p) for p in range(1, _LONGEST_PERIOD + 1)]
        times, period = max(often, key=lambda run: run[0] * run[1] if run[0] > 1 else 2 - run[1])
        found.append((start, period, times))
        start += period * times
    return found


def _repeated(
    layer: _Layer, start: int, x: Array, params: Sequence[PyTree], inputs: Sequence[PyTree], times: int
) -> tuple[Array, list[PyTree]]:
    """Layers from `start` on, whose kinds repeat so many times."""
    period, tree = len(inputs) // times, jax.tree.structure
    leaves = [[*zip(*map(jax.tree.leaves, inputs[i::period]), strict=True)] for i in range(period)]
    same = [[all(y is ys[0] for y in ys) for ys in each] for each in leaves]  # computed with once, not in every layer

    def step(x: Array, at: tuple[Array, list[PyTree]]) -> tuple[Array, list[PyTree]]:
        t, stacked = at
        found = []
        for i, each in enumerate(stacked):
            own = lax.switch(t, [lambda p=p: p for p in params[i::period]])  # no array of all layers is made
            here = [ys[0] if one else y for ys, one, y in zip(leaves[i], same[i], each, strict=True)]
            x, new = layer(start + i, x, own, jax.tree.unflatten(tree(inputs[i]), here))
            found.append(new)
        return x, found

    stacked = [
        [None if one else jnp.stack(ys) for ys, one in zip(*both, strict=True)]
        for both in zip(leaves, same, strict=True)
    ]
    x, found = lax.scan(step, x, (jnp.arange(times), stacked))
    return x, [jax.tree.map(lambda y, t=t: y[t], one) for t in range(times) for one in found]


def _times(kinds: Sequence[Hashable], start: int, period: int) -> int:
    """How often a run of `period` kinds stands in a row from `start` on."""
    stop = start + period
    while kinds[stop : stop + period] == kinds[start : start + period]:
        stop += period
    return (stop - start) // period
