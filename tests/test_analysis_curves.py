"""Budget curves from one prefill: against plain loops and runs of their own, and what they satisfy by themselves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from kvjax import Adaptive, Evict, analysis, feed, methods, models, prefill, shared_layers, when
from kvjax.analysis.curves import _losses
from kvjax.analysis.reading import seed_key
from kvjax.budgets import Schedule
from kvjax.contract import Layout, Rewrite
from kvjax.experiments.tasks import TASKS, Task
from kvjax.observe import Rows
from kvjax.scores.attention import Votes
from tests.tensors import live_positions
from tests.test_losses import plain_layer_loss

pytestmark = pytest.mark.usefixtures("as_users_run_it")

B, T, F = 3, 24, 6
LENGTHS = np.array([24, 24, 17])
BUDGETS = (6, 0.5, 40)
TOKENS, CONTINUATION = (np.random.default_rng(0).integers(0, 61, (B, n)) for n in (T, F))
KEY = jax.random.split(jax.random.key(3), B)
ORACLES = ("head", "layer", "model")

SNAPKV = {"window": 4, "kernel": 3}
METHODS = {
    "window": methods.window,
    "streaming_llm": lambda b: methods.streaming_llm(b, sinks=2),
    "random": methods.random,
    "ada_snapkv": lambda b: methods.ada_snapkv(b, **SNAPKV),
    "per query head": lambda b: dataclasses.replace(methods.snapkv(b, **SNAPKV), layout=Layout(by_query_head=True)),
    "rank": lambda b: dataclasses.replace(methods.h2o(b), layout=Layout("rank")),
    "keyformer": lambda b: methods.keyformer(b, recent=3),
    "shared": lambda b: shared_layers(methods.h2o(b)),
}


class Doubled(Rewrite):
    """Values twice as large."""

    writes = ("v",)

    def __call__(self, decision, slots):
        return dataclasses.replace(decision, v=2 * slots.kv.v)


SOME = ("window", "streaming_llm", "random", "ada_snapkv")


def measured(model, params):
    how = {"lengths": LENGTHS, "key": KEY, "seeds": 2, "oracles": ORACLES}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return analysis.curves(model, params, TOKENS, CONTINUATION, {n: METHODS[n] for n in SOME}, BUDGETS, **how)


@pytest.fixture(scope="module")
def curves(shallow):
    return measured(*shallow)


def reading_for(model, params, policy):
    return analysis.read(model, params, TOKENS, CONTINUATION, policies=(policy,), lengths=LENGTHS, key=KEY)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "ada_snapkv" else pytest.mark.exhaustive) for n in METHODS]
)
def test_masks_and_logits_are_those_of_prefill_and_feed(tiny, name):
    """The run that a curve stands for: a compacted cache, decoded token by token."""
    policy = when(Schedule(), METHODS[name](10))
    reading = reading_for(*tiny, policy)
    after = reading.after(policy)
    how = {"policy": policy, "lengths": LENGTHS, "key": KEY, "max_new_tokens": F}
    _, state = prefill(*tiny, TOKENS, **how)
    assert list(map(live_positions, after)) == list(map(live_positions, state.layers))
    wanted, _ = feed(*tiny, CONTINUATION, state)
    np.testing.assert_allclose(reading.logits_after(*tiny, after), wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.exhaustive
def test_losses_of_a_mask_are_those_of_plain_loops(tiny):
    model, params = tiny
    policy = METHODS["ada_snapkv"](10)
    reading = reading_for(model, params, policy)
    after = reading.after(policy)
    found = analysis.mask_losses(model, params, reading, after)
    for i, (kv, later) in enumerate(zip(after, reading.later, strict=True)):
        turn = lambda x: model.config.rope(x, reading.rows[:, None])
        q, k, v = turn(later.q), jnp.concatenate([kv.k, turn(later.k)], 2), jnp.concatenate([kv.v, later.v], 2)
        mask = np.concatenate([kv.live, np.ones((B, 2, F), bool)], axis=2)
        wanted = plain_layer_loss(q, k, v, mask, later.out_proj, lengths=LENGTHS + F)
        close = lambda x, y, i=i: np.testing.assert_allclose(x[i], y, rtol=1e-4, atol=1e-4)
        close(found.l1, wanted["output"][1].mean(-1))
        close(found.l2, wanted["output"][2].mean(-1))
        close(found.heads_l1, wanted["heads"][1].mean(-1))
        close(found.heads_l2, wanted["heads"][2].mean(-1))
        close(found.bound, wanted["output_bound"][1].mean(-1))
        close(found.lost, wanted["lost"].mean((1, 2)))
        close(found.live, mask[..., :T].sum(-1).mean(-1))
    full, logits = (np.asarray(x, np.float64) for x in (reading.logits, reading.logits_after(model, params, after)))
    p, q = special.softmax(full, -1), special.softmax(logits, -1)
    np.testing.assert_allclose(found.kl, (p * np.log(p / q)).sum(-1).mean(-1), rtol=1e-4)
    np.testing.assert_allclose(found.agreement, (full.argmax(-1) == logits.argmax(-1)).mean(-1), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random", "ada_snapkv"])
def test_curves_are_means_of_single_runs(shallow, curves, name):
    """Of one policy at one budget and one seed, without an oracle."""
    keys = [seed_key(KEY, B, seed) for seed in range(2)]
    one = {"policies": {name: METHODS[name]}, "budgets": BUDGETS[:1], "lengths": LENGTHS, "oracles": ()}
    runs = [analysis.curves(*shallow, TOKENS, CONTINUATION, key=key, **one) for key in keys]
    for field in dataclasses.fields(analysis.Losses):
        wanted = np.mean([np.asarray(getattr(r.losses, field.name))[0, 0] for r in runs], axis=0)
        found = np.asarray(getattr(curves.losses, field.name))[SOME.index(name), 0]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5, err_msg=field.name)


@pytest.mark.slow
def test_nothing_is_lost_by_a_budget_that_holds_everything(curves):
    for loss, value in (("l1", 0.0), ("lost", 0.0), ("regret_layers", 0.0), ("kl", 0.0), ("agreement", 1.0)):
        np.testing.assert_allclose(curves.values(loss)[:, -1], value, atol=1e-4)
        assert (np.abs(curves.values(loss)[:, 0] - value) > 1e-4)[:4].any()


def test_hindsight_is_never_beaten_and_bounds_hold_where_the_theorem_does(curves):
    lost = np.asarray(curves.losses.lost)
    heads, layers, model = lost[len(SOME) :]
    assert (heads <= lost[: SOME.index("ada_snapkv")] + 1e-6).all()
    assert (layers <= lost[: len(SOME)] + 1e-6).all()
    np.testing.assert_allclose(model, layers, atol=1e-6)  # of one layer
    for loss in ("regret_tokens", "regret_heads", "regret_layers"):
        assert (curves.values(loss) >= 0).all()
    losses, moved = curves.losses, SOME.index("streaming_llm")
    assert np.isnan(losses.bound[moved]).all()
    others = np.arange(len(curves.policies)) != moved
    for array in (losses.l1, losses.least_bound):
        assert (np.asarray(array)[others] <= np.asarray(losses.bound)[others] * (1 + 1e-5) + 1e-4).all()


def test_an_equal_call_compiles_nothing_and_means_have_intervals(shallow, curves):
    before = _losses._cache_size()
    again = measured(*shallow)
    assert _losses._cache_size() == before > 0
    np.testing.assert_array_equal(again.values("kl"), curves.values("kl"))
    found, values = curves["l1"], curves.values("l1")
    wanted = stats.t.interval(0.95, B - 1, loc=values[3, 1].mean(), scale=stats.sem(values[3, 1]))
    np.testing.assert_allclose((found.low[3, 1], found.high[3, 1]), wanted)
    np.testing.assert_allclose(found.mean, np.asarray(curves.losses.l1).mean((2, 3)), rtol=1e-6)
    gap = curves.difference("l1", "window", "ada_snapkv")
    np.testing.assert_allclose(gap.mean, found.mean[0] - found.mean[3])
    assert "window" in str(curves)
    with pytest.raises(ValueError, match="'loss' is not one of"):
        curves.values("loss")
    with pytest.raises(ValueError, match="'nobody' is not one of"):
        curves.difference("l1", "window", "nobody")


@pytest.mark.slow
def test_masks_are_mapped_over(shallow):
    reading = analysis.read(*shallow, TOKENS, CONTINUATION, lengths=LENGTHS)
    rank = jnp.broadcast_to(jnp.arange(T)[::-1], (1, B, 2, T))
    one = lambda budget: analysis.mask_losses(*shallow, reading, rank < budget)
    found = jax.jit(jax.vmap(one))(jnp.asarray([6, 24]))
    np.testing.assert_allclose(found.kl[0], one(6).kl, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.kl[1], 0.0, atol=1e-5)


@pytest.mark.slow
def test_what_slots_hold_after_a_rewrite_is_read(shallow):
    """Its losses are those of the rewritten layers, as a user's own run has them; bounds of masks do not hold."""
    policy = dataclasses.replace(methods.kvzip(8), rewrite=Doubled())
    reading = analysis.read(*shallow, TOKENS, CONTINUATION, policies=(policy,), lengths=LENGTHS)
    found = analysis.mask_losses(*shallow, reading, reading.after(policy))
    _, state = prefill(*shallow, TOKENS, policy=policy, lengths=LENGTHS, max_new_tokens=F)
    wanted, _ = feed(*shallow, CONTINUATION, state)
    np.testing.assert_allclose(found.kl, analysis.output_kl(reading.logits, wanted).mean(-1), rtol=1e-4)
    assert np.isnan(found.bound).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": {}}, "0 policies at 3 budgets"),
        ({"policies": {"x": methods.snapkv(8, window=4)}}, "'x' is .*; give a method that takes a budget"),
        ({"policies": {"x": methods.dilated_window}}, "a row reads, so that no eviction .* the losses of 'x'"),
        ({"policies": {"x": lambda b: methods.quest(b, size=4, dense=0)}}, "the losses of 'x'"),
        ({"policies": {"hindsight (model)": methods.window}}, r"'hindsight \(model\)' is the name of an oracle"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_work_is_refused(shallow, change, message):
    call = {"continuation": CONTINUATION, "policies": {"window": methods.window}, "lengths": LENGTHS, **change}
    with pytest.raises(ValueError, match=message):
        analysis.curves(*shallow, TOKENS, call.pop("continuation"), call.pop("policies"), BUDGETS, **call)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [1, 32])
def test_adaptive_heads_lower_the_bound_on_every_layer_and_prompt(embedded, rows):
    """Theorem 4 on the embedded model and held-out text, for the rows that scored the tokens.

    Also with the safeguard: whole budgets between the uniform and the adaptive ones trade tokens below the layer's
    threshold for tokens above it, so every alpha lowers the bound, and a larger one lowers it more.
    """
    model, params, tokenizer = embedded
    encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    task = Task(encode, (tokenizer.bos_token_id,), 256 + 64, 0)
    prompts = [TASKS["perplexity"](task, 500 + i) for i in range(6)]
    texts = (np.array([e.context for e in prompts]), np.array([e.questions[0].continuation[:4] for e in prompts]))
    heads = {0.0: None, 0.5: Adaptive(0.5), 1.0: Adaptive(1.0)}
    make = lambda a, share: Evict(Votes(rows), share, heads=heads[a])
    reading = analysis.read(model, params, *texts, policies=(make(0.0, 0.25),))
    mass = jnp.stack([reading.stats.of(i)[Rows(rows)] / rows for i in range(model.config.num_layers)])
    np.testing.assert_allclose(mass.sum(-1), 1.0, atol=1e-5)
    largest = np.asarray(analysis.value_bounds(reading))
    for share in (0.0625, 0.1, 0.125, 0.18, 0.25):
        keep = {a: jnp.stack([kv.live for kv in reading.after(make(a, share))]) for a in heads}
        bound = {a: 2 * 8 * largest * np.asarray(analysis.lost_mass(mass, x)).mean(-1) for a, x in keep.items()}
        for lower, higher in ((1.0, 0.5), (0.5, 0.0)):
            assert (bound[lower] <= bound[higher] * (1 + 1e-6)).all()
            assert (bound[lower] < bound[higher]).mean() > 0.5
        for x in keep.values():
            np.testing.assert_array_equal(x.sum((-1, -2)), keep[0.0].sum((-1, -2)))


@pytest.mark.exhaustive
def test_memory_is_linear_in_the_prompt(tiny):
    model, params = models.LanguageModel(dataclasses.replace(tiny[0].config, max_position=2**14)), tiny[1]
    policies = methods.h2o(128), methods.ada_snapkv(128)

    def measured(params, tokens, continuation):
        reading = analysis.read(model, params, tokens, continuation, policies=policies)
        return [analysis.mask_losses(model, params, reading, reading.after(policy)) for policy in policies]

    def temporaries(length):
        texts = (jax.ShapeDtypeStruct((1, n), jnp.int32) for n in (length, 8))
        return jax.jit(measured).lower(params, *texts).compile().memory_analysis().temp_size_in_bytes

    small, large = temporaries(2048), temporaries(8192)
    assert large < 5 * small
    assert large < 8192 * 8192  # no matrix of tokens by tokens, of any kind
