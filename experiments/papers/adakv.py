"""Why heads should not get equal budgets (Ada-KV, Feng et al., arXiv 2407.11550, section 3.5)."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from matplotlib.figure import Figure

from kvjax.analysis import eviction_bound, eviction_loss, of_kv_heads
from kvjax.decide.select import best
from kvjax.experiments.papers.attention import Layer, by_layer, held_by_best, layers_of, matrix
from kvjax.experiments.papers.base import Arrays, Prompts, budgets_of, canvas, interval, message, percent
from kvjax.plot import COLOURS

# --- Figure 2 ---


def head_concentration(prompts: Prompts, *, window: int = 32, layers: tuple[int, ...] = ()) -> Arrays:
    """Attention that each head retains against its budget (Ada-KV, Fig. 2 and 6).

    The weights are those that SnapKV and Ada-SnapKV rank by: the mean attention of the last `window` rows over the
    tokens before them, renormalised, for every query head. The tokens are those that hold most of it: the best in
    hindsight, no choice of as many holds more. All layers (Fig. 6), or those of `layers` (Fig. 2: layer 8).

    Returns:
      layers: which.
      budgets: tokens, 1 to the candidates there are.
      held: "L N X", attention held with so many, the mean over prompts.

    Raises:
      ValueError: prompts with nothing before the window, layers that the model has not.
    """
    T = prompts.length
    if not 1 <= window < T:
        raise ValueError(f"a window of {window} of {T} tokens leaves none before it; choose 1 to {T - 1}")
    chosen = layers_of(prompts, layers)
    old, last = np.split(np.arange(T), [T - window])
    held = lambda layer: held_by_best(matrix(layer, jnp.asarray(last))[..., old].sum(2)).mean(0)
    return Arrays(layers=chosen, budgets=old + 1, held=by_layer(prompts, held)[[*chosen]])


def plot_head_concentration(d: Arrays) -> Figure:
    """A panel for every layer, a line for every head: the quickest and the slowest stand out."""
    per_row = min(len(d.layers), 4)
    num_rows = -(-len(d.layers) // per_row)
    figure, grid = canvas(per_row, num_rows, width=max(3.3, 5.0 / per_row), height=3.3, sharex=True, sharey=True)
    share = 100 * d.budgets / d.budgets[-1]
    need = d.budgets[(d.held >= 0.95).argmax(-1)] / d.budgets[-1]  # "L N"
    for i, axes in enumerate(grid.flat[: len(d.layers)]):
        for head in d.held[i]:
            axes.plot(share, 100 * head, color="0.7", linewidth=0.9)
        for head, colour, dashes in ((need[i].argmin(), COLOURS[0], ()), (need[i].argmax(), COLOURS[1], (4, 1.5))):
            label = f"head {head}: {percent(need[i, head])} for 95 %"
            axes.plot(share, 100 * d.held[i, head], color=colour, linewidth=2, label=label, dashes=dashes)
        axes.axhline(95, color="0.5", linewidth=0.8, linestyle=":")
        axes.set(title=f"layer {d.layers[i]}", xscale="log", ylim=(0, 102))
        axes.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
        axes.set_xlim(max(share[0], 0.08), 100)
        axes.legend(frameon=False, fontsize="x-small", loc="lower right", handlelength=1.5)
    for axes in grid.flat[len(d.layers) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("budget, % of the tokens")
    for axes in grid[:, 0]:
        axes.set_ylabel("attention held by the best tokens, %")
    text = f"To hold 95 % of their attention, heads need {percent(need.min())} to {percent(need.max())} of the tokens"
    return message(figure, text, "Ada-KV, Fig. 2 and 6")


# --- Figure 3 ---


def loss_bound(prompts: Prompts, *, budgets: tuple[float | int, ...] = (0.0625, 0.125, 0.25)) -> Arrays:
    """Bound of the eviction loss by layer, uniform against adaptive head budgets (Ada-KV, Fig. 3).

    The last row of every prompt. A kv head ranks tokens by the sum of its query heads' attention; uniform budgets keep
    each head's largest, adaptive ones the largest of the layer (Algorithm 2, without safeguard), so that the adaptive
    bound cannot be larger (Theorem 4). The loss itself may be. What is kept is decided by that row's own attention, so
    both are the best in hindsight, of as many tokens in every head or in the layer. Budgets are a head's on average:
    tokens (int; 128 in the paper) or shares of the prompt (float).

    Returns:
      allocations: "uniform" and "adaptive".
      budgets: tokens a kv head on average.
      length: tokens of a prompt.
      bound: "2 R L B", Theorem 2's upper bound under Top-K selection, in L1 norm.
      loss: "2 R L B", the loss itself.
      output: "L B", L1 norm of the layer's attention output, to compare with.

    Raises:
      ValueError: a budget of no token, or of more than there are.
    """
    T = prompts.length
    each = budgets_of(budgets, T, most=T)
    *both, output = by_layer(prompts, _bounds, jnp.asarray(each))
    bound, loss = (x.transpose(2, 1, 0, 3) for x in both)  # "L R 2 B" to "2 R L B"
    how = {"allocations": ("uniform", "adaptive"), "budgets": each, "length": T}
    return Arrays(**how, bound=bound, loss=loss, output=output)


@jax.jit
def _bounds(
    layer: Layer, budgets: Int[Array, "R"]
) -> tuple[Float[Array, "R 2 B"], Float[Array, "R 2 B"], Float[Array, "B"]]:
    B, _, T, _ = layer.q.shape
    K = layer.k.shape[1]
    p = matrix(layer, jnp.full((1,), T - 1))[:, :, 0]
    v, out_proj = layer.v.astype(jnp.float32), layer.out_proj.astype(jnp.float32)
    weights = of_kv_heads(p, K)
    pos = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None, None], weights.shape)

    def at(budget):
        keeps = best(weights, pos, jnp.full((B, K), budget)), adaptive(weights, budget)
        both = lambda f: jnp.stack([f(p, v, out_proj, keep) for keep in keeps])
        return both(eviction_bound), both(eviction_loss)

    bound, loss = jax.lax.map(at, budgets)
    N = p.shape[1]
    output = jnp.einsum("bns,bnsh,nhd->bd", p, jnp.repeat(v, N // K, axis=1), out_proj)
    return bound, loss, jnp.abs(output).sum(-1)


def adaptive(weights: Float[Array, "B K T"], budget: Int[Array, ""]) -> Bool[Array, "B K T"]:
    """The layer's largest weights, `budget` a head on average; every head keeps at least its largest (Algorithm 2)."""
    B, K, T = weights.shape
    first = jnp.arange(T, dtype=jnp.int32)[None, None] == weights.argmax(-1, keepdims=True).astype(jnp.int32)
    flat = jnp.where(first, jnp.inf, weights).reshape(B, 1, K * T)
    earlier = K * T - 1 - jax.lax.broadcasted_iota(jnp.int32, flat.shape, 2)  # of equal weights, the first are chosen
    return best(flat, earlier, jnp.full((B, 1), K * budget)).reshape(B, K, T)


def plot_loss_bound(d: Arrays) -> Figure:
    """Bounds and losses relative to the layer's output, by layer; a panel for every budget."""
    figure, (row,) = canvas(len(d.budgets), width=max(4.2, 7.0 / len(d.budgets)), height=4.2, sharey=True)
    layers = np.arange(d.bound.shape[2])
    for r, axes in enumerate(row):
        for x, hatch, place, what in ((d.bound, None, -0.2, "bound"), (d.loss, "////", 0.2, "loss")):
            for i, name in enumerate(d.allocations):
                mean, half = interval(x[i, r] / d.output)
                at = layers + place + 0.19 * (i - 0.5)
                face = COLOURS[i] if hatch is None else "white"
                axes.bar(
                    at, mean, 0.17, yerr=half, color=face, edgecolor=COLOURS[i], hatch=hatch, capsize=2,
                    label=f"{what}, {name}",
                )  # fmt: skip
        axes.set(title=f"budget {d.budgets[r]} of {d.length} tokens", xlabel="layer", yscale="log")
        if len(layers) <= 12:
            axes.set_xticks(layers)
        axes.grid(False, axis="x")
    row[0].set_ylabel("L1 error of a layer's attention, relative\nto its L1 norm, best tokens in hindsight")
    row[-1].legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    saved = 1 - d.bound[1].mean() / d.bound[0].mean()
    lower = float((d.loss[1] < d.loss[0]).mean())
    worse = float((d.bound[1] > d.bound[0] * (1 + 1e-5)).mean())
    never = "and never raise it" if worse == 0 else f"but raise it in {percent(worse)} of the cases"
    text = (
        f"Adaptive budgets lower the bound by {percent(saved)} {never};\n"
        f"the loss itself is lower in {percent(lower)} of the cases"
    )
    return message(figure, text, "Ada-KV, Fig. 3; last row of every prompt, 95 % intervals over prompts")
