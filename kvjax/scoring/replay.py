"""Prompts that are read again, chunk by chunk, so that attention says what of them is needed to repeat them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.pallas_kernels.values import Value, each, settle, tokens, whole

_ids = each(whole(0, 2**31 - 1, "token ids are whole numbers of at least 0"))


@dataclasses.dataclass(frozen=True)
class Replay(Value):
    """How a prompt is read again, after it was read whole and before anything of it is evicted.

    The prompt is cut into chunks. For each the model reads, behind the whole prompt, an instruction and then the
    chunk's tokens once more. Nothing of that is added to the cache. Chunks are those of a sequence's own tokens,
    whatever its padding.

    Attributes:
      repeat: token ids of the instruction in front of the first chunk.
      repeat_next: those in front of every later chunk. The last tokens of the chunk before it follow.
      suffix: token ids between all that and the chunk, such as what a chat template has between a question and its
        answer.
      chunk: tokens of a chunk; the last one of a prompt may have fewer.
      overlap: how many tokens of the chunk before stand in front of a later one.
      skip: first tokens of the prompt that are in no chunk, such as what a chat template has before the context.
    """

    repeat: tuple[int, ...] = ()
    repeat_next: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    chunk: int = 2048
    overlap: int = 8
    skip: int = 0

    def __post_init__(self):
        settle(self, repeat=_ids, repeat_next=_ids, suffix=_ids, overlap=tokens(), skip=tokens())
        settle(self, chunk=tokens(1, "a chunk has at least 1 token"))

    @property
    def ids(self) -> tuple[int, ...]:
        """All token ids that are no part of the prompt."""
        return (*self.repeat, *self.repeat_next, *self.suffix)

    def size(self, prompt_len: int) -> int:
        """Tokens of the largest chunk of a prompt of this width."""
        return max(min(self.chunk, prompt_len - self.skip), 1)

    def count(self, prompt_len: int) -> int:
        """How many chunks a prompt of this width has."""
        return -(-max(prompt_len - self.skip, 0) // self.size(prompt_len))

    def rows(self, prompt_len: int) -> int:
        """The most tokens that are read at once for a prompt of this width, instructions included."""
        return self.size(prompt_len) + max(map(len, self._instructions(prompt_len)))

    def _instructions(self, prompt_len: int) -> tuple[list[int], list[int]]:
        """What stands before the first chunk and before later ones; -n is the token n places before the chunk."""
        before = range(-min(self.overlap, self.size(prompt_len)), 0)
        later = [*self.repeat_next, *before, *self.suffix] if self.count(prompt_len) > 1 else []
        return [*self.repeat, *self.suffix], later

    def span(
        self, prompt_len: int, lengths: Int[Array, "B"], index: int | Int[Array, ""]
    ) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
        """The positions of every sequence's chunk of this index: from the first up to before the second.

        A sequence that has no such chunk has two equal numbers.
        """
        first = self.skip + index * self.size(prompt_len)
        return jnp.minimum(first, lengths), jnp.minimum(first + self.size(prompt_len), lengths)

    def read(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, "B"], index: int | Int[Array, ""]
    ) -> tuple[Int[Array, "B R"], Int[Array, "B"]]:
        """What is read for the chunk of this index, padded on the left, and how many of its tokens are real.

        Args:
          tokens: the prompts, padded on the left.
          lengths: their own lengths.
          index: of the chunk; it may be traced.
        """
        T, R = tokens.shape[1], self.rows(tokens.shape[1])
        instructions = self._instructions(T)
        table = np.zeros((2, max(R - self.size(T), 1)), np.int32)
        for row, ids in zip(table, instructions, strict=True):
            row[: len(ids)] = ids
        later = jnp.minimum(jnp.asarray(index, jnp.int32), 1)
        instruction = jnp.asarray(table)[later]
        before = jnp.asarray(np.array(list(map(len, instructions)), np.int32))[later]
        first, last = self.span(T, lengths, index)
        valid = jnp.where(last > first, before + last - first, 0)
        place = jnp.arange(R, dtype=jnp.int32)[None] - (R - valid)[:, None]  # of what is read, from 0
        told = instruction[jnp.clip(place, 0, len(table[0]) - 1)]
        of_prompt = first[:, None] + jnp.where(place < before, told, place - before)
        column = jnp.clip((T - lengths)[:, None] + of_prompt, 0, T - 1)
        repeated = jnp.take_along_axis(tokens, column, axis=1)
        return jnp.where((place < before) & (told >= 0), told, repeated), valid
