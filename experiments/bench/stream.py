"""Reading without end: time a token and memory after 10,000, 100,000 and 1,000,000 tokens.

    python -m kvjax.experiments.bench.stream
    python -m kvjax.experiments.bench.stream --only h2o tova --tokens 100000

Every method reads random tokens in a process of its own, 256 in a call (`kvjax.read`), with a Llama of random numbers
(2 layers of 64, 4 query heads and 2 kv heads of 16) under a budget of 512 tokens. Windows of 10,240 tokens have their
median time and what the process holds, and are written as they come. Other work on the machine, and its clock, change
within minutes: so the states at 10,000 tokens and at the later marks are kept, and when all is read each reads a chunk
in turn, many times. The ratio of two is the median over rounds. A method that was interrupted begins anew; those that
are done stay. Needs Linux.
"""

import itertools
import json
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import kvjax
from kvjax import methods, models
from kvjax.configs.experiment import check_whole
from kvjax.experiments.bench.process import apart, forget_peak, held, stored_rows
from kvjax.experiments.core.command import script, write_figure, write_json
from kvjax.experiments.core.locks import Locked
from kvjax.experiments.core.page import Table
from kvjax.experiments.core.provenance import device_info
from kvjax.models.written import write_bytes
from kvjax.run.memory import shown

METHODS = ("streaming_llm", "h2o", "tova", "roco", "keyformer", "random")
_BUDGET, _CHUNK, _WINDOW = 512, 256, 40  # tokens, tokens of a call, calls of a window
_CONFIG = models.ModelConfig(
    vocab_size=512, embed_dim=64, mlp_dim=256, num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=16
)


def _ids(seed: int = 0) -> Iterator[int]:
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.integers(0, _CONFIG.vocab_size, 4096).tolist()


def measure(name: str, tokens: int, rounds: int, path: str) -> dict[str, Any]:
    """One method, in this process. Windows are appended to the file as they come.

    Returns:
      `windows`: tokens read, median and least microseconds a token, bytes held; `marks`: for each mark, of chunks read
      in turn, tokens, microseconds a token, and the median ratios to the first, of time and of processor time, which
      other work changes least; `growth`: bytes that the process held more at its peak than after the first windows.
    """
    model = models.LanguageModel(_CONFIG)
    params = jax.jit(model.init)(jax.random.key(0))
    policy = getattr(methods, name)(_BUDGET)
    reader = kvjax.read(model, params, _ids(), policy=policy, prompt_len=_BUDGET, chunk=_CHUNK)
    wanted = [10**i for i in range(4, 1 + len(str(tokens))) if 10**i < tokens]
    windows: list[dict[str, float]] = []
    kept: list[tuple[int, Any, Any]] = []
    before = 0
    with pathlib.Path(path).open("w") as lines:
        while reader.num_tokens < tokens:
            spent = []
            for _ in range(_WINDOW):
                start = time.perf_counter()
                next(reader)
                spent.append(1e6 * (time.perf_counter() - start) / _CHUNK)
            now = {"tokens": reader.num_tokens, "median_us": float(np.median(spent)), "min_us": min(spent)}
            windows.append({**now, "held": held("VmRSS")})
            lines.write(json.dumps(windows[-1]) + "\n")
            lines.flush()
            if reader.num_tokens >= (*wanted, tokens)[len(kept)]:
                kept.append((reader.num_tokens, reader.logits, jax.tree.map(jnp.copy, reader.state)))
            if len(windows) == 2:  # the first compiles, and the first mark's copies are made
                before = held("VmRSS")
                forget_peak()
    growth = held("VmHWM") - before
    return {"windows": windows, "marks": _in_turn(model, params, kept, rounds), "growth": growth}


def _in_turn(model: models.LanguageModel, params: Any, kept: list[tuple[int, Any, Any]], rounds: int) -> list[Any]:
    """Each mark's state reads the same chunk, one after the other, many times."""
    chunk = jnp.asarray([list(itertools.islice(_ids(1), _CHUNK))], jnp.int32)
    spent: dict[int, list[tuple[float, float]]] = {mark: [] for mark, _, _ in kept}
    for i in range(rounds):
        for mark, logits, state in kept[i % len(kept) :] + kept[: i % len(kept)]:
            start_from = jax.block_until_ready((jnp.copy(logits), jax.tree.map(jnp.copy, state)))
            wall, processor = time.perf_counter(), time.process_time()
            jax.block_until_ready(kvjax.score(model, params, chunk, *start_from))
            spent[mark].append((time.perf_counter() - wall, time.process_time() - processor))
    times = {mark: 1e6 * np.array(each) / _CHUNK for mark, each in spent.items()}
    marks = []
    for mark, each in times.items():
        ratio, of_processor = np.median(each / times[kept[0][0]], axis=0).tolist()
        here = {"median_us": float(np.median(each[:, 0])), "min_us": float(each[:, 0].min())}
        marks.append({"tokens": mark, **here, "ratio": ratio, "processor_ratio": of_processor})
    return marks


def table(rows: dict[str, Any]) -> str:
    """All methods as Markdown."""
    names = [f"{mark['tokens']:,} tokens" for mark in next(iter(rows.values()))["marks"]]
    heads = ["method", *(f"µs a token after {n}" for n in names), *(f"{n} / first" for n in names[1:])]
    heads += [*(f"{n} / first, processor time" for n in names[1:]), "peak beyond the first windows"]
    lines = []
    for name, row in rows.items():
        cells = [f"{mark['median_us']:.1f}" for mark in row["marks"]]
        cells += [f"{mark[key]:.3f}" for key in ("ratio", "processor_ratio") for mark in row["marks"][1:]]
        lines.append([name, *cells, shown(max(0, row["growth"]))])
    return "\n".join(Table(heads, lines).markdown()) + "\n"


def figure(rows: dict[str, Any]) -> Any:
    """Median time a token in every window, and what the process held."""
    made = Figure(figsize=(9, 3.4), layout="constrained")
    times, memory = made.subplots(1, 2)
    for name, row in rows.items():
        windows = row["windows"][1:]  # the first compiles
        at = [w["tokens"] for w in windows]
        times.plot(at, [w["median_us"] for w in windows], label=name, linewidth=1)
        memory.plot(at, [(w["held"] - windows[0]["held"]) / 2**20 for w in windows], label=name, linewidth=1)
    times.set(xlabel="tokens read", ylabel="µs a token, median of a window", xscale="log", ylim=(0, None))
    memory.set(xlabel="tokens read", ylabel="MiB held beyond the second window", xscale="log")
    times.legend(frameon=False, fontsize=8)
    return made


def bench(
    tokens: int = 1_000_000,
    rounds: int = 100,
    only: tuple[str, ...] = (),
    output: pathlib.Path = pathlib.Path("results/bench_stream"),
) -> None:
    """Measures the methods that are not there yet, and prints a table of all of them.

    Args:
      tokens: to read.
      rounds: of chunks that the states at the marks read in turn.
      only: names of methods; all six if there are none.
      output: a directory for `stream.json`, `stream.md`, `stream.png`, and windows as they come.
    """
    check_whole(20_480, tokens=tokens)
    check_whole(1, rounds=rounds)
    if unknown := [name for name in only if name not in METHODS]:
        raise ValueError(f"--only {unknown[0]!r} is not one of {', '.join(METHODS)}")
    setup = {"tokens": tokens, "budget": _BUDGET, "chunk": _CHUNK, "rounds": rounds, "device": device_info()}
    with Locked(output):
        path = output / "stream.json"
        rows = stored_rows(path, {"setup": setup})
        for name in only or METHODS:
            if name in rows:
                continue
            print(f"{name}, {tokens:,} tokens", file=sys.stderr)
            windows = str(output / f"{name}.jsonl")
            rows[name] = apart("kvjax.experiments.bench.stream", "measure", name, tokens, rounds, windows)
            rows = {k: rows[k] for k in METHODS if k in rows}
            write_json(path, {"setup": setup, "rows": rows})
            write_bytes(output / "stream.md", table(rows).encode())
            write_figure(output / "stream.png", figure(rows), dpi=150)
        print(table(rows))


if __name__ == "__main__":
    script(bench)
