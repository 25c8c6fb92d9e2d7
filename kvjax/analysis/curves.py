"""Budget curves: what policies lose at every budget, seed and prompt, from one prefill.

Letters: P policies, M budgets, B prompts, L layers, T columns of the prompts, F rows that follow.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from kvjax.analysis.hindsight import Across, best_in_hindsight, hindsight_rank, lost_mass, regret
from kvjax.analysis.intervals import Interval, interval
from kvjax.analysis.losses import distances, largest_value, output_kl
from kvjax.analysis.reading import Left, Reading, read, seed_key
from kvjax.contract import Count, Layout, Model, Policy, PRNGKey, Size, kv_layers, resolve
from kvjax.pallas_kernels.pytree import pytree, static
from kvjax.run.apply import check_reads_all, stored_for_policy, with_policy
from kvjax.run.checks import check_model, check_prompts
from kvjax.run.plan import make_plan, sharing
from kvjax.run.prefill_each import Stored, read_whole, stored_as

HINDSIGHT: Final[dict[Across, str]] = {
    "head": "hindsight (heads)",
    "layer": "hindsight (layers)",
    "model": "hindsight (model)",
}
"""Names of the oracles among the policies of a curve."""

Method = Callable[[Any], Policy]
"""Budget to policy."""


@pytree
class Losses:
    """Losses of an eviction, means over the rows that follow; "*grid" is empty for one.

    Attributes:
      l1, l2: how far a layer's attention output moves, after the output projection, for the queries of the full cache.
      heads_l1, heads_l2: the same before it, heads side by side.
      bound: Theorem 2's upper bound of `l1`. NaN for policies that move kept keys to other positions or change what
        slots hold, which it does not cover.
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


def value_bounds(reading: Reading) -> Float[Array, "L B"]:
    """Theorem 2's C of every layer, over all that a row behind the prompt can read."""
    layers, later = reading.state.layers, reading.later
    prompt = [largest_value(kv.values, x.out_proj, kv.view().live) for kv, x in zip(layers, later, strict=True)]
    return jnp.maximum(jnp.stack(prompt), jnp.stack([largest_value(x.v, x.out_proj) for x in later]))


def mask_losses(
    model: Model, params: PyTree, reading: Reading, keep: Left, *, largest: Float[Array, "L B"] | None = None
) -> Losses:
    """Losses of an eviction of the whole model. Jit, vmap and map it over masks as you like.

    Args:
      model, params: the model that was read.
      reading: from `read`. Keys move up to their ranks if it was stored so.
      keep: the tokens of the prompt that every kv head of every layer keeps, or every query head: a mask
        "L B heads T"; or the layers after a policy (`Reading.after`).
      largest: `value_bounds(reading)`, where it is known.

    Raises:
      ValueError: what `Reading.left` refuses, or layers of which some have slots of kv heads, others of query heads.
    """
    layers, largest = reading.left(keep), value_bounds(reading) if largest is None else largest
    if len(heads := {kv.pos.shape[1] for kv in layers}) > 1:
        raise ValueError(f"layers have slots of {sorted(heads)} heads, and their losses one; measure them apart")
    K, N = heads.pop(), reading.later[0].q.shape[1]
    kept, live, mass = jnp.stack([kv.live for kv in layers], axis=1), reading.live(K), reading.mass(K)
    best = best_in_hindsight(mass, live, kept, "head")
    exact = all(kv.how.positions == "original" and not kv.how.writes and kv.channels is None for kv in layers)
    share = lambda mask: lost_mass(mass, mask).mean(-1).T
    bound = lambda mask: 2.0 * N * largest * share(mask) * (1.0 if exact else jnp.nan)

    norms = []
    for i, (later, kv) in enumerate(zip(reading.later, layers, strict=True)):
        out = reading.outputs(i, kv)
        both = distances(later.out, out, later.out_proj), distances(later.out, out)
        norms.append([x.mean(-1) for n in both for x in (n.l1, n.l2)])

    logits = reading.logits_after(model, params, layers)
    same = reading.logits.argmax(-1) == logits.argmax(-1)
    return Losses(
        *(jnp.stack(x) for x in zip(*norms, strict=True)),
        bound=bound(kept),
        least_bound=bound(best),
        lost=share(kept),
        regret_tokens=regret(mass, live, kept, "head").T,
        regret_heads=regret(mass, live, kept, "layer").T,
        regret_layers=regret(mass, live, kept, "model")[:, 0],
        live=kept.sum(-1).astype(jnp.float32).mean(-1).T,
        kl=jnp.maximum(output_kl(reading.logits, logits), 0.0).mean(-1),
        agreement=same.astype(jnp.float32).mean(-1),
    )


_bounds = jax.jit(value_bounds)
_losses = jax.jit(mask_losses, static_argnames="model")


@pytree
class Curves:
    """Every loss of every policy at every budget, for every prompt (`curves`).

    `curves["kl"]` is an `Interval` of policies x budgets, layers averaged; `str(curves)` a table of it.

    Attributes:
      losses: `Losses` with axes for policies and budgets in front, averaged over seeds.
      policies: names, those of the oracles last.
      budgets: as they were given.
    """

    losses: Losses
    policies: tuple[str, ...] = static()
    budgets: tuple[Count, ...] = static()

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
    params: PyTree,
    tokens: Any,
    continuation: Any,
    policies: Mapping[str, Method],
    budgets: Sequence[Count],
    *,
    lengths: Any = None,
    key: PRNGKey = None,
    seeds: Size = 1,
    oracles: Sequence[Across] = ("model",),
) -> Curves:
    """Measures every policy at every budget: each is applied to the same prefill.

    A policy evicts once, after the prompt, as in `kvjax.prefill`; what follows is read with what is left, and all of it
    stays. Losses of a layer are those of the full cache's queries; `kl` and `agreement` are the model's, in which later
    layers feel what earlier ones lost. Budgets are data: they share programs, as do the losses of all policies.

    The oracles know the continuation: they keep the tokens to which it pays most attention, as many as all layers of
    uniform budgets have. They are never beaten in `lost`: "head" by no mask with these budgets in every head, "layer"
    by none with their sum in every layer, "model" by none with their sum in the model. (Policies with a set for every
    query head store more, and are not compared.) That makes no promise about output losses, which depend on values too.

    Args:
      model, params: the model.
      tokens: token ids "B T", padded on the left.
      continuation: what follows every prompt "B F", without padding: a question and its answer, or the text itself.
      policies: methods by name, each called with every budget.
      budgets: live tokens a kv head and layer (int), or shares of the prompt (float).
      lengths: the prompts' own lengths "B", T if None.
      key: one PRNG key, or one a row; seed 0 draws what `kvjax.prefill` draws with it.
      seeds: draws of policies that are random, which are averaged; each reads the prompts again. What stays the same is
        measured once.
      oracles: which to add.

    Returns:
      `Curves`. An equal call compiles nothing new.

    Raises:
      ValueError: what `read`, `make_plan` or a method refuse, and policies that decide which live tokens a row reads.
    """
    check_model(model, params)
    prompts = check_prompts(model, tokens, lengths)
    names = [HINDSIGHT[across] for across in oracles]
    if taken := sorted(set(names) & set(policies)):
        raise ValueError(f"{taken[0]!r} is the name of an oracle; call the policy something else")
    (B, T), lengths, L = prompts.tokens.shape, np.asarray(prompts.lengths), len(kv_layers(model.config))
    grid = _grid(policies, budgets)
    plan = lambda policy: make_plan(model.config, policy, lengths, T, np.shape(continuation)[-1])
    plans = {name: sharing(map(plan, row)) for name, row in grid.items()}
    kinds: dict[Stored, list[str]] = {Stored((Layout(),) * L): []} if oracles else {}
    for name, row in grid.items():
        kinds.setdefault(stored_as(row[0], L), []).append(name)
    results: dict[str, list[Losses]] = {}
    mean = lambda each: jax.tree.map(lambda *x: np.mean(x, axis=0), *each)
    for stored, members in kinds.items():
        every = [p for name in members for p in grid[name]]
        reading = read(model, params, tokens, continuation, policies=every, lengths=lengths, key=key)
        for name in members:
            _check_only_evicts(name, grid[name][0], reading)
        largest = _bounds(reading)
        measure = lambda keep, r=reading, c=largest: jax.device_get(_losses(model, params, r, keep, largest=c))
        found: dict[str, list[list[Losses]]] = {name: [[] for _ in budgets] for name in members}
        first: dict[tuple[str, int], list[np.ndarray]] = {}
        for seed in range(seeds):
            if seed:
                again = {"policies": every, "stored": stored, "key": seed_key(key, B, seed)}
                _, state, stats = read_whole(model, params, prompts, reading.continuation.shape[1], **again)
                reading = dataclasses.replace(reading, state=state, stats=stats)
            for name in members:
                for m, policy in enumerate(grid[name]):
                    layers = reading.after(policy, plan=plans[name][m])
                    kept = [np.asarray(kv.live) for kv in layers]
                    same = seed and not layers[0].how.writes and all(map(np.array_equal, kept, first[name, m]))
                    first.setdefault((name, m), kept)
                    found[name][m].append(found[name][m][0] if same else measure(layers))
        results |= {name: [mean(each) for each in rows] for name, rows in found.items()}
        if stored == Stored((Layout(),) * L):
            masks = {HINDSIGHT[a]: [_oracle(reading, b, lengths, a) for b in budgets] for a in oracles}
            results |= {name: [measure(keep) for keep in each] for name, each in masks.items()}
    rows = [jax.tree.map(lambda *x: np.stack(x), *results[name]) for name in (*policies, *names)]
    return Curves(jax.tree.map(lambda *x: jnp.stack(x), *rows), (*policies, *names), tuple(budgets))


def _grid(policies: Mapping[str, Method], budgets: Sequence[Count]) -> dict[str, list[Policy]]:
    """The policies of every method at every budget."""
    if not isinstance(policies, Mapping) or not isinstance(budgets, Sequence | np.ndarray):
        raise ValueError(f"policies={policies!r}, budgets={budgets!r}: give methods by name and a list of budgets")
    if not policies or not len(budgets):
        raise ValueError(f"{len(policies)} policies at {len(budgets)} budgets: give at least one of each")
    if wrong := [n for n, method in policies.items() if isinstance(method, Policy) or not callable(method)]:
        method = policies[wrong[0]]
        raise ValueError(f"{wrong[0]!r} is {method!r}; give a method that takes a budget, such as kvjax.methods.snapkv")
    return {name: [method(budget) for budget in budgets] for name, method in policies.items()}


def _check_only_evicts(name: str, policy: Policy, reading: Reading) -> None:
    """Refuses a policy that does something to later rows that the layers after the prompt do not say."""
    so = f"so that no eviction after the prompt has the losses of {name!r}"
    state = with_policy(policy, reading.state, reading.stats)
    jax.eval_shape(lambda s: check_reads_all(stored_for_policy(s), "decode", so), state)


def _oracle(reading: Reading, budget: Count, lengths: np.ndarray, across: Across) -> Bool[Array, "L B K T"]:
    """The best mask in hindsight at a budget that every head has on average."""
    K = reading.state.layers[0].pos.shape[1]
    live = reading.live(K)
    heads = {"head": 1, "layer": K, "model": live.shape[1] * K}[across]
    most = np.minimum(np.maximum(resolve(budget, lengths), 1), lengths).astype(np.int32)
    rank = hindsight_rank(reading.mass(K), live, across)
    return (live & (rank < jnp.asarray(heads * most)[:, None, None, None])).swapaxes(0, 1)
