"""The drivers: prefill, decode, generate, feed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import models
from kvjax import methods

T = 20


@pytest.fixture(scope="module")
def prompts():
    return np.random.default_rng(3).integers(0, 61, (3, T)), np.array([T, 13, 1])


def plain_logits(model, params, tokens):
    """Logits of every position without any cache."""
    pos = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    no_cache = (None,) * model.config.num_layers
    return model(params, tokens, no_cache, attend=kvjax.attention.without_cache(pos), last_only=False)[0]


def test_cached_decoding_equals_one_pass(tiny):
    model, params = tiny
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 30)), jnp.int32)
    plan = kvjax.make_plan(model.config, methods.full(), prompt_len=12, max_new_tokens=18)
    first, state = kvjax.prefill(model, params, tokens[:, :12], plan)
    rest, state = kvjax.feed(model, params, tokens[:, 12:], state)
    expected = plain_logits(model, params, tokens)
    np.testing.assert_allclose(first, expected[:, 11], atol=2e-4)
    np.testing.assert_allclose(rest, expected[:, 12:], atol=2e-4)
    assert state.length.tolist() == [30, 30]


def test_appending_a_block_to_a_cache_equals_one_pass(tiny):
    """A second prompt part behind an existing cache, many tokens at once."""
    model, params = tiny
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 61, (2, 24)), jnp.int32)
    plan = kvjax.make_plan(model.config, methods.full(), prompt_len=24, max_new_tokens=0)
    state = kvjax.init_state(plan, jnp.asarray([24, 24]))
    _, state, _ = kvjax.forward(model, params, tokens[:, :10], state, evict=True)
    logits, state, _ = kvjax.forward(model, params, tokens[:, 10:], state, last_only=False)
    np.testing.assert_allclose(logits, plain_logits(model, params, tokens)[:, 10:], atol=2e-4)


def test_forward_then_policy_is_prefill(tiny, prompts):
    """The contract in the open: the model measures, the policy decides."""
    model, params = tiny
    tokens, lengths = (jnp.asarray(x) for x in prompts)
    policy = methods.h2o(8)
    plan = kvjax.make_plan(model.config, policy, prompt_len=T, max_new_tokens=4)
    _, joined = kvjax.prefill(model, params, tokens, plan, lengths=lengths)
    _, state, stats = kvjax.forward(model, params, tokens, kvjax.init_state(plan, lengths), valid=lengths)
    assert state.layers[0].num_slots == T
    evicted = policy(state, stats)
    for a, b, capacity in zip(evicted.layers, joined.layers, plan.capacities, strict=True):
        compacted = kvjax.compact(a, capacity)
        np.testing.assert_array_equal(compacted.pos, b.pos)
        np.testing.assert_allclose(compacted.k, b.k, atol=1e-5)
        assert b.num_slots == capacity == 9


def test_prompt_outputs_are_not_affected_by_eviction(tiny, prompts):
    model, params = tiny
    tokens, lengths = (jnp.asarray(x) for x in prompts)
    logits = [
        kvjax.prefill(
            model, params, tokens, kvjax.make_plan(model.config, p, prompt_len=T, max_new_tokens=1), lengths=lengths
        )[0]
        for p in (methods.full(), methods.h2o(4), methods.streaming_llm(4, sinks=1))
    ]
    for other in logits[1:]:
        np.testing.assert_allclose(other, logits[0], atol=1e-5)


def test_generation_stops_at_the_end_token(tiny, prompts):
    model, params = tiny
    tokens, lengths = prompts
    free = kvjax.generate(model, params, tokens, lengths=lengths, max_new_tokens=12)
    first_row = np.asarray(free.tokens[0])
    eos = int(first_row[4])
    at = int(np.nonzero(first_row == eos)[0][0])
    stopped = kvjax.generate(model, params, tokens, lengths=lengths, max_new_tokens=12, eos_ids=(eos,), pad_id=60)
    assert stopped.lengths[0] == at + 1
    np.testing.assert_array_equal(stopped.tokens[0, : at + 1], first_row[: at + 1])
    assert (np.asarray(stopped.tokens[0, at + 1 :]) == 60).all()
    # A finished sequence reads nothing more: its cache is that of its own text.
    assert stopped.state.length[0] == lengths[0] + at
    for row in (1, 2):
        n = int(stopped.lengths[row])
        np.testing.assert_array_equal(stopped.tokens[row, :n], free.tokens[row, :n])


def test_all_ended_runs_no_more_steps(tiny):
    model, params = tiny
    tokens = np.ones((1, 5), np.int32)
    first = int(kvjax.generate(model, params, tokens, max_new_tokens=1).tokens[0, 0])
    result = kvjax.generate(model, params, tokens, max_new_tokens=500, eos_ids=(first,))
    assert result.lengths.tolist() == [1]
    assert int(result.state.step) == 0


def test_streaming_llm_keeps_ended_sequences(tiny, prompts):
    """Eviction before appending must not touch a sequence that appends nothing."""
    model, params = tiny
    tokens, lengths = (jnp.asarray(x) for x in prompts)
    plan = kvjax.make_plan(model.config, methods.streaming_llm(8), prompt_len=T, max_new_tokens=3)
    _, state = kvjax.prefill(model, params, tokens, plan, lengths=lengths)
    active = jnp.asarray([True, False, False])
    _, after = kvjax.decode_step(model, params, tokens[:, 0].astype(jnp.int32), state, active=active)
    for a, b in zip(after.layers, state.layers, strict=True):
        np.testing.assert_array_equal(np.sort(a.pos[1:]), np.sort(b.pos[1:]))
        np.testing.assert_array_equal(np.sort(a.rank[1:]), np.sort(b.rank[1:]))
    assert after.length.tolist() == [T + 1, 13, 1]


def test_driving_past_the_plan_is_visible(tiny):
    """No token is overwritten silently: logits become NaN."""
    model, params = tiny
    plan = kvjax.make_plan(model.config, methods.full(), prompt_len=4, max_new_tokens=2)
    _, state = kvjax.prefill(model, params, jnp.ones((1, 4), jnp.int32), plan)
    finite = []
    for _ in range(3):
        logits, state = kvjax.decode_step(model, params, jnp.ones((1,), jnp.int32), state)
        finite.append(bool(jnp.isfinite(logits).all()))
    assert finite == [True, True, False]


def test_compact_positions_are_those_of_a_shorter_text(tiny):
    """With all sinks and no gap, StreamingLLM's ranks are positions; with a gap, they are ranks."""
    model, params = tiny
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, 61, (1, 12)), jnp.int32)

    def logits(policy):
        plan = kvjax.make_plan(model.config, policy, prompt_len=8, max_new_tokens=4)
        _, state = kvjax.prefill(model, params, tokens[:, :8], plan)
        return kvjax.feed(model, params, tokens[:, 8:], state)

    same, _ = logits(methods.streaming_llm(12, sinks=2))
    full, _ = logits(methods.full())
    np.testing.assert_allclose(same, full, atol=2e-4)
    _, state = logits(methods.streaming_llm(6, sinks=2))
    for layer in state.layers:
        order = np.argsort(np.asarray(layer.pos[0, 0]))
        assert layer.rank[0, 0][order].tolist() == list(range(6))
        assert sorted(layer.pos[0, 0].tolist()) == [0, 1, 8, 9, 10, 11]


def test_compact_positions_after_many_steps_equal_ranks(tiny):
    model, params = tiny
    policy = kvjax.when(kvjax.every(3), methods.streaming_llm(6, sinks=2))
    plan = kvjax.make_plan(model.config, policy, prompt_len=9, max_new_tokens=14)
    rng = np.random.default_rng(6)
    _, state = kvjax.prefill(model, params, jnp.asarray(rng.integers(0, 61, (2, 9)), jnp.int32), plan)
    step = jax.jit(kvjax.decode_step, static_argnums=0)
    for _ in range(14):
        _, state = step(model, params, jnp.asarray(rng.integers(0, 61, 2), jnp.int32), state)
        for layer in state.layers:
            expected = jnp.where(layer.live, kvjax.state.ranks(layer.pos), -1)
            np.testing.assert_array_equal(layer.rank, expected)


def test_a_function_of_everything_can_be_jitted(tiny, prompts):
    """`generate` inside a user's jit, lengths traced."""
    model, params = tiny
    tokens, lengths = prompts
    policy = methods.snapkv(0.5, window_size=2, kernel_size=3)

    @jax.jit
    def pipeline(params, tokens, lengths):
        return kvjax.generate(model, params, tokens, lengths=lengths, policy=policy, max_new_tokens=5).tokens

    expected = kvjax.generate(model, params, tokens[:2], lengths=lengths[:2], policy=policy, max_new_tokens=5).tokens
    np.testing.assert_array_equal(pipeline(params, jnp.asarray(tokens[:2]), jnp.asarray(lengths[:2])), expected)


def test_sampling_is_per_row(tiny, prompts):
    model, params = tiny
    tokens, lengths = prompts
    keys = jax.random.split(jax.random.key(4), 3)
    sampler = kvjax.Sample(temperature=0.8, top_k=20, top_p=0.9)
    run = lambda t, n, k: (
        kvjax.generate(
            model, params, t, lengths=n, max_new_tokens=8, sampler=sampler, key=k, policy=methods.random(6)
        ).tokens
    )
    together = run(tokens, lengths, keys)
    np.testing.assert_array_equal(together, run(tokens, lengths, keys))
    np.testing.assert_array_equal(together[1], run(tokens[1:2], lengths[1:2], keys[1:2])[0])
    assert not np.array_equal(together, run(tokens, lengths, jax.random.split(jax.random.key(5), 3)))


def test_sampling_filters():
    logits = jnp.log(jnp.asarray([[0.5, 0.25, 0.15, 0.1]]))
    alive = lambda sampler: np.isfinite(np.asarray(sampler.filter(logits)))[0].tolist()
    assert alive(kvjax.Sample(top_k=2)) == [True, True, False, False]
    assert alive(kvjax.Sample(top_p=0.5)) == [True, False, False, False]
    assert alive(kvjax.Sample(top_p=0.6)) == [True, True, False, False]
    assert alive(kvjax.Sample(top_p=0.001)) == [True, False, False, False]
    np.testing.assert_allclose(kvjax.Sample(temperature=2.0).filter(logits), logits / 2)
    draws = jax.vmap(lambda k: kvjax.Sample()(logits, k[None])[0])(jax.random.split(jax.random.key(0), 4000))
    np.testing.assert_allclose(np.bincount(draws, minlength=4) / 4000, [0.5, 0.25, 0.15, 0.1], atol=0.03)


def test_a_prompt_of_one_token(tiny):
    model, params = tiny
    for policy in (methods.full(), methods.h2o(4), methods.snapkv(0.25), methods.streaming_llm(8), methods.tova(0.5)):
        result = kvjax.generate(model, params, np.array([[3]]), policy=policy, max_new_tokens=6)
        assert result.tokens.shape == (1, 6)
        assert int(result.tokens.max()) < 61


def test_a_budget_above_the_prompt_keeps_it(tiny, prompts):
    model, params = tiny
    tokens, lengths = prompts
    full = kvjax.generate(model, params, tokens, lengths=lengths, max_new_tokens=4)
    large = kvjax.generate(model, params, tokens, lengths=lengths, policy=methods.snapkv(500), max_new_tokens=4)
    np.testing.assert_array_equal(full.tokens, large.tokens)
    assert large.state.num_slots == full.state.num_slots  # no slot is allocated that no token can fill


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros((1, 0), np.int32)}, "prompts are empty"),
        ({"tokens": np.zeros((1, 4), np.float32)}, "must be integers"),
        ({"tokens": np.zeros(4, np.int32)}, r"shape \(batch, width\)"),
        ({"tokens": np.full((1, 4), 61)}, "token id 61 is outside the vocabulary of 61"),
        ({"tokens": np.full((1, 4), -1)}, "token id -1 is outside"),
        ({"lengths": [0, 20, 3]}, "between 1 and the prompt's width 20, got 0 to 20"),
        ({"lengths": [21, 20, 3]}, "got 3 to 21"),
        ({"lengths": [2]}, "lengths must be 3 integers"),
        ({"max_new_tokens": 0}, "at least 1 token"),
        ({"policy": lambda: methods.h2o(0)}, "budget=0 tokens"),
        ({"policy": lambda: methods.h2o(-3)}, "cannot be negative"),
        ({"policy": lambda: methods.h2o(1.5)}, r"lies in \(0, 1\]"),
        ({"policy": lambda: methods.snapkv(16)}, r"budget of 16 tokens cannot hold the 32 that protect keeps"),
        (
            {"policy": lambda: methods.snapkv(0.25, window_size=8), "lengths": [20, 20, 20]},
            r"layer 0 gets a budget of 5 tokens for a prompt of 20, but protect keeps 8 \(sinks=0, recent=8\); raise",
        ),
        ({"policy": lambda: kvjax.partition({"a": methods.full()}, "ab")}, r"labels \['b'\] have no policy"),
        ({"policy": lambda: kvjax.partition({"a": methods.full()}, "aaaa")}, "4 labels, but the model has 3 layers"),
        (
            {"policy": lambda: kvjax.chain(methods.streaming_llm(8), methods.h2o(8))},
            r"rotates its keys in one way, but the members of this chain want \['compact', 'original'\]",
        ),
        ({"policy": lambda: kvjax.when(kvjax.every_step(), methods.snapkv(40))}, "ranks prompt tokens only"),
        ({"policy": lambda: kvjax.when(kvjax.before_append(), methods.h2o(8))}, "needs the step's attention"),
        ({"sampler": lambda: kvjax.Sample(temperature=0.0)}, "must be positive"),
    ],
)
def test_bad_input_is_refused_before_tracing(tiny, prompts, change, message):
    model, params = tiny

    def attempt(tokens=prompts[0], max_new_tokens=4, **rest):
        rest = {k: v() if callable(v) else v for k, v in rest.items()}
        kvjax.generate(model, params, tokens, max_new_tokens=max_new_tokens, **rest)

    with pytest.raises(ValueError, match=message):
        attempt(**change)


def test_a_plan_is_for_one_width(tiny):
    model, params = tiny
    plan = kvjax.make_plan(model.config, methods.full(), prompt_len=8, max_new_tokens=2)
    with pytest.raises(ValueError, match="prompt is 6 tokens wide, but the plan was made for 8"):
        kvjax.prefill(model, params, jnp.ones((1, 6), jnp.int32), plan)


def test_pad_left():
    tokens, lengths = models.pad_left([[1, 2, 3], [4]], pad_id=9)
    assert tokens.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert lengths.tolist() == [3, 1]
    with pytest.raises(ValueError, match="at least one token"):
        models.pad_left([[1], []])
    with pytest.raises(ValueError, match="has 3 tokens, but the batch is 2 wide"):
        models.pad_left([[1, 2, 3]], width=2)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["dense", "pool"])
def test_sliding_layers_lose_nothing_that_they_read(storage):
    """What lies behind a sliding window can be evicted for free."""
    config = models.ModelConfig(
        vocab_size=61, embed_dim=32, mlp_dim=48, num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=8,
        sliding_window=(7, None),
    )  # fmt: skip
    model = models.LanguageModel(config)
    params = jax.tree.map(lambda x: x * jnp.asarray(2.0, x.dtype), model.init(jax.random.key(7)))
    rng = np.random.default_rng(0)
    tokens, more = (jnp.asarray(rng.integers(0, 61, (2, n))) for n in (20, 6))

    def logits(size):
        window = dataclasses.replace(methods.window(size), storage=storage)
        policy = kvjax.partition({"sliding": window, "global": methods.full()}, ("sliding", "global"))
        plan = kvjax.make_plan(config, policy, prompt_len=20, max_new_tokens=6, lengths=[20, 11])

        @jax.jit
        def read(params, tokens, more):
            _, state = kvjax.prefill(model, params, tokens, plan, lengths=[20, 11])
            return kvjax.feed(model, params, more, state)[0]

        return np.asarray(read(params, tokens, more))

    full = logits(40)
    np.testing.assert_allclose(logits(7), full, atol=1e-4)
    assert np.abs(logits(5) - full).max() > 0.01
