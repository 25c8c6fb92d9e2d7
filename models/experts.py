"""Experts: feed-forward networks of which every token is sent to a few (arXiv 2101.03961).

No expert has a capacity, so that none of its tokens is dropped, and sizes are static all the same.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.contract.checks import positive, whole
from kvjax.models.config import read_flag
from kvjax.models.llama import ModelConfig
from kvjax.models.parts import GatedMLP, activation, dense, product

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
      shared_dim: width of a network that every token passes beside its experts; 0 for none.
    """

    num_experts: int = 8
    experts_per_token: int = 2
    expert_dim: int = 1
    normalized: bool = True
    dense_layers: tuple[int, ...] = ()
    shared_dim: int = 0

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "shared_dim", whole("shared_dim", self.shared_dim, least=0))
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


@dataclasses.dataclass(frozen=True)
class GroupedExpertsConfig(ExpertsConfig):
    """A decoder whose experts are weighed each by itself, as in DeepSeek-V3 (arXiv 2412.19437, Section 2.1.2).

    Attributes:
      groups, chosen_groups: the groups that experts stand in, and of how many a token's experts are: of those whose
        best two experts have the largest sums.
      routed_scale: factor on the weights.
    """

    groups: int = 1
    chosen_groups: int = 1
    routed_scale: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        for name in ("groups", "chosen_groups"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        object.__setattr__(self, "routed_scale", positive("routed_scale", self.routed_scale))
        members, rest = divmod(self.num_experts, self.groups)
        if rest or members < 2:
            raise ValueError(
                f"{self.num_experts} experts do not fill n_group={self.groups} groups of two or more; mend n_group"
            )
        if self.chosen_groups > self.groups or self.experts_per_token > self.chosen_groups * members:
            raise ValueError(
                f"every token goes to {self.experts_per_token} experts in topk_group={self.chosen_groups} groups, but "
                f"there are {self.groups} of {members}; mend topk_group or num_experts_per_tok"
            )


Routed = tuple[Float[Array, "M k"], Int[Array, "M k"]]  # weights of each token's experts, and which they are


def by_softmax(config: ExpertsConfig, x: Float[Array, "M D"]) -> Routed:
    """Experts of the largest probability among all."""
    p = jax.nn.softmax(dense(config, config.num_experts, False, "gate")(x).astype(jnp.float32))
    weights, chosen = lax.top_k(p, config.experts_per_token)
    return weights / weights.sum(-1, keepdims=True) if config.normalized else weights, chosen


def by_sigmoid(config: GroupedExpertsConfig, x: Float[Array, "M D"]) -> Routed:
    """Experts of the largest scores, each by itself."""
    return SigmoidGate(config, name="gate")(x)


class SigmoidGate(nn.Module):
    """Weighs experts each by itself; a bias has a say in the choice alone."""

    config: GroupedExpertsConfig

    @nn.compact
    def __call__(self, x: Float[Array, "M D"]) -> Routed:
        """Weights and experts of each token."""
        c, (M, D), wide = self.config, x.shape, jnp.float32
        weight = self.param("weight", nn.initializers.lecun_normal(-1, 0), (c.num_experts, D), jnp.dtype(c.dtype))
        bias = self.param("e_score_correction_bias", nn.initializers.zeros, (c.num_experts,), wide)
        p = jax.nn.sigmoid(product(x.astype(wide), weight.astype(wide)))
        rated = (p + bias[None]).reshape(M, c.groups, -1)
        best = lax.top_k(rated, 2)[0].sum(-1)
        left = jnp.zeros(best.shape, bool).at[jnp.arange(M)[:, None], lax.top_k(best, c.chosen_groups)[1]].set(True)
        _, chosen = lax.top_k(jnp.where(left[..., None], rated, -jnp.inf).reshape(M, -1), c.experts_per_token)
        weights = jnp.take_along_axis(p, chosen, 1)
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20) if c.normalized else weights
        return weights * c.routed_scale, chosen


class Experts(nn.Module):
    """Gated feed-forward networks, and a router that weighs them for each token.

    Attributes:
      config: sizes, dtype and the activation.
      names: of the projections to the gate, up and down.
      route: weighs and chooses.
    """

    config: ExpertsConfig
    names: tuple[str, ...]
    route: Callable[[Any, Array], Routed] = by_softmax

    @nn.nowrap
    def shared(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The output of the network that every token passes."""
        return GatedMLP(self.config, width=self.config.shared_dim, name="shared_experts")(x)

    @nn.nowrap
    def networks(self) -> Callable[[Int[Array, ""], Float[Array, "R D"]], Float[Array, "R D"]]:
        """What an expert, by its number, makes of rows."""
        c = self.config
        gate, up, down = Stack(c, self.names, name="experts")()
        return lambda e, x: product(activation(c, product(x, gate[e])) * product(x, up[e]), down[e])

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The weighted sum of each token's experts."""
        c, flat = self.config, x.reshape(-1, x.shape[-1])
        out = sent(flat, self.route(c, flat), c.num_experts, self.networks()).reshape(x.shape)
        return out + self.shared(x) if c.shared_dim else out


def sent(
    x: Float[Array, "M D"],
    routed: Routed,
    num_experts: int,
    expert: Callable[[Int[Array, ""], Float[Array, "R D"]], Float[Array, "R D"]],
) -> Float[Array, "M D"]:
    """The weighted sum of what each row's experts make of it.

    Args:
      x: the rows.
      routed: weights and experts of each row.
      num_experts: E.
      expert: what an expert, by its number, makes of rows.
    """
    # Every row once for each of its experts, in their order, in blocks that have one expert each.
    weights, chosen = routed
    n, k = chosen.shape
    size = block_size(n * k, num_experts)
    place, owner = blocks(chosen.reshape(-1), num_experts, size)
    token = jnp.where(place < n * k, place // k, n)
    rows = lambda token: x.at[token].get(mode="fill", fill_value=0)
    y = lax.map(lambda block: expert(block[0], rows(block[1])), (owner, token))
    w = weights.reshape(-1).at[place].get(mode="fill", fill_value=0).astype(y.dtype)
    return jnp.zeros_like(x).at[token].add(y * w[..., None], mode="drop")


class Stack(nn.Module):
    """The matrices of all experts."""

    config: ExpertsConfig
    names: tuple[str, ...]

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


def sigmoid_network(config: GroupedExpertsConfig, layer: int) -> nn.Module:
    """The experts of a layer, or the one network of a dense layer, as DeepSeek-V3 names them."""
    if layer in config.dense_layers:
        return GatedMLP(config, name="mlp")
    return Experts(config, ("gate_proj", "up_proj", "down_proj"), by_sigmoid, name="mlp")


def read_groups(raw: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The fields of `GroupedExpertsConfig` that `ModelConfig` lacks, under DeepSeek-V3's keys of a config.json.

    Raises:
      ValueError: a value that its key cannot have.
    """
    size = lambda key, default=None: whole(key, raw.get(key, default))
    first = whole("first_k_dense_replace", raw["first_k_dense_replace"], least=0)
    shared = whole("n_shared_experts", raw["n_shared_experts"], least=0)
    return {
        "num_experts": size("n_routed_experts", raw.get("num_local_experts")),
        "experts_per_token": size("num_experts_per_tok"),
        "expert_dim": size("moe_intermediate_size"),
        "shared_dim": size("moe_intermediate_size") * shared,
        "groups": size("n_group", 1),
        "chosen_groups": size("topk_group", 1),
        "routed_scale": positive("routed_scaling_factor", raw.get("routed_scaling_factor", 1.0)),
        "normalized": read_flag(raw, "norm_topk_prob", True),
        "dense_layers": tuple(range(min(first, layers))),
    }


def write_groups(config: GroupedExpertsConfig) -> dict[str, Any]:
    """The inverse of `read_groups`."""
    return {
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_dim,
        "n_shared_experts": config.shared_dim // config.expert_dim,
        "n_group": config.groups,
        "topk_group": config.chosen_groups,
        "routed_scaling_factor": config.routed_scale,
        "norm_topk_prob": config.normalized,
        "first_k_dense_replace": len(config.dense_layers),
    }
