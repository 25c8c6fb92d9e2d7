"""kvjax beside transformers and kvpress: prefill, decoding, memory, streams and a first run, each with its goal.

    python -m kvjax.experiments.bench.peers
    python -m kvjax.experiments.bench.peers --only prefill/8k decode --threads 1

Both run the same random checkpoint in processes of their own, on the same cores, and are asked in turns: in every round
each job runs once on either side; then each side runs alone while the other is stopped. The peers have an environment
of their own, which is made where there is none. Needs Linux, which says how much memory a process holds.

Each row is stored as soon as it is measured, so that Ctrl-C, or a worker that ends, loses none; a row that is measured
again replaces itself alone.
"""

import contextlib
import datetime
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import tyro

from kvjax import models
from kvjax.configs.experiment import check_whole
from kvjax.experiments.bench.peer_environment import ROOT, check_interpreter, default_directory, make_environment
from kvjax.experiments.bench.peer_measure import measure, outcome, together
from kvjax.experiments.bench.peer_report import draw, markdown, number
from kvjax.experiments.bench.peer_rows import FULL, QUICK, TOY, Row, Sizes, choose, make_rows
from kvjax.experiments.bench.peer_workers import SIDES, JobError, Sides
from kvjax.experiments.core.command import check_options, check_values, plain_errors, write_figure, write_json
from kvjax.experiments.core.locks import Locked
from kvjax.experiments.core.provenance import environment as surroundings
from kvjax.models.written import write_bytes

MODEL = {
    "vocab_size": 512,
    "embed_dim": 256,
    "mlp_dim": 1024,
    "num_layers": 4,
    "num_query_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 32,
}
_FILE = "peers.json"


def write_checkpoint(path: pathlib.Path) -> None:
    """Writes the random Llama that both sides load."""
    model = models.LanguageModel(models.ModelConfig(**MODEL, max_position=1 << 17))
    models.save(path, model, jax.jit(model.init)(jax.random.key(0)), dtype="float32")


class Table:
    """The file of measured rows, which one process at a time may write.

    Args:
      directory: where it is; `peers.md` and `peers.png` are written beside it.
      sizes: how much is measured.

    Raises:
      ValueError: a file that holds something else, or rows of other sizes; another process writes there.
    """

    def __init__(self, directory: pathlib.Path, sizes: Sizes):
        self._directory, self._path = directory, directory / _FILE
        self._lock = Locked(directory)
        self._new = {"model": MODEL, "sizes": json.loads(json.dumps(vars(sizes)))}
        self._table: dict[str, Any] = {}
        if self._path.exists():
            try:
                self._table = json.loads(self._path.read_bytes())
                old = {name: self._table[name] for name in (*self._new, *SIDES, "rows")}
            except (ValueError, TypeError, KeyError) as e:
                self.close()
                raise ValueError(f"{self._path} is no table of this script; choose another --output") from e
            self._refuse({name: old[name] for name in self._new}, self._new)

    def close(self) -> None:
        """Lets other processes write there."""
        self._lock.close()

    def about(self, sides: dict[str, Any]) -> None:
        """Notes what the sides say of themselves: versions and the device.

        Raises:
          ValueError: rows that are there were made with others.
        """
        if self._table:
            self._refuse({name: self._table[name] for name in SIDES}, sides)
        self._table = {"rows": {}} | self._table | self._new | sides

    def _refuse(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        for name, value in new.items():
            if old[name] != value:
                self.close()
                raise ValueError(
                    f"{self._path} holds rows with another {name}: {old[name]} there, {value} now; choose another "
                    "--output"
                )

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Writes measured rows, in place of those of the same name and number of threads."""
        if not rows:
            return
        self._table["rows"] |= {f"{row['name']} {row['threads']}": row for row in rows}
        write_json(self._path, self._table)
        write_bytes(self._directory / "peers.md", markdown(self._table).encode())
        write_figure(self._directory / "peers.png", draw(self._table))


def run(rows: Sequence[Row], table: Table, sides: Sides, sizes: Sizes, threads: int) -> dict[str, str]:
    """Measures rows with one number of threads and stores them; returns those that could not be, with the reason."""
    places = {row.name: i for i, row in enumerate(make_rows(sizes))}
    around = surroundings(sys.argv)
    made = {key: around[key] for key in ("command", "git_commit", "git_dirty", "code")}
    lost: dict[str, str] = {}
    for some in together(rows):
        names = some[0].name if len(some) == 1 else f"{some[0].name} to {some[-1].name}"
        say = lambda text, names=names: _show(f"{names}, {threads} threads: {text}")
        found, failed = measure(some, sides, some[0].rounds or sizes.rounds, sizes.rounds_alone, say)
        now = {"created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **made}
        entries = []
        for row in some:
            try:
                entry = {"threads": threads, "place": places[row.name], **outcome(row, found, failed), "made": now}
            except JobError as e:
                lost[f"{row.name}, {threads} threads"] = str(e)
            else:
                entries.append(entry)
        table.add(entries)
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
            aim = "" if row.goal is None else f" ({row.goal.bound} {number(row.goal.ratio)})"
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
    with contextlib.ExitStack() as stack:
        table = stack.enter_context(contextlib.closing(Table(output, sizes)))
        directory = environment or default_directory()
        python = check_interpreter(peers_python) if peers_python else make_environment(directory)
        checkpoint = stack.enter_context(_checkpoint())
        stack.enter_context(_told(output))
        for count in threads:
            programs = checkpoint.parent / f"programs-{count}"
            programs.mkdir(exist_ok=True)
            at = [row for row in rows if count in row.threads]
            with Sides(checkpoint, python, chosen[:count], programs) as sides:
                table.about({side: sides.about(side) for side in SIDES})
                lost |= run(at, table, sides, sizes, count)
    print(f"\n{output / 'peers.md'}")
    if lost:
        raise ValueError("not measured: " + "; ".join(f"{name} ({why})" for name, why in lost.items()))


@contextlib.contextmanager
def _checkpoint() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(pathlib.Path(folder) / "model")
        yield pathlib.Path(folder) / "model"


@contextlib.contextmanager
def _told(output: pathlib.Path) -> Iterator[None]:
    """Says after Ctrl-C what is stored."""
    try:
        yield
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(
            f"interrupted; {output / _FILE} holds the rows that were measured, and --only measures others"
        ) from e


if __name__ == "__main__":
    with plain_errors():
        check_options(sys.argv[1:])
        check_values(sys.argv[1:])
        tyro.cli(bench)
