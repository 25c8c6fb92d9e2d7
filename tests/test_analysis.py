"""Exact eviction losses, their bounds, and the best in hindsight."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import analysis
from tests import helpers

# --- a plain formulation in float64, one row and one head at a time ---


def plain_layer_loss(q, k, v, keep, w, lengths=None, scale=None, window=None, softcap=None):
    """Every field of `LayerLoss` as a dict, with loops."""
    q, k, v, w = (np.asarray(x, np.float64) for x in (q, k, v, w))
    keep = np.asarray(keep)
    B, N, R, H = q.shape
    S = k.shape[2]
    scale = H**-0.5 if scale is None else scale
    heads = {1: np.zeros((B, R)), 2: np.zeros((B, R))}
    output, heads_bound, output_bound = ({1: np.zeros((B, R)), 2: np.zeros((B, R))} for _ in range(3))
    lost = np.zeros((B, N, R))
    for b in range(B):
        first = S - (S if lengths is None else lengths[b])
        for r in range(R):
            t = S - R + r
            if t < first:
                continue
            start = first if window is None else max(first, t - window + 1)
            moved = []
            for n in range(N):
                kv, own = n * k.shape[1] // N, n * keep.shape[1] // N
                x = k[b, kv, start : t + 1] @ q[b, n, r] * scale
                x = x if softcap is None else softcap * np.tanh(x / softcap)
                p = np.exp(x - x.max())
                p = p / p.sum()
                kept = p * keep[b, own, start : t + 1]
                lost[b, n, r] = (p - kept).sum()
                after = kept / kept.sum() if kept.sum() > 0 else kept
                moved.append((p - after) @ v[b, kv, start : t + 1])
            moved = np.stack(moved)
            projected = np.einsum("nh,nhd->d", moved, w)
            for order in (1, 2):
                heads[order][b, r] = np.linalg.norm(moved.reshape(-1), order)
                output[order][b, r] = np.linalg.norm(projected, order)
                largest = max(np.linalg.norm(x, order) for x in v[b, :, first:].reshape(-1, H))
                heads_bound[order][b, r] = 2 * largest * lost[b, :, r].sum()
                rows = [v[b, n * k.shape[1] // N, first:] @ w[n] for n in range(N)]
                largest = max(np.linalg.norm(x, order) for x in np.concatenate(rows))
                output_bound[order][b, r] = 2 * largest * lost[b, :, r].sum()
    return {
        "heads": heads, "output": output, "heads_bound": heads_bound, "output_bound": output_bound, "lost": lost
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"lengths": (9, 5)}, {"scale": 0.7, "softcap": 2.0}, {"window": 4, "per_query_head": True}],
    ids=lambda o: "-".join(o) or "plain",
)
@pytest.mark.parametrize("R", [1, 6])
def test_layer_loss_is_that_of_plain_loops(options, R):
    options = dict(options)
    B, N, K, S, H, D = 2, 4, 2, 9, 3, 5
    rng = np.random.default_rng(R)
    q, k, v = helpers.qkv(3, B=B, N=N, K=K, T=S, H=H)
    w = jnp.asarray(rng.standard_normal((N, H, D)), jnp.float32)
    keep = jnp.asarray(rng.random((B, N if options.pop("per_query_head", False) else K, S)) < 0.6)
    keep = keep.at[0, 0].set(False)  # a head that kept nothing
    lengths = options.pop("lengths", None)
    q = q[:, :, S - R :]
    padded = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    found = analysis.layer_loss(q, k, v, keep, out_proj=w, lengths=padded, **options)
    wanted = plain_layer_loss(q, k, v, keep, w, lengths, **options)
    np.testing.assert_allclose(found.lost, wanted["lost"], atol=2e-6)
    for name in ("heads", "output", "heads_bound", "output_bound"):
        np.testing.assert_allclose(getattr(found, name).l1, wanted[name][1], rtol=2e-5, atol=1e-5)
        np.testing.assert_allclose(getattr(found, name).l2, wanted[name][2], rtol=2e-5, atol=1e-5)
    bare = analysis.layer_loss(q, k, v, keep, lengths=padded, **options)
    assert bare.output is None
    np.testing.assert_array_equal(bare.heads.l1, found.heads.l1)


def test_layer_loss_of_many_masks_is_that_of_each():
    q, k, v = helpers.qkv(5, T=12)
    masks = jnp.asarray(np.random.default_rng(0).random((5, 2, 2, 12)) < 0.5)
    together = jax.jit(jax.vmap(lambda keep: analysis.layer_loss(q, k, v, keep)))(masks)
    for i, keep in enumerate(masks):
        alone = analysis.layer_loss(q, k, v, keep)
        np.testing.assert_allclose(together.heads.l1[i], alone.heads.l1, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(together.lost[i], alone.lost, rtol=1e-5, atol=1e-6)


def test_a_mask_that_fits_nothing_is_refused():
    q, k, v = helpers.qkv(0)
    with pytest.raises(ValueError, match="keep has 3 heads, but there are 2 kv heads and 4 query heads"):
        analysis.layer_loss(q, k, v, jnp.ones((2, 3, 24), bool))


ROW = jnp.full((1, 4, 6), 1 / 6), jnp.ones((1, 2, 6, 3)), jnp.ones((4, 3, 5))
MASS, LIVE, ONES = jnp.ones((1, 1, 2, 6)), jnp.ones((1, 1, 2, 6), bool), np.ones((1, 1, 2, 6))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: analysis.eviction_loss(*ROW, ONES[0].astype(int)), r"keep must be .* booleans .* got int64"),
        (lambda: analysis.eviction_bound(*ROW, ONES[0]), r"keep must be .* booleans .* got float64"),
        (lambda: analysis.least_bound(*ROW, np.ones((1, 2))), r"budgets must be .* integers .* got float64"),
        (lambda: analysis.layer_loss(*helpers.qkv(0), np.ones((2, 2, 24))), r"keep must be .* booleans .* got float64"),
        (
            lambda: analysis.layer_loss(*helpers.qkv(0), np.ones((2, 2, 24), bool), lengths=[25, 3]),
            "prompt lengths must lie between 1 and the prompt's width 24, got 3 to 25",
        ),
        (lambda: analysis.lost_mass(MASS, ONES), r"keep must be .* booleans .* got float64"),
        (lambda: analysis.hindsight_rank(MASS, ONES), r"live must be .* booleans .* got float64"),
        (lambda: analysis.best_in_hindsight(MASS, LIVE, ONES), r"keep must be .* booleans .* got float64"),
        (lambda: analysis.regret(MASS, LIVE[:, :, :1], LIVE), r"live has the shape \(1, 1, 1, 6\)"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_mask_is_booleans(call, message):
    """Numbers would be a mask to one operation and none to the next."""
    with pytest.raises(ValueError, match=message):
        call()


# --- Theorems 2 and 3 ---


def random_rows(seed, B=256, N=4, K=2, S=10, H=3, D=4):
    """Attention rows of very different sharpness, values, a projection and masks that keep something."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((B, N, S)) * rng.uniform(0.05, 12, (B, N, 1))
    p = np.exp(logits - logits.max(-1, keepdims=True))
    v = rng.standard_normal((B, K, S, H)) * rng.uniform(0.1, 10, (B, K, S, 1))
    keep = rng.random((B, K, S)) < rng.uniform(0.05, 0.95, (B, K, 1))
    keep[:, :, rng.integers(S)] = True
    p, v, w = p / p.sum(-1, keepdims=True), v, rng.standard_normal((N, H, D))
    return *(jnp.asarray(x, jnp.float32) for x in (p, v, w)), jnp.asarray(keep)


@jax.jit
def loss_and_bounds(p, v, w, keep):
    budgets = keep.sum(-1, dtype=jnp.int32)
    return tuple(
        (
            analysis.eviction_loss(p, v, w, keep, order=order),
            analysis.eviction_bound(p, v, w, keep, order=order),
            analysis.least_bound(p, v, w, budgets, order=order),
        )
        for order in (1, 2)
    )


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_loss_is_within_the_bound_and_top_k_has_the_least_bound(seed):
    """256 random cases an example, more than ten thousand in all."""
    for loss, bound, least in loss_and_bounds(*random_rows(seed)):
        assert (np.asarray(loss) <= np.asarray(bound) * (1 + 1e-5)).all()
        assert (np.asarray(least) <= np.asarray(bound) * (1 + 1e-5)).all()


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), sharpness=st.floats(0.1, 8))
def test_many_rows_stay_within_their_bounds(seed, sharpness):
    """In float64: where next to nothing is lost, the difference of outputs is rounding."""
    with jax.enable_x64(True):
        found = random_layer_loss(seed % 2**31, jnp.float64(sharpness))
    for loss, bound in ((found.heads, found.heads_bound), (found.output, found.output_bound)):
        for order in ("l1", "l2"):
            within = np.asarray(getattr(loss, order)) <= np.asarray(getattr(bound, order)) * (1 + 1e-12) + 1e-12
            assert within.all()
            assert within.size == 64 * 7


@jax.jit
def random_layer_loss(seed, sharpness):
    keys = jax.random.split(jax.random.key(seed), 5)
    normal = lambda i, *shape: jax.random.normal(keys[i], shape)
    keep = jax.random.bernoulli(keys[4], 0.5, (64, 2, 11))
    q, k, v = normal(0, 64, 4, 7, 4) * sharpness, normal(1, 64, 2, 11, 4), normal(2, 64, 2, 11, 4)
    return analysis.layer_loss(q, k, v, keep, out_proj=normal(3, 4, 4, 6))


def test_a_bound_that_is_attained():
    """Half of the attention goes to a value opposite to what is kept: the loss is the bound, not less."""
    p = jnp.asarray([[[0.5, 0.5]]])
    v = jnp.asarray([[[[1.0], [-1.0]]]])
    keep = jnp.asarray([[[True, False]]])
    w = jnp.ones((1, 1, 1))
    assert float(analysis.eviction_loss(p, v, w, keep)[0]) == 1.0
    assert float(analysis.eviction_bound(p, v, w, keep)[0]) == 1.0 * 2 * 0.5


# --- hindsight ---


@pytest.mark.slow
def test_future_attention_is_the_mean_of_rows():
    q, k, v = helpers.qkv(2, T=10)
    pos = jnp.broadcast_to(jnp.arange(10, dtype=jnp.int32)[None], (2, 10))
    found = analysis.future_attention(q[:, :, 6:], k, pos[:, 6:], jnp.broadcast_to(pos[:, None], (2, 2, 10)))
    for b, n in itertools.product(range(2), range(4)):
        mean = np.zeros(10)
        for t in range(6, 10):
            x = np.asarray(k[b, n // 2, : t + 1], np.float64) @ np.asarray(q[b, n, t], np.float64) * 8**-0.5
            mean[: t + 1] += np.exp(x) / np.exp(x).sum() / 4
        np.testing.assert_allclose(found[b, n], mean, atol=1e-6)
    # What a mask loses of it is what its rows lose, on average.
    keep = jnp.asarray(np.random.default_rng(1).random((2, 2, 10)) < 0.5)
    by_rows = analysis.layer_loss(q[:, :, 6:], k, v, keep).lost.mean(-1)
    np.testing.assert_allclose(
        analysis.lost_mass(found, jnp.repeat(keep, 2, axis=1)), by_rows, atol=1e-6
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("across", ["head", "layer", "model"])
@pytest.mark.parametrize("seed", range(4))
def test_no_mask_beats_the_best_in_hindsight(across, seed):
    """Against every mask there is with the same counts, in float64."""
    rng = np.random.default_rng(seed)
    L, K, S = 2, 2, 4
    mass = rng.random((1, L, K, S)) ** 3
    if seed == 1:
        mass = np.round(mass * 3) / 3  # ties
    live = np.ones(mass.shape, bool)
    live[0, 0, 1, 0] = False
    mass = np.where(live, mass, 0.0)
    keep = rng.random(mass.shape) < 0.5
    arrays = jnp.asarray(mass, jnp.float32), jnp.asarray(live)
    best = np.asarray(analysis.best_in_hindsight(*arrays, jnp.asarray(keep), across))
    axes = {"head": (3,), "layer": (2, 3), "model": (1, 2, 3)}[across]
    count = lambda m: (m & live).sum(axis=axes)
    np.testing.assert_array_equal(count(best), count(keep))
    assert not (best & ~live).any()
    lost = lambda m: np.where(m, 0.0, mass).sum()
    places = np.argwhere(live)
    least = np.inf
    for bits in itertools.product((False, True), repeat=len(places)):
        mask = np.zeros(mass.shape, bool)
        mask[tuple(places.T)] = bits
        if (count(mask) == count(keep)).all():
            least = min(least, lost(mask))
    np.testing.assert_allclose(lost(best), least, atol=1e-9)
    found = np.asarray(analysis.regret(*arrays, jnp.asarray(keep), across)).sum()
    wanted = (lost(keep & live) - least) / K / (L if across == "model" else 1)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**31 - 1), density=st.floats(0.0, 1.0))
def test_regret_is_never_negative_and_grows_with_the_freedom_of_the_oracle(seed, density):
    """64 random masks an example."""
    head, layer, model = (np.asarray(x) for x in random_regrets(seed, jnp.float32(density)))
    assert min(head.min(), layer.min(), model.min()) >= 0.0
    assert (head <= layer + 1e-6).all()
    assert (layer.mean(-1) <= model[:, 0] + 1e-6).all()


@jax.jit
def random_regrets(seed, density):
    keys = jax.random.split(jax.random.key(seed), 3)
    mass = jax.random.uniform(keys[0], (64, 3, 2, 9)) ** 4
    keep = jax.random.bernoulli(keys[1], density, mass.shape)
    live = jax.random.bernoulli(keys[2], 0.8, mass.shape)
    mass = jnp.where(live, mass, 0.0)
    return tuple(analysis.regret(mass, live, keep, across) for across in ("head", "layer", "model"))


def test_rows_that_read_nothing_lose_nothing():
    nothing, half = -jnp.inf, jnp.log(0.5)
    full, kept = jnp.asarray([[[nothing, 0.0, 0.0]]]), jnp.asarray([[[nothing, half, nothing]]])
    np.testing.assert_allclose(analysis.losses.lost_share(full, kept), [[[0.0, 0.5, 1.0]]], atol=1e-6)
