"""Methods where the end of the prompt votes, or the prompt itself when it is repeated."""

import dataclasses
from typing import Literal

import numpy as np

from kvjax.budgets import Adaptive, HeadShares, LayerShares, Pyramid, Schedule
from kvjax.compose.across import AcrossLayers, Preference, ScoreEntropy, Temperature, by_composites, by_top_scores
from kvjax.compose.evict import Evict
from kvjax.contract import Amount, AtLeastOne, Cosine, Count, Layout, NonNegative, Odd, Proportion, Size
from kvjax.decide.rewrite import Match, Merge, Reference, ReferenceAttention
from kvjax.decide.select import Chunks, EntropyChunks, LazyOrAll, PerChunk, TopK, TwoStage
from kvjax.observe import ProjectedValueNorm, Reread, Rows
from kvjax.pallas_kernels.kinds import HeadTable
from kvjax.scores.attention import Accumulated, Repeated, Votes
from kvjax.scores.blends import Blend, LayerMean, Pooled, ValueWeighted
from kvjax.scores.rows import Defensive, OutputChange, Peak, Unsteady


def snapkv(budget: Count, *, window: Size = 32, kernel: Odd = 7, pooling: Literal["max", "avg"] = "max") -> Evict:
    r"""Keeps what the end of the prompt attends to, with its surroundings (SnapKV, Li et al., arXiv 2404.14469).

    $S_j = \mathrm{pool}(\frac1w \sum_{i > n - w} p_{ij})$ over the last $w$ rows. The window stays, and so do all
    generated tokens.

    Args:
      budget: live tokens a kv head and layer after the prompt, the window included.
      window: last rows, which vote and stay.
      kernel: width of the pooling; 1 does not pool.
      pooling: its kind.
    """
    return Evict(Pooled(Votes(window), pooling, kernel), budget, 0, window)


def pyramidkv(budget: Count, *, beta: AtLeastOne = 20.0, window: Size = 8, kernel: Odd = 7) -> Evict:
    r"""Gives SnapKV budgets that fall from the first layer to the last (PyramidKV, Cai et al., arXiv 2406.02069).

    Beside its window the last layer has $b / \beta$ tokens, the first $2 b - b / \beta$, with $b$ the average.

    Args:
      budget: live tokens a kv head and layer on average, the window included.
      beta: steepness; 1 is SnapKV.
      window: last rows, which vote and stay.
      kernel: width of the pooling.
    """
    return dataclasses.replace(snapkv(budget, window=window, kernel=kernel), layers=Pyramid(beta))


def ada_snapkv(budget: Count, *, alpha: Proportion = 0.5, window: Size = 32, kernel: Odd = 7) -> Evict:
    r"""Lets the heads of SnapKV compete for their layer's budget (Ada-KV, Feng et al., arXiv 2407.11550).

    Of a layer's best scores a head holds $B_i$; it gets $\alpha B_i + (1 - \alpha) b$ tokens (Algorithm 1).

    Args:
      budget: live tokens a kv head and layer on average, the window included.
      alpha: weight of the competition.
      window: last rows, which vote and stay.
      kernel: width of the pooling.
    """
    policy = snapkv(budget, window=window, kernel=kernel)
    return dataclasses.replace(policy, heads=Adaptive(alpha), layout=Layout(pool=True))


def ada_pyramid(
    budget: Count, *, alpha: Proportion = 0.5, beta: AtLeastOne = 20.0, window: Size = 8, kernel: Odd = 7
) -> Evict:
    """Lets the heads of PyramidKV compete for their layer's budget (Ada-KV, Feng et al., arXiv 2407.11550).

    Args:
      budget: live tokens a kv head and layer on average, the window included.
      alpha: weight of the competition.
      beta: steepness of the pyramid.
      window: last rows, which vote and stay.
      kernel: width of the pooling.
    """
    policy = ada_snapkv(budget, alpha=alpha, window=window, kernel=kernel)
    return dataclasses.replace(policy, layers=Pyramid(beta))


def headkv(
    budget: Count, importance: HeadTable, *, beta: AtLeastOne = 1.2, window: Size = 32, kernel: Odd = 7
) -> Evict:
    r"""Gives more of SnapKV's budget to heads that retrieve and reason (HeadKV, Fu et al., arXiv 2410.19258).

    Beside its window every head has $b - b / \beta$ tokens; the rest of the model's budget goes by importance.

    Args:
      budget: live tokens a kv head and layer on average, the window included.
      importance: "L K", not negative; only ratios matter.
      beta: 1 divides everything by importance, large values are SnapKV.
      window: last rows, which vote and stay.
      kernel: width of the pooling.
    """
    given = np.asarray(importance, np.float64)
    if given.ndim != 2 or not (given >= 0).all() or not given.sum() > 0:
        raise ValueError(
            f"importance is of shape {given.shape} and adds up to {given.sum()}; give a number for every layer and kv "
            "head, none below 0 and one at least above"
        )
    weights = given / np.mean(given) / beta + 1 - 1 / beta
    table = tuple(map(tuple, weights.tolist()))
    layers, heads = LayerShares(tuple(weights.sum(1).tolist())), HeadShares(table)
    policy = snapkv(budget, window=window, kernel=kernel)
    return dataclasses.replace(policy, layers=layers, heads=heads, layout=Layout(pool=True))


def criticalkv(base: Evict, *, first: Proportion = 0.5, eps: NonNegative = 1e-4) -> Evict:
    r"""Corrects a policy's choice by what values add to the layer's output (CriticalKV, Feng et al., arXiv 2502.03805).

    The first stage keeps the best by the score of `base`; the second ranks the rest by $(S_j + \epsilon) \lVert v_j W_O
    \rVert_1$ (Algorithm 1).

    Args:
      base: the policy whose score, budget and protected tokens are used, such as `snapkv(512)`.
      first: share of the budget that the first stage fills.
      eps: $\epsilon$.
    """
    return dataclasses.replace(base, select=TwoStage(ProjectedValueNorm(), first, eps))


def chunkkv(base: Evict, *, size: Size = 20) -> Evict:
    """Keeps whole chunks of text, the same in all kv heads, by another policy's score (ChunkKV, arXiv 2502.00299).

    A chunk's score is the mean over its tokens and over heads (Liu et al.). As large a share of the chunks stays as the
    budget is of the prompt, one at least.

    Args:
      base: the policy whose score, budget and protected tokens are used, such as `snapkv(512)`.
      size: tokens of a chunk.
    """
    return dataclasses.replace(base, select=Chunks(size, base.budget if isinstance(base.budget, float) else None))


def entropy_chunkkv(base: Evict, *, size: Size = 10, rescue: Size = 4) -> Evict:
    """Keeps chunks of text by another policy's score, of uneven ones the best tokens (EntropyGatedChunkKV of kvpress).

    A chunk is uneven if it is among the better half and the entropy of its scores among the lower one. What it does not
    take buys further chunks, then single tokens: heads keep the same tokens, exactly the budget.

    Args:
      base: the policy whose score, budget and protected tokens are used, such as `snapkv(512)`.
      size: tokens of a chunk.
      rescue: tokens that an uneven chunk keeps; fewer than `size`.
    """
    return dataclasses.replace(base, select=EntropyChunks(size, rescue))


def finch(budget: Count, *, window: Size = 32, chunk: Size | None = None) -> Evict:
    r"""Keeps what the question at the end attends to, moved together (FINCH, Corallo and Papotti, TACL 12, 2024).

    $S_j = \sum_{i > n - w} n_i p_{ij}$ over the $w$ tokens of the question, $n_i$ being the number of tokens before row
    $i$. The question stays; tokens stand at their rank.

    Args:
      budget: live tokens a kv head and layer, the question included.
      window: tokens of the question.
      chunk: every chunk of so many tokens keeps its own share; None for one choice among all.
    """
    share = budget if isinstance(budget, float) else None
    select = TopK() if chunk is None else PerChunk(chunk, share)
    score = Accumulated(Rows(window, by_length=True))
    return Evict(score, budget, 0, window, select=select, layout=Layout(positions="rank"))


def simlayerkv(threshold: Proportion, *, sinks: Amount = 4, recent: Amount = 1024, rows: Size = 1) -> Evict:
    """Keeps the first and last tokens alone in lazy layers, which look at nothing else (SimLayerKV, arXiv 2410.13846).

    A layer is lazy if the prompt's last `rows` rows give those tokens more than `threshold` of their attention, on
    average over rows and heads (Zhang et al., section 3.2).

    Args:
      threshold: 0.9 for Llama 3, 0.65 for Llama 2, 0.8 for Mistral, 0.85 for Qwen.
      sinks, recent: first and last tokens.
      rows: last rows of the prompt, which decide.
    """
    return Evict(Votes(rows), 1.0, sinks, recent, select=LazyOrAll(threshold))


def cake(
    budget: Count,
    *,
    window: Size = 32,
    kernel: Odd = 5,
    variance: NonNegative = 200.0,
    entropy: Temperature = 1.6,
    shift: Temperature = 0.6,
) -> AcrossLayers:
    r"""Divides the budget over layers by what their attention asks for; unsteady tokens stay (CAKE, arXiv 2503.12491).

    $S = \mathrm{avgpool}(\mu + \gamma \sigma^2)$ over the window's rows. A layer gets tokens in proportion to
    $H^{1/\tau_1} V^{1/\tau_2}$, the entropy and the variance of these rows (Qin et al.).

    Args:
      budget: live tokens a kv head and layer on average, the window included.
      window: last rows, which vote and stay.
      kernel: width of the pooling.
      variance: $\gamma$.
      entropy, shift: $\tau_1$ and $\tau_2$, tuned in the paper for every model.
    """
    policy = Evict(Pooled(Unsteady(window, variance), "avg", kernel), budget, 0, window)
    return AcrossLayers(policy, Preference(window, entropy, shift))


def lava(budget: Count, *, window: Size = 32, kernel: Odd = 7) -> AcrossLayers:
    r"""Compares heads and layers by votes times the head's largest value (LAVa, Shen et al., arXiv 2509.09754).

    $S_j = \max_g \mathrm{maxpool}(\bar p)_j \cdot \max_i \lVert v_i\rVert_1$ with $\bar p$ the mean attention of the
    window. Heads compete within a layer; layers get tokens in proportion to the entropy of their scores.

    Args:
      budget: live tokens a kv head and layer on average, the window included.
      window: last rows, which vote and stay.
      kernel: width of the pooling.
    """
    score = ValueWeighted(Pooled(Votes(window, "max"), "max", kernel), "largest")
    policy = Evict(score, budget, 0, window, heads=Adaptive(1.0), layout=Layout(pool=True))
    return AcrossLayers(policy, ScoreEntropy())


def defensivekv(budget: Count, *, window: Size = 32, kernel: Odd = 5, mass: Proportion = 0.9) -> Evict:
    """Keeps what any row of the window attends to, as importance may not last (DefensiveKV, arXiv 2510.13334).

    A token's score is the most that any row and query head gives it, at least its head's mean, times the share of its
    value in the output; what holds `mass` of the attention comes first (Feng et al.). Heads compete for their layer's
    budget.

    Args:
      budget: live tokens a kv head and layer on average, the window included.
      window: last rows, which vote and stay.
      kernel: every row is averaged over so many neighbours.
      mass: the share of a head's attention whose tokens come first.
    """
    score = Defensive(budget, window, kernel, mass)
    return Evict(score, budget, 0, window, heads=Adaptive(1.0), layout=Layout(pool=True))


def layer_defensivekv(budget: Count, *, window: Size = 32, kernel: Odd = 5, mass: Proportion = 0.9) -> AcrossLayers:
    """Lets all layers of DefensiveKV compete for the model's budget, by one top-k of scores (arXiv 2510.13334).

    No layer gets more than twice the average.

    Args:
      budget: live tokens a kv head and layer on average, the window included.
      window, kernel, mass: as of `defensivekv`.
    """
    policy = defensivekv(budget, window=window, kernel=kernel, mass=mass)
    return AcrossLayers(policy, by_top_scores)


def kvcompose(budget: Count, *, window: Size = 32) -> AcrossLayers:
    r"""Lets layers compete by composite tokens, the n-th best of each head as one (KVCompose, arXiv 2509.05165).

    $S_j$ is the mean over query heads of $\max_i p_{ij}$ over the last $w$ rows, plus its mean over kv heads. A
    composite token scores the mean over heads; no layer gets more than twice the average.

    Args:
      budget: live tokens a kv head and layer on average, the window included.
      window: last rows, which ask and stay.
    """
    own = Peak(window)
    return AcrossLayers(Evict(Blend((own, LayerMean(own)), (1.0, 1.0)), budget, 0, window), by_composites)


def dropkv(budget: Count, *, window: Size = 32, kernel: Odd = 7, buffer: Size | None = None) -> Evict:
    r"""Keeps the tokens without which outputs of the last rows would change most (DropKV, kvpress pull 285).

    $S_j = \mathrm{avgpool}(\sum_{i > n - w} (p_{ij} / (1 - p_{ij}))^2 \lVert v_j - o_i \rVert^2)$ with $o_i$ the output
    of row $i$: the exact change if token $j$ goes alone.

    Args:
      budget: live tokens a kv head and layer, the window included.
      window: last rows, whose outputs count and which stay.
      kernel: width of the pooling; 1 does not pool.
      buffer: generated tokens by which a cache grows before it is cut; None evicts after the prompt alone.
    """
    score = Pooled(OutputChange(window, prompt_only=buffer is None), "avg", kernel)
    return Evict(score, budget, 0, window, when=Schedule(over=buffer))


def kvzip(budget: Count, how: Reread = Reread()) -> Evict:
    r"""Keeps what the model attends to while it repeats the prompt (KVzip, Kim et al., arXiv 2505.23416).

    $S_j = \max_{i, g} p_{ij}$ over the rows that repeat the chunk of token $j$, under a softmax over the chunk, the
    sinks and the rows so far (section 3). Heads compete for their layer's budget.

    Args:
      budget: live tokens a kv head and layer on average, sinks included.
      how: how the prompt is repeated; `kvjax.text.encode.repeating(tokenizer)` does as the released code. With `plus`
        the method is KVzip+ (arXiv 2601.07891). Its sinks stay; after them, what is in no chunk goes first.
    """
    sinks = min(how.sinks, budget) if isinstance(budget, int) else how.sinks
    return Evict(Repeated(how), budget, sinks, heads=Adaptive(1.0), layout=Layout(pool=True))


def attention_matching(budget: Count, *, rows: Size = 256, sinks: Amount = 4) -> Evict:
    """Keeps the most attended keys, with weights and values that answer as the full cache did (arXiv 2602.16284).

    Least squares over the prompt's last rows find the weight that every kept key has in the softmax, then its value:
    the smallest changes, where few rows leave some open. Of a sliding window, what the next row reads counts.

    Args:
      budget: live tokens a kv head and layer, sinks included.
      rows: last rows of the prompt, whose answers are matched.
      sinks: first tokens that stay.
    """
    reference = Reference(rows)
    return Evict(ReferenceAttention(reference), budget, sinks, rewrite=Match(reference))


def merging(base: Evict, *, threshold: Cosine = 0.0, fraction: Proportion = 1.0) -> Evict:
    """Merges the values that a policy evicts into those that it keeps (kvpress, after D2O, arXiv 2406.13035).

    Args:
      base: the policy that evicts.
      threshold: values merge where the cosine of their keys is at least this.
      fraction: the share of the evicted values that merge, those of the most similar keys.
    """
    return dataclasses.replace(base, rewrite=Merge(threshold, fraction))
