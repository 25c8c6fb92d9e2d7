r"""How much of full attention every kv head needs: the gates of DuoAttention (arXiv 2410.10819, section 2.2).

A gate $\alpha$ in [0, 1] for each kv head mixes what it reads of everything with what it reads of the first and the
last tokens,

$$ \alpha \cdot \mathrm{full}(q, K, V) + (1 - \alpha) \cdot \mathrm{streaming}(q, K, V) $$

(Eq. 1). Gates are learned so that the last hidden states of a model stay what they are with full attention, while the
gates' sum is made small. `kvjax.methods.duo_attention` makes a policy of them.

Letters: B texts, T tokens, L layers, N query heads, K kv heads, G = N / K, H head_dim, D width of the model.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.contract import Amount, Attend, NonNegative, Size, turned_queries
from kvjax.pallas_kernels import Logits, kinds
from kvjax.pallas_kernels.columns import accumulator


def gated(gates: Float[Array, "L K"], pos: Int[Array, "B T"], *, sinks: Amount, recent: Size) -> Attend:
    """Causal attention among T tokens without a cache, mixed with streaming attention by the gates of kv heads.

    Differentiable. It makes all logits of a layer at once, and so is for texts of some thousand tokens.

    Args:
      gates: of every layer and kv head; 1 reads everything.
      pos: positions, -1 for padding.
      sinks: first tokens that a row reads in streaming attention.
      recent: last tokens that it reads there, its own among them.

    Raises:
      ValueError: a negative number of tokens, a row that would not read its own token; where a layer calls it, gates of
        another number of heads.
    """

    def attend(
        cache: Any,
        q: Float[Array, "B N T H"],
        k: Float[Array, "B K T H"],
        v: Float[Array, "B K T H"],
        *,
        layer: int,
        rotate: Callable[..., Array],
        logits: Logits = Logits(),
        **_: Any,
    ) -> tuple[Array, Any, tuple[()]]:
        if k is None or gates.shape[-1] != k.shape[1]:
            there = "no keys of its own" if k is None else f"{k.shape[1]} kv heads"
            raise ValueError(f"gates have the shape {gates.shape}, but a layer has {there}; give one a kv head")
        (B, N, T, H), K, dtype = q.shape, k.shape[1], accumulator(q.dtype)
        q, k = turned_queries(rotate, q, pos[:, None]), rotate(k, pos[:, None])
        grouped = q.reshape(B, K, N // K, T, H).astype(dtype)
        x = logits.of(jnp.einsum("bkgth,bksh->bkgts", grouped, k.astype(dtype)), H)
        row, key = pos[:, None, None, :, None], pos[:, None, None, None]
        if logits.slopes is not None:
            x = x + jnp.asarray(logits.slopes, dtype).reshape(1, K, -1, 1, 1) * (key - row).astype(dtype)
        sees = logits.visible(pos, pos[:, None])[:, :, None]
        near = sees & ((key < sinks) | (row - key < recent))
        gate = gates[layer].astype(dtype)[None, :, None, None, None]
        nothing = None
        if logits.nothing is not None:
            nothing = logits.nothing.astype(dtype).reshape(1, K, -1, 1, 1)
        p = gate * _softmax(x, sees, nothing) + (1 - gate) * _softmax(x, near, nothing)
        out = jnp.einsum("bkgts,bksh->bkgth", p, v.astype(dtype))
        return out.reshape(B, N, T, v.shape[-1]).astype(v.dtype), cache, ()

    return attend


def _softmax(
    x: Float[Array, "B K G T S"], seen: Bool[Array, "B 1 1 T S"], nothing: Float[Array, "1 K G 1 1"] | None
) -> Float[Array, "B K G T S"]:
    """Probabilities of the keys that a row sees, beside a logit for nothing; zeros for one that sees none."""
    x = jnp.where(seen, x, jnp.finfo(x.dtype).min)
    if nothing is not None:
        x = jnp.concatenate([x, jnp.broadcast_to(nothing, (*x.shape[:-1], 1))], axis=-1)
    return jnp.where(seen, jax.nn.softmax(x, axis=-1)[..., : seen.shape[-1]], 0.0)


def distance(
    hidden: Callable[[Attend], Float[Array, "B T D"]],
    gates: Float[Array, "L K"],
    pos: Int[Array, "B T"],
    counts: Bool[Array, "B T"],
    *,
    sinks: Amount,
    recent: Size,
) -> Float[Array, ""]:
    """How far gates move the last hidden states of tokens that count: the mean square of a channel's difference.

    Args:
      hidden: the last hidden states of the texts as a function of attention, such as
        `lambda attend: model.states(params, ids, attend=attend)`.
      gates: of every layer and kv head.
      pos: positions, -1 for padding.
      counts: the tokens whose states are compared: those of answers that have to be found in the text.
      sinks, recent: as of `gated`.
    """
    how = {"sinks": sinks, "recent": recent}
    wanted = lax.stop_gradient(hidden(gated(jnp.ones_like(gates), pos, **how)))
    found = hidden(gated(gates, pos, **how))
    each = jnp.square((found - wanted).astype(gates.dtype)).mean(-1)
    return jnp.where(counts, each, 0.0).sum() / jnp.maximum(counts.sum(), 1).astype(each.dtype)


def penalty(gates: Float[Array, "L K"], weight: NonNegative = 0.05) -> Float[Array, ""]:
    """The loss that keeps gates small: `weight` times their L1 norm, a mean over heads, so that depth does not matter.

    The paper (Eq. 4) writes a sum over heads beside a distance that is a sum over tokens.

    Raises:
      ValueError: a negative weight.
    """
    return weight * jnp.abs(gates).mean()


kinds.doors(__name__)
