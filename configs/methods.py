"""Every method as a config. What stands here beside a method is what small models and short prompts want."""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

import kvjax
from kvjax import Policy, Share, methods, models
from kvjax.budgets import Combined
from kvjax.configs.experiment import Common, Experiment, Setup
from kvjax.configs.of import File, of
from kvjax.configs.probed import check_heads, probed, probed_arrays
from kvjax.contract import Count, Layout
from kvjax.methods.released.kvpress import expected_attention_stats
from kvjax.scores.learned import HiddenHeads
from kvjax.text.encode import repeating

# --- methods around others, and some with an option more ---


def chunkkv(budget: Count, *, window: int = 32, size: int = 20) -> Policy:
    """Keeps whole chunks of text, the same in all kv heads, by SnapKV's score (ChunkKV, arXiv 2502.00299).

    Args:
      budget: live tokens a kv head and layer.
      window: the prompt's last rows, which vote and stay.
      size: tokens of a chunk.
    """
    return methods.chunkkv(methods.snapkv(budget, window=window), size=size)


def entropy_chunkkv(budget: Count, *, window: int = 32, size: int = 10, rescue: int = 4) -> Policy:
    """Keeps chunks of text by SnapKV's score, of uneven ones the best tokens (EntropyGatedChunkKV of kvpress).

    Args:
      budget: live tokens a kv head and layer.
      window: the prompt's last rows, which vote and stay.
      size: tokens of a chunk.
      rescue: tokens that an uneven chunk keeps.
    """
    return methods.entropy_chunkkv(methods.snapkv(budget, window=window), size=size, rescue=rescue)


def criticalkv(budget: Count, *, window: int = 32, first: float = 0.5, eps: float = 1e-4) -> Policy:
    """Corrects SnapKV's choice by what values add to the layer's output (CriticalKV, arXiv 2502.03805).

    Args:
      budget: live tokens a kv head and layer.
      window: the prompt's last rows, which vote and stay.
      first: share of the budget that goes by votes alone.
      eps: added to votes before values weigh them.
    """
    return methods.criticalkv(methods.snapkv(budget, window=window), first=first, eps=eps)


def expected_attention(
    budget: Count, *, horizon: int = 512, sinks: int = 4, eps: float = 0.0, queries: Any = None
) -> Policy:
    """Keeps what queries to come are expected to attend to (ExpectedAttention, arXiv 2510.00636).

    Args:
      budget: live tokens a kv head and layer.
      horizon: positions ahead whose rotations are averaged.
      sinks: first tokens that stay, and whose queries do not count.
      eps: added to the expected weight.
      queries: moments of a model's queries, in place of each prompt's.
    """
    if queries is None:
        return methods.expected_attention(budget, horizon=horizon, sinks=sinks, eps=eps)
    return expected_attention_stats(budget, **queries, horizon=horizon, sinks=sinks, eps=eps)


def keyformer(
    budget: Count, *, recent: Count = Share(0.3), tau: tuple[float, float] = (1.0, 2.0), shared: bool = False
) -> Policy:
    """Keeps what a noisy softmax with a growing temperature attends to (Keyformer, arXiv 2403.09054).

    Args:
      budget: live tokens a kv head and layer.
      recent: last tokens that stay.
      tau: temperatures of the prompt and of the last new token.
      shared: one score and one decision for all layers.
    """
    policy = methods.keyformer(budget, recent=recent, tau=tau)
    return kvjax.shared_layers(policy) if shared else policy


def random_attention(budget: Count, *, every: int = 128) -> Policy:
    """Keeps the whole prompt, and a random sample of what follows (Random Attention, arXiv 2609.03430).

    Args:
      budget: live tokens a kv head and layer beside the prompt.
      every: tokens by which a cache grows before it is cut.
    """
    return methods.random_attention(Combined("sum", (1.0, budget)), every=every)


def triattention(
    budget: Count,
    centres: Any,
    *,
    every: int = 128,
    mode: Literal["per_layer_per_head", "per_head", "union"] = "per_layer_per_head",
) -> Policy:
    """Keeps the whole prompt, and keys that the centres of queries will pay to (TriAttention, arXiv 2604.04921).

    Args:
      budget: live tokens a kv head and layer beside the prompt.
      centres: those of the model's queries.
      every: tokens by which a cache grows before it is cut.
      mode: whether no heads keep the same tokens, kv heads of one index in all layers, or all heads of all layers.
    """
    return methods.triattention(Combined("sum", (1.0, budget)), **centres, every=every, mode=mode)


def streaming_llm(
    budget: Count, *, sinks: int = 4, positions: Literal["shifted", "rank", "original"] = "shifted"
) -> Policy:
    """Keeps attention sinks and the most recent tokens (StreamingLLM, Xiao et al., arXiv 2309.17453).

    Args:
      budget: live tokens a kv head and layer, sinks included.
      sinks: first tokens that stay.
      positions: where keys are met: at their ranks in the cache ("shifted" is the faster way), or where they were
        in the text, as models with learned positions need it.
    """
    return dataclasses.replace(methods.streaming_llm(budget, sinks=sinks), layout=Layout(positions))


def kvzap(
    budget: Count, function: Callable[..., Any], *, threshold: float | None = None, recent: int = 128, sinks: int = 0
) -> Policy:
    """Keeps what KVzip+ would keep, as predicted from hidden states by a small function (KVzap, arXiv 2601.07891).

    Args:
      budget: the most live tokens a kv head and layer.
      function: fitted to the model.
      threshold: tokens that score below it go as soon as they are not recent; None for a budget alone.
      recent: last tokens that stay.
      sinks: first tokens that stay, to which the function is not fitted.
    """
    sinks = min(sinks, budget) if isinstance(budget, int) else sinks
    left = budget - sinks if isinstance(budget, int) else recent
    policy = methods.kvzap(budget, function, threshold=threshold, recent=min(recent, left))
    return dataclasses.replace(policy, sinks=sinks)


def kvzip(
    budget: Count,
    tokenizer: Any,
    *,
    chunk: int = 2048,
    overlap: int = 8,
    sinks: int = 4,
    plus: bool = False,
) -> Policy:
    """Keeps what the model attends to while it repeats the prompt (KVzip, arXiv 2505.23416).

    Args:
      budget: live tokens a kv head and layer on average, sinks included.
      tokenizer: the model's, which makes the ids of the instructions.
      chunk: tokens that are repeated at once.
      overlap: tokens of the chunk before, in front of a later one.
      sinks: first tokens that stay.
      plus: whether probabilities are weighed by what values contribute (KVzip+).
    """
    how = dataclasses.replace(repeating(tokenizer), chunk=chunk, overlap=overlap, sinks=sinks, plus=plus)
    return methods.kvzip(budget, how)


# --- what a method must know of the model ---


def _found(name: str, more: str = "") -> File:
    """One array that `experiments/probe.py` has found."""
    return File(lambda setup, given: probed(setup, given, name), f"what `experiments/probe.py {name}` {_WROTE}{more}.")


_WROTE = "wrote for the model; that beside its weights if empty"
_FUNCTION = File(
    lambda setup, given: HiddenHeads(probed_arrays(setup, given, "kvzap")),
    f"what `experiments/probe.py kvzap` {_WROTE}.",
)
_CENTRES = File(
    lambda setup, given: {**probed_arrays(setup, given, "centres")},
    f"what `experiments/probe.py centres` {_WROTE}.",
)
_QUERIES = File(
    lambda setup, given: {**probed_arrays(setup, given, "queries")} if given else None,
    "what `experiments/probe.py queries` wrote for the model; those of each prompt count if empty.",
)


def _gates(setup: Setup, given: str) -> Any:
    """The gates of a file, or those beside the model's weights.

    Raises:
      ValueError: there are none, or the file holds no gates, or those of another model.
    """
    if pathlib.Path(given).suffix != ".json":
        learned = "gates are learned for a model with kvjax.learning.gates (experiments/learn.py gates does so for the "
        return probed(setup, given, "gates", how=f"{learned}embedded one); give a file as --gates")
    try:
        found = json.loads(pathlib.Path(given).read_bytes())
    except (OSError, ValueError) as e:
        raise ValueError(f"--gates {given} is no file of JSON that can be read: {e}") from e
    if not isinstance(found, dict) or "gates" not in found:
        raise ValueError(f"--gates {given} has no 'gates'; give what experiments/learn.py gates wrote")
    check_heads(setup, given, gates := np.asarray(found["gates"], np.float64))
    return gates


_GATES = File(
    _gates,
    "an array (.npy) of layers and kv heads, what `experiments/learn.py gates` wrote (.json), or what "
    "DuoAttention published (.tsv); the array beside the model's weights if empty.",
)


def _token_classes(setup: Setup) -> dict[str, Any]:
    special, punctuation = methods.token_classes(models.load_tokenizer(setup.source))
    return {"special": special, "punctuation": punctuation}


def _tokenizer(setup: Setup) -> dict[str, Any]:
    return {"tokenizer": models.load_tokenizer(setup.source)}


# --- the table ---


def _full(setup: Common = Setup()) -> Experiment:
    """The full cache: every token stays."""
    return Experiment("full", ((1.0, methods.full()),), setup)


CONFIGS: dict[str, Callable[..., Experiment]] = {
    "ada_pyramid": of(methods.ada_pyramid, window=16),
    "ada_snapkv": of(methods.ada_snapkv, window=16),
    "ahakv": of(methods.ahakv, recent=16),
    "aqas": of(methods.aqas),
    "cake": of(methods.cake, window=16),
    "capkv": of(methods.capkv),
    "chunkkv": of(chunkkv, window=16),
    "compactor": of(methods.compactor),
    "criticalkv": of(criticalkv, window=16),
    "curdkv": of(methods.curdkv),
    "defensivekv": of(methods.defensivekv, window=16),
    "dilated_window": of(methods.dilated_window),
    "dropkv": of(methods.dropkv, window=16),
    "duo_attention": of(
        methods.duo_attention,
        over="streaming",
        values=(0.25, 0.5, 0.75),
        form="streaming-{:g}",
        gates=_GATES,
        sinks=16,
        recent=48,
    ),
    "entropy_chunkkv": of(entropy_chunkkv, window=16),
    "expected_attention": of(expected_attention, queries=_QUERIES),
    "fastgen": of(methods.fastgen, over="recovery", values=(0.98, 0.95, 0.9), form="T={}", given=_token_classes),
    "finch": of(methods.finch, window=16),
    "full": _full,
    "h2o": of(methods.h2o),
    "headkv": of(methods.headkv, importance=_found("heads", "; or published shares (.json)"), window=16),
    "key_attention": of(methods.key_attention),
    "keydiff": of(methods.keydiff),
    "keyformer": of(keyformer),
    "knorm": of(methods.knorm),
    "kvcompose": of(methods.kvcompose, window=16),
    "kvzap": of(kvzap, function=_FUNCTION, recent=16, sinks=4),
    "kvzip": of(kvzip, given=_tokenizer),
    "lagkv": of(methods.lagkv, lag=32),
    "lava": of(methods.lava, window=16),
    "layer_defensivekv": of(methods.layer_defensivekv, window=16),
    "lazy_eviction": of(methods.lazy_eviction, window=16),
    "mas": of(methods.mas),
    "nacl": of(methods.nacl),
    "pyramidkv": of(methods.pyramidkv),
    "q_filters": of(methods.q_filters, filters=_found("filters")),
    "quest": of(methods.quest, form="reads-{}"),
    "r_kv": of(methods.r_kv, buffer=16),
    "random": of(methods.random),
    "random_attention": of(random_attention, every=16, form="prompt+{}"),
    "roco": of(methods.roco),
    "scissorhands": of(methods.scissorhands),
    "simlayerkv": of(methods.simlayerkv, over="threshold", values=(0.9, 0.8, 0.65), form="T={:g}", recent=64),
    "snapkv": of(methods.snapkv, window=16),
    "streaming_llm": of(streaming_llm),
    "think": of(methods.think, over="channels", values=(0.25, 0.5, 0.75), form="channels-{:g}"),
    "tova": of(methods.tova),
    "triattention": of(triattention, centres=_CENTRES, every=16, form="prompt+{}"),
    "vase": of(methods.vase, window=16),
    "window": of(methods.window),
}
