"""Checkpoints: unmodified Hugging Face directories in, parameters out, and back."""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
import reprlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from safetensors import SafetensorError
from safetensors.numpy import save_file

from kvjax.contract.checks import one_of
from kvjax.generation.sampling import Sampler
from kvjax.models.config import DTYPES, DecoderConfig
from kvjax.models.decoder import LanguageModel
from kvjax.models.families import block_of, family_of, from_hugging_face, to_hugging_face
from kvjax.models.generation_config import read_sampler, with_end_ids
from kvjax.models.sources import CONFIG, GENERATION, TOKENIZER, local_path, locate, repository
from kvjax.models.stored import (
    INDEX,
    SHARD,
    SINGLE,
    WORKERS,
    Stored,
    apart,
    empty,
    fill,
    read_json,
    same,
    scaled,
    stored_tensors,
    unpacked,
    weight_files,
)
from kvjax.models.written import sync
from kvjax.run.checks import check_model

Sharding = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding]

_LAYER = re.compile(r"\.(\d+)\.")  # around the number of a layer
_BESIDE = ".saving-"
_AUTO = "auto"
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}
_PICKLED = (".bin", ".pth", ".pt", ".ckpt")

T = TypeVar("T")


def load(
    source: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    sharding: Sharding | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> tuple[LanguageModel, PyTree]:
    """A model and its parameters, from a directory, a hub id or the name of a preset.

    Tensors are read one after another, each straight into its place and its dtype: at the peak, the host holds the
    parameters once, and a strip of a tensor.

    Args:
      source: a directory with `config.json` and safetensors (sharded or not); "embedded" or "varied", small models that
        come with kvjax; a GGUF file; or what is downloaded: a hub id such as "Qwen/Qwen3-0.6B" or
        "owner/name@revision", a name of `models.PRESETS`, or "smollm2-135m-instruct" and others of
        `models.packaged.PACKAGED`.
      dtype: of parameters, activations and the KV cache: "float32", "bfloat16", "float16", or "float64" where jax has
        64 bits, by these names; "auto" for the one that is stored.
      sharding: where parameters go, for all or as a function of a parameter's path, such as
        "layers_0/self_attn/o_proj/weight", and its shape; jax's default device if None. A device receives its part
        alone.
      revision: a branch, tag or commit of the hub.
      token: for repositories of the hub that ask for one; the one that is logged in if None.

    Returns:
      The model and its parameters.

    Raises:
      ValueError: an unsupported or incomplete checkpoint; missing, extra and mis-shaped tensors are all named. Values
        that are not finite, or that `dtype` cannot hold. A sharding that does not divide a parameter.
    """
    _check_name(dtype, _AUTO)
    if dtype != _AUTO:
        _check_held(dtype)
    path = locate(source, revision=revision, token=token)
    config = _config_in(path, "float32" if dtype == _AUTO else dtype)
    family = family_of(config)
    found = stored_tensors(_weights(path, source, revision))
    tensors = family.prefixed(found)
    if len(tensors) < len(found):  # of text and images: whether its two configs say it or not, it has a head or none
        config = dataclasses.replace(config, tie_embeddings=f"{family.head}.weight" not in tensors)
    tensors = unpacked(tensors) if family.packed else tensors
    if block := block_of(read_json(path / CONFIG)):
        tensors = scaled(tensors, block)
    tensors = tensors if family.stacked is None else apart(tensors, family.stacked)
    if family.further:
        ahead = lambda n: n.startswith("mtp.") or (_layer(n) or 0) >= config.num_layers
        tensors = {n: t for n, t in tensors.items() if not ahead(n)}
    if unread := family.unread(config):
        tensors = {n: t for n, t in tensors.items() if not n.startswith(unread)}
    if dtype == _AUTO:
        kept = {n: t.dtype for n, t in tensors.items() if t.dtype and not n.endswith(family.ignored + family.float32)}
        config = dataclasses.replace(config, dtype=_stored_dtype(path, kept))
    model = LanguageModel(config)
    return model, _assemble(model, tensors, path, sharding)


def fingerprint(source: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None) -> str:
    """A digest of what `load` and `load_tokenizer` read: what shows that config, weights and tokenizer are the same.

    Args:
      source, revision, token: as for `load`.

    Raises:
      ValueError: neither a directory nor a hub id, or one without weights.
    """
    path, digest = locate(source, revision=revision, token=token), hashlib.sha256()
    weights = _weights(path, source, revision)
    index = [] if weights == [path / SINGLE] else [path / INDEX]  # which a single file hides
    beside = [f for f in (path / name for name in (CONFIG, GENERATION, *TOKENIZER)) if f.is_file()]
    for file in sorted({*beside, *weights, *(f for f in index if f.is_file())}):
        with file.open("rb") as f:
            name = file.relative_to(path).as_posix()
            digest.update(name.encode() + b"\0" + hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest()[:16]


def read_config(
    source: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None, dtype: str = "float32"
) -> DecoderConfig:
    """The config of a checkpoint's model, without its weights: what `kvjax.plan_memory` asks for.

    End tokens are those of `generation_config.json`, where that has any.

    Args:
      source, revision, token: as for `load`.
      dtype: of parameters, activations and the KV cache.

    Raises:
      ValueError: neither a directory nor a hub id, or a config that no family here reads.
    """
    _check_name(dtype)
    return _config_in(locate(source, revision=revision, token=token, weights=False), dtype)


def _config_in(path: pathlib.Path, dtype: str) -> DecoderConfig:
    """The config of a checkpoint directory."""
    file = path / CONFIG
    if not file.is_file():
        cut_off = sorted(str(p.parent) for p in path.glob(f"{_BESIDE}*/{CONFIG}"))
        fix = f"a save was cut off: move the files in {cut_off} here" if cut_off else "is it a checkpoint directory?"
        raise ValueError(f"{path} has no {CONFIG}; {fix}")
    raw = read_json(file)
    try:
        config = from_hugging_face(raw, dtype=dtype)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from e
    return _of_generation(path, functools.partial(with_end_ids, config))


def default_sampler(
    source: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None
) -> Sampler:
    """How a checkpoint says that it is to be sampled, in its `generation_config.json`.

    Nothing applies it by itself: give it to `kvjax.generate` as `sampler=`.

    Args:
      source, revision, token: as for `load`.

    Returns:
      What transformers would do: `Sample` where the file says `do_sample`, and `Greedy` otherwise, with its repetition
      penalty; `Greedy()` without such a file.

    Raises:
      ValueError: neither a directory nor a hub id; a file that is damaged, or asks for what no sampler has.
    """
    return _of_generation(locate(source, revision=revision, token=token, weights=False), read_sampler)


def _of_generation(path: pathlib.Path, read: Callable[[Any], T]) -> T:
    """Applies `read` to the contents of a directory's generation_config.json; empty without one."""
    file = path / GENERATION
    raw = read_json(file) if file.is_file() else {}
    try:
        return read(raw)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from e


def save(path: str | os.PathLike[str], model: LanguageModel, params: PyTree, *, dtype: str = "float32") -> None:
    """Writes `config.json` and `model.safetensors` that `load` and transformers read.

    Everything is checked and written beside before anything is replaced. Shards of an earlier checkpoint in the same
    directory, and their index, are deleted after that; other files stay. A `generation_config.json` that names other
    end tokens gets the model's.

    Args:
      path: a directory, made if absent.
      model: whose config is written.
      params: its parameters.
      dtype: of the stored tensors.

    Raises:
      ValueError: a config that no family of transformers has, parameters of another model, or values that `dtype`
        cannot hold.
    """
    _check_name(dtype)
    if not isinstance(model, LanguageModel):
        raise ValueError(f"model is a {type(model).__name__}, not a LanguageModel")
    path = local_path(path)
    blocked = [p for p in (path, path / CONFIG, path / SINGLE) if p.exists() and p.is_dir() != (p == path)]
    blocked += [p for p in path.parents if p.is_file()]
    if blocked:
        raise ValueError(f"{blocked[0]} is in the way; save to a directory of its own")
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(params)):
        raise ValueError("params are traced, and have no values to write; save outside of jit")
    config = json.dumps(to_hugging_face(model.config, dtype=dtype), indent=2) + "\n"
    generation = _with_end_ids(path / GENERATION, model.config.eos_ids)
    tensors = _named(model, params, dtype)
    path.mkdir(parents=True, exist_ok=True)
    new = pathlib.Path(tempfile.mkdtemp(prefix=_BESIDE, dir=path))
    try:
        save_file(tensors, new / SINGLE, metadata={"format": "pt"})
        (new / CONFIG).write_text(config, encoding="utf-8")
        shutil.copymode(new / CONFIG, new / SINGLE)  # safetensors lets nobody but the owner read
        if generation is not None:
            (new / GENERATION).write_text(generation, encoding="utf-8")
        for file in (*sorted(new.iterdir()), new):
            sync(file)
    except BaseException as e:
        shutil.rmtree(new, ignore_errors=True)
        if isinstance(e, OSError | SafetensorError):
            raise OSError(f"{path}: the checkpoint could not be written ({e}); what stood there is unchanged") from e
        raise
    if (path / CONFIG).is_file() and (path / CONFIG).read_bytes() != config.encode():
        (path / CONFIG).unlink()  # new weights never stand beside another model's config
    for name in (SINGLE, CONFIG, *([] if generation is None else [GENERATION])):
        os.replace(new / name, path / name)
    sync(path)
    new.rmdir()
    for file in [p for p in path.iterdir() if p.name == INDEX or SHARD.fullmatch(p.name)]:
        file.unlink()


def _with_end_ids(file: pathlib.Path, eos_ids: tuple[int, ...]) -> str | None:
    """The contents of a generation_config.json with these end tokens, where there is one that names others."""
    if not file.is_file():
        return None
    raw = read_json(file)
    named = raw.get("eos_token_id") if isinstance(raw, dict) else None
    if named is None or (tuple(named) if isinstance(named, list) else (named,)) == eos_ids:
        return None
    return json.dumps({**raw, "eos_token_id": list(eos_ids) or None}, indent=2) + "\n"


def _named(model: LanguageModel, params: PyTree, dtype: str) -> dict[str, np.ndarray]:
    """Parameters as a checkpoint's tensors."""
    check_model(model, params)
    family, tensors = family_of(model.config), {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path, x = tuple(k.key for k in keys), np.asarray(leaf)
        name = family.stored_name(path)
        with np.errstate(over="ignore"):
            y = x.astype("float32" if name.endswith(family.float32) else jnp.dtype(dtype))
        if np.isinf(y).sum() > np.isinf(x).sum():
            raise ValueError(f"{name} has values that {dtype} cannot hold; save it as bfloat16 or float32")
        for tensor in family.tensors(path, y.shape):
            rows = y[tensor.part] if tensor.members is None else y[:, tensor.members].reshape(-1, *y.shape[3:])
            out = tensors.setdefault(tensor.name, np.empty(tensor.shape, y.dtype))
            (out.swapaxes(-1, -2) if tensor.flip else out)[tensor.start :][: len(rows)] = rows
    return tensors


def _check_name(dtype: str, *more: str) -> None:
    """Refuses what names no dtype in full, as every manifest and every config.json does."""
    if isinstance(dtype, str) and dtype in _SHORT:
        raise ValueError(f"dtype={dtype!r} is not one of {(*DTYPES, *more)}; write {_SHORT[dtype]!r}")
    one_of("dtype", dtype, *DTYPES, *more)


def _check_held(dtype: str) -> None:
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"dtype={dtype!r} needs 64 bits in jax; set jax_enable_x64, or give another dtype")


def _stored_dtype(path: pathlib.Path, kinds: Mapping[str, str]) -> str:
    """The one dtype of tensors, from that of each by name."""
    names: dict[str, list[str]] = {}
    for name, kind in sorted(kinds.items()):
        names.setdefault(kind, []).append(name)
    if len(names) > 1:
        shown = " and ".join(f"{kind} ({len(n)} tensors, such as {n[0]})" for kind, n in sorted(names.items()))
        raise ValueError(f"{path} stores {shown}, so that dtype='auto' names none; give dtype= one of {sorted(names)}")
    dtype = next(iter(names), "float32")
    _check_held(dtype)
    return dtype


def _weights(path: pathlib.Path, source: str | os.PathLike[str], revision: str | None) -> list[pathlib.Path]:
    """The safetensors files of a directory, at least one."""
    if files := weight_files(path):
        return files
    raise ValueError(
        f"{path} has no {SINGLE} or {INDEX}, only {_names(path)}; {_other_weights(path, source, revision)}"
    )


def _names(path: pathlib.Path, *endings: str) -> list[str]:
    return sorted(p.name for p in path.iterdir() if not endings or p.suffix in endings)


def _other_weights(path: pathlib.Path, source: str | os.PathLike[str], revision: str | None) -> str:
    """Advice for a checkpoint without weights that can be read."""
    pickled, classes, target = _names(path, *_PICKLED), "t.AutoModelForCausalLM,", str(path)
    if local_path(source) != path:
        name, revision = repository(source, revision)
        reason, classes, target = "its repository has none", f"{classes} t.AutoTokenizer", name.split("/")[1]
        which = f"{name!r}, revision={revision!r}" if revision else repr(name)
    elif pickled:
        reason, which = f"{pickled} are pickles, which run code when they are read", repr(target)
    else:
        return "convert the weights to safetensors, or download them"
    return (
        f"{reason}: convert weights that you trust, where torch is installed, by\npython -c "
        f'"import transformers as t; [c.from_pretrained({which}).save_pretrained({target!r}, safe_serialization=True) '
        f'for c in ({classes})]"'
    )


def _places(shapes: PyTree[jax.ShapeDtypeStruct], sharding: Sharding | None) -> PyTree:
    """The sharding of every parameter, tried against its shape; None for jax's default device."""
    if sharding is not None and not callable(sharding) and not isinstance(sharding, jax.sharding.Sharding):
        raise ValueError(f"sharding={sharding!r} is neither a jax.sharding.Sharding nor a function that gives one")

    def place(keys, leaf):
        if sharding is None:
            return None
        path = "/".join(k.key for k in keys)
        try:
            found = sharding if isinstance(sharding, jax.sharding.Sharding) else sharding(path, leaf.shape)
        except Exception as e:
            raise ValueError(f"sharding({path!r}, {leaf.shape}) failed: {type(e).__name__}: {e}") from e
        if not isinstance(found, jax.sharding.Sharding):
            raise ValueError(f"sharding gave {found!r} for {path} of shape {leaf.shape}, not a jax.sharding.Sharding")
        try:
            if isinstance(found, jax.sharding.NamedSharding) and len(found.spec) > len(leaf.shape):
                raise ValueError(f"{len(found.spec)} axes for {len(leaf.shape)}")
            found.shard_shape(leaf.shape)
        except ValueError as e:
            raise ValueError(
                f"{path} of shape {leaf.shape} is not divided by {found} ({e}); give a function of paths and shapes "
                "that divides it otherwise, or leaves it whole"
            ) from e
        return found

    return jax.tree_util.tree_map_with_path(place, shapes)


def _refuse_values(path: pathlib.Path, name: str, lost: int, stored: int, size: int, dtype: Any) -> None:
    fault = "are not finite; download it again" if stored else f"{dtype} cannot hold; load it as bfloat16"
    raise ValueError(f"{path}: {name} has {stored or lost} of {size} values that {fault}")


def _layer(name: str) -> int | None:
    """The number of the layer that a tensor is of, by its name."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def _assemble(
    model: LanguageModel, tensors: dict[str, Stored], path: pathlib.Path, sharding: Sharding | None
) -> PyTree:
    """Parameters of `model` from named tensors, or an error that names every one that is wrong."""
    family = family_of(model.config)
    stored = set(map(_layer, tensors)) - {None}
    if model.config.num_layers > len(stored) + 1:  # tracing thousands of layers that are not there would take minutes
        raise ValueError(
            f"{path}: config.json has {model.config.num_layers} layers, the weights have {len(stored)} "
            f"(tensors {reprlib.repr(sorted(tensors))}); mend num_hidden_layers, or add the files that are missing"
        )
    tied, head, table = model.config.tie_embeddings, f"{family.head}.weight", family.stored_name((family.embedding,))
    if tied and table not in tensors and head in tensors:
        tensors[table] = tensors.pop(head)
    shapes = model.shapes
    wanted = jax.tree_util.tree_leaves_with_path(shapes)
    names = {t.name: t for keys, leaf in wanted for t in family.tensors(tuple(k.key for k in keys), leaf.shape)}
    extra = {n for n in tensors if n not in names and not n.endswith(family.ignored)}
    if tied and head in extra:
        if table not in tensors or not same(tensors[head], tensors[table]):
            raise ValueError(
                f"{path}: config.json ties the output head to the embedding, but {head} differs from it; "
                "set tie_word_embeddings to false"
            )
        extra.remove(head)
    missing = sorted(set(names) - set(tensors))
    problems = [f"missing tensors {missing}"] if missing else []
    problems += [f"extra tensors {sorted(extra)}"] if extra else []
    for name, t in names.items():
        if name not in tensors:
            continue
        x = tensors[name]
        if x.shape != t.shape:
            problems.append(f"{name} has shape {tuple(x.shape)}, config.json implies {tuple(t.shape)}")
        if x.dtype is None:
            problems.append(f"{name} has dtype {x.kind}, expected a float type of 16 bits or more")
    if problems:
        raise ValueError(f"{path} does not fit its config.json: " + "; ".join(problems))

    places = _places(shapes, sharding)
    with ThreadPoolExecutor(WORKERS) as pool:

        def build(keys, leaf, place):
            parts = family.tensors(tuple(k.key for k in keys), leaf.shape)

            def rows(out, t, first, columns):
                """Reads rows from `first` on, of which each is of some columns."""
                index = (slice(t.start + first, t.start + first + len(out)), *columns)
                if t.flip:
                    out, index = out.swapaxes(-1, -2), (*index[:-2], index[-1], index[-2])
                lost, stored = fill(out, tensors[t.name], index, pool)
                if lost:
                    _refuse_values(path, t.name, lost, stored, out.size, leaf.dtype)

            def read(index):
                here = [range(n)[i] for i, n in zip(index, leaf.shape, strict=True)]
                out = empty(tuple(map(len, here)), leaf.dtype)
                for t in parts:
                    if t.members is not None:
                        a, z, width = t.members.start, t.members.stop, leaf.shape[2]
                        held = None
                        if t.flip:  # whose rows lie apart
                            held = empty((leaf.shape[0] * (z - a) * width, *leaf.shape[3:]), leaf.dtype)
                            rows(held, t, 0, [slice(None)] * len(leaf.shape[3:]))
                        for j, i in itertools.product(here[0], range(max(a, here[1].start), min(z, here[1].stop))):
                            part, first = out[j - here[0].start, i - here[1].start], (j * (z - a) + i - a) * width
                            if held is None:
                                rows(part, t, first + here[2].start, index[3:])
                            else:
                                part[...] = held[first:][:width][index[2:]]
                    elif all(i in axis for i, axis in zip(t.part, here, strict=False)):
                        part = out[tuple(i - axis.start for i, axis in zip(t.part, here, strict=False))]
                        rows(part, t, here[len(t.part)].start, index[len(t.part) + 1 :])
                return out

            if place is None:
                return jax.device_put(read((slice(None),) * len(leaf.shape)))
            return jax.make_array_from_callback(leaf.shape, place, read, dtype=leaf.dtype)

        return jax.tree_util.tree_map_with_path(build, shapes, places)


def num_params(params: Mapping[str, Any]) -> int:
    """How many numbers a model has."""
    return sum(x.size for x in jax.tree.leaves(params))
