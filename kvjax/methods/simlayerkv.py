"""SimLayerKV (Zhang et al., arXiv 2410.13846)."""

from typing import Literal

from kvjax.eviction import Evict
from kvjax.pallas_kernels.values import checked, one_of, tokens
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
    compat: Literal["kvpress"] | None = None,
) -> Evict:
    r"""Lazy layers, which look at the first and the last tokens alone, keep those alone.

    A layer is lazy if the last `rows` of the prompt give its sinks and recent tokens more than `threshold` of their
    attention, on average over rows and heads. The others keep everything, or what a budget holds of it: those with
    the most attention of the same rows. Published thresholds: 0.9 for Llama 3, 0.65 for Llama 2, 0.8 for Mistral, 0.85
    for Qwen.

    kvpress (`SimLayerKVPress`) counts the recent tokens before the voting rows, and keeps fewer than it counts, by the
    number of voting rows: `compat="kvpress"`.

    Args:
      threshold: attention above which a layer is lazy.
      sinks, recent: tokens at either end of the prompt.
      rows: the prompt's last rows, which decide.
      budget: the most live tokens a kv head and layer; slots are allocated for as many in all layers.
      compat: "kvpress" counts and keeps as kvpress does.

    Raises:
      ValueError: no more recent tokens than voting rows under `compat`.
    """
    one_of("compat", compat, None, "kvpress")
    sinks, recent = (checked(tokens(), name, n) for name, n in (("sinks", sinks), ("recent", recent)))
    score = Window(rows)
    if compat is None:
        return Evict(score, budget, protect=Protect(sinks=sinks, recent=recent), select=LazyOrAll(threshold))
    if recent <= score.rows:
        raise ValueError(f"recent={recent} tokens less the {score.rows} voting rows are none; raise recent")
    select = LazyOrAll(threshold, (sinks, recent, score.rows))
    return Evict(score, budget, protect=Protect(sinks=sinks, recent=recent - score.rows), select=select)
