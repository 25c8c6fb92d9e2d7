"""Scores of keys, values and the prompt's last rows, beside loops in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods, models
from kvjax.budgets import Schedule
from kvjax.contract import FrozenArrays, Score
from kvjax.observe import ChunkAttention, FutureQueries
from kvjax.scores.attention import LastRows, Recency
from kvjax.scores.blends import (
    Blend,
    RemovalError,
    Standardized,
    ValueWeighted,
    pool_in_order,
    sum_by_position,
)
from kvjax.scores.keys import Capacity, Given, KeyDirections, Leverage, Redundancy, SquaredNorms
from kvjax.scores.rows import Defensive, Unsteady
from tests import tensors
from tests.by_hand import read, read_tensors

pytestmark = pytest.mark.usefixtures("as_users_run_it")

B, K, N, T, H, R = 2, 2, 4, 24, 8, 4
LENGTHS = [T, 17]


def scores(score, q, k, v, *, lengths=None, rotate=tensors.unturned, sinks=0, recent=0, **more):
    """Of a prompt's tokens "B K T"."""
    policy = kvjax.Evict(score, 12, sinks, recent)
    return tensors.evicted(policy, [{"q": q, "k": k, "v": v, **more}], lengths=lengths, rotate=rotate)[1][0]


def test_squared_norms_by_hand():
    """Partitions of two tokens: squared norms 1 and 3 are shares of 1/4 and 3/4; one of a single token is 1.

    All are divided by their sum over the tokens. Without partitions, squared norms are added as they are.
    """
    wide = lambda x: jnp.sqrt(jnp.asarray(x))[None, None, :, None] * jnp.eye(2)[0]
    k, v = wide([1.0, 3.0, 2.0, 2.0, 5.0]), wide([1.0, 1.0, 0.0, 4.0, 9.0])
    found = lambda of, size=2: scores(SquaredNorms(size, of), k, k, v)[0, 0]
    np.testing.assert_allclose(found("key"), np.array([0.25, 0.75, 0.5, 0.5, 1.0]) / 3, rtol=1e-6)
    np.testing.assert_allclose(found("value"), np.array([0.5, 0.5, 0.0, 1.0, 1.0]) / 3, rtol=1e-6)
    np.testing.assert_allclose(found("product"), np.array([0.125, 0.375, 0.0, 0.5, 1.0]) / 2, rtol=1e-6)
    np.testing.assert_allclose(found("mean", None), np.array([2, 4, 2, 6, 14]) / 28, rtol=1e-6)
    assert read_tensors(methods.curdkv(3, partition=2, sinks=1), k, k, v)[0][0] == [0, 3, 4]


def test_filters_look_along_one_direction_a_head():
    arrays = tensors.qkv(0)
    filters = np.random.default_rng(0).standard_normal((1, K, H)).astype(np.float32)
    found = scores(KeyDirections(FrozenArrays({"filters": filters})), *arrays)
    np.testing.assert_allclose(
        found, -np.einsum("kh,bkth->bkt", filters[0], np.asarray(arrays[1])), rtol=1e-4, atol=1e-5
    )
    with pytest.raises(ValueError, match=r"filters have the shape \(1, 2, 8\), but the model has \(3, 2, 8\)"):
        kvjax.evict_layer(methods.q_filters(12, filters), *arrays, num_layers=3)


def test_capacity_by_hand():
    """Queries look along all keys alike: weights of 1. Squares of values beside the identity's 1 add up to 16."""
    one = jnp.eye(2)[0]
    k, v = jnp.ones((1, 1, 4, 1)) * one, jnp.asarray([2.0, 1.0, 3.0, -1.0])[None, None, :, None] * one
    found = scores(Capacity(FutureQueries(4, 0), eps=0.0), k, k, v)
    np.testing.assert_allclose(found[0, 0], np.array([4, 1, 9, 1]) / 16, rtol=1e-5)
    assert read_tensors(methods.capkv(3, sinks=2), k, k, v)[0] == [[0, 1, 2]]


def test_capacity_of_large_values_is_that_of_directions():
    """Values along two directions: however large, no identity is lost, and no score is none."""
    q, k, _ = tensors.qkv(11)
    along = np.random.default_rng(0).standard_normal((2, H))
    v = jnp.asarray(np.random.default_rng(1).standard_normal((B, K, T, 2)) @ along, jnp.float32)
    found = [scores(Capacity(FutureQueries(4)), q, k, v * size) for size in (1e2, 1e4)]
    np.testing.assert_allclose(found[1], found[0], rtol=2e-2, atol=1e-4)


def test_capacity_beside_loops():
    """Of a padded row too, among the tokens behind the sinks."""
    (q, k, v), sinks = tensors.qkv(10), 2
    found = scores(Capacity(FutureQueries(3, sinks), tau=2.0, eps=1e-3), q, k, v, lengths=LENGTHS, sinks=sinks)
    for row, n in enumerate(LENGTHS):
        here = slice(T - n + sinks, T)
        for head in range(K):
            values, expected = np.asarray(v[row, head, here], np.float64), 0.0
            for g in (2 * head, 2 * head + 1):
                anchor = np.asarray(q[row, g, here], np.float64).mean(0)
                keys = np.asarray(k[row, head, here], np.float64)
                cosine = keys @ anchor / (np.linalg.norm(keys, axis=-1) * np.linalg.norm(anchor))
                weight = np.exp(2.0 * (cosine - cosine.max()))
                gram = np.eye(H) + sum((w + 1e-3) * np.outer(x, x) for w, x in zip(weight, values, strict=True))
                expected = expected + weight * np.einsum("th,hj,tj->t", values, np.linalg.inv(gram), values) / 2
            np.testing.assert_allclose(found[row, head, here], expected, rtol=1e-3)


def test_future_queries_are_the_average_of_rotated_moments():
    """Against rotating the moments to every position to come in float64."""
    rope, horizon, (q, k, v) = models.Rope(), 3, tensors.qkv(3, B=1, N=2, K=1, T=11, H=4)
    plain = np.asarray(q[0], np.float64)

    class Moments(Score):
        def observe(self, phase):
            return (FutureQueries(horizon, 0),)

        def __call__(self, slots):
            mean, _ = slots.stats[FutureQueries(horizon, 0)]
            return jnp.broadcast_to(mean.reshape(1, 1, 8)[..., jnp.minimum(jnp.arange(11), 7)], slots.kv.pos.shape)

    found = scores(Moments(), q, k, v, rotate=rope)[0, 0, :8].reshape(2, 4)
    turned = lambda x, p: np.asarray(rope(jnp.asarray(x, jnp.float32)[None, None, None], jnp.asarray([[[p]]])))[0, 0, 0]
    for head in range(2):
        wanted = np.mean([turned(plain[head].mean(0), 11 + i) for i in range(horizon)], axis=0)
        np.testing.assert_allclose(found[head], wanted, atol=1e-4)


def redundancy(k, threshold):
    """One head's, in plain loops: softmax of column means, without what the newest resembling key owes."""
    unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, 0.0)
    for i in range(len(k)):
        if alike := [j for j in range(len(k)) if j != i and cosine[i, j] > threshold]:
            cosine[i, alike[-1]] = 0.0
    e = np.exp(cosine.mean(0) - cosine.mean(0).max())
    return e / e.sum()


def test_redundancy_beside_loops():
    q, k, v = tensors.qkv(2)
    found = scores(Redundancy(0.3), q, k, v, lengths=LENGTHS)
    for row, n in enumerate(LENGTHS):
        for head in range(K):
            own = np.asarray(k[row, head, T - n :], np.float64)
            np.testing.assert_allclose(found[row, head, T - n :], redundancy(own, 0.3), rtol=1e-4)


def test_of_equal_keys_the_newest_is_not_redundant():
    """Three equal keys among orthogonal ones: the oldest resembles two that count, the next one, the newest none."""
    k = jnp.eye(6)[jnp.array([0, 1, 0, 2, 0, 3])][None, None]
    found = scores(Redundancy(), k, k, k)[0, 0]
    assert found[0] > found[2] > found[4] == found[1] == found[3]
    assert read_tensors(methods.r_kv(5, importance=0.0, window=1), k, k, k)[0] == [[1, 2, 3, 4, 5]]


def probabilities(q, k, newest=0):
    """Softmax rows "B N T T" under a causal mask."""
    q, k = np.asarray(q, np.float64), np.repeat(np.asarray(k, np.float64), q.shape[1] // k.shape[1], axis=1)
    x = np.einsum("bnth,bnsh->bnts", q, k) / np.sqrt(q.shape[-1])
    x = np.where(np.tril(np.ones(x.shape[-2:], bool), newest), x, -np.inf)
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_last_rows_are_those_of_now():
    """While decoding, each row replaces the oldest; a row from before a token gave it nothing."""
    q, k, v = tensors.qkv(3, T=12)
    policy = kvjax.Evict(LastRows(3), 12, when=Schedule(over=1))
    kv = tensors.replay(policy, [{"q": q, "k": k, "v": v}], 8).kv
    (memory,) = (np.asarray(x) for x in jax.tree.leaves(kv.memory) if x.ndim == 4)
    order = np.argsort(np.asarray(kv.pos), axis=-1)[..., -12:]
    found = np.take_along_axis(memory, order[..., None], axis=2).sum(-1)
    wanted = probabilities(q, k).reshape(B, K, N // K, 12, 12).mean(2)[:, :, -3:].sum(2)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_leverage_is_that_of_a_regression_on_keys_before_rotation():
    q, k, v = tensors.qkv(4)
    found = scores(Leverage(None, 1e-6), q, k, v)
    x = np.asarray(k, np.float64) - np.asarray(k, np.float64).mean(2, keepdims=True)
    wanted = np.einsum("bkth,bkhj,bktj->bkt", x, np.linalg.inv(np.einsum("bkth,bktj->bkhj", x, x)), x)
    np.testing.assert_allclose(found, wanted, rtol=1e-3)
    np.testing.assert_allclose(found.sum(-1), H, rtol=1e-4)  # the rank of the keys
    for rope in (models.Rope(), models.Rope("dynamic", factor=3.0, original_max=T // 2)):
        np.testing.assert_allclose(scores(Leverage(None, 1e-6), q, k, v, rotate=rope), found, rtol=1e-3)


def test_a_sketch_estimates_leverage():
    """Drawn anew for every head; one as wide as the keys draws nothing."""
    arrays = tensors.qkv(5, T=200)
    exact, wide, sketch = (scores(Leverage(m), *arrays) for m in (None, H, H - 1))
    np.testing.assert_array_equal(exact, wide)
    assert (np.abs(exact - sketch) > 1e-3).any()
    each = zip(exact.reshape(-1, 200), sketch.reshape(-1, 200), strict=True)
    assert min(np.corrcoef(one, other)[0, 1] for one, other in each) > 0.7
    swapped = scores(Leverage(H - 1), *(x[:, ::-1] for x in arrays))
    assert np.abs(swapped[:, ::-1] - sketch).max() > 1e-3


@pytest.mark.parametrize(("size", "first", "last"), [(5, 3, 2), (100, 0, 0)])
def test_chunk_attention_beside_loops(size, first, last):
    q, k, v = tensors.qkv(6)
    found = scores(Given(ChunkAttention(size, first, last)), q, k, v, lengths=LENGTHS)
    for row, n in enumerate(LENGTHS):
        for head in range(K):
            expected = np.zeros(n)
            for g in range(head * N // K, (head + 1) * N // K):
                for start in range(first, n - last, size):
                    stop = min(start + size, n - last)
                    cut = slice(T - n + start, T - n + stop)
                    x = np.asarray(q[row, g, cut], np.float64) @ np.asarray(k[row, head, cut], np.float64).T
                    e = np.exp(x - x.max(-1, keepdims=True))
                    expected[start:stop] += (e / e.sum(-1, keepdims=True)).sum(0) / (N // K)
            np.testing.assert_allclose(found[row, head, T - n :], expected, rtol=1e-3, atol=1e-5)


def test_compactor_is_its_two_parts():
    """Each less its mean and over its deviation over both heads, between the protected ends."""
    q, k, v = tensors.qkv(7)
    of = functools.partial(scores, q=q, k=k, v=v, sinks=3, recent=2)
    middle = lambda score: of(score)[:, :, 3:-2]
    policy = methods.compactor(0.5, chunk=5, sketch=None, sinks=3, recent=2)
    leverage, votes = middle(Leverage(None)), middle(Given(ChunkAttention(5, 3, 2)))
    votes = votes * np.linalg.norm(np.asarray(v)[:, :, 3:-2], axis=-1)
    padded = np.pad(votes, ((0, 0), (0, 0), (1, 1)))
    pooled = (padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]) / 3
    z = lambda x: (x - x.mean((1, 2), keepdims=True)) / x.std((1, 2), ddof=1, keepdims=True)
    np.testing.assert_allclose(middle(policy.score), 0.5 * z(leverage) + z(pooled), rtol=2e-3, atol=2e-3)


def test_blends_of_scores():
    arrays, place = tensors.qkv(8), np.broadcast_to(np.arange(T), (B, K, T))
    both = Blend((Recency(), Recency()), (2.0, -0.5))
    np.testing.assert_allclose(scores(both, *arrays), 1.5 * place, rtol=1e-6)
    of_layer = scores(Standardized(Recency()), *arrays)
    np.testing.assert_allclose(of_layer.std((1, 2), ddof=1), 1.0, rtol=1e-5)
    largest = np.abs(np.asarray(arrays[2])).sum(-1).max(-1, keepdims=True)
    np.testing.assert_allclose(scores(ValueWeighted(Recency(), "largest"), *arrays), place * largest, rtol=1e-5)
    with pytest.raises(ValueError, match="1 scores have 2 weights; give every score a weight"):
        Blend((Recency(),), (1.0, 2.0))


@pytest.mark.parametrize("kernel", [5, 65, 91, 181])
def test_pooling_is_that_of_windows(kernel):
    """Of zeros beyond the edges, also where the kernel is wider than the text."""
    x = np.random.default_rng(0).random(90)
    pos, half, padded = jnp.arange(90, dtype=jnp.int32)[None, None], kernel // 2, np.pad(x, 95)
    windows = [padded[95 + i - min(half, 95) : 95 + i + min(half, 95) + 1] for i in range(90)]
    for kind, wanted in (("max", [w.max() for w in windows]), ("avg", [w.sum() / kernel for w in windows])):
        found = pool_in_order(jnp.asarray(x, jnp.float32)[None, None], pos, pos >= 0, kind, kernel)
        np.testing.assert_allclose(found[0, 0], wanted, rtol=1e-5)


def test_numbers_of_one_position_are_summed():
    pos = np.random.default_rng(0).integers(-1, 5, (3, 12)).astype(np.int32)
    pos[2] = 4  # one position alone
    x = np.random.default_rng(1).random((3, 12), np.float32)
    same = (pos[:, :, None] == pos[:, None]) & (pos >= 0)[:, :, None]
    found = sum_by_position(jnp.asarray(x), jnp.asarray(pos))
    np.testing.assert_allclose(found, (same * x[:, None]).sum(-1), rtol=1e-6)


def test_removal_error_is_what_one_token_costs():
    """Of a row that gives the tokens p: the distance of its output without token j to that with all."""
    q, k, v = tensors.qkv(9, B=1, N=2, K=2)
    out_proj = jax.random.normal(jax.random.key(1), (2, H, 16))
    attention = jax.random.uniform(jax.random.key(2), (1, 2, T))
    given = kvjax.from_fn(lambda kv, stats, ctx: attention, 12).score
    logs = kvjax.from_fn(lambda kv, stats, ctx: jnp.log(attention), 12).score
    found = scores(RemovalError(given), q, k, v, out_proj=out_proj)
    for head in range(2):
        p = np.asarray(attention[0, head], np.float64)
        p, values = p / p.sum(), np.asarray(v[0, head], np.float64) @ np.asarray(out_proj[head], np.float64)
        for j in range(T):
            rest = np.delete(p, j) / (1 - p[j])
            cost = np.linalg.norm(p @ values - rest @ np.delete(values, j, axis=0))
            np.testing.assert_allclose(found[0, head, j], cost, rtol=1e-3)
    np.testing.assert_allclose(scores(RemovalError(logs, "logarithm"), q, k, v, out_proj=out_proj), found, rtol=1e-4)


# ------------------------------------------------------------------------------------------------ the last rows


def test_means_and_variances_of_rows():
    q, k, v = tensors.qkv(1)
    votes = probabilities(q, k)[:, :, -R:, :-R].reshape(B, K, N // K, R, -1)
    expected = (votes.mean(3) + 200 * votes.var(3, ddof=1)).mean(2)
    np.testing.assert_allclose(scores(Unsteady(R, 200.0), q, k, v, recent=R)[..., :-R], expected, rtol=2e-4)


def test_two_rows_by_hand():
    """Votes of 0.1 and 0.3 for the first token: mean 0.2, variance 0.02."""
    p = [[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.1, 0.5, 0.4, 0], [0.3, 0.1, 0.1, 0.5]]
    kept, score = read(kvjax.Evict(Unsteady(2, 10.0), 3, recent=2), p)
    np.testing.assert_allclose(score[0, :2], [0.2 + 0.2, 0.3 + 10 * 0.08], rtol=1e-5)
    assert kept == [[1, 2, 3]]


def averaged(row, width):
    half = width // 2
    padded = np.concatenate([np.zeros(half), row, np.zeros(half)])
    return np.array([padded[i : i + width].sum() / width for i in range(len(row))])


def defensive(q, k, v, out_proj, budget, mass, width):
    """Scores of all tokens before the window, "K n", and how many each head puts first, in plain loops."""
    n = q.shape[2] - R
    p = probabilities(q, k)[0]
    score, first, norms, mean = np.zeros((K, n)), np.zeros((K, n), bool), np.zeros((K, n)), np.zeros((K, n))
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
def test_defensive_scores_beside_loops(mass):
    q, k, v = tensors.qkv(5, B=1)
    out_proj = jax.random.normal(jax.random.key(3), (N, H, 16))
    score, first = defensive(q, k, v, out_proj, 12, mass, 3)
    kept, found = read_tensors(methods.defensivekv(12, window=R, kernel=3, mass=mass), q, k, v, out_proj=out_proj)
    found = found[:, :-R]
    np.testing.assert_allclose(found[~first], score[~first], rtol=1e-4)
    assert found[first].min() > score.max()
    best = np.argsort(-np.where(first, 2.0, score).ravel(), kind="stable")[: 2 * (12 - R)]  # of all heads together
    wanted = [[*sorted(best[best // (T - R) == h] % (T - R)), *range(T - R, T)] for h in range(K)]
    assert kept == wanted


def test_no_head_puts_more_first_than_the_budget_holds():
    q, k, v = tensors.qkv(6)
    policy = kvjax.Evict(Defensive(R + 3, R, 3, 1.0), R + 3, recent=R)
    layers, _ = tensors.evicted(policy, [{"q": q, "k": k, "v": v, "out_proj": jnp.ones((N, H, 8))}])
    votes = probabilities(q, k)[:, :, -R:, :-R].reshape(B, K, 2 * R, -1).mean(2)
    best = np.argsort(-votes, axis=-1)[..., :3]
    for row, heads in enumerate(tensors.live_positions(layers[0])):
        for head, kept in enumerate(heads):
            assert set(best[row, head]) == set(kept[:3])


def test_pooled_scores_of_numbers_beside_padding_that_is_none():
    """Padding that is no number changes nothing, where means over the prompt are taken."""
    arrays = tensors.qkv(0, B=1, T=T)
    for policy in (methods.expected_attention(8, horizon=8), methods.capkv(8, horizon=8)):
        alone = kvjax.evict_layer(policy, *(x[:, :, 5:] for x in arrays)).live
        padded = kvjax.evict_layer(policy, *(x.at[:, :, :5].set(jnp.nan) for x in arrays), lengths=[T - 5]).live
        np.testing.assert_array_equal(padded[:, :, 5:], alone)
