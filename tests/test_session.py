"""Contexts that are compressed once, and questions to copies of them; in another process too."""

import copy
import dataclasses
import itertools
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from tokenizers.normalizers import Replace

from kvjax import methods, models
from kvjax.generation import generate as generating
from kvjax.generation import loop, sampling
from kvjax.observe import Reread
from kvjax.run import layers, steps
from kvjax.text import files
from kvjax.text.session import Session
from tests.test_checks import LINE
from tests.words import words

M = 6
CONTEXT, OTHER, ASKED = "ab cd fe ga bb ce df aa hb", "ga bb ce", ["fa dc", "ah"]
POLICY = methods.h2o(6)


@pytest.fixture(scope="module")
def make(shallow):
    options = {"policy": POLICY, "max_new_tokens": M, "max_question_tokens": 10, "max_turns": 2}
    return lambda params=shallow[1], **changed: Session(shallow[0], params, words(), **(options | changed))


@pytest.fixture(scope="module")
def by_hand(shallow):
    """Texts read one after the other, the first one as the prompt, and what follows them."""
    model, params = shallow

    def read(first, *rest, policy=POLICY, **options):
        first, *rest = (words()(text).input_ids for text in (first, *rest))
        _, state = steps.prefill(model, params, [first], policy=policy, max_new_tokens=32)
        logits, state = generating.feed(model, params, [list(itertools.chain(*rest))], state)
        found = generating.generate_from(model, params, logits[:, -1], state, max_new_tokens=M, **options)
        return words().decode(found.tokens[0])

    return read


def test_answers_are_those_of_the_steps_by_hand(make, by_hand):
    """Of the same question again, and of several at once: none sees another. Nor does a refused context matter."""
    session = make().compress(CONTEXT)
    before = [np.asarray(x) for x in jax.tree.leaves(session.state.layers)]
    found = [session.ask(question) for question in (*ASKED, ASKED[0])]
    assert found[0] == found[2] == by_hand(CONTEXT, ASKED[0])
    with pytest.raises(ValueError, match="the context is empty"):
        session.compress("")
    assert session.ask(ASKED) == found[:2]
    assert session.ask(ASKED[:1]) == found[:1]
    pieces = list(session.stream(ASKED[0]))
    assert len(pieces) > 1
    assert "".join(pieces) == found[0]
    for a, b in zip(before, jax.tree.leaves(session.state.layers), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_bar_shows_how_far_a_context_is_read(make, shallow, capsys):
    """Read again, too; what has to be compiled for a question is said, once."""
    session = make(policy=methods.kvzip(6, Reread((1, 2), chunk=4, sinks=1)), progress=True).compress(CONTEXT)
    assert "5/5" in capsys.readouterr().err  # once, and four chunks again
    said = [session.ask(q) and "compiling" in capsys.readouterr().err for q in (*ASKED, ASKED)]
    assert said == [True, False, True]
    assert make().compress(CONTEXT).ask(ASKED[0])
    assert not capsys.readouterr().err  # no terminal


@pytest.mark.slow
def test_each_of_several_contexts_answers_as_it_does_alone(make, by_hand):
    """One question of all, or one of each; and what is kept is kept of each."""
    both = make().compress([CONTEXT, OTHER])
    assert both.ask(ASKED[0]) == [by_hand(context, ASKED[0]) for context in (CONTEXT, OTHER)]
    first = both.ask(ASKED, keep=True)
    assert first == [by_hand(CONTEXT, ASKED[0]), by_hand(OTHER, ASKED[1])]
    assert both.ask("aa") == [
        by_hand(CONTEXT, ASKED[0], first[0], "aa"),
        by_hand(OTHER, ASKED[1], first[1], "aa"),
    ]
    with pytest.raises(ValueError, match="3 questions are asked of 2 contexts; ask one of all, or one of each"):
        both.ask(["aa"] * 3)
    assert repr(both).endswith("16 and 9 tokens read)")


@pytest.mark.slow
def test_a_context_is_read_again_before_it_is_compressed(make, by_hand):
    kvzip = methods.kvzip(6, Reread((1, 2), chunk=4, sinks=1))
    assert make(policy=kvzip).compress(CONTEXT).ask(ASKED[0]) == by_hand(CONTEXT, ASKED[0], policy=kvzip)


def test_questions_of_all_sizes_and_contexts_of_about_the_same_compile_nothing(make):
    session, sizes = make(max_question_tokens=64), []
    for context, question in ((CONTEXT, ASKED[0]), ("ab " * 14, "aa ab ac ad " * 16)):
        session.compress(context).ask(question)
        sizes.append((layers.layer_step._cache_size(), loop._decoded._cache_size()))
    assert sizes[0] == sizes[1]


def test_a_turn_that_is_kept_is_read_by_the_next_but_not_by_a_fork(make, by_hand):
    """With the tokens of a stop string and all, but no end token."""
    session = make().compress(CONTEXT)
    fork, alone = session.fork(), session.ask(ASKED[1])
    answer = session.ask(ASKED[0], keep=True)
    expected = by_hand(CONTEXT, ASKED[0], answer, ASKED[1])
    assert expected != alone
    assert session.ask(ASKED[1]) == expected
    assert fork.ask(ASKED[1]) == alone
    assert fork.compress(OTHER).ask(ASKED[1]) == by_hand(OTHER, ASKED[1])
    assert session.ask(ASKED[1]) == expected
    ids = words()(answer).input_ids
    end = next(x for i, x in enumerate(ids) if i and x not in ids[:i])
    ended = make(eos_ids=end).compress(CONTEXT)
    before = ended.ask(ASKED[0], keep=True)
    rest = by_hand(CONTEXT, ASKED[0], before, ASKED[1], eos_ids=()).split(words().decode([end]))[0].rstrip()
    assert ended.ask(ASKED[1]) == rest
    stopped = make(stop=words().decode([end])).compress(CONTEXT)
    assert stopped.ask(ASKED[0], keep=True) == before + " "
    assert stopped._dialogues[0].ids == ended._dialogues[0].ids


def test_a_sampler_is_told_what_was_read_and_draws_by_the_key(make):
    sampler = sampling.Sample(temperature=3.0, repetition_penalty=1.5)
    session = make(sampler=sampler, key=jax.random.key(0)).compress(CONTEXT)
    keys = jax.random.split(jax.random.key(1), 2)
    together = session.ask([ASKED[0]] * 2, key=keys)
    assert together[0] != together[1]
    assert session.ask(ASKED[0], key=keys[1:]) == together[1]
    assert session.ask(ASKED[0]) == session.ask(ASKED[0])


LOADED = """
import json, sys
import numpy as np
from kvjax import models
from kvjax import methods
from kvjax.generation import sampling
from kvjax.text.session import Session
from tests.words import words
import jax, jax.numpy as jnp
config = models.ModelConfig(61, 32, 48, 1, 4, 2, 8)
model, file = models.LanguageModel(config), np.load(sys.argv[2])
params = jax.tree.unflatten(jax.tree.structure(model.shapes), [jnp.asarray(file[n]) for n in file.files])
how = {"policy": methods.h2o(6), "sampler": sampling.Sample(temperature=2.0)}
print(json.dumps(Session.load(sys.argv[1], model, params, words(), **how).ask(json.loads(sys.argv[3]))))
"""


@pytest.mark.slow
def test_a_saved_session_answers_equally_in_another_process(make, shallow, tmp_path):
    """After a turn, by drawing. Saved again, it replaces the file."""
    (model, params), sampler = shallow, sampling.Sample(temperature=2.0)
    session = make(sampler=sampler, key=jax.random.key(3)).compress([CONTEXT, OTHER])
    session.save(tmp_path / "session")
    session.ask(ASKED, keep=True)
    session.save(tmp_path / "session")
    assert [p.name for p in tmp_path.iterdir()] == ["session"]
    expected = session.ask(ASKED)
    loaded = Session.load(tmp_path / "session", model, params, words(), policy=methods.h2o(6), sampler=sampler)
    assert loaded.ask(ASKED) == expected
    assert loaded.compress(OTHER).ask(ASKED[1]) == make(sampler=sampler, key=jax.random.key(3)).compress(OTHER).ask(
        "ah"
    )
    np.savez(tmp_path / "params.npz", *jax.tree.leaves(params))
    given = [str(tmp_path / "session"), str(tmp_path / "params.npz"), json.dumps(ASKED)]
    there = subprocess.run([sys.executable, "-c", LOADED, *given], capture_output=True, text=True)
    assert json.loads(there.stdout or "null") == expected, there.stderr


@pytest.mark.slow
def test_a_saved_session_keeps_what_its_policy_has_learned(make, shallow, tmp_path):
    session = make(policy=LINE, policy_params=[{"score": {"a": -np.ones(2, np.float32)}}]).compress(CONTEXT)
    session.save(tmp_path / "session")
    loaded = Session.load(tmp_path / "session", *shallow, words(), policy=LINE)
    assert np.sort(session.state.layers[0].head_pos)[..., -3:].tolist() == [[[0, 1, 2]] * 2]
    assert loaded.ask(ASKED[0]) == session.ask(ASKED[0])
    assert loaded.compress(OTHER).ask(ASKED[0]) == session.compress(OTHER).ask(ASKED[0])


def test_another_model_tokenizer_policy_or_sampler_is_refused(make, shallow, tmp_path):
    (model, params), path = shallow, tmp_path / "session"
    make().compress(CONTEXT).save(path)
    other = models.LanguageModel(dataclasses.replace(model.config, rope=models.Rope(theta=500.0)))
    others = copy.deepcopy(words())
    others.backend_tokenizer.normalizer = Replace("aa", "bb")
    for options, message in (
        ({"model": other}, "holds the state of another model"),
        ({"tokenizer": others}, "was made with another tokenizer; give the one that the contexts were read with"),
        ({"tokenizer": words(bos_token="ab")}, "was made with another tokenizer"),
        ({"sampler": sampling.Sample()}, "was made with another sampler"),
        (
            {"policy": methods.h2o(7, recent=2)},
            r"under another policy, with budget=6 and not budget=7, with recent=Share\(share=0.5\) and not recent=2",
        ),
    ):
        given = {"model": model, "params": params, "tokenizer": words(), "policy": POLICY} | options
        with pytest.raises(ValueError, match=message) as found:
            Session.load(path, **given)
        assert "\n" not in str(found.value)
    with pytest.raises(ValueError, match="has read nothing to ask about"):
        make().save(path)


def places(words, at=()):
    """Where every word of JSON stands; of the numbers of a list, the first alone."""
    for name, inner in words.items() if isinstance(words, dict) else enumerate(words):
        if not name or not isinstance(words, list) or not isinstance(inner, int):
            yield (*at, name)
        yield from places(inner, (*at, name)) if isinstance(inner, dict | list) else ()


def put(words, at, new):
    """JSON with another word in one place."""
    if not at:
        return new
    words = words.copy()
    words[at[0]] = put(words[at[0]], at[1:], new)
    return words


def test_words_that_no_session_writes_are_named(make, shallow, tmp_path):
    """Of right digests. What is taken, as another text is, would be saved as it is."""
    session, tokenizer = make(key=jax.random.key(3)).compress(CONTEXT), words()
    session.ask("ah", keep=True)
    session.save(tmp_path / "session")
    whole, arrays = files._read(tmp_path / "session")
    whole = json.loads(json.dumps(whole))
    path, again, taken, said = tmp_path / "changed", tmp_path / "again", set(), []
    for at in places(whole):
        for bad in (None, -1, "x", [], {"a": 1}):
            files._write(path, arrays, put(whole, at, bad))
            try:
                loaded = Session.load(path, *shallow, tokenizer, policy=POLICY)
            except ValueError as e:
                said.append(str(e))
            else:
                loaded.save(again)
                assert again.read_bytes() == path.read_bytes(), (at, bad)
                taken.add(at[-1])
    assert all(str(path) in text for text in said)
    assert taken == {0, 1, 3, "eos_ids", "stop", "block", "key"}


BAD = [
    (lambda s: s().ask("aa"), "has read nothing to ask about; call compress"),
    (lambda s: s().compress(CONTEXT).ask("aa " * 30), "of 30 tokens and an answer of 6 end 35 tokens .* room for 32"),
    (
        lambda s: [x.ask("aa", keep=True) for x in [s().compress(CONTEXT)] for _ in range(3)],
        "this is turn 3, but the session was made with max_turns=2; make it with as many as follow one another",
    ),
    (lambda s: s().compress(CONTEXT).ask([]), "must be a text, or a list of at least one"),
    (lambda s: s().compress(CONTEXT).ask(" "), "question=' ': the tokenizer makes no token of it"),
    (lambda s: s(stop=""), "stop='': must be strings"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_asked_is_refused(make, call, message):
    with pytest.raises(ValueError, match=message):
        call(make)


@pytest.mark.slow
def test_a_context_beyond_the_models_positions_is_warned_of(shallow):
    """What may come behind it counts."""
    model = models.LanguageModel(dataclasses.replace(shallow[0].config, max_position=32))
    session = Session(model, shallow[1], words(), policy=POLICY, max_new_tokens=M, max_question_tokens=18)
    with pytest.warns(match="a prompt of 9 tokens and 24 behind it are 33, but the model was made for 32 positions"):
        session.compress(CONTEXT)
    assert session.ask(ASKED[0])


@pytest.mark.slow
def test_an_answer_from_elsewhere_is_not_kept(make):
    session = make().compress(CONTEXT)
    pieces, two = session.stream(ASKED[0]), session.stream(ASKED)
    with pytest.raises(ValueError, match="several questions are asked"):
        session.keep(two)
    fork = session.fork()
    fork.keep(pieces)
    with pytest.raises(ValueError, match="is no answer from where this session stands"):
        fork.keep(pieces)


def test_logits_that_are_no_numbers_are_no_answer(make, shallow):
    """A question has a token whose embedding is damaged, as the context has not."""
    params, id_ = shallow[1], words()("fa").input_ids[0]
    damaged = {**params, "embed_tokens": params["embed_tokens"].at[id_].set(np.nan)}
    session = make(damaged).compress(CONTEXT)
    for ask in (session.ask, lambda question: list(session.stream(question)), lambda q: session.ask(q, keep=True)):
        with pytest.raises(ValueError, match="logits are not numbers after token 0 of answer 0, so that no"):
            ask("fa dc")
    assert session.ask("ah") == make().compress(CONTEXT).ask("ah")
