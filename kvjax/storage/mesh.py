"""A layer on a mesh of devices: which device holds what, and what each computes alone.

A layer knows its mesh (`Keeps.mesh`). Its arrays lie by rows of the batch ("data") and by kv heads ("heads"); those of
a pool by rows alone, as its slots belong to whichever heads need them. Policies are written as for one device, and
XLA's partitioner sends what they compare across heads. What treats every row and head alone is run by every device on
its own, since kernels are not partitioned, and scatters not well. Without a mesh nothing here does anything.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from kvjax import pallas_kernels
from kvjax.pallas_kernels.columns import Attention, Columns
from kvjax.pallas_kernels.logits import Logits

DATA: Final = "data"
HEADS: Final = "heads"
AXES: Final = (DATA, HEADS)

X = TypeVar("X")


def sharding(x: Any, mesh: Mesh, axes: tuple[str, ...] = AXES) -> NamedSharding:
    """The sharding of an array by its first axes, rows and heads; replicated where the mesh does not divide it.

    Args:
      x: the array, or a number.
      mesh: the mesh.
      axes: those of the mesh that the array's first axes lie on.
    """
    sizes = zip(axes, jnp.shape(x), strict=False)
    return NamedSharding(mesh, PartitionSpec(*(a if n % mesh.shape[a] == 0 else None for a, n in sizes)))


def laid_out(tree: X, mesh: Mesh | None, axes: tuple[str, ...] = AXES) -> X:
    """Constrains arrays, which all begin with these axes, to their `sharding`."""
    if mesh is None:
        return tree
    return jax.tree.map(lambda x: lax.with_sharding_constraint(x, sharding(x, mesh, axes)), tree)


def apart(mesh: Mesh | None, function: Callable[..., X], *arrays: PyTree, axes: tuple[str, ...] = AXES) -> X:
    """Runs a function on each device's rows and heads; on its rows and all heads by `axes=(DATA,)`.

    Args:
      mesh: the mesh.
      function: of the arrays; what it makes of a row, and of a head, depends on no other.
      arrays: trees of arrays "B K ...", and None.
      axes: those by which it is divided; the function's arrays and results begin with them.
    """
    if mesh is None:
        return function(*arrays)
    spec = sharding(jax.tree.leaves(arrays)[0], mesh, axes).spec
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(*arrays)


def attention_on(
    mesh: Mesh,
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_pos: Int[Array, "B T"],
    kv_pos: Int[Array, "B K S"],
    columns: tuple[Columns, ...] = (),
    bias: Float[Array, "B N S"] | None = None,
    logits: Logits = Logits(),
    **options: Any,
) -> Attention:
    """Runs `kvjax.pallas_kernels.attention` on each device's rows and heads."""
    both = sharding(k, mesh).spec
    rows, heads = PartitionSpec(both[0]), PartitionSpec(both[1])
    if mesh.shape[HEADS] > 1:
        columns = tuple(_numbered(c, q.shape[1]) for c in columns)

    def spec(path: Any, _: Any) -> PartitionSpec:
        return {"multiplier": both, "heads": heads}.get(path[-1].name, rows)

    def local(q, k, v, q_pos, kv_pos, columns, bias, nothing):
        how: dict[str, Any] = {"logits": dataclasses.replace(logits, nothing=nothing), **options}
        return pallas_kernels.attention(q, k, v, q_pos, kv_pos, columns=columns, bias=bias, **how)

    of_columns = jax.tree_util.tree_map_with_path(spec, columns)
    where = (both, both, both, rows, both, of_columns, both, heads)
    split = jax.shard_map(local, mesh=mesh, in_specs=where, out_specs=both, check_vma=False)
    return split(q, k, v, q_pos, kv_pos, columns, bias, logits.nothing)


def _numbered(spec: Columns, num_query_heads: int) -> Columns:
    """A statistic whose noise is drawn by the heads' indices in the layer."""
    if spec.softmax is None or spec.softmax.seed is None:
        return spec
    heads = jnp.arange(num_query_heads, dtype=jnp.int32)
    return dataclasses.replace(spec, softmax=dataclasses.replace(spec.softmax, heads=heads))
