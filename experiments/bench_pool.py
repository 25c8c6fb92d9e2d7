"""Attention over a flat pool, slots in any order or in order of heads, against a dense cache of as many slots.

    python experiments/bench_pool.py

Rounds are interleaved in one process; compare the ratios, not the milliseconds.
"""

import itertools
import pathlib
import time
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from kvjax.configs.experiment import check_whole
from kvjax.experiments.core.command import check_output, plain_errors, write_json
from kvjax.experiments.core.provenance import device_info
from kvjax.pallas_kernels import Columns, attention, pooled_attention


def bench(
    slots: tuple[int, ...] = (4096, 16384),
    kv_heads: tuple[int, ...] = (4, 8),
    groups: tuple[int, ...] = (1, 4),
    head_dim: int = 128,
    dtypes: tuple[Literal["float32", "bfloat16", "float16"], ...] = ("float32", "bfloat16"),
    rounds: int = 40,
    output: pathlib.Path | None = None,
) -> None:
    """Prints the fastest of interleaved rounds, with column sums.

    Args:
      slots: of all kv heads together.
      kv_heads: K.
      groups: query heads of a kv head.
      head_dim: H.
      dtypes: of queries, keys and values.
      rounds: timed calls of each.
      output: a JSON file for the figures.
    """
    check_whole(1, slots=slots, kv_heads=kv_heads, groups=groups, head_dim=head_dim, rounds=rounds)
    if uneven := [(p, k) for p in slots for k in kv_heads if p % k]:
        raise ValueError(f"slots={uneven[0][0]} do not divide among kv_heads={uneven[0][1]} evenly")
    check_output(output)
    rng = np.random.default_rng(0)
    rows = []
    print(
        f"{'dtype':10s} {'slots':>6s} {'K':>3s} {'G':>3s} {'dense ms':>9s} {'any order':>10s} {'in order':>10s} ratios"
    )
    for dtype, P, K, G in itertools.product(dtypes, slots, kv_heads, groups):
        S = P // K
        q, k, v = (
            jnp.asarray(rng.standard_normal(s), dtype)
            for s in ((1, K * G, 1, head_dim), (1, K, S, head_dim), (1, K, S, head_dim))
        )
        order = rng.permutation(P)
        flat = lambda x, order=order: x.reshape(1, -1, *x.shape[3:])[:, order]
        q_pos = jnp.full((1, 1), S, jnp.int32)
        kv_pos = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (1, K, S))
        starts = np.sort(rng.choice(P, K - 1, replace=False))
        in_order = jnp.asarray((np.arange(P) >= starts[:, None]).sum(0)[None], jnp.int32)
        pool = flat(k), flat(v), in_order[:, order], q_pos, flat(kv_pos)
        call = lambda promised, K=K: jax.jit(
            lambda *x: pooled_attention(*x, columns=(Columns(),), num_kv_heads=K, in_order=promised)
        )
        calls = (
            (jax.jit(lambda *x: attention(*x, columns=(Columns(),))), (q, k, v, q_pos, kv_pos)),
            (call(False), (q, *pool)),
            (call(True), (q, *pool[:2], in_order, *pool[3:])),
        )
        seconds = np.zeros((rounds + 1, 3))
        for i, (j, (f, args)) in itertools.product(range(rounds + 1), enumerate(calls)):
            start = time.perf_counter()
            jax.block_until_ready(f(*args))
            seconds[i, j] = time.perf_counter() - start
        dense, loose, ordered = 1e3 * seconds[1:].min(0)  # the first round compiles
        times = {"dense_ms": dense, "pool_ms": loose, "pool_in_order_ms": ordered}
        rows.append({"dtype": dtype, "slots": P, "K": K, "G": G, **times})
        print(f"{dtype:10s} {P:6d} {K:3d} {G:3d} {dense:9.3f} {loose:10.3f} {ordered:10.3f}", end="")
        print(f"   {loose / dense:5.2f} {ordered / dense:5.2f}")
    if output is not None:
        write_json(output, {"rows": rows, "head_dim": head_dim, "device": device_info()})


if __name__ == "__main__":
    with plain_errors():
        tyro.cli(bench)
