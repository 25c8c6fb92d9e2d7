"""What later rows read of a prompt under the full cache: enough to price any gates of it, exactly and differentiably.

Evicting once after the prompt changes nothing that was computed before, so a prompt and what follows it are read once,
and every mask, budget and temperature is priced from the attention rows of that reading.

Letters: B prompts, L layers, K kv heads, N query heads, S slots of the prompt, R rows that follow it, H head_dim, D
embed_dim, V vocab_size.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.cache.context import Context, Site
from kvjax.cache.state import KVState, LayerKV, map_slots, with_gates
from kvjax.drivers.generation import Model, forward, init_state
from kvjax.eviction import Evict
from kvjax.plan import CachePlan, make_plan
from kvjax.policy import LayerSpec, Rule, Selection, context, keeps_all
from kvjax.scoring.scores import OfScore
from kvjax.scoring.stats import LastRows, LayerStats, Measurement, Moment, Observe, Slots
from pallas_kernels import Columns, Softmax, attention
from pallas_kernels.pytree import pytree, static
from pallas_kernels.values import settle, tokens


@dataclasses.dataclass(frozen=True)
class OutputProjection(Measurement):
    """The layer's output projection "N H D" itself."""

    def measure(self, moment: Moment) -> Float[Array, "N H D"]:
        """See `Measurement`."""
        if moment.out_proj is None:
            raise ValueError("what a layer adds to the residual stream needs the layer's out_proj, which was not given")
        return moment.out_proj


@pytree
class Voters:
    """Rows of one layer that vote on slots, and how they attend: votes under any softmax, and their gradient.

    Attributes:
      q: queries as they met the keys.
      k: keys of every slot.
      q_pos: absolute position of every row, negative for padding.
      kv_pos: absolute position of every slot, negative for a dead slot.
      scale, window, softcap: as in `pallas_kernels.attention`.
    """

    q: Float[Array, "B N R H"]
    k: Float[Array, "B K S H"]
    q_pos: Int[Array, "B R"]
    kv_pos: Int[Array, "B K S"]
    scale: float | None = static(default=None)
    window: int | None = static(default=None)
    softcap: float | None = static(default=None)

    def votes(self, multiplier: Float[Array, "B R"]) -> Float[Array, "B K S"]:
        """What every slot gets from all rows under logits times `multiplier`, the mean of a group, in its dtype.

        By the specification, whose statistics have a gradient; its memory grows with the voting rows only.
        """
        q, k = self.q.astype(multiplier.dtype), self.k.astype(multiplier.dtype)
        factor = jnp.broadcast_to(multiplier[:, None], (*k.shape[:2], q.shape[2]))
        column = Columns(softmax=Softmax(multiplier=factor))
        options: dict[str, Any] = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        found = attention(q, k, k, self.q_pos, self.kv_pos, columns=(column,), implementation="reference", **options)
        return found.columns[0]


@dataclasses.dataclass(frozen=True)
class VotingRows(Measurement):
    """The last rows just computed as `Voters`.

    Attributes:
      rows: how many of the new tokens count.
    """

    rows: int

    def __post_init__(self):
        settle(self, rows=tokens(1, "at least one row must vote"))

    def measure(self, moment: Moment) -> Voters:
        """See `Measurement`."""
        kv, pos = moment.kv, moment.pos[:, -self.rows :]
        if kv.positions == "compact":
            raise ValueError("a cache with positions='compact' stores keys unrotated; voters read those of 'original'")
        how = moment.scale, moment.window, moment.softcap
        return Voters(moment.q[:, :, -self.rows :], kv.k, pos, kv.pos, *how)


@dataclasses.dataclass(frozen=True)
class _AlsoSees(OfScore):
    """A score that has more measured than it needs."""

    extra: tuple[Measurement, ...]

    def observe(self, phase: Any) -> tuple[Measurement, ...]:
        return (*self.score.observe(phase), *(self.extra if phase == "prefill" else ()))

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        return self.score(slots)


@dataclasses.dataclass(frozen=True)
class _Watch(Rule):
    """Keeps everything, and sees every row of attention."""

    rows: int

    @property
    def attention(self) -> Observe:
        return Observe(LastRows(self.rows), group=None, summed=False)

    def spec(self, site: Site) -> LayerSpec:
        """See `Rule`."""
        return keeps_all(site, prompt=(self.attention, OutputProjection()))

    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[Any, None]:
        """See `Rule`."""
        del stats, ctx
        return kv.memory, None


@pytree
class Traces:
    """Prompts read with the full cache, and the rows that followed them: the true future queries.

    Attributes:
      state: the full cache after the prompt.
      attention: what each future row paid to each slot of the prompt.
      own: what future rows read of one another, weighted by attention; these keys are never evicted.
      own_mass: the attention that they paid to one another.
      out_proj: the output projections.
      logits: the next-token logits after every future row.
      future: the tokens of these rows.
    """

    state: KVState
    attention: Float[Array, "B L N R S"]
    own: Float[Array, "B L N R H"]
    own_mass: Float[Array, "B L N R"]
    out_proj: Float[Array, "L N H D"]
    logits: Float[Array, "B R V"]
    future: Int[Array, "B R"]

    @property
    def values(self) -> Float[Array, "B L K S H"]:
        """The prompt's values."""
        return jnp.stack([kv.v for kv in self.state.layers], axis=1)

    def outputs(self, gates: Float[Array, "B L K S"]) -> Float[Array, "B L R D"]:
        """What every layer adds to the residual stream of the future rows, where the prompt's slots have these gates.

        Weights are renormalised over what was kept, as attention over the smaller cache does.
        """
        B, L, N, R, _ = self.attention.shape
        K = gates.shape[2]
        grouped = lambda x: x.reshape(B, L, K, N // K, *x.shape[3:])
        weights = grouped(self.attention) * gates.astype(self.attention.dtype)[:, :, :, None, None]
        read = jnp.einsum("blkgrs,blksh->blkgrh", weights, self.values) + grouped(self.own)
        mass = weights.sum(-1) + grouped(self.own_mass)
        out = (read / mass[..., None]).reshape(B, L, N, R, -1)
        return jnp.einsum("blnrh,lnhd->blrd", out, self.out_proj)

    def eviction_loss(self, gates: Float[Array, "B L K S"]) -> Float[Array, "B L"]:
        r"""The exact eviction loss of every layer: by how much its outputs for the true future queries change.

        $\frac1R \sum_r \lVert y_r - \hat y_r \rVert_1 / \lVert y_r \rVert_1$ over the R rows that follow the prompt,
        where $y_r$ is what the layer's attention adds to the residual stream (after the output projection) with the
        full cache, and $\hat y_r$ with the gates. Each layer is given the inputs that it has with the full cache, as in
        Ada-KV's Theorem 1 (arXiv 2407.11550), whose distance this is, relative, for one row after another.

        Args:
          gates: how much of every slot is kept; 0 and 1 for a hard policy.
        """
        full = self.outputs(jnp.ones_like(gates))
        distance = jnp.abs(full - self.outputs(gates)).sum(-1)
        return (distance / jnp.abs(full).sum(-1)).mean(-1)

    def logits_with(self, model: Model, params: PyTree[Any], gates: Float[Array, "B L K S"]) -> Float[Array, "B R V"]:
        """Logits of the future rows where the prompt's slots have these gates, in all layers at once."""
        state = with_gates(self.state, gates)
        return forward(model, params, self.future, state, last_only=False)[0]


def trace(
    model: Model,
    params: PyTree[Any],
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    future: Int[Array, "B R"],
    policy: Evict,
    *,
    extra: tuple[Measurement, ...] = (),
    key: Array | None = None,
) -> tuple[Traces, tuple[LayerStats, ...]]:
    """Reads prompts and what follows them with the full cache.

    Args:
      model, params: the model.
      tokens: left-padded prompts.
      lengths: their own lengths.
      future: the tokens that follow.
      policy: whose statistics of the prompt are measured; it evicts nothing here. Its keys keep their positions, and it
        works on kv heads.
      extra: what else to measure of the prompt, such as what other policies observe.
      key: for policies that draw.

    Returns:
      The traces, whose state has the policy's memory and plan, and the statistics of every layer.
    """
    T, R = tokens.shape[1], future.shape[1]
    if extra:
        policy = dataclasses.replace(policy, score=_AlsoSees(policy.score, extra))
    plan = make_plan(model.config, policy, prompt_len=T, max_new_tokens=R)
    state = init_state(plan, lengths, key=key, dtype=model.config.dtype)
    _, state, stats = forward(model, params, tokens, state, valid=lengths)
    watch = _Watch(R)
    watched = make_plan(model.config, watch, prompt_len=T, max_new_tokens=R)
    layers = tuple(dataclasses.replace(kv, memory=((),)) for kv in state.layers)
    read = dataclasses.replace(state, layers=layers, plan=watched)
    logits, after, found = forward(model, params, future, read, last_only=False)
    rows = jnp.stack([s[watch.attention] for s in found.layers], axis=1)  # "B L N R S+R"
    v = jnp.stack([kv.v[:, :, T:] for kv in after.layers], axis=1)
    v = jnp.repeat(v, rows.shape[2] // v.shape[2], axis=2)
    own = jnp.einsum("blnrs,blnsh->blnrh", rows[..., T:], v.astype(rows.dtype))
    out_proj = jnp.stack([s[OutputProjection()] for s in found.layers]).astype(rows.dtype)
    return Traces(state, rows[..., :T], own, rows[..., T:].sum(-1), out_proj, logits, future), stats.layers


def decisions(
    policy: Evict, state: KVState, stats: tuple[LayerStats, ...], plan: CachePlan | None = None
) -> tuple[Selection, ...]:
    """What a policy decides about the prompt in every layer, from one reading that measured what it observes.

    Args:
      policy: the policy.
      state, stats: from `trace`.
      plan: the policy's own plan, where another policy was traced; None for that one.

    Raises:
      ValueError: a policy that does not evict after the prompt.
    """
    if plan is not None:
        B, T = state.layers[0].pos.shape[0], state.layers[0].num_slots
        grow = lambda m: jnp.pad(m, [(0, 0), (0, 0), (0, T)] + [(0, 0)] * (m.ndim - 3))
        memories = (map_slots(grow, layer.init(B)) for layer in plan.layers)
        layers = (dataclasses.replace(kv, memory=m) for kv, m in zip(state.layers, memories, strict=True))
        state = dataclasses.replace(state, layers=tuple(layers), plan=plan)
    selections = []
    for i, (kv, measured) in enumerate(zip(state.layers, stats, strict=True)):
        _, selection = state.plan.layers[i].decide(kv, measured, context(state, i, "prefill"))
        if selection is None:
            raise ValueError(f"{policy} evicts nothing after the prompt; use when=after_prefill()")
        selections.append(selection)
    return tuple(selections)


def ranked(
    policy: Evict, state: KVState, stats: tuple[LayerStats, ...]
) -> tuple[Float[Array, "B L K S"], Bool[Array, "B L K S"]]:
    """What the traced policy ranks the prompt's slots by, and which of them it protects by position.

    Args:
      policy, state, stats: as in `decisions`.

    Returns:
      (scores, protected slots); scores of dead slots are -inf.
    """
    scores = [s.score for s in decisions(policy, state, stats)]
    safe = [policy.safe(kv, context(state, i, "prefill")) for i, kv in enumerate(state.layers)]
    return jnp.stack(scores, axis=1), jnp.stack(safe, axis=1)


def kept(
    policy: Evict, state: KVState, stats: tuple[LayerStats, ...], plan: CachePlan | None = None
) -> Bool[Array, "B L K S"]:
    """The slots of the prompt that a policy keeps in every layer.

    Args:
      policy, state, stats, plan: as in `decisions`.
    """
    return jnp.stack([s.keep for s in decisions(policy, state, stats, plan)], axis=1)
