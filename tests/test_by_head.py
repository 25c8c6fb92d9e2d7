"""Policies by kv head: every head holds what it would if all of them were under its policy, in memory of its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.cache.pool import PooledKV, pool_slots
from tests import helpers

B, T, NEW, LENGTHS = 2, 24, 14, (24, 17)
HEADS = ("a", "b")
tova = lambda budget: methods.tova(budget, head_mode="per_kv_head")
original = lambda policy: dataclasses.replace(policy, positions="original")
PAIRS = {
    "duo": (methods.full(), methods.streaming_llm(10, sinks=2)),
    "duo_original": (methods.full(), original(methods.streaming_llm(10, sinks=2))),
    "scores": (methods.h2o(12, recent=4), tova(8)),
    "prompt_and_step": (methods.snapkv(10, window_size=4), kvjax.when(kvjax.when_over(3), methods.h2o(6))),
    "draws": (methods.random(9), methods.keyformer(7, recent=3)),
    "shares": (methods.snapkv(0.5, window_size=4), methods.h2o(0.25, recent=6)),
    "chain": (kvjax.chain(methods.snapkv(14, window_size=4), tova(9)), methods.full()),
    "fastgen": (methods.fastgen(special_ids=range(3), punctuation_ids=range(3, 9), recovery_ratio=0.6), tova(9)),
}
QUICK = {"duo"}
pairs = pytest.mark.parametrize("pair", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in PAIRS])


def run(shallow, policy, *, block=None):
    """Logits after every token, and the states after the prompt and at the end: its layer sees tokens alone."""
    model, params = shallow
    rng = np.random.default_rng(0)
    tokens, more = jnp.asarray(rng.integers(0, 61, (B, T))), jnp.asarray(rng.integers(0, 61, (B, NEW)))
    plan = kvjax.make_plan(model.config, policy, prompt_len=T, max_new_tokens=NEW, lengths=LENGTHS)

    @jax.jit
    def both(params, tokens, more):
        first, state = kvjax.prefill(model, params, tokens, plan, lengths=LENGTHS, block=block)
        logits, after = kvjax.feed(model, params, more, state)
        return jnp.concatenate([first[:, None], logits], axis=1), state, after

    return both(params, tokens, more)


def mixed(pair, **options):
    return kvjax.partition_heads(dict(zip(HEADS, PAIRS[pair], strict=True)), [HEADS], **options)


@pairs
def test_every_head_is_as_under_its_policy_alone(shallow, pair):
    """In slots of its own, as many as it has alone."""
    logits, *together = run(shallow, mixed(pair))
    dense, *stored = run(shallow, mixed(pair, storage="dense"))
    np.testing.assert_allclose(logits, dense, atol=1e-5 * np.abs(dense).max() * NEW)
    slots = []
    for head, policy in enumerate(PAIRS[pair]):
        _, *alone = run(shallow, policy)
        slots.append(alone[0].plan.specs[0].capacity[list(LENGTHS)])
        for moment in range(2):
            here, own = (states[moment].layers[0] for states in (together, alone))
            assert isinstance(here, PooledKV)
            for row in range(B):
                assert helpers.live_positions(here)[row][head] == helpers.live_positions(own)[row][head]
    assert together[0].num_slots == pool_slots(int(sum(slots).max()))
    assert stored[0].num_slots == 2 * np.max(slots)
    assert together[0].kv_bytes < stored[0].kv_bytes


@pytest.mark.slow
def test_blocks_and_heads_together(shallow):
    _, state, after = run(shallow, mixed("duo"), block=7)
    _, whole, whole_after = run(shallow, mixed("duo"))
    for one, other in ((state, whole), (after, whole_after)):
        assert helpers.live_positions(one.layers[0]) == helpers.live_positions(other.layers[0])


def test_one_layer_without_a_model():
    q, k, v = helpers.qkv(3, B=B, N=4, K=4, T=T)
    policy = kvjax.partition_heads(dict(zip(HEADS, PAIRS["scores"], strict=True)), [[*"baab"]])
    together = kvjax.evict_layer(policy, q, k, v, lengths=LENGTHS)
    for label, member in zip(HEADS, PAIRS["scores"], strict=True):
        alone = kvjax.evict_layer(member, q, k, v, lengths=LENGTHS)
        for head in (h for h in range(4) if "baab"[h] == label):
            for name in ("keep", "score", "budgets"):
                np.testing.assert_array_equal(getattr(together, name)[:, head], getattr(alone, name)[:, head])


def test_a_layer_of_one_policy_is_under_it():
    """Whatever that decides by; and labels may come from a table of truth values, as of retrieval heads."""
    full, by_layer = methods.full(), methods.tova(8)
    policy = kvjax.partition_heads({True: full, False: by_layer}, np.array([[False, False], [True, False]]))
    assert policy.rules(helpers.site(T=T, num_layers=2)) == (by_layer,)
    assert policy == kvjax.partition_heads({True: full, False: by_layer}, [[False, False], [True, False]])
    with pytest.raises(ValueError, match=r"but .*LastRow.* decides by what all heads of a"):
        policy.at(helpers.site(T=T, num_layers=2, layer=1)).spec.target.max()


def test_another_schedule_is_that_of_every_head():
    change = lambda policy: kvjax.when(kvjax.every(4), policy)
    a, b = methods.h2o(8), tova(6)
    assert change(kvjax.partition_heads({"a": a, "b": b}, [[*"ab"]])) == kvjax.partition_heads(
        {"a": change(a), "b": change(b)}, [[*"ab"]]
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kvjax.partition_heads({"a": methods.full()}, [[*"ab"]]), r"labels \['b'\] have no policy"),
        (lambda: kvjax.partition_heads({"a": methods.full()}, []), "labels=.*: must have at least 1 elements"),
        (lambda: kvjax.partition_heads({"a": methods.full()}, [["a"], []]), "labels has an empty row"),
        (lambda: kvjax.partition_heads({"a": methods.full()}, ["aa"] * 2), "'aa' is one text, not a layer's labels"),
        (lambda: kvjax.partition_heads([methods.full()], [["a"]]), "give a mapping from labels to policies"),
        (lambda: kvjax.partition_heads({"a": methods.full()}, [[*"aa"]], storage="heap"), "storage='heap' is not one"),
        (lambda: kvjax.partition_heads({"a": methods.full()}, [[*"aa"]] * 2), "labels of 2 layers, but the model has"),
        (lambda: kvjax.partition_heads(dict(zip("ab", PAIRS["scores"], strict=True)), [[*"aab"]]), "3 labels in layer"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_labels_are_checked(shallow, make, message):
    with pytest.raises(ValueError, match=message):
        kvjax.make_plan(shallow[0].config, make(), prompt_len=T, max_new_tokens=NEW)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (methods.h2o(8), methods.tova(8), "LastRow.* decides by what all heads of a layer hold"),
        (methods.h2o(8), methods.ada_snapkv(12, window_size=4), "Adaptive.* decides by what all heads"),
        (methods.h2o(8), methods.chunkkv(8, base=methods.snapkv(8, window_size=4)), "Chunks.* decides by what all"),
        (methods.h2o(8), methods.nacl(9, head_mode="layer"), "LayerMean.* decides by what all heads"),
        (methods.h2o(8), methods.think(0.5), "PruneChannels.* drops key channels, which a layer does for all heads"),
        (methods.h2o(8), methods.dilated_window(8), "hides slots from rows"),
        (methods.h2o(8), kvjax.soften(methods.h2o(8), 1.0), "is relaxed"),
        (methods.h2o(8), methods.snapkv(8, window_size=4, granularity="query_head"), "stores a set for every query"),
        (methods.h2o(8), kvjax.shared_layers(methods.h2o(8)), "makes one decision for all 1 layers"),
        (methods.h2o(8), methods.streaming_llm(8), r"want \['compact', 'original'\]; give all of them the same"),
    ],
)
def test_what_heads_cannot_differ_in_is_refused(shallow, one, other, message):
    policy = kvjax.partition_heads({"a": one, "b": other}, [HEADS])
    with pytest.raises(ValueError, match=message):
        kvjax.make_plan(shallow[0].config, policy, prompt_len=T, max_new_tokens=NEW)
