"""The peers' worker of `experiments/bench/peers.py`: transformers and kvpress.

    python -m experiments.bench.peer_torch CHECKPOINT THREADS

It runs in the peers' environment, which has no kvjax, and answers requests from standard input
(`kvjax.experiments.bench.peer_protocol`). kvpress is imported where a press is asked for.

Decoding is the loop of kvpress's own pipeline: one forward pass and one argmax a token, without `generate`, whose
preparations of each step would be timed with it.
"""

import functools
import importlib
import platform
import sys
from importlib import metadata
from typing import Any

import torch
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

from .peer_protocol import Prepared, serve

_PACKAGES = "torch", "transformers", "kvpress", "numpy"


def make_press(name: str, budget: float) -> Any:
    """A press of kvpress with its own defaults that keeps a share; of ThinK, a share of the key channels is dropped."""
    kvpress = importlib.import_module("kvpress")
    ratio = 1 - budget
    if name == "ThinKPress":
        return kvpress.ThinKPress(key_channel_compression_ratio=ratio)
    press = getattr(kvpress, name)
    if name in ("AdaKVPress", "CriticalKVPress", "ChunkKVPress"):
        return press(kvpress.SnapKVPress(ratio))
    return press(ratio)


class Jobs:
    """Makes jobs ready to run.

    Args:
      checkpoint: a model's directory.
    """

    def __init__(self, checkpoint: str):
        self._model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def __call__(self, job: dict[str, Any]) -> Prepared:
        """A job, the fields of `kvjax.experiments.bench.peer_rows.Job`, run once.

        Raises:
          ValueError: a kind that this worker does not know.
        """
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(4, self._model.config.vocab_size, (job["batch"], job["length"]), generator=generator)
        press = None if job["what"] == "full" else make_press(job["what"], job["budget"])
        if job["kind"] == "prefill":
            run = functools.partial(self._prefill, ids, press, job["how"])
        elif job["kind"] == "decode":
            run = self._decoding(ids, press, job)
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
        model = self._model
        if model.config._attn_implementation != how:
            model.set_attn_implementation(how)
        self._mask([None] * len(model.model.layers))
        options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        if press is None:
            out = model(ids, **options)
        else:
            with press(model):
                out = model(ids, **options)
        return out.logits[:, -1:].argmax(-1)

    @torch.inference_mode()
    def _decoding(self, ids: torch.Tensor, press: Any, job: dict[str, Any]) -> Any:
        model, (B, T), steps = self._model, ids.shape, job["steps"]
        static, eager = job["how"] == "static", job["how"] == "eager"
        cache: Any = StaticCache(config=model.config, max_cache_len=T + steps) if static else DynamicCache()
        first = self._read(ids, press, "eager" if eager else "sdpa", cache)
        sizes = [layer.keys.shape[2] for layer in cache.layers]
        masked = [getattr(layer.self_attn, "masked_key_indices", None) for layer in model.model.layers]

        @torch.inference_mode()
        def run() -> int:
            if model.config._attn_implementation != "sdpa":  # the fastest, once attention is no longer looked at
                model.set_attn_implementation("sdpa")
            self._mask(masked)
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

    def _mask(self, indices: list[Any]) -> None:
        """Puts what AdaKVPress noted of a prompt into the layers, where decoding finds it."""
        for layer, of_layer in zip(self._model.model.layers, indices, strict=True):
            layer.self_attn.masked_key_indices = of_layer


def _about() -> dict[str, Any]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {"versions": versions}


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    serve(Jobs(sys.argv[1]), _about)
