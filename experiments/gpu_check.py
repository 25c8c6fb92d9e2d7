"""One command for a GPU: are the kernels right, repeatable, and how near do they come to what the machine can do?

    python experiments/gpu_check.py                  # on a GPU, unattended; --budget SECONDS stops it early
    python experiments/gpu_check.py --smoke          # the same code, tiny and interpreted, on CPU
    python experiments/gpu_check.py --only sweep     # just the block sizes, to tune `block_sizes` in pallas_kernels

Sections run in order of value and each is guarded: whatever stops one leaves the others, and `gpu_check.json` is
written after every row. Times are medians; floors follow from ceilings measured in the same run. Exits 1 on a failure.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.results import device_info
from pallas_kernels import Columns, Softmax, attention, colstats, decode, flash, gpu, pooled_attention
from pallas_kernels import blocks as bl
from pallas_kernels.api import Implementation

TOLERANCE = {"float32": (2e-5, 2e-4), "bfloat16": (1e-2, 2e-3), "float16": (2e-3, 1e-3)}  # of output, of statistics
STATISTICS = {
    "sum p": Columns(),
    "sum p, last 9 rows": Columns(rows=9, group="max"),
    "sum p^2 of group means": Columns(element="p2", group_at="before"),
    "count above 1/visible": Columns(element="above", group=None),
    "sum p without itself": Columns(count_self=False),
}


class Report:
    """Rows of every section, in a file as soon as they are known."""

    def __init__(self, folder: pathlib.Path, budget: float, smoke: bool):
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "gpu_check.json"
        self.stop = time.monotonic() + budget
        self.smoke = smoke
        self.failures: list[str] = []
        self.ceilings: dict[str, float] = {}
        self.rows: list[dict[str, Any]] = []

    def row(self, section: str, name: str, *, ok: bool = True, **values: Any) -> None:
        """Adds a row, prints it and saves all."""
        self.rows.append({"section": section, "name": name, "ok": ok, **values})
        if not ok:
            self.failures.append(f"{section}: {name}")
        shown = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())
        print(f"{'ok  ' if ok else 'FAIL'} {section:12s} {name:56s} {shown}", flush=True)
        data = {"device": device_info(), "smoke": self.smoke, "ceilings": self.ceilings, "rows": self.rows}
        self.file.write_text(json.dumps(data, indent=1) + "\n")

    def timing(self, name: str, run: "Timed", **values: Any) -> None:
        """A row of the section "timings"; a kernel that fails to run is a failure."""
        fraction = {"of_floor": values["floor_ms"] / run.ms} if run.ms and "floor_ms" in values else {}
        error = {"error": run.error} if run.error else {}
        self.row("timings", name, ok=not run.error, ms=run.ms, **values, **fraction, **error)

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.stop


@dataclasses.dataclass(frozen=True)
class Timed:
    """Median milliseconds of a call, or why there are none."""

    ms: float | None
    error: str = ""


def inputs(B: int, N: int, K: int, T: int, cached: int, H: int, dtype: str, rng: Any) -> tuple[jax.Array, ...]:
    """Fresh queries behind a cache in random order with dead slots; the last sequence is padded on the left."""
    S = cached + T
    q, k, v = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((B, N, T, H), (B, K, S, H), (B, K, S, H)))
    pads = np.zeros(B, int)
    pads[-1] = T // 3
    column = np.arange(T)[None] - pads[:, None]
    q_pos = np.where(column >= 0, column + cached, -1)
    old = np.stack([[rng.permutation(cached) for _ in range(K)] for _ in range(B)]).reshape(B, K, cached)
    old = np.where(rng.random(old.shape) < 0.3, -1, old)
    kv_pos = np.concatenate([old, np.broadcast_to(q_pos[:, None], (B, K, T))], axis=-1)
    return q, k, v, jnp.asarray(q_pos, jnp.int32), jnp.asarray(kv_pos, jnp.int32)


def in_float64(f: Callable[..., Any], *args: Any) -> list[np.ndarray]:
    """`f` on the host, in float64: the specification."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        host = [np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x) for x in args]
        return [np.asarray(x) for x in jax.tree.leaves(f(*map(jnp.asarray, host)))]


def compare(report: Report, name: str, found: Any, expected: Sequence[np.ndarray], dtype: str, counts: Sequence[int]):
    """A row for the worst relative error; counts may differ next to their threshold, NaN never passes."""
    errors, ok = [], True
    for i, (x, y) in enumerate(zip(jax.tree.leaves(found), expected, strict=True)):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        finite = np.isfinite(y)
        same = np.array_equal(np.isfinite(x), finite)
        scale = max(float(np.abs(y[finite]).max(initial=0)), 1e-6)
        error = float(np.abs(x[finite] - y[finite]).max(initial=0)) / scale if same else float("nan")
        if i in counts:
            error = float((x != y).mean())
            ok &= error < 0.02
        else:
            ok &= error < TOLERANCE[dtype][min(i, 1)]
        errors.append(error)
    report.row("correctness", name, ok=bool(ok), errors=[float(f"{e:.1e}") for e in errors])


def correctness(report: Report, implementations: Sequence[Implementation]) -> None:
    """Every kernel on fresh data against float64."""
    rng = np.random.default_rng(time.time_ns())
    small, large = [(2, 4, 2, 37, 6, 64)], [(2, 8, 2, 300, 0, 128), (2, 8, 2, 200, 130, 64), (1, 6, 1, 96, 237, 80)]
    large += [(1, 4, 4, 130, 0, 256), (1, 8, 2, 500, 0, 96)]
    columns = tuple(STATISTICS.values())
    counts = [2 + i for i, c in enumerate(columns) if c.element == "above"]
    for shape, dtype in itertools.product(
        small if report.smoke else large, ("float32",) if report.smoke else tuple(TOLERANCE)
    ):
        arrays = inputs(*shape, dtype, rng)
        B, N, K, _, cached, H = shape
        one = inputs(B, N, K, 1, max(cached, 333), H, dtype, rng)
        q, k, v, q_pos, kv_pos = one
        owner = jnp.asarray(rng.integers(-1, K, k.shape[:1] + k.shape[2:3]), jnp.int32)
        pool = q, k[:, 0], v[:, 0], owner, q_pos, kv_pos[:, 0]
        noisy = *arrays, jnp.arange(B, dtype=jnp.uint32) + 7

        def with_noise(how: Implementation, *x: jax.Array) -> Any:
            own = Columns(softmax=Softmax(seed=x[-1], noise="gumbel"))
            return attention(*x[:-1], columns=(*columns, own), implementation=how)

        def plain(how: Implementation, *x: jax.Array) -> Any:
            return attention(*x, columns=columns, implementation=how)

        def pooled(how: Implementation, *x: jax.Array, K: int = K) -> Any:
            return pooled_attention(*x, columns=columns, num_kv_heads=K, implementation=how)

        for name, f, args in (("attention", with_noise, noisy), ("decode", plain, one), ("pool decode", pooled, pool)):
            expected = in_float64(functools.partial(f, "reference"), *args)
            for how in implementations:
                found = jax.jit(functools.partial(f, how))(*args)
                label = " ".join(f"{letter}={n}" for letter, n in zip("BNKTCH", shape, strict=True))
                compare(report, f"{how} {name} {label} {dtype}", found, expected, dtype, counts)


def repeatability(report: Report, implementations: Sequence[Implementation]) -> None:
    """Bitwise the same, again and again: an error that moves is a race."""
    rng = np.random.default_rng(time.time_ns())
    arrays = inputs(1, 8, 2, 40 if report.smoke else 2048, 0, 64, "float32" if report.smoke else "bfloat16", rng)
    for how in implementations:
        f = jax.jit(functools.partial(attention, columns=tuple(STATISTICS.values()), implementation=how))
        first = [np.asarray(x) for x in jax.tree.leaves(f(*arrays))]
        same = all(
            np.array_equal(x, np.asarray(y), equal_nan=True)
            for _ in range(2 if report.smoke else 20)
            for x, y in zip(first, jax.tree.leaves(f(*arrays)), strict=True)
        )
        report.row("repeatable", f"{how} attention and statistics", ok=same)


def timed(f: Callable[..., Any], *args: Any, smoke: bool, launches: int = 10, samples: int = 15) -> Timed:
    """Median time of a compiled call; many launches a sample hide the dispatch."""
    launches, samples = (1, 2) if smoke else (launches, samples)
    f = jax.jit(f)
    try:
        for _ in range(3):
            jax.block_until_ready(f(*args))
        seconds = []
        for _ in range(samples):
            start = time.perf_counter()
            jax.block_until_ready([f(*args) for _ in range(launches)][-1])
            seconds.append((time.perf_counter() - start) / launches)
    except Exception as error:  # a kernel that does not run is a row of the report
        return Timed(None, f"{type(error).__name__}: {str(error)[:200]}")
    return Timed(float(np.median(seconds)) * 1e3)


def ceilings(report: Report, implementations: Sequence[Implementation]) -> None:
    """What this machine does best: a large matrix product and a large copy."""
    del implementations
    n = 256 if report.smoke else 8192
    a = jnp.ones((n, n), jnp.bfloat16)
    gemm = timed(lambda a: a @ a, a, smoke=report.smoke)
    x = jnp.ones((1 << (12 if report.smoke else 28),), jnp.float32)
    copy = timed(lambda x: x + 1, x, smoke=report.smoke)
    if gemm.ms is None or copy.ms is None:
        raise RuntimeError(f"no ceilings: {gemm.error} {copy.error}")
    report.ceilings = {"gemm_tflops": 2e-9 * n**3 / gemm.ms, "copy_gb_s": 2e-6 * x.nbytes / copy.ms}
    report.row("ceilings", "bf16 product, float32 copy", ok=True, **report.ceilings)


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


def statistic(c: Columns, spec: bl.Logits, backend: str, *arrays: jax.Array) -> jax.Array:
    """One statistic alone, given the logsumexp."""
    q, k, lse, q_pos, kv_pos = arrays
    return gpu.column(c, q, k, (q, lse, None), q_pos, kv_pos, logits=spec, backend=backend)


def timings(report: Report, implementations: Sequence[Implementation]) -> None:
    """Every kernel with its floor, beside cuDNN and the quadratic formulation."""
    smoke = report.smoke
    N, K, sizes = (2, 1, [(64, 64)]) if smoke else (32, 8, [(8192, 128), (32768, 128), (4096, 128), (8192, 64)])
    how = implementations[0]
    for n, H in sizes:
        arrays = _causal(n, N, K, H)
        q, k, v, q_pos, kv_pos = arrays
        entries = N * n * (n + 1) / 2
        product_ms = 2e-9 * H * entries / report.ceilings["gemm_tflops"]
        label = {"n": n, "H": H}
        if not smoke:
            report.timing("cudnn forward", timed(cudnn, *arrays, smoke=smoke), floor_ms=2 * product_ms, **label)
        spec = bl.Logits(H**-0.5)
        run, lse = Timed(None), None
        for backend in implementations:
            forward = functools.partial(gpu.forward, spec=spec, with_logits=False, backend=backend)
            took = timed(forward, *arrays, smoke=smoke)
            report.timing(f"{backend} forward with logsumexp", took, floor_ms=2 * product_ms, **label)
            if took.ms is not None and (run.ms is None or took.ms < run.ms):
                run, lse = took, jax.jit(forward)(*arrays)[1]
        if run.ms is None or lse is None:
            continue
        for backend in implementations:
            for name, c in {**STATISTICS, "sum p, last 64 rows": Columns(rows=min(64, n))}.items():
                rows = min(c.rows or n, n)
                share = rows * (2 * n - rows + 1) / (n * (n + 1))
                stat = functools.partial(statistic, c, spec, backend)
                try:
                    jax.eval_shape(stat, q, k, lse, q_pos, kv_pos)
                except NotImplementedError as reason:
                    print(f"     {backend} {name}: {reason}")
                    continue
                took = timed(stat, q, k, lse, q_pos, kv_pos, smoke=smoke)
                of_forward = None if took.ms is None else took.ms / run.ms
                label_ = label | {"floor_ms": share * product_ms, "of_forward": of_forward}
                report.timing(f"{backend} {name}", took, **label_)
        if n <= 8192:
            square = lambda *x: attention(*x, columns=(Columns(),), implementation="reference").columns
            report.timing("quadratic XLA: attention, sum p", timed(square, *arrays, smoke=smoke, launches=2), **label)
        blockwise = lambda *x: jax.tree.leaves(attention(*x, columns=(Columns(),), implementation="xla"))
        report.timing("blockwise XLA: attention, sum p", timed(blockwise, *arrays, smoke=smoke, launches=1), **label)
        copy_ms = 1e-6 * (k.nbytes + v.nbytes) / report.ceilings["copy_gb_s"]
        one = q[:, :, -1:], k, v, q_pos[:, -1:], kv_pos
        flat = lambda x, n=n: x.reshape(1, K * n, *x.shape[3:])
        owner = jnp.repeat(jnp.arange(K, dtype=jnp.int32), n)[None]
        pool = one[0], flat(k), flat(v), owner, one[3], flat(kv_pos)
        for columns, what in (((), ""), ((Columns(),), " with its row")):
            f = lambda *x, c=columns: jax.tree.leaves(attention(*x, columns=c, implementation=how))
            report.timing(f"decode{what}", timed(f, *one, smoke=smoke), floor_ms=copy_ms, **label)
            f = lambda *x, c=columns: jax.tree.leaves(
                pooled_attention(*x, columns=c, num_kv_heads=K, implementation=how)
            )
            report.timing(f"pool decode{what}", timed(f, *pool, smoke=smoke), floor_ms=copy_ms, **label)


def sweep(report: Report, implementations: Sequence[Implementation]) -> None:
    """Block sizes of the kernels beside the shipped ones."""
    smoke, interpret = report.smoke, implementations[0] == "interpret"
    n, H = (40, 64) if smoke else (8192, 128)
    N, K = (2, 1) if smoke else (32, 8)
    q, k, v, q_pos, kv_pos = _causal(n, N, K, H)
    spec, what = bl.Logits(H**-0.5), colstats.Pass(("p",), "sum")
    grid = [(16, 16, 4, 2)] if smoke else itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
    lse = jax.jit(lambda q, k, a, b: flash.flash_attention(q, k, None, a, b, spec=spec, interpret=interpret)[1])(
        q, k, q_pos, kv_pos
    )
    for numbers in grid:
        if report.late:
            return
        sizes = bl.BlockSizes(*numbers)
        kw = {"spec": spec, "sizes": sizes, "interpret": interpret}
        runs = {
            "flash": timed(lambda *x, kw=kw: flash.flash_attention(*x, **kw), q, k, v, q_pos, kv_pos, smoke=smoke),
            "colstats": timed(
                lambda *x, kw=kw: colstats.attention_colstats(*x, what=what, **kw),
                q,
                k,
                lse,
                q_pos,
                kv_pos,
                smoke=smoke,
            ),
        }
        for name, run in runs.items():
            report.row("sweep", f"{name} {numbers}", ms=run.ms, error=run.error)
    for block, warps, stages, split in (
        [(16, 4, 2, 32)] if smoke else itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4), (256, 512, 1024, 2048))
    ):
        if report.late:
            return
        sizes = bl.BlockSizes(16, block, warps, stages, split)
        f = lambda *x, sizes=sizes: decode.decode_attention(*x, spec=spec, sizes=sizes, interpret=interpret)[:2]
        run = timed(f, q[:, :, -1:], k, v, q_pos[:, -1:], kv_pos, smoke=smoke)
        report.row("sweep", f"decode {(block, warps, stages, split)}", ms=run.ms, error=run.error)


def end_to_end(report: Report, implementations: Sequence[Implementation]) -> None:
    """Prefill and decode of a random model shaped like Llama 3 8B, a process for each method: peaks do not mix."""
    for method, layers in itertools.product(("snapkv", "h2o", "full"), (2,) if report.smoke else (32, 8)):
        if report.late:
            return
        done = any(r["name"].startswith(method) and r["ok"] for r in report.rows if r["section"] == "end_to_end")
        if done:  # fewer layers only where all of them did not fit
            continue
        command = [sys.executable, __file__, "--worker", method, "--layers", str(layers)]
        command += ["--smoke", "--implementation", implementations[0]] if report.smoke else []
        left = max(60.0, report.stop - time.monotonic())
        try:
            run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left)
        except subprocess.TimeoutExpired:
            report.row("end_to_end", f"{method}, {layers} layers", ok=False, error=f"no result within {left:.0f} s")
            continue
        if run.returncode:
            report.row("end_to_end", f"{method}, {layers} layers", ok=False, error=run.stderr[-400:])
        else:
            report.row("end_to_end", f"{method}, {layers} layers", **json.loads(run.stdout.splitlines()[-1]))


def measure_model(method: str, layers: int, smoke: bool) -> dict[str, Any]:
    """Seconds, tokens a second and peak bytes of one method."""
    import kvjax
    import models
    from kvjax import methods

    prompt, steps, budget = (48, 4, 40) if smoke else (32768, 256, 2048)
    sizes = (64, 32, 48, 4, 2, 16) if smoke else (128256, 4096, 14336, 32, 8, 128)
    V, D, F, N, K, H = sizes
    config = models.ModelConfig(V, D, F, layers, N, K, H, dtype="float32" if smoke else "bfloat16", max_position=65536)
    model = models.LanguageModel(config)
    params = jax.jit(model.init)(jax.random.key(0))
    policy = methods.full() if method == "full" else getattr(methods, method)(budget)
    tokens = jax.random.randint(jax.random.key(1), (1, prompt), 0, V, jnp.int32)
    plan = kvjax.make_plan(config, policy, prompt_len=prompt, max_new_tokens=steps + 1)
    prefill = jax.jit(lambda params, tokens: kvjax.prefill(model, params, tokens, plan))

    def decode_all(params, token, state):
        def step(carry, _):
            logits, state = kvjax.decode_step(model, params, *carry)
            return (logits.argmax(-1).astype(jnp.int32), state), None

        return jax.lax.scan(step, (token, state), length=steps)[0][0]

    compiled = prefill.lower(params, tokens).compile()
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        logits, state = jax.block_until_ready(compiled(params, tokens))
        seconds.append(time.perf_counter() - start)
    run = jax.jit(decode_all)
    token = logits.argmax(-1).astype(jnp.int32)
    jax.block_until_ready(run(params, token, state))
    start = time.perf_counter()
    jax.block_until_ready(run(params, token, state))
    decode_seconds = time.perf_counter() - start
    stats = jax.devices()[0].memory_stats() or {}
    memory = compiled.memory_analysis()
    return {
        "prompt": prompt,
        "budget": budget if method != "full" else prompt,
        "prefill_s": min(seconds),
        "prefill_tokens_s": prompt / min(seconds),
        "decode_tokens_s": steps / decode_seconds,
        "prefill_temporary_bytes": memory.temp_size_in_bytes if memory is not None else None,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "parameter_bytes": sum(x.nbytes for x in jax.tree.leaves(params)),
    }


SECTIONS = {f.__name__: f for f in (correctness, repeatability, ceilings, timings, end_to_end, sweep)}


def main() -> int:
    """Runs the sections."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, interpreted kernels, any device")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results/gpu_check"))
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no section is started")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=32, help=argparse.SUPPRESS)
    parser.add_argument("--implementation", choices=("interpret", "triton", "mosaic_gpu"), help="instead of all")
    args = parser.parse_args()
    if args.worker:
        if args.implementation:
            from pallas_kernels import use

            with use(args.implementation):
                print(json.dumps(measure_model(args.worker, args.layers, args.smoke)))
        else:
            print(json.dumps(measure_model(args.worker, args.layers, args.smoke)))
        return 0
    if not args.smoke and jax.default_backend() != "gpu":
        print(f"this machine has no GPU (backend {jax.default_backend()}); --smoke runs the same code on CPU")
        return 2
    hopper = not args.smoke and getattr(jax.devices()[0], "compute_capability", "").startswith("9.")
    implementations: tuple[Implementation, ...] = (
        ("interpret",) if args.smoke else ("triton", "mosaic_gpu") if hopper else ("triton",)
    )
    implementations = (args.implementation,) if args.implementation else implementations
    report = Report(args.out, args.budget, args.smoke)
    if {"timings"} & set(args.only) and "ceilings" not in args.only:
        args.only.append("ceilings")
    for name, section in SECTIONS.items():
        if name not in args.only:
            continue
        if report.late:
            report.row(name, "not started", ok=False, error=f"the budget of {args.budget:.0f} s is spent")
            continue
        try:
            section(report, implementations)
        except Exception as error:  # the finished rows stay, the other sections run
            traceback.print_exc()
            report.row(name, "stopped", ok=False, error=f"{type(error).__name__}: {str(error)[:300]}")
    print(f"{len(report.rows)} rows in {report.file}; failures: {report.failures or 'none'}")
    return int(bool(report.failures))


if __name__ == "__main__":
    sys.exit(main())
