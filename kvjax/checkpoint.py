"""Storing parameters and compressed prompts with orbax. What is restored continues bit for bit."""

import dataclasses
import hashlib
import os
import pathlib
import re
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from kvjax.generation import empty_after_prompt, init_state
from kvjax.plan import CachePlan
from kvjax.state import KVState


def save_params(path: str | os.PathLike[str], params: PyTree[Any]) -> None:
    """Writes parameters to a new directory.

    Raises:
      ValueError: `path` exists.
    """
    _save(path, {"params": params}, {"kind": "params", "shapes": _shapes(params)})


def load_params(path: str | os.PathLike[str], like: PyTree[Any]) -> PyTree[Any]:
    """Reads what `save_params` wrote.

    Args:
      path: the directory.
      like: arrays or `jax.ShapeDtypeStruct` of the wanted structure (`model.shapes`).

    Raises:
      ValueError: not such a directory, or parameters of another structure, shape or dtype.
    """
    there, wanted = _meta(path, "params")["shapes"], _shapes(like)
    wrong = [
        f"{name} is {there.get(name, 'absent')} there, {wanted.get(name, 'not')} wanted"
        for name in sorted({*there, *wanted})
        if there.get(name) != wanted.get(name)
    ]
    if wrong:
        raise ValueError(f"{path} holds parameters of another shape: {'; '.join(wrong)}")
    return _load(path, {"params": like})["params"]


def save_state(path: str | os.PathLike[str], state: KVState) -> None:
    """Writes a cache, such as a compressed prompt, to a new directory.

    Raises:
      ValueError: `path` exists.
    """
    leaves, _ = jax.tree.flatten(state)
    keys = {str(i): str(jax.random.key_impl(x)) for i, x in enumerate(leaves) if _is_key(x)}
    arrays = {f"{i:05}": jax.random.key_data(x) if _is_key(x) else x for i, x in enumerate(leaves)}
    _save(path, arrays, {"kind": "state", "plan": _text(state.plan), "keys": keys, "leaves": len(leaves)})


def load_state(path: str | os.PathLike[str], plan: CachePlan) -> KVState:
    """Reads what `save_state` wrote.

    Args:
      path: the directory.
      plan: the plan that the state was made for; an equal one, rebuilt, will do.

    Raises:
      ValueError: not such a directory, or a state made for another plan.
    """
    meta = _meta(path, "state")
    if meta["plan"] != _text(plan):
        raise ValueError(f"{path} was made for another plan: {meta['plan']} there, {_text(plan)} here")
    arrays = _load(path, None)
    restored = [
        jax.random.wrap_key_data(jnp.asarray(arrays[f"{i:05}"]), impl=meta["keys"][str(i)])
        if str(i) in meta["keys"]
        else jnp.asarray(arrays[f"{i:05}"])
        for i in range(meta["leaves"])
    ]
    structure = jax.tree.structure(
        jax.eval_shape(lambda: empty_after_prompt(init_state(plan, jnp.zeros((1,), jnp.int32))))
    )
    return jax.tree.unflatten(structure, restored)


def _shapes(params: PyTree[Any]) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(keys): f"{x.dtype}{list(x.shape)}" for keys, x in leaves}


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _text(plan: CachePlan) -> str:
    """The plan's definition, functions by what they compute instead of where they lie in memory."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(plan))
    codes = [f"{c.co_qualname} {hashlib.sha256(_constants(c).encode()).hexdigest()[:16]}" for c in _code(plan.policy)]
    return text + "".join(f"; {re.sub(' at 0x[0-9a-f]+', '', c)}" for c in codes)


def _constants(code: types.CodeType) -> str:
    inner = [_constants(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return repr((code.co_code, inner, code.co_names))


def _code(value: Any) -> Iterator[types.CodeType]:
    """The code of all functions inside a policy."""
    if isinstance(value, types.FunctionType):
        yield value.__code__
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _code(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _code(item)


def _save(path: str | os.PathLike[str], arrays: PyTree[Any], meta: dict[str, Any]) -> None:
    directory = pathlib.Path(path).absolute()
    if directory.exists():
        raise ValueError(f"{path} exists; choose a new directory, or delete it")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            directory, ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), meta=ocp.args.JsonSave(meta))
        )


def _meta(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    directory = pathlib.Path(path).absolute()
    if not (directory / "meta").is_dir():
        raise ValueError(f"{path} is not a complete checkpoint of kvjax")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        meta = checkpointer.restore(directory, ocp.args.Composite(meta=ocp.args.JsonRestore())).meta
    if meta["kind"] != kind:
        raise ValueError(f"{path} holds {meta['kind']}, not {kind}")
    return meta


def _load(path: str | os.PathLike[str], like: PyTree[Any]) -> Any:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(
            pathlib.Path(path).absolute(), ocp.args.Composite(arrays=ocp.args.StandardRestore(like))
        )
    return restored.arrays
