"""The interface of a layer's cache to policies and to what runs them."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.codecs import Codec
from kvjax.contract import EMPTY, LayerView, Reads, Rotate, value
from kvjax.pallas_kernels.columns import Attention, Columns
from kvjax.pallas_kernels.logits import Logits
from kvjax.storage.codes import Codes, Rows, rows_of
from kvjax.storage.mesh import AXES, laid_out

S = TypeVar("S", bound="Storage")


@value
class Keeps:
    """Static properties of a layer's cache.

    Attributes:
      positions, sinks: where keys are rotated to, as in `Layout`.
      writes: what the layer's policy may change of a slot.
      per_head: for each leaf of the memory, whether it belongs to heads and not to slots.
      latent: how many of a key's channels are its value, too, the last ones (`KVShape`).
      codec: how keys and values are coded when the prompt has been read; None for not at all.
      mesh: the devices that share the layer; None for one.
    """

    positions: str = "original"
    sinks: int = 0
    writes: tuple[str, ...] = ()
    per_head: tuple[bool, ...] = ()
    latent: int = 0
    codec: Codec | None = None
    mesh: Mesh | None = None

    def of_slots(self, change: Callable[[Array], Array], memory: PyTree) -> PyTree:
        """The memory with `change` applied to each array that belongs to slots."""
        leaves, tree = jax.tree.flatten(memory)
        return tree.unflatten(x if own else change(x) for x, own in zip(leaves, self.per_head, strict=bool(leaves)))


@dataclasses.dataclass(frozen=True)
class Readers:
    """Rows that read a layer, and how: the arguments of `Storage.attend`."""

    q: Float[Array, "B N T H"]
    pos: Int[Array, "B T"]
    statistics: tuple[Columns, ...]
    reads: Reads
    rotate: Rotate
    logits: Logits
    own: bool


@dataclasses.dataclass(frozen=True)
class Storage(abc.ABC):
    """One layer's cache. It also has the fields `memory`, `log_weight` and `channels`, as in `Layer`.

    Attributes:
      k, v: keys and values, or their codes; `v` has no channels where they are channels of the keys. `values` has them
        in any case.
      pos: the position in the text of each slot's token, `EMPTY` for a dead slot.
      fault: heads whose tokens are no choice: of a prompt some went, though no score was a number.
      axes: those of a mesh that the first axes of all arrays lie on.
    """

    axes: ClassVar[tuple[str, ...]] = AXES

    k: Rows
    v: Rows
    pos: Int[Array, "B *slots"]
    fault: Bool[Array, "B K"]

    @property
    @abc.abstractmethod
    def how(self) -> Keeps:
        """The layer's static properties."""

    @property
    @abc.abstractmethod
    def head_pos(self) -> Int[Array, "B K _"]:
        """The positions of the tokens that each head holds, `EMPTY` elsewhere."""

    @property
    @abc.abstractmethod
    def num_live(self) -> Int[Array, "B K"]:
        """Tokens that each head holds."""

    @property
    def values(self) -> Float[Array, "B *slots V"]:
        """The value in every slot."""
        return rows_of(self.k)[..., -self.how.latent :] if self.how.latent else rows_of(self.v)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.nbytes for x in jax.tree.leaves(self))

    @abc.abstractmethod
    def view(self) -> Any:
        """The layer with S slots in every head, keys as they are stored."""

    def told(self, rotate: Rotate) -> LayerView:
        """The `Layer` that policies see: its keys are those that rows read."""
        view = self.view()
        return view.replace(k=view.keys(rotate), v=view.values)

    def put(self, before: LayerView, after: LayerView) -> "Storage":
        """The storage after a policy changed its view.

        Args:
          before: the view that the policy was given.
          after: what it returned: other positions, memory, channels, and what `writes` lists.

        Raises:
          ValueError: it returned no layer, or changed what its `writes` does not list, or drops channels of latents.
        """
        if after is before:
            return self
        if type(after) is not type(before):
            raise ValueError(f"a policy's update gives a {type(after).__name__}, not a layer; return kv.keep(...)")
        changed = [n for n in ("k", "v", "log_weight") if getattr(after, n) is not getattr(before, n)]
        if wrong := [n for n in changed if n not in self.how.writes]:
            raise ValueError(
                f"a policy's update changes {wrong[0]}, but its `writes` is {self.how.writes}; list {wrong[0]!r} there"
            )
        if self.how.latent and after.channels is not None:
            raise ValueError("a policy drops key channels, but the model's values are channels of its keys; keep all")
        return self._put(after, {n: getattr(after, n) for n in changed})

    @abc.abstractmethod
    def _put(self, view: LayerView, changed: dict[str, Array]) -> "Storage":
        """The storage of a view that was checked, of whose keys, values and weights these changed."""

    @abc.abstractmethod
    def free(self, pos: Int[Array, "B T"]) -> Int[Array, "B K T"]:
        """A dead slot of each head for each new row; the number of slots where there is none.

        Args:
          pos: positions of the rows. A row at `EMPTY` is padding.
        """

    @abc.abstractmethod
    def append(
        self,
        k: Float[Array, "B K T H"],
        v: Float[Array, "B K T V"],
        pos: Int[Array, "B T"],
        slots: Int[Array, "B K T"] | None = None,
    ) -> "Storage":
        """Stores new rows in these slots (`free`), in new ones if None."""

    def places(self, pos: Int[Array, "B T"]) -> Int[Array, "B _ T"]:
        """Positions that the queries of rows just stored are rotated to; the second axis is K or 1."""
        if self.how.positions != "rank":
            return pos[:, None]
        before = self.num_live - (pos != EMPTY).sum(-1, keepdims=True)
        rank = before[..., None] + jnp.cumsum(pos != EMPTY, axis=-1)[:, None] - 1
        return jnp.where(pos[:, None] == EMPTY, EMPTY, rank)

    @abc.abstractmethod
    def keys(self, rotate: Rotate) -> Float[Array, "B *heads S H"]:
        """Keys, rotated for the queries, with zeros for channels that were dropped."""

    @abc.abstractmethod
    def bias(self, group: int, slopes: Float[Array, "N"] | None = None) -> Float[Array, "B _ _"] | None:
        """The bias on the logits of each slot: log weights and ALiBi's.

        Args:
          group: query heads of a kv head.
          slopes: those of `Logits`.
        """

    def attend(
        self,
        q: Float[Array, "B N T H"],
        pos: Int[Array, "B T"],
        statistics: tuple[Columns, ...] = (),
        reads: Reads | None = None,
        *,
        rotate: Rotate,
        logits: Logits = Logits(),
        own: bool = False,
    ) -> Attention:
        """Attention of rows, outputs "B N T V", and statistics of what each slot received.

        Args:
          q: rotated queries.
          pos: positions of the rows.
          statistics: what is measured.
          reads: what the rows read, None for all live slots.
          rotate: the rotary embedding, for keys that are stored unrotated.
          logits: how logits follow from products.
          own: promises that the slots are those of the rows, in order.
        """
        rows = Readers(q, pos, statistics, reads or Reads(), rotate, logits, own)
        if not (n := self.how.latent):
            return self._attend(rows)
        # Keys stand in for values whole, since a part of them would be copied; of outputs the part is taken.
        found = self.replace(v=self.k)._attend(rows)
        return dataclasses.replace(found, out=found.out[..., -n:])

    @abc.abstractmethod
    def _attend(self, rows: Readers) -> Attention:
        """`attend`, with values of as many channels as keys."""

    @abc.abstractmethod
    def compact(self, capacity: int) -> "Storage":
        """Moves the live slots to `capacity` slots of each head, ordered by position. This is what frees memory."""

    def replace(self: S, **fields: Any) -> S:
        """The same storage with other fields."""
        return dataclasses.replace(self, **fields)

    def laid_out(self: S) -> S:
        """The same storage, sharded over its mesh."""
        return laid_out(self, self.how.mesh, self.axes)

    def where(self: S, active: Bool[Array, "B"], old: S) -> S:
        """This storage for active sequences and `old` for others, whose dead slots may hold anything."""
        pick = lambda x, y: jnp.where(active.reshape(-1, *(1,) * (x.ndim - 1)), x, y)
        names = {"pos", "fault", "memory"} | set(self.how.writes)
        fields = {n: jax.tree.map(pick, getattr(self, n), getattr(old, n)) for n in sorted(names)}
        for n in {"k", "v"} - names:
            if isinstance(x := getattr(self, n), Codes):  # places of last rows are written over
                fields[n] = dataclasses.replace(x, exact=jax.tree.map(pick, x.exact, getattr(old, n).exact))
        return self.replace(**fields)
