"""Protected tokens live whatever else a policy does with its budget, and what cannot be kept is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.scoring.protect import PromptSinks, TopStd
from kvjax.scoring.select import Chunks, TopK
from kvjax.scoring.stats import LayerStats, Slots
from kvjax.sizes.budget import Counts, Ratio, Tokens
from tests import helpers

T = 40


@pytest.fixture(scope="module")
def qkv():
    return helpers.qkv(1, T=T, B=1)


def kept(policy, qkv, n=T):
    """Kept positions of both heads, of the last `n` tokens as a prompt."""
    selection = kvjax.evict_layer(policy, *qkv, lengths=[n])
    return [[i - (T - n) for i in helpers.kept(selection, head=g)] for g in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["rest", "all"])
@pytest.mark.parametrize("random", [5, 10])
def test_no_more_is_drawn_than_protection_leaves(qkv, random, pool):
    """A random share of the whole budget less what is protected is NaCl's ablation without proxies."""
    policy = methods.nacl(10, protect=3, sinks=2, proxies=6, random=random, random_pool=pool)
    for tokens in kept(policy, qkv):
        assert {0, 1, T - 3, T - 2, T - 1} <= set(tokens)
        assert len(tokens) <= 10
    without_proxies = [
        kept(dataclasses.replace(policy, select=dataclasses.replace(policy.select, random=r)), qkv) for r in (5, 10)
    ]
    assert without_proxies[0] == without_proxies[1]


@pytest.mark.parametrize("n", range(33, T))
def test_chunks_of_protected_tokens_come_first(qkv, n):
    """A window of 17 tokens lies in three or four chunks of 8, of which a budget of 17 pays for three."""
    policy = methods.chunkkv(17, base=methods.snapkv(17, window_size=17), chunk_size=8)
    for tokens in kept(policy, qkv, n):
        assert set(range(n - 17, n)) <= set(tokens)
        assert len(tokens) <= 17 + 8 - 1


def _first_chunks_and_others(kv, stats, ctx):
    del stats, ctx
    return jnp.where((kv.pos < 16) | (kv.pos % 8 == 0), 1.0, 0.0) - kv.pos.astype(jnp.float32) / 1e3


_scattered = kvjax.from_fn(_first_chunks_and_others, budget=19)


@pytest.mark.slow
def test_chunks_of_a_cache_with_holes(qkv):
    """Two full chunks and three single tokens: a share of the chunks may be far more than a share of the tokens."""
    chunks = dataclasses.replace(_scattered, budget=8, select=Chunks(8))
    (before, _), (after, _) = kept(_scattered, qkv), kept(kvjax.chain(_scattered, chunks), qkv)
    assert before == [*range(16), 16, 24, 32]
    assert after == list(range(8))
    seen = helpers.replay(kvjax.chain(_scattered, chunks), *qkv, T - 4)
    assert np.isfinite(seen.kv.v).all(), "more tokens than the plan has slots for"


def test_chunks_after_heads_of_different_budgets(qkv):
    """The head that holds most decides how many chunks fit."""
    ada = methods.ada_snapkv(16, window_size=4, alpha=1.0, storage="dense")
    policy = kvjax.chain(ada, methods.chunkkv(12, base=methods.snapkv(12, window_size=4), chunk_size=4))
    lengths = [len(tokens) for tokens in kept(ada, qkv)]
    assert lengths[0] != lengths[1]
    assert all(len(tokens) <= 12 + 4 - 1 for tokens in kept(policy, qkv))
    assert all({*range(T - 4, T)} <= set(tokens) for tokens in kept(policy, qkv))


def test_chunks_have_no_budgets_of_heads():
    with pytest.raises(ValueError, match=r"keeps the same tokens in all heads, but Adaptive\(.*use heads=UniformHeads"):
        methods.chunkkv(16, base=methods.ada_snapkv(16, window_size=4), chunk_size=4)


def test_a_share_of_chunks_however_it_is_written(qkv):
    """A quarter of eight chunks, of which the last is short; 9 of 39 tokens are less than that."""
    make = lambda budget: methods.chunkkv(budget, base=methods.snapkv(20, window_size=2), chunk_size=5)
    assert make(0.25).select == make(Ratio(0.25)).select == Chunks(5, 0.25)
    assert kept(make(Ratio(0.25)), qkv, 39) == kept(make(0.25), qkv, 39)
    assert len(kept(make(0.25), qkv, 39)[0]) == 9
    assert len(kept(make(9), qkv, 39)[0]) == 4


@pytest.mark.slow
def test_what_is_dropped_at_once_is_not_protected(qkv):
    """The last 10 of 12 tokens stay, although half of the budget would be dropped."""
    seen = helpers.replay(methods.scissorhands(12, history=20), *qkv, 20)
    assert all(set(range(n - 10, n)) <= set(tokens) for n, step in enumerate(seen.live, 20) for tokens in step[0])
    assert {len(tokens) for step in seen.live for tokens in step[0]} == {10, 11, 12}


def test_a_cache_of_sinks_has_no_room_for_the_next_token():
    streaming = methods.streaming_llm(4, sinks=4)
    plan = lambda policy, n: policy.check(helpers.site(T=n, max_new_tokens=3), n)
    with pytest.raises(ValueError, match=r"budget of 4 tokens for a prompt of 12, .* keeps 4 and the token to come"):
        plan(streaming, 12)
    with pytest.raises(ValueError, match="a budget of 4 tokens for a prompt of 2"):
        plan(streaming, 2)
    plan(methods.streaming_llm(8, sinks=8), 5)  # five tokens and three more
    plan(methods.streaming_llm(5, sinks=4), 12)
    plan(methods.window(4, sinks=4), 12)  # reads the next token, and drops it


def test_a_prompt_that_is_too_short_for_its_share_needs_slots_for_all_its_tokens(tiny):
    """A plan without lengths has them. While decoding, such a row keeps as many tokens as its prompt had."""
    model, params = tiny
    policy = methods.h2o(0.25, recent=8)
    plan = lambda lengths: kvjax.make_plan(model.config, policy, prompt_len=40, max_new_tokens=2, lengths=lengths)
    tokens, lengths = jnp.ones((3, 40), jnp.int32), [40, 20, 3]
    assert plan([40]).capacities == (11,) * 3
    assert plan(lengths).capacities == (21,) * 3
    assert plan(None).capacities == (32,) * 3
    with pytest.raises(ValueError, match="a prompt of 20 tokens needs 21 slots in layer 0, but the plan has 11; make"):
        kvjax.prefill(model, params, tokens, plan([40]), lengths=lengths)

    @jax.jit
    def decoded(params):
        _, state = kvjax.prefill(model, params, tokens, plan(lengths), lengths=lengths)
        return kvjax.feed(model, params, tokens[:, :2], state)[1].num_live

    np.testing.assert_array_equal(decoded(params)[:, 0, 0], [10, 20, 5])


def test_a_budget_that_does_not_hold_the_window_keeps_the_newest_of_it(qkv):
    """In every layer and head, though a pyramid would give layers, and scores would give heads, different budgets."""
    window = {"window_size": 8, "kernel_size": 3}
    newest = [list(range(T - 6, T))] * 2
    for make in (methods.snapkv, methods.ada_snapkv, methods.pyramidkv, methods.ada_pyramid):
        assert kept(make(6, **window, cut_window=True), qkv) == newest
        assert kept(make(0.15, **window, cut_window=True), qkv) == newest
        assert kept(make(0.15, **window), qkv) == [list(range(T))] * 2
        assert kept(make(12, **window, cut_window=True), qkv) == kept(make(12, **window), qkv)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: methods.ahakv(20), "a budget of 20 tokens cannot hold the 32 that protect keeps"),
        (lambda: methods.scissorhands(8), "a budget of 8 tokens cannot hold the 10 that protect keeps"),
        (lambda: methods.nacl(10, proxies=0), r"LastRows\(n=0\): at least one row must be observed"),
        (lambda: kvjax.LastRows(Tokens(0)), "at least one row must be observed"),
    ],
)
def test_nothing_smaller_is_taken_instead(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("ties", ["evict_older", "lower_index"])
@pytest.mark.parametrize("size", [0, 3, 7, 12])
def test_asking_of_single_slots_evicts_what_finding_all_protected_ones_does(size, ties):
    """Also among equal deviations and equal scores, where a head is within its budget, and where all is protected."""
    rng = np.random.default_rng(size)
    B, K, S, budget = 3, 4, 12, 9
    pos = np.argsort(rng.random((B, K, S)), axis=-1)
    pos = jnp.asarray(np.where(rng.random(pos.shape) < np.linspace(0, 0.4, K)[:, None], -1, pos), jnp.int32)
    draw = lambda: jnp.asarray(rng.integers(0, 3, pos.shape) / 4, jnp.float32)
    kv = kvjax.LayerKV(jnp.zeros((*pos.shape, 2)), jnp.zeros((*pos.shape, 2)), pos)
    site = helpers.site(T=S, K=K, N=K)
    ctx = helpers.context(site, length=[S] * B, prompt_length=[6] * B, phase="decode")
    safe = (pos >= S - 2) | jnp.asarray([False, False, True])[:, None, None]
    score, slots = jnp.where(safe, jnp.inf, draw()), Slots(kv, LayerStats(), ctx, kv.live & ~safe, (draw(), draw()))
    select, scope = TopK(ties), TopStd(size)
    counts, budgets = Counts(np.full((S + 1,), budget), ctx.prompt_length), jnp.full((B, K), budget)
    protected = scope(slots, safe, counts, budgets)
    found = select.drop_one(score, pos, budgets, scope.spares(slots, safe, counts, budgets))
    np.testing.assert_array_equal(found, select.drop(jnp.where(protected, jnp.inf, score), pos, budgets, 1))
    assert PromptSinks(2).spares(slots, safe, counts, budgets) is None
