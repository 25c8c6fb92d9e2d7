"""Tables and text in Markdown."""

import re
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    first, *lines = (f"| {' | '.join(map(plain, row))} |" for row in (head, *rows))
    return [first, "|" + "---|" * len(head), *lines]


def plain(text: str) -> str:
    """Text in one line that begins no HTML and no cell of a table; what is escaped already stays."""
    return re.sub(r"(\\.)|([<|])|\s*[\r\n]\s*", lambda m: m[1] or (f"\\{m[2]}" if m[2] else " "), text)


def escaped(text: str) -> str:
    """Text that is no markup, in one line; underscores within words are none, and stay."""
    return " ".join(re.sub(r"[\\`*{}\[\]<>|#]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", text).split())
