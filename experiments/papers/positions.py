"""Where in a prompt policies keep tokens, and by which scores (NaCl, arXiv 2408.03675; AhaKV, arXiv 2506.03762)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, PyTree
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure

import kvjax
from kvjax import Policy, analysis, methods
from kvjax.experiments.papers.base import budgets_of, by_slice, canvas, message, percent, style
from kvjax.methods import variants
from kvjax.plot import COLOURS


def decide(
    model: Any, params: PyTree[Any], tokens: Int[np.ndarray, "B T"], budget: int, names: Sequence[str], *, pad: int = 0
) -> tuple[Bool[np.ndarray, "P L B K T"], Float[np.ndarray, "P L B K T"]]:
    """What methods keep of prompts after reading them, and the scores that they rank by.

    With `pad` columns of padding in front, prompts of several lengths share a program.

    Raises:
      ValueError: a policy that cannot work with prompts of this length.
    """
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
        "AhaKV without a prior": variants.ahakv_without("prior", budget, recent=recent),
    }


# --- NaCl, Figure 2a to c; AhaKV, Figures 2c, 5 and 6 ---


@dataclasses.dataclass(frozen=True)
class RetainedPositions:
    """Which tokens are kept.

    Attributes:
      methods: names.
      budget: live tokens a kv head.
      kept: whether each token of the first prompt is kept, a row for every layer and kv head.
      profile: the share that is kept of every slice of the prompt, the mean over layers and kv heads.
      chosen: tokens before the last half budget, which H2O keeps whatever they are.
      late: the share of the kept tokens among `chosen` that lie in its second half: 0.5 without a bias.
    """

    methods: tuple[str, ...]
    budget: int
    num_layers: int
    kept: Bool[np.ndarray, "P Y T"]
    profile: Float[np.ndarray, "P X B"]
    chosen: int
    late: Float[np.ndarray, "P B"]


def retained_positions(
    model: Any, params: PyTree[Any], tokens: Int[np.ndarray, "B T"], *, share: float = 0.2, slices: int = 16
) -> RetainedPositions:
    """Which tokens of a prompt each policy retains (NaCl, Fig. 2; AhaKV, Fig. 2, 5 and 6).

    The papers' claim: accumulated attention (H2O) keeps the beginning, the last row's attention (TOVA, the papers'
    MSRNN) the end, and NaCl and AhaKV spread over the prompt.

    Args:
      model, params: the model.
      tokens: prompts of one length.
      share: the budget as a share of the prompt.
      slices: parts of the prompt for the profile.
    """
    T = tokens.shape[1]
    (budget,) = budgets_of((share,), T, most=T).tolist()
    names = ("StreamingLLM", "H2O", "TOVA", "RoCo", "SnapKV", "NaCl", "AhaKV")
    keeps, _ = decide(model, params, tokens, budget, names)
    kept = np.stack([k[:, 0].reshape(-1, T) for k in keeps])
    profile = np.stack([by_slice(k.mean((0, 2)), slices).T for k in keeps])
    chosen = T - budget // 2
    count = lambda k: np.maximum(k.sum((0, 2, 3)), 1)
    late = np.stack([k[..., chosen // 2 : chosen].sum((0, 2, 3)) / count(k[..., :chosen]) for k in keeps])
    return RetainedPositions(names, budget, len(keeps[0]), kept, profile, chosen, late)


def plot_retained_positions(d: RetainedPositions) -> Figure:
    """A map for every method, and beside it the share of every slice that is kept."""
    P, Y, T = d.kept.shape
    figure, grid = canvas(2, P, width=5.6, height=1.05, sharex=True, width_ratios=(2.2, 1))
    slices = d.profile.shape[1]
    middle = (np.arange(slices) + 0.5) * T / slices
    late = d.late.mean(-1)
    for i, (left, right) in enumerate(grid):
        left.grid(False)
        cmap = ListedColormap(["white", COLOURS[0]])
        left.imshow(d.kept[i], cmap=cmap, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        for y in range(Y // d.num_layers, Y, Y // d.num_layers):
            left.axhline(y - 0.5, color="0.6", linewidth=0.6)
        left.set_yticks([])
        left.set_ylabel(d.methods[i], rotation=0, ha="right", va="center")
        right.bar(middle, 100 * d.profile[i].mean(-1), 0.85 * T / slices, color=COLOURS[0])
        right.axhline(100 * d.budget / T, color=COLOURS[1], linewidth=1.2)
        right.axvline(d.chosen, color="black", linestyle=":", linewidth=1.2)
        right.set(ylim=(0, 105), yticks=[0, 50, 100])
        note = f"left of the dots, {percent(late[i])} in the later half"
        right.annotate(note, (0.02, 0.8), xycoords="axes fraction", fontsize="x-small")
    grid[0, 0].set_title("one prompt: kept tokens are blue; rows are kv heads, layer 0 on top", fontsize="small")
    grid[0, 1].set_title("kept of every slice, %, all prompts (line: budget)", fontsize="small")
    for axes in grid[-1]:
        axes.set_xlabel("position in the prompt, tokens")
    by_name = dict(zip(d.methods, late, strict=True))
    text = (
        f"Of what they keep before the last {T - d.chosen} tokens, "
        f"H2O has {percent(by_name['H2O'])} in the later half,\n"
        f"TOVA {percent(by_name['TOVA'])}, NaCl {percent(by_name['NaCl'])}, AhaKV {percent(by_name['AhaKV'])}"
    )
    return message(figure, text, f"NaCl, Fig. 2; AhaKV, Fig. 2, 5, 6; budget {d.budget} of {T} tokens")


# --- AhaKV, Figure 2d ---


@dataclasses.dataclass(frozen=True)
class ValuePrior:
    """AhaKV's scores without and with the value prior.

    Attributes:
      length: tokens of a prompt.
      budget: tokens that the softmax is sized for.
      thresholds: shares of a head's largest score.
      above: the share of tokens whose score exceeds such a share, (without, with) the value prior.
    """

    length: int
    budget: int
    thresholds: Float[np.ndarray, "Z"]
    above: Float[np.ndarray, "2 Z B"]


def value_prior(model: Any, params: PyTree[Any], tokens: Int[np.ndarray, "B T"], *, share: float = 0.2) -> ValuePrior:
    """How many tokens have large scores, without and with the value prior (AhaKV, Fig. 2d)."""
    T = tokens.shape[1]
    (budget,) = budgets_of((share,), T, most=T).tolist()
    _, scores = decide(model, params, tokens, budget, ("AhaKV without a prior", "AhaKV"))
    thresholds = np.geomspace(1e-4, 1.0, 33)
    relative = [s / s.max(-1, keepdims=True) for s in scores]
    above = [np.stack([(s > t).mean((0, 2, 3)) for t in thresholds]) for s in relative]
    return ValuePrior(T, budget, thresholds, np.stack(above))


def plot_value_prior(d: ValuePrior) -> Figure:
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


@dataclasses.dataclass(frozen=True)
class ScoresByStep:
    """The scores that methods rank by while text is generated.

    Attributes:
      methods: names.
      length: tokens of a prompt.
      budget: tokens that NaCl's proxies and AhaKV's softmax are sized for.
      steps: tokens generated so far, 0 after the prompt.
      score: every slice's mean score over that of the text so far, the mean over layers and kv heads.
    """

    methods: tuple[str, ...]
    length: int
    budget: int
    steps: Int[np.ndarray, "M"]
    score: Float[np.ndarray, "P M X B"]


def scores_by_step(
    model: Any,
    params: PyTree[Any],
    tokens: Int[np.ndarray, "B T"],
    *,
    share: float = 0.2,
    steps: Sequence[int] = range(0, 65, 8),
    slices: int = 32,
) -> ScoresByStep:
    """Eviction scores by position at steps of generating (NaCl, Fig. 7 to 9; AhaKV, Fig. 2).

    The text is what the full cache generates, greedily, and all of it has scores: nothing is evicted. H2O sums the rows
    of the whole text so far, TOVA (NaCl's MSRNN) has the newest, NaCl and AhaKV sum those at the text's end.
    """
    T, last, names = tokens.shape[1], max(steps), ("H2O", "TOVA", "NaCl", "AhaKV")
    (budget,) = budgets_of((share,), T, most=T).tolist()
    more = kvjax.generate(model, params, tokens, max_new_tokens=last, eos_ids=()).tokens
    text = np.concatenate([tokens, np.asarray(more, tokens.dtype)], axis=1)
    each = [decide(model, params, text[:, : T + n], budget, names, pad=last - n)[1] for n in steps]
    found = [by_slice(s / s.mean(-1, keepdims=True), slices).mean((1, 3)).swapaxes(1, 2) for s in each]
    return ScoresByStep(names, T, budget, np.array(steps), np.stack(found, axis=1))


def plot_scores_by_step(d: ScoresByStep) -> Figure:
    """A map for every method: positions to the right, steps downwards."""
    figure, (panels,) = canvas(len(d.methods), width=3.6, height=3.6, sharey=True)
    score = d.score.mean(-1)
    norm, image = LogNorm(max(score.min(), 1e-3), score.max()), None
    for axes, name, here in zip(panels, d.methods, score, strict=True):
        axes.grid(False)
        image = axes.imshow(here, norm=norm, cmap="cividis", aspect="auto", extent=(0, 100, len(here) - 0.5, -0.5))
        axes.set(title=name, xlabel="position, % of the text so far", yticks=range(len(here)), yticklabels=d.steps)
    panels[0].set_ylabel("tokens generated")
    figure.colorbar(image, ax=panels, label="mean score, relative to the text's")
    over = score[:, :, 1] / score[:, :, -2]
    parts = [f"{name} {x[0]:.2g} to {x[-1]:.2g}" for name, x in zip(d.methods, over, strict=True)]
    text = f"Early tokens' score over that of late ones, from the prompt to step {d.steps[-1]}:\n{', '.join(parts)}"
    return message(
        figure, text, f"NaCl, Fig. 7 to 9; AhaKV, Fig. 2; budget {d.budget} of {d.length} tokens, nothing evicted"
    )


# --- Keyformer, Figure 4 ---


@dataclasses.dataclass(frozen=True)
class ScoreDistributions:
    """Attention that rows behind a prompt give to its tokens, with the full cache and with what methods keep of it.

    Attributes:
      methods: names, the full cache first.
      length: tokens of the prompt.
      budget: live tokens a kv head.
      score: attention a row by rank, the largest first, the mean over layers and query heads.
      factor: what a token that stays gets over what the full cache gave it, 10 %, 50 % and 90 % of all.
    """

    methods: tuple[str, ...]
    length: int
    budget: int
    score: Float[np.ndarray, "P T B"]
    factor: Float[np.ndarray, "P 3 B"]


def score_distributions(
    model: Any, params: PyTree[Any], tokens: Int[np.ndarray, "B T"], *, share: float = 0.5, rows: int = 32
) -> ScoreDistributions:
    """Attention by rank, with the full cache and with half of it (Keyformer, Fig. 4).

    Rows are those of the last tokens, with the full cache's queries (Eq. 2). Where tokens are evicted after the prompt,
    a row gives to those that stay what the others would have had (Eq. 3).
    """
    T, names = tokens.shape[1] - rows, ("StreamingLLM", "H2O", "Keyformer")
    (budget,) = budgets_of((share,), T, most=T).tolist()
    prompt = tokens[:, :T]
    keep = decide(model, params, prompt, budget, names)[0]
    found = analysis.trace(analysis.read(model, params, prompt, tokens[:, T:]))
    p, own = (np.asarray(x, np.float64).swapaxes(0, 1) for x in (found.attention, found.own_mass))
    stay = np.repeat(np.concatenate([np.ones_like(keep[:1]), keep]), p.shape[2] // keep.shape[3], axis=3)
    left = (p * s[..., None, :] for s in stay)
    means = np.stack([(x / (x.sum(-1) + own)[..., None]).mean(3) for x in left])
    gain = np.where(stay, means / np.maximum(means[0], np.finfo(np.float32).tiny), np.nan)
    factor = np.nanquantile(gain, (0.1, 0.5, 0.9), axis=(1, 3, 4)).swapaxes(0, 1)
    score = -np.sort(-means, axis=-1).mean((1, 3)).swapaxes(1, 2)
    return ScoreDistributions(("full cache", *names), T, budget, score, factor)


def plot_score_distributions(d: ScoreDistributions) -> Figure:
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


@dataclasses.dataclass(frozen=True)
class TokenSurvival:
    """How many tokens stay somewhere.

    Attributes:
      methods: names.
      budgets: shares of a prompt that each kv head keeps.
      num_heads, num_layers: kv heads of a layer, and layers.
      in_a_head, in_a_layer: the share of the prompt's tokens that stay in some head of a layer, the mean over layers,
        and in some layer.
    """

    methods: tuple[str, ...]
    budgets: tuple[float, ...]
    num_heads: int
    num_layers: int
    in_a_head: Float[np.ndarray, "P C B"]
    in_a_layer: Float[np.ndarray, "P C B"]

    def if_independent(self, heads: int) -> Float[np.ndarray, "C"]:
        r"""The probability that one of so many heads keeps a token, where each keeps any alike: $1 - (1 - C)^h$."""
        return 1 - (1 - np.array(self.budgets)) ** heads


def token_survival(
    model: Any,
    params: PyTree[Any],
    tokens: Int[np.ndarray, "B T"],
    *,
    budgets: tuple[float | int, ...] = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5),
) -> TokenSurvival:
    """Tokens that stay in some head, and in some layer, beside independent heads (NaCl, section 6.4).

    The paper's claim: with 32 heads that each keep 20 %, a token stays in one of them with 99.92 %. That is of heads
    which draw alone; heads that rank by attention choose the same tokens.

    Args:
      model, params: the model.
      tokens: prompts of one length.
      budgets: shares of the prompt, or tokens (int).
    """
    T, names = tokens.shape[1], ("NaCl", "H2O", "SnapKV")
    whole = budgets_of(budgets, T, most=T).tolist()
    each = [decide(model, params, tokens, n, names)[0] for n in whole]
    kept = np.stack(each, axis=1)
    _, _, L, _, K, _ = kept.shape
    return TokenSurvival(names, tuple(n / T for n in whole), K, L, kept.any(4).mean((2, 4)), kept.any((2, 4)).mean(-1))


def plot_token_survival(d: TokenSurvival) -> Figure:
    """Survival against the budget, in a layer and in the model."""
    figure, ((left, right),) = canvas(2, width=5.4, height=4.0, sharey=True)
    for axes, found, heads in ((left, d.in_a_head, d.num_heads), (right, d.in_a_layer, d.num_heads * d.num_layers)):
        for i, name in enumerate(d.methods):
            axes.plot(d.budgets, 100 * found[i].mean(-1), label=name, **style(i))
        axes.plot(d.budgets, 100 * d.if_independent(heads), color="0.4", linestyle=":", label="independent heads")
        axes.set(xscale="log", xlabel="budget, share of the prompt", ylim=(0, 103))
        axes.set_xticks(d.budgets, [percent(budget) for budget in d.budgets], minor=False)
        axes.minorticks_off()
    left.set(ylabel="tokens that stay, %", title=f"in some of a layer's {d.num_heads} kv heads")
    right.set_title(f"in some of {d.num_layers} layers")
    right.legend(frameon=False)
    at = len(d.budgets) // 2
    kept, alone = percent(float(d.in_a_head[0, at].mean())), percent(float(d.if_independent(d.num_heads)[at]))
    text = f"At {percent(d.budgets[at])}, NaCl keeps {kept} of the tokens in some head,\nindependent heads {alone}"
    return message(figure, text, "NaCl, section 6.4")
