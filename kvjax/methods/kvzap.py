"""KVzap (Jegou and Jeblick, arXiv 2601.07891)."""

from kvjax.eviction import Evict
from kvjax.pallas_kernels.values import checked, tokens
from kvjax.scoring.predicted import HiddenHeads, Predicted
from kvjax.scoring.protect import Protect
from kvjax.scoring.select import AboveThreshold, TopK
from kvjax.sizes.budget import Count, Tokens, as_count
from kvjax.sizes.schedule import every_step


def kvzap(
    budget: int | float | Count,
    function: HiddenHeads,
    *,
    threshold: float | None = None,
    recent: int = 128,
    sinks: int = 0,
) -> Evict:
    r"""Keeps what a small function of hidden states says that KVzip+ would, while reading and decoding.

    For every layer a linear function, or one with a hidden layer of GELUs, maps what the attention module reads of a
    token to the logarithm of its KVzip+ score in every kv head: $s = W_2\, \mathrm{gelu}(W_1 h + b_1) + b_2$
    (`kvzap_press.py`). A score is what it was when its token was stored. `kvjax.learning.kvzap` fits such functions.

    With a `threshold`, what scores below it goes as soon as it leaves the last `recent` tokens, and how much stays is
    an outcome; the budget is the most that a head holds, and where more is above the threshold the lowest scores go
    (`dms_press.py` has no such bound). Without one, the best of the budget stay.

    Args:
      budget: live tokens a kv head and layer.
      function: fitted to the model.
      threshold: of the logarithm of the KVzip+ score, such as -4; None for a budget alone.
      recent: last tokens that stay; a budget of fewer tokens protects as many as it has.
      sinks: first tokens that stay.
    """
    count, recent, sinks = (
        as_count(budget, "budget"),
        checked(tokens(), "recent", recent),
        checked(tokens(), "sinks", sinks),
    )
    if isinstance(count, Tokens):
        sinks = min(sinks, count.n)
        recent = min(recent, count.n - sinks)
    select = TopK() if threshold is None else AboveThreshold(threshold)
    protect = Protect(sinks=sinks, recent=recent)
    return Evict(Predicted(function), budget, protect=protect, select=select, when=every_step())
