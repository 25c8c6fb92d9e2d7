"""Runs one policy at one budget over batches of rows, and times it."""

import bisect
import dataclasses
import functools
import time
import zlib
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

import kvjax
from kvjax.drivers.checks import check_block, check_positions, check_request
from kvjax.drivers.mesh import on_mesh
from kvjax.drivers.steps import checked_logits
from kvjax.experiments.evaluation.batches import Bucket, Row
from kvjax.experiments.evaluation.searching import Search, check_beams
from kvjax.experiments.tasks import Example
from kvjax.models import pad_left
from kvjax.observe import Reread
from kvjax.pallas_kernels.pytree import pytree
from kvjax.storage.mesh import DATA, sharding

_LOOKED_AT: Final = 16  # tokens that are generated before answers are searched for stop strings


def read_prompts(
    model: Any,
    params: PyTree[Any],
    tokens: Any,
    lengths: Any,
    keys: Key[Array, "B"],
    *,
    policy: kvjax.Policy,
    plan: kvjax.Plan,
    block: int | None,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "B V"], kvjax.State]:
    """`kvjax.prefill` with the sizes of a plan."""
    how = {"policy": policy, "plan": plan, "lengths": lengths, "key": keys, "block": block, "mesh": mesh}
    return kvjax.prefill(model, params, tokens, max_new_tokens=plan.infos[0].max_new_tokens, **how)


_program = jax.jit(read_prompts, static_argnames=("model", "policy", "plan", "block", "mesh"))


@pytree
class Reading:
    """What comes after the prompts of a batch, as far as it has come.

    Attributes:
      step: tokens of every row so far, while it was running.
      running: rows whose answers have not ended.
      lengths: tokens of each row until it ended.
      tokens: given and generated ids.
      logp: their log-probabilities.
      live: the most live slots of any head after each of them.
      logits: of the next token.
      state: the cache.
    """

    step: Int[Array, ""]
    running: Bool[Array, "B"]
    lengths: Int[Array, "B"]
    tokens: Int[Array, "B M"]
    logp: Float[Array, "B M"]
    live: Int[Array, "B M"]
    logits: Float[Array, "B V"]
    state: kvjax.State


def _begun(logits: Float[Array, "B V"], state: kvjax.State, steps: Int[Array, "B"], planned: int) -> Reading:
    """A batch whose prompts have been read."""
    B = len(state.length)
    none = lambda kind: jnp.zeros((B, planned), kind)
    start = jnp.int32(0), steps > 0, jnp.zeros((B,), jnp.int32)
    return Reading(*start, none(jnp.int32), none(jnp.float32), none(jnp.int32), logits, state)


def _ends(model: Any) -> tuple[int, ...]:
    """The model's end tokens."""
    return check_request(model, kvjax.Policy(), kvjax.Greedy(), None, 0, None)


def _live(state: kvjax.State) -> Int[Array, "B L K"]:
    """Live slots of every head."""
    return jnp.stack([kv.num_live for kv in state.layers], axis=1)


def _continue(
    model: Any,
    params: PyTree[Any],
    reading: Reading,
    given: Int[Array, "B M"],
    num_given: Int[Array, "B"],
    num_steps: Int[Array, "B"],
    until: Int[Array, ""],
) -> Reading:
    """Reads `num_given` given tokens, then generates greedily up to an end token or `num_steps` tokens in all.

    Rows that have ended go on, as the others of their batch do, but count no longer.
    """
    ends = jnp.asarray(_ends(model), jnp.int32)[None]

    def step(r: Reading) -> Reading:
        i = r.step
        token = jnp.where(i < num_given, given[:, i], jnp.argmax(r.logits, axis=-1).astype(jnp.int32))
        logp = jnp.take_along_axis(jax.nn.log_softmax(r.logits), token[:, None], axis=-1)[:, 0]
        logits, state = kvjax.decode_step(model, params, token, r.state)
        ended = (i >= num_given) & (token[:, None] == ends).any(-1)
        return Reading(
            i + 1,
            r.running & ~ended & (i + 1 < num_steps),
            r.lengths + r.running.astype(jnp.int32),
            r.tokens.at[:, i].set(token),
            r.logp.at[:, i].set(logp),
            r.live.at[:, i].set(_live(state).max((1, 2))),
            logits,
            state,
        )

    return lax.while_loop(lambda r: (r.step < until) & r.running.any(), step, reading)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one policy at one budget takes; sizes are static, for one batch.

    Attributes:
      slots: slots allocated for one sequence, over all layers and kv heads.
      kv_bytes: bytes of keys and values for one sequence.
      prefill_peak_bytes, decode_peak_bytes: arguments, results and temporaries of the compiled programs, for one batch;
        parameters included; of one device. None where the backend does not say, and where prompts are read again,
        which takes several programs.
    """

    slots: int
    kv_bytes: int
    prefill_peak_bytes: int | None
    decode_peak_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a row gave.

    Attributes:
      row: the row.
      tokens: what follows the prompt for each of its questions: given and generated ids.
      logp: their log-probabilities; none where answers were searched for with several beams.
      live: live slots after the prompt, the mean over layers and heads.
      most_live: the most of any head while its questions were read and answered; before and after an answer that was
        searched for.
      prefill_seconds: the row's share of its batch's time.
      decode_tokens_per_second: of the whole batch.
    """

    row: Row
    tokens: tuple[np.ndarray, ...]
    logp: tuple[np.ndarray, ...]
    live: float
    most_live: int
    prefill_seconds: float
    decode_tokens_per_second: float


class Evaluator:
    """A policy compiled for batches of a few shapes."""

    def __init__(
        self,
        model: Any,
        params: PyTree[Any],
        policy: kvjax.Policy,
        buckets: Sequence[Bucket],
        *,
        batch_size: int,
        tokenizer: Any,
        block: int | None = None,
        mesh: Mesh | None = None,
    ):
        """Plans the run of every bucket; `compile` comes before `run`.

        Raises:
          ValueError: sizes that the policy cannot work with, or that the devices of a mesh do not divide.
        """
        self.model, self.policy, self.batch_size = model, policy, batch_size
        self.mesh, self.params = mesh, params if mesh is None else on_mesh(model, params, mesh, batch_size)
        self.tokenizer, self.block = tokenizer, block
        self._ends = _ends(model)
        self._compiled: dict[Bucket, tuple[Any, Any]] = {}
        # The width is one of the lengths, so that slots do not depend on which rows a bucket holds.
        plan = lambda b: kvjax.make_plan(model.config, policy, np.array([*b.lengths, b.width]), b.width, b.planned)
        self.plans = {bucket: plan(bucket) for bucket in buckets}
        for bucket, plan in self.plans.items():
            check_block(plan, block, bucket.width)
            check_beams(model, bucket.num_beams, bucket.searches)
        rows = [(len(row.prompt), row.steps, bucket) for bucket in buckets for b in bucket.batches for row in b]
        if rows:
            prompt, steps, bucket = max(rows, key=lambda row: row[0] + row[1])
            check_positions(model.config, self.plans[bucket], np.array([prompt]), steps, block)

    def compile(self, bucket: Bucket) -> Cost:
        """Compiles both programs of a bucket ahead of time, so that no timing contains it."""
        B, plan, mesh = self.batch_size, self.plans[bucket], self.mesh
        how = {"policy": self.policy, "plan": plan, "block": self.block, "mesh": mesh}
        rows = lambda x: None if mesh is None else sharding(x, mesh, (DATA,))
        placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows(x))
        ints = lambda *shape: placed(jax.ShapeDtypeStruct(shape, jnp.int32))
        keys = jax.random.split(jax.random.key(0), B)
        again = {o for policy in plan.layers for o in policy.observe("replay") if isinstance(o, Reread)}
        if again:  # nothing is traced, as prompts have to be known
            prefill = functools.partial(read_prompts, self.model, **how)
            found = prefill(self.params, np.zeros((B, bucket.width), np.int32), np.full(B, bucket.lengths[-1]), keys)
            where, peak = jax.tree.map(lambda x: x.sharding, found), None
        else:
            lowered = _program.lower(self.model, self.params, ints(B, bucket.width), ints(B), placed(keys), **how)
            prefill, found = lowered.compile(), lowered.out_info
            where, peak = prefill.output_shardings, peak_bytes(prefill)
        as_struct = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=None if mesh is None else where)
        logits, state = jax.tree.map(as_struct, found, where)
        if bucket.num_beams > 1:
            sizes = {"planned": bucket.planned, "num_beams": bucket.num_beams, "lengths": bucket.searches}
            goes_on = Search(self.model, self.params, logits, state, **sizes)
            decode = goes_on.programs
        else:
            begun = jax.eval_shape(functools.partial(_begun, planned=bucket.planned), logits, state, ints(B))
            begun = dataclasses.replace(jax.tree.map(placed, begun), logits=logits, state=state)
            stays = None if mesh is None else jax.tree.map(lambda x: x.sharding, begun)
            run = jax.jit(_continue, static_argnames="model", donate_argnames="reading", out_shardings=stays)
            given = ints(B, bucket.planned), ints(B), ints(B), ints()
            goes_on = run.lower(self.model, self.params, begun, *given).compile()
            decode = [goes_on]
        self._compiled[bucket] = prefill, goes_on
        size = lambda x: x.size * x.dtype.itemsize
        kv_bytes = sum(size(x) for layer in state.layers for x in (layer.k, layer.v)) // B
        peaks = [n for program in decode if (n := peak_bytes(program)) is not None]
        return Cost(plan.num_slots, kv_bytes, peak, max(peaks, default=None))

    def release(self) -> None:
        """Forgets the compiled programs."""
        self._compiled.clear()

    def run(
        self, bucket: Bucket, batch: Sequence[Row], shown: Example | None = None
    ) -> tuple[list[Outcome], list[np.ndarray] | None]:
        """Outcomes of one batch, and the positions "K S" that every layer holds of the prompt of `shown`, if it is in.

        The prompts are read and evicted from once. Questions are read and answered on a copy of the state each. A short
        batch is filled up with copies of its first row.
        """
        prefill, goes_on = self._compiled[bucket]
        B = self.batch_size
        rows = [*batch, *[batch[0]] * (B - len(batch))]
        tokens, lengths = pad_left([row.prompt for row in rows], width=bucket.width)
        keys = jnp.stack([_key(row) for row in rows])

        start = time.perf_counter()
        logits, state = prefill(self.params, tokens, lengths, keys)
        jax.block_until_ready(logits)
        prefill_seconds = time.perf_counter() - start
        checked_logits(logits, state)
        live = np.asarray(_live(state).mean((1, 2), dtype=jnp.float32))
        positions = None
        if (at := next((i for i, row in enumerate(batch) if row.example is shown), None)) is not None:
            positions = [np.asarray(layer.head_pos[at]) for layer in state.layers]

        most = [0] * len(batch)
        tokens_of: list[list[np.ndarray]] = [[] for _ in batch]
        logp_of: list[list[np.ndarray]] = [[] for _ in batch]
        decode_seconds, num_tokens = 0.0, 0
        rounds = max(len(row.asked) for row in rows)
        for n in range(rounds):
            again = n + 1 < rounds
            own = jax.block_until_ready(jax.tree.map(jnp.copy, state) if again else state)
            first = jnp.copy(logits) if again else logits
            start = time.perf_counter()
            ids, logp, most_live = self._answer(goes_on, first, own, rows, n, bucket.planned)
            decode_seconds += time.perf_counter() - start
            num_tokens += B * max(map(len, ids))
            for i, row in enumerate(batch):
                if n < len(row.asked):
                    end = self._end(row, n, ids[i])
                    tokens_of[i].append(ids[i][:end])
                    logp_of[i].append(logp[i][:end])
                    most[i] = max(most[i], int(most_live[i][:end].max(initial=0)))
        speed = num_tokens / decode_seconds
        return [
            Outcome(row, (*tokens_of[i],), (*logp_of[i],), float(live[i]), most[i], prefill_seconds / B, speed)
            for i, row in enumerate(batch)
        ], positions

    def _answer(
        self, goes_on: Any, logits: Array, state: kvjax.State, rows: Sequence[Row], n: int, planned: int
    ) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray], Sequence[np.ndarray]]:
        """What follows a prompt up to the answer of the n-th question of every row; nothing, for rows that have fewer.

        Returns:
          For every row its ids, their log-probabilities, and the most live slots of any head after each of them; no
          log-probabilities, and one number of slots, where answers are searched for.
        """
        B = len(rows)
        given, num_given, num_steps = np.zeros((B, planned), np.int32), np.zeros(B, np.int32), np.zeros(B, np.int32)
        stops: list[tuple[str, ...]] = [()] * B
        for b, row in enumerate(rows):
            if n < len(row.asked):
                i, ids = row.asked[n]
                question = row.example.questions[i]
                given[b, : len(ids)], num_given[b], num_steps[b] = ids, len(ids), len(ids) + question.max_new_tokens
                stops[b] = question.stop
        if isinstance(goes_on, Search):
            found, live = goes_on.answer(logits, state, given, num_given, num_steps - num_given)
            return found, [np.zeros(0, np.float32)] * B, [*live[:, None]]
        reading = self._read(
            goes_on, _begun(logits, state, jnp.asarray(num_steps), planned), given, num_given, num_steps, stops
        )
        ids, logp, most_live = (np.asarray(x) for x in (reading.tokens, reading.logp, reading.live))
        ends = np.asarray(reading.lengths)
        cut = lambda x: [each[:end] for each, end in zip(x, ends, strict=True)]
        return cut(ids), cut(logp), cut(most_live)

    def _read(
        self,
        goes_on: Any,
        reading: Reading,
        given: np.ndarray,
        num_given: np.ndarray,
        num_steps: np.ndarray,
        stops: list[tuple[str, ...]],
    ) -> Reading:
        """Goes on until all answers have ended, stop strings included."""
        last = int(num_steps.max())
        until = min((int(num_given[b]) for b, stop in enumerate(stops) if stop), default=last)
        while True:
            until = min(until + _LOOKED_AT, last) if any(stops) else last
            reading = goes_on(self.params, reading, given, num_given, num_steps, np.int32(until))
            if until == last:
                return reading
            running, ids = np.array(reading.running), np.asarray(reading.tokens)
            for b in np.flatnonzero(running):
                text = self.tokenizer.decode(ids[b, num_given[b] : until].tolist()) if stops[b] else ""
                running[b] = not any(stop in text for stop in stops[b])
            if not running.any():
                return reading
            reading = dataclasses.replace(reading, running=jnp.asarray(running))

    def _end(self, row: Row, n: int, ids: np.ndarray) -> int:
        """How many tokens follow a prompt up to where the n-th answer is complete: with its first stop string."""
        i, given = row.asked[n]
        stop, answer = row.example.questions[i].stop, ids[len(given) :].tolist()
        stopped = lambda count: any(s in self.tokenizer.decode(answer[:count]) for s in stop)
        if not stop or not stopped(len(answer)):
            return len(ids)
        return len(given) + bisect.bisect_left(range(len(answer)), True, key=stopped)

    def line(self, example: Example, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """What is stored of an example, from the outcomes of all of its rows.

        `score` is the mean over its answers, `nll` the mean over the `tokens` of its continuations.
        """
        answers: list[dict[str, Any]] = [{} for _ in example.questions]
        for outcome in outcomes:
            for (i, given), ids, logp in zip(outcome.row.asked, outcome.tokens, outcome.logp, strict=True):
                answers[i] = self._judged(example, i, ids, logp, len(given))
        mean = lambda values: float(np.mean(values))
        prompt_tokens = mean([len(o.row.prompt) for o in outcomes])
        result: dict[str, Any] = {
            **dict(example.meta),
            "prompt_tokens": int(prompt_tokens) if prompt_tokens.is_integer() else prompt_tokens,
            "live": mean([o.live for o in outcomes]),
            "most_live": max(o.most_live for o in outcomes),
            "prefill_seconds": mean([o.prefill_seconds for o in outcomes]),
            "decode_tokens_per_second": mean([o.decode_tokens_per_second for o in outcomes]),
        }
        if scores := [a["score"] for a in answers if "score" in a]:
            result["score"] = mean(scores)
        if read := [(a["nll"], a["tokens"]) for a in answers if "nll" in a]:
            result["tokens"] = sum(n for _, n in read)
            result["nll"] = sum(nll * n for nll, n in read) / result["tokens"]
        return {**result, "answers": answers}

    def _judged(self, example: Example, i: int, ids: np.ndarray, logp: np.ndarray, num_given: int) -> dict[str, Any]:
        """The score of an answer, or the likelihood of a continuation."""
        question = example.questions[i]
        if question.continuation:
            n = len(question.continuation)
            return {"nll": float(-logp[num_given - n : num_given].mean()), "tokens": n}
        answer = ids[num_given:].tolist()
        text = self.tokenizer.decode(answer[:-1] if answer and answer[-1] in self._ends else answer)
        cut = min((at for stop in question.stop if (at := text.find(stop)) >= 0), default=len(text))
        output = text[:cut]
        references = list(question.references)
        judged = {"score": question.score(output), "metric": question.metric}
        return {**judged, "output": output, "references": references, "tokens": len(answer)}


def _key(row: Row) -> Key[Array, ""]:
    """What a row draws with: that of its example, in every batch and part of a run."""
    key = jax.random.fold_in(jax.random.key(row.seed), zlib.crc32(row.example.task.encode()))
    return jax.random.fold_in(key, row.example.index)


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
