"""GGUF files, the format of llama.cpp: read by the package `gguf`, and written once as a directory of Hugging Face.

python -m kvjax.models.gguf model.gguf DIR --dtype bfloat16
"""

import argparse
import functools
import hashlib
import json
import math
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import IO, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import LanguageModel
from kvjax.models.families import family_of, from_hugging_face, to_hugging_face
from kvjax.models.gguf_tokenizer import write_tokenizer
from kvjax.models.packaged import PACKAGED, TERMS, accept_license, cache_folder, fetched
from kvjax.models.rope import Rope
from kvjax.models.stored import SINGLE
from kvjax.models.written import folder
from kvjax.pallas_kernels.values import one_of

SUFFIX: Final = ".gguf"
_LAYOUT = 1  # of what is written: another one is converted anew
_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
_PARTS = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_STRIP = 1 << 22  # values that are converted at a time
_HEADERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    **_BLOCK,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ARCHITECTURES: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "llama": ("LlamaForCausalLM", _BLOCK),
    "qwen2": ("Qwen2ForCausalLM", _BLOCK),
    "qwen3": ("Qwen3ForCausalLM", _BLOCK),
    "gemma2": ("Gemma2ForCausalLM", _GEMMA),
    "gemma3": ("Gemma3ForCausalLM", _GEMMA),
    "phi3": ("Phi3ForCausalLM", {**_BLOCK, "ffn_up": "mlp.gate_up_proj"}),
}
_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_FREQUENCIES, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
_PATTERN = "attention.sliding_window_pattern"
_UNUSED = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
_SCALED_BY_WIDTH = (46, 62)  # layers of Gemma 2 and 3 with 27 billion parameters, whose queries are scaled otherwise
_SCALINGS = ("none", "linear", "yarn", "longrope (phi3)", "llama3 (as rope_freqs)")
_TURNS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")  # what ends a turn in chat templates


def converted(file: pathlib.Path, *, dtype: str = "float32") -> pathlib.Path:
    """The directory in the cache folder that holds what a GGUF file does, written the first time.

    Raises:
      ValueError: as for `convert`.
    """
    parts = _parts(file)
    digest = _digest(tuple((part, part.stat().st_size, part.stat().st_mtime_ns) for part in parts))
    directory = cache_folder() / f"gguf{_LAYOUT}-{digest[:32]}-{dtype}"
    if not directory.is_dir():
        print(f"converting {file} once, into {directory}", file=sys.stderr)
        convert(file, directory, dtype=dtype)
    return directory


def convert(file: pathlib.Path, directory: pathlib.Path, *, dtype: str = "float32") -> None:
    """Writes a GGUF file as a new directory of Hugging Face: config, weights, tokenizer and chat template.

    Tensors are converted strip by strip, and the directory appears in one step.

    Args:
      file: the file, or any part of one that was split.
      directory: which is not there yet.
      dtype: of the stored weights: "float32", which holds every quantised value exactly, or "bfloat16".

    Raises:
      ValueError: a file that is damaged, or that holds what is not supported; a place that cannot be written to.
    """
    one_of("dtype", dtype, *_DTYPES)
    keys, tensors = _read(file)
    try:
        architecture = keys.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise ValueError(f"architecture {architecture!r} is not supported; supported are {sorted(_ARCHITECTURES)}")
        config = _config(architecture, keys, tensors)
        named = _named(architecture, config, tensors)
        with folder(directory) as new:
            raw = to_hugging_face(config, dtype=dtype) | {"pad_token_id": keys.get("tokenizer.ggml.padding_token_id")}
            (new / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
            ends = {k: raw[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if raw.get(k) is not None}
            (new / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n", encoding="utf-8")
            write_tokenizer(new, keys, config.vocab_size)
            with (new / SINGLE).open("wb") as out:
                _write(out, named, architecture, config, dtype)
    except (ValueError, NotImplementedError) as e:
        raise ValueError(f"{file}: {e}") from e


@functools.lru_cache(16)
def _digest(parts: tuple[tuple[pathlib.Path, int, int], ...]) -> str:
    """SHA-256 of a file's bytes, or of its parts' digests; of files of this size and time, computed once."""
    found = []
    for part, _, _ in parts:
        with part.open("rb") as f:
            found.append(hashlib.file_digest(f, "sha256").hexdigest())
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()


def _parts(file: pathlib.Path) -> list[pathlib.Path]:
    """The file, or all parts of one that was split.

    Raises:
      ValueError: parts that are missing, or a path that is no file.
    """
    if not file.is_file():
        raise ValueError(f"{file} is not a file; give the path of a GGUF file")
    split = _PARTS.fullmatch(file.name)
    if split is None:
        return [file]
    parts = [file.with_name(f"{split[1]}-{i + 1:05}-of-{split[3]}{SUFFIX}") for i in range(int(split[3]))]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ValueError(f"{file} is one of {len(parts)} parts, of which {missing} are missing; put them beside it")
    return parts


def _package() -> ModuleType:
    try:
        import gguf
    except ImportError as e:
        raise ValueError("GGUF files are read by the package gguf; pip install 'kvjax[gguf]'") from e
    return gguf


def _read(file: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata by key and tensors by name, of all parts of a file."""
    gguf, keys, tensors = _package(), {}, {}
    parts = _parts(file)
    for part in parts:
        with part.open("rb") as f:
            if f.read(4) != b"GGUF":
                raise ValueError(f"{part} is not a GGUF file; give another, or download it again")
        try:
            reader = gguf.GGUFReader(part)
            found = {name: _short(field.contents()) for name, field in reader.fields.items()}
        except Exception as e:
            raise ValueError(f"{part} is not a complete GGUF file ({e}); download it again") from e
        if reader.byte_order != "I":
            raise ValueError(f"{part} is big-endian; run `gguf-convert-endian {part} little` of the package gguf first")
        keys = found | keys
        tensors |= {tensor.name: tensor for tensor in reader.tensors}
    count = keys.get("split.count") or 1
    if count != len(parts):
        raise ValueError(f"{file} is one of {count} parts; give them their names back, ending in -00001-of-{count:05}")
    return keys, tensors


def _config(architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """What the metadata says, read as a config.json of transformers would be."""
    before = f"{architecture}."
    left = {k.removeprefix(before): x for k, x in keys.items() if k.startswith(before)}
    left = {k: x for k, x in left.items() if k not in _UNUSED}
    by_layer = lambda k, x: isinstance(x, list) and k != _PATTERN and len(set(x)) > 1
    if uneven := [before + k for k, x in left.items() if by_layer(k, x)]:
        raise ValueError(f"{uneven} differ by layer, which is not supported; all layers have the same sizes")
    left = {k: x[0] if isinstance(x, list) and k != _PATTERN and x else x for k, x in left.items()}
    missing = [before + key for key in _SIZES.values() if key not in left]
    missing += [name for name in ("token_embd.weight", "output_norm.weight") if name not in tensors]
    if missing:
        raise ValueError(f"{missing} are missing; convert the model again with llama.cpp")
    get = left.pop
    raw: dict[str, Any] = {name: get(key) for name, key in _SIZES.items()}
    width, heads, layers = (raw[k] for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    raw["head_dim"] = head_dim = get("attention.key_length", width // heads)
    turning = get("rope.dimension_count", head_dim)
    raw |= {
        "architectures": [_ARCHITECTURES[architecture][0]],
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "partial_rotary_factor": None if turning == head_dim else turning / head_dim,
        "sliding_window": None,
        **_rope(architecture, get, tensors, turning),
        **_ends(keys),
    }
    if architecture == "phi3":
        raw["sliding_window"] = get("attention.sliding_window", 0) or None
    if architecture in ("gemma2", "gemma3"):
        pattern = get(_PATTERN, 2 if architecture == "gemma2" else 6)
        slides = pattern if isinstance(pattern, list) else [not pattern or (i + 1) % pattern for i in range(layers)]
        raw |= {
            "sliding_window": get("attention.sliding_window", None),
            "layer_types": ["sliding_attention" if x else "full_attention" for x in slides],
            "query_pre_attn_scalar": width // heads if layers in _SCALED_BY_WIDTH else head_dim,
            "attn_logit_softcapping": get("attn_logit_softcapping", 50.0) if architecture == "gemma2" else None,
            "final_logit_softcapping": get("final_logit_softcapping", 30.0 if architecture == "gemma2" else None),
        }
        if not raw["sliding_window"]:
            raise ValueError(f"{before}attention.sliding_window is missing; convert the model again with llama.cpp")
    lengths = {f"attention.{x}_length{swa}": head_dim for x in ("key", "value") for swa in ("", "_swa")}
    fixed = lengths | {"rope.dimension_count_swa": turning, "attention.causal": True}
    unknown = [f"{before}{k}={x!r}" for k, x in left.items() if x != fixed.get(k, 0)]
    if unknown:
        raise ValueError(f"{unknown} is not supported for {architecture}; load such a model from its own checkpoint")
    return from_hugging_face(raw)


def _rope(architecture: str, get: Any, tensors: Mapping[str, Any], turning: int) -> dict[str, Any]:
    """The rotary embedding, under the keys of a config.json."""
    theta, kind = get("rope.freq_base", 10000.0), get("rope.scaling.type", "linear")
    factor = get("rope.scaling.factor", 0.0) or get("rope.scale_linear", 0.0) or 1.0
    original, attention = get("rope.scaling.original_context_length", None), get("rope.scaling.attn_factor", None)
    raw: dict[str, Any] = {"rope_theta": theta, "rope_local_base_freq": get("rope.freq_base_swa", 10000.0)}
    if architecture == "phi3" and _LONG in tensors:
        short, long = ([_short(float(x)) for x in tensors[name].data] for name in (_SHORT, _LONG))
        section = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": attention}
        return {**raw, "original_max_position_embeddings": original, "rope_scaling": section}
    if _FREQUENCIES in tensors:
        factors = np.asarray(tensors[_FREQUENCIES].data, np.float64)
        rope = Rope("llama3", theta, float(factors.max()), original or 8192)
        expected = Rope(theta=theta).frequencies(turning) / rope.frequencies(turning)
        if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
            raise ValueError(f"{_FREQUENCIES} holds factors of no known scaling, only those of Llama 3.1 are supported")
        return {**raw, **rope.to_hugging_face()}
    if kind == "yarn":
        betas = {name: x for name in ("beta_fast", "beta_slow") if (x := get(f"rope.scaling.yarn_{name}", None))}
        attention = (attention or 1.0) * (1 + 0.1 * math.log(factor))
        section = {
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": attention,
            **betas,
        }
        return {**raw, "rope_scaling": {"rope_type": "yarn", **section}}
    if kind not in ("none", "linear"):
        raise ValueError(f"rope.scaling.type {kind!r} is not supported here; supported are {_SCALINGS}")
    if kind == "none" or factor == 1 or architecture == "phi3":
        return raw
    return {**raw, "rope_scaling": {"rope_type": kind, "factor": factor}}


def _ends(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of BOS and of all tokens that end a text, or a turn of a chat."""
    tokens, template = keys.get("tokenizer.ggml.tokens", []), keys.get("tokenizer.chat_template", "")
    ends = [keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends += [tokens.index(turn) for turn in _TURNS if turn in template and turn in tokens]
    named = [*dict.fromkeys(end for end in ends if end is not None)]
    return {"bos_token_id": keys.get("tokenizer.ggml.bos_token_id"), "eos_token_id": named}


def _short(x: Any) -> Any:
    """The shortest number that a float32 of the file stands for; anything else as it is."""
    return float(str(np.float32(x))) if isinstance(x, float) and float(np.float32(x)) == x else x


def _named(architecture: str, config: DecoderConfig, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors by the names that transformers gives them.

    Raises:
      ValueError: tensors that are missing, not known, of another shape, or quantised as nothing here reads.
    """
    gguf, family, blocks = _package(), family_of(config), _ARCHITECTURES[architecture][1]
    found: dict[str, Any] = {}
    problems: list[str] = []
    kinds = {tensor.tensor_type for tensor in tensors.values()}
    if unread := sorted(kind.name for kind in kinds if not _reads(gguf, kind)):
        known = [kind.name for kind in gguf.GGMLQuantizationType if _reads(gguf, kind)]
        raise ValueError(f"tensors are quantised as {unread}, which is not supported; supported are {known}")
    for name, tensor in tensors.items():
        stem, _, ending = name.rpartition(".")
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        new = f"model.layers.{block[1]}.{blocks[block[2]]}" if block and block[2] in blocks else _HEADERS.get(stem)
        if new is not None:
            found[f"{new}.{ending}"] = tensor
        elif name not in (_FREQUENCIES, _SHORT, _LONG):
            problems.append(f"{name} is not known")
    if config.num_layers > len({name.split(".")[1] for name in tensors if name.startswith("blk.")}):
        raise ValueError(f"{architecture}.block_count is {config.num_layers}, but tensors are of fewer blocks")
    leaves = jax.tree_util.tree_leaves_with_path(LanguageModel(config).shapes)
    wanted = {t.name: t.shape for keys, x in leaves for t in family.tensors(tuple(k.key for k in keys), x.shape)}
    problems += [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is not one of {architecture}" for name in found if name not in wanted]
    shapes = {name: (*reversed(tensor.shape.tolist()),) for name, tensor in found.items() if name in wanted}
    problems += [f"{n} has shape {s}, not {wanted[n]}" for n, s in shapes.items() if s != wanted[n]]
    if problems:
        raise ValueError(f"{'; '.join(problems[:8])}; convert the model again with llama.cpp")
    return found


def _reads(gguf: ModuleType, kind: Any) -> bool:
    """Whether the package has a quantisation."""
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _write(out: IO[bytes], named: Mapping[str, Any], architecture: str, config: DecoderConfig, dtype: str) -> None:
    """A file of safetensors: its header, and then one strip after another."""
    kind, place = jnp.dtype(dtype), 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, tensor in named.items():
        end = place + tensor.n_elements * kind.itemsize
        shape = tensor.shape.tolist()[::-1]
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    for name, tensor in named.items():
        order, less = None, 0.0
        if architecture == "llama" and (own := re.search(r"\.([qk])_proj\.", name)):
            heads = config.num_query_heads if own[1] == "q" else config.num_kv_heads
            order = np.arange(len(tensor.data)).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            less = 1.0
        for strip in _strips(tensor, order):
            out.write(np.ascontiguousarray(strip - less if less else strip, kind).view(np.uint8).data)


def _strips(tensor: Any, order: np.ndarray | None) -> Iterator[np.ndarray]:
    """The values of a tensor, a few rows at a time, in another order of rows if one is given."""
    gguf, rows = _package(), tensor.data
    step = len(rows) if rows.ndim == 1 else max(1, _STRIP // int(tensor.shape[0]))
    for i in range(0, len(rows), step):
        strip = rows[i : i + step] if order is None else rows[order[i : i + step]]
        yield gguf.dequantize(strip, tensor.tensor_type)


def main(argv: Sequence[str] | None = None) -> None:
    """The command that converts a file."""
    parser = argparse.ArgumentParser(prog="python -m kvjax.models.gguf", description="GGUF to Hugging Face")
    parser.add_argument("source", help=f"a GGUF file, or one of {', '.join(PACKAGED)}")
    parser.add_argument("directory", type=pathlib.Path, help="where; not there yet")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the stored weights")
    parser.add_argument("--accept-license", choices=TERMS, help="whose terms you have read and accept")
    options = parser.parse_args(argv)
    try:
        if options.accept_license:
            accept_license(options.accept_license)
        file = fetched(options.source) if options.source in PACKAGED else pathlib.Path(options.source)
        if options.directory.exists():
            raise ValueError(f"{options.directory} is there already; name a new directory")
        convert(file, options.directory, dtype=options.dtype)
    except ValueError as e:
        raise SystemExit(f"error: {e}") from e


if __name__ == "__main__":
    main()
