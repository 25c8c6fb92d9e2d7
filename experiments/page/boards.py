"""Numbers of leaderboards beside those of runs, without rows."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.analysis import Interval
from kvjax.experiments.evaluation import boards
from kvjax.experiments.evaluation.boards import Board, Row
from kvjax.experiments.page.cells import AVERAGE, Cell, in_order, is_full
from kvjax.experiments.page.lines import Found, Run, Setting
from kvjax.experiments.tasks import RETRIEVAL


def with_boards(made: Sequence[Cell], found: Found, directories: Sequence[pathlib.Path]) -> list[Cell]:
    """All numbers, those of leaderboards in the setting of the first run that was asked the same.

    Args:
      made: the numbers of runs.
      found: where they are from; the leaderboards join its runs.
      directories: of leaderboards that `experiments/compare.py` wrote.

    Raises:
      ValueError: no leaderboard there, a broken one, or one with whose setup, checkpoint and tasks no run was made.
    """
    cells, runs = list(made), list(found.runs)
    for board in boards.read(directories):
        setting = _setting(board, cells, runs)
        here = [c for c in cells if c.setting == setting]
        averaged = next((c.parts for c in here if c.task == AVERAGE), ())
        code = ", ".join(dict.fromkeys(r["code"] for r in board.rows))
        rows = board.beside([_row(c) for c in here if c.task != AVERAGE])
        options = {r["method"]: str(r["options"]) for r in rows if "options" in r}
        run = Run(board.name, board.path, None, (("code", code),), options=options)
        found.runs.append(run)
        for row in rows:
            if row["task"] != "retrieval_mean":
                cells.append(_cell(row, setting, run))
            elif {*averaged} == {*RETRIEVAL}:
                cells.append(_cell({**row, "task": AVERAGE}, setting, run, averaged))
    return in_order(cells)


def _setting(board: Board, cells: Sequence[Cell], runs: Sequence[Run]) -> Setting:
    """The setting of the first run that was asked what a leaderboard's were.

    Raises:
      ValueError: there is none; the reason of the first run stands for all.
    """
    reasons = []
    for run in (run for run in runs if run.setup):
        of = [c for c in cells if run in c.runs]
        try:
            board.check(run.name, run.setup, [_row(c) for c in of if c.task != AVERAGE])
            return of[0].setting
        except ValueError as e:
            reasons.append(str(e))
    raise ValueError(reasons[0] if reasons else f"{board.path} has no run of experiments/run.py to stand beside")


def _row(cell: Cell) -> Row:
    """A number of a run as a leaderboard's row."""
    value = "perplexity" if cell.kind == "nll" else "score"
    live = float(np.mean([line.sample["live"] for line in cell.lines])) if _measured(cell) else float("nan")
    row: dict[str, Any] = {"method": cell.method, "budget": cell.budget, "task": cell.task}
    return {**row, value: cell.value.mean, "live_tokens": live}


def _measured(cell: Cell) -> bool:
    return bool(cell.lines) and all("live" in line.sample for line in cell.lines)


def _cell(row: Mapping[str, Any], setting: Setting, run: Run, parts: tuple[str, ...] = ()) -> Cell:
    kind = "nll" if "perplexity" in row else "score"
    value = Interval(*(float(row[k]) for k in ("perplexity" if kind == "nll" else "score", "low", "high")))
    policy = f"{row['method']} at {row['budget']} of the leaderboard {run.name}, which does not store its parameters"
    return Cell(
        setting, row["task"], row["method"], row["budget"], kind, value, (), (run,), policy, live=row["live_of_prompt"],
        kv=row["kv_bytes_of_full"], place=1.0 if is_full(row["method"]) else row["kv_budget"], parts=parts,
    )  # fmt: skip
