"""What the authors' own code does otherwise than their papers, and texts and ablations of papers (D-01 to D-50)."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

from kvjax.budgets import STEP, Above, Adaptive, Combined, Of, Schedule, Share
from kvjax.compose.across import AcrossLayers
from kvjax.compose.evict import Evict
from kvjax.compose.policies import everywhere
from kvjax.contract import Amount, Count, Layout, Odd, Policy, Proportion, Ratio, Score, Size
from kvjax.decide.select import ThenRandom
from kvjax.methods.attention import r_kv, tova
from kvjax.methods.hidden import FirstLayers
from kvjax.methods.nacl import nacl
from kvjax.methods.released.counts import HalfEven, Normalized, Truncated
from kvjax.methods.released.parts import Drawn, DriftingTopK, NextStepMask, PagesOfQueryHeads, RowsAtEnds, StepwiseMask
from kvjax.methods.votes import ada_snapkv, defensivekv, lava, snapkv
from kvjax.observe import Rows
from kvjax.pallas_kernels import kinds
from kvjax.scores.attention import LastRows, Recency, Votes
from kvjax.scores.blends import LayerMean, Pooled
from kvjax.scores.rows import PooledVotes
from kvjax.scores.softmax import Noisy, OutsideWindow

PROMPT = Schedule()
"""Evicts the prompt, and never again."""


def by_query_head(policy: Evict) -> Evict:
    """The policy with keys, values and a set of tokens for every query head, as code that copies them has it (D-39)."""
    return dataclasses.replace(policy, layout=dataclasses.replace(policy.layout, by_query_head=True))


def grouped(policy: Evict, group: Literal["mean", "max", "sum"]) -> Evict:
    """The policy whose query heads of a kv head become one in another way (D-19, D-39)."""
    score = everywhere(policy.score, Score | Rows, "group", lambda _: {"group": group})
    return dataclasses.replace(policy, score=score)


def with_score(policy: Evict, **fields: Any) -> Evict:
    """The policy with other fields of its score: `with_score(methods.roco(64), count_self=False)`."""
    return dataclasses.replace(policy, score=dataclasses.replace(policy.score, **fields))


def with_rows(policy: Evict, **fields: Any) -> Evict:
    """The policy whose score sums other rows: `with_rows(methods.ahakv(64, recent=32), last=33)`."""
    return with_score(policy, of=dataclasses.replace(_rows(policy), **fields))


def with_softmax(policy: Evict, **fields: Any) -> Evict:
    """The policy whose softmax has other fields: `with_softmax(methods.keyformer(64), per="key")`.

    AhaKV's is an `EntropyScaled`, Keyformer's a `Noisy`.
    """
    softmax: Any = _rows(policy).softmax
    if softmax is None:
        raise ValueError("the policy ranks by the model's softmax; give methods.ahakv(64) or methods.keyformer(64)")
    return with_rows(policy, softmax=dataclasses.replace(softmax, **fields))


def summed_by(policy: Evict, score: Callable[..., Score], **fields: Any) -> Evict:
    """The policy whose rows another score sums: `summed_by(methods.keyformer(64), Faded, damping=0.5)`."""
    return dataclasses.replace(policy, score=score(_rows(policy), **fields))


def _rows(policy: Evict) -> Rows:
    """The rows that the score of a policy sums."""
    if not isinstance(rows := getattr(policy.score, "of", None), Rows):
        raise ValueError(f"{type(policy.score).__name__} sums no rows; give a policy such as methods.keyformer(64)")
    return rows


# ------------------------------------------------------------------------------------------------ H2O to Keyformer


def h2o_stepwise_mask(budget: Count, *, recent: Count = Share(0.5)) -> StepwiseMask:
    """H2O's evaluation, which simulates greedy eviction while the text is read (D-01). Read prompts with `block=1`."""
    recent = Of(recent, budget)
    return StepwiseMask(Combined("less", (budget, recent)), recent)


def h2o_next_step_mask(budget: Count, *, recent: Count = Share(0.5)) -> NextStepMask:
    """H2O's simulation, whose mask counts the coming token among the recent ones (D-02)."""
    recent = Of(recent, budget)
    return NextStepMask(Combined("less", (budget, recent)), recent)


def keyformer_mask(budget: Count, *, recent: Count = Share(0.3), softmax: Noisy = Noisy()) -> NextStepMask:
    """Keyformer's simulation, whose key set is frozen after the prompt (D-37)."""
    recent = Of(recent, budget)
    return NextStepMask(Combined("less", (budget, recent)), recent, Rows(softmax=softmax), True)


def dilated_window_anchored(budget: Count, *, dilation: Amount = 1) -> Evict:
    """A dilated window that evicts instead of hiding: tokens stay whose positions `dilation + 1` divides (D-07)."""
    return Evict(Recency(dilation + 1), budget, 0, 1, when=STEP)


def tova_by_head(budget: Count) -> Evict:
    """TOVA where every kv head decides by its own query heads (D-09)."""
    return dataclasses.replace(tova(budget), score=Votes(1, prompt_only=False))


# ------------------------------------------------------------------------------------------------ NaCl


def nacl_drawn(policy: Evict, **fields: Any) -> Evict:
    """NaCl with other fields of `Drawn`: `among="all"` draws from what proxies chose, too (D-15), `by="uniform"`."""
    draw = _draw(policy)
    return dataclasses.replace(policy, select=Drawn(draw.random, draw.shared, **fields))


def nacl_both_ends(policy: Evict, begin: Count) -> Evict:
    """NaCl with `begin` proxies at the beginning of the prompt, too (section 3.2)."""
    return with_score(policy, of=RowsAtEnds(_rows(policy).last, begin=begin))


def nacl_by_layer(policy: Evict) -> Evict:
    """NaCl without head-wise eviction (an ablation): heads have one score and one draw."""
    select = dataclasses.replace(_draw(policy), shared=True)
    return dataclasses.replace(policy, score=LayerMean(policy.score), select=select)


def _draw(policy: Evict) -> ThenRandom:
    """The selection of a policy that draws some tokens."""
    if not isinstance(policy.select, ThenRandom):
        raise ValueError(f"{type(policy.select).__name__} draws nothing; give a policy such as methods.nacl(64)")
    return policy.select


def nacl_llama3(budget: kinds.PositiveProportion = 0.2, *, min_len: Amount = 2048, **options: Any) -> Evict:
    """NaCl with the shares of its code: 256 sinks, 1 % proxies of which 256 are not kept, 7 % random of 20 % (D-17).

    Prompts of `min_len` tokens, and those whose share is less than the sinks, are kept whole.
    """
    shares: dict[str, Count] = {"proxies": 0.01, "recent": Combined("less", (0.01, 256)), "random": 0.07 * budget / 0.2}
    return dataclasses.replace(nacl(budget, **shares | options), budget=Above(budget, min_len), sinks=256)


# ------------------------------------------------------------------------------------------------ SnapKV, PyramidKV


def snapkv_text(budget: Count, *, window: Size = 32, kernel: Odd = 7, outside: bool = True) -> Evict:
    """SnapKV's score as Ada-KV's text has it: every row is pooled before rows are added (D-23).

    Args:
      budget, window, kernel: as of `snapkv`.
      outside: the softmax is over the keys before the window (D-24); otherwise over all.
    """
    score = PooledVotes(window, kernel, softmax=OutsideWindow(window) if outside else None)
    return Evict(score, budget, 0, window)


def snapkv_outside_window(budget: Count, *, window: Size = 32, kernel: Odd = 7) -> Evict:
    """SnapKV with a softmax over the keys before the window (D-24)."""
    return Evict(Pooled(Votes(window, softmax=OutsideWindow(window)), "max", kernel), budget, 0, window)


def snapkv_released(budget: Count = 320) -> Evict:
    """SnapKV's class: a window of 64, averages of 5, for every query head."""
    return by_query_head(snapkv(budget, window=64, kernel=5, pooling="avg"))


# ------------------------------------------------------------------------------------------------ Ada-KV


def skipping(policy: Evict, skip: Amount) -> FirstLayers:
    """The policy whose heads share equally in the first `skip` layers."""
    return FirstLayers(dataclasses.replace(policy, heads=None), policy, skip)


def ada_text(budget: Count, *, alpha: Proportion = 0.5, window: Size = 32, kernel: Odd = 7) -> Evict:
    """Ada-SnapKV as its text has it: rows are pooled before they are added, without the window (D-23, D-24)."""
    policy = snapkv_text(budget, window=window, kernel=kernel)
    return dataclasses.replace(policy, heads=Adaptive(alpha), layout=Layout(pool=True))


def ada_released(
    budget: Count, *, floor: Proportion = 0.2, window: Size = 32, kernel: Odd = 7, normalize: bool = False
) -> Evict:
    """Ada-SnapKV of its code: `floor` weighs equal parts (D-20), and every head is rounded for itself (D-21).

    Args:
      budget, window, kernel: as of `ada_snapkv`.
      floor: the code's `floor_alpha`.
      normalize: scores are scaled by what a head's best hold (D-26).
    """
    heads = HalfEven(1.0 - floor, math.inf)
    policy = ada_snapkv(budget, window=window, kernel=kernel)
    return dataclasses.replace(policy, heads=Normalized(heads) if normalize else heads, select=DriftingTopK())


# ------------------------------------------------------------------------------------------------ others


def r_kv_released(budget: Count, *, importance: Proportion = 0.07, window: Size = 8, **options: Any) -> Evict:
    """R-KV of its code: another weight, a group's largest vote, and a softmax over the keys before the window."""
    policy = r_kv(budget, importance=importance, window=window, **options)
    score: Any = policy.score
    votes = dataclasses.replace(score.scores[0], score=LastRows(window, "max", OutsideWindow(window)))
    return with_score(policy, scores=(votes, score.scores[1]))


def lava_released(budget: Count, *, floor: Proportion = 0.5, max_ratio: Ratio = 2.0, **options: Any) -> AcrossLayers:
    """LAVa of its example: heads have a floor of their layer's share."""
    found = lava(budget, **options)
    policy = dataclasses.replace(found.policy, heads=Adaptive(1.0 - floor))
    return dataclasses.replace(found, policy=policy, max_ratio=max_ratio)


def defensivekv_released(share: Proportion, *, window: Size = 32, **options: Any) -> Evict:
    """DefensiveKV of its code: what comes first is a share of the prompt without its window."""
    policy = defensivekv(Truncated(share), window=window, **options)
    return with_score(policy, most=Truncated(share, Combined("less", (1.0, window))))


def quest_by_query_head(budget: Count, *, size: Size = 16, dense: Amount = 2) -> FirstLayers:
    """Quest of its evaluation: every query head reads pages of its own."""
    return FirstLayers(Policy(), PagesOfQueryHeads(budget, size), dense)


kinds.doors(__name__)
