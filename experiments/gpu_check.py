"""One command for a GPU: are the kernels right, repeatable, and how near do they come to what the machine can do?

    python experiments/gpu_check.py                        # on a GPU, unattended, in --budget SECONDS (540)
    python experiments/gpu_check.py --budget 2400          # everything, the whole sweep and all 32 layers included
    python experiments/gpu_check.py --only end_to_end      # one section gets all of the time
    python experiments/gpu_check.py --only sweep           # just the block sizes, to tune those in pallas_kernels
    python experiments/gpu_check.py --only end_to_end --peers --layers 8    # a table beside transformers and kvpress
    python experiments/gpu_check.py --smoke                # the same code, tiny and interpreted, on CPU

Sections run in order of value, each within its share of the time, in processes of their own: one that crashes, loses
its GPU context or shows no sign of life for --patience seconds is killed, what it was at is a row that failed, and
another goes on behind it. `gpu_check.json` is written after every row; it names the implementation that served a row,
and what was not reached. Times are medians; floors follow from ceilings measured in the same run. Exits 1 on a failure.
"""

import collections
import functools
import importlib.util
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others may share this GPU

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.configs.experiment import check_distinct, check_whole
from kvjax.experiments.core.command import script
from kvjax.experiments.core.provenance import device_info, environment
from kvjax.experiments.gpu import watchdog
from kvjax.experiments.gpu.correct import STATISTICS, correctness, repeatability
from kvjax.experiments.gpu.gpu_report import POISONED, Report, timed
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
BESIDE_PEERS = ("full", "snapkv", "h2o", "ada_snapkv", "streaming_llm", "tova")
PRESSES = ("transformers", "SnapKVPress", "AdaKVPress", "StreamingLLMPress", "TOVAPress")
LEAST_SECONDS = 15.0  # with which a process of them begins
MOST_WEIGHTS = 4096  # tokens of a prompt up to which kvpress's H2O, which holds all weights of a layer, is tried
SETS = 8  # of arrays for a call that takes less time than its dispatch
BATCHES = 8, 32  # of decode kernels, beside one sequence


def ceilings(report: Report, implementations: Sequence[Implementation]) -> None:
    """What this machine does best: a large matrix product and a large copy."""
    del implementations
    n = 256 if report.smoke else 8192
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)  # ones would multiply faster than real numbers do
    gemm = timed(lambda a: a @ a, a, smoke=report.smoke)
    x = jax.random.normal(jax.random.key(1), (1 << (12 if report.smoke else 28),))
    copy = timed(lambda x: x + 1, x, smoke=report.smoke)
    if errors := [run["error"] for run in (gemm, copy) if "error" in run]:
        raise RuntimeError(f"no ceilings: {' '.join(errors)}")
    report.ceilings = {"gemm_tflops": 2e-9 * n**3 / gemm["ms"], "copy_gb_s": 2e-6 * x.nbytes / copy["ms"]}
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
    N, K, sizes = (2, 1, [(64, 64)]) if smoke else (32, 8, [(32768, 128), (8192, 128), (4096, 128), (8192, 64)])
    for n, H in sizes:
        if not report.reaches("timings", f"n={n} H={H}", again=True):
            continue
        run = functools.partial(_timing, report, {"n": n, "H": H})
        arrays = q, k, v, q_pos, kv_pos = _causal(n, N, K, H)
        product_ms = 1e-9 * H * N * n * (n + 1) / report.ceilings["gemm_tflops"]
        if not smoke:
            run("cudnn forward", cudnn, *arrays, served_by="cudnn", floor_ms=2 * product_ms)
        spec, ran = bl.Spec(H**-0.5), {}
        for how in implementations:
            f = functools.partial(gpu.forward, spec=spec, with_logits=False, backend=how)
            of = {"served_by": how, "floor_ms": 2 * product_ms}
            ms = run(f"{how} forward with logsumexp", f, *arrays, again=True, **of)
            ran |= {} if ms is None else {ms: f}
        if not ran:
            continue
        fastest = min(ran)
        given = q, k, jax.jit(ran[fastest])(*arrays)[1], q_pos, kv_pos
        statistics = {**STATISTICS, "sum p, last 64 rows": Columns(rows=min(64, n))}
        for how, (name, c) in itertools.product(implementations, statistics.items()):
            rows = min(c.rows or n, n)
            share = rows * (2 * n - rows + 1) / (n * (n + 1))

            def alone(q, k, lse, q_pos, kv_pos, c: Columns = c, how: str = how, spec: bl.Spec = spec) -> jax.Array:
                return gpu.column(c, q, k, (q, lse, None), q_pos, kv_pos, logits=spec, backend=how)

            try:
                jax.eval_shape(alone, *given)
            except NotImplementedError as reason:
                report.elsewhere("timings", f"{how} {name} n={n} H={H}", str(reason))
                continue
            of = {"floor_ms": share * product_ms, "forward_ms": fastest}
            run(f"{how} {name}", alone, *given, served_by=how, sets=SETS if rows < n else 1, **of)
        one = q[:, :, -1:], k, v, q_pos[:, -1:], kv_pos
        batches = (1, *BATCHES) if (n, H) == (32768, 128) else (1,)
        for batch, (columns, what) in itertools.product(batches, (((), ""), ((Columns(),), " with its row"))):
            of = {"floor_ms": 1e-6 * batch * (k.nbytes + v.nbytes) / report.ceilings["copy_gb_s"]}
            many, what = [jnp.repeat(x, batch, axis=0) for x in one], what + f" x {batch}" * (batch > 1)
            for how in implementations:
                f = functools.partial(attention, columns=columns, implementation=how)
                run(f"{how} decode{what}", f, *many, sets=max(SETS // batch, 1), **of)
            f = functools.partial(pooled_attention, columns=columns, num_kv_heads=K, implementation=implementations[0])
            run(f"{implementations[0]} pool decode{what}", f, *_pooled(many), sets=max(SETS // batch, 1), **of)
        xla = functools.partial(attention, columns=(Columns(),))
        if n <= 4096:  # the memory of longer ones would stay with this process, and the models need it
            square = lambda *x, f=xla: f(*x, implementation="reference").columns
            run("quadratic XLA: attention, sum p", square, *arrays, launches=2, served_by="reference")
        blockwise = functools.partial(xla, implementation="xla")
        run("blockwise XLA: attention, sum p", blockwise, *arrays, launches=1, served_by="xla")


def _timing(
    report: Report,
    of: dict[str, int],
    name: str,
    f: Callable[..., Any],
    *args: Any,
    again: bool = False,
    launches: int = 10,
    sets: int = 1,
    **known: Any,
) -> float | None:
    """Milliseconds of a call whose row has them in parts of a floor and of a forward pass; one that stops has failed.

    Args:
      report: gets the row.
      of: what the row says besides.
      name: of the row.
      f, args, launches, sets: what is called, and how it is timed.
      again: as in `Report.reaches`.
      known: what serves the call, `floor_ms` and `forward_ms`, as far as they are there.
    """
    if not report.reaches("timings", f"{name} n={of['n']} H={of['H']}", again=again):
        return None
    took, forward_ms = timed(f, *args, smoke=report.smoke, launches=launches, sets=sets), known.pop("forward_ms", None)
    if (ms := took["ms"]) is not None:
        known |= {"of_floor": known["floor_ms"] / ms} if "floor_ms" in known else {}
        known |= {"of_forward": ms / forward_ms} if forward_ms is not None else {}
    report.row("timings", name, ok="error" not in took, **took | known | of)
    return ms


def _pooled(one: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """A query row of each sequence and its cache as a flat pool, in order of heads."""
    q, k, v, q_pos, kv_pos = one
    flat = lambda x: x.reshape(len(q), -1, *x.shape[3:])
    owner = jnp.tile(jnp.repeat(jnp.arange(k.shape[1], dtype=jnp.int32), k.shape[2]), (len(q), 1))
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
    cases = [("bfloat16", 128), ("bfloat16", 64), ("bfloat16", 256), ("float16", 128), ("float32", 128)]
    for dtype, H in [("float32", 64)] if report.smoke else cases:
        for name, f, args, values in trials(dtype, H, report.smoke, implementations):
            numbers = f"{name} {dtype} H={H} {values.pop('numbers')}"
            if report.reaches("sweep", numbers):
                took = timed(f, *args, smoke=report.smoke, sets=4 if "decode" in name else 1)
                report.row("sweep", numbers, **took | values, dtype=dtype, H=H)


def trials(
    dtype: str, H: int, smoke: bool, implementations: Sequence[Implementation]
) -> Iterator[tuple[str, Callable[..., Any], tuple[jax.Array, ...], dict[str, Any]]]:
    """(kernel, call, its arrays, what the row says of it, its name's `numbers` among it)."""
    interpret = implementations[0] == "interpret"
    N, K = (2, 1) if smoke else (32, 8)
    prompt, slots = (40, 70) if smoke else (8192, 32768)
    how, what = {"spec": bl.Spec(H**-0.5)}, colstats.Pass(("p",), "sum")
    q, k, v, q_pos, kv_pos = _causal(prompt, N, K, H, dtype)
    long = _causal(slots, N, K, H, dtype)
    one = long[0][:, :, -1:], long[1], long[2], long[3][:, -1:], long[4]
    some_lse = jnp.full((1, N, prompt), float(np.log(prompt)), jnp.float32)  # its values take no time
    of_columns = q, k, some_lse, q_pos, kv_pos
    kernels = {
        "colstats": (colstats.attention_colstats, {"what": what}, of_columns, colstats.block_sizes(dtype, H, prompt)),
        "flash": (flash.flash_attention, {}, (q, k, v, q_pos, kv_pos), flash.block_sizes(dtype, H, prompt)),
        "decode": (decode.decode_attention, {}, one, decode.block_sizes(dtype, H, K, slots)),
        "pool decode": (
            decode.pooled_decode_attention,
            {"num_kv_heads": K},
            _pooled(one),
            decode.block_sizes(dtype, H, 1, K * slots, max(16, N)),
        ),
    }
    for name, (kernel, options, given, shipped) in kernels.items():
        for sizes in dict.fromkeys((shipped, *candidates(name, dtype, H, smoke))):
            f = functools.partial(kernel, **how, **options, sizes=sizes, interpret=interpret)
            said = {"served_by": "interpret" if interpret else "triton", "shipped": sizes == shipped}
            yield name, f, given, said | vars(sizes) | {"numbers": tuple(vars(sizes).values())}
    if "mosaic_gpu" in implementations and dtype != "float32" and H in (64, 128):
        of_mosaic = {"colstats": mosaic_colstats.attention_colstats, "flash": mosaic_flash.flash_attention}
        for (name, kernel), stages in itertools.product(of_mosaic.items(), (2, 3, 4)):
            _, options, given, _ = kernels[name]
            said = {"served_by": "mosaic_gpu", "num_stages": stages, "numbers": f"stages={stages}"}
            yield f"mosaic {name}", functools.partial(kernel, **how, **options, stages=stages), given, said


def end_to_end(report: Report, implementations: Sequence[Implementation], depths: Sequence[int] = (8, 32)) -> None:
    """Prefill and decode of a random model shaped like Llama 3 8B, a process for each method: peaks do not mix.

    First the least of its `depths` for every method, then the next while twice the time that the first took is left: a
    row of few layers is worth more than none of many.
    """
    worker = str(pathlib.Path(__file__).with_name("gpu") / "model.py")
    took: dict[str, float] = {}
    depths = (2,) if report.smoke else sorted(depths)
    for layers, (i, method) in itertools.product(depths, enumerate(OURS)):
        name, few = f"{method}, {layers} layers", layers == depths[0]
        if not few and method not in took:
            continue  # its few layers have failed
        if not report.reaches("end_to_end", name, needs=0.0 if few else 2 * took[method]):
            continue
        left = report.seconds_left("end_to_end")
        limit = left / (len(OURS) - i) if few else left
        command = [sys.executable, worker, method, "--layers", str(layers)]
        if report.smoke:
            command += ["--smoke", "--prompt", "48", "--steps", "4", "--budget", "40"]
            command += ["--implementation", implementations[0]]
        started = time.monotonic()
        run = watchdog.captured(command, limit)
        if run is None:
            report.row("end_to_end", name, ok=not few, finished=False, error=f"killed after {limit:.0f} s")
        elif run.returncode == 0:
            took[method] = time.monotonic() - started
            measured = json.loads(run.stdout.splitlines()[-1])
            report.row("end_to_end", name, finished=True, **measured, process_s=took[method])
        else:
            fits = not watchdog.too_large(run.stderr)
            report.row("end_to_end", name, ok=not (fits or few), finished=False, reason=run.stderr[-400:])


def beside_peers(
    report: Report,
    implementation: Implementation,
    sizes: tuple[Sequence[int], Sequence[int], Sequence[int]],
    packages: pathlib.Path | None,
    patience: float,
) -> None:
    """The same random model in kvjax, transformers and kvpress, methods at a quarter of the prompt.

    One sequence first, longer prompts first; then more of them, shorter prompts first. One process a library measures
    its methods one after another; what kills it is the row of the method that it was at, and another process measures
    the rest. Methods are those of each library by its own defaults: kvpress evicts after the prompt alone, and its
    AdaKVPress masks what it evicts. Arguments are those of `main`; sizes are layers, prompts and batches.
    """
    root = pathlib.Path(__file__).resolve().parents[1]
    libraries: dict[str, Sequence[str]] = {"kvjax": BESIDE_PEERS}
    if packages is not None or importlib.util.find_spec("kvpress"):
        libraries["kvpress"] = PRESSES
    if importlib.util.find_spec("torch"):
        libraries["transformers"] = "transformers", "compiled"

    def place(run: tuple[Any, ...]) -> tuple[Any, ...]:
        library, layers, prompt, batch = run
        return layers, library == "transformers", batch, prompt if batch > 1 else -prompt

    for library, layers, prompt, batch in sorted(itertools.product(libraries, *sizes), key=place):
        presses = library == "kvpress"
        methods = [*libraries[library], *["ObservedAttentionPress"] * (presses and prompt <= MOST_WEIGHTS)]
        folders = packages.resolve() if packages and presses else "", root, os.environ.get("PYTHONPATH")
        path = os.pathsep.join(map(str, filter(None, folders)))
        steps, worker = 12 if report.smoke else 64, "model" if library == "kvjax" else "peer"
        command = [sys.executable, "-m", f"experiments.gpu.{worker}", *["--smoke"] * report.smoke]
        command += ["--implementation", implementation] if report.smoke and library == "kvjax" else []
        command += f"--layers {layers} --prompt {prompt} --batch {batch} --steps {steps} --budget 0.25".split()
        how = {"patience": patience, "environment": {**os.environ, "PYTHONPATH": path}}
        name = f"{library} {{}}, {prompt} tokens x {batch}, {layers} layers"
        _rows(report, name, methods, functools.partial(watchdog.told, command, **how))


def _rows(report: Report, name: str, methods: Sequence[str], told: Callable[..., Iterator[dict[str, Any]]]) -> None:
    """Rows of a library's methods, from as many processes as it takes.

    Args:
      report: gets the rows as they come.
      name: of a row, with `{}` for its method.
      methods: in their order.
      told: `watchdog.told` of those that are left and the seconds that they have.
    """
    left = [*methods]
    while left:
        if not report.reaches("end_to_end", name.format(left[0]), needs=0.0 if report.smoke else LEAST_SECONDS):
            left.pop(0)
            continue
        for found in told(left, report.seconds_left("end_to_end")):
            left.remove(method := found.pop("method"))
            report.row("end_to_end", name.format(method), **found)


NO_GPU = 2  # an exit code
MOST_INTERRUPTIONS = 3  # of a section: then the next one runs
SECTIONS = {f.__name__: f for f in (correctness, repeatability, ceilings, timings, end_to_end, sweep)}
Section = Literal["correctness", "repeatability", "ceilings", "timings", "end_to_end", "sweep"]


def run_sections(
    report: Report, names: Sequence[str], implementation: Implementation | None, command: Sequence[str]
) -> int:
    """Runs sections in this process, behind what other processes have done. Without any it looks at the device.

    Args:
      report: whose file other processes have written.
      names: the sections.
      implementation: whose kernels run; those for the device if None.
      command: what the user called.
    """
    if not report.smoke and jax.default_backend() != "gpu":
        print(f"this machine has no GPU (backend {jax.default_backend()}); --smoke runs the same code on CPU")
        return NO_GPU
    report.resume()
    report.made = environment(["python", *command])
    report.device = device_info()
    hopper = not report.smoke and getattr(jax.devices()[0], "compute_capability", "").startswith("9.")
    every: tuple[Implementation, ...] = (
        ("interpret",) if report.smoke else ("triton", "mosaic_gpu") if hopper else ("triton",)
    )
    for name in names:
        if report.reaches(name, "all of it", again=True):
            with report.guarded(name, "stopped"):  # the finished rows stay, the other sections run
                SECTIONS[name](report, (implementation,) if implementation else every)
    report.save()
    return 0


def supervise(report: Report, command: Sequence[str], names: Sequence[str], patience: float) -> int:
    """Runs sections in processes that may crash or hang; what they were at has failed, and another goes on behind it.

    Args:
      report: in whose file they write.
      command: what names are added to.
      names: the sections.
      patience: seconds without a sign of life until a process is killed.

    Returns:
      0, or the exit code that says that there is no GPU.
    """
    left, interruptions = list(names), collections.Counter[str]()
    while left:
        before = len(report.begun)
        code = watchdog.watched([*command, *left], report.file, patience)
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


def main(
    smoke: bool = False,
    output: pathlib.Path = pathlib.Path("results/gpu_check"),
    budget: float = 540.0,
    patience: float | None = None,
    only: tuple[Section, ...] = get_args(Section),
    layers: tuple[int, ...] = (8, 32),
    peers: bool = False,
    peers_path: pathlib.Path | None = None,
    prompts: tuple[int, ...] = (32768, 4096),
    batches: tuple[int, ...] = (1, 8),
    implementation: Literal["interpret", "triton", "mosaic_gpu"] | None = None,
) -> int:
    """Runs the sections.

    Args:
      smoke: tiny shapes, interpreted kernels, any device.
      output: where results go.
      budget: seconds for all sections together.
      patience: seconds without a sign of life until a process is killed; 120 if None, 600 of a smoke run.
      only: sections that run.
      layers: of the models of end_to_end.
      peers: end_to_end is a table beside transformers and kvpress; theirs needs PyTorch.
      peers_path: a folder of packages, kvpress and the transformers that it wants, which its processes alone see.
      prompts, batches: tokens of a sequence and sequences of that table.
      implementation: instead of all.
    """
    check_distinct("only", only)
    check_whole(1, layers=layers, prompts=prompts, batches=batches)
    if budget < 0:
        raise ValueError(f"--budget {budget:g} must not be negative")
    needed = (*only, "ceilings") if "timings" in only else only
    report = Report(output, budget, smoke, needed)
    watchdog.end_with_children()
    patience = patience or (600.0 if smoke else 120.0)
    if report.file.exists():  # what was measured stays
        report.file.rename(output / f"gpu_check-{report.file.stat().st_mtime_ns}.json")
    report.save()
    given = f"Report(pathlib.Path({str(output)!r}), float('{budget}'), {smoke}, {needed}, {report.start})"
    code = f"sys.exit(run_sections({given}, sys.argv[1:], {implementation!r}, {sys.argv}))"
    code = f"import pathlib, sys; from kvjax.experiments.gpu_check import Report, run_sections; {code}"
    command = [sys.executable, "-c", code]
    for together in (("correctness", "repeatability", "ceilings", "timings"), ("end_to_end",), ("sweep",)):
        names = [name for name in together if name in needed]
        if names == ["end_to_end"]:  # its processes are watched one by one
            if not report.device and watchdog.watched(command, report.file, patience) == NO_GPU:
                return NO_GPU
            report.resume()
            if not peers:
                end_to_end(report, (implementation or "interpret",), layers)
                continue
            sizes = ((2,), (160,), (1, 2)) if smoke else (layers, prompts, batches)
            beside_peers(report, implementation or "interpret", sizes, peers_path, patience)
        elif supervise(report, command, names, patience) == NO_GPU:
            return NO_GPU
    print(
        f"{len(report.rows)} rows in {report.file}; failures: {report.failures or 'none'}; "
        f"not reached in {budget:.0f} s: {len(report.not_reached)}"
    )
    return int(bool(report.failures))


if __name__ == "__main__":
    sys.exit(script(main))
