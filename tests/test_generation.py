"""The drivers: prefill, decode, generate, feed."""

import dataclasses
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods, models
from kvjax.drivers.requests import check_block, check_request
from tests import helpers

T = 20


@pytest.fixture(scope="module")
def prompts():
    return np.random.default_rng(3).integers(0, 61, (3, T)), np.array([T, 13, 1])


def read_prompt(shallow, policy, tokens, *, max_new_tokens, **options):
    """A prompt read by the model of one layer, and how it goes on."""
    model, params = shallow
    plan = kvjax.make_plan(model.config, policy, prompt_len=tokens.shape[1], max_new_tokens=max_new_tokens)
    return jax.jit(lambda params, t: kvjax.prefill(model, params, t, plan, **options))(params, jnp.asarray(tokens))


def plain_logits(model, params, tokens):
    """Logits of every position without any cache."""
    pos = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    no_cache = (None,) * model.config.num_layers
    return model(params, tokens, no_cache, attend=kvjax.drivers.attention.without_cache(pos), last_only=False)[0]


def test_cached_decoding_equals_one_pass(tiny):
    model, params = tiny
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 30)), jnp.int32)
    plan = kvjax.make_plan(model.config, methods.full(), prompt_len=12, max_new_tokens=18)

    @jax.jit
    def read(params, tokens):
        first, state = kvjax.prefill(model, params, tokens[:, :12], plan)
        return first, *kvjax.feed(model, params, tokens[:, 12:], state), plain_logits(model, params, tokens)

    first, rest, state, expected = read(params, tokens)
    np.testing.assert_allclose(first, expected[:, 11], atol=2e-4)
    np.testing.assert_allclose(rest, expected[:, 12:], atol=2e-4)
    assert state.length.tolist() == [30, 30]


@pytest.mark.parametrize(
    "policy",
    [pytest.param(methods.h2o(6), marks=pytest.mark.slow), methods.streaming_llm(6, sinks=1)],
    ids=["h2o", "streaming_llm"],
)
def test_a_short_row_is_fed_as_it_is_alone(shallow, prompts, policy):
    """Logits and what stays of the cache; padding has no logits, and the last token's stand in the last column."""
    model, params = shallow
    (tokens, lengths), row, n = prompts, 1, np.array([5, 2, 4])
    more = np.random.default_rng(5).integers(0, 61, (3, 5))
    plan = kvjax.make_plan(model.config, policy, prompt_len=T, max_new_tokens=5)

    @jax.jit
    def read(params, tokens, lengths, more, n):
        state = kvjax.prefill(model, params, tokens, plan, lengths=lengths)[1]
        return kvjax.feed(model, params, more, state, lengths=n)

    logits, state = read(params, tokens, lengths, more, n)
    alone, kept = read(params, tokens[[row]], lengths[[row]], more[[row], 5 - n[row] :], None)
    np.testing.assert_allclose(logits[row, 5 - n[row] :], alone[0], atol=1e-4)
    assert np.isnan(logits[row, : 5 - n[row]]).all()
    assert state.length[row] == kept.length[0]
    for a, b in zip(state.layers, kept.layers, strict=True):
        assert helpers.live_positions(a)[row] == helpers.live_positions(b)[0]


def test_lengths_of_what_is_fed_are_checked(shallow):
    """Padding may be any id; each row is held against its own room."""
    model, params = shallow
    _, state = read_prompt(shallow, methods.full(), np.ones((2, 4), np.int32), max_new_tokens=2)
    logits, _ = kvjax.feed(model, params, [[-1, 1], [2, 3]], state, lengths=[1, 2])
    assert np.isfinite(logits[:, -1]).all()
    with pytest.raises(ValueError, match="3 tokens come after the prompt, but the plan was made for 2"):
        kvjax.feed(model, params, np.ones((2, 4), np.int32), state, lengths=[2, 3])
    with pytest.raises(ValueError, match="must lie between 1 and the prompt's width 2, got 0 to 2"):
        kvjax.feed(model, params, np.ones((2, 2), np.int32), state, lengths=[0, 2])


def test_appending_a_block_to_a_cache_equals_one_pass(tiny):
    """A second prompt part behind an existing cache, many tokens at once."""
    model, params = tiny
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 61, (2, 24)), jnp.int32)
    plan = kvjax.make_plan(model.config, methods.full(), prompt_len=24, max_new_tokens=0)

    @jax.jit
    def read(params, tokens):
        state = kvjax.init_state(plan, jnp.asarray([24, 24]))
        _, state, _ = kvjax.forward(model, params, tokens[:, :10], state, evict=True)
        logits, _, _ = kvjax.forward(model, params, tokens[:, 10:], state, last_only=False)
        return logits, plain_logits(model, params, tokens)[:, 10:]

    np.testing.assert_allclose(*read(params, tokens), atol=2e-4)


def test_forward_then_policy_is_prefill(tiny, prompts):
    """The contract in the open: the model measures, the policy decides."""
    model, params = tiny
    tokens, lengths = (jnp.asarray(x) for x in prompts)
    policy = methods.h2o(8)
    plan = kvjax.make_plan(model.config, policy, prompt_len=T, max_new_tokens=4)

    @jax.jit
    def read(params, tokens, lengths):
        _, state, stats = kvjax.forward(model, params, tokens, kvjax.init_state(plan, lengths), valid=lengths)
        return kvjax.prefill(model, params, tokens, plan, lengths=lengths)[1], state, policy(state, stats)

    joined, state, evicted = read(params, tokens, lengths)
    assert state.layers[0].num_slots == T
    for a, b, capacity in zip(evicted.layers, joined.layers, plan.capacities, strict=True):
        compacted = kvjax.compact(a, capacity)
        np.testing.assert_array_equal(compacted.pos, b.pos)
        np.testing.assert_allclose(compacted.k, b.k, atol=1e-5)
        assert b.num_slots == capacity == 9


def test_prompt_outputs_are_not_affected_by_eviction(shallow, prompts):
    model, params = shallow
    tokens, lengths = (jnp.asarray(x) for x in prompts)
    policies = (methods.full(), methods.h2o(4), methods.streaming_llm(4, sinks=1))
    plans = [kvjax.make_plan(model.config, p, prompt_len=T, max_new_tokens=1) for p in policies]
    read = jax.jit(lambda params, t, n: [kvjax.prefill(model, params, t, plan, lengths=n)[0] for plan in plans])
    logits = read(params, tokens, lengths)
    for other in logits[1:]:
        np.testing.assert_allclose(other, logits[0], atol=1e-5)


def test_generation_stops_at_the_end_token(shallow, prompts):
    model, params = shallow
    tokens, lengths = prompts
    free = kvjax.generate(model, params, tokens, lengths=lengths, max_new_tokens=12)
    first_row = np.asarray(free.tokens[0])
    at = next(i for i in range(3, 12) if first_row[i] not in first_row[:i])  # not before the loop has begun
    eos = int(first_row[at])
    stopped = kvjax.generate(model, params, tokens, lengths=lengths, max_new_tokens=12, eos_ids=(eos,), pad_id=60)
    assert stopped.lengths[0] == at + 1
    np.testing.assert_array_equal(stopped.tokens[0, : at + 1], first_row[: at + 1])
    assert (np.asarray(stopped.tokens[0, at + 1 :]) == 60).all()
    # A finished sequence reads nothing more: its cache is that of its own text.
    assert stopped.state.length[0] == lengths[0] + at
    for row in (1, 2):
        n = int(stopped.lengths[row])
        np.testing.assert_array_equal(stopped.tokens[row, :n], free.tokens[row, :n])


def test_padding_is_no_position(shallow, prompts):
    tokens, lengths = prompts
    _, state = read_prompt(shallow, methods.full(), tokens, max_new_tokens=1, lengths=jnp.asarray(lengths))
    for row, n in enumerate(lengths):
        found = np.sort(state.layers[0].pos[row, 0])
        assert found.tolist() == [-1] * (len(found) - n) + list(range(n))


def test_all_ended_runs_no_more_steps(shallow):
    model, params = shallow
    tokens = np.ones((1, 5), np.int32)
    first = int(kvjax.generate(model, params, tokens, max_new_tokens=1).tokens[0, 0])
    own = models.LanguageModel(dataclasses.replace(model.config, eos_ids=(first, 61)))
    result = kvjax.generate(own, params, tokens, max_new_tokens=500)
    assert result.lengths.tolist() == [1]
    assert int(result.state.step) == 0
    # The model's own end tokens, those that its vocabulary holds, are the default.
    assert [check_request(own, 1, kvjax.Greedy(), eos, 0) for eos in (None, (), 5)] == [(first,), (), (5,)]


def test_streaming_llm_keeps_ended_sequences(shallow, prompts):
    """Eviction before appending must not touch a sequence that appends nothing."""
    model, params = shallow
    tokens, lengths = (jnp.asarray(x) for x in prompts)
    plan = kvjax.make_plan(model.config, methods.streaming_llm(8), prompt_len=T, max_new_tokens=3)

    @jax.jit
    def read(params, tokens, lengths, active):
        _, state = kvjax.prefill(model, params, tokens, plan, lengths=lengths)
        _, after = kvjax.decode_step(model, params, tokens[:, 0].astype(jnp.int32), state, active=active)
        return state, after

    state, after = read(params, tokens, lengths, jnp.asarray([True, False, False]))
    for a, b in zip(after.layers, state.layers, strict=True):
        np.testing.assert_array_equal(np.sort(a.pos[1:]), np.sort(b.pos[1:]))
        np.testing.assert_array_equal(np.sort(a.rank[1:]), np.sort(b.rank[1:]))
    assert after.length.tolist() == [T + 1, 13, 1]


PLANNED = {"slots": methods.full(), "temperatures": methods.keyformer(4)}


@pytest.mark.parametrize("policy", PLANNED.values(), ids=PLANNED)
def test_driving_past_the_plan_is_visible(shallow, policy):
    """No token is overwritten silently, nor chosen by numbers made for fewer: logits become NaN."""
    model, params = shallow
    _, state = read_prompt(shallow, policy, np.ones((1, 4), np.int32), max_new_tokens=2)
    step = jax.jit(lambda params, state: kvjax.decode_step(model, params, jnp.ones((1,), jnp.int32), state))
    finite = []
    for _ in range(3):
        logits, state = step(params, state)
        finite.append(bool(jnp.isfinite(logits).all()))
    assert finite == [True, True, False]
    with pytest.raises(ValueError, match="4 tokens come after the prompt, but the plan was made for 2"):
        kvjax.decode_step(model, params, [1], state)


GO_ON = {
    "generate_from": lambda m, p, logits, state, n: kvjax.generate_from(m, p, logits, state, max_new_tokens=n + 1),
    "generate_beams_from": lambda m, p, logits, state, n: kvjax.generate_beams_from(
        m, p, logits, state, num_beams=2, max_new_tokens=n + 1
    ),
    "feed": lambda m, p, logits, state, n: kvjax.feed(m, p, jnp.ones((2, n), jnp.int32), state),
}


@pytest.mark.parametrize("name", GO_ON)
@pytest.mark.parametrize("policy", PLANNED.values(), ids=PLANNED)
def test_what_is_past_the_plan_is_refused(shallow, name, policy):
    """Whether a cache has room for three tokens where two were planned or not."""
    logits, state = read_prompt(shallow, policy, np.ones((2, 6), np.int32), max_new_tokens=2)
    with pytest.raises(ValueError, match="3 tokens come after the prompt, but the plan was made for 2; make it with"):
        GO_ON[name](*shallow, logits, state, 3)


@pytest.mark.parametrize("name", ["generate_from", "generate_beams_from"])
def test_traced_generation_past_the_plan_gives_no_tokens(shallow, name):
    logits, state = read_prompt(shallow, methods.full(), np.ones((2, 6), np.int32), max_new_tokens=2)
    run = jax.jit(lambda params, logits, state: GO_ON[name](shallow[0], params, logits, state, 4).tokens)
    tokens = np.asarray(run(shallow[1], logits, state)).reshape(2, -1)
    assert (tokens[:, :3] >= 0).all()
    assert (tokens[:, 3:] == -1).all()


@pytest.mark.parametrize(
    "policy",
    [
        kvjax.when(kvjax.every(3), methods.h2o(4)),
        methods.nacl(6, proxies=3, protect=2, decode_every=3, decode_rows="interval"),
    ],
    ids=["every", "nacl"],
)
def test_a_row_that_slept_goes_on_as_if_it_had_not(shallow, policy):
    """Schedules and intervals count a row's own steps, and no row outgrows its plan meanwhile."""
    model, params = shallow
    n, text = 9, np.random.default_rng(8).integers(0, 61, (2, 9))
    _, state = read_prompt(shallow, policy, np.arange(16).reshape(2, 8), max_new_tokens=n)

    @jax.jit
    def read(params, tokens, active, state):
        def step(state, now):
            logits, state = kvjax.decode_step(model, params, now[0], state, active=now[1])
            return state, logits

        return jax.lax.scan(step, state, (tokens, active))[1]

    awake = np.ones((n + 2, 2), bool)
    sleepy = awake.copy()
    sleepy[[1, 2], 0] = False
    read_by = lambda active: read(
        params, jnp.asarray(text[[0, 1], np.minimum(np.cumsum(active, 0) - 1, n - 1)], jnp.int32), active, state
    )
    rested, slept = np.asarray(read_by(awake)), np.asarray(read_by(sleepy))
    np.testing.assert_allclose(slept[sleepy[:, 0], 0], rested[:n, 0], atol=1e-5)
    np.testing.assert_allclose(slept[:n, 1], rested[:n, 1], atol=1e-5)


def test_a_row_that_slept_draws_as_if_it_had_not(shallow):
    """And the other row, which took a step meanwhile, draws what comes after it."""
    model, params = shallow
    logits, state = read_prompt(shallow, methods.full(), np.ones((2, 6), np.int32), max_new_tokens=12)

    @jax.jit
    def draw(params, logits, state, active):
        _, state = kvjax.decode_step(model, params, jnp.ones((2,), jnp.int32), state, active=active)
        sampler = kvjax.Sample(temperature=4.0)
        return kvjax.generate_from(model, params, logits, state, max_new_tokens=8, sampler=sampler).tokens

    asleep, one = (np.asarray(draw(params, logits, state, jnp.asarray([False, x]))) for x in (False, True))
    np.testing.assert_array_equal(one[0], asleep[0])
    assert (one[1] != asleep[1]).any()


READ = {
    "prefill": lambda m, p, t, plan, state: kvjax.prefill(m, p, jnp.full((1, 4), t), plan)[0],
    "decode_step": lambda m, p, t, plan, state: kvjax.decode_step(m, p, jnp.full((1,), t), state)[0],
    "feed": lambda m, p, t, plan, state: kvjax.feed(m, p, jnp.full((1, 1), t), state)[0],
}


@pytest.mark.parametrize("name", READ)
def test_ids_outside_the_vocabulary_are_never_read_as_tokens(shallow, name):
    """Not those that count from its end either: refused where they are known, and NaN where they are traced."""
    model, params = shallow
    plan = kvjax.make_plan(model.config, methods.full(), prompt_len=4, max_new_tokens=2)
    _, state = read_prompt(shallow, methods.full(), np.ones((1, 4), np.int32), max_new_tokens=2)
    for bad in (-1, -61, 61):
        with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary of 61"):
            READ[name](model, params, jnp.int32(bad), plan, state)
    traced = jax.jit(lambda params, t, state: READ[name](model, params, t, plan, state))
    finite = [bool(jnp.isfinite(traced(params, jnp.int32(t), state)).all()) for t in (-1, -61, 61, 60)]
    assert finite == [False, False, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 2}, "a model of 1 layers, but this one has 2"),
        ({"num_query_heads": 2}, "layer 0 has num_query_heads=4, but this one has 2"),
        ({"num_kv_heads": 1}, "layer 0 has num_kv_heads=2, but this one has 1"),
        ({"head_dim": 4}, "layer 0 has head_dim=8, but this one has 4"),
        ({"sliding_window": (3,)}, "layer 0 has window=None, but this one has 3"),
    ],
)
def test_a_plan_is_for_one_model(shallow, change, message):
    model, params = shallow
    plan = kvjax.make_plan(model.config, methods.full(), prompt_len=4, max_new_tokens=2)
    _, state = read_prompt(shallow, methods.full(), np.ones((1, 4), np.int32), max_new_tokens=2)
    other = models.LanguageModel(dataclasses.replace(model.config, **change))
    for name in READ:
        with pytest.raises(ValueError, match=message):
            READ[name](other, params, jnp.int32(1), plan, state)


PAST = {
    "generate": lambda model, params, tokens, **how: kvjax.generate(model, params, tokens, max_new_tokens=5, **how),
    "beams": lambda model, params, tokens, policy, **_: kvjax.generate_beams(
        model, params, tokens, max_new_tokens=5, num_beams=2, policy=policy
    ),
    "stream": lambda model, params, tokens, **how: list(kvjax.stream(model, params, tokens, max_new_tokens=5, **how)),
    "endless stream": lambda model, params, tokens, **how: list(
        itertools.islice(kvjax.stream(model, params, tokens, max_new_tokens=None, eos_ids=(), **how), 5)
    ),
    "prefill": lambda model, params, tokens, policy, block=None: kvjax.prefill(
        model,
        params,
        tokens,
        kvjax.make_plan(model.config, policy, prompt_len=tokens.shape[1], max_new_tokens=5),
        block=block,
    ),
    "read": lambda model, params, tokens, policy, block=None: list(
        kvjax.read(
            model, params, [*tokens[0].tolist(), 1, 2, 3, 4, 5], policy=policy, prompt_len=len(tokens[0]), chunk=5
        )
    ),
}


@pytest.mark.parametrize("door", PAST)
def test_texts_beyond_the_models_positions_are_warned_of(shallow, door):
    """With both numbers, once; not where all that meets stands within them."""
    model, params = models.LanguageModel(dataclasses.replace(shallow[0].config, max_position=16)), shallow[1]
    tokens = np.ones((1, 12), np.int32)
    with pytest.warns(match="a prompt of 12 tokens and 5 behind it are 17, but the model was made for 16 pos") as found:
        PAST[door](model, params, tokens, policy=methods.h2o(6))
    assert len(found) == 1
    PAST[door](model, params, tokens[:, :11], policy=methods.h2o(6))
    PAST[door](model, params, tokens, policy=methods.streaming_llm(6), block=4)


def test_readings_beyond_the_models_positions_are_warned_of(shallow):
    """What reads behind a state, and readings of the full cache."""
    model, params = models.LanguageModel(dataclasses.replace(shallow[0].config, max_position=16)), shallow[1]
    tokens, behind = np.ones((1, 12), np.int32), np.ones((1, 5), np.int32)
    _, state = read_prompt((model, params), methods.full(), tokens, max_new_tokens=1)
    for door in (
        lambda: kvjax.replay(model, params, behind, state),
        lambda: kvjax.analysis.read(model, params, tokens, behind),
    ):
        with pytest.warns(match="a prompt of 12 tokens and 5 behind it are 17, but the model was made for 16 pos"):
            door()
    kvjax.replay(model, params, behind, state, lengths=[4])  # the fifth is padding


@pytest.mark.parametrize("kind", ["positions", "border"])
def test_what_goes_on_from_a_generation_is_warned_of_when_it_gets_there(shallow, kind):
    """Its plan has room for more tokens than were asked for, and warned of."""
    rope = models.Rope("longrope", short_factor=(1.0,) * 4, long_factor=(2.0,) * 4, original_max=16)
    changed = {"max_position": 16} if kind == "positions" else {"rope": rope}
    model, params = models.LanguageModel(dataclasses.replace(shallow[0].config, **changed)), shallow[1]
    state = kvjax.generate(model, params, np.ones((1, 12), np.int32), max_new_tokens=4).state  # of 15 tokens
    logits, two = jnp.zeros((1, model.config.vocab_size)), np.ones((1, 2), np.int32)
    _, next_state = kvjax.decode_step(model, params, [1], state)
    for door in (
        lambda: kvjax.generate_from(model, params, logits, state, max_new_tokens=3),
        lambda: kvjax.generate_beams_from(model, params, logits, state, num_beams=2, max_new_tokens=3),
        lambda: kvjax.feed(model, params, two, state),
        lambda: kvjax.decode_step(model, params, [1], next_state),
    ):
        with pytest.warns(match="it are 17, but the model was made for 16|to 17 tokens crosses .* of 16") as found:
            door()
        assert len(found) == 1


def test_a_row_of_an_endless_stream_crosses_the_original_context(shallow):
    rope = models.Rope("longrope", short_factor=(1.0,) * 4, long_factor=(2.0,) * 4, original_max=16)
    model, params = models.LanguageModel(dataclasses.replace(shallow[0].config, rope=rope)), shallow[1]
    prompts = np.ones((2, 20), np.int32)
    stream = kvjax.stream(
        model, params, prompts, lengths=[20, 15], policy=methods.h2o(6), max_new_tokens=None, eos_ids=()
    )
    with pytest.warns(match="grows from 16 to 17 tokens crosses the model's original context of 16"):
        list(itertools.islice(stream, 4))


def test_a_text_that_crosses_the_original_context_is_warned_of(shallow):
    """Where factors of the rotation change, as at Phi-3's 4096 tokens."""
    rope = models.Rope("longrope", short_factor=(1.0,) * 4, long_factor=(2.0,) * 4, original_max=16)
    model, params = models.LanguageModel(dataclasses.replace(shallow[0].config, rope=rope)), shallow[1]
    with pytest.warns(match="from 12 to 17 tokens crosses the model's original context of 16, beyond which"):
        kvjax.generate(model, params, np.ones((1, 12), np.int32), max_new_tokens=5)
    with pytest.warns(match="from 14 to 17 tokens"):  # one row of a batch
        kvjax.generate(model, params, np.ones((2, 20), np.int32), lengths=[20, 14], max_new_tokens=3)
    for inside in (11, 17):
        kvjax.generate(model, params, np.ones((1, inside), np.int32), max_new_tokens=5)


@pytest.mark.parametrize(
    ("policy", "here", "there", "message"),
    [
        (
            dataclasses.replace(methods.h2o(4), positions="rerotate"),
            {"rope": models.Rope("dynamic", factor=4.0, original_max=4)},
            {},
            "layer 0 wants positions='rerotate', but this model's rotary scaling depends on the length",
        ),
        (methods.h2o(4), {}, {"num_kv_heads": 4}, "layer 0 has num_kv_heads=4, but this one has 2"),
    ],
    ids=["rotation", "heads"],
)
def test_a_plan_is_for_one_rotation_and_one_kind_of_heads(shallow, policy, here, there, message):
    """Neither shows in the shapes of what a state holds."""
    model, params = shallow
    plan = kvjax.make_plan(dataclasses.replace(model.config, **there), policy, prompt_len=4, max_new_tokens=2)
    other = models.LanguageModel(dataclasses.replace(model.config, **here))
    with pytest.raises(ValueError, match=message):
        kvjax.prefill(other, params, np.ones((1, 4), np.int32), plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {n: x for n, x in p.items() if n != "layers_2"}, r"\['layers_2'\].* is absent, but the model wants"),
        (lambda p: {**p, "layers_3": p["layers_2"]}, r"\['layers_3'\].*, but the model wants none"),
        (lambda p: {**p, "embed_tokens": p["embed_tokens"][:60]}, r"is \(60, 32\), but the model wants \(61, 32\)"),
        (lambda p: {"params": p}, "give the parameters that were loaded"),
        (
            lambda p: {**p, "lm_head": {"kernel": p["lm_head"]["kernel"] > 0}},
            r"\['lm_head'\]\['kernel'\] is bool; give",
        ),
        (lambda p: 2, "params are one array or number"),
    ],
)
def test_parameters_are_for_one_model(tiny, change, message):
    model, params = tiny
    with pytest.raises(ValueError, match=message):
        kvjax.generate(model, change(params), np.ones((1, 4), np.int32), max_new_tokens=2)


def test_sequences_that_a_state_does_not_have_give_no_logits_under_jit(shallow):
    """Outside of it they are refused."""
    model, params = shallow
    _, state = read_prompt(shallow, methods.h2o(4), np.ones((2, 6), np.int32), max_new_tokens=2)
    step = lambda params, state, rows: kvjax.decode_step(model, params, rows * 0, kvjax.take_rows(state, rows))[0]
    logits = jax.jit(step)(params, state, jnp.asarray([1, 2, -1, 0]))
    assert jnp.isnan(logits).all(-1).tolist() == [False, True, True, False]
    assert not jnp.isnan(logits[jnp.asarray([0, 3])]).any()


@pytest.mark.parametrize("read", [read_prompt, None], ids=["prefill", "generate"])
def test_donating_a_state_leaves_the_callers_arrays(shallow, read):
    model, params = shallow
    keys, lengths, tokens = jax.random.split(jax.random.key(0), 2), jnp.asarray([6, 6]), np.ones((2, 6), np.int32)
    options = {"key": keys, "lengths": lengths}
    if read is None:
        state = kvjax.generate(model, params, tokens, max_new_tokens=2, **options).state
    else:
        plan = kvjax.make_plan(model.config, methods.full(), prompt_len=6, max_new_tokens=2)
        state = kvjax.prefill(model, params, tokens, plan, **options)[1]
    step = jax.jit(
        lambda params, state: kvjax.decode_step(model, params, jnp.ones((2,), jnp.int32), state)[1], donate_argnums=1
    )
    step(params, state)
    assert not keys.is_deleted()
    assert not lengths.is_deleted()


def test_compact_positions_are_those_of_a_shorter_text(shallow):
    """With all sinks and no gap, StreamingLLM's ranks are positions; with a gap, they are ranks."""
    model, params = shallow
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, 61, (1, 12)), jnp.int32)

    def logits(policy):
        plan = kvjax.make_plan(model.config, policy, prompt_len=8, max_new_tokens=4)

        @jax.jit
        def read(params, tokens):
            _, state = kvjax.prefill(model, params, tokens[:, :8], plan)
            return kvjax.feed(model, params, tokens[:, 8:], state)

        return read(params, tokens)

    same, _ = logits(methods.streaming_llm(12, sinks=2))
    full, _ = logits(methods.full())
    np.testing.assert_allclose(same, full, atol=2e-4)
    _, state = logits(methods.streaming_llm(6, sinks=2))
    for layer in state.layers:
        order = np.argsort(np.asarray(layer.pos[0, 0]))
        assert layer.rank[0, 0][order].tolist() == list(range(6))
        assert sorted(layer.pos[0, 0].tolist()) == [0, 1, 8, 9, 10, 11]


def test_compact_positions_after_many_steps_equal_ranks(shallow):
    model, params = shallow
    policy = kvjax.when(kvjax.every(3), methods.streaming_llm(6, sinks=2))
    rng = np.random.default_rng(6)
    _, state = read_prompt(shallow, policy, rng.integers(0, 61, (2, 9)), max_new_tokens=14)
    step = jax.jit(kvjax.decode_step, static_argnums=0)
    for _ in range(14):
        _, state = step(model, params, jnp.asarray(rng.integers(0, 61, 2), jnp.int32), state)
        for layer in state.layers:
            expected = jnp.where(layer.live, kvjax.cache.state.ranks(layer.pos), -1)
            np.testing.assert_array_equal(layer.rank, expected)


def test_a_function_of_everything_can_be_jitted(shallow, prompts):
    """`generate` inside a user's jit, lengths traced."""
    model, params = shallow
    tokens, lengths = prompts
    policy = methods.snapkv(0.5, window_size=2, kernel_size=3)

    @jax.jit
    def pipeline(params, tokens, lengths):
        return kvjax.generate(model, params, tokens, lengths=lengths, policy=policy, max_new_tokens=5).tokens

    expected = kvjax.generate(model, params, tokens[:2], lengths=lengths[:2], policy=policy, max_new_tokens=5).tokens
    np.testing.assert_array_equal(pipeline(params, jnp.asarray(tokens[:2]), jnp.asarray(lengths[:2])), expected)


def test_sampling_is_per_row(shallow, prompts):
    model, params = shallow
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


def test_a_prompt_of_one_token(shallow):
    model, params = shallow
    for policy in (methods.full(), methods.h2o(4), methods.snapkv(0.25), methods.streaming_llm(8), methods.tova(0.5)):
        result = kvjax.generate(model, params, np.array([[3]]), policy=policy, max_new_tokens=6)
        assert result.tokens.shape == (1, 6)
        assert int(result.tokens.max()) < 61


def test_a_budget_above_the_prompt_keeps_it(shallow, prompts):
    model, params = shallow
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
        ({"lengths": [3.7, 20, 20]}, "lengths must be 3 integers"),
        ({"lengths": [[3], [20, 20]]}, "lengths must be 3 integers"),
        ({"tokens": [[1, 2], [3]]}, r"pad prompts of different lengths on the left \(models.pad_left\)"),
        ({"tokens": np.zeros((0, 4), np.int32)}, r"prompts are empty \(shape \(0, 4\)\)"),
        ({"tokens": "the quiet goat"}, "must be integers"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: generate at least 1 token"),
        ({"max_new_tokens": 4.0}, "max_new_tokens=4.0: generate at least 1 token, a whole number"),
        ({"max_new_tokens": 2**30}, "max_new_tokens=1073741824: .* and at most 1,073,741,823"),
        ({"eos_ids": 61}, "eos_ids=61: end tokens lie in the vocabulary of 61"),
        ({"eos_ids": (1.5,)}, r"eos_ids=\(1.5,\): end tokens"),
        ({"pad_id": None}, "pad_id=None: must be a whole number"),
        ({"key": 5}, "key=5 is not a PRNG key"),
        ({"sampler": "greedy"}, "sampler='greedy': must be of type Sampler, not str"),
        ({"policy": lambda: methods.h2o(0)}, "budget=0 tokens"),
        ({"policy": lambda: methods.h2o(-3)}, "cannot be negative"),
        ({"policy": lambda: methods.h2o(1.5)}, r"lies in \(0, 1\]"),
        ({"policy": lambda: methods.snapkv(16)}, r"budget of 16 tokens cannot hold the 32 that protect keeps"),
        (
            {"policy": lambda: methods.h2o(0.25, recent=0.5), "lengths": [20, 20, 20]},
            r"layer 0 gets a budget of 5 tokens for a prompt of 20, but protect keeps 10 \(sinks=0, recent=10\); raise",
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
@pytest.mark.usefixtures("unchecked")
def test_bad_input_is_refused_before_tracing(tiny, prompts, change, message):
    model, params = tiny

    def attempt(tokens=prompts[0], max_new_tokens=4, **rest):
        rest = {k: v() if callable(v) else v for k, v in rest.items()}
        kvjax.generate(model, params, tokens, max_new_tokens=max_new_tokens, **rest)

    with pytest.raises(ValueError, match=message):
        attempt(**change)


PLAN, STATE, UNREAD = object(), object(), object()
BAD_CALLS = [
    (kvjax.prefill, {"plan": STATE}, "plan is a KVState, not a CachePlan such as make_plan returns"),
    (kvjax.prefill, {"plan": methods.full()}, "plan is a Identity, not a CachePlan"),
    (kvjax.prefill, {"block": 2.5}, r"block=2.5: a block has at least 1 token, a whole number; use None"),
    (kvjax.prefill, {"block": "all"}, "block='all': a block"),
    (kvjax.prefill, {"model": {}}, "model is a dict, not a model"),
    (kvjax.generate, {"model": {}, "max_new_tokens": 2}, "model is a dict, not a model"),
    (
        kvjax.generate,
        {"sampler": kvjax.Sample(), "max_new_tokens": 2},
        "draws tokens, but there is no key",
    ),
    (kvjax.generate, {"pad_id": 2**40, "max_new_tokens": 2}, "pad_id=1099511627776: must be a whole number"),
    (kvjax.generate, {"key": np.uint32(3), "max_new_tokens": 2}, "is not a PRNG key"),
    (kvjax.generate, {"key": np.ones(5, np.uint32), "max_new_tokens": 2}, r"key has shape \(5,\), but one raw key"),
    (kvjax.generate_beams, {"key": 5, "max_new_tokens": 2}, "key=5 is not a PRNG key"),
    (kvjax.generate, {"attention_mask": np.ones((2, 8)), "max_new_tokens": 2}, "say the same twice; give one of them"),
    (
        kvjax.prefill,
        {"lengths": None, "attention_mask": np.full((2, 8), 2)},
        "must be 1 for tokens and 0 for",
    ),
    (
        kvjax.prefill,
        {"lengths": None, "attention_mask": np.ones(8)},
        r"shape \(2, 8\); got float64 of shape \(8,\)",
    ),
    (kvjax.prefill, {"lengths": None, "attention_mask": np.zeros((2, 8))}, "prompt lengths must lie between 1"),
    (kvjax.decode_step, {"state": None}, "state is a NoneType, not a KVState such as prefill returns"),
    (kvjax.decode_step, {"state": PLAN}, "state is a CachePlan, not a KVState"),
    (kvjax.decode_step, {"active": np.ones(3, bool)}, r"active has the shape \(3,\), but \(2,\) fits"),
    (kvjax.decode_step, {"active": [2, 0]}, "active must be an array of booleans"),
    (kvjax.feed, {"state": None}, "state is a NoneType"),
    (
        kvjax.generate_from,
        {"logits": np.ones((1, 61), np.float32)},
        r"logits has the shape \(1, 61\), but \(2, 61\) fits",
    ),
    (kvjax.generate_from, {"logits": np.ones((2, 60), np.float32)}, r"\(2, 60\), but \(2, 61\) fits"),
    (kvjax.generate_from, {"logits": None}, "logits must be an array of floats"),
    (kvjax.generate_from, {"state": None}, "state is a NoneType"),
    (kvjax.generate_beams_from, {"logits": np.ones((1, 61), np.float32)}, r"\(1, 61\), but \(2, 61\) fits"),
    (kvjax.generate_beams_from, {"logits": np.ones((2, 60), np.float32)}, r"\(2, 60\), but \(2, 61\) fits"),
    (kvjax.forward, {"phase": "banana"}, "phase='banana' is not one of"),
    (kvjax.forward, {"phase": "decode"}, r"shape \(2, 1\), one row of tokens a sequence; got int64 of shape \(2, 8\)"),
    (kvjax.forward, {"valid": [9, 8]}, r"valid=\[9, 8\]: must be 2 whole numbers, one a sequence, from 0 to 8"),
    (kvjax.forward, {"tokens": np.full((2, 8), -3)}, "token id -3 is outside the vocabulary of 61"),
    (kvjax.forward, {"tokens": np.zeros((2, 0))}, r"one row of tokens a sequence; got none, in the shape \(2, 0\)"),
    (kvjax.forward, {"state": PLAN}, "state is a CachePlan"),
    (kvjax.decode_step, {"state": UNREAD}, "the state has no slots for a token, as no prompt was read into it"),
    (kvjax.init_state, {"plan": None}, "plan is a NoneType"),
    (kvjax.init_state, {"lengths": [60, 6]}, "between 1 and the prompt's width 8, got 6 to 60"),
    (kvjax.init_state, {"lengths": []}, "lengths must be 1 integers"),
    (kvjax.init_state, {"dtype": "banana"}, "dtype='banana': must be a dtype of floats"),
    (kvjax.init_state, {"dtype": np.int32}, "must be a dtype of floats"),
    (kvjax.take_rows, {"rows": [0, 2]}, r"rows=\[0, 2\]: must be whole numbers, at least one, from 0 to 1"),
    (kvjax.take_rows, {"rows": [-1]}, "from 0 to 1"),
    (methods.h2o(6), {"attn_stats": None}, "applied to a KVState and the AttentionStats of forward"),
    (methods.h2o(4), {"attn_stats": kvjax.AttentionStats((), phase="decode")}, "the state was planned for Evict"),
    (methods.full(), {"attn_stats": kvjax.AttentionStats((), phase="prefill")}, "the state was planned for Evict"),
]


@pytest.fixture(scope="module")
def moment(shallow):
    """What drivers are given: by name, all that fits together."""
    tokens, policy = np.ones((2, 8), np.int64), methods.h2o(6)
    plan = kvjax.make_plan(shallow[0].config, policy, prompt_len=8, max_new_tokens=2)
    logits, state = read_prompt(shallow, policy, tokens, max_new_tokens=2)
    found = {"model": shallow[0], "params": shallow[1], "tokens": tokens, "token": [1, 1], "plan": plan}
    return found | {"state": state, "unread": kvjax.init_state(plan, [8, 8]), "logits": logits, "lengths": [8, 8]}


@pytest.mark.parametrize(("call", "change", "message"), BAD_CALLS)
@pytest.mark.usefixtures("unchecked")
def test_drivers_refuse_what_does_not_fit(moment, call, change, message):
    """Before anything is traced, and never by the error of a library."""
    names = list(inspect.signature(call).parameters)
    given = {n: x for n, x in moment.items() if n in names}
    marks = (PLAN, "plan"), (STATE, "state"), (UNREAD, "unread")
    given |= {n: next((moment[name] for mark, name in marks if x is mark), x) for n, x in change.items()}
    if call in (kvjax.generate_from, kvjax.generate_beams_from):
        given["max_new_tokens"] = 2
    with pytest.raises(ValueError, match=message):
        call(**given)


def test_a_block_is_no_larger_than_the_prompt(moment):
    assert [check_block(moment["plan"], block) for block in (None, 3, 10**12)] == [None, 3, 8]


@pytest.mark.usefixtures("unchecked")
def test_numbers_of_numpy_and_lists_are_as_good(shallow):
    model, params = shallow
    plain = kvjax.generate(model, params, np.array([[1, 2, 3]]), max_new_tokens=2, eos_ids=(60,), lengths=np.array([2]))
    other = kvjax.generate(
        model, params, [[1, 2, 3]], max_new_tokens=np.int64(2), eos_ids=np.int64(60), lengths=[2], pad_id=np.int32(0)
    )
    np.testing.assert_array_equal(plain.tokens, other.tokens)


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
