"""Attention over a flat pool of slots with owners: against float64 numpy, head by head."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import Columns, Logits, Softmax, pooled, pooled_attention
from tests.marks import slow_but
from tests.references import attention as numpy_reference
from tests.test_kernels import IMPLEMENTATIONS, OWN, SEED, TOLERANCE, check_differences

COLUMNS = (
    *(
        Columns(element=element, group=group, group_at=at)
        for element, group, at in itertools.product(
            ("p", "p2", "above"), ("mean", "max", "sum", None), ("before", "after")
        )
        if not (group is None and at == "before")
    ),
    Columns(element="above", threshold="1/position", rows=3),
    Columns(element="above", threshold=0.05),
    Columns(count_self=False),
    Columns(summed=False),
    Columns(summed=False, group=None),
)


def inputs(*, B=2, N=6, K=3, P=61, H=8, dead=0.3, dtype="float32", seed=0):
    """A pool in random order: some slots without an owner, some without a position, heads of different lengths."""
    rng = np.random.default_rng(seed)
    q, k, v = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((B, N, 1, H), (B, P, H), (B, P, H)))
    owner = rng.choice(K, (B, P), p=np.arange(1, K + 1) / (K * (K + 1) / 2))
    kv_pos = np.stack([rng.permutation(P) for _ in range(B)])
    owner = np.where(rng.random((B, P)) < dead / 2, -1, owner)
    kv_pos = np.where(rng.random((B, P)) < dead / 2, -1, kv_pos)
    q_pos = np.full((B, 1), P - 8)  # later slots are not to be read
    return q, k, v, *(jnp.asarray(x, jnp.int32) for x in (owner, q_pos, kv_pos))


def expected(q, k, v, owner, q_pos, kv_pos, num_kv_heads, columns, bias=None, **options):
    """The numpy reference of every sequence and kv head over just its own slots, put back at their places."""
    B, N, _, H = q.shape
    K = num_kv_heads
    G, P = N // K, k.shape[1]
    out, lse = np.zeros((B, N, 1, H)), np.full((B, N, 1), -np.inf)
    measured = []
    for c in columns:
        shape = (B, P) if c.group is not None else (B, G, P)
        measured.append(np.zeros(shape if c.summed else (*shape[:-1], 1, P)))
    for b in range(B):
        pos = np.full((1, K, P), -1)
        for h in range(K):
            pos[0, h] = np.where(np.asarray(owner[b]) == h, kv_pos[b], -1)
        one = jax.tree.map(lambda x, b=b: x[b : b + 1], tuple(columns))
        added = None if bias is None else np.tile(np.asarray(bias[b]), (K, 1))[None]
        dense = lambda x, b=b: np.broadcast_to(np.asarray(x[b], np.float64), (1, K, P, H))
        o, s, m = numpy_reference.attention(
            q[b : b + 1], dense(k), dense(v), q_pos[b : b + 1], pos, columns=one, bias=added, **options
        )
        out[b], lse[b] = o[0], s[0]
        for c, x, y in zip(columns, measured, m, strict=True):
            for j, h in enumerate(np.asarray(owner[b])):
                if h >= 0 and c.group is None:
                    x[b, ..., j] = y[0, h * G : (h + 1) * G, ..., j]
                elif h >= 0:
                    x[b, ..., j] = y[0, h, ..., j]
    return out, lse, measured


@pytest.fixture(autouse=True)
def _blocks_of_few_heads(monkeypatch):
    """Products of blocks wherever they are possible, however small."""
    monkeypatch.setattr(pooled, "MIN_HEADS", 1)


def in_order(lengths, *, K, G=2, H=8, dead=0.3, seed=0):
    """A pool whose heads have consecutive slots, dead ones among them, and other numbers of them in every sequence."""
    P = sum(lengths[0])
    arrays = inputs(B=len(lengths), N=K * G, K=K, P=P, H=H, dead=dead, seed=seed)
    owner = np.stack([np.repeat(np.arange(K), each) for each in lengths])
    return *arrays[:3], jnp.asarray(owner, jnp.int32), *arrays[4:]


def compare(arrays, K, columns, implementation, tolerance, in_order=False, **options):
    found = jax.jit(
        lambda *arrays: pooled_attention(
            *arrays, columns, num_kv_heads=K, in_order=in_order, implementation=implementation, **options
        )
    )(*arrays)
    out, lse, measured = expected(*arrays, K, columns, **options)
    assert found.out.dtype == (arrays[0].dtype if implementation != "reference" else jnp.float32)
    np.testing.assert_allclose(np.asarray(found.out, np.float64), out, atol=tolerance)
    np.testing.assert_allclose(found.lse, lse, atol=tolerance)
    for c, x, y in zip(columns, found.columns, measured, strict=True):
        assert x.shape == y.shape, c
        assert x.dtype == jnp.float32
        wrong = np.abs(np.asarray(x) - y) > tolerance
        assert wrong.mean() <= (0.02 if c.element == "above" else 0.0), c  # next to a threshold either side will do


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "shape",
    [{}, {"N": 4, "K": 1}, {"N": 4, "K": 4, "P": 130, "H": 16}, {"N": 8, "K": 2, "P": 9, "B": 1}],
    ids=str,
)
def test_against_numpy(implementation, shape):
    compare(inputs(**shape), shape.get("K", 3), COLUMNS, implementation, TOLERANCE["float32"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", [{"window": 17}, {"softcap": 2.0}, {"scale": 0.7}], ids=str)
def test_options(implementation, options):
    compare(inputs(), 3, COLUMNS[::3], implementation, TOLERANCE["float32"], logits=Logits(**options))


def some_bias(arrays, K):
    """Of every slot and query head of a group; every seventh position is dead by -inf."""
    kv_pos, heads = np.asarray(arrays[-1])[:, None], 1 + np.arange(arrays[0].shape[1] // K)[:, None]
    return jnp.asarray(np.where(kv_pos % 7 == 3, -np.inf, 0.3 * kv_pos / heads), jnp.float32)


@pytest.mark.parametrize(
    ("implementation", "blocks"),
    slow_but([("xla", False), ("xla", True), ("reference", False), ("interpret", False)], ("interpret", False)),
)
def test_bias(implementation, blocks):
    K = 3
    arrays = in_order([[70, 0, 122], [120, 62, 10]], K=K) if blocks else inputs()
    multiplier = jnp.asarray(np.random.default_rng(5).uniform(-1, 2, (2, K, 1)), jnp.float32).at[:, 1].set(0.0)
    own = Softmax(), Softmax(causal=False), Softmax(multiplier=multiplier, seed=SEED, noise="gumbel")
    columns = (*COLUMNS[::4], Columns(group=None), *(Columns(softmax=s) for s in own))
    logits = Logits(softcap=3.0, nothing=jnp.linspace(-3.0, 3.0, arrays[0].shape[1]))
    options = {"bias": some_bias(arrays, K), "in_order": blocks, "logits": logits}
    compare(arrays, K, columns, implementation, TOLERANCE["float32"], **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_half_precision_inputs(implementation, dtype):
    columns = (Columns(), Columns(element="p2", group_at="before"), Columns(group=None))
    compare(inputs(dtype=dtype), 3, columns, implementation, TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", slow_but([*IMPLEMENTATIONS, "interpret"], "xla"))
def test_own_softmax_and_weights(implementation):
    rng = np.random.default_rng(5)
    multiplier = jnp.asarray(rng.uniform(0.3, 2, (2, 3, 1)), jnp.float32)
    weight = jnp.asarray(rng.random((2, 1)), jnp.float32)
    columns = (
        *(Columns(softmax=own) for own in OWN),
        *(Columns(softmax=Softmax(multiplier, own.seed, own.before, own.noise, own.per)) for own in OWN),
        Columns(softmax=Softmax(multiplier=multiplier), element="above", group=None),
        Columns(softmax=Softmax(multiplier=multiplier, seed=SEED, noise="gumbel"), element="p2", group_at="before"),
        Columns(weight=weight),
        Columns(weight=weight, element="p2", group="max"),
    )
    compare(inputs(), 3, columns, implementation, TOLERANCE["float32"])
    compare(inputs(), 3, columns[::4], implementation, TOLERANCE["float32"], logits=Logits(softcap=2.0, window=30))


LENGTHS = {
    "heads of several blocks": [[100, 20, 264], [3, 368, 13]],
    "heads within one block": [[5, 6, 7, 366], [381, 1, 1, 1]],
    "heads without slots": [[0, 140, 0, 116], [0, 0, 0, 256], [256, 0, 0, 0]],
    "whole blocks": [[64, 64], [16, 112]],
    "one head": [[64]],
    "no blocks": [[10, 20, 7]],
}


IN_ORDER = [*(("xla", name) for name in LENGTHS), ("reference", "one head")]


@pytest.mark.parametrize(("implementation", "name"), slow_but(IN_ORDER, IN_ORDER[0], IN_ORDER[-1]))
def test_slots_in_order_of_owners(implementation, name, monkeypatch):
    K = len(LENGTHS[name][0])
    arrays = in_order(LENGTHS[name], K=K)
    sizes, of = set(), pooled._Blocks.of
    monkeypatch.setattr(pooled._Blocks, "of", lambda owner, size: sizes.add(size) or of(owner, size))
    own = tuple(Columns(softmax=s) for s in (Softmax(), Softmax(causal=False), Softmax(noise="constant")))
    compare(arrays, K, (*COLUMNS[::2], *own), implementation, TOLERANCE["float32"], in_order=True)
    logits = Logits(softcap=2.0, window=9)
    compare(arrays, K, COLUMNS[::5], implementation, TOLERANCE["float32"], in_order=True, logits=logits)
    half = (*(x.astype(jnp.bfloat16) for x in arrays[:3]), *arrays[3:])
    compare(half, K, (Columns(),), implementation, TOLERANCE["bfloat16"], in_order=True)
    assert bool(sizes) == (implementation == "xla" and name != "no blocks")


@pytest.mark.parametrize(("K", "blocks"), [(4, True), (3, False)])
def test_few_heads_meet_all_slots(K, blocks, monkeypatch):
    monkeypatch.undo()
    sizes, of = set(), pooled._Blocks.of
    monkeypatch.setattr(pooled._Blocks, "of", lambda owner, size: sizes.add(size) or of(owner, size))
    arrays = in_order([[256 // K] * (K - 1) + [256 - 256 // K * (K - 1)]], K=K)
    jax.eval_shape(functools.partial(pooled_attention, num_kv_heads=K, in_order=True), *arrays)
    assert bool(sizes) == blocks


def test_blocks_never_share_a_scale():
    """Blocks of one head, and heads in one block, whose logits lie far apart."""
    q, k, v, owner, q_pos, kv_pos = in_order([[60, 75, 57], [192, 0, 0]], K=3)
    k = k * jnp.where(jnp.arange(k.shape[1])[None] // 16 % 2 == owner % 2, 1.0, 300.0)[..., None]
    compare((q, k, v, owner, q_pos, kv_pos), 3, (Columns(), Columns(group=None)), "xla", 1e-4, in_order=True)


@pytest.mark.parametrize("implementation", slow_but(IMPLEMENTATIONS, "xla"))
def test_heads_that_see_nothing(implementation):
    q, k, v, owner, q_pos, kv_pos = inputs()
    owner = jnp.where(owner == 1, -1, owner)
    arrays = q, k, v, owner, q_pos, kv_pos
    columns = Columns(), Columns(softmax=Softmax(causal=False))
    compare(arrays, 3, columns, implementation, TOLERANCE["float32"])
    bias = jnp.where(inputs()[3] == 1, -jnp.inf, 0.0)[:, None] + jnp.zeros((1, 2, 1))
    run = functools.partial(pooled_attention, num_kv_heads=3, implementation=implementation, columns=columns)
    for dead, hidden in zip(jax.tree.leaves(run(*arrays)), jax.tree.leaves(run(*inputs(), bias=bias)), strict=True):
        np.testing.assert_array_equal(dead, hidden)
    padding = pooled_attention(
        q, k, v, owner, jnp.full_like(q_pos, -1), kv_pos, (Columns(),), num_kv_heads=3, implementation=implementation
    )
    assert not np.asarray(padding.out).any()
    assert np.isneginf(padding.lse).all()
    assert not np.asarray(padding.columns[0]).any()


def test_foreign_logits_never_decide_the_scale():
    """A head whose logits lie far below those of its neighbours' slots keeps its probabilities."""
    q, k, v, owner, q_pos, kv_pos = inputs(dead=0.0)
    k = k.at[...].multiply(jnp.where(owner == 0, 1.0, 300.0)[..., None])
    compare((q, k, v, owner, q_pos, kv_pos), 3, (Columns(), Columns(group=None)), "xla", 1e-4)


@pytest.mark.parametrize("promised", [False, True])
def test_gradients_against_finite_differences(promised):
    with jax.enable_x64(True):
        pool = in_order([[70, 0, 122], [120, 62, 10]], K=3, H=4) if promised else inputs(P=23, H=4)
        arrays = [x.astype(jnp.float64) if x.dtype == jnp.float32 else x for x in pool]
        blind = arrays[3] == 1  # a head that sees nothing
        arrays[5] = jnp.where(blind, -1, arrays[5])
        arrays[3] = arrays[3] if promised else jnp.where(blind, -1, arrays[3])
        mix = jnp.asarray(np.random.default_rng(1).standard_normal(arrays[0].shape))

        def f(q, k, v):
            options = {"num_kv_heads": 3, "in_order": promised, "logits": Logits(softcap=2.0)}
            found = pooled_attention(q, k, v, *arrays[3:], (Columns(element="p2"),), **options)
            lse = jnp.where(jnp.isfinite(found.lse), found.lse, 0.0)
            return (jnp.sin(found.out) * mix).sum() + (lse**2).sum() + (found.columns[0] ** 2).sum()

        f, grads = jax.jit(f), jax.jit(jax.grad(f, argnums=(0, 1, 2)))(*arrays[:3])
        check_differences(f, arrays[:3], grads)
