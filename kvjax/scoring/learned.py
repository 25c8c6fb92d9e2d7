"""Scores that were learned: any function of a token's key, value and statistics, as a `Score` like the others."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kvjax.cache.context import Context, Phase
from kvjax.cache.state import LayerKV
from kvjax.pallas_kernels.values import settle, tokens
from kvjax.scoring.scores import Score, kernel_width, pool_in_order
from kvjax.scoring.stats import AllRows, LastRows, LayerStats, Measurement, Observe, Slots

NUM_STATISTICS = 6


@runtime_checkable
class ScoreFunction(Protocol):
    """A trained function, hashable and compared by its weights; `kvjax.models.scorer.TrainedHead` is one."""

    def __call__(self, features: Float[Array, "B K S F"], layer: int) -> Float[Array, "B K S"]:
        """One number a slot, larger = keep.

        Args:
          features: see `Learned.features`.
          layer: index of the layer.
        """
        ...


class FrozenArrays(Mapping[str, np.ndarray]):
    """Named arrays that compare by content and hash, so that a policy can hold them and still be a jit argument.

    Arrays are copied and cannot be written to. Two with the same content are equal, and compile nothing new.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        digest = hashlib.sha256()
        self._arrays = {}
        for name in sorted(arrays):
            x = np.array(arrays[name])
            x.setflags(write=False)
            self._arrays[name] = x
            digest.update(repr((name, x.shape, x.dtype.str)).encode() + x.tobytes())
        self._digest = digest.hexdigest()

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self):
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FrozenArrays) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __reduce__(self):
        return FrozenArrays, (self._arrays,)  # numpy forgets on the way that an array cannot be written to

    def __repr__(self) -> str:
        return f"FrozenArrays({sum(x.size for x in self._arrays.values())} numbers, {self._digest[:12]})"


@dataclasses.dataclass(frozen=True)
class Learned(Score):
    """A learned function of what is known of a token after the prompt. Says nothing about generated tokens.

    Attributes:
      function: from features to scores.
      rows: the prompt's last rows, whose votes are a feature.
      kernel: width of the max-pooled votes, another; odd.
    """

    function: ScoreFunction
    rows: int = 16
    kernel: int = 7

    def __post_init__(self):
        if not callable(self.function):
            raise ValueError(f"Learned(function={self.function!r}): give a trained function of features and the layer")
        settle(self, rows=tokens(1, "at least one row must be observed"), kernel=kernel_width)

    @property
    def decodes(self) -> bool:
        """See `Score`."""
        return False

    @property
    def rotated_keys(self) -> bool:
        """See `Score`."""
        return True

    @property
    def _votes(self) -> Observe:
        return Observe(LastRows(self.rows))

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Score`."""
        return (self._votes, Observe(AllRows())) if phase == "prefill" else ()

    def features(
        self, kv: LayerKV, stats: LayerStats, ctx: Context, candidates: Bool[Array, "B K S"]
    ) -> Float[Array, "B K S F"]:
        """What the function sees of every slot: F = 2 H + 6 numbers.

        The key as it is stored and the value; then logarithms of the votes, of the pooled votes, of the mean attention
        of all rows since insertion, and of the value's norm; how far back the token is, as a share of the prompt; 1.
        """
        length = ctx.length[:, None, None].astype(jnp.float32)
        votes = stats[self._votes].astype(jnp.float32)
        pooled = pool_in_order(votes, kv.pos, candidates, "max", self.kernel, "zero")
        back = length - kv.pos.astype(jnp.float32)
        mean = stats[Observe(AllRows())].astype(jnp.float32) / jnp.maximum(back, 1.0)
        k, v = kv.k.astype(jnp.float32), kv.v.astype(jnp.float32)
        log = lambda x: jnp.log(jnp.maximum(x, 1e-6))
        norm = jnp.sqrt(jnp.square(v).sum(-1))
        numbers = [log(votes), log(pooled), log(mean), log(norm), back / length, jnp.ones_like(votes)]
        features = jnp.concatenate([k, v, jnp.stack(numbers, axis=-1)], axis=-1)
        return jnp.where(kv.live[..., None], features, 0.0)

    def __call__(self, slots: Slots) -> Float[Array, "B K S"]:
        """See `Score`."""
        kv, stats, ctx, candidates = slots.kv, slots.stats, slots.ctx, slots.candidates
        return self.function(self.features(kv, stats, ctx, candidates), ctx.site.layer)
