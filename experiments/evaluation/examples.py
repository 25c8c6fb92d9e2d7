"""The examples of a setup: what builds them, how many there are, and the rows of data that cannot be asked."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from tqdm import tqdm

from kvjax.configs.experiment import Setup
from kvjax.drivers.text import check_whole_text
from kvjax.experiments import tasks
from kvjax.experiments.core import metrics
from kvjax.experiments.core.provenance import definition
from kvjax.experiments.evaluation.batches import Row, rows_of
from kvjax.experiments.tasks import BadRow, Builder, Example, Task
from kvjax.experiments.tasks.own_data import Rows, read

EXAMPLES = 48
"""Examples of a task that has any number, where the setup does not say."""

Bad = dict[str, Any]
"""A row that cannot be asked: task, index, line and reason."""


def find_builders(setup: Setup) -> dict[str, Builder]:
    """What builds the examples of each task and file of a setup, by their names in results.

    Raises:
      ValueError: no such task or file, two of one name, or none at all.
    """
    data = [
        read(
            source,
            max_new_tokens=setup.max_new_tokens,
            truncate=setup.truncate,
            chat=setup.chat,
            most=setup.examples,
        )
        for source in setup.data
    ]
    found = [*map(tasks.find, setup.task_names), *((rows.name, rows) for rows in data)]
    names = [name for name, _ in found]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"two tasks or files are called {twice[0]}, which names rows of results; rename one")
    return dict(found)


def described(setup: Setup, builders: Mapping[str, Builder]) -> dict[str, Any]:
    """What a manifest says of tasks, which tells whether two runs are on the same rows."""
    made_by = lambda b: f"{b!r} of rows {b.digest}" if isinstance(b, Rows) else definition(b)
    text = None if setup.text is None else hashlib.sha256(read_text(setup.text).encode()).hexdigest()[:16]
    each = {
        name: {"examples": count(b, setup) * len(setup.seeds), "builder": made_by(b)} for name, b in builders.items()
    }
    return {"tasks": each, "text": text}


def count(builder: Builder, setup: Setup) -> int:
    """How many examples there are of each seed."""
    if isinstance(builder, Sized):
        return len(builder) if setup.examples is None else min(len(builder), setup.examples)
    return EXAMPLES if setup.examples is None else setup.examples


def read_text(file: str) -> str:
    """The text of a file.

    Raises:
      ValueError: one that is empty, or no text.
    """
    try:
        text = pathlib.Path(file).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"--text {file} is no text in UTF-8: {e}") from e
    if not text.strip():
        raise ValueError(f"--text {file} has no text; name a file that has some")
    return text


def build(setup: Setup, builders: Mapping[str, Builder], tokenizer: Any, config: Any) -> tuple[list[Row], list[Bad]]:
    """The rows of all examples, in order, and what is wrong with those that there are none of.

    Args:
      setup: lengths, protocol and text.
      builders: by the names of tasks.
      tokenizer: the model's.
      config: the model's.

    Raises:
      ValueError: no row that can be asked, a chat without a template, a metric that lacks something, or beams for a
        task that scores text.
    """
    if setup.chat and getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(f"--chat needs a chat template, which the tokenizer of {setup.model} has not; leave it out")

    def encode(text: str) -> Sequence[int]:
        check_whole_text("text", text)
        return tokenizer(text, add_special_tokens=False).input_ids

    bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    text = "" if setup.text is None else read_text(setup.text)
    most = config.max_position if config.learned_positions else None
    room = config.max_position if setup.max_length is None else setup.max_length
    room = room if most is None else min(room, most)
    of_seed = [Task(encode, bos, setup.length, seed, text, tokenizer, room) for seed in setup.seeds]
    rows: list[Row] = []
    bad: list[Bad] = []
    todo = [
        (name, builder, n, i)
        for name, builder in builders.items()
        for n in range(len(of_seed))
        for i in range(count(builder, setup))
    ]
    for name, builder, n, i in tqdm(todo, "building examples", delay=2, leave=False):
        task, index = of_seed[n], n * count(builder, setup) + i
        limit = room if isinstance(builder, Sized) else most
        try:
            example = _searched(_built(name, builder, task, i), setup.num_beams)
            if n:
                example = dataclasses.replace(example, index=index, meta=(*example.meta, ("seed", task.seed)))
            rows += _fitting(example, setup, limit, task.seed)
        except BadRow as e:
            bad.append({"task": name, "index": index, "line": e.line, "reason": e.reason})
    if not rows:
        raise ValueError(f"none of {len(bad)} rows can be asked; the first, line {bad[0]['line']}: {bad[0]['reason']}")
    for metric in {q.metric for row in rows for q in row.example.questions if not q.continuation}:
        metrics.find(metric)
    return rows, bad


def _built(name: str, builder: Builder, task: Task, index: int) -> Example:
    found = builder(task, index)
    if not isinstance(found, Example) or not found.context or not found.questions:
        raise ValueError(
            f"task {name} made {found!r:.80} of index {index}, not an Example with a context and questions"
        )
    return dataclasses.replace(found, task=name, index=index)


def _searched(example: Example, num_beams: int) -> Example:
    """The example with so many beams for the answers whose task does not say.

    Raises:
      ValueError: text that is scored, by the task's name.
    """
    if num_beams == 1:
        return example
    if any(q.continuation for q in example.questions):
        raise ValueError(
            f"--num-beams {num_beams} searches for answers, but {example.task} scores text; leave it out, or run "
            "--tasks without it"
        )
    beams = lambda q: dataclasses.replace(q, num_beams=num_beams) if q.num_beams == 1 else q
    return dataclasses.replace(example, questions=(*map(beams, example.questions),))


def _fitting(example: Example, setup: Setup, limit: int | None, seed: int) -> list[Row]:
    """The rows of an example.

    Raises:
      BadRow: one that is too long.
    """
    rows = rows_of(example, setup.protocol, seed)
    longest = max(rows, key=lambda row: len(row.prompt) + row.steps)
    if limit is not None and len(longest.prompt) + longest.steps > limit:
        raise BadRow(
            example.index + 1,
            f"a prompt of {len(longest.prompt)} tokens and {longest.steps} after it are more than the {limit} that "
            "there is room for",
        )
    return rows
