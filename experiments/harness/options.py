"""What options stand for: a policy by the name of its config, and a sampler by the options of generation."""

import inspect
import typing
from collections.abc import Mapping
from typing import Any

from kvjax import Policy, configs
from kvjax.configs.experiment import Budget, label, with_params
from kvjax.generation.sampling import Sampler
from kvjax.models.generation_config import read_sampler


def policy_of(name: str | Policy, budget: Budget | None, parameters: Mapping[str, Any]) -> tuple[Policy, str]:
    """The policy that a config makes, and the user's file that it came from (`definition`), if it did.

    Args:
      name: a file in configs/, by name, or a path to another one; or a policy, which is taken as it is.
      budget: live tokens a kv head and layer: a number of tokens (int) or a share of the prompt (float); None for a
        policy without one.
      parameters: the config's others, by name. What it takes several of, such as FastGen's recovery ratios, is given
        as one.

    Raises:
      ValueError: no such config, a parameter that it does not have or a value that it refuses, no budget where it needs
        one, or several policies.
    """
    if isinstance(name, Policy):
        return name, ""
    _, get_config = configs.find(str(name))
    own = [p for p in inspect.signature(get_config).parameters if p != "setup"]
    given = dict(parameters) if budget is None else {"budget": budget, **parameters}
    if unknown := sorted(set(given) - set(own)):
        raise ValueError(
            f"policy={name} has no {', '.join(unknown)}; its parameters are {', '.join(own) or 'none'}, and those of "
            "the model are in experiments/harness/README.md"
        )
    if "budget" in own and budget is None:
        raise ValueError(f"policy={name} needs budget=, a number of tokens such as 64 or a share such as 0.2")
    hints = typing.get_type_hints(get_config)
    experiment = get_config(**{p: _as_typed(value, hints[p]) for p, value in given.items()})
    found = experiment.policies
    if len(found) != 1:
        several = [p for p in own if typing.get_args(hints[p])[1:] == (...,)]
        raise ValueError(
            f"policy={name} stands for {len(found)} policies ({', '.join(label(b) for b, _ in found)}); give one value "
            f"of {', '.join(several)}"
        )
    policy, own = with_params(found[0][1])
    if own:
        raise ValueError(f"policy={name} has learned parameters, which lm-eval's models here do not take; use run.py")
    return policy, f"{experiment.origin} at {label(found[0][0])}" if experiment.origin else ""


def _as_typed(value: Any, wanted: Any) -> Any:
    """A value as a config's signature has it: in a tuple where that has any number of them."""
    if typing.get_origin(wanted) is not tuple:
        return value
    if isinstance(value, list | tuple):
        return tuple(value)
    return (value,) if typing.get_args(wanted)[1:] == (...,) else value


def sampler_of(options: Mapping[str, Any]) -> Sampler:
    """What draws tokens, from the options of generation that transformers has too.

    Raises:
      ValueError: an option that is not there, or a value that it does not take.
    """
    known = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: value for name, value in options.items() if (name, value) != ("num_beams", 1)}
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(
            f"generation has no {', '.join(unknown)} here; there are until, max_gen_toks, {', '.join(known)}"
        )
    drawn = given["do_sample"] and given.get("temperature") != 0
    return read_sampler({**given, "do_sample": drawn, "top_k": given.get("top_k") or 0})  # 0, and no word, for all
