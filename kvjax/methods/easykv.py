"""The released EasyKV's modes and sizes, for every importance it knows (D-11 to D-14, D-46, D-48)."""

import dataclasses
from typing import Literal

import numpy as np

from kvjax.budget import Count, Ratio, Share, Sum, as_count
from kvjax.eviction import Evict
from kvjax.methods.roco import roco
from kvjax.protect import Protect, TopStd
from kvjax.schedule import Schedule, after_prefill, every_step
from kvjax.scores import Accumulated, LastRow, Mean, Recency, Score, Uniform
from kvjax.select import RandomRun, TopK

Importance = Literal["roco", "mas", "h2o", "tova", "recency", "random"]
Mode = Literal["encoding", "decoding", "encoding_decoding"]

_SCORES: dict[str, Score] = {
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
      padded: the nominal budget and one stride.
      final: tokens in the cache when the prompt has been read; exceeds the nominal budget by up to one stride.
      dense_prefix: tokens read before the first eviction.
    """

    nominal: int
    padded: int
    final: int
    dense_prefix: int


def block_sizes(length: int, budget: int | float, stride: int, mode: Literal["encoding", "ppl"]) -> BlockSizes:
    """The sizes of a prompt of `length` tokens read in blocks of `stride`.

    Raises:
      ValueError: a prompt that the block loop would not evict from.
    """
    nominal = budget if isinstance(budget, int) else int(length * budget)
    padded = nominal + stride
    final = padded - (padded - length) % stride
    if final > length:
        raise ValueError(
            f"a prompt of {length} tokens fits the budget of {nominal} and a block of {stride}; read it whole"
        )
    dense = final - stride if mode == "encoding" else final % stride or stride
    return BlockSizes(nominal, padded, final, dense)


def easykv(
    importance: Importance,
    budget: int | float,
    *,
    mode: Mode | Literal["auto"],
    prompt_length: int | None = None,
    recent_ratio: float = 0.1,
    prefix: int = 0,
    keep_attention: bool = False,
) -> Evict:
    """One of EasyKV's policies as its code runs it.

    "encoding" evicts while the prompt is read in blocks (`prefill_blocks`), keeping 4 sinks, and never afterwards.
    "decoding" keeps the prompt, outside the budget, and evicts generated tokens only (D-13). "encoding_decoding" reads
    in blocks and evicts at every step. "auto" is "decoding" with what an int budget leaves beyond the prompt, or
    "encoding_decoding" where it leaves nothing.

    The code's random branch drops one contiguous run while encoding (D-05); it is broken, and H2O refused, in
    "encoding_decoding" (D-48); here all of them work.

    Args:
      importance: what ranks tokens; "recency" is StreamingLLM's choice while encoding, "tova" the last row.
      budget: tokens, or a share of the prompt.
      mode: when eviction happens.
      prompt_length: for "auto".
      recent_ratio: share of the budget kept recent (H2O, TOVA) or out of the feasible set (RoCo) while encoding.
      prefix: tokens of the dense prefix (`block_sizes`), whose rows the code ignores.
      keep_attention: count them all the same (D-46).
    """
    if mode == "auto":
        if prompt_length is None:
            raise ValueError("mode='auto' compares the budget with the prompt; give prompt_length=")
        beyond = budget - prompt_length if isinstance(budget, int) else 0
        mode, budget = ("decoding", beyond) if beyond > 0 else ("encoding_decoding", budget)
    if importance not in _SCORES:
        raise ValueError(f"importance={importance!r} is not one of {tuple(_SCORES)}")
    count: Count = as_count(budget, "budget")
    ignore = 0 if keep_attention else prefix
    score = _SCORES[importance]
    if isinstance(score, Mean):
        score = dataclasses.replace(score, ignore_prefix=ignore)
    last = 10 if importance in ("roco", "mas") else 0
    window = Share(0.3) if importance == "h2o" else last
    if mode == "decoding":
        prompt = Ratio(1.0)
        size = as_count(int(budget * 0.3), "scope") if isinstance(budget, int) else Ratio(float(budget) * 0.3)
        return Evict(
            score,
            Sum((prompt, count)),
            protect=Protect(prompt, size if importance == "h2o" else last),
            scope=TopStd(Sum((prompt, size))) if importance == "roco" else None,
            when=every_step(),
        )
    encoding = mode == "encoding"
    when: Schedule = after_prefill() if encoding else every_step()
    if importance == "roco":
        scope = Share(recent_ratio if encoding else 0.3)
        policy = roco(count, scope=scope, protect_last=10, sinks=4 if encoding else 0, ignore_prefix=ignore)
        return dataclasses.replace(policy, when=when)
    recent = Share(recent_ratio) if encoding and importance in ("h2o", "tova") else window
    select = RandomRun() if importance == "random" and encoding else TopK()
    return Evict(score, count, protect=Protect(4 if encoding else 0, recent), when=when, select=select)


def final_cache(length: np.ndarray, budget: np.ndarray, stride: int) -> np.ndarray:
    """`BlockSizes.final` for arrays."""
    padded = budget + stride
    return padded - (padded - length) % stride


@dataclasses.dataclass(frozen=True)
class EasyKVRounding(Count):
    """A budget rounded as the released block loop does: up to one stride too large (`rounding="easykv"`, D-14)."""

    budget: Count
    stride: int

    def table(self, prompt_length: np.ndarray, budget: np.ndarray) -> np.ndarray:
        """The count for every prompt length."""
        return np.minimum(
            final_cache(prompt_length, self.budget.table(prompt_length, budget), self.stride), prompt_length
        )
