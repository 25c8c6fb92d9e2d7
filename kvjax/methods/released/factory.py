"""KVCache-Factory: the policies of its clusters, with the settings of its runner."""

import dataclasses

from kvjax.compose.evict import Evict
from kvjax.contract import Amount, AtLeastOne, Count, Layout, NonNegative, Odd, Size
from kvjax.methods.attention import h2o, scissorhands
from kvjax.methods.hidden import FirstLayers
from kvjax.methods.keys import knorm
from kvjax.methods.position import full, streaming_llm
from kvjax.methods.released.counts import FloorPyramid
from kvjax.methods.released.papers import PROMPT, ada_released, by_query_head
from kvjax.methods.votes import headkv, pyramidkv, snapkv
from kvjax.pallas_kernels import kinds
from kvjax.pallas_kernels.kinds import HeadTable
from kvjax.scores.attention import Faded


def h2o_factory(budget: Count, *, window: Size = 8) -> Evict:
    """H2O: the prompt alone is evicted, for every query head."""
    return by_query_head(dataclasses.replace(h2o(budget, recent=window), when=PROMPT))


def scissorhands_factory(budget: Count, *, sinks: Amount = 4, recent: Amount = 10, decay: NonNegative = 0.9) -> Evict:
    """Scissorhands: sums of probabilities that fade while decoding (D-50)."""
    return dataclasses.replace(scissorhands(budget, recent=recent), score=Faded(decay=decay), sinks=sinks)


def streaming_llm_factory(budget: Count, *, sinks: Amount = 4) -> Evict:
    """StreamingLLM: the prompt alone is evicted, and tokens stand where they stood."""
    return dataclasses.replace(streaming_llm(budget, sinks=sinks), when=PROMPT, layout=Layout())


def knorm_factory(budget: Count) -> FirstLayers:
    """Knorm: the first two layers keep everything."""
    return FirstLayers(full(), knorm(budget), 2)


def snapkv_factory(budget: Count = 512, *, window: Size = 8, kernel: Odd = 7) -> Evict:
    """SnapKV of its runner and of AdaKV's code, for every query head (D-39, D-44)."""
    return by_query_head(snapkv(budget, window=window, kernel=kernel))


def pyramidkv_factory(budget: Count, *, beta: AtLeastOne = 20.0, window: Size = 8, kernel: Odd = 7) -> Evict:
    """PyramidKV: whole steps, whose total exceeds the budget (D-41, D-42)."""
    return dataclasses.replace(pyramidkv(budget, window=window, kernel=kernel), layers=FloorPyramid(beta))


def ada_factory(budget: Count, *, window: Size = 8, kernel: Odd = 7) -> Evict:
    """Ada-SnapKV, for every query head, which normalises by default (D-26)."""
    return by_query_head(ada_released(budget, window=window, kernel=kernel, normalize=True))


def headkv_factory(budget: int, importance: HeadTable, *, beta: AtLeastOne = 2.0, window: Size = 8) -> Evict:
    """HeadKV, for every query head; its capacities leave no room for the window.

    Args:
      budget: its capacity, without the window.
      importance: "L N", one number for every query head.
      beta, window: as of `headkv`.
    """
    return by_query_head(headkv(budget + window, importance, beta=beta, window=window))


kinds.doors(__name__)
