"""ThinK: thinner keys (Xu et al., arXiv 2407.21018)."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from kvjax.cache.context import Context, Site
from kvjax.cache.pool import PooledKV
from kvjax.cache.state import LayerKV, PerHead
from kvjax.pallas_kernels.values import number, one_of, settle, tokens
from kvjax.policy import LayerSpec, Rule, keeps_all
from kvjax.scoring.measurements import QuerySquares
from kvjax.scoring.select import Selection
from kvjax.scoring.stats import LayerStats
from kvjax.sizes.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class PruneChannels(Rule):
    """Drops key channels instead of tokens.

    Attributes:
      share: of the channels that is dropped.
      query_rows: the prompt's last rows whose queries count.
      storage: "dropped" stores only the channels that stay, for generated tokens as well; "zeroed" zeroes them in the
        prompt's keys, which frees nothing and leaves generated keys whole.
    """

    share: float
    query_rows: int = 32
    storage: Literal["dropped", "zeroed"] = "dropped"

    def __post_init__(self):
        settle(self, share=number("[0, 1)", "the share of dropped channels lies in [0, 1)"))
        settle(self, query_rows=tokens(1, "at least one row must be observed"))
        one_of("PruneChannels.storage", self.storage, "dropped", "zeroed")

    def spec(self, site: Site) -> LayerSpec:
        """See `Rule`."""
        return keeps_all(site, prompt=(QuerySquares(self.query_rows),), prunes=True, timed=False)

    def init(self, site: Site, batch: int) -> Any:
        """See `Rule`."""
        return PerHead(jnp.zeros((batch, site.num_kv_heads, site.head_dim), jnp.float32))

    def decide(self, kv: LayerKV, stats: LayerStats, ctx: Context) -> tuple[Any, Selection | None]:
        """Scores channels by mean(q^2) over the last rows times mean(k^2) over the live tokens (section 3.2)."""
        if ctx.phase == "decode" or kv.channels is not None:
            return kv.memory, None
        k = jnp.where(kv.live[..., None], kv.k.astype(jnp.float32), 0.0)
        mean = (k * k).sum(2) / jnp.maximum(kv.num_live, 1).astype(jnp.float32)[..., None]
        return PerHead(stats[QuerySquares(self.query_rows)] * mean), None

    def under(self, schedule: Schedule) -> Rule:
        """See `Rule`; channels are dropped once."""
        raise ValueError(
            f"channels are dropped once, after the prompt, so {schedule} cannot apply; schedule the others"
        )

    def finish(self, kv: LayerKV | PooledKV, ctx: Context) -> LayerKV:
        """See `Rule`."""
        if isinstance(kv, PooledKV):
            raise ValueError("heads drop different channels, so their keys cannot share a pool; use storage='dense'")
        if kv.positions != "original":
            raise ValueError(
                f"positions={kv.positions!r} rotates stored keys again, which needs all of their channels; "
                "use positions='original'"
            )
        H = ctx.site.head_dim
        stays = H - int(H * self.share)
        _, index = lax.top_k(kv.memory.value, stays)
        index = jnp.sort(index, axis=-1).astype(jnp.int32)
        if self.storage == "dropped":
            k = jnp.take_along_axis(kv.k, index[:, :, None], axis=-1)
            return dataclasses.replace(kv, k=k, channels=index)
        mask = jnp.put_along_axis(jnp.zeros(kv.memory.value.shape, bool), index, True, axis=-1, inplace=False)
        return dataclasses.replace(kv, k=jnp.where(mask[:, :, None], kv.k, jnp.zeros((), kv.k.dtype)))


def think(
    channels: float = 0.5, *, query_rows: int = 32, storage: Literal["dropped", "zeroed"] = "dropped"
) -> PruneChannels:
    r"""Keeps the key channels that matter to the last queries; every token stays.

    A channel's score is $\mathrm{mean}_{\text{last rows}}(q_c^2)\,\mathrm{mean}_j(k_{jc}^2)$, averaged over the group.
    It is a transform of storage, not a token policy: chain it behind one, `chain(snapkv(256), think(0.5))`. The cache
    holds the thin keys; attention widens those of one layer at a time, with zeros, at every step.
    Implementations zero the channels of all prompt tokens (kvpress: `storage="zeroed"`), or store them without, the
    last 32 tokens excepted.

    Args:
      channels: share of the key channels that is dropped.
      query_rows: the prompt's last rows whose queries count.
      storage: see `PruneChannels`.
    """
    return PruneChannels(channels, query_rows, storage)
