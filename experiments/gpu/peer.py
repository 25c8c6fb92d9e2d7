"""What transformers needs for what `model.py` measures of the full cache: the same random model, prompt and steps.

    python experiments/gpu/peer.py --layers 8

PyTorch's scaled dot product attention and a `DynamicCache`, decoded one forward pass a token; with `--compiled` a
`StaticCache` and a step by `torch.compile(mode="reduce-overhead")`, which replays CUDA graphs. Needs PyTorch for GPUs.
"""

import functools
import json
import time
from typing import Any

import torch
import tyro
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

WARM_UP = 8  # steps that are not counted


@torch.inference_mode()
def measure(layers: int, compiled: bool, smoke: bool) -> dict[str, float]:
    """Seconds, tokens a second and peak bytes."""
    prompt, steps = (48, 12) if smoke else (32768, 256)
    names = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim".split()
    sizes = (64, 32, 48, 4, 2, 16) if smoke else (128256, 4096, 14336, 32, 8, 128)
    shape: dict[str, Any] = dict(zip(names, sizes, strict=True))
    config = LlamaConfig(**shape, num_hidden_layers=layers, max_position_embeddings=65536)
    device = "cpu" if smoke else "cuda"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
        tokens = torch.randint(0, config.vocab_size, (1, prompt))
        at = torch.arange(prompt + steps)
    forward = functools.partial(model, use_cache=True, logits_to_keep=1)
    step = torch.compile(forward, mode="reduce-overhead", fullgraph=True) if compiled else forward

    def prefilled() -> tuple[Any, Any]:
        cache = StaticCache(config=config, max_cache_len=prompt + steps) if compiled else DynamicCache(config=config)
        return forward(tokens, past_key_values=cache, cache_position=at[:prompt]).logits[:, -1:].argmax(-1), cache

    def decode(token: Any, cache: Any, first: int, stop: int) -> Any:
        for i in range(first, stop):
            token = step(token, past_key_values=cache, cache_position=at[i : i + 1]).logits[:, -1:].argmax(-1).clone()
        return token

    def timed(f: Any, *args: Any) -> tuple[Any, float]:
        wait = (lambda: None) if smoke else torch.cuda.synchronize
        wait()
        start = time.perf_counter()
        found = f(*args)
        wait()
        return found, time.perf_counter() - start

    seconds = min(timed(prefilled)[1] for _ in range(3))
    token, cache = prefilled()
    token = decode(token, cache, prompt, prompt + WARM_UP)
    _, decoding = timed(decode, token, cache, prompt + WARM_UP, prompt + steps)
    return {
        "prompt": prompt,
        "prefill_s": seconds,
        "prefill_tokens_s": prompt / seconds,
        "decode_tokens_s": (steps - WARM_UP) / decoding,
        "peak_bytes": 0 if smoke else torch.cuda.max_memory_allocated(),
        "parameter_bytes": sum(x.numel() * x.element_size() for x in model.parameters()),
    }


def main(layers: int = 32, compiled: bool = False, smoke: bool = False) -> None:
    """Prints one line of JSON.

    Args:
      layers: of the model.
      compiled: a static cache and CUDA graphs.
      smoke: a tiny model, on CPU.
    """
    measured = measure(layers, compiled, smoke)
    print(json.dumps({"served_by": f"torch {torch.__version__}"} | measured))


if __name__ == "__main__":
    tyro.cli(main)
