"""What eviction saves a whole model: seconds, tokens a second and bytes of each method, a line of JSON each.

    python experiments/gpu/model.py snapkv --layers 8

A random model shaped like Llama 3 8B reads a prompt and writes some tokens. `gpu_check.py` runs it. The programs of all
methods are compiled at once, before the first is measured.
"""

import concurrent.futures
import contextlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import kvjax
from kvjax import models
from kvjax.experiments.bench.policies import make_policy
from kvjax.experiments.bench.process import seconds_in_turns
from kvjax.experiments.core.engine import peak_bytes
from kvjax.experiments.gpu.gpu_report import recorded
from kvjax.experiments.gpu.watchdog import tell
from kvjax.pallas_kernels import use

Method = Literal["snapkv", "h2o", "full", "ada_snapkv", "streaming_llm", "tova"]


def main(
    methods: tyro.conf.Positional[tuple[Method, ...]],
    layers: int = 32,
    prompt: int = 32768,
    batch: int = 1,
    steps: int = 256,
    budget: float = 2048,
    smoke: bool = False,
    implementation: Literal["interpret", "triton", "mosaic_gpu"] | None = None,
) -> None:
    """Prints what was measured of each method, and what served it.

    `peak_bytes` are what the process held at most where there is one method. Of several it is what the larger of a
    method's two programs holds, parameters included.

    Args:
      methods: what evicts; nothing does of "full".
      layers: of the model.
      prompt: tokens of each sequence.
      batch: sequences.
      steps: tokens that each writes.
      budget: tokens that methods keep, or the share of the prompt up to 1.
      smoke: a tiny model, on any device.
      implementation: instead of the best.
    """
    V, D, F, N, K, H = (64, 32, 48, 4, 2, 16) if smoke else (128256, 4096, 14336, 32, 8, 128)
    config = models.ModelConfig(V, D, F, layers, N, K, H, dtype="float32" if smoke else "bfloat16", max_position=65536)
    model = models.LanguageModel(config)
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (batch, prompt), 0, V, jnp.int32)

    def compiling(method: str) -> tuple[Any, Any, list[str]]:
        """The programs that read and write, once they are compiled, and what serves them."""
        how = {"policy": make_policy(method, budget), "lengths": np.full(batch, prompt), "max_new_tokens": steps + 1}
        reading = jax.jit(lambda params, tokens: kvjax.prefill(model, params, tokens, **how))

        def written(params: Any, logits: jax.Array, state: kvjax.State) -> Any:
            found = kvjax.generate_from(model, params, logits, state, max_new_tokens=steps + 1, eos_ids=())
            return found.tokens, found.state

        writing = jax.jit(written, donate_argnums=2)
        with recorded() as found, use(implementation) if implementation else contextlib.nullcontext():
            lowered = reading.lower(params, tokens)
            after = writing.lower(params, *jax.eval_shape(reading, params, tokens))
        return pool.submit(lowered.compile), pool.submit(after.compile), found

    pool, tracer = (concurrent.futures.ThreadPoolExecutor(most) for most in (2 * len(methods), 1))
    with pool, tracer:  # errors wait for their own line
        programs = {method: tracer.submit(compiling, method) for method in methods}

    def measure(method: Any) -> dict[str, Any]:
        reads, writes, found = programs.pop(method).result()
        read, write, held = reads.result(), writes.result(), list[Any]()

        def reading() -> list[Any]:
            held[:] = read(params, tokens)
            return held

        # A state is given to what writes: the next one takes the memory of the one before.
        runs = {"read": reading, "write": lambda: write(params, *held)}
        took = seconds_in_turns(runs, 3, jax.block_until_ready)
        seconds, writing = (float(np.median(took[name])) for name in runs)
        alone = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        return {
            "served_by": "+".join(found),
            "prompt": prompt,
            "batch": batch,
            "budget": budget if method != "full" else prompt,
            "prefill_s": seconds,
            "prefill_tokens_s": batch * prompt / seconds,
            "decode_tokens_s": batch * steps / writing,
            "prefill_temporary_bytes": read.memory_analysis().temp_size_in_bytes,
            "cache_bytes": sum(x.nbytes for kv in held[1].layers for x in (kv.k, kv.v)),
            "peak_bytes": alone if len(methods) == 1 else max(peak_bytes(program) or 0 for program in (read, write)),
            "peak_of": "process" if len(methods) == 1 else "programs",
            "parameter_bytes": sum(x.nbytes for x in jax.tree.leaves(params)),
        }

    tell(methods, measure)


if __name__ == "__main__":
    tyro.cli(main)
