"""The attention rows of what follows a prompt: enough to price any gates of it, exactly and differentiably.

A `Reading` prices masks by attending again, with memory linear in the tokens. Where few rows follow, their attention to
the prompt is kept instead, so that thousands of gates are priced by a multiplication each.

Letters: B prompts, L layers, K kv heads, N query heads, S slots of the prompt, R rows that follow it, H head_dim, D
embed_dim.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.analysis.losses import by_query_head
from kvjax.analysis.reading import Reading
from kvjax.contract import AttentionInputs, Size, value
from kvjax.observe import Queries, votes
from kvjax.pallas_kernels import Columns, Softmax, attention
from kvjax.pallas_kernels.pytree import pytree


@pytree
class Voters(Queries):
    """Rows of one layer that vote on slots, and how they attend: votes under any softmax, and their gradient.

    Attributes:
      k: keys of every slot.
      kv_pos: absolute position of every slot, negative for a dead slot.
    """

    k: Float[Array, "B K S H"]
    kv_pos: Int[Array, "B K S"]

    def votes(self, multiplier: Float[Array, "B R"]) -> Float[Array, "B K S"]:
        """Each slot's attention from all rows, logits times `multiplier`; the mean of a group, in its dtype.

        By the kernels' specification, whose statistics have a gradient; its memory grows with the voting rows only.
        """
        q, k = self.q.astype(multiplier.dtype), self.k.astype(multiplier.dtype)
        factor = jnp.broadcast_to(multiplier[:, None], (*k.shape[:2], q.shape[2]))
        column = Columns(softmax=Softmax(multiplier=factor))
        how = {"columns": (column,), "bias": self.bias, "logits": self.logits}
        return attention(q, k, k, self.pos, self.kv_pos, **how, implementation="reference").columns[0]


@value
class VotingRows:
    """Observes the last rows just read as `Voters`.

    Attributes:
      rows: how many of the new tokens vote.
    """

    rows: Size

    def __call__(self, inputs: AttentionInputs) -> Voters:
        kv, pos = inputs.kv, inputs.pos[:, -self.rows :]
        if kv.how.positions != "original":
            raise ValueError(f"a layer stored by {kv.how.positions} has no keys at the text's positions for voters")
        return Voters(inputs.q[:, :, -self.rows :], pos, inputs.bias, inputs.logits, kv.k, kv.pos)


@pytree
class Traces:
    """The attention of the true future queries to every slot of the prompt, in all layers (`trace`).

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
        """Each layer's attention output for the future rows, where the prompt's slots have these gates.

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
    """The attention rows of what follows a reading's prompts, with the full cache."""
    T, R = reading.state.layers[0].pos.shape[2], reading.continuation.shape[1]
    rows, own = [], []
    for i, (kv, later) in enumerate(zip(reading.state.layers, reading.later, strict=True)):
        attend = reading.attend(i, (votes(R),))
        new = later.q, later.k, later.v
        _, _, (seen, _) = attend(kv.replace(memory=()), *new, layer=i, rotate=later.rotate, logits=later.logits)
        rows.append(row := seen[votes(R)])  # "B N R S+R"
        v = by_query_head(later.v, row.shape[1])
        own.append(jnp.einsum("bnrs,bnsh->bnrh", row[..., T:], v.astype(row.dtype)))
    every = jnp.stack(rows, axis=1)
    values = jnp.stack([kv.values for kv in reading.state.layers], axis=1)
    out_proj = jnp.stack([later.out_proj for later in reading.later]).astype(every.dtype)
    return Traces(every[..., :T], jnp.stack(own, axis=1), every[..., T:].sum(-1), values, out_proj)
