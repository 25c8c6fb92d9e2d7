"""Compactor."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    blend: float | None = None,
    chunk_size: int = 256,
    sketch: int | None = 48,
    sinks: int = 8,
    recent: int = 4,
    setup: Common = Setup(),
) -> Experiment:
    """Keys that stand out, and tokens that their neighbourhood looks at.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      blend: weight of leverage; None for the share of the prompt that is evicted.
      chunk_size: tokens of a chunk, within which rows look both ways.
      sketch: columns of the random sketch of keys.
      sinks: protected first tokens.
      recent: protected last tokens.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "compactor",
        sweep(
            lambda b: methods.compactor(
                b, blend=blend, chunk_size=chunk_size, sketch=sketch, sinks=sinks, recent=recent
            ),
            budget,
        ),
        setup,
    )
