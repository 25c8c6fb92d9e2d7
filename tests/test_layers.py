"""One pass of a model over new tokens: logits say where what is kept is no choice."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.budgets import HeadShares
from kvjax.compose import across
from kvjax.contract import Layout
from tests import tensors
from tests.marks import slow_but

T, LENGTHS = 24, np.array([24, 17], np.int32)
IDS = np.asarray(tensors.token_ids(2, T))


def _no_number(kv, stats, ctx):
    """The scores of sequences with more than 20 tokens are no numbers."""
    return jnp.where(ctx.length[:, None, None] > 20, jnp.nan, kv.pos.astype(jnp.float32))


UNSCORED = kvjax.from_fn(_no_number, 8, sinks=2)
MESSAGE = r"Function gives no token a score that is a number \(NaN in layer 0, in 2 of 4 kv heads of the batch\)"


def read(small, policy, decodes=0):
    """Logits of two prompts, and of tokens that follow."""
    model, params = small
    how = {"policy": policy, "max_new_tokens": 2, "lengths": LENGTHS}

    def run(params):
        logits, state = kvjax.prefill(model, params, jnp.asarray(IDS), **how)
        every = [logits]
        for _ in range(decodes):
            logits, state = kvjax.decode_step(model, params, jnp.zeros((2,), jnp.int32), state)
            every.append(logits)
        return jnp.stack(every)

    return run(params) if not decodes else jax.jit(run)(params)


def test_scores_that_are_no_numbers_are_refused_and_under_jit_their_logits_are_none(shallow):
    with pytest.raises(ValueError, match=MESSAGE):
        read(shallow, UNSCORED)
    logits = read(shallow, UNSCORED, decodes=2)
    assert np.isnan(logits[:, 0]).all()
    assert not np.isnan(logits[:, 1]).any()


def test_the_door_says_so_too(shallow):
    model, params = shallow
    state = kvjax.start(model, policy=UNSCORED, lengths=LENGTHS, max_new_tokens=1)
    with pytest.raises(ValueError, match=MESSAGE):
        kvjax.forward(model, params, IDS, state, valid=LENGTHS, evict=True)
    _, state, stats = kvjax.forward(model, params, IDS, state, valid=LENGTHS)
    with pytest.raises(ValueError, match=MESSAGE):
        UNSCORED(state, stats)
    applied = jax.jit(UNSCORED)(state, stats)
    logits, *_ = kvjax.forward(model, params, IDS[:, :1], applied)
    np.testing.assert_array_equal(np.isnan(logits).any(-1), [True, False])


def test_layers_that_share_a_decision_share_the_mark(tiny):
    logits = read(tiny, kvjax.shared_layers(UNSCORED), decodes=1)
    np.testing.assert_array_equal(np.isnan(logits).any(-1), [[True, False]] * 2)


@pytest.mark.parametrize("pool", slow_but([False, True], True))
def test_a_fault_stays_with_its_sequence_in_every_storage_and_file(shallow, tmp_path, pool):
    """Of sequences that are taken, and of a state that is read back; no position is written over."""
    policy = dataclasses.replace(UNSCORED, layout=Layout(pool=pool))
    how = {"policy": policy, "max_new_tokens": 2, "lengths": LENGTHS}
    _, state = jax.jit(lambda params: kvjax.prefill(shallow[0], params, IDS, **how))(shallow[1])
    assert all(kv.head_pos.max() < T for kv in state.layers)
    step = jax.jit(lambda params, state: kvjax.decode_step(shallow[0], params, jnp.zeros((3,), jnp.int32), state)[0])
    logits = step(shallow[1], state[np.array([1, 0, 1])])
    np.testing.assert_array_equal(np.isnan(logits).any(-1), [False, True, False])
    kvjax.save_state(tmp_path / "state", *shallow, state, policy=policy)
    found = kvjax.load_state(tmp_path / "state", *shallow, policy=policy)
    with pytest.raises(ValueError, match=MESSAGE):
        kvjax.decode_step(*shallow, np.zeros(2, np.int32), found)


def test_a_fault_of_a_block_stays_when_later_blocks_have_numbers(shallow):
    first = lambda kv, stats, ctx: jnp.where(ctx.length[:, None, None] == 12, jnp.nan, kv.pos.astype(jnp.float32))
    how = {"policy": kvjax.from_fn(first, 8), "max_new_tokens": 1, "block": 4}
    with pytest.raises(ValueError, match="gives no token a score that is a number"):
        kvjax.prefill(*shallow, IDS, **how)


def _one_head(kv, stats, ctx):
    """No number in the last head."""
    return jnp.where(jnp.arange(kv.pos.shape[1])[None, :, None] == 1, jnp.nan, kv.pos.astype(jnp.float32))


def _one_layer(kv, stats, ctx):
    """No number in layer 1."""
    return jnp.where(ctx.layer == 1, jnp.nan, kv.pos.astype(jnp.float32))


HEAD, LAYER = kvjax.from_fn(_one_head, 8), kvjax.from_fn(_one_layer, 8, recent=2)
IN_ONE_HEAD = r"Function gives no token .* \(NaN in layer 0, in 2 of 4 kv heads of the batch\)"
IN_ONE_LAYER = r"Function gives no token .* \(NaN in layer 1, in 4 of 4 kv heads of the batch\)"


@pytest.mark.parametrize(
    "heads", slow_but([None, kvjax.Adaptive(1.0), kvjax.Adaptive(0.5), HeadShares(((1.0, 3.0),))], None)
)
def test_a_head_without_numbers_is_named_however_its_budget_is_divided(heads):
    """Even where it got no budget, which its scores decided. Whatever is kept whole needs no score."""
    policy, arrays = dataclasses.replace(HEAD, heads=heads), tensors.qkv(3, T=16)
    with pytest.raises(ValueError, match=IN_ONE_HEAD):
        kvjax.evict_layer(policy, *arrays)
    assert kvjax.evict_layer(policy, *(x[:, :, :8] for x in arrays)).live.all()


@pytest.mark.slow
@pytest.mark.parametrize("by", [across.ScoreEntropy(), across.by_top_scores])
def test_a_layer_that_loses_to_others_by_no_number_is_named(by, tiny):
    model, params = tiny
    heads = kvjax.Adaptive(1.0) if by is across.by_top_scores else None
    policy = kvjax.across_layers(dataclasses.replace(LAYER, heads=heads), by)
    with pytest.raises(ValueError, match=IN_ONE_LAYER):
        kvjax.generate(model, params, IDS, policy=policy, max_new_tokens=1)


def test_a_score_that_decides_nothing_need_be_no_number():
    """That of a head that is under another policy, or whose budget is all protected."""
    for policy in (
        kvjax.partition_heads({"a": HEAD, "b": methods.window(8)}, [["a", "b"]]),
        dataclasses.replace(HEAD, sinks=2, recent=6),
    ):
        assert (kvjax.evict_layer(policy, *tensors.qkv(3, T=16)).num_live == 8).all()


def test_what_has_no_number_goes_first():
    """Of three candidates one has none; among these the newest stay."""
    third = lambda kv, stats, ctx: jnp.where(kv.pos % 3 == 1, jnp.nan, kv.pos.astype(jnp.float32))
    kv = kvjax.evict_layer(kvjax.from_fn(third, 18), *tensors.qkv(3, T=24, B=1))
    others = [i for i in range(24) if i % 3 != 1]
    assert np.flatnonzero(kv.live[0, 0]).tolist() == sorted([*others, 19, 22])
