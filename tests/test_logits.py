"""How logits follow from products: what is refused, and what ALiBi's slopes add."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import Columns, Logits, attention, pooled_attention, recovered_attention
from tests.test_kernels import inputs

SLOPES = jnp.asarray([0.5, 0.25, 0.125, 0.0625])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Logits(softcap=-1.0), r"Logits: softcap=-1.0 must be a number above 0, or None"),
        (lambda: Logits(softcap=0), r"softcap=0 must be a number above 0"),
        (lambda: Logits(window=0), r"Logits: window=0 must be a whole number from 1"),
        (lambda: Logits(window=2.5), r"window=2.5 must be a whole number"),
        (lambda: Logits(0), r"Logits: scale=0 must be a number above 0, or None"),
        (lambda: Logits(float("nan")), r"scale=nan must be a number above 0"),
        (lambda: Logits(slopes=(0.5, 0.25)), r"slopes=\(0.5, 0.25\) must be a non-empty numpy or JAX array of floats"),
        (lambda: attention(*inputs(), logits=Logits(slopes=SLOPES[:3])), r"logits' slopes is .* shape \(4,\) to fit"),
        (lambda: attention(*inputs(), logits=0.5), r"logits=0.5 must be a Logits, such as"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_pool_reads_no_slopes():
    q, k, v, q_pos, kv_pos = inputs(T=1, pads=0)
    pool = q, k[:, 0], v[:, 0], jnp.zeros_like(kv_pos[:, 0]), q_pos, kv_pos[:, 0]
    with pytest.raises(ValueError, match="4 slopes, which a pool does not read; give their bias"):
        pooled_attention(*pool, num_kv_heads=2, logits=Logits(slopes=SLOPES))


def test_equal_ones_share_a_program():
    assert Logits(np.float32(0.5), window=np.int64(3)) == Logits(0.5, window=3)
    assert hash(Logits(1)) == hash(Logits(1.0))
    leaves, tree = jax.tree.flatten(Logits(0.5, 2.0, 3, SLOPES))
    assert [x.shape for x in leaves] == [(4,)]
    assert tree == jax.tree.structure(Logits(0.5, 2.0, 3, 2 * SLOPES)) != jax.tree.structure(Logits(0.5, 2.0))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_slopes_are_a_bias_of_keys(implementation):
    """Beside another one: as softmax of logits that fall by the slope for each place behind the row."""
    arrays = q, k, v, q_pos, kv_pos = inputs(T=9, cached=5)
    more = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 14)), jnp.float32)
    how = {"bias": more, "logits": Logits(0.3, 2.0, 7, SLOPES), "implementation": implementation}
    found = attention(*arrays, columns=(Columns(group=None, summed=False),), **how)
    keys, rows = np.repeat(np.asarray(kv_pos), 2, axis=1)[:, :, None], np.asarray(q_pos)[:, None, :, None]
    x = 2.0 * np.tanh(0.3 * np.einsum("bnth,bnsh->bnts", q, np.repeat(np.asarray(k), 2, axis=1)) / 2.0)
    x = x + np.asarray(more)[:, :, None] - np.asarray(SLOPES)[None, :, None, None] * (rows - keys)
    seen = (keys >= 0) & (keys <= rows) & (rows - keys < 7)
    e = np.where(seen, np.exp(x), 0.0)
    p = e / np.maximum(e.sum(-1, keepdims=True), 1e-30)
    np.testing.assert_allclose(found.columns[0], p, atol=1e-5)
    np.testing.assert_allclose(found.out, p @ np.repeat(np.asarray(v), 2, axis=1), atol=1e-5)
    masks = np.ones((1, 2, 2, 14), bool)
    masks[..., ::3] = False
    mass = recovered_attention(q, k, q_pos, kv_pos, masks, **how).mass[..., 0]
    kept = np.where(np.repeat(masks[0], 2, axis=1)[:, :, None], p, 0.0).sum(-1).reshape(2, 2, 2, 9).mean(2)
    np.testing.assert_allclose(mass, kept.sum(-1) / seen[:, ::2].any(-1).sum(-1), atol=1e-5)
