"""The policies of an experiment: the full cache, its own and its baselines, evicting when the setup says."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any, Final

import kvjax
from kvjax import Policy, configs, methods
from kvjax.budgets import Schedule
from kvjax.configs.experiment import BASELINES, COMPACT, Budget, Experiment, Setup, label
from kvjax.methods.hidden import DropChannels
from kvjax.models.sources import locate

FULL: Final = "full", "1.0"
"""The method and budget label of the full cache."""


def with_baselines(experiment: Experiment) -> Experiment:
    """The experiment with its baselines, by default those that its model can run, and their budget.

    Raises:
      ValueError: a model that `kvjax.models.load` would not find.
    """
    setup = dataclasses.replace(experiment.setup, baseline_budget=experiment.baseline_budget)
    experiment = dataclasses.replace(experiment, setup=setup)
    if setup.baselines is not None:
        return experiment
    chosen = tuple(b for b in BASELINES if setup.compress == "both" or _can(b, experiment))
    if chosen != BASELINES:
        left = ", ".join(b for b in BASELINES if b not in chosen)
        print(f"baselines: {', '.join(chosen)}; without {left}, which --compress {setup.compress} is not for")
    from kvjax.models.weights import read_config  # imports Flax, which takes longer than --help should

    if read_config(locate(setup.source, weights=False)).learned_positions:
        chosen = tuple(b for b in chosen if b not in COMPACT)
        print(
            f"baselines: {', '.join(chosen)}; without {', '.join(COMPACT)}, whose stored keys move to other positions, "
            "since this model has learned positions"
        )
    return dataclasses.replace(experiment, setup=dataclasses.replace(setup, baselines=chosen))


def _can(baseline: str, experiment: Experiment) -> bool:
    """Whether a baseline can evict when the setup says."""
    setup = experiment.setup
    theirs = configs.find(baseline)[1](budget=(experiment.baseline_budget,), setup=setup)
    try:
        return all(compressed(baseline, policy, setup) is not None for _, policy in theirs.policies)
    except ValueError:
        return False


def all_policies(experiment: Experiment) -> list[tuple[str, str, Policy]]:
    """(method, budget label, policy): the full cache, the experiment's own, and its baselines.

    A baseline without budgets runs as its config has it. Budgets of single tasks come after a method's others;
    `tasks_of` says what runs under which.

    Raises:
      ValueError: a method and budget that stand for two policies, which would become one row.
    """
    setup = experiment.setup
    full = (*FULL, methods.full())
    swept = [label(b) for b, _ in experiment.policies]
    further = [(b, p) for b, p in experiment.task_policies if label(b) not in swept]
    own = [(experiment.name, label(b), p) for b, p in (*experiment.policies, *further)]
    found = [full, *((m, b, compressed(m, p, setup)) for m, b, p in own if (m, b, p) != full)]
    for name, theirs in _baselines(experiment):
        found += [(name, label(b), compressed(name, p, setup)) for b, p in theirs.policies]
    for i, (method, budget, _) in enumerate(found):
        if (method, budget) in ((m, b) for m, b, _ in found[:i]):
            raise ValueError(
                f"{method} at budget {budget} is there twice, and both would become one row; give each budget, "
                "baseline and name once"
            )
    return found


def options_of(experiment: Experiment) -> dict[str, str]:
    """The options of every method that are not its defaults in `kvjax.methods`; methods without such are left out."""
    every = [(experiment.name, experiment), *_baselines(experiment)]
    return {name: each.options for name, each in every if each.options}


def _baselines(experiment: Experiment) -> list[tuple[str, Experiment]]:
    """The names and experiments of the baselines that are another method."""
    found = []
    for baseline in experiment.setup.baselines or ():
        name, get_config = configs.find(baseline)
        if name not in (experiment.name, "full"):
            parameters = inspect.signature(get_config).parameters
            given = {"budget": (experiment.baseline_budget, *_further(experiment)), "setup": experiment.setup}
            theirs = get_config(**{k: v for k, v in given.items() if k in parameters})
            check_is(theirs, Experiment, baseline)
            found.append((name, theirs))
    return found


def _further(experiment: Experiment) -> list[Budget]:
    """The budgets of single tasks that are not the baselines', each once."""
    every = {label(b): b for budgets in experiment.setup.task_budgets.values() for b in budgets}
    return [b for name, b in every.items() if name != label(experiment.baseline_budget)]


def tasks_of(experiment: Experiment, names: Sequence[str]) -> dict[tuple[str, str], tuple[str, ...]]:
    """The tasks that run under every method and budget label of `all_policies`; those with none are left out.

    Raises:
      ValueError: a budget for a task that does not run, or one that the experiment has no policy for.
    """
    setup = experiment.setup
    single = {task: [label(b) for b in budgets] for task, budgets in setup.task_budgets.items()}
    if unknown := [task for task in single if task not in names]:
        raise ValueError(f"--task-budget names {unknown[0]!r}, which does not run; there are {', '.join(names)}")
    runs = [(method, budget) for method, budget, _ in all_policies(experiment)]
    for task, budgets in single.items():
        if lacking := [b for b in budgets if (experiment.name, b) not in runs]:
            raise ValueError(
                f"--task-budget {task}={lacking[0]}: {experiment.name} has no policy of that budget; leave it out "
                "where --budget is no option of the config"
            )
    swept = {experiment.name: [label(b) for b, _ in experiment.policies]}
    for name, get_config in map(configs.find, setup.baselines or ()):
        if "budget" in inspect.signature(get_config).parameters:
            swept.setdefault(name, [label(experiment.baseline_budget)])

    def runs_under(task: str, method: str, budget: str) -> bool:
        budgets = {*swept.get(method, ()), *(b for each in single.values() for b in each)}
        if (method, budget) == FULL or method not in swept or budget not in budgets:
            return True  # nothing that a task could have another of
        return budget in single.get(task, swept[method])

    found = {run: tuple(task for task in names if runs_under(task, *run)) for run in runs}
    return {run: tasks for run, tasks in found.items() if tasks}


def compressed(name: str, policy: Policy, setup: Setup) -> Policy:
    """A policy that evicts after the prompt alone, or while decoding alone, where the setup wants that.

    Raises:
      ValueError: a method that cannot, by its name.
    """

    def decoding(when: Schedule) -> Schedule:
        if not when.decodes:
            raise ValueError("it evicts after the prompt alone, never while decoding")
        return dataclasses.replace(when, prefill=False)

    if setup.compress == "both" or (setup.compress == "prefill" and isinstance(policy, DropChannels)):
        return policy  # channels are dropped after the prompt in any case
    try:
        return kvjax.when(Schedule() if setup.compress == "prefill" else decoding, policy)
    except ValueError as e:
        raise ValueError(f"--compress {setup.compress} is not for {name}: {e}; leave it out") from e


def check_is(found: Any, kind: type, config: str) -> None:
    """Raises ValueError for what is not of the kind that a config's `get_config` must return."""
    if not isinstance(found, kind):
        raise ValueError(f"get_config of {config} returns a {type(found).__name__}, but must return a {kind.__name__}")
