"""NaCl: proxy tokens and random eviction (Chen et al., arXiv 2408.03675)."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from kvjax.algebra import shared_layers
from kvjax.cache.context import Phase
from kvjax.eviction import Evict
from kvjax.pallas_kernels.values import a, checked, flag, number, one_of, optional, settle, tokens
from kvjax.policy import Policy
from kvjax.scoring.protect import Protect
from kvjax.scoring.scores import LayerMean, Proxies, Score
from kvjax.scoring.select import TopKThenRandom
from kvjax.scoring.stats import FirstAndLastRows, LastRows, Measurement, Observe, SeesAll, Slots
from kvjax.sizes.budget import Above, Count, Less, Ratio, Tokens, as_budget, as_count, counted, of_budget
from kvjax.sizes.schedule import after_prefill, every

# Table 4, percent of the prompt: budget, protected proxies, scoring-only proxies, kept at random.
_TABLE_4 = np.array([[10.0, 1.0, 3.0, 7.0], [20.0, 2.0, 18.0, 12.0], [30.0, 1.5, 20.0, 18.0]])


@dataclasses.dataclass(frozen=True)
class Table4(Count):
    """NaCl's Table 4 between its rows: the four shares are linear in the budget, and in proportion outside 10 to 30 %.

    Each share is rounded down once, for itself: that of a budget which is a share of the prompt is not made from the
    whole tokens of that budget.

    Attributes:
      which: "protect" (proxies that stay), "rows" (all proxies) or "random" (tokens kept by the draw).
      budget: the budget.
    """

    which: Literal["protect", "rows", "random"]
    budget: Count

    def __post_init__(self):
        one_of("Table4.which", self.which, "protect", "rows", "random")
        settle(self, budget=counted)

    def table(self, prompt_length: np.ndarray, budget: np.ndarray) -> np.ndarray:
        """The count for every prompt length."""
        del budget
        n = np.maximum(prompt_length, 1)
        if isinstance(self.budget, Ratio):
            percent = np.full(n.shape, 100.0 * self.budget.share)
        else:
            percent = 100.0 * self.budget.table(prompt_length, prompt_length) / n
        inside = np.clip(percent, 10.0, 30.0)
        share = lambda column: np.interp(inside, _TABLE_4[:, 0], _TABLE_4[:, column]) * percent / inside
        protect, scoring, random = share(1), share(2), share(3)
        value = {"protect": protect, "rows": protect + scoring, "random": random}[self.which]
        tokens = np.floor(value * n / 100.0 + 1e-9).astype(np.int64)
        return np.maximum(tokens, 1) if self.which == "rows" else tokens


@dataclasses.dataclass(frozen=True)
class ProxiesByIndex(Proxies):
    """Proxies where query head g alone judges kv head g, whichever kv head it reads: the released code's index (D-19).

    `of` asks for every query head.
    """

    def __post_init__(self):
        settle(self, of=a(Observe), interval=tokens(1))

    @property
    def decodes(self) -> bool:
        """See `Score`; the released code evicts nothing while generating."""
        return False

    def observe(self, phase: Phase) -> tuple[Measurement, ...]:
        """See `Score`."""
        return (self.of,) if phase == "prefill" else ()

    def update(self, slots: Slots) -> Any:
        """What a query head gave to the tokens of its own kv head, by position, for the kv head of its number."""
        memory, kv, stats, ctx = slots.memory, slots.kv, slots.stats, slots.ctx
        if ctx.phase == "decode":
            return memory
        received = stats[self.of]
        B, N, _ = received.shape
        K, num_positions = kv.pos.shape[1], ctx.site.prompt_len + ctx.site.max_new_tokens
        read = jnp.arange(K) // (N // K)  # the kv head that query head g reads
        batch, head = jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None]
        pos = jnp.where(kv.live, kv.pos, num_positions)
        table = jnp.zeros((B, K, num_positions), received.dtype)
        table = table.at[batch, head, pos[:, read]].add(received[:, :K], mode="drop")
        return table.at[batch, head, pos].get(mode="fill", fill_value=0)


def nacl(
    budget: int | float | Count,
    *,
    protect: int | float | Count | None = None,
    proxies: int | float | Count | None = None,
    random: int | float | Count | None = None,
    sinks: int = 0,
    first_proxies: int | float | Count = 0,
    random_pool: Literal["rest", "all"] = "rest",
    random_distribution: Literal["softmax", "normalised", "uniform"] = "softmax",
    random_temperature: float = 1.0,
    head_mode: Literal["headwise", "layer", "global"] = "headwise",
    proxy_causal: bool = True,
    decode_every: int | None = None,
    decode_rows: Literal["row", "interval"] = "row",
    min_len: int = 0,
    group: Literal["mean", "max", "sum"] = "mean",
    compat: Literal["nacl_headbug"] | None = None,
) -> Policy:
    r"""Keeps what the proxies at the end of the prompt attend to, and a random sample of the rest.

    $S_j = \sum_{i \in P} p_{ij}$ over the proxy rows. Of the budget, some proxies stay (`protect`), `random` tokens are
    drawn without replacement from softmax(S) independently in every layer and head, and the rest are the best by $S$.
    Once, layer by layer, right after each layer has read the prompt; the ablation "without global eviction", which
    evicts step by step, reads it in blocks of one token, `prefill(..., block=1)`.

    The shares are those of Table 4, interpolated between its rows (10, 20 and 30 % of the prompt) and scaled outside.
    The released code uses other shares (D-17, `nacl_llama3`), draws from what the proxy stage left where the paper's
    formula draws from all (D-15), lets proxies see later proxies (D-18), never evicts while generating (D-16), and
    judges kv head g by query head g (D-19, `compat`; here `group` combines the heads of a group instead).

    Args:
      budget: live tokens a kv head and layer.
      protect: proxies that stay.
      proxies: all proxy rows, at the end of the prompt.
      random: tokens kept by the draw; 0 is the ablation "without random eviction". A `random` of the whole budget less
        `protect` is the one "without proxies".
      sinks: first tokens that stay.
      first_proxies: proxy rows at the beginning too, for prompts whose question stands anywhere. Of a prompt that is
        read in blocks they judge those that hold them.
      random_pool, random_distribution, random_temperature: see `TopKThenRandom`; "uniform" is the ablation without
        probability sampling.
      head_mode: "layer" averages scores over the heads of a layer and draws once, "global" does so for all layers
        together (`shared_layers`): the ablation without head-wise eviction, of more and more uniform decisions.
      proxy_causal: False lets proxies see later tokens.
      decode_every: evict at every so many decode steps, with the step's own row as proxy; None keeps all new tokens.
      decode_rows: "interval" takes all rows since the last eviction as proxies.
      min_len: prompts no longer than this are left alone (2048 in the released code).
      group: how a group's query heads are combined.
      compat: "nacl_headbug" lets query head g alone judge kv head g, as the released code does.
    """
    one_of("head_mode", head_mode, "headwise", "layer", "global")
    one_of("decode_rows", decode_rows, "row", "interval")
    one_of("compat", compat, None, "nacl_headbug")
    if decode_rows == "interval" and decode_every is None:
        raise ValueError("decode_rows='interval' says nothing without evictions while decoding; give decode_every=")
    min_len = checked(tokens(), "min_len", min_len)
    decode_every = checked(optional(tokens(1)), "decode_every", decode_every)
    proxy_causal = checked(flag, "proxy_causal", proxy_causal)
    count = as_budget(budget)
    protect = Table4("protect", count) if protect is None else as_count(protect, "protect")
    proxies = Table4("rows", count) if proxies is None else of_budget(as_count(proxies, "proxies"), count)
    first_proxies = of_budget(first_proxies, count)
    random = Table4("random", count) if random is None else as_count(random, "random")
    plain = as_count(first_proxies, "first_proxies") == Tokens(0)
    rows = LastRows(proxies) if plain else FirstAndLastRows(first_proxies, proxies)
    softmax = None if proxy_causal else SeesAll()
    score: Score = Proxies(
        Observe(rows, group=group, softmax=softmax), decode_every or 1 if decode_rows == "interval" else 1
    )
    if compat == "nacl_headbug":
        score = ProxiesByIndex(Observe(rows, group=None, softmax=softmax))
    together = head_mode != "headwise"
    if together:
        score = LayerMean(score)
    policy = Evict(
        score,
        Above(count, min_len) if min_len else budget,
        protect=Protect(sinks, protect),
        when=after_prefill() if decode_every is None else every(decode_every),
        select=TopKThenRandom(random, random_pool, random_distribution, random_temperature, shared=together),
    )
    return shared_layers(policy) if head_mode == "global" else policy


def nacl_llama3(budget: float = 0.2, **options: Any) -> Policy:
    """The released code's shares (D-17): 256 sinks, 1 % proxies of which 256 are not kept, 7 % random of 20 %.

    The shares scale with `budget`. Below 25,700 tokens the code's own slices come out empty; here the sinks are
    all that is protected, and prompts of `min_len` tokens are left alone, as is one whose share is less than the sinks.

    Args:
      budget: share of the prompt that is kept.
      **options: of `nacl`.
    """
    budget = checked(number("(0, 1]", "a share of the prompt lies in (0, 1]"), "budget", budget)
    defaults: dict[str, Any] = {
        "sinks": 256,
        "proxies": 0.01,
        "protect": Less(Ratio(0.01), Tokens(256)),
        "random": 0.07 * budget / 0.2,
        "min_len": 2048,
    }
    return nacl(budget, **(defaults | options))
