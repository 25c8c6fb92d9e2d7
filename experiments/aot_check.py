"""Compiles every kernel for GPUs that this machine need not have, and fails on spills or missing tensor cores.

    python experiments/aot_check.py    # sm_80, sm_90 and sm_100; exits 1 on a failure, 2 where no compiler is installed
    python experiments/aot_check.py --arch sm_90 --output report

Needs jax >= 0.11.2 with the CUDA 13 plugin and compilers, but neither a GPU nor a driver; without them it says what is
missing and how to install it. For each kernel: registers, bytes of spills (ptxas), tensor-core instructions in its PTX.
"""

import argparse
import collections
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

ARCHS = ("sm_80", "sm_90", "sm_100")
INSTALL = (
    "pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm nvidia-nvjitlink "
    "nvidia-cuda-runtime nvidia-cuda-nvrtc nvidia-cuda-cupti"
)
NEEDED = ("jax_cuda13_plugin", "jax_plugins.xla_cuda13", "nvidia.cu13")
MIN_JAX = (0, 11, 2)


@dataclasses.dataclass(frozen=True)
class Device:
    """What the compiler must know about a GPU."""

    name: str
    major: int
    multiprocessors: int
    shared_memory: int
    tensor_core: tuple[str, ...]

    @property
    def minor(self) -> int:
        """Of the compute capability: these are all N.0."""
        return 0


DEVICES = {
    "sm_80": Device("NVIDIA A100-SXM4-80GB", 8, 108, 166912, ("mma.sync",)),
    "sm_90": Device("NVIDIA H100 80GB HBM3", 9, 132, 232448, ("wgmma.mma_async", "mma.sync")),
    "sm_100": Device("NVIDIA B200", 10, 148, 232448, ("tcgen05.mma", "mma.sync")),
}
TARGET = """
gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: {0.multiprocessors} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: {0.shared_memory}
  cuda_compute_capability {{ major: {0.major} }} registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} runtime_version {{ major: 13 }}
device_description_str: "{0.name}"
"""
INSTRUCTIONS = r"(wgmma\.mma_async|mma\.sync|tcgen05\.mma|cp\.async\.cg|cp\.async\.bulk|ex2\.approx)"


def missing() -> list[str]:
    """What this environment lacks to compile for a GPU."""
    version = tuple(int(x) for x in importlib.metadata.version("jax").split(".")[:3])
    found = [] if version >= MIN_JAX else [f"jax >= 0.11.2 (this is {'.'.join(map(str, version))})"]
    for name in NEEDED:
        try:
            absent = importlib.util.find_spec(name) is None
        except ModuleNotFoundError:
            absent = True
        found += [name] if absent else []
    if not found and not (toolkit() / "bin" / "ptxas").exists():
        found.append(f"ptxas in {toolkit() / 'bin'}")
    return found


def toolkit() -> pathlib.Path:
    """Where the CUDA compilers are: `CUDA_HOME`, or the wheels."""
    home = os.environ.get("CUDA_HOME")
    return pathlib.Path(home) if home else pathlib.Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13")


def kernels(arch: str, smoke: bool) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], bool]]:
    """(name, function, shapes as (shape, dtype), whether spills are a failure) of everything that is compiled."""
    import jax

    from pallas_kernels import Columns, Softmax, attention, pooled_attention
    from pallas_kernels.api import Implementation

    B, N, K, T = 1, 32, 8, 4096
    leaves = jax.tree.leaves
    names = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
    backends: tuple[Implementation, ...] = ("triton", "mosaic_gpu") if arch == "sm_90" else ("triton",)
    cases = [("bfloat16", d) for d in (64, 80, 96, 128, 256)] + [("float16", 128), ("float32", 128)]
    for dtype, d in cases[:1] if smoke else cases:
        q, k, one = ((B, N, T, d), dtype), ((B, K, T, d), dtype), ((B, N, 1, d), dtype)
        rows, row, slots = ((B, T), "int32"), ((B, 1), "int32"), ((B, K, T), "int32")
        dense = q, k, k, rows, slots
        requests = {
            "forward": (),
            "sum p": (Columns(),),
            "sum p, last 64 rows": (Columns(rows=64),),
            "sum p^2 of group means": (Columns(element="p2", group_at="before"),),
            "max p of group": (Columns(group="max", group_at="before"),),
            "count above 1/visible": (Columns(element="above", group=None),),
        }
        if (dtype, d) not in (("bfloat16", 64), ("bfloat16", 128)):  # the rest differ in their tiles alone
            requests = {name: requests[name] for name in ("forward", "sum p", "sum p^2 of group means")}
        for name, columns in requests.items():
            for backend in backends:
                if backend == "mosaic_gpu" and (dtype == "float32" or d not in (64, 128) or "of group" in name):
                    continue  # Triton computes these
                f = functools.partial(attention, columns=columns, implementation=backend)
                yield f"{names[dtype]} d={d} {name} ({backend})", f, dense, True
        noisy = lambda q, k, v, a, b, seed, m: leaves(
            attention(
                *(q, k, v, a, b),
                columns=(Columns(softmax=Softmax(multiplier=m, seed=seed, noise="gumbel")),),
                implementation="triton",
            )
        )
        extra = ((B,), "uint32"), ((B, K, T), "float32")
        yield f"{names[dtype]} d={d} sum p of a noisy softmax (triton)", noisy, (*dense, *extra), True
        for name, columns in (("decode", ()), ("decode with its row", (Columns(),))):
            f = lambda *a, c=columns: leaves(attention(*a, columns=c, implementation="triton"))
            yield f"{names[dtype]} d={d} {name} (triton)", f, (one, k, k, row, slots), True
            pool = ((B, K * T, d), dtype)
            f = lambda *a, c=columns: leaves(pooled_attention(*a, columns=c, num_kv_heads=8, implementation="triton"))
            flat = ((B, K * T), "int32")
            yield f"{names[dtype]} d={d} pool {name} (triton)", f, (one, pool, pool, flat, row, flat), True


def check(arch: str, smoke: bool) -> list[dict[str, Any]]:
    """One row a kernel. Compiles in this process, for one architecture: XLA reads its flags once."""
    dump = pathlib.Path(tempfile.mkdtemp(prefix="aot_"))
    os.environ.update(
        JAX_PLATFORMS="cpu",
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
        PATH=f"{toolkit() / 'bin'}{os.pathsep}{os.environ['PATH']}",
        XLA_FLAGS=f"--xla_gpu_cuda_data_dir={toolkit()} --xla_dump_to={dump} --xla_dump_emitter_re=ptx "
        "--xla_gpu_autotune_level=0",
        MOSAIC_GPU_DUMP_PTX="1",
        MOSAIC_GPU_DUMP_TO=str(dump),
    )
    warnings.simplefilter("ignore")
    import jax
    from jax.experimental import topologies

    device = DEVICES[arch]
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET.format(device), topology="1x1x1")
    mesh = jax.sharding.Mesh(list(topology.devices), ("x",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    found = []
    for name, f, shapes, spills_fail in kernels(arch, smoke):
        for file in dump.iterdir():
            if file.is_file():
                file.unlink()
        shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape, dtype in shapes]
        row: dict[str, Any] = {"arch": arch, "kernel": name, "ok": False}
        try:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                jax.jit(f).lower(*shapes).compile()
        except Exception as error:  # any failure of a compiler is a row of the report
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        else:
            parts = [part for file in sorted(dump.rglob("*.ptx")) for part in assemble(file)]
            # Every statistic comes with a forward pass, which has a row of its own.
            row["parts"] = [p for p in parts if "flash" not in p["name"] or len(parts) == 1]
            if "mosaic" in name:
                row["parts"] = [p for p in parts if "mosaic" in p["name"]]
            row["ok"] = bool(row["parts"]) and all(
                (not p["spill_bytes"] or not spills_fail)
                and ("f32" in name.split() or any(p["instructions"].get(i) for i in device.tensor_core))
                for p in row["parts"]
            )
        found.append(row)
        print(line(row), flush=True)
    return found


def assemble(file: pathlib.Path) -> list[dict[str, Any]]:
    """Registers and spills of our kernels in one PTX file, by ptxas."""
    text = file.read_text()
    ours = re.findall(r"\.entry (kvjax\w*|\w*mosaic\w*)", text)
    if not ours:
        return []
    target = re.search(r"\.target (\w+)", text)
    arch = target[1] if target else ""
    command = [str(toolkit() / "bin" / "ptxas"), "-v", f"-arch={arch}", str(file), "-o", os.devnull]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    count = collections.Counter(re.findall(INSTRUCTIONS, text))
    registers = [int(x) for x in re.findall(r"Used (\d+) registers", log)]
    spills = [int(x) for x in re.findall(r"(\d+) bytes spill stores", log)]
    return [
        {
            "name": re.sub(r"_\d+$", "", name),
            "target": arch,
            "registers": max(registers),
            "spill_bytes": max(spills, default=0),
            "instructions": dict(count),
        }
        for name in ours[:1]
    ]


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    parts = "; ".join(
        f"{p['name']} {p['target']} {p['registers']} registers, {p['spill_bytes']} B spilled, "
        + " ".join(f"{k} x{v}" for k, v in sorted(p["instructions"].items()))
        for p in row.get("parts", [])
    )
    return (
        f"{'ok  ' if row['ok'] else 'FAIL'} {row['arch']:6s} {row['kernel']:52s} {parts or row.get('error', 'no PTX')}"
    )


def main() -> int:
    """Runs every architecture in a process of its own and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arch", choices=ARCHS, nargs="*", default=ARCHS)
    parser.add_argument("--output", type=pathlib.Path, help="path of the report, without a suffix")
    parser.add_argument("--smoke", action="store_true", help="one dtype and head dimension")
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    lacking = missing()
    if lacking:
        print(
            f"cannot compile for a GPU here; missing: {', '.join(lacking)}. Install them in an environment:\n{INSTALL}"
        )
        return 2
    if args.worker is not None:
        rows = check(args.arch[0], args.smoke)
        args.worker.write_text(json.dumps(rows))
        return 0
    rows = []
    for arch in args.arch:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "rows.json")
            command = [sys.executable, __file__, "--arch", arch, "--worker", str(file)]
            subprocess.run(command + ["--smoke"] * args.smoke, check=True)
            rows += json.loads(file.read_text())
    failures = [r for r in rows if not r["ok"]]
    print(f"{len(rows) - len(failures)} of {len(rows)} compile with tensor cores and without spills")
    if args.output is not None:
        report = {"jax": importlib.metadata.version("jax"), "rows": rows}
        args.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        args.output.with_suffix(".txt").write_text("\n".join(map(line, rows)) + "\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
