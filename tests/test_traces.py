"""What follows a prompt, priced by plain numpy: logits under gates, the attention rows, votes under any softmax."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import methods, models
from kvjax.analysis import VotingRows, eviction_loss, read, trace
from kvjax.analysis.losses import output_kl, task_loss
from kvjax.learning.families import EntropyK, View
from kvjax.models.mpt import MPTConfig
from kvjax.pallas_kernels import Logits
from tests.float64 import DIM, VOCAB, E, G, K, L, Wide, central, relative, turned
from tests.marks import slow_but

B, S, R = 2, 10, 3
LENGTHS = np.array([10, 7])
TOKENS, FUTURE = (np.random.default_rng(4).integers(0, VOCAB, (B, n)).astype(np.int32) for n in (S, R))
GATES = np.random.default_rng(5).uniform(0.1, 1, (L, B, K, S))
POLICY = methods.ada_snapkv(6, window=2, kernel=3)


@pytest.fixture(autouse=True, scope="module")
def _exact():
    """In float64, under the promotion that JAX has by itself."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def wide(_exact):
    """The model, and a reading of padded prompts."""
    model, params = Wide(), jax.tree.map(jnp.asarray, Wide.init())
    how = {"policies": (POLICY,), "observe": (VotingRows(2),), "lengths": LENGTHS}
    return model, params, read(model, params, TOKENS, FUTURE, **how)


def plain(row):
    """Logits after every token behind a prompt whose slots have `GATES`, and every layer's loss, row by row."""
    n, params = LENGTHS[row], Wide.init()
    tokens = np.concatenate([TOKENS[row, S - n :], FUTURE[row]])
    x = full = params["embedding"][tokens]
    losses = []
    for i in range(L):
        gates = np.concatenate([GATES[i, row, :, S - n :], np.ones((K, R))], axis=1)
        x = _layer(params, i, x, n, gates)[0]
        _, full, loss = _layer(params, i, full, n, gates)
        losses.append(loss)
    return (x @ params["embedding"].T)[n:], losses


def _layer(params, i, x, n, gates):
    """(the stream where later rows read by gates, the stream where they do not, the relative distance of the two)."""
    q, k, v = (np.einsum("te,neh->nth", x, params[name][i]) for name in "qkv")
    q, k = (turned(y, np.arange(len(x), dtype=float)[None], np) for y in (q, k))
    added = np.zeros((2, len(x), E))
    for which, weight in enumerate((gates, np.ones_like(gates))):
        for t, head in np.ndindex(len(x), K * G):
            p = np.exp(k[head // G, : t + 1] @ q[head, t] / DIM**0.5)
            p = p * (weight[head // G, : t + 1] if t >= n else 1.0)
            added[which, t] += p / p.sum() @ v[head // G, : t + 1] @ params["out"][i, head]
    gated, full = (x + a + np.tanh((x + a) @ params["up"][i]) @ params["down"][i] for a in added)
    moved = np.abs(added[0] - added[1]).sum(-1) / np.abs(added[1]).sum(-1)
    return gated, full, moved[n:].mean()


@pytest.mark.slow
def test_gates_cost_what_numpy_says(wide):
    """At the output, where later layers feel what earlier ones lost, and by layer, where they do not."""
    model, params, reading = wide
    logits, losses = zip(*map(plain, range(B)), strict=True)
    np.testing.assert_allclose(reading.logits_after(model, params, GATES), logits, rtol=1e-9)
    found = trace(reading).eviction_loss(jnp.asarray(GATES.swapaxes(0, 1)))
    np.testing.assert_allclose(found, losses, rtol=1e-9)


@pytest.mark.parametrize("name", slow_but(["output_kl", "task_loss"], "output_kl"))
def test_gates_have_exact_gradients_at_the_output(wide, name):
    model, params, reading = wide

    @jax.jit
    def loss(gates):
        logits = reading.logits_after(model, params, gates)
        if name == "output_kl":
            return output_kl(reading.logits, logits).mean()
        return task_loss(logits[:, :-1], FUTURE[:, 1:]).mean()

    grad, wanted = jax.grad(loss)(jnp.asarray(GATES)), central(loss, GATES)
    assert np.abs(wanted).max() > 1e-4
    assert relative(grad, wanted) < 1e-5


def test_attention_rows_price_gates_as_the_reading_does(wide):
    reading, rows = wide[2], trace(wide[2])
    np.testing.assert_allclose(rows.attention.sum(-1) + rows.own_mass, 1, rtol=1e-12)
    live = np.asarray(reading.live(K)).swapaxes(0, 1)
    for gates in (live & (GATES > 0.5), GATES):
        added = rows.outputs(jnp.asarray(gates.swapaxes(0, 1), float))
        for i, kv in enumerate(reading.left(gates)):
            wanted = jnp.einsum("bnth,nhd->btd", reading.outputs(i, kv), reading.later[i].out_proj)
            np.testing.assert_allclose(added[:, i], wanted, rtol=1e-9, atol=1e-12)


def test_one_row_has_the_theorems_loss(wide):
    """A row that reads the prompt alone: Ada-KV's distance, relative."""
    rows, keep = trace(wide[2]), np.random.default_rng(9).random((B, L, K, S)) < 0.6
    keep[..., -1] = True
    p = rows.attention[:, :, :, :1] / rows.attention[:, :, :, :1].sum(-1, keepdims=True)
    own = jnp.zeros_like(rows.own[:, :, :, :1])
    found = dataclasses.replace(rows, attention=p, own=own, own_mass=own[..., 0]).eviction_loss(keep * 1.0)
    for i in range(L):
        layer = p[:, i, :, 0], rows.values[:, i], rows.out_proj[i]
        full = jnp.einsum("bns,bnsh,nhd->bd", layer[0], jnp.repeat(layer[1], G, axis=1), layer[2])
        np.testing.assert_allclose(found[:, i], eviction_loss(*layer, keep[:, i]) / jnp.abs(full).sum(-1), rtol=1e-9)


# ------------------------------------------------------------------------------------------------------------- voters


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{}, {"window": 4}, {"softcap": 1.5, "scale": 0.9}], ids=str)
def test_votes_under_any_softmax_and_their_gradient(wide, limits):
    """With a scale, a sliding window and a soft cap of the model's own; padding rows vote for nothing."""
    voters = wide[2].stats.of(1)[VotingRows(2)]
    voters = dataclasses.replace(voters, pos=voters.pos.at[1, 0].set(-1), logits=Logits(**limits))
    q, k, rows, pos = (np.asarray(x) for x in (voters.q, voters.k, voters.pos, voters.kv_pos))
    factor, wanted = np.array([[1.5, 0.7], [2.0, 1.1]]), np.zeros((B, K, S))
    for b, n, r in np.ndindex(B, K * G, 2):
        if (row := rows[b, r]) < 0:
            continue
        seen = (pos[b, n // G] >= 0) & (pos[b, n // G] <= row) & (row - pos[b, n // G] < limits.get("window", 99))
        x, cap = k[b, n // G] @ q[b, n, r] * limits.get("scale", DIM**-0.5), limits.get("softcap")
        p = np.where(seen, np.exp(factor[b, r] * (x if cap is None else cap * np.tanh(x / cap))), 0)
        wanted[b, n // G] += p / p.sum() / G
    np.testing.assert_allclose(voters.votes(jnp.asarray(factor)), wanted, rtol=1e-9, atol=1e-12)
    loss = jax.jit(lambda x: jnp.square(voters.votes(x)).sum())
    assert relative(jax.grad(loss)(jnp.asarray(factor)), central(loss, factor)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "heads"), [(models.ModelConfig, 2), (MPTConfig, 4)])
def test_voters_are_the_rows_that_ahakv_observes(kind, heads):
    """At its own k, in layers with and without a sliding window, with and without ALiBi."""
    with jax.enable_x64(False):
        model = models.LanguageModel(kind(61, 32, 48, 2, 4, heads, 8, sliding_window=(None, 9)))
        params = jax.tree.map(lambda x: x * jnp.asarray(2.0, x.dtype), jax.jit(model.init)(jax.random.key(7)))
        tokens, policy = np.random.default_rng(3).integers(0, 61, (2, 20), np.int32), methods.ahakv(8, recent=4)
        how = {"policies": (policy,), "observe": (VotingRows(4),), "lengths": [20, 15]}
        reading = read(model, params, tokens, tokens[:, :3], **how)
        score = jnp.stack([d.score for d in reading.decisions(policy)], axis=1)
        live, layers = np.isfinite(score), reading.state.layers
        pos, prior = (
            jnp.stack(x, axis=1) for x in zip(*((kv.pos, policy.score.prior(kv)) for kv in layers), strict=True)
        )
        voters = tuple(reading.stats.of(i)[VotingRows(4)] for i in range(2))
        assert [x.logits.window for x in voters] == [None, 9]
        seen = View(score, pos, live, pos < 0, jnp.full((2,), 8.0), voters, prior)
        votes = EntropyK().votes(jnp.log(jnp.asarray(8.0)), seen)
        np.testing.assert_allclose(np.where(live, votes, 0), np.where(live, score, 0), rtol=2e-5, atol=1e-6)
        first = np.array([20, 15])[:, None, None] - 4 - 9 + 1
        assert not np.asarray(votes[:, 1])[np.asarray(pos[:, 1]) < first].any()
