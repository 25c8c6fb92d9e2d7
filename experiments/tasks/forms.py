"""Tasks over rows of one's own in the forms of published data sets: `--tasks summarise:news.jsonl`."""

import dataclasses
from typing import Final

from kvjax.experiments.tasks.base import BadRow, Builder, Example, Task
from kvjax.experiments.tasks.dialogue import dialogue
from kvjax.experiments.tasks.own_data import Rows, object_of, read
from kvjax.experiments.tasks.reconstruction import reconstruction
from kvjax.experiments.tasks.ruler import qa_1, qa_2
from kvjax.experiments.tasks.summarise import summarise

FORMS: Final[dict[str, Builder]] = {b.__name__: b for b in (summarise, reconstruction, dialogue, qa_1, qa_2)}
"""Tasks that take `Task.rows`; each says which fields a row has."""


@dataclasses.dataclass(frozen=True)
class Form(Rows):
    """A task of `FORMS` over the rows of a source: example i is row i.

    Attributes:
      form: the task.
    """

    form: str = ""

    def __call__(self, task: Task, index: int) -> Example:
        """The example of a row.

        Raises:
          BadRow: one that cannot be asked, with its line and the reason.
        """
        line, row = self.rows[index]
        try:
            object_of(row)
            return FORMS[self.form](dataclasses.replace(task, rows=self.objects), index)
        except ValueError as e:
            reason = str(e).removeprefix(f"{self.form}: ").removeprefix(f"row {index}: ")  # the line says which
            raise BadRow(line, reason) from e


def find(name: str) -> tuple[str, Form] | None:
    """The name in results and the builder of "form:source", where `read` says what a source is; None for another name.

    Raises:
      ValueError: a source that cannot be read.
    """
    form, _, source = name.partition(":")
    if form not in FORMS or not source:
        return None
    data = read(source)
    return f"{form}:{data.name}", Form(f"{form}:{data.name}", data.source, data.rows, form=form)
