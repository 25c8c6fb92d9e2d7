"""Attention with column statistics: every implementation against float64 numpy."""

import dataclasses
import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from kvjax.pallas_kernels import Columns, Logits, Softmax, attention, hash_uniform, xla
from kvjax.pallas_kernels.columns import draw_exponential, draw_noise, minus_log
from kvjax.pallas_kernels.loops import Tile
from kvjax.pallas_kernels.tiles import tile_size
from tests.marks import slow_but
from tests.references import attention as numpy_reference

IMPLEMENTATIONS = ("xla", "reference")
EVERY = (*IMPLEMENTATIONS, pytest.param("interpret", marks=pytest.mark.slow))
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}

NOTHING = jnp.asarray([0.5, -2.0, 4.0, -50.0])  # logits for nothing of four query heads

COLUMNS = (
    *(
        Columns(rows=rows, element=element, group=group, group_at=at)
        for rows, element, group, at in itertools.product(
            (None, 3), ("p", "p2", "above"), ("mean", "max", "sum", None), ("before", "after")
        )
        if not (group is None and at == "before")
    ),
    Columns(element="above", threshold="1/position"),
    Columns(element="above", threshold=0.05),
)


def inputs(*, B=2, N=4, K=2, T=37, cached=0, H=8, pads=5, dead=0.3, dtype="float32", seed=0):
    """Queries behind `cached` slots in random order, some of them dead; the second row is padded on the left."""
    rng = np.random.default_rng(seed)
    S = cached + T
    q, k, v = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((B, N, T, H), (B, K, S, H), (B, K, S, H)))
    lengths = np.full(B, T)
    lengths[1:] = max(1, T - pads)
    column = np.arange(T) - (T - lengths)[:, None]
    q_pos = np.where(column >= 0, column + cached, -1)
    old = np.stack([[rng.permutation(cached) for _ in range(K)] for _ in range(B)]).reshape(B, K, cached)
    old = np.where(rng.random(old.shape) < dead, -1, old)
    kv_pos = np.concatenate([old, np.broadcast_to(q_pos[:, None], (B, K, T))], axis=-1)
    return q, k, v, jnp.asarray(q_pos, jnp.int32), jnp.asarray(kv_pos, jnp.int32)


def compare(arrays, columns, implementation, tolerance, **options):
    check(functools.partial(attention, implementation=implementation), arrays, columns, tolerance, **options)


def check_every_number(run, arrays, columns, tolerance, of_columns, **options):
    """Whether an implementation gives what numpy does, of statistics too without an exception."""
    found = jax.jit(functools.partial(run, columns=columns, **options))(*arrays)
    out, lse, measured = numpy_reference.attention(*arrays, columns=columns, **options)
    np.testing.assert_allclose(np.asarray(found.out, np.float64), out, atol=tolerance)
    np.testing.assert_allclose(found.lse, lse, atol=tolerance)
    for x, expected in zip(found.columns, measured, strict=True):
        np.testing.assert_allclose(x, expected, atol=of_columns)


def check(run, arrays, columns, tolerance, **options):
    """Whether an implementation gives what numpy does."""
    found = jax.jit(functools.partial(run, columns=columns, **options))(*arrays)
    out, lse, measured = numpy_reference.attention(*arrays, columns=columns, **options)
    np.testing.assert_allclose(np.asarray(found.out, np.float64), out, atol=tolerance)
    np.testing.assert_allclose(found.lse, lse, atol=tolerance)
    assert found.lse.dtype == jnp.float32
    for c, x, expected in zip(columns, found.columns, measured, strict=True):
        assert x.dtype == jnp.float32
        # Probabilities next to a threshold may fall on either side of it in another precision.
        slack = 1.0 if c.element == "above" else 0.0
        assert np.mean(np.abs(np.asarray(x) - expected) > tolerance * max(1, arrays[0].shape[2]) ** 0.5) <= (
            0.02 if slack else 0.0
        ), c


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"T": 1, "cached": 20, "pads": 0},
        pytest.param({"N": 4, "K": 4, "T": 150, "cached": 9}, marks=pytest.mark.slow),
        pytest.param({"N": 6, "K": 1, "T": 130, "H": 16}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_against_numpy(implementation, shape):
    compare(inputs(**shape), COLUMNS, implementation, TOLERANCE["float32"])


@pytest.mark.parametrize("shape", [{"T": 21}, {"T": 1, "cached": 31, "pads": 0}], ids=["prompt", "step"])
def test_the_pallas_kernels_interpreted(shape):
    """Of `test_pallas.py`, which is slow: a prompt, and a decode step."""
    columns = Columns(), Columns(rows=6, group="max"), Columns(softmax=Softmax(before=jnp.asarray([20, 9], jnp.int32)))
    compare(inputs(**shape), columns, "interpret", TOLERANCE["float32"], logits=Logits(nothing=NOTHING))


def some_bias(kv_pos, N):
    """ALiBi of some query heads; every seventh position is dead by -inf."""
    kv_pos = np.repeat(np.asarray(kv_pos), N // kv_pos.shape[1], axis=1)
    slopes = 2.0 ** -np.arange(1, N + 1)
    return jnp.asarray(np.where(kv_pos % 7 == 3, -np.inf, slopes[None, :, None] * kv_pos), jnp.float32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("T", [1, 70])
def test_bias(implementation, T):
    arrays = inputs(T=T, cached=11, pads=0 if T == 1 else 5)
    columns = Columns(), Columns(element="p2", group_at="before"), Columns(softmax=Softmax(causal=False))
    how = {"bias": some_bias(arrays[4], 4), "logits": Logits(softcap=3.0, nothing=NOTHING)}
    compare(arrays, columns, implementation, TOLERANCE["float32"], **how)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("T", [1, 40])
def test_a_multiplier_of_zero_shows_no_hidden_key(implementation, T):
    """0 times -inf is no probability; the others share the row evenly."""
    arrays = inputs(T=T, cached=11, pads=0)
    bias = some_bias(arrays[4], 4)
    columns = Columns(softmax=Softmax(multiplier=jnp.zeros((2, 2, T))), group=None), Columns()
    compare(arrays, columns, implementation, TOLERANCE["float32"], bias=bias)
    (sums, _) = attention(*arrays, columns=columns, bias=bias, implementation=implementation).columns
    assert np.isneginf(bias).any()
    assert (np.asarray(sums)[np.isneginf(bias)] == 0).all()
    np.testing.assert_allclose(sums.sum(-1), T, rtol=1e-5)


CAPPED = {"softcap": 3.0, "window": 20}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("T", "options"),
    [
        *((1, {}), (40, {}), (1, CAPPED), (150, CAPPED)),
        *(pytest.param(*p, marks=pytest.mark.exhaustive) for p in ((150, {}), (40, CAPPED))),
    ],
    ids=str,
)
def test_gradients_of_a_bias(T, options):
    """Central finite differences in float64, along a random direction; nothing flows to a dead or a hidden slot."""
    with jax.enable_x64(True):
        q, k, v, q_pos, kv_pos = inputs(T=T, cached=5, pads=0 if T == 1 else 3)
        q, k, v = (x.astype(jnp.float64) for x in (q, k, v))
        bias = some_bias(kv_pos, 4).astype(jnp.float64)
        direction = jnp.asarray(np.random.default_rng(1).normal(size=bias.shape))
        direction = jnp.where(jnp.isfinite(bias), direction, 0.0)

        def loss(bias):
            found = attention(q, k, v, q_pos, kv_pos, bias=bias, implementation="xla", logits=Logits(**options))
            return (found.out**2).sum() + jnp.where(jnp.isfinite(found.lse), found.lse, 0.0).sum()

        grad = jax.grad(loss)(bias)
        step = 1e-5
        difference = (loss(bias + step * direction) - loss(bias - step * direction)) / (2 * step)
        np.testing.assert_allclose((grad * direction).sum(), difference, rtol=1e-6)
        dead = np.repeat(np.asarray(kv_pos) < 0, 2, axis=1) | ~np.isfinite(bias)
        assert dead.any()
        assert (np.asarray(grad)[dead] == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", [{"window": 7}, {"softcap": 3.0}, {"scale": 0.7}], ids=str)
def test_options(implementation, options):
    columns = (Columns(), Columns(rows=2, element="p2", group_at="before"), Columns(element="above", group_at="before"))
    compare(inputs(T=70, cached=11), columns, implementation, TOLERANCE["float32"], logits=Logits(**options))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_half_precision_inputs(implementation, dtype):
    columns = (Columns(), Columns(element="p2", group_at="before"), Columns(rows=4))
    compare(inputs(T=66, dtype=dtype), columns, implementation, TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", EVERY)
def test_row_weights(implementation):
    weight = jnp.asarray(np.random.default_rng(3).uniform(-1, 1, (2, 40)), jnp.float32)
    columns = [Columns(weight=weight, rows=r, element=e) for r, e in itertools.product((None, 6), ("p", "p2", "above"))]
    columns.append(Columns(weight=weight, rows=6, element="p2", group_at="before"))
    compare(inputs(T=40), columns, implementation, TOLERANCE["float32"])


SEED = jnp.asarray([3, 0xFFFFFFFF], jnp.uint32)
OWN = (
    Softmax(),
    Softmax(causal=False),
    Softmax(before=jnp.asarray([20, 9], jnp.int32)),
    Softmax(noise="constant"),
    *(Softmax(seed=SEED, noise=noise, per=per) for noise in ("gumbel", "gaussian") for per in ("call", "key")),
)


@pytest.mark.parametrize("implementation", slow_but([*IMPLEMENTATIONS, "interpret"], "xla"))
@pytest.mark.parametrize(
    "shape", [pytest.param({"T": 45, "cached": 6}, marks=pytest.mark.slow), {"T": 1, "cached": 20, "pads": 0}], ids=str
)
def test_own_softmax(implementation, shape):
    arrays = inputs(**shape)
    T = arrays[0].shape[2]
    multiplier = jnp.asarray(np.random.default_rng(5).uniform(0.3, 2, (2, 2, T)), jnp.float32)
    columns = (
        *(Columns(softmax=own) for own in OWN),
        *(Columns(softmax=dataclasses.replace(own, multiplier=multiplier), rows=7) for own in OWN),
        Columns(softmax=OWN[4], element="p2", group_at="before"),
        Columns(softmax=dataclasses.replace(OWN[4], multiplier=jnp.ones_like(multiplier)), group="max"),
        Columns(softmax=OWN[1], element="above", group=None),
        Columns(count_self=False),
        Columns(count_self=False, element="p2", group_at="before", rows=9),
    )
    compare(arrays, columns, implementation, TOLERANCE["float32"])
    logits = Logits(softcap=2.0, window=9, nothing=NOTHING)
    compare(arrays, columns[::4], implementation, TOLERANCE["float32"], logits=logits)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_that_are_not_summed(implementation):
    columns = [
        Columns(rows=rows, element=element, group=group, group_at=at, summed=False)
        for rows, (element, group, at) in itertools.product(
            (1, 5, 40, None),
            (("p", "mean", "after"), ("p", None, "after"), ("p2", "mean", "before"), ("above", "max", "after")),
        )
    ]
    compare(inputs(T=37, cached=8), columns, implementation, TOLERANCE["float32"])
    compare(inputs(T=150), columns[:8], implementation, TOLERANCE["float32"])


def test_the_hash_is_uniform_and_uncorrelated():
    grid = hash_uniform(jnp.uint32(7), jnp.arange(400)[:, None], jnp.arange(400)[None])
    u = np.asarray(grid, np.float64)
    assert 0 < u.min() < u.max() < 1
    assert scipy.stats.kstest(u.ravel(), "uniform").pvalue > 1e-3
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u, u.T)):
        off_diagonal = a[a != b], b[a != b]
        assert abs(np.corrcoef(*off_diagonal)[0, 1]) < 0.012
    other = np.asarray(hash_uniform(jnp.uint32(8), jnp.arange(400)[:, None], jnp.arange(400)[None]))
    assert abs(np.corrcoef(u.ravel(), other.ravel())[0, 1]) < 0.012
    assert numpy_reference.hash_uniform(7, 3, 9) == pytest.approx(u[3, 9], abs=1e-7)


@pytest.mark.parametrize("per", ["call", "key"])
def test_exponential_draws_are_those_of_the_gumbel_noise(per):
    spec = Softmax(seed=SEED, noise="gumbel", per=per)
    seed, head, rows, keys = SEED[0], jnp.int32(3), jnp.arange(300)[:, None], jnp.arange(300)[None]
    e = np.asarray(draw_exponential(spec, seed, head, rows, keys), np.float64)
    np.testing.assert_allclose(-np.log(e), draw_noise(spec, seed, head, rows, keys), atol=2e-5)
    assert scipy.stats.kstest((e if per == "call" else e[0]).ravel(), "expon").pvalue > 1e-3
    ends = np.arange(1, 2**24, 2**12 - 1, dtype=np.float64)
    u = np.concatenate([ends, 2**24 - ends]) * 2.0**-24
    np.testing.assert_allclose(minus_log(jnp.asarray(u, jnp.float32)), -np.log(u), rtol=1e-6)


@pytest.mark.parametrize(
    "block",
    [
        (1, 2),
        pytest.param((7, 1), marks=pytest.mark.slow),
        *(pytest.param(block, marks=pytest.mark.exhaustive) for block in ((200, 2), (32, 2), (64, 1))),
    ],
)
def test_any_block_size(block):
    run = functools.partial(xla.attention, block=block)
    check_every_number(run, inputs(T=97, cached=5), COLUMNS[:6], 2e-5, 1e-4, logits=Logits(0.3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tile", "shape", "options"),
    [
        ((8, 16, 2), {"T": 53, "cached": 9}, {"window": 11, "softcap": 3.0}),
        ((16, 24, 1), {"T": 40, "cached": 30, "dead": 0.0, "pads": 0}, {"bias": True}),
        ((16, 24, 4), {"T": 40, "cached": 0, "dtype": "bfloat16"}, {}),
    ],
    ids=str,
)
def test_tiles_of_rows_that_no_statistic_reads(tile, shape, options):
    """Columns of the last rows take whole rows; the others go by tiles, where padding, biases and windows hold too."""
    arrays = inputs(**shape)
    tolerance = TOLERANCE[shape.get("dtype", "float32")]
    biased = {"bias": some_bias(arrays[4], 4)} if "bias" in options else {}
    logits = Logits(0.3, options.get("softcap"), options.get("window"))
    columns = Columns(rows=5), Columns(rows=3, element="p2", group_at="before"), Columns(rows=2, summed=False)
    run = functools.partial(xla.attention, block=(8, 2), tile=tile)
    for seen in (columns, ()):
        check_every_number(run, arrays, seen, tolerance, 10 * tolerance, logits=logits, **biased)


@pytest.mark.parametrize(
    ("num_rows", "cores", "rows"), [(4096, 1, 256), (4096, 2, 512), (3968, 2, 256), (3840, 2, 256)]
)
def test_several_cores_share_larger_tiles(num_rows, cores, rows):
    """But for rows that would be left over."""
    assert tile_size(4, num_rows, 4096, cores) == Tile(rows, rows, 1)


@pytest.mark.slow
def test_gradients_through_tiles():
    q, k, v, q_pos, kv_pos = inputs(T=48, H=4)

    def grads(tile):
        how = {"logits": Logits(0.5, window=20), "block": (8, 4), "tile": tile}
        f = lambda *x: (xla.attention(*x, q_pos, kv_pos, **how).out ** 2).sum()
        return jax.jit(jax.grad(f, argnums=(0, 1, 2)))(q, k, v)

    for a, b in zip(grads((16, 16, 1)), grads(None), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@hypothesis.settings(max_examples=6, deadline=None)
@hypothesis.given(
    K=st.integers(1, 3), G=st.integers(1, 3), T=st.integers(1, 40), cached=st.integers(0, 20), seed=st.integers(0, 99)
)
def test_any_shape(K, G, T, cached, seed):
    arrays = inputs(N=K * G, K=K, T=T, cached=cached, pads=T // 2, seed=seed)
    compare(arrays, (Columns(), Columns(rows=5, group="max")), "xla", TOLERANCE["float32"])


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize("T", [1, 8])
def test_rows_that_see_nothing(T, implementation):
    q, k, v, q_pos, kv_pos = inputs(T=T, cached=3, pads=0)
    hidden = jnp.full_like(q_pos, -1)
    result = attention(q, k, v, hidden, kv_pos, columns=[Columns()], implementation=implementation)
    assert not np.asarray(result.out).any()
    assert np.isneginf(result.lse).all()
    assert not np.asarray(result.columns[0]).any()


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 2])
@pytest.mark.parametrize("implementation", EVERY)
def test_the_only_key_of_a_row_is_above_no_threshold(implementation, T):
    """The first row of 300 sees itself alone: its probability is 1, not above 1 / 1, however that was rounded."""
    q, k, v, *_ = inputs(B=300, T=T)
    rows = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (300, T))
    slots = jnp.broadcast_to(rows[:, None], (300, 2, T))
    first = jnp.zeros((300, T)).at[:, 0].set(1.0)
    for threshold in ("1/visible", "1/position", 1.0):
        for at in ("before", "after"):
            spec = Columns(element="above", threshold=threshold, group="max", group_at=at, weight=first)
            found = attention(3 * q, k, v, rows, slots, columns=[spec], implementation=implementation)
            assert not np.asarray(found.columns[0]).any(), (threshold, at)
    spec = Columns(element="above", group="sum", group_at="before", weight=first)
    found = attention(q, k, v, rows, slots, columns=[spec], implementation=implementation).columns[0]
    np.testing.assert_array_equal(found[..., 0], 1.0)  # two heads' sum is 2
    assert not np.asarray(found[..., 1:]).any()


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 37])
@pytest.mark.parametrize("implementation", EVERY)
def test_no_probability_of_a_uniform_row_is_above_average(implementation, T):
    """Equal keys: every probability of a row is one over those it sees, however it, or a group's mean, was rounded."""
    q, _, v, q_pos, kv_pos = inputs(N=6, T=T, cached=40)
    k = jnp.broadcast_to(jnp.linspace(-1.0, 1.0, 8), v.shape)
    columns = [
        Columns(element="above", threshold=threshold, group=group, group_at=at)
        for threshold, (group, at) in itertools.product(
            ("1/visible", 1 / 40), (("mean", "before"), ("max", "before"), (None, "after"))
        )
    ]
    found = attention(4 * q, k, v, q_pos, kv_pos, columns=columns, implementation=implementation).columns
    for c, x in zip(columns, found, strict=True):
        if c.threshold == "1/visible":
            assert not np.asarray(x).any(), c
    # Dead slots leave rows that see fewer than 40 keys, whose probabilities are above 1 / 40, and rows that see more.
    seen = ((kv_pos[:, :, None] >= 0) & (kv_pos[:, :, None] <= q_pos[:, None, :, None])).sum(-1)
    wanted = jnp.where((seen > 0) & (seen < 40), seen, 0).sum(-1)
    for x in found[len(found) // 2 :]:
        np.testing.assert_array_equal(
            x.reshape(2, 2, -1, x.shape[-1]).sum(-1), wanted[..., None].repeat(x.shape[1] // 2, -1)
        )


def check_differences(f, at, grads):
    """Gradients are central differences of a function along a random direction for each argument."""
    rng = np.random.default_rng(2)
    for i, g in enumerate(grads):
        direction = jnp.asarray(rng.standard_normal(g.shape))
        shifted = lambda e, i=i, d=direction: [x + e * d if j == i else x for j, x in enumerate(at)]
        eps = 1e-6
        numeric = (f(*shifted(eps)) - f(*shifted(-eps))) / (2 * eps)
        np.testing.assert_allclose((g * direction).sum(), numeric, rtol=1e-6)


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_gradients_against_finite_differences(softcap):
    with jax.enable_x64(True):
        arrays = [x.astype(jnp.float64) if x.dtype == jnp.float32 else x for x in inputs(T=11, cached=3, H=4)]
        q_pos, kv_pos = arrays[3:]
        mix = jnp.asarray(np.random.default_rng(1).standard_normal(arrays[0].shape))

        def f(q, k, v):
            result = attention(q, k, v, q_pos, kv_pos, logits=Logits(softcap=softcap), implementation="xla")
            lse = jnp.where(jnp.isfinite(result.lse), result.lse, 0.0)
            return (jnp.sin(result.out) * mix).sum() + (lse**2).sum()

        grads = jax.grad(f, argnums=(0, 1, 2))(*arrays[:3])
        check_differences(f, arrays[:3], grads)


@pytest.mark.parametrize(("T", "options"), [(140, {"window": 50}), (40, {"softcap": 3.0, "bias": True})], ids=str)
def test_gradients_equal_the_references(T, options):
    q, k, v, q_pos, kv_pos = inputs(T=T, cached=5, H=4)
    bias = some_bias(kv_pos, 4) if "bias" in options else None

    def grads(implementation):
        def f(nothing, *x):
            logits = Logits(softcap=options.get("softcap"), window=options.get("window"), nothing=nothing)
            how = {"bias": bias, "logits": logits, "implementation": implementation}
            return (attention(*x, q_pos, kv_pos, **how).out ** 2).sum()

        return jax.grad(f, argnums=(0, 1, 2, 3))(NOTHING, q, k, v)

    for a, b in zip(grads("xla"), grads("reference"), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


@pytest.mark.parametrize("implementation", ["xla", EVERY[-1]])
def test_statistics_have_no_silent_gradient(implementation):
    q, k, v, q_pos, kv_pos = inputs(T=8)
    run = lambda q: attention(q, k, v, q_pos, kv_pos, columns=[Columns()], implementation=implementation)
    with pytest.raises(NotImplementedError, match="no gradient"):
        jax.grad(lambda q: run(q).columns[0].sum())(q)
    assert np.isfinite(jax.grad(lambda q: run(q).out.sum())(q)).all()


@pytest.mark.parametrize(("implementation", "T"), [("xla", 300), pytest.param("interpret", 70, marks=pytest.mark.slow)])
def test_repeatable(implementation, T):
    arrays, columns = inputs(T=T), [Columns(), Columns(element="p2", group_at="before")]
    run = jax.jit(lambda *a: attention(*a, columns=columns, implementation=implementation))
    first, second = run(*arrays), run(*arrays)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


def compiled_bytes(T, columns):
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 4, T, 16), (1, 2, T, 16), (1, 2, T, 16))]
    ints = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((1, T), (1, 2, T))]
    run = lambda *a: attention(*a, columns=columns)
    return jax.jit(run).lower(*shapes, *ints).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_grows_linearly():
    """No N x N array: four times the prompt takes about four times the memory, statistics included."""
    columns = (Columns(), Columns(element="p2", group_at="before"), Columns(rows=32))
    short, long = compiled_bytes(4096, columns), compiled_bytes(16384, columns)
    assert long < 4.5 * short
    assert long < 4 * 4096 * 16384  # one float32 matrix of a single head at the shorter length alone would be larger
