"""Experts: feed-forward networks of which every token is sent to a few (arXiv 2101.03961).

No expert has a capacity, so that none of its tokens is dropped, and sizes are static all the same.
"""

import dataclasses
from collections.abc import Hashable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.contract.checks import whole
from kvjax.models.llama import ModelConfig
from kvjax.models.parts import activation, dense, product

_LARGEST_BLOCK = 128  # tokens that an expert's matrices are read for at once


@dataclasses.dataclass(frozen=True)
class ExpertsConfig(ModelConfig):
    """A decoder of the Llama family whose layers have experts instead of one feed-forward network.

    Attributes:
      num_experts: E.
      experts_per_token: how many each token is sent to: those of the largest probability.
      expert_dim: F, their width.
      normalized: their weights are shares of what these have together, instead of their probabilities among all.
      dense_layers: layers that have one feed-forward network of width `mlp_dim` after all.
    """

    num_experts: int = 8
    experts_per_token: int = 2
    expert_dim: int = 1
    normalized: bool = True
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        for name in ("num_experts", "experts_per_token", "expert_dim"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"every token goes to {self.experts_per_token} experts, but there are {self.num_experts}; lower "
                "num_experts_per_tok"
            )

    def kind(self, layer: int) -> Hashable:
        """Dense layers are of another kind than those with experts."""
        return super().kind(layer), layer in self.dense_layers


class Experts(nn.Module):
    """Gated feed-forward networks, and a router that weighs them for each token.

    Attributes:
      config: sizes, dtype and the activation.
      names: of the projections to the gate, up and down.
    """

    config: ExpertsConfig
    names: tuple[str, str, str]

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The weighted sum of each token's experts."""
        c, flat = self.config, x.reshape(-1, x.shape[-1])
        p = jax.nn.softmax(dense(c, c.num_experts, False, "gate")(flat).astype(jnp.float32))
        weights, chosen = lax.top_k(p, c.experts_per_token)
        weights = weights / weights.sum(-1, keepdims=True) if c.normalized else weights
        gate, up, down = Stack(c, self.names, name="experts")()

        def expert(e: Int[Array, ""], x: Float[Array, "R D"]) -> Float[Array, "R D"]:
            return product(activation(c, product(x, gate[e])) * product(x, up[e]), down[e])

        # Every token once for each of its experts, in their order, in blocks that have one expert each.
        n, k = chosen.shape
        size = block_size(n * k, c.num_experts)
        place, owner = blocks(chosen.reshape(-1), c.num_experts, size)
        token = jnp.where(place < n * k, place // k, n)
        rows = lambda token: flat.at[token].get(mode="fill", fill_value=0)
        y = lax.map(lambda block: expert(block[0], rows(block[1])), (owner, token))
        w = weights.reshape(-1).at[place].get(mode="fill", fill_value=0).astype(y.dtype)
        out = jnp.zeros_like(flat).at[token].add(y * w[..., None], mode="drop")
        return out.reshape(x.shape)


class Stack(nn.Module):
    """The matrices of all experts."""

    config: ExpertsConfig
    names: tuple[str, str, str]

    @nn.compact
    def __call__(self) -> tuple[Float[Array, "E F D"], Float[Array, "E F D"], Float[Array, "E D F"]]:
        """Those of the gate, up and down."""
        c, (gate, up, down) = self.config, self.names
        into, out = (c.num_experts, c.expert_dim, c.embed_dim), (c.num_experts, c.embed_dim, c.expert_dim)
        start = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2, batch_axis=(0,))
        make = lambda name, shape: self.param(name, start, shape, jnp.dtype(c.dtype))
        return make(gate, into), make(up, into), make(down, out)


def block_size(assigned: int, num_experts: int) -> int:
    """Tokens of a block: about an expert's share of those assigned, so that few blocks are not full."""
    share = max(1, assigned // num_experts)
    return min(_LARGEST_BLOCK, 1 << (share - 1).bit_length())


def blocks(expert: Int[Array, "M"], num_experts: int, size: int) -> tuple[Int[Array, "G size"], Int[Array, "G"]]:
    """Assignments of tokens to experts, sorted by expert into blocks of which each has one.

    The number of blocks is what any assignment may need, so that none is left out: all full ones, and one that is not
    for every expert.

    Args:
      expert: the expert of each assignment, from 0 to `num_experts` - 1.
      num_experts: E.
      size: assignments of a block.

    Returns:
      The assignments of each block, M where there is none, and its expert.
    """
    M = len(expert)
    G = min(M, M // size + num_experts)
    count = jnp.zeros((num_experts,), jnp.int32).at[expert].add(1)
    needed = -(-count // size)
    last = jnp.cumsum(needed)  # behind an expert's last block
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    sorted_ = expert[order]
    within = jnp.arange(M, dtype=jnp.int32) - (jnp.cumsum(count) - count)[sorted_]
    block = (last - needed)[sorted_] + within // size
    place = jnp.full((G, size), M, jnp.int32).at[block, within % size].set(order)
    owner = jnp.searchsorted(last, jnp.arange(G, dtype=jnp.int32), side="right").astype(jnp.int32)
    return place, jnp.minimum(owner, num_experts - 1)
