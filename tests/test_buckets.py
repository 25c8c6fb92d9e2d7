"""Rounded widths and numbers of tokens: the same results from fewer programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.drivers import generation, streaming
from kvjax.drivers.buckets import bucket, plan_request
from kvjax.drivers.requests import check_block
from kvjax.models import gpt2
from tests import helpers
from tests.methods import one_method

TOKENS, LENGTHS = np.random.default_rng(0).integers(0, 61, (2, 20)), np.array([20, 9])


def test_a_bucket_holds_what_is_put_into_it_and_little_more():
    sizes = np.arange(1, 5000)
    found = np.array([bucket(int(n)) for n in sizes])
    assert (found >= sizes).all()
    assert ((found - sizes < 16) | (found <= 1.25 * sizes)).all()
    assert len(set(found.tolist())) == 29
    assert [bucket(int(n)) for n in found] == found.tolist()


@one_method
def test_rounding_changes_no_result(small, case):
    """Tokens, what the caches keep, and what is drawn, in a padded batch whose rows end by themselves."""
    how = {"lengths": LENGTHS, "policy": case.make(8), "key": jax.random.key(2), "max_new_tokens": 7, "eos_ids": (3,)}
    how |= {"sampler": kvjax.Sample(2.0, repetition_penalty=1.2)}
    exact, rounded = (kvjax.generate(*small, TOKENS, **how, buckets=buckets) for buckets in (False, True))
    np.testing.assert_array_equal(exact.tokens, rounded.tokens)
    np.testing.assert_array_equal(exact.lengths, rounded.lengths)
    assert rounded.state.plan.prompt_len == 32
    for a, b in zip(exact.state.layers, rounded.state.layers, strict=True):
        assert helpers.live_positions(a) == helpers.live_positions(b)


def test_requests_of_about_the_same_size_share_a_program(shallow):
    programs = generation._generate._cache_size, streaming._start._cache_size
    found = []
    for width, steps in ((17, 3), (20, 9), (32, 16)):
        tokens = np.ones((1, width), np.int32)
        result = kvjax.generate(*shallow, tokens, max_new_tokens=steps, eos_ids=())
        assert result.tokens.shape == (1, steps)
        assert result.state.length.tolist() == [width + steps - 1]
        assert len(list(kvjax.stream(*shallow, tokens, max_new_tokens=steps, eos_ids=()))) == steps
        found.append([size() for size in programs])
    assert found[0] == found[1] == found[2]


def test_what_depends_on_the_number_of_tokens_gets_the_number_asked_for(shallow):
    """Keyformer's temperatures end at the last token, unless a step's is given; a function cannot say what it reads."""
    own = kvjax.from_fn(lambda kv, stats, ctx: -kv.pos.astype(jnp.float32), budget=8)
    planned = {
        "h2o": (methods.h2o(8), 16),
        "keyformer": (methods.keyformer(8), 5),
        "fixed step": (methods.keyformer(8, tau_delta=0.1), 16),
        "function": (own, 5),
        "chain": (kvjax.chain(methods.snapkv(8, window_size=2), own), 5),
    }
    for policy, steps in planned.values():
        plan = kvjax.make_plan(shallow[0].config, policy, prompt_len=20, max_new_tokens=5)
        assert any(spec.timed for spec in plan.specs) == (steps == 5)
        rounded, _ = plan_request(shallow[0].config, policy, TOKENS, LENGTHS, 5, buckets=True)
        assert (rounded.prompt_len, rounded.max_new_tokens) == (32, steps)


def test_sizes_are_exact_where_they_are_asked_for_or_there_is_no_room(shallow):
    """Traced prompts, and a model whose positions end."""
    model, params = shallow
    sizes = lambda plan: (plan.prompt_len, plan.max_new_tokens)
    read = lambda tokens: kvjax.generate(model, params, tokens, max_new_tokens=3)
    assert sizes(jax.eval_shape(read, TOKENS).state.plan) == (20, 3)
    limited = gpt2.GPT2Config(61, 32, 48, 1, 4, 2, 8, max_position=24)
    for config, policy, buckets in ((model.config, methods.full(), False), (limited, methods.full(), True)):
        plan, tokens = plan_request(config, policy, TOKENS, LENGTHS, 3, buckets=buckets)
        assert (*sizes(plan), tokens.shape) == (20, 3, (2, 20))
    with pytest.raises(ValueError, match="buckets=1: must be True or False"):
        kvjax.generate(model, params, TOKENS, max_new_tokens=3, buckets=1)


@pytest.mark.parametrize(
    ("policy", "asked", "read"),
    [
        (methods.full(), 7, 7),
        (methods.full(), 25, None),
        (methods.fastgen(special_ids=(), punctuation_ids=()), 20, None),
        (methods.h2o(8, prefill="stepwise_mask"), 1, 1),
    ],
)
def test_a_block_that_holds_a_prompt_holds_its_padding(shallow, policy, asked, read):
    plan, _ = plan_request(shallow[0].config, policy, TOKENS, LENGTHS, 3, buckets=True)
    assert check_block(plan, asked, 20) == read
    assert check_block(plan, read) == read
