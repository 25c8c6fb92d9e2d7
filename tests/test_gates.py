"""Gates of kv heads: what they mix, their gradients, what is learned, and the policy that is made of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.drivers.attention import without_cache
from kvjax.experiments import learn_gates
from kvjax.experiments.learn_gates import Learning
from kvjax.learning.gates import distance, gated, penalty
from tests import helpers
from tests.test_positions import random_model

SINKS, RECENT, T = 2, 4, 20


@pytest.mark.parametrize(
    "how",
    [{}, {"window": 9, "softcap": 0.8, "scale": 0.3}, {"slopes": (0.5, 0.3, 0.2, 0.1)}],
    ids=["", "odd", "slopes"],
)
def test_a_gate_mixes_what_two_loops_read(how):
    """Of a padded row too, whose sinks are its own first tokens."""
    q, k, v = helpers.qkv(3, B=2, N=4, K=2, T=12, H=3)
    pos = jnp.asarray([np.arange(12), np.maximum(np.arange(12) - 5, -1)], jnp.int32)
    gates = jnp.asarray([[0.0, 0.0], [0.25, 1.0]])
    attend = gated(gates, pos, sinks=SINKS, recent=RECENT)
    found = np.asarray(attend(None, q, k, v, layer=1, rotate=lambda x, _: x, **how)[0])
    scale, softcap, slopes = how.get("scale", 3**-0.5), how.get("softcap"), how.get("slopes", (0.0,) * 4)
    for b, n, t in np.ndindex(2, 4, 12):
        at, keys = int(pos[b, t]), np.asarray(pos[b])
        x = np.asarray(k[b, n // 2] @ q[b, n, t], np.float64) * scale
        x = (x if softcap is None else softcap * np.tanh(x / softcap)) - slopes[n] * (at - keys)
        sees = (keys >= 0) & (keys <= at) & (at - keys < how.get("window", 99))
        out = []
        for shown in (sees, sees & ((keys < SINKS) | (at - keys < RECENT))):
            p = np.where(shown, np.exp(x - x[shown].max()), 0.0) if shown.any() else np.zeros(12)
            out.append(p @ np.asarray(v[b, n // 2]) / max(p.sum(), 1e-9))
        gate = float(gates[1, n // 2])
        np.testing.assert_allclose(found[b, n, t], gate * out[0] + (1 - gate) * out[1], atol=1e-5)


def positions(n):
    return jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None], (2, n))


def states(model, params, ids):
    return lambda attend: model.last_hidden(params, ids, attend=attend)


def test_gradients_are_central_differences(tiny):
    """At weights so small that differences are near to gradients."""
    model, params = tiny
    params = jax.tree.map(lambda x: x / 2, params)
    ids = helpers.token_ids(2, T)
    pos, counts = (
        jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (2, T)),
        jnp.arange(2 * T).reshape(2, T) % 3 > 0,
    )
    options = {"sinks": SINKS, "recent": RECENT}
    loss = jax.jit(lambda gates: distance(states(model, params, ids), gates, pos, counts, **options) + penalty(gates))
    gates = jnp.asarray(np.random.default_rng(0).uniform(0.2, 0.8, (3, 2)), jnp.float32)
    grad, step = jax.jit(jax.grad(loss))(gates), 0.01
    for at in np.ndindex(3, 2):
        moved = jnp.zeros_like(gates).at[at].set(step)
        wanted = (float(loss(gates + moved)) - float(loss(gates - moved))) / (2 * step)
        assert float(grad[at]) == pytest.approx(wanted, rel=0.02, abs=2e-4)
    whole = jnp.ones((3, 2))
    assert float(loss(whole)) == pytest.approx(0.05, abs=1e-6)
    assert float(penalty(whole / 2, 0.4)) == pytest.approx(0.2)


def test_last_hidden_states_are_what_logits_are_made_of(tiny):
    """Of a model with learned positions, and of one whose norm has another name, too."""
    ids = helpers.token_ids(2, 6)
    pos = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32)[None], (2, 6))
    for (model, params), where in (
        (tiny, {}),
        (random_model("alibi", 1), {}),
        (random_model("learned", 1), {"positions": pos}),
    ):
        attend, none = without_cache(pos), (None,) * model.config.num_layers
        run = functools.partial(model, attend=attend, last_only=False, **where)
        logits = jax.jit(lambda p, run=run, none=none: run(p, ids, none)[0])(params)
        head = (
            params["lm_head"]["kernel"]
            if "lm_head" in params
            else next(params[name].T for name in ("embed_tokens", "wte") if name in params)
        )
        found = jax.jit(functools.partial(model.last_hidden, attend=attend, **where))(params, ids)
        np.testing.assert_allclose(found @ head, logits, rtol=1e-4, atol=1e-4)


def needing_one_head(params, ids, attend):
    """A layer whose first head reads the token at position 3 from everywhere, and whose second reads its own row."""
    del params
    (B, n), eye = ids.shape, jnp.eye(ids.shape[1])
    first = jnp.broadcast_to(eye[3], (n, n))
    q = 10 * jnp.broadcast_to(jnp.stack([first, eye])[None], (B, 2, n, n))
    k = jnp.broadcast_to(eye[None, None], (B, 2, n, n))
    v = jnp.broadcast_to(jax.nn.one_hot(ids, n)[:, None], (B, 2, n, n))
    out = attend(None, q, k, v, layer=0, rotate=lambda x, _: x, scale=1.0)[0]
    return 4 * out.swapaxes(1, 2).reshape(B, n, 2 * n)


def test_a_head_that_has_to_retrieve_keeps_its_gate():
    """What it reads lies outside of sinks and window; the other head streams."""
    how = Learning(steps=60, rate=0.1, sinks=SINKS, recent=RECENT, length=16, batch=2)
    late = np.broadcast_to(np.arange(16)[None] >= 10, (2, 16))
    texts = lambda step: (np.random.default_rng(step).integers(0, 16, (2, 16)).astype(np.int32), late)
    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        gates, moved = learn_gates.learn(needing_one_head, None, (1, 2), how, texts)
    assert gates[0, 0] > 0.9
    assert gates[0, 1] < 0.05
    assert moved[0] < 1e-9
    assert len(moved) == 60


def test_heads_of_the_smallest_gates_stream():
    gates = [[0.9, 0.2], [0.2, 0.7], [0.4, 0.2]]
    streams = lambda **options: [
        [label == "streaming" for label in row] for row in methods.duo_attention(gates, **options).labels
    ]
    assert streams() == [[False, True], [True, False], [False, True]]
    assert streams(streaming_heads=0.34) == [[False, True], [True, False], [False, False]]
    assert streams(threshold=0.4) == streams()
    assert streams(threshold=0.41) == [[False, True], [True, False], [True, True]]
    assert not np.any(streams(streaming_heads=0.0))
    assert np.all(streams(streaming_heads=1.0))


def test_the_policy_reads_what_closed_and_open_gates_read(tiny):
    """Token by token, from pools in which every head has the slots that it needs."""
    model, params = tiny
    gates = np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    policy = methods.duo_attention(gates, threshold=0.5, sinks=SINKS, recent=RECENT)
    ids = helpers.token_ids(2, T)
    pos = positions(T)
    plan = kvjax.make_plan(model.config, policy, prompt_len=1, max_new_tokens=T - 1)

    @jax.jit
    def read(params):
        first, state = kvjax.prefill(model, params, ids[:, :1], plan)
        return jnp.concatenate([first[:, None], kvjax.feed(model, params, ids[:, 1:], state)[0]], axis=1), state

    found, state = read(params)
    attend = gated(jnp.asarray(gates, jnp.float32), pos, sinks=SINKS, recent=RECENT)
    wanted = jax.jit(lambda p: model(p, ids, (None,) * 3, attend=attend, last_only=False)[0])(params)
    np.testing.assert_allclose(found, wanted, atol=2e-4)
    assert [kv.num_slots for kv in state.layers] == [T + 6, 6, T + 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gates": []}, "gates=.*at least 1 elements"),
        ({"gates": [[0.1, 0.2], [0.3]]}, r"rows of \[1, 2\] heads"),
        ({"gates": [[1.5]]}, r"must be a number in \[0, 1\]"),
        ({"streaming_heads": 0.5, "threshold": 0.5}, "streaming_heads=0.5 and threshold=0.5 both say"),
        ({"recent": 0}, "a streaming head keeps its row's own token"),
        ({}, "labels of 1 layers, but the model has 3"),
    ],
)
def test_what_cannot_work_is_refused(tiny, options, message):
    make = lambda: methods.duo_attention(**({"gates": [[0.5, 0.6]]} | options))
    with pytest.raises(ValueError, match=message):
        kvjax.make_plan(tiny[0].config, make(), prompt_len=24, max_new_tokens=4)


def test_rows_of_streaming_heads_read_their_own_token():
    with pytest.raises(ValueError, match="recent=0: a row reads its own token at least"):
        gated(jnp.ones((1, 1)), jnp.zeros((1, 4), jnp.int32), sinks=2, recent=0)
    with pytest.raises(ValueError, match="weight=-1"):
        penalty(jnp.ones((1, 1)), -1)
