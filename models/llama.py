"""The Llama family (Llama 2/3, Mistral, Qwen2, Qwen3) in Flax Linen.

Pure: `params` is the only collection, there are no rngs, and the cache is an argument that comes back changed.
Submodules are named like the checkpoint's tensors, so loading is a transliteration. A model owns no attention over
caches: it hands queries, keys and values of each layer to the `attend` it was given.

Letters: B batch, T tokens, N query heads, K kv heads, H head_dim, D embed_dim, F mlp_dim, V vocab_size.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.drivers.attention import Attend
from kvjax.scoring.stats import LayerStats
from models.config import ModelConfig

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, in float32 whatever the input."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalises the last axis."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.dtype(self.config.dtype))
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.config.norm_eps)
        return y.astype(x.dtype) * jnp.broadcast_to(scale, x.shape)


class Attention(nn.Module):
    """Grouped-query self-attention over a cache."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, LayerStats]:
        """Output, cache after the step, and what was measured."""
        c = self.config
        B, T, _ = x.shape

        def heads(name: str, num_heads: int) -> Float[Array, "B _ T H"]:
            y = _dense(c, num_heads * c.head_dim, c.qkv_bias, name)(x).reshape(B, T, num_heads, c.head_dim)
            if c.qk_norm and name != "v_proj":
                y = RMSNorm(c, name=f"{name[0]}_norm")(y)
            return y.transpose(0, 2, 1, 3)

        q, k, v = heads("q_proj", c.num_query_heads), heads("k_proj", c.num_kv_heads), heads("v_proj", c.num_kv_heads)
        out_proj = None
        if not self.is_initializing():
            kernel = self.variables["params"]["o_proj"]["kernel"]
            out_proj = kernel.reshape(c.num_query_heads, c.head_dim, c.embed_dim)
        out, cache, stats = attend(
            cache, q, k, v, layer=layer, rotate=c.rope, out_proj=out_proj, window=c.window(layer)
        )
        out = out.transpose(0, 2, 1, 3).reshape(B, T, c.num_query_heads * c.head_dim)
        return _dense(c, c.embed_dim, c.out_bias, "o_proj")(out), cache, stats


class MLP(nn.Module):
    """Gated feed-forward network."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The gated sum."""
        c = self.config
        gate = _ACTIVATIONS[c.activation](_dense(c, c.mlp_dim, c.mlp_bias, "gate_proj")(x))
        return _dense(c, c.embed_dim, c.mlp_bias, "down_proj")(gate * _dense(c, c.mlp_dim, c.mlp_bias, "up_proj")(x))


class Block(nn.Module):
    """One decoder layer."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, LayerStats]:
        """Residual stream, cache and measurements after the layer."""
        c = self.config
        with jax.named_scope("attention"):
            y, cache, stats = Attention(c, name="self_attn")(
                RMSNorm(c, name="input_layernorm")(x), cache, layer=layer, attend=attend
            )
        x = x + y
        with jax.named_scope("mlp"):
            x = x + MLP(c, name="mlp")(RMSNorm(c, name="post_attention_layernorm")(x))
        return x, cache, stats


class Llama(nn.Module):
    """The whole decoder."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        layers: tuple[Any, ...],
        *,
        attend: Attend,
        last_only: bool,
    ) -> tuple[Float[Array, "B _ V"], tuple[Any, ...], tuple[LayerStats, ...]]:
        """Logits, caches and measurements of all layers; `last_only` skips all logits but the last column's."""
        c = self.config
        embedding = self.param(
            "embed_tokens", nn.initializers.normal(0.02), (c.vocab_size, c.embed_dim), jnp.dtype(c.dtype)
        )
        # A bad id must not look like a good one: neither one beyond the vocabulary nor one that counts from its end.
        x = embedding.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        caches, stats = [], []
        for i, cache in enumerate(layers):
            x, cache, measured = Block(c, name=f"layers_{i}")(x, cache, layer=i, attend=attend)
            caches.append(cache)
            stats.append(measured)
        x = RMSNorm(c, name="norm")(x[:, -1:] if last_only else x)
        logits = x @ embedding.T if c.tie_embeddings else _dense(c, c.vocab_size, False, "lm_head")(x)
        return logits.astype(jnp.float32), tuple(caches), tuple(stats)


def _dense(config: ModelConfig, features: int, bias: bool, name: str) -> nn.Dense:
    dtype = jnp.dtype(config.dtype)
    return nn.Dense(features, use_bias=bias, dtype=dtype, param_dtype=dtype, name=name)


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A model as kvjax sees it: a pure function of its parameters, hashable and compared by its config.

    Attributes:
      config: sizes and switches.
    """

    config: ModelConfig

    def __post_init__(self):
        if not isinstance(self.config, ModelConfig):
            raise ValueError(
                f"config is a {type(self.config).__name__}, not a ModelConfig; models.load makes one of a checkpoint"
            )

    def __call__(
        self,
        params: PyTree[Any],
        tokens: Int[Array, "B T"],
        layers: tuple[Any, ...],
        *,
        attend: Attend,
        last_only: bool,
    ) -> tuple[Float[Array, "B _ V"], tuple[Any, ...], tuple[LayerStats, ...]]:
        """See `kvjax.drivers.generation.Model`.

        Raises:
          ValueError: parameters of another model.
        """
        check_params(self, params)
        apply: Any = Llama(self.config).apply
        return apply({"params": params}, tokens, layers, attend=attend, last_only=last_only)

    def init(self, key: Array) -> PyTree[Any]:
        """Random parameters.

        Raises:
          ValueError: `key` is not one key.
        """
        kind, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
        typed = kind is not None and jnp.issubdtype(kind, jax.dtypes.prng_key)
        if shape != () if typed else (kind, shape) != (jnp.uint32, (2,)):
            raise ValueError(f"key={key!r} is not one key; make it with jax.random.key(seed)")
        attend = lambda cache, q, k, v, **_: (q, cache, LayerStats())
        variables = Llama(self.config).init(
            key, jnp.zeros((1, 1), jnp.int32), (None,) * self.config.num_layers, attend=attend, last_only=True
        )
        return variables["params"]

    @property
    def shapes(self) -> PyTree[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the parameters, without making any."""
        return jax.eval_shape(self.init, jax.random.key(0))


@functools.lru_cache(maxsize=64)
def _shapes(model: LanguageModel) -> dict[str, tuple[int, ...]]:
    return _named(model.shapes)


def _named(params: PyTree[Any]) -> dict[str, tuple[int, ...]]:
    return {jax.tree_util.keystr(path): jnp.shape(x) for path, x in jax.tree_util.tree_leaves_with_path(params)}


def check_params(model: LanguageModel, params: PyTree[Any]) -> None:
    """Refuses parameters of other names or shapes than the model's, some of which flax would pass over.

    Raises:
      ValueError: how many there are, and what the first is and should be.
    """
    here, wanted = _named(params), _shapes(model)
    wrong = [n for n in sorted({*here, *wanted}) if here.get(n) != wanted.get(n)]
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{len(wrong)} of {len(wanted)} parameters do not fit the model: {name} is {here.get(name, 'absent')}, but "
            f"the model wants {wanted.get(name, 'none')}; give the parameters that were loaded or made with this model"
        )
