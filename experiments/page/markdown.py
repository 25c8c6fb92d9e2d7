"""The same results as markdown: tables that need no browser."""

import pathlib

from kvjax.experiments.evaluation.report import escaped, options_line, table
from kvjax.experiments.page import shown
from kvjax.experiments.page.cells import Cell, is_full
from kvjax.experiments.page.lines import Setting
from kvjax.experiments.page.render import Board, best, link, options

MARK = "<!-- made by kvjax experiments/report.py -->"


def markdown(board: Board, directory: pathlib.Path, command: str) -> str:
    """Tables of every setting, the comparisons with the full cache, and the runs.

    Args:
      board: what they show.
      directory: where they will be, which their links start from.
      command: what made them.
    """
    details = dict(zip(board.settings, shown.details(board.settings), strict=True))
    lines = [
        MARK,
        "",
        "# Results of KV-cache eviction",
        "",
        "Scores in percent, perplexity as itself, with 95 % intervals. The best of a budget is bold, whatever its "
        "interval. report.html has the rows of every number.",
        "",
        *options_line(options(board)),
    ]
    for setting in board.settings:
        name = ", ".join(filter(None, [setting.model, shown.protocol(setting.protocol), details[setting]]))
        lines += [f"## {escaped(name)}", "", *_blocks(board, setting), "", *_averaged(board, setting)]
        lines += _compared(board, setting)
    if board.found.reproductions:
        lines += ["## Papers' tables", ""]
        for d, content in board.found.reproductions:
            said = escaped(f"{content['entry']}, {content.get('status')}")
            lines.append(f"- {said}: [report]({link(d / 'report.md', directory)})")
        lines.append("")
    lines += ["## Runs", ""]
    for run in board.found.runs:
        files = [f"[{escaped(f.name)}]({link(f, directory)})" for f in (run.manifest, run.lines) if f is not None]
        lines.append(f"- {escaped(run.name)}: {', '.join(files)}")
    if board.found.skipped:
        lines += [
            "",
            "Not among these:",
            "",
            *(f"- {escaped(str(path))}: {escaped(why)}" for path, why in board.found.skipped),
        ]
    return "\n".join([*lines, "", f"Made by `{command}`.", ""])


def _blocks(board: Board, setting: Setting) -> list[str]:
    """The table of a setting, methods as rows."""
    columns = board.columns(setting)
    rows = []
    for budget, block in board.blocks(setting):
        bold = {c for task in columns for c in best(block, task)}
        for method, of in block:
            cells = [_cell(of.get(task), bold) for task in columns]
            any_of = next(iter(of.values()))
            rows.append(
                [
                    escaped(method),
                    shown.budget(budget) if budget else "",
                    *cells,
                    shown.share(any_of.live),
                    shown.share(any_of.kv),
                ]
            )
    return table(["method", "budget", *(escaped(shown.task(t)) for t in columns), "live tokens", "KV of full"], rows)


def _averaged(board: Board, setting: Setting) -> list[str]:
    """What averages are over, and by which metrics."""
    found = next((c for c in board.cells if c.setting == setting and c.parts), None)
    if found is None:
        return []
    over = escaped(", ".join(map(shown.task, found.parts)))
    by = (
        f", which are scored by different metrics: {escaped(', '.join(found.metrics))}"
        if len(found.metrics) > 1
        else ""
    )
    return [f"The average is over {over}{by}.", ""]


def _cell(cell: Cell | None, bold: set[Cell]) -> str:
    if cell is None:
        return ""
    value = f"**{shown.value(cell)}**" if cell in bold else shown.value(cell)
    return f"{value} {shown.interval(cell)}".rstrip()


def _compared(board: Board, setting: Setting) -> list[str]:
    """Every method beside the full cache on the same rows."""
    rows = [
        [
            escaped(c.method),
            shown.budget(c.budget),
            escaped(shown.task(c.task)),
            shown.difference(c),
            shown.probability(c.against),
            c.against.verdict,
            str(c.against.n),
        ]
        for c in board.cells
        if c.setting == setting and c.against is not None and not is_full(c.method)
    ]
    if not rows:
        return []
    return [
        "Against the full cache on the same rows: points of the score, or the ratio of perplexities. p-values are "
        "adjusted for all methods and budgets on a benchmark (Holm); intervals are of each comparison alone.",
        "",
        *table(["method", "budget", "benchmark", "difference", "p", "verdict", "rows"], rows),
        "",
    ]
