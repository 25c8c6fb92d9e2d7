"""Gemma 4 (text): heads of two sizes, values that are keys before their norm, experts beside the dense network.

Small sizes have a vector of each token for every layer, and last layers that read the keys and values of earlier ones.
"""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.contract import KVShape
from kvjax.contract.checks import whole
from kvjax.models.config import (
    LAYER_TYPES,
    LocalRope,
    check_only,
    read_cap,
    read_flag,
    read_kinds,
    read_ropes,
    read_sizes,
    read_windows,
    renamed,
    write_ropes,
    write_sizes,
    write_windows,
)
from kvjax.models.experts import ExpertsConfig, Routed, sent
from kvjax.models.family import Family
from kvjax.models.gemma import Gemma
from kvjax.models.parts import Attend, GatedMLP, RMSNorm, activation, attended, dense, embedded, embedding, product
from kvjax.pallas_kernels import Logits


@dataclasses.dataclass(frozen=True)
class Gemma4Config(LocalRope, ExpertsConfig):
    """A decoder of Gemma 4, whose `num_kv_heads` and `head_dim` are those of layers with a window.

    Attributes:
      full_kv_heads, full_head_dim: those of the other layers.
      keys_as_values: whether the other layers' values are their keys, normalised without a scale and not turned.
      final_cap: soft cap on logits of tokens; None for none.
      sharing_layers: how many last layers read the keys and values of the last layer of their kind before them.
      wide_sharing: whether these layers' networks are twice as wide.
      layer_dim: P, channels that a token has for each layer; 0 for none.
      layer_vocab_size: rows of the table of these.
    """

    full_kv_heads: int = 1
    full_head_dim: int = 2
    keys_as_values: bool = False
    final_cap: float | None = None
    sharing_layers: int = 0
    wide_sharing: bool = False
    layer_dim: int = 0
    layer_vocab_size: int = 1

    def __post_init__(self):
        super().__post_init__()
        for name in ("sharing_layers", "layer_dim"):
            object.__setattr__(self, name, whole(name, getattr(self, name), least=0))
        object.__setattr__(self, "layer_vocab_size", whole("layer_vocab_size", self.layer_vocab_size))
        first = self.num_layers - self.sharing_layers
        if first < 1 or not {*self.windows[first:]} <= {*self.windows[:first]}:
            raise ValueError(
                f"num_kv_shared_layers={self.sharing_layers} of {self.num_layers} layers leaves none of each kind that "
                "holds keys and values; lower it"
            )
        for name in ("full_kv_heads", "full_head_dim"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        if self.layer_dim and self.layer_vocab_size < self.vocab_size:
            raise ValueError(
                f"vocab_size_per_layer_input={self.layer_vocab_size} is less than vocab_size={self.vocab_size}; every "
                "token has a row"
            )
        if self.num_query_heads % self.full_kv_heads:
            raise ValueError(
                f"{self.num_query_heads} query heads are not a multiple of num_global_key_value_heads="
                f"{self.full_kv_heads}; every kv head serves the same number of query heads"
            )
        if self.full_head_dim % 2:
            raise ValueError(f"global_head_dim={self.full_head_dim} is odd; rotary embeddings turn pairs of channels")

    def kv_source(self, layer: int) -> int | None:
        """For one of the last layers, the last one of its kind before them."""
        first = self.num_layers - self.sharing_layers
        before = [i for i in range(first) if self.window(i) == self.window(layer)]
        return None if layer < first else before[-1]

    def holds_kv(self, layer: int) -> bool:
        """Whether a layer does not read another's."""
        return layer < self.num_layers - self.sharing_layers

    def own_state(self, layer: int, batch: int) -> Any:
        """Nothing, for layers that read another's."""
        del layer, batch
        return ()

    def kind(self, layer: int) -> Hashable:
        """Layers that read another's are of another kind."""
        return super().kind(layer), self.holds_kv(layer)

    @property
    def sparse(self) -> bool:
        """Whether layers have experts beside their network."""
        return not self.dense_layers

    def kv_shape(self, layer: int) -> KVShape:
        """Layers without a window have sizes of their own."""
        if self.window(layer) is None:
            return KVShape(self.full_kv_heads, self.full_head_dim)
        return KVShape(self.num_kv_heads, self.head_dim)


def normalised(config: Gemma4Config, x: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
    """RMS normalisation without a scale, in float32."""
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + config.norm_eps)).astype(x.dtype)


class Attention(nn.Module):
    """Grouped-query self-attention over a cache, by logits that are products."""

    config: Gemma4Config

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Output, cache after the step, and what was measured."""
        c, shape = self.config, self.config.kv_shape(layer)

        def heads(name: str, number: int) -> Float[Array, "B _ T H"]:
            y = dense(c, number * shape.head_dim, c.qkv_bias, name)(x)
            return y.reshape(*x.shape[:2], number, shape.head_dim).transpose(0, 2, 1, 3)

        q, k, v = RMSNorm(c, 0.0, name="q_norm")(heads("q_proj", c.num_query_heads)), None, None
        if c.holds_kv(layer):
            k = heads("k_proj", shape.num_kv_heads)
            as_keys = c.keys_as_values and c.window(layer) is None
            v = normalised(c, k if as_keys else heads("v_proj", shape.num_kv_heads))
            k = RMSNorm(c, 0.0, name="k_norm")(k)
        how = {"attend": attend, "layer": layer, "logits": Logits(1.0)}
        return attended(self, x, q, k, v, cache, out="o_proj", bias=c.out_bias, **how)


class Router(nn.Module):
    """Weighs experts by what it normalises, and each by a factor of its own."""

    config: Gemma4Config

    @nn.compact
    def __call__(self, x: Float[Array, "M D"]) -> Routed:
        """Weights and experts of each row."""
        c, ones, dtype = self.config, nn.initializers.ones, jnp.dtype(self.config.dtype)
        gain = self.param("gain", ones, (c.embed_dim,), dtype)
        factor = self.param("per_expert_scale", ones, (c.num_experts,), dtype)
        y = normalised(c, x) * jnp.broadcast_to(gain, x.shape) * jnp.asarray(c.embed_dim**-0.5, dtype)
        p = jax.nn.softmax(dense(c, c.num_experts, False, "proj")(y).astype(jnp.float32))
        weights, chosen = lax.top_k(p, c.experts_per_token)
        return weights / weights.sum(-1, keepdims=True) * factor[chosen].astype(jnp.float32), chosen


class Stack(nn.Module):
    """The matrices of all experts, with gate and up in one."""

    config: Gemma4Config

    @nn.compact
    def __call__(self) -> tuple[Float[Array, "E F2 D"], Float[Array, "E D F"]]:
        """Those into the experts, and those out of them."""
        c = self.config
        start = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2, batch_axis=(0,))
        make = lambda name, *shape: self.param(name, start, (c.num_experts, *shape), jnp.dtype(c.dtype))
        return make("gate_up_proj", 2 * c.expert_dim, c.embed_dim), make("down_proj", c.embed_dim, c.expert_dim)


class Block(nn.Module):
    """One decoder layer. Behind the residual stream's channels stand those that it and later layers have of a token."""

    config: Gemma4Config

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Residual stream, cache and measurements after the layer."""
        c = self.config
        norm = lambda name: RMSNorm(c, 0.0, name=name)
        x, own, later = jnp.split(x, [c.embed_dim, c.embed_dim + c.layer_dim], axis=-1)
        y = norm("input_layernorm")(x)
        y, cache, stats = Attention(c, name="self_attn")(y, cache, layer=layer, attend=attend)
        x = x + norm("post_attention_layernorm")(y)
        width = c.mlp_dim * (2 if c.wide_sharing and not c.holds_kv(layer) else 1)
        y = GatedMLP(c, width=width, name="mlp")(norm("pre_feedforward_layernorm")(x))
        if c.sparse:
            flat = x.reshape(-1, c.embed_dim)
            routed = Router(c, name="router")(flat)
            into, out = Stack(c, name="experts")()

            def expert(e: Array, rows: Array) -> Array:
                gate, up = jnp.split(product(rows, into[e]), 2, axis=-1)
                return product(activation(c, gate) * up, out[e])

            z = sent(norm("pre_feedforward_layernorm_2")(flat), routed, c.num_experts, expert).reshape(x.shape)
            y = norm("post_feedforward_layernorm_1")(y) + norm("post_feedforward_layernorm_2")(z)
        x = x + norm("post_feedforward_layernorm")(y)
        if c.layer_dim:
            y = activation(c, dense(c, c.layer_dim, False, "per_layer_input_gate")(x)) * own
            x = x + norm("post_per_layer_input_norm")(dense(c, c.embed_dim, False, "per_layer_projection")(y))
        factor = self.param("layer_scalar", nn.initializers.ones, (1,), jnp.dtype(c.dtype))
        x = x * jnp.broadcast_to(factor, x.shape)
        return jnp.concatenate([x, later, own], -1) if c.layer_dim else x, cache, stats


class LastNorm(RMSNorm):
    """The norm of the residual stream's own channels."""

    def __call__(self, x: Float[Array, "*B _"]) -> Float[Array, "*B D"]:
        """Normalises the first D channels."""
        return super().__call__(x[..., : self.config.embed_dim])


class Gemma4(Gemma):
    """The whole decoder."""

    @nn.nowrap
    def block(self, name: str | None = None) -> nn.Module:
        """A `Block`."""
        return Block(self.config, name=name)

    @nn.nowrap
    def last_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return LastNorm(self.config, 0.0, name="norm")

    def setup(self):
        """Makes the parts, those of the channels of each layer among them."""
        super().setup()
        c = self.config
        if c.layer_dim:
            width = c.num_layers * c.layer_dim
            self.layer_table = embedding(self, "embed_tokens_per_layer", c.layer_vocab_size, width)
            self.to_layers = dense(c, width, False, "per_layer_model_projection")
            self.layer_norm = RMSNorm(c, 0.0, name="per_layer_projection_norm")

    def embed(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T _"]:
        """Vectors of tokens, scaled; behind them what a token has for every layer."""
        x, c = super().embed(tokens, positions), self.config
        if not c.layer_dim:
            return x
        factor = lambda y, n: y * jnp.asarray(n, y.dtype)
        own = factor(embedded(self.layer_table, tokens), c.layer_dim**0.5)
        made = factor(self.to_layers(x), c.embed_dim**-0.5).reshape(*x.shape[:2], c.num_layers, c.layer_dim)
        made = self.layer_norm(made).reshape(own.shape)
        return jnp.concatenate([x, factor(made + own, 2**-0.5)], -1)


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    del architecture
    raw = {**_DEFAULTS, **raw}
    raw["rope_parameters"] = raw["rope_parameters"] or _DEFAULTS["rope_parameters"]
    check_only(raw, _ONLY)
    sizes = read_sizes({**raw, "hidden_act": raw["hidden_activation"]})
    layers = sizes["num_layers"]
    kinds = ["sliding_attention" if i % 6 else "full_attention" for i in range(1, layers)] + ["full_attention"]
    kinds = read_kinds(raw, LAYER_TYPES, kinds)
    if kinds[-1] != "full_attention":
        raise ValueError(f"layer_types ends with {kinds[-1]!r}; the last layer must be of 'full_attention'")
    as_keys = read_flag(raw, "attention_k_eq_v")
    full = {"head_dim": raw["global_head_dim"]}
    if as_keys and raw.get("num_global_key_value_heads") is not None:
        full["num_key_value_heads"] = raw["num_global_key_value_heads"]
    if (own := raw.get("per_layer_config")) is not None:  # as transformers writes it
        wanted = {str(i) for i, kind in enumerate(kinds) if kind == "full_attention"}
        each = [own.get(i, {}) for i in sorted(wanted)] if isinstance(own, Mapping) and {*own} <= wanted else [None]
        if any(x != each[0] or not isinstance(x, Mapping) for x in each):
            raise ValueError(
                f"per_layer_config={own!r} must give all layers of full_attention the same sizes, no others"
            )
        full = each[0]
    bias, sparse = read_flag(raw, "attention_bias"), read_flag(raw, "enable_moe_block")
    number = lambda key: whole(key, raw.get(key)) if sparse else 1
    return {
        **sizes,
        **read_ropes(raw, sizes["max_position"], 1e6, 1e4),
        "sliding_window": read_windows(
            {**raw, "sliding_window": whole("sliding_window", raw["sliding_window"])}, kinds
        ),
        "full_kv_heads": whole("num_key_value_heads", full.get("num_key_value_heads", sizes["num_kv_heads"])),
        "full_head_dim": whole("global_head_dim", full.get("head_dim", sizes["head_dim"])),
        "keys_as_values": as_keys,
        "final_cap": read_cap(raw, "final_logit_softcapping"),
        "qkv_bias": bias,
        "out_bias": bias,
        "num_experts": number("num_experts"),
        "experts_per_token": number("top_k_experts"),
        "expert_dim": number("moe_intermediate_size"),
        "dense_layers": () if sparse else tuple(range(layers)),
        "sharing_layers": whole("num_kv_shared_layers", raw.get("num_kv_shared_layers") or 0, least=0),
        "wide_sharing": read_flag(raw, "use_double_wide_mlp"),
        "layer_dim": whole("hidden_size_per_layer_input", raw["hidden_size_per_layer_input"] or 0, least=0),
        "layer_vocab_size": whole("vocab_size_per_layer_input", raw["vocab_size_per_layer_input"]),
    }


def _write(config: Gemma4Config) -> dict[str, Any]:
    sparse = {"num_experts": config.num_experts, "top_k_experts": config.experts_per_token}
    sparse |= {"moe_intermediate_size": config.expert_dim}
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        **renamed(write_sizes(config), {"hidden_activation": "hidden_act"}),
        **write_windows(config),
        "rope_parameters": write_ropes(config),
        "global_head_dim": config.full_head_dim,
        "num_global_key_value_heads": config.full_kv_heads if config.keys_as_values else None,
        "attention_k_eq_v": config.keys_as_values,
        "attention_bias": config.qkv_bias,
        "final_logit_softcapping": config.final_cap,
        "enable_moe_block": config.sparse,
        **(sparse if config.sparse else {}),
        "num_kv_shared_layers": config.sharing_layers,
        "use_double_wide_mlp": config.wide_sharing,
        "hidden_size_per_layer_input": config.layer_dim,
        "vocab_size_per_layer_input": config.layer_vocab_size,
        "pad_token_id": None,
    }


# What transformers' config class assumes where a config.json is silent, and what is not built of it.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_ONLY = {"use_bidirectional_attention": (None, "vision")}


def _unread(config: Gemma4Config) -> tuple[str, ...]:
    """Keys and values of layers that read others', which files hold all the same."""
    layers = (i for i in range(config.num_layers) if not config.holds_kv(i))
    return tuple(f"model.layers.{i}.self_attn.{name}" for i in layers for name in ("k_", "v_"))


FAMILY = Family({"Gemma4ForCausalLM": "gemma4_text"}, Gemma4Config, Gemma4, _read, _write, unread=_unread)
