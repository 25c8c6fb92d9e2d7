"""Bytes that a run takes, before it runs.

Those of the state are exact: the drivers' own code gives the shapes of its arrays (`jax.eval_shape`). What reading the
prompt takes beside it is an estimate, whose terms are named.

Letters: B batch, T new tokens, N query heads, K kv heads, H head_dim, D embed_dim.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from kvjax.contract import Amount, Config, LayerInfo, Policy, Size, Stats, kv_sources
from kvjax.pallas_kernels.xla import head_block_size
from kvjax.run.checks import check_block
from kvjax.run.layers import Attend
from kvjax.run.plan import Plan, infos_of, init_policy_params, planned
from kvjax.run.reread import after_replay, block_rows
from kvjax.run.state import AttnStats, State, empty_state, row_keys
from kvjax.storage import Storage

_UNITS = "B", "KiB", "MiB", "GiB"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a planned run. Printed as text, it is a table.

    Attributes:
      run: what was planned: sequences, tokens, dtype.
      keys_values, positions: of all slots, dead ones included; with the positions, which heads have a fault.
      remembered: what the policy remembers of slots and heads.
      weights: log weights of slots, the channels that thin keys have left, the ends of heads in a pool.
      others: states of layers without keys and values.
      sequences: lengths, keys of draws, the policy's budgets and learned parameters.
      cache: of the prompt's rows in one layer; in all layers, with what is observed, where one decision is made for
        all of them, or where the prompt is read again.
      attention: the residual stream, queries, what is observed, and a block of logits and probabilities.
      feed_forward: the residual stream and three arrays as wide as the network. It follows attention.
      logits: those of the last token.
      full: those of the state that holds every token, prompt and new ones.
    """

    run: str
    keys_values: int
    positions: int
    remembered: int
    weights: int
    others: int
    sequences: int
    cache: int
    attention: int
    feed_forward: int
    logits: int
    full: int

    @property
    def layers(self) -> int:
        """Bytes of all layers after the prompt: `State.nbytes`."""
        return self.keys_values + self.positions + self.remembered + self.weights + self.others

    @property
    def state(self) -> int:
        """Bytes of all arrays that a decode step takes and returns."""
        return self.layers + self.sequences

    @property
    def reading(self) -> int:
        """Estimated bytes of reading the prompt, beside parameters and state."""
        return self.cache + max(self.attention, self.feed_forward) + self.logits

    @property
    def peak(self) -> int:
        """Estimated bytes of the state and of reading the prompt, without parameters."""
        return self.state + self.reading

    def __str__(self) -> str:
        names = {"keys and values": "keys_values", "positions": "positions", "remembered by the policy": "remembered"}
        names |= {"weights, channels, ends": "weights", "layers without keys and values": "others"}
        names |= {"lengths, keys, budgets": "sequences"}
        rows = [(name, shown(size)) for name, of in names.items() if (size := getattr(self, of))]
        rows.append(("state", f"{shown(self.state)}, {self.state / self.full:.1%} of {shown(self.full)} in full"))
        parts = ("cache", "attention", "feed_forward", "logits")
        rows += [(f"reading: {name.replace('_', '-')}, about", shown(getattr(self, name))) for name in parts]
        rows.append(("peak while reading, about", shown(self.peak)))
        first = max(len(name) for name, _ in rows)
        return "\n".join([self.run, *(f"{name:{first}}  {size}" for name, size in rows)])


def shown(size: int) -> str:
    """A number of bytes in the unit that suits it, up to GiB."""
    power = min((max(size, 1).bit_length() - 1) // 10, 3)
    x = size / 1024**power
    return f"{x:.0f} {_UNITS[power]}" if power == 0 or x >= 99.95 else f"{x:.3g} {_UNITS[power]}"


def plan_memory(
    config: Config,
    policy: Policy,
    *,
    batch: Size = 1,
    prompt_len: Size,
    max_new_tokens: Amount,
    block: Size | None = None,
) -> Memory:
    """Bytes that `prefill` and the decode steps behind it take: `print(plan_memory(...))` is a table.

    Those of the state are exact, for prompts of `prompt_len` tokens each. What reading takes beside it is an estimate,
    which counts neither parameters, nor what XLA copies, nor what it overlaps.

    Args:
      config: the model's configuration.
      policy: the policy.
      batch: sequences.
      prompt_len: tokens of each prompt.
      max_new_tokens: tokens that may follow.
      block: tokens of a block, where the prompt is read in blocks (`prefill`).

    Raises:
      ValueError: no sequence, an empty prompt, sizes or blocks that the policy cannot work with.
    """
    B, T, new = batch, prompt_len, max_new_tokens
    lengths = np.full(B, T, np.int32)
    (plan, hparams), whole_plan = (planned(p, infos_of(config, p, T, new), lengths) for p in (policy, Policy()))
    block = check_block(plan, block, T)
    state, grown, seen = read_shapes(config, policy, plan, hparams, lengths, block)
    full = read_shapes(config, Policy(), *whole_plan, lengths)[0]
    layers = cast(tuple[Any, ...], state.layers)  # a `Layer` or a `Pool` each
    return Memory(
        run=f"{B} x ({T:,} + {new:,}) tokens, {jnp.dtype(config.dtype).name}",
        keys_values=_bytes([(kv.k, kv.v) for kv in layers]),
        positions=_bytes([(kv.pos, kv.fault) for kv in layers]),
        remembered=_bytes([kv.memory for kv in layers]),
        weights=_bytes([(kv.log_weight, kv.channels, getattr(kv, "ends", None)) for kv in layers]),
        others=_bytes(state.others),
        sequences=_bytes(dataclasses.replace(state, layers=(), others=())),
        full=_bytes(full),
        **_reading(config, plan, grown, seen, B, block or T),
    )


def _bytes(x: PyTree) -> int:
    """Bytes of all arrays in it."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(x))


def read_shapes(
    config: Config,
    policy: Policy,
    plan: Plan,
    hparams: tuple[PyTree, ...],
    lengths: Int[np.ndarray, "B"],
    block: int | None = None,
) -> tuple[State, tuple[Storage, ...], tuple[Stats, ...]]:
    """Shapes: the state after prompts, the layers with all rows of the last pass, and what was observed of each."""
    width, steps = plan.infos[0].prompt_len, plan.infos[0].max_new_tokens
    B, T, D = len(lengths), block or width, getattr(config, "embed_dim", 0)

    def read() -> tuple[State, tuple[Storage, ...], tuple[Stats, ...]]:
        keys = row_keys(None, B)
        learned = init_policy_params(config, policy, keys[0], width=width, max_new_tokens=steps)
        how = {"keys": keys, "policy_params": learned if jax.tree.leaves(learned) else None}
        state = empty_state(config, policy, plan, hparams, lengths, steps, slots=block is not None, **how)
        pos = jnp.zeros((B, T), jnp.int32)
        zeros = lambda *shape: jnp.zeros(shape, config.dtype)
        each = []
        for i, (own, kv) in enumerate(zip(plan.layers, state.layers, strict=True)):
            attend = Attend(state.context(i, "prefill", pos), pos, own, own.observe("prefill"), evict=False, gives=True)
            info = plan.infos[i]
            N, K, H, V = info.num_query_heads, info.num_kv_heads, info.head_dim, info.value_dim
            rows = zeros(B, N, T, H), zeros(B, K, T, H), zeros(B, K, T, V)
            each.append(_attended(attend, kv, *rows, zeros(N, V, D), zeros(B, T, D)))
        grown, seen = zip(*each, strict=True)
        state = dataclasses.replace(state, layers=grown)
        return after_replay(state, AttnStats(seen, pos)), grown, seen

    return jax.eval_shape(read)


@jax.jit
def _attended(
    attend: Attend, kv: Storage, q: Array, k: Array, v: Array, out_proj: Array, hidden: Array
) -> tuple[Storage, Stats]:
    """A layer that has stored new rows, and what was observed of them."""
    how = {"layer": 0, "rotate": lambda x, _: x, "out_proj": out_proj, "hidden": hidden}
    _, kv, (found, _) = attend(kv, q, k, v, **how)
    return kv, found


def _reading(
    config: Config, plan: Plan, grown: tuple[Storage, ...], seen: tuple[Stats, ...], B: int, rows: int
) -> dict[str, int]:
    """The bytes of `Memory` that reading takes, those of the pass and the layer that takes most."""
    N, size = config.num_query_heads, jnp.dtype(config.dtype).itemsize
    D, M = getattr(config, "embed_dim", 0), getattr(config, "mlp_dim", 0)

    def of_rows(rows: int, slots: int, info: LayerInfo, cache: int, observed: int, scratch: int = 0) -> dict[str, int]:
        heads = info.num_kv_heads
        at_once, sets = head_block_size(B * heads, N // heads, rows, slots)
        logits = 2 * 4 * at_once * sets * (N // heads) * slots
        width = lambda n: B * rows * (2 * D + n) * size
        attention = width(2 * N * info.head_dim) + observed + max(logits, scratch)
        return {"cache": cache, "attention": attention, "feed_forward": width(3 * M)}

    together = _bytes((grown, seen)) if plan.policy.joint or plan.again or kv_sources(config) else 0
    passes = []
    for kv, found, info in zip(grown, seen, plan.infos, strict=True):
        slots, cache = kv.pos.shape[-1], _bytes(kv)
        passes.append(of_rows(rows, slots, info, max(cache, together), _bytes(found)))
        for how in plan.again:
            R = how.most(info.prompt_len)
            keys = how.sinks + how.size(info.prompt_len) + R
            scratch = 2 * 4 * B * N * block_rows(R, B * N, keys) * keys
            more = _bytes([kv.pos for kv in grown]) + cache * (slots + R) // slots
            passes.append(of_rows(R, slots + R, info, together + more, 0, scratch))
    total = lambda x: x["cache"] + max(x["attention"], x["feed_forward"])
    return max(passes, key=total) | {"logits": 4 * B * config.vocab_size}
