"""Methods that accumulate attention, of prompt and generated text alike."""

from kvjax.budgets import STEP, Combined, Of, Schedule, Share
from kvjax.compose.evict import Evict
from kvjax.contract import Amount, Cosine, Count, Odd, Positive, Proportion, Size
from kvjax.decide.select import ThenRandom
from kvjax.observe import Rows
from kvjax.scores.attention import (
    Accumulated,
    History,
    LastRows,
    Mean,
    Recurrence,
    SparedByDeviation,
    ValuePrior,
    Votes,
)
from kvjax.scores.blends import Blend, LayerMean, Logarithm, Pooled
from kvjax.scores.keys import Redundancy, ValueRange
from kvjax.scores.softmax import EntropyScaled, Noisy


def h2o(budget: Count, *, recent: Count = Share(0.5)) -> Evict:
    r"""Keeps the most attended tokens, and recent ones (H2O, Zhang et al., arXiv 2306.14048).

    $S_j = \sum_i p_{ij}$ over all rows. The prompt is evicted once, from its complete sums. Then every step adds its
    row and evicts one token.

    Args:
      budget: live tokens a kv head and layer, recent ones included.
      recent: last tokens that stay; half of the budget in the paper.
    """
    return Evict(Accumulated(), budget, 0, recent, when=STEP)


def key_attention(budget: Count) -> Evict:
    r"""Keeps the most attended tokens alone: H2O without recent ones, a baseline (Keyformer, arXiv 2403.09054, 2.3).

    $S_j = \sum_i p_{ij}$ over all rows.

    Args:
      budget: live tokens a kv head and layer.
    """
    return h2o(budget, recent=0)


def mas(budget: Count) -> Evict:
    r"""Evicts the token of the smallest mean attention (MAS of RoCo, Ren and Zhu, arXiv 2402.06262, section 4.1).

    $S_j = \mathrm{acc}_j / \mathrm{cnt}_j$ over the rows that could see token $j$, its own included, as in the code.

    Args:
      budget: live tokens a kv head and layer.
    """
    return Evict(Mean(), budget, when=STEP)


def aqas(budget: Count, *, recent: Count = Share(0.5)) -> Evict:
    r"""Evicts the token that the fewest rows gave more than average (a baseline of RoCo, arXiv 2402.06262, section 3).

    $S_j$ is the number of rows $i$ with $p_{ij} > 1 / |\mathrm{visible}(i)|$.

    Args:
      budget: live tokens a kv head and layer, recent ones included.
      recent: last tokens that stay.
    """
    return Evict(Accumulated(Rows(element="above")), budget, 0, recent, when=STEP)


def roco(budget: Count, *, scope: Count = Share(0.5)) -> Evict:
    r"""Evicts the smallest mean attention among tokens whose attention varies little (RoCo, arXiv 2402.06262).

    $\mu_j = \mathrm{acc}_j / \mathrm{cnt}_j$ ranks. The `scope` tokens of the largest deviation $\sigma_j = \sqrt{\max(
    \mathrm{acc}^{(2)}_j / \mathrm{cnt}_j - \mu_j^2, 0)}$ stay (section 4.2). So do the last 10, as in the code, or a
    quarter of a small budget; they count in the scope.

    Args:
      budget: live tokens a kv head and layer.
      scope: tokens of the largest deviation that stay; half of the budget in the paper.
    """
    recent = Combined("least", (10, Share(0.25)))
    return Evict(SparedByDeviation(size=scope), budget, 0, recent, when=STEP)


def tova(budget: Count) -> Evict:
    r"""Evicts the token that the newest row attends to least (TOVA, Oren et al., arXiv 2401.06104).

    $S_j = p_{nj}$ of the newest row $n$, averaged over all heads of the layer, which keep the same tokens.

    Args:
      budget: live tokens a kv head and layer.
    """
    return Evict(LayerMean(Votes(1, prompt_only=False)), budget, when=STEP)


def keyformer(budget: Count, *, recent: Count = Share(0.3), tau: tuple[Positive, Positive] = (1.0, 2.0)) -> Evict:
    r"""Keeps what a noisy softmax with a growing temperature attends to (Keyformer, Adnan et al., arXiv 2403.09054).

    $S_j = \sum_i \mathrm{softmax}((x_{ij} + \zeta) / \tau_t)$ over all rows (Eq. 8 to 10) with Gumbel noise
    $\zeta$ for every row and key; attention itself keeps the model's softmax.

    Args:
      budget: live tokens a kv head and layer, recent ones included; 0.6 of the prompt in the paper.
      recent: last tokens that stay.
      tau: temperatures of the prompt and of the last new token.
    """
    return Evict(Accumulated(Rows(softmax=Noisy(tau))), budget, 0, recent, when=STEP)


def ahakv(budget: Count, *, recent: Count = 32, kernel: Odd = 7) -> Evict:
    r"""Keeps what recent rows attend to by a softmax of constant entropy, weighted by values (AhaKV, arXiv 2506.03762).

    $\hat F_j = \bar\gamma_j \sum_i \mathrm{SG}(QK^\top)_{ij}$ over the prompt's last `recent` rows. SG multiplies raw
    products by $\sqrt{2 \ln(i / B) / d}$ with $B$ the budget (Eq. 12); $\bar\gamma$ are pooled squared norms of values
    (Eq. 13). Every step adds its row to $\hat F$ and evicts one token.

    Args:
      budget: live tokens a kv head and layer, recent ones included.
      recent: last tokens, whose rows vote and which stay.
      kernel: width of the pooling.
    """
    last = recent if isinstance(recent, int) else Of(recent, budget)
    score = ValuePrior(Rows(last, softmax=EntropyScaled(budget)), kernel=kernel)
    return Evict(score, budget, 0, recent, when=STEP)


def scissorhands(budget: Count, *, history: Size = 400, recent: Count = 10, drop: Count = Share(0.5)) -> Evict:
    r"""Evicts many tokens at once: those that few of the last rows gave more than average (arXiv 2305.17118).

    $S_j$ is the number of the last `history` rows $i$ with $p_{ij} > 1 / |\mathrm{visible}(i)|$ (Liu et al., Algorithm
    2). A cache is cut when a new token exceeds its budget.

    Args:
      budget: the most live tokens a kv head and layer, recent ones included.
      history: rows that count.
      recent: last tokens that stay.
      drop: tokens that go at once; half of the budget in the paper.
    """
    return Evict(History(history), budget, 0, recent, when=Schedule(over=1, drop=drop))


def r_kv(
    budget: Count,
    *,
    importance: Proportion = 0.1,
    window: Size = 8,
    kernel: Odd = 7,
    threshold: Cosine = 0.5,
    buffer: Size = 128,
) -> Evict:
    r"""Keeps what the last rows attend to, and of what repeats itself the newest (R-KV, Cai et al., arXiv 2505.24133).

    $Z_j = \lambda \, \mathrm{maxpool}(\bar p)_j - (1 - \lambda) R_j$ with $\bar p$ the mean attention of the last rows
    and $R$ the redundancy of keys, both shares. A cache grows by `buffer` tokens before it is cut.

    Args:
      budget: live tokens a kv head and layer after an eviction, the window included.
      importance: $\lambda$.
      window: last tokens, whose rows vote and which stay.
      kernel: width of the pooling.
      threshold: keys resemble each other where their cosine is above it.
      buffer: tokens by which a cache grows.
    """
    parts = Pooled(LastRows(window), "max", kernel), Redundancy(threshold)
    return Evict(Blend(parts, (importance, importance - 1.0)), budget, 0, window, when=Schedule(over=buffer))


def vase(budget: Count, *, values: Count = Share(0.25), window: Size = 64, kernel: Odd = 5, sinks: Amount = 4) -> Evict:
    """Keeps values of a wide range, and draws the others by the attention of the last rows (VaSE, arXiv 2606.03928).

    A value's range is that of its channels. The other places are drawn without replacement, in proportion to the mean
    attention of the window's rows, averaged over neighbours. A cache grows by the window before it is cut. Every slot
    remembers a number for each row of the window.

    Args:
      budget: live tokens a kv head and layer after an eviction, the window included.
      values: tokens of the widest values that stay, sinks included; a quarter of the budget in the paper.
      window: last tokens, whose rows count and which stay.
      kernel: width of the average.
      sinks: first tokens that stay.
    """
    score = Logarithm(Pooled(LastRows(window), "avg", kernel))
    drawn = ThenRandom(Combined("less", (Share(1.0), values)), first=ValueRange(), less_recent=True)
    return Evict(score, budget, sinks, window, when=Schedule(over=window), select=drawn)


def lazy_eviction(budget: Count, *, threshold: Proportion = 1e-4, window: Size = 128) -> Evict:
    r"""Evicts tokens whose attention has not returned for longer than it ever took (LazyEviction, arXiv 2506.15969v3).

    $S_j = 2 \sigma(-1 - (t - s_j) / m_j) + 2 \sigma(1 - m_j)$ with $t - s_j$ the steps since token $j$ got more than
    `threshold`, and $m_j$ the longest interval between two such steps: the released code's score. Rows of the prompt do
    not count. It evicts at every `window`-th decode step, and not before.

    Args:
      budget: live tokens a kv head and layer after an eviction, the window included.
      threshold: a probability, above which a row counts.
      window: last tokens that stay, and steps between evictions.
    """
    return Evict(Recurrence(threshold), budget, 0, window, when=Schedule(prefill=False, every=window))
