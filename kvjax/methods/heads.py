"""Methods with a policy for every head."""

import dataclasses

import numpy as np

from kvjax.compose import partition_heads
from kvjax.contract import Amount, Layout, Policy, Proportion
from kvjax.methods.position import full, streaming_llm
from kvjax.pallas_kernels.kinds import HeadTable


def duo_attention(gates: HeadTable, *, streaming: Proportion = 0.5, sinks: Amount = 64, recent: Amount = 256) -> Policy:
    """Keeps everything in heads that retrieve, and the first and last tokens in the others (arXiv 2410.10819).

    Every kv head has a gate, learned on texts whose answers have to be found in them (DuoAttention, section 2.3).

    Args:
      gates: "L K", between 0 and 1; those of real models are read by `kvjax.methods.published`.
      streaming: the share of all heads that stream, those of the smallest gates.
      sinks, recent: first and last tokens that streaming heads keep.
    """
    gates = np.asarray(gates, np.float64)
    if gates.ndim != 2 or not ((gates >= 0) & (gates <= 1)).all():
        raise ValueError(
            f"gates are of shape {gates.shape}, from {gates.min(initial=1)} to {gates.max(initial=0)}; give one "
            "between 0 and 1 for every layer and kv head"
        )
    streams = np.zeros(gates.size, bool)
    streams[np.argsort(gates, axis=None, kind="stable")[: int(streaming * gates.size + 1e-9)]] = True
    few = dataclasses.replace(streaming_llm(sinks + recent, sinks=sinks), layout=Layout())
    return partition_heads({False: full(), True: few}, streams.reshape(gates.shape).tolist())
