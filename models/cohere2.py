"""Cohere 2 (Command R7B and A; arXiv 2504.00698): LayerNorm without a bias, blocks whose two parts run in parallel.

Layers with a window turn neighbouring channels of queries and keys; the others, which see all tokens, turn none.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from kvjax.contract import Rotate
from kvjax.contract.checks import positive, whole
from kvjax.models.config import read_flag, read_sizes, read_windows, unturned, write_sizes, write_windows
from kvjax.models.depth import Decoder
from kvjax.models.family import Family
from kvjax.models.llama import Attention, ModelConfig
from kvjax.models.parts import Attend, GatedMLP, LayerNorm
from kvjax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class Cohere2Config(ModelConfig):
    """A decoder of Cohere's second architecture.

    Attributes:
      logit_scale: factor on the logits of tokens.
    """

    logit_scale: float = 0.0625

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "logit_scale", positive("logit_scale", self.logit_scale))

    def rotation(self, layer: int) -> Rotate:
        """The rotary embedding of a layer with a window, none of another."""
        return unturned if self.window(layer) is None else self.rope


class Block(nn.Module):
    """One decoder layer: both parts read the same normalised stream."""

    config: Cohere2Config

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Residual stream, cache and measurements after the layer."""
        c = self.config
        y = LayerNorm(c, use_bias=False, name="input_layernorm")(x)
        z, cache, stats = Attention(c, name="self_attn")(y, cache, layer=layer, attend=attend)
        return x + z + GatedMLP(c, name="mlp")(y), cache, stats


class Cohere2(Decoder):
    """The whole decoder."""

    @nn.nowrap
    def block(self, name: str | None = None) -> nn.Module:
        """A `Block`."""
        return Block(self.config, name=name)

    @nn.nowrap
    def last_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return LayerNorm(self.config, use_bias=False, name="norm")

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits, scaled."""
        return super().logits(x) * self.config.logit_scale


# What transformers' config class assumes where a config.json is silent.
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    del architecture
    raw = {**_DEFAULTS, **raw}
    raw["sliding_window"] = whole("sliding_window", raw["sliding_window"])  # transformers runs no model without one
    sizes, bias = read_sizes(raw, norm="layer_norm_eps", eps=1e-5), read_flag(raw, "attention_bias")
    every, layers = whole("sliding_window_pattern", raw["sliding_window_pattern"]), range(1, sizes["num_layers"] + 1)
    kinds = ["sliding_attention" if i % every else "full_attention" for i in layers]
    return {
        **sizes,
        "rope": dataclasses.replace(Rope.from_hugging_face(raw, sizes["max_position"]), interleaved=True),
        "sliding_window": read_windows(raw, kinds),
        "qkv_bias": bias,
        "out_bias": bias,
        "logit_scale": raw["logit_scale"],
    }


def _write(config: Cohere2Config) -> dict[str, Any]:
    windows = write_windows(config)
    return {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        **write_sizes(config, norm="layer_norm_eps"),
        **config.rope.to_hugging_face(),
        "layer_types": windows["layer_types"],
        "sliding_window": windows["sliding_window"] or _DEFAULTS["sliding_window"],
        "attention_bias": config.qkv_bias,
        "logit_scale": config.logit_scale,
    }


FAMILY = Family({"Cohere2ForCausalLM": "cohere2"}, Cohere2Config, Cohere2, _read, _write)
