"""DeepSeek-V3, Kimi-K2 (arXiv 2412.19437) and GLM-4.7-Flash: one latent vector holds keys and values of all heads.

Letters: R turned channels, P other channels of a query, C latent channels, V channels of a head's value.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.contract import KVShape
from kvjax.contract.checks import positive, whole
from kvjax.models.config import read_flag, read_kinds, read_sizes, write_sizes
from kvjax.models.experts import GroupedExpertsConfig, read_groups, sigmoid_network, write_groups
from kvjax.models.family import Family
from kvjax.models.llama import Llama
from kvjax.models.parts import Attend, RMSNorm, dense
from kvjax.models.rope import Rope
from kvjax.pallas_kernels import Logits


@dataclasses.dataclass(frozen=True)
class LatentConfig(GroupedExpertsConfig):
    """A decoder with latent attention (arXiv 2405.04434, Section 2.1).

    All query heads read one key a token: R channels that turn and the latent, which is the value, too. `head_dim` is
    R + C, and R are the channels of `rope`.

    Attributes:
      query_rank: width that queries are made from; 0 for the residual stream itself.
      unturned_dim, value_dim: P and V, of each query head, which make the latent's key and value of it.
      logit_factor: m, of which the square multiplies logits (YaRN's mscale_all_dim).
      moe_lite: whether it is of GLM-4.7-Flash, whose files name its dense layers.
    """

    query_rank: int = 0
    unturned_dim: int = 1
    value_dim: int = 1
    logit_factor: float = 1.0
    moe_lite: bool = False

    def __post_init__(self):
        super().__post_init__()
        for name in ("unturned_dim", "value_dim"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        object.__setattr__(self, "query_rank", whole("query_rank", self.query_rank, least=0))
        object.__setattr__(self, "logit_factor", positive("logit_factor", self.logit_factor))
        if self.logit_factor != 1 and self.rope.factor <= 1:
            raise ValueError(
                f"logit_factor={self.logit_factor} follows from rotary scaling, but rope's factor is {self.rope.factor}"
            )
        if self.num_kv_heads != 1 or self.latent_dim < 1:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} of head_dim={self.head_dim}, of which {self.turned_dim} turn, are "
                "no latent; it has one kv head, whose last channels do not turn"
            )

    @property
    def turned_dim(self) -> int:
        """R."""
        return self.rope.turning(self.head_dim)

    @property
    def latent_dim(self) -> int:
        """C."""
        return self.head_dim - self.turned_dim

    def kv_shape(self, layer: int) -> KVShape:
        """One head, whose last channels are its value."""
        del layer
        return KVShape(1, self.head_dim, self.latent_dim)


class Weight(nn.Module):
    """A projection's weight (out, in), which is multiplied into others."""

    config: LatentConfig
    shape: tuple[int, int]

    @nn.compact
    def __call__(self) -> Float[Array, "F C"]:
        """The weight."""
        return self.param("weight", nn.initializers.lecun_normal(-1, 0), self.shape, jnp.dtype(self.config.dtype))


class Attention(nn.Module):
    """Latent attention over a cache of latents, by queries that the keys' expansion is multiplied into."""

    config: LatentConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], cache: Any, *, layer: int, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """Output, cache after the step, and what was measured."""
        c, bias = self.config, self.config.qkv_bias
        N, R, P, C, V = c.num_query_heads, c.turned_dim, c.unturned_dim, c.latent_dim, c.value_dim
        norm = lambda name: RMSNorm(dataclasses.replace(c, norm_eps=1e-6), name=name)  # whatever the others' is
        if c.query_rank:
            made = norm("q_a_layernorm")(dense(c, c.query_rank, bias, "q_a_proj")(x))
            q = dense(c, N * (P + R), False, "q_b_proj")(made)
        else:
            q = dense(c, N * (P + R), False, "q_proj")(x)
        q = q.reshape(*x.shape[:2], N, P + R)
        y = dense(c, C + R, bias, "kv_a_proj_with_mqa")(x)
        latent, turned = norm("kv_a_layernorm")(y[..., :C]), y[..., C:]
        expand = Weight(c, (N * (P + V), C), name="kv_b_proj")().reshape(N, P + V, C)
        to_key, to_value = expand[:, :P], expand[:, P:]
        of_latent = jnp.einsum("btnp,npc->btnc", q[..., :P], to_key)
        q = jnp.concatenate([q[..., P:], of_latent], -1).transpose(0, 2, 1, 3)
        k = jnp.concatenate([turned, latent], -1)[:, None]
        out_proj = None
        if not self.is_initializing():
            weight = self.variables["params"]["o_proj"]["weight"].reshape(-1, N, V)
            out_proj = jnp.einsum("nvc,dnv->ncd", to_value, weight)
        logits = Logits((P + R) ** -0.5 * c.logit_factor**2, window=c.window(layer))
        how = {"rotate": c.rotation(layer), "out_proj": out_proj, "hidden": x, "logits": logits}
        y, cache, stats = attend(cache, q, k, latent[:, None], layer=layer, **how)
        y = jnp.einsum("bntc,nvc->btnv", y, to_value).reshape(*x.shape[:2], N * V)
        return dense(c, c.embed_dim, c.out_bias, "o_proj")(y), cache, stats


_ALONE: Final = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
"""What configs say of the router that is done in one way."""


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    if "num_local_experts" in raw:  # the name that transformers takes, too
        raw = {"n_routed_experts": raw["num_local_experts"], **raw}
    raw = {**_DEFAULTS[architecture], **raw}
    size = lambda key, least=1: whole(key, raw[key], least=least)
    for key, only in _ALONE.items():
        if raw.get(key, only) != only:
            raise ValueError(f"{key}={raw[key]!r} is not supported; DeepSeek-V3's is {only!r}")
    R, C = size("qk_rope_head_dim"), size("kv_lora_rank")
    if R % 2:
        raise ValueError(f"qk_rope_head_dim={R} is odd, but channels turn in pairs; it must be even")
    sizes = read_sizes({**raw, "head_dim": R + C, "num_key_value_heads": 1})
    L, lite = sizes["num_layers"], architecture == "Glm4MoeLiteForCausalLM"
    rope = Rope.from_hugging_face(raw, sizes["max_position"])
    section = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    all_dim = section.get("mscale_all_dim") if rope.kind != "default" else None
    if all_dim and rope.kind == "longrope":
        raise ValueError("mscale_all_dim beside rotary scaling 'longrope' is not supported")
    scale = 0.1 * positive("mscale_all_dim", all_dim) * math.log(max(rope.factor, 1.0)) + 1.0 if all_dim else 1.0
    groups = read_groups(raw, L)
    if lite:
        kinds = read_kinds(raw, ("dense", "sparse"), ["dense"] + ["sparse"] * (L - 1), "mlp_layer_types")
        groups["dense_layers"] = tuple(i for i, kind in enumerate(kinds) if kind == "dense")
    return {
        **sizes,
        **groups,
        "rope": dataclasses.replace(rope, channels=R, interleaved=read_flag(raw, "rope_interleave", True)),
        "query_rank": 0 if raw["q_lora_rank"] is None else size("q_lora_rank"),
        "unturned_dim": size("qk_nope_head_dim"),
        "value_dim": size("v_head_dim"),
        "logit_factor": scale,
        "qkv_bias": read_flag(raw, "attention_bias"),
        "out_bias": read_flag(raw, "attention_bias"),
        "moe_lite": lite,
    }


def _write(config: LatentConfig) -> dict[str, Any]:
    architecture = "Glm4MoeLiteForCausalLM" if config.moe_lite else "DeepseekV3ForCausalLM"
    sizes = {**write_sizes(config), "num_key_value_heads": config.num_query_heads, "head_dim": config.turned_dim}
    rope, groups = config.rope.to_hugging_face(), write_groups(config)
    if config.logit_factor != 1:
        rope["rope_scaling"]["mscale_all_dim"] = (config.logit_factor - 1) / (0.1 * math.log(config.rope.factor))
    if config.moe_lite:
        dense_ones = {*config.dense_layers}
        del groups["first_k_dense_replace"]
        groups["mlp_layer_types"] = ["dense" if i in dense_ones else "sparse" for i in range(config.num_layers)]
    return {
        "architectures": [architecture],
        "model_type": _ARCHITECTURES[architecture],
        **sizes,
        **groups,
        **rope,
        "kv_lora_rank": config.latent_dim,
        "q_lora_rank": config.query_rank or None,
        "qk_rope_head_dim": config.turned_dim,
        "qk_nope_head_dim": config.unturned_dim,
        "v_head_dim": config.value_dim,
        "rope_interleave": config.rope.interleaved,
        "attention_bias": config.qkv_bias,
    }


# What transformers' config classes assume where a config.json is silent.
_DEEPSEEK: dict[str, Any] = {
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
}
_GLM = {
    "num_attention_heads": 20,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "n_routed_experts": 64,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "rms_norm_eps": 1e-5,
}
_DEFAULTS = {"DeepseekV3ForCausalLM": _DEEPSEEK, "Glm4MoeLiteForCausalLM": {**_DEEPSEEK, **_GLM}}
_ARCHITECTURES = {"DeepseekV3ForCausalLM": "deepseek_v3", "Glm4MoeLiteForCausalLM": "glm4_moe_lite"}
FAMILY = Family(
    _ARCHITECTURES,
    LatentConfig,
    lambda config: Llama(config, sigmoid_network, Attention),
    _read,
    _write,
    stacked="experts",
    further=True,
    float32=("e_score_correction_bias",),
)
