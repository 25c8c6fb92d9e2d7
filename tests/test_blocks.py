"""Reading a prompt in blocks, evicting after each."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods, models
from kvjax.scoring.protect import rows_since_insertion
from kvjax.scoring.scores import Accumulated, Mean
from kvjax.scoring.stats import LastRows, LayerStats, Observe, Slots
from tests import helpers
from tests.methods import few_methods

T = 24


def read(shallow, policy, tokens, lengths=None, *, block, new=6):
    model, params = shallow
    plan = kvjax.make_plan(model.config, policy, prompt_len=tokens.shape[1], max_new_tokens=new, lengths=lengths)
    lengths = None if lengths is None else jnp.asarray(lengths)
    run = jax.jit(lambda p, t: kvjax.prefill(model, p, t, plan, lengths=lengths, block=block))
    return run(params, jnp.asarray(tokens))


@pytest.fixture(scope="module")
def prompts():
    return np.random.default_rng(3).integers(0, 61, (2, T))


@few_methods
def test_one_block_is_the_whole_prompt(small, prompts, case):
    policy = case.make(10)
    whole, at_once = read(small, policy, prompts, [T, 17], block=None)
    one, blocked = read(small, policy, prompts, [T, 17], block=T)
    np.testing.assert_allclose(one, whole, atol=1e-4)
    for a, b in zip(at_once.layers, blocked.layers, strict=True):
        assert helpers.live_positions(a) == helpers.live_positions(b)


@few_methods
@pytest.mark.parametrize("block", [5])
def test_a_padded_row_read_in_blocks_equals_the_row_alone(small, prompts, case, block):
    policy = case.make(10)
    if policy.at(helpers.site()).spec.reads == "whole":
        pytest.skip("it is refused in blocks")
    if case.random:
        pytest.skip("keys differ between the rows of a batch and a single one")
    n = 17
    together, batch = read(small, policy, prompts, [T, n], block=block)
    alone, single = read(small, policy, prompts[1:, T - n :], block=block)
    np.testing.assert_allclose(together[1], alone[0], atol=1e-4)
    for layer, (a, b) in enumerate(zip(batch.layers, single.layers, strict=True)):
        assert helpers.live_positions(a)[1] == helpers.live_positions(b)[0]
        target = policy.at(helpers.site(T=T, layer=layer)).spec.target[n]
        assert int(a.num_live[1].sum()) <= min(target, n) * 2 + case.slack


ROPES = {
    "longrope": models.Rope("longrope", short_factor=(1.0,) * 4, long_factor=(1.0, 2.0, 3.0, 4.0), original_max=16),
    "dynamic": models.Rope("dynamic", factor=3.0, original_max=16),
}


@pytest.mark.filterwarnings("ignore:a text that grows")  # the row inside it crosses it behind the prompt
@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("positions", ["original", "compact"])
def test_rotations_take_the_length_of_the_prompt_in_every_block(tiny, prompts, kind, positions):
    """Nothing is evicted; one row ends beyond the original context, the other inside it."""
    model, params = tiny
    stretched = models.LanguageModel(dataclasses.replace(model.config, rope=ROPES[kind])), params
    policy = dataclasses.replace(methods.h2o(40), positions=positions)
    whole, _ = read(stretched, policy, prompts, [T, 14], block=None)
    blocks, _ = read(stretched, policy, prompts, [T, 14], block=5)
    np.testing.assert_allclose(blocks, whole, atol=1e-4)


def test_recency_does_not_depend_on_blocks(shallow, prompts):
    """A window keeps the same tokens however the prompt is cut."""
    for block in (1, 7, 24, 100):
        _, state = read(shallow, methods.window(9), prompts, block=block)
        for layer in state.layers:
            assert helpers.live_positions(layer) == [[list(range(T - 9, T))] * 2] * 2


def test_e11_rows_are_counted_from_insertion(examples):
    """Counters at every eviction of a prompt read in blocks, with and without the rows of the dense prefix."""
    e = examples["E11"]
    length, block, cache = e["inputs"]["length"], e["params"]["block"], e["params"]["cache_after_block"]
    site = helpers.site(T=length, K=1, N=1)
    for ignore, wanted in ((0, "counts_track_prefix"), (cache, "counts_ignore_prefix")):
        seen = []
        for end in range(cache + block, length + 1, block):  # the example evicts the oldest tokens
            pos = jnp.arange(end - cache - block, end, dtype=jnp.int32)[None, None]
            zeros = jnp.zeros((1, 1, cache + block, 8))
            ctx = helpers.context(site, length=[end], prompt_length=[length])
            counts = rows_since_insertion(kvjax.LayerKV(zeros, zeros, pos), ctx, ignore)
            seen.append(counts[0, 0].tolist())
        assert seen == e["expected"][wanted]


@pytest.mark.parametrize("score", [Mean(), Accumulated(Observe(LastRows(4)))], ids=["mean", "last rows"])
def test_what_is_summed_over_blocks_is_what_is_summed_over_rows(shallow, prompts, score):
    """Nothing is evicted, so a prompt read in blocks leaves the memory of one read at once, by its last rows too."""
    policy = kvjax.Evict(score, 40, when=kvjax.every_step())
    _, at_once = read(shallow, policy, prompts, block=None)
    _, blocked = read(shallow, policy, prompts, block=5)
    by_position = lambda kv: jnp.take_along_axis(
        kv.memory[0].score, jnp.argsort(jnp.where(kv.live, kv.pos, 1000), axis=-1)[..., :T], axis=-1
    )
    for a, b in zip(at_once.layers, blocked.layers, strict=True):
        np.testing.assert_allclose(by_position(b), by_position(a), atol=1e-4)


def test_memory_does_not_grow_with_the_prompt(shallow):
    model = models.LanguageModel(dataclasses.replace(shallow[0].config, max_position=2**14))
    params = shallow[1]

    def compiled(length):
        plan = kvjax.make_plan(model.config, methods.roco(16), prompt_len=length, max_new_tokens=4, lengths=[length])
        run = lambda p, t: kvjax.prefill(model, p, t, plan, block=32)
        memory = jax.jit(run).lower(params, jax.ShapeDtypeStruct((1, length), jnp.int32)).compile().memory_analysis()
        return memory.temp_size_in_bytes - 2 * 4 * length  # the token ids themselves, and their blocks

    assert compiled(8192) < 1.05 * compiled(1024)


def test_blocks_have_tokens(shallow, prompts):
    with pytest.raises(ValueError, match="block=0: a block has at least 1 token"):
        read(shallow, methods.window(9), prompts, block=0)


@pytest.mark.parametrize(
    "policy",
    [
        methods.h2o(12, group="max"),
        pytest.param(methods.mas(12, group="max"), marks=pytest.mark.slow),
        methods.ahakv(12, recent=4, recent_accumulation=False, value_prior=False, group="max"),
        pytest.param(methods.h2o(12, group="max", compat="h2o_hh_mask"), marks=pytest.mark.slow),
    ],
    ids=["sum", "mean", "scaled", "mask"],
)
def test_the_largest_sum_of_a_group_does_not_depend_on_how_text_is_read(policy):
    """At once, in blocks of 5, or one token after the other: the budget holds everything, so all rows see the same."""
    arrays = helpers.qkv(6, B=1, T=12)

    def score(n, block=None):
        kv = helpers.replay(policy, *arrays, n, block=block).kv
        if isinstance(policy, kvjax.Evict):
            ctx = helpers.context(helpers.site(T=12), length=[12])
            x = policy.score(Slots(kv, LayerStats(), ctx, kv.live, kv.memory[0].score))
        else:
            x = policy._sums.largest(kv.memory[0][0])
        return np.asarray(x)[..., np.argsort(kv.pos[0, 0])]

    at_once = score(12)
    np.testing.assert_allclose(score(1), at_once, atol=1e-5)
    if policy.spec(helpers.site(T=12)).reads != "whole":
        np.testing.assert_allclose(score(12, block=5), at_once, atol=1e-5)
