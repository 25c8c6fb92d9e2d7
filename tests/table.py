"""The one table of methods that all laws cross: every row of `cases.py`, and what laws must know of it.

What a row keeps in any case, and how much, is read from its policy's own fields; that these are the method's is known
from the recorded tokens. Here stands what fields do not say.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.compose import ByHead, Chain, SharedLayers
from kvjax.compose.across import AcrossLayers
from kvjax.compose.evict import Evict
from kvjax.contract import LayerInfo
from kvjax.methods.profile import FastGen
from tests import kept
from tests.cases import CASES, Sizes
from tests.marks import marks

RECORDED = kept.recorded("raw")  # of every row, at the budgets that it takes
MADE = {  # compositions that only laws need
    "snapkv_merging": lambda b, s: methods.merging(methods.snapkv(b, window=4, kernel=3)),
    "attention_matching": lambda b, s: methods.attention_matching(b, rows=8, sinks=2),
    "fastgen_bounded": lambda b, s: kept.fastgen(b),
    "fastgen_pooled": lambda b, s: kept.fastgen(b, pool=True),
}
MAKE = CASES | MADE


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str

    def __repr__(self) -> str:
        return self.name

    @property
    def budget(self) -> int | float:
        """10 tokens, or half of the prompt where the row takes shares alone."""
        return 10 if "10" in RECORDED.get(self.name, {"10": ""}) else 0.5

    @functools.cached_property
    def policy(self) -> kvjax.Policy:
        """For 3 layers of 4 query and 2 kv heads, each 8 wide."""
        return self.make(self.budget)

    def make(
        self, budget: Any, *, layers: int = 3, width: int = 12, heads: tuple[int, int, int] = (4, 2, 8)
    ) -> kvjax.Policy:
        """The policy with a budget, for a model of so many layers, of that width and N, K and H."""
        return MAKE[self.name](budget, Sizes(layers, *heads, width))

    def takes(self, budget: Any) -> bool:
        """Whether the row has a policy with that budget."""
        try:
            self.make(budget)
        except ValueError:
            return False
        return True


# Rows that keep fewer tokens than their budget: whole chunks, those above a threshold, what lazy layers need, what was
# drawn twice, shares of heads that are rounded one by one.
FEWER = {
    *("chunkkv", "finch_chunks", "kvzap_threshold", "simlayerkv", "simlayerkv_lazy", "nacl_from_all", "ada_released"),
    *("ada_released_normalized", "ada_factory", "ada_pyramid_adakv", "kvpress_chunk", "kvpress_dms"),
    *("kvpress_dms_snapkv", "kvpress_simlayerkv", "kvpress_simlayerkv_all", "pages", "shared_heads"),
}

# Rows that decide anew when asked again: scores that depend on which tokens live, where heads compete, or above a
# threshold.
ANEW = {"kvpress_adakv_curdkv", "kvpress_adakv_expected_attention", "kvpress_dms_snapkv"}

# Rows in which a token's fate depends on the place of its head: draws are by head, tables have a row a head.
BY_HEAD = {
    *("random_attention", "vase", "triattention", "triattention_per_head"),
    *("keyformer", "keyformer_per_key", "keyformer_rank", "keyformer_released", "keyformer_share_batch"),
    *("keyformer_damped", "shared_layers", "random", "random_run", "kvpress_random", "easykv_both_random", "nacl"),
    *("nacl_given", "nacl_begin", "nacl_from_all", "nacl_uniform", "nacl_normalised", "nacl_headbug", "nacl_grouped"),
    *("nacl_llama3", "compactor", "q_filters", "kvzap", "kvzap_threshold", "kvpress_kvzap", "headkv"),
    *("headkv_factory", "duo_attention", "duo_attention_threshold", "expected_attention_stats", "head_table"),
    *("partition_heads", "partition_heads_dense", "head_curves", "kvpress_fastkvzip", "kvpress_fastkvzip_layerwise"),
}

# Rows that have no budget of tokens.
NO_BUDGET = {
    *("full", "think", "kvpress_think", "duo_attention", "duo_attention_threshold", "fastgen", "fastgen_port"),
    *("kvpress_dms", "kvpress_dms_snapkv", "kvpress_simlayerkv", "kvpress_simlayerkv_all"),
}

# Rows that are made of others, of which some have a smaller budget whatever the row's is.
SMALL_PARTS = {"many_then_few", "chain_of_partitions"}

# Rows whose budget is beside the prompt, or grows with it, and holds any.
PROMPT_OUTSIDE = {
    *("random_attention", "triattention", "triattention_per_head", "triattention_union", "window_of_generated"),
    "kvpress_ratio_decoding",
    *(f"easykv_decoding_{x}" for x in ("roco", "mas", "h2o", "tova", "recency", "random")),
}

# Rows whose sequences share draws with the first one of their batch.
OF_A_BATCH = {"keyformer_share_batch"}

# Rows whose policy refuses layers where a key and its value are one array, and why.
NO_LATENT = dict.fromkeys(("think", "snapkv_then_think"), "are channels of its keys; choose a policy that keeps all")
NO_LATENT |= dict.fromkeys(("snapkv_merging", "attention_matching"), "Evict writes v; choose a policy that writes")
NO_LATENT |= {"kvpress_think": "ZeroChannels writes k; choose a policy that writes neither"}

# Rows that refuse a model whose layers differ in heads, and why: they decide for all at once, or a table of one shape
# for all layers is given.
NO_TWO_SHAPES = dict.fromkeys(
    (
        "cake",
        "kvcompose",
        "lava",
        "lava_released",
        "layer_defensivekv",
        "kvpress_fastkvzip",
        "nacl_global",
        "shared_layers",
        "shared_layers_snapkv",
        "triattention_per_head",
        "triattention_union",
        "across_layers_entropy",
        "across_layers_preference",
        "across_layers_top_scores",
    ),
    "decides for all layers at once",
)
NO_TWO_SHAPES |= dict.fromkeys(
    ("kvzap", "kvzap_threshold", "kvpress_kvzap", "kvpress_fastkvzip_layerwise"), "fit a function to this model"
)
NO_TWO_SHAPES |= dict.fromkeys(
    ("headkv", "head_table", "head_curves"), "HeadShares has 2 rows of 2 weights, but the model has"
)
NO_TWO_SHAPES |= dict.fromkeys(
    ("duo_attention", "duo_attention_threshold", "partition_heads", "partition_heads_dense"), "give one label a head"
)
NO_TWO_SHAPES |= {
    "triattention": "centres have the shape",
    "q_filters": "filters have the shape",
    "expected_attention_stats": "moments have the shape",
}

# Rows that refuse YaRN, as they turn keys that were turned, and why.
NO_YARN = {"streaming_llm": "a key cannot be turned once more"}

# Rows in which the number of a value's channels counts, as that of a standard deviation over them.
COUNTS_CHANNELS = {"lagkv"}

# Rows whose cache is not the full one, whatever the budget: they hide tokens, drop channels or merge what they keep, or
# keep what a threshold, a map of heads or a profile says.
LOSSY = {
    *("simlayerkv", "simlayerkv_lazy", "think", "snapkv_then_think", "dilated_window", "dilated_window_anchored"),
    *("kvzap_threshold", "duo_attention", "duo_attention_threshold", "fastgen", "fastgen_port", "fastgen_bounded"),
    *("fastgen_pooled", "attention_matching", "kvpress_dms", "kvpress_dms_snapkv", "kvpress_simlayerkv"),
    *("kvpress_simlayerkv_all", "kvpress_think", "finch_chunks", "kvpress_finch_chunk", "many_then_few"),
    *("chain_of_partitions",),
}

# Rows of distinct mechanisms; the others are exhaustive. Decoding compiles a program for each, so fewer of them decode.
# Those that among them reach every kind of mechanism are of the default run; the rest is slow.
SMOKE = {
    *("h2o", "streaming_llm", "keyformer", "snapkv", "ada_snapkv", "nacl", "quest", "quest_by_query_head", "think"),
    *("h2o_pooled", "partition_heads", "across_layers_entropy", "kvzip"),
}
QUICK = {
    *("full", "h2o", "streaming_llm", "random", "tova", "keyformer", "ahakv", "scissorhands", "roco", "snapkv"),
    *("pyramidkv", "ada_snapkv", "criticalkv", "chunkkv", "compactor", "cake", "layer_defensivekv", "nacl", "think"),
    *("finch_chunks", "duo_attention", "fastgen", "fastgen_pooled", "quest_by_query_head", "many_then_few", "lagkv"),
    *("partition_heads", "nacl_global", "across_layers_entropy", "snapkv_merging", "attention_matching", "head_table"),
}
DECODED = {
    *("h2o", "streaming_llm", "h2o_pooled", "keyformer", "fastgen_pooled", "tova_when_over_3", "partition_heads"),
    *("scissorhands", "snapkv_then_h2o", "random_attention", "vase", "lazy_eviction", "pages", "triattention"),
    "triattention_union",
}
FEW = {"h2o", "ada_snapkv", "quest"}


def rows(quick, without=(), smoke=SMOKE):
    """A test for every row of the table; those that are not `quick` are exhaustive, of those `smoke` is not slow."""
    assert {*quick, *without} <= set(MAKE)
    each = [pytest.param(Case(name), marks=marks(name, quick, smoke), id=name) for name in MAKE if name not in without]
    return pytest.mark.parametrize("case", each)


# ------------------------------------------------------------------------------------------------ what a policy owes


@dataclasses.dataclass(frozen=True)
class Owed:
    """What a decision after a prompt of `n` tokens owes, by kv head.

    Attributes:
      safe: positions that stay.
      least, most: how many tokens stay.
      all_heads: the least and the most that stay in all heads together.
    """

    safe: list[set[int]]
    least: np.ndarray
    most: np.ndarray
    all_heads: tuple[int, int]

    def check(self, kept: Sequence[Sequence[int]]) -> None:
        """Whether the positions that stay in each head are what is owed."""
        counts = np.array([len(tokens) for tokens in kept])
        assert all(safe <= {*tokens} for safe, tokens in zip(self.safe, kept, strict=True))
        assert (self.least <= counts).all()
        assert (counts <= self.most).all()
        assert self.all_heads[0] <= counts.sum() <= self.all_heads[1]


def owed(policy: kvjax.Policy, info: LayerInfo, n: int, exact: bool = True) -> Owed:
    """What a policy owes after a prompt of `n` tokens; `exact` where it fills its budget."""
    K, of = info.num_kv_heads, lambda x: int(np.asarray(x)[0])
    heads, sizes = np.ones(K, int), policy.sizes(info, np.array([n]))
    if isinstance(policy, SharedLayers):
        return owed(policy.policy, info, n, exact)
    if isinstance(policy, ByHead):
        each = [owed(policy.members[i], info, n, exact) for i in policy.heads]
        least, most = (np.array([getattr(x, name)[i] for i, x in enumerate(each)]) for name in ("least", "most"))
        return Owed([x.safe[i] for i, x in enumerate(each)], least, most, (least.sum(), most.sum()))
    if isinstance(policy, Chain):
        each = [owed(p, info, n, exact) for p in policy.members]
        least, most = (np.min([getattr(x, name) for x in each], 0) for name in ("least", "most"))
        safe = [set.intersection(*(x.safe[i] for x in each)) for i in range(K)]
        return Owed(safe, least, most, (least.sum(), min(x.all_heads[1] for x in each)))
    if not isinstance(policy, Evict):
        keeps_all = not isinstance(policy, FastGen | AcrossLayers)
        most = min(of(sizes.per_head), n)
        safe = set(range(n)) if keeps_all else set()
        return Owed([safe] * K, heads * n * keeps_all, heads * most, (n * K * keeps_all, min(of(sizes.total), n * K)))
    if not policy.when.prefill:
        return Owed([set(range(n))] * K, heads * n, heads * n, (n * K, n * K))
    budget, sinks, recent = (of(getattr(sizes.hparams, name)) for name in ("budget", "sinks", "recent"))
    safe = {*range(min(sinks, n)), *range(max(n - recent, 0), n)}
    count, slack = min(budget, n), policy.select.slack
    if policy.heads is not None:
        most = min(of(sizes.per_head), n)
        return Owed([safe] * K, heads * 0, heads * most, (count * K * exact, (count + slack) * K))
    return Owed([safe] * K, heads * count * exact, heads * (count + slack), (count * K * exact, (count + slack) * K))
