r"""How much of full attention every kv head needs: the gates of DuoAttention (arXiv 2410.10819, section 2.2).

A gate $\alpha$ in [0, 1] for each kv head mixes what it reads of everything with what it reads of the first and the
last tokens,

$$ \alpha \cdot \mathrm{full}(q, K, V) + (1 - \alpha) \cdot \mathrm{streaming}(q, K, V) $$

(Eq. 1). Gates are learned so that the last hidden states of a model stay what they are with full attention, while the
gates' sum is made small. `kvjax.methods.duo_attention` makes a policy of them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.state import linear_bias
from kvjax.drivers.attention import Attend, without_cache
from kvjax.pallas_kernels.columns import accumulator
from kvjax.pallas_kernels.values import checked, number, tokens
from kvjax.scoring.stats import LayerStats


def gated(gates: Float[Array, "L K"], pos: Int[Array, "B T"], *, sinks: int, recent: int) -> Attend:
    """Causal attention among T tokens without a cache, mixed with streaming attention by the gates of kv heads.

    Differentiable. It makes all logits of a layer at once, and so is for texts of some thousand tokens.

    Args:
      gates: of every layer and kv head.
      pos: positions, -1 for padding.
      sinks: first tokens that a row reads in streaming attention.
      recent: last tokens that it reads there, its own among them.

    Raises:
      ValueError: numbers of tokens that are none, or a row that would not read its own token.
    """
    sinks = checked(tokens(), "sinks", sinks)
    recent = checked(tokens(1, "a row reads its own token at least"), "recent", recent)

    def attend(
        cache, q, k, v, *, layer, rotate, out_proj=None, hidden=None, scale=None, window=None, softcap=None, slopes=None
    ):
        del out_proj, hidden
        (B, N, T, H), K, dtype = q.shape, k.shape[1], accumulator(q.dtype)
        q, k = rotate(q, pos[:, None]), rotate(k, pos[:, None])
        grouped = q.reshape(B, K, N // K, T, H).astype(dtype)
        x = jnp.einsum("bkgth,bksh->bkgts", grouped, k.astype(dtype)) * (H**-0.5 if scale is None else scale)
        x = x if softcap is None else softcap * jnp.tanh(x / softcap)
        if slopes is not None:
            x = x + linear_bias(slopes, jnp.broadcast_to(pos[:, None], (B, K, T)), dtype=k.dtype).reshape(
                B, K, -1, 1, T
            )
        row, key = pos[:, None, None, :, None], pos[:, None, None, None]
        sees = (key >= 0) & (key <= row)
        sees = sees if window is None else sees & (row - key < window)
        near = sees & ((key < sinks) | (row - key < recent))
        gate = gates[layer].astype(dtype)[None, :, None, None, None]
        p = gate * _softmax(x, sees) + (1 - gate) * _softmax(x, near)
        out = jnp.einsum("bkgts,bksh->bkgth", p, v.astype(dtype))
        return out.reshape(B, N, T, v.shape[-1]).astype(v.dtype), cache, LayerStats()

    return attend


def _softmax(x: Float[Array, "B K G T S"], seen: Bool[Array, "B 1 1 T S"]) -> Float[Array, "B K G T S"]:
    """Probabilities of what a row sees; zeros for one that sees nothing."""
    p = jax.nn.softmax(jnp.where(seen, x, jnp.finfo(x.dtype).min), axis=-1)
    return jnp.where(seen, p, 0.0)


def distance(
    hidden: Callable[[Attend], Float[Array, "B T D"]],
    gates: Float[Array, "L K"],
    pos: Int[Array, "B T"],
    counts: Bool[Array, "B T"],
    *,
    sinks: int,
    recent: int,
) -> Float[Array, ""]:
    """How far gates move the last hidden states of tokens that count: the mean square of a channel's difference.

    Args:
      hidden: the last hidden states of the texts as a function of attention, such as
        `lambda attend: model.last_hidden(params, ids, attend=attend)`.
      gates: of every layer and kv head.
      pos: positions, -1 for padding.
      counts: the tokens whose states are compared: those of answers that have to be found in the text.
      sinks, recent: see `gated`.
    """
    wanted = lax.stop_gradient(hidden(without_cache(pos)))
    found = hidden(gated(gates, pos, sinks=sinks, recent=recent))
    each = jnp.square((found - wanted).astype(gates.dtype)).mean(-1)
    return jnp.where(counts, each, 0.0).sum() / jnp.maximum(counts.sum(), 1).astype(each.dtype)


def penalty(gates: Float[Array, "L K"], weight: float = 0.05) -> Float[Array, ""]:
    """What keeps gates small: `weight` times their L1 norm, as a mean over heads so that it does not grow with depth.

    The paper (Eq. 4) writes a sum over heads beside a distance that is a sum over tokens.

    Raises:
      ValueError: a negative weight.
    """
    return checked(number("[0, inf)"), "weight", weight) * jnp.abs(gates).mean()
