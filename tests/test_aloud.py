"""Answers of tasks that think aloud are right, by an interpreter that reads prompt and steps word by word."""

import dataclasses

import numpy as np
import pytest

from kvjax.configs.experiment import Setup
from kvjax.experiments.core.setup import build, find_builders
from kvjax.experiments.tasks import TASKS, Task, aloud
from kvjax.experiments.training import loop, reasoner

IDS = {word: i for i, word in enumerate(aloud.VOCABULARY)}
TASK = Task(lambda text: [IDS.get(word, 998) for word in text.split()], (999,), 1024, 0)
ANSWER = 200


def registers(words):
    """Values by name of "a 3 b 4"."""
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


def chain(prompt, steps):
    """Each step renews the next register by its rule, and restates all registers before if told to."""
    kind, *told = prompt.split(" ; ")
    value, rules = registers(kind.split()[3:]), dict(x.split() for x in told[:-1])
    first, asked = told[-1].removesuffix(" ?").split(" : ")
    assert first == f"#{len(steps) - 1}"
    for i, step in enumerate(steps[:-1]):
        state, _, said = step.partition(" : ") if kind.startswith("chain restated") else ("", "", step)
        assert not state or registers(state.split()) == value
        name = [*rules][i % len(rules)]
        old = value[rules[name]]
        value[name] = (old + 1) % 10
        assert said == f"#{len(steps) - 1 - i} {name} {rules[name]} {old} : {name} {value[name]}"
    return f"final {asked} {value[asked]}"


def passcode(prompt, steps):
    told, _, rest = prompt.partition(" ; ")
    digits = [int(x) for x in told.split() if x.isdigit()]
    if told.startswith("code from"):
        digits = [(a + b) % 10 for a, b in zip(digits[::2], digits[1::2], strict=True)]
        sums = zip(told.removeprefix("code from ").split(" : "), digits, strict=True)
        done = " : ".join(f"{sum_} = {digit}" for sum_, digit in sums)
        assert steps[0] == f"{done} : code {' '.join(map(str, digits))}"
        steps = steps[1:]
    chain(rest, [*steps[:-1], "final"])
    return f"final code {' '.join(map(str, digits))}"


def cups(prompt, steps):
    first, *swaps = prompt.removesuffix(" ?").split(" ; ")
    words = first.split()[1:]
    places = dict(zip(words[::2], words[1::2], strict=True))
    for told, step in zip(swaps, steps[:-1], strict=True):
        _, a, b = told.split()
        x, y = places[a], places[b]
        assert step == f"{told} : {a} {x} {b} {y} : {a} {y} {b} {x}"
        places |= {a: y, b: x}
    return "final " + " ".join(f"{place} {letter}" for place, letter in places.items())


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
    for (number, a, b), step in zip(columns, steps[:-1], strict=True):
        total = int(a) + int(b) + carry
        assert step == f"{number} {a} {b} {carry} = {total // 10} {total % 10}"
        carry = total // 10
    return f"final {carry}"


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
    with pytest.raises(ValueError, match=r"sorting has fewer than 260 steps, which answer=90000 goes beyond"):
        TASKS["sorting"](dataclasses.replace(TASK, answer=90000), 0)
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
    assert (classes[tokens == reasoner.CONFIG.eos_ids[0]] == loop.FIRST).all()
    asked = np.logical_or.accumulate(tokens == reasoner.IDS["?"], 1)[:, :-1]
    assert (asked[classes[:, 1:] == loop.FIRST]).all()
    np.testing.assert_array_equal(reasoner.batch(0, 3, stage)[0], tokens)


def test_words_that_a_vocabulary_lacks_are_refused(embedded):
    model, _, tokenizer = embedded
    setup = Setup(tasks=("cups",), examples=1)
    with pytest.raises(ValueError, match=r"task cups has words, .* that this model's vocabulary lacks"):
        build(setup, find_builders(setup), tokenizer, model.config)
