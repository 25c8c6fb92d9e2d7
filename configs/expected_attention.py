"""ExpectedAttention."""

from configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep
from kvjax import methods


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    horizon: int = 512,
    sinks: int = 4,
    covariance: bool = True,
    eps: float = 0.0,
    setup: Common = Setup(),
) -> Experiment:
    """The tokens that queries to come are expected to attend to.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      horizon: positions ahead whose rotations are averaged.
      sinks: protected first tokens.
      covariance: whether the queries' covariance counts.
      eps: added to the expected weight.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "expected_attention",
        sweep(
            lambda b: methods.expected_attention(b, horizon=horizon, sinks=sinks, covariance=covariance, eps=eps),
            budget,
        ),
        setup,
    )
