"""What transformers needs for what `model.py` measures of the full cache: the same random model, prompt and steps.

    python experiments/gpu/peer.py --layers 8

PyTorch's scaled dot product attention and a `DynamicCache`, decoded one forward pass a token; with `--compiled` a
`StaticCache` and a step by `torch.compile(mode="reduce-overhead")`, which replays CUDA graphs. Needs PyTorch for GPUs.
"""

import argparse
import functools
import json
import time

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

PROMPT, STEPS = 32768, 256


@torch.inference_mode()
def measure(layers: int, compiled: bool) -> dict[str, float]:
    """Seconds, tokens a second and peak bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=65536,
    )
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, config.vocab_size, (1, PROMPT), device="cuda")
    forward = functools.partial(model, use_cache=True, logits_to_keep=1)
    step = torch.compile(forward, mode="reduce-overhead", fullgraph=True) if compiled else forward

    def read():
        cache = (
            StaticCache(config=config, max_cache_len=PROMPT + STEPS + 8) if compiled else DynamicCache(config=config)
        )
        return forward(tokens, past_key_values=cache, cache_position=at[:PROMPT]).logits[:, -1:].argmax(-1), cache

    def decode(token, cache, first, steps):
        for i in range(first, first + steps):
            token = step(token, past_key_values=cache, cache_position=at[i : i + 1]).logits[:, -1:].argmax(-1).clone()
        return token

    def timed(f, *args):
        torch.cuda.synchronize()
        start = time.perf_counter()
        found = f(*args)
        torch.cuda.synchronize()
        return found, time.perf_counter() - start

    at = torch.arange(PROMPT + STEPS + 8, device="cuda")
    seconds = []
    for _ in range(4):
        token = cache = None  # the next cache takes its memory
        (token, cache), took = timed(read)
        seconds.append(took)
    token = decode(token, cache, PROMPT, 8)
    _, decoding = timed(decode, token, cache, PROMPT + 8, STEPS - 8)
    return {
        "prompt": PROMPT,
        "prefill_s": min(seconds),
        "prefill_tokens_s": PROMPT / min(seconds),
        "decode_tokens_s": (STEPS - 8) / decoding,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "parameter_bytes": sum(x.numel() * x.element_size() for x in model.parameters()),
    }


def main() -> None:
    """Prints one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--compiled", action="store_true", help="a static cache and CUDA graphs")
    args = parser.parse_args()
    print(json.dumps({"served_by": f"torch {torch.__version__}", **measure(args.layers, args.compiled)}))


if __name__ == "__main__":
    main()
