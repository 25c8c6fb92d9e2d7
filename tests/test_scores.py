"""What scores are made of, and at their limits; what they choose is recorded from other code (`golden/peers.csv`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.budgets import STEP, Schedule
from kvjax.contract import FrozenArrays
from kvjax.observe import CentredQueries, FutureQueries
from kvjax.scores.attention import Faded, LastRows, Recency, Recurrence
from kvjax.scores.blends import (
    Blend,
    Standardized,
    ValueWeighted,
    layer_most,
    pool_in_order,
    sum_by_position,
)
from kvjax.scores.keys import Capacity, Centred, Leverage, Redundancy
from kvjax.scores.rows import Defensive, OutputChange, Unsteady
from tests import tensors
from tests.by_hand import read, read_tensors
from tests.float64 import turned

pytestmark = pytest.mark.usefixtures("as_users_run_it")

B, K, N, T, H, R = 2, 2, 4, 24, 8, 4


def scores(score, q, k, v, *, lengths=None, rotate=tensors.unturned, sinks=0, recent=0, **more):
    """Of a prompt's tokens "B K T"."""
    policy = kvjax.Evict(score, 12, sinks, recent)
    return tensors.evicted(policy, [{"q": q, "k": k, "v": v, **more}], lengths=lengths, rotate=rotate)[1][0]


@pytest.mark.slow
def test_filters_of_another_model():
    filters = np.zeros((1, K, H), np.float32)
    with pytest.raises(ValueError, match=r"filters have the shape \(1, 2, 8\), but the model has \(3, 2, 8\)"):
        kvjax.evict_layer(methods.q_filters(12, filters), *tensors.qkv(0), num_layers=3)


@pytest.mark.slow
def test_capacity_of_large_values_is_that_of_directions():
    """Values along two directions: however large, no identity is lost, and no score is none."""
    q, k, _ = tensors.qkv(11)
    along = np.random.default_rng(0).standard_normal((2, H))
    v = jnp.asarray(np.random.default_rng(1).standard_normal((B, K, T, 2)) @ along, jnp.float32)
    found = [scores(Capacity(FutureQueries(4)), q, k, v * size) for size in (1e2, 1e4)]
    np.testing.assert_allclose(found[1], found[0], rtol=2e-2, atol=1e-4)


def test_centres_of_queries_say_what_keys_will_get():
    """In float64, by pairs of channels as complex numbers, at the 3 positions that are 1, 2 and 4 after the next."""
    q, k, v = tensors.qkv(3, T=12, H=6)
    draw = np.random.default_rng(2)
    mean, length = draw.standard_normal((1, N, 6)), np.tile(2 + draw.random((1, N, 3)), 2)
    queries = CentredQueries(FrozenArrays({"mean": mean.astype(np.float32), "length": length.astype(np.float32)}), 4)
    found = scores(Centred(queries), q, k, v, rotate=lambda x, pos: turned(x, pos.astype(x.dtype), jnp))
    pairs = lambda x: np.asarray(x, np.float64)[..., :3] + 1j * np.asarray(x, np.float64)[..., 3:]
    centre, key = pairs(mean)[0, None, :, None], np.repeat(pairs(k), N // K, axis=1)
    gap = 12 - np.arange(12) + np.array([1, 2, 4])[:, None]
    turn = np.exp(1j * gap[..., None] * np.array([1.0, 0.4, 0.1])).mean(0)
    wanted = (centre * key.conj() * turn).real.sum(-1)
    wanted += ((length[0, :, None, :3] - np.abs(centre[0])) * np.abs(key)).sum(-1)
    wanted = (wanted - wanted.mean(-1, keepdims=True)) / wanted.std(-1, keepdims=True)
    np.testing.assert_allclose(found, wanted.reshape(B, K, N // K, 12).max(2), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("decay", "damping"), [(0.7, 1.0), (1.0, 0.4), (0.7, 0.4)])
def test_sums_decay_and_rows_after_the_first_eviction_are_damped(decay, damping):
    """Token by token: the score and the tokens of each head are those of a plain loop."""
    q, k, v = tensors.qkv(3, B=1, T=12)
    policy = kvjax.Evict(Faded(decay=decay, damping=damping), 8, when=STEP)
    kv = tensors.replay(policy, [{"q": q, "k": k, "v": v}], 8, block=1).kv
    x = np.einsum("ngth,nsh->ngts", np.asarray(q, np.float64).reshape(K, N // K, 12, -1), np.asarray(k[0], np.float64))
    weights = np.exp(x / np.sqrt(q.shape[-1]))
    for head in range(K):
        held: dict[int, float] = {}
        for t in range(12):
            factor, held = (damping if len(held) < t else 1.0), {**held, t: 0.0}
            rows = weights[head, :, t, list(held)].T
            rows = (rows / rows.sum(-1, keepdims=True)).mean(0)
            held = {p: decay * old + factor * new for (p, old), new in zip(held.items(), rows, strict=True)}
            if len(held) > 8:
                held.pop(min(held, key=lambda p: (held[p], p)))
        pairs = zip(kv.pos[0, head].tolist(), kv.memory.score[0, head].tolist(), strict=True)
        assert {p: x for p, x in pairs if p >= 0} == pytest.approx(held, abs=1e-5)


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


@pytest.mark.slow
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


def test_tokens_go_whose_attention_is_overdue():
    """LazyEviction, of 200 tokens behind a padded batch: those of a plain loop in float64."""
    q, k, v = tensors.qkv(3, B=2, T=208)
    policy = kvjax.Evict(Recurrence(0.05), 16, 0, 2, when=Schedule(prefill=False, every=3))
    live = tensors.replay(policy, [{"q": q, "k": k, "v": v}], 8, lengths=[8, 5]).live
    half = lambda x: 2 * np.exp(-np.logaddexp(0, -x))
    for row, prompt in enumerate((8, 5)):
        rows, keys = (np.asarray(x[row, :, 8 - prompt :], np.float64) for x in (q, k))
        x = np.einsum("ngth,nsh->ngts", rows.reshape(K, N // K, *rows.shape[1:]), keys)
        weights = np.exp(x / np.sqrt(q.shape[-1]))
        for head in range(K):
            held = dict.fromkeys(range(prompt), (0, 0))  # the last step above the threshold, the longest interval
            for step in range(1, 201):
                t = prompt + step - 1
                held |= {t: (step - 1, 0)}
                shares = weights[head, :, t, list(held)].T
                shares = (shares / shares.sum(-1, keepdims=True)).mean(0)
                for (p, (last, longest)), share in zip([*held.items()], shares, strict=True):
                    held[p] = (step, max(longest, step - last)) if share > 0.05 else (last, longest)
                if step % 3 == 0 and len(held) > 16:
                    worth = {
                        p: half(-1 - (step - last) / (m + 1e-5)) + (m > 0) * half(1.0 - m)
                        for p, (last, m) in held.items()
                    }
                    stay = sorted((p for p in held if p < t - 1), key=lambda p: (worth[p], p))[-14:]
                    held = {p: held[p] for p in (*sorted(stay), t - 1, t)}
                assert live[step][row][head] == sorted(held)


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


def test_numbers_of_one_position_are_summed_and_compared():
    pos = np.random.default_rng(0).integers(-1, 5, (3, 12)).astype(np.int32)
    pos[2] = 4  # one position alone
    x = np.random.default_rng(1).random((3, 12), np.float32)
    same = (pos[:, :, None] == pos[:, None]) & (pos >= 0)[:, :, None]
    found = sum_by_position(jnp.asarray(x), jnp.asarray(pos))
    np.testing.assert_allclose(found, (same * x[:, None]).sum(-1), rtol=1e-6)
    most = sum_by_position(jnp.asarray(-x), jnp.asarray(pos), most=True)
    largest = np.where(same, -x[:, None], -np.inf).max(-1)
    np.testing.assert_array_equal(most, np.where(pos >= 0, largest, 0.0))


def test_heads_share_the_largest_score_of_a_token_wherever_they_hold_it():
    """By slot where heads hold the same tokens, by position where they do not."""
    pos, x = jnp.array([[[0, 1, 2], [0, 1, 2]]]), jnp.array([[[-1.0, -5.0, 2.0], [-3.0, -4.0, 7.0]]])
    assert layer_most(x, pos).tolist() == [[[-1.0, -4.0, 7.0]] * 2]
    turned = pos.at[0, 1].set(jnp.array([2, -1, 0]))
    assert layer_most(x, turned).tolist() == [[[7.0, -5.0, 2.0], [2.0, 0.0, 7.0]]]


# ------------------------------------------------------------------------------------------------ the last rows


def test_two_rows_by_hand():
    """Votes of 0.1 and 0.3 for the first token: mean 0.2, variance 0.02."""
    p = [[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.1, 0.5, 0.4, 0], [0.3, 0.1, 0.1, 0.5]]
    kept, score = read(kvjax.Evict(Unsteady(2, 10.0), 3, recent=2), p)
    np.testing.assert_allclose(score[0, :2], [0.2 + 0.2, 0.3 + 10 * 0.08], rtol=1e-5)
    assert kept == [[1, 2, 3]]


def test_what_stays_in_any_case_holds_its_attention():
    """The first token has 80 %, so that no other comes first; the most of a row then decides, not the mean."""
    p = np.tril(np.ones((24, 24))) / np.arange(1, 25)[:, None]
    p[22:], p[22:, 0], p[22:, [5, 7, 9]], p[23, 23] = 0, 0.8, [[0.1, 0.06, 0.04], [0, 0.06, 0.04]], 0.1
    for sinks in (0, 1):
        policy = kvjax.Evict(Defensive(5, 2, 1, 0.9), 4, sinks, recent=2)
        kept, _ = read(policy, p.tolist(), out_proj=jnp.ones((1, 24, 8)))
        assert kept == [[0, 5, 22, 23]]


def changes(q, k, v):
    """How far each row's output moves once each token alone is dropped "B K T T", a group's mean."""
    p, v = probabilities(q, k)[..., None, :], np.repeat(np.asarray(v, np.float64), N // K, 1)[:, :, None]
    left = p * (1 - np.eye(p.shape[-1]))  # of every row, for every token that goes
    total = left.sum(-1, keepdims=True)
    moved = np.square((left / np.where(total > 0, total, 1) - p) @ v).sum(-1)
    return moved.reshape(B, K, N // K, *moved.shape[2:]).mean(2)


def test_a_token_scores_by_how_far_outputs_move_without_it():
    """As dropping it shows, in float64; the first row reads one token, and answers nothing without it."""
    q, k, v = tensors.qkv(3, T=12)
    wanted = changes(q, k, v)
    np.testing.assert_allclose(wanted[:, :, 0, 0], np.square(np.asarray(v)[:, :, 0]).sum(-1), rtol=1e-5)
    for rows in (12, 3):
        found = scores(OutputChange(rows), q, k, v)
        np.testing.assert_allclose(found, wanted[:, :, -rows:].mean(2), rtol=1e-4, atol=1e-7)
    policy = kvjax.Evict(OutputChange(3, prompt_only=False), 12, when=Schedule(over=1))
    kv = tensors.replay(policy, [{"q": q, "k": k, "v": v}], 8).kv
    (memory,) = (np.asarray(x) for x in jax.tree.leaves(kv.memory) if x.ndim == 4)
    order = np.argsort(np.asarray(kv.pos), axis=-1)[..., -12:]
    found = np.take_along_axis(memory, order[..., None], axis=2).mean(-1)
    np.testing.assert_allclose(found, wanted[:, :, -3:].mean(2), rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_no_head_puts_more_first_than_the_budget_holds():
    q, k, v = tensors.qkv(6)
    policy = kvjax.Evict(Defensive(R + 3, R, 3, 1.0), R + 3, recent=R)
    layers, _ = tensors.evicted(policy, [{"q": q, "k": k, "v": v, "out_proj": jnp.ones((N, H, 8))}])
    votes = probabilities(q, k)[:, :, -R:, :-R].reshape(B, K, 2 * R, -1).mean(2)
    best = np.argsort(-votes, axis=-1)[..., :3]
    for row, heads in enumerate(tensors.live_positions(layers[0])):
        for head, kept in enumerate(heads):
            assert set(best[row, head]) == set(kept[:3])
