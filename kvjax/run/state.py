"""The state of a run between calls: the cache of every layer, and the length of each sequence.

Letters: B batch, T new tokens, L layers, V vocabulary.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, PyTree

from kvjax.compose.evict import evicts
from kvjax.contract import (
    EMPTY,
    LAST,
    Config,
    Context,
    Ids,
    LayerParams,
    Phase,
    Policy,
    PRNGKey,
    Size,
    Stats,
    kv_layers,
)
from kvjax.contract.checks import whole
from kvjax.decide.rewrite import Match
from kvjax.pallas_kernels.pytree import pytree, static
from kvjax.run.plan import Plan, fitted, own_params
from kvjax.storage import Storage, empty


class Prompts(NamedTuple):
    """Prompts that have been checked: ids padded on the left, and the length of each row."""

    tokens: Int[np.ndarray, "B T"] | Int[Array, "B T"]
    lengths: Int[np.ndarray, "B"] | Int[Array, "B"]


@pytree
class AttnStats:
    """Statistics of the tokens just read, in every layer.

    Attributes:
      layers: for each layer, the arrays that its observations gave.
      tokens: the ids that were read.
      phase: whether a prompt was read or a token decoded.
    """

    layers: tuple[Stats, ...]
    tokens: Int[Array, "B T"] | None = None
    phase: Phase = static(default="prefill")

    def of(self, layer: int) -> Stats:
        """The arrays of one layer, by observation."""
        return self.layers[layer]


@pytree
class State:
    """The cache of a whole model, and where generation stands.

    Attributes:
      layers: the keys and values of every layer that holds some.
      length: tokens that each sequence has read, evicted ones included.
      prompt_length: tokens of each prompt.
      keys: one PRNG key a sequence.
      max_new_tokens: tokens that each sequence may read behind its prompt.
      hparams: the policy's budgets and other numbers, one tree a layer, of arrays "B ...".
      params: the policy's learned parameters, one tree a layer, the same for all sequences; () where there are none.
      plan: the sizes that programs are compiled for.
      ready: whether the prompt has been read to its end, so that tokens can be decoded.
      steady: whether all that was read has met an eviction. After a `forward` without one the next evictions bring
        heads back to their budgets, in programs of their own, until a policy is applied: `policy(state, stats)`.
      others: of every layer that holds no keys and values what it has instead, a tree of arrays "B ...".
    """

    layers: tuple[Storage, ...]
    length: Int[Array, "B"]
    prompt_length: Int[Array, "B"]
    keys: Key[Array, "B"]
    max_new_tokens: Int[Array, "B"]
    hparams: tuple[PyTree, ...]
    params: tuple[PyTree, ...] = ()
    plan: Plan = static(default=None)
    ready: bool = static(default=False)
    steady: bool = static(default=True)
    others: tuple[PyTree, ...] = ()

    def __getitem__(self, rows: Ids | slice) -> "State":
        """The sequences `rows`, in that order; one may be taken several times (beams, several questions).

        Raises:
          ValueError: a row that there is not. Where rows are traced, its logits become NaN.
        """
        B = len(self.length)
        if not isinstance(rows, jax.core.Tracer | slice):
            rows = np.asarray(rows)
            if not np.isin(rows, np.arange(-B, B)).all():
                raise ValueError(f"rows={rows.tolist()} are taken of {B} sequences; give 0 to {B - 1}")
        taken = jax.tree.map(lambda x: x[rows], dataclasses.replace(self, params=()))
        if isinstance(rows, jax.core.Tracer):  # what may not read any token has no logits
            taken = dataclasses.replace(
                taken, max_new_tokens=jnp.where((rows >= -B) & (rows < B), taken.max_new_tokens, -LAST)
            )
        return dataclasses.replace(taken, params=self.params)

    def applied(self, policy: Policy, stats: AttnStats, plan: Plan | None = None) -> "State":
        """Updates the state by a policy: `policy(state, stats)`.

        Args:
          policy: any policy, that of the state or another one.
          stats: what `forward` observed.
          plan: of a whole prompt, sizes of a larger budget, whose slots and programs are used.

        Raises:
          ValueError: something that the policy wants to see was not observed; a prompt that was read in a way that the
            policy cannot go on from; more tokens than it asked slots for, scores that are not numbers.
        """
        if not isinstance(stats, AttnStats):
            raise ValueError(f"stats is a {type(stats).__name__}, not an AttnStats, such as kvjax.forward gives")
        from kvjax.run import apply  # which is built on this class

        after, prompt = apply.with_policy(policy, self, stats, plan), not self.ready
        after = apply.stored_for_policy(after) if prompt and after.plan.layers != self.plan.layers else after
        after, lost = apply.evict_layers(dataclasses.replace(after, steady=False), stats)
        if not isinstance(lost[0], jax.core.Tracer):
            apply.check_lost(after, lost)
        return apply.own_arrays(dataclasses.replace(after, steady=True))

    def fit(self) -> "State":
        """The state with the slots alone that its tokens need, and those that may still come. Outside of `jit`.

        Before a prompt is read, a layer has slots for all that it might keep. Where layers compete most of them stay
        empty, and only the prompt tells which. Sizes are rounded up, by a quarter or 15 at most, so that prompts
        share programs. What is held, and what follows, is the same.

        Raises:
          ValueError: a traced state, or one whose prompt has not been read to its end.
        """
        if isinstance(self.length, jax.core.Tracer):
            raise ValueError("the sizes of a traced state are fixed; fit it outside of jit")
        if not self.ready:
            raise ValueError("the state holds no prompt that was read to its end; fit what kvjax.prefill returns")
        from kvjax.run import apply

        plan, layers = fitted(self.plan, self.num_needed.max(0)), list(self.layers)
        for i, (policy, n) in enumerate(zip(plan.layers, plan.capacities, strict=True)):
            if n < self.plan.capacities[i]:
                ctx = self.context(i, "prefill")
                layers[i], _ = apply.compacted(layers[i], ctx, policy=policy, capacity=n, ends=True)
        return apply.own_arrays(dataclasses.replace(self, layers=tuple(layers), plan=plan))

    @property
    def num_needed(self) -> Int[np.ndarray, "B L"]:
        """Slots of a head, or of all heads in a pool, that each layer needs for its tokens and for those to come.

        They are no more than planned. Outside of `jit`.
        """
        left, found = self.max_new_tokens - (self.length - self.prompt_length), []
        for kv, policy, most in zip(self.layers, self.plan.layers, self.plan.capacities, strict=True):
            live = np.asarray(kv.num_live + left[:, None])
            found.append(np.minimum(live.sum(-1) if policy.layout.pool else live.max(-1), most))
        return np.stack(found, axis=1)

    def pages(self, size: Size) -> Int[Array, "B L"]:
        """Pages of `size` positions that an engine with block tables holds in each layer.

        One table serves all kv heads, so a page is free when no head has a token of it left. Without eviction a layer
        has `ceil(length / size)` pages.

        Raises:
          ValueError: a size that is no positive whole number.
        """
        whole("size", size)
        found = []
        for kv in self.layers:
            page = jnp.where((pos := kv.head_pos.reshape(len(kv.pos), -1)) == EMPTY, LAST, pos // size)
            ordered = jnp.sort(page, axis=-1)
            new = jnp.pad(ordered[:, 1:] != ordered[:, :-1], ((0, 0), (1, 0)), constant_values=True)
            found.append((new & (ordered < LAST)).sum(-1, dtype=jnp.int32))
        return jnp.stack(found, axis=1)

    @property
    def num_live(self) -> Int[Array, "B L K"]:
        """Tokens that each kv head holds; 0 for those that a layer lacks where another has more."""
        each = [kv.num_live for kv in self.layers]
        most = max(x.shape[1] for x in each)
        return jnp.stack([jnp.pad(x, ((0, 0), (0, most - x.shape[1]))) for x in each], axis=1)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(kv.nbytes for kv in self.layers) + sum(x.nbytes for x in jax.tree.leaves(self.others))

    def context(self, layer: int, phase: Phase, tokens: Int[Array, "B T"] | None = None) -> Context:
        """The `Context` of a layer's policy, while these token ids are read."""
        info, policy = self.plan.infos[layer], self.plan.layers[layer]
        width = info.prompt_len if phase == "prefill" else self.plan.decoding.infos[layer].prompt_len
        slots = info.prompt_len + 1 if policy.layout.pool else self.plan.capacities[layer]
        return Context(
            self.length,
            self.prompt_length,
            self.keys,
            jnp.int32(layer),
            self.max_new_tokens,
            self.hparams[layer],
            self.params[layer] if self.params else (),
            tokens,
            phase=phase,
            width=width,
            capacity=slots if policy.writes else 0,
            window=info.window,
            steady=self.steady,
        )


def checked_key(key: Any) -> Key[Array, "*B"]:
    """PRNG keys of a kind whose draws for a row do not depend on other rows."""
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(jnp.asarray(key))
    if str(jax.random.key_impl(key)) != "threefry2x32":  # draws of other generators depend on the rows of a vmap
        key = jax.random.wrap_key_data(jax.random.key_data(key)[..., :2], impl="threefry2x32")
    return key


_first_key = lambda: jax.random.key(0, impl="threefry2x32")
_folded = jax.jit(lambda key, n: jax.vmap(jax.random.fold_in, (None, 0))(_first_key() if key is None else key, n))
_copied = jax.jit(lambda numbers: jax.tree.map(jnp.copy, numbers))  # in one call, as there are many


def row_keys(key: PRNGKey, batch: int) -> Key[Array, "B"]:
    """One PRNG key a sequence, from one for the batch, one a sequence, or None."""
    key = None if key is None else checked_key(key)
    if key is not None and key.shape not in ((), (batch,)):
        raise ValueError(f"key has shape {key.shape}, but there are {batch} sequences; give one key, or one a sequence")
    return key if key is not None and key.ndim else _folded(key, np.arange(batch, dtype=np.int32))


def empty_state(
    config: Config,
    policy: Policy,
    plan: Plan,
    hparams: tuple[PyTree, ...],
    lengths: Int[np.ndarray, "B"] | Int[Array, "B"],
    max_new_tokens: int,
    *,
    keys: Key[Array, "B"],
    slots: bool = False,
    policy_params: LayerParams = None,
) -> State:
    """A state that has read nothing, by the plan and the `hparams` that `planned` gives for these prompts.

    With `slots`, layers have their planned slots already, as between blocks of a prompt.
    """
    B, given = lengths.shape[0], own_params(policy, plan.infos, () if policy_params is None else policy_params)
    for i, own in enumerate(plan.layers):
        where = own.layout.positions
        if where != "original" and any(isinstance(p.rewrite, Match) for p in evicts(own)):
            raise ValueError(
                f'layer {i} wants tokens at positions="{where}", but Match fits weights and values to tokens that stay '
                'where they are; use "original", or leave out the rewrite'
            )
    each = zip(plan.layers, plan.infos, plan.capacities, strict=True)
    layers = tuple(empty(info, policy, B, config.dtype, n if slots else 0) for policy, info, n in each)
    xp: Any = jnp if isinstance(lengths, jax.core.Tracer) else np  # which compiles nothing
    lengths, most = xp.asarray(lengths, xp.int32), xp.full((B,), max_new_tokens, xp.int32)
    own = lengths, keys, most, given  # copies, so that the state may be donated without the caller's arrays
    lengths, keys, most, given = jax.device_put(own, may_alias=False)
    held = kv_layers(config)
    others = tuple(config.own_state(i, B) for i in range(config.num_layers) if i not in held)  # pyrefly: ignore
    how = {"plan": plan, "others": others}
    return State(layers, jnp.zeros_like(lengths), lengths, keys, most, _copied(hparams), given, **how)
