"""Storing parameters and compressed prompts with orbax. What is restored continues bit for bit."""

import hashlib
import os
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from kvjax.cache.state import KVState
from kvjax.drivers.steps import empty_after_prompt, init_state
from kvjax.functions import definition
from kvjax.plan import CachePlan

_META = {"params": {"shapes": dict}, "state": {"plan": str, "keys": dict, "leaves": int}}
_T = TypeVar("_T")


def save_params(path: str | os.PathLike[str], params: PyTree[Any]) -> None:
    """Writes parameters to a new directory.

    Raises:
      ValueError: `path` exists, or a leaf is no array.
      OSError: it could not be written.
    """
    leaves = jax.tree.leaves(params)
    meta = {"kind": "params", "shapes": _shapes(params), "digests": [_digest(x) for x in leaves]}
    _save(path, {"params": params}, meta)


def load_params(path: str | os.PathLike[str], like: PyTree[Any]) -> PyTree[Any]:
    """Reads what `save_params` wrote.

    Args:
      path: the directory.
      like: arrays or `jax.ShapeDtypeStruct` of the wanted structure (`model.shapes`).

    Raises:
      ValueError: not such a directory, a damaged one, or parameters of another structure, shape or dtype.
    """
    meta = _meta(path, "params")
    there, wanted = meta["shapes"], _shapes(like)
    wrong = [
        f"{name} is {there.get(name, 'absent')} there, {wanted.get(name, 'not')} wanted"
        for name in sorted({*there, *wanted})
        if there.get(name) != wanted.get(name)
    ]
    if wrong:
        raise ValueError(f"{path} holds parameters of another shape: {'; '.join(wrong)}")
    params = _load(path, {"params": like})["params"]
    _check_digests(path, jax.tree.leaves(params), meta)
    return params


def stored_shapes(path: str | os.PathLike[str]) -> dict[str, str]:
    """What `save_params` wrote to a directory: dtypes and shapes such as "float32[3, 4]", by the path of a parameter.

    Raises:
      ValueError: not such a directory, or a damaged one.
    """
    return {name: str(shape) for name, shape in _meta(path, "params")["shapes"].items()}


def save_state(path: str | os.PathLike[str], state: KVState) -> None:
    """Writes a cache, such as a compressed prompt, to a new directory.

    Raises:
      ValueError: `path` exists, or `state` is no cache.
      OSError: it could not be written.
    """
    if not isinstance(state, KVState):
        raise ValueError(f"state is a {type(state).__name__}, not a KVState such as prefill returns")
    leaves, _ = jax.tree.flatten(state)
    keys = {str(i): str(jax.random.key_impl(x)) for i, x in enumerate(leaves) if _is_key(x)}
    arrays = {f"{i:05}": jax.random.key_data(x) if _is_key(x) else x for i, x in enumerate(leaves)}
    meta = {"kind": "state", "plan": definition(state.plan), "keys": keys, "leaves": len(leaves)}
    meta["sizes"] = state.sizes is not None
    _save(path, arrays, meta | {"digests": [_digest(x) for x in arrays.values()]})


def load_state(path: str | os.PathLike[str], plan: CachePlan) -> KVState:
    """Reads what `save_state` wrote.

    Args:
      path: the directory.
      plan: the plan that the state was made for; an equal one, rebuilt, will do.

    Raises:
      ValueError: not such a directory, a damaged one, or a state made for another plan.
    """
    if not isinstance(plan, CachePlan):
        raise ValueError(f"plan is a {type(plan).__name__}, not a CachePlan such as make_plan returns")
    meta = _meta(path, "state")
    if meta["plan"] != (here := definition(plan)):
        raise ValueError(f"{path} was made for another plan: {meta['plan']} there, {here} here")
    arrays = _load(path, None)
    stored = _whole(path, lambda: [jnp.asarray(arrays[f"{i:05}"]) for i in range(meta["leaves"])])
    _check_digests(path, stored, meta)
    sizes = plan.sizes(plan.policy, [plan.prompt_len]) if meta.get("sizes") else None
    structure = jax.tree.structure(
        jax.eval_shape(lambda: empty_after_prompt(init_state(plan, jnp.zeros((1,), jnp.int32), sizes=sizes)))
    )

    def restore():
        keys = {int(i): impl for i, impl in meta["keys"].items()}
        wrap = lambda i, x: jax.random.wrap_key_data(x, impl=keys[i]) if i in keys else x
        return jax.tree.unflatten(structure, [wrap(i, x) for i, x in enumerate(stored)])

    return _whole(path, restore)


def _shapes(params: PyTree[Any]) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if odd := [
        f"{jax.tree_util.keystr(keys)} is a {type(x).__name__}" for keys, x in leaves if not hasattr(x, "dtype")
    ]:
        raise ValueError(f"every parameter is an array, but {'; '.join(odd)}")
    return {jax.tree_util.keystr(keys): f"{x.dtype}{list(x.shape)}" for keys, x in leaves}


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _digest(x: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16]


def _check_digests(path: str | os.PathLike[str], arrays: list[Any], meta: dict[str, Any]) -> None:
    """Refuses arrays that are not those that were written. Directories from before digests were kept have none."""
    if "digests" in meta and [_digest(x) for x in arrays] != meta["digests"]:
        raise ValueError(_damaged(path, "an array is not the one that was written"))


def _damaged(path: str | os.PathLike[str], reason: str) -> str:
    return f"{path} is damaged ({reason}); copy it again, or compute and save it anew"


def _whole(path: str | os.PathLike[str], read: Callable[[], _T]) -> _T:
    """What `read` returns, or an error that names the directory, whatever a damaged file made a library say."""
    try:
        return read()
    except Exception as e:
        raise ValueError(_damaged(path, f"{type(e).__name__}: {e}")) from e


def _directory(path: str | os.PathLike[str]) -> pathlib.Path:
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise ValueError(f"{path!r} is not the path of a directory")
    return pathlib.Path(path).absolute()


def _save(path: str | os.PathLike[str], arrays: PyTree[Any], meta: dict[str, Any]) -> None:
    directory = _directory(path)
    if directory.exists():
        raise ValueError(f"{path} exists; choose a new directory, or delete it")
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(
                directory, ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), meta=ocp.args.JsonSave(meta))
            )
    except Exception as e:
        raise OSError(f"{path} could not be written: {e}") from e


def _meta(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    if not (_directory(path) / "meta").is_dir():
        raise ValueError(f"{path} is not a complete checkpoint of kvjax")
    meta = _restore(path, "meta", ocp.args.JsonRestore())
    there = meta.get("kind") if isinstance(meta, dict) else None
    needed = _META.get(str(there), {})
    if not needed or any(not isinstance(meta.get(key), like) for key, like in needed.items()):
        raise ValueError(_damaged(path, f"its meta has no {list(needed) or 'kind'}"))
    if there != kind:
        raise ValueError(f"{path} holds {there}, not {kind}")
    return meta


def _load(path: str | os.PathLike[str], like: PyTree[Any]) -> Any:
    return _restore(path, "arrays", ocp.args.StandardRestore(like))


def _restore(path: str | os.PathLike[str], item: str, how: Any) -> Any:
    def read():
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(_directory(path), ocp.args.Composite(**{item: how}))[item]

    return _whole(path, read)
