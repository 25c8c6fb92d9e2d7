"""What eviction saves a whole model: seconds, tokens a second and peak bytes of one method, in a process of its own.

    python experiments/gpu/model.py snapkv --layers 8

A random model shaped like Llama 3 8B reads 32k tokens and writes 256. `gpu_check.py` runs it for every method.
"""

import contextlib
import json
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import kvjax
from kvjax import models
from kvjax.experiments.bench.policies import make_policy
from kvjax.experiments.bench.process import seconds_in_turns
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
    tokens = jax.random.randint(jax.random.key(1), (1, prompt), 0, V, jnp.int32)
    how = {"policy": make_policy(method, budget), "lengths": np.array([prompt]), "max_new_tokens": steps + 1}
    prefill = jax.jit(lambda params, tokens: kvjax.prefill(model, params, tokens, **how))
    compiled = prefill.lower(params, tokens).compile()
    # States are dropped: the next one takes the memory of the one before.
    reading = seconds_in_turns({"read": lambda: compiled(params, tokens)}, 3, jax.block_until_ready)["read"]
    logits, state = compiled(params, tokens)
    decode = lambda: kvjax.generate_from(model, params, logits, state, max_new_tokens=steps + 1, eos_ids=()).tokens
    (decoding,) = seconds_in_turns({"decode": decode}, 1, jax.block_until_ready)["decode"]
    stats = jax.devices()[0].memory_stats() or {}
    memory = compiled.memory_analysis()
    return {
        "prompt": prompt,
        "budget": budget if method != "full" else prompt,
        "prefill_s": min(reading),
        "prefill_tokens_s": prompt / min(reading),
        "decode_tokens_s": steps / decoding,
        "prefill_temporary_bytes": memory.temp_size_in_bytes if memory is not None else None,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "parameter_bytes": sum(x.nbytes for x in jax.tree.leaves(params)),
    }


def main(
    method: tyro.conf.Positional[Literal["snapkv", "h2o", "full"]],
    layers: int = 32,
    smoke: bool = False,
    implementation: Literal["interpret", "triton", "mosaic_gpu"] | None = None,
) -> None:
    """Prints one line of JSON: what was measured, and what served it.

    Args:
      method: what evicts; nothing does of "full".
      layers: of the model.
      smoke: a tiny model, on any device.
      implementation: instead of the best.
    """
    with recorded() as found, use(implementation) if implementation else contextlib.nullcontext():
        measured = measure_model(method, layers, smoke)
    print(json.dumps({"served_by": "+".join(found)} | measured))


if __name__ == "__main__":
    tyro.cli(main)
