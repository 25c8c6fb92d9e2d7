"""AhaKV: adaptive holistic attention (Gu et al., arXiv 2506.03762)."""

from typing import Literal

from kvjax.eviction import Evict
from kvjax.pallas_kernels.values import checked, flag, one_of
from kvjax.scoring.protect import Protect
from kvjax.scoring.scores import Accumulated, Score, ValuePrior
from kvjax.scoring.stats import AllRows, EntropyScaled, LastRows, Observe
from kvjax.sizes.budget import Count, Less, as_count, of_budget
from kvjax.sizes.schedule import every_step


def ahakv(
    budget: int | float | Count,
    *,
    recent: int | Count = 32,
    rows: int | None = None,
    recent_accumulation: bool = True,
    step_gain_softmax: bool = True,
    value_prior: bool = True,
    sg_k: Literal["budget", "selected"] = "budget",
    sg_apply: Literal["raw", "scaled"] = "raw",
    sg_floor: float | None = None,
    sg_count: Literal["position", "cache"] = "position",
    pool_kernel: int = 7,
    pool_target: Literal["value_norm", "score", "both"] = "value_norm",
    prior_each_step: bool = False,
    group: Literal["mean", "max", "sum"] = "mean",
) -> Evict:
    r"""Recent rows vote, with a softmax of constant entropy, weighted by values.

    $F_j = \sum_i \mathrm{SG}(QK^\top)_{ij}$ over the prompt's last rows (recent accumulation, RA), where SG-softmax
    multiplies raw dot products by $\lambda_i = \sqrt{2 \ln(i/k) / d}$ (SGS, Eq. 12); $\hat F = \bar\gamma F$ with the
    pooled squared value norms (VPE, Eq. 13). Recent tokens stay. Every decode step adds its row to $\hat F$ and evicts
    one. Of a prompt in blocks, the last rows of every block vote anew. There is no released code. Where text and
    Algorithm 1 disagree: `recent` rows vote, not one more (D-27); lambda acts on raw products (D-28); rows with
    $i \le k$ keep the standard softmax (D-29); values are pooled with kernel 7 (D-30); $\hat F$ selects (D-31); $i$
    counts tokens seen, not live ones (D-32).

    Args:
      budget: live tokens a kv head and layer, recent ones included.
      recent: protected last tokens.
      rows: voting rows; as many as `recent` if None.
      recent_accumulation: False lets all rows vote (ablation RA).
      step_gain_softmax: False uses the model's softmax (ablation SGS).
      value_prior: False selects by F (ablation VPE).
      sg_k: k is the "budget", or the tokens "selected" beside the recent ones.
      sg_apply, sg_floor, sg_count: see `EntropyScaled`.
      pool_kernel, pool_target, prior_each_step: see `ValuePrior`.
      group: how a group's query heads are combined.
    """
    one_of("sg_k", sg_k, "budget", "selected")
    recent_accumulation = checked(flag, "recent_accumulation", recent_accumulation)
    step_gain_softmax = checked(flag, "step_gain_softmax", step_gain_softmax)
    value_prior = checked(flag, "value_prior", value_prior)
    count = as_count(budget, "budget")
    last = of_budget(recent, count)
    k = count if sg_k == "budget" else Less(count, as_count(last, "recent"))
    softmax = EntropyScaled(k, sg_apply, sg_floor, sg_count) if step_gain_softmax else None
    voters = LastRows(last if rows is None else rows) if recent_accumulation else AllRows()
    of = Observe(voters, softmax=softmax, group=group)
    score: Score = ValuePrior(of, pool_kernel, pool_target, prior_each_step) if value_prior else Accumulated(of)
    return Evict(score, budget, protect=Protect(recent=recent), when=every_step())
