"""Compiles every kernel for GPUs that this machine need not have, and fails on spills or missing tensor cores.

    python experiments/aot_check.py    # sm_80, sm_90 and sm_100; exits 1 on a failure, 2 where no compiler is installed
    python experiments/aot_check.py --arch sm_90 --output report    # --only PATTERN renews some of its rows
    python experiments/aot_check.py --steps    # what whole decode steps launch in each layer

Needs jax >= 0.11.2 with the CUDA 13 plugin and compilers, but neither a GPU nor a driver; without them it says what is
missing and how to install it. For each kernel: registers, bytes of spills (ptxas), tensor-core instructions in its PTX.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import gzip
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
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

import jax
import numpy as np
from jax.experimental import topologies

from kvjax.experiments.core.command import script
from kvjax.experiments.core.page import Table, markdown
from kvjax.experiments.gpu import launches
from kvjax.models.written import write_bytes
from kvjax.pallas_kernels import Columns, Logits, Softmax, attention, flash, gpu, pooled_attention
from kvjax.pallas_kernels import blocks as bl

INSTALL = (
    "pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm nvidia-nvjitlink "
    "nvidia-cuda-runtime nvidia-cuda-nvrtc nvidia-cuda-cupti"
)
NEEDED = ("jax_cuda13_plugin", "jax_plugins.xla_cuda13", "nvidia.cu13")
MIN_JAX = (0, 11, 2)
VERSION = importlib.metadata.version("jax")


TARGETS = pathlib.Path(__file__).with_name("gpu") / "targets"
"""What the compiler must know of a GPU, by architecture, in XLA's form: an A100, an H100 and a B200."""
TENSOR_CORE = {
    "sm_80": ("mma.sync",),
    "sm_90": ("wgmma.mma_async", "mma.sync"),
    "sm_100": ("tcgen05.mma", "mma.sync"),
}
NO_PRODUCTS = ("kvjax_combine",)
INSTRUCTIONS = r"(wgmma\.mma_async|mma\.sync|tcgen05\.mma|cp\.async\.cg|cp\.async\.bulk|ex2\.approx)"


def missing() -> list[str]:
    """What this environment lacks to compile for a GPU."""
    version = tuple(int(x) for x in VERSION.split(".")[:3])
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
      run: the function that is compiled.
      given: what it is called with, shapes in place of arrays among it.
    """

    name: str
    run: Callable[..., Any]
    given: tuple[Any, ...]

    @property
    def products(self) -> bool:
        """Whether its products are of dtypes that tensor cores multiply."""
        return not self.name.startswith(NAMES["float32"])


NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
HEAD_DIMS = (64, 80, 96, 128, 256)
ALL = tuple((dtype, d) for dtype in NAMES for d in HEAD_DIMS)
FEWER = (*(("bfloat16", d) for d in HEAD_DIMS), ("float16", 128), ("float32", 128))
OPTIONS: dict[str, dict[str, Any]] = {"": {}, ", softcap and window": {"softcap": 30.0, "window": 1024}}


STATISTICS = {
    "sum p": Columns(),
    "sum p^2 of group means": Columns(element="p2", group_at="before"),
    "max p of group": Columns(group="max", group_at="before"),
    "count of group means above 1/visible": Columns(element="above", group_at="before"),
    "count above 1/visible": Columns(element="above", group=None),
    "sum of group maxima": Columns(group="max", group_at="before"),
}
Types = tuple[str, int, int]
How = tuple[str, str, bool]


def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    """What stands for an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def dense(dtype: str, d: int, N: int = 32, K: int = 8, T: int = 4096, S: int = 4096) -> tuple[Any, ...]:
    """q, k, v, q_pos and kv_pos of a call: of query heads, kv heads, rows and slots."""
    slots = array(dtype, 1, K, S, d)
    return array(dtype, 1, N, T, d), slots, slots, array("int32", 1, T), array("int32", 1, K, S)


def backends(arch: str, by_mosaic: bool = True) -> tuple[Literal["triton", "mosaic_gpu"], ...]:
    """Whose kernels are compiled for an architecture, where Mosaic's serve a call or do not."""
    return ("triton", "mosaic_gpu") if arch == "sm_90" and by_mosaic else ("triton",)


def forwards(arch: str) -> Iterator[Case]:
    """Attention forward: every dtype, head dimension and tile; with bias; Mosaic where it serves."""
    for backend, (dtype, d), T, (label, options) in itertools.product(
        backends(arch), ALL, (4096, 32, 16), OPTIONS.items()
    ):
        if backend == "mosaic_gpu" and (dtype == "float32" or d not in (64, 128) or T < 4096):
            continue
        if (dtype != "bfloat16" and T < 4096) or (dtype == "float16" and options):
            continue  # float16 is as bfloat16, the tiles of float32 are as small anyway
        yield forward(f"T={T} forward{label}", backend, dtype, d, options, T=T)
    for dtype, d in FEWER:
        f = functools.partial(flash.flash_attention, spec=bl.Spec(d**-0.5))
        given = *dense(dtype, d), array("float32", 1, 32, 4096)
        yield Case(f"{NAMES[dtype]} d={d} T=4096 forward, bias (triton)", lambda *x, f=f: f(*x[:-1], bias=x[-1]), given)


def forward(what: str, backend: str, dtype: str, d: int, options: dict[str, Any], **sizes: int) -> Case:
    """Attention's output and logsumexp."""
    f = functools.partial(gpu.forward, spec=bl.Spec(d**-0.5, **options), with_logits=False, backend=backend)
    return Case(f"{NAMES[dtype]} d={d} {what} ({backend})", lambda *x: f(*x)[:2], dense(dtype, d, **sizes))


def statistic(what: str, **arrays: Any) -> Columns:
    """A statistic by its name, behind which stands what counts."""
    return dataclasses.replace(STATISTICS[what.partition(",")[0]], count_self="without itself" not in what, **arrays)


def column(what: str, types: Types, backend: str, how: How = ("", "", False), heads: Any = None) -> Case:
    """One statistic, given the logsumexp: with weights of rows, of a softmax of its own, with a bias, as is asked.

    Args:
      what: its name.
      types: dtype, head dimension and rows.
      backend: whose kernel.
      how: options of the logits, the statistic's own softmax, and whether there is a bias.
      heads: query heads and kv heads, where the name says them.
    """
    (N, K), (dtype, d, T), (option, softmax, biased) = heads or (32, 8), types, how
    q, k, _, *positions = dense(dtype, d, N, K, T)
    c = statistic(what, weight=np.ones((1, T), np.float32) if "weights" in what else None)
    if softmax:
        drawn: dict[str, Any] = {"seed": np.zeros(1, np.uint32), "noise": "gumbel"} if "noisy" in softmax else {}
        if softmax != "noisy":
            drawn["multiplier"] = np.ones((1, K, T), np.float32)
        c = dataclasses.replace(c, softmax=Softmax(**drawn, causal=softmax != "non-causal"))
    options = {"logits": bl.Spec(d**-0.5, **OPTIONS[option]), "backend": backend}

    def run(q: Any, k: Any, lse: Any, q_pos: Any, kv_pos: Any, c: Columns, bias: Any) -> jax.Array:
        return gpu.column(c, q, k, (None, lse, None), q_pos, kv_pos, bias=bias, **options)

    kind = (f" of a {softmax} softmax" if softmax else "") + ", bias" * biased
    name = f"{NAMES[dtype]} d={d} T={T}{f' N={N} K={K}' if heads else ''} {what}{kind}{option} ({backend})"
    bias = array("float32", 1, N, 4096) if biased else None
    return Case(name, run, (q, k, array("float32", 1, N, T), *positions, c, bias))


def statistics(arch: str) -> Iterator[Case]:
    """Column statistics: everything that changes a kernel, on every tile and head dimension, alone and at once."""
    plain = [what for what in STATISTICS if what != "sum of group maxima"]
    common = "sum p", "count of group means above 1/visible"
    squares = "sum p^2 of group means"
    counted = ["sum p, weights, without itself"]
    counted += [f"{squares}, {what}" for what in ("weights", "without itself", "weights, without itself")]
    at_once = [
        *("sum p", "sum p, weights, without itself", "count above 1/visible, weights"),
        *(squares, "sum of group maxima", f"{squares}, weights"),
        "count of group means above 1/visible, weights, without itself",
    ]

    def of(dtype: str, dims: Sequence[int] = HEAD_DIMS, tiles: Sequence[int] = (4096,)) -> list[Types]:
        return [(dtype, d, T) for d, T in itertools.product(dims, tiles)]

    both, one, none = tuple(OPTIONS), tuple(OPTIONS)[1:], tuple(OPTIONS)[:1]
    softmaxes = tuple(itertools.product(("", "rescaled", "noisy", "noisy rescaled"), (False, True)))[1:]
    alone = (("", False),)
    # Statistics, types with tiles, options of logits, (softmax, with a bias). float16 is as bfloat16.
    families: list[tuple[Sequence[str], Any, Any, Any]] = [
        (plain, of("bfloat16", tiles=(4096, 32, 16)), both, alone),
        (common, of("float16") + of("float32"), both, alone),
        (["sum p"], [(*case, 4096) for case in FEWER], both, (("non-causal", False),)),
        (counted, of("bfloat16"), both, alone),
        (counted, of("bfloat16", tiles=(16,)) + of("float16", (128, 256)) + of("float32", (64, 128)), none, alone),
        (at_once, of("bfloat16") + of("float32", (128,)), both, softmaxes),
        (at_once, of("bfloat16", tiles=(16,)) + of("float16", (64, 128, 256)), one, softmaxes),
    ]
    for family in families:
        for what, (dtype, d, T), option, (softmax, biased) in itertools.product(*family):
            served = dtype != "float32" and d in (64, 128) and T == 4096 and statistic(what).group_at == "after"
            for backend in backends(arch, served and not biased and "noisy" not in softmax):
                yield column(what, (dtype, d, T), backend, (option, softmax, biased))
    for heads, d in itertools.product(((32, 32), (32, 4), (64, 8), (28, 4), (8, 1)), (64, 128, 256)):
        yield column(squares, ("bfloat16", d, 4096), "triton", heads=heads)


def decoding(arch: str) -> Iterator[Case]:
    """One row a head: against a cache and a pool of 32k slots and of few, with and without its row."""
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
            how: dict[str, Any] = {"columns": (Columns(),) if row else (), "logits": Logits(**options)}
            q, k, v, q_pos, kv_pos = dense(dtype, d, N, K, 1, S)
            pool, owner = array(dtype, 1, K * S, d), array("int32", 1, K * S)
            for kind, f, given in (
                ("decode", functools.partial(attention, implementation="triton", **how), (q, k, v, q_pos, kv_pos)),
                (
                    "pool decode",
                    functools.partial(pooled_attention, num_kv_heads=K, implementation="triton", **how),
                    (q, pool, pool, owner, q_pos, owner),
                ),
            ):
                name = f"{NAMES[dtype]} d={d} N={N} K={K} S={S} {kind}{row}{label} (triton)"
                yield Case(name, lambda *x, f=f: jax.tree.leaves(f(*x)), given)


def mosaic_decoding() -> Iterator[Case]:
    """One row a head by Mosaic: slots that fill whole blocks, and slots that do not."""
    groups = ((32, 8), (32, 32), (64, 8), (28, 4))
    for (N, K), dtype, d, S, (label, options) in itertools.product(
        groups, ("bfloat16", "float16"), (64, 128), (32768, 33032), OPTIONS.items()
    ):
        if ((N, K) != (32, 8) or dtype == "float16") and (options or S != 33032 or d != 128):
            continue
        yield forward(f"N={N} K={K} S={S} decode{label}", "mosaic_gpu", dtype, d, options, N=N, K=K, T=1, S=S)


def kernels(arch: str, smoke: bool, only: str = "") -> Iterator[Case]:
    """Everything that is compiled, or two cases of each kind, or what matches a pattern.

    For sm_100 bfloat16 without options alone.
    """
    for kind in (forwards, statistics, decoding):
        plain = lambda name: name.startswith("bf16") and "softcap" not in name
        served = (case for case in kind(arch) if arch != "sm_100" or plain(case.name))
        found = (case for case in served if re.search(only, case.name))
        yield from itertools.islice(found, 2) if smoke else found


def in_compiler(function: Callable[..., Any], arch: str, *arguments: Any) -> Any:
    """What a function returns of an architecture, a folder for PTX and arguments, where XLA compiles for such GPUs.

    In a process of its own: XLA reads its flags once.
    """
    with tempfile.TemporaryDirectory(prefix="aot_") as dump:
        os.environ.update(
            JAX_PLATFORMS="cpu",
            JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
            PATH=f"{toolkit() / 'bin'}{os.pathsep}{os.environ['PATH']}",
            XLA_FLAGS=f"--xla_gpu_cuda_data_dir={toolkit()} --xla_dump_to={dump} --xla_dump_emitter_re=ptx "
            "--xla_gpu_autotune_level=0",
            MOSAIC_GPU_DUMP_PTX="1",
            MOSAIC_GPU_DUMP_TO=dump,
        )
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, arch, dump, *arguments).result()


def device(arch: str) -> jax.sharding.NamedSharding:
    """The sharding of arrays on a GPU that jitted functions can be compiled for."""
    warnings.simplefilter("ignore")
    target = (TARGETS / f"{arch}.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    mesh = jax.sharding.Mesh(list(topology.devices), ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def decode_steps(arch: str, dump: str, only: str) -> list[dict[str, Any]]:
    """One row a policy and an implementation: what its decode step launches in each layer."""
    where, found = device(arch), []
    for implementation, (name, policy) in itertools.product(backends(arch), launches.POLICIES.items()):
        if not re.search(only, f"{name} ({implementation})"):
            continue
        each = launches.a_layer(policy, implementation, where)
        found.append({"arch": arch, "kernels": implementation, "policy": name, "launches": each})
        said = ", ".join(f"{n:g} {kind}" for kind, n in each.items())
        print(f"{arch:6s} {implementation:10s} {name:13s} {said}", flush=True)
    return found


def check(arch: str, dump: str, smoke: bool, only: str) -> list[dict[str, Any]]:
    """One row a kernel."""
    where, found = device(arch), []
    for case in kernels(arch, smoke, only):
        for file in pathlib.Path(dump).iterdir():
            if file.is_file():
                file.unlink()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), case.given)
        row: dict[str, Any] = {"arch": arch, "kernel": case.name, "ok": False}
        try:
            with jax.sharding.use_abstract_mesh(where.mesh.abstract_mesh):
                jax.jit(case.run).lower(*shapes).compile()
        except Exception as error:  # any failure of a compiler is a row of the report
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        else:
            row["parts"] = [part for file in sorted(pathlib.Path(dump).rglob("*.ptx")) for part in assemble(file)]
            row["ok"] = bool(row["parts"]) and all(
                not p["spill_bytes"]
                and (
                    not case.products or p["name"] in NO_PRODUCTS or any(map(p["instructions"].get, TENSOR_CORE[arch]))
                )
                for p in row["parts"]
            )
        found.append(row)
        print(line(row), flush=True)
    return found


def assemble(file: pathlib.Path) -> list[dict[str, Any]]:
    """Registers and spills of our kernel in one PTX file, by ptxas; nothing of a file that has none."""
    text = file.read_text()
    name, target = (re.search(x, text) for x in (r"\.entry (kvjax\w*|\w*mosaic\w*)", r"\.target (\w+)"))
    if name is None or target is None:
        return []
    command = [str(toolkit() / "bin" / "ptxas"), "-v", f"-arch={target[1]}", str(file), "-o", os.devnull]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    most = lambda pattern: max(map(int, re.findall(pattern, log)), default=0)
    return [
        {
            "name": re.sub(r"_\d+$", "", name[1]),
            "target": target[1],
            "registers": most(r"Used (\d+) registers"),
            "spill_bytes": most(r"(\d+) bytes spill stores"),
            "instructions": dict(collections.Counter(re.findall(INSTRUCTIONS, text))),
        }
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


def page(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown: what compiled on every architecture, and every row that is not as it should be."""
    counts = []
    for arch in dict.fromkeys(row["arch"] for row in rows):
        mine = [row for row in rows if row["arch"] == arch]
        parts = [part for row in mine for part in row.get("parts", [])]
        most = [max((part[name] for part in parts), default=0) for name in ("registers", "spill_bytes")]
        counts.append([arch, *map(str, (len(mine), sum(row["ok"] for row in mine), *most))])
    wrong = []
    for row in rows:
        spilled = [f"{p['name']} spills {p['spill_bytes']} B" for p in row.get("parts", []) if p["spill_bytes"]]
        if not row["ok"]:
            wrong.append([row["arch"], row["kernel"], row.get("error") or ", ".join(spilled) or "no tensor cores"])
    head = ["architecture", "combinations", "compiled as wanted", "most registers", "most bytes spilled"]
    tables = [Table(head, counts), *[Table(["architecture", "kernel", "what is wrong"], wrong)] * bool(wrong)]
    return markdown(f"Kernels compiled ahead of time, jax {VERSION}", *tables)


def write(output: pathlib.Path, rows: list[dict[str, Any]], keep: bool) -> None:
    """The report as compressed JSON, and a page of it; `keep` leaves older rows that were not compiled again."""
    file = output.with_suffix(".json.gz")
    found = {(row["arch"], row["kernel"]): row for row in rows}
    if keep and file.exists():
        older = json.loads(gzip.decompress(file.read_bytes()))
        if older["jax"] != VERSION:
            raise ValueError(
                f"{file} is of jax {older['jax']}, this is {VERSION}; compile all kernels, or leave --only"
            )
        found = {(row["arch"], row["kernel"]): row for row in older["rows"]} | found
    text = stored([*found.values()], separators=(",", ":"))
    write_bytes(file, gzip.compress(text.encode(), mtime=0))
    write_bytes(output.with_suffix(".md"), page([*found.values()]).encode())


def stored(rows: Sequence[dict[str, Any]], **how: Any) -> str:
    """Rows as JSON, a line each."""
    lines = ",\n".join(json.dumps(row, **how) for row in rows)
    return f'{{"jax": "{VERSION}", "rows": [\n{lines}\n]}}\n'


def main(
    arch: tuple[Literal["sm_80", "sm_90", "sm_100"], ...] = ("sm_80", "sm_90", "sm_100"),
    output: pathlib.Path | None = None,
    smoke: bool = False,
    steps: bool = False,
    only: str = "",
) -> int:
    """Compiles for every architecture in a process of its own and writes the report after each.

    Args:
      arch: architectures.
      output: path of the report, without a suffix.
      smoke: two kernels of each kind.
      steps: whole decode steps in place of kernels; a report is JSON.
      only: a pattern in names of kernels; a report keeps its other rows.
    """
    if lacking := missing():
        print(
            f"cannot compile for a GPU here; missing: {', '.join(lacking)}. Install them in an environment:\n{INSTALL}"
        )
        return 2
    rows: list[dict[str, Any]] = []
    for each in arch:
        rows += in_compiler(decode_steps, each, only) if steps else in_compiler(check, each, smoke, only)
        if output is not None and steps:
            write_bytes(output.with_suffix(".json"), stored(rows).encode())
        elif output is not None:
            write(output, rows, keep=bool(only))
    if steps:
        return 0
    good = sum(row["ok"] for row in rows)
    print(f"{good} of {len(rows)} compile with tensor cores and without spills")
    return int(good < len(rows))


if __name__ == "__main__":
    sys.exit(script(main))
