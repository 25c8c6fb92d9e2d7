"""One prefill, every policy: applied to a prompt that was read without it, each keeps what its own prefill keeps."""

import jax
import numpy as np
import pytest

from kvjax import decode_step, forward, prefill, start
from kvjax.analysis.reading import Stored, stored_as
from tests import table

pytestmark = pytest.mark.usefixtures("as_users_run_it")

MECHANISMS = (  # memory, heads in a pool, places, noise, merging, layers that compete, heads apart
    *("h2o", "ada_half", "streaming_llm", "keyformer", "kvpress_cam", "across_layers_entropy", "partition_heads"),
    *("snapkv_then_think", "quest_by_query_head"),
)
T, F, LENGTHS = 24, 4, np.array([24, 17], np.int32)
TOKENS = np.random.default_rng(0).integers(1, 61, (2, T)).astype(np.int32)


def test_equal_to_a_prefill_of_its_own(tiny):
    (model, params), c = tiny, tiny[0].config
    cases = {name: table.Case(name) for name in MECHANISMS}
    policies = {name: case.make(case.budget, width=c.embed_dim) for name, case in cases.items()}
    how = {"lengths": LENGTHS, "max_new_tokens": F, "key": jax.random.key(5)}
    kinds = {}
    for name, policy in policies.items():
        kinds.setdefault(stored_as(policy, c.num_layers), []).append(name)
    for layouts, members in kinds.items():
        empty = start(model, policy=Stored(layouts), **how)
        observe = tuple(policies[name] for name in members)
        whole = forward(model, params, TOKENS, empty, valid=LENGTHS, observe=observe)
        for name in members:
            logits, own = prefill(model, params, TOKENS, policy=policies[name], **how)
            state = policies[name](*whole[1:])
            np.testing.assert_allclose(whole[0], logits, rtol=1e-5, atol=1e-4, err_msg=name)
            for i, (one, other) in enumerate(zip(state.layers, own.layers, strict=True)):
                np.testing.assert_array_equal(one.head_pos, other.head_pos, err_msg=f"{name}, layer {i}")
            token = np.asarray(logits.argmax(-1))
            found, wanted = (decode_step(model, params, token, x)[0] for x in (state, own))
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4, err_msg=name)
