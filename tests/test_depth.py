"""Layers of one kind share a program, and nothing but compilation changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import after_prefill, methods
from kvjax.drivers.layers import LayerSteps
from kvjax.scoring.scores import Score
from models.depth import runs
from models.gpt2 import GPT2Config
from tests.methods import few_methods

T, LENGTHS = 24, (24, 17)


def read(tiny, policy, monkeypatch, *, together):
    """Logits and state after a prompt, and how long each scan of the program is."""
    monkeypatch.setattr(LayerSteps, "together", lambda self, layer: together)
    model, params = tiny
    plan = kvjax.make_plan(model.config, policy, prompt_len=T, max_new_tokens=2, lengths=LENGTHS)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, T)), jnp.int32)
    prefill = jax.jit(lambda params, tokens: kvjax.prefill(model, params, tokens, plan, lengths=LENGTHS))
    traced = prefill.trace(params, tokens)
    scans = [e.params["length"] for e in traced.jaxpr.eqns if e.primitive.name == "scan"]
    return *traced.lower().compile()(params, tokens), scans


@few_methods
def test_layers_that_share_a_program_are_as_alone(tiny, case, monkeypatch):
    shared, state, _ = read(tiny, case.make(10), monkeypatch, together=99)
    alone, expected, _ = read(tiny, case.make(10), monkeypatch, together=1)
    np.testing.assert_allclose(shared, alone, rtol=1e-5, atol=1e-5)
    for a, b in zip(jax.tree.leaves(state.layers), jax.tree.leaves(expected.layers), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_layers_share_a_program_where_their_sizes_are_equal(tiny, monkeypatch):
    assert read(tiny, methods.snapkv(10, window_size=4), monkeypatch, together=99)[2] == [3]
    assert not read(tiny, methods.pyramidkv(10, window_size=4), monkeypatch, together=99)[2]


@dataclasses.dataclass(frozen=True)
class LaterLayersLikeLateTokens(Score):
    """A score of a user's own, which asks for its layer."""

    def __call__(self, slots):
        return slots.kv.pos.astype(jnp.float32) * (slots.ctx.site.layer - 1)


def test_a_policy_that_asks_for_its_layer_is_told(tiny, monkeypatch):
    policy = kvjax.Evict(LaterLayersLikeLateTokens(), 10, when=after_prefill())
    _, state, scans = read(tiny, policy, monkeypatch, together=99)
    assert not scans
    first, last = state.layers[0].pos[0, 0], state.layers[2].pos[0, 0]
    assert set(range(9)) <= set(np.asarray(first))
    assert set(range(15, T)) <= set(np.asarray(last))


@pytest.mark.parametrize(
    ("kinds", "together", "expected"),
    [
        ("aaaa", 9, [(0, 1, 4)]),
        ("aaaa", 2, [(0, 1, 2), (2, 1, 2)]),
        ("aaaa", 1, [(0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1)]),
        ("abab", 9, [(0, 2, 2)]),
        ("aabaabaa", 9, [(0, 3, 2), (6, 1, 2)]),
        ("abbb", 9, [(0, 1, 1), (1, 1, 3)]),
        ("abcd", 9, [(0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1)]),
    ],
)
def test_runs_of_kinds(kinds, together, expected):
    assert runs(kinds, [together] * len(kinds)) == expected


def test_layers_with_scales_of_their_own_are_of_kinds_of_their_own():
    sizes = {"vocab_size": 61, "embed_dim": 32, "mlp_dim": 48, "num_layers": 2, "num_query_heads": 4}
    config = GPT2Config(**sizes, num_kv_heads=4, head_dim=8)
    assert config.kind(0) == config.kind(1)
    config = dataclasses.replace(config, scaled_by_layer=True)
    assert config.kind(0) != config.kind(1)
