"""What the authors' own code does otherwise than their papers, and texts and ablations of papers (D-01 to D-50)."""

import dataclasses
import math
from typing import Any, Literal

from kvjax.budgets import Above, Adaptive, Combined, Of, Schedule, Share
from kvjax.compose import shared_layers
from kvjax.compose.across import AcrossLayers
from kvjax.compose.evict import Evict
from kvjax.contract import (
    Amount,
    AtLeastOne,
    Count,
    Layout,
    NonNegative,
    Odd,
    Policy,
    Positive,
    Proportion,
    Ratio,
    Score,
    Size,
)
from kvjax.methods.attention import ahakv, keyformer, r_kv, scissorhands, tova
from kvjax.methods.hidden import FirstLayers, dilated_window
from kvjax.methods.nacl import nacl
from kvjax.methods.position import random
from kvjax.methods.profile import FastGen
from kvjax.methods.released.counts import FloorPyramid, HalfEven, Normalized, Truncated
from kvjax.methods.released.parts import (
    ByIndex,
    Drawn,
    DriftingTopK,
    NextStepMask,
    OverBatch,
    PagesOfQueryHeads,
    Proxies,
    RowsAtEnds,
    StepwiseMask,
)
from kvjax.methods.votes import ada_snapkv, defensivekv, lava, pyramidkv, snapkv
from kvjax.observe import Rows
from kvjax.pallas_kernels import kinds
from kvjax.scores.attention import Faded, LastRows, Recency, Uniform, Votes
from kvjax.scores.blends import LayerMean, Pooled
from kvjax.scores.rows import PooledVotes
from kvjax.scores.softmax import EntropyScaled, Noisy, OutsideWindow, SeesAll

PROMPT = Schedule()
"""Evicts the prompt, and never again."""


def by_query_head(policy: Evict) -> Evict:
    """The policy with keys, values and a set of tokens for every query head, as code that copies them has it (D-39)."""
    return dataclasses.replace(policy, layout=dataclasses.replace(policy.layout, by_query_head=True))


def grouped(policy: Evict, group: Literal["mean", "max", "sum"]) -> Evict:
    """The policy whose query heads of a kv head become one in another way (D-19, D-39)."""
    return dataclasses.replace(policy, score=_grouped(policy.score, group))


def _grouped(x: Any, group: str) -> Any:
    if isinstance(x, tuple):
        return tuple(_grouped(y, group) for y in x)
    if not isinstance(x, Score | Rows):
        return x
    fields: dict[str, Any] = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
    fields = {name: group if name == "group" else _grouped(y, group) for name, y in fields.items()}
    return type(x)(**fields)


def with_score(policy: Evict, **fields: Any) -> Evict:
    """The policy with other fields of its score."""
    return dataclasses.replace(policy, score=dataclasses.replace(policy.score, **fields))


def _rows(policy: Evict) -> Any:
    """The rows that the score of a policy sums."""
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


def scissorhands_by_position(budget: Count, **options: Any) -> Evict:
    """Scissorhands where a row's average is one over its position (D-04)."""
    policy = scissorhands(budget, **options)
    return with_score(policy, threshold="1/position")


# ------------------------------------------------------------------------------------------------ positions


def random_shared(budget: Count) -> Evict:
    """Random eviction where the kv heads of a layer share their draws (D-05)."""
    return dataclasses.replace(random(budget), score=Uniform(shared=True))


def dilated_window_anchored(budget: Count, *, dilation: Amount = 1) -> Evict:
    """A dilated window that evicts instead of hiding: tokens stay whose positions `dilation + 1` divides (D-07)."""
    return dataclasses.replace(
        dilated_window(budget, dilation=dilation), score=Recency(dilation + 1), recent=1, mask=None
    )


# ------------------------------------------------------------------------------------------------ TOVA, RoCo


def tova_by_head(budget: Count) -> Evict:
    """TOVA where every kv head decides by its own query heads (D-09)."""
    return dataclasses.replace(tova(budget), score=Votes(1, prompt_only=False))


def of_later_rows(policy: Evict) -> Evict:
    """MAS or RoCo as the paper words them: rows of later tokens alone count (D-10)."""
    return with_score(policy, count_self=False)


def since(policy: Evict, first: Amount) -> Evict:
    """MAS or RoCo where rows before the position `first` do not count, as in EasyKV's blocks (D-46)."""
    return with_score(policy, first=first)


# ------------------------------------------------------------------------------------------------ NaCl


def nacl_drawn(
    budget: Count,
    *,
    by: Literal["softmax", "normalised", "uniform"] = "softmax",
    among: Literal["rest", "all"] = "rest",
    temperature: Positive = 1.0,
    **options: Any,
) -> Evict:
    """NaCl with another draw: from "all" tokens, also those that the proxies chose (D-15); or "uniform" (Table 3)."""
    policy = nacl(budget, **options)
    select: Any = policy.select
    return dataclasses.replace(policy, select=Drawn(select.random, select.shared, among, by, temperature))


def nacl_decoding(
    budget: Count, *, every: Size, proxies_are: Literal["newest", "all"] = "newest", **options: Any
) -> Evict:
    """NaCl that evicts at every so many steps, too (D-16).

    Args:
      budget, **options: as of `nacl`.
      every: so many steps.
      proxies_are: the "newest" row, or "all" since the last eviction.
    """
    policy = dataclasses.replace(nacl(budget, **options), when=Schedule(every=every))
    return (
        policy if proxies_are == "newest" else dataclasses.replace(policy, score=Proxies(_rows(policy), interval=every))
    )


def nacl_both_ends(budget: Count, *, begin: Count, **options: Any) -> Evict:
    """NaCl with `begin` proxies at the beginning of the prompt, too (section 3.2)."""
    policy = nacl(budget, **options)
    return with_score(policy, of=RowsAtEnds(_rows(policy).last, begin=begin))


def nacl_llama3(budget: float = 0.2, *, min_len: Amount = 2048, **options: Any) -> Evict:
    """NaCl with the shares of its code: 256 sinks, 1 % proxies of which 256 are not kept, 7 % random of 20 % (D-17).

    Prompts of `min_len` tokens, and those whose share is less than the sinks, are kept whole.
    """
    if not 0 < budget <= 1:
        raise ValueError(
            f"budget={budget} is no share of the prompt, whose shares are given; give a number from 0 to 1"
        )
    shares: dict[str, Any] = {"proxies": 0.01, "recent": Combined("less", (0.01, 256)), "random": 0.07 * budget / 0.2}
    return dataclasses.replace(nacl(budget, **shares | options), budget=Above(budget, min_len), sinks=256)


def nacl_non_causal(budget: Count, **options: Any) -> Evict:
    """NaCl of its code, whose proxies see later proxies too (D-18)."""
    return _with_rows(nacl(budget, **options), softmax=SeesAll())


def nacl_headbug(budget: Count, **options: Any) -> Evict:
    """NaCl of its code, where query head g judges kv head g (D-19)."""
    policy = nacl(budget, **options)
    return dataclasses.replace(policy, score=ByIndex(dataclasses.replace(_rows(policy), group=None)))


def nacl_by_layer(budget: Count, **options: Any) -> Evict:
    """NaCl without head-wise eviction (an ablation): heads have one score and one draw."""
    policy = nacl(budget, **options)
    select: Any = policy.select
    return dataclasses.replace(policy, score=LayerMean(policy.score), select=dataclasses.replace(select, shared=True))


def nacl_global(budget: Count, **options: Any) -> Policy:
    """NaCl with one decision for all heads and layers (an ablation)."""
    return shared_layers(nacl_by_layer(budget, **options))


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


def snapkv_valid_average(budget: Count, *, window: Size = 32, kernel: Odd = 7) -> Evict:
    """SnapKV whose averages do not count zeros beyond the ends of the text (D-49)."""
    return with_score(snapkv(budget, window=window, kernel=kernel, pooling="avg"), pad="valid")


def snapkv_released(budget: Count = 320) -> Evict:
    """SnapKV's class: a window of 64, averages of 5, for every query head."""
    return by_query_head(snapkv(budget, window=64, kernel=5, pooling="avg"))


def pyramidkv_adakv(budget: Count, *, beta: AtLeastOne = 20.0, window: Size = 8, kernel: Odd = 7) -> Evict:
    """PyramidKV of AdaKV: whole steps, without a uniform branch for short prompts (D-42)."""
    policy = pyramidkv(budget, window=window, kernel=kernel)
    return dataclasses.replace(policy, layers=FloorPyramid(beta, uniform=False))


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


def ada_normalized(budget: Count, *, alpha: Proportion = 0.5, **options: Any) -> Evict:
    """Ada-SnapKV whose scores are scaled by what a head's best hold (D-26)."""
    return dataclasses.replace(ada_snapkv(budget, **options), heads=Normalized(Adaptive(alpha)))


def ada_pyramid_adakv(budget: Count, *, window: Size = 8, kernel: Odd = 7) -> Evict:
    """Ada-Pyramid of its code, of the first prompt that its class reads (D-25, D-42)."""
    policy = ada_released(budget, window=window, kernel=kernel)
    return dataclasses.replace(policy, layers=FloorPyramid(uniform=False))


# ------------------------------------------------------------------------------------------------ AhaKV


def ahakv_equation_5(budget: Count, *, recent: Amount = 32) -> Evict:
    """AhaKV as Eq. 5 has it: one row more votes than in Algorithm 1 (D-27)."""
    return _with_rows(ahakv(budget, recent=recent), last=recent + 1)


def ahakv_gain(budget: Count, *, k: Count | None = None, recent: Count = 32, **gain: Any) -> Evict:
    """AhaKV with another step gain: `apply="scaled"` (D-28), `floor=1.0` (D-29), `seen="cache"` (D-32).

    Args:
      budget, recent: as of `ahakv`.
      k: tokens whose entropy rows get; the budget if None.
      **gain: fields of `EntropyScaled`.
    """
    return _with_rows(ahakv(budget, recent=recent), softmax=EntropyScaled(budget if k is None else k, **gain))


def ahakv_prior(budget: Count, *, recent: Count = 32, kernel: Odd = 7, **prior: Any) -> Evict:
    """AhaKV with another prior: `target="score"`, as in Figure 3, or "both" (D-30); `each_step=True`.

    Args:
      budget, recent, kernel: as of `ahakv`.
      **prior: fields of `ValuePrior`.
    """
    return with_score(ahakv(budget, recent=recent, kernel=kernel), **prior)


def ahakv_without(part: Literal["gain", "recent", "prior"], budget: Count, **options: Any) -> Evict:
    """AhaKV without a part of it, its ablations: SGS, RA, and VPE, which is Algorithm 1 as it is printed (D-31).

    Args:
      part: "gain": the model's softmax; "recent": all rows vote; "prior": values do not count.
      budget, **options: as of `ahakv`.
    """
    policy = ahakv(budget, **options)
    if part == "prior":
        return dataclasses.replace(policy, score=Faded(_rows(policy)))
    return _with_rows(policy, softmax=None) if part == "gain" else _with_rows(policy, last=None)


# ------------------------------------------------------------------------------------------------ Keyformer


def keyformer_released(budget: Count, *, tau_delta: float = 0.01, **options: Any) -> Evict:
    """Keyformer whose temperature grows by a number a step (D-34)."""
    policy = keyformer(budget, **options)
    return _with_rows(policy, softmax=dataclasses.replace(_rows(policy).softmax, tau_delta=tau_delta))


def keyformer_share_batch(budget: Count, **options: Any) -> Evict:
    """Keyformer of its code, which has one score for all sequences of a batch (D-36)."""
    policy = keyformer(budget, **options)
    return dataclasses.replace(policy, score=OverBatch(_rows(policy)))


def keyformer_drawn(
    budget: Count,
    *,
    noise: Literal["gumbel", "gaussian", "constant", "none"] = "gumbel",
    per: Literal["call", "key"] = "call",
    **options: Any,
) -> Evict:
    """Keyformer with other noise: once for every key, as in Algorithm 1 (D-33), or an ablation's (D-38).

    Args:
      budget, **options: as of `keyformer`.
      noise: what is drawn; a constant changes no softmax.
      per: "call" draws for every row and key, as the code; "key" once for every key.
    """
    policy = keyformer(budget, **options)
    return _with_rows(policy, softmax=dataclasses.replace(_rows(policy).softmax, noise=noise, per=per))


def keyformer_mask(budget: Count, *, recent: Count = Share(0.3), softmax: Noisy = Noisy()) -> NextStepMask:
    """Keyformer's simulation, whose key set is frozen after the prompt (D-37)."""
    recent = Of(recent, budget)
    return NextStepMask(Combined("less", (budget, recent)), recent, Rows(softmax=softmax), True)


def keyformer_damped(budget: Count, *, damping: NonNegative, **options: Any) -> Evict:
    """Keyformer where rows that are read after the first eviction are damped (section 2.3.3's experiment)."""
    policy = keyformer(budget, **options)
    return dataclasses.replace(policy, score=Faded(_rows(policy), damping=damping))


# ------------------------------------------------------------------------------------------------ others


def fastgen_port(special: tuple[int, ...], punctuation: tuple[int, ...], **options: Any) -> FastGen:
    """FastGen of a released port: a set must leave entries as they are, and shares are rounded up (D-47)."""
    return FastGen(tuple(special), tuple(punctuation), by="entries", rounding="ceil", **options)


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
