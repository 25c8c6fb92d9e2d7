"""Model sizes and switches, read from a Hugging Face `config.json`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from models.rope import Rope

_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family.

    Attributes:
      vocab_size: V, tokens.
      embed_dim: D, width of the residual stream.
      mlp_dim: F, width of the gated MLP.
      num_layers: L.
      num_query_heads, num_kv_heads: N and K.
      head_dim: H.
      norm_eps: RMSNorm's epsilon.
      rope: rotary embedding and its scaling.
      activation: the MLP's gate.
      tie_embeddings: the output head is the embedding, transposed.
      qkv_bias, out_bias, mlp_bias: which projections have a bias.
      qk_norm: RMSNorm over head_dim on queries and keys, before rotation (Qwen3).
      sliding_window: for every layer, how many positions a query sees; None for all. Empty means None everywhere.
      max_position: positions the model was trained for.
      dtype: of parameters, activations and the KV cache.
      bos_id, eos_ids: special tokens, where the checkpoint names them.
    """

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-5
    rope: Rope = Rope()
    activation: str = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: tuple[int | None, ...] = ()
    max_position: int = 2048
    dtype: str = "float32"
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_query_heads} query heads are not a multiple of {self.num_kv_heads} kv heads; "
                "every kv head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings turn pairs of channels")
        if self.activation not in _ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} is not one of {_ACTIVATIONS}")
        if self.sliding_window and len(self.sliding_window) != self.num_layers:
            raise ValueError(f"sliding_window has {len(self.sliding_window)} entries for {self.num_layers} layers")

    @property
    def additive_rotation(self) -> bool:
        """Whether rotating a key twice is rotating it once by the sum: not where angles or scale depend on length."""
        return self.rope.kind != "dynamic" and self.rope.attention_factor == 1.0

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer."""
        return self.sliding_window[layer] if self.sliding_window else None


def from_hugging_face(raw: Mapping[str, Any], *, dtype: str = "float32") -> ModelConfig:
    """Reads the contents of a `config.json`, of transformers 4 or 5.

    Raises:
      ValueError: an architecture, a quantisation or a rotary scaling that is not supported, naming those that are.
    """
    architecture = (raw.get("architectures") or [f"<none, model_type {raw.get('model_type')!r}>"])[0]
    if architecture not in _ARCHITECTURES:
        raise ValueError(f"architecture {architecture} is not supported; supported are {sorted(_ARCHITECTURES)}")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise ValueError(f"the checkpoint is quantised ({method}); load one with float tensors")
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [k for k in needed if k not in raw]
    if missing:
        raise ValueError(f"config.json lacks {missing}")

    raw = {**_CLASS_DEFAULTS.get(architecture, {}), **raw}
    heads, layers = raw["num_attention_heads"], raw["num_hidden_layers"]
    if raw.get("num_key_value_heads") == 0:
        raise ValueError("config.json has num_key_value_heads=0; every model has at least one kv head")
    max_position = raw.get("max_position_embeddings", 2048)
    eos = raw.get("eos_token_id")
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        embed_dim=raw["hidden_size"],
        mlp_dim=raw["intermediate_size"],
        num_layers=layers,
        num_query_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=Rope.from_hugging_face(raw, max_position),
        activation=raw.get("hidden_act", "silu"),
        tie_embeddings=raw.get("tie_word_embeddings", False),
        mlp_bias=raw.get("mlp_bias", False),
        max_position=max_position,
        dtype=dtype,
        bos_id=raw.get("bos_token_id"),
        eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        **_ARCHITECTURES[architecture](raw, layers),
    )


def to_hugging_face(config: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """The `config.json` of a plain Llama with these sizes.

    Raises:
      ValueError: a feature that LlamaForCausalLM does not have.
    """
    if config.qk_norm or config.sliding_window or config.qkv_bias != config.out_bias:
        raise ValueError("only plain Llama models can be written: no q/k norm, sliding window or bias on q, k, v alone")
    if config.rope.kind != "default":
        raise ValueError(f"rotary scaling {config.rope.kind!r} cannot be written")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": config.activation,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "max_position_embeddings": config.max_position,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
        "torch_dtype": dtype,
    }


def _llama(raw: Mapping[str, Any], layers: int) -> dict[str, Any]:
    del layers
    bias = raw.get("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias}


def _mistral(raw: Mapping[str, Any], layers: int) -> dict[str, Any]:
    window = raw.get("sliding_window")
    return {"sliding_window": (window,) * layers if window is not None else ()}


def _qwen_windows(raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Layers marked sliding, by name or, in older files, those from `max_window_layers` on."""
    if not raw.get("use_sliding_window", False) or raw.get("sliding_window") is None:
        return ()
    kinds = raw.get("layer_types") or [
        "sliding_attention" if i >= raw.get("max_window_layers", 28) else "full_attention" for i in range(layers)
    ]
    return tuple(raw["sliding_window"] if kind == "sliding_attention" else None for kind in kinds)


def _qwen2(raw: Mapping[str, Any], layers: int) -> dict[str, Any]:
    return {"qkv_bias": True, "sliding_window": _qwen_windows(raw, layers)}


def _qwen3(raw: Mapping[str, Any], layers: int) -> dict[str, Any]:
    return {**_llama(raw, layers), "qk_norm": True, "sliding_window": _qwen_windows(raw, layers)}


_ARCHITECTURES: dict[str, Callable[[Mapping[str, Any], int], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}

# What transformers' config classes assume where a config.json is silent.
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 4096 * 32},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 32768},
    "Qwen3ForCausalLM": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_position_embeddings": 32768,
    },
}
