"""Keyformer."""

from typing import Literal

from kvjax import Share, chain, methods, shared_layers
from kvjax.configs.experiment import BUDGETS, Budget, Common, Experiment, Setup, sweep


def get_config(
    budget: tuple[Budget, ...] = BUDGETS,
    recent_share: float = 0.3,
    noise: Literal["gumbel", "gaussian", "constant", "none"] = "gumbel",
    per: Literal["call", "key"] = "call",
    tau: tuple[float, float] = (1.0, 2.0),
    shared: bool = False,
    positions: Literal["original", "compact"] = "original",
    setup: Common = Setup(),
) -> Experiment:
    """Accumulated attention under a noisy softmax whose temperature rises, and recent tokens.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      recent_share: protected last tokens, as a share of the budget.
      noise: added to logits before the softmax.
      per: draw for every row and key, or once for every key.
      tau: temperatures of the prompt and of the last new token.
      shared: one score and one decision for all layers.
      positions: absolute, or by rank in the cache.
      setup: model, tasks and sizes.
    """
    return Experiment(
        "keyformer",
        sweep(
            lambda b: (shared_layers if shared else chain)(
                methods.keyformer(b, recent=Share(recent_share), noise=noise, per=per, tau=tau, positions=positions)
            ),
            budget,
        ),
        setup,
    )
