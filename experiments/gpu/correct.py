"""What `gpu_check.py` asks of every kernel first: is it right, against float64, and repeatable?"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.experiments.gpu.gpu_report import Report, served_by
from kvjax.pallas_kernels import Columns, Logits, Softmax, attention, pooled_attention
from kvjax.pallas_kernels.api import Implementation

TOLERANCE = {"bfloat16": (1e-2, 2e-3), "float16": (2e-3, 1e-3), "float32": (2e-5, 2e-4)}  # of output, of statistics
STATISTICS = {
    "sum p": Columns(),
    "sum p, last 9 rows": Columns(rows=9, group="max"),
    "sum p^2 of group means": Columns(element="p2", group_at="before"),
    "count above 1/visible": Columns(element="above", group=None),
    "sum p without itself": Columns(count_self=False),
}
COLUMNS = tuple(STATISTICS.values())
Shape = tuple[int, int, int, int, int, int]  # B, N, K, T, cached slots, H
Case = tuple[Shape, str, dict[str, Any]]
SMALL: list[Shape] = [(2, 4, 2, 37, 6, 64)]
SHAPES: list[Shape] = [
    (2, 8, 2, 300, 0, 128),
    (2, 8, 2, 200, 130, 64),
    (1, 6, 1, 96, 237, 80),
    (1, 4, 4, 130, 0, 256),
    (1, 8, 2, 500, 0, 96),
]
OPTIONS: tuple[dict[str, Any], ...] = (
    {"nothing": 2.0},
    {"softcap": 5.0},
    {"window": 50},
    {"softcap": 5.0, "window": 50},
)
"""`Logits` of a case; `nothing` is the mean of what is drawn for each query head."""


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
        wide = lambda x: jnp.asarray(np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype))
        return [np.asarray(x) for x in jax.tree.leaves(f(*jax.tree.map(wide, args)))]


def compare(
    found: Any, expected: Sequence[np.ndarray], dtype: str, columns: Sequence[Columns]
) -> tuple[bool, list[float]]:
    """Whether all is right, and relative errors; counts may differ next to their threshold, NaN never passes."""
    errors, ok = [], True
    for i, (x, y) in enumerate(zip(jax.tree.leaves(found), expected, strict=True)):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        finite = np.isfinite(y)
        same = np.array_equal(np.isfinite(x), finite)
        scale = max(float(np.abs(y[finite]).max(initial=0)), 1e-6)
        error = float(np.abs(x[finite] - y[finite]).max(initial=0)) / scale if same else float("nan")
        if i >= 2 and columns[i - 2].element == "above":
            error = float((~np.isclose(x, y, rtol=1e-4, atol=1e-4)).mean())
            ok &= error < 0.02
        else:
            ok &= error < TOLERANCE[dtype][min(i, 1)]
        errors.append(float(f"{error:.1e}"))
    return bool(ok), errors


def by_each(
    report: Report,
    section: str,
    name: str,
    f: Callable[..., Any],
    args: tuple[Any, ...],
    implementations: Sequence[Implementation],
    check: Callable[[Callable[..., Any]], dict[str, Any]],
) -> None:
    """A row for every implementation that serves a call, of what `check` finds of the compiled call.

    Args:
      report: gets the rows, and says what another implementation serves.
      section, name: of the rows.
      f: the call, of `implementation` and of arrays.
      args: the arrays, and what holds some.
      implementations: in their order.
      check: takes the compiled call; returns the row.
    """
    for how in implementations:
        label, run = f"{how} {name}", functools.partial(f, implementation=how)
        if not report.reaches(section, label):
            continue
        with report.guarded(section, label):
            by = served_by(run, *args)
            if how in by:
                report.row(section, label, served_by="+".join(by), **check(jax.jit(run)))
            else:
                report.elsewhere(section, label, f"served by {'+'.join(by)}")


def single_row(B: int, N: int, K: int, S: int, H: int, dtype: str, rng: Any) -> tuple[Any, Any]:
    """A query row against a cache, and against a pool of as many slots of which some have no owner."""
    one = q, k, v, q_pos, kv_pos = inputs(B, N, K, 1, S, H, dtype, rng)
    owner = jnp.asarray(rng.integers(-1, K, k.shape[:1] + k.shape[2:3]), jnp.int32)
    return one, (q, k[:, 0], v[:, 0], owner, q_pos, kv_pos[:, 0])


def correctness(report: Report, implementations: Sequence[Implementation]) -> None:
    """Every kernel on fresh data against float64."""
    rng = np.random.default_rng(time.time_ns())
    shapes, dtypes = (SMALL, ("float32",)) if report.smoke else (SHAPES, tuple(TOLERANCE))
    plain: list[Case] = [] if report.smoke else list(itertools.product(shapes, dtypes, ({},)))
    options: list[Case] = [(shapes[0], dtypes[0], o) for o in (OPTIONS[-1:] if report.smoke else OPTIONS)]
    first = 2 * len(dtypes)

    def check(
        name: str,
        dtype: str,
        f: Callable[..., Any],
        *args: Any,
        by: Sequence[Implementation] = implementations,
        **options: Any,
    ) -> None:
        call = lambda arrays, columns, bias=None, **how: f(*arrays, columns=columns, bias=bias, **options, **how)
        specification = functools.cache(lambda: in_float64(functools.partial(call, implementation="reference"), *args))

        def row(run: Callable[..., Any]) -> dict[str, Any]:
            ok, errors = compare(run(*args), specification(), dtype, args[1])
            return {"ok": ok, "errors": errors}

        by_each(report, "correctness", name, call, args, by, row)

    def noisy(B: int) -> tuple[Columns, ...]:
        """One more statistic, of a softmax with noise, which is drawn inside the kernels."""
        return (*COLUMNS, Columns(softmax=Softmax(seed=jnp.arange(B, dtype=jnp.uint32) + 7, noise="gumbel")))

    for shape, dtype, o in (*plain[:first], *options, *plain[first:]):
        label = " ".join(f"{letter}={n}" for letter, n in zip("BNKTCH", shape, strict=True)) + f" {dtype}"
        label += "".join(f" {name}={value}" for name, value in o.items())
        if not report.reaches("correctness", label, again=True):
            continue
        B, N, K, T, cached, H = shape
        drawn = jnp.asarray(rng.normal(o["nothing"], 1.0, N), jnp.float32) if "nothing" in o else None
        logits = dataclasses.replace(Logits(**{k: x for k, x in o.items() if k != "nothing"}), nothing=drawn)
        arrays = inputs(*shape, dtype, rng)
        one, pool = single_row(B, N, K, max(cached, 335), H, dtype, rng)
        factors = (rng.uniform(*bounds, s) for bounds, s in (((0.5, 2.0), (B, K, T)), ((-1.0, 1.0), (B, T))))
        multiplier, weight = (jnp.asarray(x, jnp.float32) for x in factors)
        rescaled_and_weighted = (
            Columns(softmax=Softmax(multiplier=multiplier), weight=weight, count_self=False),
            Columns(softmax=Softmax(multiplier=multiplier, causal=False), group=None),
            Columns(element="above", group=None, weight=weight),
        )
        check(f"attention {label}", dtype, attention, arrays, noisy(B), logits=logits)
        check(f"rescaled and weighted {label}", dtype, attention, arrays, rescaled_and_weighted, logits=logits)
        check(f"decode {label}", dtype, attention, one, COLUMNS, logits=logits)
        check(f"pool decode {label}", dtype, pooled_attention, pool, COLUMNS, num_kv_heads=K, logits=logits)
        if not cached and implementations[0] != "mosaic_gpu":
            check(f"own rows {label}", dtype, attention, arrays, COLUMNS, by=("cudnn",), own=True, logits=logits)
    if implementations[0] == "mosaic_gpu":
        return
    for (B, N, K, T, cached, H), dtype, length in itertools.product(shapes[:2], dtypes, ("block", "row", "pool")):
        name, by = f"bias, {length} H={H} {dtype}", implementations[:1]
        if length == "pool":
            pool = single_row(B, N, K, 335, H, dtype, rng)[1]
            bias = alibi(pool[5][:, None], N // K)
            check(name, dtype, pooled_attention, pool, noisy(B), bias, by=by, num_kv_heads=K)
        else:
            arrays = inputs(B, N, K, *((T, cached) if length == "block" else (1, 335)), H, dtype, rng)
            check(name, dtype, attention, arrays, noisy(B), alibi(arrays[4], N), by=by)


def alibi(kv_pos: jax.Array, N: int) -> jax.Array:
    """A slope for every query head times the position of a key; every seventh position dead by -inf."""
    pos = np.repeat(np.asarray(kv_pos), N // kv_pos.shape[1], axis=1)
    slopes = 2.0 ** -np.arange(1, N + 1)
    return jnp.asarray(np.where(pos % 7 == 3, -np.inf, slopes[None, :, None] * pos), jnp.float32)


def repeatability(report: Report, implementations: Sequence[Implementation]) -> None:
    """Bitwise the same, again and again: an error that moves is a race."""
    rng = np.random.default_rng(time.time_ns())
    dtype, T, S, K = ("float32", 40, 90, 2) if report.smoke else ("bfloat16", 2048, 8191, 2)
    one, pool = single_row(1, 8, K, S, 64, dtype, rng)
    runs = {
        "attention and statistics": (attention, inputs(1, 8, K, T, 0, 64, dtype, rng)),
        "decode and statistics": (attention, one),
        "pool decode and statistics": (functools.partial(pooled_attention, num_kv_heads=K), pool),
    }
    for how, (name, (f, arrays)) in itertools.product(implementations, runs.items()):

        def again(run: Callable[..., Any], arrays: tuple[Any, ...] = arrays) -> dict[str, Any]:
            first, times = run(*arrays), 2 if report.smoke else 20
            equal = functools.partial(np.array_equal, equal_nan=True)
            same = (jax.tree.map(equal, first, run(*arrays)) for _ in range(times))
            return {"ok": all(all(jax.tree.leaves(each)) for each in same)}

        by_each(report, "repeatability", name, functools.partial(f, columns=COLUMNS), arrays, (how,), again)
