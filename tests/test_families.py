"""Families of budgets: exact totals, exact gradients, hard limits, and the policies that are made of them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import evict_layer, methods, when
from kvjax.budgets import Schedule
from kvjax.learning.families import EntropyK, NaclShares, PyramidBeta, Safeguard, Simplex, View, WindowShare
from kvjax.learning.relax import soften, with_table
from kvjax.learning.soft import filled, simplex
from kvjax.pallas_kernels.pytree import pytree
from tests.float64 import central, relative
from tests.marks import slow_but
from tests.tensors import qkv

pytestmark = pytest.mark.usefixtures("as_users_run_it")

B, L, K, S, R = 2, 3, 2, 16, 4
LENGTHS = np.array([16, 12])
ARRAYS = qkv(7, T=S, sharpness=1.0)


@pytree
class Voters:
    """Rows that vote, by their logits."""

    logits: jax.Array
    pos: jax.Array

    def votes(self, multiplier):
        """Of softmaxes of scaled logits, added up over rows."""
        return jax.nn.softmax(self.logits * multiplier[:, None, :, None], axis=-1).sum(2)


def view(seed=0, *, budget=(7.5, 6.25), recent=2):
    """Random prompts, left-padded."""
    rng, f = np.random.default_rng(seed), jnp.asarray
    pos = np.maximum(np.arange(S)[None] - (S - LENGTHS)[:, None], -1)
    pos = np.broadcast_to(pos[:, None, None], (B, L, K, S)).astype(np.int32)
    live = pos >= 0
    score = np.where(live, np.exp(rng.normal(size=(B, L, K, S)) * rng.uniform(0.5, 2, (B, L, K, 1))), 0)
    safe = live & (pos >= (LENGTHS - recent)[:, None, None, None])
    logits = np.where(live[:, :, :, None], 2 * rng.normal(size=(B, L, K, R, S)), -1e9)
    voters = tuple(Voters(f(logits[:, i]), f(LENGTHS[:, None] - R + np.arange(R))) for i in range(L))
    prior, drawn = rng.uniform(0.5, 1, (B, L, K, S)), rng.gumbel(size=(B, L, K, S))
    return View(f(score), f(pos), f(live), f(safe), f(budget, float), voters, f(prior), f(drawn))


FAMILIES = {
    "heads": Simplex("heads"),
    "layers": Simplex("layers"),
    "both": Simplex("both", floor=0.3),
    "pyramid": PyramidBeta(),
    "safeguard": Safeguard(),
    "window": WindowShare(),
    "nacl": NaclShares(),
    "ahakv": EntropyK(start=6.0),
}


def begun(family, seed=2, spread=0.7):
    """Parameters away from where learning starts."""
    params = family.init(L, K)
    return params + spread * jnp.asarray(np.random.default_rng(seed).normal(size=params.shape), params.dtype)


@pytest.mark.parametrize("name", slow_but(FAMILIES, "heads", "layers"))
def test_gradients_are_differences_and_totals_exact(name):
    """In float64, at every temperature; also where more is asked for than exists."""
    target = np.random.default_rng(4).normal(size=(B, L, K, S))
    with jax.enable_x64(True):
        family = FAMILIES[name]
        gates = jax.jit(family.gates)
        seen, params = view(), begun(family)
        loss = lambda x: (jnp.sin(3 * gates(x, seen, jnp.asarray(1.5))) * target).sum()
        grad = jax.grad(loss)(params)
        assert np.abs(np.asarray(grad)).max() > 1e-6  # there is something to agree on
        assert relative(grad, central(loss, params)) < 1e-5
        for budget in ((7.5, 6.25), (30.0, 11.5)):
            seen, total = view(budget=budget), L * K * np.minimum(budget, LENGTHS)
            np.testing.assert_allclose(seen.total, total, rtol=1e-12)
            for temperature in (30.0, 4.0, 0.02):
                gate = np.asarray(gates(begun(family, 3, 1.5), seen, jnp.asarray(temperature)))
                assert 0 <= gate.min() <= gate.max() <= 1 + 1e-12
                np.testing.assert_allclose(gate.sum((1, 2, 3)), total, rtol=1e-12)
                assert (gate[~np.asarray(seen.live)] == 0).all()


@pytest.mark.parametrize("over", ["heads", "layers", "both"])
def test_floors_and_caps(over):
    """Parameters that want all of the budget in one place get no more than exists, and leave the floor elsewhere."""
    with jax.enable_x64(True):
        family, seen = Simplex(over, floor=0.25), view(budget=(11.0, 9.0))
        greedy = np.full(family.init(L, K).shape, -40.0)
        greedy[0] = 40.0
        budgets = np.asarray(family.budgets(jnp.asarray(greedy), seen))
        uniform = np.asarray(family.budgets(family.init(L, K), seen))
        full = np.asarray(Simplex(over, floor=0.95).budgets(jnp.asarray(greedy), view(budget=(40.0, 9.0))))
    average, exists = np.array([9.0, 7.0]), LENGTHS - 2
    np.testing.assert_allclose(uniform, np.broadcast_to(average[:, None, None], (B, L, K)), rtol=1e-9)
    np.testing.assert_allclose(budgets.sum((1, 2)), average * L * K, rtol=1e-12)
    assert (budgets >= 0.25 * average[:, None, None] - 1e-9).all()
    assert (budgets <= exists[:, None, None] + 1e-9).all()
    np.testing.assert_allclose(full[0], exists[0], rtol=1e-12)  # floors give way to what exists


def test_a_simplex_is_a_softmax_far_below_the_caps():
    logits = jnp.asarray([0.3, -1.0, 2.0, 0.0])
    parts = simplex(logits, jnp.float32(10.0), floor=jnp.zeros(4), cap=jnp.full((4,), 1e6))
    np.testing.assert_allclose(parts, 10 * jax.nn.softmax(logits), rtol=1e-3)


def test_filling_spreads_what_lies_beyond_the_caps():
    rng = np.random.default_rng(3)
    shares, cap = rng.exponential(5.0, (20, 6)), np.floor(rng.uniform(1, 9, (20, 6)))
    shares *= np.minimum(1.0, cap.sum(-1) / shares.sum(-1))[:, None]
    found, plain = filled(jnp.asarray(shares, jnp.float32), jnp.asarray(cap, jnp.float32)), shares.copy()
    for row, most in zip(plain, cap, strict=True):
        for _ in range(6):
            surplus = np.maximum(row - most, 0).sum()
            np.minimum(row, most, out=row)
            weight = np.where(most > row, row, 0)
            row += surplus * weight / weight.sum() if weight.sum() > 0 else 0
    np.testing.assert_allclose(found, np.minimum(plain, cap), rtol=1e-4)


# ------------------------------------------------------------------------------------------------- the hard policies


def snapkv(budget):
    return methods.snapkv(budget, window=2, kernel=3)


def kept(policy):
    """What stays in every layer, "B L K S"."""
    each = [evict_layer(policy, *ARRAYS, layer=i, num_layers=L) for i in range(L)]
    return np.stack([np.asarray(kv.live) for kv in each], axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("over", ["heads", "layers", "both"])
def test_tables_keep_the_total(over):
    """Shares of whole tokens differ from real ones by less than a token a head and one a layer."""
    with jax.enable_x64(True):
        family, seen = Simplex(over), view(budget=(7.0, 6.0))
        params = begun(family, spread=0.5)
        shares, policy = family.shares(params, seen), family.harden(params, snapkv(7), seen)
    assert policy == with_table(snapkv(7), shares)
    assert shares.mean() == pytest.approx(1.0)
    counts = kept(policy).sum(-1)
    assert (counts.sum((1, 2)) == L * K * 7).all()
    assert np.abs(counts - (2 + 5 * shares)).max() <= 2


def test_only_prompts_that_are_divided_have_shares():
    """One that keeps all its tokens, or only its protected ones, says nothing of how heads differ."""
    with jax.enable_x64(True):
        family = Simplex("both")
        params = begun(family)
        budgets = np.asarray(family.budgets(params, view(budget=(7.0, 6.0))))[0]
        for other in (2.0, 12.0, 40.0):
            found = family.shares(params, view(budget=(7.0, other)))
            np.testing.assert_allclose(found, budgets / budgets.mean(), rtol=1e-12)
        assert (family.shares(params, view(budget=(16.0, 2.0))) == 1).all()


def test_hard_parameters():
    with jax.enable_x64(True):
        hard = lambda family, policy: family.harden(family.init(L, K), policy, view())
        assert hard(PyramidBeta(3.0), snapkv(8)).layers.beta == pytest.approx(3.0)
        assert hard(Safeguard(0.3), snapkv(8)).heads.alpha == pytest.approx(0.3)
        assert hard(WindowShare(0.25), snapkv(8)).recent.share == pytest.approx(0.25)
        nacl = hard(NaclShares((1.0, 4.0, 5.0)), methods.nacl(0.5))
        assert (nacl.recent.share, nacl.select.random.share) == (pytest.approx(0.1), pytest.approx(0.5))
        assert hard(EntropyK(17.2), methods.ahakv(8, recent=4)).score.of.softmax.k == 17
        with pytest.raises(ValueError, match="draws nothing"):
            hard(NaclShares(), snapkv(8))
        with pytest.raises(ValueError, match="accumulates no attention under a softmax"):
            hard(EntropyK(), snapkv(8))
        said = NaclShares((1.0, 4.0, 5.0)).describe(NaclShares((1.0, 4.0, 5.0)).init(L, K))
    assert said == pytest.approx({"protect": 0.1, "best": 0.4, "random": 0.5})


@pytest.mark.parametrize("name", slow_but(["both", "pyramid", "safeguard", "window"], "window"))
def test_cold_gates_are_the_hard_policy(name):
    """Real budgets are rounded, so each head may differ by a token or two at its threshold; the total does not."""
    family, base = FAMILIES[name], methods.knorm(7) if name == "window" else snapkv(7)
    decided = [evict_layer(soften(base, 0.01), *ARRAYS, layer=i, num_layers=L) for i in range(L)]
    ranked = [scores(base, i) for i in range(L)]
    pos = jnp.stack([kv.pos for kv in decided], axis=1)
    safe = pos >= (S if name == "window" else S - 2)
    seen = View(jnp.stack(ranked, axis=1), pos, pos >= 0, safe, jnp.asarray([7.0, 7.0]))
    params = begun(family)
    gates, keep = np.asarray(family.gates(params, seen, 1e-3)), kept(family.harden(params, base, seen))
    assert np.abs(gates - keep).sum(-1).max() <= 3
    np.testing.assert_allclose(gates.sum((1, 2, 3)), keep.sum((1, 2, 3)), rtol=1e-6)


def scores(policy, layer):
    """What the policy ranks the tokens of a layer by."""
    found = []

    class Told(type(policy.select)):
        def __call__(self, score, budgets, slots):
            found.append(jnp.where(jnp.abs(score) < 1e30, score, 0.0))
            return super().__call__(score, budgets, slots)

    evict_layer(dataclasses.replace(policy, select=Told()), *ARRAYS, layer=layer, num_layers=L)
    return found[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PyramidBeta(1.0), "start=1.0 must be a number above 1"),
        (lambda: Safeguard(1.0), "start=1.0 must be a number above 0, below 1"),
        (
            lambda: NaclShares().gates(jnp.zeros(3), dataclasses.replace(view(), drawn=None), 1.0),
            r"NaclShares needs View\.drawn",
        ),
        (
            lambda: EntropyK().gates(jnp.zeros(()), dataclasses.replace(view(), voters=None), 1.0),
            r"EntropyK needs View\.voters",
        ),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.slow
def test_a_table_goes_into_any_policy():
    shares = [[1.5, 0.5], [2.0, 1.0], [0.25, 0.75]]
    for policy in (methods.h2o(8, recent=2), methods.roco(8), methods.knorm(8)):
        counts = kept(when(Schedule(), with_table(policy, shares))).sum(-1)
        assert (counts.sum((1, 2)) == L * K * 8).all()
        assert (counts[:, 1, 0] > counts[:, 1, 1]).all()
    assert math.isclose(np.mean(shares), 1)
