"""SmolLM3: Llama, of which every fourth layer does not rotate queries and keys (arXiv 2501.18795, "RNope")."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.contract import Rotate
from kvjax.contract.checks import whole
from kvjax.models.config import each, read_flag, read_sizes, read_windows, unturned, write_sizes, write_windows
from kvjax.models.family import Family
from kvjax.models.llama import Llama, ModelConfig
from kvjax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class SmolLM3Config(ModelConfig):
    """A SmolLM3 decoder.

    Attributes:
      unrotated: numbers of the layers that do not rotate queries and keys.
    """

    unrotated: tuple[int, ...] = ()

    def rotation(self, layer: int) -> Rotate:
        """The rotary embedding, or none."""
        return unturned if layer in self.unrotated else self.rope


def _read(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    del architecture
    raw = {**_DEFAULTS, **raw}
    sizes = read_sizes(raw)
    layers, bias = range(sizes["num_layers"]), read_flag(raw, "attention_bias")
    every = whole("no_rope_layer_interval", raw["no_rope_layer_interval"])
    rotated = raw.get("no_rope_layers")
    rotated = [int((i + 1) % every != 0) for i in layers] if rotated is None else rotated
    rotated = each("no_rope_layers", rotated, least=0)
    if len(rotated) < len(layers) or not set(rotated) <= {0, 1}:
        raise ValueError(f"no_rope_layers={list(rotated)} is not a list of 1 or 0 for each of {len(layers)} layers")
    kinds = ["full_attention" if rotated[i] else "sliding_attention" for i in layers]
    used = bool(raw.get("layer_types")) or read_flag(raw, "use_sliding_window")
    return {
        **sizes,
        "rope": Rope.from_hugging_face(raw, sizes["max_position"]),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": read_flag(raw, "mlp_bias"),
        "sliding_window": read_windows(raw, kinds, used=used),
        "unrotated": tuple(i for i in layers if not rotated[i]),
    }


def _write(config: SmolLM3Config) -> dict[str, Any]:
    windows = write_windows(config)
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        **write_sizes(config),
        **config.rope.to_hugging_face(),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "no_rope_layers": [int(i not in config.unrotated) for i in range(config.num_layers)],
        "use_sliding_window": windows["sliding_window"] is not None,
        **windows,
        "pad_token_id": None,  # theirs is 128004, whatever the vocabulary
    }


# What transformers' config class assumes where a config.json is silent.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
    "no_rope_layer_interval": 4,
}
FAMILY = Family({"SmolLM3ForCausalLM": "smollm3"}, SmolLM3Config, Llama, _read, _write)
