"""Answers of tasks that think aloud are right, by an interpreter that reads prompt and steps word by word."""

import dataclasses

import numpy as np
import pytest

from kvjax.experiments.tasks import TASKS, Task, aloud
from kvjax.experiments.training import loop, reasoner

IDS = {word: i for i, word in enumerate(aloud.VOCABULARY)}
TASK = Task(lambda text: [IDS.get(word, 98) for word in text.split()], (99,), 1024, 0)
ANSWER = 200


def registers(words):
    """Values by name of "a 3 b 4"."""
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


def chain(prompt, steps):
    """Each step takes the rule of the next register, writes both values, and restates all registers if told to."""
    kind, *told = prompt.split(" ; ")
    value, rules = registers(kind.split()[3:]), {x.split()[0]: (x.split()[2], int(x.split()[4])) for x in told[:-1]}
    count, asked = told[-1].removesuffix(" ?").split(" : ")
    assert int(count.replace(" ", "")) == len(steps) - 1
    for i, step in enumerate(steps[:-1]):
        state, _, said = step.partition(" : ") if kind.startswith("chain restated") else ("", "", step)
        assert not state or registers(state.split()) == value
        number, sum_ = said.split(" : ")
        name, rule, written, result = sum_.split(" = ")
        assert int(number.replace(" ", "")) == i + 1
        assert name == [*rules][i % len(rules)]
        (other, n), old = rules[name], value[rules[name][0]]
        assert (rule, written) == (f"{other} + {n}", f"{old} + {n}")
        value[name] = int(result)
        assert value[name] == (old + n) % 10
    return f"final {asked} = {value[asked]}"


def passcode(prompt, steps):
    told, _, rest = prompt.partition(" ; ")
    digits = [int(x) for x in told.split() if x.isdigit()]
    if told.startswith("code from"):
        digits = [(a + b) % 10 for a, b in zip(digits[:4], digits[4:], strict=True)]
        assert steps[0] == f"{told.replace(' from', '')} = {' '.join(map(str, digits))}"
        steps = steps[1:]
    chain(rest, [*steps[:-1], "final"])
    return f"final code {' '.join(map(str, digits))}"


def cups(prompt, steps):
    first, *swaps = prompt.removesuffix(" ?").split(" ; ")
    places = first.split()[1:]
    for told, step in zip(swaps, steps[:-1], strict=True):
        *_, a, b = told.split()
        places[int(a)], places[int(b)] = places[int(b)], places[int(a)]
        assert step == f"{told} : {' '.join(places)}"
    return f"final {' '.join(places)}"


def sorting(prompt, steps):
    words = prompt.removesuffix(" ?").split()[1:]
    left = [f"{a} {b}" for a, b in zip(words[::2], words[1::2], strict=True)]
    for least, step in zip(sorted(left), steps[:-1], strict=True):
        left.remove(least)
        assert step.split() == f"least {least} rest {' '.join(left)}".split()
    assert not left
    return f"final {least}"


def addition(prompt, steps):
    columns, carry = [x.split() for x in prompt.removesuffix(" ?").removeprefix("add ").split(" ; ")], 0
    for (x, y, a, b), step in zip(columns, steps[:-1], strict=True):
        total = int(a) + int(b) + carry
        assert step == f"{x} {y} : {a} + {b} + {carry} = {total % 10} carry {total // 10}"
        carry = total // 10
    return f"final carry {carry}"


READ = dict(zip(aloud.KINDS, (chain, chain, cups, sorting, addition, passcode, passcode), strict=True))


@pytest.mark.parametrize("name", aloud.KINDS)
def test_steps_are_right_and_fill_the_answer(name):
    words, given = [*IDS], dataclasses.replace(TASK, answer=ANSWER)
    for index in range(4):
        made = TASKS[name](given, index)
        (question,) = made.questions
        prompt = " ".join(words[i] for i in (*made.context[1:], *question.ids))
        (answer,) = question.references
        steps = answer.split(" ; ")
        assert steps[-1] == READ[name](prompt, steps)
        assert dict(made.meta)["steps"] == len(steps)
        _, more = aloud.KINDS[name][0](TASK.rng(name, index), len(steps) - (name == "passcode_in_answer"))
        assert len(answer.split()) < ANSWER <= len(aloud.text_of(more).split())
        assert question.score(answer) == 1.0
        assert question.score(answer[: len(answer) // 2]) == 0.0
    assert TASKS[name](given, 0) == TASKS[name](given, 0) != made


def test_what_has_no_room_is_refused():
    with pytest.raises(ValueError, match=r"chain_restated needs \d\d tokens of an answer for a step; give --answer"):
        TASKS["chain_restated"](dataclasses.replace(TASK, answer=16), 0)
    with pytest.raises(ValueError, match=r"cups has \d+ tokens with its answer of 200, but .* positions end at 256"):
        TASKS["cups"](dataclasses.replace(TASK, answer=ANSWER, limit=256), 0)


def test_documents_of_the_reasoner_are_prompts_and_answers_that_can_be_known():
    stage, known = reasoner.CURRICULUM[1], len(loop.SPECIAL)
    tokens, classes, pos = reasoner.batch(0, 3, stage)
    assert tokens.shape == classes.shape == (stage.batch, stage.length + 1)
    assert (np.diff(pos, axis=1) > 0).all()
    assert pos.max() < reasoner.CONFIG.max_position
    assert ((tokens < known) == np.isin(tokens, (reasoner.CONFIG.bos_id, *reasoner.CONFIG.eos_ids))).all()
    assert (classes[tokens == reasoner.CONFIG.bos_id] == 0).all()
    assert (classes[tokens == reasoner.CONFIG.eos_ids[0]] == loop.ANSWER).all()
    equals = tokens[:, :-1] == reasoner.IDS["="]
    assert (equals[classes[:, 1:] == loop.FIRST]).all()
    np.testing.assert_array_equal(reasoner.batch(0, 3, stage)[0], tokens)
