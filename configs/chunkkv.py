"""ChunkKV."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    window_size: int = 16,
    chunk_size: int = 20,
    setup: Common = Setup(),
) -> Experiment:
    """Whole chunks of text by SnapKV's scores, the same in all heads.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      window_size: the prompt's last tokens, which vote.
      chunk_size: tokens of a chunk.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "chunkkv",
        sweep(
            lambda b: methods.chunkkv(b, base=methods.snapkv(b, window_size=window_size), chunk_size=chunk_size), budget
        ),
        setup,
    )
