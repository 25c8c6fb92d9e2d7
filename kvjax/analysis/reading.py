"""One reading of prompts and of what follows them, with the full cache: all that losses of any policy need.

Eviction after the prompt changes no key, value or statistic of the prompt itself, in any layer. So one prefill serves
every policy, budget and seed; what differs is which of the prompt's slots later rows find, and what these hold.

Letters: B prompts, L layers, N query heads, K kv heads, T columns of the prompts, F rows that follow, H head_dim, D
width of the model, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.analysis.hindsight import of_kv_heads
from kvjax.compose import ByHead, Chain, Coded, SharedLayers
from kvjax.compose.across import AcrossLayers
from kvjax.compose.evict import LARGE, Evict, check_kept
from kvjax.contract import (
    Context,
    Decision,
    LayerParams,
    LayerView,
    Layout,
    Model,
    Observation,
    Policy,
    Positions,
    PRNGKey,
    Rotate,
    Stats,
    kv_layers,
)
from kvjax.observe import Rows
from kvjax.pallas_kernels.columns import accumulator
from kvjax.pallas_kernels.logits import Logits
from kvjax.pallas_kernels.pytree import pytree, static
from kvjax.run.apply import stored_for_policy, update_layers, with_policy
from kvjax.run.checks import check_model, check_one_shape, check_prompts, check_rows, traced
from kvjax.run.layers import Attend, embed, in_turn, layer_step
from kvjax.run.plan import Plan
from kvjax.run.prefill_each import Stored, read_whole, stored_as
from kvjax.run.state import AttnStats, State, row_keys
from kvjax.storage import Layer

Left = Sequence[Layer] | Bool[Array, "L B heads T"] | Float[Array, "L B heads T"] | Sequence[Any]
"""What is left of the prompt in every layer: a mask, gates between 0 and 1, or the layer after a policy."""

_MASS = Rows(group=None)


@pytree
class Later:
    """A layer as the rows that follow the prompt met it, with the full cache.

    Attributes:
      q, k, v: queries, keys and values of these rows, before rotation.
      out: their attention outputs.
      mass: the share of attention that they pay to every token of the prompt, averaged over rows.
      out_proj: the output projection.
      logits: how logits follow from products.
      rotate: the rotary embedding.
    """

    q: Float[Array, "B N F H"]
    k: Float[Array, "B _ F H"]
    v: Float[Array, "B _ F H"]
    out: Float[Array, "B N F H"]
    mass: Float[Array, "B N T"]
    out_proj: Float[Array, "N H D"]
    logits: Logits
    rotate: Rotate = static()


@pytree
class Reading:
    """A run of the model over prompts and what follows them, with the full cache (`read`).

    Attributes:
      state: the state that holds the whole prompts.
      stats: what was observed of them.
      later: the rows that follow, in every layer.
      logits: after each of these rows.
      continuation: their tokens.
    """

    state: State
    stats: AttnStats
    later: tuple[Later, ...]
    logits: Float[Array, "B F V"]
    continuation: Int[Array, "B F"]

    @property
    def lengths(self) -> Int[Array, "B"]:
        """Tokens of every prompt."""
        return self.state.length

    @property
    def rows(self) -> Int[Array, "B F"]:
        """Positions of the rows that follow."""
        return self.lengths[:, None] + jnp.arange(self.continuation.shape[1], dtype=jnp.int32)[None]

    def mass(self, heads: int) -> Float[Array, "B L heads T"]:
        """The share of attention that the rows pay to every token of the prompt, in all layers.

        Args:
          heads: kv heads, of which each has the mean of its group, or query heads.
        """
        return jnp.stack([of_kv_heads(layer.mass, heads) for layer in self.later], axis=1)

    def live(self, heads: int) -> Bool[Array, "B L heads T"]:
        """The prompt's tokens in all layers, False for padding."""
        each = [kv.view().live[:, :1] for kv in self.state.layers]
        return jnp.repeat(jnp.stack(each, axis=1), heads, axis=2)

    def after(self, policy: Policy, *, plan: Plan | None = None, policy_params: LayerParams = ()) -> tuple[Layer, ...]:
        """The layers after a policy evicted from the prompt; no slot moved, `live` says what stays.

        Args:
          policy: one of those that the reading was made for (`read`), at any budget.
          plan: sizes of a larger budget, whose program is used.
          policy_params: the policy's learned parameters, one tree a layer.

        Raises:
          ValueError: what `policy(state, stats)` refuses.
        """
        state = with_policy(policy, dataclasses.replace(self.state, params=tuple(policy_params)), self.stats, plan)
        layers = _after(state, self.stats)
        for i, kv in enumerate(layers):
            if not traced(kv.pos):
                check_kept(policy.at(i, len(layers)), i, kv, state.hparams[i])
        return layers

    def decisions(self, policy: Policy, *, policy_params: LayerParams = ()) -> tuple[Decision, ...]:
        """A policy's decision about the prompt in every layer, with the scores of slots.

        Dead slots have a score of minus infinity; that of protected ones decides nothing. Scores of a chain are those
        of its last member, and layers that share a decision or a budget each have their own.

        Args:
          policy, policy_params: as for `after`.

        Raises:
          ValueError: a policy that ranks nothing after the prompt, and what `policy(state, stats)` refuses.
        """
        state = dataclasses.replace(self.state, params=tuple(policy_params))
        return _decisions(with_policy(policy, state, self.stats), self.stats)

    def left(self, keep: Left) -> tuple[Layer, ...]:
        """The layers with what a mask or gates leave of each: a slot outside of the mask is dead.

        Gates between 0 and 1 keep some of every slot where it is, and have gradients.

        Args:
          keep: one for every layer, of kv heads or of query heads; layers are returned as they are.

        Raises:
          ValueError: another number of layers, neither booleans nor shares in [0, 1], or other slots than the prompt's.
        """
        if len(keep) != len(self.later):
            raise ValueError(
                f"keep is for {len(keep)} layers, but the reading has {len(self.later)}; give one mask a layer, the "
                "axis of layers first"
            )
        return tuple(x if isinstance(x, Layer) else self._left(i, x) for i, x in enumerate(keep))

    def _left(self, layer: int, keep: Any) -> Layer:
        keep, kv, N = jnp.asarray(keep), _bare(self.state.layers[layer]), self.later[layer].q.shape[1]
        B, K, T = kv.pos.shape
        if keep.shape not in ((B, K, T), (B, N, T)):
            raise ValueError(
                f"keep has the shape {keep.shape}, but layer {layer} has slots {(B, K, T)} of kv heads and "
                f"{(B, N, T)} of query heads; give one value a slot"
            )
        if keep.shape[1] != K:
            kv = kv.replace(**{n: jnp.repeat(getattr(kv, n), N // K, axis=1) for n in ("k", "v", "pos", "fault")})
        if keep.dtype == bool:
            return kv.keep(keep)
        if not jnp.issubdtype(keep.dtype, jnp.floating):
            raise ValueError(f"keep has the dtype {keep.dtype}; give booleans, or gates between 0 and 1")
        if not traced(keep) and not 0 <= keep.min() <= keep.max() <= 1:
            raise ValueError(
                f"gates lie between {keep.min()} and {keep.max()}, but a slot is kept by a share in [0, 1]"
            )
        if kv.how.positions != "original":
            raise ValueError("gates keep some of every slot, so no key moves: read the prompt at original positions")
        dtype = accumulator(kv.k.dtype)
        tiny = jnp.finfo(dtype).tiny  # finite weights, as infinite ones have no gradient
        return kv.replace(log_weight=jnp.log(jnp.maximum(keep.astype(dtype), tiny)))

    def attend(self, layer: int, observe: tuple[Observation, ...] = ()) -> Attend:
        """The attention of a layer, over any cache, for the rows that follow; it stores them there."""
        length = self.lengths + self.continuation.shape[1]
        state = dataclasses.replace(self.state, length=length, hparams=((),) * len(self.state.layers), params=())
        ctx = state.context(layer, "prefill", self.continuation)
        return Attend(ctx, self.rows, observe=observe, evict=False, gives=True)

    def outputs(self, layer: int, kv: Layer) -> Float[Array, "B N F H"]:
        """The attention outputs of the rows that follow, by the full cache's queries, where a layer is `kv`."""
        of, attend = self.later[layer], self.attend(layer)
        return attend(_in_order(kv), of.q, of.k, of.v, layer=layer, rotate=of.rotate, logits=of.logits)[0]

    def logits_after(self, model: Model, params: PyTree, keep: Left) -> Float[Array, "B F V"]:
        """The model's logits over the rows that follow after an eviction of every layer, which later layers feel.

        Everything that the rows add to the cache stays. These are the logits of `policy(state, stats)` and then
        `kvjax.feed`, in one pass.

        Args:
          model, params: the model that was read.
          keep: what is left of every layer, as for `left`.

        Raises:
          ValueError: what `left` refuses.
        """
        layers = self.left(keep)
        attends = [self.attend(i) for i in range(len(layers))]
        return _over(model, params, self, tuple(map(_in_order, layers)), attends)[0]


def _bare(kv: Any) -> Layer:
    """A layer without memory, so that those of all policies have one structure."""
    return kv.replace(memory=(), how=dataclasses.replace(kv.how, per_head=()))


def _in_order(kv: Any) -> Layer:
    """A layer as the rows that follow find it: first tokens first, and without the channels that were dropped."""
    return kv.compact(kv.pos.shape[2]) if kv.how.positions == "shifted" or kv.channels is not None else kv


def _over(
    model: Model, params: PyTree, reading: Reading, layers: Sequence[Layer], attends: Sequence[Callable[..., Any]]
) -> tuple[Float[Array, "B F V"], list[Any]]:
    """The model over the rows that follow: logits after each of them, and what every layer's `attend` observed."""
    (outer, each), found = model.parts(params), []
    x, _, pos, _ = embed(model, outer, reading.continuation, reading.lengths, None)
    others = [(own, Positions(pos)) for own in reading.state.others]
    for n, (kv, attend) in enumerate(in_turn(model, [*zip(layers, attends, strict=True)], others)):
        x, _, new = layer_step(model, model.alike[n], each[n], x, kv, attend)
        if not isinstance(attend, Positions):
            found.append(new)
    return _logits(model, outer, x), found


@functools.partial(jax.jit, static_argnames="model")
def _logits(model: Model, params: PyTree, x: Float[Array, "B F D"]) -> Float[Array, "B F V"]:
    return model.head(params, x)


@jax.jit
def _after(state: State, stats: AttnStats) -> tuple[Layer, ...]:
    return tuple(map(_bare, update_layers(stored_for_policy(state), stats)[0]))


@jax.jit
def _decisions(state: State, stats: AttnStats) -> tuple[Decision, ...]:
    state = stored_for_policy(state)
    layers, ctxs = update_layers(state, stats)
    found = []
    for i, (policy, before, after, ctx) in enumerate(zip(state.plan.layers, state.layers, layers, ctxs, strict=True)):
        ranked = _ranked(policy, before.view(), stats.of(i), ctx)
        if ranked is None:
            raise ValueError(f"{type(policy).__name__} ranks nothing after the prompt, in layer {i}")
        found.append(Decision(after.view().live, ranked.score, ranked.budgets))
    return tuple(found)


def _ranked(policy: Policy, kv: LayerView, stats: Stats, ctx: Context) -> Decision | None:
    """The decision of the last `Evict` in a layer's policy after the prompt; None if there is none."""
    if isinstance(policy, AcrossLayers | SharedLayers):
        own = ctx.hparams[0] if isinstance(policy, AcrossLayers) else ctx.hparams
        return _ranked(policy.policy, kv, stats, dataclasses.replace(ctx, hparams=own))
    if isinstance(policy, Coded):
        return _ranked(policy.policy, kv, stats, ctx)
    if isinstance(policy, Evict):
        if not policy.when.prefill:
            return None
        found = policy.choose(policy.update_memory(kv, stats, ctx), stats, ctx)[0]
        score = jnp.where(jnp.abs(found.score) < LARGE, found.score, jnp.sign(found.score) * jnp.inf)
        return dataclasses.replace(found, score=jnp.where(kv.live, score, -jnp.inf))
    if isinstance(policy, ByHead):
        own = [policy.own(i, kv, ctx) for i in range(len(policy.members))]
        each = [_ranked(p, view, stats, here) for p, (view, here) in zip(policy.members, own, strict=True)]
        if all(x is None for x in each):
            return None
        whole = Decision(kv.live, jnp.where(kv.live, 0.0, -jnp.inf), kv.num_live)
        each = [whole if x is None else x for x in each]
        return Decision(*(policy.pick([getattr(x, n) for x in each]) for n in ("keep", "score", "budgets")))
    found = None
    if isinstance(policy, Chain):
        for i, member in enumerate(policy.members):
            view, here = policy.own(i, kv, ctx)
            found = _ranked(member, view, stats, here) or found
            kv = member.update(view, stats, here).replace(memory=kv.memory)
    return found


@pytree
class _Following:
    """The attention of a layer for the rows that follow a prompt, observed as `Later`."""

    attend: Attend

    def __call__(self, kv: Layer, q: Array, k: Array, v: Array, *, out_proj: Any = None, **how: Any) -> Any:
        out, after, (seen, _) = self.attend(kv, q, k, v, out_proj=out_proj, **how)
        mass, logits = seen[_MASS][..., : kv.pos.shape[2]] / q.shape[2], how.get("logits", Logits())
        return out, after, Later(q, k, v, out, mass, out_proj, logits, rotate=how["rotate"])


def read(
    model: Model,
    params: PyTree,
    tokens: Any,
    continuation: Any,
    *,
    policies: Sequence[Policy] = (),
    observe: Sequence[Observation] = (),
    lengths: Any = None,
    key: PRNGKey = None,
    layout: Layout | None = None,
) -> Reading:
    """Reads prompts, then what follows them, with the full cache.

    Args:
      model, params: the model.
      tokens: token ids of the prompts "B T", padded on the left.
      continuation: token ids that follow them "B F", without padding.
      policies: the policies that will be applied to the reading, each at any one of its budgets if those observe the
        same. One `forward` observes for all of them.
      observe: what else is observed of the prompt in every layer: `reading.stats.of(layer)[observation]`.
      lengths: the prompts' own lengths "B", T if None.
      key: one PRNG key for the batch, or one a sequence.
      layout: how every layer is stored; as the policies need it if None.

    Raises:
      ValueError: prompts and continuations that do not fit together or the model; policies that need the prompt stored,
        or read again, in different ways; a model whose layers differ in heads.
    """
    check_model(model, params)
    check_one_shape(model)
    prompts = check_prompts(model, tokens, lengths)
    after, L = check_rows(model, continuation, None).tokens, len(kv_layers(model.config))
    if len(after) != len(prompts.tokens):
        raise ValueError(f"{len(prompts.tokens)} prompts, but {len(after)} continuations; give one for each")
    kinds = {stored_as(p, L): p for p in policies} if layout is None else {Stored((layout,) * L): None}
    if len(kinds) > 1:
        one, other = list(kinds.values())[:2]
        raise ValueError(
            f"{one} and {other} need the prompt stored, or read again, in different ways; read it once for each"
        )
    stored = dataclasses.replace(next(iter(kinds), Stored((Layout(),) * L)), more=tuple(observe))
    _, state, stats = read_whole(model, params, prompts, after.shape[1], policies=policies, stored=stored, key=key)
    bare = Reading(state, stats, (), jnp.zeros((len(after), 0, 0)), jnp.asarray(after))
    layers = [*map(_bare, state.layers)]
    attends = [_Following(bare.attend(i, (_MASS,))) for i in range(len(layers))]
    logits, later = _over(model, params, bare, layers, attends)
    return dataclasses.replace(bare, later=tuple(later), logits=logits)


def seed_key(key: PRNGKey, batch: int, seed: int) -> Array:
    """The keys of every sequence for a seed; seed 0 keeps the sequence's own."""
    keys = row_keys(key, batch)
    return keys if seed == 0 else jax.vmap(lambda k: jax.random.fold_in(k, seed))(keys)
