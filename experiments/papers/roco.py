"""RoCo's figures (Ren and Zhu, arXiv 2402.06262, section 4.3): is importance consistent, and who is safe to evict?"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree
from matplotlib.figure import Figure

from kvjax import Evict, analysis
from kvjax.contract import EMPTY, turned_queries
from kvjax.decide.select import all_but_worst, best
from kvjax.experiments.papers.attention import Layer, by_layer, fold_rows
from kvjax.experiments.papers.base import Arrays, Prompts, budgets_of, canvas, draw_layers, interval, message, percent
from kvjax.pallas_kernels import Columns, Logits, attention
from kvjax.plot import COLOURS
from kvjax.plot.style import style
from kvjax.scores.attention import SparedByDeviation

MEASURES = ("AAS (H2O)", "AQAS", "LTAS (TOVA)", "MAS (RoCo)")
_AQAS, _LTAS, _MAS = 1, 2, 3
SINKS = 4


# --- Figure 2 ---


def importance_jaccard(prompts: Prompts, *, shares: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)) -> Arrays:
    """Whether measures choose the same tokens from an evicting cache as from the full one (RoCo, Fig. 2).

    Text is read token by token. A cache of B tokens evicts its least important one at every step, in every layer and
    kv head, with no window; what it then holds is compared with the B most important tokens of a run that evicts
    nothing, by the same measure. Accumulated (AAS), accumulated and quantised (AQAS), last token's (LTAS) and mean
    attention (MAS). What a layer evicts changes what the layers above it read, as in real use.

    The paper averages over every position, also those before the cache is full, where similarity is 1; here only steps
    count at which there is something to evict.

    Args:
      prompts: the model and its prompts.
      shares: budgets as shares of the prompt.

    Returns:
      measures: names of the importance measures.
      budgets: "R", tokens of the cache.
      length: tokens of a prompt.
      similarity: "M R L B", Jaccard similarity, the mean over kv heads and over all steps with something to evict.
      chance: "R", that of a random set.

    Raises:
      ValueError: a share that leaves no token, or none to evict.
    """
    T = prompts.length
    budgets = budgets_of(shares, T, most=T - 1)
    found = _read_and_evict(prompts.model, prompts.params, jnp.asarray(prompts.tokens), tuple(budgets.tolist()))
    steps = np.arange(1, T + 1)[:, None]
    full = (steps > budgets) / (steps > budgets).sum(0)  # a weight for every step with something to evict
    similarity = np.einsum("tr,tlmrb->mrlb", full, np.asarray(found, np.float64))
    held = np.minimum(budgets / steps, 1.0)  # two random sets each hold such a share of the other
    chance = (full * held / (2.0 - held)).sum(0)
    return Arrays(measures=MEASURES, budgets=budgets, length=T, similarity=similarity, chance=chance)


@functools.partial(jax.jit, static_argnames=("model", "budgets"))
def _read_and_evict(
    model: Any, params: PyTree[Any], tokens: Int[Array, "B T"], budgets: tuple[int, ...]
) -> Float[Array, "T L M R B"]:
    """Jaccard similarity after every token. One batch holds all measures and budgets, and the full cache as the first.

    A token's slot is its position, so that slots of all caches can be compared.
    """
    c = model.config
    B, T = tokens.shape
    M, R, K = len(MEASURES), 1 + len(budgets), c.num_kv_heads
    X = M * R * B
    slots = jnp.arange(T, dtype=jnp.int32)
    limits = jnp.asarray((T, *budgets), jnp.int32)
    limit = jnp.broadcast_to(limits[None, :, None, None], (M, R, B, K)).reshape(X, K)
    kind = jnp.repeat(jnp.arange(M, dtype=jnp.int32), R * B)[:, None, None]
    outer, each = model.parts(params)

    def next_token(caches, t):
        pos = jnp.full((X, 1), t)

        def attend(cache, q, k, v, *, layer, rotate, out_proj=None, hidden=None, logits=Logits()):
            del layer, out_proj, hidden
            keys, values, live, total = cache
            write = lambda x, new: lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), t, 2)
            keys, values = write(keys, rotate(k, pos[:, None])), write(values, v)
            live = live | (slots == t)[None, None]
            held = jnp.where(live, slots[None, None], EMPTY)
            wanted = Columns(), Columns(element="above", group_at="before")
            q = turned_queries(rotate, q, pos[:, None])
            result = attention(q, keys, values, pos, held, columns=wanted, logits=logits)
            p, above = result.columns
            total = jnp.where(kind == _LTAS, p, total + jnp.where(kind == _AQAS, above, p))
            rows = jnp.maximum(t + 1 - slots, 1).astype(jnp.float32)[None, None]
            score = jnp.where(kind == _MAS, total / rows, total)
            live = all_but_worst(score, held, limit)
            return result.out, (keys, values, live, total), compare(score, live, t)

        token = jnp.broadcast_to(tokens[:, t][None], (M * R, B)).reshape(X, 1)
        x, after, overlaps = model.embed(outer, token, pos), [], []
        for i, (own, cache) in enumerate(zip(each, caches, strict=True)):
            x, cache, overlap = model.block(i, own, x, cache, attend)
            after, overlaps = [*after, cache], [*overlaps, overlap]
        return tuple(after), jnp.stack(overlaps)

    def compare(score, live, t):
        full = score.reshape(M, R, B, K, T)[:, :1]
        full = jnp.broadcast_to(full, (M, R - 1, B, K, T)).reshape(-1, K, T)
        seen = jnp.broadcast_to(jnp.where(slots <= t, slots, EMPTY)[None, None], full.shape)
        wanted = best(full, seen, limit.reshape(M, R, B, K)[:, 1:].reshape(-1, K))
        live = live.reshape(M, R, B, K, T)[:, 1:].reshape(-1, K, T)
        both, either = (wanted & live).sum(-1), (wanted | live).sum(-1)
        return (both / either).mean(-1).reshape(M, R - 1, B)

    kv = jnp.zeros((X, K, T, c.head_dim), c.dtype)
    cache = kv, kv, jnp.zeros((X, K, T), bool), jnp.zeros((X, K, T))
    _, found = lax.scan(next_token, (cache,) * c.num_layers, slots)
    return found


def plot_importance_jaccard(d: Arrays) -> Figure:
    """Similarity against budget, a line for every measure."""
    figure, ((axes,),) = canvas(width=6.4)
    mean, half = interval(d.similarity.mean(2))
    share = 100 * d.budgets / d.length
    for i, name in enumerate(d.measures):
        axes.errorbar(share, mean[i], yerr=half[i], label=name, capsize=2, **style(i))
    axes.plot(share, d.chance, color="0.6", linestyle="--", label="random set")
    axes.set(xlabel=f"budget, % of {d.length} tokens", ylabel="Jaccard similarity to full cache", ylim=(0, 1.02))
    axes.legend(frameon=False, loc="lower right")
    order = np.argsort(-mean.mean(1))
    best, next_ = (d.measures[i] for i in order[:2])
    lead = float(mean.mean(1)[order[0]] - mean.mean(1)[order[1]])
    text = f"{best} agrees most with its full-cache choice,\n{lead:.2f} above {next_} on average"
    return message(figure, text, "RoCo, Fig. 2")


# --- Figure 3 ---


def attention_by_age(prompts: Prompts, *, skip: int = SINKS) -> Arrays:
    """Mean and standard deviation of the attention a token receives, against its age (RoCo, Fig. 3).

    The tokens of the first half, each watched for half the prompt's rows, so that every age has the same tokens. The
    first `skip` are left out: attention sinks have a life of their own. The paper's claim: after a brief ascent the
    deviation declines steadily.

    Returns:
      ages: "A", 1, 2, ... rows, a token's own included.
      mean, std: "L A", mean and standard deviation of the attention probabilities that a token has received so far
        (what RoCo carries), the mean over tokens, kv heads and prompts.
      peaked: "L A", the share of tokens whose standard deviation had its maximum by that age.

    Raises:
      ValueError: prompts too short to have a first half beyond the skipped tokens.
    """
    T = prompts.length
    if skip >= T // 2:
        raise ValueError(f"prompts of {T} tokens leave none between the first {skip} and the half; use longer ones")
    mean, std, peaked = by_layer(prompts, _by_age, skip)
    return Arrays(ages=np.arange(1, T // 2 + 1), mean=mean, std=std, peaked=peaked)


@functools.partial(jax.jit, static_argnames="skip")
def _by_age(layer: Layer, skip: int) -> tuple[Float[Array, "A"], Float[Array, "A"], Float[Array, "A"]]:
    B, K, T, _ = layer.k.shape
    A = T // 2
    pos = jnp.arange(skip, T - A, dtype=jnp.int32)
    zeros = jnp.zeros((B, K, pos.size))

    def visit(carry, p, rows):
        total, square, top, peak, sums = carry
        p = p.reshape(B, K, -1, *p.shape[2:]).mean(2)[..., skip : T - A]
        totals = total[:, :, None] + jnp.cumsum(p, axis=2)
        squares = square[:, :, None] + jnp.cumsum(p * p, axis=2)
        age = rows[:, None] - pos[None] + 1
        n = jnp.maximum(age, 1).astype(jnp.float32)[None, None]
        mean = totals / n
        std = jnp.sqrt(jnp.maximum(squares / n - mean * mean, 0.0))
        watched = (age >= 1) & (age <= A) & (rows < T)[:, None]
        here = jnp.stack([mean.mean((0, 1)), std.mean((0, 1))], axis=-1)
        sums = sums.at[jnp.where(watched, age - 1, A)].add(here, mode="drop")
        std = jnp.where(watched[None, None], std, -1.0)
        highest, when = std.max(2), std.argmax(2)  # the first of equals
        later = jnp.take_along_axis(jnp.broadcast_to(age[None, None], std.shape), when[:, :, None], axis=2)[:, :, 0]
        peak = jnp.where(highest > top, later, peak)
        return (totals[:, :, -1], squares[:, :, -1], jnp.maximum(top, highest), peak, sums), None

    start = zeros, zeros, zeros - 1.0, zeros.astype(jnp.int32), jnp.zeros((A, 2))
    (_, _, _, peak, sums), _ = fold_rows(layer, visit, start)
    counts = jnp.zeros((A,)).at[peak.reshape(-1) - 1].add(1.0)
    return sums[:, 0] / pos.size, sums[:, 1] / pos.size, jnp.cumsum(counts) / counts.sum()


def plot_attention_by_age(d: Arrays) -> Figure:
    """Mean, deviation, and when the deviation peaked."""
    figure, ((left, middle, right),) = canvas(3, width=4.3)
    draw_layers(left, d.ages, d.mean)
    draw_layers(middle, d.ages, d.std)
    draw_layers(right, d.ages, 100 * d.peaked)
    for line, std in zip(middle.get_lines(), d.std, strict=True):
        middle.plot(d.ages[std.argmax()], 1.03 * std.max(), marker="v", color=line.get_color(), markersize=6)
    left.set(title="mean", ylabel="attention received so far", yscale="log")
    middle.set(title="standard deviation (triangles: where it peaks)", ylabel="deviation of attention received so far")
    right.set(title="deviation has peaked", ylabel="tokens, %", ylim=(0, 102))
    for axes in (left, middle, right):
        axes.set(xscale="log", xlabel="age of the token, rows")
    right.legend(frameon=False, loc="lower right")
    peaks = d.ages[d.std.argmax(1)]
    half = d.ages[(d.peaked.mean(0) >= 0.5).argmax()]
    text = (
        f"The deviation peaks {_between(peaks)} rows after a token is read and then declines; "
        f"half of all tokens have peaked after {half}"
    )
    return message(figure, text, "RoCo, Fig. 3")


def _between(x: np.ndarray) -> str:
    return f"{x.min()}" if x.min() == x.max() else f"{x.min()} to {x.max()}"


# --- Figure 4 ---


def scope_size(
    prompts: Prompts,
    *,
    shares: tuple[float, ...] = (0.5, 0.2),
    sizes: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9),
    continuation: int = 64,
) -> Arrays:
    """What the eviction scope protects, and how much: a local window or the largest deviations (RoCo, Fig. 4).

    The prompt is read with the full cache and evicted once by mean attention (MAS). The scope protects either the last
    tokens or those of largest standard deviation. Then the prompt's last `continuation` tokens, held back so far, are
    read with what is left. The paper compares generated summaries by ROUGE and METEOR at half of the cache; here
    predictions are compared, which needs no answers. Beside them stands what knows the continuation: the best tokens of
    every head in hindsight.

    Args:
      prompts: the model and its prompts.
      shares: budgets as shares of the prompt.
      sizes: protected tokens as shares of the budget.
      continuation: tokens that predictions are compared on.

    Returns:
      scopes: "local window" and "standard deviation".
      budgets: "R", live tokens a kv head.
      sizes: "Z", protected tokens as shares of the budget.
      length: tokens of the prompt.
      divergence: "2 R Z B", KL divergence of the next-token distribution from the full cache's, in nats, the mean over
        the continuation.
      agreement: "2 R Z B", the share of the continuation where both find the same token likeliest.
      hindsight: "R B", the divergence where every head keeps the tokens that the continuation attends to most.

    Raises:
      ValueError: prompts that the continuation leaves nothing of.
    """
    (model, params, tokens), n = prompts, prompts.length - continuation
    if n < 2:
        raise ValueError(f"{prompts.length} tokens less a continuation of {continuation} leave {n} to evict; use more")
    budgets = budgets_of(shares, n, most=n)
    grid = {f"{kind} {size}": (kind, size) for kind in (False, True) for size in sizes}
    scope = lambda kind, size: lambda budget: scoped(budget, int(size * budget + 1e-9), by_deviation=kind)
    policies = {name: scope(*each) for name, each in grid.items()}
    before, after = np.split(tokens, [n], axis=1)
    found = analysis.curves(model, params, before, after, policies, budgets.tolist(), oracles=("head",))
    of_scopes = lambda x: x[:-1].reshape(2, len(sizes), len(budgets), -1).swapaxes(1, 2)
    return Arrays(
        scopes=("local window", "standard deviation"),
        budgets=budgets,
        sizes=np.array(sizes),
        length=n,
        divergence=of_scopes(found.values("kl")),
        agreement=of_scopes(found.values("agreement")),
        hindsight=found.values("kl")[-1],
    )


def scoped(budget: int, size: int, *, by_deviation: bool) -> Evict:
    """Eviction by mean attention that protects `size` tokens: the last, or those of largest deviation."""
    recent, spared = (0, size) if by_deviation else (size, 0)
    return Evict(SparedByDeviation(size=spared), budget, 0, recent)


def plot_scope_size(d: Arrays) -> Figure:
    """What a scope changes against none at all, prompt by prompt; a panel for every budget."""
    figure, (row,) = canvas(len(d.budgets), width=5.0)
    mean, half = interval(d.divergence - d.divergence[:, :, :1])
    for r, axes in enumerate(row):
        for i, scope in enumerate(d.scopes):
            aside = i - 0.5  # keeps intervals apart
            axes.errorbar(100 * d.sizes + aside, mean[i, r], yerr=half[i, r], label=scope, capsize=2, **style(i))
        axes.axhline(0, color="0.5", linewidth=0.8)
        best = (d.hindsight[r] - d.divergence[0, r, 0]).mean()
        axes.axhline(best, color=COLOURS[2], linewidth=2, linestyle="--", label="best tokens in hindsight")
        alone = d.divergence[0, r, 0].mean()
        axes.set_title(
            f"budget {percent(d.budgets[r] / d.length)} of {d.length} tokens\n(without a scope {alone:.3f} nats)"
        )
        axes.set(xlabel="protected tokens, % of the budget")
    row[0].set_ylabel("KL divergence from the full cache,\nchange by the scope, nats")
    row[0].legend(frameon=False, title="protected by", loc="best")
    text = "Best sizes compared: " + ";\n".join(
        f"at {percent(b / d.length)} of the cache {_verdict(d, r)}" for r, b in enumerate(d.budgets)
    )
    return message(figure, text, "RoCo, Fig. 4; 95 % intervals over prompts, paired")


def _verdict(d: Arrays, r: int) -> str:
    """Which scope is better at its best size, where a paired interval tells."""
    window, deviation = (d.divergence[i, r, d.divergence[i, r].mean(-1).argmin()] for i in (0, 1))
    more, half = (float(x[0]) for x in interval((deviation - window)[None]))
    if abs(more) <= half:
        return f"window and deviation are not told apart ({more:+.3f} ± {half:.3f} nats)"
    return f"the {d.scopes[int(more < 0)]} loses {abs(more):.3f} ± {half:.3f} nats less"
