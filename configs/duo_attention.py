"""DuoAttention."""

import json
import pathlib

from configs.experiment import Common, Experiment, Setup
from kvjax import methods

LEARNED = pathlib.Path(__file__).parents[1] / "experiments" / "bench_results" / "duo_gates.json"


def get_config(
    streaming_heads: tuple[float, ...] = (0.25, 0.5, 0.75),
    sinks: int = 16,
    recent: int = 48,
    gates: str = str(LEARNED),
    setup: Common = Setup(),
) -> Experiment:
    """Some heads keep everything, the others the first tokens and the last ones.

    Args:
      streaming_heads: share of all heads that stream.
      sinks: first tokens that streaming heads keep.
      recent: last tokens that they keep.
      gates: a file that `experiments/learn_gates.py` wrote; that of the embedded model if not given.
      setup: model, tasks and sizes.
    """
    if not streaming_heads:
        raise ValueError("streaming_heads is empty; give at least one share in [0, 1]")
    table = json.loads(pathlib.Path(gates).read_bytes())["gates"]
    make = lambda share: methods.duo_attention(table, streaming_heads=share, sinks=sinks, recent=recent)
    return Experiment("duo_attention", tuple((f"streaming-{share:g}", make(share)) for share in streaming_heads), setup)
