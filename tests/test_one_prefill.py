"""One prefill, every policy: each keeps what a prefill of its own keeps."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax import analysis, decode_step, methods, prefill, prefill_each
from kvjax.contract import Reads, Score
from kvjax.methods.released import papers
from kvjax.run import forward as reading
from kvjax.run import prefill_each as reading_each
from tests import table

pytestmark = pytest.mark.usefixtures("as_users_run_it")

SHARED = (  # memory, heads in a pool, places, noise, merging, layers that compete, heads apart
    *("h2o", "ada_half", "streaming_llm", "keyformer", "kvpress_cam", "across_layers_entropy", "partition_heads"),
    *("snapkv_then_think", "quest_by_query_head"),
)
T, F, LENGTHS = 24, 4, np.array([24, 17], np.int32)
TOKENS = np.random.default_rng(0).integers(1, 61, (2, T)).astype(np.int32)
HOW = {"lengths": LENGTHS, "max_new_tokens": F, "key": jax.random.key(5)}


class EveryThird(kvjax.Policy):
    """A policy that lets rows read the tokens of every third position alone."""

    def reads(self, kv, inputs, ctx):
        return Reads(kv.pos % 3 == 0)


class Learned(Score):
    """A score whose parameters are learned."""

    def init_params(self, info, key):
        return jax.random.normal(key, (info.num_kv_heads,))

    def __call__(self, slots):
        return slots.kv.pos * slots.params[None, :, None]


@pytest.mark.slow
def test_equal_to_a_prefill_of_its_own(tiny, monkeypatch):
    """Of every mechanism, in a pass for each way to store the prompt or to read it again; one reads by itself."""
    (model, params), c = tiny, tiny[0].config
    cases = {name: table.Case(name) for name in SHARED}
    policies = {name: case.make(case.budget, width=c.embed_dim) for name, case in cases.items()}
    policies |= {"again": methods.kvzip(8), "again at 12": methods.kvzip(12), "hides": EveryThird()}
    passes, forward = [], reading.forward
    monkeypatch.setattr(reading_each, "forward", lambda *a, **k: passes.append(0) or forward(*a, **k))
    found = {name: (logits, state) for name, logits, state in prefill_each(model, params, TOKENS, policies, **HOW)}
    assert found.keys() == policies.keys()
    ways = {reading_each.stored_as(policy, c.num_layers) for policy in policies.values()}
    assert len(passes) == len(ways) == 3
    for name, (logits, state) in found.items():
        wanted, own = prefill(model, params, TOKENS, policy=policies[name], **HOW)
        np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-4, err_msg=name)
        for i, (one, other) in enumerate(zip(state.layers, own.layers, strict=True)):
            np.testing.assert_array_equal(one.head_pos, other.head_pos, err_msg=f"{name}, layer {i}")
        token = np.asarray(logits.argmax(-1))
        after, wanted = (decode_step(model, params, token, x)[0] for x in (state, own))
        np.testing.assert_allclose(after, wanted, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({}, "give policies by name"),
        ({"snap": methods.snapkv(4, window=8)}, "^snap: "),
        ({"learned": kvjax.Evict(Learned(), 12)}, "^learned: the policy has learned parameters"),
        ({"mask": papers.h2o_stepwise_mask(8, recent=3)}, "^mask: "),
    ],
)
def test_what_cannot_run_is_refused_before_anything_does(tiny, policies, message):
    with pytest.raises(ValueError, match=message):
        prefill_each(*tiny, TOKENS, policies, **HOW)


@pytest.mark.parametrize(
    "call",
    [
        lambda m, p, x: [after for *_, after in prefill_each(m, p, x, {"again": methods.kvzip(8)}, max_new_tokens=F)],
        lambda m, p, x: prefill(m, p, x, policy=methods.kvzip(8), max_new_tokens=F),
        lambda m, p, x: analysis.read(m, p, x, x[:, :F], policies=(methods.kvzip(8),)),
    ],
)
def test_a_prompt_that_is_read_again_must_be_known(tiny, call):
    with pytest.raises(ValueError, match="needs known prompts; read them outside of jit"):
        jax.jit(lambda tokens: call(*tiny, tokens))(TOKENS)


def test_one_row_and_all_rows_are_two_observations(tiny):
    """The newest row (1) and a share of all (1.0) are equal numbers, and were one observation."""
    policies = {"newest": methods.tova(8), "all": methods.nacl(8, recent=0, proxies=1.0)}
    for name, _, state in prefill_each(*tiny, TOKENS, policies, **HOW):
        _, own = prefill(*tiny, TOKENS, policy=policies[name], **HOW)
        for one, other in zip(state.layers, own.layers, strict=True):
            np.testing.assert_array_equal(one.head_pos, other.head_pos, err_msg=name)
