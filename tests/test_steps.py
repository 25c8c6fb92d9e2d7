"""Prompts read at once and in blocks, what is appended to a cache, and where stored keys stand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import budgets, compose, forward, methods, models, prefill, start
from kvjax.contract import Layout
from kvjax.generation import generate as generating
from kvjax.generation import sampling
from kvjax.models.gemma import GemmaConfig
from kvjax.models.gpt2 import GPT2Config
from kvjax.models.mpt import MPTConfig
from kvjax.models.opt import OPTConfig
from kvjax.run import layers, steps
from kvjax.run.plan import bucket, plan_request
from tests.marks import marks, slow_but
from tests.tensors import live_positions

T, LENGTHS = 24, np.array([24, 14])
IDS = np.random.default_rng(3).integers(0, 61, (2, T))
SIZES = {"vocab_size": 61, "embed_dim": 32, "mlp_dim": 24, "num_query_heads": 4, "head_dim": 8, "num_layers": 1}
GROUPED = {**SIZES, "num_kv_heads": 2}
ROPES = {
    "longrope": models.Rope("longrope", short_factor=(1.0,) * 4, long_factor=(1.0, 2.0, 3.0, 4.0), original_max=16),
    "dynamic": models.Rope("dynamic", factor=3.0, original_max=16),
}
CONFIGS = {
    **{name: models.ModelConfig(**GROUPED, rope=rope) for name, rope in ROPES.items()},
    "learned": GPT2Config(**SIZES, num_kv_heads=4, max_position=T),
    "alibi": MPTConfig(**SIZES, num_kv_heads=4),
    "cap and window": GemmaConfig(**GROUPED, generation=2, attention_cap=1.5, sliding_window=(5,)),
}


def made(config):
    model = models.LanguageModel(config)
    return model, jax.tree.map(lambda x: 2 * x, jax.jit(model.init)(jax.random.key(0)))


def at(policy, positions):
    return dataclasses.replace(policy, layout=Layout(positions))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a prompt of")  # a row inside of the original context
@pytest.mark.parametrize(
    ("kind", "positions"), [*((name, "original") for name in CONFIGS), ("longrope", "rank"), ("dynamic", "rank")]
)
def test_blocks_that_keep_everything_are_the_whole_prompt(kind, positions):
    """Rotations take the length of the prompt in every block; one row ends beyond an original context of 16."""
    model, params = made(CONFIGS[kind])
    how = {"policy": at(methods.h2o(40), positions), "max_new_tokens": 0, "lengths": LENGTHS}
    whole, _ = steps.prefill(model, params, IDS, **how)
    blocks, _ = steps.prefill(model, params, IDS, **how, block=5)
    np.testing.assert_allclose(blocks, whole, atol=1e-4)


def test_recency_does_not_depend_on_blocks(shallow):
    """A window keeps the same tokens however the prompt is cut, in two programs whatever the number of blocks."""
    before = layers.layer_step._cache_size()
    for block in (1, 7, 24, 100):
        how = {"policy": methods.window(9), "max_new_tokens": 2, "block": block}
        _, state = steps.prefill(*shallow, IDS, **how)
        assert live_positions(state.layers[0]) == [[list(range(T - 9, T))] * 2] * 2
    assert layers.layer_step._cache_size() <= before + 2 + 2 + 1 + 0


def test_memory_does_not_grow_with_the_prompt(shallow, monkeypatch):
    """Behind every block the cache is as large, however many have been read."""
    read, held = layers.step, []

    def recorded(*args, **how):
        found = read(*args, **how)
        held.append(found[1].nbytes)
        return found

    monkeypatch.setattr(steps, "step", recorded)
    for n in (10, T):
        steps.prefill(*shallow, IDS[:, :n], policy=methods.roco(6), max_new_tokens=2, block=6)
    assert held == held[:1] * (2 + 4)


def test_blocks_are_one_program_inside_of_jit(shallow, monkeypatch):
    """All but the last are traced once, and keep the same tokens."""
    model, params = shallow
    how = {"policy": methods.roco(6), "max_new_tokens": 2, "block": 3}
    read = lambda params, tokens: steps.prefill(model, params, tokens, **how)
    logits, state = read(params, IDS)
    step, traced = layers.step, []
    monkeypatch.setattr(steps, "step", lambda *args, **how: traced.append(how) or step(*args, **how))
    inside, other = jax.jit(read)(params, IDS)
    assert len(traced) == 2
    np.testing.assert_allclose(inside, logits, atol=1e-5)
    assert live_positions(other.layers[0]) == live_positions(state.layers[0])


def test_tokens_appended_to_a_cache_are_one_pass(shallow):
    """Many at once, of a padded row too, into slots that are free."""
    model, params = shallow
    _, state = steps.prefill(model, params, IDS[:, :10], max_new_tokens=T - 10)
    logits, after, _ = forward(model, params, IDS[:, 10:], state, valid=[14, 5])
    for row, n in enumerate((14, 5)):
        text = np.concatenate([IDS[row, :10], IDS[row, T - n :]])
        whole, _ = steps.prefill(model, params, text[None], max_new_tokens=0)
        np.testing.assert_allclose(logits[row], whole[0], atol=2e-4)
    assert after.length.tolist() == [24, 15]


AWAITS = compose.when(budgets.Schedule(prefill=False, every=1, before=True), methods.streaming_llm(10))
OVER = {
    "after a step": methods.h2o(10),
    "before it": AWAITS,
    "in all layers": compose.shared_layers(methods.window(10)),
}


@pytest.mark.parametrize("name", slow_but(OVER, "after a step"))
def test_the_budget_holds_again_at_the_step_that_follows_many_tokens(shallow, name):
    """Of a `forward` to which no policy was applied; also where the prompt itself was kept whole."""
    state = steps.prefill(*shallow, IDS[:, :12], policy=OVER[name], max_new_tokens=6)[1]
    state = forward(*shallow, IDS[:, 12:15], state)[1]
    assert int(state.num_live.min()) > 11
    for after in (
        steps.decode_step(*shallow, IDS[:, 15], state)[1],
        generating.feed(*shallow, IDS[:, 15:17], state)[1],
    ):
        assert int(after.num_live.max()) == int(after.num_live.min()) == 10


def test_an_empty_state_is_for_texts_within_the_models_positions():
    with pytest.raises(ValueError, match="prompt and new tokens are 25, but the model has learned 24 positions"):
        start(models.LanguageModel(CONFIGS["learned"]), policy=methods.full(), lengths=[T], max_new_tokens=1)


@pytest.mark.parametrize("config", [CONFIGS["learned"], OPTConfig(**SIZES, num_kv_heads=4)], ids=["gpt2", "opt"])
@pytest.mark.parametrize("positions", ["rank", "shifted"])
def test_learned_positions_are_not_moved(config, positions):
    model = models.LanguageModel(config)
    with pytest.raises(ValueError, match=f'positions="{positions}", but the model adds learned positions'):
        start(model, policy=at(methods.streaming_llm(6), positions), lengths=[8], max_new_tokens=2)


STEPS = 12
MORE = np.random.default_rng(4).integers(0, 61, (3, STEPS))
PROMPTS, PROMPT_LENGTHS = np.random.default_rng(6).integers(0, 61, (3, 12)), np.array([12, 7, 2])
NINE = methods.streaming_llm(9, sinks=3)


def fed(model, params, policy, block=None):
    how = {"policy": policy, "lengths": PROMPT_LENGTHS, "max_new_tokens": STEPS, "block": block}
    return generating.feed(model, params, MORE, steps.prefill(model, params, PROMPTS, **how)[1])


SLIDE = {  # name: (model, policy, block)
    "rotary": (None, NINE, None),
    "blocks": (None, methods.streaming_llm(0.5, sinks=2), 7),
    "alibi": ("alibi", NINE, None),
    "cap and window": ("cap and window", NINE, None),
    "every 3": (None, compose.when(budgets.Schedule(every=3), NINE), None),
    "drop 4": (None, compose.when(budgets.Schedule(over=2, drop=4), NINE), None),
    "protected": (None, compose.protect(NINE, sinks=2, recent=3), None),
    "no sinks": (None, dataclasses.replace(NINE, sinks=0), None),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=marks(n, ("rotary", "alibi", "protected"), ("protected",))) for n in SLIDE]
)
def test_keys_that_are_shifted_are_those_at_their_ranks(shallow, name):
    """Prompts longer than the budget, within it, and shorter than the sinks."""
    kind, policy, block = SLIDE[name]
    model, params = shallow if kind is None else made(CONFIGS[kind])
    found, state = fed(model, params, policy, block)
    wanted, other = fed(model, params, at(policy, "rank"), block)
    np.testing.assert_allclose(found, wanted, atol=2e-5 * float(np.abs(wanted).max()))
    assert live_positions(state.layers[0]) == live_positions(other.layers[0])


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["rank", "shifted"])
def test_ranks_are_positions_until_a_token_goes(shallow, positions):
    """Of a gap nothing is seen: logits are those of the first sinks and the last tokens as a text of their own."""
    expected, _ = fed(*shallow, methods.full())
    found, _ = fed(*shallow, at(methods.streaming_llm(24, sinks=2), positions))
    np.testing.assert_allclose(found, expected, atol=2e-4)
    policy = at(methods.streaming_llm(6, sinks=2), positions)
    _, state = steps.prefill(*shallow, PROMPTS[:1], policy=policy, max_new_tokens=1)
    assert live_positions(state.layers[0]) == [[[0, 1, 8, 9, 10, 11]] * 2]
    found, _ = steps.decode_step(*shallow, MORE[0, :1], state)
    text = np.concatenate([PROMPTS[0, [0, 1, 9, 10, 11]], MORE[0, :1]])[None]
    np.testing.assert_allclose(found, steps.prefill(*shallow, text, max_new_tokens=0)[0], atol=2e-4)


@pytest.mark.slow
def test_a_million_tokens_later(shallow):
    """Logits of keys that are rotated by rank are those at the beginning of the text, of rows that have all sinks."""
    policy = at(NINE, "rank")
    _, state = steps.prefill(*shallow, PROMPTS, policy=policy, lengths=PROMPT_LENGTHS, max_new_tokens=STEPS)
    by = 10**6
    move = lambda kv: kv.replace(pos=jnp.where(kv.pos < 3, kv.pos, kv.pos + by))
    moved = {"length": state.length + by, "prompt_length": state.prompt_length + by}
    later = dataclasses.replace(state, layers=tuple(map(move, state.layers)), **moved)
    (now, _), (then, _) = (generating.feed(*shallow, MORE, s) for s in (state, later))
    np.testing.assert_allclose(then[:2], now[:2], atol=1e-6 * float(jnp.abs(now).max()))


@pytest.mark.slow
@pytest.mark.parametrize("pool", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_sliding_layers_lose_nothing_that_they_read(pool):
    """What lies behind a sliding window can be evicted for free."""
    model, params = made(models.ModelConfig(**{**GROUPED, "num_layers": 2}, sliding_window=(7, None)))

    def logits(size):
        window = dataclasses.replace(methods.window(size), layout=Layout(pool=pool))
        policy = compose.partition({"sliding": window, "global": methods.full()}, ("sliding", "global"))
        return fed(model, params, policy)[0]

    full = logits(40)
    np.testing.assert_allclose(logits(7), full, atol=1e-4)
    assert np.abs(logits(5) - full).max() > 0.01


@pytest.mark.slow
def test_a_row_that_slept_draws_as_if_it_had_not(shallow):
    """And the other row, which took a step meanwhile, draws what comes after it."""
    model, params = shallow
    logits, state = steps.prefill(model, params, IDS[:, :8], max_new_tokens=12)

    def draw(active):
        _, after = steps.decode_step(model, params, [1, 1], state, active=active)
        how = {"max_new_tokens": 8, "sampler": sampling.Sample(temperature=4.0)}
        return np.asarray(generating.generate_from(model, params, logits, after, **how).tokens)

    asleep, one = draw([False, False]), draw([False, True])
    np.testing.assert_array_equal(one[0], asleep[0])
    assert (one[1] != asleep[1]).any()


def test_sequences_that_a_state_does_not_have_give_no_logits_under_jit(shallow):
    """Outside of it they are refused."""
    model, params = shallow
    _, state = steps.prefill(model, params, IDS[:, :8], policy=methods.h2o(4), max_new_tokens=2)
    step = lambda params, state, rows: steps.decode_step(model, params, rows * 0, state[rows])[0]
    logits = jax.jit(step)(params, state, jnp.asarray([1, 2, -1, 0, -3]))
    assert jnp.isnan(logits).all(-1).tolist() == [False, True, False, False, True]
    np.testing.assert_allclose(logits[2], logits[0], atol=1e-5)


def test_a_bucket_holds_what_is_put_into_it_and_little_more():
    sizes = np.arange(1, 5000)
    found = np.array([bucket(int(n)) for n in sizes])
    assert (found >= sizes).all()
    assert ((found - sizes < 16) | (found <= 1.25 * sizes)).all()
    assert len(set(found.tolist())) == 29
    assert [bucket(int(n)) for n in found] == found.tolist()


@pytest.mark.parametrize("policy", [methods.full(), methods.h2o(8), methods.snapkv(500), methods.h2o(0.8)])
def test_requests_of_about_the_same_size_share_a_plan(shallow, policy):
    """And so all programs, whatever their prompts' own lengths."""
    sizes = (17, 3), (20, 9), (32, 16)
    plan = lambda n, steps: plan_request(shallow[0].config, policy, np.array([n]), n, steps, buckets=True)[0]
    assert len({plan(*x) for x in sizes}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", [methods.snapkv(0.25), methods.full(), methods.h2o(0.5)])
def test_slots_are_those_of_the_rounded_sizes(shallow, policy):
    exact, rounded = (
        plan_request(shallow[0].config, policy, np.array([100, 40]), 100, 20, buckets=x)[0] for x in (False, True)
    )
    assert rounded.infos[0].prompt_len == 112
    for n, most in zip(exact.capacities, rounded.capacities, strict=True):
        assert n <= most <= n + (112 - 100) + (32 - 20) + 8


@pytest.mark.slow
@pytest.mark.parametrize("policy", [methods.full(), methods.h2o(0.5)])
def test_columns_that_no_prompt_fills_take_no_slots(shallow, policy):
    wide = np.pad(np.asarray(IDS), ((0, 0), (300, 0)))
    run = lambda ids: generating.generate(*shallow, ids, policy=policy, max_new_tokens=3, lengths=LENGTHS)
    (alone, plan), (padded, found) = ((x.tokens, x.state.plan) for x in map(run, (IDS, wide)))
    assert found == plan
    np.testing.assert_array_equal(padded, alone)


def test_sizes_are_exact_where_prompts_are_traced(shallow):
    run = lambda tokens: generating.generate(*shallow, tokens, max_new_tokens=3)
    info = jax.eval_shape(run, IDS).state.plan.infos[0]
    assert (info.prompt_len, info.max_new_tokens) == (T, 3)


@pytest.mark.slow
def test_a_bar_counts_the_layers_that_are_read(embedded, capsys):
    model, params, _ = embedded
    tokens = np.full((1, 8), 5, np.int32)
    how = {"policy": methods.h2o(4), "max_new_tokens": 2}
    prefill(model, params, tokens, **how)
    assert not capsys.readouterr().err
    prefill(model, params, tokens, progress=True, **how)
    L = model.config.num_layers
    assert f"{L}/{L}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_token_that_finds_no_slot_is_an_error_outside_of_jit(shallow):
    model, params = shallow
    policy = compose.when(budgets.Schedule(every=4), methods.h2o(10))
    _, state = prefill(model, params, IDS[:1, :16], policy=policy, max_new_tokens=8)
    _, state, _ = forward(model, params, IDS[:1, :4], state)
    _, state = steps.decode_step(model, params, [1], state)
    _, state = steps.decode_step(model, params, [1], state)
    with pytest.raises(ValueError, match="than there is room for between evictions"):
        steps.decode_step(model, params, [1], state)
