"""What a compressed cache is asked to do.

Every task is text: a context, a question about it, and the values that a right answer holds. Two protocols use them:

* "in_prompt": the question ends the prompt, so a policy can see what will be needed.
* "after_compression": the prompt is the context alone; the question is read after eviction, as in a second turn.
"""

from collections.abc import Callable

from experiments.tasks.base import Example as Example
from experiments.tasks.base import Protocol as Protocol
from experiments.tasks.base import Question as Question
from experiments.tasks.base import Task as Task
from experiments.tasks.base import Tokens as Tokens
from experiments.tasks.perplexity import perplexity
from experiments.tasks.retrieval import key_value, multi_query, several_needles, single_needle

TASKS: dict[str, Callable[..., Example]] = {
    "single_needle": single_needle,
    "several_needles": several_needles,
    "multi_query": multi_query,
    "key_value": key_value,
    "perplexity": perplexity,
}

RETRIEVAL = tuple(name for name in TASKS if name != "perplexity")
