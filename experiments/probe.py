"""Finds once what some methods must know of a model.

    python experiments/probe.py filters --model DIR --output filters.npy
    python experiments/probe.py heads --model DIR --output heads.npy
    python experiments/probe.py kvzap --model DIR --output kvzap.npz
    python experiments/probe.py queries --model DIR --output queries.npz

"filters" are the directions of its queries, which Q-Filters compares keys to (`run.py --config q_filters.py --filters
filters.npy`); "heads" how much every head looks at what an answer is read from, which HeadKV divides budgets by
(`--config headkv.py --importance heads.npy`); "kvzap" is a function of its hidden states that says what KVzip+ would
score, fitted to the same questions (`--config kvzap.py --function kvzap.npz`); "queries" the mean and covariance of its
queries, by which Expected Attention can model those to come (`--config expected_attention.py --queries queries.npz`).
What these configs need of the models that come with the project stands beside their weights.
"""

import importlib

if __name__ == "__main__":  # before imports that take seconds
    importlib.import_module(f"{__package__ or ''}.stopping".lstrip(".")).begin()

import dataclasses
import io
import pathlib
import sys
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro

from kvjax import models
from kvjax.configs.experiment import check_whole
from kvjax.drivers.text import repeating
from kvjax.experiments.core.command import check_output, plain_errors
from kvjax.experiments.core.compiled import keep_compiled
from kvjax.experiments.core.setup import read_text
from kvjax.experiments.tasks import retrieval
from kvjax.experiments.tasks.base import Task
from kvjax.experiments.tasks.text import filler
from kvjax.learning import kvzap
from kvjax.learning.probes import fit_filters, fit_queries, head_importance
from kvjax.models.embedded import included
from kvjax.models.written import write_bytes
from kvjax.scores.learned import HiddenHeads

TEXTS = 4  # that are read, and read again, at once
ASKED = ("single_needle", "several_needles", "key_value")


@dataclasses.dataclass(frozen=True)
class Probe:
    """What to find, and of which model.

    Attributes:
      name: "filters", "heads", "kvzap" or "queries".
      output: the file to write: an array of numpy (.npy), or for kvzap and queries several (.npz).
      model: "embedded", "varied", or a checkpoint.
      text: a file of text to read; the project's sentences if None.
      examples: pieces of text, or questions.
      length: tokens of a piece, or of a question with its context.
      seed: where pieces begin, and what is asked.
      units: of the hidden layer of kvzap's function; None for a linear one.
      steps: of fitting it.
    """

    name: Annotated[Literal["filters", "heads", "kvzap", "queries"], tyro.conf.Positional]
    output: pathlib.Path
    model: str = "embedded"
    text: str | None = None
    examples: int = 32
    length: int = 512
    seed: int = 0
    units: int | None = None
    steps: int = 2000

    def __post_init__(self):
        check_whole(1, examples=self.examples, length=self.length, steps=self.steps)
        check_whole(0, seed=self.seed)
        if self.units is not None:
            check_whole(1, units=self.units)


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


def fitted(model: Any, params: Any, tokenizer: Any, probe: Probe) -> HiddenHeads:
    """KVzap's function, fitted to what KVzip+ scores of facts, questions and answers; says how well it does so."""
    tokens, _, _, lengths = questions(tokenizer, probe)
    replay = dataclasses.replace(repeating(tokenizer), plus=True)
    some = [slice(at, at + TEXTS) for at in range(0, len(tokens), TEXTS)]
    found = [kvzap.examples(model, params, tokens[i], replay=replay, lengths=lengths[i]) for i in some]
    hidden, wanted = (np.concatenate(each, axis=1) for each in zip(*found, strict=True))
    function, losses = kvzap.fit(hidden, wanted, units=probe.units, steps=probe.steps, key=jax.random.key(probe.seed))
    error = losses[-max(len(losses) // 20, 1) :].mean()
    share = 1 - error / wanted.var(1).mean()
    print(f"of the variance of {wanted.shape[1]:,} tokens' logarithms, the function says {share:.0%}")
    return function


def run(probe: Probe) -> None:
    """Reads the text, and writes what is found."""
    check_output(probe.output)
    model, params = models.load(included(probe.model))
    tokenizer = models.load_tokenizer(included(probe.model))
    file = io.BytesIO()
    if probe.name == "kvzap":
        weights: dict[str, Any] = {**fitted(model, params, tokenizer, probe).weights}
        np.savez(file, **weights)
    elif probe.name == "queries":
        moments: dict[str, Any] = {**fit_queries(model, params, pieces(tokenizer, probe))}
        np.savez(file, **moments)
    elif probe.name == "filters":
        np.save(file, fit_filters(model, params, pieces(tokenizer, probe))["filters"])
    else:
        tokens, wanted, answers, lengths = questions(tokenizer, probe)
        np.save(file, head_importance(model, params, tokens, wanted, answers, lengths=lengths))
    write_bytes(probe.output, file.getvalue())
    size = model.config
    print(f"{probe.name} of {size.num_layers} layers and {size.num_kv_heads} kv heads written to {probe.output}")


if __name__ == "__main__":
    with plain_errors():
        argv = keep_compiled(sys.argv[1:])
        run(tyro.cli(Probe, description=__doc__, args=argv))
