"""Numeric examples of attention's statistics that can be checked by hand (`golden/policy_examples.json`)."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import Columns, Logits, Softmax, attention
from kvjax.pallas_kernels.columns import draw_noise
from tests import tensors


def test_e13_group_reduction_order(examples):
    e = examples["E13"]
    p = np.zeros((2, 2, 2))
    p[:, 0, 0] = 1.0
    p[0, 1], p[1, 1] = e["inputs"]["head0"], e["inputs"]["head1"]
    q, k, v, _ = tensors.from_probabilities(p)
    pos = jnp.arange(2, dtype=jnp.int32)
    wanted = {
        "mean_then_square": Columns(rows=1, element="p2", group="mean", group_at="before"),
        "square_then_mean": Columns(rows=1, element="p2", group="mean", group_at="after"),
        "mean_then_gt_half": Columns(rows=1, element="above", threshold=0.5 + 1e-6, group="mean", group_at="before"),
        "gt_half_then_sum": Columns(rows=1, element="above", threshold=0.5, group="sum", group_at="after"),
    }
    found = attention(q, k, v, pos[None], pos[None, None], columns=list(wanted.values()), logits=Logits(1.0)).columns
    for name, x in zip(wanted, found, strict=True):
        np.testing.assert_allclose(x[0, 0], e["expected"][name], atol=1e-6, err_msg=name)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_e16_column_reduction(examples, implementation):
    e = examples["E16"]
    q, k = (jnp.asarray(e["inputs"][x], jnp.float32)[None, None] for x in "qk")
    pos = jnp.arange(4, dtype=jnp.int32)
    columns = [Columns(), Columns(element="p2"), Columns(rows=2)]
    run = lambda q_pos: attention(
        q,
        k,
        k,
        q_pos[None],
        pos[None, None],
        columns=columns,
        logits=Logits(e["params"]["scale"]),
        implementation=implementation,
    )
    causal = run(pos)
    np.testing.assert_allclose(causal.lse[0, 0], e["expected"]["lse_causal"], atol=1e-5)
    for x, name in zip(causal.columns, ("colsum", "colsum_of_squares", "colsum_last2_rows"), strict=True):
        np.testing.assert_allclose(x[0, 0], e["expected"][f"{name}_causal"], atol=1e-5)
    partials = np.asarray(e["expected"]["block_partials"])
    np.testing.assert_allclose(causal.columns[0][0, 0].reshape(partials.shape), partials, atol=1e-5)
    np.testing.assert_allclose(causal.columns[0].sum(), e["expected"]["total_mass_causal"], atol=1e-5)
    everything = run(jnp.full((4,), 3, jnp.int32))  # rows that see all keys, as without a causal mask
    np.testing.assert_allclose(everything.lse[0, 0], e["expected"]["lse_full"], atol=1e-5)
    np.testing.assert_allclose(everything.columns[0][0, 0], e["expected"]["colsum_full"], atol=1e-5)


def _logits_attention(logits, columns, **softmax):
    """Statistics of given logits, -1e9 where masked."""
    logits = np.asarray(logits)
    n = logits.shape[0]
    q, k = jnp.asarray(np.where(logits < -1e8, 0, logits), jnp.float32)[None, None], jnp.eye(n)[None, None]
    pos = jnp.arange(n, dtype=jnp.int32)
    return attention(q, k, k, pos[None], pos[None, None], columns=columns, logits=Logits(1.0), **softmax).columns


def test_e24_e25_keyformer_scores(examples, monkeypatch):
    e, per_call = examples["E24"], examples["E25"]
    zeta, table = jnp.asarray(e["inputs"]["zeta"], jnp.float32), jnp.asarray(per_call["inputs"]["noise"], jnp.float32)

    def given(spec, seed, head, q_pos, kv_pos):
        del seed, head
        if spec.noise == "constant":
            return 0.5772156649
        if spec.noise is None:
            return 0.0
        rows, keys = jnp.maximum(q_pos, 0), jnp.maximum(kv_pos, 0)
        return zeta[keys] + jnp.zeros_like(rows, jnp.float32) if spec.per == "key" else table[rows, keys]

    monkeypatch.setattr("kvjax.pallas_kernels.reference.draw_noise", given)
    seed = jnp.zeros((1,), jnp.uint32)
    columns = [
        Columns(softmax=Softmax(seed=seed, noise="gumbel", per="key")),
        Columns(softmax=Softmax(seed=seed, noise="gumbel", per="call")),
        Columns(softmax=Softmax()),
        Columns(softmax=Softmax(noise="constant")),
    ]
    found = _logits_attention(e["inputs"]["prompt_logits"], columns, implementation="reference")
    np.testing.assert_allclose(found[0][0, 0], e["expected"]["score_prompt"], atol=1e-6)
    for x, name in zip(found[1:], ("score_per_call", "score_none", "score_constant"), strict=True):
        np.testing.assert_allclose(x[0, 0], per_call["expected"][name], atol=1e-6)
    assert per_call["expected"]["constant_equals_none"]


def test_e25_noise_has_the_moments_of_a_gumbel(examples):
    e = examples["E25"]["expected"]
    kv_pos = jnp.arange(300, dtype=jnp.int32)[None]
    q_pos = jnp.arange(300, dtype=jnp.int32)[:, None]
    for noise in ("gumbel", "gaussian"):
        spec = Softmax(seed=jnp.zeros((1,), jnp.uint32), noise=noise)
        x = np.asarray(draw_noise(spec, jnp.uint32(5), jnp.int32(0), q_pos, kv_pos))
        assert x.mean() == pytest.approx(e["gumbel_mean"], abs=0.02)
        assert x.std() == pytest.approx(e["gumbel_std"], abs=0.02)
