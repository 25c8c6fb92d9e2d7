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
from kvjax.analysis import best_in_hindsight, lost_mass, output_kl, regret, task_loss
from kvjax.budgets import HeadShares
from kvjax.configs.experiment import Budget, label
from kvjax.configs.learning import LearnedBudget
from kvjax.decide.select import best
from kvjax.experiments.core.command import write_json
from kvjax.experiments.core.provenance import definition
from kvjax.experiments.core.records import Records
from kvjax.experiments.learning import budget_report
from kvjax.experiments.learning.future_rows import RankedReading, Reader, examples, measured_keys
from kvjax.experiments.learning.loop import fit, shuffled
from kvjax.learning.families import Family, mean_shares
from kvjax.learning.relax import annealed, with_table

DIVISIONS = ("uniform", "pyramid", "ada_static", "ada", "learned")


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
) -> tuple[Any, dict[str, list[float]]]:
    """Learns the numbers of a family at one budget, or goes on where an interrupted run stopped. In float64.

    Args:
      experiment: the config.
      budget: one of its budgets.
      readings: the calibration batches.
      model, params: for objectives at the model's output.
      directory: of the checkpoints.
      max_steps: stop, with a checkpoint, after this many steps in all; for trying things out.

    Returns:
      What was learned; and of every step `losses`, and in `off` the largest relative distance of a prompt's total from
      what its budget allows (`View.total`).
    """
    policy, batch = experiment.method(budget), shuffled(readings, experiment.prompts.seed)
    what = (policy, experiment.family, experiment.objective, experiment.steps, experiment.rate)

    def loss(learned, reading, params, temperature):
        view = reading.view(policy)
        gates = experiment.family.gates(learned, view, temperature)
        off = jnp.abs(gates.sum((1, 2, 3)) / view.total - 1.0).max()
        value = objective(experiment.objective, model, params, reading, gates).astype(float)
        return value, {"losses": value, "off": off}

    def data(step):
        temperature = annealed(*experiment.temperature, step / max(experiment.steps - 1, 1))
        return batch(step), params, jnp.asarray(temperature, float)

    with jax.enable_x64(True):
        return fit(
            directory,
            definition((*what, experiment.temperature, experiment.prompts), experiment.origin),
            experiment.family.init(model.config.num_layers, model.config.num_kv_heads),
            loss,
            data,
            steps=experiment.steps,
            rate=experiment.rate,
            max_steps=max_steps,
            title=f"learn {label(budget)}",
        )


# --- tables ---


@functools.partial(jax.jit, static_argnames="policy")
def _head_budgets(policy: kvjax.Evict, reading: RankedReading) -> jax.Array:
    """What a policy gives every head beyond its protected tokens, "B L K"."""
    chosen = reading.full.decisions(policy)
    return jnp.stack([d.budgets for d in chosen], axis=1) - reading.safe.sum(-1, dtype=jnp.int32)


def average_table(policy: kvjax.Evict, readings: Sequence[RankedReading]) -> np.ndarray:
    """Shares "L K" that a policy gives heads on average over prompts, relative to the average of 1."""
    budgets, divided = [], []
    for reading in readings:
        counts = np.asarray(reading.weight) > 0
        budgets.append(np.asarray(_head_budgets(policy, reading), np.float64)[counts])
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
    pyramid = dataclasses.replace(uniform, layers=kvjax.Pyramid(experiment.pyramid_beta))
    chosen = uniform, pyramid, with_table(uniform, average_table(ada, readings)), ada, hard
    return dict(zip(DIVISIONS, chosen, strict=True))


@jax.jit
def in_hindsight(reading: RankedReading, keep: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
    """The oracles of `budget_report.HINDSIGHT`: eviction loss "B L" and mask, each of as many tokens as `keep`."""
    masks = {n: best_in_hindsight(reading.mass, reading.live, keep, a) for n, a in budget_report.HINDSIGHT.items()}
    return {n: (reading.traces.eviction_loss(mask.astype(jnp.float32)), mask) for n, mask in masks.items()}


@jax.jit
def attention_of(reading: RankedReading, keep: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention to come that is lost "B", averaged over heads, and how much less the best mask in hindsight loses."""
    mass = reading.mass
    return lost_mass(mass, keep).mean((1, 2)), regret(mass, reading.live, keep, "model")[:, 0]


@functools.partial(jax.jit, static_argnames="policy")
def losses_of(policy: kvjax.Policy, reading: RankedReading) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Eviction loss "B L" of a hard policy, live tokens "B" over all layers and heads, and what it keeps "B L K S"."""
    keep = jnp.stack([kv.live for kv in reading.full.after(policy)], axis=1)
    return reading.traces.eviction_loss(keep.astype(jnp.float32)), keep.sum((1, 2, 3), dtype=jnp.int32), keep


@functools.partial(jax.jit, static_argnames="policy")
def theorem_4(reading: RankedReading, policy: kvjax.Evict) -> tuple[jax.Array, jax.Array]:
    """Ada-KV's bound under a policy's uniform and under adaptive budgets, "B L", up to the layer's constant 2 C.

    Both keep the best by the mean attention of the future rows, which makes the bound smallest (Theorem 3); the layer's
    total is the same. The bound is the attention that is lost, summed over query heads (Theorem 2).
    """
    B, L, N = reading.traces.attention.shape[:3]
    view = reading.view(policy)
    K = view.pos.shape[2]
    mass = reading.mass * (N // K)
    average = jnp.minimum(view.budget, reading.lengths.astype(view.budget.dtype)).astype(jnp.int32)
    lost = []
    for i in range(L):
        live, pos = view.live[:, i], view.pos[:, i]
        score = jnp.where(live, mass[:, i], -jnp.inf)
        adaptive = kvjax.Adaptive(1.0)(score, average, dataclasses.replace(reading.slots(i), candidates=live))
        uniform = jnp.broadcast_to(average[:, None], (B, K))
        masks = (best(score, pos, budgets) for budgets in (uniform, adaptive))
        lost.append([jnp.where(live & ~keep, mass[:, i], 0.0).sum((1, 2)) for keep in masks])
    uniform, adaptive = (jnp.stack(x, axis=1) for x in zip(*lost, strict=True))
    return uniform, adaptive


def measure(
    chosen: dict[str, dict[str, kvjax.Evict]],
    budgets: Sequence[Budget],
    reader: Reader,
    records: Records,
    tokenizer: Any,
) -> None:
    """Appends the lines of the held-out prompts that are missing.

    Raises:
      ValueError: policies of one budget that keep different totals.
    """
    methods = (*DIVISIONS, *budget_report.HINDSIGHT)
    keys = lambda e: [(m, label(b), e.task, e.index, 0) for b in budgets for m in methods]
    lacks = lambda e: any(k not in records.lines for k in keys(e))
    for batch, reading in reader.batches(examples(reader.prompts, tokenizer, "held_out"), "held-out", lacks):
        records.append(line for b in budgets for line in _lines(chosen[label(b)], b, batch, reading))


def _lines(
    chosen: dict[str, kvjax.Evict], budget: Budget, batch: Sequence[Any], reading: RankedReading
) -> list[dict[str, Any]]:
    bounds = [np.asarray(x) for x in theorem_4(reading, chosen["uniform"])]
    found = {}
    for method, policy in chosen.items():
        loss, _, keep = losses_of(policy, reading)
        found[method] = loss, keep
    found |= in_hindsight(reading, found["uniform"][1])
    lines, totals = [], {}
    for method, (loss, keep) in found.items():
        live = np.asarray(keep.sum((1, 2, 3), dtype=jnp.int32))
        lost, more = attention_of(reading, keep)
        totals[method] = live[: len(batch)].tolist()
        if totals[method] != totals["uniform"]:
            raise ValueError(
                f"{method} keeps {totals[method]} tokens of prompts of which uniform keeps {totals['uniform']}; "
                "policies are compared at equal totals; raise the budget, or ask for longer prompts"
            )
        for i, e in enumerate(batch):
            line = {"method": method, "budget": label(budget), "task": e.task, "index": e.index, "question": 0}
            line |= {"loss": _exact(loss[i].mean()), "layers": _exact(loss[i]), "live": int(live[i])}
            line |= {"lost": _exact(lost[i]), "regret": _exact(more[i])}
            if method in ("uniform", "ada"):
                line["least_bound"] = _exact(bounds[method == "ada"][i])
            lines.append(line)
    return lines


def _exact(x: jax.Array | np.ndarray) -> Any:
    """Numbers of float32 in the fewest digits that tell them from all others."""
    return np.vectorize(lambda value: float(str(np.float32(value))))(np.asarray(x)).tolist()


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
    prompts, budgets = experiment.prompts, [label(b) for b in experiment.budgets]
    keys = measured_keys((*DIVISIONS, *budget_report.HINDSIGHT), budgets, prompts)
    tables = {label(b): directory / "tables" / f"{label(b)}.json" for b in experiment.budgets}
    with Records(directory, config, command, restart=restart) as records:
        in_order = lambda: [records.lines[k] for k in keys]
        if all(k in records.lines for k in keys) and all(file.is_file() for file in tables.values()):
            print(f"{directory} is complete; --restart runs it again")
            return budget_report.write(directory, in_order())
        model, params = models.load(prompts.source, dtype=prompts.dtype)
        tokenizer = models.load_tokenizer(prompts.source)
        uniform = [experiment.method(b) for b in experiment.budgets]
        for policy in uniform:
            kvjax.make_plan(model.config, policy, np.arange(1, prompts.length + 1), prompts.length, prompts.future)
        reader = Reader(model, params, uniform[0], prompts, uniform, experiment.measured)
        calibration = examples(prompts, tokenizer, "calibration")
        readings = [reading for _, reading in reader.batches(calibration, "calibration")]
        chosen = {}
        for b in experiment.budgets:
            learned, noted = learn(
                experiment, b, readings, model, params, directory / "checkpoints" / label(b), max_steps=max_steps
            )
            if len(noted["losses"]) < experiment.steps:
                return ""
            hard, shares = learned_policy(experiment.family, learned, experiment.method(b), readings)
            table = {
                "budget": b,
                "heads": shares.tolist(),
                "learned": experiment.family.describe(learned),
                "policy": repr(hard),
                "losses": noted["losses"],
                "total_off": max(noted["off"]),
            }
            tables[label(b)].parent.mkdir(exist_ok=True)
            write_json(tables[label(b)], table)
            chosen[label(b)] = policies(experiment, b, hard, readings)
        del readings
        every = [policy for group in chosen.values() for policy in group.values()]
        reader = Reader(model, params, uniform[0], prompts, every, experiment.measured)
        measure(chosen, experiment.budgets, reader, records, tokenizer)
        return budget_report.write(directory, in_order())
