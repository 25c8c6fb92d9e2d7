"""ThinK."""

from typing import Literal

from kvjax import methods
from kvjax.configs.experiment import Common, Experiment, Setup


def get_config(
    channels: tuple[float, ...] = (0.25, 0.5, 0.75),
    query_rows: int = 32,
    storage: Literal["dropped", "zeroed"] = "dropped",
    setup: Common = Setup(),
) -> Experiment:
    """Key channels are dropped instead of tokens.

    Args:
      channels: share of the key channels that is dropped.
      query_rows: the prompt's last rows whose queries decide.
      storage: store keys without the channels, or zero them in the prompt's keys.
      setup: model, tasks and sizes.
    """
    if not channels:
        raise ValueError("channels is empty; give at least one share in [0, 1)")
    make = lambda share: methods.think(share, query_rows=query_rows, storage=storage)
    return Experiment("think", tuple((f"channels-{share:g}", make(share)) for share in channels), setup)
