"""The attention rows of what follows a prompt: enough to price any gates of it, exactly and differentiably.

A `Reading` prices masks by attending again, with memory linear in the tokens. Where few rows follow, their attention to
the prompt is kept instead, so that thousands of gates are priced by a multiplication each.

Letters: B prompts, L layers, K kv heads, N query heads, S slots of the prompt, R rows that follow it, H head_dim, D
embed_dim.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.analysis.reading import Reading
from kvjax.drivers.attention import attend
from kvjax.pallas_kernels import Columns, Softmax, attention
from kvjax.pallas_kernels.pytree import pytree, static
from kvjax.pallas_kernels.values import settle, tokens
from kvjax.scoring.stats import LastRows, Measurement, Moment, Observe


@pytree
class Voters:
    """Rows of one layer that vote on slots, and how they attend: votes under any softmax, and their gradient.

    Attributes:
      q: queries as they met the keys.
      k: keys of every slot.
      q_pos: absolute position of every row, negative for padding.
      kv_pos: absolute position of every slot, negative for a dead slot.
      bias, scale, window, softcap: as in `kvjax.pallas_kernels.attention`.
    """

    q: Float[Array, "B N R H"]
    k: Float[Array, "B K S H"]
    q_pos: Int[Array, "B R"]
    kv_pos: Int[Array, "B K S"]
    bias: Float[Array, "B N S"] | None = None
    scale: float | None = static(default=None)
    window: int | None = static(default=None)
    softcap: float | None = static(default=None)

    def votes(self, multiplier: Float[Array, "B R"]) -> Float[Array, "B K S"]:
        """What every slot gets from all rows under logits times `multiplier`, the mean of a group, in its dtype.

        By the specification, whose statistics have a gradient; its memory grows with the voting rows only.
        """
        q, k = self.q.astype(multiplier.dtype), self.k.astype(multiplier.dtype)
        factor = jnp.broadcast_to(multiplier[:, None], (*k.shape[:2], q.shape[2]))
        column = Columns(softmax=Softmax(multiplier=factor))
        options: dict[str, Any] = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        options |= {"bias": self.bias, "implementation": "reference"}
        found = attention(q, k, k, self.q_pos, self.kv_pos, columns=(column,), **options)
        return found.columns[0]


@dataclasses.dataclass(frozen=True)
class VotingRows(Measurement):
    """The last rows just computed as `Voters`.

    Attributes:
      rows: how many of the new tokens count.
    """

    rows: int

    def __post_init__(self):
        settle(self, rows=tokens(1, "at least one row must vote"))

    def measure(self, moment: Moment) -> Voters:
        """See `Measurement`."""
        kv, pos = moment.kv, moment.pos[:, -self.rows :]
        if kv.positions == "compact":
            raise ValueError("a cache with positions='compact' stores keys unrotated; voters read those of 'original'")
        how = moment.bias, moment.scale, moment.window, moment.softcap
        return Voters(moment.q[:, :, -self.rows :], kv.k, pos, kv.pos, *how)


@pytree
class Traces:
    """What the true future queries pay to every slot of the prompt, in all layers; made by `trace`.

    Attributes:
      attention: what each future row paid to each slot of the prompt.
      own: what future rows read of one another, weighted by attention; these keys are never evicted.
      own_mass: the attention that they paid to one another.
      values: the prompt's values.
      out_proj: the output projections.
    """

    attention: Float[Array, "B L N R S"]
    own: Float[Array, "B L N R H"]
    own_mass: Float[Array, "B L N R"]
    values: Float[Array, "B L K S H"]
    out_proj: Float[Array, "L N H D"]

    def outputs(self, gates: Float[Array, "B L K S"]) -> Float[Array, "B L R D"]:
        """What every layer adds to the residual stream of the future rows, where the prompt's slots have these gates.

        Weights are renormalised over what was kept, as attention over the smaller cache does.
        """
        B, L, N, R, _ = self.attention.shape
        K = gates.shape[2]
        grouped = lambda x: x.reshape(B, L, K, N // K, *x.shape[3:])
        weights = grouped(self.attention) * gates.astype(self.attention.dtype)[:, :, :, None, None]
        read = jnp.einsum("blkgrs,blksh->blkgrh", weights, self.values) + grouped(self.own)
        mass = weights.sum(-1) + grouped(self.own_mass)
        out = (read / mass[..., None]).reshape(B, L, N, R, -1)
        return jnp.einsum("blnrh,lnhd->blrd", out, self.out_proj)

    def eviction_loss(self, gates: Float[Array, "B L K S"]) -> Float[Array, "B L"]:
        r"""The exact eviction loss of every layer: by how much its outputs for the true future queries change.

        $\frac1R \sum_r \lVert y_r - \hat y_r \rVert_1 / \lVert y_r \rVert_1$ over the R rows that follow the prompt,
        where $y_r$ is what the layer's attention adds to the residual stream (after the output projection) with the
        full cache, and $\hat y_r$ with the gates. Each layer is given the inputs that it has with the full cache, as in
        Ada-KV's Theorem 1 (arXiv 2407.11550), whose distance this is, relative, for one row after another.

        Args:
          gates: how much of every slot is kept; 0 and 1 for a hard policy.
        """
        full = self.outputs(jnp.ones_like(gates))
        distance = jnp.abs(full - self.outputs(gates)).sum(-1)
        return (distance / jnp.abs(full).sum(-1)).mean(-1)


def trace(reading: Reading) -> Traces:
    """The attention rows of a reading's continuation, with the full cache."""
    rows, own = [], []
    T, R = reading.layers[0].prompt.num_slots, reading.continuation.shape[1]
    seen = Observe(LastRows(R), group=None, summed=False)
    for i, layer in enumerate(reading.layers):
        ctx = dataclasses.replace(reading.prompt_context(i), length=reading.lengths + R)
        new = layer.q, layer.k, layer.v
        _, _, stats = attend(layer.prompt, *new, reading.rows, ctx=ctx, observe=(seen,), **layer.options)
        rows.append(stats[seen])  # "B N R S+R"
        v = jnp.repeat(layer.v, layer.q.shape[1] // layer.v.shape[1], axis=1)
        own.append(jnp.einsum("bnrs,bnsh->bnrh", rows[-1][..., T:], v.astype(rows[-1].dtype)))
    every = jnp.stack(rows, axis=1)
    values = jnp.stack([layer.prompt.v for layer in reading.layers], axis=1)
    out_proj = jnp.stack([layer.out_proj for layer in reading.layers]).astype(every.dtype)
    return Traces(every[..., :T], jnp.stack(own, axis=1), every[..., T:].sum(-1), values, out_proj)
