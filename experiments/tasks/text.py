"""Running text for contexts: where it comes from, where it is cut, and how much of it fits."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from kvjax.experiments import corpus
from kvjax.experiments.tasks.base import Task, Tokens, whole_text

_FEWEST_TOKENS = 4  # of a sentence of filler, which has seven words at least


def filler(rng: np.random.Generator, room: int) -> tuple[str, ...]:
    """Sentences of the project's own filler, more than `room` tokens of them."""
    bank = corpus.sentence_bank("held_out")
    return tuple(" ".join(bank[i]) for i in rng.integers(len(bank), size=room // _FEWEST_TOKENS + 1))


def haystack(task: Task, name: str, index: int, room: int, without: Sequence[str] = ()) -> tuple[str, ...]:
    """Sentences to hide something in: of the task's text, from a passage on and round its end, or of filler.

    Args:
      task: whose text it is.
      name, index: of the example, which says which passage, or seeds the filler.
      room: how many tokens are needed at most.
      without: what no sentence may hold, in upper or lower case.
    """
    found = task.turned(whole_text(task.text), index) if task.text else filler(task.rng(name, index), room)
    banned = [word.lower() for word in without]
    return tuple(s for s in found if not any(word in s.lower() for word in banned)) if banned else found


def most_that_fit(size: Callable[[int], int], room: int, *, least: int, most: int) -> int:
    """The largest number of units that takes `room` tokens at most, to within what `size` falls short of growing.

    Args:
      size: tokens that a number of units takes; it must grow with the number, nearly in proportion.
      room: tokens that there are.
      least, most: the smallest and the largest number.

    Returns:
      A number whose size was measured to fit; below `least` where not even that many do.
    """
    low, low_size = least, size(least)
    if low_size > room:
        return least - 1
    first, high, probe, turns = low_size, most + 1, min(most, least + 32), 0
    while low + 1 < high:
        here = size(probe)
        slope = max((here - first) / (probe - least), 1e-6)
        if here <= room:
            low, low_size = probe, here
        else:
            high = probe
        turns += 1
        guess = low + int((room - low_size) / slope) if turns < 8 else (low + high) // 2
        probe = min(max(guess, low + 1), high - 1)
    return low


def check_room(name: str, task: Task, needed: int, what: str) -> None:
    """Tries whether a prompt has room.

    Raises:
      ValueError: a length below `needed`.
    """
    if needed > task.length:
        raise ValueError(f"{name}: {what} need {needed} tokens, but length={task.length}; raise the length")


def check_enough(name: str, task: Task, found: int, units: Sequence[object], tokens: int, what: str) -> None:
    """Tries whether there was more than fits.

    Raises:
      ValueError: everything fits, so that prompts would be shorter than they are said to be.
    """
    if found >= len(units):
        raise ValueError(
            f"{name}: all {len(units)} {what} make a prompt of {tokens} tokens, but length={task.length}; "
            "give more of them, or a smaller length"
        )


def grid(index: int, num_lengths: int, num_depths: int) -> tuple[int, int]:
    """The cell (length, depth) of an example, so that any number of examples covers a grid evenly.

    Among the first n examples the counts of any two lengths differ by one at most, and so do those of any two depths;
    `num_lengths * num_depths` examples hold every pair once.
    """
    step = next(s for s in range(max(1, round(0.382 * num_depths)), num_depths + 1) if math.gcd(s, num_depths) == 1)
    return (index + index // math.lcm(num_lengths, num_depths)) % num_lengths, step * index % num_depths


def cut_middle(ids: Sequence[int], most: int) -> Tokens:
    """The first and last half of `most` tokens, where there are more: how LongBench cuts."""
    if len(ids) <= most:
        return tuple(ids)
    head = most // 2
    return (*ids[:head], *ids[len(ids) - (most - head) :])
