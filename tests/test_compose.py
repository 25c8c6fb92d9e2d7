"""Policies made of policies: every head, layer and member as it is alone, or a reason why not."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods, models
from kvjax.budgets import STEP, HeadShares, LayerShares, Schedule
from kvjax.compose import across
from kvjax.contract import Layout, Rewrite
from kvjax.decide.select import Pages
from kvjax.methods.released import factory, papers
from kvjax.scores.attention import Recency
from kvjax.storage import Pool
from tests import one_call, table, tensors
from tests.marks import exhaustive_but, slow_but
from tests.tensors import live_positions

pytestmark = pytest.mark.usefixtures("as_users_run_it")

T, M, LENGTHS = 24, 38, np.array([24, 17], np.int32)
q, k, v = tensors.qkv(3, T=M)
TENSORS = [{"q": q, "k": k, "v": v}]
ONE = [{name: x[:1] for name, x in TENSORS[0].items()}]
FULL, H2O = kvjax.Policy(), methods.h2o(8)
STREAMING = dataclasses.replace(methods.streaming_llm(10, sinks=2), layout=Layout())


def config_of(layers=1):
    sizes = {"vocab_size": 61, "embed_dim": 32, "mlp_dim": 48, "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    return models.ModelConfig(**sizes, num_layers=layers)


def planned(policy, layers=1, n=60, more=8):
    return kvjax.make_plan(config_of(layers), policy, np.array([n]), n, more)


# ------------------------------------------------------------------------------------------------ by head

PAIRS = {
    "duo": (FULL, STREAMING),
    "draws": (methods.random(9), methods.keyformer(7, recent=3)),
    "chain": (kvjax.chain(methods.snapkv(14, window=4), papers.tova_by_head(9)), FULL),
}


class Writes(Rewrite):
    """A rewrite that lists anything."""

    what: Any

    @property
    def writes(self):
        return self.what


def by_head(one, other, **how):
    return kvjax.partition_heads({"a": one, "b": other}, [["a", "b"]], **how)


@pytest.mark.slow
@pytest.mark.parametrize("name", exhaustive_but(PAIRS, "duo"))
def test_every_head_is_as_under_its_policy_alone(name):
    """In slots of its own, as many as it has alone; in a partition of a partition too."""
    run = lambda policy: tensors.replay(policy, TENSORS, T, lengths=LENGTHS)
    together, dense = run(by_head(*PAIRS[name])), run(by_head(*PAIRS[name], pool=False))
    nested = run(by_head(by_head(*PAIRS[name]), PAIRS[name][1]))
    assert together.live == dense.live == nested.live
    alone = [run(policy) for policy in PAIRS[name]]
    for step, now in enumerate(together.live):
        assert now == [[alone[head].live[step][row][head] for head in range(2)] for row in range(2)]
    assert isinstance(together.kv, Pool)
    assert together.kv.pos.shape[1] <= sum(one.kv.pos.shape[-1] for one in alone) + 16
    assert together.kv.pos.size <= dense.kv.pos.size


def test_a_member_that_differs_by_layer_is_that_of_its_layer():
    by_layer = kvjax.partition({"h": H2O, "t": methods.tova(6)}, ["h", "t"])
    mixed = kvjax.partition_heads({"a": by_layer, "b": FULL}, [["a", "b"]] * 2)
    wanted = kvjax.partition_heads({"h": H2O, "t": methods.tova(6), "b": FULL}, [["h", "b"], ["t", "b"]])
    assert [mixed.at(i, 2) for i in range(2)] == [wanted.at(i, 2) for i in range(2)]


def test_a_layer_of_one_label_is_under_its_policy():
    """Labels may come from a table of truth values, as of retrieval heads."""
    tova = methods.tova(8)
    policy = kvjax.partition_heads({True: FULL, False: tova}, np.array([[False, False], [True, False]]))
    assert policy.at(0, 2) == tova
    assert policy == kvjax.partition_heads({True: FULL, False: tova}, [[False, False], [True, False]])
    for change in (lambda p: kvjax.when(Schedule(every=4), p), lambda p: kvjax.protect(p, sinks=1, recent=2)):
        assert change(by_head(H2O, tova)) == by_head(change(H2O), change(tova))


@pytest.mark.parametrize("name", ["snapkv", "knorm", "chunkkv", "roco", "ada_snapkv", "across_layers_entropy"])
def test_equal_protection_keeps_the_same_first_and_last_tokens(tiny, name):
    """Whatever the method protects; the other tokens of the budget go by its score, as they do with its own."""
    (model, params), case = tiny, table.Case(name)
    policy = kvjax.protect(case.make(case.budget, width=model.config.embed_dim), sinks=2, recent=3)
    _, state = kvjax.prefill(model, params, [[*range(T)]], policy=policy, max_new_tokens=1)
    for layer in state.layers:
        held = np.asarray(layer.head_pos)
        for position in (0, 1, T - 3, T - 2, T - 1):
            assert (held == position).any(-1).all(), position


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kvjax.partition_heads({"a": H2O}, [[*"ab"]]), "there is no policy with the label 'b', but with 'a'"),
        (lambda: kvjax.partition_heads({"a": H2O}, [[*"aa"]] * 2), "there are 2 labels for 1 layers; give one a layer"),
        (lambda: kvjax.partition_heads({"a": H2O, "b": FULL}, [[*"aab"]]), "has 3 labels in layer 0, which has"),
        (
            lambda: by_head(H2O, kvjax.shared_layers(H2O)),
            "SharedLayers decides for all layers at once, so it cannot be",
        ),
        (lambda: kvjax.chain(kvjax.shared_layers(H2O), methods.window(8)), "so it cannot be a member of Chain"),
        (lambda: kvjax.shared_layers(kvjax.shared_layers(H2O)), "so it cannot be a member of shared layers"),
        (
            lambda: kvjax.shared_layers(kvjax.chain(kvjax.partition({"a": H2O}, "a"), methods.window(9))),
            "one decision is made for all layers, but a partition gives layers policies of their own",
        ),
        (lambda: kvjax.shared_layers(kvjax.chain(H2O, FULL, H2O), "mean"), "the policy is Chain with heads=None; give"),
        (lambda: kvjax.shared_layers(methods.ada_snapkv(9, window=2), "max"), r"Evict with heads=Adaptive\(.*\); give"),
        (lambda: kvjax.chain(methods.streaming_llm(8), H2O), 'use positions="rank" in a chain'),
        (lambda: dataclasses.replace(H2O, layout=Layout("shifted")), "but here are TopK by Accumulated and sinks=0"),
        (lambda: kvjax.protect(methods.streaming_llm(8), sinks=0.1, recent=1), "by Recency and sinks=0.1; use"),
        (
            lambda: kvjax.evict_layer(by_head(methods.think(), H2O), q, k, v),
            "a member for some heads drops key channels",
        ),
        (lambda: methods.streaming_llm(62, sinks=63), "a budget of 62 tokens cannot hold 63 sinks"),
        (lambda: methods.streaming_llm(63, sinks=63), "a budget of 63 tokens cannot hold 63 sinks and 1 recent"),
        (
            lambda: kvjax.chain(methods.finch(8, window=4), kvjax.Evict(Recency(), 8, rewrite=Writes(("k",)))),
            'positions="rank", where a key moves with its rank, but Chain writes keys',
        ),
        (
            lambda: kvjax.evict_layer(dataclasses.replace(H2O, select=Pages(64)), q, k, v),
            r"a budget of \d+ tokens holds no page of 64 beside \d+ tokens that stay; give a budget of \d+ or more",
        ),
        (
            lambda: kvjax.evict_layer(dataclasses.replace(H2O, select=Pages(7), sinks=2, recent=2), q, k, v),
            "a budget of 8 tokens holds no page of 7 beside 4 tokens that stay; give a budget of 11 or more",
        ),
        (lambda: kvjax.protect(H2O, sinks=2, prompt=True), "of which sinks=2 are the first; give one of them"),
        (
            lambda: kvjax.evict_layer(kvjax.protect(methods.snapkv(M - 1, window=2), prompt=True), q, k, v),
            f"a budget of {M - 1} tokens cannot hold a prompt of {M} that stays and 2 recent tokens; give a budget of "
            f"{M} or more",
        ),
        (lambda: kvjax.protect(methods.fastgen((1,), (2,)), sinks=1, recent=1), "keeps no tokens by position alone"),
        (lambda: Schedule(every=2, over=3), "give one of them, not both"),
        (lambda: Schedule(before=True), "evicts before every step; give every=1"),
        (lambda: kvjax.when(STEP, methods.quest(64)), "has no schedule"),
        (lambda: kvjax.when(STEP, methods.fastgen((1,), (2,))), "has no schedule"),
        (lambda: kvjax.when(STEP, papers.h2o_stepwise_mask(8)), "has no schedule"),
        (lambda: kvjax.when(Schedule(every=1, before=True), H2O), "evicts before rows are read, but Accumulated or"),
        *(
            (lambda p=p: kvjax.when(STEP, p), r"observes of prompts alone, but Schedule\(.*evicts while decoding; use")
            for p in (
                *(methods.cake(12, window=4), methods.kvzip(8), methods.snapkv(40), methods.expected_attention(8)),
                *(methods.compactor(0.5), kvjax.chain(H2O, methods.defensivekv(40))),
            )
        ),
        (lambda: kvjax.across_layers(H2O, across.ScoreEntropy()), "layers compete once, after the prompt: give an"),
        (
            lambda: Writes([1]),
            r"field what of Writes is a list \(unhashable type: 'list'\); give a tuple, FrozenArrays",
        ),
        (lambda: Writes(np.ones(2)), "field what of Writes is a ndarray"),
        (lambda: dataclasses.replace(H2O, rewrite=Writes("v")), "Writes.writes='v' is no tuple of some of"),
        (
            lambda: dataclasses.replace(H2O, rewrite=Writes(("values",))),
            r"writes=\('values',\) is no tuple of some of \('k'",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_composed_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        planned(make())


# ------------------------------------------------------------------------------------------------ when and how much


def first_head(kv, stats, ctx):
    """The first head's tokens are worth more than the other's."""
    return kv.pos.astype(jnp.float32) + jnp.asarray([100.0, 0.0])[None, :, None]


@pytest.mark.parametrize("pool", slow_but([False, True], True))
@pytest.mark.parametrize(
    ("heads", "when", "shares"),
    [
        (HeadShares(((1.0, 3.0),)), Schedule(every=4), [6, 18]),
        pytest.param(HeadShares(((1.0, 3.0),)), Schedule(every=1, before=True), [7, 17], marks=pytest.mark.slow),
        pytest.param(kvjax.Adaptive(1.0), Schedule(every=4), [24, 0], marks=pytest.mark.slow),
    ],
    ids=["table", "table before", "adaptive"],
)
def test_heads_get_their_shares_at_the_first_eviction(heads, when, shares, pool):
    """Whenever it comes: after a prompt of 13 tokens, or at one of the 24 steps behind a prompt that fits."""
    policy = kvjax.from_fn(first_head, 12, when=when, heads=heads, layout=Layout(pool=pool))
    for n in (5, 13):
        seen = tensors.replay(policy, [{name: x[:, :, : n + 24] for name, x in ONE[0].items()}], n)
        counts = [[len(head) for head in now[0]] for now in seen.live]
        assert sum(counts[0]) <= min(2 * n, 24)
        assert counts[-1] == shares or sum(counts[-1]) == 24


@pytest.mark.parametrize("pool", slow_but([False, True], True))
@pytest.mark.parametrize("sinks", slow_but([0, 2], 2))
def test_room_is_made_beside_the_sinks_of_every_head(sinks, pool):
    """Also where a table leaves a head nothing else."""
    policy = methods.streaming_llm(sinks + 4, sinks=sinks)
    policy = dataclasses.replace(policy, heads=HeadShares(((1.0, 0.0),)), layout=Layout("rank", pool=pool))
    seen = tensors.replay(policy, [{name: x[:, :, :29] for name, x in ONE[0].items()}], T)
    for n, now in enumerate(seen.live, T):
        rich, poor = now[0]
        assert poor == [*range(sinks), n - 1]
        assert rich == [*range(sinks), *range(n - 7, n)]


@pytest.mark.parametrize(
    "heads",
    [pytest.param(HeadShares(((1.0, 0.0),)), marks=pytest.mark.slow), kvjax.Adaptive(1.0)],
    ids=["table", "adaptive"],
)
def test_what_is_spared_leaves_room_for_what_is_protected(heads):
    policy = dataclasses.replace(methods.roco(12, scope=kvjax.Share(0.5)), sinks=3, recent=2, heads=heads)
    seen = tensors.replay(policy, [{name: x[:, :, :27] for name, x in ONE[0].items()}], T)
    for n, now in enumerate(seen.live, T):
        assert sum(map(len, now[0])) == 24
        assert all({0, 1, 2, n - 2, n - 1} <= set(head) for head in now[0])


def test_a_schedule_of_decoding_alone_keeps_the_prompt_until_then():
    policy = kvjax.when(Schedule(prefill=False, every=1), methods.h2o(6))
    seen = tensors.replay(policy, [{name: x[:, :, :16] for name, x in ONE[0].items()}], 15)
    assert [[len(head) for head in now[0]] for now in seen.live] == [[15, 15], [6, 6]]


def test_a_chain_plans_for_its_smallest_member():
    small, wide = methods.h2o(6), methods.tova(9)
    sizes = planned(small).capacities
    for chained in (kvjax.chain(small, wide), kvjax.chain(wide, small)):
        assert planned(chained).capacities == sizes < planned(wide).capacities


@pytest.mark.parametrize(
    ("schedule", "room"),
    [
        (Schedule(), 100),
        (STEP, 1),
        (Schedule(every=7), 7),
        (Schedule(every=500), 100),
        (Schedule(over=9), 9),
        (Schedule(every=1, before=True), 1),
    ],
)
def test_room_between_evictions(schedule, room):
    assert schedule.room(100) == room
    (info,) = planned(FULL, n=40, more=100).infos
    sizes = kvjax.when(schedule, methods.window(16)).sizes(info, np.array([40]))
    assert sizes.per_head.tolist() == [16 + room]


# ------------------------------------------------------------------------------------------------ all layers at once

LAYERS = [{name: x[:1, :, :T] for name, x in zip("qkv", tensors.qkv(seed), strict=True)} for seed in range(3)]


def kept(policy):
    return [live_positions(kv)[0] for kv in tensors.evicted(policy, LAYERS)[0]]


def test_layers_that_share_a_decision_share_all_their_statistics():
    """D-35: H2O's votes of every layer are added before the best are chosen; no layer's alone choose the same."""
    alone = methods.h2o(6, recent=2)
    votes = tensors.evicted(alone, LAYERS)[1]
    best = lambda x: [sorted([*np.argsort(-head[: T - 2])[:4].tolist(), T - 2, T - 1]) for head in x[0]]
    found = kept(kvjax.shared_layers(alone))
    assert found == [best(sum(votes))] * 3
    assert all(best(x) != found[0] for x in votes)


@pytest.mark.parametrize("by", ["mean", "max"])
def test_layers_that_share_scores_keep_the_best_by_their_mean_or_their_largest(by):
    alone = methods.keydiff(6)
    scores = np.stack([x[0] for x in tensors.evicted(alone, LAYERS)[1]])
    shared = scores.mean(0) if by == "mean" else scores.max(0)
    found = kept(kvjax.shared_layers(alone, by))
    assert found == [np.sort(np.argsort(-shared)[:, :6]).tolist()] * 3
    assert kept(alone)[0] != found[0]


@pytest.mark.slow
def test_every_layer_remembers_its_own_score():
    """The mean of votes keeps what their sum keeps, while decoding, too: one is of memories, the other has one."""
    layers = [{name: x[:1] for name, x in zip("qkv", tensors.qkv(seed, T=M), strict=True)} for seed in range(3)]
    run = lambda *by: tensors.replay(kvjax.shared_layers(methods.h2o(8), *by), layers, T)
    theirs, ours = run(), run("mean")
    assert ours.live == theirs.live
    assert [live_positions(kv) for kv in ours.state.layers] == [ours.live[-1]] * 3
    own = [np.asarray(kv.memory.score) for kv in ours.state.layers]
    assert np.abs(own[0] - own[1]).max() > 0.01


def test_scores_that_are_no_numbers_in_one_layer_are_a_fault_of_the_decision():
    nothing = lambda kv, stats, ctx: jnp.where(ctx.layer == 1, jnp.nan, kv.pos.astype(jnp.float32))
    layers = tensors.evicted(kvjax.shared_layers(kvjax.from_fn(nothing, 6), "mean"), LAYERS)[0]
    assert all(np.asarray(kv.fault).all() for kv in layers)


@pytest.mark.slow
def test_layers_that_share_a_decision_have_one_budget():
    """What gives them others is refused; what gives them the same, of which heads have other shares, is not."""
    h2o = methods.h2o(8, recent=2)
    for uneven in (
        dataclasses.replace(h2o, layers=kvjax.Pyramid(beta=4)),
        dataclasses.replace(h2o, layers=LayerShares((1.5, 1.0, 0.5))),
        dataclasses.replace(h2o, heads=HeadShares(((3.0, 1.0), (1.0, 1.0), (1.0, 3.0)))),
    ):
        with pytest.raises(ValueError, match="budgets or tables of layers 0 and 1 differ"):
            planned(kvjax.shared_layers(uneven), layers=3)
    with pytest.raises(ValueError, match="a partition gives layers policies of their own"):
        planned(kvjax.shared_layers(factory.knorm_factory(8)), layers=3)
    even = dataclasses.replace(h2o, layers=LayerShares((1.0,) * 3), heads=HeadShares(((3.0, 1.0),) * 3))
    first, *others = kept(kvjax.shared_layers(even))
    assert others == [first] * 2
    assert len(first[0]) > len(first[1])


NO_SET = {  # of the table, why heads cannot keep one set
    "ada_snapkv": "Adaptive decides for each by itself; give an Evict with heads=None",
    "criticalkv": "TwoStage decides for each by itself",
    "partition_heads": "ByHead decides for each by itself",
    "fastgen": "FastGen ranks none",
}


@pytest.mark.parametrize("name", slow_but(("h2o", "streaming_llm", "vase", "chunkkv", "across_layers_entropy"), "vase"))
def test_heads_that_share_keep_one_set(name):
    shared = kvjax.shared_heads(table.Case(name).policy)
    live = np.asarray(one_call.decided(shared)[1].live)[:2]
    np.testing.assert_array_equal(live, np.broadcast_to(live[:, :1], live.shape))


@pytest.mark.parametrize("name", NO_SET)
def test_heads_that_decide_for_themselves_share_none(name):
    here = table.Case(name).policy.at(1, 3)
    with pytest.raises(ValueError, match=f"all kv heads are to keep one set of tokens, but {NO_SET[name]}"):
        kvjax.shared_heads(here)


def test_pages_of_a_layer_go_as_a_whole_in_all_heads_while_decoding():
    """Pages of 3: a head holds all or none of one, but for the sink's and the newest."""
    policy = kvjax.shared_heads(dataclasses.replace(methods.h2o(10, recent=1), sinks=1, select=Pages(3)))
    live = tensors.replay(policy, TENSORS, T).live
    for n, step in enumerate(live, T):
        for one, other in step:
            pages = [sum(p // 3 == page for p in one) for page in range(1, (n - 1) // 3)]
            assert one == other
            assert {0, n - 1} <= {*one}
            assert len(one) <= 10
            assert {*pages} <= {0, 3}
    assert len({len(one) for step in live for one, _ in step}) > 1
