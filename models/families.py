"""The table of families: a new one is a file and a line here."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvjax.models import (
    cohere2,
    deepseek_v3,
    falcon,
    gemma,
    gemma4,
    glm4,
    glm4_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    lfm2,
    llama,
    mixtral,
    mpt,
    olmo,
    opt,
    phi3,
    qwen3_moe,
    qwen3_next,
    smollm3,
    stablelm,
)
from kvjax.models.config import DecoderConfig
from kvjax.models.family import Family

_FILES = (llama, smollm3, olmo, lfm2, gemma, glm4, phi3, mixtral, qwen3_moe, glm4_moe, gpt_oss, qwen3_next)
_FILES += (gpt2, gpt_neox, gptj, opt, mpt, stablelm, falcon, cohere2, deepseek_v3, gemma4)
FAMILIES = (*(file.FAMILY for file in _FILES), qwen3_next.NEXT)
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}
_BY_TYPE = {kind: name for family in FAMILIES for name, kind in family.architectures.items()}
_CHOICES = ("dtype", "bos_id", "eos_ids")  # what a config.json may leave open


def family_of(config: DecoderConfig) -> Family:
    """The family of a config.

    Raises:
      ValueError: a config that belongs to none.
    """
    found = [family for family in FAMILIES if type(config) is family.config]
    if not found:
        names = sorted(family.config.__name__ for family in FAMILIES)
        raise ValueError(f"config is a {type(config).__name__}, of no family; give one of {names}")
    return found[0]


def from_hugging_face(raw: Mapping[str, Any], *, dtype: str = "float32") -> DecoderConfig:
    """Reads the contents of a `config.json`, of transformers 4 or 5.

    Raises:
      ValueError: an architecture, a quantisation or a rotary scaling that is not supported, naming those that are; a
        value that its key cannot have.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"config.json holds a {type(raw).__name__}, not an object of names and values")
    raw = _text(raw)
    architecture = _architecture(raw)
    family = _BY_ARCHITECTURE[architecture]
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        if not (method == "mxfp4" and family.packed) and block_of(raw) is None:
            raise ValueError(f"the checkpoint is quantised ({method}); load one with float tensors")
    return family.config(**family.read(raw, architecture), dtype=dtype)


def block_of(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a factor in a checkpoint of 8 bits (fp8, E4M3); None of every other."""
    match raw.get("quantization_config"):
        case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)], **other}:
            return (rows, columns) if min(rows, columns) > 0 and other.get("fmt", "e4m3") == "e4m3" else None
    return None


def to_hugging_face(config: DecoderConfig, *, dtype: str) -> dict[str, Any]:
    """The `config.json` of the architecture that has these sizes and switches.

    Raises:
      ValueError: a combination that no architecture has.
    """
    raw = {**family_of(config).write(config), "torch_dtype": dtype}
    read = from_hugging_face(raw, dtype=config.dtype)
    names = [f.name for f in dataclasses.fields(config) if f.name not in (*_CHOICES, "sliding_window")]
    lost = [n for n in (*names, "windows") if getattr(read, n) != getattr(config, n)]
    if "rope" in lost and read.rope.used == config.rope.used:
        lost.remove("rope")
    if lost:
        values = ", ".join(f"{n}={getattr(config, n)!r}" for n in lost)
        nearest = raw["architectures"][0]
        raise ValueError(f"{nearest} comes nearest, but has no {values}; no family of transformers has all of it")
    return raw


def _text(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text model, where a model of text and images has one for each."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type") not in _BY_TYPE:
        return raw
    outer = {k: raw[k] for k in ("quantization_config", "tie_word_embeddings") if k in raw}
    return {**text, **outer, "architectures": [_BY_TYPE[text["model_type"]]]}


def _architecture(raw: Mapping[str, Any]) -> str:
    """The first supported of `architectures`, or that of `model_type` where none are named."""
    named, kind = raw.get("architectures") or [], raw.get("model_type")
    named = [named] if isinstance(named, str) else named
    own = _BY_TYPE.get(kind) if isinstance(kind, str) else None
    if not named and own:
        return own
    known = [x for x in named if x in list(_BY_ARCHITECTURE)] if isinstance(named, list | tuple) else []
    if not known:
        shown = ", ".join(map(str, named)) if isinstance(named, list) else repr(named)
        shown = shown or f"<none, model_type {kind!r}>"
        raise ValueError(f"architecture {shown} is not supported; supported are {sorted(_BY_ARCHITECTURE)}")
    if own and _BY_ARCHITECTURE[known[0]].architectures[known[0]] != kind and not {own, known[0]} <= _ALIKE:
        raise ValueError(f"architectures={named!r} and model_type={kind!r} contradict each other; mend the wrong one")
    return known[0]


_ALIKE = {"MistralForCausalLM", "MinistralForCausalLM"}  # Ministral is stored under the name of Mistral
