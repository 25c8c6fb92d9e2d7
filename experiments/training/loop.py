"""What the trainings share: parameters at the start, optimiser, and loss."""

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
from kvjax.experiments import corpus
from kvjax.experiments.core.command import check_output
from kvjax.experiments.learning.loop import Stage, fit
from kvjax.models import LanguageModel, num_params

SPECIAL = {"pad_token": corpus.PAD, "bos_token": corpus.BOS, "eos_token": corpus.EOS, "unk_token": corpus.UNK}
LANGUAGE, ANSWER, FIRST = 1, 2, 3  # classes of predicted tokens; 0 is unpredictable and costs nothing


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
class DocumentStage(Stage):
    """A stretch of a curriculum, which advances when first tokens of answers are right.

    Attributes:
      length, batch: of the documents.
      rate: what updates are multiplied by at the beginning and the end.
    """

    length: int
    batch: int
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
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Loss on answers, and three tenths of that on language; with both, and the accuracy on first tokens."""
    ce = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    mean = lambda x, mask: (x * mask).sum() / jnp.maximum(mask.sum(), 1.0)
    masks = [m.astype(jnp.float32) for m in (kind >= ANSWER, kind == LANGUAGE, kind == FIRST)]
    right = (logits.argmax(-1) == targets).astype(jnp.float32)
    answers, language, first = mean(ce, masks[0]), mean(ce, masks[1]), mean(right, masks[2])
    loss = answers + 0.3 * language
    return loss, {"losses": loss, "answers": answers, "language": language, "accuracy": first}


def drawn(
    rng: np.random.Generator,
    stage: DocumentStage,
    document: Callable[[np.random.Generator, Any], tuple[np.ndarray, np.ndarray]],
    *,
    jumps: float,
    most: int,
) -> tuple[Int[np.ndarray, "B _"], Int[np.ndarray, "B _"], Int[np.ndarray, "B T"]]:
    """Tokens and classes of a stage's documents, and positions, some with one to six jumps (PoSE, arXiv 2309.10400).

    Args:
      rng: draws them.
      stage: how many, and how long.
      document: draws one, of a token more than the stage says.
      jumps: probability that the positions of a document jump.
      most: positions are below this.
    """
    each = [document(rng, stage) for _ in range(stage.batch)]
    tokens, classes = (np.stack(x).astype(np.int32) for x in zip(*each, strict=True))
    positions = np.tile(np.arange(stage.length, dtype=np.int32), (stage.batch, 1))
    for pos in positions:
        if rng.random() < jumps:
            n = rng.integers(1, 7)
            sizes = rng.dirichlet(np.ones(n)) * rng.integers(0, most - stage.length + 1)
            for cut, size in zip(rng.integers(1, stage.length, n), sizes, strict=True):
                pos[cut:] += int(size)
    return tokens, classes, positions


def train(
    initial: Callable[[Array], PyTree[Any]],
    model: LanguageModel,
    attend: Callable[..., Any],
    adam_rate: float,
    batch: Callable[[int, Any], tuple[Any, ...]],
    curriculum: Sequence[DocumentStage],
    how: Options,
    write: Callable[[PyTree[Any]], None],
    **identity: str,
) -> None:
    """Goes through a curriculum, or goes on where an interrupted run stopped, and writes the model at the end.

    Args:
      initial: parameters at the start, of a key.
      model: the model.
      attend: the attention, of what follows tokens and classes in a batch.
      adam_rate: see `optimizer`.
      batch: tokens, classes and what `attend` takes, of a step and its stage: a function of these alone.
      curriculum: stages.
      how: checkpoints and steps.
      write: writes the trained parameters.
      identity: what a run that goes on must share with the one that stopped, beside seed, model and curriculum.

    Raises:
      ValueError: options that cannot be, or the checkpoints of another run.
    """
    how.check()
    params = initial(jax.random.key(how.seed))
    print(f"{num_params(params):,} parameters, at most {sum(stage.steps for stage in curriculum)} steps")

    def loss(params, tokens, classes, *data):
        logits = model(params, tokens[:, :-1], attend=attend(*data))
        return loss_of(logits, tokens[:, 1:], classes[:, 1:])

    trained, _ = fit(
        how.checkpoints,
        {"seed": how.seed, "config": repr(model.config), **identity, "curriculum": repr(curriculum)},
        params,
        optimizer(adam_rate),
        loss,
        batch,
        curriculum,
        max_steps=how.max_steps,
        title="train",
        save_every=how.save_every,
    )
    if trained is not None:
        write(trained)
        print(f"wrote {how.output}")
