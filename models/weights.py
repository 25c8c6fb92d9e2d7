"""Checkpoints: unmodified Hugging Face directories in, parameters out, and back."""

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.config import ModelConfig, from_hugging_face, to_hugging_face
from models.llama import LanguageModel

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def load(source: str | os.PathLike[str], *, dtype: str = "float32") -> tuple[LanguageModel, PyTree[Any]]:
    """A model and its parameters, from a directory or a hub id.

    Args:
      source: a directory with `config.json` and safetensors (sharded or not), or a hub id such as
        "Qwen/Qwen3-0.6B", which is downloaded.
      dtype: of parameters, activations and the KV cache.

    Returns:
      The model and its parameters.

    Raises:
      ValueError: an unsupported or incomplete checkpoint; missing, extra and mis-shaped tensors are all named.
    """
    path = locate(source)
    model = LanguageModel(read_config(path, dtype=dtype))
    return model, _assemble(model, _tensors(path), path)


def locate(source: str | os.PathLike[str]) -> pathlib.Path:
    """The local directory of a checkpoint, downloading a hub id."""
    path = pathlib.Path(source).expanduser()
    if path.is_dir():
        return path
    parts = str(source).split("/")
    if path.exists() or len(parts) != 2 or not all(parts) or str(source).startswith("."):
        raise ValueError(f"{source} is neither a directory nor a hub id like 'owner/name'")
    from huggingface_hub import snapshot_download  # slow to import, and only wanted here

    try:
        return pathlib.Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors", "tokenizer*"]))
    except Exception as e:
        raise ValueError(f"{source} is not a local directory, and downloading it from the hub failed: {e}") from e


def read_config(path: pathlib.Path, *, dtype: str = "float32") -> ModelConfig:
    """The config of a checkpoint directory."""
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} has no config.json; is it a checkpoint directory?")
    try:
        raw = json.loads(file.read_text())
    except json.JSONDecodeError as e:
        raise ValueError(f"{file} is not JSON: {e}; was it downloaded whole?") from e
    return from_hugging_face(raw, dtype=dtype)


def save(path: str | os.PathLike[str], model: LanguageModel, params: PyTree[Any], *, dtype: str = "float32") -> None:
    """Writes `config.json` and `model.safetensors` that `load` and transformers read."""
    path = pathlib.Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = tuple(k.key for k in keys)
        x = np.asarray(leaf, dtype=jnp.dtype(dtype))
        tensors[_tensor_name(name)] = np.ascontiguousarray(x.T if name[-1] == "kernel" else x)
    save_file(tensors, path / _SINGLE, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(to_hugging_face(model.config, dtype=dtype), indent=2) + "\n")


def _tensor_name(path: tuple[str, ...]) -> str:
    """layers_0/self_attn/q_proj/kernel -> model.layers.0.self_attn.q_proj.weight."""
    parts = list(path)
    if parts[-1] in ("kernel", "scale"):
        parts[-1] = "weight"
    elif parts[-1] == "embed_tokens":
        parts.append("weight")
    if parts[0].startswith("layers_"):
        parts[0] = parts[0].replace("_", ".")
    return ".".join(parts if parts[0] == "lm_head" else ["model", *parts])


def _tensors(path: pathlib.Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, by name, in its stored dtype."""
    if (path / _INDEX).is_file():
        weight_map = json.loads((path / _INDEX).read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
        absent = [f for f in files if not (path / f).is_file()]
        if absent:
            raise ValueError(f"{path / _INDEX} lists {absent}, which do not exist")
    elif (path / _SINGLE).is_file():
        files = [_SINGLE]
    else:
        found = sorted(p.name for p in path.iterdir())
        raise ValueError(f"{path} has no {_SINGLE} or {_INDEX}, only {found}; convert the weights to safetensors")
    tensors: dict[str, Any] = {}
    for file in files:
        for name, x in _read(path / file):
            if name in tensors:
                raise ValueError(f"{path / file}: tensor {name} appears twice in the checkpoint")
            tensors[name] = x
    return tensors


def _read(file: pathlib.Path) -> Iterator[tuple[str, Any]]:
    try:
        with safe_open(file, framework="flax") as f:
            for name in f.keys():  # noqa: SIM118, it is not a dict
                yield name, f.get_tensor(name)
    except SafetensorError as e:
        raise ValueError(f"{file} is not a complete safetensors file ({e}); copy or download it again") from e


def _assemble(model: LanguageModel, tensors: dict[str, Any], path: pathlib.Path) -> PyTree[Any]:
    """Parameters of `model` from named tensors, or an error that names every one that is wrong."""
    wanted = jax.tree_util.tree_leaves_with_path(model.shapes)
    names = {_tensor_name(tuple(k.key for k in keys)): (keys, leaf) for keys, leaf in wanted}
    extra = {n for n in tensors if n not in names and not n.endswith("rotary_emb.inv_freq")}
    if model.config.tie_embeddings and "lm_head.weight" in extra:
        if not np.array_equal(
            np.asarray(tensors["lm_head.weight"]), np.asarray(tensors.get("model.embed_tokens.weight"))
        ):
            raise ValueError(
                f"{path}: config.json ties the output head to the embedding, but lm_head.weight differs from it; "
                "set tie_word_embeddings to false"
            )
        extra.remove("lm_head.weight")
    missing = sorted(set(names) - set(tensors))
    problems = [f"missing tensors {missing}"] if missing else []
    problems += [f"extra tensors {sorted(extra)}"] if extra else []
    for name, (keys, leaf) in names.items():
        if name not in tensors:
            continue
        x = tensors[name]
        expected = leaf.shape[::-1] if keys[-1].key == "kernel" else leaf.shape
        if x.shape != expected:
            problems.append(f"{name} has shape {tuple(x.shape)}, config.json implies {tuple(expected)}")
        elif not jnp.issubdtype(x.dtype, jnp.floating):
            problems.append(f"{name} has dtype {x.dtype}, expected a float type")
    if problems:
        raise ValueError(f"{path} does not fit its config.json: " + "; ".join(problems))

    def build(keys, leaf):
        x = jnp.asarray(tensors.pop(_tensor_name(tuple(k.key for k in keys))))
        return (x.T if keys[-1].key == "kernel" else x).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(build, model.shapes)


def num_params(params: Mapping[str, Any]) -> int:
    """How many numbers a model has."""
    return sum(x.size for x in jax.tree.leaves(params))
