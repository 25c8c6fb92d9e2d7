"""Records what the code of methods' authors keeps: the cases of tests/golden/authors.json.

    cd tests/tools; PYTHON -m record.author_cases CLONES ../golden/authors.json

CLONES is a directory with clones of `REPOSITORIES` under these names; PYTHON has numpy, torch and transformers, no GPU
and no kvjax. Their files import CUDA extensions and transformers of their time, so that of each file the classes and
functions that choose tokens are executed alone, with what they use of torch and transformers. Where one of them is made
to be called by a whole model, it gets as much of a model as it looks at.

The file says which settings and cases these are: for another one, write it there without what is recorded, and run
this. Tensors are those of `peer_tensors`, from a case's seed. A case whose kept sets change when tensors change by a
hundred-thousandth is not recorded; another seed is tried.

The file: `about` has versions and commits; `authors` has, for every setting, named as in `peers.csv`, a
list of cases:

| key | what |
|---|---|
| `c` or `r` | the capacity in tokens, or the share that is removed, as the setting has them |
| `tokens`, `more` | of the prompt, and those that follow one by one |
| `head_dim`, `layers`, `seed` | of the tensors |
| `kept` | for every layer and head a string, "1" for tokens that stay and "0" for others, oldest first |
"""

import __future__

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import json
import math
import os
import pathlib
import sys
import tempfile
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np
import torch
from transformers.models.llama import modeling_llama

from . import peer_tensors
from .peer_layers import Layers, record, signs, slots_of, write
from .peer_tensors import KV_HEADS, QUERY_HEADS

GROUPS = QUERY_HEADS // KV_HEADS
REPOSITORIES = {
    "R-KV": ("Zefan-Cai/R-KV", "cc5a9b9b95964ae75cb12473ba6a9091bae2d4ac"),
    "Lava": ("MGDDestiny/Lava", "199d70ca54b0fc39935ccc171c0bae6f8aa53e0a"),
    "DefensiveKV": ("FFY0/DefensiveKV", "c278cd0e2e82b9889513ba19d20ee72652f23ad0"),
    "cakekv": ("qtris123/cakekv", "e6adc5e237ed78874923b355399c1ffe0a789db1"),
    "HeadKV": ("FYYFU/HeadKV", "3ec96530a9fd2063d8c3254be38534934ef90d9c"),
    "KVCache-Factory": ("Zefan-Cai/KVCache-Factory", "5fb995d72366fff6d00620cd33fad99b38725907"),
    "AdaKV": ("FFY0/AdaKV", "1baceda55924419c444815f377b1a44e9a604402"),
    "EasyKV": ("DRSY/EasyKV", "a1d71cae3b562d9a709dda3741bd63e46a09ad31"),
    "triattention": ("WeianMao/triattention", "c3744ee6a50522a1559a577f85aef2b165a344f2"),
}
"""Where each clone is from, and at which commit.

Of DefensiveKV, `kvpress/presses/efficient_ada_scorer_press_old.py` is that of commit cf9bc41dd6. `cakekv` is a copy of
antgroup/cakekv. `triattention` is under the Apache License 2.0.
"""

Heads = Sequence[torch.Tensor]
"""The keys "S H" that every head of a layer keeps."""


class Clone:
    """A clone, of which some definitions are executed.

    Args:
      directory: where it is.
    """

    def __init__(self, directory: pathlib.Path):
        self._directory = directory
        anything = {name: getattr(typing, name) for name in ("Any", "Dict", "List", "Optional", "Tuple", "Union")}
        modules = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "np": np}
        library = {"math": math, "os": os, "json": json, "warnings": warnings, "dataclass": dataclasses.dataclass}
        llama = {name: getattr(modeling_llama, name) for name in ("repeat_kv", "rotate_half", "apply_rotary_pos_emb")}
        bases = {name: type(name, (), {}) for name in ("Cache", "BasePress", "StaticCache", "DynamicCache")}
        quiet = types.SimpleNamespace(warning_once=lambda text: None)
        self.names: dict[str, Any] = {**anything, **modules, **library, **llama, **bases, "logger": quiet}

    def define(self, file: str, *names: str, **given: Any) -> None:
        """Executes classes and functions of a file, which find what was defined before, and what is `given`.

        Raises:
          ValueError: a file that is not there, or lacks one of them.
        """
        path = self._directory / file
        if not path.is_file():
            raise ValueError(f"{path} is not there; clone {REPOSITORIES[self._directory.name][0]} into it")
        found = [x for x in ast.parse(path.read_text()).body if getattr(x, "name", None) in names]
        if len(found) < len(names):
            raise ValueError(f"{path} has {len(found)} of {len(names)} definitions {names}; check out the commit named")
        self.names |= {"__file__": str(path), **given}
        code = compile(ast.Module(found, []), str(path), "exec", __future__.annotations.compiler_flag, True)
        exec(code, self.names)

    def make(self, setting: str, case: dict[str, Any], **more: Any) -> Any:
        """What a setting says, in a case."""
        draws = {name: functools.partial(getattr(peer_tensors, name), case) for name in ("drawn", "uniform")}
        return eval(
            setting, {**self.names, "L": case["layers"], "c": case.get("c"), "r": case.get("r"), **draws, **more}
        )


def repeated(x: torch.Tensor) -> torch.Tensor:
    """A kv head's tensor for every query head."""
    return x.repeat_interleave(GROUPS, dim=1)


def split(keys: torch.Tensor, cluster: Any) -> Heads:
    """Keys of a cluster's heads, which may be one behind the other."""
    return keys.split(cluster.head_lens.tolist()) if keys.ndim == 2 else keys[0].unbind()


def clusters(clone: Clone, setting: str, layers: Layers, case: dict[str, Any], *, expand: bool = True) -> list[Heads]:
    """Of clusters that are called layer by layer, with keys that are expanded to query heads, or expand them."""
    kept = []
    for i in range(case["layers"]):
        cluster = clone.make(setting, case, layer=i)
        q, k, v = layers.projected(i)
        k, v = (repeated(k), repeated(v)) if expand else (k, v)
        more = (None, GROUPS) if "attention_mask" in inspect.signature(cluster.update_kv).parameters else ()
        kept.append(split(cluster.update_kv(k.clone(), q, v.clone(), *more)[0], cluster))
    return kept


def factory(clone: Clone, setting: str, layers: Layers, case: dict[str, Any]) -> list[Heads]:
    """Of KVCache-Factory."""
    names = ("SnapKV", "PyramidKV", "CAMKV", "H2OKV", "StreamingLLMKV", "L2Norm", "AdaKV", "HeadKV")
    clone.define("pyramidkv/pyramidkv_utils.py", *(f"{name}Cluster" for name in names))
    return clusters(clone, setting, layers, case)


def ada_kv(clone: Clone, setting: str, layers: Layers, case: dict[str, Any]) -> list[Heads]:
    """Of Ada-KV, whose clusters expand keys themselves, or do not."""
    file = "adaptive_snapkv/monkeypatch/snapkv_utils.py"
    clone.define(file, "repeat_kv", "SnapKVCluster", "AdaptiveSnapKVCluster")
    return clusters(clone, setting, layers, case, expand=False)


def headkv(clone: Clone, setting: str, layers: Layers, case: dict[str, Any]) -> list[Heads]:
    """Of HeadKV, given importances in place of its file's: two scores for each head, of which it takes the mean."""
    drawn = peer_tensors.uniform(case, "L", "N")
    scores = {f"{i}-{n}": [float(x), float(x)] for i, row in enumerate(drawn) for n, x in enumerate(row)}
    clone.define("headkv/snapkv_utils.py", "ReasonSnapKVCluster", open=lambda *_: io.StringIO(json.dumps(scores)))
    return clusters(clone, setting, layers, case)


def r_kv(clone: Clone, setting: str, layers: Layers, case: dict[str, Any], *, expand: bool = False) -> list[Heads]:
    """Of R-KV, which has the last queries at hand; `expand` gives every query head keys of its own."""
    clone.define("rkv/utils.py", "compute_attention_scores", "cal_similarity")
    clone.define("rkv/compression/r1_kv.py", "R1KV")
    compressor = clone.make(setting, case)
    q, k, v = layers.projected(0)
    k, v = (repeated(k), repeated(v)) if expand else (k, v)
    return [compressor.update_kv(k, q[:, :, -compressor.window_size :], v)[0][0].unbind()]


def defensive(clone: Clone, setting: str, layers: Layers, case: dict[str, Any]) -> list[Heads]:
    """Of DefensiveKV's presses, which get keys and values of all heads one behind the other."""
    clone.define("kvpress/ada_cache.py", "MetaData", "DynamicCacheSplitHeadFlatten")
    for kind, base in (("", "EfficientAdaScorerPress"), ("layer_", "EfficientAdaGlobalScorerPress")):
        scorer = "global_scorer_press" if kind else "scorer_press_old"
        clone.define(f"kvpress/presses/efficient_ada_{scorer}.py", base)
        own = f"Efficient{kind.title().rstrip('_')}DefensiveKVPress"
        clone.define(f"kvpress/presses/efficient_{kind}defensivekv_press.py", own)
    press, cache = clone.make(setting, case), clone.names["DynamicCacheSplitHeadFlatten"]()
    how = {"past_key_value": cache, "position_embeddings": layers.rotations(0, case["tokens"])}
    for i, attention in enumerate(layers.attention):
        _, k, v = layers.projected(i)
        keys, values = cache.update(k, v, i)
        cache.key_cache[i], cache.value_cache[i] = press.compress(
            attention, layers.hidden[i], keys, values, None, dict(how)
        )
    return [x.split(about.head_lens.tolist()) for x, about in zip(cache.key_cache, cache.metadata_list, strict=True)]


def cake(clone: Clone, setting: str, layers: Layers, case: dict[str, Any]) -> list[Heads]:
    """Of CAKE's attention, layer by layer, which evicts from all layers that were read."""
    clone.define("cake/utils.py", "calculate_entropy", "adjust_budgets")
    clone.define("cake/cake_cache.py", "CakeCache", "CakeprefillKVCache")
    attend = lambda q, k, v, *_, **__: q
    clone.define("cake/model/modify_llama.py", "llama_attn_forward_cake", _flash_attention_forward=attend)
    L, evict, cache = case["layers"], clone.make(setting, case), clone.names["CakeCache"]()
    each = {"decoding_evict": [None] * L, "prefill": [True] * L, "prefill_cake_evict": [evict] * L}
    sizes = {"window_size": [evict.window_size] * L, "key_size": [evict.cache_size - evict.window_size] * L}
    config = types.SimpleNamespace(**each, **sizes, tau1=1.6, tau2=0.6, gamma=200.0)
    heads = {"num_heads": QUERY_HEADS, "num_key_value_heads": KV_HEADS, "num_key_value_groups": GROUPS}
    rest = {"training": False, "attention_dropout": 0.0, "_flash_attn_uses_top_left_mask": False, "is_causal": True}
    how = {"past_key_value": cache, "position_embeddings": layers.rotations(0, case["tokens"])}
    for i, attention in enumerate(layers.attention):
        own = {name: getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim")}
        this = types.SimpleNamespace(**own, **heads, **rest, config=config, layer_idx=i)
        clone.names["llama_attn_forward_cake"](this, layers.hidden[i], **how)
    return [keys[0].unbind() for keys in cache.key_cache]


def lava(clone: Clone, setting: str, layers: Layers, case: dict[str, Any]) -> list[Heads]:
    """Of LAVa's model, whose layers only score what they read; after each it evicts from all layers that were read."""
    patch = "adaptive_snapkv/monkeypatch"
    clone.define(f"{patch}/snapkv_utils.py", "repeat_kv", "LavaKVCluster")
    clone.define(f"{patch}/adaptive_mistral_hijack_lava.py", "adaptive_MistralModel_forward_lava")
    kept: list[Heads] = []
    base: Any = clone.names["Cache"]

    class Cache(base):
        """Notes the keys that it is given when all layers were read."""

        key_cache = ()

        def get_usable_length(self, new: int) -> int:
            """It is empty."""
            del new
            return 0

        def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
            """Of one layer, all heads one behind the other."""
            del values
            kept.append(keys.split(found[layer].self_attn.kv_cluster.head_lens.tolist()))

    class Layer:
        """A layer that scores its prompt."""

        def __init__(self, i: int):
            self.self_attn = types.SimpleNamespace(kv_cluster=clone.make(setting, case, layer=i), layer_idx=i)

        def __call__(self, hidden: torch.Tensor, past_key_value: Any, **_: Any) -> tuple[torch.Tensor, Any]:
            q, k, v = layers.projected(self.self_attn.layer_idx)
            cluster = self.self_attn.kv_cluster
            cluster.store(k, q, v, *cluster.calcul_attn_score(k, q, v))
            return hidden, past_key_value

    found = [Layer(i) for i in range(case["layers"])]
    first = found[0].self_attn.kv_cluster
    sizes = {"base_capacity": first.base_capacity, "window_size": first.window_size, "num_hidden_layers": len(found)}
    outputs = {"output_attentions": False, "output_hidden_states": False, "use_return_dict": False, "use_cache": True}
    config = types.SimpleNamespace(**sizes, **outputs)
    alone = {"gradient_checkpointing": False, "training": False, "_attn_implementation": "flash_attention_2"}
    model = types.SimpleNamespace(config=config, layers=found, norm=lambda x: x, **alone)
    clone.names["adaptive_MistralModel_forward_lava"](model, inputs_embeds=layers.hidden[0], past_key_values=Cache())
    return kept


class Reader:
    """A model of one layer that reads a case's tokens one after another, whatever ids it is given.

    Args:
      layers: the layer.

    Attributes:
      held: the keys "K S H" that were left when it read what came last.
    """

    def __init__(self, layers: Layers):
        heads = {"num_attention_heads": QUERY_HEADS, "num_key_value_heads": KV_HEADS}
        self.config = types.SimpleNamespace(num_hidden_layers=1, architectures=["Llama"], **heads)
        words = {"convert_ids_to_tokens": lambda ids: ids, "decode": lambda ids, **_: str(ids)}
        self.tokenizer, self.device = types.SimpleNamespace(eos_token_id=-1, **words), "cpu"
        self.held = torch.empty(0)
        self._q, self._k, self._v = layers.projected(0)
        self._read = 0

    def __call__(self, input_ids: torch.Tensor, past_key_values: Any = None, **_: Any) -> Any:
        """Appends the next tokens to what was left of those before them."""
        T = input_ids.shape[1]
        first = min(self._read, self._k.shape[2] - T)  # the last one again if there are no more
        self._read = last = first + T
        q, *new = (x[:, :, first:last] for x in (self._q, self._k, self._v))
        old = past_key_values[0] if past_key_values is not None else [x[:, :, :0] for x in new]
        self.held = old[0][0]
        k, v = (torch.cat(pair, dim=2) for pair in zip(old, new, strict=True))
        logits = q @ repeated(k).mT / math.sqrt(k.shape[-1])
        attention = (logits + torch.full_like(logits, float("-inf")).triu(k.shape[2] - T + 1)).softmax(-1)
        words = torch.zeros(1, T, 2)
        return types.SimpleNamespace(past_key_values=[(k, v)], attentions=(attention,), logits=words)


def easykv(clone: Clone, setting: str, layers: Layers, case: dict[str, Any]) -> list[Heads]:
    """Of EasyKV, which generates with a model and then asks it for one token more."""
    same = lambda *_, **__: None
    names = ("entropy", "logits_adapter", "h2o_head_score", "process_for_mqa_gqa", "generate")
    cuts = ("truncate_kv_cache", "truncate_kv_cache_silo", "truncate_kv_cache_liso")
    patches = dict.fromkeys(("modify_method_of_instance", "partial", "llama_forward"), same)
    clone.define("easykv/easykv.py", *names, *cuts, **patches)
    model, ids = Reader(layers), torch.zeros(1, case["tokens"], dtype=torch.long)
    clone.make(f"generate(model, ids, {setting})", case, model=model, ids=ids, new=case.get("more", 0) + 1)
    return [model.held.unbind()]


class Appender:
    """A model whose layers append keys and values of a case to what was left of those before them.

    Args:
      layers: the layers.
    """

    def __init__(self, layers: Layers):
        self._each = [layers.projected(i)[1:] for i in range(len(layers.attention))]

    def parameters(self) -> Iterator[torch.Tensor]:
        """One, which says that they are on the CPU."""
        yield torch.empty(0)

    def forward(
        self, input_ids: torch.Tensor, past_key_values: Any = None, position_ids: Any = None, **_: Any
    ) -> types.SimpleNamespace:
        """Appends the tokens at the positions that it is given."""
        at = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids[0]
        held = past_key_values or [[x[:, :, :0] for x in pair] for pair in self._each]
        each = zip(held, self._each, strict=True)
        grown = [[torch.cat((x, y[:, :, at]), 2) for x, y in zip(old, new, strict=True)] for old, new in each]
        return types.SimpleNamespace(past_key_values=grown, logits=None)


def triattention(clone: Clone, setting: str, layers: Layers, case: dict[str, Any]) -> list[Heads]:
    """Of TriAttention, which patches a model, with what its command line chooses; ties are broken by its seed."""
    given = peer_tensors.centres(case)
    heads = {"num_attention_heads": QUERY_HEADS, "num_key_value_heads": KV_HEADS}
    config = types.SimpleNamespace(model_type="llama", rope_scaling=None, num_hidden_layers=case["layers"], **heads)
    kinds = {"Sequence": Sequence, "Mapping": Mapping, "Path": pathlib.Path, "MethodType": types.MethodType}
    parts = {"AutoConfig": types.SimpleNamespace(from_pretrained=lambda *_, **__: config), "sys": sys}
    parts |= {"LlamaRotaryEmbedding": lambda config, device: layers.model.model.rotary_emb}
    clone.define("triattention/common/stats_utils.py", "_require", "validate_stats_metadata", **kinds)
    names = ("determine_rope_style", "rotate_half", "invert_rope", "to_complex_pairs", "HeadFrequencyStats")
    names += ("build_rotary", "compute_frequency_scaling", "build_geometric_offsets", "score_keys_for_round")
    names += ("compute_frequency_statistics_from_means", "save_head_frequency_stats", "load_head_frequency_stats")
    clone.define("triattention/methods/pruning_utils.py", *names, **parts)
    names = ("TriAttentionConfig", "TriAttention", "apply_triattention_patch")
    clone.define("triattention/methods/triattention.py", *names, CausalLMOutputWithPast=types.SimpleNamespace)
    mean, length = (torch.from_numpy(given[name]) for name in ("mean", "length"))
    H, each = case["head_dim"], [*np.ndindex(case["layers"], QUERY_HEADS)]
    pairs = {at: (torch.complex(*mean[at].split(H // 2)), length[at][: H // 2]) for at in each}
    stats = {at: clone.names["HeadFrequencyStats"](*pair) for at, pair in pairs.items()}
    chosen = {"count_prompt_tokens": True, "use_slack_trigger": True, "normalize_scores": True}
    model = Appender(layers)
    with tempfile.TemporaryDirectory() as folder:
        chosen |= {"stats_path": pathlib.Path(folder) / "stats.pt", "model_path": pathlib.Path(folder)}
        about = {"head_dim": H, "rope_style": "half"}
        clone.names["save_head_frequency_stats"](chosen["stats_path"], each, stats, about)
        clone.make(f"apply_triattention_patch(model, {setting}, **chosen)", case, model=model, chosen=chosen)
    held = model.forward(input_ids=torch.zeros(1, case["tokens"])).past_key_values
    for _ in range(case["more"]):
        held = model.forward(input_ids=torch.zeros(1, 1), past_key_values=held).past_key_values
    return [keys[0].unbind() for keys, _ in held]


RUNS: dict[str, Callable[..., list[Heads]]] = {
    "R-KV": r_kv,
    "Lava": lava,
    "DefensiveKV": defensive,
    "cakekv": cake,
    "HeadKV": headkv,
    "KVCache-Factory": factory,
    "AdaKV": ada_kv,
    "EasyKV": easykv,
    "triattention": triattention,
}
EXPANDED = ", one query head a kv head"
"""How a setting of R-KV ends that has keys for every query head."""


def run(name: str, clones: pathlib.Path, case: dict[str, Any], noise: int | None = None) -> dict[str, Any]:
    """What a setting keeps in a case."""
    layers, (owner, _, setting) = Layers(case, noise), name.removesuffix(EXPANDED).partition(", ")
    how = {"expand": True} if name.endswith(EXPANDED) else {}
    with torch.inference_mode(), contextlib.redirect_stdout(io.StringIO()):
        kept = RUNS[owner](Clone(clones / owner), setting, layers, case, **how)
    found = []
    for i, heads in enumerate(kept):
        keys = layers.everything[i][0]
        known = [slots_of(x, keys[n * KV_HEADS // len(heads)], f"keys of head {n}") for n, x in enumerate(heads)]
        found.append([signs(slots, case["tokens"] + case.get("more", 0)) for slots in known])
    return {"kept": found}


def main(clones: pathlib.Path, path: pathlib.Path) -> None:
    """Records all cases of the file anew."""
    about: dict[str, Any] = {package: metadata.version(package) for package in ("torch", "transformers")}
    about["repositories"] = {name: f"{owner} {commit}" for name, (owner, commit) in REPOSITORIES.items()}
    authors = {}
    for name, cases in json.loads(path.read_text())["authors"].items():
        authors[name] = record(name, cases, functools.partial(run, name, clones))
    write(path, about, "authors", authors)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(pathlib.Path, sys.argv[1:3]))
