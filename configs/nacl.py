"""NaCl."""

from typing import Literal

from kvjax import methods
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    proxies: int | float | None = None,
    protect: int | float | None = None,
    random: int | float | None = None,
    sinks: int = 0,
    random_pool: Literal["rest", "all"] = "rest",
    random_distribution: Literal["softmax", "normalised", "uniform"] = "softmax",
    head_mode: Literal["headwise", "layer", "global"] = "headwise",
    proxy_causal: bool = True,
    decode_every: int | None = None,
    setup: Common = Setup(),
) -> Experiment:
    """What the last part of the prompt attends to, and a random sample of the rest.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      proxies: voting rows at the end: a number (int) or a share of the prompt (float); Table 4 if not given.
      protect: proxies that stay; Table 4 if not given.
      random: tokens kept by the draw; Table 4 if not given.
      sinks: protected first tokens.
      random_pool: draw from what the proxies left, or from all tokens.
      random_distribution: what the draw follows.
      head_mode: every head for itself, one decision a layer, or one for all layers.
      proxy_causal: whether proxies see only earlier tokens.
      decode_every: evict at every so many decode steps; never if not given.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "nacl",
        sweep(
            lambda b: methods.nacl(
                b,
                proxies=proxies,
                protect=protect,
                random=random,
                sinks=sinks,
                random_pool=random_pool,
                random_distribution=random_distribution,
                head_mode=head_mode,
                proxy_causal=proxy_causal,
                decode_every=decode_every,
            ),
            budget,
        ),
        setup,
    )
