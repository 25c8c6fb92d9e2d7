"""Checks what users give, before anything is traced. Of traced values only shapes are known."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from kvjax.contract import MOST, Config, Ids, Model, PRNGKey, kv_layers, kv_shape, kv_sources
from kvjax.contract.checks import whole
from kvjax.run.plan import Plan, rereads
from kvjax.run.state import Prompts, State


def traced(*values: object) -> bool:
    """Whether any of the values is traced, so that its numbers are not known."""
    return any(isinstance(x, jax.core.Tracer) for x in values)


def as_array(name: str, x: Any, kind: type, shape: Sequence[int | None], meaning: str) -> Array | np.ndarray:
    """An array of numpy, or a traced one, of a kind such as `np.integer` and a shape, None for any size above 0."""
    if hasattr(x, "dtype") and not isinstance(x, jax.Array | np.ndarray | np.generic):
        raise ValueError(f"{name} is a {type(x).__module__}.{type(x).__name__}; give an array, such as x.numpy()")
    try:
        x = x if traced(x) or (isinstance(x, jax.Array) and kind is np.floating) else np.asarray(x)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} must be {meaning}, and no array comes of it: {error}") from None
    fits = x.ndim == len(shape) and all(n == m or (m is None and n) for n, m in zip(x.shape, shape, strict=True))
    if not fits or not jnp.issubdtype(x.dtype, kind):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        got = f"{x.dtype} of shape {x.shape}" if x.size else f"nothing (shape {x.shape}), but at least one is needed"
        raise ValueError(f"{name} must be {meaning}, of shape ({wanted}); got {got}")
    return x


_flat = functools.lru_cache(maxsize=64)(lambda model: jax.tree.flatten(model.shapes))  # made anew in milliseconds


def check_model(model: Model, params: PyTree) -> None:
    """Refuses what is no model, and parameters that are not arrays of floats of the model's names and shapes."""
    floats = lambda x: isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)
    leaves, tree = jax.tree.flatten(params)
    known, of_model = _flat(model) if hasattr(model, "shapes") else (leaves, tree)
    fits = lambda x, y: floats(x) and x.shape == y.shape
    if not hasattr(model, "shapes"):
        _check_layers(model, params)
    if leaves and tree == of_model and all(map(fits, leaves, known)):
        return
    named = lambda tree: {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    given = named(params)
    if odd := [n for n, x in given.items() if not floats(x)]:
        kind = getattr(given[odd[0]], "dtype", type(given[odd[0]]).__name__)
        raise ValueError(f"params{odd[0]} is {kind}, not an array of floats; give what models.load(...) returned")
    here = {n: x.shape for n, x in given.items()}
    wanted = {n: x.shape for n, x in named(model.shapes).items()} if hasattr(model, "shapes") else here
    if wrong := [n for n in sorted({*here, *wanted}) if here.get(n) != wanted.get(n)]:
        raise ValueError(
            f"{len(wrong)} parameters do not fit the model, such as params{wrong[0]}: {here.get(wrong[0], 'missing')}, "
            f"but the model has {wanted.get(wrong[0], 'none')}; give those that were loaded with this model"
        )


def _check_layers(model: Model, params: PyTree) -> None:
    """Refuses a model of one's own that does not say of every layer which is like it, and what its parameters are."""
    L, alike, parts = model.config.num_layers, model.alike, model.parts(params)
    if not isinstance(alike, tuple) or len(alike) != L or any(n not in range(i + 1) for i, n in enumerate(alike)):
        raise ValueError(f"the model's alike={alike!r} must be a tuple of {L} layers, of each the first like it")
    if not isinstance(parts, tuple) or len(parts) != 2 or not isinstance(parts[1], tuple) or len(parts[1]) != L:
        raise ValueError(f"the model's parts must return what is of no layer, and a tuple of what is of {L} layers")
    if (held := len(kv_layers(model.config))) < L and not (held and hasattr(model.config, "own_state")):
        raise ValueError(
            f"config.holds_kv is true of {held} of {L} layers; it must be of one, and config.own_state(layer, batch) "
            "must say what the others hold"
        )


def check_ids(model: Model, ids: Array | np.ndarray | Sequence[int]) -> None:
    """Refuses known token ids outside the vocabulary."""
    vocab = model.config.vocab_size
    if not traced(ids) and np.size(ids) and not 0 <= np.min(ids) <= np.max(ids) < vocab:
        wrong = np.min(ids) if np.min(ids) < 0 else np.max(ids)
        raise ValueError(f"token id {wrong} is outside the vocabulary, 0 to {vocab - 1}; encode with its tokenizer")


def check_lengths(lengths: Ids | None, batch: int, width: int) -> Array | np.ndarray:
    """Numbers of tokens of padded rows, `width` if None."""
    if lengths is None:
        return np.full(batch, width, np.int32)
    lengths = as_array("lengths", lengths, np.integer, (batch,), "integers")
    if not traced(lengths) and not 1 <= lengths.min() <= lengths.max() <= width:
        raise ValueError(f"lengths go from {lengths.min()} to {lengths.max()}, but a row has 1 to {width} tokens")
    return lengths.astype(np.int32)


def check_rows(model: Model, tokens: Ids, lengths: Ids | None, batch: int | None = None) -> Prompts:
    """Rows of token ids padded on the left, of which the last `lengths` are read; all if None."""
    advice = "integers, one row a sequence; pad shorter rows on the left (models.pad_left) and give lengths="
    tokens = as_array("tokens", tokens, np.integer, (batch, None), advice)
    lengths, T = check_lengths(lengths, *tokens.shape), tokens.shape[1]
    if not traced(tokens, lengths):
        check_ids(model, tokens[np.arange(T)[None] >= T - lengths[:, None]])
    return Prompts(tokens.astype(np.int32), lengths)


def check_prompts(model: Model, tokens: Ids, lengths: Ids | None = None, attention_mask: Ids | None = None) -> Prompts:
    """Prompts padded on the left, as `lengths` or a mask say."""
    if attention_mask is None:
        prompts = check_rows(model, tokens, lengths)
        if lengths is not None and not traced(*prompts):
            _check_left(*map(np.asarray, prompts))
        return prompts
    if lengths is not None:
        raise ValueError("lengths= and attention_mask= say the same twice; give one of them")
    tokens = as_array("tokens", tokens, np.integer, (None, None), "integers, one row a sequence")
    mask = as_array("attention_mask", attention_mask, np.generic, tokens.shape, "1 for tokens and 0 for padding")
    if not traced(mask) and not np.isin(mask, (0, 1)).all():
        raise ValueError(f"attention_mask must be 1 for tokens and 0 for padding; it has {np.max(mask)}")
    xp: Any = jnp if traced(mask, tokens) else np
    moved = xp.take_along_axis(tokens, xp.argsort(mask != 0, axis=1, stable=True), axis=1)
    return check_rows(model, moved, (mask != 0).sum(1, dtype=np.int32))


def _check_left(tokens: np.ndarray, lengths: np.ndarray) -> None:
    """Refuses prompts that look padded on the right: all short rows end in equal ids, and some begin with others."""
    T, short = tokens.shape[1], tokens.shape[1] - lengths[:, None]
    column = np.arange(T)[None]
    last, differs = tokens[column >= T - short], ((column < short) & (tokens != tokens[:, :1])).any(1)
    if differs.any() and (last == last[0]).all():
        row = int(differs.argmax())
        raise ValueError(
            f"prompt {row} has lengths={lengths[row]} of {T} tokens and ends in {T - lengths[row]} times {last[0]}, as "
            "if it were padded on the right; pad on the left (models.pad_left), or give attention_mask="
        )


def check_request(model: Model, sampler: Any, eos_ids: Ids | None, pad_id: int, key: PRNGKey) -> tuple[int, ...]:
    """Checks a request for new tokens, and returns its end tokens."""
    if sampler.draws and key is None:
        raise ValueError(f"{sampler} draws tokens, but there is no key; give key=jax.random.key(a whole number)")
    whole("pad_id", pad_id, 0, model.config.vocab_size - 1, "what follows the end is a token of the vocabulary")
    return end_ids(model, eos_ids)


def end_ids(model: Model, eos_ids: Ids | None) -> tuple[int, ...]:
    """The end tokens that are asked for, by default the model's."""
    vocab = model.config.vocab_size
    if eos_ids is None:
        return tuple(i for i in getattr(model.config, "eos_ids", ()) if i < vocab)
    ids = tuple(np.asarray(eos_ids).reshape(-1).tolist())
    return tuple(whole("eos_ids", i, 0, vocab - 1, "end tokens lie in the model's vocabulary") for i in ids)


def check_state(model: Model, params: PyTree, state: State) -> None:
    """Refuses all but a state of this model that can decode, and the model's parameters."""
    if not state.ready:
        raise ValueError("the state holds no prompt that was read to its end; decode what kvjax.prefill returns")
    config, infos, policies = model.config, state.plan.infos, state.plan.layers
    window, held = getattr(config, "window", lambda i: None), kv_layers(config)
    sizes = [(f"num_layers={len(infos)}", len(held), len(infos))]
    for i, (n, info, policy) in enumerate(zip(held, infos, policies, strict=False)):
        shape = kv_shape(config, n)
        heads = config.num_query_heads if policy.layout.by_query_head else shape.num_kv_heads
        here: dict[str, Any] = {"num_query_heads": config.num_query_heads, "num_kv_heads": heads}
        here |= {"head_dim": shape.head_dim, "latent": shape.latent, "window": window(n)}
        sizes += [(f"{n}={getattr(info, n)} in layer {i}", x, getattr(info, n)) for n, x in here.items()]
    if wrong := [(there, x) for there, x, stored in sizes if x != stored]:
        raise ValueError(
            f"the state's model has {wrong[0][0]}, but this one has {wrong[0][1]}; give the model that read the prompt"
        )
    check_model(model, params)


def check_one_shape(model: Model) -> None:
    """Refuses a model whose layers cannot be stacked: they differ in heads, or some read another's keys and values."""
    config = model.config
    if sources := [*kv_sources(config)]:
        raise ValueError(
            f"layers {sources} read other layers' keys and values; give a model whose layers hold their own"
        )
    shapes = {kv_shape(config, n): n for n in kv_layers(config)}
    if len(shapes) > 1:
        raise ValueError(
            f"layers {[*shapes.values()]} store heads of {len(shapes)} shapes, {[*shapes]}; give a model whose layers "
            "store the same"
        )


def check_logits(model: Model, state: State, logits: Array) -> None:
    """Refuses logits that are not one row a sequence of the state."""
    as_array("logits", logits, np.floating, (len(state.length), model.config.vocab_size), "floats, one row a sequence")


def check_block(plan: Plan, block: int | None, width: int) -> int | None:
    """The tokens of a block that the policies allow, None where the prompt is read at once."""
    block = None if block is None else min(whole("block", block), width)
    for policy in plan.layers:
        wants = "whole" if rereads(policy) else policy.layout.prompt
        if wants == "whole" and block is not None and block < width:
            raise ValueError(
                f"{type(policy).__name__} looks at the whole prompt at once, but block={block} reads {width} tokens in "
                "parts; use block=None"
            )
        if wants == "rows" and width > 1 and block != 1:
            raise ValueError(
                f"every row of {type(policy).__name__} decides what the next one reads, but block={block} reads "
                f"{width} tokens otherwise than one by one; use block=1, which prefill and generate take"
            )
    return None if block == width else block


def check_room(state: State, new: int | Array | np.ndarray) -> None:
    """Refuses more tokens than a state was planned for: of all sequences, or one number a sequence."""
    if traced(state.length, state.prompt_length, state.max_new_tokens, new):
        return
    over = np.asarray(state.length) - np.asarray(state.prompt_length) + new - np.asarray(state.max_new_tokens)
    if over.max() > 0:
        planned = int(np.asarray(state.max_new_tokens)[over.argmax()])
        raise ValueError(
            f"{planned + over.max()} tokens come after the prompt, but the state was planned for {planned}; read the "
            f"prompt with max_new_tokens={planned + over.max()}"
        )


def check_positions(
    config: Config, plan: Plan, lengths: np.ndarray, more: int, block: int | None = None, *, seen: int | None = None
) -> None:
    """Warns of a text beyond the model's positions, not again for `seen` tokens; refuses one beyond learned ones."""
    prompt, most = int(np.max(lengths)), getattr(config, "max_position", MOST)
    total, before = prompt + more, prompt + (seen or 0)
    if getattr(config, "learned_positions", False) and total > most:
        raise ValueError(f"prompt and new tokens are {total}, but the model has learned {most} positions; use fewer")
    reach, border = getattr(config, "reach", MOST), getattr(config, "border", None)
    far = 0  # how far from each other a query and a key that it reads may stand
    for policy, slots, info in zip(plan.layers, plan.capacities, plan.infos, strict=True):
        slots = slots // info.num_kv_heads if policy.layout.pool else slots
        ranks = (
            MOST if policy.layout.positions == "original" else max(prompt, slots) if block is None else slots + block
        )
        far = max(far, min(ranks, info.window or MOST))
    said = ""
    if min(total, far) > reach and (seen is None or min(before, far) <= reach):
        said = f"the model was made for {reach} positions, beyond which its predictions are not to be relied on"
    elif border is not None and any(n + (seen or 0) <= border < n + more for n in np.atleast_1d(lengths)):
        said = f"keys beyond the model's original context of {border} are rotated by other factors; stay on one side"
    if said:
        warnings.warn(f"a prompt of {prompt} tokens and {more} behind it are {total}, but {said}", stacklevel=4)
