"""What a policy makes of prompts: text, likelihoods of text, and how long that takes."""

import dataclasses
import functools
import time
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree

import kvjax
from kvjax import models
from kvjax.drivers.generation import Model, check_block
from kvjax.experiments.evaluation.evaluate import read_prompts


@functools.partial(jax.jit, static_argnames=("model", "steps", "ends"))
def _generate(
    model: Model, params: PyTree[Any], logits: Float[Array, "B V"], state: kvjax.KVState, *, steps: int, ends: bool
) -> kvjax.Generation:
    return kvjax.generate_from(model, params, logits, state, max_new_tokens=steps, eos_ids=None if ends else ())


@functools.partial(jax.jit, static_argnames=("model",))
def _score(
    model: Model, params: PyTree[Any], logits: Float[Array, "B V"], state: kvjax.KVState, tokens: Int[Array, "B M"]
) -> Float[Array, "B M"]:
    """Log-probabilities of tokens that follow a prompt, each read by a decode step."""
    after, _ = kvjax.feed(model, params, tokens[:, :-1], state)
    logits = jnp.concatenate([logits[:, None], after], axis=1)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How a run reads prompts.

    Attributes:
      length: tokens of a prompt, at most; longer ones lose their middle.
      batch_size: prompts that run together.
      beams: hypotheses of a beam search, 1 for greedy generation.
      seed: of random draws.
    """

    length: int
    batch_size: int
    beams: int = 1
    seed: int = 0


class Engine:
    """A model that reads prompts of any text under any policy."""

    def __init__(self, model: Any, params: PyTree[Any], tokenizer: Any, sizes: Sizes):
        self.model, self.params, self.tokenizer, self.sizes = model, params, tokenizer, sizes

    def encode(self, text: str) -> tuple[int, ...]:
        """A prompt's tokens; of one that is too long, its first and its last half of the length, as LongBench cuts."""
        ids, room = models.encode(self.tokenizer, text), self.sizes.length
        if len(ids) <= room:
            return tuple(ids)
        return (*ids[: room // 2], *ids[len(ids) - (room - room // 2) :])

    def width(self, prompts: Sequence[Sequence[int]]) -> int:
        """The least power of two, at most the length, that all prompts fit in: one program for all batches."""
        longest = max(map(len, prompts))
        return max(longest, min(1 << (longest - 1).bit_length(), self.sizes.length))

    def check(self, policy: kvjax.Policy, block: int | None, width: int, lengths: Sequence[int], steps: int) -> None:
        """Tries whether the policy can read prompts of these lengths.

        Raises:
          ValueError: sizes that it cannot work with.
        """
        plan = self._plan(policy, width, lengths, steps)
        check_block(plan, block)

    def generate(
        self, policy: kvjax.Policy, block: int | None, prompts: Sequence[Sequence[int]], steps: int, width: int,
        *, timed: bool = False,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """What follows each of a batch of prompts, and its cost; a short batch is filled with copies of its first.

        A batch that is timed runs as it is, greedily and past end tokens.
        """
        B = len(prompts) if timed else self.sizes.batch_size
        tokens, lengths, keys = self._batch(prompts, width, B)
        plan = self._plan(policy, width, lengths, steps)
        start = time.perf_counter()
        if self.sizes.beams > 1 and not timed:
            found: Any = kvjax.generate_beams(
                self.model, self.params, tokens, lengths=lengths, policy=policy, key=keys,
                num_beams=self.sizes.beams, max_new_tokens=steps,
            )  # fmt: skip
            ids, ends_at = np.asarray(found.tokens)[:, 0], np.asarray(found.lengths)[:, 0]
            read, state = None, found.state
        else:
            logits, state = read_prompts(self.model, self.params, tokens, lengths, keys, plan=plan, block=block)
            jax.block_until_ready(logits)
            read = time.perf_counter() - start
            made = _generate(self.model, self.params, logits, state, steps=steps, ends=not timed)
            ids, ends_at, state = np.asarray(made.tokens), np.asarray(made.lengths), made.state
        seconds = time.perf_counter() - start
        live, size = np.asarray(state.num_live).mean((1, 2)), state.kv_bytes // len(state.length)
        return [
            {
                "output": self.tokenizer.decode(ids[i, : ends_at[i]].tolist(), skip_special_tokens=True),
                "prompt_tokens": len(p),
                "new_tokens": int(ends_at[i]),
                "live": float(live[i]),  # after the last token
                "kv_bytes": size,
                "prefill_seconds": None if read is None else read / B,
                "seconds": seconds / B,
            }
            for i, p in enumerate(prompts)
        ]

    def score(
        self, policy: kvjax.Policy, block: int | None, prompts: Sequence[Sequence[int]], scored: int, width: int
    ) -> list[dict[str, Any]]:
        """The mean negative log-likelihood of the last `scored` tokens of each text, read after the others."""
        heads = [p[:-scored] for p in prompts]
        tokens, lengths, keys = self._batch(heads, width, self.sizes.batch_size)
        plan = self._plan(policy, width, lengths, scored)
        tails = self._filled([p[-scored:] for p in prompts], self.sizes.batch_size)
        logits, state = read_prompts(self.model, self.params, tokens, lengths, keys, plan=plan, block=block)
        live, size = np.asarray(state.num_live).mean((1, 2)), state.kv_bytes // len(state.length)
        logp = np.asarray(_score(self.model, self.params, logits, state, jnp.asarray(tails)), np.float64)
        return [
            {"nll": float(-logp[i].mean()), "prompt_tokens": len(p), "live": float(live[i]), "kv_bytes": size}
            for i, p in enumerate(heads)
        ]

    def _plan(self, policy: kvjax.Policy, width: int, lengths: Any, steps: int) -> kvjax.CachePlan:
        return kvjax.make_plan(
            self.model.config, policy, prompt_len=width, max_new_tokens=steps, lengths=sorted({int(n) for n in lengths})
        )

    def _filled(self, rows: Sequence[Any], size: int) -> list[Any]:
        return [*rows, *[rows[0]] * (size - len(rows))]

    def _batch(self, prompts: Sequence[Sequence[int]], width: int, size: int) -> tuple[Any, Any, Key[Array, "B"]]:
        rows = self._filled(prompts, size)
        tokens, lengths = models.pad_left(rows, width=width)
        draws = np.array([zlib.crc32(str(tuple(p)).encode()) for p in rows], np.uint32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(self.sizes.seed), jnp.asarray(draws))
        return tokens, lengths, keys
