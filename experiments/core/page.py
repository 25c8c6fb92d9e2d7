"""A page: text, tables and pictures, which are written as Markdown, CSV and for the screen from one model."""

import csv
import dataclasses
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def cell(
    value: float | None, low: float | None = None, high: float | None = None, form: str = ".1f", ends: str | None = None
) -> str:
    """A number and its interval, such as "62.5 [45.3, 77.1]".

    Args:
      value: nothing is shown of None and NaN.
      low, high: the ends of the interval; the value alone is shown where one of them is None or not finite.
      form: how each of the three is formatted, such as "+.1f".
      ends: how the ends are, if not as the value.
    """
    if value is None or math.isnan(value):
        return ""
    known = [f"{end:{ends or form}}" for end in (low, high) if end is not None and math.isfinite(end)]
    return f"{value:{form}}" + (f" [{', '.join(known)}]" if len(known) == 2 else "")


def percent(value: float | None, low: float | None = None, high: float | None = None, form: str = ".1f") -> str:
    """As `cell`, of shares: 0.5 is shown as "50.0"."""
    scaled = (x if x is None else 100 * x for x in (value, low, high))
    return cell(*scaled, form=form)


def scored(number: Mapping[Any, Any], form: str = ".2f") -> str:
    """The value of a row of `core.table.numbers` with its interval.

    Scores are in percent, perplexities as themselves, and what other programs measured has four digits.

    Args:
      number: its kind, value, low and high.
      form: of perplexities.
    """
    ends = [number[name] for name in ("value", "low", "high")]
    if number["kind"] == "score":
        return percent(*ends)
    return cell(*ends, form=form if number["kind"] == "nll" and number["value"] < 10_000 else ".4g")


def difference(likely: bool, value: float, low: float, high: float) -> str:
    """A difference with its interval: of log-likelihoods the ratio of perplexities, of scores their points."""
    if not likely:
        return percent(value, low, high, "+.1f")
    ratios = (math.exp(x) if x < 700 else math.inf for x in (value, low, high))
    return f"\N{MULTIPLICATION SIGN}{cell(*ratios, form='.3f')}"


class Name(str):
    """What something is called by others, which is no markup in any form of a table."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True)
class Cell:
    """A number, with what a browser does with it.

    Attributes:
      text: such as "62.5 [45.3, 77.1]".
      key: what rows are sorted by; the text if None.
      link: the anchor in the page that it leads to.
      note: shown beside the pointer.
      kind: a class of the page's style.
      bold: whether its value stands out.
    """

    text: str
    key: float | None = None
    link: str = ""
    note: str = ""
    kind: str = ""
    bold: bool = False

    def __str__(self) -> str:
        return self.text

    @property
    def value(self) -> str:
        """The text without its interval."""
        return self.text.partition(" [")[0]

    @property
    def interval(self) -> str:
        """The interval alone."""
        return self.text.removeprefix(self.value).strip()


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells under titles; `page.html.jinja` has its form for a browser.

    Attributes:
      head: the titles of the columns.
      rows: as many cells in each.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]

    def without(self, title: str) -> "Table":
        """All columns but one."""
        i = self.head.index(title)
        return Table([*self.head[:i], *self.head[i + 1 :]], [[*row[:i], *row[i + 1 :]] for row in self.rows])

    def markdown(self) -> list[str]:
        """Lines of Markdown."""
        first, *lines = (f"| {' | '.join(map(_marked, row))} |" for row in (self.head, *self.rows))
        return [first, "|" + "---|" * len(self.head), *lines]

    def screen(self) -> list[str]:
        """Lines of aligned columns."""
        every = [[*map(str, row)] for row in (self.head, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*every, strict=True)]
        return ["  ".join(x.ljust(width) for x, width in zip(row, widths, strict=True)).rstrip() for row in every]

    def csv(self) -> str:
        """Comma-separated values, the titles first."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.head, *self.rows])
        return text.getvalue()


def crossed(
    numbers: Sequence[Mapping[str, Any]],
    titles: Sequence[str],
    named: Callable[[str, Any], Sequence[str]],
    shown: Callable[[Mapping[str, Any]], str],
) -> Table:
    """A row for every method and budget of numbers, and a column for each title, as papers lay tables out.

    Args:
      numbers: each with its method, budget and column.
      titles: the columns, in order.
      named: what a method and a budget are called.
      shown: how a number is shown.
    """
    cells = {(n["method"], n["budget"], n["column"]): shown(n) for n in numbers}
    lines = dict.fromkeys((n["method"], n["budget"]) for n in numbers)
    rows = [[*named(*line), *(cells.get((*line, title), "") for title in titles)] for line in lines]
    return Table(["method", "budget", *titles], rows)


def _marked(x: str | Cell) -> str:
    if isinstance(x, Name):
        return escaped(x)
    if isinstance(x, Cell) and x.bold:
        return f"**{x.value}** {x.interval}".rstrip()
    return plain(str(x))


def markdown(title: str, *blocks: "str | Table") -> str:
    """A page: its title, then paragraphs and tables."""
    lines = [f"# {title}"] if title else []
    for block in blocks:
        lines += ["", *(block.markdown() if isinstance(block, Table) else [block])]
    return "\n".join([*lines, ""])


def plain(text: str) -> str:
    """Text in one line that begins no HTML and no cell of a table; what is escaped already stays."""
    return re.sub(r"(\\.)|([<|])|\s*[\r\n]\s*", lambda m: m[1] or (f"\\{m[2]}" if m[2] else " "), text)


def escaped(text: str) -> str:
    """Text that is no markup, in one line; underscores within words are none, and stay."""
    return " ".join(re.sub(r"[\\`*{}\[\]<>|#]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", text).split())
