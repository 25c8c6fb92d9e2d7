"""A model's attention, block of rows by block of rows: what figures are computed from, without an N x N matrix.

Letters: B prompts, T tokens, N query heads, K kv heads, G = N // K, H head_dim, D embed_dim, R rows of a block.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

import kvjax
from kvjax.analysis import Stored
from kvjax.contract import AttentionInputs, Layout, kv_layers, value
from kvjax.experiments.papers.base import Prompts
from kvjax.pallas_kernels import Columns, Logits, Softmax, attention
from kvjax.pallas_kernels.pytree import pytree

Carry = TypeVar("Carry")
BLOCK = 32


@pytree
class Layer:
    """What one layer attends with.

    Attributes:
      q, k: queries and keys, rotated.
      v: values.
      out_proj: the output projection.
      bias: what is added to the logits of every key.
      logits: how logits follow from products, and the sliding window.
    """

    q: Float[Array, "B N T H"]
    k: Float[Array, "B K T H"]
    v: Float[Array, "B K T H"]
    out_proj: Float[Array, "N H D"]
    bias: Float[Array, "B N T"] | None = None
    logits: Logits = Logits()


@value
class Attended:
    """Observes what a layer attends with, as `Layer`."""

    def __call__(self, inputs: AttentionInputs) -> Layer:
        """The layer, of the prompt's rows.

        Raises:
          ValueError: a model that does not say how it projects its attention output.
        """
        if inputs.out_proj is None:
            raise ValueError("the model passes no out_proj to attend; figures need it")
        return Layer(inputs.q, inputs.kv.k, inputs.kv.v, inputs.out_proj, inputs.bias, inputs.logits)


def capture(prompts: Prompts) -> tuple[Layer, ...]:
    """Reads prompts with the full cache, and returns what every layer attended with.

    Raises:
      ValueError: what `kvjax.forward` refuses, and a model that does not say how it projects its attention output.
    """
    model, params, tokens = prompts
    every = range(len(kv_layers(model.config)))
    policy = Stored((Layout(),) * len(every), more=(Attended(),))
    state = kvjax.start(model, policy=policy, lengths=[prompts.length] * len(tokens), max_new_tokens=0)
    _, _, stats = kvjax.forward(model, params, tokens, state)
    return tuple(stats.of(i)[Attended()] for i in every)


def by_layer(prompts: Prompts, measure: Callable[..., Any], *given: Any) -> Any:
    """What `measure(layer, *given)` finds in every layer of a model, its arrays stacked "L ...", in float64.

    Raises:
      ValueError: see `capture`.
    """
    found = [measure(layer, *given) for layer in capture(prompts)]
    return jax.tree.map(lambda *each: np.stack([np.asarray(x, np.float64) for x in each]), *found)


def layers_of(prompts: Prompts, layers: Sequence[int]) -> Sequence[int]:
    """The layers that are asked for, or all.

    Raises:
      ValueError: layers that the model has not.
    """
    every = range(len(kv_layers(prompts.model.config)))
    if not {*layers} <= {*every}:
        raise ValueError(f"layers={tuple(layers)}: the model has layers 0 to {every[-1]}; give --layers of these")
    return layers or (*every,)


@jax.jit
def matrix(
    layer: Layer,
    rows: Int[Array, "M"],
    multiplier: Float[Array, "M"] | None = None,
    seed: UInt32[Array, "B"] | None = None,
) -> Float[Array, "B N M T"]:
    """Rows of the attention matrix, by one call of `attention`.

    Args:
      layer: the layer.
      rows: positions of the rows, increasing; those at position T are of zeros.
      multiplier: a factor on the logits of every row, for another softmax than the model's.
      seed: of Gumbel noise on the logits, one number a prompt.
    """
    B, K, T, _ = layer.k.shape
    M = rows.shape[0]
    # Rows need not follow each other, so that dead slots stand where `attention` expects their tokens.
    behind = lambda x, value=0: jnp.pad(x, [(0, M if i == 2 else 0) for i in range(x.ndim)], constant_values=value)
    k, v = (behind(x.astype(jnp.float32)) for x in (layer.k, layer.v))
    pos = behind(jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, K, T)), -1)
    q = jnp.take(layer.q, rows, axis=2, mode="clip").astype(jnp.float32)
    q_pos = jnp.broadcast_to(jnp.where(rows < T, rows, -1), (B, M))
    multiplier = None if multiplier is None else jnp.broadcast_to(multiplier, (B, K, M))
    own = Softmax(multiplier, seed, noise=None if seed is None else "gumbel")
    own = None if multiplier is None and seed is None else own
    column = Columns(group=None, summed=False, softmax=own)
    bias = None if layer.bias is None else behind(layer.bias)
    return attention(q, k, v, q_pos, pos, columns=(column,), bias=bias, logits=layer.logits).columns[0][..., :T]


def fold_rows(
    layer: Layer,
    visit: Callable[[Carry, Float[Array, "B N R T"], Int[Array, "R"]], tuple[Carry, Any]],
    carry: Carry,
    block: int = BLOCK,
) -> tuple[Carry, Any]:
    """Walks over all rows of the attention matrix in order, a block at a time.

    Args:
      layer: the layer.
      visit: `(carry, p, positions) -> (carry, out)` for one block. The last block may be filled up with rows at
        position T, whose probabilities are 0 and whose `out` is dropped.
      carry: what the first block gets.
      block: rows of a block.

    Returns:
      The last carry, and `out` of all rows: arrays "T ...", whose first axis was the block's rows.
    """
    T = layer.k.shape[2]
    blocks = jnp.pad(jnp.arange(T, dtype=jnp.int32), (0, -T % block), constant_values=T).reshape(-1, block)
    carry, out = lax.scan(lambda carry, rows: visit(carry, matrix(layer, rows), rows), carry, blocks)
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:T], out)


def held_by_best(weights: Float[Array, "*rest X"]) -> Float[Array, "*rest X"]:
    """The share of all weight that the largest 1, 2, ... hold together."""
    weights = -jnp.sort(-weights, axis=-1)
    return jnp.cumsum(weights, axis=-1) / jnp.maximum(weights.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
