"""Predicted bytes are those of the arrays that a run has."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax import methods
from kvjax.memory import shown
from tests.methods import every_method

T, NEW, BUDGET, B = 24, 8, 10, 2


def sizes(state):
    """Bytes of a state's layers, and of what it has beside them."""
    total = lambda x: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(x))
    return [total(kv) for kv in state.layers], total(state) - total(state.layers)


def after_prompt(model, plan, batch=B, block=None):
    """The state after the prompt, in the abstract."""
    tokens = jax.ShapeDtypeStruct((batch, T), jnp.int32)
    return jax.eval_shape(lambda p, t: kvjax.prefill(model, p, t, plan, block=block)[1], model.shapes, tokens)


@every_method
def test_state_is_predicted_to_the_byte(case, small):
    model, _ = small
    plan = kvjax.make_plan(model.config, case.make(BUDGET), prompt_len=T, max_new_tokens=NEW)
    memory, state = plan.memory(B), after_prompt(model, plan)
    assert ([layer.total for layer in memory.layers], memory.sequences) == sizes(state)
    assert memory.kv == state.kv_bytes


def test_what_is_stored_or_read_otherwise_is_predicted_too(shallow):
    model, _ = shallow
    plan = lambda policy: kvjax.make_plan(model.config, policy, prompt_len=T, max_new_tokens=NEW)
    heads = plan(dataclasses.replace(methods.h2o(BUDGET), granularity="query_head"))
    assert heads.memory().kv == 2 * plan(methods.h2o(BUDGET)).memory().kv  # 4 query heads to 2 kv heads
    mixed = kvjax.partition_heads({"all": methods.full(), "few": methods.window(BUDGET)}, [["all", "few"]])
    for policy in (heads.policy, mixed):
        here = plan(policy)
        layers, rest = sizes(after_prompt(model, here, block=8))
        assert here.memory(B, block=8).state == sum(layers) + rest


def test_a_prompt_that_is_read_again_needs_all_layers_and_one_once_more(tiny):
    """More rows that repeat it at once need more, down to what reading it needs in any case."""
    config = tiny[0].config

    def predicted(chunk):
        policy = methods.kvzip(BUDGET, repeat=(1,), repeat_next=(2,), chunk=chunk, overlap=2, sinks=1)
        return kvjax.make_plan(config, policy, prompt_len=256, max_new_tokens=NEW).memory(B).prefill

    read = kvjax.make_plan(config, methods.full(), prompt_len=256, max_new_tokens=NEW).memory(B).prefill
    assert predicted(256).cache >= (config.num_layers + 1) * read.cache
    assert read.total < predicted(16).total < predicted(256).total


def test_the_full_cache_is_what_others_are_compared_to(shallow):
    model, _ = shallow
    plan = kvjax.make_plan(model.config, methods.full(), prompt_len=T, max_new_tokens=NEW)
    assert plan.memory(B).state == plan.memory(B).full == plan.memory(B, dtype=jnp.float32).full
    half = plan.memory(B, dtype=jnp.bfloat16)
    assert half.kv * 2 == plan.memory(B).kv
    assert plan.memory(B, block=8).prefill.total < plan.memory(B).prefill.total
    assert plan.memory(B, block=T) == plan.memory(B)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch=0: must be a whole number of at least 1"),
        ({"batch": 10**12}, "batch=1000000000000: must be a whole number .* at most 2,147,483,647"),
        ({"dtype": jnp.int8}, "dtype=.*: must be a dtype of floats"),
        ({"block": 0}, "block=0: must be a whole number of at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(shallow, options, message):
    plan = kvjax.make_plan(shallow[0].config, methods.full(), prompt_len=T, max_new_tokens=NEW)
    with pytest.raises(ValueError, match=message):
        plan.memory(**options)


def test_prints_as_a_table(shallow):
    config = shallow[0].config
    plan = kvjax.make_plan(config, methods.h2o(BUDGET), prompt_len=T, max_new_tokens=NEW)
    text = str(plan.memory(B))
    for line in ("2 x (24 + 8) tokens, float32", "keys and values", "policy", "peak while reading, about"):
        assert line in text
    assert [shown(n) for n in (0, 1023, 1024, 10 * 2**20, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "10 MiB",
        "3072 GiB",
    ]
