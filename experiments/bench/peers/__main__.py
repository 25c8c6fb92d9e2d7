"""kvjax beside transformers and kvpress: prefill, decoding, first answers, memory and loading, each with its goal.

    python -m kvjax.experiments.bench.peers
    python -m kvjax.experiments.bench.peers --only prefill llama1b-bf16/decode
    python -m kvjax.experiments.bench.peers --model smollm2-135m-instruct --dtype bfloat16

Both load the same checkpoints, published ones and random ones (`checkpoints.py`), in processes of their own, on the
same cores, and are asked in turns: in every round each job runs once on either side. The peers have an environment of
their own, which is made where there is none. Needs Linux, which says how much memory a process holds.

Each row is stored as soon as it is measured, so that Ctrl-C, or a worker that ends, loses none, those with goals
first; a row that is measured again replaces itself alone, and `--missing` measures those that there are not.
"""

import contextlib
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from kvjax.configs.experiment import check_finite, check_whole
from kvjax.experiments import stopping
from kvjax.experiments.bench.peers.checkpoints import MODELS, Model, as_toy, checkpoint
from kvjax.experiments.bench.peers.environment import ROOT, check_interpreter, make_environment
from kvjax.experiments.bench.peers.measure import measure, outcome, together
from kvjax.experiments.bench.peers.report import draw, markdown, number, spread
from kvjax.experiments.bench.peers.report import short as short_table
from kvjax.experiments.bench.peers.rows import Row, bound, choose, make_rows, turns
from kvjax.experiments.bench.peers.workers import SIDES, JobError, Sides
from kvjax.experiments.bench.process import stored_rows
from kvjax.experiments.core.command import script, write_figure, write_json
from kvjax.experiments.core.locks import Locked
from kvjax.experiments.core.provenance import environment as surroundings
from kvjax.models.written import write_bytes


def show(output: pathlib.Path) -> None:
    """Writes the tables and the picture of what is stored."""
    if (output / "peers.json").exists():
        table = json.loads((output / "peers.json").read_bytes())
        write_bytes(output / "peers.md", markdown(table).encode())
        write_figure(output / "peers.png", draw(table))


def run(
    rows: Sequence[Row], sides: Sides, seconds: float, end: float, keep: Callable[[dict[str, dict[str, Any]]], None]
) -> dict[str, str]:
    """Measures rows of a model and keeps them; returns those that could not be, or came too late, with the reason."""
    lost: dict[str, str] = {}
    for some in together(rows):
        if time.monotonic() > end:
            lost |= {row.key: "its time was up; --missing goes on" for row in some}
            continue
        names = some[0].key if len(some) == 1 else f"{some[0].key} to {some[-1].name}"
        found, failed = measure(some, sides, seconds, lambda text, names=names: _show(f"{names}: {text}"))
        around = surroundings(sys.argv)
        made = {key: around[key] for key in ("created", "git_commit", "git_dirty", "code")}
        entries = {}
        for row in some:
            try:
                entries[row.key] = {**outcome(row, found, failed), "made": made}
            except JobError as e:
                lost[row.key] = str(e)
        keep(entries)
        _show("")
        for entry in entries.values():
            print(_line(entry), flush=True)
    return lost


def _show(text: str) -> None:
    """What is being done, in a line of a terminal that the next one replaces."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="", flush=True)


def _line(entry: dict[str, Any]) -> str:
    side, met = bound(entry["kind"]), "met" if entry["met"] else "missed"
    aim = "" if entry["goal"] is None else f"; {side} {number(entry['goal'])}: {met}"
    return f"{entry['model']}/{entry['name']:24s} {spread(entry['ratio'])}{aim}"


def bench(
    only: tuple[str, ...] = (),
    missing: bool = False,
    list: bool = False,
    short: bool = False,
    minutes: float = 40.0,
    seconds: float = 15.0,
    threads: int = 2,
    cores: tuple[int, ...] = (),
    toy: bool = False,
    model: str | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    checkpoints: pathlib.Path | None = None,
    peers_python: pathlib.Path | None = None,
    environment: pathlib.Path | None = None,
    output: pathlib.Path = ROOT / "results" / "peers",
) -> None:
    """Measures the table, or some of its rows.

    Args:
      only: these rows, by name, with or without the model's, by what stands before a slash, or with wildcards.
      missing: of them, those that the output has not.
      list: print the rows with their goals, and measure none.
      short: print the main ratios of what the output has as Markdown, and measure none.
      minutes: after which no further row is begun.
      seconds: of rounds for each row, or the rows that share jobs: from 3 to 9 rounds, 2 where one takes longer.
      threads: on both sides.
      cores: those to run on, the first ones that this process may use if none are named.
      toy: a few tokens, to see that everything runs; its numbers mean nothing.
      model: a checkpoint directory, a hub id or a name that `kvjax.models.load` knows, in place of the table's.
      dtype: of that model.
      checkpoints: a folder that keeps the random checkpoints, 9 GB; written and deleted again if None.
      peers_python: an interpreter that has torch, transformers and kvpress, in place of the environment.
      environment: where the peers' environment is, or is made; in the user's cache directory if None.
      output: a directory for the tables (peers.md), the picture (peers.png) and all numbers (peers.json).
    """
    chosen = MODELS if model is None else (Model(f"{model}-{dtype}", model, model, dtype),)
    if toy:
        chosen = tuple(map(as_toy, chosen))
    every = [row for each in chosen for row in make_rows(each)]
    rows = choose(every, only)
    if list:
        for row in every:
            aim = f" ({bound(row.ratio)} {number(row.goal)})" if row.goal is not None else ""
            print(f"{row.key:32s} {row.text}{aim}")
        return
    if short:
        print("\n".join(short_table(json.loads((output / "peers.json").read_bytes())).markdown()) + "\n")
        return
    check_whole(1, threads=threads)
    check_finite(0, minutes=minutes, seconds=seconds)
    usable = sorted(os.sched_getaffinity(0))
    if unknown := sorted(set(cores) - set(usable)):
        raise ValueError(f"--cores {unknown} are not among those that this process may use, {usable}")
    if threads > len(cores or usable):
        raise ValueError(f"threads={threads}, but there are {len(cores or usable)} cores; lower --threads")
    about: dict[str, Any] = {"toy": toy, "threads": threads}
    lost: dict[str, str] = {}
    end = time.monotonic() + 60 * minutes
    places = {row.key: i for i, row in enumerate(every)}
    path = output / "peers.json"

    def keep(entries: dict[str, dict[str, Any]]) -> None:
        placed = {key: {**entry, "place": places[key]} for key, entry in entries.items()}
        write_json(path, {**about, "rows": stored_rows(path, about) | placed})

    def finish() -> None:
        show(output)
        shutil.rmtree(folder, ignore_errors=True)

    note = lambda: f"{path} holds the rows that were measured, --missing measures the others"
    with Locked(output), tempfile.TemporaryDirectory() as folder, stopping.noted(note), stopping.ending(finish):
        there = stored_rows(path, about)
        rows = [row for row in rows if not (missing and row.key in there)]
        python = check_interpreter(peers_python) if peers_python else make_environment(environment)
        for some in turns(rows):
            each = next(model for model in chosen if model.name == some[0].model)
            stored = checkpoint(each, checkpoints or pathlib.Path(folder))
            programs = pathlib.Path(tempfile.mkdtemp(dir=folder))
            on = (cores or usable)[:threads]
            with contextlib.closing(Sides(stored, each.dtype, python, on, programs)) as sides:
                if "peer" not in about:
                    about |= {side: sides.about(side) for side in SIDES}
                    stored_rows(path, about)
                lost |= run(some, sides, seconds, end, keep)
        show(output)
    print(f"\n{output / 'peers.md'}")
    if lost:
        raise ValueError("not measured: " + "; ".join(f"{name} ({why})" for name, why in lost.items()))


if __name__ == "__main__":
    script(bench)
