"""The contract: what a policy is asked, and what it is told. Everything else is built on it.

Letters: B batch, T rows, S slots, N query heads, K kv heads, G = N / K, H head_dim, M prompts on the host.
"""

import dataclasses
import types
from typing import Any, Literal, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels.columns import hash_uniform
from kvjax.pallas_kernels.pytree import pytree, static

EMPTY = -1  # the position of a dead slot
LAST = jnp.iinfo(jnp.int32).max
MOST = 2**30
Phase = Literal["prefill", "decode", "replay"]
T = TypeVar("T")

# ---------------------------------------------------------------------------------------------- values and counts

Count = Any  # an int is a number of tokens, a float a share of the prompt, otherwise a function of (prompt, budget)


def count(*, default: Any = dataclasses.MISSING) -> Any:
    """A field that is a `Count`: data, not program. It arrives resolved, "B", as `hparams.<field>`."""
    return dataclasses.field(default=default, metadata={"blank": True, "count": True})


def data(*, default: Any = dataclasses.MISSING) -> Any:
    """Another field that is data: what `sizes` or `hparams` make of it arrives, the field itself is blank."""
    return dataclasses.field(default=default, metadata={"blank": True})


def resolve(n: Count, prompt: np.ndarray, budget: np.ndarray | None = None) -> np.ndarray:
    """Whole tokens "M" for prompts "M" in layers of budgets "M"."""
    if isinstance(n, bool | np.bool_) or n is None:
        raise TypeError(f"{n!r} is not a count: give a number of tokens, a share of the prompt, or a function")
    if isinstance(n, int | np.integer):
        if n < 0:
            raise ValueError(f"a count of {n} tokens is negative")
        return np.full_like(prompt, min(int(n), MOST), dtype=np.int64)
    if isinstance(n, float | np.floating):
        if not 0 <= n <= 1:
            raise ValueError(f"{n} is not a share of the prompt, between 0 and 1; a number of tokens is an int")
        return np.floor(float(n) * prompt + 1e-9).astype(np.int64)
    if not callable(n):
        raise TypeError(f"{n!r} is not a count: give a number of tokens, a share of the prompt, or a function")
    found = np.asarray(n(prompt, budget))
    if found.shape != np.shape(prompt):
        raise ValueError(f"{n!r} gave counts of shape {found.shape} for {np.shape(prompt)} prompts")
    return found


@dataclass_transform(frozen_default=True, field_specifiers=(count, data, dataclasses.field))
def value(cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass."""
    return dataclasses.dataclass(frozen=True)(cls)


@dataclass_transform(frozen_default=True, field_specifiers=(count, data, dataclasses.field))
class Value:
    """A frozen dataclass, and so is every subclass: equal values share compiled programs."""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        bases = [base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]
        own, fields = vars(cls), {f.name for base in bases for f in dataclasses.fields(base)}
        if "__init__" in own:
            raise TypeError(
                f"{cls.__name__}: declare fields instead of __init__; values with hidden attributes would compare equal"
            )
        if bare := sorted(n for n in own if n in fields and n not in own.get("__annotations__", {})):
            raise TypeError(f"{cls.__name__}.{bare[0]} hides a field of that name: annotate it")
        value(cls)


def compiled(x: Any) -> Any:
    """A value without what is data: equal ones share programs, whatever their budgets."""
    if isinstance(x, tuple):
        return tuple(map(compiled, x))
    if not dataclasses.is_dataclass(x) or isinstance(x, type):
        return x
    y = object.__new__(type(x))
    for f in dataclasses.fields(x):
        object.__setattr__(y, f.name, None if f.metadata.get("blank") else compiled(getattr(x, f.name)))
    return y


class Tree(types.SimpleNamespace):
    """A pytree of named entries."""


def _flat(x: Tree):
    names = tuple(sorted(vars(x)))
    return tuple(map(vars(x).__getitem__, names)), names


jax.tree_util.register_pytree_node(Tree, _flat, lambda names, each: Tree(**dict(zip(names, each))))

# ------------------------------------------------------------------------------------------------- what is told


@value
class LayerInfo:
    """A layer of a run, known on the host before anything is traced. `prompt_len` is the prompts' padded width."""

    layer: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    prompt_len: int
    max_new_tokens: int
    embed_dim: int = 0
    window: int | None = None


@value
class Layout:
    """How a policy wants its layer stored.

    Attributes:
      positions: a token stands where it stood in the text ("original"), at its rank among the tokens of its head
        ("rank": StreamingLLM, FINCH), or, the same at the price of "original" where all that is kept is `sinks` first
        tokens and the last ones, with the first ones shifted up to the others at every step ("shifted").
      pool: slots of all heads lie in one pool, so that heads with small budgets cost little (Ada-KV).
      by_query_head: keys and values are stored for every query head, each with tokens of its own.
    """

    positions: Literal["original", "rank", "shifted"] = "original"
    sinks: int = 0
    pool: bool = False
    by_query_head: bool = False


@value
class PerSlot:
    """Memory "B K S *shape" that moves, is blanked and dropped with its slot; a new slot starts with 0."""

    shape: tuple = ()
    dtype: Any = jnp.float32


@value
class PerHead:
    """Memory "B K *shape" that stays where it is when slots move."""

    shape: tuple = ()
    dtype: Any = jnp.float32
    fill: float = 0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Most live tokens of a head and of all heads, "M" each, and what differs between layers and budgets as arrays "M ..."."""

    per_head: Any
    total: Any
    hparams: Any = ()


@pytree
class Context:
    """The moment at which a policy is called in a layer. All is data but `phase`, `width` (of the prompt),
    `capacity` (slots that a head has afterwards), `window` (the layer's sliding window, None for none) and `steady`
    (whether the layer was within this policy's budget before the last row).

    Attributes:
      length, prompt_length: "B", tokens of the text so far, and of the prompt when it is read whole.
      keys: "B", a PRNG key a sequence.
      layer: the number of the layer.
      max_new_tokens: "B", how many tokens the run is planned for.
      hparams: what `sizes` gave for this layer.
      params: the layer's learned parameters.
      tokens: "B T", the ids of the rows just read.
    """

    length: Any
    prompt_length: Any
    keys: Any
    layer: Any
    max_new_tokens: Any
    hparams: Any = ()
    params: Any = ()
    tokens: Any = None
    phase: Phase = static(default="prefill")
    width: int = static(default=0)
    capacity: int = static(default=0)
    window: int | None = static(default=None)
    steady: bool = static(default=True)

    @property
    def step(self):
        """Decode steps that every sequence has taken, this one included: "B"."""
        return jnp.maximum(self.length - self.prompt_length, 0)

    def seed(self, *salts: int):
        """A number a sequence and layer, the same at every step: "B"."""

        def bits(key):
            for salt in (self.layer, *salts):
                key = jax.random.fold_in(key, salt)
            return jax.random.bits(key, (), jnp.uint32)

        return jax.vmap(bits)(self.keys)

    def uniform(self, pos, shared: bool = False):
        """A draw in (0, 1) for every slot, new at every eviction: "B K S"."""
        heads = jnp.arange(pos.shape[1], dtype=jnp.int32)[None, :, None] * jnp.int32(not shared)
        event = (self.length - self.prompt_length)[:, None, None]
        return hash_uniform(self.seed(3358)[:, None, None], event, heads, pos)


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """What attention is about to read, its new rows stored: all that can be observed. `q` is rotated, `raw_q` is not;
    `kv` is without memory, `ctx` without hparams and params, so that what is observed depends on inputs alone.
    """

    q: Any
    raw_q: Any
    kv: Any
    pos: Any
    ctx: Context
    rotate: Any
    out_proj: Any = None
    hidden: Any = None
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    bias: Any = None


@pytree
class Reads:
    """What the rows of a call read of the live slots: everything, unless something is given.

    Attributes:
      visible: a mask "B K S", or numbers of slots "B K R" (-1 for none).
      until: "B K S": the row at position p reads a slot if p < until.
      log_weight: "B K S": the logarithm of what a slot counts, for rows `delay` positions or more behind it.
      delay: a number, or "B K S".
    """

    visible: Any = None
    until: Any = None
    log_weight: Any = None
    delay: Any = 0


@pytree
class Slots:
    """What a part sees: the layer, what was observed, the moment, who competes, who stays anyway, and its own memory,
    hparams and params.
    """

    kv: Any
    stats: Any
    ctx: Context
    candidates: Any
    protected: Any = None
    memory: Any = ()
    hparams: Any = ()
    params: Any = ()
    at_most_one: bool = static(default=False)  # whether no head can exceed its budget by more than one

    def of(self, name: str, i: int | None = None) -> "Slots":
        """The same slots for a part of this part: the field `name`, or one of a tuple of them."""

        def pick(tree):
            found = getattr(tree, name, ())
            return found if i is None or found == () else found[i]

        return dataclasses.replace(self, memory=pick(self.memory), hparams=pick(self.hparams), params=pick(self.params))


@pytree
class Decision:
    """The slots that stay, by what score, under which budgets "B K"; and what they hold afterwards: `k`, `v` "B K S H"
    and `log_weight` "B K S" are None where slots keep their own.
    """

    keep: Any
    score: Any
    budgets: Any
    k: Any = None
    v: Any = None
    log_weight: Any = None


# ------------------------------------------------------------------------------------------------- what is asked


class Policy(Value):
    """What is kept of a cache. A method that is not overridden asks for nothing: `Policy()` is the full cache."""

    @property
    def layout(self) -> Layout:
        """How its layers are stored."""
        return Layout()

    @property
    def joint(self) -> bool:
        """Whether `update_layers` decides for all layers at once, after all of them were read."""
        return False

    @property
    def writes(self) -> tuple[str, ...]:
        """What it may change of a slot beside its position: "k", "v", "log_weight"."""
        return ()

    def at(self, layer: int, num_layers: int) -> "Policy":
        """The policy of one layer."""
        return self

    def observe(self, phase: Phase) -> tuple:
        """What it wants to see of a phase's rows: functions of `AttentionInputs`."""
        return ()

    def sizes(self, info: LayerInfo, lengths: np.ndarray) -> Sizes:
        """Room and data for prompts of these lengths (host)."""
        most = lengths + info.max_new_tokens
        return Sizes(most, info.num_kv_heads * most, resolved(self, info, lengths))

    def memory(self, info: LayerInfo) -> Any:
        """What is remembered of a layer: a tree of `PerSlot` and `PerHead`."""
        return ()

    def init_params(self, info: LayerInfo, key: Any) -> Any:
        """Learned parameters of a layer: any pytree of arrays, the same for all sequences."""
        return ()

    def enter(self, kv: Any, inputs: AttentionInputs, ctx: Context) -> Any:
        """The layer after new rows were appended and before any row reads it."""
        return kv

    def reads(self, kv: Any, inputs: AttentionInputs, ctx: Context) -> Reads | None:
        """What the rows of this call read; None for all live slots."""
        return None

    def update(self, kv: Any, stats: dict, ctx: Context) -> Any:
        """The layer after its rows were read, `stats` being what was observed. Here policies evict."""
        return kv

    def update_layers(self, layers: tuple, stats: tuple, ctxs: tuple) -> tuple:
        """As `update` for all layers, if `joint`."""
        return tuple(map(self.update, layers, stats, ctxs))

    def reserve(self, kv: Any, ctx: Context) -> Any:
        """How many tokens each head will hold at most while decoding, "B K": where a pool leaves room."""
        return jnp.broadcast_to((ctx.prompt_length + ctx.max_new_tokens)[:, None], kv.pos.shape[:2])

    def __call__(self, state: Any, stats: Any) -> Any:
        """The state after this policy's update, from what `forward` observed: a prompt is compacted, too."""
        from kvjax.core.drivers.door import applied

        return applied(self, state, stats)


class Part(Value):
    """What a policy is made of: a score, a selection, a rewrite. It says what it observes and owns what it remembers.

    Fields that are parts, or tuples of parts, are taken care of: `slots.of(name)` is for them what `slots` is here.
    """

    @property
    def writes(self) -> tuple[str, ...]:
        """What it may change of a slot beside its position: "k", "v", "log_weight"."""
        return ()

    def observe(self, phase: Phase) -> tuple:
        """See `Policy`."""
        return unique(o for part in _children(self) for o in part.observe(phase))

    def hparams(self, info: LayerInfo, lengths: np.ndarray, budget: np.ndarray) -> Any:
        """Data "M ..." for prompts of these lengths in a layer of this budget; by default fields that are counts (host)."""
        return resolved(self, info, lengths, budget)

    def memory(self, info: LayerInfo) -> Any:
        """See `Policy`."""
        return of_parts(self, lambda part: part.memory(info))

    def init_params(self, info: LayerInfo, key: Any) -> Any:
        """See `Policy`."""
        keys = iter(jax.random.split(key, 64))
        return of_parts(self, lambda part: part.init_params(info, next(keys)))

    def update(self, slots: Slots) -> Any:
        """The memory after the rows just read, whether or not eviction is due."""
        return updated_parts(self, slots)

    def least(self, lengths: np.ndarray, budget: np.ndarray) -> Any:
        """The smallest budget "M" that it can work with (host)."""
        return np.max([np.zeros_like(lengths), *(part.least(lengths, budget) for part in _children(self))], 0)


def unique(observations) -> tuple:
    """Observations without duplicates."""
    return tuple(dict.fromkeys(observations))


def _named(x: Any) -> dict:
    """The parts of a value, or tuples of them, by field."""
    found = {}
    for name in (f.name for f in dataclasses.fields(x)):
        y = getattr(x, name)
        if isinstance(y, Part) or (isinstance(y, tuple) and y and isinstance(y[0], Part)):
            found[name] = y
    return found


def _children(x: Any) -> list:
    found = []
    for y in _named(x).values():
        found += y if isinstance(y, tuple) else (y,)
    return found


def of_parts(x: Any, one: Any, **more: Any) -> Any:
    """`one(part)` for every part of a value, by field; () without any."""
    found = {name: tuple(map(one, y)) if isinstance(y, tuple) else one(y) for name, y in _named(x).items()} | more
    return Tree(**found) if found else ()


def resolved(x: Any, info: LayerInfo, lengths: np.ndarray, budget: np.ndarray | None = None, **more: Any) -> Any:
    """Fields that are counts as "M" int32, and the hparams of parts."""
    whole = lambda n: jnp.asarray(np.minimum(n, MOST), jnp.int32)
    counts = {
        f.name: whole(resolve(getattr(x, f.name), lengths, budget))
        for f in dataclasses.fields(x)
        if f.metadata.get("count") and f.name not in more
    }
    return of_parts(x, lambda part: part.hparams(info, lengths, budget), **counts, **more)


def updated_parts(x: Any, slots: Slots) -> Any:
    """The memory of a value whose parts have updated theirs."""
    one = lambda name, y: (
        tuple(p.update(slots.of(name, i)) for i, p in enumerate(y))
        if isinstance(y, tuple)
        else y.update(slots.of(name))
    )
    found = {name: one(name, y) for name, y in _named(x).items()}
    return Tree(**{**vars(slots.memory), **found}) if found else slots.memory
