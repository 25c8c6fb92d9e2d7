"""Phi-3 and Phi-4 mini (arXiv 2404.14219): Llama with fused projections, partial and long rotary embeddings."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import read_sizes, read_windows, write_sizes, write_windows
from kvjax.models.family import Family
from kvjax.models.llama import Llama, ModelConfig
from kvjax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class Phi3Config(ModelConfig):
    """A decoder of the Phi-3 family."""


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


_JOINED = {"qkv_proj": ("qkv_proj",) * 3, "gate_up_proj": ("gate_up_proj",) * 2}
FAMILY = Family({"Phi3ForCausalLM": "phi3"}, Phi3Config, Llama, _read, _write, joined=_JOINED)
