"""RULER's qa_1 and qa_2 (Hsieh et al. 2024, arXiv:2404.06654; Apache-2.0): a question among many documents.

RULER takes SQuAD 2.0 (qa_1) and HotpotQA (qa_2), neither of which comes with the project: the rows are one's own, in
the form of either dataset. The documents of other rows are distractors, those of the same title first.
"""

import contextlib
import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.experiments.tasks.base import Example, Question, Task, Tokens, example
from kvjax.experiments.tasks.rows import answers_of, field, text_of
from kvjax.experiments.tasks.text import check_enough, check_room, most_that_fit

ANSWER = 32  # new tokens
_TASK = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
_BEFORE = f"{_TASK}\n\nThe following are given documents.\n\n"
_QUESTION = f"\n\n{_TASK}\n\nQuestion: {{question}} Answer:"
DATA = {"qa_1": "SQuAD 2.0 (dev-v2.0)", "qa_2": "HotpotQA (hotpot_dev_distractor_v1)"}


def qa_1(task: Task, index: int) -> Example:
    """RULER: a question of SQuAD's form over one's own rows, its document among others.

    Raises:
      ValueError: see `_qa`.
    """
    return _qa(task, index, "qa_1")


def qa_2(task: Task, index: int) -> Example:
    """RULER: a question of HotpotQA's form over one's own rows, its documents among others.

    Raises:
      ValueError: see `_qa`.
    """
    return _qa(task, index, "qa_2")


def _qa(task: Task, index: int, name: str) -> Example:
    """A row's question over its documents and as many of other rows as fit; right where any reference is contained.

    A row has `question`, `answers` or `answer`, and `context`: one text, as in SQuAD, or several with their titles, as
    in HotpotQA; `title` tells which texts belong together. Rows that cannot be asked, as SQuAD 2.0's without an answer,
    still lend their documents.

    Raises:
      ValueError: no such row, one that lacks a field, or documents that are too many or too few for the length.
    """
    if index >= len(task.rows):
        raise ValueError(
            f"{name}: example {index} needs {index + 1} rows, but the data have {len(task.rows)}; RULER's own are "
            f"{DATA[name]}: give rows with question, answers and context as --tasks {name}:rows.jsonl"
        )
    row = task.rows[index]
    references = answers_of(name, index, row, ("answers", "answer"))
    own, others = _documents(name, index, row), _all_documents(name, task.rows)
    rng = task.rng(name, index)
    near = [d for title, d in others if title is not None and title == row.get("title") and d not in own]
    known = {*own, *near}
    far = [d for _, d in others if d not in known]
    ordered = (
        *own,
        *(near[i] for i in rng.permutation(len(near))),
        *(far[i] for i in rng.permutation(len(far))),
    )
    asked = text_of(name, index, row, ("question",))
    question = tuple(task.encode(_QUESTION.format(question=asked)))

    def context(count: int) -> Tokens:
        places = task.rng(f"{name}/places", index).permutation(count)
        text = "\n\n".join(f"Document {i + 1}:\n{ordered[place]}" for i, place in enumerate(places))
        return (*task.bos, *task.encode(_BEFORE + text))

    size = lambda count: len(context(count)) + len(question) + ANSWER
    check_room(name, task, size(len(own)), f"row {index}, its question and {ANSWER} tokens of answer")
    count = most_that_fit(size, task.length, least=len(own), most=len(ordered))
    check_enough(name, task, count, ordered, size(count), "documents")
    wanted = Question(question, references=references, metric="contains", max_new_tokens=ANSWER)
    same = f"{zlib.crc32(''.join(own).encode()):08x}"  # rows that share a context are not independent
    return example(name, index, context(count), wanted, length=float(task.length), same_context=same)


def _documents(name: str, index: int, row: Mapping[str, Any]) -> tuple[str, ...]:
    """The documents of a row, a title in the first line where each has its own."""
    found = field(name, index, row, ("context",))
    try:
        if isinstance(found, Mapping):
            found = list(zip(found["title"], found["sentences"], strict=True))
        if not isinstance(found, str):
            found = [f"{title}\n{''.join(parts)}" for title, parts in found]
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(
            f"{name}: row {index}: context must be text, or documents as HotpotQA has them: pairs of a title and "
            f"a list of sentences, or lists 'title' and 'sentences' ({type(e).__name__}: {e})"
        ) from e
    found = tuple(d.strip() for d in ([found] if isinstance(found, str) else found) if d.strip())
    if not found:
        raise ValueError(f"{name}: row {index}: context has no text")
    return found


def _all_documents(name: str, rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[Any, str], ...]:
    """The documents of every row that has some with its title, each document once."""
    return _cached(_Rows(name, rows))


class _Rows:
    """Rows that are hashed as an object, since they hold lists."""

    def __init__(self, name: str, rows: Sequence[Mapping[str, Any]]):
        self.name, self.rows = name, rows

    def __hash__(self) -> int:
        return id(self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rows) and (self.name, id(self.rows)) == (other.name, id(other.rows))


@functools.lru_cache(maxsize=2)
def _cached(data: _Rows) -> tuple[tuple[Any, str], ...]:
    found: dict[str, Any] = {}
    for i, row in enumerate(data.rows):
        with contextlib.suppress(ValueError):  # it is named when it is asked for
            for document in _documents(data.name, i, row):
                found.setdefault(document, row.get("title"))
    return tuple((title, document) for document, title in found.items())
