"""Samplers and their filters, held against the logits processors of transformers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import generate, generate_from, prefill
from kvjax.generation import loop
from kvjax.generation.sampling import (
    Categorical,
    Chain,
    Filter,
    Greedy,
    MinP,
    RepetitionPenalty,
    Sample,
    Temperature,
    TopK,
    TopP,
    seen_tokens,
)
from kvjax.run.state import Prompts

V = 61
FILTERS = {
    "temperature": Temperature(0.7),
    "top_k": TopK(5),
    "every": TopK(100),
    "top_p": TopP(0.6),
    "all": TopP(1.0),
    "min_p": MinP(0.2),
    "penalty": RepetitionPenalty(1.4),
    "reward": RepetitionPenalty(0.6),
    "sample": Sample(0.8, 30, 0.9, 0.05, 1.3).filter,
}


def their_processors(filters):
    """The processors of transformers that are to do what some filters do."""
    process = pytest.importorskip("transformers.generation.logits_process", reason="needs torch, of the test extra")
    makers = {
        RepetitionPenalty: lambda f: process.RepetitionPenaltyLogitsProcessor(f.penalty),
        Temperature: lambda f: process.TemperatureLogitsWarper(f.temperature),
        TopK: lambda f: process.TopKLogitsWarper(f.k),
        TopP: lambda f: process.TopPLogitsWarper(f.p),
        MinP: lambda f: process.MinPLogitsWarper(f.p),
    }
    return process.LogitsProcessorList([makers[type(f)](f) for f in filters])


@pytest.mark.parametrize("name", FILTERS)
def test_filters_are_those_of_transformers(name):
    torch = pytest.importorskip("torch", reason="parity needs torch, which the test extra installs on Python 3.11")
    rng = np.random.default_rng(5)
    logits, ids = rng.normal(size=(64, V)).astype(np.float32) * 3, rng.integers(0, V, (64, 9))
    logits[0, 3:7] = -np.inf  # what an earlier filter may leave
    parts = getattr(FILTERS[name], "filters", (FILTERS[name],))
    theirs = their_processors(parts)(torch.tensor(ids), torch.tensor(logits)).numpy()
    seen = seen_tokens(Prompts(ids, np.full(64, 9)), V)
    ours = np.asarray(FILTERS[name](jnp.asarray(logits), seen))
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.usefixtures("unchecked")
def test_chains_are_values():
    f, g, h = Temperature(0.5), TopK(3), MinP(0.1)
    logits = jnp.asarray([[3.0, 1.0, 2.0, 0.0]])
    for same in (Chain((f, Chain((g, h)))), Chain((Chain((f, g)), h)), Chain((f, Chain(), g, h))):
        np.testing.assert_array_equal(same(logits), Chain((f, g, h))(logits))
    assert hash(Chain((f, g))) == hash(Chain((Temperature(np.float32(0.5)), TopK(np.int64(3)))))
    assert [s.reads_seen for s in (Greedy(), Sample(), Categorical(Chain((f, g))))] == [False] * 3
    penalty = Chain((f, RepetitionPenalty(2.0)))
    assert all(s.reads_seen for s in (Greedy(penalty), Categorical(penalty)))
    assert Sample(repetition_penalty=2).reads_seen
    with pytest.raises(ValueError, match=r"filters=\(.*Greedy\(.*"):
        Chain((f, Greedy()))
    with pytest.raises(ValueError, match=r"needs seen=, a boolean \"B V\""):
        penalty(jnp.zeros((1, V)))


def test_draws_follow_the_probabilities():
    logits = jnp.log(jnp.asarray([[0.5, 0.25, 0.15, 0.1]]))
    draws = jax.vmap(lambda k: Sample()(logits, k[None])[0])(jax.random.split(jax.random.key(0), 4000))
    np.testing.assert_allclose(np.bincount(draws, minlength=4) / 4000, [0.5, 0.25, 0.15, 0.1], atol=0.03)


class Unseen(Filter):
    """Only tokens that were not seen."""

    @property
    def reads_seen(self):
        return True

    def __call__(self, logits, seen=None):
        return jnp.where(seen, -jnp.inf, logits)


def test_what_was_seen_is_the_prompt_and_what_was_drawn(shallow):
    """And no padding, nor what the rows beside have seen. A user's filter is as good as those that come along."""
    model, params = shallow
    tokens, lengths = np.random.default_rng(2).integers(1, V, (2, 8)), np.array([8, 3])
    tokens[1, :5] = np.arange(5)  # padding, which stays allowed
    sampler = Greedy(Unseen())
    run = functools.partial(generate, model, params, max_new_tokens=V - 8, sampler=sampler)
    found = run(tokens, lengths=lengths)
    drawn = [set(row) for row in np.asarray(found.tokens).tolist()]
    for row, n in enumerate(lengths):
        assert len(drawn[row]) == V - 8
        assert not drawn[row] & set(tokens[row, 8 - n :].tolist())
    np.testing.assert_array_equal(run(tokens[1:, 5:]).tokens[0], found.tokens[1])


def test_going_on_with_a_penalty_needs_what_was_read(shallow):
    model, params = shallow
    tokens, sampler = np.random.default_rng(4).integers(0, V, (2, 8)), Greedy(RepetitionPenalty(3.0))
    lengths = np.array([8, 5])
    expected = generate(model, params, tokens, lengths=lengths, max_new_tokens=6, sampler=sampler).tokens
    logits, state = prefill(model, params, tokens, lengths=lengths, max_new_tokens=6)
    go_on = functools.partial(generate_from, model, params, logits, state, max_new_tokens=6, sampler=sampler)
    wide = np.concatenate([np.full((2, 2), -1), tokens], axis=1)  # padding on the left may be anything
    np.testing.assert_array_equal(go_on(tokens=wide).tokens, expected)
    wrong = {
        "has a repetition penalty; give tokens=": {},
        "the state has read 8 tokens, but tokens= holds 7 a sequence": {"tokens": tokens[:, 1:]},
        r"tokens must be integers, one row a sequence.* of shape \(2, any\)": {"tokens": tokens[:1]},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            go_on(**change)


def test_no_record_without_a_penalty(shallow, monkeypatch):
    """A program whose sampler asks for nothing carries no table of the vocabulary."""
    model, params = shallow
    calls = []
    monkeypatch.setattr(loop, "with_token", lambda seen, *_: calls.append(seen.shape) or seen)

    def carried(sampler):
        calls.clear()
        how = {"sampler": sampler, "key": jax.random.key(0)}
        run = lambda p: generate(model, p, np.ones((2, 5), np.int32), max_new_tokens=3, **how).tokens
        jax.eval_shape(run, params)
        return set(calls)

    assert [carried(Sample(repetition_penalty=x)) for x in (1.0, 1.5)] == [set(), {(2, V)}]
