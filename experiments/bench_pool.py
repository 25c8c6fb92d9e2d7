"""Attention over a flat pool against a dense cache of as many slots, one query row a head.

    python experiments/bench_pool.py

Rounds are interleaved in one process; compare the ratios, not the milliseconds.
"""

import itertools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.results import device_info
from pallas_kernels import Columns, attention, pooled_attention


def bench(
    slots: tuple[int, ...] = (4096, 16384),
    kv_heads: tuple[int, ...] = (4, 8),
    groups: tuple[int, ...] = (1, 4),
    head_dim: int = 128,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
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
    rng = np.random.default_rng(0)
    rows = []
    print(f"{'dtype':10s} {'slots':>6s} {'K':>3s} {'G':>3s} {'dense ms':>9s} {'pool ms':>9s} {'ratio':>6s}")
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
        owner = jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32)[None, :, None], (1, K, S))
        calls = (
            (jax.jit(lambda *x: attention(*x, columns=(Columns(),))), (q, k, v, q_pos, kv_pos)),
            (
                jax.jit(lambda *x, K=K: pooled_attention(*x, columns=(Columns(),), num_kv_heads=K)),
                (q, flat(k), flat(v), flat(owner), q_pos, flat(kv_pos)),
            ),
        )
        seconds = np.zeros((rounds + 1, 2))
        for i, (j, (f, args)) in itertools.product(range(rounds + 1), enumerate(calls)):
            start = time.perf_counter()
            jax.block_until_ready(f(*args))
            seconds[i, j] = time.perf_counter() - start
        dense, pool = 1e3 * seconds[1:].min(0)  # the first round compiles
        rows.append({"dtype": dtype, "slots": P, "K": K, "G": G, "dense_ms": dense, "pool_ms": pool})
        print(f"{dtype:10s} {P:6d} {K:3d} {G:3d} {dense:9.3f} {pool:9.3f} {pool / dense:6.2f}")
    if output is not None:
        output.write_text(json.dumps({"rows": rows, "head_dim": head_dim, "device": device_info()}, indent=2) + "\n")


if __name__ == "__main__":
    tyro.cli(bench)
