"""The peers' worker, transformers and kvpress: `python -m experiments.bench.peers.theirs CHECKPOINT DTYPE THREADS`.

It runs in the peers' environment, which has no kvjax, and answers requests from standard input. kvpress is imported
where a press is asked for.

Decoding is the loop of kvpress's own pipeline: one forward pass and one argmax a token, without `generate`, whose
preparations of each step would be timed with it.
"""

import contextlib
import functools
import importlib
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from .protocol import serve


def make_press(name: str, budget: float) -> Any:
    """A press of kvpress with its own defaults that keeps a share, or a context that does nothing for none.

    Of ThinK, a share of the key channels is dropped.
    """
    if name == "transformers":
        return lambda model: contextlib.nullcontext()
    kvpress = importlib.import_module("kvpress")
    ratio = 1 - budget
    if name == "ThinKPress":
        return kvpress.ThinKPress(key_channel_compression_ratio=ratio)
    around = name in ("AdaKVPress", "CriticalKVPress", "ChunkKVPress")
    return getattr(kvpress, name)(kvpress.SnapKVPress(ratio) if around else ratio)


def attend(model: Any, how: str) -> None:
    """Attention is computed so from now on."""
    if model.config._attn_implementation != how:
        model.set_attn_implementation(how)


def version(package: str) -> str | None:
    """Of a package that is installed."""
    return next((found.version for found in metadata.distributions(name=package)), None)


class Jobs:
    """Makes jobs ready to run.

    Args:
      checkpoint: a model's directory.
      dtype: of its parameters, activations and caches.
    """

    def __init__(self, checkpoint: str, dtype: str):
        how = {"dtype": getattr(torch, dtype), "trust_remote_code": False}
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, **how).eval()
        self._read: tuple[Any, Any] = None, None  # the prompt that was read last, and what came of it

    def __call__(self, job: dict[str, Any]) -> Callable[[], int]:
        """A job, the fields of `kvjax.experiments.bench.peers.rows.Job`, run once if it decodes."""
        if job["kind"] == "prefill":
            return functools.partial(self._prefill, job)
        run = self._decoding(job)
        run()
        return run

    @torch.inference_mode()
    def _prefill(self, job: dict[str, Any]) -> int:
        """Reads a prompt; bytes of keys and values that stay."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(4, self._model.config.vocab_size, (1, job["length"]), generator=generator)
        # Layers with a window keep no more than it, but presses want them whole, as in kvpress's pipeline.
        cache: Any = DynamicCache(config=self._model.config) if job["what"] == "transformers" else DynamicCache()
        self._begin(job["how"], [None] * len(self._model.model.layers))
        with make_press(job["what"], job["budget"])(self._model):
            out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        masked = [getattr(layer.self_attn, "masked_key_indices", None) for layer in self._model.model.layers]
        kept = [(layer.keys, layer.values) for layer in cache.layers]
        self._read = _prompt(job), (out.logits[:, -1:].argmax(-1), cache, kept, masked)
        return sum(x.numel() * x.element_size() for both in kept for x in both)

    @torch.inference_mode()
    def _decoding(self, job: dict[str, Any]) -> Callable[[], int]:
        if self._read[0] != _prompt(job):
            self._prefill(job)
        model, batch, (first, cache, read, masked) = self._model, job["batch"], self._read[1]
        token = first.repeat(batch, 1)
        kept = [[x.repeat(batch, 1, 1, 1) for x in both] for both in read]

        @torch.inference_mode()
        def run() -> int:
            self._begin("sdpa", masked)  # the fastest, once attention is no longer looked at
            for layer, (keys, values) in zip(cache.layers, kept, strict=True):
                layer.keys, layer.values = keys, values
                if hasattr(layer, "cumulative_length"):
                    layer.cumulative_length = job["length"]
            following = token
            for i in range(job["steps"]):
                at = torch.full((batch, 1), job["length"] + i)
                out = model(following, past_key_values=cache, use_cache=True, position_ids=at)
                following = out.logits[:, -1:].argmax(-1)
            return 0

        return run

    def _begin(self, how: str, masked: list[Any]) -> None:
        """How attention is computed, and what AdaKVPress noted of a prompt in each layer, where decoding finds it."""
        attend(self._model, how)
        for layer, of_layer in zip(self._model.model.layers, masked, strict=True):
            layer.self_attn.masked_key_indices = of_layer


def _prompt(job: dict[str, Any]) -> tuple[Any, ...]:
    """What jobs that decode after the same prompt share."""
    return job["what"], job["how"], job["length"], job["budget"]


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    versions = {name: version(name) for name in ("torch", "transformers", "kvpress", "numpy")}
    serve(Jobs(*sys.argv[1:3]), {"versions": {"python": platform.python_version()} | versions})
