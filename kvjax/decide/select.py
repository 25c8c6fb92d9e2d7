"""Which slots stay, given a score for each and a budget for every head.

Scores have no gradient here, and are computed once: XLA may compute a float twice and round it differently, so that a
number taken from a score and compared with the same score may lose a token. A barrier stands before each comparison.
"""

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.contract import (
    LAST,
    Count,
    LayerInfo,
    NonNegative,
    Observation,
    Phase,
    Prompts,
    Proportion,
    Score,
    Select,
    Size,
    Slots,
    Tree,
    count,
    data,
    resolve,
)
from kvjax.observe import segment_sum


def best(score: Float[Array, "B K S"], pos: Int[Array, "B K S"], budgets: Int[Array, "B K"]) -> Bool[Array, "B K S"]:
    """The `budgets` best live slots of every head; of equal scores, the newer.

    The score and the position that so many slots reach are found by sorting, but on CPU bit by bit, which is faster
    there; a GPU would wait for the loop.

    Args:
      score: the larger, the better.
      pos: positions of the slots; those below 0 are not chosen.
      budgets: how many are chosen.
    """
    score = lax.stop_gradient(score)
    wide = score.dtype == jnp.float64
    kind, bits_each = (jnp.uint64, 64) if wide else (jnp.uint32, 32)
    sign, score = jnp.ones((), kind) << (bits_each - 1), score if wide else score.astype(jnp.float32)
    bits = lax.bitcast_convert_type(jnp.where(score == 0, jnp.zeros_like(score), score), kind)  # -0.0 is 0.0
    bits = lax.optimization_barrier(jnp.where(bits >= sign, ~bits, bits ^ sign))  # in the order of the scores
    higher = lambda i, bar: bar | (sign >> jnp.asarray(i, kind))
    count = lambda slots: slots.sum(-1, dtype=jnp.int32)
    chosen, among, left = jnp.zeros_like(pos, bool), pos >= 0, jnp.maximum(budgets, 0)
    for key in (bits, pos.astype(kind)):  # positions decide between equal scores
        full = lambda bar, key=key, among=among, left=left: count(among & (key >= bar[..., None])) >= left
        raised = lambda i, bar, full=full: jnp.where(full(higher(i, bar)), higher(i, bar), bar)
        bits_left = jnp.where((count(among) > left).any(), bits_each, 0)
        by_bits = lambda *_, n=bits_left, f=raised: lax.fori_loop(0, n, f, jnp.zeros(pos.shape[:2], kind))[..., None]
        at = jnp.clip(pos.shape[-1] - left, 0, pos.shape[-1] - 1)[..., None]
        sorting = lambda key, at: jnp.take_along_axis(jnp.sort(key), at, -1)
        bar = lax.platform_dependent(jnp.where(among, key, 0), at, cpu=by_bits, default=sorting)
        above = among & (key > bar)
        chosen, among, left = chosen | above, among & (key == bar), left - count(above)
    return chosen | (among & (left > 0)[..., None])


def all_but_worst(
    score: Float[Array, "B K S"], pos: Int[Array, "B K S"], budgets: Int[Array, "B K"]
) -> Bool[Array, "B K S"]:
    """All live slots but the worst of every head that exceeds its budget; of equal scores, the older goes.

    The same as `best` where no head exceeds its budget by more than one token, without looking for a bar.
    """
    live = pos >= 0
    score = jnp.where(live, lax.stop_gradient(score), jnp.inf)
    score, pos = lax.optimization_barrier((score, pos))  # which are compared with themselves
    lowest = (pos >= 0) & (score == score.min(-1, keepdims=True))
    worst = pos == jnp.where(lowest, pos, LAST).min(-1, keepdims=True)
    return live & ~(worst & (live.sum(-1) > budgets)[..., None])


class TopK(Select):
    """The slots with the highest scores."""

    def __call__(self, score: Float[Array, "B K S"], budgets: Int[Array, "B K"], slots: Slots) -> Bool[Array, "B K S"]:
        choose = all_but_worst if slots.at_most_one else best
        return choose(jnp.where(slots.protected, jnp.inf, score), slots.kv.pos, budgets)


class AtLeast(Select):
    """The slots with the highest scores, without those below a threshold (KVzap, arXiv 2601.07891).

    Attributes:
      threshold: the lowest score that stays, in the units of the score.
    """

    threshold: float

    def __call__(self, score: Float[Array, "B K S"], budgets: Int[Array, "B K"], slots: Slots) -> Bool[Array, "B K S"]:
        safe = slots.protected
        return best(jnp.where(safe, jnp.inf, score), slots.kv.pos, budgets) & (safe | (score >= self.threshold))


class ThenRandom(Select):
    """The best slots, then a draw without replacement by the softmax of scores (NaCl, arXiv 2408.03675, section 3.3).

    Attributes:
      random: how many tokens of the budget are drawn.
      shared: whether all heads draw the same numbers.
      first: what the best slots are the best by; None for the scores that the draw is by.
      less_recent: whether so many fewer are drawn as there are last tokens that stay.
    """

    random: Count = count()
    shared: bool = False
    first: Score | None = None
    less_recent: bool = False

    def __call__(self, score: Float[Array, "B K S"], budgets: Int[Array, "B K"], slots: Slots) -> Bool[Array, "B K S"]:
        kv, safe = slots.kv, slots.protected
        free = jnp.maximum(budgets - safe.sum(-1), 0)
        random = slots.hparams.random
        random = jnp.maximum(random - slots.ctx.hparams.recent, 0) if self.less_recent else random
        random = jnp.where(kv.num_live > budgets, jnp.minimum(random[:, None], free), 0)
        first = best(jnp.where(safe, jnp.inf, self.rank(score, slots)), kv.pos, budgets - random)
        return first | best(self.drawn(score, slots), jnp.where(self.pool(first, slots), kv.pos, -1), random)

    def rank(self, score: Float[Array, "B K S"], slots: Slots) -> Float[Array, "B K S"]:
        """What the best slots are the best by; what no row to come can read is the worst by any rank."""
        return score if self.first is None else jnp.where(score > -1e37, self.first(slots.of("first")), score)

    def pool(self, first: Bool[Array, "B K S"], slots: Slots) -> Bool[Array, "B K S"]:
        """The slots that are drawn from: what is neither protected nor among the best."""
        return slots.candidates & ~first

    def drawn(self, score: Float[Array, "B K S"], slots: Slots) -> Float[Array, "B K S"]:
        """Scores with Gumbel noise: the best of them are a draw by their softmax."""
        u = jnp.clip(slots.ctx.uniform(slots.kv.pos, self.shared), 1e-7, 1 - 1e-7)
        return score - jnp.log(-jnp.log(u))


class TwoStage(Select):
    """The best slots by score, then the best of the rest by score times a weight (CriticalKV, arXiv 2502.03805).

    Attributes:
      weight: the observation "B K S" that gives the weights.
      first: the share of the budget that is filled by score alone, one token at least unless it is 0.
      eps: what is added to scores before they are weighed.
    """

    weight: Observation
    first: Proportion = 0.5
    eps: NonNegative = 1e-4

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (self.weight,)

    def __call__(self, score: Float[Array, "B K S"], budgets: Int[Array, "B K"], slots: Slots) -> Bool[Array, "B K S"]:
        safe = slots.protected
        first = best(jnp.where(safe, jnp.inf, score), slots.kv.pos, self._filled(budgets, slots))
        return best(jnp.where(first | safe, jnp.inf, self.weighed(score, slots)), slots.kv.pos, budgets)

    def weighed(self, score: Float[Array, "B K S"], slots: Slots) -> Float[Array, "B K S"]:
        """The scores of the second stage."""
        return (score + self.eps) * slots.stats[self.weight]

    def _filled(self, budgets: Int[Array, "B K"], slots: Slots) -> Int[Array, "B K"]:
        """How many tokens the first stage fills."""
        size = jnp.floor(budgets.astype(jnp.float32) * self.first + 1e-6).astype(jnp.int32)
        return jnp.minimum(jnp.maximum(size, int(self.first > 0)), budgets)


class Chunks(Select):
    """Whole chunks of neighbouring tokens, the same in all kv heads (ChunkKV, arXiv 2502.00299).

    Chunks with protected tokens come first, then those with the highest mean score. They are chunks of the prompt: this
    does not evict while decoding.

    Attributes:
      size: tokens of a chunk.
      share: how many chunks stay, a count of their number, where it gave the budget too; None for the budget's share of
        the tokens. The two differ where the budget was rounded to whole tokens.
    """

    size: Size = 20
    share: Count | None = data(default=None)

    @property
    def slack(self) -> int:
        return self.size

    def hparams(self, info: LayerInfo, lengths: Prompts, budget: Prompts) -> PyTree:
        num = -(-lengths // self.size)
        wanted = num * budget // np.maximum(lengths, 1)
        if self.share is not None:
            asked = np.maximum(resolve(self.share, lengths), 1)
            wanted = np.where(budget == asked, resolve(self.share, num), wanted)
        return Tree(wanted=jnp.asarray(wanted, jnp.int32), budget=jnp.asarray(budget, jnp.int32))

    def __call__(self, score: Float[Array, "B K S"], budgets: Int[Array, "B K"], slots: Slots) -> Bool[Array, "B K S"]:
        kv, ctx, safe = slots.kv, slots.ctx, slots.protected
        _refuse_decode(slots)
        num = -(-ctx.width // self.size)  # no prompt has more chunks
        chunk = jnp.where(kv.live, kv.pos // self.size, num)
        by_chunk = lambda x: segment_sum(x, chunk, num)
        tokens, held = by_chunk(kv.live.astype(jnp.int32)), by_chunk((kv.live & safe).astype(jnp.int32))
        total = jnp.maximum(tokens.sum(1), 1).astype(jnp.float32)
        mean = jnp.where(tokens.sum(1) > 0, by_chunk(jnp.where(kv.live, score, 0.0)).sum(1) / total, -jnp.inf)
        rank = jnp.argsort(jnp.lexsort((-mean, -held.sum(1).astype(jnp.float32) / total)), axis=-1)
        # How many chunks stay: their share, as long as no head exceeds its budget by a whole chunk.
        budget, exist, live = budgets.min(-1), (tokens.sum(1) > 0).sum(-1), kv.num_live.max(-1)
        part = jnp.floor(exist.astype(jnp.float32) * (budget / jnp.maximum(live, 1)) + 1e-5).astype(jnp.int32)
        known = (live == ctx.prompt_length) & (budget == slots.hparams.budget)
        wanted = jnp.maximum(jnp.where(known, slots.hparams.wanted, part), 1)
        order = jnp.broadcast_to(rank[:, None], tokens.shape)
        ordered = jnp.put_along_axis(jnp.zeros_like(tokens), order, tokens - held, -1, inplace=False)
        grown = jnp.cumsum(ordered, -1) + held.sum(-1, keepdims=True)
        fits = (grown <= (budget + self.size - 1)[:, None, None]).all(1).sum(-1)
        kept = rank < jnp.where(live <= budget, exist, jnp.minimum(wanted, fits))[:, None]
        kept = jnp.broadcast_to((kept & (tokens.sum(1) > 0))[:, None], tokens.shape)
        return kv.live & (safe | jnp.take_along_axis(kept, jnp.minimum(chunk, num - 1), -1))


class EntropyChunks(Select):
    """Chunks of neighbouring tokens, the same in all kv heads, of which good but uneven ones keep their best tokens.

    EntropyGatedChunkKVPress of kvpress 0.5.5. Chunks go by the mean of scores that are summed over heads, the best
    first, until the budget is used up. One whose mean is the median or more, and the entropy of whose scores, divided
    by the logarithm of its size, is below the median, keeps `rescue` tokens alone. Of an even number the median is the
    lower one. What then is left of the budget goes to the best of the other tokens. What is protected stays, and counts
    as the layer's best score. Chunks are of the prompt: this does not evict while decoding.

    Attributes:
      size: tokens of a chunk.
      rescue: how many tokens an uneven chunk keeps; fewer than `size`.

    Raises:
      ValueError: `rescue` is no less than `size`.
    """

    size: Size = 10
    rescue: Size = 4

    def __post_init__(self):
        if self.rescue >= self.size:
            raise ValueError(
                f"rescue={self.rescue} tokens of a chunk of size={self.size} are all of it; give rescue less than size"
            )

    def __call__(self, score: Float[Array, "B K S"], budgets: Int[Array, "B K"], slots: Slots) -> Bool[Array, "B K S"]:
        kv, width, size = slots.kv, slots.ctx.width, min(self.size, slots.ctx.width)
        _refuse_decode(slots)
        by_token = lambda x, num=-(-width // size) * size: segment_sum(x, jnp.where(kv.live, kv.pos, num), num).sum(1)
        chunked = lambda x: x.reshape(len(x), -1, size)
        top = jnp.where(slots.candidates, score, -jnp.inf).max((1, 2), keepdims=True)
        s = jnp.clip(jnp.where(slots.protected & jnp.isfinite(top), top, score), -1e33, 1e33)  # whose sums are finite
        s, exist, safe = (chunked(by_token(x)) for x in (s, kv.live.astype(s.dtype), slots.protected.astype(s.dtype)))
        exist, safe = exist > 0, safe > 0
        n = exist.sum(-1).astype(jnp.float32)
        s, mean = lax.optimization_barrier((s, jnp.where(n > 0, s.sum(-1) / jnp.maximum(n, 1), -jnp.inf)))
        entropy = lax.optimization_barrier(jnp.where(n > 0, _evenness(s, exist, n), jnp.inf))
        half = jnp.maximum((n > 0).sum(-1, keepdims=True) - 1, 0) // 2
        middle = lambda x, dead: jnp.take_along_axis(jnp.sort(jnp.where(n > 0, x, dead), -1), half, -1)
        uneven = (mean >= middle(mean, jnp.inf)) & (entropy < middle(entropy, jnp.inf))
        late = lax.broadcasted_iota(jnp.int32, s.shape, 2)
        place = _places((-late, -s, ~safe, ~exist))
        first = exist & (safe | (place < jnp.where(uneven, min(self.rescue, size), size)[..., None]))
        turn = _places((-lax.broadcasted_iota(jnp.int32, mean.shape, 1), -mean))[..., None]
        keys = -late, jnp.where(first, place.astype(s.dtype), -s), jnp.where(first, turn, turn.shape[1]), ~safe
        order = _places([x.reshape(len(x), -1) for x in keys])
        rank = jnp.take_along_axis(order[:, None], jnp.clip(kv.pos, 0, order.shape[-1] - 1).reshape(len(s), 1, -1), -1)
        return best(jnp.where(slots.protected, 1, -rank.reshape(kv.pos.shape)), kv.pos, budgets)


def _evenness(s: Float[Array, "B C W"], exist: Bool[Array, "B C W"], n: Float[Array, "B C"]) -> Float[Array, "B C"]:
    """The entropy of each chunk's scores, less the lowest if that is below 0: 1 if all are equal, 0 of a single one."""
    low = jnp.minimum(jnp.where(exist, s, 0).min(-1, keepdims=True), 0)
    shares = jnp.where(exist, s - low, 0)
    shares = shares / (shares.sum(-1, keepdims=True) + 1e-8)
    entropy = -(shares * jnp.log(shares + 1e-8)).sum(-1)
    return jnp.where(n > 1, jnp.clip(entropy / jnp.log(jnp.maximum(n, 2)), 0, 1), 0)


def _places(keys: Sequence[Array]) -> Int[Array, "*n L"]:
    """The place of every entry in an order, by the last key first."""
    return jnp.argsort(jnp.lexsort(keys, axis=-1), axis=-1)


def _refuse_decode(slots: Slots) -> None:
    if slots.ctx.phase == "decode":
        raise ValueError("chunks are of the prompt; use Schedule(), which does not evict while decoding")


class PerChunk(Select):
    """The best slots of every chunk of the text, the same share of each (FINCH, Corallo and Papotti, TACL 12).

    Every chunk keeps one token at least. Where that is more than the budget, the worst of all chunks go.

    Attributes:
      size: tokens of a chunk.
      share: how many tokens of a chunk stay, a count of its length; None for the budget's share of the tokens.
    """

    size: Size
    share: Count | None = None

    def __call__(self, score: Float[Array, "B K S"], budgets: Int[Array, "B K"], slots: Slots) -> Bool[Array, "B K S"]:
        kv, safe = slots.kv, slots.protected
        chunk = jnp.where(kv.live, kv.pos // self.size, LAST)
        order = jnp.lexsort((-kv.pos, -jnp.where(safe, jnp.inf, score), chunk), axis=-1)
        place, length = _runs(jnp.take_along_axis(chunk, order, -1))
        share = (budgets / jnp.maximum(kv.num_live, 1))[..., None]
        wanted = jnp.floor(length.astype(jnp.float32) * share + 1e-5).astype(jnp.int32)
        if self.share is not None:
            table = jnp.asarray(resolve(self.share, np.arange(self.size + 1)), jnp.int32)
            whole = (kv.num_live == slots.ctx.prompt_length[:, None])[..., None]
            wanted = jnp.where(whole, table[jnp.minimum(length, self.size)], wanted)
        mine = place < jnp.maximum(wanted, 1)
        chosen = jnp.put_along_axis(jnp.zeros_like(kv.live), order, mine, -1, inplace=False)
        stays = kv.live & (chosen | safe | (kv.num_live <= budgets)[..., None])
        return best(jnp.where(safe, jnp.inf, score), jnp.where(stays, kv.pos, -1), budgets)


class Pages(Select):
    """Whole pages of neighbouring positions go, as engines free them.

    A head's pages stay in the order of their worth, those of protected tokens first, up to the first one that its
    budget does not hold: so it keeps up to a page less than its budget. Of a page that goes, protected tokens stay.
    Where all heads are to free the same pages, `kvjax.shared_heads` gives them one score.

    Attributes:
      size: positions of a page; engines have 16 to 64.
      worth: of the scores of a page's live tokens the "best", the "mean", or that of the "newest" token.

    Raises:
      ValueError: where tokens are to go, a budget in tokens that holds no page beside protected tokens. A share of a
        prompt so short keeps it whole.
    """

    size: Size = 16
    worth: Literal["best", "mean", "newest"] = "mean"

    @property
    def page(self) -> int:
        return self.size

    def __call__(self, score: Float[Array, "B K S"], budgets: Int[Array, "B K"], slots: Slots) -> Bool[Array, "B K S"]:
        kv, safe, S = slots.kv, slots.protected, score.shape[-1]
        page = jnp.where(kv.live, kv.pos // self.size, LAST)
        take, index = lambda x, at: jnp.take_along_axis(x, at, -1), lax.broadcasted_iota(jnp.int32, score.shape, 2)
        by_page = jnp.lexsort((kv.pos, score if self.worth == "best" else kv.pos, page), axis=-1)
        page, score, alone = take(page, by_page), take(score, by_page), take(safe & kv.live, by_page)
        place, length = _runs(page)
        segment = jnp.cumsum(place == 0, -1, dtype=jnp.int32) - 1
        total = lambda x: take(segment_sum(x, segment, S), segment)  # of each token's page
        last = take(score, index - place + length - 1)  # of its page, by position or by score
        worth = total(score) / length.astype(score.dtype) if self.worth == "mean" else last
        order = jnp.lexsort((-page, -worth, total(alone.astype(jnp.int32)) == 0), axis=-1)
        place, length = _runs(take(page, order))
        others = jnp.cumsum(take(~alone & (page < LAST), order), -1, dtype=jnp.int32)
        held = take(others, index - place + length - 1) + alone.sum(-1, keepdims=True)
        back = jnp.argsort(take(by_page, order), axis=-1)
        return kv.live & (safe | take(held <= budgets[..., None], back))


def _runs(x: Int[Array, "B K S"]) -> tuple[Int[Array, "B K S"], Int[Array, "B K S"]]:
    """For every entry of sorted rows: its place among equal entries, and how many these are."""
    place, edge = lax.broadcasted_iota(jnp.int32, x.shape, 2), jnp.ones_like(x[..., :1], bool)
    begins = jnp.concatenate([edge, x[..., 1:] != x[..., :-1]], axis=-1)
    ends = jnp.concatenate([begins[..., 1:], edge], axis=-1)
    first = lax.cummax(jnp.where(begins, place, 0), axis=2)
    last = lax.cummin(jnp.where(ends, place, x.shape[-1]), axis=2, reverse=True)
    return place - first, last - first + 1


class LazyOrAll(Select):
    """The protected slots alone in lazy layers, the whole budget in the others (SimLayerKV).

    Zhang et al., arXiv 2410.13846.

    Attributes:
      threshold: a layer is lazy if protected slots have more than this share of the attention, the mean over heads.
    """

    threshold: Proportion

    def __call__(self, score: Float[Array, "B K S"], budgets: Int[Array, "B K"], slots: Slots) -> Bool[Array, "B K S"]:
        safe = slots.protected
        mass = jnp.where(self.counted(slots), score, 0.0).sum(-1).mean(1)
        kept = best(jnp.where(safe, jnp.inf, score), slots.kv.pos, budgets)
        return jnp.where((mass > self.threshold)[:, None, None], safe & slots.kv.live, kept)

    def counted(self, slots: Slots) -> Bool[Array, "B K S"]:
        """The slots whose attention is counted."""
        return slots.protected & slots.kv.live
