"""What lm-eval writes to its `--output_path`: a file of results for each call, and one of samples for each task."""

import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

from kvjax.experiments.page.lines import Found, Given, Line, Place, Run, Setting, in_blocks, model_name

# What a model of this project says of itself that may differ between numbers that stand beside each other.
_POLICY = ("policy", "block")


def result_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """The files of results in a directory, the newest first; with each, those of the same task and policy are older."""
    return sorted(directory.glob("results_*.json"), reverse=True)


def read_lm_eval(file: pathlib.Path, found: Found) -> None:
    """Adds the rows of one call, and its numbers that come without rows.

    Rows of two calls are the same where prompt and number are. Only metrics whose rows are all in [0, 1] have rows. The
    first metric of a task stands for it in averages.

    Raises:
      ValueError: a file that is broken or not lm-eval's.
    """
    content = _object(file)
    results, config = content.get("results"), content.get("config")
    if not isinstance(results, dict) or not isinstance(config, dict):
        raise ValueError(f"{file} is not what lm-eval writes: it has no results or no config")
    stamp = file.name.removeprefix("results").removesuffix(".json")
    setting, method, budget, policy = _described(content, config)
    hashes = content.get("task_hashes") if isinstance(content.get("task_hashes"), dict) else {}
    groups = {name for name, tasks in (content.get("group_subtasks") or {}).items() if tasks}
    for task, values in results.items():
        if task in groups or not isinstance(values, dict):
            continue
        lines = file.with_name(f"samples_{task}{stamp}.jsonl")
        run = Run(file.parent.name, file, lines if lines.is_file() else None, _made(content))
        found.runs.append(run)
        variant = json.dumps(
            [content.get("versions", {}).get(task), content.get("n-shot", {}).get(task), hashes.get(task)]
        )
        place = lambda name, first, task=variant: Place(setting, name, task, method, budget, policy, first)
        samples = [] if run.lines is None else _samples(run.lines)
        with_rows, first = set(), True
        for label, metric, filtered, rows in _metrics(task, samples):
            with_rows.add(f"{metric},{filtered}")
            for number, sample, value in rows:
                key = (sample.get("doc_id"), sample.get("prompt_hash"))
                found.lines.append(Line(place(label, first), run, number, key, key, "score", value, sample, (metric,)))
            first = False
        if not with_rows:
            for name, value in _numbers(values):
                error = values.get(name.replace(",", "_stderr,", 1))
                usable = isinstance(error, int | float) and math.isfinite(error)
                found.given.append(
                    Given(place(f"{task} {name.partition(',')[0]}", False), run, value, error if usable else None)
                )


def _object(file: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{file} is broken ({type(e).__name__}: {e})") from e
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not what lm-eval writes: it is no object")
    return content


def _described(content: dict[str, Any], config: dict[str, Any]) -> tuple[Setting, str, str, str]:
    """The setting, method, budget and policy of a call."""
    given = config.get("model_args") or {}
    if isinstance(given, str):
        given = dict(pair.split("=", 1) for pair in given.split(",") if "=" in pair)
    ours = config.get("kvjax") if isinstance(config.get("kvjax"), dict) else {}
    name = model_name(str(given.get("pretrained", content.get("model_name", "?"))))
    details = {k: v for k, v in ours.items() if k not in _POLICY}
    for key in ("chat_template_sha", "system_instruction_sha", "fewshot_as_multiturn"):
        details |= {key: content[key]} if content.get(key) else {}
    setting = Setting(name, "in_prompt", (("harness", "lm-eval"), *((k, str(v)) for k, v in sorted(details.items()))))
    if config.get("model") != "kvjax":
        return setting, str(config.get("model")), "1.0", json.dumps(given, sort_keys=True, default=str)
    budget = given.get("budget")
    method = str(given.get("policy", "full"))
    label = "1.0" if method == "full" else "-" if budget is None else str(budget)
    whole = in_blocks(str(ours.get("policy", given)), None if method == "full" else ours.get("block"))
    return setting, method, label, whole


def _made(content: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    known = {"harness": f"lm-eval {content.get('lm_eval_version', '?')}", "commit": content.get("git_hash")}
    return tuple((k, str(v)) for k, v in known.items() if v)


def _samples(file: pathlib.Path) -> list[dict[str, Any]]:
    samples = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            sample = json.loads(line)
            _ = {**sample}
        except (ValueError, TypeError, RecursionError) as e:
            raise ValueError(f"line {number} of {file} is broken ({type(e).__name__}: {e})") from e
        samples.append(sample)
    return samples


_Rows = list[tuple[int, dict[str, Any], float]]


def _metrics(task: str, samples: list[dict[str, Any]]) -> Iterator[tuple[str, str, str, _Rows]]:
    """(label, metric, filter, rows) of all metrics that have rows; the first one's label is the task's name."""
    found: list[tuple[str, str, _Rows]] = []
    for filtered in dict.fromkeys(str(s.get("filter", "none")) for s in samples):
        of = [(n, s) for n, s in enumerate(samples, 1) if str(s.get("filter", "none")) == filtered]
        for metric in dict.fromkeys(m for _, s in of for m in s.get("metrics", ())):
            rows = [(n, s, float(v)) for n, s in of if isinstance(v := s.get(metric), int | float) and 0 <= v <= 1]
            if len(rows) == len(of):
                found.append((metric, filtered, rows))
    several = len({f for _, f, _ in found}) > 1
    for i, (metric, filtered, rows) in enumerate(found):
        yield (f"{task} {metric}{f' {filtered}' if several else ''}" if i else task), metric, filtered, rows


def without_repeats(lines: list[Line]) -> list[Line]:
    """The lines without those of metrics that are a task's first one under another name, equal on every row."""
    values: dict[Run, dict[str, list[float]]] = {}
    for line in lines:
        if line.run.manifest.name.startswith("results_"):
            values.setdefault(line.run, {}).setdefault(line.place.task, []).append(line.value)
    differ: dict[str, bool] = {}
    for of in values.values():
        first, *others = of
        for name in others:
            differ[name] = differ.get(name, False) or of[name] != of[first]
    return [line for line in lines if differ.get(line.place.task, True)]


def _numbers(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The metrics of a task that are numbers."""
    for name, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if number and "," in name and "_stderr," not in name:
            yield name, float(value)
