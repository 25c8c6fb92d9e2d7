"""Calls every public function and part with bad values for each argument, and prints what came of it, by module.

    python -m tests.tools.fuzz            # all values
    python -m tests.tools.fuzz --short    # some of them
    python -m tests.tools.fuzz --record   # writes the table of what each function of `kvjax` refuses

A call is clear if it ends in a ValueError that the library itself raised. It is unclear if it ends in any other error,
and silent if it took a value that the argument's annotation does not allow.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import pathlib
import tempfile
import traceback
import typing
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax import methods, models
from kvjax.analysis import read
from kvjax.codecs import Int8
from kvjax.compose.across import ScoreEntropy
from kvjax.contract import FrozenArrays
from kvjax.models.embedded import EMBEDDED
from kvjax.observe import CentredQueries, Hidden, ProjectedValueNorm, Reread, Rows
from kvjax.pallas_kernels.kinds import _kinds as kinds_of
from kvjax.pallas_kernels.kinds import kind_of
from kvjax.run.state import Prompts
from kvjax.scores.attention import Accumulated

BAD = [
    *(None, float("nan"), float("inf"), -float("inf"), -1, -0.5, 1j, 10**30, 1e300, -(2**40), "7", "", b"7"),
    *([], ["a"], {}, {"a": 1}, object(), int, np.array(np.nan), np.array(["a"]), np.ones((1, 2, 3, 4, 5)), range(0)),
    *((), True),
]
MODULES = {
    "methods": ("methods", *(f"methods.released.{m}" for m in ("papers", "factory", "kvpress", "easykv"))),
    "run": ("",),
    "parts": (
        *(
            "budgets",
            "codecs",
            "observe",
            "contract",
            "compose.across",
            "scores.attention",
            "scores.blends",
            "scores.keys",
        ),
        *("scores.learned", "scores.rows", "scores.softmax", "decide.select", "decide.rewrite", "methods.hidden"),
    ),
    "kernels": ("pallas_kernels",),
    "analysis": ("analysis",),
    "learning": tuple(f"learning.{m}" for m in ("families", "gates", "kvzap", "probes", "relax", "soft")),
    "plot": ("plot",),
}
REFUSALS = pathlib.Path(__file__).parents[1] / "golden" / "refusals.json"
_OF_ROWS = "with_rows", "with_softmax", "summed_by"  # of policies whose score sums rows
_OF_NACL = "nacl_drawn", "nacl_both_ends", "nacl_by_layer"
SIZES = {"N": 4, "K": 2, "S": 8, "T": 8, "R": 2, "H": 4, "D": 6, "L": 4, "V": 12, "M": 3, "G": 2, "P": 8, "heads": 2}


@functools.cache
def examples() -> dict[Any, Any]:
    """Good values of what annotations do not tell enough of, by class or name."""
    model, params = models.load(EMBEDDED)
    tokens, snapkv = np.arange(5, 13)[None], methods.snapkv(6, window=2)
    logits, state = kvjax.prefill(model, params, tokens, policy=snapkv, max_new_tokens=16)
    reading = read(model, params, tokens, tokens[:, :2], policies=(snapkv,))
    mask = np.ones((4, 1, 2, 8), bool)
    tokenizer = models.load_tokenizer(EMBEDDED)
    named = {
        **{"model": model, "params": params, "config": model.config, "tokenizer": tokenizer},
        **{"tokens": tokens, "token": tokens[0, :1], "logits": logits, "continuation": tokens[:, :2], "lengths": [8]},
        **{"key": jax.random.key(0), "table": FrozenArrays({"filters": np.ones(2)}), "by": ScoreEntropy()},
        **{"gates": np.full((2, 2), 0.5), "importance": np.ones((2, 2)), "filters": np.ones((2, 2, 4)), "kernel": 1},
        **{"labels": ["a"] * 4, "policies": {"a": snapkv}, "path": "state", "what": Rows()},
        **{"targets": np.zeros(1, int), "shares": np.ones((4, 2)), "values": [1.0, 2.0], "curves": {"a": {4: 1.0}}},
        **{"kept": mask[0], "chosen": reading.decisions(snapkv)[0], "width": 8, "text": "goat", "budget": 32},
        **{"length": 64, "losses": np.full((60, 4, 2), 0.5)},
        **{"samples": {"a": [{"depth": 0.5, "length": 8, "score": 1.0}]}, "prompt": [[5, 6]], "channels": 0.5},
        **{"weight": ProjectedValueNorm(), "self": kvjax.Session(model, params, tokenizer, max_new_tokens=1)},
    }
    classes = {"Policy": snapkv, "Evict": snapkv, "Score": Accumulated(), "State": state, "Plan": state.plan}
    classes |= {"Rows": Rows(), "Reread": Reread(), "Prompts": Prompts(tokens, np.array([8]))}
    classes |= {"Hidden": Hidden(lambda hidden, layer: hidden), "Reading": reading, "Mesh": kvjax.make_mesh(1, 1)}
    return {**named, **classes, "RowCodec": Int8(), "Schedule": kvjax.budgets.STEP}


def example(name: str, hint: Any) -> Any:
    """A value that an annotation allows."""
    origin, args, known = typing.get_origin(hint), typing.get_args(hint), examples()
    if origin is typing.Literal:
        return args[0]
    either = args if origin is typing.Union or type(hint).__name__ == "UnionType" else ()
    for key in (*(getattr(x, "__name__", None) for x in (hint, *either)), name):
        if key in known:
            return known[key]
    if hasattr(hint, "dim_str"):
        shape = tuple(SIZES.get(d, 1) for d in hint.dim_str.split() if d[0] not in "*.")
        return np.ones(shape, {"Float": np.float32, "Bool": bool}.get(hint.dtype.__name__, np.int32))
    if origin is typing.Annotated:
        return next((x for x in (0.5, 1, 3) if kind_of(hint).holds(x)), example(name, args[0]))
    if either:
        return example(name, args[0])
    if origin is tuple:
        return tuple(example(name, a) for a in args if a is not ...)
    if origin in (collections.abc.Callable, Callable):
        return lambda *args: 0
    if origin in (collections.abc.Sequence, collections.abc.Iterable):
        return [example(name, args[0])]
    return {int: 1, float: 0.5, bool: True, str: "text"}.get(hint, 2)


def entrances(module: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions of a module, its values, and methods of `Session`, by name."""
    names = importlib.import_module(f"kvjax.{module}".rstrip("."))
    for name, x in [*vars(names).items()]:
        inside = getattr(x, "__module__", "").startswith(f"kvjax.{module}".rstrip("."))
        if name.startswith("_") or not inside or name in ("doors", "checked"):
            continue
        is_value = inspect.isclass(x) and dataclasses.is_dataclass(x) and hasattr(x, "__post_init__")
        if is_value or (inspect.isfunction(x) and hasattr(x, "__wrapped__")):
            yield name, x
        elif name == "Session":
            methods_of = (m for m in [*vars(x).values()] if inspect.isfunction(m) and hasattr(m, "__wrapped__"))
            yield from ((m.__qualname__, m) for m in methods_of)


def hints(f: Callable[..., Any]) -> dict[str, tuple[Any, bool]]:
    """The annotation of each parameter, and whether it must be given."""
    found = typing.get_type_hints(f, include_extras=True)
    fixed = {n: p for n, p in inspect.signature(f).parameters.items() if p.kind is not p.VAR_KEYWORD}
    return {n: (found.get(n, Any), p.default is p.empty) for n, p in fixed.items()}


def good(name: str, f: Callable[..., Any]) -> dict[str, Any]:
    """Arguments that a function takes."""
    found = {n: example(n, hint) for n, (hint, needed) in hints(f).items() if needed}
    policies = {"read": methods.streaming_llm(6)} | dict.fromkeys(_OF_ROWS, methods.keyformer(6))
    policies |= dict.fromkeys(_OF_NACL, methods.nacl(6))
    own = {key: {"base": methods.h2o(6)} for key in ("kvpress_decoding", "kvpress_ratio_decoding")}
    centres = dict.fromkeys(("mean", "length"), np.ones((4, 4, 4)))
    own |= {"triattention": centres, "Centred": {"queries": CentredQueries(FrozenArrays(centres))}}
    return found | ({"policy": policies[name]} if name in policies else {}) | own.get(name, {})


def call(f: Callable[..., Any], given: dict[str, Any]) -> Any:
    """What a function gives; a parameter of any number of arguments gets one."""
    several = [n for n, p in inspect.signature(f).parameters.items() if p.kind is p.VAR_POSITIONAL]
    return f(*[given.pop(n) for n in several], **given)


def outcome(f: Callable[..., Any], given: dict[str, Any], allowed: bool) -> str:
    """ "clear", "unclear: ...", "taken" or "silent"."""
    try:
        call(f, given)
    except ValueError as e:
        own = "/kvjax/" in traceback.extract_tb(e.__traceback__)[-1].filename
        return "clear" if own else f"unclear: {e}"
    except Exception as e:
        return f"unclear: {type(e).__name__} {e}"
    return "taken" if allowed else "silent"


def calls(module: str, every: int = 1) -> Iterator[tuple[str, str, Any, str]]:
    """(function, parameter, value, outcome) of all calls with a bad value, or of every so many."""
    count = 0
    for name, f in entrances(module):
        given = good(name, f)
        each = {n: kind for n, _, kind in kinds_of(f)}
        for n in hints(f):
            kind = each.get(n)
            for x in BAD:
                count += 1
                allowed = x is inspect.signature(f).parameters[n].default or (kind and kind.holds(x))
                if count % every == 0 and n != "self" and not allowed:
                    yield name, n, x, outcome(f, dict(given) | {n: x}, kind is None and x is None)


def refusals() -> dict[str, dict[str, str]]:
    """What each function of `kvjax` says of a bad value: by parameter, of the first one that it refuses."""
    found = {}
    for name, f in entrances(""):
        given, said = good(name, f), found.setdefault(name, {})
        for n, x in itertools.product((n for n in hints(f) if n != "self"), BAD):
            if n not in said and x is not inspect.signature(f).parameters[n].default:
                try:
                    call(f, dict(given) | {n: x})
                except ValueError as e:
                    said[n] = f"{e!s:.160}"
    return found


def without_good_call() -> Iterator[str]:
    """The functions that refuse good arguments, too, so that refusing bad ones says nothing."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in itertools.chain.from_iterable(MODULES.values()):
            for name, f in entrances(module):
                how = outcome(f, good(name, f), True)
                if how != "taken":
                    yield f"{module}.{name}"


def table(every: int = 1) -> tuple[dict[str, collections.Counter], list[str]]:
    """How many calls of each module ended how, and those that were not clear."""
    found, wrong = {}, []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row, modules in MODULES.items():
            found[row] = collections.Counter()
            for module in modules:
                for name, n, x, how in calls(module, every):
                    found[row][how.partition(":")[0]] += 1
                    if how not in ("clear", "taken"):
                        wrong.append(f"{module}.{name}({n}={x!r:.40}): {how:.120}")
    return found, wrong


def main() -> None:
    """Prints the table, and what was not clear."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.fuzz")
    parser.add_argument("--short", action="store_true", help="every eleventh call")
    parser.add_argument("--record", action="store_true", help=f"write what is refused to {REFUSALS} instead")
    options = parser.parse_args()
    if options.record:
        REFUSALS.write_text(json.dumps(refusals(), indent=1) + "\n")
        return
    found, wrong = table(11 if options.short else 1)
    print(*wrong, *(f"{name} was called with no good arguments" for name in without_good_call()), sep="\n")
    print("| module | calls | clear | unclear | silent |\n|---|---|---|---|---|")
    for row, n in found.items():
        print(f"| {row} | {n.total()} | {n['clear']} | {n['unclear']} | {n['silent']} |")


if __name__ == "__main__":
    main()
