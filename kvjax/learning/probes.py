"""What is found once for a model from text that it reads: directions of queries, and heads that retrieve."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.cache.context import Context
from kvjax.cache.state import EMPTY, LayerKV
from kvjax.drivers.requests import Model, check_prompts
from kvjax.drivers.steps import forward, init_state
from kvjax.eviction import from_fn
from kvjax.pallas_kernels.values import check_array, checked, whole
from kvjax.plan import CachePlan, make_plan
from kvjax.scoring.learned import FrozenArrays
from kvjax.scoring.stats import LastRows, LayerStats, Measurement, Moment, Observe


@dataclasses.dataclass(frozen=True)
class QueryMoments(Measurement):
    """Sums over the new tokens' queries, and of their outer products.

    Their number, one for every sequence, stands beside them: (sum "B N H", sum of products "B N H H", number "B").

    Attributes:
      rotated: whether queries are taken as they meet the keys, or before rotation.
      skip: those at the first positions do not count.
    """

    rotated: bool = True
    skip: int = 0

    def measure(self, moment: Moment) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"], Float[Array, "B"]]:
        """See `Measurement`."""
        q = (moment.q if self.rotated else moment.raw_q).astype(jnp.float32)
        counts = ((moment.pos != EMPTY) & (moment.pos >= self.skip)).astype(jnp.float32)
        products = jnp.einsum("bt,bnth,bntj->bnhj", counts, q, q)
        return jnp.einsum("bt,bnth->bnh", counts, q), products, counts.sum(-1)


def _recency(kv: LayerKV, stats: LayerStats, ctx: Context) -> Float[Array, "B K S"]:
    del stats, ctx
    return kv.pos.astype(jnp.float32)


def _looks(model: Model, measurement: Measurement, width: int) -> CachePlan:
    """A plan that keeps everything of a prompt, and measures."""
    return make_plan(
        model.config, from_fn(_recency, budget=1.0, observe=(measurement,)), prompt_len=width, max_new_tokens=0
    )


def fit_filters(
    model: Model,
    params: PyTree[Any],
    tokens: Array | np.ndarray,
    *,
    lengths: Array | np.ndarray | Sequence[int] | None = None,
) -> FrozenArrays:
    """The filters of a model for `kvjax.methods.q_filters`, from text that it reads (arXiv 2503.02812, section 3.2).

    The queries of a head spread along one direction: the first right singular vector of all of them, one a row. It is
    turned to point away from their mean, so that keys along it get little attention, and averaged over the query heads
    of a kv head.

    Args:
      model, params: the model.
      tokens: left-padded text "B T"; the published filters were made of some thousand sequences of 2,048 tokens.
      lengths: the texts' own lengths, T if None.

    Returns:
      "L K H", named "filters".

    Raises:
      ValueError: tokens outside the vocabulary, or lengths outside 1 to T.
    """
    tokens, lengths = check_prompts(model, tokens, lengths, params=params)
    K = model.config.num_kv_heads
    filters = []
    for total, products, number in _moments(model, params, tokens, lengths, QueryMoments()):
        _, vectors = np.linalg.eigh(products.astype(np.float64) / number)
        direction = vectors[..., -1]
        away = np.where((direction * total).sum(-1, keepdims=True) > 0, -direction, direction)
        filters.append(away.reshape(K, -1, away.shape[-1]).mean(1))
    return FrozenArrays({"filters": np.asarray(filters, np.float32)})


def _moments(
    model: Model,
    params: PyTree[Any],
    tokens: Array | np.ndarray,
    lengths: Array | np.ndarray | Sequence[int],
    measurement: QueryMoments,
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """What is measured in every layer, summed over all texts."""
    plan = _looks(model, measurement, tokens.shape[1])

    @jax.jit
    def read(params: PyTree[Any], tokens: Array, lengths: Array) -> list[Any]:
        state = init_state(plan, lengths, dtype=model.config.dtype)
        _, _, stats = forward(model, params, tokens, state, valid=lengths)
        return [jax.tree.map(lambda x: x.sum(0), layer[measurement]) for layer in stats.layers]

    return jax.device_get(read(params, jnp.asarray(tokens), jnp.asarray(lengths)))


def fit_queries(
    model: Model,
    params: PyTree[Any],
    tokens: Array | np.ndarray,
    *,
    lengths: Array | np.ndarray | Sequence[int] | None = None,
    sinks: int = 4,
) -> FrozenArrays:
    """The mean and the covariance of a model's queries before rotation, for `kvjax.methods.expected_attention`.

    kvpress's are of 100 texts of 1,000 tokens (`ExpectedAttentionStatsPress`).

    Args:
      model, params: the model.
      tokens: left-padded text "B T".
      lengths: the texts' own lengths, T if None.
      sinks: queries at the first positions, which do not count.

    Returns:
      "mean" (L, N, H) and "covariance" (L, N, H, H).

    Raises:
      ValueError: tokens outside the vocabulary, lengths outside 1 to T, or no text behind the sinks.
    """
    tokens, lengths = check_prompts(model, tokens, lengths, params=params)
    sinks = checked(whole(0), "sinks", sinks)
    if max(lengths) <= sinks:
        raise ValueError(f"texts of up to {max(lengths)} tokens have none behind the first {sinks}; give longer ones")
    means, covariances = [], []
    for total, products, number in _moments(model, params, tokens, lengths, QueryMoments(rotated=False, skip=sinks)):
        mean = total.astype(np.float64) / number
        means.append(mean)
        covariances.append(products.astype(np.float64) / number - mean[..., :, None] * mean[..., None, :])
    return FrozenArrays({"mean": np.asarray(means, np.float32), "covariance": np.asarray(covariances, np.float32)})


def head_importance(
    model: Model,
    params: PyTree[Any],
    tokens: Array | np.ndarray,
    wanted: Bool[np.ndarray, "B T"],
    answers: Int[np.ndarray, "B"],
    *,
    lengths: Array | np.ndarray | Sequence[int] | None = None,
) -> Float[np.ndarray, "L K"]:
    """How much every kv head looks at what an answer is read from (HeadKV, arXiv 2410.19258, section 3.2).

    The right answer stands at the end of every prompt. For each of its tokens, the row before it is asked: of its N
    most attended tokens, N the number of tokens that are wanted, those that are wanted count with their attention,
    over N. Rows and prompts are added up, and the query heads of a kv head averaged.

    Args:
      model, params: the model.
      tokens: left-padded prompts "B T" with their answers.
      wanted: the tokens of each prompt that its answer is read from.
      answers: tokens of every answer.
      lengths: the prompts' own lengths, T if None.

    Returns:
      Shares that add up to 1.

    Raises:
      ValueError: prompts that cannot be read, wanted tokens or answers of other prompts, an answer that is empty or as
        long as its prompt, or a prompt in which nothing is wanted.
    """
    tokens, lengths = check_prompts(model, tokens, lengths, params=params)
    B, T = tokens.shape
    check_array("wanted", wanted, "batch", "tokens", kind=np.bool_, shape=(B, T))
    check_array("answers", answers, "batch", kind=np.integer, shape=(B,))
    if min(answers) < 1 or (np.asarray(answers) >= np.asarray(lengths)).any():
        raise ValueError(
            f"answers of {min(answers)} to {max(answers)} tokens at the end of prompts of {min(lengths)} to "
            f"{max(lengths)}; an answer has a token at least, and one before it"
        )
    if not wanted.any(-1).all():
        raise ValueError(
            f"nothing is wanted in {(~wanted.any(-1)).sum()} of {B} prompts; mark what answers are read from"
        )
    rows = int(max(answers)) + 1
    observe = Observe(LastRows(rows), group=None, summed=False)
    plan = _looks(model, observe, T)
    most = int(wanted.sum(-1).max())

    @jax.jit
    def looked(
        params: PyTree[Any], tokens: Array, lengths: Array, wanted: Array, answers: Array
    ) -> list[Float[Array, "N"]]:
        state = init_state(plan, lengths, dtype=model.config.dtype)
        _, _, stats = forward(model, params, tokens, state, valid=lengths)
        row = jnp.arange(rows, dtype=jnp.int32)[None]
        asked = (row >= rows - 1 - answers[:, None]) & (row < rows - 1)  # each predicts the token after it
        number = wanted.sum(-1, dtype=jnp.int32)

        def of_layer(p: Float[Array, "B N R S"]) -> Float[Array, "N"]:
            best, index = jax.lax.top_k(p.astype(jnp.float32), most)
            hit = jnp.take_along_axis(wanted[:, None, None], index.reshape(B, 1, 1, -1), axis=-1).reshape(index.shape)
            among = jnp.arange(most, dtype=jnp.int32)[None, None, None] < number[:, None, None, None]
            share = jnp.where(hit & among, best, 0.0).sum(-1) / number[:, None, None].astype(jnp.float32)
            return jnp.where(asked[:, None], share, 0.0).sum((0, 2))

        return [of_layer(layer[observe]) for layer in stats.layers]

    arrays = (jnp.asarray(x) for x in (tokens, lengths, wanted, np.asarray(answers, np.int32)))
    found = np.stack(jax.device_get(looked(params, *arrays))).astype(np.float64)
    by_head = found.reshape(len(found), model.config.num_kv_heads, -1).mean(-1)
    return by_head / max(by_head.sum(), np.finfo(np.float64).tiny)
