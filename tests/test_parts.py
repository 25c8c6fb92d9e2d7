import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods, models
from kvjax.models.parts import product


@pytest.mark.parametrize("rows", [1, 3, 65], ids=["one", "few", "many"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_are_rounded_once(rows, dtype):
    x = jax.random.normal(jax.random.key(0), (rows, 1, 24), dtype)
    w = jax.random.normal(jax.random.key(1), (3, 5, 24), dtype)
    found = jax.jit(product)(x, w)
    exact = np.einsum("rtd,nod->rtno", np.asarray(x, np.float64), np.asarray(w, np.float64))
    assert found.dtype == jnp.dtype(dtype)
    rounding = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=rounding, atol=40 * 2.0**-23)


@pytest.mark.parametrize(
    ("kv_heads", "policy"),
    [(1, methods.h2o(8)), (4, methods.snapkv(16, window=4)), (2, methods.ada_snapkv(16, window=4))],
)
def test_bfloat16_weights_and_caches_are_read_as_they_are(kv_heads, policy):
    """Nothing that a step or a loop holds is as large as the smallest weight matrix in float32."""
    model = models.LanguageModel(models.ModelConfig(1024, 128, 256, 1, 4, kv_heads, 32, dtype="bfloat16"))
    read = lambda params, tokens: kvjax.prefill(model, params, tokens, policy=policy, max_new_tokens=6)
    logits, state = jax.eval_shape(read, model.shapes, jax.ShapeDtypeStruct((1, 64), jnp.int32))
    run = lambda params, *at: kvjax.generate_from(model, params, *at, max_new_tokens=6, eos_ids=()).tokens
    step = lambda params, token, state: kvjax.decode_step(model, params, token, state)
    token = jax.ShapeDtypeStruct((1,), jnp.int32)
    for function, *at in ((run, logits, state), (step, token, state)):
        held = jax.jit(function).lower(model.shapes, *at).compile().memory_analysis()
        assert held.temp_size_in_bytes < 128 * 128 * 4
