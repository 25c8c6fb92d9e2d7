"""Layers of one kind share a program, and nothing but compilation changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Evict, after_prefill, methods
from kvjax.cache.context import Site
from kvjax.drivers.layers import LayerSteps
from kvjax.models.depth import runs
from kvjax.models.gpt2 import GPT2Config
from kvjax.scoring.scores import Recency, Score
from kvjax.scoring.stats import AllRows, LastRows, Observe
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
    """A score of a user's own, which asks for its layer, in one of several ways."""

    ask: str

    def __call__(self, slots):
        site = slots.ctx.site
        here = dataclasses.replace(site_of_first, window=site.window)
        layer = {
            "name": lambda: site.layer,
            "equal": lambda: 0 if site == here else 2,
            "key": lambda: {here: 0}.get(site, 2),
            "vars": lambda: vars(site)["layer"],
        }[self.ask]()
        return slots.kv.pos.astype(jnp.float32) * (layer - 1)


site_of_first = Site(0, 3, 4, 2, 8, T, 2)


@pytest.mark.parametrize("ask", ["name", *(pytest.param(a, marks=pytest.mark.slow) for a in ("equal", "key", "vars"))])
def test_a_policy_that_asks_for_its_layer_is_told(tiny, monkeypatch, ask):
    policy = kvjax.Evict(LaterLayersLikeLateTokens(ask), 10, when=after_prefill())
    _, state, scans = read(tiny, policy, monkeypatch, together=99)
    assert not scans
    first, last = state.layers[0].pos[0, 0], state.layers[2].pos[0, 0]
    assert set(range(9)) <= set(np.asarray(first))
    assert set(range(15, T)) <= set(np.asarray(last))


@dataclasses.dataclass(frozen=True)
class Measured(Evict):
    """An eviction that measures other rows in the first layer than in the others."""

    def spec(self, site):
        return dataclasses.replace(super().spec(site), prompt=(Observe(AllRows() if site.layer else LastRows(3)),))


def test_layers_that_measure_differently_are_of_different_kinds(tiny):
    policy = Measured(Recency(), 10, when=after_prefill())
    plan = kvjax.make_plan(tiny[0].config, policy, prompt_len=T, max_new_tokens=2)
    steps = LayerSteps(kvjax.init_state(plan, [T]), jnp.zeros((1, T), jnp.int32), jnp.zeros((1, T), jnp.int32))
    assert steps.kind(0) != steps.kind(1) == steps.kind(2)


@pytest.mark.slow
def test_parameters_of_another_dtype_and_values_that_are_read_on_the_host(tiny, monkeypatch):
    """Neither can be in a scan, and both work without one."""
    model, params = tiny
    with jax.numpy_dtype_promotion("standard"):
        coarse = model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        assert not read(coarse, methods.h2o(10), monkeypatch, together=99)[2]

    def score(kv, stats, ctx):
        return jnp.asarray(np.asarray(kv.pos), jnp.float32)

    plan = kvjax.make_plan(model.config, kvjax.from_fn(score, budget=10), prompt_len=T, max_new_tokens=2)
    _, state = kvjax.prefill(model, params, jnp.zeros((1, T), jnp.int32), plan)
    assert (state.num_live == 10).all()


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
