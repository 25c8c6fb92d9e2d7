"""Numeric examples that can be checked by hand (`golden/policy_examples.json`): softmaxes, keys, counts, storage."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.budgets import STEP, Schedule, Share
from kvjax.contract import Layout, Tree, resolve
from kvjax.decide.linalg import unit
from kvjax.decide.select import Chunks, TopK, TwoStage, best
from kvjax.methods.profile import STRATEGIES
from kvjax.methods.released import papers, parts
from kvjax.methods.released.counts import Truncated
from kvjax.observe import FutureQueries, ProjectedValueNorm
from kvjax.pallas_kernels import attention
from kvjax.scores.attention import Accumulated, Faded
from kvjax.scores.keys import Expected, KeyBias, KeyDifference, KeyNorm, LagRelative
from kvjax.scores.softmax import EntropyScaled, Noisy
from tests import tensors
from tests.by_hand import cache, inputs_of, keep, moment, numbers, read, read_tensors, slots_of
from tests.marks import slow_but
from tests.tensors import live_positions

# --- softmaxes of their own ---


@pytest.mark.slow
def test_e22_ahakv_prompt(examples):
    e = examples["E22"]
    k = numbers(e["inputs"]["k"])
    (n, d), params, wanted = k.shape[2:], e["params"], e["expected"]
    q = jnp.concatenate([jnp.zeros((n - 2, d)), jnp.asarray(e["inputs"]["q_last2"], jnp.float32)])[None, None]
    v = jnp.sqrt(numbers(e["inputs"]["value_norm_sq"]))[..., None] * jnp.eye(d)[None, None, :1]
    how = {"recent": params["recent"], "kernel": params["avg_pool"]}
    bare = lambda policy: dataclasses.replace(policy, score=Accumulated(policy.score.of))
    score = lambda policy: read_tensors(policy, q, k, v)[1][0]
    policy = methods.ahakv(params["budget"], **how)
    np.testing.assert_allclose(score(bare(policy)), wanted["F_raw"], atol=1e-6)
    scaled = papers.with_softmax(methods.ahakv(params["budget"], recent=params["recent"]), apply="scaled")
    np.testing.assert_allclose(score(bare(scaled)), wanted["F_scaled_literal"], atol=1e-6)
    plain = papers.with_rows(methods.ahakv(params["budget"], **how), softmax=None)
    np.testing.assert_allclose(score(bare(plain)), wanted["F_standard_softmax"], atol=1e-6)
    kv, ctx = cache(range(n), k=k, v=v), moment(None, n, prompt=n, phase="prefill")
    softmax = EntropyScaled(params["budget"])(inputs_of(kv, [[n - 2, n - 1]], ctx, q[:, :, -2:]))
    np.testing.assert_allclose(softmax.multiplier[0, 0], wanted["multiplier_on_scaled_logits"], atol=1e-5)
    np.testing.assert_allclose(softmax.multiplier[0, 0] / d**0.5, wanted["lambda_rows"], atol=1e-6)
    (kept,), (found,) = read_tensors(policy, q, k, v)
    prior = found / np.where(score(bare(policy)) > 0, score(bare(policy)), 1)
    np.testing.assert_allclose(prior, wanted["gamma_bar"], atol=1e-5)
    np.testing.assert_allclose(prior * max(wanted["gamma"]), wanted["gamma"], atol=1e-4)
    np.testing.assert_allclose(found, wanted["F_hat"], atol=1e-6)
    assert kept == wanted["kept"]
    without = papers.summed_by(methods.ahakv(params["budget"], **how), Faded)
    assert read_tensors(without, q, k, v)[0] == [wanted["kept_without_prior"]]


@pytest.mark.parametrize("seen", ["position", "cache"])
def test_e23_ahakv_decode_step(examples, seen):
    e, keys = examples["E23"], np.asarray(examples["E22"]["inputs"]["k"])
    wanted, at = e["expected"][f"{seen}_count"], e["inputs"]["kept_before"]
    k = numbers([*keys[at].tolist(), e["inputs"]["k_new"]])
    policy = papers.with_softmax(methods.ahakv(e["params"]["budget"], recent=e["params"]["recent"]), seen=seen)
    pos = [*at, e["inputs"]["new_position"]]
    kv = cache(pos, Tree(score=numbers([*e["inputs"]["F_before"], 0.0])), k=k, v=jnp.ones_like(k))
    ctx = moment(policy, 9, prompt=8, H=4)
    q = jnp.asarray(e["inputs"]["q_new"], jnp.float32)[None, None, None]
    (observed,) = policy.observe("decode")
    column = observed(inputs_of(kv, [[8]], ctx, q))
    row = attention(q, k, k, jnp.asarray([[8]]), kv.pos, columns=[column]).columns[0]
    np.testing.assert_allclose(row[0, 0], wanted["row"], atol=1e-6)
    np.testing.assert_allclose(column.softmax.multiplier[0, 0, 0] / 4**0.5, wanted["lambda_"], atol=1e-6)
    after = policy.update(kv, {observed: row}, ctx)
    np.testing.assert_allclose(after.memory.score[0, 0], wanted["F"], atol=1e-6)
    assert set(pos) - set(live_positions(after)[0][0]) == {wanted["evicted"]}


def test_e24_keyformer(examples):
    e, n = examples["E24"], 4
    params, kept = e["params"], e["expected"]["kept"]
    noisy = Noisy((params["tau_init"], params["tau_end"]), per="key")
    policy = methods.keyformer(params["k"], recent=params["recent"])
    at = lambda step: moment(policy, n + step, prompt=n, new=params["T"])
    tau = lambda step: 1 / float(noisy(inputs_of(cache(range(4)), [[3]], at(step))).multiplier[0, 0, 0])
    np.testing.assert_allclose([tau(step) for step in range(3)], e["expected"]["tau"], rtol=1e-6)
    (observed,) = policy.observe("prefill")
    memory, sums = Tree(score=jnp.zeros((1, 1, 4))), numbers(e["expected"]["score_prompt"])
    prompt = dataclasses.replace(at(0), phase="prefill")
    assert live_positions(policy.update(cache(range(4), memory), {observed: sums}, prompt))[0][0] == kept
    x = np.asarray(e["inputs"]["decode_logits_over_slots"])
    z = np.append(np.asarray(e["inputs"]["zeta"])[kept], e["inputs"]["zeta_new"])
    row = np.exp((x + z) / e["expected"]["tau"][1])
    row = row / row.sum()
    before = [*np.asarray(e["expected"]["score_prompt"])[kept], 0.0]
    np.testing.assert_allclose(before + row, e["expected"]["score_after_decode"], atol=1e-6)
    after = policy.update(cache([*kept, 4], Tree(score=numbers(before))), {observed: numbers(row)}, at(1))
    assert {*kept, 4} - set(live_positions(after)[0][0]) == {e["expected"]["evicted"]}


def test_e26_keyformer_budgets(examples):
    for name, row in examples["E26"]["expected"].items():
        n = np.array([int(name[1:])])
        total = resolve(0.5 if name == "n7" else 0.6, n)  # 60 % of 7 would be 4: the last row is at half the prompt
        recent = resolve(Share(0.3), n, total)
        assert (int(total[0]), int(recent[0]), int((total - recent)[0])) == (row["total"], row["recent"], row["key"])


def test_e27_fastgen(examples):
    e = examples["E27"]
    ids = lambda kind: np.flatnonzero(e["inputs"][kind]).tolist()  # those of `Tensors` are columns
    q, k, v, scale = tensors.from_probabilities(e["inputs"]["P"])
    for recovery, name in e["expected"]["chosen"].items():
        shares = {"frequent": e["params"]["r_f"], "local": e["params"]["r_l"], "recovery": float(recovery)}
        policy = methods.fastgen(ids("special"), ids("punct"), **shares)
        params = [{"q": q, "k": k, "v": v}]
        model, tokens = tensors.model_of(params, scale=scale), tensors.columns(params, q.shape[2])
        _, state = kvjax.prefill(model, params, tokens, policy=policy, max_new_tokens=0)
        chosen = STRATEGIES[int(state.layers[0].memory[2][0, 0])]
        assert chosen == {"punct": "punctuation"}.get(name.split("+")[-1], name.split("+")[-1])


# --- keys and values ---


def test_e28_key_scores(examples):
    e = examples["E28"]
    k = numbers(e["inputs"]["k"])
    for score, name in ((KeyNorm(), "knorm"), (KeyDifference(), "keydiff")):
        (kept,), (found,) = read_tensors(kvjax.Evict(score, e["params"]["keep"]), jnp.zeros((1, 1, 5, 2)), k, k)
        np.testing.assert_allclose(found, e["expected"][f"{name}_score"], atol=1e-6)
        assert kept == e["expected"][f"{name}_kept"]
    np.testing.assert_allclose(unit(k).mean(2)[0, 0], e["expected"]["anchor"], atol=1e-6)


def test_e29_lagkv(examples):
    e = examples["E29"]
    k, v, params = numbers(e["inputs"]["k"]), numbers(e["inputs"]["v"]), e["params"]
    policy = methods.lagkv(params["keep"], lag=params["lag"], sinks=params["sinks"])
    (kept,), (score,) = read_tensors(policy, jnp.zeros_like(k), k, v)
    np.testing.assert_allclose(score, e["expected"]["score"], atol=1e-6)
    assert kept == e["expected"]["kept"]
    crossed = kvjax.Evict(LagRelative(params["lag"], params["sinks"], cross=True), params["keep"])
    chunks = read_tensors(crossed, jnp.zeros_like(k), k, v)[1][0]
    np.testing.assert_allclose(chunks[1:5].reshape(2, 2), e["expected"]["chunk_scores"], atol=1e-6)


@pytest.mark.parametrize("n", slow_but([8, 4, 2], 8))
def test_lagkv_keeps_its_sinks_whatever_ties_with_them(examples, n):
    """Sinks, last partition and remainder all score 1, and the newest win ties: sinks are protected instead."""
    k, v = (numbers(examples["E29"]["inputs"][x])[:, :, :n] for x in "kv")
    kept = lambda policy: read_tensors(policy, jnp.zeros_like(k), k, v)[0][0]
    assert kept(methods.lagkv(3, lag=2, sinks=2)) == sorted({0, 1, n - 1})
    assert kept(methods.lagkv(2, lag=2, sinks=2)) == [0, 1]


@pytest.mark.slow
def test_e30_chunkkv(examples):
    e = examples["E30"]
    scores, size = jnp.asarray(e["inputs"]["scores"], jnp.float32)[None], e["params"]["chunk"]
    ratio, q = 1 - e["params"]["ratio_removed"], jnp.zeros((1, 2, 7, 4))

    def kept(share):
        policy = kvjax.from_fn(lambda kv, stats, ctx: jnp.broadcast_to(scores, kv.pos.shape), ratio)
        first, second = read_tensors(dataclasses.replace(policy, select=Chunks(size, share)), q, q, q)[0]
        assert first == second
        return first

    assert kept(ratio) == e["expected"]["kept"]
    assert sorted({j // size for j in kept(ratio)}) == e["expected"]["chunks_kept"]
    largest = int(np.argmax(e["expected"]["chunk_scores"]))  # one chunk of three is that of the largest mean
    assert {j // size for j in kept(0.34)} == {largest}


def test_e31_criticalkv(examples):
    e = examples["E31"]
    base, norms = numbers(e["inputs"]["base_score"]), np.asarray(e["inputs"]["l1_norm_of_projected_value"])
    params = e["params"]
    select = TwoStage(ProjectedValueNorm(), params["first_stage_ratio"], params["eps"])
    policy = kvjax.from_fn(lambda kv, stats, ctx: jnp.broadcast_to(base, kv.pos.shape), params["keep"])
    policy = dataclasses.replace(policy, select=select)
    v, q = numbers((norms[:, None] * [[0.5, -0.5]]).tolist()), jnp.zeros((1, 1, 5, 2))
    out_proj = jnp.asarray([[[1.0, 0.0], [0.0, -1.0]]])  # keeps L1 norms
    assert read_tensors(policy, q, q, v, out_proj=out_proj)[0] == [e["expected"]["kept"]]
    first = int(params["keep"] * params["first_stage_ratio"])
    stage1 = best(base, jnp.arange(5)[None, None], jnp.asarray([[first]]))
    assert np.flatnonzero(stage1[0, 0]).tolist() == e["expected"]["stage1"]
    second = (np.asarray(base[0, 0]) + params["eps"]) * norms
    np.testing.assert_allclose(second, e["expected"]["stage2_score"], atol=1e-6)
    with pytest.raises(ValueError, match="output projection"):
        read_tensors(policy, q, q, v)


def test_e32_think(examples):
    e = examples["E32"]
    k = numbers(e["inputs"]["k"])
    n, H = k.shape[2:]
    q = jnp.concatenate([jnp.full((n - 2, H), 9.0), jnp.asarray(e["inputs"]["q_window"], jnp.float32)])[None, None]
    policy = methods.think(e["params"]["channel_ratio"], rows=2)
    kv, ctx = cache(range(n), k=k, v=k), moment(policy, n, prompt=n, phase="prefill")
    (observed,) = policy.observe("prefill")
    stats = {observed: observed(inputs_of(kv, [list(range(n))], ctx, q))}
    weight = stats[observed] * (jnp.square(k).sum(2) / n)
    np.testing.assert_allclose(weight[0, 0], e["expected"]["channel_score"], atol=1e-6)
    stay = policy.update(kv, stats, ctx).channels[0, 0].tolist()
    assert sorted(set(range(H)) - set(stay)) == e["expected"]["dropped"]
    zeroed = parts.ZeroChannels(e["params"]["channel_ratio"], rows=2).update(kv, stats, ctx)
    assert not np.asarray(zeroed.k[..., e["expected"]["dropped"]]).any()


def test_e33_expected_attention(examples):
    e = examples["E33"]
    k = numbers(e["inputs"]["k"])
    v = numbers(e["inputs"]["v_norm"])[..., None] * jnp.asarray([[[[1.0, 0.0]]]])
    scaled = numbers(e["inputs"]["query_mean"]) * 0.5**0.5, numbers(e["inputs"]["query_cov"]) * 0.5
    score, wanted = Expected(FutureQueries()), e["expected"]
    moments, bias = score.observe("prefill")
    assert isinstance(bias, KeyBias)
    at = lambda v, bias_: slots_of(cache(range(4), k=k, v=v), moment(None, 4, prompt=4), {moments: scaled, bias: bias_})
    np.testing.assert_allclose(score(at(v, jnp.zeros((1, 1, 4))))[0, 0], wanted["score"], atol=1e-6)
    ones = jnp.ones_like(v) * 0.5**0.5
    np.testing.assert_allclose(score(at(ones, jnp.zeros((1, 1, 4))))[0, 0], wanted["probs"], atol=1e-6)
    slope = -0.5 * np.arange(3, -1, -1)
    biased = np.array(wanted["probs"]) * np.exp(slope)
    np.testing.assert_allclose(score(at(ones, numbers(slope)))[0, 0], biased / biased.sum(), atol=1e-6)


# --- counts, ties, padding, schedules ---


def test_e34_ratio_rounding(examples):
    for row in examples["E34"]["expected"]["rows"]:
        share, n = 1 - row["removed"], np.array([row["n"]])
        assert int(resolve(share, n)[0]) == row["kvjax"], row
        assert int(resolve(Truncated(share), n)[0]) == row["python_int"], row


def test_e35_of_equal_scores_the_newer_stays(examples):
    e = examples["E35"]
    score, count = numbers(e["inputs"]["score"]), e["params"]["keep"]
    kv = cache(range(score.shape[-1]))
    wanted, budgets = e["expected"]["evict_older"], jnp.full((1, 1), count, jnp.int32)
    for kept in (best(score, kv.pos, budgets), TopK()(score, budgets, slots_of(kv))):
        assert np.flatnonzero(kept[0, 0]).tolist() == wanted


def test_e36_padding(examples):
    e = examples["E36"]
    p, valid = np.asarray(e["inputs"]["P"]), np.asarray(e["inputs"]["valid"])
    pad, n = int((valid == 0).sum()), int(valid.sum())
    policy = methods.h2o(e["params"]["ratio"], recent=e["params"]["recent"])
    (kept,), (score,) = read(policy, p, lengths=[n])
    wanted = [i - pad for i in e["expected"]["kept"]]
    assert kept == wanted == keep(policy, p[pad:, pad:])
    assert len(kept) == e["expected"]["budget"]
    np.testing.assert_allclose(score[pad:], e["expected"]["column_sums"][pad:], atol=1e-6)


@pytest.mark.parametrize("positions", ["original", "rank"])
def test_e37_stored_keys(examples, positions):
    """Six equal keys of which three have been evicted when a seventh is read, as its query meets them."""
    e = examples["E37"]
    kept, n = e["inputs"]["kept_positions"], 6

    def rotate(x, pos):
        angle = e["inputs"]["theta"] * pos[..., None].astype(x.dtype)
        a, b = x[..., :1], x[..., 1:]
        return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)

    key = jnp.broadcast_to(numbers(e["inputs"]["base_key"]), (1, 1, n + 1, 2))
    chosen = jnp.isin(jnp.arange(n + 1), jnp.asarray(kept)).astype(jnp.float32)
    policy = kvjax.from_fn(lambda kv, stats, ctx: chosen[jnp.maximum(kv.pos, 0)], len(kept))
    policy = dataclasses.replace(policy, layout=Layout(positions=positions))
    kv = tensors.replay(policy, [{"q": key, "k": key, "v": key}], n, rotate=rotate).kv
    met = dict(zip(kv.pos[0, 0].tolist(), np.asarray(kv.keys(rotate))[0, 0], strict=True))
    keys = {"original": "keys_original", "rank": "keys_rerotated"}[positions]
    np.testing.assert_allclose([met[p] for p in kept], e["expected"][keys], atol=1e-6)
    following = {"original": "next_query_position_original", "rank": "next_query_position_rerotated"}[positions]
    angle = e["inputs"]["theta"] * e["expected"][following]
    np.testing.assert_allclose(met[n], [np.cos(angle), np.sin(angle)], atol=1e-6)


def occupancy(schedule, steps, *, budget, n, make=methods.window):
    """(slots that attention reads, slots left) at every decode step."""
    x = jnp.ones((1, 1, n + steps, 8))
    seen = tensors.replay(dataclasses.replace(make(budget), when=schedule), [{"q": x, "k": x, "v": x}], n, reads=True)
    return [[len(read[0][0]), len(live[0][0])] for read, live in zip(seen.read, seen.live[1:], strict=True)]


@pytest.mark.slow
def test_e39_schedules(examples):
    e = examples["E39"]
    at = lambda schedule, steps, n=e["inputs"]["n"]: occupancy(schedule, steps, budget=e["params"]["budget"], n=n)
    assert at(STEP, 4) == e["expected"]["every_step"]
    assert at(Schedule(every=3), 7) == e["expected"]["every_3"]
    assert at(Schedule(every=3), 7, n=2) == e["expected"]["every_3_short_prompt"]
    assert at(Schedule(), 3) == e["expected"]["never"]
    # As soon as the budget is exceeded by 3, whatever the step.
    assert at(Schedule(over=3), 7) == [[5, 5], [6, 6], [7, 4], [5, 5], [6, 6], [7, 4], [5, 5]]


@pytest.mark.parametrize(
    ("over", "drop", "left"), [(1, 1, 4), (1, 2, 3), (1, Share(0.75), 2), (3, 2, 4), (3, 4, 3)], ids=repr
)
def test_a_drop_is_exactly_so_many_tokens_but_never_leaves_more_than_the_budget(over, drop, left):
    """A budget of 4, a prompt of 6: what is left of 4 + `over` tokens."""
    seen = occupancy(Schedule(over=over, drop=drop), over + 1, budget=4, n=6)
    assert seen[over - 1 :] == [[4 + over, left], [left + 1, left + 1 if left < 3 + over else left]]


def test_a_drop_spares_what_is_protected():
    make = functools.partial(methods.streaming_llm, sinks=3)
    assert occupancy(Schedule(over=1, drop=4), 1, budget=4, n=6, make=make) == [[5, 3]]
