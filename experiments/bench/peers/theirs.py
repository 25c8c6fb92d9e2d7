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
from importlib import metadata
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from .protocol import Prepared, serve


def make_press(name: str, budget: float) -> Any:
    """A press of kvpress with its own defaults that keeps a share; of ThinK, a share of the key channels is dropped."""
    kvpress = importlib.import_module("kvpress")
    ratio = 1 - budget
    if name == "ThinKPress":
        return kvpress.ThinKPress(key_channel_compression_ratio=ratio)
    around = name in ("AdaKVPress", "CriticalKVPress", "ChunkKVPress")
    return getattr(kvpress, name)(kvpress.SnapKVPress(ratio) if around else ratio)


class Jobs:
    """Makes jobs ready to run.

    Args:
      checkpoint: a model's directory.
      dtype: of its parameters, activations and caches.
    """

    def __init__(self, checkpoint: str, dtype: str):
        how = {"dtype": getattr(torch, dtype), "trust_remote_code": False}
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, **how).eval()

    def __call__(self, job: dict[str, Any]) -> Prepared:
        """A job, the fields of `kvjax.experiments.bench.peers.rows.Job`, run once.

        Raises:
          ValueError: a kind that this worker does not know.
        """
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(4, self._model.config.vocab_size, (job["batch"], job["length"]), generator=generator)
        press = None if job["what"] == "full" else make_press(job["what"], job["budget"])
        if job["kind"] == "prefill":
            run = functools.partial(self._prefill, ids, press, job["how"])
        elif job["kind"] == "decode":
            run = self._decoding(ids, press, job["how"], job["steps"])
        else:
            raise ValueError(f"the peers have no job {job['kind']!r}")
        run()
        return Prepared(run, {})

    @torch.inference_mode()
    def _prefill(self, ids: torch.Tensor, press: Any, how: str) -> int:
        cache: Any = DynamicCache()
        self._read(ids, press, how, cache)
        return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))

    def _read(self, ids: torch.Tensor, press: Any, how: str, cache: Any) -> torch.Tensor:
        """Reads prompts into a cache; returns the token that follows each."""
        self._begin(how, [None] * len(self._model.model.layers))
        with press(self._model) if press is not None else contextlib.nullcontext():
            out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1:].argmax(-1)

    @torch.inference_mode()
    def _decoding(self, ids: torch.Tensor, press: Any, how: str, steps: int) -> Any:
        model, (B, T), static = self._model, ids.shape, how == "static"
        cache: Any = StaticCache(config=model.config, max_cache_len=T + steps) if static else DynamicCache()
        first = self._read(ids, press, "sdpa" if static else how, cache)
        sizes = [layer.keys.shape[2] for layer in cache.layers]
        masked = [getattr(layer.self_attn, "masked_key_indices", None) for layer in model.model.layers]

        @torch.inference_mode()
        def run() -> int:
            self._begin("sdpa", masked)  # the fastest, once attention is no longer looked at
            token = first
            for i in range(steps):
                at = torch.full((B, 1), T + i)
                where = {"position_ids": at} | ({"cache_position": at[0]} if static else {})
                out = model(token, past_key_values=cache, use_cache=True, **where)
                token = out.logits[:, -1:].argmax(-1)
            if not static:
                for layer, size in zip(cache.layers, sizes, strict=True):
                    layer.keys, layer.values = layer.keys[:, :, :size], layer.values[:, :, :size]
            return 0

        return run

    def _begin(self, how: str, masked: list[Any]) -> None:
        """How attention is computed, and what AdaKVPress noted of a prompt in each layer, where decoding finds it."""
        if self._model.config._attn_implementation != how:
            self._model.set_attn_implementation(how)
        for layer, of_layer in zip(self._model.model.layers, masked, strict=True):
            layer.self_attn.masked_key_indices = of_layer


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    version = lambda name: next((found.version for found in metadata.distributions(name=name)), None)
    versions = {name: version(name) for name in ("torch", "transformers", "kvpress", "numpy")}
    serve(Jobs(*sys.argv[1:3]), {"versions": {"python": platform.python_version()} | versions})
