"""One command for a GPU: are the kernels right, repeatable, and how near do they come to what the machine can do?

    python experiments/gpu_check.py                        # on a GPU, unattended, in --budget SECONDS (540)
    python experiments/gpu_check.py --budget 2400          # everything, the whole sweep and all 32 layers included
    python experiments/gpu_check.py --only end_to_end      # one section gets all of the time
    python experiments/gpu_check.py --only sweep           # just the block sizes, to tune those in pallas_kernels
    python experiments/gpu_check.py --smoke                # the same code, tiny and interpreted, on CPU

Sections run in order of value, each within its share of the time, in processes of their own: one that crashes, loses
its GPU context or shows no sign of life for --patience seconds is killed, what it was at is a row that failed, and
another goes on behind it. `gpu_check.json` is written after every row; it names the implementation that served a row,
and what was not reached. Times are medians; floors follow from ceilings measured in the same run. Exits 1 on a failure.
"""

import argparse
import collections
import functools
import itertools
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others may share this GPU

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.experiments.core.provenance import device_info, environment
from kvjax.experiments.gpu import watchdog
from kvjax.experiments.gpu.correct import STATISTICS, correctness, repeatability
from kvjax.experiments.gpu.gpu_report import POISONED, Report, Timed, timed
from kvjax.pallas_kernels import (
    Columns,
    attention,
    colstats,
    decode,
    flash,
    gpu,
    mosaic_colstats,
    mosaic_flash,
    pooled_attention,
)
from kvjax.pallas_kernels import blocks as bl
from kvjax.pallas_kernels.api import Implementation

OURS = ("snapkv", "full", "h2o")  # methods of end_to_end
SETS = 8  # of arrays for a call that takes less time than its dispatch


def ceilings(report: Report, implementations: Sequence[Implementation]) -> None:
    """What this machine does best: a large matrix product and a large copy."""
    del implementations
    n = 256 if report.smoke else 8192
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)  # ones would multiply faster than real numbers do
    gemm = timed(lambda a: a @ a, a, smoke=report.smoke)
    x = jax.random.normal(jax.random.key(1), (1 << (12 if report.smoke else 28),))
    copy = timed(lambda x: x + 1, x, smoke=report.smoke)
    if gemm.ms is None or copy.ms is None:
        raise RuntimeError(f"no ceilings: {gemm.error} {copy.error}")
    report.ceilings = {"gemm_tflops": 2e-9 * n**3 / gemm.ms, "copy_gb_s": 2e-6 * x.nbytes / copy.ms}
    values: dict[str, Any] = {"served_by": "xla", **report.ceilings}
    report.row("ceilings", "bf16 product, float32 copy", **values)


def _causal(n: int, N: int, K: int, H: int, dtype: str = "bfloat16") -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(n), 3)
    q, k, v = (
        jax.random.normal(key, (1, heads, n, H), jnp.dtype(dtype)) for key, heads in zip(keys, (N, K, K), strict=True)
    )
    pos = jnp.arange(n, dtype=jnp.int32)
    return q, k, v, pos[None], jnp.broadcast_to(pos, (1, K, n))


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, *_: jax.Array) -> jax.Array:
    """Causal attention by cuDNN, which takes rows before heads."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def timings(report: Report, implementations: Sequence[Implementation]) -> None:
    """Every kernel with its floor, beside cuDNN and the quadratic formulation."""
    smoke = report.smoke
    N, K, sizes = (2, 1, [(64, 64)]) if smoke else (32, 8, [(8192, 128), (32768, 128), (4096, 128), (8192, 64)])
    for n, H in sizes:
        if not report.reaches("timings", f"n={n} H={H}", again=True):
            continue

        def run(
            name: str,
            f: Any,
            *args: Any,
            at: Any = (n, H),
            again: bool = False,
            launches: int = 10,
            sets: int = 1,
            **of: Any,
        ):
            if not report.reaches("timings", f"{name} n={at[0]} H={at[1]}", again=again):
                return Timed(None)
            took = timed(f, *args, smoke=smoke, launches=launches, sets=sets)
            report.timing(name, took, n=at[0], H=at[1], **of)
            return took

        arrays = q, k, v, q_pos, kv_pos = _causal(n, N, K, H)
        product_ms = 1e-9 * H * N * n * (n + 1) / report.ceilings["gemm_tflops"]
        floor = {"floor_ms": 2 * product_ms}
        if not smoke:
            run("cudnn forward", cudnn, *arrays, served_by="cudnn", **floor)
        spec = bl.Logits(H**-0.5)
        forwards = {
            how: functools.partial(gpu.forward, spec=spec, with_logits=False, backend=how) for how in implementations
        }
        took = {
            how: run(f"{how} forward with logsumexp", f, *arrays, again=True, served_by=how, **floor).ms
            for how, f in forwards.items()
        }
        ran = {how: ms for how, ms in took.items() if ms is not None}
        if not ran:
            continue
        fastest = min(ran, key=lambda how: ran[how])
        lse = jax.jit(forwards[fastest])(*arrays)[1]
        statistics = {**STATISTICS, "sum p, last 64 rows": Columns(rows=min(64, n))}
        for how, (name, c) in itertools.product(implementations, statistics.items()):
            rows = min(c.rows or n, n)
            share = rows * (2 * n - rows + 1) / (n * (n + 1))

            def alone(q, k, lse, q_pos, kv_pos, c: Columns = c, how: str = how, spec: bl.Logits = spec) -> jax.Array:
                return gpu.column(c, q, k, (q, lse, None), q_pos, kv_pos, logits=spec, backend=how)

            given = q, k, lse, q_pos, kv_pos
            try:
                jax.eval_shape(alone, *given)
            except NotImplementedError as reason:
                report.elsewhere("timings", f"{how} {name} n={n} H={H}", str(reason))
                continue
            of = {"floor_ms": share * product_ms, "forward_ms": ran[fastest]}
            run(f"{how} {name}", alone, *given, served_by=how, sets=SETS if rows < n else 1, **of)
        floor = {"floor_ms": 1e-6 * (k.nbytes + v.nbytes) / report.ceilings["copy_gb_s"]}
        one = q[:, :, -1:], k, v, q_pos[:, -1:], kv_pos
        for columns, what in (((), ""), ((Columns(),), " with its row")):
            for how in implementations:
                f = functools.partial(attention, columns=columns, implementation=how)
                run(f"{how} decode{what}", f, *one, sets=SETS, **floor)
            f = functools.partial(pooled_attention, columns=columns, num_kv_heads=K, implementation=implementations[0])
            run(f"{implementations[0]} pool decode{what}", f, *_pooled(one), sets=SETS, **floor)
        xla = functools.partial(attention, columns=(Columns(),))
        if n <= 4096:  # the memory of longer ones would stay with this process, and the models need it
            square = lambda *x, f=xla: f(*x, implementation="reference").columns
            run("quadratic XLA: attention, sum p", square, *arrays, launches=2, served_by="reference")
        blockwise = functools.partial(xla, implementation="xla")
        run("blockwise XLA: attention, sum p", blockwise, *arrays, launches=1, served_by="xla")


def _pooled(one: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """A query row and its cache as a flat pool, in order of heads."""
    q, k, v, q_pos, kv_pos = one
    flat = lambda x: x.reshape(1, -1, *x.shape[3:])
    owner = jnp.repeat(jnp.arange(k.shape[1], dtype=jnp.int32), k.shape[2])[None]
    return q, flat(k), flat(v), owner, q_pos, flat(kv_pos)


def candidates(kernel: str, dtype: str, H: int, smoke: bool) -> Iterator[bl.BlockSizes]:
    """Block sizes to try: many at bfloat16 and 128, where the goals are, fewer elsewhere."""
    wide = (dtype, H) == ("bfloat16", 128)
    if smoke:
        yield bl.BlockSizes(16, 16, num_warps=4, num_stages=2, split=32)
    elif kernel in ("flash", "colstats"):
        q, k = ((16, 32), (16, 32)) if dtype == "float32" else ((64, 128), (32, 64, 128) if wide else (32, 64))
        for numbers in itertools.product(q, k, (4, 8), (2, 3) if wide else (2,)):
            yield bl.BlockSizes(*numbers)
    else:
        k = (16, 32) if dtype == "float32" else (32, 64, 128)
        for block, warps, stages, split in itertools.product(
            k, (4, 8), (2, 3) if wide else (3,), (512, 1024, 2048) if wide else (1024,)
        ):
            yield bl.BlockSizes(16, block, num_warps=warps, num_stages=stages, split=split)


def sweep(report: Report, implementations: Sequence[Implementation]) -> None:
    """Block sizes of every kernel beside the shipped ones: first what the goals are about, then the rest."""
    smoke, interpret = report.smoke, implementations[0] == "interpret"
    N, K = (2, 1) if smoke else (32, 8)
    prompt, slots = (40, 70) if smoke else (8192, 32768)
    cases = [("bfloat16", 128), ("bfloat16", 64), ("bfloat16", 256), ("float16", 128), ("float32", 128)]
    for dtype, H in [("float32", 64)] if smoke else cases:
        spec, what = bl.Logits(H**-0.5), colstats.Pass(("p",), "sum")
        q, k, v, q_pos, kv_pos = _causal(prompt, N, K, H, dtype)
        long = _causal(slots, N, K, H, dtype)
        one = long[0][:, :, -1:], long[1], long[2], long[3][:, -1:], long[4]
        some_lse = jnp.full((1, N, prompt), float(np.log(prompt)), jnp.float32)  # its values take no time
        kernels = {
            "colstats": (functools.partial(colstats.attention_colstats, what=what), (q, k, some_lse, q_pos, kv_pos)),
            "flash": (flash.flash_attention, (q, k, v, q_pos, kv_pos)),
            "decode": (decode.decode_attention, one),
            "pool decode": (functools.partial(decode.pooled_decode_attention, num_kv_heads=K), _pooled(one)),
        }
        shipped = {
            "colstats": colstats.block_sizes(dtype, H, prompt),
            "flash": flash.block_sizes(dtype, H, prompt),
            "decode": decode.block_sizes(dtype, H, K, slots),
            "pool decode": decode.block_sizes(dtype, H, 1, K * slots, max(16, N)),
        }
        label = {"dtype": dtype, "H": H}
        for name, (kernel, args) in kernels.items():
            tried = {shipped[name]: True} | dict.fromkeys(candidates(name, dtype, H, smoke), False)
            for sizes, is_shipped in tried.items():
                numbers = f"{name} {dtype} H={H} {tuple(vars(sizes).values())}"
                if not report.reaches("sweep", numbers):
                    continue
                f = lambda *x, f=functools.partial(kernel, spec=spec, sizes=sizes, interpret=interpret): (
                    jax.tree.leaves(f(*x))
                )
                run = timed(f, *args, smoke=smoke, sets=4 if "decode" in name else 1)
                served = "interpret" if interpret else "triton"
                values = vars(sizes) | {"shipped": is_shipped or sizes == shipped[name]}
                report.row("sweep", numbers, served_by=served, ms=run.ms, error=run.error, **label, **values)
        if "mosaic_gpu" not in implementations or dtype == "float32" or H not in (64, 128):
            continue
        of_mosaic = {
            "colstats": functools.partial(mosaic_colstats.attention_colstats, what=what),
            "flash": mosaic_flash.flash_attention,
        }
        for (name, kernel), stages in itertools.product(of_mosaic.items(), (2, 3, 4)):
            numbers = f"mosaic {name} {dtype} H={H} stages={stages}"
            if report.reaches("sweep", numbers):
                f = functools.partial(kernel, spec=spec, stages=stages)
                run = timed(lambda *x, f=f: jax.tree.leaves(f(*x)), *kernels[name][1], smoke=smoke)
                values = {"ms": run.ms, "error": run.error, "num_stages": stages}
                report.row("sweep", numbers, served_by="mosaic_gpu", **values, **label)


def end_to_end(
    report: Report, implementations: Sequence[Implementation], depths: Sequence[int] = (8, 32), peers: bool = False
) -> None:
    """Prefill and decode of a random model shaped like Llama 3 8B, a process for each method: peaks do not mix.

    First the least of its `depths` for every method, then the next while twice the time that the first took is left: a
    row of few layers is worth more than none of many. With `peers` transformers reads and writes the same.
    """
    here = pathlib.Path(__file__).with_name("gpu")
    methods = {name: [str(here / "model.py"), name] for name in OURS}
    if peers:
        peer = str(here / "peer.py")
        methods |= {"transformers": [peer], "transformers, compiled": [peer, "--compiled"]}
    took: dict[str, float] = {}
    depths = (2,) if report.smoke else sorted(depths)
    for layers, (i, (method, what)) in itertools.product(depths, enumerate(methods.items())):
        name, few = f"{method}, {layers} layers", layers == depths[0]
        if not few and method not in took:
            continue  # its few layers have failed
        left = report.seconds_left("end_to_end")
        if not few and left < 2 * took[method]:
            report.not_reached.append(f"end_to_end: {name}")
            report.save()
            continue
        if not report.reaches("end_to_end", name):
            continue
        limit = left / (len(methods) - i) if few else left
        command = [sys.executable, *what, "--layers", str(layers)]
        command += ["--smoke"] * report.smoke
        command += ["--implementation", implementations[0]] if report.smoke and method in OURS else []
        started = time.monotonic()
        run = watchdog.captured(command, limit)
        if run is None:
            report.row("end_to_end", name, ok=not few, finished=False, error=f"killed after {limit:.0f} s")
        elif run.returncode == 0:
            took[method] = time.monotonic() - started
            measured = json.loads(run.stdout.splitlines()[-1])
            report.row("end_to_end", name, finished=True, **measured, process_s=took[method])
        else:
            too_large = any(x in run.stderr for x in ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory"))
            report.row("end_to_end", name, ok=too_large and not few, finished=False, reason=run.stderr[-400:])


NO_GPU = 2  # an exit code
MOST_INTERRUPTIONS = 3  # of a section: then the next one runs
SECTIONS = {f.__name__: f for f in (correctness, repeatability, ceilings, timings, end_to_end, sweep)}


def run_sections(args: argparse.Namespace, names: Sequence[str]) -> int:
    """Runs sections in this process, behind what other processes have done. Without any it looks at the device."""
    if not args.smoke and jax.default_backend() != "gpu":
        print(f"this machine has no GPU (backend {jax.default_backend()}); --smoke runs the same code on CPU")
        return NO_GPU
    report = Report(args.output, args.budget, args.smoke, args.only, args.start)
    report.resume()
    report.made = environment(["python", *sys.argv])
    report.device = device_info()
    hopper = not args.smoke and getattr(jax.devices()[0], "compute_capability", "").startswith("9.")
    implementations: tuple[Implementation, ...] = (
        ("interpret",) if args.smoke else ("triton", "mosaic_gpu") if hopper else ("triton",)
    )
    implementations = (args.implementation,) if args.implementation else implementations
    for name in names:
        if not report.reaches(name, "all of it", again=True):
            continue
        try:
            SECTIONS[name](report, implementations)
        except Exception as error:  # the finished rows stay, the other sections run
            traceback.print_exc()
            report.row(name, "stopped", ok=False, error=f"{type(error).__name__}: {str(error)[:300]}")
    report.save()
    return 0


def supervise(report: Report, command: Sequence[str], names: Sequence[str], patience: float) -> int:
    """Runs sections in processes that may crash or hang; what they were at has failed, and another goes on behind it.

    Args:
      report: in whose file they write.
      command: what `--sections` and names are added to.
      names: the sections.
      patience: seconds without a sign of life until a process is killed.

    Returns:
      0, or the exit code that says that there is no GPU.
    """
    left, interruptions = list(names), collections.Counter[str]()
    while left:
        before = len(report.begun)
        code = watchdog.watched([*command, "--sections", *left], report.file, patience)
        report.resume()
        if code in (0, NO_GPU):
            return code
        at = report.begun[-1] if len(report.begun) > before else f"{left[0]}: all of it"
        section, _, name = at.partition(": ")
        report.stopped.append(at)
        interruptions[section] += 1
        del left[: left.index(section)]
        if interruptions[section] == MOST_INTERRUPTIONS:
            left.remove(section)
            report.not_reached.append(f"{section}: the rest, after {MOST_INTERRUPTIONS} interruptions")
        if code == POISONED:  # that has its row
            report.save()
            continue
        why = f"no sign of life for {patience:.0f} s" if code is None else f"the process ended with code {code}"
        report.row(section, name, ok=False, error=why)
    return 0


def main() -> int:
    """Runs the sections, or what another process asks of this one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, interpreted kernels, any device")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("results/gpu_check"), help="where results go"
    )
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all sections together (540)")
    parser.add_argument("--patience", type=float, help="seconds without a sign of life until a process is killed (120)")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections that run; all by default"
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32], help="of the models of end_to_end (8 32)")
    parser.add_argument("--peers", action="store_true", help="measure transformers in end_to_end, too; needs PyTorch")
    parser.add_argument("--implementation", choices=("interpret", "triton", "mosaic_gpu"), help="instead of all")
    parser.add_argument("--sections", nargs="*", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sections is not None:
        return run_sections(args, args.sections)
    if args.budget < 0 or min(args.layers) < 1:
        parser.error(f"--budget {args.budget:g} must not be negative, nor --layers {min(args.layers)} below 1")
    watchdog.end_with_children()
    if "timings" in args.only and "ceilings" not in args.only:
        args.only.append("ceilings")
    patience = args.patience or (600.0 if args.smoke else 120.0)
    before = args.output / "gpu_check.json"
    if before.exists():  # what was measured stays
        before.rename(before.with_name(f"gpu_check-{before.stat().st_mtime_ns}.json"))
    report = Report(args.output, args.budget, args.smoke, args.only)
    report.save()
    command = [sys.executable, __file__, "--output", str(args.output), "--budget", str(args.budget), "--start"]
    command += [str(report.start), "--only", *args.only, *["--smoke"] * args.smoke]
    command += ["--implementation", args.implementation] if args.implementation else []
    for together in (("correctness", "repeatability", "ceilings", "timings"), ("end_to_end",), ("sweep",)):
        names = [name for name in together if name in args.only]
        if names == ["end_to_end"]:  # its processes are watched one by one
            if not report.device and watchdog.watched([*command, "--sections"], report.file, patience) == NO_GPU:
                return NO_GPU
            report.resume()
            end_to_end(report, (args.implementation or "interpret",), args.layers, args.peers)
        elif supervise(report, command, names, patience) == NO_GPU:
            return NO_GPU
    print(
        f"{len(report.rows)} rows in {report.file}; failures: {report.failures or 'none'}; "
        f"not reached in {args.budget:.0f} s: {len(report.not_reached)}"
    )
    return int(bool(report.failures))


if __name__ == "__main__":
    sys.exit(main())
