"""Numeric examples that can be checked by hand (`golden/policy_examples.json`): positions, attention, votes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.budgets import Pyramid
from kvjax.contract import Context, LayerInfo, Stats, Tree, resolve
from kvjax.decide.select import TopK
from kvjax.methods.nacl import Table4
from kvjax.methods.released import papers
from kvjax.methods.released.counts import FloorPyramid, FloorThenGlobal, HalfEven
from kvjax.methods.released.easykv import block_sizes
from kvjax.methods.released.parts import NextStepMask
from kvjax.observe import Rows
from kvjax.pallas_kernels import Columns, Logits, attention
from kvjax.scores.attention import Accumulated, SparedByDeviation, Votes, rows_since
from kvjax.storage import Layer, empty
from tests import tensors
from tests.by_hand import cache, gone, inputs_of, keep, moment, numbers, read, read_tensors, slots_of, uniform_rows
from tests.marks import slow_but
from tests.tensors import live_positions

# --- positions ---


@pytest.mark.slow
def test_e01_position_only(examples):
    e = examples["E01"]
    n, budget, dilation = e["inputs"]["n"], e["params"]["budget"], e["params"]["dilation"]
    p = uniform_rows(n)
    assert keep(methods.full(), p) == e["expected"]["full"]
    assert keep(methods.window(budget), p) == e["expected"]["window"]
    assert keep(methods.streaming_llm(budget, sinks=e["params"]["sinks"]), p) == e["expected"]["streaming"]
    assert keep(papers.dilated_window_anchored(budget, dilation=dilation), p) == e["expected"]["dilated_anchored"]
    physical = (budget - 1) * (dilation + 1) + 1
    policy = methods.dilated_window(physical, dilation=dilation)
    assert keep(policy, p) == list(range(n - physical, n))
    for length, name in ((n, "dilated_mask"), (n + 1, "dilated_mask_next_step")):
        kv, ctx = cache(range(length - physical, length)), moment(policy, length, prompt=n)
        shown = policy.reads(kv, inputs_of(kv, [[length - 1]], ctx), ctx).visible
        assert kv.pos[0, 0][shown[0, 0]].tolist() == e["expected"][name]
    uniforms = jnp.asarray(e["inputs"]["uniforms"])
    given = kvjax.from_fn(lambda kv, stats, ctx: jnp.broadcast_to(uniforms, kv.pos.shape), budget)
    assert keep(given, p) == e["expected"]["random"]
    protected = dataclasses.replace(given, recent=methods.random(budget).recent)
    assert keep(protected, p) == e["expected"]["random_protect_last1"]


GRIDS = [(3, [0, 1, 2]), (6, [0, 3, 4, 5]), (9, [0, 3, 6, 8]), (12, [3, 6, 9, 11])]


@pytest.mark.parametrize(("n", "wanted"), slow_but(GRIDS, *GRIDS[2:]))
def test_a_dilated_window_is_filled_until_its_grid_has_enough(n, wanted):
    assert keep(papers.dilated_window_anchored(4, dilation=2), uniform_rows(n)) == wanted


# --- accumulated attention ---


def test_e02_h2o_prompt(examples):
    e = examples["E02"]
    p, (heavy, recent) = e["inputs"]["P"], (e["params"]["heavy"], e["params"]["recent"])
    (kept,), (score,) = read(methods.h2o(heavy + recent, recent=recent), p)
    np.testing.assert_allclose(score, e["expected"]["column_sums"], atol=1e-6)
    assert kept == e["expected"]["kept"]
    assert keep(methods.h2o(heavy + recent), p) == e["expected"]["kept"]  # half and half is the default
    assert keep(methods.key_attention(heavy + recent), p) == e["expected"]["key_only_kept"]


def test_e03_h2o_decode_step(examples):
    e = examples["E03"]
    policy = methods.h2o(e["params"]["heavy"] + e["params"]["recent"], recent=e["params"]["recent"])
    pos = [*e["inputs"]["kept_before"], e["inputs"]["new_position"]]
    kv = cache(pos, Tree(score=numbers([*e["inputs"]["acc_before"], 0.0])))
    after = policy.update(kv, Stats({Rows(): numbers(e["inputs"]["row_over_slots"])}), moment(policy, 7, prompt=6))
    np.testing.assert_allclose(after.memory.score[0, 0], e["expected"]["acc_after"], atol=1e-6)
    assert live_positions(after)[0][0] == e["expected"]["kept_after"]
    assert set(pos) - set(e["expected"]["kept_after"]) == {e["expected"]["evicted"]}


def test_e04_the_mask_with_one_slot_too_many(examples):
    e = examples["E04"]
    sums = e["inputs"]["column_sums"]
    n = len(sums)
    kv = cache(range(n + 1), (numbers([*sums, 0.0]), jnp.zeros((1, 1, n + 1), bool)))

    def shown(recent):
        policy = NextStepMask(e["params"]["heavy"], recent)
        ctx = moment(policy, n + 1, prompt=n)
        return np.flatnonzero(policy.reads(kv, inputs_of(kv, [[n]], ctx), ctx).visible[0, 0]).tolist()

    visible = shown(e["params"]["recent"])
    assert visible == e["expected"]["visible_to_next_step"]
    assert e["expected"]["always_lost"] not in visible
    assert shown(0) == e["expected"]["with_recent_zero"]


@pytest.mark.slow
def test_e05_stepwise_mask(examples):
    e = examples["E05"]
    p, (heavy, recent) = np.asarray(e["inputs"]["P"]), (e["params"]["heavy"], e["params"]["recent"])
    policy = papers.h2o_stepwise_mask(heavy + recent, recent=recent)
    (observed,) = policy.observe("prefill")
    info, rows = LayerInfo(0, 1, 1, 1, 8, len(p), 16), []
    kv = empty(info, policy, 1, jnp.float32)
    for t in range(len(p)):
        new = jnp.zeros((1, 1, 1, 8))
        kv = kv.append(new, new, jnp.asarray([[t]], jnp.int32))
        ctx = dataclasses.replace(moment(policy, t + 1, prompt=len(p)), phase="prefill")
        shown = policy.reads(kv, inputs_of(kv, [[t]], ctx), ctx).visible
        rows.append(np.pad(np.asarray(shown[0, 0], int), (0, len(p) - t - 1)).tolist())
        kv = policy.update(kv, Stats({observed: numbers(p[t, : t + 1])}), ctx)
    assert rows == e["expected"]["mask"]


def test_e06_above_average_counts(examples):
    e = examples["E06"]
    policy = methods.aqas(e["params"]["budget"], recent=e["params"]["recent"])
    np.testing.assert_array_equal(read(policy, e["inputs"]["P"])[1][0], e["expected"]["counts"])
    assert gone(policy, e["inputs"]["P"]) == e["expected"]["evicted_tie_evict_older"]


def test_e07_scissorhands(examples):
    e = examples["E07"]
    p = np.asarray(e["inputs"]["P"])
    options = {"history": e["params"]["history"], "recent": e["params"]["recent"], "drop": 0}
    score = read(methods.scissorhands(len(p) - 1, **options), p)[1][0]
    np.testing.assert_array_equal(score, e["expected"]["counts_in_history"])
    assert keep(methods.scissorhands(len(p) - 2, **options), p) == e["expected"]["kept"]
    # The same history one row at a time: a cache of 5 that gets its 6th token drops 2 at once.
    policy = methods.scissorhands(5, history=3, recent=2, drop=e["params"]["drop"])
    q, k, v, scale = tensors.from_probabilities(p)
    seen = tensors.replay(policy, [{"q": q, "k": k, "v": v}], 5, scale=scale)
    assert seen.live[1][0][0] == e["expected"]["kept"]


def test_e08_tova(examples):
    e = examples["E08"]
    rows = np.stack([uniform_rows(6)] * 2)
    rows[:, -1] = e["inputs"]["last_row_per_head"]
    # One kv head for every query head; the layer's mean is taken over all of them.
    q, k, v, scale = tensors.from_probabilities(rows)
    arrays, budget = (q, *(jnp.concatenate([x, x], axis=1) for x in (k, v))), e["params"]["budget"]
    policy = methods.tova(budget)
    kept, score = read_tensors(policy, *arrays, scale=scale)
    np.testing.assert_allclose(score[0], e["expected"]["mean_row"], atol=1e-6)
    assert kept == [e["expected"]["kept_all_heads_mean"]] * 2
    assert read_tensors(papers.tova_by_head(budget), *arrays, scale=scale)[0] == e["expected"]["kept_per_head"]
    forced = read_tensors(dataclasses.replace(policy, recent=1), *arrays, scale=scale)[0]
    assert forced[0] == e["expected"]["kept_mean_force_last"]


def test_e09_mean_attention(examples):
    e = examples["E09"]
    score = lambda policy: read(policy, e["inputs"]["P"])[1][0]
    np.testing.assert_allclose(score(methods.mas(6)), e["expected"]["mean_including_self_row"], atol=1e-6)
    without = score(papers.with_score(methods.mas(6), count_self=False))
    np.testing.assert_allclose(without[:-1], e["expected"]["mean_excluding_self_row"][:-1], atol=1e-6)
    assert without[-1] > 1e37, "the newest token has no mean, and stays"
    assert e["expected"]["mean_excluding_self_row"][-1] is None


def test_e10_roco(examples):
    e = examples["E10"]
    p, budget = e["inputs"]["P"], e["params"]["budget"]
    make = lambda r, last, budget=budget: dataclasses.replace(methods.roco(budget, scope=r), recent=last)
    np.testing.assert_allclose(read(make(0, 0), p)[1][0], e["expected"]["mean"], atol=1e-6)
    assert [gone(make(0, 0), p)] == e["expected"]["evicted_r0"]
    assert [gone(make(2, 0), p)] == e["expected"]["evicted_r2"]
    assert [gone(make(2, 2), p)] == e["expected"]["evicted_r2_protect_last2"]
    assert [gone(make(4, 2), p)] == e["expected"]["evicted_r4_protect_last2"]
    assert gone(make(2, 2, budget - 1), p) == e["expected"]["evicted_two_r2_protect_last2"]
    q, k, v, scale = tensors.from_probabilities(p)
    pos, columns = jnp.arange(6, dtype=jnp.int32), [Columns(), Columns(element="p2")]
    sums, squares = attention(q, k, v, pos[None], pos[None, None], columns=columns, logits=Logits(scale)).columns
    np.testing.assert_allclose(sums[0, 0], e["expected"]["acc"], atol=1e-6)
    np.testing.assert_allclose(squares[0, 0], e["expected"]["acc_sq"], atol=1e-6)
    slots = slots_of(cache(range(6)), moment(None, 6, prompt=6))
    assert rows_since(slots)[0, 0].tolist() == e["expected"]["count"]
    ranks = np.argsort(e["expected"]["std"])[::-1]
    for size in (1, 3):  # those of the largest deviation are spared
        own = dataclasses.replace(slots, memory=(sums, squares), hparams=Tree(size=jnp.asarray([size])))
        spared = np.isposinf(SparedByDeviation(size=size)(own)[0, 0])
        assert set(np.flatnonzero(spared)) == set(ranks[:size])


def test_e12_block_sizes(examples):
    for row in examples["E12"]["expected"]["rows"]:
        sizes = block_sizes(row["length"], row["budget"], row["stride"], row["mode"])
        wanted = (row["nominal"], row["padded"], row["final_cache"], row["dense_prefix"])
        assert dataclasses.astuple(sizes) == wanted, row


# --- NaCl ---


def test_e14_nacl_shares(examples):
    n, expected = np.array([1000]), examples["E14"]["expected"]
    for percent, row in expected["table4"].items():
        budget = int(percent) / 100
        share = lambda which, budget=budget: int(Table4(which, budget)(n, n)[0])
        assert share("recent") == row["protected_proxies"]
        assert share("proxies") == row["protected_proxies"] + row["scoring_only_proxies"]
        assert share("random") == row["random_keep"]
        assert int(resolve(budget, n)[0]) == row["kept_total"]
        assert row["kept_total"] - share("recent") - share("random") == row["proxy_keep"]
    policy = papers.nacl_llama3()
    for name, length in (("n131072", 131072), ("n4096", 4096)):
        code, n = expected[f"code_defaults_{name}"], np.array([length])
        budget = resolve(policy.budget, n)
        assert int(resolve(policy.sinks, n, budget)[0]) == code["sinks"]
        assert int(resolve(policy.recent, n, budget)[0]) == max(code["recent"], 0)
        assert int(resolve(policy.select.random, n, budget)[0]) == code["random_keep"]
        # The code truncates four shares; here their sum is exact, a token or two more.
        assert 0 <= int(budget[0]) - code["kept_total"] <= 2
    assert not expected["code_defaults_n4096"]["usable"]


@pytest.mark.parametrize(
    ("percent", "protect", "scoring", "random"),
    [(5, 0.5, 1.5, 3.5), (10, 1, 3, 7), (15, 1.5, 10.5, 9.5), (20, 2, 18, 12), (25, 1.75, 19, 15), (30, 1.5, 20, 18)],
)
def test_nacl_shares_are_of_the_prompt_at_every_length(percent, protect, scoring, random):
    """Each is rounded once, in exact numbers: 20 % of 1,001 tokens are 200 scoring rows, not 20 % of 199.8."""
    n = np.arange(3000)
    floor = lambda share: n * round(share * 100) // 10000
    of = lambda which: Table4(which, percent / 100)(n, n)
    np.testing.assert_array_equal(of("recent"), floor(protect))
    np.testing.assert_array_equal(of("proxies"), np.maximum(floor(protect + scoring), 1))
    np.testing.assert_array_equal(of("random"), floor(random))
    tokens = np.full_like(n, 1000)
    assert (Table4("proxies", 200)(tokens, tokens) == 200).all()


def test_e15_nacl_selection(examples, monkeypatch):
    e = examples["E15"]
    rows, params = np.asarray(e["inputs"]["P_rows"]), e["params"]
    n = rows.shape[1]
    p = uniform_rows(n)
    p[e["inputs"]["proxy_rows"]] = rows
    uniforms = np.full(n, 0.5)
    for position, u in e["inputs"]["uniforms_by_position"].items():
        uniforms[int(position)] = u
    draw = lambda self, pos, shared=False: jnp.broadcast_to(jnp.asarray(uniforms, jnp.float32), pos.shape)
    monkeypatch.setattr(Context, "uniform", draw)
    budget = params["sinks"] + params["recent"] + params["proxy_keep"] + params["random_keep"]
    policy = methods.nacl(budget, recent=params["recent"], proxies=len(rows), random=params["random_keep"])
    policy = dataclasses.replace(policy, sinks=params["sinks"])
    (kept,), (score,) = read(policy, p)
    np.testing.assert_allclose(score, e["expected"]["column_sums"], atol=1e-6)
    assert kept == e["expected"]["kept"]
    proxies = keep(dataclasses.replace(policy, budget=budget - 1, select=TopK()), p)
    protected = {*range(params["sinks"]), *range(n - params["recent"], n)}
    assert sorted(set(proxies) - protected) == e["expected"]["proxy_kept"]
    assert sorted(set(kept) - set(proxies)) == e["expected"]["random_kept"]

    # A draw of one follows the probabilities: over many draws, to four deviations.
    draws = 40000
    u = jnp.asarray(np.random.default_rng(0).random((draws, n)), jnp.float32)[:, None]
    monkeypatch.setattr(Context, "uniform", lambda *_, **__: u)
    pool = np.isin(np.arange(n), e["expected"]["random_pool"])
    wide = lambda x: jnp.broadcast_to(jnp.asarray(x), (draws, 1, n))
    kv = Layer(*[jnp.zeros((draws, 1, n, 1))] * 2, wide(jnp.arange(n, dtype=jnp.int32)), jnp.zeros((draws, 1), bool))
    slots = slots_of(kv, moment(None, n, prompt=n), protected=wide(~pool), hparams=Tree(random=jnp.ones(draws, int)))
    free = np.full((draws, 1), (~pool).sum() + 1, np.int32)
    drawn = np.asarray(policy.select(wide(score), jnp.asarray(free), slots))[:, 0] & pool
    assert (drawn.sum(-1) == 1).all()
    wanted = np.asarray(e["expected"]["random_probs"])
    assert (np.abs(drawn.mean(0)[pool] - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / draws)).all()


# --- votes ---


def test_e17_snapkv(examples):
    e = examples["E17"]
    rows = np.asarray(e["inputs"]["window_rows_two_heads"])
    p = np.stack([uniform_rows(rows.shape[-1])] * 2)
    p[:, -2:] = rows
    n, wanted = p.shape[-1], e["expected"]
    budget, window = e["params"]["capacity"], e["params"]["window"]
    sizes = {"window": window, "kernel": e["params"]["kernel"]}
    q, k, v, scale = tensors.from_probabilities(p)
    average = methods.snapkv(budget, pooling="avg", **sizes)
    snapkv, valid = (
        methods.snapkv(budget, **sizes),
        papers.with_score(methods.snapkv(budget, **sizes, pooling="avg"), pad="valid"),
    )

    def of_head(i, policy):
        (kept,), (score,) = read_tensors(policy, q[:, i : i + 1], k, v, scale=scale)
        return kept, score[: n - window] * window  # votes are means here, sums there

    np.testing.assert_allclose(of_head(0, snapkv)[1], wanted["pooled_max"][0], atol=1e-6)
    for i in (0, 1):
        votes = of_head(i, dataclasses.replace(snapkv, score=Votes(window)))[1]
        np.testing.assert_allclose(votes, wanted["votes_sum"][i], atol=1e-6)
        np.testing.assert_allclose(votes / window, wanted["votes_mean"][i], atol=1e-6)
        np.testing.assert_allclose(of_head(i, average)[1], wanted["pooled_avg"][i], atol=1e-5)
        np.testing.assert_allclose(of_head(i, valid)[1], wanted["pooled_avg_valid"][i], atol=1e-5)
        assert of_head(i, snapkv)[0] == wanted["kept_per_query_head_max"][i]
    for group in ("mean", "max", "sum"):
        assert keep(papers.grouped(snapkv, group), p) == wanted[f"kept_kv_head_{group}_then_maxpool"]
    assert keep(papers.snapkv_text(budget, outside=False, **sizes), p) == wanted["kept_pool_before_row_mean"]
    assert keep(average, p) == wanted["kept_kv_head_avgpool_mean"]
    assert keep(valid, p) == wanted["kept_kv_head_avgpool_valid_mean"]


def test_e18_pyramids(examples):
    e = examples["E18"]
    n, window = np.array([4000 - e["params"]["window"]]), np.array([e["params"]["window"]])
    average = e["params"]["capacity"] - window
    layers = lambda divide: divide(average, n, e["params"]["layers"], window)[0]
    paper = layers(Pyramid(e["params"]["beta"]))
    assert paper.sum() == e["expected"]["paper_sum"]
    assert [paper[0], paper[-1]] == e["expected"]["paper_without_window_first_last"]
    assert (paper + window).tolist() == e["expected"]["kvjax_exact"]
    code = layers(FloorPyramid(e["params"]["beta"]))
    assert (code + window).tolist() == e["expected"]["code_n4000"]
    assert code.sum() == e["expected"]["code_sum_minus_windows"]


def bare_layer(pos):
    return Layer(*[jnp.zeros((*pos.shape, 8))] * 2, pos, jnp.zeros(pos.shape[:2], bool))


def test_e19_e20_shares_of_heads(examples):
    e = examples["E19"]
    score = jnp.asarray(e["inputs"]["A"], jnp.float32)[None]
    pos = jnp.broadcast_to(jnp.arange(score.shape[-1], dtype=jnp.int32), score.shape)
    kv, base = bare_layer(pos), jnp.asarray([e["params"]["base_per_head"]])
    own = Tree(safe=jnp.asarray([1]), budget=base)
    shares = lambda heads: heads(score, base, slots_of(kv, moment(None, 5, prompt=5), hparams=own))[0].tolist()
    assert shares(kvjax.Adaptive(1.0)) == e["expected"]["raw"]
    assert shares(kvjax.Adaptive(0.5)) == e["expected"]["kvjax_alpha0_5_exact"]
    assert shares(HalfEven(1 - 0.2)) == e["expected"]["code_floor0_2"]
    assert shares(FloorThenGlobal(0.5)) == e["expected"]["kvpress_alpha0_5"]
    assert shares(kvjax.Adaptive(0.0)) == e["expected"]["uniform"]
    e, floor = examples["E20"], examples["E20"]["params"]["floor"]
    score = np.zeros((1, 3, 30), np.float32)
    for g, count in enumerate(e["inputs"]["raw"]):  # so many of the best 30 belong to head g
        score[0, g, :count] = 1 + np.arange(count) / 100
    pos = jnp.broadcast_to(jnp.arange(30, dtype=jnp.int32), score.shape)
    kv, score, base = bare_layer(pos), jnp.asarray(score), jnp.asarray([10])
    slots = slots_of(kv, moment(None, 30, prompt=30))
    assert HalfEven(1 - floor)(score, base, slots)[0].tolist() == e["expected"]["rounded_half_even"]
    assert kvjax.Adaptive(1 - floor)(score, base, slots)[0].tolist() == e["expected"]["kvjax_exact"]


@pytest.mark.parametrize(("threshold", "kept"), [(0.6, [0, 4, 5]), (0.7, [0, 1, 2, 3, 4, 5]), (1.0, list(range(6)))])
def test_a_lazy_layer_keeps_its_ends(threshold, kept):
    """The last row gives the first token and the last two 0.65 of its attention."""
    p = uniform_rows(6)
    p[-1] = [0.3, 0.15, 0.1, 0.1, 0.15, 0.2]
    policy = methods.simlayerkv(threshold, sinks=1, recent=2)
    assert keep(policy, p) == kept
    if threshold == 0.7:
        assert keep(dataclasses.replace(policy, budget=4), p) == [0, 1, 4, 5]


@pytest.mark.slow
def test_layers_that_compete_keep_short_prompts_whole():
    """Half of 11 tokens does not hold a window of 6, nor does twice that hold all 11."""
    q, k, v = tensors.qkv(0, B=1, T=11)
    policy = methods.layer_defensivekv(0.5, window=6)
    layers, _ = tensors.evicted(policy, [{"q": q, "k": k, "v": v, "out_proj": jnp.ones((4, 8, 8))}] * 2)
    assert [kv.num_live[0].tolist() for kv in layers] == [[11, 11]] * 2


@pytest.mark.slow
def test_e38_limits_in_which_one_method_is_another(examples):
    """Of a padded batch."""
    sized = {"window": 4, "kernel": 3}
    ahakv = papers.with_rows(methods.ahakv(10, recent=4), softmax=None)
    snapkv = methods.snapkv(10, window=4, kernel=1)
    rows = {"recent": 0, "random": 0}
    pairs = {
        "nacl_all_rows_is_h2o": (methods.nacl(10, proxies=1.0, **rows), methods.h2o(10, recent=0)),
        "nacl_last_row_is_tova": (methods.nacl(10, proxies=1, **rows), papers.tova_by_head(10)),
        "snapkv_kernel1_is_window_sum": (snapkv, kvjax.Evict(Accumulated(Rows(4)), 10, recent=4)),
        "ahakv_reduces_to_snapkv_order": (dataclasses.replace(ahakv, score=Accumulated(ahakv.score.of)), snapkv),
        "pyramid_beta1_is_uniform": (methods.pyramidkv(10, beta=1.0, **sized), methods.snapkv(10, **sized)),
        "keyformer_no_noise_tau1_is_h2o": (
            papers.with_softmax(methods.keyformer(10, tau=(1.0, 1.0), recent=5), noise="none"),
            methods.h2o(10),
        ),
    }
    assert examples["E38"]["expected"] == dict.fromkeys(pairs, True)
    arrays = tensors.qkv(11)
    for one, other in pairs.values():
        found, wanted = (kvjax.evict_layer(p, *arrays, lengths=[24, 17], layer=1, num_layers=3) for p in (one, other))
        assert live_positions(found) == live_positions(wanted)
        assert one != other
