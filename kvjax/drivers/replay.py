"""Rows that read a cache without adding to it: what attention says of a prompt when tokens behind it are read."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from kvjax.cache import mesh
from kvjax.cache.state import EMPTY, KVState
from kvjax.drivers.attention import attend
from kvjax.drivers.layers import LayerSteps
from kvjax.drivers.requests import Model, as_ids, check_is, check_model, check_positions, real_tokens
from kvjax.pallas_kernels.values import a, as_given, checked, each
from kvjax.plan import CachePlan, as_lengths, at_positions
from kvjax.policy import context
from kvjax.scoring.replay import Replay
from kvjax.scoring.stats import AttentionStats, LayerStats, Measurement, ordered


def replay(
    model: Model,
    params: PyTree[Any],
    tokens: Array | np.ndarray | Sequence[Sequence[int]],
    state: KVState,
    *,
    lengths: Array | np.ndarray | Sequence[int] | None = None,
    measure: Sequence[Measurement] = (),
) -> tuple[Float[Array, "B R V"], AttentionStats]:
    """Reads tokens "B R" behind what a state holds, at once, and leaves the state as it is.

    Every token attends to the live slots of the state and to the tokens before it, as if all of them were read behind
    the state's last token. After a prompt of which everything was kept (`kvjax.identity()`), logits are those of a
    model that reads the prompt and the tokens together, but for rotary scalings that depend on the length ("dynamic"
    and "longrope"): stored keys stay as they are. The tokens count for nothing that the state was planned for.

    A row of a padded batch reads what it would read alone.

    Args:
      model, params: the model.
      tokens: the tokens, padded on the left where rows have different numbers of them.
      state: the cache, which `prefill` or a later step returned.
      lengths: how many of the last tokens of every row "B" are real, at least 1; R if None.
      measure: what to measure of the tokens' attention, in every layer.

    Returns:
      Logits after every token, NaN for padding; and the measurements. One number a slot means the slots of the state,
      then those of the tokens: of "B K S" statistics the first `state.layers[i].view().num_slots` are the state's.

    Raises:
      ValueError: a state that was planned for another model, or whose policy hides slots from single rows; tokens of
        other sequences or outside the vocabulary, or at positions that the model has not learned; lengths outside 1 to
        R; measurements of rows that repeat a prompt, which `prefill` makes.
    """
    check_model(model)
    check_is(KVState, "state", state)
    plan: CachePlan = state.plan
    plan.check_model(model.config)
    for m in checked(each(a(Measurement)), "measure", measure):
        if m.again is not None:
            raise ValueError(
                f"{m} measures rows that repeat a prompt chunk by chunk, but these tokens are any; prefill a policy "
                "that asks for it"
            )
    if hiding := [site.layer for site, spec in zip(plan.sites, plan.specs, strict=True) if spec.hides is not None]:
        raise ValueError(
            f"{plan.policy} hides slots of layer {hiding[0]} from each row that is decoded, but several rows are read "
            "at once; use kvjax.feed, which reads them one by one"
        )
    B, tokens = len(state.length), as_given("tokens", tokens)
    real = None
    if lengths is not None and tokens.ndim == 2:
        lengths = as_lengths(lengths, B, tokens.shape[1])
        real = real_tokens(lengths, tokens)
    tokens = as_ids(model, tokens, (B, None), "one row of tokens a sequence", real=real)
    R = tokens.shape[1]
    valid = jnp.full((B,), R, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
    _check_places(model, state, valid)
    if not isinstance(state.length, jax.core.Tracer):
        more = R if isinstance(valid, jax.core.Tracer) else np.asarray(valid)
        check_positions(model.config, plan, np.asarray(state.length), more)
    observe = (ordered(measure),) * len(plan.sites)
    logits, stats = _read_behind(model, params, tokens, state, valid, observe, last_only=False)
    padding = jnp.arange(R, dtype=jnp.int32)[None] < (R - valid)[:, None]
    return jnp.where(padding[..., None], jnp.nan, logits), stats


def _check_places(model: Model, state: KVState, valid: Int[Array, "B"]) -> None:
    """Raises ValueError for tokens at positions that a model has not learned, where they are known."""
    if not getattr(model.config, "learned_positions", False) or isinstance(state.length + valid, jax.core.Tracer):
        return
    end, most = int((state.length + valid).max()), int(getattr(model.config, "max_position", 0))
    if end > most:
        raise ValueError(f"the tokens end {end} tokens from the first, but this model has learned {most} positions")


def _read_behind(
    model: Model,
    params: PyTree[Any],
    tokens: Int[Array, "B R"],
    state: KVState,
    valid: Int[Array, "B"],
    observe: Sequence[tuple[Measurement, ...]],
    *,
    last_only: bool = True,
    chunk: tuple[Int[Array, "B"], Int[Array, "B"]] | None = None,
) -> tuple[Float[Array, "B _ V"], AttentionStats]:
    """Logits and measurements of tokens behind a state.

    Args:
      model, params: the model.
      tokens: padded on the left.
      state: the cache.
      valid: how many of the last tokens are real; none of a row's may be.
      observe: what to measure in every layer.
      last_only: logits of the last column alone.
      chunk: the positions of the prompt that the tokens repeat (`Context.again`).
    """
    R = tokens.shape[1]
    column = jnp.arange(R, dtype=jnp.int32)[None] - (R - valid)[:, None]
    pos = jnp.where(column >= 0, state.length[:, None] + column, EMPTY)
    tokens = mesh.prompt_rows(jnp.where(column >= 0, tokens, 0), None)

    def attend_(cache, q, k, v, *, layer, **options):
        q, k, v = (mesh.prompt_rows(x, None, mesh.HEADS) for x in (q, k, v))
        ctx = context(state, layer, "prefill")
        ctx = dataclasses.replace(ctx, length=state.length + valid, ids=tokens, again=chunk)
        out, _, stats = attend(cache, q, k, v, pos, ctx=ctx, observe=observe[layer], **options)
        return out, cache, stats

    where = at_positions(model.config, pos)
    logits, _, stats = model(params, tokens, state.layers, attend=attend_, last_only=last_only, **where)
    return logits, AttentionStats(stats, phase="prefill")


def decided_by_replay(
    model: Model, params: PyTree[Any], tokens: Int[Array, "B T"], state: KVState, stats: AttentionStats
) -> KVState:
    """The state after a policy that wants its prompt read again; arguments are those of `read_again`."""
    stats = read_again(model, params, tokens, state, stats)
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] - (tokens.shape[1] - state.length)[:, None]
    alone = dataclasses.replace(state, layers=())
    steps = LayerSteps(alone, jnp.where(column >= 0, tokens, 0), jnp.maximum(column, EMPTY), evict=True)
    return steps.decided(state, stats)


def read_again(
    model: Model, params: PyTree[Any], tokens: Int[Array, "B T"], state: KVState, stats: AttentionStats
) -> AttentionStats:
    """What was measured of a prompt, with what rows that repeat it say, chunk by chunk, where the state's policy asks.

    Args:
      model, params: the model.
      tokens: the prompt, padded on the left.
      state: after the prompt, all of it.
      stats: what was measured of the prompt's own rows.
    """
    plan: CachePlan = state.plan
    found = [dict(zip(layer.observed, layer.values, strict=True)) for layer in stats.layers]
    for how in plan.replays:
        for layer, more in zip(found, _repeated(model, params, tokens, state, how), strict=True):
            layer.update(more)
    layers = tuple(LayerStats(tuple(layer.values()), tuple(layer)) for layer in found)
    return dataclasses.replace(stats, layers=layers)


def _repeated(
    model: Model, params: PyTree[Any], tokens: Int[Array, "B T"], state: KVState, replay: Replay
) -> list[dict[Measurement, Float[Array, "B K T"]]]:
    """What every layer asks to see of rows that repeat the prompt: the largest over all chunks, for the prompt's slots.

    All chunks are read by one program.
    """
    plan: CachePlan = state.plan
    observe = [tuple(m for m in spec.prompt if m.again == replay) for spec in plan.specs]
    (B, T), lengths = tokens.shape, state.prompt_length

    def read(largest: list[list[Array]], index: Int[Array, ""]) -> tuple[list[list[Array]], None]:
        again, valid = mesh.everywhere(replay.read, tokens, lengths, index)
        chunk = replay.span(T, lengths, index)
        _, stats = _read_behind(model, params, again, state, valid, observe, chunk=chunk)
        new = [[value[..., :T] for value in layer.values] for layer in stats.layers]
        return jax.tree.map(lambda x, y: jnp.maximum(x, y.astype(x.dtype)), largest, new), None

    nothing = lambda kv: jnp.zeros((B, kv.num_kv_heads, T), jnp.float32)
    start = [[nothing(kv) for _ in asked] for kv, asked in zip(state.layers, observe, strict=True)]
    indices = jnp.arange(replay.count(T), dtype=jnp.int32)
    largest, _ = lax.scan(read, start, indices)
    return [dict(zip(asked, values, strict=True)) for asked, values in zip(observe, largest, strict=True)]
