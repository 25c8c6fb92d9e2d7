"""A context that is compressed once, and questions to copies of it."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
import tokenizers
import transformers

import kvjax
from kvjax import methods, models
from kvjax.drivers import session as drivers

V, M = 61, 6
CONTEXT, ASKED = "ab cd fe ga bb ce df aa hb", ["bc de", "ah"]
POLICY = methods.h2o(6)


@pytest.fixture(scope="module")
def words():
    """A tokenizer whose token i is a word of two letters."""
    names = ["".join(x) for x in itertools.islice(itertools.product("abcdefgh", repeat=2), V)]
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="aa"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="aa")


@pytest.fixture(scope="module")
def make(shallow, words):
    return lambda params=shallow[1], **options: kvjax.Session(
        shallow[0],
        params,
        words,
        **({"policy": POLICY, "max_new_tokens": M, "max_question_tokens": 10, "max_turns": 2} | options),
    )


@pytest.fixture(scope="module")
def by_hand(shallow, words):
    """Texts read one after the other, the first one as the prompt, and what follows them."""
    model, params = shallow

    def read(first, *rest, policy=POLICY, **options):
        ids = [words(text).input_ids for text in (first, *rest)]
        plan = kvjax.make_plan(model.config, policy, prompt_len=len(ids[0]), max_new_tokens=32)

        @jax.jit
        def run(params):
            logits, state = kvjax.prefill(model, params, np.array(ids[:1]), plan)
            more = np.concatenate(ids[1:])[None]
            logits, state = kvjax.feed(model, params, more, state)
            return kvjax.generate_from(model, params, logits[:, -1], state, max_new_tokens=M, **options).tokens

        return words.decode(run(params)[0])

    return read


def test_answers_are_those_of_the_steps_by_hand(make, by_hand):
    """Of the same questions again, and of several at once: none sees another. Nor does a refused context matter."""
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


def test_a_context_may_be_read_again_before_it_is_compressed(make, by_hand):
    policy = methods.kvzip(6, repeat=(1, 2), chunk=4, sinks=1)
    assert make(policy=policy).compress(CONTEXT).ask(ASKED[0]) == by_hand(CONTEXT, ASKED[0], policy=policy)


def test_questions_and_contexts_of_about_the_same_size_compile_nothing(make):
    session, sizes = make(), []
    for context, question in ((CONTEXT, ASKED[0]), ("ab " * 14, "aa ab ac ad")):
        session.compress(context).ask(question)
        sizes.append((drivers._compress._cache_size(), drivers._begin._cache_size()))
    assert sizes[0] == sizes[1]


@pytest.mark.slow
def test_a_turn_that_is_kept_is_read_by_the_next(make, by_hand, words):
    """With the tokens of a stop string and all, but no end token."""
    session = make().compress(CONTEXT)
    answer = session.ask(ASKED[0], keep=True)
    assert session.ask(ASKED[1]) == by_hand(CONTEXT, ASKED[0], answer, ASKED[1])
    end = words(answer).input_ids[2]
    ended = make(eos_ids=end).compress(CONTEXT)
    before = ended.ask(ASKED[0], keep=True)
    assert (
        ended.ask(ASKED[1])
        == by_hand(CONTEXT, ASKED[0], before, ASKED[1], eos_ids=(), policy=POLICY)
        .split(words.decode([end]))[0]
        .rstrip()
    )
    stopped = make(stop=words.decode([end])).compress(CONTEXT)
    assert stopped.ask(ASKED[0], keep=True) == before + " "
    assert len(stopped._read) == len(ended._read)
    assert repr(stopped).endswith(f"{len(stopped._read)} tokens read)")


@pytest.mark.slow
def test_a_sampler_is_told_what_was_read_and_draws_by_the_key(make):
    sampler = kvjax.Sample(temperature=3.0, repetition_penalty=1.5)
    session = make(sampler=sampler, key=jax.random.key(0)).compress(CONTEXT)
    keys = jax.random.split(jax.random.key(1), 2)
    together = session.ask([ASKED[0]] * 2, key=keys)
    assert together[0] != together[1]
    assert session.ask(ASKED[0], key=keys[1:]) == together[1]
    assert session.ask(ASKED[0]) == session.ask(ASKED[0])


BAD = [
    (lambda s: s().ask("aa"), "has read nothing to ask about; call compress"),
    (
        lambda s: s().compress(CONTEXT).ask("aa " * 30),
        "a question of 30 tokens and an answer of 6 end 35 tokens behind the",
    ),
    (lambda s: s().compress(CONTEXT).ask([]), "must be a text, or a list of at least one"),
    (lambda s: s().compress(CONTEXT).ask(ASKED, keep=True), "several questions are asked; ask one"),
    (lambda s: s().compress(""), "the context is empty"),
    (lambda s: s().compress(CONTEXT).ask(" "), "question=' ': the tokenizer makes no token of it"),
    (lambda s: s(sampler=kvjax.Sample()).compress(CONTEXT).ask("aa"), "draws tokens, but there is no key"),
    (lambda s: s(stop=""), "stop='': must be strings"),
    (lambda s: s(max_turns=0), "max_turns=0: must be a whole number of at least 1"),
    (lambda s: s(policy=1), "1 is not a policy"),
    (lambda s: s(block=0), "block=0: must be a whole number of at least 1"),
    (lambda s: s(params=2), "params are one array or number"),
    (lambda s: kvjax.Session(None, {}, None, max_new_tokens=1), "tokenizer is a NoneType"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_asked_is_refused(make, call, message):
    with pytest.raises(ValueError, match=message):
        call(make)


def test_a_context_beyond_the_models_positions_is_warned_of(shallow, words):
    """What may come behind it counts."""
    model = models.LanguageModel(dataclasses.replace(shallow[0].config, max_position=32))
    session = kvjax.Session(model, shallow[1], words, policy=POLICY, max_new_tokens=M, max_question_tokens=18)
    with pytest.warns(match="a prompt of 9 tokens and 24 behind it are 33, but the model was made for 32 positions"):
        session.compress(CONTEXT)
    assert session.ask(ASKED[0])


def test_an_answer_to_something_else_is_not_kept(make):
    session = make().compress(CONTEXT)
    with pytest.raises(ValueError, match="pieces is no answer to 'ah' alone in this session"):
        session.keep(ASKED[1], session.stream(ASKED[0]))
