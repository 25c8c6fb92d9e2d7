"""Rows of data: one's own contexts, questions and answers, and tasks over rows in the forms of published data sets.

They are JSON lines of a file, or a data set of the hub: `--data mine.jsonl` and `--tasks summarise:news.jsonl`.
"""

import codecs
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import pathlib
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from kvjax.experiments.core import metrics
from kvjax.experiments.tasks.base import (
    BadRow,
    Builder,
    Example,
    Question,
    Task,
    Tokens,
    example,
    in_chat,
    sentences,
)
from kvjax.experiments.tasks.text import check_enough, check_room, cut_middle, haystack, most_that_fit
from kvjax.models.sources import local_path
from kvjax.text.encode import check_whole_text, encode

Truncate = Literal["none", "left", "middle"]

DOCUMENT: Final = ("article", "document", "report", "dialogue", "context")
SUMMARY: Final = ("highlights", "summary", "answers")
_HUB: Final = re.compile(r"([\w.-]+/[\w.-]+):([\w.\[\]%:-]+)")

# --- rows of one's own ---


@dataclasses.dataclass(frozen=True)
class Rows:
    """A task whose examples are rows of data, each an object with these fields; others are left alone.

    | field | what it holds |
    |---|---|
    | `context` | the text whose cache is compressed |
    | `question` | what is asked about it; may be empty |
    | `answers` | a right answer, or a list of them |
    | `answer_prefix` | how the answer begins, if the model is to go on from there |
    | `max_new_tokens` | the most tokens of an answer |
    | `metric` | a name in `metrics.METRICS`, or path.py:function if `metrics` has it, too; else `contains` |
    | `stop` | a string that ends an answer, or a list of them |
    | `id` | what the row is called in results; no two rows have the same |

    Context, question and prefix follow each other with an empty line and a line break between them where there is no
    white space. Context and question are encoded apart, so that both protocols read the same tokens.

    Attributes:
      name: of the task.
      source: where the rows are from.
      rows: number of the line, and what stands there: its bytes, or an object.
      max_new_tokens: of rows that do not say.
      truncate: what is left out of a context that is too long: its beginning, its middle, or nothing ("none").
      metrics: path.py:function of each whose code rows may name.
    """

    name: str
    source: str
    rows: tuple[tuple[int, Any], ...] = dataclasses.field(repr=False)
    max_new_tokens: int = 64
    truncate: Truncate = "none"
    metrics: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def digest(self) -> str:
        """Of all rows."""
        text = (row if isinstance(row, bytes) else json.dumps(row, default=repr).encode() for _, row in self.rows)
        return hashlib.sha256(b"\n".join(text)).hexdigest()[:16]

    @functools.cached_property
    def objects(self) -> tuple[Mapping[str, Any], ...]:
        """All rows; those that are no objects are without fields."""
        found: list[Mapping[str, Any]] = [{} for _ in self.rows]
        for i, (_, row) in enumerate(self.rows):
            with contextlib.suppress(ValueError):
                found[i] = object_of(row)
        return tuple(found)

    @functools.cached_property
    def _first_lines(self) -> dict[str, int]:
        """Where each id is first."""
        lines = [(row.get("id"), line) for (line, _), row in zip(self.rows, self.objects, strict=True)]
        return {str(name): line for name, line in reversed(lines) if name is not None}

    def __call__(self, task: Task, index: int) -> Example:
        """The example of a row.

        Raises:
          BadRow: one that cannot be asked, with its line and the reason.
        """
        line, row = self.rows[index]
        try:
            return self._example(task, index, object_of(row))
        except ValueError as e:
            raise BadRow(line, str(e)) from e

    def _example(self, task: Task, index: int, row: Mapping[str, Any]) -> Example:
        line, fields = self.rows[index][0], _checked(row)
        if "id" in fields and (first := self._first_lines[str(fields["id"])]) != line:
            raise ValueError(f"id={fields['id']!r:.60} is that of line {first}; give every row one of its own")
        text, rest = self._texts(fields, task)
        most = fields.get("max_new_tokens", self.max_new_tokens)
        check_whole_text("question or answer_prefix", rest)
        ids = tuple(task.tokenizer(rest, add_special_tokens=False).input_ids)
        context = self._fitted(encode(task.tokenizer, text), len(ids) + most, task)
        references, stop = (_texts(name, fields.get(name, [])) for name in ("answers", "stop"))
        metric = fields.get("metric", "contains")
        question = Question(ids, references=references, metric=metric, max_new_tokens=most, stop=stop)
        if ".py:" in metric and metric not in self.metrics:
            raise ValueError(
                f"metric={metric!r:.60} is code, and runs only if the command line names it, too; where you trust it, "
                f"give --metrics {metric}"
            )
        metrics.find(metric)("", references)  # tells references that it cannot take
        named = {"row": str(fields["id"])} if "id" in fields else {}
        named["same_context"] = f"{zlib.crc32(text.encode()):08x}"  # rows that share one are not independent
        return example(self.name, index, context, question, **named)

    def _texts(self, fields: Mapping[str, Any], task: Task) -> tuple[str, str]:
        """The text that a cache is compressed after, and the one that follows it."""
        context, question, prefix = fields["context"], fields["question"], fields.get("answer_prefix", "")
        context += "" if context[-1].isspace() else "\n\n"
        gap = "" if not question or question[-1].isspace() else "\n"
        if task.chat is None:
            return context, question + gap + prefix
        before, after = in_chat(task.tokenizer, context, question)
        return before, after + prefix

    def _fitted(self, context: Sequence[int], others: int, task: Task) -> Tokens:
        """The context, less what does not fit beside `others` tokens of question and answer."""
        room = len(context) if task.limit is None else task.limit - others
        if len(context) <= room:
            return tuple(context)
        if room < 2:
            raise ValueError(
                f"question and answer take {others} tokens, but there is room for {task.limit} with the context; "
                "shorten the question, or lower max_new_tokens"
            )
        if self.truncate == "none":
            raise ValueError(
                f"the context has {len(context)} tokens, question and answer {others}, but there is room for "
                f"{task.limit}; shorten it, or give --truncate middle"
            )
        header = len(task.begin) if tuple(context[: len(task.begin)]) == task.begin else 0
        first = min(header, room) if self.truncate == "left" else 0
        first = room // 2 if self.truncate == "middle" else first
        return (*context[:first], *context[len(context) - room + first :])


@dataclasses.dataclass(frozen=True)
class Form(Rows):
    """A task that takes `Task.rows` over the rows of a source: example i is row i.

    Attributes:
      form: the task's name.
      build: the task.
    """

    form: str = ""
    build: Builder = dataclasses.field(kw_only=True, repr=False)

    def _example(self, task: Task, index: int, row: Mapping[str, Any]) -> Example:
        del row  # the task takes it of all of them
        try:
            return self.build(dataclasses.replace(task, rows=self.objects), index)
        except ValueError as e:  # the line says which row
            raise ValueError(str(e).removeprefix(f"{self.form}: ").removeprefix(f"row {index}: ")) from e


def load_rows(source: str, *, most: int | None = None, **how: Any) -> Rows:
    """The rows of a source.

    Args:
      source: a file of JSON lines, or of one JSON value (.json); or "owner/name:split" of the hub, or a directory of a
        data set, as `datasets.load_dataset` takes them (extra `data`).
      most: so many rows, the first ones; all if None.
      **how: `max_new_tokens`, `truncate` and `metrics`, as of `Rows`.

    Raises:
      ValueError: neither a file nor a data set, one without rows, or `datasets` that is missing or fails.
    """
    path = local_path(source)
    hub = _HUB.fullmatch(source)
    if path.is_file():
        name, rows = path.stem, of_file(path)
    elif hub:
        name, rows = hub[1].partition("/")[2], _of_hub(hub[1], hub[2])
    else:
        raise ValueError(
            f"--data {source}: there is no such file; name one of JSON lines, or owner/name:split of the hub"
        )
    if not rows:
        raise ValueError(f"--data {source} has no rows")
    if not re.fullmatch(r"[^/@|\s]{1,100}", name):
        raise ValueError(f"--data {source}: {name!r} names the task in results; rename it, without spaces, @ and |")
    return Rows(name, source, rows[:most], **how)


def of_file(path: pathlib.Path) -> tuple[tuple[int, Any], ...]:
    """The rows of a file, with their numbers: its lines that are not blank, or the objects of one JSON value (.json).

    Raises:
      ValueError: a file of another kind, with what makes lines of it.
    """
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    wanted = f"--data {path} must be JSON lines in UTF-8, a row a line, but "
    if content.startswith(b"\x1f\x8b"):
        raise ValueError(f"{wanted}is compressed; unpack it first (gzip -dc < {path} > rows.jsonl)")
    if b"\0" in content[:4] or content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{wanted}is UTF-16 or UTF-32; write it anew (iconv -f UTF-16 -t UTF-8 {path} > rows.jsonl)")
    rows = tuple((number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip())
    listed = path.suffix == ".json"
    if len(rows) == 1 and not listed and not content.lstrip().startswith(b"["):
        return rows
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return rows
    if listed and isinstance(found, dict):  # rows by name, or the only row, which has text
        found = [found] if any(isinstance(value, str) for value in found.values()) else [*found.values()]
    if listed and isinstance(found, list):
        return tuple(enumerate(found, 1))
    raise ValueError(f"{wanted}is one JSON value; write a line for each row (jq -c '.[]' {path} > rows.jsonl)")


def _of_hub(name: str, split: str) -> tuple[tuple[int, Any], ...]:
    try:
        datasets = importlib.import_module("datasets")  # an extra
    except ImportError as e:
        raise ValueError(f"--data {name}:{split} needs the package datasets ({e}); pip install 'kvjax[data]'") from e
    try:
        return tuple(enumerate(map(dict, datasets.load_dataset(name, split=split, trust_remote_code=False)), 1))
    except Exception as e:  # of the network, the data set's format, or its name
        raise ValueError(
            f"--data {name}:{split} cannot be loaded: {type(e).__name__}: {e}; without a network HF_HUB_OFFLINE=1 says "
            "that only what is stored here is to be looked at"
        ) from e


def object_of(row: Any) -> dict[str, Any]:
    """What stands in a row, its bytes or an object, as an object."""
    if isinstance(row, bytes):
        try:
            row = json.loads(row, object_pairs_hook=_object)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"no JSON: {e}") from e
    if not isinstance(row, dict):
        raise ValueError(f"a row is an object with fields, not {row!r:.40}")
    return row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"the field {twice!r:.40} stands there twice; leave one out")
    return dict(pairs)


def _checked(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields that a row has, each of its type."""
    given = {name: value for name, value in row.items() if value is not None}
    if missing := [name for name in ("context", "question", "answers") if name not in given]:
        raise ValueError(f"the field {', '.join(missing)} is missing")
    for name in ("context", "question", "answer_prefix", "metric"):
        if not isinstance(given.get(name, ""), str):
            raise ValueError(f"{name}={given[name]!r:.60} must be a text")
    if not given["context"].strip():
        raise ValueError("the context is empty")
    most = given.get("max_new_tokens", 1)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"max_new_tokens={most!r:.60} must be a whole number of at least 1")
    if not isinstance(given.get("id", ""), str | int):
        raise ValueError(f"id={given['id']!r:.60} must be a text or a number")
    return given


def _texts(name: str, value: Any) -> tuple[str, ...]:
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, list) or not all(isinstance(text, str) and text for text in several):
        raise ValueError(f"{name}={value!r:.60} must be a text or a list of texts")
    return tuple(several)


# --- tasks over rows in the forms of published data sets ---


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a task, read by the first of several names that it has a field of.

    Every method raises ValueError with the row's place where there is no such field, or it is not what is wanted.
    """

    task: str
    index: int
    fields: Mapping[str, Any]

    def error(self, reason: str) -> ValueError:
        """What says why the row cannot be asked."""
        return ValueError(f"{self.task}: row {self.index}: {reason}")

    def first(self, *names: str) -> Any:
        """Whatever stands there."""
        for name in names:
            if self.fields.get(name) is not None:
                return self.fields[name]
        raise self.error(f"has none of the fields {', '.join(names)}; it has {', '.join(self.fields)}")

    def text(self, *names: str) -> str:
        """Text that is not blank."""
        found = self.first(*names)
        if not isinstance(found, str) or not found.strip():
            raise self.error(f"{' or '.join(names)} must be text, not {found!r:.60}")
        return found.strip()

    def answers(self, *names: str) -> tuple[str, ...]:
        """Right answers: one text, a list of them, or SQuAD's `{"text": [...]}`."""
        found = self.first(*names)
        found = found.get("text") if isinstance(found, Mapping) else found
        found = [found] if isinstance(found, str) else found
        if not isinstance(found, Sequence) or not found or not all(isinstance(a, str) and a.strip() for a in found):
            raise self.error(
                f"{' or '.join(names)} must be text or a list of texts, none of them blank, not {found!r:.60}"
            )
        return tuple(dict.fromkeys(a.strip() for a in found))


def row_of(name: str, task: Task, index: int, hint: str = "") -> Row:
    """The row of an example; where there are not so many, ValueError with a hint."""
    if index >= len(task.rows):
        raise ValueError(f"{name}: example {index} needs {index + 1} rows, but the data have {len(task.rows)}{hint}")
    return Row(name, index, task.rows[index])


def summarise(task: Task, index: int, *, max_new_tokens: int = 128, num_beams: int = 1) -> Example:
    """A row's document, and its summary as reference: CNN/DailyMail, XSum and GovReport by their fields' names.

    The score is ROUGE-L as rouge-score gives it; `experiments.core.table.rescored` adds ROUGE-1, ROUGE-2, BLEU and
    METEOR to a finished run. RoCo (arXiv:2402.06262) evicts the prompt alone and compares with the full cache's
    output; Keyformer (arXiv:2403.09054) searches with four beams. A document that does not fit is cut in its middle, as
    LongBench cuts; meta `cut` counts the tokens. Papers do not say their prompts: this one is plain, for base models
    too.

    Args:
      max_new_tokens: of a summary: 128 (CNN/DailyMail, XSum); LongBench takes 512 for GovReport.
      num_beams: hypotheses of a beam search; 1 for greedy generation, 4 in Keyformer.

    Raises:
      ValueError: no such row, a row without document or summary, or a length without room for a document.
    """
    row = row_of("summarise", task, index)
    document, references = task.encode(row.text(*DOCUMENT)), row.answers(*SUMMARY)
    before = (*task.begin, *task.encode("Summarize the following text.\n\nText:\n"))
    question = task.ask((), task.encode("\n\nSummary:"))
    check_room("summarise", task, len(before) + len(question) + 2, "instruction and a document of two tokens")
    kept = cut_middle(document, task.length - len(before) - len(question))
    asked = Question(
        question, references=references, metric="rouge_l", max_new_tokens=max_new_tokens, num_beams=num_beams
    )
    cut = float(len(document) - len(kept))
    return example("summarise", index, (*before, *kept), asked, length=float(len(before) + len(kept)), cut=cut)


def reconstruction(task: Task, index: int) -> Example:
    """A document, the request to repeat it, and room to do so: document twice, and the request, take `length` tokens.

    RoCo evicts CNN/DailyMail articles while prefilling and reports BLEU, ROUGE-1 and ROUGE-L against the output of the
    full cache; its prompt is not given. Here the reference is the document itself and the score ROUGE-L;
    `experiments.core.table.agreement` compares a finished run with the full cache's output by other metrics, too.
    Documents are those of the task's rows, cut at a sentence's end, else sentences of its text or of filler.

    Raises:
      ValueError: no such row, a length that holds no sentence, or a text that is too short.
    """
    before = (*task.begin, *task.encode("Text:\n"))
    question = task.ask(task.encode("\n\nRepeat the text above, word for word."), task.encode("\n\nText:\n"))
    room = task.length - len(before) - len(question)
    if task.rows:
        found = sentences(row_of("reconstruction", task, index).text(*DOCUMENT))
    else:
        found = haystack(task, "reconstruction", index, max(room, 1))
    size = lambda count: 2 * len(task.encode(" ".join(found[:count])))
    check_room("reconstruction", task, task.length - room + size(1), "a sentence twice and the request to repeat it")
    count = most_that_fit(size, room, least=1, most=len(found))
    if not task.rows:
        check_enough("reconstruction", task, count, found, size(count) // 2, "sentences of the text")
    document = " ".join(found[:count])
    ids = tuple(task.encode(document))
    asked = Question(question, references=(document,), metric="rouge_l", max_new_tokens=len(ids))
    meta = {"length": float(len(before) + len(ids)), **({} if task.rows else task.shared(index))}
    return example("reconstruction", index, (*before, *ids), asked, **meta)


def dialogue(task: Task, index: int, *, max_new_tokens: int = 64, num_beams: int = 1) -> Example:
    """The turns of a row but the last, a line each, and the last one as reference.

    A row has `dialogue`, a list of texts, and if there are any as many `speakers`, and `narrative`, which goes first,
    as in SODA; or `messages` of `role` and `content`, as chats are stored. Where the turns do not fit, the earliest are
    left out; meta `cut` counts them. The score is ROUGE-L. Keyformer (arXiv:2403.09054) searches with four beams; its
    prompt is not given.

    Args:
      max_new_tokens: of the turn.
      num_beams: hypotheses of a beam search; 1 for greedy generation, 4 in Keyformer.

    Raises:
      ValueError: no such row, a row with fewer than two turns or of another form, or a length too small for one turn.
    """
    row = row_of("dialogue", task, index)
    turns = _turns(row)
    speaker, reference = turns.pop()
    question = tuple(task.encode(f"{speaker}:"))
    narrative = row.fields.get("narrative")
    first = f"{narrative.strip()}\n" if isinstance(narrative, str) and narrative.strip() else ""
    lines = [f"{who}: {what}\n" for who, what in turns]

    def context(cut: int) -> Tokens:
        return (*task.bos, *task.encode(first + "".join(lines[cut:])))

    size = lambda cut: len(context(cut)) + len(question)
    check_room("dialogue", task, size(len(lines) - 1), f"row {index}: a turn and the next speaker")
    cut = next(c for c in range(len(lines)) if size(c) <= task.length)
    ids = context(cut)
    asked = Question(
        question, references=(reference,), metric="rouge_l", max_new_tokens=max_new_tokens, stop=("\n",),
        num_beams=num_beams,
    )  # fmt: skip
    return example("dialogue", index, ids, asked, length=float(len(ids)), cut=float(cut))


def _turns(row: Row) -> list[tuple[str, str]]:
    """Who said what, in two turns at least."""
    found = row.first("dialogue", "messages")
    if not isinstance(found, list | tuple) or len(found) < 2:
        raise row.error(f"there must be a list of at least 2 turns, not {found!r:.60}")
    if all(isinstance(turn, Mapping) for turn in found):
        speakers, texts = [turn.get("role") for turn in found], [turn.get("content") for turn in found]
    else:
        speakers, texts = row.fields.get("speakers"), list(found)
        speakers = ["AB"[i % 2] for i in range(len(texts))] if speakers is None else list(speakers)
    if len(speakers) != len(texts):
        raise row.error(f"{len(texts)} turns, but {len(speakers)} speakers; give one a turn")
    if not all(isinstance(s, str) and s.strip() for s in (*speakers, *texts)):
        raise row.error("every turn must be text that is not blank, said by someone")
    return [(who.strip(), " ".join(what.split())) for who, what in zip(speakers, texts, strict=True)]
