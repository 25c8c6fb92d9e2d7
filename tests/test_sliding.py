"""Keys of a sliding window stay as they were rotated: the results are those of rotating all by rank at every step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods, models
from kvjax.cache.state import evict, ranks
from kvjax.models.gemma import GemmaConfig
from kvjax.models.rope import Rope
from kvjax.scoring.select import TopK

STEPS = 40
SIZES = {"vocab_size": 61, "embed_dim": 16, "mlp_dim": 24, "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 8}
CAPPED = GemmaConfig(**SIZES, num_layers=1, generation=2, attention_cap=1.5, sliding_window=(5,))


def planned(model, policy, lengths, width=18, max_new_tokens=STEPS):
    """The plan, and one of the same policy that rotates every key at every step."""
    plan = kvjax.make_plan(
        model.config, policy, prompt_len=width, max_new_tokens=max_new_tokens, lengths=np.array(lengths)
    )
    return plan, dataclasses.replace(plan, positions=("compact",) * len(plan.positions))


def decoded(model, params, plan, lengths, *, change=lambda state: state, block=None, width=18):
    """Logits of all steps and the last state."""
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, 61, (len(lengths), width + STEPS)), jnp.int32)

    @jax.jit
    def run(params, tokens):
        first, state = kvjax.prefill(model, params, tokens[:, :width], plan, lengths=jnp.asarray(lengths), block=block)
        logits, state = kvjax.feed(model, params, tokens[:, width:], change(state))
        return jnp.concatenate([first[:, None], logits], axis=1), state

    return run(params, tokens)


def check(model, params, policy, lengths, atol=2e-5, **options):
    sliding, compact = planned(model, policy, lengths)
    assert sliding.positions == ("sliding",) * len(sliding.positions)
    found, state = decoded(model, params, sliding, lengths, **options)
    wanted, other = decoded(model, params, compact, lengths, **options)
    np.testing.assert_allclose(found, wanted, atol=atol * float(jnp.abs(wanted).max()))
    for kv, same in zip(state.layers, other.layers, strict=True):
        np.testing.assert_array_equal(kv.pos, same.pos)
        np.testing.assert_array_equal(kv.rank, jnp.where(kv.live, ranks(kv.pos), -1))
    return state


def test_sliding_equals_compact(shallow):
    """Prompts longer than the budget, within it, and shorter than the sinks; keys are turned several times."""
    state = check(*shallow, methods.streaming_llm(9, sinks=3), (18, 7, 2))
    lag = jnp.where(state.layers[0].live, state.layers[0].rotated - state.layers[0].rank, 0)
    assert 0 < int(lag.max()) <= 10  # since the last turn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (methods.streaming_llm(9, sinks=0), {}),
        (methods.streaming_llm(0.5, sinks=2), {"block": 7}),
        (kvjax.when(kvjax.every(3), methods.streaming_llm(9, sinks=3)), {}),
        (kvjax.when(kvjax.when_over(2, drop=4), methods.streaming_llm(9, sinks=3)), {}),
        (dataclasses.replace(methods.streaming_llm(9), granularity="query_head"), {}),
    ],
    ids=["no sinks", "blocks", "every 3", "drop 4", "query heads"],
)
def test_every_schedule_slides(shallow, policy, options):
    check(*shallow, policy, (18, 7, 2), **options)


@pytest.mark.slow
def test_a_soft_cap_and_a_window_over_a_sliding_cache():
    model = models.LanguageModel(CAPPED)
    params = jax.tree.map(lambda x: 2 * x, jax.jit(model.init)(jax.random.key(0)))
    check(model, params, methods.streaming_llm(9, sinks=3), (18, 7))


def test_what_a_user_evicts_is_turned(shallow):
    """Tokens that go from the middle move others than the policy does."""

    def forget(state):
        gone = lambda kv: evict(kv, (kv.pos != 1) & (kv.pos != 13) & (kv.pos != 14))
        return dataclasses.replace(state, layers=tuple(map(gone, state.layers)))

    check(*shallow, methods.streaming_llm(9, sinks=3), (18, 7), change=forget)


def test_a_million_tokens_later(shallow):
    """Logits depend on ranks: they are what they would be at the beginning of the text."""
    model, params = shallow
    plan, _ = planned(model, methods.streaming_llm(9, sinks=3), (18,), max_new_tokens=2**20)

    def later(state):
        by = 10**6
        move = lambda kv: dataclasses.replace(kv, pos=jnp.where(kv.pos < 3, kv.pos, kv.pos + by))
        return dataclasses.replace(state, layers=tuple(map(move, state.layers)), length=state.length + by)

    now, _ = decoded(model, params, plan, (18,))
    then, state = decoded(model, params, plan, (18,), change=later)
    assert int(state.length[0]) > 10**6
    np.testing.assert_allclose(then, now, atol=1e-6 * float(jnp.abs(now).max()))


@pytest.mark.parametrize(
    "policy",
    [
        dataclasses.replace(methods.h2o(9), positions="compact"),
        dataclasses.replace(methods.streaming_llm(9), storage="pool"),
        dataclasses.replace(methods.streaming_llm(9), select=TopK("lower_index")),
        kvjax.chain(methods.streaming_llm(12), methods.streaming_llm(9)),
    ],
    ids=["other scores", "pools", "other ties", "chains"],
)
def test_other_structures_do_not_slide(shallow, policy):
    plan, _ = planned(shallow[0], policy, (18,))
    assert plan.positions == ("compact",)


def test_rotations_that_do_not_add_up_do_not_slide(shallow):
    rope = Rope("dynamic", factor=2.0, original_max=16)
    config = dataclasses.replace(shallow[0].config, rope=rope)
    plan, _ = planned(models.LanguageModel(config), methods.streaming_llm(9), (18,))
    assert plan.positions == ("compact",)
