"""What a config returns: policies at several budgets, and the setup that all experiments share."""

import dataclasses
import math
import numbers
import pathlib
import reprlib
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from kvjax import Policy
from kvjax.models.embedded import included

Budget = int | float
TaskName = Literal["single_needle", "several_needles", "multi_query", "key_value", "perplexity"]
TASKS: tuple[str, ...] = typing.get_args(TaskName)

BUDGETS: tuple[Budget, ...] = (0.5, 0.25, 0.125, 0.0625)
BASELINES = ("random", "streaming_llm", "h2o", "ada_snapkv")
BASELINE_BUDGET: Budget = 0.125
COMPACT = ("streaming_llm",)  # those that give stored keys other positions


Made = Policy | tuple[Policy, Any]
"""A policy, or one and its learned parameters, a tree a layer (`kvjax.init_policy_params`)."""

LARGEST = 2**31 - 1
_LONGEST = 100  # bytes of a name; two make a file's


def check_fields(value: Any) -> None:
    """Tries whether the fields of a dataclass are of their types, and one of the values that are named.

    Raises:
      ValueError: one that is not.
    """
    hints = typing.get_type_hints(type(value))
    for field in dataclasses.fields(value):
        found, wanted = getattr(value, field.name), hints[field.name]
        if not _fits(found, wanted):
            shown = str(wanted).replace("typing.", "") if typing.get_origin(wanted) else wanted.__name__
            raise ValueError(f"{field.name}={reprlib.repr(found)} is not of the type {shown}")


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a value is of an annotated type; numbers are of those of a lesser kind, as numpy's are."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is Any or origin is Callable:
        return wanted is Any or callable(value)
    if origin is Literal:
        return value in arguments
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is tuple:
        each = (arguments[0],) * len(value) if arguments[-1] is ... and isinstance(value, tuple) else arguments
        return isinstance(value, tuple) and len(value) == len(each) and all(map(_fits, value, each))
    if wanted in (int, float):
        return not isinstance(value, bool) and isinstance(value, numbers.Integral if wanted is int else numbers.Real)
    return isinstance(value, wanted)


def check_whole(least: int, **options: Any) -> None:
    """Tries whether options are whole numbers of 32 bits and at least so large; tuples are tried number by number.

    Raises:
      ValueError: one that is not.
    """
    for name, value in options.items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | np.integer):
                raise ValueError(f"{name}={value!r} must be a whole number")
            if number < least:
                raise ValueError(f"{name}={value!r} must be at least {least}")
            if number > LARGEST:
                raise ValueError(f"{name}={value!r} must be at most {LARGEST}, which 32 bits hold")


def check_finite(least: float = -math.inf, most: float = math.inf, **options: Any) -> None:
    """Tries whether options are finite numbers above `least` and at most `most`; tuples are tried number by number.

    Raises:
      ValueError: one that is not.
    """
    for name, value in options.items():
        for number in value if isinstance(value, tuple) else (value,):
            if not (math.isfinite(number) and least < number <= most):
                wanted = f"above {least:g}" if math.isfinite(least) else ""
                wanted += f" and at most {most:g}" if math.isfinite(most) else ""
                raise ValueError(f"{name}={value!r} must be a finite number {wanted}".rstrip())


def with_params(made: Made) -> tuple[Policy, Any]:
    """A policy and its learned parameters, () if none are given."""
    return made if isinstance(made, tuple) else (made, ())


def changed(made: Made, change: Callable[[Policy], Policy]) -> Made:
    """Another policy made of one, with the same learned parameters."""
    policy, own = with_params(made)
    return (change(policy), own) if own else change(policy)


def label(budget: Budget | str) -> str:
    """How a budget is written in results: floats in positional notation, so that they stay told from ints."""
    return np.format_float_positional(budget, trim="0") if isinstance(budget, float) else str(budget)


def check_distinct(name: str, values: Sequence[Any]) -> None:
    """Tries whether there are values, and none of them twice.

    Raises:
      ValueError: none, or a value that is repeated.
    """
    if not values:
        raise ValueError(f"{name} is empty; give at least one")
    if repeated := [v for i, v in enumerate(values) if label(v) in map(label, values[:i])]:
        raise ValueError(f"{name} has {repeated[0]!r} twice; give each once")


@dataclasses.dataclass(frozen=True)
class Setup:
    """Model, tasks and sizes.

    Attributes:
      model: a checkpoint directory, a hub id ("owner/name" or "owner/name@revision") or a name of `models.PRESETS`;
        "embedded", "varied" or "reasoner" for a small model that comes with the project.
      tasks: which tasks to run: names, which `--tasks list` prints, or path.py:function of a builder of one's own;
        all five of `TASKS` if not given, and none beside `data`.
      data: rows of one's own: files of JSON lines with context, question and answers, or owner/name:split of the hub.
      metrics: path.py:function of metrics of one's own that rows of data may name; their code runs.
      text: a file of text in which facts are hidden and whose likelihood is asked for, in place of the project's.
      examples: examples a task, 48 if not given; of data the first rows, all if not given.
      length: tokens of a prompt that a task makes, at most; single_needle also uses shorter ones.
      max_length: tokens of context, question and answer of a row of data, at most; those that the model was made for if
        not given.
      max_new_tokens: tokens of an answer, at most, of rows of data that do not say.
      answer: tokens of an answer, at most, where a task or a row allows more.
      truncate: what is left out of contexts of data that are too long: "left" their beginning, "middle" what is
        between their first and last half. With "none" such rows are bad rows.
      template: "chat" asks within the tokenizer's chat template, in one message of the user, "raw" in plain text,
        "auto" within the template where there is one. Texts that are scored or go on are read as they are anyway.
      protocol: "in_prompt" asks at the end of the prompt, "after_compression" once the cache has been evicted.
      compress: evict after the prompt ("prefill"), while decoding ("decode"), or at whichever of them the method does
        ("both").
      num_beams: hypotheses of the beam search that finds every answer; 1 for greedy generation.
      own_answers: have every policy read the full cache's own answers, too, token by token, and say how likely they
        are: a slip at the beginning of a long answer does not decide all of that.
      baselines: other configs to run beside this one, "none" for the full cache alone; if not given, random,
        streaming_llm, h2o and ada_snapkv, without streaming_llm for a model with learned positions or with YaRN,
        longrope or dynamic scaling, whose stored keys cannot move to others.
      baseline_budget: the budget that they get; if not given, 12.5 % of the prompt, or the first of the method's own
        where that is none of them.
      block: read prompts in blocks of so many tokens, each followed by an eviction; at once if not given.
      reads: "once" reads prompts once for all policies, each of which then evicts from the same full cache, as far as
        that is what it keeps by itself: without `block` or several devices, and unless it has prompts read again.
        "each" reads them for every policy, whose own time and memory of prefill are then measured.
      slots: "own" gives a policy the slots that its budget needs. "shared" lets policies that differ in budgets alone
        run in the slots of the largest, so that they share programs, and compiling takes less; decode speed and peaks
        are then those of the largest budget, and left out of the others' lines.
      batch_size: prompts that run together.
      seed: of examples and of every random draw. With several, each task has its examples anew for each of them, and
        data their rows with other draws; they are pooled, rows that share a context counting as one in intervals.
      dtype: of parameters, activations and the KV cache; "auto" for the one that is stored.
    """

    model: str = "embedded"
    tasks: tuple[str, ...] | None = None
    data: tuple[str, ...] = ()
    metrics: tuple[str, ...] | None = None
    text: str | None = None
    examples: int | None = None
    length: int = 1024
    max_length: int | None = None
    max_new_tokens: int = 64
    answer: int | None = None
    truncate: Literal["none", "left", "middle"] = "none"
    template: Literal["auto", "chat", "raw"] = "auto"
    protocol: Literal["in_prompt", "after_compression"] = "in_prompt"
    compress: Literal["prefill", "decode", "both"] = "both"
    num_beams: int = 1
    own_answers: bool = False
    baselines: tuple[str, ...] | None = None
    baseline_budget: Budget | None = None
    block: int | None = None
    reads: Literal["once", "each"] = "once"
    slots: Literal["own", "shared"] = "own"
    batch_size: int = 16
    seed: int | tuple[int, ...] = 0
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"

    def __post_init__(self):
        if self.baselines == ("none",):
            object.__setattr__(self, "baselines", ())
        check_fields(self)
        sizes = {"length": self.length, "batch_size": self.batch_size, "max_new_tokens": self.max_new_tokens}
        check_whole(1, num_beams=self.num_beams, **sizes)
        check_whole(0, seed=self.seed)
        check_distinct("seed", self.seeds)
        optional = {name: getattr(self, name) for name in ("examples", "max_length", "answer", "block")}
        check_whole(1, **{name: value for name, value in optional.items() if value is not None})
        if self.own_answers and self.num_beams > 1:
            raise ValueError(
                f"own_answers asks how likely greedy answers are, and num_beams={self.num_beams} searches for others; "
                "give one of them"
            )
        if self.tasks is not None and not (self.data and not self.tasks):
            check_distinct("tasks", self.tasks)
        if not self.task_names and self.length != Setup.length:
            raise ValueError(
                f"length={self.length} is for prompts that tasks make, and only data run; leave it out, or cut their "
                "rows with max_length and truncate"
            )

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds."""
        return self.seed if isinstance(self.seed, tuple) else (self.seed,)

    @property
    def task_names(self) -> tuple[str, ...]:
        """The tasks that run, data aside."""
        return (() if self.data else TASKS) if self.tasks is None else self.tasks

    @property
    def source(self) -> str | pathlib.Path:
        """Where the model is, as `kvjax.models.load` takes it."""
        return included(self.model)


Common = Annotated[Setup, tyro.conf.arg(name="")]  # its fields are command-line options without a prefix


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One run of `experiments/run.py`.

    Attributes:
      name: of the method, in tables and plots.
      policies: (label, policy) pairs; in place of a policy may stand one and its learned parameters. The label is the
        budget, or a string for policies without one, such as "T=0.95"; plots place those by the live tokens that were
        measured.
      setup: everything else.
      options: those of the config that are not the defaults of the method in `kvjax.methods`, such as "window=16".
      beside: other methods, at budgets of their own, that run on the same prompts.
      origin: of policies that a user's file makes, which file it was and what it was given; `loading.find` says so.
    """

    name: str
    policies: tuple[tuple[Budget | str, Made], ...]
    setup: Setup = Setup()
    options: str = ""
    beside: tuple["Experiment", ...] = ()
    origin: str = ""

    def __post_init__(self):
        check_fields(self)
        check_distinct(f"policies of {self.name}", [b for b, _ in self.policies])
        for name in (self.name, *(label(b) for b, _ in self.policies)):
            if not name or set(name) & set("/@|\r\n\0"):
                raise ValueError(f"{name!r} names rows and files; leave out '/', '@', '|' and line breaks")
            if len(name.encode()) > _LONGEST:
                raise ValueError(
                    f"{reprlib.repr(name)} names files; shorten it from {len(name.encode())} to {_LONGEST} bytes"
                )

    @property
    def baseline_budget(self) -> Budget:
        """The budget of the baselines: the setup's, or where it has none one that the method runs at, too."""
        if self.setup.baseline_budget is not None:
            return self.setup.baseline_budget
        own = [b for b, _ in self.policies if not isinstance(b, str)]
        return own[0] if own and BASELINE_BUDGET not in own else BASELINE_BUDGET


def sweep(
    make: Callable[[Any], Made], values: Sequence[Any], name: str = "budget", form: str | None = None
) -> tuple[tuple[Any, Made], ...]:
    """One policy for every value, labelled by it, or by a form such as "T={:g}".

    Raises:
      ValueError: no value, or one that is repeated.
    """
    check_distinct(name, values)
    return tuple((x if form is None else form.format(x), make(x)) for x in values)
