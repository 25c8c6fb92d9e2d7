"""FastGen: every head is profiled on the prompt, and gets the cheapest set of tokens that serves it."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvjax.core.contract import EMPTY, PerHead, PerSlot, Policy, Reads, value
from kvjax.core.decide.select import best
from kvjax.core.observe import Rows, Unmasked, on_new_slots
from kvjax.pallas_kernels import recovered_attention

SPECIAL, PUNCTUATION, FREQUENT, LOCAL, FULL = range(5)  # each keeps what those before it keep, and more
UNKNOWN, PLAIN, MARK, DECLARED = range(4)


@value
class Kinds:
    """Which of the new tokens are special or punctuation, by their ids: "B K S", 0 for slots that are not new."""

    special: tuple[int, ...]
    punctuation: tuple[int, ...]

    def __call__(self, inputs):
        ids = inputs.ctx.tokens
        kind = jnp.where(jnp.isin(ids, jnp.asarray(self.punctuation, jnp.int32)), MARK, PLAIN)
        kind = jnp.where(jnp.isin(ids, jnp.asarray(self.special, jnp.int32)), DECLARED, kind)
        kind = jnp.where(inputs.pos == EMPTY, UNKNOWN, kind)
        return on_new_slots(kind, inputs, UNKNOWN).astype(jnp.int8)


@value
class Whole:
    """The inputs itself, for policies that compute with queries."""

    def __call__(self, inputs):
        return inputs


class FastGen(Policy):
    """Every kv head keeps the smallest set of a nested list that recovers enough of its attention to the prompt."""

    special: tuple[int, ...]
    punctuation: tuple[int, ...]
    frequent: float = 0.3
    local: float = 0.3
    recovery: float = 0.95

    def observe(self, phase):
        return Rows(), Kinds(self.special, self.punctuation), *((Whole(),) if phase == "prefill" else ())

    def sizes(self, info, lengths):
        every = np.floor(self.frequent * np.arange(info.prompt_len + info.max_new_tokens + 1) + 1e-9)
        local = np.floor(self.local * lengths + 1e-9)
        data = jnp.asarray(np.repeat(every[None], len(lengths), 0), jnp.int32), jnp.asarray(local, jnp.int32)
        return dataclasses.replace(super().sizes(info, lengths), hparams=data)

    def memory(self, info):
        return PerSlot(dtype=jnp.int8), PerSlot(), PerHead(dtype=jnp.int32)

    def update(self, kv, stats, ctx):
        kinds, mass, strategy = kv.memory
        kinds = jnp.where(kinds == UNKNOWN, stats[Kinds(self.special, self.punctuation)], kinds)
        mass, strategy = mass + stats[Rows()], strategy
        frequent = jnp.take_along_axis(ctx.hparams[0], ctx.length[:, None], 1)
        level = jnp.full(kv.pos.shape, FULL)
        often = best(mass, kv.pos, jnp.broadcast_to(frequent, kv.pos.shape[:2]))
        late = kv.pos >= (ctx.length - ctx.hparams[1])[:, None, None]
        for at, members in (
            (LOCAL, late),
            (FREQUENT, often),
            (PUNCTUATION, kinds == MARK),
            (SPECIAL, kinds == DECLARED),
        ):
            level = jnp.where(members, at, level)
        level = jnp.where(kv.live, level, FULL + 1)
        if ctx.phase == "prefill":
            m, sets = stats[Whole()], jnp.stack([level <= s for s in (SPECIAL, PUNCTUATION, FREQUENT, FREQUENT)])
            how = {
                "within": (None, None, None, ctx.hparams[1]),
                "scale": m.scale,
                "window": m.window,
                "softcap": m.softcap,
            }
            enough = recovered_attention(m.q, kv.k, m.pos, kv.pos, sets, bias=m.bias, **how).mass >= self.recovery
            strategy = jnp.where(enough.any(-1), enough.argmax(-1), FULL)
        kv = kv.replace(memory=(kinds, mass, strategy.astype(jnp.int32)))
        return kv.keep(level <= strategy[..., None])


def fastgen(special, punctuation, *, frequent=0.3, local=0.3, recovery=0.95):
    """The cheapest set of tokens that serves a head (Ge et al., arXiv 2310.01801)."""
    return FastGen(tuple(special), tuple(punctuation), frequent, local, recovery)


class NextStepMask(Policy):
    """Hides tokens from the next row instead of evicting them, as the released H2O simulation does. Frees no memory."""

    heavy: int
    recent: int

    def observe(self, phase):
        return (Rows(),)

    def memory(self, info):
        return PerSlot()

    def update(self, kv, stats, ctx):
        return kv.replace(memory=kv.memory + stats[Rows()])

    def reads(self, kv, inputs, ctx):
        if inputs.q.shape[2] > 1:
            return None
        length = ctx.length[:, None, None]
        old = jnp.where(kv.live & (kv.pos < length - 1 - self.recent), kv.pos, EMPTY)
        heavy = best(kv.memory, old, jnp.full(kv.pos.shape[:2], self.heavy))
        return Reads(
            jnp.where(
                length - 1 <= self.heavy + self.recent, kv.live, kv.live & (heavy | (kv.pos >= length - self.recent))
            )
        )


class StepwiseMask(Policy):
    """Greedy eviction while the text is read, simulated by masks: read prompts with `block=1` (H2O's stepwise mask)."""

    heavy: int
    recent: int

    def observe(self, phase):
        return (Unmasked(Rows()),)

    def memory(self, info):
        return PerSlot()

    def _heavy(self, kv, ctx):
        length = ctx.length[:, None, None]
        newest = kv.pos == length - 1
        old = jnp.where(newest, EMPTY, kv.pos)
        kept = best(kv.memory, old, jnp.full(kv.pos.shape[:2], max(self.heavy - 1, 0))) | newest
        return jnp.where(length <= self.heavy, kv.live, kept)

    def update(self, kv, stats, ctx):
        return kv.replace(memory=jnp.where(self._heavy(kv, ctx), kv.memory + stats[Unmasked(Rows())], 0.0))

    def reads(self, kv, inputs, ctx):
        return Reads(kv.live & (self._heavy(kv, ctx) | (kv.pos >= (ctx.length - 1)[:, None, None] - self.recent)))
