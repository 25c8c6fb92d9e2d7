"""LongBench from local files, as tasks of lm-eval: its prompts, metrics and options of generation, and no download.

python -m kvjax.experiments.harness.longbench --data DIR --output TASKS
python -m kvjax.experiments.harness --model kvjax --include_path TASKS --tasks longbench ...

`--data` holds a file for each set: LongBench's own `<set>.jsonl` (`input`, `context`, `answers`, `all_classes`), or
`<set>.json` with rows of `origin_prompt`, a prompt as it was read by a model, and `gold`, the answers (for sets with
classes, `answers` and `all_classes`). Prompts of the first kind are made by lm-eval's task, those of the second are
used as they are.
"""

import json
import pathlib
from typing import Any

from kvjax.experiments.core.command import script, write_json
from kvjax.experiments.harness import lm_eval_module
from kvjax.experiments.tasks.rows import object_of, of_file
from kvjax.models.written import write_bytes


def available() -> dict[str, pathlib.Path]:
    """The sets that lm-eval has a task for, and where each is.

    Raises:
      ValueError: lm-eval is not installed.
    """
    folder = pathlib.Path(str(lm_eval_module("tasks").__file__)).parent / "longbench"
    return {p.stem: p for p in sorted(folder.glob("[!_]*.yaml")) if not p.stem.endswith("_e")}


def converted(where: str, row: Any) -> dict[str, Any]:
    """A row as lm-eval's task reads it: answers, classes, and either a whole prompt or what one is made of.

    Raises:
      ValueError: a field that is missing or of another type.
    """
    try:
        row = object_of(row)
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from e
    gold = row.get("gold", row)
    gold = gold if isinstance(gold, dict) else {"answers": gold}
    answers, classes = gold.get("answers"), gold.get("all_classes") or []
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
        raise ValueError(f"{where}: answers must be a list of at least one text, not {answers!r:.80}")
    names = {"prompt": "origin_prompt"} if "origin_prompt" in row else {"context": "context", "question": "input"}
    texts = {name: row.get(field, row.get(name)) for name, field in names.items()}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"{where}: {names[name]} must be a text, not {text!r:.80}")
    return {**texts, "answers": answers, "all_classes": classes}


def write_tasks(data: pathlib.Path, output: pathlib.Path) -> list[str]:
    """Writes rows and a task for every set that `data` has, and the group "longbench" of them.

    Returns:
      The tasks' names.

    Raises:
      ValueError: no set, a row that is none, or rows of both kinds in one file.
    """
    files = {p.stem: p for p in sorted(data.glob("*.json*")) if p.suffix in (".json", ".jsonl")}
    theirs = available()
    found = [name for name in theirs if name in files]
    if not found:
        raise ValueError(f"{data} has none of {', '.join(theirs)}, as .json or .jsonl")
    output.mkdir(parents=True, exist_ok=True)
    tasks = []
    for name in found:
        rows = [converted(f"{files[name]}, row {number}", row) for number, row in of_file(files[name])]
        if len({tuple(row) for row in rows}) != 1:
            raise ValueError(f"{files[name]} has {'rows of two kinds' if rows else 'no rows'}; give rows of one kind")
        lines = output / f"{name}.jsonl"
        write_bytes(lines, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        task = {
            "include": str(theirs[name]),
            "task": f"longbench_{name}",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": str(lines.resolve())}},
        }
        write_json(output / f"{name}.yaml", task | ({"doc_to_text": "prompt"} if "prompt" in rows[0] else {}))
        tasks.append(str(task["task"]))
    mean = {"metric": "score", "weight_by_size": False}
    write_json(output / "longbench.yaml", {"group": "longbench", "task": tasks, "aggregate_metric_list": [mean]})
    return tasks


def main(data: pathlib.Path, output: pathlib.Path) -> None:
    """Writes the tasks, and says how to run them.

    Args:
      data: a directory of LongBench's files.
      output: a directory, where tasks go.
    """
    tasks = write_tasks(data, output)
    print(f"{len(tasks)} tasks: {', '.join(tasks)}")
    print(f"python -m kvjax.experiments.harness --model kvjax --include_path {output} --tasks longbench")


if __name__ == "__main__":
    script(main)
