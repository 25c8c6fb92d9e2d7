"""The Python of the library's README runs, and the policies in it keep to the contract."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.models.embedded import EMBEDDED
from tests.marks import slow_but

README = pathlib.Path(kvjax.__file__).with_name("README.md")
BLOCKS = dict(re.findall(r"## ([^\n]*)\n(?:(?!\n## ).)*?```python\n(.*?)```", README.read_text(), re.DOTALL))
EVICTING = ["A score with memory", "A selection: whole sentences", "A merging rule"]
QUICK = {
    *("A learned gate with its gradient", "A learned score", "Memory before a run", "Meshes of devices"),
    *("Prompts, tokens, batches", "The kernel of column sums", "A model of your own"),
}
READING = {"Delayed eviction": "Delayed", "Admission": "Admit"}
PROMPT = np.random.default_rng(3).integers(3, 60, (1, 40)).astype(np.int32)
PROMPT[:, 7::8] = 5  # ends a sentence


@pytest.fixture(autouse=True)
def user():
    """Users have JAX as it is."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def run(name):
    """What a block defines."""
    found = {}
    exec(compile(BLOCKS[name], f"{README}: {name}", "exec"), found)
    return found


def test_every_exported_name_is_in_a_readme():
    pages = "".join(p.read_text() for p in README.parents[1].glob("*/README.md"))
    assert not [name for name in kvjax.__all__ if not re.search(rf"\b{name}\b", pages)]


def test_every_block_is_found():
    assert len(BLOCKS) == README.read_text().count("```python")


@pytest.mark.parametrize("name", slow_but(sorted({*BLOCKS} - {*EVICTING, *READING}), *QUICK))
def test_a_block_runs(name):
    run(name)


@pytest.mark.parametrize("name", EVICTING)
def test_a_policy_keeps_its_budget(name):
    policy, (model, params) = run(name)["policy"], models.load(EMBEDDED)
    budget = min(policy.budget, 24)
    _, state = kvjax.prefill(model, params, np.tile(PROMPT, 3), policy=policy, max_new_tokens=2)
    assert budget // 2 < int(state.num_live.max()) <= policy.budget
    if policy.select != kvjax.Evict.select:  # sentences of 8 tokens, and the last 4
        kept = {int(p) // 8 for p in state.layers[0].pos[0, 0] if 0 <= p < 116}
        assert all(8 * s + i in state.layers[0].pos[0, 0] for s in kept for i in range(8))
    if "log_weight" in policy.writes:
        mass = [jnp.where(kv.live, jnp.exp(kv.log_weight), 0.0).sum(-1) for kv in state.layers]
        np.testing.assert_allclose(mass, 120.0, rtol=1e-5)
