"""Methods with a policy for every head."""

import numpy as np

from kvjax.core.compose import partition_heads
from kvjax.core.contract import Policy
from kvjax.core.methods.position import full, streaming_llm


def duo_attention(gates, *, streaming=0.5, sinks=64, recent=256, pool=True) -> Policy:
    """Heads that retrieve keep everything, others the first and last tokens; `gates` "L K" (arXiv 2410.10819)."""
    gates = np.asarray(gates)
    streams = np.zeros(gates.size, bool)
    streams[np.argsort(gates, axis=None, kind="stable")[: int(streaming * gates.size + 1e-9)]] = True
    few = streaming_llm(sinks + recent, sinks=sinks, positions="original")
    return partition_heads({False: full(), True: few}, streams.reshape(gates.shape).tolist(), pool=pool)
