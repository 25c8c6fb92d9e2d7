"""A model under a policy as lm-eval sees models: likelihoods, rolling likelihoods, and generation until a string.

Importing this registers it: `lm_eval.simple_evaluate(model="kvjax", model_args=...)`.

Every request is as it would be alone: batches are of one program's shape, prompts are padded on the left, and random
draws are those of the request's own tokens and of how often it was asked before.
"""

import collections
import dataclasses
import itertools
import logging
import reprlib
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key
from tqdm import tqdm

import kvjax
from kvjax import models
from kvjax.configs.experiment import Budget
from kvjax.contract.checks import one_of, whole
from kvjax.experiments.core.provenance import definition
from kvjax.experiments.harness.options import policy_of, sampler_of
from kvjax.experiments.harness.scoring import rounded_up, score_after, score_whole
from kvjax.generation.loop import NO_TOKEN
from kvjax.run.checks import check_block, check_positions
from kvjax.run.plan import bucket
from kvjax.text.encode import rendered

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import CacheHook, TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as e:
    raise ValueError(f"lm-eval cannot be imported ({e}); pip install 'kvjax[eval]'") from e

Truncation = Literal["left", "middle"]

_LOG = logging.getLogger(__name__)
_FULL = kvjax.Policy()
_IDENTITY = "what these responses are of"  # the key of a response cache; others are digests


@dataclasses.dataclass(frozen=True)
class _Job:
    """A request as tokens.

    Attributes:
      index: its place among the requests.
      ids: the prompt, or the context.
      program: what jobs of one batch have in common, the width first.
      draw: seeds what is random about it.
      continuation: what is scored.
    """

    index: int
    ids: tuple[int, ...]
    program: tuple[Any, ...]
    draw: int
    continuation: tuple[int, ...] = ()


@register_model("kvjax")
class HarnessModel(TemplateLM):
    """What `--model kvjax` is; these are the options of `--model_args`.

    Args:
      pretrained: a checkpoint directory, a hub id or a name of `models.PRESETS`; "embedded" or "varied" for a
        small model that comes with the project.
      policy: what to evict, a config by name or path; in Python, a policy too.
      budget: live tokens a kv head and layer: a number of tokens (int) or a share of the prompt (float).
      block: read prompts in blocks of so many tokens; at once if None.
      dtype: of parameters, activations and the KV cache; "auto" for the one that is stored.
      batch_size: requests that run together.
      max_length: the most tokens of prompt and answer; the positions that the model was trained for if None.
      max_gen_toks: tokens to generate where a task does not say.
      truncation: which part of a prompt that is too long is left out, its beginning ("left", as lm-eval's `hf` does it)
        or its middle, as LongBench's own script does it.
      seed: of random draws.
      tokenizer: where the tokenizer is, if not with the model.
      max_batch_size, device: what lm-eval passes to every model, without effect: JAX_PLATFORMS chooses the device.
      **parameters: the policy's, by the names that they have in its config.

    Raises:
      ValueError: what does not exist, or does not fit; always before anything runs.
    """

    def __init__(
        self,
        pretrained: str = "embedded",
        *,
        policy: str | kvjax.Policy = "full",
        budget: Budget | None = None,
        block: int | None = None,
        dtype: str = "auto",
        batch_size: int | str = 1,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        truncation: Truncation = "left",
        seed: int = 0,
        tokenizer: str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **parameters: Any,
    ):
        super().__init__()
        batch_size = int(batch_size) if isinstance(batch_size, str) and batch_size.isdecimal() else batch_size
        self.batch_size = whole("batch_size", batch_size, why='"auto" is not supported')
        self.max_gen_toks = whole("max_gen_toks", max_gen_toks)
        one_of("truncation", truncation, *get_args(Truncation))
        self.truncation = truncation
        self.seed = whole("seed", seed, 0, 2**31 - 1)
        if max_length is not None:
            whole("max_length", max_length, 2)
        self.budget, (self.policy, origin) = budget, policy_of(policy, budget, parameters)
        self.source = pretrained
        self.tokenizer = models.load_tokenizer(self.source if tokenizer is None else tokenizer)
        self.model, self.params = models.load(self.source, dtype=dtype)
        config = self.model.config
        if max_length is not None and config.learned_positions and max_length > config.max_position:
            raise ValueError(
                f"max_length={max_length}, but the model has learned {config.max_position} positions; lower it"
            )
        self.max_length = config.max_position if max_length is None else max_length
        most = np.array([self.max_length - 1])
        longest = kvjax.make_plan(config, self.policy, most, self.max_length - 1, 1)
        self.block = check_block(longest, block, self.max_length - 1)
        check_positions(config, longest, most, 1, self.block)
        self.config = {
            "checkpoint": models.fingerprint(self.source),
            "tokenizer": str(tokenizer),
            "policy": definition(self.policy, origin),
            "block": self.block,
            "dtype": jnp.dtype(config.dtype).name,
            "max_length": self.max_length,
            "max_gen_toks": self.max_gen_toks,
            "truncation": truncation,
            "seed": seed,
        }
        self._ends = sorted({*config.eos_ids, self.eot_token_id} & set(range(config.vocab_size)))
        self._positions = config.max_position if config.learned_positions else 2**31 - 1
        self._refusals: dict[tuple[int, int], str | None] = {}
        self._compiled: set[Hashable] = set()
        self._num_requests = self._num_cut = self._num_whole = 0
        self._refused = ""

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Any:
        """As lm-eval makes models; what --model_args gives stands before --batch_size, which has a default."""
        given = {k: v for k, v in (additional_config or {}).items() if v is not None}
        return cls(**given | arg_dict)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        ids = (self.tokenizer.eos_token_id, *self.model.config.eos_ids)
        return next((i for i in ids if i is not None), self.prefix_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context: BOS, or else the end of the text before."""
        first = self.tokenizer.bos_token_id
        if first is None and self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has neither BOS nor EOS, so that nothing can stand before a text")
        return self.tokenizer.eos_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name in files of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What results say of the model besides its arguments, and how many prompts it cut or kept whole so far."""
        counts = {"requests": self._num_requests, "cut": self._num_cut, "kept_whole": self._num_whole}
        return {"model_num_parameters": models.num_params(self.params), "kvjax": {**self.config, **counts}}

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Takes the cache of responses (`--use_cache`), which is one model's under one policy.

        Raises:
          ValueError: it holds responses of another, which lm-eval would take for this one's.
        """
        if (stored := cache_hook.dbdict) is not None:
            there, here = stored.get(_IDENTITY), repr(sorted(self.config.items()))
            if (there is None and len(stored)) or there not in (None, here):
                raise ValueError(
                    f"{stored.filename} holds responses of {there or 'another model'}, not of {here}; give another "
                    "--use_cache"
                )
            stored[_IDENTITY] = here
            stored.commit()
        super().set_cache_hook(cache_hook)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text that the tokenizer's chat template makes of messages, without system ones where it refuses those.

        Raises:
          ValueError: no chat template, or one that refuses the messages.
        """
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError("the tokenizer has no chat template; leave --apply_chat_template out")
        template = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        others = [m for m in chat_history if m["role"] != "system"]
        try:
            return rendered(self.tokenizer, chat_history, **template)
        except ValueError as e:
            if len(others) == len(chat_history):
                raise
            _LOG.warning("%s; the system message is left out", e)
        return rendered(self.tokenizer, others, **template)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, with BOS at most once: where the tokenizer or the text puts it, unless `add_special_tokens`."""
        return models.encode(self.tokenizer, string, bos=add_special_tokens)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities of whole texts, in windows of `max_length` tokens as lm-eval's `hf` makes them.

        A window's context is one token, so that nothing but what a policy evicts while decoding shows in them: policies
        that evict after the prompt give what the full cache gives.

        Raises:
          ValueError: a budget that is a share of a prompt.
        """
        if isinstance(self.budget, float):
            raise ValueError(
                f"budget={self.budget} is a share of the prompt, which is one token where whole texts are scored; give "
                "a number of tokens"
            )
        totals: list[float] = []
        with tqdm(total=len(requests), desc="texts", disable=disable_tqdm) as bar:
            for at in range(0, len(requests), self.batch_size):  # so that an interrupted run has finished some
                some = requests[at : at + self.batch_size]
                for request, total in zip(some, self._totals(some), strict=True):
                    totals.append(total)
                    self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
                bar.update(len(some))
        return totals

    def _totals(self, requests: Sequence[Instance]) -> list[float]:
        how = {"prefix_token": self.prefix_token_id, "max_seq_len": self.max_length, "context_len": 1}
        cut = lambda text: map(make_disjoint_window, get_rolling_token_windows(self.tok_encode(text), **how))
        windows = [[*cut(*request.args)] for request in requests]
        parts = [(None, *window) for some in windows for window in some]
        found = iter(self._loglikelihood_tokens(parts, disable_tqdm=True))
        return [float(sum(part for part, _ in itertools.islice(found, len(some)))) for some in windows]

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """The log-probability of every continuation, and whether it is what greedy decoding gives.

        With the full cache, those of one pass of the model. Under a policy the context is read and evicted from as
        prompts are, and the continuation is read from what is left, one decode step a token.

        Raises:
          ValueError: a continuation without tokens, or longer than the model's context.
        """
        jobs = [self._to_score(i, *request) for i, request in enumerate(requests)]
        return self._answers("loglikelihood", [request for request, *_ in requests], jobs, self._scored, disable_tqdm)

    def _to_score(self, index: int, request: Any, context: list[int], continuation: list[int]) -> _Job:
        m = len(continuation)
        if not 0 < m <= self.max_length:
            raise ValueError(
                f"the continuation {reprlib.repr(request and request[1])} has {m} tokens, but must have 1 to "
                f"{self.max_length}, the model's context"
            )
        ids = self._shortened(context, self.max_length + 1 - m)
        most = self._positions
        scored = min(rounded_up(m), most - len(ids) + 1)
        width = min(bucket(len(ids)), most - scored + 1)
        program: tuple[Any, ...] = (width, scored, self._policy_for(len(ids), width, scored - 1))
        if program[2] == _FULL and self.block is None:
            program = (min(bucket(len(ids) + m - 1), most), "at once")
        return _Job(index, ids, program, _checksum(ids), continuation=tuple(continuation))

    def _scored(self, batch: Sequence[_Job]) -> list[tuple[float, bool]]:
        width, scored, *policy = batch[0].program
        jobs, sizes = self._filled(batch), [len(job.continuation) for job in batch]
        if scored == "at once":
            read = [(*job.ids, *job.continuation) for job in jobs]
            tokens, lengths = models.pad_left([ids[:-1] for ids in read], width=width)
            following, _ = models.pad_left([ids[1:] for ids in read], width=width)
            logp, greedy = score_whole(self.model, self.params, tokens, lengths, following)
            parts = [slice(width - m, width) for m in sizes]
        else:
            tokens, lengths = models.pad_left([job.ids for job in jobs], width=width)
            continuations = np.zeros((len(jobs), scored), np.int32)
            for row, job in zip(continuations, jobs, strict=True):
                row[: len(job.continuation)] = job.continuation
            options: dict[str, Any] = {"policy": policy[0], "block": self.block}
            logp, greedy = score_after(
                self.model, self.params, tokens, lengths, self._keys(jobs), continuations, **options
            )
            parts = [slice(m) for m in sizes]
        logp, greedy = np.asarray(logp, np.float64), np.asarray(greedy)
        return [(float(logp[i, part].sum()), bool(greedy[i, part].all())) for i, part in enumerate(parts)]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """What follows every prompt, up to the first of its stop strings, which is left out, or the end token.

        Raises:
          ValueError: options of generation that do not exist, or an answer that leaves no room for a prompt.
        """
        before: collections.Counter[Any] = collections.Counter()
        jobs = [self._to_generate(i, *request.args, before=before) for i, request in enumerate(requests)]
        return self._answers("generate_until", [r.args for r in requests], jobs, self._generated, disable_tqdm)

    def _to_generate(self, index: int, prompt: str, options: Any, *, before: collections.Counter[Any]) -> _Job:
        given = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        steps, stop = whole("max_gen_toks", given.pop("max_gen_toks")), given.pop("until")
        if steps >= self.max_length:
            raise ValueError(
                f"max_gen_toks={steps} leaves no room for a prompt in the model's context of {self.max_length}; lower "
                "it with --gen_kwargs max_gen_toks=..., or raise max_length="
            )
        ids = self._shortened(self.tok_encode(prompt) or [self.prefix_token_id], self.max_length - steps)
        before[ids, repr(options)] += 1
        width = min(bucket(len(ids)), self._positions - steps)
        program = (width, steps, tuple(map(str, stop)), sampler_of(given), self._policy_for(len(ids), width, steps))
        return _Job(index, ids, program, _checksum(ids, before[ids, repr(options)]))

    def _generated(self, batch: Sequence[_Job]) -> list[str]:
        width, steps, stop, sampler, policy = batch[0].program
        jobs = self._filled(batch)
        tokens, lengths = models.pad_left([job.ids for job in jobs], width=width)
        options: dict[str, Any] = {"policy": policy, "max_new_tokens": steps, "lengths": lengths, "sampler": sampler}
        options |= {"key": self._keys(jobs), "block": self.block, "eos_ids": self._ends}
        if stops := [text for text in stop if text]:
            made: Any = kvjax.stream(self.model, self.params, tokens, tokenizer=self.tokenizer, stop=stops, **options)
            collections.deque(made, maxlen=0)  # until every sequence has stopped
        else:
            made = kvjax.generate(self.model, self.params, tokens, **options)
        ids, ends = np.asarray(made.tokens), np.asarray(made.lengths)
        if (ids == NO_TOKEN).any():
            raise ValueError(f"the logits are not numbers, for one of {len(batch)} prompts of at most {width} tokens")
        end = self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        cut = handle_stop_sequences(list(stop), eos=end)
        texts = []
        for row, n in zip(ids[: len(batch)], ends, strict=False):
            text = self.tokenizer.decode(row[:n].tolist(), skip_special_tokens=True)
            texts.append(postprocess_generated_text(text, stop=cut, think_end_token=None))
        return texts

    def _shortened(self, ids: Sequence[int], room: int) -> tuple[int, ...]:
        """A prompt in so many tokens."""
        if len(ids) <= room:
            return tuple(ids)
        self._num_cut += 1
        head = room // 2 if self.truncation == "middle" else 0
        return (*ids[:head], *ids[len(ids) - room + head :])

    def _policy_for(self, tokens: int, width: int, after: int) -> kvjax.Policy:
        """The model's policy, or the full cache for a prompt that is too short for it."""
        if (tokens, after) not in self._refusals:
            try:
                kvjax.make_plan(self.model.config, self.policy, (tokens,), width, after)
                self._refusals[tokens, after] = None
            except ValueError as e:
                self._refusals[tokens, after] = str(e)
        if (refusal := self._refusals[tokens, after]) is None:
            return self.policy
        self._num_whole, self._refused = self._num_whole + 1, refusal
        return _FULL

    def _filled(self, batch: Sequence[_Job]) -> list[_Job]:
        return [*batch, *[batch[0]] * (self.batch_size - len(batch))]

    def _keys(self, jobs: Sequence[_Job]) -> Key[Array, "B"]:
        draws = jnp.array([job.draw for job in jobs], jnp.uint32)
        return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(self.seed), draws)

    def _answers(
        self,
        kind: str,
        requests: Sequence[Any],
        jobs: Sequence[_Job],
        step: Callable[[Sequence[_Job]], Sequence[Any]],
        disable_tqdm: bool,
    ) -> list[Any]:
        """What a step gives for every job, kept for the request that it is of, if it is of one.

        Jobs of one program run together, the longest first, as lm-eval's `hf` has them: a lack of memory shows early.
        """
        together: dict[Hashable, list[_Job]] = {}
        for job in sorted(jobs, key=lambda job: -job.program[0]):
            together.setdefault(job.program, []).append(job)
        found: list[Any] = [None] * len(jobs)
        with tqdm(total=len(jobs), desc=kind, disable=disable_tqdm) as bar:
            for program, some in together.items():
                bar.set_postfix_str("" if program in self._compiled else "compiling")
                for at in range(0, len(some), self.batch_size):
                    batch = some[at : at + self.batch_size]
                    for job, answer in zip(batch, step(batch), strict=True):
                        found[job.index] = answer
                        if requests[job.index] is not None:
                            self.cache_hook.add_partial(kind, requests[job.index], answer)
                    bar.set_postfix_str("")
                    bar.update(len(batch))
                self._compiled.add(program)
        self._num_requests += len(jobs)
        if self._num_cut:
            part = "beginning" if self.truncation == "left" else "middle"
            _LOG.warning(
                "%d prompts so far are too long for %d tokens, and lack their %s", self._num_cut, self.max_length, part
            )
        if self._num_whole:
            _LOG.warning(
                "%d of %d prompts so far are kept whole: %s", self._num_whole, self._num_requests, self._refused
            )
        return found


def _checksum(ids: Sequence[int], *more: int) -> int:
    return zlib.crc32(np.array([*ids, *more], np.int64).tobytes())
