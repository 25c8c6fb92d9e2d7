"""Policies of benchmarks by their names, beside those of `kvjax.methods`."""

import dataclasses
import functools

import kvjax
from kvjax import methods
from kvjax.contract import Layout

_OTHERS = {
    "full": lambda budget: methods.full(),
    "ada_snapkv dense": lambda budget: dataclasses.replace(methods.ada_snapkv(budget), layout=Layout()),
    "quest everywhere": functools.partial(methods.quest, dense=0),
    "criticalkv": lambda budget: methods.criticalkv(methods.snapkv(budget)),
    "chunkkv": lambda budget: methods.chunkkv(methods.snapkv(budget)),
}


def make_policy(name: str, budget: float) -> kvjax.Policy:
    """A method at a budget: a share of the prompt up to 1, else a number of tokens. "full" has none."""
    count = budget if budget <= 1 else round(budget)
    return (_OTHERS[name] if name in _OTHERS else getattr(methods, name))(count)
