"""Column statistics of attention on Hopper: Pallas on the Mosaic GPU backend, with wgmma and TMA. Needs jax >= 0.11.2.

The same plan as `colstats`: one warpgroup owns 64 keys, query tiles stream past it, sums stay in registers and are
written once. Products are `k @ q.T`, so that the sum over queries is the direction in which wgmma's layout is cheap.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.pallas_kernels import blocks as bl
from kvjax.pallas_kernels import mosaic as mo
from kvjax.pallas_kernels.colstats import Pass


def check_served(spec: bl.Logits, what: Pass, *xs: Array) -> None:
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
    spec: bl.Logits,
    what: Pass,
    theta: Float[Array, "B K T"] | None = None,
    weight: Float[Array, "B T"] | None = None,
    multiplier: Float[Array, "B K T"] | None = None,
    stages: int = mo.STAGES,
    interpret: Any = None,
) -> tuple[Float[Array, "B _ S"], ...]:
    """`colstats.attention_colstats` for heads that are kept apart or summed. Arguments and result as there.

    `stages` tiles are in flight at a time.

    Raises:
      NotImplementedError: for dtypes, head dimensions and statistics that it does not compute, and for an older jax.
    """
    check_served(spec, what, q, k)
    plgpu = mo.backend()
    B, N, T, H = q.shape
    K, S = k.shape[1:3]
    G = N // K
    group = G if what.heads == "sum" else 1
    heads = N // group
    rows, slots = -(-T // mo.BLOCK) * mo.BLOCK, -(-S // mo.BLOCK) * mo.BLOCK
    num_row_blocks = rows // mo.BLOCK
    meet = bl.meetings(spec, q_pos, kv_pos, mo.BLOCK, mo.BLOCK)
    first, stop = bl.first_and_stop(meet.swapaxes(2, 3))

    pad = mo.pad
    lse = jnp.where(jnp.isfinite(lse), lse * bl.LOG2E, jnp.inf)  # a row without keys has probabilities 0, not NaN
    arrays: dict[str, Array] = {
        "q": pad(q, 2, rows, 0).reshape(B, heads, group * rows, H),
        "k": pad(k, 2, slots, 0),
        "lse": pad(lse, 2, rows, jnp.inf).reshape(B, heads, group * rows),
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
        k_tile, pos_tile, sums_tile, barrier = refs[len(arrays) + len(what.elements) :]
        j, h, b = lax.axis_index("j"), lax.axis_index("h"), lax.axis_index("b")
        kv = h if what.heads == "sum" else lax.div(h, jnp.int32(G))
        j0 = j * mo.BLOCK
        plgpu.copy_gmem_to_smem(ref["k"].at[b, kv, pl.ds(j0, mo.BLOCK)], k_tile, barrier.at[0])
        plgpu.copy_gmem_to_smem(ref["kv_pos"].at[b, kv, pl.ds(j0, mo.BLOCK)], pos_tile, barrier.at[1])
        plgpu.barrier_wait(barrier.at[0])
        plgpu.barrier_wait(barrier.at[1])
        key_pos = lax.broadcast_in_dim(plgpu.load(pos_tile, layout=of_keys), tile, [0])
        start, length = ref["first"][b, kv, j], ref["stop"][b, kv, j] - ref["first"][b, kv, j]

        def body(index, q_tile, *tiles_and_sums):
            *tiles, sums = tiles_and_sums
            del index

            def product(acc):
                plgpu.wgmma(acc, k_tile, q_tile.transpose((1, 0)))
                return acc[...]

            s = pl.run_scoped(product, plgpu.ACC(tile, jnp.float32))
            row = {
                name: lax.broadcast_in_dim(plgpu.load(x, layout=of_rows), tile, [1])
                for name, x in zip(streamed, tiles, strict=True)
            }
            # Every lane must have read a slot of the pipeline before TMA refills it.
            plgpu.commit_smem()
            x = bl.masked_logits(spec, s, row["q_pos"], key_pos, multiplier=row.get("multiplier"))
            p = jnp.exp2(x - row["lse"])
            if not what.count_self:
                p = jnp.where(key_pos == row["q_pos"], 0.0, p)
            found = []
            for name, total in zip(what.elements, sums, strict=True):
                f = p
                if name == "p2":
                    f = p * p
                if name == "above":
                    f = jnp.where(p > row["theta"], 1.0, 0.0)
                found.append(total + (f * row["weight"] if "weight" in row else f).sum(axis=1))
            return tuple(found)

        zeros = tuple(plgpu.layout_cast(jnp.zeros((mo.BLOCK,), jnp.float32), of_keys) for _ in what.elements)
        # Rows of the heads of a group follow each other; per-row inputs repeat for every head.
        of_head = lambda g, t: g * num_row_blocks + start + t
        indices = {"lse": lambda g, t: (of_head(g, t),)}
        shared = lambda g, t: (start + t,)
        sums = plgpu.emit_pipeline(
            body,
            grid=(group, length),
            in_specs=[
                plgpu.BlockSpec((mo.BLOCK, H), lambda g, t: (of_head(g, t), 0), transforms=tiled),
                *(plgpu.BlockSpec((mo.BLOCK,), indices.get(name, shared)) for name in streamed),
            ],
            max_concurrent_steps=stages,
            init_carry=zeros,
        )(
            ref["q"].at[b, h],
            *(
                ref[name].at[b, h] if name == "lse" else ref[name].at[b, kv] if name in per_kv_head else ref[name].at[b]
                for name in streamed
            ),
        )
        for i, x in enumerate(sums):
            sums_tile[i] = x
        plgpu.commit_smem()
        for i in range(len(what.elements)):
            plgpu.copy_smem_to_gmem(sums_tile.at[i], ref[f"sum{i}"].at[b, h, pl.ds(j0, mo.BLOCK)])
        plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct((B, heads, slots), jnp.float32)
    run = plgpu.kernel(
        kernel,
        out_type=(shape,) * len(what.elements),
        grid=(slots // mo.BLOCK, heads, B),
        grid_names=("j", "h", "b"),
        scratch_types=(
            plgpu.SMEM((mo.BLOCK, H), q.dtype, transforms=tiled),
            plgpu.SMEM((mo.BLOCK,), jnp.int32),
            plgpu.SMEM((len(what.elements), mo.BLOCK), jnp.float32),
            plgpu.Barrier(num_barriers=2),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return tuple(x[:, :, :S] for x in run(*arrays.values()))
