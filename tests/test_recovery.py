"""What sets of keys recover of attention (`recovered_attention`), against the whole matrix in float64."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import Logits, recovered_attention
from tests.marks import slow_but


def softmax_rows(q, k, q_pos, kv_pos, scale, window, softcap, bias):
    """Attention "G T S" of one kv head in float64, zero where a row sees nothing."""
    x = np.einsum("gth,sh->gts", np.asarray(q, np.float64), np.asarray(k, np.float64)) * scale
    x = x if softcap is None else softcap * np.tanh(x / softcap)
    x = x if bias is None else x + np.asarray(bias)[:, None]
    rows, keys = q_pos[:, None], kv_pos[None]
    seen = (keys >= 0) & (keys <= rows) & (rows - keys < (window or np.inf))
    e = np.where(seen, np.exp(x - x.max()), 0.0)
    total = e.sum(-1, keepdims=True)
    return e / np.where(total > 0, total, 1.0), seen


def plain_recovery(q, k, q_pos, kv_pos, masks, within, tolerance, scale, window=None, softcap=None, bias=None):
    """(mass, elementwise) "B K M" with the whole matrix, one row after the other."""
    B, N, T, _ = q.shape
    K, G, M = k.shape[1], N // k.shape[1], len(masks)
    mass, same = np.zeros((B, K, M)), np.zeros((B, K, M))
    for b, h, m in np.ndindex(B, K, M):
        group = slice(h * G, (h + 1) * G)
        how = scale, window, softcap, None if bias is None else bias[b, group]
        p, seen = softmax_rows(q[b, group], k[b, h], q_pos[b], kv_pos[b, h], *how)
        p = p.mean(0)
        recovered, unchanged = [], 0
        for i in range(T):
            if not seen[i].any():
                continue
            kept = masks[m, b, h].copy()
            if within[m] is not None:
                kept |= q_pos[b, i] - kv_pos[b, h] < within[m][b]
            recovered.append(p[i, kept].sum())
            after = np.where(kept, p[i], 0.0)
            after = after / after.sum() if after.sum() > 0 else after
            unchanged += (np.abs(after - p[i]) < tolerance)[seen[i]].sum()
        mass[b, h, m] = np.mean(recovered)
        same[b, h, m] = unchanged / seen.sum()
    return mass, same


def recovery_inputs(T, *, cached=0, dtype=jnp.float32, seed=0, B=2, N=4, K=2, H=8):
    """Rows behind cached slots, some of them dead; the second sequence is padded. Three sets, one with a band."""
    rng = np.random.default_rng(seed)
    S = cached + T
    q, k = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((B, N, T, H), (B, K, S, H)))
    pad = np.array([0, T // 3])[:, None]
    q_pos = np.where(np.arange(T) >= pad, np.arange(T) - pad + cached, -1)
    old = np.stack([rng.permutation(cached) for _ in range(B * K)]).reshape(B, K, cached)
    old = np.where(rng.random(old.shape) < 0.3, -1, old)
    kv_pos = np.concatenate([old, np.broadcast_to(q_pos[:, None], (B, K, T))], -1)
    masks = rng.random((3, B, K, S)) < np.array([0.5, 0.05, 0.2]).reshape(3, 1, 1, 1)
    within = (None, np.array([3, 7]), None)
    return q, k, q_pos, kv_pos, masks, within


def recover(q, k, q_pos, kv_pos, masks, within, **options):
    bands = [None if w is None else jnp.asarray(w, jnp.int32) for w in within]
    ints = [jnp.asarray(x, jnp.int32) for x in (q_pos, kv_pos)]
    run = jax.jit(
        lambda q, k, q_pos, kv_pos, masks: recovered_attention(q, k, q_pos, kv_pos, masks, within=bands, **options)
    )
    return run(q, k, *ints, jnp.asarray(masks))


@pytest.mark.parametrize("T", [1, pytest.param(37, marks=pytest.mark.exhaustive), 300])
@pytest.mark.parametrize("options", slow_but([{}, {"window": 9, "softcap": 2.0}], {}), ids=str)
def test_recovery_against_numpy(T, options):
    with jax.enable_x64(True):
        inputs = recovery_inputs(T, cached=11, dtype=jnp.float64)
        bias = None
        if options:
            steps = inputs[3].max(-1, keepdims=True) - inputs[3]
            bias = jnp.asarray(-0.1 * np.repeat(steps, 2, axis=1), jnp.float64)
        mass, same = plain_recovery(*inputs, 1e-3, 0.6, **options, bias=bias)
        logits = Logits(0.6, **options)
        for implementation in (None, "reference"):
            found = recover(*inputs, tolerance=1e-3, implementation=implementation, bias=bias, logits=logits)
            np.testing.assert_allclose(found.mass, mass, atol=1e-12)
            np.testing.assert_allclose(found.elementwise, same, atol=1e-12)
    if T > 1:
        assert same.min() < 0.9 * same.max()
    bias = None if bias is None else bias.astype(jnp.float32)
    single = recover(*(x.astype(jnp.float32) for x in inputs[:2]), *inputs[2:], bias=bias, logits=logits)
    assert single.elementwise is None
    assert single.mass.dtype == jnp.float32
    np.testing.assert_allclose(single.mass, mass, atol=3e-6)


def test_recovery_without_rows_and_of_half_precision():
    q, k, q_pos, kv_pos, masks, within = recovery_inputs(8)
    nothing = recover(q, k, np.full_like(q_pos, -1), kv_pos, masks, within, tolerance=1e-4)
    assert not np.asarray(nothing.mass).any()
    assert not np.asarray(nothing.elementwise).any()
    low = [x.astype(jnp.bfloat16) for x in (q, k)]
    full = recover(*(x.astype(jnp.float32) for x in low), q_pos, kv_pos, masks, within).mass
    np.testing.assert_allclose(recover(*low, q_pos, kv_pos, masks, within).mass, full, atol=1e-2)


def recovery_bytes(T):
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 4, T, 16), (1, 2, T, 16))]
    ints = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((1, T), (1, 2, T))]
    masks, band = jax.ShapeDtypeStruct((4, 1, 2, T), jnp.bool_), jax.ShapeDtypeStruct((1,), jnp.int32)
    run = lambda q, k, q_pos, kv_pos, masks, band: recovered_attention(
        q, k, q_pos, kv_pos, masks, within=(None, None, None, band), tolerance=1e-4
    )
    return jax.jit(run).lower(*shapes, *ints, masks, band).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.exhaustive
def test_recovery_takes_memory_that_grows_linearly():
    short, long = recovery_bytes(4096), recovery_bytes(16384)
    assert long < 4.5 * short
    assert 3 * recovery_bytes(1024) < short  # one block at a time, where every block has a width of its own
    assert long < 4 * 4096 * 16384  # one float32 matrix of a single head at the shorter length alone would be larger


def test_no_kernel_computes_recovery_and_the_log_says_so(caplog):
    inputs = recovery_inputs(8)
    shape = lambda how: jax.eval_shape(lambda: recover(*inputs, implementation=how))
    with caplog.at_level(logging.INFO, logger="kvjax.pallas_kernels"):
        for implementation in ("xla", "reference", None):
            shape(implementation)
        assert not caplog.records
        for implementation in ("triton", "mosaic_gpu", "interpret"):
            shape(implementation)
            said = caplog.records[-1].getMessage()
            assert said.startswith("what sets of keys recover of attention is computed by xla")
            assert f"{implementation}: no kernel renormalises rows on the keys that are kept" in said
        assert len(caplog.records) == 3
