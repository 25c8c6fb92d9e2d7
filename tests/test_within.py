"""Policies that run in the program and the slots of one with a larger budget."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.drivers import generation
from kvjax.scoring.select import TopK
from tests.methods import few_methods

T, NEW, LENGTHS = 24, 5, (24, 17)
TOKENS = np.random.default_rng(0).integers(0, 61, (2, T)).astype(np.int32)


def live(state):
    """The positions that every head of every layer and row holds, in order."""
    pos = [np.asarray(kv.view().pos) for kv in state.layers]
    return [sorted(head[head >= 0].tolist()) for layer in pos for head in layer.reshape(-1, layer.shape[-1])]


APART = {
    **dict.fromkeys(("ahakv", "defensivekv"), "they differ in score"),
    **dict.fromkeys(("fastgen", "fastgen_elementwise", "fastgen_pooled", "fastgen_lossless"), "they differ in FastGen"),
    **dict.fromkeys(("cake", "lava", "layer_defensivekv"), "they differ in Competing"),
    "quest": "they differ in ReadPages",
    "duo_attention": "they differ in ByHead",
}


@few_methods
def test_a_budget_within_another_is_the_budget(tiny, case):
    """For every method but those that the budget reaches in another way too, which say so."""
    model, params = tiny
    small, large = case.make(10), case.make(14)
    read = lambda **how: kvjax.generate(model, params, TOKENS, lengths=LENGTHS, max_new_tokens=NEW, **how)
    if case.name in APART:
        assert live(read(policy=small, within=small).state) == live(read(policy=small).state)
        with pytest.raises(ValueError, match=APART[case.name]):
            kvjax.make_plan(model.config, large, prompt_len=T, max_new_tokens=NEW).sizes(small, LENGTHS)
        return
    found, expected = read(policy=small, within=large), read(policy=small)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert live(found.state) == live(expected.state)
    assert found.state.num_slots >= expected.state.num_slots


def test_a_sweep_compiles_one_program(tiny):
    model, params = tiny
    before = generation._generate._cache_size()
    for budget in (6, 8, 11, 12):
        for seed in range(10):
            policy, within = (methods.nacl(n, protect=2, proxies=4, random=3) for n in (budget, 12))
            how = {"policy": policy, "within": within, "max_new_tokens": 2, "key": jax.random.key(seed)}
            state = kvjax.generate(model, params, TOKENS, **how).state
        assert (state.num_live <= budget + 1).all()
    assert generation._generate._cache_size() == before + 1


def test_rows_of_a_state_keep_their_sizes(tiny):
    model, params = tiny
    plan = kvjax.make_plan(model.config, methods.h2o(14), prompt_len=T, max_new_tokens=NEW)
    sizes = plan.sizes(methods.h2o(0.5), LENGTHS)
    logits, state = kvjax.prefill(model, params, TOKENS, plan, lengths=LENGTHS, sizes=sizes)
    token = jnp.argmax(logits, -1)
    both, _ = kvjax.decode_step(model, params, token, state)
    alone, after = kvjax.decode_step(model, params, token[1:], kvjax.take_rows(state, [1]))
    np.testing.assert_allclose(alone, both[1:], rtol=1e-5, atol=1e-5)
    assert (after.num_live == 8).all()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (methods.tova(8), r"cannot run within a plan for .* they differ in score"),
        (methods.window(8), r"cannot run within a plan for"),
        (
            methods.h2o(15),
            r"keeps 15 tokens in layer 0, but the plan's policy 14 at most; make the plan",
        ),
        (kvjax.chain(methods.h2o(8), methods.h2o(9)), r"cannot run within a plan for"),
        (8, "8 is not a policy"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_run_within_a_plan(tiny, policy, message):
    plan = kvjax.make_plan(tiny[0].config, methods.h2o(14), prompt_len=T, max_new_tokens=NEW)
    with pytest.raises(ValueError, match=message):
        plan.sizes(policy, LENGTHS)


def test_a_larger_budget_is_refused_where_the_slots_would_do(tiny):
    """Slots of adaptive heads end at the prompt's length, but not what is counted for them."""
    adaptive = lambda n: dataclasses.replace(
        methods.h2o(n, recent=1), heads=kvjax.Adaptive(1.0, 4.0), when=kvjax.after_prefill()
    )
    plan = kvjax.make_plan(tiny[0].config, adaptive(12), prompt_len=T, max_new_tokens=NEW)
    with pytest.raises(ValueError, match=r"keeps 16 tokens in layer 0, but the plan's policy 12 at most"):
        plan.sizes(adaptive(16), LENGTHS)


@dataclasses.dataclass(frozen=True)
class Halved(TopK):
    """A selection of a user's own, which resolves a count."""

    by: str = "table"

    def __call__(self, score, safe, slots, limits):
        share = kvjax.Share(0.5)
        half = int(limits.counts.table(share).max()) if self.by == "table" else limits.counts(share)[:, None]
        return super().__call__(score, safe, slots, dataclasses.replace(limits, budgets=limits.budgets * 0 + half))


@pytest.mark.parametrize(("by", "message"), [("table", "is an array and has no table"), ("call", "is not among the")])
def test_counts_that_nobody_lists_are_refused(tiny, by, message):
    model, params = tiny
    make = lambda n: dataclasses.replace(methods.snapkv(n, window_size=2), select=Halved(by=by))
    with pytest.raises(ValueError, match=message):
        kvjax.generate(model, params, TOKENS, policy=make(8), within=make(16), max_new_tokens=1)


@pytest.mark.usefixtures("unchecked")
def test_sizes_are_those_of_the_plan_and_the_rows(tiny):
    model, params = tiny
    plan, other = (
        kvjax.make_plan(model.config, p, prompt_len=T, max_new_tokens=NEW)
        for p in (methods.h2o(14), methods.snapkv(14, window_size=4))
    )
    for sizes in (plan.sizes(methods.h2o(8), LENGTHS[:1]), other.sizes(other.policy, LENGTHS).layers):
        with pytest.raises(ValueError, match=r"sizes are not those of 2 sequences under this plan; give plan.sizes"):
            kvjax.prefill(model, params, TOKENS, plan, lengths=LENGTHS, sizes=sizes)
    with pytest.raises(ValueError, match=r"sizes are those of prompts of \[24, 17\] tokens, but these have \[24, 24\]"):
        kvjax.prefill(model, params, TOKENS, plan, sizes=plan.sizes(methods.h2o(8), LENGTHS))


def test_traced_lengths_have_no_sizes(tiny):
    model, params = tiny
    read = lambda n: kvjax.generate(
        model, params, TOKENS, lengths=n, max_new_tokens=1, policy=methods.h2o(8), within=methods.h2o(9)
    )
    with pytest.raises(ValueError, match="lengths are traced, but a policy within another needs them known"):
        jax.eval_shape(read, jax.ShapeDtypeStruct((2,), jnp.int32))
