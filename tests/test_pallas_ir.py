"""Every kernel lowered for CUDA on a machine without a GPU, and what its intermediate representation shows."""

import contextlib
import re
import warnings

import jax
import numpy as np
import pytest
from jax._src.interpreters import mlir  # private: nothing public parses the kernels inside a lowered function
from jax._src.lib import triton
from jax._src.lib.mlir import ir

from kvjax.pallas_kernels import Columns, Logits, Softmax, api, attention, pooled_attention
from tests.test_kernels import inputs

pytestmark = pytest.mark.slow  # minutes of interpretation

B, N, K, T = 1, 8, 2, 1000
TENSOR_TYPE = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def shapes(*specs):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in specs]


def cuda_device():
    """An H100 that is not there, where jax (since 0.11) asks for one to lower for."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def lower(f, *args):
    with cuda_device(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the backend, since jax 0.11
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))


def triton_kernels(lowered):
    """(name, MLIR) of every Triton kernel in a lowered function."""
    found = []

    def visit(op):
        if op.name == "stablehlo.custom_call" and "mhlo.backend_config" in op.attributes:
            config = ir.DictAttr(op.attributes["mhlo.backend_config"])
            config = {config[i].name: config[i].attr for i in range(len(config))}
            if "ir" in config:
                context = mlir.make_ir_context()
                triton.dialect.register_dialect(context)
                context.allow_unregistered_dialects = True
                with context, ir.Location.unknown():
                    module = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes)
                    found.append((ir.StringAttr(config["name"]).value, module.operation.get_asm()))
        for region in op.regions:
            for block in region.blocks:
                for inner in block.operations:
                    visit(inner.operation)

    visit(lowered.compiler_ir("stablehlo").operation)
    return found


def check(kernels, dtype):
    for name, text in kernels:
        dots = re.findall(r"tt\.dot .*?: tensor<\w+?x\w+?x(\w+)> \* tensor<\w+?x\w+?x(\w+)>", text)
        assert dots or name == "kvjax_combine", name
        assert set(dots) <= {(TENSOR_TYPE[dtype],) * 2}, name
        assert "atomic" not in text, name
        if dtype == "float32":
            assert "inputPrecision = tf32" not in text, name


def no_square(lowered):
    assert not re.search(rf"tensor<[^>]*\b{T}x{T}x", lowered.as_text())


DENSE = lambda dtype, d: shapes(
    ((B, N, T, d), dtype), ((B, K, T, d), dtype), ((B, K, T, d), dtype), ((B, T), "int32"), ((B, K, T), "int32")
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("d", [64, 80, 96, 128, 256])
def test_forward_and_column_sums(dtype, d):
    def f(*args):
        return jax.tree.leaves(attention(*args, columns=(Columns(),), implementation="triton"))

    lowered = lower(f, *DENSE(dtype, d))
    kernels = triton_kernels(lowered)
    assert [name for name, _ in kernels] == ["kvjax_flash", "kvjax_colstats"]
    check(kernels, dtype)
    no_square(lowered)


@pytest.mark.parametrize(
    "column",
    [
        Columns(rows=64),
        Columns(element="p2", group_at="before"),
        Columns(element="p2", group="max", group_at="before"),
        Columns(element="above", group=None),
        Columns(element="above", threshold="1/position", group="sum"),
        Columns(count_self=False),
    ],
    ids=lambda c: f"{c.element}-{c.group}-{c.rows}",
)
@pytest.mark.parametrize("options", [{}, {"window": 300, "softcap": 20.0}], ids=str)
def test_statistics(column, options):
    def f(*args):
        return jax.tree.leaves(attention(*args, columns=(column,), implementation="triton", logits=Logits(**options)))

    lowered = lower(f, *DENSE("bfloat16", 64))
    kernels = triton_kernels(lowered)
    assert len(kernels) == 2
    check(kernels, "bfloat16")
    no_square(lowered)


@pytest.mark.parametrize("noise", ["gumbel", None])
@pytest.mark.parametrize("causal", [True, False])
def test_own_softmax_takes_a_pass_for_its_logsumexp(noise, causal):
    def f(seed, multiplier, *args):
        own = Softmax(multiplier=multiplier, seed=seed if noise else None, noise=noise, causal=causal)
        return jax.tree.leaves(attention(*args, columns=(Columns(softmax=own),), implementation="triton"))

    lowered = lower(f, *shapes(((B,), "uint32"), ((B, K, T), "float32")), *DENSE("bfloat16", 64))
    kernels = triton_kernels(lowered)
    assert [name for name, _ in kernels] == ["kvjax_flash", "kvjax_lse", "kvjax_colstats"]
    check(kernels, "bfloat16")
    no_square(lowered)


@pytest.mark.parametrize(
    ("rows", "names"), [(1, ["kvjax_decode", "kvjax_combine"]), (T, ["kvjax_flash", "kvjax_colstats"])]
)
def test_a_bias_is_added_by_the_portable_kernels(rows, names):
    def f(bias, *args):
        return jax.tree.leaves(attention(*args, columns=(Columns(),), bias=bias, implementation="mosaic_gpu"))

    _, k, _, _, kv_pos = DENSE("bfloat16", 128)
    q, bias, q_pos = shapes(((B, N, rows, 128), "bfloat16"), ((B, N, T), "float32"), ((B, rows), "int32"))
    lowered = lower(f, bias, q, k, k, q_pos, kv_pos)
    kernels = triton_kernels(lowered)
    assert [name for name, _ in kernels] == names
    check(kernels, "bfloat16")
    no_square(lowered)


def test_a_bias_is_added_by_the_kernel_of_a_pool():
    def pool(bias, *args):
        options = {"num_kv_heads": K, "bias": bias, "implementation": "triton"}
        return jax.tree.leaves(pooled_attention(*args, (Columns(),), **options))

    q, flat, row, ints = ((B, N, 1, 128), "bfloat16"), ((B, T, 128), "bfloat16"), ((B, 1), "int32"), ((B, T), "int32")
    kernels = triton_kernels(lower(pool, *shapes(((B, N // K, T), "float32"), q, flat, flat, ints, row, ints)))
    assert [name for name, _ in kernels] == ["kvjax_pool_decode", "kvjax_combine"]
    check(kernels, "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("d", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("columns", [(), (Columns(),)], ids=["plain", "with its row"])
def test_decode(dtype, d, columns):
    def dense(*args):
        return jax.tree.leaves(attention(*args, columns=columns, implementation="triton"))

    def pool(*args):
        return jax.tree.leaves(pooled_attention(*args, columns, num_kv_heads=K, implementation="triton"))

    q, row = ((B, N, 1, d), dtype), ((B, 1), "int32")
    slots, flat = ((B, K, T, d), dtype), ((B, K * T, d), dtype)
    kernels = triton_kernels(lower(dense, *shapes(q, slots, slots, row, ((B, K, T), "int32"))))
    kernels += triton_kernels(lower(pool, *shapes(q, flat, flat, ((B, K * T), "int32"), row, ((B, K * T), "int32"))))
    assert [name for name, _ in kernels] == ["kvjax_decode", "kvjax_combine", "kvjax_pool_decode", "kvjax_combine"]
    check(kernels, dtype)


@pytest.mark.parametrize("rows", [1, T])
@pytest.mark.parametrize("positions", ["int32", "int64"])
def test_kernels_are_the_same_where_64_bits_are_enabled(rows, positions):
    def f(q, k, v, q_pos, kv_pos, weight, multiplier, seed):
        own = Softmax(multiplier=multiplier, seed=seed, noise="gumbel")
        columns = (
            Columns(element="above", weight=weight, count_self=False),
            Columns(element="p2", group="max", group_at="before", softmax=own if rows > 1 else None),
        )
        return jax.tree.leaves(attention(q, k, v, q_pos, kv_pos, columns=columns, implementation="triton"))

    def kernels(ints):
        q, slots = ((B, N, rows, 64), "bfloat16"), ((B, K, T, 64), "bfloat16")
        extra = ((B, rows), "float32"), ((B, K, rows), "float32"), ((B,), "uint32")
        return triton_kernels(lower(f, *shapes(q, slots, slots, ((B, rows), ints), ((B, K, T), ints), *extra)))

    plain = kernels("int32")
    with jax.enable_x64(True):
        wide = kernels(positions)
    assert len(plain) == (2 if rows == 1 else 4)
    assert wide == plain


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernels need jax >= 0.11.2")
@pytest.mark.parametrize("d", [64, 128])
def test_mosaic_uses_wgmma(d):
    def f(*args):
        columns = (Columns(), Columns(rows=64, group="max"), Columns(element="p2", group_at="before"))
        return jax.tree.leaves(attention(*args, columns=columns, implementation="mosaic_gpu"))

    lowered = lower(f, *DENSE("bfloat16", d))
    text = lowered.as_text()
    assert text.count("@mosaic_gpu") == 3  # forward and two statistics; the third is left to Triton
    assert [name for name, _ in triton_kernels(lowered)] == ["kvjax_colstats"]
    no_square(lowered)


def test_a_process_with_a_gpu_compiles_kernels_for_it_and_xla_for_the_rest(monkeypatch):
    monkeypatch.setattr(api, "_gpu_order", lambda: api._ORDER["triton"])
    columns = Columns(), Columns(group=None, rows=3)
    dense = lambda *args: attention(*args, columns=columns)
    pool = lambda *args: pooled_attention(*args, columns=columns, num_kv_heads=K)
    kernels = triton_kernels(lower(lambda *args: jax.tree.leaves(dense(*args)), *DENSE("bfloat16", 64)))
    assert [name for name, _ in kernels] == ["kvjax_flash", "kvjax_colstats", "kvjax_colstats"]
    flat = shapes(*((s, "int32") for s in ((B, 99), (B, 1), (B, 99))))
    args = *shapes(((B, N, 1, 64), "bfloat16"), ((B, 99, 64), "bfloat16"), ((B, 99, 64), "bfloat16")), *flat
    assert [name for name, _ in triton_kernels(lower(lambda *x: jax.tree.leaves(pool(*x)), *args))] == [
        "kvjax_pool_decode",
        "kvjax_combine",
    ]
    arrays = inputs(T=20)
    on_cpu, expected = dense(*arrays), attention(*arrays, columns=columns, implementation="xla")
    for a, b in zip(jax.tree.leaves(on_cpu), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    loss = lambda q, how: (attention(q, *arrays[1:], implementation=how).out ** 2).sum()
    np.testing.assert_allclose(jax.grad(loss)(arrays[0], None), jax.grad(loss)(arrays[0], "xla"), atol=1e-5)


def test_the_check_sees_what_it_looks_for():
    """Kernels with reduced precision, and with atomics, show them."""
    from jax.experimental import pallas as pl

    from kvjax.pallas_kernels import blocks as bl

    def found(body):
        def kernel(x, y, o):
            product = lambda precision: jax.lax.dot_general(
                x[...], y[...], (((1,), (0,)), ((), ())), precision=precision
            )
            body(product, o)

        f = lambda x, y: pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((16, 16), "float32"),
            compiler_params=bl.compiler_params(bl.BlockSizes()),
        )(x, y)
        return triton_kernels(lower(f, *shapes(((16, 16), "float32"), ((16, 16), "float32"))))

    def right(product, o):
        o[...] = product(jax.lax.Precision.HIGHEST)

    def reduced(product, o):
        o[...] = product(None)

    def atomic(product, o):
        bl.triton().atomic_add(o, (slice(None), slice(None)), product(jax.lax.Precision.HIGHEST))

    check(found(right), "float32")
    with pytest.raises(AssertionError, match="tf32"):
        check(found(reduced), "float32")
    with pytest.raises(AssertionError, match="atomic"):
        check(found(atomic), "float32")
