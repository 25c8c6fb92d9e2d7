"""One page of results, for any number of runs, models and protocols.

    python experiments/report.py results/*
    python experiments/report.py results/snapkv results/h2o lm_eval_output --output results/report
    python experiments/report.py results/mine --with experiments/leaderboard

Reads runs of `experiments/run.py`, of lm-eval (`--output_path`, with `--log_samples` for rows and comparisons) and of
`experiments/reproduce.py`, and writes `report.html`, one file that needs no network, and `report.md`. Both link to the
runs by relative paths: keep them where they are beside each other.
"""

import importlib

if __name__ == "__main__":  # before imports that take seconds
    importlib.import_module(f"{__package__ or ''}.stopping".lstrip(".")).begin()

import argparse
import pathlib
import shlex
import sys
from collections.abc import Sequence

from kvjax.experiments.core.command import check_options, check_output, directory_path, plain_errors
from kvjax.experiments.core.locks import alone_in
from kvjax.experiments.page import markdown, render, sources
from kvjax.experiments.page.boards import with_boards
from kvjax.experiments.page.cells import cells
from kvjax.models.written import write_bytes

_PAGE, _TEXT = "report.html", "report.md"


def build(
    directories: Sequence[pathlib.Path],
    output: pathlib.Path,
    command: str,
    samples: int = 3,
    leaderboards: Sequence[pathlib.Path] = (),
) -> render.Board:
    """Writes the page of everything that directories hold.

    Args:
      directories: results, as `sources.read` takes them.
      output: where `report.html` and `report.md` go; made if absent.
      command: what the page says that it was made by.
      samples: rows of every number that are within the page, at most.
      leaderboards: directories of what `compare.py` wrote, whose numbers stand beside those of runs, without rows.

    Raises:
      ValueError: a directory that does not exist, none with a finished run, a leaderboard that no run can be compared
        with, or a file in the way that is no report.
    """
    marks = {output / _PAGE: render.MARK, output / _TEXT: markdown.MARK}
    for path, mark in marks.items():
        check_output(path)
        if path.exists() and mark.encode() not in path.read_bytes()[:1000]:
            raise ValueError(f"{path} is there and was not made by experiments/report.py; choose another --output")
    found = sources.read(directories, lambda d: d.resolve() == output.resolve())
    board = render.Board.of(found, with_boards(cells(found), found, leaderboards))
    with alone_in(output):
        write_bytes(output / _TEXT, markdown.markdown(board, output, command).encode())
        write_bytes(output / _PAGE, render.html(board, output, command, samples).encode())
    return board


def main(argv: Sequence[str]) -> None:
    """Reads, writes, and names what was left out."""
    parser = argparse.ArgumentParser(
        prog="experiments/report.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", type=directory_path, help="results directories")
    parser.add_argument(
        "--with", nargs="+", default=(), type=directory_path, metavar="DIR", dest="leaderboards",
        help="leaderboards of compare.py, such as experiments/leaderboard",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=directory_path, default=pathlib.Path("results/report"), metavar="DIR",
        help="directory for report.html and report.md; results/report by default",
    )  # fmt: skip
    parser.add_argument(
        "--samples", type=int, default=3, metavar="N", help="rows of every number within the page, at most (3)"
    )
    with plain_errors():
        check_options(argv)
        own = parser.parse_args(argv)
        if own.samples < 0:
            raise ValueError(f"--samples {own.samples} must be at least 0")
        board = build(
            own.runs, own.output, f"python experiments/report.py {shlex.join(argv)}", own.samples, own.leaderboards
        )
        for path, why in board.found.skipped:
            print(f"skipped {path}: {why}", file=sys.stderr)
        print(f"{len(board.cells)} numbers of {len(board.found.runs)} runs written to {own.output / _PAGE}")


if __name__ == "__main__":
    main(sys.argv[1:])
