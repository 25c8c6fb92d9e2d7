"""SimLayerKV (Zhang et al., arXiv 2410.13846)."""

from kvjax.eviction import Evict
from kvjax.scoring.protect import Protect
from kvjax.scoring.scores import Window
from kvjax.scoring.select import LazyOrAll
from kvjax.sizes.budget import Count


def simlayerkv(
    threshold: float,
    *,
    sinks: int = 4,
    recent: int = 1024,
    rows: int = 1,
    budget: int | float | Count = 1.0,
) -> Evict:
    r"""Lazy layers, which look at the first and the last tokens alone, keep those alone.

    A layer is lazy if the last `rows` of the prompt give its sinks and recent tokens more than `threshold` of their
    attention, on average over rows and heads. The others keep everything, or what a budget holds of it: those with
    the most attention of the same rows. Published thresholds: 0.9 for Llama 3, 0.65 for Llama 2, 0.8 for Mistral, 0.85
    for Qwen.

    kvpress (`SimLayerKVPress`) counts the tokens before the voting rows, and keeps fewer recent ones than it counts, by
    the number of voting rows.

    Args:
      threshold: attention above which a layer is lazy.
      sinks, recent: tokens at either end of the prompt.
      rows: the prompt's last rows, which decide.
      budget: the most live tokens a kv head and layer; slots are allocated for as many in all layers.
    """
    return Evict(Window(rows), budget, protect=Protect(sinks=sinks, recent=recent), select=LazyOrAll(threshold))
