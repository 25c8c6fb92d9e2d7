"""Records what kvpress keeps: the cases of tests/golden/peers.json.

    cd tests/golden; PEERS_PYTHON -m record.peer_cases peers.json

It runs in the peers' environment, which `kvjax.experiments.bench.peers` makes and which has no kvjax. Every case reads
a prompt of hidden states through the attention layers of a random Llama, under one press with its own hooks, and notes
which tokens each kv head is left with. Hidden states and weights come from `peer_tensors`, from the case's seed, so
that the file holds the kept sets alone.

A case whose kept sets change when tensors change by a hundred-thousandth is not recorded; another seed is tried. What
is decided by equal scores alone stays.

The file: `about` has versions, and the names of all presses; `presses` has, for every press, written as Python with `r`
for the compression ratio, a list of cases:

| key | what |
|---|---|
| `r` | the compression ratio; absent where the press has none |
| `tokens`, `more` | of the prompt, and those that follow one by one, or ask all at once (KVCompose) |
| `head_dim`, `layers`, `seed` | of the tensors |
| `kept` | for every layer and kv head a string, "1" for tokens that stay and "0" for others, oldest first |
| `channels` | the same of key channels |
| `values`, `keys` | the sum over channels of every kept value or key, oldest first, where the press changes them |
"""

import collections
import contextlib
import dataclasses
import functools
import importlib
import logging
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import numpy as np
import torch

from . import peer_layers, peer_tensors
from .peer_layers import record, signs, slots_of, write
from .peer_tensors import KV_HEADS

kvpress = importlib.import_module("kvpress")
SIZES = ((97, 8, 0.3), (130, 8, 0.3), (48, 8, 0.75), (130, 8, 0.75))
_FEW = ((48, 8, 0.5), (97, 8, 0.5))  # presses without a ratio, and those that change what they keep


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Cases of one press.

    Attributes:
      press: the press, in Python, with `r` for the compression ratio.
      sizes: (tokens, head_dim, r) of every case; the usual ones if none are given.
      layers: of the model.
      more: tokens that follow the prompt.
      asks: they look at the prompt once, as a question does, instead of being appended one by one.
      eager: whether attention weights are given to the press.
      notes: what else is noted: "values", "keys" or "channels".
    """

    press: str
    sizes: tuple[tuple[int, int, float], ...] = ()
    layers: int = 1
    more: int = 0
    asks: bool = False
    eager: bool = False
    notes: str | None = None

    def cases(self) -> Iterator[dict[str, Any]]:
        """Cases without what is kept."""
        has_ratio = "r" in _names(self.press)
        for tokens, head_dim, r in self.sizes or (SIZES if has_ratio and self.notes is None else _FEW):
            case = {"r": r} if has_ratio else {}
            case |= {"tokens": tokens} | ({"more": self.more} if self.more else {})
            yield case | {"head_dim": head_dim, "layers": self.layers}


def _names(expression: str) -> set[str]:
    return set(compile(expression, "press", "eval").co_names)


_SHORT = ((48, 8, 0.97), (97, 8, 0.99), (130, 8, 0.99))  # one token a head is kept
_LONG = ((97, 8, 0.3), (130, 8, 0.3))  # what is kept holds a window of 64
_CUT = ((48, 8, 0.75), (97, 8, 0.75))  # windows of 32 do not fit into what is kept
_SNAPKV = "SnapKVPress(r, window_size=8)"
COUNTERPARTS = (
    Recipe("SnapKVPress(r)", _LONG),
    Recipe(_SNAPKV),
    Recipe("SnapKVPress(r, window_size=16, kernel_size=3)", (*_LONG, (48, 8, 0.5), (130, 8, 0.5)), eager=True),
    Recipe("SnapKVPress(r, window_size=32, kernel_size=5)", _CUT),
    Recipe("PyramidKVPress(r, window_size=8)", (*_LONG, (97, 8, 0.45), (130, 8, 0.45)), layers=4),
    Recipe(
        "PyramidKVPress(r, window_size=4, beta=3)",
        ((48, 8, 0.55), (130, 8, 0.55), (97, 16, 0.87), (130, 16, 0.87)),
        layers=5,
    ),
    Recipe("PyramidKVPress(r)", _LONG, layers=3),
    Recipe("PyramidKVPress(r, window_size=32)", _CUT, layers=3),
    *(
        Recipe(f"AdaKVPress({x})")
        for x in (
            _SNAPKV,
            f"{_SNAPKV}, alpha_safeguard=0.5",
            f"{_SNAPKV}, alpha_safeguard=0.0",
            "ExpectedAttentionPress(r, epsilon=0.01)",
            "CURPress(r)",
        )
    ),
    Recipe("AdaKVPress(KeyDiffPress(r))", (*SIZES, *_SHORT)),
    Recipe("AdaKVPress(SnapKVPress(r, window_size=32))", _CUT),
    Recipe(f"CriticalKVPress({_SNAPKV})"),
    Recipe(f"CriticalKVPress({_SNAPKV}, epsilon=0.1, first_stage_ratio=0.25)"),
    Recipe("CriticalKVPress(ExpectedAttentionPress(r, use_vnorm=False))"),
    Recipe("CriticalKVPress(KeyDiffPress(r), epsilon=0.5)", (*SIZES, *_SHORT)),
    Recipe(f"CriticalAdaKVPress({_SNAPKV})"),
    Recipe(f"CriticalAdaKVPress({_SNAPKV}, alpha_safeguard=0.5, epsilon=0.01, first_stage_ratio=0.3)"),
    Recipe("TOVAPress(r)"),
    Recipe("ObservedAttentionPress(r)", eager=True),
    Recipe("KeyDiffPress(r)"),
    Recipe("KnormPress(r)"),
    Recipe("LagKVPress(r, lag_size=16)"),
    Recipe("LagKVPress(r, n_sink=2, lag_size=20, cross_scoring=True)"),
    Recipe("LagKVPress(r)"),
    Recipe("StreamingLLMPress(r)"),
    Recipe("StreamingLLMPress(r, n_sink=0)"),
    Recipe("KeyRerotationPress(StreamingLLMPress(r))", notes="keys"),
    Recipe(f"KeyRerotationPress({_SNAPKV})", notes="keys"),
    Recipe("ExpectedAttentionPress(r)"),
    Recipe("ExpectedAttentionPress(r, n_future_positions=32, n_sink=2, use_covariance=False, use_vnorm=False)"),
    Recipe("ExpectedAttentionPress(r, use_vnorm=False)"),
    Recipe("ExpectedAttentionPress(r, epsilon=0.02)"),
    Recipe(f"ChunkKVPress({_SNAPKV})"),
    Recipe("ChunkKVPress(KeyDiffPress(r), chunk_length=7)"),
    Recipe("ThinKPress(0.5, window_size=8)", notes="channels"),
    Recipe("ThinKPress(0.3)", notes="channels"),
    Recipe(f"ComposedPress([{_SNAPKV}, ThinKPress(0.5, window_size=8)])", notes="channels"),
    Recipe("ComposedPress([KnormPress(r), KeyDiffPress(r)])"),
    Recipe("RandomPress(r)"),
    Recipe("PerLayerCompressionPress(KnormPress(), [0.5, 0.25, 0.8])", layers=3),
    Recipe("BlockPress(KeyDiffPress(r), block_size=8)", ((48, 8, 0.5), (112, 8, 0.5), (64, 8, 0.75), (128, 8, 0.75))),
    *(
        Recipe(f"DecodingPress({x}, compression_interval=4, target_size=32)", more=9)
        for x in ("KnormPress()", "KeyDiffPress()", "TOVAPress()")
    ),
    # One eviction: a second one takes slots for positions, whose order top-k has changed.
    Recipe("DecodingPress(StreamingLLMPress(), compression_interval=4, target_size=32)", more=5),
    Recipe("PrefillDecodingPress(KeyDiffPress(r), DecodingPress(KnormPress(), 4, 20))", more=9),
)
_CHUNKS = ((96, 8, 0.3), (128, 8, 0.3), (48, 8, 0.75), (128, 8, 0.75))
_FINCH = "given(FinchPress(r{}), window_size=8)"
COUNTERPARTS_OF_2025 = (
    *(Recipe(f"CURPress(r{x})") for x in ("", ', leverage_type="key"', ', leverage_type="value"')),
    Recipe('CURPress(r, leverage_type="kv_avg", num_sinks=0)'),
    Recipe('CURPress(r, leverage_type="kv_avg", use_local_approximation=False)'),
    Recipe("CURPress(r, use_local_approximation=False)"),
    Recipe("CURPress(r, local_window_size=5, num_sinks=2)"),
    Recipe("LeverageScorePress(r)"),
    Recipe("LeverageScorePress(r, sketch_dimension=6)"),
    Recipe("NonCausalAttnPress(r)"),
    Recipe("NonCausalAttnPress(r, chunk_size=16)", _CHUNKS),
    Recipe("CompactorPress(r)", (*_LONG, (48, 8, 0.5), (130, 8, 0.5))),
    *(
        Recipe(f"CompactorPress(r, chunk_size=12{x})", ((108, 8, 0.3), (120, 8, 0.3), (60, 8, 0.5), (120, 8, 0.5)))
        for x in ("", ", blending=0.0", ", blending=0.35", ", sketch_dimension=6")
    ),
    Recipe('given(QFilterPress(r), q_filters=drawn("L", "K", "H"))', layers=2),
    Recipe(_FINCH.format(""), notes="keys"),
    Recipe(_FINCH.format(", rerotate_keys=False")),
    Recipe(_FINCH.format(", normalize_scores=False, rerotate_keys=False")),
    # The last chunk's share holds the window.
    Recipe(_FINCH.format(", chunk_length=40"), ((80, 8, 0.5), (120, 8, 0.5)), notes="keys"),
    Recipe(
        _FINCH.format(", chunk_length=33, normalize_scores=False, rerotate_keys=False"),
        (*_LONG, (97, 8, 0.5), (130, 8, 0.5)),
    ),
    Recipe("ChunkPress(KnormPress(r), chunk_length=32)", _CHUNKS),
    Recipe("ChunkPress(KnormPress(r), chunk_length=50)", ((100, 8, 0.8), (130, 8, 0.8))),
    Recipe("ChunkPress(KnormPress(r), chunk_length=24)", ((120, 8, 0.3), (130, 8, 0.3), (48, 8, 0.75), (130, 8, 0.75))),
    Recipe("DMSPress(KnormPress(), threshold=-3.5, sliding_window_size=16)"),
    Recipe("DMSPress(KnormPress(), threshold=-3.5, sliding_window_size=16, decoding=True)", more=8),
    Recipe("DMSPress(KeyDiffPress(), threshold=-0.2, sliding_window_size=8)"),
    Recipe("DMSPress(SnapKVPress(window_size=8), threshold=0.02, sliding_window_size=4)"),
    Recipe('given(KVzapPress(r), kvzap_model=linear("L", "K", "D"))', layers=2),
    Recipe('DMSPress(given(KVzapPress(), kvzap_model=linear("L", "K", "D")), 0.0, 16)', layers=2),
    Recipe('given(DuoAttentionPress(0.5), streaming_mask=drawn("L", "K") > 0, sink_size=4, recent_size=16)', layers=3),
    *(
        Recipe(f"CAMPress({x})", more=9, notes="values")
        for x in (
            "KnormPress(), compression_interval=4, target_size=24, merge_budget=3",
            "KeyDiffPress(), compression_interval=4, target_size=24",
            "KnormPress(), compression_interval=1, target_size=40, merge_budget=8",
        )
    ),
    Recipe("CAMPress(KnormPress(), compression_interval=4, target_size=61)", ((47, 8, 0.5),), more=17, notes="values"),
    Recipe("MergingPress(KnormPress(r))", notes="values"),
    Recipe("MergingPress(KeyDiffPress(r), similarity_threshold=0.5, merge_fraction=0.75)", notes="values"),
)
ALONE = (  # for whoever adds a counterpart
    Recipe("CURPress(r, use_random_leverage=True)"),
    Recipe("CompressionRatioDecodingPress(KnormPress(), 4, target_compression_ratio=0.6)", more=9),
    *(
        Recipe(f"SimLayerKVPress({x})", layers=4)
        for x in (
            "lazy_threshold=0.2, n_recent=16",
            "lazy_threshold=0.25, n_last=4, n_recent=20, n_initial=2",
            "lazy_threshold=0.1, n_recent=8",
        )
    ),
    Recipe("EntropyGatedChunkKVPress(SnapKVPress(r, window_size=8))"),
    Recipe("EntropyGatedChunkKVPress(KeyDiffPress(r), chunk_length=5, low_entropy_chunk_length=2)"),
    Recipe("EntropyGatedChunkKVPress(KnormPress(r), chunk_length=16, low_entropy_chunk_length=1)"),
    *(
        Recipe(f"KVComposePress({x})", layers=3, more=12, asks=True)
        for x in (
            "compression_ratio=r",
            "compression_ratio=r, structured=False",
            'compression_ratio=r, agg_task="mean", agg_group="max", agg_head="max"',
            "compression_ratio=r, add_v_norm=True, add_mean_across_heads=False, keep_token_lower_bound=10",
            "compression_ratio=r, structured=False, add_v_norm=True, add_mean_across_heads=False",
        )
    ),
    Recipe('given(LUKVPress(KnormPress(), r), _budget_curves=uniform(99, "L", "K"))', layers=2),
    Recipe("CapPress(r)"),
    Recipe("CapPress(r, tau=1.0, n_future_positions=32, n_sink=0)"),
    Recipe('given(ExpectedAttentionStatsPress(r), mu=drawn("L", "N", "H"), cov=spread("L", "N", "H", "H"))', layers=2),
)
RECIPES = (*COUNTERPARTS, *COUNTERPARTS_OF_2025, *ALONE)


class Layers(peer_layers.Layers):
    """The attention layers that a case is read by, and what presses do with them."""

    def compose(self, press: Any) -> None:
        """What KVCompose does: the rows that follow the prompt look at it, and its layers are evicted together.

        Where it multiplies by the norms of values, kvpress 0.5.5 has those of the asking rows among them and fails;
        here they are taken out of the cache before.
        """
        press._register_model(self.model)
        press.register_context_ids(torch.zeros(1, self.prompt_length))
        press._register_cache(self.cache)
        for i, attention in enumerate(self.attention):
            weights = self.attend(i, self.cache, self.prompt_length, self.hidden[i].shape[1])[1]
            press.forward_hook(attention, [], {}, [None, weights])
        self.cache.crop(self.prompt_length)
        press.prepare_important_masks()
        press.compress_cache(self.model)

    def kept(self, by: str) -> list[list[dict[int, int]]]:
        """For every layer and kv head, the slot of every token that is left; tokens are known by keys or values."""
        found = []
        for layer, everything, attention in zip(self.cache.layers, self.everything, self.attention, strict=True):
            states = (layer.keys if by == "keys" else layer.values)[0]
            tokens = everything[0 if by == "keys" else 1]
            heads = [slots_of(states[k], tokens[k], f"{by} of head {k}") for k in range(KV_HEADS)]
            if getattr(attention, "masked_key_indices", None) is not None:
                for _, k, slot in zip(*(x.tolist() for x in attention.masked_key_indices), strict=True):
                    heads[k] = {t: s for t, s in heads[k].items() if s != slot}
            found.append(heads)
        return found


@contextlib.contextmanager
def _numbers(case: dict[str, Any]) -> Iterator[None]:
    """Draws come from the case's seed."""
    calls = collections.Counter[str]()

    def next_call(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
        calls[kind] += 1
        return torch.from_numpy(peer_tensors.random_numbers(case, calls[kind] - 1, tuple(shape), kind))

    library: Any = torch
    old = library.randn, library.rand, library.bernoulli
    library.randn = lambda *shape, **_: next_call("normal", shape)
    library.rand = lambda *shape, **_: next_call("uniform", shape)
    library.bernoulli = lambda p: (next_call("uniform", p.shape) < p).to(p.dtype)
    try:
        yield
    finally:
        library.randn, library.rand, library.bernoulli = old


def make_press(expression: str, case: dict[str, Any]) -> Any:
    """The press that an expression says. It loads nothing, and makes nothing of the model."""

    def given(press: Any, **attributes: Any) -> Any:
        """A press with attributes that it would load, or make of the text."""
        for name, value in attributes.items():
            setattr(press, name, torch.from_numpy(value) if isinstance(value, np.ndarray) else value)
        if isinstance(press, kvpress.FinchPress):
            press.delimiter_token_id = 0
        press.post_init_from_model = lambda model: None
        return press

    def linear(*shape: str) -> Any:
        """A model of KVzap that is linear in hidden states."""
        weights = torch.from_numpy(peer_tensors.drawn(case, *shape))
        layers = [torch.nn.Linear(w.shape[1], w.shape[0], bias=False) for w in weights]
        with torch.no_grad():
            for layer, weight in zip(layers, weights, strict=True):
                layer.weight.copy_(weight)
        return types.SimpleNamespace(layers=layers)

    draws = {name: _of_case(getattr(peer_tensors, name), case) for name in ("drawn", "uniform", "spread")}
    return eval(expression, {**vars(kvpress), "given": given, "linear": linear, "r": case.get("r"), **draws})


def _of_case(draw: Callable[..., np.ndarray], case: dict[str, Any]) -> Callable[..., np.ndarray]:
    return lambda *shape: draw(case, *shape)


def run(recipe: Recipe, case: dict[str, Any], noise: int | None = None) -> dict[str, Any]:
    """What is kept in a case."""
    layers = Layers(case, noise)
    layers.model.set_attn_implementation("eager" if recipe.eager or recipe.asks else "sdpa")
    with _numbers(case), torch.inference_mode():
        press = make_press(recipe.press, case)
        if recipe.asks:
            layers.prompt()
            layers.compose(press)
        else:
            with press(layers.model):
                layers.prompt()
                layers.steps()
    kept = layers.kept("keys" if recipe.notes == "values" else "values")
    total = case["tokens"] + (0 if recipe.asks else case.get("more", 0))
    found: dict[str, Any] = {"kept": [[signs(head, total) for head in heads] for heads in kept]}
    if recipe.notes == "channels":
        stay = [(layer.keys[0] != 0).any(1) for layer in layers.cache.layers]
        found["channels"] = [[signs(set(head.nonzero()[:, 0].tolist()), case["head_dim"]) for head in x] for x in stay]
    if recipe.notes in ("keys", "values"):
        found[recipe.notes] = [
            [
                [round(float(getattr(layer, recipe.notes)[0, k, head[t]].sum()), 3) for t in sorted(head)]
                for k, head in enumerate(heads)
            ]
            for layer, heads in zip(layers.cache.layers, kept, strict=True)
        ]
    return found


def main(path: pathlib.Path) -> None:
    """Records all cases."""
    logging.disable(logging.WARNING)
    about: dict[str, Any] = {package: metadata.version(package) for package in ("kvpress", "torch", "transformers")}
    classes = {name: getattr(kvpress, name) for name in kvpress.__all__}
    presses_of = lambda x: isinstance(x, type) and issubclass(x, kvpress.BasePress)
    about["classes"] = sorted(name for name, x in classes.items() if presses_of(x))
    presses = {}
    for recipe in RECIPES:
        presses[recipe.press] = record(recipe.press, recipe.cases(), functools.partial(run, recipe))
    write(path, about, "presses", presses)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(pathlib.Path(sys.argv[1]))
