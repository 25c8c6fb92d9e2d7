"""Softmaxes that rank tokens in place of the model's: `Rows(softmax=...)`. What a row reads keeps the model's."""

from typing import Literal

import jax.numpy as jnp

from kvjax.budgets import known
from kvjax.contract import AttentionInputs, Count, NonNegative, Positive, Size, value
from kvjax.pallas_kernels import Softmax


@value
class Noisy:
    r"""A softmax with noise and a temperature: $\mathrm{softmax}((x + \zeta) / \tau_t)$ (Keyformer, arXiv 2403.09054).

    $\tau_t = \tau_0 + t (\tau_1 - \tau_0) / T$: $t$ is 0 for the whole prompt and counts decode steps, $T$ is the
    number of new tokens that the run is planned for.

    Attributes:
      tau: temperatures of the prompt and of the last new token.
      noise: "gumbel", "gaussian" or "constant" of the same mean and deviation, or "none".
      per: "call" draws noise for every row and key, "key" once for every key.
      tau_delta: what a decode step adds to the temperature; None for $(\tau_1 - \tau_0) / T$.
    """

    tau: tuple[Positive, Positive] = (1.0, 2.0)
    noise: Literal["gumbel", "gaussian", "constant", "none"] = "gumbel"
    per: Literal["call", "key"] = "call"
    tau_delta: float | None = None

    def __call__(self, inputs: AttentionInputs) -> Softmax:
        """The softmax for the rows of this call."""
        ctx, drawn = inputs.ctx, self.noise in ("gumbel", "gaussian")
        planned = jnp.maximum(ctx.max_new_tokens, 1).astype(jnp.float32)
        delta = (self.tau[1] - self.tau[0]) / planned if self.tau_delta is None else jnp.float32(self.tau_delta)
        tau = self.tau[0] + (delta * ctx.step.astype(jnp.float32))[:, None, None]
        return Softmax(
            multiplier=jnp.broadcast_to(1.0 / tau, (*inputs.kv.pos.shape[:2], inputs.pos.shape[1])),
            seed=ctx.seed() if drawn else None,
            noise=None if self.noise == "none" else self.noise,
            per=self.per,
        )


@value
class EntropyScaled:
    r"""A softmax of constant entropy: logits are scaled so that every row has that of `k` tokens (AhaKV, Eq. 12).

    A row that sees $i$ tokens has its raw products multiplied by $\sqrt{2 \ln(i / k) / d}$ in place of $1 / \sqrt d$
    (arXiv 2506.03762). Rows with $i \le k$ keep the model's softmax.

    Attributes:
      k: tokens, usually the budget.
      apply: "raw" scales raw products, "scaled" those that are divided by $\sqrt d$ already.
      floor: the least factor, in units of the model's; None for no bound.
      seen: $i$ is the row's "position" and itself, or the live tokens of the "cache".
    """

    k: Count
    apply: Literal["raw", "scaled"] = "raw"
    floor: NonNegative | None = None
    seen: Literal["position", "cache"] = "position"

    def __call__(self, inputs: AttentionInputs) -> Softmax:
        """The softmax for the rows of this call."""
        kv, k = inputs.kv, jnp.maximum(known(self.k, inputs.ctx), 1)
        seen = jnp.broadcast_to(inputs.pos[:, None] + 1, (*kv.pos.shape[:2], inputs.pos.shape[1]))
        seen = seen if self.seen == "position" else jnp.minimum(seen, kv.num_live[..., None])
        ratio = seen.astype(jnp.float32) / k[:, None, None].astype(jnp.float32)
        factor = jnp.sqrt(2.0 * jnp.log(jnp.maximum(ratio, 1.0)))
        factor = factor if self.apply == "raw" else factor * inputs.q.shape[-1] ** -0.5
        factor = factor if self.floor is None else jnp.maximum(factor, self.floor)
        return Softmax(multiplier=jnp.where(ratio > 1, factor, 1.0))


@value
class SeesAll:
    """A softmax without a causal mask: rows see later keys too (the released code of NaCl)."""

    def __call__(self, inputs: AttentionInputs) -> Softmax:
        """The softmax for the rows of this call."""
        return Softmax(causal=False)


@value
class OutsideWindow:
    """A softmax over the keys before the last `window` tokens alone (the text of Ada-KV, the code of R-KV)."""

    window: Size

    def __call__(self, inputs: AttentionInputs) -> Softmax:
        """The softmax for the rows of this call."""
        return Softmax(before=inputs.ctx.length - self.window)
