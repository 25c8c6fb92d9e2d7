"""Budgets of heads and layers learned by gradient."""

import functools
from collections.abc import Callable
from typing import Annotated, Any, Literal

import tyro

from kvjax import Share, methods
from kvjax.analysis import VotingRows
from kvjax.configs.experiment import Budget
from kvjax.configs.learning import LearnedBudget, Objective, Prompts
from kvjax.learning.families import EntropyK, Family, NaclShares, PyramidBeta, Safeguard, Simplex, WindowShare


def get_config(
    budget: tuple[Budget, ...] = (0.0625, 0.125, 0.1875, 0.25),
    parametrisation: Literal["both", "heads", "layers", "pyramid", "safeguard", "window", "nacl", "ahakv"] = "both",
    objective: Objective = "eviction_loss",
    floor: float = 0.05,
    steps: int = 150,
    rate: float = 0.1,
    temperature: tuple[float, float] = (16.0, 1.0),
    window_size: int = 16,
    kernel_size: int = 7,
    pyramid_beta: float = 20.0,
    ada_alpha: float = 0.5,
    prompts: Annotated[Prompts, tyro.conf.arg(name="")] = Prompts(),
) -> LearnedBudget:
    """SnapKV's budget (or NaCl's, or AhaKV's), divided as calibration prompts want it.

    Args:
      budget: live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float).
      parametrisation: shares of "both" heads and layers, of "heads" within each layer, of "layers"; the one number of
        a "pyramid" (beta), of Ada-KV's "safeguard" (alpha) or of the recent "window" (its share); the shares of "nacl";
        or the k of "ahakv"'s softmax.
      objective: the exact eviction loss, the divergence at the model's output, or the cross-entropy of what follows.
      floor: the least that a head gets beside the window, as a share of the average.
      steps: updates for every budget.
      rate: Adam's first learning rate.
      temperature: of the gates at the first and the last step, in tokens.
      window_size: the prompt's last tokens, which vote and stay.
      kernel_size: pooling width, odd.
      pyramid_beta: of the baseline PyramidKV.
      ada_alpha: of the baseline Ada-KV.
      prompts: model, prompts and sizes.
    """
    snapkv = functools.partial(methods.snapkv, window=window_size, kernel=kernel_size)
    nacl = functools.partial(methods.nacl, proxies=window_size, recent=Share(0.1), random=Share(0.5))
    ahakv = functools.partial(methods.ahakv, recent=window_size)
    method: Callable[..., Any] = {"nacl": nacl, "ahakv": ahakv}.get(parametrisation, snapkv)
    families: dict[str, Family] = {
        "both": Simplex("both", floor),
        "heads": Simplex("heads", floor),
        "layers": Simplex("layers", floor),
        "pyramid": PyramidBeta(),
        "safeguard": Safeguard(),
        "window": WindowShare(),
        "nacl": NaclShares((1.0, 4.0, 5.0)),
        "ahakv": EntropyK(),
    }
    return LearnedBudget(
        "learned_budget",
        method,
        budget,
        families[parametrisation],
        objective,
        steps,
        rate,
        temperature,
        pyramid_beta,
        ada_alpha,
        (VotingRows(window_size),) if parametrisation == "ahakv" else (),
        prompts,
    )
