"""What statistics and eviction add to reading a prompt, and how memory grows.

    python experiments/bench_prefill.py

Times are minima and medians over interleaved rounds in one process; only their ratios mean anything. Memory is what XLA
planned for the compiled program: an array that grew with the square of the prompt would show.
"""

import dataclasses
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import kvjax
from kvjax import methods, models
from kvjax.configs.experiment import check_finite, check_whole
from kvjax.experiments.core.command import check_output, plain_errors, write_json
from kvjax.experiments.core.provenance import device_info
from kvjax.models.embedded import EMBEDDED


def compile_prefill(
    model: models.LanguageModel, params: Any, policy: kvjax.Policy, length: int, *, evict: bool = True
) -> Any:
    """Prefill of one prompt, ahead of time. Without `evict`, statistics are measured and the cache stays full."""

    def run(params, tokens):
        state = kvjax.start(model, policy=policy, lengths=np.array([length]), max_new_tokens=32)
        logits, state, stats = kvjax.forward(model, params, tokens, state, evict=evict)
        return logits, [(layer.k, layer.v, layer.pos) for layer in state.layers], [] if evict else stats

    return jax.jit(run).lower(params, jax.ShapeDtypeStruct((1, length), jnp.int32)).compile()


def bench(
    length: int = 4096,
    rounds: int = 9,
    budget: float = 0.25,
    memory_lengths: tuple[int, ...] = (2048, 4096, 8192, 16384),
    depths: tuple[int, ...] = (4, 16),
    output: pathlib.Path | None = None,
) -> None:
    """Prints two tables.

    Args:
      length: of the prompt, for the timings.
      rounds: timed runs of each variant, interleaved.
      budget: of the policies, as a share of the prompt.
      memory_lengths: prompts whose compiled memory is compared.
      depths: numbers of layers whose compiled memory is compared.
      output: a JSON file for the figures.
    """
    check_whole(1, length=length, rounds=rounds, memory_lengths=memory_lengths, depths=depths)
    check_finite(0, 1, budget=budget)
    check_output(output)
    model, params = models.load(EMBEDDED)
    tokens = np.random.default_rng(0).integers(4, model.config.vocab_size, (1, length)).astype(np.int32)
    full, h2o = methods.full(), methods.h2o(budget)
    variants = {
        "no statistics, all kept": compile_prefill(model, params, full, length, evict=False),
        "H2O statistics, all kept": compile_prefill(model, params, h2o, length, evict=False),
        "H2O": compile_prefill(model, params, h2o, length),
        "TOVA": compile_prefill(model, params, methods.tova(budget), length),
        "SnapKV": compile_prefill(model, params, methods.snapkv(budget), length),
        "PyramidKV": compile_prefill(model, params, methods.pyramidkv(budget), length),
        "Ada-SnapKV": compile_prefill(model, params, methods.ada_snapkv(budget), length),
        "StreamingLLM": compile_prefill(model, params, methods.streaming_llm(budget), length),
        "random": compile_prefill(model, params, methods.random(budget), length),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(rounds + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            jax.block_until_ready(run(params, tokens))
            if i:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    base = seconds["no statistics, all kept"]
    timings = [
        {
            "variant": name,
            "min_ms": 1000 * min(s),
            "median_ms": 1000 * float(np.median(s)),
            "ratio_of_minima": min(s) / min(base),
            "median_of_paired_ratios": float(np.median(np.array(s) / np.array(base))),
        }
        for name, s in seconds.items()
    ]
    print(f"prefill of {length} tokens, {rounds} interleaved rounds\n")
    print(f"{'variant':28s} {'min ms':>8s} {'median ms':>10s} {'ratio':>7s} {'paired':>7s}")
    for t in timings:
        print(
            f"{t['variant']:28s} {t['min_ms']:8.1f} {t['median_ms']:10.1f} {t['ratio_of_minima']:7.3f} "
            f"{t['median_of_paired_ratios']:7.3f}"
        )

    print("\nmemory planned for temporaries, MiB (a float32 N x N matrix of one head for comparison)\n")
    print(f"{'layers':>6s} {'tokens':>7s} {'no statistics':>14s} {'H2O':>8s} {'N x N':>8s}")
    memory = []
    for layers in depths:
        deep = models.LanguageModel(dataclasses.replace(model.config, num_layers=layers))
        for n in memory_lengths:
            temporary = [
                compile_prefill(deep, deep.shapes, policy, n, evict=evict).memory_analysis().temp_size_in_bytes
                for policy, evict in ((full, False), (methods.h2o(256), True))
            ]
            memory.append({"layers": layers, "tokens": n, "plain_bytes": temporary[0], "h2o_bytes": temporary[1]})
            plain, with_h2o = (x / 2**20 for x in temporary)
            print(f"{layers:6d} {n:7d} {plain:14.1f} {with_h2o:8.1f} {4 * n * n / 2**20:8.0f}")
    if output is not None:
        result = {"length": length, "rounds": rounds, "timings": timings, "memory": memory, "device": device_info()}
        write_json(output, result)


if __name__ == "__main__":
    with plain_errors():
        tyro.cli(bench)
