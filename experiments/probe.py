"""Finds once what some methods must know of a model.

    python experiments/probe.py filters --model DIR --output filters.npy
    python experiments/probe.py heads --model DIR --output heads.npy

"filters" are the directions of its queries, which Q-Filters compares keys to (`run.py --config q_filters.py --filters
filters.npy`); "heads" how much every head looks at what an answer is read from, which HeadKV divides budgets by
(`--config headkv.py --importance heads.npy`). Those of the models that come with the project stand beside their
weights.
"""

import dataclasses
import io
import pathlib
import sys
from typing import Annotated, Any, Literal

import numpy as np
import tyro

import models
from configs.experiment import check_whole
from experiments.evaluation.compiled import keep_compiled
from experiments.evaluation.examples import read_text
from experiments.evaluation.results import check_options, check_values, plain_errors, write_bytes
from experiments.tasks import retrieval
from experiments.tasks.base import Task
from experiments.tasks.text import filler
from kvjax.learning.probes import fit_filters, head_importance
from models.embedded import included

ASKED = ("single_needle", "several_needles", "key_value")


@dataclasses.dataclass(frozen=True)
class Probe:
    """What to find, and of which model.

    Attributes:
      name: "filters" or "heads".
      output: the file to write, an array of numpy.
      model: "embedded", "varied", or a checkpoint.
      text: a file of text to read; the project's sentences if None.
      examples: pieces of text, or questions.
      length: tokens of a piece, or of a question with its context.
      seed: where pieces begin, and what is asked.
    """

    name: Annotated[Literal["filters", "heads"], tyro.conf.Positional]
    output: pathlib.Path
    model: str = "embedded"
    text: str | None = None
    examples: int = 32
    length: int = 512
    seed: int = 0

    def __post_init__(self):
        check_whole(1, examples=self.examples, length=self.length)
        check_whole(0, seed=self.seed)


def pieces(tokenizer: Any, probe: Probe) -> np.ndarray:
    """Pieces of a text "B T", from random places.

    Raises:
      ValueError: a text that is too short.
    """
    rng = np.random.default_rng(probe.seed)
    text = " ".join(filler(rng, 2 * probe.length)) if probe.text is None else read_text(probe.text)
    ids = np.asarray(tokenizer(text, add_special_tokens=False).input_ids, np.int32)
    if len(ids) < probe.length:
        raise ValueError(f"the text has {len(ids)} tokens, but a piece {probe.length}; give a longer --text")
    starts = rng.integers(len(ids) - probe.length + 1, size=probe.examples)
    return np.stack([ids[start : start + probe.length] for start in starts])


def questions(tokenizer: Any, probe: Probe) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Facts with questions and their right answers: tokens "B T", which are wanted, answers' and prompts' lengths."""
    encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    text = "" if probe.text is None else read_text(probe.text)
    task = Task(encode, bos, probe.length, probe.seed, text, tokenizer)
    prompts, wanted, answers = [], [], []
    for i in range(probe.examples):
        name = ASKED[i % len(ASKED)]
        example = getattr(retrieval, name)(task, i // len(ASKED))
        (question,), meta = example.questions, dict(example.meta)
        answer = task.ids(question.references[0].split())
        start, size = int(meta["needle_at"]), int(meta["needle_tokens"])
        fact = example.context[start : start + size]
        at = next((j for j in range(size) if fact[j : j + len(answer)] == answer), None)
        prompts.append(example.context + question.ids + answer)
        first, count = (start, size) if at is None else (start + at, len(answer))
        wanted.append((first, count))
        answers.append(len(answer))
    tokens, lengths = models.pad_left(prompts)
    mask = np.zeros(tokens.shape, bool)
    for row, (first, count), length in zip(mask, wanted, lengths, strict=True):
        pad = mask.shape[1] - length
        row[pad + first : pad + first + count] = True
    return np.asarray(tokens), mask, np.asarray(answers), np.asarray(lengths)


def run(probe: Probe) -> None:
    """Reads the text, and writes what is found."""
    model, params = models.load(included(probe.model))
    tokenizer = models.load_tokenizer(included(probe.model))
    if probe.name == "filters":
        found = fit_filters(model, params, pieces(tokenizer, probe))["filters"]
    else:
        tokens, wanted, answers, lengths = questions(tokenizer, probe)
        found = head_importance(model, params, tokens, wanted, answers, lengths=lengths)
    file = io.BytesIO()
    np.save(file, found)
    write_bytes(probe.output, file.getvalue())
    print(f"{probe.name} of {found.shape[0]} layers and {found.shape[1]} kv heads written to {probe.output}")


if __name__ == "__main__":
    with plain_errors():
        argv = keep_compiled(sys.argv[1:])
        check_values(argv)
        check_options(argv)
        run(tyro.cli(Probe, description=__doc__, args=argv))
