"""Trains the reasoner: a small Llama that answers the tasks that think aloud (`tasks/aloud.py`), step by step.

It starts with the embedded model's previous-token and induction heads, learns short answers first, and sees prompts and
answers of all kinds one after another in a document. Positions jump, so that short documents show long distances.
"""

import dataclasses
import functools
import io
import pathlib
from typing import Annotated, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, PyTree

from kvjax.experiments import corpus
from kvjax.experiments.tasks.aloud import DIGITS, KINDS, LETTERS, NUMBERS, VOCABULARY, text_of
from kvjax.experiments.training import loop
from kvjax.experiments.training.embedded import induction_start, previous_token_start
from kvjax.experiments.training.loop import FIRST
from kvjax.learning.probes import fit_centres
from kvjax.models import LanguageModel, ModelConfig, Rope, save
from kvjax.models.tokenizer import write_tokenizer
from kvjax.models.written import write_bytes
from kvjax.run.layers import without_cache

WORDS: Final = (*loop.SPECIAL.values(), *VOCABULARY)
IDS: Final = {word: i for i, word in enumerate(WORDS)}
CONFIG: Final = ModelConfig(
    vocab_size=len(WORDS),
    embed_dim=256,
    mlp_dim=512,
    num_layers=5,
    num_query_heads=8,
    num_kv_heads=4,
    head_dim=32,
    rope=Rope(theta=10000.0),
    tie_embeddings=True,
    max_position=4096,
    bos_id=IDS[corpus.BOS],
    eos_ids=(IDS[corpus.EOS],),
)
_STD, _CIRCLES = 0.1, 8  # of embeddings


@dataclasses.dataclass(frozen=True)
class Stage(loop.DocumentStage):
    """A stretch of the curriculum.

    Attributes:
      most: steps of an answer.
    """

    most: int = 8


CURRICULUM: Final = (
    Stage(800, 128, 24, most=8, until=0.985),
    Stage(500, 256, 12, most=24, until=0.995),
    Stage(500, 512, 7, most=60, until=0.998, rate=(1.0, 0.6)),
    Stage(350, 1024, 4, most=130, rate=(0.6, 0.2)),
    Stage(250, 2048, 2, most=270, rate=(0.2, 0.01)),
)


def document(rng: np.random.Generator, stage: Stage) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and answers until a document is full: token ids, and the class of each; answers alone cost.

    Half of the answers may have any number of steps, so that all numbers of steps are seen early.
    """
    tokens, classes, kinds = [], [], [*KINDS.values()]
    while len(tokens) < stage.length + 1:
        make, _ = kinds[rng.integers(len(kinds))]
        most = stage.most if rng.random() < 0.5 else len(NUMBERS)
        prompt, steps = make(rng, int(rng.integers(1, most + 1)))
        asked, answer = [corpus.BOS, *prompt.split()], [*text_of(steps).split(), corpus.EOS]
        tokens += [IDS[word] for word in (*asked, *answer)]
        classes += [0] * len(asked) + [FIRST] * len(answer)
    return np.array(tokens[: stage.length + 1]), np.array(classes[: stage.length + 1])


def batch(seed: int, step: int, stage: Stage) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, classes, positions) of one step: a function of seed and step alone, whoever asks."""
    jumps = 0.5 if stage.length >= 192 else 0.0
    return loop.drawn(np.random.default_rng([seed, step]), stage, document, jumps=jumps, most=CONFIG.max_position)


def initial_params(key: Array) -> PyTree[Any]:
    """Random parameters, with heads that look one token back, heads that go on as before, and ordered words in order.

    They lie on circles and on a line: a word's successor is its embedding, turned, and a sum is a mean.
    """
    params = loop.initialised(LanguageModel(CONFIG).shapes, key, embedding_std=_STD)
    params = jax.tree.map(np.array, params)
    for words, turns in ((DIGITS, 1.0), (LETTERS, 0.5), (NUMBERS, 1.0)):
        place = np.arange(len(words))[:, None] / len(words)
        angle = 2 * np.pi * turns * place * 2.0 ** np.arange(_CIRCLES)
        ordered = 2 * _STD * np.concatenate([np.cos(angle), np.sin(angle), 2 * place - 1], 1)
        params["embed_tokens"][[IDS[w] for w in words], 1 : 2 + 2 * _CIRCLES] = ordered
    previous_token_start(params, c=CONFIG)
    induction_start(params, c=CONFIG)
    return jax.tree.map(jnp.asarray, params)


TOY: Final = (Stage(6, 128, 2), Stage(4, 256, 2, most=24))


@dataclasses.dataclass(frozen=True)
class Options(loop.Options):
    """How the training runs.

    Attributes:
      toy: ten steps on short documents, to see that everything works, in folders whose names end in _toy, so that no
        model is replaced; what it writes has learned nothing.
    """

    toy: bool = False


def centres(model: LanguageModel, params: PyTree[Any], seed: int) -> dict[str, np.ndarray]:
    """What TriAttention must know of the model (`fit_centres`), of 32 documents of 512 tokens."""
    tokens, *_ = batch(seed, 0, Stage(1, 512, 32, most=60))
    return fit_centres(model, params, tokens)


HOW = Options(pathlib.Path("results/train_reasoner"), pathlib.Path("results/reasoner"))


def train(how: Annotated[Options, tyro.conf.arg(name="")] = HOW) -> None:
    """Trains the reasoner, or goes on where an interrupted run stopped."""
    if how.toy:
        own = lambda folder: folder.with_name(f"{folder.name}_toy")
        how = dataclasses.replace(how, checkpoints=own(how.checkpoints), output=own(how.output))
    model = LanguageModel(CONFIG)

    def write(params: PyTree[Any]) -> None:
        save(how.output, model, params, dtype="float16")
        write_tokenizer(how.output, WORDS, special=loop.SPECIAL)
        file = io.BytesIO()
        found: dict[str, Any] = centres(model, params, how.seed + 1)
        np.savez(file, **found)
        write_bytes(how.output / "centres.npz", file.getvalue())

    of_step = functools.partial(batch, how.seed)
    loop.train(initial_params, model, without_cache, 3e-3, of_step, TOY if how.toy else CURRICULUM, how, write)
