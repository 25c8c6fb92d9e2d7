"""Budget curves in one call, against one run for every policy and budget.

    python -m kvjax.experiments.bench.curves
    python -m kvjax.experiments.bench.curves --length 512 --rows 32 --prompts 8

One call (`kvjax.analysis.curves`) measures all policies at all budgets. Two kinds of separate runs are timed, each
compiled before it is timed, and every one of them is run:

* "same measures": `kvjax.analysis.curves` of one policy at one budget. It reads the same prompts and their
  continuation with the full cache, decides, and measures every loss of that one mask, with the same code.
* "generate": what a run without this analysis does. `prefill` with the policy, then `feed` of the continuation, then
  divergence and agreement against logits of the full cache, which are given. It measures no layer.

Every separate run is timed several times once it is compiled, and its median counts; the one call is timed after every
fourth of them. Compare the ratios, not the seconds. A second ratio is that of first runs, compilation included, in CPU
seconds of the process, to which other work on the machine adds nothing. `--output` takes every single timing, and the
commit that was timed.
"""

import functools
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import kvjax
from kvjax import analysis, models
from kvjax.budgets import Schedule
from kvjax.configs.experiment import check_whole
from kvjax.experiments.bench.policies import make_policy
from kvjax.experiments.core.command import check_output, script
from kvjax.experiments.core.provenance import write_found
from kvjax.experiments.tasks import TASKS
from kvjax.experiments.tasks.base import task_of
from kvjax.experiments.tasks.perplexity import SCORED
from kvjax.models.embedded import EMBEDDED

METHODS = ("window", "streaming_llm", "random", "h2o", "tova", "snapkv", "pyramidkv", "ada_snapkv")
POLICIES = {name: functools.partial(make_policy, name) for name in METHODS}
BUDGETS = (0.0625, 0.09375, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.75)


def generate_run(
    model: models.LanguageModel,
    params: Any,
    tokens: np.ndarray,
    continuation: np.ndarray,
    full: jax.Array,
    *,
    policy: kvjax.Policy,
) -> tuple[jax.Array, jax.Array]:
    """Divergence and agreement of every prompt, from a compacted cache that reads token by token."""
    _, state = kvjax.prefill(model, params, tokens, policy=policy, max_new_tokens=continuation.shape[1])
    logits, _ = kvjax.feed(model, params, continuation, state)
    return analysis.output_kl(full, logits).mean(-1), (full.argmax(-1) == logits.argmax(-1)).mean(-1)


def timed(run: Any, clock: Any = time.perf_counter) -> tuple[Any, float]:
    """A result, and the seconds until it is there."""
    start = clock()
    result = jax.block_until_ready(run())
    return result, clock() - start


def main(
    length: int = 1024,
    rows: int = 32,
    prompts: int = 8,
    rounds: int = 3,
    output: pathlib.Path | None = None,
) -> None:
    """Runs everything and prints the ratios.

    Args:
      length: tokens of every prompt.
      rows: tokens of every continuation.
      prompts: how many.
      rounds: how often each separate run is timed.
      output: a JSON file for the figures.
    """
    check_whole(1, length=length, rows=rows, prompts=prompts, rounds=rounds)
    if rows > SCORED:
        raise ValueError(f"rows={rows}, but examples go on for {SCORED} tokens; ask for fewer")
    check_output(output)
    model, params = models.load(EMBEDDED)
    tokenizer = models.load_tokenizer(EMBEDDED)
    task = task_of(tokenizer, length + SCORED, 0)
    examples = [TASKS["perplexity"](task, i) for i in range(prompts)]
    tokens = np.array([e.context for e in examples], np.int32)
    continuation = np.array([e.questions[0].continuation[:rows] for e in examples], np.int32)
    full = analysis.read(model, params, tokens, continuation).logits
    measure = functools.partial(analysis.curves, model, params, tokens, continuation, oracles=())

    together = lambda: measure(POLICIES, BUDGETS)
    pairs = [(name, budget) for name in POLICIES for budget in BUDGETS]
    same = [functools.partial(measure, {name: POLICIES[name]}, [budget]) for name, budget in pairs]
    once = lambda name, budget: kvjax.when(Schedule(), POLICIES[name](budget))
    generated = [
        functools.partial(generate_run, model, params, tokens, continuation, full, policy=once(*pair)) for pair in pairs
    ]
    kinds = {"same measures": same, "generate": generated}

    settings: dict[str, Any] = {"length": length, "rows": rows, "prompts": prompts, "rounds": rounds}
    settings |= {"policies": list(POLICIES), "budgets": list(BUDGETS)}
    print(f"{len(POLICIES)} policies x {len(BUDGETS)} budgets x {prompts} prompts of {length} tokens, {rows} rows")
    table = []
    for kind, runs in kinds.items():
        jax.clear_caches()  # a process has room for some hundred programs
        table.append({"kind": kind, "runs": len(runs), **compare(together, runs, pairs, kind, rounds)})
        print(summary(table[-1]), flush=True)
        write_found(output, **settings, kinds=table)


def compare(together: Any, runs: list[Any], pairs: list[tuple[str, float]], kind: str, rounds: int) -> dict[str, Any]:
    """Seconds of the one call and of the separate runs, their ratios, and how far their losses are apart."""
    whole, one_first = timed(together, time.process_time)
    one: list[float] = []
    separate: list[dict[str, Any]] = []
    found = []
    for i, ((policy, budget), run) in enumerate(zip(pairs, tqdm(runs, desc=kind, file=sys.stdout), strict=True)):
        result, cpu = timed(run, time.process_time)
        found.append(jax.tree.map(np.asarray, result))
        each = [timed(run)[1] for _ in range(rounds)]
        own = {"policy": policy, "budget": budget, "seconds": float(np.median(each)), "rounds": each}
        separate.append({**own, "first_cpu_seconds": cpu})
        if i % 4 == 0:
            one.append(timed(together)[1])
    seconds, first = (sum(run[key] for run in separate) for key in ("seconds", "first_cpu_seconds"))
    one_seconds = float(np.median(one))
    return {
        "seconds": seconds,
        "one_call_seconds": one_seconds,
        "ratio": seconds / one_seconds,
        "first_cpu_seconds": first,
        "one_call_first_cpu_seconds": one_first,
        "first_ratio": first / one_first,
        "largest_difference": largest_difference(whole, kind, found, pairs),
        "one_call_rounds": one,
        "separate": separate,
    }


def summary(row: dict[str, Any]) -> str:
    """One kind of separate runs in two lines."""
    return (
        f"{row['kind']}, {row['runs']} runs: {row['seconds']:.2f} s, one call {row['one_call_seconds']:.2f} s: "
        f"{row['ratio']:.1f}x\n    with compilation, CPU: {row['first_cpu_seconds']:.0f} s, one call "
        f"{row['one_call_first_cpu_seconds']:.0f} s: {row['first_ratio']:.1f}x; losses differ by at most "
        f"{row['largest_difference']:.1e}, relative"
    )


def largest_difference(whole: analysis.Curves, kind: str, results: list[Any], pairs: list[tuple[str, float]]) -> float:
    """The largest relative difference between the one call and the separate runs, over all losses that these have."""
    worst = []
    for (name, budget), found in zip(pairs, results, strict=True):
        at = whole.policies.index(name), whole.budgets.index(budget)
        if kind == "generate":
            losses = {"kl": np.asarray(found[0])}
        else:
            losses = {loss: found.values(loss)[0, 0] for loss in ("l1", "heads_l2", "bound", "lost", "kl")}
        for loss, b in losses.items():
            a = whole.values(loss)[at]
            same = np.isnan(a) & np.isnan(b)  # the bound does not cover keys that move
            worst.append(np.where(same, 0.0, np.abs(a - b) / np.maximum(np.abs(b), 1e-2)).max())
    return float(np.max(worst))


if __name__ == "__main__":
    script(main)
