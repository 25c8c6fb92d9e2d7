"""What eviction saves a whole model: seconds, tokens a second and bytes of each method, a line of JSON each.

    python experiments/gpu/model.py snapkv --layers 8

A random model shaped like Llama 3 8B reads a prompt and writes some tokens. `gpu_check.py` runs it. The programs of all
methods are compiled at once, before the first is measured.
"""

import concurrent.futures
import contextlib
import time
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
from kvjax.experiments.gpu.watchdog import tell
from kvjax.pallas_kernels import use

Method = Literal["snapkv", "h2o", "full", "ada_snapkv", "streaming_llm", "tova"]


def program_bytes(compiled: Any) -> int:
    """Arguments, results and temporary memory of a program; what is donated counts once."""
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes


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
    pool = concurrent.futures.ThreadPoolExecutor(2 * len(methods))

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

    programs: dict[str, Any] = {}
    for method in methods:
        try:
            programs[method] = compiling(method)
        except Exception as error:  # its own line says so
            programs[method] = error

    def measure(method: str) -> dict[str, Any]:
        if isinstance(programs[method], Exception):
            raise programs[method]
        reads, writes, found = programs.pop(method)
        concurrent.futures.wait([x for both in programs.values() if isinstance(both, tuple) for x in both[:2]])
        read, write = reads.result(), writes.result()
        # States are dropped: the next one takes the memory of the one before.
        reading = seconds_in_turns({"read": lambda: read(params, tokens)}, 3, jax.block_until_ready)["read"]
        seconds, cache, decoding = float(np.median(reading)), 0, 0.0
        for _ in range(2):  # the first warms up
            logits, state = jax.block_until_ready(read(params, tokens))
            cache = sum(x.nbytes for kv in state.layers for x in (kv.k, kv.v))
            start = time.perf_counter()
            jax.block_until_ready(write(params, logits, state))
            decoding = time.perf_counter() - start
        alone = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        return {
            "served_by": "+".join(found),
            "prompt": prompt,
            "batch": batch,
            "budget": budget if method != "full" else prompt,
            "prefill_s": seconds,
            "prefill_tokens_s": batch * prompt / seconds,
            "decode_tokens_s": batch * steps / decoding,
            "prefill_temporary_bytes": read.memory_analysis().temp_size_in_bytes,
            "cache_bytes": cache,
            "peak_bytes": alone if len(methods) == 1 else max(map(program_bytes, (read, write))),
            "peak_of": "process" if len(methods) == 1 else "programs",
            "parameter_bytes": sum(x.nbytes for x in jax.tree.leaves(params)),
        }

    tell(methods, measure)


if __name__ == "__main__":
    tyro.cli(main)
