"""A config made of a method: the method's signature is the command line, its docstring the help."""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal

from kvjax import Policy, Share
from kvjax.configs.experiment import (
    BUDGETS,
    LARGEST,
    Budget,
    Common,
    Experiment,
    Setup,
    check_finite,
    check_whole,
    sweep,
)
from kvjax.contract import Count

_PLAIN = (int, float, bool, str, type(None))
_SETUP = "model, tasks and sizes."
_BUDGET = "live tokens a kv head and layer: numbers of tokens (int) or shares of the prompt (float)."


@dataclasses.dataclass(frozen=True)
class File:
    """An option that names a file.

    Attributes:
      read: what the file, or "" for none, stands for; the setup names the model.
      help: of the option.
    """

    read: Callable[[Setup, str], Any]
    help: str


@dataclasses.dataclass(frozen=True)
class _Option:
    """How an option becomes an argument of the method."""

    parameter: str
    kind: Any
    default: Any
    help: str
    use: Callable[[Setup, Any], Any]


def of(
    make: Callable[..., Policy],
    *,
    over: str = "budget",
    values: Sequence[Any] = BUDGETS,
    form: str | None = None,
    given: Callable[[Setup], dict[str, Any]] | None = None,
    **defaults: Any,
) -> Callable[..., Experiment]:
    """The config of a method. Its options are those of the method's parameters that a command line can give.

    Args:
      make: the method, or a function that makes a policy.
      over: the parameter of which every value makes a policy.
      values: those, where none are given.
      form: how they are written in results, if not as they are.
      given: arguments that are found for the model, which are no options.
      defaults: in place of the method's own, for a small model and short prompts; a `File` makes an option of its kind.
    """
    helps, own = _helps(make), inspect.signature(make).parameters
    found = [_option(n, p, defaults.get(n, p.default), helps.get(n, "")) for n, p in _typed(make) if n != over]
    options = {name: option for name, option in found if option is not None}

    def get_config(**chosen: Any) -> Experiment:
        setup, swept = chosen.pop("setup", Setup()), chosen.pop(over, tuple(values))
        if unknown := [n for n in chosen if n not in options]:
            raise TypeError(f"{make.__name__} has no option {unknown[0]}; there are {', '.join([over, *options])}")
        check_finite(**{n: x for n, x in chosen.items() if isinstance(x, float)})
        check_whole(-LARGEST, **{n: x for n, x in chosen.items() if isinstance(x, int) and not isinstance(x, bool)})
        asked = {o.parameter: (o, chosen.get(n, o.default)) for n, o in options.items()}
        arguments = {n: o.use(setup, x) for n, (o, x) in asked.items()} | ({} if given is None else given(setup))
        shown = {n: x if isinstance(defaults.get(n), File) else arguments[n] for n, (_, x) in asked.items()}
        empty = inspect.Parameter.empty
        differs = [f"{n}={x!r}" for n, x in shown.items() if x not in (own[n].default, "") and own[n].default != empty]
        policies = sweep(lambda x: make(**{over: x}, **arguments), swept, over, form)
        return Experiment(make.__name__, policies, setup, options=", ".join(differs))

    several = Budget if over == "budget" else float
    each = {over: (tuple[several, ...], tuple(values), _BUDGET if over == "budget" else helps[over])}
    each |= {name: (o.kind, o.default, o.help) for name, o in options.items()} | {"setup": (Common, Setup(), _SETUP)}
    one = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(n, one, default=x, annotation=kind) for n, (kind, x, _) in each.items()]
    get_config.__signature__ = inspect.Signature(parameters, return_annotation=Experiment)  # type: ignore[attr-defined]
    get_config.__annotations__ = {n: kind for n, (kind, _, _) in each.items()} | {"return": Experiment}
    first = (inspect.getdoc(make) or "").partition("\n")[0]
    get_config.__doc__ = "\n".join([first, "", "Args:", *(f"  {n}: {text}" for n, (_, _, text) in each.items())])
    return get_config


def _typed(make: Callable[..., Policy]) -> list[tuple[str, inspect.Parameter]]:
    """The parameters of a method, whose annotations are types and not text."""
    hints = typing.get_type_hints(make)
    return [(n, p.replace(annotation=hints[n])) for n, p in inspect.signature(make).parameters.items()]


def _option(name: str, parameter: inspect.Parameter, default: Any, text: str) -> tuple[str, _Option | None]:
    """The option of a parameter, None where a command line cannot give it."""
    kind, use = parameter.annotation, lambda _, x: x
    if isinstance(default, File):
        return name, _Option(name, str, "", default.help, default.read)
    if isinstance(default, Share):
        text = f"{text.rstrip('.')}: a share of the budget."
        return f"{name}_share", _Option(name, float, default.share, text, lambda _, x: Share(x))
    if {*typing.get_args(typing.get_args(Count)[0])} <= {*typing.get_args(kind)}:  # what it annotates
        kind = Budget | None if type(None) in typing.get_args(kind) else Budget
    elif not _is_plain(kind):
        return name, None
    return name, None if default is inspect.Parameter.empty else _Option(name, kind, default, text, use)


def _is_plain(kind: Any) -> bool:
    """Whether a command line can give values of a type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return all(map(_is_plain, arguments))
    return origin is Literal or kind in _PLAIN or (origin is tuple and ... not in arguments)


def _helps(make: Callable[..., Policy]) -> dict[str, str]:
    """What the docstring of a method says of each parameter, in one line."""
    text = (inspect.getdoc(make) or "").partition("Args:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    for names, told in re.findall(r"^  ([\w, ]+): (.*(?:\n    .*)*)", text, re.MULTILINE):
        found |= dict.fromkeys(names.split(", "), re.sub(r"\s+", " ", told))
    return found
