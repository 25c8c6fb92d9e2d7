"""What kernels refuse before anything is traced."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import Columns, Softmax, attention, hash_uniform, pooled_attention, recovered_attention

pytestmark = pytest.mark.usefixtures("unchecked")
q, k, v = (np.zeros((2, heads, 6, 4), np.float32) for heads in (4, 2, 2))
row, slots = np.zeros((2, 6), np.int32), np.zeros((2, 2, 6), np.int32)
seeded = lambda seed: Softmax(seed=seed, noise="gumbel")
measure = lambda **options: attention(q, k, v, row, slots, columns=[Columns(**options)])
masks = np.ones((1, 2, 2, 6), bool)
pool, owner = np.zeros((2, 6, 4), np.float32), np.zeros((2, 6), np.int32)
of_pool = lambda K, **how: pooled_attention(q[:, :, :1], pool, pool, owner, row[:, :1], row, num_kv_heads=K, **how)
THREE = np.zeros((2, 3, 6, 4), np.float32)
BOTH = (
    lambda k, v, slots: attention(q, k, v, row, slots),
    lambda k, v, slots: recovered_attention(q, k, row, slots, np.ones((1, *slots.shape), bool)),
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: measure(weight=np.ones((1, 6), np.float32)), r"a column's weight is .* \(2, 6\) to fit"),
        (lambda: measure(softmax=seeded(row[:1, 0])), r"a softmax's seed is .* must be integer of shape \(2,\)"),
        (lambda: measure(softmax=Softmax(heads=row[0, :1])), r"softmax's heads is .* must be integer of shape \(4,\)"),
        (lambda: measure(softmax=Softmax(multiplier=k[:, :, :3, 0])), "softmax's multiplier is float32"),
        (lambda: Softmax(noise="gumbel"), "needs a seed"),
        (lambda: of_pool(4, columns=[Columns(weight=k[0, :, :3, 0])]), "column's weight is float32 of shape"),
        (lambda: of_pool(3), "4 query heads are not a multiple of num_kv_heads=3"),
        *((lambda f=f: f(THREE, THREE, np.zeros((2, 3, 6), int)), "4 .* not a multiple of 3 kv heads") for f in BOTH),
        *((lambda f=f: f(k[:, :, :5], v[:, :, :5], slots[..., :5]), "6 query rows .* only 5") for f in BOTH),
        (lambda: attention(q, k, np.concatenate([v, v], -1), row, slots), "values have 8 channels, but keys 4"),
        (lambda: recovered_attention(q, k, row, slots, masks, within=[None, None]), "2 bands for 1 masks"),
        (lambda: recovered_attention(q, k, row, slots, masks, within=[row[:1, 0]]), r"within is .* \(2,\) to fit"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("implementation", ["xla", "reference", "interpret"])
def test_values_may_have_fewer_channels_than_keys(implementation):
    draw = np.random.default_rng(0)
    q, k, v = (draw.standard_normal((2, heads, 6, 16)).astype(np.float32) for heads in (4, 2, 2))
    whole = attention(q, k, v, implementation="reference").out
    found = attention(q, k, v[..., :5], implementation=implementation)
    np.testing.assert_allclose(found.out, whole[..., :5], atol=2e-6)


def test_a_hash_of_numbers_does_not_depend_on_their_types():
    expected = hash_uniform(jnp.uint32(2**32 - 3), jnp.arange(5))
    for seed in (2**32 - 3, jnp.int32(-3), np.int32(-3)):
        for index in (jnp.arange(5), np.arange(5), np.arange(5, dtype=np.uint8)):
            np.testing.assert_array_equal(hash_uniform(seed, index), expected)
