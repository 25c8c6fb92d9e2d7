"""Gemma 1, 2 and 3 (arXiv 2403.08295, 2408.00118, 2503.19786): scaled embeddings, norms that add 1 to their scale.

Gemma 2 caps logits, scales queries by a constant of its own, normalises after each part too, and alternates local and
global layers. Gemma 3 normalises queries and keys instead of capping, and turns local layers by an embedding of their
own.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.contract.checks import positive, whole
from kvjax.models.config import (
    LocalRope,
    read_cap,
    read_flag,
    read_ropes,
    read_sizes,
    read_windows,
    renamed,
    write_ropes,
    write_sizes,
    write_windows,
)
from kvjax.models.depth import Decoder
from kvjax.models.family import Family
from kvjax.models.parts import Attend, GatedMLP, RMSNorm, attended, heads
from kvjax.models.rope import Rope
from kvjax.pallas_kernels.logits import Logits, capped


@dataclasses.dataclass(frozen=True)
class GemmaConfig(LocalRope):
    """A decoder of the Gemma families.

    Attributes:
      generation: 1, 2 or 3.
      attention_bias: whether the projections of attention have a bias.
      query_scalar: logits of attention are divided by its square root; head_dim if None.
      attention_cap, final_cap: soft caps on logits of attention and of tokens; None for none.
    """

    generation: int = 3
    attention_bias: bool = False
    query_scalar: float | None = None
    attention_cap: float | None = None
    final_cap: float | None = None


class Attention(nn.Module):
    """Grouped-query self-attention over a cache."""

    config: GemmaConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Output, cache after the step, and what was measured."""
        c = self.config
        q, k, v = heads(c, x, c.attention_bias)
        if c.generation == 3:
            q, k = RMSNorm(c, 1.0, name="q_norm")(q), RMSNorm(c, 1.0, name="k_norm")(k)
        logits = Logits(None if c.query_scalar is None else c.query_scalar**-0.5, c.attention_cap)
        how = {"attend": attend, "layer": layer, "logits": logits}
        return attended(self, x, q, k, v, cache, out="o_proj", bias=c.attention_bias, **how)


class Block(nn.Module):
    """One decoder layer."""

    config: GemmaConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Residual stream, cache and measurements after the layer."""
        c = self.config
        norm = lambda name: RMSNorm(c, 1.0, name=name)
        y = norm("input_layernorm")(x)
        y, cache, stats = Attention(c, name="self_attn")(y, cache, layer=layer, attend=attend)
        if c.generation == 1:
            x = x + y
            return x + GatedMLP(c, name="mlp")(norm("post_attention_layernorm")(x)), cache, stats
        x = x + norm("post_attention_layernorm")(y)
        y = GatedMLP(c, name="mlp")(norm("pre_feedforward_layernorm")(x))
        return x + norm("post_feedforward_layernorm")(y), cache, stats


class Gemma(Decoder):
    """The whole decoder."""

    @nn.nowrap
    def block(self, name: str | None = None) -> nn.Module:
        """A `Block`."""
        return Block(self.config, name=name)

    @nn.nowrap
    def last_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return RMSNorm(self.config, 1.0, name="norm")

    def embed(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Vectors of tokens, scaled."""
        x = super().embed(tokens, positions)
        return x * jnp.asarray(self.config.embed_dim**0.5, x.dtype)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits, capped where the config says so."""
        return capped(super().logits(x), self.config.final_cap)


_ARCHITECTURES = {"GemmaForCausalLM": "gemma", "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3_text"}
# What transformers' config classes assume where a config.json is silent.
_COMMON = {"head_dim": 256, "tie_word_embeddings": True}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "GemmaForCausalLM": {**_COMMON, "max_position_embeddings": 8192, "num_key_value_heads": 16},
    "Gemma2ForCausalLM": {
        **_COMMON,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
    },
    "Gemma3ForCausalLM": {
        **_COMMON,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
    },
}


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    generation = list(_ARCHITECTURES).index(architecture) + 1
    raw = {**_DEFAULTS[architecture], **raw}
    if read_flag({"x": raw.get("use_bidirectional_attention") or False}, "x"):
        raise ValueError("use_bidirectional_attention=true is not supported; a decoder's attention is causal")
    activation = raw.get("hidden_activation") or (raw.get("hidden_act") if generation == 1 else None)
    tanh = "gelu_pytorch_tanh"
    raw["hidden_act"] = tanh if activation is None or (generation == 1 and activation == "gelu") else activation
    sizes = read_sizes(raw)
    fields = {**sizes, "generation": generation, "attention_bias": read_flag(raw, "attention_bias")}
    longest = sizes["max_position"]
    if generation == 1:
        return {**fields, "rope": Rope.from_hugging_face(raw, longest)}
    layers = range(1, sizes["num_layers"] + 1)
    every = 2 if generation == 2 else whole("sliding_window_pattern", raw.get("sliding_window_pattern", 6))
    kinds = ["sliding_attention" if i % every else "full_attention" for i in layers]
    fields |= {
        "sliding_window": read_windows(raw, kinds),
        "query_scalar": positive("query_pre_attn_scalar", raw["query_pre_attn_scalar"]),
        "final_cap": read_cap(raw, "final_logit_softcapping"),
    }
    if generation == 2:
        cap = read_cap(raw, "attn_logit_softcapping")
        return {**fields, "attention_cap": cap, "rope": Rope.from_hugging_face(raw, longest)}
    whole_, local = raw.get("rope_theta", 1e6), raw.get("rope_local_base_freq", 1e4)
    return {**fields, **read_ropes(raw, longest, whole_, local)}


def _write(config: GemmaConfig) -> dict[str, Any]:
    architecture = list(_ARCHITECTURES)[config.generation - 1]
    raw = {
        "architectures": [architecture],
        "model_type": _ARCHITECTURES[architecture],
        **renamed(write_sizes(config), {"hidden_activation": "hidden_act"}),
        "attention_bias": config.attention_bias,
    }
    if config.generation == 1:
        return {**raw, **config.rope.to_hugging_face(), "hidden_act": config.activation}
    scalar = config.head_dim if config.query_scalar is None else config.query_scalar
    raw |= {
        **write_windows(config),
        "query_pre_attn_scalar": scalar if scalar % 1 else int(scalar),  # theirs is an int
        "final_logit_softcapping": config.final_cap,
    }
    if config.generation == 2:
        return {**raw, **config.rope.to_hugging_face(), "attn_logit_softcapping": config.attention_cap}
    ropes = write_ropes(config)
    older = {**config.rope.to_hugging_face(), "rope_local_base_freq": ropes["sliding_attention"]["rope_theta"]}
    return {**raw, **older, "rope_parameters": ropes}


FAMILY = Family(_ARCHITECTURES, GemmaConfig, Gemma, _read, _write)
