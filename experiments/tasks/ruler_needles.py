"""RULER's eight needle tasks (Hsieh et al. 2024, arXiv:2404.06654; prompts and settings as in its code, Apache-2.0).

Numbers or UUIDs are hidden under keys, in a sentence that repeats, in essays, or among needles of the same form. What
is not RULER's here: "essays" are the task's text, or the project's filler where there is none; sentences are cut by
punctuation instead of nltk's model; draws come from the run's seed; keys and values are all different; and every
prompt is as long as fits, where RULER goes in steps of 500 words or 25 sentences. A length is that of prompt and answer
together.
"""

import dataclasses
import functools
import itertools
import uuid
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from kvjax.experiments.tasks.base import Example, Question, Task, example
from kvjax.experiments.tasks.ruler_words import words
from kvjax.experiments.tasks.text import check_enough, check_room, filler, most_that_fit, sentences

ANSWER = 128  # new tokens
_INTRODUCTION = (
    "{some} special magic {kind} {be} hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {kind} afterwards.\n"
)
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_ASKED = "special magic {kind} for {keys} mentioned in the provided text"
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_DEPTHS = tuple(int(d) for d in np.round(np.linspace(0, 100, 40)))  # percent of the sentences
_FEWEST_TOKENS = 8  # of a needle

Kind = Literal["words", "numbers", "uuids"]


@dataclasses.dataclass(frozen=True)
class Hidden:
    """What a needle task hides, and in what.

    Attributes:
      haystack: the noise sentence again and again, the task's text, or needles that are not asked for.
      keys, values: of what kind.
      num_keys, num_values, num_queries: needles are `num_keys * num_values`; `num_queries` keys are asked for.
    """

    haystack: Literal["noise", "text", "needles"]
    keys: Kind
    values: Kind
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


def niah_single_1(task: Task, index: int) -> Example:
    """RULER: a number under a word, in a sentence that repeats."""
    return _niah(task, index, "niah_single_1", Hidden("noise", "words", "numbers"))


def niah_single_2(task: Task, index: int) -> Example:
    """RULER: a number under a word, in running text."""
    return _niah(task, index, "niah_single_2", Hidden("text", "words", "numbers"))


def niah_single_3(task: Task, index: int) -> Example:
    """RULER: a UUID under a word, in running text."""
    return _niah(task, index, "niah_single_3", Hidden("text", "words", "uuids"))


def niah_multikey_1(task: Task, index: int) -> Example:
    """RULER: four numbers under words, one of which is asked for, in running text."""
    return _niah(task, index, "niah_multikey_1", Hidden("text", "words", "numbers", num_keys=4))


def niah_multikey_2(task: Task, index: int) -> Example:
    """RULER: a number under a word, among nothing but other words and their numbers."""
    return _niah(task, index, "niah_multikey_2", Hidden("needles", "words", "numbers"))


def niah_multikey_3(task: Task, index: int) -> Example:
    """RULER: a UUID under a UUID, among nothing but other UUIDs."""
    return _niah(task, index, "niah_multikey_3", Hidden("needles", "uuids", "uuids"))


def niah_multivalue(task: Task, index: int) -> Example:
    """RULER: four numbers under one word, all of which are asked for, in running text."""
    return _niah(task, index, "niah_multivalue", Hidden("text", "words", "numbers", num_values=4))


def niah_multiquery(task: Task, index: int) -> Example:
    """RULER: four numbers under four words, all of which are asked for, in running text."""
    return _niah(task, index, "niah_multiquery", Hidden("text", "words", "numbers", num_keys=4, num_queries=4))


def _niah(task: Task, index: int, name: str, s: Hidden) -> Example:
    """A needle task; the score is the share of values that the answer holds.

    Raises:
      ValueError: a length too small for the needles, a text too short for the length, or wonderwords is not installed.
    """
    rng = task.rng(name, index)
    draws = _distinct(rng, s.keys, s.num_keys), _distinct(rng, s.values, s.num_keys * s.num_values)
    keys, values = draws[0], [draws[1][i : i + s.num_values] for i in range(0, len(draws[1]), s.num_values)]
    needles = [_NEEDLE.format(kind=s.values, key=k, value=v) for k, vs in zip(keys, values, strict=True) for v in vs]
    needles = [needles[i] for i in rng.permutation(len(needles))]
    chosen = rng.permutation(s.num_keys)[: s.num_queries]
    introduction, asked = _prompt(s, [keys[i] for i in chosen])
    units = _units(task, s, rng, draws)

    def context(count: int) -> tuple[int, ...]:
        places = task.rng(f"{name}/places", index)
        hide = _among if s.haystack == "text" else _between
        return (*task.bos, *task.encode(introduction + hide(units[:count], needles, places)))

    question = tuple(task.encode(asked))
    size = lambda count: len(context(count)) + len(question) + ANSWER
    least = len(needles)
    check_room(name, task, size(least), f"{len(needles)} needles, question and {ANSWER} tokens of answer")
    count = most_that_fit(size, task.length, least=least, most=len(units))
    check_enough(name, task, count, units, size(count), "words of the text" if s.haystack == "text" else "sentences")
    references = tuple(v for i in chosen for v in values[i])
    wanted = Question(question, references=references, metric="contains_all", max_new_tokens=ANSWER)
    return example(name, index, context(count), wanted, length=float(task.length))


def _prompt(s: Hidden, keys: Sequence[str]) -> tuple[str, str]:
    """What stands before the text, and the question after it with the beginning of the answer."""
    one = s.num_queries * s.num_values == 1
    kind = s.values[:-1] if one else s.values
    asked = _ASKED.format(kind=kind, keys=", ".join((*keys[:-1], f"and {keys[-1]}")) if len(keys) > 1 else keys[0])
    introduction = _INTRODUCTION.format(some="A" if one else "Some", kind=kind, be="is" if one else "are")
    return introduction, f"\nWhat {'is' if one else 'are all'} the {asked}? The {asked} {'is' if one else 'are'}"


def _units(task: Task, s: Hidden, rng: np.random.Generator, taken: tuple[list[str], list[str]]) -> tuple[str, ...]:
    """What the haystack is made of, more than fits: words of text, or sentences."""
    if s.haystack == "text":
        return _text_words(task.text) if task.text else _filler_words(task.seed, task.length)
    most = task.length // _FEWEST_TOKENS + 1
    if s.haystack == "noise":
        return (NOISE,) * most
    keys, values = _distinct(rng, s.keys, most, taken[0]), _distinct(rng, s.values, most, taken[1])
    return tuple(_NEEDLE.format(kind=s.values, key=k, value=v) for k, v in zip(keys, values, strict=True))


@functools.lru_cache(maxsize=2)
def _text_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@functools.lru_cache(maxsize=2)
def _filler_words(seed: int, room: int) -> tuple[str, ...]:
    return tuple(" ".join(filler(np.random.default_rng(seed), room)).split())


def _distinct(rng: np.random.Generator, kind: Kind, count: int, taken: Sequence[str] = ()) -> list[str]:
    """Random words, numbers or UUIDs, all different from each other and from those that are taken."""
    draw, found, seen = _draws(kind), [], set(taken)
    while len(found) < count:
        value = draw(rng)
        if value not in seen:
            seen.add(value)
            found.append(value)
    return found


def _draws(kind: Kind) -> Callable[[np.random.Generator], str]:
    if kind == "numbers":
        return lambda rng: str(rng.integers(10**6, 10**7))
    if kind == "uuids":
        return lambda rng: str(uuid.UUID(bytes=rng.bytes(16), version=4))
    adjectives, nouns = words("adjective"), words("noun")
    return lambda rng: f"{adjectives[rng.integers(len(adjectives))]}-{nouns[rng.integers(len(nouns))]}"


def _among(units: Sequence[str], needles: Sequence[str], rng: np.random.Generator) -> str:
    """Needles at different ones of 40 depths of running text, each after a sentence."""
    found = sentences(" ".join(units))
    depths = sorted(rng.choice(_DEPTHS, len(needles), replace=False))
    ends = [0, *(int(len(found) * depth / 100) for depth in depths), len(found)]
    parts = []
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        parts += [*found[start:end], *needles[i : i + 1]]
    return " ".join(parts)


def _between(units: Sequence[str], needles: Sequence[str], rng: np.random.Generator) -> str:
    """Needles before different ones of the lines."""
    lines = list(units)
    places = sorted(rng.choice(len(lines), len(needles), replace=False), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines)
