"""Whole prompts by cuDNN: what is asked of `jax.nn`, computed by XLA here, and who is chosen."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods, models
from kvjax.pallas_kernels import Logits, attention, cudnn, use
from kvjax.pallas_kernels import blocks as bl
from tests.test_pallas_ir import lower

B, N, K, T, H = 2, 4, 2, 12, 16


def prompt(dtype="float32"):
    """Rows of two prompts, the second of five tokens behind padding."""
    q, k, v = (jax.random.normal(jax.random.key(i), (B, heads, T, H), dtype) for i, heads in enumerate((N, K, K)))
    pos = jnp.arange(T)[None] - jnp.array([[0], [T - 5]])
    pos = jnp.where(pos < 0, -1, pos).astype(jnp.int32)
    return q, k, v, pos, jnp.broadcast_to(pos[:, None], (B, K, T))


@pytest.mark.parametrize("window", [None, 3])
def test_padding_stands_behind_the_rows_there(window):
    q, k, v, pos, held = prompt()
    out, lse = cudnn.flash_attention(q, k, v, pos, spec=bl.Spec(H**-0.5, window=window), by="xla")
    expected = attention(q, k, v, pos, held, logits=Logits(window=window), implementation="reference")
    np.testing.assert_allclose(out, expected.out, atol=1e-5)
    np.testing.assert_allclose(lse, expected.lse, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "float32"),
        ({"own": False}, "their own tokens"),
        ({"logits": Logits(softcap=5.0), "dtype": "bfloat16"}, "no soft cap"),
    ],
)
def test_what_it_does_not_serve_is_said(caplog, change, reason):
    options = {"own": True, "dtype": "float32"} | change
    with caplog.at_level(logging.INFO, "kvjax.pallas_kernels"):
        arrays = prompt(options.pop("dtype"))
        jax.eval_shape(lambda *x: attention(*x, implementation="cudnn", **options).out, *arrays)
    assert reason in caplog.records[0].getMessage()


@pytest.mark.slow
@pytest.mark.parametrize("policy", [methods.full(), methods.h2o(8)], ids=["full", "h2o"])
def test_prefill_is_given_to_cudnn_and_its_statistics_are_not(monkeypatch, policy):
    """Lowered for CUDA, as if cuDNN were there."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 92000)
    model = models.LanguageModel(models.ModelConfig(64, 64, 64, 2, 4, 2, 16, dtype="bfloat16"))
    tokens = jax.ShapeDtypeStruct((2, 64), "int32")
    with use("cudnn"):
        read = lambda params, tokens: kvjax.prefill(model, params, tokens, policy=policy, max_new_tokens=4)[0]
        assert "__cudnn$fmha" in lower(read, model.shapes, tokens).as_text()
