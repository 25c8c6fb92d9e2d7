"""The best in hindsight, against every mask there is; and intervals of means."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import analysis
from tests import tensors

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def test_a_single_prompt_has_no_bounds_and_none_no_mean():
    with pytest.raises(ValueError, match=r"values have the shape \(0,\)"):
        analysis.interval([])
    found = analysis.interval(np.ones((2, 1)))
    assert (found.low.tolist(), found.high.tolist()) == ([-np.inf] * 2, [np.inf] * 2)


@pytest.mark.exhaustive
def test_future_attention_is_the_mean_of_rows():
    q, k, v = tensors.qkv(2, T=10)
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


@pytest.mark.exhaustive
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
