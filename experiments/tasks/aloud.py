"""Tasks whose answers are long: a model works step by step, and later steps need what earlier ones have written.

Prompts and answers are made of the words of `VOCABULARY`, for a model that was trained on them (`train.py reasoner`). A
step ends with ";", and the last one holds the result: `final_step` compares it, `leading_steps` says how far an answer
was right. An answer has as many steps as fit into its tokens (`--answer`, 256 if not given).
"""

import bisect
import itertools
import string
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from kvjax.experiments.tasks.base import Builder, Example, Question, Task, example

ANSWER: Final = 256
LETTERS: Final[tuple[str, ...]] = tuple(string.ascii_lowercase)
DIGITS: Final[tuple[str, ...]] = tuple(string.digits)
NUMBERS: Final = tuple(f"#{i}" for i in range(1, 513))
"""Of steps, which count down."""
WORDS: Final = tuple("+ = : ; ? chain restated once cups sort least rest add code from final".split())
VOCABULARY: Final = (*LETTERS, *DIGITS, *NUMBERS, *WORDS)
"""All words of prompts and answers, each with a space before it."""
REGISTERS: Final = 8
CUPS, SWAPS, LISTED, COLUMNS = 6, 8, 6, 4
"""Cups, swaps of them that are made in turn, letters of a list, and digits of a number."""
MOST: Final = 3
"""Of what is added to a digit of a code: sums whose operands say nothing by themselves are hard to learn."""
Steps = tuple[str, list[str]]
"""What is asked, and the steps of its answer."""


def _drawn(rng: np.random.Generator, among: Sequence[str], count: int) -> list[str]:
    return [among[i] for i in rng.permutation(len(among))[:count]]


def _chain(rng: np.random.Generator, count: int, restated: bool) -> Steps:
    """Registers that are renewed in turn, each by one more than another one has; the last step says one of them."""
    names, numbers = _drawn(rng, LETTERS, REGISTERS), NUMBERS[:count][::-1]
    value = {name: int(rng.integers(10)) for name in names}
    # The register that is read was written between 2 and all steps before, never in the step before.
    back = rng.integers(2, REGISTERS, REGISTERS)
    rules = {name: names[i - back[i]] for i, name in enumerate(names)}
    asked = names[int(rng.integers(REGISTERS))]
    # The register that is renewed next stands first.
    state = lambda i: " ".join(f"{name} {value[name]}" for name in (*names[i:], *names[:i]))
    written = " ; ".join(f"{name} {other}" for name, other in rules.items())
    kind = "restated" if restated else "once"
    prompt = f"chain {kind} : {state(0)} ; {written} ; {numbers[0]} : {asked} ?"
    steps = []
    for i, number in enumerate(numbers):
        name = names[i % REGISTERS]
        other = rules[name]
        before, old = f"{state(i % REGISTERS)} : " if restated else "", value[other]
        value[name] = (old + 1) % 10
        steps.append(f"{before}{number} {name} {other} {old} : {name} {value[name]}")
    return prompt, [*steps, f"final {asked} {value[asked]}"]


def _restated(rng: np.random.Generator, count: int) -> Steps:
    return _chain(rng, count, True)


def _once(rng: np.random.Generator, count: int) -> Steps:
    return _chain(rng, count, False)


def _cups(rng: np.random.Generator, count: int) -> Steps:
    """Letters in places, and swaps of two by name, made in turn; a step writes these two, before and after, and all."""
    letters, numbers = _drawn(rng, LETTERS, CUPS + SWAPS), NUMBERS[:count][::-1]
    places = dict(zip(DIGITS, letters[:CUPS], strict=False))
    swaps = {name: _drawn(rng, [*places], 2) for name in letters[CUPS:]}
    state = lambda: " ".join(f"{place} {letter}" for place, letter in places.items())
    told = " ; ".join(f"{name} {a} {b}" for name, (a, b) in swaps.items())
    prompt, steps = f"cups {state()} ; {told} ; {numbers[0]} ?", []
    for number, (name, (a, b)) in zip(numbers, itertools.cycle(swaps.items()), strict=False):
        x, y = places[a], places[b]
        places |= {a: y, b: x}
        steps.append(f"{number} {name} {a} {b} : {a} {x} {b} {y} : {a} {y} {b} {x} : {state()}")
    return prompt, [*steps, f"final {state()}"]


def _sort(rng: np.random.Generator, count: int) -> Steps:
    """A list whose least letter is taken out, again and again, and then the list of the letters that follow its own."""
    left, ordered = _drawn(rng, LETTERS, LISTED), list[str]()
    numbers, steps = NUMBERS[: -(-count // (LISTED + 1))][::-1], []
    prompt = f"sort {' '.join(left)} ; {numbers[0]} ?"
    for number in numbers:
        steps.append(f"{number} rest {' '.join(left)}")
        after, ordered = [LETTERS[(LETTERS.index(x) + 1) % len(LETTERS)] for x in left], sorted(left)
        for least in ordered:
            left.remove(least)
            steps.append(f"{number} least {least} rest {' '.join(left)}".removesuffix(" rest "))
        left = after
    return prompt, [*steps, f"final {' '.join(ordered)}"]


def _add(rng: np.random.Generator, count: int) -> Steps:
    """A number that is added again and again, last column first: digits, carried, carry, sum."""
    digits, more = rng.integers(0, 10, (2, COLUMNS)).tolist()
    told = " : ".join(f"{a} {b}" for a, b in zip(digits, more, strict=True))
    numbers, steps = NUMBERS[:count][::-1], []
    for number in numbers:
        columns, carry = [], 0
        for k, b in enumerate(more):
            a, total = digits[k], digits[k] + b + carry
            columns.append(f"{a} {b} {carry} = {total // 10} {total % 10}")
            carry, digits[k] = divmod(total, 10)
        steps.append(f"{number} {' : '.join(columns)}")
    return f"add {told} ; {numbers[0]} ?", [*steps, f"final {' '.join(map(str, digits))}"]


def _passcode(rng: np.random.Generator, count: int, in_prompt: bool) -> Steps:
    """A code before a chain and behind it: said in the prompt, or worked out in the answer's first step."""
    code, more = rng.integers(0, 10, 4), rng.integers(1, MOST + 1, 4)
    said = lambda digits: " ".join(map(str, digits))
    chain, steps = _chain(rng, count, False)
    if in_prompt:
        return f"code {said(code)} ; {chain}", [*steps[:-1], f"final code {said(code)}"]
    sums = " : ".join(f"{a} + {b}" for a, b in zip(code, more, strict=True))
    done = " : ".join(f"{a} + {b} = {(a + b) % 10}" for a, b in zip(code, more, strict=True))
    found = said((code + more) % 10)
    return f"code from {sums} ; {chain}", [f"{done} : code {found}", *steps[:-1], f"final code {found}"]


def _in_prompt(rng: np.random.Generator, count: int) -> Steps:
    return _passcode(rng, count, True)


def _in_answer(rng: np.random.Generator, count: int) -> Steps:
    return _passcode(rng, count, False)


KINDS: Final[dict[str, tuple[Callable[[np.random.Generator, int], Steps], str]]] = {
    "chain_restated": (_restated, "A chain of sums; each step restates all values; the rules stand in the prompt."),
    "chain_once": (_once, "A chain of sums; a step needs what was said once, up to eight steps before."),
    "cups": (_cups, "Places of cups, two of which are swapped in each step, with a scratch pad of all."),
    "sorting": (_sort, "Lists that are sorted by the least letter, each made of the one before."),
    "addition": (_add, "A number that is added again and again, modulo 10,000, with carries written out."),
    "passcode_in_prompt": (
        _in_prompt,
        "A code that the prompt says; the last step, behind a chain of sums, repeats it.",
    ),
    "passcode_in_answer": (
        _in_answer,
        "A code that the first step works out; the last one, behind a chain, repeats it.",
    ),
}
"""What makes a task's prompt and steps, by its name, and what it asks."""


def text_of(steps: Sequence[str]) -> str:
    """An answer, as it is to be written."""
    return " ; ".join(steps)


def drawn(task: Task, name: str, index: int) -> Steps:
    """A prompt, and as many steps as an answer's tokens have room for.

    Raises:
      ValueError: no room for a step, room for more than there are words for, or a prompt and an answer beyond the
        model's positions.
    """
    most, answer, make = len(NUMBERS), task.answer or ANSWER, KINDS[name][0]
    tokens = lambda text: len(task.ids(text.split()))
    steps_of = lambda count: make(task.rng(name, index), count)
    too_long = lambda count: tokens(text_of(steps_of(count)[1])) >= answer  # the token that ends it included
    count = bisect.bisect_left(range(1, min(answer, most + 1)), True, key=too_long)
    if count == most:
        raise ValueError(
            f"{name} has fewer than {most} steps, which answer={answer} goes beyond; give a smaller --answer"
        )
    if count == 0:
        least = tokens(text_of(steps_of(1)[1])) + 1
        raise ValueError(f"{name} needs {least} tokens of an answer for a step; give --answer {least} or more")
    prompt, steps = steps_of(count)
    if task.limit is not None and (needed := len(task.begin) + tokens(prompt) + answer) > task.limit:
        raise ValueError(
            f"{name} has {needed} tokens with its answer of {answer}, but the model's positions end at {task.limit}; "
            f"give a smaller --answer"
        )
    return prompt, steps


def _builder(name: str) -> Builder:
    def build(task: Task, index: int) -> Example:
        prompt, steps = drawn(task, name, index)
        told, ask = prompt.rsplit(" ", 1)
        question = Question(
            task.ask(task.ids([ask])),
            references=(text_of(steps),),
            metric="final_step",
            max_new_tokens=task.answer or ANSWER,
        )
        context = (*task.begin, *task.ids(told.split()))
        return example(name, index, context, question, length=float(len(context)), steps=float(len(steps)))

    build.__name__, build.__doc__ = name, KINDS[name][1]
    return build


ALOUD: Final[dict[str, Builder]] = {name: _builder(name) for name in KINDS}
"""The tasks by name."""
