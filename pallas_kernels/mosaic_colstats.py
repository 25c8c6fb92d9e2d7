"""Column statistics of attention on Hopper: Pallas on the Mosaic GPU backend, with wgmma and TMA. Needs jax >= 0.11.2.

The same plan as `colstats`: one warpgroup owns some tiles of 64 keys, the query tiles of one head stream past it, sums
stay in registers and are written once. Products are `k @ q.T`, so that the sum over queries is the direction in which
wgmma's layout is cheap. What is read of a query tile serves all keys of a program: at 32,768 tokens on an H200 one tile
of keys took 1.15 times as long as two, and four as long as two.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.pallas_kernels import blocks as bl
from kvjax.pallas_kernels import mosaic as mo
from kvjax.pallas_kernels.colstats import Pass


def check_served(spec: bl.Spec, what: Pass, *xs: Array) -> None:
    """Raises NotImplementedError for what the kernel does not compute, and on an older jax."""
    mo.backend()
    mo.check_inputs(spec, *xs)
    if what.heads not in ("each", "sum"):
        raise NotImplementedError("heads combined before the sum need all their tiles at once")


def attention_colstats(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    lse: Float[Array, "B N T"],
    q_pos: Int[Array, "B T"],
    kv_pos: Int[Array, "B K S"],
    *,
    spec: bl.Spec,
    what: Pass,
    theta: Float[Array, "B K T"] | None = None,
    weight: Float[Array, "B T"] | None = None,
    multiplier: Float[Array, "B K T"] | None = None,
    stages: int = mo.STAGES,
    tiles: int = 2,
    interpret: Any = None,
) -> tuple[Float[Array, "B _ S"], ...]:
    """`colstats.attention_colstats` for heads that are kept apart or summed. Arguments and result as there.

    `stages` tiles of rows are in flight at a time, past `tiles` tiles of keys.

    Raises:
      NotImplementedError: for dtypes, head dimensions and statistics that it does not compute, and for an older jax.
    """
    check_served(spec, what, q, k)
    plgpu = mo.backend()
    B, N, T, H = q.shape
    K, S = k.shape[1:3]
    G = N // K
    keys = tiles * mo.BLOCK
    rows, slots = -(-T // mo.BLOCK) * mo.BLOCK, -(-S // keys) * keys
    meet = bl.meetings(spec, q_pos, kv_pos, mo.BLOCK, keys)
    first, stop = bl.first_and_stop(meet.swapaxes(2, 3))

    pad = mo.pad
    lse = jnp.where(jnp.isfinite(lse), lse * bl.LOG2E, jnp.inf)  # a row without keys has probabilities 0, not NaN
    arrays: dict[str, Array] = {
        "q": pad(q, 2, rows, 0),
        "k": pad(k, 2, slots, 0),
        "lse": pad(lse, 2, rows, jnp.inf),
        "q_pos": pad(q_pos, 1, rows, -1),
        "kv_pos": pad(kv_pos, 2, slots, bl.DEAD),
        "first": first,
        "stop": stop,
    }
    per_kv_head = {"theta": (theta, jnp.inf), "multiplier": (multiplier, 0.0)}
    for name, (x, value) in per_kv_head.items():
        if x is not None:
            arrays[name] = pad(x.astype(jnp.float32), 2, rows, value)
    if weight is not None:
        arrays["weight"] = pad(weight.astype(jnp.float32), 1, rows, 0.0)
    streamed = [n for n in ("lse", "q_pos", "theta", "multiplier", "weight") if n in arrays]

    layout = plgpu.Layout.WGMMA
    of_keys, of_rows = layout.reduce(1), layout.reduce(0)
    tiled = mo.tiled(plgpu)
    tile = (mo.BLOCK, mo.BLOCK)

    def kernel(*refs):
        ref = dict(zip([*arrays, *(f"sum{i}" for i in range(len(what.elements)))], refs, strict=False))
        k_tiles, pos_tiles, sums_tile, barrier = refs[len(arrays) + len(what.elements) :]
        j, h, b = lax.axis_index("j"), lax.axis_index("h"), lax.axis_index("b")
        kv = lax.div(h, jnp.int32(G))
        for i, (k_tile, pos_tile) in enumerate(zip(k_tiles, pos_tiles, strict=True)):
            here = pl.ds(j * keys + i * mo.BLOCK, mo.BLOCK)
            plgpu.copy_gmem_to_smem(ref["k"].at[b, kv, here], k_tile, barrier.at[2 * i])
            plgpu.copy_gmem_to_smem(ref["kv_pos"].at[b, kv, here], pos_tile, barrier.at[2 * i + 1])
        for i in range(2 * tiles):
            plgpu.barrier_wait(barrier.at[i])
        key_pos = [lax.broadcast_in_dim(plgpu.load(x, layout=of_keys), tile, [0]) for x in pos_tiles]
        start, length = ref["first"][b, kv, j], ref["stop"][b, kv, j] - ref["first"][b, kv, j]

        def body(index, q_tile, *streams_and_sums):
            *streams, sums = streams_and_sums
            del index

            def products(*accumulators):
                for acc, k_tile in zip(accumulators, k_tiles, strict=True):
                    plgpu.wgmma(acc, k_tile, q_tile.transpose((1, 0)))
                return tuple(acc[...] for acc in accumulators)

            found = pl.run_scoped(products, *[plgpu.ACC(tile, jnp.float32)] * tiles)
            row = {
                name: lax.broadcast_in_dim(plgpu.load(x, layout=of_rows), tile, [1])
                for name, x in zip(streamed, streams, strict=True)
            }
            # Every lane must have read a slot of the pipeline before TMA refills it.
            plgpu.commit_smem()
            return tuple(
                tuple(
                    total + (f * row["weight"] if "weight" in row else f).sum(axis=1)
                    for f, total in zip(elements(s, of, row), totals, strict=True)
                )
                for s, of, totals in zip(found, key_pos, sums, strict=True)
            )

        def elements(s, of, row):
            """What a tile of products adds to each sum."""
            x = bl.masked_logits(spec, s, row["q_pos"], of, multiplier=row.get("multiplier"))
            p = jnp.exp2(x - row["lse"])
            if not what.count_self:
                p = jnp.where(of == row["q_pos"], 0.0, p)
            which = {"p": lambda: p, "p2": lambda: p * p, "above": lambda: jnp.where(p > row["theta"], 1.0, 0.0)}
            return [which[name]() for name in what.elements]

        zero = plgpu.layout_cast(jnp.zeros((mo.BLOCK,), jnp.float32), of_keys)
        sums = plgpu.emit_pipeline(
            body,
            grid=(length,),
            in_specs=[
                plgpu.BlockSpec((mo.BLOCK, H), lambda t: (start + t, 0), transforms=tiled),
                *(plgpu.BlockSpec((mo.BLOCK,), lambda t: (start + t,)) for _ in streamed),
            ],
            max_concurrent_steps=stages,
            init_carry=((zero,) * len(what.elements),) * tiles,
        )(
            ref["q"].at[b, h],
            *(
                ref[name].at[b, h] if name == "lse" else ref[name].at[b, kv] if name in per_kv_head else ref[name].at[b]
                for name in streamed
            ),
        )
        for u, i in itertools.product(range(tiles), range(len(what.elements))):
            sums_tile[i, pl.ds(u * mo.BLOCK, mo.BLOCK)] = sums[u][i]
        plgpu.commit_smem()
        for i in range(len(what.elements)):
            plgpu.copy_smem_to_gmem(sums_tile.at[i], ref[f"sum{i}"].at[b, h, pl.ds(j * keys, keys)])
        plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct((B, N, slots), jnp.float32)
    run = plgpu.kernel(
        kernel,
        out_type=(shape,) * len(what.elements),
        grid=(slots // keys, N, B),
        grid_names=("j", "h", "b"),
        scratch_types=(
            [plgpu.SMEM((mo.BLOCK, H), q.dtype, transforms=tiled)] * tiles,
            [plgpu.SMEM((mo.BLOCK,), jnp.int32)] * tiles,
            plgpu.SMEM((len(what.elements), keys), jnp.float32),
            plgpu.Barrier(num_barriers=2 * tiles),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    sums = (x[:, :, :S] for x in run(*arrays.values()))
    return tuple(x.reshape(B, K, G, S).sum(2) if what.heads == "sum" else x for x in sums)
