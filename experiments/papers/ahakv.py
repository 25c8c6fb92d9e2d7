"""Accumulated attention by position, and the softmax that holds entropy still (AhaKV, Gu et al., arXiv 2506.03762)."""

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure

from kvjax.experiments.papers.attention import Layer, by_layer, fold_rows, matrix
from kvjax.experiments.papers.base import Arrays, Prompts, by_slice, canvas, draw_layers, message, percent, smooth
from kvjax.plot.style import style

_SOFT: Final = 0.125  # logits so small that no probability underflows


# --- Equation 4 ---


def score_decline(prompts: Prompts, *, slices: int = 16) -> Arrays:
    r"""Accumulated attention from a token to the next, in its two parts (AhaKV, Eq. 4).

    $S_{j+1} - S_j = \sum_{i > j} (a_{i,j+1} - a_{i,j}) - a_{j,j}$. The paper takes all entries of a row as equal in
    expectation, so that the sum is 0 and scores decline by $E[a_{j,j}] = 1/j$.

    Args:
      prompts: the model and its prompts.
      slices: parts of the prompt, of which each array has the mean.

    Returns:
      positions: "X", the mean position of a slice's tokens, from 1.
      score: "L X B", $S_j$, the mean over query heads.
      later, own: "L X B", the sum over later rows, and $a_{j,j}$; the last token has no next one.
    """
    score, own = (x.swapaxes(1, 2) for x in by_layer(prompts, _accumulated))
    parts = score, np.diff(score) + own[..., :-1], own[..., :-1]
    means = [by_slice(x, slices).swapaxes(1, 2) for x in parts]
    return Arrays(
        positions=by_slice(np.arange(1, prompts.length + 1), slices), score=means[0], later=means[1], own=means[2]
    )


@jax.jit
def _accumulated(layer: Layer) -> tuple[Float[Array, "T B"], Float[Array, "T B"]]:
    """(the sum of every column, what every token gives to itself), the mean over query heads."""
    B, _, T, _ = layer.q.shape

    def visit(total, p, rows):
        at = jnp.broadcast_to(jnp.minimum(rows, T - 1)[None, None, :, None], (*p.shape[:3], 1))
        return total + p.sum(2).mean(1), jnp.take_along_axis(p, at, 3)[..., 0].mean(1).T

    total, own = fold_rows(layer, visit, jnp.zeros((B, T)))
    return total.T, own


def plot_score_decline(d: Arrays) -> Figure:
    """The two parts of a score's change, against the position."""
    figure, ((axes,),) = canvas(width=7.0, height=4.4)
    later, own = d.later.mean((0, 2)), d.own.mean((0, 2))
    axes.plot(d.positions, own, label="taken by the token's own row, $a_{jj}$", **style(0))
    axes.plot(d.positions, later, label="added by later rows (the paper: 0)", **style(1))
    axes.plot(d.positions, 1 / d.positions, color="black", linestyle="--", label="1/j: even rows' $a_{jj}$")
    axes.set(xlabel="position, j", ylabel="change to the next token", ylim=(min(0.0, 1.1 * later.min()), None))
    axes.legend(frameon=False)
    score = d.score.mean((0, 2))
    text = (
        f"Scores fall from slice to slice in {percent(float((np.diff(score) < 0).mean()))} of the steps; a token's own "
        f"row takes {own.mean():.2g} from one to the next, later rows {'add' if later.mean() > 0 else 'take'} "
        f"{abs(later.mean()):.2g}"
    )
    return message(figure, text, "AhaKV, Eq. 4; means over layers, heads, prompts")


# --- Equations 8 to 12 ---


def attention_entropy(prompts: Prompts, *, budget: int | None = None, num_rows: int = 128) -> Arrays:
    r"""Entropy of attention rows against position, predicted and corrected (AhaKV, Eq. 8 to 12).

    The paper models dot products as normal with variance $d$, from which $E[H_i] = \ln i - \lambda^2 d / 2$ for
    products multiplied by $\lambda$: Eq. 8 is $\lambda = 1$, a model's softmax is $\lambda = 1/\sqrt d$. SG-softmax
    takes $\lambda_i = \sqrt{2 \ln(i/k) / d}$, so that entropy should stay at $\ln k$.

    Args:
      prompts: the model and its prompts.
      budget: k, an eighth of the prompt if None.
      num_rows: rows to look at, evenly spaced in the logarithm of their position.

    Returns:
      rows: "M", positions of the rows; a row sees that many tokens and itself.
      entropy: "L M", under the model's softmax, in nats, the mean over query heads and prompts.
      corrected: "L M", under SG-softmax; rows that see no more than `budget` tokens keep the model's.
      logit_variance: "L M", of the scaled logits of a row, the mean over heads and prompts.
      log_i: "M", the entropy of a uniform row, ln i.
      as_printed: "M", Eq. 8, ln i - d/2: raw dot products of unit normal queries and keys.
      scaled: "M", Eq. 10 with the model's factor, ln i - 1/2: the same products divided by sqrt(d).
      measured_variance: "L M", Eq. 10 with the variance measured in each layer, ln i - s^2 / 2.
      target: the entropy that Eq. 11 asks for, ln k.
      budget: k.
      head_dim: d.

    Raises:
      ValueError: a budget that no row exceeds.
    """
    T = prompts.length
    budget = max(T // 8, 1) if budget is None else budget
    if not 1 <= budget < T:
        raise ValueError(f"budget={budget}: rows of a prompt of {T} tokens must exceed it; choose 1 to {T - 1}")
    rows = np.unique(np.geomspace(1, T - 1, num_rows).round().astype(np.int32))
    seen = rows + 1.0
    # A factor on logits that are already divided by sqrt(d): lambda_i * sqrt(d).
    gain = np.where(seen > budget, np.sqrt(2 * np.log(np.maximum(seen / budget, 1.0))), 1.0)
    given = jnp.asarray(rows), jnp.asarray(gain, jnp.float32)
    entropy, corrected, variance = by_layer(prompts, _entropies, *given)
    log_i, d = np.log(seen), prompts.model.config.head_dim
    return Arrays(
        rows=rows,
        entropy=entropy,
        corrected=corrected,
        logit_variance=variance,
        log_i=log_i,
        as_printed=log_i - d / 2,
        scaled=log_i - 0.5,
        measured_variance=log_i - variance / 2,
        target=float(np.log(budget)),
        budget=budget,
        head_dim=d,
    )


@jax.jit
def _entropies(
    layer: Layer, rows: Int[Array, "M"], gain: Float[Array, "M"]
) -> tuple[Float[Array, "M"], Float[Array, "M"], Float[Array, "M"]]:
    """(entropy, entropy under the gain, variance of the logits) of every row, the mean over prompts and heads."""
    entropy = lambda p: -(p * jnp.log(jnp.maximum(p, jnp.finfo(jnp.float32).tiny))).sum(-1).mean((0, 1))
    soft = matrix(layer, rows, jnp.full(rows.shape, _SOFT))
    logits = jnp.log(jnp.maximum(soft, jnp.finfo(jnp.float32).tiny)) / _SOFT  # less a constant of the row
    variance = logits.var(-1, where=soft > 0).mean((0, 1))
    return entropy(matrix(layer, rows)), entropy(matrix(layer, rows, gain)), variance


def plot_attention_entropy(d: Arrays) -> Figure:
    """The model's softmax with its predictions, and SG-softmax with its target; lines are moving averages."""
    figure, ((left, right),) = canvas(2, width=5.8, height=4.4, sharey=True)
    seen = d.rows + 1
    beyond = seen > d.budget
    draw_layers(left, seen, np.stack([smooth(line, 9) for line in d.entropy]))
    halves = [[smooth(line[part], 9) for part in (~beyond, beyond)] for line in d.corrected]
    draw_layers(right, seen, np.stack([np.concatenate(parts) for parts in halves]))
    left.plot(seen, d.log_i, color="black", linewidth=1, label="ln i: a uniform row")
    left.plot(seen, d.scaled, color="black", linestyle="--", label="ln i - 1/2: unit normal q and k, Eq. 10")
    measured = smooth(d.measured_variance.mean(0), 9)
    left.plot(seen, measured, color="black", linestyle=":", label="ln i - s²/2: their measured variance")
    printed = f"ln i - d/2: Eq. 8 as printed, {d.as_printed[-1]:.1f} at i = {seen[-1]}"
    left.plot([], [], linestyle="none", label=printed)
    right.axhline(d.target, color="black", linestyle="--", linewidth=1, label=f"target: ln k, k = {d.budget}")
    right.axvline(d.budget, color="0.6", linewidth=0.8)
    right.annotate("i = k", (d.budget, 0.95), (3, 0), xycoords=("data", "axes fraction"), textcoords="offset points")
    low = min(0.0, d.entropy.min(), d.corrected.min(), measured.min())
    left.set(ylabel="entropy of a row, nats", title="the model's softmax", ylim=(low - 0.2, 1.35 * d.log_i.max()))
    right.set(title="SG-softmax")
    for axes in (left, right):
        axes.set(xscale="log", xlabel="tokens that a row sees, i")
    named = [h for h in left.get_lines() if not str(h.get_label()).startswith(("layer", "_"))]
    left.legend(handles=named, frameon=False, fontsize="small", loc="upper left")
    right.legend(frameon=False, fontsize="small", loc="lower left")
    doubling = lambda y: float(np.polyfit(np.log2(seen[beyond]), y.mean(0)[beyond], 1)[0])
    off = float((d.corrected.mean(0)[beyond] - d.target).mean())
    text = (
        f"Rows flatten by {doubling(d.entropy):.2f} nats per doubling of i (normal q and k: 0.69);\n"
        f"under SG-softmax they change by {doubling(d.corrected):+.2f} and lie {abs(off):.1f} nats "
        f"{'below' if off < 0 else 'above'} the target on average"
    )
    return message(figure, text, "AhaKV, Eq. 8 to 12")
