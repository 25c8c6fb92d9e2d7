"""What parameters may be: kinds, read from annotations and checked where users call.

An annotation says what a parameter is, `Annotated` what numbers it may be: `rows: Size = 32`. Public functions
(`checked`) and values (`kvjax.contract.Value`) refuse anything else, before it is used. Defaults are not looked at.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Annotated, Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels.pytree import described, is_known

MOST = 2**30  # more tokens than any run has; larger counts are cut to it
LARGEST, SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True, repr=False)
class Range:
    """The numbers that a parameter may be.

    Attributes:
      least, most: both included, unless `above` leaves out the least, and `below` the most.
      odd: whether only odd ones are.
    """

    least: float = -LARGEST
    most: float = LARGEST
    above: bool = False
    below: bool = False
    odd: bool = False

    def holds(self, x: Any) -> bool:
        """Whether a number is one of them."""
        beyond = (self.above and x == self.least) or (self.below and x == self.most)
        return self.least <= x <= self.most and not beyond and not (self.odd and x % 2 == 0)

    @property
    def words(self) -> str:
        """What the numbers are, behind "a number"."""
        if self.most >= LARGEST:
            named = {-LARGEST: " that is finite", SMALLEST: " above 0"}
            return named.get(self.least, f" above {self.least}" if self.above else f" of {self.least} or more")
        least = f" above {self.least}" if self.above else f" from {self.least}"
        most = f", at most {self.most}" if self.above else f" to {self.most:,}"
        return least + (f", below {self.most}" if self.below else most)

    def __repr__(self) -> str:
        return self.words.strip()


Size = Annotated[int, Range(1, MOST - 1)]
Amount = Annotated[int, Range(0, MOST - 1)]
Odd = Annotated[int, Range(1, MOST - 1, odd=True)]
Proportion = Annotated[float, Range(0, 1)]
PositiveProportion = Annotated[float, Range(0, 1, above=True)]
ProportionBelowOne = Annotated[float, Range(0, 1, below=True)]
Cosine = Annotated[float, Range(-1, 1)]
NonNegative = Annotated[float, Range(0)]
AtLeastOne = Annotated[float, Range(1)]
Ratio = Annotated[float, Range(1, float("inf"))]
Number = Annotated[float, Range(-float("inf"), float("inf"))]
Positive = Annotated[float, Range(SMALLEST)]


@dataclasses.dataclass(frozen=True, repr=False)
class Kind:
    """What a parameter may be.

    Attributes:
      words: the end of a sentence that begins with "must be".
      holds: whether a value is of the kind.
      dims: names or sizes of the axes, where it is an array.
      any_of: the kinds that it may be one of.
      number: int or float, where it is a number of that type alone.
    """

    words: str
    holds: Callable[[Any], bool]
    dims: tuple[str, ...] | None = None
    any_of: "tuple[Kind, ...]" = ()
    number: type | None = None

    def __repr__(self) -> str:
        return self.words


def numbers(*axes: str) -> Kind:
    """Finite numbers with these axes, in an array or in lists of lists."""

    def holds(x: Any) -> bool:
        if isinstance(x, jax.core.Tracer):
            return x.ndim == len(axes)
        with contextlib.suppress(ValueError, TypeError):
            found = np.asarray(x)
            number = any(jnp.issubdtype(found.dtype, kind) for kind in (np.integer, np.floating))
            return number and found.ndim == len(axes) and bool(np.isfinite(found).all())
        return False

    return Kind(f"finite numbers of shape ({', '.join(axes)})", holds)


def whole(x: Any) -> bool:
    """Whether something is a whole number, which True and False are not."""
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def real(x: Any) -> bool:
    """Whether something is a real number, which True and False are not."""
    return whole(x) or isinstance(x, float | np.floating)


_NUMBERS = {int: ("whole number", whole, Range(-(2**63), 2**64)), float: ("number", real, Range())}
SUCH_AS = {
    "Policy": "kvjax.methods.h2o(64)",
    "Evict": "kvjax.methods.h2o(64)",
    "Score": "a subclass of your own; kvjax.from_fn makes a policy of a function",
    "Select": "kvjax.decide.select.TopK()",
    "Heads": "kvjax.Adaptive()",
    "Rewrite": "kvjax.decide.rewrite.Merge()",
    "Schedule": "kvjax.budgets.Schedule(every=16)",
    "Layout": 'kvjax.contract.Layout("rank")',
    "Plan": "kvjax.make_plan gives",
    "State": "kvjax.prefill gives",
    "AttnStats": "kvjax.forward gives",
    "Sampler": "kvjax.Sample(...) or kvjax.Greedy()",
    "Mesh": "kvjax.make_mesh gives",
    "PathLike": "pathlib.Path(...)",
    "Reading": "kvjax.analysis.read gives",
    "Columns": "kvjax.pallas_kernels.Columns()",
    "Logits": "kvjax.pallas_kernels.Logits(softcap=50.0)",
}
_MEMBERS = "config", "alike", "parts", "embed", "block", "head"
KEY = Kind("a PRNG key, such as jax.random.key(0)", lambda x: _is_key(x))
PRNGKey = Annotated[jax.Array | np.ndarray | None, Kind(f"{KEY.words}, or None", lambda x: x is None or KEY.holds(x))]
LayerParams = Annotated[
    Any, Kind("a tree for each layer, as init_policy_params gives", lambda x: x is None or isinstance(x, tuple | list))
]
PROTOCOLS = {
    "Model": Kind(
        "a model, such as models.load(...) returns, with config, alike, parts, embed, block and head",
        lambda x: not isinstance(x, type) and all(hasattr(x, name) for name in _MEMBERS),
    ),
    "Config": Kind("a model's configuration, model.config", lambda x: hasattr(x, "num_kv_heads")),
    "Tokenizer": Kind("a tokenizer, such as models.load_tokenizer(...)", lambda x: hasattr(x, "decode")),
}
HeadTable = Annotated[Any, numbers("L", "K")]
Arrays = Annotated[Any, Kind("a tree of arrays", lambda x: all(map(_is_array, jax.tree.leaves(x))))]
Dtype = Annotated[Any, Kind("a dtype, such as jnp.float32", lambda x: isinstance(x, type | np.dtype | str))]
ANYTHING = Kind("anything", lambda x: True)
_PLAIN: dict[Any, Kind] = {
    bool: Kind("True or False", lambda x: isinstance(x, bool | np.bool_)),
    type(None): Kind("None", lambda x: x is None),
    str: Kind("text", lambda x: isinstance(x, str)),
    jax.Array: Kind("an array", lambda x: isinstance(x, jax.Array)),
    np.ndarray: Kind("an array", lambda x: isinstance(x, np.ndarray)),
}


@functools.cache
def kind_of(hint: Any) -> Kind | None:
    """The kind that an annotation says; None where it says nothing that can be checked."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        own = next((x for x in args[1:] if isinstance(x, Kind | Range)), None)
        return own if isinstance(own, Kind) else _number(args[0], own) if own else kind_of(args[0])
    if hint in _NUMBERS:
        return _number(hint, _NUMBERS[hint][2])
    if hint in _PLAIN:
        return _PLAIN[hint]
    if origin is typing.Literal:
        return Kind(f"one of {', '.join(map(repr, args))}", lambda x: any(type(x) is type(a) and x == a for a in args))
    if origin in (typing.Union, types.UnionType):
        each = tuple(k for a in args if (k := kind_of(a)) is not None)
        if len(each) < len(args):
            return None
        words = ", or ".join(dict.fromkeys(k.words for k in each))
        types_of = {k.number for k in each} - {None}
        number = types_of.pop() if len(types_of) == 1 else None
        return Kind(words, lambda x: any(k.holds(x) for k in each), any_of=each, number=number)
    if origin is tuple and args[-1] is not ...:
        each = [kind_of(a) or ANYTHING for a in args]
        fits = lambda x: isinstance(x, tuple) and len(x) == len(each) and all(k.holds(y) for k, y in zip(each, x))  # noqa: B905
        words = dict.fromkeys(k.words for k in each)
        return Kind(f"a tuple of {len(each)}{', each ' if len(words) == 1 else ': '}{', '.join(words)}", fits)
    if origin in (tuple, Sequence):
        each = kind_of(args[0]) or ANYTHING
        items = lambda x: np.asarray(x).tolist() if is_known(x) and x.ndim else x
        text = str | bytes | bytearray
        listed = lambda x: isinstance(x, origin | list) and (not isinstance(x, text) or each.holds(x[:1]))
        holds = lambda x: listed(items(x)) and all(map(each.holds, items(x)))
        return Kind(
            f"a {origin.__name__.lower()}{'' if each is ANYTHING else f' of which each is {each.words}'}", holds
        )
    if origin is Mapping:
        key, each = (kind_of(a) or ANYTHING for a in args)
        holds = lambda x: isinstance(x, Mapping) and all(map(key.holds, x)) and all(map(each.holds, x.values()))
        return Kind("a dict" if each is ANYTHING else f"a dict of which each is {each.words}", holds)
    if hasattr(hint, "dim_str"):
        return _array(hint)
    if Callable in (hint, typing.get_origin(hint)) or origin is types.FunctionType:
        return Kind("a function", callable)
    kind = origin or hint
    if getattr(kind, "__name__", None) in PROTOCOLS:
        return PROTOCOLS[kind.__name__]
    if (
        not isinstance(kind, type)
        or kind in (Any, Hashable)
        or getattr(kind, "_is_protocol", False)
        or hasattr(kind, "structure")
    ):
        return None
    such = f", such as {SUCH_AS[kind.__name__]}" if kind.__name__ in SUCH_AS else ""
    return Kind(f"{_a(kind.__name__)}{such}", lambda x: isinstance(x, kind))


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOaeiou' else 'a'} {noun}"


def _number(base: Any, numbers: Range) -> Kind:
    word, is_number, _ = _NUMBERS[base]
    words = f"{'an odd' if numbers.odd else 'a'} {word}{'' if numbers == _NUMBERS[int][2] else numbers.words}"
    return Kind(words, lambda x: is_number(x) and numbers.holds(x), number=base)


_ARRAYS = {"Float": ("floats", np.floating), "Int": ("integers", np.integer), "Bool": ("True or False", np.bool_)}


def _array(hint: Any) -> Kind:
    word, dtype = _ARRAYS.get(hint.dtype.__name__, ("numbers", np.generic))
    dims = tuple(hint.dim_str.split())
    if hint.dtype.__name__ == "Key":
        keys = lambda x: x.shape if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.shape[:-1]
        return Kind(KEY.words, lambda x: KEY.holds(x) and _fit(dims, keys(x), {}))

    def holds(x: Any) -> bool:
        typed = _is_array(x) and (dtype is np.generic or jnp.issubdtype(x.dtype, dtype))
        return typed and 0 not in x.shape and _fit(dims, x.shape, {})

    return Kind(f"a non-empty numpy or JAX array of {word}, of shape ({', '.join(dims)})", holds, dims)


def _is_key(x: Any) -> bool:
    raw = lambda: x.dtype == np.uint32 and x.shape[-1:] == (2,)
    return _is_array(x) and (jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or raw())


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def _fit(dims: tuple[str, ...], shape: tuple[Any, ...], sizes: dict[str, Any]) -> bool:
    """Whether a shape has these axes, by the sizes of those that are known; the others become known."""
    if several := [i for i, d in enumerate(dims) if d[0] in "*."]:
        at = several[0]
        if len(shape) < len(dims) - 1:
            return False
        end = len(shape) - (len(dims) - at - 1)
        shape = (*shape[:at], shape[at:end], *shape[end:])
    named = lambda d: d.lstrip("*").isidentifier() and d.strip("_")
    size = lambda d, n: int(d) if d.isdigit() else sizes.setdefault(d, n) if named(d) else n
    return len(shape) == len(dims) and all(size(d, n) == n for d, n in zip(dims, shape, strict=True))


def refused(name: str, x: Any, words: str) -> ValueError:
    """The error of a parameter that is not of its kind."""
    maker = isinstance(x, type | types.FunctionType)
    shown = f"{x.dtype}{list(x.shape)}" if _is_array(x) else x.__name__ if maker else described(x)
    shown = shown if len(shown) <= 80 else f"{type(x).__name__}(...)"
    return ValueError(f"{name}={shown} must be {words}{f'; give what it makes, {shown}(...)' if maker else ''}")


def check_fields(x: Any) -> None:
    """Checks the fields of a frozen dataclass against their annotations. What is a float holds one: 1 becomes 1.0.

    Raises:
      ValueError: a field that is not of its kind.
    """
    for name, default, kind in _kinds(type(x)):
        given = getattr(x, name)
        if given is not default and not kind.holds(given):
            raise refused(f"{type(x).__name__}: {name}", given, kind.words)
        if isinstance(given, np.integer | np.floating):
            object.__setattr__(x, name, given.item())
        if kind.number is float and isinstance(getattr(x, name), int):
            object.__setattr__(x, name, float(getattr(x, name)))


@functools.cache
def _kinds(f: Any) -> tuple[tuple[str, Any, Kind], ...]:
    """(name, default, kind) of the fields or parameters whose annotations say something."""
    hints = _hints(f)
    if isinstance(f, type):
        each = [(x.name, x.default) for x in dataclasses.fields(f)]
    else:
        each = [(x.name, x.default) for x in inspect.signature(f).parameters.values()]
    return tuple((n, default, kind) for n, default in each if (kind := kind_of(hints.get(n, Any))) is not None)


def _hints(f: Any) -> dict[str, Any]:
    """Annotations of a class or function; of text those that name what their module has."""
    with contextlib.suppress(NameError, TypeError, AttributeError):
        return typing.get_type_hints(f, include_extras=True)
    found = {}
    for owner in reversed(f.__mro__) if isinstance(f, type) else [f]:
        for name, hint in vars(owner).get("__annotations__", {}).items():
            with contextlib.suppress(Exception):  # such as a name that only type checkers import
                one = types.SimpleNamespace(__annotations__={name: hint})
                found |= typing.get_type_hints(one, vars(sys.modules[owner.__module__]), include_extras=True)
    return found


def checked(f: Callable[P, R]) -> Callable[P, R]:
    """A function that checks its arguments against their annotations, and arrays against each other's sizes.

    Raises:
      ValueError: an argument that is not of its kind.
    """
    signature = inspect.signature(f)
    several = [n for n, x in signature.parameters.items() if x.kind is x.VAR_POSITIONAL]

    @functools.wraps(f)
    def door(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = None
        with contextlib.suppress(TypeError):
            bound = signature.bind(*args, **kwargs)
        if bound is None:  # Python itself says of which function
            return f(*args, **kwargs)
        given, sizes = bound.arguments, {}
        for name, default, kind in _kinds(f):
            if name in several:
                given[name] = tuple(_fitted(name, x, kind, sizes) for x in given.get(name, ()))
            elif given.get(name, default) is not default:
                given[name] = _fitted(name, given[name], kind, sizes)
        return f(*bound.args, **bound.kwargs)

    return door


def _fitted(name: str, given: Any, kind: Kind, sizes: dict[str, Any]) -> Any:
    """An argument that is of its kind and fits the sizes known so far. Lists become arrays, numbers Python's own."""
    each, x = kind.any_of or (kind,), given
    if isinstance(x, np.integer | np.floating) and kind.dims is None:
        x = x.item()
    number = isinstance(x, int | float) and not any(k.holds(0.5) for k in each)
    if (number or isinstance(x, list)) and any(k.dims for k in each) and not kind.holds(x):
        with contextlib.suppress(ValueError, TypeError):
            x = np.asarray(x)
    if isinstance(x, list) and kind.holds(tuple(x)):
        x = tuple(x)
    if not kind.holds(x):
        raise refused(name, given, kind.words)
    dims = next((k.dims for k in each if k.dims and k.holds(x)), None)
    if dims and not _fit(dims, x.shape, sizes):
        raise refused(name, x, f"of shape ({', '.join(str(sizes.get(d, d)) for d in dims)}), to fit the other arrays")
    return x


def needs(module: str, extra: str, *packages: str) -> None:
    """Tries whether packages are installed that kvjax itself does without, before a module imports them.

    Raises:
      ImportError: some are not, by the name of the extra of kvjax that installs them.
    """
    if lacking := [package for package in packages if importlib.util.find_spec(package) is None]:
        raise ImportError(f"{module} needs {', '.join(lacking)}: pip install 'kvjax[{extra}]'")


def doors(module: str, *names: str) -> None:
    """Lets public functions check their arguments, there and where they are defined: those named, or all of a module.

    Of a class that is named, `__init__` and public methods do. What modules have imported of each other before is not
    checked again.
    """
    here = vars(sys.modules[module])
    own = lambda f: inspect.isfunction(f) and f.__module__.startswith(module)
    for name in names or [n for n, f in here.items() if own(f) and not n.startswith("_")]:
        f = here.get(name)
        if inspect.isfunction(f):
            vars(sys.modules[f.__module__])[name] = here[name] = checked(f)
        elif isinstance(f, type) and not dataclasses.is_dataclass(f):
            for n, method in [*vars(f).items()]:
                if inspect.isfunction(method) and (n == "__init__" or not n.startswith("_")):
                    setattr(f, n, checked(method))
