"""Programs on a mesh of devices, by three axes: rows of a batch, heads, and the tokens of prompts.

* "data": every device runs the program on rows of its own. Nothing is sent, and rows are what they are on one device.
* "heads": kv heads and the query heads that read them, with the projections that make them, and the channels of
  feed-forward networks. Devices add up what they project back to the residual stream, twice a layer, and send what a
  policy compares across heads: the scores that heads compete with (Ada-KV), or a mean over heads (TOVA).
* "sequence": rows of a prompt's queries, and of all that is made of its tokens alone. A layer's keys and values are
  given to all devices while the layer is read; column statistics are added up. After the prompt, the cache that is left
  is the same on all of these devices, and so are decode steps.

A state's arrays are split by rows and kv heads, whichever policy it has; pools (`kvjax.cache.pool`) by rows alone, as
their slots belong to whichever heads need them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from kvjax.cache.mesh import AXES, DATA, HEADS, SEQUENCE, laid_out
from kvjax.cache.pool import PooledKV
from kvjax.cache.state import LayerKV
from kvjax.pallas_kernels.values import check_arrays, checked, whole
from kvjax.plan import CachePlan

_X = TypeVar("_X")


def make_mesh(data: int = 1, heads: int = 1, sequence: int = 1, *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `data * heads * sequence` devices.

    Args:
      data: devices that share the rows of a batch.
      heads: devices that share the kv heads of every layer.
      sequence: devices that share the tokens of a prompt while it is read.
      devices: in the order of the mesh, the last axis first; the first of `jax.devices()` if None. Devices of several
        processes (`jax.distributed`) make one mesh in each of them.

    Raises:
      ValueError: more devices than there are, or `devices` that are none, or one of them twice.
    """
    sizes = {"data": data, "heads": heads, "sequence": sequence}
    shape = [checked(whole(1), name, size) for name, size in sizes.items()]
    if devices is not None:
        known = isinstance(devices, Sequence | np.ndarray) and all(isinstance(d, jax.Device) for d in devices)
        if not known or len(set(devices)) < max(1, len(devices)):
            raise ValueError(f"devices are some of jax.devices(), each once; got {devices!r}")
    found, wanted = jax.devices() if devices is None else list(devices), math.prod(shape)
    if wanted > len(found):
        raise ValueError(
            f"data={data} x heads={heads} x sequence={sequence} are {wanted} devices, but there are {len(found)}; use "
            f"fewer, or try it on a CPU with XLA_FLAGS=--xla_force_host_platform_device_count={wanted}"
        )
    return Mesh(np.array(found[:wanted]).reshape(shape), AXES)


def as_mesh(mesh: Any) -> Mesh:
    """A mesh with all three axes, from one that has some of them.

    Raises:
      ValueError: no mesh, or one with other axes.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh is a {type(mesh).__name__}, not a mesh; make one with kvjax.make_mesh(data=4, heads=2)")
    if unknown := [name for name in mesh.axis_names if name not in AXES]:
        raise ValueError(f"mesh has an axis {unknown[0]!r}, but its axes are {AXES}; name it by what it splits")
    order = [mesh.axis_names.index(name) for name in AXES if name in mesh.axis_names]
    shape = [mesh.shape.get(name, 1) for name in AXES]
    return Mesh(mesh.devices.transpose(order).reshape(shape), AXES)


def mesh_of(x: Any) -> Mesh | None:
    """The mesh that rows have been placed on (`shard_rows`), if any."""
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    return as_mesh(sharding.mesh) if DATA in sharding.mesh.axis_names and sharding.mesh.size > 1 else None


def check_split(mesh: Mesh, plan: CachePlan, config: Any, batch: int, block: int | None = None) -> None:
    """Tries whether the devices of a mesh can share a batch, a model's heads and its prompts.

    Args:
      mesh: with all axes (`as_mesh`).
      plan: of the run.
      config: the model's sizes.
      batch: rows.
      block: tokens that are read at once, all of a prompt if None.

    Raises:
      ValueError: an axis that does not divide what it splits, naming both numbers.
    """
    tokens = plan.prompt_len if block is None else block
    sizes = (
        (DATA, batch, f"a batch of {batch} rows", "batch"),
        (HEADS, config.num_kv_heads, f"{config.num_kv_heads} kv heads", "number of kv heads"),
        (SEQUENCE, tokens, f"prompts read {tokens} tokens at once", "width: pad prompts on the left (models.pad_left)"),
    )
    for axis, size, what, divisor in sizes:
        if size % mesh.shape[axis]:
            raise ValueError(
                f"{mesh.shape[axis]} devices of the axis {axis!r} do not divide {what}; use a divisor of the {divisor}"
            )


def shard_params(model: Any, params: PyTree[Any], mesh: Mesh) -> PyTree[Any]:
    """Parameters on a mesh: projections to and from heads and feed-forward channels by "heads", others on all devices.

    What is placed so already stays where it is. Do it once: `kvjax.generate` otherwise does it at every call.

    Args:
      model: says which axis of a parameter is that of heads or channels (`models.LanguageModel.split_axes`); those of a
        model that does not are whole on every device.
      params: the parameters.
      mesh: the mesh.

    Raises:
      ValueError: no mesh, or one with other axes; no model, or parameters that are no arrays.
    """
    mesh = as_mesh(mesh)
    if isinstance(model, type) or not callable(model):
        raise ValueError(f"model is a {type(model).__name__}, not a model; give shard_params(model, params, mesh)")
    check_arrays("params", params)
    if not jax.tree.leaves(params):
        raise ValueError(f"params={params!r} hold no array; give the parameters that models.load(...) returns")
    axes = model.split_axes(params) if hasattr(model, "split_axes") else [None] * len(jax.tree.leaves(params))
    leaves, structure = jax.tree.flatten(params)

    def placed(x: Any, axis: int | None) -> Any:
        divides = axis is not None and -np.ndim(x) <= axis < np.ndim(x) and x.shape[axis] % mesh.shape[HEADS] == 0
        spec = PartitionSpec(*(HEADS if divides and i == axis % x.ndim else None for i in range(np.ndim(x))))
        return _placed(x, NamedSharding(mesh, spec))

    return jax.tree.unflatten(structure, [placed(x, axis) for x, axis in zip(leaves, axes, strict=True)])


def shard_rows(rows: PyTree[Any], mesh: Mesh) -> PyTree[Any]:
    """Arrays on a mesh, their first axis split over the devices of "data"; numbers are on all devices.

    Under `jax.distributed` every process gives all rows, and holds those of its devices.

    Raises:
      ValueError: no mesh, or one with other axes; rows that its devices do not divide.
    """
    mesh = as_mesh(mesh)
    for x in jax.tree.leaves(rows):
        if np.ndim(x) and len(x) % mesh.shape[DATA]:
            raise ValueError(f"{mesh.shape[DATA]} devices of the axis {DATA!r} do not divide {len(x)} rows")
    return jax.tree.map(lambda x: _placed(x, rows_of(x, mesh)), rows)


def rows_of(x: Any, mesh: Mesh | None) -> NamedSharding | None:
    """Where the rows of an array lie, and where numbers do; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(DATA) if np.ndim(x) else PartitionSpec())


def _placed(x: Any, sharding: NamedSharding | None) -> Any:
    """An array where it should be; traced ones stay to the compiler."""
    if isinstance(x, jax.core.Tracer) or sharding is None:
        return x
    here = getattr(x, "sharding", None)
    if here is not None and here.is_equivalent_to(sharding, x.ndim):
        return x
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_placed(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    known = np.asarray(x)  # the same in every process
    return jax.make_array_from_callback(known.shape, sharding, lambda index: known[index])


def on_rows(mesh: Mesh | None, function: Callable[[Any, Any], _X], shared: PyTree[Any], rows: PyTree[Any]) -> _X:
    """What a function makes of the rows that every device has: of all rows, where they depend on nothing beside them.

    To be called under `jax.jit`. Numbers without an axis must come out the same for all rows.

    Args:
      mesh: with all axes (`as_mesh`); None to call the function as it is.
      function: of `shared` and `rows`.
      shared: arrays that all rows need, such as parameters.
      rows: arrays whose first axis is that of rows, and numbers.
    """
    if mesh is None:
        return function(shared, rows)
    numbers, arrays, together = _apart(rows)
    again: list[Callable[[list[Any], list[Any]], Any]] = []

    def local(shared: Any, numbers: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        result = function(shared, together(numbers, arrays))
        *found, back = _apart(jax.tree.map(_laid_out, result, is_leaf=_is_layer))
        again.append(back)
        return found[0], found[1]

    of_numbers, of_arrays = PartitionSpec(), PartitionSpec(DATA)
    manual = {DATA, *(name for name in AXES if mesh.shape[name] == 1)}
    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), of_numbers, of_arrays),
        out_specs=(of_numbers, of_arrays),
        axis_names=manual,
        check_vma=False,
    )
    after = split(shared, numbers, arrays)
    return again[-1](*after)


def _apart(tree: Any) -> tuple[list[Any], list[Any], Callable[[list[Any], list[Any]], Any]]:
    """The numbers and the arrays of a tree, and what makes a tree of others."""
    leaves, structure = jax.tree.flatten(tree)
    is_array = [np.ndim(x) > 0 for x in leaves]
    of_kind = lambda kind: [x for x, k in zip(leaves, is_array, strict=True) if k == kind]

    def together(numbers: list[Any], arrays: list[Any]) -> Any:
        each = {False: iter(numbers), True: iter(arrays)}
        return jax.tree.unflatten(structure, [next(each[kind]) for kind in is_array])

    return of_kind(False), of_kind(True), together


def _is_layer(x: Any) -> bool:
    return isinstance(x, LayerKV | PooledKV)


def _laid_out(x: Any) -> Any:
    """A layer by its heads, or a pool whole; what else there is stays to the compiler."""
    axes = (None, HEADS) if isinstance(x, LayerKV) else (None,)
    return jax.tree.map(lambda leaf: laid_out(leaf, *axes), x) if _is_layer(x) else x
