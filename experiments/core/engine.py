"""Reads prompts under a policy, evicts, and goes on: answers, likelihoods, costs and times, a line a question.

Prompts run together in batches of one width, of few widths, and of as many tokens planned as their task needs. What a
prompt gives depends on the prompt and its task alone: rows are padded on the left, padding is exact, and the tokens
planned after a prompt, which some policies' numbers depend on (Keyformer's temperature), are those of the task.

Letters: B batch, M tokens after a prompt, V vocabulary.
"""

import bisect
import dataclasses
import functools
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key, PyTree

import kvjax
from kvjax.configs.experiment import Made, with_params
from kvjax.contract import kv_layers
from kvjax.experiments.core.continuing import continued
from kvjax.experiments.core.outputs import LAST, LONG, told
from kvjax.experiments.core.records import Line
from kvjax.experiments.tasks import Example, Protocol, Question, Tokens
from kvjax.generation.beams import checked_rules, searched
from kvjax.generation.loop import NO_TOKEN, Decoding, begin, decode_tokens, log_prob
from kvjax.models import pad_left
from kvjax.run.apply import HidesTokens
from kvjax.run.checks import check_block, check_positions, end_ids
from kvjax.run.layers import step
from kvjax.run.mesh import on_mesh
from kvjax.run.plan import bucket, own_params, plan_request, sharing
from kvjax.run.prefill_each import read_whole, stored_as
from kvjax.run.state import Prompts, empty_state
from kvjax.run.steps import checked_logits
from kvjax.storage.mesh import DATA, sharding

WORTH: Final = 2**16
"""Tokens of padding that a program of its own must spare: compiling takes as long as reading about so many."""
HELD: Final = 2**31
"""Bytes of full caches, and of what was observed, that are held while one policy after another evicts from them."""

# --- which prompts run together ---


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """Tokens after which a cache is evicted, and what is asked on copies of it.

    Attributes:
      example: whose prompt it is.
      tokens: the prompt.
      asked: numbers of the questions, and the tokens that are given after the prompt.
      seed: of what is drawn at random while it is read.
    """

    example: Example
    tokens: Tokens
    asked: tuple[tuple[int, Tokens], ...]
    seed: int = 0

    @property
    def steps(self) -> int:
        """Tokens that follow, at most."""
        return max(len(given) + self.example.questions[i].max_new_tokens for i, given in self.asked)

    @property
    def num_beams(self) -> int:
        """Hypotheses of the searches for all of its answers."""
        return self.example.questions[self.asked[0][0]].num_beams

    @property
    def key(self) -> Key[Array, ""]:
        """What it draws with: that of its example, in every batch and part of a run."""
        key = jax.random.fold_in(jax.random.key(self.seed), zlib.crc32(self.example.task.encode()))
        return jax.random.fold_in(key, self.example.index)


@dataclasses.dataclass(frozen=True, eq=False)
class Shape:
    """Prompts that run in one program.

    Attributes:
      width: tokens of the padded prompts.
      planned: tokens that a plan has room for after them.
      num_beams: hypotheses of the search for each answer.
      prompts: those with as many tokens after them are neighbours, as a batch ends when all of its rows have.
    """

    width: int
    planned: int
    num_beams: int
    prompts: tuple[Prompt, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the prompts, and the width, so that slots do not depend on which prompts there are."""
        return tuple(sorted({self.width, *(len(prompt.tokens) for prompt in self.prompts)}))


def prompts_of(example: Example, protocol: Protocol, seed: int = 0) -> list[Prompt]:
    """The prompts of an example; questions that follow the same tokens share one, if they have as many beams."""
    asked: dict[tuple[Tokens, int], list[tuple[int, Tokens]]] = {}
    for i, question in enumerate(example.questions):
        tokens, given = question.asked(example.context, protocol)
        asked.setdefault((tokens, question.num_beams), []).append((i, given))
    return [Prompt(example, tokens, tuple(each), seed) for (tokens, _), each in asked.items()]


def with_own_answers(prompt: Prompt, answers: Mapping[int, str], encode: Callable[[str], Sequence[int]]) -> Prompt:
    """A prompt after which texts are read, too: the full cache's own answers to its questions.

    Args:
      prompt: what is asked.
      answers: the texts, by the numbers of questions; none is read of those without one, with an empty one, or one
        that was searched for.
      encode: text to token ids, without special tokens.
    """
    questions, asked = list(prompt.example.questions), list(prompt.asked)
    for i, given in prompt.asked:
        own = () if questions[i].num_beams > 1 else tuple(encode(answers.get(i, "")))
        if own:
            asked.append((len(questions), given + own))
            questions.append(Question(questions[i].ids, own))
    example = dataclasses.replace(prompt.example, questions=tuple(questions))
    return dataclasses.replace(prompt, example=example, asked=tuple(asked))


def shapes(prompts: Iterable[Prompt], most: int | None = None) -> list[Shape]:
    """Few programs for all prompts, the largest first; the same whenever a run resumes.

    Args:
      prompts: all of a run's, whether they are still to be run or not.
      most: positions that the model has, where it has learned them.
    """
    by_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.example.task, []).append(prompt)
    groups: dict[tuple[int, int], dict[int, list[Prompt]]] = {}
    for own in by_task.values():
        steps, longest = max(p.steps for p in own), max(len(p.tokens) for p in own)
        planned = bucket(steps)
        planned = planned if most is None else max(steps, min(planned, most - longest))
        for p in own:
            width = bucket(len(p.tokens)) if most is None else min(bucket(len(p.tokens)), most - planned)
            groups.setdefault((planned, p.num_beams), {}).setdefault(max(width, len(p.tokens)), []).append(p)
    found = []
    for (planned, beams), by_width in groups.items():
        for width, together in _merged(by_width).items():
            found.append(Shape(width, planned, beams, tuple(sorted(together, key=lambda p: p.steps))))
    return sorted(found, key=lambda s: (s.num_beams, s.width + s.planned, s.width), reverse=True)


def _merged(by_width: dict[int, list[Prompt]]) -> dict[int, list[Prompt]]:
    """Prompts by fewer widths: those of one whose program would spare too little join the next larger."""
    found: dict[int, list[Prompt]] = {}
    widths = sorted(by_width)
    waiting: list[Prompt] = []
    for width, wider in zip(widths, [*widths[1:], None], strict=True):
        waiting += by_width[width]
        if wider is None or sum(wider - len(p.tokens) for p in waiting) >= WORTH:
            found[width], waiting = waiting, []
    return found


# --- what runs on the device ---


_read = jax.jit(kvjax.prefill, static_argnames=("model", "policy", "max_new_tokens", "block", "plan", "mesh"))


@functools.partial(jax.jit, static_argnames=("model", "policy", "plan", "block"))
def _likelihoods(
    model: Any, params: Any, tokens: Any, lengths: Any, keys: Any, *, policy: kvjax.Policy, plan: kvjax.Plan, block: int
) -> Float[Array, "B"]:
    """The mean log-probability of each text's last tokens (`num_scored`), read as `prefill(block=block)` reads it."""
    B, T = tokens.shape
    plan, hparams = plan_request(model.config, policy, lengths, T, 0, plan=plan)
    state = empty_state(model.config, policy, plan, hparams, lengths, 0, keys=keys, slots=True)
    num = -(-T // block)
    tokens = jnp.pad(tokens, ((0, 0), (num * block - T, 0)))
    blocks = lambda x: x.reshape(B, num, block).swapaxes(0, 1)
    valid = jnp.clip(lengths[None] - block * jnp.arange(num)[::-1, None], 0, block)

    def next_block(state, here):
        ids, after, valid = here
        logits, state, _ = step(model, params, ids, state, valid, ends=False, every=True)
        return state, jax.vmap(log_prob, 1, 1)(logits, after)

    given = blocks(tokens), blocks(jnp.roll(tokens, -1, 1)), valid
    found = jax.lax.scan(next_block, state, given)[1].swapaxes(0, 1).reshape(B, -1)[:, :-1]
    count = num_scored(lengths, block)[:, None]
    scored = jnp.arange(found.shape[1])[None, ::-1] < count
    return jnp.where(scored, found / count.astype(jnp.float32), 0.0).sum(1)


def num_scored(length: Any, block: int) -> Any:
    """How many of a text's last tokens are predicted: all but the first, or those after the one after the first block.

    The latter in blocks of several tokens, as EasyKV's `ppl` counts (DRSY/EasyKV). Blocks end with the text.
    """
    return length - 1 if block == 1 else length - 2 - (length - 1) % block


def _live(logits: Array, token: Array, state: kvjax.State) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """Live slots after a step, of the head that has most and of all together, for the loop's `also`."""
    return state.num_live.max((1, 2)), state.num_live.sum((1, 2))


# --- one reading for several policies ---


class Full(NamedTuple):
    """What the prompts of a batch leave before anything is evicted.

    Attributes:
      seconds: of a prompt's reading, KVzip's second one with it; None of the first batch, whose program is compiled.
    """

    logits: Float[Array, "B V"]
    state: kvjax.State
    stats: kvjax.AttnStats
    seconds: float | None = None

    @property
    def num_bytes(self) -> int:
        """Of all arrays."""
        return sum(x.nbytes for x in jax.tree.leaves(self[:3]))


def read_once(engines: Sequence["Engine"], batches: Iterable[Sequence[Prompt]]) -> Iterator[tuple[Any, list[Full]]]:
    """Reads batches of prompts, each once for all policies of a shape.

    Args:
      engines: the policies, which store prompts in one way (`Engine.stored`).
      batches: prompts of the shape.

    Yields:
      Batches, as many as may be held, and what each leaves for the policies to evict from.
    """
    one = engines[0]
    policies = [engine.policy for engine in engines]
    batches_held: list[Sequence[Prompt]] = []
    held: list[Full] = []
    for n, batch in enumerate(batches):
        tokens, lengths, keys = one.rows(batch)
        how: dict[str, Any] = {"policies": policies, "stored": one.stored, "key": keys}
        start = time.perf_counter()
        left = read_whole(one.model, one.params, Prompts(tokens, lengths), one.shape.planned, **how)
        seconds = (time.perf_counter() - start) / len(jax.block_until_ready(left)[0])
        held.append(Full(*left, seconds if n else None))
        batches_held.append(batch)
        if sum(full.num_bytes for full in held) + held[-1].num_bytes > HELD:
            yield batches_held, held
            batches_held, held = [], []
    if held:
        yield batches_held, held


def share_slots(engines: Sequence["Engine"]) -> None:
    """Lets engines of a shape whose policies differ in budgets alone run in the slots of the largest.

    They share programs, and what they keep is the same.
    """
    shared = dict[kvjax.Plan, dict[Any, Any]]()
    for engine, plan in zip(engines, sharing([engine.plan for engine in engines]), strict=True):
        engine.run_in, engine.programs = plan, shared.setdefault(plan, {})


# --- one policy ---

# Ids, their log-probabilities, the most live slots of a head after each, and the mean of heads before the first, too.
_Answer = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class Engine:
    """A policy compiled for the prompts of one shape.

    Attributes:
      shape: the prompts.
      at_once: how many of them run together, at most; a batch is filled up with copies of its first one.
      plan: sizes of their caches.
      run_in: the plan whose slots they run in: that of a larger budget, where programs are shared.
      programs: what was compiled for a state of some sizes, by these; engines that share slots share them.
      stored: how prompts that others read, too, must be stored and read for it; None if it reads them by itself.
      cost: what one prompt, or one batch, takes of memory, as lines say it; empty before `compile`. `slots` and
        `kv_bytes` are for one sequence, over all layers and kv heads; `kv_bytes_needed` is without what sizes are
        rounded up by. All three are what the policy's own budget needs. A line's `kv_bytes_fitted` is without what
        stays empty once its prompt is read, as after `State.fit`; `state_bytes` is what the state holds beside keys
        and values: positions, and what scores gather. `prefill_peak_bytes` and `decode_peak_bytes`
        are arguments (with parameters), results and temporaries of the compiled programs, for one batch on one device;
        None where the backend does not say, where prompts are read by several programs (once for all policies, or
        again for one), and where the program is that of a larger budget.
    """

    def __init__(
        self,
        model: Any,
        params: PyTree[Any],
        made: Made,
        shape: Shape,
        *,
        batch_size: int,
        tokenizer: Any,
        block: int | None = None,
        mesh: Mesh | None = None,
        once: bool = False,
        texts: bool = False,
    ):
        """Plans; `compile` comes before `run`.

        Args:
          model, params, made, shape: what runs; of `made` the policy, with its learned parameters if it has any.
          batch_size: prompts that run together.
          tokenizer: of the model.
          block, mesh: how prompts are read, as in `kvjax.prefill`.
          once: whether other policies read the prompts, too: with neither blocks nor a mesh.
          texts: whether prompts are texts, which are read token by token, or in blocks, under a policy that evicts
            meanwhile: how likely every token is (RoCo, Fig. 5). Nothing follows them.

        Raises:
          ValueError: sizes that the policy cannot work with, or that the devices of a mesh do not divide; learned
            parameters that do not fit the policy; a text of one block.
        """
        policy, own = with_params(made)
        self.model, self.policy, self.shape, self.batch_size = model, policy, shape, batch_size
        self.at_once = batch_size
        self.mesh, self.params = mesh, on_mesh(model, params, mesh, batch_size)
        self.tokenizer, self.block, self.texts = tokenizer, block, texts
        self.forget()
        self.cost: Line = {}
        self._ends, L = end_ids(model, None), len(kv_layers(model.config))
        stored = stored_as(policy, L)
        self.stored, self._again = stored if once and block is None and mesh is None else None, bool(stored.again)
        self.plan = kvjax.make_plan(model.config, policy, np.array(shape.lengths), shape.width, shape.planned)
        self.run_in = self.plan
        try:
            self._own = own_params(policy, self.plan.infos, own)
        except ValueError as e:
            raise ValueError(f"{e}; make(budget) of a file returns them behind the policy: (policy, parameters)") from e
        check_block(self.plan, block, shape.width)
        if texts and (short := min(shape.lengths)) <= (block or 1):
            raise ValueError(
                f"a text of {short} tokens is one block of {block or 1}; give longer texts, or smaller blocks"
            )
        self._rules = checked_rules(model, shape.num_beams, shape.planned, None) if shape.num_beams > 1 else None
        longest = max(shape.prompts, key=lambda p: len(p.tokens) + p.steps)
        check_positions(model.config, self.plan, np.array([len(longest.tokens)]), longest.steps, block)

    def rows(self, prompts: Sequence[Prompt]) -> tuple[Any, Any, Key[Array, "B"]]:
        """A batch's tokens, lengths and keys; a short one is filled up with copies of its first prompt."""
        rows = [*prompts, *[prompts[0]] * (self.batch_size - len(prompts))]
        return *pad_left([row.tokens for row in rows], width=self.shape.width), jnp.stack([row.key for row in rows])

    def compile(self, full: Full | None = None) -> None:
        """Compiles all programs ahead of time, so that no timing contains it.

        Args:
          full: what a batch of the shape leaves that was read once for several policies, if `run` gets such.
        """
        B, shape, mesh = self.batch_size, self.shape, self.mesh
        how = {"policy": self.policy, "plan": self.run_in, "block": self.block, "mesh": mesh}
        how["max_new_tokens"] = shape.planned
        rows = lambda x: None if mesh is None else sharding(x, mesh, (DATA,))
        placed: Any = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows(x))
        ints: Any = lambda *size: placed(jax.ShapeDtypeStruct(size, jnp.int32))
        keys, found, peak = jax.random.split(jax.random.key(0), B), None, None
        if self.texts:
            given = ints(B, shape.width), ints(B), placed(keys)
            how = {"policy": self.policy, "plan": self.plan, "block": self.block or 1}
            self._read = _likelihoods.lower(self.model, self.params, *given, **how).compile()
            return
        if full is not None:
            try:
                found = self._evicted(full)
            except HidesTokens:  # rows of its prompt read less than is stored
                self.stored = None
        if found is None and self._again:
            read: Any = functools.partial(kvjax.prefill, self.model, **how)  # not traced, as prompts have to be known
            lengths = np.full(B, max(len(p.tokens) for p in shape.prompts))
            tokens = np.zeros((B, shape.width), np.int32)
            found = read(self.params, tokens, lengths=lengths, key=keys, policy_params=self._own)
            self._read = read
        if found is None:
            how |= {"lengths": ints(B), "key": placed(keys), "policy_params": self._own}
            self._read = _read.lower(self.model, self.params, ints(B, shape.width), **how).compile()
            found, peak = self._read.out_info, peak_bytes(self._read)
        logits, state = found
        M, of_rows = max(shape.planned, 1), lambda kind: placed(jax.ShapeDtypeStruct((B,), kind))
        kept = None if self._rules is None else logits
        at = Decoding(ints(B), of_rows(jnp.float32), of_rows(jnp.bool_), state, left=ints(B), logits=kept)
        stays = None if mesh is None else (None, jax.tree.map(lambda x: x.sharding, at))
        given, ends = (np.zeros((M, B), np.int32), np.zeros((M, B), np.bool_)), (*self._ends, NO_TOKEN)
        how = {"chunk": M, "ends": ends, "waits": False, "also": _live}
        run = jax.jit(decode_tokens, static_argnames=("model", *how), donate_argnames="at", out_shardings=stays)
        self._go_on = self._once(run, at, given, np.int32(0), **how)
        programs = [self._go_on]
        if self._rules is not None:
            rules = dataclasses.replace(self._rules, longest=ints(B))
            self._search = self._once(searched, logits, state, rules)
            programs.append(self._search)
        size = lambda x: x.size * x.dtype.itemsize
        each = [sum(size(x) for x in (layer.k, layer.v)) // B for layer in state.layers]
        part = lambda slots: round(sum(n * s / m for n, s, m in zip(each, slots, self.run_in.capacities, strict=True)))
        decode = max((n for n in map(peak_bytes, programs) if n is not None), default=None)
        peak, decode = (peak, decode) if self.run_in == self.plan else (None, None)
        peaks = {"prefill_peak_bytes": peak, "decode_peak_bytes": decode}
        own = {"kv_bytes": part(self.plan.capacities), "kv_bytes_needed": part(self._needed())}
        own["state_bytes"] = round(
            sum(map(self._beside_kv, state.layers, self.plan.capacities, self.run_in.capacities))
        )
        self.cost = {"slots": self.plan.num_slots, **own, **peaks}
        self._slot_bytes = [n / m for n, m in zip(each, self.run_in.capacities, strict=True)]

    def _beside_kv(self, layer: Any, slots: int, ran_in: int) -> float:
        """Bytes a sequence of what a layer holds beside keys and values, in so many slots."""
        size = lambda x: x.size * x.dtype.itemsize / self.batch_size * (slots / ran_in if ran_in in x.shape else 1)
        beside = dataclasses.replace(layer, k=None, v=None)
        return sum(size(x) for x in jax.tree.leaves(beside) if x.shape[:1] == (self.batch_size,))

    def _once(self, function: Any, *arguments: Any, **static: Any) -> Any:
        """A function of the model, compiled for arguments of these shapes once for all that share programs."""
        leaves, tree = jax.tree.flatten(arguments)
        key = function.__name__, tree, *((x.shape, str(x.dtype)) for x in leaves), *static.items()
        if key not in self.programs:
            self.programs[key] = function.lower(self.model, self.params, *arguments, **static).compile()
        return self.programs[key]

    def forget(self) -> None:
        """Lets go of what was compiled."""
        self.programs: dict[Any, Any] = {}
        self._read: Any = None
        self._go_on: Any = None
        self._search: Any = None

    def _needed(self) -> list[int]:
        """Slots that every layer's policy asks for, of a head, or of all heads in a pool."""
        lengths, found = np.array(self.shape.lengths), []
        for i, info in enumerate(self.plan.infos):
            policy = self.policy.at(i, info.num_layers)
            sizes = policy.sizes(info, lengths)
            found.append(int(np.max(sizes.total if policy.layout.pool else sizes.per_head)))
        return found

    def _evicted(self, full: Full) -> tuple[Float[Array, "B V"], kvjax.State]:
        """The logits of a batch, and its state after the policy, in arrays of their own."""
        state = dataclasses.replace(full.state, params=self._own)
        return jnp.copy(full.logits), jax.tree.map(jnp.copy, state.applied(self.policy, full.stats, self.run_in))

    def run(
        self, prompts: Sequence[Prompt], shown: Collection[Example] = (), full: Full | None = None
    ) -> tuple[list[list[Line]], list[list[np.ndarray]]]:
        """Reads a batch of prompts once, evicts, and answers the questions on a copy of the state each.

        Args:
          prompts: at most a batch.
          shown: the examples whose kept positions are wanted.
          full: what the prompts leave that were read for several policies; read here if None, or where the policy has
            to read by itself. Lines then have no `prefill_seconds`, but the `read_seconds` of all these policies.

        Returns:
          The lines of every prompt's questions; and of each prompt whose example is among `shown` the positions "K S"
          that every layer holds.

        Raises:
          ValueError: logits that are no numbers.
        """
        if self.texts:
            return self._predicted(prompts), []
        B = self.batch_size
        rows = [*prompts, *[prompts[0]] * (B - len(prompts))]
        if full is None or self.stored is None:
            tokens, lengths, keys = self.rows(prompts)
            how = {"lengths": lengths, "key": keys, "policy_params": self._own}
            start = time.perf_counter()
            logits, state = jax.block_until_ready(self._read(self.params, tokens, **how))
            prefill_seconds = (time.perf_counter() - start) / B
        else:
            prefill_seconds, (logits, state) = None, self._evicted(full)
        checked_logits(logits, state)
        live = np.mean([kv.num_live.mean(1, dtype=jnp.float32) for kv in state.layers], axis=0)
        fitted = np.minimum(state.num_needed, self._needed()) @ self._slot_bytes
        wanted = [b for b, row in enumerate(prompts) if any(row.example is example for example in shown)]
        positions = [[np.asarray(layer.head_pos[b]) for layer in state.layers] for b in wanted]
        found: list[list[Line]] = [[] for _ in prompts]
        decode_seconds, num_tokens = 0.0, 0
        rounds = max(len(row.asked) for row in rows)
        for n in range(rounds):
            again = n + 1 < rounds
            own = jax.block_until_ready(jax.tree.map(jnp.copy, state) if again else state)
            answers, seconds = self._answers(logits, own, rows, n)
            decode_seconds += seconds
            num_tokens += B * max(len(ids) for ids, *_ in answers)
            for row, answer, lines in zip(prompts, answers, found, strict=False):
                if n < len(row.asked):
                    lines.append(self._line(row, *row.asked[n], *answer))
        speed = num_tokens / decode_seconds if self.run_in == self.plan else None
        times = {"prefill_seconds": prefill_seconds, "decode_tokens_per_second": speed}
        if prefill_seconds is None and full is not None:
            times["read_seconds"] = full.seconds
        for b, (row, lines) in enumerate(zip(prompts, found, strict=True)):
            same = {"prompt_tokens": len(row.tokens), "live": float(live[b]), "kv_bytes_fitted": round(fitted[b])}
            same |= {**self.cost, **times}
            found[b] = [{**line, **same} for line in lines]
        return found, positions

    def _predicted(self, prompts: Sequence[Prompt]) -> list[list[Line]]:
        """The line of every text."""
        arrays = self.rows(prompts)
        start = time.perf_counter()
        found = np.asarray(self._read(self.params, *arrays))
        seconds = (time.perf_counter() - start) / self.batch_size
        if not np.isfinite(found).all():
            raise ValueError(f"likelihoods are no numbers: {found.tolist()}; the model's logits are not")
        times = {"prefill_seconds": seconds, "decode_tokens_per_second": self.shape.width / seconds}
        scored = lambda n: num_scored(n, self.block or 1)
        line = lambda n, x: {"question": 0, "nll": float(-x), "tokens": scored(n), "prompt_tokens": n, **times}
        return [[line(len(p.tokens), x)] for p, x in zip(prompts, found, strict=False)]

    def _answers(
        self, logits: Float[Array, "B V"], state: kvjax.State, rows: Sequence[Prompt], n: int
    ) -> tuple[list[_Answer], float]:
        """What follows a prompt up to the answer of the n-th question of every row, and how many seconds that took.

        Nothing follows for rows that have fewer questions. Where answers are searched for there are no
        log-probabilities, and of live slots the most of a head alone.
        """
        B, M = len(rows), max(self.shape.planned, 1)
        given, num_given, num_new = np.zeros((M, B), np.int32), np.zeros(B, np.int32), np.zeros(B, np.int32)
        stops: list[tuple[str, ...]] = [()] * B
        for b, row in enumerate(rows):
            if n < len(row.asked):
                i, ids = row.asked[n]
                question = row.example.questions[i]
                given[: len(ids), b], num_given[b] = ids, len(ids)
                num_new[b], stops[b] = question.max_new_tokens, question.stop
        text = lambda b, ids: self.tokenizer.decode(ids[num_given[b] :].tolist())
        ended = lambda b, ids: any(stop in text(b, ids) for stop in stops[b])
        known, before = np.arange(M)[:, None] < num_given, np.array(state.length)
        held = np.array(state.num_live)
        at = begin(logits, state, ends=(*self._ends, NO_TOKEN), given=(given[0], known[0]))
        limits, run = num_given + num_new, functools.partial(self._go_on, self.params)
        if self._rules is not None:
            limits, at = num_given, dataclasses.replace(at, logits=jnp.copy(logits))
        start = time.perf_counter()
        steps, at = continued(run, at, (given, known), limits, ended if any(stops) else None)
        if self._rules is None:
            parts = zip(np.asarray(at.state.length) - before, *(x.T for x in jax.tree.leaves(steps)), strict=True)
            answers = [
                (ids[:end], logp[:end], most[:end], np.append(held[b].sum(), total[:end]) / held[b].size)
                for b, (end, ids, logp, most, total) in enumerate(parts)
            ]
            return answers, time.perf_counter() - start
        rules = dataclasses.replace(self._rules, longest=jnp.asarray(num_new))
        found = jax.block_until_ready(self._search(self.params, at.logits, at.state, rules))
        seconds = time.perf_counter() - start
        live = np.maximum(*(np.asarray(state.num_live).max((1, 2)) for state in (at.state, found.state)))
        each = given.T, num_given, np.asarray(found.tokens)[:, 0], np.asarray(found.lengths)[:, 0], live
        none, parts = np.zeros(0), zip(*each, strict=True)
        return [(np.append(ids[:n], x[:end]), none, most[None], none) for ids, n, x, end, most in parts], seconds

    def _line(
        self,
        row: Prompt,
        i: int,
        given: Tokens,
        ids: np.ndarray,
        logp: np.ndarray,
        most: np.ndarray,
        mean: Float[np.ndarray, "m"],
    ) -> Line:
        """The score of an answer, or the likelihood of a continuation."""
        if not np.isfinite(logp).all() or ids.min(initial=0) < 0:
            raise ValueError(f"logits of {row.example.task} {row.example.index} are not numbers; try a wider --dtype")
        question, answer = row.example.questions[i], ids[len(given) :].tolist()
        stopped = lambda count: any(s in self.tokenizer.decode(answer[:count]) for s in question.stop)
        if question.stop and stopped(len(answer)):  # with the token that completes its first stop string
            answer = answer[: bisect.bisect_left(range(len(answer)), True, key=stopped)]
        line: Line = {"question": i, "most_live": int(most[: len(given) + len(answer)].max(initial=0))}
        if question.continuation:
            n = len(question.continuation)
            return {**line, "nll": float(-logp[len(given) - n : len(given)].mean()), "tokens": n}
        output = text_of(self.tokenizer, question, answer, self._ends)
        judged = {"score": question.score(output), "metric": question.metric} if question.metric else {}
        line |= judged | {"output": output, "references": list(question.references), "tokens": len(answer)}
        if question.max_new_tokens < LONG or not len(mean):
            return line
        end, ended = self.tokenizer.decode(answer[-LAST:]), bool(answer) and answer[-1] in self._ends
        return line | told(answer, end, ended, mean[len(given) :][: len(answer) + 1])


def text_of(tokenizer: Any, question: Question, answer: Sequence[int], ends: Collection[int]) -> str:
    """What an answer says: up to the token that ends it, or the first of the question's stop strings."""
    text = tokenizer.decode([*answer[:-1]] if answer and answer[-1] in ends else [*answer])
    return text[: min((at for stop in question.stop if (at := text.find(stop)) >= 0), default=len(text))]


def peak_bytes(compiled: Any) -> int | None:
    """Arguments, results and temporaries of a compiled program; None where the backend does not say."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    parts = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
    return int(sum(parts) - memory.alias_size_in_bytes)
