"""SimLayerKV."""

from kvjax import methods
from kvjax.configs.experiment import Common, Experiment, Setup


def get_config(
    threshold: tuple[float, ...] = (0.9, 0.8, 0.65),
    sinks: int = 4,
    recent: int = 64,
    rows: int = 1,
    setup: Common = Setup(),
) -> Experiment:
    """Lazy layers keep sinks and recent tokens, the others everything.

    Args:
      threshold: attention to sinks and recent tokens above which a layer is lazy.
      sinks: first tokens of lazy layers.
      recent: last tokens of lazy layers; the paper uses 1,024 on long prompts.
      rows: the prompt's last rows, which decide.
      setup: model, tasks and sizes.
    """
    if not threshold:
        raise ValueError("threshold is empty; give at least one number in [0, 1]")
    make = lambda t: methods.simlayerkv(t, sinks=sinks, recent=recent, rows=rows)
    return Experiment("simlayerkv", tuple((f"T={t:g}", make(t)) for t in threshold), setup)
