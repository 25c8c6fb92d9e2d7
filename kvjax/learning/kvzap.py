"""Functions of hidden states that say what KVzip+ would score (KVzap, arXiv 2601.07891), fitted to a model.

found = [examples(model, params, tokens, replay=replay) for tokens in texts]
hidden, wanted = (np.concatenate(each, axis=1) for each in zip(*found))
function, losses = fit(hidden, wanted)
policy = methods.kvzap(0.5, function)
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from kvjax.cache.context import Phase
from kvjax.drivers.replay import read_again
from kvjax.drivers.requests import Model, check_prompts
from kvjax.drivers.steps import forward, init_state
from kvjax.eviction import Evict
from kvjax.pallas_kernels.values import check_array, checked, number, optional, whole
from kvjax.plan import CachePlan, make_plan
from kvjax.scoring.learned import FrozenArrays
from kvjax.scoring.predicted import HiddenHeads, HiddenStates, apply_heads
from kvjax.scoring.replay import Replay
from kvjax.scoring.replayed import Replayed, ReplayedAttention
from kvjax.scoring.stats import Measurement

_LEAST = 1e-8  # what scores below count as, as their logarithm would not end


@dataclasses.dataclass(frozen=True)
class _Watched(Replayed):
    """The score of KVzip+, which looks at hidden states too."""

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Score`."""
        return (*super().observe(phase), HiddenStates()) if phase == "prefill" else ()


def examples(
    model: Model,
    params: PyTree[Any],
    tokens: Array | np.ndarray | Sequence[Sequence[int]],
    *,
    replay: Replay,
    lengths: Array | np.ndarray | Sequence[int] | None = None,
    sinks: int = 4,
) -> tuple[Float[np.ndarray, "L M D"], Float[np.ndarray, "L M K"]]:
    """Hidden states of all tokens of some texts in every layer, and the logarithms of their KVzip+ scores.

    Scores are those of `kvjax.methods.kvzip(..., plus=True)`. The released training script has one chunk, of texts of
    750 to 1,250 tokens, and leaves out what the rows of the instruction give.

    Args:
      model, params: the model.
      tokens: token ids of the texts, padded on the left.
      replay: how they are repeated.
      lengths: their own lengths, T if None.
      sinks: as in `kvjax.methods.kvzip`; what the first so many score is left out, since they stay in any case.

    Raises:
      ValueError: texts that make no sense for the model, or no token to score.
    """
    tokens, lengths = check_prompts(model, tokens, lengths, params=params)
    measured = ReplayedAttention(replay, sinks, weighed=True)
    plan = make_plan(model.config, Evict(_Watched(measured), 1.0), prompt_len=tokens.shape[1], max_new_tokens=0)
    hidden, scores = _measured(model, params, tokens, jnp.asarray(lengths), plan=plan)
    place = np.arange(tokens.shape[1])[None] - (tokens.shape[1] - np.asarray(lengths)[:, None])
    counts = place >= max(sinks, replay.skip)
    if not counts.any():
        raise ValueError(
            f"texts of up to {int(np.max(lengths))} tokens have none behind the first {max(sinks, replay.skip)}; give "
            "longer ones"
        )
    wanted = np.log(np.maximum(np.asarray(scores).swapaxes(2, 3), _LEAST))
    return np.asarray(hidden)[:, counts], wanted[:, counts]


@functools.partial(jax.jit, static_argnames=("model", "plan"))
def _measured(model, params, tokens, lengths, *, plan: CachePlan) -> tuple[Array, Array]:
    """Hidden states "L B T D" and scores "L B K T"."""
    state = init_state(plan, lengths, dtype=model.config.dtype)
    _, state, stats = forward(model, params, tokens, state, valid=lengths)
    stats = read_again(model, params, tokens, state, stats)
    (replayed,) = (m for m in plan.specs[0].prompt if m.again is not None)
    each = lambda m: jnp.stack([layer[m].astype(jnp.float32) for layer in stats.layers])
    return each(HiddenStates()), each(replayed)


def fit(
    hidden: Float[np.ndarray, "L M D"],
    wanted: Float[np.ndarray, "L M K"],
    *,
    units: int | None = None,
    steps: int = 1000,
    batch: int = 256,
    rate: float = 1e-3,
    key: Array | None = None,
) -> tuple[HiddenHeads, Float[np.ndarray, "steps"]]:
    """Fits a function of hidden states by the mean square error of the logarithms, with Adam under a cosine schedule.

    The released script solves for linear functions (ridge regression), and fits 512 units with AdamW.

    Args:
      hidden, wanted: what `examples` gives, of one text or several.
      units: of the hidden layer; None for a linear function.
      steps: of the optimiser.
      batch: tokens of a step, drawn anew for each.
      rate: the highest learning rate.
      key: one PRNG key, of the draws and the first weights.

    Returns:
      The function, and the mean square error at every step.

    Raises:
      ValueError: arrays of other tokens or layers, and numbers that make no sense.
    """
    check_array("hidden", hidden, "layers", "tokens", "width")
    check_array("wanted", wanted, "layers", "tokens", "kv heads", shape=(*hidden.shape[:2], np.shape(wanted)[-1]))
    units, steps = checked(optional(whole(1)), "units", units), checked(whole(1), "steps", steps)
    batch, rate = checked(whole(1), "batch", batch), checked(number("(0, inf)"), "rate", rate)
    key = jax.random.key(0) if key is None else key
    x, y = jnp.asarray(hidden, jnp.float32), jnp.asarray(wanted, jnp.float32)
    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        weights, losses = _fitted(x, y, key, units=units, steps=steps, batch=batch, rate=rate)
    return HiddenHeads(FrozenArrays(jax.tree.map(np.asarray, weights))), np.asarray(losses)


@functools.partial(jax.jit, static_argnames=("units", "steps", "batch", "rate"))
def _fitted(x, y, key, *, units, steps, batch, rate) -> tuple[dict[str, Array], Array]:
    (L, M, D), K = x.shape, y.shape[-1]
    first, second, draws = jax.random.split(key, 3)
    weights = {"out": jnp.zeros((L, D, K)), "out_bias": y.mean(1)}
    if units is not None:
        weights["in"] = jax.random.normal(first, (L, D, units)) * D**-0.5
        weights["in_bias"] = jnp.zeros((L, units))
        weights["out"] = jax.random.normal(second, (L, units, K)) * (0.1 * units**-0.5)
    optimiser = optax.adam(optax.cosine_decay_schedule(rate, steps))

    def loss(weights: dict[str, Array], chosen: Int[Array, "batch"]) -> Array:
        said = jnp.stack([apply_heads(weights, x[i][None, chosen], i)[0] for i in range(L)])
        return jnp.square(said - y[:, chosen]).mean()

    def step(carry: Any, draw: Array) -> tuple[Any, Array]:
        weights, state = carry
        chosen = jax.random.randint(draw, (batch,), 0, M)
        value, slope = jax.value_and_grad(loss)(weights, chosen)
        change, state = optimiser.update(slope, state, weights)
        return (optax.apply_updates(weights, change), state), value

    (weights, _), losses = lax.scan(step, (weights, optimiser.init(weights)), jax.random.split(draws, steps))
    return weights, losses
