"""OLMo 2 and 3 (arXiv 2501.00656, 2512.13961): norms behind each part, and over all queries and all keys."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from kvjax.models.config import (
    LocalRope,
    read_flag,
    read_ropes,
    read_sizes,
    read_windows,
    write_ropes,
    write_sizes,
    write_windows,
)
from kvjax.models.depth import Decoder
from kvjax.models.family import Family
from kvjax.models.parts import Attend, GatedMLP, RMSNorm, attended, heads
from kvjax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class OlmoConfig(LocalRope):
    """A decoder of OLMo 2 or 3.

    Attributes:
      attention_bias: whether the projections of attention have a bias.
    """

    attention_bias: bool = False


def _joint(norm: RMSNorm, x: Float[Array, "B N T H"]) -> Float[Array, "B N T H"]:
    """The norm of all heads together."""
    B, N, T, H = x.shape
    return norm(x.transpose(0, 2, 1, 3).reshape(B, T, N * H)).reshape(B, T, N, H).transpose(0, 2, 1, 3)


class Attention(nn.Module):
    """Grouped-query self-attention over a cache."""

    config: OlmoConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Output, cache after the step, and what was measured."""
        c = self.config
        q, k, v = heads(c, x, c.attention_bias)
        q, k = _joint(RMSNorm(c, 0.0, name="q_norm"), q), _joint(RMSNorm(c, 0.0, name="k_norm"), k)
        return attended(self, x, q, k, v, cache, attend=attend, layer=layer, out="o_proj", bias=c.attention_bias)


class Block(nn.Module):
    """One decoder layer."""

    config: OlmoConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Residual stream, cache and measurements after the layer."""
        c = self.config
        y, cache, stats = Attention(c, name="self_attn")(x, cache, layer=layer, attend=attend)
        x = x + RMSNorm(c, 0.0, name="post_attention_layernorm")(y)
        y = GatedMLP(c, name="mlp")(x)
        return x + RMSNorm(c, 0.0, name="post_feedforward_layernorm")(y), cache, stats


class Olmo(Decoder):
    """The whole decoder."""

    @nn.nowrap
    def block(self, name: str | None = None) -> nn.Module:
        """A `Block`."""
        return Block(self.config, name=name)

    @nn.nowrap
    def last_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return RMSNorm(self.config, 0.0, name="norm")


_ARCHITECTURES = {"Olmo2ForCausalLM": "olmo2", "Olmo3ForCausalLM": "olmo3"}
_THETA = 5e5  # of OLMo 3's layers with a window, too, whatever the base of the others


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    sizes = read_sizes(raw, eps=1e-5)
    fields = {**sizes, "attention_bias": read_flag(raw, "attention_bias")}
    if architecture == "Olmo2ForCausalLM":
        return {**fields, "rope": Rope.from_hugging_face(raw, sizes["max_position"])}
    kinds = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(sizes["num_layers"])]
    return {
        **fields,
        **read_ropes(raw, sizes["max_position"], raw.get("rope_theta", _THETA), _THETA),
        "sliding_window": read_windows({"sliding_window": 4096, **raw}, kinds),
    }


def _write(config: OlmoConfig) -> dict[str, Any]:
    windowed = config.local_rope is not None or any(config.windows)
    architecture = list(_ARCHITECTURES)[windowed]
    raw = {
        "architectures": [architecture],
        "model_type": _ARCHITECTURES[architecture],
        **write_sizes(config),
        "attention_bias": config.attention_bias,
        "pad_token_id": None,  # theirs is 1
    }
    if not windowed:
        return {**raw, **config.rope.to_hugging_face()}
    return {**raw, **write_windows(config), "rope_parameters": write_ropes(config)}


FAMILY = Family(_ARCHITECTURES, OlmoConfig, Olmo, _read, _write)
