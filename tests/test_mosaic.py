"""The Mosaic GPU kernels, interpreted with race detection, against float64 numpy. They need jax >= 0.11.2."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import (
    Columns,
    Softmax,
    attention,
    colstats,
    gpu,
    mosaic,
    mosaic_colstats,
    mosaic_decode,
    mosaic_flash,
)
from kvjax.pallas_kernels import blocks as bl
from tests.references import attention as numpy_reference
from tests.test_kernels import SEED, inputs
from tests.test_pallas import without_triton

pytestmark = pytest.mark.slow  # minutes of interpretation

OLD = jax.__version_info__ < mosaic.MIN_JAX
needs_mosaic = pytest.mark.skipif(OLD, reason=f"the Mosaic kernels need jax >= 0.11.2, this is {jax.__version__}")
SCALE = 0.2
COLUMNS = (
    Columns(),
    Columns(rows=9, group="max"),
    Columns(element="p2", group="sum"),
    Columns(element="above", group=None),
    Columns(count_self=False),
)


@pytest.fixture
def interpreted(monkeypatch, capfd):
    """The kernels of `gpu` on any device. A race, which the interpreter prints, is an error."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    for module, name in ((mosaic_flash, "flash_attention"), (mosaic_colstats, "attention_colstats")):
        kernel = getattr(module, name)

        def run(*args, kernel=kernel, **options):
            return kernel(*args, **options, interpret=InterpretGPUParams(detect_races=True))

        monkeypatch.setattr(module, name, run)
    yield
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def compare(arrays, columns, tolerance, **options):
    spec = bl.Spec(SCALE, **options)
    out, lse, measured = numpy_reference.attention(*arrays, columns=columns, logits=spec)
    result = gpu.forward(*arrays, spec=spec, with_logits=True, backend="mosaic_gpu")
    np.testing.assert_allclose(np.asarray(result[0], np.float64), out, atol=tolerance)
    np.testing.assert_allclose(result[1], lse, atol=tolerance)
    q, k, _, q_pos, kv_pos = arrays
    for c, expected in zip(columns, measured, strict=True):
        found = gpu.column(c, q, k, result, q_pos, kv_pos, logits=spec, backend="mosaic_gpu")
        wrong = np.abs(np.asarray(found) - expected) > tolerance * q.shape[2] ** 0.5
        assert wrong.mean() <= (0.02 if c.element == "above" else 0.0), c


@needs_mosaic
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"H": 64, "dtype": "bfloat16"}, {}),
        ({"H": 128, "dtype": "float16", "K": 4}, {"window": 30}),
        ({"H": 64, "dtype": "float16", "T": 64, "cached": 0, "pads": 0}, {"softcap": 5.0}),
    ],
    ids=str,
)
def test_against_numpy(interpreted, shape, options):
    arrays = inputs(**{"T": 90, "cached": 30} | shape)
    compare(arrays, COLUMNS, {"bfloat16": 2e-2, "float16": 3e-3}[shape["dtype"]], **options)


DECODE = (
    *COLUMNS,
    Columns(element="p2", group_at="before"),
    Columns(softmax=Softmax(seed=SEED, noise="gumbel"), element="p2"),
    Columns(summed=False),
)


@needs_mosaic
@pytest.mark.parametrize(
    ("shape", "options", "parts"),
    [
        ({"cached": 127, "dtype": "bfloat16"}, {}, 2),  # whole blocks
        ({"cached": 399, "N": 6, "K": 1}, {"softcap": 3.0, "window": 250}, 4),  # with a tail, and parts out of sight
        ({"cached": 303, "H": 128, "N": 2}, {}, None),  # kv heads of their own
        ({"cached": 31}, {}, None),  # nothing but a tail
    ],
    ids=str,
)
def test_decode_against_numpy(interpreted, monkeypatch, shape, options, parts):
    arrays = inputs(**{"T": 1, "H": 64, "dtype": "float16", "pads": 0} | shape)
    arrays = *arrays[:4], arrays[4].at[:, :, 64:130].set(-1)  # a block in which nothing lives
    whole = functools.partial(mosaic_decode.decode_attention, parts=parts)
    monkeypatch.setattr(mosaic_decode, "decode_attention", whole)
    compare(arrays, DECODE, {"bfloat16": 2e-2, "float16": 3e-3}[str(arrays[0].dtype)], **options)


@needs_mosaic
def test_decode_of_a_row_that_sees_nothing(interpreted):
    q, k, v, q_pos, kv_pos = inputs(T=1, H=64, cached=79, pads=0, dtype="bfloat16")
    out, lse, _ = mosaic_decode.decode_attention(q, k, v, q_pos.at[1].set(-1), bl.readable(kv_pos), spec=bl.Spec(SCALE))
    assert not np.asarray(out[1]).any()
    assert np.isneginf(lse[1]).all()
    assert np.isfinite(lse[0]).all()
    with pytest.raises(NotImplementedError, match="64 rows for the 65 query heads"):
        mosaic_decode.decode_attention(
            jnp.ones((1, 65, 1, 64)), k[:1, :1], v[:1, :1], q_pos[:1], kv_pos[:1, :1], spec=bl.Spec(SCALE)
        )
    with pytest.raises(NotImplementedError, match="tiles of slots have 8 rows, and 79 slots"):
        mosaic_decode.decode_attention(q, k[:, :, 1:], v[:, :, 1:], q_pos, kv_pos[:, :, 1:], spec=bl.Spec(SCALE))


@needs_mosaic
def test_own_softmax_and_weights(interpreted):
    rng = np.random.default_rng(0)
    multiplier = jnp.asarray(rng.uniform(0.5, 2, (2, 2, 90)), jnp.float32)
    columns = (
        Columns(softmax=Softmax(multiplier=multiplier)),
        Columns(softmax=Softmax(multiplier=multiplier, causal=False), group=None),
        Columns(weight=jnp.asarray(rng.uniform(-1, 1, (2, 90)), jnp.float32)),
    )
    compare(inputs(T=90, cached=30, H=64, dtype="float16"), columns, 3e-3)


@needs_mosaic
def test_the_interpreter_sees_races(monkeypatch, capfd):
    """Without the fence that keeps a slot until it has been read, the same kernel is reported."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
    from jax.experimental.pallas import mosaic_gpu as plgpu

    q, k, _, q_pos, kv_pos = inputs(T=300, H=64, dtype="bfloat16", B=1, pads=0)
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    raised = ""
    try:
        mosaic_colstats.attention_colstats(
            *(q, k, jnp.zeros((1, 4, 300)), q_pos, bl.readable(kv_pos)),
            spec=bl.Spec(SCALE),
            what=colstats.Pass(("p",)),
            interpret=InterpretGPUParams(detect_races=True),
        )
    except jax.errors.JaxRuntimeError as e:  # jax 0.12 raises what 0.11 prints
        raised = str(e)
    assert "RACE DETECTED" in raised + "".join(capfd.readouterr())


@needs_mosaic
def test_it_carries_hopper_alone():
    """Without the Triton backend: attention and its statistics by these kernels, the rest by XLA, with reasons."""
    without_triton("""
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from kvjax.pallas_kernels import mosaic_colstats, mosaic_flash
for module, name in ((mosaic_flash, "flash_attention"), (mosaic_colstats, "attention_colstats")):
    def run(*args, kernel=getattr(module, name), **options):
        return kernel(*args, **options, interpret=InterpretGPUParams())
    setattr(module, name, run)
arrays = inputs(T=70, cached=30, H=64, dtype="bfloat16")
logging.getLogger("kvjax.pallas_kernels").setLevel(logging.DEBUG)
columns = Columns(), Columns(element="p2", group_at="before")
run = lambda how: attention(*arrays, columns=columns, implementation=how)
found, expected = run("mosaic_gpu"), run("reference")
same(found.out, expected.out, 2e-2)
same(found.lse, expected.lse, 2e-2)
same(found.columns, expected.columns, 0.15)
assert [by for by, _ in said] == ["mosaic_gpu", "mosaic_gpu", "xla"], said
assert "all their tiles at once" in said[2][1] and "no Triton backend" in said[2][1], said
said.clear()
arrays = inputs(T=1, cached=95, H=64, pads=0, dtype="bfloat16")
found, expected = run("mosaic_gpu"), run("reference")
same(found, expected, 2e-2)
assert [by for by, _ in said] == ["mosaic_gpu"] * 3, said
""")


@pytest.mark.parametrize(
    ("shape", "column", "reason"),
    [
        ({"H": 80, "dtype": "bfloat16"}, Columns(), "head dimensions are 64 or 128"),
        ({"H": 64, "dtype": "float32"}, Columns(), "not float32"),
        ({"H": 64, "dtype": "bfloat16"}, Columns(element="p2", group_at="before"), "all their tiles at once"),
    ],
    ids=["head_dim", "dtype", "before"],
)
def test_what_it_does_not_serve(shape, column, reason):
    arrays = inputs(T=8, **shape)
    q, k, _, q_pos, kv_pos = arrays
    result = None, jnp.zeros(q.shape[:3]), None
    with pytest.raises(NotImplementedError, match="jax >= 0.11.2" if OLD else reason):
        gpu.column(column, q, k, result, q_pos, kv_pos, logits=bl.Spec(SCALE), backend="mosaic_gpu")


@pytest.mark.skipif(not OLD, reason="this jax has the kernels")
def test_an_older_jax_goes_on_with_triton():
    arrays = inputs(T=8, H=64, dtype="bfloat16")
    with pytest.raises(ValueError, match="interpret mode"):  # Triton was tried, and this machine has no GPU
        attention(*arrays, implementation="mosaic_gpu")
