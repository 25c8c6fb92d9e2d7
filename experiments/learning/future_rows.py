"""Prompts with what follows them, read with the full cache: what is learned from and measured on."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import kvjax
from kvjax.analysis.grid import decisions
from kvjax.analysis.reading import Measured, Reading, read_traced
from kvjax.analysis.traces import Traces, VotingRows, trace
from kvjax.cache.context import Site, row_keys
from kvjax.configs.learning import Prompts
from kvjax.experiments.tasks import TASKS, Example, Task
from kvjax.experiments.tasks.perplexity import SCORED
from kvjax.learning.families import View
from kvjax.models import pad_left
from kvjax.pallas_kernels.pytree import pytree
from kvjax.scoring.scores import ValuePrior
from kvjax.scoring.select import TopKThenRandom
from kvjax.scoring.stats import LayerStats, Measurement, ordered

HELD_OUT = 1_000_000  # indices of held-out examples start here; calibration examples are all below


@pytree
class RankedReading:
    """One batch of prompts as it was read, and what a policy makes of it.

    Attributes:
      full: prompts and the rows that follow, with the full cache.
      traces: attention of these rows.
      score: what the policy ranks by; finite.
      safe: what it protects by position.
      weight: 1, or 0 for a copy that fills up the batch.
      prior: what AhaKV's votes are multiplied by, where the policy has such.
      drawn: NaCl's log-probabilities with noise, where the policy draws.
    """

    full: Reading
    traces: Traces
    score: Float[Array, "B L K S"]
    safe: Any
    weight: Float[Array, "B"]
    prior: Float[Array, "B L K S"] | None = None
    drawn: Float[Array, "B L K S"] | None = None

    @property
    def mass(self) -> Float[Array, "B L K S"]:
        """The share of attention that the future rows pay to every slot, which is what hindsight ranks by."""
        return self.full.mass(self.score.shape[2])

    @property
    def live(self) -> Bool[Array, "B L K S"]:
        """Slots that hold a token."""
        return self.full.live()

    @property
    def lengths(self) -> Int[Array, "B"]:
        """Tokens of every prompt."""
        return self.full.lengths

    def stats(self, layer: int) -> LayerStats:
        """What was measured of the prompt."""
        return self.full.layers[layer].stats["kv_head"]

    def plan(self, policy: kvjax.Evict) -> kvjax.CachePlan:
        """A policy's plan for what was read."""
        site = self.full.layers[0].site
        sizes = _Sizes.of([layer.site for layer in self.full.layers])
        return kvjax.make_plan(sizes, policy, prompt_len=site.prompt_len, max_new_tokens=site.max_new_tokens)

    def view(self, policy: kvjax.Evict) -> View:
        """What families see, at the budget that a policy's plan has for every prompt."""
        pos = jnp.stack([layer.prompt.pos for layer in self.full.layers], axis=1)
        by_length = np.mean([spec.target for spec in self.plan(policy).specs], axis=0)
        tokens = jnp.asarray(by_length, float)[self.lengths]
        newer = jnp.flip(jnp.flip(self.safe, -1).cumsum(-1, dtype=jnp.int32), -1) - self.safe.astype(jnp.int32)
        safe = self.safe & (newer < tokens[:, None, None, None])  # slots stand in the order of positions here
        votes = [m for m in self.stats(0).observed if isinstance(m, VotingRows)]
        layers = range(len(self.full.layers))
        voters = tuple(self.stats(i)[votes[0]] for i in layers) if votes else None
        prior = None if self.prior is None else self.prior.astype(float)
        return View(self.score, pos, self.live, safe, tokens, voters, prior, self.drawn)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """A model's sizes, from what it read."""

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    vocab_size: int = 0
    dtype: str = "float32"
    additive_rotation: bool = True

    @classmethod
    def of(cls, sites: Sequence[Site]) -> "_Sizes":
        site, windows = sites[0], tuple(s.window for s in sites)
        return cls(site.num_layers, site.num_query_heads, site.num_kv_heads, site.head_dim, windows)

    def window(self, layer: int) -> int | None:
        """See `kvjax.plan.ModelConfig`."""
        return self.windows[layer]


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
          ValueError: more future rows than tasks have text for, a policy that moves keys or has a set of slots for
            every query head.
        """
        if policy.positions != "original" or policy.granularity != "kv_head":
            raise ValueError(
                f"rows that follow are read with positions='original' and granularity='kv_head', but {policy} has "
                f"{policy.positions!r} and {policy.granularity!r}; learn with these two"
            )
        if "perplexity" in prompts.tasks and prompts.future > SCORED:
            raise ValueError(f"future={prompts.future} rows, but perplexity has {SCORED} tokens of text; ask for fewer")
        self.model, self.params, self.policy, self.prompts = model, params, policy, prompts
        self._read = jax.jit(functools.partial(_read, model, policy, extra))

    def batches(self, found: Sequence[Example]) -> Iterator[tuple[list[Example], RankedReading]]:
        """Examples in batches, and what was read of them."""
        B = self.prompts.batch_size
        for start in range(0, len(found), B):
            batch = list(found[start : start + B])
            yield batch, self.read(batch)

    def read(self, batch: Sequence[Example]) -> RankedReading:
        """One batch; a short one is filled up with copies of its first example, which weigh nothing."""
        p = self.prompts
        padded = [*batch, *[batch[0]] * (p.batch_size - len(batch))]
        prompts, given = zip(*(e.questions[0].asked(e.context, p.protocol) for e in padded), strict=True)
        tokens, lengths = pad_left(prompts, width=p.length)
        follows = np.zeros((p.batch_size, p.future), np.int32)
        for row, ids in zip(follows, given, strict=True):
            row[: len(ids)] = ids[: p.future]
        num_given = np.array([min(len(ids), p.future) for ids in given], np.int32)
        weight = np.arange(p.batch_size) < len(batch)
        arrays = tokens, lengths, follows, num_given, weight.astype(np.float32)
        return self._read(self.params, *map(jnp.asarray, arrays))


def _read(model, policy, extra, params, tokens, lengths, follows, num_given, weight) -> RankedReading:
    """The full cache goes on by itself where no text is given, and everything is read again with its rows observed."""
    (B, T), R = tokens.shape, follows.shape[1]
    plan = kvjax.make_plan(model.config, kvjax.identity(), prompt_len=T, max_new_tokens=R)
    logits, state = kvjax.prefill(model, params, tokens, plan, lengths=lengths)

    def step(carry, column):
        logits, state = carry
        i, given = column
        token = jnp.where(i < num_given, given, jnp.argmax(logits, axis=-1).astype(jnp.int32))
        return kvjax.decode_step(model, params, token, state), token

    _, future = jax.lax.scan(step, (logits, state), (jnp.arange(R, dtype=jnp.int32), follows.T))
    plan = kvjax.make_plan(model.config, policy, prompt_len=T, max_new_tokens=R)
    asked: list[Measured] = [[("kv_head", m) for m in ordered((*spec.prompt, *extra))] for spec in plan.specs]
    reading = read_traced(model, params, tokens, future.T, lengths, row_keys(None, B), seeds=1, measure=asked)
    layers = [layer.prompt for layer in reading.layers]
    moments = [reading.prompt_context(i) for i in range(len(layers))]
    live = reading.live()
    score = jnp.where(live, jnp.stack([s.score for s in decisions(plan, reading)], axis=1), 0.0)
    safe = jnp.stack([policy.safe(kv, ctx) for kv, ctx in zip(layers, moments, strict=True)], axis=1)
    prior = drawn = None
    if isinstance(policy.score, ValuePrior):
        prior = jnp.stack([policy.score.prior(kv) for kv in layers], axis=1)
    if isinstance(policy.select, TopKThenRandom):
        drawn = [policy.select.drawn(score[:, i], kv, moments[i], kv.live) for i, kv in enumerate(layers)]
        drawn = jnp.where(live, jnp.stack(drawn, axis=1), 0.0)
    return RankedReading(reading, trace(reading), score, safe, weight, prior, drawn)
