"""Decode speed of every method against the full cache, one `lax.scan` each.

    python experiments/bench_decode.py

Rounds are interleaved in one process; compare the ratios, not the seconds.
"""

import dataclasses
import functools
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax

import kvjax
from kvjax import methods, models
from kvjax.configs.experiment import check_finite, check_whole
from kvjax.contract import Layout
from kvjax.experiments.core.command import check_output, plain_errors, write_json
from kvjax.experiments.core.provenance import device_info
from kvjax.models.embedded import EMBEDDED

METHODS = {
    "full": lambda budget: methods.full(),
    "window": methods.window,
    "streaming_llm": methods.streaming_llm,
    "random": methods.random,
    "h2o": methods.h2o,
    "tova": methods.tova,
    "snapkv": methods.snapkv,
    "pyramidkv": methods.pyramidkv,
    "ada_snapkv": methods.ada_snapkv,
    "ada_snapkv dense": lambda budget: dataclasses.replace(methods.ada_snapkv(budget), layout=Layout()),
    "roco": methods.roco,
    "ahakv": methods.ahakv,
    "keyformer": methods.keyformer,
    "quest": methods.quest,
    "quest everywhere": functools.partial(methods.quest, dense=0),
}
RANDOM = models.ModelConfig(
    vocab_size=512, embed_dim=256, mlp_dim=1024, num_layers=4, num_query_heads=8, num_kv_heads=2, head_dim=32
)


@functools.partial(jax.jit, static_argnames=("model", "steps"))
def decode(
    model: models.LanguageModel, params: Any, token: jax.Array, state: kvjax.State, steps: int
) -> tuple[jax.Array, jax.Array]:
    """Greedy decoding in one scan; returns the tokens and the live slots at the end."""

    def step(carry, _):
        token, state = carry
        logits, state = kvjax.decode_step(model, params, token, state)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (token, state), token

    (_, state), tokens = lax.scan(step, (token, state), length=steps)
    return tokens, state.num_live


def bench(
    length: int = 4096,
    steps: int = 128,
    batch: int = 1,
    budget: float = 0.25,
    rounds: int = 7,
    random: bool = False,
    only: tuple[str, ...] = (),
    output: pathlib.Path | None = None,
) -> None:
    """Prints tokens per second for the full cache and each method.

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
    tokens = jnp.asarray(np.random.default_rng(0).integers(4, model.config.vocab_size, (batch, length)), jnp.int32)
    states, slots = {}, {}
    for name, make in METHODS.items():
        if only and name not in (*only, "full", "snapkv"):
            continue
        logits, state = kvjax.prefill(model, params, tokens, policy=make(budget), max_new_tokens=steps)
        states[name] = jnp.argmax(logits, axis=-1).astype(jnp.int32), state
        slots[name] = sum(kv.pos[0].size for kv in state.layers)
    seconds: dict[str, list[float]] = {name: [] for name in states}
    for i in range(rounds + 1):
        for name, (token, state) in states.items():
            start = time.perf_counter()
            jax.block_until_ready(decode(model, params, token, state, steps))
            if i:  # the first round compiles
                seconds[name].append(time.perf_counter() - start)
    ratio = lambda name, s: float(np.median(np.array(seconds[name]) / np.array(s)))
    rows = [
        {
            "method": name,
            "tokens_per_second": batch * steps / float(np.median(s)),
            "of_full": ratio("full", s),
            "of_snapkv": ratio("snapkv", s),
            "slots": slots[name],
        }
        for name, s in seconds.items()
    ]
    print(
        f"{steps} tokens after a prompt of {length}, batch {batch}, budget {budget:.0%}, {rounds} interleaved rounds\n"
    )
    print(f"{'method':16s} {'tokens/s':>10s} {'of full':>8s} {'of snapkv':>9s} {'slots':>9s}")
    for r in rows:
        line = f"{r['method']:16s} {r['tokens_per_second']:10.0f} {r['of_full']:8.2f}"
        print(f"{line} {r['of_snapkv']:9.2f} {r['slots']:9,}")
    if output is not None:
        sizes = {"length": length, "steps": steps, "batch": batch, "budget": budget, "rounds": rounds}
        result = {**sizes, "random": random, "rows": rows}
        write_json(output, result | {"device": device_info()})


if __name__ == "__main__":
    with plain_errors():
        tyro.cli(bench)
