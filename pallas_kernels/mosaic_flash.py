"""Attention forward with its logsumexp on Hopper: Pallas on the Mosaic GPU backend. Needs jax >= 0.11.2.

One warpgroup owns 64 query rows, keys and values stream past it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kvjax.pallas_kernels import blocks as bl
from kvjax.pallas_kernels import mosaic as mo


def flash_attention(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"] | None,
    q_pos: Int[Array, "B T"],
    kv_pos: Int[Array, "B K S"],
    *,
    spec: bl.Spec,
    multiplier: Float[Array, "B K T"] | None = None,
    ranges: tuple[Int[Array, "B K i"], Int[Array, "B K i"]] | None = None,
    stages: int = mo.STAGES,
    interpret: Any = None,
) -> tuple[Float[Array, "B N T H"] | None, Float[Array, "B N T"]]:
    """`flash.flash_attention` without bias and noise. Arguments and result as there.

    `stages` tiles are in flight at a time. `ranges` are the first block of keys that each block of rows visits and the
    one behind its last, whole blocks only; None for all that meet.

    Raises:
      NotImplementedError: for dtypes, head dimensions and softmaxes that it does not compute, and for an older jax.
    """
    plgpu = mo.backend()
    mo.check_inputs(spec, *(x for x in (q, k, v) if x is not None))
    B, N, T, H = q.shape
    K, S = k.shape[1:3]
    G = N // K
    rows, slots = -(-T // mo.BLOCK) * mo.BLOCK, -(-S // mo.BLOCK) * mo.BLOCK
    if ranges is None:
        k, v = mo.pad(k, 2, slots, 0), None if v is None else mo.pad(v, 2, slots, 0)
        ranges = bl.first_and_stop(bl.meetings(spec, q_pos, kv_pos, mo.BLOCK, mo.BLOCK))
    arrays: dict[str, Array] = {
        "q": mo.pad(q, 2, rows, 0),
        "k": k,
        "q_pos": mo.pad(q_pos, 1, rows, -1),
        "kv_pos": mo.pad(kv_pos, 2, slots, bl.DEAD),
        "first": ranges[0],
        "stop": ranges[1],
    }
    if v is not None:
        arrays["v"] = v
    if multiplier is not None:
        arrays["multiplier"] = mo.pad(multiplier.astype(jnp.float32), 2, rows, 0.0)
    outputs = {"lse": jax.ShapeDtypeStruct((B, N, rows), jnp.float32)}
    if v is not None:
        outputs["out"] = jax.ShapeDtypeStruct((B, N, rows, H), q.dtype)

    tiled = mo.tiled(plgpu)
    of_rows, of_keys = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
    tile = (mo.BLOCK, mo.BLOCK)
    per_row = ["q_pos"] + ["multiplier"] * (multiplier is not None)
    scratch = {
        "q_tile": plgpu.SMEM((mo.BLOCK, H), q.dtype, transforms=tiled),
        "lse_tile": plgpu.SMEM((mo.BLOCK,), jnp.float32),
        "barrier": plgpu.Barrier(num_barriers=1 + len(per_row)),
        "q_pos_tile": plgpu.SMEM((mo.BLOCK,), jnp.int32),
    }
    if v is not None:
        scratch["p_tile"] = plgpu.SMEM(tile, q.dtype, transforms=tiled)
    if multiplier is not None:
        scratch["multiplier_tile"] = plgpu.SMEM((mo.BLOCK,), jnp.float32)

    def kernel(*refs):
        ref = dict(zip([*arrays, *outputs, *scratch], refs, strict=True))
        i, h, b = lax.axis_index("i"), lax.axis_index("h"), lax.axis_index("b")
        kv = lax.div(h, jnp.int32(G))
        here = pl.ds(i * mo.BLOCK, mo.BLOCK)
        source = {"q": ref["q"].at[b, h, here], "q_pos": ref["q_pos"].at[b, here]}
        if multiplier is not None:
            source["multiplier"] = ref["multiplier"].at[b, kv, here]
        for slot, (name, x) in enumerate(source.items()):
            plgpu.copy_gmem_to_smem(x, ref[f"{name}_tile"], ref["barrier"].at[slot])
        for slot in range(len(source)):
            plgpu.barrier_wait(ref["barrier"].at[slot])
        row = {
            name: lax.broadcast_in_dim(plgpu.load(ref[f"{name}_tile"], layout=of_rows), tile, [0]) for name in per_row
        }
        start = ref["first"][b, kv, i]
        length = ref["stop"][b, kv, i] - start

        def body(index, k_tile, pos_tile, *rest):
            *v_tile, carry = rest
            del index
            top, mass, acc = carry

            def scores(s):
                plgpu.wgmma(s, ref["q_tile"], k_tile.transpose((1, 0)))
                return s[...]

            s = pl.run_scoped(scores, plgpu.ACC(tile, jnp.float32))
            key_pos = lax.broadcast_in_dim(plgpu.load(pos_tile, layout=of_keys), tile, [1])
            # Every lane must have read a slot of the pipeline before TMA refills it.
            plgpu.commit_smem()
            x = bl.masked_logits(spec, s, row["q_pos"], key_pos, multiplier=row.get("multiplier"))
            new_top = jnp.maximum(top, x.max(axis=1))
            shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # a row that has seen nothing yet is not NaN
            p = jnp.exp2(x - lax.broadcast_in_dim(shift, tile, [0]))
            shrink = jnp.exp2(top - shift)
            mass = mass * shrink + p.sum(axis=1)
            if v_tile:

                def weighted(total):
                    plgpu.wgmma(total, ref["p_tile"], v_tile[0])
                    return total[...]

                # Through shared memory and a fresh accumulator: what the interpreter can check for races. It knows
                # neither operands in registers nor accumulators that start from a value (jax 0.11.2).
                ref["p_tile"][...] = p.astype(q.dtype)
                plgpu.commit_smem()
                acc = acc * lax.broadcast_in_dim(shrink, (mo.BLOCK, H), [0])
                acc = acc + pl.run_scoped(weighted, plgpu.ACC((mo.BLOCK, H), jnp.float32))
            return new_top, mass, acc

        full = lambda value: plgpu.layout_cast(jnp.full((mo.BLOCK,), value, jnp.float32), of_rows)
        acc = plgpu.layout_cast(jnp.zeros((mo.BLOCK, H), jnp.float32), plgpu.Layout.WGMMA) if v is not None else ()
        of_slots = plgpu.BlockSpec((mo.BLOCK, H), lambda t: (start + t, 0), transforms=tiled)
        top, mass, acc = plgpu.emit_pipeline(
            body,
            grid=(length,),
            in_specs=[
                of_slots,
                plgpu.BlockSpec((mo.BLOCK,), lambda t: (start + t,)),
                *([of_slots] if v is not None else []),
            ],
            max_concurrent_steps=stages,
            init_carry=(full(-jnp.inf), full(0.0), acc),
        )(ref["k"].at[b, kv], ref["kv_pos"].at[b, kv], *([ref["v"].at[b, kv]] if v is not None else []))
        ref["lse_tile"][...] = bl.log2_sum(top, mass)
        if v is not None:
            inverse = 1.0 / jnp.where(mass > 0, mass, 1.0)
            ref["q_tile"][...] = (acc * lax.broadcast_in_dim(inverse, (mo.BLOCK, H), [0])).astype(q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(ref["lse_tile"], ref["lse"].at[b, h, here])
        if v is not None:
            plgpu.copy_smem_to_gmem(ref["q_tile"], ref["out"].at[b, h, here])
        plgpu.wait_smem_to_gmem(0)

    run = plgpu.kernel(
        kernel,
        out_type=tuple(outputs.values()),
        grid=(rows // mo.BLOCK, N, B),
        grid_names=("i", "h", "b"),
        scratch_types=tuple(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    lse, *out = run(*arrays.values())
    return (out[0][:, :, :T] if out else None), lse[:, :, :T]
