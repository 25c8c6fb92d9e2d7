"""Where in a prompt policies keep tokens, and by which scores (NaCl, arXiv 2408.03675; AhaKV, arXiv 2506.03762)."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

import kvjax
from kvjax import Policy, analysis, methods
from kvjax.experiments.papers.base import Arrays, Prompts, budgets_of, by_slice, canvas, message, percent
from kvjax.methods.released import papers
from kvjax.plot import COLOURS, kept_positions
from kvjax.plot.style import style
from kvjax.scores.attention import Faded


def decide(
    prompts: Prompts, budget: int, names: Sequence[str], *, pad: int = 0
) -> tuple[Bool[np.ndarray, "P L B K T"], Float[np.ndarray, "P L B K T"]]:
    """What methods keep of prompts after reading them, and the scores that they rank by.

    With `pad` columns of padding in front, prompts of several lengths share a program.

    Raises:
      ValueError: a policy that cannot work with prompts of this length.
    """
    model, params, tokens = prompts
    policies = [_policies(budget)[name] for name in names]
    lengths, padded = np.full(len(tokens), tokens.shape[1], np.int32), np.pad(tokens, ((0, 0), (pad, 0)))
    reading = analysis.read(model, params, padded, tokens[:, :1], policies=policies, lengths=lengths)
    each = [reading.decisions(policy) for policy in policies]
    keep, score = (np.stack([[getattr(x, name) for x in layers] for layers in each]) for name in ("keep", "score"))
    return keep[..., pad:], score[..., pad:].astype(np.float64)


def _policies(budget: int) -> dict[str, Policy]:
    """The methods that the papers compare, with the recent windows of theirs that fit in a small budget."""
    recent = min(32, max(budget // 2, 1))
    return {
        "StreamingLLM": methods.streaming_llm(budget),
        "H2O": methods.h2o(budget),
        "TOVA": methods.tova(budget),
        "RoCo": methods.roco(budget),
        "SnapKV": methods.snapkv(budget, window=recent),
        "NaCl": methods.nacl(budget),
        "Keyformer": methods.keyformer(budget),
        "AhaKV": methods.ahakv(budget, recent=recent),
        "AhaKV without a prior": papers.summed_by(methods.ahakv(budget, recent=recent), Faded),
    }


# --- NaCl, Figure 2a to c; AhaKV, Figures 2c, 5 and 6 ---


def retained_positions(prompts: Prompts, *, share: float = 0.2, slices: int = 16) -> Arrays:
    """Which tokens of a prompt each policy retains (NaCl, Fig. 2; AhaKV, Fig. 2, 5 and 6).

    The papers' claim: accumulated attention (H2O) keeps the beginning, the last row's attention (TOVA, the papers'
    MSRNN) the end, and NaCl and AhaKV spread over the prompt.

    Args:
      prompts: the model and its prompts.
      share: the budget as a share of the prompt.
      slices: parts of the prompt for the profile.

    Returns:
      methods: names.
      budget: live tokens a kv head.
      num_layers: layers of the model.
      kept: "P Y T", whether each token of the first prompt is kept, a row for every layer and kv head.
      profile: "P X B", the share that is kept of every slice of the prompt, the mean over layers and kv heads.
      chosen: tokens before the last half budget, which H2O keeps whatever they are.
      late: "P B", the share of the kept tokens among `chosen` that lie in its second half: 0.5 without a bias.
    """
    T = prompts.length
    (budget,) = budgets_of((share,), T, most=T).tolist()
    names = ("StreamingLLM", "H2O", "TOVA", "RoCo", "SnapKV", "NaCl", "AhaKV")
    keep, _ = decide(prompts, budget, names)
    P, L, *_ = keep.shape
    chosen, count = T - budget // 2, lambda keep: keep.sum((1, 3, 4))
    return Arrays(
        methods=names,
        budget=budget,
        num_layers=L,
        kept=keep[:, :, 0].reshape(P, -1, T),
        profile=by_slice(keep.mean((1, 3)), slices).swapaxes(1, 2),
        chosen=chosen,
        late=count(keep[..., chosen // 2 : chosen]) / np.maximum(count(keep[..., :chosen]), 1),
    )


def plot_retained_positions(d: Arrays) -> Figure:
    """A map for every method, and beside it the share of every slice that is kept."""
    P, _, T = d.kept.shape
    figure, grid = canvas(2, P, width=5.6, height=1.05, sharex=True, width_ratios=(2.2, 1))
    slices = d.profile.shape[1]
    middle = (np.arange(slices) + 0.5) * T / slices
    late = d.late.mean(-1)
    by_layer = d.kept.reshape(P, d.num_layers, -1, T)
    kept_positions(dict(zip(d.methods, by_layer, strict=True)), length=T, axes=grid[:, 0])
    for i, (left, right) in enumerate(grid):
        left.grid(False)
        right.bar(middle, 100 * d.profile[i].mean(-1), 0.85 * T / slices, color=COLOURS[0])
        right.axhline(100 * d.budget / T, color=COLOURS[1], linewidth=1.2)
        right.axvline(d.chosen, color="black", linestyle=":", linewidth=1.2)
        right.set(ylim=(0, 105), yticks=[0, 50, 100])
        note = f"left of the dots, {percent(late[i])} in the later half"
        right.annotate(note, (0.02, 0.8), xycoords="axes fraction", fontsize="x-small")
    grid[0, 0].set_title("one prompt", fontsize="small")
    grid[0, 1].set_title("kept of every slice, %, all prompts (line: budget)", fontsize="small")
    grid[-1, 1].set_xlabel("position in the prompt, tokens", fontsize="small")
    by_name = dict(zip(d.methods, late, strict=True))
    text = (
        f"Of what they keep before the last {T - d.chosen} tokens, "
        f"H2O has {percent(by_name['H2O'])} in the later half,\n"
        f"TOVA {percent(by_name['TOVA'])}, NaCl {percent(by_name['NaCl'])}, AhaKV {percent(by_name['AhaKV'])}"
    )
    return message(figure, text, f"NaCl, Fig. 2; AhaKV, Fig. 2, 5, 6; budget {d.budget} of {T} tokens")


# --- AhaKV, Figure 2d ---


def value_prior(prompts: Prompts, *, share: float = 0.2) -> Arrays:
    """How many tokens have large scores, without and with the value prior (AhaKV, Fig. 2d).

    Returns:
      length: tokens of a prompt.
      budget: tokens that the softmax is sized for.
      thresholds: "Z", shares of a head's largest score.
      above: "2 Z B", the share of tokens whose score exceeds such a share, (without, with) the value prior.
    """
    T = prompts.length
    (budget,) = budgets_of((share,), T, most=T).tolist()
    _, scores = decide(prompts, budget, ("AhaKV without a prior", "AhaKV"))
    thresholds, relative = np.geomspace(1e-4, 1.0, 33), scores / scores.max(-1, keepdims=True)
    above = np.stack([(relative > t).mean((1, 3, 4)) for t in thresholds], axis=1)
    return Arrays(length=T, budget=budget, thresholds=thresholds, above=above)


def plot_value_prior(d: Arrays) -> Figure:
    """The share of scores above a threshold."""
    figure, ((axes,),) = canvas(width=7.0, height=4.2)
    without, with_ = 100 * d.above.mean(-1)
    axes.plot(d.thresholds, without, color=COLOURS[0], linewidth=1.8, label="F: attention alone")
    axes.plot(d.thresholds, with_, color=COLOURS[1], linewidth=1.8, linestyle="--", label="with the value prior")
    axes.set(xscale="log", xlabel="threshold, share of the head's largest score", ylabel="tokens above it, %")
    axes.set(ylim=(0, 102))
    axes.legend(frameon=False)
    less = float((without - with_).mean())
    text = f"The value prior leaves {abs(less):.1f} points {'fewer' if less >= 0 else 'more'} tokens above a threshold"
    return message(figure, text, f"AhaKV, Fig. 2d; budget {d.budget} of {d.length} tokens")


# --- NaCl, Figures 7 to 9; AhaKV, Figure 2a, b ---


def scores_by_step(
    prompts: Prompts, *, share: float = 0.2, steps: Sequence[int] = range(0, 65, 8), slices: int = 32
) -> Arrays:
    """Eviction scores by position at steps of generating (NaCl, Fig. 7 to 9; AhaKV, Fig. 2).

    The text is what the full cache generates, greedily, and all of it has scores: nothing is evicted. H2O sums the rows
    of the whole text so far, TOVA (NaCl's MSRNN) has the newest, NaCl and AhaKV sum those at the text's end.

    Returns:
      methods: names.
      length: tokens of a prompt.
      budget: tokens that NaCl's proxies and AhaKV's softmax are sized for.
      steps: "M", tokens generated so far, 0 after the prompt.
      score: "P M X B", every slice's mean score over that of the text so far, the mean over layers and kv heads.
    """
    T, last, names = prompts.length, max(steps), ("H2O", "TOVA", "NaCl", "AhaKV")
    (budget,) = budgets_of((share,), T, most=T).tolist()
    more = kvjax.generate(*prompts, max_new_tokens=last, eos_ids=()).tokens
    text = np.concatenate([prompts.tokens, np.asarray(more, prompts.tokens.dtype)], axis=1)
    each = [decide(prompts._replace(tokens=text[:, : T + n]), budget, names, pad=last - n)[1] for n in steps]
    found = [by_slice(s / s.mean(-1, keepdims=True), slices).mean((1, 3)).swapaxes(1, 2) for s in each]
    return Arrays(methods=names, length=T, budget=budget, steps=np.array(steps), score=np.stack(found, axis=1))


def plot_scores_by_step(d: Arrays) -> Figure:
    """A map for every method: positions to the right, steps downwards."""
    figure, (panels,) = canvas(len(d.methods), width=3.6, height=3.6, sharey=True)
    score = d.score.mean(-1)
    norm = LogNorm(max(score.min(), 1e-3), score.max())
    for axes, name, here in zip(panels, d.methods, score, strict=True):
        axes.grid(False)
        axes.imshow(here, norm=norm, cmap="cividis", aspect="auto", extent=(0, 100, len(here) - 0.5, -0.5))
        axes.set(title=name, xlabel="position, % of the text so far", yticks=range(len(here)), yticklabels=d.steps)
    panels[0].set_ylabel("tokens generated")
    figure.colorbar(panels[0].images[0], ax=panels, label="mean score, relative to the text's")
    over = score[:, :, 1] / score[:, :, -2]
    parts = [f"{name} {x[0]:.2g} to {x[-1]:.2g}" for name, x in zip(d.methods, over, strict=True)]
    text = f"Early tokens' score over that of late ones, from the prompt to step {d.steps[-1]}:\n{', '.join(parts)}"
    return message(
        figure, text, f"NaCl, Fig. 7 to 9; AhaKV, Fig. 2; budget {d.budget} of {d.length} tokens, nothing evicted"
    )


# --- Keyformer, Figure 4 ---


def score_distributions(prompts: Prompts, *, share: float = 0.5, rows: int = 32) -> Arrays:
    """Attention by rank, with the full cache and with half of it (Keyformer, Fig. 4).

    Rows are those of the last tokens, with the full cache's queries (Eq. 2). Where tokens are evicted after the prompt,
    a row gives to those that stay what the others would have had (Eq. 3).

    Returns:
      methods: names, the full cache first.
      length: tokens of the prompt.
      budget: live tokens a kv head.
      score: "P T B", attention a row by rank, the largest first, the mean over layers and query heads.
      factor: "P 3 B", what a token that stays gets over what the full cache gave it, 10 %, 50 % and 90 % of all.
    """
    T, names = prompts.length - rows, ("StreamingLLM", "H2O", "Keyformer")
    (budget,) = budgets_of((share,), T, most=T).tolist()
    before, after = np.split(prompts.tokens, [T], axis=1)
    keep, _ = decide(prompts._replace(tokens=before), budget, names)
    found = analysis.trace(analysis.read(prompts.model, prompts.params, before, after))
    p, own = (np.asarray(x, np.float64).swapaxes(0, 1) for x in (found.attention, found.own_mass))
    stay = np.repeat(np.concatenate([np.ones_like(keep[:1]), keep]), p.shape[2] // keep.shape[3], axis=3)
    left = (p * s[..., None, :] for s in stay)
    means = np.stack([(x / (x.sum(-1) + own)[..., None]).mean(3) for x in left])
    gain = np.where(stay, means / np.maximum(means[0], np.finfo(np.float32).tiny), np.nan)
    factor = np.nanquantile(gain, (0.1, 0.5, 0.9), axis=(1, 3, 4)).swapaxes(0, 1)
    score = -np.sort(-means, axis=-1).mean((1, 3)).swapaxes(1, 2)
    return Arrays(methods=("full cache", *names), length=T, budget=budget, score=score, factor=factor)


def plot_score_distributions(d: Arrays) -> Figure:
    """Attention by rank, a line a method; where nothing is left, none."""
    figure, ((axes,),) = canvas(width=7.0, height=4.4)
    at, factor = 100 * (np.arange(d.length) + 0.5) / d.length, d.factor.mean(-1)
    for i, (name, line, (low, mid, high)) in enumerate(zip(d.methods, d.score.mean(-1), factor, strict=True)):
        how = style(i) | {"linestyle": ("-", ":", "--", "-.")[i], "markevery": (i * d.length // 40, d.length // 8)}
        text = f"{name}: {mid:.2f} ({low:.2f} to {high:.2f})" if i else name
        axes.plot(at, np.where(line > 0, line, np.nan), label=text, **how)
    axes.set(xlabel="rank, % of the prompt's tokens", ylabel="attention that a row gives", yscale="log")
    axes.legend(frameon=False, title="over the full cache's, of a token that stays:\nmedian (10 to 90 %)")
    over = dict(zip(d.methods, factor[:, 1], strict=True))
    more = f"{over['H2O']:.2f} times the full cache's attention\nunder H2O, {over['Keyformer']:.2f} under Keyformer"
    return message(
        figure, f"Tokens that stay get {more}", f"Keyformer, Fig. 4; {d.budget} of {d.length} tokens a kv head"
    )


# --- NaCl, section 6.4 ---


def token_survival(
    prompts: Prompts, *, budgets: tuple[float | int, ...] = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
) -> Arrays:
    """Tokens that stay in some head, and in some layer, beside independent heads (NaCl, section 6.4).

    The paper's claim: with 32 heads that each keep 20 %, a token stays in one of them with 99.92 %. That is of heads
    which draw alone; heads that rank by attention choose the same tokens.

    Args:
      prompts: the model and its prompts.
      budgets: shares of the prompt, or tokens (int).

    Returns:
      methods: names.
      budgets: "C", shares of a prompt that each kv head keeps.
      num_heads, num_layers: kv heads of a layer, and layers.
      in_a_head, in_a_layer: "P C B", the share of the prompt's tokens that stay in some head of a layer, the mean over
        layers, and in some layer.
    """
    T, names = prompts.length, ("NaCl", "H2O", "SnapKV")
    whole = budgets_of(budgets, T, most=T)
    kept = np.stack([decide(prompts, n, names)[0] for n in whole.tolist()], axis=1)  # "P C L B K T"
    sizes = {"num_heads": kept.shape[4], "num_layers": kept.shape[2]}
    stay = {"in_a_head": kept.any(4).mean((2, 4)), "in_a_layer": kept.any((2, 4)).mean(-1)}
    return Arrays(methods=names, budgets=whole / T, **sizes, **stay)


def if_independent(budgets: Float[np.ndarray, "C"], heads: int) -> Float[np.ndarray, "C"]:
    r"""The probability that one of so many heads keeps a token, where each keeps any alike: $1 - (1 - C)^h$."""
    return 1 - (1 - budgets) ** heads


def plot_token_survival(d: Arrays) -> Figure:
    """Survival against the budget, in a layer and in the model."""
    figure, ((left, right),) = canvas(2, width=5.4, height=4.0, sharey=True)
    for axes, found, heads in ((left, d.in_a_head, d.num_heads), (right, d.in_a_layer, d.num_heads * d.num_layers)):
        for i, name in enumerate(d.methods):
            axes.plot(d.budgets, 100 * found[i].mean(-1), label=name, **style(i))
        axes.plot(
            d.budgets, 100 * if_independent(d.budgets, heads), color="0.4", linestyle=":", label="independent heads"
        )
        axes.set(xscale="log", xlabel="budget, share of the prompt", ylim=(0, 103))
        axes.set_xticks(d.budgets, [percent(budget) for budget in d.budgets], minor=False)
        axes.minorticks_off()
    left.set(ylabel="tokens that stay, %", title=f"in some of a layer's {d.num_heads} kv heads")
    right.set_title(f"in some of {d.num_layers} layers")
    right.legend(frameon=False)
    at = len(d.budgets) // 2
    kept, alone = percent(float(d.in_a_head[0, at].mean())), percent(float(if_independent(d.budgets, d.num_heads)[at]))
    text = f"At {percent(d.budgets[at])}, NaCl keeps {kept} of the tokens in some head,\nindependent heads {alone}"
    return message(figure, text, "NaCl, section 6.4")
