"""The presses of kvpress 0.5.5 as compositions. `r` is the share that is removed, their `compression_ratio`.

A press that is not here is a method with the budget `kept(r)`, such as `methods.knorm(kept(r))`; its options are fields
of the score, `papers.with_score(methods.lagkv(kept(r)), cross=True)`. ThinKPress is `parts.ZeroChannels`,
StreamingLLMPress `factory.streaming_llm_factory(kept(r))`.
"""

import dataclasses
from typing import Annotated, Any

from kvjax.budgets import Adaptive, Combined, OfSeen, Schedule, Share
from kvjax.compose import when
from kvjax.compose.across import AcrossLayers, by_composites, by_top_scores
from kvjax.compose.evict import Evict
from kvjax.contract import Amount, AtLeastOne, Count, FrozenArrays, Layout, NonNegative, Odd, Policy, Proportion, Size
from kvjax.decide.select import AtLeast, Chunks, PerChunk
from kvjax.methods.keys import chunk_votes, compactor, expected_attention, kvzap
from kvjax.methods.position import random
from kvjax.methods.released.counts import FloorThenGlobal, InclusivePyramid, Truncated
from kvjax.methods.released.papers import PROMPT, with_score
from kvjax.methods.released.parts import KnownQueries, LazyBefore, PaddedChunkAttention, TwoStageAtLeast
from kvjax.methods.votes import finch, kvcompose, simlayerkv, snapkv
from kvjax.observe import Hidden, OfLayer, ProjectedValueNorm
from kvjax.pallas_kernels import kinds
from kvjax.pallas_kernels.kinds import ProportionBelowOne, numbers
from kvjax.scores.attention import Mean, Votes
from kvjax.scores.blends import LayerMean
from kvjax.scores.keys import Leverage
from kvjax.scores.learned import Predicted


def kept(r: ProportionBelowOne) -> Truncated:
    """The budget of a press: `int(n * (1 - r))` tokens (D-45)."""
    return Truncated(1 - r)


def cut_window(policy: Evict, window: Size) -> Evict:
    """The policy whose budgets cut windows that they do not hold down to the newest tokens, as kvpress does."""
    return dataclasses.replace(policy, recent=Combined("least", (window, Share(1.0))))


# ------------------------------------------------------------------------------------------------ attention


def kvpress_snapkv(r: Proportion, *, window: Size = 64, kernel: Odd = 5) -> Evict:
    """SnapKVPress. A budget that does not hold the window keeps the newest of it."""
    return cut_window(snapkv(kept(r), window=window, kernel=kernel, pooling="avg"), window)


def pyramidkv_kvpress(budget: int | float, *, beta: AtLeastOne = 20.0, window: Size = 64, kernel: Odd = 5) -> Evict:
    """PyramidKVPress by a budget, `1 - r`: windows are a part of every layer's share (D-43)."""
    share = budget if isinstance(budget, float) else None
    policy = cut_window(snapkv(budget, window=window, kernel=kernel, pooling="avg"), window)
    return dataclasses.replace(policy, layers=InclusivePyramid(beta, share))


def kvpress_tova(r: Proportion) -> Evict:
    """TOVAPress: the last token stays (D-08)."""
    return Evict(LayerMean(Votes(1)), kept(r), 0, 1)


def kvpress_observed_attention(r: Proportion) -> Evict:
    """ObservedAttentionPress: the mean attention of the prompt's rows."""
    return Evict(Mean(), kept(r))


def kvpress_finch(r: Proportion, *, window: Size, chunk: Size | None = None) -> Evict:
    """FinchPress, whose question has `window` tokens.

    Without `normalize_scores` it is `papers.with_rows(..., by_length=False)`, without `rerotate_keys` one of
    `layout=Layout()`.

    Args:
      r: the compression ratio.
      window: tokens of the question.
      chunk: tokens of a chunk; None reads the prompt as one.
    """
    policy = finch(kept(r), window=window, chunk=chunk)
    return policy if chunk is None else kvpress_chunk(policy, size=chunk)


def kvpress_simlayerkv(threshold: Proportion, *, sinks: Amount = 4, recent: Amount = 1024, rows: Size = 1) -> Evict:
    """SimLayerKVPress: attention counts to tokens before the voting rows, which are left out of what stays."""
    if recent <= rows:
        raise ValueError(f"recent={recent} tokens less the {rows} voting rows are none; raise recent")
    policy = simlayerkv(threshold, sinks=sinks, recent=recent - rows, rows=rows)
    return dataclasses.replace(policy, select=LazyBefore(threshold, sinks, recent, rows))


def kvpress_kvcompose(r: Proportion, *, window: Size, structured: bool = True) -> AcrossLayers:
    """KVComposePress, asked by the prompt's last `window` rows, beside which `1 - r` of the others stay.

    Without `structured`, kv heads compete, too.
    """
    share = Truncated(kept(r).share, Combined("less", (1.0, window)))
    policy = kvcompose(Combined("sum", (share, window)), window=window)
    by, heads = (by_composites, None) if structured else (by_top_scores, Adaptive(1.0))
    return AcrossLayers(dataclasses.replace(policy.policy, heads=heads), by, 1 / (1 - r))


# ------------------------------------------------------------------------------------------------ keys


def expected_attention_stats(
    budget: Count,
    mean: Annotated[Any, numbers("L", "N", "H")],
    covariance: Annotated[Any, numbers("L", "N", "H", "H")],
    *,
    horizon: Size = 512,
    sinks: Amount = 4,
    **options: Any,
) -> Evict:
    """ExpectedAttentionStatsPress by the moments "L N H" and "L N H H" of a model's queries before rotation."""
    queries = KnownQueries(horizon, sinks, moments=FrozenArrays({"mean": mean, "covariance": covariance}))
    policy = expected_attention(budget, horizon=horizon, sinks=sinks)
    return with_score(policy, queries=queries, **options)


def kvpress_leverage(r: Proportion, *, sketch: Size | None = 48) -> Evict:
    """LeverageScorePress; sketches are other draws."""
    return Evict(Leverage(sketch), kept(r))


def kvpress_non_causal(r: Proportion, *, chunk: Size = 256) -> Evict:
    """NonCausalAttnPress, which fills up the last chunk."""
    return Evict(chunk_votes(PaddedChunkAttention(chunk)), kept(r))


def kvpress_compactor(
    r: Proportion,
    *,
    chunk: Size = 256,
    sketch: Size | None = 48,
    sinks: Amount = 8,
    recent: Amount = 4,
    blend: NonNegative | None = None,
) -> Evict:
    """CompactorPress, which fills up the last chunk."""
    policy = compactor(kept(r), blend=r if blend is None else blend, sketch=sketch, sinks=sinks, recent=recent)
    score: Any = policy.score
    return with_score(policy, scores=(score.scores[0], chunk_votes(PaddedChunkAttention(chunk, sinks, recent))))


def kvpress_kvzap(r: Proportion, function: OfLayer) -> Evict:
    """KVzapPress: the prompt alone is evicted."""
    return dataclasses.replace(kvzap(kept(r), function, recent=0), when=PROMPT)


def kvpress_fastkvzip(
    r: Proportion, function: OfLayer, *, sinks: Amount = 4, recent: Count = Truncated(0.02), layerwise: bool = False
) -> Policy:
    """FastKVzipPress by a function such as `learned.SinkGates(numpy.load(file))`.

    Kv heads of all layers compete, with `layerwise` those of a layer. Of 32,000 tokens or more `recent` is 4096 there.
    """
    policy = Evict(Predicted(Hidden(function)), kept(r), sinks, recent, heads=Adaptive(1.0), layout=Layout(pool=True))
    return policy if layerwise else AcrossLayers(policy, by_top_scores, 1 / (1 - r))


# ------------------------------------------------------------------------------------------------ positions


def kvpress_random(r: Proportion) -> Evict:
    """RandomPress; draws are other ones."""
    return dataclasses.replace(random(kept(r)), recent=0, when=PROMPT)


# ------------------------------------------------------------------------------------------------ around presses


def kvpress_adakv(base: Evict, *, alpha: Proportion = 0.2) -> Evict:
    """AdaKVPress around a press (D-22): a share `alpha` of every head's budget is safe; the rest goes to the best."""
    return dataclasses.replace(base, heads=FloorThenGlobal(alpha), layout=dataclasses.replace(base.layout, pool=True))


def kvpress_critical_adakv(
    base: Evict, *, alpha: Proportion = 0.2, first: Proportion = 0.5, eps: NonNegative = 1e-4
) -> Evict:
    """CriticalAdaKVPress around a press: what the safeguard leaves a head is not ranked anew."""
    safe = Truncated(alpha, Share(1.0))
    policy = kvpress_adakv(base, alpha=alpha)
    return dataclasses.replace(policy, select=TwoStageAtLeast(ProjectedValueNorm(), first, eps, safe))


def kvpress_chunkkv(base: Evict, *, size: Size = 20) -> Evict:
    """ChunkKVPress around a press; tokens that the press protects stay, too."""
    share = base.budget if isinstance(base.budget, Truncated) else None
    return dataclasses.replace(base, select=Chunks(size, share))


def kvpress_chunk(base: Evict, *, size: Size) -> Evict:
    """ChunkPress around a press that scores every token by itself."""
    return dataclasses.replace(base, select=PerChunk(size, base.budget))


def kvpress_key_rerotation(base: Evict) -> Evict:
    """KeyRerotationPress around a press: tokens stand at their rank."""
    return dataclasses.replace(base, layout=dataclasses.replace(base.layout, positions="rank"))


def kvpress_decoding(base: Evict, *, interval: Size) -> Policy:
    """DecodingPress around a press: generated text alone is evicted, at every so many steps."""
    return when(Schedule(prefill=False, every=interval), base)


def kvpress_ratio_decoding(base: Evict, r: Proportion, *, interval: Size, most: Size) -> Evict:
    """CompressionRatioDecodingPress around a press: `1 - r` of all tokens so far stay, at most `most` of them."""
    return dataclasses.replace(base, budget=OfSeen(kept(r).share, most), when=Schedule(prefill=False, every=interval))


def kvpress_cam(base: Evict, *, interval: Size) -> Policy:
    """CAMPress around a press: heads keep the same tokens by their mean score; values are not merged."""
    return kvpress_decoding(dataclasses.replace(base, score=LayerMean(base.score)), interval=interval)


def kvpress_dms(base: Evict, threshold: float, *, recent: Count, decoding: bool = False) -> Evict:
    """DMSPress around a press, whose budget is the most that a head holds; `recent` is its sliding window."""
    schedule = Schedule(every=1) if decoding else PROMPT
    return dataclasses.replace(base, select=AtLeast(threshold), recent=recent, when=schedule)


kinds.doors(__name__)
