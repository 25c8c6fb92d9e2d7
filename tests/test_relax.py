"""Relaxed policies: the soft top-k, its gradients, gates in attention, and the limit of temperature zero."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special

import kvjax
from kvjax import methods
from kvjax.drivers.generation import empty_after_prompt
from kvjax.learning import relax
from kvjax.scoring.select import Stage, TopK
from tests import helpers
from tests.methods import CASES, CORE

pytestmark = pytest.mark.slow  # minutes of compilation


def problem(seed=0, shape=(2, 3), S=40):
    rng = np.random.default_rng(seed)
    score = rng.normal(size=(*shape, S)) * 2
    weight = rng.uniform(0.1, 1.5, (*shape, S)) * (rng.random((*shape, S)) < 0.8)
    budget = rng.uniform(0.05, 0.95, shape) * weight.sum(-1)
    return score, budget, weight


def plain_soft_top_k(score, budget, temperature, weight):
    """One row, by a root finder."""
    excess = lambda tau: (weight * special.expit((score - tau) / temperature)).sum() - budget
    tau = optimize.brentq(excess, -1e3, 1e3, xtol=1e-15, rtol=1e-15)
    return np.where(weight > 0, special.expit((score - tau) / temperature), 0)


def relative(found, expected):
    return np.abs(np.asarray(found) - expected).max() / max(np.abs(expected).max(), 1e-12)


def central(f, x, step=1e-5):
    """Central differences of a scalar function, entry by entry, in float64."""
    x = np.asarray(x, np.float64)
    result = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        result[i] = (float(f(jnp.asarray(up))) - float(f(jnp.asarray(down)))) / (2 * step)
    return result


# --- the soft top-k ---


@pytest.mark.parametrize("temperature", [3.0, 0.5, 0.05])
def test_soft_top_k_is_the_root(temperature):
    score, budget, weight = problem()
    with jax.enable_x64(True):
        found = relax.soft_top_k(
            *map(jnp.asarray, (score, budget)), temperature=temperature, weight=jnp.asarray(weight)
        )
    for i in np.ndindex(budget.shape):
        np.testing.assert_allclose(
            found[i], plain_soft_top_k(score[i], budget[i], temperature, weight[i]), rtol=1e-7, atol=1e-11
        )


def test_soft_top_k_takes_numbers():
    score = jnp.asarray([1.0, 3.0, 2.0])
    np.testing.assert_allclose(relax.soft_top_k(score, 1.5, temperature=0.5).sum(), 1.5, rtol=1e-6)
    for zero in (0.0, jnp.zeros(()), jnp.asarray([1.0, 0.0])):
        with pytest.raises(ValueError, match="must be positive"):
            relax.soft_top_k(score, 1.0, temperature=zero)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("temperature", [30.0, 1.0, 0.1, 1e-3, 1e-6])
def test_the_sum_is_the_budget(x64, temperature):
    """Gates are added up in float64 in both cases."""
    rng = np.random.default_rng(1)
    with jax.enable_x64(x64):
        score = jnp.asarray(rng.normal(size=(4, 5, 900)), float)
        budget = jnp.asarray(rng.uniform(0, 900, (4, 5)), float)
        for s in (score, jnp.argsort(score, axis=-1).astype(score.dtype)):
            gate = np.asarray(relax.soft_top_k(s, budget, temperature=temperature), np.float64)
            assert (gate >= 0).all()
            assert (gate <= 1).all()
            off = np.abs(gate.sum(-1) - np.asarray(budget, np.float64))
            assert (off / np.asarray(budget)).max() < (1e-12 if x64 else 1e-6)


def test_a_small_budget_is_exact_to_1e_6_in_float32():
    score = jnp.asarray(np.random.default_rng(2).normal(size=(50, 400)), jnp.float32)
    budget = jnp.linspace(1.0, 30.0, 50, dtype=jnp.float32)
    for temperature in (1.0, 0.1, 0.01):
        gate = np.asarray(relax.soft_top_k(score, budget, temperature=temperature), np.float64)
        assert np.abs(gate.sum(-1) - np.asarray(budget, np.float64)).max() < 1e-6


def test_budgets_outside_the_weights():
    score = jnp.asarray([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0], [3.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    weight = jnp.asarray([[1.0, 1.0, 0.0]] * 3 + [[0.0, 0.0, 0.0]])
    budget = jnp.asarray([0.0, 2.0, 5.0, 1.0])

    def loss(score, budget, weight):
        return (relax.soft_top_k(score, budget, temperature=0.5, weight=weight) * jnp.arange(3.0)[None]).sum()

    gate = relax.soft_top_k(score, budget, temperature=0.5, weight=weight)
    assert gate.tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 0], [0, 0, 0]]
    unknown = relax.soft_top_k(score[0], jnp.float32(jnp.nan), temperature=0.5, weight=weight[0])
    assert np.isnan(unknown).tolist() == [True, True, False]  # a slot of no weight keeps nothing all the same
    for grad in jax.grad(loss, (0, 1, 2))(score, budget, weight):
        assert (np.asarray(grad) == 0).all()


@pytest.mark.parametrize("temperature", [2.0, 0.3])
def test_gradients_of_the_soft_top_k(temperature):
    score, budget, weight = problem(3)
    target = np.random.default_rng(4).normal(size=score.shape)
    with jax.enable_x64(True):
        arguments = [jnp.asarray(x) for x in (score, budget, np.full(budget.shape, temperature), weight)]

        def loss(score, budget, temperature, weight):
            gate = relax.soft_top_k(score, budget, temperature=temperature, weight=weight)
            return (jnp.sin(3 * gate) * jnp.asarray(target)).sum()

        loss = jax.jit(loss)
        grads = jax.grad(loss, (0, 1, 2, 3))(*arguments)
        for i, grad in enumerate(grads):
            f = lambda x, i=i: loss(*arguments[:i], x, *arguments[i + 1 :])
            expected = central(f, arguments[i])
            if i == 3:
                expected[weight == 0] = 0  # a slot without weight does not compete, whatever weight it nearly had
            assert relative(grad, expected) < 1e-6, i


def test_the_gradient_of_a_budget_is_what_stands_at_the_threshold():
    """In the limit nothing moves but one more token: its value is the gradient, and nothing is NaN."""
    score = jnp.arange(10.0)[None]
    value = jnp.asarray([[7.0, 1, 2, 3, 4, 5, 6, 8, 9, 0]])
    loss = lambda b: (relax.soft_top_k(score, b, temperature=1e-4) * value).sum()
    grads = jax.vmap(jax.grad(loss))(jnp.asarray([[2.5], [4.5], [3.0]]))
    np.testing.assert_allclose(grads[:, 0], [8.0, 5.0, 6.0], rtol=1e-5)


# --- passes ---


def test_passes_take_what_is_left():
    """Three passes against a formulation with a root finder, and their shares have exact gradients."""
    rng = np.random.default_rng(5)
    S, T = 25, 0.7
    scores = rng.normal(size=(3, S))
    live = (rng.random(S) < 0.9).astype(np.float64)
    counts = np.array([3.0, 2.5, 4.25])
    value = rng.normal(size=S)

    gate, left = np.zeros(S), live
    for score, count in zip(scores, counts, strict=True):
        mean = score[left > 0].mean()
        z = (score - mean) / score[left > 0].std()
        taken = left * plain_soft_top_k(z, count, T, left)
        gate, left = gate + taken, left - taken

    with jax.enable_x64(True):
        pos = jnp.arange(S, dtype=jnp.int32)[None, None]
        as_batch = lambda x: jnp.asarray(x)[None, None]

        def gates(counts, scale):
            stages = tuple(Stage(as_batch(s), counts[i][None, None]) for i, s in enumerate(scores))
            return relax.soft_stages(stages, pos, as_batch(live), temperature=jnp.full((1, 1), T), scale=scale)

        np.testing.assert_allclose(gates(jnp.asarray(counts), "score")[0, 0], gate, atol=1e-9)
        for scale in ("score", "rank"):
            assert abs(float(gates(jnp.asarray(counts), scale).sum()) - counts.sum()) < 1e-9
            loss = lambda c, scale=scale: (jnp.square(gates(c, scale)) * as_batch(value)).sum()
            assert relative(jax.grad(loss)(jnp.asarray(counts)), central(loss, counts)) < 1e-6


def test_ranks_count_the_mass_of_what_is_better():
    score = jnp.asarray([[[1.0, 3.0, 3.0, 2.0, 9.0]]])
    pos = jnp.asarray([[[0, 1, 2, 3, 4]]], jnp.int32)
    ones = jnp.asarray([[[1.0, 1, 1, 1, 0]]])
    assert relax.mass_rank(score, pos, ones)[0, 0].tolist() == [-3.5, -1.5, -0.5, -2.5, -4.0]
    half = jnp.asarray([[[1.0, 0.5, 1, 1, 0]]])
    assert relax.mass_rank(score, pos, half)[0, 0].tolist() == [-3.0, -1.25, -0.5, -2.0, -3.5]


# --- the limit of relaxed policies ---


def softened(case, temperature, budget=12):
    """The relaxed and the hard policy, or None where gates make no sense."""
    hard = case.make(budget)
    try:
        return kvjax.soften(hard, temperature), hard
    except ValueError:
        return None


RELAXED = [c for c in CASES if softened(c, 1.0) is not None]
HARD_ONLY = {
    "streaming_llm", "h2o_pooled", "tova_when_over_3", "h2o_rerotated", "random_run", "scissorhands",
    "keyformer_per_key", "chunkkv", "think", "snapkv_then_think", "fastgen", "fastgen_elementwise", "fastgen_lossless",
    "fastgen_pooled", "kvzip", "kvzip_plus", "quest", "r_kv", "finch", "finch_chunks", "simlayerkv", "cake", "lava",
    "layer_defensivekv", "duo_attention",
}  # fmt: skip


def test_most_policies_can_be_relaxed():
    assert len(RELAXED) >= 38
    assert {c.name for c in CASES} - {c.name for c in RELAXED} <= HARD_ONLY


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c.name in CORE else pytest.mark.slow) for c in RELAXED], ids=repr
)
def test_falling_temperature_ends_at_the_hard_policy(case):
    """The kept set becomes the hard one's, gates become its mask, and budgets hold at every temperature."""
    q, k, v = helpers.qkv(3, T=24)
    lengths = [24, 19]
    arguments = {"lengths": lengths, "layer": 1, "num_layers": 3, "out_proj": jnp.ones((4, 8, 6))}
    arguments["tokens"] = helpers.token_ids(2, 24)
    soft, hard = softened(case, 1.0)
    expected = kvjax.evict_layer(hard, q, k, v, **arguments)
    keep = np.asarray(expected.keep)
    distances = []
    for temperature in (1.0, 0.2, 0.02):
        found = kvjax.evict_layer(kvjax.soften(hard, temperature), q, k, v, **arguments)
        if found.gate is None:  # nothing to evict: the full cache
            assert keep.sum() == sum(lengths) * keep.shape[1]
            return
        gate = np.asarray(found.gate, np.float64)
        np.testing.assert_allclose(gate.sum(-1), keep.sum(-1), rtol=1e-6)
        distances.append(np.abs(gate - keep).max())
    assert ((gate > 0.5) == keep).all()
    assert distances[-1] < 1e-6
    assert distances == sorted(distances, reverse=True)
    assert soft == kvjax.soften(soft, 1.0)


@pytest.mark.parametrize(
    "name",
    [
        *("snapkv", "h2o", "snapkv_then_h2o"),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("tova", "h2o_every_4", "ada_snapkv_dense", "nacl")),
    ],
)
def test_a_cold_policy_generates_like_the_hard_one(name, tiny):
    """Logits of a prompt and of ten decode steps; gates multiply while decoding."""
    model, params = tiny
    case = next(c for c in CASES if c.name == name)
    tokens, lengths = helpers.token_ids(2, 24, seed=1), jnp.asarray([24, 17], jnp.int32)
    fed = helpers.token_ids(2, 10, seed=2)
    results = []
    for policy in (case.make(10), kvjax.soften(case.make(10), 0.01)):
        plan = kvjax.make_plan(model.config, policy, prompt_len=24, max_new_tokens=10)

        @jax.jit
        def run(params, plan=plan):
            _, state = kvjax.prefill(model, params, tokens, plan, lengths=lengths)
            return kvjax.feed(model, params, fed, state)

        results.append(run(params))
    (hard, _), (soft, state) = results
    np.testing.assert_allclose(soft, hard, atol=2e-4)
    if case.decodes and name != "h2o_every_4":
        gates = np.stack([kv.gate for kv in state.layers], axis=1).astype(np.float64)
        np.testing.assert_allclose(gates.sum(-1), 10, rtol=1e-6)


def test_a_score_in_its_own_units():
    """scale="score": standard deviations; scores are real numbers here, so there are no ties."""
    q, k, v = helpers.qkv(4)
    hard = methods.knorm(9)
    keep = kvjax.evict_layer(hard, q, k, v).keep
    gate = kvjax.evict_layer(kvjax.soften(hard, 1e-4, scale="score"), q, k, v).gate
    np.testing.assert_allclose(gate, keep, atol=1e-4)
    warm = kvjax.evict_layer(kvjax.soften(hard, 0.5, scale="score"), q, k, v).gate
    np.testing.assert_allclose(np.asarray(warm, np.float64).sum(-1), 9, rtol=1e-6)


# --- gates in attention ---


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_attention_reads_gates_as_weights(softcap):
    """Behind the soft cap, where there is one."""
    q, k, v = (np.asarray(x, np.float64) for x in helpers.qkv(6, B=1, T=9))
    gate = np.random.default_rng(7).uniform(0, 1, (1, 2, 8))
    p = np.einsum("nth,nsh->nts", q[0], np.repeat(k[0], 2, axis=0)) * 8**-0.5
    p = p if softcap is None else softcap * np.tanh(p / softcap)
    p = np.exp(p) * np.concatenate([np.repeat(gate[0], 2, axis=0), np.ones((4, 1))], axis=-1)[:, None]
    expected = (p / p.sum(-1, keepdims=True))[:, -1:] @ np.repeat(v[0], 2, axis=0)

    f32 = lambda x: jnp.asarray(x, jnp.float32)
    pos = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32)[None, None], (1, 2, 8))
    kv = kvjax.LayerKV(f32(k[:, :, :8]), f32(v[:, :, :8]), pos, gate=f32(gate))
    ctx = helpers.context(helpers.site(T=8), length=[9], prompt_length=[8])
    observe = (kvjax.Observe(group=None),)
    last = [f32(x[:, :, 8:]) for x in (q, k, v)]
    arguments = {"ctx": ctx, "rotate": lambda x, pos: x, "observe": observe, "softcap": softcap}
    out, after, stats = kvjax.attend(kv, *last, jnp.asarray([[8]], jnp.int32), **arguments)
    np.testing.assert_allclose(out[0], expected, atol=1e-5)
    assert after.gate.shape == (1, 2, 9)
    assert (after.gate[..., -1] == 1).all()
    np.testing.assert_allclose(stats[observe[0]][0], (p / p.sum(-1, keepdims=True))[:, -1], atol=1e-6)


def test_gradients_through_attention():
    """Budgets to gates to the output of attention, in float64 through `kvjax.attend`."""
    with jax.enable_x64(True):
        q, k, v = helpers.qkv(8, T=20, dtype=jnp.float64)
        score = jnp.asarray(np.random.default_rng(9).normal(size=(2, 2, 16)))
        pos = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32)[None, None], (2, 2, 16))
        new = jnp.broadcast_to(jnp.arange(16, 20, dtype=jnp.int32)[None], (2, 4))
        target = jnp.asarray(np.random.default_rng(10).normal(size=(2, 4, 4, 8)))
        ctx = helpers.context(helpers.site(T=16), length=[20, 20], prompt_length=[16, 16])

        @jax.jit
        def loss(budgets):
            gate = relax.soft_top_k(score, budgets, temperature=0.5)
            kv = kvjax.LayerKV(k[:, :, :16], v[:, :, :16], pos, gate=gate)
            rows = (x[:, :, 16:] for x in (q, k, v))
            out, _, _ = kvjax.attend(kv, *rows, new, ctx=ctx, rotate=lambda x, pos: x)
            return jnp.square(out - target).sum()

        budgets = np.random.default_rng(11).uniform(2, 12, (2, 2))
        assert relative(jax.grad(loss)(jnp.asarray(budgets)), central(loss, budgets)) < 1e-7


def test_gradients_through_a_model(embedded):
    """The loss of real budgets at the model's output: falling in every budget, and as differences say.

    The model computes in float32, so differences are coarse.
    """
    model, params, _ = embedded
    prompt = jnp.asarray(np.random.default_rng(0).integers(4, 300, (2, 48)), jnp.int32)
    answer = jnp.asarray(np.random.default_rng(1).integers(4, 300, (2, 6)), jnp.int32)
    lengths = jnp.asarray([48, 40], jnp.int32)

    def logits(policy, budgets=None):
        plan = kvjax.make_plan(model.config, policy, prompt_len=48, max_new_tokens=6)
        state = kvjax.init_state(plan, lengths)
        if budgets is not None:
            state = relax.with_temperature(relax.with_budgets(state, budgets), 3.0)
        _, state, _ = kvjax.forward(model, params, prompt, state, valid=lengths, evict=True)
        return kvjax.forward(model, params, answer, state, last_only=False)[0]

    full = logits(kvjax.identity())
    policy = kvjax.soften(methods.snapkv(16, window_size=4, kernel_size=3), 1.0)
    run = jax.jit(lambda b: relax.output_kl(full, logits(policy, b)).mean())

    def check(budgets):
        value, grad = jax.value_and_grad(run)(budgets)
        direction = jnp.asarray(np.random.default_rng(2).normal(size=budgets.shape), jnp.float32)
        step = 0.2
        slope = (float(run(budgets + step * direction)) - float(run(budgets - step * direction))) / (2 * step)
        assert float((grad * direction).sum()) == pytest.approx(slope, rel=0.03)
        return float(value)

    few, many = check(jnp.full((4, 4), 10.0)), check(jnp.full((4, 4), 30.0))
    assert few > many > 0
    assert float(run(jnp.full((4, 4), 48.0))) < 1e-6


def test_annealing_compiles_once(tiny):
    model, params = tiny
    policy = kvjax.soften(methods.snapkv(10, window_size=4, kernel_size=3), 8.0)
    plan = kvjax.make_plan(model.config, policy, prompt_len=24, max_new_tokens=4)
    traces = []

    @jax.jit
    def gates(temperature):
        traces.append(1)
        state = relax.with_temperature(kvjax.init_state(plan, jnp.asarray([24], jnp.int32)), temperature)
        _, state, _ = kvjax.forward(model, params, helpers.token_ids(1, 24), state, evict=True)
        return jnp.stack([kv.gate for kv in state.layers])

    warm, cold = (gates(jnp.float32(relax.annealed(8.0, 0.01, f))) for f in (0.0, 1.0))
    assert len(traces) == 1
    assert relax.annealed(8.0, 0.5, 0.5) == pytest.approx(2.0)
    assert np.abs(np.asarray(warm) - np.round(warm)).max() > 0.2
    assert np.abs(np.asarray(cold) - np.round(cold)).max() < 1e-6


def test_reading_in_blocks(tiny):
    """Gates live in the state from the start, so that they can be carried from block to block."""
    model, params = tiny
    tokens = helpers.token_ids(2, 24)
    hard = methods.h2o(8, recent=3)
    results = []
    for policy in (hard, kvjax.soften(hard, 0.01)):
        plan = kvjax.make_plan(model.config, policy, prompt_len=24, max_new_tokens=2)
        logits, state = kvjax.prefill(model, params, tokens, plan, block=8)
        results.append(logits)
    np.testing.assert_allclose(*results, atol=1e-4)
    np.testing.assert_allclose(np.asarray(state.layers[1].gate, np.float64).sum(-1), 8, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "budget"),
    [(lambda: methods.h2o(5), 5), (lambda: methods.nacl(6, protect=1, proxies=3, random=2), 6)],
    ids=["h2o", "nacl"],
)
def test_one_decision_for_all_layers_keeps_its_gates(tiny, make, budget):
    """Their sum is the budget in every layer, after the prompt and while decoding, and budgets have gradients."""
    model, params = tiny
    tokens, lengths = helpers.token_ids(2, 14), jnp.asarray([14, 9], jnp.int32)
    policy = kvjax.shared_layers(kvjax.soften(make(), 1.0))
    plan = kvjax.make_plan(model.config, policy, prompt_len=14, max_new_tokens=3, lengths=[14, 9])
    step = jax.jit(kvjax.decode_step, static_argnames="model")
    logits, state = jax.jit(kvjax.prefill, static_argnames=("model", "plan"))(
        model, params, tokens, plan=plan, lengths=lengths
    )
    grown = 0 if policy.policy.when.decodes else 1
    for i in range(3):
        gates = np.stack([np.where(kv.live, kv.gate, 0).sum(-1) for kv in state.layers])
        np.testing.assert_allclose(gates, budget + i * grown, rtol=1e-5)
        logits, state = step(model, params, logits.argmax(-1).astype(jnp.int32), state)

    def output(b):
        state = relax.with_budgets(kvjax.init_state(plan, lengths), jnp.broadcast_to(b, (len(plan.sites), 2)))
        _, state, _ = kvjax.forward(model, params, tokens, state, valid=lengths, evict=True)
        return kvjax.decode_step(model, params, tokens[:, 0], state)[0][0, 0]

    grad = jax.jit(jax.grad(output))(jnp.asarray(4.5))
    assert np.isfinite(grad)
    assert abs(float(grad)) > 1e-4


def test_algebra():
    h2o, tova = methods.h2o(8), methods.tova(8)
    soft = lambda p: kvjax.soften(p, 2.0)
    assert soft(kvjax.identity()) == kvjax.identity()
    assert soft(kvjax.chain(h2o, tova)) == kvjax.chain(soft(h2o), soft(tova))
    assert soft(kvjax.partition({0: h2o, 1: tova}, (0, 1))) == kvjax.partition({0: soft(h2o), 1: soft(tova)}, (0, 1))
    assert soft(kvjax.shared_layers(h2o)) == kvjax.shared_layers(soft(h2o))
    assert soft(soft(h2o)) == soft(h2o)
    assert hash(soft(h2o)) == hash(soft(methods.h2o(8)))
    assert kvjax.when(kvjax.after_prefill(), soft(h2o)) == soft(kvjax.when(kvjax.after_prefill(), h2o))


class Merged(TopK):
    """A selection that would change more than which slots are live."""

    def __call__(self, score, safe, slots, limits):
        raise NotImplementedError


class Remembers(TopK):
    """A selection with a memory."""

    def init(self, site, batch):
        return jnp.zeros((batch, site.num_kv_heads, 0))


class Reversed(TopK):
    """A selection that ranks otherwise than its stages."""

    def best(self, score, *args, **kwargs):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: kvjax.soften(dataclasses.replace(methods.h2o(8), select=Merged()), 1.0),
            "Merged selects by a __call__ of its own, which gates know nothing of: they follow the stages of TopK",
        ),
        (lambda: kvjax.soften(dataclasses.replace(methods.h2o(8), select=Reversed()), 1.0), "by a best of its own"),
        (lambda: kvjax.soften(dataclasses.replace(methods.h2o(8), select=Remembers()), 1.0), "remembers what init gi"),
        (lambda: kvjax.soften(methods.snapkv(64), 0.0), "temperature=0.0 must be positive"),
        (lambda: kvjax.soften(methods.chunkkv(64), 1.0), r"Chunks\(.* is no sequence of top-k passes"),
        (lambda: kvjax.soften(methods.nacl(64, random_pool="all"), 1.0), "is no sequence of top-k passes"),
        (lambda: kvjax.soften(methods.streaming_llm(64), 1.0), "positions='compact' needs slots that are live or dead"),
        (lambda: kvjax.soften(kvjax.when(kvjax.when_over(4), methods.window(64)), 1.0), "when=.* needs slots"),
        (lambda: kvjax.soften(methods.think(), 1.0), "has no temperature; soften an Evict"),
        (lambda: relax.annealed(8.0, 0.5, jnp.float32(1.5)), r"must be a number in \[0, 1\]"),
        (lambda: relax.task_loss(jnp.ones((2, 3)), jnp.asarray([2, -1])), "targets lie between -1 and 2, but in a voc"),
        (lambda: relax.task_loss(jnp.ones((1, 3)), jnp.asarray([3])), "in a vocabulary of 3 ids are from 0 to 2"),
        (
            lambda: dataclasses.replace(kvjax.soften(methods.snapkv(64), 1.0), storage="pool"),
            "storage='pool' needs slots",
        ),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_state_without_temperature(tiny):
    model, _ = tiny
    plan = kvjax.make_plan(model.config, methods.snapkv(12, window_size=4), prompt_len=24, max_new_tokens=1)
    state = kvjax.init_state(plan, jnp.asarray([24], jnp.int32))
    with pytest.raises(ValueError, match="no layer of this state is relaxed"):
        relax.with_budgets(state, jnp.ones((3, 2)))


def test_numbers_that_do_not_fit_a_state(tiny):
    model, _ = tiny
    policy = kvjax.soften(methods.snapkv(12, window_size=4), 1.0)
    plan = kvjax.make_plan(model.config, policy, prompt_len=24, max_new_tokens=1)
    state = kvjax.init_state(plan, jnp.asarray([24], jnp.int32))
    for shape in ((2, 2), (3, 1), (2, 3, 2)):
        with pytest.raises(ValueError, match=r"budgets have the shape .* 1 sequences, 3 layers and \[2\] heads"):
            relax.with_budgets(state, jnp.ones(shape))
    slots = state.layers[0].num_slots
    for shape in ((1, 2, 2, slots), (1, 3, 1, slots), (1, 3, 2, slots + 1)):
        with pytest.raises(ValueError, match=r"gates have the shape .* but the state's slots \(1, 3, 2,"):
            relax.with_gates(state, jnp.ones(shape))
    for budget in (math.nan, math.inf):
        with pytest.raises(ValueError, match="must be finite numbers of tokens"):
            relax.with_budgets(state, jnp.full((3, 2), budget))
    pooled = dataclasses.replace(methods.h2o(12), storage="pool")
    plan = kvjax.make_plan(model.config, pooled, prompt_len=24, max_new_tokens=1)
    in_pools = empty_after_prompt(kvjax.init_state(plan, jnp.asarray([24], jnp.int32)))
    with pytest.raises(ValueError, match="slots of a pool have no gates"):
        relax.with_gates(in_pools, jnp.ones((1, 3, 2, 1)))
    with_slots = empty_after_prompt(state)
    for gate in (5.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"gates lie between {gate} and {gate}, but a slot is kept by a share"):
            relax.with_gates(with_slots, jnp.full((1, 3, 2, with_slots.layers[0].num_slots), gate))
    for temperature in (0.0, -1.0):
        with pytest.raises(ValueError, match=f"temperature={temperature} must be positive"):
            relax.with_temperature(state, temperature)
        with pytest.raises(ValueError, match=f"temperature={temperature} must be positive"):
            relax.soft_top_k(jnp.ones((1, 3)), jnp.ones((1,)), temperature=temperature)


# --- objectives ---


def test_objectives_at_the_output():
    rng = np.random.default_rng(12)
    a, b = rng.normal(size=(2, 3, 7))
    p, q = special.softmax(a, -1), special.softmax(b, -1)
    np.testing.assert_allclose(
        relax.output_kl(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)),
        (p * np.log(p / q)).sum(-1),
        rtol=1e-4,
    )
    targets = jnp.asarray([2, 0, 6], jnp.int32)
    assert jnp.isnan(jax.jit(relax.task_loss)(jnp.ones((2, 7)), jnp.asarray([-1, 7]))).all()
    expected = [-np.log(p[i, t]) for i, t in enumerate(targets)]
    np.testing.assert_allclose(relax.task_loss(jnp.asarray(a, jnp.float32), targets), expected, rtol=1e-5)
