"""What one device holds and receives when a mesh of several reads prompts and evicts.

    python -m kvjax.experiments.bench.sharding

Everything is compiled for virtual CPU devices, and bytes are read from the compiled programs: arguments, results and
temporaries of one device, and what it receives. Nothing is run, since virtual devices share their cores.
"""

import math
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax import methods, models
from kvjax.configs.experiment import check_whole
from kvjax.experiments.bench.speed import RANDOM
from kvjax.experiments.core.command import check_output, script
from kvjax.experiments.core.engine import peak_bytes
from kvjax.experiments.core.provenance import write_found

MESHES: tuple[dict[str, Any], ...] = ({}, {"data": 4}, {"heads": 2}, {"data": 2, "heads": 2})
_RESULT = re.compile(r"= (\(?[^=]*?) (all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter)(?:-start)?\(")


def received(text: str, devices: int) -> int:
    """Bytes that each of so many devices receives in a compiled program, in rings for what is gathered or added up."""
    others = (devices - 1) / devices
    share = {"all-gather": others, "all-reduce": 2 * others, "collective-permute": 1, "all-to-all": others}
    found = 0.0
    for shapes, name in _RESULT.findall(text):
        sizes = [
            math.prod(int(n) for n in shape.split(",") if n) for shape in re.findall(r"[fsu]32\[([\d,]*)\]", shapes)
        ]
        found += 4 * sum(sizes) * share.get(name, 1)
    return round(found)


def measure(length: int, batch: int, axes: dict[str, Any]) -> dict[str, Any]:
    """Bytes of one device that reads prompts and evicts, on a mesh with these axes."""
    model, mesh = models.LanguageModel(RANDOM), kvjax.make_mesh(**axes)
    params = kvjax.shard_params(model, jax.jit(model.init)(jax.random.key(0)), mesh)
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=jax.NamedSharding(mesh, P("data")))
    how = {"policy": methods.h2o(256), "lengths": np.full(batch, length), "max_new_tokens": 16, "mesh": mesh}
    program = (
        jax.jit(lambda params, tokens: kvjax.prefill(model, params, tokens, **how)).lower(params, tokens).compile()
    )
    sent = received(program.as_text() or "", math.prod(axes.values()))
    return {"axes": axes, "peak_bytes": peak_bytes(program), "received_bytes": sent}


def main(length: int = 4096, batch: int = 4, output: pathlib.Path | None = None) -> None:
    """Compiles and prints a table.

    Args:
      length: tokens of the prompts that a model of four layers reads on several meshes.
      batch: how many of them, a multiple of 4.
      output: a JSON file.
    """
    check_whole(1, length=length, batch=batch)
    check_output(output)
    jax.config.update("jax_num_cpu_devices", 4)
    rows = [measure(length, batch, axes) for axes in MESHES]
    print(f"prefill of {batch} prompts of {length:,} tokens with H2O, of one device:")
    for row in rows:
        name = ", ".join(f"{axis}={size}" for axis, size in row["axes"].items()) or "one device"
        peak, sent = (row[f"{what}_bytes"] / 2**20 for what in ("peak", "received"))
        print(f"  {name:<20}{peak:8.1f} MiB at its peak, {sent:8.1f} MiB received")
    write_found(output, length=length, batch=batch, rows=rows)


if __name__ == "__main__":
    script(main)
