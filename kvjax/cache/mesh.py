"""Where a program runs on a mesh of devices, and what each of them computes of it.

Under `kvjax.sharding.on_rows` every device runs the program on rows of its own. Heads, and the tokens of a prompt, are
left to XLA's partitioner: a policy is written as for one device, and what it compares across heads is compared across
devices. Here the partitioner is told where heads and rows of queries lie. What treats every head alone is a function of
those that a device has, as scatters are not partitioned well, and kernels not at all.

Outside of a mesh nothing here does anything.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from kvjax import pallas_kernels
from kvjax.pallas_kernels import Attention, Columns

DATA: Final = "data"
HEADS: Final = "heads"
SEQUENCE: Final = "sequence"
AXES: Final = (DATA, HEADS, SEQUENCE)

_X = TypeVar("_X")

_IN_COLUMNS = {"weight": (False, True), "multiplier": (True, True)}  # which fields have an axis of heads, and of rows


def devices(axis: str) -> int:
    """How many devices share the heads, or the tokens of a prompt, in the code that is traced: 1 outside of a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if DATA not in mesh.manual_axes or axis in mesh.manual_axes:
        return 1
    return mesh.shape[axis]


def _divided(size: int, axis: str) -> str | None:
    """The axis, where it has several devices and they divide a size."""
    return axis if devices(axis) > 1 and size % devices(axis) == 0 else None


def laid_out(x: Array, *axes: str | None) -> Array:
    """An array whose first axes are split over these axes of the mesh, and no others, as far as sizes allow."""
    if devices(HEADS) == devices(SEQUENCE) == 1:
        return x
    split = (None if a is None else _divided(n, a) for a, n in zip(axes, x.shape, strict=False))
    return lax.with_sharding_constraint(x, PartitionSpec(*split))


def prompt_rows(x: Array, *before: str | None) -> Array:
    """An array whose next axis is that of a prompt's tokens, each on one of the devices that share them."""
    return laid_out(x, *before, SEQUENCE)


def by_head(function: Callable[..., _X], own: PyTree[Any], *others: Any) -> _X:
    """What a function makes of the heads of every device.

    Args:
      function: of `own` and `others`. It treats heads alone, and returns arrays with an axis of heads.
      own: arrays "B K ...".
      others: arrays without an axis of heads, and what is no array.
    """
    leaves = jax.tree.leaves(own)
    if devices(HEADS) == devices(SEQUENCE) == 1 or any(x.shape[1] % devices(HEADS) for x in leaves):
        return function(own, *others)
    heads = PartitionSpec(None, HEADS)
    local = jax.shard_map(
        function,
        in_specs=(heads, *(PartitionSpec() for _ in others)),
        out_specs=heads,
        axis_names={HEADS, SEQUENCE},
        check_vma=False,
    )
    return local(own, *others)


def own_heads(num_heads: int) -> Int[Array, "K"]:
    """The numbers that a device's heads have in their layer, in a function called by `by_head`."""
    return lax.axis_index(HEADS) * num_heads + jnp.arange(num_heads, dtype=jnp.int32)


def everywhere(function: Callable[..., _X], *arguments: Any) -> _X:
    """What a function makes of all heads, on every device that shares them. What it passes on stays where it lies."""
    if devices(HEADS) == devices(SEQUENCE) == 1:
        return function(*arguments)
    given, tree = jax.tree.flatten(arguments)
    results: list[Any] = []  # what the function returned, with the numbers of arguments in place of what it passed on

    def changed(*leaves: Any) -> list[Any]:
        numbers = {id(leaf): i for i, leaf in enumerate(leaves)}
        found, structure = jax.tree.flatten(function(*tree.unflatten(leaves)))
        results[:] = [numbers.get(id(x)) for x in found], structure
        return [x for x in found if id(x) not in numbers]

    axes = {"axis_names": {HEADS, SEQUENCE}, "check_vma": False}
    new = iter(jax.shard_map(changed, in_specs=PartitionSpec(), out_specs=PartitionSpec(), **axes)(*given))
    passed, structure = results
    return structure.unflatten(next(new) if i is None else given[i] for i in passed)


def agreed(count: Int[Array, ""]) -> Int[Array, ""]:
    """The largest of numbers that devices count for rows of their own."""
    return lax.pmax(count, DATA) if DATA in jax.sharding.get_abstract_mesh().manual_axes else count


def attention(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_pos: Int[Array, "B T"],
    kv_pos: Int[Array, "B K S"],
    *,
    columns: Sequence[Columns] = (),
    bias: Float[Array, "B N S"] | None = None,
    **options: Any,
) -> Attention:
    """`kvjax.pallas_kernels.attention` of the heads and the query rows of every device, over keys that all have.

    A sum over rows is added up over devices, before query heads are combined where their order matters.
    """
    T, K = q.shape[2], k.shape[1]
    if devices(HEADS) == devices(SEQUENCE) == 1:
        return pallas_kernels.attention(q, k, v, q_pos, kv_pos, columns=tuple(columns), bias=bias, **options)
    heads, rows = _divided(K, HEADS), _divided(T, SEQUENCE)
    of_heads, of_rows = PartitionSpec(None, heads), PartitionSpec(None, rows)

    def spec(path: Sequence[Any], x: Any) -> PartitionSpec:
        del x
        by_heads, by_rows = _IN_COLUMNS.get(path[-1].name, (False, False))
        return PartitionSpec(None, *(heads,) * by_heads, *(rows,) * by_rows)

    def local(q, k, v, q_pos, kv_pos, bias, columns):
        asked = tuple(_numbered(_own_rows(c, T, q.shape[0], q.shape[2]), q.shape[1], heads) for c in columns)
        found = pallas_kernels.attention(q, k, v, q_pos, kv_pos, columns=asked, bias=bias, **options)
        if rows is None:
            return found.out, found.lse, found.columns
        measured = zip(columns, found.columns, strict=True)
        return found.out, found.lse, tuple(_of_all_rows(c, x, T, q.shape[2], k.shape[1]) for c, x in measured)

    columns = tuple(columns)
    in_columns = jax.tree_util.tree_map_with_path(spec, columns)
    by_row = PartitionSpec(None, heads, rows)
    call = jax.shard_map(
        local,
        in_specs=(by_row, of_heads, of_heads, of_rows, of_heads, of_heads, in_columns),
        out_specs=(by_row, by_row, of_heads),
        axis_names={HEADS, SEQUENCE},
        check_vma=False,
    )
    return Attention(*call(q, k, v, q_pos, kv_pos, bias, columns))


def _numbered(spec: Columns, num_query_heads: int, heads: str | None) -> Columns:
    """A statistic whose noise is that of the heads' numbers in the layer."""
    if heads is None or spec.softmax is None or spec.softmax.seed is None:
        return spec
    return dataclasses.replace(spec, softmax=dataclasses.replace(spec.softmax, heads=own_heads(num_query_heads)))


def _kept_apart(spec: Columns) -> bool:
    """Whether query heads are combined after all rows are summed, in a way that does not commute with sums."""
    return spec.summed and spec.group == "max" and spec.group_at == "after"


def _own_rows(spec: Columns, num_rows: int, batch: int, here: int) -> Columns:
    """What a device measures of its `here` rows for a statistic of all `num_rows`."""
    if here == num_rows:
        return spec
    rows, weight = spec.rows, spec.weight
    if rows is not None:
        counts = lax.axis_index(SEQUENCE) * here + jnp.arange(here, dtype=jnp.int32) >= num_rows - rows
        weight = jnp.ones((batch, here), jnp.float32) if weight is None else weight
        weight = jnp.where(counts[None], weight, jnp.zeros((), weight.dtype)) if spec.summed else spec.weight
        rows = min(rows, here)
    group = None if _kept_apart(spec) else spec.group
    return dataclasses.replace(spec, rows=rows, weight=weight, group=group)


def _of_all_rows(spec: Columns, found: Array, num_rows: int, here: int, num_kv_heads: int) -> Array:
    """A statistic of all `num_rows`, from what every device found of its `here`."""
    if spec.summed:
        found = lax.psum(found, SEQUENCE)
        return (
            spec.finish(found.reshape(found.shape[0], num_kv_heads, -1, *found.shape[2:]))
            if _kept_apart(spec)
            else found
        )
    rows = num_rows if spec.rows is None else spec.rows
    if rows > here:
        return lax.all_gather(found, SEQUENCE, axis=found.ndim - 2, tiled=True)[..., -rows:, :]
    last = lax.axis_index(SEQUENCE) == num_rows // here - 1
    return lax.psum(jnp.where(last, found, jnp.zeros((), found.dtype)), SEQUENCE)
