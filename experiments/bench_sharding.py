"""What devices hold and receive: prompts split over a mesh, and two ways to give query rows the keys of others.

    python experiments/bench_sharding.py
    python experiments/bench_sharding.py --lengths 32768 --devices 4

Everything is compiled for virtual CPU devices, and bytes are read from the compiled programs: arguments, results and
temporaries of one device, and what it receives. Nothing is run, since virtual devices share their cores.

A layer's keys and values can be gathered before its attention, as kvjax does; or they can go round the devices in a
ring, each of which attends to one part after the other and merges what it has by the logsumexp of every row (Ring
Attention, arXiv 2310.01889). Column statistics are of whole rows: a ring knows a row's normaliser only when all parts
have passed, and would send them round once more.
"""

import functools
import math
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

import kvjax
from kvjax import methods, models
from kvjax.cache import mesh as on_mesh
from kvjax.configs.experiment import check_whole
from kvjax.experiments.evaluation.evaluate import peak_bytes
from kvjax.experiments.evaluation.results import check_output, device_info, plain_errors, write_json
from kvjax.pallas_kernels import Columns, attention
from kvjax.sharding import on_rows

CONFIG = models.ModelConfig(
    vocab_size=512, embed_dim=256, mlp_dim=1024, num_layers=4, num_query_heads=8, num_kv_heads=2, head_dim=32
)
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


def ring_attention(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    pos: Int[Array, "B T"],
    mesh: Mesh,
) -> Float[Array, "B N T H"]:
    """Causal attention of rows that devices share, to keys that go round them."""
    devices = mesh.shape["sequence"]
    order = [(i, (i + 1) % devices) for i in range(devices)]

    def local(q: Array, k: Array, v: Array, pos: Array) -> Array:
        out, lse, part = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:3], -jnp.inf), (k, v, pos)
        for step in range(devices):
            keys, values, kv_pos = part
            if step + 1 < devices:
                part = jax.tree.map(lambda x: lax.ppermute(x, "sequence", order), part)
            there = jnp.broadcast_to(kv_pos[:, None], keys.shape[:3])
            found = attention(q, keys, values, pos, there)
            both = jnp.logaddexp(lse, found.lse)
            weight = lambda x, both=both: jnp.exp(jnp.where(x == -jnp.inf, -jnp.inf, x - both))[..., None]
            out, lse = weight(lse) * out + weight(found.lse) * found.out, both
        return out

    rows, columns = P(None, None, "sequence"), P(None, "sequence")
    split = jax.shard_map(local, mesh=mesh, in_specs=(rows, rows, rows, columns), out_specs=rows, check_vma=False)
    return split(q, k, v, pos)


def gathered_attention(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    pos: Int[Array, "B T"],
    mesh: Mesh,
    columns: tuple[Columns, ...] = (),
) -> tuple[Array, ...]:
    """The same by kvjax: every device has all keys."""

    def attend(_: Any, rows: tuple[Array, Array, Array, Array]) -> tuple[Array, ...]:
        q, k, v = (on_mesh.prompt_rows(x, None, None) for x in rows[:3])
        kv_pos = jnp.broadcast_to(rows[3][:, None], k.shape[:3])
        found = on_mesh.attention(q, k, v, rows[3], kv_pos, columns=columns)
        return found.out, *found.columns

    return on_rows(mesh, attend, (), (q, k, v, pos))


def measure_attention(length: int, devices: int) -> list[dict[str, Any]]:
    """Bytes of one layer's attention, a row for every way."""
    mesh = kvjax.make_mesh(sequence=devices)
    rows = jax.NamedSharding(mesh, P(None, None, "sequence"))
    heads = lambda n: jax.ShapeDtypeStruct((1, n, length, CONFIG.head_dim), jnp.float32, sharding=rows)
    pos = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=jax.NamedSharding(mesh, P(None, "sequence")))
    ways = {
        "ring": ring_attention,
        "gathered": gathered_attention,
        "gathered, with H2O's sums": functools.partial(gathered_attention, columns=(Columns(),)),
    }
    found = []
    for name, attend in ways.items():
        call = jax.jit(functools.partial(attend, mesh=mesh))
        program = call.lower(heads(CONFIG.num_query_heads), *[heads(CONFIG.num_kv_heads)] * 2, pos).compile()
        sent = received(program.as_text() or "", devices)
        found.append({"length": length, "way": name, "peak_bytes": peak_bytes(program), "received_bytes": sent})
    return found


def measure_prefill(length: int, batch: int, axes: dict[str, Any]) -> dict[str, Any]:
    """Peak bytes of one device that reads prompts and evicts, on a mesh with these axes."""
    model = models.LanguageModel(CONFIG)
    mesh = kvjax.make_mesh(**axes)
    params = kvjax.shard_params(model, jax.jit(model.init)(jax.random.key(0)), mesh)
    plan = kvjax.make_plan(CONFIG, methods.h2o(256), prompt_len=length, max_new_tokens=16, lengths=[length])
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=jax.NamedSharding(mesh, P("data")))
    read = jax.jit(lambda params, tokens: kvjax.prefill(model, params, tokens, plan, mesh=mesh))
    program = read.lower(params, tokens).compile()
    return {"length": length, "batch": batch, "axes": axes, "peak_bytes": peak_bytes(program)}


def main(
    lengths: tuple[int, ...] = (8192, 32768),
    devices: int = 8,
    prefill_length: int = 4096,
    batch: int = 4,
    output: pathlib.Path | None = None,
) -> None:
    """Compiles and prints two tables.

    Args:
      lengths: tokens of the prompts whose attention is split over devices.
      devices: how many share them.
      prefill_length: tokens of the prompts that a model of four layers reads on several meshes.
      batch: how many of them.
      output: a JSON file.
    """
    check_whole(1, lengths=lengths, devices=devices, prefill_length=prefill_length, batch=batch)
    check_output(output)
    jax.config.update("jax_num_cpu_devices", max(devices, 4))
    ways = [row for length in lengths for row in measure_attention(length, devices)]
    print(f"attention of one layer, {devices} devices share a prompt:")
    for row in ways:
        sizes = f"{row['peak_bytes'] / 2**20:8.1f} MiB at its peak, {row['received_bytes'] / 2**20:8.1f} MiB received"
        print(f"  {row['length']:>7,} tokens, {row['way']:<26}{sizes}")
    meshes: list[dict[str, Any]] = [{}, {"data": 4}, {"heads": 2}, {"sequence": devices}, {"data": 2, "heads": 2}]
    reads = [measure_prefill(prefill_length, batch, axes) for axes in meshes]
    print(f"prefill of {batch} prompts of {prefill_length:,} tokens with H2O, of one device:")
    for row in reads:
        name = ", ".join(f"{axis}={size}" for axis, size in row["axes"].items()) or "one device"
        print(f"  {name:<26}{row['peak_bytes'] / 2**20:8.1f} MiB")
    if output is not None:
        write_json(output, {"device": device_info(), "devices": devices, "attention": ways, "prefill": reads})


if __name__ == "__main__":
    with plain_errors():
        tyro.cli(main)
