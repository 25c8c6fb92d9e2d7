"""kvjax's worker, `python -m kvjax.experiments.bench.peers.ours MODEL DTYPE THREADS`: it answers standard input."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import models
from kvjax.experiments.bench.peers.protocol import serve
from kvjax.experiments.bench.policies import make_policy
from kvjax.experiments.core.provenance import device_info
from kvjax.generation.loop import begin, decoded


@functools.partial(jax.jit, static_argnames="model")
def _step(model: models.LanguageModel, params: Any, token: jax.Array, state: kvjax.State) -> Any:
    logits, state = kvjax.decode_step(model, params, token, state)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), state


class Jobs:
    """Makes jobs ready to run.

    Args:
      checkpoint: a model's directory.
      dtype: of its parameters, activations and caches.
    """

    def __init__(self, checkpoint: str, dtype: str):
        self._model, self._params = models.load(checkpoint, dtype=dtype)
        self._read: tuple[Any, Any] = None, None  # the prompt that was read last, and what came of it

    def __call__(self, job: dict[str, Any]) -> Callable[[], int]:
        """A job, the fields of `kvjax.experiments.bench.peers.rows.Job`: compiled, and run once if it decodes."""
        if job["kind"] == "prefill":
            return self._prefilling(job)
        run = self._decoding(job)
        run()
        return run

    def _prefilling(self, job: dict[str, Any]) -> Callable[[], int]:
        model, T = self._model, job["length"]
        tokens = jnp.asarray(np.random.default_rng(0).integers(4, model.config.vocab_size, (1, T)), jnp.int32)
        how: dict[str, Any] = {"policy": make_policy(job["what"], job["budget"]), "lengths": np.full(1, T)}
        how["max_new_tokens"] = job["steps"]

        def prefilled(params: Any, tokens: jax.Array) -> Any:
            if job["how"] == "measure":
                return kvjax.forward(model, params, tokens, kvjax.start(model, **how))
            return kvjax.prefill(model, params, tokens, **how)

        compiled = jax.jit(prefilled).lower(self._params, tokens).compile()

        def run() -> int:
            logits, state, *_ = jax.block_until_ready(compiled(self._params, tokens))
            self._read = _prompt(job), (logits, state)
            return int(sum(kv.k.nbytes + kv.v.nbytes for kv in state.layers))

        return run

    def _decoding(self, job: dict[str, Any]) -> Callable[[], int]:
        if self._read[0] != _prompt(job):
            self._prefilling({**job, "how": "evict"})()
        model, params, rows, (logits, state) = self._model, self._params, [0] * job["batch"], self._read[1]
        at = begin(logits[np.array(rows)], state[rows])

        def loop() -> int:  # that of `generate`
            jax.block_until_ready(decoded(model, params, at, None, None, chunk=job["steps"]))
            return 0

        def steps() -> int:
            token, state = at.token, at.state
            for _ in range(job["steps"]):
                token, state = _step(model, params, token, state)
            jax.block_until_ready(token)
            return 0

        return steps if job["how"] == "steps" else loop


def _prompt(job: dict[str, Any]) -> tuple[Any, ...]:
    """What jobs that decode after the same prompt share."""
    return job["what"], job["how"] == "measure", job["length"], job["budget"]


if __name__ == "__main__":
    device = device_info()
    del device["cpus"]  # as many as it was started on
    serve(Jobs(*sys.argv[1:3]), {"device": device})
