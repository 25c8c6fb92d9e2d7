"""kvjax's worker: `python -m kvjax.experiments.bench.peers.ours MODEL DTYPE` answers requests from standard input."""

import dataclasses
import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import methods, models
from kvjax.experiments.bench.peers.protocol import Prepared, serve
from kvjax.experiments.bench.speed import advance
from kvjax.experiments.core.engine import peak_bytes
from kvjax.experiments.core.provenance import device_info


def make_policy(name: str, budget: float) -> kvjax.Policy:
    """A method at a budget: a share of the prompt up to 1, else a number of tokens. "full" has none."""
    if name == "full":
        return methods.full()
    count = budget if budget <= 1 else round(budget)
    around = {"criticalkv": methods.criticalkv, "chunkkv": methods.chunkkv}  # SnapKV
    return around[name](methods.snapkv(count)) if name in around else getattr(methods, name)(count)


class Jobs:
    """Makes jobs ready to run.

    Args:
      checkpoint: a model's directory.
      dtype: of its parameters, activations and caches.
    """

    def __init__(self, checkpoint: str, dtype: str):
        self._model, self._params = models.load(checkpoint, dtype=dtype)

    def __call__(self, job: dict[str, Any]) -> Prepared:
        """A job, the fields of `kvjax.experiments.bench.peers.rows.Job`, compiled and run once.

        Raises:
          ValueError: a kind that this worker does not know.
        """
        if job["kind"] not in ("prefill", "decode", "stream"):
            raise ValueError(f"kvjax has no job {job['kind']!r}")
        jax.clear_caches()  # so that a program of an earlier job is compiled again, and timed
        model, params = self._model, self._params
        if job["layers"] is not None:
            model = models.LanguageModel(dataclasses.replace(model.config, num_layers=job["layers"]))
            params = jax.jit(model.init)(jax.random.key(0))
        B, T, steps = job["batch"], job["length"], job["steps"]
        tokens = jnp.asarray(np.random.default_rng(0).integers(4, model.config.vocab_size, (B, T)), jnp.int32)
        before = -(-job["after"] // steps) if steps else 0
        room = (before + 1) * steps
        how: dict[str, Any] = {"policy": make_policy(job["what"], job["budget"]), "lengths": np.full(B, T)}
        how["max_new_tokens"] = room

        def measured(params, tokens):
            return kvjax.forward(model, params, tokens, kvjax.start(model, **how))

        evicted = lambda params, tokens: kvjax.prefill(model, params, tokens, **how)
        read, facts = _compile(jax.jit(measured if job["how"] == "measure" else evicted), params, tokens)
        if job["kind"] == "prefill":
            run = functools.partial(_kept, read, params, tokens)
        else:
            logits, state = read(params, tokens)
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            go_on, facts = _compile(advance, model, params, token, state, steps)
            for _ in range(before):
                token, state = go_on(params, token, state)

            def run() -> int:
                jax.block_until_ready(go_on(params, token, state))
                return 0

        run()
        return Prepared(run, facts)


def _compile(function: Any, *arguments: Any) -> tuple[Any, dict[str, float]]:
    """A program ahead of time, and what is known of it."""
    start = time.perf_counter()
    compiled = function.lower(*arguments).compile()
    facts: dict[str, float] = {"compile_seconds": time.perf_counter() - start}
    memory, peak = compiled.memory_analysis(), peak_bytes(compiled)
    if memory is not None and peak is not None:
        facts |= {"temp_bytes": memory.temp_size_in_bytes, "peak_bytes": peak}
    return compiled, facts


def _kept(read: Any, params: Any, tokens: jax.Array) -> int:
    """Runs a prefill; bytes of keys and values of its state."""
    _, state, *_ = jax.block_until_ready(read(params, tokens))
    return int(sum(kv.k.nbytes + kv.v.nbytes for kv in state.layers))


if __name__ == "__main__":
    device = device_info()
    del device["cpus"]  # as many as it was started on
    serve(Jobs(*sys.argv[1:]), {"device": device})
