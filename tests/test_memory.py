"""Predicted bytes are those of the arrays that a run has."""

import jax
import numpy as np

import kvjax
from kvjax import methods
from kvjax.observe import Reread
from kvjax.run.memory import shown
from tests.table import rows

T, NEW, B = 24, 8, 2
SIZES = {"batch": B, "prompt_len": T, "max_new_tokens": NEW}
QUICK = {
    *("h2o", "ada_snapkv", "snapkv_then_think", "fastgen_pooled", "quest_by_query_head", "partition_heads"),
    *("across_layers_entropy", "attention_matching"),
}


def arrays(x):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(x))


def after_prompt(model, policy, block=None):
    """The state after the prompt, in the abstract."""
    read = lambda p: kvjax.prefill(model, p, np.zeros((B, T), int), policy=policy, max_new_tokens=NEW, block=block)[1]
    return jax.eval_shape(read, model.shapes)


@rows(QUICK, without={"full"})
def test_state_is_predicted_to_the_byte(case, tiny):
    model, _ = tiny
    policy = case.make(case.budget, width=model.config.embed_dim)
    block = 1 if policy.at(0, 3).layout.prompt == "rows" else None
    memory = kvjax.plan_memory(model.config, policy, **SIZES, block=block)
    state = after_prompt(model, policy, block)
    assert memory.layers == arrays(state.layers)
    assert memory.state == arrays(state)


def test_a_prompt_that_is_read_again_is_held_whole_until_then(tiny):
    """In all layers, with what was observed: `cache` is that of the whole model."""
    model, params = tiny
    policy = methods.kvzip(8, Reread((1, 2)))
    memory = kvjax.plan_memory(model.config, policy, **SIZES)
    state = kvjax.prefill(model, params, np.arange(B * T).reshape(B, T) % 50, policy=policy, max_new_tokens=NEW)[1]
    assert memory.state == arrays(state)
    assert memory.cache > 2 * kvjax.plan_memory(model.config, methods.snapkv(8, window=4), **SIZES).cache


def test_a_run_prints_as_a_table(tiny):
    memory = kvjax.plan_memory(tiny[0].config, methods.h2o(8), **SIZES)
    assert f"{memory.run}\nkeys and values" in str(memory)
    assert f"state                         {shown(memory.state)}, " in str(memory)
    sizes = [shown(n) for n in (0, 1023, 1024, 99 << 20, 3 << 40)]
    assert sizes == ["0 B", "1023 B", "1 KiB", "99 MiB", "3072 GiB"]
