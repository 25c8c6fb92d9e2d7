"""HeadKV."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep
from kvjax.configs.probed import probed


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    importance: str = "",
    beta: float = 1.2,
    window_size: int = 16,
    kernel_size: int = 7,
    setup: Common = Setup(),
) -> Experiment:
    """SnapKV, where heads that retrieve get more.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      importance: what `experiments/probe.py heads` wrote for the model; that beside its weights if empty.
      beta: heads give up one part in so many of their tokens; 1 gives up all.
      window_size: the prompt's last tokens, which vote and stay; the papers use 32 on long prompts.
      kernel_size: pooling width, odd.
      setup: model, tasks and sizes.
    """
    array = probed(setup, importance, "heads")
    make = lambda b: methods.headkv(b, array, beta=beta, window_size=window_size, kernel_size=kernel_size)
    return Experiment("headkv", sweep(make, budget), setup)
