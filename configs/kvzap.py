"""KVzap."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep
from kvjax.configs.probed import probed_arrays
from kvjax.scoring.predicted import HiddenHeads


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    function: str = "",
    threshold: float | None = None,
    recent: int = 16,
    sinks: int = 4,
    setup: Common = Setup(),
) -> Experiment:
    """What a small function of hidden states says that KVzip+ would keep.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      function: what `experiments/probe.py kvzap` wrote for the model; that beside its weights if empty.
      threshold: what scores below it goes, and the budget is the most that stays; None for the budget alone.
      recent: last tokens that stay; the paper's 128 are for prompts of thousands.
      sinks: first tokens that stay, to which the function is not fitted.
      setup: model, tasks and sizes.
    """
    fitted = HiddenHeads(probed_arrays(setup, function, "kvzap"))
    make = lambda b: methods.kvzap(b, fitted, threshold=threshold, recent=recent, sinks=sinks)
    return Experiment("kvzap", sweep(make, budget), setup)
