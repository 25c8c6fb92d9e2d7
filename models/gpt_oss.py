"""GPT-OSS (arXiv 2508.10925): experts, windows in every second layer, and a learned logit for attending to nothing."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.contract.checks import positive, whole
from kvjax.models.config import read_flag, read_sizes, read_windows, write_sizes, write_windows
from kvjax.models.experts import Experts, ExpertsConfig, Routed
from kvjax.models.family import Family
from kvjax.models.llama import Llama
from kvjax.models.parts import Attend, attended, dense, heads, product
from kvjax.models.rope import Rope
from kvjax.pallas_kernels import Logits


@dataclasses.dataclass(frozen=True)
class GptOssConfig(ExpertsConfig):
    """A GPT-OSS decoder.

    Attributes:
      swiglu_alpha: factor on the gate within its sigmoid.
      swiglu_limit: the largest gate, and the largest projection up by its absolute value.
    """

    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def __post_init__(self):
        super().__post_init__()
        for name in ("swiglu_alpha", "swiglu_limit"):
            object.__setattr__(self, name, positive(name, getattr(self, name)))


class Attention(nn.Module):
    """Grouped-query self-attention over a cache, beside a logit for nothing."""

    config: GptOssConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Output, cache after the step, and what was measured."""
        c = self.config
        nothing = self.param("sinks", nn.initializers.normal(0.02), (c.num_query_heads,), jnp.dtype(c.dtype))
        how = {"attend": attend, "layer": layer, "logits": Logits(nothing=nothing)}
        return attended(self, x, *heads(c, x, c.qkv_bias), cache, out="o_proj", bias=c.out_bias, **how)


def _route(config: GptOssConfig, x: Float[Array, "M D"]) -> Routed:
    """Experts of the largest logits, and a softmax over these."""
    logits = dense(config, config.num_experts, True, "router")(x).astype(jnp.float32)
    top, chosen = lax.top_k(logits, config.experts_per_token)
    return jax.nn.softmax(top), chosen


class ClampedExperts(Experts):
    """Experts with biases, whose gate and projection up are clamped."""

    @nn.nowrap
    def networks(self) -> Callable[[Int[Array, ""], Float[Array, "R D"]], Float[Array, "R D"]]:
        """What an expert, by its number, makes of rows."""
        c: Any = self.config
        into, into_bias, out, out_bias = Stack(c, name="experts")()

        def expert(e: Int[Array, ""], x: Float[Array, "R D"]) -> Float[Array, "R D"]:
            y = product(x, into[e], into_bias[e]).astype(jnp.float32)
            gate = jnp.minimum(y[..., ::2], c.swiglu_limit)
            up = jnp.clip(y[..., 1::2], -c.swiglu_limit, c.swiglu_limit)
            y = (up + 1) * gate * jax.nn.sigmoid(gate * c.swiglu_alpha)
            return product(y.astype(x.dtype), out[e], out_bias[e])

        return expert


class Stack(nn.Module):
    """The matrices and biases of all experts; rows of the gate and of the projection up take turns."""

    config: GptOssConfig

    @nn.compact
    def __call__(
        self,
    ) -> tuple[Float[Array, "E F2 D"], Float[Array, "E F2"], Float[Array, "E D F"], Float[Array, "E D"]]:
        """Those into the experts, and those out of them."""
        c, zeros = self.config, nn.initializers.zeros
        E, D, F = c.num_experts, c.embed_dim, c.expert_dim
        start = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2, batch_axis=(0,))
        make = lambda name, how, *shape: self.param(name, how, shape, jnp.dtype(c.dtype))
        return (
            make("gate_up_proj", start, E, 2 * F, D),
            make("gate_up_proj_bias", zeros, E, 2 * F),
            make("down_proj", start, E, D, F),
            make("down_proj_bias", zeros, E, D),
        )


def _network(config: GptOssConfig, layer: int) -> nn.Module:
    """The experts of a layer."""
    del layer
    return ClampedExperts(config, (), _route, name="mlp")


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    del architecture
    raw = {**_DEFAULTS, **raw}
    if not (raw.get("rope_scaling") or raw.get("rope_parameters")):
        raw["rope_parameters"] = _ROPE
    sizes, bias = read_sizes(raw, eps=1e-5), read_flag(raw, "attention_bias")
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(sizes["num_layers"])]
    return {
        **sizes,
        "rope": Rope.from_hugging_face(raw, sizes["max_position"]),
        "sliding_window": read_windows(raw, kinds),
        "qkv_bias": bias,
        "out_bias": bias,
        "num_experts": whole("num_local_experts", raw.get("num_local_experts", raw.get("num_experts", 128))),
        "experts_per_token": whole("num_experts_per_tok", raw["num_experts_per_tok"]),
        "expert_dim": sizes["mlp_dim"],
        "swiglu_alpha": positive("swiglu_alpha", raw["swiglu_alpha"]),
        "swiglu_limit": positive("swiglu_limit", raw["swiglu_limit"]),
    }


def _write(config: GptOssConfig) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **write_sizes(config),
        **config.rope.to_hugging_face(),
        **write_windows(config),
        "attention_bias": config.qkv_bias,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "swiglu_alpha": config.swiglu_alpha,
        "swiglu_limit": config.swiglu_limit,
    }


# What transformers' config class assumes where a config.json is silent.
_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "attention_bias": True,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
FAMILY = Family(
    {"GptOssForCausalLM": "gpt_oss"},
    GptOssConfig,
    lambda config: Llama(config, _network, Attention),
    _read,
    _write,
    swapped=("gate_up_proj", "down_proj"),
    packed=True,
)
