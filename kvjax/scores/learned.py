"""Learned scores: functions of a token's key, value and statistics, or of its hidden state."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.contract import FrozenArrays, LayerInfo, Observation, Odd, Phase, Prompts, Score, Size, Slots, Value, place
from kvjax.observe import Hidden, OfLayer, Rows
from kvjax.scores.blends import pool_in_order
from kvjax.scores.keys import Given

NUM_STATISTICS = 6  # numbers of a token that `Learned` shows its function beside the key and the value


# ----------------------------------------------------------------------------------------- of keys, values, statistics


class Learned(Score):
    """A learned function of a token's key, value and statistics after the prompt. Generated tokens have no score.

    Attributes:
      function: `(features "B K S F", layer) -> "B K S"`, larger = keep, hashed by its weights;
        `kvjax.models.scorer.TrainedHead` is one.
      rows: the prompt's last rows, whose votes are a feature.
      kernel: width of the max-pooled votes, another feature; odd.
    """

    function: OfLayer
    rows: Size = 16
    kernel: Odd = 7

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return (Rows(self.rows), Rows()) if phase == "prefill" else ()

    def hparams(self, info: LayerInfo, lengths: Prompts, budget: Prompts) -> PyTree:
        shape = 1, info.num_kv_heads, 1, info.head_dim + info.value_dim + NUM_STATISTICS
        check_function(self.function, shape, info, shape[:-1])
        return ()

    def features(self, slots: Slots) -> Float[Array, "B K S F"]:
        """F = H + V + 6 numbers of every slot, 0 for dead ones: 2 H + 6 but where values are channels of keys.

        The key as rows read it and the value; then logarithms of the votes, of the pooled votes, of the mean attention
        of all rows since insertion, and of the value's norm; how far back the token is, as a share of the prompt; 1.
        """
        kv, stats = slots.kv, slots.stats
        length = slots.ctx.length[:, None, None].astype(jnp.float32)
        votes = stats[Rows(self.rows)].astype(jnp.float32)
        pooled = pool_in_order(votes, kv.pos, slots.candidates, "max", self.kernel)
        back = length - kv.pos.astype(jnp.float32)
        mean = stats[Rows()].astype(jnp.float32) / jnp.maximum(back, 1.0)
        k, v = kv.k.astype(jnp.float32), kv.v.astype(jnp.float32)
        log = lambda x: jnp.log(jnp.maximum(x, 1e-6))
        norm = jnp.sqrt(jnp.square(v).sum(-1))
        numbers = [log(votes), log(pooled), log(mean), log(norm), back / length, jnp.ones_like(votes)]
        found = jnp.concatenate([k, v, jnp.stack(numbers, axis=-1)], axis=-1)
        return jnp.where(kv.live[..., None], found, 0.0)

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        return self.function(self.features(slots), slots.ctx.layer)


def check_function(function: OfLayer, shape: tuple[int, ...], info: LayerInfo, wanted: tuple[int, ...]) -> None:
    """Refuses a learned function that was made for other layers, heads or widths than a model's (host).

    Args:
      function: it.
      shape: of its argument for one token.
      info: the layer.
      wanted: the shape of its result.

    Raises:
      ValueError: it gives another shape; what the function itself refuses.
    """
    found = jax.eval_shape(lambda x: function(x, info.layer), jax.ShapeDtypeStruct(shape, jnp.float32)).shape
    if found != wanted:
        raise ValueError(
            f"{place(function)} gives numbers of shape {found} for one token of layer {info.layer}, not "
            f"{wanted}; fit a function to this model"
        )


# ------------------------------------------------------------------------------------------------ of hidden states

_LINEAR, _NETWORK = ("out", "out_bias"), ("in", "in_bias", "out", "out_bias")


def apply_heads(
    weights: Mapping[str, Array | np.ndarray], hidden: Float[Array, "B T D"], layer: int | Int[Array, ""]
) -> Float[Array, "B T K"]:
    """One number for every kv head of a layer: a linear function of hidden states, or of a hidden layer of GELUs.

    Args:
      weights: "out" and "out_bias" of all layers, and "in" and "in_bias" where there is a hidden layer.
      hidden: what the layer's queries, keys and values are projections of.
      layer: whose weights; it may be traced.
    """
    own = {name: jnp.asarray(x)[layer] for name, x in weights.items()}
    x = hidden.astype(own["out"].dtype)
    if "in" in own:
        x = jax.nn.gelu(x @ own["in"] + own["in_bias"][None, None], approximate=False)
    return x @ own["out"] + own["out_bias"][None, None]


class HiddenHeads(Value):
    """A function of hidden states for every layer, compared by its weights (KVzap, arXiv 2601.07891).

    Attributes:
      weights: of all layers: "out" (L, D, K) and "out_bias" (L, K) of a linear function; or "in" (L, D, M), "in_bias"
        (L, M), "out" (L, M, K) and "out_bias" (L, K) of one with a hidden layer. Any mapping of arrays.
    """

    weights: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        if not isinstance(self.weights, Mapping) or sorted(self.weights) not in (sorted(_LINEAR), sorted(_NETWORK)):
            names = sorted(self.weights) if isinstance(self.weights, Mapping) else type(self.weights).__name__
            raise ValueError(f"HiddenHeads has the weights {names}; give {_LINEAR} or {_NETWORK}")
        frozen = self.weights if isinstance(self.weights, FrozenArrays) else FrozenArrays(self.weights)
        object.__setattr__(self, "weights", frozen)
        shapes = {name: x.shape for name, x in frozen.items()}
        fits = all(len(shapes[n]) == 3 and shapes[f"{n}_bias"] == shapes[n][::2] for n in ("in", "out") if n in frozen)
        if not fits or ("in" in frozen and shapes["in"][::2] != shapes["out"][:2]):
            raise ValueError(f"HiddenHeads has weights of the shapes {shapes}, which do not follow one another")
        for name, x in frozen.items():
            if x.dtype.kind != "f" or not np.isfinite(x).all():
                raise ValueError(f"HiddenHeads has weights {name!r} of {x.dtype} that are no finite floats")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(layers, width of hidden states, kv heads) that it is for."""
        first, last = self.weights.get("in", self.weights["out"]), self.weights["out"]
        return first.shape[0], first.shape[1], last.shape[2]

    def __call__(self, hidden: Float[Array, "B T D"], layer: int | Int[Array, ""]) -> Float[Array, "B T K"]:
        """A number for every token and kv head of the layer.

        Raises:
          ValueError: another width of hidden states, or a known layer that it has no weights for.
        """
        layers, width, _ = self.sizes
        if hidden.shape[-1] != width or (isinstance(layer, int) and layer >= layers):
            raise ValueError(
                f"the function is for {layers} layers and hidden states of {width} numbers, but layer {layer} has "
                f"{hidden.shape[-1]}; fit one to this model"
            )
        return apply_heads(self.weights, hidden, layer)


class SinkGates(Value):
    r"""Gates of low rank with learned sinks, a function of hidden states (Fast KVzip, arXiv 2601.17668).

    $S_j = \frac1G \sum_g 1 / (1 + \sum_s \exp((q_g k_s - q_g k) / \sqrt d - b_g))$, with $q_g$ and $k$ projections of
    token j's hidden state, each divided by its root mean square and weighed. Read by `Predicted(Hidden(gates))`.

    Attributes:
      weights: of all L layers, under the names that the released gates have, from hidden states of D numbers to K kv
        heads of G query heads, S sinks and d channels: "q_proj.weight" (L, K G d, D), "q_proj.bias" (L, K G d),
        "k_proj.weight" (L, K d, D), "q_norm.weight" and "k_norm.weight" (L, d), "k_base" (L, K, 1, S, d), "b" (L, K, 1,
        G). Any mapping of arrays, such as `numpy.load` of an npz file.
    """

    weights: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        shapes = {name: np.shape(self.weights[name]) for name in self.weights}
        of = lambda name, n: (*shapes.get(name, ()), *(0,) * n)[:n]
        (L, _, D), (_, K, _, S, d), G = of("q_proj.weight", 3), of("k_base", 5), of("b", 4)[3]
        wanted = {"q_proj.weight": (L, K * G * d, D), "q_proj.bias": (L, K * G * d), "k_proj.weight": (L, K * d, D)}
        wanted |= {"q_norm.weight": (L, d), "k_norm.weight": (L, d), "k_base": (L, K, 1, S, d), "b": (L, K, 1, G)}
        if shapes != wanted:
            raise ValueError(
                f"SinkGates has weights of the shapes {shapes}, but these go together: {wanted}; give them"
            )
        object.__setattr__(self, "weights", FrozenArrays(self.weights))

    def __call__(self, hidden: Float[Array, "B T D"], layer: int | Int[Array, ""]) -> Float[Array, "B T K"]:
        """A number from 0 to 1 for every token and kv head of the layer."""
        own = {name: jnp.asarray(x, jnp.float32)[layer] for name, x in self.weights.items()}
        K, _, _, d = own["k_base"].shape
        x = hidden.astype(jnp.float32)

        def heads(x: Array, weight: Array) -> Array:
            x = x.reshape(*x.shape[:2], K, -1, d)
            return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * weight.reshape(1, 1, 1, 1, d)

        q = heads(x @ own["q_proj.weight"].T + own["q_proj.bias"][None, None], own["q_norm.weight"])
        k = heads(x @ own["k_proj.weight"].T, own["k_norm.weight"])
        sinks = jnp.einsum("btkgd,ksd->btkgs", q, own["k_base"][:, 0]) / d**0.5
        logit = (q * k).sum(-1) / d**0.5 + own["b"].reshape(1, 1, K, -1)
        return jax.nn.sigmoid(logit - jax.nn.logsumexp(sinks, -1)).mean(-1)


class Predicted(Given):
    """The number that a function of its hidden state gives a token when it is stored (KVzap).

    Attributes:
      what: observes the function: `Hidden(function)`.
    """

    what: Hidden

    def hparams(self, info: LayerInfo, lengths: Prompts, budget: Prompts) -> PyTree:
        if info.embed_dim:
            check_function(self.what.fn, (1, 1, info.embed_dim), info, (1, 1, info.num_kv_heads))
        return ()
