"""Checkpoints in, and every way in which they can be wrong."""

import dataclasses
import json
import math
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

MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 5}

SIZES = ("vocab_size", "embed_dim", "mlp_dim", "num_layers", "num_query_heads", "num_kv_heads", "head_dim")


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny):
    """The directory of a saved model."""
    path = tmp_path_factory.mktemp("saved")
    models.save(path, *tiny)
    return path


@pytest.fixture
def checkpoint(tmp_path, saved):
    """A saved model, and its config and tensors to be spoiled."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path, json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")


def write(path, config=None, tensors=None):
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, path / "model.safetensors")


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


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
        ({"architectures": ["BertForMaskedLM"]}, r"BertForMaskedLM is not supported; supported are \[.*'GPT2"),
        ({"architectures": None, "model_type": "bert"}, "none, model_type 'bert'> is not supported"),
        ({"architectures": 3}, "architecture 3 is not supported"),
        ({"architectures": [["LlamaForCausalLM"]]}, "is not supported"),
        ({"model_type": "qwen2"}, "model_type='qwen2' contradict each other"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "rotary scaling 'mrope' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, r"'longrope' needs \['short_factor', 'long_"),
        ({"hidden_act": "swish2"}, "activation 'swish2' is not one of"),
        ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3 kv heads"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"head_dim": None, "hidden_size": 33}, "hidden_size=33 is not a multiple of 4 heads"),
        ({"rope_scaling": "yarn"}, "the rotary section is 'yarn', not an object"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, r"own for \['full_attention'\]"),
        ({"rope_scaling": {"type": "linear"}}, r"'linear' needs \['factor'\]"),
        ({"num_hidden_layers": 10**9}, "config.json has 1000000000 layers, the weights have 3"),
        ({**MISTRAL, "layer_types": ["full_attention"]}, "is not a list of 3 names"),
        ({**MISTRAL, "layer_types": ["chunked_attention"] * 3}, "is not a list of 3 names out of"),
    ],
)
def test_unsupported_configs(checkpoint, change, message):
    path, config, _ = checkpoint
    write(path, config={**config, **change})
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{message}"):
        models.load(path)


SMALL = {
    "vocab_size": 9,
    "hidden_size": 32,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true is not supported"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, r"attn_logit_softcapping=-1.0 must be a positive number"),
        ("gemma3_text", {"rope_parameters": [1]}, r"rope_parameters=\[1\] is not an object with a section for each"),
        ("gemma3_text", {"layer_types": ["chunked"] * 2}, "is not a list of 2 names out of"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=true is not supported"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine=false is not supported"),
        ("gptj", {"rotary_dim": 9}, "channels=9 is odd"),
        ("gptj", {"rotary_dim": 10}, "rope turns 10 channels, but head_dim=8"),
        ("gptj", {"tie_word_embeddings": True}, "tie_word_embeddings=true is not supported for GPT-J"),
        ("gpt_neox", {"rotary_pct": "all"}, "partial_rotary_factor='all' must be a positive number"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi=False is not supported; it must be True"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln=True is not supported; it must be False"),
        (
            "mpt",
            {"attn_config": {"alibi_bias_max": 0}},
            r"attn_config.alibi_bias_max=0 must be a positive number",
        ),
        ("mpt", {"attn_config": "torch"}, "attn_config='torch' is not an object"),
        ("mpt", {"no_bias": False}, "no_bias=False is not supported; it must be True"),
        ("mpt", {"norm_type": "rmsnorm"}, "it must be 'low_precision_layernorm' or 'layernorm'"),
        ("mpt", {"expansion_ratio": 2.5}, "expansion_ratio=2.5"),
        ("mpt", {"architectures": ["MPTForCausalLM"], "logit_scale": 0.5}, "logit_scale=0.5 is not supported; .* None"),
        ("opt", {"architectures": ["MPTForCausalLM"]}, "contradict each other"),
        ("falcon", {"alibi": True}, "alibi=True is not supported; it must be False"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn=False is not supported"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2 is not supported; it must be None or 1"),
        ("falcon", {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads=2 is not supported; it must be None or 4"),
        ("stablelm", {"use_qkv_bias": "yes"}, "use_qkv_bias='yes' must be True or False"),
        ("phi3", {"rope_scaling": {**LONG, "short_factor": [1.0] * 3}}, "short_factor has 3 numbers and long_factor 4"),
        ("phi3", {"rope_scaling": {**LONG, "partial_rotary_factor": 0.5}}, "has 4 numbers for 4 turning channels"),
        ("phi3", {"rope_scaling": {**LONG, "long_factor": 2.0}}, "long_factor=2.0 is not a list of numbers"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_a_family_does_not_have_is_refused(model_type, change, message):
    with pytest.raises(ValueError, match=message):
        families.from_hugging_face({**SMALL, "model_type": model_type, **change})


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


def test_parts_in_turn_have_no_norms_of_their_own():
    config = families.from_hugging_face({**SMALL, "model_type": "falcon"})
    with pytest.raises(ValueError, match="two_norms=True, but parallel=False"):
        dataclasses.replace(config, two_norms=True, parallel=False)


def test_a_config_of_no_family_makes_no_model():
    sizes = dict(zip(SIZES, (9, 32, 8, 2, 4, 4, 8), strict=True))
    with pytest.raises(ValueError, match=r"config is a DecoderConfig, of no family; give one of \[.*'GPT2Config'"):
        models.LanguageModel(models.DecoderConfig(**sizes))


def test_a_config_that_no_architecture_has_is_not_saved(tmp_path):
    config = families.from_hugging_face({**SMALL, "model_type": "gptj", "rotary_dim": 4})
    model = models.LanguageModel(dataclasses.replace(config, sliding_window=(4, None)))
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), model.shapes)
    with pytest.raises(ValueError, match=r"GPTJForCausalLM comes nearest, but has no windows=\(4, None\)"):
        models.save(tmp_path, model, params)


NO_NUMBER = ("8", "", True, False, [8], {}, math.nan, math.inf, -math.inf, -1, 10**400)

NO_SIZE = (*NO_NUMBER, 0, 2.5, 8.0, 2**31)

YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}


LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


BAD_VALUES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), (None, *NO_SIZE)),
    **dict.fromkeys(("num_attention_heads", "max_position_embeddings"), (None, *NO_SIZE)),
    **dict.fromkeys(("num_key_value_heads", "head_dim"), NO_SIZE),
    "bos_token_id": [x for x in NO_SIZE if x != 0],
    "eos_token_id": [*(x for x in NO_SIZE if x not in (0, [8])), [None], ["8"], [1.0]],
    **dict.fromkeys(("rms_norm_eps", "rope_theta"), (None, *NO_NUMBER, 0, 1e-320)),
    **{k: (None, "true", 0, 1.0, []) for k in ("tie_word_embeddings", "attention_bias", "mlp_bias")},
    **{("linear", "factor"): (None, *NO_NUMBER, 0), ("dynamic", "factor"): (None, *NO_NUMBER, 0)},
    **{("llama3", k): (None, *NO_NUMBER, 0) for k in ("factor", "low_freq_factor", "high_freq_factor", "rope_theta")},
    ("llama3", "original_max_position_embeddings"): NO_SIZE,
    ("yarn", "original_max_position_embeddings"): NO_SIZE,
    ("yarn", "factor"): (*NO_NUMBER, 0),
    ("yarn", "attention_factor"): (*NO_NUMBER, 0),
    ("yarn", "rope_theta"): (None, *NO_NUMBER, 0, 1.0),
    ("yarn", "truncate"): ("true", 1),
    **{("yarn", k): ("8", True, [8], -1, math.nan) for k in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")},
    **{("yarn", k): (None, 3, ["yarn"], "su") for k in ("rope_type",)},
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("key", BAD_VALUES, ids=str)
def test_a_value_that_its_key_cannot_have_is_named_with_its_file(checkpoint, key):
    path, config, _ = checkpoint
    sections = {"linear": {"type": "linear"}, "dynamic": {"type": "dynamic"}, "llama3": LLAMA3, "yarn": YARN}
    for value in BAD_VALUES[key]:
        change = {key: value} if isinstance(key, str) else {"rope_scaling": {**sections[key[0]], key[1]: value}}
        write(path, config={**config, **change})
        with pytest.raises(ValueError, match=f"^{re.escape(str(path / 'config.json'))}: "):
            models.load(path)


@pytest.mark.parametrize(
    "key", [("MistralForCausalLM", "sliding_window"), ("Qwen2ForCausalLM", "sliding_window")], ids=lambda key: key[0]
)
def test_windows_are_whole_numbers(checkpoint, key):
    path, config, _ = checkpoint
    own = {"architectures": [key[0]], "model_type": None, "use_sliding_window": True}
    for value in NO_SIZE:
        write(path, config={**config, **own, key[1]: value})
        with pytest.raises(ValueError, match=r"config.json: sliding_window=.* must be a whole number"):
            models.load(path)
    for change in ({"use_sliding_window": None}, {"max_window_layers": 1.5}):
        write(path, config={**config, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **change})
        with pytest.raises(ValueError, match=f"config.json: {next(iter(change))}="):
            models.load(path)


@pytest.mark.parametrize(
    "named", [None, [], "LlamaForCausalLM", ["LlamaModel", "LlamaForCausalLM"]], ids=["null", "none", "text", "two"]
)
def test_the_architecture_is_the_first_that_is_known_or_that_of_model_type(checkpoint, named, tiny):
    path, config, _ = checkpoint
    write(path, config={**config, "architectures": named})
    assert models.load(path)[0].config == tiny[0].config
    if not named:
        del config["architectures"]
        write(path, config=config)
        assert models.load(path)[0].config == tiny[0].config


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


def test_tensors_of_64_bits_are_rounded(checkpoint):
    path, _, tensors = checkpoint
    expected = models.load(path)[1]
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(np.float64)
    write(path, tensors=tensors)
    assert_same(models.load(path)[1], expected)


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
    with pytest.raises(ValueError, match="dtype='float64' needs 64 bits"):
        models.load(path, dtype="float64")


def contents(path):
    return {p.name: p.read_bytes() for p in path.iterdir()}


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
        ({"mlp_dim": 50}, r": \(48, 32\), but the model has \(50, 32\)"),
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
    with pytest.raises(ValueError, match=r"config.json is in the way"):
        models.save(path / "config.json", *tiny)
    with pytest.raises(ValueError, match="model is a dict, not a LanguageModel"):
        models.save(path, *tiny[::-1])
    with pytest.raises(ValueError, match=r"config.json is in the way"):
        models.save(path / "config.json" / "below", *tiny)
    with pytest.raises(ValueError, match="params are traced, and have no values to write"):
        jax.eval_shape(lambda params: models.save(path, tiny[0], params), tiny[1])
    (tmp_path / "odd" / "model.safetensors").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"model.safetensors is in the way"):
        models.save(tmp_path / "odd", *tiny)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({k: v}, f"{k}=.* must be a whole number from 1")
            for k in SIZES
            for v in (None, "8", True, 0, -1, 2.0, 2**31)
        ),
        *(
            ({"norm_eps": v}, "norm_eps=.* must be a positive number")
            for v in (0, -1e-5, math.nan, math.inf, "1", None)
        ),
        *(({k: 1}, f"{k}=1 must be True or False") for k in ("tie_embeddings", "qkv_bias", "mlp_bias", "qk_norm")),
        ({"num_kv_heads": 3}, "4 query heads are not a multiple of 3 kv heads"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"head_dim": 2, "rope": models.Rope("dynamic")}, "head_dim=2 is too small for dynamic"),
        ({"sliding_window": (4, 4)}, "sliding_window has 2 entries for 3 layers"),
        ({"sliding_window": (4, 0, None)}, "sliding_window=0 must be a whole number"),
        ({"sliding_window": 4}, "sliding_window=4 is not a tuple of whole numbers"),
        ({"eos_ids": 2}, "eos_ids=2 is not a tuple of whole numbers"),
        ({"eos_ids": (-1,)}, "eos_ids=-1 must be a whole number from 0"),
        ({"bos_id": 1.0}, "bos_id=1.0 must be a whole number"),
        ({"dtype": "bf16"}, "dtype='bf16' is not one of"),
        ({"rope": "yarn"}, "rope='yarn' is not a Rope"),
    ],
    ids=str,
)
def test_a_model_config_is_checked(tiny, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tiny[0].config, **change)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({k: v}, f"{k}=.* must be a positive number")
            for k in ("theta", "factor")
            for v in (0, -1, math.nan, "1", None)
        ),
        ({"kind": "su"}, "kind='su' is not one of"),
        ({"original_max": 16.5}, "original_max=16.5 must be a whole number"),
        ({"truncate": 1}, "truncate=1 must be True or False"),
        ({"kind": "llama3", "low_freq_factor": 4.0}, "low_freq_factor=4.0 is not less than high_freq_factor=4.0"),
        ({"kind": "yarn", "theta": 1}, "theta=1.0 is not greater than 1"),
    ],
    ids=str,
)
def test_a_rope_is_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        models.Rope(**fields)


@pytest.mark.usefixtures("unchecked")
def test_numbers_of_a_config_have_their_types(tiny):
    """Numpy's and Python's numbers make one config, in equality and in hashes."""
    changed = dataclasses.replace(
        tiny[0].config,
        num_layers=np.int64(3),
        norm_eps=np.float64(1e-5),
        sliding_window=[np.int32(4), None, None],
        rope=models.Rope(theta=10000),
    )
    assert type(changed.num_layers) is int
    assert repr(changed) == repr(dataclasses.replace(tiny[0].config, sliding_window=(4, None, None)))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("key", [None, 0, "0", jax.random.split(jax.random.key(0)), np.zeros(3, np.uint32)], ids=type)
def test_random_parameters_need_one_key(tiny, key):
    with pytest.raises(ValueError, match=r"is not one key; make it with jax.random.key"):
        tiny[0].init(key)
    with pytest.raises(ValueError, match="config is a dict, not a ModelConfig"):
        models.LanguageModel({})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("sequences", "options", "message"),
    [
        ([], {}, "sequences is empty"),
        (None, {}, "sequences=None is not a sequence of sequences"),
        ([[1], []], {}, "at least one token"),
        ([[1], [2, -1]], {}, r"sequence 1 is \[2, -1\], not token ids"),
        ([[1.5, 2]], {}, r"sequence 0 is \[1.5, 2\], not token ids"),
        ([[1.0]], {}, "not token ids"),
        ([[True]], {}, "not token ids"),
        ([[2**31]], {}, "not token ids"),
        ([["a"]], {}, "not token ids"),
        (["text"], {}, "sequence 0 is 'text', not token ids"),
        ([[[1], [2, 3]]], {}, "not token ids"),
        ([1, 2], {}, "sequence 0 is 1, not token ids"),
        ([[1, 2]], {"width": 1}, "has 2 tokens, but the batch is 1 wide"),
        ([[1, 2]], {"width": 2.0}, "width=2.0 must be a whole number"),
        ([[1, 2]], {"pad_id": None}, "pad_id=None must be a whole number"),
        ([[1, 2]], {"pad_id": -1}, "pad_id=-1 must be a whole number from 0"),
    ],
)
def test_pad_left_takes_token_ids(sequences, options, message):
    with pytest.raises(ValueError, match=message):
        models.pad_left(sequences, **options)


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
