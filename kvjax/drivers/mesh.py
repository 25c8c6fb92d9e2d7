"""Meshes of devices, and how parameters, prompts and states are placed on them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from kvjax.contract.checks import whole
from kvjax.drivers.checks import check_model, traced
from kvjax.storage.mesh import AXES, DATA, HEADS, sharding


def make_mesh(data: int = 1, heads: int = 1, *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `data * heads` devices.

    Args:
      data: devices that share the rows of a batch.
      heads: devices that share the kv heads of every layer, and the feed-forward channels.
      devices: in the order of the mesh, the last axis first; the first of `jax.devices()` if None. Devices of several
        processes (`jax.distributed`) make one mesh in each of them.

    Raises:
      ValueError: more devices than there are, or `devices` that are none, or one of them twice.
    """
    shape = (whole("data", data), whole("heads", heads))
    if devices is not None:
        known = isinstance(devices, Sequence | np.ndarray) and all(isinstance(d, jax.Device) for d in devices)
        if not known or len(set(devices)) < max(1, len(devices)):
            raise ValueError(f"devices are some of jax.devices(), each once; got {devices!r}")
    found, wanted = jax.devices() if devices is None else list(devices), math.prod(shape)
    if wanted > len(found):
        raise ValueError(
            f"data={data} x heads={heads} are {wanted} devices, but there are {len(found)}; use fewer, or try it on a "
            f"CPU with XLA_FLAGS=--xla_force_host_platform_device_count={wanted}"
        )
    return Mesh(np.array(found[:wanted]).reshape(shape), AXES)


def as_mesh(mesh: Any) -> Mesh:
    """A mesh with both axes, from one that has some of them.

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


def checked_mesh(mesh: Any, config: Any, batch: int) -> Mesh | None:
    """A mesh whose devices can share a batch and a model's kv heads; None stays None.

    Args:
      mesh: what a user gave.
      config: the model's sizes.
      batch: rows.

    Raises:
      ValueError: no mesh, or an axis that does not divide what it splits, naming both numbers.
    """
    if mesh is None:
        return None
    mesh, K = as_mesh(mesh), config.num_kv_heads
    sizes = (DATA, batch, f"a batch of {batch} rows", "batch"), (HEADS, K, f"{K} kv heads", "number of kv heads")
    for axis, size, what, divisor in sizes:
        if size % mesh.shape[axis]:
            raise ValueError(
                f"{mesh.shape[axis]} devices of the axis {axis!r} do not divide {what}; use a divisor of the {divisor}"
            )
    return mesh


def shard_params(model: Any, params: PyTree[Any], mesh: Mesh) -> PyTree[Any]:
    """Parameters on a mesh: projections to and from heads and feed-forward channels by "heads", others on all devices.

    What is placed so already stays where it is. Do it once: `kvjax.generate` otherwise does it at every call.

    Args:
      model: says which axis of a parameter is that of heads or channels (`models.LanguageModel.split_axes`); those of a
        model that does not are whole on every device, and so are those that devices do not divide.
      params: the parameters.
      mesh: the mesh.

    Raises:
      ValueError: no mesh, or one with other axes; no model, or parameters of another one.
    """
    mesh = as_mesh(mesh)
    check_model(model, params)
    leaves, structure = jax.tree.flatten(params)
    axes = model.split_axes(params) if hasattr(model, "split_axes") else [None] * len(leaves)

    def one(x: Any, axis: int | None) -> Any:
        divides = axis is not None and -x.ndim <= axis < x.ndim and x.shape[axis] % mesh.shape[HEADS] == 0
        spec = (HEADS if divides and i == axis % x.ndim else None for i in range(x.ndim))
        return _placed(x, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.unflatten(structure, [one(x, axis) for x, axis in zip(leaves, axes, strict=True)])


def on_mesh(model: Any, params: PyTree[Any], mesh: Any, batch: int) -> tuple[PyTree[Any], Mesh | None]:
    """Parameters on a mesh, and the mesh as `checked_mesh` returns it."""
    mesh = checked_mesh(mesh, model.config, batch)
    return (params if mesh is None else shard_params(model, params, mesh)), mesh


def on_rows(rows: Any, mesh: Mesh | None) -> Any:
    """Arrays "B ..." on a mesh, by rows; traced ones stay to the compiler."""
    return rows if mesh is None else jax.tree.map(lambda x: _placed(x, sharding(x, mesh, (DATA,))), rows)


def placed(state: Any, mesh: Mesh | None) -> Any:
    """A state on a mesh, whose layers know that they lie there."""
    if mesh is None:
        return state
    known = lambda kv: kv.replace(how=dataclasses.replace(kv.how, mesh=mesh))
    lie = lambda kv: jax.tree.map(lambda x: _placed(x, sharding(x, mesh, kv.axes)), known(kv))
    learned = jax.tree.map(lambda x: _placed(x, NamedSharding(mesh, PartitionSpec())), state.params)
    bare = on_rows(dataclasses.replace(state, layers=(), params=()), mesh)
    return dataclasses.replace(bare, layers=tuple(map(lie, state.layers)), params=learned)


def _placed(x: Any, where: NamedSharding) -> Any:
    """An array where it should be; traced ones stay to the compiler."""
    if traced(x) or (isinstance(x, jax.Array) and x.sharding.is_equivalent_to(where, x.ndim)):
        return x
    if where.is_fully_addressable:
        return jax.device_put(x, where)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_placed(jax.random.key_data(x), where), impl=jax.random.key_impl(x))
    known = np.asarray(x)  # the same in every process
    return jax.make_array_from_callback(known.shape, where, lambda index: known[index])
