"""Budgets, allocation, schedules and plans: integers on the host."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.sizes.allocation import Adaptive, Pyramid, apportion
from kvjax.sizes.budget import Above, Fixed, Ratio, Share, Sum, Tokens, as_budget, as_count, lookup
from tests import helpers

traced_apportion = jax.jit(functools.partial(apportion, xp=jnp))


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(st.data())
def test_apportion_is_exact_and_respects_limits(data):
    m = data.draw(st.integers(1, 12))
    total = data.draw(st.integers(0, 400))
    weights = np.array(data.draw(st.lists(st.floats(0.01, 10), min_size=m, max_size=m)))
    limits = np.array(data.draw(st.lists(st.integers(0, 200), min_size=m, max_size=m)))
    shares = weights / weights.sum() * total
    whole = apportion(shares, limits)
    assert whole.sum() == min(total, limits.sum())
    assert (whole <= limits).all()
    assert (whole >= 0).all()
    if (shares <= limits).all():
        assert (np.abs(whole - shares) < 1).all()
    traced = np.asarray(traced_apportion(jnp.asarray(shares, jnp.float32), jnp.asarray(limits)))
    assert traced.sum() == min(total, limits.sum())
    assert (traced <= limits).all()
    assert (np.abs(traced - whole) <= 1).all()  # float32 may round another near-tie up


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
    beta=st.floats(1, 60), average=st.integers(1, 3000), limit=st.integers(1, 6000), num_layers=st.integers(1, 80)
)
def test_pyramid_total_is_that_of_uniform(beta, average, limit, num_layers):
    limit = max(limit, average)
    layers = Pyramid(beta).layers(np.array([average]), np.array([limit]), num_layers)[0]
    assert layers.sum() == average * num_layers
    assert layers.max() <= limit
    assert (np.diff(layers) <= 1).all()  # falls, up to rounding
    assert layers.min() >= 0


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    alpha=st.floats(0, 1), average=st.integers(1, 15), K=st.integers(1, 4), seed=st.integers(0, 50), cap=st.floats(1, 6)
)
def test_adaptive_total_is_that_of_uniform(alpha, average, K, seed, cap):
    rng = np.random.default_rng(seed)
    score = jnp.asarray(rng.random((2, K, 20)) ** rng.uniform(0.5, 8, (2, K, 1)), jnp.float32)
    candidates = jnp.asarray(rng.random((2, K, 20)) < 0.9)
    heads = Adaptive(alpha, cap)
    most = 15  # of any example: other sizes would compile anew
    budgets = np.asarray(heads.heads(score, candidates, jnp.full((2,), average, jnp.int32), most, helpers.site(K=K)))
    assert (budgets.sum(-1) == K * average).all()
    assert (budgets >= 0).all()
    most = heads.cap(np.array([average]), np.array([20]), helpers.site(K=K))[0]
    assert budgets.max() <= max(most, average)


def test_adaptive_follows_concentration():
    """A head whose attention is spread gets more than one that is concentrated."""
    spread, sharp = np.full(30, 1 / 30), np.r_[0.97, np.full(29, 0.03 / 29)]
    score = jnp.asarray(np.stack([spread, sharp])[None], jnp.float32)
    every = jnp.ones(score.shape, bool)
    budgets = Adaptive(1.0).heads(score, every, jnp.asarray([8], jnp.int32), 8, helpers.site())[0].tolist()
    assert budgets == [15, 1]
    assert Adaptive(1.0, max_ratio=1.25).heads(score, every, jnp.asarray([8], jnp.int32), 8, helpers.site())[
        0
    ].tolist() == [10, 6]


def test_counts():
    n, budget = np.array([10, 100, 1000]), np.array([5, 50, 500])
    assert Tokens(7).table(n, budget).tolist() == [7, 7, 7]
    assert Ratio(0.25).table(n, budget).tolist() == [2, 25, 250]
    assert Share(0.5).table(n, budget).tolist() == [2, 25, 250]
    assert Ratio(0.07, rounding="ceil").table(np.array([100, 101]), budget[:2]).tolist() == [7, 8]  # 0.07 * 100 > 7
    assert Ratio(0.25, rounding="ceil").table(n, budget).tolist() == [3, 25, 250]
    assert as_count(3, "x") == Tokens(3)
    assert as_count(0.5, "x") == Ratio(0.5)
    for bad in (True, 0.0, 1.01, -0.5):
        with pytest.raises(ValueError, match=r"not a number of tokens|lies in \(0, 1\]"):
            as_count(bad, "x")
    for share in (Share(0.5), Sum((Share(0.5), Tokens(4))), Above(Share(0.5), 3), Fixed(Tokens(4), Share(0.5))):
        with pytest.raises(ValueError, match="share of itself"):
            as_budget(share)
    within = Fixed(Share(0.5), Tokens(8))
    assert as_budget(Sum((within, Tokens(1)))).table(n, budget).tolist() == [5, 5, 5]
    with pytest.raises(ValueError, match="rows have no budget to be a share of"):
        kvjax.LastRows(Sum((Share(0.5), Tokens(1))))


def test_lookup():
    table = np.arange(11) ** 2
    assert lookup(table, jnp.asarray([3, 10, 99])).tolist() == [9, 100, 100]
    assert lookup(np.full(11, 4), jnp.asarray([3, 10])).tolist() == [4, 4]


@pytest.mark.parametrize(
    ("schedule", "room"),
    [
        (kvjax.after_prefill(), 100),
        (kvjax.every_step(), 1),
        (kvjax.every(7), 7),
        (kvjax.every(500), 100),
        (kvjax.when_over(9), 9),
        (kvjax.before_append(), 0),
    ],
)
def test_room_between_evictions(schedule, room):
    assert schedule.room(100) == room
    policy = kvjax.when(schedule, methods.window(16))
    assert policy.at(helpers.site(T=40, max_new_tokens=100)).spec.capacity.max() == 16 + room


@pytest.mark.parametrize(
    "kwargs",
    [{"every": 0}, {"over": 0}, {"every": 2, "over": 3}, {"before_append": True}, {"prefill": False}],
    ids=str,
)
def test_impossible_schedules(kwargs):
    with pytest.raises(ValueError, match="Schedule"):
        kvjax.Schedule(**kwargs)


def test_when_reaches_every_member():
    inner = kvjax.chain(methods.h2o(8), methods.tova(8))
    assert kvjax.when(kvjax.every(3), inner) == kvjax.chain(
        kvjax.when(kvjax.every(3), methods.h2o(8)), kvjax.when(kvjax.every(3), methods.tova(8))
    )
    mixed = kvjax.partition({0: methods.h2o(8), 1: methods.tova(8)}, (0, 1))
    (rule,) = kvjax.when(kvjax.every(3), mixed).rules(helpers.site(num_layers=2))
    assert rule.when == kvjax.every(3)


def test_decode_only_schedule_keeps_the_prompt_until_it_decodes(shallow):
    model, params = shallow
    policy = dataclasses.replace(methods.h2o(6), when=kvjax.Schedule(prefill=False, every=1))
    plan = kvjax.make_plan(model.config, policy, prompt_len=15, max_new_tokens=3)
    _, state = jax.jit(lambda p: kvjax.prefill(model, p, jnp.ones((1, 15), jnp.int32), plan))(params)
    assert state.num_live.max() == 15
    _, state = kvjax.decode_step(model, params, jnp.ones((1,), jnp.int32), state)
    assert state.num_live.max() == state.num_live.min() == 6


def test_plan_reports_sizes(tiny):
    config = tiny[0].config
    policy = methods.pyramidkv(8, beta=4.0, window_size=2)
    plan = kvjax.make_plan(config, policy, prompt_len=40, max_new_tokens=5, lengths=[40])
    targets = [spec.target[40] for spec in plan.specs]
    assert sum(targets) == 8 * 3
    assert targets[0] > targets[-1]
    assert plan.capacities == tuple(t + 5 for t in targets)
    assert plan.target(40) == 8.0
    assert plan.num_slots == sum(plan.capacities) * config.num_kv_heads


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"prompt_len": 0}, "prompt_len=0: the prompt is empty"),
        ({"prompt_len": 8.0}, "prompt_len=8.0: "),
        ({"max_new_tokens": -1}, "max_new_tokens=-1: must be a whole number of at least 0"),
        ({"prompt_len": 2**25}, "prompt_len=33554432 is more than 16777216, the longest prompt"),
        ({"max_new_tokens": 2**30}, "prompt_len=8 and max_new_tokens=1073741824 are more than 1073741823 tokens"),
        ({"lengths": [3.7]}, r"lengths=\[3.7\]: must be a whole number"),
        ({"lengths": []}, r"lengths=\[\]: must have at least 1 elements"),
        ({"lengths": [0, 4]}, "between 1 and the prompt's width 8"),
        ({"lengths": [9]}, "got 9 to 9"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_impossible_plans(tiny, kwargs, message):
    arguments = {"prompt_len": 8, "max_new_tokens": 2, **kwargs}
    with pytest.raises(ValueError, match=message):
        kvjax.make_plan(tiny[0].config, methods.full(), **arguments)


def test_plan_errors_name_layer_numbers_and_fix(tiny):
    policy = dataclasses.replace(methods.h2o(0.25, recent=0.5), layers=Pyramid(4.0))
    with pytest.raises(
        ValueError,
        match=r"layer 0 gets a budget of 5 tokens for a prompt of 20, but protect keeps 10 \(sinks=0, recent=10\); "
        r"raise the budget \(now 0.25\) or change Pyramid\(beta=4.0\)",
    ):
        kvjax.make_plan(tiny[0].config, policy, prompt_len=20, max_new_tokens=4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pyramid(0.5), "beta must be at least 1"),
        (lambda: Adaptive(1.5), "alpha must lie in"),
        (lambda: Adaptive(0.5, 0.2), "max_ratio"),
        (lambda: methods.snapkv(64, kernel_size=4), "a kernel is odd, or it shifts the scores; use 5"),
        (lambda: kvjax.LastRows(0), "at least one row"),
        (lambda: kvjax.Sample(top_k=0), "at least one token"),
        (lambda: kvjax.Sample(top_p=0.0), "probability mass"),
    ],
)
def test_impossible_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_plan_for_given_lengths_holds_a_prompt_of_its_width(tiny):
    plan = lambda lengths: kvjax.make_plan(
        tiny[0].config, methods.h2o(0.5), prompt_len=40, max_new_tokens=5, lengths=lengths
    )
    assert plan([10]).capacities == plan(None).capacities


def test_a_plan_for_given_lengths_is_tight_and_says_when_it_is_not_enough(tiny):
    """A pyramid gives a short prompt's upper layers more than a long one's."""
    model, params = tiny
    policy = methods.pyramidkv(8, beta=4.0, window_size=2)
    plan = lambda lengths: kvjax.make_plan(model.config, policy, prompt_len=40, max_new_tokens=5, lengths=lengths)
    tight, any_length, both = plan([40]), plan(None), plan([40, 10])
    assert tight.num_slots < both.num_slots <= any_length.num_slots
    assert plan([40, 39, 30]) == tight  # lengths that need no more compile nothing new
    tokens = jnp.ones((2, 40), jnp.int32)
    lengths = jnp.asarray([40, 10])
    with pytest.raises(ValueError, match=r"of 10 tokens needs 15 slots in layer 1, but the plan has \d+; make the"):
        kvjax.prefill(model, params, tokens, tight, lengths=lengths)

    @functools.partial(jax.jit, static_argnums=0)
    def after_all(plan, lengths):
        _, state = kvjax.prefill(model, params, tokens, plan, lengths=lengths)
        return kvjax.feed(model, params, jnp.ones((2, 5), jnp.int32), state)[0][:, -1]

    logits = after_all(tight, lengths)
    assert np.isnan(logits[1]).all(), "slots that do not fit are never dropped silently"
    assert np.isfinite(logits[0]).all()
    assert np.isfinite(after_all(both, lengths)).all()
