"""Prompts with what follows them, read with the full cache: what is learned from and measured on."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import kvjax
from configs.learning import Prompts
from experiments.tasks import TASKS, Example, Task
from experiments.tasks.perplexity import SCORED
from kvjax.analysis.traces import Traces, VotingRows, ranked, trace
from kvjax.learning.families import View
from kvjax.policy import context
from kvjax.scoring.scores import ValuePrior
from kvjax.scoring.select import TopKThenRandom
from kvjax.scoring.stats import Measurement
from models import pad_left
from pallas_kernels.pytree import pytree

HELD_OUT = 1_000_000  # indices of held-out examples start here; calibration examples are all below


@pytree
class Reading:
    """One batch of prompts.

    Attributes:
      traces: attention of the rows that follow.
      stats: what the policy observed, layer by layer.
      score: what the policy ranks by; finite.
      safe: what it protects by position.
      lengths: tokens of every prompt.
      weight: 1, or 0 for a copy that fills up the batch.
      prior: what AhaKV's votes are multiplied by, where the policy has such.
      drawn: NaCl's log-probabilities with noise, where the policy draws.
    """

    traces: Traces
    stats: tuple[Any, ...]
    score: Float[Array, "B L K S"]
    safe: Any
    lengths: Int[Array, "B"]
    weight: Float[Array, "B"]
    prior: Float[Array, "B L K S"] | None = None
    drawn: Float[Array, "B L K S"] | None = None

    @property
    def mass(self) -> Float[Array, "B L K S"]:
        """The share of attention that the future rows pay to every slot, the mean over rows and the heads of a group.

        What hindsight ranks by.
        """
        B, L, N, _, S = self.traces.attention.shape
        K = self.score.shape[2]
        return self.traces.attention.mean(3).reshape(B, L, K, N // K, S).mean(3)

    @property
    def live(self) -> Bool[Array, "B L K S"]:
        """Slots that hold a token."""
        return jnp.stack([kv.live for kv in self.traces.state.layers], axis=1)

    def view(self, budget: int | float) -> View:
        """What families see, at a budget in tokens or as a share of the prompt."""
        pos = jnp.stack([kv.pos for kv in self.traces.state.layers], axis=1)
        lengths = self.lengths.astype(float)
        tokens = jnp.floor(budget * lengths + 1e-9) if isinstance(budget, float) else jnp.full_like(lengths, budget)
        tokens = jnp.maximum(tokens, 1.0)
        newer = jnp.flip(jnp.flip(self.safe, -1).cumsum(-1, dtype=jnp.int32), -1) - self.safe.astype(jnp.int32)
        safe = self.safe & (newer < tokens[:, None, None, None])  # slots stand in the order of positions here
        votes = [m for m in self.stats[0].observed if isinstance(m, VotingRows)]
        voters = tuple(s[votes[0]] for s in self.stats) if votes else None
        prior = None if self.prior is None else self.prior.astype(float)
        return View(self.score, pos, self.live, safe, tokens, voters, prior, self.drawn)


def examples(prompts: Prompts, tokenizer: Any, split: str) -> list[Example]:
    """The prompts of "calibration" or "held_out", in an order that mixes the tasks."""
    encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
    bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    task = Task(encode, bos, prompts.length, prompts.seed)
    first, count = (0, prompts.calibration) if split == "calibration" else (HELD_OUT, prompts.held_out)
    if first == 0 and count > HELD_OUT:
        raise ValueError(f"{count} calibration prompts reach the held-out ones, which start at {HELD_OUT}")
    found = [TASKS[name](task, first + i) for name in prompts.tasks for i in range(count)]
    return [found[i] for i in np.random.default_rng([prompts.seed, first]).permutation(len(found))]


class Reader:
    """A model and a policy, compiled for batches of one shape."""

    def __init__(
        self, model: Any, params: Any, policy: kvjax.Evict, prompts: Prompts, extra: tuple[Measurement, ...] = ()
    ):
        """Nothing is read yet.

        Args:
          model, params: the model.
          policy: what ranks and protects, and what is measured of a prompt.
          prompts: sizes.
          extra: what else is measured.

        Raises:
          ValueError: more future rows than tasks have text for.
        """
        if "perplexity" in prompts.tasks and prompts.future > SCORED:
            raise ValueError(f"future={prompts.future} rows, but perplexity has {SCORED} tokens of text; ask for fewer")
        self.model, self.params, self.policy, self.prompts = model, params, policy, prompts
        self._read = jax.jit(functools.partial(_read, model, policy, extra))

    def batches(self, found: Sequence[Example]) -> Iterator[tuple[list[Example], Reading]]:
        """Examples in batches, and what was read of them."""
        B = self.prompts.batch_size
        for start in range(0, len(found), B):
            batch = list(found[start : start + B])
            yield batch, self.read(batch)

    def read(self, batch: Sequence[Example]) -> Reading:
        """One batch; a short one is filled up with copies of its first example, which weigh nothing."""
        p = self.prompts
        padded = [*batch, *[batch[0]] * (p.batch_size - len(batch))]
        ask = p.protocol == "in_prompt"
        tokens, lengths = pad_left([e.context + e.question if ask else e.context for e in padded], width=p.length)
        follows = np.zeros((p.batch_size, p.future), np.int32)
        given = [e.continuation or (() if ask else e.question) for e in padded]
        for row, ids in zip(follows, given, strict=True):
            row[: len(ids)] = ids[: p.future]
        num_given = np.array([min(len(ids), p.future) for ids in given], np.int32)
        weight = np.arange(p.batch_size) < len(batch)
        arrays = tokens, lengths, follows, num_given, weight.astype(np.float32)
        return self._read(self.params, *map(jnp.asarray, arrays))


def _read(model, policy, extra, params, tokens, lengths, follows, num_given, weight) -> Reading:
    """The full cache goes on by itself where no text is given, and everything is read again with its rows observed."""
    R = follows.shape[1]
    plan = kvjax.make_plan(model.config, kvjax.identity(), prompt_len=tokens.shape[1], max_new_tokens=R)
    logits, state = kvjax.prefill(model, params, tokens, plan, lengths=lengths)

    def step(carry, column):
        logits, state = carry
        i, given = column
        token = jnp.where(i < num_given, given, jnp.argmax(logits, axis=-1).astype(jnp.int32))
        return kvjax.decode_step(model, params, token, state), token

    _, future = jax.lax.scan(step, (logits, state), (jnp.arange(R, dtype=jnp.int32), follows.T))
    traces, stats = trace(model, params, tokens, lengths, future.T, policy, extra=extra)
    score, safe = ranked(policy, traces.state, stats)
    layers = traces.state.layers
    live = jnp.stack([kv.live for kv in layers], axis=1)
    score = jnp.where(live, score, 0.0)
    prior = drawn = None
    if isinstance(policy.score, ValuePrior):
        prior = jnp.stack([policy.score.prior(kv) for kv in layers], axis=1)
    if isinstance(policy.select, TopKThenRandom):
        moments = [context(traces.state, i, "prefill") for i in range(len(layers))]
        drawn = [policy.select.drawn(score[:, i], kv, moments[i], kv.live) for i, kv in enumerate(layers)]
        drawn = jnp.where(live, jnp.stack(drawn, axis=1), 0.0)
    return Reading(traces, stats, score, safe, lengths, weight, prior, drawn)
