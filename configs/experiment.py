"""What a config returns: policies at several budgets, and the setup that all experiments share."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import numpy as np
import tyro

from kvjax import Policy
from models.embedded import EMBEDDED

Budget = int | float
TaskName = Literal["single_needle", "several_needles", "multi_query", "key_value", "perplexity"]

BUDGETS: tuple[Budget, ...] = (0.5, 0.25, 0.125, 0.0625)


@dataclasses.dataclass(frozen=True)
class Setup:
    """Model, tasks and sizes.

    Attributes:
      model: a checkpoint directory or a hub id; "embedded" is the small model that comes with the project.
      tasks: which tasks to run.
      examples: examples a task.
      length: tokens of a prompt, at most; single_needle also uses shorter ones.
      protocol: "in_prompt" asks at the end of the prompt, "after_compression" once the cache has been evicted.
      baselines: other configs to run beside this one.
      baseline_budget: the budget that they get.
      block: read prompts in blocks of so many tokens, each followed by an eviction; at once if not given.
      batch_size: prompts that run together.
      seed: of examples and of every random draw.
      dtype: of parameters, activations and the KV cache.
    """

    model: str = "embedded"
    tasks: tuple[TaskName, ...] = ("single_needle", "several_needles", "multi_query", "key_value", "perplexity")
    examples: int = 48
    length: int = 1024
    protocol: Literal["in_prompt", "after_compression"] = "in_prompt"
    baselines: tuple[str, ...] = ("random", "streaming_llm", "h2o", "ada_snapkv")
    baseline_budget: Budget = 0.125
    block: int | None = None
    batch_size: int = 16
    seed: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def __post_init__(self):
        for name, least in (("examples", 1), ("length", 1), ("batch_size", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")

    @property
    def source(self) -> str | pathlib.Path:
        """Where the model is: a directory or a hub id."""
        return EMBEDDED if self.model == "embedded" else self.model


Common = Annotated[Setup, tyro.conf.arg(name="")]  # its fields are command-line options without a prefix


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One run of `experiments/run.py`.

    Attributes:
      name: of the method, in tables and plots.
      policies: (label, policy) pairs. The label is the budget, or a string for policies without one, such as "T=0.95";
        plots place those by the live tokens that were measured.
      setup: everything else.
    """

    name: str
    policies: tuple[tuple[Budget | str, Policy], ...]
    setup: Setup = Setup()


def label(budget: Budget | str) -> str:
    """How a budget is written in results: floats in positional notation, so that they stay told from ints."""
    return np.format_float_positional(budget, trim="0") if isinstance(budget, float) else str(budget)


def sweep(make: Callable[[Budget], Policy], budgets: Sequence[Budget]) -> tuple[tuple[Budget, Policy], ...]:
    """One policy for every budget."""
    if not budgets:
        raise ValueError("budget is empty; give at least one number of tokens (int) or share of the prompt (float)")
    return tuple((b, make(b)) for b in budgets)
