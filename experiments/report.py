"""One page of results, for any number of runs, models and protocols.

    python experiments/report.py results/*
    python experiments/report.py results/snapkv results/h2o lm_eval_output --output results/report
    python experiments/report.py --readme

Reads runs of `experiments/run.py`, of lm-eval (`--output_path`, with `--log_samples` for rows and comparisons) and of
`experiments/reproduce.py`, and writes `report.html`, one file that needs no network, `report.md`, and `cells.csv`, a
row a number. Of runs that all have one setup it writes the pictures too. Pages link to the runs by relative paths: keep
them where they are beside each other.
"""

import dataclasses
import pathlib
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from kvjax.configs.experiment import check_whole
from kvjax.experiments.core.command import as_command, check_output, typed, write_figure
from kvjax.experiments.core.locks import alone_in
from kvjax.models.written import write_bytes

_PAGE, _TEXT, _NUMBERS = "report.html", "report.md", "cells.csv"


@dataclasses.dataclass(frozen=True)
class Page:
    """What to show.

    Attributes:
      runs: results directories.
      output: directory for report.html, report.md and cells.csv.
      samples: lines of every number within the page, at most.
      readme: writes the numbers of the project's own READMEs from its committed results instead.
    """

    runs: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional]
    output: pathlib.Path = pathlib.Path("results/report")
    samples: int = 3
    readme: bool = False

    def __post_init__(self):
        check_whole(0, samples=self.samples)


def write(directories: Sequence[pathlib.Path], output: pathlib.Path, command: str, samples: int = 3) -> Any:
    """Writes the page of everything that directories hold, and says what was left out.

    Args:
      directories: results, as `sources.read` takes them.
      output: where the files go; made if absent.
      command: what the page says that it was made by.
      samples: lines of every number that are within the page, at most.

    Returns:
      The numbers, a row each of pandas' DataFrame, as `table.numbers` makes them.

    Raises:
      ValueError: a directory that does not exist, none with a finished run, or a file in the way that is no report.
    """
    from kvjax.experiments.core import pictures, report_markdown, sources, table, views

    for path in (output / _PAGE, output / _TEXT):
        check_output(path)
        if path.exists() and views.MARK.encode() not in path.read_bytes()[:1000]:
            raise ValueError(f"{path} is there and was not made by experiments/report.py; choose another --output")
    found = sources.read(directories, output)
    numbers = table.with_given(table.numbers(found.lines), found.numbers)
    shown = views.views(numbers, found)
    figures = [pictures.drawn(view, found) for view in shown]
    named = pictures.files(figures[0]) if len(figures) == 1 else {}
    embedded = [{k: [(t, pictures.embedded(f)) for t, f in each] for k, each in of.items()} for of in figures]
    html = views.html(shown, embedded, found, output, command, samples)
    with alone_in(output):
        for path, why in found.skipped:
            print(f"skipped {path}: {why}", file=sys.stderr)
        for name in pictures.PICTURES:
            if name in named:
                write_figure(output / f"{name}.png", named[name], dpi=150 if len(named[name].axes) == 1 else 100)
            else:
                (output / f"{name}.png").unlink(missing_ok=True)
        write_bytes(output / _TEXT, report_markdown.text(shown, found, output, command).encode())
        write_bytes(output / _NUMBERS, numbers.assign(runs=numbers["runs"].map(", ".join)).to_csv(index=False).encode())
        write_bytes(output / _PAGE, html.encode())
    return numbers


@as_command
def main(argv: Sequence[str]) -> None:
    """Reads, writes, and names what was left out."""
    shown = tyro.cli(Page, args=argv, prog=typed("report"), description=__doc__)
    if shown.readme:
        from kvjax.experiments.core import readme

        for path, text in readme.changed().items():
            write_bytes(path, text.encode())
            print(f"numbers written to {path}")
        return
    numbers = write(shown.runs, shown.output, f"python experiments/report.py {shlex.join(argv)}", shown.samples)
    print(f"{len(numbers)} numbers written to {shown.output / _PAGE}")


if __name__ == "__main__":
    main()
