"""A small head that predicts from a token's key, value and statistics how much attention it will get."""

import dataclasses
import functools
import io
import json
import os
import pathlib
import zipfile
import zlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.contract import FrozenArrays
from kvjax.contract.checks import whole
from kvjax.models.written import write_bytes


class ScoreHead(nn.Module):
    """One hidden layer and a linear path, with weights of their own for every kv head of every layer.

    Attributes:
      num_layers, num_kv_heads: of the model that is scored.
      hidden: units of the hidden layer.
    """

    num_layers: int
    num_kv_heads: int
    hidden: int

    @nn.compact
    def __call__(self, features: Float[Array, "B K S F"], layer: int | Int[Array, ""]) -> Float[Array, "B K S"]:
        """Logarithm of the attention to come, up to a constant of the head."""
        F = features.shape[-1]
        every = self.num_layers, self.num_kv_heads
        own = lambda name, init, *shape: jnp.asarray(self.param(name, init, (*every, *shape)))[layer]
        mean, std = own("mean", nn.initializers.zeros, F), own("std", nn.initializers.ones, F)
        x = (features - mean[None, :, None]) / std[None, :, None]
        first = own("hidden", nn.initializers.normal(F**-0.5), F, self.hidden)
        last = own("out", nn.initializers.normal(self.hidden**-0.5), self.hidden)
        linear = own("linear", nn.initializers.zeros, F)
        y = jax.nn.gelu(jnp.einsum("bksf,kfm->bksm", x, first))
        return jnp.einsum("bksm,km->bks", y, last) + jnp.einsum("bksf,kf->bks", x, linear)


@dataclasses.dataclass(frozen=True)
class TrainedHead:
    """A `ScoreHead` with its weights: the function of a `Learned` score, compared by value.

    Attributes:
      num_layers, num_kv_heads, hidden: of the head.
      weights: its parameters.
    """

    num_layers: int
    num_kv_heads: int
    hidden: int
    weights: FrozenArrays

    def __call__(self, features: Float[Array, "B K S F"], layer: int | Int[Array, ""]) -> Float[Array, "B K S"]:
        """The score of every slot.

        Raises:
          ValueError: features or a layer that the head was not trained for.
        """
        trained = self.weights["mean"].shape
        beyond = isinstance(layer, int) and layer >= self.num_layers  # a traced one was known when its run was planned
        if features.shape[1] != self.num_kv_heads or features.shape[-1] != trained[-1] or beyond:
            raise ValueError(
                f"this head was trained for {trained[0]} layers of {trained[1]} kv heads with {trained[2]} features, "
                f"but layer {layer} has {features.shape[1]} heads with {features.shape[-1]}; train one for this model"
            )
        return apply(self.module, dict(self.weights), features, layer)

    @property
    def module(self) -> ScoreHead:
        """The definition."""
        return ScoreHead(self.num_layers, self.num_kv_heads, self.hidden)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an .npz file, in one step: what stood there stays whole until the new one is."""
        sizes = {n: getattr(self, n) for n in _SIZES}
        arrays: dict[str, Any] = {**self.weights, "sizes": json.dumps(sizes)}
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)
        write_bytes(pathlib.Path(path), content.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TrainedHead":
        """Reads what `save` wrote.

        Raises:
          ValueError: a damaged file, or weights of other names or shapes than its sizes imply.
        """
        content = io.BytesIO(pathlib.Path(path).read_bytes())
        try:
            with np.load(content) as file:
                weights = {n: file[n] for n in file.files if n != "sizes"}
                sizes = json.loads(str(file["sizes"]))
        except (ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as e:
            raise ValueError(f"{path} holds no trained head ({type(e).__name__}: {e}); copy or train it again") from e
        wrong = f"{path} holds no trained head: "
        if not isinstance(sizes, dict) or set(sizes) != {*_SIZES}:
            raise ValueError(f"{wrong}its sizes are {sizes!r}, not {', '.join(_SIZES)}")
        head = cls(**{n: whole(n, sizes[n]) for n in _SIZES}, weights=FrozenArrays(weights))
        features = weights["mean"].shape[-1] if "mean" in weights and weights["mean"].ndim else 1
        expected = jax.eval_shape(functools.partial(init, head.module, num_features=features), jax.random.key(0))
        for name in sorted({*weights, *expected}):
            there = f"{weights[name].dtype}{list(weights[name].shape)}" if name in weights else "absent"
            wanted = f"{expected[name].dtype}{list(expected[name].shape)}" if name in expected else "not"
            if there != wanted:
                raise ValueError(f"{wrong}{name} is {there} there, {wanted} wanted for {sizes}")
            if not np.isfinite(weights[name]).all():
                raise ValueError(f"{wrong}{name} has values that are not finite")
        return head


_SIZES = ("num_layers", "num_kv_heads", "hidden")


def apply(
    module: ScoreHead, params: PyTree, features: Float[Array, "B K S F"], layer: int | Int[Array, ""]
) -> Float[Array, "B K S"]:
    """The head as a pure function of its parameters."""
    run: Any = module.apply
    return run({"params": params}, features, layer)


def init(module: ScoreHead, key: Array, num_features: int) -> dict[str, Any]:
    """Random parameters."""
    run: Any = module.init
    return run(key, jnp.zeros((1, module.num_kv_heads, 1, num_features)), 0)["params"]
