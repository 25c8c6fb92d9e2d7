"""Texts that are read token by token under a policy that evicts meanwhile: how likely every token is (RoCo, Fig. 5)."""

import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.drivers.attend import step
from kvjax.drivers.buckets import plan_request
from kvjax.drivers.loop import log_prob
from kvjax.drivers.state import empty_state
from kvjax.experiments.core.engine import Engine, Prompt
from kvjax.experiments.core.records import Line


@functools.partial(jax.jit, static_argnames=("model", "policy", "plan"))
def likelihoods(model: Any, params: Any, tokens: Any, lengths: Any, keys: Any, *, policy: Any, plan: Any) -> jax.Array:
    """The mean log-probability of each text's tokens but the first, read as `prefill(block=1)` reads a prompt."""
    T = tokens.shape[1]
    plan, hparams = plan_request(model.config, policy, lengths, T, 0, plan=plan)
    state = empty_state(model.config, policy, plan, hparams, lengths, 0, keys=keys, slots=True)

    def read(state, here):
        token, after, column = here
        there = column >= T - lengths
        valid, how = there.astype(jnp.int32), {"grow": True, "ends": False}
        logits, state, _ = step(model, params, token[:, None], state, valid, "prefill", **how)
        return state, jnp.where(there, log_prob(logits, after), 0.0)

    _, found = jax.lax.scan(read, state, (tokens.T[:-1], tokens.T[1:], jnp.arange(T - 1)))
    return found.sum(0) / (lengths - 1).astype(jnp.float32)


class Reader(Engine):
    """An engine for texts that nothing follows: their own tokens are predicted, each from what is kept before it."""

    def compile(self, full: Any = None) -> None:
        """Compiles ahead of time; these texts are read by every policy for itself."""
        B, T = self.batch_size, self.shape.width
        given = np.zeros((B, T), np.int32), np.full(B, T, np.int32), jax.random.split(jax.random.key(0), B)
        lowered = likelihoods.lower(self.model, self.params, *given, policy=self.policy, plan=self.plan)
        self._likelihoods = lowered.compile()

    def run(self, prompts: Sequence[Prompt], shown: Any = None, full: Any = None) -> tuple[list[list[Line]], None]:
        """Reads a batch of texts; raises ValueError for likelihoods that are no numbers."""
        arrays = self.rows(prompts)
        start = time.perf_counter()
        found = np.asarray(self._likelihoods(self.params, *arrays))
        seconds = (time.perf_counter() - start) / self.batch_size
        if not np.isfinite(found).all():
            raise ValueError(f"likelihoods are no numbers: {found.tolist()}; the model's logits are not")
        times = {"prefill_seconds": seconds, "decode_tokens_per_second": self.shape.width / seconds}
        line = lambda n, x: {"question": 0, "nll": float(-x), "tokens": n - 1, "prompt_tokens": n, **times}
        return [[line(len(p.tokens), x)] for p, x in zip(prompts, found, strict=False)], None
