"""How few tokens attention is about: NaCl (Fig. 2d, 6; arXiv 2408.03675), Keyformer (3, 11, 14, Eq. 8; 2403.09054)."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from kvjax.experiments.papers.attention import Layer, by_layer, fold_rows, held_by_best, layers_of, matrix
from kvjax.experiments.papers.base import Arrays, Prompts, by_slice, canvas, draw_layers, message, percent, smooth
from kvjax.plot import COLOURS
from kvjax.plot.style import style

NOTHING = 0.001  # attention that heat maps leave white

# --- NaCl, Figure 6; Keyformer, Figure 11 ---


def attention_sparsity(
    prompts: Prompts,
    *,
    thresholds: tuple[float, ...] = (1e-5, 1e-4, 1e-3, 1e-2),
    of_maximum: tuple[float, ...] = (0.0, 0.001, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05),
) -> Arrays:
    """The share of keys that rows hardly attend to, by threshold and length (NaCl, Fig. 6; Keyformer, Fig. 11).

    NaCl divides by the width of the attention matrix; here causal zeros do not count, so that a share is one of the
    tokens that a row could attend to. Keyformer's thresholds are shares of the row's maximum; at 0 only what has
    vanished in float32 counts. Shares are means over query heads and prompts.

    Returns:
      thresholds: "M", attention probabilities.
      sparsity: "L M T", the share of keys below each threshold, by the tokens that a row sees (1, 2, ...).
      of_maximum: "R", shares of a row's largest probability.
      relative: "L R", the share of keys at or below such a share, the mean over the rows of the second half.
    """
    levels = {"thresholds": np.array(thresholds), "of_maximum": np.array(of_maximum)}
    below, relative = by_layer(prompts, _sparsity, *map(jnp.asarray, levels.values()))
    return Arrays(**levels, sparsity=below.transpose(0, 2, 1), relative=relative[:, prompts.length // 2 :].mean(1))


@jax.jit
def _sparsity(
    layer: Layer, thresholds: Float[Array, "M"], of_maximum: Float[Array, "R"]
) -> tuple[Float[Array, "T M"], Float[Array, "T R"]]:
    """Shares of visible keys, the mean over prompts and heads."""
    B, N, T, _ = layer.q.shape
    keys = jnp.arange(T, dtype=jnp.int32)

    def visit(carry, p, rows):
        seen = keys[None] <= rows[:, None]
        if layer.logits.window is not None:
            seen &= rows[:, None] - keys[None] < layer.logits.window
        p = jnp.where(seen[None, None], p, jnp.inf)
        num = seen.sum(-1).astype(jnp.float32)
        share = lambda hit: hit.sum((0, 1, 3)).astype(jnp.float32) / (B * N * num)
        top = jnp.where(seen[None, None], p, 0.0).max(-1, keepdims=True)
        below = jax.lax.map(lambda t: share(p < t), thresholds)
        relative = jax.lax.map(lambda t: share(p <= t * top), of_maximum)
        return carry, (below.T, relative.T)

    return fold_rows(layer, visit, None)[1]


def plot_attention_sparsity(d: Arrays) -> Figure:
    """Sparsity against length, a line a threshold; and against the threshold, a line a layer."""
    figure, ((left, right),) = canvas(2, width=5.6)
    seen = np.arange(1, d.sparsity.shape[-1] + 1)
    mean = d.sparsity.mean(0)
    for i, threshold in enumerate(d.thresholds):
        line = smooth(mean[i])
        left.plot(seen, 100 * line, color=COLOURS[i % len(COLOURS)], linewidth=1.8)
        left.annotate(
            f"p < {threshold:g}", (seen[-1], 100 * line[-1]), (4, 0), textcoords="offset points", va="center",
            color=COLOURS[i % len(COLOURS)],
        )  # fmt: skip
    left.set(xlabel="tokens that a row sees", ylabel="keys below the threshold, %", ylim=(0, 102))
    left.set(title="absolute thresholds, all layers (NaCl)", xlim=(0, 1.2 * seen[-1]))
    left.set_xticks([x for x in left.get_xticks() if x <= seen[-1]])  # beyond them there are only names
    draw_layers(right, 100 * d.of_maximum, 100 * d.relative, marker="o", markersize=4)
    right.set(xlabel="threshold, % of the row's maximum", ylabel="keys at or below the threshold, %", ylim=(0, 102))
    right.set(title="relative thresholds, second half of the rows (Keyformer)")
    right.legend(frameon=False, loc="lower right")
    middle = len(d.thresholds) // 2
    quarter, end = mean[middle][[len(seen) // 4, -1]]
    low, high = d.relative[:, -1].min(), d.relative[:, -1].max()
    text = (
        f"{percent(end)} of the keys get less than {d.thresholds[middle]:g} from a row that sees {seen[-1]} tokens "
        f"({percent(quarter)} at {seen[len(seen) // 4]});\n{percent(low)} to {percent(high)} get at most "
        f"{percent(d.of_maximum[-1])} of the row's maximum, by layer"
    )
    return message(figure, text, "NaCl, Fig. 6; Keyformer, Fig. 11")


# --- NaCl, Figure 2d ---


def attention_by_length(prompts: Prompts, *, lengths: int = 4, slices: int = 16) -> Arrays:
    """Attention by token index in texts of several lengths, each half of the next (NaCl, Fig. 2d).

    The paper's claim: the distribution gets flatter with the text's length. Means over layers and query heads.

    Returns:
      lengths: "M", tokens of a text, the newest row's own among them.
      attention: "M X B", what a token of every slice of the text gets from that row.
      spread: "M B", exp of the row's entropy: over how many tokens equal attention would be spread.
    """
    seen = prompts.length // 2 ** np.arange(lengths)[::-1]
    p = by_layer(prompts, matrix, jnp.asarray(seen - 1))
    rows = [p[:, :, :, i, :n] for i, n in enumerate(seen.tolist())]
    attention = [by_slice(x, slices).mean((0, 2)).T for x in rows]
    spread = [np.prod(x**-x, axis=-1).mean((0, 2)) for x in rows]
    return Arrays(lengths=seen, attention=np.stack(attention), spread=np.stack(spread))


def plot_attention_by_length(d: Arrays) -> Figure:
    """Attention against the token index, a line a length."""
    figure, ((axes,),) = canvas(width=7.0, height=4.4)
    spread, slices = d.spread.mean(-1), d.attention.shape[1]
    for i, (n, line) in enumerate(zip(d.lengths, d.attention.mean(-1), strict=True)):
        axes.plot((np.arange(slices) + 0.5) * n / slices, line, label=f"{n} tokens", **style(i))
    axes.set(xlabel="token index", ylabel="attention of the newest row", xscale="log", yscale="log")
    axes.legend(frameon=False, ncols=2)
    parts = [
        f"{x:.3g} of {n} tokens ({percent(x / n)})" for x, n in zip(spread[[0, -1]], d.lengths[[0, -1]], strict=True)
    ]
    return message(figure, "A row spreads over exp(entropy) = " + ",\n".join(parts), "NaCl, Fig. 2d")


# --- Keyformer, Figure 3b ---


def attention_mass(prompts: Prompts, *, num_rows: int = 64) -> Arrays:
    """Cumulative attention mass against the share of tokens that hold it (Keyformer, Fig. 3b).

    Of `num_rows` rows, evenly spaced over the second half, over the tokens of the first half, which all of them see:
    attention is renormalised over these, as if the rest were a recent window that stays.

    Returns:
      shares: "X", shares of the tokens.
      by_row: "L X", attention held where every row has its own most attended tokens; the mean over heads and prompts.
      by_set: "L X", attention held by one set for all rows, the tokens with the largest sums: the most that a cache
        chosen once can hold.

    Raises:
      ValueError: fewer rows in the second half than asked for.
    """
    T = prompts.length
    if num_rows > T - T // 2:
        raise ValueError(f"the second half of {T} tokens has {T - T // 2} rows, not {num_rows}; lower num_rows")
    rows = jnp.asarray(np.linspace(T // 2, T - 1, num_rows).round().astype(np.int32))

    def held(layer: Layer) -> tuple[Float[Array, "X"], Float[Array, "X"]]:
        p = matrix(layer, rows)[..., : T // 2]
        renormalised = p / jnp.maximum(p.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        return held_by_best(p).mean((0, 1, 2)), held_by_best(renormalised.sum(2)).mean((0, 1))

    by_row, by_set = (np.pad(x, ((0, 0), (1, 0))) for x in by_layer(prompts, held))
    return Arrays(shares=np.arange(T // 2 + 1) / (T // 2), by_row=by_row, by_set=by_set)


def plot_attention_mass(d: Arrays) -> Figure:
    """Mass against tokens: solid for every row's own best, dashed for one set for all rows."""
    figure, ((axes,),) = canvas(width=7.0, height=4.4)
    draw_layers(axes, 100 * d.shares, 100 * d.by_row)
    for solid, line in zip(list(axes.get_lines()), d.by_set, strict=True):
        axes.plot(100 * d.shares, 100 * line, color=solid.get_color(), linestyle="--", linewidth=1.4)
    axes.plot([], [], color="0.3", linestyle="--", label="one set for all rows")
    axes.axhline(90, color="0.5", linewidth=0.8, linestyle=":")
    axes.axvline(40, color="0.5", linewidth=0.8, linestyle=":")
    axes.annotate("the paper's 40 % of tokens, 90 % of attention", (41, 3), color="0.4", fontsize="small")
    axes.set(xlabel="tokens, % (most attended first)", ylabel="attention they hold, %", xlim=(0, 100), ylim=(0, 101))
    axes.legend(frameon=False, loc="center right", title="solid: every row its own")
    need = lambda curves: d.shares[(curves.mean(0) >= 0.9).argmax()]
    text = (
        f"90 % of the attention is on {percent(need(d.by_row))} of the tokens, row by row;\n"
        f"one set for all rows must hold {percent(need(d.by_set))}"
    )
    return message(figure, text, "Keyformer, Fig. 3b")


# --- Keyformer, Figure 14 ---


def attention_heatmaps(prompts: Prompts, *, layers: tuple[int, ...] = (), heads: int = 4, num_rows: int = 64) -> Arrays:
    """Attention of the last rows of one short prompt, by layer and head (Keyformer, Fig. 14).

    Of the first prompt, in the layers given or in four, and in evenly spaced query heads, the first and last among
    them. The paper's rows are generated tokens; these are the prompt's last `num_rows`. The only figure that holds a
    matrix.

    Returns:
      layers, heads: which are shown.
      rows: "R", positions of the rows.
      p: "L N R T", attention probabilities.

    Raises:
      ValueError: layers that the model has not.
    """
    T, c = prompts.length, prompts.model.config
    spaced = lambda of, most: np.unique(np.linspace(0, of - 1, min(most, of)).round().astype(int))
    of_layers, of_heads = (
        layers_of(prompts, layers or spaced(c.num_layers, 4).tolist()),
        spaced(c.num_query_heads, heads),
    )
    rows = np.arange(max(T - num_rows, 0), T)
    shown = lambda layer: matrix(layer, jnp.asarray(rows))[0, of_heads]
    p = by_layer(prompts._replace(tokens=prompts.tokens[:1]), shown)[[*of_layers]]
    return Arrays(layers=np.array(of_layers), heads=of_heads, rows=rows, p=p.astype(np.float32))


def plot_attention_heatmaps(d: Arrays) -> Figure:
    """A panel for every layer and head; white is next to nothing."""
    L, N, R, T = d.p.shape
    figure, grid = canvas(N, L, width=3.0, height=0.5 + 2.6 * R / T, sharex=True, sharey=True)
    for i, j in np.ndindex(L, N):
        axes = grid[i, j]
        axes.grid(False)
        shown = np.ma.masked_less(d.p[i, j], NOTHING)
        extent = (-0.5, T - 0.5, d.rows[-1] + 0.5, d.rows[0] - 0.5)
        axes.imshow(
            shown, norm=LogNorm(NOTHING, 1.0), cmap="viridis_r", aspect="auto", extent=extent, interpolation="nearest"
        )
        axes.set_title(f"layer {d.layers[i]}, head {d.heads[j]}", fontsize="small")
    for axes in grid[-1]:
        axes.set_xlabel("key, position")
    for axes in grid[:, 0]:
        axes.set_ylabel("row, position")
    label = f"attention (white: less than {NOTHING})"
    figure.colorbar(grid[0, 0].images[0], ax=grid.ravel().tolist(), label=label, pad=0.01)
    seen = np.arange(T)[None] <= d.rows[:, None]
    blank = (d.p < NOTHING)[..., seen].mean(-1)
    text = f"Heads differ: {percent(blank.min())} to {percent(blank.max())} of what they see gets less than {NOTHING}"
    return message(figure, text, "Keyformer, Fig. 14")


# --- Keyformer, Equation 8 ---


def gumbel_entropy(prompts: Prompts, *, draws: int = 32, num_rows: int = 32) -> Arrays:
    r"""Entropy of attention rows without and with Gumbel noise on their logits (Keyformer, Eq. 8).

    The paper states $H(E[z_{Gumbel}]) > H(E[z])$. The expectation over noise is the mean of `draws`, whose entropy is
    too small rather than too large; without noise a row is its own expectation.

    Args:
      prompts: the model and its prompts.
      draws: of the noise.
      num_rows: rows to look at, evenly spaced in the logarithm of their position.

    Returns:
      rows: "M", positions of the rows; a row sees that many tokens and itself.
      plain: "L M B", entropy of the model's softmax, in nats, the mean over query heads.
      expected: "L M B", of the mean of all draws.
      drawn: "L M B", of single draws, their mean.
      holds: "L M B", the share of query heads for which the inequality holds.
      draws: how many.
    """
    rows = np.unique(np.geomspace(1, prompts.length - 1, num_rows).round().astype(np.int32))
    plain, expected, drawn, holds = by_layer(
        prompts, _noisy_entropies, jnp.asarray(rows), jnp.arange(draws, dtype=jnp.uint32)
    )
    return Arrays(rows=rows, plain=plain, expected=expected, drawn=drawn, holds=holds, draws=draws)


@jax.jit
def _noisy_entropies(layer: Layer, rows: Int[Array, "M"], seeds: UInt32[Array, "X"]) -> tuple[Float[Array, "M B"], ...]:
    """(entropy, that of the mean of all draws, the mean of that of each, where the second is larger) of every row."""
    entropy = lambda p: -(p * jnp.log(jnp.maximum(p, jnp.finfo(jnp.float32).tiny))).sum(-1)
    p, B = matrix(layer, rows), layer.q.shape[0]

    def draw(sums, seed):
        noisy = matrix(layer, rows, seed=jnp.broadcast_to(seed, (B,)))
        return (sums[0] + noisy, sums[1] + entropy(noisy)), None

    (total, each), _ = jax.lax.scan(draw, (jnp.zeros_like(p), jnp.zeros(p.shape[:3])), seeds)
    plain, expected = entropy(p), entropy(total / len(seeds))
    found = plain, expected, each / len(seeds), (expected > plain).astype(jnp.float32)
    return tuple(x.mean(1).T for x in found)


def plot_gumbel_entropy(d: Arrays) -> Figure:
    """What noise adds to the entropy of a row: of its expectation, and of single draws."""
    figure, (panels,) = canvas(2, width=5.8, height=4.4, sharey=True)
    for axes, found, title in zip(panels, (d.expected, d.drawn), ("the mean of draws", "single draws"), strict=True):
        draw_layers(axes, d.rows + 1, (found - d.plain).mean(-1))
        axes.axhline(0, color="0.5", linewidth=0.8)
        axes.set(title=title, xscale="log", xlabel="tokens that a row sees")
    panels[0].set_ylabel("entropy above that without noise, nats")
    panels[0].legend(frameon=False, fontsize="small")
    more, single = (float((x - d.plain).mean()) for x in (d.expected, d.drawn))
    text = (
        f"Expected rows have {more:+.2f} nats, and more than without noise in {percent(float(d.holds.mean()))} of rows "
        f"and heads; a single draw has {single:+.2f}"
    )
    return message(figure, text, f"Keyformer, Eq. 8; {d.draws} draws")
