"""What PyTorch needs for what `model.py` measures: the same random model, prompt and steps, a line of JSON each.

    python -m experiments.gpu.peer transformers compiled SnapKVPress --layers 8

"transformers" is PyTorch's scaled dot product attention and a `DynamicCache`, decoded one forward pass a token;
"compiled" a `StaticCache` and a step by `torch.compile(mode="reduce-overhead")`, which replays CUDA graphs; any other
name is a press of kvpress, with its own defaults. It runs where kvjax is not installed, and needs PyTorch for GPUs.
"""

import functools
import gc
import statistics
import time
from typing import Any

import torch
import tyro
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from ..bench.peers.theirs import attend, make_press, version
from ..bench.process import seconds_in_turns
from .watchdog import tell

WARM_UP = 8  # steps that are not counted


@torch.inference_mode()
def measure(model: Any, method: str, prompt: int, batch: int, steps: int, budget: float, device: str) -> dict[str, Any]:
    """Seconds, tokens a second and bytes of one method; arguments as of `main`."""
    gc.collect()
    gpu, compiled = device == "cuda", method == "compiled"
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    press = make_press("transformers" if compiled else method, budget)
    tokens = torch.randint(0, model.config.vocab_size, (batch, prompt), device=device)
    at = torch.arange(prompt + steps, device=device)
    forward = functools.partial(model, use_cache=True, logits_to_keep=1)
    step = torch.compile(forward, mode="reduce-overhead", fullgraph=True) if compiled else forward

    def where(first: int, stop: int) -> dict[str, Any]:
        """Positions; a static cache of transformers 4 does not know how many tokens it holds."""
        of = {"position_ids": at[first:stop].expand(batch, -1)}
        return {"cache_position": at[first:stop]} if compiled else of

    def prefilled() -> tuple[Any, Any]:
        # A press looks at what every layer read.
        cache = StaticCache(config=model.config, max_cache_len=prompt + steps) if compiled else DynamicCache()
        attend(model, "eager" if method == "ObservedAttentionPress" else "sdpa")
        with press(model):
            return forward(tokens, past_key_values=cache, **where(0, prompt)).logits[:, -1:].argmax(-1), cache

    def decode(token: Any, cache: Any, first: int, stop: int) -> Any:
        attend(model, "sdpa")
        for i in range(first, stop):
            token = step(token, past_key_values=cache, **where(i, i + 1)).logits[:, -1:].argmax(-1).clone()
        return token

    wait = lambda _: torch.cuda.synchronize() if gpu else None
    seconds = statistics.median(seconds_in_turns({"read": prefilled}, 3, wait)["read"])
    token, cache = prefilled()
    kept = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    token = decode(token, cache, prompt, prompt + WARM_UP)
    wait(token)
    start = time.perf_counter()
    wait(decode(token, cache, prompt + WARM_UP, prompt + steps))
    decoding = time.perf_counter() - start
    names = "torch", "transformers", *["kvpress"] * (method not in ("transformers", "compiled"))
    return {
        "served_by": ", ".join(f"{name} {version(name)}" for name in names),
        "prompt": prompt,
        "batch": batch,
        "budget": prompt if method in ("transformers", "compiled") else budget,
        "prefill_s": seconds,
        "prefill_tokens_s": batch * prompt / seconds,
        "decode_tokens_s": batch * (steps - WARM_UP) / decoding,
        "cache_bytes": kept,
        "peak_bytes": torch.cuda.max_memory_allocated() if gpu else 0,
        "peak_of": "allocator",
        "parameter_bytes": sum(x.numel() * x.element_size() for x in model.parameters()),
    }


def main(
    methods: tyro.conf.Positional[tuple[str, ...]],
    layers: int = 32,
    prompt: int = 32768,
    batch: int = 1,
    steps: int = 256,
    budget: float = 0.25,
    smoke: bool = False,
) -> None:
    """Prints what was measured of each method.

    Args:
      methods: "transformers", "compiled" or presses.
      layers: of the model.
      prompt: tokens of each sequence.
      batch: sequences.
      steps: tokens that each writes; more than the 8 that warm up.
      budget: the share of the prompt that presses keep.
      smoke: a tiny model, on CPU.
    """
    names = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim".split()
    sizes = (64, 32, 48, 4, 2, 16) if smoke else (128256, 4096, 14336, 32, 8, 128)
    shape: dict[str, Any] = dict(zip(names, sizes, strict=True))
    config = LlamaConfig(**shape, num_hidden_layers=layers, max_position_embeddings=65536)
    device = "cpu" if smoke else "cuda"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    tell(methods, lambda method: measure(model, method, prompt, batch, steps, budget, device))


if __name__ == "__main__":
    tyro.cli(main)
