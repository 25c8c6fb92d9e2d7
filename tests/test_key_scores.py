"""Scores of keys and values, and of what chunks give them, beside loops in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods, models
from kvjax.drivers.attention import without_cache
from kvjax.learning.probes import fit_filters, fit_queries
from kvjax.scoring.blends import Blend, RemovalError, Standardized, ValueWeighted
from kvjax.scoring.key_scores import Capacity, ChunkVotes, Filters, Leverage, Redundancy, SquaredNorms
from kvjax.scoring.measurements import ChunkAttention, FutureQueries
from kvjax.scoring.scores import OfScore, Recency, RecentRows
from kvjax.scoring.stats import OutsideWindow
from tests import helpers

B, K, N, T, H = 2, 2, 4, 24, 8


def scores(score, q, k, v, protect=kvjax.Protect(), **how):
    """Of a prompt's tokens "B K T"."""
    return np.asarray(kvjax.evict_layer(kvjax.Evict(score, 12, protect=protect), q, k, v, **how).score)


def test_squared_norms_by_hand():
    """Partitions of two tokens: squared norms 1 and 3 are shares of 1/4 and 3/4; one of a single token is 1.

    All are divided by their sum over the tokens. Without partitions, squared norms are added as they are.
    """
    k = jnp.sqrt(jnp.asarray([1.0, 3.0, 2.0, 2.0, 5.0]))[None, None, :, None]
    v = jnp.sqrt(jnp.asarray([1.0, 1.0, 0.0, 4.0, 9.0]))[None, None, :, None]
    policy = lambda of: kvjax.Evict(SquaredNorms(of, 2), 3)
    found = lambda of: np.asarray(kvjax.evict_layer(policy(of), k, k, v).score[0, 0])
    np.testing.assert_allclose(found("key"), np.array([0.25, 0.75, 0.5, 0.5, 1.0]) / 3, rtol=1e-6)
    np.testing.assert_allclose(found("value"), np.array([0.5, 0.5, 0.0, 1.0, 1.0]) / 3, rtol=1e-6)
    np.testing.assert_allclose(found("product"), np.array([0.125, 0.375, 0.0, 0.5, 1.0]) / 2, rtol=1e-6)
    np.testing.assert_allclose(found("mean"), np.array([0.375, 0.625, 0.25, 0.75, 1.0]) / 3, rtol=1e-6)
    whole = kvjax.evict_layer(kvjax.Evict(SquaredNorms("mean", None), 3), k, k, v).score[0, 0]
    np.testing.assert_allclose(whole, np.array([2, 4, 2, 6, 14]) / 28, rtol=1e-6)
    assert helpers.kept(kvjax.evict_layer(methods.curdkv(3, partition=2, sinks=1), k, k, v)) == [0, 3, 4]


@pytest.mark.parametrize("make", [methods.expected_attention, methods.capkv])
def test_padding_that_is_no_number_changes_nothing(make):
    """Of all methods: `test_a_padded_row_gets_what_it_gets_alone`."""
    policy, qkv = make(8, horizon=8), helpers.qkv(0, B=1, T=T)
    alone = kvjax.evict_layer(policy, *(x[:, :, 5:] for x in qkv))
    padded = kvjax.evict_layer(policy, *(x.at[:, :, :5].set(jnp.nan) for x in qkv), lengths=[T - 5])
    assert [i - 5 for i in helpers.kept(padded)] == helpers.kept(alone)
    np.testing.assert_allclose(padded.score[..., 5:], alone.score, rtol=1e-4)


def test_filters_look_along_one_direction_a_head():
    q, k, v = helpers.qkv(0)
    filters = np.random.default_rng(0).standard_normal((3, K, H)).astype(np.float32)
    found = scores(Filters(filters), q, k, v, layer=1, num_layers=3)
    np.testing.assert_allclose(found, -np.einsum("kh,bkth->bkt", filters[1], np.asarray(k)), rtol=1e-4, atol=1e-5)


def test_filters_of_another_model_are_refused():
    q, k, v = helpers.qkv(0)
    with pytest.raises(ValueError, match=r"filters have the shape \(2, 2, 8\), but this model has \(3, 2, 8\)"):
        kvjax.evict_layer(methods.q_filters(12, np.ones((2, K, H), np.float32)), q, k, v, num_layers=3)
    with pytest.raises(ValueError, match="filters must be an array of floats"):
        methods.q_filters(12, np.ones((K, H), np.float32))
    with pytest.raises(ValueError, match="filters has 32 of 32 numbers that are not finite"):
        methods.q_filters(12, np.full((2, K, H), np.inf))


def test_fitted_filters_point_away_from_where_queries_spread(tiny):
    model, params = tiny
    tokens, lengths, config = helpers.token_ids(2, T), [T, 17], model.config
    filters = fit_filters(model, params, tokens, lengths=lengths)["filters"]
    assert filters.shape == (config.num_layers, config.num_kv_heads, config.head_dim)
    pos, layers = queries_of(model, params, tokens, lengths)
    for layer, (_, q) in enumerate(layers):
        for head in range(config.num_kv_heads):
            group = config.num_query_heads // config.num_kv_heads
            directions = []
            for g in range(head * group, (head + 1) * group):
                rows = q[:, g][pos >= 0]
                u = np.linalg.svd(rows)[2][0]
                directions.append(-u if (rows @ u).sum() > 0 else u)
            np.testing.assert_allclose(filters[layer, head], np.mean(directions, 0), atol=1e-4)


def queries_of(model, params, tokens, lengths):
    """Positions of padded prompts, and for every layer the queries before and after rotation."""
    pos, seen = jnp.maximum(jnp.arange(T)[None] - (T - jnp.asarray(lengths))[:, None], -1), []
    attend = without_cache(pos)

    def keep(cache, q, k, v, *, layer, rotate, **rest):
        del rest
        seen.append([np.asarray(x, np.float64) for x in (q, rotate(q, pos[:, None]))])
        return attend(cache, q, k, v, layer=layer, rotate=rotate)

    model(params, jnp.where(pos >= 0, tokens, 0), (None,) * model.config.num_layers, attend=keep, last_only=True)
    return np.asarray(pos), seen


def test_fitted_moments_are_those_of_queries_before_rotation(tiny):
    model, params = tiny
    tokens, lengths = helpers.token_ids(2, T), [T, 17]
    found = fit_queries(model, params, tokens, lengths=lengths, sinks=3)
    pos, layers = queries_of(model, params, tokens, lengths)
    for layer, (q, _) in enumerate(layers):
        for head in range(model.config.num_query_heads):
            rows = q[:, head][pos >= 3]
            np.testing.assert_allclose(found["mean"][layer, head], rows.mean(0), atol=1e-4)
            np.testing.assert_allclose(found["covariance"][layer, head], np.cov(rows.T, bias=True), atol=1e-4)
    with pytest.raises(ValueError, match="texts of up to 17 tokens have none behind the first 17; give longer ones"):
        fit_queries(model, params, tokens[:, -17:], sinks=17)


@pytest.mark.parametrize(
    ("known", "message"),
    [
        (np.ones(3), "known queries are ndarray; give a mapping of 'mean' and 'covariance'"),
        ({"mean": np.ones((1, N, H))}, r"known queries are \['mean'\]; give a mapping"),
        ({"mean": np.ones((1, N, H)), "covariance": np.ones((1, N, H))}, "covariance must be an array of floats"),
        (
            {"mean": np.full((1, N, H), np.nan), "covariance": np.ones((1, N, H, H))},
            "mean has 32 of 32 numbers that are not finite; find them anew",
        ),
        (
            {"mean": np.ones((2, N, H)), "covariance": np.ones((2, N, H, H))},
            r"known queries are of \(2, 4, 8\) .*, but this model has \(1, 4, 8\); find them for this model",
        ),
    ],
)
def test_moments_of_other_queries_are_refused(known, message):
    with pytest.raises(ValueError, match=message):
        kvjax.evict_layer(methods.expected_attention(12, queries=known), *helpers.qkv(0))


def test_capacity_by_hand():
    """Queries look along all keys alike: weights of 1. Squares of values beside the identity's 1 add up to 16."""
    k, v = jnp.ones((1, 1, 4, 1)), jnp.asarray([2.0, 1.0, 3.0, -1.0])[None, None, :, None]
    how = {"rotate": lambda x, pos: x}
    policy = methods.capkv(3, sinks=0, eps=0.0)
    np.testing.assert_allclose(
        kvjax.evict_layer(policy, k, k, v, **how).score[0, 0], np.array([4, 1, 9, 1]) / 16, rtol=1e-6
    )
    assert helpers.kept(kvjax.evict_layer(policy, k, k, v, **how)) == [0, 2, 3]
    assert helpers.kept(kvjax.evict_layer(methods.capkv(3, sinks=2), k, k, v, **how)) == [0, 1, 2]


def test_capacity_of_large_values_is_that_of_directions():
    """Values along two directions: however large, no identity is lost, and no score is none."""
    q, k, _ = helpers.qkv(11)
    along = np.random.default_rng(0).standard_normal((2, H))
    v = jnp.asarray(np.random.default_rng(1).standard_normal((B, K, T, 2)) @ along, jnp.float32)
    found = [scores(Capacity(), q, k, v * size, rotate=lambda x, pos: x) for size in (1e2, 1e4)]
    np.testing.assert_allclose(found[1], found[0], rtol=2e-2, atol=1e-4)


def test_capacity_beside_loops():
    """Of a padded row too, among the tokens behind the sinks."""
    q, k, v = helpers.qkv(10)
    lengths, sinks = [T, 17], 2
    score = Capacity(FutureQueries(3, sinks), tau=2.0, eps=1e-3)
    how = {"rotate": lambda x, pos: x, "lengths": lengths}
    found = scores(score, q, k, v, kvjax.Protect(sinks), **how)
    for row, n in enumerate(lengths):
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


def redundancy(k, threshold):
    """One head's, in plain loops: softmax of column means, without what the newest resembling key owes."""
    n = len(k)
    unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, 0.0)
    for i in range(n):
        alike = [j for j in range(n) if j != i and cosine[i, j] > threshold]
        if alike:
            cosine[i, alike[-1]] = 0.0
    e = np.exp(cosine.mean(0) - cosine.mean(0).max())
    return e / e.sum()


@pytest.mark.parametrize("lengths", [[T, T], [T, 17]])
def test_redundancy_beside_loops(lengths):
    q, k, v = helpers.qkv(2)
    found = scores(Redundancy(0.3), q, k, v, lengths=lengths)
    for row, n in enumerate(lengths):
        for head in range(K):
            own = np.asarray(k[row, head, T - n :], np.float64)
            np.testing.assert_allclose(found[row, head, T - n :], redundancy(own, 0.3), rtol=1e-4)


def test_of_equal_keys_the_newest_is_not_redundant():
    """Three equal keys among orthogonal ones: the oldest resembles two that count, the next one, the newest none."""
    k = jnp.eye(6)[jnp.array([0, 1, 0, 2, 0, 3])][None, None]
    found = scores(Redundancy(), k, k, k)[0, 0]
    assert found[0] > found[2] > found[4] == found[1] == found[3]
    policy = methods.r_kv(5, importance=0.0, window_size=1)
    assert helpers.kept(kvjax.evict_layer(policy, k, k, k)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("softmax", "newest"), [(None, 0), (OutsideWindow(3), -3)])
def test_recent_rows_are_those_of_now(softmax, newest):
    """While decoding, each row replaces the oldest; a row from before a token gave it nothing."""
    q, k, v = helpers.qkv(3, T=12)
    policy = kvjax.Evict(RecentRows(3, softmax=softmax), 12, when=kvjax.when_over(1))
    moments = helpers.replay(policy, q, k, v, 8)
    logits = jnp.einsum("bnth,bnsh->bnts", q, jnp.repeat(k, N // K, 1)) / H**0.5
    p = jax.nn.softmax(logits, -1, where=jnp.tril(jnp.ones((12, 12), bool), newest))
    expected = np.asarray(p).reshape(B, K, N // K, 12, 12).mean(2)[:, :, -3:]
    memory = np.asarray(moments.kv.memory[0].score)
    order = np.argsort(np.asarray(moments.kv.pos), axis=-1)[..., -12:]
    found = np.take_along_axis(memory, order[..., None], axis=2)
    np.testing.assert_allclose(found.sum(-1), expected.sum(2), rtol=1e-4, atol=1e-6)


def test_leverage_is_that_of_a_regression():
    q, k, v = helpers.qkv(4)
    found = scores(Leverage(None, 1e-6), q, k, v, rotate=lambda x, pos: x)
    x = np.asarray(k, np.float64) - np.asarray(k, np.float64).mean(2, keepdims=True)
    expected = np.einsum("bkth,bkhj,bktj->bkt", x, np.linalg.inv(np.einsum("bkth,bktj->bkhj", x, x)), x)
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    np.testing.assert_allclose(found.sum(-1), H, rtol=1e-4)  # the rank of the keys


def test_leverage_sees_keys_before_rotation():
    q, k, v = helpers.qkv(4)
    turn = lambda x, pos: jnp.concatenate(
        [
            x[..., :1] * jnp.cos(pos[..., None]) - x[..., 1:2] * jnp.sin(pos[..., None]),
            x[..., :1] * jnp.sin(pos[..., None]) + x[..., 1:2] * jnp.cos(pos[..., None]),
            x[..., 2:],
        ],
        -1,
    )
    apart = scores(Leverage(None), q, k, v, rotate=lambda x, pos: x)
    np.testing.assert_allclose(scores(Leverage(None), q, k, v, rotate=turn), apart, rtol=1e-4)
    by_length = models.Rope("dynamic", factor=3.0, original_max=T // 2)
    np.testing.assert_allclose(scores(Leverage(None), q, k, v, rotate=by_length), apart, rtol=1e-4)


def test_a_sketch_estimates_leverage():
    """Drawn anew for every head; one as wide as the keys draws nothing."""
    q, k, v = helpers.qkv(5, T=200)
    identity = lambda x, pos: x
    exact, wide, sketch = (scores(Leverage(m), q, k, v, rotate=identity) for m in (None, H, H - 1))
    np.testing.assert_array_equal(exact, wide)
    assert (np.abs(exact - sketch) > 1e-3).any()
    for row in range(B):
        for head in range(K):
            assert np.corrcoef(exact[row, head], sketch[row, head])[0, 1] > 0.7
    swapped = scores(Leverage(H - 1), q[:, ::-1], k[:, ::-1], v[:, ::-1], rotate=identity)
    assert np.abs(swapped[:, ::-1] - sketch).max() > 1e-3


@pytest.mark.parametrize(
    ("size", "first", "last", "scaled", "filled"),
    [(5, 3, 2, False, False), (100, 0, 0, True, False), (5, 3, 2, False, True)],
)
def test_chunk_attention_beside_loops(size, first, last, scaled, filled):
    q, k, v = helpers.qkv(6)
    lengths = [T, 17]
    of = ChunkAttention(size, first, last, scaled, filled)
    found = scores(ChunkVotes(of), q, k, v, lengths=lengths)
    for row, n in enumerate(lengths):
        for head in range(K):
            expected = np.zeros(n)
            for g in range(head * N // K, (head + 1) * N // K):
                for start in range(first, n - last, size):
                    cut = slice(T - n + start, T - n + min(start + size, n - last))
                    x = np.asarray(q[row, g, cut], np.float64) @ np.asarray(k[row, head, cut], np.float64).T
                    x = x * H**-0.5 if scaled else x
                    here = len(x)
                    if filled:  # keys and rows of zeros
                        x = np.pad(x, (0, size - here))
                    e = np.exp(x - x.max(-1, keepdims=True))
                    p = e / e.sum(-1, keepdims=True)
                    expected[cut.start - T + n : cut.stop - T + n] += p.sum(0)[:here] / (N // K)
            np.testing.assert_allclose(found[row, head, T - n :], expected, rtol=1e-3, atol=1e-5)


def test_compactor_is_its_two_parts():
    """Each less its mean and over its deviation over both heads, between the protected ends."""
    q, k, v = helpers.qkv(7)
    identity = lambda x, pos: x
    policy = methods.compactor(0.5, chunk_size=5, sketch=None, sinks=3, recent=2)
    found = np.asarray(kvjax.evict_layer(policy, q, k, v, rotate=identity).score)[:, :, 3:-2]
    protect = kvjax.Protect(3, 2)
    leverage = scores(Leverage(None), q, k, v, protect, rotate=identity)[:, :, 3:-2]
    votes = scores(ChunkVotes(ChunkAttention(5, 3, 2)), q, k, v)[:, :, 3:-2]
    votes = votes * np.linalg.norm(np.asarray(v)[:, :, 3:-2], axis=-1)
    padded = np.pad(votes, ((0, 0), (0, 0), (1, 1)))
    pooled = (padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]) / 3
    z = lambda x: (x - x.mean((1, 2), keepdims=True)) / x.std((1, 2), ddof=1, keepdims=True)
    np.testing.assert_allclose(found, 0.5 * z(leverage) + z(pooled), rtol=2e-3, atol=2e-3)


def test_blends_of_two_scores():
    q, k, v = helpers.qkv(8)
    both = Blend((Recency(), Recency()), (2.0, -0.5))
    np.testing.assert_allclose(scores(both, q, k, v), 1.5 * np.broadcast_to(np.arange(T), (B, K, T)), rtol=1e-6)
    by_head = scores(Standardized(Recency(), "head"), q, k, v)
    np.testing.assert_allclose(by_head.std(-1, ddof=1), 1.0, rtol=1e-5)
    largest = np.abs(np.asarray(v)).sum(-1).max(-1, keepdims=True)
    np.testing.assert_allclose(
        scores(ValueWeighted(Recency(), "largest_l1"), q, k, v), np.arange(T) * largest, rtol=1e-5
    )
    with pytest.raises(ValueError, match="1 scores and 2 weights"):
        Blend((Recency(),), (1.0, 2.0))


def test_removal_error_is_what_one_token_costs():
    """Of a row that gives the tokens p: the distance of its output without token j to that with all."""
    q, k, v = helpers.qkv(9, B=1, N=2, K=2)
    out_proj = jax.random.normal(jax.random.key(1), (2, H, 16))
    attention = jax.random.uniform(jax.random.key(2), (1, 2, T))
    given = kvjax.from_fn(lambda kv, stats, ctx: attention, budget=12).score
    logs = kvjax.from_fn(lambda kv, stats, ctx: jnp.log(attention), budget=12).score
    found = scores(RemovalError(given), q, k, v, out_proj=out_proj)
    for head in range(2):
        p = np.asarray(attention[0, head], np.float64)
        p, values = p / p.sum(), np.asarray(v[0, head], np.float64) @ np.asarray(out_proj[head], np.float64)
        for j in range(T):
            rest = np.delete(p, j) / (1 - p[j])
            cost = np.linalg.norm(p @ values - rest @ np.delete(values, j, axis=0))
            np.testing.assert_allclose(found[0, head, j], cost, rtol=1e-3)
    again = scores(RemovalError(logs, "logarithm"), q, k, v, out_proj=out_proj)
    np.testing.assert_allclose(again, found, rtol=1e-4)


def test_scores_of_ones_own_see_all_heads():
    """Devices split heads only where a score says that it looks at each alone; one that says nothing may not."""

    @dataclasses.dataclass(frozen=True)
    class Own(OfScore):
        def __call__(self, slots):
            return self.score(slots)

    assert Blend((Recency(), RecentRows()), (1.0, 1.0)).apart
    assert not Own(Recency()).apart
    assert not Blend((Recency(), Own(Recency())), (1.0, 1.0)).apart
