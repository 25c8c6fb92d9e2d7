"""Logits against transformers, of configurations that hypothesis draws for every architecture."""

import copy
import pathlib
import tempfile

import hypothesis
import hypothesis.strategies as st
import pytest

from kvjax import feed, prefill
from tests.test_parity import CACHE, NEW, T, all_logits, assert_close, saved, tokens, torch

ACTS = st.sampled_from(("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"))
FLAG = st.booleans()
WINDOW = st.integers(2, T + 2)
LENGTHS = T, 12


@st.composite
def sizes(draw, *, grouped=True, own_heads=False, any_width=False):
    """The usual keys of a config: heads of another size than their share where the architecture has them."""
    kv, share = draw(st.integers(1, 3)), draw(st.sampled_from((4, 6, 8, 10)))
    heads = kv * draw(st.integers(1, 3)) if grouped else kv
    raw = {
        "vocab_size": draw(st.integers(99, 110)),
        "hidden_size": heads * share,
        "intermediate_size": draw(st.integers(5, 48)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "max_position_embeddings": draw(st.integers(T + NEW, 64)),
        "tie_word_embeddings": draw(FLAG),
        "pad_token_id": None,
    }
    if grouped:
        raw["num_key_value_heads"] = kv
    if own_heads:
        raw["head_dim"] = draw(st.sampled_from((4, 6, 8, 16)))
    if any_width:
        raw["hidden_size"] = draw(st.integers(11, 40))
    return raw


@st.composite
def section(draw, channels, kinds=("default", "linear", "dynamic", "yarn", "llama3", "longrope")):
    """The rotary embedding of so many channels, inside its original context and beyond."""
    kind = draw(st.sampled_from(kinds))
    raw = {"rope_type": kind, "rope_theta": draw(st.sampled_from((500.0, 1e4, 5e5)))}
    if kind != "default":
        raw["factor"] = draw(st.floats(1.5, 4))
    if kind in ("yarn", "llama3", "longrope"):
        raw["original_max_position_embeddings"] = draw(st.integers(8, 40))
    if kind == "yarn":
        raw |= {"truncate": draw(FLAG), "beta_fast": 32.0, "beta_slow": draw(st.sampled_from((0.5, 1.0)))}
    if kind == "llama3":
        raw |= {"low_freq_factor": 1.0, "high_freq_factor": draw(st.floats(2, 8))}
    if kind == "longrope":
        factors = st.lists(st.floats(1, 4), min_size=channels // 2, max_size=channels // 2)
        raw |= {"short_factor": draw(factors), "long_factor": draw(factors)}
    return raw


def rotary(raw, share=1.0, **options):
    """`rope_parameters` for a config of these sizes."""
    head = raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    here = section(int(head * share), **options)
    return here.map(lambda s: {"rope_parameters": s if share == 1 else {**s, "partial_rotary_factor": share}})


@st.composite
def kinds_of_layers(draw, raw):
    """A window, and which layers have it."""
    kind, n = st.sampled_from(("sliding_attention", "full_attention")), raw["num_hidden_layers"]
    return {"sliding_window": draw(WINDOW), "layer_types": draw(st.lists(kind, min_size=n, max_size=n))}


@st.composite
def llama(draw):
    raw = draw(sizes(own_heads=True))
    own = {"attention_bias": draw(FLAG), "mlp_bias": draw(FLAG), "hidden_act": draw(ACTS)}
    return {**raw, **own, **draw(rotary(raw))}


@st.composite
def mistral(draw):
    raw = draw(sizes(own_heads=True, any_width=True))
    return {**raw, "sliding_window": draw(st.none() | WINDOW), "hidden_act": draw(ACTS), **draw(rotary(raw))}


@st.composite
def ministral(draw):
    raw = draw(sizes(own_heads=True, any_width=True))
    return {**raw, **draw(kinds_of_layers(raw)), "hidden_act": draw(ACTS), **draw(rotary(raw))}


@st.composite
def qwen2(draw):
    raw = draw(sizes())
    sliding = {"use_sliding_window": draw(FLAG), "sliding_window": draw(WINDOW)}
    return {**raw, **sliding, "max_window_layers": draw(st.integers(0, 3)), **draw(rotary(raw))}


@st.composite
def qwen3(draw):
    raw = draw(sizes(own_heads=True, any_width=True))
    sliding = {"use_sliding_window": draw(FLAG), "sliding_window": draw(WINDOW)}
    own = {"attention_bias": draw(FLAG), "max_window_layers": draw(st.integers(0, 3))}
    return {**raw, **sliding, **own, **draw(rotary(raw))}


@st.composite
def gemma(draw):
    raw = draw(sizes(own_heads=True, any_width=True))
    return {**raw, "attention_bias": draw(FLAG), **draw(rotary(raw))}


@st.composite
def gemma2(draw):
    raw = draw(sizes(own_heads=True))
    own = {
        "attention_bias": draw(FLAG),
        "query_pre_attn_scalar": draw(st.integers(4, 40)),
        "attn_logit_softcapping": draw(st.none() | st.floats(2, 50)),
        "final_logit_softcapping": draw(st.none() | st.floats(2, 50)),
    }
    return {**raw, **own, **draw(kinds_of_layers(raw)), **draw(rotary(raw))}


@st.composite
def gemma3(draw):
    raw = draw(sizes(own_heads=True))
    own = {"attention_bias": draw(FLAG), "query_pre_attn_scalar": draw(st.integers(4, 40))}
    own["final_logit_softcapping"] = draw(st.none() | st.floats(2, 50))
    names = ("full_attention", "sliding_attention")
    ropes = {name: draw(section(raw["head_dim"])) for name in names}
    return {**raw, **own, **draw(kinds_of_layers(raw)), "rope_parameters": ropes}


@st.composite
def phi3(draw):
    raw = draw(sizes())
    share = draw(st.sampled_from((1.0, 0.5))) if raw["hidden_size"] // raw["num_attention_heads"] % 4 == 0 else 1.0
    rope = draw(rotary(raw, share, kinds=("default", "longrope")))
    original = rope["rope_parameters"].pop("original_max_position_embeddings", raw["max_position_embeddings"])
    return {**raw, "sliding_window": draw(st.none() | WINDOW), "original_max_position_embeddings": original, **rope}


@st.composite
def mixtral(draw):
    raw = draw(sizes(own_heads=True, any_width=True))
    experts = draw(st.integers(1, 6))
    own = {"num_local_experts": experts, "num_experts_per_tok": draw(st.integers(1, experts))}
    return {**raw, **own, "sliding_window": draw(st.none() | WINDOW), **draw(rotary(raw))}


@st.composite
def qwen3_moe(draw):
    raw = draw(sizes(own_heads=True, any_width=True))
    experts = draw(st.integers(1, 6))
    own = {
        "attention_bias": draw(FLAG),
        "use_sliding_window": draw(FLAG),
        "sliding_window": draw(WINDOW),
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "moe_intermediate_size": draw(st.integers(5, 30)),
        "norm_topk_prob": draw(FLAG),
        "decoder_sparse_step": draw(st.integers(1, 3)),
        "mlp_only_layers": draw(st.lists(st.integers(0, 2), unique=True, max_size=2)),
    }
    return {**raw, **own, **draw(rotary(raw))}


@st.composite
def gpt2(draw):
    raw = draw(sizes(grouped=False))
    own = {
        "n_inner": draw(st.none() | st.integers(5, 48)),
        "activation_function": draw(ACTS),
        "scale_attn_weights": draw(FLAG),
        "scale_attn_by_inverse_layer_idx": draw(FLAG),
    }
    return {**{k: x for k, x in raw.items() if k != "intermediate_size"}, **own}


@st.composite
def gpt_neox(draw):
    raw = draw(sizes(grouped=False))
    head = raw["hidden_size"] // raw["num_attention_heads"]
    share = draw(st.sampled_from([s for s in (1.0, 0.5, 0.25) if head * s >= 4 and head * s % 2 == 0]))
    own = {"hidden_act": draw(ACTS), "attention_bias": draw(FLAG), "use_parallel_residual": draw(FLAG)}
    rope = draw(rotary(raw, kinds=("default", "linear", "dynamic", "yarn")))
    return {**raw, **own, "rope_parameters": {**rope["rope_parameters"], "partial_rotary_factor": share}}


@st.composite
def gptj(draw):
    raw = draw(sizes(grouped=False)) | {"tie_word_embeddings": False}
    head = raw["hidden_size"] // raw["num_attention_heads"]
    own = {
        "rotary_dim": 2 * draw(st.integers(1, head // 2)),
        "n_inner": draw(st.none() | st.integers(5, 48)),
        "activation_function": draw(ACTS),
    }
    return {**{k: x for k, x in raw.items() if k != "intermediate_size"}, **own}


@st.composite
def opt(draw):
    raw = draw(sizes(grouped=False))
    own = {
        "ffn_dim": raw.pop("intermediate_size"),
        "activation_function": draw(ACTS),
        "do_layer_norm_before": draw(FLAG),
        "_remove_final_layer_norm": draw(FLAG),
        "enable_bias": draw(FLAG),
        "word_embed_proj_dim": draw(st.sampled_from((raw["hidden_size"], 8))),
    }
    return {**raw, **own}


@st.composite
def mpt(draw):
    """`expansion_ratio` is left at 4, which transformers takes it to be whatever a config says."""
    raw = draw(sizes(grouped=False))
    del raw["intermediate_size"]
    clip, scale = draw(st.none() | st.floats(0.5, 3)), draw(st.none() | st.floats(0.1, 1))
    return {**raw, "attn_config": {"clip_qkv": clip, "softmax_scale": scale}}


@st.composite
def stablelm(draw):
    raw = draw(sizes())
    share = draw(st.sampled_from((1.0, 0.5))) if raw["hidden_size"] // raw["num_attention_heads"] % 4 == 0 else 1.0
    own = {"use_qkv_bias": draw(FLAG), "use_parallel_residual": draw(FLAG), "qk_layernorm": draw(FLAG)}
    rope = draw(rotary(raw, kinds=("default", "linear", "dynamic", "yarn")))
    return {**raw, **own, "rope_parameters": {**rope["rope_parameters"], "partial_rotary_factor": share}}


@st.composite
def falcon(draw):
    raw = draw(sizes())
    new = draw(FLAG)
    own = {
        "ffn_hidden_size": raw.pop("intermediate_size"),
        "num_kv_heads": raw.pop("num_key_value_heads") if new else None,
        "multi_query": draw(FLAG),
        "bias": draw(FLAG),
        "new_decoder_architecture": new,
        "parallel_attn": new or draw(FLAG),
        "attn_implementation": "eager",
    }
    raw.pop("num_key_value_heads", None)
    return {**raw, **own, **draw(rotary(raw))}


DRAWN = {
    "LlamaForCausalLM": llama(),
    "MistralForCausalLM": mistral(),
    "MinistralForCausalLM": ministral(),
    "Qwen2ForCausalLM": qwen2(),
    "Qwen3ForCausalLM": qwen3(),
    "GemmaForCausalLM": gemma(),
    "Gemma2ForCausalLM": gemma2(),
    "Gemma3ForCausalLM": gemma3(),
    "Phi3ForCausalLM": phi3(),
    "MixtralForCausalLM": mixtral(),
    "Qwen3MoeForCausalLM": qwen3_moe(),
    "StableLmForCausalLM": stablelm(),
    "FalconForCausalLM": falcon(),
    "GPT2LMHeadModel": gpt2(),
    "GPTNeoXForCausalLM": gpt_neox(),
    "GPTJForCausalLM": gptj(),
    "OPTForCausalLM": opt(),
    "MptForCausalLM": mpt(),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", DRAWN)
@hypothesis.settings(
    max_examples=5,  # of which the first is the simplest
    derandomize=True,
    deadline=None,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(data=st.data())
def test_drawn_models(architecture, data):
    """A left-padded batch is read and decoded; every row's logits are theirs, of the row alone."""
    options = data.draw(DRAWN[architecture])
    with tempfile.TemporaryDirectory() as path:
        # With weights three times as large, attention can be so sharp that each is 1e-5 from the result in float64.
        theirs, model, params = saved(architecture, options, pathlib.Path(path), scale=2.0)
    ids = tokens()
    prompt = all_logits(model, params, ids[:, :T], LENGTHS)
    first, state = prefill(model, params, ids[:, :T], lengths=LENGTHS, max_new_tokens=NEW)
    rest, _ = feed(model, params, ids[:, T:], state)
    with torch.no_grad():
        for row, n in enumerate(LENGTHS):
            fresh = copy.deepcopy(theirs)  # dynamic scaling remembers earlier calls
            out = fresh(torch.tensor(ids[row : row + 1, T - n : T]), use_cache=True)
            assert_close(prompt[row, T - n :], out.logits[0])
            assert_close(first[row], out.logits[0, -1])
            for i in range(NEW):
                token = torch.tensor(ids[row : row + 1, T + i : T + i + 1])
                out = fresh(token, use_cache=True, **{CACHE: out[CACHE]})
                assert_close(rest[row, i], out.logits[0, -1])
