"""Checkpoints in, and every way in which they can be wrong."""

import dataclasses
import json
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from kvjax import generate, methods, models, prefill
from kvjax.models import families, weights
from tests.files import contents


def write(path, config=None, tensors=None):
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, path / "model.safetensors")


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


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


def test_bfloat16(tmp_path, shallow):
    model, params = shallow
    models.save(tmp_path, model, params, dtype="bfloat16")
    loaded, half = models.load(tmp_path, dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype("bfloat16")}
    tokens = np.arange(12, dtype=np.int32)[None]
    how = {"policy": methods.h2o(6), "max_new_tokens": 2}
    exact, _ = prefill(model, params, tokens, **how)
    rough, state = prefill(loaded, half, tokens, **how)
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
        "lm_head.weight has dtype I32, expected a float type",
    ):
        assert part in str(error.value)


def test_untied_head_of_a_tied_model(checkpoint):
    path, config, tensors = checkpoint
    write(path, config={**config, "tie_word_embeddings": True})
    with pytest.raises(ValueError, match=r"lm_head.weight differs from it; set tie_word_embeddings to false"):
        models.load(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write(path, tensors=tensors)
    model, _ = models.load(path)
    assert model.config.tie_embeddings


SMALL = {
    "vocab_size": 9,
    "hidden_size": 32,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("model_type", "sizes", "missing"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}, "transformer."),
        ("opt", {**SMALL, "ffn_dim": 8, "max_position_embeddings": 16}, "model."),
    ],
)
def test_a_decoder_alone_is_stored_under_shorter_names(tmp_path, model_type, sizes, missing):
    model = models.LanguageModel(families.from_hugging_face({**sizes, "vocab_size": 9, "model_type": model_type}))
    params = jax.jit(model.init)(jax.random.key(0))
    models.save(tmp_path, model, params)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n.removeprefix(missing): x for n, x in tensors.items()}, tmp_path / "model.safetensors")
    assert_same(models.load(tmp_path)[1], params)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"

INDEX = "model.safetensors.index.json"

DAMAGE = {
    "config_pointer": ({"config.json": POINTER}, "config.json is a pointer of Git LFS"),
    "config_list": ({"config.json": b"[]"}, "config.json: config.json holds a list, not an object"),
    "config_null": ({"config.json": b"null"}, "config.json holds a NoneType"),
    "config_latin": ({"config.json": '{"a": "\xe9"}'.encode("latin-1")}, "config.json is not JSON in UTF-8"),
    "config_cut": ({"config.json": b'{"architectures": ['}, "config.json is not JSON"),
    "config_deep": ({"config.json": b"[" * 100_000}, "config.json is not JSON"),
    "weights_pointer": ({"model.safetensors": POINTER}, "model.safetensors is a pointer of Git LFS"),
    "weights_empty": ({"model.safetensors": b""}, "model.safetensors is not a complete safetensors file"),
    "index_pointer": ({"model.safetensors": None, INDEX: POINTER}, "index.json is a pointer of Git LFS"),
    "index_cut": ({"model.safetensors": None, INDEX: b"{"}, "index.json is not JSON"),
    "index_list": ({"model.safetensors": None, INDEX: b"[]"}, "index.json has no weight_map"),
    "index_without_map": ({"model.safetensors": None, INDEX: b"{}"}, "index.json has no weight_map"),
    "index_of_numbers": ({"model.safetensors": None, INDEX: b'{"weight_map": {"x": 1}}'}, "has no weight_map"),
    "index_of_a_path_out": (
        {"model.safetensors": None, "../x.safetensors": b"", INDEX: b'{"weight_map": {"x": "../x.safetensors"}}'},
        r"index.json lists \['../x.safetensors'\], outside of its directory; copy them into it",
    ),
    "index_of_a_long_name": (
        {"model.safetensors": None, INDEX: b'{"weight_map": {"x": "%s"}}' % (b"x" * 5000)},
        r"index.json lists \['x{99}…'\], which do not exist; download them$",
    ),
    "no_index": (
        {"model.safetensors": None, "model-00001-of-00002.safetensors": b""},
        "has no model.safetensors .* download model.safetensors.index.json",
    ),
    "tokenizer_pointer": ({"tokenizer.json": POINTER}, "tokenizer.json is a pointer of Git LFS"),
    "tokenizer_cut": ({"tokenizer.json": b"{"}, r"no tokenizer can be made of \[.*'tokenizer.json'"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_with_what_to_do(checkpoint, damage):
    path, _, _ = checkpoint
    files, message = DAMAGE[damage]
    for name, content in files.items():
        (path / name).unlink() if content is None else (path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{message}"):
        models.load_tokenizer(path) if "tokenizer.json" in files else models.load(path)


def test_a_single_file_hides_a_stale_index(checkpoint, tiny):
    path, _, _ = checkpoint
    (path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}))
    assert_same(models.load(path)[1], tiny[1])


def test_a_tied_model_may_store_its_head_alone(checkpoint):
    path, config, tensors = checkpoint
    head = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    write(path, config={**config, "tie_word_embeddings": True}, tensors=tensors)
    np.testing.assert_array_equal(models.load(path)[1]["embed_tokens"], head)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (np.nan, "float32", "1 of .* values that are not finite; download it again"),
        (-np.inf, "bfloat16", "1 of .* values that are not finite; download it again"),
        (1e6, "float16", "1 of .* values that float16 cannot hold; load it as bfloat16"),
    ],
)
def test_values_that_are_no_parameters_are_not_loaded(checkpoint, value, dtype, message):
    path, _, tensors = checkpoint
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 2] = value
    write(path, tensors=tensors)
    with pytest.raises(ValueError, match=f"{path}: {name} has {message}"):
        models.load(path, dtype=dtype)


def test_tensors_of_8_bits_are_named(checkpoint):
    file = checkpoint[0] / "model.safetensors"
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = data[8:start].replace(b'"dtype":"F32","shape":[32]', b'"dtype":"F8_E4M3","shape":[128]')
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[start:])
    with pytest.raises(ValueError, match=r"model.norm.weight has dtype F8_E4M3, expected a float type of 16 bits"):
        models.load(file.parent)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "float8_e4m3fn", "int8", None, 16])
def test_dtypes_are_named_in_full(checkpoint, tiny, dtype):
    path, _, _ = checkpoint
    right = {"bf16": r"; write 'bfloat16'", "fp16": r"; write 'float16'", "fp32": r"; write 'float32'"}.get(dtype, "")
    for use, more in (
        (lambda: models.load(path, dtype=dtype), ", 'auto'"),
        (lambda: models.save(path, *tiny, dtype=dtype), ""),
    ):
        named = rf"dtype=.* is not one of \('float32', 'bfloat16', 'float16', 'float64'{more}\){right}$"
        with pytest.raises(ValueError, match=named):
            use()
    with pytest.raises(ValueError, match="dtype='auto' is not one of"):
        models.save(path, *tiny, dtype="auto")


def random_params(model):
    rng = np.random.default_rng(5)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), model.shapes)


FAMILIES = {
    "LlamaForCausalLM": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "tie_embeddings": True},
    "MistralForCausalLM": {"sliding_window": (5, 5, 5)},
    "MinistralForCausalLM": {"sliding_window": (5, None, 5)},
    "Qwen2ForCausalLM": {"qkv_bias": True, "sliding_window": (None, None, 5)},
    "Qwen3ForCausalLM": {"qk_norm": True, "rope": models.Rope("yarn", factor=4.0, original_max=16, beta_fast=8.0)},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_saved_over_what_stood_there_and_read_back(checkpoint, tiny, family):
    path, _, _ = checkpoint
    for stale in (INDEX, "model-00001-of-00002.safetensors"):
        (path / stale).write_text("stale")
    (path / "tokenizer.json").write_text("stays")
    model = models.LanguageModel(dataclasses.replace(tiny[0].config, **FAMILIES[family]))
    params = random_params(model)
    models.save(path, model, params)
    again, restored = models.load(path)
    assert again == model
    assert_same(restored, params)
    assert sorted(contents(path)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert json.loads((path / "config.json").read_text())["architectures"] == [family]
    assert len({(path / name).stat().st_mode for name in ("config.json", "model.safetensors")}) == 1  # who may read


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv_bias": True, "mlp_bias": True}, "Qwen2ForCausalLM comes nearest, but has no mlp_bias=True"),
        ({"out_bias": True}, "LlamaForCausalLM comes nearest, but has no out_bias=True"),
        ({"sliding_window": (5, None, 7)}, r"has no windows=\(5, None, 7\)"),
        ({"rope": models.Rope("linear", factor=2.0, attention_factor=1.5)}, "has no rope=Rope"),
        ({"rope": models.Rope("dynamic", factor=2.0, original_max=32)}, "has no rope=Rope"),
        ({"num_layers": 2}, r"params\['layers_2'\].*: \(.*\), but the model has none"),
        ({"mlp_dim": 50}, r": \(32, 48\), but the model has \(32, 50\)"),
    ],
)
def test_a_refused_save_leaves_what_stood_there(checkpoint, tiny, change, message):
    path, _, _ = checkpoint
    before = contents(path)
    model = models.LanguageModel(dataclasses.replace(tiny[0].config, **change))
    params = tiny[1] if change.keys() & {"num_layers", "mlp_dim"} else random_params(model)
    with pytest.raises(ValueError, match=message):
        models.save(path, model, params)
    with pytest.raises(ValueError, match=message):
        models.save(path / "new", model, params)
    assert contents(path) == before


def test_values_that_a_dtype_cannot_hold_are_not_saved(tmp_path, tiny):
    model, params = tiny
    large = {**params, "embed_tokens": params["embed_tokens"].at[3, 4].set(1e6)}
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight has values that float16 cannot hold"):
        models.save(tmp_path / "new", model, large, dtype="float16")
    whole = {**params, "embed_tokens": jnp.ones((61, 32), jnp.int32)}
    with pytest.raises(ValueError, match=r"params\['embed_tokens'\] is int32, not an array of floats"):
        models.save(tmp_path / "new", model, whole)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left")])
def test_a_save_that_fails_leaves_what_stood_there(checkpoint, tiny, monkeypatch, error):
    path, _, _ = checkpoint
    before = contents(path)

    def full(tensors, file, metadata):
        file.write_bytes(b"half")
        raise error

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(OSError, match=f"{re.escape(str(path))}.*No space left.*what stood there is unchanged"):
        models.save(path, *tiny)
    assert contents(path) == before


@pytest.mark.parametrize("done", [0, 1])
def test_a_save_that_is_cut_off_between_its_two_files_loses_neither(checkpoint, tiny, monkeypatch, done):
    path, _, _ = checkpoint
    model = models.LanguageModel(dataclasses.replace(tiny[0].config, qkv_bias=True))
    params, replace, calls = random_params(model), os.replace, []

    def cut(old, new):
        if len(calls) == done:
            raise KeyboardInterrupt
        calls.append(new)
        replace(old, new)

    monkeypatch.setattr(os, "replace", cut)
    with pytest.raises(KeyboardInterrupt):
        models.save(path, model, params)
    with pytest.raises(ValueError, match=r"a save was cut off: move the files in \['.*\.saving-.*'\] here"):
        models.load(path)
    (beside,) = path.glob(".saving-*")
    for file in beside.iterdir():
        replace(file, path / file.name)
    assert_same(models.load(path)[1], params)
    beside.rmdir()


@pytest.mark.usefixtures("unchecked")
def test_paths_that_are_no_checkpoint_directory(checkpoint, tiny, tmp_path):
    path, _, _ = checkpoint
    for use in (models.load, models.load_tokenizer, lambda source: models.save(source, *tiny)):
        for source in (None, 3, "", "~nobody-of-this-name/x", "a" * 300, "a\0b"):
            with pytest.raises(ValueError, match=r"is not the path of a checkpoint directory|nobody-of-this-name"):
                use(source)
    for use in (models.load, models.load_tokenizer):
        with pytest.raises(ValueError, match=r"config.json is neither .* it is a file: give the directory"):
            use(path / "config.json")
    (tmp_path / "odd" / "model.safetensors").mkdir(parents=True)
    for given, message in (
        ((path / "config.json", *tiny), "config.json is in the way"),
        ((path / "config.json" / "below", *tiny), "config.json is in the way"),
        ((tmp_path / "odd", *tiny), "model.safetensors is in the way"),
        ((path, *tiny[::-1]), "model is a dict, not a LanguageModel"),
    ):
        with pytest.raises(ValueError, match=message):
            models.save(*given)
    with pytest.raises(ValueError, match="params are traced, and have no values to write"):
        jax.eval_shape(lambda params: models.save(path, tiny[0], params), tiny[1])


def test_incomplete_directories(tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ValueError, match=r"config.json lacks \['vocab_size'"):
        models.load(tmp_path)


def test_no_weights(checkpoint):
    path, _, _ = checkpoint
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"only \['config.json', 'pytorch_model.bin'\]; .* are pickles"):
        models.load(path)
    (path / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"only \['config.json'\]; convert the weights to safetensors, or download"):
        models.load(path)
    with pytest.raises(ValueError, match=r"has no tokenizer.json"):
        models.load_tokenizer(path)


def test_a_real_checkpoint_continues_exactly(shared_data):
    """A pretrained Llama, and its greedy continuation as two other implementations gave it."""
    model, params = models.load(shared_data / "stories260k")
    reference = json.loads((shared_data / "stories260k" / "reference.json").read_text())
    prompt = np.array([reference["prompt_ids"]])
    expected = reference["greedy_ids"][prompt.shape[1] :]
    result = generate(model, params, prompt, max_new_tokens=len(expected), eos_ids=())
    assert result.tokens[0].tolist() == expected


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A small GPT-OSS, saved."""
    path = tmp_path_factory.mktemp("experts")
    raw = {**SMALL, "intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 4, "model_type": "gpt_oss"}
    model = models.LanguageModel(families.from_hugging_face(raw))
    models.save(path, model, model.init(jax.random.key(0)))
    return path


def in_4_bits(path, to):
    """The same checkpoint with experts in MXFP4, and what they are in float64."""
    rng, values = np.random.default_rng(0), {}
    shutil.copytree(path, to, dirs_exist_ok=True)
    raw, tensors = json.loads((to / "config.json").read_text()), load_file(to / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        E, D, R = tensors.pop(name).shape
        codes = rng.integers(0, 16, (E, R, D // 32, 32), dtype=np.uint8)
        scales = rng.integers(110, 130, (E, R, D // 32), dtype=np.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = codes[..., ::2] | codes[..., 1::2] << 4, scales
        sign, exponent, half = 1.0 - 2.0 * (codes >> 3), codes >> 1 & 3, codes & 1
        size = np.where(exponent == 0, half / 2, (1 + half / 2) * 2.0 ** (exponent - 1.0))
        values[name] = (sign * size * 2.0 ** (scales[..., None] - 127.0)).reshape(E, R, D)
    write(to, {**raw, "quantization_config": {"quant_method": "mxfp4"}}, tensors)
    return values, tensors


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_experts_in_4_bits(experts, tmp_path, dtype):
    values, _ = in_4_bits(experts, tmp_path)
    if dtype == "auto":
        with pytest.raises(ValueError, match=r"stores bfloat16 .* and float32"):
            models.load(tmp_path, dtype=dtype)
        return
    _, params = models.load(tmp_path, dtype=dtype)
    for name, wanted in values.items():
        *_, layer, _, _, leaf = name.split(".")
        np.testing.assert_array_equal(params[f"layers_{layer}"]["mlp"]["experts"][leaf], wanted)


@pytest.mark.parametrize("damage", [None, "scales of another shape", "no numbers"])
def test_matrices_in_8_bits(tiny, tmp_path, damage):
    """As DeepSeek-V3 is published: blocks of 3 x 5 have a factor, the last rows and columns smaller ones."""
    model, params = tiny
    models.save(tmp_path, model, params)
    raw, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    rng, wanted = np.random.default_rng(0), {}
    for name in [n for n in tensors if "_proj" in n]:
        rows, columns = tensors[name].shape
        tensors[name] = tensors[name].astype(jnp.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = rng.uniform(0.5, 2, (-(-rows // 3), -(-columns // 5))).astype(np.float32)
        factors = tensors[f"{name}_scale_inv"][np.arange(rows)[:, None] // 3, np.arange(columns) // 5]
        wanted[name] = tensors[name].astype(np.float32) * factors
    if damage == "no numbers":
        del tensors[name]
    elif damage:
        tensors[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"][1:].copy()
    how = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [3, 5]}
    write(tmp_path, {**raw, "quantization_config": how}, tensors)
    if damage:
        with pytest.raises(ValueError, match=rf"{name}_scale_inv has shape .* a factor in F32 for each block of 3 x 5"):
            models.load(tmp_path)
        return
    model, params = models.load(tmp_path)
    models.save(tmp_path / "again", model, params)
    found = load_file(tmp_path / "again" / "model.safetensors")
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize("damage", ["no scales", "other scales", "blocks of 8"])
def test_experts_in_4_bits_that_do_not_fit(experts, tmp_path, damage):
    _, tensors = in_4_bits(experts, tmp_path)
    name = "model.layers.1.mlp.experts.down_proj"
    if damage == "no scales":
        del tensors[f"{name}_scales"]
    elif damage == "other scales":
        tensors[f"{name}_scales"] = tensors[f"{name}_scales"][:, 1:].copy()
    else:
        tensors[f"{name}_blocks"] = tensors[f"{name}_blocks"][..., :8].copy()
    write(tmp_path, tensors=tensors)
    with pytest.raises(ValueError, match=rf"{name}_blocks has shape .* and {name}_scales .* MXFP4 has bytes"):
        models.load(tmp_path)


def test_layers_behind_the_last_are_left_out_and_a_bias_stays_in_float32(tmp_path):
    raw = {**SMALL, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "model_type": "glm4_moe"}
    model = models.LanguageModel(families.from_hugging_face(raw))
    models.save(tmp_path, model, model.init(jax.random.key(0)), dtype="bfloat16")
    tensors = load_file(tmp_path / "model.safetensors")
    write(tmp_path, tensors={**tensors, "model.layers.2.eh_proj.weight": np.ones((2, 2), np.float32)})
    found, params = models.load(tmp_path, dtype="auto")
    assert found.config.dtype == "bfloat16"
    assert params["layers_1"]["mlp"]["gate"]["e_score_correction_bias"].dtype == jnp.float32
    write(tmp_path, tensors={**tensors, "model.layers.1.eh_proj.weight": np.ones((2, 2), np.float32)})
    with pytest.raises(ValueError, match=r"extra tensors .*layers\.1\.eh_proj"):
        models.load(tmp_path)
