"""Reading without end."""

import dataclasses
import itertools
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import budgets, compose, methods
from kvjax.contract import MOST
from kvjax.generation import generate as generating
from kvjax.generation import loop
from kvjax.run import steps
from kvjax.run.state import Prompts
from kvjax.text import read as reading
from kvjax.text.read import read
from kvjax.text.stream import read_endless

PROMPT, CHUNK = 9, 4
IDS = np.random.default_rng(4).integers(0, 61, (PROMPT + 3 * CHUNK + 1, 2))  # a last chunk of one token
POLICY = compose.partition_heads({"a": methods.h2o(6), "b": methods.window(5)}, [["a", "b"]])


def losses_of(model, params, policy):
    """What is found step by step with a plan for these tokens alone: losses, logits and state at the end."""
    logits, state = steps.prefill(model, params, IDS[:PROMPT].T, policy=policy, max_new_tokens=len(IDS) - PROMPT)
    found, state_after = generating.feed(model, params, IDS[PROMPT:].T, state)
    log_probs, _ = generating.score(model, params, IDS[PROMPT:].T, logits, state)
    return -log_probs, found[:, -1], state_after


@pytest.mark.slow
def test_chunks_are_token_by_token(shallow):
    """Losses and logits, the last chunk shorter, from an iterator that knows no length; the state after too."""
    losses, logits, state = losses_of(*shallow, POLICY)
    read_on = read(*shallow, iter(IDS), policy=POLICY, prompt_len=PROMPT, chunk=CHUNK)
    found = list(read_on)
    assert [x.shape for x in found] == [(2, CHUNK)] * 3 + [(2, 1)]
    np.testing.assert_allclose(np.concatenate(found, axis=1), losses, atol=2e-5)
    np.testing.assert_array_equal(read_on.state.length, state.length)
    for a, b in zip(read_on.state.layers, state.layers, strict=True):
        np.testing.assert_array_equal(np.sort(a.head_pos), np.sort(b.head_pos))
    np.testing.assert_allclose(read_on.logits, logits, atol=2e-5)


def test_nothing_grows_and_nothing_is_lost(shallow):
    """An endless iterator of one sequence; a state that somebody holds stays; what is no id is no token."""
    source = itertools.cycle([3, 5, 8])
    ids = itertools.chain(itertools.islice(source, 40), [61], source)
    read_on = read(*shallow, ids, policy=methods.tova(6), prompt_len=PROMPT, chunk=CHUNK)
    next(read_on)
    compiled, held, shapes = loop._decoded._cache_size(), read_on.state, jax.tree.map(jnp.shape, read_on.state)
    for _ in range(6):
        next(read_on)
    assert held.length.tolist() == [PROMPT + CHUNK]
    assert not any(x.is_deleted() for x in jax.tree.leaves(held))
    with pytest.raises(ValueError, match="token id 61 is outside the vocabulary, 0 to 60"):
        next(read_on)
    assert read_on.num_tokens == 37 == int(read_on.state.length[0])
    assert jax.tree.map(jnp.shape, read_on.state) == shapes
    assert loop._decoded._cache_size() == compiled
    read_on.num_tokens = MOST - 1
    read_on._waiting = [1]
    with pytest.raises(ValueError, match=r"are more than the 1,073,741,823 that positions count"):
        next(read_on)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_loses_no_losses(shallow, monkeypatch):
    """It comes while a chunk is read, which the cache then has; the next call returns what that chunk gave."""
    options = {"policy": POLICY, "prompt_len": PROMPT, "chunk": CHUNK}
    whole, step = list(read(*shallow, IDS, **options)), reading.decoded
    read_on = read(*shallow, IDS, **options)
    monkeypatch.setattr(reading, "decoded", lambda *x, **how: (step(*x, **how), signal.raise_signal(signal.SIGINT))[0])
    found = []
    for _ in whole:
        with pytest.raises(KeyboardInterrupt):
            next(read_on)
        found.append(next(read_on))
    assert not list(read_on)
    np.testing.assert_array_equal(np.concatenate(found, axis=1), np.concatenate(whole, axis=1))


FASTGEN = dataclasses.replace(methods.fastgen((1,), (2,)), budget=8)
KEEPS = r"keeps what comes after the prompt, [\d,]+ slots and numbers for 1,048,576 tokens and [\d,]+ for twice as many"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": methods.full()}, KEEPS),
        ({"policy": methods.snapkv(8, window=4)}, KEEPS),
        ({"policy": FASTGEN}, KEEPS),
        ({"policy": compose.partition_heads({"a": FASTGEN, "b": methods.h2o(6)}, [["a", "b"]])}, KEEPS),
        ({"tokens": []}, "there are no tokens to read"),
        ({"tokens": [[1, 2], [1]]}, "ids, or one id a sequence at every step"),
        ({"tokens": [0.5]}, r"got float64 of shape \(1,\)"),
        ({"tokens": "a text"}, "tokens is a str, not token ids"),
        ({"tokens": np.array(5)}, "tokens is a ndarray, not token ids"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_read_is_refused(shallow, options, message):
    options = {"tokens": itertools.repeat(1), "policy": methods.h2o(6)} | options
    with pytest.raises(ValueError, match=message):
        read(*shallow, options.pop("tokens"), **options)


def test_a_cache_that_stops_growing_late_is_endless(shallow):
    policy = compose.when(budgets.Schedule(every=70_000), methods.h2o(6))
    _, state = read_endless(*shallow, Prompts(np.ones((1, 16), np.int32), np.array([16], np.int32)), policy)
    assert {*state.plan.capacities} == {70_008}
