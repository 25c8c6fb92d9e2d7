"""Columns whose data sets are tasks of lm-eval: every row's accuracy under a table's policy."""

import importlib
from typing import Any

from kvjax import Policy
from kvjax.experiments.core.provenance import definition
from kvjax.experiments.harness import lm_eval_module
from kvjax.experiments.papers.methods import Budget
from kvjax.experiments.papers.tables import DATA
from kvjax.experiments.reproduction.choice import Options, own_tasks


def accuracies(
    name: str, shots: int, policy: Policy, budget: Budget, block: int | None, options: Options
) -> list[float]:
    """Whether each row of a task is answered right: by `acc_norm` where the task has it.

    The papers do not say which accuracy theirs is. Full scores such as 44.8 for OpenBookQA are of `acc_norm`'s size.

    Args:
      name, shots: the data set, and how many examples stand before each question.
      policy, budget, block: what runs.
      options: where `data` is a directory, tasks are its YAML files, which may read local data; otherwise they are
        lm-eval's own, which download theirs.

    Raises:
      ValueError: lm-eval is not installed, has no such task, or cannot load its data.
    """
    evaluator, tasks = lm_eval_module("evaluator"), lm_eval_module("tasks")
    language_model: Any = importlib.import_module("kvjax.experiments.harness.language_model")
    folder = own_tasks(options.data)
    manager = tasks.TaskManager(include_path=folder and str(folder), include_defaults=folder is None)
    model = language_model.HarnessModel(
        pretrained=options.model, policy=policy, budget=budget, block=block, dtype=options.dtype,
        batch_size=options.batch_size, max_length=options.length, seed=options.seed,
    )  # fmt: skip
    task = str(DATA[name].task)
    try:
        found = evaluator.simple_evaluate(
            model=model, tasks=[task], num_fewshot=shots, limit=options.examples, task_manager=manager,
            log_samples=True, bootstrap_iters=0,
        )  # fmt: skip
    except Exception as e:  # lm-eval and datasets raise what they like
        raise ValueError(
            f"{task} of lm-eval cannot be run under {definition(policy):.60}: {type(e).__name__}: {e}"
        ) from e
    samples = sorted(found["samples"][task], key=lambda s: s["doc_id"])
    return [float(s["acc_norm"] if "acc_norm" in s else s["acc"]) for s in samples]
