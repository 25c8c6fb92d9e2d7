"""Whole budget curves: policies x budgets x seeds x prompts from one prefill, in one compiled call."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.analysis.grid import Kind, Method, keep_all, kind_of, make_grid, measurements
from kvjax.analysis.hindsight import Across, best_in_hindsight, hindsight_rank, lost_mass, regret
from kvjax.analysis.intervals import Interval, interval
from kvjax.analysis.losses import distances, largest_value, output_kl
from kvjax.analysis.reading import Reading, check_whole_text, read_traced
from kvjax.cache.context import row_keys
from kvjax.cache.state import Positions
from kvjax.drivers.requests import Model, check_prompts
from kvjax.pallas_kernels.pytree import pytree, static
from kvjax.pallas_kernels.values import as_annotated, checked, one_of, whole
from kvjax.plan import CachePlan
from kvjax.sizes.budget import Count, as_budget, lookup

HINDSIGHT: Final = {"head": "hindsight (heads)", "layer": "hindsight (layers)", "model": "hindsight (model)"}
"""Names of the oracles among the policies of a curve."""


@pytree
class Losses:
    """What a keep mask costs; "..." is empty for one mask. Means over the rows of the continuation.

    Attributes:
      l1, l2: how far a layer's attention output moves, after the output projection, for the queries of the full cache.
      heads_l1, heads_l2: the same before it, heads side by side.
      bound: Theorem 2's upper bound of `l1`. NaN for policies that move kept keys to other positions, which it does
        not cover.
      least_bound: its minimum over masks with the same head budgets (Theorem 3).
      lost: share of attention that goes to evicted tokens, averaged over heads.
      regret_tokens: how much less the best mask in hindsight with the same head budgets loses.
      regret_heads: how much less the best one with the same layer budget loses; what it exceeds `regret_tokens` by is
        due to the budgets of heads.
      regret_layers: the same for the budget of the whole model, averaged over layers.
      live: tokens that are kept, averaged over heads.
      kl: Kullback-Leibler divergence of the model's next-token distribution from that of the full cache, in nats.
      agreement: share of rows whose most likely token is that of the full cache.
    """

    l1: Float[Array, "*grid L B"]
    l2: Float[Array, "*grid L B"]
    heads_l1: Float[Array, "*grid L B"]
    heads_l2: Float[Array, "*grid L B"]
    bound: Float[Array, "*grid L B"]
    least_bound: Float[Array, "*grid L B"]
    lost: Float[Array, "*grid L B"]
    regret_tokens: Float[Array, "*grid L B"]
    regret_heads: Float[Array, "*grid L B"]
    regret_layers: Float[Array, "*grid B"]
    live: Float[Array, "*grid L B"]
    kl: Float[Array, "*grid B"]
    agreement: Float[Array, "*grid B"]


_WITHOUT_LAYERS = ("regret_layers", "kl", "agreement")


@as_annotated
def value_bounds(reading: Reading) -> Float[Array, "L B"]:
    """Theorem 2's C of every layer, over all that a row of the continuation can read."""
    return jnp.stack(
        [
            jnp.maximum(
                largest_value(layer.prompt.v, layer.out_proj, layer.prompt.live), largest_value(layer.v, layer.out_proj)
            )
            for layer in reading.layers
        ]
    )


@as_annotated
def mask_losses(
    model: Model,
    params: PyTree[Any],
    reading: Reading,
    keep: Bool[Array, "L B heads T"],
    *,
    positions: Positions = "original",
    largest: Float[Array, "L B"] | None = None,
) -> Losses:
    """What one keep mask of the whole model costs. Jit, vmap and map it over masks as you like.

    Args:
      model, params: the model that was read.
      reading: from `read`.
      keep: the tokens of the prompt that every kv head of every layer keeps, or every query head.
      positions: "compact" moves the keys that are left up to their ranks.
      largest: `value_bounds(reading)`, where it is known.

    Raises:
      ValueError: what is no mask, or one of other layers, prompts, heads or tokens than were read.
    """
    first = reading.layers[0]
    (B, K, T), N = first.prompt.pos.shape, first.q.shape[1]
    fits = [(len(reading.layers), B, heads, T) for heads in dict.fromkeys((K, N))]
    if keep.shape not in fits:
        raise ValueError(
            f"keep has the shape {keep.shape}, but layers, prompts, heads and tokens that were read are "
            f"{' or '.join(map(str, fits))}; give one mask for each"
        )
    largest = value_bounds(reading) if largest is None else largest
    heads = keep.shape[2]
    live = reading.live("kv_head" if heads == reading.layers[0].prompt.pos.shape[1] else "query_head")
    kept = keep.swapaxes(0, 1) & live
    mass = reading.mass(heads)
    best = best_in_hindsight(mass, live, kept, "head")
    N = reading.layers[0].q.shape[1]
    moves = positions != "original"
    bound = lambda mask: 2.0 * largest * N * lost_mass(mass, mask).mean(-1).T * (jnp.nan if moves else 1.0)

    norms = []
    for i, layer in enumerate(reading.layers):
        out = reading.outputs(i, kept[:, i], positions)
        both = distances(layer.out, out, layer.out_proj), distances(layer.out, out)
        norms.append([x.mean(-1) for n in both for x in (n.l1, n.l2)])
    l1, l2, heads_l1, heads_l2 = (jnp.stack(x) for x in zip(*norms, strict=True))

    logits = reading.logits_after(model, params, tuple(kept.swapaxes(0, 1)), positions)
    kl = output_kl(reading.logits, logits)
    same = reading.logits.argmax(-1) == logits.argmax(-1)
    return Losses(
        l1,
        l2,
        heads_l1,
        heads_l2,
        bound(kept),
        bound(best),
        lost_mass(mass, kept).mean(-1).T,
        regret(mass, live, kept, "head").T,
        regret(mass, live, kept, "layer").T,
        regret(mass, live, kept, "model")[:, 0],
        kept.sum(-1).astype(jnp.float32).mean(-1).T,
        jnp.maximum(kl, 0.0).mean(-1),
        same.astype(jnp.float32).mean(-1),
    )


@pytree
class Curves:
    """What `curves` returns: every loss of every policy at every budget, for every prompt.

    `curves["kl"]` is an `Interval` of policies x budgets, layers averaged; `str(curves)` a table of it.

    Attributes:
      losses: `Losses` with axes for policies and budgets in front, averaged over seeds.
      policies: names, those of the oracles last.
      budgets: as they were given.
    """

    losses: Losses
    policies: tuple[str, ...] = static()
    budgets: tuple[int | float | Count, ...] = static()

    def values(self, loss: str) -> np.ndarray:
        """A loss of every policy, budget and prompt, "P M B", averaged over layers.

        Raises:
          ValueError: a loss that there is not.
        """
        names = [f.name for f in dataclasses.fields(Losses)]
        if loss not in names:
            raise ValueError(f"{loss!r} is not one of {names}")
        x = np.asarray(getattr(self.losses, loss), np.float64)
        return x if loss in _WITHOUT_LAYERS else x.mean(-2)

    def __getitem__(self, loss: str) -> Interval:
        return interval(self.values(loss))

    def difference(self, loss: str, policy: str, other: str, confidence: float = 0.95) -> Interval:
        """How much larger a policy's loss is than another's on the same prompt, at every budget.

        Raises:
          ValueError: a policy that there is not.
        """
        for name in (policy, other):
            if name not in self.policies:
                raise ValueError(f"{name!r} is not one of {list(self.policies)}")
        a, b = (self.values(loss)[self.policies.index(name)] for name in (policy, other))
        return interval(a - b, confidence)

    def table(self, loss: str) -> str:
        """Means with half-widths of 95 % intervals, a row a policy."""
        found = self[loss]
        width = max(map(len, self.policies))
        rows = [f"{loss:{width}s} " + " ".join(f"{b!s:>17s}" for b in self.budgets)]
        for name, mean, high in zip(self.policies, found.mean, found.high, strict=True):
            cells = (f"{m:9.4g} ±{h - m:7.2g}" for m, h in zip(mean, high, strict=True))
            rows.append(f"{name:{width}s} " + " ".join(cells))
        return "\n".join(rows)

    def __str__(self) -> str:
        return self.table("kl")


def curves(
    model: Model,
    params: PyTree[Any],
    tokens: Int[Array, "B T"] | np.ndarray,
    continuation: Int[Array, "B F"] | np.ndarray,
    policies: Mapping[str, Method],
    budgets: Sequence[int | float | Count],
    *,
    lengths: Array | np.ndarray | Sequence[int] | None = None,
    key: Array | None = None,
    seeds: int = 1,
    oracles: Sequence[Across] = ("model",),
    at_once: int = 1,
) -> Curves:
    """Measures every policy at every budget: one compiled call, which reads the prompts once.

    A policy evicts once, after the prompt, as in `kvjax.prefill`; the continuation is read with what is left, and all
    of it stays. Losses of a layer are those of the full cache's queries; `kl` and `agreement` are the model's, in which
    later layers feel what earlier ones lost.

    The oracles know the continuation: they keep the tokens to which it pays most attention, as many as all layers of
    uniform budgets have. They are never beaten in `lost`: "head" by no mask with these budgets in every head, "layer"
    by none with their sum in every layer, "model" by none with their sum in the model. (Policies with a set for every
    query head store more, and are not compared.) That makes no promise about output losses, which depend on values too.

    Args:
      model, params: the model.
      tokens: token ids, padded on the left.
      continuation: what follows every prompt, without padding: a question and its answer, or the text itself.
      policies: methods by name, each called with every budget.
      budgets: live tokens a kv head and layer (int), or shares of the prompt (float).
      lengths: the prompts' own lengths, T if None.
      key: one PRNG key, or one a row; seed 0 draws what `kvjax.prefill` draws with it.
      seeds: draws of policies that are random, which are averaged. Others are measured once.
      oracles: which to add.
      at_once: masks that are measured together; more need more memory.

    Returns:
      `Curves`. An equal call compiles nothing new.

    Raises:
      ValueError: before anything runs: what `read`, `make_plan` or a method refuse, and policies that do more than
        keep tokens.
    """
    tokens, lengths = check_prompts(model, tokens, lengths, params=params)
    continuation, _ = check_prompts(model, continuation)
    (B, T), F = tokens.shape, continuation.shape[1]
    if continuation.shape[0] != B:
        raise ValueError(f"{B} prompts, but {continuation.shape[0]} continuations; give one for each")
    seeds, at_once = checked(whole(1, 2**16), "seeds", seeds), checked(whole(1), "at_once", at_once)
    for across in oracles:
        one_of("oracles", across, *HINDSIGHT)
    if taken := sorted({HINDSIGHT[across] for across in oracles} & set(policies)):
        raise ValueError(f"{taken[0]!r} is the name of an oracle; call the policy something else")
    known = lengths if isinstance(lengths, np.ndarray) else None
    check_whole_text(model.config, T, F, lengths)
    grid = make_grid(model.config, policies, budgets, prompt_len=T, max_new_tokens=F, lengths=known)
    counts = tuple(as_budget(b) for b in budgets)
    losses = _curves(
        model,
        params,
        tokens,
        continuation,
        jnp.asarray(lengths),
        row_keys(key, B),
        grid=grid,
        counts=counts,
        seeds=seeds,
        oracles=tuple(oracles),
        at_once=at_once,
    )
    return Curves(losses, (*policies, *(HINDSIGHT[across] for across in oracles)), tuple(budgets))


@functools.partial(jax.jit, static_argnames=("model", "grid", "counts", "seeds", "oracles", "at_once"))
def _curves(
    model: Model,
    params: PyTree[Any],
    tokens: Int[Array, "B T"],
    continuation: Int[Array, "B F"],
    lengths: Int[Array, "B"],
    keys: Array,
    *,
    grid: tuple[tuple[CachePlan, ...], ...],
    counts: tuple[Count, ...],
    seeds: int,
    oracles: tuple[Across, ...],
    at_once: int,
) -> Losses:
    measure = measurements([plan for row in grid for plan in row])
    reading = read_traced(model, params, tokens, continuation, lengths, keys, seeds=seeds, measure=measure)
    masks = [(kind_of(row[0]), keep_all(row, reading)) for row in grid]
    masks += [(Kind("kv_head", "original"), _oracle(reading, counts, across)[:, None]) for across in oracles]
    largest = value_bounds(reading)
    results: dict[int, Losses] = {}
    for kind in {kind: None for kind, _ in masks}:
        rows = [i for i, (k, _) in enumerate(masks) if k == kind]
        shapes = [masks[i][1].shape[:2] for i in rows]  # budgets and seeds
        stacked = jnp.concatenate([masks[i][1].reshape(-1, *masks[i][1].shape[2:]) for i in rows])
        one = functools.partial(mask_losses, model, params, reading, positions=kind.positions, largest=largest)
        found = lax.map(one, stacked, batch_size=None if at_once == 1 else at_once)
        start = 0
        for i, (M, S) in zip(rows, shapes, strict=True):
            part = lambda x, start=start, M=M, S=S: x[start : start + M * S].reshape(M, S, *x.shape[1:]).mean(1)
            results[i] = jax.tree.map(part, found)
            start += M * S
    return jax.tree.map(lambda *x: jnp.stack(x), *(results[i] for i in range(len(masks))))


def _oracle(reading: Reading, counts: tuple[Count, ...], across: Across) -> Bool[Array, "M L B K T"]:
    """The best masks in hindsight at budgets that every head has on average."""
    live = reading.live()
    _, L, K, T = live.shape
    rank = hindsight_rank(reading.mass(K), live, across)
    lengths = np.arange(T + 1)
    heads = {"head": 1, "layer": K, "model": L * K}[across]
    masks = []
    for count in counts:
        budget = jnp.minimum(lookup(np.maximum(count.table(lengths, lengths), 1), reading.lengths), reading.lengths)
        masks.append((live & (rank < heads * budget[:, None, None, None])).swapaxes(0, 1))
    return jnp.stack(masks)
