"""Reading prompts, decoding, generating and feeding: what holds whatever is evicted, and what is refused."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import budgets, compose, methods, models
from kvjax.experiments.core.continuing import continued
from kvjax.generation import beams, loop, sampling
from kvjax.generation import generate as generating
from kvjax.run import steps
from kvjax.run.checks import end_ids
from kvjax.run.plan import make_plan
from kvjax.text import read as reading
from kvjax.text import stream as streams
from tests.marks import slow_but
from tests.tensors import live_positions

T = 12
TOKENS, LENGTHS = np.random.default_rng(3).integers(0, 61, (3, T)), np.array([T, 7, 1])
FULL, H2O = methods.full(), methods.h2o(6)


@pytest.fixture(scope="module")
def read(shallow):
    """A prompt read by the model of one layer, and how it goes on."""
    return lambda policy=FULL, tokens=TOKENS, most=5, **how: steps.prefill(
        *shallow, tokens, policy=policy, max_new_tokens=most, **how
    )


def test_cached_decoding_is_one_pass_over_the_text(shallow, read):
    """Logits of the prompt's last token and of those behind it are those of longer prompts; padding is no position."""
    logits, state = read(lengths=LENGTHS)
    assert live_positions(state.layers[0]) == [[list(range(n))] * 2 for n in LENGTHS]
    more = np.random.default_rng(4).integers(0, 61, (3, 5))
    found, after = generating.feed(*shallow, more, state)
    for n in (1, 5):
        again, _ = read(tokens=np.concatenate([TOKENS, more[:, :n]], axis=1), lengths=LENGTHS + n)
        np.testing.assert_allclose(found[:, n - 1], again, atol=2e-4)
    assert after.length.tolist() == (LENGTHS + 5).tolist()
    scores, _ = generating.score(*shallow, more, logits, state)
    every = jax.nn.log_softmax(jnp.concatenate([logits[:, None], found[:, :-1]], axis=1))
    np.testing.assert_allclose(scores, np.take_along_axis(np.asarray(every), more[..., None], -1)[..., 0], atol=1e-4)


@pytest.mark.slow
def test_a_short_row_is_fed_as_it_is_alone(shallow, read):
    """Logits and what stays of the cache; padding has no logits, and may be any id."""
    row, n, policy = 1, np.array([5, 2, 4]), methods.streaming_llm(6, sinks=1)
    more = np.random.default_rng(5).integers(0, 61, (3, 5))
    more[row, :3] = -1
    logits, state = generating.feed(*shallow, more, read(policy, lengths=LENGTHS)[1], lengths=n)
    _, alone = read(policy, TOKENS[[row]], lengths=LENGTHS[[row]])
    expected, kept = generating.feed(*shallow, more[[row], 3:], alone)
    np.testing.assert_allclose(logits[row, 3:], expected[0], atol=1e-4)
    assert np.isnan(logits[row, :3]).all()
    assert state.length[row] == kept.length[0]
    assert live_positions(state.layers[0])[row] == live_positions(kept.layers[0])[0]


def test_generation_stops_at_the_end_token(shallow):
    """What ended reads nothing more; the others go on. The model's own end tokens are the default."""
    free = generating.generate(*shallow, TOKENS, lengths=LENGTHS, max_new_tokens=12)
    first = np.asarray(free.tokens[0])
    at = next(i for i in range(3, 12) if first[i] not in first[:i])
    eos = (int(first[at]),)
    ended = generating.generate(*shallow, TOKENS, lengths=LENGTHS, max_new_tokens=12, eos_ids=eos, pad_id=60)
    assert ended.lengths[0] == at + 1
    assert (np.asarray(ended.tokens[0, at + 1 :]) == 60).all()
    assert (np.asarray(ended.log_probs[0, at + 1 :]) == 0).all()
    assert ended.state.length[0] == LENGTHS[0] + at
    for row, n in enumerate(ended.lengths.tolist()):
        np.testing.assert_array_equal(ended.tokens[row, :n], free.tokens[row, :n])
        np.testing.assert_array_equal(ended.log_probs[row, :n], free.log_probs[row, :n])
    own = models.LanguageModel(dataclasses.replace(shallow[0].config, eos_ids=(eos[0], 61)))
    assert [end_ids(own, x) for x in (None, (), 5)] == [eos, (), (5,)]


@pytest.mark.parametrize("policy", slow_but([FULL, methods.keyformer(4)], FULL))
def test_what_is_past_the_plan_is_refused_and_under_jit_visible(shallow, read, policy):
    """Whether there is a slot or not: no token is overwritten, logits become NaN and tokens -1."""
    model, params = shallow
    logits, state = read(policy, np.ones((2, 6), np.int32), 2)
    one, step = jnp.ones((2,), jnp.int32), jax.jit(lambda params, state: steps.decode_step(model, params, one, state))
    after, finite = state, []
    for _ in range(3):
        found, after = step(params, after)
        finite.append(bool(jnp.isfinite(found).all()))
    assert finite == [True, True, False]
    with pytest.raises(ValueError, match="4 tokens come after the prompt, but the state was planned for 2; read the"):
        steps.decode_step(model, params, [1, 1], after)
    behind = {
        "generate_from": lambda s, n: generating.generate_from(model, params, logits, s, max_new_tokens=n + 1),
        "beams": lambda s, n: beams.generate_beams_from(model, params, logits, s, num_beams=2, max_new_tokens=n + 1),
        "feed": lambda s, n: generating.feed(model, params, np.ones((2, n), np.int32), s),
    }
    for door in behind.values():
        with pytest.raises(ValueError, match="3 tokens come after the prompt, but the state was planned for 2"):
            door(state, 3)
    for name in ("generate_from", "beams"):
        tokens = np.asarray(jax.jit(lambda s, name=name: behind[name](s, 4).tokens)(state)).reshape(2, -1)
        assert (tokens[:, :3] >= 0).all()
        assert (tokens[:, 3:] == -1).all()
    with pytest.raises(ValueError, match="3 tokens come after the prompt"):
        generating.feed(model, params, np.ones((2, 4), np.int32), state, lengths=[2, 3])


@pytest.mark.parametrize(
    "policy", [compose.when(budgets.Schedule(every=3), methods.h2o(4)), methods.streaming_llm(4, sinks=1)]
)
def test_a_row_that_slept_goes_on_as_if_it_had_not(shallow, read, policy):
    """Schedules count a row's own steps, and what it keeps is left alone."""
    n, text = 7, np.random.default_rng(8).integers(0, 61, (2, 7))
    _, state = read(policy, TOKENS[:2], most=n)

    @jax.jit
    def run(params, tokens, active, state):
        def step(state, now):
            logits, after = steps.decode_step(shallow[0], params, now[0], state, active=now[1])
            return after, (logits, after.layers[0].head_pos, after.layers[0].memory)

        return jax.lax.scan(step, state, (tokens, active))[1]

    def by(active):
        tokens = text[[0, 1], np.minimum(np.cumsum(active, 0) - 1, n - 1)]
        logits, pos, memory = run(shallow[1], jnp.asarray(tokens, jnp.int32), jnp.asarray(active), state)
        return np.asarray(logits), np.sort(pos), memory

    awake = np.ones((n + 2, 2), bool)
    sleepy = awake.copy()
    sleepy[[1, 2], 0] = False
    (rested, _, _), (slept, kept, memory) = by(awake), by(sleepy)
    np.testing.assert_allclose(slept[sleepy[:, 0], 0], rested[:n, 0], atol=1e-5)
    np.testing.assert_allclose(slept[:n, 1], rested[:n, 1], atol=1e-5)
    np.testing.assert_array_equal(kept[2, 0], kept[0, 0])
    for remembered in jax.tree.leaves(memory):
        np.testing.assert_array_equal(remembered[2, 0], remembered[0, 0])


def test_rows_go_on_behind_given_tokens_up_to_their_limits(shallow, read):
    """Logits of one reading of the same tokens say what was drawn, and how likely all were; the last ones are read."""
    num_given, limits, steps = np.array([3, 0, 1]), np.array([6, 4, 9]), 10
    logits, state = read(H2O, most=steps)
    given, known = np.random.default_rng(6).integers(0, 61, (steps, 3)), np.arange(steps)[:, None] < num_given
    at = loop.begin(logits, state, given=(given[0], known[0]))
    run = jax.jit(lambda at, *args: loop.decode_tokens(*shallow, at, *args, chunk=steps, waits=False))
    found, after = continued(run, at, (given, known), limits)
    assert after.state.length.tolist() == (T + limits).tolist()
    tokens = [found.tokens[:n, b].tolist() for b, n in enumerate(limits)]
    again, _ = generating.feed(*shallow, models.pad_left(tokens)[0], state, lengths=limits)
    for b, n in enumerate(limits):
        own = np.concatenate([logits[b : b + 1], again[b, limits.max() - n : -1]])
        wanted = np.where(known[:n, b], given[:n, b], own.argmax(-1))
        assert tokens[b] == wanted.tolist()
        every = np.asarray(jax.nn.log_softmax(own))[np.arange(n), wanted]
        np.testing.assert_allclose(found.log_probs[:n, b], every, atol=1e-4)


READ = {
    "prefill": lambda m, p, t, state: steps.prefill(m, p, jnp.full((1, 4), t), max_new_tokens=2)[0],
    "decode_step": lambda m, p, t, state: steps.decode_step(m, p, jnp.full((1,), t), state)[0],
    "feed": lambda m, p, t, state: generating.feed(m, p, jnp.full((1, 1), t), state)[0],
}


@pytest.mark.parametrize("name", READ)
def test_ids_outside_the_vocabulary_are_never_read_as_tokens(shallow, read, name):
    """Not those that count from its end either: refused where they are known, and NaN where they are traced."""
    model, params = shallow
    _, state = read(tokens=np.ones((1, 4), np.int32), most=2)
    for bad in (-1, -61, 61):
        with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary, 0 to 60"):
            READ[name](model, params, jnp.int32(bad), state)
    traced = jax.jit(lambda params, t, state: READ[name](model, params, t, state))
    finite = [bool(jnp.isfinite(traced(params, jnp.int32(t), state)).all()) for t in (-1, -61, 61, 60)]
    assert finite == [False, False, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 2}, "the state's model has num_layers=1, but this one has 2; give the model that read"),
        ({"num_query_heads": 2}, "num_query_heads=4 in layer 0, but this one has 2"),
        ({"num_kv_heads": 1}, "num_kv_heads=2 in layer 0, but this one has 1"),
        ({"head_dim": 4}, "head_dim=8 in layer 0, but this one has 4"),
        ({"sliding_window": (3,)}, "window=None in layer 0, but this one has 3"),
    ],
)
def test_a_state_is_for_one_model(shallow, read, change, message):
    _, state = read(tokens=np.ones((1, 4), np.int32), most=2)
    other = models.LanguageModel(dataclasses.replace(shallow[0].config, **change))
    for name in ("decode_step", "feed"):
        with pytest.raises(ValueError, match=message):
            READ[name](other, shallow[1], jnp.int32(1), state)


def test_rows_of_a_state_are_those_that_there_are(shallow, read):
    _, state = read(lengths=LENGTHS)
    assert state[[2, 0, 2]].length.tolist() == [1, T, 1]
    with pytest.raises(ValueError, match=r"rows=\[0, 3\] are taken of 3 sequences; give 0 to 2"):
        _ = state[[0, 3]]


FIVE = {"max_new_tokens": 5}
PAST = {
    "generate": lambda m, p, t, **how: generating.generate(m, p, t, **FIVE, **how),
    "beams": lambda m, p, t, policy, block=None: beams.generate_beams(m, p, t, num_beams=2, policy=policy, **FIVE),
    "stream": lambda m, p, t, **how: list(streams.stream(m, p, t, **FIVE, **how)),
    "endless stream": lambda m, p, t, **how: list(
        itertools.islice(streams.stream(m, p, t, max_new_tokens=None, eos_ids=(), **how), 5)
    ),
    "prefill": lambda m, p, t, **how: steps.prefill(m, p, t, **FIVE, **how),
    "start": lambda m, p, t, policy, block=None: steps.start(m, policy=policy, lengths=[len(t[0])], **FIVE),
    "read": lambda m, p, t, policy, block=None: list(
        reading.read(m, p, [*t[0].tolist(), 1, 2, 3, 4, 5], policy=policy, prompt_len=len(t[0]), chunk=5)
    ),
}


@pytest.mark.parametrize("door", slow_but(PAST, "read", "start"))
def test_texts_beyond_the_models_positions_are_warned_of(shallow, door):
    """With both numbers, once; not where all that meets stands within them."""
    model, params = models.LanguageModel(dataclasses.replace(shallow[0].config, max_position=16)), shallow[1]
    tokens = np.ones((1, 12), np.int32)
    with pytest.warns(match="a prompt of 12 tokens and 5 behind it are 17, but the model was made for 16 pos") as found:
        PAST[door](model, params, tokens, policy=H2O)
    assert len(found) == 1
    PAST[door](model, params, tokens[:, :11], policy=H2O)
    PAST[door](model, params, tokens, policy=methods.streaming_llm(6), block=4)


@pytest.mark.slow
def test_a_text_that_crosses_the_original_context_is_warned_of(shallow):
    """Where factors of the rotation change, as at Phi-3's 4096 tokens; each row of a batch counts."""
    rope = models.Rope("longrope", short_factor=(1.0,) * 4, long_factor=(2.0,) * 4, original_max=16)
    model, params = models.LanguageModel(dataclasses.replace(shallow[0].config, rope=rope)), shallow[1]
    warned = "original context of 16 are rotated by other factors"
    with pytest.warns(match=f"a prompt of 12 tokens and 5 behind it .*{warned}"):
        steps.prefill(model, params, np.ones((1, 12), np.int32), **FIVE)
    with pytest.warns(match=warned):
        steps.prefill(model, params, np.ones((2, 20), np.int32), lengths=[20, 14], **FIVE)
    with pytest.warns(match=warned):
        PAST["endless stream"](model, params, np.ones((2, 20), np.int32), lengths=[20, 15], policy=H2O)
    for inside in (11, 17):
        steps.prefill(model, params, np.ones((1, inside), np.int32), **FIVE)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (models.Rope("dynamic", factor=4.0, original_max=4), "turn by the length of the text; use"),
        (models.Rope("yarn", attention_factor=1.2), "YaRN .*multiply it by a factor at each turn"),
    ],
)
def test_stored_keys_are_turned_further_only_where_that_can_be(shallow, rope, message):
    config = dataclasses.replace(shallow[0].config, rope=rope)
    with pytest.raises(ValueError, match=f'layer 0 wants tokens at positions="shifted", but .*{message}'):
        make_plan(config, methods.streaming_llm(6), [T], T, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {n: x for n, x in p.items() if n != "norm"}, r"params\['norm'\].*: missing, but the model has"),
        (lambda p: {**p, "layers_3": p["layers_0"]}, r"\['layers_3'\].*, but the model has none"),
        (lambda p: {**p, "embed_tokens": p["embed_tokens"][:60]}, r"\(60, 32\), but the model has \(61, 32\)"),
        (lambda p: {"params": p}, "give those that were loaded"),
        (lambda p: {**p, "lm_head": {"weight": p["lm_head"]["weight"] > 0}}, r"\['weight'\] is bool, not an array of"),
        (lambda p: 2, "is int, not an array of floats; give what models.load"),
    ],
)
def test_parameters_are_for_one_model(shallow, change, message):
    with pytest.raises(ValueError, match=message):
        generating.generate(shallow[0], change(shallow[1]), np.ones((1, 4), np.int32), max_new_tokens=2)


def test_donating_a_state_leaves_the_callers_arrays(shallow, read):
    keys, lengths = jax.random.split(jax.random.key(0), 2), jnp.asarray([6, 6])
    tokens = np.ones((2, 6), np.int32)
    step = jax.jit(
        lambda params, state: steps.decode_step(shallow[0], params, jnp.ones((2,), jnp.int32), state)[1],
        donate_argnums=1,
    )
    step(shallow[1], read(tokens=tokens, key=keys, lengths=lengths)[1])
    step(shallow[1], generating.generate(*shallow, tokens, key=keys, lengths=lengths, max_new_tokens=2).state)
    assert not keys.is_deleted()
    assert not lengths.is_deleted()


def test_a_function_of_everything_can_be_jitted(shallow):
    """`generate` inside a user's jit, lengths traced."""
    policy = methods.snapkv(0.5, window=2, kernel=3)
    run = lambda params, tokens, lengths: generating.generate(
        shallow[0], params, tokens, lengths=lengths, policy=policy, max_new_tokens=5
    )
    expected = run(shallow[1], TOKENS[:2], LENGTHS[:2])
    found = jax.jit(lambda *x: run(*x).tokens)(shallow[1], jnp.asarray(TOKENS[:2]), jnp.asarray(LENGTHS[:2]))
    np.testing.assert_array_equal(found, expected.tokens)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_sampling_is_per_row_and_numbers_of_numpy_and_lists_are_as_good(shallow):
    keys, sampler = jax.random.split(jax.random.key(4), 3), sampling.Sample(temperature=0.8, top_k=20, top_p=0.9)
    run = lambda t, n, k, most=8: (
        generating.generate(
            *shallow, t, lengths=n, max_new_tokens=most, sampler=sampler, key=k, policy=methods.random(6)
        ).tokens
    )
    together = run(TOKENS, LENGTHS, keys)
    np.testing.assert_array_equal(together, run(TOKENS.tolist(), LENGTHS.tolist(), keys, np.int64(8)))
    np.testing.assert_array_equal(together[1], run(TOKENS[1:2], LENGTHS[1:2], keys[1:2])[0])
    assert not np.array_equal(together, run(TOKENS, LENGTHS, jax.random.split(jax.random.key(5), 3)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros((1, 0), np.int32)}, r"got nothing \(shape \(1, 0\)\), but at least one is needed"),
        ({"tokens": np.zeros((1, 4), np.float32)}, "must be integers, one row a sequence"),
        ({"tokens": [[1, 2], [3]]}, r"pad shorter rows on the left \(models.pad_left\)"),
        ({"lengths": [0, 12, 3]}, "lengths go from 0 to 12, but a row has 1 to 12 tokens"),
        ({"lengths": [2]}, r"lengths must be integers, of shape \(3\); got int64 of shape \(1,\)"),
        ({"eos_ids": 61}, "eos_ids=61 must be a whole number from 0 to 60; end tokens lie in"),
        ({"pad_id": 61}, "pad_id=61 must be a whole number from 0 to 60; what follows the end"),
        ({"key": np.ones(5, np.uint32)}, "must be a PRNG key"),
        ({"key": jax.random.split(jax.random.key(0), 2)}, r"shape \(2,\), but there are 3 sequences"),
        ({"sampler": sampling.Sample()}, "draws tokens, but there is no key"),
        ({"attention_mask": np.ones((3, T)), "lengths": LENGTHS}, "say the same twice; give one of them"),
        ({"attention_mask": np.full((3, T), 2)}, "must be 1 for tokens and 0 for padding; it has 2"),
        ({"attention_mask": np.ones(8)}, r"shape \(3, 12\); got float64 of shape \(8,\)"),
        ({"policy": methods.h2o(0.25, recent=0.5)}, "a budget of 3 tokens cannot hold 0 sinks and 6 recent tokens"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_input_is_refused_before_tracing(shallow, change, message):
    given = {"model": shallow[0], "params": shallow[1], "tokens": TOKENS, "max_new_tokens": 4} | change
    with pytest.raises(ValueError, match=message):
        generating.generate(**given)


BAD_CALLS = [
    (steps.decode_step, {"active": np.ones(3, bool)}, r"of shape \(2\); got bool of shape \(3,\)"),
    (steps.decode_step, {"active": [2, 0]}, "active must be True or False, one a sequence"),
    (steps.decode_step, {"token": [1]}, r"token must be integers, one a sequence, of shape \(2\); got"),
    (generating.feed, {"lengths": [0, 2]}, "lengths go from 0 to 2, but a row has 1 to 2 tokens"),
    (generating.generate_from, {"logits": np.ones((1, 61), np.float32)}, r"of shape \(2, 61\); got float32 of .*1, 61"),
    (generating.generate_from, {"sampler": sampling.Sample(repetition_penalty=1.2)}, "give tokens=, what the state"),
    (beams.generate_beams_from, {"logits": np.ones((2, 60), np.float32)}, r"of shape \(2, 61\); got"),
]


@pytest.mark.parametrize(("call", "change", "message"), BAD_CALLS)
@pytest.mark.usefixtures("unchecked")
def test_drivers_refuse_what_does_not_fit(shallow, read, call, change, message):
    """Before anything is traced, and never by the error of a library."""
    logits, state = read(H2O, np.ones((2, 8), np.int64), 2)
    given = {"model": shallow[0], "params": shallow[1], "state": state} | (
        {"logits": logits, "max_new_tokens": 2}
        if "from" in call.__name__
        else {"tokens": np.ones((2, 2), np.int64)}
        if call is generating.feed
        else {"token": [1, 1]}
    )
    with pytest.raises(ValueError, match=message):
        call(**given | change)
    empty = steps.start(shallow[0], policy=H2O, lengths=[8, 8], max_new_tokens=2)
    with pytest.raises(ValueError, match="the state holds no prompt that was read to its end"):
        call(**given | {"state": empty})


def test_a_nearly_certain_token_keeps_its_digits():
    """However large the logits, its log-probability is exact to float32's spacing at 1."""
    found = loop.log_prob(jnp.array([[10_000.0, 9_990.0]]), jnp.array([0], jnp.int32))
    np.testing.assert_allclose(found, -np.log1p(np.exp(-10.0)), rtol=0, atol=2**-23)
