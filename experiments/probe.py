"""Finds once what some methods must know of a model.

    python experiments/probe.py centres --model DIR --output centres.npz
    python experiments/probe.py filters --model DIR --output filters.npy
    python experiments/probe.py heads --model DIR --output heads.npy
    python experiments/probe.py kvzap --model DIR --output kvzap.npz
    python experiments/probe.py queries --model DIR --output queries.npz

What configs need of the models that come with the project stands beside their weights.
"""

import dataclasses
import io
import pathlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import numpy as np
import tyro

from kvjax import models
from kvjax.configs.experiment import check_whole
from kvjax.experiments.core.command import as_command, check_output, parsed
from kvjax.experiments.core.setup import read_text
from kvjax.experiments.tasks import retrieval
from kvjax.experiments.tasks.base import check_known, task_of
from kvjax.experiments.tasks.text import filler
from kvjax.learning import kvzap as zap
from kvjax.learning.probes import fit_centres, fit_filters, fit_queries, head_importance
from kvjax.models.embedded import included
from kvjax.models.written import write_bytes
from kvjax.text.encode import repeating

TEXTS = 4  # that are read, and read again, at once
ASKED = ("single_needle", "several_needles", "key_value")


@dataclasses.dataclass(frozen=True)
class Probe:
    """Of which model, and from what.

    Attributes:
      output: the file to write: an array of numpy (.npy), or for centres, kvzap and queries several (.npz).
      model: "embedded", "varied", or a checkpoint.
      text: a file of text to read; the project's sentences if None.
      examples: pieces of text, or questions.
      length: tokens of a piece, or of a question with its context.
      seed: where pieces begin, and what is asked.
    """

    output: pathlib.Path
    model: str = "embedded"
    text: str | None = None
    examples: int = 32
    length: int = 512
    seed: int = 0

    def __post_init__(self):
        check_whole(1, examples=self.examples, length=self.length)
        check_whole(0, seed=self.seed)


Given = Annotated[Probe, tyro.conf.arg(name="")]


def pieces(tokenizer: Any, probe: Probe) -> np.ndarray:
    """Pieces of a text "B T", from random places.

    Raises:
      ValueError: a text that is too short, or has words that the tokenizer does not know.
    """
    rng = np.random.default_rng(probe.seed)
    text = " ".join(filler(rng, 2 * probe.length)) if probe.text is None else read_text(probe.text)
    ids = np.asarray(tokenizer(text, add_special_tokens=False).input_ids, np.int32)
    check_known("the text", ids.tolist(), tokenizer)
    if len(ids) < probe.length:
        raise ValueError(f"the text has {len(ids)} tokens, but a piece {probe.length}; give a longer --text")
    starts = rng.integers(len(ids) - probe.length + 1, size=probe.examples)
    return np.stack([ids[start : start + probe.length] for start in starts])


def questions(tokenizer: Any, probe: Probe) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Facts with questions and their right answers: tokens "B T", which are wanted, answers' and prompts' lengths."""
    task = task_of(tokenizer, probe.length, probe.seed, "" if probe.text is None else read_text(probe.text))
    prompts, wanted, answers = [], [], []
    for i in range(probe.examples):
        name = ASKED[i % len(ASKED)]
        example = getattr(retrieval, name)(task, i // len(ASKED))
        check_known(name, example.given, tokenizer)
        (question,), meta = example.questions, dict(example.meta)
        answer = task.ids(question.references[0].split())
        start, size = int(meta["needle_at"]), int(meta["needle_tokens"])
        fact = example.context[start : start + size]
        at = next((j for j in range(size) if fact[j : j + len(answer)] == answer), None)
        prompts.append(example.context + question.ids + answer)
        first, count = (start, size) if at is None else (start + at, len(answer))
        wanted.append([int(first <= j < first + count) for j in range(len(prompts[-1]))])
        answers.append(len(answer))
    tokens, lengths = models.pad_left(prompts)
    return tokens, models.pad_left(wanted)[0].astype(bool), np.asarray(answers), lengths


def _write(probe: Probe, made: Callable[[Any, Probe], Any], find: Callable[[Any, Any, Any], Any]) -> None:
    """Writes what is found of a model, its parameters and what is made of text: an array, or several by name."""
    check_output(probe.output)
    given = made(models.load_tokenizer(included(probe.model)), probe)  # before weights are loaded
    model, params = models.load(included(probe.model))
    found, file = find(model, params, given), io.BytesIO()
    if isinstance(found, np.ndarray):
        np.save(file, found)
    else:
        np.savez(file, **found)
    write_bytes(probe.output, file.getvalue())
    size = model.config
    print(f"of {size.num_layers} layers and {size.num_kv_heads} kv heads, written to {probe.output}")


def centres(probe: Given) -> None:
    """The centres of queries, by which TriAttention ranks keys: `run.py --config triattention.py --centres FILE`."""
    _write(probe, pieces, fit_centres)


def filters(probe: Given) -> None:
    """The directions of queries, which Q-Filters compares keys to: `run.py --config q_filters.py --filters FILE`."""
    _write(probe, pieces, lambda model, params, tokens: np.asarray(fit_filters(model, params, tokens)["filters"]))


def queries(probe: Given) -> None:
    """The mean and covariance of queries, by which Expected Attention can model those to come.

    `run.py --config expected_attention.py --queries FILE`
    """
    _write(probe, pieces, fit_queries)


def heads(probe: Given) -> None:
    """How much every head looks at what an answer is read from, which HeadKV divides budgets by.

    `run.py --config headkv.py --importance FILE`
    """

    def find(model, params, asked):
        tokens, wanted, answers, lengths = asked
        return np.asarray(head_importance(model, params, tokens, wanted, answers, lengths=lengths))

    _write(probe, questions, find)


def kvzap(probe: Given, units: int | None = None, steps: int = 2000) -> None:
    """KVzap's function of hidden states, fitted to what KVzip+ scores of facts, questions and answers.

    `run.py --config kvzap.py --function FILE`

    Args:
      probe: of which model, and from what.
      units: of the hidden layer of the function; None for a linear one.
      steps: of fitting it.
    """
    check_whole(1, steps=steps, units=1 if units is None else units)

    def made(tokenizer, probe):
        return questions(tokenizer, probe), dataclasses.replace(repeating(tokenizer), plus=True)

    def find(model, params, given):
        (tokens, _, _, lengths), replay = given
        some = [slice(at, at + TEXTS) for at in range(0, len(tokens), TEXTS)]
        each = [zap.examples(model, params, tokens[i], replay=replay, lengths=lengths[i]) for i in some]
        hidden, wanted = (np.concatenate(x, axis=1) for x in zip(*each, strict=True))
        function, losses = zap.fit(hidden, wanted, units=units, steps=steps, key=jax.random.key(probe.seed))
        share = 1 - losses[-max(len(losses) // 20, 1) :].mean() / wanted.var(1).mean()
        print(f"of the variance of {wanted.shape[1]:,} tokens' logarithms, the function says {share:.0%}")
        return function.weights

    _write(probe, made, find)


@as_command
def main(argv: Sequence[str]) -> None:
    """Finds what the first argument names."""
    parsed({f.__name__: f for f in (centres, filters, heads, kvzap, queries)}, argv, "probe", __doc__)


if __name__ == "__main__":
    main()
