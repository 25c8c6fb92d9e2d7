"""Rows of one's own, read by the names that published datasets give their fields."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.experiments.tasks.base import Task


def row_of(name: str, task: Task, index: int) -> Mapping[str, Any]:
    """The row of an example.

    Raises:
      ValueError: there are not so many.
    """
    if index >= len(task.rows):
        raise ValueError(f"{name}: example {index} needs {index + 1} rows, but the data have {len(task.rows)}")
    return task.rows[index]


def field(name: str, index: int, row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The first of a row's fields that it has.

    Raises:
      ValueError: it has none of them.
    """
    for each in names:
        if row.get(each) is not None:
            return row[each]
    raise ValueError(f"{name}: row {index}: has none of the fields {', '.join(names)}; it has {', '.join(row)}")


def text_of(name: str, index: int, row: Mapping[str, Any], names: Sequence[str]) -> str:
    """As `field`, of text that is not blank.

    Raises:
      ValueError: there is none, or something else.
    """
    found = field(name, index, row, names)
    if not isinstance(found, str) or not found.strip():
        raise ValueError(f"{name}: row {index}: {' or '.join(names)} must be text, not {found!r:.60}")
    return found.strip()


def answers_of(name: str, index: int, row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    """Right answers: one text, a list of them, or SQuAD's `{"text": [...]}`.

    Raises:
      ValueError: there are none, or something else.
    """
    found = field(name, index, row, names)
    found = found.get("text") if isinstance(found, Mapping) else found
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, Sequence) or not found or not all(isinstance(a, str) and a.strip() for a in found):
        raise ValueError(
            f"{name}: row {index}: {' or '.join(names)} must be text or a list of texts, none of them blank, "
            f"not {found!r:.60}"
        )
    return tuple(dict.fromkeys(a.strip() for a in found))
