"""Rows in batches: what each gives is what it gives alone, and answers end where they should."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.configs.experiment import Setup
from kvjax.experiments.core import engine as engines
from kvjax.experiments.core.engine import Engine, Prompt, prompts_of, read_once, shapes, share_slots
from kvjax.experiments.core.setup import build, find_builders
from kvjax.experiments.tasks import Example, Question
from tests.test_one_prefill import EveryThird


class Letters:
    """A tokenizer with a letter a token."""

    def decode(self, ids):
        return "".join(chr(ord("0") + i) for i in ids)


def asking(task, index, length, *questions):
    ids = tuple(int(i) for i in np.random.default_rng([length, index]).integers(1, 61, length))
    return Example(task, index, ids, questions)


def question(n, **options):
    return Question(tuple(range(5, 5 + n)), references=("x",), **{"max_new_tokens": 6, **options})


EXAMPLES = [
    asking("a", 0, 9, question(2), question(3), Question((7,), continuation=(8, 9, 10))),
    asking("a", 1, 14, question(4)),
    asking("b", 0, 23, question(1), question(2, max_new_tokens=3)),
]


def lines(model, params, examples, protocol, batch_size, policy):
    """What is written of every question, by task, index and question; times aside."""
    found = {}
    for shape in shapes(prompt for e in examples for prompt in prompts_of(e, protocol, seed=3)):
        engine = Engine(model, params, policy, shape, batch_size=batch_size, tokenizer=Letters())
        engine.compile()
        for i in range(0, len(shape.prompts), batch_size):
            batch = shape.prompts[i : i + batch_size]
            for prompt, made in zip(batch, engine.run(batch)[0], strict=True):
                for line in made:
                    found[prompt.example.task, prompt.example.index, line["question"]] = line
    timed = ("prefill_seconds", "decode_tokens_per_second")
    return {k: {n: x for n, x in v.items() if n not in timed} for k, v in found.items()}


SIZES = (
    "slots",
    "kv_bytes",
    "kv_bytes_needed",
    "kv_bytes_fitted",
    "state_bytes",
    "prefill_peak_bytes",
    "decode_peak_bytes",
)  # of the program


@pytest.mark.slow
def test_prompts_are_read_once_and_programs_shared(shallow, monkeypatch):
    """Each policy gives what it gives by itself, in as many readings as full caches may be held; one reads apart."""
    policies = [kvjax.Policy(), methods.keyformer(0.5), EveryThird(), methods.h2o(6), methods.h2o(14)]
    policies += [methods.kvzip(8), methods.kvzip(4)]
    wanted = [lines(*shallow, EXAMPLES[:2], "after_compression", 1, policy) for policy in policies]
    (shape,) = shapes(prompt for e in EXAMPLES[:2] for prompt in prompts_of(e, "after_compression", seed=3))
    how = {"batch_size": 1, "tokenizer": Letters(), "once": True}
    each = [Engine(*shallow, policy, shape, **how) for policy in policies]
    share_slots(each)
    assert len({*(engine.stored for engine in each)}) == 2  # KVzip's budgets have theirs
    found, programs = [{} for _ in policies], []
    monkeypatch.setattr(engines, "HELD", 0)
    for mine in (range(5), range(5, 7)):
        readings = [*read_once([each[i] for i in mine], [[p] for p in shape.prompts])]
        assert len(readings) == 2
        for n, (batches, held) in enumerate(readings):
            for i in mine:
                if n == 0:
                    each[i].compile(held[0])
                    programs.append(each[i]._go_on)
                for (prompt,), full in zip(batches, held, strict=True):
                    (made,), _ = each[i].run([prompt], (), full)
                    found[i] |= {(prompt.example.task, prompt.example.index, line["question"]): line for line in made}
    assert [engine.stored is None for engine in each] == [i == 2 for i in range(7)]
    times = [line["read_seconds"] for line in found[0].values()]
    assert None in times  # of the first prompt, whose reading would hold compiling
    assert min(x for x in times if x is not None) > 0
    assert len({*map(id, programs)}) == 5
    for one, own in zip(found, wanted, strict=True):
        assert one.keys() == own.keys()
        for key, line in own.items():
            line |= {"nll": pytest.approx(line["nll"], rel=1e-5)} if "nll" in line else {}
            without = lambda x: {k: v for k, v in x.items() if "peak" not in k and "second" not in k}
            assert without(one[key]) == without(line)


def _nothing(kv, stats, ctx):
    del stats, ctx
    return jnp.full(kv.pos.shape, jnp.nan)


def test_a_score_that_is_no_number_ends_a_run(shallow):
    with pytest.raises(ValueError, match=r"Function gives no token a score that is a number"):
        lines(*shallow, EXAMPLES[1:2], "after_compression", 1, kvjax.from_fn(_nothing, budget=4))


@pytest.mark.parametrize("asked", [question(2), question(2, num_beams=2)])
def test_an_answer_whose_logits_are_no_numbers_has_no_score(shallow, asked):
    """The embedding of a question's token is damaged; the prompt has none of it."""
    (model, params), example = shallow, asking("a", 0, 9, asked)
    assert asked.ids[0] not in example.context
    damaged = {**params, "embed_tokens": params["embed_tokens"].at[asked.ids[0]].set(jnp.nan)}
    with pytest.raises(ValueError, match="logits of a 0 are not numbers"):
        lines(model, damaged, [example], "after_compression", 1, methods.h2o(6))


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["in_prompt", "after_compression"])
def test_every_row_and_question_gives_what_it_gives_alone(shallow, protocol, monkeypatch):
    policy = methods.keyformer(0.5)  # its temperature depends on what is planned, its noise on the row's key
    together = lines(*shallow, EXAMPLES, protocol, 2, policy)
    monkeypatch.setattr(engines, "WORTH", 0)  # every width has a program
    alone = {}
    for e in EXAMPLES:
        for i, q in enumerate(e.questions):
            (line,) = lines(*shallow, [dataclasses.replace(e, questions=(q,))], protocol, 1, policy).values()
            alone[e.task, e.index, i] = {**line, "question": i}
    assert together.keys() == alone.keys()
    for key, line in together.items():
        own = {k: v for k, v in alone[key].items() if k not in SIZES}
        wanted = {**own, "nll": pytest.approx(own["nll"], rel=1e-5)} if "nll" in own else own
        assert {k: v for k, v in line.items() if k not in SIZES} == wanted
        assert set(SIZES) <= set(line)
    assert together["a", 0, 2]["tokens"] == 3
    assert together["a", 0, 0]["prompt_tokens"] == (9 if protocol == "after_compression" else 11)
    assert together["a", 0, 0]["output"] != together["a", 0, 1]["output"]


def test_answers_end_at_end_tokens_and_stop_strings(shallow):
    model, params = shallow
    whole = lines(model, params, EXAMPLES[1:2], "in_prompt", 1, kvjax.Policy())["a", 1, 0]
    assert whole["tokens"] == 6
    stop = whole["output"][2:4]
    cut = dataclasses.replace(EXAMPLES[1], questions=(question(4, stop=(stop, "~"), max_new_tokens=40),))
    answer = lines(model, params, [cut], "in_prompt", 1, kvjax.Policy())["a", 1, 0]
    assert answer["output"] == whole["output"][: whole["output"].index(stop)]
    assert answer["tokens"] == len(answer["output"]) + 2
    end = ord(whole["output"][1]) - ord("0")
    ending = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_ids=(end,)))
    answer = lines(ending, params, EXAMPLES[1:2], "in_prompt", 1, kvjax.Policy())["a", 1, 0]
    assert answer["output"] == whole["output"][: whole["output"].index(whole["output"][1])]
    assert answer["tokens"] == len(answer["output"]) + 1


def asked(length, steps, task="t", index=0):
    e = Example(task, index, (1,) * length, (Question(max_new_tokens=steps),))
    return Prompt(e, e.context, ((0, ()),))


def test_a_program_is_for_prompts_whose_padding_is_worth_one():
    few = [asked(n, 8) for n in (400, 600, 1000)]
    assert [s.width for s in shapes(few)] == [1024]
    many = [asked(400, 8)] * 110 + [asked(1000, 8)]
    assert [(s.width, len(s.prompts)) for s in shapes(many)] == [(1024, 1), (448, 110)]
    of_tasks = [asked(400, 8, "a"), asked(400, 70, "b"), asked(400, 100, "b")]
    assert [(s.width, s.planned) for s in shapes(of_tasks)] == [(448, 112), (448, 16)]
    assert [(s.width, s.planned) for s in shapes(of_tasks[:2])] == [(448, 80), (448, 16)]
    assert [(s.width, s.planned) for s in shapes([asked(400, 49)], most=450)] == [(400, 50)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "policy", "ends"),
    [("in_prompt", methods.tova(0.5), ()), ("after_compression", kvjax.Policy(), (20, 33, 54))],
)
def test_answers_that_are_searched_for_are_those_of_the_library(shallow, protocol, policy, ends):
    """Behind questions of several lengths, for as many tokens as each asks for."""
    beams = lambda e: dataclasses.replace(e, questions=tuple(dataclasses.replace(q, num_beams=3) for q in e.questions))
    examples = [dataclasses.replace(EXAMPLES[0], questions=(question(2), question(3))), *EXAMPLES[1:]]
    model, params = (
        dataclasses.replace(shallow[0], config=dataclasses.replace(shallow[0].config, eos_ids=ends)),
        shallow[1],
    )
    found = lines(model, params, [beams(e) for e in examples], protocol, 2, policy)
    for e in examples:
        for i, q in enumerate(e.questions):
            answer = found[e.task, e.index, i]
            tokens = np.asarray([e.context + q.ids])
            options = {"policy": policy, "num_beams": 3, "max_new_tokens": q.max_new_tokens}
            alone = kvjax.generate_beams(model, params, tokens, **options)
            wanted = np.asarray(alone.tokens)[0, 0, : int(alone.lengths[0, 0])]
            assert answer["output"] == Letters().decode(wanted[: -1 if wanted[-1] in ends else None])
            assert answer["tokens"] == len(wanted)
    assert prompts_of(beams(EXAMPLES[1]), "in_prompt")[0].num_beams == 3


def test_beams_that_cannot_be_are_refused(shallow, embedded):
    setup = Setup(num_beams=4, tasks=("perplexity",), examples=1)
    with pytest.raises(ValueError, match="--num-beams 4 searches for answers, but perplexity scores text"):
        build(setup, find_builders(setup), embedded[2], embedded[0].config)
    with pytest.raises(ValueError, match="num_beams=2 search for an answer, but text is scored"):
        Question(continuation=(3,), num_beams=2)
    many = dataclasses.replace(EXAMPLES[1], questions=(question(4, num_beams=62),))
    with pytest.raises(ValueError, match="num_beams=62 must be a whole number from 1 to 61"):
        lines(*shallow, [many], "in_prompt", 1, kvjax.Policy())
