"""Learns to predict future attention from keys, values and statistics, and measures the score on other prompts.

    python experiments/learn.py scorer --config learned_scorer.py
    python experiments/learn.py scorer --config learned_scorer.py --hidden 32 --steps 600
    python experiments/learn.py scorer --config learned_scorer.py --help

For every kv head the attention that the rows behind a calibration prompt pay to its tokens is a distribution over those
that compete; the head's scores are fitted to it by cross-entropy. Held-out prompts are measured with uniform budgets:
SnapKV, the learned score, and the attention of the future rows themselves, which nobody has in time.

Results go to `results/<name>/` (or `--output`): `manifest.json`, `checkpoints/` (orbax; an interrupted run resumes),
`head.npz`, `samples.jsonl`, `summary.json` and `summary.md`. The head is a score like any other:

    function = models.scorer.TrainedHead.load("results/learned_scorer/head.npz")
    kvjax.Evict(kvjax.scores.learned.Learned(function), budget=64, recent=16)
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kvjax
from kvjax import methods, models
from kvjax.analysis import best_in_hindsight
from kvjax.configs.experiment import Budget
from kvjax.configs.learning import LearnedScorer
from kvjax.contract import FrozenArrays
from kvjax.experiments.core.command import write_json
from kvjax.experiments.learning import job, report
from kvjax.experiments.learning.future_rows import RankedReading, Reader
from kvjax.experiments.learning.loop import Stage, adam, fit, shuffled
from kvjax.models import scorer
from kvjax.scores.learned import NUM_STATISTICS, Learned

_COSTS = ("loss", "kept_attention", "live")  # of a line


def policy_of(experiment: LearnedScorer, head: scorer.TrainedHead, budget: Budget) -> kvjax.Evict:
    """SnapKV's window, and the best of the rest by the head."""
    score = Learned(head, experiment.window_size, experiment.kernel_size)
    return kvjax.Evict(score, budget, recent=experiment.window_size)


def untrained(experiment: LearnedScorer, sizes: Any, seed: int = 0) -> scorer.TrainedHead:
    """A head of random weights for a model of these sizes."""
    module = scorer.ScoreHead(sizes.num_layers, sizes.num_kv_heads, experiment.hidden)
    random = scorer.init(module, jax.random.key(seed), 2 * sizes.head_dim + NUM_STATISTICS)
    return scorer.TrainedHead(module.num_layers, module.num_kv_heads, module.hidden, _frozen(random))


def _frozen(weights: dict[str, Any]) -> FrozenArrays:
    return FrozenArrays(jax.tree.map(np.asarray, weights))


@functools.partial(jax.jit, static_argnames="score")
def features_of(score: Learned, reading: RankedReading) -> jax.Array:
    """What the head sees of every slot, "B L K S F"."""
    return jnp.stack([score.features(reading.slots(i)) for i in range(reading.score.shape[1])], axis=1)


def _candidates(reading: RankedReading) -> jax.Array:
    return reading.live & ~reading.safe & (reading.weight > 0)[:, None, None, None]


def loss_of(module: scorer.ScoreHead, score: Learned, params: Any, reading: RankedReading) -> jax.Array:
    """Cross-entropy of future attention under the softmax of scores, less its own entropy; mean over heads."""
    candidates, features = _candidates(reading), features_of(score, reading)
    mass = jnp.where(candidates, reading.mass, 0.0)
    wanted = mass / jnp.maximum(mass.sum(-1, keepdims=True), 1e-9)
    scores = jnp.stack([scorer.apply(module, params, features[:, i], i) for i in range(features.shape[1])], axis=1)
    log_p = jax.nn.log_softmax(jnp.where(candidates, scores, -1e9), axis=-1)
    divergence = optax.losses.kl_divergence(log_p, wanted).mean((1, 2))
    return (divergence * reading.weight).sum() / reading.weight.sum()


def normalisation(score: Learned, readings: Sequence[RankedReading]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation "L K F" of features over all candidates."""
    count, total, square = np.zeros(()), np.zeros(()), np.zeros(())
    for reading in readings:
        weight = np.asarray(_candidates(reading), np.float64)
        x = np.asarray(features_of(score, reading), np.float64)
        count = count + weight.sum((0, 3))[..., None]
        total = total + np.einsum("blks,blksf->lkf", weight, x)
        square = square + np.einsum("blks,blksf->lkf", weight, x * x)
    mean = total / count
    deviation = np.sqrt(np.maximum(square / count - mean * mean, 0.0))
    return mean.astype(np.float32), np.where(deviation > 1e-4, deviation, 1.0).astype(np.float32)


def trained(experiment: LearnedScorer, reader: Reader, directory: pathlib.Path) -> scorer.TrainedHead:
    """The head of a directory, trained on calibration prompts where it has none; an interrupted training goes on."""
    file = directory / "head.npz"
    if file.is_file():
        return scorer.TrainedHead.load(file)
    start, seed = untrained(experiment, reader.model.config, experiment.prompts.seed), experiment.prompts.seed
    policy = policy_of(experiment, start, experiment.budgets[0])
    readings = [reading for _, reading in reader.batches("calibration", [policy])]
    score, batch = Learned(start, experiment.window_size, experiment.kernel_size), shuffled(readings, seed)
    fixed = dict(zip(("mean", "std"), normalisation(score, readings), strict=True))

    def loss(learned, reading):
        value = loss_of(start.module, score, learned | fixed, reading)
        return value, {"losses": value}

    learned, noted = fit(
        directory / "checkpoints",
        repr(experiment),
        {name: jnp.asarray(x) for name, x in start.weights.items() if name not in fixed},
        adam(experiment.rate, experiment.steps),
        loss,
        lambda step, stage: (batch(step),),
        [Stage(experiment.steps)],
    )
    head = dataclasses.replace(start, weights=_frozen({name: (learned | fixed)[name] for name in start.weights}))
    write_json(directory / "learning.json", {"divergence": noted["losses"]})
    head.save(file)
    return head


def costs(
    experiment: LearnedScorer, head: scorer.TrainedHead, budget: Budget, reading: RankedReading
) -> dict[str, job.Costs]:
    """Of SnapKV, the learned score, and the attention of the future rows beside SnapKV's window."""
    snapkv = methods.snapkv(budget, window=experiment.window_size, kernel=experiment.kernel_size)
    keep, window = job.kept(reading, snapkv), jnp.where(reading.view(snapkv).safe, jnp.inf, reading.mass)
    masks = {
        "snapkv": keep,
        "learned": job.kept(reading, policy_of(experiment, head, budget)),
        "future": best_in_hindsight(window, reading.live, keep),
    }
    each: dict[str, job.Costs] = {method: job.costs(reading, mask) for method, mask in masks.items()}
    return {method: {name: of[name] for name in _COSTS} for method, of in each.items()}


def run(
    experiment: LearnedScorer,
    directory: pathlib.Path,
    command: list[str],
    *,
    restart: bool = False,
) -> str:
    """Learns and measures what is missing in `directory`, and writes the report.

    Args:
      experiment: the config.
      directory: of results.
      command: the command line, for the manifest.
      restart: begin anew; an earlier run there is moved aside.

    Returns:
      The report's text.
    """
    prompts = experiment.prompts
    policy = lambda sizes, b: policy_of(experiment, untrained(experiment, sizes), b)

    def learn(reader: Reader) -> job.Learned:
        head = trained(experiment, reader, directory)
        ranks = policy(reader.model.config, experiment.budgets[0])
        return job.Learned([ranks], functools.partial(costs, experiment, head))

    return job.run(
        experiment,
        directory,
        command,
        {**dataclasses.asdict(experiment), "seed": prompts.seed, "checkpoint": models.fingerprint(prompts.source)},
        methods=report.SCORES,
        files=[directory / "head.npz"],
        policy=policy,
        learn=learn,
        report=functools.partial(report.of_scores, directory, experiment.name, prompts.unseen),
        restart=restart,
    )
