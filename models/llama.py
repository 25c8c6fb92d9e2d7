"""Llama 2 and 3, Mistral, Ministral (3), Qwen2 and Qwen3: rotary embeddings, RMSNorm before each part, a gated MLP."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from kvjax.contract.checks import whole
from kvjax.models.config import DecoderConfig, read_flag, read_sizes, read_windows, write_sizes, write_windows
from kvjax.models.depth import Decoder
from kvjax.models.family import Family
from kvjax.models.parts import Attend, GatedMLP, RMSNorm, attended, heads
from kvjax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class ModelConfig(DecoderConfig):
    """A decoder of the Llama family.

    Attributes:
      qkv_bias, out_bias, mlp_bias: which projections have a bias.
      qk_norm: RMSNorm over head_dim on queries and keys, before rotation (Qwen3).
    """

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class Attention(nn.Module):
    """Grouped-query self-attention over a cache."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Output, cache after the step, and what was measured."""
        c = self.config
        q, k, v = heads(c, x, c.qkv_bias)
        if c.qk_norm:
            q, k = RMSNorm(c, name="q_norm")(q), RMSNorm(c, name="k_norm")(k)
        return attended(self, x, q, k, v, cache, attend=attend, layer=layer, out="o_proj", bias=c.out_bias)


def gated(config: ModelConfig, layer: int) -> nn.Module:
    """The feed-forward network of a layer: the same in all."""
    del layer
    return GatedMLP(config, config.mlp_bias, name="mlp")


class Block(nn.Module):
    """One decoder layer.

    Attributes:
      config: sizes and switches.
      network: makes the feed-forward network of a layer.
      attention: the attention.
    """

    config: ModelConfig
    network: Callable[[Any, int], nn.Module] = gated
    attention: Callable[..., nn.Module] = Attention

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Residual stream, cache and measurements after the layer."""
        c = self.config
        y = RMSNorm(c, name="input_layernorm")(x)
        y, cache, stats = self.attention(c, name="self_attn")(y, cache, layer=layer, attend=attend)
        x = x + y
        y = RMSNorm(c, name="post_attention_layernorm")(x)
        return x + self.network(c, layer)(y), cache, stats


class Llama(Decoder):
    """The whole decoder.

    Attributes:
      network: makes the feed-forward network of a layer.
      attention: the attention of a layer.
    """

    network: Callable[[Any, int], nn.Module] = gated
    attention: Callable[..., nn.Module] = Attention

    @nn.nowrap
    def block(self, name: str | None = None) -> nn.Module:
        """A `Block`."""
        return Block(self.config, self.network, self.attention, name=name)

    @nn.nowrap
    def last_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return RMSNorm(self.config, name="norm")


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    raw = {**_DEFAULTS.get(architecture, {}), **raw}
    sizes = read_sizes(raw)
    grows = architecture == "Ministral3ForCausalLM"
    if grows and not (raw.get("rope_scaling") or raw.get("rope_parameters")):
        raw["rope_parameters"] = _GROWING
    rope = Rope.from_hugging_face(raw, sizes["max_position"], grows=grows)
    return {**sizes, "rope": rope, **_switches(raw, architecture, sizes["num_layers"])}


def _switches(raw: Mapping[str, Any], architecture: str, layers: int) -> dict[str, Any]:
    """An architecture's own fields: which projections have a bias, and which layers a window."""
    bias = read_flag(raw, "attention_bias")
    if architecture == "LlamaForCausalLM":
        return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": read_flag(raw, "mlp_bias")}
    if architecture in ("MistralForCausalLM", "MinistralForCausalLM", "Ministral3ForCausalLM"):
        return {"sliding_window": read_windows(raw, ["sliding_attention"] * layers)}
    # Layers of Qwen have windows by name or, in older files, from `max_window_layers` on.
    first = whole("max_window_layers", raw.get("max_window_layers", 28), least=0)
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    windows = {"sliding_window": read_windows(raw, kinds, used=read_flag(raw, "use_sliding_window"))}
    if architecture == "Qwen2ForCausalLM":
        return {"qkv_bias": True, **windows}
    return {"qkv_bias": bias, "out_bias": bias, "qk_norm": True, **windows}


def _write(config: ModelConfig) -> dict[str, Any]:
    windows = write_windows(config)
    sliding = windows["sliding_window"] is not None
    if config.qk_norm:
        architecture = "Qwen3ForCausalLM"
        own = {"attention_bias": config.qkv_bias, "use_sliding_window": sliding, **windows}
    elif config.qkv_bias and not config.out_bias:
        architecture, own = "Qwen2ForCausalLM", {"use_sliding_window": sliding, **windows}
    elif config.rope.growth:
        architecture, own = "Ministral3ForCausalLM", {"sliding_window": windows["sliding_window"]}
    elif len(set(windows["layer_types"])) > 1:
        architecture, own = "MinistralForCausalLM", windows
    elif sliding or config.embed_dim % config.num_query_heads:  # transformers refuses a Llama of such a width
        architecture, own = "MistralForCausalLM", {"sliding_window": windows["sliding_window"]}
    else:
        architecture, own = "LlamaForCausalLM", {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    named = {"architectures": [architecture], "model_type": _ARCHITECTURES[architecture]}
    return {**named, **write_sizes(config), **config.rope.to_hugging_face(), **own}


# What transformers' config classes assume where a config.json is silent.
_MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 4096 * 32}
_GROWING = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_QWEN2 = {"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 32768}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": _MISTRAL,
    "MinistralForCausalLM": _MISTRAL,
    "Ministral3ForCausalLM": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
    },
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": {**_QWEN2, "head_dim": 128},
}
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral",
    "Ministral3ForCausalLM": "ministral3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
FAMILY = Family(_ARCHITECTURES, ModelConfig, Llama, _read, _write)
