"""Configs of decoders: sizes, positions and special tokens, read from and written to `config.json`."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from jaxtyping import Array, Float, Int

from kvjax.contract import Rotate
from kvjax.contract.checks import flag, one_of, positive, whole
from kvjax.models.rope import Rope

DTYPES = ("float32", "bfloat16", "float16", "float64")
SIZES = ("vocab_size", "embed_dim", "mlp_dim", "num_layers", "num_query_heads", "num_kv_heads", "head_dim")
LAYER_TYPES = ("sliding_attention", "full_attention")
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Fields of every decoder; families add their own.

    Attributes:
      vocab_size: V, tokens.
      embed_dim: D, width of the residual stream.
      mlp_dim: F, width of the feed-forward network.
      num_layers: L.
      num_query_heads, num_kv_heads: N and K.
      head_dim: H.
      norm_eps: epsilon of the normalisations.
      rope: rotary embedding and its scaling.
      activation: that of the feed-forward network.
      tie_embeddings: the output head is the embedding, transposed.
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
    sliding_window: tuple[int | None, ...] = ()
    max_position: int = 2048
    dtype: str = "float32"
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self):
        keep = lambda name, value: object.__setattr__(self, name, value)
        for name in (*SIZES, "max_position"):
            keep(name, whole(name, getattr(self, name)))
        for field in dataclasses.fields(self):
            if field.type is bool:
                flag(field.name, getattr(self, field.name))
        keep("norm_eps", positive("norm_eps", self.norm_eps))
        keep("sliding_window", each("sliding_window", self.sliding_window, least=1, empty=True))
        keep("eos_ids", each("eos_ids", self.eos_ids, least=0))
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
        turning = self.rope.turning(self.head_dim)
        if turning > self.head_dim:
            raise ValueError(f"rope turns {turning} channels, but head_dim={self.head_dim}; a head has no more")
        if turning % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings turn pairs of channels")
        if turning == 2 and self.rope.kind == "dynamic":
            raise ValueError("head_dim=2 is too small for dynamic rotary scaling; it needs at least 4")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} is not one of {ACTIVATIONS}")
        if self.sliding_window and len(self.sliding_window) != self.num_layers:
            raise ValueError(f"sliding_window has {len(self.sliding_window)} entries for {self.num_layers} layers")

    @property
    def learned_positions(self) -> bool:
        """Whether the model adds vectors of positions to its embeddings, instead of turning keys."""
        return False

    @property
    def reach(self) -> int:
        """Tokens of the longest text that the model's positions were made for."""
        return max(self.max_position, self.rope.reach)

    @property
    def border(self) -> int | None:
        """Tokens of a text from which on its keys are rotated by other factors ("longrope"), None for no such step."""
        return self.rope.original_max if self.rope.kind == "longrope" else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of every layer."""
        return self.sliding_window or (None,) * self.num_layers

    @property
    def additive_rotation(self) -> bool:
        """Whether rotating a key twice is rotating it once by the sum: not where angles or scale depend on length."""
        return self.rope.additive

    def rotation(self, layer: int) -> Rotate:
        """The rotary embedding of a layer."""
        del layer
        return self.rope

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer."""
        return self.sliding_window[layer] if self.sliding_window else None

    def holds_kv(self, layer: int) -> bool:
        """Whether a layer holds keys and values, and no state of its own."""
        del layer
        return True

    def kv_source(self, layer: int) -> int | None:
        """The layer whose keys and values a layer reads that holds none; None where it reads no other's."""
        del layer
        return None

    def own_state(self, layer: int, batch: int) -> Any:
        """What a layer that holds none has instead, before any token: a tree of arrays "B ..."."""
        raise ValueError(f"layer {layer} holds keys and values")

    def kind(self, layer: int) -> Hashable:
        """The kind of a layer: layers of one kind differ in their parameters alone."""
        return self.window(layer), self.rotation(layer)


@dataclasses.dataclass(frozen=True)
class LocalRope(DecoderConfig):
    """A decoder whose layers with a window may have a rotary embedding of their own.

    Attributes:
      local_rope: that of layers with a window; that of all layers if None.
    """

    local_rope: Rope | None = None

    @property
    def additive_rotation(self) -> bool:
        """Whether turning a key twice is turning it once by the sum, by both embeddings."""
        return self.rope.additive and (self.local_rope is None or self.local_rope.additive)

    def rotation(self, layer: int) -> Rotate:
        """The rotary embedding of a layer."""
        return self.rope if self.local_rope is None or self.window(layer) is None else self.local_rope


@dataclasses.dataclass(frozen=True)
class HybridConfig(DecoderConfig):
    """A decoder of which some layers hold a state of their own in place of keys and values (`own_state`).

    Attributes:
      stateful_layers: the numbers of these layers.
    """

    stateful_layers: tuple[int, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        if {*range(self.num_layers)} <= {*self.stateful_layers}:
            raise ValueError(f"none of {self.num_layers} layers holds keys and values; make one of full_attention")

    def holds_kv(self, layer: int) -> bool:
        """Whether a layer is one of attention."""
        return layer not in self.stateful_layers

    def kind(self, layer: int) -> Hashable:
        """Layers of attention are of another kind."""
        return super().kind(layer), self.holds_kv(layer)


@dataclasses.dataclass(frozen=True)
class LearnedPositions(DecoderConfig):
    """A decoder that adds a vector of its position to each token's, and turns no keys: `rope` is not read."""

    @property
    def learned_positions(self) -> bool:
        """True."""
        return True

    def rotation(self, layer: int) -> Rotate:
        """Queries and keys as they are."""
        del layer
        return unturned


def unturned(x: Float[Array, "B N T H"], pos: Int[Array, "B #N T"]) -> Float[Array, "B N T H"]:
    """Queries or keys of a model without rotary embeddings."""
    del pos
    return x


def read_sizes(raw: Mapping[str, Any], *, norm: str = "rms_norm_eps", eps: float = 1e-6) -> dict[str, Any]:
    """The fields of `DecoderConfig` but `rope`, `sliding_window` and `dtype`, under the usual keys of a config.json.

    Args:
      raw: its contents.
      norm: the key of the normalisations' epsilon.
      eps: what it is where the file is silent.

    Raises:
      ValueError: a key that is missing, or a value that its key cannot have.
    """
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [k for k in needed if k not in raw]
    if missing:
        raise ValueError(f"config.json lacks {missing}")
    size = lambda key, default=None: whole(key, default if raw.get(key) is None else raw[key])
    width, heads = size("hidden_size"), size("num_attention_heads")
    if raw.get("head_dim") is None and width % heads:
        raise ValueError(f"hidden_size={width} is not a multiple of {heads} heads, so that head_dim must be given")
    eos, bos = raw.get("eos_token_id"), raw.get("bos_token_id")
    eos = () if eos is None else eos if isinstance(eos, list | tuple) else (eos,)
    return {
        "vocab_size": size("vocab_size"),
        "embed_dim": width,
        "mlp_dim": size("intermediate_size"),
        "num_layers": size("num_hidden_layers"),
        "num_query_heads": heads,
        "num_kv_heads": size("num_key_value_heads", heads),
        "head_dim": size("head_dim", width // heads),
        "norm_eps": positive(norm, raw.get(norm, eps)),
        "activation": raw.get("hidden_act", "silu"),
        "tie_embeddings": read_flag(raw, "tie_word_embeddings"),
        "max_position": whole("max_position_embeddings", raw.get("max_position_embeddings", 2048)),
        "bos_id": None if bos is None else whole("bos_token_id", bos, least=0),
        "eos_ids": each("eos_token_id", eos, least=0),
    }


def write_sizes(config: DecoderConfig, *, norm: str = "rms_norm_eps") -> dict[str, Any]:
    """The inverse of `read_sizes`."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        norm: config.norm_eps,
        "hidden_act": config.activation,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_position,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
    }


def renamed(raw: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """A config.json with other keys: those on the left of `keys` for those on the right."""
    usual = {theirs: ours for ours, theirs in keys.items()}
    return {usual.get(k, k): x for k, x in raw.items()}


_GPT = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}
_GPT_UNUSED = ("num_key_value_heads", "head_dim")


def read_gpt_sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """As `read_sizes`, under the keys of GPT-2 and GPT-J; the feed-forward network is four times as wide if silent.

    Raises:
      ValueError: as for `read_sizes`.
    """
    raw = renamed({"activation_function": "gelu_new", **raw}, _GPT) | dict.fromkeys(_GPT_UNUSED)
    if raw.get("intermediate_size") is None and "hidden_size" in raw:
        raw["intermediate_size"] = 4 * whole("n_embd", raw["hidden_size"])
    return read_sizes(raw, norm="layer_norm_epsilon", eps=1e-5)


def write_gpt_sizes(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of `read_gpt_sizes`."""
    raw = write_sizes(config, norm="layer_norm_epsilon")
    return {_GPT.get(k, k): x for k, x in raw.items() if k not in _GPT_UNUSED}


def each(name: str, values: object, *, least: int, empty: bool = False) -> tuple[Any, ...]:
    """Whole numbers, None among them where an entry may be empty.

    Raises:
      ValueError: anything else.
    """
    if not isinstance(values, list | tuple):
        raise ValueError(f"{name}={values!r} is not a tuple of whole numbers")
    return tuple(None if empty and x is None else whole(name, x, least=least) for x in values)


def read_flag(raw: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """A switch of a config.json.

    Raises:
      ValueError: what is none.
    """
    return flag(key, raw.get(key, default))


def read_cap(raw: Mapping[str, Any], key: str, default: float | None = None) -> float | None:
    """A positive number of a config.json, None for none.

    Raises:
      ValueError: anything else.
    """
    cap = raw.get(key, default)
    return None if cap is None else positive(key, cap)


def check_only(raw: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]], before: str = "") -> None:
    """Refuses other values of switches than those that a family has.

    Args:
      raw: the contents of a config.json, or of a section.
      only: the values of every switch, of which the first is what a silent file means.
      before: what stands before the switch in the message: the section or the case.

    Raises:
      ValueError: another value, with the switch and the values that it may have.
    """
    for key, values in only.items():
        if raw.get(key, values[0]) not in values:
            known = " or ".join(map(repr, values))
            raise ValueError(f"{before}{key}={raw[key]!r} is not supported; it must be {known}")


def read_kinds(
    raw: Mapping[str, Any], known: tuple[str, ...], default: Sequence[str], key: str = "layer_types"
) -> list[str]:
    """The kind of every layer, by `layer_types` or by default.

    Raises:
      ValueError: other kinds than the known ones, or another number of them than layers.
    """
    layers, kinds = len(default), raw.get(key) or list(default)
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        raise ValueError(f"{key}={kinds!r} is not a list of {layers} names out of {known}")
    return kinds


def read_windows(raw: Mapping[str, Any], kinds: Sequence[str], *, used: bool = True) -> tuple[int | None, ...]:
    """The window of layers that `layer_types` calls sliding, or `kinds` in files without it.

    Raises:
      ValueError: other kinds, or another number of them than layers.
    """
    kinds = read_kinds(raw, LAYER_TYPES, kinds)
    if not used or raw.get("sliding_window") is None:
        return ()
    window = whole("sliding_window", raw["sliding_window"])
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def write_windows(config: DecoderConfig) -> dict[str, Any]:
    """`sliding_window` and `layer_types`, as `read_windows` reads them."""
    found = [w for w in config.windows if w is not None]
    kinds = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    return {"sliding_window": found[0] if found else None, "layer_types": kinds}


def read_ropes(raw: Mapping[str, Any], longest: int, theta: float, local_theta: float) -> dict[str, Rope]:
    """The fields of `LocalRope`: `rope_parameters` has a section a kind of layer, `rope_scaling` is of full ones.

    Args:
      raw: the contents of a config.json.
      longest: its longest position.
      theta, local_theta: the bases where a section names none.

    Raises:
      ValueError: what is no section, or a rotary embedding that is not supported.
    """
    sections = raw.get("rope_parameters") or {}
    if not isinstance(sections, Mapping):
        raise ValueError(f"rope_parameters={sections!r} is not an object with a section for each kind of layer")
    scaling = {"rope_scaling": raw.get("rope_scaling")}
    for name, section in {**sections, **scaling}.items():
        if section is not None and not isinstance(section, Mapping):
            raise ValueError(f"{name}={section!r} is not an object such as {{'rope_type': 'default'}}")
    full, local = ({**(sections.get(kind) or {})} for kind in reversed(LAYER_TYPES))
    full = {"rope_theta": theta, **full, **(raw.get("rope_scaling") or {})}
    read = lambda section: Rope.from_hugging_face({"rope_parameters": section}, longest)
    return {"rope": read(full), "local_rope": read({"rope_theta": local_theta, **local})}


def write_ropes(config: LocalRope) -> dict[str, Any]:
    """The sections of `rope_parameters`, as `read_ropes` reads them."""
    ropes = dict(zip(LAYER_TYPES, (config.local_rope or config.rope, config.rope), strict=True))
    found = {kind: rope.to_hugging_face() for kind, rope in ropes.items()}
    return {
        kind: {"rope_theta": x["rope_theta"], "rope_type": "default", **x.get("rope_scaling", {})}
        for kind, x in found.items()
    }
