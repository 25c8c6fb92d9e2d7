"""What the trainings share: parameters at the start, optimiser, loss, and a curriculum of stages."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from kvjax.configs.experiment import check_whole
from kvjax.experiments.core.command import check_output
from kvjax.experiments.learning.loop import Progress, go_through
from kvjax.models import LanguageModel, num_params

LANGUAGE, ANSWER, FIRST = 1, 2, 3  # classes of predicted tokens; 0 is unpredictable and costs nothing
RECENT = 20  # steps whose mean decides whether a stage has been learned


@dataclasses.dataclass(frozen=True)
class Options:
    """How a training runs.

    Attributes:
      checkpoints: orbax checkpoints; delete the folder to start anew.
      output: the Hugging Face directory to write at the end.
      seed: of parameters and documents.
      save_every: steps between checkpoints.
      max_steps: stop, with a checkpoint, after this many steps in all; for trying things out.
    """

    checkpoints: pathlib.Path
    output: pathlib.Path
    seed: int = 0
    save_every: int = 100
    max_steps: int | None = None

    def check(self) -> None:
        """Tries what a user asked for.

        Raises:
          ValueError: numbers out of range, or a file where a directory is to be.
        """
        check_whole(0, seed=self.seed, max_steps=self.max_steps or 0)
        check_whole(1, save_every=self.save_every)
        for name, directory in (("checkpoints", self.checkpoints), ("output", self.output)):
            if directory.exists() and not directory.is_dir():
                raise ValueError(f"{name}={directory} is a file, not a directory")
        check_output(self.output / "config.json")


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stretch of a curriculum.

    Attributes:
      steps: at most this many.
      length, batch: of the documents.
      until: advance when the mean accuracy on first tokens of answers over 20 steps exceeds this; None for all steps.
      rate: learning rate at the beginning and the end, relative.
    """

    steps: int
    length: int
    batch: int
    until: float | None = dataclasses.field(default=None, kw_only=True)
    rate: tuple[float, float] = dataclasses.field(default=(1.0, 1.0), kw_only=True)


def initialised(shapes: PyTree[Any], key: Array, *, embedding_std: float, bias_std: float = 0.0) -> PyTree[Any]:
    """Random parameters of a model's shapes: matrices keep the size of what they read, and what is added is halved."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)

    def init(path: tuple[str, ...], shape: tuple[int, ...], key: Array) -> Array:
        if path[-1] == "scale":
            return jnp.full(shape, 0.3 if path[0] == "norm" else 1.0)
        if path[-1] == "embed_tokens":
            return embedding_std * jax.random.normal(key, shape)
        if path[-1] == "bias":
            bias = bias_std * jax.random.normal(key, shape)
            return bias.at[:, -1].set(0.0) if path[-2] == "qkv_proj" else bias  # values have none
        half = 0.5 if path[-2] in ("o_proj", "down_proj") else 1.0
        return half * shape[-1] ** -0.5 * jax.random.normal(key, shape)

    keys = jax.random.split(key, len(leaves))
    values = [init(tuple(k.key for k in p), s.shape, key) for (p, s), key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, values)


def optimizer(adam_rate: float) -> optax.GradientTransformation:
    """Muon for matrices, Adam for embeddings, norms and biases."""

    def dimensions(params):
        def matrix(path, x):
            if path[-1].key != "weight":
                return None
            return optax.contrib.MuonDimensionNumbers(x.ndim - 1, tuple(range(x.ndim - 1)))

        return jax.tree_util.tree_map_with_path(matrix, params)

    warmup = lambda rate: optax.linear_schedule(0.0, rate, 40)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            warmup(0.01),
            adam_learning_rate=warmup(adam_rate),
            adam_b2=0.98,
            weight_decay=0.01,
            muon_weight_dimension_numbers=dimensions,
        ),
    )


def loss_of(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], kind: Int[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, "3"]]:
    """Loss, and (loss on answers, loss on language, accuracy on first tokens): language costs three tenths."""
    ce = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    mean = lambda x, mask: (x * mask).sum() / jnp.maximum(mask.sum(), 1.0)
    masks = [m.astype(jnp.float32) for m in (kind >= ANSWER, kind == LANGUAGE, kind == FIRST)]
    right = (logits.argmax(-1) == targets).astype(jnp.float32)
    answers, language, first = mean(ce, masks[0]), mean(ce, masks[1]), mean(right, masks[2])
    return answers + 0.3 * language, jnp.stack([answers, language, first])


def make_step(model: LanguageModel, attend: Callable[..., Any], tx: optax.GradientTransformation) -> Callable[..., Any]:
    """One jitted update `(params, opt_state, rate, tokens, classes, *data)`, where `attend(*data)` is the attention."""

    def loss(params, tokens, classes, *data):
        logits = model(params, tokens[:, :-1], attend=attend(*data))
        return loss_of(logits, tokens[:, 1:], classes[:, 1:])

    @jax.jit
    def step(params, opt_state, rate, *data):
        (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, *data)
        updates, opt_state = tx.update(grads, opt_state, params)
        updates = jax.tree.map(lambda u: u * rate, updates)
        return optax.apply_updates(params, updates), opt_state, metrics

    return step


def jumps(rng: np.random.Generator, length: int, most: int) -> Int[np.ndarray, "T"]:
    """Positions with one to six random jumps, below `most` (PoSE, arXiv 2309.10400)."""
    pos = np.arange(length)
    n = rng.integers(1, 7)
    sizes = rng.dirichlet(np.ones(n)) * rng.integers(0, most - length + 1)
    for cut, size in zip(rng.integers(1, length, n), sizes, strict=True):
        pos[cut:] += int(size)
    return pos.astype(np.int32)


def train(
    params: PyTree[Any],
    model: LanguageModel,
    attend: Callable[..., Any],
    adam_rate: float,
    batch: Callable[[int, Any], tuple[Any, ...]],
    curriculum: Sequence[Stage],
    identity: dict[str, Any],
    how: Options,
) -> PyTree[Any] | None:
    """Goes through a curriculum, or goes on where an interrupted run stopped.

    Args:
      params: at the start.
      model, attend: see `make_step`.
      adam_rate: see `optimizer`.
      batch: tokens, classes and what `attend` takes, of a step and its stage: a function of these alone.
      curriculum: stages.
      identity: what a run that goes on must share with the one that stopped, beside seed, model and curriculum.
      how: checkpoints and steps.

    Returns:
      The parameters at the end, None if `max_steps` came first.

    Raises:
      ValueError: the checkpoints are another run's.
    """
    tx = optimizer(adam_rate)
    step_fn = make_step(model, attend, tx)
    steps = sum(stage.steps for stage in curriculum)
    print(f"{num_params(params):,} parameters, at most {steps} steps")

    def advance(state: PyTree[Any], progress: Progress) -> tuple[PyTree[Any], Progress, str]:
        at, i, step = progress["stage"], progress["step_in_stage"], progress["step"]
        stage = curriculum[at]
        rate = stage.rate[0] + (stage.rate[1] - stage.rate[0]) * (i / stage.steps)
        data = batch(step, stage)
        params, opt_state, metrics = step_fn(state["params"], state["opt_state"], jnp.float32(rate), *data)
        answers, language, first = np.asarray(metrics).tolist()
        recent = [*progress["recent"], first][-RECENT:]
        learned = stage.until is not None and len(recent) == RECENT and np.mean(recent) > stage.until
        progress = {"step": step + 1, "stage": at, "step_in_stage": i + 1, "recent": recent}
        if learned or i + 1 == stage.steps:
            progress |= {"stage": at + 1, "step_in_stage": 0, "recent": []}
        shown = f"stage {at + 1}/{len(curriculum)}, length {stage.length}, answers {answers:.3f}, "
        shown += f"language {language:.3f}, first token {first:.2f}"
        return {"params": params, "opt_state": opt_state}, progress, shown

    unfinished = lambda progress: progress["stage"] < len(curriculum)
    state, progress = go_through(
        how.checkpoints,
        {"seed": how.seed, "config": repr(model.config), **identity, "curriculum": repr(curriculum)},
        {"params": params, "opt_state": tx.init(params)},
        {"step": 0, "stage": 0, "step_in_stage": 0, "recent": []},
        advance,
        title="train",
        total=steps,
        more=lambda progress: unfinished(progress) and (how.max_steps is None or progress["step"] < how.max_steps),
        save_every=how.save_every,
    )
    return None if unfinished(progress) else state["params"]
