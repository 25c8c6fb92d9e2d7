"""Tasks whose answers are long: a model works step by step, and later steps need what earlier ones have written.

Prompts and answers are made of the words of `VOCABULARY`, for a model that was trained on them (`train.py reasoner`). A
step ends with ";", and the last one holds the result: `final_step` compares it, `leading_steps` says how far an answer
was right. An answer has as many steps as fit into its tokens (`--answer`, 256 if not given).
"""

import bisect
import string
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from kvjax.experiments.tasks.base import Builder, Example, Question, Task, example

ANSWER: Final = 256
LETTERS: Final = tuple(string.ascii_lowercase)
DIGITS: Final = tuple(string.digits)
NUMBERS: Final = tuple(f"#{i}" for i in range(1, 513))
"""Of steps, which count down."""
ITEMS: Final = tuple(f"{letter} {digit}" for letter in LETTERS for digit in DIGITS)
"""What is sorted, in order."""
WORDS: Final = tuple("+ = : ; ? chain restated once cups sort least rest add code from final".split())
VOCABULARY: Final = (*LETTERS, *DIGITS, *NUMBERS, *WORDS)
"""All words of prompts and answers, each with a space before it."""
REGISTERS: Final = 8
CUPS: Final = 6
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
    state = lambda: " ".join(f"{name} {x}" for name, x in value.items())
    written = " ; ".join(f"{name} {other}" for name, other in rules.items())
    kind = "restated" if restated else "once"
    prompt = f"chain {kind} : {state()} ; {written} ; {numbers[0]} : {asked} ?"
    steps = []
    for i, number in enumerate(numbers):
        name = names[i % REGISTERS]
        other = rules[name]
        before, old = f"{state()} : " if restated else "", value[other]
        value[name] = (old + 1) % 10
        steps.append(f"{before}{number} {name} {other} {old} : {name} {value[name]}")
    return prompt, [*steps, f"final {asked} {value[asked]}"]


def _restated(rng: np.random.Generator, count: int) -> Steps:
    return _chain(rng, count, True)


def _once(rng: np.random.Generator, count: int) -> Steps:
    return _chain(rng, count, False)


def _cups(rng: np.random.Generator, count: int) -> Steps:
    """Letters in places, of which two change theirs in each step; each step writes these two, before and after."""
    places: dict[str, str] = dict(zip(DIGITS, _drawn(rng, LETTERS, CUPS), strict=False))
    numbers = NUMBERS[:count][::-1]
    swaps = [_drawn(rng, [*places], 2) for _ in range(count)]
    state = lambda: " ".join(f"{place} {letter}" for place, letter in places.items())
    told = " ; ".join(f"{number} {a} {b}" for number, (a, b) in zip(numbers, swaps, strict=True))
    prompt, steps = f"cups {state()} ; {told} ?", []
    for number, (a, b) in zip(numbers, swaps, strict=True):
        x, y = places[a], places[b]
        places |= {a: y, b: x}
        steps.append(f"{number} {a} {b} : {a} {x} {b} {y} : {a} {y} {b} {x}")
    return prompt, [*steps, f"final {state()}"]


def _sort(rng: np.random.Generator, count: int) -> Steps:
    """The least of a list is taken out, again and again; each step writes what is left."""
    items = _drawn(rng, ITEMS, count)
    prompt, left, steps = f"sort {' '.join(items)} ?", list(items), []
    while left:
        left.remove(least := min(left))
        steps.append(f"least {least} rest {' '.join(left)}".rstrip())
    return prompt, [*steps, f"final {max(items)}"]


def _add(rng: np.random.Generator, count: int) -> Steps:
    """Two numbers, a column a step from the last one on: its digits, what was carried, both digits of their sum."""
    numbers, digits, carry, steps = NUMBERS[:count][::-1], rng.integers(0, 10, (count, 2)).tolist(), 0, []
    told = " ; ".join(f"{number} {a} {b}" for number, (a, b) in zip(numbers, digits, strict=True))
    for number, (a, b) in zip(numbers, digits, strict=True):
        total = a + b + carry
        steps.append(f"{number} {a} {b} {carry} = {total // 10} {total % 10}")
        carry = total // 10
    return f"add {told} ?", [*steps, f"final {carry}"]


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
    "chain_restated": (_restated, "A chain of sums; each step restates all that it needs."),
    "chain_once": (_once, "A chain of sums; a step needs what was said once, up to eight steps before."),
    "cups": (_cups, "Places of cups that are swapped, with a scratch pad of all."),
    "sorting": (_sort, "A list that is sorted by its least member, again and again."),
    "addition": (_add, "The sum of two long numbers, with carries written out."),
    "passcode_in_prompt": (_in_prompt, "A code that the prompt says, asked for behind a chain of sums."),
    "passcode_in_answer": (_in_answer, "A code that the answer's first step works out, asked for behind a chain."),
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
    most = len(ITEMS) if name == "sorting" else len(NUMBERS)
    answer, make = task.answer or ANSWER, KINDS[name][0]
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
