"""Frozen dataclasses that are JAX pytrees."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax
import numpy as np

T = TypeVar("T")

_FEW = 8  # numbers that are printed


def static(**kwargs: Any) -> Any:
    """A field that is part of the tree's structure: hashed and compared, never traced."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static))
def pytree(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen dataclass whose fields are children, except those declared with `static()`.

    Rebuilding from leaves bypasses `__init__` on purpose: JAX puts placeholders, specs and cotangents where
    the arrays were, and the shape annotations of the fields speak of arrays only.

    They print arrays as their types and shapes.
    """
    if "__repr__" not in vars(cls):
        cls.__repr__ = _brief
    frozen: Any = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(frozen)
    data = [f.name for f in fields if not f.metadata.get("static")]
    meta = [f.name for f in fields if f.metadata.get("static")]

    def flatten_with_keys(x: T):
        children = [(jax.tree_util.GetAttrKey(n), getattr(x, n)) for n in data]
        return children, tuple(getattr(x, n) for n in meta)

    def flatten(x: T):
        return [getattr(x, n) for n in data], tuple(getattr(x, n) for n in meta)

    def unflatten(aux, children) -> T:
        x = object.__new__(frozen)
        for n, value in (*zip(data, children, strict=True), *zip(meta, aux, strict=True)):
            object.__setattr__(x, n, value)
        return x

    jax.tree_util.register_pytree_with_keys(frozen, flatten_with_keys, unflatten, flatten)
    return frozen


def described(x: Any) -> str:
    """An array in few words: its type and shape, or its numbers where they are known, whole and few. Others as repr."""
    if isinstance(x, tuple):
        inside = [*map(described, x)]
        if len(inside) > 1 and len(set(inside)) == 1:
            return f"({inside[0]},) * {len(inside)}"
        return f"({', '.join(inside)}{',' * (len(inside) == 1)})"
    if isinstance(x, dict):
        return "{" + ", ".join(f"{name!r}: {described(y)}" for name, y in x.items()) + "}"
    if not isinstance(x, jax.Array | np.ndarray):
        return repr(x)
    if x.size <= _FEW and getattr(x.dtype, "kind", "key") in "iub" and is_known(x):
        return str(np.asarray(x).tolist())
    return f"{x.dtype}{list(x.shape)}"


def is_known(x: Any) -> bool:
    """Whether an array has numbers that can be looked at: not one that is traced, or was given away."""
    if isinstance(x, jax.Array):
        return not isinstance(x, jax.core.Tracer) and not x.is_deleted()
    return isinstance(x, np.ndarray)


def _brief(self: Any) -> str:
    fields = (f"{f.name}={described(getattr(self, f.name))}" for f in dataclasses.fields(self))
    return f"{type(self).__qualname__}({', '.join(fields)})"
