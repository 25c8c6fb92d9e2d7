"""Policies on models that do not rotate keys: logits that fall with distance (ALiBi), and learned positions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods, models
from kvjax.analysis.traces import trace
from kvjax.cache.state import EMPTY
from kvjax.drivers.steps import _with_room
from kvjax.models.gpt2 import GPT2Config
from kvjax.models.mpt import MPTConfig
from tests import helpers
from tests.methods import CASES, OF_ONE_LAYER

B, HEADS, T, NEW, BUDGET = 2, 2, 24, 7, 10
LENGTHS = np.array([T, 17])
SIZES = {"vocab_size": 61, "embed_dim": 16, "mlp_dim": 24, "num_query_heads": HEADS, "num_kv_heads": HEADS}
CONFIGS = {
    "alibi": MPTConfig(**SIZES, num_layers=3, head_dim=8, activation="gelu", tie_embeddings=True, steepest=2.0),
    "learned": GPT2Config(**SIZES, num_layers=3, head_dim=8, activation="gelu", max_position=2 * T),
}
QUICK = {"h2o", "keyformer", "ada_snapkv", "h2o_pooled"}
WHOLE = {"full", "think"}  # of these methods, every row reads every token


@functools.cache
def random_model(kind, num_layers):
    model = models.LanguageModel(dataclasses.replace(CONFIGS[kind], num_layers=num_layers))
    return model, jax.tree.map(lambda x: x * jnp.asarray(2.0, x.dtype), jax.jit(model.init)(jax.random.key(3)))


def decoded(model, params, plan, tokens):
    """Logits of the last prompt token and all later ones, positions that every layer held before each, and the end."""

    @jax.jit
    def run(params, prompt, rest):
        first, state = kvjax.prefill(model, params, prompt, plan, lengths=jnp.asarray(LENGTHS))

        def step(state, token):
            held = tuple(kv.head_pos for kv in _with_room(state, None))
            logits, state = kvjax.decode_step(model, params, token, state)
            return state, (logits, held)

        state, (logits, held) = jax.lax.scan(step, state, rest.T)
        return jnp.concatenate([first[:, None], logits.swapaxes(0, 1)], axis=1), held, state

    return run(params, tokens[:, :T], tokens[:, T:])


def what_rows_read(held, *, by_rank, hides):
    """Which tokens every row of a layer reads "B H R S", and how many places they lie before it."""
    column = np.arange(T + NEW)[None] - (T - LENGTHS)[:, None]  # of every token its position, below 0 for padding
    rows, keys = column[:, None, :, None], column[:, None, None]
    read = np.repeat((keys >= 0) & (keys <= rows), HEADS, 1)
    places = np.repeat(rows - keys, HEADS, 1).astype(np.float32)
    for i, b, h in np.ndindex(NEW, B, HEADS):
        row = T + i
        live = np.array(sorted({*held[i, b, h].tolist(), column[b, row].item()} - {EMPTY}))
        at = live + T - LENGTHS[b]
        read[b, h, row] = False
        read[b, h, row, at] = (live[-1] - live) % 2 == 0 if hides else True
        if by_rank:
            places[b, h, row, at] = np.arange(len(live))[::-1]
    return read, places


def plainly(model, params, tokens, layers):
    """Logits of every token, each layer's rows reading as `what_rows_read` says, with the whole matrix."""

    def attend(cache, q, k, v, *, layer, scale=None, slopes=None, **_):
        read, places, channels = layers[layer]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        x = jnp.einsum("bhrc,bhsc->bhrs", q, k)
        if channels is not None:  # later rows meet keys without those that were dropped
            x = x.at[:, :, T:].set(jnp.einsum("bhrc,bhsc->bhrs", (q * channels[:, :, None])[:, :, T:], k))
        x = x * scale
        if slopes is not None:
            x = x - jnp.asarray(slopes)[None, :, None, None] * places
        p = jnp.where(read, jnp.exp(x - x.max(-1, keepdims=True, where=read, initial=-1e9)), 0.0)
        return (
            jnp.einsum("bhrs,bhsc->bhrc", p / jnp.maximum(p.sum(-1, keepdims=True), 1e-30), v),
            cache,
            kvjax.LayerStats(),
        )

    pos = jnp.asarray(np.arange(T + NEW)[None] - (T - LENGTHS)[:, None], jnp.int32)
    where = kvjax.plan.at_positions(model.config, jnp.maximum(pos, EMPTY))
    return model(params, tokens, (None,) * len(layers), attend=attend, last_only=False, **where)[0]


def slow_but_few():
    quick = lambda kind, case: kind == "alibi" and case.name in QUICK
    every = ((kind, case) for kind in CONFIGS for case in CASES if case.name != "quest")  # it evicts nothing
    rows = [pytest.param(*row, marks=() if quick(*row) else pytest.mark.slow) for row in every]
    return pytest.mark.parametrize(("kind", "case"), rows, ids=str)


@slow_but_few()
def test_evicted_tokens_are_hidden_ones(kind, case):
    """Any policy's logits are those of plain attention under masks that hide what it has evicted.

    With positions other than the original ones, distances are counted in live tokens; where positions are learned, keys
    cannot have others.
    """
    model, params = random_model(kind, 3 if case.by_layer else 1)
    policy = case.make(BUDGET)
    make = functools.partial(kvjax.make_plan, model.config, policy, prompt_len=T, max_new_tokens=NEW, lengths=LENGTHS)
    moved = policy.at(helpers.site(T=T, N=HEADS, K=HEADS)).spec.positions != "original"
    if kind == "learned" and moved:
        with pytest.raises(ValueError, match="adds learned positions to its embeddings"):
            make()
        return
    tokens = helpers.token_ids(B, T + NEW, 5)
    found, held, state = decoded(model, params, make(), tokens)
    layers = []
    for i, kv in enumerate(state.layers):
        read, places = what_rows_read(np.asarray(held[i]), by_rank=moved, hides=case.name == "dilated_mask")
        assert (case.name in WHOLE) == (read[:, :, T:].sum(-1) == LENGTHS[:, None, None] + np.arange(1, NEW + 1)).all()
        channels = kv.channels
        if channels is not None:
            channels = jnp.put_along_axis(jnp.zeros((B, HEADS, 8)), channels, 1.0, axis=-1, inplace=False)
        layers.append((read, places, channels))
    wanted = np.asarray(plainly(model, params, tokens, layers))[:, T - 1 :]
    np.testing.assert_allclose(found, wanted, atol=5e-5 * np.abs(wanted).max())


# Slopes are the same as a channel that carries a key's position, for methods that do not look at channels.
OF_KEYS = {"knorm", "keydiff", "lagkv", "expected_attention", "think", "snapkv_then_think"}
OF_THREE_LAYERS = {"layer_table", "head_table"}
OF_ATTENTION = [c for c in OF_ONE_LAYER if c.name not in OF_KEYS | OF_THREE_LAYERS]
WITHOUT_ATTENTION = {"full", "window", "random", "random_run", "from_fn", "dilated_mask", "dilated_anchored"}
SLOPES = (0.5, 0.25, 0.1, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("block", [None, 7])
@pytest.mark.parametrize("case", OF_ATTENTION, ids=repr)
def test_methods_see_attention_that_falls_with_distance(case, block):
    """What a layer keeps of a prompt and of what follows, under any statistics of attention."""
    policy = case.make(BUDGET)
    spec = policy.at(helpers.site(T=T)).spec
    if spec.positions != "original" or (block and spec.reads != "blocks"):
        pytest.skip("it gives keys other positions than those that they carry, or reads a prompt at once")
    q, k, v = helpers.qkv(6, B=B, T=T + NEW)
    pos = jnp.asarray(np.arange(T + NEW)[None] - (T - LENGTHS)[:, None], jnp.float32)
    with_channel = lambda x, channel: jnp.concatenate([x, jnp.broadcast_to(channel, (*x.shape[:3], 1))], axis=-1)
    carried = (
        with_channel(q, jnp.asarray(SLOPES)[None, :, None, None] * 8**0.5),
        with_channel(k, pos[:, None, :, None]),
        with_channel(v, jnp.zeros((1, 1, 1, 1))),
    )
    ids = helpers.token_ids(B, T + NEW)
    run = functools.partial(helpers.replay, policy, n=T, lengths=LENGTHS, ids=ids, scale=8**-0.5, block=block)
    found, wanted, without = run(q, k, v, slopes=SLOPES), run(*carried), run(q, k, v)
    assert found.live == wanted.live
    assert (found.live == without.live) == (case.name in WITHOUT_ATTENTION)


OF_READINGS = {
    "ada_snapkv": methods.ada_snapkv(BUDGET, window_size=4),
    "streaming_llm": methods.streaming_llm(BUDGET),
    "expected_attention": methods.expected_attention(BUDGET, horizon=8),
    "fastgen": methods.fastgen(special_ids=range(3), punctuation_ids=range(3, 9), budget=BUDGET, recovery_ratio=0.65),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_READINGS)
def test_a_reading_is_prefill_and_feed(name):
    """One pass with the full cache, and masks, under ALiBi: the decisions, the logits, and the outputs under gates."""
    model, params = random_model("alibi", 3)
    policy = kvjax.when(kvjax.after_prefill(), OF_READINGS[name]) if name != "fastgen" else OF_READINGS[name]
    plan = kvjax.make_plan(model.config, policy, prompt_len=T, max_new_tokens=NEW, lengths=LENGTHS)
    tokens = helpers.token_ids(B, T + NEW, 5)
    prompt, rest = tokens[:, :T], tokens[:, T:]
    _, state = kvjax.prefill(model, params, prompt, plan, lengths=LENGTHS)
    read = kvjax.analysis.read(
        model, params, prompt, rest, lengths=LENGTHS, measure=kvjax.analysis.measurements([plan])
    )
    keep = kvjax.analysis.keep_one(plan, read)
    for kv, mask, layer in zip(state.layers, keep, read.layers, strict=True):
        pos = np.where(mask, layer.prompt.pos, EMPTY)
        assert [[sorted({*head} - {EMPTY}) for head in row] for row in pos.tolist()] == helpers.live_positions(kv)
    positions = plan.positions[0]
    if name != "fastgen":  # which goes on evicting
        logits, _ = kvjax.feed(model, params, rest, state)
        found = read.logits_after(model, params, keep, positions)
        np.testing.assert_allclose(found, logits, atol=5e-5 * np.abs(logits).max())
    if positions == "original":
        hard, soft = (read.outputs(1, jnp.asarray(x)) for x in (keep[1], keep[1].astype(jnp.float32)))
        np.testing.assert_allclose(hard, soft, atol=1e-5)
        assert np.abs(hard - read.layers[1].out).max() > 1e-2
    traced = trace(read)
    np.testing.assert_allclose(traced.attention.mean(3), read.mass(HEADS), atol=1e-6)


@pytest.mark.usefixtures("unchecked")
def test_every_query_head_has_a_slope():
    q, k, v = helpers.qkv(0)
    with pytest.raises(ValueError, match="3 slopes for 4 query heads; give one for each"):
        kvjax.evict_layer(methods.h2o(4), q, k, v, slopes=(1.0, 0.5, 0.25))
