"""The laws of policies, over the one table of methods."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.state import EMPTY, evict
from kvjax.drivers import generation
from tests import helpers
from tests.methods import CASES, CORE, OF_ONE_LAYER, every_method, few_methods, sampled_methods

B, K, N, T, H = 2, 2, 4, 24, 8
BUDGET = 10
LENGTHS = (T, 17)
OUT_PROJ = jnp.ones((N, H, H))


def stochastic_free():
    mark = lambda c: () if c.name in CORE else pytest.mark.slow
    rows = [pytest.param(c, marks=mark(c)) for c in OF_ONE_LAYER if not (c.random or c.by_head)]
    return pytest.mark.parametrize("case", rows, ids=repr)


@functools.cache
def prompt_step(case, layer=0):
    """(policy, layer after a prompt of each length, stats, context) before eviction."""
    policy, lengths, seed = case.make(BUDGET), LENGTHS, 0
    site = helpers.site(T=T, layer=layer)
    ctx = helpers.context(site, length=list(lengths))
    kv = helpers.prompt_layer(policy, ctx, T=T, B=B, K=K, H=H, lengths=lengths, seed=seed)
    return policy, kv, helpers.random_stats(policy, kv, ctx, seed), ctx


def target(policy, layer, n):
    return policy.at(helpers.site(T=T, layer=layer)).spec.target[n]


@every_method
def test_identity_is_the_unit_of_chain(case):
    policy = case.make(BUDGET)
    assert kvjax.chain(kvjax.identity(), policy) == policy == kvjax.chain(policy, kvjax.identity())


@every_method
def test_chain_is_associative(case):
    p, q, r = case.make(BUDGET), kvjax.methods.window(12), kvjax.methods.snapkv(14, window_size=4)
    assert kvjax.chain(p, kvjax.chain(q, r)) == kvjax.chain(kvjax.chain(p, q), r)


def refuses_to_decide_by_layer(policy):
    """One of its members makes one decision for all layers."""
    with pytest.raises(
        ValueError, match="decides layer by layer, but its member in layer 1 makes one decision for all 3"
    ):
        policy.rules(helpers.site(T=T, layer=1))


@sampled_methods
def test_chain_is_application_in_turn(case):
    site = helpers.site(T=T)
    first = case.make(BUDGET + 4)
    second = dataclasses.replace(kvjax.methods.tova(BUDGET), positions=first.at(site).spec.positions)
    both = kvjax.chain(first, second)
    if first.shared:
        refuses_to_decide_by_layer(both)
        return
    ctx = helpers.context(site, length=[T, T])
    kv = helpers.prompt_layer(both, ctx, T=T)
    stats = helpers.random_stats(both, kv, ctx)
    together = both.layer(kv, stats, ctx)

    apart = kv
    for rule, memory in zip(both.rules(site), kv.memory, strict=True):
        apart = rule.layer(dataclasses.replace(apart, memory=(memory,)), stats, ctx)
    np.testing.assert_array_equal(together.pos, apart.pos)


@every_method
def test_partition_applies_each_policy_to_its_layers(case):
    policy = case.make(BUDGET)
    mixed = kvjax.partition({"evict": policy, "keep": kvjax.identity()}, ("keep", "evict", "keep"))
    if policy.shared:
        refuses_to_decide_by_layer(mixed)
        return
    for layer, expected in ((0, kvjax.identity()), (1, policy)):
        ctx = helpers.context(helpers.site(T=T, layer=layer), length=[T, T])
        kv = helpers.prompt_layer(expected, ctx, T=T)
        stats = helpers.random_stats(expected, kv, ctx)
        np.testing.assert_array_equal(mixed.layer(kv, stats, ctx).pos, expected.layer(kv, stats, ctx).pos)


@every_method
@pytest.mark.parametrize("layer", [0, 2])
def test_prompt_eviction_meets_the_budget(case, layer):
    policy, kv, stats, ctx = prompt_step(case, layer)
    after = policy.layer(kv, stats, ctx)
    for row, n in enumerate(LENGTHS):
        limit = min(n, target(policy, layer, n))
        live = np.asarray(after.num_live[row])
        if case.together:
            assert live.sum() <= limit * K
        elif not case.fills:
            assert live.max() <= limit
        elif case.exact:
            np.testing.assert_array_equal(live, limit)
        elif case.total:
            assert live.sum() == min(n, target(policy, layer, n)) * K
        else:
            assert live.max() <= limit + case.slack
        assert live.max() <= policy.at(ctx.site).spec.capacity.max()


@every_method
def test_no_dead_slot_comes_back_and_nothing_moves(case):
    policy, kv, stats, ctx = prompt_step(case)
    dead = jnp.zeros(kv.pos.shape, bool).at[:, :, ::5].set(True)
    kv = evict(kv, kv.live & ~dead)
    after = policy.layer(kv, stats, ctx)
    assert not (np.asarray(after.live) & ~np.asarray(kv.live)).any()
    np.testing.assert_array_equal(after.k, kv.k)
    np.testing.assert_array_equal(after.v, kv.v)
    np.testing.assert_array_equal(np.where(after.live, after.pos, 0), np.where(after.live, kv.pos, 0))


@every_method
def test_protected_tokens_live(case):
    policy, kv, stats, ctx = prompt_step(case)
    after = policy.layer(kv, stats, ctx)
    for row, n in enumerate(LENGTHS):
        wanted = {*range(case.sinks), *range(n - case.recent(BUDGET), n)}
        for head in helpers.live_positions(after)[row]:
            assert wanted <= set(head)


@every_method
def test_idempotent_on_unchanged_statistics(case):
    policy, kv, stats, ctx = prompt_step(case)
    once = policy.layer(kv, stats, ctx)
    twice = policy.layer(once, stats, ctx)
    np.testing.assert_array_equal(once.pos, twice.pos)


@every_method
def test_permuting_slots_permutes_the_result(case):
    policy, kv, stats, ctx = prompt_step(case)
    order = jax.vmap(lambda k: jax.random.permutation(k, T))(jax.random.split(jax.random.key(5), B * K)).reshape(
        B, K, T
    )
    shuffled_kv, shuffled_stats = helpers.permute_slots(kv, stats, order)
    plain = policy.layer(kv, stats, ctx)
    shuffled = policy.layer(shuffled_kv, shuffled_stats, ctx)
    assert helpers.live_positions(plain) == helpers.live_positions(shuffled)


@every_method
def test_jit_equals_eager(case):
    policy, kv, stats, ctx = prompt_step(case)
    eager = policy.layer(kv, stats, ctx)
    jitted = jax.jit(policy.layer)(kv, stats, ctx)
    np.testing.assert_array_equal(eager.pos, jitted.pos)


@stochastic_free()
def test_permuting_kv_heads_permutes_the_result(case):
    q, k, v = helpers.qkv(3, B=B, N=N, K=K, T=T, H=H)
    policy = case.make(BUDGET)
    swapped_q = q.reshape(B, K, N // K, T, H)[:, ::-1].reshape(B, N, T, H)
    tokens = helpers.token_ids(B, T)
    plain = kvjax.evict_layer(policy, q, k, v, layer=1, num_layers=3, tokens=tokens, out_proj=OUT_PROJ)
    swapped = kvjax.evict_layer(
        policy, swapped_q, k[:, ::-1], v[:, ::-1], layer=1, num_layers=3, tokens=tokens, out_proj=OUT_PROJ
    )
    np.testing.assert_array_equal(plain.keep, swapped.keep[:, ::-1])
    np.testing.assert_array_equal(plain.budgets, swapped.budgets[:, ::-1])


@every_method
@pytest.mark.parametrize("budget", [BUDGET, pytest.param(0.5, marks=pytest.mark.slow)])
def test_a_padded_row_gets_what_it_gets_alone(case, budget):
    if case.replays:
        pytest.skip("one layer cannot read its prompt again; tests of replays have this with a model")
    q, k, v = helpers.qkv(4, B=B, N=N, K=K, T=T, H=H)
    policy = case.make(budget)
    lengths = np.array([T, 16])
    keys = jax.random.split(jax.random.key(9), B)
    tokens = helpers.token_ids(B, T)
    evict_layer = functools.partial(kvjax.evict_layer, policy, layer=1, num_layers=3, out_proj=OUT_PROJ)
    padding = np.arange(T) < T - lengths[:, None]  # may hold anything
    filled = (jnp.where(padding[:, None, :, None], jnp.nan, x) for x in (q, k, v))
    together = evict_layer(*filled, lengths=jnp.asarray(lengths), key=keys, tokens=jnp.where(padding, -7, tokens))
    for row, n in enumerate(lengths):
        cut = lambda x, row=row, n=n: x[row : row + 1, :, T - n :]
        ids = tokens[row : row + 1, T - n :]
        alone = evict_layer(cut(q), cut(k), cut(v), key=keys[row : row + 1], tokens=ids)
        np.testing.assert_array_equal(together.keep[row, :, T - n :], alone.keep[0])
        assert not np.asarray(together.keep[row, :, : T - n]).any()


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_a_prompt_whose_share_cannot_hold_what_is_protected_is_kept_whole(case):
    """In every layer, whatever its length."""
    policy = case.make(0.25)
    for layer in range(3):
        site = helpers.site(T=T, layer=layer)
        for member in policy.rules(site):
            if isinstance(member, kvjax.Evict):
                _, sinks, recent = member.tables(site)
                every = np.arange(T + 1)
                nearest = isinstance(member.layers, kvjax.InclusivePyramid)  # what it rounds a share's tokens to
                average = np.round(member.budget.exact(every, every)) if nearest else member.budget.table(every, every)
                for n in range(1, T + 1):
                    member.check(site, n)
                    whole = sinks[n] + recent[n] > max(average[n], 1)
                    assert member.spec(site).target[n] >= (n if whole else min(n, sinks[n] + recent[n]))


@pytest.mark.parametrize(
    ("make", "n"),
    [
        (lambda: kvjax.methods.snapkv(0.25, window_size=6), 6),
        (lambda: kvjax.methods.snapkv(0.25, window_size=6), 23),
        (lambda: kvjax.methods.streaming_llm(0.25, sinks=4), 19),
        (lambda: kvjax.methods.roco(0.25, scope=6, protect_last=2), 7),
        (lambda: kvjax.methods.scissorhands(0.25, recent=2, drop=6), 23),
        (lambda: kvjax.methods.ada_pyramid(0.25, window_size=6), 23),
    ],
    ids=["window", "window_and_more", "sinks", "scope", "drop", "pyramid"],
)
def test_a_row_that_is_too_short_to_be_evicted_from_does_not_fail_its_batch(make, n):
    q, k, v = helpers.qkv(4, B=B, N=N, K=K, T=T, H=H)
    cut = lambda row, length: (x[row : row + 1, :, T - length :] for x in (q, k, v))
    together = kvjax.evict_layer(make(), q, k, v, lengths=[T, n]).keep
    assert np.asarray(together[1, :, T - n :]).all()
    assert np.asarray(together[0]).sum() == 6 * K
    np.testing.assert_array_equal(kvjax.evict_layer(make(), *cut(1, n)).keep[0], together[1, :, T - n :])
    np.testing.assert_array_equal(kvjax.evict_layer(make(), *cut(0, T)).keep[0], together[0])


@every_method
def test_equal_policies_are_equal_values(case):
    assert case.make(BUDGET) == case.make(BUDGET)
    assert hash(case.make(BUDGET)) == hash(case.make(BUDGET))
    assert repr(case.make(BUDGET)) == repr(case.make(BUDGET))
    if case.name not in ("full", "think"):
        assert case.make(BUDGET) != case.make(BUDGET + 1)


# --- with a model ---


def run(small, policy, tokens, lengths, *, new=12, keys=None, **kwargs):
    model, params = small
    return kvjax.generate(model, params, tokens, policy=policy, lengths=lengths, max_new_tokens=new, key=keys, **kwargs)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 61, (B, T))
    return tokens, np.array([T, 17])


@few_methods
def test_generation_of_a_padded_batch_equals_single_runs(small, prompts, case):
    """Also: an equal policy, built anew, compiles nothing new."""
    tokens, lengths = prompts
    keys = jax.random.split(jax.random.key(2), B)
    together = run(small, case.make(BUDGET), tokens, lengths, keys=keys)
    compiled = generation._generate._cache_size()
    run(small, case.make(BUDGET), tokens, lengths, keys=keys)
    assert generation._generate._cache_size() == compiled

    row, n = 1, int(lengths[1])
    alone = run(small, case.make(BUDGET), tokens[row : row + 1, T - n :], None, keys=keys[row : row + 1])
    np.testing.assert_array_equal(together.tokens[row], alone.tokens[0])
    for a, b in zip(together.state.layers, alone.state.layers, strict=True):
        assert helpers.live_positions(a)[row] == helpers.live_positions(b)[0]


@sampled_methods
def test_decoding_never_exceeds_the_plan(small, prompts, case):
    model, params = small
    tokens, lengths = prompts
    plan = kvjax.make_plan(model.config, case.make(BUDGET), prompt_len=T, max_new_tokens=40, lengths=lengths)

    @jax.jit
    def live_at_every_step(params, tokens, lengths):
        logits, state = kvjax.prefill(model, params, tokens, plan, lengths=lengths)

        def step(carry, _):
            logits, state = carry
            logits, state = kvjax.decode_step(model, params, logits.argmax(-1).astype(jnp.int32), state)
            return (logits, state), (state.num_live, jnp.isfinite(logits).all())

        return jax.lax.scan(step, (logits, state), length=40)[1], state

    (live, finite), after_prompt = live_at_every_step(params, jnp.asarray(tokens), jnp.asarray(lengths))
    assert finite.all()
    for layer, site in enumerate(plan.sites):
        most = live[:, :, layer].sum(-1) if plan.layouts[layer] == "pool" else live[:, :, layer]
        assert int(most.max()) <= plan.capacities[layer]
        for row, n in enumerate(lengths):
            limit = plan.policy.at(site).spec.target[n]
            if case.decodes and case.exact:
                assert int(live[:, row, layer].max()) <= limit + case.slack
                assert int(live[-1, row, layer].min()) >= limit - case.dips  # a full budget stays in use
            elif case.decodes:
                assert int(live[:, row, layer].sum(-1).max()) <= limit * K
    assert after_prompt.num_slots == plan.num_slots


@few_methods
def test_a_budget_that_holds_everything_is_full_attention(small, prompts, case):
    if not case.fills:
        pytest.skip("its budget is a cap on what it keeps")
    if not case.lossless:
        pytest.skip("it hides tokens, or drops channels, whatever its budget")
    model, params = small
    tokens, lengths = prompts
    continuation = jnp.asarray(np.random.default_rng(1).integers(0, 61, (B, 10)))

    def logits(policy):
        plan = kvjax.make_plan(model.config, policy, prompt_len=T, max_new_tokens=10)

        @jax.jit
        def both(params, tokens, continuation):
            first, state = kvjax.prefill(model, params, tokens, plan, lengths=jnp.asarray(lengths))
            return jnp.concatenate([first[:, None], kvjax.feed(model, params, continuation, state)[0]], axis=1)

        return both(params, jnp.asarray(tokens), continuation)

    full, kept = logits(kvjax.methods.full()), logits(case.make(200))
    np.testing.assert_allclose(kept, full, rtol=2e-4, atol=2e-4)


def test_empty_is_minus_one():
    assert EMPTY == -1


@pytest.mark.parametrize("policy", [kvjax.methods.lagkv(0.5, lag=4, sinks=2), kvjax.methods.nacl(0.5)])
def test_a_padded_row_of_a_layer_gets_what_it_gets_alone(policy):
    """Where a policy counts from the oldest token, or takes shares of a row's own prompt."""
    q, k, v = helpers.qkv(11, B=2, T=24)
    keys = jax.random.split(jax.random.key(5), 2)
    both = kvjax.evict_layer(policy, q, k, v, lengths=[24, 17], key=keys)
    alone = kvjax.evict_layer(policy, *(x[1:, :, 7:] for x in (q, k, v)), key=keys[1:])
    np.testing.assert_array_equal(both.keep[1, :, 7:], alone.keep[0])
    np.testing.assert_allclose(both.score[1, :, 7:], alone.score[0], rtol=1e-5)
