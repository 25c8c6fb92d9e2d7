"""Learns how a budget is divided over layers and heads, and measures what that is worth on other prompts.

    python experiments/learn.py budget --config learned_budget.py
    python experiments/learn.py budget --config learned_budget.py --budget 0.125 --parametrisation layers --steps 80
    python experiments/learn.py budget --config learned_budget.py --help

The eviction loss of calibration prompts (or the divergence of the model's output, or the loss of what follows) falls by
gradient through gates whose temperature falls; the total budget is exact at every step. Held-out prompts are measured
with hard policies: uniform, pyramid, Ada-KV (as a table of its average choices, and for every prompt anew) and what was
learned, all at the same total; beside them the best masks in hindsight, which know the attention to come.

Results go to `results/<name>/` (or `--output`): `manifest.json`, `checkpoints/` (orbax; an interrupted run resumes),
`tables/<budget>.json`, `samples.jsonl` (a line a policy and prompt), `summary.json`, `summary.md` and plots. A table
goes into any policy:

    weights = json.loads(path.read_text())["heads"]
    policy = kvjax.learning.relax.with_table(policy, weights)
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import models
from kvjax.analysis import best_in_hindsight, output_kl, task_loss
from kvjax.analysis.hindsight import Across
from kvjax.budgets import HeadShares
from kvjax.configs.experiment import Budget, label
from kvjax.configs.learning import LearnedBudget
from kvjax.contract import kv_layers
from kvjax.experiments.core.command import write_json
from kvjax.experiments.core.provenance import definition
from kvjax.experiments.learning import job, report
from kvjax.experiments.learning.future_rows import RankedReading, Reader
from kvjax.experiments.learning.loop import Noted, Stage, adam, fit, shuffled
from kvjax.learning.families import Family, mean_shares
from kvjax.learning.relax import annealed, with_table

_COSTS = ("loss", "layers", "live", "lost", "regret", "least_bound")  # of a line


def objective(name: str, model: Any, params: Any, reading: RankedReading, gates: jax.Array) -> jax.Array:
    """What is made small: the mean over a batch's prompts, and layers or future rows."""
    if name == "eviction_loss":
        each = reading.traces.eviction_loss(gates).mean(-1)
    else:
        full = reading.full
        logits = full.logits_after(model, params, jnp.moveaxis(gates, 1, 0))
        if name == "output_kl":
            each = output_kl(full.logits, logits).mean(-1)
        else:  # a row predicts the next row's token
            each = task_loss(logits[:, :-1], full.continuation[:, 1:]).mean(-1)
    return (each * reading.weight).sum() / reading.weight.sum()


def learn(
    experiment: LearnedBudget,
    budget: Budget,
    readings: Sequence[RankedReading],
    model: Any,
    params: Any,
    directory: pathlib.Path,
    *,
    max_steps: int | None = None,
) -> tuple[Any, Noted]:
    """Learns the numbers of a family at one budget, or goes on where an interrupted run stopped. In float64.

    Args:
      experiment: the config.
      budget: one of its budgets.
      readings: the calibration batches.
      model, params: for objectives at the model's output.
      directory: of the checkpoints.
      max_steps: stop, with a checkpoint, after this many steps in all; for trying things out.

    Returns:
      What was learned, None if `max_steps` came first; and of every step `losses`, and in `off` the largest relative
      distance of a prompt's total from what its budget allows (`View.total`).
    """
    policy, batch = experiment.method(budget), shuffled(readings, experiment.prompts.seed)
    what = (policy, experiment.family, experiment.objective, experiment.steps, experiment.rate)

    def loss(learned, reading, params, temperature):
        view = reading.view(policy)
        gates = experiment.family.gates(learned, view, temperature)
        off = jnp.abs(gates.sum((1, 2, 3)) / view.total - 1.0).max()
        value = objective(experiment.objective, model, params, reading, gates).astype(float)
        return value, {"losses": value, "off": off}

    def data(step, stage):
        temperature = annealed(*experiment.temperature, step / max(stage.steps - 1, 1))
        return batch(step), params, jnp.asarray(temperature, float)

    with jax.enable_x64(True):
        return fit(
            directory,
            definition((*what, experiment.temperature, experiment.prompts), experiment.origin),
            experiment.family.init(len(kv_layers(model.config)), model.config.num_kv_heads),
            adam(experiment.rate, experiment.steps),
            loss,
            data,
            [Stage(experiment.steps)],
            max_steps=max_steps,
            title=f"learn {label(budget)}",
        )


# --- tables ---


def average_table(policy: kvjax.Evict, readings: Sequence[RankedReading]) -> np.ndarray:
    """Shares "L K" that a policy gives heads on average over prompts, relative to the average of 1."""
    budgets, divided = [], []
    for reading in readings:
        counts, beside = np.asarray(reading.weight) > 0, job.kept(reading, policy) & ~reading.safe
        budgets.append(np.asarray(beside.sum(-1), np.float64)[counts])
        divided.append(np.asarray(reading.view(policy).divided)[counts])
    return mean_shares(np.concatenate(budgets), np.concatenate(divided))


def learned_policy(
    family: Family, learned: Any, policy: kvjax.Evict, readings: Sequence[RankedReading]
) -> tuple[kvjax.Evict, np.ndarray]:
    """The hard policy, and the shares "L K" of its heads: its table, or its average choice on calibration prompts."""
    with jax.enable_x64(True):
        views = (reading.view(policy) for reading in readings)
        hard = family.harden(learned, policy, next((v for v in views if v.divided.any()), readings[0].view(policy)))
    if isinstance(hard.heads, HeadShares):
        return hard, np.array(hard.heads.weights)
    if hard.heads == policy.heads and hard.layers == policy.layers:
        return hard, np.ones(readings[0].score.shape[1:3])
    return hard, average_table(hard, readings)


# --- evaluation ---


def policies(
    experiment: LearnedBudget, budget: Budget, hard: kvjax.Evict, readings: Sequence[RankedReading]
) -> dict[str, kvjax.Evict]:
    """What is measured at one budget, all of the same total."""
    uniform = experiment.method(budget)
    ada = dataclasses.replace(uniform, heads=kvjax.Adaptive(experiment.ada_alpha))
    return {
        "uniform": uniform,
        "pyramid": dataclasses.replace(uniform, layers=kvjax.Pyramid(experiment.pyramid_beta)),
        "ada_static": with_table(uniform, average_table(ada, readings)),
        "ada": ada,
        "learned": hard,
    }


@jax.jit
def hindsight(reading: RankedReading, keep: jax.Array) -> dict[str, jax.Array]:
    """The oracles of `report.HINDSIGHT`: the best masks of as many tokens as `keep`."""
    return {n: best_in_hindsight(reading.mass, reading.live, keep, a) for n, a in report.HINDSIGHT.items()}


@jax.jit
def theorem_4(reading: RankedReading, keep: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ada-KV's bound under uniform and under adaptive budgets of as many tokens as `keep`, "B L", up to 2 C of a layer.

    Both keep the best by the mean attention of the future rows, which makes the bound smallest (Theorem 3), in every
    head or in every layer. The bound is the attention that is lost, summed over query heads (Theorem 2).
    """
    mass, group = reading.mass, reading.traces.attention.shape[2] // keep.shape[2]

    def lost(across: Across) -> jax.Array:
        evicted = jnp.where(best_in_hindsight(mass, reading.live, keep, across), 0.0, group * mass)
        return jnp.stack([evicted[:, i].sum((1, 2)) for i in range(mass.shape[1])], axis=1)

    return lost("head"), lost("layer")


def costs(chosen: dict[str, kvjax.Evict], reading: RankedReading) -> dict[str, job.Costs]:
    """What every policy of a budget costs, and what the oracles do.

    Raises:
      ValueError: policies that keep different totals.
    """
    masks: dict[str, jax.Array] = {method: job.kept(reading, policy) for method, policy in chosen.items()}
    uniform = masks["uniform"]
    masks |= hindsight(reading, uniform)
    found: dict[str, job.Costs] = {method: job.costs(reading, keep) for method, keep in masks.items()}
    for method, bound in zip(("uniform", "ada"), theorem_4(reading, uniform), strict=True):
        found[method]["least_bound"] = bound
    totals = {method: of["live"].tolist() for method, of in found.items()}
    if wrong := [method for method in found if totals[method] != totals["uniform"]]:
        raise ValueError(
            f"{wrong[0]} keeps {totals[wrong[0]]} tokens of prompts of which uniform keeps {totals['uniform']}; "
            "policies are compared at equal totals; raise the budget, or ask for longer prompts"
        )
    return {method: {name: _exact(of[name]) for name in _COSTS if name in of} for method, of in found.items()}


def _exact(x: Any) -> np.ndarray:
    """Numbers of float32 in the fewest digits that tell them from all others; whole numbers are exact."""
    x = np.asarray(x)
    return x if x.dtype.kind == "i" else np.vectorize(lambda value: float(str(np.float32(value))))(x)


def run(
    experiment: LearnedBudget,
    directory: pathlib.Path,
    command: list[str],
    *,
    restart: bool = False,
    max_steps: int | None = None,
) -> str:
    """Learns and measures what is missing in `directory`, and writes the report.

    Args:
      experiment: the config.
      directory: of results.
      command: the command line, for the manifest.
      restart: begin anew; an earlier run there is moved aside.
      max_steps: stop learning after this many steps in all and leave; for trying things out.

    Returns:
      The report's text, empty where `max_steps` came first.
    """
    known = lambda made: definition(made, experiment.origin)
    config = {
        "name": experiment.name,
        "policies": [{"budget": label(b), "policy": known(experiment.method(b))} for b in experiment.budgets],
        "family": known(experiment.family),
        "objective": experiment.objective,
        "learning": {n: getattr(experiment, n) for n in ("steps", "rate", "temperature")},
        "baselines": {n: getattr(experiment, n) for n in ("pyramid_beta", "ada_alpha")},
        "prompts": dataclasses.asdict(experiment.prompts),
        "checkpoint": models.fingerprint(experiment.prompts.source),
        "seed": experiment.prompts.seed,
    }
    tables = {b: directory / "tables" / f"{label(b)}.json" for b in experiment.budgets}

    def learn_all(reader: Reader) -> job.Learned | None:
        uniform = [experiment.method(b) for b in experiment.budgets]
        readings = [reading for _, reading in reader.batches("calibration", uniform, experiment.measured)]
        chosen = {}
        for b, policy in zip(experiment.budgets, uniform, strict=True):
            checkpoints = directory / "checkpoints" / label(b)
            learned, noted = learn(
                experiment, b, readings, reader.model, reader.params, checkpoints, max_steps=max_steps
            )
            if learned is None:
                return None
            hard, shares = learned_policy(experiment.family, learned, policy, readings)
            table = {
                "budget": b,
                "heads": shares.tolist(),
                "learned": experiment.family.describe(learned),
                "policy": repr(hard),
                "losses": noted["losses"],
                "total_off": max(noted["off"]),
            }
            tables[b].parent.mkdir(exist_ok=True)
            write_json(tables[b], table)
            chosen[b] = policies(experiment, b, hard, readings)
        every = [policy for group in chosen.values() for policy in group.values()]
        return job.Learned(every, lambda b, reading: costs(chosen[b], reading), experiment.measured)

    return job.run(
        experiment,
        directory,
        command,
        config,
        methods=report.DIVISIONS,
        files=tables.values(),
        policy=lambda sizes, b: experiment.method(b),
        learn=learn_all,
        report=functools.partial(report.of_budgets, directory),
        restart=restart,
    )
