"""What configs of `experiments/learn.py` return."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Annotated, Literal

import tyro

from kvjax import Evict
from kvjax.configs.experiment import (
    Budget,
    TaskName,
    check_distinct,
    check_fields,
    check_finite,
    check_whole,
)
from kvjax.contract import Observation
from kvjax.learning.families import Family
from kvjax.models.embedded import included

Objective = Literal["eviction_loss", "output_kl", "task_loss"]


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Model, prompts and sizes.

    Attributes:
      model: a checkpoint directory, a hub id ("owner/name" or "owner/name@revision") or a name of `models.PRESETS`;
        "embedded" or "varied" for a small model that comes with the project.
      tasks: what prompts are taken from.
      unseen: those of them that are only measured on: other templates and texts than what is learned from.
      calibration: prompts a task that are learned from.
      held_out: prompts a task that everything is measured on; no calibration prompt is among them.
      length: tokens of a prompt, at most.
      future: rows behind the prompt that count: what the model generates with the full cache, or the text that goes on.
      protocol: "in_prompt" asks at the end of the prompt, "after_compression" leaves the question to the future rows.
      batch_size: prompts that are read together, and that a step learns from.
      seed: of prompts, batches and every random draw.
      dtype: of parameters, activations and the KV cache; "auto" for the one that is stored.
    """

    model: str = "embedded"
    tasks: tuple[TaskName, ...] = ("single_needle", "several_needles", "multi_query", "key_value", "perplexity")
    unseen: tuple[TaskName, ...] = ()
    calibration: int = 24
    held_out: int = 96
    length: int = 1024
    future: int = 16
    protocol: Literal["in_prompt", "after_compression"] = "in_prompt"
    batch_size: int = 8
    seed: int = 0
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"

    def __post_init__(self):
        check_fields(self)
        check_distinct("tasks", self.tasks)
        if self.unseen and not set(self.unseen) < set(self.tasks):
            raise ValueError(f"unseen={self.unseen} must be some, and not all, of tasks={self.tasks}")
        check_whole(1, calibration=self.calibration, length=self.length, future=self.future, batch_size=self.batch_size)
        check_whole(2, held_out=self.held_out)
        check_whole(0, seed=self.seed)

    @property
    def source(self) -> str | pathlib.Path:
        """Where the model is, as `kvjax.models.load` takes it."""
        return included(self.model)


@dataclasses.dataclass(frozen=True)
class LearnedBudget:
    """One run of `experiments/learn.py budget`.

    Attributes:
      name: of the run, in tables and plots.
      method: budget to the policy whose allocation is learned; uniform over layers and heads.
      budgets: each is learned and measured for itself.
      family: what is learned.
      objective: what is made small on the calibration prompts.
      steps: updates of each budget's parameters.
      rate: Adam's learning rate at the start; it falls to a tenth of itself along a cosine.
      temperature: of the gates, in tokens, at the first and the last step.
      pyramid_beta, ada_alpha: of the baselines.
      measured: what the family needs to see of prompts beyond what the policy observes.
      prompts: everything else.
      origin: of what a user's file makes, which file it was and what it was given; `loading.find` says so.
    """

    name: str
    method: Callable[[Budget], Evict]
    budgets: tuple[Budget, ...]
    family: Family
    objective: Objective = "eviction_loss"
    steps: int = 150
    rate: float = 0.1
    temperature: tuple[float, float] = (16.0, 1.0)
    pyramid_beta: float = 20.0
    ada_alpha: float = 0.5
    measured: tuple[Observation, ...] = ()
    prompts: Prompts = Prompts()
    origin: str = ""

    def __post_init__(self):
        check_fields(self)
        check_distinct("budget", self.budgets)
        check_whole(1, steps=self.steps)
        if min(self.temperature) <= 0:
            raise ValueError(f"temperature={self.temperature}: temperatures are positive")
        check_finite(0, rate=self.rate, temperature=self.temperature)
        check_finite(pyramid_beta=self.pyramid_beta, ada_alpha=self.ada_alpha)
        if self.objective == "task_loss" and self.prompts.future < 2:
            raise ValueError(f"task_loss: future={self.prompts.future} row predicts no other; raise it to 2 at least")


@dataclasses.dataclass(frozen=True)
class LearnedScorer:
    """A small head on keys, values and statistics, in SnapKV's place.

    Attributes:
      name: of the run.
      budgets: live tokens a kv head and layer at which it is measured: numbers of tokens (int) or shares of the prompt.
      hidden: units of its hidden layer.
      window_size: the prompt's last tokens, whose votes are a feature, and which stay.
      kernel_size: pooling width of votes, odd.
      steps: updates.
      rate: Adam's learning rate at the start; it falls to a tenth of itself along a cosine.
      prompts: model, prompts and sizes.
    """

    name: Annotated[str, tyro.conf.Suppress] = "learned_scorer"
    budgets: Annotated[tuple[Budget, ...], tyro.conf.arg(name="budget")] = (0.0625, 0.125, 0.25)
    hidden: int = 16
    window_size: int = 16
    kernel_size: int = 7
    steps: int = 300
    rate: float = 3e-3
    prompts: Annotated[Prompts, tyro.conf.arg(name="")] = Prompts()

    def __post_init__(self):
        check_fields(self)
        check_distinct("budget", self.budgets)
        check_whole(1, hidden=self.hidden, window_size=self.window_size, steps=self.steps)
        check_whole(1, kernel_size=self.kernel_size)
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={self.kernel_size} must be odd")
        check_finite(0, rate=self.rate)
