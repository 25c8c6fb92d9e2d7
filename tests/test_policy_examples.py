"""Numeric examples that can be checked by hand, read from `golden/policy_examples.json`."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.eviction import EvictMemory
from kvjax.pallas_kernels import Columns, attention
from kvjax.scoring.select import TopK
from kvjax.scoring.stats import LayerStats, Moment
from kvjax.sizes.budget import Ratio, Share, whole_tokens
from tests import helpers


def keep(policy, p, **kwargs):
    q, k, v, scale = helpers.from_probabilities(p)
    return helpers.kept(kvjax.evict_layer(policy, q, k, v, scale=scale, **kwargs))


def uniform_rows(n):
    return np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]


def test_e01_position_only(examples):
    e = examples["E01"]
    n, budget = e["inputs"]["n"], e["params"]["budget"]
    p = uniform_rows(n)
    assert keep(methods.full(), p) == e["expected"]["full"]
    assert keep(methods.window(budget), p) == e["expected"]["window"]
    assert keep(methods.streaming_llm(budget, sinks=e["params"]["sinks"]), p) == e["expected"]["streaming"]

    dilation = e["params"]["dilation"]
    anchored = methods.dilated_window(budget, dilation=dilation, mode="anchored")
    assert keep(anchored, p) == e["expected"]["dilated_anchored"]
    physical = (budget - 1) * (dilation + 1) + 1
    mask = methods.dilated_window(physical, dilation=dilation)
    assert keep(mask, p) == list(range(n - physical, n))
    for length, name in ((n, "dilated_mask"), (n + 1, "dilated_mask_next_step")):
        pos = jnp.arange(length - physical, length, dtype=jnp.int32)[None, None]
        kv = kvjax.LayerKV(jnp.zeros((1, 1, physical, 8)), jnp.zeros((1, 1, physical, 8)), pos)
        ctx = helpers.context(helpers.site(K=1, N=1), length=[length], prompt_length=[n], phase="decode")
        q = jnp.zeros((1, 1, 1, 8))
        moment = Moment(q, q, kv, jnp.asarray([[length - 1]]), ctx, lambda x, _: x)
        assert pos[0, 0][mask.visible(moment)[0, 0]].tolist() == e["expected"][name]

    uniforms = jnp.asarray(e["inputs"]["uniforms"])
    draw = lambda kv, stats, ctx: jnp.broadcast_to(uniforms, kv.pos.shape)
    given = kvjax.from_fn(draw, budget=budget)
    assert keep(given, p) == e["expected"]["random"]
    protected = dataclasses.replace(given, protect=methods.random(budget).protect)
    assert keep(protected, p) == e["expected"]["random_protect_last1"]


@pytest.mark.parametrize(("n", "wanted"), [(3, [0, 1, 2]), (6, [0, 3, 4, 5]), (9, [0, 3, 6, 8]), (12, [3, 6, 9, 11])])
def test_a_dilated_window_is_filled_until_its_grid_has_enough(n, wanted):
    assert keep(methods.dilated_window(4, dilation=2, mode="anchored"), uniform_rows(n)) == wanted


def test_e02_h2o_prompt(examples):
    e = examples["E02"]
    p, (heavy, recent) = e["inputs"]["P"], (e["params"]["heavy"], e["params"]["recent"])
    q, k, v, scale = helpers.from_probabilities(p)
    selection = kvjax.evict_layer(methods.h2o(heavy + recent, recent=recent), q, k, v, scale=scale)
    np.testing.assert_allclose(selection.score[0, 0], e["expected"]["column_sums"], atol=1e-6)
    assert helpers.kept(selection) == e["expected"]["kept"]
    assert keep(methods.h2o(heavy + recent), p) == e["expected"]["kept"]  # half and half is the default
    assert keep(methods.h2o(heavy + recent, recent=0), p) == e["expected"]["key_only_kept"]


def test_e03_h2o_decode_step(examples):
    e = examples["E03"]
    policy = methods.h2o(e["params"]["heavy"] + e["params"]["recent"], recent=e["params"]["recent"])
    ctx = helpers.context(helpers.site(T=6, K=1, N=1), length=[7], prompt_length=[6], phase="decode")
    pos = jnp.asarray([[[*e["inputs"]["kept_before"], e["inputs"]["new_position"]]]], jnp.int32)
    before = (EvictMemory(jnp.asarray([[[*e["inputs"]["acc_before"], 0.0]]], jnp.float32), (), None),)
    kv = kvjax.LayerKV(jnp.zeros((1, 1, 5, 8)), jnp.zeros((1, 1, 5, 8)), pos, before)
    row = jnp.asarray([[e["inputs"]["row_over_slots"]]], jnp.float32)
    after = policy.layer(kv, LayerStats((row,), policy.at(ctx.site).spec.step), ctx)
    np.testing.assert_allclose(after.memory[0].score[0, 0], e["expected"]["acc_after"], atol=1e-6)
    assert helpers.live_positions(after)[0][0] == e["expected"]["kept_after"]
    gone = set(np.asarray(pos).ravel().tolist()) - set(e["expected"]["kept_after"])
    assert gone == {e["expected"]["evicted"]}


def test_e08_tova(examples):
    e = examples["E08"]
    rows = np.stack([uniform_rows(6)] * 2)
    rows[:, -1] = e["inputs"]["last_row_per_head"]
    budget = e["params"]["budget"]
    # One kv head per query head; the layer mean is taken over all of them.
    q, k, v, scale = helpers.from_probabilities(rows)
    k, v = jnp.concatenate([k, k], axis=1), jnp.concatenate([v, v], axis=1)
    selection = kvjax.evict_layer(methods.tova(budget), q, k, v, scale=scale)
    np.testing.assert_allclose(selection.score[0, 0], e["expected"]["mean_row"], atol=1e-6)
    assert [helpers.kept(selection, head=h) for h in (0, 1)] == [e["expected"]["kept_all_heads_mean"]] * 2
    per_head = kvjax.evict_layer(methods.tova(budget, head_mode="per_kv_head"), q, k, v, scale=scale)
    assert [helpers.kept(per_head, head=h) for h in (0, 1)] == e["expected"]["kept_per_head"]
    forced = kvjax.evict_layer(methods.tova(budget, protect_last=1), q, k, v, scale=scale)
    assert helpers.kept(forced) == e["expected"]["kept_mean_force_last"]


def test_e09_mean_attention(examples):
    """The sums over the counts of rows that could see a key; counts need no kernel."""
    e = examples["E09"]
    q, k, v, scale = helpers.from_probabilities(e["inputs"]["P"])
    pos = jnp.arange(6, dtype=jnp.int32)
    sums = attention(q, k, v, pos[None], pos[None, None], columns=[Columns()], scale=scale).columns[0]
    np.testing.assert_allclose(
        np.asarray(sums[0, 0]) / (6 - np.arange(6)), e["expected"]["mean_including_self_row"], atol=1e-6
    )


def test_e13_group_reduction_order(examples):
    e = examples["E13"]
    p = np.zeros((2, 2, 2))
    p[:, 0, 0] = 1.0
    p[0, 1], p[1, 1] = e["inputs"]["head0"], e["inputs"]["head1"]
    q, k, v, scale = helpers.from_probabilities(p)
    pos = jnp.arange(2, dtype=jnp.int32)
    wanted = {
        "mean_then_square": Columns(rows=1, element="p2", group="mean", group_at="before"),
        "square_then_mean": Columns(rows=1, element="p2", group="mean", group_at="after"),
        "mean_then_gt_half": Columns(rows=1, element="above", threshold=0.5 + 1e-6, group="mean", group_at="before"),
        "gt_half_then_sum": Columns(rows=1, element="above", threshold=0.5, group="sum", group_at="after"),
    }
    found = attention(q, k, v, pos[None], pos[None, None], columns=list(wanted.values()), scale=scale).columns
    for name, x in zip(wanted, found, strict=True):
        np.testing.assert_allclose(x[0, 0], e["expected"][name], atol=1e-6, err_msg=name)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_e16_column_reduction(examples, implementation):
    e = examples["E16"]
    q, k = (jnp.asarray(e["inputs"][x], jnp.float32)[None, None] for x in "qk")
    pos = jnp.arange(4, dtype=jnp.int32)
    columns = [Columns(), Columns(element="p2"), Columns(rows=2)]
    run = lambda q_pos: attention(
        q,
        k,
        k,
        q_pos[None],
        pos[None, None],
        columns=columns,
        scale=e["params"]["scale"],
        implementation=implementation,
    )
    causal = run(pos)
    np.testing.assert_allclose(causal.lse[0, 0], e["expected"]["lse_causal"], atol=1e-5)
    for x, name in zip(causal.columns, ("colsum", "colsum_of_squares", "colsum_last2_rows"), strict=True):
        np.testing.assert_allclose(x[0, 0], e["expected"][f"{name}_causal"], atol=1e-5)
    partials = np.asarray(e["expected"]["block_partials"])
    np.testing.assert_allclose(causal.columns[0][0, 0].reshape(partials.shape), partials, atol=1e-5)
    np.testing.assert_allclose(causal.columns[0].sum(), e["expected"]["total_mass_causal"], atol=1e-5)
    everything = run(jnp.full((4,), 3, jnp.int32))  # rows that see all keys, as without a causal mask
    np.testing.assert_allclose(everything.lse[0, 0], e["expected"]["lse_full"], atol=1e-5)
    np.testing.assert_allclose(everything.columns[0][0, 0], e["expected"]["colsum_full"], atol=1e-5)


def window_votes(e):
    """Two query heads of one kv head whose last two rows are given."""
    rows = np.asarray(e["inputs"]["window_rows_two_heads"])
    n = rows.shape[-1]
    p = np.stack([uniform_rows(n)] * 2)
    p[:, -2:] = rows
    return p


def test_e17_snapkv(examples):
    e = examples["E17"]
    p = window_votes(e)
    budget, window, kernel = e["params"]["capacity"], e["params"]["window"], e["params"]["kernel"]
    n = p.shape[-1]

    def policy(**kwargs):
        return methods.snapkv(budget, window_size=window, kernel_size=kernel, **kwargs)

    q, k, v, scale = helpers.from_probabilities(p)
    votes = kvjax.evict_layer(policy(group="mean"), q[:, :1], k, v, scale=scale)
    np.testing.assert_allclose(votes.score[0, 0, : n - window], e["expected"]["pooled_max"][0], atol=1e-6)
    for i in (0, 1):
        alone = dataclasses.replace(policy(), score=kvjax.scoring.scores.Window(window, group="mean"))
        votes = np.asarray(kvjax.evict_layer(alone, q[:, i : i + 1], k, v, scale=scale).score[0, 0, : n - window])
        np.testing.assert_allclose(votes, e["expected"]["votes_sum"][i], atol=1e-6)
        np.testing.assert_allclose(votes / window, e["expected"]["votes_mean"][i], atol=1e-6)
        average = kvjax.evict_layer(policy(pooling="avg"), q[:, i : i + 1], k, v, scale=scale)
        np.testing.assert_allclose(average.score[0, 0, : n - window], e["expected"]["pooled_avg"][i], atol=1e-5)
        valid = kvjax.evict_layer(policy(pooling="avg", avg_pad="valid_count"), q[:, i : i + 1], k, v, scale=scale)
        np.testing.assert_allclose(valid.score[0, 0, : n - window], e["expected"]["pooled_avg_valid"][i], atol=1e-5)
        single = kvjax.evict_layer(policy(), q[:, i : i + 1], k, v, scale=scale)
        assert helpers.kept(single) == e["expected"]["kept_per_query_head_max"][i]
    for group in ("mean", "max", "sum"):
        assert keep(policy(group=group), p) == e["expected"][f"kept_kv_head_{group}_then_maxpool"]
    assert keep(policy(pool_before_rows=True), p) == e["expected"]["kept_pool_before_row_mean"]
    assert keep(policy(pooling="avg"), p) == e["expected"]["kept_kv_head_avgpool_mean"]
    assert keep(policy(pooling="avg", avg_pad="valid_count"), p) == e["expected"]["kept_kv_head_avgpool_valid_mean"]


def test_e34_ratio_rounding(examples):
    for row in examples["E34"]["expected"]["rows"]:
        share = 1 - row["removed"]
        assert int(whole_tokens(share, np.array([row["n"]]))[0]) == row["kvjax"], row
        assert int(whole_tokens(share, np.array([row["n"]]), "int")[0]) == row["python_int"], row
        assert int(Ratio(share).table(np.array([row["n"]]), np.array([0]))[0]) == row["kvjax"]


def test_e35_ties(examples):
    e = examples["E35"]
    score = jnp.asarray(e["inputs"]["score"], jnp.float32)[None, None]
    n, count = score.shape[-1], e["params"]["keep"]
    pos = jnp.arange(n, dtype=jnp.int32)[None, None]
    budgets = jnp.full((1, 1), count, jnp.int32)
    for ties in ("evict_older", "lower_index"):
        for most in (None, 2):  # sorted, or one by one
            choose = TopK(ties)
            mask = choose.drop(score, pos, budgets, most) if most else choose.best(score, pos, budgets)
            assert np.nonzero(np.asarray(mask[0, 0]))[0].tolist() == e["expected"][ties], (ties, most)


def test_e36_padding(examples):
    e = examples["E36"]
    p, valid = np.asarray(e["inputs"]["P"]), np.asarray(e["inputs"]["valid"])
    pad, n = int((valid == 0).sum()), int(valid.sum())
    policy = methods.h2o(e["params"]["ratio"], recent=e["params"]["recent"])
    q, k, v, scale = helpers.from_probabilities(p)
    selection = kvjax.evict_layer(policy, q, k, v, lengths=jnp.asarray([n]), scale=scale)
    assert helpers.kept(selection) == e["expected"]["kept"]
    assert selection.budgets.tolist() == [[e["expected"]["budget"]]]
    np.testing.assert_allclose(selection.score[0, 0, pad:], e["expected"]["column_sums"][pad:], atol=1e-6)
    assert [i - pad for i in e["expected"]["kept"]] == keep(policy, p[pad:, pad:])


def occupancy(schedule, steps, *, budget, n, make=methods.window):
    """(slots that attention reads, slots left) at every decode step."""
    policy = kvjax.when(schedule, make(budget))
    site = helpers.site(T=n, K=1, N=1, max_new_tokens=steps)
    policy.check(site, n)
    ctx = helpers.context(site, length=[n])
    kv = policy.layer(helpers.prompt_layer(policy, ctx, T=n, B=1, K=1), LayerStats(), ctx)
    kv = kvjax.compact(kv, int(policy.at(site).spec.capacity.max()))
    seen = []
    for step in range(1, steps + 1):
        now = helpers.context(site, length=[n + step], prompt_length=[n], phase="decode")
        new = jnp.ones((1, 1, 1, 8))
        kv = kvjax.cache.state.insert(kv, new, new, jnp.asarray([[n + step - 1]], jnp.int32))
        attended = int(kv.num_live[0, 0])
        kv = policy.layer(kv, LayerStats(), now)
        seen.append([attended, int(kv.num_live[0, 0])])
    assert max(a for a, _ in seen) <= policy.at(site).spec.capacity.max()
    return seen


def test_e39_schedules(examples):
    e = examples["E39"]
    at = functools.partial(occupancy, budget=e["params"]["budget"], n=e["inputs"]["n"])
    assert at(kvjax.every_step(), 4) == e["expected"]["every_step"]
    assert at(kvjax.every(3), 7) == e["expected"]["every_3"]
    assert at(kvjax.every(3), 7, n=2) == e["expected"]["every_3_short_prompt"]
    assert at(kvjax.after_prefill(), 3) == e["expected"]["never"]
    # As soon as the budget is exceeded by 3, whatever the step.
    assert at(kvjax.when_over(3), 7) == [[5, 5], [6, 6], [7, 4], [5, 5], [6, 6], [7, 4], [5, 5]]


@pytest.mark.parametrize(
    ("over", "drop", "left"),
    [(1, 1, 4), (1, 2, 3), (1, Share(0.75), 2), (1, 0.5, 2), (3, 2, 4), (3, 4, 3)],
    ids=repr,
)
def test_a_drop_is_exactly_so_many_tokens_but_never_leaves_more_than_the_budget(over, drop, left):
    """A budget of 4, a prompt of 6, of which a float is a share: what is left of 4 + `over` tokens."""
    seen = occupancy(kvjax.when_over(over, drop=drop), over + 1, budget=4, n=6)
    assert seen[over - 1 :] == [[4 + over, left], [left + 1, left + 1 if left < 3 + over else left]]


def test_a_drop_spares_what_is_protected():
    make = functools.partial(methods.streaming_llm, sinks=3)
    assert occupancy(kvjax.when_over(1, drop=4), 1, budget=4, n=6, make=make) == [[5, 3]]


def test_a_drop_of_more_than_are_found_one_by_one_is_exact_too():
    assert occupancy(kvjax.when_over(2, drop=7), 2, budget=9, n=9)[-1] == [11, 4]


def test_what_is_dropped_at_once_is_no_more_than_the_budget():
    with pytest.raises(ValueError, match=r"budget of 5 tokens for a prompt of 20, of which 10 cannot be dropped at on"):
        methods.scissorhands(0.25, recent=2, drop=0.5).check(helpers.site(T=20), 20)


def test_e37_compact_positions(examples):
    """Ranks of kept positions, and the rank of the next query."""
    e = examples["E37"]
    kept = jnp.asarray([[e["inputs"]["kept_positions"]]], jnp.int32)
    assert kvjax.cache.state.ranks(kept).tolist() == [[[0, 1, 2]]]
    kv = kvjax.LayerKV(
        jnp.zeros((1, 1, 3, 8)), jnp.zeros((1, 1, 3, 8)), kept, (), kvjax.cache.state.ranks(kept), positions="compact"
    )
    following = kvjax.cache.state.next_ranks(kv, jnp.asarray([[[6]]], jnp.int32))
    assert following.tolist() == [[[e["expected"]["next_query_position_rerotated"]]]]


@pytest.mark.parametrize("positions", ["original", "rerotate"])
def test_e37_stored_keys(examples, positions):
    """What is stored of six equal keys when three have been evicted and a seventh was read."""
    e = examples["E37"]
    kept, n = e["inputs"]["kept_positions"], 6

    def rotate(x, pos):
        angle = e["inputs"]["theta"] * pos[..., None].astype(x.dtype)
        a, b = x[..., :1], x[..., 1:]
        return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)

    key = jnp.broadcast_to(jnp.asarray(e["inputs"]["base_key"], jnp.float32)[None, None, None], (1, 1, n, 2))
    site = helpers.site(T=n, K=1, N=1, H=2)
    slots = jnp.zeros((1, 1, 0), jnp.int32)
    ranks = None if positions == "original" else slots
    kv = kvjax.LayerKV(key[:, :, :0], key[:, :, :0], slots, (), ranks, ranks, positions=positions)
    ctx = helpers.context(site, length=[n])
    pos = jnp.arange(n, dtype=jnp.int32)[None]
    _, kv, _ = kvjax.attend(kv, key, key, key, pos, ctx=ctx, rotate=rotate)
    kv = kvjax.evict(kv, jnp.isin(kv.pos, jnp.asarray(kept)))
    one = key[:, :, :1]
    later = helpers.context(site, length=[n + 1], prompt_length=[n], phase="decode")
    _, kv, _ = kvjax.attend(kv, one, one, one, jnp.full((1, 1), n, jnp.int32), ctx=later, rotate=rotate)
    stored = dict(zip(kv.pos[0, 0].tolist(), np.asarray(kv.k[0, 0]), strict=True))
    keys = {"original": "keys_original", "rerotate": "keys_rerotated"}[positions]
    np.testing.assert_allclose([stored[p] for p in kept], e["expected"][keys], atol=1e-6)
    following = {"original": "next_query_position_original", "rerotate": "next_query_position_rerotated"}[positions]
    angle = e["inputs"]["theta"] * e["expected"][following]
    np.testing.assert_allclose(stored[n], [np.cos(angle), np.sin(angle)], atol=1e-6)
