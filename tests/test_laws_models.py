"""The law that a padded row is what it is alone, of every method, over models that are no Llama."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax import analysis, methods, models
from kvjax.contract import kv_layers, kv_shape
from kvjax.learning import probes
from kvjax.learning.gates import gated
from kvjax.models.families import from_hugging_face
from kvjax.observe import Reread
from tests import table
from tests.marks import slow_but

T, NEW, LENGTHS = 19, 3, np.array([19, 12])
KEYS = jax.random.split(jax.random.key(0), len(LENGTHS))
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
}
MODELS = {
    "hybrid": {  # gated DeltaNet and attention in turn
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 8,
    },
    "beside nothing": {"model_type": "gpt_oss", "sliding_window": 7, "num_local_experts": 4},
    "two sizes": {  # of heads, and fewer of them without a window
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 7,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
    "sharing": {  # the last layers read the keys and values of the first ones
        "model_type": "gemma4_text",
        "rms_norm_eps": 0.1,  # as rounding grows with logits of normalised heads
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 7,
        "global_head_dim": 8,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 5,
        "vocab_size_per_layer_input": 61,
    },
    "latent": {
        "model_type": "deepseek_v3",
        "kv_lora_rank": 12,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 6,
        "v_head_dim": 10,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}


@functools.cache
def made(name):
    """A random model, its weights large enough for attention to differ between tokens, and norms to differ."""
    model, draw = models.LanguageModel(from_hugging_face(SIZES | MODELS[name])), np.random.default_rng(3)
    noise = lambda x: 0.5 * draw.standard_normal(x.shape).astype(x.dtype) if x.ndim == 1 else 0.0
    return model, jax.tree.map(lambda x: 2 * x + noise(x), jax.jit(model.init)(jax.random.key(3)))


def run(name, policy, rows):
    """Logits behind prompts, padded to the longest of them, and behind each of the tokens that follow."""
    (model, params), draw = made(name), np.random.default_rng(0)
    ids, more = (draw.integers(0, 61, (len(LENGTHS), n))[rows] for n in (T, NEW))
    how = {"policy": policy, "lengths": LENGTHS[rows], "max_new_tokens": NEW, "key": KEYS[rows]}
    logits, state = kvjax.prefill(model, params, ids[:, T - LENGTHS[rows].max() :], **how)
    each = [logits]
    for i in range(NEW):
        logits, state = kvjax.decode_step(model, params, more[:, i], state)
        each.append(logits)
    return np.stack(each)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_latents_are_stored_and_read_in_16_bits(dtype):
    model, params = made("latent")
    narrow = models.LanguageModel(dataclasses.replace(model.config, dtype=dtype))
    params = jax.tree.map(lambda x, own: x.astype(own.dtype), params, narrow.shapes)
    how = {"policy": methods.ada_snapkv(10, window=4), "max_new_tokens": NEW}
    ids = np.random.default_rng(0).integers(0, 61, (2, T))
    logits, state = kvjax.prefill(narrow, params, ids, **how)
    rest, _ = kvjax.feed(narrow, params, ids[:, :NEW], state)
    assert np.isfinite(logits).all()
    assert np.isfinite(rest).all()


@pytest.mark.parametrize(
    ("name", "policy", "message"),
    [
        ("latent", methods.merging(methods.snapkv(8, window=3)), "holds latents"),
        ("two sizes", methods.layer_defensivekv(8, window=3), r"the model's have \[1, 2\] kv heads"),
    ],
)
def test_what_a_prompt_refuses_a_state_that_was_read_refuses(name, policy, message):
    (model, params), ids = made(name), np.zeros((1, T), np.int32)
    state = kvjax.start(model, policy=kvjax.Policy(), lengths=[T], max_new_tokens=NEW)
    _, state, stats = kvjax.forward(model, params, ids, state, observe=(methods.snapkv(8, window=3),))
    with pytest.raises(ValueError, match=message):
        policy(state, stats)


@pytest.mark.parametrize(
    ("name", "read", "message"),
    [
        ("latent", lambda m, p, ids: kvjax.plan_memory(m.config, methods.think(), **PLAN), "keys; choose a policy"),
        (
            "two sizes",
            lambda m, p, ids: probes.fit_filters(m, p, ids),
            r"layers \[0, 1\] store heads of 2 shapes, \[KVShape\(num_kv_heads=2, head_dim=8",
        ),
        ("sharing", lambda m, p, ids: analysis.read(m, p, ids, ids), r"\[2, 3\] read other layers' keys and values"),
        ("two sizes", lambda m, p, ids: m(p, ids, attend=gated(np.ones((2, 2)), **ROWS)), "a layer has 1 kv heads"),
    ],
)
def test_what_needs_layers_that_are_alike_says_so(name, read, message):
    with pytest.raises(ValueError, match=message):
        read(*made(name), np.zeros((1, T), np.int32))


PLAN = {"prompt_len": T, "max_new_tokens": NEW}
ROWS = {"pos": np.arange(T)[None], "sinks": 1, "recent": 4}


def test_a_second_reading_weighs_latents_by_what_heads_make_of_them():
    (model, params), plus = made("latent"), methods.kvzip(10, Reread(chunk=8, plus=True))
    ids = np.random.default_rng(0).integers(0, 61, (1, T))
    _, state = kvjax.prefill(model, params, ids, policy=plus, max_new_tokens=NEW)
    assert state.num_live.tolist() == [[[10], [10]]]


REFUSED = {"latent": table.NO_LATENT, "two sizes": table.NO_TWO_SHAPES, "beside nothing": table.NO_YARN}


@pytest.mark.parametrize("name", slow_but(MODELS, "latent"))
@table.rows({"h2o"}, without=table.OF_A_BATCH, smoke=table.FEW)
def test_a_padded_row_is_read_and_decoded_as_it_is_alone(case, name):
    config = made(name)[0].config
    held = kv_layers(config)
    shape = kv_shape(config, held[0])
    sizes = {"layers": len(held), "width": config.embed_dim, "heads": (4, shape.num_kv_heads, shape.head_dim)}
    refused = REFUSED.get(name, {})
    if case.name in refused:
        with pytest.raises(ValueError, match=refused[case.name]):
            run(name, case.make(case.budget, **sizes), np.array([1]))
        return
    policy = case.make(case.budget, **sizes)
    both, alone = run(name, policy, np.arange(2)), run(name, policy, np.array([1]))
    np.testing.assert_allclose(both[:, 1:], alone, atol=1e-4 * max(1.0, np.abs(alone).max()))
