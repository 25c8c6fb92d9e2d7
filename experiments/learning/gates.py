"""Learns DuoAttention's gates of the embedded model, and measures retrieval at equal bytes beside SnapKV.

    python experiments/learn.py gates

Texts hold facts and questions about them (`kvjax.experiments.training.embedded`), and the states that predict answers
count. For each share of streaming heads there is a row of held-out prompts under the heads of the smallest gates, under
as many heads drawn at random, and under SnapKV with as many slots, which is as many bytes.
"""

import dataclasses
import pathlib
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import kvjax
from kvjax import methods, models
from kvjax.configs.experiment import check_finite, check_whole
from kvjax.contract import Attend
from kvjax.experiments.core.command import check_output, write_json
from kvjax.experiments.core.engine import Engine, prompts_of, shapes
from kvjax.experiments.core.provenance import environment
from kvjax.experiments.learning import loop
from kvjax.experiments.learning.future_rows import HELD_OUT
from kvjax.experiments.tasks import RETRIEVAL, TASKS, Example
from kvjax.experiments.tasks.base import task_of
from kvjax.experiments.training.embedded import Stage, document
from kvjax.experiments.training.loop import ANSWER, FIRST, drawn
from kvjax.learning.gates import distance, penalty
from kvjax.models.embedded import EMBEDDED


@dataclasses.dataclass(frozen=True)
class Learning:
    """How gates are learned.

    Attributes:
      steps: updates.
      rate: Adam's learning rate at the start; it falls to a tenth of itself along a cosine.
      weight: of the gates' L1 norm.
      sinks, recent: what streaming heads read.
      length, batch: of the texts.
      seed: of the texts.
    """

    steps: int = 100
    rate: float = 0.05
    weight: float = 0.05
    sinks: int = 16
    recent: int = 48
    length: int = 512
    batch: int = 4
    seed: int = 0

    def __post_init__(self):
        sizes = {"steps": self.steps, "recent": self.recent, "length": self.length, "batch": self.batch}
        check_whole(1, **sizes)
        check_whole(0, sinks=self.sinks, seed=self.seed)
        check_finite(0, rate=self.rate)
        check_finite(weight=self.weight)


def texts(how: Learning, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and which states count, of one step: a function of seed and step alone."""
    stage = Stage(how.steps, how.length, how.batch, filler=(0.2, 0.95))
    tokens, classes, _ = drawn(np.random.default_rng([how.seed, step]), stage, document, jumps=0.0, most=how.length)
    return tokens[:, :-1], np.isin(classes[:, 1:], (ANSWER, FIRST))


def learn(
    hidden: Callable[[Any, Array, Attend], Array],
    params: Any,
    shape: tuple[int, int],
    how: Learning,
    batches: Callable[[int], tuple[np.ndarray, np.ndarray]],
    directory: pathlib.Path,
) -> tuple[Float[np.ndarray, "L K"], list[float]]:
    """Gates, all 1 at the start, and the distance at every step; or goes on where an interrupted run stopped.

    Args:
      hidden: the last hidden states, of parameters, token ids and attention.
      params: the parameters, which stay.
      shape: layers and kv heads.
      how: steps and sizes.
      batches: the texts of a step.
      directory: of the checkpoints.
    """

    def loss(gates, params, ids, counts):
        pos = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape)
        of = lambda attend: hidden(params, ids, attend)
        moved = distance(of, gates, pos, counts, sinks=how.sinks, recent=how.recent)
        return moved + penalty(gates, how.weight), {"losses": moved}

    gates, noted = loop.fit(
        directory,
        dataclasses.asdict(how),
        jnp.ones(shape),
        loop.adam(how.rate, how.steps),
        loss,
        lambda step, stage: (params, *batches(step)),
        [loop.Stage(how.steps)],
        within=lambda gates: jnp.clip(gates, 0.0, 1.0),
    )
    return np.asarray(gates), noted["losses"]


# --- retrieval ---


def examples(tokenizer: Any, length: int, count: int) -> list[Example]:
    """Held-out prompts of the retrieval tasks."""
    task = task_of(tokenizer, length, 0)
    return [TASKS[name](task, HELD_OUT + i) for name in RETRIEVAL for i in range(count)]


def retrieved(
    model: Any, params: Any, tokenizer: Any, policy: kvjax.Policy, found: Sequence[Example], batch: int
) -> float:
    """The mean score of greedy answers, from 0 to 1."""
    scores = []
    for shape in shapes(prompt for e in found for prompt in prompts_of(e, "in_prompt")):
        engine = Engine(model, params, policy, shape, batch_size=batch, tokenizer=tokenizer)
        engine.compile()
        for start in range(0, len(shape.prompts), batch):
            lines, _ = engine.run(shape.prompts[start : start + batch])
            scores += [line["score"] for own in lines for line in own]
    return float(np.mean(scores))


def needed(model: Any, policy: kvjax.Policy, length: int, steps: int) -> int:
    """Slots that all heads of all layers need, before a plan rounds them up."""
    infos = kvjax.make_plan(model.config, policy, np.array([length]), length, steps).infos
    each = [policy.at(info.layer, info.num_layers).sizes(info, np.array([length])) for info in infos]
    return sum(int(sizes.total.max()) for sizes in each)


def policies(
    gates: np.ndarray, how: Learning, share: float, slots: Callable[[kvjax.Policy], int], most: int
) -> dict[str, kvjax.Policy]:
    """What is measured at a share of streaming heads: the heads of the smallest gates, some at random, and SnapKV.

    Args:
      gates: what was learned.
      how: sinks and recent tokens.
      share: of streaming heads.
      slots: how many a policy needs, `most` of every head for answers.
      most: tokens of an answer.
    """
    drawn = np.random.default_rng(how.seed).permutation(gates.size).reshape(gates.shape) / gates.size
    duo = lambda table: methods.duo_attention(table, streaming=share, sinks=how.sinks, recent=how.recent)
    snapkv = methods.snapkv(slots(duo(gates)) // gates.size - most, window=16)
    return {"learned": duo(gates), "random": duo(drawn), "snapkv": snapkv}


def run(
    how: Learning = Learning(),
    shares: tuple[float, ...] = (0.25, 0.5, 0.75, 0.875),
    length: int = 1024,
    count: int = 24,
    batch: int = 16,
    output: pathlib.Path = pathlib.Path("results/duo_gates.json"),
) -> None:
    """Learns, measures, and writes both.

    Args:
      how: how gates are learned.
      shares: of streaming heads, each measured for itself.
      length: of the prompts that retrieval is measured on.
      count: of them, for each of the four tasks.
      batch: prompts that are answered together.
      output: the JSON file of gates and scores; while it learns, checkpoints are kept beside it.
    """
    check_whole(1, length=length, count=count, batch=batch)
    check_finite(0, 1, shares=shares)
    check_output(output)
    tokenizer = models.load_tokenizer(EMBEDDED)
    found = examples(tokenizer, length, count)  # before weights are loaded: a length may be too short for them
    model, params = models.load(EMBEDDED)
    shape = model.config.num_layers, model.config.num_kv_heads
    hidden = lambda params, ids, attend: model.states(params, ids, attend=attend)
    checkpoints = output.with_name(f"{output.name}.checkpoints")
    gates, moved = learn(hidden, params, shape, how, lambda step: texts(how, step), checkpoints)
    print(np.round(gates, 3))
    most = max(e.questions[0].max_new_tokens for e in found)
    slots = lambda policy: needed(model, policy, length, most)
    each = [({"policy": "full"}, methods.full())]
    for share in shares:
        of = policies(gates, how, share, slots, most)
        each += [({"policy": name, "streaming_heads": share}, policy) for name, policy in of.items()]
    rows = []
    for named, policy in each:
        score = retrieved(model, params, tokenizer, policy, found, batch)
        rows.append(named | {"slots": slots(policy), "score": score})
        print(rows[-1], flush=True)
    content = {"gates": gates.tolist(), "learning": dataclasses.asdict(how), "distance": moved, "retrieval": rows}
    write_json(output, {"environment": environment(["python", *sys.argv]), **content})
    shutil.rmtree(checkpoints)
    print(f"written to {output}")
