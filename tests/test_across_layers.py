"""One budget for all layers, beside a top-k in numpy over what every layer scores alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.across_layers import Preference, ScoreEntropy, TopScores
from kvjax.cache.state import KVState
from kvjax.models import ModelConfig
from kvjax.policy import context
from kvjax.scoring.stats import AttentionStats
from tests import helpers

B, K, N, T, H, L, W = 2, 2, 4, 24, 8, 3, 4
CONFIG = ModelConfig(
    vocab_size=61, embed_dim=32, mlp_dim=32, num_layers=L, num_query_heads=N, num_kv_heads=K, head_dim=H
)


def after_prompt(policy, lengths=(T, 17)):
    """(state after the model has run, statistics) of random layers, each as it would be alone."""
    plan = kvjax.make_plan(CONFIG, policy, prompt_len=T, max_new_tokens=4)
    state = kvjax.init_state(plan, lengths)
    state = dataclasses.replace(state, length=state.prompt_length)
    layers, stats = [], []
    for i in range(L):
        ctx = context(state, i, "prefill")
        kv = helpers.prompt_layer(policy, ctx, lengths=lengths, seed=i)
        kv = dataclasses.replace(kv, v=kv.v * (i + 1))
        layers.append(kv)
        measured = helpers.random_stats(policy, kv, ctx, seed=10 + i)
        peaked = (
            measured.values if i else tuple(4 * x**3 for x in measured.values)
        )  # the first layer is unlike the rest
        stats.append(dataclasses.replace(measured, values=peaked))
    return dataclasses.replace(state, layers=tuple(layers)), AttentionStats(tuple(stats), phase="prefill")


def alone(policy, state, stats):
    """What every layer would decide alone: selections, and the tokens that compete."""
    found = []
    for i, (kv, measured) in enumerate(zip(state.layers, stats.layers, strict=True)):
        _, selection = policy.at(state.plan.sites[i]).decide(kv, measured, context(state, i, "prefill"))
        recent = np.asarray(kv.pos) >= np.asarray(state.length)[:, None, None] - W
        found.append((np.asarray(selection.score), np.asarray(kv.live) & ~recent, recent & np.asarray(kv.live)))
    return found


def test_one_top_k_over_all_layers_and_heads():
    policy = methods.layer_defensivekv(10, window_size=W, kernel_size=3, mass=0.0, max_ratio=3.0)
    state, stats = after_prompt(policy)
    after = policy(state, stats)
    for row in range(B):
        score = np.stack([np.where(c[row], s[row], -np.inf) for s, c, _ in alone(policy, state, stats)])
        best = np.argsort(-score.ravel(), kind="stable")[: L * K * (10 - W)]
        kept = np.zeros(score.size, bool)
        kept[best] = True
        kept = kept.reshape(score.shape)
        for i, (_, _, window) in enumerate(alone(policy, state, stats)):
            np.testing.assert_array_equal(np.asarray(after.layers[i].live[row]), kept[i] | window[row])
    per_layer = [int(kv.num_live[0].sum()) for kv in after.layers]
    assert sum(per_layer) == L * K * 10
    assert len(set(per_layer)) > 1


def test_a_layer_gets_no_more_than_it_has_slots_for():
    """What it would have had goes to the next best of the others."""

    def totals_at(max_ratio):
        policy = methods.layer_defensivekv(10, window_size=W, kernel_size=3, mass=0.0, max_ratio=max_ratio)
        return [int(kv.num_live[0].sum()) for kv in policy(*after_prompt(policy)).layers]

    most, totals = K * 11, totals_at(1.1)
    assert max(totals_at(3.0)) > most
    assert max(totals) == most
    assert sum(totals) == L * K * 10


@pytest.mark.parametrize("make", [methods.cake, methods.lava])
def test_layers_get_their_share_of_the_budget(make):
    policy = make(10, window_size=W, kernel_size=3, max_ratio=3.0)
    state, stats = after_prompt(policy)
    after = policy(state, stats)
    found = alone(policy, state, stats)
    for row in range(B):
        weights = []
        for i, (score, compete, _) in enumerate(found):
            if make is methods.lava:
                s = score[row][compete[row]].astype(np.float64)
                s = s / s.sum()
                weights.append(-(s * np.log(s)).sum() / np.log(s.size))
                continue
            votes = np.asarray(stats.layers[i].values[0][row], np.float64)
            votes = np.where(np.repeat(compete[row], N // K, axis=0)[:, None], votes, 0.0)
            spread = -(votes * np.log(votes + 1e-10)).sum()
            weights.append(spread ** (1 / 1.6) * votes.var(1, ddof=1).sum() ** (1 / 0.6))
        shares = np.array(weights) / sum(weights) * L * (10 - W)
        totals = np.array([int(kv.num_live[row].sum()) for kv in after.layers])
        assert totals.sum() == L * K * 10
        limit = np.minimum(30 - W, found[0][1][row].sum() // K)
        if shares.max() <= limit:
            assert (np.abs(totals / K - W - shares) < 1).all()
    assert len(set(totals.tolist())) > 1


def test_weights_by_hand():
    """Even scores have entropy 1, one that is alone 0."""
    policy = dataclasses.replace(methods.lava(10, window_size=W, kernel_size=1), by=ScoreEntropy())
    state, stats = after_prompt(policy, (T, T))
    rule = policy.rules(state.plan.sites[0])[0]
    here = rule.competitor(state.layers[0].memory[0], state.layers[0], stats.layers[0], context(state, 0, "prefill"))
    even = dataclasses.replace(here, score=jnp.ones_like(here.score))
    alone = dataclasses.replace(here, score=jnp.zeros_like(here.score).at[:, 0, 0].set(1.0))
    np.testing.assert_allclose(ScoreEntropy().weight(even), 1.0, rtol=1e-6)
    np.testing.assert_allclose(ScoreEntropy().weight(alone), 0.0, atol=1e-6)


def test_no_layer_is_left_without_a_token():
    """The first layer's scores have no entropy, so that it asks for nothing; nothing is protected."""
    peaked = lambda kv, stats, ctx: jnp.where((ctx.layer > 0) | (kv.pos == 5), 1.0, 0.0)
    policy = kvjax.across_layers(kvjax.from_fn(peaked, budget=2), ScoreEntropy())
    state = policy(*after_prompt(policy))
    assert [kv.num_live[0].tolist() for kv in state.layers] == [[1, 1], [3, 3], [2, 2]]


def test_one_layer_alone_has_the_average():
    q, k, v = helpers.qkv(1)
    cake = methods.cake(10, window_size=W, kernel_size=3)
    np.testing.assert_array_equal(kvjax.evict_layer(cake, q, k, v).keep, kvjax.evict_layer(cake.policy, q, k, v).keep)


def test_a_model_keeps_its_budget_and_decodes(tiny):
    model, params = tiny
    tokens = np.random.default_rng(0).integers(0, 61, (B, T))
    policy = methods.cake(10, window_size=W, kernel_size=3)
    run = lambda tokens, lengths: kvjax.generate(
        model, params, tokens, policy=policy, lengths=lengths, max_new_tokens=5
    )
    both = run(tokens, [T, 17])
    layers = both.state.layers
    assert isinstance(both.state, KVState)
    assert sum(int(kv.num_live[0].sum()) for kv in layers) == len(layers) * 2 * (10 + 4)
    np.testing.assert_array_equal(run(tokens[1:, T - 17 :], None).tokens[0], both.tokens[1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kvjax.across_layers(methods.h2o(10), Preference(W)), "evicts while decoding; use"),
        (
            lambda: kvjax.across_layers(methods.snapkv(10, window_size=W), TopScores()),
            r"use heads=Adaptive\(alpha=1.0",
        ),
        (
            lambda: kvjax.across_layers(methods.pyramidkv(10, window_size=W), ScoreEntropy()),
            "divides it already; use UniformLayers",
        ),
        (
            lambda: kvjax.across_layers(
                kvjax.chain(methods.snapkv(12, window_size=W), methods.knorm(10)), ScoreEntropy()
            ),
            "by the scores of one Evict, but layer 0 has",
        ),
    ],
)
def test_what_cannot_compete_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        kvjax.make_plan(CONFIG, make(), prompt_len=T, max_new_tokens=4)


def test_one_decision_for_all_layers_is_not_made_of_another():
    by, alone = Preference(W), methods.snapkv(10, window_size=W)
    shares = kvjax.shared_layers, lambda policy: kvjax.across_layers(policy, by)
    for outer in shares:
        for inner in shares:
            with pytest.raises(ValueError, match="makes one of its own for them, which would be lost; use one of the"):
                outer(inner(alone))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("given", [{"max_ratio": 0.5}, {"max_ratio": float("nan")}, {"by": "entropy"}])
def test_what_is_no_division_is_refused(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        kvjax.across_layers(**{"policy": methods.knorm(10), "by": ScoreEntropy(), **given})


def test_memory_counts_all_layers_of_the_prompt():
    """They exist until the last one was read."""
    plan = lambda policy: kvjax.make_plan(CONFIG, policy, prompt_len=T, max_new_tokens=4).memory().prefill
    cake = methods.cake(10, window_size=W, kernel_size=3)
    every, one = plan(cake), plan(cake.policy)
    statistics = jax.tree.leaves(after_prompt(cake, (T,) * B)[1].layers[0])
    assert every.cache == L * (one.cache + sum(x.size * 4 // B for x in statistics))
