"""Facts hidden in filler, asked for at the end."""

import numpy as np

from kvjax.experiments import corpus
from kvjax.experiments.tasks.base import Example, Question, Task, example

DEPTHS = 8
DEPTH_STEP = 3  # from one example's depth to the next one's: coprime to DEPTHS, so that few examples lie far apart
LENGTHS = (1.0, 0.8, 0.6, 0.4)  # of the full length


def _facts(rng: np.random.Generator, count: int) -> tuple[list[str], list[list[str]]]:
    names = [corpus.NAMES[i] for i in rng.permutation(len(corpus.NAMES))[:count]]
    return names, [corpus.draw_value(rng) for _ in range(count)]


def _ask(
    task: Task,
    rng: np.random.Generator,
    name: str,
    index: int,
    *,
    length: int,
    stated: corpus.Phrasing,
    asked: corpus.Phrasing,
    facts: tuple[list[str], list[list[str]]],
    places: np.ndarray,
    queries: int = 1,
) -> Example:
    """An example that states all facts at `places` and asks for the first `queries` of them."""
    names, values = facts
    question = task.ids(corpus.question(asked, names[:queries]))
    inserts = [(p, corpus.fact(stated, n, v)) for p, n, v in zip(places, names, values, strict=True)]
    context = task.fill(rng, length - len(question), inserts)
    first, *others = (" ".join(v) for v in values[:queries])
    before = [" ".join(corpus.words(n, asked.answer[1])) for n in names[1:queries]]
    references = (first, *(f"{b} {v}" for b, v in zip(before, others, strict=True)))
    answer = " . ".join((first, *(f"the code for {r}" for r in references[1:])))
    most = len(task.encode(answer)) + 2  # punctuation included
    asked_for = Question(question, references=references, max_new_tokens=most)
    needle = task.ids(inserts[0][1])
    at = next(t for t in range(len(context)) if context[t : t + len(needle)] == needle)
    meta = {"depth": round(float(places[0]), 4), "needle_at": float(at), "needle_tokens": float(len(needle))}
    return example(name, index, context, asked_for, length=float(length), **meta)


def _phrasings(rng: np.random.Generator) -> tuple[corpus.Phrasing, corpus.Phrasing]:
    stated, asked = (corpus.PHRASINGS[i] for i in rng.integers(len(corpus.PHRASINGS), size=2))
    return stated, asked


def single_needle(task: Task, index: int) -> Example:
    """One fact, at a depth and in a prompt of a length that change together from example to example.

    Among the first n examples the counts of any two depths differ by one at most, and so do those of any two lengths;
    32 examples hold every pair once. Each round of depths starts at the next length.
    """
    rng = task.rng("single_needle", index)
    depth = DEPTH_STEP * index % DEPTHS / (DEPTHS - 1)
    length = round(task.length * LENGTHS[(index + index // DEPTHS) % len(LENGTHS)])
    stated, asked = _phrasings(rng)
    return _ask(
        task, rng, "single_needle", index, length=length, stated=stated, asked=asked, facts=_facts(rng, 1),
        places=np.array([depth]),
    )  # fmt: skip


def several_needles(task: Task, index: int, count: int = 16) -> Example:
    """Sixteen facts at random places, one of them asked for."""
    rng = task.rng("several_needles", index)
    stated, asked = _phrasings(rng)
    return _ask(
        task, rng, "several_needles", index, length=task.length, stated=stated, asked=asked,
        facts=_facts(rng, count), places=rng.uniform(size=count),
    )  # fmt: skip


def multi_query(task: Task, index: int, count: int = 8, queries: int = 3) -> Example:
    """Eight facts, three of them asked for at once and answered in one go."""
    rng = task.rng("multi_query", index)
    stated, asked = _phrasings(rng)
    return _ask(
        task, rng, "multi_query", index, length=task.length, stated=stated, asked=asked, facts=_facts(rng, count),
        places=rng.uniform(size=count), queries=queries,
    )  # fmt: skip


def key_value(task: Task, index: int, count: int = 32) -> Example:
    """A table of bare pairs somewhere in the filler; the question is a key."""
    rng = task.rng("key_value", index)
    facts = _facts(rng, count)
    place = rng.uniform()
    rows = rng.permutation(count)  # the first fact is asked for; where it stands in the table is random
    return _ask(
        task, rng, "key_value", index, length=task.length, stated=corpus.PAIR, asked=corpus.PAIR, facts=facts,
        places=place + rows * 1e-9,
    )  # fmt: skip
