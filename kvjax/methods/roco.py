"""RoCo: robust cache omission (Ren and Zhu, arXiv 2402.06262)."""

from kvjax.eviction import Evict
from kvjax.scoring.protect import Protect, TopStd
from kvjax.scoring.scores import Mean
from kvjax.sizes.budget import AtMost, Count, Share, Tokens
from kvjax.sizes.schedule import every_step


def roco(
    budget: int | float | Count,
    *,
    scope: int | float | Count = Share(0.5),
    protect_last: int | float | Count | None = None,
    sinks: int = 0,
    count_self: bool = True,
    ignore_prefix: int = 0,
) -> Evict:
    r"""Evicts the smallest mean attention among the tokens whose attention varies little.

    $\mu_j = \mathrm{acc}_j / \mathrm{cnt}_j$ ranks; the `scope` tokens of largest standard deviation
    $\sigma_j = \sqrt{\max(\mathrm{acc}^{(2)}_j / \mathrm{cnt}_j - \mu_j^2, 0)}$ may not be evicted (section 4.2).
    With grouped queries the group's mean is taken before squaring. Tokens protected by position count among them.

    The paper protects nothing by position and takes half of the budget as scope. The released code always keeps the
    last 10 tokens, and 4 sinks while reading in blocks (D-12); its scope is 0.3 of the budget while decoding (D-11,
    see `easykv`). It ignores the statistics of the dense prefix by default (D-46, `ignore_prefix`).

    Args:
      budget: live tokens a kv head and layer.
      scope: tokens of largest deviation that stay.
      protect_last: last tokens that stay; 10, but at most a quarter of the budget, if None.
      sinks: first tokens that stay.
      count_self: see `mas` (D-10).
      ignore_prefix: rows of the first so many prompt tokens are neither summed nor counted.
    """
    if protect_last is None:
        protect_last = AtMost((Tokens(10), Share(0.25)))
    return Evict(
        Mean(count_self, ignore_prefix),
        budget,
        protect=Protect(sinks, protect_last),
        scope=TopStd(scope, ignore_prefix, count_self=count_self),
        when=every_step(),
    )
