"""EasyKV: the policies of its code, for every importance that it knows (D-05, D-06, D-09, D-11 to D-14, D-46, D-48)."""

import dataclasses
from typing import Literal

from kvjax.budgets import STEP, Combined, Schedule
from kvjax.compose import chain
from kvjax.compose.evict import Evict
from kvjax.contract import Amount, Count, Policy, Proportion, Score, Size, value
from kvjax.decide.select import TopK
from kvjax.methods.released.counts import BlockBudget, Truncated, WholeIfShort
from kvjax.methods.released.parts import RandomRun
from kvjax.observe import Rows
from kvjax.pallas_kernels import kinds
from kvjax.scores.attention import Accumulated, Mean, Recency, SparedByDeviation, Uniform, Votes
from kvjax.scores.blends import LayerMean

Importance = Literal["roco", "mas", "h2o", "tova", "recency", "random"]

_SINKS = 4  # stay while a prompt is read in blocks
_LAST = 10  # stay always, by "roco" and "mas"


@value
class BlockSizes:
    """How EasyKV's loop over blocks rounds a budget (D-14).

    Attributes:
      nominal: tokens that were asked for.
      padded: these and one stride.
      final: tokens in the cache after the prompt.
      dense_prefix: tokens that are read before the first block.
    """

    nominal: Size
    padded: Size
    final: Size
    dense_prefix: Size


def block_sizes(length: Size, budget: int | float, stride: Size, mode: Literal["encoding", "ppl"]) -> BlockSizes:
    """The sizes of a prompt that is read in blocks.

    Args:
      length: tokens of the prompt.
      budget: tokens, or a share of the prompt.
      stride: tokens of a block.
      mode: while "encoding" the dense prefix is a stride shorter than the final cache.

    Raises:
      ValueError: the prompt fits the budget and a block, so that the loop evicts nothing.
    """
    nominal = budget if isinstance(budget, int) else int(length * budget)
    if nominal < 1:
        raise ValueError(f"a budget of {nominal} tokens; give at least 1")
    padded = nominal + stride
    final = padded - (padded - length) % stride
    if final > length:
        raise ValueError(
            f"a prompt of {length} tokens fits the budget of {nominal} and a block of {stride}; read it whole"
        )
    dense = final - stride if mode == "encoding" and final > stride else final % stride or stride
    return BlockSizes(nominal, padded, final, dense)


def _score(importance: Importance, first: Amount, scope: Count) -> Score:
    scores: dict[str, Score] = {
        "roco": SparedByDeviation(first=first, size=scope),
        "mas": Mean(first=first),
        "h2o": Accumulated(Rows(first=first)),
        "tova": LayerMean(Votes(1, prompt_only=False)),
        "recency": Recency(),
        "random": Uniform(),
    }
    return scores[importance]


def _all_but(evictable: Count, live: Count, least: int) -> Count:
    """The scope that leaves `evictable` of the `live` tokens, and never fewer than `least`."""
    return Combined("less", (live, Combined("sum", (least, Combined("less", (evictable, least))))))


def easykv_encoding(
    importance: Importance,
    budget: int | float,
    *,
    stride: Size = 1,
    exact: bool = True,
    recent_ratio: Proportion = 0.1,
    prefix: Amount = 0,
) -> Evict:
    """Evicts while a prompt is read in blocks (`block=stride`), and never afterwards. 4 sinks stay.

    RoCo's scope is all but `max(B' - int(recent_ratio B') - 4, stride)` tokens, with B' = budget + stride (D-11).

    Args:
      importance: what ranks tokens.
      budget: tokens, or a share of the prompt.
      stride: tokens of a block.
      exact: ends with the budget; otherwise with up to `stride` more, as the code does (D-14).
      recent_ratio: share of B' that stays as recent (H2O, TOVA), or is outside of RoCo's candidates.
      prefix: tokens whose rows do not count (D-46): `block_sizes(...).final` in the code.
    """
    padded = Combined("sum", (budget, stride))
    final = budget if exact else BlockBudget(budget, stride)
    share = Truncated(recent_ratio, padded)
    recent: Count = {"roco": _LAST, "mas": _LAST, "h2o": share, "tova": share}.get(importance, 0)
    taken = Combined("sum", (share, _SINKS))
    scope = _all_but(Combined("less", (padded, taken)), Combined("sum", (final, stride)), stride)
    score = _score(importance, prefix, scope)
    return Evict(score, final, _SINKS, recent, select=RandomRun() if importance == "random" else TopK())


def easykv_decoding(importance: Importance, budget: int | float) -> Evict:
    """Keeps the prompt, outside of the budget, and evicts generated tokens (D-13).

    RoCo's scope is the prompt and `int(0.3 B) + 1` tokens (D-11); TOVA decides for every kv head (D-09).

    Args:
      importance: what ranks tokens.
      budget: generated tokens that stay: a number, or a share of the prompt.
    """
    prompt, own = 1.0, Truncated(0.3, budget)
    recent: Count = {"roco": _LAST, "mas": _LAST, "h2o": own}.get(importance, 0)
    score = _score(importance, 0, Combined("sum", (prompt, own, 1)))
    score = Votes(1, prompt_only=False) if importance == "tova" else score
    return Evict(score, Combined("sum", (prompt, budget)), prompt, recent, when=STEP)


def easykv_encoding_decoding(
    importance: Importance, budget: int | float, *, stride: Size = 1, exact: bool = True
) -> Policy:
    """Evicts while a prompt is read in blocks, 4 sinks staying, then at every step, none staying (D-48).

    While decoding RoCo's scope is all but `B' - int(0.3 B')` tokens (D-11).

    Args:
      importance, budget, stride, exact: as of `easykv_encoding`.
    """
    first = easykv_encoding(importance, budget, stride=stride, exact=exact)
    first = dataclasses.replace(first, select=TopK())
    padded = Combined("sum", (budget, stride))
    live = Combined("sum", (first.budget, 1))
    scope = _all_but(Combined("less", (padded, Truncated(0.3, padded))), live, 1)
    held = first.budget  # a prompt of which a share does not hold what stays while it is read is whole afterwards too
    if isinstance(budget, float):
        held = WholeIfShort(held, Combined("sum", (_SINKS, first.recent)))
    then = Evict(_score(importance, 0, scope), held, 0, first.recent, when=Schedule(prefill=False, every=1))
    return chain(first, then)


def easykv(importance: Importance, budget: int, *, prompt_length: Size, stride: Size = 1) -> Policy:
    """Evicts as `easykv_decoding` if the budget exceeds the prompt, else as `easykv_encoding_decoding` (mode "auto").

    Args:
      importance: what ranks tokens.
      budget: tokens.
      prompt_length: tokens of the prompt.
      stride: tokens of a block.
    """
    if budget > prompt_length:
        return easykv_decoding(importance, budget - prompt_length)
    return easykv_encoding_decoding(importance, budget, stride=stride)


kinds.doors(__name__)
