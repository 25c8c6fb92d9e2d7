"""kvjax's worker of `experiments/bench/peers.py`.

    python -m kvjax.experiments.bench.peer_kvjax CHECKPOINT

It answers requests from standard input (`kvjax.experiments.bench.peer_protocol`).
"""

import dataclasses
import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kvjax
from kvjax import methods, models
from kvjax.experiments.bench.peer_protocol import Prepared, serve
from kvjax.experiments.core.engine import peak_bytes
from kvjax.experiments.core.provenance import device_info


def make_policy(name: str, budget: float) -> kvjax.Policy:
    """A method at a budget: a share of the prompt up to 1, else a number of tokens. "full" has none."""
    if name == "full":
        return methods.full()
    count = budget if budget <= 1 else round(budget)
    around = {"criticalkv": methods.criticalkv, "chunkkv": methods.chunkkv}  # SnapKV
    return around[name](methods.snapkv(count)) if name in around else getattr(methods, name)(count)


@functools.partial(jax.jit, static_argnames=("model", "steps"))
def advance(
    model: models.LanguageModel, params: Any, token: jax.Array, state: kvjax.State, steps: int
) -> tuple[jax.Array, kvjax.State]:
    """Greedy decoding in one scan; returns the last token and the state after."""

    def step(carry, _):
        token, state = carry
        logits, state = kvjax.decode_step(model, params, token, state)
        return (jnp.argmax(logits, axis=-1).astype(jnp.int32), state), None

    carry, _ = lax.scan(step, (token, state), length=steps)
    return carry


class Jobs:
    """Makes jobs ready to run.

    Args:
      checkpoint: a model's directory.
    """

    def __init__(self, checkpoint: str):
        self._model, self._params = models.load(checkpoint)

    def __call__(self, job: dict[str, Any]) -> Prepared:
        """A job, the fields of `kvjax.experiments.bench.peer_rows.Job`, compiled and run once.

        Raises:
          ValueError: a kind that this worker does not know.
        """
        jax.clear_caches()  # so that a program of an earlier job is compiled again, and timed
        model, params = self._model, self._params
        if job["layers"] is not None:
            model = models.LanguageModel(dataclasses.replace(model.config, num_layers=job["layers"]))
            params = jax.jit(model.init)(jax.random.key(0))
        policy = make_policy(job["what"], job["budget"])
        rng = np.random.default_rng(0)
        tokens = jnp.asarray(rng.integers(4, model.config.vocab_size, (job["batch"], job["length"])), jnp.int32)
        if job["kind"] == "prefill":
            read, facts = _compiled_prefill(model, params, tokens, policy, job, room=0)
            run = functools.partial(_kept, read, params, tokens)
        elif job["kind"] in ("decode", "stream"):
            run, facts = _decoding(model, params, tokens, policy, job)
        else:
            raise ValueError(f"kvjax has no job {job['kind']!r}")
        run()
        return Prepared(run, facts)


def _compiled_prefill(
    model: models.LanguageModel, params: Any, tokens: jax.Array, policy: kvjax.Policy, job: dict[str, Any], *, room: int
) -> tuple[Any, dict[str, float]]:
    """Prefill ahead of time, with room for so many tokens more, and what is known of the program."""
    B, T = tokens.shape
    how: dict[str, Any] = {"policy": policy, "lengths": np.full(B, T), "max_new_tokens": room}

    def measured(params, tokens):
        return kvjax.forward(model, params, tokens, kvjax.start(model, **how))

    read = measured if job["how"] == "measure" else lambda params, tokens: kvjax.prefill(model, params, tokens, **how)
    return _compile(jax.jit(read), params, tokens)


def _decoding(
    model: models.LanguageModel, params: Any, tokens: jax.Array, policy: kvjax.Policy, job: dict[str, Any]
) -> tuple[Any, dict[str, float]]:
    steps = job["steps"]
    before = -(-job["after"] // steps)
    read, _ = _compiled_prefill(model, params, tokens, policy, job, room=(before + 1) * steps)
    logits, state = read(params, tokens)
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    go_on, facts = _compile(advance, model, params, token, state, steps)
    for _ in range(before):
        token, state = go_on(params, token, state)

    def run() -> int:
        jax.block_until_ready(go_on(params, token, state))
        return 0

    return run, facts


def _compile(function: Any, *arguments: Any) -> tuple[Any, dict[str, float]]:
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


def _about() -> dict[str, Any]:
    device = device_info()
    del device["cpus"]  # as many as it was started on
    return {"device": device}


if __name__ == "__main__":
    serve(Jobs(sys.argv[1]), _about)
