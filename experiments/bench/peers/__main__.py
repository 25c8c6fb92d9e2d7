"""kvjax beside transformers and kvpress: prefill, decoding, memory, streams and a first run, each with its goal.

    python -m kvjax.experiments.bench.peers
    python -m kvjax.experiments.bench.peers --only prefill/8k decode --threads 1
    python -m kvjax.experiments.bench.peers --model smollm2-135m-instruct --dtype bfloat16 --quick

Both run the same checkpoint, a random one unless a model is named, in processes of their own, on the same cores, and
are asked in turns: in every round each job runs once on either side; then each side runs alone while the other is
stopped. The peers have an environment of their own, which is made where there is none. Needs Linux, which says how much
memory a process holds.

Each row is stored as soon as it is measured, so that Ctrl-C, or a worker that ends, loses none; a row that is measured
again replaces itself alone.
"""

import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, Literal

import jax
import tyro

from kvjax import models
from kvjax.configs.experiment import check_whole
from kvjax.experiments.bench.peers.environment import ROOT, check_interpreter, make_environment
from kvjax.experiments.bench.peers.measure import measure, outcome, together
from kvjax.experiments.bench.peers.report import draw, markdown, number
from kvjax.experiments.bench.peers.rows import FULL, GOALS, QUICK, TOY, Row, Sizes, choose, make_rows
from kvjax.experiments.bench.peers.workers import SIDES, JobError, Sides
from kvjax.experiments.bench.process import stored_rows
from kvjax.experiments.bench.speed import RANDOM
from kvjax.experiments.core.command import plain_errors, write_figure, write_json
from kvjax.experiments.core.locks import Locked
from kvjax.experiments.core.provenance import environment as surroundings
from kvjax.models.sources import locate
from kvjax.models.weights import read_config
from kvjax.models.written import write_bytes

_FIELDS = ("vocab_size", "embed_dim", "mlp_dim", "num_layers", "num_query_heads", "num_kv_heads", "head_dim")


def write_checkpoint(path: pathlib.Path) -> None:
    """Writes the random Llama that both sides load."""
    model = models.LanguageModel(dataclasses.replace(RANDOM, max_position=1 << 17))
    models.save(path, model, jax.jit(model.init)(jax.random.key(0)), dtype="float32")


def store(output: pathlib.Path, about: dict[str, Any], entries: Sequence[dict[str, Any]]) -> None:
    """Writes measured rows, in place of those of the same name and number of threads, with their table and picture."""
    path = output / "peers.json"
    rows = stored_rows(path, about) | {f"{entry['name']} {entry['threads']}": entry for entry in entries}
    table = {**about, "rows": rows}
    write_json(path, table)
    write_bytes(output / "peers.md", markdown(table).encode())
    write_figure(output / "peers.png", draw(table))


def run(
    rows: Sequence[Row], output: pathlib.Path, about: dict[str, Any], sides: Sides, sizes: Sizes, threads: int
) -> dict[str, str]:
    """Measures rows with one number of threads and stores them; returns those that could not be, with the reason."""
    places = {row.name: i for i, row in enumerate(make_rows(sizes))}
    lost: dict[str, str] = {}
    for some in together(rows):
        names = some[0].name if len(some) == 1 else f"{some[0].name} to {some[-1].name}"
        say = lambda text, names=names: _show(f"{names}, {threads} threads: {text}")
        found, failed = measure(some, sides, some[0].rounds or sizes.rounds, sizes.rounds_alone, say)
        around = surroundings(sys.argv)
        made = {key: around[key] for key in ("created", "command", "git_commit", "git_dirty", "code")}
        entries = []
        for row in some:
            try:
                entry = outcome(row, found, failed)
            except JobError as e:
                lost[f"{row.name}, {threads} threads"] = str(e)
            else:
                entries.append({"threads": threads, "place": places[row.name], **entry, "made": made})
        if entries:
            store(output, about, entries)
        _show("")
        for entry in entries:
            print(_line(entry), flush=True)
    return lost


def _show(text: str) -> None:
    """What is being done, in a line of a terminal that the next one replaces."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="", flush=True)


def _line(entry: dict[str, Any]) -> str:
    ratio, goal = entry["ratio"], entry["goal"]
    alone = "" if ratio["alone"] is None else f", alone {number(ratio['alone'])}"
    spread = f"[{number(ratio['q1'])}, {number(ratio['q3'])}]"
    aim = "" if goal is None else f"; {goal['bound']} {number(goal['ratio'])}: {'met' if entry['met'] else 'missed'}"
    return f"{entry['name']:28s} {entry['threads']} {number(ratio['median'])} {spread}{alone}{aim}"


def bench(
    only: tuple[str, ...] = (),
    list: bool = False,
    threads: tuple[int, ...] = (1, 2),
    cores: tuple[int, ...] = (),
    quick: bool = False,
    toy: bool = False,
    model: str | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    peers_python: pathlib.Path | None = None,
    environment: pathlib.Path | None = None,
    output: pathlib.Path = ROOT / "results" / "peers",
) -> None:
    """Measures the table, or some of its rows.

    Args:
      only: these rows, by name, by what stands before the slash, or with wildcards.
      list: print the rows with their goals, and measure none.
      threads: numbers of threads, one after the other.
      cores: those to run on, the first ones that this process may use if none are named.
      quick: shorter prompts and fewer rounds, for a rough table.
      toy: a few tokens, to see that everything runs; its numbers mean nothing.
      model: a checkpoint directory, a hub id or a name that `kvjax.models.load` knows, in place of random parameters.
      dtype: of parameters, activations and caches on both sides.
      peers_python: an interpreter that has torch, transformers and kvpress, in place of the environment.
      environment: where the peers' environment is, or is made; in the user's cache directory if None.
      output: a directory for the table (peers.md), the picture (peers.png) and all numbers (peers.json).
    """
    if quick and toy:
        raise ValueError("--quick and --toy are two sizes; give one")
    sizes = TOY if toy else QUICK if quick else FULL
    rows = choose(make_rows(sizes), only)
    if list:
        for row in make_rows(sizes):
            aim = f" ({row.bound} {number(GOALS[row.name])})" if row.name in GOALS else ""
            print(f"{row.name:28s} {row.text}{aim}{'; only by name' if row.asked else ''}")
        return
    check_whole(1, threads=threads)
    usable = sorted(os.sched_getaffinity(0))
    chosen = cores or tuple(usable)
    if unknown := sorted(set(chosen) - set(usable)):
        raise ValueError(f"--cores {unknown} are not among those that this process may use, {usable}")
    if max(threads) > len(chosen):
        raise ValueError(f"threads={max(threads)}, but there are {len(chosen)} cores; lower --threads")
    lost: dict[str, str] = {}
    source = None if model is None else locate(model)
    config = RANDOM if source is None else read_config(source)
    measured = {name: getattr(config, name) for name in _FIELDS}
    measured |= {} if model is None else {"name": model}
    measured |= {} if dtype == "float32" else {"dtype": dtype}
    about = {"model": measured, "sizes": json.loads(json.dumps(vars(sizes)))}
    with Locked(output), tempfile.TemporaryDirectory() as folder:
        stored_rows(output / "peers.json", about)
        python = check_interpreter(peers_python) if peers_python else make_environment(environment)
        checkpoint = source or pathlib.Path(folder) / "model"
        if source is None:
            write_checkpoint(checkpoint)
        try:
            for count in threads:
                programs = pathlib.Path(folder) / f"programs-{count}"
                programs.mkdir(exist_ok=True)
                with Sides(checkpoint, dtype, python, chosen[:count], programs) as sides:
                    about |= {side: sides.about(side) for side in SIDES}
                    stored_rows(output / "peers.json", about)
                    lost |= run([row for row in rows if count in row.threads], output, about, sides, sizes, count)
        except KeyboardInterrupt as e:
            raise KeyboardInterrupt(
                f"interrupted; {output / 'peers.json'} holds the rows that were measured, and --only measures others"
            ) from e
    print(f"\n{output / 'peers.md'}")
    if lost:
        raise ValueError("not measured: " + "; ".join(f"{name} ({why})" for name, why in lost.items()))


if __name__ == "__main__":
    with plain_errors():
        tyro.cli(bench)
