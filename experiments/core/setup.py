"""What a setup asks for: examples of its tasks and data, and policies: the full cache, one's own and the baselines."""

import dataclasses
import hashlib
import inspect
import pathlib
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Final, Literal, NamedTuple

from tqdm import tqdm

import kvjax
from kvjax import configs, methods, models
from kvjax.budgets import Schedule
from kvjax.configs import loading
from kvjax.configs.experiment import BASELINES, COMPACT, Experiment, Made, Setup, changed, label, with_params
from kvjax.experiments import tasks
from kvjax.experiments.core import metrics
from kvjax.experiments.core.engine import Prompt, prompts_of
from kvjax.experiments.core.provenance import definition
from kvjax.experiments.core.records import digest
from kvjax.experiments.tasks import BadRow, Builder, Example, Task
from kvjax.experiments.tasks.base import check_known, task_of
from kvjax.experiments.tasks.rows import Rows, load_rows
from kvjax.methods.hidden import DropChannels

EXAMPLES: Final = 48
"""Examples of a task that has any number, where the setup does not say."""

Run = tuple[str, str, Made]
"""A method, its budget as results write it, and the policy, which may have learned parameters beside it."""

_OF_OTHERS = (
    "baselines",
    "baseline_budget",
    "compress",
    "metrics",
    "own_answers",
)  # what of a setup no line of a policy depends on
_UNSEEN = ("slots",)  # what no line depends on, but for its times and peaks


class Described(NamedTuple):
    """What a run asks, and of whom.

    Attributes:
      setup: with the baselines that its model can run.
      builders: what builds the examples of each task and file.
      runs: the full cache, the experiment's own policies, the baselines.
      manifest: what its manifest says of all that.
    """

    setup: Setup
    builders: dict[str, Builder]
    runs: list[Run]
    manifest: dict[str, Any]


def described(experiment: Experiment, config: Any, tokenizer: Any) -> Described:
    """Finds the tasks, policies and baselines of an experiment.

    Args:
      experiment: what to run.
      config: of its model.
      tokenizer: the model's.

    Raises:
      ValueError: what `find_builders` and `runs_of` refuse.
    """
    experiment = with_baselines(experiment, config)
    setup = dataclasses.replace(experiment.setup, template=rendering(experiment.setup, tokenizer))
    each = [experiment, *_baselines(experiment)]
    builders, runs = find_builders(setup), runs_of(each, setup)
    options, origins = {e.name: e.options for e in each}, {e.name: e.origin for e in each}
    policies = []
    for method, budget, made in runs:
        origin = origins.get(method) and f"{origins[method]} as {method}@{budget}"
        policies.append({"method": method, "budget": budget, "policy": _defined(made, origin or "")})
        if options.get(method):
            policies[-1]["options"] = options[method]
    asked = dict(zip(builders, (*setup.task_names, *setup.data), strict=True))
    examples = {
        name: {"examples": count(builder, setup) * len(setup.seeds), "builder": _made_by(builder, asked[name])}
        for name, builder in builders.items()
    }
    seen = {name: value for name, value in dataclasses.asdict(setup).items() if name not in _UNSEEN}
    same = {"tasks": examples, "text": text_digest(setup.text), "checkpoint": models.fingerprint(setup.source)}
    shared = [{name: value for name, value in seen.items() if name not in _OF_OTHERS}, *same.values()]
    ids = {f"{p['method']}@{p['budget']}": digest([p["policy"], shared]) for p in policies}
    manifest = {"name": experiment.name, "policies": policies, "setup": seen, **same, "ids": ids}
    return Described(setup, builders, runs, manifest)


# --- examples ---


def find_builders(setup: Setup) -> dict[str, Builder]:
    """What builds the examples of each task and file of a setup, by their names in results.

    Raises:
      ValueError: no such task, file or metric, two of one name, or none at all.
    """
    for name in setup.metrics or ():
        metrics.find(name)
    data = [
        load_rows(
            source,
            metrics=setup.metrics or (),
            max_new_tokens=setup.max_new_tokens,
            truncate=setup.truncate,
            most=setup.examples,
        )
        for source in setup.data
    ]
    found = [*map(tasks.find, setup.task_names), *((rows.name, rows) for rows in data)]
    names = [name for name, _ in found]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"two tasks or files are called {twice[0]}, which names rows of results; rename one")
    return dict(found)


def _made_by(builder: Builder, asked: str) -> str:
    """What makes the examples of a task, and code of the user's that scores them."""
    if not isinstance(builder, Rows):
        return definition(builder, loading.origin(asked.rpartition(":")[0]) if ".py:" in asked else "")
    named = [m for m in builder.metrics if any(row.get("metric") == m for row in builder.objects)]
    scored = "".join(f", scored by {m} of {loading.origin(m.rpartition(':')[0])}" for m in named if ".py:" in m)
    return f"{builder!r} of rows {builder.digest}{scored}"


def count(builder: Builder, setup: Setup) -> int:
    """How many examples there are of each seed."""
    if isinstance(builder, Sized):
        return len(builder) if setup.examples is None else min(len(builder), setup.examples)
    return EXAMPLES if setup.examples is None else setup.examples


def text_digest(file: str | None) -> str | None:
    """What tells one text from another; None of no file."""
    return None if file is None else hashlib.sha256(read_text(file).encode()).hexdigest()[:16]


def read_text(file: str) -> str:
    """The text of a file.

    Raises:
      ValueError: one that is absent, empty, or no text.
    """
    try:
        text = pathlib.Path(file).expanduser().read_text(encoding="utf-8")
    except OSError as e:
        raise ValueError(f"--text {file} cannot be read ({e.strerror}); name a file of text") from e
    except UnicodeDecodeError as e:
        raise ValueError(f"--text {file} is no text in UTF-8: {e}") from e
    if not text.strip():
        raise ValueError(f"--text {file} has no text; name a file that has some")
    return text


def build(
    setup: Setup, builders: Mapping[str, Builder], tokenizer: Any, config: Any
) -> tuple[list[Prompt], list[dict[str, Any]]]:
    """The prompts of all examples, in order; and of rows that cannot be asked task, index, line and reason.

    Args:
      setup: lengths, protocol and text.
      builders: by the names of tasks.
      tokenizer: the model's.
      config: the model's.

    Raises:
      ValueError: no row that can be asked, a chat without a template, a metric that lacks something, or beams for a
        task that scores text.
    """
    text = "" if setup.text is None else read_text(setup.text)
    most = config.max_position if config.learned_positions else None
    room = config.max_position if setup.max_length is None else setup.max_length
    room = room if most is None else min(room, most)
    given, chat = {"limit": room, "answer": setup.answer}, rendering(setup, tokenizer) == "chat"
    of_seed = [dataclasses.replace(task_of(tokenizer, setup.length, s, text, chat), **given) for s in setup.seeds]
    each = EXAMPLES if setup.examples is None else setup.examples
    of_seed = [dataclasses.replace(task, order=(setup.seeds[0], n * each)) for n, task in enumerate(of_seed)]
    rows: list[Prompt] = []
    seen: dict[Any, str] = {}
    bad: list[dict[str, Any]] = []
    todo = [
        (name, builder, n, i)
        for name, builder in builders.items()
        for n in range(len(of_seed))
        for i in range(count(builder, setup))
    ]
    for name, builder, n, i in tqdm(todo, "building examples", delay=2, leave=False):
        task, index = of_seed[n], n * count(builder, setup) + i
        limit = room if isinstance(builder, Sized) else most
        try:
            example = _searched(_built(name, builder, task, i, setup.answer), setup.num_beams)
            if n:
                example = dataclasses.replace(example, index=index, meta=(*example.meta, ("seed", task.seed)))
            rows += _fitting(_labelled(example, seen), setup, limit, task.seed)
        except BadRow as e:
            bad.append({"task": name, "index": index, "line": e.line, "reason": e.reason})
    if not rows:
        raise ValueError(f"none of {len(bad)} rows can be asked; the first, line {bad[0]['line']}: {bad[0]['reason']}")
    for metric in {q.metric for row in rows for q in row.example.questions if not q.continuation}:
        metrics.find(metric)
    return rows, bad


def _labelled(example: Example, seen: dict[Any, str]) -> Example:
    """The example, which says whose context it shares where an example before has the same; `seen` grows."""
    own = f"{example.task}/{example.index}"
    first = seen.setdefault(example.context, own)
    if first == own or "same_context" in dict(example.meta):
        return example
    return dataclasses.replace(example, meta=(*example.meta, ("same_context", first)))


def rendering(setup: Setup, tokenizer: Any) -> Literal["chat", "raw"]:
    """How the model of a setup is asked: "chat" or "raw"."""
    has = getattr(tokenizer, "chat_template", None) is not None
    return setup.template if setup.template != "auto" else "chat" if has else "raw"


def _built(name: str, builder: Builder, task: Task, index: int, most: int | None) -> Example:
    """An example whose answers have so many tokens at most.

    Raises:
      ValueError: what is no example, or what `check_known` refuses.
    """
    found = builder(task, index)
    if not isinstance(found, Example) or not found.context or not found.questions:
        raise ValueError(
            f"task {name} made {found!r:.80} of index {index}, not an Example with a context and questions"
        )
    if not isinstance(builder, Rows):
        check_known(f"task {name}, or its text,", found.given, task.tokenizer)
    cut = lambda q: q if most is None else dataclasses.replace(q, max_new_tokens=min(q.max_new_tokens, most))
    return dataclasses.replace(found, task=name, index=index, questions=(*map(cut, found.questions),))


def _searched(example: Example, num_beams: int) -> Example:
    """The example with so many beams for the answers whose task does not say.

    Raises:
      ValueError: text that is scored, by the task's name.
    """
    if num_beams == 1:
        return example
    if any(q.continuation for q in example.questions):
        raise ValueError(
            f"--num-beams {num_beams} searches for answers, but {example.task} scores text; leave it out, or run "
            "--tasks without it"
        )
    beams = lambda q: dataclasses.replace(q, num_beams=num_beams) if q.num_beams == 1 else q
    return dataclasses.replace(example, questions=(*map(beams, example.questions),))


def _fitting(example: Example, setup: Setup, limit: int | None, seed: int) -> list[Prompt]:
    """The prompts of an example.

    Raises:
      BadRow: one that is too long.
    """
    rows = prompts_of(example, setup.protocol, seed)
    longest = max(rows, key=lambda row: len(row.tokens) + row.steps)
    if limit is not None and len(longest.tokens) + longest.steps > limit:
        raise BadRow(
            example.index + 1,
            f"a prompt of {len(longest.tokens)} tokens and {longest.steps} after it are more than the {limit} that "
            "there is room for",
        )
    return rows


# --- policies ---


def with_baselines(experiment: Experiment, config: Any) -> Experiment:
    """The experiment with its baselines, by default those that a model of this config can run, and their budget."""
    setup = dataclasses.replace(experiment.setup, baseline_budget=experiment.baseline_budget)
    experiment = dataclasses.replace(experiment, setup=setup)
    if setup.baselines is not None:
        return experiment
    chosen = tuple(b for b in BASELINES if setup.compress == "both" or _can(b, experiment))
    if chosen != BASELINES:
        left = ", ".join(b for b in BASELINES if b not in chosen)
        print(f"baselines: {', '.join(chosen)}; without {left}, which --compress {setup.compress} is not for")
    if config.learned_positions or not config.additive_rotation:
        chosen = tuple(b for b in chosen if b not in COMPACT)
        print(
            f"baselines: {', '.join(chosen)}; without {', '.join(COMPACT)}, whose stored keys move to other positions, "
            f"which this model's {'learned positions' if config.learned_positions else 'rotary scaling'} cannot follow"
        )
    return dataclasses.replace(experiment, setup=dataclasses.replace(setup, baselines=chosen))


def _can(baseline: str, experiment: Experiment) -> bool:
    """Whether a baseline can evict when the setup says."""
    setup = experiment.setup
    theirs = configs.find(baseline)[1](budget=(experiment.baseline_budget,), setup=setup)
    try:
        return all(compressed(baseline, policy, setup) is not None for _, policy in theirs.policies)
    except ValueError:
        return False


def runs_of(each: Sequence[Experiment], setup: Setup) -> list[Run]:
    """The full cache and the policies of each experiment; one without budgets as it is.

    Raises:
      ValueError: a method and budget that stand for two policies, which would become one.
    """
    full = ("full", label(1.0), methods.full())
    own = [(e.name, label(b), p) for e in each for b, p in e.policies]
    found = [full, *((m, b, compressed(m, p, setup)) for m, b, p in own if (m, b, p) != full)]
    for i, (method, budget, _) in enumerate(found):
        if (method, budget) in ((m, b) for m, b, _ in found[:i]):
            raise ValueError(
                f"{method} at budget {budget} is there twice, and both would become one row; give each budget, "
                "baseline and name once"
            )
    return found


def _defined(made: Made, origin: str) -> str:
    """The definition of a policy, and a digest of its learned parameters."""
    policy, own = with_params(made)
    return definition(policy, origin) + (f" with parameters {digest(definition(own))}" if own else "")


def _baselines(experiment: Experiment) -> list[Experiment]:
    """The experiments beside, and those of baselines that are another method, at their budget where they have any."""
    found = [dataclasses.replace(each, origin=each.origin or experiment.origin) for each in experiment.beside]
    for name, get_config in map(configs.find, experiment.setup.baselines or ()):
        if name not in (experiment.name, "full"):
            given = {"budget": (experiment.baseline_budget,), "setup": experiment.setup}
            parameters = inspect.signature(get_config).parameters
            theirs = get_config(**{k: v for k, v in given.items() if k in parameters})
            check_is(theirs, Experiment, name)
            found.append(dataclasses.replace(theirs, name=name))
    return found


def compressed(name: str, made: Made, setup: Setup) -> Made:
    """A policy that evicts after the prompt alone, or while decoding alone, where the setup wants that.

    Raises:
      ValueError: a method that cannot, by its name.
    """

    def decoding(when: Schedule) -> Schedule:
        if not when.decodes:
            raise ValueError("it evicts after the prompt alone, never while decoding")
        return dataclasses.replace(when, prefill=False)

    if setup.compress == "both" or (setup.compress == "prefill" and isinstance(with_params(made)[0], DropChannels)):
        return made  # channels are dropped after the prompt in any case
    try:
        when = Schedule() if setup.compress == "prefill" else decoding
        return changed(made, lambda policy: kvjax.when(when, policy))
    except ValueError as e:
        raise ValueError(f"--compress {setup.compress} is not for {name}: {e}; leave it out") from e


def check_is(found: Any, kind: type, config: str) -> None:
    """Raises ValueError for what is not of the kind that a config's `get_config` must return."""
    if not isinstance(found, kind):
        raise ValueError(f"get_config of {config} returns a {type(found).__name__}, but must return a {kind.__name__}")
