"""What released code does otherwise than its paper (D-01 to D-50), each a composition named after its source."""

import dataclasses
import math
from typing import Any, Literal

from kvjax.core.across import AcrossLayers
from kvjax.core.budgets import STEP, Above, Adaptive, Combined, Of, Schedule, Share
from kvjax.core.compose import shared_layers
from kvjax.core.contract import Count, Layout, Policy
from kvjax.core.evict import Evict
from kvjax.core.methods.attention import ahakv, h2o, keyformer, mas, r_kv, roco, scissorhands, tova
from kvjax.core.methods.counts import FloorPyramid, FloorThenGlobal, HalfEven, InclusivePyramid, Normalized, Truncated
from kvjax.core.methods.hidden import FirstLayers
from kvjax.core.methods.keys import expected_attention, knorm
from kvjax.core.methods.nacl import nacl
from kvjax.core.methods.parts import (
    ByIndex,
    Drawn,
    DriftingTopK,
    KnownQueries,
    OverBatch,
    PagesOfQueryHeads,
    Proxies,
    RandomRun,
)
from kvjax.core.methods.position import full, random, streaming_llm, window
from kvjax.core.methods.profile import FastGen
from kvjax.core.methods.simulations import NextStepMask, StepwiseMask
from kvjax.core.methods.votes import ada_snapkv, defensivekv, headkv, lava, pyramidkv, snapkv
from kvjax.core.observe import Rows
from kvjax.core.scores.attention import Faded, LastRows, Uniform, Votes
from kvjax.core.scores.blends import Blend, LayerMean, Pooled
from kvjax.core.scores.keys import Expected, Redundancy, Table
from kvjax.core.scores.rows import Defensive, PooledVotes
from kvjax.core.scores.softmax import EntropyScaled, Noisy, OutsideWindow, SeesAll

PROMPT = Schedule()
"""Evicts the prompt, and never again."""


def by_query_head(policy: Evict) -> Evict:
    """The policy with keys, values and a set of tokens for every query head, as code that copies them has it (D-39)."""
    return dataclasses.replace(policy, layout=dataclasses.replace(policy.layout, by_query_head=True))


def with_score(policy: Evict, **fields: Any) -> Evict:
    """The policy with other fields of its score."""
    return dataclasses.replace(policy, score=dataclasses.replace(policy.score, **fields))


def _rows(policy: Evict) -> Any:
    """What the score of a policy sums."""
    score: Any = policy.score
    return score.of


def _with_rows(policy: Evict, **fields: Any) -> Evict:
    """The policy whose score sums something else."""
    return with_score(policy, of=dataclasses.replace(_rows(policy), **fields))


# ------------------------------------------------------------------------------------------------ H2O, Scissorhands


def h2o_stepwise_mask(budget: Count, *, recent: Count = Share(0.5)) -> StepwiseMask:
    """H2O's evaluation, which simulates greedy eviction while the text is read (D-01). Read prompts with `block=1`."""
    recent = Of(recent, budget)
    return StepwiseMask(Combined("less", (budget, recent)), recent)


def h2o_next_step_mask(budget: Count, *, recent: Count = Share(0.5)) -> NextStepMask:
    """H2O's simulation, whose mask counts the coming token among the recent ones (D-02)."""
    recent = Of(recent, budget)
    return NextStepMask(Combined("less", (budget, recent)), recent)


def h2o_factory(budget: Count, *, window: int = 8) -> Evict:
    """H2O of KVCache-Factory: the prompt alone is evicted, for every query head."""
    return by_query_head(dataclasses.replace(h2o(budget, recent=window), when=PROMPT))


def scissorhands_by_position(budget: Count, **options: Any) -> Evict:
    """Scissorhands where a row's average is one over its position (D-04)."""
    policy = scissorhands(budget, **options)
    return with_score(policy, threshold="1/position")


def scissorhands_factory(budget: Count, *, sinks: int = 4, recent: int = 10, decay: float = 0.9) -> Evict:
    """Scissorhands of KVCache-Factory: sums of probabilities that fade while decoding (D-50)."""
    return dataclasses.replace(scissorhands(budget, recent=recent), score=Faded(decay=decay), sinks=sinks)


# ------------------------------------------------------------------------------------------------ positions


def random_run(budget: Count, *, recent: Count = 1, sinks: Count = 0) -> Evict:
    """Random eviction of EasyKV's blocks: one run of tokens, the same in all heads and layers (D-05)."""
    return dataclasses.replace(random(budget, recent=recent), sinks=sinks, select=RandomRun())


def random_shared(budget: Count, *, recent: Count = 1, sinks: Count = 0) -> Evict:
    """Random eviction where the kv heads of a layer share their draws (D-05)."""
    return dataclasses.replace(random(budget, recent=recent), sinks=sinks, score=Uniform(shared=True))


def window_of_generated(budget: Count) -> Evict:
    """EasyKV's recency while decoding: the prompt stays, outside of the budget (D-06, D-13)."""
    return Evict(window(budget).score, Combined("sum", (1.0, budget)), 1.0, when=STEP)


def streaming_llm_factory(budget: Count, *, sinks: int = 4) -> Evict:
    """StreamingLLM of KVCache-Factory: the prompt alone is evicted, and tokens stand where they stood."""
    return dataclasses.replace(streaming_llm(budget, sinks=sinks, positions="original"), when=PROMPT)


def knorm_factory(budget: Count, *, skip: int = 2) -> FirstLayers:
    """Knorm of KVCache-Factory: the first layers keep everything."""
    return FirstLayers(full(), knorm(budget), skip)


# ------------------------------------------------------------------------------------------------ TOVA, RoCo


def tova_easykv(budget: Count, *, sinks: Count = 4, recent: Count = 6) -> Evict:
    """TOVA of EasyKV: every kv head decides, and the first and last tokens stay (D-09)."""
    return dataclasses.replace(tova(budget, by_head=True), sinks=sinks, recent=recent)


def roco_easykv(budget: Count, *, sinks: Count = 4, recent: Count = 10, prefix: int = 0, **options: Any) -> Evict:
    """RoCo of EasyKV: 4 sinks and the last 10 tokens stay (D-12), and rows of the first tokens do not count (D-46)."""
    policy = with_score(roco(budget, recent=recent, **options), first=prefix)
    return dataclasses.replace(policy, sinks=sinks)


def mas_of_later_rows(budget: Count, **options: Any) -> Evict:
    """MAS as the paper words it: rows of later tokens alone count (D-10)."""
    return mas(budget, count_self=False, **options)


# ------------------------------------------------------------------------------------------------ NaCl


def _drawing(policy: Evict, **fields: Any) -> Evict:
    """The policy with another draw."""
    select: Any = policy.select
    return dataclasses.replace(policy, select=Drawn(select.random, select.shared, **fields))


def nacl_from_all(budget: Count, **options: Any) -> Evict:
    """NaCl as its formula draws: from all tokens, also those that the proxies chose (D-15)."""
    return _drawing(nacl(budget, **options), among="all")


def nacl_drawn(
    budget: Count,
    *,
    by: Literal["softmax", "normalised", "uniform"] = "uniform",
    temperature: float = 1.0,
    **options: Any,
) -> Evict:
    """NaCl with another draw; "uniform" is the ablation without probability sampling (Table 3)."""
    return _drawing(nacl(budget, **options), by=by, temperature=temperature)


def nacl_interval(budget: Count, *, decode_every: int, **options: Any) -> Evict:
    """NaCl while decoding, with all rows since the last eviction as proxies (D-16)."""
    policy = nacl(budget, decode_every=decode_every, **options)
    return dataclasses.replace(policy, score=Proxies(_rows(policy), interval=decode_every))


def nacl_llama3(budget: float = 0.2, *, min_len: int = 2048, **options: Any) -> Evict:
    """NaCl with the shares of its code: 256 sinks, 1 % proxies of which 256 are not kept, 7 % random of 20 % (D-17).

    Prompts of `min_len` tokens, and those whose share is less than the sinks, are kept whole.
    """
    shares: dict[str, Any] = {"proxies": 0.01, "recent": Combined("less", (0.01, 256)), "random": 0.07 * budget / 0.2}
    return dataclasses.replace(nacl(budget, **shares | options), budget=Above(budget, min_len), sinks=256)


def nacl_non_causal(budget: Count, **options: Any) -> Evict:
    """NaCl of its code, whose proxies see later proxies too (D-18)."""
    return _with_rows(nacl(budget, **options), softmax=SeesAll())


def nacl_headbug(budget: Count, **options: Any) -> Evict:
    """NaCl of its code, where query head g judges kv head g (D-19)."""
    policy = nacl(budget, **options)
    if policy.when.decodes:
        raise ValueError("nacl_headbug ranks prompt tokens only; leave decode_every=None")
    return dataclasses.replace(policy, score=ByIndex(dataclasses.replace(_rows(policy), group=None)))


def nacl_grouped(budget: Count, group: Literal["mean", "max", "sum"], **options: Any) -> Evict:
    """NaCl where the query heads of a kv head become one in another way (D-19)."""
    return _with_rows(nacl(budget, **options), group=group)


def nacl_by_layer(budget: Count, **options: Any) -> Evict:
    """NaCl without head-wise eviction (an ablation): heads have one score and one draw."""
    policy = nacl(budget, **options)
    select: Any = policy.select
    select = dataclasses.replace(select, shared=True)
    return dataclasses.replace(policy, score=LayerMean(policy.score), select=select)


def nacl_global(budget: Count, **options: Any) -> Policy:
    """NaCl with one decision for all heads and layers (an ablation)."""
    return shared_layers(nacl_by_layer(budget, **options))


# ------------------------------------------------------------------------------------------------ SnapKV, PyramidKV


def snapkv_text(budget: Count, *, window: int = 32, kernel: int = 7, outside: bool = True) -> Evict:
    """SnapKV's score as Ada-KV's text has it: every row is pooled before rows are added (D-23).

    Args:
      budget, window, kernel: as of `snapkv`.
      outside: the softmax is over the keys before the window (D-24); otherwise over all.
    """
    score = PooledVotes(window, kernel, softmax=OutsideWindow(window) if outside else None)
    return Evict(score, budget, 0, window)


def snapkv_outside_window(budget: Count, *, window: int = 32, kernel: int = 7) -> Evict:
    """SnapKV with a softmax over the keys before the window (D-24)."""
    return Evict(Pooled(Votes(window, softmax=OutsideWindow(window)), "max", kernel), budget, 0, window)


def snapkv_grouped(budget: Count, group: Literal["mean", "max", "sum"], *, window: int = 32, kernel: int = 7) -> Evict:
    """SnapKV where the query heads of a kv head become one in another way (D-39)."""
    return Evict(Pooled(Votes(window, group), "max", kernel), budget, 0, window)


def snapkv_valid_average(budget: Count, *, window: int = 32, kernel: int = 7) -> Evict:
    """SnapKV whose averages do not count zeros beyond the ends of the text (D-49)."""
    return with_score(snapkv(budget, window=window, kernel=kernel, pooling="avg"), pad="valid")


def snapkv_released(budget: Count = 320) -> Evict:
    """SnapKV's class: a window of 64, averages of 5, for every query head."""
    return by_query_head(snapkv(budget, window=64, kernel=5, pooling="avg"))


def snapkv_factory(budget: Count = 512, *, window: int = 8, kernel: int = 7) -> Evict:
    """SnapKV of KVCache-Factory's runner and of AdaKV, for every query head (D-39, D-44)."""
    return by_query_head(snapkv(budget, window=window, kernel=kernel))


def pyramidkv_factory(budget: Count, *, beta: float = 20.0, window: int = 8, kernel: int = 7) -> Evict:
    """PyramidKV of KVCache-Factory: whole steps, whose total exceeds the budget (D-41, D-42)."""
    policy = pyramidkv(budget, window=window, kernel=kernel)
    return dataclasses.replace(policy, layers=FloorPyramid(beta))


def pyramidkv_adakv(budget: Count, *, beta: float = 20.0, window: int = 8, kernel: int = 7) -> Evict:
    """PyramidKV of AdaKV: whole steps, without a uniform branch for short prompts (D-42)."""
    policy = pyramidkv(budget, window=window, kernel=kernel)
    return dataclasses.replace(policy, layers=FloorPyramid(beta, uniform=False))


def pyramidkv_kvpress(budget: int | float, *, beta: float = 20.0, window: int = 64, kernel: int = 5) -> Evict:
    """PyramidKV of kvpress: windows are a part of every layer's share (D-43)."""
    share = budget if isinstance(budget, float) else None
    policy = cut_window(snapkv(budget, window=window, kernel=kernel, pooling="avg"), window)
    return dataclasses.replace(policy, layers=InclusivePyramid(beta, share))


def cut_window(policy: Evict, window: int) -> Evict:
    """The policy whose budgets cut windows that they do not hold down to the newest tokens, as kvpress does."""
    return dataclasses.replace(policy, recent=Combined("least", (window, Share(1.0))))


# ------------------------------------------------------------------------------------------------ Ada-KV


def skipping(policy: Evict, skip: int) -> FirstLayers:
    """The policy whose heads share equally in the first `skip` layers."""
    return FirstLayers(dataclasses.replace(policy, heads=None), policy, skip)


def ada_text(budget: Count, *, alpha: float = 0.5, window: int = 32, kernel: int = 7, pool: bool = True) -> Evict:
    """Ada-SnapKV as its text has it: rows are pooled before they are added, without the window (D-23, D-24)."""
    policy = snapkv_text(budget, window=window, kernel=kernel)
    return dataclasses.replace(policy, heads=Adaptive(alpha), layout=Layout(pool=pool))


def ada_released(
    budget: Count,
    *,
    floor: float = 0.2,
    window: int = 32,
    kernel: int = 7,
    normalize: bool = False,
    pool: bool = True,
) -> Evict:
    """Ada-SnapKV of its code: `floor` weighs equal parts (D-20), and every head is rounded for itself (D-21).

    Args:
      budget, window, kernel, pool: as of `ada_snapkv`.
      floor: the code's `floor_alpha`.
      normalize: scores are scaled by what a head's best hold (D-26).
    """
    heads = HalfEven(1.0 - floor, math.inf)
    policy = ada_snapkv(budget, window=window, kernel=kernel, pool=pool)
    return dataclasses.replace(policy, heads=Normalized(heads) if normalize else heads, select=DriftingTopK())


def ada_factory(budget: Count, *, floor: float = 0.2, window: int = 8, kernel: int = 7, pool: bool = True) -> Evict:
    """Ada-SnapKV of KVCache-Factory, for every query head, which normalises by default (D-26)."""
    return by_query_head(ada_released(budget, floor=floor, window=window, kernel=kernel, normalize=True, pool=pool))


def ada_normalized(budget: Count, *, alpha: float = 0.5, **options: Any) -> Evict:
    """Ada-SnapKV whose scores are scaled by what a head's best hold (D-26)."""
    return dataclasses.replace(ada_snapkv(budget, **options), heads=Normalized(Adaptive(alpha)))


def ada_floor_then_global(policy: Evict, *, alpha: float = 0.2, pool: bool = True) -> Evict:
    """A policy whose heads compete as in kvpress: every head's best are safe, the rest goes to all (D-22)."""
    layout = dataclasses.replace(policy.layout, pool=pool)
    return dataclasses.replace(policy, heads=FloorThenGlobal(alpha), layout=layout)


def ada_pyramid_adakv(
    budget: Count, *, floor: float = 0.2, beta: float = 20.0, window: int = 8, kernel: int = 7, pool: bool = True
) -> Evict:
    """Ada-Pyramid of its code, of the first prompt that its class reads (D-25, D-42)."""
    policy = ada_released(budget, floor=floor, window=window, kernel=kernel, pool=pool)
    return dataclasses.replace(policy, layers=FloorPyramid(beta, uniform=False))


# ------------------------------------------------------------------------------------------------ AhaKV


def ahakv_equation_5(budget: Count, *, recent: int = 32, **options: Any) -> Evict:
    """AhaKV as Eq. 5 has it: one row more votes than in Algorithm 1 (D-27)."""
    return _with_rows(ahakv(budget, recent=recent, **options), last=recent + 1)


def ahakv_gain(budget: Count, *, k: Count | None = None, recent: Count = 32, kernel: int = 7, **gain: Any) -> Evict:
    """AhaKV with another step gain: `apply="scaled"` (D-28), `floor=1.0` (D-29), `seen="cache"` (D-32).

    Args:
      budget, recent, kernel: as of `ahakv`.
      k: tokens whose entropy rows get; the budget if None.
      **gain: fields of `EntropyScaled`.
    """
    policy = ahakv(budget, recent=recent, kernel=kernel)
    return _with_rows(policy, softmax=EntropyScaled(budget if k is None else k, **gain))


def ahakv_without_gain(budget: Count, **options: Any) -> Evict:
    """AhaKV with the model's softmax (its ablation SGS)."""
    return _with_rows(ahakv(budget, **options), softmax=None)


def ahakv_all_rows(budget: Count, **options: Any) -> Evict:
    """AhaKV where all rows vote (its ablation RA)."""
    return _with_rows(ahakv(budget, **options), last=None)


def ahakv_pooled(budget: Count, target: Literal["score", "both"], **options: Any) -> Evict:
    """AhaKV that pools scores, as Figure 3 has it (D-30)."""
    return with_score(ahakv(budget, **options), target=target)


def ahakv_prior_each_step(budget: Count, **options: Any) -> Evict:
    """AhaKV whose prior multiplies what generated rows add, too."""
    return with_score(ahakv(budget, **options), each_step=True)


def ahakv_without_prior(budget: Count, **options: Any) -> Evict:
    """AhaKV that selects without the prior of values, as Algorithm 1 is printed (D-31; its ablation VPE)."""
    policy = ahakv(budget, **options)
    return dataclasses.replace(policy, score=Faded(_rows(policy)))


# ------------------------------------------------------------------------------------------------ Keyformer


def keyformer_released(budget: Count, *, tau_delta: float = 0.01, **options: Any) -> Evict:
    """Keyformer whose temperature grows by a number a step (D-34)."""
    policy = keyformer(budget, **options)
    return _with_rows(policy, softmax=dataclasses.replace(_rows(policy).softmax, tau_delta=tau_delta))


def keyformer_share_batch(budget: Count, **options: Any) -> Evict:
    """Keyformer of its code, which has one score for all sequences of a batch (D-36)."""
    policy = keyformer(budget, **options)
    return dataclasses.replace(policy, score=OverBatch(_rows(policy)))


def keyformer_mask(budget: Count, *, recent: Count = Share(0.3), softmax: Noisy = Noisy()) -> NextStepMask:
    """Keyformer's simulation, whose key set is frozen after the prompt (D-37)."""
    recent = Of(recent, budget)
    return NextStepMask(Combined("less", (budget, recent)), recent, Rows(softmax=softmax), True)


def keyformer_damped(budget: Count, *, damping: float, **options: Any) -> Evict:
    """Keyformer where what rows add is damped (section 2.3's experiment)."""
    policy = keyformer(budget, **options)
    return dataclasses.replace(policy, score=Faded(_rows(policy), damping=damping))


# ------------------------------------------------------------------------------------------------ others


def fastgen_port(special: tuple[int, ...], punctuation: tuple[int, ...], **options: Any) -> FastGen:
    """FastGen of a released port: a set must leave entries as they are, and shares are rounded up (D-47)."""
    return FastGen(tuple(special), tuple(punctuation), by="entries", rounding="ceil", **options)


def r_kv_released(
    budget: Count,
    *,
    importance: float = 0.07,
    window: int = 8,
    kernel: int = 7,
    threshold: float = 0.5,
    buffer: int = 128,
    group: Literal["mean", "max", "sum"] = "max",
) -> Evict:
    """R-KV of its code: another weight, and a softmax over the keys before the window."""
    rows = LastRows(window, group, OutsideWindow(window))
    score = Blend((Pooled(rows, "max", kernel), Redundancy(threshold)), (importance, importance - 1.0))
    return dataclasses.replace(r_kv(budget, window=window, buffer=buffer), score=score)


def lava_released(budget: Count, *, floor: float = 0.5, max_ratio: float = 2.0, **options: Any) -> AcrossLayers:
    """LAVa of its example: heads have a floor of their layer's share."""
    found = lava(budget, **options)
    policy = dataclasses.replace(found.policy, heads=Adaptive(1.0 - floor))
    return dataclasses.replace(found, policy=policy, max_ratio=max_ratio)


def defensivekv_released(share: float, *, window: int = 32, kernel: int = 5, **options: Any) -> Evict:
    """DefensiveKV of its code: what comes first is a share of the prompt without its window."""
    most = Truncated(share, Combined("less", (1.0, window)))
    policy = defensivekv(Truncated(share), window=window, kernel=kernel, **options)
    return dataclasses.replace(policy, score=Defensive(most, window, kernel))


def headkv_factory(budget: int, importance: Any, *, beta: float = 2.0, window: int = 8, **options: Any) -> Evict:
    """HeadKV of KVCache-Factory, for every query head; its capacities leave no room for the window.

    Args:
      budget: its capacity, without the window.
      importance: "L N", one number for every query head.
      beta, window: as of `headkv`.
      **options: of `headkv`.
    """
    return by_query_head(headkv(budget + window, importance, beta=beta, window=window, **options))


def cam_factory(budget: Count, *, window: int = 8) -> Evict:
    """The tokens that CaM of KVCache-Factory keeps, for every query head; `merging` merges values."""
    return by_query_head(snapkv(budget, window=window, kernel=1))


def quest_by_query_head(budget: Count, *, size: int = 16, dense: int = 2) -> FirstLayers:
    """Quest of its evaluation: every query head reads pages of its own."""
    return FirstLayers(Policy(), PagesOfQueryHeads(budget, size), dense)


def expected_attention_stats(
    budget: Count, mean: Any, covariance: Any, *, horizon: int = 512, sinks: int = 4, **options: Any
) -> Evict:
    """ExpectedAttention by the moments of a model's queries, "L N H" and "L N H H" before rotation (kvpress)."""
    queries = KnownQueries(horizon, sinks, Table(mean), Table(covariance))
    policy = expected_attention(budget, horizon=horizon, sinks=sinks)
    return dataclasses.replace(policy, score=Expected(queries, **options))
