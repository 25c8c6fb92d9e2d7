"""What `learn.py budget` and `learn.py scorer` share: they learn from some prompts, and measure on others."""

import functools
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import models
from kvjax.analysis import lost_mass, regret
from kvjax.configs.experiment import Budget, label
from kvjax.configs.learning import LearnedBudget, LearnedScorer
from kvjax.contract import Observation
from kvjax.experiments.core.records import Line, Records
from kvjax.experiments.learning.future_rows import HELD_OUT, RankedReading, Reader

Costs = dict[str, Any]
"""What a mask costs every prompt, arrays "B ..." by the names that lines have for them."""


class Learned(NamedTuple):
    """How held-out prompts are measured once something is learned.

    Attributes:
      policies: all that are applied; the first ranks and protects.
      costs: of every method, at a budget and of a batch of prompts.
      observe: what else is observed of a prompt.
    """

    policies: Sequence[kvjax.Policy]
    costs: Callable[[Budget, RankedReading], dict[str, Costs]]
    observe: tuple[Observation, ...] = ()


def run(
    experiment: LearnedBudget | LearnedScorer,
    directory: pathlib.Path,
    command: Sequence[str],
    config: dict[str, Any],
    *,
    methods: Collection[str],
    files: Collection[pathlib.Path],
    policy: Callable[[Any, Budget], kvjax.Evict],
    learn: Callable[[Reader], Learned | None],
    report: Callable[[Sequence[Line]], str],
    restart: bool = False,
) -> str:
    """Learns and measures what is missing in `directory`, and writes the report.

    Args:
      experiment: the config.
      directory: of results.
      command: the command line, for the manifest.
      config: what a run that goes on must share with the one that stopped; JSON.
      methods: what is measured at every budget.
      files: what learning writes.
      policy: one that needs as many slots as what will be measured, of the model's sizes and a budget.
      learn: learns, or goes on; None if it was stopped.
      report: writes the report of all lines.
      restart: begin anew; an earlier run there is moved aside.

    Returns:
      The report's text, empty where learning was stopped.

    Raises:
      ValueError: budgets that do not fit the prompts, and what `Records` and learning refuse.
    """
    prompts, indices = experiment.prompts, range(HELD_OUT, HELD_OUT + experiment.prompts.held_out)
    named = [(m, label(b)) for b in experiment.budgets for m in methods]
    keys = [(*of, task, i, 0) for of in named for task in prompts.tasks for i in indices]
    with Records(directory, config, command, restart=restart) as records:
        if all(k in records.lines for k in keys) and all(file.is_file() for file in files):
            print(f"{directory} is complete; --restart runs it again")
            return report([records.lines[k] for k in keys])
        model, params = models.load(prompts.source, dtype=prompts.dtype)
        reader = Reader(model, params, models.load_tokenizer(prompts.source), prompts)
        for b in experiment.budgets:
            lengths = np.arange(1, prompts.length + 1)
            kvjax.make_plan(model.config, policy(model.config, b), lengths, prompts.length, prompts.future)
        learned = learn(reader)
        if learned is None:
            return ""
        lacks = lambda e: any((*of, e.task, e.index, 0) not in records.lines for of in named)
        for batch, reading in reader.batches("held_out", learned.policies, learned.observe, lacks):
            records.append(
                {"method": method, "budget": label(b), "task": e.task, "index": e.index, "question": 0}
                | {name: np.asarray(x)[i].tolist() for name, x in costs.items()}
                for b in experiment.budgets
                for method, costs in learned.costs(b, reading).items()
                for i, e in enumerate(batch)
            )
        return report([records.lines[k] for k in keys])


@functools.partial(jax.jit, static_argnames="policy")
def kept(reading: RankedReading, policy: kvjax.Policy) -> jax.Array:
    """What a hard policy keeps of every prompt, "B L K S"."""
    return jnp.stack([kv.live for kv in reading.full.after(policy)], axis=1)


@jax.jit
def costs(reading: RankedReading, keep: jax.Array) -> Costs:
    """What a mask "B L K S" costs every prompt.

    Returns:
      `layers` "B L": the eviction loss, and `loss` its mean. `live` "B": tokens over all layers and heads. `lost` "B":
      attention to come that is lost, the mean over heads, and `regret` how much less of it the best mask in hindsight
      loses. `kept_attention` "B": the share that is kept of the attention to come to the prompt.
    """
    mass, layers = reading.mass, reading.traces.eviction_loss(keep.astype(jnp.float32))
    return {
        "loss": layers.mean(-1),
        "layers": layers,
        "live": keep.sum((1, 2, 3), dtype=jnp.int32),
        "lost": lost_mass(mass, keep).mean((1, 2)),
        "regret": regret(mass, reading.live, keep, "model")[:, 0],
        "kept_attention": jnp.where(keep, mass, 0.0).sum((1, 2, 3)) / mass.sum((1, 2, 3)),
    }
