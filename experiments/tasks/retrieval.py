"""Facts hidden in filler, asked for at the end."""

import numpy as np

from kvjax.experiments import corpus
from kvjax.experiments.tasks.base import Example, Question, Task, example

DEPTHS = 8
DEPTH_STEP = 3  # from one example's depth to the next one's: coprime to DEPTHS, so that few examples lie far apart
LENGTHS = (1.0, 0.8, 0.6, 0.4)  # of the full length


def _asked(
    task: Task,
    name: str,
    index: int,
    count: int,
    *,
    length: int | None = None,
    depth: float | None = None,
    table: bool = False,
    queries: int = 1,
) -> Example:
    """An example that states so many facts and asks for the first of them.

    Args:
      task: text, tokenizer and length.
      name, index: the task and which example of it.
      count: facts.
      length: tokens of the prompt, the task's if None.
      depth: where the fact stands, from 0 to 1; each has a random place if None.
      table: whether facts are bare pairs that stand together in random order, and the question is a bare name.
      queries: facts that are asked for.
    """
    rng, length = task.rng(name, index), task.length if length is None else length
    stated, asked = (corpus.PAIR, corpus.PAIR) if table else corpus.draw_phrasings(rng)
    names, values = corpus.draw_facts(rng, count)
    if table:
        places = rng.uniform() + rng.permutation(count) * 1e-9
    else:
        places = rng.uniform(size=count) if depth is None else np.array([depth])
    question = task.ask(task.ids(corpus.question(asked, names[:queries])))
    inserts = [(p, corpus.fact(stated, n, v)) for p, n, v in zip(places, names, values, strict=True)]
    context = task.fill(rng, index, length - len(question), inserts)
    first, *others = (" ".join(v) for v in values[:queries])
    before = [" ".join(corpus.words(n, asked.answer[1])) for n in names[1:queries]]
    references = (first, *(f"{b} {v}" for b, v in zip(before, others, strict=True)))
    answer = " . ".join((first, *(f"the code for {r}" for r in references[1:])))
    most = len(task.encode(answer)) + 2  # punctuation included
    asked_for = Question(question, references=references, max_new_tokens=most)
    needle = task.ids(inserts[0][1])
    at = next(t for t in range(len(context)) if context[t : t + len(needle)] == needle)
    meta = {"depth": round(float(places[0]), 4), "needle_at": float(at), "needle_tokens": float(len(needle))}
    return example(name, index, context, asked_for, length=float(length), **meta, **task.shared(index))


def single_needle(task: Task, index: int) -> Example:
    """One fact, at a depth and in a prompt of a length that change together from example to example.

    Among the first n examples the counts of any two depths differ by one at most, and so do those of any two lengths;
    32 examples hold every pair once. Each round of depths starts at the next length.
    """
    depth = DEPTH_STEP * index % DEPTHS / (DEPTHS - 1)
    length = round(task.length * LENGTHS[(index + index // DEPTHS) % len(LENGTHS)])
    return _asked(task, "single_needle", index, 1, length=length, depth=depth)


def several_needles(task: Task, index: int, count: int = 16) -> Example:
    """Sixteen facts at random places, one of them asked for."""
    return _asked(task, "several_needles", index, count)


def multi_query(task: Task, index: int, count: int = 8, queries: int = 3) -> Example:
    """Eight facts, three of them asked for at once and answered in one go."""
    return _asked(task, "multi_query", index, count, queries=queries)


def key_value(task: Task, index: int, count: int = 32) -> Example:
    """A table of bare pairs somewhere in the filler; the question is a key."""
    return _asked(task, "key_value", index, count, table=True)
