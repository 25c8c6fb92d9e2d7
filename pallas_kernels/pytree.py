"""Frozen dataclasses that are JAX pytrees."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(**kwargs: Any) -> Any:
    """A field that is part of the tree's structure: hashed and compared, never traced."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static))
def pytree(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen dataclass whose fields are children, except those declared with `static()`.

    Rebuilding from leaves bypasses `__init__` on purpose: JAX puts placeholders, specs and cotangents where
    the arrays were, and the shape annotations of the fields speak of arrays only.
    """
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
