"""What drivers are asked for: a model, prompts, tokens, a request for new ones. What makes no sense is refused here.

Checks run on the host, before anything is traced. Traced values pass with their shapes and types checked alone.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.cache.pool import PooledKV
from kvjax.cache.state import KVState, LayerKV
from kvjax.drivers.attention import Attend
from kvjax.drivers.sampling import Sampler
from kvjax.functions import check_unchanged
from kvjax.pallas_kernels.values import (
    MOST_TOKENS,
    a,
    as_given,
    as_numpy,
    check_array,
    check_arrays,
    checked,
    each,
    optional,
    whole,
)
from kvjax.plan import CachePlan, ModelConfig, Sizes, as_lengths
from kvjax.policy import as_scored as as_scored
from kvjax.scoring.stats import LayerStats


@runtime_checkable
class Model(Protocol):
    """A language model as the drivers see it: hashable, compared by value."""

    @property
    def config(self) -> ModelConfig:
        """The model's sizes."""
        ...

    def __call__(
        self,
        params: PyTree[Any],
        tokens: Int[Array, "B T"],
        layers: tuple[LayerKV | PooledKV, ...],
        *,
        attend: Attend,
        last_only: bool,
    ) -> tuple[Float[Array, "B _ V"], tuple[LayerKV | PooledKV, ...], tuple[LayerStats, ...]]:
        """Logits (of the last column only, if asked), and every layer's cache and statistics after the step.

        A model whose config has `learned_positions` is called with `positions` "B T" too, -1 for padding.
        """
        ...


def check_model(model: Any, params: Any = ()) -> None:
    """Raises ValueError for what is no model, such as its parameters, and for parameters that are no arrays."""
    if not isinstance(model, Model):
        raise ValueError(
            f"model is a {type(model).__name__}, not a model; models.load(...) returns one, and its parameters"
        )
    check_arrays("params", params)


@functools.lru_cache(maxsize=64)
def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: jnp.shape(x) for name, x in _named(model.shapes).items()}


def _named(params: PyTree[Any]) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}


def check_params(model: Any, params: PyTree[Any]) -> None:
    """Refuses parameters of other names or shapes than the model's, where it has `shapes`, or that are no floats.

    Raises:
      ValueError: how many there are, and what the first is and should be.
    """
    check_arrays("params", params)
    if not hasattr(model, "shapes"):
        return
    given, wanted = _named(params), _shapes(model)
    here = {name: jnp.shape(x) for name, x in given.items()}
    if wrong := [n for n in sorted({*here, *wanted}) if here.get(n) != wanted.get(n)]:
        name = wrong[0]
        raise ValueError(
            f"{len(wrong)} of {len(wanted)} parameters do not fit the model: {name} is {here.get(name, 'absent')}, but "
            f"the model wants {wanted.get(name, 'none')}; give the parameters that were loaded or made with this model"
        )
    kinds = {name: jnp.result_type(x) for name, x in given.items()}
    if odd := [name for name, kind in kinds.items() if not jnp.issubdtype(kind, jnp.floating)]:
        raise ValueError(
            f"{len(odd)} of {len(wanted)} parameters are no floats: {odd[0]} is {kinds[odd[0]]}; give them as they "
            "were loaded, or cast them to a dtype such as bfloat16"
        )


def _ids_given(name: str, x: Any) -> np.ndarray | Array:
    """What a user gave for every token or prompt, as an array."""
    return as_given(name, x, "; pad prompts of different lengths on the left (models.pad_left) and give lengths=")


def check_vocabulary(model: Model, ids: np.ndarray) -> None:
    """Raises ValueError for token ids outside the model's vocabulary, negative ones among them."""
    vocab = model.config.vocab_size
    if ids.size and (ids.min() < 0 or ids.max() >= vocab):
        raise ValueError(
            f"token id {ids.min() if ids.min() < 0 else ids.max()} is outside the vocabulary of {vocab} (0 to "
            f"{vocab - 1}); was the text encoded with this model's tokenizer?"
        )


def as_ids(
    model: Model, tokens: Any, shape: tuple[int | None, ...], meaning: str, *, real: Any = None
) -> Int[Array, "..."]:
    """Token ids as an array of 32-bit integers.

    Args:
      model: whose vocabulary they are of.
      tokens: the ids. Traced ones pass with their shape and type checked alone.
      shape: what is expected; None for any size of at least 1.
      meaning: the same in words.
      real: which of them are tokens; the others may be any numbers. All are if None, or if it is traced.

    Raises:
      ValueError: no integers, another shape, ids outside the vocabulary.
    """
    known = _ids_given("tokens", tokens)
    fits = known.ndim == len(shape) and all(
        n == m or (m is None and n > 0) for n, m in zip(known.shape, shape, strict=True)
    )
    if not fits or not jnp.issubdtype(known.dtype, jnp.integer):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        got = f"{known.dtype} of shape {known.shape}" if known.size else f"none, in the shape {known.shape}"
        raise ValueError(f"tokens must be integers of shape ({wanted}), {meaning}; got {got}")
    if not isinstance(known, jax.core.Tracer) and not isinstance(real, jax.core.Tracer):
        ids = np.asarray(known)
        check_vocabulary(model, ids if real is None else ids[np.asarray(real)])
    return jnp.asarray(known, jnp.int32)


def _moved_right(
    tokens: np.ndarray | Int[Array, "B T"], mask: Any
) -> tuple[np.ndarray | Int[Array, "B T"], np.ndarray | Int[Array, "B"]]:
    """Tokens behind their padding, and how many of them each row has."""
    mask = _ids_given("attention_mask", mask)
    known = not isinstance(mask, jax.core.Tracer)
    if mask.shape != tokens.shape or (known and not np.isin(np.asarray(mask), (0, 1)).all()):
        raise ValueError(
            f"attention_mask must be 1 for tokens and 0 for padding, of the tokens' shape {tokens.shape}; got "
            f"{mask.dtype} of shape {mask.shape}"
        )
    np_or_jnp: Any = np if known and not isinstance(tokens, jax.core.Tracer) else jnp
    mask = np_or_jnp.asarray(mask) != 0
    order = np_or_jnp.argsort(mask, axis=1, stable=True)
    return np_or_jnp.take_along_axis(np_or_jnp.asarray(tokens), order, axis=1), mask.sum(1, dtype=np.int32)


def _check_left(tokens: np.ndarray, lengths: np.ndarray) -> None:
    """Raises ValueError for prompts "B T" that are padded on the right, where their lengths say the left.

    Padding may be any ids, even different ones. So they are refused only where every row that is shorter than T ends in
    as many equal ids as it is shorter by, the same id in all, while columns that would be padding differ in one of
    them. A row that is shorter by one has one such column, which differs from nothing: it alone is not told apart.
    """
    T = tokens.shape[1]
    column, short = np.arange(T)[None], T - lengths[:, None]
    last = tokens[column >= T - short]
    differs = ((column < short) & (tokens != tokens[:, :1])).any(1)
    if differs.any() and (last == last[0]).all():
        row = int(differs.argmax())
        n = int(lengths[row])
        raise ValueError(
            f"prompt {row} has lengths={n} of {T} tokens and ends in {T - n} times {last[0]}, as if it were padded on "
            f"the right, but its last {n} tokens are read; pad on the left (models.pad_left), or give attention_mask= "
            "in place of lengths="
        )


def check_prompts(
    model: Any, tokens: Any, lengths: Any = None, attention_mask: Any = None, *, params: Any = ()
) -> tuple[Int[Array, "B T"], np.ndarray | Int[Array, "B"]]:
    """Prompts as arrays, padded on the left, and their lengths, or a ValueError that says what is wrong with them.

    Traced values pass unchecked.

    Args:
      model: the model.
      tokens: token ids "B T".
      lengths: the prompts' own lengths, where they are padded on the left; on the right they are refused, as far as
        that can be told (`_check_left`).
      attention_mask: which are tokens, in place of `lengths`; padding may stand anywhere.
      params: the model's parameters, where a compiled program is given them.
    """
    check_model(model, params)
    tokens = _ids_given("tokens", tokens)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens must be integers of shape (batch, width), got {tokens.dtype} of shape {tokens.shape}; "
            "pad prompts of different lengths on the left and give lengths="
        )
    if tokens.size == 0:
        raise ValueError(f"the prompts are empty (shape {tokens.shape}); give at least one token, such as BOS")
    B, T = tokens.shape
    if attention_mask is not None:
        if lengths is not None:
            raise ValueError("lengths= and attention_mask= say the same twice; give one of them")
        tokens, lengths = _moved_right(tokens, attention_mask)
    lengths = as_lengths(lengths, B, T)
    if isinstance(lengths, np.ndarray) and not isinstance(tokens, jax.core.Tracer):
        check_vocabulary(model, np.asarray(tokens)[np.arange(T)[None] >= T - lengths[:, None]])
        if attention_mask is None:
            _check_left(np.asarray(tokens), lengths)
    return jnp.asarray(tokens, jnp.int32), lengths


def check_request(
    model: Model, max_new_tokens: int, sampler: Sampler, eos_ids: int | Sequence[int] | None, pad_id: int
) -> tuple[int, ...]:
    """The end tokens, or a ValueError that says what of a request for new tokens makes no sense.

    Of the model's own end tokens, those that its vocabulary has no logits for are left out, as it never draws them.
    """
    check_model(model)
    why = f"generate at least 1 token, a whole number, and at most {MOST_TOKENS:,}"
    checked(whole(1, MOST_TOKENS, why), "max_new_tokens", max_new_tokens)
    checked(a(Sampler), "sampler", sampler)
    checked(whole(-(2**31), 2**31 - 1), "pad_id", pad_id)
    if eos_ids is None:
        return tuple(i for i in getattr(model.config, "eos_ids", ()) if i < model.config.vocab_size)
    ids = whole(0, model.config.vocab_size - 1, f"end tokens lie in the vocabulary of {model.config.vocab_size}")
    return checked(each(ids) if hasattr(eos_ids, "__iter__") else lambda i: (ids(i),), "eos_ids", eos_ids)


def check_chunk(chunk: int) -> int:
    """How many steps a compiled call takes, for whose results there is memory whether as many tokens come or not."""
    return checked(whole(1, 2**20), "chunk", chunk)


def check_key(sampler: Sampler, key: Any) -> None:
    """Raises ValueError where tokens are to be drawn, but nobody says by which key."""
    if sampler.draws and key is None:
        raise ValueError(
            f"{sampler} draws tokens, but there is no key, so that every call would draw the same; give "
            "key=jax.random.key(a whole number), another one for other draws"
        )


def check_logits(model: Model, logits: Any, state: Any) -> None:
    """Raises ValueError for logits that are not one row of the model's vocabulary for every sequence of a state.

    So does a state whose policy holds a function that has changed since.
    """
    check_is(KVState, "state", state)
    check_unchanged(state.plan.policy)
    check_array("logits", logits, "batch", "vocabulary", shape=(len(state.length), model.config.vocab_size))


def check_room(config: ModelConfig, state: KVState, num_tokens: int | np.ndarray | Int[Array, "B"]) -> None:
    """Raises ValueError if a state was not planned for so many tokens more, of all rows or of each.

    Known numbers are checked, and traced ones pass. Temperatures, histories and tables of positions are made for the
    tokens planned, even where slots are left. A plan for more tokens than were asked for was not warned of as a whole:
    where these tokens leave the model's positions, they are (`check_positions`).
    """
    if any(isinstance(x, jax.core.Tracer) for x in (state.length, state.prompt_length, num_tokens)):
        return
    steps = int((np.asarray(state.length) - np.asarray(state.prompt_length) + num_tokens).max())
    planned = state.plan.max_new_tokens
    if steps > planned:
        raise ValueError(
            f"{steps} tokens come after the prompt, but the plan was made for {planned}; make it with "
            f"max_new_tokens={steps}, which takes no more memory where a policy evicts at every step"
        )
    if state.plan.rounded:
        check_positions(config, state.plan, np.asarray(state.length), np.asarray(num_tokens), seen=0)


def check_block(plan: CachePlan, block: int | None, width: int | None = None) -> int | None:
    """The size of blocks, the whole prompt at most, or None if it is read at once.

    Args:
      plan: for the prompts.
      block: what was asked for.
      width: of the prompts, where the plan's is rounded up. A block that holds it is None then.

    Raises:
      ValueError: no size of a block, or one in which the plan's policy cannot read its prompts.
    """
    T = plan.prompt_len if width is None else width
    why = "a block has at least 1 token, a whole number; use None to read the prompt at once"
    block = checked(optional(whole(1, why=why)), "block", block)
    block = None if block is None else min(block, T)
    if block is not None and block < T and plan.reads == "whole":
        raise ValueError(
            f"{type(plan.policy).__name__} looks at the whole prompt at once, but block={block} reads {T} tokens in "
            f"parts; use block=None"
        )
    if block != 1 and T > 1 and plan.reads == "rows":
        raise ValueError(
            f"every row of {plan.policy} decides what the next one reads, but block={block} reads {T} tokens otherwise "
            "than one by one; use block=1"
        )
    if width is None:
        return block
    return 1 if plan.reads == "rows" else None if block == T else block


def check_positions(
    config: ModelConfig,
    plan: CachePlan,
    prompt: int | np.ndarray,
    more: int | np.ndarray,
    *,
    block: int | None = None,
    seen: int | None = None,
) -> None:
    """Warns of a text that leaves the positions that a model was made for, with both numbers.

    Rotations and ALiBi's biases go on beyond them. A table of learned positions does not: `make_plan` refuses it.

    Args:
      config: the model's sizes.
      plan: for the text, or for a longer one.
      prompt: tokens of the longest prompt, or of every prompt.
      more: tokens that may come behind it, or behind every one.
      block: tokens of a block, None where the prompt is read at once.
      seen: how many of those behind the prompt an earlier call was about, where there was one.
    """
    rows = list(zip(*(x.tolist() for x in np.broadcast_arrays(np.atleast_1d(prompt), more)), strict=True))
    reach, border = getattr(config, "reach", None), getattr(config, "border", None)

    def beyond(prompt: int, total: int) -> bool:
        return reach is not None and total > reach and _distance(config, plan, prompt, total, block) > reach

    far = [(sum(row), *row) for row in {*rows} if beyond(row[0], sum(row))]
    if far := [row for row in far if seen is None or not beyond(row[1], row[1] + seen)]:
        total, prompt, more = max(far)
        warnings.warn(
            f"a prompt of {prompt} tokens and {more} behind it are {total}, but the model was made for {reach} "
            "positions, beyond which its predictions are not to be relied on; read and generate fewer tokens, or let a "
            "policy with positions='compact' read in blocks (block=)",
            stacklevel=3,
        )
    if border is None or "original" not in plan.positions:
        return
    if crossing := [(n + (seen or 0), n + more) for n, more in rows if n + (seen or 0) <= border < n + more]:
        warnings.warn(
            f"a text that grows from {crossing[0][0]} to {crossing[0][1]} tokens crosses the model's "
            f"original context of {border}, "
            "beyond which it has other rotary factors; keys that are stored keep theirs, so that distances to them are "
            "wrong: stay on one side, or read the text anew beyond it, as transformers does for Phi-3",
            stacklevel=3,
        )


def _distance(config: ModelConfig, plan: CachePlan, prompt: int, total: int, block: int | None) -> int:
    """How many tokens lie between the first and the last that meet in any layer, both included, at most."""

    def of(layer: int) -> int:
        slots, window = plan.capacities[layer], config.window(layer)
        slots = slots // plan.sites[layer].num_kv_heads if plan.layouts[layer] == "pool" else slots
        ranks = max(prompt, slots) if block is None else slots + block
        return min(total if plan.positions[layer] == "original" else ranks, total, total if window is None else window)

    return max(map(of, range(len(plan.sites))))


def check_is(kind: type, name: str, value: Any) -> None:
    """Refuses what is no plan, or no state."""
    if not isinstance(value, kind):
        made_by = {CachePlan: "make_plan", KVState: "prefill"}[kind]
        raise ValueError(f"{name} is a {type(value).__name__}, not a {kind.__name__} such as {made_by} returns")


def check_decodes(state: KVState) -> None:
    """Refuses a state without any slot, as `init_state` returns it, where a token is to be decoded."""
    if not all(kv.num_slots for kv in state.layers):
        raise ValueError("the state has no slots for a token, as no prompt was read into it; decode what prefill gives")


def check_sizes(plan: CachePlan, sizes: Any, lengths: Int[Array, "B"]) -> None:
    """Refuses what are not the sizes that `plan.sizes` gives for these sequences, whose lengths may be traced."""
    shapes = lambda x: jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), x)
    if not isinstance(sizes, Sizes) or shapes(sizes) != shapes(
        plan.sizes(plan.policy, [plan.prompt_len] * len(lengths))
    ):
        raise ValueError(
            f"sizes are not those of {len(lengths)} sequences under this plan; give plan.sizes(policy, lengths) for "
            "their lengths"
        )
    if not any(isinstance(x, jax.core.Tracer) for x in (lengths, sizes.lengths)):
        there, here = np.asarray(sizes.lengths).tolist(), np.asarray(lengths).tolist()
        if there != here:
            raise ValueError(f"sizes are those of prompts of {there} tokens, but these have {here}; make them anew")


def real_tokens(valid: Any, tokens: Any) -> Any:
    """Which of the tokens "B T" are real, where the last `valid` of each row are; None where that is traced."""
    if isinstance(valid, jax.core.Tracer) or not hasattr(tokens, "shape") or len(tokens.shape) != 2:
        return valid if isinstance(valid, jax.core.Tracer) else None
    known, (B, T) = as_numpy("valid", valid), tokens.shape
    if known.shape != (B,) or known.dtype.kind not in "iu" or known.min() < 0 or known.max() > T:
        raise ValueError(f"valid={known.tolist()}: must be {B} whole numbers, one a sequence, from 0 to {T}")
    return np.arange(T)[None] >= T - known[:, None]


def read_last(length: Any, tokens: Any) -> np.ndarray | None:
    """Which of the tokens "B T" a state has read, where they have the axes that they should have."""
    shape, read = np.shape(tokens), np.asarray(length)
    if len(shape) != 2 or shape[0] != len(read):
        return None
    if read.max() > shape[1]:
        raise ValueError(
            f"the state has read {read.max()} tokens, but tokens= holds {shape[1]} a sequence; give all that were read"
        )
    return np.arange(shape[1])[None] >= shape[1] - read[:, None]
