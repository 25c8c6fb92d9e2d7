"""A page: text, tables and pictures, which are written as Markdown, CSV and for the screen from one model."""

import csv
import dataclasses
import io
import math
import re
from collections.abc import Sequence


def cell(value: float | None, low: float | None = None, high: float | None = None, form: str = ".1f") -> str:
    """A number and its interval, such as "62.5 [45.3, 77.1]".

    Args:
      value: nothing is shown of None and NaN.
      low, high: the ends of the interval; the value alone is shown where one of them is None or not finite.
      form: how each of the three is formatted, such as "+.1f".
    """
    if value is None or math.isnan(value):
        return ""
    known = [end for end in (low, high) if end is not None and math.isfinite(end)]
    ends = f" [{', '.join(f'{end:{form}}' for end in known)}]" if len(known) == 2 else ""
    return f"{value:{form}}{ends}"


def percent(value: float | None, low: float | None = None, high: float | None = None, form: str = ".1f") -> str:
    """As `cell`, of shares: 0.5 is shown as "50.0"."""
    scaled = (x if x is None else 100 * x for x in (value, low, high))
    return cell(*scaled, form=form)


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells under titles.

    Attributes:
      head: the titles of the columns.
      rows: as many cells in each.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> list[str]:
        """Lines of Markdown."""
        first, *lines = (f"| {' | '.join(map(plain, row))} |" for row in (self.head, *self.rows))
        return [first, "|" + "---|" * len(self.head), *lines]

    def screen(self) -> list[str]:
        """Lines of aligned columns."""
        every = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*every, strict=True)]
        return ["  ".join(x.ljust(width) for x, width in zip(row, widths, strict=True)).rstrip() for row in every]

    def csv(self) -> str:
        """Comma-separated values, the titles first."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.head, *self.rows])
        return text.getvalue()


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
