"""Phi-3 and Phi-4 mini (arXiv 2404.14219): Llama with fused projections, partial and long rotary embeddings."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.models.config import DecoderConfig, read_sizes, read_windows, write_sizes, write_windows
from kvjax.models.depth import Decoder
from kvjax.models.family import Family
from kvjax.models.parts import ACTIVATIONS, Attend, RMSNorm, attended, dense, split
from kvjax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class Phi3Config(DecoderConfig):
    """A decoder of the Phi-3 family."""


class Attention(nn.Module):
    """Grouped-query self-attention over a cache, with one projection for queries, keys and values."""

    config: Phi3Config

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Output, cache after the step, and what was measured."""
        c = self.config
        N, K = c.num_query_heads, c.num_kv_heads
        y = split(dense(c, (N + 2 * K) * c.head_dim, False, "qkv_proj")(x), N + 2 * K)
        q, k, v = jnp.split(y, (N, N + K), axis=1)
        return attended(self, x, q, k, v, cache, attend=attend, layer=layer, out="o_proj", bias=False)


class FusedMLP(nn.Module):
    """A gated feed-forward network with one projection for gate and values."""

    config: Phi3Config

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The gated sum."""
        c = self.config
        gate, up = jnp.split(dense(c, 2 * c.mlp_dim, False, "gate_up_proj")(x), 2, axis=-1)
        return dense(c, c.embed_dim, False, "down_proj")(up * ACTIVATIONS[c.activation](gate))


class Block(nn.Module):
    """One decoder layer."""

    config: Phi3Config

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Residual stream, cache and measurements after the layer."""
        c = self.config
        y = RMSNorm(c, name="input_layernorm")(x)
        y, cache, stats = Attention(c, name="self_attn")(y, cache, layer=layer, attend=attend)
        x = x + y
        return x + FusedMLP(c, name="mlp")(RMSNorm(c, name="post_attention_layernorm")(x)), cache, stats


class Phi3(Decoder):
    """The whole decoder."""

    @nn.nowrap
    def block(self, name: str | None = None) -> nn.Module:
        """A `Block`."""
        return Block(self.config, name=name)

    @nn.nowrap
    def last_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return RMSNorm(self.config, name="norm")


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    del architecture
    raw = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, **raw}
    sizes = read_sizes(raw, eps=1e-5)
    rope = Rope.from_hugging_face(_long(raw), sizes["max_position"], head_dim=sizes["head_dim"], partial=True)
    windows = read_windows({**raw, "layer_types": None}, ["sliding_attention"] * sizes["num_layers"])
    return {**sizes, "rope": rope, "sliding_window": windows}


def _long(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The file with the names that early ones have for "longrope"."""
    sections = {k: raw[k] for k in ("rope_scaling", "rope_parameters") if isinstance(raw.get(k), Mapping)}
    for key, section in sections.items():
        kind = section.get("rope_type", section.get("type"))
        if kind in ("su", "yarn"):
            sections[key] = {**section, "rope_type": "longrope"}
    return {**raw, **sections}


def _write(config: Phi3Config) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        **write_sizes(config),
        **config.rope.to_hugging_face(),
        "partial_rotary_factor": config.rope.turning(config.head_dim) / config.head_dim,
        "sliding_window": write_windows(config)["sliding_window"],
        "pad_token_id": None,  # theirs is 32000, whatever the vocabulary
    }
    if config.rope.kind != "longrope":
        return raw
    raw["original_max_position_embeddings"] = config.rope.original_max
    factors = {k: raw["rope_scaling"][k] for k in ("short_factor", "long_factor")}
    published = {**raw, "rope_scaling": {"type": "longrope", **factors}}  # transformers 4 takes these three keys alone
    return published if _read(published, "Phi3ForCausalLM")["rope"] == config.rope else raw


FAMILY = Family({"Phi3ForCausalLM": "phi3"}, Phi3Config, Phi3, _read, _write)
