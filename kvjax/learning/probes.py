"""Probes: what is found once for a model from text that it reads, directions of queries and heads that retrieve.

Letters: B texts, T columns, L layers, N query heads, K kv heads, H head_dim.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from kvjax.contract import EMPTY, Amount, AttentionInputs, Layout, Model, Observation, Stats, kv_layers, value
from kvjax.observe import Reread, lengths_of_pairs, turned_together, votes
from kvjax.pallas_kernels import kinds
from kvjax.run.checks import as_array, check_model, check_one_shape, check_prompts
from kvjax.run.prefill_each import Stored, read_whole
from kvjax.run.state import Prompts


@value
class QueryMoments:
    """Observes sums over the new tokens' queries, and of their outer products.

    Their number, one for every sequence, comes with them: (sum "B N H", sum of products "B N H H", number "B").

    Attributes:
      rotated: whether queries are taken as they meet the keys, or before rotation.
      skip: those at the first positions do not count.
    """

    rotated: bool = True
    skip: Amount = 0

    def __call__(self, inputs: AttentionInputs) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"], Array]:
        q = (inputs.q if self.rotated else inputs.raw_q).astype(jnp.float32)
        counts = ((inputs.pos != EMPTY) & (inputs.pos >= self.skip)).astype(jnp.float32)
        products = jnp.einsum("bt,bnth,bntj->bnhj", counts, q, q)
        return jnp.einsum("bt,bnth->bnh", counts, q), products, counts.sum(-1)


@value
class QueryCentres:
    """Observes sums over the new tokens' queries before rotation, and over the lengths of their pairs of channels.

    Their number comes with them: (sum "B N H", sum of lengths "B N H", number "B").
    """

    def __call__(self, inputs: AttentionInputs) -> tuple[Float[Array, "B N H"], Float[Array, "B N H"], Array]:
        q, counts = inputs.raw_q.astype(jnp.float32), (inputs.pos != EMPTY).astype(jnp.float32)
        lengths = lengths_of_pairs(q, turned_together(inputs.rotate, q.shape[-1]))
        total = lambda x: jnp.einsum("bt,bnth->bnh", counts, x)
        return total(q), total(lengths), counts.sum(-1)


def observed(
    model: Model, params: PyTree, prompts: Prompts, what: Observation, again: tuple[Reread, ...] = ()
) -> list[Stats]:
    """An observation of prompts in every layer, and what their tokens get while the prompts are read again.

    Args:
      model, params: the model.
      prompts: left-padded tokens and their lengths, which have been checked.
      what: the observation.
      again: how the prompts are repeated.
    """
    check_one_shape(model)
    L = len(kv_layers(model.config))
    stored = Stored((Layout(),) * L, again, (what,))
    stats = read_whole(model, params, prompts, 0, policies=(), stored=stored)[2]
    return [stats.of(i) for i in range(L)]


def fit_filters(
    model: Model, params: PyTree, tokens: Any, *, lengths: Any = None
) -> dict[str, Float[np.ndarray, "L K H"]]:
    """The filters of a model for `kvjax.methods.q_filters`, from text that it reads (arXiv 2503.02812, section 3.2).

    The queries of a head spread along one direction: the first right singular vector of all of them, one a row. It is
    turned to point away from their mean, so that keys along it get little attention, and averaged over the query heads
    of a kv head.

    Args:
      model, params: the model.
      tokens: left-padded text "B T"; the published filters were made of some thousand sequences of 2,048 tokens.
      lengths: the texts' own lengths, T if None.

    Returns:
      The directions, named "filters".

    Raises:
      ValueError: tokens outside the vocabulary, or lengths outside 1 to T.
    """
    K, filters = model.config.num_kv_heads, []
    for total, products, number in _moments(model, params, tokens, lengths, QueryMoments()):
        direction = np.linalg.eigh(products / number)[1][..., -1]
        away = np.where((direction * total).sum(-1, keepdims=True) > 0, -direction, direction)
        filters.append(away.reshape(K, -1, away.shape[-1]).mean(1))
    return {"filters": np.asarray(filters, np.float32)}


def fit_queries(
    model: Model, params: PyTree, tokens: Any, *, lengths: Any = None, sinks: Amount = 4
) -> dict[str, np.ndarray]:
    """The mean and the covariance of a model's queries before rotation (ExpectedAttentionStatsPress of kvpress).

    kvpress's are of 100 texts of 1,000 tokens.

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
    longest = int(np.max(check_prompts(model, tokens, lengths).lengths))
    if longest <= sinks:
        raise ValueError(f"texts of up to {longest} tokens have none behind the first {sinks}; give longer ones")
    means, covariances = [], []
    for total, products, number in _moments(model, params, tokens, lengths, QueryMoments(rotated=False, skip=sinks)):
        mean = total / number
        means.append(mean)
        covariances.append(products / number - mean[..., :, None] * mean[..., None, :])
    return {"mean": np.asarray(means, np.float32), "covariance": np.asarray(covariances, np.float32)}


def fit_centres(model: Model, params: PyTree, tokens: Any, *, lengths: Any = None) -> dict[str, np.ndarray]:
    """The centres of a model's queries for `kvjax.methods.triattention`, from text that it reads (arXiv 2604.04921).

    Args:
      model, params: the model.
      tokens: left-padded text "B T".
      lengths: the texts' own lengths, T if None.

    Returns:
      Of queries before rotation, "mean" (L, N, H) and the mean "length" (L, N, H) of each channel's pair.

    Raises:
      ValueError: tokens outside the vocabulary, or lengths outside 1 to T.
    """
    found = _moments(model, params, tokens, lengths, QueryCentres())
    each = zip(("mean", "length"), zip(*((total / n, size / n) for total, size, n in found), strict=True), strict=True)
    return {name: np.asarray(x, np.float32) for name, x in each}


def _moments(
    model: Model, params: PyTree, tokens: Any, lengths: Any, what: QueryMoments | QueryCentres
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Sums over all texts in every layer, in float64."""
    check_model(model, params)
    found = observed(model, params, check_prompts(model, tokens, lengths), what)
    return [tuple(np.asarray(x, np.float64).sum(0) for x in stats[what]) for stats in found]


def head_importance(
    model: Model, params: PyTree, tokens: Any, wanted: Any, answers: Any, *, lengths: Any = None
) -> Float[np.ndarray, "L K"]:
    """How much every kv head looks at what an answer is read from (HeadKV, arXiv 2410.19258, section 3.2).

    The right answer stands at the end of every prompt. For each of its tokens, the row before it is asked: of its n
    most attended tokens, n the number of tokens that are wanted, those that are wanted count with their attention,
    over n. Rows and prompts are added up, and the query heads of a kv head averaged.

    Args:
      model, params: the model.
      tokens: left-padded prompts "B T" with their answers.
      wanted: the tokens of each prompt that its answer is read from, booleans "B T".
      answers: tokens of every answer "B".
      lengths: the prompts' own lengths, T if None.

    Returns:
      Shares that add up to 1.

    Raises:
      ValueError: prompts that cannot be read, wanted tokens or answers of other prompts, an answer that is empty or as
        long as its prompt, or a prompt in which nothing is wanted.
    """
    check_model(model, params)
    check_one_shape(model)
    prompts = check_prompts(model, tokens, lengths)
    B, T = prompts.tokens.shape
    wanted = as_array("wanted", wanted, np.bool_, (B, T), "booleans, True for tokens that an answer is read from")
    answers = as_array("answers", answers, np.integer, (B,), "integers, the tokens of each answer")
    if answers.min() < 1 or (answers >= prompts.lengths).any():
        raise ValueError(
            f"answers of {answers.min()} to {answers.max()} tokens at the end of prompts of {prompts.lengths.min()} to "
            f"{prompts.lengths.max()}; an answer has a token at least, and one before it"
        )
    if not wanted.any(-1).all():
        raise ValueError(
            f"nothing is wanted in {(~wanted.any(-1)).sum()} of {B} prompts; mark what answers are read from"
        )
    rows, most = int(answers.max()) + 1, int(wanted.sum(-1).max())
    found = [stats[votes(rows)] for stats in observed(model, params, prompts, votes(rows))]
    shares = jax.jit(_looked_at, static_argnames=("rows", "most"))
    each = np.stack([np.asarray(shares(p, wanted, answers, rows=rows, most=most), np.float64) for p in found])
    by_head = each.reshape(len(each), model.config.num_kv_heads, -1).mean(-1)
    return by_head / max(by_head.sum(), np.finfo(np.float64).tiny)


def _looked_at(p: Float[Array, "B N R S"], wanted: Array, answers: Array, *, rows: int, most: int) -> Float[Array, "N"]:
    """The attention of answers' rows to wanted tokens among the best, added up over rows and prompts."""
    B, number = len(wanted), wanted.sum(-1, dtype=jnp.int32)
    row = jnp.arange(rows, dtype=jnp.int32)[None]
    asked = (row >= rows - 1 - answers[:, None]) & (row < rows - 1)  # each predicts the token after it
    best, index = jax.lax.top_k(p.astype(jnp.float32), most)
    hit = jnp.take_along_axis(wanted[:, None, None], index.reshape(B, 1, 1, -1), axis=-1).reshape(index.shape)
    among = jnp.arange(most, dtype=jnp.int32)[None, None, None] < number[:, None, None, None]
    share = jnp.where(hit & among, best, 0.0).sum(-1) / number[:, None, None].astype(jnp.float32)
    return jnp.where(asked[:, None], share, 0.0).sum((0, 2))


kinds.doors(__name__)
