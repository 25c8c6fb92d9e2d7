"""Meshes of devices, and how parameters, prompts and states are placed on them."""

import dataclasses
import math
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from kvjax.contract import Config, Model, Size
from kvjax.run.checks import check_model, traced
from kvjax.run.state import State
from kvjax.storage.mesh import AXES, DATA, HEADS, sharding

X = TypeVar("X")


def make_mesh(data: Size = 1, heads: Size = 1) -> Mesh:
    """A mesh of the first `data * heads` of `jax.devices()`; for others, a `jax.sharding.Mesh` with these axes.

    Args:
      data: devices that share the rows of a batch.
      heads: devices that share the kv heads of every layer, and the feed-forward channels.

    Raises:
      ValueError: more devices than there are.
    """
    shape = (data, heads)
    found, wanted = jax.devices(), math.prod(shape)
    if wanted > len(found):
        raise ValueError(
            f"data={data} x heads={heads} are {wanted} devices, but there are {len(found)}; use fewer, or try it on a "
            f"CPU with XLA_FLAGS=--xla_force_host_platform_device_count={wanted}"
        )
    return Mesh(np.array(found[:wanted]).reshape(shape), AXES)


def _check_axes(mesh: Mesh) -> None:
    """Refuses what is no mesh of rows and heads."""
    if mesh.axis_names != AXES:
        raise ValueError(f"mesh has the axes {mesh.axis_names}, not {AXES}; make it with kvjax.make_mesh")


def check_mesh(mesh: Mesh, config: Config, batch: int) -> None:
    """Refuses a mesh whose devices cannot share a batch and a model's kv heads."""
    _check_axes(mesh)
    K = config.num_kv_heads
    sizes = (DATA, batch, f"a batch of {batch} rows", "batch"), (HEADS, K, f"{K} kv heads", "number of kv heads")
    for axis, size, what, divisor in sizes:
        if size % mesh.shape[axis]:
            raise ValueError(
                f"{mesh.shape[axis]} devices of the axis {axis!r} do not divide {what}; use a divisor of the {divisor}"
            )


def shard_params(model: Model, params: PyTree, mesh: Mesh) -> PyTree:
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
    _check_axes(mesh)
    check_model(model, params)
    leaves, structure = jax.tree.flatten(params)
    axes = model.split_axes(params) if hasattr(model, "split_axes") else [None] * len(leaves)

    def one(x: Array, axis: int | None) -> Array:
        divides = axis is not None and -x.ndim <= axis < x.ndim and x.shape[axis] % mesh.shape[HEADS] == 0
        spec = (HEADS if divides and i == axis % x.ndim else None for i in range(x.ndim))
        return _placed(x, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.unflatten(structure, [one(x, axis) for x, axis in zip(leaves, axes, strict=True)])


def on_mesh(model: Model, params: PyTree, mesh: Mesh | None, batch: int) -> PyTree:
    """Checks a mesh, and places parameters on it; None for none."""
    if mesh is None:
        return params
    check_mesh(mesh, model.config, batch)
    return shard_params(model, params, mesh)


def on_rows(rows: X, mesh: Mesh) -> X:
    """Places arrays "B ..." on a mesh, by rows; XLA places traced ones."""
    return jax.tree.map(lambda x: _placed(x, sharding(x, mesh, (DATA,))), rows)


def placed(state: State, mesh: Mesh) -> State:
    """Places a state on a mesh, and tells its layers."""
    known = lambda kv: kv.replace(how=dataclasses.replace(kv.how, mesh=mesh))
    lie = lambda kv: jax.tree.map(lambda x: _placed(x, sharding(x, mesh, kv.axes)), known(kv))
    learned = jax.tree.map(lambda x: _placed(x, NamedSharding(mesh, PartitionSpec())), state.params)
    bare = on_rows(dataclasses.replace(state, layers=(), params=()), mesh)
    return dataclasses.replace(bare, layers=tuple(map(lie, state.layers)), params=learned)


def _placed(x: Array, where: NamedSharding) -> Array:
    """Places an array; XLA places traced ones."""
    if traced(x) or (isinstance(x, jax.Array) and x.sharding.is_equivalent_to(where, x.ndim)):
        return x
    if where.is_fully_addressable:
        return jax.device_put(x, where)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_placed(jax.random.key_data(x), where), impl=jax.random.key_impl(x))
    known = np.asarray(x)  # the same in every process
    return jax.make_array_from_callback(known.shape, where, lambda index: known[index])
