"""ExpectedAttention."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep
from kvjax.configs.probed import probed_arrays


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    horizon: int = 512,
    sinks: int = 4,
    covariance: bool = True,
    eps: float = 0.0,
    queries: str = "",
    setup: Common = Setup(),
) -> Experiment:
    """The tokens that queries to come are expected to attend to.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      horizon: positions ahead whose rotations are averaged.
      sinks: protected first tokens.
      covariance: whether the queries' covariance counts.
      eps: added to the expected weight.
      queries: what `experiments/probe.py queries` wrote for the model; those of each prompt count if empty.
      setup: model, tasks and sizes.
    """
    known = probed_arrays(setup, queries, "queries") if queries else None
    options = {"horizon": horizon, "sinks": sinks, "covariance": covariance, "eps": eps, "queries": known}
    make = lambda b: methods.expected_attention(b, **options)
    return Experiment("expected_attention", sweep(make, budget), setup)
