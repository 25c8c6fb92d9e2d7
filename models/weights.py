"""Checkpoints: unmodified Hugging Face directories in, parameters out, and back."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import reprlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvjax.drivers.sampling import Sampler
from models.config import DTYPES, DecoderConfig
from models.decoder import LanguageModel, check_params
from models.families import family_of, from_hugging_face, to_hugging_face
from models.generation_config import FILE as _GENERATION
from models.generation_config import read_sampler, with_end_ids
from pallas_kernels.values import one_of

_CONFIG, _INDEX, _SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_LAYER = re.compile(r"\.(?=\d+\.)")  # before the number of a layer
_BESIDE = ".saving-"
_FILES = ("*.json", "*.safetensors", "tokenizer*", "merges.txt", "*.jinja")
_LFS = b"version https://git-lfs"

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class _Unread:
    """A tensor of a dtype that cannot be read."""

    shape: tuple[int, ...]
    dtype: str


def load(source: str | os.PathLike[str], *, dtype: str = "float32") -> tuple[LanguageModel, PyTree[Any]]:
    """A model and its parameters, from a directory or a hub id.

    Args:
      source: a directory with `config.json` and safetensors (sharded or not), or a hub id such as
        "Qwen/Qwen3-0.6B", which is downloaded.
      dtype: of parameters, activations and the KV cache: "float32", "bfloat16", "float16", or "float64" where jax has
        64 bits.

    Returns:
      The model and its parameters.

    Raises:
      ValueError: an unsupported or incomplete checkpoint; missing, extra and mis-shaped tensors are all named. Values
        that are not finite, or that `dtype` cannot hold.
    """
    _check_dtype(dtype)
    path = locate(source)
    model = LanguageModel(read_config(path, dtype=dtype))
    return model, _assemble(model, _tensors(path), path)


def locate(source: str | os.PathLike[str]) -> pathlib.Path:
    """The local directory of a checkpoint, downloading a hub id."""
    path = _path(source)
    if path.is_dir():
        return path
    parts = str(source).split("/")
    if path.exists() or len(parts) != 2 or not all(parts) or str(source).startswith("."):
        hint = "; it is a file: give the directory that holds it" if path.is_file() else ""
        raise ValueError(f"{source} is neither a directory nor a hub id like 'owner/name'{hint}")
    from huggingface_hub import snapshot_download  # slow to import, and only wanted here

    try:
        return pathlib.Path(snapshot_download(str(source), allow_patterns=[*_FILES]))
    except Exception as e:
        raise ValueError(f"{source} is not a local directory, and downloading it from the hub failed: {e}") from e


def fingerprint(source: str | os.PathLike[str]) -> str:
    """A digest of the config, weights and tokenizer of a directory or hub id: what shows that they are still the same.

    Raises:
      ValueError: neither a directory nor a hub id.
    """
    path, digest = locate(source), hashlib.sha256()
    for file in sorted({f for pattern in _FILES for f in path.glob(pattern) if f.is_file()}):
        with file.open("rb") as f:
            digest.update(file.name.encode() + b"\0" + hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest()[:16]


def read_config(path: pathlib.Path, *, dtype: str = "float32") -> DecoderConfig:
    """The config of a checkpoint directory. End tokens are those of its generation_config.json, where that has any."""
    file = path / _CONFIG
    if not file.is_file():
        cut_off = sorted(str(p.parent) for p in path.glob(f"{_BESIDE}*/{_CONFIG}"))
        fix = f"a save was cut off: move the files in {cut_off} here" if cut_off else "is it a checkpoint directory?"
        raise ValueError(f"{path} has no {_CONFIG}; {fix}")
    raw = _json(file)
    try:
        config = from_hugging_face(raw, dtype=dtype)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from e
    return _of_generation(path, functools.partial(with_end_ids, config))


def default_sampler(source: str | os.PathLike[str]) -> Sampler:
    """How a checkpoint says that it is to be sampled, in its `generation_config.json`.

    Nothing applies it by itself: give it to `kvjax.generate` as `sampler=`.

    Args:
      source: a directory or hub id.

    Returns:
      What transformers would do: `Sample` where the file says `do_sample`, and `Greedy` otherwise, with its repetition
      penalty; `Greedy()` without such a file.

    Raises:
      ValueError: neither a directory nor a hub id; a file that is damaged, or asks for what no sampler has.
    """
    return _of_generation(locate(source), read_sampler)


def _of_generation(path: pathlib.Path, read: Callable[[Any], T]) -> T:
    """What the contents of the generation_config.json of a directory give; they are empty without one."""
    file = path / _GENERATION
    raw = _json(file) if file.is_file() else {}
    try:
        return read(raw)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from e


def save(path: str | os.PathLike[str], model: LanguageModel, params: PyTree[Any], *, dtype: str = "float32") -> None:
    """Writes `config.json` and `model.safetensors` that `load` and transformers read.

    Everything is checked and written beside before anything is replaced. Shards of an earlier checkpoint in the same
    directory, and their index, are deleted after that; other files stay.

    Args:
      path: a directory, made if absent.
      model: whose config is written.
      params: its parameters.
      dtype: of the stored tensors.

    Raises:
      ValueError: a config that no family of transformers has, parameters of another model, or values that `dtype`
        cannot hold.
    """
    one_of("dtype", dtype, *DTYPES)
    if not isinstance(model, LanguageModel):
        raise ValueError(f"model is a {type(model).__name__}, not a LanguageModel")
    path = _path(path)
    blocked = [p for p in (path, path / _CONFIG, path / _SINGLE) if p.exists() and p.is_dir() != (p == path)]
    if blocked:
        raise ValueError(f"{blocked[0]} is in the way; save to a directory of its own")
    config = json.dumps(to_hugging_face(model.config, dtype=dtype), indent=2) + "\n"
    tensors = _named(model, params, dtype)
    path.mkdir(parents=True, exist_ok=True)
    new = pathlib.Path(tempfile.mkdtemp(prefix=_BESIDE, dir=path))
    try:
        save_file(tensors, new / _SINGLE, metadata={"format": "pt"})
        (new / _CONFIG).write_text(config, encoding="utf-8")
        for file in (new / _SINGLE, new / _CONFIG, new):
            _sync(file)
    except BaseException as e:
        shutil.rmtree(new, ignore_errors=True)
        if isinstance(e, OSError | SafetensorError):
            raise OSError(f"{path}: the checkpoint could not be written ({e}); what stood there is unchanged") from e
        raise
    if (path / _CONFIG).is_file() and (path / _CONFIG).read_bytes() != config.encode():
        (path / _CONFIG).unlink()  # new weights never stand beside another model's config
    for name in (_SINGLE, _CONFIG):
        os.replace(new / name, path / name)
    _sync(path)
    new.rmdir()
    for file in [p for p in path.iterdir() if p.name == _INDEX or _SHARD.fullmatch(p.name)]:
        file.unlink()


def _named(model: LanguageModel, params: PyTree[Any], dtype: str) -> dict[str, np.ndarray]:
    """Parameters as a checkpoint's tensors."""
    check_params(model, params)
    family, tensors = family_of(model.config), {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = tuple(k.key for k in keys)
        name, x = family.stored_name(path), np.asarray(leaf)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {x.dtype}, expected a float type")
        with np.errstate(over="ignore"):
            y = x.astype(jnp.dtype(dtype))
        if np.isinf(y).sum() > np.isinf(x).sum():
            raise ValueError(f"{name} has values that {dtype} cannot hold; save it as bfloat16 or float32")
        tensors[name] = np.ascontiguousarray(y.T if family.transposed(path[-1]) else y)
    return tensors


def _path(source: str | os.PathLike[str]) -> pathlib.Path:
    if not isinstance(source, str | os.PathLike) or not str(source):
        raise ValueError(f"{source!r} is not the path of a checkpoint directory")
    try:
        return pathlib.Path(source).expanduser()
    except RuntimeError as e:
        raise ValueError(f"{source}: {e}") from e


def _check_dtype(dtype: str) -> None:
    one_of("dtype", dtype, *DTYPES)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"dtype={dtype!r} needs 64 bits in jax; set jax_enable_x64")


def _sync(file: pathlib.Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_whole(file: pathlib.Path) -> None:
    """Refuses what Git LFS left in place of a file.

    Raises:
      ValueError: a pointer.
    """
    with file.open("rb") as f:
        if f.read(len(_LFS)) == _LFS:
            raise ValueError(f"{file} is a pointer of Git LFS, not the file itself; run `git lfs pull` where it lies")


def _json(file: pathlib.Path) -> Any:
    check_whole(file)
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{file} is not JSON in UTF-8: {e}; was it downloaded whole?") from e


def _tensors(path: pathlib.Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, by name, in its stored dtype. A single file hides an index, as in transformers."""
    if (path / _SINGLE).is_file():
        files = [_SINGLE]
    elif (path / _INDEX).is_file():
        index = _json(path / _INDEX)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        files = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not files or not all(isinstance(f, str) for f in files):
            raise ValueError(f"{path / _INDEX} has no weight_map of tensors to files; download it again")
        files = sorted(set(files))
        absent = [f for f in files if not (path / f).is_file()]
        if absent:
            raise ValueError(f"{path / _INDEX} lists {absent}, which do not exist; download them")
    else:
        found = sorted(p.name for p in path.iterdir())
        shards = any(_SHARD.fullmatch(name) for name in found)
        fix = f"download {_INDEX}" if shards else "convert the weights to safetensors"
        raise ValueError(f"{path} has no {_SINGLE} or {_INDEX}, only {found}; {fix}")
    tensors: dict[str, Any] = {}
    for file in files:
        for name, x in _read(path / file):
            if name in tensors:
                raise ValueError(f"{path / file}: tensor {name} appears twice in the checkpoint")
            tensors[name] = x
    return tensors


def _read(file: pathlib.Path) -> Iterator[tuple[str, Any]]:
    check_whole(file)
    try:
        with safe_open(file, framework="flax") as f:
            for name in f.keys():  # noqa: SIM118, it is not a dict
                stored = f.get_slice(name)
                narrow = stored.get_dtype().startswith(("F4", "F6_", "F8"))  # which numpy does not have
                yield name, _Unread(tuple(stored.get_shape()), stored.get_dtype()) if narrow else f.get_tensor(name)
    except SafetensorError as e:
        raise ValueError(f"{file} is not a complete safetensors file ({e}); copy or download it again") from e


def _assemble(model: LanguageModel, tensors: dict[str, Any], path: pathlib.Path) -> PyTree[Any]:
    """Parameters of `model` from named tensors, or an error that names every one that is wrong."""
    family = family_of(model.config)
    tensors = family.prefixed(tensors)
    stored = {n.split(".")[0] for name in tensors for n in _LAYER.split(name, maxsplit=1)[1:]}
    if model.config.num_layers > len(stored) + 1:  # tracing thousands of layers that are not there would take minutes
        raise ValueError(
            f"{path}: config.json has {model.config.num_layers} layers, the weights have {len(stored)} "
            f"(tensors {reprlib.repr(sorted(tensors))}); mend num_hidden_layers, or add the files that are missing"
        )
    tied, head, table = model.config.tie_embeddings, f"{family.head}.weight", family.stored_name((family.embedding,))
    if tied and table not in tensors and head in tensors:
        tensors[table] = tensors.pop(head)
    wanted = jax.tree_util.tree_leaves_with_path(model.shapes)
    names = {family.stored_name(tuple(k.key for k in keys)): (keys, leaf) for keys, leaf in wanted}
    extra = {n for n in tensors if n not in names and not n.endswith(family.ignored)}
    if tied and head in extra:
        if not np.array_equal(np.asarray(tensors[head]), np.asarray(tensors.get(table))):
            raise ValueError(
                f"{path}: config.json ties the output head to the embedding, but {head} differs from it; "
                "set tie_word_embeddings to false"
            )
        extra.remove(head)
    missing = sorted(set(names) - set(tensors))
    problems = [f"missing tensors {missing}"] if missing else []
    problems += [f"extra tensors {sorted(extra)}"] if extra else []
    for name, (keys, leaf) in names.items():
        if name not in tensors:
            continue
        x = tensors[name]
        expected = leaf.shape[::-1] if family.transposed(keys[-1].key) else leaf.shape
        if x.shape != expected:
            problems.append(f"{name} has shape {tuple(x.shape)}, config.json implies {tuple(expected)}")
        if isinstance(x, _Unread) or not jnp.issubdtype(x.dtype, jnp.floating):
            problems.append(f"{name} has dtype {x.dtype}, expected a float type of 16 bits or more")
    if problems:
        raise ValueError(f"{path} does not fit its config.json: " + "; ".join(problems))

    def build(keys, leaf):
        name = family.stored_name(tuple(k.key for k in keys))
        x = jnp.asarray(tensors.pop(name))
        y = (x.T if family.transposed(keys[-1].key) else x).astype(leaf.dtype)
        if lost := int((~jnp.isfinite(y)).sum()):
            stored = int((~jnp.isfinite(x)).sum())
            fault = "are not finite; download it again" if stored else f"{leaf.dtype} cannot hold; load it as bfloat16"
            raise ValueError(f"{path}: {name} has {stored or lost} of {x.size} values that {fault}")
        return y

    return jax.tree_util.tree_map_with_path(build, model.shapes)


def num_params(params: Mapping[str, Any]) -> int:
    """How many numbers a model has."""
    return sum(x.size for x in jax.tree.leaves(params))
