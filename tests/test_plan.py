"""Plans: what they say of a run, runs under the plan of a larger budget, and what does not fit one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods, models
from kvjax.generation import generate as generating
from kvjax.generation import loop
from kvjax.models import gpt2
from kvjax.run import layers
from kvjax.run.plan import bucket
from tests import table
from tests.tensors import live_positions

T, NEW, LENGTHS = 24, 5, np.array([24, 17], np.int32)
TOKENS = np.random.default_rng(0).integers(0, 61, (2, T)).astype(np.int32)


@pytest.fixture(scope="module")
def planned(tiny):
    return lambda policy, lengths=(T,), n=T, new=NEW: kvjax.make_plan(tiny[0].config, policy, np.array(lengths), n, new)


@pytest.mark.slow
@table.rows(table.FEW, without=table.NO_BUDGET)
def test_a_budget_under_the_plan_of_a_larger_one_is_the_budget(case, tiny):
    if case.budget != 10:
        pytest.skip("it takes shares alone")
    large, policy = (case.make(n, width=tiny[0].config.embed_dim) for n in (14, case.budget))
    plan = kvjax.make_plan(tiny[0].config, large, LENGTHS, T, NEW)
    read = functools.partial(kvjax.generate, *tiny, TOKENS, policy=policy, lengths=LENGTHS, max_new_tokens=NEW)
    wanted = read(buckets=False)
    if plan.layers != wanted.state.plan.layers:  # the budget is a number of what is observed, so a program of its own
        with pytest.raises(ValueError, match="that of another policy or another run"):
            read(plan=plan, buckets=False)
        return
    found = read(plan=plan, buckets=False)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    for one, other in zip(found.state.layers, wanted.state.layers, strict=True):
        assert live_positions(one) == live_positions(other)


def test_a_sweep_compiles_one_program(shallow):
    make = lambda n: methods.nacl(n, recent=2, proxies=4, random=3)
    plan, sizes = kvjax.make_plan(shallow[0].config, make(12), [T, T], T, 2), set()
    for budget in (6, 8, 11, 12):
        how = {"policy": make(budget), "plan": plan, "max_new_tokens": 2, "key": jax.random.key(budget)}
        state = kvjax.generate(*shallow, TOKENS, **how, buckets=False).state
        assert (state.layers[0].num_live <= budget + 1).all()
        sizes.add((layers.layer_step._cache_size(), loop._decoded._cache_size()))
    assert len(sizes) == 1


def test_prompts_of_other_widths_share_all_but_their_layers(shallow):
    programs, sizes = (layers.layer_step, loop._begun, loop._decoded, generating._joined), []
    for width in (20, 40, 60):
        tokens = np.full((1, width), 7)
        found = kvjax.generate(*shallow, tokens, policy=methods.snapkv(8, window=4), max_new_tokens=2)
        assert found.state.plan.infos[0].prompt_len == bucket(width)
        sizes.append([program._cache_size() for program in programs])
    assert np.diff(sizes, axis=0).tolist() == [[1, 0, 0, 0]] * 2


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (methods.tova(8), "the plan is that of another policy or another run: fields other than budgets"),
        (kvjax.chain(methods.h2o(8), methods.h2o(9)), "the plan is that of another policy"),
        (methods.h2o(16), "layer 0 needs 17 slots, but the plan has 16; make the plan from the largest budget"),
    ],
)
def test_what_cannot_run_under_a_plan(tiny, planned, policy, message):
    with pytest.raises(ValueError, match=message):
        kvjax.generate(*tiny, TOKENS, policy=policy, plan=planned(methods.h2o(14)), max_new_tokens=NEW, buckets=False)


def test_a_plan_says_slots(planned):
    """Multiples of 8; where layers differ in them, of 16; a pyramid has the total of equal parts."""
    policy = methods.pyramidkv(8, beta=4.0, window=2)
    plan = planned(policy, [40], 40)
    sizes = [policy.sizes(info, np.array([40])) for info in plan.infos]
    budgets = [int(s.hparams.budget[0]) for s in sizes]
    assert sum(budgets) == 3 * 8
    assert budgets[0] > budgets[-1]
    assert [int(s.per_head[0]) for s in sizes] == [n + NEW for n in budgets]
    assert plan.capacities == tuple(-(-(n + NEW) // 16) * 16 for n in budgets)
    assert planned(methods.h2o(8)).capacities == (16,) * 3


@pytest.mark.slow
def test_a_prompt_that_is_too_short_for_its_share_needs_slots_for_all_its_tokens(planned, shallow):
    """While decoding, such a row keeps as many tokens as its prompt had."""
    policy, lengths = methods.h2o(0.25, recent=8), np.array([40, 20, 3])
    capacity = lambda lengths: planned(policy, lengths, 40, 2).capacities
    assert capacity([40]) == (16,) * 3
    assert capacity(lengths) == (24,) * 3
    tokens = np.ones((3, 40), np.int32)
    _, state = kvjax.prefill(*shallow, tokens, policy=policy, lengths=lengths, max_new_tokens=2)
    np.testing.assert_array_equal(kvjax.feed(*shallow, tokens[:, :2], state)[1].layers[0].num_live[:, 0], [10, 20, 5])


def test_slots_that_do_not_fit_are_never_dropped_silently(tiny):
    """A pyramid gives a short prompt's upper layers more than a long one's."""
    model, params = tiny
    policy = methods.pyramidkv(20, beta=20.0, window=2)
    plan, tokens = kvjax.make_plan(model.config, policy, [40], 40, 0), np.ones((2, 40), np.int32)
    read = lambda params, lengths: kvjax.prefill(
        model, params, tokens, policy=policy, plan=plan, lengths=lengths, max_new_tokens=0
    )[0]
    with pytest.raises(ValueError, match=r"layer 2 needs \d+ slots, but the plan has 16"):
        read(params, [40, 19])
    logits = jax.jit(read)(params, jnp.asarray([40, 19]))
    assert np.isnan(logits).any(-1).tolist() == [False, True]


@pytest.mark.slow
def test_rows_of_a_state_keep_their_sizes(shallow):
    plan = kvjax.make_plan(shallow[0].config, methods.h2o(14), [T, T], T, NEW)
    how = {"policy": methods.h2o(0.5), "plan": plan, "lengths": LENGTHS, "max_new_tokens": NEW}
    logits, state = kvjax.prefill(*shallow, TOKENS, **how)
    token = np.asarray(logits.argmax(-1))
    both, _ = kvjax.decode_step(*shallow, token, state)
    alone, after = kvjax.decode_step(*shallow, token[1:], state[[1]])
    np.testing.assert_allclose(alone, both[1:], rtol=1e-5, atol=1e-5)
    assert (after.layers[0].num_live == 8).all()


# ------------------------------------------------------------------------------------------------ rounded sizes


@table.rows(table.FEW, smoke={"h2o"})
def test_rounding_changes_no_result(case, tiny):
    """Tokens, what the caches keep, and what is drawn, in a padded batch whose rows end by themselves."""
    how = {"lengths": np.array([20, 9]), "key": jax.random.key(2), "max_new_tokens": 7, "eos_ids": (3,)}
    policy = case.make(case.budget, width=tiny[0].config.embed_dim)
    how |= {"sampler": kvjax.Sample(2.0, repetition_penalty=1.2), "policy": policy}
    exact, rounded = (kvjax.generate(*tiny, TOKENS[:, :20], **how, buckets=x) for x in (False, True))
    np.testing.assert_array_equal(exact.tokens, rounded.tokens)
    np.testing.assert_array_equal(exact.lengths, rounded.lengths)
    assert rounded.state.plan.infos[0].prompt_len == 32
    for one, other in zip(exact.state.layers, rounded.state.layers, strict=True):
        assert live_positions(one) == live_positions(other)


@pytest.mark.slow
def test_rounded_sizes_may_end_beyond_learned_positions():
    """What was asked for does not, and padding has none."""
    model = models.LanguageModel(gpt2.GPT2Config(61, 32, 48, 1, 4, 4, 8, max_position=24))
    params, how = jax.jit(model.init)(jax.random.key(0)), {"max_new_tokens": 4, "lengths": [20, 9]}
    exact, rounded = (kvjax.generate(model, params, TOKENS[:, :20], buckets=x, **how) for x in (False, True))
    np.testing.assert_array_equal(exact.tokens, rounded.tokens)


FITTED = {"lava", "ada_snapkv", "h2o_pooled", "keyformer"}


@table.rows(FITTED)
def test_a_state_that_is_fitted_goes_on_as_it_was(case, tiny):
    """With the slots alone that its tokens need and those to come, after the prompt and in the midst of decoding.

    Its pages are those of which a head holds a token.
    """
    policy = case.make(case.budget, width=tiny[0].config.embed_dim)
    how = {"policy": policy, "lengths": LENGTHS, "max_new_tokens": 48}
    logits, state = kvjax.prefill(*tiny, TOKENS, **how)
    fitted = state.fit()
    for one, other in zip(fitted.layers, state.layers, strict=True):
        assert live_positions(one) == live_positions(other)
        assert one.nbytes <= other.nbytes
    wanted, found = (kvjax.generate_from(*tiny, logits, s, max_new_tokens=32) for s in (state, fitted))
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    held = [[{p // 4 for head in row for p in head} for row in live_positions(kv)] for kv in found.state.layers]
    np.testing.assert_array_equal(found.state.pages(4), np.array([[*map(len, layer)] for layer in held]).T)
    again = found.state.fit()
    assert again.plan.num_slots <= fitted.plan.num_slots <= state.plan.num_slots
    for one, other in zip(again.layers, wanted.state.layers, strict=True):
        assert live_positions(one) == live_positions(other)


def test_layers_that_compete_are_fitted_to_what_they_won(tiny, tmp_path):
    logits, state = kvjax.prefill(*tiny, np.tile(TOKENS, 8), policy=methods.lava(40, window=8), max_new_tokens=2)
    fitted, policy = state.fit(), methods.lava(40, window=8)
    assert fitted.nbytes < state.nbytes
    kvjax.save_state(tmp_path / "state", *tiny, fitted, policy=policy)
    loaded = kvjax.load_state(tmp_path / "state", *tiny, policy=policy)
    assert loaded.plan == fitted.plan
    one, other = (kvjax.generate_from(*tiny, logits, s, max_new_tokens=2).tokens for s in (state, loaded))
    np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="size=0 must be a whole number from 1 to"):
        state.pages(0)
    with pytest.raises(ValueError, match="fit it outside of jit"):
        jax.jit(lambda s: s.fit())(state)
    with pytest.raises(ValueError, match="no prompt that was read to its end"):
        kvjax.start(tiny[0], policy=policy, lengths=LENGTHS, max_new_tokens=2).fit()
