"""Records what kvpress keeps: the cases of tests/golden/peers.json.

    cd tests/tools; PEERS_PYTHON -m record.peer_cases ../golden/peers.json

It runs in the peers' environment, which `kvjax.experiments.bench.peers` makes and which has no kvjax. Every case reads
a prompt of hidden states through the attention layers of a random Llama, under one press with its own hooks, and notes
which tokens each kv head is left with. Hidden states and weights come from `peer_tensors`, from the case's seed, so
that the file holds the kept sets alone.

The file says which presses and cases these are: for another one, write it there without what is recorded, and run this.
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
| `channels` | the same of key channels, where the press drops some |
| `values`, `keys` | the sum over channels of every kept value or key, oldest first, where the press changes them |
"""

import collections
import contextlib
import functools
import importlib
import json
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
EAGER = ("ObservedAttentionPress(r)", "SnapKVPress(r, window_size=16, kernel_size=3)", "KVCompose")
"""Presses, by how they begin, that are given attention weights."""
ASKING = "KVCompose"
"""What follows the prompt looks at it once, as a question does, instead of being appended one by one."""
NOTED = ("channels", "values", "keys")


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


def run(name: str, notes: str | None, case: dict[str, Any], noise: int | None = None) -> dict[str, Any]:
    """What a press keeps in a case, and what else is noted of it."""
    layers, asks = Layers(case, noise), name.startswith(ASKING)
    layers.model.set_attn_implementation("eager" if name.startswith(EAGER) else "sdpa")
    with _numbers(case), torch.inference_mode():
        press = make_press(name, case)
        if asks:
            layers.prompt()
            layers.compose(press)
        else:
            with press(layers.model):
                layers.prompt()
                layers.steps()
    kept = layers.kept("keys" if notes == "values" else "values")
    total = case["tokens"] + (0 if asks else case.get("more", 0))
    found: dict[str, Any] = {"kept": [[signs(head, total) for head in heads] for heads in kept]}
    if notes == "channels":
        stay = [(layer.keys[0] != 0).any(1) for layer in layers.cache.layers]
        found["channels"] = [[signs(set(head.nonzero()[:, 0].tolist()), case["head_dim"]) for head in x] for x in stay]
    if notes in ("keys", "values"):
        found[notes] = [
            [
                [round(float(getattr(layer, notes)[0, k, head[t]].sum()), 3) for t in sorted(head)]
                for k, head in enumerate(heads)
            ]
            for layer, heads in zip(layers.cache.layers, kept, strict=True)
        ]
    return found


def main(path: pathlib.Path) -> None:
    """Records all cases of the file anew."""
    logging.disable(logging.WARNING)
    about: dict[str, Any] = {package: metadata.version(package) for package in ("kvpress", "torch", "transformers")}
    classes = {name: getattr(kvpress, name) for name in kvpress.__all__}
    presses_of = lambda x: isinstance(x, type) and issubclass(x, kvpress.BasePress)
    about["classes"] = sorted(name for name, x in classes.items() if presses_of(x))
    presses = {}
    for name, cases in json.loads(path.read_text())["presses"].items():
        notes = next((note for note in NOTED if note in cases[0]), None)
        presses[name] = record(name, cases, functools.partial(run, name, notes))
    write(path, about, "presses", presses)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(pathlib.Path(sys.argv[1]))
