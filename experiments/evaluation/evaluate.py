"""Runs one policy at one budget over batches of examples, and times it."""

import dataclasses
import functools
import time
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key, PyTree

import kvjax
from experiments.tasks import Example, Protocol
from experiments.tasks.perplexity import SCORED
from kvjax.drivers.generation import Model, check_block
from models import pad_left


@functools.partial(jax.jit, static_argnames=("model", "plan", "block"))
def _prefill(
    model: Model,
    params: PyTree[Any],
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    keys: Key[Array, "B"],
    *,
    plan: kvjax.CachePlan,
    block: int | None,
) -> tuple[Float[Array, "B V"], kvjax.KVState]:
    return kvjax.prefill(model, params, tokens, plan, lengths=lengths, key=keys, block=block)


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames=("state",))
def _continue(
    model: Model,
    params: PyTree[Any],
    logits: Float[Array, "B V"],
    state: kvjax.KVState,
    forced: Int[Array, "B M"],
    num_forced: Int[Array, "B"],
    num_steps: Int[Array, ""],
) -> tuple[Int[Array, "B M"], Float[Array, "B M"], Int[Array, "B M"], kvjax.KVState]:
    """Reads `num_forced` given tokens, then generates greedily, `num_steps` tokens in all.

    Returns the tokens, their log-probabilities, the most live slots of any head at every step, and the state.
    """

    def step(carry):
        i, logits, state, tokens, logp, live = carry
        token = jnp.where(i < num_forced, forced[:, i], jnp.argmax(logits, axis=-1).astype(jnp.int32))
        here = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=-1)[:, 0]
        logits, state = kvjax.decode_step(model, params, token, state)
        most = state.num_live.max((1, 2))
        return i + 1, logits, state, tokens.at[:, i].set(token), logp.at[:, i].set(here), live.at[:, i].set(most)

    start = (jnp.int32(0), logits, state, jnp.zeros_like(forced), jnp.zeros(forced.shape), jnp.zeros_like(forced))
    _, _, state, tokens, logp, live = lax.while_loop(lambda c: c[0] < num_steps, step, start)
    return tokens, logp, live, state


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one policy at one budget takes; sizes are static, for one batch.

    Attributes:
      slots: slots allocated for one sequence, over all layers and kv heads.
      kv_bytes: bytes of keys and values for one sequence.
      prefill_peak_bytes, decode_peak_bytes: arguments, results and temporaries of the compiled programs, for one batch;
        parameters included. None where the backend does not say.
    """

    slots: int
    kv_bytes: int
    prefill_peak_bytes: int | None
    decode_peak_bytes: int | None


class Evaluator:
    """A policy compiled for batches of one shape."""

    def __init__(
        self,
        model: Any,
        params: PyTree[Any],
        policy: kvjax.Policy,
        *,
        width: int,
        batch_size: int,
        protocol: Protocol,
        lengths: Sequence[int],
        seed: int,
        tokenizer: Any,
        block: int | None = None,
    ):
        """Plans the run; `compile` must come before `run`.

        Raises:
          ValueError: sizes that the policy cannot work with.
        """
        self.model, self.params, self.batch_size, self.protocol, self.width = model, params, batch_size, protocol, width
        self.seed, self.tokenizer, self.block = seed, tokenizer, block
        self._prefill: Any = None
        self._continue: Any = None
        self.plan = kvjax.make_plan(
            model.config, policy, prompt_len=width, max_new_tokens=SCORED, lengths=sorted(set(lengths))
        )
        check_block(self.plan, block)

    def compile(self) -> Cost:
        """Compiles both programs ahead of time, so that no timing contains it."""
        B = self.batch_size
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), B))
        lowered = _prefill.lower(
            self.model, self.params, ints(B, self.width), ints(B), keys, plan=self.plan, block=self.block
        )
        self._prefill = lowered.compile()
        logits, state = lowered.out_info
        as_struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
        logits, state = jax.tree.map(as_struct, (logits, state))
        self._continue = _continue.lower(
            self.model, self.params, logits, state, ints(B, SCORED), ints(B), ints()
        ).compile()
        size = lambda x: x.size * x.dtype.itemsize
        kv_bytes = sum(size(x) for layer in state.layers for x in (layer.k, layer.v)) // B
        return Cost(self.plan.num_slots, kv_bytes, peak_bytes(self._prefill), peak_bytes(self._continue))

    def release(self) -> None:
        """Forgets the compiled programs."""
        self._prefill = self._continue = None

    def run(self, examples: Sequence[Example]) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
        """Results of one batch, a dict an example, and the positions "B K S" that every layer holds after the prompt.

        A short batch is filled up with copies of its first example.
        """
        B = self.batch_size
        batch = [*examples, *[examples[0]] * (B - len(examples))]
        questions = [e.questions[0] for e in batch]
        asked = [q.asked(e.context, self.protocol) for e, q in zip(batch, questions, strict=True)]
        prompts, forced = zip(*asked, strict=True)
        answers = [q.max_new_tokens for q in questions]
        num_forced = np.array([len(f) for f in forced], np.int32)
        num_steps = int(max(n + a for n, a in zip(num_forced, answers, strict=True)))
        if num_steps > SCORED:
            raise ValueError(
                f"{batch[0].task} needs {num_steps} tokens after the prompt, but runs are planned for {SCORED}; "
                "the tokenizer splits the question or its answers into too many pieces"
            )
        tokens, lengths = pad_left(prompts, width=self.width)
        forced_ids = np.zeros((B, SCORED), np.int32)
        for row, f in zip(forced_ids, forced, strict=True):
            row[: len(f)] = f
        keys = jnp.stack([self._key(e) for e in batch])

        start = time.perf_counter()
        logits, state = self._prefill(self.params, tokens, lengths, keys)
        jax.block_until_ready(logits)
        prefill_seconds = time.perf_counter() - start
        positions = [np.asarray(layer.head_pos) for layer in state.layers]
        live = np.asarray(state.num_live.mean((1, 2), dtype=jnp.float32))
        start = time.perf_counter()
        tokens, logp, most, _ = self._continue(self.params, logits, state, forced_ids, num_forced, np.int32(num_steps))
        tokens, logp, most = np.asarray(tokens), np.asarray(logp), np.asarray(most)
        decode_seconds = time.perf_counter() - start

        results = []
        for i, e in enumerate(examples):
            result: dict[str, Any] = {**dict(e.meta), "prompt_tokens": int(lengths[i]), "live": float(live[i])}
            result["most_live"] = int(most[i, :num_steps].max())
            result["prefill_seconds"] = prefill_seconds / B
            result["decode_tokens_per_second"] = B * num_steps / decode_seconds
            q, end = questions[i], int(num_forced[i])
            if q.continuation:
                result["nll"] = float(-logp[i, end - len(q.continuation) : end].mean())
            else:
                output = self.tokenizer.decode(tokens[i, end : end + answers[i]].tolist())
                result |= {"score": q.score(output), "output": output, "references": list(q.references)}
            results.append(result)
        return results, positions

    def _key(self, e: Example) -> Key[Array, ""]:
        key = jax.random.fold_in(jax.random.key(self.seed), zlib.crc32(e.task.encode()))
        return jax.random.fold_in(key, e.index)


def peak_bytes(compiled: Any) -> int | None:
    """Arguments, results and temporaries of a compiled program; None where the backend does not say."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    return int(
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
