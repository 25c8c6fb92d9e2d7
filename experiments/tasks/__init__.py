"""What a compressed cache is asked to do.

Every task is text: a context, a question about it, and the values that a right answer holds. Two protocols use them:

* "in_prompt": the question ends the prompt, so a policy can see what will be needed.
* "after_compression": the prompt is the context alone; the question is read after eviction, as in a second turn.
"""

import inspect

from kvjax.configs import loading
from kvjax.experiments.tasks.aloud import ALOUD
from kvjax.experiments.tasks.base import BadRow as BadRow
from kvjax.experiments.tasks.base import Builder as Builder
from kvjax.experiments.tasks.base import Example as Example
from kvjax.experiments.tasks.base import Protocol as Protocol
from kvjax.experiments.tasks.base import Question as Question
from kvjax.experiments.tasks.base import Task as Task
from kvjax.experiments.tasks.base import Tokens as Tokens
from kvjax.experiments.tasks.multi_turn import multi_turn, multi_turn_key_value
from kvjax.experiments.tasks.needle import needle, needle_number, two_instructions
from kvjax.experiments.tasks.perplexity import (
    continuation,
    evicted_perplexity,
    long_continuation,
    perplexity,
    sliding_perplexity,
    streaming_perplexity,
    summary,
)
from kvjax.experiments.tasks.retrieval import key_value, multi_query, several_needles, single_needle
from kvjax.experiments.tasks.rows import Form, dialogue, load_rows, reconstruction, summarise
from kvjax.experiments.tasks.ruler import RULER, words

RETRIEVAL = ("single_needle", "several_needles", "multi_query", "key_value")
NEEDLES = ("single_needle", "needle", "needle_number")
TASKS: dict[str, Builder] = {
    **{build.__name__: build for build in (single_needle, several_needles, multi_query, key_value, perplexity)},
    **{build.__name__: build for build in (needle, needle_number, two_instructions, multi_turn, multi_turn_key_value)},
    **RULER,
    **ALOUD,
    **{build.__name__: build for build in (sliding_perplexity, streaming_perplexity, evicted_perplexity)},
    **{
        build.__name__: build
        for build in (continuation, long_continuation, summary, summarise, reconstruction, dialogue)
    },
}
"""Every task by its name: `(task, index) -> Example`; the first line of its docstring says what it asks."""
FORMS: dict[str, Builder] = {name: TASKS[name] for name in ("summarise", "reconstruction", "dialogue", "qa_1", "qa_2")}
"""Tasks that take `Task.rows`; each says which fields a row has."""


def __getattr__(name: str) -> Builder:
    """One of RULER's tasks; the others are imported above."""
    if name not in RULER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return RULER[name]


def find(name: str) -> tuple[str, Builder]:
    """The name that a task has in results, and what builds it.

    Args:
      name: one of `TASKS`, "form:source" for one of `FORMS` over rows of one's own, or "path.py:function" for a
        builder (task, index) of one's own, named after the function.

    Raises:
      ValueError: no such task, naming those that exist; a source that cannot be read; a function that cannot be
        called so; a missing extra.
    """
    if name in TASKS:
        if name == "cwe" or name.startswith("niah_"):
            words("noun")  # so that an extra which is missing is named before a model is loaded
        return name, TASKS[name]
    form, _, source = name.partition(":")
    if form in FORMS and source:
        data = load_rows(source)
        return f"{form}:{data.name}", Form(f"{form}:{data.name}", data.source, data.rows, form=form, build=FORMS[form])
    if ".py:" not in name:
        raise loading.unknown("task", name, TASKS, "write path.py:function for your own")
    builder = loading.function(name)
    try:
        inspect.signature(builder).bind("task", 0)
    except TypeError as e:
        raise ValueError(f"{name} cannot be called with (task, index): {e}") from e
    return name.rpartition(":")[2], builder


def listing() -> str:
    """A line for every task."""
    first = lambda builder: (inspect.getdoc(builder) or "").partition("\n")[0]
    width = max(map(len, TASKS))
    return "\n".join(f"{name:{width}} {first(builder)}" for name, builder in TASKS.items())
