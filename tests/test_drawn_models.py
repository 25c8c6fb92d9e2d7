"""Logits against transformers, of configurations that hypothesis draws for every architecture."""

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.test_parity import NEW, T, check_logits, saved

ACTS = st.sampled_from(("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"))
FLAG, CAP, WIDTH = st.booleans(), st.none() | st.floats(2, 50), st.none() | st.integers(5, 48)
WINDOW, SCALAR = st.integers(2, T + 2), st.integers(4, 40)
LAYERS = "full_attention", "sliding_attention"
MAYBE = {"sliding_window": st.none() | WINDOW}
SLIDING = {"use_sliding_window": FLAG, "sliding_window": WINDOW}
QWEN = SLIDING | {"max_window_layers": st.integers(0, 3)}
GEMMA = {"attention_bias": FLAG, "query_pre_attn_scalar": SCALAR, "final_logit_softcapping": CAP}
ROTATIONS = "default", "linear", "dynamic", "yarn", "llama3", "longrope"


@st.composite
def rotation(draw, channels, kinds=ROTATIONS):
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


@dataclasses.dataclass(frozen=True)
class Kind:
    """What an architecture's configs have.

    Attributes:
      own: keys of its own, each drawn by itself.
      grouped: whether there are fewer kv heads than query heads.
      own_heads, any_width: whether heads are of another size than their share, and the model of any width.
      windows: whether each layer says whether it has a window.
      rotations: how keys are turned; none if they are not.
      shares: of a head's channels that are turned.
      last: what hangs on other keys: `(draw, config) -> config`.
    """

    own: dict[str, Any]
    grouped: bool = True
    own_heads: bool = False
    any_width: bool = False
    windows: bool = False
    rotations: tuple[str, ...] = ROTATIONS
    shares: tuple[float, ...] = ()
    last: Callable[..., dict[str, Any]] | None = None


@st.composite
def config(draw, kind):
    """A config of a kind."""
    kv, share = draw(st.integers(1, 3)), draw(st.sampled_from((4, 6, 8, 10)))
    heads = kv * draw(st.integers(1, 3)) if kind.grouped else kv
    raw = {
        "vocab_size": draw(st.integers(99, 110)),
        "hidden_size": draw(st.integers(11, 40)) if kind.any_width else heads * share,
        "intermediate_size": draw(st.integers(5, 48)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "max_position_embeddings": draw(st.integers(T + NEW, 64)),
        "tie_word_embeddings": draw(FLAG),
        "pad_token_id": None,
    }
    raw |= {"num_key_value_heads": kv} if kind.grouped else {}
    raw |= {"head_dim": draw(st.sampled_from((4, 6, 8, 16)))} if kind.own_heads else {}
    raw |= draw(st.fixed_dictionaries(kind.own))
    head, n = raw.get("head_dim", share), raw["num_hidden_layers"]
    if kind.windows:
        raw |= {"sliding_window": draw(WINDOW)}
        raw |= {"layer_types": draw(st.lists(st.sampled_from(LAYERS), min_size=n, max_size=n))}
    if kind.rotations:
        turned = [x for x in kind.shares or (1.0,) if head * x >= 4 and head * x % 2 == 0] or [1.0]
        part = draw(st.sampled_from(turned))
        raw["rope_parameters"] = draw(rotation(int(head * part), kind.rotations))
        raw["rope_parameters"] |= {"partial_rotary_factor": part} if kind.shares else {}
    return raw if kind.last is None else kind.last(draw, raw)


def two_ropes(draw, raw):
    """Layers with a window are turned otherwise than the others."""
    head = raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    return raw | {"rope_parameters": {name: draw(rotation(head)) for name in LAYERS}}


def smollm3(draw, raw):
    """Some layers do not rotate."""
    n = raw["num_hidden_layers"]
    return raw | {"no_rope_layers": draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))}


def phi3(draw, raw):
    """The original context stands beside the rotation."""
    original = raw["rope_parameters"].pop("original_max_position_embeddings", raw["max_position_embeddings"])
    return raw | {"original_max_position_embeddings": original}


def experts(name):
    """So many experts, of which some are chosen for every token."""

    def last(draw, raw):
        count = draw(st.integers(1, 6))
        return raw | {name: count, "num_experts_per_tok": draw(st.integers(1, count))}

    return last


def groups(draw, raw):
    """Experts stand in groups, of which some are chosen for every token."""
    n, members = draw(st.integers(1, 3)), draw(st.integers(2, 3))
    chosen = draw(st.integers(1, n))
    raw |= {"n_group": n, "topk_group": chosen, "n_routed_experts": n * members}
    return raw | {"num_experts_per_tok": draw(st.integers(1, chosen * members))}


def latent(lite):
    """One vector for the keys and values of all heads; experts in groups behind some layers."""

    def last(draw, raw):
        turned, sparse = 2 * draw(st.integers(2, 5)), st.sampled_from(("dense", "sparse"))
        raw |= {"qk_rope_head_dim": turned, "kv_lora_rank": draw(st.integers(3, 20))}
        raw |= {"qk_nope_head_dim": draw(st.integers(1, 9)), "v_head_dim": draw(st.integers(1, 12))}
        raw |= {"q_lora_rank": draw(st.none() | st.integers(4, 24)), "num_key_value_heads": raw["num_attention_heads"]}
        raw["rope_parameters"] = draw(rotation(turned, SOME))
        if raw["rope_parameters"]["rope_type"] == "yarn":
            raw["rope_parameters"]["mscale_all_dim"] = draw(st.floats(0.1, 1.5))
        n = raw["num_hidden_layers"]
        layers = {"mlp_layer_types": draw(st.lists(sparse, min_size=n, max_size=n))}
        return groups(draw, raw | (layers if lite else {"first_k_dense_replace": draw(st.integers(0, 3))}))

    return last


def gemma4(draw, raw):
    """Layers without a window, of which the last is one, have heads of their own; some models have experts beside."""
    n, own = raw["num_hidden_layers"], draw(FLAG)
    if n == 3 and draw(FLAG):
        raw |= {"num_hidden_layers": (n := 4), "num_kv_shared_layers": 1, "use_double_wide_mlp": draw(FLAG)}
    shares = "num_kv_shared_layers" in raw  # theirs needs vectors for each layer then
    raw["hidden_size_per_layer_input"] = 3 if shares else draw(st.sampled_from((0, 3)))
    raw["vocab_size_per_layer_input"] = raw["vocab_size"]
    raw["layer_types"] = [*draw(st.lists(st.sampled_from(LAYERS), min_size=n - 1, max_size=n - 1)), "full_attention"]
    if shares:
        raw["layer_types"][0] = "full_attention"
    raw |= {"global_head_dim": draw(st.sampled_from((4, 8, 12))), "attention_k_eq_v": own, "rms_norm_eps": 1.0}
    raw |= {"num_global_key_value_heads": draw(st.sampled_from((None, 1)))} if own else {}
    raw |= {"enable_moe_block": True, "moe_intermediate_size": draw(st.integers(5, 30))} if draw(FLAG) else {}
    if raw.get("enable_moe_block"):
        raw = experts("num_experts")(draw, raw)
        raw["top_k_experts"] = raw.pop("num_experts_per_tok")
    share, local = {"rope_type": "proportional"}, draw(rotation(raw["head_dim"]))
    share |= {"partial_rotary_factor": draw(st.sampled_from((0.25, 0.5, 1.0))), "rope_theta": 1e4}
    return raw | {"rope_parameters": {"sliding_attention": local, "full_attention": share}}


def ministral3(draw, raw):
    """Queries grow with their position."""
    own = {"llama_4_scaling_beta": draw(st.floats(0.05, 0.5)), "original_max_position_embeddings": draw(WINDOW)}
    return raw | {"rope_parameters": raw["rope_parameters"] | own}


def hybrid(kind, experts_key=None):
    """Layers of a kind without keys and values beside some of attention."""

    def last(draw, raw):
        n = raw["num_hidden_layers"]
        kinds = draw(st.lists(st.sampled_from((kind, "full_attention")), min_size=n, max_size=n))
        kinds[draw(st.integers(0, n - 1))] = "full_attention"
        if "linear_num_key_heads" in raw:
            raw["linear_num_value_heads"] = raw["linear_num_key_heads"] * draw(st.integers(1, 2))
        raw = raw | {"layer_types": kinds}
        return raw if experts_key is None else experts(experts_key)(draw, raw)

    return last


def falcon(draw, raw):
    """Keys of other names; the new architecture says its kv heads, and has parts in parallel."""
    new, kv = draw(FLAG), raw.pop("num_key_value_heads")
    own = {"new_decoder_architecture": new, "num_kv_heads": kv if new else None, "parallel_attn": new or draw(FLAG)}
    return raw | own | {"ffn_hidden_size": raw.pop("intermediate_size"), "attn_implementation": "eager"}


def gptj(draw, raw):
    """Some channels are turned."""
    head = raw["hidden_size"] // raw["num_attention_heads"]
    del raw["intermediate_size"]
    return raw | {"rotary_dim": 2 * draw(st.integers(1, head // 2)), "tie_word_embeddings": False}


def opt(draw, raw):
    """The embedding may be narrower than the model."""
    narrow = {"word_embed_proj_dim": draw(st.sampled_from((raw["hidden_size"], 8)))}
    return raw | narrow | {"ffn_dim": raw.pop("intermediate_size")}


def without_width(draw, raw):
    """MLPs are four times as wide as the model, which is what transformers takes MPT's to be whatever a config says."""
    del raw["intermediate_size"]
    return raw


WIDE, ALONE = {"own_heads": True, "any_width": True}, {"grouped": False, "rotations": ()}
SOME = ROTATIONS[:4]
DELTA = {"attention_bias": FLAG, "linear_num_key_heads": st.integers(1, 3), "linear_key_head_dim": st.integers(2, 9)}
DELTA |= {"linear_value_head_dim": st.integers(2, 9), "linear_conv_kernel_dim": st.integers(1, 4)}
SHARED = {k: st.integers(5, 30) for k in ("moe_intermediate_size", "shared_expert_intermediate_size")}
LATENT = {"attention_bias": FLAG, "rope_interleave": FLAG, "norm_topk_prob": FLAG, "hidden_act": ACTS}
LATENT |= {"moe_intermediate_size": st.integers(5, 30), "routed_scaling_factor": st.floats(0.5, 2)}
DRAWN = {
    "LlamaForCausalLM": Kind({"attention_bias": FLAG, "mlp_bias": FLAG, "hidden_act": ACTS}, own_heads=True),
    "MistralForCausalLM": Kind(MAYBE | {"hidden_act": ACTS}, **WIDE),
    "MinistralForCausalLM": Kind({"hidden_act": ACTS}, **WIDE, windows=True),
    "Ministral3ForCausalLM": Kind(MAYBE, **WIDE, rotations=("default", "linear", "yarn", "llama3"), last=ministral3),
    "Qwen2ForCausalLM": Kind(QWEN),
    "Qwen3ForCausalLM": Kind(QWEN | {"attention_bias": FLAG}, **WIDE),
    "GemmaForCausalLM": Kind({"attention_bias": FLAG}, **WIDE),
    "Gemma2ForCausalLM": Kind(GEMMA | {"attn_logit_softcapping": CAP}, own_heads=True, windows=True),
    "Gemma3ForCausalLM": Kind(GEMMA, own_heads=True, windows=True, rotations=(), last=two_ropes),
    "Gemma4ForCausalLM": Kind(
        {"attention_bias": FLAG, "final_logit_softcapping": CAP, "sliding_window": st.integers(2, 20)},
        **WIDE,
        rotations=(),
        last=gemma4,
    ),
    "SmolLM3ForCausalLM": Kind(SLIDING | {"attention_bias": FLAG, "mlp_bias": FLAG}, last=smollm3),
    "Olmo2ForCausalLM": Kind({"attention_bias": FLAG, "hidden_act": ACTS}),
    "Olmo3ForCausalLM": Kind({"attention_bias": FLAG}, windows=True, rotations=(), last=two_ropes),
    "Qwen3_5ForCausalLM": Kind(DELTA, **WIDE, rotations=SOME, shares=(1.0, 0.5), last=hybrid("linear_attention")),
    "Qwen3_5MoeForCausalLM": Kind(
        DELTA | SHARED, **WIDE, rotations=SOME, shares=(1.0, 0.5), last=hybrid("linear_attention", "num_experts")
    ),
    "Qwen3NextForCausalLM": Kind(
        DELTA
        | SHARED
        | {"norm_topk_prob": FLAG, "mlp_only_layers": st.lists(st.integers(0, 2), unique=True, max_size=2)},
        **WIDE,
        rotations=SOME,
        shares=(1.0, 0.5),
        last=hybrid("linear_attention", "num_experts"),
    ),
    "Lfm2ForCausalLM": Kind(
        {"conv_L_cache": st.integers(1, 4), "block_multiple_of": st.integers(1, 9), "block_auto_adjust_ff_dim": FLAG},
        rotations=SOME,
        last=hybrid("conv"),
    ),
    "Cohere2ForCausalLM": Kind(
        {"attention_bias": FLAG, "hidden_act": ACTS, "logit_scale": st.floats(0.05, 2)}, **WIDE, windows=True
    ),
    "Glm4ForCausalLM": Kind({"attention_bias": FLAG, "hidden_act": ACTS}, **WIDE, rotations=SOME, shares=(1.0, 0.5)),
    "Glm4MoeForCausalLM": Kind(
        {"attention_bias": FLAG, "use_qk_norm": FLAG, "norm_topk_prob": FLAG, "n_shared_experts": st.integers(1, 2)}
        | {"moe_intermediate_size": st.integers(5, 30), "first_k_dense_replace": st.integers(0, 3)}
        | {"routed_scaling_factor": st.floats(0.5, 2)},
        **WIDE,
        rotations=SOME,
        shares=(1.0, 0.5),
        last=groups,
    ),
    "DeepseekV3ForCausalLM": Kind(LATENT, any_width=True, rotations=(), last=latent(lite=False)),
    "Glm4MoeLiteForCausalLM": Kind(LATENT, any_width=True, rotations=(), last=latent(lite=True)),
    "GptOssForCausalLM": Kind(
        {"attention_bias": FLAG, "swiglu_alpha": st.floats(1, 2), "swiglu_limit": st.floats(0.5, 7)},
        **WIDE,
        windows=True,
        rotations=("default", "linear", "yarn"),
        last=experts("num_local_experts"),
    ),
    "Phi3ForCausalLM": Kind(MAYBE, rotations=("default", "longrope"), shares=(1.0, 0.5), last=phi3),
    "MixtralForCausalLM": Kind(MAYBE, **WIDE, last=experts("num_local_experts")),
    "Qwen3MoeForCausalLM": Kind(
        SLIDING
        | {"attention_bias": FLAG, "moe_intermediate_size": st.integers(5, 30), "norm_topk_prob": FLAG}
        | {"decoder_sparse_step": st.integers(1, 3)}
        | {"mlp_only_layers": st.lists(st.integers(0, 2), unique=True, max_size=2)},
        **WIDE,
        last=experts("num_experts"),
    ),
    "StableLmForCausalLM": Kind(
        {"use_qkv_bias": FLAG, "use_parallel_residual": FLAG, "qk_layernorm": FLAG}, rotations=SOME, shares=(1.0, 0.5)
    ),
    "FalconForCausalLM": Kind({"multi_query": FLAG, "bias": FLAG}, last=falcon),
    "GPT2LMHeadModel": Kind(
        {"n_inner": WIDTH, "activation_function": ACTS}
        | {"scale_attn_weights": FLAG, "scale_attn_by_inverse_layer_idx": FLAG},
        **ALONE,
        last=without_width,
    ),
    "GPTNeoXForCausalLM": Kind(
        {"hidden_act": ACTS, "attention_bias": FLAG, "use_parallel_residual": FLAG},
        grouped=False,
        rotations=SOME,
        shares=(1.0, 0.5, 0.25),
    ),
    "GPTJForCausalLM": Kind({"n_inner": WIDTH, "activation_function": ACTS}, **ALONE, last=gptj),
    "OPTForCausalLM": Kind(
        {"activation_function": ACTS, "do_layer_norm_before": FLAG}
        | {"_remove_final_layer_norm": FLAG, "enable_bias": FLAG},
        **ALONE,
        last=opt,
    ),
    "MptForCausalLM": Kind(
        {
            "attn_config": st.fixed_dictionaries(
                {"clip_qkv": st.none() | st.floats(0.5, 3), "softmax_scale": st.none() | st.floats(0.1, 1)}
            )
        },
        **ALONE,
        last=without_width,
    ),
}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:a prompt of")  # some cross the original context
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
    options = data.draw(config(DRAWN[architecture]))
    with tempfile.TemporaryDirectory() as path:
        # With weights three times as large, attention can be so sharp that each is 1e-5 from the result in float64.
        check_logits(*saved(architecture, options, pathlib.Path(path), scale=2.0))
