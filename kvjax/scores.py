"""How much a token is worth keeping: one number a slot, larger = keep.

A score lists what must be measured (`observe`), owns the numbers it carries from step to step (`init`, `update`), and
turns them into scores (`__call__`). Scores know nothing of budgets, protection, schedules or storage.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from kvjax.context import Context, Phase, Site
from kvjax.state import LayerKV, position_order
from kvjax.stats import AllRows, LastRows, LayerStats, Observe


class Score(abc.ABC):
    """A frozen dataclass that ranks the live slots of a layer."""

    def observe(self, phase: Phase) -> tuple[Observe, ...]:
        """The statistics that `update` and `__call__` read in this phase."""
        del phase
        return ()

    def init(self, site: Site, batch: int) -> Any:
        """The score's memory for a layer without slots: arrays "B K 0 ...", or `PerHead` arrays "B K ..."."""
        del site, batch
        return ()

    def update(self, memory: Any, kv: LayerKV, stats: LayerStats, ctx: Context) -> Any:
        """The memory after the rows just computed. Called at every step, whether or not eviction is due."""
        del kv, stats, ctx
        return memory

    @abc.abstractmethod
    def __call__(
        self, memory: Any, kv: LayerKV, stats: LayerStats, ctx: Context, candidates: Bool[Array, "B K S"]
    ) -> Float[Array, "B K S"]:
        """The score of every slot; only those of `candidates` (live, not protected) will be compared."""

    @property
    def decodes(self) -> bool:
        """Whether the score means something while decoding."""
        return True


@dataclasses.dataclass(frozen=True)
class Recency(Score):
    """The newer, the better."""

    def __call__(self, memory, kv, stats, ctx, candidates):
        """See `Score`."""
        del memory, stats, ctx, candidates
        return kv.pos.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Uniform(Score):
    """A fresh uniform draw for every token at every eviction, independent over layers, heads and sequences."""

    def __call__(self, memory, kv, stats, ctx, candidates):
        """See `Score`."""
        del memory, stats, candidates
        return ctx.uniform(kv.pos)


@dataclasses.dataclass(frozen=True)
class Accumulated(Score):
    """A column statistic summed over every row since the token was inserted, prompt and decode alike.

    Attributes:
      of: what is summed. The default, attention probabilities of all rows, is H2O's accumulated attention score.
    """

    of: Observe = Observe(AllRows())

    def observe(self, phase: Phase) -> tuple[Observe, ...]:
        """See `Score`."""
        del phase
        return (self.of,)

    def init(self, site: Site, batch: int) -> Float[Array, "B K 0"]:
        """See `Score`."""
        return jnp.zeros((batch, site.num_kv_heads, 0), jnp.float32)

    def update(self, memory, kv, stats, ctx):
        """See `Score`."""
        del kv, ctx
        return memory + stats[self.of]

    def __call__(self, memory, kv, stats, ctx, candidates):
        """See `Score`."""
        del kv, stats, ctx, candidates
        return memory


@dataclasses.dataclass(frozen=True)
class Window(Score):
    """Attention received from the last rows of the prompt (SnapKV's votes). Says nothing about generated tokens.

    Attributes:
      rows: how many of the prompt's last rows vote.
      group: how the votes of a group's query heads are combined, before any pooling.
    """

    rows: int = 32
    group: Literal["mean", "max", "sum"] = "mean"

    def __post_init__(self):
        Observe(LastRows(self.rows), group=self.group)

    @property
    def decodes(self) -> bool:
        """See `Score`."""
        return False

    @property
    def _votes(self) -> Observe:
        return Observe(LastRows(self.rows), group=self.group)

    def observe(self, phase: Phase) -> tuple[Observe, ...]:
        """See `Score`."""
        return (self._votes,) if phase == "prefill" else ()

    def __call__(self, memory, kv, stats, ctx, candidates):
        """See `Score`."""
        del memory, kv, ctx, candidates
        return stats[self._votes]


@dataclasses.dataclass(frozen=True)
class LastRow(Score):
    """Attention received from the newest row alone (TOVA, arXiv 2401.06104). Nothing is accumulated.

    Attributes:
      head_mode: "layer_mean" averages over all query heads of the layer, so that all heads keep the same tokens;
        "per_kv_head" averages within each kv head's group (D-09).
    """

    head_mode: Literal["layer_mean", "per_kv_head"] = "layer_mean"

    def __post_init__(self):
        if self.head_mode not in ("layer_mean", "per_kv_head"):
            raise ValueError(f"head_mode={self.head_mode!r} is not one of ('layer_mean', 'per_kv_head')")

    @property
    def _row(self) -> Observe:
        return Observe(LastRows(1))

    def observe(self, phase: Phase) -> tuple[Observe, ...]:
        """See `Score`."""
        del phase
        return (self._row,)

    def __call__(self, memory, kv, stats, ctx, candidates):
        """See `Score`."""
        del memory, candidates
        row = stats[self._row]
        if self.head_mode == "per_kv_head":
            return row
        return _mean_over_heads(row, kv, ctx.site.prompt_len + ctx.site.max_new_tokens)


def _mean_over_heads(row: Float[Array, "B K S"], kv: LayerKV, num_positions: int) -> Float[Array, "B K S"]:
    """The mean over all kv heads of what a token received; a head that no longer holds it gave it nothing."""
    B, K, S = row.shape

    def by_slot(row):
        return jnp.broadcast_to(row.mean(1, keepdims=True), row.shape)

    def by_position(row):
        pos = jnp.where(kv.live, kv.pos, num_positions).reshape(B, K * S)
        batch = jnp.arange(B)[:, None]
        total = jnp.zeros((B, num_positions), row.dtype).at[batch, pos].add(row.reshape(B, K * S), mode="drop")
        return (total.at[batch, pos].get(mode="fill", fill_value=0) / K).reshape(B, K, S)

    return lax.cond((kv.pos == kv.pos[:, :1]).all(), by_slot, by_position, row)


@dataclasses.dataclass(frozen=True)
class Pooled(Score):
    """Another score, pooled over neighbouring candidates so that tokens are kept with their surroundings.

    Neighbours are neighbours in position among the candidates of a head, wherever their slots are. Stride 1.

    Attributes:
      score: what is pooled.
      kind: "max", or "avg".
      kernel: odd width.
      avg_pad: at the edges, "zero" divides by the kernel all the same (as PyTorch does), "valid_count" by the number
        of candidates under it (D-49).
    """

    score: Score
    kind: Literal["max", "avg"] = "max"
    kernel: int = 7
    avg_pad: Literal["zero", "valid_count"] = "zero"

    def __post_init__(self):
        if self.kind not in ("max", "avg"):
            raise ValueError(f"Pooled(kind={self.kind!r}): not one of ('max', 'avg')")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"Pooled(kernel={self.kernel}): an even kernel shifts the scores; use {self.kernel | 1}")
        if self.avg_pad not in ("zero", "valid_count"):
            raise ValueError(f"Pooled(avg_pad={self.avg_pad!r}): not one of ('zero', 'valid_count')")

    @property
    def decodes(self) -> bool:
        """See `Score`."""
        return self.score.decodes

    def observe(self, phase: Phase) -> tuple[Observe, ...]:
        """See `Score`."""
        return self.score.observe(phase)

    def init(self, site: Site, batch: int) -> Any:
        """See `Score`."""
        return self.score.init(site, batch)

    def update(self, memory, kv, stats, ctx):
        """See `Score`."""
        return self.score.update(memory, kv, stats, ctx)

    def __call__(self, memory, kv, stats, ctx, candidates):
        """See `Score`."""
        score = self.score(memory, kv, stats, ctx, candidates)
        if self.kernel == 1:
            return score
        order = position_order(jnp.where(candidates, kv.pos, -1))  # candidates are adjacent, in order, at the end
        inside = jnp.take_along_axis(candidates, order, axis=-1)
        x = jnp.take_along_axis(score, order, axis=-1)
        if self.kind == "max":
            pooled = _slide(jnp.where(inside, x, -jnp.inf), self.kernel, -jnp.inf, lax.max)
        else:
            pooled = _slide(jnp.where(inside, x, 0.0), self.kernel, 0.0, lax.add)
            count = jnp.asarray(self.kernel, x.dtype)
            if self.avg_pad == "valid_count":
                count = jnp.maximum(_slide(inside.astype(x.dtype), self.kernel, 0.0, lax.add), 1.0)
            pooled = pooled / count
        return jnp.put_along_axis(score, order, pooled, axis=-1, inplace=False)


def _slide(x: Float[Array, "B K S"], kernel: int, init: float, combine: Callable) -> Float[Array, "B K S"]:
    """Stride-1 window reduction, padded with `init` on both sides."""
    half = kernel // 2
    x = jnp.pad(x, ((0, 0), (0, 0), (half, half)), constant_values=init)
    S = x.shape[-1] - 2 * half
    result = x[..., :S]
    for i in range(1, kernel):
        result = combine(result, x[..., i : i + S])
    return result


@dataclasses.dataclass(frozen=True)
class FromFunction(Score):
    """A function of the cache and its statistics; what `from_fn` makes of a researcher's lambda.

    Attributes:
      fn: `(kv, stats, ctx) -> "B K S"`. Functions compare by identity: keep one object to compile once.
      observed: the statistics it reads, in every phase.
    """

    fn: Callable[[LayerKV, LayerStats, Context], Float[Array, "B K S"]]
    observed: tuple[Observe, ...] = ()

    def observe(self, phase: Phase) -> tuple[Observe, ...]:
        """See `Score`."""
        del phase
        return self.observed

    def __call__(self, memory, kv, stats, ctx, candidates):
        """See `Score`."""
        del memory, candidates
        return self.fn(kv, stats, ctx)
