"""Answers of tasks that think aloud are right, by an interpreter that reads prompt and steps word by word."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.configs.experiment import Setup
from kvjax.experiments.core import metrics
from kvjax.experiments.core.setup import build, find_builders
from kvjax.experiments.tasks import TASKS, Task, aloud
from kvjax.experiments.tasks.base import check_known
from kvjax.experiments.training import loop, reasoner
from kvjax.models.embedded import REASONER
from kvjax.run.layers import without_cache

IDS = {word: i for i, word in enumerate(aloud.VOCABULARY)}
TASK = Task(lambda text: [IDS.get(word, 998) for word in text.split()], (999,), 1024, 0)
ANSWER = 200


def registers(words):
    """Values by name of "a 3 b 4"."""
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


def pairs(of):
    return " ".join(f"{place} {letter}" for place, letter in of.items())


def chain(prompt, steps):
    """Each step renews the next register by its rule, and restates all registers from it on before if told to."""
    kind, *told = prompt.split(" ; ")
    value, rules = registers(kind.split()[3:]), dict(x.split() for x in told[:-1])
    first, asked = told[-1].removesuffix(" ?").split(" : ")
    assert first == f"#{len(steps) - 1}"
    for i, step in enumerate(steps[:-1]):
        state, _, said = step.partition(" : ") if kind.startswith("chain restated") else ("", "", step)
        name = [*rules][i % len(rules)]
        assert not state or registers(state.split()) == value
        assert not state or state.split()[0] == name
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
    first, *swaps, number = prompt.removesuffix(" ?").split(" ; ")
    words = first.split()[1:]
    places = dict(zip(words[::2], words[1::2], strict=True))
    for n, step in zip(range(int(number[1:]), 0, -1), steps[:-1], strict=True):
        told = swaps[(int(number[1:]) - n) % len(swaps)]
        _, a, b = told.split()
        x, y = places[a], places[b]
        places |= {a: y, b: x}
        assert step == f"#{n} {told} : {a} {x} {b} {y} : {a} {y} {b} {x} : {pairs(places)}"
    return f"final {pairs(places)}"


def sorting(prompt, steps):
    told, number = prompt.removesuffix(" ?").removeprefix("sort ").split(" ; ")
    own, steps = told.split(), iter(steps)
    for n in range(int(number[1:]), 0, -1):
        assert next(steps).split() == [f"#{n}", "rest", *own]
        left, ordered, own = own, sorted(own), [chr((ord(x) - 96) % 26 + 97) for x in own]
        for least in ordered:
            left.remove(least)
            assert next(steps).split() == [f"#{n}", "least", least, *(["rest", *left] if left else [])]
    return f"final {' '.join(ordered)}"


def addition(prompt, steps):
    told, number = prompt.removesuffix(" ?").removeprefix("add ").split(" ; ")
    both = [x.split() for x in told.split(" : ")]
    total, more = (sum(int(x) * 10**k for k, x in enumerate(own)) for own in zip(*both, strict=True))
    of = lambda x: [x // 10**k % 10 for k in range(len(both))]
    for n, step in zip(range(int(number[1:]), 0, -1), steps[:-1], strict=True):
        after, carries = total + more, [(total % 10**k + more % 10**k) // 10**k for k in range(len(both) + 1)]
        columns = zip(of(total), of(more), carries[:-1], carries[1:], of(after), strict=True)
        assert step == f"#{n} {' : '.join('{} {} {} = {} {}'.format(*column) for column in columns)}"
        total = after % 10 ** len(both)
    return f"final {' '.join(map(str, of(total)))}"


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
    with pytest.raises(ValueError, match=r"sorting has fewer than 512 steps, which answer=90000 goes beyond"):
        TASKS["sorting"](dataclasses.replace(TASK, answer=90000), 0)
    with pytest.raises(ValueError, match=r"cups has \d+ tokens with its answer of 200, but .* positions end at 220"):
        TASKS["cups"](dataclasses.replace(TASK, answer=ANSWER, limit=220), 0)


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


def test_the_reasoner_is_what_training_describes():
    (model, params), tokenizer = models.load(REASONER), models.load_tokenizer(REASONER)
    assert dataclasses.replace(reasoner.CONFIG, dtype=model.config.dtype) == model.config
    assert sum(f.stat().st_size for f in REASONER.iterdir()) < 12e6
    assert models.num_params(params) == 3_097_344
    assert tokenizer.convert_ids_to_tokens(range(len(reasoner.WORDS))) == [*reasoner.WORDS]


@pytest.mark.slow
def test_the_reasoner_writes_512_tokens_without_a_wrong_step():
    """Of 28 answers; and its centres are those of its own documents."""
    (model, params), tokenizer = models.load(REASONER), models.load_tokenizer(REASONER)
    encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    task = Task(encode, (tokenizer.bos_token_id,), 4096, 1, answer=512)
    examples = [TASKS[name](task, i) for name in aloud.KINDS for i in range(4)]
    tokens, lengths = models.pad_left([e.context + e.questions[0].ids for e in examples])
    found = kvjax.generate(model, params, tokens, lengths=lengths, max_new_tokens=512)
    texts = tokenizer.batch_decode(found.tokens.tolist(), skip_special_tokens=True)
    leading = [
        metrics.find("leading_steps")(x, e.questions[0].references) for x, e in zip(texts, examples, strict=True)
    ]
    assert sum(x == 1.0 for x in leading) >= 25, leading
    with np.load(REASONER / "centres.npz") as stored:
        for name, x in reasoner.centres(model, params, 1).items():
            np.testing.assert_allclose(stored[name], x, rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_a_toy_of_the_reasoner_is_trained_and_loaded(tmp_path):
    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        reasoner.train(reasoner.Options(tmp_path / "checkpoints", tmp_path / "model", toy=True))
    assert not (tmp_path / "model").exists()
    (model, params), tokenizer = models.load(tmp_path / "model_toy"), models.load_tokenizer(tmp_path / "model_toy")
    assert dataclasses.replace(reasoner.CONFIG, dtype=model.config.dtype) == model.config
    prompt, steps = aloud.KINDS["chain_once"][0](np.random.default_rng(0), 3)
    text = f"{prompt} {aloud.text_of(steps)}"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == [reasoner.IDS[word] for word in text.split()]
    assert tokenizer.decode(ids) == text
    pos = jnp.arange(len(ids))[None]
    assert np.isfinite(model(params, jnp.array([ids]), attend=without_cache(pos))).all()


def test_words_that_a_vocabulary_lacks_are_refused(embedded):
    model, _, tokenizer = embedded
    setup = Setup(tasks=("cups",), examples=1)
    with pytest.raises(ValueError, match=r"task cups, or its text, has words that this model's vocabulary lacks"):
        build(setup, find_builders(setup), tokenizer, model.config)


def test_a_token_for_unknown_words_is_text_where_every_word_can_be_spelled():
    spelling = lambda text, **_: SimpleNamespace(input_ids=[3] if text == "<unk>" else [7, 8])
    spelling.unk_token_id = 3
    check_known("the text", [5, 3], spelling)
