"""What a policy may know besides the cache: where it is (`Site`, static) and when (`Context`, traced)."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, UInt32

from kvjax.pallas_kernels.columns import hash_uniform
from kvjax.pallas_kernels.pytree import pytree, static

Phase = Literal["prefill", "decode"]

_GENERATOR = "threefry2x32"
_UNIFORM = 0x0D1E  # keeps uniform draws apart from the noise of statistics, which hashes numbers of as many kinds


@dataclasses.dataclass(frozen=True)
class Site:
    """One layer of one planned run; everything here is static.

    Attributes:
      layer: index of the layer, from 0.
      num_layers: layers of the model.
      num_query_heads, num_kv_heads, head_dim: shape of the layer's attention.
      prompt_len: width of the (padded) prompt; no sequence has a longer one.
      max_new_tokens: decode steps the run is planned for, which may be a few more than were asked for. A rule whose
        choices depend on it says so (`LayerSpec.timed`) and gets exactly those.
      window: the layer's sliding window, how many positions a row sees; None for all.
    """

    layer: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    prompt_len: int
    max_new_tokens: int
    window: int | None = None

    def column(self, table: np.ndarray) -> np.ndarray:
        """The layer's column of a table "M L"."""
        return table[:, self.layer]

    def part(self, devices: int) -> "Site":
        """The same layer with the heads of one of several devices."""
        return dataclasses.replace(self, **self._heads(devices))

    def _heads(self, devices: int) -> dict[str, int]:
        names = "num_query_heads", "num_kv_heads"
        return {name: getattr(self, name) // devices for name in names}

    def shared(self) -> "Site":
        """The site of all layers for which a policy has the same rules and sizes."""
        return _SharedSite(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)})


class LayerRead(BaseException):
    """A policy asks which layer it decides for, where one program serves several: each is given its own instead."""


class _SharedSite(Site):
    """A site whose layer nobody may read but by `column`: sizes are equal in all layers that it stands for."""

    def __hash__(self) -> int:
        raise LayerRead

    def __eq__(self, other: object) -> bool:
        raise LayerRead

    def __getattribute__(self, name: str) -> Any:
        if name in ("layer", "__dict__"):
            raise LayerRead
        return super().__getattribute__(name)

    def column(self, table: np.ndarray) -> np.ndarray:
        return table[:, object.__getattribute__(self, "layer")]

    def part(self, devices: int) -> Site:
        here = {f.name: object.__getattribute__(self, f.name) for f in dataclasses.fields(self)}
        return _SharedSite(**{**here, **self._heads(devices)})


def row_keys(key: Any, batch: int) -> Key[Array, "B"]:
    """One PRNG key a row, from one for the batch or one a row (`checked_key`); from `jax.random.key(0)` if None.

    Raises:
      ValueError: no key, or another number of keys than rows.
    """
    key = jax.random.key(0) if key is None else checked_key(key, batch)
    return key if key.ndim else jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(batch))


def checked_key(key: Any, batch: int) -> Key[Array, "..."]:
    """One key for the batch or one a row, typed or in the old raw form, as typed ones of JAX's default generator.

    That one draws for every row of a `jax.vmap` what it draws for it alone. Keys of others, whose draws depend on the
    rows beside ("rbg", "unsafe_rbg"), become those: "rbg"'s that of the same seed.

    Raises:
      ValueError: no key, or another number of keys than rows.
    """
    key = jnp.asarray(key) if isinstance(key, np.ndarray) and key.dtype == np.uint32 else key
    kinds = (jax.dtypes.prng_key, jnp.uint32)
    if not isinstance(key, jax.Array) or not any(jnp.issubdtype(key.dtype, kind) for kind in kinds):
        raise ValueError(f"key={key!r} is not a PRNG key; give jax.random.key(a whole number), or None")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        wanted = jax.random.key_data(jax.random.key(0)).shape
        if key.shape[-1:] != wanted:
            raise ValueError(f"key has shape {key.shape}, but one raw key {wanted}; make keys with jax.random.key")
        key = jax.random.wrap_key_data(key)
    if str(jax.random.key_impl(key)) != _GENERATOR:
        key = jax.random.wrap_key_data(jax.random.key_data(key)[..., :2], impl=_GENERATOR)
    if key.shape not in ((), (batch,)):
        raise ValueError(f"key has shape {key.shape}, but there are {batch} sequences; give one key, or one a sequence")
    return key


@pytree
class Context:
    """The moment at which a layer's policy is called.

    Attributes:
      length: tokens of every sequence seen so far, those just appended included.
      prompt_length: tokens of every sequence's prompt.
      keys: one PRNG key a sequence.
      site: which layer of which plan.
      phase: "prefill" (T prompt tokens were appended) or "decode" (one token was).
      ids: of the tokens just appended, where the driver knows them; `tokens` is how they are read.
      index: the layer, traced, where one program serves several; None for the site's.
      sizes: what the rules of a layer have instead of planned numbers, one a rule (`Rule.sizes_of`); for one rule,
        its own. None for the planned ones.
      heads: the kv heads that are here, where several devices share those of a layer; None for all.
      again: where the tokens are some of the prompt's, read again (`kvjax.scoring.replay.Replay`): the positions of
        the chunk, from the first up to before the second; None elsewhere.
    """

    length: Int[Array, "B"]
    prompt_length: Int[Array, "B"]
    keys: Key[Array, "B"]
    site: Site = static()
    phase: Phase = static()
    ids: Int[Array, "B T"] | None = None
    index: Int[Array, ""] | None = None
    sizes: Any = None
    heads: Int[Array, "K"] | None = None
    again: tuple[Int[Array, "B"], Int[Array, "B"]] | None = None

    @property
    def tokens(self) -> Int[Array, "B T"]:
        """Ids of the tokens just appended: of the prompt, of a block of it, or of a decode step's one; 0 for padding.

        The last column is that of position `length - 1`.

        Raises:
          ValueError: they are not known.
        """
        if self.ids is None:
            raise ValueError(
                "the ids of the tokens just read are wanted (ctx.tokens), but are not known here: give evict_layer "
                "tokens=; where room is made before a step's token comes (before_append()), there are none yet"
            )
        return self.ids

    @property
    def layer(self) -> Int[Array, ""]:
        """Index of the layer, which draws depend on."""
        return jnp.int32(self.site.layer) if self.index is None else self.index

    @property
    def step(self) -> Int[Array, "B"]:
        """Decode steps that every sequence has taken itself, this one included; 0 during prefill.

        Its own, not the batch's: a sequence that slept (`active=`, or because it ended before others) has taken fewer.
        """
        return jnp.maximum(self.length - self.prompt_length, 0)

    @property
    def seed(self) -> UInt32[Array, "B"]:
        """A number a sequence and layer, the same at every step: the seed of hashed noise."""
        return self._seed()

    def _seed(self, *salts: int) -> UInt32[Array, "B"]:
        """A number a sequence and layer; another one for every salt."""

        def bits(key: Key[Array, ""]) -> UInt32[Array, ""]:
            for salt in (self.layer, *salts):
                key = jax.random.fold_in(key, salt)
            return jax.random.bits(key, (), jnp.uint32)

        return jax.vmap(bits)(self.keys)

    @property
    def event(self) -> Int[Array, "B"]:
        """A number for each eviction of a sequence: below 0 before the prompt's last block, 0 after it, then steps."""
        return self.length - self.prompt_length

    def uniform(self, pos: Int[Array, "B K S"], *, shared: bool = False) -> Float[Array, "B K S"]:
        """A uniform draw in (0, 1) for every slot, fixed by (sequence key, layer, event, kv head, position).

        It depends neither on the order of evaluation, nor on padding, nor on which slot a token sits in: a generator's
        seed for the sequence and layer, and a hash for every slot. `shared` gives all heads of the layer the same draw
        for a position.
        """
        heads = jnp.arange(pos.shape[1], dtype=jnp.int32) if self.heads is None else self.heads
        heads = heads[None, :, None] * jnp.int32(not shared)
        seed = self._seed(_UNIFORM)[:, None, None]
        return hash_uniform(seed, self.event[:, None, None], heads, pos)
