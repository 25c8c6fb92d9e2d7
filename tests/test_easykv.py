"""EasyKV's modes: sizes, scopes and protection in each phase, against the arithmetic of its code."""

import inspect
import itertools

import jax
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.methods.easykv import BlockSizes, block_sizes
from kvjax.scoring.scores import Accumulated, Mean
from kvjax.scoring.stats import Observe, RowsFrom
from tests import helpers
from tests.helpers import live_positions


def tables(policy, n):
    """(budget, sinks, recent, scope, scope while decoding) of a prompt of n tokens."""
    length = np.array([n])
    budget = kvjax.sizes.budget.as_budget(policy.budget).table(length, length)
    sinks, recent = helpers.protected_counts(policy.protect, length, budget)
    count = lambda x: None if x is None else int(kvjax.sizes.budget.as_count(x, "size").table(length, budget)[0])
    scope = policy.scope
    return (
        int(budget[0]),
        int(sinks[0]),
        int(recent[0]),
        count(getattr(scope, "size", None)),
        count(getattr(scope, "decode_size", None)),
    )


@pytest.mark.parametrize("stride", [1, 4, 24])
@pytest.mark.parametrize("rounding", ["exact", "easykv"])
@pytest.mark.parametrize("mode", ["encoding", "encoding_decoding"])
def test_roco_leaves_as_many_feasible_as_the_code(stride, rounding, mode):
    n, nominal = 501, 100
    padded = nominal + stride
    final = block_sizes(n, nominal, stride, "encoding").final if rounding == "easykv" else nominal
    policy = methods.easykv("roco", nominal, mode=mode, stride=stride, rounding=rounding)
    budget, sinks, recent, scope, decode_scope = tables(policy, n)
    assert (budget, sinks, recent) == (final, 4 if mode == "encoding" else 0, 10)
    feasible = max(padded - int(0.1 * padded) - 4, stride)
    assert final + stride - scope == feasible
    if mode == "encoding_decoding":
        assert final + 1 - decode_scope == min(padded - int(0.3 * padded), final + 1)
        assert policy.scope.prompt_sinks == 4
    else:
        assert decode_scope is None


@pytest.mark.parametrize("mode", ["encoding", "ppl"])
def test_block_sizes_are_positive_and_make_up_the_prompt(mode):
    """All small combinations, and one in which the released code's dense prefix is negative."""
    assert block_sizes(346, 21, 80, "encoding") == BlockSizes(21, 101, 26, 26)
    for n, budget, stride in itertools.product(range(1, 25), range(26), range(8)):
        if budget < 1 or stride < 1:
            with pytest.raises(ValueError, match="at least 1"):
                block_sizes(n, budget, stride, mode)
            continue
        final = max(c for c in range(1, budget + stride + 1) if (n - c) % stride == 0)
        if final > n:
            with pytest.raises(ValueError, match="read it whole"):
                block_sizes(n, budget, stride, mode)
            continue
        sizes = block_sizes(n, budget, stride, mode)
        assert (sizes.final, sizes.padded) == (final, budget + stride)
        assert sizes.dense_prefix in range(1, final + 1)
        assert (n - sizes.dense_prefix) % stride == 0


def test_decoding_keeps_the_prompt_outside_the_budget():
    assert tables(methods.easykv("roco", 50, mode="decoding"), 100) == (150, 100, 10, 116, None)
    assert tables(methods.easykv("h2o", 50, mode="decoding"), 100)[:3] == (150, 100, 15)
    assert tables(methods.easykv("roco", 0.5, mode="decoding"), 100) == (150, 100, 10, 116, None)
    assert methods.easykv("tova", 50, mode="decoding").score.head_mode == "per_kv_head"
    assert methods.easykv("tova", 50, mode="encoding").score.head_mode == "layer_mean"


def test_rows_of_the_first_tokens_count_for_no_importance_that_sums():
    make = lambda importance, **how: methods.easykv(importance, 24, mode="encoding", stride=4, prefix=26, **how).score
    assert make("h2o") == Accumulated(Observe(RowsFrom(26)))
    assert make("mas") == make("roco") == Mean(ignore_prefix=26)
    assert make("h2o", keep_attention=True) == Accumulated()


def test_auto():
    auto = lambda budget, n: methods.easykv("mas", budget, mode="auto", prompt_length=n)
    assert auto(120, 100) == methods.easykv("mas", 20, mode="decoding")
    assert auto(100, 100) == methods.easykv("mas", 100, mode="encoding_decoding")
    assert auto(0.5, 100) == methods.easykv("mas", 0.5, mode="encoding_decoding")


@pytest.mark.parametrize(
    "importance",
    ["roco", "recency", *(pytest.param(i, marks=pytest.mark.slow) for i in ("mas", "h2o", "tova", "random"))],
)
def test_a_prompt_read_in_blocks_ends_at_the_size_of_the_code(shallow, importance):
    """E12's rounding end to end; sinks stay while the prompt is read, and need not afterwards."""
    model, params = shallow
    n, nominal, stride = 41, 20, 6
    tokens = np.random.default_rng(4).integers(0, 61, (2, n))
    final = block_sizes(n, nominal, stride, "encoding").final
    assert final == 23
    policy = methods.easykv(importance, nominal, mode="encoding_decoding", stride=stride, rounding="easykv")
    plan = kvjax.make_plan(model.config, policy, prompt_len=n, max_new_tokens=25)
    logits, state = jax.jit(lambda t: kvjax.prefill(model, params, t, plan, block=stride))(tokens)
    for layer in state.layers:
        np.testing.assert_array_equal(layer.num_live, final)
        assert all({0, 1, 2, 3} <= set(head) for row in live_positions(layer) for head in row)
    after = jax.jit(lambda s, t: kvjax.feed(model, params, t, s)[1])(state, tokens[:, :25])
    for layer in after.layers:
        np.testing.assert_array_equal(layer.num_live, final)
    if importance == "recency":
        assert min(p for layer in after.layers for row in live_positions(layer) for head in row for p in head) == n + 2
    assert np.isfinite(logits).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"importance": "aas", "mode": "encoding"}, r"importance='aas' is not one of \('roco'"),
        ({"mode": "greedy"}, r"mode='greedy' is not one of \('encoding'"),
        ({"mode": "encoding", "rounding": "up"}, r"rounding='up' is not one of \('exact', 'easykv'\)"),
        ({"mode": "encoding", "stride": 0}, "stride=0: a block has at least 1 token"),
        ({"mode": "auto"}, "give prompt_length="),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(methods.easykv)(**{"importance": "roco", "budget": 20, **options})
