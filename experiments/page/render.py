"""The page: everything it shows, put into its template."""

import dataclasses
import math
import os
import pathlib
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from kvjax.configs.experiment import label
from kvjax.experiments.evaluation import report
from kvjax.experiments.page import curves, heat, shown
from kvjax.experiments.page.cells import AVERAGE, Cell, is_full
from kvjax.experiments.page.lines import Found, Line, Run, Setting, ranges
from kvjax.plot.style import COLOURS

MARK = "kvjax experiments/report.py"
"""What a page says of who made it, and what shows that it may be replaced."""
_SAMPLE_BYTES = 600_000  # of samples that are within the page, about
_LONGEST = 200  # letters of an output


@dataclasses.dataclass(frozen=True)
class Board:
    """All numbers, and what they are looked up by.

    Attributes:
      found: what was read.
      cells: all numbers.
      settings, tasks, methods, budgets: their values in order; methods without the full cache, budgets of methods.
      anchors: the name of every number on the page.
    """

    found: Found
    cells: tuple[Cell, ...]
    settings: tuple[Setting, ...]
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    budgets: tuple[str, ...]
    anchors: dict[Cell, str]

    @classmethod
    def of(cls, found: Found, cells: Sequence[Cell]) -> "Board":
        """The board of all numbers."""
        distinct = lambda values: tuple(dict.fromkeys(values))
        tasks = distinct(c.task for c in cells)
        size = lambda c: (-(c.place or 0.0), -float(c.budget) if report.has_budget(c.budget) else 0.0)
        own = sorted((c for c in cells if not is_full(c.method)), key=size)
        labels = distinct(c.budget for c in own)
        return cls(
            found,
            tuple(cells),
            distinct(c.setting for c in cells),
            tuple(sorted(tasks, key=lambda t: t != AVERAGE)),
            distinct(c.method for c in cells if not is_full(c.method)),
            tuple(sorted(labels, key=lambda b: not report.has_budget(b))),
            {c: f"c{i}" for i, c in enumerate(cells)},
        )

    def lines(self) -> Iterator[tuple[Setting, str, str, dict[str, Cell]]]:
        """(setting, method, budget, numbers by task) of every policy: settings as found, in each the best first."""
        groups: dict[tuple[Setting, str, str], dict[str, Cell]] = {}
        for c in self.cells:
            groups.setdefault((c.setting, c.method, c.budget), {})[c.task] = c
        for setting in self.settings:
            own = [(key, of) for key, of in groups.items() if key[0] == setting]
            for (_, method, budget), of in sorted(own, key=lambda pair: _rank(pair[1])):
                yield setting, method, budget, of

    def blocks(self, setting: Setting) -> list[tuple[str, list[tuple[str, dict[str, Cell]]]]]:
        """(budget, (method, numbers by task)) of a setting as papers lay tables out; the full cache first."""
        lines = [(m, b, of) for s, m, b, of in self.lines() if s == setting]
        full = [(m, of) for m, _, of in lines if is_full(m)]
        blocks = [("", full)] if full else []
        for budget in self.budgets:
            if block := [(m, of) for m, b, of in lines if b == budget and not is_full(m)]:
                blocks.append((budget, block))
        return blocks

    def columns(self, setting: Setting) -> list[str]:
        """The tasks of a setting, the average last."""
        own = {c.task for c in self.cells if c.setting == setting}
        return [t for t in self.tasks if t in own and t != AVERAGE] + [t for t in (AVERAGE,) if t in own]


def options(board: Board) -> list[tuple[str, str]]:
    """(method, options) of the methods whose options are not all the defaults of `kvjax.methods`."""
    called = lambda c: str(c.lines[0].sample.get("method")) if c.lines else c.method  # by its run
    found = ((c.method, run.options.get(called(c))) for c in board.cells for run in c.runs)
    return list(dict.fromkeys((method, given) for method, given in found if given))


def _rank(of: dict[str, Cell]) -> tuple[bool, float, float]:
    """The full cache, then the largest budget, then the best number."""
    first = of.get(AVERAGE) or next(iter(of.values()))
    quality = first.value.mean if first.kind == "score" else -first.value.mean
    return not is_full(first.method), -(first.place or 0.0), -quality


def best(block: Sequence[tuple[str, dict[str, Cell]]], task: str) -> set[Cell]:
    """The best numbers of a column within a block, unless all are equal."""
    column = [of[task] for _, of in block if task in of]
    if len(column) < 2 or column[0].kind == "given":
        return set()
    sign = 1 if column[0].kind == "score" else -1
    most = max(sign * c.value.mean for c in column)
    found = {c for c in column if sign * c.value.mean == most}
    return found if len(found) < len(column) else set()


def html(board: Board, directory: pathlib.Path, command: str, samples: int) -> str:
    """The page.

    Args:
      board: what it shows.
      directory: where it will be, which its links start from.
      command: what made it.
      samples: rows of every number that are within the page, at most; the others are linked.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in (
        "method",
        "value",
        "interval",
        "difference",
        "probability",
        "share",
        "budget",
        "task",
        "protocol",
        "rows",
    ):
        environment.filters[name] = getattr(shown, name)
    environment.filters |= {"rows": shown.rows, "shade": heat.shade}
    template = environment.get_template("page.html.jinja")
    return template.render(**_view(board, directory, command, samples))


def _view(board: Board, directory: pathlib.Path, command: str, samples: int) -> dict[str, Any]:
    """Everything that the template names."""
    number = {
        name: {x: i for i, x in enumerate(getattr(board, name))} for name in ("settings", "tasks", "methods", "budgets")
    }
    details = shown.details(board.settings)
    place = lambda path: link(path, directory)
    fitting = max(0, min(samples, _SAMPLE_BYTES // (300 * max(len(board.cells), 1))))
    by_task = {
        (s, t): [c for c in board.cells if (c.setting, c.task) == (s, t)] for s in board.settings for t in board.tasks
    }
    drawn = [(s, t, curves.curve(own, board.anchors, board.methods)) for (s, t), own in by_task.items() if own]
    policies: dict[tuple[Setting, str, str], list[Cell]] = {}
    for setting, method, budget, of in board.lines():
        policies[setting, method, budget] = [of[task] for task in board.tasks if task in of]
    inside = lambda name: Markup((pathlib.Path(__file__).parent / name).read_text(encoding="utf-8"))
    return {
        "mark": MARK,
        "style": inside("page.css") + Markup("\n") + _colours(),
        "script": inside("page.js"),
        "command": command,
        "board": board,
        "cells": board.cells,
        "s": number["settings"],
        "t": number["tasks"],
        "m": number["methods"],
        "b": number["budgets"],
        "anchors": board.anchors,
        "details": dict(zip(board.settings, details, strict=True)),
        "settings": [
            {"model": s.model, "protocol": s.protocol, "details": d}
            for s, d in zip(board.settings, details, strict=True)
        ],
        "parts": [
            name
            for name, values in (
                ("model", {s.model for s in board.settings}),
                ("protocol", {s.protocol for s in board.settings}),
                ("setting", {*details}),
            )
            if len(values) > 1
        ],
        "is_full": is_full,
        "average": AVERAGE,
        "lines": [*board.lines()],
        "options": options(board),
        "best": best,
        "curves": [(s, t, plot) for s, t, plot in drawn if plot is not None],
        "markers": curves.markers(),
        "keys": [curves.key(curves.style(i)) for i in range(len(board.methods))],
        "maps": _maps(board),
        "compared": [(c, c.against) for c in board.cells if c.against is not None],
        "verdicts": shown.VERDICTS,
        "samples": {c: [_sample(line) for line in c.lines[:fitting]] for c in board.cells if c.task != AVERAGE},
        "numbers": {c: _numbers(c) for c in board.cells},
        "policies": [*policies.items()],
        "files": {of[0]: list(dict.fromkeys(run for c in of for run in c.runs)) for of in policies.values()},
        "place": place,
        "runs": board.found.runs,
        "reproductions": [(d, content, _reproduction(content)) for d, content in board.found.reproductions],
        "skipped": board.found.skipped,
    }


def _maps(board: Board) -> list[tuple[tuple[Setting, str], list[heat.HeatMap]]]:
    """Heat maps by setting and task, in each the largest budget first."""
    groups: dict[tuple[Setting, str], list[heat.HeatMap]] = {}
    for each in heat.heat_maps(board.cells):
        groups.setdefault((each.cell.setting, each.cell.task), []).append(each)
    return [(key, sorted(group, key=lambda h: _rank({"": h.cell}))) for key, group in groups.items()]


def link(path: pathlib.Path, directory: pathlib.Path) -> str:
    """A relative address of a path for a page in a directory."""
    relative = os.path.relpath(path.resolve(), directory.resolve())
    return urllib.parse.quote(pathlib.PurePath(relative).as_posix())


def _colours() -> Markup:
    """The palette, and the shades of heat maps."""
    palette = "".join(f".p{i}{{color:{c}}}" for i, c in enumerate(COLOURS))
    shades = "".join(f".h{i}{{background:{b};color:{f}}}" for i, (b, f) in enumerate(heat.shades()))
    return Markup(palette + "\n" + shades)


def _numbers(cell: Cell) -> list[tuple[Run, str]]:
    """Which lines of each run's file a number is made from."""
    of: dict[Run, list[int]] = {run: [] for run in cell.runs}
    for line in cell.lines:
        of[line.run].append(line.number)
    return [(run, ranges(numbers)) for run, numbers in of.items()]


def _reproduction(content: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a paper's table, ours and theirs, as methods by columns."""
    numbers = [
        n for n in content["numbers"] if isinstance(n, dict) and {"method", "budget", "column", "ours"} <= set(n)
    ]
    titles = list(dict.fromkeys(n["column"] for n in numbers))
    by_key = {(n["method"], n["budget"], n["column"]): n for n in numbers}
    lines = [
        {
            "method": m,
            "budget": "" if b is None else shown.budget(label(b)),
            "shown": [_of_paper(by_key.get((m, b, t))) for t in titles],
        }
        for m, b in dict.fromkeys((n["method"], n["budget"]) for n in numbers)
    ]
    return {"titles": titles, "lines": lines}


def _of_paper(number: dict[str, Any] | None) -> dict[str, str] | None:
    if number is None:
        return None
    text = lambda x: f"{x:.4g}" if isinstance(x, int | float) and math.isfinite(x) else ""
    low, high = text(number.get("low")), text(number.get("high"))
    interval = f"[{low}, {high}]" if low and high and low != high else ""
    return {
        "ours": text(number["ours"]) or "-",
        "interval": interval,
        "theirs": text(number.get("theirs")),
        "rows": str(number.get("rows", "?")),
    }


def _sample(line: Line) -> dict[str, Any]:
    """A row as it is shown: where it is, its value, and every answer beside its references."""
    s = line.sample
    if "answers" in s:
        answers = [(a.get("output"), a.get("references")) for a in s["answers"] if isinstance(a, dict)]
    else:
        answers = [(s.get("filtered_resps"), s.get("target"))] if "target" in s else []
    known = [k for k in ("id", "doc_id", "depth", "length", "prompt_tokens") if k in s]
    return {
        "number": line.number,
        "value": f"{100 * line.value:.0f} %" if line.kind == "score" else f"{line.value:.3f} nats",
        "meta": ", ".join(
            f"{k.replace('_', ' ')} {s[k]:.4g}" if isinstance(s[k], float) else f"{k.replace('_', ' ')} {s[k]}"
            for k in known
        ),
        "answers": [(_text(output), _text(wanted)) for output, wanted in answers if output is not None],
    }


def _text(value: Any) -> str:
    """Text of an answer or its references in one line, cut where it is long."""
    texts = value if isinstance(value, list | tuple) else [value]
    flat = [str(t) if not isinstance(t, list | tuple) else " | ".join(map(str, t)) for t in texts]
    text = " ".join(" | ".join(flat).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
