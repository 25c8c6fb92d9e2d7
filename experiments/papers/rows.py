"""Prompts and answers of data sets: local files, the project's own text, any tokens; and tasks of lm-eval."""

import dataclasses
import functools
import importlib
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from kvjax.experiments import corpus
from kvjax.experiments.core.provenance import definition
from kvjax.experiments.core.setup import read_text
from kvjax.experiments.harness import lm_eval_module
from kvjax.experiments.harness.longbench import available
from kvjax.experiments.papers.tables import DATA
from kvjax.experiments.tasks import needle_number, single_needle
from kvjax.experiments.tasks.base import Task, Tokens
from kvjax.experiments.tasks.rows import object_of, of_file
from kvjax.models.presets import PLACE

SCORED: Final = 64  # the last tokens of a text, whose likelihood is measured
WITH_ROWS: Final = ("rows", "text", "stream", "needle")  # runners of data sets that are read from files
APART: Final = ("harness", "planned")  # runners of those that no engine runs
CLASSIFICATION: Final = "classification"  # LongBench's, which needs to know the classes
PROJECT: Final = "project"  # in place of a path: text of the project's own
_SUFFIXES: Final = (".jsonl", ".json", ".txt")


class PromptRow(NamedTuple):
    """One prompt of a data set.

    Attributes:
      prompt: everything that is read before the answer: a text, or token ids.
      answers: references; the best counts.
      classes: of a classification, all there are.
      meta: of a needle, where it is.
    """

    prompt: str | Tokens
    answers: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    meta: tuple[tuple[str, float | str], ...] = ()


def files(names: tuple[str, ...], data: str | None) -> tuple[dict[str, pathlib.Path | None], list[str]]:
    """Where the rows of data sets are, and what is missing of the others.

    Args:
      names: data sets.
      data: a directory with a file for each, `<name>.jsonl`, `.json` or `.txt`; one file for all of them; "project" for
        the project's own text; None for nothing.

    Returns:
      A file for each that is there, None for the project's own text, and for a row that the paper prints.

    Raises:
      ValueError: a path that does not exist.
    """
    path = None if data is None or data == PROJECT else pathlib.Path(data).expanduser()
    if path is not None and not path.exists():
        raise ValueError(f"--data {data} does not exist; give a directory, a file, or {PROJECT!r}")
    found: dict[str, pathlib.Path | None] = {}
    missing = []
    for name in (n for n in names if DATA[n].runner in WITH_ROWS):
        places = [] if path is None else [path, *(path / f"{name}{suffix}" for suffix in _SUFFIXES)]
        file = next((place for place in places if place.is_file()), None)
        if file or DATA[name].question or data == PROJECT:
            found[name] = None if DATA[name].question else file
        else:
            where, hub = f" in {path}" if path else "", DATA[name].hub
            missing.append(f"{name}: no {name}.jsonl, .json or .txt{where}{f', from {hub} on the hub' if hub else ''}")
    return found, missing


def prompt_rows(
    name: str, path: pathlib.Path | None, count: int | None, task: Task, vocab_size: int
) -> tuple[list[PromptRow], list[str]]:
    """The first rows of a data set, and the rows that are none, by where they stand and what is wrong.

    A `.txt` file is cut into rows at blank lines; a needle is hidden in it, at pairs of length and depth. JSON rows
    have `context`, `question` and `answers`, and may have `answer_prefix`; or `origin_prompt`, a whole prompt, and
    `gold`, its answers. Rows with classes have `all_classes`. Rows with `input` are LongBench's own, whose prompts
    lm-eval has; those with the fields of a data set on the hub (`DataSet.fields`) are asked what the catalogue says.
    What is timed has rows of any tokens.

    Args:
      name: the data set.
      path: its file; None for the project's own text.
      count: so many rows; all if None, or as many as there is reason for where there is no end.
      task: the tokenizer, the seed, and the most tokens of a prompt.
      vocab_size: of the model.

    Raises:
      ValueError: a file that is neither, or that has no row.
    """
    data = DATA[name]
    if data.runner == "speed":
        length = min(data.words or 1, task.length)
        draws = (np.random.default_rng([task.seed, i]).integers(3, vocab_size, length) for i in range(count or 5))
        return [PromptRow(tuple(map(int, ids))) for ids in draws], []
    if data.runner == "needle":
        return _hidden(name, path, task, count), []
    if data.question:
        return [PromptRow(data.question)], []
    if path is None:
        return [_own(name, i, task.seed) for i in range(count or 16)], []
    found, faults = list[PromptRow](), list[str]()
    for number, row in _stored(path):
        if len(found) == count:
            break
        try:
            found.append(_row(object_of(row), name))
        except ValueError as e:
            faults.append(f"{path.name}, row {number}: {e}")
    if not found:
        raise ValueError(f"{path} has no row that can be read{f' ({faults[0]})' if faults else ''}")
    return found, faults


def _hidden(name: str, path: pathlib.Path | None, task: Task, count: int | None) -> list[PromptRow]:
    """Needles in a file's text, or in the project's own.

    Raises:
      ValueError: a file of rows.
    """
    if path is not None and path.suffix != ".txt":
        raise ValueError(f"a needle is hidden in running text, but {path} is none; give {name}.txt")
    build, most = (single_needle, 32) if path is None else (needle_number, 44)
    task = task if path is None else dataclasses.replace(task, text=read_text(str(path)))
    asked = [(x, *x.questions) for x in (build(task, i) for i in range(count or most))]
    return [PromptRow((*x.context, *question.ids), question.references, meta=x.meta) for x, question in asked]


def _stored(path: pathlib.Path) -> Iterable[tuple[int, Any]]:
    """The rows of a file, with their numbers."""
    if path.suffix != ".txt":
        return of_file(path)
    parts = (part.strip() for part in read_text(str(path)).split("\n\n"))
    return ((i, {"context": part}) for i, part in enumerate(parts, 1) if part)


def _row(row: Mapping[str, Any], name: str) -> PromptRow:
    """A row's prompt and answers, whichever of the forms it has."""
    gold, fields = row.get("gold", row), DATA[name].fields
    gold = gold if isinstance(gold, dict) else {"answers": gold}
    answers = gold.get("answers", ())
    if "input" in row:
        parts = [_longbench_prompt(name, row)]
    elif fields and fields[0] in row:
        text, *answers = (row.get(field) for field in fields)
        if isinstance(text, list):  # a dialogue, whose last turn is the answer
            text, answers = "\n".join(map(str, text[:-1])), text[-1:]
        parts = [DATA[name].prompt.replace(PLACE, text) if isinstance(text, str) and text.strip() else ""]
        answers = [*filter(None, answers)]
    elif "origin_prompt" in row:
        parts = [row["origin_prompt"]]
    else:
        context, question, prefix = (row.get(field) or "" for field in ("context", "question", "answer_prefix"))
        parts = [context, "\n" if context and question else "", question, prefix]
    answers = [answers] if isinstance(answers, str) else answers
    if not all(isinstance(part, str) for part in parts) or not "".join(parts).strip():
        raise ValueError("no text in any of context, origin_prompt")
    if not isinstance(answers, list | tuple) or not all(isinstance(a, str) and a.strip() for a in answers):
        raise ValueError(f"answers must be texts, not {answers!r:.80}")
    return PromptRow("".join(parts), tuple(answers), tuple(gold.get("all_classes") or ()))


def _longbench_prompt(name: str, row: Mapping[str, Any]) -> str:
    """The prompt that lm-eval makes of a row of LongBench's own files.

    Raises:
      ValueError: lm-eval is not installed, or has no such set.
    """
    texts: dict[str, Any] = {"{{context}}": row.get("context"), "{{question}}": row["input"]}
    if wrong := [place for place, text in texts.items() if not isinstance(text, str)]:
        raise ValueError(f"the text for {wrong[0]} is {texts[wrong[0]]!r:.80}")
    return "".join(texts.get(part, part) for part in re.split(r"({{\w+}})", _template(name)))


@functools.cache
def _template(name: str) -> str:
    if name not in available():
        raise ValueError(f"lm-eval has no prompt for {name}; give whole prompts as origin_prompt")
    (found,) = re.findall(r'^doc_to_text: (".*")$', available()[name].read_text(), re.MULTILINE)
    return json.loads(found)


def _own(name: str, index: int, seed: int) -> PromptRow:
    """A prompt of the project's own language: filler, four facts, and a question about one; the answer is its value."""
    rng = np.random.default_rng([seed, index, *name.encode()])
    names = [corpus.NAMES[i] for i in rng.permutation(len(corpus.NAMES))[:4]]
    values = [corpus.draw_value(rng) for _ in names]
    phrasing = corpus.PHRASINGS[rng.integers(len(corpus.PHRASINGS))]
    sentences = [list(corpus.filler(rng, "held_out")) for _ in range(60)]
    for place, who, value in zip(rng.integers(0, 60, 4), names, values, strict=True):
        sentences[place] += corpus.fact(phrasing, who, value)
    text = corpus.words(*sentences, corpus.question(phrasing, names[:1]))
    whole = tuple(" ".join(v) for v in values)
    first = {"retrieval": f"Paragraph {values[0][0]}", "count": values[0][0]}.get(DATA[name].metric or "", whole[0])
    return PromptRow(" ".join(text), (first,), whole)


def classification(output: str, answer: str, classes: tuple[str, ...]) -> float:
    """LongBench's accuracy: one over the number of classes that the output names, if the right one is among them.

    Names that are part of the right class's name do not count against it.
    """
    named = [c for c in classes if c in output and (c == answer or c not in answer)]
    return 1 / len(named) if answer in named else 0.0


# --- tasks of lm-eval ---


def own_tasks(data: str | None) -> pathlib.Path | None:
    """The directory of `--data`, if it holds tasks for lm-eval in place of those that it comes with."""
    folder = None if data is None else pathlib.Path(data).expanduser()
    return folder if folder is not None and folder.is_dir() and any(folder.glob("*.yaml")) else None


def accuracies(name: str, shots: int, examples: int | None, tasks: pathlib.Path | None, **how: Any) -> list[float]:
    """Whether each row of a task of lm-eval is answered right: by `acc_norm` where the task has it.

    The papers do not say which accuracy theirs is. Full scores such as 44.8 for OpenBookQA are of `acc_norm`'s size.

    Args:
      name, shots: the data set, and how many examples stand before each question.
      examples: rows at most; all if None.
      tasks: a directory of tasks, which may read local data; None for lm-eval's own, which download theirs.
      **how: what runs, for `HarnessModel`.

    Raises:
      ValueError: lm-eval is not installed, has no such task, or cannot load its data.
    """
    evaluator, of_tasks = lm_eval_module("evaluator"), lm_eval_module("tasks")
    language_model: Any = importlib.import_module("kvjax.experiments.harness.language_model")
    manager = of_tasks.TaskManager(include_path=tasks and str(tasks), include_defaults=tasks is None)
    model = language_model.HarnessModel(**how)
    task = str(DATA[name].task)
    try:
        found = evaluator.simple_evaluate(
            model=model, tasks=[task], num_fewshot=shots, limit=examples, task_manager=manager, log_samples=True,
            bootstrap_iters=0,
        )  # fmt: skip
    except Exception as e:  # lm-eval and datasets raise what they like
        raise ValueError(
            f"{task} of lm-eval cannot be run under {definition(how['policy']):.60}: {type(e).__name__}: {e}"
        ) from e
    samples = sorted(found["samples"][task], key=lambda s: s["doc_id"])
    return [float(s["acc_norm"] if "acc_norm" in s else s["acc"]) for s in samples]
