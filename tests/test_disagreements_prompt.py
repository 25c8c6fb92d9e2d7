"""Where papers and released code disagree, D-15 to D-26, D-39, D-41 to D-45 and D-49: NaCl, SnapKV, Ada-KV, PyramidKV.

The setting is that of `test_disagreements.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.budgets import Pyramid
from kvjax.contract import LayerInfo, Slots, resolve
from kvjax.methods import kvpress, variants
from kvjax.methods.counts import FloorPyramid, InclusivePyramid, Normalized, Truncated
from kvjax.storage import Layer
from tests import tensors
from tests.one_layer import (
    BUDGET,
    IN_PROMPT,
    PROMPT,
    H,
    K,
    M,
    N,
    P,
    differs,
    history,
    layer,
    moment,
    prompt_kept,
    prompt_score,
)
from tests.references.policies import best, keep, pool, replay


def differs_at_prompt(policy, default, plain):
    assert prompt_kept(policy) == plain
    assert prompt_kept(default) != plain


def after_window(votes, budget, window):
    """What the votes "K n" of a window keep."""
    return [keep(s, range(PROMPT), PROMPT, budget, recent=window) for s in votes]


# --- NaCl ---


@pytest.mark.exhaustive
@pytest.mark.parametrize("distribution", ["softmax", "normalised", "uniform"])
def test_d15_the_random_stage_draws_from_what_is_left(distribution):
    params = {"recent": 2, "proxies": 4, "random": 3, "temperature": 0.5, "by": distribution}
    score = layer.group(P[:, -4:].sum(1))
    keys = jax.random.split(jax.random.key(1), 1)
    pos = jnp.broadcast_to(jnp.arange(PROMPT, dtype=jnp.int32), (1, K, PROMPT))
    u = np.asarray(moment(keys).uniform(pos), np.float64)[0]
    log_p = {"softmax": score, "normalised": np.log(np.maximum(score, 1e-30)), "uniform": 0 * score}[distribution]
    gumbel = log_p / 0.5 - np.log(-np.log(u))
    wanted = {"rest": [], "all": []}
    for g in range(K):
        window = {PROMPT - 2, PROMPT - 1}
        others = set(range(PROMPT)) - window
        first = set(best(score[g], BUDGET - 2 - 3, others))
        wanted["rest"].append(sorted(window | first | set(best(gumbel[g], 3, others - first))))
        wanted["all"].append(sorted(window | first | set(best(gumbel[g], 3, others))))
    for which, kept in wanted.items():
        policy = variants.nacl_drawn(BUDGET, among=which, **params)
        assert tensors.live_positions(tensors.evicted(policy, IN_PROMPT, key=keys)[0][0])[0] == kept
    assert wanted["rest"] != wanted["all"]
    assert any(len(x) < BUDGET for x in wanted["all"])
    assert all(len(x) == BUDGET for x in wanted["rest"])


def test_proxies_at_both_ends():
    """Where nobody knows where the question stands."""
    policy = variants.nacl_both_ends(BUDGET, recent=1, proxies=4, random=0, begin=3)
    votes = layer.group(P[:, [0, 1, 2, *range(PROMPT - 4, PROMPT)]].sum(1))
    np.testing.assert_allclose(prompt_score(policy), votes, atol=1e-5)
    assert prompt_kept(policy) == after_window(votes, BUDGET, 1)


@pytest.mark.parametrize("rows", [pytest.param("row", marks=pytest.mark.exhaustive), "interval"])
def test_d16_eviction_while_generating(rows):
    every, protect, how = 2, 2, {"recent": 2, "proxies": 3, "random": 0}
    total, seen = np.zeros((K, M)), []

    def step(i, p, live):
        nonlocal total
        t = i - PROMPT + 1
        seen.append(layer.group(p))
        if t == 0:
            total = sum(seen[-3:])
        elif t > 0:
            total = sum(seen[-1 - (t - 1) % every :]) if rows == "interval" else seen[-1]
        due = t >= 0 and t % every == 0
        return [keep(total[g], live[g], i + 1, BUDGET, recent=protect) if due else live[g] for g in range(K)]

    plain = replay(layer, PROMPT, step)
    default = methods.nacl(BUDGET, **how)
    proxies_are = "newest" if rows == "row" else "all"
    differs(variants.nacl_decoding(BUDGET, every=every, proxies_are=proxies_are, **how), default, plain)
    grown = [len(x) for step in history(default) for x in step]
    assert grown == [BUDGET + t for t in range(M - PROMPT + 1) for _ in range(K)]


def test_d17_the_shares_of_the_released_code():
    n = np.array([131_072, 40_000, 2_049])
    policy, table = variants.nacl_llama3(), methods.nacl(0.2)
    tokens = lambda count, budget=None: resolve(count, n, budget).tolist()
    budget = resolve(policy.budget, n)
    assert tokens(policy.sinks) == [256] * 3
    assert tokens(policy.recent, budget) == [max(int(0.01 * x) - 256, 0) for x in n]
    assert tokens(policy.score.of.last) == [int(0.01 * x) for x in n]
    assert tokens(policy.select.random, budget) == [int(0.07 * x + 1e-9) for x in n]
    assert resolve(table.recent, np.array([1000]), np.array([200])).tolist() == [20]


def test_d18_proxies_that_see_later_proxies():
    sees = {True: lambda i: range(i + 1), False: lambda i: range(PROMPT)}
    how, votes = {"recent": 1, "proxies": 5, "random": 0}, {}
    make = {True: methods.nacl(BUDGET, **how), False: variants.nacl_non_causal(BUDGET, **how)}
    for causal, visible in sees.items():
        votes[causal] = sum(layer.group(layer.rows(i, [visible(i)] * K)) for i in range(PROMPT - 5, PROMPT))[:, :PROMPT]
        np.testing.assert_allclose(prompt_score(make[causal]), votes[causal], atol=1e-5)
        assert prompt_kept(make[causal]) == after_window(votes[causal], BUDGET, 1)
    assert np.abs(votes[True] - votes[False]).max() > 0.1


def test_d19_a_kv_head_judged_by_the_query_head_of_its_number():
    how, votes = {"recent": 1, "proxies": 5, "random": 0}, P[:, -5:].sum(1)
    policy = methods.nacl(BUDGET, **how)
    assert prompt_kept(policy) == after_window(layer.group(votes), BUDGET, 1)
    assert prompt_kept(variants.grouped(policy, "max")) == after_window(layer.group(votes, np.max), BUDGET, 1)
    by_index = after_window(votes[:K], BUDGET, 1)
    assert prompt_kept(variants.nacl_headbug(BUDGET, **how)) == by_index != prompt_kept(policy)


# --- SnapKV, Ada-KV, PyramidKV ---

WINDOW = 3
VOTES = P[:, -WINDOW:, : PROMPT - WINDOW]
SIZES = {"window": WINDOW, "kernel": 3}
snapkv = functools.partial(methods.snapkv, BUDGET, **SIZES)
ada_snapkv = functools.partial(methods.ada_snapkv, BUDGET, **SIZES)


def pooled(votes, kernel=3, kind="max", **kwargs):
    return np.stack([pool(x, kernel, kind, **kwargs) for x in votes])


def from_scores(scores, budgets=(BUDGET - WINDOW,) * K):
    window = range(PROMPT - WINDOW, PROMPT)
    return [sorted([*best(s, b, range(len(s))), *window]) for s, b in zip(scores, budgets, strict=True)]


def won(scores, total):
    """How many of a layer's best scores belong to each head."""
    pairs = sorted(((s, g) for g in range(len(scores)) for s in scores[g]), reverse=True)[:total]
    return np.bincount([g for _, g in pairs], minlength=len(scores))


def exact(shares):
    whole = np.floor(shares + 1e-9).astype(int)
    for g in np.argsort(-(shares - whole), kind="stable")[: round(shares.sum()) - whole.sum()]:
        whole[g] += 1
    return whole.tolist()


SCORES = pooled(layer.group(VOTES.sum(1)))
BASE = BUDGET - WINDOW


@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_d20_alpha_weighs_the_adaptive_part(alpha):
    """`floor_alpha` of the released code is 1 - alpha: 0.5, or 0.2 from its command line."""
    blended = exact(alpha * won(SCORES, K * BASE) + (1 - alpha) * BASE)
    assert prompt_kept(ada_snapkv(alpha=alpha)) == from_scores(SCORES, blended)
    assert ada_snapkv() == ada_snapkv(alpha=0.5)
    assert prompt_kept(ada_snapkv(alpha=0.8)) != prompt_kept(ada_snapkv())


def test_d21_every_head_rounded_for_itself():
    floor = 0.2
    code = [round(float(b * (1 - floor) + int(BASE * floor))) for b in won(SCORES, K * BASE)]
    assert sum(code) != K * BASE, "a total that does not drift tests nothing"
    default = ada_snapkv(alpha=1 - floor)
    differs_at_prompt(variants.ada_released(BUDGET, floor=floor, **SIZES), default, from_scores(SCORES, code))
    assert sum(len(tokens) for tokens in prompt_kept(default)) == K * BUDGET


def test_d22_floor_then_global():
    """Each head's best `int(alpha B)` are safe, the window among them; then the layer's best."""
    alpha = 0.7
    safe = max(int(alpha * BUDGET) - WINDOW, 0)
    left = [np.sort(s)[::-1][safe:] for s in SCORES]
    budgets = [safe + int(x) for x in won(left, K * (BASE - safe))]
    differs_at_prompt(kvpress.kvpress_adakv(snapkv(), alpha=alpha), ada_snapkv(alpha=0.3), from_scores(SCORES, budgets))


def test_d23_pooling_before_rows_are_added():
    rows = np.stack([pooled(VOTES[:, r]) for r in range(WINDOW)]).sum(0)
    text = variants.snapkv_text(BUDGET, outside=False, **SIZES)
    differs_at_prompt(text, snapkv(), from_scores(layer.group(rows)))
    own = won(layer.group(rows), K * BASE)
    budgets = exact(0.5 * own + 0.5 * BASE)
    assert prompt_kept(dataclasses.replace(text, heads=kvjax.Adaptive(0.5))) == from_scores(layer.group(rows), budgets)


def test_d24_softmax_over_keys_outside_the_window():
    outside = [range(PROMPT - WINDOW)] * K
    votes = sum(layer.rows(i, outside) for i in range(PROMPT - WINDOW, PROMPT))[:, : PROMPT - WINDOW]
    plain = pooled(layer.group(votes))
    policy = variants.snapkv_outside_window(BUDGET, **SIZES)
    np.testing.assert_allclose(prompt_score(policy)[:, :-WINDOW] * WINDOW, plain, atol=1e-5)
    assert prompt_kept(policy) == from_scores(plain)
    assert np.abs(prompt_score(snapkv())[:, :-WINDOW] * WINDOW - plain).max() > 0.01


def test_d25_every_prompt_has_its_own_pyramid():
    policy = methods.ada_pyramid(0.5, beta=4, window=2)
    infos = [LayerInfo(i, 3, 4, 2, 8, 40, 0) for i in range(3)]
    own = np.array([policy.sizes(info, np.array([40, 20])).hparams.budget for info in infos])
    outside = np.array([2])
    assert own[:, 0].tolist() == [2 + x for x in Pyramid(4)(np.array([18]), np.array([38]), 3, outside)[0]]
    assert own[:, 1].tolist() == [2 + x for x in Pyramid(4)(np.array([8]), np.array([18]), 3, outside)[0]]


def test_d26_normalized_scores_compete():
    mass = np.array([np.sort(s)[::-1][:BASE].sum() / s.sum() for s in SCORES])
    raw, scaled = won(SCORES, K * BASE), won(SCORES * mass[:, None], K * BASE)
    default = ada_snapkv(alpha=1.0)
    differs_at_prompt(variants.ada_normalized(BUDGET, alpha=1.0, **SIZES), default, from_scores(SCORES, scaled))
    assert prompt_kept(default) == from_scores(SCORES, raw)
    sharp = jnp.asarray([[[0.45, 0.45, 0.15, 0.03, 0.02], [0.25] * 5]])
    pos = jnp.broadcast_to(jnp.arange(5), sharp.shape)
    every = jnp.ones(pos.shape, bool)
    zeros = jnp.zeros((*pos.shape, 8))
    slots = Slots(Layer(zeros, zeros, pos), {}, moment(), every, ~every)
    shares = lambda heads: heads(sharp, jnp.asarray([2]), slots).tolist()
    assert shares(kvjax.Adaptive(1.0)) == [[2, 2]]
    assert shares(Normalized(kvjax.Adaptive(1.0))) == [[3, 1]]


def test_d39_sets_of_query_heads_and_group_reductions():
    apart = pooled(VOTES.sum(1))
    assert prompt_kept(variants.by_query_head(snapkv())) == from_scores(apart, (BASE,) * N)
    assert len(prompt_kept(snapkv())) == K
    for group, reduce in (("mean", np.mean), ("max", np.max), ("sum", np.sum)):
        assert prompt_kept(variants.grouped(snapkv(), group)) == from_scores(pooled(layer.group(VOTES.sum(1), reduce)))


def test_d41_d42_integer_pyramids():
    at = lambda divide, b, n, layers, w=8: divide(np.array([b]), np.array([n - w]), layers, np.array([w]))[0]
    assert at(Pyramid(20), 120, 4096, 32).sum() == 32 * 120 == 3840
    assert at(FloorPyramid(20), 120, 4096, 32).sum() == 4016
    assert variants.pyramidkv_factory(128).layers == FloorPyramid(20.0)
    assert methods.pyramidkv(128).layers == Pyramid(20.0)
    # Shorter than twice the budget: uniform, a flatter integer pyramid, or what the first layers cannot use moves down.
    short = 200
    assert set(at(FloorPyramid(20), 120, short, 32).tolist()) == {120}
    flat = at(FloorPyramid(20, uniform=False), 120, short, 32)
    assert (flat[0], flat[-1]) == (192, 192 - 31 * ((192 - 48) // 31))
    one = at(Pyramid(20), 120, short, 32)
    assert one.sum() == 32 * 120
    assert one.max() == 192
    assert (one >= np.minimum(at(Pyramid(20), 120, 4096, 32), 192)).all()


def test_d43_a_window_inside_the_pyramid():
    sizes = np.array([40]), np.array([992]), 3, np.array([8])
    inside = InclusivePyramid(4.0)(*sizes)[0] + 8
    assert inside.tolist() == [round(x) for x in (2 * 48 - 12, 48, 12)]
    on_top = Pyramid(4.0)(*sizes)[0] + 8
    assert on_top.tolist() == [2 * 40 - 10 + 8, 48, 18]
    assert kvpress.pyramidkv_kvpress(48, beta=4.0).layers == InclusivePyramid(4.0)


def budget_of(policy, *lengths):
    """Tokens of a head in prompts of these lengths."""
    return policy.sizes(LayerInfo(0, 1, N, K, H, PROMPT, 0), np.array(lengths)).hparams.budget.tolist()


def test_d44_a_fraction_or_a_capacity():
    make = functools.partial(methods.snapkv, window=2)
    assert budget_of(make(0.5), 16, 8) == [8, 4]
    assert budget_of(make(8), 16, 8) == [8, 8]
    assert prompt_kept(make(0.5)) == prompt_kept(make(8))


def test_d45_truncated_ratios():
    tokens = lambda share, n: int(resolve(share, np.array([n]))[0])
    assert int(10 * (1 - 0.9)) == tokens(Truncated(1 - 0.9), 10) == 0
    assert tokens(1 - 0.9, 10) == 1
    assert budget_of(methods.h2o(Truncated(1 - 0.7)), 10) == [int(10 * (1 - 0.7))] == [3]
    assert budget_of(methods.h2o(Truncated(1 - 0.9)), 10) == [1], "attention needs one token"


def test_d49_averages_at_the_edges():
    votes = layer.group(VOTES.sum(1))
    counted, valid = pooled(votes, 5, "avg"), pooled(votes, 5, "avg", count=lambda under: under)
    average = methods.snapkv(BUDGET, window=WINDOW, kernel=5, pooling="avg")
    policy = variants.snapkv_valid_average(BUDGET, window=WINDOW, kernel=5)
    np.testing.assert_allclose(prompt_score(average)[:, :-WINDOW] * WINDOW, counted, atol=1e-5)
    np.testing.assert_allclose(prompt_score(policy)[:, :-WINDOW] * WINDOW, valid, atol=1e-5)
    assert prompt_kept(policy) == from_scores(valid)
    assert np.abs(counted - valid).max() > 0.05
