"""Configs of models, their parameters' names and shapes, and token ids for them."""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest

from kvjax import models
from kvjax.models import families
from tests.test_weights import SMALL, write

MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 5}
SIZES = ("vocab_size", "embed_dim", "mlp_dim", "num_layers", "num_query_heads", "num_kv_heads", "head_dim")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["BertForMaskedLM"]}, r"BertForMaskedLM is not supported; supported are \[.*'GPT2"),
        ({"architectures": None, "model_type": "bert"}, "none, model_type 'bert'> is not supported"),
        ({"architectures": 3}, "architecture 3 is not supported"),
        ({"architectures": [["LlamaForCausalLM"]]}, "is not supported"),
        ({"model_type": "qwen2"}, "model_type='qwen2' contradict each other"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}, r"quantised \(fp8\)"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "rotary scaling 'mrope' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, r"'longrope' needs \['short_factor', 'long_"),
        ({"hidden_act": "swish2"}, "activation 'swish2' is not one of"),
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


GEMMA4 = {"num_key_value_heads": 2, "hidden_size_per_layer_input": 0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true is not supported"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, r"attn_logit_softcapping=-1.0 must be a positive number"),
        ("gemma3_text", {"rope_parameters": [1]}, r"rope_parameters=\[1\] is not an object with a section for each"),
        ("gemma3_text", {"layer_types": ["chunked"] * 2}, "is not a list of 2 names out of"),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, r"lacks \['llama_4_scaling_beta', 'original_max"),
        ("olmo3", {"rope_parameters": [1]}, r"rope_parameters=\[1\] is not an object with a section for each"),
        ("cohere2", {"sliding_window": None}, "sliding_window=None must be a whole number"),
        ("cohere2", {"sliding_window_pattern": 0}, "sliding_window_pattern=0 must be a whole number from 1"),
        ("cohere2", {"layer_types": ["chunked_attention"] * 2}, "is not a list of 2 names out of"),
        ("cohere2", {"logit_scale": 0}, "logit_scale=0 must be a positive number"),
        ("cohere2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor != 1 is not supported"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers=\[1\] is not a list of 1 or 0 for each of 2 layers"),
        ("smollm3", {"no_rope_layers": [1, 2]}, r"no_rope_layers=\[1, 2\] is not a list of 1 or 0"),
        (
            "glm4_moe",
            {"num_key_value_heads": 2, "n_group": 3},
            "128 experts do not fill n_group=3 groups of two or more",
        ),
        (
            "glm4_moe",
            {"num_key_value_heads": 2, "n_group": 64, "topk_group": 2},
            "8 experts in topk_group=2 groups, but there are 64 of 2",
        ),
        (
            "glm4_moe",
            {"num_key_value_heads": 2, "routed_scaling_factor": 0},
            "routed_scaling_factor=0 must be a positive number",
        ),
        ("gemma4_text", {"vocab_size_per_layer_input": 3}, "vocab_size_per_layer_input=3 is less than vocab_size="),
        ("gemma4_text", {"num_kv_shared_layers": 1}, "num_kv_shared_layers=1 of 2 layers leaves none of each kind"),
        (
            "gemma4_text",
            GEMMA4 | {"layer_types": ["sliding_attention"] * 2},
            "the last layer must be of 'full_attention'",
        ),
        (
            "gemma4_text",
            GEMMA4 | {"per_layer_config": {"0": {"head_dim": 8}}},
            "must give all layers of full_attention",
        ),
        ("gemma4_text", GEMMA4 | {"global_head_dim": 7}, "global_head_dim=7 is odd"),
        (
            "gemma4_text",
            GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "4 query heads are not a multiple of num_global_key_value_heads=3",
        ),
        ("gemma4_text", GEMMA4 | {"enable_moe_block": True}, "num_experts=None must be a whole number"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank=0 must be a whole number from 1"),
        ("gemma4_text", GEMMA4 | {"sliding_window": None}, "sliding_window=None must be a whole number"),
        ("gemma4_text", GEMMA4 | {"rope_parameters": {"full_attention": "x"}}, "full_attention='x' is not an object"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 is odd"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported; .* is 'sigmoid'"),
        ("deepseek_v3", {"n_routed_experts": 12}, "12 experts do not fill n_group=8 groups"),
        ("deepseek_v3", {"v_head_dim": None}, "v_head_dim=None must be a whole number"),
        ("deepseek_v3", {"rope_scaling": {"rope_type": "yarn", "mscale_all_dim": -1.0}}, "mscale_all_dim=-1.0 must be"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "moe"]}, r"mlp_layer_types=\['sparse', 'moe'\] is not a list"),
        ("gpt_oss", {"num_key_value_heads": 2, "swiglu_limit": 0}, "swiglu_limit=0 must be a positive number"),
        ("gpt_oss", {"num_key_value_heads": 2, "num_local_experts": 3}, "goes to 4 experts, but there are 3"),
        ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, r"the checkpoint is quantised \(gptq\)"),
        ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, r"the checkpoint is quantised \(mxfp4\)"),
        (
            "qwen3_5_text",
            {"layer_types": ["linear_attention"] * 2},
            "none of 2 layers holds keys and values",
        ),
        ("qwen3_5_text", {"layer_types": ["mamba"] * 2}, r"layer_types=\['mamba', 'mamba'\] is not a list of 2 names"),
        (
            "qwen3_5_text",
            {"full_attention_interval": 2, "linear_num_value_heads": 24},
            "24 value heads are not a multiple of 16 key heads",
        ),
        ("lfm2", {"num_key_value_heads": 2, "layer_types": ["conv"] * 2}, "none of 2 layers holds keys and values"),
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


def test_parts_in_turn_have_no_norms_of_their_own():
    config = families.from_hugging_face({**SMALL, "model_type": "falcon"})
    with pytest.raises(ValueError, match="two_norms=True, but parallel=False"):
        dataclasses.replace(config, two_norms=True, parallel=False)


def test_a_window_is_written_where_no_layer_has_one_but_transformers_needs_it():
    full = {"layer_types": ["full_attention"] * 2, "sliding_window": 7}
    config = families.from_hugging_face({**SMALL, "model_type": "cohere2", **full})
    assert config.windows == (None, None)
    assert families.to_hugging_face(config, dtype="float32")["sliding_window"] == 4096


def test_a_config_of_no_family_makes_no_model():
    sizes = dict(zip(SIZES, (9, 32, 8, 2, 4, 4, 8), strict=True))
    with pytest.raises(ValueError, match=r"config is a DecoderConfig, of no family; give one of \[.*'GPT2Config'"):
        models.LanguageModel(models.DecoderConfig(**sizes))


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
