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

from kvjax import Policy
from kvjax.experiments import corpus
from kvjax.experiments.core.engine import Prompt, prompts_of
from kvjax.experiments.core.provenance import definition
from kvjax.experiments.core.setup import read_text
from kvjax.experiments.harness import lm_eval_module
from kvjax.experiments.harness.longbench import available
from kvjax.experiments.papers.methods import Budget
from kvjax.experiments.papers.tables import DATA, LONGBENCH, DataSet
from kvjax.experiments.tasks import needle_number, single_needle
from kvjax.experiments.tasks.base import Example, Question, Task, Tokens
from kvjax.experiments.tasks.rows import object_of, of_file
from kvjax.models.presets import PLACE

SCORED: Final = 64  # the last tokens of a text, whose likelihood is measured
WITH_ROWS: Final = ("rows", "text", "stream", "needle")  # runners of data sets that are read from files
CLASSIFICATION: Final = "classification"  # LongBench's, which needs to know the classes
PROJECT: Final = "project"  # in place of a path: text of the project's own
_SUFFIXES: Final = (".jsonl", ".json", ".txt")


class PromptRow(NamedTuple):
    """One prompt of a data set.

    Attributes:
      prompt: everything that is read before the answer.
      answers: references; the best counts.
      classes: of a classification, all there are.
    """

    prompt: str
    answers: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


class Source(NamedTuple):
    """Where a data set's rows are.

    Attributes:
      name: the data set, of `catalogue.DATA`.
      path: a file; None for the project's own text, and for a row that the paper prints.
    """

    name: str
    path: pathlib.Path | None


def sources(names: tuple[str, ...], data: str | None) -> tuple[list[Source], list[str]]:
    """The files of data sets, and what is missing of the others.

    Args:
      names: data sets.
      data: a directory with a file for each, `<name>.jsonl`, `.json` or `.txt`; one file for all of them; "project" for
        the project's own text; None for nothing.

    Raises:
      ValueError: a path that does not exist.
    """
    path = None if data is None or data == PROJECT else pathlib.Path(data).expanduser()
    if path is not None and not path.exists():
        raise ValueError(f"--data {data} does not exist; give a directory, a file, or {PROJECT!r}")
    found, missing = [], []
    for name in names:
        if DATA[name].runner not in WITH_ROWS:
            continue
        places = [] if path is None else [path, *(path / f"{name}{suffix}" for suffix in _SUFFIXES)]
        if DATA[name].question or data == PROJECT:
            found.append(Source(name, None))
        elif file := next((place for place in places if place.is_file()), None):
            found.append(Source(name, file))
        else:
            hub = DATA[name].hub
            origin = f", from {hub} on the hub" if hub else ""
            missing.append(f"{name}: no {name}.jsonl, .json or .txt{f' in {path}' if path else ''}{origin}")
    return found, missing


def prompt_rows(source: Source, count: int | None, seed: int) -> tuple[list[PromptRow], list[str]]:
    """The first rows of a source, and the rows that are none, by where they stand and what is wrong.

    A `.txt` file is cut into rows at blank lines. JSON rows have `context`, `question` and `answers`, and may have
    `answer_prefix`; or `origin_prompt`, a whole prompt, and `gold`, its answers. Rows with classes have `all_classes`.
    Rows with `input` are LongBench's own, whose prompts lm-eval has; those with the fields of a data set on the hub
    (`DataSet.fields`) are asked what the catalogue says.

    Raises:
      ValueError: a file that is neither, or that has no row.
    """
    if printed := DATA[source.name].question:
        return [PromptRow(printed)], []
    if source.path is None:
        return [_own(source.name, i, seed) for i in range(count or 16)], []
    rows, faults = [], []
    for number, row in _stored(source.path):
        if len(rows) == count:
            break
        try:
            rows.append(_row(object_of(row), source.name))
        except ValueError as e:
            faults.append(f"{source.path.name}, row {number}: {e}")
    if not rows:
        raise ValueError(f"{source.path} has no row that can be read{f' ({faults[0]})' if faults else ''}")
    return rows, faults


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


def asked(
    task: str, index: int, ids: Tokens, *, new_tokens: int, beams: int, seed: int, scored: int = SCORED, meta: Any = ()
) -> Prompt:
    """A row's prompt: of a text its last `scored` tokens are predicted, after others an answer is generated.

    Answers are scored when the table is made, in every metric of its columns.
    """
    data = data_of(task)
    stop = () if data.stop is None else (data.stop,)
    question = Question(metric="", max_new_tokens=new_tokens, stop=stop, num_beams=beams)
    if data.runner == "text":
        ids, question = ids[:-scored], Question(continuation=ids[-scored:])
    (made,) = prompts_of(Example(task, index, ids, (question,), meta), "in_prompt", seed)
    return made


def needles(source: Source, count: int | None, task: Task) -> list[Example]:
    """A needle in a file's text, or the project's own, at `count` pairs of length and depth; at all without a count."""
    if source.path is None:
        return [single_needle(task, i) for i in range(count or 32)]
    if source.path.suffix != ".txt":
        raise ValueError(f"a needle is hidden in running text, but {source.path} is none; give {source.name}.txt")
    task = dataclasses.replace(task, text=read_text(str(source.path)))
    return [needle_number(task, i) for i in range(count or 44)]


def any_tokens(name: str, index: int, length: int, vocab_size: int, seed: int) -> Tokens:
    """A prompt of any tokens, of the length that is timed or of `length`, if that is less."""
    draw = np.random.default_rng([seed, index])
    return tuple(int(i) for i in draw.integers(3, vocab_size, min(DATA[name].words or 1, length)))


def scored_part(name: str, output: str) -> str:
    """What LongBench's own script scores of an output: of four sets, the first line."""
    return output.lstrip("\n").split("\n")[0] if DATA[name].first_line else output


def task_of(name: str, shots: int) -> str:
    """How samples name a data set: with how many examples stand before the question, for texts if there are any."""
    return f"{name} {shots}-shot" if DATA[name].runner == "harness" or shots else name


def data_of(task: str) -> DataSet:
    """The data set of a task that samples name."""
    return DATA[task.split(" ")[0]]


def metric_of(name: str, metric: str) -> str:
    """The metric of a data set in a column: LongBench's sets have their own."""
    return DATA[name].metric or "" if metric == LONGBENCH else metric


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


def accuracies(
    name: str,
    shots: int,
    policy: Policy,
    budget: Budget,
    block: int | None,
    *,
    examples: int | None,
    tasks: pathlib.Path | None,
    **how: Any,
) -> list[float]:
    """Whether each row of a task of lm-eval is answered right: by `acc_norm` where the task has it.

    The papers do not say which accuracy theirs is. Full scores such as 44.8 for OpenBookQA are of `acc_norm`'s size.

    Args:
      name, shots: the data set, and how many examples stand before each question.
      policy, budget, block: what runs.
      tasks: a directory of tasks, which may read local data; None for lm-eval's own, which download theirs.
      examples: rows at most; all if None.
      **how: for `HarnessModel`.

    Raises:
      ValueError: lm-eval is not installed, has no such task, or cannot load its data.
    """
    evaluator, of_tasks = lm_eval_module("evaluator"), lm_eval_module("tasks")
    language_model: Any = importlib.import_module("kvjax.experiments.harness.language_model")
    manager = of_tasks.TaskManager(include_path=tasks and str(tasks), include_defaults=tasks is None)
    model = language_model.HarnessModel(policy=policy, budget=budget, block=block, **how)
    task = str(DATA[name].task)
    try:
        found = evaluator.simple_evaluate(
            model=model, tasks=[task], num_fewshot=shots, limit=examples, task_manager=manager, log_samples=True,
            bootstrap_iters=0,
        )  # fmt: skip
    except Exception as e:  # lm-eval and datasets raise what they like
        raise ValueError(
            f"{task} of lm-eval cannot be run under {definition(policy):.60}: {type(e).__name__}: {e}"
        ) from e
    samples = sorted(found["samples"][task], key=lambda s: s["doc_id"])
    return [float(s["acc_norm"] if "acc_norm" in s else s["acc"]) for s in samples]
