"""Counts, and how a budget is divided over layers and heads, beside plain formulations."""

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.budgets import (
    Above,
    Combined,
    Even,
    HeadShares,
    LayerShares,
    Of,
    OfSeen,
    Pyramid,
    Schedule,
    Share,
    Times,
    apportion,
    head_curves,
)
from kvjax.contract import LayerInfo, Slots, resolve
from kvjax.scores.attention import Recency
from kvjax.storage import Layer
from tests import tensors
from tests.by_hand import moment

traced_apportion = jax.jit(functools.partial(apportion, xp=jnp))


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(st.data())
def test_apportion_is_exact_and_respects_limits(data):
    m, total = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 400))
    weights = np.array(data.draw(st.lists(st.floats(0.01, 10), min_size=m, max_size=m)))
    limits = np.array(data.draw(st.lists(st.integers(0, 200), min_size=m, max_size=m)))
    shares = weights / weights.sum() * total
    whole = apportion(shares, limits)
    assert whole.sum() == min(total, limits.sum())
    assert (whole <= limits).all()
    assert (whole >= 0).all()
    if (shares <= limits).all():
        assert (np.abs(whole - shares) < 1).all()
    pad = lambda x: np.pad(x, (0, 12 - m))  # of any example: other sizes would compile anew
    traced = np.asarray(traced_apportion(jnp.asarray(pad(shares), jnp.float32), jnp.asarray(pad(limits))))
    assert traced.sum() == min(total, limits.sum())
    assert (traced <= pad(limits)).all()
    assert (np.abs(traced[:m] - whole) <= 1).all()  # float32 may round another near-tie up


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
    beta=st.floats(1, 60), average=st.integers(1, 3000), limit=st.integers(1, 6000), num_layers=st.integers(1, 80)
)
def test_a_pyramid_has_the_total_of_equal_parts(beta, average, limit, num_layers):
    limit = max(limit, average)
    for outside in (0, 8):
        sizes = np.array([average]), np.array([limit]), num_layers, np.array([outside])
        layers = Pyramid(beta)(*sizes)[0]
        assert layers.sum() == Even()(*sizes).sum() == average * num_layers
        assert layers.max() <= limit
        assert (np.diff(layers) <= 1).all()  # falls, up to rounding
        assert layers.min() >= int(outside == 0)


def slots_of(candidates, hparams=()):
    """Of candidates "B K S", in the order of their positions."""
    candidates = jnp.asarray(candidates)
    pos = jnp.broadcast_to(jnp.arange(candidates.shape[-1], dtype=jnp.int32), candidates.shape)
    zeros, protected = jnp.zeros((*pos.shape, 8)), jnp.zeros_like(candidates)
    kv = Layer(zeros, zeros, pos, jnp.zeros(pos.shape[:2], bool))
    return Slots(kv, {}, moment(None, 1, prompt=1), candidates, protected, (), hparams)


divide = jax.jit(lambda heads, score, average, slots: heads(score, average, slots), static_argnums=0)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    alpha=st.sampled_from([0.0, 0.3, 1.0]),
    average=st.integers(1, 15),
    seed=st.integers(0, 50),
    cap=st.sampled_from([1.0, 1.6, 6.0]),
)
def test_heads_that_compete_have_the_total_of_equal_parts(alpha, average, seed, cap):
    rng = np.random.default_rng(seed)
    score = jnp.asarray(rng.random((2, 3, 20)) ** rng.uniform(0.5, 8, (2, 3, 1)), jnp.float32)
    heads = kvjax.Adaptive(alpha, cap)
    budgets = np.asarray(divide(heads, score, jnp.full((2,), average), slots_of(rng.random(score.shape) < 0.9)))
    assert (budgets.sum(-1) == 3 * average).all()
    assert budgets.min() >= int(alpha < 1)
    most = heads.most(np.array([average]), np.array([20]), LayerInfo(0, 1, 3, 3, 8, 20, 0))[0]
    assert budgets.max() <= max(most, average)


def test_equal_remainders_go_to_the_head_with_the_best_score_and_of_these_to_the_first():
    score = jnp.ones((1, 3, 8)).at[0, 2, 4].set(2.0)
    every = slots_of(np.ones((1, 3, 8), bool))
    shares = lambda score: divide(kvjax.Adaptive(0.5), score, jnp.asarray([2]), every)[0].tolist()
    assert sum(shares(score)) == 6
    assert shares(jnp.ones((1, 3, 8))) == [4, 1, 1]  # 3.5, 1.5 and 1


# ------------------------------------------------------------------------------------------------ tables


def largest_remainders(shares):
    whole = [math.floor(s + 1e-9) for s in shares]
    order = sorted(range(len(shares)), key=lambda i: (-(shares[i] - whole[i]), i))
    for i in order[: round(sum(shares)) - sum(whole)]:
        whole[i] += 1
    return whole


@pytest.mark.parametrize(
    ("weights", "average"), [((1, 2, 5, 4), 10), ((0.1, 0.25, 0.65), 7), ((3,), 5), ((1, 0, 2), 9)]
)
def test_tables_are_rounded_by_largest_remainders(weights, average):
    L, limit, outside = len(weights), np.array([100]), np.array([0])
    plain = largest_remainders([average * L * w / sum(weights) for w in weights])
    for scale in (1, 7):
        table = LayerShares(tuple(scale * w for w in weights))
        assert table(np.array([average]), limit, L, outside).tolist() == [plain]
    info = LayerInfo(1, 2, L, L, 8, 60, 0)
    heads = HeadShares(((1.0,) * L, tuple(map(float, weights))))
    slots = slots_of(np.ones((1, L, 60), bool), heads.hparams(info, np.array([60]), np.array([average])))
    assert divide(heads, jnp.zeros((1, L, 60)), jnp.asarray([average]), slots)[0].tolist() == plain
    assert (
        max(plain)
        <= heads.most(np.array([average]), limit, info)[0]
        == math.ceil(average * L * max(weights) / sum(weights) - 1e-9)
    )


def test_a_table_within_what_exists():
    table = lambda limit: LayerShares((8.0, 1.0, 3.0))(np.array([6]), np.array([limit]), 3, np.array([1])).tolist()
    assert [table(100), table(10), table(6)] == [[[12, 2, 4]], [[10, 2, 6]], [[6, 6, 6]]]
    heads, info = HeadShares(((3.0, 1.0),)), LayerInfo(0, 1, 2, 2, 8, 40, 0)
    candidates = np.ones((1, 2, 40), bool)
    candidates[0, 0, 11:] = False
    slots = slots_of(candidates, heads.hparams(info, np.array([40]), np.array([10])))
    assert divide(heads, jnp.zeros((1, 2, 40)), jnp.asarray([10]), slots)[0].tolist() == [11, 9]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: methods.h2o(0), "a budget of 0 tokens is none; attention needs at least 1 token"),
        (lambda: methods.h2o(0.0), "a budget of 0.0 of the prompt is none; attention needs at least 1 token"),
        (lambda: resolve(Share(0.5), np.array([4])), r"a budget cannot be Share\(0.5\) of itself"),
        (lambda: methods.headkv(8, [[0.0]]), "none below 0 and one at least above"),
        (
            lambda: LayerShares((1.0, 2.0))(*(np.array([4]),) * 2, 3, np.array([0])),
            "2 weights for 3 layers; give one a",
        ),
        (lambda: head_curves(np.zeros((10, 1, 2)), 0.5), "rows for ratios up to 0.1, but r=0.5; give a table that has"),
        (lambda: head_curves(np.full((50, 1, 2), 50.0), 0.5), "losses are from 50 to 50; give shares from 0 to 1"),
        (
            lambda: head_curves(np.ones((50, 1, 2)), 0.5),
            "losses are from 1 to 1; give shares from 0 to 1, some",
        ),
        (lambda: methods.snapkv(OfSeen(0.5, 8)), "grows while decoding, in all layers and heads alike, but Schedule"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_impossible_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_counts():
    n, budget = np.array([10, 100, 1000]), np.array([5, 50, 500])
    of = lambda count: resolve(count, n, budget).tolist()
    assert (of(7), of(0.25), of(Share(0.5))) == ([7, 7, 7], [2, 25, 250], [2, 25, 250])
    assert (of(Of(Share(0.5), 8)), of(Times(0.5, 1.5))) == ([4, 4, 4], [7, 75, 750])
    assert of(Combined("less", (0.5, 50))) == [0, 0, 450]
    assert of(Combined("sum", (Share(0.5), 4))) == [6, 29, 254]
    assert of(Combined("least", (10, Share(0.5)))) == [2, 10, 10]
    assert of(Above(7, 10)) == [10, 7, 7]


SEEN = kvjax.Evict(Recency(), OfSeen(0.4, 9), 2, when=Schedule(every=3))


def test_a_share_of_all_tokens_so_far_grows_while_decoding():
    """Of 10 tokens 4, of 13 tokens 5 and so on; of 3 as many as must stay; in slots for 9 and 3 between evictions."""
    seen = tensors.replay(SEEN, [dict(zip("qkv", tensors.qkv(1, T=24, B=2), strict=True))], 11, lengths=[10, 2])
    counts = lambda row: [len(step[row][0]) for step in seen.live]
    steps = range(len(seen.live))
    held = lambda n, least: [max(math.floor(0.4 * (n + i - i % 3)), least) + i % 3 for i in steps]
    assert counts(0) == held(10, 3)
    assert counts(1)[3:] == held(2, 3)[3:]


def test_a_share_of_more_tokens_than_the_ceiling_holds_is_refused(shallow):
    words = r"0.4 of 17 tokens and room for 8 new ones are 10 tokens, but most=9; give most=10 or more, or plan for"
    with pytest.raises(ValueError, match=words):
        kvjax.prefill(*shallow, np.arange(17)[None], policy=SEEN, max_new_tokens=8)
