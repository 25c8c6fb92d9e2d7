"""Qwen3-Next and Qwen3.5: attention with an output gate in every fourth layer, gated DeltaNet in the others."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.contract import Positions
from kvjax.contract.checks import whole
from kvjax.models.config import HybridConfig, each, read_flag, read_kinds, read_sizes, write_sizes
from kvjax.models.depth import Decoder
from kvjax.models.experts import Experts, ExpertsConfig
from kvjax.models.family import Family
from kvjax.models.parts import Attend, GatedMLP, RMSNorm, activation, attended, dense
from kvjax.models.recurrent import Convolution, GatedNorm, delta_rule, unit
from kvjax.models.rope import Rope

_SIZES = {
    "key_heads": "linear_num_key_heads",
    "key_dim": "linear_key_head_dim",
    "value_heads": "linear_num_value_heads",
    "value_dim": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}


@dataclasses.dataclass(frozen=True)
class DeltaConfig(HybridConfig, ExpertsConfig):
    """A decoder with layers of attention and layers of gated DeltaNet (arXiv 2412.06464).

    Attributes:
      key_heads, key_dim, value_heads, value_dim: heads of gated DeltaNet, and sizes of these.
      taps: inputs of an output of its convolution.
    """

    key_heads: int = 16
    key_dim: int = 128
    value_heads: int = 32
    value_dim: int = 128
    taps: int = 4

    def __post_init__(self):
        super().__post_init__()
        for name in _SIZES:
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"{self.value_heads} value heads are not a multiple of {self.key_heads} key heads; every key head "
                "serves the same number of value heads"
            )

    @property
    def channels(self) -> int:
        """Of queries, keys and values together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def own_state(self, layer: int, batch: int) -> tuple[Float[Array, "B W C"], Float[Array, "B H K V"]]:
        """The last inputs of a layer's convolution, and the state of its delta rule, before any token."""
        del layer
        last = jnp.zeros((batch, self.taps - 1, self.channels), self.dtype)
        return last, jnp.zeros((batch, self.value_heads, self.key_dim, self.value_dim), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Qwen3NextConfig(DeltaConfig):
    """A Qwen3-Next decoder."""


@dataclasses.dataclass(frozen=True)
class Qwen35Config(DeltaConfig):
    """A Qwen3.5 decoder."""


class Attention(nn.Module):
    """Grouped-query self-attention over a cache, with a gate for each channel of its output."""

    config: DeltaConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Output, cache after the step, and what was measured."""
        c, bias = self.config, self.config.qkv_bias
        N, K, H = c.num_query_heads, c.num_kv_heads, c.head_dim
        norm = lambda name: RMSNorm(c, 1.0, name=name)
        heads = lambda name, M, size: dense(c, M * size, bias, name)(x).reshape(*x.shape[:2], M, size)
        q, gate = jnp.split(heads("q_proj", N, 2 * H), 2, axis=-1)
        k, v = heads("k_proj", K, H), heads("v_proj", K, H)
        q, k, v = (y.swapaxes(1, 2) for y in (norm("q_norm")(q), norm("k_norm")(k), v))
        gate = jax.nn.sigmoid(gate.reshape(*x.shape[:2], N * H))
        how = {"attend": attend, "layer": layer, "out": "o_proj", "bias": c.out_bias, "gate": gate}
        return attended(self, x, q, k, v, cache, **how)


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule, behind a convolution."""

    config: DeltaConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], state: Any, *, pos: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Output, and the state after it."""
        c, (B, T, _) = self.config, x.shape
        Hk, K, Hv, V = c.key_heads, c.key_dim, c.value_heads, c.value_dim
        qkv, gate, rate, step = (self._split if isinstance(c, Qwen35Config) else self._joined)(x)
        last, memory = c.own_state(0, B) if state is None else state
        qkv, last = Convolution(c, c.channels, c.taps, name="conv1d")(qkv, last, pos)
        qkv = activation(c, qkv.astype(x.dtype))
        q, k, v = jnp.split(qkv, (Hk * K, 2 * Hk * K), axis=-1)
        heads = lambda y: jnp.repeat(unit(y.reshape(B, T, Hk, K)), Hv // Hk, axis=2)
        wide = lambda name, start: self.param(name, start, (Hv,), jnp.float32)[None, None]
        step = jax.nn.softplus(step.astype(jnp.float32) + wide("dt_bias", nn.initializers.ones))
        decay = -jnp.exp(wide("A_log", nn.initializers.zeros)) * step
        q, k, v = heads(q) * K**-0.5, heads(k), v.reshape(B, T, Hv, V)
        y, memory = delta_rule(q, k, v, decay, jax.nn.sigmoid(rate), memory, pos >= 0)
        y = GatedNorm(c, name="norm")(y, gate.reshape(B, T, Hv, V))
        return dense(c, c.embed_dim, False, "out_proj")(y.reshape(B, T, Hv * V)), (last, memory)

    @nn.nowrap
    def _split(self, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array, Array]:
        """Queries with keys and values, gates, rates and steps, by a projection each."""
        c = self.config
        sizes = c.channels, c.value_heads * c.value_dim, c.value_heads, c.value_heads
        each = zip(sizes, ("qkv", "z", "b", "a"), strict=True)
        qkv, gate, rate, step = (dense(c, n, False, f"in_proj_{name}")(x) for n, name in each)
        return qkv, gate, rate, step

    @nn.nowrap
    def _joined(self, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array, Array]:
        """The same by two projections, in which each key head has its own."""
        c, flat = self.config, lambda y: y.reshape(*x.shape[:2], -1)
        Hk, K, G = c.key_heads, c.key_dim, c.value_heads // c.key_heads
        own = dense(c, Hk * 2 * (K + G * c.value_dim), False, "in_proj_qkvz")(x).reshape(*x.shape[:2], Hk, -1)
        q, k, v, gate = map(flat, jnp.split(own, (K, 2 * K, 2 * K + G * c.value_dim), axis=-1))
        both = dense(c, Hk * 2 * G, False, "in_proj_ba")(x).reshape(*x.shape[:2], Hk, -1)
        rate, step = map(flat, jnp.split(both, 2, axis=-1))
        return jnp.concatenate([q, k, v], axis=-1), gate, rate, step


class SharedExperts(Experts):
    """Experts beside a network that every token passes, with a gate of its own."""

    @nn.nowrap
    def shared(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The output of the shared network."""
        c = self.config
        gate = jax.nn.sigmoid(dense(c, 1, False, "shared_expert_gate")(x))
        return gate * GatedMLP(c, width=c.shared_dim, name="shared_expert")(x)


class Block(nn.Module):
    """One decoder layer."""

    config: DeltaConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend | Positions
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Residual stream, cache and measurements after the layer."""
        c, stats = self.config, ()
        y = RMSNorm(c, 1.0, name="input_layernorm")(x)
        if isinstance(attend, Positions):
            y, cache = GatedDeltaNet(c, name="linear_attn")(y, cache, pos=attend.pos)
        else:
            y, cache, stats = Attention(c, name="self_attn")(y, cache, layer=layer, attend=attend)
        x = x + y
        y = RMSNorm(c, 1.0, name="post_attention_layernorm")(x)
        return x + self._network(layer)(y), cache, stats

    @nn.nowrap
    def _network(self, layer: int) -> nn.Module:
        c = self.config
        if layer in c.dense_layers:
            return GatedMLP(c, name="mlp")
        return SharedExperts(c, ("gate_proj", "up_proj", "down_proj"), name="mlp")


class Hybrid(Decoder):
    """The whole decoder."""

    @nn.nowrap
    def block(self, name: str | None = None) -> nn.Module:
        """A `Block`."""
        return Block(self.config, name=name)

    @nn.nowrap
    def last_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return RMSNorm(self.config, 1.0, name="norm")


_DENSE = "Qwen3_5ForCausalLM"
_QWEN35 = {_DENSE: "qwen3_5_text", "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text"}


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    raw = {**_DEFAULTS, **{k: x for k, x in raw.items() if x is not None}}
    raw["num_key_value_heads"] = raw.get("num_key_value_heads", 4 if architecture == _DENSE else 2)
    sizes, bias = read_sizes(raw), read_flag(raw, "attention_bias")
    layers, every = range(sizes["num_layers"]), whole("full_attention_interval", raw["full_attention_interval"])
    kinds = [_LINEAR if (i + 1) % every else "full_attention" for i in layers]
    kinds = read_kinds(raw, (_LINEAR, "full_attention"), kinds)
    step, alone = (
        whole("decoder_sparse_step", raw["decoder_sparse_step"]),
        each("mlp_only_layers", raw["mlp_only_layers"], least=0),
    )
    alone = layers if architecture == _DENSE else [i for i in layers if i in alone or (i + 1) % step]
    fields = {
        **sizes,
        "rope": Rope.from_hugging_face(raw, sizes["max_position"], head_dim=sizes["head_dim"], partial=True),
        "qkv_bias": bias,
        "out_bias": bias,
        "stateful_layers": tuple(i for i in layers if kinds[i] == _LINEAR),
        **{name: whole(key, raw[key]) for name, key in _SIZES.items()},
        "dense_layers": tuple(alone),
    }
    if architecture == _DENSE:
        return {**fields, "num_experts": 1, "experts_per_token": 1}
    many = (512, 10) if architecture == "Qwen3NextForCausalLM" else (256, 8)
    return {
        **fields,
        "num_experts": whole("num_experts", raw.get("num_experts", many[0])),
        "experts_per_token": whole("num_experts_per_tok", raw.get("num_experts_per_tok", many[1])),
        "expert_dim": whole("moe_intermediate_size", raw["moe_intermediate_size"]),
        "shared_dim": whole("shared_expert_intermediate_size", raw["shared_expert_intermediate_size"]),
        "normalized": architecture in _QWEN35 or read_flag(raw, "norm_topk_prob", True),
    }


def _write(config: DeltaConfig) -> dict[str, Any]:
    raw = {
        **write_sizes(config),
        **config.rope.to_hugging_face(),
        "partial_rotary_factor": config.rope.turning(config.head_dim) / config.head_dim,
        "attention_bias": config.qkv_bias,
        "layer_types": ["full_attention" if config.holds_kv(i) else _LINEAR for i in range(config.num_layers)],
        **{key: getattr(config, name) for name, key in _SIZES.items()},
    }
    return raw


def _write_experts(config: DeltaConfig) -> dict[str, Any]:
    return {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_dim,
        "shared_expert_intermediate_size": config.shared_dim,
    }


def _write_next(config: DeltaConfig) -> dict[str, Any]:
    own = {"norm_topk_prob": config.normalized, "decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}
    named = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
    return {**named, **_write(config), **_write_experts(config), **own}


def _write_35(config: DeltaConfig) -> dict[str, Any]:
    alone = len(config.dense_layers) == config.num_layers
    architecture = list(_QWEN35)[not alone]
    named = {"architectures": [architecture], "model_type": _QWEN35[architecture]}
    return {**named, **_write(config), **({} if alone else _write_experts(config))}


_LINEAR = "linear_attention"
# What transformers' config classes assume where a config.json is silent.
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_FLOAT32 = ("A_log", "dt_bias")
NEXT = Family(
    {"Qwen3NextForCausalLM": "qwen3_next"},
    Qwen3NextConfig,
    Hybrid,
    _read,
    _write_next,
    stacked="experts",
    further=True,
    float32=_FLOAT32,
)
FAMILY = Family(_QWEN35, Qwen35Config, Hybrid, _read, _write_35, stacked="experts", further=True, float32=_FLOAT32)
