"""Budget curves from one prefill: the numbers of the old library, and what they must satisfy by themselves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import kvjax
from kvjax import analysis as old
from kvjax import methods as old_methods
from kvjax.core import analysis, methods
from kvjax.core.analysis.curves import _losses
from kvjax.core.contract import Layout, Rewrite

B, T, F = 3, 24, 6
LENGTHS = np.array([24, 24, 17])
BUDGETS = (6, 0.5, 40)
TOKENS, CONTINUATION = (np.random.default_rng(0).integers(0, 61, (B, n)) for n in (T, F))
ORACLES = ("head", "layer", "model")

SNAPKV = {"window": 4, "kernel": 3}
WAS = {"window_size": 4, "kernel_size": 3}
METHODS = {  # name -> (new, old)
    "window": (methods.window, old_methods.window),
    "streaming_llm": (lambda b: methods.streaming_llm(b, sinks=2), lambda b: old_methods.streaming_llm(b, sinks=2)),
    "random": (methods.random, old_methods.random),
    "ada_snapkv": (lambda b: methods.ada_snapkv(b, **SNAPKV), lambda b: old_methods.ada_snapkv(b, **WAS)),
    "full": (lambda b: methods.full(), lambda b: kvjax.identity()),
    "per query head": (
        lambda b: dataclasses.replace(methods.snapkv(b, **SNAPKV), layout=Layout(by_query_head=True)),
        lambda b: old_methods.snapkv(b, granularity="query_head", **WAS),
    ),
    "rank": (
        lambda b: dataclasses.replace(methods.h2o(b), layout=Layout("rank")),
        lambda b: dataclasses.replace(old_methods.h2o(b), positions="rerotate"),
    ),
    "keyformer": (lambda b: methods.keyformer(b, recent=3), lambda b: old_methods.keyformer(b, recent=3)),
    "shared": (
        lambda b: kvjax.core.shared_layers(methods.h2o(b)),
        lambda b: kvjax.shared_layers(old_methods.h2o(b)),
    ),
}


class Doubled(Rewrite):
    """Values twice as large."""

    writes = ("v",)

    def __call__(self, decision, slots):
        return dataclasses.replace(decision, v=2 * slots.kv.v)


SOME = ("window", "streaming_llm", "random", "ada_snapkv")


@pytest.fixture(autouse=True, scope="module")
def _promotes():
    """The core runs under the promotion that JAX has by itself."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def measured(model, params, names=SOME, *, which=0, library=analysis):
    call = library.curves, model, params, TOKENS, CONTINUATION, {n: METHODS[n][which] for n in names}, BUDGETS
    how = {"lengths": LENGTHS, "key": jax.random.split(jax.random.key(3), B), "seeds": 2, "oracles": ORACLES}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return call[0](*call[1:], **how)


@pytest.fixture(scope="module")
def curves(shallow):
    return measured(*shallow)


@pytest.mark.slow
def test_every_loss_is_what_it_was(tiny):
    found = measured(*tiny, METHODS)
    wanted = measured(*tiny, METHODS, which=1, library=old)
    assert found.policies == wanted.policies
    for field in dataclasses.fields(analysis.Losses):
        one, other = (getattr(x.losses, field.name) for x in (found, wanted))
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-4, err_msg=field.name)


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


def test_masks_are_mapped_over(shallow):
    reading = analysis.read(*shallow, TOKENS, CONTINUATION, lengths=LENGTHS)
    rank = jnp.broadcast_to(jnp.arange(T)[::-1], (1, B, 2, T))
    one = lambda budget: analysis.mask_losses(*shallow, reading, rank < budget)
    found = jax.jit(jax.vmap(one))(jnp.asarray([6, 24]))
    np.testing.assert_allclose(found.kl[0], one(6).kl, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.kl[1], 0.0, atol=1e-5)


def test_what_slots_hold_after_a_rewrite_is_read(shallow):
    """Its losses are those of the rewritten layers, as a user's own run has them; bounds of masks do not hold."""
    policy = dataclasses.replace(methods.knorm(8), rewrite=Doubled())
    reading = analysis.read(*shallow, TOKENS, CONTINUATION, policies=(policy,), lengths=LENGTHS)
    found = analysis.mask_losses(*shallow, reading, reading.after(policy))
    _, state = kvjax.core.prefill(*shallow, TOKENS, policy=policy, lengths=LENGTHS, max_new_tokens=F)
    wanted, _ = kvjax.core.feed(*shallow, CONTINUATION, state)
    np.testing.assert_allclose(found.kl, analysis.output_kl(reading.logits, wanted).mean(-1), rtol=1e-4)
    assert np.isnan(found.bound).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": {}}, "0 policies at 3 budgets"),
        ({"policies": {"x": methods.snapkv(8, window=4)}}, "'x' is .*; give a method that takes a budget"),
        ({"policies": {"x": methods.snapkv}}, "a budget of 6 tokens cannot hold"),
        ({"policies": {"x": methods.dilated_window}}, "a row reads, so that no eviction .* the losses of 'x'"),
        ({"policies": {"x": lambda b: methods.quest(b, size=4, dense=0)}}, "the losses of 'x'"),
        ({"policies": {"x": methods.kvzip}}, "reads the prompt again"),
        ({"policies": {"hindsight (model)": methods.window}}, r"'hindsight \(model\)' is the name of an oracle"),
        ({"continuation": np.ones((2, 4), int)}, "3 prompts, but 2 continuations"),
        ({"seeds": 0}, "seeds=0"),
        ({"oracles": ("heads",)}, "oracles has 'heads': give some of 'head', 'layer', 'model'"),
        ({"lengths": [24, 24, 99]}, "lengths go from 24 to 99, but a row has 1 to 24 tokens"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_work_is_refused(shallow, change, message):
    call = {"continuation": CONTINUATION, "policies": {"window": methods.window}, "lengths": LENGTHS, **change}
    with pytest.raises(ValueError, match=message):
        analysis.curves(*shallow, TOKENS, call.pop("continuation"), call.pop("policies"), BUDGETS, **call)
