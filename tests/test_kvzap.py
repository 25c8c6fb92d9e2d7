"""Scores that are read off hidden states (KVzap), and functions that are fitted to say them."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.learning import kvzap
from kvjax.scoring.learned import FrozenArrays
from kvjax.scoring.predicted import HiddenHeads, apply_heads
from kvjax.scoring.replay import Replay
from tests import helpers

T, NEW, LENGTHS, D, K = 24, 8, (24, 17), 32, 2


def heads(layers=1, width=D, kv_heads=K, seed=0):
    """A random linear function."""
    rng = np.random.default_rng(seed)
    out = rng.normal(size=(layers, width, kv_heads)).astype(np.float32)
    return HiddenHeads(FrozenArrays({"out": out, "out_bias": np.zeros((layers, kv_heads), np.float32)}))


def said(small, tokens, function):
    """What the function says of every token in the first layer, whose hidden states depend on the token alone."""
    model, params = small
    x = np.asarray(params["embed_tokens"], np.float64)[np.asarray(tokens)]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + model.config.norm_eps)
    x = x * np.asarray(params["layers_0"]["input_layernorm"]["scale"])
    return x @ np.asarray(function.weights["out"][0], np.float64)


def read(small, policy, *, block=None):
    """Live positions after a padded prompt and after every further token."""
    model, params = small
    tokens = helpers.token_ids(2, T + NEW, 3)
    plan = kvjax.make_plan(model.config, policy, prompt_len=T, max_new_tokens=NEW, lengths=LENGTHS)

    @jax.jit
    def run(params, tokens):
        _, state = kvjax.prefill(model, params, tokens[:, :T], plan, lengths=jnp.asarray(LENGTHS), block=block)

        def step(state, token):
            _, state = kvjax.decode_step(model, params, token, state)
            return state, state.layers[0].head_pos

        return state.layers[0].head_pos, jax.lax.scan(step, state, tokens[:, T:].T)[1]

    first, later = run(params, tokens)
    live = lambda pos: [[sorted(p for p in head if p >= 0) for head in row] for row in np.asarray(pos).tolist()]
    return tokens, [live(pos) for pos in (first, *later)]


def kept(score, n, *, recent, threshold=-math.inf, budget=10**9):
    """What stays of n tokens in one head: an independent statement of the rule."""
    free = sorted((i for i in range(n - recent) if score[i] >= threshold), key=lambda i: (score[i], i))
    room = max(budget - min(recent, n), 0)
    return sorted([*free[max(len(free) - room, 0) :], *range(max(n - recent, 0), n)])


@pytest.mark.parametrize(
    ("rule", "storage"),
    [({"threshold": 0.2}, "dense"), ({"threshold": -2.0, "budget": 10}, "pool"), ({"budget": 10}, "dense")],
    ids=["threshold", "threshold and overflow", "budget"],
)
def test_what_stays_while_reading_and_decoding(shallow, rule, storage):
    """What has gone does not come back, though a larger budget or another rule would keep it."""
    function = heads()
    policy = methods.kvzap(rule.get("budget", 60), function, threshold=rule.get("threshold"), recent=4)
    tokens, found = read(shallow, dataclasses.replace(policy, storage=storage))
    for row, n in enumerate(LENGTHS):
        score = said(shallow, tokens[row, T - n :], function).T
        for h in range(K):
            before = range(n)
            for step, here in enumerate(found):
                now = n + step
                alive = np.full(now, -np.inf)
                alive[[*before, *range(now - 1, now)]] = score[h][[*before, *range(now - 1, now)]]
                wanted = [
                    i for i in kept(alive, now, recent=4, **{"threshold": -1e30, **rule}) if np.isfinite(alive[i])
                ]
                assert here[row][h] == wanted, (row, h, step)
                before = here[row][h]


def test_blocks_do_not_matter_where_the_threshold_decides(shallow):
    policy = methods.kvzap(60, heads(), threshold=0.2, recent=4)
    assert read(shallow, policy)[1] == read(shallow, policy, block=5)[1]


def test_one_layers_tensors_and_its_hidden_states(shallow):
    q, k, v = helpers.qkv(3, T=T)
    hidden, function = jax.random.normal(jax.random.key(1), (2, T, D)), heads(layers=3)
    policy = methods.kvzap(10, function, recent=4)
    evict = functools.partial(kvjax.evict_layer, policy, q, k, v, lengths=LENGTHS, num_layers=3, layer=1)
    found = evict(hidden=hidden)
    for row, n in enumerate(LENGTHS):
        score = np.asarray(hidden[row, T - n :]) @ function.weights["out"][1]
        for h in range(K):
            assert helpers.kept(found, row, h) == [i + T - n for i in kept(score[:, h], n, recent=4, budget=10)]
    with pytest.raises(ValueError, match=r"the model gives none; pass hidden= of shape \(B, T, D\)"):
        evict()
    with pytest.raises(ValueError, match=r"hidden has the shape \(1, 24, 32\), but the prompts are 2 of width 24"):
        evict(hidden=hidden[:1])
    with pytest.raises(ValueError, match=r"of \(3, 32, 2\), but the model has \(3, 8, 2\); fit one to this model"):
        evict(hidden=hidden[..., :8])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"out": (3, 8, 2)}, r"has the weights \['out'\]; give \('out', 'out_bias'\) or"),
        ({"out": (3, 8, 2), "out_bias": (3, 1)}, "which do not follow one another"),
        ({"in": (3, 8, 5), "in_bias": (3, 5), "out": (3, 4, 2), "out_bias": (3, 2)}, "which do not follow one another"),
    ],
)
def test_weights_that_are_no_function_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        HiddenHeads(FrozenArrays({name: np.zeros(shape, np.float32) for name, shape in weights.items()}))
    with pytest.raises(ValueError, match="'out' of float32 that are no finite floats"):
        HiddenHeads({"out": np.full((1, 1, 1), np.inf, np.float32), "out_bias": np.zeros((1, 1), np.float32)})


def test_the_hidden_layer_is_one_of_exact_gelus():
    rng = np.random.default_rng(0)
    shapes = {"in": (2, 6, 5), "in_bias": (2, 5), "out": (2, 5, 3), "out_bias": (2, 3)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    hidden = rng.normal(size=(1, 4, 6)).astype(np.float32)
    x = hidden[0] @ weights["in"][1] + weights["in_bias"][1]
    x = x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    wanted = x @ weights["out"][1] + weights["out_bias"][1]
    np.testing.assert_allclose(apply_heads(weights, jnp.asarray(hidden), 1)[0], wanted, rtol=1e-4, atol=1e-5)
    assert HiddenHeads(weights) == HiddenHeads(FrozenArrays(weights))
    assert HiddenHeads(weights).sizes == (2, 6, 3)


# --- fitting ---


def test_a_function_is_fitted_to_what_it_can_say():
    """A linear one to linear numbers; one with a hidden layer to what no linear one says."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(2, 512, 4)).astype(np.float32)
    linear = np.einsum("lmd,ldk->lmk", hidden, rng.normal(size=(2, 4, 3))).astype(np.float32)
    function, losses = kvzap.fit(hidden, linear, steps=300, rate=0.05)
    assert losses.shape == (300,)
    assert losses[-1] < 1e-3 * losses[0]
    bent = np.abs(hidden[..., :1])
    best = {units: kvzap.fit(hidden, bent, units=units, steps=300, rate=0.05)[1][-50:].mean() for units in (None, 16)}
    assert best[16] < 0.2 * best[None]
    said = np.asarray(apply_heads(function.weights, jnp.asarray(hidden[1:]), 1)[0])
    np.testing.assert_allclose(said, linear[1], atol=0.2)


def test_examples_are_the_scores_of_kvzip_plus_behind_the_sinks(shallow):
    """Of rows of different lengths, the tokens of each in order."""
    model, params = shallow
    tokens, replay = helpers.token_ids(2, T, 3), Replay((1,), (2,), chunk=9)
    hidden, wanted = kvzap.examples(model, params, tokens, replay=replay, lengths=LENGTHS, sinks=2)
    assert (hidden.shape, wanted.shape) == ((1, 22 + 15, D), (1, 22 + 15, K))
    policy = methods.kvzip(8, repeat=(1,), repeat_next=(2,), chunk=9, sinks=2, plus=True)
    state = kvjax.generate(model, params, tokens, lengths=LENGTHS, policy=policy, max_new_tokens=1).state
    for row, first in ((0, 0), (1, 22)):
        n = LENGTHS[row] - 2
        scores = wanted[0, first : first + n]
        best = np.sort(scores.reshape(-1))[-(2 * 8 - 2 * 2)]
        for h in range(K):
            here = [i + 2 for i in np.nonzero(scores[:, h] >= best)[0].tolist()]
            assert helpers.live_positions(state.layers[0])[row][h] == [0, 1, *here]
    function = HiddenHeads({"out": np.eye(D, dtype=np.float32)[None], "out_bias": np.zeros((1, D), np.float32)})
    np.testing.assert_allclose(hidden[0, :22], said(shallow, tokens[0, 2:], function), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="texts of up to 3 tokens have none behind the first 4; give longer ones"):
        kvzap.examples(model, params, tokens[:, :3], replay=replay)


@pytest.mark.slow
def test_fitted_to_the_embedded_model_it_keeps_what_kvzip_plus_keeps(embedded):
    """On other texts than it was fitted to: far more of it than by chance."""
    model, params, _ = embedded
    rng = np.random.default_rng(0)
    texts = jnp.asarray(rng.integers(4, 389, (24, 128)), jnp.int32)
    replay = Replay((3, 38), (3, 32), chunk=2048)
    hidden, wanted = kvzap.examples(model, params, texts[:20], replay=replay)
    function, losses = kvzap.fit(hidden, wanted, units=32, steps=1500)
    assert losses[-100:].mean() < 0.7 * losses[:20].mean()
    held, scores = kvzap.examples(model, params, texts[20:], replay=replay)
    overlap = []
    for layer in range(model.config.num_layers):
        said = np.asarray(apply_heads(function.weights, jnp.asarray(held[layer : layer + 1]), layer)[0])
        for h in range(said.shape[1]):
            best = [set(np.argsort(x[:, h])[-len(x) // 4 :].tolist()) for x in (said, scores[layer])]
            overlap.append(len(best[0] & best[1]) / len(best[0]))
    assert np.mean(overlap) > 0.5  # a quarter by chance
