"""Tensors of safetensors files, read strip by strip straight into the memory in which they stay.

A strip is read with `preadv` into a cache-sized buffer, or into its place, instead of being copied out of a memory map.
Pages of a map would count against the peak, which then holds the weights twice; and an array that lies on a map would
change with the file, or kill the process once the file has been cut short. A strip that cannot be read is an error.
"""

import dataclasses
import itertools
import json
import math
import mmap
import os
import pathlib
import re
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARD: Final = re.compile(r"model-\d+-of-\d+\.safetensors")
WORKERS: Final = min(os.cpu_count() or 1, 16)
_LFS = b"version https://git-lfs"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_STRIP = 1 << 19  # bytes; a strip and its copy stay in a core's second cache
_LINE = 64  # bytes of a cache line
_PART = 1 << 20  # values; less is not worth another thread


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor lies.

    Attributes:
      file: the safetensors file.
      kind: the dtype as the file names it, such as "BF16".
      shape: in the file's order.
      offset: bytes before its first value.
    """

    file: pathlib.Path
    kind: str
    shape: tuple[int, ...]
    offset: int

    @property
    def dtype(self) -> str | None:
        """The dtype, None if it is no float type of 16 bits or more."""
        return _DTYPES.get(self.kind)


class Coded(Stored):
    """A tensor that is stored in fewer bits than its numbers have."""

    @property
    def dtype(self) -> str:
        """What the model that is published so runs in."""
        return "bfloat16"

    def read(self, i: int) -> np.ndarray:
        """The `i`-th member along its first axis, in float32.

        Raises:
          ValueError: a file that has been cut short since its header was read.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Scaled(Coded):
    """A matrix in 8 bits (E4M3), of which each block has a factor (DeepSeek-V3, arXiv 2412.19437, Section 3.3.2).

    Attributes:
      scales: where the factors lie, in float32.
      block: rows and columns of a block; the last ones may be smaller.
    """

    scales: Stored
    block: tuple[int, int]

    def read(self, i: int) -> np.ndarray:
        """A row."""
        columns, blocks = self.shape[1], self.scales.shape[1]
        (numbers,) = _bytes(self.file, self.offset, columns, 1, i).view(jnp.float8_e4m3fn)
        (factors,) = _bytes(self.scales.file, self.scales.offset, 4 * blocks, 1, i // self.block[0]).view(np.float32)
        return numbers.astype(np.float32) * np.repeat(factors, self.block[1])[:columns]


@dataclasses.dataclass(frozen=True)
class Packed(Coded):
    """A list of matrices in 4 bits (MXFP4, OCP Microscaling Formats 1.0), whose shape is that of their transposes.

    32 numbers of a row share a power of two. `offset` is that of the numbers, two in a byte.

    Attributes:
      scales: where the powers of two lie, biased by 127, one in a byte.
    """

    scales: Stored

    def read(self, i: int) -> np.ndarray:
        """A matrix, transposed."""
        codes = _bytes(self.file, self.offset, self.shape[1] // 2, self.shape[2], i)
        exponents = _bytes(self.scales.file, self.scales.offset, self.scales.shape[2], self.shape[2], i)
        numbers = np.stack([_E2M1[codes & 15], _E2M1[codes >> 4]], axis=-1).reshape(*exponents.shape, -1)
        return np.ldexp(numbers, exponents[..., None].astype(np.int32) - 127).reshape(len(codes), -1).T


_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1: Final = np.array([*_HALF, *(-x for x in _HALF)], np.float32)


def _bytes(file: pathlib.Path, offset: int, width: int, rows: int, i: int) -> np.ndarray:
    """The bytes of the `i`-th matrix of rows of so many bytes."""
    with file.open("rb") as f:
        f.seek(offset + i * rows * width)
        found = f.read(rows * width)
    if len(found) != rows * width:
        raise ValueError(f"{file} has been cut short while it was read; copy or download it again")
    return np.frombuffer(found, np.uint8).reshape(rows, width)


def scaled(tensors: dict[str, Stored], block: tuple[int, int]) -> dict[str, Stored]:
    """Tensors, of which a matrix NAME in 8 bits and its `NAME_scale_inv` are one, NAME.

    Args:
      tensors: by name.
      block: rows and columns that share a factor.

    Raises:
      ValueError: factors of another shape or dtype, or of a tensor that has no 8 bits.
    """
    found = dict(tensors)
    for other, scales in tensors.items():
        if (name := other.removesuffix("_scale_inv")) == other:
            continue
        t, _ = found.get(name), found.pop(other)
        shape = None if t is None else tuple(-(-n // b) for n, b in zip(t.shape, block, strict=False))
        if t is None or len(t.shape) != 2 or (t.kind, scales.kind, scales.shape) != ("F8_E4M3", "F32", shape):
            there = "is missing" if t is None else f"has shape {t.shape} in {t.kind}"
            raise ValueError(
                f"{scales.file}: {other} has shape {scales.shape} in {scales.kind} and {name} {there}; matrices in "
                f"F8_E4M3 have a factor in F32 for each block of {block[0]} x {block[1]}"
            )
        found[name] = Scaled(t.file, t.kind, t.shape, t.offset, scales, block)
    return found


def unpacked(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Tensors, of which `NAME_blocks` "E R G 16" and `NAME_scales` "E R G" are one, NAME.

    Raises:
      ValueError: blocks without scales, or of other shapes.
    """
    found = dict(tensors)
    for name, blocks in tensors.items():
        if not name.endswith("_blocks"):
            continue
        scales = found.pop(other := name.removesuffix("_blocks") + "_scales", None)
        if scales is None or (blocks.kind, scales.kind) != ("U8", "U8") or blocks.shape != (*scales.shape[:3], 16):
            shape = None if scales is None else scales.shape
            raise ValueError(
                f"{blocks.file}: {name} has shape {blocks.shape} and {other} {shape}; MXFP4 has bytes of shapes "
                "(E, R, G, 16) and (E, R, G)"
            )
        experts, rows, groups = scales.shape
        shape = (experts, 32 * groups, rows)
        found[name.removesuffix("_blocks")] = Packed(blocks.file, "MXFP4", shape, blocks.offset, scales)
        del found[name]
    return found


def apart(tensors: dict[str, Stored], members: str) -> dict[str, Stored]:
    """Tensors, of which those that hold a list's members as one are as many: `MEMBERS.gate_up_proj` "E 2F D".

    Args:
      tensors: by name.
      members: the name of the list, as "experts".
    """
    found = {}
    for name, t in tensors.items():
        *_, parent, own = ("", *name.split("."))
        if parent != members or t.dtype is None or len(t.shape) != 3:
            found[name] = t
            continue
        parts, (E, rows, columns) = ("gate_proj", "up_proj") if own == "gate_up_proj" else (own,), t.shape
        rows //= len(parts)
        size = rows * columns * jnp.dtype(t.dtype).itemsize
        for i, (e, part) in enumerate(itertools.product(range(E), parts)):
            member = f"{name.removesuffix(own)}{e}.{part}.weight"
            found[member] = dataclasses.replace(t, shape=(rows, columns), offset=t.offset + i * size)
    return found


def check_whole(file: pathlib.Path) -> None:
    """Refuses what Git LFS left in place of a file.

    Raises:
      ValueError: a pointer.
    """
    with file.open("rb") as f:
        if f.read(len(_LFS)) == _LFS:
            raise ValueError(f"{file} is a pointer of Git LFS, not the file itself; run `git lfs pull` where it lies")


def read_json(file: pathlib.Path) -> Any:
    """Reads a JSON file.

    Raises:
      ValueError: a pointer of Git LFS, or no JSON.
    """
    check_whole(file)
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{file} is not JSON in UTF-8: {e}; was it downloaded whole?") from e


def weight_files(path: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files of a checkpoint; none if there are none. A single file hides an index, as in transformers.

    Raises:
      ValueError: an index that is damaged or lists files that do not exist or lie elsewhere, or shards without one.
    """
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if not (path / INDEX).is_file():
        if shards := sorted(p.name for p in path.iterdir() if SHARD.fullmatch(p.name)):
            raise ValueError(f"{path} has no {SINGLE} or {INDEX}, only {shards}; download {INDEX}")
        return []
    index = read_json(path / INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    files = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not files or not all(isinstance(f, str) for f in files):
        raise ValueError(f"{path / INDEX} has no weight_map of tensors to files; download it again")
    files = sorted(set(files))
    shown = lambda names: [n if len(n) <= 100 else f"{n[:99]}…" for n in names]
    if absent := [f for f in files if not os.path.isfile(path / f)]:
        raise ValueError(f"{path / INDEX} lists {shown(absent)}, which do not exist; download them")
    here = path.resolve()
    roots = (here, here.parent.parent / "blobs") if here.parent.name == "snapshots" else (here,)  # as the hub links
    if outside := [f for f in files if not any(map((path / f).resolve().is_relative_to, roots))]:
        raise ValueError(f"{path / INDEX} lists {shown(outside)}, outside of its directory; copy them into it")
    return [path / f for f in files]


def stored_tensors(files: list[pathlib.Path]) -> dict[str, Stored]:
    """Where every tensor of some files lies, by name. No values are read.

    Raises:
      ValueError: a damaged file, or a tensor that appears twice.
    """
    found: dict[str, Stored] = {}
    for file in files:
        for name, tensor in _header(file):
            if name in found:
                raise ValueError(f"{file}: tensor {name} appears twice in the checkpoint")
            found[name] = tensor
    return found


def _header(file: pathlib.Path) -> Iterator[tuple[str, Stored]]:
    check_whole(file)
    try:
        with safe_open(file, framework="numpy"):  # tries the header against the file's length
            pass
    except SafetensorError as e:
        raise ValueError(f"{file} is not a complete safetensors file ({e}); copy or download it again") from e
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(length))
    for name, about in header.items():
        if name != "__metadata__":
            yield name, Stored(file, about["dtype"], tuple(about["shape"]), 8 + length + about["data_offsets"][0])


def empty(shape: tuple[int, ...], dtype: str | np.dtype) -> np.ndarray:
    """An array of zeros, on pages of its own, that `jax.device_put` takes over as it is where the device is a CPU.

    numpy's own large arrays ask for huge pages, which took between a third and five times as long to get as ordinary
    ones (1 GiB on a virtual machine, 0.2 to 2.4 s of processor time against 0.5 s).
    """
    kind = jnp.dtype(dtype)
    pages = mmap.mmap(-1, max(1, math.prod(shape) * kind.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, kind, math.prod(shape)).reshape(shape)


def fill(out: np.ndarray, tensor: Stored, index: tuple[slice, ...], pool: Executor) -> tuple[int, int]:
    """Reads a part of a tensor into `out`, in the dtype of `out`.

    Args:
      out: in the tensor's order of axes, which may be a transposed view, and of the part's shape.
      tensor: where it lies; of a float type.
      index: the part, a slice with step 1 for every axis.
      pool: where parts of a large tensor are read at the same time.

    Returns:
      How many values of `out` are not finite, and how many of them were not finite in the file.

    Raises:
      ValueError: a file that has been cut short since its header was read.
    """
    if out.size == 0:
        return 0, 0
    start = index[0].indices(tensor.shape[0])[0]
    line = max(1, _LINE // out.itemsize)
    step = -(-out.shape[0] // max(1, min(WORKERS, out.size // _PART)) // line) * line  # whole lines of a transposed out
    parts = [(out[i : i + step], start + i) for i in range(0, out.shape[0], step)]
    run = pool.map if len(parts) > 1 else map
    lost, stored = zip(*run(lambda part: _fill_rows(part[0], tensor, part[1], index[1:]), parts), strict=True)
    return sum(lost), sum(stored)


def _fill_rows(out: np.ndarray, tensor: Stored, start: int, columns: tuple[slice, ...]) -> tuple[int, int]:
    """`fill` of the rows of a tensor from `start` on."""
    if isinstance(tensor, Coded):
        lost = stored = 0
        for i in range(len(out)):
            values = tensor.read(start + i)[columns]
            with np.errstate(over="ignore"):
                out[i] = values
            lost, stored = lost + _not_finite(np.ascontiguousarray(out[i])), stored + _not_finite(values.copy())
        return lost, stored
    source, inner = jnp.dtype(tensor.dtype), tensor.shape[1:]
    row = math.prod(inner) * source.itemsize
    converted = source != out.dtype
    straight = not converted and out.flags.c_contiguous and out.shape[1:] == inner
    # Of a transposed array, a strip fills whole cache lines.
    across = out.ndim > 1 and out.strides[0] == out.itemsize
    step = max(1, _LINE // out.itemsize if across else _STRIP // row)
    buffer = None if straight else np.empty((min(step, len(out)), *inner), source)
    bits = np.dtype(f"u{out.itemsize}")  # numpy moves whole numbers faster than types that it does not have
    lost = stored = 0
    with tensor.file.open("rb", buffering=0) as f, np.errstate(over="ignore", invalid="ignore"):
        for i in range(0, len(out), step):
            strip = out[i : i + step] if buffer is None else buffer[: min(step, len(out) - i)]
            if (
                os.preadv(f.fileno(), [strip.reshape(-1).view(np.uint8).data], tensor.offset + (start + i) * row)
                != strip.nbytes
            ):
                raise ValueError(f"{tensor.file} has been cut short while it was read; copy or download it again")
            if buffer is None:
                values = kept = strip
            else:
                values = strip[(slice(None), *columns)]
                kept = values.astype(out.dtype) if converted else values
                out.view(bits)[i : i + step] = kept.view(bits)
            if bad := _not_finite(kept):
                lost, stored = lost + bad, stored + _not_finite(values)
    return lost, stored


def _not_finite(x: np.ndarray) -> int:
    """How many values are not finite: those whose exponent has all bits set, which infinity has alone."""
    bits = np.dtype(f"u{x.itemsize}")
    infinity = np.array(np.inf, x.dtype).view(bits)
    found = x.view(bits) & infinity
    return int((found == infinity).sum()) if found.max() == infinity else 0


def same(a: Stored, b: Stored) -> bool:
    """Whether two tensors of float types hold the same numbers."""
    if a.shape != b.shape or a.dtype is None or b.dtype is None:
        return False
    return all(np.array_equal(x, y) for x, y in zip(_strips(a), _strips(b), strict=True))


def _strips(tensor: Stored) -> Iterator[np.ndarray]:
    """The numbers of a tensor, so many at a time."""
    if isinstance(tensor, Coded):
        yield from map(tensor.read, range(tensor.shape[0]))
        return
    kind, size = jnp.dtype(tensor.dtype), math.prod(tensor.shape)
    with tensor.file.open("rb") as f:
        f.seek(tensor.offset)
        for i in range(0, size, _PART):
            yield np.frombuffer(f.read(min(_PART, size - i) * kind.itemsize), kind)
