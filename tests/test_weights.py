"""Checkpoints in, and every way in which they can be wrong."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax
import models


@pytest.fixture
def checkpoint(tmp_path, tiny):
    """A saved model, and its config and tensors to be spoiled."""
    models.save(tmp_path, *tiny)
    return tmp_path, json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")


def write(path, config=None, tensors=None):
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, path / "model.safetensors")


def test_round_trip(checkpoint, tiny):
    path, _, _ = checkpoint
    model, params = models.load(path)
    assert model.config.num_layers == 3
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(tiny[1]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_sharded(checkpoint, tiny):
    path, _, tensors = checkpoint
    names = sorted(tensors)
    (path / "model.safetensors").unlink()
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({n: tensors[n] for n in part}, path / file)
    index = {"weight_map": {n: file for file, part in shards.items() for n in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    _, params = models.load(path)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(tiny[1]), strict=True):
        np.testing.assert_array_equal(a, b)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lists \['model-00002-of-00002.safetensors'\], which do not exist"):
        models.load(path)


def test_bfloat16(tmp_path, tiny):
    model, params = tiny
    models.save(tmp_path, model, params, dtype="bfloat16")
    loaded, half = models.load(tmp_path, dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype("bfloat16")}
    tokens = np.arange(12, dtype=np.int32)[None]
    plan = lambda m: kvjax.make_plan(m.config, kvjax.methods.h2o(6), prompt_len=12, max_new_tokens=2)
    exact, _ = kvjax.prefill(model, params, jnp.asarray(tokens), plan(model))
    rough, state = kvjax.prefill(loaded, half, jnp.asarray(tokens), plan(loaded))
    assert state.layers[0].k.dtype == jnp.bfloat16
    assert rough.dtype == jnp.float32
    np.testing.assert_allclose(rough, exact, atol=0.1 * float(jnp.abs(exact).max()))


def test_missing_extra_and_misshaped_tensors_are_named(checkpoint):
    path, _, tensors = checkpoint
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.9.surprise"] = np.zeros(3, np.float32)
    tensors["model.norm.weight"] = np.zeros(5, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int32)
    write(path, tensors=tensors)
    with pytest.raises(ValueError, match=r"does not fit its config\.json") as error:
        models.load(path)
    for part in (
        "missing tensors ['model.layers.1.mlp.up_proj.weight']",
        "extra tensors ['model.layers.9.surprise']",
        "model.norm.weight has shape (5,), config.json implies (32,)",
        "lm_head.weight has dtype int32, expected a float type",
    ):
        assert part in str(error.value)


def test_truncated_file(checkpoint):
    path, _, _ = checkpoint
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        models.load(path)


def test_untied_head_of_a_tied_model(checkpoint):
    path, config, tensors = checkpoint
    write(path, config={**config, "tie_word_embeddings": True})
    with pytest.raises(ValueError, match=r"lm_head.weight differs from it; set tie_word_embeddings to false"):
        models.load(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write(path, tensors=tensors)
    model, _ = models.load(path)
    assert model.config.tie_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel is not supported; supported are \['Llama"),
        ({"architectures": None}, "not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rotary scaling 'longrope' is not supported"),
        ({"hidden_act": "swish2"}, "activation 'swish2' is not one of"),
        ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3 kv heads"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_unsupported_configs(checkpoint, change, message):
    path, config, _ = checkpoint
    write(path, config={**config, **change})
    with pytest.raises(ValueError, match=message):
        models.load(path)


def test_incomplete_directories(tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ValueError, match=r"config.json lacks \['vocab_size'"):
        models.load(tmp_path)
    with pytest.raises(ValueError, match="neither a directory nor a hub id"):
        models.load(tmp_path / "nowhere")


def test_no_weights(checkpoint):
    path, _, _ = checkpoint
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"only \['config.json', 'pytorch_model.bin'\]; convert the weights"):
        models.load(path)
    with pytest.raises(ValueError, match=r"has no tokenizer.json"):
        models.load_tokenizer(path)


def test_a_real_checkpoint_continues_exactly(shared_data):
    """A pretrained Llama, and its greedy continuation as two other implementations gave it."""
    model, params = models.load(shared_data / "stories260k")
    reference = json.loads((shared_data / "stories260k" / "reference.json").read_text())
    prompt = np.array([reference["prompt_ids"]])
    expected = reference["greedy_ids"][prompt.shape[1] :]
    result = kvjax.generate(model, params, prompt, max_new_tokens=len(expected))
    assert result.tokens[0].tolist() == expected


def test_parameters_by_orbax(tmp_path, tiny):
    model, params = tiny
    from kvjax import checkpoint

    checkpoint.save_params(tmp_path / "params", params)
    restored = checkpoint.load_params(tmp_path / "params", model.shapes)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)
    wrong = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] + 1), x.dtype), model.shapes)
    with pytest.raises(ValueError, match=r"parameters of another shape: .*embed_tokens.* there, .* wanted"):
        checkpoint.load_params(tmp_path / "params", wrong)
    with pytest.raises(ValueError, match="exists; choose a new directory"):
        checkpoint.save_params(tmp_path / "params", params)


@pytest.mark.parametrize("name", ["h2o", "streaming_llm", "ada"])
def test_a_compressed_prompt_is_stored_and_resumed(tmp_path, tiny, name):
    """Restored runs continue bit for bit, and with an equal plan built anew."""
    from kvjax import checkpoint, methods

    model, params = tiny
    make = {
        "h2o": lambda: kvjax.when(kvjax.every(3), methods.h2o(8)),
        "streaming_llm": lambda: methods.streaming_llm(8),
        "ada": lambda: kvjax.Evict(methods.h2o(8).score, 8, heads=kvjax.Adaptive(), when=kvjax.every_step()),
    }[name]
    plan = lambda: kvjax.make_plan(model.config, make(), prompt_len=20, max_new_tokens=12)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 20)), jnp.int32)
    logits, state = kvjax.prefill(model, params, tokens, plan(), key=jax.random.key(3))
    checkpoint.save_state(tmp_path / "prompt", state)
    restored = checkpoint.load_state(tmp_path / "prompt", plan())
    assert jax.tree.structure(restored) == jax.tree.structure(state)

    sampler = kvjax.Sample(temperature=1.5)
    go_on = lambda state: kvjax.generate_from(model, params, logits, state, max_new_tokens=12, sampler=sampler)
    a, b = go_on(state), go_on(restored)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)

    other = kvjax.make_plan(model.config, methods.h2o(9), prompt_len=20, max_new_tokens=12)
    with pytest.raises(ValueError, match="was made for another plan"):
        checkpoint.load_state(tmp_path / "prompt", other)
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        checkpoint.load_state(tmp_path / "nowhere", plan())
    with pytest.raises(ValueError, match="holds state, not params"):
        checkpoint.load_params(tmp_path / "prompt", model.shapes)
