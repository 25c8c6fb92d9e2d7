"""What a policy makes of prompts: text, likelihoods of text, and how long that takes."""

import dataclasses
import time
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

import kvjax
from kvjax import models
from kvjax.drivers.checks import check_block


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
        check_block(kvjax.make_plan(self.model.config, policy, lengths, width, steps), block, width)

    def generate(
        self, policy: kvjax.Policy, block: int | None, prompts: Sequence[Sequence[int]], steps: int, width: int,
        *, timed: bool = False,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """What follows each of a batch of prompts, and its cost; a short batch is filled with copies of its first.

        A batch that is timed runs as it is, greedily and past end tokens.
        """
        B = len(prompts) if timed else self.sizes.batch_size
        tokens, options = self._batch(prompts, width, B)
        options |= {"policy": policy, "max_new_tokens": steps}
        start = time.perf_counter()
        if self.sizes.beams > 1 and not timed:
            found: Any = kvjax.generate_beams(self.model, self.params, tokens, num_beams=self.sizes.beams, **options)
            ids, ends_at = np.asarray(found.tokens)[:, 0], np.asarray(found.lengths)[:, 0]
            read, state = None, found.state
        else:
            logits, state = kvjax.prefill(self.model, self.params, tokens, block=block, **options)
            jax.block_until_ready(logits)
            read = time.perf_counter() - start
            ends = () if timed else None
            made = kvjax.generate_from(self.model, self.params, logits, state, max_new_tokens=steps, eos_ids=ends)
            ids, ends_at, state = np.asarray(made.tokens), np.asarray(made.lengths), made.state
        seconds = time.perf_counter() - start
        live, size = _sizes(state)
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
        tokens, options = self._batch(heads, width, self.sizes.batch_size)
        tails = np.array(self._filled([p[-scored:] for p in prompts], self.sizes.batch_size))
        options |= {"policy": policy, "max_new_tokens": scored, "block": block}
        logits, state = kvjax.prefill(self.model, self.params, tokens, **options)
        live, size = _sizes(state)
        logp = np.asarray(kvjax.score(self.model, self.params, tails, logits, state)[0], np.float64)
        return [
            {"nll": float(-logp[i].mean()), "prompt_tokens": len(p), "live": float(live[i]), "kv_bytes": size}
            for i, p in enumerate(heads)
        ]

    def _filled(self, rows: Sequence[Any], size: int) -> list[Any]:
        return [*rows, *[rows[0]] * (size - len(rows))]

    def _batch(self, prompts: Sequence[Sequence[int]], width: int, size: int) -> tuple[Any, dict[str, Any]]:
        """Prompts as one array, with their lengths and keys."""
        rows = self._filled(prompts, size)
        tokens, lengths = models.pad_left(rows, width=width)
        draws = np.array([zlib.crc32(str(tuple(p)).encode()) for p in rows], np.uint32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(self.sizes.seed), jnp.asarray(draws))
        return tokens, {"lengths": lengths, "key": keys}


def _sizes(state: kvjax.State) -> tuple[Any, int]:
    """Live tokens of every sequence on average over layers and heads, and bytes of a sequence's keys and values."""
    live = np.mean([np.asarray(kv.num_live).mean(1) for kv in state.layers], axis=0)
    return live, sum(kv.k.nbytes + kv.v.nbytes for kv in state.layers) // len(state.length)
