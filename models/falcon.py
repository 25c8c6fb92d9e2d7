"""Falcon (arXiv 2311.16867): few kv heads, rotary embeddings, blocks whose two parts run in parallel or in turn.

Checkpoints with ALiBi (`alibi`) are refused: transformers 5 rounds each bias, slope times place in the text, to
bfloat16, so that what it adds is no function of the distance alone, and adds it twice in its eager attention.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from kvjax.contract.checks import whole
from kvjax.models.config import DecoderConfig, check_only, read_flag, read_sizes, renamed, write_sizes
from kvjax.models.depth import Decoder
from kvjax.models.family import Family
from kvjax.models.parts import MLP, Attend, LayerNorm, attended, heads
from kvjax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class FalconConfig(DecoderConfig):
    """A decoder of the Falcon family.

    Attributes:
      bias: whether projections have one.
      parallel: whether attention and feed-forward network read the same residual stream.
      two_norms: whether each of the two, in parallel, has a normalisation of its own.
    """

    bias: bool = False
    parallel: bool = True
    two_norms: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.two_norms and not self.parallel:
            raise ValueError("two_norms=True, but parallel=False; give one of them the other value")


class Attention(nn.Module):
    """Grouped-query self-attention over a cache; the projection holds queries, key and value of a kv head together."""

    config: FalconConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Output, cache after the step, and what was measured."""
        c = self.config
        q, k, v = heads(c, x, c.bias)
        return attended(self, x, q, k, v, cache, attend=attend, layer=layer, out="dense", bias=c.bias)


class Block(nn.Module):
    """One decoder layer."""

    config: FalconConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Residual stream, cache and measurements after the layer."""
        c = self.config
        y = LayerNorm(c, name="ln_attn" if c.two_norms else "input_layernorm")(x)
        z, cache, stats = Attention(c, name="self_attention")(y, cache, layer=layer, attend=attend)
        if c.two_norms:
            y = LayerNorm(c, name="ln_mlp")(x)
        elif not c.parallel:
            y = LayerNorm(c, name="post_attention_layernorm")(x + z)
        return x + z + MLP(c, ("dense_h_to_4h", "dense_4h_to_h"), c.bias, name="mlp")(y), cache, stats


class Falcon(Decoder):
    """The whole decoder."""

    words = "word_embeddings"
    layers = "h"

    @nn.nowrap
    def block(self, name: str | None = None) -> nn.Module:
        """A `Block`."""
        return Block(self.config, name=name)

    @nn.nowrap
    def last_norm(self) -> nn.Module:
        """The norm after the last layer."""
        return LayerNorm(self.config, name="ln_f")


_KEYS = {"num_key_value_heads": "num_kv_heads", "hidden_act": "activation", "intermediate_size": "ffn_hidden_size"}
_UNUSED = (*_KEYS, "head_dim")


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    del architecture
    raw = {"activation": "gelu", "tie_word_embeddings": True, **{k: x for k, x in raw.items() if k not in _UNUSED}}
    check_only(raw, {"alibi": (False, None)})
    parallel, shared = read_flag(raw, "parallel_attn", True), read_flag(raw, "multi_query", True)
    if grouped := read_flag(raw, "new_decoder_architecture"):
        only = {"num_ln_in_parallel_attn": (None, 2, 1), "parallel_attn": (True,)}
        check_only(raw, only, "with new_decoder_architecture=True, ")
    else:
        heads = {} if shared else {"num_kv_heads": (None, raw.get("num_attention_heads"))}
        only = {"num_ln_in_parallel_attn": (None, 1), **heads}
        check_only(raw, only, f"with new_decoder_architecture=False and multi_query={shared}, ")
        raw["num_kv_heads"] = 1 if shared else None
    raw = renamed(raw, _KEYS)
    if raw.get("intermediate_size") is None and "hidden_size" in raw:
        raw["intermediate_size"] = 4 * whole("hidden_size", raw["hidden_size"])
    sizes = read_sizes(raw, norm="layer_norm_epsilon", eps=1e-5)
    return {
        **sizes,
        "rope": Rope.from_hugging_face(raw, sizes["max_position"]),
        "bias": read_flag(raw, "bias"),
        "parallel": parallel,
        "two_norms": grouped and raw.get("num_ln_in_parallel_attn") != 1,
    }


def _write(config: FalconConfig) -> dict[str, Any]:
    raw = write_sizes(config, norm="layer_norm_epsilon")
    grouped = config.two_norms or config.num_kv_heads not in (1, config.num_query_heads)
    return {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        **{_KEYS.get(k, k): x for k, x in raw.items() if k != "head_dim"},
        **config.rope.to_hugging_face(),
        "alibi": False,
        "bias": config.bias,
        "new_decoder_architecture": grouped,
        "multi_query": config.num_kv_heads == 1,
        "parallel_attn": config.parallel or grouped,
        "num_ln_in_parallel_attn": 2 if config.two_norms else 1,
    }


FAMILY = Family(
    {"FalconForCausalLM": "falcon"},
    FalconConfig,
    Falcon,
    _read,
    _write,
    prefix="transformer",
    layers="h",
    embedding="word_embeddings",
    joined={"qkv_proj": ("query_key_value",)},
)
