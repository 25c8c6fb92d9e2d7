"""Scores of the prompt's last rows, one by one, beside loops in numpy."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.scoring.row_votes import Defensive, MeanAndVariance
from tests import helpers

R = 4


def probabilities(q, k):
    """Softmax rows "B N T T" under a causal mask."""
    q, k = np.asarray(q, np.float64), np.repeat(np.asarray(k, np.float64), q.shape[1] // k.shape[1], axis=1)
    x = np.einsum("bnth,bnsh->bnts", q, k) / np.sqrt(q.shape[-1])
    x = np.where(np.tril(np.ones(x.shape[-2:], bool)), x, -np.inf)
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def averaged(row, width):
    half = width // 2
    padded = np.concatenate([np.zeros(half), row, np.zeros(half)])
    return np.array([padded[i : i + width].sum() / width for i in range(len(row))])


def test_mean_and_variance():
    q, k, v = helpers.qkv(1)
    policy = kvjax.Evict(MeanAndVariance(R, 200.0), 10, protect=kvjax.Protect(recent=R))
    votes = probabilities(q, k)[:, :, -R:, :-R].reshape(2, 2, 2, R, -1)
    expected = (votes.mean(3) + 200 * votes.var(3, ddof=1)).mean(2)
    found = kvjax.evict_layer(policy, q, k, v).score[..., :-R]
    np.testing.assert_allclose(found, expected, rtol=2e-4)


def test_two_rows_by_hand():
    """Votes of 0.1 and 0.3 for the first token: mean 0.2, variance 0.02."""
    p = [[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.1, 0.5, 0.4, 0], [0.3, 0.1, 0.1, 0.5]]
    q, k, v, scale = helpers.from_probabilities(p)
    policy = kvjax.Evict(MeanAndVariance(2, 10.0), 3, protect=kvjax.Protect(recent=2))
    selection = kvjax.evict_layer(policy, q, k, v, scale=scale)
    np.testing.assert_allclose(selection.score[0, 0, :2], [0.2 + 0.2, 0.3 + 10 * 0.08], rtol=1e-5)
    assert helpers.kept(selection) == [1, 2, 3]


def defensive(q, k, v, out_proj, budget, mass, width):
    """Scores of all tokens before the window, "K n", and how many each head puts first, in plain loops."""
    n, N, K = q.shape[2] - R, q.shape[1], k.shape[1]
    p = probabilities(q, k)[0]
    score, first = np.zeros((K, n)), np.zeros((K, n), bool)
    norms = np.zeros((K, n))
    mean = np.zeros((K, n))
    for h in range(K):
        group = range(h * N // K, (h + 1) * N // K)
        rows = np.array([[p[g, -R + i, :n] for i in range(R)] for g in group])
        pooled = np.array([[averaged(row, width) for row in rows_of] for rows_of in rows])
        pooled *= rows.sum(-1, keepdims=True) / pooled.sum(-1, keepdims=True)
        worst = pooled.max((0, 1))
        score[h] = np.maximum(worst, worst.mean())
        mean[h] = rows.mean((0, 1))
        for g in group:
            norms[h] += np.abs(np.asarray(v[0, h, :n], np.float64) @ np.asarray(out_proj[g], np.float64)).sum(-1)
    score *= norms / norms.sum(0)
    beside = np.mean([mean[h, n - R :].sum() for h in range(K)])
    for h in range(K):
        order = np.argsort(-mean[h])
        share = np.cumsum(mean[h][order]) / mean[h].sum()
        first[h, order[: min((share < mass - beside).sum(), budget - R)]] = True
    return score, first


@pytest.mark.parametrize("mass", [0.9, 0.3])
def test_defensive_beside_loops(mass):
    q, k, v = helpers.qkv(5, B=1)
    out_proj = jax.random.normal(jax.random.key(3), (4, 8, 16))
    score, first = defensive(q, k, v, out_proj, 12, mass, 3)
    selection = kvjax.evict_layer(
        methods.defensivekv(12, window_size=R, kernel_size=3, mass=mass), q, k, v, out_proj=out_proj
    )
    found = np.asarray(selection.score[0, :, :-R])
    np.testing.assert_allclose(found[~first], score[~first], rtol=1e-4)
    assert found[first].min() > score.max()
    # All heads together keep the best of the layer.
    best = np.argsort(-np.where(first, 2.0, score).ravel(), kind="stable")[: 2 * (12 - R)]
    kept = np.zeros(score.size, bool)
    kept[best] = True
    np.testing.assert_array_equal(np.asarray(selection.keep[0, :, :-R]), kept.reshape(score.shape))


def test_no_head_puts_more_first_than_the_budget_holds():
    q, k, v = helpers.qkv(6)
    everything = Defensive(R + 3, rows=R, pool=3, mass=1.0)
    policy = kvjax.Evict(everything, R + 3, protect=kvjax.Protect(recent=R))
    selection = kvjax.evict_layer(policy, q, k, v, out_proj=jax.numpy.ones((4, 8, 8)))
    votes = probabilities(q, k)[:, :, -R:, :-R].reshape(2, 2, 2 * R, -1).mean(2)
    best = np.argsort(-votes, axis=-1)[..., :3]
    for row in range(2):
        for head in range(2):
            assert set(best[row, head]) == set(helpers.kept(selection, row, head)[:3])
