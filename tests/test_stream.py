"""Generation a step at a time."""

import itertools
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import methods
from kvjax.generation import loop, sampling
from kvjax.generation.generate import generate
from kvjax.run import layers
from kvjax.text import stream as streaming
from kvjax.text.stream import stream
from tests.words import words

V, M = 61, 10
TOKENS, LENGTHS = np.random.default_rng(3).integers(0, V, (2, 9)), np.array([9, 4])
POLICY = methods.h2o(6)
ENDS = (43,)
SAMPLER = sampling.Sample(0.9, 30, 0.95, 0.01, 1.2)


@pytest.fixture(scope="module")
def run(shallow):
    """Streams and generations of the same prompts."""
    return lambda call, tokens=TOKENS, **options: call(
        *shallow, tokens, **({"policy": POLICY, "max_new_tokens": M} | options)
    )


@pytest.fixture(scope="module")
def greedy(run):
    """What is generated greedily, and a token that ends the first row alone, before its last step."""
    found = run(generate, lengths=LENGTHS)
    rows = np.asarray(found.tokens)
    return found, next(int(t) for i, t in enumerate(rows[0, :-1]) if i > 2 and t not in (*rows[0, :i], *rows[1]))


def test_a_stream_is_the_generation(run):
    """Padded rows, rows that end, a sampler that draws and remembers: token by token, and the state after."""
    options = {"lengths": LENGTHS, "sampler": SAMPLER, "key": jax.random.key(5), "eos_ids": ENDS, "pad_id": 60}
    expected, steps = run(generate, **options), run(stream, **options)
    assert 1 < int(expected.lengths.min()) < int(expected.lengths.max())
    found = np.stack(list(steps), axis=1)
    np.testing.assert_array_equal(found, expected.tokens[:, : found.shape[1]])
    np.testing.assert_array_equal(steps.tokens, found)
    np.testing.assert_array_equal(steps.lengths, expected.lengths)
    np.testing.assert_array_equal(steps.state.length, expected.state.length)
    for a, b in zip(steps.state.layers, expected.state.layers, strict=True):
        np.testing.assert_array_equal(np.sort(a.head_pos), np.sort(b.head_pos))


def test_a_stream_without_an_end_begins_as_others_do(run):
    """And keeps nothing."""
    options = {"lengths": LENGTHS, "sampler": SAMPLER, "key": jax.random.key(5), "eos_ids": ENDS, "pad_id": 60}
    expected = run(generate, **options)
    assert 1 < int(expected.lengths.min()) < M
    steps = run(stream, **options | {"max_new_tokens": None})
    found = np.stack(list(itertools.islice(steps, M)), axis=1)
    np.testing.assert_array_equal(found, expected.tokens[:, : found.shape[1]])
    np.testing.assert_array_equal(np.minimum(steps.lengths, M), expected.lengths)
    with pytest.raises(ValueError, match="keeps no tokens; keep what it yields, or give max_new_tokens="):
        _ = steps.tokens


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_loses_nothing(run, greedy, monkeypatch):
    """It comes when the step before has given its cache away; what was made stays, and can be gone on with."""
    steps = run(stream, lengths=LENGTHS)
    first = [next(steps) for _ in range(3)]
    step = streaming.decoded
    interrupted = lambda *x, **how: (step(*x, **how), signal.raise_signal(signal.SIGINT))[0]
    monkeypatch.setattr(streaming, "decoded", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    monkeypatch.setattr(streaming, "decoded", step)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    made = steps.tokens
    assert made.shape == (2, 4)
    assert steps.state.length.tolist() == (LENGTHS + 3).tolist()
    rest = list(steps)
    assert len(first) + len(rest) == M
    np.testing.assert_array_equal(np.stack([*first, *rest], axis=1), greedy[0].tokens)


def test_a_state_that_somebody_holds_stays(run, greedy):
    """Others are overwritten in place."""
    steps = run(stream, lengths=LENGTHS)
    next(steps)
    next(steps)
    held, length = steps.state, steps.state.length.tolist()
    next(steps)
    between = steps._at.state
    next(steps)
    assert between.layers[0].k.is_deleted()
    assert held.length.tolist() == length == (LENGTHS + 1).tolist()
    assert not held.layers[0].k.is_deleted()
    np.testing.assert_array_equal(steps.tokens, greedy[0].tokens[:, :4])


def test_an_equal_stream_compiles_nothing(run):
    list(run(stream, lengths=LENGTHS))
    before = layers.layer_step._cache_size(), loop._decoded._cache_size()
    list(run(stream, lengths=LENGTHS, policy=methods.h2o(6)))
    assert (layers.layer_step._cache_size(), loop._decoded._cache_size()) == before


def test_text_ends_before_stop_strings_and_end_tokens(run, greedy):
    """Each row at its own; the pieces together are the text of the tokens before."""
    rows = [words().decode(row) for row in greedy[0].tokens.tolist()]
    stop = rows[1][4:10]  # from within its second word to within its fourth
    steps = run(stream, lengths=LENGTHS, tokenizer=words(), stop=stop, eos_ids=greedy[1])
    pieces = list(steps)
    assert steps.text == ["".join(parts) for parts in zip(*pieces, strict=True)]
    before = [rows[0][: rows[0].index(words().decode([greedy[1]]))].rstrip(), rows[1][: rows[1].index(stop)]]
    assert steps.text == before
    assert steps.lengths[1] == -(-(rows[1].index(stop) + 6) // 3)


def test_a_text_is_a_batch_of_one(run):
    text = words().decode(TOKENS[1, 5:])
    steps = run(stream, tokens=text, tokenizer=words(), max_new_tokens=4, policy=methods.full())
    assert "".join(steps) == steps.text == words().decode(steps.tokens[0].tolist())
    assert steps.state.prompt_length.tolist() == [4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": "aa ab"}, "text needs tokenizer="),
        ({"tokens": [{"role": "user", "content": "aa"}]}, "text needs tokenizer="),
        ({"stop": "aa"}, "text needs tokenizer="),
        ({"stop": ("aa", "")}, r"stop=\('aa', ''\): must be strings of at least one character"),
        ({"tokens": "aa ab", "tokenizer": ..., "lengths": [2]}, "lengths= and attention_mask= are of token ids"),
        ({"max_new_tokens": None, "policy": methods.full()}, "keeps what comes after the prompt"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_streamed_is_refused(run, options, message):
    options = {k: words() if v is ... else v for k, v in options.items()}
    with pytest.raises(ValueError, match=message):
        run(stream, **options)


def test_a_stream_is_not_traced(run):
    with pytest.raises(ValueError, match="runs step by step outside of jit"):
        jax.jit(lambda tokens: run(stream, tokens))(jnp.asarray(TOKENS))
