"""The released EasyKV's modes and sizes, for every importance it knows (D-05, D-09, D-11 to D-14, D-46, D-48)."""

import dataclasses
from typing import Literal

import numpy as np

from kvjax.eviction import Evict
from kvjax.pallas_kernels.values import checked, flag, number, one_of, optional, settle, tokens
from kvjax.scoring.protect import PromptSinks, Protect, Scope, TopStd
from kvjax.scoring.scores import Accumulated, LastRow, Mean, Recency, Score, Uniform
from kvjax.scoring.select import RandomRun, TopK
from kvjax.scoring.stats import Observe, RowsFrom
from kvjax.sizes.budget import Count, Fixed, Less, Ratio, Share, Sum, Tokens, as_count, counted
from kvjax.sizes.schedule import Schedule, after_prefill, every_step

Importance = Literal["roco", "mas", "h2o", "tova", "recency", "random"]
Mode = Literal["encoding", "decoding", "encoding_decoding"]

_SINKS = 4  # protected while a prompt is read in blocks
_LAST = 10  # protected always, by "roco" and "mas"

_WHILE_ENCODING: dict[str, Score] = {
    "roco": Mean(),
    "mas": Mean(),
    "h2o": Accumulated(),
    "tova": LastRow("layer_mean"),
    "recency": Recency(),
    "random": Uniform(),
}


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """How the released block loop rounds a budget (D-14).

    Attributes:
      nominal: what the user asked for.
      padded: the nominal budget and one stride.
      final: tokens in the cache when the prompt has been read; exceeds the nominal budget by up to one stride.
      dense_prefix: tokens read before the first block.
    """

    nominal: int
    padded: int
    final: int
    dense_prefix: int


def block_sizes(length: int, budget: int | float, stride: int, mode: Literal["encoding", "ppl"]) -> BlockSizes:
    """The sizes of a prompt of `length` tokens read in blocks of `stride`.

    The dense prefix and whole blocks make up the prompt. While encoding it is one stride shorter than the final cache;
    a cache of at most a stride, for which the released code asks for a negative prefix, is filled before any block.

    Raises:
      ValueError: a prompt that the block loop would not evict from, or a budget or stride of no token.
    """
    one_of("mode", mode, "encoding", "ppl")
    length, stride = checked(tokens(1), "length", length), checked(tokens(1), "stride", stride)
    count = as_count(budget, "budget")
    nominal = count.n if isinstance(count, Tokens) else int(length * budget)
    if nominal < 1:
        raise ValueError(f"a budget of {nominal} tokens (budget={budget}, length={length}); give at least 1 token")
    padded = nominal + stride
    final = padded - (padded - length) % stride
    if final > length:
        raise ValueError(
            f"a prompt of {length} tokens fits the budget of {nominal} and a block of {stride}; read it whole"
        )
    dense = final - stride if mode == "encoding" and final > stride else final % stride or stride
    return BlockSizes(nominal, padded, final, dense)


@dataclasses.dataclass(frozen=True)
class BlockBudget(Count):
    """`BlockSizes.final` for every prompt length; a prompt that is not evicted from keeps the nominal budget.

    Attributes:
      nominal: what the user asked for.
      stride: tokens of a block.
    """

    nominal: Count
    stride: int

    def __post_init__(self):
        settle(self, nominal=counted, stride=tokens(1))

    def table(self, prompt_length: np.ndarray, budget: np.ndarray) -> np.ndarray:
        """The count for every prompt length."""
        nominal = self.nominal.table(prompt_length, budget)
        padded = nominal + self.stride
        final = padded - (padded - prompt_length) % self.stride
        return np.where(final > prompt_length, nominal, final)


def _all_but(evictable: Count, live: Count, least: int) -> Count:
    """The scope that leaves `evictable` of the `live` tokens evictable, and never fewer than `least`."""
    return Less(live, Sum((Tokens(least), Less(evictable, Tokens(least)))))


def easykv(
    importance: Importance,
    budget: int | float,
    *,
    mode: Mode | Literal["auto"],
    stride: int = 1,
    rounding: Literal["exact", "easykv"] = "exact",
    prompt_length: int | None = None,
    recent_ratio: float = 0.1,
    prefix: int = 0,
    keep_attention: bool = False,
) -> Evict:
    """One of EasyKV's policies as its code runs it.

    "encoding" evicts while the prompt is read in blocks (`prefill(..., block=stride)`), keeping 4 sinks, and never
    afterwards. "decoding" keeps the prompt, outside the budget, and evicts generated tokens only (D-13).
    "encoding_decoding" reads in blocks, keeping 4 sinks, and then evicts at every step, keeping none. "auto" is
    "decoding" with what an int budget leaves beyond the prompt, or "encoding_decoding" where it leaves nothing.

    RoCo's scope is, with B' = budget + stride (D-11): while encoding all but `max(B' - int(recent_ratio B') - 4,
    stride)` tokens; while decoding, all but `B' - int(0.3 B')`, or `int(0.3 B) + 1` beside the prompt. It and MAS
    protect the last 10 tokens (D-12).

    The code's random branch drops one contiguous run while encoding (D-05); it is broken, and H2O refused, in
    "encoding_decoding" (D-48); here all of them work. A last row's attention is averaged over all heads of the layer
    while encoding, over a kv head's group in "decoding" (D-09).

    Args:
      importance: what ranks tokens; "recency" is StreamingLLM's choice while encoding, "tova" the last row.
      budget: tokens, or a share of the prompt.
      mode: when eviction happens.
      stride: tokens of a block.
      rounding: "exact" caches `budget` tokens after every block, "easykv" the largest number up to B' that makes blocks
        of `stride` end with the prompt (`block_sizes`, D-14).
      prompt_length: for "auto".
      recent_ratio: share of B' kept recent (H2O, TOVA) or out of the feasible set (RoCo) while encoding.
      prefix: tokens whose rows RoCo, MAS and H2O ignore. The code ignores those of the dense prefix and of the block
        that fills the cache, `block_sizes(...).final` together.
      keep_attention: count them all the same (D-46).

    Raises:
      ValueError: an importance, mode or rounding that does not exist, or "auto" without `prompt_length`.
    """
    one_of("importance", importance, *_WHILE_ENCODING)
    one_of("mode", mode, "encoding", "decoding", "encoding_decoding", "auto")
    one_of("rounding", rounding, "exact", "easykv")
    stride = checked(tokens(1, "a block has at least 1 token"), "stride", stride)
    keep_attention = checked(flag, "keep_attention", keep_attention)
    prefix = checked(tokens(), "prefix", prefix)
    recent_ratio = checked(number("[0, 1]"), "recent_ratio", recent_ratio)
    prompt_length = checked(optional(tokens(1)), "prompt_length", prompt_length)
    count = as_count(budget, "budget")
    if mode == "auto":
        if prompt_length is None:
            raise ValueError("mode='auto' compares the budget with the prompt; give prompt_length=")
        beyond = count.n - prompt_length if isinstance(count, Tokens) else 0
        mode, count = ("decoding", Tokens(beyond)) if beyond > 0 else ("encoding_decoding", count)
    score = _WHILE_ENCODING[importance]
    ignore = 0 if keep_attention else prefix
    if isinstance(score, Mean):
        score = dataclasses.replace(score, ignore_prefix=ignore)
    elif isinstance(score, Accumulated) and ignore:
        score = Accumulated(Observe(RowsFrom(ignore)))
    if mode == "decoding":
        return _decoding(importance, score, count)

    final = BlockBudget(count, stride) if rounding == "easykv" else count
    padded = Sum((count, Tokens(stride)))
    share = lambda ratio: Fixed(Share(ratio, "int"), padded)
    decodes = mode == "encoding_decoding"
    scope: Scope | None = PromptSinks(_SINKS) if decodes else None
    if importance == "roco":
        scope = TopStd(
            _all_but(Less(padded, Sum((share(recent_ratio), Tokens(_SINKS)))), Sum((final, Tokens(stride))), stride),
            ignore_prefix=ignore,
            decode_size=_all_but(Less(padded, share(0.3)), Sum((final, Tokens(1))), 1) if decodes else None,
            prompt_sinks=_SINKS if decodes else 0,
        )
    recent = {"roco": Tokens(_LAST), "mas": Tokens(_LAST), "h2o": share(recent_ratio), "tova": share(recent_ratio)}
    when: Schedule = every_step() if decodes else after_prefill()
    return Evict(
        score,
        final,
        protect=Protect(0 if decodes else _SINKS, recent.get(importance, 0)),
        scope=scope,
        when=when,
        select=RandomRun() if importance == "random" and not decodes else TopK(),
    )


def _decoding(importance: Importance, score: Score, count: Count) -> Evict:
    """The prompt stays, outside the budget; generated tokens compete for it."""
    prompt, own = Ratio(1.0), Fixed(Share(0.3, "int"), count)
    recent = {"roco": Tokens(_LAST), "mas": Tokens(_LAST), "h2o": own}
    return Evict(
        LastRow("per_kv_head") if importance == "tova" else score,
        Sum((prompt, count)),
        protect=Protect(prompt, recent.get(importance, 0)),
        scope=TopStd(Sum((prompt, own, Tokens(1)))) if importance == "roco" else None,
        when=every_step(),
    )
