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
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import methods, models
from kvjax.configs.experiment import Budget, label
from kvjax.configs.learning import LearnedScorer
from kvjax.contract import FrozenArrays
from kvjax.decide.select import best
from kvjax.experiments.core import stats
from kvjax.experiments.core.command import write_json
from kvjax.experiments.core.page import Table
from kvjax.experiments.core.records import Records
from kvjax.experiments.learning.budget import losses_of
from kvjax.experiments.learning.future_rows import RankedReading, Reader, examples, measured_keys
from kvjax.experiments.learning.loop import fit, shuffled
from kvjax.models import scorer
from kvjax.models.written import write_bytes
from kvjax.scores.learned import NUM_STATISTICS, Learned

_NAMES = {"snapkv": "SnapKV", "learned": "learned score", "future": "future attention itself"}


def policy_of(experiment: LearnedScorer, head: scorer.TrainedHead, budget: Budget) -> kvjax.Evict:
    """SnapKV's window, and the best of the rest by the head."""
    score = Learned(head, experiment.window_size, experiment.kernel_size)
    return kvjax.Evict(score, budget, recent=experiment.window_size)


def untrained(experiment: LearnedScorer, sizes: Any) -> scorer.TrainedHead:
    """A head of random weights for a model of these sizes."""
    module = scorer.ScoreHead(sizes.num_layers, sizes.num_kv_heads, experiment.hidden)
    random = scorer.init(module, jax.random.key(0), 2 * sizes.head_dim + NUM_STATISTICS)
    weights = FrozenArrays(jax.tree.map(np.asarray, random))
    return scorer.TrainedHead(sizes.num_layers, sizes.num_kv_heads, experiment.hidden, weights)


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
    divergence = (wanted * (jnp.log(jnp.maximum(wanted, 1e-12)) - log_p)).sum(-1).mean((1, 2))
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


def trained(
    experiment: LearnedScorer,
    model: Any,
    params: Any,
    tokenizer: Any,
    directory: pathlib.Path,
) -> scorer.TrainedHead:
    """The head of a directory, trained on calibration prompts where it has none; an interrupted training goes on."""
    file = directory / "head.npz"
    if file.is_file():
        return scorer.TrainedHead.load(file)
    prompts, blank = experiment.prompts, untrained(experiment, model.config)
    score = Learned(blank, experiment.window_size, experiment.kernel_size)
    reader = Reader(model, params, policy_of(experiment, blank, experiment.budgets[0]), prompts)
    calibration = examples(prompts, tokenizer, "calibration")
    readings = [reading for _, reading in reader.batches(calibration, "calibration")]
    _, L, K, _, F = jax.eval_shape(functools.partial(features_of, score), readings[0]).shape
    module = scorer.ScoreHead(L, K, experiment.hidden)
    start = scorer.init(module, jax.random.key(prompts.seed), F)
    fixed = dict(zip(("mean", "std"), normalisation(score, readings), strict=True))
    batch = shuffled(readings, prompts.seed)

    def loss(learned, reading):
        value = loss_of(module, score, learned | fixed, reading)
        return value, {"losses": value}

    learned, noted = fit(
        directory / "checkpoints",
        repr(experiment),
        {name: value for name, value in start.items() if name not in fixed},
        loss,
        lambda step: (batch(step),),
        steps=experiment.steps,
        rate=experiment.rate,
    )
    weights = FrozenArrays(jax.tree.map(np.asarray, {name: (learned | fixed)[name] for name in start}))
    head = scorer.TrainedHead(L, K, experiment.hidden, weights)
    write_json(directory / "learning.json", {"divergence": noted["losses"]})
    head.save(file)
    return head


@jax.jit
def _losses_of_mask(reading: RankedReading, keep: jax.Array) -> tuple[jax.Array, jax.Array]:
    mass = reading.mass
    share = jnp.where(keep, mass, 0.0).sum((1, 2, 3)) / mass.sum((1, 2, 3))
    return reading.traces.eviction_loss(keep.astype(jnp.float32)).mean(-1), share


@functools.partial(jax.jit, static_argnames="policy")
def _hindsight(reading: RankedReading, policy: kvjax.Evict) -> jax.Array:
    """A policy's window, and the best of the rest by the attention of the future rows."""
    view = reading.view(policy)
    score = jnp.where(view.safe, jnp.inf, reading.mass)
    B, L, K, S = score.shape
    counts = jnp.broadcast_to(view.budget.astype(jnp.int32)[:, None], (B, L * K))
    flat = lambda x: x.reshape(B, L * K, S)
    return best(flat(score), flat(view.pos), counts).reshape(score.shape)


def measure(
    experiment: LearnedScorer, head: scorer.TrainedHead, reader: Reader, records: Records, tokenizer: Any
) -> None:
    """Appends the lines of the held-out prompts that are missing."""
    keys = lambda e: [(m, label(b), e.task, e.index, 0) for b in experiment.budgets for m in _NAMES]
    lacks = lambda e: any(k not in records.lines for k in keys(e))
    for batch, reading in reader.batches(examples(reader.prompts, tokenizer, "held_out"), "held-out", lacks):
        for b in experiment.budgets:
            snapkv = methods.snapkv(b, window=experiment.window_size, kernel=experiment.kernel_size)
            masks = {
                "snapkv": losses_of(snapkv, reading)[2],
                "learned": losses_of(policy_of(experiment, head, b), reading)[2],
                "future": _hindsight(reading, snapkv),
            }
            for method, keep in masks.items():
                loss, share = (np.asarray(x) for x in _losses_of_mask(reading, keep))
                live = np.asarray(keep.sum((1, 2, 3)))
                records.append(
                    {"method": method, "budget": label(b), "task": e.task, "index": e.index, "question": 0}
                    | {"loss": float(loss[i]), "kept_attention": float(share[i]), "live": int(live[i])}
                    for i, e in enumerate(batch)
                )


def write(directory: pathlib.Path, name: str, samples: Sequence[dict[str, Any]], unseen: Sequence[str] = ()) -> str:
    """Writes `summary.json` and `summary.md`, with rows of their own for tasks that were not learned from.

    Returns the table.
    """
    rows, lines = [], []
    kinds = ("learned from", "unseen") if unseen else ("",)
    kind = lambda s: kinds[s["task"] in unseen]
    for b, of in itertools.product(dict.fromkeys(s["budget"] for s in samples), kinds):
        by_key = {(s["method"], s["task"], s["index"]): s for s in samples if (s["budget"], kind(s)) == (b, of)}
        examples_ = [k[1:] for k in by_key if k[0] == "snapkv"]
        for method in _NAMES:
            mine = [by_key[method, *k] for k in examples_]
            row: dict[str, Any] = {"budget": b, "method": method, "prompts": len(mine)} | ({"tasks": of} if of else {})
            row |= dict(zip(("loss", "low", "high"), stats.mean([s["loss"] for s in mine]), strict=True))
            row["kept_attention"] = float(np.mean([s["kept_attention"] for s in mine]))
            less = [by_key["snapkv", *k]["loss"] - by_key[method, *k]["loss"] for k in examples_]
            row |= dict(zip(("less", "less_low", "less_high"), stats.mean(less), strict=True))
            rows.append(row)
            percent = {name: f"{100 * x:.2f}" for name, x in row.items() if isinstance(x, float)}
            paired = "" if method == "snapkv" else "{less} [{less_low}, {less_high}]".format(**percent)
            loss = "{loss} [{low}, {high}]".format(**percent)
            lines.append([b, *([of] if of else []), _NAMES[method], loss, paired, percent["kept_attention"]])
    head = ["budget", *(["tasks"] if unseen else []), "score", "loss", "less than SnapKV", "future attention kept"]
    text = "\n".join(
        [
            f"# {name}",
            "",
            "Exact eviction loss on held-out prompts in percent, with 95 % Student-t intervals over prompts; the loss",
            "that is less than SnapKV's is the mean of paired differences. Budgets are uniform.",
            "",
            *Table(head, lines).markdown(),
            "",
        ]
    )
    write_bytes(directory / "summary.md", text.encode())
    write_json(directory / "summary.json", {"rows": rows})  # last: its presence says that the run is complete
    return text


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
    config = {**dataclasses.asdict(experiment), "seed": prompts.seed, "checkpoint": models.fingerprint(prompts.source)}
    keys = measured_keys([*_NAMES], [label(b) for b in experiment.budgets], prompts)
    with Records(directory, config, command, restart=restart) as records:
        in_order = lambda: [records.lines[k] for k in keys]
        if all(k in records.lines for k in keys) and (directory / "head.npz").is_file():
            print(f"{directory} is complete; --restart runs it again")
            return write(directory, experiment.name, in_order(), prompts.unseen)
        model, params = models.load(prompts.source, dtype=prompts.dtype)
        tokenizer = models.load_tokenizer(prompts.source)
        blank = untrained(experiment, model.config)
        policies = [policy_of(experiment, blank, b) for b in experiment.budgets]
        for policy in policies:
            kvjax.make_plan(model.config, policy, np.arange(1, prompts.length + 1), prompts.length, prompts.future)
        head = trained(experiment, model, params, tokenizer, directory)
        measure(experiment, head, Reader(model, params, policies[0], prompts), records, tokenizer)
        return write(directory, experiment.name, in_order(), prompts.unseen)
