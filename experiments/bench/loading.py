"""What it takes to come from a checkpoint to a model that runs: time and memory, beside transformers.

    python -m kvjax.experiments.bench.loading --gigabytes 2

A Llama of random numbers is written once for each dtype. Each library loads it in processes of its own, in turns. Time
is the least of the rounds, from the call until the parameters can be used, and until each has been read once: after
`from_pretrained`, parameters still lie in the file, and the first pass reads it. Processor time is that of all threads,
which other work on the machine changes least. Memory is what the process held at its peak, less what it held before the
call, in multiples of the parameters, pages of a mapped file among it. Needs Linux, which tells a process its peak.
"""

import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import transformers
import tyro

from kvjax import models
from kvjax.configs.experiment import check_finite, check_whole
from kvjax.experiments.bench.process import apart, held
from kvjax.experiments.core.command import check_output, plain_errors
from kvjax.experiments.core.provenance import device_info, write_found

Dtype = Literal["float32", "bfloat16", "float16"]

_WIDTH, _HEADS, _VOCABULARY, _HIDDEN = 2048, 16, 32000, 5632
_LIBRARIES = ("kvjax", "transformers")
_ROWS = {
    "ready": "until the call returns, s",
    "read": "until each number has been read once, s",
    "processor": "processor time until then, s",
}


def write_checkpoint(path: pathlib.Path, dtype: str, gigabytes: float) -> None:
    """Writes a Llama of 2048 channels with as many layers as come nearest to so many gigabytes, one at least."""
    layer = 4 * _WIDTH * _WIDTH + 3 * _WIDTH * _HIDDEN
    wanted = gigabytes * 1e9 / jnp.dtype(dtype).itemsize - 2 * _VOCABULARY * _WIDTH
    config = models.ModelConfig(
        vocab_size=_VOCABULARY,
        embed_dim=_WIDTH,
        mlp_dim=_HIDDEN,
        num_layers=max(1, round(wanted / layer)),
        num_query_heads=_HEADS,
        num_kv_heads=_HEADS,
        head_dim=_WIDTH // _HEADS,
        dtype=dtype,
    )
    model = models.LanguageModel(config)
    rng = np.random.default_rng(0)
    numbers = (0.02 * rng.standard_normal(_VOCABULARY * _WIDTH, np.float32)).astype(jnp.dtype(dtype))
    params = jax.tree.map(lambda x: numbers[: x.size].reshape(x.shape), model.shapes)
    models.save(path, model, params, dtype=dtype)


def load(library: str, path: str, dtype: str) -> dict[str, float]:
    """Loads a checkpoint in this process.

    Returns:
      `ready` and `read`: seconds until the call returned with parameters that can be used, and until each has been read
      once; `processor`: seconds of all threads until then; `peak`: bytes that the process held more than before;
      `size`: those of the parameters.
    """
    use = _kvjax if library == "kvjax" else _transformers
    load_, total = use(path, dtype)
    before, start, spent = held("VmRSS"), time.perf_counter(), time.process_time()
    params = load_()
    ready = time.perf_counter() - start
    size = total(params)
    read, spent = time.perf_counter() - start, time.process_time() - spent
    return {"ready": ready, "read": read, "processor": spent, "peak": held("VmHWM") - before, "size": size}


def _kvjax(path: str, dtype: str) -> tuple[Callable[[], Any], Callable[[Any], int]]:
    jnp.zeros(()).block_until_ready()  # the backend starts

    def total(params):
        for x in jax.tree.leaves(params):
            np.asarray(x).view(f"u{x.dtype.itemsize}").max()
        return sum(x.nbytes for x in jax.tree.leaves(params))

    return lambda: jax.block_until_ready(models.load(path, dtype=dtype)[1]), total


def _transformers(path: str, dtype: str) -> tuple[Callable[[], Any], Callable[[Any], int]]:
    transformers.utils.logging.disable_progress_bar()
    model_class = transformers.LlamaForCausalLM  # its file, and torch, are imported here

    def total(params):
        for x in params:
            x.detach().view(dtype=getattr(sys.modules["torch"], f"int{8 * x.element_size()}")).max()
        return sum(x.numel() * x.element_size() for x in params)

    return lambda: list(model_class.from_pretrained(path, dtype=dtype).parameters()), total


def measure(library: str, path: pathlib.Path, dtype: str) -> dict[str, float]:
    """As `load`, in a process of its own.

    Raises:
      RuntimeError: it failed.
    """
    return apart("kvjax.experiments.bench.loading", "load", library, str(path), dtype)


def bench(
    gigabytes: float = 2.0,
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16"),
    rounds: int = 3,
    folder: pathlib.Path | None = None,
    output: pathlib.Path | None = None,
) -> None:
    """Prints a table.

    Args:
      gigabytes: of a checkpoint.
      dtypes: in which one is stored and loaded.
      rounds: of loads, each library in turn.
      folder: where checkpoints are written, and deleted from; the system's folder for temporary files if None.
      output: a JSON file for the figures.
    """
    check_finite(0, gigabytes=gigabytes)
    check_whole(1, rounds=rounds)
    check_output(output)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for dtype in dtypes:
        with tempfile.TemporaryDirectory(dir=folder) as path:
            write_checkpoint(pathlib.Path(path), dtype, gigabytes)
            runs = [{name: measure(name, pathlib.Path(path), dtype) for name in _LIBRARIES} for _ in range(rounds)]
        least = lambda name, key, runs=runs: min(run[name][key] for run in runs)
        found[dtype] = {name: {key: least(name, key) for key in runs[0][name]} for name in _LIBRARIES}
    device = device_info()
    versions = {name: metadata.version(name) for name in ("jax", "safetensors", "transformers", "torch")}
    print(f"{device['machine']}, {device['cpus']} CPUs, {versions}\n")
    print("| stored and loaded | | kvjax | transformers | ratio |\n|---|---|---|---|---|")
    for dtype, by_library in found.items():
        ours, theirs = (by_library[name] for name in _LIBRARIES)
        rows = [(what, ours[key], theirs[key]) for key, what in _ROWS.items()]
        rows.append(("peak memory, of the parameters", ours["peak"] / ours["size"], theirs["peak"] / theirs["size"]))
        for what, a, b in rows:
            print(f"| {dtype}, {ours['size'] / 1e9:.2f} GB | {what} | {a:.2f} | {b:.2f} | {a / b:.2f} |")
    write_found(output, loading=found, versions=versions)


if __name__ == "__main__":
    with plain_errors():
        tyro.cli(bench)
