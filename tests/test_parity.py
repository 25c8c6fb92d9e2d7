"""Logits against transformers, on tiny random models that it saved."""

import copy
import inspect
import json

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import decode_step, feed, generate, methods, models, prefill
from kvjax.contract import kv_layers, kv_sources
from kvjax.models.families import from_hugging_face
from kvjax.run.layers import without_cache
from tests.marks import marks

torch = pytest.importorskip("torch", reason="parity needs torch, which the test extra installs on Python 3.11")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


VERSION = int(transformers.__version__.partition(".")[0])
FORWARD = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in FORWARD else "past_key_values"  # its name from 5.24 on, and before


def rope(kind, **kwargs):
    """Fields of a config, as this version of transformers has them."""
    if VERSION >= 5:
        return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **kwargs}}
    scaling = {"rope_type": kind, **kwargs}
    outer = {k: scaling.pop(k) for k in ("partial_rotary_factor",) if k in scaling}
    if kind == "longrope":  # version 4 takes its factor from the two contexts
        scaling = {"type": kind, "short_factor": kwargs["short_factor"], "long_factor": kwargs["long_factor"]}
    return {"rope_theta": 10000.0, "rope_scaling": None if kind == "default" else scaling, **outer}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.5, 2.0, 3.0, 4.0], "factor": 4.0}
HALF_LINEAR = rope("linear", factor=2.0, partial_rotary_factor=0.5)
EAGER = {"attn_implementation": "eager"}  # for models that cannot choose it later
FALCON = {"ffn_hidden_size": 40, **EAGER}
CASES = {
    "llama": ("LlamaForCausalLM", {}),
    "llama_tied_biased": ("LlamaForCausalLM", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama_mha_wide_heads": ("LlamaForCausalLM", {"num_key_value_heads": 4, "head_dim": 16}),
    "llama_linear": ("LlamaForCausalLM", rope("linear", factor=2.5)),
    "llama_dynamic": ("LlamaForCausalLM", {**rope("dynamic", factor=3.0), "max_position_embeddings": 16}),
    "llama_yarn": ("LlamaForCausalLM", rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama_yarn_mscale": (
        "LlamaForCausalLM",
        rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.5, truncate=False),
    ),
    "llama_llama3": ("LlamaForCausalLM", rope("llama3", **LLAMA3)),
    "mistral": ("MistralForCausalLM", {"sliding_window": None, "head_dim": 8}),
    "mistral_sliding": ("MistralForCausalLM", {"sliding_window": 7, "head_dim": 8}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2_sliding": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "mixtral": ("MixtralForCausalLM", {"head_dim": 8, "sliding_window": 7, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 8,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 3,
            "decoder_sparse_step": 2,
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        # Version 4 scales by layers in its plain attention alone.
        {"n_inner": 40, "scale_attn_by_inverse_layer_idx": True, **EAGER},
    ),
    "gpt2_untied": ("GPT2LMHeadModel", {"tie_word_embeddings": False, "n_inner": 40}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 40}),
    "opt_norm_last": (
        "OPTForCausalLM",
        {"ffn_dim": 40, "do_layer_norm_before": False, "word_embed_proj_dim": 16, "enable_bias": False},
    ),
    "mpt": ("MptForCausalLM", {"attn_config": {"clip_qkv": 2.0}}),
    "mpt_six_heads": (
        "MptForCausalLM",
        {"num_attention_heads": 6, "hidden_size": 48, "attn_config": {"softmax_scale": 0.5}},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", {"head_dim": None}),
    "gpt_neox_in_turn": (
        "GPTNeoXForCausalLM",
        {"use_parallel_residual": False, "attention_bias": False, **HALF_LINEAR},
    ),
    "stablelm": ("StableLmForCausalLM", {"use_qkv_bias": True, "use_parallel_residual": True, **EAGER}),
    "stablelm_norms": ("StableLmForCausalLM", {"hidden_size": 64, "qk_layernorm": True, **HALF_LINEAR}),
    "falcon": ("FalconForCausalLM", FALCON),
    "falcon_two_norms": (
        "FalconForCausalLM",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False},
    ),
    "falcon_in_turn": (
        "FalconForCausalLM",
        {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True, **rope("linear", factor=2.0)},
    ),
    "gptj": ("GPTJForCausalLM", {"rotary_dim": 4, "n_inner": 40}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 7}),
    "phi3_long": ("Phi3ForCausalLM", {"original_max_position_embeddings": 16, **rope("longrope", **LONG)}),
    "phi3_partial": ("Phi3ForCausalLM", {"tie_word_embeddings": True, **rope("default", partial_rotary_factor=0.5)}),
    "gemma": ("GemmaForCausalLM", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            **EAGER,  # version 4 caps logits there alone
        },
    ),
    "gemma3": ("Gemma3ForCausalLM", {"head_dim": 16, "sliding_window": 7, "sliding_window_pattern": 2}),
}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16},
}
DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 12,
}
CASES |= {
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "smollm3_sliding": (
        "SmolLM3ForCausalLM",
        {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 7, "attention_bias": True},
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        {
            "head_dim": 16,
            **rope("yarn", factor=4.0, original_max_position_embeddings=5, llama_4_scaling_beta=0.5),
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", {"attention_bias": True}),
    "olmo3": (  # a large epsilon, as sharp attention magnifies rounding
        "Olmo3ForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": 7, "rope_parameters": ROPES, "rms_norm_eps": 0.1},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 7,
            "swiglu_limit": 1.5,
            **rope("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False),
        },
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            **DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
        },
    ),
    "qwen35": ("Qwen3_5ForCausalLM", {"num_hidden_layers": 4, **DELTA, "linear_num_value_heads": 2}),
    "qwen35_moe": (
        "Qwen3_5MoeForCausalLM",
        {"num_hidden_layers": 4, **DELTA, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    ),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 16}),
    "cohere2": ("Cohere2ForCausalLM", {"sliding_window": 7, "sliding_window_pattern": 2, "head_dim": 16}),
    "cohere2_untied": (
        "Cohere2ForCausalLM",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 7,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "logit_scale": 0.25,
            **rope("linear", factor=2.5),
        },
    ),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 0.5,
            "use_qk_norm": True,
        },
    ),
}
LATENT = {
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "num_key_value_heads": 4,
}
CASES |= {
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **LATENT,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            **rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.7),
        },
    ),
    "deepseek_v3_plain": (
        "DeepseekV3ForCausalLM",
        {
            **LATENT,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "q_lora_rank": None,
            "rope_interleave": False,
            "attention_bias": True,
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {**LATENT, "rms_norm_eps": 1e-3}),
}
GEMMA4 = {  # a large epsilon, as logits are products of normalised heads and rounding grows with them
    "rms_norm_eps": 1.0,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 7,
    "hidden_size_per_layer_input": 0,
}
CASES |= {
    "gemma4": ("Gemma4ForCausalLM", {**GEMMA4, "attention_bias": True, "final_logit_softcapping": 5.0}),
    "gemma4_sharing": (
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] + 2 * ["full_attention"],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 99,
        },
    ),
    "gemma4_moe": (
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 12,
        },
    ),
}
T, NEW = 21, 6


ALIKE = {"smollm3_sliding", "olmo2", "glm4", "glm4_moe", "qwen35_moe"}  # what others of the slow run reach, too
MASKED = {"smollm3", "olmo3", "ministral3", "qwen3_next", "lfm2"}  # the same, of evicted caches


def every_case(*quick, seldom=ALIKE):
    each = [pytest.param(name, marks=marks(name, CASES.keys() - seldom, quick)) for name in CASES]
    return pytest.mark.parametrize("both", each, indirect=True)


@pytest.fixture
def pair(both):
    """(transformers model, kvjax model, params); theirs is fresh, since dynamic scaling remembers earlier calls."""
    theirs, model, params = both
    return copy.deepcopy(theirs), model, params


@pytest.fixture(scope="module", params=list(CASES))
def both(request, tmp_path_factory):
    """One architecture."""
    architecture, options = CASES[request.param]
    if request.param == "stablelm_norms" and VERSION < 5:
        pytest.skip("transformers 4 cannot make a StableLM that normalises heads")
    return saved(architecture, {**SIZES, **options}, tmp_path_factory.mktemp(request.param))


def saved(architecture, options, path, seed=0, scale=3.0, noise=0.3):
    """(transformers model, kvjax model, params): a random one of these options, as transformers saved it."""
    torch.manual_seed(seed)
    cls = getattr(transformers, architecture)
    theirs = cls(cls.config_class(**options))
    with torch.no_grad():
        for p in theirs.parameters():
            p.mul_(scale)  # as initialised, attention is nearly uniform and hides mistakes
            if p.ndim == 1:
                p.add_(noise * torch.randn_like(p))
    theirs = theirs.eval()
    theirs.save_pretrained(path)
    if getattr(theirs, "_can_set_experts_implementation", bool)():  # of version 5
        theirs.set_experts_implementation("eager")  # torch's grouped product needs rows of multiples of 16 bytes
    return theirs, *models.load(path)


def assert_close(ours, theirs, within=1e-5):
    theirs = theirs.detach().numpy()
    assert np.abs(np.asarray(ours) - theirs).max() <= within * np.abs(theirs).max()


def all_logits(model, params, ids, lengths=None):
    """Logits "B T V" of texts that are read at once; padding lies on the left."""
    T = ids.shape[1]
    behind = 0 if lengths is None else T - jnp.asarray(lengths)[:, None]
    pos = jnp.broadcast_to(jnp.maximum(jnp.arange(T, dtype=jnp.int32)[None] - behind, -1), ids.shape)
    return model(params, jnp.asarray(ids, jnp.int32), attend=without_cache(pos), pos=pos)


def tokens():
    return np.random.default_rng(0).integers(1, 99, (2, T + NEW))


def check_logits(theirs, model, params):
    """A left-padded batch is read and decoded; every row's logits are theirs, of the row alone and in the batch."""
    ids, lengths = tokens(), (T, 12)
    prompt = all_logits(model, params, ids[:, :T], lengths)
    first, state = prefill(model, params, ids[:, :T], lengths=lengths, max_new_tokens=NEW)
    rest, _ = feed(model, params, ids[:, T:], state)
    with torch.no_grad():
        for row, n in enumerate(lengths):
            fresh = copy.deepcopy(theirs)  # dynamic scaling remembers earlier calls
            out = fresh(torch.tensor(ids[row : row + 1, T - n : T]), use_cache=True)
            assert_close(prompt[row, T - n :], out.logits[0])
            assert_close(first[row], out.logits[0, -1])
            for i in range(NEW):
                token = torch.tensor(ids[row : row + 1, T + i : T + i + 1])
                out = fresh(token, use_cache=True, **{CACHE: out[CACHE]})
                assert_close(rest[row, i], out.logits[0, -1])
        if model.config.rope.kind not in ("dynamic", "longrope"):  # theirs scales every row by the longest one
            mask = np.arange(T) >= T - np.array(lengths)[:, None]
            positions = torch.tensor(np.maximum(np.cumsum(mask, 1) - 1, 0))
            batch = theirs(
                torch.tensor(ids[:, :T]), attention_mask=torch.tensor(mask.astype(int)), position_ids=positions
            )
            assert_close(first, batch.logits[:, -1])


@pytest.mark.filterwarnings("ignore:a prompt of")  # some cross the original context
@every_case("llama", "gpt2", "gemma3")
def test_logits(both):
    check_logits(*both)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:a prompt of")
@pytest.mark.parametrize("both", CASES.keys() - {"phi3_long"}, indirect=True)  # whose generate reads all anew
def test_greedy_generations_are_theirs(pair):
    """64 tokens, each drawn behind those before."""
    theirs, model, params = pair
    ids = tokens()[:, :T]
    ours = generate(model, params, ids, max_new_tokens=64, eos_ids=())
    how = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
    expected = theirs.generate(torch.tensor(ids), attention_mask=torch.ones(2, T, dtype=torch.long), **how)
    np.testing.assert_array_equal(ours.tokens, expected[:, T:])


@pytest.mark.parametrize(("heads", "steepest"), [(1, 8), (6, 8), (8, 16), (112, 8)])
def test_slopes_of_any_number_of_heads(heads, steepest):
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    sizes = {"d_model": 8 * heads, "n_heads": heads, "n_layers": 1, "vocab_size": 9, "model_type": "mpt"}
    config = from_hugging_face({**sizes, "attn_config": {"alibi_bias_max": steepest}})
    theirs = -build_mpt_alibi_tensor(heads, 2, alibi_bias_max=steepest)[:, 0, 0].numpy()
    np.testing.assert_allclose(config.slopes, theirs, rtol=1e-6)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ELSEWHERE = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
OUTER = {"original_max_position_embeddings": 32}
SECTIONS = {
    "scaling_replaces_parameters": {"rope_parameters": DEFAULT, "rope_scaling": YARN},
    "scaling_takes_the_outer_base": {"rope_parameters": DEFAULT, "rope_scaling": YARN, "rope_theta": 700.0},
    "scaling_of_another_kind": {
        "rope_parameters": {**DEFAULT, **LLAMA3},
        "rope_scaling": {"type": "linear", "factor": 2},
    },
    "empty_scaling": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}, "rope_scaling": {}},
    "outer_context_of_yarn": {"rope_scaling": YARN, "original_max_position_embeddings": 4096},
    "outer_context_of_llama3": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, **OUTER},
    "only_outer_context": {"rope_scaling": {"rope_type": "llama3", **ELSEWHERE}, **OUTER},
    "no_context": {"rope_scaling": {"rope_type": "llama3", **ELSEWHERE}},
    "yarn_factor_of_the_outer_context": {"rope_scaling": {**YARN, "factor": None}, **OUTER},
    "yarn_band_of_no_width": {"rope_scaling": {**YARN, "original_max_position_embeddings": 4}},
    "no_share": {"partial_rotary_factor": None},
}


@pytest.mark.skipif(VERSION < 5, reason="sections that contradict each other are read as transformers 5 reads them")
@pytest.mark.parametrize("sections", SECTIONS)
def test_rotary_sections_are_read_as_transformers_reads_them(tmp_path, sections):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = {**SIZES, "head_dim": 16, "architectures": ["LlamaForCausalLM"], "model_type": "llama", **SECTIONS[sections]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(tmp_path))
    rope = from_hugging_face(raw).rope
    np.testing.assert_allclose(rope.frequencies(16), theirs.inv_freq.numpy(), rtol=1e-5)
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling)


def test_layers_of_mistral_have_windows_by_their_types(tmp_path):
    """Ministral is stored under the name of Mistral."""
    torch.manual_seed(0)
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = transformers.MistralConfig(**SIZES | {"num_hidden_layers": 3}, sliding_window=7, head_dim=8)
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "layer_types": kinds}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    model, params = models.load(tmp_path)
    assert model.config.sliding_window == (None, 7, None)
    ids = tokens()[:, :T]
    ours, _ = prefill(model, params, ids, max_new_tokens=0)
    with torch.no_grad():
        assert_close(ours, theirs(torch.tensor(ids)).logits[:, -1])


VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 16, "patch_size": 8}
WITH_IMAGES = {
    "Mistral3": ({"model_type": "ministral3", **CASES["ministral3"][1]}, "pixtral"),
    "Gemma3": ({"model_type": "gemma3_text", **CASES["gemma3"][1]}, "siglip_vision_model"),
}


@pytest.mark.slow
@pytest.mark.skipif(VERSION < 5, reason="the names of parts are those of transformers 5")
@pytest.mark.parametrize("name", WITH_IMAGES)
def test_a_model_of_text_and_images_is_read_as_its_text_model(name, tmp_path):
    text, vision = WITH_IMAGES[name]
    options = {"text_config": {**SIZES, **text}, "vision_config": {**VISION, "model_type": vision}}
    architecture = f"{name}ForConditionalGeneration"
    theirs, model, params = saved(architecture, {**options, "image_token_index": 0}, tmp_path)
    ids = tokens()[:, :T]
    with torch.no_grad():
        assert_close(all_logits(model, params, ids), theirs(torch.tensor(ids)).logits)


@every_case("llama")
def test_saved_families_are_theirs(pair, tmp_path):
    """What was loaded and saved again gives transformers the logits of the original."""
    theirs, model, params = pair
    models.save(tmp_path, model, params)
    how = {"attn_implementation": theirs.config._attn_implementation}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **how).eval()
    ids = torch.tensor(tokens())
    with torch.no_grad():
        assert_close(again(ids).logits, theirs(ids).logits)


ATTENTIONS = ("self_attn", "attention", "attn", "self_attention")
EVICTING = {
    "snapkv": methods.snapkv(9, window=3, kernel=1),
    "h2o": methods.h2o(9),
}


@pytest.mark.parametrize("policy", ["snapkv", pytest.param("h2o", marks=pytest.mark.exhaustive)])
@every_case(seldom=ALIKE | MASKED)
def test_evicted_tokens_are_hidden_ones(pair, policy):
    """Logits after eviction are theirs under masks that hide the evicted tokens, in every layer and head.

    Both decode through a cache, theirs of all tokens: some rotations change with the length, for later keys only.
    """
    check_hidden_are_evicted(*pair, EVICTING[policy], tokens())


def check_hidden_are_evicted(theirs, model, params, policy, ids, within=1e-5):
    """Reads the first tokens of `ids`, evicts, and reads the last `NEW` one by one, beside theirs under masks."""
    T = ids.shape[1] - NEW
    _, state = prefill(model, params, ids[:, :T], policy=policy, max_new_tokens=NEW)
    N, L = model.config.num_query_heads, len(kv_layers(model.config))

    theirs.set_attn_implementation("eager")
    places = [m for name, m in theirs.named_modules() if name.rpartition(".")[2] in ATTENTIONS]
    sources = kv_sources(model.config)
    of = [*range(L), *sources.values()] if sources else [*range(L)]  # the cache that each reads; those without are last
    assert len(places) == len(of)
    hidden = [None] * L
    for layer, place in zip(of, places, strict=True):

        def hide(module, args, kwargs, layer=layer):
            here = hidden[layer]
            mask = kwargs["attention_mask"]
            mask = mask[..., : here.shape[-1]] if here.ndim else mask  # some have one column more in version 4
            mask = mask | (here < 0) if mask.dtype == torch.bool else torch.minimum(mask, here)
            return args, {**kwargs, "attention_mask": mask}

        place.register_forward_pre_hook(hide, with_kwargs=True)
    hybrid = model.config.num_layers > L and not sources  # with a config, layers with a window hold no more
    cache = transformers.DynamicCache(config=theirs.config) if hybrid else transformers.DynamicCache()
    with torch.no_grad():
        hidden[:] = [torch.zeros(())] * L
        theirs(torch.tensor(ids[:, :T]), **{CACHE: cache})
        for i in range(NEW):
            for layer, kv in enumerate(state.layers):
                read = (np.asarray(kv.view().pos)[..., None] == np.arange(T + i + 1)).any(2)
                assert (~read[..., :T]).any(-1).all(), "nothing was evicted somewhere"
                read[..., T + i] = True
                hidden[layer] = torch.tensor(np.where(read, 0.0, np.finfo(np.float32).min), dtype=torch.float32)
                hidden[layer] = hidden[layer].repeat_interleave(N // read.shape[1], 1)[:, :, None]
            ours, state = decode_step(model, params, ids[:, T + i], state)
            step = theirs(torch.tensor(ids[:, T + i : T + i + 1]), **{CACHE: cache})
            assert_close(ours, step.logits[:, -1], within)
