"""Reading without end."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.drivers import endless
from kvjax.pallas_kernels.values import MOST_TOKENS
from kvjax.scoring.scores import _sum_by_position

PROMPT, CHUNK = 9, 4
IDS = np.random.default_rng(4).integers(0, 61, (PROMPT + 3 * CHUNK + 1, 2))  # a last chunk of one token
POLICY = kvjax.partition_heads({"a": methods.h2o(6), "b": methods.window(5)}, [["a", "b"]])


def losses_of(model, params, policy):
    """What a plan for these tokens alone gives: losses, and the state after."""
    options = {"prompt_len": PROMPT, "max_new_tokens": len(IDS) - PROMPT, "lengths": [PROMPT]}
    plan = kvjax.make_plan(model.config, policy, **options)
    first, state = kvjax.prefill(model, params, IDS[:PROMPT].T, plan)
    logits, state = kvjax.feed(model, params, IDS[PROMPT:].T, state)
    logits = jnp.concatenate([first[:, None], logits], axis=1)
    each = jax.nn.log_softmax(logits[:, :-1])
    return -np.take_along_axis(np.asarray(each), IDS[PROMPT:].T[..., None], axis=-1)[..., 0], logits, state


def test_chunks_are_token_by_token(shallow):
    """Losses and logits, the last chunk shorter, from an iterator that knows no length; the state after too."""
    losses, logits, state = losses_of(*shallow, POLICY)
    start = lambda **how: kvjax.read(*shallow, iter(IDS), policy=POLICY, prompt_len=PROMPT, chunk=CHUNK, **how)
    reader = start()
    found = list(reader)
    assert [x.shape for x in found] == [(2, CHUNK)] * 3 + [(2, 1)]
    np.testing.assert_allclose(np.concatenate(found, axis=1), losses, atol=2e-5)
    np.testing.assert_array_equal(reader.state.length, state.length)
    for a, b in zip(reader.state.layers, state.layers, strict=True):
        np.testing.assert_array_equal(np.sort(a.pos), np.sort(b.pos))
    reader = start(found="logits")
    found = np.concatenate([reader.logits[:, None], *reader], axis=1)
    np.testing.assert_allclose(found, logits, atol=2e-5)


def test_nothing_grows_and_nothing_is_lost(shallow):
    """An endless iterator of one sequence; a state that somebody holds stays; what is no id is no token."""
    source = itertools.cycle([3, 5, 8])
    ids = itertools.chain(itertools.islice(source, 40), [61], source)
    reader = kvjax.read(*shallow, ids, policy=methods.tova(6), prompt_len=PROMPT, chunk=CHUNK)
    next(reader)
    compiled, held, shapes = endless._several._cache_size(), reader.state, jax.tree.map(jnp.shape, reader.state)
    for _ in range(6):
        next(reader)
    assert held.length.tolist() == [PROMPT + CHUNK]
    assert not any(x.is_deleted() for x in jax.tree.leaves(held))
    with pytest.raises(ValueError, match="token id 61 is outside the vocabulary of 61"):
        next(reader)
    assert reader.num_tokens == 37 == int(reader.state.length[0])
    assert jax.tree.map(jnp.shape, reader.state) == shapes
    assert endless._several._cache_size() == compiled
    reader.num_tokens = MOST_TOKENS
    reader._pending = [1]
    with pytest.raises(ValueError, match=r"are more than the 1,073,741,823 that positions count"):
        next(reader)
    reader.close()
    assert list(reader) == []


KEEPS = r"layer 0 needs 536,87\d,\d+ slots for 536,870,\d+ tokens, 1,073,741,\d+ for 1,073,741,567"
CHUNKS = kvjax.when(kvjax.every(4), methods.chunkkv(8, chunk_size=4, base=methods.h2o(8)))


FASTGEN = methods.fastgen(special_ids=(), punctuation_ids=(), budget=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": methods.full()}, KEEPS),
        ({"policy": methods.snapkv(8, window_size=4)}, KEEPS),
        ({"policy": CHUNKS}, "has tables with an entry for every position"),
        ({"policy": FASTGEN}, "has tables"),
        ({"policy": kvjax.partition_heads({"a": FASTGEN, "b": methods.h2o(6)}, [["a", "b"]])}, "has tables"),
        ({"tokens": []}, "there are no tokens to read"),
        ({"tokens": [[1, 2], [1]]}, "ids, or one id a sequence at every step"),
        ({"tokens": [0.5]}, r"got float64 of shape \(1,\)"),
        ({"tokens": "a text"}, "tokens is a str, not token ids"),
        ({"tokens": np.array(5)}, "tokens is a ndarray, not token ids"),
        ({"chunk": 0}, "chunk=0: must be a whole number of at least 1"),
        ({"found": "ranks"}, "found='ranks' is not one of"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_read_is_refused(shallow, options, message):
    options = {"tokens": itertools.repeat(1), "policy": methods.h2o(6)} | options
    with pytest.raises(ValueError, match=message):
        kvjax.read(*shallow, options.pop("tokens"), **options)


def test_a_cache_that_stops_growing_late_is_endless(shallow):
    policy = kvjax.when(kvjax.every(70_000), methods.h2o(6))
    plan = endless.plan_endless(shallow[0].config, policy, prompt_len=16)
    assert {*plan.capacities} == {70_006}


def test_numbers_of_one_position_are_summed():
    pos = np.random.default_rng(0).integers(-1, 5, (3, 12)).astype(np.int32)
    pos[2] = 4  # one position alone
    x = np.random.default_rng(1).random((3, 12), np.float32)
    same = (pos[:, :, None] == pos[:, None]) & (pos >= 0)[:, :, None]
    np.testing.assert_allclose(
        _sum_by_position(jnp.asarray(x), jnp.asarray(pos)), (same * x[:, None]).sum(-1), rtol=1e-6
    )
