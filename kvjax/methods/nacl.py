"""NaCl: proxies at the end of the prompt vote, and a random sample of the rest stays."""

from typing import Literal

import numpy as np

from kvjax.compose.evict import Evict
from kvjax.contract import Count, Prompts, resolve, value
from kvjax.decide.select import ThenRandom
from kvjax.observe import Rows
from kvjax.scores.attention import Accumulated

# Percent of the prompt: budget, protected proxies, proxies that only score, tokens kept at random (Table 4).
_TABLE_4 = np.array([[10.0, 1.0, 3.0, 7.0], [20.0, 2.0, 18.0, 12.0], [30.0, 1.5, 20.0, 18.0]])


@value
class Table4:
    """NaCl's Table 4: shares of the prompt, linear between its rows, and in proportion outside of 10 to 30 %.

    Attributes:
      which: "recent" (proxies that stay), "proxies" (all rows that vote) or "random" (tokens kept by the draw).
      budget: the budget whose share is looked up.
    """

    which: Literal["recent", "proxies", "random"]
    budget: Count

    def __call__(self, prompt: Prompts, budget: Prompts | None) -> Prompts:
        """Tokens "M" for prompts "M"."""
        n = np.maximum(prompt, 1)
        if isinstance(self.budget, float):
            asked = np.full(n.shape, 100.0 * self.budget)
        else:
            asked = 100.0 * resolve(self.budget, prompt, prompt) / n
        inside = np.clip(asked, 10.0, 30.0)
        protected, scoring, random = (
            np.interp(inside, _TABLE_4[:, 0], _TABLE_4[:, column]) * asked / inside for column in (1, 2, 3)
        )
        percent = {"recent": protected, "proxies": protected + scoring, "random": random}[self.which]
        return np.maximum(np.floor(percent * n / 100.0 + 1e-9).astype(np.int64), int(self.which == "proxies"))


def nacl(
    budget: Count, *, recent: Count | None = None, proxies: Count | None = None, random: Count | None = None
) -> Evict:
    r"""Keeps what the proxies at the end attend to, and a random sample of the rest (NaCl, arXiv 2408.03675).

    $S_j = \sum_{i \in P} p_{ij}$ over the proxy rows. Of the budget, some proxies stay, `random` tokens are drawn
    without replacement from softmax(S) in every layer and head, and the rest are the best by $S$ (Chen et al.).

    Args:
      budget: live tokens a kv head and layer.
      recent: proxies that stay; None for the share of Table 4, as for the next two.
      proxies: all proxy rows, at the end of the prompt.
      random: tokens that the draw keeps; 0 is the ablation without it.
    """
    recent = Table4("recent", budget) if recent is None else recent
    proxies = Table4("proxies", budget) if proxies is None else proxies
    random = Table4("random", budget) if random is None else random
    return Evict(Accumulated(Rows(proxies), restart=True), budget, 0, recent, select=ThenRandom(random))
