"""DuoAttention."""

import json
import pathlib

import numpy as np

from kvjax import methods
from kvjax.configs.experiment import Common, Experiment, Setup
from kvjax.configs.probed import probed


def get_config(
    streaming_heads: tuple[float, ...] = (0.25, 0.5, 0.75),
    sinks: int = 16,
    recent: int = 48,
    gates: str = "",
    setup: Common = Setup(),
) -> Experiment:
    """Some heads keep everything, the others the first tokens and the last ones.

    Args:
      streaming_heads: share of all heads that stream.
      sinks: first tokens that streaming heads keep.
      recent: last tokens that they keep.
      gates: an array (.npy) of layers and kv heads, or what `experiments/learn_gates.py` wrote (.json); that beside the
        model's weights if empty.
      setup: model, tasks and sizes.
    """
    if not streaming_heads:
        raise ValueError("streaming_heads is empty; give at least one share in [0, 1]")
    table = _gates(setup, gates)
    make = lambda share: methods.duo_attention(table, streaming_heads=share, sinks=sinks, recent=recent)
    return Experiment("duo_attention", tuple((f"streaming-{share:g}", make(share)) for share in streaming_heads), setup)


def _gates(setup: Common, given: str) -> np.ndarray | list[list[float]]:
    """The gates of a file, or those beside the model's weights.

    Raises:
      ValueError: there are none, or the file holds no gates.
    """
    if pathlib.Path(given).suffix != ".json":
        learned = "gates are learned for a model with kvjax.learning.gates (experiments/learn_gates.py does so for the "
        return probed(setup, given, "gates", how=f"{learned}embedded one); give a file as --gates")
    try:
        found = json.loads(pathlib.Path(given).read_bytes())
    except (OSError, ValueError) as e:
        raise ValueError(f"--gates {given} is no file of JSON that can be read: {e}") from e
    if not isinstance(found, dict) or "gates" not in found:
        raise ValueError(f"--gates {given} has no 'gates'; give what experiments/learn_gates.py wrote")
    return found["gates"]
