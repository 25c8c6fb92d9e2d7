"""Reading prompts in blocks: memory that does not grow with the prompt.

    python experiments/bench_blocks.py
    python experiments/bench_blocks.py --lengths 16384 131072 --budget 512 --block 512 --method roco

Every length is compiled, its peak read from the compiled program, and then run. Seconds are only comparable within one
run; the peak counts arguments (parameters and token ids included), results and temporaries.
"""

import pathlib
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import kvjax
from kvjax import methods, models
from kvjax.configs.experiment import check_whole
from kvjax.experiments.evaluation.evaluate import peak_bytes
from kvjax.experiments.evaluation.results import check_output, device_info, plain_errors, write_json
from kvjax.models.embedded import EMBEDDED


def measure(
    model: models.LanguageModel, params: Any, policy: kvjax.Policy, length: int, block: int | None
) -> dict[str, Any]:
    """Peak bytes and seconds of one prefill; no run where the prompt is not read in blocks."""
    plan = kvjax.make_plan(model.config, policy, prompt_len=length, max_new_tokens=16, lengths=[length])
    run = jax.jit(lambda params, tokens: kvjax.prefill(model, params, tokens, plan, block=block))
    compiled = run.lower(params, jax.ShapeDtypeStruct((1, length), jnp.int32)).compile()
    row: dict[str, Any] = {"length": length, "block": block, "peak_bytes": peak_bytes(compiled)}
    if block is None:
        return row
    tokens = np.random.default_rng(0).integers(4, model.config.vocab_size, (1, length), np.int32)
    start = time.perf_counter()
    logits, state = jax.block_until_ready(compiled(params, tokens))
    row["seconds"] = time.perf_counter() - start
    row["finite"] = bool(np.isfinite(logits).all())
    row["live"] = int(state.num_live.max())
    row["slots"] = state.num_slots
    return row


def main(
    lengths: tuple[int, ...] = (16384, 131072),
    budget: int = 512,
    block: int = 512,
    method: Literal["h2o", "roco", "window", "tova", "keyformer", "nacl"] = "roco",
    at_once: tuple[int, ...] = (16384,),
    output: pathlib.Path | None = None,
) -> None:
    """Runs and prints a table.

    Args:
      lengths: tokens of the prompts.
      budget: live tokens a kv head and layer.
      block: tokens of a block.
      method: what evicts.
      at_once: lengths to compile without blocks, for comparison.
      output: a JSON file for the figures.
    """
    check_whole(1, lengths=lengths, at_once=at_once, budget=budget, block=block)
    check_output(output)
    model, params = models.load(EMBEDDED)
    policy = getattr(methods, method)(budget)
    rows = [measure(model, params, policy, n, block) for n in lengths]
    rows += [measure(model, params, policy, n, None) for n in at_once]
    for row in rows:
        how = "at once" if row["block"] is None else f"in blocks of {row['block']}"
        ran = f", {row['seconds']:.1f} s, at most {row['live']} live" if "seconds" in row else " (compiled only)"
        print(f"{method} {budget}: {row['length']:>7,} tokens {how}: peak {row['peak_bytes'] / 2**20:.1f} MiB{ran}")
    if output is not None:
        write_json(output, {"device": device_info(), "method": method, "rows": rows})


if __name__ == "__main__":
    with plain_errors():
        tyro.cli(main)
