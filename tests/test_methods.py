"""Methods as values: how far their numbers reach, and what they print."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.budgets import Combined, HeadShares, Schedule
from kvjax.decide.select import Chunks
from kvjax.methods.released import papers
from kvjax.scores.attention import Recency
from kvjax.scores.keys import LagRelative
from tests import tensors
from tests.marks import slow_but

pytestmark = pytest.mark.usefixtures("as_users_run_it")

T = 12
q, k, v = tensors.qkv(3, B=1, T=T)


@pytest.mark.slow
def test_sizes_beyond_the_text_mean_the_text():
    """No array and no program grows with a history, a partition, a chunk or a distance."""
    of = lambda policy: np.asarray(kvjax.evict_layer(policy, q, k, v).live)
    lagged = lambda *sizes: kvjax.Evict(LagRelative(*sizes), 6)
    chunked = lambda size: kvjax.Evict(Recency(), 6, select=Chunks(size))
    dilated = lambda dilation: papers.dilated_window_anchored(6, dilation=dilation)
    for huge, whole in (
        (methods.scissorhands(8, history=10**9, recent=2), methods.scissorhands(8, history=12, recent=2)),
        (lagged(2**29), lagged(13)),
        (lagged(2, 2**29), lagged(2, 12)),
        (chunked(2**29), chunked(12)),
        (dilated(2**29), dilated(12)),
    ):
        np.testing.assert_array_equal(of(huge), of(whole))


@pytest.mark.parametrize("budget", [2**31, Combined("sum", (1.0, 2**31, 2**31))])
@pytest.mark.parametrize(
    "make",
    [
        methods.h2o,
        lambda b: methods.ada_snapkv(b, window=4),
        lambda b: methods.pyramidkv(b, window=4),
        lambda b: methods.nacl(b, recent=2**31, proxies=2**31, random=2**31),
        lambda b: kvjax.Evict(Recency(), b, heads=HeadShares(((2.0, 1.0),) * 3)),
        lambda b: methods.scissorhands(b, drop=2**30),
        lambda b: kvjax.Evict(Recency(), b, 2**29, 2**29, when=Schedule(every=1, before=True)),
    ],
    ids=["h2o", "ada", "pyramid", "nacl", "table", "scissorhands", "protected"],
)
def test_a_budget_beyond_every_plan_holds_everything(make, budget):
    assert kvjax.evict_layer(make(budget), q, k, v, num_layers=3).live.all()


@pytest.mark.parametrize(
    "make", slow_but([methods.h2o, methods.roco, methods.expected_attention, lambda b: methods.nacl(b)], methods.h2o)
)
def test_64_bits_keep_what_32_bits_keep(make):
    """Draws and orders do not depend on the precision of queries and keys."""
    found = [np.asarray(kvjax.evict_layer(make(8), q, k, v).live)]
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v)]
        assert wide[0].dtype == jnp.float64
        found.append(np.asarray(kvjax.evict_layer(make(8), *wide).live))
    np.testing.assert_array_equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("generator", ["rbg", "unsafe_rbg"])
def test_keys_of_every_generator_draw_row_by_row(generator):
    """Draws of these generators under `vmap` are those of the first row's key."""
    keys, arrays = jax.random.split(jax.random.key(1, impl=generator), 3), tensors.qkv(0, B=3)
    draw = lambda keys: np.asarray(kvjax.evict_layer(methods.random(6), *arrays, key=keys).live)
    assert len({row.tobytes() for row in draw(keys)}) == 3
    np.testing.assert_array_equal(draw(keys[::-1]), draw(keys)[::-1])


def test_one_token_is_not_the_whole_prompt():
    """1 == 1.0, and both hash alike; but programs are shared by budgets, which are data."""
    of = lambda budget: int(kvjax.evict_layer(methods.window(budget), q, k, v).num_live.max())
    assert (of(1), of(1.0), of(1)) == (1, T, 1)


def test_a_policy_prints_as_what_makes_it():
    policy = methods.tova(64)
    names = {cls.__name__: cls for cls in _values(kvjax.Policy.__mro__[1])} | {"Schedule": Schedule}
    names |= {"Layout": type(policy.layout), "Even": type(policy.layers)}
    assert eval(repr(policy), names) == policy


def _values(kind):
    for below in kind.__subclasses__():
        if "generation" not in below.__module__:  # samplers have filters of the same names
            yield below
        yield from _values(below)


def test_random_attention_holds_the_prompt_and_a_uniform_sample_of_what_follows():
    """Of 5 tokens and 7 that follow, down to 7 when 10 are held: any 2 of 5, and other ones in every head."""
    arrays = dict(zip("qkv", tensors.qkv(3, B=64, T=T), strict=True))
    live = tensors.replay(methods.random_attention(7, every=3), [arrays], 5).live
    assert [{len(head) for row in step for head in row} for step in live] == [{5}, {6}, {7}, {8}, {9}, {7}, {8}, {9}]
    assert all(head[:5] == [*range(5)] for step in live for row in step for head in row)
    drawn = [head[5:] for row in live[5] for head in row]
    counts = np.bincount(np.concatenate(drawn), minlength=10)[5:]
    assert abs(counts - 128 * 2 / 5).max() < 4 * np.sqrt(128 * 0.4 * 0.6)
    assert sum(one != other for one, other in zip(drawn[::2], drawn[1::2], strict=True)) > 64 / 2
