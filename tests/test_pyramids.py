"""Pyramids of layer budgets, against the progressions of released code written out plainly."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.sizes.allocation import FloorPyramid, Pyramid
from tests import helpers


def plain_factory(n, b, w, L, beta, uniform_branch):
    """Live tokens of every layer, window included, branch by branch."""
    if n < b + w:
        return [n] * L
    if uniform_branch and n < 2 * b:
        return [b + w] * L
    last, first = b // beta, 2 * b - b // beta
    if first >= n - w:
        first, last = n - w, 2 * b - (n - w)
    return [first - layer * ((first - last) // (L - 1)) + w for layer in range(L)]


def plain_kvpress(n, kept, w, L, beta):
    """Live tokens of every layer; `kept` is the real number of tokens to keep, and halves hang on its last digits."""
    beside = (w + kept) - w
    last = beside / beta
    first = 2 * beside - last
    if first >= n - w:
        first, last = n - w, 2 * beside - (n - w)
    if not n >= first >= last >= w:
        return [round(kept)] * L
    step = (first - last) / (L - 1)
    return [round(first - layer * step) for layer in range(L)]


def live(policy, n, L):
    """Live tokens after a prompt, in every layer."""
    kept = []
    for site in (helpers.site(T=n, layer=i, num_layers=L) for i in range(L)):
        policy.check(site, n)
        spec = policy.spec(site)
        kept.append(min(spec.target[n], n))
        assert spec.capacity[n] >= kept[-1]
    return kept


@pytest.mark.parametrize("uniform_branch", [True, False])
@pytest.mark.parametrize(("L", "beta"), [(32, 20), (4, 3), (2, 1), (7, 5)])
def test_floor_pyramid(uniform_branch, L, beta):
    preset = "pyramid_factory" if uniform_branch else "pyramid_adakv"
    for budget, w in ((128, 8), (40, 16), (9, 8), (8, 8)):
        policy = methods.pyramidkv(budget, beta=beta, window_size=w, preset=preset)
        assert policy.layers == FloorPyramid(beta, uniform_branch)
        for n in (1, budget - 1, budget, budget + 1, 2 * (budget - w) - 1, 2 * (budget - w), 250, 1000):
            if n >= 1:
                layers = live(policy, n, L)
                assert layers == plain_factory(n, budget - w, w, L, beta, uniform_branch), (budget, w, n)
                assert sum(layers) >= L * min(budget, n)


def test_floor_pyramid_of_one_layer():
    assert FloorPyramid().layers(np.array([10]), np.array([50]), 1, 4).tolist() == [[10]]


@pytest.mark.parametrize(("L", "beta"), [(32, 20), (4, 2), (3, 1.5), (2, 1), (1, 4)])
def test_inclusive_pyramid(L, beta):
    for budget, w in ((128, 6), (60, 16), (9, 8), (8, 8)):
        policy = methods.pyramidkv(budget, beta=float(beta), window_size=w, preset="pyramid_kvpress")
        for n in (budget, budget + 1, 2 * budget - 1, 2 * budget, 250, 1000):
            plain = [budget] if L == 1 else plain_kvpress(n, budget, w, L, beta)
            assert live(policy, n, L) == [min(n, x) for x in plain], (budget, w, n)


def test_inclusive_pyramid_of_fractions():
    for n in range(40, 400, 7):
        for share in (0.3, 0.5, 1 - 0.45, 0.77):
            policy = methods.pyramidkv(share, beta=4.0, window_size=4, preset="pyramid_kvpress")
            assert live(policy, n, 5) == plain_kvpress(n, n * share, 4, 5, 4.0), (n, share)


def test_e18_complete(examples):
    e = examples["E18"]
    p, expected = e["params"], e["expected"]
    b = np.array([p["capacity"] - p["window"]])
    plain = Pyramid(p["beta"]).layers(b, np.array([4000 - p["window"]]), p["layers"], np.array([p["window"]]))[0]
    assert [plain[0], plain[-1]] == expected["paper_without_window_first_last"]
    assert plain.sum() == expected["paper_sum"]
    assert plain.sum() + p["layers"] * p["window"] == expected["kvjax_sum"]

    def preset(name):
        policy = methods.pyramidkv(p["capacity"], beta=p["beta"], window_size=p["window"], preset=name)
        return lambda n: live(policy, n, p["layers"])

    factory, adakv = preset("pyramid_factory"), preset("pyramid_adakv")
    assert factory(4000) == adakv(4000) == expected["code_n4000"]
    assert sum(factory(4000)) - p["layers"] * p["window"] == expected["code_sum_minus_windows"]
    assert set(factory(200)) == set(expected["code_n200"])
    assert set(factory(100)) == set(adakv(100)) == set(expected["code_n100"])
    assert [factory(240)[0], factory(240)[-1]] == expected["code_n240_first_last"]
    assert [adakv(200)[0], adakv(200)[-1]] == expected["ada_repo_n200_first_last"]
    assert preset(None)(4000) == expected["kvjax_exact"]

    def kvpress(n, removed, beta):
        return live(methods.pyramidkv(1 - removed, beta=beta, window_size=64, preset="pyramid_kvpress"), n, 4)

    assert kvpress(1000, 0.75, p["beta"]) == expected["kvpress_n1000_r0_75_w64_L4"]
    # The example's list is that of beta = 2; with the example's own beta = 20 the formula gives the second one.
    assert kvpress(4000, 0.5, 2.0) == expected["kvpress_n4000_r0_5_w64_L4"]
    assert kvpress(4000, 0.5, p["beta"]) == [3900, 2633, 1367, 100]


def test_an_overspending_policy_runs_within_its_plan(tiny):
    """Integer steps and half-even rounding exceed the budget; slots, targets and live tokens say so and agree."""
    model, params = tiny
    deep = dataclasses.replace(model.config, num_layers=4)
    model = type(model)(deep)
    params = jax.tree.map(lambda x: x * jnp.asarray(2.0, x.dtype), model.init(jax.random.key(3)))
    policy = methods.pyramidkv(10, beta=4.0, window_size=2, kernel_size=3, preset="pyramid_factory")
    plan = kvjax.make_plan(deep, policy, prompt_len=30, max_new_tokens=6, lengths=[30, 13])
    targets = [policy.at(site).spec.target[30] for site in plan.sites]
    assert targets == plain_factory(30, 8, 2, 4, 4, True) == [16, 12, 8, 4]
    policy = dataclasses.replace(policy, budget=11)
    plan = kvjax.make_plan(deep, policy, prompt_len=30, max_new_tokens=6, lengths=[30, 13])
    targets = np.array([[policy.at(site).spec.target[n] for site in plan.sites] for n in (30, 13)])
    assert targets.tolist() == [plain_factory(n, 9, 2, 4, 4, True) for n in (30, 13)]
    assert targets[0].sum() == 48 > 4 * 11
    assert plan.target(30) == 12
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 30)))
    result = kvjax.generate(model, params, tokens, lengths=np.array([30, 13]), policy=policy, max_new_tokens=6)
    np.testing.assert_array_equal(result.state.num_live, np.repeat(targets[:, :, None] + 5, 2, axis=2))

    policy = methods.ada_snapkv(9, window_size=2, alpha=0.5, kernel_size=3, rounding="half_even", max_ratio=math.inf)
    plan = kvjax.make_plan(deep, policy, prompt_len=30, max_new_tokens=0, lengths=[30])
    _, state = jax.jit(lambda p, t: kvjax.prefill(model, p, t, plan))(params, tokens)
    live_tokens = np.asarray(state.num_live)
    assert (live_tokens.sum(-1) != 2 * 9).any(), "a drift that does not occur would not be tested"
    assert live_tokens.max() <= plan.capacities[0]
