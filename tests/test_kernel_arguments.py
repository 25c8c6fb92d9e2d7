"""What kernels refuse before anything is traced."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import Columns, Softmax, attention, hash_uniform, pooled_attention, recovered_attention

pytestmark = pytest.mark.usefixtures("unchecked")
q, k, v = (np.zeros((2, heads, 6, 4), np.float32) for heads in (4, 2, 2))
wide = np.zeros((2, 2, 6, 5), np.float32)
row, slots = np.zeros((2, 6), np.int32), np.zeros((2, 2, 6), np.int32)
seeded = lambda seed: Softmax(seed=seed, noise="gumbel")
pool, owner = np.zeros((2, 6, 4), np.float32), np.zeros((2, 6), np.int32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: attention(q, k, wide, row, slots),
            r"v has the shape \(2, 2, 6, 5\), but",
        ),
        (lambda: attention(q, k[:1], v, row, slots), r"k has the shape \(1, 2, 6, 4\), but \(2, 2, 6, 4\) fits"),
        (lambda: attention(q, k, v, row.astype(float), slots), "q_pos must be an array of integers"),
        (lambda: attention(q, k, v, row, slots[:, :1]), r"kv_pos has the shape \(2, 1, 6\)"),
        (lambda: attention(q, k, v, row, slots, columns=Columns()), "columns=.*: must be a sequence"),
        (
            lambda: attention(q, k, v, row, slots, columns=(Columns(weight=[1.0]),)),
            "a column's weight must be an array of floats .* not list",
        ),
        (
            lambda: attention(q, k, v, row, slots, columns=(Columns(softmax=seeded([1])),)),
            "softmax's seed must be an ar",
        ),
        (lambda: attention(q, k, v, row, slots, columns=(Columns(softmax=seeded(row[:1, 0])),)), r"seed has the shape"),
        (
            lambda: attention(q, k, v, row, slots, columns=(Columns(softmax=Softmax(before=np.zeros(2))),)),
            "softmax's before must be an array of integers",
        ),
        (lambda: attention(q, k, v, row, slots, softcap=0), "softcap=0: must be positive; use None for none"),
        (lambda: attention(q, k, v, row, slots, window=2.5), "window=2.5: must be a whole number of at least 1"),
        (lambda: attention(q, k, v, row, slots, bias=3), "bias must be an array of floats .* not int"),
        (lambda: attention(q, k, v, row, slots, implementation=["xla"]), "is not one of"),
        (lambda: pooled_attention(q[:, :, :1], pool, pool[:, :5], owner, row[:, :1], row, num_kv_heads=2), "v has the"),
        (
            lambda: pooled_attention(q[:, :, :1], pool, pool, owner, row[:, :1], row, num_kv_heads=2.0),
            "num_kv_heads=2.0",
        ),
        (lambda: recovered_attention(q, k, row, slots, np.zeros((1, 2, 2, 6))), "masks must be an array of booleans"),
        (
            lambda: recovered_attention(q, k, row, slots, np.ones((1, 2, 2, 6), bool), within=[row[:1, 0]]),
            r"within has the shape \(1,\), but \(2,\) fits",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def single(**options):
    return (Columns(**options),)


ones = lambda *shape: np.ones(shape, np.float32)
ARRAYS = {
    "attention q": lambda t: attention(t(q), k, v, row, slots),
    "attention kv_pos": lambda t: attention(q, k, v, row, t(slots)),
    "attention bias": lambda t: attention(q, k, v, row, slots, bias=t(ones(2, 4, 6))),
    "attention weight": lambda t: attention(q, k, v, row, slots, columns=single(weight=t(ones(2, 6)))),
    "attention multiplier": lambda t: attention(
        q, k, v, row, slots, columns=single(softmax=Softmax(multiplier=t(ones(2, 2, 6))))
    ),
    "pooled_attention k": lambda t: pooled_attention(
        q[:, :, :1], t(pool), pool, owner, row[:, :1], row, num_kv_heads=2
    ),
    "recovered_attention masks": lambda t: recovered_attention(q, k, row, slots, t(np.ones((1, 2, 2, 6), bool))),
}


@pytest.mark.parametrize("door", ARRAYS)
def test_a_tensor_of_torch_is_told_to_be_numpy(door):
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"(?s)Tensor, not an array of numpy or JAX; give x.numpy\(\)"):
        ARRAYS[door](lambda x: torch.tensor(np.asarray(x)))


def test_a_hash_of_numbers_does_not_depend_on_their_types():
    expected = hash_uniform(jnp.uint32(2**32 - 3), jnp.arange(5))
    for seed in (2**32 - 3, jnp.int32(-3), np.int32(-3)):
        for index in (jnp.arange(5), np.arange(5), np.arange(5, dtype=np.uint8)):
            np.testing.assert_array_equal(hash_uniform(seed, index), expected)
