"""Speed of reading a prompt and of decoding, method by method, and memory of reading.

    python -m kvjax.experiments.bench.speed prefill
    python -m kvjax.experiments.bench.speed decode
    python -m kvjax.experiments.bench.speed answers

Rounds are interleaved in one process; compare the ratios, not the seconds. Memory is what XLA planned for the compiled
program: an array that grew with the square of the prompt would show.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

import kvjax
from kvjax import methods, models
from kvjax.configs.experiment import check_finite, check_whole
from kvjax.experiments.bench.policies import make_policy
from kvjax.experiments.bench.process import seconds_in_turns
from kvjax.experiments.core.command import check_output, script
from kvjax.experiments.core.provenance import write_found
from kvjax.experiments.papers import long_outputs
from kvjax.models.embedded import EMBEDDED

READING = ("h2o", "tova", "snapkv", "pyramidkv", "ada_snapkv", "streaming_llm", "random")
METHODS = ("full", "window", "streaming_llm", "random", "h2o", "tova", "snapkv", "pyramidkv", "ada_snapkv")
METHODS += ("ada_snapkv dense", "roco", "ahakv", "keyformer", "quest", "quest everywhere")
RANDOM = models.ModelConfig(
    vocab_size=512, embed_dim=256, mlp_dim=1024, num_layers=4, num_query_heads=8, num_kv_heads=2, head_dim=32
)


def compile_prefill(
    model: models.LanguageModel, params: Any, policy: kvjax.Policy, length: int, *, evict: bool = True
) -> Any:
    """Prefill of one prompt, ahead of time. Without `evict`, statistics are measured and the cache stays full."""

    def run(params, tokens):
        state = kvjax.start(model, policy=policy, lengths=np.array([length]), max_new_tokens=32)
        logits, state, stats = kvjax.forward(model, params, tokens, state, evict=evict)
        return logits, [(layer.k, layer.v, layer.pos) for layer in state.layers], [] if evict else stats

    return jax.jit(run).lower(params, jax.ShapeDtypeStruct((1, length), jnp.int32)).compile()


def prefill(
    length: int = 4096,
    rounds: int = 9,
    budget: float = 0.25,
    memory_lengths: tuple[int, ...] = (2048, 4096, 8192, 16384),
    depths: tuple[int, ...] = (4, 16),
    output: pathlib.Path | None = None,
) -> None:
    """What statistics and eviction add to reading a prompt, and how memory grows: two tables.

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
    tokens = _prompts(model, 1, length)
    full, h2o = methods.full(), methods.h2o(budget)
    programs = {
        "no statistics, all kept": compile_prefill(model, params, full, length, evict=False),
        "h2o's statistics, all kept": compile_prefill(model, params, h2o, length, evict=False),
        **{name: compile_prefill(model, params, make_policy(name, budget), length) for name in READING},
    }
    runs = {name: functools.partial(program, params, tokens) for name, program in programs.items()}
    seconds = seconds_in_turns(runs, rounds, jax.block_until_ready)
    base = np.array(seconds["no statistics, all kept"])
    timings = [
        {
            "variant": name,
            "min_ms": 1000 * min(s),
            "median_ms": 1000 * float(np.median(s)),
            "ratio_of_minima": min(s) / min(base),
            "median_of_paired_ratios": float(np.median(s / base)),
        }
        for name, s in seconds.items()
    ]
    print(f"prefill of {length} tokens, {rounds} interleaved rounds\n")
    _show(timings)
    print("\nmemory planned for temporaries, MiB (a float32 N x N matrix of one head for comparison)\n")
    print(f"{'layers':>6s} {'tokens':>7s} {'no statistics':>14s} {'H2O':>8s} {'N x N':>8s}")
    memory = []
    for layers in depths:
        deep = models.LanguageModel(dataclasses.replace(model.config, num_layers=layers))
        for n in memory_lengths:
            plain, with_h2o = (
                compile_prefill(deep, deep.shapes, policy, n, evict=evict).memory_analysis().temp_size_in_bytes
                for policy, evict in ((full, False), (methods.h2o(256), True))
            )
            memory.append({"layers": layers, "tokens": n, "plain_bytes": plain, "h2o_bytes": with_h2o})
            print(f"{layers:6d} {n:7d} {plain / 2**20:14.1f} {with_h2o / 2**20:8.1f} {4 * n * n / 2**20:8.0f}")
    write_found(output, length=length, rounds=rounds, budget=budget, timings=timings, memory=memory)


def decode(
    length: int = 4096,
    steps: int = 128,
    batch: int = 1,
    budget: float = 0.25,
    rounds: int = 7,
    random: bool = False,
    only: tuple[str, ...] = (),
    output: pathlib.Path | None = None,
) -> None:
    """Tokens per second for the full cache and each method, in `generate`'s loop.

    Args:
      length: of the prompt.
      steps: tokens decoded.
      batch: sequences at once.
      budget: a share of the prompt.
      rounds: timed runs of each method, interleaved.
      random: a random model with 4 layers of 256 channels, 8 query and 2 kv heads of 32 in place of the embedded one.
      only: these methods beside the full cache and SnapKV; all if empty.
      output: a JSON file for the figures.
    """
    check_whole(1, length=length, steps=steps, batch=batch, rounds=rounds)
    check_finite(0, 1, budget=budget)
    if unknown := set(only) - set(METHODS):
        raise ValueError(f"no methods {sorted(unknown)}; there are {', '.join(METHODS)}")
    check_output(output)
    if random:
        model = models.LanguageModel(RANDOM)
        params = jax.jit(model.init)(jax.random.key(0))
    else:
        model, params = models.load(EMBEDDED)
    tokens, runs, slots = _prompts(model, batch, length), {}, {}
    for name in (n for n in METHODS if not only or n in (*only, "full", "snapkv")):
        read = kvjax.prefill(model, params, tokens, policy=make_policy(name, budget), max_new_tokens=steps)
        how = {"max_new_tokens": steps + 1, "eos_ids": ()}  # the first is that of the prompt's logits
        runs[name] = functools.partial(kvjax.generate_from, model, params, *read, **how)
        slots[name] = sum(kv.pos[0].size for kv in read[1].layers)
    seconds = {name: np.array(s) for name, s in seconds_in_turns(runs, rounds, jax.block_until_ready).items()}
    rows = [
        {
            "method": name,
            "tokens_per_second": batch * steps / float(np.median(s)),
            "of_full": float(np.median(seconds["full"] / s)),
            "of_snapkv": float(np.median(seconds["snapkv"] / s)),
            "slots": slots[name],
        }
        for name, s in seconds.items()
    ]
    sizes = {"length": length, "steps": steps, "batch": batch, "budget": budget, "rounds": rounds}
    print(
        f"{steps} tokens after a prompt of {length}, batch {batch}, budget {budget:.0%}, {rounds} interleaved rounds\n"
    )
    _show(rows)
    write_found(output, **sizes, random=random, rows=rows)


def answers(
    model: str = "reasoner",
    length: int = 256,
    steps: int = 2048,
    batch: int = 1,
    more: int = 128,
    every: tuple[int, ...] = (1, 16),
    rounds: int = 3,
    methods: tuple[str, ...] = tuple(long_outputs.METHODS),
    output: pathlib.Path | None = None,
) -> None:
    """What a long answer costs under the policies of `findings.py long_outputs`, beside a window of as many tokens.

    Args:
      model: a model with `centres.npz` beside its weights, if triattention is among the methods.
      length: of the prompt, which stays.
      steps: tokens of the answer.
      batch: sequences at once.
      more: tokens that a head may hold beside the prompt's.
      every: tokens between two evictions.
      rounds: timed runs of each method, interleaved.
      methods: of the study, the window always among them.
      output: a JSON file of what was found.
    """
    check_whole(1, length=length, steps=steps, batch=batch, rounds=rounds)
    study = long_outputs.LongOutputs(model=model, methods=methods, every=every, more=(more,))
    check_output(output)
    centres = study.known
    loaded, params = models.load(model)
    tokens, runs, rows = _prompts(loaded, batch, length), {}, []
    cells = [cell for cell in long_outputs.cells(dict.fromkeys(("window", *methods)), every) if cell.prompt]
    for cell in cells:
        read = kvjax.prefill(loaded, params, tokens, policy=cell.policy(more, centres), max_new_tokens=steps)
        how = {"max_new_tokens": steps + 1, "eos_ids": ()}
        runs[cell.name] = functools.partial(kvjax.generate_from, loaded, params, *read, **how)
    seconds = {name: np.array(s) for name, s in seconds_in_turns(runs, rounds, jax.block_until_ready).items()}
    for cell in cells:
        s, window = seconds[cell.name], seconds[cell._replace(method="window").name]
        rows.append(
            {
                "method": cell.method,
                "every": cell.every,
                "milliseconds_per_token": 1000 * float(np.median(s)) / steps,
                "of_window": float(np.median(s / window)),
                "milliseconds_per_eviction_beyond_window": 1000 * float(np.median(s - window)) * cell.every / steps,
            }
        )
    sizes = {"model": model, "length": length, "steps": steps, "batch": batch, "more": more, "rounds": rounds}
    print(f"{steps} tokens after a prompt of {length} that stays, {more} more, {rounds} interleaved rounds\n")
    _show(rows)
    write_found(output, **sizes, rows=rows)


def _show(rows: list[dict[str, Any]]) -> None:
    """Prints rows under their names."""
    print(pd.DataFrame(rows).to_string(index=False, float_format="{:,.3f}".format))


def _prompts(model: models.LanguageModel, batch: int, length: int) -> jax.Array:
    """Random tokens, the same ones each time."""
    drawn = np.random.default_rng(0).integers(4, model.config.vocab_size, (batch, length))
    return jnp.asarray(drawn, jnp.int32)


if __name__ == "__main__":
    script({"prefill": prefill, "decode": decode, "answers": answers})
