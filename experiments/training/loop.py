"""A curriculum of stages, with checkpoints after which an interrupted run goes on with the same bits."""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Float, Int, PyTree
from tqdm import tqdm

from kvjax.configs.experiment import check_whole
from kvjax.experiments import stopping
from kvjax.experiments.core.command import check_output
from kvjax.experiments.core.locks import Locked
from kvjax.experiments.learning.checkpoints import read, save_progress
from kvjax.models import num_params

LANGUAGE, ANSWER, FIRST = 1, 2, 3  # classes of predicted tokens; 0 is unpredictable and costs nothing
RECENT = 20  # steps whose mean decides whether a stage has been learned


@dataclasses.dataclass
class Progress:
    """Where training stands; saved with every checkpoint.

    Attributes:
      step: updates made.
      stage: current stage of the curriculum.
      step_in_stage: updates made in it.
      recent: accuracies on first tokens of the stage's last 20 steps.
    """

    step: int = 0
    stage: int = 0
    step_in_stage: int = 0
    recent: list[float] = dataclasses.field(default_factory=list)


def initialised(shapes: PyTree[Any], key: Array, *, embedding_std: float, bias_std: float = 0.0) -> PyTree[Any]:
    """Random parameters of a model's shapes: matrices keep the size of what they read, and what is added is halved."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)

    def init(path: tuple[str, ...], shape: tuple[int, ...], key: Array) -> Array:
        if path[-1] == "scale":
            return jnp.full(shape, 0.3 if path[0] == "norm" else 1.0)
        if path[-1] == "embed_tokens":
            return embedding_std * jax.random.normal(key, shape)
        if path[-1] == "bias":
            return (0.0 if path[-2] == "v_proj" else bias_std) * jax.random.normal(key, shape)
        half = 0.5 if path[-2] in ("o_proj", "down_proj") else 1.0
        return half * shape[0] ** -0.5 * jax.random.normal(key, shape)

    keys = jax.random.split(key, len(leaves))
    values = [init(tuple(k.key for k in p), s.shape, key) for (p, s), key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, values)


def optimizer(adam_rate: float) -> optax.GradientTransformation:
    """Muon for matrices, Adam for embeddings, norms and biases."""

    def dimensions(params):
        matrix = lambda path, x: (
            optax.contrib.MuonDimensionNumbers() if x.ndim == 2 and path[0].key != "embed_tokens" else None
        )
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


def make_step(loss_fn: Callable[..., Any], tx: optax.GradientTransformation) -> Callable[..., Any]:
    """One jitted update `(params, opt_state, rate, *data)` of a loss `(params, *data)`."""

    @jax.jit
    def step(params, opt_state, rate, *data):
        (_, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, *data)
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


def check(seed: int, checkpoints: pathlib.Path, output: pathlib.Path, save_every: int, max_steps: int | None) -> None:
    """Tries what a user asked for.

    Raises:
      ValueError: numbers out of range, or a file where a directory is to be.
    """
    check_whole(0, seed=seed, max_steps=max_steps or 0)
    check_whole(1, save_every=save_every)
    for name, directory in (("checkpoints", checkpoints), ("output", output)):
        if directory.exists() and not directory.is_dir():
            raise ValueError(f"{name}={directory} is a file, not a directory")
    check_output(output / "config.json")


def train(
    params: PyTree[Any],
    tx: optax.GradientTransformation,
    step_fn: Callable[..., Any],
    batch: Callable[[int, Any], tuple[Any, ...]],
    curriculum: Sequence[Any],
    identity: dict[str, Any],
    *,
    checkpoints: pathlib.Path,
    save_every: int,
    max_steps: int | None,
) -> PyTree[Any] | None:
    """Goes through a curriculum, or goes on where an interrupted run stopped.

    Args:
      params: at the start.
      tx: what `step_fn` updates with.
      step_fn: see `make_step`.
      batch: the data of a step and its stage: a function of these alone.
      curriculum: stages. Each has `steps`, at most so many; `length`, of its documents in tokens; `until`, which the
        mean accuracy on answers' first tokens over 20 steps must exceed to end it sooner, None for all steps; and
        `rate`, the learning rate at the beginning and the end, relative.
      identity: what a run that goes on must share with the one that stopped.
      checkpoints: orbax checkpoints.
      save_every: steps between them.
      max_steps: stop, with a checkpoint, after this many steps in all.

    Returns:
      The parameters at the end, None if `max_steps` came first.

    Raises:
      ValueError: `checkpoints` holds another run.
    """
    opt_state, progress = tx.init(params), Progress()
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    stored = lambda: f"{checkpoints} holds step {manager.latest_step()}, and the same command goes on from there"
    with (
        Locked(checkpoints),
        ocp.CheckpointManager(checkpoints.absolute(), options=options) as manager,
        stopping.noted(stored),
        stopping.finishing("this step, and its checkpoint"),
    ):
        if manager.latest_step() is not None:
            state, saved = read(manager, checkpoints, {"params": params, "opt_state": opt_state})
            if saved["identity"] != json.loads(json.dumps(identity)):
                raise ValueError(
                    f"{checkpoints} holds a run with {saved['identity']}, not {identity}; "
                    "choose another --checkpoints, or delete it to start anew"
                )
            params, opt_state = state["params"], state["opt_state"]
            progress = Progress(**saved["progress"])
            print(f"resumed at step {progress.step} from {checkpoints}")

        def checkpoint():
            state = {"params": params, "opt_state": opt_state}
            save_progress(
                manager, progress.step, state, {"identity": identity, "progress": dataclasses.asdict(progress)}
            )

        print(f"{num_params(params):,} parameters, at most {sum(s.steps for s in curriculum)} steps")
        while progress.stage < len(curriculum):
            stage = curriculum[progress.stage]
            label = f"stage {progress.stage + 1}/{len(curriculum)}, length {stage.length}"
            with tqdm(total=stage.steps, initial=progress.step_in_stage, desc=label, file=sys.stdout) as bar:
                while progress.step_in_stage < stage.steps:
                    if max_steps is not None and progress.step >= max_steps:
                        checkpoint()
                        return None
                    fraction = progress.step_in_stage / stage.steps
                    rate = stage.rate[0] + (stage.rate[1] - stage.rate[0]) * fraction
                    data = batch(progress.step, stage)
                    params, opt_state, metrics = step_fn(params, opt_state, jnp.float32(rate), *data)
                    answers, language, first = np.asarray(metrics).tolist()
                    progress.step += 1
                    progress.step_in_stage += 1
                    progress.recent = [*progress.recent, first][-RECENT:]
                    bar.update()
                    bar.set_postfix_str(f"answers {answers:.3f}, language {language:.3f}, first token {first:.2f}")
                    if progress.step % save_every == 0 or stopping.asked():
                        checkpoint()
                        stopping.check()
                    full = len(progress.recent) == RECENT
                    if stage.until is not None and full and np.mean(progress.recent) > stage.until:
                        break
            progress = Progress(progress.step, progress.stage + 1)
        if manager.latest_step() != progress.step:
            checkpoint()
    return params
