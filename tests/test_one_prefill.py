"""One prefill, every policy: applied to a prompt that was read without it, each keeps what its own prefill keeps."""

import jax
import numpy as np
import pytest

from kvjax import decode_step, forward, prefill, start
from kvjax.analysis.reading import Stored, stored_as
from tests import kept
from tests.cases import CASES, Sizes

pytestmark = pytest.mark.usefixtures("as_users_run_it")

QUICK = (  # distinct mechanisms: memory, heads in a pool, places, noise, merging, layers that compete, heads apart
    *("h2o", "ada_half", "streaming_llm", "keyformer", "kvpress_cam", "across_layers_entropy", "partition_heads"),
    *("snapkv_then_think", "quest_by_query_head"),
)
RECORDED = kept.recorded("raw")  # of every case, at the budgets that it takes
REST = tuple(name for name in CASES if name not in QUICK)
SLOW = [pytest.param(REST[i::12], marks=pytest.mark.exhaustive, id=f"rest{i}") for i in range(12)]
T, F, LENGTHS = 24, 4, np.array([24, 17], np.int32)
TOKENS = np.random.default_rng(0).integers(1, 61, (2, T)).astype(np.int32)


@pytest.mark.parametrize("names", [pytest.param(QUICK, id="quick"), *SLOW])
def test_equal_to_a_prefill_of_its_own(names, tiny):
    model, params = tiny
    c, key = model.config, jax.random.key(5)
    sizes = Sizes(c.num_layers, c.num_query_heads, c.num_kv_heads, c.head_dim, c.embed_dim)
    policies = {name: CASES[name](10 if "10" in RECORDED[name] else 0.5, sizes) for name in names}
    how = {"lengths": LENGTHS, "max_new_tokens": F, "key": key}
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
