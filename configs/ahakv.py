"""AhaKV."""

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    recent: int = 16,
    recent_accumulation: bool = True,
    step_gain_softmax: bool = True,
    value_prior: bool = True,
    pool_kernel: int = 7,
    setup: Common = Setup(),
) -> Experiment:
    """The last rows vote with a softmax of constant entropy, weighted by values.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      recent: the prompt's last tokens, which vote and stay; the paper uses 32.
      recent_accumulation: False lets all rows vote.
      step_gain_softmax: False uses the model's softmax.
      value_prior: False leaves the values out.
      pool_kernel: pooling width of value norms, odd.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "ahakv",
        sweep(
            lambda b: methods.ahakv(
                b,
                recent=recent,
                recent_accumulation=recent_accumulation,
                step_gain_softmax=step_gain_softmax,
                value_prior=value_prior,
                pool_kernel=pool_kernel,
            ),
            budget,
        ),
        setup,
    )
