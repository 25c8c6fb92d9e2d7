"""Relaxed policies: the soft top-k, gates as log weights, the limit of temperature zero, gradients of budgets."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special

from kvjax import chain, evict_layer, methods, partition, partition_heads, shared_layers, when
from kvjax.analysis.losses import distances, output_kl, task_loss
from kvjax.budgets import STEP, HeadShares, LayerShares, Schedule
from kvjax.contract import Layout, Policy
from kvjax.decide.select import TopK
from kvjax.learning import relax
from kvjax.learning.relax import soften, with_budgets, with_table, with_temperature
from kvjax.learning.soft import Pass, mass_rank, soft_passes, soft_top_k
from kvjax.pallas_kernels import Logits
from kvjax.run.forward import forward
from kvjax.run.steps import decode_step, prefill, start
from kvjax.storage import Layer
from tests.float64 import VOCAB, central, relative
from tests.marks import slow_but
from tests.tensors import qkv

pytestmark = pytest.mark.usefixtures("as_users_run_it")


# ---------------------------------------------------------------------------------------------------- the soft top-k


def problem(seed=0, shape=(2, 3), S=20):
    rng = np.random.default_rng(seed)
    score = rng.normal(size=(*shape, S)) * 2
    weight = rng.uniform(0.1, 1.5, (*shape, S)) * (rng.random((*shape, S)) < 0.8)
    return score, rng.uniform(0.05, 0.95, shape) * weight.sum(-1), weight


def plain_soft_top_k(score, budget, temperature, weight):
    """One row, by a root finder."""
    excess = lambda tau: (weight * special.expit((score - tau) / temperature)).sum() - budget
    tau = optimize.brentq(excess, -1e3, 1e3, xtol=1e-15, rtol=1e-15)
    return np.where(weight > 0, special.expit((score - tau) / temperature), 0)


def test_the_soft_top_k_is_the_root_and_its_gradients_are_differences():
    score, budget, weight = problem()
    target = np.random.default_rng(4).normal(size=score.shape)
    with jax.enable_x64(True):
        gate = lambda s, b, t, w: soft_top_k(s, b, temperature=t, weight=w)
        loss = jax.jit(lambda *x: (jnp.sin(3 * gate(*x)) * target).sum())
        temperature = np.array([[2.0, 0.3, 1.0], [0.5, 4.0, 0.2]])
        at = [jnp.asarray(x) for x in (score, budget, temperature, weight)]
        for i in np.ndindex(budget.shape):
            wanted = plain_soft_top_k(score[i], budget[i], temperature[i], weight[i])
            np.testing.assert_allclose(gate(*at)[i], wanted, rtol=1e-7, atol=1e-11)
        for i, grad in enumerate(jax.grad(loss, (0, 1, 2, 3))(*at)):
            wanted = central(lambda x, i=i: loss(*at[:i], x, *at[i + 1 :]), at[i])
            if i == 3:
                wanted[weight == 0] = 0  # a slot without weight does not compete, whatever weight it nearly had
            assert relative(grad, wanted) < 1e-6, i


@pytest.mark.parametrize("x64", [False, True])
def test_gates_add_up_to_the_budget(x64):
    """They are added up in float64 in both cases."""
    rng = np.random.default_rng(1)
    with jax.enable_x64(x64):
        score, budget = jnp.asarray(rng.normal(size=(20, 900)), float), jnp.asarray(rng.uniform(1, 900, 20), float)
        for temperature in (30.0, 1.0, 1e-3, 1e-6):
            for s in (score, jnp.argsort(score, axis=-1).astype(score.dtype)):
                gate = np.asarray(soft_top_k(s, budget, temperature=temperature), np.float64)
                assert 0 <= gate.min() <= gate.max() <= 1
                np.testing.assert_allclose(gate.sum(-1), budget, rtol=1e-12 if x64 else 1e-6)
        few = jnp.linspace(1.0, 30.0, 20, dtype=score.dtype)
        found = np.asarray(soft_top_k(score, few, temperature=0.1), np.float64).sum(-1)
        np.testing.assert_allclose(found, few, rtol=0, atol=1e-6)


def test_budgets_outside_the_weights():
    """All or nothing stays, without a gradient; budgets that are no numbers give gates that are none."""
    score, weight = jnp.asarray([[3.0, 1.0, 2.0]] * 4), jnp.asarray([[1.0, 1.0, 0.0]] * 3 + [[0.0] * 3])
    budget = jnp.asarray([0.0, 2.0, 5.0, 1.0])
    gate = lambda s, b, w: soft_top_k(s, b, temperature=0.5, weight=w)
    assert gate(score, budget, weight).tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 0], [0, 0, 0]]
    assert np.isnan(gate(score[0], jnp.nan, weight[0])).tolist() == [True, True, False]
    for grad in jax.grad(lambda *x: (gate(*x) * jnp.arange(3.0)).sum(), (0, 1, 2))(score, budget, weight):
        assert (np.asarray(grad) == 0).all()


def test_the_gradient_of_a_budget_is_the_value_at_the_threshold():
    """In the limit nothing moves but one more token: its value is the gradient, and nothing is NaN."""
    value = jnp.asarray([7.0, 1, 2, 3, 4, 5, 6, 8, 9, 0])
    loss = lambda b: (soft_top_k(jnp.arange(10.0), b, temperature=1e-4) * value).sum()
    np.testing.assert_allclose(jax.vmap(jax.grad(loss))(jnp.asarray([2.5, 4.5, 3.0])), [8.0, 5.0, 6.0], rtol=1e-5)


@pytest.mark.slow
def test_passes_take_what_is_left():
    """Three passes against a root finder, and their counts have exact gradients."""
    rng = np.random.default_rng(5)
    scores, live = rng.normal(size=(3, 15)), (rng.random(15) < 0.9).astype(np.float64)
    counts, value = np.array([3.0, 2.5, 1.25]), rng.normal(size=15)
    gate, left = np.zeros(15), live
    for score, count in zip(scores, counts, strict=True):
        z = (score - score[left > 0].mean()) / score[left > 0].std()
        taken = left * plain_soft_top_k(z, count, 0.7, left)
        gate, left = gate + taken, left - taken
    with jax.enable_x64(True):

        def gates(counts, by_rank):
            passes = tuple(Pass(jnp.asarray(s), counts[i]) for i, s in enumerate(scores))
            return soft_passes(passes, jnp.arange(15), jnp.asarray(live), temperature=0.7, by_rank=by_rank)

        np.testing.assert_allclose(gates(jnp.asarray(counts), False), gate, atol=1e-9)
        for by_rank in (False, True):
            assert abs(float(gates(jnp.asarray(counts), by_rank).sum()) - counts.sum()) < 1e-9
            loss = lambda c, by_rank=by_rank: (jnp.square(gates(c, by_rank)) * value).sum()
            assert relative(jax.grad(loss)(jnp.asarray(counts)), central(loss, counts)) < 1e-6


def test_ranks_count_the_weight_of_what_is_better():
    score, pos = jnp.asarray([1.0, 3.0, 3.0, 2.0, 9.0]), jnp.arange(5)
    assert mass_rank(score, pos, jnp.asarray([1.0, 1, 1, 1, 0])).tolist() == [-3.5, -1.5, -0.5, -2.5, -4.0]
    assert mass_rank(score, pos, jnp.asarray([1.0, 0.5, 1, 1, 0])).tolist() == [-3.0, -1.25, -0.5, -2.0, -3.5]


# ------------------------------------------------------------------------------------------------- relaxed policies

POLICIES = {  # of distinct mechanisms: schedules, protections, divisions, passes, memories
    "snapkv": methods.snapkv(8, window=3, kernel=3),
    "h2o": methods.h2o(8, recent=3),
    "ahakv": methods.ahakv(8, recent=3),
    "tova": methods.tova(8),
    "ada_snapkv": methods.ada_snapkv(8, window=3, kernel=3),
    "criticalkv": methods.criticalkv(methods.snapkv(8, window=3, kernel=3)),
    "nacl": methods.nacl(8, recent=1, proxies=3, random=2),
    "pyramidkv": methods.pyramidkv(8, window=3, kernel=3),
    "table": with_table(methods.snapkv(8, window=3, kernel=3), [[0.5, 1.5], [1.25, 0.75]]),
    "partition_heads": partition_heads({0: methods.h2o(8), 1: methods.tova(6)}, [[0, 1], [1, 0]], pool=False),
}


def gates(kv):
    return np.where(kv.live, np.exp(np.asarray(kv.log_weight, np.float64)), 0.0)


@pytest.mark.parametrize("name", slow_but(POLICIES, "tova", "ada_snapkv"))
def test_falling_temperature_ends_at_the_hard_policy(name):
    """The kept tokens become the hard policy's, and a head's gates add up to its budget at every temperature."""
    how = {"lengths": [16, 13], "layer": 1, "num_layers": 2, "out_proj": jnp.ones((4, 8, 6))}
    keep = np.asarray(evict_layer(POLICIES[name], *qkv(3, T=16), **how).live)
    far = []
    for temperature in (1.0, 0.2, 0.02):
        found = gates(evict_layer(soften(POLICIES[name], temperature), *qkv(3, T=16), **how))
        np.testing.assert_allclose(found.sum(-1), keep.sum(-1), rtol=1e-6)
        far.append(np.abs(found - keep).max())
    assert far == sorted(far, reverse=True)
    assert far[-1] < 1e-6


TOKENS = np.random.default_rng(1).integers(0, VOCAB, (2, 14)).astype(np.int32)
LENGTHS = np.array([14, 11])


def after(model, params, policy, budgets=None, temperature=None, block=None):
    """The state after a prompt."""
    if block is not None:
        return prefill(model, params, TOKENS, policy=policy, lengths=LENGTHS, max_new_tokens=3, block=block)[1]
    state = start(model, policy=policy, lengths=LENGTHS, max_new_tokens=3)
    state = state if budgets is None else with_budgets(state, budgets)
    state = state if temperature is None else with_temperature(state, temperature)
    return forward(model, params, TOKENS, state, valid=LENGTHS, evict=True)[1]


def said(model, params, state):
    """Logits after three more tokens."""
    return forward(model, params, TOKENS[:, :3], state)[0]


@pytest.mark.slow
def test_budgets_have_exact_gradients_at_the_output(wide):
    """Of the divergence and of the task loss, in float64; more tokens lose less, and all of them nothing."""
    model, params = wide
    with jax.enable_x64(True):
        full = said(model, params, after(model, params, Policy()))
        policy = soften(methods.snapkv(8, window=3, kernel=3), 1.0)

        @jax.jit
        def losses(budgets, temperature):
            logits = said(model, params, after(model, params, policy, budgets, temperature))
            return jnp.stack([output_kl(full, logits).mean(), task_loss(logits, np.array([5, 9])).mean()])

        budgets = np.array([[6.3, 8.2], [5.4, 9.1]])
        grads = jax.jacrev(losses)(jnp.asarray(budgets), 2.0)
        for i in range(2):
            wanted = central(lambda b, i=i: losses(b, 2.0)[i], budgets)
            assert np.abs(wanted).max() > 1e-4
            assert relative(grads[i], wanted) < 1e-5
        few, many, every = (float(losses(jnp.full((2, 2), b), 2.0)[0]) for b in (5.0, 9.0, 14.0))
        assert few > many > every
        assert every < 1e-12
        traced = losses._cache_size()
        cold = losses(jnp.asarray(budgets), 0.05)
        assert np.isfinite(cold).all()
        assert losses._cache_size() == traced  # annealing compiles nothing


def test_budgets_have_exact_gradients_in_the_eviction_loss():
    """Gates are weights in attention, behind the soft cap: as in numpy, and as differences say."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, n, t, 8)) for n, t in ((4, 3), (2, 15), (2, 15)))
    score, out_proj = rng.normal(size=(1, 2, 12)), rng.normal(size=(4, 8, 5))
    pos = np.broadcast_to(np.arange(15), (1, 2, 15))
    with jax.enable_x64(True):

        def read(budgets, **how):
            gate = jnp.pad(
                soft_top_k(jnp.asarray(score), budgets, temperature=0.5), ((0, 0), (0, 0), (0, 3)), constant_values=1
            )
            arrays = (*map(jnp.asarray, (k, v, pos)), jnp.zeros((1, 2), bool))
            kv = Layer(*arrays, log_weight=jnp.log(gate))
            out = kv.attend(
                jnp.asarray(q), jnp.arange(12, 15)[None], rotate=lambda x, _: x, logits=Logits(softcap=0.7)
            ).out
            return gate, out

        @jax.jit
        def loss(budgets):
            return distances(read(jnp.full((1, 2), 12.0))[1], read(budgets)[1], jnp.asarray(out_proj)).l1.sum()

        budgets = np.array([[5.5, 3.25]])
        gate, out = map(np.asarray, read(jnp.asarray(budgets)))
        p = np.einsum("nth,nsh->nts", q[0], np.repeat(k[0], 2, 0)) * 8**-0.5
        p = (
            np.exp(0.7 * np.tanh(p / 0.7))
            * np.repeat(gate[0], 2, 0)[:, None]
            * (pos[0, :1] <= np.arange(12, 15)[:, None])
        )
        np.testing.assert_allclose(out[0], p / p.sum(-1, keepdims=True) @ np.repeat(v[0], 2, 0), atol=1e-12)
        assert relative(jax.grad(loss)(jnp.asarray(budgets)), central(loss, budgets)) < 1e-7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "block"),
    [
        (methods.h2o(8, recent=3), None),
        (methods.h2o(8, recent=3), 7),
        (chain(methods.snapkv(10, window=3, kernel=3), methods.h2o(8, recent=3)), None),
        (shared_layers(methods.h2o(8, recent=3)), None),
        (partition({0: Policy(), 1: methods.tova(8)}, (0, 1)), None),
    ],
    ids=["h2o", "in blocks", "chain", "shared_layers", "partition"],
)
def test_a_cold_policy_decodes_like_the_hard_one(policy, block, wide):
    """Of whole prompts and blocks, and in every composition; gates multiply, and add up to the budget."""
    model, params = wide
    with jax.enable_x64(True):
        logits = []
        for p in (policy, soften(policy, 0.01)):
            state = after(model, params, p, block=block)
            step = jax.jit(lambda t, s: decode_step(model, params, t, s))
            for i in range(3):
                found, state = step(TOKENS[:, i], state)
                logits.append(found)
        np.testing.assert_allclose(logits[3:], logits[:3], atol=1e-6)
        np.testing.assert_allclose(gates(state.layers[1]).sum(-1), 8, rtol=1e-9)


@pytest.mark.slow
def test_a_shared_decision_has_one_budget_and_its_gradient(wide):
    """That of the first layer."""
    model, params = wide
    policy = shared_layers(soften(methods.nacl(6, recent=1, proxies=3, random=2), 1.0))
    with jax.enable_x64(True):
        loss = lambda b: jnp.sin(said(model, params, after(model, params, policy, b))).sum()
        budgets = np.array([[4.5, 5.25], [9.0, 9.0]])
        grad = jax.jit(jax.grad(loss))(jnp.asarray(budgets))
        assert relative(grad, central(jax.jit(loss), budgets)) < 1e-5
        assert (np.asarray(grad != 0) == [[True, True], [False, False]]).all()
        for kv in after(model, params, policy, budgets).layers:
            np.testing.assert_allclose(gates(kv).sum(-1), np.broadcast_to(budgets[0], (2, 2)), rtol=1e-9)


@pytest.mark.slow
def test_a_hard_member_before_a_relaxed_one(wide):
    """It evicts from the prompt; the rest is divided by gates."""
    model, params = wide
    with jax.enable_x64(True):
        policy = chain(methods.snapkv(10, window=3, kernel=3), soften(methods.h2o(6, recent=2), 1.0))
        kv = after(model, params, policy).layers[1]
        assert (np.asarray(kv.num_live) == 10).all()
        np.testing.assert_allclose(gates(kv).sum(-1), 6, rtol=1e-9)


@pytest.mark.slow
def test_a_table_and_budgets_mean_one_thing(wide):
    """A cold relaxed policy at real budgets keeps what the hard policy keeps with their shares as a table."""
    model, params = wide
    policy, budgets = methods.snapkv(8, window=3, kernel=3), np.array([[5.0, 9.0], [11.0, 7.0]])
    left = budgets - 3
    with jax.enable_x64(True):
        soft = after(model, params, soften(policy, 0.01), budgets)
        hard = after(model, params, with_table(policy, left / left.mean()))
        for a, b, counts in zip(soft.layers, hard.layers, budgets, strict=True):
            for row in range(2):
                for head in range(2):
                    pos, gate = np.asarray(a.pos)[row, head], gates(a)[row, head]
                    kept = sorted(x for x in np.asarray(b.pos)[row, head].tolist() if x >= 0)
                    assert sorted(pos[gate > 0.5].tolist()) == kept
                    assert len(kept) == counts[head]
    table = with_table(policy, left / left.mean())
    assert (type(table.layers), type(table.heads)) == (LayerShares, HeadShares)


@pytest.mark.slow
def test_soften_maps_over_compositions():
    h2o, tova, soft = methods.h2o(8), methods.tova(8), lambda p: soften(p, 2.0)
    assert soft(Policy()) == Policy()
    assert soft(chain(h2o, tova)) == chain(soft(h2o), soft(tova))
    assert soft(partition({0: h2o, 1: tova}, (0, 1))) == partition({0: soft(h2o), 1: soft(tova)}, (0, 1))
    assert soft(shared_layers(h2o)) == shared_layers(soft(h2o))
    assert soft(partition_heads({0: h2o, 1: tova}, [[0, 1]])) == partition_heads(
        {0: soft(h2o), 1: soft(tova)}, [[0, 1]], pool=False
    )
    assert soft(soften(h2o, 1.0)) == soft(h2o)
    assert when(STEP, soft(h2o)) == soft(when(STEP, h2o))
    assert not soft(dataclasses.replace(h2o, layout=Layout(pool=True))).layout.pool


class Mine(TopK):
    """A selection that may do anything."""


H2O = methods.h2o(8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: soften(dataclasses.replace(H2O, select=Mine()), 1.0),
            "Mine is not known to select by passes of top-k",
        ),
        (lambda: soften(methods.chunkkv(H2O), 1.0), "Chunks is not known to select by passes"),
        (lambda: soften(H2O, 0.0), "temperature=0.0 must be positive"),
        (
            lambda: soften(methods.streaming_llm(64, sinks=4), 1.0),
            "at positions 'shifted', which count the live tokens",
        ),
        (lambda: soften(when(Schedule(over=4), H2O), 1.0), "when heads have 4 tokens over the budget"),
        (lambda: soften(methods.think(), 1.0), "DropChannels does not keep the best of a score"),
        (lambda: soften(methods.quest(64), 1.0), "ReadPages does not keep the best of a score"),
        (lambda: chain(soften(H2O, 1.0), methods.tova(4)), "each of which LayerMean counts as a token; relax all"),
        (lambda: chain(methods.tova(4), soften(H2O, 1.0)), "relax all, soften"),
        (lambda: with_table(H2O, 2 * np.ones((2, 2))), "shares have a mean of 2, not 1"),
        (lambda: relax.annealed(8.0, 0.5, 1.5), "fraction=1.5 of the steps; give a number from 0 to 1"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_budgets_that_fit_no_state(wide):
    model, _ = wide
    with jax.enable_x64(True):
        state = start(model, policy=soften(H2O, 1.0), lengths=LENGTHS, max_new_tokens=1)
    for shape in ((3, 2), (2, 1), (3, 2, 2)):
        with pytest.raises(ValueError, match="the state has 2 sequences, 2 layers and 2 heads"):
            with_budgets(state, jnp.ones(shape))
    with jax.enable_x64(True):
        hard = start(model, policy=H2O, lengths=LENGTHS, max_new_tokens=1)
    with pytest.raises(ValueError, match="no layer of this state is relaxed"):
        with_budgets(hard, jnp.ones((2, 2)))
    assert relax.annealed(8.0, 0.5, 0.5) == pytest.approx(2.0)
