"""DuoAttention (arXiv 2410.10819)."""

from collections.abc import Sequence

import numpy as np

from kvjax.algebra import partition_heads
from kvjax.methods.full import full
from kvjax.methods.streaming_llm import streaming_llm
from kvjax.pallas_kernels.values import check_array, checked, each, number, optional, tokens
from kvjax.policy import Layout, Policy
from kvjax.sizes.budget import whole_tokens


def duo_attention(
    gates: Sequence[Sequence[float]] | np.ndarray,
    *,
    streaming_heads: float | None = None,
    threshold: float | None = None,
    sinks: int = 64,
    recent: int = 256,
    storage: Layout = "pool",
) -> Policy:
    """Kv heads that have to retrieve keep everything; all others keep the first tokens and the last ones.

    Which is which says a gate for every kv head, learned on texts whose answers have to be found in them
    (`kvjax.learning.gates`, `experiments/learn_gates.py`); the heads of the smallest gates stream (section 2.3). A
    streaming head holds `sinks + recent` tokens, the newest among them, at the positions that they have in the text.

    A prompt that is read at once is read with full attention in all heads, and evicted from then; read in blocks
    (`kvjax.prefill(..., block=512)`), streaming heads see their sinks and recent tokens, and the block, as in the
    paper's chunked pre-filling (section 2.4). In a pool every head has the slots that it needs, where the released code
    keeps two caches a layer.

    Args:
      gates: of every layer and kv head, between 0 and 1.
      streaming_heads: the share of all heads that stream, those of the smallest gates; of equal ones, those of the
        first layer and head. Half of them if neither this nor a threshold is given.
      threshold: in place of a share, heads stream whose gates are below this. The released code takes the quantile of
        the gates at the wanted share, and breaks ties by noise.
      sinks: first tokens that streaming heads keep.
      recent: last tokens that they keep.
      storage: "pool", or "dense" for the slots of the layer's largest head in all of them.

    Raises:
      ValueError: no gates, rows of different lengths, gates outside of [0, 1], a share and a threshold; in `make_plan`,
        gates of another number of layers or heads.
    """
    unit = number("[0, 1]")
    if isinstance(gates, np.ndarray):
        check_array("gates", gates * 1.0 if gates.dtype.kind in "iu" else gates, "layers", "kv heads")
    rows = checked(each(each(unit, least=1), least=1), "gates", gates)
    if len(widths := sorted({len(row) for row in rows})) > 1:
        raise ValueError(f"gates have rows of {widths} heads; give every layer one gate a kv head")
    share = checked(optional(unit), "streaming_heads", streaming_heads)
    threshold = checked(optional(unit), "threshold", threshold)
    if share is not None and threshold is not None:
        raise ValueError(
            f"streaming_heads={share} and threshold={threshold} both say which heads stream; give one of them"
        )
    values = np.array(rows)
    if threshold is None:
        count = int(whole_tokens(0.5 if share is None else share, np.array([values.size]))[0])
        streams = np.zeros(values.size, bool)
        streams[np.argsort(values, axis=None, kind="stable")[:count]] = True
        streams = streams.reshape(values.shape)
    else:
        streams = values < threshold
    sinks = checked(tokens(), "sinks", sinks)
    recent = checked(tokens(1, "a streaming head keeps its row's own token at least"), "recent", recent)
    few = streaming_llm(sinks + recent, sinks=sinks, positions="original")
    labels = np.where(streams, "streaming", "retrieval")
    return partition_heads({"retrieval": full(), "streaming": few}, labels.tolist(), storage=storage)
