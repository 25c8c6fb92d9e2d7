"""Methods with a policy for every head."""

from typing import Any

import numpy as np

from kvjax.core.compose import partition_heads
from kvjax.core.contract import Policy
from kvjax.core.methods.position import full, streaming_llm


def duo_attention(
    gates: Any,
    *,
    streaming: float = 0.5,
    threshold: float | None = None,
    sinks: int = 64,
    recent: int = 256,
    pool: bool = True,
) -> Policy:
    """Keeps everything in heads that retrieve, and the first and last tokens in the others (arXiv 2410.10819).

    Every kv head has a gate, learned on texts whose answers have to be found in them (DuoAttention, section 2.3).

    Args:
      gates: "L K", between 0 and 1.
      streaming: the share of all heads that stream, those of the smallest gates.
      threshold: heads stream whose gate is below it, in place of a share.
      sinks, recent: first and last tokens that streaming heads keep.
      pool: heads have slots in one pool, as many as each needs; otherwise each has those of the largest.
    """
    gates = np.asarray(gates, np.float64)
    if gates.ndim != 2 or not ((gates >= 0) & (gates <= 1)).all():
        raise ValueError(
            f"gates are of shape {gates.shape}, from {gates.min(initial=1)} to {gates.max(initial=0)}; give one "
            "between 0 and 1 for every layer and kv head"
        )
    if not 0 <= streaming <= 1:
        raise ValueError(f"streaming={streaming} is no share of the {gates.size} heads; give a number from 0 to 1")
    streams = np.zeros(gates.size, bool)
    streams[np.argsort(gates, axis=None, kind="stable")[: int(streaming * gates.size + 1e-9)]] = True
    streams = streams.reshape(gates.shape) if threshold is None else gates < threshold
    few = streaming_llm(sinks + recent, sinks=sinks, positions="original")
    return partition_heads({False: full(), True: few}, streams.tolist(), pool=pool)
