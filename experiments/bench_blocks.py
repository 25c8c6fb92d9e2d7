"""Reading prompts in blocks: memory that does not grow with the prompt.

    python experiments/bench_blocks.py
    python experiments/bench_blocks.py --lengths 16384 131072 --budget 512 --block 512 --method roco

Every row is a process of its own that reads the prompt twice, and measures the second time. The peak is what it holds
beyond what it held before, parameters not included. Seconds are only comparable within one run. Needs Linux.
"""

import pathlib
import time
from typing import Any, Literal

import jax
import numpy as np
import tyro

import kvjax
from kvjax import methods, models
from kvjax.configs.experiment import check_whole
from kvjax.drivers.memory import shown
from kvjax.experiments.bench.process import apart, forget_peak, held
from kvjax.experiments.core.command import check_output, plain_errors, write_json
from kvjax.experiments.core.provenance import device_info
from kvjax.models.embedded import EMBEDDED


def measure(method: str, budget: int, length: int, block: int | None) -> dict[str, Any]:
    """Peak bytes and seconds of one prefill, in this process."""
    model, params = models.load(EMBEDDED)
    tokens = np.random.default_rng(0).integers(4, model.config.vocab_size, (1, length), np.int32)
    how = {"policy": getattr(methods, method)(budget), "max_new_tokens": 16, "block": block}
    read = lambda: jax.block_until_ready(kvjax.prefill(model, params, tokens, **how))
    read()
    before = held("VmRSS")
    forget_peak()
    start = time.perf_counter()
    _, state = read()
    seconds, peak = time.perf_counter() - start, held("VmHWM") - before
    live, slots = int(state.num_live.max()), max(state.plan.capacities)
    return {"length": length, "block": block, "peak_bytes": peak, "seconds": seconds, "live": live, "slots": slots}


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
      at_once: lengths to read without blocks, for comparison.
      output: a JSON file for the figures.
    """
    check_whole(1, lengths=lengths, at_once=at_once, budget=budget, block=block)
    check_output(output)
    rows = []
    for length, size in [*((n, block) for n in lengths), *((n, None) for n in at_once)]:
        arguments = method, budget, length, size
        row = apart("kvjax.experiments.bench_blocks", "measure", *arguments, MALLOC_MMAP_THRESHOLD_="131072")
        rows.append(row)
        how = "at once" if size is None else f"in blocks of {size}"
        ran = f"{row['seconds']:.1f} s, at most {row['live']} live"
        print(
            f"{method} {budget}: {length:>7,} tokens {how}: peak {shown(max(0, row['peak_bytes']))}, {ran}", flush=True
        )
    if output is not None:
        write_json(output, {"device": device_info(), "method": method, "rows": rows})


if __name__ == "__main__":
    with plain_errors():
        tyro.cli(main)
