"""Text for figures: a file, or the project's own, cut into prompts of one length."""

import pathlib
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.experiments.tasks import TASKS, Task


def from_file(tokenizer: Any, path: pathlib.Path, *, count: int, length: int) -> Int[np.ndarray, "B T"]:
    """The first prompts of a text file, one after the other, each with BOS in front where the tokenizer has one.

    Raises:
      ValueError: a text too short for so many prompts, or that is no UTF-8; a length of BOS alone.
    """
    bos = _bos(tokenizer)
    try:
        text = path.read_text()
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is no UTF-8 text: {e}") from e
    ids = np.asarray(tokenizer(text, add_special_tokens=False).input_ids, np.int32)
    fresh = length - len(bos)
    if fresh < 1:
        raise ValueError(f"length={length} leaves no token of {path} behind BOS; raise it to {len(bos) + 1} at least")
    if len(ids) < count * fresh:
        raise ValueError(
            f"{path} has {len(ids)} tokens, but {count} prompts of {length} need {count * fresh}; "
            "lower --prompts or --length, or give a longer text"
        )
    pieces = ids[: count * fresh].reshape(count, fresh)
    return np.concatenate([np.broadcast_to(np.array(bos, np.int32), (count, len(bos))), pieces], axis=1)


def from_project(tokenizer: Any, *, count: int, length: int, seed: int = 0) -> Int[np.ndarray, "B T"]:
    """Held-out text of the project: sentences, facts, and here and there a question about one.

    Raises:
      ValueError: prompts without tokens.
    """
    if min(count, length) < 1:
        raise ValueError(f"{count} prompts of {length} tokens: figures need at least 1 of both")
    task = task_of(tokenizer, max(length, 128), seed)
    examples = (TASKS["perplexity"](task, i) for i in range(count))
    return np.array([(e.context + e.questions[0].continuation)[:length] for e in examples], np.int32)


def task_of(tokenizer: Any, length: int, seed: int) -> Task:
    """What builders of examples need."""
    return Task(lambda text: tokenizer(text, add_special_tokens=False).input_ids, _bos(tokenizer), length, seed)


def _bos(tokenizer: Any) -> tuple[int, ...]:
    return () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
