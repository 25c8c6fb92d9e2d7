"""Text for figures: a file, or the project's own, cut into prompts of one length."""

import pathlib
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.experiments.core.setup import read_text
from kvjax.experiments.tasks import TASKS, Task
from kvjax.experiments.tasks.base import check_known, task_of


def from_file(tokenizer: Any, path: pathlib.Path, *, count: int, length: int) -> Int[np.ndarray, "B T"]:
    """The first prompts of a text file, one after the other, each with BOS in front where the tokenizer has one.

    Raises:
      ValueError: a text too short for so many prompts, or that is no UTF-8; a length of BOS alone.
    """
    task = task_of(tokenizer, length, 0, read_text(str(path)))
    try:
        return _read("streaming_perplexity", task, count, length)
    except ValueError as e:
        raise ValueError(f"{path.name}: {e}") from e


def from_project(tokenizer: Any, *, count: int, length: int, seed: int = 0) -> Int[np.ndarray, "B T"]:
    """Held-out text of the project: sentences, facts, and here and there a question about one.

    Raises:
      ValueError: prompts without tokens.
    """
    if min(count, length) < 1:
        raise ValueError(f"{count} prompts of {length} tokens: figures need at least 1 of both")
    return _read("perplexity", task_of(tokenizer, max(length, 128), seed), count, length)


def _read(name: str, task: Task, count: int, length: int) -> Int[np.ndarray, "B T"]:
    """All that examples of a task of text read, up to `length` tokens."""
    examples = [TASKS[name](task, i) for i in range(count)]
    for e in examples:
        check_known("the text", e.given, task.tokenizer)
    return np.array([(e.context + e.questions[0].continuation)[:length] for e in examples], np.int32)
