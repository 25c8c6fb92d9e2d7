"""Linear algebra of many small matrices."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.decide.linalg import of_each


def test_each_matrix_for_itself_and_no_batches_for_lapack_on_cpus():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3, 4, 4)), rng.normal(size=(2, 3, 4, 5))
    solve = jax.jit(lambda *x: of_each(jnp.linalg.solve, *x))
    found = solve(a, b)
    np.testing.assert_allclose(found, np.linalg.solve(a.astype(np.float64), b), rtol=1e-3, atol=1e-4)
    batched = lambda f: re.findall(r"@lapack\w+\(.*tensor<(?!1x1x)\d+x\d+x\d+x", jax.jit(f).lower(a, b).as_text())
    assert batched(jnp.linalg.solve)
    assert not batched(solve)
