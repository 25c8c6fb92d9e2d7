"""Arguments of policies: sizes on the host; the layer, the context and statistics in traced code."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, UInt32
from numpy.typing import ArrayLike

from kvjax.contract.values import Prompts, value
from kvjax.pallas_kernels.columns import hash_uniform
from kvjax.pallas_kernels.kinds import Amount, Dtype, Kind, Number, Size
from kvjax.pallas_kernels.logits import Logits
from kvjax.pallas_kernels.pytree import pytree, static

EMPTY = -1  # the position of a dead slot
LAST = jnp.iinfo(jnp.int32).max  # later than any position
Phase = Literal["prefill", "decode", "replay"]
Rotate: TypeAlias = Callable[[Array, Array], Array]  # the rotary embedding: (x "B K T H", positions "B K T") -> x
Ids: TypeAlias = ArrayLike | Sequence[object]  # ids or numbers of tokens: an array of numpy or JAX, or lists of lists
V = TypeVar("V", bound="LayerView")


def turned_queries(rotate: Rotate, q: Float[Array, "B N T H"], pos: Int[Array, "B #N T"]) -> Float[Array, "B N T H"]:
    """Queries at positions: as keys are turned, or by the rotation's own `queries`, where it has one.

    Some models multiply queries by a factor that grows with their position (Ministral 3).
    """
    return getattr(rotate, "queries", rotate)(q, pos)


Codec = Annotated[Any, Kind("a codec, such as kvjax.codecs.Codec(Int8(), Int8())", lambda x: hasattr(x, "centre"))]

# A function of `AttentionInputs`, hashed by value: equal ones are computed once for all policies. It returns a tree of
# arrays, or `Columns`, which the kernels sum. In the phase "replay" it is a `Reread` instead.
Observation = Annotated[
    Any,
    Kind("an observation, such as kvjax.observe.Rows()", lambda x: callable(x) or hasattr(x, "__dataclass_fields__")),
]


@value
class LayerInfo:
    """A layer of a run, as it is known on the host before anything is traced.

    Attributes:
      layer: the layer's index, from 0.
      num_layers: layers of the model.
      num_query_heads, num_kv_heads, head_dim: shape of the layer's attention. Where a policy stores keys and values for
        every query head, `num_kv_heads` counts those.
      prompt_len: columns of the padded prompts; none has more tokens.
      max_new_tokens: decode steps that the run is planned for.
      embed_dim: width of the hidden states, 0 if it is not known.
      window: the layer's sliding window in tokens, None for none.
      latent: how many of a key's channels are its value, too, the last ones; 0 where values are stored apart.
    """

    layer: Amount
    num_layers: Size
    num_query_heads: Size
    num_kv_heads: Size
    head_dim: Size
    prompt_len: Amount
    max_new_tokens: Amount
    embed_dim: Amount = 0
    window: Size | None = None
    latent: Amount = 0

    @property
    def value_dim(self) -> int:
        """Channels of a value."""
        return self.latent or self.head_dim


@value
class Layout:
    """How a policy wants its layer stored, and its prompt read.

    Attributes:
      positions: where keys are rotated to. "original": the token's position in the text. "rank": the token's rank among
        the live tokens of its head (StreamingLLM, FINCH). "shifted": the same as "rank" at the price of "original", for
        policies that keep the first `sinks` tokens and the last ones: only the first are rotated again at each step.
      sinks: how many first tokens are shifted, for "shifted". An `Evict` derives it from its own `sinks`.
      pool: all heads of the layer share one pool of slots, so that a head with a small budget takes little memory
        (Ada-KV).
      by_query_head: keys and values are stored for every query head, so that each keeps its own tokens.
      prompt: how it may be read. "any": at once, or in blocks. "whole": at once, since what is seen of a block says
        nothing of the whole (FastGen). "rows": token by token, since every row decides what the next one reads.
      codec: how keys and values are stored when the prompt has been read; None as the model computes them.
    """

    positions: Literal["original", "rank", "shifted"] = "original"
    sinks: Amount = 0
    pool: bool = False
    by_query_head: bool = False
    prompt: Literal["any", "whole", "rows"] = "any"
    codec: Codec | None = None


@value
class PerSlot:
    """An array "B K S *shape" of memory. It moves and goes with its slot; a new slot starts with 0."""

    shape: tuple[int, ...] = ()
    dtype: Dtype = jnp.float32


@value
class PerHead:
    """An array "B K *shape" of memory. It starts with `fill` and stays where it is when slots move."""

    shape: tuple[int, ...] = ()
    dtype: Dtype = jnp.float32
    fill: Number = 0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The slots and data a layer needs.

    Attributes:
      per_head: the most live tokens that one kv head can have, for every prompt.
      total: the most that all kv heads of the layer can have together.
      hparams: what differs between layers and budgets: a tree of arrays "M ...".
    """

    per_head: Prompts
    total: Prompts
    hparams: PyTree = ()


@dataclasses.dataclass(frozen=True)
class LayerView:
    """A layer's cache as policies see it, however it is stored. A slot is live if `pos >= 0`; slots have no order.

    Attributes:
      k: keys as rows read them in every layout, rotated to where they stand, 0 in channels that were dropped. An
        observation of `UnrotatedKeys` has them before rotation.
      v: values.
      pos: the position in the text of each slot's token, `EMPTY` for a dead slot.
      fault: heads whose tokens are no choice: of a prompt some went, though no score was a number.
      memory: what the policy remembers: the tree that `memory` listed.
      log_weight: the logarithm of what each slot counts in attention, None for one each.
      channels: the key channels that compaction keeps, None for all; of keys before rotation for positions by rank.
      how: what is static: positions, and what the policy writes.
    """

    k: Float[Array, "B K S C"]
    v: Float[Array, "B K S V"]
    pos: Int[Array, "B K S"]
    fault: Bool[Array, "B K"]
    memory: PyTree = ()
    log_weight: Float[Array, "B K S"] | None = None
    channels: Int[Array, "B K _"] | None = None
    how: Any = static(default=None)

    @property
    def live(self) -> Bool[Array, "B K S"]:
        """Which slots hold a token."""
        return self.pos != EMPTY

    @property
    def num_live(self) -> Int[Array, "B K"]:
        """Tokens that every head holds."""
        return self.live.sum(-1, dtype=jnp.int32)

    def replace(self: V, **fields: Any) -> V:
        """The same layer with other fields."""
        return dataclasses.replace(self, **fields)

    def keep(self: V, mask: Bool[Array, "B K S"]) -> V:
        """The layer without the slots outside `mask`; nothing moves."""
        return self.replace(pos=jnp.where(mask, self.pos, EMPTY))


@pytree
class Context:
    """When and where a policy is called.

    Attributes:
      length: tokens that each sequence has read, the newest included.
      prompt_length: tokens of the whole prompt.
      keys: a PRNG key for every sequence.
      layer: index of the layer.
      max_new_tokens: decode steps that the run is planned for.
      hparams: what `sizes` gave for this layer, a row for every sequence.
      params: the layer's learned parameters, the same for all sequences.
      ids: token ids of the rows just read, if they are known; `tokens` gives them.
      phase: what kind of rows were read (static).
      width: columns of the padded prompt (static); while decoding a power of two that is no less, but in a pool to
        which the policy writes.
      capacity: slots that a head has after compaction, for policies that write; others are told 0, so that layers of
        all capacities share programs (static).
      window: the layer's sliding window in tokens, None for none (static).
      steady: whether each head kept to its budget before the last row, if it evicts after prompts (static).
    """

    length: Int[Array, "B"]
    prompt_length: Int[Array, "B"]
    keys: Key[Array, "B"]
    layer: Int[Array, ""]
    max_new_tokens: Int[Array, "B"]
    hparams: PyTree = ()
    params: PyTree = ()
    ids: Int[Array, "B T"] | None = None
    phase: Phase = static(default="prefill")
    width: int = static(default=0)
    capacity: int = static(default=0)
    window: int | None = static(default=None)
    steady: bool = static(default=True)

    @property
    def tokens(self) -> Int[Array, "B T"]:
        """Token ids of the rows just read: the prompt, a block of it, or a decode step's one; 0 for padding.

        Raises:
          ValueError: they are not known.
        """
        if self.ids is None:
            raise ValueError("the policy reads token ids, but none are known here; give evict_layer(tokens=)")
        return self.ids

    @property
    def step(self) -> Int[Array, "B"]:
        """Decode steps that each sequence has taken, this one included."""
        return jnp.maximum(self.length - self.prompt_length, 0)

    def seed(self, *salts: int) -> UInt32[Array, "B"]:
        """A random number for each sequence and layer, the same at every step."""
        folded = lambda key: functools.reduce(jax.random.fold_in, (self.layer, *salts), key)
        return jax.vmap(lambda key: jax.random.bits(folded(key), (), jnp.uint32))(self.keys)

    def uniform(self, pos: Int[Array, "B K S"], shared: bool = False) -> Float[Array, "B K S"]:
        """A random number in (0, 1) for every slot, new at every step; with `shared`, the same in all heads."""
        heads = jnp.arange(pos.shape[1], dtype=jnp.int32)[None, :, None] * jnp.int32(not shared)
        event = (self.length - self.prompt_length)[:, None, None]
        return hash_uniform(self.seed(3358)[:, None, None], event, heads, pos)


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """All that can be observed of a layer: its new rows are stored, and attention is about to read.

    What is observed depends on inputs alone, so policies can share it: `kv` has no memory here, and `ctx` neither
    `hparams` nor `params`.

    Attributes:
      q: queries, rotated.
      raw_q: queries before rotation.
      kv: the layer with the new rows.
      pos: positions of the rows, `EMPTY` for padding.
      ctx: when and where.
      rotate: the rotary embedding.
      out_proj: the layer's output projection.
      hidden: what the rows' queries, keys and values are projections of.
      logits: how logits follow from products, and the layer's sliding window; without slopes, which are in `bias`.
      bias: what is added to the logits of each slot.
      raw_k: keys of all slots before rotation, where they are stored so, which is for positions by rank.
    """

    q: Float[Array, "B N T H"]
    raw_q: Float[Array, "B N T H"]
    kv: LayerView
    pos: Int[Array, "B T"]
    ctx: Context
    rotate: Rotate
    out_proj: Float[Array, "N V D"] | None = None
    hidden: Float[Array, "B T D"] | None = None
    logits: Logits = Logits()
    bias: Float[Array, "B _ S"] | None = None
    raw_k: Float[Array, "B K S _"] | None = None


class Stats(dict[Any, Any]):
    """Statistics of the rows just read, by observation: `stats[Rows()]`.

    What it has in which units is said by the observation (`kvjax.observe`).
    """

    def __missing__(self, name: Any) -> Any:
        raise ValueError(f"{name!r} was not observed; list it in `observe`. {self._there}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"stats has no {name}. {self._there}")

    @property
    def _there(self) -> str:
        there = ", ".join(f"stats[{x!r}]" for x in self)
        return f"There is {there or 'nothing: attention is stats[Rows()], where observe= has Rows()'}"


jax.tree_util.register_pytree_node(
    Stats, lambda x: (tuple(x.values()), tuple(x)), lambda names, found: Stats(zip(names, found, strict=True))
)


@pytree
class Reads:
    """Which of the live slots the rows of one call read: all, unless a field is given.

    Attributes:
      visible: a mask of slots, or the indices of slots "B K R" (-1 for none).
      until: the row at position p reads a slot if p < until.
      log_weight: the logarithm of what a slot counts, for rows that are `delay` or more positions behind it.
      delay: in positions.
      at: the slots of the mask `visible`, where they are known and few (-1 for none): a layer then reads no others.
    """

    visible: Bool[Array, "B K S"] | Int[Array, "B K R"] | None = None
    until: Int[Array, "B K S"] | None = None
    log_weight: Float[Array, "B K S"] | None = None
    delay: int | Int[Array, "B K S"] = 0
    at: Int[Array, "B K R"] | None = None


@pytree
class Slots:
    """A layer as a part sees it.

    Attributes:
      kv: the layer.
      stats: what was observed, by observation.
      ctx: when and where. Parts read `hparams` and `params` below instead of its.
      candidates: live slots that compete for the budget.
      protected: slots that stay in any case.
      memory: the part's own memory.
      hparams: the part's own data: what its `hparams` gave.
      params: the part's own learned parameters.
      at_most_one: whether no head exceeds its budget by more than one token (static).
    """

    kv: LayerView
    stats: Stats
    ctx: Context
    candidates: Bool[Array, "B K S"]
    protected: Bool[Array, "B K S"]
    memory: PyTree = ()
    hparams: PyTree = ()
    params: PyTree = ()
    at_most_one: bool = static(default=False)

    def of(self, name: str, i: int | None = None) -> "Slots":
        """The slots for the part in field `name` of this part; `i` is its index where the field is a tuple."""
        own = {}
        for kind in ("memory", "hparams", "params"):
            found = getattr(getattr(self, kind), name, ())
            own[kind] = found if i is None or found == () else found[i]
        return dataclasses.replace(self, **own)


@pytree
class Decision:
    """A policy's decision for one layer.

    Attributes:
      keep: slots that stay.
      score: what they were ranked by.
      budgets: tokens that each head may keep.
      k, v, log_weight: what slots hold afterwards; None where they hold what they held.
      unscored: heads of which tokens go, though no score is a number: a `fault` of the layer.
    """

    keep: Bool[Array, "B K S"]
    score: Float[Array, "B K S"]
    budgets: Int[Array, "B K"]
    k: Float[Array, "B K S H"] | None = None
    v: Float[Array, "B K S V"] | None = None
    log_weight: Float[Array, "B K S"] | None = None
    unscored: Bool[Array, "B K"] | None = None
