"""Functions of hidden states that predict the scores of KVzip+ (KVzap, arXiv 2601.07891), fitted to a model.

    found = [examples(model, params, tokens, replay=replay) for tokens in texts]
    hidden, wanted = (np.concatenate(each, axis=1) for each in zip(*found))
    function, losses = fit(hidden, wanted)
    policy = methods.kvzap(0.5, function)

Letters: L layers, M tokens, D width of the model, K kv heads.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from kvjax.contract import Amount, Model, Positive, Size
from kvjax.learning.probes import observed
from kvjax.observe import HiddenStates
from kvjax.pallas_kernels import kinds
from kvjax.run.checks import as_array, check_model, check_prompts
from kvjax.run.reread import Reread
from kvjax.scores.learned import FrozenArrays, HiddenHeads, apply_heads

_LEAST = 1e-8  # the least score, as the logarithm of a smaller one would not end


def examples(
    model: Model, params: PyTree, tokens: Any, *, replay: Reread, lengths: Any = None, sinks: Amount = 4
) -> tuple[Float[np.ndarray, "L M D"], Float[np.ndarray, "L M K"]]:
    """Hidden states of all tokens of some texts in every layer, and the logarithms of their scores in a replay.

    The released training script has one chunk, of texts of 750 to 1,250 tokens, and leaves out what the rows of the
    instruction give.

    Args:
      model, params: the model.
      tokens: token ids of the texts "B T", padded on the left.
      replay: how they are repeated; with `plus=True`, scores are those of KVzip+.
      lengths: their own lengths "B"; T if None.
      sinks: what the first so many tokens score is left out, since they stay in any case.

    Raises:
      ValueError: texts that make no sense for the model, or no token to score.
    """
    check_model(model, params)
    prompts = check_prompts(model, tokens, lengths)
    place = np.arange(prompts.tokens.shape[1])[None] - (prompts.tokens.shape[1] - prompts.lengths[:, None])
    first = max(sinks, replay.prefix)
    counts = place >= first
    if not counts.any():
        raise ValueError(
            f"texts of up to {int(np.max(prompts.lengths))} tokens have none behind the first {first}; give longer ones"
        )
    found = observed(model, params, prompts, HiddenStates(), (replay,))
    each = lambda x: np.stack([np.asarray(y, np.float32)[counts] for y in x])
    scores = each(stats[replay].swapaxes(1, 2) for stats in found)
    return each(stats[HiddenStates()] for stats in found), np.log(np.maximum(scores, _LEAST))


def fit(
    hidden: Float[np.ndarray, "L M D"],
    wanted: Float[np.ndarray, "L M K"],
    *,
    units: Size | None = None,
    steps: Size = 1000,
    batch: Size = 256,
    rate: Positive = 1e-3,
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
    x = as_array("hidden", hidden, np.floating, (None, None, None), "floats, hidden states of every layer")
    y = as_array("wanted", wanted, np.floating, (*x.shape[:2], None), "floats, a score a kv head")
    x, y = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    how = {"units": units, "steps": steps, "batch": batch, "rate": rate}
    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        weights, losses = _fitted(x, y, jax.random.key(0) if key is None else key, **how)
    return HiddenHeads(FrozenArrays(jax.tree.map(np.asarray, weights))), np.asarray(losses)


@functools.partial(jax.jit, static_argnames=("units", "steps", "batch", "rate"))
def _fitted(
    x: Array, y: Array, key: Array, *, units: int | None, steps: int, batch: int, rate: float
) -> tuple[dict[str, Array], Array]:
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


kinds.doors(__name__)
