"""KVzip."""

from typing import Literal

from kvjax import methods, models
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    plus: bool = False,
    chunk: int = 2048,
    overlap: int = 8,
    sinks: int = 4,
    storage: Literal["dense", "pool"] = "pool",
    setup: Common = Setup(),
) -> Experiment:
    """What the model attends to while it repeats the prompt; the heads of a layer compete for its budget.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      plus: whether probabilities are weighed by what values contribute (KVzip+).
      chunk: tokens that are repeated at once.
      overlap: tokens of the chunk before, in front of a later one.
      sinks: protected first tokens.
      storage: "pool" allocates a layer what its heads need together, "dense" every head the slots of the largest.
      setup: model, tasks and sizes.
    """
    tokenizer = models.load_tokenizer(setup.source)
    make = lambda b: methods.kvzip(
        b, tokenizer=tokenizer, chunk=chunk, overlap=overlap, sinks=sinks, plus=plus, storage=storage
    )
    return Experiment("kvzip", sweep(make, budget), setup)
