"""Compiles every kernel for GPUs that this machine need not have, and fails on spills or missing tensor cores.

    python experiments/aot_check.py    # sm_80, sm_90 and sm_100; exits 1 on a failure, 2 where no compiler is installed
    python experiments/aot_check.py --arch sm_90 --output report    # --only PATTERN renews some of its rows
    python experiments/aot_check.py --steps    # what whole decode steps launch in each layer

Needs jax >= 0.11.2 with the CUDA 13 plugin and compilers, but neither a GPU nor a driver; without them it says what is
missing and how to install it. For each kernel: registers, bytes of spills (ptxas), tensor-core instructions in its PTX.
"""

import argparse
import collections
import dataclasses
import functools
import gzip
import importlib.metadata
import importlib.util
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

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
NO_PRODUCTS = ("kvjax_combine",)
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


@dataclasses.dataclass(frozen=True)
class Case:
    """One compilation.

    Attributes:
      name: for the report.
      run: the function that is compiled, of the arrays.
      shapes: (shape, dtype) of its arguments.
      products: whether its products are of dtypes that tensor cores multiply.
    """

    name: str
    run: Callable[..., Any]
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    products: bool


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Shapes of a call: query heads, kv heads, rows and slots."""

    N: int = 32
    K: int = 8
    T: int = 4096
    S: int = 4096


NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
HEAD_DIMS = (64, 80, 96, 128, 256)
ALL = tuple((dtype, d) for dtype in NAMES for d in HEAD_DIMS)
FEWER = (*(("bfloat16", d) for d in HEAD_DIMS), ("float16", 128), ("float32", 128))
OPTIONS: dict[str, dict[str, Any]] = {"": {}, ", softcap and window": {"softcap": 30.0, "window": 1024}}


def dense(dtype: str, d: int, s: Sizes) -> tuple[Any, ...]:
    """Shapes of q, k, v, q_pos and kv_pos."""
    slots = (1, s.K, s.S, d), dtype
    return ((1, s.N, s.T, d), dtype), slots, slots, ((1, s.T), "int32"), ((1, s.K, s.S), "int32")


def forwards(arch: str) -> Iterator[Case]:
    """Attention forward: every dtype, head dimension and tile; with bias; Mosaic where it serves."""
    from kvjax.pallas_kernels import blocks as bl
    from kvjax.pallas_kernels import flash, gpu

    backends = ("triton", "mosaic_gpu") if arch == "sm_90" else ("triton",)
    for backend, (dtype, d), T, (label, options) in itertools.product(backends, ALL, (4096, 32, 16), OPTIONS.items()):
        if backend == "mosaic_gpu" and (dtype == "float32" or d not in (64, 128) or T < 4096):
            continue
        if (dtype != "bfloat16" and T < 4096) or (dtype == "float16" and options):
            continue  # float16 is as bfloat16, the tiles of float32 are as small anyway
        spec = bl.Logits(d**-0.5, **options)
        f = functools.partial(gpu.forward, spec=spec, with_logits=False, backend=backend)
        name = f"{NAMES[dtype]} d={d} T={T} forward{label} ({backend})"
        yield Case(name, lambda *x, f=f: f(*x)[:2], dense(dtype, d, Sizes(T=T)), dtype != "float32")
    for dtype, d in FEWER:
        f = lambda *x, d=d: flash.flash_attention(*x[:-1], spec=bl.Logits(d**-0.5), bias=x[-1])
        shapes = *dense(dtype, d, Sizes()), ((1, 32, 4096), "float32")
        yield Case(f"{NAMES[dtype]} d={d} T=4096 forward, bias (triton)", f, shapes, dtype != "float32")


def column(
    what: str,
    c: Any,
    dtype: str,
    d: int,
    T: int,
    backend: str,
    option: str = "",
    *,
    weighted: bool = False,
    softmax: str = "",
    biased: bool = False,
    heads: tuple[int, int] | None = None,
) -> Case:
    """One statistic, given the logsumexp: with weights of rows, of a softmax of its own, with a bias, as is asked."""
    from kvjax.pallas_kernels import Softmax, gpu
    from kvjax.pallas_kernels import blocks as bl

    N, K = heads or (32, 8)
    q, k, _, *positions = dense(dtype, d, Sizes(N, K, T))
    of_softmax = {"multiplier": ((1, K, T), "float32"), "seed": ((1,), "uint32")}
    kinds = {"multiplier": "rescaled" in softmax or "non-causal" in softmax, "seed": "noisy" in softmax}
    arrays = {name: shape for name, shape in of_softmax.items() if kinds[name]}
    arrays |= {"weight": ((1, T), "float32")} if weighted else {}
    arrays |= {"bias": ((1, N, 4096), "float32")} if biased else {}

    def run(q, k, lse, q_pos, kv_pos, *others):
        given = dict(zip(arrays, others, strict=True))
        own: dict[str, Any] = {name: given[name] for name in of_softmax if name in given}
        own |= {"noise": "gumbel"} if kinds["seed"] else {}
        of = Softmax(**own, causal="non-causal" not in softmax) if softmax else None
        with_rows = dataclasses.replace(c, softmax=of, weight=given.get("weight"))
        how = {"logits": bl.Logits(d**-0.5, **OPTIONS[option]), "backend": backend, "bias": given.get("bias")}
        return gpu.column(with_rows, q, k, (None, lse, None), q_pos, kv_pos, **how)

    kind = (f" of a {softmax} softmax" if softmax else "") + ", bias" * biased
    name = f"{NAMES[dtype]} d={d} T={T}{f' N={N} K={K}' if heads else ''} {what}{kind}{option} ({backend})"
    shapes = (q, k, ((1, N, T), "float32"), *positions, *arrays.values())
    return Case(name, run, shapes, dtype != "float32")


def statistics(arch: str) -> Iterator[Case]:
    """Column statistics: everything that changes a kernel, on every tile and head dimension, alone and at once."""
    from kvjax.pallas_kernels import Columns

    before = functools.partial(Columns, group_at="before")
    plain = {
        "sum p": Columns(),
        "sum p^2 of group means": before(element="p2"),
        "max p of group": before(group="max"),
        "count of group means above 1/visible": before(element="above"),
        "count above 1/visible": Columns(element="above", group=None),
    }
    counted = {
        "sum p, weights, without itself": Columns(count_self=False),
        "sum p^2 of group means, weights": before(element="p2"),
        "sum p^2 of group means, without itself": before(element="p2", count_self=False),
        "sum p^2 of group means, weights, without itself": before(element="p2", count_self=False),
    }
    at_once = {
        "sum p": Columns(),
        "sum p, weights, without itself": Columns(count_self=False),
        "count above 1/visible, weights": Columns(element="above", group=None),
        "sum p^2 of group means": before(element="p2"),
        "sum of group maxima": before(group="max"),
        "sum p^2 of group means, weights": before(element="p2"),
        "count of group means above 1/visible, weights, without itself": before(element="above", count_self=False),
    }
    common = {what: plain[what] for what in ("sum p", "count of group means above 1/visible")}

    def of(dtype: str, dims: Sequence[int] = HEAD_DIMS, tiles: Sequence[int] = (4096,)) -> list[tuple[str, int, int]]:
        return [(dtype, d, T) for d, T in itertools.product(dims, tiles)]

    both, one, none = tuple(OPTIONS), tuple(OPTIONS)[1:], tuple(OPTIONS)[:1]
    softmaxes = tuple(itertools.product(("", "rescaled", "noisy", "noisy rescaled"), (False, True)))[1:]
    alone = (("", False),)
    # Statistics, types with tiles, options of logits, (softmax, with a bias). float16 is as bfloat16.
    families: list[tuple[dict[str, Columns], Any, Any, Any]] = [
        (plain, of("bfloat16", tiles=(4096, 32, 16)), both, alone),
        (common, of("float16") + of("float32"), both, alone),
        ({"sum p": Columns()}, [(*case, 4096) for case in FEWER], both, (("non-causal", False),)),
        (counted, of("bfloat16"), both, alone),
        (counted, of("bfloat16", tiles=(16,)) + of("float16", (128, 256)) + of("float32", (64, 128)), none, alone),
        (at_once, of("bfloat16") + of("float32", (128,)), both, softmaxes),
        (at_once, of("bfloat16", tiles=(16,)) + of("float16", (64, 128, 256)), one, softmaxes),
    ]
    for columns, types, options, how_computed in families:
        grid = itertools.product(columns.items(), types, options, how_computed)
        for (what, c), (dtype, d, T), option, (softmax, biased) in grid:
            how: dict[str, Any] = {"weighted": "weights" in what, "softmax": softmax, "biased": biased}
            yield column(what, c, dtype, d, T, "triton", option, **how)
            by_mosaic = dtype != "float32" and d in (64, 128) and T == 4096 and c.group_at == "after"
            if arch == "sm_90" and by_mosaic and not biased and "noisy" not in softmax:
                yield column(what, c, dtype, d, T, "mosaic_gpu", option, **how)
    what = "sum p^2 of group means"
    for heads, d in itertools.product(((32, 32), (32, 4), (64, 8), (28, 4), (8, 1)), (64, 128, 256)):
        yield column(what, plain[what], "bfloat16", d, 4096, "triton", heads=heads)


def decoding(arch: str) -> Iterator[Case]:
    """One row a head: against a cache and a pool of 32k slots and of few, with and without its row."""
    import jax

    from kvjax.pallas_kernels import Columns, attention, pooled_attention

    if arch == "sm_90":
        yield from mosaic_decoding()
    heads = {(32, 8): ALL, (32, 32): (("bfloat16", 128),), (64, 8): (("bfloat16", 128), ("bfloat16", 256))}
    heads |= {(28, 4): (("bfloat16", 128),), (71, 1): (("bfloat16", 64), ("bfloat16", 128))}
    for (N, K), cases in heads.items():
        grid = itertools.product(cases, (32768, 1000), OPTIONS.items(), ("", " with its row"))
        for (dtype, d), S, (label, options), row in grid:
            if ((options or row) and ((N, K) != (32, 8) or S < 32768)) or (dtype == "float16" and not row):
                continue
            if dtype != "bfloat16" and (options or S < 32768):
                continue  # as in bfloat16
            columns = (Columns(),) if row else ()
            how: dict[str, Any] = {"implementation": "triton", **options}
            q, slots, row_pos = ((1, N, 1, d), dtype), ((1, K, S, d), dtype), ((1, 1), "int32")
            f = lambda *x, c=columns, how=how: jax.tree.leaves(attention(*x, columns=c, **how))
            name = f"{NAMES[dtype]} d={d} N={N} K={K} S={S} decode{row}{label} (triton)"
            yield Case(name, f, (q, slots, slots, row_pos, ((1, K, S), "int32")), dtype != "float32")
            f = lambda *x, c=columns, K=K, how=how: jax.tree.leaves(
                pooled_attention(*x, columns=c, num_kv_heads=K, **how)
            )
            pool, flat = ((1, K * S, d), dtype), ((1, K * S), "int32")
            name = name.replace(" decode", " pool decode")
            yield Case(name, f, (q, pool, pool, flat, row_pos, flat), dtype != "float32")


def mosaic_decoding() -> Iterator[Case]:
    """One row a head by Mosaic: slots that fill whole blocks, and slots that do not."""
    from kvjax.pallas_kernels import blocks as bl
    from kvjax.pallas_kernels import gpu

    groups = ((32, 8), (32, 32), (64, 8), (28, 4))
    for (N, K), dtype, d, S, (label, options) in itertools.product(
        groups, ("bfloat16", "float16"), (64, 128), (32768, 33032), OPTIONS.items()
    ):
        if ((N, K) != (32, 8) or dtype == "float16") and (options or S != 33032 or d != 128):
            continue
        spec = bl.Logits(d**-0.5, **options)
        f = functools.partial(gpu.forward, spec=spec, with_logits=False, backend="mosaic_gpu")
        q, slots, row_pos = ((1, N, 1, d), dtype), ((1, K, S, d), dtype), ((1, 1), "int32")
        name = f"{NAMES[dtype]} d={d} N={N} K={K} S={S} decode{label} (mosaic_gpu)"
        yield Case(name, lambda *x, f=f: f(*x)[:2], (q, slots, slots, row_pos, ((1, K, S), "int32")), True)


def kernels(arch: str, smoke: bool, only: str = "") -> Iterator[Case]:
    """Everything that is compiled, or two cases of each kind, or what matches a pattern.

    For sm_100 bfloat16 without options alone.
    """
    for kind in (forwards, statistics, decoding):
        plain = lambda name: name.startswith("bf16") and "softcap" not in name
        served = (case for case in kind(arch) if arch != "sm_100" or plain(case.name))
        found = (case for case in served if re.search(only, case.name))
        yield from itertools.islice(found, 2) if smoke else found


def compiler(arch: str, dump: str) -> Any:
    """The sharding of arrays on a GPU that jitted functions can be compiled for from now on, PTX in a folder.

    For one architecture a process: XLA reads its flags once.
    """
    os.environ.update(
        JAX_PLATFORMS="cpu",
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
        PATH=f"{toolkit() / 'bin'}{os.pathsep}{os.environ['PATH']}",
        XLA_FLAGS=f"--xla_gpu_cuda_data_dir={toolkit()} --xla_dump_to={dump} --xla_dump_emitter_re=ptx "
        "--xla_gpu_autotune_level=0",
        MOSAIC_GPU_DUMP_PTX="1",
        MOSAIC_GPU_DUMP_TO=dump,
    )
    warnings.simplefilter("ignore")
    import jax
    from jax.experimental import topologies

    target = TARGET.format(DEVICES[arch])
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    mesh = jax.sharding.Mesh(list(topology.devices), ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def steps(arch: str, only: str) -> list[dict[str, Any]]:
    """One row a policy and an implementation: what its decode step launches in each layer."""
    where = compiler(arch, tempfile.mkdtemp(prefix="aot_"))
    from kvjax.experiments.gpu import launches

    found = []
    kernels: tuple[Literal["triton", "mosaic_gpu"], ...] = ("triton", "mosaic_gpu") if arch == "sm_90" else ("triton",)
    for implementation, (name, policy) in itertools.product(kernels, launches.POLICIES.items()):
        if not re.search(only, f"{name} ({implementation})"):
            continue
        each = launches.a_layer(policy, implementation, where)
        found.append({"arch": arch, "kernels": implementation, "policy": name, "launches": each})
        said = ", ".join(f"{n:g} {kind}" for kind, n in each.items())
        print(f"{arch:6s} {implementation:10s} {name:13s} {said}", flush=True)
    return found


def check(arch: str, smoke: bool, only: str) -> list[dict[str, Any]]:
    """One row a kernel."""
    dump = pathlib.Path(tempfile.mkdtemp(prefix="aot_"))
    whole, device = compiler(arch, str(dump)), DEVICES[arch]
    import jax

    found = []
    for case in kernels(arch, smoke, only):
        for file in dump.iterdir():
            if file.is_file():
                file.unlink()
        shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape, dtype in case.shapes]
        row: dict[str, Any] = {"arch": arch, "kernel": case.name, "ok": False}
        try:
            with jax.sharding.use_abstract_mesh(whole.mesh.abstract_mesh):
                jax.jit(case.run).lower(*shapes).compile()
        except Exception as error:  # any failure of a compiler is a row of the report
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        else:
            row["parts"] = [part for file in sorted(dump.rglob("*.ptx")) for part in assemble(file)]
            row["ok"] = bool(row["parts"]) and all(
                not p["spill_bytes"]
                and (
                    not case.products or p["name"] in NO_PRODUCTS or any(map(p["instructions"].get, device.tensor_core))
                )
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
    ok = "ok  " if row["ok"] else "FAIL"
    return f"{ok} {row['arch']:6s} {row['kernel']:76s} {parts or row.get('error', 'no PTX')}"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """A page in Markdown: what compiled on every architecture, and every row that is not as it should be."""
    lines = [
        "| architecture | combinations | compiled as wanted | most registers | most bytes spilled |",
        "|" + "---|" * 5,
    ]
    for arch in dict.fromkeys(row["arch"] for row in rows):
        mine = [row for row in rows if row["arch"] == arch]
        parts = [part for row in mine for part in row.get("parts", [])]
        most = [max((part[name] for part in parts), default=0) for name in ("registers", "spill_bytes")]
        lines.append(f"| {arch} | {len(mine)} | {sum(row['ok'] for row in mine)} | {most[0]} | {most[1]} |")
    wrong = [row for row in rows if not row["ok"]]
    if wrong:
        lines += ["", "| architecture | kernel | what is wrong |", "|---|---|---|"]
    for row in wrong:
        spilled = ", ".join(
            f"{p['name']} spills {p['spill_bytes']} B" for p in row.get("parts", []) if p["spill_bytes"]
        )
        lines.append(f"| {row['arch']} | {row['kernel']} | {row.get('error') or spilled or 'no tensor cores'} |")
    return "\n".join(lines) + "\n"


def write(output: pathlib.Path, rows: list[dict[str, Any]], keep: bool) -> None:
    """The report as compressed JSON, and a page of it; `keep` leaves older rows that were not compiled again."""
    from kvjax.models.written import write_bytes

    file, version = output.with_suffix(".json.gz"), importlib.metadata.version("jax")
    found = {(row["arch"], row["kernel"]): row for row in rows}
    if keep and file.exists():
        older = json.loads(gzip.decompress(file.read_bytes()))
        if older["jax"] != version:
            raise ValueError(
                f"{file} is of jax {older['jax']}, this is {version}; compile all kernels, or leave --only"
            )
        found = {(row["arch"], row["kernel"]): row for row in older["rows"]} | found
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in found.values())
    text = f'{{"jax": "{version}", "rows": [\n{lines}\n]}}\n'
    page = f"# Kernels compiled ahead of time, jax {version}\n\n{summary([*found.values()])}"
    for path, content in ((file, gzip.compress(text.encode(), mtime=0)), (output.with_suffix(".md"), page.encode())):
        write_bytes(path, content)


def main() -> int:
    """Runs every architecture in a process of its own and writes the report after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arch", choices=DEVICES, nargs="*", default=[*DEVICES])
    parser.add_argument("--output", type=pathlib.Path, help="path of the report, without a suffix")
    parser.add_argument("--smoke", action="store_true", help="two kernels of each kind")
    parser.add_argument("--steps", action="store_true", help="whole decode steps in place of kernels; a report is JSON")
    parser.add_argument("--only", default="", help="a pattern in names of kernels; a report keeps its other rows")
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    lacking = missing()
    if lacking:
        print(
            f"cannot compile for a GPU here; missing: {', '.join(lacking)}. Install them in an environment:\n{INSTALL}"
        )
        return 2
    if args.worker is not None:
        rows = steps(args.arch[0], args.only) if args.steps else check(args.arch[0], args.smoke, args.only)
        args.worker.write_text(json.dumps(rows))
        return 0
    rows = []
    for arch in args.arch:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "rows.json")
            command = [sys.executable, __file__, "--arch", arch, "--worker", str(file), "--only", args.only]
            subprocess.run(command + ["--smoke"] * args.smoke + ["--steps"] * args.steps, check=True)
            rows += json.loads(file.read_text())
        if args.output is not None and args.steps:
            version = importlib.metadata.version("jax")
            lines = ",\n".join(json.dumps(row) for row in rows)
            args.output.with_suffix(".json").write_text(f'{{"jax": "{version}", "rows": [\n{lines}\n]}}\n')
        elif args.output is not None:
            write(args.output, rows, keep=bool(args.only))
    if args.steps:
        return 0
    failures = [r for r in rows if not r["ok"]]
    print(f"{len(rows) - len(failures)} of {len(rows)} compile with tensor cores and without spills")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
