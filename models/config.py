"""Model sizes and switches, read from a Hugging Face `config.json`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from models.checks import flag, positive, whole
from models.rope import Rope
from pallas_kernels.values import one_of

DTYPES = ("float32", "bfloat16", "float16", "float64")
_SIZES = ("vocab_size", "embed_dim", "mlp_dim", "num_layers", "num_query_heads", "num_kv_heads", "head_dim")
_FLAGS = ("tie_embeddings", "qkv_bias", "out_bias", "mlp_bias", "qk_norm")
_LAYER_TYPES = ("sliding_attention", "full_attention")
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
        keep = lambda name, value: object.__setattr__(self, name, value)
        for name in (*_SIZES, "max_position"):
            keep(name, whole(name, getattr(self, name)))
        for name in _FLAGS:
            flag(name, getattr(self, name))
        keep("norm_eps", positive("norm_eps", self.norm_eps))
        keep("sliding_window", _each("sliding_window", self.sliding_window, least=1, empty=True))
        keep("eos_ids", _each("eos_ids", self.eos_ids, least=0))
        if self.bos_id is not None:
            keep("bos_id", whole("bos_id", self.bos_id, least=0))
        one_of("dtype", self.dtype, *DTYPES)
        if not isinstance(self.rope, Rope):
            raise ValueError(f"rope={self.rope!r} is not a Rope")
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_query_heads} query heads are not a multiple of {self.num_kv_heads} kv heads; "
                "every kv head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings turn pairs of channels")
        if self.head_dim == 2 and self.rope.kind == "dynamic":
            raise ValueError("head_dim=2 is too small for dynamic rotary scaling; it needs at least 4")
        if self.activation not in _ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} is not one of {_ACTIVATIONS}")
        if self.sliding_window and len(self.sliding_window) != self.num_layers:
            raise ValueError(f"sliding_window has {len(self.sliding_window)} entries for {self.num_layers} layers")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of every layer."""
        return self.sliding_window or (None,) * self.num_layers

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
      ValueError: an architecture, a quantisation or a rotary scaling that is not supported, naming those that are; a
        value that its key cannot have.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"config.json holds a {type(raw).__name__}, not an object of names and values")
    architecture = _architecture(raw)
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise ValueError(f"the checkpoint is quantised ({method}); load one with float tensors")
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [k for k in needed if k not in raw]
    if missing:
        raise ValueError(f"config.json lacks {missing}")

    raw = {**_CLASS_DEFAULTS.get(architecture, {}), **raw}
    size = lambda key, default=None: whole(key, default if raw.get(key) is None else raw[key])
    width, layers, heads = size("hidden_size"), size("num_hidden_layers"), size("num_attention_heads")
    if raw.get("head_dim") is None and width % heads:
        raise ValueError(f"hidden_size={width} is not a multiple of {heads} heads, so that head_dim must be given")
    max_position = whole("max_position_embeddings", raw.get("max_position_embeddings", 2048))
    eos, bos = raw.get("eos_token_id"), raw.get("bos_token_id")
    eos = () if eos is None else eos if isinstance(eos, list | tuple) else (eos,)
    return ModelConfig(
        vocab_size=size("vocab_size"),
        embed_dim=width,
        mlp_dim=size("intermediate_size"),
        num_layers=layers,
        num_query_heads=heads,
        num_kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", width // heads),
        norm_eps=positive("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        rope=Rope.from_hugging_face(raw, max_position),
        activation=raw.get("hidden_act", "silu"),
        tie_embeddings=_flag(raw, "tie_word_embeddings"),
        max_position=max_position,
        dtype=dtype,
        bos_id=None if bos is None else whole("bos_token_id", bos, least=0),
        eos_ids=_each("eos_token_id", eos, least=0),
        **_ARCHITECTURES[architecture](raw, layers),
    )


def to_hugging_face(config: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """The `config.json` of the family that has these sizes and switches.

    Raises:
      ValueError: a combination that no family has.
    """
    family, architecture, own = _family(config)
    raw = {
        "architectures": [architecture],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        **config.rope.to_hugging_face(),
        "hidden_act": config.activation,
        "tie_word_embeddings": config.tie_embeddings,
        **own,
        "max_position_embeddings": config.max_position,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
        "torch_dtype": dtype,
    }
    read = from_hugging_face(raw, dtype=config.dtype)
    lost = [n for n in (*_SIZES, *_FLAGS, "windows", "rope") if getattr(read, n) != getattr(config, n)]
    if "rope" in lost and read.rope.used == config.rope.used:
        lost.remove("rope")
    if lost:
        values = ", ".join(f"{n}={getattr(config, n)!r}" for n in lost)
        raise ValueError(f"{architecture} comes nearest, but has no {values}; no family of transformers has all of it")
    return raw


def _family(config: ModelConfig) -> tuple[str, str, dict[str, Any]]:
    """model_type, architecture, and the switches that belong to it."""
    windows = [w for w in config.windows if w is not None]
    kinds = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    sliding: dict[str, Any] = {"sliding_window": windows[0] if windows else None}
    if config.qk_norm or (config.qkv_bias and not config.out_bias):
        sliding |= {"use_sliding_window": bool(windows), "layer_types": kinds}
        if config.qk_norm:
            return "qwen3", "Qwen3ForCausalLM", {"attention_bias": config.qkv_bias, **sliding}
        return "qwen2", "Qwen2ForCausalLM", sliding
    if len(set(kinds)) > 1:
        return "ministral", "MinistralForCausalLM", {**sliding, "layer_types": kinds}
    if windows or config.embed_dim % config.num_query_heads:  # transformers refuses a Llama of such a width
        return "mistral", "MistralForCausalLM", sliding
    return "llama", "LlamaForCausalLM", {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


def _architecture(raw: Mapping[str, Any]) -> str:
    """The first supported of `architectures`, or that of `model_type` where none are named."""
    named, family = raw.get("architectures") or [], raw.get("model_type")
    named = [named] if isinstance(named, str) else named
    own = {name.removesuffix("ForCausalLM").lower(): name for name in _ARCHITECTURES}
    if not named and isinstance(family, str) and family in own:
        return own[family]
    known = [x for x in named if x in list(_ARCHITECTURES)] if isinstance(named, list | tuple) else []
    if not known:
        shown = ", ".join(map(str, named)) if isinstance(named, list) else repr(named)
        shown = shown or f"<none, model_type {family!r}>"
        raise ValueError(f"architecture {shown} is not supported; supported are {sorted(_ARCHITECTURES)}")
    if family in list(own) and _ARCHITECTURES[own[family]] is not _ARCHITECTURES[known[0]]:
        raise ValueError(f"architectures={named!r} and model_type={family!r} contradict each other; mend the wrong one")
    return known[0]


def _each(name: str, values: object, *, least: int, empty: bool = False) -> tuple[Any, ...]:
    """Whole numbers, None among them where an entry may be empty."""
    if not isinstance(values, list | tuple):
        raise ValueError(f"{name}={values!r} is not a tuple of whole numbers")
    return tuple(None if empty and x is None else whole(name, x, least=least) for x in values)


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    return flag(key, raw.get(key, False))


def _llama(raw: Mapping[str, Any], layers: int) -> dict[str, Any]:
    del layers
    bias = _flag(raw, "attention_bias")
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": _flag(raw, "mlp_bias")}


def _windows(raw: Mapping[str, Any], layers: int, kinds: Sequence[str], *, used: bool) -> tuple[int | None, ...]:
    """The window of layers that `layer_types` calls sliding, or `kinds` in files without it."""
    kinds = raw.get("layer_types") or kinds
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in _LAYER_TYPES for k in kinds):
        raise ValueError(f"layer_types={kinds!r} is not a list of {layers} names out of {_LAYER_TYPES}")
    if not used or raw.get("sliding_window") is None:
        return ()
    window = whole("sliding_window", raw["sliding_window"])
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _mistral(raw: Mapping[str, Any], layers: int) -> dict[str, Any]:
    return {"sliding_window": _windows(raw, layers, ["sliding_attention"] * layers, used=True)}


def _qwen_windows(raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Layers marked sliding, by name or, in older files, those from `max_window_layers` on."""
    first = whole("max_window_layers", raw.get("max_window_layers", 28), least=0)
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return _windows(raw, layers, kinds, used=_flag(raw, "use_sliding_window"))


def _qwen2(raw: Mapping[str, Any], layers: int) -> dict[str, Any]:
    return {"qkv_bias": True, "sliding_window": _qwen_windows(raw, layers)}


def _qwen3(raw: Mapping[str, Any], layers: int) -> dict[str, Any]:
    bias = _flag(raw, "attention_bias")
    return {"qkv_bias": bias, "out_bias": bias, "qk_norm": True, "sliding_window": _qwen_windows(raw, layers)}


_ARCHITECTURES: dict[str, Callable[[Mapping[str, Any], int], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MinistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}

# What transformers' config classes assume where a config.json is silent.
_MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 4096 * 32}
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": _MISTRAL,
    "MinistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 32768},
    "Qwen3ForCausalLM": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_position_embeddings": 32768,
    },
}
