"""The Pallas kernels, interpreted, against float64 numpy; and how an implementation is chosen."""

import functools
import logging
import pathlib
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import pallas_kernels
from kvjax.pallas_kernels import Columns, Logits, Softmax, api, attention, colstats, decode, flash, pooled_attention
from kvjax.pallas_kernels import blocks as bl
from tests import test_kernels, test_pooled
from tests.references import attention as numpy_reference
from tests.test_kernels import COLUMNS, TOLERANCE, compare, inputs

pytestmark = pytest.mark.slow  # minutes of interpretation

ROOT = pathlib.Path(__file__).parents[1]
FEW = (
    Columns(),
    Columns(rows=6, group="max"),
    Columns(element="p2", group_at="before"),
    Columns(element="above", group=None),
)


WIDTHS, HALVES = (8, 64, 80, 96, 128, 256), ("bfloat16", "float16")
ONE = {"T": 1, "pads": 0}  # a decode step
CASES = [  # (shape, columns, options)
    *(({"T": 37, "cached": 6, "H": H}, FEW, {}) for H in WIDTHS),
    # More rows than a block of 64, so that several blocks meet.
    *(({"T": 70, "cached": 20, "H": H, "dtype": half, "K": 1}, FEW, {}) for half in HALVES for H in WIDTHS[2:]),
    *(({"T": 150, "cached": 9, "H": 64, "dtype": half, "K": 1}, FEW, {}) for half in HALVES),
    *(({"N": N, "K": K, "T": 21}, FEW, {}) for N, K in ((2, 2), (7, 1))),
    *(({"T": T, "cached": cached}, FEW, {}) for T, cached in ((2, 0), (16, 16), (17, 70))),
    ({"T": 37, "cached": 6}, COLUMNS, {}),
    *((shape, FEW, {"window": 7, "scale": 0.7}) for shape in ({**ONE, "cached": 31}, {"T": 50, "cached": 31})),
    *((shape, FEW, {"softcap": 3.0}) for shape in ({**ONE, "cached": 31}, {"T": 50, "cached": 31})),
    *(({**ONE, "cached": 53, "H": H}, COLUMNS[::4], {}) for H in WIDTHS),
    ({**ONE, "cached": 20}, (*COLUMNS, Columns(summed=False), Columns(summed=False, group=None)), {}),
    *(({**ONE, "cached": 150, "H": H, "dtype": half}, FEW, {}) for half in HALVES for H in WIDTHS[2:]),
    ({**ONE, "cached": 200, "N": 2, "K": 2, "H": 64, "dtype": "bfloat16"}, FEW, {}),
    ({**ONE, "cached": 200, "N": 7, "K": 1, "H": 64, "dtype": "float16"}, FEW, {}),
    ({**ONE, "cached": 200, "N": 32, "K": 1, "H": 64, "dtype": "bfloat16"}, FEW, {}),
]


@pytest.mark.parametrize(
    ("shape", "columns", "options"), CASES, ids=[f"{shape} {options or ''}" for shape, _, options in CASES]
)
def test_against_numpy(shape, columns, options):
    compare(inputs(**shape), columns, "interpret", TOLERANCE[shape.get("dtype", "float32")], logits=Logits(**options))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("T", [1, 90])
def test_half_precision_under_softcap_and_window(dtype, H, T):
    """Caps and windows that matter: logits reach twice the cap, and rows of a block see different keys."""
    q, *arrays = inputs(T=T, cached=70, H=H, dtype=dtype, pads=0 if T == 1 else 5)
    columns = (*FEW, Columns(softmax=Softmax(seed=test_kernels.SEED, noise="gumbel")), Columns(count_self=False))
    compare((3 * q, *arrays), columns, "interpret", TOLERANCE[dtype], logits=Logits(softcap=4.0, window=33))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_of_a_pool_under_softcap_and_window(dtype):
    q, *arrays = test_pooled.inputs(N=8, K=2, P=150, H=64, dtype=dtype)
    columns = (*FEW[::2], Columns(group=None), Columns(count_self=False))
    logits = Logits(softcap=4.0, window=70)
    test_pooled.compare((3 * q, *arrays), 2, columns, "interpret", TOLERANCE[dtype], logits=logits)


@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (64, 16)], ids=str)
def test_any_block_size(sizes):
    q, k, v, q_pos, kv_pos = inputs(T=97, cached=5)
    sizes = bl.BlockSizes(*sizes)
    spec = bl.Spec(0.3)
    how = {"columns": (Columns(group="sum"),), "logits": Logits(0.3)}
    out, lse, (sums,) = numpy_reference.attention(q, k, v, q_pos, kv_pos, **how)
    keys = bl.readable(kv_pos)
    found, found_lse = flash.flash_attention(q, k, v, q_pos, keys, spec=spec, sizes=sizes, interpret=True)
    np.testing.assert_allclose(found, out, atol=2e-5)
    np.testing.assert_allclose(found_lse, lse, atol=2e-5)
    what = colstats.Pass(("p", "p2"), "sum")
    p, p2 = colstats.attention_colstats(q, k, found_lse, q_pos, keys, spec=spec, what=what, sizes=sizes, interpret=True)
    np.testing.assert_allclose(p, sums, atol=1e-4)
    assert (np.asarray(p2) <= np.asarray(p) + 1e-6).all()


@pytest.mark.parametrize("T", [1, 40])
def test_bias_of_the_entry_point(T):
    arrays = inputs(T=T, cached=20, pads=0)
    multiplier = jnp.asarray(np.random.default_rng(2).uniform(-1, 2, (2, 2, T)), jnp.float32).at[:, :, ::3].set(0.0)
    seed = jnp.asarray([3, 4], jnp.uint32)
    columns = (
        *FEW,
        Columns(softmax=Softmax(causal=False)),
        Columns(softmax=Softmax(multiplier=multiplier)),
        Columns(softmax=Softmax(multiplier=multiplier, seed=seed, noise="gumbel"), element="p2", group_at="before"),
    )
    options = {"bias": test_kernels.some_bias(arrays[4], 4), "logits": Logits(softcap=3.0)}
    compare(arrays, columns, "interpret", TOLERANCE["float32"], **options)
    run = functools.partial(attention, *arrays, logits=options["logits"])
    loss = lambda bias, name: (run(bias=bias, implementation=name).out ** 2).sum()
    found, expected = (jax.grad(loss)(options["bias"], name) for name in ("interpret", "xla"))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(found).max() > 0.01


@pytest.mark.parametrize("split", [16, 48, 64])
def test_decode_splits(split):
    q, k, v, q_pos, kv_pos = inputs(T=1, cached=600, pads=0)  # 38 parts of 16, joined in two blocks
    kv_pos = kv_pos.at[:, :, 16:40].set(-1)  # a part in which nothing lives
    out, lse, _ = numpy_reference.attention(q, k, v, q_pos, kv_pos, logits=Logits(0.3))
    found = decode.decode_attention(
        *(q, k, v, q_pos, kv_pos),
        spec=bl.Spec(0.3),
        sizes=bl.BlockSizes(16, 16, split=split),
        interpret=True,
    )
    np.testing.assert_allclose(found[0], out, atol=2e-5)
    np.testing.assert_allclose(found[1], lse, atol=2e-5)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"N": 4, "K": 1, "H": 80},
        {"N": 7, "K": 7, "H": 64, "dtype": "bfloat16"},
        {"N": 12, "K": 4, "P": 200, "H": 96, "dtype": "float16"},
        {"N": 40, "K": 2, "P": 33, "H": 128, "B": 1},
        {"N": 4, "K": 2, "P": 60, "H": 256},
        {"N": 4, "K": 2, "P": 150, "H": 256, "dtype": "bfloat16"},
        {"N": 4, "K": 2, "P": 150, "H": 128, "dtype": "bfloat16"},
        {"N": 8, "K": 2, "P": 150, "H": 80, "dtype": "bfloat16"},
        {"N": 4, "K": 2, "P": 150, "H": 128, "dtype": "float16"},
        {"N": 4, "K": 2, "P": 150, "H": 256, "dtype": "float16"},
    ],
    ids=str,
)
def test_pool(shape):
    tolerance = TOLERANCE[shape.get("dtype", "float32")]
    columns = test_pooled.COLUMNS if not shape else (*FEW[::2], Columns(group=None), Columns(summed=False))
    test_pooled.compare(test_pooled.inputs(**shape), shape.get("K", 3), columns, "interpret", tolerance)


@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(
    T=st.sampled_from([1, 40]),
    S=st.sampled_from([7, 50]),
    window=st.sampled_from([None, 9]),
    causal=st.booleans(),
    seed=st.integers(0, 999),
)
def test_blocks_that_meet(T, S, window, causal, seed):
    """Every visible pair lies in the range of blocks that is visited, and visible keys are counted exactly."""
    rng = np.random.default_rng(seed)
    q_pos = np.where(rng.random((1, T)) < 0.2, -1, rng.permutation(60)[:T])
    kv_pos = np.where(rng.random((1, 1, S)) < 0.2, -1, rng.permutation(60)[:S])
    rows, keys = q_pos[0][:, None], kv_pos[0, 0][None]
    seen = (keys >= 0) & ((keys <= rows) if causal else (rows >= 0))
    seen &= True if window is None else rows - keys < window
    spec, q_pos, keys = bl.Spec(1.0, window=window, causal=causal), jnp.asarray(q_pos), bl.readable(jnp.asarray(kv_pos))
    np.testing.assert_array_equal(bl.count_visible(spec, q_pos, keys)[0, 0], seen.sum(1))
    meet = bl.meetings(spec, q_pos, keys, 16, 16)
    first, stop = (np.asarray(x)[0, 0] for x in bl.first_and_stop(meet))
    for t, s in zip(*np.nonzero(seen), strict=True):
        assert meet[0, 0, t // 16, s // 16]
        assert first[t // 16] <= s // 16 < stop[t // 16]
    for i in range(-(-T // 16)):
        assert seen[16 * i : 16 * i + 16].any() or first[i] == stop[i] or not causal or window is not None


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "window": 9}], ids=str)
@pytest.mark.parametrize("operation", ["attention", "pool"])
def test_gradients_are_those_of_xla(operation, options):
    """Of output and logsumexp."""
    if operation == "attention":
        arrays, run = inputs(T=33, H=8), attention
    else:
        arrays = test_pooled.inputs()
        run = functools.partial(pooled_attention, num_kv_heads=3)

    def grads(implementation):
        def f(*x):
            found = run(*x, *arrays[3:], implementation=implementation, logits=Logits(**options))
            return (found.out**2).sum() + jnp.where(jnp.isfinite(found.lse), found.lse, 0.0).sum()

        return jax.grad(f, argnums=(0, 1, 2))(*arrays[:3])

    for a, b in zip(grads("interpret"), grads("xla"), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
        assert np.abs(np.asarray(a)).max() > 1e-2


def test_what_no_kernel_serves_is_computed_elsewhere_and_said(caplog):
    noisy = Softmax(seed=test_kernels.SEED, noise="gaussian")
    columns = (Columns(summed=False, rows=3), Columns(softmax=noisy), Columns())
    with caplog.at_level(logging.INFO, logger="kvjax.pallas_kernels"):
        compare(inputs(T=20), columns, "interpret", TOLERANCE["float32"])
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2
    assert "is computed by xla, because of interpret: rows that are not summed" in said[0]
    assert "gaussian noise is not drawn" in said[1]


@pytest.mark.parametrize("T", [1, 9])
def test_64_bits_are_not_interpreted_and_it_is_said(caplog, T):
    arrays = inputs(T=T, cached=5, pads=0)
    expected = attention(*arrays, columns=FEW, implementation="xla")
    with jax.enable_x64(True), caplog.at_level(logging.INFO, logger="kvjax.pallas_kernels"):
        found = jax.jit(lambda *x: attention(*x, columns=FEW, implementation="interpret"))(*arrays)
    assert "kernels are not interpreted under jax_enable_x64" in caplog.records[0].getMessage()
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, atol=TOLERANCE["float32"])


WITHOUT_TRITON = """
import importlib.abc, logging, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("jax.experimental.pallas.triton", "jax._src.pallas.triton")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import jax
import jax.numpy as jnp
import numpy as np
from kvjax import pallas_kernels
from kvjax.pallas_kernels import Columns, attention, gpu, pooled_attention, pytree
from tests.test_kernels import inputs
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append((record.by, record.getMessage()))
logging.getLogger("kvjax.pallas_kernels").addHandler(handler)
logging.getLogger("kvjax.pallas_kernels").setLevel(logging.INFO)
same = lambda x, y, tolerance: [
    np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), atol=tolerance)
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
]
"""


def without_triton(code):
    """Runs code in a process whose jax has lost the Triton backend."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON + code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_the_triton_backend_xla_goes_on_and_says_why():
    without_triton("""
for T in (1, 12):
    arrays = inputs(T=T, cached=9, pads=0)
    run = lambda how: attention(*arrays, columns=(Columns(),), implementation=how)
    for how in ("triton", "interpret", "mosaic_gpu"):
        same(run(how), run("xla"), 0)
    same(run(None), run("reference"), 1e-4)
q, k, v, q_pos, kv_pos = inputs(T=1, cached=9, pads=0)
pool = q, k[:, 0], v[:, 0], jnp.ones_like(kv_pos[:, 0]), q_pos, kv_pos[:, 0]
run = lambda how: pooled_attention(*pool, columns=(Columns(),), num_kv_heads=2, implementation=how)
same(run("triton"), run("xla"), 0)
assert len(said) == 7, said
assert {by for by, _ in said} == {"xla"}, said
assert all("has no Triton backend of Pallas" in why for _, why in said), said
""")


def test_all_reasons_are_kept():
    def no(reason):
        raise NotImplementedError(reason)

    tries = [("a", lambda: no("too big")), ("b", lambda: no("too small"))]
    with pytest.raises(NotImplementedError, match="nothing computes x: a: too big; b: too small"):
        api.first_served("x", tries)
    assert api.first_served("x", [*tries, ("c", lambda: 3)]) == ("c", 3)


def test_a_whole_run_can_choose(monkeypatch):
    arrays = inputs(T=20)
    tried = []
    first_served = api.first_served
    monkeypatch.setattr(api, "first_served", lambda name, tries: tried.append(tries[0][0]) or first_served(name, tries))
    run = jax.jit(lambda *a: attention(*a).out)
    before = run(*arrays)
    assert not tried
    with pallas_kernels.use("interpret"):
        inside = run(*arrays)
        assert tried == ["interpret"]
        with pallas_kernels.use("reference"):
            run(*arrays)
        assert tried == ["interpret"]
    run(*arrays)
    assert tried == ["interpret"]
    np.testing.assert_allclose(before, inside, atol=2e-5)


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="block_q=48 must be a power of two"):
        bl.BlockSizes(48, 64)
    with pytest.raises(ValueError, match="split=100 must be a multiple of block_k=64"):
        bl.BlockSizes(64, 64, split=100)
    with pytest.raises(NotImplementedError, match="not float64"), jax.enable_x64(True):
        bl.check_inputs(jnp.ones(3, jnp.float64))
