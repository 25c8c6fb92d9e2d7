"""What it takes to come from a checkpoint to a model that runs: time and memory, beside transformers.

    python -m kvjax.experiments.bench.loading --gigabytes 2

A Llama of random numbers is written once for each dtype. Each library loads it in processes of its own, in turns. Time
is the least of the rounds, from the call until the parameters can be used, and until each has been read once: after
`from_pretrained`, parameters still lie in the file, and the first pass reads it. Processor time is that of all threads,
which other work on the machine changes least. Memory is what the process held at its peak, less what it held before the
call, in multiples of the parameters, pages of a mapped file among it. Needs Linux, which tells a process its peak.
"""

import pathlib
import tempfile
from importlib import metadata

import jax.numpy as jnp

from kvjax import models
from kvjax.configs.experiment import check_finite, check_whole
from kvjax.experiments.bench.peers.checkpoints import Dtype, Model, checkpoint
from kvjax.experiments.bench.process import apart
from kvjax.experiments.core.command import check_output, script
from kvjax.experiments.core.page import Table
from kvjax.experiments.core.provenance import device_info, write_found

_WIDTH, _HEADS, _VOCABULARY, _HIDDEN = 2048, 16, 32000, 5632
_LIBRARIES = {"kvjax": "first_ours", "transformers": "first_theirs"}
_ROWS = {
    "ready": "until the call returns, s",
    "read": "until each number has been read once, s",
    "processor": "processor time until then, s",
}


def random_model(dtype: Dtype, gigabytes: float) -> Model:
    """A Llama of 2048 channels with as many layers as come nearest to so many gigabytes, one at least."""
    layer = 4 * _WIDTH * _WIDTH + 3 * _WIDTH * _HIDDEN
    wanted = gigabytes * 1e9 / jnp.dtype(dtype).itemsize - 2 * _VOCABULARY * _WIDTH
    layers = max(1, round(wanted / layer))
    config = models.ModelConfig(_VOCABULARY, _WIDTH, _HIDDEN, layers, _HEADS, _HEADS, _WIDTH // _HEADS)
    return Model("random", f"a random Llama of {gigabytes:g} GB", config, dtype)


def measure(library: str, path: pathlib.Path, dtype: str) -> dict[str, float]:
    """Loads a checkpoint in a process of its own (`first_ours.load`); its peak is less what it held before.

    Raises:
      RuntimeError: it failed.
    """
    found = apart(f"kvjax.experiments.bench.peers.{_LIBRARIES[library]}", "load", str(path), dtype, True)
    return found | {"peak": found["peak"] - found.pop("before")}


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
            place = checkpoint(random_model(dtype, gigabytes), pathlib.Path(path))
            runs = [{name: measure(name, place, dtype) for name in _LIBRARIES} for _ in range(rounds)]
        least = lambda name, key, runs=runs: min(run[name][key] for run in runs)
        found[dtype] = {name: {key: least(name, key) for key in runs[0][name]} for name in _LIBRARIES}
    device = device_info()
    versions = {name: metadata.version(name) for name in ("jax", "safetensors", "transformers", "torch")}
    print(f"{device['machine']}, {device['cpus']} CPUs, {versions}\n")
    lines = []
    for dtype, by_library in found.items():
        ours, theirs = (by_library[name] for name in _LIBRARIES)
        rows = [(what, ours[key], theirs[key]) for key, what in _ROWS.items()]
        rows.append(("peak memory, of the parameters", ours["peak"] / ours["size"], theirs["peak"] / theirs["size"]))
        name = f"{dtype}, {ours['size'] / 1e9:.2f} GB"
        lines += [[name, what, *(f"{x:.2f}" for x in (a, b, a / b))] for what, a, b in rows]
    print("\n".join(Table(["stored and loaded", "", *_LIBRARIES, "ratio"], lines).markdown()))
    write_found(output, loading=found, versions=versions)


if __name__ == "__main__":
    script(bench)
