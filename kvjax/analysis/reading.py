"""One reading of prompts and what follows them with the full cache: all that losses of any mask need.

Eviction after the prompt changes no key, value or statistic of the prompt itself, in any layer. So one prefill serves
every policy, budget and seed; what differs between them is which of the prompt's slots later rows may read.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from kvjax.algebra import identity
from kvjax.analysis.hindsight import of_kv_heads
from kvjax.analysis.losses import by_query_head
from kvjax.cache.context import Context, Site, row_keys
from kvjax.cache.state import EMPTY, KeyPositions, LayerKV, Positions, Rotate, Slopes, check_shares, ranks
from kvjax.drivers.attention import attend
from kvjax.drivers.requests import Model, check_positions, check_prompts
from kvjax.pallas_kernels.pytree import pytree, static
from kvjax.pallas_kernels.values import checked, one_of, whole
from kvjax.plan import ModelConfig, at_positions, make_plan
from kvjax.policy import Granularity
from kvjax.scoring.stats import LayerStats, Measurement, Observe, ordered

Kept = Bool[Array, "B heads T"] | Float[Array, "B heads T"]
"""What is left of a layer's prompt: a mask, or gates between 0 and 1."""

_FUTURE = Observe(group=None)


@dataclasses.dataclass(frozen=True)
class _Captured(Measurement):
    """The key of a layer's tensors among the statistics that a model hands back."""


@pytree
class LayerReading:
    """One layer of a `Reading`. Memory is linear in the tokens.

    Attributes:
      site: which layer.
      prompt: the prompt's cache, keys rotated at their positions.
      raw_k: the prompt's keys before rotation.
      stats: what was asked to be measured of the prompt, for slots of kv heads and of query heads.
      drawn: the same for measurements that draw noise, with an axis for seeds in front.
      q, k, v: the continuation's queries, keys and values, before rotation.
      out: the attention outputs of the continuation.
      mass: the share of attention that the continuation's rows pay to every token of the prompt, averaged over rows.
      out_proj: the output projection.
      rotate, scale, window, softcap, slopes: how the layer attends.
      fixed: stored keys have their positions for good, as those of models with learned positions.
    """

    prompt: LayerKV
    raw_k: Float[Array, "B K T H"]
    stats: dict[str, LayerStats]
    drawn: dict[str, LayerStats]
    q: Float[Array, "B N F H"]
    k: Float[Array, "B K F H"]
    v: Float[Array, "B K F H"]
    out: Float[Array, "B N F H"]
    mass: Float[Array, "B N T"]
    out_proj: Float[Array, "N H D"]
    site: Site = static()
    rotate: Rotate = static()
    scale: float | None = static(default=None)
    window: int | None = static(default=None)
    softcap: float | None = static(default=None)
    slopes: Slopes | None = static(default=None)
    fixed: bool = static(default=False)

    @property
    def options(self) -> dict[str, Any]:
        """How the layer attends, for `kvjax.attend`."""
        return {name: getattr(self, name) for name in ("rotate", "scale", "window", "softcap", "slopes")}

    def cache(self, granularity: Granularity = "kv_head", positions: Positions = "original") -> LayerKV:
        """The prompt's full cache as a policy of this kind sees it."""
        N = self.q.shape[1]
        k, v, pos = self.raw_k if positions == "compact" else self.prompt.k, self.prompt.v, self.prompt.pos
        if granularity == "query_head":
            k, v, pos = (by_query_head(x, N) for x in (k, v, pos))
        if positions == "original":
            return LayerKV(k, v, pos)
        return LayerKV(k, v, pos, rank=pos, rotated=pos if positions == "rerotate" else None, positions=positions)

    def evicted(self, keep: Kept, positions: KeyPositions = "original") -> LayerKV:
        """The prompt's cache with every slot outside `keep` dead, one mask for every kv head or every query head.

        With `positions` other than "original" the keys that are left move up to their ranks. Gates between 0 and 1 in
        place of a mask, which keep some of every slot where it is, have gradients.

        Raises:
          ValueError: neither booleans nor shares in [0, 1], of other slots than the prompt's, or gates of keys that
            move, or keys that cannot move, or no known `positions`.
        """
        one_of("positions", positions, *get_args(KeyPositions))
        if self.fixed and positions != "original":
            raise ValueError(
                f"positions={positions!r} would move keys, but this model adds learned positions to its embeddings; "
                "use 'original'"
            )
        keep = jnp.asarray(keep)
        (B, K, T), N = self.prompt.pos.shape, self.q.shape[1]
        if keep.shape not in ((B, K, T), (B, N, T)):
            raise ValueError(
                f"keep has the shape {keep.shape}, but layer {self.site.layer} has slots {(B, K, T)} of kv heads and "
                f"{(B, N, T)} of query heads; give one value a slot"
            )
        granularity = "kv_head" if keep.shape[1] == K else "query_head"
        if keep.dtype != bool:
            if not jnp.issubdtype(keep.dtype, jnp.floating):
                raise ValueError(f"keep has the dtype {keep.dtype}; give booleans, or gates between 0 and 1")
            if positions != "original":
                raise ValueError(f"gates keep some of every slot, so no key moves: positions={positions!r} needs masks")
            check_shares(keep)
            return dataclasses.replace(self.cache(granularity), gate=keep)
        kv = self.cache(granularity, "original" if positions == "original" else "compact")
        pos = jnp.where(keep, kv.pos, EMPTY)
        rank = None if positions == "original" else jnp.where(pos == EMPTY, EMPTY, ranks(pos))
        return dataclasses.replace(kv, pos=pos, rank=rank)


@pytree
class Reading:
    """What `read` returns: the whole model over prompts and continuations, with the full cache.

    Attributes:
      layers: tensors and measurements of every layer.
      logits: after every token of the continuation.
      continuation: the tokens.
      lengths: tokens of every prompt.
      keys: one PRNG key for every seed and sequence.
    """

    layers: tuple[LayerReading, ...]
    logits: Float[Array, "B F V"]
    continuation: Int[Array, "B F"]
    lengths: Int[Array, "B"]
    keys: Key[Array, "seeds B"]

    def mass(self, heads: int) -> Float[Array, "B L heads T"]:
        """The share of attention that the continuation pays to every token of the prompt, in all layers.

        Args:
          heads: kv heads, of which each has the mean of its group, or query heads.
        """
        return jnp.stack([of_kv_heads(layer.mass, heads) for layer in self.layers], axis=1)

    def live(self, granularity: Granularity = "kv_head") -> Bool[Array, "B L heads T"]:
        """The prompt's tokens in all layers, False for padding."""
        return jnp.stack([layer.cache(granularity).live for layer in self.layers], axis=1)

    def prompt_context(self, layer: int, seed: int | Int[Array, ""] = 0) -> Context:
        """The moment after the prompt, as a policy that has a seed meets it."""
        site = self.layers[layer].site
        return Context(self.lengths, self.lengths, self.keys[seed], site=site, phase="prefill")

    @property
    def rows(self) -> Int[Array, "B F"]:
        """Positions of the continuation's tokens."""
        return self.lengths[:, None] + jnp.arange(self.continuation.shape[1], dtype=jnp.int32)[None]

    def outputs(self, layer: int, keep: Kept, positions: KeyPositions = "original") -> Float[Array, "B N F H"]:
        """A layer's attention outputs over the continuation after an eviction, for the queries of the full cache."""
        of = self.layers[layer]
        ctx = dataclasses.replace(self.prompt_context(layer), length=self.lengths + of.q.shape[2])
        out, _, _ = attend(of.evicted(keep, positions), of.q, of.k, of.v, self.rows, ctx=ctx, **of.options)
        return out

    def logits_after(
        self,
        model: Model,
        params: PyTree[Any],
        keep: Sequence[Kept] | Bool[Array, "L B heads T"] | Float[Array, "L B heads T"],
        positions: KeyPositions = "original",
    ) -> Float[Array, "B F V"]:
        """The model's logits over the continuation after an eviction of every layer, which later layers feel.

        Everything the continuation adds to the cache stays. The result is that of `kvjax.prefill` with a policy that
        evicts after the prompt, then `kvjax.feed`, in one pass.

        Args:
          model, params: the model that was read.
          keep: what is left of every layer, layers first.
          positions: how the keys that are left are rotated: a policy's, or a plan's (`CachePlan.positions`).

        Raises:
          ValueError: masks of other layers or slots than the reading has.
        """
        if len(keep) != len(self.layers):
            raise ValueError(
                f"keep is for {len(keep)} layers, but the reading has {len(self.layers)}; give one mask a layer, the "
                "axis of layers first"
            )
        ctx = dataclasses.replace(self.prompt_context(0), length=self.lengths + self.continuation.shape[1])

        def attend_(cache, q, k, v, *, layer, out_proj=None, **options):
            del out_proj
            here = dataclasses.replace(ctx, site=self.layers[layer].site)
            return attend(cache, q, k, v, self.rows, ctx=here, **options)

        caches = tuple(layer.evicted(mask, positions) for layer, mask in zip(self.layers, keep, strict=True))
        where = at_positions(model.config, self.rows)
        return model(params, self.continuation, caches, attend=attend_, last_only=False, **where)[0]


Measured = Sequence[tuple[Granularity, Measurement]]


def read(
    model: Model,
    params: PyTree[Any],
    tokens: Int[Array, "B T"] | np.ndarray,
    continuation: Int[Array, "B F"] | np.ndarray,
    *,
    lengths: Array | np.ndarray | Sequence[int] | None = None,
    key: Array | None = None,
    seeds: int = 1,
    measure: Sequence[Measured] = (),
) -> Reading:
    """Reads left-padded prompts, then their continuations, with the full cache.

    Args:
      model, params: the model.
      tokens: token ids of the prompts.
      continuation: token ids that follow them, without padding.
      lengths: the prompts' own lengths, T if None.
      key: one PRNG key, or one a row.
      seeds: how many draws of what is random.
      measure: for every layer what to measure of the prompt, and whether slots belong to kv heads or to query heads.

    Raises:
      ValueError: prompts and continuations that do not fit together or the model, an empty continuation, no seeds.
    """
    tokens, lengths = check_prompts(model, tokens, lengths, params=params)
    continuation, _ = check_prompts(model, continuation)
    if continuation.shape[0] != tokens.shape[0]:
        raise ValueError(f"{tokens.shape[0]} prompts, but {continuation.shape[0]} continuations; give one for each")
    seeds = checked(whole(1, 2**16), "seeds", seeds)
    keys = row_keys(key, tokens.shape[0])
    measure = tuple(map(tuple, measure)) or ((),) * model.config.num_layers
    if len(measure) != model.config.num_layers:
        raise ValueError(f"measure is for {len(measure)} layers, but the model has {model.config.num_layers}")
    if again := [m for asked in measure for _, m in asked if m.again is not None]:
        raise ValueError(f"{again[0]} measures rows that read the prompt again, but a reading has none; use prefill")
    check_whole_text(model.config, tokens.shape[1], continuation.shape[1], lengths)
    return _read_once(model, params, tokens, continuation, jnp.asarray(lengths), keys, seeds=seeds, measure=measure)


def check_whole_text(config: ModelConfig, width: int, more: int, lengths: Any) -> None:
    """Warns of prompts and continuations that a full cache holds beyond the model's positions (`check_positions`)."""
    plan = make_plan(config, identity(), prompt_len=width, max_new_tokens=more)
    check_positions(config, plan, lengths if isinstance(lengths, np.ndarray) else width, more)


def seed_keys(keys: Key[Array, "B"], seeds: int) -> Key[Array, "seeds B"]:
    """One key for every seed and sequence; seed 0 keeps the sequence's own key."""
    more = [jax.vmap(lambda key, s=s: jax.random.fold_in(key, s))(keys) for s in range(1, seeds)]
    return jnp.stack([keys, *more])


def read_traced(
    model: Model,
    params: PyTree[Any],
    tokens: Int[Array, "B T"],
    continuation: Int[Array, "B F"],
    lengths: Int[Array, "B"],
    keys: Key[Array, "B"],
    *,
    seeds: int,
    measure: Sequence[Measured],
) -> Reading:
    """`read` without checks, to be used under `jax.jit`."""
    config = model.config
    (B, T), F = tokens.shape, continuation.shape[1]
    L, N, K = config.num_layers, config.num_query_heads, config.num_kv_heads
    keys = seed_keys(keys, seeds)
    column = jnp.arange(T, dtype=jnp.int32)[None] - (T - lengths)[:, None]
    pos = jnp.maximum(column, EMPTY)
    tokens = jnp.where(column >= 0, tokens, 0)
    sites = [Site(i, L, N, K, config.head_dim, T, F, config.window(i)) for i in range(L)]

    noisy_among: dict[Any, tuple[int, ...]] = {}  # which of some measurements draw noise

    def over_prompt(cache, q, k, v, *, layer, rotate, out_proj=None, hidden=None, **options):
        del cache

        def observed(keys, granularity, observe):
            """Attention output, cache and statistics as a policy with these keys meets them."""
            heads = K if granularity == "kv_head" else N
            site = dataclasses.replace(sites[layer], num_kv_heads=heads)
            ctx = Context(lengths, lengths, keys, site=site, phase="prefill", ids=tokens)
            k_, v_ = (x if heads == K else by_query_head(x, N) for x in (k, v))
            empty = LayerKV(k_[:, :, :0], v_[:, :, :0], jnp.zeros((B, heads, 0), jnp.int32))
            seen = {"observe": observe, "out_proj": out_proj, "hidden": hidden}
            return attend(empty, q, k_, v_, pos, ctx=ctx, rotate=rotate, **seen, **options)

        def values(granularity, observe, chosen):
            """Some of the statistics, as a function of keys."""
            return lambda keys: tuple(observed(keys, granularity, observe)[2].values[i] for i in chosen)

        plain: dict[str, tuple[Measurement, ...]] = {}
        drawn: dict[str, LayerStats] = {}
        for granularity in ("kv_head", "query_head"):
            wanted = ordered(m for g, m in measure[layer] if g == granularity)
            if (granularity, wanted) not in noisy_among:
                every = range(len(wanted))
                noisy = depends(values(granularity, wanted, every), keys)
                noisy = [i for i in every if noisy and depends(values(granularity, wanted, [i]), keys)]
                noisy_among[granularity, wanted] = tuple(noisy)
            noisy = noisy_among[granularity, wanted]
            plain[granularity] = tuple(m for i, m in enumerate(wanted) if i not in noisy)
            if noisy:
                found = jax.vmap(values(granularity, wanted, noisy))(keys)
                drawn[granularity] = LayerStats(found, tuple(wanted[i] for i in noisy))
        out, cache, of_kv_heads = observed(keys[0], "kv_head", plain["kv_head"])
        stats = {"kv_head": of_kv_heads}
        if plain["query_head"]:
            stats["query_head"] = observed(keys[0], "query_head", plain["query_head"])[2]
        captured = LayerStats(((stats, drawn, k, out_proj, rotate, options),), (_Captured(),))
        return out, cache, captured

    rows = lengths[:, None] + jnp.arange(F, dtype=jnp.int32)[None]

    def over_continuation(cache, q, k, v, *, layer, rotate, out_proj=None, **options):
        del out_proj
        ctx = Context(lengths + F, lengths, keys[0], site=sites[layer], phase="prefill")
        out, cache, stats = attend(cache, q, k, v, rows, ctx=ctx, rotate=rotate, observe=(_FUTURE,), **options)
        return out, cache, LayerStats(((q, k, v, out, stats[_FUTURE][..., :T] / F),), (_Captured(),))

    none = jnp.zeros((B, K, 0, config.head_dim), jnp.dtype(config.dtype))
    empty = (LayerKV(none, none, jnp.zeros((B, K, 0), jnp.int32)),) * L
    where, there = at_positions(config, pos), at_positions(config, rows)
    _, caches, prompt = model(params, tokens, empty, attend=over_prompt, last_only=True, **where)
    logits, _, after = model(params, continuation, caches, attend=over_continuation, last_only=False, **there)
    layers = []
    for site, cache, before, later in zip(sites, caches, prompt, after, strict=True):
        (stats, drawn, raw_k, out_proj, rotate, options), (q, k, v, out, mass) = before.values[0], later.values[0]
        kv: Any = cache
        static: dict[str, Any] = {"site": site, "rotate": rotate, "fixed": bool(where), **options}
        layers.append(LayerReading(kv, raw_k, stats, drawn, q, k, v, out, mass, out_proj, **static))
    return Reading(tuple(layers), logits, continuation, lengths, keys)


_read_once = jax.jit(read_traced, static_argnames=("model", "seeds", "measure"))


def depends(f: Callable[[Any], Any], by_seed: PyTree[Any]) -> bool:
    """Whether `f` looks at what differs between seeds; otherwise it has one value for all. Nothing is computed."""
    try:
        jax.eval_shape(jax.vmap(f, out_axes=None), by_seed)
    except ValueError as error:
        if "out_axes" not in str(error):
            raise
        return True
    return False
