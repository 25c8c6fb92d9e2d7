"""What eviction saves a whole model: seconds, tokens a second and peak bytes of one method, in a process of its own.

    python experiments/gpu/model.py snapkv --layers 8

A random model shaped like Llama 3 8B reads 32k tokens and writes 256. `gpu_check.py` runs it for every method.
"""

import argparse
import contextlib
import functools
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import methods, models
from kvjax.experiments.bench.process import seconds_in_turns
from kvjax.experiments.bench.speed import advance
from kvjax.experiments.gpu.gpu_report import recorded
from kvjax.pallas_kernels import use


def measure_model(method: str, layers: int, smoke: bool) -> dict[str, Any]:
    """Seconds, tokens a second and peak bytes of one method."""
    prompt, steps, budget = (48, 4, 40) if smoke else (32768, 256, 2048)
    sizes = (64, 32, 48, 4, 2, 16) if smoke else (128256, 4096, 14336, 32, 8, 128)
    V, D, F, N, K, H = sizes
    config = models.ModelConfig(V, D, F, layers, N, K, H, dtype="float32" if smoke else "bfloat16", max_position=65536)
    model = models.LanguageModel(config)
    params = jax.jit(model.init)(jax.random.key(0))
    policy = methods.full() if method == "full" else getattr(methods, method)(budget)
    tokens = jax.random.randint(jax.random.key(1), (1, prompt), 0, V, jnp.int32)
    how = {"policy": policy, "lengths": np.array([prompt]), "max_new_tokens": steps + 1}
    prefill = jax.jit(lambda params, tokens: kvjax.prefill(model, params, tokens, **how))
    compiled = prefill.lower(params, tokens).compile()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(compiled(params, tokens))  # its state is dropped: the next one takes its memory
        seconds.append(time.perf_counter() - start)
    logits, state = compiled(params, tokens)
    decoding = functools.partial(advance, model, params, logits.argmax(-1).astype(jnp.int32), state, steps)
    (decode_seconds,) = seconds_in_turns({"decode": decoding}, 1, jax.block_until_ready)["decode"]
    stats = jax.devices()[0].memory_stats() or {}
    memory = compiled.memory_analysis()
    return {
        "prompt": prompt,
        "budget": budget if method != "full" else prompt,
        "prefill_s": min(seconds),
        "prefill_tokens_s": prompt / min(seconds),
        "decode_tokens_s": steps / decode_seconds,
        "prefill_temporary_bytes": memory.temp_size_in_bytes if memory is not None else None,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "parameter_bytes": sum(x.nbytes for x in jax.tree.leaves(params)),
    }


def main() -> int:
    """Prints one line of JSON: what was measured, and what served it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("method", choices=("snapkv", "h2o", "full"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, on any device")
    parser.add_argument("--implementation", choices=("interpret", "triton", "mosaic_gpu"), help="instead of the best")
    args = parser.parse_args()
    with recorded() as found, use(args.implementation) if args.implementation else contextlib.nullcontext():
        measured = measure_model(args.method, args.layers, args.smoke)
    print(json.dumps({"served_by": "+".join(found)} | measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
