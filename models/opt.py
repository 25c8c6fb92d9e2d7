"""OPT (arXiv 2205.01068): learned positions, LayerNorm before or after each part, embeddings of another width."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.contract.checks import whole
from kvjax.models.config import LearnedPositions, read_flag, read_sizes, renamed, write_sizes
from kvjax.models.depth import Decoder
from kvjax.models.family import Family
from kvjax.models.parts import Attend, LayerNorm, activation, attended, dense, embedded, embedding, heads

_FIRST = 2  # the row of position 0


@dataclasses.dataclass(frozen=True)
class OPTConfig(LearnedPositions):
    """A decoder of the OPT family.

    Attributes:
      bias: whether projections have a bias.
      norm_first: LayerNorm before each part and after the last layer, or after each part (OPT-350m).
      final_norm: whether there is one after the last layer, where it comes first in each part.
      word_dim: width of the table of tokens, which is projected to embed_dim; embed_dim itself if None.
    """

    bias: bool = True
    norm_first: bool = True
    final_norm: bool = True
    word_dim: int | None = None


class Attention(nn.Module):
    """Self-attention over a cache."""

    config: OPTConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Output, cache after the step, and what was measured."""
        c = self.config
        q, k, v = heads(c, x, c.bias)
        return attended(self, x, q, k, v, cache, attend=attend, layer=layer, out="out_proj", bias=c.bias)


class Block(nn.Module):
    """One decoder layer; its feed-forward network has no name of its own in checkpoints."""

    config: OPTConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Residual stream, cache and measurements after the layer."""
        c = self.config
        first, second = LayerNorm(c, name="self_attn_layer_norm"), LayerNorm(c, name="final_layer_norm")
        attention, up, down = (
            Attention(c, name="self_attn"),
            *(dense(c, width, c.bias, name) for name, width in (("fc1", c.mlp_dim), ("fc2", c.embed_dim))),
        )
        feed = lambda y: down(activation(c, up(y)))
        y, cache, stats = attention(first(x) if c.norm_first else x, cache, layer=layer, attend=attend)
        if c.norm_first:
            x = x + y
            return x + feed(second(x)), cache, stats
        x = first(x + y)
        return second(x + feed(x)), cache, stats


class OPT(Decoder):
    """The whole decoder, of which vectors of tokens may have another width than the residual stream."""

    @nn.nowrap
    def block(self, name: str | None = None) -> nn.Module:
        """A `Block`."""
        return Block(self.config, name=name)

    @property
    def _width(self) -> int:
        return self.config.embed_dim if self.config.word_dim is None else self.config.word_dim

    def setup(self):
        """Makes the parts under the names of their parameters."""
        c, width = self.config, self._width
        self.table = embedding(self, self.words, c.vocab_size, width)
        self.places = embedding(self, "embed_positions", c.max_position + _FIRST)
        if width != c.embed_dim:
            self.project_in = dense(c, c.embed_dim, False, "project_in")
            self.project_out = dense(c, width, False, "project_out")
        self.blocks = [self.block(name=f"{self.layers}_{i}") for i in range(c.num_layers)]
        self.norm: Any = LayerNorm(c, name="final_layer_norm") if c.norm_first and c.final_norm else lambda x: x
        if not c.tie_embeddings:
            self.projection = dense(c, c.vocab_size, False, self.output)

    def embed(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Vectors of tokens and positions."""
        x = embedded(self.table, tokens)
        x = x if self._width == self.config.embed_dim else self.project_in(x)
        return x + embedded(self.places, jnp.maximum(positions, 0) + _FIRST)  # padding has -1

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of the residual stream after the last norm."""
        return super().logits(x if self._width == self.config.embed_dim else self.project_out(x))


_KEYS = {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}
_UNUSED = ("num_key_value_heads", "head_dim", "norm_eps")


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    del architecture
    raw = renamed({"activation_function": "relu", "tie_word_embeddings": True, **raw}, _KEYS) | dict.fromkeys(_UNUSED)
    if not read_flag(raw, "layer_norm_elementwise_affine", True):
        raise ValueError("layer_norm_elementwise_affine=false is not supported; norms have a scale and a bias")
    sizes = read_sizes(raw | {"norm_eps": 1e-5}, norm="norm_eps")
    word = raw.get("word_embed_proj_dim")
    word = None if word is None or word == sizes["embed_dim"] else whole("word_embed_proj_dim", word)
    return {
        **sizes,
        "bias": read_flag(raw, "enable_bias", True),
        "norm_first": read_flag(raw, "do_layer_norm_before", True),
        "final_norm": not read_flag(raw, "_remove_final_layer_norm"),
        "word_dim": word,
    }


def _write(config: OPTConfig) -> dict[str, Any]:
    raw = write_sizes(config, norm="norm_eps")
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        **{_KEYS.get(k, k): x for k, x in raw.items() if k not in _UNUSED},
        "enable_bias": config.bias,
        "do_layer_norm_before": config.norm_first,
        "_remove_final_layer_norm": not config.final_norm,
        "word_embed_proj_dim": config.embed_dim if config.word_dim is None else config.word_dim,
        "pad_token_id": None,  # theirs is 1, of which the embedding is zero
    }


FAMILY = Family({"OPTForCausalLM": "opt"}, OPTConfig, OPT, _read, _write, prefix="model.decoder")
