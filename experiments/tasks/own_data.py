"""Rows of one's own: contexts, questions and answers from JSON lines or from a data set of the hub."""

import codecs
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

from kvjax.drivers.text import check_whole_text, encode
from kvjax.experiments.core import metrics
from kvjax.experiments.tasks.base import BadRow, Example, Question, Task, Tokens, example
from kvjax.models.sources import local_path

Truncate = Literal["none", "left", "middle"]

_HUB: Final = re.compile(r"([\w.-]+/[\w.-]+):([\w.\[\]%:-]+)")
_MARK: Final = "\ue000\ue001\ue000"  # stands in a chat where the context ends; private characters, which no text has


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
    | `metric` | a name in `metrics.METRICS` or, in a file, path.py:function, whose code then runs; else `contains` |
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
      chat: ask within the tokenizer's chat template, in one message of the user.
    """

    name: str
    source: str
    rows: tuple[tuple[int, Any], ...] = dataclasses.field(repr=False)
    max_new_tokens: int = 64
    truncate: Truncate = "none"
    chat: bool = False

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
        return tuple(map(_object_or_none, (row for _, row in self.rows)))

    @functools.cached_property
    def _first_lines(self) -> dict[str, int]:
        """Where each id is first."""
        found: dict[str, int] = {}
        for (line, _), row in zip(self.rows, self.objects, strict=True):
            if row.get("id") is not None:
                found.setdefault(str(row["id"]), line)
        return found

    def __call__(self, task: Task, index: int) -> Example:
        """The example of a row.

        Raises:
          BadRow: one that cannot be asked, with its line and the reason.
        """
        line, row = self.rows[index]
        try:
            fields = _fields(row)
            if "id" in fields and (first := self._first_lines[str(fields["id"])]) != line:
                raise ValueError(f"id={fields['id']!r:.60} is that of line {first}; give every row one of its own")
            text, rest = self._texts(fields, task.tokenizer)
            most = fields.get("max_new_tokens", self.max_new_tokens)
            check_whole_text("question or answer_prefix", rest)
            ids = tuple(task.tokenizer(rest, add_special_tokens=False).input_ids)
            context = self._fitted(encode(task.tokenizer, text), len(ids) + most, task)
            question = Question(
                ids,
                references=_texts("answers", fields["answers"]),
                metric=fields.get("metric", "contains"),
                max_new_tokens=most,
                stop=_texts("stop", fields.get("stop", [])),
            )
            if not isinstance(row, bytes) and ".py:" in question.metric:
                raise ValueError(
                    f"metric={question.metric!r:.60} is code, which a data set may not name; where you trust it, save "
                    "the rows as JSON lines"
                )
            metrics.find(question.metric)("", question.references)  # tells references that it cannot take
        except ValueError as e:
            raise BadRow(line, str(e)) from e
        named = {"row": str(fields["id"])} if "id" in fields else {}
        named["same_context"] = f"{zlib.crc32(text.encode()):08x}"  # rows that share one are not independent
        return example(self.name, index, context, question, **named)

    def _texts(self, fields: Mapping[str, Any], tokenizer: Any) -> tuple[str, str]:
        """The text that a cache is compressed after, and the one that follows it."""
        context, question, prefix = fields["context"], fields["question"], fields.get("answer_prefix", "")
        context += "" if context[-1].isspace() else "\n\n"
        gap = "" if not question or question[-1].isspace() else "\n"
        if not self.chat:
            return context, question + gap + prefix
        if _MARK in context + question:
            raise ValueError(f"the text has the private characters {_MARK!r}, which mark where a context ends")
        message = {"role": "user", "content": context + _MARK + question}
        try:
            text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        except Exception as e:  # a template is code of the model's authors, and raises what it likes
            raise ValueError(f"the chat template refuses the row: {e}") from e
        before, *after = text.split(_MARK)
        if len(after) != 1:
            raise ValueError(f"the chat template writes a message {len(after)} times; leave --chat out")
        return before, after[0] + prefix

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
        first = 1 if self.truncate == "left" and context[0] == task.tokenizer.bos_token_id else 0
        first = room // 2 if self.truncate == "middle" else first
        return (*context[:first], *context[len(context) - room + first :])


def read(
    source: str, *, max_new_tokens: int = 64, truncate: Truncate = "none", chat: bool = False, most: int | None = None
) -> Rows:
    """The rows of a source.

    Args:
      source: a file of JSON lines; or "owner/name:split" of the hub, or a directory of a data set, as
        `datasets.load_dataset` takes them (extra `data`).
      max_new_tokens, truncate, chat: see `Rows`.
      most: so many rows, the first ones; all if None.

    Raises:
      ValueError: neither a file nor a data set, one without rows, or `datasets` that is missing or fails.
    """
    path = local_path(source)
    hub = _HUB.fullmatch(source)
    if path.is_file():
        name, rows = path.stem, _of_file(path)
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
    return Rows(name, source, rows[:most], max_new_tokens, truncate, chat)


def _of_file(path: pathlib.Path) -> tuple[tuple[int, bytes], ...]:
    """The lines of a file that are not blank, with their numbers.

    Raises:
      ValueError: a file of another kind, and what makes lines of it.
    """
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    wanted = f"--data {path} must be JSON lines in UTF-8, a row a line, but "
    if content.startswith(b"\x1f\x8b"):
        raise ValueError(f"{wanted}is compressed; unpack it first (gzip -dc < {path} > rows.jsonl)")
    if b"\0" in content[:4] or content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{wanted}is UTF-16 or UTF-32; write it anew (iconv -f UTF-16 -t UTF-8 {path} > rows.jsonl)")
    rows = tuple((number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip())
    if (len(rows) > 1 or content.lstrip().startswith(b"[")) and _is_json(content):
        raise ValueError(f"{wanted}is one JSON value; write a line for each row (jq -c '.[]' {path} > rows.jsonl)")
    return rows


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def _of_hub(name: str, split: str) -> tuple[tuple[int, Any], ...]:
    try:
        datasets = importlib.import_module("datasets")  # an extra
    except ImportError as e:
        raise ValueError(f"--data {name}:{split} needs the package datasets ({e}); pip install 'kvjax[data]'") from e
    away = None if local_path(name).exists() else _unreachable(name)
    offline = datasets.config.HF_HUB_OFFLINE
    try:
        datasets.config.HF_HUB_OFFLINE = offline or away is not None  # what is stored, without half a minute of retries
        return tuple(enumerate(map(dict, datasets.load_dataset(name, split=split, trust_remote_code=False)), 1))
    except Exception as e:  # of the network, the data set's format, or its name
        if away is not None and isinstance(e, OSError):  # as all that say that something is nowhere
            raise ValueError(
                f"--data {name}:{split} cannot be loaded: the hub cannot be reached ({away}), and no copy of the data "
                "set is stored here; load it once where there is a network, or give a file of JSON lines"
            ) from e
        raise ValueError(f"--data {name}:{split} cannot be loaded: {type(e).__name__}: {e}") from e
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


def _unreachable(name: str) -> str | None:
    """Why the hub does not answer when it is asked for a data set; None if it does."""
    import huggingface_hub  # slow to import, and only wanted here

    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=10)
    except (huggingface_hub.errors.HfHubHTTPError, ValueError):
        return None  # an answer, or no name to ask for: `datasets` says what is wrong
    except Exception as e:  # of the HTTP library, which one that is depends on the version
        return f"{type(e).__name__}: {e}"
    return None


def object_of(row: Any) -> dict[str, Any]:
    """What stands in a row, its bytes or an object, as an object.

    Raises:
      ValueError: it is none.
    """
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


def _object_or_none(row: Any) -> dict[str, Any]:
    try:
        return object_of(row)
    except ValueError:
        return {}


def _fields(row: Any) -> Mapping[str, Any]:
    """A row whose fields are of their types.

    Raises:
      ValueError: one that is not.
    """
    row = object_of(row)
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
