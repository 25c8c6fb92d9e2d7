"""Every static size of a run, and every error that can be known before tracing."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.cache.context import Site
from kvjax.cache.pool import pool_slots
from kvjax.cache.state import KeyPositions, Positions
from kvjax.functions import check_unchanged
from kvjax.memory import Memory, Widths, predict
from kvjax.pallas_kernels.pytree import pytree
from kvjax.pallas_kernels.values import MOST_TOKENS, as_numpy, checked, each, float_dtype, optional, whole
from kvjax.policy import LayerPolicy, LayerSpec, Layout, Policy, Reads, as_policy
from kvjax.scoring.replay import Replay
from kvjax.sizes.tables import LONGEST


@runtime_checkable
class ModelConfig(Protocol):
    """What a plan must know of a model."""

    @property
    def num_layers(self) -> int:
        """L."""
        ...

    @property
    def num_query_heads(self) -> int:
        """N."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """K."""
        ...

    @property
    def head_dim(self) -> int:
        """H."""
        ...

    @property
    def vocab_size(self) -> int:
        """V."""
        ...

    @property
    def dtype(self) -> str:
        """Of keys and values."""
        ...

    @property
    def additive_rotation(self) -> bool:
        """Whether rotating a key twice is rotating it once by the sum."""
        ...

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, None for none."""
        ...


@pytree
class Sizes:
    """Numbers of tokens of another policy than a plan's, which differs in nothing else (`CachePlan.sizes`).

    Attributes:
      lengths: of the prompts that they are for.
      layers: for every layer, those of its rules.
    """

    lengths: Int[Array, "B"]
    layers: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """A policy with the sizes it was planned for. Equal plans are equal jit arguments.

    Attributes:
      policy: the policy.
      sites: the layers.
      capacities: slots of each layer while decoding: of every kv head, or of all together in a pool.
      positions: how each layer rotates its keys: as the policy says, or "sliding" for "compact" where that is the same
        and needs less arithmetic.
      layouts: how each layer is stored.
      widths: what of the model its memory depends on.
      rounded: whether it may be for more new tokens than were asked for, as requests of about a size share programs.
    """

    policy: Policy
    sites: tuple[Site, ...]
    capacities: tuple[int, ...]
    positions: tuple[KeyPositions, ...]
    layouts: tuple[Layout, ...]
    widths: Widths = dataclasses.field(repr=False, compare=False)  # programs do not depend on it
    rounded: bool = dataclasses.field(default=False, repr=False)

    @property
    def prompt_len(self) -> int:
        """Width of the (padded) prompt."""
        return self.sites[0].prompt_len

    @property
    def max_new_tokens(self) -> int:
        """Decode steps the plan has room for."""
        return self.sites[0].max_new_tokens

    @functools.cached_property
    def layers(self) -> tuple[LayerPolicy, ...]:
        """The policy in every layer."""
        return tuple(map(self.policy.at, self.sites))

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """What is static about the policy in every layer."""
        return tuple(layer.spec for layer in self.layers)

    @property
    def reads(self) -> Reads:
        """How prompts may be read (`LayerSpec.reads`): what the pickiest layer allows."""
        return max((spec.reads for spec in self.specs), key=("blocks", "whole", "rows").index)

    @functools.cached_property
    def replays(self) -> tuple[Replay, ...]:
        """How prompts are read again before anything of them is evicted, for the layers that ask for it."""
        return tuple(dict.fromkeys(replay for spec in self.specs for replay in spec.replays))

    @property
    def num_slots(self) -> int:
        """Slots of one sequence, summed over layers and kv heads."""
        each = zip(self.capacities, self.layouts, self.sites, strict=True)
        return sum(c if layout == "pool" else c * s.num_kv_heads for c, layout, s in each)

    def check_lengths(self, lengths: Sequence[int] | np.ndarray) -> None:
        """Raises ValueError if the policy cannot work with prompts of these lengths, or they need more slots."""
        for n in sorted(set(checked(each(whole(1)), "lengths", as_numpy("lengths", lengths)))):
            if n > self.prompt_len:
                raise ValueError(f"a prompt of {n} tokens does not fit the plan's width {self.prompt_len}")
            for site, spec, capacity in zip(self.sites, self.specs, self.capacities, strict=True):
                self.policy.check(site, n)
                if (needed := _capacity(spec, np.array([n]))) > capacity:
                    raise ValueError(
                        f"a prompt of {n} tokens needs {needed} slots in layer {site.layer}, but the plan has "
                        f"{capacity}; make the plan with lengths= that contain it"
                    )

    def check_model(self, config: ModelConfig) -> None:
        """Raises ValueError if the plan was made for a model of other sizes."""
        if len(self.sites) != config.num_layers:
            raise ValueError(
                f"the plan was made for a model of {len(self.sites)} layers, but this one has {config.num_layers}; "
                "make a plan with this model's config"
            )
        for site, spec in zip(self.sites, self.specs, strict=True):
            names = ["num_query_heads", "head_dim"]
            if spec.heads == "kv_head":  # a set for every query head is one whoever shares keys
                names.append("num_kv_heads")
            there = {n: getattr(site, n) for n in names} | {"window": site.window}
            here = {n: getattr(config, n) for n in names} | {"window": config.window(site.layer)}
            if wrong := [f"{n}={there[n]}, but this one has {here[n]}" for n in there if there[n] != here[n]]:
                raise ValueError(
                    f"the plan was made for a model whose layer {site.layer} has {'; '.join(wrong)}; make a plan with "
                    "this model's config"
                )
            _check_rotation(site.layer, spec.positions, config)

    def sizes(self, policy: Policy, lengths: Sequence[int] | np.ndarray) -> Sizes:
        """The numbers of tokens of another policy, which `prefill` runs with in the program and the slots of this plan.

        They are arrays: a sweep of budgets below a plan's compiles once.

        Args:
          policy: one that differs from the plan's in its budget, its protected tokens and their division over layers
            alone, and needs no more slots.
          lengths: of the prompts "B".

        Raises:
          ValueError: another policy, naming what differs, or one that keeps more or needs more slots.
        """
        as_policy(policy)
        lengths = as_numpy("lengths", lengths)
        known = np.asarray(as_lengths(lengths, lengths.size, self.prompt_len))
        found = []
        for here, capacity in zip(self.layers, self.capacities, strict=True):
            site, theirs = here.site, policy.at(here.site)
            if policy.shared != self.policy.shared or len(theirs.rules) != len(here.rules):
                raise ValueError(f"{policy} cannot run within a plan for {self.policy}; make a plan with it")
            for rule, other in zip(here.rules, theirs.rules, strict=True):
                if names := rule.differs(other):
                    raise ValueError(
                        f"{other} cannot run within a plan for {rule}: they differ in {', '.join(names)}, not in "
                        "numbers of tokens alone; make a plan with it"
                    )
                most, largest = (int(x.max()) for x in (other.spec(site).target[known], rule.spec(site).target))
                if most > largest:
                    raise ValueError(
                        f"{policy} keeps {most} tokens in layer {site.layer}, but the plan's policy {largest} at most; "
                        "make the plan with the larger of both"
                    )
            for n in sorted(set(known.tolist())):
                policy.check(site, n)
            if (needed := _capacity(theirs.spec, known)) > capacity:
                raise ValueError(
                    f"{policy} needs {needed} slots in layer {site.layer}, but the plan has {capacity}; make the plan "
                    "with the larger of both"
                )
            found.append(tuple(rule.sizes_of(site, known) for rule in theirs.rules))
        return Sizes(jnp.asarray(known, jnp.int32), tuple(found))

    def memory(self, batch: int = 1, *, dtype: jax.typing.DTypeLike | None = None, block: int | None = None) -> Memory:
        """Bytes that a run takes, before it is run: `print(plan.memory())` is a table.

        Those of the state are exact. What reading the prompt takes beside it is an estimate: it counts one layer's full
        keys and values, statistics, blocks of attention and activations, not parameters, and neither what XLA copies
        nor what it overlaps.

        Args:
          batch: sequences.
          dtype: of keys, values and activations; that of the model's config if None.
          block: tokens of a block, where the prompt is read in blocks (`kvjax.prefill`).

        Raises:
          ValueError: no sequence, no dtype of floats, or a block without tokens.
        """
        batch = checked(whole(1, 2**31 - 1), "batch", batch)
        kind = checked(float_dtype, "dtype", self.widths.dtype if dtype is None else dtype)
        block = checked(optional(whole(1)), "block", block)
        block = None if block is None or block >= self.prompt_len else block
        planned = self.layers, self.capacities, self.positions, self.layouts, self.widths
        return predict(*planned, batch=batch, dtype=kind, block=block, together=self.policy.shared)

    def target(self, prompt_length: int) -> float:
        """Live slots a head and layer may keep, on average, for a prompt of this length."""
        return float(np.mean([spec.target[prompt_length] for spec in self.specs]))


def as_lengths(lengths: Any, batch: int, width: int) -> np.ndarray | Int[Array, "B"]:
    """Lengths of prompts: in numpy where they are known, `width` for all if None. Traced lengths pass unchecked.

    Raises:
      ValueError: another number of lengths than prompts, or lengths outside 1 to `width`.
    """
    if isinstance(lengths, jax.core.Tracer):
        return lengths.astype(np.int32)
    advice = f"; lengths must be {batch} integers, one a prompt"
    known = np.full((batch,), width, np.int32) if lengths is None else as_numpy("lengths", lengths, advice)
    if known.shape != (batch,) or known.dtype.kind not in "iu":
        raise ValueError(f"lengths must be {batch} integers, one a prompt; got {known.dtype} of shape {known.shape}")
    if known.min() < 1 or known.max() > width:
        raise ValueError(
            f"prompt lengths must lie between 1 and the prompt's width {width}, got {known.min()} to {known.max()}"
        )
    return known.astype(np.int32)


def make_plan(
    config: ModelConfig,
    policy: Policy,
    *,
    prompt_len: int,
    max_new_tokens: int,
    lengths: Sequence[int] | np.ndarray | None = None,
) -> CachePlan:
    """Resolves budgets, allocations and schedules into integers, or says why they cannot work.

    A prompt, or a row of a batch, that is too short to be evicted from is kept whole: one that its budget holds, and
    one of which the budget is a share that cannot hold what the policy protects. Alone or beside others, it needs slots
    for all its tokens.

    Args:
      config: the model's sizes.
      policy: the policy.
      prompt_len: width of the (padded) prompt.
      max_new_tokens: decode steps to make room for.
      lengths: the prompts' own lengths, where known: each is checked, and capacities are no larger than these lengths
        and `prompt_len` need. Without them a plan is for any length up to `prompt_len`, of which it checks that one.

    Raises:
      ValueError: naming the two numbers that disagree, and the fix.
    """
    if not isinstance(config, ModelConfig):
        raise ValueError(f"{config!r} has not the sizes of a model; give the model's config (model.config)")
    prompt_len = checked(
        whole(1, why="the prompt is empty: give at least one token, such as BOS"), "prompt_len", prompt_len
    )
    max_new_tokens = checked(whole(0), "max_new_tokens", max_new_tokens)
    if prompt_len > LONGEST:
        raise ValueError(
            f"prompt_len={prompt_len} is more than {LONGEST}, the longest prompt that a plan has numbers for"
        )
    if prompt_len + max_new_tokens > MOST_TOKENS:
        raise ValueError(
            f"prompt_len={prompt_len} and max_new_tokens={max_new_tokens} are more than {MOST_TOKENS} tokens together, "
            "which is the most that a plan counts; plan for fewer"
        )
    check_unchanged(as_policy(policy))
    _check_learned(config, prompt_len + max_new_tokens)
    known = sorted({prompt_len} if lengths is None else set(checked(each(whole(), least=1), "lengths", lengths)))
    if known[0] < 1 or known[-1] > prompt_len:
        raise ValueError(
            f"prompt lengths must lie between 1 and the prompt's width {prompt_len}, got {known[0]} to {known[-1]}"
        )
    sites, specs = [], []
    for i in range(config.num_layers):
        heads = config.num_query_heads, config.num_kv_heads
        site = Site(i, config.num_layers, *heads, config.head_dim, prompt_len, max_new_tokens, config.window(i))
        spec = policy.at(site).spec
        if spec.heads == "query_head":
            site = dataclasses.replace(site, num_kv_heads=config.num_query_heads)
        _check_rotation(i, spec.positions, config)
        for n in known:
            policy.check(site, n)
        sites.append(site)
        specs.append(spec)
    planned = np.arange(prompt_len + 1) if lengths is None else np.array(sorted({*known, prompt_len}))
    plan = CachePlan(
        policy,
        tuple(sites),
        tuple(_capacity(spec, planned) for spec in specs),
        tuple(_key_positions(spec, config) for spec in specs),
        tuple(spec.storage for spec in specs),
        _widths(config),
    )
    for replay in plan.replays:
        _check_replay(config, replay, prompt_len)
    return plan


def _widths(config: ModelConfig) -> Widths:
    """What of a model its memory depends on. Sizes that kvjax does without may be missing, and count as 0."""
    embed_dim, mlp_dim = (getattr(config, name, 0) for name in ("embed_dim", "mlp_dim"))
    return Widths(config.num_kv_heads, config.vocab_size, embed_dim, mlp_dim, str(config.dtype))


def at_positions(config: ModelConfig, pos: Int[Array, "B T"]) -> dict[str, Any]:
    """The option with which a model of learned positions is called, besides those of all models."""
    return {"positions": pos} if getattr(config, "learned_positions", False) else {}


def _check_learned(config: ModelConfig, tokens: int) -> None:
    """Raises ValueError for a text that is longer than a model's table of positions."""
    most = getattr(config, "max_position", tokens)
    if getattr(config, "learned_positions", False) and tokens > most:
        raise ValueError(
            f"prompt_len and max_new_tokens are {tokens} tokens together, but this model has learned {most} positions; "
            "plan for fewer"
        )


def _check_replay(config: ModelConfig, replay: Replay, prompt_len: int) -> None:
    """Raises ValueError for instructions of other tokens than the model's, or in places that it does not have."""
    if wrong := [i for i in replay.ids if i >= config.vocab_size]:
        raise ValueError(
            f"the instruction has the token id {wrong[0]}, but the model's vocabulary {config.vocab_size} (0 to "
            f"{config.vocab_size - 1}); encode it with this model's tokenizer"
        )
    most, end = getattr(config, "max_position", 0), prompt_len + replay.rows(prompt_len)
    if getattr(config, "learned_positions", False) and end > most:
        raise ValueError(
            f"a prompt of {prompt_len} tokens and {replay.rows(prompt_len)} that repeat a chunk of it are {end} tokens "
            f"together, but this model has learned {most} positions; use a smaller chunk= (now {replay.chunk}) or "
            "shorter prompts"
        )


def _check_rotation(layer: int, positions: Positions, config: ModelConfig) -> None:
    """Raises ValueError where keys are to have other positions, and the model cannot give them any."""
    if positions != "original" and getattr(config, "learned_positions", False):
        raise ValueError(
            f"layer {layer} wants positions={positions!r}, but this model adds learned positions to its embeddings, so "
            "that a stored key cannot have another one; use 'original'"
        )
    if positions == "rerotate" and not config.additive_rotation:
        raise ValueError(
            f"layer {layer} wants positions='rerotate', but this model's rotary scaling depends on the length or "
            "scales the keys, so that turning a stored key further is not exact; use 'compact' or 'original'"
        )


def _key_positions(spec: LayerSpec, config: ModelConfig) -> KeyPositions:
    """How a layer rotates its keys: not each anew where kept tokens move up together and keys may be turned further."""
    together = spec.first is not None and spec.storage == "dense" and config.additive_rotation
    return "sliding" if together and spec.positions == "compact" else spec.positions


def _capacity(spec: LayerSpec, lengths: np.ndarray) -> int:
    """Slots of a layer for prompts of these lengths: of every kv head, or of all together in a pool."""
    if spec.storage == "dense":
        return int(spec.capacity[lengths].max())
    return pool_slots(int(spec.slots[lengths].max()))
