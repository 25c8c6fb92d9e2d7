"""FastGen (Ge et al., arXiv 2310.01801)."""

from collections.abc import Iterable
from typing import Any, Literal

from kvjax.methods.profiling import TOKEN_IDS, FastGen
from kvjax.methods.token_classes import token_classes
from kvjax.pallas_kernels.values import checked
from kvjax.policy import Layout
from kvjax.sizes.budget import Count


def fastgen(
    tokenizer: Any = None,
    *,
    special_ids: Iterable[int] | None = None,
    punctuation_ids: Iterable[int] | None = None,
    frequent_ratio: float = 0.3,
    local_ratio: float = 0.3,
    recovery_ratio: float = 0.95,
    recovery: Literal["mass", "elementwise"] = "mass",
    rounding: Literal["floor", "ceil"] = "floor",
    budget: int | float | Count | None = None,
    storage: Layout = "dense",
) -> FastGen:
    r"""Profiles every head on the prompt, and gives it the cheapest set of tokens that serves it.

    The sets are nested (Algorithm 1): special tokens; and punctuation; and the $r_f$ of all tokens with the highest
    accumulated attention; and those within $r_l$ of the prompt's length of the query; all. A head takes the first that
    recovers T of its attention, and maintains it while decoding, so heads hold very different numbers of tokens and the
    total is an outcome, not a choice; with `storage="pool"` the heads of a layer share a number of slots that is fixed.
    The paper varies T from 0.91 to 0.98.

    `state.layers[i].memory[0].strategy.value` holds the chosen strategies, indices into `profiling.STRATEGIES`.

    Args:
      tokenizer: a Hugging Face tokenizer, to tell special tokens and punctuation apart; or give both ids.
      special_ids, punctuation_ids: ids of the two classes, in place of the tokenizer's.
      frequent_ratio, local_ratio, recovery_ratio, recovery, rounding, budget, storage: see `profiling.FastGen`.

    Raises:
      ValueError: neither a tokenizer nor both classes of ids.
    """
    if special_ids is None or punctuation_ids is None:
        if tokenizer is None:
            missing = [
                n for n, ids in (("special_ids", special_ids), ("punctuation_ids", punctuation_ids)) if ids is None
            ]
            raise ValueError(f"fastgen needs token ids, but {' and '.join(missing)} were not given; pass tokenizer=")
        special, punctuation = token_classes(tokenizer)
        special_ids = special if special_ids is None else special_ids
        punctuation_ids = punctuation if punctuation_ids is None else punctuation_ids
    return FastGen(
        tuple(sorted(set(checked(TOKEN_IDS, "special_ids", special_ids)))),
        tuple(sorted(set(checked(TOKEN_IDS, "punctuation_ids", punctuation_ids)))),
        frequent_ratio,
        local_ratio,
        recovery_ratio,
        recovery,
        rounding,
        budget,
        storage,
    )
