"""How large the contract is, in numbers that tests hold (python -m tests.contract)."""

import dataclasses
import inspect
import pathlib
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax import methods, models
from kvjax.contract import Part, Policy, Score
from kvjax.models.embedded import EMBEDDED

_ROOT = pathlib.Path(kvjax.__file__).parent
_OUTSIDE = tuple(str(_ROOT / name) for name in ("models", "pallas_kernels"))


def members(kind: type, base: type | None = None) -> list[str]:
    """What a class asks of those that write a subclass: its methods and properties that `base` has not."""
    own = [n for n in dir(kind) if callable(getattr(kind, n)) or isinstance(getattr(kind, n), property)]
    known = dir(base or object)
    return [n for n in own if (not n.startswith("_") or n == "__call__") and (n not in known or n == "__call__")]


def method_parameters() -> dict[str, int]:
    """The parameters of every method."""
    return {n: len(inspect.signature(f).parameters) for n, f in vars(methods).items() if inspect.isfunction(f)}


def _counts(file: str) -> bool:
    return file.startswith(str(_ROOT)) and not file.startswith(_OUTSIDE)


def entered(call: Callable[[], Any]) -> set[CodeType]:
    """The functions of the library that a call enters, lambdas too; models and kernels are not counted."""
    found: set[CodeType] = set()

    def look(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and _counts(code.co_filename):
            found.add(code)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def generate() -> Callable[[], Any]:
    """One `generate` call with SnapKV, of two prompts and five tokens."""
    model, params = models.load(EMBEDDED)
    tokens = np.random.default_rng(1).integers(3, model.config.vocab_size, (2, 88)).astype(np.int32)
    how: dict[str, Any] = {"lengths": [88, 70], "max_new_tokens": 5, "eos_ids": ()}
    policy = methods.snapkv(20, window=8)
    return lambda: kvjax.generate(model, params, tokens, policy=policy, **how)


def sizes() -> dict[str, float]:
    """How much there is to learn."""
    parameters = method_parameters().values()
    return {
        "members of Policy": len(members(Policy)),
        "members of Score": len(members(Score, Part)),
        "fields of Evict": len(dataclasses.fields(kvjax.Evict)),
        "parameters of a method, on average": sum(parameters) / len(parameters),
        "exported names": len(kvjax.__all__),
    }


def calls() -> dict[str, int]:
    """How much there is to step through, before programs are compiled and afterwards."""
    call = generate()
    jax.clear_caches()
    first, again = entered(call), entered(call)
    lines = {(code.co_filename, line) for code in first for *_, line in code.co_lines() if line}
    found = {"functions that generate enters": len(first), "functions that it enters again": len(again)}
    return found | {"lines of code in functions that generate enters": len(lines)}


if __name__ == "__main__":
    for name, number in (sizes() | calls()).items():
        print(f"{number:5}  {name}")
