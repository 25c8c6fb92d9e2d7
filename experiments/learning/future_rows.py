"""Prompts with what follows them, read with the full cache: what is learned from and measured on."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from tqdm import tqdm

import kvjax
from kvjax.analysis import Reading, Traces, VotingRows, read, trace
from kvjax.configs.learning import Prompts
from kvjax.contract import Observation, Slots
from kvjax.decide.select import ThenRandom
from kvjax.experiments.tasks import TASKS, Example
from kvjax.experiments.tasks.base import task_of
from kvjax.experiments.tasks.perplexity import SCORED
from kvjax.learning.families import View
from kvjax.models import pad_left
from kvjax.pallas_kernels.pytree import pytree
from kvjax.run.apply import stored_for_policy, with_policy
from kvjax.run.plan import planned
from kvjax.scores.attention import ValuePrior

Split = Literal["calibration", "held_out"]
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
    safe: Bool[Array, "B L K S"]
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
        return self.full.live(self.score.shape[2])

    def slots(self, layer: int) -> Slots:
        """What a score sees of the prompt."""
        state, safe = self.full.state, self.safe[:, layer]
        kv, ctx = state.layers[layer].view(), state.context(layer, "prefill")
        return Slots(kv, self.full.stats.of(layer), ctx, kv.live & ~safe, safe)

    def view(self, policy: kvjax.Evict) -> View:
        """What families see, at the budget that a policy has for every prompt, on average over layers."""
        state = self.full.state
        pos = jnp.stack([kv.pos for kv in state.layers], axis=1)
        each = planned(policy, state.plan.infos, self.full.lengths)[1]
        tokens = jnp.stack([jnp.asarray(hparams.budget) for hparams in each]).astype(float).mean(0)
        newer = jnp.flip(jnp.flip(self.safe, -1).cumsum(-1, dtype=jnp.int32), -1) - self.safe.astype(jnp.int32)
        safe = self.safe & (newer < tokens[:, None, None, None])  # slots stand in the order of positions here
        votes = [o for o in self.full.stats.of(0) if isinstance(o, VotingRows)]
        voters = tuple(self.full.stats.of(i)[votes[0]] for i in range(len(each))) if votes else None
        prior = None if self.prior is None else self.prior.astype(float)
        return View(self.score, pos, self.live, safe, tokens, voters, prior, self.drawn)


def examples(prompts: Prompts, tokenizer: Any, split: Split) -> list[Example]:
    """The prompts of "calibration" or "held_out", in an order that mixes the tasks."""
    task = task_of(tokenizer, prompts.length, prompts.seed)
    first, count = (0, prompts.calibration) if split == "calibration" else (HELD_OUT, prompts.held_out)
    if first == 0 and count > HELD_OUT:
        raise ValueError(f"{count} calibration prompts reach the held-out ones, which start at {HELD_OUT}")
    names = [name for name in prompts.tasks if first or name not in prompts.unseen]
    found = [TASKS[name](task, first + i) for name in names for i in range(count)]
    return [found[i] for i in np.random.default_rng([prompts.seed, first]).permutation(len(found))]


@dataclasses.dataclass(frozen=True)
class Reader:
    """A model, and the prompts that it reads.

    Attributes:
      model, params, tokenizer: the model.
      prompts: which, and sizes.
    """

    model: Any
    params: Any
    tokenizer: Any
    prompts: Prompts

    def batches(
        self,
        split: Split,
        policies: Sequence[kvjax.Policy],
        observe: tuple[Observation, ...] = (),
        lacks: Callable[[Example], bool] = lambda example: True,
    ) -> Iterator[tuple[list[Example], RankedReading]]:
        """Examples in batches, and what was read of them, in one program.

        A short batch is filled up with copies of its first example, which weigh nothing; one of which no example lacks
        anything is left out.

        Args:
          split: "calibration" or "held_out".
          policies: the first ranks and protects; the others, too, will be applied to what is read.
          observe: what else is observed of a prompt.
          lacks: whether an example is wanted.

        Raises:
          ValueError: more future rows than tasks have text for, a policy that moves keys or has a set of slots for
            every query head.
        """
        p, first = self.prompts, policies[0]
        if first.layout.positions != "original" or first.layout.by_query_head:
            raise ValueError(
                f"rows that follow are read with keys at original positions and slots of kv heads, but the policy has "
                f"{first.layout}; learn with these two"
            )
        if "perplexity" in p.tasks and p.future > SCORED:
            raise ValueError(f"future={p.future} rows, but perplexity has {SCORED} tokens of text; ask for fewer")
        found = examples(p, self.tokenizer, split)
        read = jax.jit(functools.partial(_read, self.model, tuple(policies), observe))
        with tqdm(total=len(found), desc=split.replace("_", "-"), unit="prompt", file=sys.stdout) as bar:
            for start in range(0, len(found), p.batch_size):
                batch = found[start : start + p.batch_size]
                if any(map(lacks, batch)):
                    yield batch, read(self.params, *self._arrays(batch))
                bar.update(len(batch))

    def _arrays(self, batch: Sequence[Example]) -> tuple[np.ndarray, ...]:
        """What `_read` takes."""
        p = self.prompts
        padded = [*batch, *[batch[0]] * (p.batch_size - len(batch))]
        prompts, given = zip(*(e.questions[0].asked(e.context, p.protocol) for e in padded), strict=True)
        tokens, lengths = pad_left(prompts, width=p.length)
        follows = np.zeros((p.batch_size, p.future), np.int32)
        for row, ids in zip(follows, given, strict=True):
            row[: len(ids)] = ids[: p.future]
        num_given = np.array([min(len(ids), p.future) for ids in given], np.int32)
        weight = np.arange(p.batch_size) < len(batch)
        return tokens, lengths, follows, num_given, weight.astype(np.float32)


def _read(model, policies, observe, params, tokens, lengths, follows, num_given, weight) -> RankedReading:
    """The full cache goes on by itself where no text is given, and everything is read again with its rows observed."""
    R = follows.shape[1]
    logits, state = kvjax.prefill(model, params, tokens, lengths=lengths, max_new_tokens=R)

    def step(carry, column):
        logits, state = carry
        i, given = column
        token = jnp.where(i < num_given, given, jnp.argmax(logits, axis=-1).astype(jnp.int32))
        return kvjax.decode_step(model, params, token, state), token

    _, future = jax.lax.scan(step, (logits, state), (jnp.arange(R, dtype=jnp.int32), follows.T))
    full = read(model, params, tokens, future.T, policies=policies, observe=observe, lengths=lengths)
    policy = policies[0]
    state = stored_for_policy(with_policy(policy, full.state, full.stats))
    scores, safe, drawn = [], [], []
    for i, kv in enumerate(state.layers):
        stats, ctx = full.stats.of(i), state.context(i, "prefill")
        slots, score, _ = policy.ranked(policy.update_memory(kv.view(), stats, ctx), stats, ctx)
        scores.append(jnp.where(kv.live, score, 0.0))
        safe.append(slots.protected)
        if isinstance(policy.select, ThenRandom):
            drawn.append(jnp.where(kv.live, policy.select.drawn(score, slots.of("select")), 0.0))
    each = lambda x: jnp.stack(x, axis=1)
    prior = [policy.score.prior(kv) for kv in state.layers] if isinstance(policy.score, ValuePrior) else []
    extra = (each(x) if x else None for x in (prior, drawn))
    return RankedReading(full, trace(full), each(scores), each(safe), weight, *extra)
